"""Each task has its own settings of `data`, and another task's setting is an error before anything is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from accel_train.checkpoint.run_recipe import read_recipe
from accel_train.core.errors import RecipeProblems, SettingError
from accel_train.data.batch_sizes import resolve_batch
from accel_train.data.sources import unread_formats
from accel_train.engine.resolve import resolve_run
from accel_train.observe.run_folder import RECIPE_FILE
from accel_train.recipe.data import Augment, Data, WeightedSource
from accel_train.recipe.evaluate import Evaluate
from accel_train.recipe.explain import example_of, explain, explained
from accel_train.recipe.loader import Recipe, make_recipe
from accel_train.recipe.names import is_section, recipe_names
from accel_train.recipe.tasks import TASKS, TaskSpec, optional_settings, refuse_unreported, refuse_unused
from accel_train.recipe.values import Section
from accel_train.recipe.writer import format_recipe
from accel_train.task import Task, TaskData, load_task
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.masked_lm.config import MaskedLMData
from accel_train.tasks.module import FitData
from tests.support.every_task import CASES, task_of
from tests.support.every_task import recipe_of as small_recipe
from tests.support.runs import Settings, write_jsonl
from tests.support.text_tasks import questions, sentence

SETTINGS = [name for name in recipe_names() if name.startswith("data.") and name.count(".") == 1]


def recipe_of(task: str, *, other: Settings | None = None, **data: Any) -> Any:
    tree = {
        "task": task,
        "output_dir": "run",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"train": "x", **data},
        "schedule": {"max_steps": 1},
        **(other or {}),
    }
    return make_recipe(tree, "recipe")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_its_own_settings_and_refuses_those_of_other_tasks_by_their_names(task: str) -> None:
    for name in SETTINGS:
        field = name.removeprefix("data.")
        owners = [other for other, entry in TASKS.items() if field in entry.data.model_fields]
        value = {} if is_section(recipe_names()[name]) else example_of(name)
        if task in owners:
            assert hasattr(recipe_of(task, **{field: value}).data, field)
            continue
        with pytest.raises(RecipeProblems) as refused:
            recipe_of(task, **{field: value})
        (problem,) = refused.value.args
        assert name in problem
        assert all(owner in problem for owner in owners)


def test_at_most_25_settings_are_shared_and_explain_lists_the_tasks_of_the_others() -> None:
    of_sources = {f"data.train.{field}" for field in WeightedSource.model_fields}
    shared = {each.name for each in explained("data") if not each.tasks} - of_sources
    assert shared == {"data", *(f"data.{field}" for field in Data.model_fields)}
    assert len(shared) <= 25
    assert explained("data.doc_stride")[0].tasks == ("question-answering",)
    of_tasks = set(chain.from_iterable(each.tasks for each in explained("data")))
    assert of_tasks == set(TASKS)
    assert "question-answering" in explain("data.doc_stride")


def test_a_setting_of_a_task_has_the_same_type_and_default_in_every_task() -> None:
    for field in {field for entry in TASKS.values() for field in entry.data.model_fields}:
        infos = [entry.data.model_fields[field] for entry in TASKS.values() if field in entry.data.model_fields]
        assert len({(str(info.annotation), repr(info.default)) for info in infos}) == 1, field


OTHER = {
    "evaluate.metrics": ["no_metric"],
    "evaluate.num_examples": 5,
    "loss.chunked": True,
    "loss.class_weights": "balanced",
    "loss.router_aux": True,
    "model.pad_vocab_to_multiple_of": 8,
    "tokenizer": "other",
    "data.augment.random_resized_crop": (0.5, 0.5),
    "data.augment.rand_augment_magnitude": 5.0,
    "data.augment.scale_range": (1.0, 1.5),
}
"""Values of settings whose example is a default, asks for nothing, or belongs to another setting."""


def with_setting(task: str, name: str) -> Any:
    section, _, field = name.rpartition(".")
    if section == "data.augment":
        operations = {"rand_augment_ops": 1} if "magnitude" in field else {}
        return recipe_of(task, augment={**operations, field: OTHER.get(name) or 1})
    value = OTHER.get(name) or (
        {"num_beams": 3} if is_section(recipe_names()[name]) else example_of(name) or 7  # 7: a number, where 0 is shown
    )
    more = {"config": {"model_type": "gpt2"}} if section == "model" else {}
    return recipe_of(task, other={section: {**more, field: value}} if section else {field: value})


def test_17_settings_or_more_depend_on_the_task() -> None:
    assert len(optional_settings()) >= 17
    assert {"tokenizer", "evaluate.metrics", "evaluate.generation", "loss.z_loss"} <= optional_settings()


@pytest.mark.parametrize("name", sorted(optional_settings()))
def test_a_setting_that_a_task_does_not_read_is_refused_and_names_the_tasks_that_do(name: str) -> None:
    users = [task for task, spec in TASKS.items() if name in spec.uses]
    assert users
    assert len(users) < len(TASKS)
    for task, spec in TASKS.items():
        if name.startswith("data.") and "augment" not in spec.data.model_fields:
            continue
        recipe = with_setting(task, name)
        if task in users:
            refuse_unused(recipe, spec)
            continue
        with pytest.raises(SettingError) as refused:
            refuse_unused(recipe, spec)
        assert refused.value.settings == (name,)
        assert all(user in refused.value.problem for user in users)
    own = with_setting(users[0] if name.startswith("data.") else "my_module:MyTask", name)
    own = own.model_copy(update={"task": "my_module:MyTask"})
    with pytest.raises(SettingError) as refused:
        refuse_unused(own, Task.spec)
    assert name in refused.value.remedy
    refuse_unused(own, TaskSpec(uses=frozenset((name, "data.augment.rand_augment_ops"))))


def test_a_prompt_may_be_taken_from_a_recipe_that_sets_its_length() -> None:
    assert Evaluate(sample_prompt=None, sample_tokens=120).unread().keys() == {"generation.length_penalty"}


def test_metrics_that_a_task_reports_anyway_may_be_named() -> None:
    for task, spec in TASKS.items():
        refuse_unused(recipe_of(task, other={"evaluate": {"metrics": list(spec.metrics)}}), spec)


@pytest.mark.parametrize("task", TASKS)
def test_a_metric_that_no_evaluation_of_the_task_reports_cannot_choose_the_best_model(task: str) -> None:
    spec = TASKS[task]
    others = {name for other in TASKS.values() for name in other.metrics} - {*spec.metrics}
    for name in ("loss", "eval_loss", "num_targets", *spec.metrics):
        refuse_unreported(recipe_of(task, other={"evaluate": {"metric_for_best_model": name}}), spec)
    for name in (*others, f"{spec.metrics[0]}x"):
        evaluate = {"metric_for_best_model": name}
        with pytest.raises(SettingError) as refused:
            refuse_unreported(recipe_of(task, other={"evaluate": evaluate}), spec)
        assert refused.value.settings == ("evaluate.metric_for_best_model",)
        refuse_unreported(recipe_of(task, other={"evaluate": {**evaluate, "metrics": [name]}}), spec)
        refuse_unreported(recipe_of(task, other={"evaluate": {**evaluate, "allow_hub_metrics": True}}), spec)
    assert spec.metrics[0] in refused.value.remedy


def test_greater_is_better_decides_on_the_metric_for_the_best_model_alone() -> None:
    own = recipe_of("a:B", other={"evaluate": {"metric_for_best_model": "eval_cost", "greater_is_better": False}})
    assert own.evaluate.best_metric == "cost"
    assert own.evaluate.is_lower_better("cost")
    assert not own.evaluate.is_lower_better("accuracy")
    assert not recipe_of("a:B").evaluate.is_lower_better("cost")


def of_rows(case: str, folder: Path) -> dict[str, Any]:
    """Write rows for a task, and return its `data`, so that a run reads what it leaves unread in other cases."""
    said = {"messages": [{"role": role, "content": "one two"} for role in ("user", "assistant")], "tools": []}
    rows: dict[str, list[dict[str, Any]]] = {
        "causal-lm of prompts": [{"prompt": f"say {n}", "completion": f"one {n}", "input": "now"} for n in range(20)],
        "causal-lm of chats": [said] * 20,
        "token-classification": [dict(zip(("tokens", "tags"), sentence(number))) for number in range(20)],
        "question-answering": questions(20, unanswered=3),
    }
    settings: dict[str, Settings] = {
        "causal-lm of prompts": {"format": "prompt_completion", "input_column": "input"},
        "causal-lm of chats": {"format": "chat", "tools_column": "tools", "chat_template": TEMPLATE},
    }
    if case not in rows:
        return {}
    return {"train": str(write_jsonl(folder / "rows.jsonl", rows[case])), **settings.get(case, {})}


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}{{ tools }}"
)
IN_A_CASE = {
    "data.box_format": "tables of boxes",
    "data.cache_limit": "text that is larger than a shard",
    "data.class_column": "tables of boxes",
    "data.image_column": "a table of images",
    "data.objects_column": "tables of images with lists of boxes",
    "data.pad_to_multiple_of": "rows that are not packed, of causal-lm",
    "evaluate.allow_hub_metrics": "metrics of the hub",
    "model.accept_new_tokenizer": "pretrained weights with another tokenizer",
}
"""Settings that these recipes do not reach, with what they are for."""


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the dotted names of all settings that are read."""
    names: set[str] = set()
    sections = {kind: name for name, kind in recipe_names().items() if is_section(kind)} | {Recipe: ""}
    read = Section.__getattribute__

    def note(self: Section, field: str) -> Any:
        kind = next((each for each in type(self).__mro__ if each in sections), None)
        if kind is not None and field in type(self).model_fields:
            names.add(f"{sections[kind]}.{field}".lstrip("."))
        return read(self, field)

    with monkeypatch.context() as patched:
        patched.setattr(Section, "__getattribute__", note)
        yield names


def use(task: Task, recipe: Recipe) -> TaskData:
    """Call the methods of a task that a training and its evaluation call, and return its data."""
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(0)
    model = task.build_model(recipe, data)
    task.choices(recipe, model)
    both: Any = ((True, data.train), (False, data.eval or data.train))
    for side, samples in both:
        draw = data.draw if side else None
        drawn = [
            samples[at] if draw is None else draw(at, np.random.default_rng(at)) for at in range(min(4, len(samples)))
        ]
        batch = data.collate(drawn)
        batch.pop("num_targets")
        model.train(side)
        if side and task.global_loss is None:
            task.loss_sum(model, batch)
        elif not side:
            with torch.no_grad():
                task.evaluate_batch(model, batch)
    task.sample(recipe, model, data)
    if hasattr(data.source, "shown"):
        # Reports show these samples (training/finish.py).
        assert recipe.evaluate.num_examples
    return data


@pytest.mark.parametrize("case", [*CASES, "causal-lm of prompts", "causal-lm of chats"])
def test_a_task_reads_every_setting_that_it_uses(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(task_of(case))
    spec = task.spec
    sections: dict[str, Any] = {"data": of_rows(case, tmp_path)}
    if "evaluate.sample_prompt" in spec.uses:
        more = {"generation": {"num_beams": 2}} if "evaluate.generation" in spec.uses else {"sample_tokens": 2}
        sections["evaluate"] = {"sample_prompt": "a", **more}
    recipe = Recipe.model_validate(small_recipe(case if case in CASES else task_of(case), tmp_path, **sections))
    refuse_unused(recipe, spec)
    with recorded(monkeypatch) as names:
        data = use(task, recipe)
    fields = {f"data.{name}" for name in spec.data.model_fields.keys() - Data.model_fields.keys()}
    if "data.augment" in fields:
        fields |= {f"data.augment.{name}" for name in Augment.model_fields} - optional_settings()
    unread = {f"data.{name}" for name in recipe.data.unread()} | data.unread.keys()
    assert (spec.uses | fields) - unread - names <= IN_A_CASE.keys()


UNREAD: list[tuple[str, type[Data], Settings]] = [
    ("messages_column", CausalLMData, {"messages_column": "talk"}),
    ("completion_only_loss", CausalLMData, {"completion_only_loss": False}),
    ("mask_documents", CausalLMData, {"mask_documents": True, "format": "chat"}),
    ("prompt_column", CausalLMData, {"prompt_column": "say", "format": "chat"}),
    ("id_column", CausalLMData, {"id_column": "id"}),
    ("label_column", MaskedLMData, {"label_column": "class"}),
    ("eval_fraction", FitData, {"eval_fraction": 0.5}),
    ("train", FitData, {"train": "rows.csv"}),
]


@pytest.mark.parametrize(("name", "kind", "data"), UNREAD)
def test_a_setting_of_data_that_others_leave_unread_is_refused(name: str, kind: type[Data], data: Settings) -> None:
    recipe = recipe_of("causal-lm")

    def check(**data: Any) -> None:
        section = kind(**{"train": "custom", **data})
        refuse_unused(recipe.model_copy(update={"data": section}), TaskSpec(data=kind))

    with pytest.raises(SettingError) as refused:
        check(**data)
    assert refused.value.settings == (f"data.{name}",)
    check()
    check(**kind(train="custom").model_dump())


BACKEND = {"compile_backend": "aot_eager"}
BUDGET = {"gradient_checkpointing": {"memory_budget": 0.5}}
FREE = {"schedule": {"type": "constant", "max_steps": 1}}
SPANS = {"tag_format": "spans", "sentence_column": "s"}
UNREAD_WITHOUT: list[tuple[str, str, Settings, Settings]] = [
    ("data.augment.rand_augment_magnitude", "image-classification", {"augment": {"rand_augment_magnitude": 5}}, {}),
    ("data.margin", "sentence-embedding", {"margin": 0.3}, {}),
    ("data.scale", "sentence-embedding", {"scale": 3, "objective": "triplet", "pair_columns": ["a", "b", "c"]}, {}),
    ("data.symmetric", "sentence-embedding", {"symmetric": True, "score_column": "score"}, {}),
    ("data.stratify", "text-classification", {"stratify": True, "group_column": "q"}, {}),
    ("optimizer.ema_decay", "causal-lm", {}, {"optimizer": {"name": "schedule_free_adamw", "ema_decay": 0.9}, **FREE}),
    ("data.sentence_column", "token-classification", SPANS, {}),
    ("data.id_column", "seq2seq", {"target_suffix": "en", "id_column": "id"}, {}),
    ("evaluate.generation.length_penalty", "seq2seq", {}, {"evaluate": {"generation": {"length_penalty": 2.0}}}),
    ("precision.compile_mode", "causal-lm", {}, {"precision": {**BACKEND, "compile_mode": "max-autotune"}}),
    ("precision.gradient_checkpointing", "causal-lm", {}, {"precision": {**BUDGET, "compile": False}}),
    ("optimizer.options", "causal-lm", {}, {"optimizer": {"options": {"a": 1}}}),
    ("parallel.zero_stage", "causal-lm", {}, {"parallel": {"zero_stage": 3}}),
    ("parallel.dp_shard_size", "causal-lm", {}, {"parallel": {"dp_shard_size": 2}}),
    ("parallel.cpu_offload", "causal-lm", {}, {"parallel": {"strategy": "deepspeed", "cpu_offload": True}}),
]


@pytest.mark.parametrize(("name", "task", "data", "other"), UNREAD_WITHOUT)
def test_a_setting_that_others_leave_unread_is_refused_in_a_training_and_may_be_stored(
    name: str, task: str, data: Settings, other: Settings
) -> None:
    recipe = recipe_of(task, other=other, **data)
    with pytest.raises(SettingError) as refused:
        refuse_unused(recipe, TASKS[task])
    assert refused.value.settings == (name,)
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    refuse_unused(recipe_of(task), TASKS[task])


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (0.0, 1.0)])
def test_a_range_rises_and_is_above_0(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValidationError):
        Augment(scale_range=bounds)
    Augment(scale_range=(1.0, 2.0))


@pytest.mark.parametrize(
    ("name", "value", "file"),
    [
        ("delimiter", ";", "a.jsonl"),
        ("header", "none", "a.txt"),
        ("quoting", "none", "a.parquet"),
        ("lines", "label_text", "a.csv"),
        ("encoding", "latin-1", "a.parquet"),
    ],
)
def test_a_setting_of_another_format_is_refused(name: str, value: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / file).touch()
    for train in ("rows", f"rows/{file}", "rows/a.*", "no_folder"):
        data = TASKS["text-classification"].data.model_validate({"train": str(tmp_path / train), name: value})
        assert unread_formats(data).keys() == {f"data.{name}"}
    (tmp_path / "rows" / {"lines": "b.txt"}.get(name, "b.csv")).touch()
    assert unread_formats(data.model_copy(update={"train": (str(tmp_path / "rows"),)})) == {}


def test_settings_of_formats_may_be_for_a_table_of_boxes(tmp_path: Path) -> None:
    (tmp_path / "boxes.csv").touch()
    data = {"train": str(tmp_path / "no"), "annotations": str(tmp_path / "boxes.csv"), "delimiter": ";"}
    assert unread_formats(TASKS["object-detection"].data.model_validate(data)) == {}


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("text-classification of numbers", "evaluate.num_examples", 5),
        ("text-classification of numbers", "loss.class_weights", "balanced"),
        ("text-classification of numbers", "loss.label_smoothing", 0.1),
        ("text-classification of numbers", "data.stratify", True),
        ("question-answering", "evaluate.null_score_diff_threshold", 3.0),
    ],
)
def test_a_setting_that_the_data_leave_unread_is_refused_in_a_training_only(
    case: str, name: str, value: Any, tmp_path: Path
) -> None:
    section, _, field = name.partition(".")

    def resolved(**sections: Any) -> Any:
        recipe = Recipe.model_validate(small_recipe(case, tmp_path, **sections))
        data = load_task(recipe.task).load_data(recipe, progress=False)
        return resolve_run(recipe, data, resolve_batch(recipe.batch, 1))

    with pytest.raises(SettingError) as refused:
        resolved(**{section: {field: value}})
    assert refused.value.settings == (name,)
    assert refused.traceback[-2].name == "resolve_run", "an evaluation reads the data with the stored recipe"
    resolved()


def test_a_run_folder_with_a_setting_that_nothing_reads_is_still_read(tmp_path: Path) -> None:
    stored = recipe_of("image-classification", augment={"rand_augment_magnitude": 5.0})
    (tmp_path / RECIPE_FILE).write_text(format_recipe(stored))
    assert read_recipe(tmp_path).data.augment.rand_augment_magnitude == 5.0  # type: ignore[attr-defined]
