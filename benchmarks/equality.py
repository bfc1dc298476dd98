"""Equality of every layout with one process: `python -m benchmarks.equality` measures families, cell by cell.

A cell is a family of transformers at toy size under one layout, compared by `accel_train.experiments.equality`, which
`accel-train rehearse` uses too. The cells go to a JSON file as they are measured, and a later start measures only the
missing ones. At the end, docs/models.md shows all cells of the file.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import transformers
from PIL import Image
from pydantic import ValidationError

from accel_train.core.files import write_atomically
from accel_train.experiments import equality
from accel_train.experiments.equality import Equality, Layout, Processes
from accel_train.observe.run_folder import read_metrics
from accel_train.recipe.schema import Recipe
from benchmarks import families

MOST_BYTES, VOCABULARY = 255, 320
FSDP2: Mapping[str, Any] = {"strategy": "fsdp2"}
CELLS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "DDP": (2, {}),
    "FSDP2": (2, {"parallel": FSDP2}),
    "HSDP": (4, {"parallel": {**FSDP2, "dp_shard_size": 2}}),
    "TP": (2, {"parallel": {**FSDP2, "tp_size": 2}}),
    "SP": (2, {"parallel": {"sp_size": 2}}),
    "accumulation": (1, {"batch": {"gradient_accumulation_steps": 2}}),
    "chunked loss": (1, {"loss": {"chunked": True}}),
    "compile": (1, {"precision": {"compile": True}}),
    "packed documents": (2, {"data": {"mask_documents": True}}),
    "LoRA": (2, {"model": {"lora": {"rank": 4}}}),
    "checkpointing": (1, {"precision": {"gradient_checkpointing": "blocks"}}),
    "resumed": (2, {"parallel": FSDP2}),
    "from_pretrained": (2, {"parallel": FSDP2}),
}
"""Processes and sections of the recipe, by cell. The last two also resume from the one process's checkpoint, and load
the final weights by `from_pretrained`."""
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_IDS = {f"{name}_token_id": 0 for name in ("pad", "cls", "sep")}
_TEXTS = {"task": "text-classification", "model": {"config": {"model_type": "bert", **_SMALL}}}
_T5 = {"model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4}
TASKS: Mapping[str, Mapping[str, Any]] = {
    "text-classification (bert)": _TEXTS,
    "text-classification (modernbert)": {**_TEXTS, "model": {"config": {"model_type": "modernbert", **_SMALL, **_IDS}}},
    "masked-lm (roberta)": {"task": "masked-lm", "model": {"config": {"model_type": "roberta", **_SMALL}}},
    "token-classification (electra)": {
        "task": "token-classification",
        "model": {"config": {"model_type": "electra", **_SMALL}},
    },
    "multiple-choice (bert)": {"task": "multiple-choice", "model": _TEXTS["model"]},
    "question-answering (distilbert)": {
        "task": "question-answering",
        "model": {"config": {"model_type": "distilbert", "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}},
    },
    "seq2seq (t5)": {"task": "seq2seq", "model": {"config": _T5}},
    "image-classification (vit)": {
        "task": "image-classification",
        "model": {"config": {"model_type": "vit", **_SMALL, "image_size": 16, "patch_size": 4, "num_channels": 1}},
    },
}
"""Recipes of the other tasks, by the name of their row."""
ROUNDS = "rounding"
MULTIPLY = (
    "These models amplify rounding. One process also trained three times with each initial weight changed in its last "
    "bit. Differences up to 10 times as large as in those runs count as equal. Only the first steps prove much here:"
)
HEAD = """
## Layouts

Each family is also trained under each layout, at toy size, in fp32, on CPUs, and compared with one plain process:
losses, gradient norms, and the weights after 4 steps. `accel-train rehearse` makes this comparison for your recipe. To
measure again:

```bash
python -m benchmarks.equality --save benchmarks/results/equality.json
```

Processes: 2 DDP, 2 FSDP2, 4 HSDP, 2 TP, 2 SP; 2 FSDP2 for *resumed* (from the checkpoint of one process) and for
*from_pretrained* (the final weights, loaded by transformers). The numbers are the largest relative differences. Up to
1e-5 is rounding. *Refused* layouts end with exit code 2 before the first step.
"""


def write_data(folder: Path) -> None:
    """Write small data for every task: texts of very different lengths, and images."""
    draw = np.random.default_rng(0)
    words = ["step", "loss", "token", "rank", "batch", "seed", "norm", "clip"]
    texts = [" ".join(draw.choice(words, 2 + number * number % 23)) for number in range(64)]
    rows: dict[str, Any] = {
        "causal-lm": [{"text": f"{text} {text}"} for text in texts],
        "masked-lm": [{"text": f"{text} {text}"} for text in texts],
        "text-classification": [{"text": text, "label": len(text) % 3} for text in texts],
        "token-classification": [
            {"tokens": text.split(), "tags": ["O" if len(word) > 4 else "B-X" for word in text.split()]}
            for text in texts
        ],
        "multiple-choice": [
            {"text": text, "endings": [text[:5], text[-5:], "other"], "label": len(text) % 3} for text in texts
        ],
        "question-answering": [
            {
                "id": str(index),
                "question": text[:9],
                "context": text,
                "answers": {"text": [text[4:8]], "answer_start": [4]},
            }
            for index, text in enumerate(texts)
        ],
        "seq2seq": [{"source": text, "target": text[::-1][: 5 + len(text) % 20]} for text in texts],
    }
    for task, lines in rows.items():
        (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for number in range(64):
        (folder / "images" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(draw.integers(0, 255, (16, 16), np.uint8))
        image.save(folder / "images" / str(number % 2) / f"{number}.png")


def recipe_of(row: str, cell: str, folder: Path) -> Recipe:
    """Return the recipe of a row under the layout of a cell."""
    config = {"model_type": row, **families.OTHER_LAYERS.get(row, {})}
    if row not in TASKS:  # token ids of the default configuration, which the vocabulary of bytes does not have
        default = transformers.CONFIG_MAPPING[row]().to_dict()
        ids = {name for name in default if name.endswith("token_id")} - {"bos_token_id", "eos_token_id"}
        config |= {name: 0 for name in ids if isinstance(default[name], int) and default[name] > MOST_BYTES}
        config |= dict.fromkeys((name for name in default if name.startswith("vocab_size")), VOCABULARY)
    own = TASKS.get(row, {"task": "causal-lm", "model": {"config": config}})
    sections = CELLS[cell][1]
    data: dict[str, Any] = {"train": str(folder / f"{own['task']}.jsonl"), "cache_dir": str(folder / "cache")}
    if own["task"] == "image-classification":
        data |= {"train": str(folder / "images"), "image_size": 16}
    if own["task"] in ("causal-lm", "masked-lm"):
        data["sequence_length"] = 64
    return Recipe.model_validate(
        {
            "output_dir": str(folder / "run"),
            "task": own["task"],
            "model": {**own["model"], **sections.get("model", {})},
            "data": {**data, "eval_fraction": 0.1, **sections.get("data", {})},
            "batch": {"global_batch_size": 8, **sections.get("batch", {})},
            "schedule": {"max_steps": 100},
            **{name: values for name, values in sections.items() if name not in ("model", "data", "batch")},
        }
    )


def measure(row: str, cell: str, pools: Mapping[int, Processes], folder: Path) -> Equality:
    """Return the comparison of a cell. `folder` keeps what the cells of a row share."""
    try:
        layout, plain = equality.toy_layouts(recipe_of(row, cell, folder.parent), CELLS[cell][0])
    except ValueError as error:
        if isinstance(error, ValidationError):
            error = ValueError(error.errors()[0]["msg"].removeprefix("Value error, "))
        return Equality(0, reason=" ".join(str(error).split()))
    several = pools[layout.processes]
    if cell == "resumed":
        return _resumed(layout, plain, pools[1], several, folder)
    if cell == "from_pretrained":
        return _loaded(layout, plain, pools[1], several, folder)
    found = equality.compare_layouts(layout, plain, pools[1], several, folder)
    if cell in ("TP", "SP"):  # Accelerate keeps a mesh for later runs in a process
        several.end()
    return found


def _resumed(layout: Layout, plain: Layout, one: Processes, several: Processes, folder: Path) -> Equality:
    """Resume the layout from the one process's checkpoint, and compare the rest of the two runs."""
    reference, failure = equality.train_plain(plain, one, folder)
    output = folder / "resumed"
    if failure is not None:
        return failure.verdict(layout.processes, alone=True)
    equality.keep_first_checkpoint(reference, output)
    changed = layout.recipe.model_copy(update={"output_dir": str(output)})
    if (failure := several.call(partial(equality.train_toy, changed))) is not None:
        return failure.verdict(layout.processes)
    if any(row["step"] <= equality.RESUMED_AFTER for row in read_metrics(output)):
        return Equality(layout.processes, first="the run did not resume, but started again")
    since = equality.RESUMED_AFTER
    return equality.compare_beyond_rounding(plain, one, reference, output, layout.processes, since=since)


def _loaded(layout: Layout, plain: Layout, one: Processes, several: Processes, folder: Path) -> Equality:
    """Train the layout to its end, load its `model/`, and compare what is loaded with the one process's weights."""
    reference, failure = equality.train_plain(plain, one, folder)
    output = folder / "finished"
    if failure is not None:
        return failure.verdict(layout.processes, alone=True)
    changed = layout.recipe.model_copy(update={"output_dir": str(output)})
    failure = several.call(partial(equality.train_toy, changed, finish=True))
    failure = failure or one.call(partial(load_and_save, output, layout.recipe.task))
    if failure is not None:
        return failure.verdict(layout.processes)
    return equality.compare_beyond_rounding(plain, one, reference, output, layout.processes)


def load_and_save(run: Path, task: str) -> None:
    """Replace the weights of a run's last checkpoint by those that `from_pretrained` loads, under the same names.

    Raises:
        RuntimeError: transformers misses weights in the files, or does not know some.
    """
    from safetensors.torch import load_file, save_file

    lms = {"causal-lm": "CausalLM", "masked-lm": "MaskedLM", "seq2seq": "Seq2SeqLM"}
    kind = lms.get(task) or task.replace("text", "sequence").title().replace("-", "")
    factory = getattr(transformers, f"AutoModelFor{kind}")
    model, info = factory.from_pretrained(run / "model", output_loading_info=True)
    if wrong := {name: found for name, found in info.items() if found and name.endswith("keys")}:
        raise RuntimeError(f"from_pretrained: {wrong}")
    path = run / "checkpoints" / f"step-{equality.STEPS:08d}" / "model.safetensors"
    for each in path.parent.glob("model*.safetensors"):
        names = load_file(each).keys()
        loaded = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        save_file({name: loaded[name].detach().clone() for name in names}, each)


def run(rows: Sequence[str], cells: Sequence[str], save: Path | None = None) -> dict[str, dict[str, str]]:
    """Measure the cells of rows that `save` does not have yet, and return all of them as text, by row and cell."""
    measured: dict[str, dict[str, str]] = json.loads(save.read_text()) if save and save.exists() else {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_data(folder)
        pools = {size: stack.enter_context(Processes(size)) for size in (1, 2, 4)}
        for row, cell in missing(rows, cells, measured):
            place, began = folder / row.replace(" ", "-"), time.monotonic()
            found = measure(row, cell, pools, place)
            is_left_out = (found.reason or "").startswith((equality.ALONE, equality.NO_TOY))
            text = str(found) if is_left_out else str(found).replace("not compared", "refused")
            measured.setdefault(row, {})[cell] = text
            print(f"{row:24} {cell:18} {text[:300]} ({time.monotonic() - began:.1f} s)", flush=True)
            if save is not None:
                write_atomically(save, json.dumps(measured, indent=1).encode())
            if cell == cells[-1]:
                shutil.rmtree(place, ignore_errors=True)
    return measured


def missing(
    rows: Sequence[str], cells: Sequence[str], measured: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the cells to measure."""
    for row in rows:
        for cell in cells:
            if cell not in measured.get(row, {}):
                yield row, cell


def section_of(measured: Mapping[str, Mapping[str, str]]) -> str:
    """Return the section of docs/models.md: rows with the same verdicts are one line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    left_out: list[str] = []
    multiply: list[str] = []
    for row, cells in measured.items():
        verdicts = tuple(cells.get(name, "-").split(":")[0].split(" to ")[0] for name in CELLS)
        if any(ROUNDS in each for each in cells.values()):
            multiply.append(f"`{row}`")
        if "not compared" in verdicts:
            left_out.append(f"`{row}`")
        else:
            groups.setdefault(verdicts, []).append(row)
    lines = ["| equal | refused | different | families |", "|---|---|---|---|"]
    for verdicts, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        equal, refused, different = (
            ", ".join(name for name, each in zip(CELLS, verdicts, strict=True) if each == kind)
            for kind in ("equal", "refused", "DIFFERENT")
        )
        cells_of = [cell for row in members for cell in measured[row].values()]
        shown = [float(cell.split()[2]) for cell in cells_of if cell.startswith("equal") and ROUNDS not in cell]
        worst = f" ({max(shown):.0e})" if shown else ""
        names = ", ".join(f"`{row}`" for row in members)
        lines.append(f"| {equal or '-'}{worst} | {refused or '-'} | {different or '-'} | {names} |")
    counts = f"{len(measured) - len(left_out)} rows, transformers {transformers.__version__}."
    without = "Not compared, because one process cannot train them, or they do not shrink:\n" if left_out else ""
    if multiply:
        lines += ["", fill(f"{MULTIPLY} {', '.join(multiply)}.", 118)]
    return "\n".join([HEAD, counts, "", *lines, "", without + fill(", ".join(left_out), 118)]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="model types, or names of TASKS; without any, all")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--save", type=Path, help="JSON file of the measured cells; with it, docs/models.md is written")
    arguments = parser.parse_args()
    measured = run(arguments.rows or [*families.families(), *TASKS], arguments.cells, arguments.save)
    if arguments.save is not None:
        families.write_layouts(section_of(measured))


if __name__ == "__main__":
    main()
