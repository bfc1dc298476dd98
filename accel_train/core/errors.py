"""Errors that end a run or a command, each with its exit code."""

from collections.abc import Iterable
from importlib.util import find_spec


class TrainingStopped(Exception):
    """Raised when the guard stops the run. The last checkpoint is good. The command exits with 3."""


class CheckpointError(Exception):
    """Raised when a checkpoint cannot be written or read. The command exits with 4."""


class OutOfMemory(Exception):
    """Raised when memory runs out with the smallest possible micro-batches. The command exits with 6."""


OUT_OF_MEMORY_REMEDY = (
    "lower batch.per_device_batch_size if it is above 1, set precision.gradient_checkpointing, or shard the model "
    "over more GPUs (parallel.strategy: fsdp2)"
)


class RestartNeeded(Exception):
    """Raised when memory runs out and a smaller micro-batch is saved for the next start. Run the command again.

    The command exits with 75.
    """


class StepAgain(Exception):
    """Raised on all processes at the same step if no process applied the step. The loop repeats the step."""


class SettingError(ValueError):
    """A mistake that its user can correct. Code reads the fields; `str` renders the sentence from them.

    Fields: the `problem`, its `remedy`, the setting or file that it is `at`, and the dotted names of all `settings`
    that the broken rule is about.
    """

    def __init__(self, problem: str, remedy: str = "", at: str = "", settings: tuple[str, ...] = ()) -> None:
        super().__init__(problem, remedy, at, settings)  # `args`, with which it is pickled
        self.problem, self.remedy, self.at, self.settings = problem, remedy, at, settings

    def __str__(self) -> str:
        told = f"{self.at}: {self.problem}" if self.at else self.problem
        if not self.remedy:
            return told
        return f"{told}{'. ' if self.remedy[0].isupper() else '; '}{self.remedy}"


def setting_error(setting: str, value: object, problem: str, remedy: str = "") -> SettingError:
    """Return the error about the value of one setting."""
    return SettingError(problem, remedy, f"{setting}={value}", (setting,))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that are not installed, without importing any."""
    return [name for name in names if find_spec(name) is None]


def check_packages(names: Iterable[str], extra: str, at: str, remedy: str = "") -> None:
    """Check, without importing them, that packages are installed. `remedy` continues the advice.

    Raises:
        SettingError: one is missing. The message names the extra of this package that installs it, if there is one.
    """
    if missing := missing_packages(names):
        wanted = f"'accel-train[{extra}]'" if extra else " ".join(missing)
        needed = f"needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        settings = (at.partition("=")[0],) if "=" in at else ()
        raise SettingError(needed, f"Install it: pip install {wanted}{remedy}", at, settings)


class RecipeProblems(ValueError):
    """All problems of a recipe, in `args`. `str` shows one problem per line."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class DataError(ValueError):
    """Raised when a sample cannot be read. The message names file and row. The command exits with 2 at any point."""


class DataWorkerGone(RuntimeError):
    """Raised when a process that reads data ahead has died. The command exits with 5."""


class RecipeError(ValueError):
    """Raised for a setting that turns out wrong only during the run. The command exits with 2."""


class ExitedEarly(Exception):
    """Raised when code of a task calls `sys.exit()` before the run is done. The message names the place.

    The command exits with 1.
    """


class Preempted(Exception):
    """Raised after the run was asked to stop and has saved. Run it again to resume. The command exits with 75."""


class ProcessFailed(Exception):
    """Raised when a process of the run is lost, or a rehearsal's run ends too early. Exits with the given code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UserError(Exception):
    """Raised for a mistake in the user's input. Printed in one line without a traceback."""


def asks_for_own_code(error: BaseException) -> bool:
    """Return whether transformers refused code of a model or tokenizer. Only the text of its error says so."""
    return "custom code" in str(error)
