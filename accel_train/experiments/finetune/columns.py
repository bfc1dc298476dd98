"""One column of a table: whether its cells are texts, labels, numbers, chats or images."""

from collections import Counter
from typing import Any, NamedTuple

from accel_train.data.images.images import IMAGE_SUFFIXES
from accel_train.data.labels import label_name

_MOST_CLASSES = 1000
_WORDS_OF_TEXT = 3.0
"""A column with more words in a cell, on average, is one of texts."""


class Column(NamedTuple):
    """A column of the table, with all its cells."""

    name: str
    cells: tuple[Any, ...]

    @property
    def is_strings(self) -> bool:
        """Return whether every cell is a string."""
        return all(isinstance(cell, str) for cell in self.cells)

    @property
    def mean_words(self) -> float:
        """Return the words of a cell, on average."""
        return sum(len(str(cell).split()) for cell in self.cells) / len(self.cells)

    @property
    def classes(self) -> Counter[str]:
        """Return how often each class occurs, where every cell is the name or number of one, or a list of them; else nothing."""
        names: list[str | None] = []
        for cell in self.cells:
            names += map(label_name, cell) if isinstance(cell, list) else [label_name(cell)]
        if None in names or "" in names:
            return Counter()
        return Counter(name for name in names if name is not None)

    @property
    def is_decimal(self) -> bool:
        """Return whether every cell is a number, and one at least has decimals."""
        try:
            numbers = [float(cell) for cell in self.cells if not isinstance(cell, bool)]
        except (TypeError, ValueError):
            return False
        is_float = any(isinstance(cell, float) for cell in self.cells)
        return len(numbers) == len(self.cells) and (is_float or any(number % 1 for number in numbers))

    @property
    def is_text(self) -> bool:
        """Return whether the cells are texts by their length."""
        return self.is_strings and self.mean_words >= _WORDS_OF_TEXT and len(set(self.cells)) > 1

    @property
    def may_be_labels(self) -> bool:
        """Return whether few values come again and again."""
        if self.is_text or self.is_decimal:
            return False
        return 2 <= len(self.classes) <= min(_MOST_CLASSES, len(self.cells) // 2)

    @property
    def is_chat(self) -> bool:
        """Return whether the cells are lists of messages."""
        first = self.cells[0]
        return isinstance(first, list) and bool(first) and all(isinstance(each, dict) for each in first)

    @property
    def is_image(self) -> bool:
        """Return whether the cells are names of image files, or what `datasets` keeps of an image."""
        first = self.cells[0]
        if isinstance(first, dict):
            return "bytes" in first and "path" in first
        return self.is_strings and all(cell.lower().endswith(IMAGE_SUFFIXES) for cell in self.cells)
