"""Muon reaches AdamW's final loss in fewer steps and less time: the demo's model and data with each of them, several
seeds.

    python -m benchmarks.optimizers --save
    python -m benchmarks.optimizers --seeds 1 --steps 300

AdamW trains the model of `recipes/gpt_tiny.yaml` with a schedule over all its steps, and is evaluated at its end. Muon
trains with a schedule over `--share` of these steps, and is evaluated as it goes: the first evaluation that is no
higher than AdamW's last one says how many steps and how much training time (evaluation and checkpoints left out) it
needed. Each run is a process of its own with one thread, the two of a seed side by side: what else the machine does
meets both. (AdamW's last steps have it to themselves, to Muon's disadvantage.) CPU time is the steps times the median
of what one took. After each seed all that is known is printed, and saved.

Bars: at most 55 % of AdamW's steps and 75 % of its time, for the median seed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import (
    REPOSITORY,
    OthersClock,
    arguments_of,
    flags_of,
    markdown_table,
    median_and_range,
    run_program,
    show,
    write,
)

RECIPE = REPOSITORY / "recipes" / "gpt_tiny.yaml"
MOST_STEPS, MOST_TIME = 0.55, 0.75


@dataclass(frozen=True)
class Trained:
    """One run: its evaluation losses and training seconds by step, and the CPU seconds of one step."""

    seed: int
    losses: dict[int, float]
    seconds: dict[int, float]
    cpu_seconds_a_step: float

    @property
    def last(self) -> int:
        """The last step."""
        return max(self.losses)


@dataclass(frozen=True)
class Comparison:
    """Muon against AdamW for one seed."""

    seed: int
    adamw_loss: float
    muon_loss: float
    """At the end of its shorter schedule."""
    steps: float | None
    """Steps to AdamW's final loss, as a share of AdamW's; None where Muon did not get there."""
    time: float | None
    """The same of the training time."""
    cpu_time: float | None
    """The same of the CPU time."""
    cpu_seconds_a_step: float
    """Of Muon, as a multiple of AdamW's."""


def train(folder: Path, name: str, seed: int, steps: int, every: int, flags: Sequence[str]) -> Trained:
    """Train the recipe with one optimizer, and read what it left; `every` is the steps between evaluations of Muon."""
    output = folder / f"{name}-{seed}-{steps}"
    settings = {
        "output_dir": output,
        "seed": seed,
        "optimizer.name": name,
        "schedule.max_steps": steps,
        "evaluate.every_steps": every if name == "muon" else 0,
        "evaluate.max_samples": "null",
        "evaluate.sample_tokens": 1,
        "log.every_steps": every,
        "log.progress": "false",
        "checkpoint.every_steps": 0,
    }
    took = folder / f"{output.name}.json"
    child = ["benchmarks.optimizers", "--child", str(took)]
    run_program([*child, "run", str(RECIPE), *flags_of(settings), *flags], folder)
    return Trained(seed, *read_losses(output), json.loads(took.read_text()))


def run_and_time(took: Path, words: Sequence[str]) -> int:
    """Run `accel-train WORDS`, and write the CPU seconds of one step: the median, as some have an evaluation between
    them.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from accel_train.cli.main import main as accel_train

    stamps: dict[type, list[float]] = {}
    register_optimizer_step_post_hook(lambda each, *_: stamps.setdefault(type(each), []).append(time.process_time()))
    code = accel_train(words)
    if stamps:  # not so in a run of `--folder` that is over already
        times = list(stamps.values())[-1]  # Muon steps an AdamW inside
        took.write_text(json.dumps(statistics.median(end - begin for begin, end in pairwise(times))))
    return code


def read_losses(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the evaluation losses and the training seconds of a run, by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["split"] in ("eval", "eval_final")}
    return losses, {line["step"]: line["train_seconds"] for line in lines if line["split"] == "train"}


def compare(adamw: Trained, muon: Trained) -> Comparison:
    """Return the steps and time that Muon needed to the loss at AdamW's last step."""
    target = adamw.losses[adamw.last]
    there = next((step for step, loss in sorted(muon.losses.items()) if loss <= target), None)
    cpu = muon.cpu_seconds_a_step / adamw.cpu_seconds_a_step
    return Comparison(
        adamw.seed,
        target,
        muon.losses[muon.last],
        None if there is None else there / adamw.last,
        None if there is None else muon.seconds[there] / adamw.seconds[adamw.last],
        None if there is None else cpu * there / adamw.last,
        cpu,
    )


def verdict(values: Sequence[float | None], most: float) -> str:
    """The median and range of shares, and whether the median meets its bar; a run that did not get there counts as the
    worst.
    """
    reached = [value for value in values if value is not None]
    if 2 * len(reached) <= len(values):
        return f"not reached, bar {most:.0%} MISSED"
    median = statistics.median(sorted([*reached, *[float("inf")] * (len(values) - len(reached))]))
    return f"{median_and_range(reached, '.1%')}, bar {most:.0%} {'met' if median <= most else 'MISSED'}"


def table(found: Sequence[Comparison]) -> str:
    """A row for each seed."""

    def share(value: float | None) -> str:
        return "not reached" if value is None else f"{value:.1%}"

    rows = [
        [
            str(each.seed), f"{each.adamw_loss:.4f}", f"{each.muon_loss:.4f}", share(each.steps), share(each.time),
            share(each.cpu_time), f"{each.cpu_seconds_a_step:.2f} x",
        ]
        for each in found
    ]  # fmt: skip
    headers = [
        "seed",
        "AdamW's final loss",
        "Muon's final loss",
        "steps to AdamW's",
        "time to AdamW's",
        "CPU time to AdamW's",
        "CPU time of a step",
    ]
    return markdown_table(headers, rows, text=())


def report(
    found: Sequence[Comparison], arguments: argparse.Namespace, muon_steps: int, others: float
) -> tuple[list[str], dict[str, Any]]:
    """Return the text and the record of the seeds so far."""
    so_far = "" if len(found) == arguments.seeds else f"{len(found)} of "
    lines = [
        f"## Muon against AdamW: recipes/gpt_tiny.yaml, {arguments.steps} steps of AdamW at {arguments.adamw_rate:g}, "
        f"{muon_steps} of Muon at {arguments.muon_rate:g}, {so_far}{arguments.seeds} seeds",
        "",
        table(found),
        "",
        f"- steps to AdamW's final loss: {verdict([each.steps for each in found], MOST_STEPS)}",
        f"- time to AdamW's final loss: {verdict([each.time for each in found], MOST_TIME)}",
        f"- CPU time to AdamW's final loss: {verdict([each.cpu_time for each in found], MOST_TIME)}",
        f"- other processes used {others:.2f} cores meanwhile: above 0.1, the CPU time says more than the time",
        "",
    ]
    settings: dict[str, Any] = {k: v for k, v in vars(arguments).items() if k not in ("save", "folder")}
    return lines, {"others_cores": others, "settings": settings, "seeds": [asdict(each) for each in found]}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.exit(run_and_time(Path(sys.argv[2]), sys.argv[3:]))
    parser = arguments_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 1 to N")
    parser.add_argument("--steps", type=int, default=1000, help="of AdamW")
    parser.add_argument("--share", type=float, default=MOST_STEPS, help="Muon's steps, as a share of AdamW's")
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="steps between two evaluations of Muon")
    parser.add_argument("--adamw-rate", type=float, default=4e-3, help="of AdamW")
    parser.add_argument("--muon-rate", type=float, default=1.6e-2)
    parser.add_argument("--settings", default="", metavar="FLAGS", help="settings of the recipe for both, as one text")
    parser.add_argument("--folder", type=Path, help="keep the runs here; again, those that are over are not run again")
    arguments = parser.parse_args()
    every, steps = arguments.every, arguments.steps
    muon_steps = max(every, round(arguments.share * steps / every) * every)
    pair = (("adamw", arguments.adamw_rate, steps), ("muon", arguments.muon_rate, muon_steps))
    found: list[Comparison] = []
    clock = OthersClock()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(pair)) as threads:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in range(1, arguments.seeds + 1):
            runs = [
                threads.submit(
                    train,
                    folder,
                    name,
                    seed,
                    length,
                    every,
                    ["--optimizer.learning_rate", f"{rate:g}", *arguments.settings.split()],
                )
                for name, rate, length in pair
            ]
            found.append(compare(*(each.result() for each in runs)))
            seconds, others = clock.read()
            lines, record = report(found, arguments, muon_steps, others)
            if seed == arguments.seeds:
                show(lines, record, save=arguments.save, name="optimizers")
            else:
                print(f"{found[-1]}, {seconds:.0f} s so far", flush=True)
                if arguments.save is not None:
                    write(lines, record, save=arguments.save, name="optimizers")


if __name__ == "__main__":
    main()
