"""The sections of a recipe that say how weights are updated: the optimizer with its learning rates, and their schedule."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from accel_train.recipe_values import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class LRScaling(Section):
    rule: Literal["none", "linear", "sqrt"] = "none"
    """linear: learning_rate x global_batch_size / base_batch_size; sqrt: x its square root; none: as written."""
    base_batch_size: PositiveInt = 256
    """The global batch size for which `learning_rate` was found."""


class ParameterGroup(Section):
    match: tuple[str, ...]
    """Patterns of parameter names: `*.embeddings.*`."""
    lr_scale: NonNegativeFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """None: as for all."""


class Optimizer(Section):
    name: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    """The peak learning rate, before `lr_scaling`."""
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """For sgd."""
    no_decay: tuple[Literal["norm", "bias", "embedding"], ...] = ("norm", "bias")
    """Parameters that weight decay leaves alone."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm over all parameters; 0 never clips."""
    lr_scaling: LRScaling = LRScaling()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each layer's learning rate is this factor of the next one's, towards the input (ELECTRA, BEiT); 1: all alike."""
    groups: tuple[ParameterGroup, ...] = ()
    """Learning rates and weight decay of their own, by pattern; the first group that matches a parameter has it."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights; it is what is evaluated and what `model/` holds."""


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
    """The curve of the learning rate over the steps."""
    max_steps: PositiveInt | None = None
    """Steps (optimizer updates) to train."""
    num_epochs: PositiveFloat | None = None
    """Passes over the training data; give this or max_steps."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which the learning rate rises linearly to where the curve begins: its peak, or `initial_lr_ratio` of it for one_cycle and cyclic."""
    warmup_ratio: Fraction | None = None
    """The same as a fraction of all steps; give one of the two (neither: 1 % for warmup_* types, else 0)."""
    min_lr_ratio: Fraction = 0.0
    """Where a decay ends, as a fraction of the peak; a floor for step, exponential and inverse_sqrt; constant and cyclic ignore it."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """warmup_stable_decay: the last fraction of all steps, in which the rate falls."""
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """warmup_stable_decay: the form of that fall."""
    num_cycles: PositiveInt = 1
    """cosine_restarts and cyclic: how many."""
    step_size_steps: PositiveInt | None = None
    """step: steps between two drops; none: a third of all steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """step: factor of each drop; exponential: the ratio to the peak reached at the last step."""
    power: PositiveFloat = 1.0
    """polynomial."""
    initial_lr_ratio: Annotated[float, Field(gt=0, le=1)] = 0.04
    """one_cycle: where it starts, as a fraction of the peak; cyclic: the low point of a cycle."""

    @model_validator(mode="after")
    def one_length_and_one_warmup(self) -> "Schedule":
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError("give exactly one of schedule.max_steps and schedule.num_epochs")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give one of schedule.warmup_steps and schedule.warmup_ratio, not both")
        if self.max_steps is not None and self.warmup_steps is not None and self.warmup_steps > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.warmup_steps} is longer than max_steps={self.max_steps}; lower warmup_steps"
            )
        return self
