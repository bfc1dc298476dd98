"""Two ways of doing a step, in turns of a few steps each in one process: for `benchmarks.guard` and
`benchmarks.paired`.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments_of, markdown_table, show
from benchmarks.loops import PRESETS

BLOCK_STEPS = {"micro": 20, "tiny": 6}
"""Steps of one turn."""
Pairs = Sequence[tuple[float, float]]
"""CPU seconds a step of the one and the other, a pair for each two turns."""


def small_run(name: str, num_steps: int, folder: Path, *, log_every_steps: int, **schedule: Any) -> Any:
    """Return a run of a preset on synthetic tokens, ready to train, on one thread."""
    import torch

    from accel_train import Recipe
    from accel_train.training.setup import prepare_run

    torch.set_num_threads(1)
    preset = PRESETS[name]
    num_tokens = num_steps * preset.batch * preset.block + 1
    np.random.default_rng(0).integers(0, 65, num_tokens).astype(np.uint16).tofile(folder / "tokens.bin")
    config = {
        "model_type": "gpt2",
        **{"n_layer": preset.layers, "n_head": preset.heads, "n_embd": preset.width, "n_positions": preset.block},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    data = {"train": str(folder / "tokens.bin"), "eval_fraction": 0, "cache_dir": str(folder / "cache")}
    recipe = {
        "output_dir": str(folder / "run"),
        "model": {"config": config, "fused_kernels": False},
        "data": {**data, "sequence_length": preset.block},
        "batch": {"global_batch_size": preset.batch},
        "schedule": {"max_steps": num_steps, **schedule},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": log_every_steps, "progress": False},
    }
    return prepare_run(Recipe.model_validate(recipe))


def train_on(run: Any, in_turns: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Train on the run's own batches, as `in_turns` yields them."""
    from accel_train.runtime.memory import garbage_collected_at_steps
    from accel_train.training import loop

    original, batches = loop.training_batches, loop.training_batches(run, 0)
    loop.training_batches = lambda run, first_step: in_turns(batches)
    try:
        with run.resources, garbage_collected_at_steps():
            loop.run_steps(run)
    finally:
        loop.training_batches = original


def measure_preset(
    name: str,
    description: str | None,
    title: str,
    turns: Mapping[str, int],
    measure: Callable[[str, int, Path], Pairs],
    summary: Callable[[Pairs], Mapping[str, str]],
) -> None:
    """Run the command: measure one preset, print a row about it, and save it as NAME-PRESET if asked; `turns` by
    preset.
    """
    parser = arguments_of(description)
    parser.add_argument("--preset", choices=sorted(BLOCK_STEPS), default="micro")
    defaults = ", ".join(f"{number} for {preset}" for preset, number in turns.items())
    parser.add_argument("--blocks", type=int, default=0, help=f"turns of each kind; default: {defaults}")
    arguments = parser.parse_args()
    preset = arguments.preset
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(preset, arguments.blocks or turns[preset], Path(folder))
    row = {"preset": preset, "turns": str(len(pairs)), **summary(pairs)}
    table = markdown_table(list(row), [list(row.values())], text={"preset", "bar"})
    show([title, "", table, ""], {"row": row}, save=arguments.save, name=f"{name}-{preset}")
