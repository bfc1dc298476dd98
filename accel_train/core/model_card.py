"""Model cards: the README.md next to saved weights. A later step replaces a section by its name, not its sentences."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from accel_train.core.redaction import redact_text

FILE = "README.md"
FOLDER = "path/of/this/folder"
"""Stands for the model's folder in the code of a card. A push writes the name of the repository instead."""
OF_TENSORS = f'from safetensors.torch import load_file\n\nweights = load_file("{FOLDER}/model.safetensors")'
"""Code that loads the weights of any module."""
USE, SCORES = "Use", "Scores"
"""Names of sections."""
_SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)


def of_transformers(name: str, module: str = "transformers", more: str = "") -> str:
    """Return code that loads a model by `from_pretrained` of a class, with `more` arguments."""
    return f'from {module} import {name}\n\nmodel = {name}.from_pretrained("{FOLDER}"{more})'


class Use(NamedTuple):
    """The parts of a model card that depend on the task."""

    code: str
    """Python lines that load the model from `FOLDER` and use it."""
    facts: Sequence[str] = ()
    """Lines about input and output of the model."""
    samples: str = "samples"
    """Name of the training samples, in the plural."""


@dataclass(frozen=True)
class Card:
    """A model card in parts. `str` writes it, and `parse` reads it."""

    metadata: str
    """YAML block that the Hub reads; empty without one."""
    about: str
    """Text before the first section."""
    sections: tuple[tuple[str, str], ...]
    """Name and text of each section."""

    @classmethod
    def parse(cls, text: str) -> "Card":
        """Return the parts of a card."""
        metadata = ""
        if text.startswith("---\n") and "\n---\n" in text:
            metadata, _, text = text.removeprefix("---\n").partition("\n---\n")
        about, *rest = _SECTION.split(text)
        return cls(metadata, about, tuple(zip(rest[::2], rest[1::2], strict=True)))

    def __str__(self) -> str:
        head = f"---\n{self.metadata}\n---\n" if self.metadata else ""
        parts = [head, self.about, *(f"## {name}\n{text}" for name, text in self.sections)]
        return redact_text("".join(parts).rstrip() + "\n")

    def with_section(self, name: str, text: str) -> "Card":
        """Return the card with this text in a section, added at the end if it is new; an empty text removes it."""
        found = [(each, text if each == name else old) for each, old in self.sections]
        if name not in dict(found):
            found.append((name, text))
        sections = tuple((each, f"\n{kept.strip()}\n\n") for each, kept in found if kept)
        return replace(self, about=f"\n{self.about.strip()}\n\n", sections=sections)


def new_card(
    title: str,
    kind: str,
    learns: str,
    use: Use,
    sources: str | None,
    num_train: int | None,
    num_eval: int | None,
    library: str = "",
    pipeline: str = "",
    tags: Sequence[str] = (),
) -> Card:
    """Return the card of a model that was just trained.

    Args:
        kind: type of the model, in its own code.
        learns: what the model does, after the word "to"; empty if unknown.
        sources: names of the training data.
        num_train, num_eval: numbers of samples. None: not known.
        library: Hub name of the library that loads the model.
        pipeline: Hub name of the task.
        tags: further tags on the Hub.
    """
    about = f"A `{kind}` model, trained with accel_train" + (f" to {learns}" if learns else "")
    if num_train is not None:
        about += f", on {num_train:,} {use.samples}, evaluated on {num_eval or 0:,} others"
    lines = [*use.facts, *([f"Data: {sources}"] if sources is not None else [])]
    described = "".join(f"- {line}\n" for line in lines)
    known = {"library_name": library, "pipeline_tag": pipeline, "tags": f"[{', '.join(('accel_train', *tags))}]"}
    return Card(
        "\n".join(f"{name}: {value}" for name, value in known.items() if value),
        f"\n# {title}\n\n{about}.\n\n" + (f"{described}\n" if lines else ""),
        (
            (USE, f"\n```python\n{use.code.strip()}\n```\n\n"),
            (SCORES, "\nThe scores are in `summary.json` and `report.html` of the run folder.\n"),
        ),
    )
