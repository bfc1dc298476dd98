"""The recipe: one frozen value that says everything about a run.

YAML is its file form (`loader.py` reads it, `writer.py` writes it), Python its code form, with the same names. Where
Accelerate or `transformers.TrainingArguments` has a name for a setting, that name is used. `accel-train plan` prints each
field's docstring.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from accel_train.core.errors import SettingError
from accel_train.core.files import path_problem
from accel_train.recipe.data import Data, TrainedTokenizer
from accel_train.recipe.evaluate import Evaluate
from accel_train.recipe.optimizer import SCHEDULE_FREE, Optimizer, Schedule
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.reliability import Checkpoint, Guard
from accel_train.recipe.values import (
    Auto,
    NonNegativeFloat,
    NonNegativeInt,
    NotifyTarget,
    Origin,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)


class LoRA(Section):
    rank: PositiveInt = 8
    """Columns of the two small matrices that are trained in place of each target's weights."""
    alpha: PositiveFloat = 16.0
    """Their product is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names (or ends of names) of the modules that are adapted; all-linear: every linear layer but the head."""
    train_also: tuple[str, ...] = ("*classifier*", "*score*", "*qa_outputs*")
    """Parameters that are trained whole beside the adapters, by pattern: a new head has nothing to adapt."""
    merge: bool = True
    """Write the adapters into the weights of `model/`; off: `model/` holds the base weights, and `adapter/` what was learned."""


class Model(Section):
    pretrained: str | None = None
    """A name on the hub or a local folder; training begins with its weights."""
    config: dict[str, Any] | None = Field(default=None, examples=[{"model_type": "gpt2", "n_layer": 6}])
    """A transformers configuration (`model_type` and its fields); the weights are random."""
    attn_implementation: str = "auto"
    """`auto` takes the fastest exact one: causal SDPA without a mask where the model allows it, for each document by itself where
    several share a window. sdpa: that of transformers, under a mask."""
    fused_kernels: Auto | Literal[False] = "auto"
    """`auto` computes activations that transformers writes out in Python (GPT-2's GELU) by one kernel of torch: the same function
    up to rounding. false: as transformers has them."""
    trust_remote_code: bool = False
    """Run Python code that comes with a pretrained model. There is no prompt for it; commands on a run folder, which may be
    somebody else's, take it from their own command line alone."""
    accept_new_tokenizer: bool = False
    """Train pretrained weights with a tokenizer other than theirs: the embedding then begins with vectors of other tokens."""
    pad_vocab_to_multiple_of: NonNegativeInt = 64
    """Rows are added to the embedding up to this multiple (faster matrix products); 0 leaves it alone."""
    freeze: tuple[str, ...] = Field(default=(), examples=[["*.embeddings.*"]])
    """Parameters that are not trained, by pattern of their names (`bert.embeddings.*`, `*.layer.[0-3].*`)."""
    freeze_batch_norm: bool = False
    """Batch norms neither train their weights nor move their running statistics."""
    lora: LoRA | None = Field(default=None, examples=[{"rank": 16}])
    """Train low-rank adapters (peft) and leave the weights as they are."""
    frozen_dtype: Auto | Literal["fp32", "bf16", "nf4"] = "auto"
    """How matrices are kept that lora or freeze leave untrained. auto: in bf16 where the run computes in bf16 anyway (the same bits
    in half the memory), else in fp32. nf4: linear layers in 4 bits (bitsandbytes), an eighth of fp32, which rounds them."""
    problem_type: Literal["auto", "single_label", "multi_label", "regression"] = "auto"
    """text-classification: what the labels mean; auto: lists of labels are multi_label, decimal numbers regression."""

    @property
    def freezes(self) -> bool:
        """Some weights are not trained."""
        return self.lora is not None or bool(self.freeze) or self.freeze_batch_norm

    @model_validator(mode="after")
    def one_source_of_weights(self) -> "Model":
        if (self.pretrained is None) == (self.config is None):
            raise SettingError(
                "give exactly one of model.pretrained (a name or folder) and model.config (for example {model_type: gpt2, n_layer: 4})",
                settings=("model.pretrained", "model.config"),
            )
        if self.config is not None and "model_type" not in self.config:
            raise SettingError(
                "model.config needs a model_type, for example {model_type: gpt2, n_layer: 4}",
                settings=("model.config",),
            )
        return self


class Loss(Section):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Training targets give this share to all classes (tokens) alike (Szegedy et al. 2016); evaluation does not."""
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | dict[str, NonNegativeFloat] | None = None
    """How much each class counts in training; balanced: n_samples / (n_classes x n_of_class), as in scikit-learn. The weighted sum
    is divided by the number of targets, and not by the sum of their weights as torch's `CrossEntropyLoss` does."""
    chunked: Auto | bool = "auto"
    """causal-lm: make the logits of a few positions at a time, and never all of a micro-batch; the same loss and gradients. auto:
    wherever the model allows it, and the logits are more than 256 MiB or split over processes (`parallel.tp_size`)."""
    router_aux: Auto | bool = "auto"
    """causal-lm: add the load-balancing loss of a mixture of experts to the training loss, times the model's `router_aux_loss_coef`,
    over the whole global batch; auto: where `output_router_logits` is true in the model's configuration. `router_aux_loss` in
    metrics.jsonl shows it without the coefficient. With gradient accumulation it costs another forward of each micro-batch."""


class Batch(Section):
    global_batch_size: PositiveInt | None = None
    """Samples per step over all processes = per_device_batch_size x gradient_accumulation_steps x processes."""
    per_device_batch_size: Auto | PositiveInt = "auto"
    """Samples one process forwards at once (a micro-batch); auto: what follows from the other two, and where accumulation is
    auto as well the largest that fits: measured on a GPU (or a CPU with `ulimit -v`) before the first step, and cached. Not
    measured where the model is sharded (fsdp2, tp_size): all samples of a process at once, and half where memory runs out."""
    gradient_accumulation_steps: Auto | PositiveInt = "auto"
    """Micro-batches per process and step; auto: what follows from the other two."""
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the device's memory that the search for the largest micro-batch leaves free."""
    per_device_eval_batch_size: Auto | PositiveInt = "auto"
    """Samples one process forwards at once in evaluation; auto: twice the training size."""


class MemoryBudget(Section):
    memory_budget: Annotated[float, Field(ge=0.1, le=1, examples=[0.5])]
    """Share of the activations' memory that the compiler may use, 1: all it would keep. Near 0 it keeps more than without."""


class Precision(Section):
    mixed_precision: Literal["auto", "no", "fp16", "bf16", "fp8"] = "auto"
    """auto: bf16 where the hardware has it, else fp16 on CUDA, else no. fp8: as bf16, and linear layers multiply in float8
    (torchao), on GPUs that can (L4, RTX 40, H100 and later); worth it for large models, with compile."""
    tf32: Auto | bool = "auto"
    """TensorFloat-32 for the fp32 matrix products of CUDA; auto: with bf16 or fp16 only, so that fp32 stays fp32."""
    cudnn_benchmark: Auto | bool = "auto"
    """Let cuDNN time its algorithms and keep the fastest; auto: unless deterministic."""
    compile: Literal["blocks", "model"] | bool = False
    """torch.compile; true: the repeated blocks of the model where it has some (compiles in seconds), else all of it."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's `mode`: how much time the compiler spends on faster kernels, and whether it records CUDA graphs. With another
    than the default, recompilations are not counted."""
    compile_backend: str = "inductor"
    """torch.compile's `backend`; a mode is for inductor."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time; slower on CUDA."""
    gradient_checkpointing: Literal["off", "blocks", "selective"] | MemoryBudget | bool = Field(
        default="off", examples=["selective"]
    )
    """Keep fewer activations and compute the others again in the backward pass. blocks (or true): only the input of each block
    is kept, which takes the least memory and about a third more time. selective: attention and most matrix products are kept,
    about half of the memory for little time. {memory_budget: 0.5}: the compiler chooses; with compile only. off is false."""
    fp16_init_scale: PositiveFloat = 2.0**14
    """The first loss scale. 2^14 leaves a scaled gradient a factor 4 below fp16's largest number, 65504; 2^16 is above it."""
    fp16_growth_interval: PositiveInt = 2000
    """Steps without an overflow after which the loss scale doubles."""

    @model_validator(mode="after")
    def compiler_is_known(self) -> "Precision":
        if self.compile_backend != "inductor":
            from torch.compiler import list_backends  # it takes a second to import what they are listed in

            if self.compile_backend not in (known := list_backends(exclude_tags=())):
                raise SettingError(
                    f"torch knows {', '.join(known)}",
                    at=f"precision.compile_backend={self.compile_backend}",
                    settings=("precision.compile_backend",),
                )
        if self.compile_mode != "default" and self.compile_backend != "inductor":
            raise SettingError(
                f"precision.compile_mode={self.compile_mode} is for precision.compile_backend inductor, and that is {self.compile_backend}",
                settings=("precision.compile_mode", "precision.compile_backend"),
            )
        return self

    @model_validator(mode="after")
    def budget_is_for_the_compiler(self) -> "Precision":
        if isinstance(self.gradient_checkpointing, MemoryBudget) and self.compile is False:
            raise SettingError(
                f"precision.gradient_checkpointing={{memory_budget: {self.gradient_checkpointing.memory_budget:g}}} is for compiled models: "
                "set precision.compile to true, or this to selective or blocks",
                settings=("precision.gradient_checkpointing", "precision.compile"),
            )
        return self

    @property
    def recomputed(self) -> Literal["nothing", "blocks", "selective", "budget"]:
        """Name what the backward pass computes again, by `gradient_checkpointing`."""
        choice = self.gradient_checkpointing
        if isinstance(choice, MemoryBudget):
            return "budget"
        return "blocks" if choice is True else "nothing" if choice is False or choice == "off" else choice


class Log(Section):
    every_steps: PositiveInt = 10
    """Steps between two lines of metrics.jsonl. A line's `loss` is the mean over the steps since the line before that were
    applied (`num_averaged_steps` of them: fewer in the first line of a resume), and `step_loss` that of its own step."""
    trackers: tuple[str, ...] = Field(default=(), examples=[["tensorboard"]])
    """Experiment trackers by Accelerate's names (tensorboard, wandb, trackio, mlflow, ...)."""
    project: str = "accel_train"
    """Project name in the trackers."""
    progress: Auto | bool = "auto"
    """auto: a bar in a terminal or notebook, plain lines elsewhere."""
    notify: tuple[NotifyTarget, ...] = Field(default=(), examples=[["$SLACK_WEBHOOK"]])
    """Webhooks to which a JSON object is posted when the run rolls back, stops or ends: URLs, or `$NAME` for a URL in that
    environment variable."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[[20, 25]])
    """First and last step to profile, both included, counted from 1 as in metrics.jsonl: each process writes a trace (for
    ui.perfetto.dev) and a table of its ten costliest operations to `profile/`. Profiled steps are slower."""

    @model_validator(mode="after")
    def profiles_forwards(self) -> "Log":
        first, last = self.profile_steps or (1, 1)
        if first > last:
            raise SettingError(
                f"profile_steps=[{first}, {last}] ends before it begins",
                f"give the first and the last step, as [{last}, {first}]",
                settings=("log.profile_steps",),
            )
        return self


class Recipe(Section):
    """Everything about a run, as programs pass it on; `loader.Recipe` reads one from a file."""

    task: str = "causal-lm"
    """A task of this package, or `my_module:MyTask`."""
    seed: Seed = 0
    output_dir: str
    """The run folder."""
    model: Model
    tokenizer: str | TrainedTokenizer = "auto"
    """`bytes`, the name or folder of a pretrained tokenizer, or {train_bpe: {vocab_size: 4096}}; auto: that of model.pretrained, else bytes."""
    data: Data
    loss: Loss = Loss()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    log: Log = Log()
    options: dict[str, Any] = Field(default={}, examples=[{"my_setting": 3}])
    """Free settings for a custom task; the package's tasks take none."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def own_tasks_need_no_model_and_no_data(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and ":" in str(tree.get("task", "")):
            model, data = tree.get("model") or {}, tree.get("data") or {}
            if isinstance(model, dict) and not {"config", "pretrained"} & model.keys():
                model = {"config": {"model_type": "custom"}, **model}
            return {**tree, "model": model, "data": {"train": "custom", **data} if isinstance(data, dict) else data}
        return tree

    @model_validator(mode="after")
    def writes_to_a_folder(self) -> "Recipe":
        problem = path_problem(self.output_dir)
        if problem is not None:
            raise SettingError(f"output_dir {problem}", settings=("output_dir",))
        return self

    @model_validator(mode="after")
    def schedule_free_has_no_schedule(self) -> "Recipe":
        if self.optimizer.name == SCHEDULE_FREE:
            section, remedy, other = self.schedule, "set schedule.type to constant", "schedule.type"
            warmup = [name for name in ("warmup_steps", "warmup_ratio") if getattr(section, name)]
            if section.type == "constant" and warmup:
                steps = section.warmup_steps or "N"
                remedy = f"leave it out, and set optimizer.options to {{warmup_steps: {steps}}}"
                other = "optimizer.options"
            if section.type != "constant" or warmup:
                name = warmup[0] if section.type == "constant" else "type"
                raise SettingError(
                    f"{SCHEDULE_FREE} has its own warm-up and no other schedule",
                    remedy,
                    at=f"schedule.{name}={getattr(section, name)}",
                    settings=(f"schedule.{name}", other),
                )
        return self

    def __eq__(self, other: object) -> bool:
        """Return whether the settings are the same; who set them does not count, so a recipe equals its file read again."""
        return self.model_dump() == other.model_dump() if isinstance(other, Recipe) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it holds mappings (model.config, options), which have no hash either

    @property
    def tokenizer_in_use(self) -> str | TrainedTokenizer:
        """`tokenizer`, with `auto` resolved."""
        return (self.model.pretrained or "bytes") if self.tokenizer == "auto" else self.tokenizer

    @property
    def loads_best_model(self) -> bool:
        """`checkpoint.load_best_model_at_end`, with `auto` resolved."""
        checkpoint = self.checkpoint
        by_itself = checkpoint.keep_best and self.evaluate.early_stopping_patience is not None
        return by_itself if checkpoint.load_best_model_at_end == "auto" else checkpoint.load_best_model_at_end

    def origin(self, name: str) -> Origin:
        """Return who set a field, by its dotted name: `recipe.origin("optimizer.learning_rate")`."""
        return self._origins.get(name, Origin("default"))

    def origins(self) -> Mapping[str, Origin]:
        """Return who set which field, for every field that is not a default."""
        return dict(self._origins)

    def with_origins(self, origins: Mapping[str, Origin]) -> Self:
        """Return the same recipe with the origins of its fields."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy
