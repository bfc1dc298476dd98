"""The description of a task, and the table of the built-in ones. A new task is a folder and a line here."""

import importlib
import textwrap
from collections import UserDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from accel_train.core.errors import SettingError, check_packages, setting_error
from accel_train.core.format import did_you_mean
from accel_train.core.metric_names import OF_EVERY_EVALUATION
from accel_train.recipe.data import Data, OwnData
from accel_train.recipe.values import Section, value_of
from accel_train.recipe.yaml_core import show

if TYPE_CHECKING:
    from accel_train.recipe.schema import Recipe

DEFAULT_TASK = "causal-lm"
"""Task of a recipe that names none."""
ANY_TASK = "any"
"""Task of a recipe whose data is still to be recognized: its `data` takes the settings of all tasks."""

Gives = Literal["continuation", "text", "tokens", "class", "tags", "answer", "choice", "boxes", "mask", "vector"]

TEXT = frozenset(("tokenizer", "model.accept_new_tokenizer", "model.pad_vocab_to_multiple_of"))
"""Optional settings of tasks that read texts."""
TARS = "WebDataset tars"
"""Part of `TaskSpec.takes` of tasks that read them."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Description of a task: settings, needs, and results.

    Refusals, help, docs, predictions, cards, and reports follow from it.
    """

    data: type[Data] = Data
    """Class of the recipe's `data` section. `MyData.of(recipe.data)` reads it."""
    uses: frozenset[str] = frozenset()
    """Optional settings that the task reads, by dotted name. A setting that another task uses is an error here. A
    setting that depends on other settings of its section is in `Section.unread` instead.
    """
    targets: str = "targets"
    """Unit that the loss is divided by."""
    gives: Gives | None = None
    """Prediction for a sample. None: no predictions."""
    learns: str = ""
    """Skill that its model learns, as a verb phrase: `name the class of a text`."""
    takes: str = ""
    """Data that it takes, in words."""
    finetune: bool = False
    """Whether `accel-train finetune` recognizes its data and writes a recipe for it."""
    auto: str = ""
    """Auto class of transformers that loads its model. Empty: the model is not one of transformers."""
    library: str = "transformers"
    """Library on the Hugging Face Hub that loads its model, if the model is one of transformers."""
    pipeline: str = ""
    """Pipeline tag on the Hugging Face Hub."""
    tags: tuple[str, ...] = ()
    """Further tags on the Hugging Face Hub."""
    metrics: tuple[str, ...] = ()
    """Metrics that evaluations report for some data and settings, without the loss and `evaluate.metrics`. The main one
    comes first. A test compares them with the metrics of real runs.
    """
    extra: str = ""
    """Extra of this package that it needs (`pip install 'accel-train[EXTRA]'`). Empty for packages of other origin."""
    extra_is_for: str = ""
    """Setting of evaluations that the extra serves, by dotted name. The extra is not needed if the setting is 0 or if
    nothing is held out. Empty: the extra is always needed.
    """
    packages: tuple[str, ...] = ()
    """Importable names of the packages that it needs."""
    loss_is_by_position: bool = False
    """Whether `loss_sum` and `evaluate_batch` depend only on the logits and label of each position. Sequences may then
    be split over processes (`parallel.sp_size`). It counts for the class that defines both methods, not for a class
    that overrides one of them without a `spec` of its own.
    """
    loss_is_global: bool = False
    """Whether the loss is over the global batch (`Task.global_loss`). Settings that do not support this are refused
    before data is read.
    """
    evaluates_untrained: bool = False
    """Whether the initial model already gives usable results. `evaluate.at_start: auto` then evaluates it."""
    where: str = ""
    """Class of a built-in task, as module:Class."""


class _Table(UserDict[str, TaskSpec]):
    """Specs by task. Reading one imports `config.py` of the task's folder, so only the names are stored."""

    def __getitem__(self, name: str) -> TaskSpec:
        if name not in self:
            raise KeyError(name)
        spec: TaskSpec = importlib.import_module(f"accel_train.tasks.{name.replace('-', '_')}.config").SPEC
        return spec


TASKS: Mapping[str, TaskSpec] = _Table.fromkeys(
    (
        "causal-lm",
        "text-classification",
        "image-classification",
        "semantic-segmentation",
        "object-detection",
        "token-classification",
        "seq2seq",
        "masked-lm",
        "question-answering",
        "multiple-choice",
        "sentence-embedding",
    ),
    TaskSpec(),
)
"""Built-in tasks by the name that a recipe uses."""


def targets_of(task: str, default: str = "targets") -> str:
    """Return the unit that a task's loss is divided by; `default` for a custom task."""
    return TASKS[task].targets if task in TASKS else default


@cache
def check_task(name: str) -> None:
    """Raise SettingError if the name is neither a built-in task nor module:Class."""
    if name not in TASKS and ":" not in name:
        hint = did_you_mean(name, TASKS, f"there are {', '.join(sorted(TASKS))}", show=repr)
        raise SettingError(f"unknown task={name!r}", f"{hint} Write a custom task as module:Class.", settings=("task",))


def data_section(task: str) -> type[Data]:
    """Return the class of a task's `data` section. A custom task's class is known once the task is loaded."""
    if task == ANY_TASK:
        kinds = {spec.data: None for spec in TASKS.values()}
        # A class before one that is derived from it has no method resolution order.
        last = tuple(kind for kind in kinds if not any(kind in other.__mro__[1:] for other in kinds))
        return type("AnyData", last, {"__doc__": "Settings of all tasks."})
    return TASKS[task].data if task in TASKS else OwnData


@cache
def tasks_with(name: str) -> tuple[str, ...]:
    """Return the tasks that read a setting, by its dotted name; empty for a setting that does not depend on the task.

    A part of a setting (`evaluate.generation.num_beams`) belongs to the same tasks.
    """
    section, _, field = name.partition(".")
    if (whole := next((used for used in optional_settings() if f"{name}.".startswith(f"{used}.")), None)) is not None:
        return tuple(task for task, spec in TASKS.items() if whole in spec.uses)
    if section != "data":
        return ()
    found = tuple(task for task, spec in TASKS.items() if field.partition(".")[0] in spec.data.model_fields)
    return () if len(found) == len(TASKS) else found


@cache
def optional_settings() -> frozenset[str]:
    """Return the settings that only some of the tasks that have them read."""
    return frozenset().union(*(spec.uses for spec in TASKS.values()))


@cache
def finetune_tasks() -> tuple[str, ...]:
    """Return the tasks for which `accel-train finetune` writes a recipe."""
    return tuple(task for task, spec in TASKS.items() if spec.finetune)


def describe_tasks(tasks: Iterable[str], width: int = 80) -> list[str]:
    """Return a line for each task, or several if it is long: its name, and what its model learns."""
    return [
        line
        for task in tasks
        for line in textwrap.wrap(TASKS[task].learns, width, initial_indent=f"  {task:24}", subsequent_indent=" " * 26)
    ]


def refuse_unreported(recipe: "Recipe", spec: TaskSpec) -> None:
    """Refuse an `evaluate.metric_for_best_model` that no evaluation of the task reports, whatever the data.

    Raises:
        SettingError: names the nearest metric.
    """
    section = recipe.evaluate
    name = section.best_metric
    reported = (*OF_EVERY_EVALUATION, *spec.metrics, *section.metrics)
    if name in reported or section.allow_hub_metrics or any(":" in each for each in section.metrics):
        return
    adds = " evaluate.metrics adds others" if "evaluate.metrics" in spec.uses else ""
    raise setting_error(
        "evaluate.metric_for_best_model",
        section.metric_for_best_model,
        f"evaluations of {recipe.task} do not report this metric",
        did_you_mean(name, reported, f"there are {', '.join(reported)}") + adds,
    )


def check_spec(recipe: "Recipe", spec: TaskSpec) -> None:
    """Check that the task reads the recipe's settings, and that the packages it needs are installed.

    Raises:
        SettingError: a setting would do nothing, or a package is missing.
    """
    refuse_unused(recipe, spec)
    check_extra(recipe, spec)


def check_extra(recipe: "Recipe", spec: TaskSpec) -> None:
    """Check that the packages that a task needs for a recipe are installed.

    Raises:
        SettingError: one is missing. The message names the extra.
    """
    remedy = ""
    if spec.extra_is_for:
        if value_of(recipe, spec.extra_is_for) == 0 or not (recipe.data.eval or recipe.data.eval_fraction):
            return
        remedy = f", or set {spec.extra_is_for} to 0"
    check_packages(spec.packages, spec.extra, f"task={recipe.task}", remedy)


def refuse_unused(recipe: "Recipe", spec: TaskSpec) -> None:
    """Refuse a setting that would do nothing, because the recipe's task does not read it.

    Defaults pass. `false`, 0, and null pass too, because they ask for nothing, unless the default is true.

    Raises:
        SettingError: names the setting and the tasks that read it.
    """
    remedy = "Leave it out"
    for name in sorted(optional_settings() - spec.uses):
        if name == "evaluate.metrics" and {*recipe.evaluate.metrics} <= {*spec.metrics}:
            # They are reported anyway.
            continue
        if _is_asked(recipe, name):
            if recipe.task not in TASKS:
                remedy += f', or add it to the task: spec = TaskSpec(uses=frozenset({{"{name}"}}))'
            problem = f"is for {', '.join(tasks_with(name))}, and {recipe.task} does not read it"
            raise SettingError(problem, remedy, _as_set(recipe, name), (name,))
    for name, part in recipe:
        if isinstance(part, Section):
            refuse_unread(recipe, {f"{name}.{field}": reason for field, reason in part.unread().items()})


def refuse_unread(recipe: "Recipe", reasons: Mapping[str, str]) -> None:
    """Refuse a setting that would do nothing, by its dotted name.

    Raises:
        SettingError: names the setting and the reason.
    """
    for name, reason in reasons.items():
        if _is_asked(recipe, name):
            raise SettingError(f"is not read: {reason}", "Leave it out", _as_set(recipe, name), (name,))


def _as_set(recipe: "Recipe", name: str) -> str:
    """Return a setting as its user wrote it, and where."""
    origin = recipe.origin(name)
    return f"{name}={show(value_of(recipe, name))}" + (f" ({origin})" if origin.kind != "default" else "")


def _is_asked(recipe: "Recipe", name: str) -> bool:
    """Return whether a setting is in the recipe, differs from its default, and asks for something."""
    holder: Any = recipe
    *sections, field = name.split(".")
    for section in sections:
        holder = getattr(holder, section, None)
    if not hasattr(holder, field):
        return False
    value, default = getattr(holder, field), type(holder).model_fields[field].get_default(call_default_factory=True)
    return bool(value != default and (value or default is True))
