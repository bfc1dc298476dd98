import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from accel_train.observe.trackers import Trackers, check_tracker_names, flatten
from tests.support.runs import refused
from tests.support.wording import assert_golden, raises_golden

CONFIG = {"seed": 1, "optimizer": {"learning_rate": 3e-4, "betas": (0.9, 0.95)}, "data": {"eval": None}}


class Recorder(GeneralTracker):
    """A tracker that works, and remembers what it was told."""

    name = "recorder"
    requires_logging_directory = False
    made: "list[Recorder]" = []  # noqa: RUF012

    def __init__(self, project: str, **kwargs: Any) -> None:
        super().__init__()
        self.project, self.lines, self.config, self.finished = project, [], {}, 0  # type: ignore[var-annotated]
        self.made.append(self)

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished += 1


class Failing(Recorder):
    """A tracker whose service is down, at a moment that the test chooses."""

    name = "failing"
    fails_at = "start"

    def start(self) -> None:
        self._fail("start")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._fail("log")

    def finish(self) -> None:
        self._fail("finish")

    def _fail(self, moment: str) -> None:
        if moment == self.fails_at:
            raise ConnectionError(f"no route at {moment}\nand a second line")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for tracker in (Recorder, Failing):
        register_tracker_class(tracker)
    Recorder.made.clear()
    yield
    for name in ("recorder", "failing"):
        del LOGGER_TYPE_TO_CLASS[name]


def make_trackers(names: tuple[str, ...], folder: Path, **more: Any) -> tuple[Accelerator, Trackers]:
    accelerator = Accelerator(cpu=True)
    trackers = Trackers(
        accelerator, names, project="project", run_name="run", config=CONFIG, logging_dir=folder, **more
    )
    return accelerator, trackers


def read_tensorboard(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, Any]]:
    """Scalars and hyperparameters, as TensorBoard itself reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams import plugin_data_pb2

    scalars: dict[str, list[tuple[int, float]]] = {}
    settings: dict[str, Any] = {}
    for path in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
        metadata = events.summary_metadata
        if "_hparams_/session_start_info" in metadata:
            content = metadata["_hparams_/session_start_info"].plugin_data.content
            start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
            settings = {name: value.number_value or value.string_value for name, value in start.hparams.items()}
    return scalars, settings


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_what_was_logged_and_a_resume_replaces_what_it_repeats(tmp_path: Path) -> None:
    failures: list[str] = []
    _, trackers = make_trackers(("tensorboard",), tmp_path)
    trackers.start(failures.append)
    for step in (10, 20, 30):
        trackers.log({"train/loss": 1.0 / step, "train/loss_scale": None, "train/skipped": False}, step)
    trackers.finish()
    _, resumed = make_trackers(("tensorboard",), tmp_path, initial_step=20)
    resumed.start(failures.append)
    resumed.log({"train/loss": 7.0}, 30)
    resumed.log({"train/loss": float("nan")}, 40)
    resumed.finish()
    scalars, settings = read_tensorboard(tmp_path / "project")
    assert failures == []
    steps, losses = zip(*scalars["train/loss"], strict=True)
    assert steps == (10, 20, 30, 40)
    assert losses[:3] == pytest.approx((0.1, 0.05, 7.0))
    assert losses[3] != losses[3]
    assert "train/loss_scale" not in scalars
    assert settings["optimizer.learning_rate"] == pytest.approx(3e-4)
    assert settings["optimizer.betas"] == "[0.9, 0.95]"


@pytest.mark.parametrize("moment", ["start", "log", "finish"])
def test_a_tracker_that_raises_is_switched_off_and_reported_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(Failing, "fails_at", moment)
    failures: list[str] = []
    accelerator, trackers = make_trackers(("failing", "recorder"), tmp_path)
    trackers.start(failures.append)
    for step in (1, 2):
        trackers.log({"train/loss": float(step), "train/mfu": None}, step)
    trackers.finish()
    trackers.finish()
    [recorder] = [tracker for tracker in Recorder.made if type(tracker) is Recorder]
    assert recorder.project == "project"
    assert recorder.config == {"seed": 1, "optimizer.learning_rate": 3e-4, "optimizer.betas": "[0.9, 0.95]"}
    assert recorder.lines == [(1, {"train/loss": 1.0}), (2, {"train/loss": 2.0})]
    assert recorder.finished == 1
    assert accelerator.trackers == []
    [message] = failures
    assert_golden(message)


def test_accelerate_keeps_only_the_trackers_that_work(tmp_path: Path) -> None:
    accelerator, trackers = make_trackers(("failing", "recorder"), tmp_path)
    trackers.start(lambda message: None)
    assert [tracker.name for tracker in accelerator.trackers] == ["recorder"]
    accelerator.log({"mine": 1.0}, step=5)
    assert Recorder.made[-1].lines == [(5, {"mine": 1.0})]


def test_a_run_without_trackers_leaves_those_of_the_accelerator_alone(tmp_path: Path) -> None:
    accelerator, trackers = make_trackers((), tmp_path)
    accelerator.trackers = [own := Recorder("own")]
    trackers.start(pytest.fail)
    trackers.log({"train/loss": 1.0}, 1)
    trackers.finish()
    assert accelerator.trackers == [own]
    assert own.lines == []


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with raises_golden():
        check_tracker_names(["tensorbord"])
    refused(check_tracker_names, ["xyz"], named="'xyz'|tensorboard|wandb")
    check_tracker_names([])
    check_tracker_names(["tensorboard", "recorder", "all"])


def test_a_known_name_without_its_package_is_refused_with_what_to_install() -> None:
    for names in (["swanlab"], ["tensorboard", "aim"]):
        with raises_golden(case=names[-1]):
            check_tracker_names(names)


def test_settings_become_one_level_of_plain_values() -> None:
    nested = {"a": {"b": {"c": 1}, "none": None}, "list": [1, "x"], "flag": True, "path": Path("/x")}
    assert flatten(nested) == {"a.b.c": 1, "list": "[1, 'x']", "flag": True, "path": "/x"}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_continues_the_run_of_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ids: list[str] = []

    class Fake(Recorder):
        """Opens a run as the package does: MLflow chooses its id, W&B takes the given one."""

        def start(self) -> None:
            chosen = self.kwargs.get("id" if name == "wandb" else "run_id") or f"new-{len(ids)}"
            ids.append(chosen)
            self.active_run = SimpleNamespace(info=SimpleNamespace(run_id=chosen))

        def __init__(self, project: str, **kwargs: Any) -> None:
            self.kwargs = kwargs
            super().__init__(project, **kwargs)

    Fake.name = name
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Fake)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [name])
    monkeypatch.setattr("accelerate.tracking.filter_trackers", lambda names, _: names)
    for step in (0, 3, 0):
        _, trackers = make_trackers((name,), tmp_path, initial_step=step)
        trackers.start(pytest.fail)
        trackers.finish()
    assert ids[1] == ids[0] != ids[2]
