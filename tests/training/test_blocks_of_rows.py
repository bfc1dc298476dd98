"""Training on fine-tuning rows that are encoded meanwhile: the same run on any number of processes, after any kill."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train import train
from accel_train.data.text import shards
from accel_train.experiments.look.look import look_at
from accel_train.plan.plan import resolve_plan
from accel_train.plan.prepare import prepare
from accel_train.recipe.loader import Recipe
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.processes import run_forked
from tests.support.runs import (
    Settings,
    metrics,
    recipe_dict,
    run,
    samples_by_step,
    train_recipe,
    write_rows,
    write_yaml,
)
from tests.support.text_tasks import BERT, T5
from tests.training.test_blocks import BATCH, assert_goes_on_after_kills, short_blocks

STEPS = 24


def blocks(folder: Path, count: int = 500, **sections: Any) -> Settings:
    path, generator = folder / "rows.jsonl", random.Random(3)
    words = ["".join(generator.choices("abcdefgh", k=k)) for k in range(2, 9) for _ in range(40)]
    texts = [
        [f"{number} " + " ".join(generator.choices(words, k=generator.randrange(1, 6))) for _ in range(2)]
        for number in range(count)
    ]
    write_rows(str(path), [{"prompt": prompt, "completion": answer} for prompt, answer in texts])
    data = {"train": str(path), "order": "blocks", "format": "prompt_completion", "sequence_length": 64}
    sections = {"batch": {"global_batch_size": BATCH}, "schedule": {"max_steps": STEPS}, **sections}
    sections["data"] = {**data, "eval_fraction": 0.02, **sections.get("data", {})}
    return recipe_dict(folder, evaluate={"max_samples": 8}, **sections)


def rows_of(recipe: Settings) -> Any:
    return CausalLM().load_data(Recipe.model_validate({**recipe, "task": "causal-lm"}), progress=False).train


def stored(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.rglob("[0-9][0-9][0-9]/*.bin"))}


def every_sample(rows: Any) -> list[int]:
    counts = rows.counts(np.arange(len(rows.shards.cut))).tolist()
    return [(number << 32) + place for number, count in enumerate(counts) for place in range(count)]


def test_an_epoch_of_a_run_reads_every_sample_once_and_counts_them_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    options = {"record": str(tmp_path / "reads")}
    recipe = blocks(tmp_path, options=options, schedule={"max_steps": None, "num_epochs": 1})
    (tmp_path / "reads").mkdir()
    plan = resolve_plan(Recipe.model_validate(recipe))
    every = every_sample(rows_of(recipe))
    assert plan.steps.max_steps == -(-len(every) // BATCH)
    shutil.rmtree(tmp_path / "reads")
    (tmp_path / "reads").mkdir()
    train(recipe)
    read = [sample for step in samples_by_step(tmp_path / "reads", 1, BATCH) for sample in step]
    assert len(every) > 200
    assert sorted(read[: len(every)]) == every
    assert read[: len(every)] != every


def test_the_first_step_waits_for_the_first_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    monkeypatch.setattr("accel_train.engine.loader.SHARDS_AHEAD", 4)
    recipe = blocks(tmp_path, 1500, schedule={"max_steps": 2})
    train(recipe)
    # Those of the first block, up to five ahead of it, and the first shard, which gives the estimates.
    assert 8 <= len(stored(tmp_path / "cache")) <= 15
    assert len(rows_of(recipe).shards.cut) > 90


def test_prepare_makes_all_shards_and_the_run_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe = blocks(tmp_path, 200, schedule={"max_steps": 2})
    (samples,) = [part for part in prepare(Recipe.model_validate(recipe)) if part.name == "samples"]
    assert not samples.was_there
    made = stored(tmp_path / "cache")
    assert len(made) == len(rows_of(recipe).shards.cut)
    (samples,) = [part for part in prepare(Recipe.model_validate(recipe)) if part.name == "samples"]
    assert samples.was_there
    assert samples.num_bytes == sum(map(len, made.values()))
    monkeypatch.setattr(shards.Shards, "_make", None)
    train(recipe)
    assert stored(tmp_path / "cache") == made


def test_what_the_model_will_see_is_shown_of_some_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe = blocks(tmp_path, 1500, task="causal-lm")
    look = look_at(Recipe.model_validate(recipe))
    assert len(stored(tmp_path / "cache")) < len(rows_of(recipe).shards.cut) / 2
    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    written = {f"{row['prompt']}{row['completion']}"[:20] for row in rows}
    assert 100 < len(look.train) < 500
    assert {unit.beginning[:20] for unit in look.train} < written
    parts = look.train[0].parts
    assert [is_learned for _, is_learned in parts] == [False, True]


@pytest.mark.slow
def test_blocks_are_the_same_run_on_1_2_and_4_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, samples = {}, {}
    for processes in (1, 2, 4):
        reads, output = tmp_path / f"reads {processes}", tmp_path / f"run {processes}"
        reads.mkdir()
        cache = {"cache_dir": str(tmp_path / f"cache {processes}")}
        options = {"record": str(reads), "shard_bytes": 1024}
        recipe = blocks(tmp_path, output_dir=str(output), data=cache, options=options)
        with monkeypatch.context() as patch:
            short_blocks(patch)
            train_recipe(recipe, processes)
        lines[processes], samples[processes] = metrics(output), samples_by_step(reads, processes, BATCH)[:STEPS]
        made, first = stored(tmp_path / f"cache {processes}"), stored(tmp_path / "cache 1")
        both = made.keys() & first.keys()
        assert len(both) > 20
        assert [made[name] for name in both] == [first[name] for name in both]
    for processes in (2, 4):
        assert samples[processes] == samples[1]
        for line, alone in zip(lines[processes], lines[1], strict=True):
            assert line["step_loss"] == pytest.approx(alone["step_loss"], rel=1e-5)


@pytest.mark.faults
def test_killed_and_gone_on_with_2_1_4_processes_blocks_are_the_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_goes_on_after_kills(tmp_path, monkeypatch, blocks, (2, 1, 4), STEPS)


def test_weighted_rows_in_blocks_keep_their_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe = blocks(tmp_path, 300)
    first = Path(recipe["data"]["train"])
    other = first.with_name("other.jsonl")
    write_rows(str(other), [{"prompt": f"{number}", "completion": "()" * (number % 7 + 1)} for number in range(300)])
    names = {"rows": (first, {0: 3, 12: 1}), "other": (other, 1)}
    recipe["data"]["train"] = [{"source": str(path), "weight": weight} for path, weight in names.values()]
    recipe["options"] = {"record": str(tmp_path / "reads")}
    (tmp_path / "reads").mkdir()
    train(recipe)
    spans = rows_of(recipe).shards.cut.spans
    read = samples_by_step(tmp_path / "reads", 1, BATCH)[:STEPS]
    drawn = [sum(sample >> 32 in spans[1] for step in steps for sample in step) for steps in (read[:12], read[12:])]
    assert drawn == [12 * BATCH // 4, 12 * BATCH // 2]
    last = metrics(tmp_path / "run")[-1]
    lengths = {name: last.get(f"{name}/tokens", last.get(f"{name}/samples")) for name in names}
    assert lengths["other"] / (lengths["rows"] + lengths["other"]) == pytest.approx(sum(drawn) / (STEPS * BATCH))
    assert last["other/loss"] > 0


def recorded(folder: Path, task: str, name: str, **sections: Any) -> tuple[Settings, Path]:
    """A run on 500 labeled texts, pairs, or rewrites in blocks, and the folder for what its processes read."""
    generator = random.Random(3)
    rows = [
        {
            "text": f"{number} " + "a" * generator.randrange(40),
            "other": f"{number} is {number % 7}",
            "label": "late" if number > 490 else ("red", "blue", "green")[number % 3],
        }
        for number in range(500)
    ]
    write_rows(str(folder / "rows.jsonl"), rows)
    reads = folder / f"reads {name}"
    reads.mkdir()
    columns: dict[str, Settings] = {
        "RecordedPairs": {"pair_columns": ["text", "other"]},
        "RecordedRewrites": {"source_column": "text", "target_column": "other"},
    }
    data = {"train": str(folder / "rows.jsonl"), "order": "blocks", "eval_fraction": 0.05, "max_length": 32}
    data |= columns.get(task, {})
    sections["options"] = {"record": str(reads), "shard_bytes": 1024, **sections.pop("options", {})}
    recipe = recipe_dict(
        folder,
        windows=False,
        task=f"tests.support.tasks.recorded_rows:{task}",
        tokenizer="bytes",
        model={"config": T5 if task == "RecordedRewrites" else BERT},
        schedule={"max_steps": STEPS},
        data=data | sections.pop("data", {}),
        **sections,
    )
    return recipe, reads


def test_labeled_texts_in_blocks_are_shown_of_some_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe, _ = recorded(tmp_path, "RecordedTexts", "look")
    del recipe["options"]
    look = look_at(Recipe.model_validate({**recipe, "task": "text-classification"}))
    made, shards = len(stored(tmp_path / "cache")), -(-(tmp_path / "rows.jsonl").stat().st_size // 1024)
    assert 0 < made < shards - 10
    texts = {json.loads(line)["text"][:20].strip() for line in (tmp_path / "rows.jsonl").read_text().splitlines()}
    assert {unit.beginning.removeprefix("[CLS]")[:20].strip() for unit in look.train} <= texts
    assert 60 < len(look.train) < 400


@pytest.mark.slow
@pytest.mark.parametrize("task", ["RecordedTexts", "RecordedPairs", "RecordedRewrites"])
def test_labeled_texts_and_pairs_in_blocks_are_the_same_run_on_1_2_and_4_processes(tmp_path: Path, task: str) -> None:
    lines, samples = {}, {}
    for processes in (1, 2, 4):
        output, cache = tmp_path / f"run {processes}", {"cache_dir": str(tmp_path / f"cache {processes}")}
        recipe, reads = recorded(tmp_path, task, str(processes), output_dir=str(output), data=cache)
        run(write_yaml(tmp_path / "run.yaml", recipe), processes=processes)
        lines[processes], samples[processes] = metrics(output), samples_by_step(reads, processes, 8)[:STEPS]
    assert len({sample for step in samples[1] for sample in step}) == STEPS * 8
    for processes in (2, 4):
        assert samples[processes] == samples[1]
        for line, alone in zip(lines[processes], lines[1], strict=True):
            assert line["step_loss"] == pytest.approx(alone["step_loss"], rel=1e-5)


@pytest.mark.faults
@pytest.mark.parametrize("task", ["RecordedTexts", "RecordedPairs", "RecordedRewrites"])
def test_killed_and_gone_on_with_2_1_4_processes_labeled_texts_and_pairs_are_the_uninterrupted_run(
    tmp_path: Path, task: str
) -> None:
    whole, reads = recorded(
        tmp_path, task, "whole", output_dir=str(tmp_path / "whole"), data={"cache_dir": str(tmp_path / "other")}
    )
    run(write_yaml(tmp_path / "run.yaml", whole))
    expected, read, begun_at = samples_by_step(reads, 1, 8)[:STEPS], dict[int, list[int]](), 0
    for processes, last_read in ((2, 9), (1, 12), (4, 0)):
        kill_at = {"read": last_read, "rank": processes - 1 if last_read else -1}
        options, often = {"kill_at": kill_at}, {"every_steps": 3}
        recipe, reads = recorded(tmp_path, task, f"on {processes}", options=options, checkpoint=often)
        done = run_forked(
            ["run", str(write_yaml(tmp_path / "run.yaml", recipe))], processes, folder=tmp_path / f"of {processes}"
        )
        assert (done.wait()[-1] == 0) == (not last_read)
        steps = samples_by_step(reads, processes, 8)
        read |= {begun_at + at: samples for at, samples in enumerate(steps) if begun_at + at < STEPS}
        begun_at = int(sorted((tmp_path / "run/checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))
    assert [read[step] for step in range(STEPS)] == expected
    for line, before in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert line["step_loss"] == pytest.approx(before["step_loss"], rel=1e-5)
