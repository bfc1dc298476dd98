"""The values of a sweep's settings: lists and ranges from the command line, and their combinations.

A draw is a function of its number and the draw seed. A resumed sweep repeats the draws, and a longer one adds to them.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, product
from typing import Any, NamedTuple

from accel_train.checkpoint.run_recipe import named_recipe
from accel_train.core.errors import RecipeProblems
from accel_train.core.json_io import json_digest
from accel_train.recipe.loader import split_flags
from accel_train.recipe.names import numbers_of, recipe_names
from accel_train.recipe.schema import Recipe

Values = Mapping[str, str]
"""Values of a combination by setting, as a recipe writes them."""

SHORT_NAMES = {"learning_rate": "lr", "weight_decay": "wd", "global_batch_size": "batch"}
LONGEST_NAME = 120
"""Maximum characters of a folder name. A longer name is cut and ends with a digest."""
MOST_RUNS = 1000
LOG_FROM = 10.0
"""Ratio of a range's ends above which draws are uniform in the logarithm."""
STARTUP_DRAWS = 5
"""Number of random draws before TPE chooses. Optuna's default of 10 would leave no choice in a sweep of ten."""
SEED = "seed"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")


class Range(NamedTuple):
    """All numbers from `low` to `high`, both included."""

    low: float
    high: float
    is_integer: bool

    @property
    def is_log(self) -> bool:
        """Return whether draws are uniform in the logarithm."""
        return self.low > 0 and self.high > LOG_FROM * self.low

    @property
    def size(self) -> float:
        """Return the number of values. Infinite for fractions."""
        return self.high - self.low + 1 if self.is_integer else math.inf

    def at(self, share: float) -> str:
        """Return the quantile `share` (0 to 1) of all draws, as text for a recipe."""
        low, high = (int(self.low), int(self.high) + 1) if self.is_integer else (self.low, self.high)
        return self.write(low * (high / low) ** share if self.is_log else low + (high - low) * share)

    def write(self, value: float) -> str:
        """Return a number as text: whole, or with enough digits to distinguish 10,000 values of this range."""
        value = min(max(value, self.low), self.high)
        if self.is_integer:
            return str(math.floor(value))
        if self.is_log:
            return f"{value:.4g}"
        return f"{round(value, 3 - math.floor(math.log10(self.high - self.low))):.15g}"


Domain = list[str] | Range
"""Values of a swept setting: a list, or all in a range."""


class Space(NamedTuple):
    """The flags of settings with one value, the values of swept settings by name, and the seeds (None: not swept)."""

    fixed: list[str]
    swept: dict[str, Domain]
    seeds: list[str] | None

    @property
    def size(self) -> float:
        """Return the number of combinations without seeds. Infinite if a range has fractions."""
        return math.prod(each.size if isinstance(each, Range) else len(each) for each in self.swept.values())


class Combination(NamedTuple):
    """A combination of values: its folder name, the swept values by setting, and the recipe with these values."""

    name: str
    values: Values
    recipe: Recipe


class Outcome(NamedTuple):
    """The result of a combination: the metric's mean over seeds, and whether the guard stopped a run. No mean: None."""

    values: Values
    mean: float | None
    has_diverged: bool = False


def split_values(text: str) -> list[str]:
    """Return the values of a text such as `1e-4,3e-4`. Commas inside brackets, braces, and quotes do not split."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def read_space(settings: Sequence[str]) -> Space:
    """Return the settings with several values (`--seed 0,1`) or a range (`--optimizer.learning_rate 1e-5..1e-3`).

    Raises:
        ValueError: every setting has one value, or a value is empty, repeated, or belongs to a setting that cannot be
            swept.
    """
    fixed: list[str] = []
    swept: dict[str, Domain] = {}
    for flag, name, text in split_flags(settings):
        values = _domain(flag, name, text)
        if values is None:
            fixed += [flag, text]
        elif name == "output_dir":
            raise ValueError(f"{flag} takes one value: the folder of all runs")
        elif name in swept:
            raise ValueError(f"{flag} is given twice. Give it once")
        else:
            swept[name] = values
    if not swept:
        raise ValueError("nothing to sweep. Give a setting several values with commas: --seed 0,1,2")
    seeds = swept.pop(SEED, None)
    if isinstance(seeds, Range):
        raise ValueError(f"--seed {seeds.low:g}..{seeds.high:g}: seeds cannot be a range. List them: --seed 0,1,2")
    return Space(fixed, swept, seeds)


def _domain(flag: str, name: str, text: str) -> Domain | None:
    """Return the values of a flag, or None if it has one value."""
    values = split_values(text)
    if len(values) == 1:
        found = _RANGE.fullmatch(values[0])
        return _range(flag, name, *found.groups()) if found else None
    if "" in values:
        raise ValueError(f"{flag} {text}: a value is empty. Write one comma between two values")
    if twice := [value for value, times in Counter(values).items() if times > 1]:
        raise ValueError(f"{flag} {text}: {twice[0]} is repeated. Give each value once")
    if within := [value for value in values if _RANGE.fullmatch(value)]:
        raise ValueError(f"{flag} {text}: {within[0]} is a range in a list. Give one range, or a list of values")
    return values


def _range(flag: str, name: str, low: str, high: str) -> Range | None:
    """Return a range, or None if the setting does not take numbers. The text is then its value."""
    numbers = numbers_of(name) if name in recipe_names() else {"number", "integer"}
    if not numbers:
        return None
    if not float(low) < float(high) < math.inf:
        raise ValueError(f"{flag} {low}..{high}: a range must go from a smaller number to a greater one")
    are_whole = all(re.fullmatch(r"[+-]?\d+", end) for end in (low, high))
    if not are_whole and "number" not in numbers:
        raise ValueError(f"{flag} {low}..{high}: this setting takes whole numbers. Give whole ends: 1..8")
    return Range(float(low), float(high), are_whole and "integer" in numbers)


def grid(space: Space) -> list[Values]:
    """Return all combinations without seeds. The last setting changes fastest.

    Raises:
        ValueError: a setting has a range, or there are too many combinations.
    """
    lists = {name: values for name, values in space.swept.items() if not isinstance(values, Range)}
    if ranges := [name for name in space.swept if name not in lists]:
        raise ValueError(f"--{ranges[0]} is a range. Say how many values to try: --random 20, or --optuna 20")
    check_number(space, int(space.size), "")
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def draws(space: Space, draw_seed: int) -> Iterator[Values]:
    """Yield distinct combinations without seeds, until all `space.size` combinations are drawn."""
    seen: set[tuple[str, ...]] = set()
    for number in count():
        if len(seen) >= space.size:
            return
        values = {}
        for name, domain in space.swept.items():
            share = random.Random(f"{draw_seed} {number} {name}").random()
            values[name] = domain.at(share) if isinstance(domain, Range) else domain[int(share * len(domain))]
        if (key := tuple(values.values())) not in seen:
            seen.add(key)
            yield values


def check_number(space: Space, number: int, flag: str) -> None:
    """Raise ValueError for a wrong number of combinations, or for too many runs. An empty `flag` means a grid."""
    if flag and not space.swept:
        raise ValueError(f"{flag}={number}: nothing to draw, because every seed is trained. Leave {flag} out")
    if flag and number > space.size:
        raise ValueError(f"{flag}={number}: must be between 1 and {space.size:,.0f}, the number of combinations")
    if (num_runs := number * len(space.seeds or [SEED])) > MOST_RUNS:
        remedy = f"Lower {flag}" if flag else "Leave out values, or draw some: --random 20"
        raise ValueError(f"{num_runs:,} runs are more than {MOST_RUNS:,}. {remedy}")


def propose(space: Space, outcomes: Sequence[Outcome], *, greater_is_better: bool, draw_seed: int) -> Values:
    """Return the next combination to train, without seeds: Optuna's TPE, as a function of outcomes and draw seed.

    A combination that diverged counts as worse than all others. Other failures are ignored. Each choice rebuilds the
    study, because sweep.json holds the values and results.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Similar seeds would draw similar values, so the seed is hashed.
    seed = random.Random(f"{draw_seed} {len(outcomes)}").getrandbits(32)
    sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP_DRAWS, seed=seed)
    study = optuna.create_study(direction="maximize" if greater_is_better else "minimize", sampler=sampler)
    kinds: dict[str, Any] = {}
    readers: dict[str, Callable[[str], Any]] = {}
    for name, values in space.swept.items():
        if isinstance(values, Range):
            kind: Any = (
                optuna.distributions.IntDistribution if values.is_integer else optuna.distributions.FloatDistribution
            )
            read = int if values.is_integer else float
            kinds[name], readers[name] = kind(read(values.low), read(values.high), log=values.is_log), read
        else:
            kinds[name], readers[name] = optuna.distributions.CategoricalDistribution(values), str
    states = optuna.trial.TrialState
    for each in outcomes:
        state = states.COMPLETE if each.mean is not None else states.PRUNED if each.has_diverged else states.FAIL
        params = {name: readers[name](text) for name, text in each.values.items()}
        study.add_trial(optuna.create_trial(state=state, value=each.mean, params=params, distributions=kinds))
    params = study.ask(kinds).params
    chosen = {
        name: values.write(params[name]) if isinstance(values, Range) else params[name]
        for name, values in space.swept.items()
    }
    before = [each.values for each in outcomes]
    return chosen if chosen not in before else next(each for each in draws(space, draw_seed) if each not in before)


def with_recipes(path: str, space: Space, chosen: Iterable[Values]) -> list[Combination]:
    """Return a run for each seed of each combination.

    Raises:
        ValueError: a recipe is wrong. The message has a line per problem.
    """
    names = [*space.swept, *([SEED] if space.seeds else [])]
    last = {name: SHORT_NAMES.get(part := name.rpartition(".")[2], part) for name in names}
    times = Counter(last.values())
    keys = {name: part if times[part] == 1 else name for name, part in last.items()}
    problems: dict[str, None] = {}
    found = []
    for each, seed in product(chosen, space.seeds or [""]):
        values = {**each, **({SEED: seed} if seed else {})}
        try:
            recipe = named_recipe(path, [*space.fixed, *flags_of(values)])
        except ValueError as error:
            problems.update(dict.fromkeys(error.args if isinstance(error, RecipeProblems) else [str(error)]))
        else:
            found.append(Combination(_folder_name(keys, values), values, recipe))
    if problems:
        raise RecipeProblems(*problems)
    return found


def extremes(space: Space) -> list[Values]:
    """Return combinations that cover every listed value and both ends of every range."""
    ends = {
        name: [values.write(values.low), values.write(values.high)] if isinstance(values, Range) else values
        for name, values in space.swept.items()
    }
    most = max(map(len, ends.values()))
    return [{name: values[min(number, len(values) - 1)] for name, values in ends.items()} for number in range(most)]


def flags_of(values: Values) -> list[str]:
    """Return values by setting as words of a command line."""
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def _folder_name(keys: Mapping[str, str], values: Values) -> str:
    """Return a folder name such as `lr=1e-4,seed=0`. A digest follows if characters were replaced or cut off."""
    whole = ",".join(f"{keys[name]}={value}" for name, value in values.items())
    safe = re.sub(r"[^A-Za-z0-9._+=,-]+", "_", whole)
    return safe if safe == whole and len(safe) <= LONGEST_NAME else f"{safe[:LONGEST_NAME]}-{json_digest(whole)[:6]}"
