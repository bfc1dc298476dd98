"""The commands `recipes`, `init`, and `explain` for shipped recipes and settings, and `completion` for shells."""

import argparse
import re
import shutil
import textwrap
from pathlib import Path

from accel_train.cli import results
from accel_train.cli.command import Arguments, Command, Outcome, Settings, result_of, users_mistakes, value
from accel_train.core.errors import UserError
from accel_train.core.files import output_path
from accel_train.core.format import did_you_mean


def _recipes(_: Arguments, __: Settings) -> Outcome:
    from accel_train.recipe.loader import shipped_recipes

    width = shutil.get_terminal_size().columns
    for name, recipe in shipped_recipes().items():
        print(name)
        # Print the first clause of each note. A semicolon in parentheses does not end a clause.
        data = re.split(r": |\. ", recipe.notes["Data"])[0]
        needs = f"needs {re.split(r';(?![^(]*[)])', recipe.notes['Hardware'])[0].rstrip('.')}; data: {data.rstrip('.')}"
        for text in (recipe.about, needs):
            print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
    print("\naccel-train run NAME trains one; accel-train init NAME copies one, to be edited.")
    listed = [
        result_of(results.RecipeOfPackage, recipe, name=name, file=str(recipe.path))
        for name, recipe in shipped_recipes().items()
    ]
    return Outcome(results.RecipesResult(recipes=listed))


@users_mistakes()
def _init(arguments: Arguments, _: Settings) -> Outcome:
    from accel_train.recipe.loader import copy_text, shipped_recipes

    name = Path(arguments.name).stem
    if name not in shipped_recipes():
        meant = did_you_mean(name, shipped_recipes(), f"there are {', '.join(shipped_recipes())}")
        raise UserError(f"unknown recipe {arguments.name!r}; {meant}")
    target = output_path(arguments.file or f"{name}.yaml")
    text = copy_text(name, target)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{target} already exists. Give another file: accel-train init {name} FILE") from error
    print(f"{target}: edit it, then run `accel-train plan {target}` and `accel-train run {target}`")
    return Outcome(results.InitResult(recipe=name, file=str(target)))


@users_mistakes()
def _explain(arguments: Arguments, _: Settings) -> Outcome:
    from accel_train.recipe.explain import explain, explained

    name = arguments.setting.removeprefix("--")
    print(explain(name, shutil.get_terminal_size().columns))
    return Outcome({"settings": [each._asdict() for each in explained(name)]})


@users_mistakes()
def _completion(arguments: Arguments, _: Settings) -> Outcome:
    try:
        import shtab
    except ImportError as error:
        raise UserError("completion needs shtab: pip install 'accel-train[completion]'") from error
    from accel_train.recipe.names import is_section, literals_of, recipe_names

    completed = {
        **dict.fromkeys(("RECIPE", "DATA", "FILE"), shtab.FILE),
        **dict.fromkeys(("RUN", "INCIDENT", "FOLDER"), shtab.DIRECTORY),
    }

    def extend(parser: argparse.ArgumentParser, command: Command) -> None:
        for action in parser._actions:
            if action.metavar in completed:
                action.complete = completed[action.metavar]  # type: ignore[attr-defined]
        for setting, info in recipe_names().items() if command.takes_settings else ():
            if not is_section(info) and f"--{setting}" not in command.arguments:
                parser.add_argument(f"--{setting}", choices=literals_of(setting) or None)

    script = shtab.complete(arguments.build_parser(extend), arguments.shell)
    print(script)
    return Outcome(results.CompletionResult(shell=arguments.shell, script=script))


RECIPES = Command(
    _recipes, results.RecipesResult, "list the recipes of the package and what each needs", {}, takes_settings=False
)

INIT = Command(
    _init,
    results.InitResult,
    "copy a recipe of the package, so that you can edit it",
    {
        "name": value("NAME", "recipe name from `accel-train recipes`"),
        "file": value("FILE", "file to write; default: NAME.yaml", nargs="?"),
    },
    takes_settings=False,
)

EXPLAIN = Command(
    _explain,
    results.ExplainResult,
    "explain a setting: values, default, meaning, and an example",
    {
        "setting": {
            **value("SETTING", "setting or section, such as optimizer.lr_scaling; default: all", nargs="?"),
            "default": "",
        },
    },
    takes_settings=False,
)

COMPLETION = Command(
    _completion,
    results.CompletionResult,
    "print the script that completes commands, flags, and settings in your shell",
    {
        "shell": {
            "choices": ["bash", "zsh", "tcsh"],
            "help": "shell; for bash: accel-train completion bash >> ~/.bash_completion",
        },
    },
    takes_settings=False,
)
