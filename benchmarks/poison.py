"""A run that is poisoned ends where the clean one does: poisons x seeds, each trained unattended with the guard's
defaults.

    python -m benchmarks.poison --save
    python -m benchmarks.poison --poisons nan_batches --seeds 1 --steps 300

nan_samples        a NaN in three samples, again in each of three epochs
nan_batches        ten batches in a row with a NaN in each sample
shuffled_labels    three batches in a row whose targets belong to other inputs
repeated_tokens    five batches in a row in which each sample repeats one token to its end
learning_rate_x50  three updates in a row with fifty times the learning rate
bit_flips          ten gradients with one flipped bit in their exponent

A small GPT-2 on the source of Python's standard library, 600 steps on a CPU. Each run is a process of its own and is
held to its clean twin of the same seed: it ends by itself with exit code 0, its evaluation loss is at most 1% above the
twin's, and it went back to a checkpoint at most twice. No setting of the guard differs from the defaults.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import arguments_of, markdown_table, run_program, show

BATCH = 16
MOST_LOSS_ABOVE, MOST_ROLLBACKS = 0.01, 2
EPOCHS = {"nan_samples": 3}
"""Passes over the samples in a run; the others see each sample once."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    poison: str
    seed: int
    exit_code: int
    loss: float | None
    """Of the last evaluation."""
    skipped: int
    clipped: int
    """Spikes that were clipped."""
    rollbacks: int
    said: str
    """What the guard said of the first trouble, or the error that ended the run."""


def poison_of(kind: str, steps: int) -> dict[str, Any]:
    """Where a poison sits in a run of so many steps: in its second half, where there is something to lose."""
    first = steps * 3 // 5
    windows = {"nan_batches": 10, "shuffled_labels": 3, "repeated_tokens": 5, "learning_rate_x50": 3}
    if kind in windows:
        return {"kind": kind, "steps": list(range(first, first + windows[kind]))}
    if kind == "bit_flips":
        return {"kind": kind, "steps": list(range(steps // 4, steps, steps * 3 // 40))[:10]}
    if kind == "nan_samples":
        num_samples = steps * BATCH // EPOCHS[kind]
        return {"kind": kind, "samples": [num_samples // 7, num_samples // 2, num_samples - 5]}
    return {"kind": "none"}


def recipe_of(folder: Path, kind: str, epochs: int, seed: int, steps: int) -> dict[str, Any]:
    """The recipe of one run: nothing in it about the guard."""
    model = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}
    return {
        "task": "benchmarks.poison_task:PoisonedText",
        "output_dir": str(folder / f"{kind}-{epochs}-{seed}"),
        "seed": seed,
        "model": {"config": {**model, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
        "tokenizer": "bytes",
        "data": {
            "train": "python-stdlib",
            "eval_fraction": 0.02,
            "sequence_length": 64,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_batch_size": BATCH},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"max_steps": steps, "warmup_ratio": 0.1},
        "evaluate": {"every_steps": 0},
        "checkpoint": {"every_steps": steps // 12},
        "log": {"every_steps": 10, "progress": False},
        "options": {"num_samples": steps * BATCH // epochs, "poison": poison_of(kind, steps)},
    }


def run_one(folder: Path, kind: str, epochs: int, seed: int, steps: int) -> Outcome:
    """Train one run to its end, whatever that is, and read what it left."""
    recipe = recipe_of(folder, kind, epochs, seed, steps)
    path = folder / f"{kind}-{epochs}-{seed}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = run_program(["accel_train", "run", str(path)], folder, timeout_seconds=900, check=False)
    output = Path(recipe["output_dir"])
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    troubles = [event for event in events if event["event"] in ("skip", "spike", "rollback", "stop", "overflow")]
    summary = json.loads((output / "summary.json").read_text()) if done.returncode == 0 else None
    last_words = (done.stderr.strip().splitlines() or [""])[-1]
    return Outcome(
        kind,
        seed,
        done.returncode,
        None if summary is None else summary["eval"]["loss"],
        sum(event["event"] == "skip" for event in troubles),
        sum(event["event"] == "spike" for event in troubles),
        sum(event["event"] == "rollback" for event in troubles),
        last_words if done.returncode else troubles[0]["message"] if troubles else "",
    )


def measure(
    folder: Path, poisons: Sequence[str], seeds: Sequence[int], steps: int, at_once: int
) -> dict[str, list[Outcome]]:
    """All runs, clean twins included (as `clean` and `clean, 3 epochs`), by poison."""
    epochs_of = {kind: EPOCHS.get(kind, 1) for kind in poisons}
    jobs = [("none", epochs, seed) for epochs in sorted(set(epochs_of.values())) for seed in seeds]
    jobs += [(kind, epochs_of[kind], seed) for kind in poisons for seed in seeds]
    outcomes = [run_one(folder, "none", jobs[0][1], jobs[0][2], steps)]  # alone: it tokenises the text for all
    with ThreadPoolExecutor(at_once) as pool:
        outcomes += pool.map(lambda job: run_one(folder, job[0], job[1], job[2], steps), jobs[1:])
    found: dict[str, list[Outcome]] = {}
    for (kind, epochs, _), outcome in zip(jobs, outcomes, strict=True):
        found.setdefault(clean_name(epochs) if kind == "none" else kind, []).append(outcome)
    return found


def clean_name(epochs: int) -> str:
    return "clean" if epochs == 1 else f"clean, {epochs} epochs"


def excess(outcome: Outcome, clean: Outcome) -> float | None:
    """The loss above the clean twin's, as a part of it; negative: below."""
    return None if outcome.loss is None or not clean.loss else outcome.loss / clean.loss - 1


def holds(outcome: Outcome, clean: Outcome) -> bool:
    """Whether a run met all three bars."""
    above = excess(outcome, clean)
    return (
        outcome.exit_code == 0
        and above is not None
        and above <= MOST_LOSS_ABOVE
        and outcome.rollbacks <= MOST_ROLLBACKS
    )


def table(found: Mapping[str, Sequence[Outcome]]) -> str:
    """A row for each poison: its runs in the order of their seeds."""
    rows = []
    for kind, outcomes in found.items():
        is_clean = kind.startswith("clean")
        twins = found[clean_name(EPOCHS.get(kind, 1))] if not is_clean else outcomes
        above = [excess(outcome, twin) for outcome, twin in zip(outcomes, twins, strict=True)]
        met = sum(holds(outcome, twin) for outcome, twin in zip(outcomes, twins, strict=True))
        rows.append(
            [
                kind,
                ", ".join("-" if outcome.loss is None else f"{outcome.loss:.4f}" for outcome in outcomes),
                "-" if is_clean else ", ".join("-" if each is None else f"{each:+.2%}" for each in above),
                ", ".join(str(outcome.skipped) for outcome in outcomes),
                ", ".join(str(outcome.clipped) for outcome in outcomes),
                ", ".join(str(outcome.rollbacks) for outcome in outcomes),
                ", ".join(str(outcome.exit_code) for outcome in outcomes),
                "-" if is_clean else f"{met} of {len(outcomes)} {'met' if met == len(outcomes) else 'MISSED'}",
            ]
        )
    headers = ["poison", "final loss", "above the clean run", "skipped", "spikes", "rollbacks", "exit code", "bar"]
    return markdown_table(headers, rows, text=("poison", "bar"))


POISONS = ("nan_samples", "nan_batches", "shuffled_labels", "repeated_tokens", "learning_rate_x50", "bit_flips")


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--poisons", nargs="+", choices=POISONS, default=list(POISONS))
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1 to N")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="runs side by side")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, arguments.poisons, range(1, arguments.seeds + 1), arguments.steps, arguments.at_once)
    lines = [
        f"## Poisoned runs: GPT-2 2L/2H/64, T=64, batch {BATCH}, {arguments.steps} steps, {arguments.seeds} seeds, "
        "the guard's defaults",
        "",
        table(found),
        "",
        f"Bar: exit code 0, final loss at most {MOST_LOSS_ABOVE:.0%} above the clean run of the same seed, at most "
        f"{MOST_ROLLBACKS} rollbacks.",
    ]
    runs = {kind: [asdict(outcome) for outcome in outcomes] for kind, outcomes in found.items()}
    settings = {name: value for name, value in vars(arguments).items() if name not in ("save", "folder")}
    show(lines, {"settings": settings, "runs": runs}, save=arguments.save, name="poison")


if __name__ == "__main__":
    main()
