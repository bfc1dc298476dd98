"""Equality of every layout with one process: `python -m benchmarks.equality` measures families, cell by cell.

A cell is a family of transformers at toy size under one layout, compared by `accel_train.experiments.equality`, which
`accel-train rehearse` uses too. The cells go to a JSON file as they are measured, and a later start measures only the
missing ones. At the end, docs/models.md shows all cells of the file.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import transformers
from PIL import Image
from pydantic import ValidationError

from accel_train.checkpoint.store import folder_of
from accel_train.core.files import write_atomically
from accel_train.experiments import equality
from accel_train.experiments.equality import Equality, Layout, failed
from accel_train.experiments.processes import Processes
from accel_train.model.pretrained import without_pooler
from accel_train.observe.run_folder import read_metrics
from accel_train.recipe.optimizer import Optimizer
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TASKS as BUILT_IN
from accel_train.training.train import train
from benchmarks import doubled, families

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
    "AdamW": (2, {"parallel": FSDP2}),
}
"""Processes and sections of the recipe, by cell. *resumed* and *from_pretrained* also resume from the one process's
checkpoint, and load the final weights by `from_pretrained`."""
AMPLIFIERS = ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "qwen3_5_text")
"""Families that amplify rounding so much that fp32 proves nothing after the first steps. They are compared in fp64."""
SMALL_RATE = 5e-4
"""Learning rate in fp64. Rounding is then far below a change of the weights, even in models that amplify it."""
IN_DOUBLE = "in fp64"
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
    "semantic-segmentation (segformer)": {
        "task": "semantic-segmentation",
        "parallel": {"sync_batch_norm": True},
        "model": {
            "config": {
                "model_type": "segformer",
                "hidden_sizes": [8, 8, 8, 8],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 1, 1, 1],
                "decoder_hidden_size": 8,
            }
        },
    },
    "object-detection (yolos)": {
        "task": "object-detection",
        "model": {
            "config": {
                "model_type": "yolos",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "image_size": [64, 64],
                "patch_size": 16,
                "num_detection_tokens": 7,
            }
        },
    },
    "sentence-embedding (bert)": {"task": "sentence-embedding", "model": _TEXTS["model"]},
}
"""Recipes of the other tasks, by the name of their row."""
ROUNDS = "rounding"
AMPLIFY = (
    "These families amplify rounding, a thousand times a step and more. They are compared in fp64, with a learning "
    f"rate of {SMALL_RATE:g}:"
)
TESTED = ("engine", "model", "optim", "parallel", "tasks", "training")
"""Packages that a cell tests. A row that is older than their last change is marked."""
HEAD = """
## Layouts

Each family is also trained under each layout, at toy size, in fp32, on CPUs, and compared with one plain process:
losses, gradient norms, and the weights after 4 steps. `accel-train rehearse` makes this comparison for your recipe. To
measure again:

```bash
python -m benchmarks.equality --save benchmarks/results/equality.json
```

Processes: 2 DDP, 2 FSDP2, 4 HSDP, 2 TP, 2 SP; 2 FSDP2 for *resumed* (from the checkpoint of one process) and for
*from_pretrained* (the final weights, loaded by transformers); 2 FSDP2 in fp64 for *AdamW*, because in fp32 AdamW turns
the rounding of a gradient that is 0 into a whole update. The numbers are the largest relative differences. Up to 1e-5
is rounding. *Refused* layouts end with exit code 2 before the first step. In bf16, every task is compared under DDP,
FSDP2, and HSDP by `tests/parallel/test_every_task.py`. Dropout is off: its masks depend on the process.
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
        "sentence-embedding": [{"anchor": text, "positive": text[::-1]} for text in texts],
        "seq2seq": [{"source": text, "target": text[::-1][: 5 + len(text) % 20]} for text in texts],
    }
    for task, lines in rows.items():
        (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for number in range(64):
        (folder / "images" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(draw.integers(0, 255, (16, 16), np.uint8))
        image.save(folder / "images" / str(number % 2) / f"{number}.png")
    (folder / "boxes").mkdir()
    lines = []
    for number in range(64):
        Image.fromarray(draw.integers(0, 255, (64, 64, 3), np.uint8)).save(folder / "boxes" / f"{number}.png")
        left, top, width, height = (int(each) for each in (*draw.integers(0, 30, 2), *draw.integers(8, 30, 2)))
        objects = {"bbox": [[left, top, width, height]], "category": [number % 2]}
        lines.append(json.dumps({"file_name": f"{number}.png", "objects": objects}))
    (folder / "boxes" / "metadata.jsonl").write_text("\n".join(lines))


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
    if own["task"] == "object-detection":
        data |= {"train": str(folder / "boxes"), "image_size": 64}
    if own["task"] == "semantic-segmentation":
        data |= {"train": "digit-scenes", "image_size": 32}
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
            "parallel": {**own.get("parallel", {}), **sections.get("parallel", {})},
        }
    )


def measure(row: str, cell: str, pools: Mapping[int, Processes], folder: Path, *, is_double: bool = False) -> Equality:
    """Return the comparison of a cell. `folder` keeps what the cells of a row share.

    With `is_double`, the processes compute in fp64.
    """
    try:
        layout, plain = equality.toy_layouts(recipe_of(row, cell, folder.parent), CELLS[cell][0])
    except ValueError as error:
        if isinstance(error, ValidationError):
            error = ValueError(error.errors()[0]["msg"].removeprefix("Value error, "))
        return Equality(0, reason=" ".join(str(error).split()))
    several = pools[layout.processes]
    if is_double:
        optimizer = Optimizer(name="adamw" if cell == "AdamW" else "sgd", learning_rate=SMALL_RATE)
        layout, plain = (
            each._replace(recipe=each.recipe.model_copy(update={"optimizer": optimizer})) for each in (layout, plain)
        )
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
        return failed(failure, layout.processes, alone=True)
    first, copy = (folder_of(run / "checkpoints", equality.RESUMED_AFTER) for run in (reference, output))
    shutil.copytree(first, copy)
    changed = layout.recipe.model_copy(update={"output_dir": str(output)})
    if (failure := several.call(partial(equality.train_toy, changed))) is not None:
        return failed(failure, layout.processes)
    if any(row["step"] <= equality.RESUMED_AFTER for row in read_metrics(output)):
        return Equality(layout.processes, first="the run did not resume, but started again")
    since = equality.RESUMED_AFTER
    return equality.compare_beyond_rounding(plain, one, reference, output, layout.processes, since=since)


def _loaded(layout: Layout, plain: Layout, one: Processes, several: Processes, folder: Path) -> Equality:
    """Train the layout to its end, load its `model/`, and compare what is loaded with the one process's weights."""
    reference, failure = equality.train_plain(plain, one, folder)
    output = folder / "finished"
    if failure is not None:
        return failed(failure, layout.processes, alone=True)
    changed = layout.recipe.model_copy(update={"output_dir": str(output)})
    failure = several.call(partial(train, changed))
    failure = failure or one.call(partial(load_and_save, output, layout.recipe.task))
    if failure is not None:
        return failed(failure, layout.processes)
    return equality.compare_beyond_rounding(plain, one, reference, output, layout.processes)


def load_and_save(run: Path, task: str) -> None:
    """Replace the weights of a run's last checkpoint by those that `from_pretrained` loads, under the same names.

    Raises:
        RuntimeError: transformers misses weights in the files, or does not know some.
    """
    from safetensors.torch import load_file, save_file

    factory = getattr(transformers, BUILT_IN[task].auto)
    own = transformers.AutoConfig.from_pretrained(run / "model")
    # An embedding does not use the pooler, so it is not saved.
    others = without_pooler(factory._model_mapping[type(own)]) if BUILT_IN[task].gives == "vector" else {}
    model, info = factory.from_pretrained(run / "model", output_loading_info=True, **others)
    if wrong := {name: found for name, found in info.items() if found and name.endswith("keys")}:
        raise RuntimeError(f"from_pretrained: {wrong}")
    path = run / "checkpoints" / f"step-{equality.STEPS:08d}" / "model.safetensors"
    for each in path.parent.glob("model*.safetensors"):
        names = load_file(each).keys()
        loaded = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        save_file({name: loaded[name].detach().clone() for name in names}, each)


def run(rows: Sequence[str], cells: Sequence[str], save: Path | None = None) -> dict[str, dict[str, str]]:
    """Measure the cells of rows that `save` does not have yet, and return all of them as text, by row and cell."""
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True).stdout.strip()
    measured: dict[str, dict[str, str]] = json.loads(save.read_text()) if save and save.exists() else {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_data(folder)
        pools = {
            begin: {size: stack.enter_context(Processes(size, begin)) for size in (1, 2, 4)}
            for begin in (None, doubled.begin)
        }
        for row, cell in missing(rows, cells, measured):
            place, began = folder / row.replace(" ", "-"), time.monotonic()
            # In fp32, AdamW turns the rounding of a gradient that is 0 into a whole update.
            is_double = cell == "AdamW" or row in AMPLIFIERS
            place = place.with_name(f"{place.name}-fp64") if is_double else place
            found = measure(row, cell, pools[doubled.begin if is_double else None], place, is_double=is_double)
            is_left_out = (found.reason or "").startswith((equality.ALONE, equality.NO_TOY))
            text = str(found) if is_left_out else str(found).replace("not compared", "refused")
            text += f" {IN_DOUBLE}" if is_double and text.startswith("equal") else ""
            measured.setdefault(row, {})[cell] = text
            # A row is as old as its first cell.
            measured[row].setdefault("commit", commit)
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
    for row, cells in measured.items():
        # Few rows are measured with AdamW, so a sentence names them.
        verdicts = tuple(cells.get(name, "-").split(":")[0].split(" to ")[0] for name in CELLS if name != "AdamW")
        if "not compared" in verdicts[:1]:
            left_out.append(f"`{row}`")
        else:
            groups.setdefault((*verdicts, str(row in AMPLIFIERS), str(ROUNDS in str(cells))), []).append(row)
    lines = ["| equal | refused | different | families |", "|---|---|---|---|"]
    for verdicts, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        equal, refused, different = (
            ", ".join(name for name, each in zip(CELLS, verdicts, strict=False) if each == kind)
            for kind in ("equal", "refused", "DIFFERENT")
        )
        worst = _worst(cell for row in members for name, cell in measured[row].items() if name != "AdamW")
        names = ", ".join(f"`{row}`" + "*" * (row in AMPLIFIERS) for row in members)
        lines.append(f"| {equal or '-'}{worst} | {refused or '-'} | {different or '-'} | {names} |")
    by_commit = Counter(cells["commit"] for cells in measured.values())
    dated = [f"{number} at `{commit}`{_changed_since(commit)}" for commit, number in by_commit.most_common()]
    counts = (
        f"{len(measured) - len(left_out)} rows, transformers {transformers.__version__}. Measured: {', '.join(dated)}."
    )
    without = "Not compared, because one process cannot train them, or they do not shrink:\n" if left_out else ""
    adamw = {row: cells["AdamW"] for row, cells in measured.items() if cells.get("AdamW", "").startswith("equal")}
    named = ", ".join(f"`{row}`" for row in adamw)
    alike = fill(f"AdamW, 2 FSDP2 processes, in fp64: equal{_worst(adamw.values())} for {named}.", 118)
    marked = fill(f"\\* {AMPLIFY} {', '.join(f'`{row}`' for row in AMPLIFIERS)}.", 118)
    others = ", ".join(f"`{row}`" for row, cells in measured.items() if ROUNDS in str(cells) and row not in AMPLIFIERS)
    if others:
        why = "also amplify rounding, and cannot be computed in fp64. Up to 10 times the change by rounding is equal."
        marked += "\n\n" + fill(f"{others} {why}", 118)
    return (
        "\n".join(
            [HEAD, fill(counts, 118), "", *lines, "", marked, "", alike, "", without + fill(", ".join(left_out), 118)]
        ).rstrip()
        + "\n"
    )


def _worst(cells: Iterable[str]) -> str:
    """Return the largest difference of equal cells, in parentheses, or an empty string."""
    found = [float(cell.split()[2].rstrip(",")) for cell in cells if cell.startswith("equal")]
    return f" ({max(found):.0e})" if found else ""


def _changed_since(commit: str) -> str:
    """Return a note if the code that a cell tests has changed since it was measured."""
    paths = [f"accel_train/{name}" for name in TESTED]
    found = subprocess.run(["git", "diff", "--stat", commit, "HEAD", "--", *paths], capture_output=True, text=True)
    return " (the code has changed since)" if found.stdout else ""


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
