"""Training on weighted sources: the same run on any number of processes, the losses of each, and what is refused."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from accel_train import train
from accel_train.data.text.corpus import prepare_text
from accel_train.engine.mixed_order import MixedOrder, MixedSource
from accel_train.engine.mixture import WithSources
from accel_train.engine.resolve import check_recipe
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.loader import Recipe
from accel_train.report.charts import describe_charts
from accel_train.report.run import load_run
from accel_train.task import load_task
from accel_train.tasks.text_classification.task import TextClassification
from tests.support.annotated_images import recipe_of_annotated, write_folder
from tests.support.every_task import CASES, recipe_of
from tests.support.processes import run_forked
from tests.support.runs import (
    TINY_MODEL,
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
from tests.support.tars import recipe_of_images, write_class_folders
from tests.support.wording import assert_golden

BATCH, LENGTH, STEPS = 12, 32, 30
LETTERS = {"web": "abcde ", "code": "(){};=", "math": "0123456"}


def write_sources(folder: Path) -> list[Settings]:
    """Three sources of letters of their own, with a change of weights, and one that ends; returns `data.train`."""
    generator = random.Random(7)
    for name, size in (("web", 60), ("code", 25), ("math", 4)):
        rows = [{"text": "".join(generator.choices(LETTERS[name], k=100 + 10 * number))} for number in range(size)]
        write_rows(str(folder / f"{name}.jsonl"), rows)
    return [
        {"source": str(folder / "web.jsonl"), "weight": {0: 0.7, 18: 0.2}},
        {"source": str(folder / "code.jsonl"), "weight": 0.25},
        {"source": str(folder / "math.jsonl"), "weight": 0.05, "max_epochs": 0.4},
    ]


def mixture(folder: Path, **sections: Any) -> Settings:
    data = {"sequence_length": LENGTH, **sections.pop("data", {})}
    data["train"] = data.get("train") or write_sources(folder)
    sections = {"batch": {"global_batch_size": BATCH}, "schedule": {"max_steps": STEPS}, **sections}
    return recipe_dict(folder, data=data, **sections)


def order_of(recipe: Settings) -> MixedOrder:
    """The order by hand, from the sizes of the sources."""
    sizes = sizes_of(recipe)
    starts = np.cumsum([0, *sizes])
    sources = [
        MixedSource(
            Path(each["source"]).stem,
            range(start, start + size),
            each["weight"] if isinstance(each["weight"], dict) else {0: each["weight"]},
            each.get("max_epochs"),
        )
        for each, start, size in zip(recipe["data"]["train"], starts, sizes)
    ]
    return MixedOrder(sum(sizes), BATCH, recipe["seed"], sources=tuple(sources))


def sizes_of(recipe: Settings) -> list[int]:
    windows: Any = prepare_text(check_recipe(Recipe.model_validate(recipe))[0], progress=False).train
    return [len(each) for each in windows.datasets]


def test_a_window_is_of_one_source_and_every_token_of_a_source_is_in_one(tmp_path: Path) -> None:
    recipe = mixture(tmp_path, data={"eval_fraction": 0})
    windows: Any = prepare_text(check_recipe(Recipe.model_validate(recipe))[0], progress=False).train
    start = 0
    for (name, letters), size in zip(LETTERS.items(), sizes_of(recipe), strict=True):
        tokens = np.concatenate([windows[index][:-1] for index in range(start, start + size)])
        tokens = tokens[tokens >= 0]
        assert {*tokens.tolist()} == {256, *letters.encode()}, name
        texts = [json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        # The last token is predicted, and never read.
        assert len(tokens) in (sum(map(len, texts)) + len(texts), sum(map(len, texts)) + len(texts) - 1)
        start += size
    assert start == len(windows)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_loss_of_each_source_is_that_of_its_windows(tmp_path: Path, chunked: bool) -> None:
    recipe = mixture(
        tmp_path, optimizer={"learning_rate": 1e-30}, log={"every_steps": 3}, loss={"chunked": chunked},
        schedule={"max_steps": 6},
    )  # fmt: skip
    train(recipe)
    run = Path(recipe["output_dir"])
    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    windows: Any = prepare_text(check_recipe(Recipe.model_validate(recipe))[0], progress=False).train
    order = order_of(recipe)
    bounds = np.cumsum(sizes_of(recipe))
    lines = metrics(run)
    for line, steps in zip(lines, (range(3), range(3, 6)), strict=True):
        losses: dict[str, list[torch.Tensor]] = {name: [] for name in LETTERS}
        for sample in np.concatenate([order.step_samples(step) for step in steps]).tolist():
            tokens = torch.from_numpy(windows[sample])
            targets = tokens[1:].masked_fill(tokens[1:] < 0, -100)
            with torch.no_grad():
                logits = model(tokens[None, :-1].clamp(min=0)).logits[0]
            each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets != -100]
            losses[[*LETTERS][int(np.searchsorted(bounds, sample, side="right"))]].append(each)
        for number, (name, found) in enumerate(losses.items()):
            assert line[f"{name}/loss"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
            drawn = order.drawn_before(line["step"])[number]
            assert line[f"{name}/tokens"] == drawn * LENGTH
            assert line[f"{name}/epoch"] == pytest.approx(drawn / sizes_of(recipe)[number], abs=1e-6)


IMAGES = {"one": range(12), "two": range(12, 24)}


@pytest.mark.parametrize(
    "case",
    [
        *("masked-lm", "seq2seq", "text-classification", "token-classification", "multiple-choice"),
        *("question-answering", "image-classification", "semantic-segmentation"),
    ],
)
def test_the_loss_of_a_source_that_has_a_step_alone_is_that_of_the_step(tmp_path: Path, case: str) -> None:
    weights: list[dict[int, int]] = [{0: 1, 2: 0, 4: 1}, {0: 0, 2: 1}]
    short: Settings = {"schedule": {"max_steps": 6}, "log": {"every_steps": 1}}
    if case == "image-classification":
        names = [str(write_class_folders(tmp_path / name)) for name in ("one", "two")]
        recipe = recipe_of_images(tmp_path, "of images", names[0], **short)
    elif case == "semantic-segmentation":
        names = [str(write_folder(case, tmp_path / name, numbers)) for name, numbers in IMAGES.items()]
        recipe = recipe_of_annotated(case, tmp_path / "of masks", names[0], batch=4, **short)
    else:
        recipe = recipe_of(case, tmp_path / "one", **short)
        names = [recipe_of(case, tmp_path / name)["data"]["train"] for name in ("one", "two")]
    recipe["data"]["train"] = [
        {"source": path, "weight": weight, "name": name} for path, weight, name in zip(names, weights, ("one", "two"))
    ]
    train(recipe)
    lines = [line for line in metrics(Path(recipe["output_dir"])) if "step_loss" in line]
    assert [[name for name in ("one", "two") if f"{name}/loss" in line] for line in lines] == [
        ["one"], ["one"], ["two"], ["two"], ["one", "two"], ["one", "two"],
    ]  # fmt: skip
    for line in lines:
        losses = [line[f"{name}/loss"] for name in ("one", "two") if f"{name}/loss" in line]
        assert min(losses) * (1 - 1e-5) <= line["step_loss"] <= max(losses) * (1 + 1e-5)


@pytest.mark.slow
def test_a_mixture_is_the_same_run_on_1_2_3_and_4_processes(tmp_path: Path) -> None:
    lines, samples = {}, {}
    for processes in (1, 2, 3, 4):
        reads = tmp_path / f"reads {processes}"
        reads.mkdir()
        output = tmp_path / f"run {processes}"
        recipe = mixture(tmp_path, output_dir=str(output), options={"record": str(reads)})
        train_recipe(recipe, processes)
        lines[processes], samples[processes] = metrics(output), samples_by_step(reads, processes, BATCH)[:STEPS]
    order = order_of(recipe)
    assert samples[1] == [order.step_samples(step).tolist() for step in range(STEPS)]
    keys = ("step_loss", *(f"{name}/{what}" for name in LETTERS for what in ("loss", "tokens", "epoch")))
    for processes in (2, 3, 4):
        assert samples[processes] == samples[1]
        for line, alone in zip(lines[processes], lines[1], strict=True):
            assert {key: line.get(key, 0.0) for key in keys} == pytest.approx(
                {key: alone.get(key, 0.0) for key in keys}, rel=1e-5
            )
    assert "math/loss" not in lines[1][-1], "it has ended"


@pytest.mark.faults
def test_killed_and_gone_on_with_2_1_4_3_2_processes_a_mixture_is_the_uninterrupted_run(tmp_path: Path) -> None:
    generator = random.Random(5)
    whole = mixture(tmp_path, output_dir=str(tmp_path / "whole"), schedule={"max_steps": 60})
    train_recipe(whole, 2)
    output, begun_at, read = tmp_path / "run", 0, dict[int, list[int]]()
    for number, processes in enumerate((2, 1, 4, 3, 2)):
        reads = tmp_path / "reads" / str(number)
        reads.mkdir(parents=True)
        options: Settings = {"record": str(reads), "first_step": begun_at}
        if number < 4:  # before and after the change of weights, and the end of a source
            stop = 12 * number + generator.randrange(6, 12)
            options["kill_at"] = {"step": stop, "rank": processes - 1}
        recipe = mixture(
            tmp_path, output_dir=str(output), options=options, checkpoint={"every_steps": 4},
            schedule={"max_steps": 60},
        )  # fmt: skip
        path = write_yaml(tmp_path / "run.yaml", recipe)
        forked = run_forked(["run", str(path)], processes, folder=tmp_path / f"processes {number}")
        assert forked.wait()[-1] == (0 if number == 4 else -signal.SIGKILL)
        steps = samples_by_step(reads, processes, BATCH)
        read |= {begun_at + at: samples for at, samples in enumerate(steps) if begun_at + at < 60}
        checkpoints = sorted((output / "checkpoints").glob("step-*"))
        begun_at = int(checkpoints[-1].name.removeprefix("step-"))
    assert len(event_steps(output, "resume")) == 4
    order = order_of(whole)
    assert [read[step] for step in range(60)] == [order.step_samples(step).tolist() for step in range(60)]
    drawn = np.zeros(3)
    ends = np.cumsum(sizes_of(whole))
    start = drawn
    for step in range(60):
        drawn = drawn + np.bincount(np.searchsorted(ends, read[step], side="right"), minlength=3)
        if step == 17:
            start = drawn
        since = step + 1 - (18 if step >= 18 else 0)
        weights = np.array([0.2, 0.25, 0.05] if step >= 18 else [0.7, 0.25, 0.05])
        if drawn[2] < order.sources[2].limit:
            counted = drawn - (start if step >= 18 else 0)
            assert np.abs(counted - BATCH * since * weights / weights.sum()).max() < 1
    assert drawn[2] == order.sources[2].limit
    for line, other in zip(metrics(output), metrics(tmp_path / "whole"), strict=True):
        assert line["step_loss"] == pytest.approx(other["step_loss"], rel=1e-5)


def test_later_weights_may_change_on_a_resume_and_earlier_ones_may_not(tmp_path: Path) -> None:
    stops = {"term_at": {"step": 10, "rank": 0}}
    recipe = mixture(tmp_path, options=stops, schedule={"max_steps": 20})
    before = order_of(recipe).drawn_before(20)
    train_recipe(recipe, expect=75)
    (step,) = event_steps(tmp_path / "run", "preempted")
    source, again = recipe["data"]["train"][1], {**recipe, "options": {}}
    for weight in ({0: 0.25, step - 1: 0.5}, 0.26):
        source["weight"] = weight
        refused(train, again, named="data.mixture")
    source["weight"] = {0: 0.25, step: 0.5}
    train(again)
    after = order_of(again).drawn_before(20)
    assert after[1] > before[1]
    assert metrics(tmp_path / "run")[-1]["code/tokens"] == LENGTH * after[1]
    (chart,) = [each for each in describe_charts([load_run(tmp_path / "run")]) if each["name"] == "source_losses"]
    assert [curve["name"] for curve in chart["curves"]] == [*LETTERS]
    assert chart["curves"][1]["x"] == [line["step"] for line in metrics(tmp_path / "run") if "code/loss" in line]


def test_the_plan_says_what_each_source_gives_and_when_it_ends(tmp_path: Path) -> None:
    plan = resolve_plan(Recipe.model_validate(mixture(tmp_path)))
    assert_golden("\n".join(note for note in plan.notes if note.startswith("source ")))


@pytest.mark.parametrize(
    "change, named",
    [
        ({"schedule": {"max_steps": 400}, "each": {"max_epochs": 1}}, "data.train"),
        ({"each": {"max_epochs": 0.0001}}, "data.train"),
        ({"each": {"name": "web"}}, "data.train"),
        ({"each": {"weight": 0}}, "data.train"),
        ({"each": {"weight": {3: 0.5}}}, "data.train"),
        ({"each": {"weight": -1}}, "data.train"),
        ({"each": {"weight": True}}, "data.train"),
        ({"each": {"name": "a b"}}, "data.train"),
        ({"each": {"weights": 1}}, "data.train"),
        ({"data": {"last_batch": "short"}}, "data.train"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, change: Settings, named: str) -> None:
    each = change.pop("each", {})
    recipe = mixture(tmp_path, **change)
    for source in recipe["data"]["train"]:
        source |= each
    refused(train, recipe, named=named)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_task_draws_its_samples_by_the_weights_of_their_files(tmp_path: Path, case: str) -> None:
    recipe = recipe_of(case, tmp_path / "one", schedule={"max_steps": 4})
    names = [recipe_of(case, tmp_path / name)["data"]["train"] for name in ("one", "two")]
    if names[0] in ("digits", "digit-scenes"):
        names = names[:1]
    sources = [{"source": name, "weight": weight} for name, weight in zip(names, (1, 3))]
    recipe["data"]["train"] = [each | {"name": name} for each, name in zip(sources, ("one", "two"))]
    train(recipe)
    (line,) = [line for line in metrics(Path(recipe["output_dir"])) if line["step"] == 4]
    tokens = LENGTH if "one/tokens" in line else 1
    drawn = [value / tokens for name, value in line.items() if name.endswith(("/samples", "/tokens"))]
    assert drawn == ([8, 24] if len(names) > 1 else [32])


def test_token_files_are_mixed_where_they_lie_and_need_evaluation_data_of_their_own(tmp_path: Path) -> None:
    sizes = {"web": 640, "code": 320}
    for number, (name, size) in enumerate(sizes.items()):
        np.full(size * LENGTH + 1, number + 65, np.uint16).tofile(tmp_path / f"{name}.bin")
    sources = [{"source": str(tmp_path / f"{name}.bin"), "weight": weight} for name, weight in zip(sizes, (3, 1))]
    recipe = mixture(tmp_path, data={"train": sources}, schedule={"max_steps": 4})
    refused(train, recipe, named="data.train|data.eval")
    recipe["data"]["eval"] = str(tmp_path / "code.bin")
    windows: Any = prepare_text(check_recipe(Recipe.model_validate(recipe))[0], progress=False).train
    assert [len(each) for each in windows.datasets] == [*sizes.values()]
    assert {*windows[639].tolist()} == {65}
    assert {*windows[640].tolist()} == {66}
    assert not [*Path(recipe["data"]["cache_dir"]).rglob("*.bin")]
    train(recipe)
    assert [metrics(tmp_path / "run")[-1][f"{name}/tokens"] for name in sizes] == [36 * LENGTH, 12 * LENGTH]


@pytest.mark.parametrize("packs", [True, False])
def test_packed_rows_of_a_mixture_are_of_one_source_each(tmp_path: Path, packs: bool) -> None:
    generator = random.Random(3)
    for name in ("web", "code"):
        texts = ["".join(generator.choices(LETTERS[name], k=generator.randrange(3, 14))) for _ in range(120)]
        rows = [{"prompt": text[:2], "completion": text[2:]} for text in texts]
        write_rows(str(tmp_path / f"{name}.jsonl"), rows)
    sources = [
        {"source": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("web", 1), ("code", 2))
    ]
    attention = {} if packs else {"attn_implementation": "eager"}
    recipe = mixture(
        tmp_path, task="causal-lm", data={"train": sources, "format": "prompt_completion"}, schedule={"max_steps": 4},
        model={"config": dict(TINY_MODEL), **attention},
    )  # fmt: skip
    task = load_task("causal-lm")
    data: Any = task.load_data(check_recipe(Recipe.model_validate(recipe))[0], progress=False)
    assert [len(each) for each in data.samples_of] == [len(each) for each in data.train.datasets]
    assert (data.facts.num_train < data.facts.others["num_train_rows"]) == packs
    for samples, letters in zip(data.samples_of, (LETTERS["web"], LETTERS["code"]), strict=True):
        inputs = {int(token) for index in samples for token in data.train[index][0][data.train[index][3] >= 0]}
        assert inputs <= {*letters.encode(), 256, 257, 258}
    train(recipe)
    line = metrics(tmp_path / "run")[-1]
    assert [line[f"{name}/samples" if f"{name}/samples" in line else f"{name}/tokens"] for name in ("web", "code")] == [
        16 * LENGTH,
        32 * LENGTH,
    ]
    assert {"web/loss", "code/loss"} <= line.keys()


class OwnLoss(TextClassification):
    """A loss that gives the model all of a batch."""

    spec = TextClassification.spec

    def loss_sum(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert batch.keys() == {"input_ids", "attention_mask", "labels"}
        loss: torch.Tensor = model(**batch).loss
        return loss * len(batch["labels"])


def test_a_task_with_a_loss_of_its_own_gets_no_sources(tmp_path: Path) -> None:
    recipe = recipe_of("text-classification", tmp_path / "one", schedule={"max_steps": 2})
    other = recipe_of("text-classification", tmp_path / "two")["data"]["train"]
    recipe["data"]["train"] = [
        {"source": name, "weight": 1, "name": called}
        for called, name in (("one", recipe["data"]["train"]), ("two", other))
    ]
    recipe["task"] = "tests.training.test_mixture:OwnLoss"
    train(recipe)
    last = metrics(Path(recipe["output_dir"]))[-1]
    assert last["one/samples"] == last["two/samples"] == 8
    assert "one/loss" not in last


def test_samples_have_the_numbers_of_their_sources_also_where_those_lie_within_each_other() -> None:
    places = [np.array([0, 2, 5]), np.array([1, 3, 4])]
    sources = tuple(MixedSource(name, each, {0: 1}, None) for name, each in zip(("data", "data/part"), places))
    reader = WithSources([*"abcdef" * 2], MixedOrder(6, 2, 0, sources=sources))
    assert reader.__getitems__([*range(6, 12), 2]) == [[0, 1, 0, 1, 1, 0, 0], [*"abcdefc"]]
