"""The command line: `accel-train COMMAND ...`, the same program as `python -m accel_train COMMAND ...`.

Exit codes: 0 done; 2 bad recipe, data or arguments; 3 stopped by the guard; 4 checkpoint or disk; 5 a peer process failed
or hung; 6 out of memory; 75 preempted, run again to go on; 130 interrupted. A mistake of the user is one line, `error:
...`; ACCEL_TRAIN_DEBUG=1 shows where it was found. Anything unforeseen keeps its traceback, and exits with 1.
"""

import argparse
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from accel_train import __version__
from accel_train.state import CheckpointError, Preempted, TrainingStopped

if TYPE_CHECKING:
    from torch import nn

    from accel_train.recipe import Recipe

WAIT_FOR_RANK_0_SECONDS = 3.0
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class UserError(Exception):
    """A mistake in what the user gave: told in one line, without a traceback."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
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


def exit_code(error: BaseException) -> int | None:
    """What a failure exits with; None for one that nobody foresaw."""
    kinds: dict[type[BaseException], int] = {
        UserError: 2, TrainingStopped: 3, CheckpointError: 4, Preempted: 75, KeyboardInterrupt: 130, MemoryError: 6,
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
    if parsed.command != "run" and os.environ.get("RANK", "0") != "0":
        return 0  # only training takes several processes
    return COMMANDS[parsed.command](parsed, settings)


def split_settings(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command itself, and the recipe's `--section.field VALUE`, which argparse does not know."""
    rest = list(arguments)
    ours: list[str] = []
    settings: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        target = ours if name in own or not word.startswith("--") or word == "--help" else settings
        if target is settings and "." not in name and (near := get_close_matches(name, own, n=1, cutoff=0.8)):
            raise UserError(f"unknown flag {name}; did you mean {near[0]}?")
        target.append(word)
        if word.startswith("--") and not equals and word != "--help" and rest and not rest[0].startswith("--"):
            target.append(rest.pop(0))
    return ours, settings


def build_parser() -> argparse.ArgumentParser:
    """All commands and their own flags."""
    parser = _Parser(
        prog="accel-train", description="Train on any number of GPUs, guarded and resumable.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"accel-train {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, about: str, usage: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about, usage=usage, allow_abbrev=False)

    settings = "[--section.field VALUE ...]"
    run = add("run", "train; resumes by itself", f"accel-train run RECIPE {settings}")
    plan = add(
        "plan",
        "say everything a run will be, before it costs anything",
        f"accel-train plan RECIPE [--world-size N] [--gpu NAME] {settings}",
    )
    for command in (run, plan):
        command.add_argument(
            "recipe", metavar="RECIPE", help="a recipe file; --section.field VALUE overrides any of its settings"
        )
    plan.add_argument("--world-size", type=int, metavar="N", help="processes (GPUs) to plan for; default: those here")
    plan.add_argument("--gpu", metavar="NAME", help="the GPU to plan for: H200, A100, ...; default: the one here")
    generate = add("generate", "write text with a finished causal-lm run")
    generate.add_argument("run", metavar="RUN", help="the output_dir of a finished run")
    generate.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token; default: 0.8"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    report = add("report", "write report.html (and PNGs) of one run, or a comparison of several")
    report.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run")
    report.add_argument("--out", metavar="FILE", help="where to write the HTML")
    verify = add("verify", "check every checkpoint's digests, and say which one a resume would use")
    verify.add_argument("run", metavar="RUN", help="the output_dir of a run")
    add("doctor", "GPUs, driver, versions, precision, launcher, disk: what is wrong, and what to do")
    return parser


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
    "generate": _generate,
    "report": _report_runs,
    "verify": _verify,
    "doctor": _doctor,
}
RECIPE_COMMANDS = {"run": (), "plan": ("--world-size", "--gpu")}
"""Commands that take a recipe's settings as flags, with their own flags."""
