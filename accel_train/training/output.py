"""Output of a run: its folder and observers, the startup log, the cost of compiling, and profiles."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
from torch.profiler import profile, record_function

from accel_train.buckets.store import url_of
from accel_train.checkpoint.fingerprint import OF_BEST, changes_evaluation
from accel_train.checkpoint.rollback_log import describe
from accel_train.core.files import make_folders
from accel_train.core.format import format_bytes, format_count
from accel_train.core.hardware import peak_flops
from accel_train.core.ownership import write_file
from accel_train.core.redaction import redact
from accel_train.core.state import Choice, Choices, JsonRecord, StepResult
from accel_train.core.work import working
from accel_train.data.labels import class_notes
from accel_train.engine.compilation import idle_remedy
from accel_train.engine.loader import Steps
from accel_train.engine.mixture import numbers_by_source
from accel_train.engine.run import RunContext
from accel_train.engine.save import ALIKE
from accel_train.model.batch_norm import SyncedBatchNorm, trained_batch_norms
from accel_train.model.freeze import named
from accel_train.model.memory_estimate import state_bytes
from accel_train.model.weights import whole_numel
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.notify import Notifier
from accel_train.observe.observer import LogPlan, Observer, Observers, RunObserver
from accel_train.observe.progress import CALM_SECONDS, Progress
from accel_train.observe.run_folder import PROFILE_FOLDER, RECIPE_FILE, RunFolder, read_events
from accel_train.observe.throughput import Meter, SystemMetrics
from accel_train.observe.trackers import Trackers
from accel_train.parallel.precision import choose_mixed_precision
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import targets_of
from accel_train.recipe.writer import format_recipe
from accel_train.runtime.doctor import device_name, launch_facts
from accel_train.runtime.exit import exit_code, message_of
from accel_train.runtime.private import watch_compiling
from accel_train.runtime.watchdog import Watchdog
from accel_train.task import Facts, TaskData
from accel_train.training.callbacks import CallbackObserver
from accel_train.training.upload import Upload

FEW_HELD_OUT = 100
"""Fewer held-out samples of a classifier than this are warned of."""


def observers_of(run: RunContext) -> tuple[Observer, ...]:
    """Return the observers that a program or a recipe adds to a run."""
    extensions = run.plan.extensions
    return (*extensions.observers, *([CallbackObserver(run)] if extensions.callbacks else []))


class Output(ExitStack):
    """Output of a run on this process, closed on exit. Only the main process has any: a `FolderOutput`."""

    def open(self) -> None:
        """Lock the run folder. From now on, the end of the run is posted to the URLs of `log.notify`."""

    def record_launch(self) -> None:
        """Record this launch and its time in launches.jsonl, unless it is recorded already."""

    def be_silent(self) -> None:
        """Suppress the notification of the end: the run had already finished."""

    def append_event(self, record: Mapping[str, Any]) -> None:
        """Append an event of the watchdog to events.jsonl."""

    def start(self, run: RunContext) -> None:
        """Open the observers of a run."""
        self.observe(run, observers_of(run))

    def observe(self, run: RunContext, others: Sequence[Observer]) -> None:
        """Open the run's observer, followed by `others`."""
        run.observer = self.enter_context(Observers((run.observer, *others)) if others else run.observer)


class FolderOutput(Output):
    """Output of the main process: run folder, launch clock, observers, startup log, and notifications.

    Raises:
        ValueError: the run folder cannot be used.
    """

    def __init__(self, recipe: Recipe, clock: LaunchClock, world_size: int) -> None:
        super().__init__()
        self._recipe, self._clock, self._world_size = recipe, clock, world_size
        self._folder, self._notifiers, self._is_recorded = RunFolder(Path(recipe.output_dir)), list[Notifier](), False
        self._folder.check()

    def open(self) -> None:
        self.enter_context(self._folder)
        if (url := url_of(self._folder.path)) is not None:
            self.enter_context(Upload(self._folder, url))
        if self._recipe.log.notify:
            notifier = Notifier(self._recipe.log.notify, self._folder.path, how_it_ended)
            self._notifiers.append(notifier)
            self.push(notifier.note_end)
            Watchdog.at_end.append(notifier.end)
            self.callback(Watchdog.at_end.remove, notifier.end)

    def record_launch(self) -> None:
        if not self._is_recorded:
            self._is_recorded = True
            self.enter_context(self._clock.recorded(self._folder.path, world_size=self._world_size))

    def be_silent(self) -> None:
        for notifier in self._notifiers:
            notifier.be_silent()

    def append_event(self, record: Mapping[str, Any]) -> None:
        self._folder.append_event(record)

    def start(self, run: RunContext) -> None:
        own = run.observer = open_observer(run, self._folder, self._clock)
        for notifier in self._notifiers:
            notifier.warn = lambda message, step: own.on_event("notify_failed", step, message)
        watches = [CompileWatch(run, own, self._clock)] if "compile_cache" in run.plan.choices else []
        self.observe(run, (*watches, *observers_of(run), *self._notifiers))
        announce(run, self._folder)


def open_observer(run: RunContext, folder: RunFolder, clock: LaunchClock) -> RunObserver:
    """Return the main process's observer: run folder, progress bar and trackers."""
    plan, state, accelerator = run.plan, run.state, run.accelerator
    recipe, global_batch_size, peak = plan.recipe, run.sizes.global_batch_size, run.facts.peak_flops
    folder.rewind(state.step, evaluated=not state.evaluation_owed and state.step < plan.max_steps)
    targets = targets_of(recipe.task)
    every_line = plan.extensions.verbose or "every_steps" in recipe.log.model_fields_set
    return RunObserver(
        folder,
        Progress(
            recipe.log.progress,
            total_steps=plan.max_steps,
            initial_step=state.step,
            targets=targets,
            metric=recipe.evaluate.best_metric,
            pause_seconds=0.0 if every_line else CALM_SECONDS,
        ),
        Trackers(
            accelerator,
            recipe.log.trackers,
            project=recipe.log.project,
            run_name=plan.output_dir.name,
            config=redact(recipe.model_dump()),
            logging_dir=plan.output_dir,
            initial_step=state.step,
        ),
        Meter(
            flops_per_token=run.facts.flops_per_target,
            peak_flops=peak and peak * accelerator.num_processes,
            train_seconds=state.train_seconds,
        ),
        LogPlan(
            log_every_steps=recipe.log.every_steps,
            total_steps=plan.max_steps,
            samples_per_step=global_batch_size,
            num_samples_per_epoch=plan.order.steps_per_epoch * global_batch_size,
            by_source=numbers_by_source(plan.order, recipe.data.window),
            idle_remedy=idle_remedy(recipe.precision),
            targets=targets,
        ),
        clock,
        SystemMetrics(accelerator.device),
    )


def how_it_ended(error: BaseException, has_begun: bool) -> tuple[str, int]:
    """Return message and exit code of a run that an error ends, once it `has_begun` to train or before."""
    code = exit_code(error)
    if code is None:
        code = 2 if isinstance(error, ValueError) and not has_begun else 1
    return message_of(error), code


def device_peak(device: torch.device, choices: Choices) -> tuple[float | None, Choice[str]]:
    """Return the FLOP/s of one device in the run's precision, and whether the run reports its MFU, with the reason."""
    name, precision = device_name(device), str(choices["precision.mixed_precision"].value)
    is_tf32 = "precision.tf32" in choices and choices["precision.tf32"].value
    # In fp8 some products stay in bf16, whose peak is the known measure.
    peak = peak_flops(name, {"no": "tf32" if is_tf32 else "fp32", "fp8": "bf16"}.get(precision, precision))
    if peak is None:
        return None, Choice("not reported", f"the peak of {name} is not known")
    return peak, Choice("reported", f"of {peak / 1e12:g} TFLOP/s, the dense peak of {name}")


def _of_data(data: TaskData, recipe: Recipe) -> list[str]:
    """Return how many samples there are, and the notes on them."""
    facts = data.facts
    sizes = []
    if None not in (facts.num_train, facts.num_eval):
        sizes = [f"{format_count(facts.num_train or 0, 'sample')} to train on, {facts.num_eval:,} held out"]
    elif facts.train_tokens is not None:
        sizes = [f"{facts.train_tokens:,} tokens to train on, {facts.eval_tokens:,} held out"]
    counts = facts.num_train_of_label
    labels = class_notes(counts) if counts else []
    if _is_regression(facts):
        labels = [f"labels: {facts.problem_type}; no classes"]
    first = "; ".join([*sizes, *labels[:1]])
    return [
        *filter(None, [first]),
        *labels[1:],
        *few_held_out(facts, recipe.data.eval, recipe.data.eval_fraction),
        *facts.notes,
    ]


def _is_regression(facts: Facts) -> bool:
    return facts.problem_type is not None and not facts.num_train_of_label


def few_held_out(facts: Facts, own: object, fraction: float) -> list[str]:
    """Return a warning about too few held-out samples to measure a classifier or a regression.

    `own` is `data.eval`, and `fraction` is `data.eval_fraction`.
    """
    num_eval, is_labelled = facts.num_eval or 0, facts.num_train_of_label or facts.problem_type
    if not (is_labelled and 0 < num_eval < FEW_HELD_OUT):
        return []
    costs = "" if _is_regression(facts) else f": one more error is {1 / num_eval:.1%} of the accuracy"
    more = "Raise data.eval_fraction, to 0.1 for example" if fraction < 0.1 else "Add samples"
    remedy = f"{more}, or give data.eval" if own is None else "Give more in data.eval"
    return [f"{num_eval} held-out samples are few{costs}. {remedy}"]


def describe_batch_norm(run: RunContext) -> str | None:
    """Return how the statistics of trained batch norms depend on how a step is cut; None where it is not cut."""
    processes, parts = run.accelerator.num_processes, run.sizes.gradient_accumulation_steps
    norms, num_in_step = trained_batch_norms(run.strategy.inner), run.sizes.global_batch_size
    is_synced = any(isinstance(each, SyncedBatchNorm) for each in norms)
    if not norms or (parts == 1 and (processes == 1 or is_synced)):
        return None
    samples = format_count(run.sizes.per_device_batch_size * (processes if is_synced else 1), "sample")
    can_sync = processes > 1 and not is_synced and run.plan.recipe.parallel.strategy == "ddp"
    remedy = ". Set parallel.sync_batch_norm true for statistics over all processes" if can_sync else ""
    return (
        f"{format_count(len(norms), 'batch norm')} with statistics of {samples}, not of the {num_in_step} of a step. "
        f"Another number of processes or micro-batches changes the training{remedy}"
    )


def note_changing_state(run: RunContext, names: Sequence[str], lost: Sequence[str]) -> None:
    """Print how state that forwards change depends on how a step is cut, and what of it a resume loses."""
    names, lost = ([name.removeprefix("model.") for name in each] for each in (names, lost))
    if run.accelerator.num_processes > 1 or run.sizes.gradient_accumulation_steps > 1:
        run.observer.note(
            f"a forward changes {named(names)}: by the samples of its micro-batch, and process 0's values are kept. "
            "Another number of processes or micro-batches changes the training"
        )
    if lost:
        run.observer.note(
            f"a forward changes {named(lost)}, but checkpoints do not hold it, so a resume restarts it. Register "
            "the buffer with persistent=True"
        )


def notable_choices(run: RunContext) -> Choices:
    """Return the choices that warn, or that differ from what the recipe says, and so are always printed."""
    choices, recipe = run.plan.choices, run.plan.recipe
    names = {"gpus", "initial weights", "precision.float8", "model.lora", "launch", "no effect", "reading"}
    names.add("parts in eval()")
    probe, size = choices.get("probe"), choices.get("batch.per_device_batch_size")
    if run.plan.rate.value != recipe.optimizer.learning_rate:
        names.add("optimizer.learning_rate")
    if probe is not None and probe.value == "not proved":
        names.add("probe")
    if (
        choices["precision.mixed_precision"].reason
        != choose_mixed_precision(recipe.precision, run.accelerator.device).reason
    ):
        names.add("precision.mixed_precision")  # processes or devices differ
    if size is not None and (
        size.value < run.plan.sizes.per_device_batch_size or run.sizes.gradient_accumulation_steps > 1
    ):
        names |= {"batch.per_device_batch_size", "batch"}
    return {name: choice for name, choice in choices.items() if name in names}


def announce(run: RunContext, folder: RunFolder) -> None:
    """Print the main facts and notable choices, write the resolved recipe, and record the start or the resume."""
    plan, point, step, observer = run.plan, run.plan.resume_point, run.state.step, run.observer
    setting_changes, has_finished = run.changes, step >= plan.max_steps
    if not (has_finished and setting_changes):  # it would say what no step was trained with
        given = plan.given.model_copy(update={"output_dir": url_of(folder.path) or plan.given.output_dir})
        folder.write_text(RECIPE_FILE, format_recipe(given, plan.choices))
    shown = plan.choices if plan.extensions.verbose else notable_choices(run)
    width = max(map(len, [*shown, "model"]))
    for name, choice in shown.items():
        value = f"{choice.value:g}" if isinstance(choice.value, float) else str(choice.value)
        observer.note(f"{name.ljust(width)}  {value}  ({choice.reason})")
    num_parameters = whole_numel(run.strategy.parameters)
    kind = type(run.strategy.inner.model).__name__
    observer.note(f"{'model'.ljust(width)}  {kind}, {num_parameters:,} trainable parameters")
    if (norms := describe_batch_norm(run)) is not None:
        observer.note(f"{'batch norm'.ljust(width)}  {norms}")
    run.statistics.on_change = partial(note_changing_state, run)
    for note in _of_data(plan.data, plan.recipe) or [f"{format_count(plan.order.num_samples, 'sample')} to train on"]:
        observer.note(f"{'data'.ljust(width)}  {note}")
    free, weights = shutil.disk_usage(folder.path).free, 4 * num_parameters
    needed = 2 * weights + state_bytes(run.strategy.inner.model, plan.recipe.optimizer)
    if free < needed and not has_finished:
        observer.note(
            f"{'disk'.ljust(width)}  {format_bytes(free)} free, but a checkpoint and model/ take about "
            f"{format_bytes(needed)}. Free space, or set output_dir on another disk"
        )
    if not folder.lock.value:
        observer.note(f"output_dir is not locked: {folder.lock.reason}")
    for status in point.broken:
        name = status.path.name
        message = f"{name} is not used: {status.problem}. It was renamed to broken-{name}; inspect or remove it"
        observer.on_event("checkpoint_invalid", status.step, message)
    if point.path is not None and point.changed:
        changed = ", ".join(point.changed)
        message = (
            f"{point.path.name}: {changed} changed after the save. Weights and state are intact, so the run resumes"
        )
        observer.on_event("checkpoint_changed", step, message)
    if point.previous is not None:
        observer.note(f"files that this launch does not resume from are now in {point.previous}")
    recorded = {event.get("number") for event in read_events(folder.path)} if point.rollbacks else set()
    for rollback in point.rollbacks:
        if rollback.number not in recorded and step <= rollback.to_step:  # killed before it was an event
            message = describe(rollback, plan.recipe.guard.max_rollbacks)
            observer.on_event("rollback", rollback.at_step, message, **asdict(rollback))
    precision = plan.choices["precision.mixed_precision"].value
    where = f"{run.accelerator.num_processes} x {run.accelerator.device.type}"
    layout = "" if plan.recipe.parallel.strategy == "ddp" else f", {plan.recipe.parallel.strategy}"
    how = f"{'fp32' if precision == 'no' else precision} on {where}{layout}"
    choices = {name: str(choice) for name, choice in plan.choices.items()}
    facts: JsonRecord = {**launch_facts(), "total_steps": plan.max_steps, "choices": redact(choices)}
    if point.path is None:
        what = f"starting a new run: {'; '.join(map(str, point.changes))};" if point.changes else "starting:"
        size, epochs = format_count(run.sizes.global_batch_size, "sample"), plan.steps.num_epochs
        what += f" {format_count(plan.max_steps, 'step')} of {size} ({epochs:.3g} epoch{'s' * (epochs != 1)})"
        message = f"{what}, {how}"
        observer.on_event("start", 0, message, **facts)
    else:
        message = f"resuming from {point.path.name}, at step {step} of {plan.max_steps}, {how}"
        if has_finished:
            message = f"the run already finished, at step {step}; its model is loaded, not trained"
        observer.on_event("resume", step, message, **facts)
    if has_finished and setting_changes:
        kept = "; ".join(map(str, setting_changes))
        observer.note(
            f"the run has finished, so it ignores the changes ({kept}). Give another output_dir to train a new run"
        )
    for change in () if has_finished else setting_changes:
        forgotten = "; the best evaluation before the change no longer counts" if change.name in OF_BEST else ""
        facts = {"setting": change.name, "was": change.was, "now": change.now}
        observer.on_event("settings_changed", step, f"{change}, from step {step + 1} on{forgotten}", **redact(facts))
    if point.changes and point.path is not None:
        changes = [str(change) for change in point.changes]
        is_other = any(
            change.name == "optimizer.name" and not {change.was, change.now} <= ALIKE for change in point.changes
        )
        effects = "; the optimizer state starts at zero" if is_other else ""
        if plan.extensions.evaluate is None and changes_evaluation(point.changes):
            effects += "; evaluations before the change no longer count"
        message = f"accepted changes since the checkpoint: {'; '.join(changes)}{effects}"
        settings = [change.name for change in point.changes]
        observer.on_event("changes_accepted", step, message, changes=changes, settings=settings)


class CompileWatch(Observer):
    """Observer that emits one event after the first step of a start, and one for each later step that recompiled.

    A step is seen after the forward of the next step, so the first event counts the graphs of two steps. Graphs of
    evaluations are not counted: an evaluation computes without gradients and so compiles separate graphs.
    """

    def __init__(self, run: RunContext, observer: Observer, clock: LaunchClock) -> None:
        self._clock, self._unwatch = clock, ExitStack()
        self._graphs, self._observer = run.graphs, observer
        self._folder = Path(run.plan.choices["compile_cache"].value)
        self._begin, self._num_files, self._num_graphs = perf_counter(), count_files(self._folder), 0
        self._is_first = True

    def __enter__(self) -> Self:
        self._unwatch.enter_context(watch_compiling(lambda: self._clock.enter("compile"), self._clock.leave))
        return self

    def __exit__(self, *_: object) -> None:
        self._unwatch.close()

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Record the time of the start."""
        if kind in ("start", "resume"):
            self._begin = perf_counter()

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Exclude the time and the graphs of an evaluation."""
        self._begin, self._num_graphs = perf_counter(), self._graphs.num_graphs

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Emit the event of the first step, or of a step that recompiled."""
        num_new, self._num_graphs = self._graphs.num_graphs - self._num_graphs, self._graphs.num_graphs
        if self._is_first:
            self._is_first = False
            seconds = (result.ended or perf_counter()) - self._begin
            num_files = max(0, count_files(self._folder) - self._num_files)
            new = format_count(num_files, "new file")
            found = f"cold: {new} of compiled code" if num_files else "warm: compiled code was cached"
            message = f"the first step took {seconds:.1f} s ({found}); {format_count(num_new, 'graph')}"
            facts: JsonRecord = {"first_step_seconds": round(seconds, 3), "warm": not num_files, "num_graphs": num_new}
            if failure := self._graphs.failure:
                facts["failure"] = failure
                message += f"; the compiler failed, and the model runs as it is: {failure}"
            self._observer.on_event("compiled", result.step, message, **facts)
        elif num_new:
            message = f"{format_count(num_new, 'graph')} compiled again, because the inputs have a new shape or type"
            self._observer.on_event("recompiled", result.step, message, num_graphs=num_new)


def count_files(folder: Path) -> int:
    """Return the number of files below a folder; 0 if it does not exist."""
    return sum(len(files) for _, _, files in os.walk(folder))


NUM_OPERATIONS = 10


class StepProfiler(AbstractContextManager["StepProfiler"]):
    """Profiler of the steps of `log.profile_steps` that this launch runs. Without the setting it does nothing.

    Each process writes `profile/rank-R-steps-A-B.json.gz`, a trace for Perfetto, and a table of the same name in
    `.txt`. A to B are the steps of one uninterrupted sequence. They are fewer than the recipe's if the run ends or is
    set back among them. A user's file in that place is moved to `previous-N/`.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._asked = run, run.plan.recipe.log.profile_steps
        self._is_cuda = run.accelerator.device.type == "cuda"
        self._profile: profile | None = None
        self._first = self._last = 0

    def reading(self, batches: Steps) -> Steps:
        """Return the same batches. If steps are to be profiled, reading them starts and stops the profile."""
        self._end()  # the run was set back and starts reading again
        return batches if self._asked is None else self._profiled(batches, *self._asked)

    def _profiled(self, batches: Steps, first: int, last: int) -> Steps:
        for step, micro_batches in batches:
            number = step + 1
            if not first <= number <= last:
                yield step, micro_batches
                continue
            if self._profile is None:
                self._first, self._profile = number, profile(profile_memory=self._is_cuda)
                self._profile.start()
            self._last = number
            with record_function(f"step {number}"):
                yield step, micro_batches
            if number == last:
                self._end()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Stop and write the current profile, if any."""
        found, self._profile = self._profile, None
        if found is None:
            return
        run, steps = self._run, f"{self._first}-{self._last}"
        with run.observer.pause("profiling"), working("writing the profile"):
            if self._is_cuda:
                torch.cuda.synchronize()  # the last step's kernels belong to the trace
            found.stop()
            name = f"{PROFILE_FOLDER}/rank-{run.accelerator.process_index}-steps-{steps}"
            try:
                _write(found, run.plan.output_dir, name, f"self_{'device' if self._is_cuda else 'cpu'}_time_total")
            except OSError as error:  # a full disk should not end the training
                run.observer.note(f"the profile of steps {steps} could not be written ({error})")
                return
        message = f"profiled steps {self._first} to {self._last}: {name}.json.gz (for ui.perfetto.dev) and {name}.txt"
        run.observer.on_event("profile", self._last, message)


def _write(found: profile, home: Path, name: str, sort_by: str) -> None:
    table = found.key_averages().table(sort_by=sort_by, row_limit=NUM_OPERATIONS)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        found.export_chrome_trace(str(trace))
        content = trace.read_bytes()
    make_folders(home / PROFILE_FOLDER)
    write_file(home / f"{name}.json.gz", content, home)
    write_file(home / f"{name}.txt", table.encode(), home)
