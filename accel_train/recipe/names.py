"""The dotted names of a recipe's settings, suggestions for mistyped names, and messages for invalid values."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from accel_train.core.errors import SettingError
from accel_train.core.format import LARGEST_COUNT, did_you_mean
from accel_train.recipe.data import Data
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import DEFAULT_TASK, TASKS, check_task
from accel_train.recipe.values import Origin, Section
from accel_train.recipe.yaml_core import Key, is_number, show

_ELSEWHERE = {
    "optimizer.learning_rate": "lr",
    "optimizer.name": "optim",
    "optimizer.weight_decay": "wd",
    "optimizer.eps": "adam_epsilon",
    "optimizer.max_grad_norm": "grad_clip clip_grad gradient_clip_val",
    "batch.global_batch_size": "batch_size",
    "batch.gradient_accumulation_steps": "accumulation_steps grad_accum accumulate_grad_batches",
    "batch.per_device_batch_size": "micro_batch_size train_batch_size per_device_train_batch_size",
    "batch.per_device_eval_batch_size": "eval_batch_size",
    "schedule.num_epochs": "epochs num_train_epochs",
    "schedule.max_steps": "steps max_iters num_steps",
    "schedule.type": "lr_scheduler_type scheduler schedule.name",
    "model.pretrained": "model.name",
    "precision.mixed_precision": "fp16 bf16 fp8",
    "precision.gradient_checkpointing": "activation_checkpointing",
    "precision.deterministic": "full_determinism",
    "model.fused_kernels": "use_liger_kernel",
    "data.sequence_length": "block_size max_seq_length seq_len context_length",
    "data.text_column": "dataset_text_field",
    "data.eval_fraction": "val_split val_size test_size",
    "data.eval": "validation_file",
    "data.num_workers": "workers",
    "checkpoint.load_best_model_at_end": "load_best_model",
    "loss.label_smoothing": "label_smoothing_factor",
    "checkpoint.every_steps": "save_steps save_interval",
    "checkpoint.keep": "save_total_limit",
    "evaluate.every_steps": "eval_steps eval_interval",
    "log.every_steps": "logging_steps log_interval log_every_n_steps",
    "log.trackers": "report_to logger",
    "output_dir": "name run_name run_dir experiment_name outdir default_root_dir",
    "seed": "seed_everything",
}
"""Names of settings in other trainers."""
OTHER_NAMES = {other: name for name, others in _ELSEWHERE.items() for other in others.split()}
"""Settings by their names in other trainers."""
WITHOUT_EQUAL = {
    "beta1",
    "beta2",
    "dropout",
    "eval_delay",
    "eval_packing",
    "eval_strategy",
    "fsdp_config",
    "hub_strategy",
    "logging_strategy",
    "min_lr",
    "num_nodes",
    "optim_target_modules",
    "save_strategy",
    "tags",
}
"""Names in other trainers that are close to a setting here with another meaning."""
LEAST_NEARNESS = 0.7
"""Smallest similarity (difflib's ratio) of a suggested name."""


@cache
def recipe_names() -> Mapping[str, FieldInfo | type[Section]]:
    """Return all settings (fields) and sections (classes) of a recipe by dotted name, in the order of the schema.

    `data` has the settings of all tasks: the shared ones, then those of each task.
    """
    return MappingProxyType(dict(_walk_schema(Recipe, "")))


def _walk_schema(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo | type[Section]]]:
    fields = section.model_fields
    if section is Data:
        fields = {**fields, **{name: info for task in TASKS.values() for name, info in task.data.model_fields.items()}}
    for field, info in fields.items():
        parts = list(_sections_in(info.annotation))
        # `tokenizer` is a setting (a name) as well as a section (train_bpe).
        yield prefix + field, parts[0] if info.annotation in parts else info
        for part in parts:
            yield from _walk_schema(part, f"{prefix}{field}.")


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if is_section(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    """Return whether a type is a section of the recipe; False for a union that contains one."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def kinds_of(name: str) -> set[Any]:
    """Return the Python types that a setting or section takes: str, tuple, dict, Section, NoneType, and others."""
    info = recipe_names()[name]
    annotation = info if is_section(info) else info.annotation  # type: ignore[union-attr]
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return {Section if is_section(option) else get_origin(option) or option for option in options}


@cache
def free_names() -> frozenset[str]:
    """Return the settings that are free mappings: model.config and options."""
    return frozenset(name for name in recipe_names() if dict in kinds_of(name))


def is_free(name: str) -> bool:
    """Return whether a name is one of `free_names` or below one. Below them, any name is valid."""
    return any(f"{name}.".startswith(f"{free}.") for free in free_names())


def names_in(section: str) -> list[str]:
    """Return the settings and sections directly in a section, by dotted name. The section "" is the recipe."""
    return [name for name in recipe_names() if name.rpartition(".")[0] == section]


def fields_of(section: str) -> str:
    """Return the fields of a section as a list in text."""
    return ", ".join(name.rpartition(".")[2] for name in names_in(section))


def dotted(key: Key) -> str:
    """Return the dotted name of a key: optimizer.eps for ("optimizer", "eps")."""
    return ".".join(map(str, key))


def look_up(tree: Any, name: str) -> Any:
    """Return the value of nested mappings under a dotted name; None if it is missing."""
    for field in name.split("."):
        if not isinstance(tree, Mapping) or field not in tree:
            return None
        tree = tree[field]
    return tree


def remedy_for_unknown(name: str, dashes: str = "") -> str:
    """Return the remedy for an unknown setting name. `dashes` precede suggestions of a flag."""
    if name in recipe_names():
        return f"write it nested: {': {'.join(name.split('.'))}: ...{'}' * name.count('.')}"
    near = nearest_names(name)
    if near:
        return f"did you mean {' or '.join(dashes + n for n in near)}?"
    section = name.rpartition(".")[0]
    return f"{section or 'a recipe'} has {fields_of(section) or fields_of('')}"


def nearest_names(name: str) -> list[str]:
    """Return the settings that a mistyped or misplaced name may mean, best first; several only if equally near."""
    parts = name.replace("-", "_").split(".")
    name, field = ".".join(parts), parts[-1]
    if known := OTHER_NAMES.get(name) or OTHER_NAMES.get(field):
        return [known]
    if name in WITHOUT_EQUAL:
        return []
    scores = _nearness(name, recipe_names())
    for free in free_names():
        depth = free.count(".") + 1
        head, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
        # Any name is valid below model.config, so only the part above it can be mistyped.
        if rest:
            scores[f"{free}.{rest}"] = _nearness(head, [free])[free]
    best = max(scores.values())
    return [candidate for candidate, score in scores.items() if score == best][:3] if best >= LEAST_NEARNESS else []


def _nearness(name: str, candidates: Iterable[str]) -> dict[str, float]:
    """Return the similarity of each candidate, 0 to 1, by its whole name or field. The same section adds a bonus."""
    section, _, field = name.rpartition(".")
    of_name, of_field = (SequenceMatcher(None, b=text, autojunk=False) for text in (name, field))
    scores = {}
    for candidate in candidates:
        other_section, _, other_field = candidate.rpartition(".")
        near = max(_ratio(of_name, candidate), _ratio(of_field, other_field))
        if len(field) > 3 and other_field.startswith(field):
            # The field is an abbreviation.
            near = max(near, 0.9)
        scores[candidate] = near + (0.05 if section == other_section and near >= LEAST_NEARNESS else 0.0)
    return scores


def _ratio(matcher: "SequenceMatcher[str]", text: str) -> float:
    # Compute cheap upper bounds first, because most names have too little in common.
    matcher.set_seq1(text)
    bounds = matcher.real_quick_ratio, matcher.quick_ratio
    return matcher.ratio() if all(bound() >= LEAST_NEARNESS for bound in bounds) else 0.0


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
}
_LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "of at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}
REQUIRED_EXAMPLES = {
    "output_dir": "output_dir: runs/my-run",
    "model": "model: {config: {model_type: gpt2, n_layer: 4}}",
    "data": "data: {train: python-stdlib}",
    "data.train": "train: python-stdlib",
    "schedule": "schedule: {max_steps: 1000}",
    "tokenizer.train_bpe": "train_bpe: {vocab_size: 4096}",
    "precision.gradient_checkpointing.memory_budget": "gradient_checkpointing: {memory_budget: 0.5}",
}


def explain(error: ValidationError, tree: Mapping[str, Any], origins: Mapping[str, Origin], path: str) -> Iterator[str]:
    """Yield one line for each problem that pydantic found in a tree of settings. `path` is the recipe's file."""
    groups: dict[str, Any] = {_name_at(problem["loc"]): problem for problem in error.errors(include_url=False)}
    if any(problem["type"] == "missing" and "." not in name for name, problem in groups.items()):
        # Which sections are missing depends on the task.
        try:
            check_task(str(tree.get("task", DEFAULT_TASK)))
        except ValueError as unknown:
            yield str(unknown)
            return
        if "task" not in tree:
            yield f"task is missing from {path}, so {DEFAULT_TASK} is assumed"
    for name, problem in groups.items():
        if any(other.startswith(f"{name}.") for other in groups):
            # For example, `tokenizer` is not a text, but the problem is inside it.
            continue
        raw = look_up(tree, name)
        if problem["type"] == "value_error":
            cause = problem["ctx"]["error"]
            about = cause.settings if isinstance(cause, SettingError) else (name,)
            values = {n: look_up(tree, n) for n in recipe_names() if n in about and n in origins}
            setters = [f"{n}={show(value)} from {origins[n]}" for n, value in values.items() if value is not None]
            yield f"{cause} ({', '.join(setters) or path})"
        elif raw is None and problem["type"] == "missing":
            yield f"{name} is missing from {path}; add `{_example(name)}`"
        else:
            # A setting in an item of a list was set with the list.
            inside = [each for other, each in origins.items() if f"{other}.".startswith(f"{name}.")]
            around = max((other for other in origins if f"{name}.".startswith(f"{other}.")), key=len, default="")
            yield wrong(name, problem["input"] if raw is None else raw, inside[0] if inside else origins[around])


def _name_at(place: tuple[int | str, ...]) -> str:
    """Return the setting at pydantic's location, without the union alternatives and list items in it."""
    name = ""
    for part in place:
        longer = f"{name}.{part}" if name else str(part)
        name = longer if longer in recipe_names() else name
    return name


def wrong(name: str, raw: Any, origin: Origin) -> str:
    """Return the message for a value that a setting does not take."""
    return f"{name}={show(raw)} ({origin}): must be {rule_of(name)}; {_remedy(name, raw)}"


def _remedy(name: str, raw: Any) -> str:
    info = recipe_names()[name]
    choices = [choice for choice in literals_of(name) if choice != "auto"]
    for item in raw if isinstance(raw, list | tuple) else [raw]:
        if isinstance(item, str) and item not in choices and (meant := did_you_mean(item, choices)):
            return meant
        if isinstance(item, int | float) and item > LARGEST_COUNT and not _has_own_maximum(name):
            return f"no setting takes a number above {LARGEST_COUNT:,}"
    if isinstance(raw, str) and raw.lower() in ("yes", "no", "on", "off", "true", "false") and bool in kinds_of(name):
        return "write true or false, without quotes"
    if isinstance(raw, str) and is_number(raw):
        return "write it without quotes"
    if str in kinds_of(name) and isinstance(raw, int | float):
        return f'put it in quotes: "{show(raw)}"'
    if isinstance(info, FieldInfo) and info.default is None:
        return "correct it, or leave it out"
    if isinstance(info, FieldInfo) and not info.is_required():
        return f"leave it out for the default, {show(info.default)}"
    return f"for example `{_example(name)}`"


def _example(name: str) -> str:
    """Return a setting that is required, as it is written in a recipe."""
    info = recipe_names().get(name)
    examples = info.examples if isinstance(info, FieldInfo) and info.examples else ()
    field = name.rpartition(".")[2]
    return REQUIRED_EXAMPLES.get(name, f"{field}: {show(examples[0])}" if examples else f"{name}: ...")


def literals_of(name: str) -> list[str]:
    """Return the literal values that a setting takes, as they are written."""
    return [_written(choice) for choice in choices_of(name)]


def choices_of(name: str) -> list[Any]:
    """Return the literal words, numbers, and booleans that a setting takes."""
    info = recipe_names()[name]
    return _choices(info.annotation if isinstance(info, FieldInfo) else None)


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _written(choice: Any) -> str:
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def rule_of(name: str) -> str:
    """Return the values that a setting takes, in words: `auto or a whole number of at least 1`."""
    return f"a mapping of {fields_of(name)}" if is_section(recipe_names()[name]) else _rule(_schema(name))


def numbers_of(name: str) -> set[str]:
    """Return which numbers a setting, or an item of it, takes: `integer`, `number`, both or none, in JSON schema's
    words.
    """
    return {part.get("type", "") for part in _parts(_schema(name)) if "enum" not in part} & {"integer", "number"}


def _has_own_maximum(name: str) -> bool:
    """Return whether a setting's rule names a largest value: the general bound of integers is in none."""
    return any(part.get("maximum", LARGEST_COUNT) != LARGEST_COUNT for part in _parts(_schema(name)))


def _schema(name: str) -> Mapping[str, Any]:
    info = recipe_names()[name]
    kind: Any = info if is_section(info) else Annotated[info.annotation, info]  # type: ignore[union-attr]
    schema = TypeAdapter(kind).json_schema()
    return _resolved(schema, schema.get("$defs", {}))


def _resolved(schema: Any, sections: Mapping[str, Any]) -> Any:
    """Return a schema with each reference replaced by the section that it names."""
    if isinstance(schema, list):
        return [_resolved(each, sections) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = sections[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return {key: _resolved(value, sections) for key, value in schema.items()}


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, its alternatives and its items."""
    yield schema
    items = [schema["items"]] if "items" in schema else []
    for each in (*schema.get("anyOf", ()), *schema.get("prefixItems", ()), *items):
        yield from _parts(each)


def _rule(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_rule, schema["anyOf"]))
    if "const" in schema:
        return _written(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(_written, schema['enum']))}"
    if "pattern" in schema:
        return str(schema.get("title", "module:Class"))
    if "items" in schema:
        rule = _rule(schema["items"])
        return f"a list, each {rule}" if rule.startswith(("a ", "one of ")) or " or " in rule else f"a list of {rule}"
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}, each {_rule(schema['prefixItems'][0])}"
    if "properties" in schema:
        return f"a mapping of {', '.join(schema['properties'])}"
    if isinstance(of_key := schema.get("additionalProperties"), Mapping):
        return f"a mapping of names to {_rule(of_key)}"
    kind = _KINDS.get(schema.get("type", ""), "a mapping of finite values")
    # The general bound of integers is far above any real value. Only the message for a larger number names it.
    given = {limit: schema[limit] for limit in _LIMITS if schema.get(limit) not in (None, LARGEST_COUNT)}
    limits = " and ".join(f"{_LIMITS[limit]} {value}" for limit, value in given.items())
    return f"{kind} {limits}".rstrip()
