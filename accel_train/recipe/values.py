"""What every section of a recipe is made of: the kinds of numbers, and who set a value."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""What torch.manual_seed takes, and numpy."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Auto = Literal["auto"]


def path_problem(text: str) -> str | None:
    """What is wrong with the name of a place to write to, as the end of a sentence; None where nothing is."""
    if not text.strip():
        return "is blank: give a path (is a shell variable not set?)"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return "is no path: only folders of this machine's file systems can be written to; mount the storage, or copy there later"
    return None


@dataclass(frozen=True)
class Origin:
    """Who set a value: `kind`, and `where` exactly (a file and line, a flag, a variable)."""

    kind: Literal["default", "file", "command line", "environment", "python"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error, and `true` is not a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), ser_json_inf_nan="strings"
    )
