"""The command line: `accel-train COMMAND ...`, the same program as `python -m accel_train COMMAND ...`.

Exit codes: 0 done; 1 unforeseen, or a task exited; 2 bad recipe, data or arguments; 3 stopped by the guard, or the trained
model is not finite; 4 checkpoint or disk; 5 a peer process failed or hung; 6 out of memory; 75 preempted, run again to go on;
130 interrupted. A mistake of the user is one line, `error: ...`; ACCEL_TRAIN_DEBUG=1 shows where it was found. Anything
unforeseen keeps its traceback.
"""

import argparse
import faulthandler
import logging
import os
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from accel_train.ending import (
    OUTPUT_CLOSED,
    end_process,
    exit_code,
    exits_are_errors,
    is_output_closed,
    leave_the_other_processes,
    report,
)
from accel_train.flags import RECIPE_COMMANDS, UserError, build_parser, split_settings
from accel_train.launcher import launch_mistake, stop_with_launcher
from accel_train.redaction import keep_secrets_out_of_tracebacks
from accel_train.signals import StopRequest, signals_put_back
from accel_train.state import CheckpointError, Preempted, TrainingStopped

if TYPE_CHECKING:
    from accel_train.recipe import Recipe
    from accel_train.rehearsal import Rehearsal
    from accel_train.trained import TrainedRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    with signals_put_back():
        return _main(argv)


def _main(argv: Sequence[str] | None = None) -> int:
    # Where torchao is installed, transformers imports it, and it tells of compiled parts that nothing here uses.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as asked:  # --help and --version
        return asked.code if isinstance(asked.code, int) else 0
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and is_output_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still in the buffer has nowhere to go
            return OUTPUT_CLOSED
        known = exit_code(error)
        if known is None:
            raise
        report(error)
        return known


def program() -> NoReturn:
    """The installed command: `main`, and then the end of the process."""
    faulthandler.enable(2)  # a crash of native code (a driver, a kernel) leaves the Python line that led to it
    stop_with_launcher()
    keep_secrets_out_of_tracebacks()
    try:
        code = _main()
    except BaseException as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    end_process(code)


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Inside, a ValueError is the user's: of recipe, data, arguments or launch. Anywhere else it is a fault of ours."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _dispatch(arguments: list[str]) -> int:
    parser = build_parser()
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command is None and not set(arguments) & {"-h", "--help", "--version"}:
        if arguments:
            raise UserError(f"{arguments[0]} stands alone; name a command: {', '.join(COMMANDS)}")
        parser.print_help()
        return 0
    if command is not None and command not in COMMANDS:
        near = get_close_matches(command, [*COMMANDS, "train"], n=1)
        meant = f"did you mean {near[0].replace('train', 'run')}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {command!r}; {meant}")
    settings: list[str] = []
    if command in RECIPE_COMMANDS:
        arguments, settings = split_settings(arguments, RECIPE_COMMANDS[command])
    parsed = parser.parse_args(arguments)
    if parsed.command in SEVERAL_PROCESSES and (mistake := launch_mistake(os.environ)) is not None:
        raise UserError(mistake)
    if parsed.command not in SEVERAL_PROCESSES and os.environ.get("RANK", "0") != "0":
        return 0  # what the others take is one process
    with exits_are_errors():
        return COMMANDS[parsed.command](parsed, settings)


def _load(arguments: argparse.Namespace, settings: Sequence[str]) -> "Recipe":
    from accel_train.recipe_file import load_recipe

    return load_recipe(arguments.recipe, arguments=settings)


def _run(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    # Read when torch is imported. On a busy CPU, OpenMP threads that spin for long made steps ten times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if arguments.accept_changes:
        settings = [*settings, "--checkpoint.accept_changes", "true"]
    stop = StopRequest().__enter__()  # to the end of the process, which ends with a code of its own; `main` closes it
    with users_mistakes(), stop.preparing():
        recipe = _load(arguments, settings)
        from accel_train.prepare import Extensions, prepare_run

        run = prepare_run(recipe, extensions=Extensions(owns_process=True), stop=stop)
    from accel_train.loop import train_run

    try:
        train_run(run)
    finally:
        # Together, where all processes come here; after a fault of one of them it would wait for the others.
        if sys.exc_info()[0] in (None, TrainingStopped, Preempted):
            leave_the_other_processes(run.module)
    return 0


def _plan(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        if arguments.world_size is not None and arguments.world_size < 1:
            raise ValueError(f"--world-size={arguments.world_size}: must be at least 1")
        recipe = _load(arguments, settings)
        from accel_train.plan import resolve_plan
        from accel_train.plan_text import format_plan
        from accel_train.scale.estimate import Hardware

        if not arguments.no_data:
            print(
                "reading the data (text is tokenised once, and then reused by runs; --no-data reads none) ...",
                file=sys.stderr,
            )
        hardware = Hardware(arguments.gpus_per_node, arguments.interconnect, arguments.mfu)
        shown, no_data = sys.stderr.isatty(), arguments.no_data
        plan = resolve_plan(recipe, arguments.world_size, arguments.gpu, hardware, progress=shown, no_data=no_data)
        print(format_plan(plan, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


def _evaluate(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.evaluating import format_measured, measure, open_for_evaluation, write_evaluation

        run = open_for_evaluation(Path(arguments.run), arguments.data, settings)
        _say_what_was_left_out(run)
    measured = measure(run)
    if run.accelerator.is_main_process:
        print(format_measured(measured))
        print(write_evaluation(run, measured, arguments.data), file=sys.stderr)
    leave_the_other_processes(run.inner)
    return 0


def _predict(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.files import is_written_into
        from accel_train.predicting import open_for_prediction, predict

        run, out = open_for_prediction(Path(arguments.run), arguments.data, arguments.out, settings)
        _say_what_was_left_out(run)
    written = predict(run, out)
    if written is not None and not is_written_into(out):
        print(written)
    leave_the_other_processes(run.inner)
    return 0


def _say_what_was_left_out(run: "TrainedRun") -> None:
    for note in run.notes if run.accelerator.is_main_process else ():
        print(note, file=sys.stderr)


def _out(arguments: argparse.Namespace) -> Path | None:
    from accel_train.ownership import output_path

    return None if arguments.out is None else output_path(arguments.out)


def _export(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    with users_mistakes():
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: export takes one process; start it without a launcher"
            )
        from accel_train.export import export_run, format_export

        exported = export_run(Path(arguments.run), _out(arguments), arguments.quantize)
    print(format_export(exported))
    return 0


def _find_lr(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        recipe = _load(arguments, settings)
        from accel_train.range_test import rates_of_test

        rates = rates_of_test(arguments.min, arguments.max, arguments.steps)
        from accel_train.find_lr import prepare_test, run_test
        from accel_train.range_test import check_place, format_test, write_test

        out = _out(arguments) or Path(recipe.output_dir)
        check_place(out)
    with TemporaryDirectory(prefix="accel-train-find-lr-") as folder:
        with users_mistakes(), redirect_stdout(sys.stderr):  # what a run says of itself; the answer is the table
            run, recorder = prepare_test(recipe, rates, Path(folder))
        test = run_test(run, recorder, rates)
    if test.is_main_process:
        print(format_test(test))
        for path in write_test(test, out):
            print(path, file=sys.stderr)
    leave_the_other_processes(run.module)
    return 0


def _generate(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.generate import generate_from_run

        text = generate_from_run(
            Path(arguments.run),
            arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
    print(text)
    return 0


def _report_runs(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.files import is_written_into
        from accel_train.observe.report import write_report

        out = _out(arguments)
        written = write_report([Path(run) for run in arguments.runs], out, refuse=True)
    if out is None or not is_written_into(out):
        print(written)
    return 0


def _replay(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: replay takes one process; start it without a launcher"
            )
        from accel_train.replay import format_replay, replay_incident

        with suppress(BdbQuit):  # who leaves the debugger has seen enough
            replay = replay_incident(
                Path(arguments.incident), arguments.device, debug=arguments.debug, settings=settings
            )
            print(format_replay(replay))
    return 0


def _verify(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.verify import format_verified, verify

        if settings and not arguments.resume_proof:
            raise ValueError(f"{settings[0]} changes nothing of what is verified; it is for --resume-proof")
        verified = verify(Path(arguments.run))
    print(format_verified(verified))
    if verified.newest is None:
        raise CheckpointError(f"{arguments.run} has no valid checkpoint; --checkpoint.resume never starts anew")
    return _prove_resume(arguments, settings) if arguments.resume_proof else 0


def _rehearse(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    from accel_train.rehearse import rehearse_recipe

    asked = {"processes": arguments.processes, "steps": arguments.steps, "say": _say_aside}
    return _tell_rehearsal(lambda: rehearse_recipe(arguments.recipe, settings, **asked), with_plan=True)


def _prove_resume(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    from accel_train.rehearse import prove_resume

    asked = {"processes": arguments.processes, "steps": arguments.steps, "say": _say_aside}
    return _tell_rehearsal(lambda: prove_resume(Path(arguments.run), settings, **asked), with_plan=False)


def _tell_rehearsal(rehearse: "Callable[[], Rehearsal]", *, with_plan: bool) -> int:
    from accel_train.rehearsal import format_rehearsal
    from accel_train.sitting import SittingFailed

    try:
        with users_mistakes():
            found = rehearse()
    except SittingFailed as failed:
        report(failed)
        return failed.exit_code
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(("" if with_plan else "\n") + format_rehearsal(found, colour=colour, with_plan=with_plan))
    return 0 if found.same else 4


def _say_aside(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _doctor(_: argparse.Namespace, __: Sequence[str]) -> int:
    from accel_train.doctor import examine, format_findings

    findings = examine()
    print(format_findings(findings))
    return 2 if any(finding.status == "bad" for finding in findings) else 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {
    "run": _run,
    "plan": _plan,
    "rehearse": _rehearse,
    "evaluate": _evaluate,
    "predict": _predict,
    "generate": _generate,
    "export": _export,
    "find-lr": _find_lr,
    "report": _report_runs,
    "replay": _replay,
    "verify": _verify,
    "doctor": _doctor,
}
SEVERAL_PROCESSES = ("run", "evaluate", "predict", "find-lr")
"""Commands that all processes of a launch work on together."""
