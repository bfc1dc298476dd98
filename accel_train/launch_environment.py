"""What `accelerate launch` says of how the model is spread over the processes: an origin of the recipe's `parallel` section.

A configuration with `distributed_type: FSDP` or `DEEPSPEED` reaches a program as variables (accelerate/utils/launch.py,
`prepare_multi_gpu_env`, `prepare_deepspeed_cmd_env` and `prepare_extend_env_parallelism_config`), where an Accelerator built without care reads them.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from accel_train.recipe import Recipe
from accel_train.recipe_values import Origin
from accel_train.recipe_writing import show, who_set

TRUE, FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f", "")
REFUSED_BACKENDS = {"ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}
TP_SIZE, SP_SIZE = "PARALLELISM_CONFIG_TP_SIZE", "PARALLELISM_CONFIG_SP_SIZE"
SP_ATTENTION = "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"
REFUSED_SIZES = {
    "PARALLELISM_CONFIG_CP_SIZE": "context parallelism is not supported (parallel.cp_size says why)",
}
HOW_TO_TRAIN = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "a configuration of DeepSpeed's own; write zero_stage, leave deepspeed_config_file",
    "ACCELERATE_GRADIENT_CLIPPING": "optimizer.max_grad_norm of the recipe; leave gradient_clipping",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "batch of the recipe; leave gradient_accumulation_steps",
}
"""What a deepspeed_config may say of training, and whose word it is."""
REMEDY = "launch with launch/fsdp2.yaml, launch/hsdp.yaml or launch/tp.yaml for a model that one GPU does not hold, launch/sp.yaml for long sequences, or else launch/ddp.yaml"


@cache
def launched_with() -> Mapping[str, str]:
    """The variables of this process when it was first asked: building an Accelerator changes them."""
    return MappingProxyType(dict(os.environ))


def with_launch_environment(recipe: Recipe, environment: Mapping[str, str] | None = None) -> Recipe:
    """The recipe with what the launcher says in the place of defaults of `parallel`, and knowing that the launcher said it.

    Raises:
        ValueError: the launcher says what this cannot do, or something else than the recipe does.
    """
    said = dict(_said_by(launched_with() if environment is None else environment))
    changes: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for field, (value, variable) in said.items():
        name, here = f"parallel.{field}", getattr(recipe.parallel, field)
        who = who_set(recipe, name)
        if who == "default":
            changes[field], origins[name] = value, Origin("environment", f"{variable} of the launch")
        elif here != value:
            raise ValueError(
                f"{name}={show(here)} ({who}), but the launch says {variable}={value}; change one of them: the "
                "configuration file of `accelerate launch`, or the recipe, which launch/ddp.yaml leaves as it is"
            )
    if not changes:
        return recipe
    section = type(recipe.parallel).model_validate({**recipe.parallel.model_dump(), **changes})
    return recipe.model_copy(update={"parallel": section}).with_origins({**recipe.origins(), **origins})


def refuse_sharded_launch(environment: Mapping[str, str] | None = None) -> None:
    """For what trains data-parallel only.

    Raises:
        ValueError: the launcher says to spread the model over the processes.
    """
    for _, variable in dict(_said_by(launched_with() if environment is None else environment)).values():
        raise ValueError(
            f"the launch says {variable}, and accel_train.Trainer trains data-parallel only; use launch/ddp.yaml, or a recipe"
        )


def _said_by(environment: Mapping[str, str]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Fields of `parallel`, each with its value and the variable that says it."""
    for variable, name in REFUSED_BACKENDS.items():
        if _flag(environment, variable):
            raise ValueError(f"{variable}={environment[variable]}: {name} is not supported; {REMEDY}")
    sizes = _flag(environment, "ACCELERATE_USE_PARALLELISM_CONFIG")
    for variable, name in REFUSED_SIZES.items() if sizes else ():
        if _size(environment, variable) > 1:
            raise ValueError(
                f"{variable}={environment[variable]}: {name}; leave its size at 1 in the launch's parallelism_config"
            )
    sequences = _size(environment, SP_SIZE) if sizes else 1
    if sequences > 1:
        yield "sp_size", (sequences, SP_SIZE)
        _check_sequences(environment)
    if _flag(environment, "ACCELERATE_USE_DEEPSPEED"):
        yield from _said_of_zero(environment)
    split = _size(environment, TP_SIZE) if sizes else 1
    if split > 1 and not _flag(environment, "ACCELERATE_USE_FSDP"):
        raise ValueError(
            f"{TP_SIZE}={split}: tensor parallelism goes with FSDP2, and not with DDP; set distributed_type: FSDP in the launch's "
            "configuration, as launch/tp.yaml does"
        )
    if not _flag(environment, "ACCELERATE_USE_FSDP"):
        return
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(
            f"FSDP_VERSION={version}: only version 2 is supported; set fsdp_version: 2 in the launch's fsdp_config, as launch/fsdp2.yaml does"
        )
    if _flag(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        raise ValueError(
            "FSDP_ACTIVATION_CHECKPOINTING=true: how to train is for the recipe to say; set precision.gradient_checkpointing "
            "there, and leave fsdp_activation_checkpointing out of the launch's fsdp_config"
        )
    yield "strategy", ("fsdp2", "ACCELERATE_USE_FSDP")
    for field, variable, default in (
        ("reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD", True),
        ("cpu_offload", "FSDP_OFFLOAD_PARAMS", False),
    ):
        yield field, (_flag(environment, variable, default=default), variable)
    if sizes:
        yield "dp_shard_size", (_shard_size(environment, split, sequences), "PARALLELISM_CONFIG_DP_SHARD_SIZE")
    if split > 1:
        yield "tp_size", (split, TP_SIZE)


def _said_of_zero(environment: Mapping[str, str]) -> Iterator[tuple[str, tuple[Any, str]]]:
    for variable, whose in HOW_TO_TRAIN.items():
        if variable in environment:
            raise ValueError(
                f"{variable}={environment[variable]}: how to train is for the recipe to say: {whose} out of the launch's deepspeed_config"
            )
    for variable in ("OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE"):
        device = environment.get(f"ACCELERATE_DEEPSPEED_{variable}", "none")
        if device != "none":
            raise ValueError(
                f"ACCELERATE_DEEPSPEED_{variable}={device}: offloading is not supported under DeepSpeed; launch with "
                "launch/fsdp2.yaml and fsdp_offload_params: true, or leave it out of the launch's deepspeed_config"
            )
    if _flag(environment, "ACCELERATE_DEEPSPEED_ZERO3_INIT"):
        raise ValueError(
            "ACCELERATE_DEEPSPEED_ZERO3_INIT=true: weights are spread once the model is built; leave zero3_init_flag out of "
            "the launch's deepspeed_config, or launch with launch/fsdp2.yaml, which never has the whole model on every process"
        )
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise ValueError(f"ACCELERATE_DEEPSPEED_ZERO_STAGE={stage}: must be 1, 2 or 3; launch/ddp.yaml spreads nothing")
    yield "strategy", ("deepspeed", "ACCELERATE_USE_DEEPSPEED")
    yield "zero_stage", (int(stage), "ACCELERATE_DEEPSPEED_ZERO_STAGE")


def _check_sequences(environment: Mapping[str, str]) -> None:
    if _flag(environment, "ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            f"{SP_SIZE}={environment[SP_SIZE]}: sequences are split under FSDP2 and DDP, and not under DeepSpeed's ZeRO; launch with "
            "launch/sp.yaml"
        )
    attention = environment.get(SP_ATTENTION, "sdpa")
    if attention not in ("sdpa", "None"):
        raise ValueError(
            f"{SP_ATTENTION}={attention}: sequences that are split attend by SDPA, whose kernels torch chooses; leave it out of the "
            "launch's parallelism_config"
        )


def _shard_size(environment: Mapping[str, str], split: int, sequences: int) -> int:
    """Processes that share one copy of the model: as under Accelerate's cp_size, those that split sequences share it as well."""
    copies, shard = (_size(environment, f"PARALLELISM_CONFIG_DP_{name}_SIZE") for name in ("REPLICATE", "SHARD"))
    processes = environment.get("WORLD_SIZE", "")
    if processes.isdigit() and copies * shard * split * sequences != int(processes):
        told = f" x {TP_SIZE}={split}" if split > 1 else ""
        told += f" x {SP_SIZE}={sequences}" if sequences > 1 else ""
        raise ValueError(
            f"PARALLELISM_CONFIG_DP_REPLICATE_SIZE={copies} x PARALLELISM_CONFIG_DP_SHARD_SIZE={shard}{told} is not the number of "
            f"processes, {processes}; set them in the launch's parallelism_config so that they multiply to num_processes"
        )
    return shard * sequences


def _flag(environment: Mapping[str, str], variable: str, *, default: bool = False) -> bool:
    text = environment.get(variable)
    if text is None:
        return default
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"{variable}={text}: must be true or false")
    return text.lower() in TRUE


def _size(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "1")
    if not text.isdigit() or text == "0":
        raise ValueError(f"{variable}={text}: must be a whole number of at least 1")
    return int(text)
