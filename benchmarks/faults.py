"""The same faults for three trainers: accel_train, transformers.Trainer and the loop of Accelerate's documentation.

    python -m benchmarks.faults --save
    python -m benchmarks.faults --faults nan sigterm --systems accel_train hf_trainer

Every cell is what came out when the fault was made: real processes, real signals, real files, one process each on a
CPU. All train the same small GPT-2 on the same 24 samples and save every 6 of 24 steps: with their defaults wherever a
fault is at stake, and the two peers again with the flags that help most (`, flags`). A cell marked * did less than the
row requires.

nan          one sample of one step brings a NaN
lr           a learning rate of -1
resume       SIGKILL after a checkpoint in the middle of an epoch, then the documented resume: which samples it
             trains on
dropout      the same with dropout: are losses and weights those of the run that was never killed, bit by bit
mid_save     SIGKILL while a checkpoint is being written, then the resume
bit          one bit of the newest checkpoint's weights flips, then the resume
pickle       a pickle that runs code in the place of each state file of a checkpoint, then the resume
sigterm      SIGTERM, as a scheduler sends it before it takes the machine
disk_full    no file can grow any more (RLIMIT_FSIZE), from a checkpoint on; then there is room again, and the resume
"""

import hashlib
import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    REPOSITORY,
    RESULT_MARK,
    arguments_of,
    child_environment,
    markdown_table,
    show,
    write_tokenizer,
)
from benchmarks.faults_loops import ACCELERATE_FLAGS, BLOCK, HF_FLAGS, SAMPLES, SYSTEMS, Job

CHECKPOINTS = {"accel_train": "run/checkpoints/step-*", "hf_trainer": "checkpoint-*", "accelerate": "step_*"}
WEIGHTS = "model.safetensors"
PATIENCE_SECONDS = 240.0
SECOND_CHECKPOINT = re.compile(r"(step-0000000|checkpoint-|step_)8\b")


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Of the exit; negative: the signal that killed it."""
    result: dict[str, Any]
    said: str
    """The last line of stderr."""
    output: str


@dataclass(frozen=True)
class Cell:
    """What came out for one system."""

    text: str
    good: bool
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """One system in a folder of its own."""

    system: str
    job: Job

    @property
    def folder(self) -> Path:
        return Path(self.job.folder)

    def with_(self, **changes: Any) -> "Place":
        """The same place with another job."""
        return replace(self, job=replace(self.job, **changes))

    def start(self) -> "subprocess.Popen[str]":
        """The run as a process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.faults_loops", self.system, json.dumps(asdict(self.job))]
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**child_environment(1), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self) -> Ended:
        """The run, to its end."""
        return ended(self.start())

    def resume(self, **changes: Any) -> Ended:
        """What its documentation says to do after an interruption, recorded apart."""
        return self.with_(resume=True, nan_at=0, kill_at=0, full_from=0, record="resumed.jsonl", **changes).run()

    def resumed(self) -> list[dict[str, Any]]:
        """What the forwards after a resume wrote down."""
        return self.with_(record="resumed.jsonl").job.recorded()

    def checkpoints(self) -> list[Path]:
        """By step, newest last."""
        found = self.folder.glob(CHECKPOINTS[self.system.partition(",")[0]])
        return sorted(found, key=lambda path: int(path.name.replace("_", "-").rpartition("-")[2]))

    def copy(self, name: str) -> "Place":
        """The same state in another folder."""
        target = self.folder.with_name(f"{self.folder.name}-{name}")
        shutil.copytree(self.folder, target)
        (target / "resumed.jsonl").unlink(missing_ok=True)
        for path in (target / "run").glob("recipe*.yaml"):
            path.unlink()
        return self.with_(folder=str(target))


def ended(process: "subprocess.Popen[str]") -> Ended:
    """Wait for a process; one that hangs is killed."""
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    results = [line for line in out.splitlines() if line.startswith(RESULT_MARK)]
    lines = [line for line in err.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error:", "preempted:"))]
    return Ended(
        process.returncode,
        json.loads(results[-1].removeprefix(RESULT_MARK)) if results else {},
        (errors or lines or [""])[-1][:300],
        out + err,
    )


def how(end: Ended) -> str:
    """`exit code 0`, `killed by SIGTERM`, `fails (exit code 1)`."""
    if end.code < 0:
        return f"killed by {signal.Signals(-end.code).name}"
    return f"exit code {end.code}" if end.code in (0, 75) else f"fails, exit code {end.code}"


# --- the faults: each takes a system in an empty folder, and says what came out ------------------------------------


def nan_sample(place: Place) -> Cell:
    """The weights must not take the NaN, and the log must not hide it."""
    end = place.with_(nan_at=5).run()
    if end.code != 0:
        return Cell(how(end), False, {"said": end.said})
    logged = end.result["logged"][4]
    finite = end.result["weights_finite"]
    shown = "NaN" if logged.lower() == "nan" else f"{float(logged):.2g}"
    return Cell(
        f"weights {'finite' if finite else 'all NaN'}, {how(end)}, step logged as {shown}",
        finite and shown == "NaN",
        end.result,
    )


def bad_learning_rate(place: Place) -> Cell:
    """Refused before anything is trained."""
    end = place.with_(learning_rate=-1.0, steps=3, save_every_steps=0 if place.system == "accel_train" else 6).run()
    trained = len(place.job.recorded())
    refused = end.code != 0 and trained == 0
    text = f"refused, exit code {end.code}" if refused else f"trains {trained} steps with it"
    return Cell(text, refused, {"said": end.said})


def killed(place: Place, num_checkpoints: int = 1) -> Place:
    """The place after a run that was killed at step 9, when its checkpoints were on the disk; the steps are slow for
    that.
    """
    assert place.with_(kill_at=9, step_seconds=0.4).run().code == -signal.SIGKILL, "it ended before it could be killed"
    assert len(place.checkpoints()) >= num_checkpoints, "it was killed before its checkpoints were written"
    return place


def resume_samples(place: Place) -> Cell:
    """In the first epoch every sample is to be trained on once, although the run was killed in the middle of it."""
    end = killed(place).resume()
    if end.code != 0:
        return Cell(f"resume {how(end)}", False, {"said": end.said})
    after = place.resumed()
    before = place.job.recorded()[: place.job.steps - len(after)]
    steps = [*before, *after][: SAMPLES // 2]
    seen = Counter(sample for line in steps for sample in line["samples"])
    lost, repeated = SAMPLES - len(seen), sum(seen.values()) - len(seen)
    text = f"{lost} of {SAMPLES} samples lost, {repeated} repeated" if lost or repeated else "each sample once"
    return Cell(
        text, not lost and not repeated, {"steps_redone": 8 - len(before), "samples": [x["samples"] for x in steps]}
    )


def resume_bits(place: Place) -> Cell:
    """Losses and final weights as if nothing had happened."""
    whole = place.with_(folder=str(place.folder / "whole"), dropout=0.1)
    broken = place.with_(folder=str(place.folder / "killed"), dropout=0.1)
    reference = whole.run()
    end = killed(broken).resume()
    if end.code != 0 or reference.code != 0:
        return Cell(f"resume {how(end)}", False, {"said": end.said})
    losses = [line["loss"] for line in whole.job.recorded()]
    after = [line["loss"] for line in broken.resumed()]
    same_losses = losses[len(losses) - len(after) :] == after
    same_weights = reference.result["weights_sha256"] == end.result["weights_sha256"]
    text = "bitwise the same" if same_losses and same_weights else "other losses, other weights"
    return Cell(text, same_losses and same_weights, {"same_losses": same_losses, "same_weights": same_weights})


def kill_in_mid_save(place: Place) -> Cell:
    """The checkpoint before must be used, without a hand's work."""
    big = place.with_(width=768, vocab=8192, steps=12, save_every_steps=4)
    process = big.start()
    begun = big.folder / ("run/checkpoints" if big.system == "accel_train" else ".")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if any(is_half_written(path) for path in begun.glob("*") if SECOND_CHECKPOINT.search(path.name)):
            process.kill()
            break
        time.sleep(0.0005)
    first = ended(process)
    if first.code != -signal.SIGKILL:
        return Cell(f"not hit: {how(first)}", False, {"said": first.said})
    left = sorted(path.name for path in begun.iterdir())
    end = big.resume()
    redone = len(big.resumed())
    text = f"resumes from step {12 - redone}" if end.code == 0 else f"resume {how(end)}"
    return Cell(text, end.code == 0 and redone == 8, {"left": left, "said": end.said, "steps_redone": redone})


def is_half_written(folder: Path) -> bool:
    """Whether the second checkpoint is begun: its weights have some bytes."""
    weights = folder / WEIGHTS
    try:
        return weights.stat().st_size > 0
    except OSError:
        return False


def flipped_bit(place: Place) -> Cell:
    """It must be noticed; and the checkpoint before used."""
    newest = killed(place.with_(save_every_steps=3), 2).checkpoints()[-1]
    content = bytearray((newest / WEIGHTS).read_bytes())
    content[-2001] ^= 0b0100_0000
    (newest / WEIGHTS).write_bytes(content)
    place = place.with_(save_every_steps=3)
    end = place.resume()
    redone = len(place.resumed())
    noticed = WEIGHTS in end.output and "digest" in end.output
    if end.code == 0 and noticed:
        return Cell(f"named, resumes from step {24 - redone}", redone == 21, {"steps_redone": redone})
    text = "loaded without a warning" if end.code == 0 else f"resume {how(end)}"
    return Cell(text, False, {"steps_redone": redone, "said": end.said})


class RunsCode:
    """Pickled, it creates a file as soon as somebody reads it."""

    def __init__(self, canary: Path) -> None:
        self.code = f"open({str(canary)!r}, 'w').close()"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (self.code,)


def pickled_code(place: Place) -> Cell:
    """No file of a checkpoint may run code."""
    killed(place)
    newest = place.checkpoints()[-1]
    names = sorted(path.name for path in newest.rglob("*") if path.is_file())
    states = [name for name in names if name.endswith((".pt", ".pth", ".bin", ".pkl", ".safetensors"))]
    found: dict[str, str] = {}
    for name in states:
        here = place.copy(name)
        canary = here.folder / "canary"
        target = here.checkpoints()[-1] / name
        content = pickle.dumps(RunsCode(canary), protocol=2)
        target.write_bytes(content)
        forge_manifest(target, content)
        end = here.resume(steps=8)
        found[name] = "executed" if canary.exists() else "refused" if end.code else "not read"
    executed = [name for name, what in found.items() if what == "executed"]
    text = f"executed from {', '.join(executed)}" if executed else f"executed from none of {len(states)} files"
    return Cell(text, not executed, {"files": found})


def forge_manifest(file: Path, content: bytes) -> None:
    """Where a manifest has digests, make them fit: an attacker would."""
    manifest = file.parent / "manifest.json"
    if manifest.exists():
        record = json.loads(manifest.read_text())
        record["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest.write_text(json.dumps(record))


def terminated(place: Place) -> Cell:
    """Every step that was done must be saved, and the exit code must say: run me again."""
    slow = place.with_(step_seconds=0.15, steps=60, save_every_steps=6)
    process = slow.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(slow.job.recorded()) < 10 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    end = ended(process)
    done = len(slow.job.recorded())
    steps = [int(path.name.replace("_", "-").rpartition("-")[2]) for path in slow.checkpoints()]
    lost = done - max(steps, default=0)
    text = f"{how(end)}, {lost} of {done} steps lost" if lost else f"saved at step {done}, {how(end)}"
    return Cell(text, end.code == 75 and lost == 0, {"saved": steps, "done": done, "said": end.said})


def full_disk(place: Place) -> Cell:
    """Once there is room again, the run must go on by itself."""
    end = place.with_(full_from=11).run()
    left = {path.name: sorted(file.name for file in path.rglob("*") if file.is_file()) for path in place.checkpoints()}
    again = place.resume()
    redone = len(place.resumed())
    then = f"resumes from step {place.job.steps - redone}" if again.code == 0 else f"then the resume {how(again)}"
    facts = {"left": left, "said": end.said, "said_again": again.said}
    return Cell(f"{how(end)}, {then}", end.code == 4 and again.code == 0, facts)


FAULTS: dict[str, tuple[str, Callable[[Place], Cell]]] = {
    "nan": ("NaN in one sample", nan_sample),
    "lr": ("learning rate -1", bad_learning_rate),
    "resume": ("killed in mid-epoch, resumed", resume_samples),
    "dropout": ("the same with dropout", resume_bits),
    "mid_save": ("killed in mid-save, resumed", kill_in_mid_save),
    "bit": ("flipped bit in a checkpoint", flipped_bit),
    "pickle": ("pickle with code in a checkpoint", pickled_code),
    "sigterm": ("SIGTERM", terminated),
    "disk_full": ("disk full while saving", full_disk),
}


def measure(folder: Path, faults: Sequence[str], systems: Sequence[str], at_once: int) -> dict[str, dict[str, Cell]]:
    """A cell for each fault and system."""
    small, big = (write_data(folder / name, vocab) for name, vocab in (("small", 64), ("big", 8192)))

    def one(fault: str, system: str) -> Cell:
        data = big if fault == "mid_save" else small
        job = Job(str(folder / f"{fault}-{system.replace(', ', '-')}"), *data, vocab=64)
        try:
            cell = FAULTS[fault][1](Place(system, job))
        except Exception as error:  # one cell that cannot be measured is no reason to lose the others
            cell = Cell(f"not measured: {type(error).__name__}: {error}", False)
        print(f"{fault:10} {system:12} {cell.text}", file=sys.stderr, flush=True)
        return cell

    with ThreadPoolExecutor(at_once) as pool:
        waiting = {(fault, system): pool.submit(one, fault, system) for fault in faults for system in systems}
        return {fault: {system: waiting[fault, system].result() for system in systems} for fault in faults}


def write_data(folder: Path, vocab: int) -> tuple[str, str]:
    """Tokens, each sample of which begins with its own number, and a tokenizer."""
    write_tokenizer(folder / "tokenizer", vocab_size=vocab)
    draw = np.random.default_rng(0)
    rows = draw.integers(SAMPLES, 64, (SAMPLES, BLOCK), dtype=np.uint16)
    rows[:, 0] = np.arange(SAMPLES)
    tokens = folder / "tokens.bin"
    np.append(rows.reshape(-1), np.uint16(1)).astype(np.uint16).tofile(tokens)
    return str(tokens), str(folder / "tokenizer")


def table(found: dict[str, dict[str, Cell]], systems: Sequence[str]) -> str:
    """A row for each fault, a column for each system."""
    rows = [
        [FAULTS[fault][0], *(cells[system].text + ("" if cells[system].good else " *") for system in systems)]
        for fault, cells in found.items()
    ]
    headers = ["fault", *systems]
    return markdown_table(headers, rows, text=headers)


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="cells measured side by side")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        found = measure(folder, arguments.faults, arguments.systems, arguments.at_once)
    seconds = time.monotonic() - began
    lines = [
        "## The same faults for three trainers, one process each on a CPU",
        "",
        table(found, arguments.systems),
        "",
        f"hf_trainer, flags: {shown(HF_FLAGS)}. accelerate, flags: "
        f"DataLoaderConfiguration({shown(ACCELERATE_FLAGS)}), set_epoch.",
        f"* did less than `python -m benchmarks.faults --help` requires. Measured in {seconds:.0f} s.",
    ]
    cells = {fault: {system: asdict(cell) for system, cell in row.items()} for fault, row in found.items()}
    is_whole = (arguments.faults, arguments.systems) == (list(FAULTS), list(SYSTEMS))
    name = "faults" if is_whole else "faults-part"
    show(lines, {"seconds": round(seconds), "cells": cells}, save=arguments.save, name=name)


def shown(flags: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in flags.items())


if __name__ == "__main__":
    main()
