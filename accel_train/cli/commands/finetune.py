"""The command `finetune`: write a recipe for the user's data, and run it."""

from accel_train.cli import results
from accel_train.cli.command import (
    VERBOSE,
    Arguments,
    Command,
    Outcome,
    Settings,
    flag,
    result_of,
    show,
    users_mistakes,
    value,
)
from accel_train.cli.commands.train import run_recipe
from accel_train.core.terminal import is_main
from accel_train.recipe.tasks import finetune_tasks


def _finetune(arguments: Arguments, settings: Settings) -> Outcome:
    from accel_train.data.builtin.example import write_example
    from accel_train.experiments.finetune.recipe import how_to_test
    from accel_train.experiments.finetune.start import write_recipe

    names = ("model", "group", "task", "output_dir")
    given = {name: getattr(arguments, name) for name in names}
    with users_mistakes():
        if (arguments.path is None) != arguments.example:
            raise ValueError("give PATH, your data, or --example, which writes a table to train on")
        path = write_example() if arguments.example else arguments.path
        text: str = arguments.text or ""
        texts = [text] if "{" in text else text.split(",") if text else []
        labels = (arguments.label,) if arguments.label else ()
        written = write_recipe(path, settings, text=texts, label=labels, file=arguments.recipe, **given)
    if is_main():
        show("\n".join(written.lines(show_all=arguments.dry_run or arguments.verbose)))
    result = result_of(
        results.FinetuneResult,
        written.found,
        recipe=str(written.path),
        recipe_is_new=written.is_new,
        choices={name: str(choice) for name, choice in written.choices.items()},
        run=None,
    )
    if arguments.dry_run:
        return Outcome(result)
    result["run"] = run_recipe(result["recipe"], [], verbose=arguments.verbose, is_named=True)
    if is_main():
        for line in how_to_test(written.found, written.recipe):
            print(line)
    return Outcome(result)


FINETUNE = Command(
    _finetune,
    results.FinetuneResult,
    "train on your own data: find the task, write a recipe, and train it",
    {
        "path": value(
            "PATH",
            "a table (csv, tsv, jsonl, parquet), text files, chats, CoNLL or SQuAD files, or a folder of images by "
            "class, with masks, or with boxes",
            nargs="?",
        ),
        "--example": flag("write a small table, example.csv, and train on it"),
        "--model": value("NAME", "pretrained weights: a folder or a hub name; default: a small model from scratch"),
        "--text": value("COL", "text column, template '{title}. {body}', or two columns A,B as a pair"),
        "--label": value("COL", "label column, or columns of 0 and 1 with commas between them"),
        "--group": value(
            "COL", "column of groups; rows of a group are on one side of the split; default: found for pairs"
        ),
        "--task": value("TASK", "a task of the list below; default: found from the data"),
        "--output_dir": value("DIR", "run folder; default: runs/NAME, named after the data"),
        "--recipe": value("FILE", "recipe file to write; default: DIR.yaml"),
        "--verbose": VERBOSE,
        "--dry-run": flag("print the findings and write the recipe, but do not train"),
    },
    processes="all",
    resumes=True,
    tasks=finetune_tasks,
)
