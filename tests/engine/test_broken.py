"""Broken samples within `data.max_broken`: they have no weight, and each is counted and named once."""

import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.core.errors import DataError
from accel_train.data.images.images import evenly_spaced
from accel_train.data.images.tars import TarImages, list_samples
from accel_train.data.order import DataOrder
from accel_train.engine import broken as broken_samples
from accel_train.engine.broken import collate_readable
from accel_train.engine.loader import Reading, read_batches
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from tests.support.annotated_images import (
    MODELS,
    SIZE,
    damaged,
    image_of,
    mask_of,
    recipe_of_annotated,
    write_folder,
    write_tars,
)
from tests.support.annotated_images import NUM_IMAGES as NUM_ANNOTATED
from tests.support.every_task import recipe_of
from tests.support.marks import slow
from tests.support.runs import events, losses, metrics, run, summary_of, train_recipe, write_yaml
from tests.support.tars import NUM_IMAGES, PER_TAR, pictures, recipe_of_images, write_shards, write_tar

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
    faults: dict[str, None] = {}
    read = partial(collate_readable, Numbers(0, 1, 5, 8, 9), collate, 9)
    lists = iter([[4, 5, 6], [7], [8, 9], [5, 10]])
    numbers: Any = range(100)
    found = list(read_batches(numbers, read, lists, torch.device("cpu"), Reading(workers), faults))
    kept = [(batch["numbers"].tolist(), count) for batch, count in found]
    assert kept == [([4, 6], 2), ([7], 1), ([2], 0), ([10], 1)]
    assert [*faults] == ["sample 5", "sample 8", "sample 9"]


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


def test_weighted_sources_may_have_broken_images_too(tmp_path: Path) -> None:
    shards = break_shards(tmp_path / "broken")
    sources = [{"source": str(shards / f"{number}.tar"), "weight": 0.5} for number in (1, 3)]
    section = recipe(tmp_path, "run", shards, max_broken=2)
    section["data"]["train"] = sources
    train_recipe(section)
    folder = Path(section["output_dir"])
    assert len(events(folder, "broken_sample")) == 2
    last = metrics(folder)[-1]
    assert [last[f"{name}/samples"] for name in (1, 3)] == [NUM_IMAGES * 3 // 4] * 2


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
    section = recipe_of("token-classification", tmp_path, data={"max_broken": 1})
    done = run(write_yaml(tmp_path / "run.yaml", section), expect=2)
    assert "max_broken" in done.stderr


def break_annotated(task: str, folder: Path) -> dict[int, str]:
    """Break two or three images in different ways; returns the words that name them, by number."""
    place, masks = folder / "images" if task == "semantic-segmentation" else folder, folder / "masks"
    (place / "005.jpg").write_bytes(damaged(image_of(5)))
    (place / "008.jpg").write_bytes(b"no image")
    broken = {5: str(place / "005.jpg"), 8: str(place / "008.jpg")}
    if masks.is_dir():
        (masks / "009.png").write_bytes(mask_of(9, SIZE - 1))
        broken[9] = str(masks / "009.png")
    return broken


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.parametrize("task", MODELS)
def test_masks_and_boxes_of_broken_samples_have_no_weight_either(
    tmp_path: Path, task: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = list[int]()

    def gather(faults: list[str]) -> list[str]:
        gathered.append(len(faults))
        return faults

    monkeypatch.setattr(broken_samples, "gather_object", gather)
    batch, path = 4, write_folder(task, tmp_path / "images")
    broken = break_annotated(task, path)
    section = recipe_of_annotated(
        task,
        tmp_path / "run",
        path,
        batch=batch,
        data={"max_broken": len(broken)},
        schedule={"max_steps": 2 * NUM_ANNOTATED // batch},
    )
    if processes > 1:
        monkeypatch.undo()
    found = [loss for loss, _ in train_recipe(section, processes)]
    # Two of the six steps met another one.
    assert processes > 1 or gathered == [1, len(broken)]
    for step in range(NUM_ANNOTATED // batch):
        kept = [number for number in range(step * batch, (step + 1) * batch) if number not in broken]
        alone = write_folder(task, tmp_path / f"kept {step}", kept)
        sections: dict[str, Any] = {"batch": len(kept), "schedule": {"max_steps": 1}}
        ((expected, _),) = train_recipe(recipe_of_annotated(task, tmp_path / f"run {step}", alone, **sections))
        assert found[step] == pytest.approx(expected, rel=1e-5)
        assert found[step + NUM_ANNOTATED // batch] == pytest.approx(expected, rel=1e-5)
    named = events(Path(section["output_dir"]), "broken_sample")
    assert [each["step"] for each in named] == [2, *[3] * (len(broken) - 1)]
    for each, words in zip(named, broken.values(), strict=True):
        assert words in each["message"]


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.parametrize("task", MODELS)
def test_one_more_broken_image_than_allowed_stops_all_processes_in_the_step_that_reads_it(
    tmp_path: Path, task: str, processes: int
) -> None:
    """The images that a start decodes are whole."""
    count = 70
    path = write_folder(task, tmp_path / "images", range(count))
    *_, first, second = sorted({*range(count)} - {*evenly_spaced(count, 64)})
    place = path / "images" if task == "semantic-segmentation" else path
    for number in (first, second):
        (place / f"{number:03d}.jpg").write_bytes(damaged(image_of(number)))
    sections: dict[str, Any] = {"data": {"max_broken": 1}, "schedule": {"max_steps": 20}}
    section = recipe_of_annotated(task, tmp_path / "run", path, batch=10, **sections)
    done = run(write_yaml(tmp_path / "run.yaml", section), processes=processes, expect=2)
    (error,) = [line for line in done.stderr.splitlines() if "broken sample 2, and data.max_broken is 1" in line]
    assert f"{second:03d}.jpg" in error
    assert [each["step"] for each in events(Path(section["output_dir"]), "broken_sample")] == [first // 10 + 1]


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.parametrize("task", MODELS)
def test_a_cut_tar_and_an_unreadable_image_in_another_have_no_weight(tmp_path: Path, task: str, processes: int) -> None:
    tars, image = write_tars(task, tmp_path / "tars", form=1), image_of(1)
    first, last = tars / "0.tar", tars / "2.tar"
    first.write_bytes(first.read_bytes().replace(image, bytes(len(image))))
    last.write_bytes(last.read_bytes().partition(image_of(11))[0] + image_of(11)[:100])
    data = {"max_broken": 2, **({"objects_column": "annotations"} if task == "object-detection" else {})}
    sections: dict[str, Any] = {"data": data, "schedule": {"max_steps": 3}}
    section = recipe_of_annotated(task, tmp_path / "run", tars, batch=4, **sections)
    found = [loss for loss, _ in train_recipe(section, processes)]
    for step, kept in enumerate(([0, 2, 3], [4, 5, 6, 7], [8, 9, 10])):
        alone = write_folder(task, tmp_path / f"kept {step}", kept)
        sections = {"batch": len(kept), "schedule": {"max_steps": 1}}
        ((expected, _),) = train_recipe(recipe_of_annotated(task, tmp_path / f"run {step}", alone, **sections))
        assert found[step] == pytest.approx(expected, rel=1e-5)
    named = events(Path(section["output_dir"]), "broken_sample")
    assert [each["step"] for each in named] == [1, 3]
    for each, words in zip(named, ("0.tar, sample 2 (001.jpg)", "2.tar, sample 4 (011.jpg)"), strict=True):
        assert words in each["message"]


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("task", MODELS)
def test_a_broken_evaluation_image_is_refused_by_name_as_early_as_it_is_read(
    tmp_path: Path, task: str, number: int
) -> None:
    """Of 70 images, a start decodes 64, and number 7 is not among them. Others are found by the evaluation."""
    count, train = 70, write_folder(task, tmp_path / "train")
    path = write_folder(task, tmp_path / "held", range(count))
    untried = sorted({*range(count)} - {*evenly_spaced(count, 64)})
    number = untried[0] if number else 0
    file = next(path.rglob(f"{number:03d}.jpg"))
    file.write_bytes(damaged(file.read_bytes()))
    data = {"eval": str(path), "max_broken": 5}
    sections: dict[str, Any] = {"data": data, "schedule": {"max_steps": 1}}
    section = recipe_of_annotated(task, tmp_path / "run", train, batch=4, **sections)
    with pytest.raises(DataError) as caught:
        train_recipe(section)
    assert file.name in str(caught.value)
    assert ("data.max_broken is for training samples" in str(caught.value)) == (number > 0)


@pytest.mark.slow
def test_21_000_images_in_1_000_tars_train_alike_with_one_unreadable_one_cut_and_one_slow_tar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many images are not looked at before training. The slow tar is read by two readers of one process."""
    per_tar, batch, shards, images = 21, 1_050, tmp_path / "shards", pictures()
    for number in range(1_000):
        members = [(number * per_tar + each, images[(number + each) % NUM_IMAGES]) for each in range(per_tar)]
        parts = [((f"{key:06d}.cls", b"%d" % label), (f"{key:06d}.png", png)) for key, (label, png) in members]
        write_tar(shards / f"{number:03d}.tar", chain(*parts))
    broken = {417 * per_tar + 4: ("417.tar", 4), 623 * per_tar + 20: ("623.tar", 20)}
    for name, place in broken.values():
        tar = shards / name
        start, size = list_samples(tar, "label")["spans"][place]
        content = tar.read_bytes()
        rest = b"" if place == per_tar - 1 else bytes(size // 2) + content[start + size :]
        tar.write_bytes(content[: start + size - size // 2] + rest)
    read, slow_reads = TarImages.content, tmp_path / "slow reads"

    def slowly(images: TarImages, index: int) -> bytes:
        if images.path.name == "812.tar":
            time.sleep(0.05)
            with slow_reads.open("ab") as file:
                file.write(b".")
        return read(images, index)

    found = {}
    for processes in (2, 1):
        section = recipe_of_images(
            tmp_path,
            f"run {processes}",
            shards,
            data={"eval_fraction": 0, "max_broken": 2, "num_workers": 2 if processes == 1 else 0},
            batch={"global_batch_size": batch},
            optimizer={"learning_rate": 1e-30, "weight_decay": 0},
            schedule={"max_steps": 20},
        )
        if processes == 1:
            monkeypatch.setattr(TarImages, "content", slowly)
        train_recipe(section, processes)
        folder = Path(section["output_dir"])
        found[processes] = losses(folder)
        assert summary_of(folder)["num_targets"] == 21_000 - len(broken)
        order = DataOrder(21_000, batch, section["seed"], True)
        steps = {step + 1: {*order.step_samples(step).tolist()} for step in range(20)}
        expected = sorted((step, number) for step, own in steps.items() for number in own & broken.keys())
        named = events(folder, "broken_sample")
        assert [each["step"] for each in named] == [step for step, _ in expected]
        for each, (_, number) in zip(named, expected, strict=True):
            name, place = broken[number]
            assert each["message"].startswith(f"{shards / name}, sample {place + 1} ({number:06d}.png): ")
    assert len(slow_reads.read_bytes()) == per_tar
    assert found[1] == pytest.approx(found[2], rel=1e-5)


@pytest.mark.parametrize("task", MODELS)
def test_a_start_that_tries_more_broken_images_than_allowed_says_the_number(tmp_path: Path, task: str) -> None:
    path = write_folder(task, tmp_path / "images")
    place = path / "images" if task == "semantic-segmentation" else path
    for number in (2, 3):
        (place / f"{number:03d}.jpg").write_bytes(damaged(image_of(number)))
    section = recipe_of_annotated(task, tmp_path / "run", path, batch=4, data={"max_broken": 1})
    with pytest.raises(DataError, match=r"003\.jpg: .*\(broken sample 2, and data\.max_broken is 1\)"):
        train_recipe(section)
