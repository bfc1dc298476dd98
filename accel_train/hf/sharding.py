"""Sharded models: the recipe's `parallel` section from the training arguments, forward passes, and saves.

The arguments are `fsdp`, `deepspeed`, and `parallelism_config`.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from accel_train.checkpoint.contents import load_model_tensors
from accel_train.parallel.zero import import_deepspeed
from accel_train.recipe.schema import Recipe

if TYPE_CHECKING:
    from accel_train.hf import Trainer

OURS = "the recipe's `parallel` section has it: accel-train run"


def parallel_leaves(args: TrainingArguments) -> dict[str, Any]:
    """Return the recipe fields that the arguments `fsdp`, `deepspeed`, and `parallelism_config` set.

    Without sharding, the dict is empty.

    Raises:
        ValueError: two of them contradict each other, or one asks for an unsupported feature. The message names the
            remedy.
    """
    given = [name for name in ("fsdp", "deepspeed", "parallelism_config") if getattr(args, name)]
    if {"fsdp", "deepspeed"} <= set(given):
        raise ValueError("fsdp and deepspeed both shard the model; give one of the two")
    leaves = dict(_of_deepspeed(args)) if args.deepspeed else dict(_of_fsdp(args)) if args.fsdp else {}
    if args.parallelism_config is not None:
        leaves |= _of_sizes(args.parallelism_config, is_zero=bool(args.deepspeed))
    return {f"parallel.{name}": value for name, value in leaves.items()}


def recomputes_activations(args: TrainingArguments) -> bool:
    """Return whether the model checkpoints activations.

    The argument's new name, its name before transformers 5.23, and `fsdp_config` can all request it.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    by_fsdp = bool(args.fsdp) and str((args.fsdp_config or {}).get(names[0], False)).lower() == "true"
    return by_fsdp or any(getattr(args, name, False) for name in names)


def accelerator_settings(config: Any) -> dict[str, Any]:
    """Return the fields of an `accelerator_config`, given as a dict, an object, or None."""
    return config if isinstance(config, dict) else {} if config is None else config.to_dict()


def train_batch_size(args: TrainingArguments) -> int:
    """Return the samples per micro-batch of one process.

    Raises:
        ValueError: `split_batches` is set, but the batch cannot be split.
    """
    size = args.per_device_train_batch_size
    if not accelerator_settings(args.accelerator_config).get("split_batches"):
        return size
    if size % args.world_size:
        raise ValueError(
            f"per_device_train_batch_size={size} cannot be split over {args.world_size} processes, "
            "as accelerator_config's split_batches asks for; use a multiple"
        )
    return size // args.world_size


def get_total_train_batch_size(trainer: "Trainer", args: TrainingArguments | None = None) -> int:
    """Return the samples per step over all processes."""
    args = args or trainer.args
    return train_batch_size(args) * args.world_size * args.gradient_accumulation_steps


def _of_fsdp(args: TrainingArguments) -> Iterator[tuple[str, Any]]:
    config: Any = args.fsdp_config or {}
    if int(config.get("version", 2)) != 2:
        raise ValueError(f"fsdp_config: version={config['version']}: FSDP1 is not supported; leave it out, for FSDP2")
    if config.get("xla"):
        raise ValueError("fsdp_config: xla=True: XLA is not here; leave it out")
    yield "strategy", "fsdp2"
    yield "reshard_after_forward", str(config.get("reshard_after_forward", True)).lower() == "true"
    yield "cpu_offload", bool(config.get("cpu_offload", False))


def _of_deepspeed(args: TrainingArguments) -> Iterator[tuple[str, Any]]:
    """Yield the `parallel` fields of a DeepSpeed configuration.

    `trainer_config_process` of transformers has filled in each `auto` and noted contradictions to the arguments.
    """
    config: Any = args.hf_deepspeed_config
    if config.mismatches:
        raise ValueError(
            f"deepspeed: its configuration contradicts the arguments ({'; '.join(map(str.strip, config.mismatches))}); "
            "write auto there"
        )
    if config.is_offload():
        raise ValueError("deepspeed: offloading is not supported; use fsdp with fsdp_config={'cpu_offload': True}")
    optimizer = config.get_value("optimizer.type")
    if optimizer not in (None, "AdamW"):
        raise ValueError(f"deepspeed: optimizer.type={optimizer}: only AdamW; leave the section out, and set optim")
    if config.get_value("scheduler") is not None:
        raise ValueError("deepspeed: its scheduler is not used; leave the section out, and set lr_scheduler_type")
    stage = int(config.get_value("zero_optimization.stage", 0))
    if stage:
        yield "strategy", "deepspeed"
        yield "zero_stage", stage


def _of_sizes(config: Any, *, is_zero: bool) -> dict[str, Any]:
    for name in ("tp_size", "cp_size", "sp_size"):
        # Older versions of Accelerate have no sp_size.
        if (size := getattr(config, name, 1)) > 1:
            raise ValueError(
                f"parallelism_config: {name}={size}: a model of yours is trained with whole layers and sequences; "
                f"leave it at 1 ({OURS})"
            )
    if config.dp_shard_size <= 1:
        return {}
    if is_zero:
        raise ValueError("parallelism_config: dp_shard_size is for fsdp; leave it out with deepspeed")
    return {"strategy": "fsdp2", "dp_shard_size": config.dp_shard_size}


def check_sharded(trainer: "Trainer", recipe: Recipe, stock: Path | None) -> None:
    """Check that the trainer's settings work with a sharded model.

    Raises:
        ValueError: a setting does not. The message names it and the remedy.
    """
    args, strategy = trainer.args, recipe.parallel.strategy
    if recipe.parallel.num_sharing > 1:
        raise ValueError(
            f"{recipe.parallel.shared_by}={recipe.parallel.num_sharing} (the launch): "
            f"accel_train.Trainer trains whole layers and whole sequences; launch with launch/fsdp2.yaml ({OURS})"
        )
    if strategy == "ddp" or args.world_size == 1:
        return
    problem = None
    if trainer.strategy is not None:
        problem = "this trainer's model is sharded by now; make a new Trainer, with the model that the first has saved"
    elif stock is not None:
        problem = (
            f"{stock} is a checkpoint of transformers' Trainer; resume it unsharded for a step, "
            "and go on from what that saves"
        )
    elif trainer.given_optimizers[0] is not None:
        problem = (
            "the optimizer that is given holds whole weights; "
            "override create_optimizer, which is called once they are sharded"
        )
    elif trainer.makes_optimizer:
        problem = f"optim={args.optim} is not tested to train as one process does; use adamw_torch or sgd"
    elif args.bf16_full_eval or args.fp16_full_eval:
        problem = "a sharded model cannot be cast afterwards; leave bf16_full_eval and fp16_full_eval out"
    if problem is not None:
        raise ValueError(f"parallel.strategy {strategy} (fsdp, deepspeed or the launch): {problem}")


def load_whole(model: nn.Module) -> None:
    """* Give the model whole weights, and load later weights whole, too.

    With ZeRO 3 arguments, `from_pretrained` loads only parts of the weights on each process.
    """
    unset_hf_deepspeed_config()
    # Tied weights share one entry.
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, part in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if hasattr(part, "ds_id"):
                if id(part) not in found:
                    with import_deepspeed().zero.GatheredParameters([part]):
                        found[id(part)] = nn.Parameter(part.data.cpu().clone(), requires_grad=part.requires_grad)
                setattr(module, name, found[id(part)])


def copy_whole(trainer: "Trainer", recipe: Recipe) -> nn.Module | None:
    """Return a copy of a model that is about to be sharded, on the main process, or None.

    Saves load the whole weights into this copy.
    """
    is_spread = recipe.parallel.strategy != "ddp" and trainer.args.world_size > 1
    return copy.deepcopy(trainer.model) if is_spread and trainer.args.process_index == 0 else None


def is_spread(trainer: "Trainer") -> bool:
    """Return whether the model's forward waits for the other processes."""
    return trainer.strategy is not None and trainer.strategy.meets_in_forward


def whole_model(trainer: "Trainer") -> nn.Module:
    """* Return the model with all its weights on the main process. All processes of a sharded model must call it."""
    if not is_spread(trainer):
        return trainer.model
    tensors = trainer.strategy.full_weights()
    whole = trainer.whole_model
    if whole is None:
        return trainer.model
    load_model_tensors(whole, tensors)
    return whole.eval()


def prediction_step(trainer: "Trainer", inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None) -> Any:
    """Return the result of `trainer.prediction_step`.

    For a sharded model, call it inside the outermost sharded module, because its hooks gather the weights outside of
    the blocks.
    """
    if not is_spread(trainer):
        return trainer.prediction_step(trainer.model, inputs, loss_only, ignore_keys=ignore_keys)
    return trainer.strategy.inner((inputs, loss_only, ignore_keys), "predictions")
