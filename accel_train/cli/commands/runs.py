"""Commands for runs (`evaluate`, `predict`, `generate`, `export`, `report`, `watch`, `replay`), and `doctor`."""

import os
import sys
from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.buckets.store import fetched_run, url_of
from accel_train.cli import results
from accel_train.cli.command import (
    DATA,
    RUN,
    Argument,
    Arguments,
    Command,
    Outcome,
    Settings,
    data_of,
    finite_number,
    flag,
    importing,
    importing_for,
    out_of,
    result_of,
    say,
    show,
    users_mistakes,
    value,
    whole_number,
)
from accel_train.core.errors import UserError
from accel_train.core.files import is_written_into, output_path, write_atomically
from accel_train.core.json_io import json_text
from accel_train.core.redaction import without_places
from accel_train.core.terminal import busy
from accel_train.core.version import __version__
from accel_train.runtime.exit import end_process_group

if TYPE_CHECKING:
    from accel_train.inference.finished_run import TrainedRun
    from accel_train.runtime.doctor import Finding

LOADING = "loading the model and the data ..."
GENERATES = "causal-lm"
"""Task whose runs `generate` and `chat` read."""


def _evaluate(arguments: Arguments, settings: Settings) -> Outcome:
    with users_mistakes():
        data, folder = data_of(arguments), Path(arguments.run)
        with importing_for(folder, settings, data, scores=True):
            from accel_train.inference import evaluate
        say(LOADING)
        run = evaluate.open_for_evaluation(folder, data, settings)
        _print_notes(run)
    measured = evaluate.measure(run)
    result = None
    if run.accelerator.is_main_process:
        print(evaluate.format_measured(measured, evaluate.baselines_of(folder, data)))
        file = evaluate.write_evaluation(run, measured, data)
        print(file, file=sys.stderr)
        result = result_of(results.EvaluateResult, measured, run=arguments.run, data=data, file=str(file))
    end_process_group()
    return Outcome(result)


def _predict(arguments: Arguments, settings: Settings) -> Outcome:
    with users_mistakes():
        from accel_train.inference.options import Options

        data, folder = data_of(arguments), Path(arguments.run)
        draw = None if arguments.draw is None else output_path(arguments.draw, "--draw")
        options = Options(min_score=arguments.min_score, row_per_box=arguments.row_per_box, draw=draw)
        options.check_early(folder, arguments.out)
        with importing_for(folder, settings, data):
            from accel_train.inference.predict import open_for_prediction, predict
        say(LOADING)
        run, out = open_for_prediction(folder, data, arguments.out, settings, options)
        _print_notes(run)
    written, result = predict(run, out, options), None
    if written is not None:
        for path in (written.table, draw):
            if path is not None and not is_written_into(path):
                print(path)
        result = result_of(
            results.PredictResult,
            written,
            run=arguments.run,
            data=data,
            file=str(out),
            pictures=None if draw is None else str(draw),
        )
    end_process_group()
    return Outcome(result)


def _print_notes(run: "TrainedRun") -> None:
    for note in run.notes:
        say(note)


def _sampling_of(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of the sampling, checked before torch is imported."""
    from accel_train.inference.generate import check_generation

    names = ("max_new_tokens", "temperature", "seed")
    sampling = {name: getattr(arguments, name) for name in names}
    check_generation(Path(arguments.run), max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature)
    return sampling


@users_mistakes()
def _generate(arguments: Arguments, _: Settings) -> Outcome:
    sampling = _sampling_of(arguments)
    with importing(arguments.run, GENERATES):
        from accel_train.inference.generate import generate_from_run
    text = generate_from_run(Path(arguments.run), arguments.prompt, **sampling)
    print(text)
    return Outcome(results.GenerateResult(prompt=arguments.prompt, text=text))


@users_mistakes()
def _chat(arguments: Arguments, _: Settings) -> Outcome:
    sampling = _sampling_of(arguments)
    with importing(arguments.run, GENERATES):
        from accel_train.inference.generate import chat_with_run
    return Outcome(results.ChatResult(messages=chat_with_run(Path(arguments.run), _typed(), **sampling)))


def _typed() -> Iterator[str]:
    """Yield the lines that a person types, until the end of the input (Ctrl-D), or `exit`."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print("Type a message. Ctrl-D ends.")
    with suppress(EOFError):
        while (line := input(prompt)).strip() != "exit":
            if line.strip():
                yield line


@users_mistakes()
def _export(arguments: Arguments, _: Settings) -> Outcome:
    from accel_train.checkpoint.run_recipe import CONSENT

    given = {name: getattr(arguments, name) for name in CONSENT}
    settings = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    run, quantize, onnx = Path(arguments.run), arguments.quantize, arguments.onnx
    if onnx:
        from accel_train.cli.early import check_onnx

        check_onnx(run)
    with importing_for(run, settings):
        from accel_train.inference.export import export_run
        from accel_train.inference.int8_cost import format_export

    folder, record = export_run(run, out_of(arguments), quantize, settings, onnx=onnx)
    print(format_export(folder, record))
    return Outcome(results.ExportResult(folder=str(folder), quantize=quantize, onnx=onnx, details=record))


@users_mistakes()
def _push(arguments: Arguments, _: Settings) -> Outcome:
    run = Path(arguments.run)
    with importing_for(run, ()):
        from accel_train.inference.push import format_push, push_run

    push = push_run(
        run, arguments.name, private=arguments.private, updates=arguments.update, is_dry_run=arguments.dry_run
    )
    print(format_push(push))
    return Outcome(result_of(results.PushResult, push, run=str(run), repository=push.name))


@users_mistakes()
def _report(arguments: Arguments, _: Settings) -> Outcome:
    from accel_train.report.report import write_report

    if arguments.follow:
        if arguments.json:
            raise ValueError(
                "--follow and --json exclude each other: --follow never ends on its own, and --json prints at the end"
            )
        return _follow(arguments)
    if arguments.port is not None:
        raise ValueError(f"--port {arguments.port} needs --follow")
    out = out_of(arguments)
    written = write_report([Path(run) for run in arguments.runs], out, refuse=True)
    if out is None or not is_written_into(out):
        print(written)
    return Outcome(results.ReportResult(file=str(written), runs=arguments.runs))


def _follow(arguments: Arguments) -> Outcome:
    from accel_train.report.follow import ReportServer

    if arguments.out is not None:
        raise ValueError("--out and --follow exclude each other: --follow writes no file")
    with (
        ReportServer([Path(run) for run in arguments.runs], arguments.port or 0) as server,
        suppress(KeyboardInterrupt),
    ):
        print(f"{server.address} (press Ctrl-C to stop)", flush=True)
        server.serve_forever()
    return Outcome()


@users_mistakes()
def _watch(arguments: Arguments, _: Settings) -> Outcome:
    from accel_train.report.watch import show_in_terminal, watch_run

    if arguments.json:
        return Outcome(_watched(Path(arguments.run)))
    in_place = sys.stdout.isatty() and not arguments.once
    # Ctrl-C ends the view, not the run.
    with suppress(KeyboardInterrupt):
        show = show_in_terminal if in_place else print
        folder = Path(arguments.run)
        refresh = partial(fetched_run, url_of(folder) or arguments.run, with_model=False)
        watch_run(folder, once=arguments.once, every_seconds=arguments.every, show=show, refresh=refresh)
    return Outcome()


def _watched(folder: Path) -> results.WatchResult:
    """Return the current state of a run."""
    from accel_train.report.run import load_run
    from accel_train.report.watch import LAST_EVENTS, seconds_left, silent_seconds, state_of, total_steps

    run = load_run(folder)
    state, total = state_of(run, silent_seconds(folder)), total_steps(run)
    last = run.train[-1] if run.train else {}
    return {
        "run": str(folder),
        "state": state.text,
        "has_ended": state.has_ended,
        "status": run.summary.get("status"),
        "step": last.get("step", 0),
        "total_steps": total,
        "seconds_left": None if state.has_ended else seconds_left(run, total),
        "metrics": last,
        "evaluation": run.evals[-1] if run.evals else {},
        "events": run.events[-LAST_EVENTS:],
    }


@users_mistakes()
def _replay(arguments: Arguments, settings: Settings) -> Outcome:
    with importing(arguments.incident):
        from accel_train.recovery.replay import format_replay, replay_incident

    if arguments.debug and arguments.json:
        raise ValueError("--debug and --json exclude each other: the debugger is interactive")
    try:
        replay = replay_incident(Path(arguments.incident), arguments.device, debug=arguments.debug, settings=settings)
    # Leaving the debugger is not an error.
    except BdbQuit:
        return Outcome()
    print(format_replay(replay))
    micro_batches = [
        result_of(
            results.ReplayedMicroBatch,
            each,
            loss_sum=each.outcome.loss,
            gradient_norm=each.outcome.total,
            not_finite=each.outcome.not_finite,
            first_module=first.name if (first := each.watch.first_not_finite()) is not None else None,
        )
        for each in replay.micro_batches
    ]
    result = result_of(
        results.ReplayResult,
        replay,
        incident=arguments.incident,
        step=replay.incident.step,
        kind=replay.incident.kind,
        sentence=replay.incident.sentence,
        micro_batches=micro_batches,
    )
    return Outcome(result)


def _doctor(arguments: Arguments, _: Settings) -> Outcome:
    from accel_train.runtime.doctor import examine, format_findings

    with busy("looking at this machine: packages, GPUs, disks"):
        findings = examine()
    print(format_findings(findings))
    file = _examine_gpus(arguments.cpu, findings) if arguments.gpus or arguments.cpu else None
    is_bad = any(finding.status == "bad" for finding in findings)
    result = {"findings": [asdict(finding) for finding in findings], "file": file}
    return Outcome(result, 0 if not is_bad else 1 if file else 2)


def _examine_gpus(on_cpu: int | None, findings: "list[Finding]") -> str:
    """Print and add the findings of several GPUs, or of processes on the CPU. Write all to a new file, and name it."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("doctor --gpus starts its own processes. Run it without a launcher, once on each machine.")
    with importing("doctor"):
        import torch

        from accel_train.experiments.gpus import examine_gpus
        from accel_train.runtime.doctor import format_findings
    num_processes = on_cpu or torch.cuda.device_count()
    if num_processes < 2:
        raise UserError(
            f"--gpus needs at least 2 GPUs, and torch finds {num_processes}. To try it without GPUs: accel-train "
            "doctor --cpu 2"
        )
    record = dict[str, Any](accel_train=__version__)
    for finding in examine_gpus(num_processes, record, on_gpus=not on_cpu):
        show(format_findings([finding]))
        findings.append(finding)
    record["findings"] = [asdict(finding) for finding in findings]
    file = next(name for number in count(1) if not Path(name := f"doctor-gpus-{number}.json").exists())
    write_atomically(Path(file), without_places(json_text(record)).encode())
    show(f"{file} has all of this, without names of machines and folders. Attach it to an issue.")
    return file


EVALUATE = Command(
    _evaluate,
    results.EvaluateResult,
    "compute metrics of a finished run, on its held-out data or on other labeled data",
    {
        "run": RUN,
        **DATA,
    },
    processes="all",
)

PREDICT = Command(
    _predict,
    results.PredictResult,
    "write a table of a finished run's predictions, one row per sample; labels are not needed",
    {
        "run": RUN,
        **DATA,
        "--out": value("FILE", "csv, jsonl, or parquet file, or json for COCO boxes; default: RUN/predictions.csv"),
        "--min-score": value(
            "X",
            "least score of a box; default: the score with the best F1 on the held-out data",
            finite_number(least=0, most=1),
        ),
        "--row-per-box": flag("write a row for each box: file, class, score, x1, y1, x2, y2"),
        "--draw": value("FOLDER", "write a picture of each image with its boxes or its mask"),
    },
    processes="all",
)

_SAMPLING: dict[str, Argument] = {
    "--max-new-tokens": value("N", "tokens to write", whole_number(1), "200"),
    "--temperature": value("T", "sampling temperature; 0 takes the likeliest token", finite_number(least=0), "0.8"),
    "--seed": value("S", "seed of the sampling", whole_number(0, 2**64 - 1), "0"),
}
GENERATE = Command(
    _generate,
    results.GenerateResult,
    "write text with a finished language model run",
    {"run": RUN, "--prompt": {**value("TEXT", "beginning of the text"), "default": ""}, **_SAMPLING},
    takes_settings=False,
)
CHAT = Command(
    _chat,
    results.ChatResult,
    "type messages to a finished language model run, and read its answers",
    {"run": RUN, **_SAMPLING},
    takes_settings=False,
)

OWN_CODE = value("MODULE:CLASS", "allow this code of the run's recipe; read it first")

EXPORT = Command(
    _export,
    results.ExportResult,
    "write the model into a folder to share; int8 makes it smaller, --onnx runs it without torch",
    {
        "run": RUN,
        "--out": value("FOLDER", "folder to write; default: RUN/export, with -onnx and -int8 after it"),
        "--quantize": {
            "choices": ["int8"],
            "help": "int8 stores linear layers in a quarter of the memory; needs torchao, with --onnx onnxruntime",
        },
        "--onnx": flag("write an ONNX graph for onnxruntime, and check that its metrics are equal"),
        "--task": OWN_CODE,
        "--optimizer.name": OWN_CODE,
        "--schedule.type": OWN_CODE,
    },
    takes_settings=False,
    processes="one",
)

PUSH = Command(
    _push,
    results.PushResult,
    "send the model to the Hugging Face Hub, with a card of its scores",
    {
        "run": RUN,
        "name": value("NAME", "repository: a name, or owner/name"),
        "--private": flag("make the new repository private"),
        "--update": flag("add a commit to a repository that has files; the old files stay in its history"),
        "--dry-run": flag("print the files and the card, and send nothing"),
    },
    takes_settings=False,
    processes="one",
)

REPORT = Command(
    _report,
    results.ReportResult,
    "write an HTML report of one run, or compare several runs",
    {
        "runs": value("RUN", "output_dir of a run", nargs="+"),
        "--out": value("FILE", "HTML file to write; default: RUN/report.html"),
        "--follow": flag("serve the page on localhost and reload it while the run trains; writes no file"),
        "--port": value("N", "port of --follow; default: a free port", whole_number(0, 65_535)),
    },
    takes_settings=False,
)

WATCH = Command(
    _watch,
    results.WatchResult,
    "show a run in the terminal until it ends: state, loss, learning rate, time left, events",
    {
        "run": value("RUN", "output_dir of a run; its processes may be on other machines"),
        "--once": flag("print the state once and exit"),
        "--every": value("SECONDS", "seconds between updates", finite_number(), "2"),
    },
    takes_settings=False,
    processes="one",
)

REPLAY = Command(
    _replay,
    results.ReplayResult,
    "recompute the bad step of an incident, module by module",
    {
        "incident": value("INCIDENT", "folder in RUN/incidents"),
        "--device": value("DEVICE", "cpu or cuda; default: cuda if available"),
        "--debug": flag("stop in the debugger at the first module whose output is not finite"),
    },
    processes="one",
)

DOCTOR = Command(
    _doctor,
    results.DoctorResult,
    "check GPUs, driver, versions, precision, launcher, and disk, and print how to fix each problem",
    {
        "--gpus": flag(
            "also measure each link between GPUs, compare training on all with training on one, and write "
            "doctor-gpus-N.json"
        ),
        "--cpu": value("N", "the same on N processes of the CPU, to try it without GPUs", whole_number(2)),
    },
    takes_settings=False,
)
