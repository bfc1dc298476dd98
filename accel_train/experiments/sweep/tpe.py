"""Values chosen by Optuna's TPE from the results so far.

Optuna's own storage is not used. sweep.json holds the chosen values and their results, and each choice rebuilds the
study.
"""

import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from accel_train.core.state import JsonRecord
from accel_train.experiments.sweep.values import Range, Space, draws

STARTUP_DRAWS = 5
"""Number of random draws before TPE chooses. Optuna's default of 10 would leave no choice in a sweep of ten."""


class Outcome(NamedTuple):
    """The result of a combination: the metric's mean over seeds, and whether the guard stopped a run. No mean: None."""

    values: dict[str, str]
    mean: float | None
    has_diverged: bool = False


def check_optuna() -> None:
    """Raise ValueError if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ValueError("--optuna needs the package optuna; install it: pip install 'accel-train[optuna]'")


def propose(space: Space, outcomes: Sequence[Outcome], *, greater_is_better: bool, draw_seed: int) -> dict[str, str]:
    """Return the next combination to train, without seeds, as a function of the outcomes and the draw seed.

    A combination that diverged counts as worse than all others. Other failures are ignored.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Similar seeds would draw similar values, so the seed is hashed.
    seed = random.Random(f"{draw_seed} {len(outcomes)}").getrandbits(32)
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
    """Return the outcome of a combination from its lines in sweep.json, one per seed."""
    found = [run["value"] for run in runs if run["status"] == "finished" and run["value"] is not None]
    mean = sum(found) / len(found) if len(found) == len(runs) else None
    return Outcome(dict(values), mean, any(run["exit_code"] == 3 for run in runs))
