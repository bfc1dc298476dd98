"""The notebooks with their outputs: run them, keep what is the same on every machine, and compare.

    make notebooks     # run all of them, and store what they print and draw

A number agrees within 5 %, or 0.05 where it is small: training on another processor rounds otherwise. A picture agrees
in its
size. Of a cell with the tag `varies` (predictions, a text that a model wrote) only the kinds of outputs are compared,
and so of
all cells where Python's minor version is another one: some notebooks train on its standard library. Times, rates,
paths, what
follows from the machine's cores, and standard error are neither stored nor compared.
"""

import base64
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "recipes" / "notebooks"
TOLERANCE = 0.05
_MOST_HTML = 20_000
"""Characters: the page of a report is longer, and is not stored."""
_MASKS = (
    (re.escape(str(Path(json.__file__).parents[1])), "/usr/lib/python3"),
    (re.escape(str(REPOSITORY)), "/accel_train"),
    (r"(?:/[\w.+~-]+)+/((?:[a-z]+-)+)[a-z0-9_]{8}(?![\w-])", r"/tmp/\1..."),  # of tempfile.mkdtemp
    (r"\d[\d.,]*[kMG]? ?(\w+/s)", r"... \1"),
    (r"('train_(?:runtime|\w+_per_second)': )[\d.]+", r"\1..."),
    (r"(?m)^((?:malloc|threads|data\.num_workers) +)\S.*", r"\1..."),
    (r"(?:\d+:)+\d\d left|\? left", "... left"),
    (r"(\[\d+/\d+ )(?:\d+:)+\d\d", r"\1..."),  # transformers' bar
    (r"(?m)^step \d+: evaluating, .*\n", ""),  # only where it takes long
    (r"\(\d+m \d+s\)|\(\d+s\)", "(...)"),
)
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def run_notebook(path: Path) -> Any:
    """Return the notebook after it ran from top to bottom, without a network or a GPU, with the outputs that are
    stored.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [_stored(output) for output in outputs]
    return notebook


def _stored(output: Any) -> Any:
    output.get("metadata", {}).clear()
    if "text" in output:
        output.text = masked(output.text)
    data = output.get("data", {})
    for kind in [kind for kind in data if not (kind.startswith("text/") or kind == "image/png")]:
        del data[kind]
    for kind, value in list(data.items()):
        if kind == "image/png":
            small = io.BytesIO()
            _picture(value).convert("RGB").quantize(64).save(small, "png", optimize=True)
            data[kind] = base64.b64encode(small.getvalue()).decode()
        elif len(value) > _MOST_HTML:
            del data[kind]
        else:
            data[kind] = masked(value)
    return output


def masked(text: str) -> str:
    """Return a text without what differs from run to run or from machine to machine: paths, times, rates."""
    for pattern, replacement in _MASKS:
        text = re.sub(pattern, replacement, text)
    return text


def differences(stored: Any, fresh: Any) -> list[str]:
    """Return a line for each output that is not what is stored, with its cell."""
    lines = []
    minors = [
        notebook.metadata.get("language_info", {}).get("version", "").split(".")[:2] for notebook in (stored, fresh)
    ]
    for number, (was, now) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        if was.cell_type != "code":
            continue
        pair = [[part for output in cell.outputs for part in _parts(output)] for cell in (was, now)]
        if [kind for kind, _ in pair[0]] != [kind for kind, _ in pair[1]]:
            lines.append(f"cell {number}: stored {[kind for kind, _ in pair[0]]}, now {[kind for kind, _ in pair[1]]}")
        elif minors[0] == minors[1] and "varies" not in was.metadata.get("tags", ()):
            lines += [
                f"cell {number}, {kind}: stored {before!r}, now {after!r}"
                for (kind, one), (_, other) in zip(*pair)
                for before, after in _first_difference(kind, one, other)
            ]
    return lines


def _parts(output: Any) -> list[tuple[str, str]]:
    """The kind and the content of each part of an output; HTML has the same numbers as the text beside it."""
    if "text" in output:
        return [("text", output.text)]
    return sorted((kind, value) for kind, value in output.data.items() if kind != "text/html")


def _first_difference(kind: str, stored: str, fresh: str) -> list[tuple[Any, Any]]:
    if kind == "image/png":
        sizes = [_picture(each).size for each in (stored, fresh)]
        is_near = all(math.isclose(*edges, rel_tol=TOLERANCE) for edges in zip(*sizes))
        return [] if is_near else [(sizes[0], sizes[1])]
    lines = [[" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (stored, fresh)]
    if len(lines[0]) != len(lines[1]):
        return [(f"{len(lines[0])} lines", f"{len(lines[1])} lines")]
    return [pair for pair in zip(*lines) if not _agree(*pair)][:1]


def _agree(stored: str, fresh: str) -> bool:
    """Return whether two lines have the same words, and numbers that are close."""
    if _NUMBER.sub("#", stored) != _NUMBER.sub("#", fresh):
        return False
    numbers = [[float(each.replace(",", "")) for each in _NUMBER.findall(text)] for text in (stored, fresh)]
    return all(math.isclose(*pair, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for pair in zip(*numbers))


def _picture(encoded: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def main(names: list[str]) -> None:
    """Run notebooks, all where none is named, and store their outputs."""
    for path in sorted(FOLDER.rglob("*.ipynb")):
        if not names or path.stem in names:
            print(f"{path.relative_to(REPOSITORY)} ...", flush=True)
            nbformat.write(run_notebook(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
