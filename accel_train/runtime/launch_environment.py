"""Variables by which `accelerate launch` defines the sharding: a source of the recipe's `parallel` section.

A configuration with `distributed_type: FSDP` or `DEEPSPEED` reaches a program as variables (accelerate/utils/launch.py,
`prepare_multi_gpu_env`, `prepare_deepspeed_cmd_env` and `prepare_extend_env_parallelism_config`).
"""

import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import Origin
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show

TRUE, FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f", "")
FSDP, ZERO, SIZES = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"
NO_FSDP = "no FSDP"
TP_SIZE, SP_SIZE = "PARALLELISM_CONFIG_TP_SIZE", "PARALLELISM_CONFIG_SP_SIZE"
COPIES, SHARD_SIZE = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"
ZERO_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
_BY_RECIPE, _LEAVE_OUT = "how to train is for the recipe to say", "out of the launch's deepspeed_config"
_OFFLOAD = (
    "offloading is not supported under DeepSpeed; launch with launch/fsdp2.yaml and fsdp_offload_params: true, or "
    "leave it"
)
# Entries: parts of the launch, a variable, its allowed values (lower case), and the reason. A variable is refused if
# all parts are on and its value is not allowed.
REFUSED: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str], ...] = (
    (
        (),
        "ACCELERATE_USE_MEGATRON_LM",
        FALSE,
        "Megatron-LM is not supported; launch with launch/fsdp2.yaml, launch/hsdp.yaml or launch/tp.yaml for a model "
        "that one GPU does not hold, launch/sp.yaml for long sequences, or else launch/ddp.yaml",
    ),
    (
        (SIZES,),
        "PARALLELISM_CONFIG_CP_SIZE",
        ("1",),
        "context parallelism is not supported; split sequences with parallel.sp_size, and leave cp_size at 1 in the "
        "launch's parallelism_config",
    ),
    (
        (SIZES, ZERO),
        SP_SIZE,
        ("1",),
        "sequences are split under FSDP2 and DDP, and not under DeepSpeed's ZeRO; launch with launch/sp.yaml",
    ),
    (
        (SIZES, SP_SIZE),
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        ("sdpa", "none"),
        "sequences that are split attend by SDPA, whose kernels torch chooses; leave it out of the launch's "
        "parallelism_config",
    ),
    (
        (ZERO,),
        "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        (),
        f"{_BY_RECIPE}: a configuration of DeepSpeed's own; write zero_stage, leave deepspeed_config_file {_LEAVE_OUT}",
    ),
    (
        (ZERO,),
        "ACCELERATE_GRADIENT_CLIPPING",
        (),
        f"{_BY_RECIPE}: optimizer.max_grad_norm of the recipe; leave gradient_clipping {_LEAVE_OUT}",
    ),
    (
        (ZERO,),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        (),
        f"{_BY_RECIPE}: batch of the recipe; leave gradient_accumulation_steps {_LEAVE_OUT}",
    ),
    ((ZERO,), "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", ("none",), f"{_OFFLOAD} {_LEAVE_OUT}"),
    ((ZERO,), "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", ("none",), f"{_OFFLOAD} {_LEAVE_OUT}"),
    (
        (ZERO,),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        FALSE,
        f"weights are sharded once the model is built; leave zero3_init_flag {_LEAVE_OUT}, or launch with "
        "launch/fsdp2.yaml: it shards the model over the processes",
    ),
    ((ZERO,), ZERO_STAGE, ("1", "2", "3"), "must be 1, 2 or 3; launch/ddp.yaml shards nothing"),
    (
        (SIZES, NO_FSDP),
        TP_SIZE,
        ("1",),
        "tensor parallelism goes with FSDP2, and not with DDP; set distributed_type: FSDP in the launch's "
        "configuration, as launch/tp.yaml does",
    ),
    (
        (FSDP,),
        "FSDP_VERSION",
        ("2",),
        "only version 2 is supported; set fsdp_version: 2 in the launch's fsdp_config, as launch/fsdp2.yaml does",
    ),
    (
        (FSDP,),
        "FSDP_ACTIVATION_CHECKPOINTING",
        FALSE,
        f"{_BY_RECIPE}; set precision.gradient_checkpointing there, and leave fsdp_activation_checkpointing out of the "
        "launch's fsdp_config",
    ),
)


@cache
def launched_with() -> Mapping[str, str]:
    """Return the variables of this process at the first call. Building an Accelerator changes them."""
    return MappingProxyType(dict(os.environ))


def with_launch_environment(recipe: Recipe, environment: Mapping[str, str] | None = None) -> Recipe:
    """Return the recipe with the launch's settings in place of defaults of `parallel`, and the launch as origin.

    Raises:
        ValueError: the launch asks for something unsupported, or disagrees with the recipe.
    """
    changes: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for field, (value, variable) in _fields_set_by(environment).items():
        name, in_recipe = f"parallel.{field}", getattr(recipe.parallel, field)
        who = who_set(recipe, name)
        if who == "default":
            changes[field], origins[name] = value, Origin("environment", f"{variable} of the launch")
        elif in_recipe != value:
            raise ValueError(
                f"{name}={show(in_recipe)} ({who}), but the launch says {variable}={value}; change one of them: the "
                f"configuration file of `accelerate launch`, or the recipe. launch/ddp.yaml leaves the recipe unchanged"
            )
    if not changes:
        return recipe
    section = type(recipe.parallel).model_validate({**recipe.parallel.model_dump(), **changes})
    return recipe.model_copy(update={"parallel": section}).with_origins({**recipe.origins(), **origins})


def _fields_set_by(variables: Mapping[str, str] | None) -> dict[str, tuple[Any, str]]:
    """Return the fields of `parallel` that the launch sets, each with its value and variable.

    Raises:
        ValueError: the launch asks for something unsupported.
    """
    environment = launched_with() if variables is None else variables
    fsdp, zero, has_sizes = (_flag(environment, name) for name in (FSDP, ZERO, SIZES))
    tp_size, sp_size = (_size(environment, name) if has_sizes else 1 for name in (TP_SIZE, SP_SIZE))
    is_on = {FSDP: fsdp, NO_FSDP: not fsdp, ZERO: zero, SIZES: has_sizes, SP_SIZE: sp_size > 1}
    # Accelerate's default.
    values = {"FSDP_VERSION": "1", **environment}
    for parts, variable, allowed, why in REFUSED:
        if all(is_on[part] for part in parts) and variable in values and values[variable].lower() not in allowed:
            raise ValueError(f"{variable}={values[variable]}: {why}")
    fields: dict[str, tuple[Any, str]] = {}
    if sp_size > 1:
        fields["sp_size"] = sp_size, SP_SIZE
    if zero:
        fields["strategy"] = "deepspeed", ZERO
        fields["zero_stage"] = int(environment.get(ZERO_STAGE, "2")), ZERO_STAGE
    if fsdp:
        reshard, offload = "FSDP_RESHARD_AFTER_FORWARD", "FSDP_OFFLOAD_PARAMS"
        fields["strategy"] = "fsdp2", FSDP
        fields["reshard_after_forward"] = _flag(environment, reshard, default=True), reshard
        fields["cpu_offload"] = _flag(environment, offload), offload
    if fsdp and has_sizes:
        fields["dp_shard_size"] = _shard_size(environment, tp_size, sp_size), SHARD_SIZE
    if fsdp and tp_size > 1:
        fields["tp_size"] = tp_size, TP_SIZE
    return fields


def _shard_size(environment: Mapping[str, str], tp_size: int, sp_size: int) -> int:
    """Return the number of processes that share one copy of the model.

    As in Accelerate, it includes the processes that split sequences.
    """
    copies, shard = _size(environment, COPIES), _size(environment, SHARD_SIZE)
    processes = environment.get("WORLD_SIZE", "")
    if processes.isdigit() and copies * shard * tp_size * sp_size != int(processes):
        others = f" x {TP_SIZE}={tp_size}" if tp_size > 1 else ""
        others += f" x {SP_SIZE}={sp_size}" if sp_size > 1 else ""
        raise ValueError(
            f"{COPIES}={copies} x {SHARD_SIZE}={shard}{others} is not the number of processes, {processes}; set them "
            "in the launch's parallelism_config so that they multiply to num_processes"
        )
    return shard * sp_size


def _flag(environment: Mapping[str, str], variable: str, *, default: bool = False) -> bool:
    text = environment.get(variable, str(default))
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"{variable}={text}: must be true or false")
    return text.lower() in TRUE


def _size(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "1")
    if not text.isdigit() or text == "0":
        raise ValueError(f"{variable}={text}: must be a whole number of at least 1")
    return int(text)
