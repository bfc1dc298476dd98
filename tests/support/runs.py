"""How the tests run the program: recipes to write, real processes to train them, and what these have left."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file

from accel_train.core.errors import SettingError
from accel_train.data.sources import resolve_sources
from accel_train.recipe.loader import Recipe
from accel_train.recipe.tasks import TASKS, data_section
from tests.support.processes import run_forked

TESTS = Path(__file__).parent.parent
REPOSITORY = TESTS.parent
Settings = dict[str, Any]
"""Settings by name, nested as in a recipe."""
Capture = pytest.CaptureFixture[str]
"""What a command prints."""

TINY_MODEL = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_corpus(folder: Path, num_documents: int = 40) -> Path:
    """Documents of very different lengths, as a jsonl file; returns its path."""
    path = folder / "corpus.jsonl"
    words = ["step", "loss", "token", "rank", "batch", "seed", "norm", "clip", "mean", "sum"]
    with path.open("w") as file:
        for number in range(num_documents):
            length = 5 + (number * number * 7) % 160
            text = " ".join(words[(number * 3 + i * i) % len(words)] + str(i % 7) for i in range(length))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def write_lines(path: Path | str, *lines: str) -> Path:
    """Write the lines; returns the path."""
    Path(path).write_text("".join(f"{line}\n" for line in lines))
    return Path(path)


def write_yaml(path: Path | str, value: Any) -> Path:
    """Write a recipe, or another value; returns the path."""
    Path(path).write_text(yaml.safe_dump(value))
    return Path(path)


def write_jsonl(path: Path | str, rows: Iterable[Any]) -> Path:
    """Write a row a line; returns the path."""
    return write_lines(path, *map(json.dumps, rows))


def write_file(name: str | Path, content: str | bytes) -> str:
    """Write a file and the folders above it; returns its name."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return str(name)


def write_rows(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Write rows as csv, parquet, json, or jsonl, by the suffix; returns the name."""
    path = Path(name)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    return name


def recipe_dict(folder: Path, *, windows: bool = True, **sections: Any) -> Settings:
    """A small complete recipe; `sections` are merged into it. `windows` says whether a task of its own reads them."""
    recipe: Settings = {
        "task": "tests.support.tasks.probe:ProbeTask",
        "output_dir": str(folder / "run"),
        "seed": 1,
        "model": {"config": dict(TINY_MODEL)},
        "tokenizer": "bytes",
        "data": {
            "train": str(folder / "corpus.jsonl"),
            "eval_fraction": 0.1,
            "sequence_length": 32,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_batch_size": 8},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"max_steps": 12},
        "evaluate": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1, "progress": False},
    }
    for name, value in sections.items():
        recipe[name] = {**recipe[name], **value} if isinstance(recipe.get(name), dict) and name != "options" else value
    name = recipe["task"]
    if (name in TASKS and "sequence_length" not in data_section(name).model_fields) or not windows:
        del recipe["data"]["sequence_length"]
    if "tokenizer" not in sections and ("tokenizer" not in TASKS[name].uses if name in TASKS else not windows):
        del recipe["tokenizer"]
    return recipe


def tiny_recipe(folder: Path, **sections: Any) -> Recipe:
    """`recipe_dict` as a recipe."""
    return Recipe.model_validate(recipe_dict(folder, **sections))


def write_recipe_file(folder: Path, **sections: Any) -> Path:
    """`recipe_dict` as a file; returns its path."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_dict(folder, **sections)))
    return path


def write_base(folder: Path, config: Settings | None = None, seed: int = 5) -> Path:
    """Random weights of a small model, as a folder for `model.pretrained`; returns its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "base"
    torch.manual_seed(seed)
    fields = {"vocab_size": 320, "bos_token_id": 256, "eos_token_id": 256, **(config or TINY_MODEL)}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(path)
    return path


def command(recipe: Path, *flags: str, processes: int = 1) -> list[str]:
    """The command line a user would type."""
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    )
    return [sys.executable, *launcher, "-m", "accel_train", "run", "--verbose", str(recipe), *flags]


def environment(**extra: str) -> dict[str, str]:
    """One thread per process; the tests' own modules importable, and the package that lies beside them."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))}
    modules = str(TESTS.parent)
    return {**keep, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules, "HF_HUB_OFFLINE": "1", **extra}


def ran(
    words: Sequence[str], *, variables: Mapping[str, str] = MappingProxyType({}), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with `environment` and these variables; return its output and exit code."""
    options = {"timeout": 300, "check": False, **options}
    return subprocess.run(words, env=environment(**variables), capture_output=True, text=True, **options)


def run_forked_command(
    words: Sequence[str], processes: int, program: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `accel-train WORDS`, or a Python file with these words, in the current folder to the end: all processes, or
    until one fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forked = run_forked(words, processes, folder=folder, cwd=os.getcwd(), program=program)
        forked.wait(500.0, stop_at_failure=True)
        # A process that is stopped early may not have opened its files yet.
        out, error = (
            "".join(path.read_text() for path in sorted(folder.glob(f"rank-*.{kind}"))) for kind in ("out", "err")
        )
        return subprocess.CompletedProcess(list(words), forked.first_failure(), out, error)


def run(recipe: Path, *flags: str, processes: int = 1, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Train to the end, and check the exit code (None: any)."""
    done = run_forked_command(["run", str(recipe), *flags], processes)
    assert expect is None or done.returncode == expect, (
        f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    )
    return done


def train_recipe(recipe: Settings, processes: int = 1, expect: int = 0) -> list[tuple[float, float]]:
    """Train here, or on several processes, or to an exit code; return each step's loss and gradient norm."""
    # Loads what trains, which most tests that import this module do not need.
    from accel_train import train

    output = Path(recipe["output_dir"])
    if processes == 1 and not expect:
        train(recipe)
    else:
        path = output.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(recipe))
        run(path, processes=processes, expect=expect)
    return [(each["step_loss"], each["grad_norm"]) for each in metrics(output)]


def metrics(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one split."""
    return [record for record in _records(folder / "metrics.jsonl") if record["split"] == split]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in metrics(folder)}


def done_steps(folder: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def wait_for_step(folder: Path, step: int, is_alive: Callable[[], bool], said: Callable[[], str] = str) -> None:
    """Wait until a run has logged a step. `said` returns what the run wrote, for where it does not come to it."""
    deadline = time.monotonic() + 300
    while done_steps(folder) < step:
        assert time.monotonic() < deadline, said()
        assert is_alive() or done_steps(folder) >= step, said()
        time.sleep(0.02)


def samples_by_step(reads: Path, processes: int, global_batch_size: int) -> list[list[int]]:
    """The samples of each step over all processes, in order, as `record` of ProbeTask wrote them into a folder."""
    share = global_batch_size // processes
    by_rank = [
        [index for line in (reads / f"rank-{rank}.jsonl").read_text().splitlines() for index in json.loads(line)]
        for rank in range(processes)
    ]
    starts = range(0, min(map(len, by_rank)), share)
    return [[index for read in by_rank for index in read[start : start + share]] for start in starts]


def assert_saved_at_the_stop(folder: Path) -> None:
    """A run that was asked to stop has a checkpoint of the step that it stopped after."""
    step = event_steps(folder, "preempted")[0]
    assert (folder / "checkpoints" / f"step-{step:08d}").is_dir()


def event_steps(folder: Path, kind: str) -> list[int]:
    """The steps of the events of one kind."""
    return [event["step"] for event in events(folder, kind)]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [record for record in _records(folder / "events.jsonl") if record["event"] == kind]


def steps_of(folder: Path, kind: str) -> list[int]:
    """The steps of the events of one kind."""
    return [event["step"] for event in events(folder, kind)]


def summary_of(folder: Path) -> dict[str, Any]:
    """Contents of summary.json."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def forget(folder: Path, first: int) -> None:
    """As if the run had been killed before it saved this step."""
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) >= first:
            shutil.rmtree(path)
    for name in ("model", "adapter"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "summary.json").unlink()


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run has written to `model/`."""
    return load_file(folder / "model" / "model.safetensors")


def _records(path: Path) -> list[dict[str, Any]]:
    """Of each line; the last one may be half there, where the run still writes."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, weights and optimizer, by file and name."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    return {
        f"{name}:{key}": tensor
        for name in ("model.safetensors", "optimizer.safetensors")
        for key, tensor in load_file(path / name).items()
    }


QUIET: Settings = {
    "schedule": {"max_steps": 12},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "log": {"progress": False},
}


SCENES: Settings = {
    **QUIET,
    "task": "semantic-segmentation",
    "output_dir": "scenes",
    "model": {
        "config": {
            "model_type": "segformer",
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 1, 1],
            "decoder_hidden_size": 8,
        }
    },
    "data": {"train": "digit-scenes", "image_size": 32, "num_workers": 0},
    "batch": {"global_batch_size": 8},
    "schedule": {"max_steps": 1},
}


def answers(printed: str) -> list[str]:
    """The lines of a command's standard error, less those that say what it is busy with (`run:
    importing torch ...`).
    """
    return [line for line in printed.splitlines() if not line.endswith(" ...")]


def settings_refused(make: Callable[[], object]) -> tuple[str, ...]:
    """Return the settings that the one rule is about which `make` breaks in a section of a recipe."""
    with pytest.raises(ValidationError) as caught:
        make()
    (problem,) = caught.value.errors()
    error = problem["ctx"]["error"]
    assert isinstance(error, SettingError)
    return error.settings


def sources_of(data: Any) -> tuple[Any, ...]:
    """The sources of `data.train`."""
    return resolve_sources(data.train, data, key="data.train")


def refused(act: Callable[..., object], *given: Any, named: str, **further: Any) -> ValueError:
    """Return the ValueError of a call, whose text has to have all parts of `named`, which bars divide."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is looked at below)
        act(*given, **further)
    assert [part for part in named.split("|") if part not in str(caught.value)] == [], str(caught.value)
    return caught.value
