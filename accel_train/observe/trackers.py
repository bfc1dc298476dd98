"""Experiment trackers (TensorBoard, Weights & Biases, ...) through Accelerate; a broken one never stops training."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

# What to install for each name that Accelerate knows and whose package can be missing.
PACKAGES = {
    "tensorboard": "accel-train[tensorboard]",
    "wandb": "accel-train[wandb]",
    "trackio": "accel-train[trackio]",
    "comet_ml": "comet-ml",
    "aim": "aim<4",
    "mlflow": "mlflow",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
}


def check_tracker_names(names: Sequence[str]) -> None:
    """Find out, before anything is built, whether every tracker can be used.

    Names are Accelerate's, `all` (every installed one), and those of `accelerate.tracking.register_tracker_class`.

    Raises:
        ValueError: a name is not known (the nearest one is named), or its package is missing (what to install is).
    """
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [*LOGGER_TYPE_TO_CLASS, "all"]
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(sorted(known))}"
            raise ValueError(f"log.trackers: {name!r} is not a tracker; {hint}")
        if name in PACKAGES and name not in installed:
            raise ValueError(
                f"log.trackers: {name} needs a package that is not installed; pip install '{PACKAGES[name]}', "
                "or take it out of log.trackers"
            )


class Trackers:
    """The trackers of one run; each that fails is switched off and reported once, and the others go on.

    Only the main process uses them. The accelerator's `trackers` are those that still work, so `accelerator.log` and
    `accelerator.get_tracker` stay usable.

    Args:
        accelerator: whose `trackers` these become.
        names: `Recipe.log.trackers`.
        project: project name; for TensorBoard a folder under `logging_dir`.
        run_name: name of this run within the project.
        config: settings of the run, nested; trackers get them flat (`optimizer.learning_rate`).
        logging_dir: where trackers that write files write them.
        initial_step: resumed runs: TensorBoard forgets what it knew after this step.

    Raises:
        ValueError: as `check_tracker_names`.
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        names: Sequence[str],
        *,
        project: str,
        run_name: str,
        config: Mapping[str, Any],
        logging_dir: Path,
        initial_step: int = 0,
    ) -> None:
        check_tracker_names(names)
        self._accelerator = accelerator
        self._names = tuple(names)
        self._project = project
        self._config = flatten(config)
        self._logging_dir = logging_dir
        self._init_kwargs = _init_kwargs(run_name, initial_step)
        self._on_failure: Callable[[str], None] = lambda message: None

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Open them one by one; `on_failure(message)` hears once of each that had to be switched off."""
        if not self._names:
            return
        from accelerate.tracking import filter_trackers

        self._on_failure = on_failure
        accelerator = self._accelerator
        accelerator.project_configuration.logging_dir = str(self._logging_dir)
        chosen = filter_trackers(list(self._names), self._logging_dir)
        working = []
        for tracker in chosen:
            # init_trackers stops at the first that raises, so each is opened alone.
            accelerator.log_with, accelerator.trackers = [tracker], []
            try:
                accelerator.init_trackers(self._project, config=self._config, init_kwargs=self._init_kwargs)
                working += accelerator.trackers
            except Exception as error:  # any error of a third party's service
                self._report(str(tracker), "could not be opened", error)
        accelerator.log_with, accelerator.trackers = chosen, working

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send numbers to every working tracker; None values are left out."""
        if not self._names:
            return
        present = {name: value for name, value in values.items() if value is not None}
        self._each("could not log", lambda tracker: tracker.log(present, step=step))

    def finish(self) -> None:
        """Close them all; `accelerator.end_training()` has none left to close then."""
        if not self._names:
            return
        self._each("could not be closed", lambda tracker: tracker.finish())
        self._accelerator.trackers = []

    def _each(self, failure: str, call: Callable[[Any], object]) -> None:
        for tracker in list(self._accelerator.trackers):
            try:
                call(tracker)
            except Exception as error:
                self._accelerator.trackers.remove(tracker)
                self._report(tracker.name, failure, error)

    def _report(self, name: str, failure: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        self._on_failure(f"tracker {name} {failure} and is switched off; training goes on ({reason})")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings as one level with dotted names; lists as text, None left out: the form every tracker takes."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[prefix + name] = value
        elif value is not None:
            flat[prefix + name] = str(list(value)) if isinstance(value, tuple) else str(value)
    return flat


def _init_kwargs(run_name: str, initial_step: int) -> dict[str, dict[str, Any]]:
    """The run's name in each tracker's own words (Accelerate passes the project's name only)."""
    return {
        "tensorboard": {"purge_step": initial_step + 1} if initial_step else {},
        "wandb": {"name": run_name},
        "trackio": {"name": run_name},
        "mlflow": {"run_name": run_name},
        "clearml": {"task_name": run_name},
        "swanlab": {"experiment_name": run_name},
    }
