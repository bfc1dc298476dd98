"""The fingerprint of a run, its other training settings, and how both changed since a checkpoint.

The fingerprint (`identity`) determines whether a resume continues the same run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from accel_train.core.redaction import redact
from accel_train.data.batch_sizes import BatchSizes
from accel_train.optim.schedule import StepPlan
from accel_train.recipe.data import ImageData
from accel_train.recipe.names import recipe_names, value_of
from accel_train.recipe.optimizer import optimizer_kind
from accel_train.recipe.schema import Recipe
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show
from accel_train.task import TaskData

FOLLOWS_FROM = {
    "data.fingerprint": ("data.train", "data.eval", "data.eval_fraction", "tokenizer"),
    "batch.global_batch_size": ("batch.per_device_batch_size", "batch.gradient_accumulation_steps"),
    "schedule.max_steps": ("schedule.num_epochs",),
    "schedule.warmup_steps": ("schedule.warmup_ratio",),
}
"""Settings that determine a value that the recipe does not set directly."""
NOT_SET = object()
IDENTITY = (
    *("task", "seed", "optimizer.name", "optimizer.ema_decay", "optimizer.layer_decay"),
    *("data.sequence_length", "data.mask_documents", "data.shuffle", "data.last_batch", "data.group_by_length"),
)
"""Settings that must stay the same, as written, in every launch of a run."""
SPLIT = ("data.split_seed", "data.group_column", "data.stratify")
"""Further settings that must stay the same. The fingerprint holds those that differ from their defaults."""
SETTINGS = (
    *("optimizer.learning_rate", "optimizer.lr_scaling", "optimizer.weight_decay", "optimizer.no_decay"),
    *("optimizer.betas", "optimizer.eps", "optimizer.momentum", "optimizer.options"),
    *("optimizer.max_grad_norm", "parallel.sync_batch_norm"),
    *("precision.mixed_precision", "precision.tf32", "model.frozen_dtype"),
    "options",
    *("guard.on_nonfinite", "guard.on_spike", "guard.spike_threshold", "guard.spike_window_steps"),
)
NOT_OF_MODEL = {"attn_implementation", "fused_kernels", "trust_remote_code", "accept_new_tokenizer", "frozen_dtype"}
"""Settings of `model` that a resume may change. Kernels only differ in rounding. `frozen_dtype` is in SETTINGS."""
OF_BEST = ("evaluate.metric_for_best_model", "evaluate.greater_is_better", "evaluate.max_samples")
"""Settings that must match for two values of the best metric to be comparable."""

_OF_EVALUATION = ("task", "data.fingerprint", "data.sequence_length", "data.mask_documents", "loss.")
"""Beginnings of the names in a fingerprint that must match for the metrics of two evaluations to be comparable."""
INPUTS = "inputs."
"""Prefix of the names of digests of code and data (`TaskData.inputs`)."""


class Change(NamedTuple):
    """One value of a run that differs from the value in the checkpoint."""

    name: str
    was: Any
    was_set_by: str
    """Origin of the old value. Empty if the checkpoint does not record it."""
    now: Any
    now_set_by: str

    def __str__(self) -> str:
        if self.name.startswith(INPUTS):
            return f"{self.name.removeprefix(INPUTS)} has changed"
        return f"{self.name} was {_told(self.was, self.was_set_by)}, now {_told(self.now, self.now_set_by)}"


def run_identity(recipe: Recipe, data: TaskData, sizes: BatchSizes, steps: StepPlan) -> dict[str, Any]:
    """Return the fingerprint of a run as plain JSON values. A checkpoint resumes only if fingerprints are equal."""
    identity = {
        **{name: value_of(recipe, name) for name in IDENTITY if _has(recipe, name)},
        **{name: value_of(recipe, name) for name in SPLIT if _has(recipe, name) and value_of(recipe, name)},
        "model": recipe.model.model_dump(exclude=NOT_OF_MODEL),
        "data.fingerprint": data.fingerprint,
        **({"data.augment": recipe.data.augment.model_dump()} if isinstance(recipe.data, ImageData) else {}),
        # chunked only changes rounding. z_loss and logit_softcap are there if they are set.
        "loss": {
            name: value
            for name, value in recipe.loss.model_dump(exclude={"chunked"}).items()
            if value or name not in ("z_loss", "logit_softcap")
        },
        **({"optimizer.state_dtype": "bf16"} if recipe.optimizer.state_dtype == "bf16" else {}),
        "batch.global_batch_size": sizes.global_batch_size,
        "optimizer.groups": recipe.optimizer.model_dump()["groups"],
        "schedule": recipe.schedule.model_dump(exclude={"max_steps", "num_epochs", "warmup_steps", "warmup_ratio"}),
        "schedule.max_steps": steps.max_steps,
        "schedule.warmup_steps": steps.warmup_steps,
    }
    # NaN becomes text, because NaN is not JSON and not equal to itself.
    normal: dict[str, Any] = json.loads(json.dumps(identity), parse_constant=str)
    return normal


class Settings(NamedTuple):
    """Settings that affect training and may change on a resume: values and their origins, by dotted name.

    Contains learning rate, weight decay, betas, clipping, precision, the guard's rules and the best-metric settings.
    Settings that only change rounding are left out. Examples are the parallel layout, micro-batches, compile, gradient
    checkpointing, and the kernels of attention and activations.
    """

    values: dict[str, Any]
    origins: dict[str, str]


def training_settings(
    recipe: Recipe,
    choices: Mapping[str, Any],
    inputs: Mapping[str, str],
    own_groups: Sequence[Mapping[str, Any]] | None = None,
) -> Settings:
    """Return the resolved settings of this launch, or of `own_groups` if a program provides the optimizer.

    `choices` holds `state.Choice`s by dotted name: the scaled learning rate, and the precision chosen by auto.
    """
    read = optimizer_kind(recipe.optimizer.name).settings
    unread = {f"optimizer.{name}" for name in ("betas", "eps", "momentum") if name not in read}
    values = {
        name: choices[name].value if name in choices else value_of(recipe, name)
        for name in (*SETTINGS, *OF_BEST)
        if name not in unread
    }
    values["optimizer.lr_scaling"] = recipe.optimizer.lr_scaling.model_dump()
    # The Trainer's arguments are settings of the recipe and are compared as such.
    values["options"] = redact({name: value for name, value in recipe.options.items() if name != "training_arguments"})
    # Settings that only a custom task knows. The settings of built-in tasks are in the digest of the data.
    own = {f"data.{field}": getattr(recipe.data, field) for field in type(recipe.data).model_fields}
    values |= {name: value for name, value in own.items() if name not in recipe_names()}
    values |= {INPUTS + name: digest for name, digest in inputs.items()}
    origins = {}
    if own_groups is not None:
        values = {name: value for name, value in values.items() if not name.startswith("optimizer.")}
        values["optimizer.max_grad_norm"] = recipe.optimizer.max_grad_norm
        for key in ("lr", "weight_decay", "betas", "eps", "momentum"):
            given = [group.get(f"initial_{key}", group.get(key)) for group in own_groups]
            found = [each.item() if isinstance(each, Tensor) else each for each in given]
            name = f"optimizer.{'learning_rate' if key == 'lr' else key}"
            if found[0] is not None:
                values[name] = found[0] if all(each == found[0] for each in found) else found
                origins[name] = "the program's own optimizer"
    normal: dict[str, Any] = json.loads(json.dumps(values), parse_constant=str)
    return Settings(normal, identity_origins(recipe, normal) | origins)


def setting_changes(trainer: Mapping[str, Any], settings: Settings) -> list[Change]:
    """Return how the settings differ from those in a checkpoint's trainer.json."""
    saved = trainer["settings"]
    common = saved.keys() & settings.values.keys()
    was, now = ({name: each[name] for name in common} for each in (saved, settings.values))
    return identity_changes(was, trainer["origins"], now, settings.origins)


def identity_origins(recipe: Recipe, identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each value of a fingerprint, by dotted name. The checkpoint stores both."""
    return {name: _origin(recipe, name) for name in _names(identity, "")}


def changes_evaluation(changes: Sequence[Change]) -> bool:
    """Return whether accepted differences between fingerprints change what evaluations measure."""
    return any(change.name.startswith(_OF_EVALUATION) for change in changes)


def identity_changes(
    saved: Mapping[str, Any], saved_origins: Mapping[str, str], identity: Mapping[str, Any], origins: Mapping[str, str]
) -> list[Change]:
    """Return the differences between the fingerprints of a checkpoint and this run. Empty for the same run."""
    return [
        Change(name, was, saved_origins.get(name, ""), now, origins.get(name, ""))
        for name, was, now in _differences(saved, identity, "")
    ]


def _differences(was: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted(was.keys() | now.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(was.get(key, NOT_SET), now.get(key, NOT_SET), inner)
    elif was != now:
        yield name, was, now


def _has(recipe: Recipe, name: str) -> bool:
    section, _, field = name.partition(".")
    return section != "data" or hasattr(recipe.data, field)


def _names(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")


def _origin(recipe: Recipe, name: str) -> str:
    if name in recipe_names() and _has(recipe, name) and value_of(recipe, name) is not None:
        return who_set(recipe, name)
    causes = [
        f"{cause} {show(value_of(recipe, cause))}, {who_set(recipe, cause)}"
        for cause in FOLLOWS_FROM.get(name, ())
        if value_of(recipe, cause) is not None
    ]
    if causes:
        return str(redact(f"from {'; '.join(causes)}"))
    own = recipe.origin(name)
    if name in recipe_names() or own.kind != "default":
        return str(redact(str(own)))
    above = name.rpartition(".")[0]
    return _origin(recipe, above) if above else "default"


def _told(value: Any, set_by: str) -> str:
    shown = "not set" if value is NOT_SET else show(value)
    if len(shown) == 64 and all(letter in "0123456789abcdef" for letter in shown):
        # Enough to tell two digests apart.
        shown = shown[:12]
    return f"{shown} ({set_by})" if set_by else shown
