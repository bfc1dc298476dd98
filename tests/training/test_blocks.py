"""Training on text that is tokenized meanwhile: the same run on any number of processes, and after any kill."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from accel_train import train
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import resolve_batch
from accel_train.data.text import corpus, shards
from accel_train.data.text.corpus import prepare_text
from accel_train.engine.block_order import BlockOrder
from accel_train.engine.resolve import check_recipe, resolve_run
from accel_train.plan.plan import resolve_plan
from accel_train.plan.prepare import prepare
from accel_train.recipe.loader import Recipe
from tests.support.comparisons import assert_same_bits_of_runs
from tests.support.processes import run_forked
from tests.support.runs import (
    Settings,
    event_steps,
    metrics,
    recipe_dict,
    refused,
    samples_by_step,
    train_recipe,
    write_rows,
    write_yaml,
)

BATCH, STEPS, MIB = 12, 30, 1 << 20


def text(folder: Path, num_bytes: int, name: str = "text", letters: str = "abcdefgh") -> str:
    path = folder / f"{name}.jsonl"
    if not path.exists():
        generator, rows, size = random.Random(3), [], 0
        words = ["".join(generator.choices(letters, k=k)) for k in range(2, 9) for _ in range(40)]
        while size < num_bytes:
            rows.append({"text": f"{len(rows)} " + " ".join(generator.choices(words, k=generator.randrange(20, 900)))})
            size += len(rows[-1]["text"]) + 13
        write_rows(str(path), rows)
    return str(path)


def blocks(folder: Path, num_bytes: int = 100_000, **sections: Any) -> Settings:
    data = {"train": text(folder, num_bytes), "order": "blocks", "sequence_length": 32, "eval_fraction": 0.01}
    sections = {"batch": {"global_batch_size": BATCH}, "schedule": {"max_steps": STEPS}, **sections}
    sections["data"] = {**data, **sections.get("data", {})}
    return recipe_dict(folder, evaluate={"max_samples": 8}, **sections)


LETTERS = {"web": "abcdefgh", "code": "(){};=<>", "math": "uvwxyz+-"}
WEIGHTS: dict[str, Any] = {"web": {0: 0.6, 18: 0.2}, "code": 0.3, "math": {0: 0.1, 18: 0.5}}


def mixed(folder: Path, **sections: Any) -> Settings:
    """Three sources with a change of weights at step 18."""
    sizes = {"web": 60_000, "code": 30_000, "math": 15_000}
    names = {name: text(folder, sizes[name], name, letters) for name, letters in LETTERS.items()}
    train = [{"source": path, "weight": WEIGHTS[name]} for name, path in names.items()]
    return blocks(folder, **{**sections, "data": {"train": train, **sections.get("data", {})}})


def order_of(recipe: Settings) -> Any:
    resolved, task = check_recipe(Recipe.model_validate(recipe))
    data = task.load_data(resolved, progress=False)
    return resolve_run(resolved, data, resolve_batch(resolved.batch, 1))[1]


def source_of(windows: Any, sample: int) -> str:
    """The source whose letters a window has."""
    (found,) = [name for name, letters in LETTERS.items() if {*map(ord, letters)} & {*windows[sample].tolist()}]
    return found


def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 1 KiB, so that a run of some steps reads several blocks. For runs in this process."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1024)


def data_of(recipe: Settings) -> Any:
    return prepare_text(check_recipe(Recipe.model_validate(recipe))[0], progress=False)


def stored(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.rglob("shards/*/*"))}


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]


def test_a_run_reads_the_samples_of_its_order_and_ends_its_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    (tmp_path / "reads").mkdir()
    before = len(children())
    recipe = blocks(tmp_path, 100_000, options={"record": str(tmp_path / "reads")})
    train(recipe)
    order = order_of(recipe)
    read = samples_by_step(tmp_path / "reads", 1, BATCH)[:STEPS]
    assert read == [order.step_samples(step).tolist() for step in range(STEPS)]
    assert len({sample for step in read for sample in step}) == BATCH * STEPS
    assert len(children()) == before
    assert order.num_read > 8, "more than a block"
    for line in metrics(tmp_path / "run"):
        assert line["epoch"] == pytest.approx(line["step"] * BATCH / order.about_samples, rel=1e-3)


def test_the_first_step_does_not_wait_for_the_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    monkeypatch.setattr("accel_train.engine.loader.SHARDS_AHEAD", 4)
    before = len(children())
    train(blocks(tmp_path, 200_000, schedule={"max_steps": 2}))
    num_made = len(stored(tmp_path / "cache"))
    assert 8 <= num_made <= 14
    assert len(children()) == before, "helpers wait, and end with the run"
    assert len(data_of(blocks(tmp_path)).train.shards.cut) > 90


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_a_first_shard_without_a_sample_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    short_blocks(monkeypatch)
    rows = [{"text": ""}] * 200 + [{"text": f"{number} " * 200} for number in range(60)]
    write_rows(str(tmp_path / "text.jsonl"), rows)
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = {} if task == "causal-lm" else {"tokenizer": {"train_bpe": {"vocab_size": 300}}}
    recipe = blocks(tmp_path, task=task, schedule={"max_steps": 2}, **own)
    if task == "masked-lm":
        recipe["model"] = {"config": {**config, "intermediate_size": 16, "max_position_embeddings": 64}}
    windows = data_of(recipe).train
    assert windows.counts(np.array([0])) == [0]
    assert resolve_plan(Recipe.model_validate(recipe)).memory_bytes
    train(recipe)


@pytest.mark.slow
def test_blocks_are_the_same_run_on_1_2_and_4_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, samples = {}, {}
    for processes in (1, 2, 4):
        reads = tmp_path / f"reads {processes}"
        reads.mkdir()
        output = tmp_path / f"run {processes}"
        cache = {"cache_dir": str(tmp_path / f"cache {processes}")}
        options = {"record": str(reads), "shard_bytes": 1024}
        recipe = blocks(tmp_path, output_dir=str(output), data=cache, options=options)
        with monkeypatch.context() as patch:
            short_blocks(patch)
            train_recipe(recipe, processes)
        lines[processes], samples[processes] = metrics(output), samples_by_step(reads, processes, BATCH)[:STEPS]
        made, first = stored(tmp_path / f"cache {processes}"), stored(tmp_path / "cache 1")
        assert len(made.keys() & first.keys()) > 20
        assert [made[name] for name in made.keys() & first.keys()] == [first[n] for n in made.keys() & first.keys()]
    for processes in (2, 4):
        assert samples[processes] == samples[1]
        for line, alone in zip(lines[processes], lines[1], strict=True):
            assert line["step_loss"] == pytest.approx(alone["step_loss"], rel=1e-5)


def test_masked_language_models_read_blocks_with_new_masks_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"config": {**config, "intermediate_size": 16, "max_position_embeddings": 64}}
    recipe = blocks(tmp_path, 20_000, task="masked-lm", schedule={"max_steps": 100})
    train({**recipe, "model": model, "tokenizer": {"train_bpe": {"vocab_size": 300}}})
    (last,) = [line for line in metrics(tmp_path / "run") if line["step"] == 100]
    assert last["epoch"] > 1


def test_a_mixture_of_blocks_keeps_its_shares_and_the_order_of_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    (tmp_path / "reads").mkdir()
    recipe = mixed(tmp_path, options={"record": str(tmp_path / "reads")})
    train(recipe)
    read, windows = samples_by_step(tmp_path / "reads", 1, BATCH)[:STEPS], data_of(recipe).train
    order = order_of(recipe)
    assert read == [order.step_samples(step).tolist() for step in range(STEPS)]
    names = [[source_of(windows, sample) for sample in step] for step in read]
    for first, last, shares in ((0, 18, (0.6, 0.3, 0.1)), (18, STEPS, (0.2, 0.3, 0.5))):
        drawn = [name for step in names[first:last] for name in step]
        for name, share in zip(LETTERS, shares, strict=True):
            assert abs(drawn.count(name) - share * len(drawn)) < 1, name
    for number, (name, span) in enumerate(zip(LETTERS, windows.shards.cut.spans, strict=True)):
        own = [sample for step, of in zip(read, names) for sample, each in zip(step, of) if each == name]
        settings = {"num_shards": len(span), "first_shard": span.start, "counts": windows.counts}
        alone = BlockOrder(order.num_samples, len(own), recipe["seed"] + (number << 40), **settings)
        assert own == alone.step_samples(0).tolist()
        assert {sample >> 32 for sample in own} <= {*span}
    for line in metrics(tmp_path / "run"):
        drawn = [name for step in names[: line["step"]] for name in step]
        assert {name: line[f"{name}/tokens"] for name in LETTERS} == {n: drawn.count(n) * 32 for n in LETTERS}
        assert all(line[f"{name}/loss"] > 0 for name in LETTERS)


def test_each_source_of_blocks_is_read_once_in_its_epochs_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    recipe = mixed(tmp_path, schedule={"max_steps": 800})
    recipe["data"]["train"][2] |= {"max_epochs": 2, "weight": 0.1}
    windows, order = data_of(recipe).train, order_of(recipe)
    ends = windows.shards.cut.spans[2]
    assert {*map(int, (name[:6] for name in stored(tmp_path / "cache")))} == {*ends}, "counted"
    windows.count(False)
    read = np.concatenate([order.step_samples(step) for step in range(800)])
    for at, span in enumerate(windows.shards.cut.spans):
        numbers = np.arange(span.start, span.stop)
        every = [(shard << 32) + i for shard, count in zip(numbers, windows.counts(numbers)) for i in range(count)]
        own = read[np.isin(read >> 32, numbers)]
        assert len(windows.samples_by_source[at]) == len(every)
        assert sorted(own[: len(every)].tolist()) == every, "an epoch has each sample once"
        assert order.epochs_of(at, len(every)) == pytest.approx(1)
        assert (len(own) == 2 * len(every)) == (at == 2)


def assert_goes_on_after_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, processes_of: tuple[int, ...], num_steps: int
) -> None:
    """Kill each launch but the last one, and compare samples and losses with an uninterrupted run of 2 processes."""
    generator = random.Random(4)
    other = {"cache_dir": str(tmp_path / "other")}
    whole = made(tmp_path, output_dir=str(tmp_path / "whole"), data=other, options={"shard_bytes": 1024})
    path = write_yaml(tmp_path / "whole.yaml", whole)
    run_forked(["run", str(path)], 2, folder=tmp_path / "processes").expect(0, 240)
    output, begun_at, num_resumed, read = tmp_path / "run", 0, 0, dict[int, list[int]]()
    for number, processes in enumerate(processes_of):
        reads = tmp_path / "reads" / str(number)
        reads.mkdir(parents=True)
        options: Settings = {"record": str(reads), "first_step": begun_at, "shard_bytes": 1024}
        is_last = number == len(processes_of) - 1
        if not is_last:
            options["kill_at"] = {"step": 8 * number + generator.randrange(4, 8), "rank": processes - 1}
        recipe = made(tmp_path, output_dir=str(output), options=options, checkpoint={"every_steps": 3})
        path = write_yaml(tmp_path / "run.yaml", recipe)
        forked = run_forked(["run", str(path)], processes, folder=tmp_path / f"processes {number}")
        assert forked.wait()[-1] == (0 if is_last else -signal.SIGKILL)
        steps = samples_by_step(reads, processes, BATCH)
        read |= {begun_at + at: samples for at, samples in enumerate(steps) if begun_at + at < num_steps}
        # The first kill may come before the first checkpoint is written.
        names = [path.name for path in sorted((output / "checkpoints").glob("step-*"))]
        begun_at = int(names[-1].removeprefix("step-")) if names else 0
        num_resumed += begun_at > 0 and not is_last
    assert len(event_steps(output, "resume")) == num_resumed >= len(processes_of) - 2
    short_blocks(monkeypatch)
    order = order_of(whole)
    assert [read[step] for step in range(num_steps)] == [order.step_samples(step).tolist() for step in range(num_steps)]
    for line, before in zip(metrics(output), metrics(tmp_path / "whole"), strict=True):
        assert line["step_loss"] == pytest.approx(before["step_loss"], rel=1e-5)


@pytest.mark.faults
@pytest.mark.parametrize("made", [blocks, mixed])
def test_killed_and_gone_on_with_2_1_4_2_processes_blocks_are_the_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    assert_goes_on_after_kills(tmp_path, monkeypatch, made, (2, 1, 4, 2), STEPS)


@pytest.mark.faults
def test_100_kills_of_all_processes_leave_equal_shards_and_the_same_run_to_the_bit(tmp_path: Path) -> None:
    generator = random.Random(9)
    size, options, steps = 4 * MIB, {"shard_bytes": 8192}, 600
    sections: Settings = {"options": options, "checkpoint": {"every_steps": 20}, "schedule": {"max_steps": steps}}
    whole = blocks(
        tmp_path, size, output_dir=str(tmp_path / "whole"), data={"cache_dir": str(tmp_path / "other")}, **sections
    )
    path = write_yaml(tmp_path / "whole.yaml", whole)
    run_forked(["run", str(path)], 2, folder=tmp_path / "processes").expect(0, 240)
    path = write_yaml(tmp_path / "run.yaml", blocks(tmp_path, size, **sections))
    numbers = []
    for _ in range(100):
        forked = run_forked(["run", str(path)], 2, folder=tmp_path / "processes")
        time.sleep(generator.random() * 2)
        forked.end()
        forked.wait()
        numbers.append(len([*(tmp_path / "cache").rglob("shards/*/*.bin")]))
    run_forked(["run", str(path)], 2, folder=tmp_path / "processes").expect(0, 240)
    print(f"shards after each kill: {numbers}")
    assert len({*numbers}) >= 5, "killed while tokens were made"
    assert_same_bits_of_runs(tmp_path / "run", tmp_path / "whole", steps)
    made, first = stored(tmp_path / "cache"), stored(tmp_path / "other")
    names = [name for name in made.keys() & first.keys() if name.endswith(".bin")]
    assert len(names) >= 8
    assert [made[name] for name in names] == [first[name] for name in names]


def test_auto_chooses_by_the_size_of_the_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe = blocks(tmp_path, 50_000, data={"order": "auto"})
    size = (tmp_path / "text.jsonl").stat().st_size
    for limit, expected in ((size, False), (size - 1, True)):
        monkeypatch.setattr(corpus, "SHUFFLED_UP_TO_BYTES", limit)
        for warm in range(2):
            found = data_of(recipe)
            assert isinstance(found.train, shards.ShardedWindows) == expected, warm
            assert any("data.order" in note for note in found.facts.notes) == expected


def test_epochs_are_counted_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe = blocks(tmp_path, 30_000, schedule={"max_steps": None, "num_epochs": 2})
    plan = resolve_plan(Recipe.model_validate(recipe))
    windows = data_of(recipe).train
    count = int(windows.counts(np.arange(len(windows.shards.cut))).sum())
    assert len(windows) == count
    assert plan.steps.max_steps == -(-2 * count // BATCH)
    train(recipe)
    assert metrics(tmp_path / "run")[-1]["epoch"] == pytest.approx(plan.steps.max_steps * BATCH / count, rel=1e-3)


def test_prepare_makes_all_shards_and_the_run_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    recipe = blocks(tmp_path, 50_000, schedule={"max_steps": 2})
    (tokens,) = [part for part in prepare(Recipe.model_validate(recipe)) if part.name == "tokens"]
    assert not tokens.was_there
    windows = data_of(recipe).train
    made = stored(tmp_path / "cache")
    assert len(made) == len(windows.shards.cut)
    (tokens,) = [part for part in prepare(Recipe.model_validate(recipe)) if part.name == "tokens"]
    assert tokens.was_there
    monkeypatch.setattr(shards.Shards, "_make", None)
    train(recipe)
    assert stored(tmp_path / "cache") == made


def test_the_helpers_of_prepare_make_shards_too_and_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    monkeypatch.setattr(shards, "usable_cores", lambda: Choice(3, "for the test"))
    makers, make = tmp_path / "makers", shards.Shards._make
    makers.mkdir()

    def recorded(self: Any, number: int, path: Path) -> None:
        # Each waits for the others at its first shard.
        (makers / f"{os.getpid()}").touch()
        while len([*makers.iterdir()]) < 3:
            time.sleep(0.01)
        make(self, number, path)
        with (makers / f"{os.getpid()}").open("a") as file:
            file.write(f"{number}\n")

    monkeypatch.setattr(shards.Shards, "_make", recorded)
    before = len(children())
    recipe = blocks(tmp_path, 50_000)
    prepare(Recipe.model_validate(recipe))
    found = [each.read_text().split() for each in makers.iterdir()]
    numbers = sorted(int(number) for made in found for number in made)
    assert numbers == [*range(len(data_of(recipe).train.shards.cut))], "each shard once"
    assert all(found), "by all three"
    assert len(children()) == before


def test_a_killed_prepare_ends_its_helpers_and_leaves_no_half_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_blocks(monkeypatch)
    monkeypatch.setattr(shards, "usable_cores", lambda: Choice(3, "for the test"))
    recipe = blocks(tmp_path, 100_000)
    make = shards.Shards._make

    def slow(self: Any, number: int, path: Path) -> None:
        time.sleep(0.05)
        make(self, number, path)

    monkeypatch.setattr(shards.Shards, "_make", slow)
    process = multiprocessing.get_context("fork").Process(target=prepare, args=(Recipe.model_validate(recipe),))
    process.start()
    while len([*(tmp_path / "cache").rglob("0*.bin")]) < 9:
        time.sleep(0.01)
    helpers = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    at_kill = len([*(tmp_path / "cache").rglob("0*.bin")])
    gone, alive = psutil.wait_procs(helpers, timeout=60)
    assert (len(gone), alive) == (2, [])
    made = {name: found for name, found in stored(tmp_path / "cache").items() if name.endswith(".bin")}
    monkeypatch.setattr(shards.Shards, "_make", make)
    prepare(Recipe.model_validate(recipe))
    whole = stored(tmp_path / "cache")
    assert 9 <= len(made) <= at_kill + 2 < len(whole), "each helper ends what it makes"
    assert len(whole) == len(data_of(recipe).train.shards.cut)
    assert {name: whole[name] for name in made} == made


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"last_batch": "short"}},
        {"data": {"train": "a.bin"}, "tokenizer": "bytes"},
    ],
)
def test_blocks_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Settings) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows("a.jsonl", [{"text": "a" * 200}] * 20)
    np.zeros(4096, np.uint16).tofile("a.bin")
    refused(train, blocks(tmp_path, 10_000, **change), named="data.order")


def test_a_run_of_an_order_of_all_samples_does_not_go_on_in_blocks(tmp_path: Path) -> None:
    stops = {"term_at": {"step": 3, "rank": 0}}
    recipe = blocks(tmp_path, 10_000, data={"order": "shuffled"}, options=stops)
    train_recipe(recipe, expect=75)
    again = {**recipe, "options": {}}
    again["data"] = {**recipe["data"], "order": "blocks"}
    refused(train, again, named="data.order was shuffled")
    train({**recipe, "options": {}})
