"""The `optimizer` and `schedule` sections of a recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from accel_train.recipe.values import (
    Fraction,
    Length,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

SCHEDULE_FREE = "schedule_free_adamw"


class LRScaling(Section):
    rule: Literal["none", "linear", "sqrt"] = "none"
    """linear: learning_rate x global_batch_size / base_batch_size; sqrt: x its square root; none: as written."""
    base_batch_size: PositiveInt = 256
    """Global batch size for which `learning_rate` was found."""


class ParameterGroup(Section):
    match: tuple[str, ...] = Field(examples=[["*.embeddings.*"]])
    """Patterns of parameter names: `*.embeddings.*`."""
    lr_scale: NonNegativeFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NonNegativeFloat | None = Field(default=None, examples=[0.0])
    """Weight decay of these parameters. Default: the optimizer's weight decay."""


class Optimizer(Section):
    name: (
        Literal["adamw", "adam", "sgd", "muon", "lion", "adafactor", "adamw_8bit", "schedule_free_adamw"]
        | Annotated[str, Field(pattern=".:.")]
    ) = "adamw"
    """Name of the optimizer. muon: Muon for the matrices of the repeated blocks, AdamW for all other weights, with
    AdamW's learning rates. lion: half of AdamW's state. Use a learning rate 3 to 10 times lower, and a weight decay
    higher by the same factor. adamw_8bit (bitsandbytes): a quarter of AdamW's state. Embeddings and tensors of fewer
    than 4,096 elements keep theirs in fp32. schedule_free_adamw (schedulefree): requires schedule.type constant. An
    average of the weights is evaluated and written to `model/`. adafactor: torch's Adafactor. `module:Class`: any other
    optimizer class. With the last four, the host reads the gradient norm before each update.
    """
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate, before `lr_scaling`."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay: decoupled for most optimizers, added to the gradient (L2) for adam and sgd."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Coefficients of the moving averages, for all kinds of adam, muon, and lion. The authors of lion use [0.9, 0.99].
    """
    eps: PositiveFloat = 1e-8
    """Term added to the denominator, for all kinds of adam, and muon."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum, for sgd and muon. The authors of muon use 0.95."""
    options: dict[str, Any] = Field(default={}, examples=[{"relative_step": False}])
    """Additional arguments of the optimizer class, for adafactor, schedule_free_adamw (warmup_steps), and
    `module:Class`.
    """
    no_decay: tuple[Literal["norm", "bias", "embedding"], ...] = ("norm", "bias")
    """Kinds of parameters without weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Largest gradient norm over all parameters. Larger gradients are scaled down to it; 0: no clipping."""
    lr_scaling: LRScaling = LRScaling()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Ratio of each layer's learning rate to the next layer's, towards the input (ELECTRA, BEiT). 1: equal rates."""
    groups: tuple[ParameterGroup, ...] = Field(default=(), examples=[[{"match": ["*.classifier.*"], "lr_scale": 10.0}]])
    """Groups of parameters with a different learning rate or weight decay, by pattern. The first matching group
    applies.
    """
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights. The average is evaluated and written to `model/`. Default:
    no average.
    """

    @model_validator(mode="after")
    def options_are_for_a_class(self) -> "Optimizer":
        if self.options and self.name not in ("adafactor", SCHEDULE_FREE) and ":" not in self.name:
            raise ValueError(
                f"optimizer.options are for adafactor, {SCHEDULE_FREE} and module:Class, and optimizer.name is "
                f"{self.name}; leave them out"
            )
        return self

    @model_validator(mode="after")
    def schedule_free_averages_by_itself(self) -> "Optimizer":
        if self.name == SCHEDULE_FREE and self.ema_decay is not None:
            raise ValueError(
                f"optimizer.ema_decay={self.ema_decay:g}: {self.name} keeps an average of the weights already; "
                "leave it out"
            )
        if self.name == SCHEDULE_FREE and self.betas[0] == 0:
            raise ValueError(
                f"optimizer.betas={list(self.betas)}: {self.name} divides by the first, which is how much of the "
                "average gradients are taken at; use 0.9"
            )
        return self

    @property
    def averages(self) -> bool:
        """Return whether an average of the weights is evaluated and saved."""
        return self.ema_decay is not None or self.name == SCHEDULE_FREE


class Schedule(Section):
    type: Literal[
        "constant",
        "linear",
        "cosine",
        "warmup_cosine",
        "warmup_stable_decay",
        "one_cycle",
        "cyclic",
        "step",
        "exponential",
        "polynomial",
        "inverse_sqrt",
        "cosine_restarts",
    ] = "warmup_cosine"
    """Curve of the learning rate over the steps."""
    max_steps: PositiveInt | None = None
    """Number of steps (optimizer updates) to train."""
    num_epochs: Length | None = None
    """Number of passes over the training data. Give this or max_steps."""
    warmup_steps: NonNegativeInt | None = None
    """Number of warmup steps. The learning rate rises linearly to the start of the curve. This is the peak, or
    `initial_lr_ratio` of the peak for one_cycle and cyclic.
    """
    warmup_ratio: Fraction | None = None
    """Number of warmup steps as a fraction of all steps. Give this or warmup_steps. Default: 1 % for warmup_* types,
    otherwise 0.
    """
    min_lr_ratio: Fraction = 0.0
    """End of a decay, as a fraction of the peak; a floor for step, exponential, and inverse_sqrt. constant and cyclic
    ignore it.
    """
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """warmup_stable_decay: fraction of all steps, at the end, in which the learning rate decays."""
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """warmup_stable_decay: shape of the decay."""
    num_cycles: PositiveInt = 1
    """cosine_restarts and cyclic: number of cycles."""
    step_size_steps: PositiveInt | None = Field(default=None, examples=[1000])
    """step: number of steps between two drops. Default: a third of all steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """step: factor of each drop. exponential: fraction of the peak at the last step."""
    power: PositiveFloat = 1.0
    """polynomial: exponent of the decay."""
    initial_lr_ratio: Annotated[float, Field(gt=0, le=1)] = 0.04
    """one_cycle: start of the curve, as a fraction of the peak. cyclic: low point of a cycle, as a fraction of the
    peak.
    """

    @model_validator(mode="after")
    def one_length_and_one_warmup(self) -> "Schedule":
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError("give exactly one of schedule.max_steps and schedule.num_epochs")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give one of schedule.warmup_steps and schedule.warmup_ratio, not both")
        if self.max_steps is not None and self.warmup_steps is not None and self.warmup_steps > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.warmup_steps} is longer than max_steps={self.max_steps}; lower "
                "warmup_steps"
            )
        return self
