"""Read the recipe of an untrusted run folder."""

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from shlex import quote

from accel_train.core.errors import SettingError
from accel_train.observe.run_folder import RECIPE_FILE
from accel_train.recipe.loader import load_recipe, split_flags
from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import value_of
from accel_train.task import untrusted_place

SETTINGS = ("data", "batch", "precision", "evaluate", "log", "options")
"""Sections of a recipe that affect a trained model."""
_SETTINGS_OF_MODEL = ("model.attn_implementation", "model.fused_kernels", "model.trust_remote_code")
CONSENT = ("task", "optimizer.name", "schedule.type")
"""Settings that change nothing here, but allow the code that the recipe names in them."""
_LISTS = ("evaluate.metrics", "log.callbacks")
"""Lists of names, of which some may be code."""
_DATA_IS_NAMED_ELSEWHERE = ("data.train", "data.eval", "data.eval_fraction")
_WITHOUT_CONSENT = ("--model.trust_remote_code", "false", "--evaluate.allow_hub_metrics", "false")
"""Flags that cancel the recipe's own consent to foreign code. The run folder may come from another person."""
_NOT_TRAINING = ("--log.notify", "[]", "--log.callbacks", "[]")
"""Webhooks and callbacks are for training. The folder keeps no URL: each is redacted, or the name of a variable."""


def read_recipe(folder: Path, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe of an untrusted run folder. Foreign code runs only if `settings` allow it.

    `CONSENT` changes nothing. It allows the recipe's own code if it names it.

    Raises:
        ValueError: the recipe is invalid, or names code that is neither installed nor allowed.
    """
    recipe = read_recipe_only(folder, other_than_consent(settings))
    consent = {name: value for _, name, value in split_flags(settings) if name in CONSENT}
    _refuse_unless_given(recipe, folder, consent)
    for setting, name in _code_of(recipe):
        if consent.get(setting, name) != name:
            problem = f"{folder} was trained with {setting}={name!r}"
            remedy = "Give that value, or leave the flag out"
            raise SettingError(problem, remedy, f"--{setting} {consent[setting]}", (setting,))
    return recipe


def named_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe that a command names, with settings of the command line on top.

    Code that came with the recipe runs only if `settings` name it. That is each module that is not installed, for the
    recipe of a run folder. For others, it is a module below the recipe's folder; but in the current folder, recipe and
    module are the user's own.

    Raises:
        ValueError: the recipe is invalid, or names code that is not allowed.
    """
    is_of_a_run = Path(path).name == RECIPE_FILE
    recipe = load_recipe(path, arguments=[*(_WITHOUT_CONSENT if is_of_a_run else ()), *settings])
    folder = Path(path).resolve().parent
    if is_of_a_run or folder != Path.cwd():
        _refuse_unless_given(recipe, folder, is_of_a_run=is_of_a_run)
    return recipe


def _code_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield each setting that can name code, with its names."""
    for setting in (*CONSENT, *_LISTS):
        found = value_of(recipe, setting)
        yield from ((setting, name) for name in (found if setting in _LISTS else (found,)))


def _refuse_unless_given(recipe: Recipe, folder: Path, given: Container[str] = (), *, is_of_a_run: bool = True) -> None:
    found = {
        (setting, name): place
        for setting, name in _code_of(recipe)
        if setting not in given and recipe.origin(setting).kind != "command line"
        if (place := untrusted_place(name, folder, is_of_a_run=is_of_a_run)) is not None
    }
    if not found:
        return
    values = {setting: value_of(recipe, setting) for setting, _ in found}
    texts = {name: f"[{', '.join(value)}]" if name in _LISTS else value for name, value in values.items()}
    flags = " ".join(f"--{setting} {quote(text)}" for setting, text in texts.items())
    verb, them = ("is", "it") if len({*found.values()}) == 1 else ("are", "them")
    raise ValueError(
        f"{', '.join(f'{setting}={name!r}' for setting, name in found)} of {folder} would run "
        f"{', '.join(dict.fromkeys(map(str, found.values())))}, which {verb} not installed, and may have come with the "
        f"{'run' if is_of_a_run else 'recipe'}. Read {them}, and add {flags} if you trust {them}."
    )


def read_recipe_only(folder: Path, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a run folder for its settings only. It may name code that must not run.

    Raises:
        ValueError: the recipe is invalid.
    """
    return load_recipe(folder / RECIPE_FILE, arguments=reader_settings(settings))


def other_than_consent(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings without those that only allow the run's own code."""
    return tuple(word for flag, name, value in split_flags(settings) if name not in CONSENT for word in (flag, value))


def check_run_folder(folder: Path) -> Path:
    """Return the recipe file of a run folder.

    Raises:
        ValueError: the folder is not a run folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist. Give the output_dir of a finished run")
    recipe = folder / RECIPE_FILE
    if not recipe.is_file():
        raise ValueError(
            f"{folder} is not a run folder (it does not contain {RECIPE_FILE}). Give the output_dir of a finished run"
        )
    return recipe


def reader_settings(settings: Sequence[str]) -> tuple[str, ...]:
    """Return flags for reading an untrusted recipe. Only `settings` can give consent to foreign code."""
    return (*_WITHOUT_CONSENT, *_NOT_TRAINING, *settings)


def check_settings(settings: Sequence[str]) -> None:
    """Check that no setting belongs to training or to another argument.

    Raises:
        ValueError: a setting does; the message names the first.
    """
    for word in settings:
        name = word.partition("=")[0].removeprefix("--")
        if not word.startswith("--"):
            continue
        if name in _DATA_IS_NAMED_ELSEWHERE:
            problem = "data is an argument of the command, not a setting"
            raise SettingError(problem, "Use evaluate RUN DATA or predict RUN DATA", f"--{name}", (name,))
        if name.split(".")[0] not in SETTINGS and name not in (*_SETTINGS_OF_MODEL, *CONSENT):
            problem = "this setting does not affect a trained model"
            raise SettingError(problem, f"Use settings of {', '.join(SETTINGS)}", f"--{name}", (name,))
