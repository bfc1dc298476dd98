"""Translation of TrainingArguments into a Recipe, once, before anything is built.

Unsupported fields and overridden methods raise an error that names them.
"""

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from torch import nn
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from accel_train.buckets.store import is_of_store
from accel_train.core.errors import SettingError
from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord
from accel_train.hf.argument_table import FIELDS, accelerator_settings, argument_error, check_fields, name_of
from accel_train.optim.optimizers import parameter_groups
from accel_train.recipe.optimizer import ParameterGroup
from accel_train.recipe.schema import Recipe
from accel_train.runtime.launch_environment import launched_with, settings_of_launch

if TYPE_CHECKING:
    from accel_train.hf import Trainer


GENERATION_FIELDS = ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config")
"""Fields of Seq2SeqTrainingArguments that Seq2SeqTrainer supports."""
# Without sortish_sampler, because transformers' own Seq2SeqTrainer does not read it either.
TRANSFORMERS_FIELDS = frozenset(
    field.name for kind in (TrainingArguments, Seq2SeqTrainingArguments) for field in dataclasses.fields(kind)
) - {*GENERATION_FIELDS, "sortish_sampler"}
REMEDIES = {
    "_get_train_sampler": "override get_train_dataloader",
    "_get_eval_sampler": "override get_eval_dataloader",
    "_maybe_log_save_evaluate": "use a callback (on_step_end, control.should_log, should_evaluate, should_save)",
    "_save_checkpoint": "use a callback (on_save); checkpoints are published whole or not at all",
    "_prepare_inputs": "override training_step and prediction_step",
    "_save": "override save_model",
}
"""Remedies by the name of an overridden method of transformers' Trainer. The remedy for other methods is a callback."""
Leaves = dict[str, Any]
"""Fields of the recipe, or of one of its sections, by name."""
OURS = "use accel-train run, whose recipe has a `parallel` section"


def check_arguments(args: TrainingArguments) -> None:
    """Check that all fields have supported values. Fields of the script's own subclass are not checked.

    Raises:
        SettingError: a field has another value. The message names each such field, its value, and the remedy.
    """
    known = (field for field in dataclasses.fields(args) if field.name in TRANSFORMERS_FIELDS)
    check_fields(args, known, FIELDS, "TrainingArguments", "Trainer")


def check_overrides(kind: "type[Trainer]") -> None:
    """Check that a subclass overrides only methods that accel_train calls.

    Raises:
        SettingError: a method is overridden that only the replaced trainer calls, or that accel_train needs for itself.
            The message names each with its remedy.
    """
    stock, problems = resolve_name(kind._replaces), {}
    own = next(cls for cls in kind.__mro__ if cls.__module__.startswith("accel_train.hf."))
    for cls in kind.__mro__[: kind.__mro__.index(own)]:
        for name in vars(cls).keys() - kind._hooks:
            is_theirs, is_ours = (callable(getattr(each, name, None)) for each in (stock, own))
            # Overrides may call the helpers with an underscore, but nothing here calls an override of them.
            if name.startswith("__") or not (is_theirs or is_ours) or (is_ours and not name.startswith("_")):
                continue
            remedy = REMEDIES.get(name, f"use a callback, or {stock.__module__.split('.')[0]}.{stock.__name__}")
            problems[f"{cls.__name__}.{name}"] = (
                remedy if is_theirs else "accel_train has a method of this name; rename it"
            )
    if problems:
        problem = "; ".join(f"{name}: {remedy}" for name, remedy in sorted(problems.items()))
        at = f"methods that a subclass of accel_train.{own.__name__} cannot override"
        raise SettingError(problem, at=at, settings=tuple(problems))


def check_combinations(trainer: "Trainer") -> None:
    """Check the arguments of the trainer against each other.

    Raises:
        SettingError: two arguments contradict each other, or one needs another.
    """
    args, (optimizer, scheduler) = trainer.args, trainer.given_optimizers
    for name in () if trainer.generates else GENERATION_FIELDS:
        if value := getattr(args, name, None):
            raise argument_error(
                "accel_train.Trainer does not generate text", "Use accel_train.hf.Seq2SeqTrainer.", **{name: value}
            )
    if optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
        raise argument_error("both make an optimizer", "Give only one.", "optimizers", "optimizer_cls_and_kwargs")
    if trainer.model_init is not None and optimizer is not None:
        raise argument_error(
            "the optimizer does not have the new parameters that model_init makes",
            "Override create_optimizer instead.",
            "optimizers",
            "model_init",
        )
    if optimizer is None and scheduler is not None:
        raise argument_error("a scheduler belongs to its optimizer, but this is None", "Give both.", "optimizers")
    if args.eval_strategy != "no" and trainer.eval_dataset is None:
        raise argument_error(
            "evaluation needs an eval_dataset",
            "Give one, or set eval_strategy to no.",
            eval_strategy=name_of(args.eval_strategy),
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise argument_error(
            "`args.metric_for_best_model` must be provided",
            "Name a metric.",
            save_strategy="best",
            metric_for_best_model=None,
        )
    if is_of_store(args.output_dir):
        raise argument_error("a Trainer writes to a folder of this machine", output_dir=args.output_dir)
    if not callable(trainer.data_collator):
        raise argument_error(
            "not callable", "Give a function of a list of samples.", data_collator=trainer.data_collator
        )


@dataclass(frozen=True)
class Length:
    """The length of a run as transformers counts it. Every epoch is a whole number of steps."""

    batches_per_epoch: int
    """Micro-batches per epoch on each process."""
    steps_per_epoch: int
    max_steps: int
    num_epochs: int
    """Number of started epochs, as in transformers' state."""
    global_batch_size: int
    num_samples_planned: float
    """Samples of all steps, as transformers counts them for its samples per second."""
    gradient_accumulation_steps: int

    def epoch_at(self, step: int) -> float:
        """Return the epochs done after `step`, in fractions of micro-batches, as transformers logs them."""
        epochs, step_in_epoch = divmod(step, self.steps_per_epoch)
        batches = min(step_in_epoch * self.gradient_accumulation_steps, self.batches_per_epoch)
        return epochs + batches / self.batches_per_epoch


def length_of(args: TrainingArguments, num_samples: int | None, num_batches: int | None, world_size: int) -> Length:
    """Return the steps of the run and of an epoch, from the number of samples or of batches in the user's loader.

    Raises:
        SettingError: the data make no step, or have no length while max_steps is not set. Also raised if
            `dataloader_drop_last` leaves the last step of each epoch with fewer micro-batches, because a recipe cannot
            express this.
    """
    accumulation = args.gradient_accumulation_steps
    per_step = train_batch_size(args) * world_size
    global_batch = per_step * accumulation
    if num_batches is not None:
        batches = math.ceil(num_batches / world_size)
    elif num_samples is not None:
        whole, rest = divmod(num_samples, per_step)
        batches = whole if args.dataloader_drop_last else whole + (rest > 0)
        if args.dataloader_drop_last and batches % accumulation and batches > accumulation:
            raise argument_error(
                f"{num_samples} samples make {batches} micro-batches per process, which is not a multiple of "
                "gradient_accumulation_steps",
                "Set dataloader_drop_last=False, or choose sizes that divide.",
                dataloader_drop_last=True,
                gradient_accumulation_steps=accumulation,
            )
    elif args.max_steps > 0:
        batches = args.max_steps * accumulation
    else:
        raise argument_error(
            "the number of steps is unknown, because the dataset has no length",
            "Set max_steps.",
            "train_dataset",
            max_steps=args.max_steps,
        )
    steps_per_epoch = batches // accumulation if args.dataloader_drop_last else math.ceil(batches / accumulation)
    if steps_per_epoch == 0:
        raise argument_error(
            f"fewer samples ({num_samples}) than one step takes ({global_batch})",
            "Lower the batch size.",
            "train_dataset",
        )
    if args.max_steps > 0:
        epochs, max_steps = math.ceil(args.max_steps / steps_per_epoch), args.max_steps
    else:
        epochs, max_steps = math.ceil(args.num_train_epochs), math.ceil(args.num_train_epochs * steps_per_epoch)
    is_by_samples = num_samples is not None and args.max_steps <= 0
    planned = (num_samples or 0) * args.num_train_epochs if is_by_samples else max_steps * global_batch
    return Length(batches, steps_per_epoch, max_steps, epochs, global_batch, planned, accumulation)


def train_batch_size(args: TrainingArguments) -> int:
    """Return the samples per micro-batch of one process.

    Raises:
        SettingError: `split_batches` is set, but the batch cannot be split.
    """
    size = args.per_device_train_batch_size
    if not accelerator_settings(args.accelerator_config).get("split_batches"):
        return size
    if size % args.world_size:
        raise argument_error(
            f"accelerator_config sets split_batches, but {args.world_size} processes do not divide the batch",
            "Use a multiple.",
            per_device_train_batch_size=size,
        )
    return size // args.world_size


def to_recipe(
    args: TrainingArguments,
    length: Length,
    model: nn.Module,
    *,
    resume: str,
    by_callbacks: bool,
    has_eval: bool,
    train_name: str,
) -> Recipe:
    """Return the recipe of these arguments.

    Args:
        resume: `never`, `auto`, or a checkpoint.
        by_callbacks: whether callbacks decide when to evaluate and save, instead of the recipe.
        train_name: name of the training data in recipe.yaml.

    Raises:
        SettingError: a value breaks a rule of the recipe. The message names the argument.
    """
    check_arguments(args)
    schedule = schedule_of(args)
    # The schedule `constant` of transformers has no warmup.
    has_warmup = schedule is not None and args.lr_scheduler_type != "constant"
    leaves = {
        rule.leaves[0]: rule.value_of(getattr(args, name))
        for name, rule in FIELDS.items()
        if rule.value_of and hasattr(args, name)
    }
    if args.save_strategy == "best" and args.save_total_limit:
        # With the last step's, which is removed at the end.
        leaves["checkpoint.keep"] += 1
    leaves |= {
        "task": "hf-trainer",
        "schedule.max_steps": length.max_steps,
        "schedule.warmup_steps": args.get_warmup_steps(length.max_steps) if has_warmup else 0,
        **{f"schedule.{name}": value for name, value in (schedule or {"type": "constant"}).items()},
        "model.config": _describe(model),
        "data.train": train_name,
        "data.shuffle": args.train_sampling_strategy != "sequential",
        "data.group_by_length": args.train_sampling_strategy == "group_by_length",
        "optimizer.betas": (args.adam_beta1, args.adam_beta2),
        "precision.gradient_checkpointing": recomputes_activations(args),
        "precision.mixed_precision": precision_of(args),
        "checkpoint.every_steps": 0 if by_callbacks else _every(args, "save", length),
        "checkpoint.keep_best": args.load_best_model_at_end or args.save_strategy == "best",
        "checkpoint.resume": resume,
        # Changes are accepted as in transformers. Each is logged as a line and as an event.
        "checkpoint.accept_changes": True,
        # `on_save` is called once the folder is complete.
        "checkpoint.in_background": False,
        # Transformers does not have these features.
        "guard.on_spike": "off",
        "guard.max_rollbacks": 0,
        "evaluate.every_steps": _every(args, "eval", length) if has_eval and not by_callbacks else 0,
        "log.every_steps": _every(args, "logging", length) or length.max_steps,
        "options.training_arguments": set_fields(args),
        "batch.per_device_batch_size": train_batch_size(args),
        **parallel_leaves(args),
    }
    tree: Leaves = {}
    for path, value in leaves.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, args) from error


def precision_of(args: TrainingArguments) -> str:
    """Return the `mixed_precision` of the arguments, or of the launch if they have none, as in transformers."""
    said = {setting: value for _, setting, value, _ in settings_of_launch(launched_with())}
    return "fp16" if args.fp16 else "bf16" if args.bf16 else said.get("precision.mixed_precision", "no")


def schedule_of(args: TrainingArguments) -> Leaves | None:
    """Return `schedule.type` and its fields, or None if only transformers' scheduler can do it."""
    kind, kwargs = name_of(args.lr_scheduler_type), dict(args.lr_scheduler_kwargs or {})
    if kind in ("linear", "cosine", "constant", "inverse_sqrt") and not kwargs:
        return {"type": kind}
    if kind == "constant_with_warmup" and not kwargs:
        return {"type": "constant"}
    if kind == "cosine_with_restarts" and kwargs.keys() <= {"num_cycles"}:
        return {"type": "cosine_restarts", "num_cycles": kwargs.get("num_cycles", 1)}
    if kind == "cosine_with_min_lr" and len(kwargs) == 1 and kwargs.keys() <= {"min_lr", "min_lr_rate"}:
        ratio = kwargs["min_lr_rate"] if "min_lr_rate" in kwargs else kwargs["min_lr"] / args.learning_rate
        return {"type": "cosine", "min_lr_ratio": ratio}
    if kind == "polynomial" and kwargs.keys() <= {"lr_end", "power"}:
        ratio = kwargs.get("lr_end", 1e-7) / args.learning_rate
        return {"type": "polynomial", "min_lr_ratio": ratio, "power": kwargs.get("power", 1.0)}
    return None


def set_fields(args: TrainingArguments) -> JsonRecord:
    """Return the fields that differ from their defaults, as plain JSON values, without access tokens."""
    changed = {
        field.name: value
        for field in dataclasses.fields(args)
        if (value := getattr(args, field.name)) not in (field.default, [], {}, None)
        and not field.name.endswith("_token")
    }
    return parse_json(json.dumps(changed, default=lambda value: getattr(value, "value", str(value))))


def _every(args: TrainingArguments, kind: str, length: Length) -> int:
    """Return the steps between two `logging`, `eval`, or `save` events. 0 means never.

    An argument below 1 is a fraction of all steps.
    """
    strategy = name_of(getattr(args, f"{kind}_strategy"))
    if strategy == "epoch":
        return length.steps_per_epoch
    if strategy != "steps":
        return 0
    steps = getattr(args, f"{kind}_steps")
    return math.ceil(length.max_steps * steps) if 0 < steps < 1 else int(steps)


def _describe(model: nn.Module) -> JsonRecord:
    """Return the description of the user's model for recipe.yaml. A resume checks the weights by shape."""
    kind = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
    return {"model_type": kind, "class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}


def with_decay_of(recipe: Recipe, model: nn.Module, decayed: Collection[str]) -> Recipe:
    """Return the recipe with groups for the parameters that only transformers, or only accel_train, decays."""
    section = recipe.optimizer
    if section.weight_decay == 0:
        return recipe
    ours = {name for group in parameter_groups(model, section) for name, _ in group["params"] if group["weight_decay"]}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [(ours - set(decayed), 0.0), (trained & set(decayed) - ours, section.weight_decay)]
    by_name = tuple(ParameterGroup(match=tuple(sorted(names)), weight_decay=decay) for names, decay in groups if names)
    return recipe.model_copy(update={"optimizer": section.model_copy(update={"groups": by_name})})


def _explain(error: ValidationError, args: TrainingArguments) -> SettingError:
    """Return an error that names each argument with an invalid recipe field."""
    names = {leaf: name for name, rule in reversed(FIELDS.items()) for leaf in rule.leaves}
    names |= {"schedule": "warmup_steps", "optimizer.betas.1": "adam_beta2"}
    found, messages = [], []
    for problem in error.errors(include_url=False):
        place = ".".join(map(str, problem["loc"]))
        name = names.get(place) or names.get(place.rpartition(".")[0], place)
        value = getattr(args, name, problem.get("input"))
        broken = problem["ctx"]["error"] if problem["type"] == "value_error" else problem["msg"]
        found.append(name)
        messages.append(f"{name}={value!r}: {broken}")
    return SettingError("; ".join(messages), at="TrainingArguments", settings=tuple(found))


def recomputes_activations(args: TrainingArguments) -> bool:
    """Return whether the model checkpoints activations.

    The argument's new name, its name before transformers 5.23, and `fsdp_config` can all request it.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    by_fsdp = bool(args.fsdp) and str((args.fsdp_config or {}).get(names[0], False)).lower() == "true"
    return by_fsdp or any(getattr(args, name, False) for name in names)


def parallel_leaves(args: TrainingArguments) -> Leaves:
    """Return the recipe fields that the arguments `fsdp`, `deepspeed`, and `parallelism_config` set, or an empty dict.

    Raises:
        SettingError: two of them contradict each other, or one asks for an unsupported feature.
    """
    if args.fsdp and args.deepspeed:
        raise argument_error("both shard the model", "Give only one.", "fsdp", "deepspeed")
    leaves = _deepspeed_leaves(args) if args.deepspeed else _fsdp_leaves(args) if args.fsdp else {}
    if args.parallelism_config is not None:
        leaves |= _size_leaves(args.parallelism_config, is_zero=bool(args.deepspeed))
    return {f"parallel.{name}": value for name, value in leaves.items()}


def _fsdp_leaves(args: TrainingArguments) -> Leaves:
    config: Any = args.fsdp_config or {}
    if int(config.get("version", 2)) != 2:
        raise argument_error(
            f"version={config['version']}: FSDP1 is not supported", "Remove it to use FSDP2.", "fsdp_config"
        )
    if config.get("xla"):
        raise argument_error("xla=True: XLA is not supported", "Remove it.", "fsdp_config")
    return {
        "strategy": "fsdp2",
        "reshard_after_forward": str(config.get("reshard_after_forward", True)).lower() == "true",
        "cpu_offload": bool(config.get("cpu_offload", False)),
    }


def _deepspeed_leaves(args: TrainingArguments) -> Leaves:
    """Return the `parallel` fields of a DeepSpeed configuration.

    `trainer_config_process` of transformers has filled in each `auto` and noted contradictions to the arguments.
    """
    config: Any = args.hf_deepspeed_config
    found = None
    optimizer = config.get_value("optimizer.type")
    if config.mismatches:
        problems = "; ".join(map(str.strip, config.mismatches))
        found = f"the configuration contradicts the arguments ({problems})", "Write auto there."
    elif config.is_offload():
        found = "offloading is not supported", "Use fsdp with fsdp_config={'cpu_offload': True}."
    elif optimizer not in (None, "AdamW"):
        found = f"optimizer.type={optimizer}: only AdamW is supported", "Remove the section, and set optim."
    elif config.get_value("scheduler") is not None:
        found = "the scheduler section is not used", "Remove it, and set lr_scheduler_type."
    if found is not None:
        raise argument_error(*found, "deepspeed")
    stage = int(config.get_value("zero_optimization.stage", 0))
    return {"strategy": "deepspeed", "zero_stage": stage} if stage else {}


def _size_leaves(config: Any, *, is_zero: bool) -> Leaves:
    at = "parallelism_config"
    for name in ("tp_size", "cp_size", "sp_size"):
        # Older versions of Accelerate have no sp_size.
        if (size := getattr(config, name, 1)) > 1:
            raise argument_error(
                f"{name}={size}: accel_train.Trainer does not split layers or sequences",
                f"Leave it at 1, or {OURS}.",
                at,
            )
    if config.dp_shard_size <= 1:
        return {}
    if is_zero:
        raise argument_error("dp_shard_size is for fsdp", "Remove it when you use deepspeed.", at, "deepspeed")
    return {"strategy": "fsdp2", "dp_shard_size": config.dp_shard_size}
