"""The dotted names of a recipe's settings and sections, and which of them a mistyped name means."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache, reduce
from types import MappingProxyType, UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from accel_train.recipe import Recipe
from accel_train.recipe_values import Section
from accel_train.recipe_yaml import Key

OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "batch_size": "batch.global_batch_size",
    "accumulation_steps": "batch.gradient_accumulation_steps",
    "per_device_train_batch_size": "batch.per_device_batch_size",
    "epochs": "schedule.num_epochs",
    "num_train_epochs": "schedule.num_epochs",
    "lr_scheduler_type": "schedule.type",
    "grad_clip": "optimizer.max_grad_norm",
    "fp16": "precision.mixed_precision",
    "bf16": "precision.mixed_precision",
    "block_size": "data.sequence_length",
    "load_best_model": "checkpoint.load_best_model_at_end",
    "label_smoothing_factor": "loss.label_smoothing",
    "max_seq_length": "data.sequence_length",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluate.every_steps",
    "logging_steps": "log.every_steps",
    "report_to": "log.trackers",
}
"""What other trainers call our settings."""
LEAST_NEARNESS = 0.6
"""Names that have less in common (difflib's ratio) are not suggested."""


@cache
def recipe_names() -> Mapping[str, FieldInfo | type[Section]]:
    """Every setting (a field) and section (a class) of a recipe by its dotted name, in the order of the schema."""
    return MappingProxyType(dict(_walk_schema(Recipe, "")))


def _walk_schema(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo | type[Section]]]:
    for field, info in section.model_fields.items():
        parts = [part for part in (info.annotation, *get_args(info.annotation)) if is_section(part)]
        # `tokenizer` is both: a setting (a name), or a section (train_bpe).
        yield prefix + field, parts[0] if info.annotation in parts else info
        for part in parts:
            yield from _walk_schema(part, f"{prefix}{field}.")


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Whether a type is a section of the recipe, and no union that holds one."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def kinds_of(name: str) -> set[Any]:
    """The Python types a setting or section takes, among str, tuple, dict, Section, NoneType and the rest."""
    info = recipe_names()[name]
    annotation = info if is_section(info) else info.annotation  # type: ignore[union-attr]
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return {Section if is_section(option) else get_origin(option) or option for option in options}


@cache
def free_names() -> frozenset[str]:
    """Settings that are mappings of anything: model.config and options."""
    return frozenset(name for name in recipe_names() if dict in kinds_of(name))


@cache
def section_names() -> frozenset[str]:
    """Names that can hold settings: all sections, and `tokenizer`, which may be a text too."""
    return frozenset(name for name in recipe_names() if Section in kinds_of(name))


def fields_of(section: str) -> str:
    """What a section holds, as a list to read; the section "" is the recipe."""
    prefix = f"{section}." if section else ""
    return ", ".join(
        n.removeprefix(prefix) for n in recipe_names() if n.startswith(prefix) and "." not in n[len(prefix) :]
    )


def dotted(key: Key) -> str:
    """("optimizer", "eps") as optimizer.eps."""
    return ".".join(map(str, key))


def look_up(tree: Any, name: str) -> Any:
    """What nested mappings hold under a dotted name; None where they hold nothing."""
    for field in name.split("."):
        if not isinstance(tree, Mapping) or field not in tree:
            return None
        tree = tree[field]
    return tree


def value_of(recipe: Recipe, name: str) -> Any:
    """The value of a setting or section by its dotted name."""
    return reduce(getattr, name.split("."), recipe)


def remedy_for_unknown(name: str, dashes: str = "") -> str:
    """What to write in place of a name that is no setting; `dashes` stand before what is suggested as a flag."""
    if name in recipe_names():
        return f"write it nested: {': {'.join(name.split('.'))}: ...{'}' * name.count('.')}"
    near = nearest_names(name)
    if near:
        return f"did you mean {' or '.join(dashes + n for n in near)}?"
    section = name.rpartition(".")[0]
    return f"{section or 'a recipe'} has {fields_of(section if section in section_names() else '')}"


def nearest_names(name: str) -> list[str]:
    """The settings that a mistyped or misplaced name means, best first; more than one only where they are equally near."""
    parts = name.replace("-", "_").split(".")
    name, leaf = ".".join(parts), parts[-1]
    if leaf in OTHER_NAMES:
        return [OTHER_NAMES[leaf]]
    scores = _nearness(name, recipe_names())
    for free in free_names():
        depth = free.count(".") + 1
        head, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
        if rest:  # below model.config any name may stand, so only what is above it can be mistyped
            scores[f"{free}.{rest}"] = _nearness(head, [free])[free]
    best = max(scores.values())
    return [candidate for candidate, score in scores.items() if score == best][:3] if best >= LEAST_NEARNESS else []


def _nearness(name: str, candidates: Iterable[str]) -> dict[str, float]:
    """How near each candidate is, 0 to 1, by its whole name or its last part; its own section speaks for it."""
    section, _, leaf = name.rpartition(".")
    whole, last = (SequenceMatcher(None, b=b, autojunk=False) for b in (name, leaf))
    scores = {}
    for candidate in candidates:
        other_section, _, other_leaf = candidate.rpartition(".")
        whole.set_seq1(candidate)
        last.set_seq1(other_leaf)
        # both are upper bounds of ratio: the first costs nothing, the second a tenth
        near = (m for m in (whole, last) if m.real_quick_ratio() >= LEAST_NEARNESS)
        ratios = [m.ratio() for m in near if m.quick_ratio() >= LEAST_NEARNESS]
        if len(leaf) > 3 and other_leaf.startswith(leaf):
            ratios.append(0.9)  # an abbreviation
        scores[candidate] = max(ratios, default=0.0) + (0.05 if section == other_section else 0.0)
    return scores
