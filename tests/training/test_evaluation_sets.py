"""Named evaluation sets: each has the metrics of a run that evaluates it alone, and the loss of all is their mean."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from accel_train import Recipe, train
from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from accel_train.core.metric_names import is_lower_better, label
from accel_train.data.sources import located
from accel_train.engine.evaluation import EvaluationReader, evaluate_sets
from accel_train.inference.evaluate import measure, open_for_evaluation
from accel_train.plan.format import format_plan
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.tasks import data_section
from accel_train.task import Facts, Scores, TaskData, Totals
from tests.support.boxes import write_coco
from tests.support.detectors import YOLOS
from tests.support.every_task import VIT
from tests.support.report import Page
from tests.support.runs import (
    SCENES,
    TINY_MODEL,
    metrics,
    recipe_dict,
    run,
    settings_refused,
    summary_of,
    write_corpus,
    write_jsonl,
    write_recipe_file,
    write_yaml,
)
from tests.support.text_tasks import BERT, write_csv, write_data
from tests.support.text_tasks import TASKS as TEXT_TASKS
from tests.support.wording import raises_golden

COUNTS = {"train": 40, "web": 21, "code": 34}
PARTS = ("web", "code")


def text_files(folder: Path, name: str) -> str:
    folder.mkdir()
    return str(write_corpus(folder, COUNTS[name]))


def completions(folder: Path, name: str) -> str:
    rows = [
        {"prompt": f"{name} {number}:", "completion": "ab" * (1 + number * 5 % 13)} for number in range(COUNTS[name])
    ]
    return str(write_jsonl(folder.with_suffix(".jsonl"), rows))


def of_task(task: str) -> Callable[[Path, str], str]:
    def write(folder: Path, name: str) -> str:
        folder.mkdir()
        return str(write_data(task, folder, COUNTS[name]))

    return write


def pictures(folder: Path, name: str) -> str:
    for number in range(COUNTS[name] // 3):
        path = folder / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), (number * 37 + len(name) * 11) % 256).save(path)
    return str(folder)


def masks(folder: Path, name: str) -> str:
    for number in range(COUNTS[name] // 3):
        for part, value in (("images", number * 7 % 256), ("masks", number % 3)):
            path = folder / part / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (32, 32), value).save(path)
    return str(folder)


def boxes(folder: Path, name: str) -> str:
    """COCO files whose images are in another folder."""
    write_coco(folder.parent / f"{name}.json", folder)
    return str(folder.parent / f"{name}.json")


def pairs(folder: Path, name: str) -> str:
    rows = [[f"step {number} of {number % 7}", f"loss {number} {name}"] for number in range(COUNTS[name])]
    return str(write_csv(folder.with_suffix(".csv"), ["anchor", "positive"], *rows))


def of_text(task: str) -> tuple[Callable[[Path, str], str], dict[str, Any]]:
    return of_task(task), {"model": {"config": TEXT_TASKS[task].config}, "data": TEXT_TASKS[task].data}


SMALL = {"config": TINY_MODEL}
ROWS = {"format": "prompt_completion"}
KINDS: dict[str, tuple[Callable[[Path, str], str], dict[str, Any]]] = {
    "causal-lm": (text_files, {"model": SMALL}),
    "causal-lm packed": (completions, {"model": SMALL, "data": ROWS}),
    "causal-lm padded": (completions, {"model": {**SMALL, "attn_implementation": "eager"}, "data": ROWS}),
    "masked-lm": (text_files, {"model": {"config": BERT}}),
    **{task: of_text(task) for task in TEXT_TASKS if task != "masked-lm"},
    "sentence-embedding": (pairs, {"model": {"config": BERT}, "data": {"pair_columns": ["anchor", "positive"]}}),
    "image-classification": (pictures, {"model": {"config": VIT}, "data": {"image_size": 16}}),
    "semantic-segmentation": (masks, {"model": SCENES["model"], "data": {"image_size": 32}}),
    "object-detection": (boxes, {"model": {"config": YOLOS}, "data": {"image_size": 64}}),
}
"""Writer of a file or folder, and the model and data of a recipe. The name begins with the task's."""


class Sums:
    """A task without a model: the metric `first` is the number of the first sample."""

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        return Scores({"first": float(totals["rows_index"][0])})


class Doubled(nn.Module):
    def forward(self, batch: dict[str, Tensor], _: str) -> dict[str, Tensor]:
        return {"loss_sum": 2.0 * batch["x"].double().sum(), "rows_x": batch["x"]}


def recipe(folder: Path, kind: str, name: str, files: dict[str, str], held: Any, **sections: Any) -> dict[str, Any]:
    own = KINDS[kind][1]
    data = {**own.get("data", {}), "train": files["train"], "eval": held, "num_workers": 0}
    small = {"task": kind.partition(" ")[0], "output_dir": str(folder / name), "model": own["model"], "data": data}
    return recipe_dict(folder, **{**small, "schedule": {"max_steps": 2}, **sections})


def written(folder: Path, kind: str) -> dict[str, str]:
    return {name: KINDS[kind][0](folder / name, name) for name in COUNTS}


def sets_of(files: dict[str, str]) -> dict[str, str]:
    return {name: files[name] for name in PARTS}


def trained(*given: Any, **sections: Any) -> dict[str, Any]:
    summary: dict[str, Any] = train(Recipe.model_validate(recipe(*given, **sections))).summary
    return summary


@pytest.mark.parametrize("kind", KINDS)
def test_each_set_has_the_metrics_of_a_run_with_that_set_alone(tmp_path: Path, kind: str) -> None:
    files = written(tmp_path, kind)
    both = trained(tmp_path, kind, "both", files, sets_of(files))
    found, targets, losses = both["eval"], 0, 0.0
    for name in PARTS:
        alone = trained(tmp_path, kind, name, files, files[name])["eval"]
        assert {metric: found[f"{name}/{metric}"] for metric in alone} == alone
        targets += alone["num_targets"]
        losses += alone["loss"] * alone["num_targets"]
    assert found["num_targets"] == targets
    assert found["loss"] == pytest.approx(losses / targets, rel=1e-12)


@pytest.mark.parametrize("kind", ["causal-lm packed", "text-classification", "question-answering"])
def test_all_data_have_the_metrics_of_a_list_of_the_same_data(tmp_path: Path, kind: str) -> None:
    files = written(tmp_path, kind)
    found = trained(tmp_path, kind, "sets", files, sets_of(files))["eval"]
    plain = trained(tmp_path, kind, "list", files, [files[name] for name in PARTS])["eval"]
    assert {metric: found[metric] for metric in plain} == pytest.approx(plain, rel=1e-6)


def test_bits_per_byte_of_all_sets_count_the_targets_of_each(tmp_path: Path) -> None:
    files = written(tmp_path, "causal-lm")
    summary = trained(tmp_path, "causal-lm", "run", files, sets_of(files))
    texts = [json.loads(line)["text"] for name in PARTS for line in Path(files[name]).read_text().splitlines()]
    num_bytes = sum(len(text.encode()) for text in texts)
    # Each set begins with a separator, which is not a target.
    assert summary["eval"]["num_targets"] == num_bytes + len(texts) - len(PARTS)
    bits = summary["eval"]["loss"] / math.log(2) * summary["eval"]["num_targets"] / num_bytes
    assert summary["eval"]["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal-lm", "causal-lm packed", "text-classification", "image-classification"])
def test_the_metrics_of_sets_are_equal_on_any_number_of_processes(tmp_path: Path, kind: str) -> None:
    files, found = written(tmp_path, kind), []
    for processes in (1, 2, 4):
        sections = {"evaluate": {"every_steps": 1}, "batch": {"global_batch_size": 8, "per_device_eval_batch_size": 4}}
        given = recipe(tmp_path, kind, f"on-{processes}", files, sets_of(files), **sections)
        run(write_yaml(tmp_path / f"{processes}.yaml", given), processes=processes)
        lines = metrics(tmp_path / f"on-{processes}", "eval")
        found.append([{name: line[name] for name in line.keys() - {"seconds", "split"}} for line in lines])
    assert "code/loss" in found[0][0]
    for other in found[1:]:
        assert len(other) == len(found[0]) == 2
        for line, first in zip(other, found[0], strict=True):
            assert line == pytest.approx(first, rel=1e-5)


def test_a_resumed_run_keeps_its_sets_and_finds_the_best_by_one_of_them(tmp_path: Path) -> None:
    files = written(tmp_path, "causal-lm")
    sections = {"evaluate": {"every_steps": 1, "metric_for_best_model": "code/loss"}, "schedule": {"max_steps": 4}}
    whole = trained(tmp_path, "causal-lm", "whole", files, sets_of(files), **sections)
    given = recipe(tmp_path, "causal-lm", "stopped", files, sets_of(files), **sections)
    task = {"task": "tests.support.tasks.probe:ProbeTask", "options": {"term_at": {"step": 1, "rank": 0}}}
    run(write_yaml(tmp_path / "stopped.yaml", given | task), expect=75)
    assert len(metrics(tmp_path / "stopped", "eval")) < 4
    run(write_yaml(tmp_path / "stopped.yaml", given | {"task": task["task"]}))
    lines = [metrics(tmp_path / name, "eval") for name in ("whole", "stopped")]
    for one, other in zip(*lines, strict=True):
        assert {name: one[name] for name in one if name != "seconds"} == {
            name: other[name] for name in other if name != "seconds"
        }
    best = min(lines[0], key=lambda line: line["code/loss"])
    assert (whole["best_step"], whole["best_metric"]) == (best["step"], best["code/loss"])
    assert summary_of(tmp_path / "stopped")["best_metric"] == best["code/loss"]


def test_max_samples_are_spread_over_the_sets_with_one_of_each_at_least(tmp_path: Path) -> None:
    read: list[list[int]] = []
    samples: Any = list(range(110))

    def collate(some: Any) -> dict[str, Any]:
        read.append(some)
        return {"x": torch.tensor(some), "num_targets": len(some)}

    sizes = {"small": 3, "middle": 27, "large": 80}
    facts = Facts(eval_sets={name: {"num_eval": size} for name, size in sizes.items()})
    data = TaskData(samples, samples, collate, "", facts)
    reader = EvaluationReader(Accelerator(cpu=True), data, 4, max_samples=20)
    found, scores = evaluate_sets(cast("Any", Sums()), reader, Doubled())
    numbers = [number for each in read for number in each]
    # 20 x 3 / 110 is less than one sample.
    ends = [(0, 3, 1), (3, 30, 4), (30, 110, 14)]
    assert [sum(first <= number < end for number in numbers) for first, end, _ in ends] == [1, 4, 14]
    assert numbers == [first + i * (end - first) // count for first, end, count in ends for i in range(count)]
    # No batch has samples of two sets.
    assert [len(each) for each in read] == [1, 4, 4, 4, 4, 2]
    assert found.num_samples == scores.metrics["num_targets"] == 19
    assert scores.metrics["loss"] == pytest.approx(2 * sum(numbers) / 19)
    assert scores.metrics["middle/loss"] == 2 * sum(numbers[1:5]) / 4
    assert scores.metrics["middle/first"] == numbers[1]


def test_one_named_set_is_a_set(tmp_path: Path) -> None:
    files = written(tmp_path, "causal-lm")
    found = trained(tmp_path, "causal-lm", "run", files, {"web": files["web"]})["eval"]
    assert found["web/loss"] == found["loss"]


@pytest.mark.parametrize(
    "held", [{}, {"": "a.txt"}, {"a b": "a.txt"}, {"web": "a.txt", "1": "b.txt"}, {"web/en": "a.txt"}]
)
def test_names_that_are_not_words_are_refused(held: dict[str, str]) -> None:
    section = data_section("causal-lm")
    given = {"train": "python-stdlib", "eval": held}
    assert settings_refused(lambda: section.model_validate(given)) == ("data.eval",)


def test_a_refused_name_is_told_with_its_file(tmp_path: Path) -> None:
    path = write_recipe_file(tmp_path, data={"eval": {"a b": "c.txt"}})
    with raises_golden():
        load_recipe(path)


def test_sets_are_given_on_the_command_line(tmp_path: Path) -> None:
    path = write_recipe_file(tmp_path, data={"eval": {"web": "a.txt", "code": ["b.txt", "c.txt"]}})
    assert load_recipe(path).data.eval == {"web": "a.txt", "code": ("b.txt", "c.txt")}
    assert load_recipe(path, arguments=["--data.eval", "{news: d.txt}"]).data.eval == {"news": "d.txt"}
    assert load_recipe(path, arguments=["--data.eval", "d.txt"]).data.eval == "d.txt"
    again = write_recipe_file(tmp_path, data={"eval": "e.txt"})
    assert load_recipe(again, arguments=["--data.eval.web", "d.txt"]).data.eval == {"web": "d.txt"}


@pytest.mark.parametrize("kind", ["text-classification", "image-classification"])
def test_sets_that_share_files_are_refused(tmp_path: Path, kind: str) -> None:
    files = written(tmp_path, kind)
    with pytest.raises(SettingError, match="web, all") as caught:
        trained(tmp_path, kind, "run", files, {"web": files["web"], "all": [files["web"], files["code"]]})
    assert caught.value.settings == ("data.eval",)


def test_a_set_without_a_sample_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, "causal-lm")
    empty = write_jsonl(tmp_path / "empty.jsonl", [{"text": ""}])
    with raises_golden(SettingError):
        trained(tmp_path, "causal-lm", "run", files, {"web": files["web"], "none": str(empty)})


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.jsonl", ".", "../{}/a.jsonl"])
def test_files_of_a_set_are_found_by_pattern_and_folder(tmp_path: Path, pattern: str) -> None:
    # One path begins with the other.
    rows = {name: tmp_path / name for name in ("train", "web", "web_2")}
    for count, folder in enumerate(rows.values()):
        folder.mkdir(parents=True)
        write_jsonl(
            folder / "a.jsonl", [{"text": f"{folder} {number}", "label": number % 2} for number in range(20 + count)]
        )
    held = {name: str(rows[name] / pattern.format(name)) for name in ("web", "web_2")}
    files = {"train": str(rows["train"] / "a.jsonl")}
    data = trained(tmp_path, "text-classification", "run", files, held)["data"]
    assert data["eval_sets"] == {"web": {"num_eval": 21}, "web_2": {"num_eval": 22}}


def test_the_report_has_a_curve_of_each_set(tmp_path: Path) -> None:
    files = written(tmp_path, "text-classification")
    trained(tmp_path, "text-classification", "run", files, sets_of(files), evaluate={"every_steps": 1})
    page = Page((tmp_path / "run" / "report.html").read_text())
    lines = metrics(tmp_path / "run", "eval")
    for name in PARTS:
        chart = page.charts[f"eval_{name}/loss"]
        assert chart["title"] == f"Loss, {name}"
        assert chart["curves"][0]["y"] == [pytest.approx(line[f"{name}/loss"], rel=1e-4) for line in lines]
        assert f"eval_{name}/accuracy" in page.charts


def test_plan_names_the_sets_with_their_sizes(tmp_path: Path) -> None:
    files = written(tmp_path, "text-classification")
    given = recipe(tmp_path, "text-classification", "run", files, sets_of(files))
    found = format_plan(resolve_plan(Recipe.model_validate(given)))
    shown = dict(re.findall(r"samples of (\w+) +(\d+)", found))
    assert shown == {name: str(COUNTS[name]) for name in PARTS}


@pytest.mark.parametrize("kind", ["causal-lm", "text-classification"])
def test_a_finished_run_is_evaluated_by_set_and_predicts_all_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = written(tmp_path, kind)
    found = trained(tmp_path, kind, "run", files, sets_of(files), evaluate={"max_samples": 20})["eval"]
    monkeypatch.chdir(tmp_path)
    again = measure(open_for_evaluation(Path("run"), None, ())).metrics
    assert again == found
    # Other data have no sets.
    other = measure(open_for_evaluation(Path("run"), files["web"], ())).metrics
    assert other == {name: value for name, value in other.items() if "/" not in name}
    if kind == "text-classification":
        assert main(["predict", "run"]) == 0
        rows = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
        assert len(rows) == 1 + COUNTS["web"] + COUNTS["code"]
        assert rows[1].startswith(files["web"])
        assert rows[-1].startswith(files["code"])


def test_a_moved_run_finds_the_data_of_its_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    (there / "web.txt").write_text("a")
    (there / "code.txt").write_text("b")
    data = data_section("causal-lm").model_validate({"train": "web.txt", "eval": {"web": "web.txt", "c": ["code.txt"]}})
    monkeypatch.chdir(here)
    found = located(data, str(there)).eval
    assert found == {"web": str(there / "web.txt"), "c": (str(there / "code.txt"),)}


@pytest.mark.parametrize(
    ("name", "is_lower"), [("web/loss", True), ("error_cases/accuracy", False), ("a/perplexity", True), ("a/f1", False)]
)
def test_the_better_value_of_a_metric_of_a_set_is_that_of_the_metric(name: str, is_lower: bool) -> None:
    assert is_lower_better(name) is is_lower
    assert label(name) == f"{label(name.partition('/')[2])}, {name.partition('/')[0]}"
