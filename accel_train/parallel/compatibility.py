"""Check for settings that cannot be combined, before data is read or a model is built."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from accel_train.core.errors import SettingError
from accel_train.model.pretrained import config_of, pretrained_config
from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import value_of
from accel_train.task import TASKS, Task

SP_OFF = ", or set parallel.sp_size to 1"
UNTESTED = "training is not tested to match one process"
LEAVE_ONE_OUT = "Leave one of them out"
ZERO_ALTERNATIVE = "parallel.strategy fsdp2 or ddp"
ZERO_OPTIMIZERS = ("adamw", "adam", "sgd")
OF_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""transformers model types whose blocks multiply by its Conv1D."""


class Asked(NamedTuple):
    """A recipe, its task, its mixed precision (possibly auto), and its accumulation steps (1 if not known yet)."""

    recipe: Recipe
    task: Task
    precision: str
    accumulation: int

    @property
    def has_global_loss(self) -> bool:
        """Return whether the task's loss is over the global batch. `global_loss` is set only when data is read."""
        return self.task.spec.loss_is_global or self.task.global_loss is not None

    @property
    def cannot_split(self) -> bool:
        """Return whether the task is built in, and its samples or layers cannot be split over processes."""
        return self.recipe.task in TASKS and not self.task.spec.loss_is_by_position


class Part(NamedTuple):
    """A setting, and whether a recipe asks for the part of training that conflicts with others."""

    setting: str
    is_on: Callable[[Recipe], bool]


def _set_to(setting: str, *values: str | bool) -> Part:
    return Part(setting, lambda recipe: value_of(recipe, setting) in values)


CUDA_GRAPHS = Part("precision.compile_mode", lambda recipe: recipe.precision.has_cuda_graphs)
NO_TOKENIZER = _set_to("tokenizer", "none")
SYNC_BATCH_NORM = _set_to("parallel.sync_batch_norm", True)
TP_SIZE = Part("parallel.tp_size", lambda recipe: recipe.parallel.tp_size > 1)
CPU_OFFLOAD = _set_to("parallel.cpu_offload", True)
SP_SIZE = Part("parallel.sp_size", lambda recipe: recipe.parallel.sp_size > 1)
DEEPSPEED = _set_to("parallel.strategy", "deepspeed")
FROZEN_DTYPE = _set_to("model.frozen_dtype", "bf16", "nf4")
BF16 = _set_to("model.frozen_dtype", "bf16")
NF4 = _set_to("model.frozen_dtype", "nf4")
FP8 = _set_to("precision.mixed_precision", "fp8")
AT_START = _set_to("evaluate.at_start", True)
COMPILE = Part("precision.compile", lambda recipe: recipe.precision.compiles)
LORA = Part("model.lora", lambda recipe: recipe.model.lora is not None)


class Conflict(NamedTuple):
    """A setting that cannot be combined with another one, or lacks a requirement."""

    part: Part
    other: str
    """Name of the other setting; empty if a package is missing."""
    refuses: Callable[[Asked], bool]
    problem: str
    """Reason, formatted with `recipe`, `precision`, `accumulation`, `lengths`, and `model_type`."""
    remedy: str


def _package(part: Part, name: str, extra: str) -> Conflict:
    remedy = f"Install it: pip install 'accel-train[{extra}]'"
    return Conflict(part, "", lambda _: not _is_installed(name), f"needs the package {name}", remedy)


def _clash(part: Part, other: Part, why: str = UNTESTED, remedy: str = LEAVE_ONE_OUT) -> Conflict:
    problem = f"cannot be combined with {other.setting}: {why}"
    return Conflict(part, other.setting, lambda asked: other.is_on(asked.recipe), problem, remedy)


CONFLICTS = (
    Conflict(
        CUDA_GRAPHS,
        "batch.gradient_accumulation_steps",
        lambda asked: asked.accumulation > 1,
        "records CUDA graphs, and each replay overwrites the micro-batch before, but this run accumulates "
        "{accumulation} micro-batches per step",
        "Use max-autotune-no-cudagraphs or default, or a batch that one micro-batch per process holds",
    ),
    Conflict(
        CUDA_GRAPHS,
        "task",
        lambda asked: asked.has_global_loss,
        "cannot be combined with the loss of {recipe.task} over the global batch: processes exchange its parts in the "
        f"forward, and {UNTESTED}",
        "Set precision.compile_mode to default",
    ),
    Conflict(
        DEEPSPEED,
        "task",
        lambda asked: asked.has_global_loss,
        "cannot be combined with the loss of {recipe.task} over the global batch: a step reads its micro-batches "
        f"twice, and {UNTESTED}",
        f"Use {ZERO_ALTERNATIVE}",
    ),
    Conflict(
        NO_TOKENIZER,
        "evaluate.sample_prompt",
        lambda asked: asked.recipe.evaluate.sample_prompt is not None,
        "has ids alone, and a sample begins with a text",
        LEAVE_ONE_OUT,
    ),
    Conflict(
        NO_TOKENIZER,
        "data.format",
        lambda asked: getattr(asked.recipe.data, "format", None) != "text",
        "has ids alone, and only causal-lm with data.format text trains on ids",
        "Name a tokenizer",
    ),
    _clash(SYNC_BATCH_NORM, COMPILE),
    _clash(TP_SIZE, LORA, "adapters are plain tensors, which cannot be multiplied with split layers"),
    _clash(TP_SIZE, COMPILE, f"split layers swap their weights in each forward, and {UNTESTED}"),
    _clash(TP_SIZE, CPU_OFFLOAD),
    Conflict(
        TP_SIZE,
        "",
        lambda _: not _is_installed("transformers.distributed.tensor_parallel"),
        "needs a newer transformers",
        "Install transformers 5.23, which is known to work",
    ),
    Conflict(
        TP_SIZE,
        "task",
        lambda asked: asked.cannot_split,
        "only {splitting} can split layers, but task is {recipe.task}",
        "Set parallel.tp_size to 1",
    ),
    Conflict(
        CPU_OFFLOAD,
        "optimizer.name",
        lambda asked: asked.recipe.optimizer.name == "muon",
        "cannot be combined with optimizer.name muon: the CPU would orthogonalize the matrices, many times the "
        "arithmetic of the rest of its step",
        "Use optimizer.name adamw, or set parallel.cpu_offload to false",
    ),
    Conflict(
        SP_SIZE,
        "task",
        lambda asked: asked.cannot_split,
        "only {splitting} can split sequences, but task is {recipe.task}",
        "Set parallel.sp_size to 1",
    ),
    Conflict(
        SP_SIZE,
        "task",
        lambda asked: not is_by_position(asked.task),
        "needs a loss that is a sum over positions, but {recipe.task} does not declare its own loss as such a sum",
        f"If it is one, set loss_is_by_position in the spec of the class that defines it{SP_OFF}",
    ),
    Conflict(
        SP_SIZE,
        "data.sequence_length",
        lambda asked: (asked.recipe.data.window or 0) % asked.recipe.parallel.sp_size != 0,
        "does not divide data.sequence_length={recipe.data.window}",
        f"Use {{lengths}} tokens{SP_OFF}",
    ),
    Conflict(
        SP_SIZE,
        "model.attn_implementation",
        lambda asked: asked.recipe.model.attn_implementation != "auto",
        "uses causal SDPA, but model.attn_implementation is {recipe.model.attn_implementation}",
        f"Set model.attn_implementation to auto{SP_OFF}",
    ),
    _clash(
        SP_SIZE,
        COMPILE,
        "DeepSpeed's exchange of heads between processes cannot be compiled",
        f"Set precision.compile to false{SP_OFF}",
    ),
    _package(SP_SIZE, "deepspeed", "deepspeed"),
    Conflict(
        FROZEN_DTYPE,
        "model.freeze",
        lambda asked: not asked.recipe.model.freezes,
        "only affects frozen weights, but all weights are trained",
        "Set model.lora or model.freeze, or leave model.frozen_dtype at auto",
    ),
    Conflict(
        FROZEN_DTYPE,
        "parallel.strategy",
        lambda asked: asked.recipe.parallel.strategy == "deepspeed" or asked.recipe.parallel.tp_size > 1,
        f"cannot be combined with parallel.strategy deepspeed or parallel.tp_size above 1: {UNTESTED}",
        "Set model.frozen_dtype to auto",
    ),
    Conflict(
        BF16,
        "precision.mixed_precision",
        lambda asked: asked.precision not in ("bf16", "auto"),
        "needs precision.mixed_precision bf16, not {precision}: products with fp32 would copy each matrix",
        "Set model.frozen_dtype to auto",
    ),
    _clash(NF4, CPU_OFFLOAD),
    Conflict(
        NF4,
        "parallel.sp_size",
        lambda asked: asked.recipe.parallel.strategy == "fsdp2" and asked.recipe.parallel.sp_size > 1,
        f"cannot be combined with parallel.strategy fsdp2 and parallel.sp_size above 1: {UNTESTED}",
        "Set parallel.sp_size to 1, or use parallel.strategy ddp",
    ),
    _clash(NF4, COMPILE),
    Conflict(
        NF4,
        "model.pretrained",
        lambda asked: asked.recipe.model.pretrained is None,
        "needs model.pretrained: checkpoints leave out the frozen weights, and no file stores random 4-bit weights",
        "Set model.frozen_dtype to auto",
    ),
    _package(NF4, "bitsandbytes", "bitsandbytes"),
    _package(DEEPSPEED, "deepspeed", "deepspeed"),
    Conflict(
        DEEPSPEED,
        "precision.mixed_precision",
        lambda asked: asked.precision == "fp16",
        "cannot be combined with precision.mixed_precision fp16: this program does not guard DeepSpeed's loss scale",
        f"Use bf16 or no, or {ZERO_ALTERNATIVE}",
    ),
    _clash(
        DEEPSPEED,
        COMPILE,
        "DeepSpeed's hooks on weights and gradients break the compiled graph",
        f"Use {ZERO_ALTERNATIVE}",
    ),
    Conflict(
        DEEPSPEED,
        "optimizer.name",
        lambda asked: asked.recipe.optimizer.name not in ZERO_OPTIMIZERS,
        "cannot be combined with optimizer.name {recipe.optimizer.name}: each process holds parts of flattened "
        f"weights, and {UNTESTED}",
        f"Use {', '.join(ZERO_OPTIMIZERS)}, or {ZERO_ALTERNATIVE}",
    ),
    Conflict(
        DEEPSPEED,
        "optimizer.state_dtype",
        lambda asked: asked.recipe.optimizer.state_dtype != "fp32",
        f"cannot be combined with optimizer.state_dtype bf16: {UNTESTED}",
        f"Use optimizer.state_dtype fp32, or {ZERO_ALTERNATIVE}",
    ),
    Conflict(
        DEEPSPEED,
        "optimizer.ema_decay",
        lambda asked: asked.recipe.optimizer.ema_decay is not None and asked.recipe.parallel.zero_stage == 3,
        "cannot be combined with optimizer.ema_decay at zero_stage 3: the average needs whole weights, and each "
        "process holds a share",
        f"Set parallel.zero_stage to 2, or use {ZERO_ALTERNATIVE}",
    ),
    _clash(DEEPSPEED, AT_START, "ZeRO takes the first forwards for training steps"),
    Conflict(
        DEEPSPEED,
        "evaluate.generation.max_samples",
        lambda asked: (
            asked.recipe.parallel.zero_stage == 3
            and "evaluate.generation" in asked.task.spec.uses
            and asked.recipe.evaluate.generation.max_samples != 0
        ),
        "cannot be combined with evaluate.generation.max_samples at zero_stage 3: processes gather weights together, "
        "but texts end at different lengths",
        "Set it to 0 (accel-train evaluate generates afterwards), set parallel.zero_stage to 2, or use "
        f"{ZERO_ALTERNATIVE}",
    ),
    _package(FP8, "torchao", "quantize"),
    _clash(FP8, LORA, "the layers that fp8 accelerates are frozen, and adapters are too narrow", "Use bf16"),
    _clash(FP8, TP_SIZE, f"split layers are scaled part by part, and {UNTESTED}"),
    _clash(FP8, SP_SIZE, f"slices are scaled one by one, and {UNTESTED}"),
    Conflict(
        FP8,
        "parallel.strategy",
        lambda asked: asked.recipe.parallel.strategy == "deepspeed",
        "cannot be combined with parallel.strategy deepspeed, which casts weights itself",
        f"Use bf16, or {ZERO_ALTERNATIVE}",
    ),
    _clash(FP8, CPU_OFFLOAD),
    Conflict(
        FP8,
        "model.config",
        lambda asked: asked.recipe.task in TASKS and model_type(asked.recipe) in OF_CONV1D,
        "only accelerates nn.Linear, but the blocks of {model_type} use Conv1D, which torchao does not convert",
        "Use bf16, or another architecture (llama, qwen2)",
    ),
)


def check_compatibility(
    recipe: Recipe, task: Task, mixed_precision: str | None = None, accumulation: int | None = None
) -> None:
    """Check that the settings of a recipe can be combined.

    `mixed_precision` and `accumulation` (steps) are the resolved values, if known.

    Raises:
        ValueError: two settings conflict. The message names the setting, the reason, and the fix.
    """
    section, length = recipe.parallel, recipe.data.window or 0
    given = recipe.batch.gradient_accumulation_steps
    accumulation = accumulation or (1 if given == "auto" else given)
    asked = Asked(recipe, task, mixed_precision or recipe.precision.mixed_precision, accumulation)
    shorter = length - length % section.sp_size
    lengths = " or ".join(str(each) for each in (shorter, shorter + section.sp_size) if each)
    for (setting, is_on), other, refuses, problem, remedy in CONFLICTS:
        if is_on(recipe) and refuses(asked):
            facts = {
                **asked._asdict(),
                "lengths": lengths,
                "model_type": model_type(recipe) if "{model_type}" in problem else "",
                "splitting": ", ".join(name for name, spec in TASKS.items() if spec.loss_is_by_position),
            }
            settings = (setting, other) if other else (setting,)
            raise SettingError(
                problem.format(**facts), remedy.format(**facts), f"{setting}={value_of(recipe, setting)}", settings
            )
    if recipe.task in TASKS and section.num_sharing > 1:
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
    declared = next(number for number, each in enumerate(classes) if "spec" in vars(each))
    own = {name for each in classes[:declared] for name in vars(each)}
    return task.spec.loss_is_by_position and own.isdisjoint(("loss_sum", "evaluate_batch"))


def _check_language_model(recipe: Recipe) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from accel_train.model.kernels.attention import choose_attention
    from accel_train.parallel.sequence_parallel import check_attention
    from accel_train.parallel.tensor_parallel import check_plan

    config = config_of(recipe)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        # The task reports that it is not a language model.
        return
    model_class, section = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], recipe.parallel
    if section.tp_size > 1:
        plan = config.base_model_tp_plan or {}
        # The head's part alone does not split a model.
        check_plan(config, plan and {**plan, **(getattr(model_class, "_tp_plan", None) or {})}, section.tp_size)
    if section.sp_size > 1:
        attention = choose_attention("auto", model_class, config, recipe.data.window or 0)
        check_attention(config, attention.value, attention.reason, section.sp_size)
