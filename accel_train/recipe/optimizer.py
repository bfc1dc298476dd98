"""The `optimizer` section of a recipe, and the table of optimizers.

To add an optimizer, write its class and a builder in one file of `accel_train/optim`, and add its line to `OPTIMIZERS`.
The checks of settings, the comparison at a resume, the memory estimate, and the reference read that line.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from accel_train.recipe.values import NonNegativeFloat, PositiveFloat, PositiveInt, Section

SCHEDULE_FREE = "schedule_free_adamw"


@dataclass(frozen=True)
class OptimizerKind:
    """One value of `optimizer.name`: its builder, the settings it reads, and the state it keeps."""

    build: str
    """Builder as `module:function` in `accel_train.optim`, called with (groups, section, model, device)."""
    settings: tuple[str, ...]
    """Settings of the section that this optimizer reads, of betas, eps, momentum, and options."""
    moments: int = 2
    """fp32 tensors of state for each weight."""
    state: Literal["moments", "muon", "rows_and_columns", "8_bits"] = "moments"
    """Form of the state, for the memory estimate (`model/memory_estimate.py`)."""
    of_class: str = ""
    """`module:Class` of another package. The host reads the gradient norm before each of its steps."""
    package: str = ""
    """Package that the class needs; an extra of the same name installs it."""
    note: str = ""
    """Sentence for the start of a run."""

    @property
    def reads_options(self) -> bool:
        return "options" in self.settings


CUSTOM = OptimizerKind("custom:build_custom", ("options",), of_class=":")
"""Optimizers that a recipe names as `module:Class`; their state is estimated as AdamW's."""
OPTIMIZERS = {
    "adamw": OptimizerKind("adam:build_adamw", ("betas", "eps")),
    "adam": OptimizerKind("adam:build_adam", ("betas", "eps")),
    "sgd": OptimizerKind("sgd:build_sgd", ("momentum",), moments=1),
    "muon": OptimizerKind("muon:build_muon", ("betas", "eps", "momentum"), moments=1, state="muon"),
    "lion": OptimizerKind("lion:build_lion", ("betas",), moments=1),
    "adafactor": OptimizerKind(
        "custom:build_custom", ("options",), moments=0, state="rows_and_columns", of_class="torch.optim:Adafactor"
    ),
    "adamw_8bit": OptimizerKind(
        "custom:build_adamw_8bit", ("betas", "eps"), state="8_bits", of_class="bitsandbytes.optim:AdamW8bit",
        package="bitsandbytes", note="moments in 8 bits, but for embeddings and tensors of fewer than 4,096 numbers",
    ),
    SCHEDULE_FREE: OptimizerKind(
        "custom:build_custom", ("betas", "eps", "options"), of_class="accel_train.optim.schedule_free:ScheduleFreeAdamW",
        package="schedulefree", note="an average of the weights is evaluated, and what model/ will hold",
    ),
}  # fmt: skip
"""`optimizer.name` -> what the package knows about it."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)] | Annotated[str, Field(pattern=".:.")]


def optimizer_kind(name: str) -> OptimizerKind:
    """Return the kind of `optimizer.name`."""
    return OPTIMIZERS.get(name, CUSTOM)


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
    name: OptimizerName = "adamw"
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
        if self.options and not optimizer_kind(self.name).reads_options:
            taking = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.reads_options)
            raise ValueError(
                f"optimizer.options are for {taking} and module:Class, and optimizer.name is {self.name}; leave them out"
            )
        return self

    @model_validator(mode="after")
    def schedule_free_averages_by_itself(self) -> "Optimizer":
        if self.name == SCHEDULE_FREE and self.ema_decay is not None:
            raise ValueError(
                f"optimizer.ema_decay={self.ema_decay:g}: {self.name} keeps an average of the weights already; leave it out"
            )
        if self.name == SCHEDULE_FREE and self.betas[0] == 0:
            raise ValueError(
                f"optimizer.betas={list(self.betas)}: {self.name} divides by the first, which is how much of the average gradients "
                "are taken at; use 0.9"
            )
        return self

    @property
    def averages(self) -> bool:
        """Return whether an average of the weights is evaluated and saved."""
        return self.ema_decay is not None or self.name == SCHEDULE_FREE
