"""Which families of causal language models train exactly: `python -m benchmarks.families` writes docs/models.md.

Each family of transformers is built at toy size from its default configuration, and probed the way the start of a run
probes its recipe (`accel_train/tasks/causal_lm/probe.py`).
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from accel_train.recipe.schema import Recipe
from accel_train.tasks.causal_lm.packing import can_keep_rows_apart
from accel_train.tasks.causal_lm.probe import CHECKPOINTING, CHUNKED, DOCUMENTS, ROWS, Proof, examine
from accel_train.tasks.causal_lm.probe import FORWARD as FORWARD_CHECK
from accel_train.tasks.causal_lm.task import FORWARD

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
OTHER_LAYERS: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
}
"""Configurations with more kinds of layers than the default."""
LAYOUTS = "\n## Layouts\n"
"""Heading of the section that `benchmarks.equality` writes."""
HEAD = """# Models

Which causal language models train exactly, family by family. To measure the table again:

```bash
python -m benchmarks.families
```

A run probes its own model before it reads data: the recipe's configuration at toy size, in fp32, on a CPU. It compares
the logits of packed documents with transformers' own forward of each document alone. It compares losses and gradients
with the plain ones. The start prints the result in its line `probe`. A setting that changes the result ends the run
with exit code 2, and the message names the layer.

- **Packed documents**: `data.mask_documents`. Layers that carry a state or convolve over positions pass values to the
  next document. For these models set `data.mask_documents` to false; `accel-train finetune` does so by itself.
- **Packed rows**: prompts and chats. *packed*: rows share windows. *alone*: each row is a sample, padded on the right.
- **Chunked loss**: `loss.chunked`. *whole*: the logits are the model's own, and `loss.chunked: true` is refused.
- **Checkpointing**: `precision.gradient_checkpointing: blocks`.

A family that *sees later tokens* is built for another task. The start refuses it, unless `model.config` has
`is_decoder: true`.

Cells have the largest difference in the families of the row, as a share of the largest logit or gradient. Up to 1e-5
is rounding. Where transformers' own forward rounds more (against fp64, or with longer rows), up to 30 times that is
rounding, and 1e-4 at most. A difference must show with two sets of random weights.
"""


def recipe_of(model_type: str) -> Recipe:
    """Return a recipe that uses everything that the table is about."""
    return Recipe.model_validate(
        {
            "output_dir": "runs/families",
            "model": {"config": {"model_type": model_type, **OTHER_LAYERS.get(model_type, {})}},
            "tokenizer": "bytes",
            "data": {"train": ".", "sequence_length": 64, "mask_documents": True},
            "precision": {"gradient_checkpointing": "blocks"},
            "schedule": {"max_steps": 1},
        }
    )


def prove_family(model_type: str) -> Proof:
    """Return what the probe measures on a family."""
    config = CONFIG_MAPPING[model_type](**OTHER_LAYERS.get(model_type, {}))
    return examine(recipe_of(model_type), config, FORWARD, (DOCUMENTS, ROWS, FORWARD_CHECK, CHUNKED, CHECKPOINTING))


def cells_of(proof: Proof, *, packs_rows: bool) -> list[str]:
    """Return the cells of a family: packed documents, packed rows, chunked loss, checkpointing."""
    cells = []
    for check in (DOCUMENTS, ROWS, CHUNKED, CHECKPOINTING):
        way = ("packed, " if packs_rows else "alone, ") if check == ROWS else ""
        if proof.looks_ahead:
            cells.append("refused: sees later tokens")
        elif proof.holds(check):
            cells.append(f"{way}equal ({proof.differences[check]:.0e})")
        elif check in proof.differences:
            layer = f"{proof.layer}, " if check == DOCUMENTS and proof.layer else ""
            cells.append(f"refused: {layer}{proof.differences[check]:.0e}")
        else:
            cells.append("whole" if check == CHUNKED and check not in proof.refused else "refused")
    return cells


def row_of(model_type: str) -> str | None:
    """Return the row of a family in the table; None where transformers cannot run its default configuration."""
    try:
        config = CONFIG_MAPPING[model_type](**OTHER_LAYERS.get(model_type, {}))
    except ValueError:
        return None
    proof, recipe = prove_family(model_type), recipe_of(model_type)
    if not proof.differences:
        return None
    cells = cells_of(proof, packs_rows=can_keep_rows_apart(recipe, config).value)
    return f"| {' | '.join([f'`{model_type}`', *cells])} |"


def families() -> list[str]:
    """Return the model types of transformers with a causal language model of text alone."""
    return sorted(
        name
        for name, kind in CONFIG_MAPPING.items()
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(kind, "sub_configs", None)
    )


def verdict(cell: str) -> str:
    """Return a cell without its difference and its layer."""
    return re.sub(r":.*| \(.*", "", cell) if "sees later" not in cell else cell


def page_of(rows: Sequence[str], left_out: Sequence[str]) -> str:
    """Return the page: families with the same verdicts share a row. `left_out` are families without verdicts."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for row in rows:
        name, *cells = row.strip("| ").split(" | ")
        groups.setdefault(tuple(map(verdict, cells)), []).append([name, *cells])
    lines = []
    for verdicts, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        shown = [_worst(each, [cells[number] for cells in members]) for number, each in enumerate(verdicts, start=1)]
        layers = (re.search(r"refused: ([A-Za-z]\w+),", cells[1]) for cells in members)
        named = [name if layer is None else f"{name} ({layer[1]})" for (name, *_), layer in zip(members, layers)]
        lines.append(f"| {' | '.join([*shown, ', '.join(named)])} |")
    head = "| packed documents | packed rows | chunked loss | checkpointing | families |\n|---|---|---|---|---|"
    equal = sum("refused" not in row.split("|")[2] for row in rows)
    counts = f"{len(rows)} families, transformers {transformers.__version__}: {equal} keep packed documents apart."
    others = fill(", ".join(f"`{name}`" for name in left_out), 118)
    without = f"Not in the table, because the default configuration does not run or does not shrink:\n{others}."
    return "\n".join([HEAD, counts, "", head, *lines, "", without]) + "\n"


def write_layouts(section: str) -> None:
    """Replace the section of docs/models.md that `benchmarks.equality` measures."""
    PAGE.write_text(PAGE.read_text().partition(LAYOUTS)[0] + section)


def _worst(shown: str, cells: Sequence[str]) -> str:
    """Return a verdict with the largest difference of its families, if they are equal."""
    found = [float(found[1]) for cell in cells if (found := re.search(r"\((.*)\)", cell))]
    return f"{shown} ({max(found):.0e})" if found else shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "families", nargs="*", help="print the rows of these families; without any, write docs/models.md"
    )
    named = parser.parse_args().families
    rows = {name: row_of(name) for name in named or families()}
    kept = [row for row in rows.values() if row is not None]
    print("\n".join(kept))
    if not named:
        _, mark, section = PAGE.read_text().partition(LAYOUTS)
        PAGE.write_text(page_of(kept, [name for name, row in rows.items() if row is None]) + mark + section)


if __name__ == "__main__":
    main()
