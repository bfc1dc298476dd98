"""Check for settings that cannot be combined, before data is read or a model is built."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from accel_train.model.pretrained import pretrained_config
from accel_train.recipe.schema import Recipe
from accel_train.task import TASKS, Task

BY_POSITION = "loss_is_by_position"
"""Name of the attribute by which a custom task declares its loss as a sum over positions, so sequences may be split.

Each summand depends on the logits and label of one position.
"""
UNTESTED = "it is not tested to train as one process does"
SP_OFF = "or set parallel.sp_size to 1"
UNDER_ZERO = "cannot be had with parallel.strategy deepspeed"
ELSEWHERE = "parallel.strategy fsdp2 or ddp"
UNDER_DEEPSPEED = ("adamw", "adam", "sgd")
INSTALL = "install it: pip install 'accel-train[deepspeed]'"
OF_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""transformers model types whose blocks multiply by its Conv1D."""


class Asked(NamedTuple):
    """A recipe, its task, and its mixed precision (possibly auto)."""

    recipe: Recipe
    task: Task
    precision: str

    @property
    def is_other_task(self) -> bool:
        """Return whether the task is built in and not a language model."""
        return self.recipe.task in TASKS and self.recipe.task != "causal-lm"


# Entries: the setting, a test for the conflict, and a message with the reason and the fix. The settings are
# `parallel.tp_size` or `parallel.sp_size` above 1, `cpu_offload`, `strategy: deepspeed`, `model.frozen_dtype` (bf16,
# nf4, or either), and `mixed_precision: fp8`.
CONFLICTS: tuple[tuple[str, Callable[[Asked], bool], str], ...] = (
    (
        "tp_size",
        lambda asked: asked.recipe.model.lora is not None,
        (
            "does not go with model.lora: adapters are plain tensors, which cannot be multiplied with layers that "
            "are split; leave one of them out"
        ),
    ),
    (
        "tp_size",
        lambda asked: asked.recipe.precision.compile is not False,
        (
            f"does not go with precision.compile: split layers swap their weights in each forward, and {UNTESTED}; "
            "leave one of them out"
        ),
    ),
    (
        "tp_size",
        lambda asked: asked.recipe.parallel.cpu_offload,
        f"does not go with parallel.cpu_offload: {UNTESTED}; leave one of them out",
    ),
    (
        "tp_size",
        lambda _: not _is_installed("transformers.distributed.tensor_parallel"),
        "needs a newer transformers; it is known to work with 5.23",
    ),
    ("tp_size", lambda asked: asked.is_other_task, "is for causal-lm, and task is {recipe.task}; set it to 1"),
    (
        "cpu_offload",
        lambda asked: asked.recipe.optimizer.name == "muon",
        (
            "does not go with optimizer.name muon: the CPU would make the matrices orthogonal, many times the "
            "arithmetic of all else it does in a step; use adamw, or set parallel.cpu_offload to false"
        ),
    ),
    ("sp_size", lambda asked: asked.is_other_task, "is for causal-lm, and task is {recipe.task}; set it to 1"),
    (
        "sp_size",
        lambda asked: not is_by_position(asked.task),
        (
            f"needs a loss that is a sum over positions, which {{recipe.task}} does not say of its own; set "
            f"{BY_POSITION} = True in the class that defines it where that is so, {SP_OFF}"
        ),
    ),
    (
        "sp_size",
        lambda asked: (asked.recipe.data.window or 0) % asked.recipe.parallel.sp_size != 0,
        f"does not divide data.sequence_length={{recipe.data.window}}; use {{lengths}} tokens, {SP_OFF}",
    ),
    (
        "sp_size",
        lambda asked: asked.recipe.model.attn_implementation != "auto",
        (
            f"attends by causal SDPA, and model.attn_implementation is {{recipe.model.attn_implementation}}; set "
            f"that to auto, {SP_OFF}"
        ),
    ),
    (
        "sp_size",
        lambda asked: asked.recipe.precision.compile is not False,
        (
            "does not go with precision.compile: DeepSpeed's exchange of heads between processes cannot be "
            f"compiled; leave that out, {SP_OFF}"
        ),
    ),
    ("sp_size", lambda _: not _is_installed("deepspeed"), f"needs the package deepspeed; {INSTALL}"),
    (
        "frozen_dtype",
        lambda asked: not asked.recipe.model.freezes,
        "is for weights that are not trained, and all are; set model.lora or model.freeze, or leave it at auto",
    ),
    (
        "frozen_dtype",
        lambda asked: asked.recipe.parallel.strategy == "deepspeed" or asked.recipe.parallel.tp_size > 1,
        f"does not go with parallel.strategy deepspeed and parallel.tp_size above 1: {UNTESTED}; set it to auto",
    ),
    (
        "bf16",
        lambda asked: asked.precision not in ("bf16", "auto"),
        (
            "is for precision.mixed_precision bf16, and that is {precision}: products with fp32 would copy each "
            "matrix; set it to auto"
        ),
    ),
    (
        "nf4",
        lambda asked: asked.recipe.parallel.strategy == "fsdp2",
        (
            "does not go with parallel.strategy fsdp2, which would leave the packed weights whole on every process; "
            "use ddp, or set it to auto"
        ),
    ),
    (
        "nf4",
        lambda asked: asked.recipe.precision.compile is not False,
        f"does not go with precision.compile: {UNTESTED}; leave one of them out",
    ),
    (
        "nf4",
        lambda asked: asked.recipe.model.pretrained is None,
        (
            "needs model.pretrained: checkpoints leave out what it holds, and 4 bits of random weights are in no "
            "file; set it to auto"
        ),
    ),
    (
        "nf4",
        lambda _: not _is_installed("bitsandbytes"),
        "needs the package bitsandbytes; install it: pip install 'accel-train[bitsandbytes]'",
    ),
    (
        "deepspeed",
        lambda _: not _is_installed("deepspeed"),
        f"parallel.strategy deepspeed needs the package deepspeed; {INSTALL}",
    ),
    (
        "deepspeed",
        lambda asked: asked.precision == "fp16",
        (
            f"precision.mixed_precision fp16 {UNDER_ZERO}: its loss scale is not the guarded one of this program; "
            f"use bf16 or no, or {ELSEWHERE}"
        ),
    ),
    (
        "deepspeed",
        lambda asked: asked.recipe.precision.compile is not False,
        f"precision.compile {UNDER_ZERO}: its hooks on weights and gradients break the compiled graph; use {ELSEWHERE}",
    ),
    (
        "deepspeed",
        lambda asked: asked.recipe.optimizer.name not in UNDER_DEEPSPEED,
        (
            f"optimizer.name {{recipe.optimizer.name}} {UNDER_ZERO}: each process holds parts of flattened weights "
            f"there, and {UNTESTED}; use {', '.join(UNDER_DEEPSPEED)}, or {ELSEWHERE}"
        ),
    ),
    (
        "deepspeed",
        lambda asked: asked.recipe.optimizer.ema_decay is not None and asked.recipe.parallel.zero_stage == 3,
        (
            f"optimizer.ema_decay {UNDER_ZERO}: the average is of full weights, and in zero_stage 3 no process holds "
            f"them; set parallel.zero_stage to 2, or use {ELSEWHERE}"
        ),
    ),
    (
        "deepspeed",
        lambda asked: (
            asked.recipe.parallel.zero_stage == 3
            and asked.recipe.task == "seq2seq"
            and asked.recipe.evaluate.generation.max_samples != 0
        ),
        (
            f"evaluate.generation.max_samples {UNDER_ZERO} and zero_stage 3: processes gather weights together, and "
            "texts end at different lengths; set it to 0 (accel-train evaluate generates afterwards), "
            f"parallel.zero_stage to 2, or use {ELSEWHERE}"
        ),
    ),
    (
        "fp8",
        lambda _: not _is_installed("torchao"),
        "needs the package torchao; install it: pip install 'accel-train[quantize]'",
    ),
    (
        "fp8",
        lambda asked: asked.recipe.model.lora is not None,
        (
            "does not go with model.lora: the layers that it speeds up are frozen there, and adapters are too "
            "narrow; use bf16"
        ),
    ),
    (
        "fp8",
        lambda asked: asked.recipe.parallel.tp_size > 1,
        (
            f"does not go with parallel.tp_size: layers that are split are scaled part by part, and {UNTESTED}; "
            "leave one of them out"
        ),
    ),
    (
        "fp8",
        lambda asked: asked.recipe.parallel.sp_size > 1,
        f"does not go with parallel.sp_size: slices are scaled one by one, and {UNTESTED}; leave one of them out",
    ),
    (
        "fp8",
        lambda asked: asked.recipe.parallel.strategy == "deepspeed",
        f"does not go with parallel.strategy deepspeed, which casts weights by itself; use bf16, or {ELSEWHERE}",
    ),
    (
        "fp8",
        lambda asked: asked.recipe.parallel.cpu_offload,
        f"does not go with parallel.cpu_offload: {UNTESTED}; leave one of them out",
    ),
    (
        "fp8",
        lambda asked: asked.recipe.task in TASKS and model_type(asked.recipe) in OF_CONV1D,
        (
            "is for nn.Linear, and the blocks of {model_type} multiply by Conv1D, which torchao leaves alone; use "
            "bf16, or another architecture (llama, qwen2)"
        ),
    ),
)


def check_compatibility(recipe: Recipe, task: Task, mixed_precision: str | None = None) -> None:
    """Check that the settings of a recipe can be combined; `mixed_precision` is the resolved precision, if known.

    Raises:
        ValueError: two settings conflict. The message names the setting, the reason, and the fix.
    """
    if recipe.parallel.sync_batch_norm and recipe.precision.compile is not False:
        raise ValueError(
            f"parallel.sync_batch_norm does not go with precision.compile: {UNTESTED}; leave one of them out"
        )
    section, length, kept = recipe.parallel, recipe.data.window or 0, recipe.model.frozen_dtype
    is_on = {
        "tp_size": section.tp_size > 1,
        "cpu_offload": section.cpu_offload,
        "sp_size": section.sp_size > 1,
        "deepspeed": section.strategy == "deepspeed",
        "frozen_dtype": kept in ("bf16", "nf4"),
        "bf16": kept == "bf16",
        "nf4": kept == "nf4",
        "fp8": recipe.precision.mixed_precision == "fp8",
    }
    settings = {
        "tp_size": f"parallel.tp_size={section.tp_size} ",
        "cpu_offload": f"parallel.cpu_offload={section.cpu_offload} ",
        "sp_size": f"parallel.sp_size={section.sp_size} ",
        "deepspeed": "",
        **dict.fromkeys(("frozen_dtype", "bf16", "nf4"), f"model.frozen_dtype={kept} "),
        "fp8": "precision.mixed_precision=fp8 ",
    }
    asked = Asked(recipe, task, mixed_precision or recipe.precision.mixed_precision)
    shorter = length - length % section.sp_size
    lengths = " or ".join(str(each) for each in (shorter, shorter + section.sp_size) if each)
    for part, refuses, text in CONFLICTS:
        if is_on[part] and refuses(asked):
            named = {"model_type": model_type(recipe)} if "{model_type}" in text else {}
            named |= {"precision": asked.precision}
            raise ValueError(settings[part] + text.format(recipe=recipe, lengths=lengths, **named))
    if recipe.task == "causal-lm" and section.num_sharing > 1:
        _check_language_model(recipe)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    # The parent package is missing.
    except ModuleNotFoundError:
        return False


def model_type(recipe: Recipe) -> str:
    """Return the transformers model type of the recipe's model."""
    fields = recipe.model.config
    return str(fields["model_type"] if fields is not None else pretrained_config(recipe).model_type)


def is_by_position(task: Task) -> bool:
    """Return whether the class that defines the task's loss declares the loss as a sum over positions."""
    classes = type(task).__mro__
    for method in ("loss_sum", "evaluate_batch"):
        defined = next((number for number, each in enumerate(classes) if method in vars(each)), 0)
        said = (vars(each)[BY_POSITION] for each in classes[: defined + 1] if BY_POSITION in vars(each))
        if next(said, False) is not True:
            return False
    return True


def _check_language_model(recipe: Recipe) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from accel_train.model.kernels.attention import choose_attention
    from accel_train.parallel.sequence_parallel import check_attention
    from accel_train.parallel.tensor_parallel import check_plan

    fields = dict(recipe.model.config or {})
    config: Any = pretrained_config(recipe) if not fields else CONFIG_MAPPING[fields.pop("model_type")](**fields)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The task reports that it is not a language model.
        return
    model_class, section = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], recipe.parallel
    if section.tp_size > 1:
        of_head = getattr(model_class, "_tp_plan", None) or {}
        check_plan(
            config,
            {**(config.base_model_tp_plan or {}), **of_head} if config.base_model_tp_plan else {},
            section.tp_size,
        )
    if section.sp_size > 1:
        attention = choose_attention("auto", model_class, config, recipe.data.window or 0)
        check_attention(config, attention.value, attention.reason, section.sp_size)
