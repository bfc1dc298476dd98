"""Values chosen by Optuna's TPE from the results so far.

There is no storage of Optuna's: sweep.json has what was chosen and what came of it, and a study is made of that each time.
"""

import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from accel_train.core.state import JsonRecord
from accel_train.experiments.sweep.values import Range, Space, draws

STARTUP_DRAWS = 5
"""Drawn at random before TPE chooses; Optuna's own 10 would leave a sweep of ten without any choice."""


class Outcome(NamedTuple):
    """The result of a combination: the mean of its metric over seeds, or None; then whether its guard stopped it."""

    values: dict[str, str]
    mean: float | None
    has_diverged: bool = False


def check_optuna() -> None:
    """Refuse a search where Optuna is missing; raises ValueError."""
    if find_spec("optuna") is None:
        raise ValueError("--optuna needs the package optuna; install it: pip install 'accel-train[optuna]'")


def propose(space: Space, outcomes: Sequence[Outcome], *, greater_is_better: bool, draw_seed: int) -> dict[str, str]:
    """Return the combination to train next, without seeds: a function of the outcomes and the draw seed.

    One that diverged counts as worse than every other, one that failed otherwise counts for nothing.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = random.Random(f"{draw_seed} {len(outcomes)}").getrandbits(32)  # near seeds would draw near values
    sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP_DRAWS, seed=seed)
    study = optuna.create_study(direction="maximize" if greater_is_better else "minimize", sampler=sampler)
    distributions = {name: _distribution(values) for name, values in space.swept.items()}
    states = optuna.trial.TrialState
    for each in outcomes:
        state = states.COMPLETE if each.mean is not None else states.PRUNED if each.has_diverged else states.FAIL
        params = {name: _param(space.swept[name], text) for name, text in each.values.items()}
        study.add_trial(optuna.create_trial(state=state, value=each.mean, params=params, distributions=distributions))
    params = study.ask(distributions).params
    chosen = {
        name: values.write(params[name]) if isinstance(values, Range) else str(params[name])
        for name, values in space.swept.items()
    }
    before = [each.values for each in outcomes]
    return chosen if chosen not in before else next(each for each in draws(space, draw_seed) if each not in before)


def _distribution(values: list[str] | Range) -> Any:
    import optuna

    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution(values)
    if values.is_integer:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.is_log)


def _param(values: list[str] | Range, text: str) -> Any:
    return text if not isinstance(values, Range) else int(text) if values.is_integer else float(text)


def outcome_of(values: Mapping[str, str], runs: Sequence[JsonRecord]) -> Outcome:
    """Return what the runs of a combination, one a seed, gave together; `runs` are their lines of sweep.json."""
    found = [run["value"] for run in runs if run["status"] == "finished" and run["value"] is not None]
    mean = sum(found) / len(found) if len(found) == len(runs) else None
    return Outcome(dict(values), mean, any(run["exit_code"] == 3 for run in runs))
