"""What the end of a run needs, checked at its beginning: steps are expensive, and a mistake in a name should not cost them."""

import warnings
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from accel_train.evaluation import evaluate
from accel_train.run import Run
from accel_train.state import RecipeError

NUM_SAMPLES = 8
"""Evaluated to learn which metrics there are."""


def check_metric_name(run: Run) -> None:
    """Refuse an `evaluate.metric_for_best_model` that evaluations will not report, before the first step.

    Raises:
        RecipeError: there is no such metric; the text names the nearest one.
    """
    name = run.recipe.evaluate.metric_for_best_model
    if short_name(name) != "loss" and run.evaluate is None and run.data.eval is not None:
        names = reported_names(run)
        if names is not None:
            check_reported(name, names)


def reported_names(run: Run) -> Collection[str] | None:
    """The metrics of the task's evaluations: what the task says (`metric_names`), or what a few samples show.

    None where these are too few for its metrics, and under DeepSpeed, whose ZeRO notes the order of the first forwards for
    those of training; then the first evaluation tells.
    """
    declared = getattr(run.task, "metric_names", None)
    if declared is not None or run.zero is not None:
        return None if declared is None else ("loss", *declared)
    assert run.data.eval is not None
    seen = evaluate(
        run.accelerator,
        run.inner,
        run.data,
        1,
        max_samples=max(NUM_SAMPLES, run.accelerator.num_processes),
        num_workers=0,
        pin_memory=run.pin_memory,
        in_lockstep=run.meets_in_forward,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a metric is not defined for so few samples
        try:
            return ("loss", *run.task.score(seen.loss, seen.totals, run.data).metrics, "num_targets")
        except (ValueError, ArithmeticError):
            return None


def metric_for_best(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name; `eval_` before it is allowed, as in transformers.

    Raises:
        RecipeError: there is none.
    """
    check_reported(name, metrics)
    return metrics[short_name(name)]


def check_reported(name: str, reported: Collection[str]) -> None:
    """Refuse a metric that is not reported.

    Raises:
        RecipeError: the text names the nearest one.
    """
    if short_name(name) not in reported:
        near = get_close_matches(short_name(name), reported, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(reported)}"
        raise RecipeError(f"evaluate.metric_for_best_model={name}: no such metric is reported; {meant}")


def short_name(name: str) -> str:
    """A metric's name without transformers' `eval_`."""
    return name.removeprefix("eval_")
