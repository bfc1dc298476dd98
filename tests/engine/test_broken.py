"""Broken samples within `data.max_broken`: they have no weight, and each is counted and named once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.core.errors import DataError
from accel_train.data.images.tars import list_samples
from accel_train.engine.broken import collate_readable
from accel_train.engine.loader import Reading, read_batches
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from tests.support.runs import events, losses, run, write_yaml
from tests.support.tars import NUM_IMAGES, PER_TAR, recipe_of_images, write_shards

BROKEN = (8, 23)
"""Sample 9 has damaged pixels after a whole header. The last tar is cut within sample 24."""
BATCH = 6


def break_shards(folder: Path) -> Path:
    path = write_shards(folder) / "1.tar"
    start, size = list_samples(path, "label")["spans"][BROKEN[0] % PER_TAR]
    content = bytearray(path.read_bytes())
    content[start + size // 2 : start + size] = bytes(size - size // 2)
    path.write_bytes(content)
    last = folder / "3.tar"
    last.write_bytes(last.read_bytes()[: sum(list_samples(last, "label")["spans"][-1]) - 100])
    return folder


def recipe(folder: Path, name: str, shards: Path, *, workers: int = 0, batch: int = BATCH, **data: Any) -> Any:
    """An epoch and a half with weights that do not move, so that the loss of a sample depends on its draw alone."""
    return recipe_of_images(
        folder,
        name,
        shards,
        data={"eval_fraction": 0, "shuffle": False, "num_workers": workers, **data},
        batch={"global_batch_size": batch},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0},
        schedule={"max_steps": NUM_IMAGES * 3 // 2 // batch},
    )


class Numbers:
    """Each sample is its number, and those of `broken` cannot be read."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def __getitem__(self, number: int) -> int:
        if number in self.broken:
            raise DataError(f"sample {number}")
        return number


def collate(samples: Any) -> dict[str, Any]:
    return {"numbers": torch.tensor(samples), "num_targets": len(samples)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_micro_batch_keeps_its_other_samples_and_one_without_any_is_filled_without_targets(workers: int) -> None:
    faults: set[str] = set()
    read = partial(collate_readable, Numbers(0, 1, 5, 8, 9), collate, 9)
    lists = iter([[4, 5, 6], [7], [8, 9], [5, 10]])
    numbers: Any = range(100)
    found = list(read_batches(numbers, read, lists, torch.device("cpu"), Reading(workers), faults))
    kept = [(batch["numbers"].tolist(), count) for batch, count in found]
    assert kept == [([4, 6], 2), ([7], 1), ([2], 0), ([10], 1)]
    assert faults == {"sample 5", "sample 8", "sample 9"}


def test_samples_that_are_all_broken_end_in_an_error() -> None:
    with pytest.raises(DataError, match="sample 2"):
        collate_readable(Numbers(*range(9)), collate, 2, [4])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_each_step_has_the_mean_loss_of_its_other_samples_on_any_number_of_processes(
    tmp_path: Path, processes: int, workers: int
) -> None:
    whole = write_shards(tmp_path / "whole")
    one_by_one = recipe(tmp_path, "single", whole, batch=1)
    run(write_yaml(tmp_path / "single.yaml", one_by_one))
    alone = losses(Path(one_by_one["output_dir"]))
    shards = break_shards(tmp_path / "broken")
    section = recipe(tmp_path, "run", shards, workers=workers, max_broken=2, eval=str(whole))
    run(write_yaml(tmp_path / "run.yaml", section), processes=processes)
    folder = Path(section["output_dir"])
    for step, loss in losses(folder).items():
        numbers = range((step - 1) * BATCH, step * BATCH)
        kept = [alone[number + 1] for number in numbers if number % NUM_IMAGES not in BROKEN]
        assert len(kept) == BATCH - (step in (2, 4, 6))
        assert loss == pytest.approx(sum(kept) / len(kept), rel=1e-5), step
    found = events(folder, "broken_sample")
    assert [each["step"] for each in found] == [2, 4]
    for each, name, member in zip(found, ("1.tar", "3.tar"), ("sample 3 (008.png)", "sample 6 (023.png)"), strict=True):
        assert each["message"].startswith(f"{shards / name}, {member}: ")


@pytest.mark.parametrize("processes", [1, 2])
def test_one_more_than_max_broken_stops_the_run_and_is_named_with_the_count(tmp_path: Path, processes: int) -> None:
    section = recipe(tmp_path, "run", break_shards(tmp_path / "broken"), max_broken=1)
    done = run(write_yaml(tmp_path / "run.yaml", section), processes=processes, expect=2)
    named = [line for line in done.stderr.splitlines() if "3.tar, sample 6 (023.png)" in line]
    assert len(named) == 1
    assert "broken sample 2, and data.max_broken is 1" in named[0]
    assert [each["step"] for each in events(Path(section["output_dir"]), "broken_sample")] == [2]


def test_without_max_broken_the_first_broken_image_is_an_error(tmp_path: Path) -> None:
    section = recipe(tmp_path, "run", break_shards(tmp_path / "broken"))
    done = run(write_yaml(tmp_path / "run.yaml", section), expect=2)
    assert "3.tar, sample 6 (023.png): the tar ends after" in done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_an_image_that_is_broken_at_the_start_is_never_held_out(tmp_path: Path, seed: int) -> None:
    shards = str(break_shards(tmp_path))
    data = ImageClassificationData(
        train=shards, eval_fraction=0.9, max_broken=1, split_seed=seed, label_names=("a", "b", "c")
    )
    sets = read_labelled_images(data)
    assert sets.eval is not None
    assert BROKEN[1] in sets.train.rows
    assert sorted([*sets.train.rows, *sets.eval.rows]) == list(range(NUM_IMAGES))


def test_tasks_that_do_not_count_broken_samples_refuse_the_setting(tmp_path: Path) -> None:
    section = recipe(tmp_path, "run", tmp_path)
    section |= {"task": "semantic-segmentation"}
    section["data"] |= {"train": "digit-scenes", "max_broken": 1}
    done = run(write_yaml(tmp_path / "run.yaml", section), expect=2)
    assert "max_broken" in done.stderr
