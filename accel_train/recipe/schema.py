"""The recipe: one frozen value that says everything about a run.

Sections and leaves are named once, here, in `recipe_data.py` and in `recipe_optimizer.py`. YAML is the recipe's file form (`recipe_file.py` reads it,
`recipe_writing.py` writes it), Python its code form, with the same names. Where Accelerate or
`transformers.TrainingArguments` has a name for a thing, that name is used. Each field's docstring is what
`accel-train plan` prints.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from accel_train.recipe_data import Data, TrainedTokenizer
from accel_train.recipe_optimizer import Optimizer, Schedule
from accel_train.recipe_values import (
    Auto,
    NonNegativeFloat,
    NonNegativeInt,
    Origin,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    path_problem,
)


class LoRA(Section):
    rank: PositiveInt = 8
    """Columns of the two small matrices that are trained in place of each target's weights."""
    alpha: PositiveFloat = 16.0
    """Their product is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names (or ends of names) of the modules that are adapted; all-linear: every linear layer but the head."""
    train_also: tuple[str, ...] = ("*classifier*", "*score*")
    """Parameters that are trained whole beside the adapters, by pattern: a new head has nothing to adapt."""
    merge: bool = True
    """Write the adapters into the weights of `model/`; off: `model/` holds the base weights, and `adapter/` what was learned."""


class Model(Section):
    pretrained: str | None = None
    """A name on the hub or a local folder; training goes on from its weights."""
    config: dict[str, Any] | None = None
    """A transformers configuration (`model_type` and its fields); the weights are random."""
    attn_implementation: str = "auto"
    """`auto` takes the fastest exact one: causal SDPA without a mask where the model allows it."""
    trust_remote_code: bool = False
    """Run Python code that comes with a pretrained model. Never asked for interactively; commands on a run folder, which may be
    somebody else's, take it from their own command line alone."""
    accept_new_tokenizer: bool = False
    """Train pretrained weights with a tokenizer other than theirs: the embedding then begins with vectors of other tokens."""
    pad_vocab_to_multiple_of: NonNegativeInt = 64
    """Rows are added to the embedding up to this multiple (faster matrix products); 0 leaves it alone."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by pattern of their names (`bert.embeddings.*`, `*.layer.[0-3].*`)."""
    freeze_batch_norm: bool = False
    """Batch norms neither train their weights nor move their running statistics."""
    lora: LoRA | None = None
    """Train low-rank adapters (peft) and leave the weights as they are."""
    problem_type: Literal["auto", "single_label", "multi_label", "regression"] = "auto"
    """text-classification: what the labels mean; auto: lists of labels are multi_label, decimal numbers regression."""

    @model_validator(mode="after")
    def one_source_of_weights(self) -> "Model":
        if (self.pretrained is None) == (self.config is None):
            raise ValueError(
                "give exactly one of model.pretrained (a name or folder) and model.config (for example {model_type: gpt2, n_layer: 4})"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config needs a model_type, for example {model_type: gpt2, n_layer: 4}")
        return self


class Loss(Section):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Training targets give this share to all classes alike (Szegedy et al. 2016); evaluation does not."""
    class_weights: Literal["balanced"] | tuple[NonNegativeFloat, ...] | dict[str, NonNegativeFloat] | None = None
    """How much each class counts in training; balanced: n_samples / (n_classes x n_of_class), as in scikit-learn."""


class Batch(Section):
    global_batch_size: PositiveInt | None = None
    """Samples per step over all processes = per_device_batch_size x gradient_accumulation_steps x processes."""
    per_device_batch_size: Auto | PositiveInt = "auto"
    """Samples one process forwards at once (a micro-batch); auto: what follows from the other two, and where accumulation is
    auto as well the largest that fits: measured on a GPU (or a CPU with `ulimit -v`) before the first step, and remembered."""
    gradient_accumulation_steps: Auto | PositiveInt = "auto"
    """Micro-batches per process and step; auto: what follows from the other two."""
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the device's memory that the search for the largest micro-batch leaves free."""
    per_device_eval_batch_size: Auto | PositiveInt = "auto"
    """Samples one process forwards at once in evaluation; auto: twice the training size."""


class Precision(Section):
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """auto: bf16 where the hardware has it, else fp16 on CUDA, else no."""
    tf32: Auto | bool = "auto"
    """TensorFloat-32 for the fp32 matrix products of CUDA; auto: with bf16 or fp16 only, so that fp32 stays fp32."""
    cudnn_benchmark: Auto | bool = "auto"
    """Let cuDNN time its algorithms and keep the fastest; auto: unless deterministic."""
    compile: Literal["blocks", "model"] | bool = False
    """torch.compile; true: the repeated blocks of the model where it has some (compiles in seconds), else all of it."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time; slower on CUDA."""
    gradient_checkpointing: bool = False
    """Keep fewer activations and compute them again in the backward pass: less memory, about a third more time."""
    fp16_init_scale: PositiveFloat = 2.0**14
    """The first loss scale. 2^14 leaves a scaled gradient a factor 4 below fp16's largest number, 65504; 2^16 is above it."""
    fp16_growth_interval: PositiveInt = 2000
    """Steps without an overflow after which the loss scale doubles."""


class Parallel(Section):
    """How the processes share the work. It is no part of what makes a run the same run: each resume may choose anew."""

    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """ddp: every process holds the whole model; fsdp2: weights, gradients and optimizer are spread over the processes;
    deepspeed: what zero_stage says is, by DeepSpeed's ZeRO."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: 1 spreads the optimizer's state over the processes, 2 gradients as well, 3 weights as well."""
    dp_shard_size: Auto | PositiveInt = "auto"
    """fsdp2: processes that share one copy of the model; auto: all of them. Fewer (those of a node): several copies, whose
    gradients are averaged (HSDP)."""
    reshard_after_forward: bool = True
    """fsdp2: let go of a block's gathered weights after its forward, and gather them again in the backward pass; off: more
    memory, less communication."""
    cpu_offload: bool = False
    """fsdp2: keep weights and optimizer in host memory, and update them there; slower, for models that fit in no other way."""
    tp_size: PositiveInt = 1
    """fsdp2: neighbouring processes that compute each layer together and read the same samples (tensor parallelism)."""
    sp_size: PositiveInt = 1
    """ddp and fsdp2: neighbouring processes that read the same samples and have a slice each of every sequence (sequence
    parallelism, by DeepSpeed's Ulysses attention)."""
    find_unused_parameters: Auto | bool = "auto"
    """ddp: look in each step for parameters that took no part in the loss (a walk through the graph, and a collective more); auto:
    where the first step leaves some out. true: for a model that leaves out others in later steps (experts, branches); false: such
    a model is an error. To spare the cost, name parameters that never take part in model.freeze."""
    cp_size: PositiveInt = 1
    """Processes that share each sequence by ring attention (context parallelism): only 1; `sp_size` is the way to split sequences."""

    @model_validator(mode="after")
    def sequences_are_whole(self) -> "Parallel":
        if self.cp_size != 1:
            raise ValueError(
                f"parallel.cp_size={self.cp_size}: context parallelism is not supported, because torch's ring attention has no "
                "kernel for the CPU, where this program proves that several processes train as one does; leave it at 1, and for "
                f"sequences that do not fit set parallel.sp_size to {self.cp_size}, and precision.gradient_checkpointing to true"
            )
        return self

    @model_validator(mode="after")
    def sequences_are_split_with_what_is_known_to_work(self) -> "Parallel":
        if self.sp_size > 1 and (self.tp_size > 1 or self.strategy == "deepspeed"):
            other = f"tp_size={self.tp_size}" if self.tp_size > 1 else "strategy deepspeed"
            raise ValueError(
                f"parallel.sp_size={self.sp_size} does not go with parallel.{other}; leave one of them out: sequences are split "
                "under parallel.strategy ddp and fsdp2"
            )
        return self

    @model_validator(mode="after")
    def sharding_is_asked_for(self) -> "Parallel":
        of_fsdp2 = ("dp_shard_size", "reshard_after_forward", "cpu_offload", "tp_size")
        of_strategy = {"fsdp2": of_fsdp2, "deepspeed": ("zero_stage",), "ddp": ("find_unused_parameters",)}
        for strategy, names in of_strategy.items():
            for name in names if self.strategy != strategy else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"parallel.{name}={getattr(self, name)} is for parallel.strategy {strategy}, and it is {self.strategy}"
                    )
        return self

    @property
    def num_sharing(self) -> int:
        """Processes that read the same samples."""
        return self.tp_size * self.sp_size

    @property
    def shared_by(self) -> str:
        """The setting that makes them."""
        return "parallel.sp_size" if self.sp_size > 1 else "parallel.tp_size"


class Guard(Section):
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What a step with a NaN or Inf loss or gradient does. Its update is never applied, on any process."""
    on_spike: Literal["off", "clip", "skip", "rollback"] = "clip"
    """What a gradient norm far above those before does: it is clipped to the limit, its update is not applied, or the run goes
    back at once. A loss that stays far above those before for 10 steps goes back with all of them; off: nothing is watched."""
    spike_threshold: PositiveFloat = 6.0
    """How far is far: spreads above the median of the window, of the loss and of the logarithm of the gradient norm."""
    spike_window_steps: Annotated[int, Field(ge=8)] = 128
    """Accepted steps after the warmup that spikes are measured by; with half of them the watch begins."""
    max_consecutive_skips: NonNegativeInt = 5
    """More skipped steps than this in a row roll back."""
    max_skips_per_1000_steps: NonNegativeInt = 20
    """More skipped steps than this in any 1000 stop the run (exit code 3)."""
    healthy_after_steps: PositiveInt = 100
    """A checkpoint that so many clean steps in a row have followed is healthy: one that can be gone back to."""
    max_rollbacks: NonNegativeInt = 3
    """After so many the run stops (exit code 3); 0: it never goes back."""
    rollback_skip_steps: Auto | PositiveInt = "auto"
    """Steps that are passed over after a rollback beside the bad ones, half of them before and half after; auto: 200, and a
    tenth of an epoch and a fiftieth of the run at most."""
    lowered_learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor of the learning rate after a second rollback in one region ..."""
    lowered_steps: PositiveInt = 1000
    """... for this many steps."""
    max_incidents: NonNegativeInt = 10
    """Incidents that are looked into and written to `incidents/`; later ones are events alone."""
    incident_seconds: PositiveFloat = 60.0
    """How long looking into one may take."""
    fp16_scale_floor: PositiveFloat = 1.0
    """The loss scale never falls below this; overflows above it are the scale's search, and not counted as skips."""
    hang_timeout_seconds: PositiveFloat = 600.0
    """Without a step, or an evaluated batch, for so long the run has hung: stacks are written, the process that the others wait
    for is named, and all end (exit code 5). The first step of a sitting may take three times as long; after it no collective
    waits for longer than twice this, whatever becomes of the rest."""
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.5
    """A process whose own work in a step (reading data, the forward) takes so many times what the median process's takes is
    named in an event, where that is a tenth of a step at least; none: nobody looks."""
    straggler_window_steps: Annotated[int, Field(ge=2)] = 50
    """Steps over which that is averaged, and between two comparisons ..."""
    straggler_windows: PositiveInt = 3
    """... of which so many in a row have to find the same process."""
    drift_check_steps: NonNegativeInt = 500
    """Steps between two checks that all processes hold the same weights (HSDP: the copies of each part), which every checkpoint is
    preceded by as well; 0: never."""


class Checkpoint(Section):
    every_steps: NonNegativeInt = 500
    """Steps between two checkpoints; 0: only at the end and when the job is asked to stop."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; the newest healthy one, and the next one to be healthy, stay for a rollback all the same."""
    keep_best: bool = True
    """Keep the one that evaluated best (`evaluate.metric_for_best_model`) as well."""
    load_best_model_at_end: bool = False
    """The weights that evaluated best, not the last ones, are evaluated at the end and written to `model/`."""
    in_background: bool = True
    """Copy what is saved and write it beside the training; off: training waits until it is on the disk."""
    resume: str = "auto"
    """auto: go on from the newest valid checkpoint of this output folder; never: start anew; or a checkpoint's path."""
    accept_changes: bool = False
    """Go on although the recipe differs from the checkpoint's in what makes a run the same run (data, model, batch, length)."""


class TestTimeAugmentation(Section):
    __test__ = False  # no test class, whatever pytest makes of its name

    horizontal_flip: bool = True
    """Average over the image and its mirror image."""
    scales: tuple[PositiveFloat, ...] = (1.0,)
    """Average over the image at these scales."""


class Evaluate(Section):
    every_steps: NonNegativeInt = 500
    """Steps between two evaluations; 0: only at the end."""
    every_epochs: NonNegativeFloat | None = None
    """The same in passes over the training data; given, it takes the place of every_steps."""
    metrics: tuple[str, ...] = ()
    """Further metrics beside the task's own: names of accel_train.metrics, or of the hub with allow_hub_metrics."""
    allow_hub_metrics: bool = False
    """Load metrics that are not in the package from the hub, which runs code from there."""
    metric_for_best_model: str = "loss"
    """What "best" means: a name that evaluations report."""
    greater_is_better: Auto | bool = "auto"
    """auto: lower is better for losses, errors and perplexity, greater for everything else."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a better metric_for_best_model."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """How much better counts as better."""
    test_time_augmentation: TestTimeAugmentation | None = None
    """Images: evaluate with and without averaging over flips and scales."""
    max_samples: PositiveInt | None = None
    """Evaluate on this many samples during training; the last evaluation takes all, and is a curve of its own (`eval_final`)."""
    sample_prompt: str | None = None
    """causal-lm: print a text that begins with this at the end of the run."""
    sample_tokens: PositiveInt = 200
    """Length of that text."""


class Log(Section):
    every_steps: PositiveInt = 10
    """Steps between two lines of metrics.jsonl. Of a line, `loss` is the mean over the steps since the line before that were
    applied (`num_averaged_steps` of them: fewer in the first line of a resume), and `step_loss` that of its own step."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers by Accelerate's names (tensorboard, wandb, trackio, mlflow, ...)."""
    project: str = "accel_train"
    """Project name in the trackers."""
    progress: Auto | bool = "auto"
    """auto: a bar in a terminal or notebook, plain lines elsewhere."""


class Recipe(Section):
    """Everything about a run. `Recipe.from_yaml(path)` reads one, `train(recipe)` runs it."""

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
    options: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Free settings for a task of your own; the package's tasks take none."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def writes_to_a_folder(self) -> "Recipe":
        problem = path_problem(self.output_dir)
        if problem is not None:
            raise ValueError(f"output_dir {problem}")
        return self

    def __eq__(self, other: object) -> bool:
        """The same settings; who set them is no part of it, so a recipe equals what was written of it and read again."""
        return self.model_dump() == other.model_dump() if isinstance(other, Recipe) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it holds mappings (model.config, options), which have no hash either

    @classmethod
    def from_yaml(cls, path: str, **overrides: Any) -> "Recipe":
        """Read a recipe file; `overrides` are sections as mappings: `optimizer={"learning_rate": 1e-3}`.

        Raises:
            ValueError: the file cannot be read, or breaks a rule; the text names key, line, rule and remedy.
        """
        from accel_train.recipe_file import load_recipe

        return load_recipe(path, overrides=overrides)

    @property
    def tokenizer_in_use(self) -> str | TrainedTokenizer:
        """`tokenizer`, with `auto` resolved."""
        return (self.model.pretrained or "bytes") if self.tokenizer == "auto" else self.tokenizer

    def origin(self, leaf: str) -> Origin:
        """Who set a leaf, by its dotted name: `recipe.origin("optimizer.learning_rate")`."""
        return self._origins.get(leaf, Origin("default"))

    def origins(self) -> Mapping[str, Origin]:
        """Who set which leaf, for all that is not a default."""
        return dict(self._origins)

    def with_origins(self, origins: Mapping[str, Origin]) -> "Recipe":
        """The same recipe, knowing who set which leaf."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy
