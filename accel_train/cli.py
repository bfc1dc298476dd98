"""The command line: `accel-train COMMAND ...`, the same program as `python -m accel_train COMMAND ...`.

Exit codes: 0 done; 2 bad recipe, data or arguments; 3 stopped by the guard; 4 checkpoint or disk; 5 a peer process failed
or hung; 6 out of memory; 75 preempted, run again to go on; 130 interrupted. A mistake of the user is one line, `error:
...`; ACCEL_TRAIN_DEBUG=1 shows where it was found. Anything unforeseen keeps its traceback, and exits with 1.
"""

import argparse
import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from accel_train.flags import RECIPE_COMMANDS, UserError, build_parser, split_settings
from accel_train.state import CheckpointError, DataError, Preempted, RecipeError, TrainingStopped

if TYPE_CHECKING:
    from torch import nn

    from accel_train.recipe import Recipe

WAIT_FOR_RANK_0_SECONDS = 3.0
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    # Where torchao is installed, transformers imports it, and it tells of compiled parts that nothing here uses.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SystemExit as asked:  # --help and --version
        return asked.code if isinstance(asked.code, int) else 0
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        _report(error)
        return code


def program() -> NoReturn:
    """The installed command: `main`, and then the end of the process.

    One of several processes ends at once. Python's own way out would stop gloo's threads where they happen to be, and one
    that still waits for the interpreter's lock then aborts the process (torch 2.13, on a busy machine).
    """
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(error: BaseException) -> int | None:
    """What a failure exits with; None for one that nobody foresaw."""
    kinds: dict[type[BaseException], int] = {
        UserError: 2, DataError: 2, RecipeError: 2, TrainingStopped: 3, CheckpointError: 4, Preempted: 75, KeyboardInterrupt: 130, MemoryError: 6,
    }  # fmt: skip
    for kind, code in kinds.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return 4
    torch = sys.modules.get("torch")  # what torch raises can only come up where it has been imported
    if torch is None or not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "DefaultCPUAllocator: can't allocate" in text
    ):
        return 6
    return 5 if isinstance(error, torch.distributed.DistError) or "gloo/transport" in text else None


def _report(error: BaseException) -> None:
    """One line on stderr for each problem, from one process of all: rank 0, or one that fails where rank 0 does not."""
    rank, who = os.environ.get("RANK", "0"), ""
    if rank != "0":
        if isinstance(error, TrainingStopped | CheckpointError | Preempted):
            return  # all processes have agreed on these, so rank 0 says it
        # The launcher ends the others as soon as one has failed: if rank 0 has, it speaks, and this sleep is not survived.
        time.sleep(WAIT_FOR_RANK_0_SECONDS)
        who = f"rank {rank}: "
    if os.environ.get("ACCEL_TRAIN_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    text = str(error).strip() or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted; run the same command to go on from the last checkpoint"
    if exit_code(error) == 6:
        remedy = "lower batch.per_device_batch_size, or set precision.gradient_checkpointing"
        text = f"out of memory: {text.splitlines()[0]}; {remedy}"
    kind = "preempted" if isinstance(error, Preempted) else "error"
    for line in text.splitlines():
        print(f"{kind}: {who}{line}", file=sys.stderr, flush=True)


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
    if parsed.command not in SEVERAL_PROCESSES and os.environ.get("RANK", "0") != "0":
        return 0  # what the others take is one process
    return COMMANDS[parsed.command](parsed, settings)


def _load(arguments: argparse.Namespace, settings: Sequence[str]) -> "Recipe":
    from accel_train.recipe_file import load_recipe

    return load_recipe(arguments.recipe, arguments=settings)


def _run(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    # Read when torch is imported. On a busy CPU, OpenMP threads that spin for long made steps ten times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with users_mistakes():
        recipe = _load(arguments, settings)
        from accel_train.prepare import prepare_run

        run = prepare_run(recipe)
    from accel_train.loop import train_run

    try:
        train_run(run)
    finally:
        # Together, where all processes come here; after a fault of one of them it would wait for the others.
        if sys.exc_info()[0] in (None, TrainingStopped, Preempted):
            _leave_the_other_processes(run.module)
    return 0


def _leave_the_other_processes(module: "nn.Module") -> None:
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    # DDP's reducer must not be the last to hold the process group: it is freed with the interpreter's lock held, and joins
    # gloo's threads, which may be waiting for that lock (torch 2.13: one exit in ten hung on a busy machine).
    for name in ("reducer", "logger"):
        if hasattr(module, name):
            setattr(module, name, None)
    torch.distributed.destroy_process_group()


def _plan(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        if arguments.world_size is not None and arguments.world_size < 1:
            raise ValueError(f"--world-size={arguments.world_size}: must be at least 1")
        recipe = _load(arguments, settings)
        from accel_train.plan import format_plan, resolve_plan

        print("reading the data (text is tokenised once, and then reused by runs) ...", file=sys.stderr)
        plan = resolve_plan(recipe, arguments.world_size, arguments.gpu, progress=sys.stderr.isatty())
        print(format_plan(plan, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


def _evaluate(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.evaluating import format_measured, measure, open_for_evaluation, write_evaluation

        run = open_for_evaluation(Path(arguments.run), arguments.data, settings)
    measured = measure(run)
    if run.accelerator.is_main_process:
        print(format_measured(measured))
        print(write_evaluation(run, measured, arguments.data), file=sys.stderr)
    _leave_the_other_processes(run.inner)
    return 0


def _predict(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.predicting import open_for_prediction, predict

        run, out = open_for_prediction(Path(arguments.run), arguments.data, arguments.out, settings)
        if run.why_unlabelled is not None and run.accelerator.is_main_process:
            print(f"no true labels, because with labels it cannot be read: {run.why_unlabelled}", file=sys.stderr)
    written = predict(run, out)
    if written is not None:
        print(written)
    _leave_the_other_processes(run.inner)
    return 0


def _export(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    with users_mistakes():
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: export takes one process; start it without a launcher"
            )
        from accel_train.export import export_run, format_export

        exported = export_run(Path(arguments.run), Path(arguments.out) if arguments.out else None, arguments.quantize)
    print(format_export(exported))
    return 0


def _find_lr(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        recipe = _load(arguments, settings)
        from accel_train.range_test import rates_of_test

        rates = rates_of_test(arguments.min, arguments.max, arguments.steps)
        from accel_train.find_lr import prepare_test, run_test
        from accel_train.range_test import format_test, write_test

    with TemporaryDirectory(prefix="accel-train-find-lr-") as folder:
        with users_mistakes(), redirect_stdout(sys.stderr):  # what a run says of itself; the answer is the table
            run, recorder = prepare_test(recipe, rates, Path(folder))
        test = run_test(run, recorder, rates)
    if test.is_main_process:
        print(format_test(test))
        for path in write_test(test, Path(arguments.out or recipe.output_dir)):
            print(path, file=sys.stderr)
    _leave_the_other_processes(run.module)
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
        from accel_train.observe.report import write_report

        print(write_report([Path(run) for run in arguments.runs], Path(arguments.out) if arguments.out else None))
    return 0


def _verify(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.checkpoint import verify_run

        statuses = verify_run(Path(arguments.run))
    width = max((len(status.path.name) for status in statuses), default=10)
    print(f"{'checkpoint'.ljust(width)}  {'step':>10}  state")
    for status in statuses:
        print(f"{status.path.name.ljust(width)}  {status.step:>10}  {status.problem or 'ok'}")
    valid = [status for status in statuses if status.problem is None]
    if not valid:
        raise CheckpointError(f"{arguments.run} has no valid checkpoint; --checkpoint.resume never starts anew")
    print(f"a resume would use {valid[-1].path.name}")
    return 0


def _doctor(_: argparse.Namespace, __: Sequence[str]) -> int:
    from accel_train.doctor import examine, format_findings

    findings = examine()
    print(format_findings(findings))
    return 2 if any(finding.status == "bad" for finding in findings) else 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {
    "run": _run,
    "plan": _plan,
    "evaluate": _evaluate,
    "predict": _predict,
    "generate": _generate,
    "export": _export,
    "find-lr": _find_lr,
    "report": _report_runs,
    "verify": _verify,
    "doctor": _doctor,
}
SEVERAL_PROCESSES = ("run", "evaluate", "predict", "find-lr")
"""Commands that all processes of a launch work on together."""
