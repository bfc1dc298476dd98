"""Variables by which `accelerate launch` sets precision, steps, clipping, compilation, and sharding of a recipe.

A configuration with `distributed_type: FSDP` or `DEEPSPEED` reaches a program as variables (accelerate/utils/launch.py,
`prepare_multi_gpu_env`, `prepare_deepspeed_cmd_env` and `prepare_extend_env_parallelism_config`).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from accel_train.core.errors import SettingError
from accel_train.core.state import Choice, Choices
from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import Origin, value_of
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show
from accel_train.runtime.driver import Environment
from accel_train.runtime.launcher import own_environment, parent_command

TRUE, FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f", "")
FSDP, ZERO, SIZES = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"
NO_FSDP = "no FSDP"
TP_SIZE, SP_SIZE = "PARALLELISM_CONFIG_TP_SIZE", "PARALLELISM_CONFIG_SP_SIZE"
COPIES, SHARD_SIZE = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"
ZERO_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
PRECISION = "ACCELERATE_MIXED_PRECISION"
DYNAMO, DYNAMO_MODE = "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"
STEPS, CLIPPING = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"
MIXED_FLAG = "--mixed_precision"
STARTED_BY = "ACCEL_TRAIN_STARTED_BY"
"""Variable with the process that started a run on purpose (`rehearse`, `sweep`), with the launch that it has itself."""
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
LAUNCHERS = (
    *ACCELERATE, "torchrun", "torch.distributed.run", "torch.distributed.launch", "accel_train.torchrun",
    "deepspeed", "deepspeed.launcher.launch",
)  # fmt: skip
TRAINER = "hf-trainer"
"""Task of a recipe that `accel_train.Trainer` makes of its arguments."""
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
        (),
        "ACCELERATE_FP8_BACKEND",
        ("ao",),
        "float8 is computed by torchao alone; leave fp8_backend out of the launch, or set it to ao",
    ),
    *(
        (
            (DYNAMO,),
            f"ACCELERATE_DYNAMO_{name}",
            FALSE,
            f"blocks are compiled as they are; leave dynamo_{name.lower()} out of the launch",
        )
        for name in ("USE_FULLGRAPH", "USE_DYNAMIC")
    ),
    (
        (FSDP,),
        "FSDP_IGNORED_MODULES",
        ("none",),
        "all modules are sharded; leave fsdp_ignored_modules out of the launch's fsdp_config",
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
def launched_with() -> Environment:
    """Return the variables of this process at the first call. Building an Accelerator changes them.

    Variables of Accelerate that a Python program which is not a launcher left to this process are not included: they
    were meant for that program. Flags of `accelerate launch` that set no variable are included, as variables.
    """
    variables, parent = dict(os.environ), parent_command()
    first = own_environment()
    if parent and parent[0] not in LAUNCHERS and variables.get(STARTED_BY) != str(os.getppid()):
        variables = {
            name: value
            for name, value in variables.items()
            if not name.startswith(PREFIXES) or first.get(name) != value
        }
    # TrainingArguments(torch_compile=True) sets them in the program. A launcher that forks does so, too.
    if "FORK_LAUNCHED" not in variables or "FORK_LAUNCHED" in first:
        for name in [name for name in variables if name.startswith("ACCELERATE_DYNAMO_")]:
            if first and first.get(name) != variables[name]:
                del variables[name]
    return MappingProxyType({**launcher_flags(parent), **variables})


def child_environment() -> Environment:
    """Return the variables for a run that this process starts, so that it has the same launch."""
    launch = launched_with()
    switches = {FSDP, ZERO, SIZES, PRECISION, STEPS, CLIPPING, DYNAMO, DYNAMO_MODE}
    rest = {name: value for name, value in os.environ.items() if name not in switches}
    return {**rest, **{name: launch[name] for name in switches & launch.keys()}, STARTED_BY: str(os.getpid())}


def launcher_flags(command: Sequence[str]) -> Environment:
    """Return the flags of `accelerate launch`, and settings of its configuration file, that set no variable.

    It exports steps and clipping for DeepSpeed alone, and does not tell `--mixed_precision no` from its default.
    """
    if not command or command[0] not in ACCELERATE:
        return {}
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    words = list(command[1:])
    given, _ = launch_command_parser().parse_known_args(words[words[:1] == ["launch"] :])
    file: Any = {}
    if given.config_file is not None or (os.path.isfile(default_config_file) and not given.cpu):
        # The launcher has read the file before.
        with suppress(OSError, ValueError, TypeError):
            file = getattr(load_config_from_file(given.config_file), "deepspeed_config", None) or {}
    found = {MIXED_FLAG: given.mixed_precision}
    for variable, name in ((STEPS, "gradient_accumulation_steps"), (CLIPPING, "gradient_clipping")):
        found[variable] = file.get(name) if getattr(given, name) is None else getattr(given, name)
    return {name: str(value) for name, value in found.items() if value is not None}


def settings_of_launch(variables: Environment) -> Iterator[tuple[str, str, Any, bool]]:
    """Yield variable, setting, value, and whether transformers.Trainer obeys, for all that a launch says on training.

    The arguments of a Trainer that does not obey decide.

    Raises:
        ValueError: a value is not of the variable's kind.
    """
    if PRECISION in variables:
        precision = variables[PRECISION].lower()
        # `accelerate launch` always sets it to "no", so only the flag `--mixed_precision no` says no.
        if precision != "no" or variables.get(MIXED_FLAG) == "no":
            yield PRECISION, "precision.mixed_precision", precision, True
    if variables.get(STEPS, "auto").lower() != "auto":
        yield STEPS, "batch.gradient_accumulation_steps", _size(variables, STEPS), False
    # `auto` is DeepSpeed's word for the value of the Accelerator.
    if (clipping := variables.get(CLIPPING, "auto")).lower() != "auto":
        try:
            max_grad_norm = float(clipping)
        except ValueError as error:
            raise ValueError(f"{CLIPPING}={clipping}: must be a number") from error
        yield CLIPPING, "optimizer.max_grad_norm", max_grad_norm, False
    if (compiled := _compiled(variables)) is not None:
        yield DYNAMO, "precision.compile", compiled, True
        yield DYNAMO, "precision.compile_backend", variables[DYNAMO].lower(), True
        if (mode := variables.get(DYNAMO_MODE, "default")) != "default":
            yield DYNAMO_MODE, "precision.compile_mode", mode, True


def with_launch_environment(recipe: Recipe, environment: Environment | None = None) -> Recipe:
    """Return the recipe with the launch's settings in place of defaults and `auto`, and the launch as origin.

    Raises:
        ValueError: the launch asks for something unsupported, or disagrees with the recipe.
    """
    said = launched_with() if environment is None else environment
    found = [(f"parallel.{field}", value, name) for field, (value, name) in _fields_set_by(said).items()]
    is_trainer = recipe.task == TRAINER
    found += [
        (setting, value, variable)
        for variable, setting, value, by_trainer in settings_of_launch(said)
        if not is_trainer or (by_trainer and who_set(recipe, setting) == "default")
    ]
    changes: dict[str, dict[str, Any]] = {}
    origins: dict[str, Origin] = {}
    for name, value, variable in found:
        section, _, field = name.partition(".")
        who, in_recipe = who_set(recipe, name), value_of(recipe, name)
        if who == "default" or in_recipe == "auto":
            changes.setdefault(section, {})[field] = value
            origins[name] = Origin("environment", f"{variable} of the launch")
        elif not _is_same(name, in_recipe, value):
            raise SettingError(
                f"{name}={show(in_recipe)} ({who}), but the launch says {variable}={value}",
                "change one of them: the flags or the configuration file of `accelerate launch`, or the recipe. "
                "launch/ddp.yaml leaves the recipe unchanged",
                settings=(name,),
            )
    if not changes:
        return recipe
    sections = {}
    for name, fields in changes.items():
        section = getattr(recipe, name)
        try:
            sections[name] = type(section).model_validate({**section.model_dump(), **fields})
        except ValidationError as error:
            variables = " and ".join(dict.fromkeys(variable for key, _, variable in found if key.startswith(name)))
            raise ValueError(
                f"{variables} of the launch: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
            ) from error
    return recipe.model_copy(update=sections).with_origins({**recipe.origins(), **origins})


def describe_launch(recipe: Recipe) -> Choices:
    """Return the settings of a resolved recipe that the launch has set, and the variables without an effect."""
    obeyed: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for variable, setting, value, _ in settings_of_launch(launched_with()):
        if _is_same(setting, value_of(recipe, setting), value):
            obeyed[f"{setting}={value}"] = variable
        else:
            ignored[f"{variable}={value}"] = "the arguments of the Trainer decide, as in transformers"
    for name, value in left_by_parent().items():
        ignored[f"{name}={value}"] = "a parent process left it, and no launcher started this one"
    told = {"launch": (obeyed, " of the launch"), "no effect": (ignored, "")}
    return {
        name: Choice(", ".join(parts), "; ".join(dict.fromkeys(parts.values())) + end)
        for name, (parts, end) in told.items()
        if parts
    }


def _is_same(setting: str, in_recipe: Any, value: Any) -> bool:
    # The recipe may compile other parts than Accelerate, which knows only the whole model or its blocks.
    return bool(in_recipe == value or (setting == "precision.compile" and in_recipe))


def left_by_parent() -> Environment:
    """Return the variables of a launch that have no effect, because they were meant for a parent process."""
    rest = {name: value for name, value in os.environ.items() if name not in launched_with()}
    with suppress(ValueError):
        return {variable: rest[variable] for variable, *_ in settings_of_launch(rest)}
    return {}


def _compiled(variables: Environment) -> str | None:
    """Return the compiled part: `model`, as by Accelerate, or `blocks`; None if nothing is compiled."""
    if variables.get(DYNAMO, "no").lower() in ("no", ""):
        return None
    return "blocks" if _flag(variables, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION") else "model"


def _fields_set_by(environment: Environment) -> dict[str, tuple[Any, str]]:
    """Return the fields of `parallel` that the launch sets, each with its value and variable.

    Raises:
        ValueError: the launch asks for something unsupported.
    """
    fsdp, zero, has_sizes = (_flag(environment, name) for name in (FSDP, ZERO, SIZES))
    tp_size, sp_size = (_size(environment, name) if has_sizes else 1 for name in (TP_SIZE, SP_SIZE))
    is_on = {FSDP: fsdp, NO_FSDP: not fsdp, ZERO: zero, SIZES: has_sizes, SP_SIZE: sp_size > 1}
    is_on[DYNAMO] = _compiled(environment) is not None
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


def _shard_size(environment: Environment, tp_size: int, sp_size: int) -> int:
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


def _flag(environment: Environment, variable: str, *, default: bool = False) -> bool:
    text = environment.get(variable, str(default))
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"{variable}={text}: must be true or false")
    return text.lower() in TRUE


def _size(environment: Environment, variable: str) -> int:
    text = environment.get(variable, "1")
    if not text.isdigit() or text == "0":
        raise ValueError(f"{variable}={text}: must be a whole number of at least 1")
    return int(text)
