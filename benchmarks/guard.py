"""What the guard costs: one run whose guard judges every step in one turn and none in the next, in one process.

    python -m benchmarks.guard --preset micro --save

The difference is all that the host does for the guard: statistics, limits, health of checkpoints. On the device it stays in
both turns: three operations on one number. `micro` is so small that a step is nearly all Python: no step costs less.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_save_argument, markdown_table, provenance, provenance_line, save_results
from benchmarks.loops import PRESETS

BLOCK_STEPS = {"micro": 20, "tiny": 6}
"""Steps of one turn."""
BAR = 0.005
"""Of the step time."""


class Switch:
    """The run's guard, or one that lets everything pass, in turns."""

    def __init__(self, guard: Any) -> None:
        from accel_train.guard import GO_ON

        self.guard, self.nothing, self.is_on = guard, GO_ON, True
        self.limits = guard.limits

    def judge(self, result: Any) -> Any:
        if not self.is_on:
            return self.nothing
        verdict = self.guard.judge(result)
        self.limits = self.guard.limits
        return verdict


def measure(name: str, blocks: int, folder: Path) -> list[tuple[float, float]]:
    """CPU seconds a step (with the guard, without), a pair for each two turns."""
    import torch

    from accel_train import Recipe, loop
    from accel_train.memory import garbage_collected_at_steps
    from accel_train.prepare import prepare_run
    from accel_train.signals import StopRequest

    torch.set_num_threads(1)
    preset, block_steps = PRESETS[name], BLOCK_STEPS[name]
    num_steps = 2 * block_steps * blocks + 1
    num_tokens = num_steps * preset.batch * preset.block + 1
    np.random.default_rng(0).integers(0, 65, num_tokens).astype(np.uint16).tofile(folder / "tokens.bin")
    config = {
        "model_type": "gpt2",
        **{"n_layer": preset.layers, "n_head": preset.heads, "n_embd": preset.width, "n_positions": preset.block},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    recipe = {
        "output_dir": str(folder / "run"),
        "model": {"config": config},
        "data": {
            **{"train": str(folder / "tokens.bin"), "eval_fraction": 0, "cache_dir": str(folder / "cache")},
            "sequence_length": preset.block,
        },
        "batch": {"global_batch_size": preset.batch},
        "schedule": {"max_steps": num_steps, "warmup_steps": 1},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1_000_000, "progress": False},
    }
    run = prepare_run(Recipe.model_validate(recipe))
    switch: Any = Switch(run.guard)
    run.guard = switch
    seconds: dict[bool, list[float]] = {True: [], False: []}
    batches = loop.batches_from(run, 0)

    def in_turns() -> Iterator[Any]:
        began = time.process_time()
        for number, step_batches in enumerate(batches):
            if number == num_steps - 1:
                return  # the last step would save and evaluate
            if number and number % block_steps == 0:
                seconds[switch.is_on].append((time.process_time() - began) / block_steps)
                switch.is_on = not switch.is_on
                began = time.process_time()
            yield step_batches

    original = loop.batches_from
    loop.batches_from = lambda run, first_step: in_turns()
    try:
        with run.resources, garbage_collected_at_steps():
            loop.run_steps(run, StopRequest())
    finally:
        loop.batches_from = original
    pairs = list(zip(seconds[True], seconds[False], strict=False))
    return pairs[len(pairs) // 5 :]  # from where the window of the guard is full


def main() -> None:
    """Measure one preset and print what the guard adds to a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(BLOCK_STEPS), default="micro")
    parser.add_argument("--blocks", type=int, default=0, help="turns of each kind; default: 200 for micro, 40 for tiny")
    add_save_argument(parser)
    arguments = parser.parse_args()
    blocks = arguments.blocks or {"micro": 200, "tiny": 40}[arguments.preset]
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(arguments.preset, blocks, Path(folder))
    with_guard, without = ([pair[index] * 1e6 for pair in pairs] for index in (0, 1))
    extra = statistics.median(a - b for a, b in zip(with_guard, without, strict=True))
    share = extra / statistics.median(without)
    row = {
        "preset": arguments.preset,
        "turns": str(len(pairs)),
        "without us": f"{statistics.median(without):.0f}",
        "with the guard us": f"{statistics.median(with_guard):.0f}",
        "median difference us": f"{extra:+.1f}",
        "of the step": f"{share:+.2%}",
        "bar": f"<= {BAR:.1%} {'met' if share <= BAR else 'MISSED'}",
    }
    facts = provenance()
    title = "## What the guard costs on the host, CPU time a step, 1 thread, in turns in one process"
    text = "\n".join(
        [title, "", markdown_table(list(row), [list(row.values())], text={"preset", "bar"}), "", provenance_line(facts)]
    )
    print(text)
    if arguments.save:
        save_results(arguments.save, f"guard-{arguments.preset}", {"row": row, **facts}, text)


if __name__ == "__main__":
    main()
