"""Each task's list of metrics, `spec.metrics`, holds the names that its evaluations report, and no other names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train import Recipe, train
from accel_train.core.json_io import load_json
from accel_train.core.metric_names import METRICS, OF_CLASSES, OF_EVERY_EVALUATION, label
from accel_train.metrics import METRICS as BY_NAME
from accel_train.recipe.tasks import TASKS
from accel_train.report.html import MOST_SCORES, describe_run, main_metrics
from accel_train.report.run import load_run
from tests.support.every_task import CASES, VIT, recipe_of, task_of
from tests.support.runs import write_jsonl
from tests.support.text_tasks import evaluated, load, sentence, several_topics, write_data


def of_rows(folder: Path) -> dict[str, Any]:
    rows = [{"prompt": f"count to {number}", "completion": "one two three"} for number in range(20)]
    return {"data": {"train": str(write_jsonl(folder / "rows.jsonl", rows)), "format": "prompt_completion"}}


def of_many_classes(folder: Path) -> dict[str, Any]:
    images = np.random.default_rng(0).integers(0, 256, (60, 16, 16), dtype=np.uint8)
    np.savez(folder / "a.npz", images=images, labels=np.arange(60) % 12)
    return {"data": {"train": str(folder / "a.npz"), "image_size": 16, "eval_fraction": 0.3}, "model": {"config": VIT}}


def of_plain_tags(folder: Path) -> dict[str, Any]:
    rows = [sentence(number) for number in range(40)]
    texts = ["\n".join(f"{word}\t{tag.replace('-', '')}" for word, tag in zip(*row)) for row in rows]
    (folder / "plain.conll").write_text("\n\n".join(texts) + "\n")
    return {"data": {"train": str(folder / "plain.conll")}}


def of_topics(folder: Path) -> dict[str, Any]:
    model = {"config": {"model_type": "ngrams", "logit_temperature": 2.0}}
    data = {"train": str(write_data("text-classification", folder, label=several_topics))}
    return {"data": data, "model": model, "tokenizer": "bytes"}


def of_unanswered(folder: Path) -> dict[str, Any]:
    return {"data": {"train": str(write_data("question-answering", folder, unanswered=3))}}


OTHERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "causal-lm": of_rows,
    "text-classification": of_topics,
    "image-classification": of_many_classes,
    "token-classification": of_plain_tags,
    "question-answering": of_unanswered,
}
"""Data with which a task reports other metrics than with the data of `CASES`."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folder of each case, after a step."""
    runs = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp(case.replace(" ", "-"))
        recipe = recipe_of(case, folder, schedule={"max_steps": 1}, evaluate={"max_samples": 16})
        runs[case] = Path(train(Recipe.model_validate(recipe)).output_dir)
    return runs


def reported(run: Path) -> set[str]:
    return {*load_json(run / "summary.json")["eval"]} - {*OF_EVERY_EVALUATION}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_lists_the_metrics_that_it_reports_and_reports_all_that_it_lists(
    task: str, trained: dict[str, Path], tmp_path: Path
) -> None:
    found = set[str]().union(*(reported(run) for case, run in trained.items() if task_of(case) == task))
    if task in OTHERS:
        (tmp_path / "other").mkdir()
        recipe = recipe_of(task, tmp_path, **OTHERS[task](tmp_path / "other"))
        found |= {*evaluated(*load(Recipe.model_validate(recipe)), 16)[0]} - {*OF_EVERY_EVALUATION}
    assert found == {*TASKS[task].metrics}
    assert len(TASKS[task].metrics) == len(found)


def test_the_table_has_every_metric_of_a_task_or_of_the_registry_and_no_other() -> None:
    of_tasks = {name for spec in TASKS.values() for name in spec.metrics}
    assert {*METRICS} == {*OF_EVERY_EVALUATION, *of_tasks, *BY_NAME}
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)
    assert {*OF_CLASSES} <= {*METRICS}


@pytest.mark.parametrize("case", CASES)
def test_the_first_numbers_of_a_report_are_the_loss_and_the_main_metrics_of_the_task(
    case: str, trained: dict[str, Path]
) -> None:
    run = load_run(trained[case])
    own = [name for name in TASKS[task_of(case)].metrics if name in reported(trained[case])]
    first, *others = main_metrics(run)
    assert first == "loss"
    assert others == [name for name in others if name in own]
    assert own[0] == others[0]
    assert 1 <= len(others) <= MOST_SCORES
    shown = [number["label"] for number in describe_run(run)["numbers"]]
    shown = [each for each in shown if not each.startswith("Best baseline: ")]
    assert shown[: 1 + len(others)] == ["Evaluation loss", *map(label, others)]
