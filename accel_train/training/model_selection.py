"""Evaluate a run, keep its best weights, and end it early if evaluations do not improve."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

from torch import nn

from accel_train.checkpoint.store import check, folder_of
from accel_train.core.errors import RecipeError, first_line
from accel_train.core.format import did_you_mean, format_count
from accel_train.core.json_io import plain_metrics
from accel_train.core.state import JsonRecord
from accel_train.core.work import working
from accel_train.engine.evaluation import EvaluationLeft, EvaluationReader, evaluate, evaluate_sets
from accel_train.engine.run import RunContext
from accel_train.metrics.baselines import is_number
from accel_train.parallel.dims import parallel_dims
from accel_train.recipe.evaluate import Evaluate
from accel_train.runtime.process_group import on_main
from accel_train.task import Scores, Training

NUM_SAMPLES = 8
"""Evaluated before the first step, to learn which metrics there are."""


def evaluate_run(run: RunContext, *, at_end: bool = False, final: bool = False) -> bool:
    """Evaluate, and report it to the observer; return whether this is the best so far and worth a checkpoint.

    All evaluations see the same samples (`evaluate.max_samples`), so they make one curve. The `final` one sees all, of
    the weights that are kept: it is written as split `eval_final`, and is never the best. Early stopping is decided
    here, on numbers that all processes share; not `at_end`. An evaluation that a stop request cuts short is owed: it is
    done when the run resumes.

    Raises:
        RecipeError: this evaluation reports no `evaluate.metric_for_best_model`.
    """
    began = time.perf_counter()
    state, section, own = run.state, run.plan.recipe.evaluate, run.plan.extensions.evaluate
    try:
        with run.observer.pause("evaluation"), run.memory.phase("evaluate"), run.strategy.averaged():
            found = Scores(dict(own())) if own is not None else _task_scores(run, final)
            metrics = plain_metrics(found.metrics)
    except EvaluationLeft:
        state.evaluation_owed = True
        return False
    state.evaluation_owed = False
    timed = {**metrics, "seconds": time.perf_counter() - began}
    run.observer.on_evaluation(state.step, timed, "eval_final" if final else "eval")
    measured = {name: value for name, value in metrics.items() if name != "num_targets"}
    run.evaluation.scores = dict(metrics)
    run.evaluation.details = {"step": state.step, "metrics": measured, "details": found.details}
    check_reported(section, metrics)
    value = number_of(section, metrics)
    if final:
        return False
    loss = metrics.get("loss", math.nan)
    # transformers keeps the first of equal metrics.
    ties = own is None and math.isfinite(value) and value == state.best_metric
    gains = is_better(value, state.best_metric, section)
    is_tie_broken = ties and loss < (math.inf if state.best_loss is None else state.best_loss)
    is_best = gains or is_tie_broken or (ties and loss == state.best_loss)
    state.last_loss = loss if math.isfinite(loss) else None
    state.evaluations_without_improvement += 1
    if gains or is_tie_broken:
        state.evaluations_without_improvement = 0
    if is_best:
        state.best_metric, state.best_step, state.best_loss = value, state.step, state.last_loss
    if not at_end and is_patience_spent(run):
        state.stopped_early = True
        best = f"{section.metric_for_best_model} was best at step {state.best_step}: {state.best_metric}"
        since = f"it has not improved since (evaluations: {section.early_stopping_patience})"
        run.observer.on_event("early_stop", state.step, f"stopped early: {best}, and {since}")
    return is_best and run.plan.recipe.checkpoint.keep_best


def evaluate_untrained(run: RunContext) -> None:
    """Evaluate the initial weights of a new run on all samples, as a baseline. They never count as the best weights.

    A run that is asked to stop meanwhile goes without the baseline, or evaluates again if it starts again.
    """
    state = run.state
    if state.step > 0 or state.untrained or not run.plan.evaluates_untrained:
        return
    began = time.perf_counter()
    try:
        with run.observer.pause("evaluation"), run.memory.phase("evaluate"):
            metrics = plain_metrics(_task_scores(run, True).metrics)
    except EvaluationLeft:
        return
    # On the samples of the other evaluations, it is the first point of their curve.
    split = "eval_untrained" if run.plan.evaluates_part else "eval"
    run.observer.on_evaluation(0, {**metrics, "seconds": time.perf_counter() - began}, split)
    state.untrained = {
        name: float(value) for name, value in metrics.items() if name != "num_targets" and is_number(value)
    }


def evaluate_at_end(run: RunContext) -> None:
    """Let the last step compete for the best on the samples of all evaluations, and evaluate what is kept on all
    samples.
    """
    state, plan = run.state, run.plan
    is_evaluated = state.stopped_early or run.evaluation.details.get("step") == state.step
    if not plan.evaluates_part or (state.best_step is not None and not is_evaluated):
        evaluate_run(run, at_end=True)
    is_wanted = plan.recipe.loads_best_model and state.best_step not in (None, state.step)
    is_other = is_wanted and not state.evaluation_owed and load_best(run)
    is_new = not state.evaluation_owed and calibrate(run, state.best_step if is_other else state.step)
    if (is_other or is_new or plan.evaluates_part) and not state.evaluation_owed:
        evaluate_run(run, at_end=True, final=True)
        if is_other and not state.evaluation_owed:  # the numbers are of those weights
            run.evaluation.details["step"] = state.best_step


def load_best(run: RunContext) -> bool:
    """Restore the weights that evaluated best, on every process; return False where their checkpoint is damaged."""
    step = run.state.best_step
    assert step is not None
    path = folder_of(run.plan.output_dir / "checkpoints", step)
    with working("reading the best weights"):
        problem = on_main(lambda: check(path).problem)
    best = f"the weights of step {step} evaluated best"
    if problem is not None:
        message = f"{best}, but their checkpoint is damaged ({problem}); the run keeps the weights of the last step"
        run.observer.on_event("best_model_lost", run.state.step, message)
        return False
    with working("reading the best weights"):
        run.strategy.restore_weights(path)
    run.observer.on_event("best_model", run.state.step, f"{best}; the run keeps them")
    return True


def calibrate(run: RunContext, step: int | None) -> bool:
    """Calibrate the scores of the weights of a step, where the task does; return whether this changes the model."""
    plan, inner = run.plan, run.strategy.inner
    assert step is not None
    training = Training(plan.order, run.schedule, step)

    def on_one() -> tuple[JsonRecord, str] | None:
        try:
            return plan.task.calibrate(plan.recipe, inner.model, plan.data, training)
        # The weights are trained, and need no calibration.
        except Exception as error:
            return {}, f"scores are not calibrated ({type(error).__name__}: {first_line(error)})"

    with working("calibrating the scores"):
        found = on_main(on_one)
    if found is None:
        return False
    run.evaluation.calibration, message = found
    run.observer.on_event("calibration", run.state.step, message)
    return apply_calibration(run, inner.model)


def apply_calibration(run: RunContext, model: nn.Module) -> bool:
    """Set what the task's calibration found in a model's configuration; return whether this changes it."""
    config: Any = getattr(model, "config", None)
    changed = {name: value for name, value in run.evaluation.calibration.items() if getattr(config, name) != value}
    for name, value in changed.items():
        setattr(config, name, value)
    return bool(changed)


def _task_scores(run: RunContext, whole: bool) -> Scores:
    if run.accelerator.num_processes > 1:
        run.statistics.share()
    plan, progress, batch_size = run.plan, run.evaluation, run.sizes.per_device_eval_batch_size
    max_samples = None if whole else plan.recipe.evaluate.max_samples
    alike, replays = run.strategy.meets_in_forward, plan.recipe.precision.has_cuda_graphs
    reader = EvaluationReader(run.accelerator, plan.data, batch_size, plan.reading, max_samples, alike, replays)
    is_over = _reporting(run, reader, progress.chunk_size or batch_size)
    result, scores = evaluate_sets(
        plan.task, reader, run.strategy.inner, chunk_size=progress.chunk_size, is_over=is_over
    )
    if result.chunk_size < (progress.chunk_size or batch_size):
        progress.chunk_size = result.chunk_size
        at_once = format_count(result.chunk_size, "sample")
        message = f"evaluation ran out of memory; this process forwards {at_once} at once from now on"
        run.observer.on_event("out_of_memory", run.state.step, message)
    return scores


def _reporting(run: RunContext, reader: EvaluationReader, chunk_size: int) -> Callable[[], bool]:
    """Return `run.leaves_evaluation`, which before each batch also tells the observer how many are done."""
    total = max(1, -(-reader.num_samples // (chunk_size * parallel_dims(run.accelerator).size)))
    done = count()

    def leaves_evaluation() -> bool:
        run.observer.on_evaluation_batch(run.state.step, min(next(done) / total, 1.0))
        return run.leaves_evaluation()

    return leaves_evaluation


def is_better(value: float, best: float | None, section: Evaluate) -> bool:
    """Return whether a metric beats the best so far by more than the threshold; NaN never does."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    gain = best - value if section.is_lower_better(section.best_metric) else value - best
    return gain > section.early_stopping_threshold


def is_patience_spent(run: RunContext) -> bool:
    """Return whether early stopping ends the run now, by the recipe of this launch."""
    patience = run.plan.recipe.evaluate.early_stopping_patience
    return patience is not None and run.state.evaluations_without_improvement >= patience


def continue_unless_stopped(run: RunContext) -> None:
    """Let a resumed run that had stopped early train on where nothing stops it now.

    Its patience was raised or removed, or a callback had stopped it: a callback decides anew, as in transformers.
    """
    state, patience = run.state, run.plan.recipe.evaluate.early_stopping_patience
    if not state.stopped_early or is_patience_spent(run):
        return
    state.stopped_early = False
    now = f"evaluate.early_stopping_patience {'is not set' if patience is None else f'is {patience}'}"
    past = f"the run stopped early at step {state.step} of {run.plan.max_steps}"
    run.observer.on_event("early_stop_lifted", state.step, f"{past} and continues, because {now}")


def check_metric_name(run: RunContext) -> None:
    """Refuse an `evaluate.metric_for_best_model` that evaluations will not report, before the first step.

    Raises:
        RecipeError: evaluations do not report the metric. The message names the nearest one.
    """
    plan, section = run.plan, run.plan.recipe.evaluate
    if section.best_metric != "loss" and plan.extensions.evaluate is None and plan.data.eval is not None:
        names = reported_names(run)
        if names is not None:
            of_sets = [f"{each}/{name}" for each in plan.data.facts.eval_sets for name in names]
            check_reported(section, [*names, *of_sets])


def reported_names(run: RunContext) -> Collection[str] | None:
    """Return the metrics of the task's evaluations: what the task declares (`metric_names`), or what a few samples
    show.

    None where these are too few for its metrics, and under DeepSpeed, whose ZeRO takes the first forwards for training
    steps; then the first evaluation tells.
    """
    plan, strategy = run.plan, run.strategy
    if plan.task.metric_names is not None:
        return ("loss", *plan.task.metric_names)
    if strategy.notes_forward_order:
        return None
    max_samples = max(NUM_SAMPLES, run.accelerator.num_processes)
    alike, replays = strategy.meets_in_forward, plan.recipe.precision.has_cuda_graphs
    reader = EvaluationReader(
        run.accelerator, plan.data, 1, max_samples=max_samples, forwards_alike=alike, replays=replays
    )
    result = evaluate(reader, strategy.inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a metric is not defined for so few samples
        try:
            return ("loss", *plan.task.score(result.loss, result.totals, plan.data).metrics, "num_targets")
        except (ValueError, ArithmeticError):
            return None


def check_reported(section: Evaluate, reported: Collection[str]) -> None:
    """Refuse an `evaluate.metric_for_best_model` that is not reported.

    Raises:
        RecipeError: the text names the nearest one.
    """
    if section.best_metric not in reported:
        meant = did_you_mean(section.best_metric, reported, f"there are {', '.join(reported)}")
        setting = f"evaluate.metric_for_best_model={section.metric_for_best_model}"
        raise RecipeError(f"{setting}: evaluations do not report this metric; {meant}")


def number_of(section: Evaluate, metrics: Mapping[str, Any]) -> float:
    """Return the metric that decides which weights are best.

    Raises:
        RecipeError: it has several values.
    """
    value = metrics[section.best_metric]
    if not isinstance(value, int | float):
        raise RecipeError(
            f"evaluate.metric_for_best_model={section.metric_for_best_model}: it is a {type(value).__name__}, and only "
            "a number can be compared; report its mean under another name"
        )
    return float(value)
