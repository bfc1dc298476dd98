"""The command line: `accel-train COMMAND ...`, the same program as `python -m accel_train COMMAND ...`.

Exit codes:

    0    done
    1    unexpected error, or a task exited
    2    bad recipe, data, or arguments
    3    stopped by the guard, or the trained model is not finite
    4    checkpoint or disk
    5    a peer process failed or hung
    6    out of memory
    75   preempted; run the command again to resume
    130  interrupted
    141  standard output was closed

A mistake of the user is reported as one line, `error: ...`. ACCEL_TRAIN_DEBUG=1 adds its traceback. An unexpected error
keeps its traceback.
"""

import argparse
import faulthandler
import gc
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

from accel_train.buckets.store import fetched_run
from accel_train.cli.command import SEVERAL_FILES, Command, Outcome, Words, users_mistakes
from accel_train.cli.commands import COMMANDS, GROUPS
from accel_train.cli.correction import check_is_recipe, check_is_run, corrected
from accel_train.cli.json_output import FLAG, FLAG_HELP, JsonOutput, asks_for_json
from accel_train.core.errors import UserError
from accel_train.core.format import did_you_mean
from accel_train.core.redaction import keep_secrets_out_of_tracebacks
from accel_train.core.terminal import controls_kept_out, is_main
from accel_train.core.version import __version__
from accel_train.recipe.tasks import TASKS, describe_tasks
from accel_train.runtime.exit import OUTPUT_CLOSED, exit_code, exit_process, exits_are_errors, is_output_closed, report
from accel_train.runtime.launcher import launch_mistake, note_start, stop_with_launcher
from accel_train.runtime.signals import signals_put_back


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    with signals_put_back():
        return _main(argv)


def program() -> NoReturn:
    """Run the installed command, and end the process."""
    # By default, Python collects garbage after every 700 new objects. This takes a fifth of the import time (torch
    # makes a million objects).
    gc.set_threshold(100_000, 50, 100)
    # After a crash in native code (a driver, a kernel), this prints the Python line that led to it.
    faulthandler.enable(2)
    stop_with_launcher()
    note_start()
    keep_secrets_out_of_tracebacks()
    try:
        code = _main()
    except BaseException as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    exit_process(code)


def _main(argv: Sequence[str] | None = None) -> int:
    # If torchao is installed, transformers imports it. It then warns about compiled parts that this program does not
    # use.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not asks_for_json(words):
            code = _outcome_of(words).exit_code
        else:
            # The flag may stand anywhere, also before the command.
            words = [*(word for word in words if word != FLAG), FLAG]
            command = _named(words)
            with JsonOutput(command if command in COMMANDS else None) as output:
                output.outcome = _outcome_of(words)
            code = output.outcome.exit_code
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not is_output_closed():
            raise
        # The reader of the rest of the buffer is gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OUTPUT_CLOSED


@controls_kept_out()
def _outcome_of(words: Words) -> Outcome:
    """Run one command. An expected failure is reported and sets the exit code."""
    result = None
    try:
        outcome = _dispatch(words)
        if outcome.error is None:
            return outcome
        result = outcome.result
        raise outcome.error
    # --help and --version raise SystemExit.
    except SystemExit as error:
        return Outcome(exit_code=error.code if isinstance(error.code, int) else 0)
    except BaseException as error:
        code = exit_code(error)
        if code is None:
            raise
        name = _named(words)
        if isinstance(error, KeyboardInterrupt) and name in COMMANDS and not COMMANDS[name].resumes:
            error.args = ("interrupted",)
        report(error)
        return Outcome(result, code, error)


def _named(words: Sequence[str]) -> str | None:
    """Return the first word that is no flag: the name of the command."""
    return next((word for word in words if not word.startswith("-")), None)


def _dispatch(words: Words) -> Outcome:
    if _named(words) is None and not set(words) & {"-h", "--help", "--version"}:
        if words:
            raise UserError(f"{words[0]} needs a command. Give one of {', '.join(COMMANDS)}.")
        build_parser().print_help()
        return Outcome()
    try:
        arguments, settings = _accepted(words)
    except UserError as error:
        if (line := corrected(words, _accepted)) is None:
            raise
        raise UserError(f"{str(error).partition(';')[0]}. Type: {line}") from error
    command = COMMANDS[arguments.command]
    if command.processes == "all" and (mistake := launch_mistake(os.environ)) is not None:
        raise UserError(mistake)
    if command.processes != "all" and not is_main():
        return Outcome()
    if command.processes == "one" and (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"WORLD_SIZE={size}: {arguments.command} runs in one process. Start it without a launcher.")
    with users_mistakes():
        fetch = partial(fetched_run, with_model=arguments.command not in ("watch", "report"))
        if "run" in arguments:
            arguments.run = fetch(arguments.run)
        if "runs" in arguments:
            arguments.runs = [*map(fetch, arguments.runs)]
    with exits_are_errors():
        return command.run(arguments, settings)


def _accepted(words: Words) -> tuple[argparse.Namespace, Words]:
    """Parse the words of a command, and check the names of its settings. Imports no torch.

    Raises:
        UserError: an unknown command, flag, or setting; a missing word; a table in place of a recipe.
    """
    name = _named(words)
    if name is not None and name not in COMMANDS:
        there_are, known = f"there are {', '.join(COMMANDS)}", [*COMMANDS, "train"]
        meant = did_you_mean(name, known, there_are, show=lambda name: name.replace("train", "run"))
        raise UserError(f"unknown command {name!r}; {meant}")
    arguments, settings = parse_arguments(words)
    if settings:
        from accel_train.recipe.loader import split_flags

        with users_mistakes():
            # The command reads the settings again, with its recipe.
            split_flags(settings)
    if "recipe" in COMMANDS[arguments.command].arguments:
        check_is_recipe(arguments.command, arguments.recipe)
    elif "data" in COMMANDS[arguments.command].arguments:
        check_is_run(arguments.command, arguments.run, arguments.data)
    return arguments, settings


class _Parser(argparse.ArgumentParser):
    tasks: Callable[[], Iterable[str]] = tuple
    """Tasks that the help lists. Their descriptions are read only if the help is printed."""

    def format_help(self) -> str:
        rows = describe_tasks(self.tasks(), self._get_formatter()._width)
        text = super().format_help()
        return "\n".join([text, "tasks, and what a model learns:", *rows, ""]) if rows else text

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


class _GroupedCommands(argparse.HelpFormatter):
    """List the commands by what they are for."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        helps = {each.dest: each for each in action._choices_actions}
        parts = []
        for title, group in GROUPS.items():
            parts.append(f"{'':{self._current_indent}}{title}\n")
            self._indent()
            parts += [self._format_action(helps[name]) for name in group]
            self._dedent()
        return "".join(parts)


def build_parser(extend: Callable[[argparse.ArgumentParser, Command], None] | None = None) -> argparse.ArgumentParser:
    """Return argparse's parser of all commands. `extend` may add arguments to the parser of each command."""
    parser = _Parser(
        prog="accel-train",
        description="Train on any number of GPUs, with guards, and resume after any kill.",
        allow_abbrev=False,
        formatter_class=_GroupedCommands,
    )
    parser.tasks = lambda: TASKS
    parser.add_argument("--version", action="version", version=f"accel-train {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        epilog = "Override any recipe setting with --section.field VALUE." if command.takes_settings else None
        own = commands.add_parser(
            name, help=command.about, description=command.about, epilog=epilog, allow_abbrev=False
        )
        for argument, options in command.arguments.items():
            own.add_argument(argument, **options)
        own.add_argument(FLAG, action="store_true", help=FLAG_HELP)
        # For `completion`, which cannot import this module: it is one of the commands.
        own.tasks = command.tasks
        own.set_defaults(build_parser=build_parser)
        if extend is not None:
            extend(own, command)
    return parser


def parse_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, Words]:
    """Split the words into the command's arguments and the recipe's `--section.field VALUE` settings.

    argparse does not know the settings.

    Raises:
        UserError: a flag or value that the command does not take.
    """
    parser, rest = build_parser(), list(words)
    # At this point, the value of a setting may be parsed as the recipe.
    parsed, unknown = parser.parse_known_args(rest)
    command = COMMANDS[parsed.command]
    if not command.takes_settings:
        return _without_rest(parser, rest), []
    own: Words = []
    settings: Words = []
    while rest:
        word = rest.pop(0)
        is_setting = word.startswith("--") and word in unknown
        name, equals, value = word.partition("=")
        if not is_setting and re.fullmatch(r"[a-z_]\w*(\.\w+)*", name) and equals and not os.path.exists(word):
            raise UserError(f"{word}: settings begin with two hyphens. Write --{name} {shlex.quote(value)}")
        if is_setting and "." not in name and (meant := did_you_mean(name, command.arguments, least=0.8)):
            raise UserError(f"unknown flag {name}; {meant}")
        (settings if is_setting else own).append(word)
        if is_setting and not equals and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return _without_rest(parser, own), settings


def _without_rest(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    parsed, rest = parser.parse_known_args(words)
    if not rest:
        return parsed
    arguments = COMMANDS[parsed.command].arguments
    places = [options.get("metavar", name) for name, options in arguments.items() if name[0] != "-"]
    takes = "no such flag" if rest[0].startswith("-") else f"one {' and one '.join(places)}" if places else "no words"
    is_data = {*places} & {"PATH", "DATA"} and not rest[0].startswith("-")
    remedy = SEVERAL_FILES if is_data else f"see accel-train {parsed.command} --help"
    raise UserError(f"{' '.join(rest)}: {parsed.command} takes {takes}; {remedy}")
