"""The settings of `data` for masked language modeling."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from accel_train.recipe.data import WindowData
from accel_train.recipe.tasks import TEXT, TaskSpec


class MaskedLMData(WindowData):
    """Settings of `data` for masked language modeling."""

    label_setting: ClassVar[str | None] = "label_column"
    label_column: str | None = "label"
    """null: texts to predict, with masks to fill. Training makes its own masks and reads no other value."""
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens to predict. Of these, 80 % are masked, 10 % replaced at random, and 10 %
    unchanged.
    """

    def unread(self) -> Mapping[str, str]:
        return {"label_column": "the masked tokens are the labels"}


SPEC = TaskSpec(
    where="accel_train.tasks.masked_lm.task:MaskedLM",
    data=MaskedLMData,
    uses=TEXT | {"loss.label_smoothing"},
    targets="targets",
    gives="tokens",
    learns="fill in masked tokens",
    takes="text",
    auto="AutoModelForMaskedLM",
    pipeline="fill-mask",
    metrics=("perplexity", "token_accuracy"),
)
