"""Types of a recipe's values, who set a value, and the base of all sections."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""The range of torch.manual_seed, and numpy."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Auto = Literal["auto"]


@dataclass(frozen=True)
class Origin:
    """Origin of a value: `kind`, and `where` exactly (a file and line, a flag, a variable)."""

    kind: Literal["default", "file", "command line", "environment", "python"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error, and `true` is not a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), ser_json_inf_nan="strings"
    )
