"""A resume of `accel_train.Trainer` on data that can only be read in order: exact, and how much of it is read again."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset, load_dataset
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchStream

from accel_train.core.json_io import load_object
from tests.support.hf_models import Given, Plain, difference, every, history, made, plain_rows
from tests.support.runs import TESTS, events, run_forked_command

READS: Counter[str] = Counter()
"""Samples that a generator gave, and samples that a function of `map` saw, since it was cleared."""
SHARDS, STEPS_PER_EPOCH, STEPS = (8, 8, 6), 6, 14
"""Samples by shard. Steps of four samples: the last one of an epoch has two."""


def shards(numbers: list[int]) -> Iterator[Given]:
    for number in numbers:
        for row in plain_rows(SHARDS[number % 3], seed=number):
            READS["generator"] += 1
            yield {**row, "features": row["features"].tolist()}


def stream(*numbers: int) -> IterableDataset:
    return IterableDataset.from_generator(shards, gen_kwargs={"numbers": list(numbers or range(3))})


def doubled(row: Given) -> Given:
    READS["map"] += 1
    return {"features": [2 * each for each in row["features"]]}


def with_noise(row: Given) -> Given:
    return {"features": (torch.tensor(row["features"]) + torch.rand(8)).tolist()}


def shifted(batch: Given) -> Given:
    """A function of batches that gives one sample less than it gets, as packing does."""
    return {name: column[1:] for name, column in batch.items()}


def noisy(samples: list[Given]) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers, and removes a column from the samples."""
    features = torch.stack([torch.as_tensor(sample.pop("features")) for sample in samples])
    return {"features": features + torch.rand(features.shape), "labels": torch.tensor([s["labels"] for s in samples])}


def with_random_features(samples: list[Given]) -> dict[str, torch.Tensor]:
    return noisy([{**sample} for sample in samples])


class InOrder(TorchStream[Any]):
    def __iter__(self) -> Any:
        return shards([0, 1, 2])


class OwnLoader:
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)


STREAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "one shard": (lambda: stream(1), ""),
    "shards": (stream, ""),
    "map": (lambda: stream().map(doubled), ""),
    "random map": (lambda: stream().map(with_noise), ""),
    "filter": (lambda: stream().filter(lambda row: row["features"][0] > -0.5), ""),
    "batches": (lambda: stream().map(shifted, batched=True, batch_size=5), ""),
    "shuffled": (lambda: stream().shuffle(seed=3, buffer_size=10), "shuffle buffer"),
    "shuffled and mapped": (lambda: stream().shuffle(seed=3, buffer_size=2).map(doubled), "shuffle buffer"),
    "of torch": (InOrder, "only a datasets.IterableDataset"),
}
"""Streams, with words of the reason why a resume reads them in order. Empty: it continues from a state."""


def run(folder: Path, data: Any, resume: Any = None, seed: int = 0, **given: Any) -> Any:
    """A trainer of 14 steps after train(), with a checkpoint after each step."""
    args = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        **every(1, "save", "logging"),
        **given,
    }
    trainer = made(folder, Plain(seed=seed), data, **args)
    READS.clear()
    trainer.train(resume_from_checkpoint=resume and str(folder / f"checkpoint-{resume}"))
    return trainer


def changes(folder: Path) -> dict[str, str]:
    """Messages of events of changed data, by kind."""
    found = ("stream_changed", "settings_changed")
    return {kind: event["message"] for kind in found for event in events(folder, kind)}


@pytest.mark.parametrize("name", STREAMS)
def test_a_resume_in_an_epoch_and_at_its_end_gives_the_losses_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make, reason = STREAMS[name]
    whole = run(tmp_path, make(), data_collator=noisy, remove_unused_columns=False)
    for step in (1, 4, 6, 7, 13):
        capsys.readouterr()
        again = run(tmp_path, make(), step, seed=3, data_collator=noisy, remove_unused_columns=False)
        shown = capsys.readouterr().out
        assert difference(whole.model, again.model) == 0
        assert history(again)[:-1] == history(whole)[:-1]
        assert ("continues from its saved state: reading 1 steps again" in shown) == (not reason)
        assert ("train_dataset is read in order" in shown) == bool(reason)
        assert reason in shown
    assert changes(tmp_path) == {}


def test_a_resume_reads_one_step_again_and_only_the_shard_of_its_state(tmp_path: Path) -> None:
    make = STREAMS["map"][0]
    run(tmp_path, make())
    whole = READS["map"]
    assert whole == READS["generator"] == 2 * sum(SHARDS) + 8
    for step in (4, 6, 7, 9, 13):
        run(tmp_path, make(), step)
        epoch, steps = divmod(step - 1, STEPS_PER_EPOCH)
        done = epoch * sum(SHARDS)
        assert READS["map"] == whole - done - 4 * steps
        # datasets continues at a shard, and skips its first samples before they are mapped.
        assert READS["generator"] == whole - done - 8 * (max(4 * steps - 1, 0) // 8)


def test_a_resume_of_a_shuffled_stream_reads_its_epoch_again_but_no_earlier_one(tmp_path: Path) -> None:
    make = STREAMS["shuffled and mapped"][0]
    run(tmp_path, make())
    whole = READS["map"]
    for step, epochs in ((4, 0), (6, 0), (7, 1), (12, 1), (13, 2)):
        run(tmp_path, make(), step)
        assert READS["map"] == whole - epochs * sum(SHARDS)


def test_files_in_streaming_mode_resume_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        lines = map(json.dumps, shards([number]))
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")

    def make() -> Any:
        return load_dataset("json", data_files=str(tmp_path / "*.jsonl"), streaming=True, split="train")

    whole, again = (run(tmp_path / "run", make(), resume, seed=resume) for resume in (0, 9))
    assert "continues from its saved state: reading 1 steps again" in capsys.readouterr().out
    assert difference(whole.model, again.model) == 0
    assert changes(tmp_path / "run") == {}


def test_an_evaluation_of_the_first_samples_of_a_stream_leaves_the_state_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In `datasets`, both have one state."""
    trainers = []
    for resume in (0, 5):
        base = stream()
        given = {"eval_dataset": base.take(4), **every(2, "eval")}
        trainers.append(run(tmp_path, base.skip(4), resume, seed=resume, **given))
    shown = capsys.readouterr().out
    assert "continues from its saved state: reading 1 steps again" in shown
    assert "train_dataset is read in order" not in shown
    assert difference(trainers[0].model, trainers[1].model) == 0


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_stream_is_left_as_the_program_gave_it(tmp_path: Path, is_loaded: bool) -> None:
    """Each training begins at the state that the program loaded into the stream, or at its first sample."""
    data = stream()
    if is_loaded:
        samples = iter(data)
        for _ in range(5):
            next(samples)
        data.load_state_dict(data.state_dict())
    one = run(tmp_path / "one", data)
    # With 17 samples in its first epoch, it takes 5 steps there, and three in the third one.
    assert READS["generator"] == 2 * sum(SHARDS) + (12 if is_loaded else 8)
    assert difference(run(tmp_path / "one", data, 4, seed=3).model, one.model) == 0
    assert difference(run(tmp_path / "two", data).model, one.model) == 0


def test_a_loader_with_its_own_shuffle_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accel_train import Trainer

    kind = type("Own", (OwnLoader, Trainer), {})
    whole, again = (
        run(tmp_path, plain_rows(22), resume, seed=resume, kind=kind, data_collator=with_random_features)
        for resume in (0, 9)
    )
    assert "train_dataset is read in order: reading 9 steps again, because only a" in capsys.readouterr().out
    assert difference(whole.model, again.model) == 0
    assert changes(tmp_path) == {}


CHANGED: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "another shard at the place": (lambda: stream(0, 2, 1), {"stream_changed", "settings_changed"}),
    "a shard more": (lambda: stream(0, 1, 2, 3), {"settings_changed"}),
    "fewer shards": (lambda: stream(0), {"stream_changed", "settings_changed"}),
    "another function": (lambda: stream().map(doubled), {"stream_changed"}),
    "another kind": (InOrder, set()),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_stream_at_a_resume_is_reported(tmp_path: Path, name: str) -> None:
    make, kinds = CHANGED[name]
    run(tmp_path, stream(), max_steps=4)
    run(tmp_path, make(), 4)
    found = changes(tmp_path)
    assert found.keys() >= kinds
    assert ("stream_changed" in found) == ("stream_changed" in kinds)
    if "settings_changed" in kinds:
        assert "the list of files of train_dataset" in found["settings_changed"]


def test_a_checkpoint_without_a_state_is_read_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(tmp_path, stream())
    folder = tmp_path / "checkpoint-9"
    manifest = load_object(folder / "manifest.json")
    del manifest["files"]["stream.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "stream.json").unlink()
    again = run(tmp_path, stream(), 9, seed=3)
    assert "train_dataset is read in order: reading 9 steps again, because the checkpoint" in capsys.readouterr().out
    assert difference(whole.model, again.model) == 0
    assert READS["generator"] == 2 * sum(SHARDS) + 8


def test_samples_after_a_state_that_is_not_exact_are_read_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path, stream())
    path = tmp_path / "checkpoint-10" / "stream.json"
    [step, epoch, state, samples] = json.loads(path.read_text())
    assert (step, epoch) == (9, 1)
    state["examples_iterable"]["shard_example_idx"] += 1
    path.write_text(json.dumps([step, epoch, state, samples]))
    again = run(tmp_path, stream(), 10, seed=3)
    assert "reading 10 steps again, because its saved state gives other samples" in capsys.readouterr().out
    assert difference(whole.model, again.model) == 0
    assert "stream_changed" not in changes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "shuffled"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 2), (2, 1)])
def test_a_killed_run_resumes_on_as_many_processes_and_on_others(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    program = TESTS / "support/programs/stream.py"
    whole = run_forked_command([str(tmp_path / "whole"), name], after, program)
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = run_forked_command([str(tmp_path / "run"), name, "9"], before, program)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    resumed = run_forked_command([str(tmp_path / "run"), name], after, program)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    one, two = (load_object(tmp_path / each / "result.json") for each in ("whole", "run"))
    assert len(two["losses"]) == STEPS
    assert one["is_split_refused"] == two["is_split_refused"] == (after > 1)
    tolerance = 0 if before == after else 1e-6
    assert two["losses"] == pytest.approx(one["losses"], abs=tolerance)
    assert two["weights"] == pytest.approx(one["weights"], abs=tolerance)
    # From the first shard of the second epoch on.
    assert two["reads"] == one["reads"] - sum(SHARDS)
