"""The `optimizer` section of a recipe, and the table of optimizers.

To add an optimizer, write its class and a builder in one file of `accel_train/optim`, and add its line to `OPTIMIZERS`.
The checks of settings, the comparison at a resume, the memory estimate, and the reference read that line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from accel_train.core.errors import SettingError, setting_error
from accel_train.recipe.values import (
    FractionBelow1,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)

SCHEDULE_FREE = "schedule_free_adamw"
Group = dict[str, Any]
Groups = list[Group]
"""Parameter groups, as torch's optimizers take and hold them."""
LARGEST_BF16_BETA = 1 - 2**-8
"""Largest decay of a moment in bf16. Closer to 1, the change of a step is rounded away, and a moment never falls."""


@dataclass(frozen=True)
class OptimizerKind:
    """One value of `optimizer.name`: its builder, the settings it reads, and the state it keeps."""

    build: str
    """Builder as `module:function` in `accel_train.optim`, called with (groups, section, model, device)."""
    settings: tuple[str, ...]
    """Settings of the section that this optimizer reads, of betas, eps, momentum, muon_dtype, and options."""
    moments: int = 2
    """fp32 tensors of state for each weight."""
    state: Literal["moments", "muon", "rows_and_columns", "8_bits"] = "moments"
    """Form of the state, for the memory estimate (`model/memory_estimate.py`)."""
    of_class: str = ""
    """`module:Class` to build, usually of another package."""
    skips_alone: bool = False
    """Whether the class skips a bad step by itself. Otherwise the host reads the gradient norm before each step."""
    stores_bf16: bool = False
    """Whether `optimizer.state_dtype` bf16 is supported."""
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
    "adamw": OptimizerKind("adam:build_adam", ("betas", "eps"), stores_bf16=True),
    "adam": OptimizerKind("adam:build_adam", ("betas", "eps"), stores_bf16=True),
    "sgd": OptimizerKind("sgd:build_sgd", ("momentum",), moments=1),
    "muon": OptimizerKind("muon:build_muon", ("betas", "eps", "momentum", "muon_dtype"), moments=1, state="muon"),
    "lion": OptimizerKind("lion:build_lion", ("betas",), moments=1),
    "adafactor": OptimizerKind(
        "custom:build_custom",
        ("options",),
        moments=0,
        state="rows_and_columns",
        of_class="accel_train.optim.adafactor:Adafactor",
        skips_alone=True,
    ),
    "adamw_8bit": OptimizerKind(
        "custom:build_adamw_8bit",
        ("betas", "eps"),
        state="8_bits",
        of_class="bitsandbytes.optim:AdamW8bit",
        package="bitsandbytes",
        note="moments in 8 bits, but for embeddings and tensors of fewer than 4,096 numbers",
    ),
    SCHEDULE_FREE: OptimizerKind(
        "custom:build_custom",
        ("betas", "eps", "options"),
        of_class="accel_train.optim.schedule_free:ScheduleFreeAdamW",
        package="schedulefree",
        note="an average of the weights is evaluated, and what model/ will hold",
    ),
}
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
    """Global batch size for which `learning_rate` was found."""


class ParameterGroup(Section):
    match: tuple[str, ...] = Field(examples=[["*.embeddings.*"]])
    """Patterns of parameter names: `*.embeddings.*`."""
    lr_scale: NonNegativeFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NonNegativeFloat | None = Field(default=None, examples=[0.0])
    """Weight decay of these parameters. Default: the optimizer's weight decay."""


class Optimizer(Section):
    name: OptimizerName = "adamw"
    """Name of the optimizer. muon: Muon for the matrices of the repeated blocks, AdamW for all other weights, with
    AdamW's learning rates. lion: half of AdamW's state; use a learning rate 3 to 10 times lower, and a weight decay
    higher by the same factor. adamw_8bit (bitsandbytes): a quarter of AdamW's state; embeddings and tensors of fewer
    than 4,096 elements keep theirs in fp32. schedule_free_adamw (schedulefree): requires schedule.type constant; an
    average of the weights is evaluated and written to `model/`. adafactor: the numbers of torch's Adafactor.
    `module:Class`: any other optimizer class. With it, adamw_8bit, and schedule_free_adamw, the host reads the gradient
    norm before each update.
    """
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate, before `lr_scaling`."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay: decoupled for most optimizers, added to the gradient (L2) for adam and sgd."""
    betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.95)
    """Coefficients of the moving averages, for all kinds of adam, muon, and lion. The authors of lion use [0.9, 0.99].
    """
    eps: PositiveFloat = 1e-8
    """Term added to the denominator, for all kinds of adam, and muon."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which adamw and adam store their moments. bf16: 4 bytes per weight instead of 8. Updates are computed in
    the type of the weights. Changes of a moment below 0.2 to 0.4 % are lost, so bf16 requires betas up to 0.996.
    """
    momentum: FractionBelow1 = 0.9
    """Momentum, for sgd and muon. The authors of muon use 0.95."""
    muon_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the products with which muon makes a matrix orthogonal. auto: bf16 on CUDA with mixed_precision bf16 or
    fp8, otherwise fp32. In bf16, the update differs by about 1 %, and by 0.1 % with the number of processes. The
    momentum stays fp32.
    """
    options: dict[str, Any] = Field(default={}, examples=[{"relative_step": False}])
    """Additional arguments of the optimizer class, for adafactor, schedule_free_adamw (warmup_steps), and
    `module:Class`.
    """
    no_decay: tuple[Literal["norm", "bias", "embedding"], ...] = ("norm", "bias")
    """Kinds of parameters without weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Largest gradient norm over all parameters. Larger gradients are scaled down to it; 0: no clipping."""
    lr_scaling: LRScaling = LRScaling()
    layer_decay: PositiveFraction = 1.0
    """Ratio of each layer's learning rate to the next layer's, towards the input (ELECTRA, BEiT). 1: equal rates."""
    groups: tuple[ParameterGroup, ...] = Field(default=(), examples=[[{"match": ["*.classifier.*"], "lr_scale": 10.0}]])
    """Groups of parameters with a different learning rate or weight decay, by pattern. The first matching group
    applies.
    """
    ema_decay: FractionBelow1 | None = None
    """Decay of an exponential moving average of the weights. The average is evaluated and written to `model/`. Default:
    no average.
    """

    def unread(self) -> Mapping[str, str]:
        taking = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.reads_options)
        found = {"options": f"optimizer.name is {self.name}, and only {taking} and module:Class read it"}
        if optimizer_kind(self.name).reads_options:
            found = {"ema_decay": f"{SCHEDULE_FREE} already averages the weights"} if self.name == SCHEDULE_FREE else {}
        return found

    @model_validator(mode="after")
    def bf16_keeps_8_bits(self) -> "Optimizer":
        if self.state_dtype == "bf16":
            names = [name for name, kind in OPTIMIZERS.items() if kind.stores_bf16]
            if self.name not in names:
                raise SettingError(
                    f"optimizer.name={self.name} does not support optimizer.state_dtype=bf16",
                    f"Use fp32, or optimizer.name {' or '.join(names)}.",
                    settings=("optimizer.state_dtype", "optimizer.name"),
                )
            if max(self.betas) > LARGEST_BF16_BETA:
                raise SettingError(
                    f"optimizer.betas={list(self.betas)}: optimizer.state_dtype=bf16 stores 8 significant bits. A "
                    "moment with a beta above 0.996 could not fall",
                    "Use betas up to 0.996, for example [0.9, 0.95], or state_dtype fp32.",
                    settings=("optimizer.betas", "optimizer.state_dtype"),
                )
        return self

    @model_validator(mode="after")
    def schedule_free_divides_by_beta(self) -> "Optimizer":
        if self.name == SCHEDULE_FREE and self.betas[0] == 0:
            problem = f"{self.name} divides by the first beta, the weight of the average in the point of the gradients"
            raise setting_error("optimizer.betas", list(self.betas), problem, "Use 0.9.")
        return self

    @property
    def averages(self) -> bool:
        """Return whether an average of the weights is evaluated and saved."""
        return self.ema_decay is not None or self.name == SCHEDULE_FREE
