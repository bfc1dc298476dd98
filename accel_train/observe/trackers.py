"""Experiment trackers (TensorBoard, Weights & Biases, ...) through Accelerate. A failure never stops training."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.core.format import did_you_mean
from accel_train.core.json_io import dotted_items, read_plain_json, write_plain_json

if TYPE_CHECKING:
    from accelerate import Accelerator

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
"""Packages to install for Accelerate's trackers, if they can be missing."""
RUN_NAME_OF = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "clearml": "task_name",
    "swanlab": "experiment_name",
}
"""Name of each tracker's argument for the run name. Accelerate only passes the project name."""

RUN_IDS = "trackers.json"
"""File in the run folder with the run's ids in W&B and MLflow. A resume continues these runs."""


def check_tracker_names(names: Sequence[str]) -> None:
    """Check that every tracker can be used, before anything is built.

    Valid names are Accelerate's, `all` (every installed tracker), and the names of trackers registered with
    `accelerate.tracking.register_tracker_class`.

    Raises:
        ValueError: a name is unknown or its package is missing. The message suggests the closest name or the package.
    """
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [*LOGGER_TYPE_TO_CLASS, "all"]
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"known are {', '.join(sorted(known))}")
            raise ValueError(
                f"log.trackers: {name!r} is not a tracker (import your own where your task is defined); {hint}"
            )
        if name in PACKAGES and name not in installed:
            raise ValueError(_missing(name))


def check_packages(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed, without importing torch.

    Raises:
        ValueError: one is missing.
    """
    for name in names:
        modules = ("tensorboard", "tensorboardX") if name == "tensorboard" else (name,)
        if name in PACKAGES and not any(map(find_spec, modules)):
            raise ValueError(_missing(name))


def _missing(name: str) -> str:
    package = PACKAGES[name]
    return f"log.trackers: {name} needs a package that is not installed; pip install '{package}', or leave it out"


class Trackers:
    """The trackers of one run. A failing tracker is switched off and reported once; the others continue.

    Only the main process uses them. The accelerator's `trackers` are the working ones, so `accelerator.log` and
    `accelerator.get_tracker` stay usable.

    Args:
        names: `Recipe.log.trackers`.
        project: project name. For TensorBoard, a folder under `logging_dir`.
        run_name: name of the run, passed to the trackers of `RUN_NAME_OF`.
        config: nested settings of the run. Trackers receive them flat (`optimizer.learning_rate`).
        logging_dir: folder for trackers that write files.
        initial_step: steps done before a resume. TensorBoard removes its values after this step.

    Raises:
        ValueError: as for `check_tracker_names`.
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
        self._accelerator, self._names = accelerator, tuple(names)
        self._project, self._config, self._logging_dir = project, flatten(config), logging_dir
        self._init_kwargs: dict[str, dict[str, Any]] = {name: {key: run_name} for name, key in RUN_NAME_OF.items()}
        if initial_step:
            self._init_kwargs["tensorboard"] = {"purge_step": initial_step + 1}
        self._ids: dict[str, str] = read_ids(logging_dir / RUN_IDS) if initial_step else {}
        if "wandb" in names or "all" in names:
            self._ids.setdefault("wandb", secrets.token_hex(4))
            self._init_kwargs["wandb"] |= {"id": self._ids["wandb"], "resume": "allow"}
        if "mlflow" in self._ids:
            self._init_kwargs["mlflow"]["run_id"] = self._ids["mlflow"]
        self._on_failure: Callable[[str], None] = lambda message: None

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Open the trackers one by one. Calls `on_failure(message)` once for each tracker that is switched off."""
        if not self._names:
            return
        from accelerate.tracking import filter_trackers

        self._on_failure = on_failure
        accelerator, working = self._accelerator, []
        accelerator.project_configuration.logging_dir = str(self._logging_dir)
        chosen = filter_trackers(list(self._names), self._logging_dir)
        for tracker in chosen:
            # init_trackers stops at the first tracker that raises, so each is opened separately.
            accelerator.log_with, accelerator.trackers = [tracker], []
            try:
                accelerator.init_trackers(self._project, config=self._config, init_kwargs=self._init_kwargs)
                working += accelerator.trackers
            # Any error of a third-party service.
            except Exception as error:
                self._report(str(tracker), "could not be opened", error)
        accelerator.log_with, accelerator.trackers = chosen, working
        self._keep_ids()

    def _keep_ids(self) -> None:
        """Store the ids of the open tracker runs for a resume."""
        trackers = self._accelerator.trackers
        for tracker in trackers:
            if tracker.name == "mlflow" and (run := getattr(tracker, "active_run", None)) is not None:
                self._ids["mlflow"] = str(run.info.run_id)
        if kept := {each.name: self._ids[each.name] for each in trackers if each.name in self._ids}:
            try:
                write_plain_json(self._logging_dir / RUN_IDS, kept, durable=False)
            except OSError as error:
                self._on_failure(f"{RUN_IDS} could not be written ({error.strerror}): a resume begins new tracker runs")

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send values to every working tracker, without None values."""
        if not self._names:
            return
        present = {name: value for name, value in values.items() if value is not None}
        self._each("could not log", lambda tracker: tracker.log(present, step=step))

    def finish(self) -> None:
        """Close all trackers, so that `accelerator.end_training()` does not close them again."""
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
        self._on_failure(f"tracker {name} {failure} and is switched off; training continues ({reason})")


def read_ids(path: Path) -> dict[str, str]:
    """Return the ids stored by an earlier launch, or an empty dict if the file is missing or damaged."""
    try:
        return {str(name): str(value) for name, value in read_plain_json(path).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def flatten(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return nested settings as a flat dict with dotted names, the form that every tracker accepts.

    Lists become text, and None values are left out.
    """
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in dotted_items(config)}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in values.items()
        if value is not None
    }
