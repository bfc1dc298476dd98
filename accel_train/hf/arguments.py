"""TrainingArguments -> Recipe, once, before anything is built; what cannot be honoured is an error that names the field."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from torch import nn
from transformers import TrainingArguments

from accel_train.hf_face.fields import FIELDS, OPTIMIZERS
from accel_train.optim import parameter_groups
from accel_train.recipe import Recipe
from accel_train.recipe_optimizer import Optimizer, ParameterGroup

if TYPE_CHECKING:
    from collections.abc import Collection

KEEP_ALL = 1_000_000
"""`save_total_limit=None`: more checkpoints than a run writes."""
LEAF_OF = {
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas.0",
    "adam_beta2": "optimizer.betas.1",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.max_grad_norm",
    "label_smoothing_factor": "loss.label_smoothing",
    "seed": "seed",
    "per_device_train_batch_size": "batch.per_device_batch_size",
    "per_device_eval_batch_size": "batch.per_device_eval_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "num_train_epochs": "schedule.max_steps",
    "save_total_limit": "checkpoint.keep",
    "dataloader_num_workers": "data.num_workers",
    "logging_steps": "log.every_steps",
    "warmup_steps": "schedule",
}
"""Which field to name when the recipe refuses a leaf."""


def check_arguments(args: TrainingArguments) -> None:
    """Refuse what cannot be honoured: the field, its value, and what to do instead.

    Raises:
        ValueError: naming every such field.
    """
    problems = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        rule = FIELDS.get(field.name)
        if rule is None:  # a field of a subclass, or of another transformers
            if value != field.default and field.default_factory is dataclasses.MISSING:
                problems.append(f"{field.name}={value!r}: accel_train.Trainer does not know this field; leave it out")
        elif rule.allowed is not None and not rule.allowed(value):
            problems.append(f"{field.name}={getattr(value, 'value', value)!r}: {rule.remedy or rule.says}")
    if problems:
        raise ValueError("TrainingArguments that accel_train.Trainer cannot honour: " + "; ".join(problems))


@dataclass(frozen=True)
class Length:
    """How long a run is, in transformers' way of counting: every epoch is a whole number of steps."""

    batches_per_epoch: int
    """Micro-batches of each process."""
    steps_per_epoch: int
    max_steps: int
    num_epochs: int
    """What transformers' state shows: begun epochs."""
    global_batch_size: int
    num_samples_planned: float
    """In all steps, as transformers counts them for its samples per second."""

    def epoch_at(self, step: int, gradient_accumulation_steps: int) -> float:
        """Epochs done after a step, counted in micro-batches, as transformers logs them."""
        epochs, step_in_epoch = divmod(step, self.steps_per_epoch)
        batches = min(step_in_epoch * gradient_accumulation_steps, self.batches_per_epoch)
        return epochs + batches / self.batches_per_epoch


def length_of(args: TrainingArguments, num_samples: int | None, num_batches: int | None, world_size: int) -> Length:
    """Steps of the run and of an epoch, from the samples, or from the batches of a loader of the user.

    Raises:
        ValueError: there is nothing to train on; or neither a length nor max_steps; or `dataloader_drop_last` leaves the last
            step of each epoch with fewer micro-batches, which the recipe cannot say.
    """
    accumulation = args.gradient_accumulation_steps
    per_step = args.per_device_train_batch_size * world_size
    if num_batches is not None:
        batches = math.ceil(num_batches / world_size)
    elif num_samples is not None:
        whole, rest = divmod(num_samples, per_step)
        batches = whole if args.dataloader_drop_last else whole + (rest > 0)
        if args.dataloader_drop_last and batches % accumulation and batches > accumulation:
            raise ValueError(
                f"dataloader_drop_last=True: {num_samples} samples make {batches} micro-batches for each process, no "
                f"multiple of gradient_accumulation_steps={accumulation}; set it False, or choose sizes that divide"
            )
    elif args.max_steps > 0:
        batches = args.max_steps * accumulation
    else:
        raise ValueError("the train_dataset has no length, so the number of steps cannot be inferred; set max_steps")
    steps_per_epoch = batches // accumulation if args.dataloader_drop_last else math.ceil(batches / accumulation)
    if steps_per_epoch == 0:
        raise ValueError(
            f"the train_dataset has {num_samples} samples, which make no step of {per_step * accumulation}"
        )
    max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    epochs = math.ceil(max_steps / steps_per_epoch) if args.max_steps > 0 else math.ceil(args.num_train_epochs)
    is_by_epochs = args.max_steps <= 0 and num_samples is not None
    planned = (
        num_samples * args.num_train_epochs if is_by_epochs and num_samples else max_steps * per_step * accumulation
    )
    return Length(batches, steps_per_epoch, max_steps, epochs, per_step * accumulation, planned)


def to_recipe(
    args: TrainingArguments,
    length: Length,
    model: nn.Module,
    *,
    decayed: "Collection[str]",
    resume: str,
    by_callbacks: bool,
    has_eval: bool,
    train_name: str,
) -> Recipe:
    """The recipe of these arguments.

    Args:
        decayed: names of the parameters that transformers gives weight decay.
        resume: `never`, `auto` or a checkpoint.
        by_callbacks: callbacks say when to evaluate and save, so the recipe does not.
        train_name: what the training data is called in recipe.yaml.

    Raises:
        ValueError: a value breaks a rule of the recipe; the text names the field.
    """
    check_arguments(args)
    at = {} if by_callbacks else {"evaluate": _every(args, "eval", length), "checkpoint": _every(args, "save", length)}
    mixed = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    is_best = args.load_best_model_at_end or args.save_strategy == "best"
    schedule = schedule_of(args)
    is_constant = schedule is None or args.lr_scheduler_type == "constant"
    optimizer = {
        "name": OPTIMIZERS[args.optim.value],
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "momentum": float((args.optim_args or "momentum=0").split("=")[1]),
        "max_grad_norm": args.max_grad_norm or 0.0,
    }
    tree: dict[str, Any] = {
        "task": "hf-trainer",
        "seed": args.seed,
        "output_dir": args.output_dir,
        "model": {"config": _describe(model)},
        "data": {
            "train": train_name,
            "shuffle": args.train_sampling_strategy != "sequential",
            "group_by_length": args.train_sampling_strategy == "group_by_length",
            "num_workers": args.dataloader_num_workers,
            "pin_memory": "auto" if args.dataloader_pin_memory else False,
            "last_batch": "drop" if args.dataloader_drop_last else "short",
        },
        "loss": {"label_smoothing": args.label_smoothing_factor},
        "batch": {
            "per_device_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "per_device_eval_batch_size": args.per_device_eval_batch_size,
        },
        "optimizer": optimizer,
        "schedule": {
            **(schedule or {"type": "constant"}),
            "max_steps": length.max_steps,
            # transformers' plain constant schedule has no warmup
            "warmup_steps": 0 if is_constant else args.get_warmup_steps(length.max_steps),
        },
        "precision": {
            "mixed_precision": mixed,
            "tf32": "auto" if args.tf32 is None else args.tf32,
            "compile": bool(args.torch_compile),
            "deterministic": args.full_determinism,
            "gradient_checkpointing": bool(args.activation_checkpointing),
        },
        "checkpoint": {
            "every_steps": at.get("checkpoint", 0),
            "keep": args.save_total_limit or KEEP_ALL,
            "keep_best": is_best,
            "load_best_model_at_end": args.load_best_model_at_end,
            "resume": resume,
            "in_background": False,  # `on_save` comes once the folder is there
        },
        "guard": {"on_spike": "off", "max_rollbacks": 0},  # transformers has neither
        "evaluate": {
            "every_steps": at.get("evaluate", 0) if has_eval else 0,
            "metric_for_best_model": (args.metric_for_best_model or "loss").removeprefix("eval_"),
            "greater_is_better": "auto" if args.greater_is_better is None else args.greater_is_better,
        },
        "log": {
            "every_steps": _every(args, "logging", length) or length.max_steps,
            "progress": False if args.disable_tqdm else "auto",
        },
        "options": {"training_arguments": set_fields(args)},
    }
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_explain(error, args)) from error
    groups = _groups_for_decay(model, recipe.optimizer, decayed)
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"groups": groups})})


def schedule_of(args: TrainingArguments) -> dict[str, Any] | None:
    """`schedule.type` and its leaves; None where the recipe cannot say it, and transformers' scheduler is asked instead."""
    kind, kwargs = args.lr_scheduler_type.value, dict(args.lr_scheduler_kwargs or {})
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


def set_fields(args: TrainingArguments) -> dict[str, Any]:
    """The fields that differ from their defaults, as plain JSON values; tokens are left out."""
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name.endswith("_token") or value == field.default or value in ([], {}, None):
            continue
        found[field.name] = value
    plain: dict[str, Any] = json.loads(json.dumps(found, default=lambda value: getattr(value, "value", str(value))))
    return plain


def _every(args: TrainingArguments, kind: str, length: Length) -> int:
    """Steps between two of a kind (`logging`, `eval`, `save`); 0: never. A number below 1 is a fraction of all steps."""
    strategy = getattr(args, f"{kind}_strategy").value
    if strategy == "epoch":
        return length.steps_per_epoch
    if strategy != "steps":
        return 0
    steps = getattr(args, f"{kind}_steps")
    return math.ceil(length.max_steps * steps) if 0 < steps < 1 else int(steps)


def _describe(model: nn.Module) -> dict[str, Any]:
    """What recipe.yaml says of a model that was handed over: its weights, and so a resume, are checked by shape."""
    kind = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
    return {"model_type": kind, "class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}


def _groups_for_decay(model: nn.Module, section: Optimizer, decayed: "Collection[str]") -> tuple[ParameterGroup, ...]:
    """Where transformers' rule for weight decay and ours differ on this model, the parameters by name."""
    if section.weight_decay == 0:
        return ()
    ours = {name for group in parameter_groups(model, section) for name, _ in group["params"] if group["weight_decay"]}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    spared, added = sorted(ours - set(decayed)), sorted(trained & set(decayed) - ours)
    groups = [(spared, 0.0), (added, section.weight_decay)]
    return tuple(ParameterGroup(match=tuple(names), weight_decay=decay) for names, decay in groups if names)


def _explain(error: ValidationError, args: TrainingArguments) -> str:
    said = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"])
        names = [name for name, leaf in LEAF_OF.items() if place == leaf or place.startswith(f"{leaf}.")]
        name = names[0] if names else place
        value = getattr(args, name, problem.get("input"))
        said.append(f"{name}={value!r}: {problem['msg'].removeprefix('Value error, ')}")
    return "TrainingArguments: " + "; ".join(said)
