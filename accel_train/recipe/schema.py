"""The recipe: one frozen value with all settings of a run.

A recipe has a YAML form (`loader.py` reads it, `writer.py` writes it) and a Python form, with the same names. Names of
settings follow Accelerate and `transformers.TrainingArguments`. `accel-train explain` prints the docstring of each
field.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from accel_train.buckets.store import local_run
from accel_train.core.errors import SettingError, setting_error
from accel_train.core.files import has_variable, path_problem
from accel_train.core.format import LARGEST_COUNT, did_you_mean
from accel_train.recipe.data import Data, TrainedTokenizer
from accel_train.recipe.evaluate import Evaluate
from accel_train.recipe.optimizer import SCHEDULE_FREE, Optimizer
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schedule import Schedule
from accel_train.recipe.tasks import DEFAULT_TASK, data_section, tasks_with
from accel_train.recipe.values import (
    Auto,
    FractionBelow1,
    Length,
    NonNegativeFloat,
    NonNegativeInt,
    NotifyTarget,
    Origin,
    Place,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Seed,
)
from accel_train.recipe.yaml_core import show


class LoRA(Section):
    rank: PositiveInt = 8
    """Rank of the two small matrices that are trained in place of each target's weights."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    dropout: FractionBelow1 = 0.0
    """Dropout probability of the adapters' input."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names (or ends of names) of the modules to adapt. all-linear: every linear layer except the head and routers."""
    train_also: tuple[str, ...] = ("*classifier*", "*score*", "*qa_outputs*")
    """Patterns of parameters that are trained whole, in addition to the adapters. A new head has no pretrained weights
    to adapt.
    """
    merge: bool = True
    """Whether to merge the adapters into the weights of `model/`. false: `model/` holds the base weights, and
    `adapter/` the adapters.
    """


class Model(Section):
    pretrained: Place | None = None
    """Name on the hub or local folder of the pretrained weights to start from."""
    config: dict[str, Any] | None = Field(default=None, examples=[{"model_type": "gpt2", "n_layer": 6}])
    """transformers configuration (`model_type` and its fields). The weights are random."""
    attn_implementation: str = "auto"
    """Attention implementation. auto: the fastest exact one. This is causal SDPA without a mask if the model allows it,
    per document if several share a window. sdpa: transformers' SDPA, with a mask.
    """
    fused_kernels: Auto | Literal[False] = "auto"
    """Whether to replace activations that transformers computes in Python (GPT-2's GELU) by one torch kernel. The
    function is the same up to rounding. false: transformers' implementation.
    """
    trust_remote_code: bool = False
    """Whether to run Python code that comes with a pretrained model, without a prompt. Commands on a run folder only
    obey their own flag, because the folder may be from another person.
    """
    accept_new_tokenizer: bool = False
    """Whether to train pretrained weights with a tokenizer other than theirs. The embedding then starts with vectors of
    other tokens.
    """
    pad_vocab_to_multiple_of: NonNegativeInt = 64
    """Multiple to which the embedding is padded with rows (faster matrix products). 0: no padding."""
    freeze: tuple[str, ...] = Field(default=(), examples=[["*.embeddings.*"]])
    """Patterns of parameter names that are not trained (`bert.embeddings.*`, `*.layer.[0-3].*`)."""
    freeze_batch_norm: bool = False
    """Whether batch norms keep their weights and running statistics fixed."""
    lora: LoRA | None = Field(default=None, examples=[{"rank": 16}])
    """Low-rank adapters (peft) to train in place of the weights. Default: train the weights."""
    frozen_dtype: Auto | Literal["fp32", "bf16", "nf4"] = "auto"
    """Type of the matrices that lora or freeze leave untrained. auto: bf16 if the run computes in bf16 (the same bits
    in half the memory), otherwise fp32. nf4: linear layers in 4 bits (bitsandbytes), an eighth of fp32, with rounding.
    """
    problem_type: Literal["auto", "single_label", "multi_label", "regression"] = "auto"
    """Meaning of the labels. auto: lists of labels are multi_label, decimal numbers regression."""

    @property
    def pretrained_at(self) -> str:
        """Return `model.pretrained` as errors begin with it."""
        return f"model.pretrained={self.pretrained!r}"

    @property
    def freezes(self) -> bool:
        """Return whether some weights are not trained."""
        return self.lora is not None or bool(self.freeze) or self.freeze_batch_norm

    @model_validator(mode="after")
    def one_source_of_weights(self) -> "Model":
        if (self.pretrained is None) == (self.config is None):
            raise SettingError(
                "give exactly one of model.pretrained (a name or folder) and model.config (for example {model_type: "
                "gpt2, n_layer: 4})",
                settings=("model.pretrained", "model.config"),
            )
        if self.config is not None and "model_type" not in self.config:
            problem = "model.config needs a model_type, for example {model_type: gpt2, n_layer: 4}"
            raise SettingError(problem, settings=("model.config",))
        return self


class Loss(Section):
    label_smoothing: FractionBelow1 = 0.0
    """Share of the training target that is spread equally over all classes (tokens) (Szegedy et al. 2016). Evaluation
    does not use it.
    """
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | dict[str, NonNegativeFloat] | None = None
    """Weight of each class in training. balanced: n_samples / (n_classes x n_of_class), as in scikit-learn. The
    weighted sum is divided by the number of targets. torch's `CrossEntropyLoss` divides by the sum of their weights.
    """
    chunked: Auto | bool = "auto"
    """Whether to compute the logits of a few positions at a time. Loss and gradients are the same. auto: if
    the model allows it, and the logits exceed 256 MiB or are split over processes (`parallel.tp_size`).
    """
    router_aux: Auto | bool = "auto"
    """Whether to add the load-balancing loss of a mixture of experts to the training loss. It covers the
    whole global batch, times the model's `router_aux_loss_coef`. auto: if `output_router_logits` is true in the model's
    configuration. `router_aux_loss` in metrics.jsonl omits the coefficient. With gradient accumulation, it costs one
    more forward per micro-batch.
    """
    z_loss: NonNegativeFloat = Field(default=0.0, examples=[1e-4])
    """Coefficient of the z-loss, coefficient * logsumexp(logits)^2 for each target (PaLM, section 5). It
    keeps logits from drifting, and is part of the training loss. Evaluation does not use it.
    """
    logit_softcap: PositiveFloat | None = Field(default=None, examples=[30.0])
    """Cap of the logits, cap * tanh(logits / cap), in training, evaluation, and generation. It is written to
    the model's configuration as `final_logit_softcapping`, so only models with this field (Gemma 2 and 3) support it.
    """


class Batch(Section):
    global_batch_size: PositiveInt | None = None
    """Number of samples per step over all processes = per_device_batch_size x gradient_accumulation_steps x processes.
    """
    per_device_batch_size: Auto | PositiveInt = "auto"
    """Number of samples per forward of one process (a micro-batch). auto: derived from the other two settings. If
    gradient_accumulation_steps is auto as well, it is the largest that fits. It is measured before the first step and
    cached, on a GPU (or a CPU with `ulimit -v`). A sharded model (fsdp2, tp_size) is not measured. It starts with all
    samples of a process, and halves them when memory runs out.
    """
    gradient_accumulation_steps: Auto | PositiveInt = "auto"
    """Number of micro-batches per process and step. auto: derived from the other two settings."""
    memory_headroom: FractionBelow1 = 0.1
    """Share of the device's memory that the search for the largest micro-batch leaves free."""
    per_device_eval_batch_size: Auto | PositiveInt = "auto"
    """Number of samples per evaluation forward of one process. auto: twice the training size."""


class MemoryBudget(Section):
    memory_budget: Annotated[float, Field(ge=0.1, le=1, examples=[0.5])]
    """Share of the activations' memory that the compiler may use. 1: all that it would keep. Near 0 it keeps more than
    without a budget.
    """


class Precision(Section):
    mixed_precision: Literal["auto", "no", "fp16", "bf16", "fp8"] = "auto"
    """Mixed precision. auto: bf16 if the hardware supports it, otherwise fp16 on CUDA, otherwise no. fp8: like bf16,
    but linear layers multiply in float8 (torchao), on GPUs that support it (L4, RTX 40, H100 and later). fp8 pays off
    for large models, with compile.
    """
    tf32: Auto | bool = "auto"
    """TensorFloat-32 for the fp32 matrix products of CUDA. auto: with bf16 or fp16 only, so that fp32 stays fp32."""
    cudnn_benchmark: Auto | bool = "auto"
    """Whether cuDNN times its algorithms and keeps the fastest. auto: unless deterministic."""
    compile: Auto | Literal["blocks", "model"] | bool = "auto"
    """Part of the model to compile with torch.compile. true: the repeated blocks if the model has some (compiles in
    seconds), otherwise the whole model. auto: on a GPU, for language models that are checked with it, if the steps of
    the run save more than twice the time of compiling; if the compiler fails, the run goes on without it.
    """
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile. It sets the time that the compiler spends on faster kernels, and whether it records CUDA
    graphs (reduce-overhead and max-autotune, only without gradient accumulation). Recompilations are only counted in
    the default mode.
    """
    compile_backend: str = "inductor"
    """Backend of torch.compile. compile_mode requires inductor."""
    deterministic: bool = False
    """Whether to use only algorithms that give the same bits each time. This is slower on CUDA."""
    gradient_checkpointing: Literal["off", "blocks", "selective"] | MemoryBudget | bool = Field(
        default="off", examples=["selective"]
    )
    """Activation checkpointing: keep fewer activations and recompute the others in the backward pass. blocks (or true):
    only the input of each block is kept, with the least memory and about a third more time. selective: attention and
    most matrix products are kept, for about half of the memory and little time. {memory_budget: 0.5}: the compiler
    chooses; requires compile. off is false.
    """
    fp16_init_scale: PositiveFloat = 2.0**14
    """Initial fp16 loss scale. 2^14 leaves a scaled gradient a factor 4 below fp16's largest number, 65504; 2^16 is
    above it.
    """
    fp16_growth_interval: PositiveInt = 2000
    """Number of steps without an overflow after which the loss scale doubles."""

    @model_validator(mode="after")
    def compiler_is_known(self) -> "Precision":
        if self.compile_backend != "inductor":
            # Importing the backends that it lists takes a second.
            from torch.compiler import list_backends

            if self.compile_backend not in (known := list_backends(exclude_tags=())):
                problem = f"unknown backend; torch has {', '.join(known)}"
                raise setting_error("precision.compile_backend", self.compile_backend, problem)
        return self

    def unread(self) -> Mapping[str, str]:
        backend, budget = self.compile_backend, isinstance(self.gradient_checkpointing, MemoryBudget)
        found = {} if backend == "inductor" else {"compile_mode": f"precision.compile_backend is {backend}"}
        return found | (
            {"gradient_checkpointing": f"precision.compile is {show(self.compile)}"}
            if budget and not self.compiles
            else {}
        )

    @property
    def has_cuda_graphs(self) -> bool:
        """Return whether compiled code is recorded as CUDA graphs. A replay overwrites the results of the last one."""
        return self.compiles and self.compile_mode in ("reduce-overhead", "max-autotune")

    @property
    def compiles(self) -> bool:
        """Return whether torch.compile is on. `auto` counts as off until a run has chosen (`choose_compile`)."""
        return self.compile not in (False, "auto")

    @property
    def recomputed(self) -> Literal["nothing", "blocks", "selective", "budget"]:
        """Activations that the backward pass recomputes, by `gradient_checkpointing`."""
        choice = self.gradient_checkpointing
        if isinstance(choice, MemoryBudget):
            return "budget"
        return "blocks" if choice is True else "nothing" if choice is False or choice == "off" else choice


class Guard(Section):
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """Reaction to a step with a NaN or Inf loss or gradient. The update is never applied, on any process. skip:
    training continues. stop: the run stops.
    """
    on_spike: Literal["off", "clip", "skip", "rollback"] = "clip"
    """Reaction to a gradient norm far above recent ones. clip: it is clipped to the limit. skip: the update is skipped.
    rollback: the run rolls back immediately. With all three, a loss that stays far above recent ones for 10 steps rolls
    back. off: spikes are not detected.
    """
    spike_threshold: PositiveFloat = 6.0
    """Spike threshold, in robust standard deviations above the window's median, of the loss and of the log gradient
    norm.
    """
    spike_window_steps: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 128
    """Number of accepted steps after the warmup in the spike window. Detection starts when half of them are recorded.
    """
    max_consecutive_skips: NonNegativeInt = 5
    """Maximum number of consecutive skipped steps. More of them cause a rollback."""
    max_skips_per_1000_steps: NonNegativeInt = 20
    """Maximum number of skipped steps in any 1000 steps. More of them stop the run (exit code 3)."""
    healthy_after_steps: PositiveInt = 100
    """Number of consecutive clean steps after which a checkpoint counts as healthy and can be rolled back to."""
    max_rollbacks: NonNegativeInt = 3
    """Number of rollbacks after which the run stops (exit code 3). 0: the run never rolls back."""
    rollback_skip_steps: Auto | PositiveInt = "auto"
    """Number of additional steps to skip after a rollback, half before the bad steps and half after. auto: 200, but at
    most a tenth of an epoch and a fiftieth of the run.
    """
    lowered_learning_rate: PositiveFraction = 0.5
    """Factor of the learning rate after a second rollback in the same region."""
    lowered_steps: PositiveInt = 1000
    """Number of steps for which lowered_learning_rate applies."""
    max_incidents: NonNegativeInt = 10
    """Number of incidents that are diagnosed and written to `incidents/`. Later ones are only logged as events."""
    incident_seconds: Length = 60.0
    """Time limit of one diagnosis, in seconds."""
    fp16_scale_floor: PositiveFloat = 1.0
    """Lowest fp16 loss scale. Overflows above it belong to the search for the scale and do not count as skipped steps.
    """
    hang_timeout_seconds: Length = 600.0
    """Seconds without a finished step or evaluation batch before the run counts as hung. All processes then write their
    stacks, name the process that the others wait for, and end (exit code 5). The first step of a launch may take three
    times as long. Saving, metrics, callbacks, and all work after the last step have no limit.
    """
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.5
    """Ratio to the median process's time above which a process counts as a straggler. The time is the process's own
    work in a step: reading data, and the forward. A straggler is named in an event if the work takes at least a tenth
    of a step. null: no comparison.
    """
    straggler_window_steps: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 50
    """Number of steps that are averaged for each straggler comparison."""
    straggler_windows: PositiveInt = 3
    """Number of consecutive comparisons that must find the same process before it is reported."""
    drift_check_steps: NonNegativeInt = 500
    """Number of steps between two checks that all processes hold the same weights (HSDP: the copies of each shard). The
    check also runs before every checkpoint. 0: never.
    """


class Checkpoint(Section):
    every_steps: NonNegativeInt = 500
    """Number of steps between two checkpoints. 0: only at the end and when the job is asked to stop."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep. The newest healthy checkpoint, and the next one to become healthy, are also
    kept for a rollback.
    """
    keep_best: bool = True
    """Whether to keep the checkpoint with the best evaluation (`evaluate.metric_for_best_model`) as well."""
    load_best_model_at_end: Auto | bool = "auto"
    """Whether to evaluate the best weights at the end and write them to `model/`, instead of the last ones. auto: with
    early stopping (`evaluate.early_stopping_patience`), because the last weights are then never the best.
    """
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in `model/`. bf16: half the size. `from_pretrained` then loads bf16. Checkpoints and adapters
    stay fp32.
    """
    in_background: bool = True
    """Whether to copy the state and write it in the background. false: training waits until it is on disk."""
    resume: str = "auto"
    """Checkpoint to resume from. auto: the newest valid checkpoint of this output folder. unchanged: the same, but if
    data, code, or settings have changed, keep the old run in previous-N and start a new one. never: always start a new
    run. Or a checkpoint's path.
    """
    accept_changes: bool = False
    """Whether to resume although the recipe differs from the checkpoint in data, model, batch size, or length."""

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of each weight in `model/`."""
        return 2 if self.model_dtype == "bf16" else 4


class Log(Section):
    every_steps: PositiveInt = 10
    """Number of steps between two lines of metrics.jsonl. A line's `loss` is the mean over the applied steps since the
    line before. `num_averaged_steps` is their number, smaller in the first line of a resume. `step_loss` is the loss of
    the line's step.
    """
    trackers: tuple[str, ...] = Field(default=(), examples=[["tensorboard"]])
    """Experiment trackers by Accelerate's names (tensorboard, wandb, trackio, mlflow, ...)."""
    project: str = "accel_train"
    """Project name in the trackers."""
    progress: Auto | bool = "auto"
    """Progress display. auto: a bar in a terminal or notebook, plain lines elsewhere."""
    notify: tuple[NotifyTarget, ...] = Field(default=(), examples=[["$SLACK_WEBHOOK"]])
    """Webhooks that receive a JSON object when the run rolls back, stops, or ends. Each is a URL, or `$NAME` for a URL
    in that environment variable.
    """
    callbacks: tuple[Annotated[str, Field(pattern=".:.")], ...] = Field(default=(), examples=[["my_module:MyCallback"]])
    """Classes of yours to call during the run, derived from accel_train.Callback. They are built without arguments."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[[20, 25]])
    """First and last step to profile, both included, counted from 1 as in metrics.jsonl. Each process writes a trace
    (for ui.perfetto.dev) and a table of its ten costliest operations to `profile/`. Profiled steps are slower.
    """

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
    """All settings of a run, as programs pass them on. `loader.Recipe` reads them from a file."""

    task: str = DEFAULT_TASK
    """Name of a built-in task, or `my_module:MyTask`."""
    seed: Seed = 0
    """Seed of all random numbers: weights, data order, augmentation, and dropout."""
    output_dir: Annotated[Place, AfterValidator(local_run)]
    """Run folder for checkpoints, logs, and the model. Or a URL of s3, gs, or hf: the run works in a folder below the
    cache, and copies it there in the background.
    """
    model: Model
    tokenizer: str | TrainedTokenizer = "auto"
    """Tokenizer: `bytes`, the name or folder of a pretrained tokenizer, or {train_bpe: {vocab_size: 4096}}. auto: the
    tokenizer of model.pretrained, or bytes without pretrained weights. none: token files are ids alone, below
    model.config.vocab_size; nothing reads or writes text.
    """
    data: SerializeAsAny[Data]
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
    """Free settings for a custom task. Built-in tasks take none."""

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

    @field_validator("data", mode="wrap")
    @classmethod
    def data_is_for_the_task(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Data:
        task = info.data.get("task")
        if task is None or not isinstance(value, dict | Data):
            return handler(value)
        section = data_section(task)
        given = value.model_dump(exclude_unset=True) if isinstance(value, Data) else value
        for name in given:
            tasks = tasks_with(f"data.{name}")
            if name not in section.model_fields and tasks and section.model_config["extra"] == "forbid":
                is_label = name in {data_section(other).label_setting for other in tasks}
                own = section.label_setting if is_label else None
                meant = f"did you mean {own}?" if own else did_you_mean(str(name), section.model_fields)
                raise SettingError(
                    f"data.{name} is for {', '.join(tasks)}, not for {task}",
                    meant or "leave it out",
                    settings=(f"data.{name}", "task"),
                )
        return section.model_validate(given) if type(value) is not section else value

    @model_validator(mode="after")
    def settings_fit_each_other(self) -> "Recipe":
        for name, path in (("output_dir", self.output_dir), ("data.cache_dir", self.data.cache_dir)):
            if path is not None and (problem := path_problem(path)) is not None:
                raise SettingError(f"{name} {problem}", settings=(name,))
        annotations = getattr(self.data, "annotations", None)
        others = (("data.annotations", annotations), ("checkpoint.resume", self.checkpoint.resume))
        for name, value in (*self.inputs(), *others):
            if isinstance(value, str) and has_variable(value) and not os.path.exists(value):
                problem = "a shell variable is not replaced here: write the path"
                raise setting_error(name, value, problem)
        kind = self.model.problem_type
        if getattr(self.data, "label_columns", None) and kind not in ("auto", "multi_label"):
            raise SettingError(
                "data.label_columns holds several labels",
                "leave it out, or name one column in data.label_column",
                at=f"model.problem_type={kind}",
                settings=("model.problem_type", "data.label_columns"),
            )
        section, name = self.schedule, "type"
        remedy, other = "set schedule.type to constant", "schedule.type"
        if section.type == "constant":
            name = next((each for each in ("warmup_steps", "warmup_ratio") if getattr(section, each)), "")
            steps, other = section.warmup_steps or "N", "optimizer.options"
            remedy = f"leave it out, and set optimizer.options to {{warmup_steps: {steps}}}"
        if name and self.optimizer.name == SCHEDULE_FREE:
            problem, at = f"{SCHEDULE_FREE} has its own warm-up and takes no schedule", f"schedule.{name}"
            raise SettingError(problem, remedy, f"{at}={getattr(section, name)}", (at, other))
        return self

    def __eq__(self, other: object) -> bool:
        """Return whether the settings are equal, regardless of who set them. A recipe equals its file read again."""
        return self.model_dump() == other.model_dump() if isinstance(other, Recipe) else NotImplemented

    # Recipes cannot be hashed, because they hold mappings (model.config, options).
    __hash__ = None  # type: ignore[assignment]

    def inputs(self) -> Iterator[tuple[str, str]]:
        """Yield each path or name of weights, tokenizer, and data, after the name of its setting in messages."""
        weights = (("model.pretrained", self.model.pretrained), ("tokenizer", self.tokenizer_in_use))
        for name, value in (*weights, *self.data.named()):
            if isinstance(value, str):
                yield name, os.path.expanduser(value)

    @property
    def tokenizer_in_use(self) -> str | TrainedTokenizer:
        """The `tokenizer` setting, with `auto` resolved."""
        return (self.model.pretrained or "bytes") if self.tokenizer == "auto" else self.tokenizer

    @property
    def loads_best_model(self) -> bool:
        """The `checkpoint.load_best_model_at_end` setting, with `auto` resolved."""
        checkpoint = self.checkpoint
        by_itself = checkpoint.keep_best and self.evaluate.early_stopping_patience is not None
        return by_itself if checkpoint.load_best_model_at_end == "auto" else checkpoint.load_best_model_at_end

    def origin(self, name: str) -> Origin:
        """Return who set a field, by its dotted name: `recipe.origin("optimizer.learning_rate")`."""
        return self._origins.get(name, Origin("default"))

    def origins(self) -> Mapping[str, Origin]:
        """Return who set each field that is not a default, by dotted name."""
        return dict(self._origins)

    def with_origins(self, origins: Mapping[str, Origin]) -> Self:
        """Return the same recipe with these origins of its fields."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy
