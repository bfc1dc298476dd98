"""From the shell to the end of the first two steps: a bare script, `accel-train run`, and the same run resumed, in
turns.

The bare script has torch, Accelerate and transformers' GPT-2, the demo's model and one batch of random tokens: what
every trainer of this kind has to import. The data of the demo are tokenised before, as at any second start. CPU seconds
are the figure (both on one thread): wall time counts what else the machine does. A last start with `-X importtime`
shows which packages the imports spend their time in.

With `--trainer`: what accel_train.Trainer costs beside transformers.Trainer, made and trained for 20 steps of a tiny
model with the same arguments (their default saves at the end), twice in a fresh process each, in turns.

With `--commands`: for every command of accel-train how long its help takes, the error about a flag that it does not
know, and its first line when it has something to do; and the CPU time of a plan.

With `--errors`: wall time of the error about each of 17 mistakes. All can be seen before torch is imported.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import (
    REPOSITORY,
    arguments_of,
    child_environment,
    flags_of,
    markdown_table,
    median_and_range,
    show,
)

BARE = """
import torch
print("torch", flush=True)
from accelerate import Accelerator
print("accelerate", flush=True)
from transformers import GPT2Config, GPT2LMHeadModel
accelerator = Accelerator(cpu=True)
print("model class", flush=True)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=128, vocab_size=2048))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
tokens = torch.randint(0, 2048, (16, 128))
for _ in range(2):
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
print("two steps", flush=True)
"""
TRAINER = """
import sys, time
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from {package} import Trainer
rows = [{{"input_ids": torch.arange(12) + i, "labels": i % 3}} for i in range(32)]
sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
for call in ("first", "second"):
    model, before = BertForSequenceClassification(BertConfig(num_labels=3, **sizes)), time.process_time()
    settings = dict(max_steps=20, per_device_train_batch_size=8, logging_steps=5, use_cpu=True, report_to="none")
    Trainer(model, TrainingArguments(sys.argv[1] + call, **settings), train_dataset=rows).train()
    print(call, time.process_time() - before, flush=True)
    if call == "first":
        print("imports too", time.process_time(), flush=True)
"""
TRAINERS = {"transformers.Trainer": "transformers", "accel_train.Trainer": "accel_train"}
BAR_TRAINER = 0.3
"""CPU seconds that a call may cost more than with transformers' Trainer."""
STAGES = {
    "bare script": {
        "torch": "torch",
        "accelerate": "accelerate",
        "model class": "model class",
        "two steps": "two steps",
    },
    "accel-train run": {"first line": "to be trained", "prepared": "step 0: starting", "two steps": "step 2/"},
    "accel-train run, resumed": {"first line": "to be trained", "prepared": "step 2: ", "two steps": "step 4/"},
}
"""For each variant: its stages, and the text by which a line of its output ends one."""
BAR = 1.10
COMMANDS = {
    "run": "run gpt_tiny --output_dir NEW",
    "finetune": "finetune own.csv --output_dir NEW",
    "plan": "plan gpt_tiny --data.cache_dir {cache}",
    "evaluate": "evaluate {run} {text}",
    "predict": "predict {run} {text} --out NEW.csv",
    "export": "export {run} --out NEW",
    "find-lr": "find-lr gpt_tiny --data.cache_dir {cache} --out NEW",
    "rehearse": "rehearse gpt_tiny --output_dir NEW",
    "sweep": "sweep gpt_tiny --seed 0,1 --output_dir NEW",
    "generate": "generate {run}",
    "report": "report {run} --out NEW.html",
    "watch": "watch {run}",
    "replay": "replay {run}/incidents/step-00000001",
    "verify": "verify {run}",
    "doctor": "doctor",
    "recipes": "recipes",
    "init": "init gpt_tiny NEW.yaml",
    "explain": "explain optimizer.learning_rate",
    "completion": "completion bash",
}
"""What is asked of each command to see its first line; NEW is a path that is not there yet."""
_PLACES = {"run": "run", "cache": "cache", "text": "own.csv"}
COMMAND_BARS = {"help": 0.5, "wrong flag": 0.5, "first line": 1.0, "CPU": 3.0}
"""Seconds at most."""
Times = dict[str, tuple[float, float]]
"""Wall and CPU seconds since the process was started, by stage."""


def times_of(command: Sequence[str], stages: Mapping[str, str]) -> Times:
    """Start a command, and note when its output shows the end of each stage.

    Raises:
        RuntimeError: it failed, or a stage did not come.
    """
    found: Times = {}
    printed = []
    since = time.perf_counter()
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=child_environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        process = psutil.Process(child.pid)
        assert child.stdout is not None
        for line in child.stdout:
            printed.append(line)
            for stage, mark in stages.items():
                if stage not in found and mark in line:
                    cpu = process.cpu_times()
                    found[stage] = (time.perf_counter() - since, cpu.user + cpu.system)
    if child.returncode != 0 or len(found) < len(stages):
        raise RuntimeError(
            f"{' '.join(command)} ended with {child.returncode}, after {list(found)}:\n{''.join(printed)}"
        )
    return found


def run_measured(
    command: Sequence[str], *, folder: Path = REPOSITORY, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end with the environment of a measured process."""
    return subprocess.run(command, cwd=folder, env=child_environment(1), capture_output=True, text=True, check=check)


def demo(output_dir: Path, cache_dir: Path, num_steps: int, layers: int) -> list[str]:
    """Return the command of the demo, with so many steps and nothing after them."""
    settings = {
        "output_dir": output_dir,
        "data.cache_dir": cache_dir,
        "model.config.n_layer": layers,
        "optimizer.name": "adamw",  # as the bare script
        "schedule.max_steps": num_steps,
        "schedule.warmup_ratio": 0,
        "checkpoint.every_steps": 2,
        "checkpoint.accept_changes": "true",
        "data.eval_fraction": 0,
        "evaluate.sample_prompt": "null",
        "log.every_steps": 1,
    }
    return [sys.executable, "-m", "accel_train", "run", "recipes/gpt_tiny.yaml", *flags_of(settings)]


def measure(rounds: int, layers: int, folder: Path) -> dict[str, list[Times]]:
    """Return the times of each variant, an entry for each round."""
    run_measured(demo(folder / "first", folder / "cache", 2, layers))
    found: dict[str, list[Times]] = {variant: [] for variant in STAGES}
    for number in range(rounds):
        run = folder / f"run-{number}"
        commands = (
            [sys.executable, "-c", BARE],
            demo(run, folder / "cache", 2, layers),
            demo(run, folder / "cache", 4, layers),
        )
        for (variant, stages), command in zip(STAGES.items(), commands, strict=True):
            found[variant].append(times_of(command, stages))
    return found


def stage_table(found: Mapping[str, list[Times]]) -> str:
    """Medians by stage; the ratio is the median of the rounds' ratios to the bare script, with the
    least and the most.
    """
    rows = []
    for variant, runs in found.items():
        for stage in runs[0]:
            wall, cpu = ([run[stage][index] for run in runs] for index in (0, 1))
            row = [variant, stage, f"{statistics.median(wall):.2f}", f"{statistics.median(cpu):.2f}", "-", "-"]
            if stage == "first line":
                row[-1] = f"<= 1 s wall {'met' if statistics.median(wall) <= 1 else 'MISSED'}"
            if stage == "two steps":
                ratios = [run[stage][1] / bare[stage][1] for run, bare in zip(runs, found["bare script"], strict=True)]
                row[-2] = median_and_range(ratios, ".3f")
                row[-1] = f"<= {BAR:.2f} {'met' if statistics.median(ratios) <= BAR else 'MISSED'}"
            rows.append(row)
    headers = ["start", "stage", "wall s", "CPU s", "CPU / bare script", "bar"]
    return markdown_table(headers, rows, text=("start", "stage", "bar"))


def measure_trainers(rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the CPU seconds of the first and the second call in a process, and of all up to the first's end, by
    trainer and round.
    """
    found: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in TRAINERS}
    for number in range(rounds):
        for trainer, package in list(TRAINERS.items())[:: -1 if number % 2 else 1]:
            words = ["-c", TRAINER.format(package=package), str(folder / f"{package}-{number}-")]
            printed = run_measured([sys.executable, *words]).stdout
            calls = re.findall(r"^(first|second|imports too) ([0-9.]+)$", printed, re.MULTILINE)
            found[trainer].append({call: float(seconds) for call, seconds in calls})
    return found


def trainer_table(found: Mapping[str, list[dict[str, float]]]) -> str:
    """Medians over rounds; the difference is the median of the rounds' differences, with the least and the most."""
    theirs, ours = found.values()
    rows = []
    for call in theirs[0]:
        extra = [one[call] - other[call] for one, other in zip(ours, theirs, strict=True)]
        medians = [f"{statistics.median(each[call] for each in runs):.2f}" for runs in (theirs, ours)]
        verdict = f"<= +{BAR_TRAINER} {'met' if statistics.median(extra) <= BAR_TRAINER else 'MISSED'}"
        rows.append([call, *medians, median_and_range(extra, "+.2f"), "-" if "import" in call else verdict])
    return markdown_table(["call", *found, "more, CPU s", "bar"], rows, text=("call", "bar"))


def first_line(words: Sequence[str], folder: Path) -> float:
    """Return the wall seconds to the first line of a command, which is not waited for.

    Raises:
        RuntimeError: it ended without a word.
    """
    command, since = [sys.executable, "-m", "accel_train", *words], time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=child_environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        assert child.stdout is not None
        line, seconds = child.stdout.readline(), time.perf_counter() - since
        child.kill()
    if not line.strip():
        raise RuntimeError(f"{' '.join(words)} printed nothing")
    return seconds


def whole(words: Sequence[str], folder: Path, exit_code: int) -> tuple[float, float]:
    """Return the wall and the CPU seconds of a command that ends with this exit code.

    Raises:
        RuntimeError: it ended with another one.
    """
    since, before = time.perf_counter(), os.times()
    ended = run_measured([sys.executable, "-m", "accel_train", *words], folder=folder, check=False)
    if ended.returncode != exit_code:
        raise RuntimeError(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stderr}")
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return time.perf_counter() - since, cpu


def write_table(path: Path) -> None:
    path.write_text("text,label\n" + "".join(f"text {row},{'ab'[row % 2]}\n" for row in range(40)))


def measure_commands(rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return wall seconds of each command by what was asked of it, and the CPU seconds of `plan`, an entry for each
    round.
    """
    write_table(folder / "own.csv")
    run_measured([*demo(folder / "run", folder / "cache", 2, 1), "--evaluate.sample_prompt", ""])
    words = {name: [part.format(**_PLACES) for part in shlex.split(text)] for name, text in COMMANDS.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in words}
    whole(words["plan"], folder, 0)  # tokenises the data, as a first start does
    for number in range(rounds):
        for name, own in words.items():
            new = [part.replace("NEW", f"new-{name}-{number}") for part in own]
            times = {
                "help": whole([name, "--help"], folder, 0)[0],
                "wrong flag": whole([*new, "--no_such_flag", "1"], folder, 2)[0],
                "first line": first_line(new, folder),
            }
            if name == "plan":
                times["CPU"] = whole(new, folder, 0)[1]
            for what, seconds in times.items():
                found[name].setdefault(what, []).append(seconds)
    return found


ERRORS = {
    "path that is missing": "finetune gone.csv",
    "glob without a match": "finetune rows/*.csv",
    "column that is missing": "finetune own.csv --label kind",
    "column of a recipe": "run own.yaml --data.label_column kind",
    "data of a recipe": "run gpt_tiny --data.train gone.txt",
    "recipe that is missing": "run gpt_tny",
    "setting that is unknown": "run gpt_tiny --optimizer.learning_rat 1",
    "value out of range": "run gpt_tiny --seed -1",
    "two mistakes": "run gpt_tiny --seed -1 --batch.global_batch_size 0",
    "table for a recipe": "run own.csv",
    "GPU that is unknown": "plan gpt_tiny --gpu H1000",
    "fp16 without CUDA": "run gpt_tiny --precision.mixed_precision fp16",
    "folder that cannot be made": "run gpt_tiny --output_dir /proc/run",
    "folder that is a file": "run gpt_tiny --output_dir own.csv",
    "package of a tracker": "run gpt_tiny --log.trackers [trackio]",
    "nothing to sweep": "sweep gpt_tiny",
    "run that is missing": "evaluate runs/gone",
}
"""Mistakes, and the command that makes each."""
ERROR_BAR = 1.0
"""Seconds."""
RECIPE_OF_OWN = """
task: text-classification
output_dir: runs/own
model: {config: {model_type: ngrams}}
tokenizer: bytes
data: {train: own.csv, text_columns: [text], label_column: label}
schedule: {num_epochs: 1}
"""


def measure_errors(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return wall seconds of the error about each mistake, one for each round."""
    write_table(folder / "own.csv")
    (folder / "own.yaml").write_text(RECIPE_OF_OWN)
    words = {name: shlex.split(text) for name, text in ERRORS.items()}
    return {name: [whole(each, folder, 2)[0] for _ in range(rounds)] for name, each in words.items()}


def error_table(found: Mapping[str, list[float]]) -> str:
    """Medians over rounds, and which of them are over the bar."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    rows = [
        [name, f"accel-train {ERRORS[name]}", f"{median:.2f}", "met" if median <= ERROR_BAR else "MISSED"]
        for name, median in medians.items()
    ]
    headers = ["mistake", "command", f"error s (<= {ERROR_BAR:g})", "bar"]
    return markdown_table(headers, rows, text=("mistake", "command", "bar"))


def command_table(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Medians over rounds, and which of them are over their bar."""
    rows = []
    for name, times in found.items():
        medians = {what: statistics.median(seconds) for what, seconds in times.items()}
        missed = [what for what, bar in COMMAND_BARS.items() if medians.get(what, 0.0) > bar]
        cells = [f"{medians[what]:.2f}" if what in medians else "-" for what in COMMAND_BARS]
        rows.append([name, *cells, f"MISSED: {', '.join(missed)}" if missed else "met"])
    headers = [f"{what} s (<= {bar:g})" for what, bar in COMMAND_BARS.items()]
    return markdown_table(["command", *headers, "bars"], rows, text=("command", "bars"))


def import_seconds(command: Sequence[str]) -> dict[str, float]:
    """Return the seconds that importing each package takes by itself, as `-X importtime` measures them."""
    printed = run_measured([command[0], "-X", "importtime", *command[1:]]).stderr
    found: dict[str, float] = {}
    for microseconds, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", printed):
        package = name.split(".")[0]
        found[package] = found.get(package, 0.0) + int(microseconds) / 1e6
    return found


def report(arguments: argparse.Namespace, found: Mapping[str, list[Times]], imports: Mapping[str, float]) -> list[str]:
    rows = [[name, f"{seconds:.2f}"] for name, seconds in sorted(imports.items(), key=lambda item: -item[1])[:12]]
    return [
        f"## Start-up: the demo's GPT-2 ({arguments.layers} layers), 1 thread, {arguments.rounds} round(s)",
        "",
        stage_table(found),
        "",
        f"Imports of `accel-train run`, the report at its end included: {sum(imports.values()):.2f} s, of which",
        "",
        markdown_table(["package", "s by itself"], rows, text=("package",)),
        "",
    ]


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trainer", action="store_true", help="20 steps with accel_train.Trainer and transformers'")
    parser.add_argument("--commands", action="store_true", help="help, errors and first lines of every command")
    parser.add_argument("--errors", action="store_true", help="errors about mistakes that need no torch")
    arguments = parser.parse_args()
    found: Any
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        if arguments.commands:
            name, title = "startup-commands", "How long each command takes to say something, wall s"
            table = command_table(found := measure_commands(arguments.rounds, folder))
        elif arguments.errors:
            name, title = "startup-errors", "How long the error about a mistake takes, wall s"
            table = error_table(found := measure_errors(arguments.rounds, folder))
        elif arguments.trainer:
            name, title = "startup-trainer", "A Trainer made and trained for 20 tiny steps"
            table = trainer_table(found := measure_trainers(arguments.rounds, folder))
        else:
            found = measure(arguments.rounds, arguments.layers, folder)
            imports = import_seconds(demo(folder / "imports", folder / "cache", 2, arguments.layers))
            record = {"rounds": found, "imports": imports}
            show(report(arguments, found, imports), record, save=arguments.save, name="startup")
            return
    lines = [f"## {title}, 1 thread, {arguments.rounds} round(s)", "", table, ""]
    show(lines, {"rounds": found}, save=arguments.save, name=name)


if __name__ == "__main__":
    main()
