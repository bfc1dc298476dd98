"""Read the recipe of a run folder that somebody else may have written."""

from collections.abc import Sequence
from pathlib import Path

from accel_train.core.ownership import recipe_of_run
from accel_train.observe.run_folder import RECIPE_FILE
from accel_train.recipe.loader import load_recipe, split_flags
from accel_train.recipe.schema import Recipe
from accel_train.task import refuse_code_of_a_run

SETTINGS = ("data", "batch", "precision", "evaluate", "log", "options")
"""Sections of a recipe that matter to a model that is already trained."""
_SETTINGS_OF_MODEL = ("model.attn_implementation", "model.fused_kernels", "model.trust_remote_code")
CONSENT = ("task", "optimizer.name")
"""Settings that change nothing, and allow the code that the recipe names under them."""
_DATA_IS_NAMED_ELSEWHERE = ("data.train", "data.eval", "data.eval_fraction")
_WITHOUT_CONSENT = ("--model.trust_remote_code", "false", "--evaluate.allow_hub_metrics", "false")
"""A run folder may be somebody else's: what its recipe says of foreign code counts for nothing until the reader says it."""
_NOT_NOTIFIED = ("--log.notify", "[]")
"""Webhooks are for training: their variables need not be set."""


def read_recipe(folder: Path, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a run folder that somebody else may have written: foreign code runs only where `settings` allow it.

    `--task` and `--optimizer.name` change nothing: naming the recipe's own class allows its code to run.

    Raises:
        ValueError: the recipe is bad, or names code that is neither installed nor allowed.
    """
    recipe = read_recipe_only(folder, other_than_consent(settings))
    consent = {name: value for _, name, value in split_flags(settings) if name in CONSENT}
    for setting, name in (("task", recipe.task), ("optimizer.name", recipe.optimizer.name)):
        if setting not in consent:
            refuse_code_of_a_run(setting, name, folder)
        elif consent[setting] != name:
            raise ValueError(
                f"--{setting} {consent[setting]}: {folder} has {setting}={name!r}; name that, or leave it out"
            )
    return recipe


def read_recipe_only(folder: Path, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a run folder for its settings alone: it may name code that must not run.

    Raises:
        ValueError: the recipe is bad.
    """
    return load_recipe(recipe_of_run(folder) or folder / RECIPE_FILE, arguments=reader_settings(settings))


def other_than_consent(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings without those that only allow the run's own code."""
    return tuple(word for flag, name, value in split_flags(settings) if name not in CONSENT for word in (flag, value))


def check_run_folder(folder: Path) -> Path:
    """Return the recipe file of a run folder.

    Raises:
        ValueError: the folder holds no run.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; give the output_dir of a finished run")
    recipe = recipe_of_run(folder)
    if recipe is None:
        raise ValueError(f"{folder} is no run folder (it has no {RECIPE_FILE}); give the output_dir of a finished run")
    return recipe


def reader_settings(settings: Sequence[str]) -> tuple[str, ...]:
    """Flags for the recipe of a run folder: the recipe's own consent to foreign code is off unless these `settings` give it."""
    return (*_WITHOUT_CONSENT, *_NOT_NOTIFIED, *settings)


def check_settings(settings: Sequence[str]) -> None:
    """Refuse settings that belong to training, or that another argument gives.

    Raises:
        ValueError: names the first of them.
    """
    for word in settings:
        name = word.partition("=")[0].removeprefix("--")
        if not word.startswith("--"):
            continue
        if name in _DATA_IS_NAMED_ELSEWHERE:
            raise ValueError(
                f"--{name}: other data is named by the command's own argument (evaluate RUN DATA, predict RUN DATA)"
            )
        if name.split(".")[0] not in SETTINGS and name not in (*_SETTINGS_OF_MODEL, *CONSENT):
            raise ValueError(
                f"--{name} changes nothing of a model that is trained; settings of {', '.join(SETTINGS)} do"
            )
