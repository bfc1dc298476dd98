"""The fingerprint of a run, its other training settings, and how both changed since a checkpoint.

The fingerprint (`identity`) determines whether a resume continues the same run. It holds values, so that a new setting
does not change it: a setting that a checkpoint lacks is newer than the checkpoint, and counts with its default. The
default of a new setting must therefore not change the program.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from torch import Tensor

from accel_train.core.json_io import json_digest, parse_json, to_json
from accel_train.core.redaction import redact
from accel_train.core.state import JsonRecord
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.images.first_format import FIELDS
from accel_train.optim.schedule import StepPlan
from accel_train.recipe.names import recipe_names
from accel_train.recipe.optimizer import Groups, optimizer_kind
from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import Section, value_of
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show
from accel_train.task import FirstFingerprint, TaskData

FOLLOWS_FROM = {
    "data.mixture": ("data.train",),
    "data.fingerprint": ("data.train", "data.eval", "data.eval_fraction", "tokenizer"),
    "data.preprocessing": ("model.pretrained", "data.image_size", "data.image_mean", "data.image_std"),
    "batch.global_batch_size": ("batch.per_device_batch_size", "batch.gradient_accumulation_steps"),
    "schedule.max_steps": ("schedule.num_epochs",),
    "schedule.warmup_steps": ("schedule.warmup_ratio",),
}
"""Settings that determine a value that the recipe does not set directly."""
NOT_SET = object()
IDENTITY = (
    *("task", "seed", "optimizer.name", "optimizer.ema_decay", "optimizer.layer_decay", "optimizer.state_dtype"),
    *("data.sequence_length", "data.mask_documents", "data.shuffle", "data.last_batch", "data.group_by_length"),
    *("data.split_seed", "data.group_column", "data.stratify", "data.mlm_probability"),
    *("data.augment", "data.crop_size", "data.ignore_index", "data.min_visible"),
    *("model", "loss", "optimizer.groups", "schedule"),
)
"""Settings and sections that must stay the same, as written, in every launch of a run."""
NOT_OF_RUN = {
    # A resume may change these. Kernels only differ in rounding. `frozen_dtype` is in SETTINGS.
    "model": {"attn_implementation", "fused_kernels", "trust_remote_code", "accept_new_tokenizer", "frozen_dtype"},
    # It only changes rounding.
    "loss": {"chunked"},
    # The numbers of steps that follow from these are compared.
    "schedule": {"max_steps", "num_epochs", "warmup_steps", "warmup_ratio"},
}
"""Settings of these sections that are not part of the fingerprint."""
HASHED_AT_FIRST = (
    "data.preprocessing",
    "data.crop_size",
    "data.ignore_index",
    "data.min_visible",
    "data.mlm_probability",
)
"""Settings that the first format of checkpoints hashed into the fingerprint of the data."""
SETTINGS = (
    *("optimizer.learning_rate", "optimizer.lr_scaling", "optimizer.weight_decay", "optimizer.no_decay"),
    *("optimizer.betas", "optimizer.eps", "optimizer.momentum", "optimizer.muon_dtype", "optimizer.options"),
    *("optimizer.max_grad_norm", "parallel.sync_batch_norm"),
    *("precision.mixed_precision", "precision.tf32", "model.frozen_dtype"),
    "options",
    *("guard.on_nonfinite", "guard.on_spike", "guard.spike_threshold", "guard.spike_window_steps"),
)
OF_BEST = ("evaluate.metric_for_best_model", "evaluate.greater_is_better", "evaluate.max_samples")
"""Settings that must match for two values of the best metric to be comparable."""

_OF_EVALUATION = (
    *("task", "data.fingerprint", "data.sequence_length", "data.mask_documents", "loss."),
    *("data.preprocessing", "data.ignore_index", "data.mlm_probability"),
)
"""Beginnings of the names in a fingerprint that must match for the metrics of two evaluations to be comparable."""
MIXTURE = "data.mixture"
"""Name of the weights of the sources. They must stay the same up to the step of the checkpoint."""
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


def run_identity(recipe: Recipe, data: TaskData, sizes: BatchSizes, steps: StepPlan) -> JsonRecord:
    """Return the fingerprint of a run as plain JSON values. A checkpoint resumes only if fingerprints are equal."""
    mixture = recipe.data.mixture
    identity = {
        **{name: _dump(value_of(recipe, name), NOT_OF_RUN.get(name)) for name in IDENTITY if _has(recipe, name)},
        "data.fingerprint": data.fingerprint,
        **({MIXTURE: [{"weight": each.weights, "max_epochs": each.max_epochs} for each in mixture]} if mixture else {}),
        **data.settings,
        "batch.global_batch_size": sizes.global_batch_size,
        "schedule.max_steps": steps.max_steps,
        "schedule.warmup_steps": steps.warmup_steps,
    }
    return _normal(identity)


def digest_of_recipe(recipe: Recipe) -> str:
    """Return a digest of what a run is, however and wherever it was started."""
    how: dict[str, Any] = {"output_dir": True, "checkpoint": {"resume", "accept_changes"}}
    # Without defaults: a newer version with more settings finds the run again.
    return json_digest(to_json(recipe.model_dump(exclude=how, exclude_defaults=True)))


def _dump(value: Any, without: set[str] | None = None) -> Any:
    """Return a section, or sections in a tuple, as plain values."""
    if isinstance(value, tuple):
        return [_dump(each) for each in value]
    return value.model_dump(exclude=without) if isinstance(value, Section) else value


def _normal(value: Any) -> Any:
    """Return a value as a checkpoint stores it. NaN becomes text: it is not JSON, and not equal to itself."""
    return parse_json(json.dumps(value), parse_constant=str)


class Settings(NamedTuple):
    """Settings that affect training and may change on a resume: values and their origins, by dotted name.

    Contains learning rate, weight decay, betas, clipping, precision, the guard's rules and the best-metric settings.
    Settings that only change rounding are left out. Examples are the parallel layout, micro-batches, compile, gradient
    checkpointing, and the kernels of attention and activations.
    """

    values: JsonRecord
    origins: dict[str, str]


def training_settings(
    recipe: Recipe,
    choices: Mapping[str, Any],
    inputs: Mapping[str, str],
    own_groups: Groups | None = None,
) -> Settings:
    """Return the resolved settings of this launch, or of `own_groups` if a program provides the optimizer.

    `choices` holds `state.Choice`s by dotted name: the scaled learning rate, and the precision chosen by auto.
    """
    read = optimizer_kind(recipe.optimizer.name).settings
    unread = {f"optimizer.{name}" for name in ("betas", "eps", "momentum", "muon_dtype") if name not in read}
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
    normal: JsonRecord = _normal(values)
    return Settings(normal, identity_origins(recipe, normal) | origins)


def setting_changes(trainer: JsonRecord, settings: Settings, recipe: Recipe) -> list[Change]:
    """Return how the settings differ from those in a checkpoint's trainer.json."""
    # Older versions had no such setting, and computed in fp32.
    saved = {"optimizer.muon_dtype": "fp32", **trainer["settings"]}
    common = saved.keys() & settings.values.keys()
    was, now = ({name: each[name] for name in common} for each in (saved, settings.values))
    return identity_changes(was, trainer["origins"], now, settings.origins, recipe)


def identity_origins(recipe: Recipe, identity: JsonRecord) -> dict[str, str]:
    """Return the origin of each value of a fingerprint, by dotted name. The checkpoint stores both."""
    return {name: _origin(recipe, name) for name in _names(identity, "")}


def changes_evaluation(changes: Sequence[Change]) -> bool:
    """Return whether accepted differences between fingerprints change what evaluations measure."""
    return any(change.name.startswith(_OF_EVALUATION) for change in changes)


def upgraded(saved: JsonRecord, identity: JsonRecord, first_fingerprint: FirstFingerprint) -> JsonRecord:
    """Return the fingerprint of a checkpoint as this version stores it, also if it is in the first format.

    `first_fingerprint` is the fingerprint of this run's data in that format (`TaskData.first_fingerprint`).
    """
    hashed = {name: identity[name] for name in HASHED_AT_FIRST if name in identity and name not in saved}
    if "data.preprocessing" in hashed:
        known = hashed["data.preprocessing"].items()
        hashed["data.preprocessing"] = {name: value for name, value in known if name in FIELDS["Preprocessing"]}
    if "data.order" in identity:
        hashed.setdefault("data.order", saved.get("data.order", "shuffled"))
    was, now = saved.get("data.fingerprint"), identity["data.fingerprint"]
    if was != now and was == (first_fingerprint() if callable(first_fingerprint) else first_fingerprint):
        hashed["data.fingerprint"] = now
    return {**saved, **hashed}


def until(identity: JsonRecord, step: int) -> JsonRecord:
    """Return a fingerprint without the weights that count from `step` on: a resume there may change them."""
    kept = [
        {**each, "weight": {at: weight for at, weight in each["weight"].items() if int(at) < max(step, 1)}}
        for each in identity.get(MIXTURE, ())
    ]
    return {**identity, **({MIXTURE: kept} if kept else {})}


def identity_changes(
    saved: JsonRecord,
    saved_origins: Mapping[str, str],
    identity: JsonRecord,
    origins: Mapping[str, str],
    recipe: Recipe,
) -> list[Change]:
    """Return the differences between the fingerprints of a checkpoint and this run. Empty for the same run.

    A setting that only the checkpoint has (another version wrote it) counts if it was set, and is unknown today.
    """
    changes = []
    for name, was, now in _differences(saved, identity, ""):
        known = _field(recipe, name)
        if was is NOT_SET and known is not None and not known.is_required():
            was = _normal(_dump(known.get_default(call_default_factory=True)))
            # A section whose settings are not all part of the fingerprint.
            was = {key: was[key] for key in was if key in now} if isinstance(was, dict) and was and now else was
        was_set_by = _set_by(saved_origins, name)
        is_left_out = now is NOT_SET and (known is not None or was_set_by == "default")
        if was != now and not is_left_out:
            changes.append(Change(name, was, was_set_by, now, _set_by(origins, name)))
    return changes


def _field(recipe: Recipe, name: str) -> FieldInfo | None:
    """Return the field of a setting in the sections of a recipe, or None if it has none."""
    section: Any = recipe
    *above, field = name.split(".")
    for part in above:
        section = section[int(part)] if isinstance(section, tuple) else getattr(section, part, None)
    return type(section).model_fields.get(field) if isinstance(section, Section) else None


def _set_by(origins: Mapping[str, str], name: str) -> str:
    """Return who set a value. An entry of a list (`optimizer.groups.0.lr_scale`) was set with the list."""
    return origins.get(name, origins.get(re.split(r"\.\d", name)[0], ""))


def _differences(was: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    are_lists = isinstance(was, list) and isinstance(now, list) and len(was) == len(now)
    if are_lists and all(isinstance(each, Mapping) for each in was + now):
        was, now = ({str(index): each for index, each in enumerate(side)} for side in (was, now))
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
    if re.fullmatch("[0-9a-f]{64}", shown):
        # Enough to tell two digests apart.
        shown = shown[:12]
    return f"{shown} ({set_by})" if set_by else shown
