"""The command `data`: look at what a run will read."""

import sys
from pathlib import Path

from accel_train.cli import results
from accel_train.cli.command import (
    RECIPE,
    Arguments,
    Command,
    Outcome,
    Settings,
    importing,
    out_of,
    recipe_of,
    result_of,
    say,
    show,
    users_mistakes,
    value,
)
from accel_train.core.ownership import check_file
from accel_train.core.terminal import use_colour


@users_mistakes()
def _data(arguments: Arguments, settings: Settings) -> Outcome:
    recipe = recipe_of(arguments, settings)
    file = out_of(arguments) or Path(recipe.output_dir) / "data.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    check_file(file, file.parent, str(file))
    with importing(arguments.recipe, recipe.task):
        from accel_train.experiments.look.look import format_look, look_at
        from accel_train.experiments.look.page import write_page
    look = look_at(recipe, progress=sys.stderr.isatty())
    show("\n".join(format_look(look, colour=use_colour(sys.stdout))))
    say(str(write_page(look, file)))
    found = result_of(
        results.DataResult,
        look,
        findings=[result_of(results.FindingOfData, each) for each in look.findings],
        training_samples=len(look.train),
        evaluation_samples=len(look.held),
        labels=look.counts,
        lengths=look.bins,
        file=str(file),
    )
    return Outcome(found, 2 if look.stops else 0)


DATA = Command(
    _data,
    results.DataResult,
    "show what a run will read: samples as the model reads them, and what is wrong with them",
    {
        "recipe": RECIPE,
        "--out": value("FILE", "HTML page to write; default: data.html in the recipe's output_dir"),
    },
)
