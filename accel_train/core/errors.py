"""The errors that end a run or a command, each with its exit code."""


class TrainingStopped(Exception):
    """The guard stopped the run; its last checkpoint is good. The command exits with 3."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read. The command exits with 4."""


class OutOfMemory(Exception):
    """Memory ran out with the smallest micro-batches there are. The command exits with 6."""


OUT_OF_MEMORY_REMEDY = (
    "lower batch.per_device_batch_size where it is above 1, set precision.gradient_checkpointing, or shard the model over more GPUs "
    "(parallel.strategy: fsdp2)"
)


class RestartNeeded(Exception):
    """Memory ran out, and a smaller micro-batch is saved for the next start; run it again. The command exits with 75."""


class StepAgain(Exception):
    """No process applied the step, and it has to be repeated; raised for the loop, on all processes at the same step."""


class SettingError(ValueError):
    """A mistake that its user can correct. Code reads the fields; `str` renders the sentence from them.

    The fields are what `problem` there is, its `remedy`, the setting or file that it is `at`, and the dotted names of all
    `settings` that the broken rule is about.
    """

    def __init__(self, problem: str, remedy: str = "", at: str = "", settings: tuple[str, ...] = ()) -> None:
        super().__init__(problem, remedy, at, settings)  # `args`, with which it is pickled
        self.problem, self.remedy, self.at, self.settings = problem, remedy, at, settings

    def __str__(self) -> str:
        told = f"{self.at}: {self.problem}" if self.at else self.problem
        if not self.remedy:
            return told
        return f"{told}{'. ' if self.remedy[0].isupper() else '; '}{self.remedy}"


class RecipeProblems(ValueError):
    """All that is wrong with a recipe: `args` are the problems, and `str` shows one a line."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class DataError(ValueError):
    """A sample cannot be read; the text names file and row. The command exits with 2, at whatever point it is found."""


class DataWorkerGone(RuntimeError):
    """A process that reads the data ahead has died. The command exits with 5."""


class RecipeError(ValueError):
    """A setting that only turned out wrong once the run was under way. The command exits with 2."""


class ExitedEarly(Exception):
    """Code of a task called `sys.exit()` before the run was done; the text says where. The command exits with 1."""


class Preempted(Exception):
    """The run was asked to stop and saved; run it again to resume. The command exits with 75."""


class ProcessFailed(Exception):
    """A run that a rehearsal started ended before it did what it was started for. The command exits with that run's code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UserError(Exception):
    """A mistake in what the user gave: printed in one line, without a traceback."""


def asks_for_own_code(error: BaseException) -> bool:
    """Return whether transformers refused code that a model or tokenizer brings; it says so in the text of its error alone."""
    return "custom code" in str(error)
