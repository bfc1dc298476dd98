"""`stdlib-names`: functions of Python's standard library with the name blanked and four names to choose from."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from accel_train.data.builtin.stdlib import functions_of, largest_packages

if TYPE_CHECKING:
    import datasets

MOST_CHARACTERS = 600
"""Longest function of stdlib-names, in characters. A fifth of all functions are longer."""
NUM_CHOICES = 4
BLANK = "_"

_NAME = re.compile(r"(?:async )?def (\w+)")
# The last two names are a twentieth of all functions, and the first line reveals them.
_LEFT_OUT = (BLANK, "__init__", "getregentry")
_SEED = 14


def stdlib_names() -> "datasets.Dataset":
    """Return columns `text`, `endings` (four names), `label` (index of the right name) and `id`, in file order.

    `text` is a function in which `_` replaces its name everywhere. The three wrong names are drawn from the whole
    library in proportion to their frequency, so a name alone carries no signal. Texts are distinct.
    """
    import datasets

    functions: dict[str, tuple[str, str]] = {}
    for text, name, where in _functions():
        functions.setdefault(text, (name, where))
    names = [name for name, _ in functions.values()]
    generator = np.random.default_rng(_SEED)
    endings, labels = [], []
    for name in names:
        chosen = [name]
        while len(chosen) < NUM_CHOICES:
            other = names[int(generator.integers(len(names)))]
            if other not in chosen:
                chosen.append(other)
        order = generator.permutation(NUM_CHOICES).tolist()
        endings.append([chosen[place] for place in order])
        labels.append(order.index(0))
    columns = {
        "text": list(functions),
        "endings": endings,
        "label": labels,
        "id": [where for _, where in functions.values()],
    }
    return datasets.Dataset.from_dict(columns)


def _functions() -> Iterator[tuple[str, str, str]]:
    """Yield (function with its name blanked, name, place)."""
    for name, source in (file for files in largest_packages(None).values() for file in files):
        for text, line in functions_of(source):
            found = _NAME.match(text)
            if found and len(text) <= MOST_CHARACTERS and found[1] not in _LEFT_OUT:
                yield re.sub(rf"\b{found[1]}\b", BLANK, text), found[1], f"{name}:{line}"
