"""The table of `finetune --example`."""

import csv
import io
from collections import Counter
from pathlib import Path

from accel_train.core.files import write_atomically
from accel_train.data.builtin.stdlib import stdlib_summaries

NAME = "example.csv"
NUM_PACKAGES, MOST_ROWS = 6, 300
"""The packages of Python's library with the most sentences, and rows of each."""


def write_example() -> str:
    """Write the table into the current folder, unless it is there, and return its name.

    A row has the first sentence of a function's docstring, and the package of the function.

    Raises:
        ValueError: another file has the name.
    """
    rows = stdlib_summaries()
    largest = [package for package, _ in Counter(rows["package"]).most_common(NUM_PACKAGES)]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("description", "package"))
    for package in largest:
        sentences = [sentence for sentence, of in zip(rows["anchor"], rows["package"], strict=True) if of == package]
        writer.writerows((sentence, package) for sentence in sentences[:MOST_ROWS])
    table, path = text.getvalue().encode(), Path(NAME)
    if not path.exists():
        # Each process writes the same bytes.
        write_atomically(path, table)
    elif path.read_bytes() != table:
        raise ValueError(f"{NAME} is a file of your own; call --example in another folder, or move the file")
    return NAME
