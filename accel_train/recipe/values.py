"""Types of a recipe's values, who set a value, and the base of all sections."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""The range of torch.manual_seed, and numpy."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Auto = Literal["auto"]


def is_url(target: str | tuple[str, ...]) -> bool:
    """Return whether a target of `log.notify` is a URL, and no command."""
    return isinstance(target, str) and re.fullmatch(r"\w+://\S*", target) is not None


def words_of(command: str | tuple[str, ...]) -> list[str]:
    """Return the words of a command that is given as a list, or as a text that is split as a shell does it, and run by none.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    return shlex.split(command) if isinstance(command, str) else list(command)


def _check_target(target: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if is_url(target):
        parts = urlsplit(str(target))
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(
                f"log.notify: {parts.scheme}://{parts.hostname or ''} must be http:// or https:// and a host, without user and password"
            )
        return target
    try:
        words = words_of(target)
    except ValueError as error:
        raise ValueError(
            f"log.notify: a command cannot be split into words ({error}); give its words as a list"
        ) from error
    if not words or not words[0]:
        raise ValueError("log.notify: a target is empty; give a URL (https://...), or a command")
    return target


NotifyTarget = Annotated[str | tuple[str, ...], AfterValidator(_check_target)]
"""A URL, or a command as a text or as a list of words."""


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
