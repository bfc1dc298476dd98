"""The `optimizer` and `schedule` sections of a recipe: how weights are updated, and the learning rates."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from accel_train.core.errors import SettingError
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
    """The global batch size for which `learning_rate` was found."""


class ParameterGroup(Section):
    match: tuple[str, ...] = Field(examples=[["*.embeddings.*"]])
    """Patterns of parameter names: `*.embeddings.*`."""
    lr_scale: NonNegativeFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NonNegativeFloat | None = Field(default=None, examples=[0.0])
    """None: as for all."""


class Optimizer(Section):
    name: (
        Literal["adamw", "adam", "sgd", "muon", "lion", "adafactor", "adamw_8bit", "schedule_free_adamw"]
        | Annotated[str, Field(pattern=".:.")]
    ) = "adamw"
    """muon: Muon for the matrices of the repeated blocks, AdamW for all other weights, with learning rates as for AdamW;
    lion: half of AdamW's state, with a learning rate 3 to 10 times lower and a weight decay as many times higher;
    adamw_8bit (bitsandbytes): a quarter of AdamW's state; embeddings and tensors of fewer than 4,096 numbers keep all of theirs;
    schedule_free_adamw (schedulefree): no schedule but constant; an average of the weights is evaluated, and what `model/` holds;
    these two, adafactor (torch's) and `module:Class`, another class of optimizers: the host reads each step's gradient norm before
    it is made."""
    learning_rate: PositiveFloat = 3e-4
    """The peak learning rate, before `lr_scaling`."""
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """For all kinds of adam, muon, and lion, whose authors use [0.9, 0.99]."""
    eps: PositiveFloat = 1e-8
    """For all kinds of adam, and muon."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """For sgd and muon, whose authors use 0.95."""
    options: dict[str, Any] = Field(default={}, examples=[{"relative_step": False}])
    """More arguments of the class, for adafactor, schedule_free_adamw (warmup_steps) and `module:Class`."""
    no_decay: tuple[Literal["norm", "bias", "embedding"], ...] = ("norm", "bias")
    """Parameters without weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm over all parameters; 0 never clips."""
    lr_scaling: LRScaling = LRScaling()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Each layer's learning rate is this factor of the next one's, towards the input (ELECTRA, BEiT); 1: all alike."""
    groups: tuple[ParameterGroup, ...] = Field(default=(), examples=[[{"match": ["*.classifier.*"], "lr_scale": 10.0}]])
    """Learning rates and weight decay of their own, by pattern; the first group that matches a parameter has it."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights; it is what is evaluated and what `model/` holds."""

    @model_validator(mode="after")
    def options_are_for_a_class(self) -> "Optimizer":
        if self.options and self.name not in ("adafactor", SCHEDULE_FREE) and ":" not in self.name:
            raise SettingError(
                f"optimizer.options are for adafactor, {SCHEDULE_FREE} and module:Class, and optimizer.name is {self.name}",
                "leave them out",
                settings=("optimizer.options", "optimizer.name"),
            )
        return self

    @model_validator(mode="after")
    def schedule_free_averages_by_itself(self) -> "Optimizer":
        if self.name == SCHEDULE_FREE and self.ema_decay is not None:
            raise SettingError(
                f"{self.name} keeps an average of the weights already",
                "leave it out",
                at=f"optimizer.ema_decay={self.ema_decay:g}",
                settings=("optimizer.ema_decay",),
            )
        if self.name == SCHEDULE_FREE and self.betas[0] == 0:
            raise SettingError(
                f"{self.name} divides by the first, which is how much of the average gradients are taken at",
                "use 0.9",
                at=f"optimizer.betas={list(self.betas)}",
                settings=("optimizer.betas",),
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
    """The curve of the learning rate over the steps."""
    max_steps: PositiveInt | None = None
    """Steps (optimizer updates) to train."""
    num_epochs: Length | None = None
    """Passes over the training data; give this or max_steps."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which the learning rate rises linearly to where the curve begins: its peak, or `initial_lr_ratio` of it for one_cycle and cyclic."""
    warmup_ratio: Fraction | None = None
    """The same as a fraction of all steps; give one of the two (neither: 1 % for warmup_* types, else 0)."""
    min_lr_ratio: Fraction = 0.0
    """The end of a decay, as a fraction of the peak; a floor for step, exponential and inverse_sqrt; constant and cyclic ignore it."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """warmup_stable_decay: the last fraction of all steps, in which the rate falls."""
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """warmup_stable_decay: the form of that fall."""
    num_cycles: PositiveInt = 1
    """cosine_restarts and cyclic: how many."""
    step_size_steps: PositiveInt | None = Field(default=None, examples=[1000])
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
            raise SettingError(
                "give exactly one of schedule.max_steps and schedule.num_epochs",
                settings=("schedule.max_steps", "schedule.num_epochs"),
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise SettingError(
                "give one of schedule.warmup_steps and schedule.warmup_ratio, not both",
                settings=("schedule.warmup_steps", "schedule.warmup_ratio"),
            )
        if self.max_steps is not None and self.warmup_steps is not None and self.warmup_steps > self.max_steps:
            raise SettingError(
                f"schedule.warmup_steps={self.warmup_steps} is longer than max_steps={self.max_steps}",
                "lower warmup_steps",
                settings=("schedule.warmup_steps",),
            )
        return self
