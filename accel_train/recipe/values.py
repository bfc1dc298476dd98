"""Types of a recipe's values, the origin of a value, and the base class of all sections."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from accel_train.core.errors import SettingError
from accel_train.core.format import LARGEST_COUNT
from accel_train.core.redaction import REDACTED

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""Range of torch.manual_seed, and of numpy."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Length = Annotated[float, Field(gt=0, le=LARGEST_COUNT, allow_inf_nan=False)]
"""Length in seconds or epochs."""
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
Place = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, or a name on the hub. `~` is the home folder."""


def _check_target(target: Any) -> Any:
    """Return a target of `log.notify` if it is a URL, `$NAME`, or redacted.

    Errors do not show the target, because it may hold credentials.
    """
    if target == REDACTED or (isinstance(target, str) and re.fullmatch(r"\$\{?\w+\}?", target)):
        return target
    parts = urlsplit(target) if isinstance(target, str) and re.fullmatch(r"\w+://\S*", target) else None
    if parts is None:
        raise SettingError(
            "a target is not a URL",
            "Give a webhook's address (https://...), or $NAME of a variable that holds one. To run a command, call it "
            "in your shell after `accel-train run`, by its exit code",
            "log.notify",
            ("log.notify",),
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        address = f"{parts.scheme}://{parts.hostname or ''}"
        problem = f"{address} must be http:// or https:// with a host, and without user and password"
        raise SettingError(problem, at="log.notify", settings=("log.notify",))
    return target


NotifyTarget = Annotated[str, BeforeValidator(_check_target)]
"""A URL, or `$NAME` of a variable that holds a URL."""


@dataclass(frozen=True)
class Origin:
    """Origin of a value: its `kind`, and its exact place `where` (a file and line, a flag, a variable)."""

    kind: Literal["default", "file", "command line", "environment", "python"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


class Section(BaseModel):
    """A frozen group of settings. An unknown key is an error, and `true` is not a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), ser_json_inf_nan="strings"
    )

    def unread(self) -> Mapping[str, str]:
        """Return settings of this section that have no effect with the others, each with the reason.

        A training refuses them unless they are defaults. The recipe of a finished run may have them.
        """
        return {}


def value_of(section: Section, name: str) -> Any:
    """Return the value of a setting or section by its dotted name."""
    value: Any = section
    for field in name.split("."):
        # Sections inside the `data` of a custom task are mappings until the task reads them.
        value = value.get(field) if isinstance(value, Mapping) else getattr(value, field)
    return value
