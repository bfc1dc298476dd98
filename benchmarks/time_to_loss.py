"""How long a small GPT-2 takes to a validation loss: accel_train and a plain loop with nanoGPT's model, whole processes
in turns.

    python -m benchmarks.time_to_loss --save
    python -m benchmarks.time_to_loss --steps 400 --rounds 1
    python -m benchmarks.time_to_loss --steps 1000 --optimizer adamw --share 1 --rate 2e-3

nanoGPT's recipe for a CPU: 4 layers, 128 wide, batch 12 x 64, bytes of the Python standard library's source. The plain
loop trains `--steps` with AdamW and a cosine, and its loss on all validation windows is the one to reach. accel_train
trains the same model with Muon for `--share` of these steps, with guard, checkpoints, evaluation and report as they
come. With `--optimizer adamw --share 1`, it shows what a whole run costs beside the loop with the same optimizer. Both
read the same files and evaluate the same windows. Wall time is that of the whole process, start-up included; training
is its loop alone, CPU time that of the whole process, which others disturb least. Rounds alternate between the two, and
a round compares two runs made one after the other. After each round all that is known is printed, and saved.

Bars: the loss is reached in each round; training at most 1.00 x, wall time at most 1.05 x, for the median round.
"""

import argparse
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.common import (
    OthersClock,
    arguments_of,
    child_environment,
    gpt2_fields,
    markdown_table,
    median_and_range,
    own_seconds,
    print_result,
    run_child,
    run_program,
    show,
    write,
)
from benchmarks.optimizers import read_losses

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12
SEPARATOR, VOCABULARY = 256, 320
"""Bytes and a separator of documents, padded to a multiple of 64."""
MOST_TRAINING, MOST_WALL = 1.00, 1.05


@dataclass(frozen=True)
class Run:
    """One process: the loss at its end, and its times in seconds."""

    loss: float
    wall: float
    training: float
    cpu: float
    """Of the whole process, all threads."""


def write_text(train: Path, validation: Path, windows: int) -> None:
    """Write the standard library's source as uint16 tokens, files in an order of chance; the last windows are for
    validation.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    order = np.random.default_rng(0).permutation(len(paths))
    documents = [np.frombuffer(paths[number].read_bytes(), np.uint8).astype(np.uint16) for number in order]
    tokens = np.concatenate([part for each in documents for part in (each, np.array([SEPARATOR], np.uint16))])
    cut = len(tokens) - (windows * BLOCK + 1)
    tokens[:cut].tofile(train)
    tokens[cut:].tofile(validation)


def train_plain(train: Path, validation: Path, steps: int, rate: float, threads: int) -> dict[str, float]:
    """Train nanoGPT's model with its loop; return the loss on all validation windows and the seconds of the loop."""
    import torch

    from benchmarks import nanogpt_style

    torch.set_num_threads(threads)
    shape = nanogpt_style.GPTShape(VOCABULARY, BLOCK, LAYERS, HEADS, WIDTH, exact_gelu=True)
    began = time.perf_counter()
    model = nanogpt_style.train(
        shape, train, batch_size=BATCH, num_steps=steps, device=torch.device("cpu"), bf16=False, compile=False,
        learning_rate=rate, log_every_steps=10,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    tokens = torch.from_numpy(np.fromfile(validation, np.uint16).astype(np.int64))
    inputs, targets = tokens[:-1].view(-1, BLOCK), tokens[1:].view(-1, BLOCK)
    model.eval()
    with torch.no_grad():
        rows = zip(inputs.split(2 * BATCH), targets.split(2 * BATCH), strict=True)
        total = sum(float(model(x, y)) * y.numel() for x, y in rows)
    return {"loss": total / targets.numel(), "training": seconds}


def train_ours(folder: Path, train: Path, validation: Path, steps: int, arguments: argparse.Namespace) -> Run:
    """Train with the command that a user gives, and read what the run has measured."""
    fields = gpt2_fields(vocab=VOCABULARY, block=BLOCK, layers=LAYERS, heads=HEADS, width=WIDTH)
    recipe = {
        "task": "causal-lm",
        "output_dir": str(folder / "run"),
        "model": {"config": {"model_type": "gpt2", **fields, "activation_function": "gelu"}},
        "tokenizer": "bytes",
        "data": {"train": str(train), "eval": str(validation), "sequence_length": BLOCK},
        "batch": {"global_batch_size": BATCH},
        "optimizer": {"name": arguments.optimizer, "learning_rate": arguments.rate},
        "schedule": {"type": "warmup_cosine", "max_steps": steps},
        "evaluate": {"every_steps": 0},
        "log": {"every_steps": 10, "progress": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    began, own_before = time.perf_counter(), own_seconds()
    run_program(["accel_train", "run", str(folder / "recipe.yaml")], folder, threads=arguments.threads)
    wall, cpu = time.perf_counter() - began, own_seconds() - own_before
    losses, seconds = read_losses(folder / "run")
    return Run(losses[max(losses)], wall, seconds[max(seconds)], cpu)


def compare(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[Run, Run]]:
    """Yield the plain run and ours of each round."""
    train, validation = folder / "train.bin", folder / "validation.bin"
    write_text(train, validation, arguments.windows)
    flags = ["--plain", str(train), str(validation), "--steps", str(arguments.steps)]
    flags += ["--plain-rate", str(arguments.plain_rate), "--threads", str(arguments.threads)]
    # As accel_train sets it: threads that spin for each other, where others compute too, would cost the plain loop 10
    # times its time.
    environment = {**child_environment(arguments.threads), "GOMP_SPINCOUNT": "1000"}
    for number in range(arguments.rounds):
        own_before = own_seconds()
        child = run_child("benchmarks.time_to_loss", flags, environment=environment, timeout_seconds=3600)
        cpu = own_seconds() - own_before
        plain = Run(child.result["loss"], child.wall_seconds, child.result["training"], cpu)
        place = folder / str(number)
        place.mkdir()
        steps = round(arguments.share * arguments.steps)
        yield plain, train_ours(place, train, validation, steps, arguments)


def report(found: Sequence[tuple[Run, Run]], arguments: argparse.Namespace, others_cores: float) -> list[str]:
    """Return the table of rounds so far, and what they say of the bars."""
    rows = [
        [
            str(number),
            *(
                f"{value:.{digits}f}"
                for plain_value, ours_value, digits in (
                    (plain.loss, ours.loss, 4),
                    (plain.training, ours.training, 1),
                    (plain.wall, ours.wall, 1),
                    (plain.cpu, ours.cpu, 1),
                )
                for value in (plain_value, ours_value)
            ),
            f"{ours.training / plain.training:.2f}",
            f"{ours.wall / plain.wall:.2f}",
        ]
        for number, (plain, ours) in enumerate(found, 1)
    ]
    headers = [
        "round",
        "loss, plain",
        "ours",
        "training s, plain",
        "ours",
        "wall s, plain",
        "ours",
        "CPU s, plain",
        "ours",
        "training",
        "wall",
    ]
    reached = sum(ours.loss <= plain.loss for plain, ours in found)
    judged = []
    for name, most in (("training", MOST_TRAINING), ("wall", MOST_WALL), ("cpu", MOST_WALL)):
        ratios = [getattr(ours, name) / getattr(plain, name) for plain, ours in found]
        is_met = statistics.median(ratios) <= most and reached == len(found)
        judged.append(f"- {name}: {median_and_range(ratios, '.2f')} x, bar {most:.2f} {'met' if is_met else 'MISSED'}")
    so_far = "" if len(found) == arguments.rounds else f", {len(found)} of {arguments.rounds} rounds"
    return [
        f"## Time to the loss of a plain loop: {arguments.steps} steps of AdamW at {arguments.plain_rate:g} there, "
        f"{round(arguments.share * arguments.steps)} of {arguments.optimizer} at {arguments.rate:g} here, "
        f"{arguments.threads} threads{so_far}",
        "",
        markdown_table(headers, rows, text=()),
        "",
        f"- the loss is reached in {reached} of {len(found)} rounds",
        *judged,
        f"- other processes used {others_cores:.2f} cores meanwhile: above 0.1, the CPU time says more than the others",
        "",
    ]


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of the plain loop")
    parser.add_argument("--share", type=float, default=0.4, help="our steps, as a share of these")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="ours")
    parser.add_argument("--plain-rate", type=float, default=2e-3)
    parser.add_argument("--rate", type=float, default=1.6e-2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=1024, help="of validation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        train, validation = arguments.plain
        print_result(train_plain(train, validation, arguments.steps, arguments.plain_rate, arguments.threads))
        return
    clock = OthersClock()
    settings: dict[str, Any] = {k: v for k, v in vars(arguments).items() if k not in ("save", "plain")}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for each in compare(arguments, Path(folder)):
            found.append(each)
            _, others = clock.read()
            rounds = [{"plain": asdict(plain), "accel_train": asdict(ours)} for plain, ours in found]
            record = {"others_cores": others, "settings": settings, "rounds": rounds}
            lines = report(found, arguments, others)
            if len(found) == arguments.rounds:
                show(lines, record, save=arguments.save, name="time_to_loss")
            else:
                print(f"round {len(found)}: plain {each[0]}, ours {each[1]}", flush=True)
                if arguments.save is not None:
                    write(lines, record, save=arguments.save, name="time_to_loss")


if __name__ == "__main__":
    main()
