"""The type of a command, and helpers that several commands share."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from accel_train.checkpoint.run_recipe import check_run_folder, named_recipe, read_recipe
from accel_train.cli.early import check_before_torch
from accel_train.core.errors import UserError
from accel_train.core.files import output_path
from accel_train.core.format import LARGEST_COUNT, wrap
from accel_train.core.redaction import redact_text
from accel_train.core.terminal import busy, columns_of, is_main
from accel_train.recipe.schema import Recipe

SEVERAL_FILES = "for several files, name their folder, or a pattern in quotes: 'part-*.csv'"
"""Advice where a command takes one PATH or DATA, and the shell has written out a pattern."""

T = TypeVar("T")
Arguments = argparse.Namespace
Words = list[str]
Settings = Sequence[str]
"""Words `--section.field VALUE`."""
Argument = dict[str, Any]
"""Options of `add_argument` for one argument."""


def flag(about: str) -> Argument:
    """Return the options of an argument without a value."""
    return {"action": "store_true", "help": about}


def value(
    metavar: str, about: str, read: Callable[[str], object] = str, default: str | None = None, **options: Any
) -> Argument:
    """Return the options of an argument with a value. The help names the default, as a user would write it."""
    shown = about if default is None else f"{about}; default: {default}"
    return {"metavar": metavar, "help": shown, "type": read, "default": default, **options}


RECIPE = value("RECIPE", "recipe file, or a name from `accel-train recipes`")
VERBOSE = flag("print every choice with its reason, every logged step, and all scores; report.html has them, too")
RUN = value("RUN", "output_dir of a finished run")
DATA = {
    "data": value("DATA", "file, folder, or data set; default: the held-out data of the run", nargs="?"),
    "--data": value("DATA", "same as DATA", dest="named_data"),
}


class Outcome(NamedTuple):
    """The outcome of a command: its result, printed by `--json`, its exit code, and its error."""

    result: Mapping[str, Any] | None = None
    """Result of the command's type; None for a command without a result, and on processes that print nothing."""
    exit_code: int = 0
    error: BaseException | None = None
    """Error to report when a command returns a result but still fails; sets the exit code."""


class Command(NamedTuple):
    """One command: its function, its line in `--help`, and its arguments by name, as `add_argument` takes them."""

    run: Callable[[Arguments, Settings], Outcome]
    """Function that gets the parsed arguments and the recipe settings. It prints the output for people."""
    result: type
    """Type of its result, as `--json` prints it."""
    about: str
    arguments: dict[str, Argument]
    takes_settings: bool = True
    """Whether `--section.field VALUE` overrides a setting of the command's recipe."""
    processes: Literal["all", "rank 0", "one"] = "rank 0"
    """Processes of a launch that run the command; `one` refuses a launch of several processes."""
    resumes: bool = False
    """Whether the same command goes on where an interrupted one stopped."""
    tasks: Callable[[], Iterable[str]] = tuple
    """Tasks that its help lists, each with what its model learns."""


def whole_number(least: int, most: int = LARGEST_COUNT) -> Callable[[str], int]:
    """Return the parser of an integer argument; it raises ArgumentTypeError outside of the range."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,30}", text) or not least <= int(text) <= most:
            top = f" and at most {most:,}" if most < LARGEST_COUNT or len(text) > 9 else ""
            raise argparse.ArgumentTypeError(f"{text:.30} is not a whole number of at least {least:,}{top}")
        return int(text)

    return parse


def finite_number(*, least: float | None = None, most: float = LARGEST_COUNT) -> Callable[[str], float]:
    """Return the parser of a number argument; it raises ArgumentTypeError for NaN, and outside of the range.

    Without `least`, the number must be above 0.
    """

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (number > 0 if least is None else number >= least) or not number <= most:
            bottom = "above 0" if least is None else f"of at least {least:g}"
            raise argparse.ArgumentTypeError(f"{text:.30} is not a number {bottom} and at most {most:,}")
        return number

    return parse


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Report a ValueError inside the context as a mistake of the user: in recipe, data, arguments, or launch.

    Outside of it, a ValueError is a defect of this program.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def recipe_of(arguments: Arguments, settings: Settings) -> Recipe:
    """Return the recipe named on the command line, with the settings that override it."""
    recipe = named_recipe(arguments.recipe, settings)
    if not getattr(arguments, "no_data", False):
        check_before_torch(recipe, trains=False)
    return recipe


def out_of(arguments: Arguments) -> Path | None:
    """Return the path of `--out`; None if it is not given."""
    return None if arguments.out is None else output_path(arguments.out)


def data_of(arguments: Arguments) -> str | None:
    """Return the data named by the second argument or by `--data`; None for the run's held-out data.

    Raises:
        UserError: both are given, and differ.
    """
    data, named = arguments.data, arguments.named_data
    if None not in (data, named) and data != named:
        raise UserError(f"DATA {data} and --data {named} differ. Give one of them.")
    return named if data is None else data


@contextmanager
def importing(name: str, task: str | None = None) -> Iterator[None]:
    """Show that a command has started and is importing torch (seconds). Import a built-in task as well.

    The body must contain only imports. A built-in task imports transformers. A custom task is not imported here,
    because it may print.
    """
    from accel_train.task import TASKS, load_task

    with busy(redact_text(f"{name}: importing torch and transformers".removeprefix(": "))):
        yield
        if task is not None and task in TASKS:
            load_task(task)


@contextmanager
def importing_for(run: Path, settings: Settings, data: str | None = None, *, scores: bool = False) -> Iterator[None]:
    """Import for a run as `importing` does. `settings` may allow the run's code to be executed.

    Raises:
        ValueError: the folder does not hold a run, its recipe names code that is not allowed, the file or folder `data`
            is missing, or with `scores`, a package of its task's scores is not installed.
    """
    from accel_train.data.sources import check_paths
    from accel_train.recipe.tasks import TASKS, check_extra

    check_run_folder(run)
    recipe = read_recipe(run, [*settings])
    if scores and recipe.task in TASKS:
        check_extra(recipe, TASKS[recipe.task])
    if data is not None:
        section = recipe.data.model_copy(update={"train": data, "eval": None})
        check_paths(section.shown_as("--data" if scores else "DATA"))
    with importing(str(run), recipe.task):
        yield


def result_of(kind: type[T], source: object, /, **others: object) -> T:
    """Return a result of `kind`: the attributes of `source` that have the names of its fields, and `others`."""
    fields = kind.__annotations__
    found: Any = {name: others[name] if name in others else getattr(source, name) for name in fields}
    return found


def show(text: str) -> None:
    """Print an answer on stdout, with lines broken between words at the terminal's width, or at COLUMNS."""
    width = columns_of(sys.stdout)
    print("\n".join(wrap(line, width) for line in redact_text(text).split("\n")), flush=True)


def say(text: str) -> None:
    """Print the current activity on stderr, on rank 0."""
    if is_main():
        print(redact_text(text), file=sys.stderr, flush=True)
