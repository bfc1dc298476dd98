"""The command `finetune`: write a recipe for the user's data, and run it."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from accel_train.cli.command import Command, Outcome, users_mistakes
from accel_train.cli.commands.train import run_recipe
from accel_train.cli.results import training as results
from accel_train.core.redaction import redact_text

if TYPE_CHECKING:
    from accel_train.experiments.finetune.recipe import Found
    from accel_train.recipe.loader import Recipe


def _finetune(arguments: argparse.Namespace, settings: Sequence[str]) -> Outcome:
    is_first = os.environ.get("RANK", "0") == "0"
    with users_mistakes():
        recipe, found, lines, result = _write_recipe(arguments, list(settings), is_first=is_first)
    if is_first:
        print(redact_text("\n".join(lines)), flush=True)
    if arguments.dry_run:
        return Outcome(result)
    result["run"] = run_recipe(result["recipe"], [])
    if is_first:
        from accel_train.experiments.finetune.recipe import how_to_use

        print("\n".join(how_to_use(found, recipe)))
    return Outcome(result)


def _write_recipe(
    arguments: argparse.Namespace, settings: list[str], *, is_first: bool
) -> tuple["Recipe", "Found", list[str], results.FinetuneResult]:
    """Write the recipe; return it, the findings, the lines to print, and the result without the training."""
    from accel_train.experiments.finetune import recipe as own
    from accel_train.experiments.finetune.models import choose
    from accel_train.experiments.finetune.recognise import recognise
    from accel_train.recipe.loader import make_recipe

    data_path = own.path_of(arguments.path)
    minimal = own.minimal_recipe(data_path, settings)
    text = tuple((arguments.text or "").split(",")) if arguments.text else ()
    asked = own.asked_of(data_path, minimal, task=arguments.task, text=text, label=arguments.label)
    if is_first:
        print(f"{data_path}: looking at the data ...", flush=True)
    found = recognise(asked)
    name = arguments.model or minimal.model.pretrained
    pretrained = None
    if name:
        from accel_train.experiments.finetune.models import look_at

        if is_first:
            print(f"{name}: looking at the model ...", flush=True)
        pretrained = look_at(name, found.task, trust_remote_code=minimal.model.trust_remote_code)
    chosen = choose(found, pretrained)
    output_dir = arguments.output_dir or own.default_output_dir(data_path)
    path = Path(arguments.recipe or f"{output_dir.rstrip('/')}.yaml")
    recipe = make_recipe(own.tree_of(found, chosen, output_dir), str(path), arguments=settings)
    is_new = own.keep(path, recipe, own.format_recipe_file(recipe, found, chosen, path), is_first=is_first)
    lines = own.format_choices(found, chosen, recipe)
    lines.append(
        f"recipe: {path} ({'written' if is_new else 'as it was'}; edit it, and `accel-train run {quote(str(path))}`)"
    )
    result: results.FinetuneResult = {
        "recipe": str(path),
        "recipe_is_new": is_new,
        "task": found.task,
        "description": found.description,
        "notes": found.notes,
        "choices": {name: str(choice) for name, choice in {**found.settings, **chosen}.items()},
        "run": None,
    }
    return recipe, found, lines, result


FINETUNE = Command(
    _finetune,
    "train on your own data: find the task, write a recipe, and train it",
    {
        "path": {
            "metavar": "PATH",
            "help": (
                "a table (csv, tsv, jsonl, parquet), text files, chats, or a folder of images by class or with masks"
            ),
        },
        "--model": {
            "metavar": "NAME",
            "help": "pretrained weights: a folder or a hub name; default: a small model from scratch",
        },
        "--text": {"metavar": "COL", "help": "text column, or two text columns with a comma between them for pairs"},
        "--label": {"metavar": "COL", "help": "label column"},
        "--task": {
            "metavar": "TASK",
            "help": (
                "text-classification, causal-lm, image-classification, or semantic-segmentation; default: found from "
                "the data"
            ),
        },
        "--output_dir": {"metavar": "DIR", "help": "run folder; default: runs/NAME, named after the data"},
        "--recipe": {"metavar": "FILE", "help": "recipe file to write; default: DIR.yaml"},
        "--dry-run": {"action": "store_true", "help": "print the findings and write the recipe, but do not train"},
    },
    processes="all",
)
