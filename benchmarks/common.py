"""What all benchmarks use: their arguments, fresh processes, token files, tables, and results with machine, versions
and date.

Importing this imports no torch, so that a parent process stays light beside the children it times.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
RESULT_MARK = "BENCHMARK_RESULT "
TURN_SECONDS = 0.4
"""Long beside the caches that a process finds cold, short beside what changes on a machine."""
KEEP_FREED_BYTES = str(4_000_000_000)
"""For glibc: by default it hands memory back after every step, which costs thousands of page faults and all
comparability.
"""


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a measured process: the same for every variant."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MALLOC_TRIM_THRESHOLD_": KEEP_FREED_BYTES,
        "MALLOC_MMAP_THRESHOLD_": KEEP_FREED_BYTES,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }


@dataclass(frozen=True)
class ChildRun:
    """What a measured process reported, and how busy the machine was beside it."""

    result: dict[str, Any]
    wall_seconds: float
    others_cores: float
    """CPU seconds per second that all other processes used meanwhile: above 0.1 the figures are noisy."""


def run_child(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_seconds: float
) -> ChildRun:
    """Run `python -m module arguments` in a fresh process and read the result it prints last.

    Its environment is by default that of a measured process with one thread.

    Raises:
        RuntimeError: it failed or ran past the time; the text ends with what it printed last.
    """
    command, clock = [sys.executable, "-m", module, *arguments], OthersClock()
    environment = environment or child_environment(1)
    code, printed = run_to_end(command, environment=environment, timeout_seconds=timeout_seconds)
    if code is None:
        tail = "\n".join(printed.splitlines()[-25:])
        raise RuntimeError(f"{tail}\n{' '.join(command)} ran past {timeout_seconds:.0f} s")
    wall, others = clock.read()
    return ChildRun(_result_of(command, code, printed), wall, others)


def run_to_end(
    command: Sequence[str], *, environment: Mapping[str, str], timeout_seconds: float
) -> tuple[int | None, str]:
    """Return the exit code of a command, None if it ran past the time, and what it printed.

    Processes that it has left behind end with it, also at an interruption: none keeps the GPU.
    """
    with tempfile.TemporaryFile("w+") as error, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=dict(environment), stdout=output, stderr=error, start_new_session=True
        )
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code, _text(error) + _text(output)


def run_children_in_turns(
    module: str, argument_lists: Sequence[Sequence[str]], *, environment: Mapping[str, str], timeout_seconds: float
) -> list[ChildRun]:
    """Run several processes at once, of which one at a time may compute: each has its turn, again and again (SIGSTOP,
    SIGCONT).

    So what the machine does beside, from one second to the next, meets all of them alike.

    Raises:
        RuntimeError: one failed, or they ran past the time.
    """
    commands = [[sys.executable, "-m", module, *arguments] for arguments in argument_lists]
    clock = OthersClock()
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        children = [
            subprocess.Popen(command, cwd=REPOSITORY, env=dict(environment), stdout=output, stderr=output)
            for command, output in zip(commands, outputs, strict=True)
        ]
        try:
            for child in children:
                child.send_signal(signal.SIGSTOP)
            while any(child.poll() is None for child in children):
                if time.perf_counter() - clock.start > timeout_seconds:
                    raise RuntimeError(f"{module} ran past {timeout_seconds:.0f} s")
                for child in children:
                    _give_turn(child)
        finally:
            for child in children:
                child.kill()
                child.wait()
        wall, others = clock.read()
        return [
            ChildRun(_result_of(command, child.returncode, _text(output)), wall, others)
            for command, child, output in zip(commands, children, outputs, strict=True)
        ]


def _give_turn(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(TURN_SECONDS)
        return
    child.send_signal(signal.SIGSTOP)


def _text(output: Any) -> str:
    output.seek(0)
    return str(output.read())


def _result_of(command: Sequence[str], exit_code: int, printed: str) -> dict[str, Any]:
    lines = [line for line in printed.splitlines() if line.startswith(RESULT_MARK)]
    if exit_code != 0 or not lines:
        tail = "\n".join(printed.splitlines()[-25:])
        raise RuntimeError(f"{' '.join(command)} ended with exit code {exit_code}:\n{tail}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT_MARK))
    return result


def run_program(
    words: Sequence[str],
    folder: Path,
    *,
    threads: int = 1,
    timeout_seconds: float | None = None,
    check: bool = True,
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m WORDS` in a folder; it can import what this process can.

    Raises:
        RuntimeError: it failed, and `check` is true.
    """
    command = [sys.executable, "-m", *words]
    environment = {**child_environment(threads), "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path[1:]])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return done


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings as the words of a command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def print_result(result: Mapping[str, Any]) -> None:
    """The child's half of `run_child`."""
    print(RESULT_MARK + json.dumps(result), flush=True)


def busy_seconds() -> float:
    """Return the CPU seconds of the whole machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def own_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class OthersClock:
    """Tells how busy the machine has been with other processes since the clock was made."""

    def __init__(self) -> None:
        self.busy, self.own, self.start = busy_seconds(), own_seconds(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return the seconds since the start, and the CPU seconds of all other processes per second."""
        wall = time.perf_counter() - self.start
        return wall, max(((busy_seconds() - self.busy) - (own_seconds() - self.own)) / wall, 0.0)


class FetchClock:
    """The time at which each batch is read: two batches apart lies one whole step, whatever loop is around it."""

    def __init__(self) -> None:
        self.wall_ns: list[int] = []
        self.cpu_ns: list[int] = []

    def stamp(self) -> None:
        """About 1 us, and the same in every variant."""
        self.wall_ns.append(time.perf_counter_ns())
        self.cpu_ns.append(time.process_time_ns())

    def stamps(self, *, warmup_steps: int, num_steps: int) -> dict[str, list[int]]:
        """All stamps after the warm-up, in nanoseconds."""
        assert len(self.wall_ns) >= num_steps, f"{len(self.wall_ns)} batches were read in {num_steps} steps"
        return {"wall_ns": self.wall_ns[warmup_steps:num_steps], "cpu_ns": self.cpu_ns[warmup_steps:num_steps]}


def common_time(stamps: Sequence[Mapping[str, Sequence[int]]]) -> tuple[int, int]:
    """From when the last of several processes has warmed up, to when the first one is done."""
    return max(each["wall_ns"][0] for each in stamps), min(each["wall_ns"][-1] for each in stamps)


def step_times(stamps: Mapping[str, Sequence[int]], between: tuple[int, int]) -> dict[str, float]:
    """A step in microseconds within a time: its median, its mean, and the quickest tenth of all steps.

    A run too short to have steps in that time is taken whole. The mean counts the steps that log as well. The quickest
    tenth is what interruptions by others reach least.
    """
    wall_ns, cpu_ns = np.array(stamps["wall_ns"]), np.array(stamps["cpu_ns"])
    inside = (wall_ns >= between[0]) & (wall_ns <= between[1])
    if inside.sum() < 2:
        inside[:] = True
    wall, cpu = np.diff(wall_ns[inside]) / 1e3, np.diff(cpu_ns[inside]) / 1e3
    return {
        "num_steps": float(len(cpu)),
        "wall_us": float(np.median(wall)),
        "wall_us_mean": float(wall.mean()),
        "cpu_us": float(np.median(cpu)),
        "cpu_us_mean": float(cpu.mean()),
        "cpu_us_quick": float(np.percentile(cpu, 10)),
    }


def write_tokens(path: Path, *, num_tokens: int, vocab_size: int, seed: int) -> None:
    """A file of uint16 tokens with something to learn: each token follows from the one before, one time in four by
    chance.
    """
    rng = np.random.default_rng(seed)
    successor = rng.permutation(vocab_size).astype(np.uint16)
    tokens = rng.integers(0, vocab_size, num_tokens, dtype=np.uint16)
    follows = rng.random(num_tokens) < 0.75
    # Runs of followers are 4 tokens long on average: a few passes settle nearly all of them.
    for _ in range(8):
        tokens[1:][follows[1:]] = successor[tokens[:-1][follows[1:]]]
    tokens.tofile(path)


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """A tokenizer folder with as many tokens as asked for, the first of them the separator of documents.

    accel_train sizes a model by its tokenizer; the token files here are made of numbers and need no text.
    """
    from tokenizers import Tokenizer, models

    vocabulary = {"<|endoftext|>": 0} | {f"<{number}>": number for number in range(1, vocab_size)}
    folder.mkdir(parents=True)
    Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def gpt2_fields(*, vocab: int, block: int, layers: int, heads: int, width: int, dropout: float = 0.0) -> dict[str, Any]:
    """Return the fields of a transformers GPT-2; without dropout a step is the same work in every loop."""
    sizes = {"vocab_size": vocab, "n_positions": block, "n_embd": width, "n_layer": layers, "n_head": heads}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return {**sizes, **drop, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[str]) -> str:
    """The one form in which figures are printed and saved; columns named in `text` are set to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(headers, row, widths, strict=True)
        return "| " + " | ".join(c.ljust(width) if name in text else c.rjust(width) for name, c, width in cells) + " |"

    rule = [("-" * (width + 1)) + ("-" if name in text else ":") for name, width in zip(headers, widths, strict=True)]
    return "\n".join([line(headers), f"|{'|'.join(rule)}|", *map(line, rows)])


def median_and_range(values: Sequence[float], form: str) -> str:
    """`1.02 (1.01 to 1.04)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def machine() -> dict[str, Any]:
    """The hardware a figure comes from."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }
    import torch

    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
    return facts


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def versions() -> dict[str, str]:
    """The software a figure comes from; results that are written meanwhile do not make the commit another one."""
    found = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "transformers", "numpy"):
        found[name] = metadata.version(name)
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10)
        found["commit"] = commit.stdout.strip() if commit.returncode == 0 else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        found["commit"] = "unknown"
    return found


def arguments_of(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line: its docstring is the help, and `--save` keeps the results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--save",
        nargs="?",
        const=RESULTS,
        default=None,
        type=Path,
        metavar="FOLDER",
        help="also write the results as JSON and markdown (default folder: benchmarks/results)",
    )
    return parser


def show(lines: Sequence[str], record: Mapping[str, Any], *, save: Path | None, name: str) -> None:
    """Print a benchmark's text with machine, versions and date; with `--save` also write it and every figure."""
    facts = facts_of_now()
    print(_signed(lines, facts))
    if save is not None:
        write(lines, record, save=save, name=name, facts=facts)
        print(f"written: {save / name}.json and .md")


def write(
    lines: Sequence[str], record: Mapping[str, Any], *, save: Path, name: str, facts: Mapping[str, Any] | None = None
) -> None:
    """Write the record to NAME.json, and the text to NAME.md; the newest run replaces the one before."""
    facts = facts or facts_of_now()
    save.mkdir(parents=True, exist_ok=True)
    texts = {
        "json": json.dumps({**facts, **record}, indent=1, allow_nan=False) + "\n",
        "md": _signed(lines, facts).rstrip() + "\n",
    }
    for kind, text in texts.items():
        # An interruption leaves the text before.
        new = save / f"{name}.{kind}.new"
        new.write_text(text)
        new.replace(save / f"{name}.{kind}")


def facts_of_now() -> dict[str, Any]:
    """Return machine, versions and date."""
    return {"machine": machine(), "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _signed(lines: Sequence[str], facts: Mapping[str, Any]) -> str:
    on = facts["machine"]
    hardware = [f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']} GiB", *on.get("gpus", [])]
    software = [f"{package} {version}" for package, version in facts["versions"].items()]
    return "\n".join([*lines, f"{facts['date']}; {'; '.join(hardware)}; {', '.join(software)}"])
