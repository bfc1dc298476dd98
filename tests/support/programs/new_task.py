"""Add a task to the package as a folder and a line, and call what knows tasks: new_task.py FOLDER."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import accel_train.tasks
from accel_train.recipe.tasks import TASKS, TaskSpec
from tests.support.docs_tables import tasks_table

NAME = "mood-of-text"
CONFIG = '''
from dataclasses import replace
from accel_train.recipe.data import Data
from accel_train.tasks.text_classification.config import SPEC as TEXTS
from accel_train.tasks.text_classification.config import TextClassificationData

class MoodData(TextClassificationData):
    """Settings of `data` for moods."""
    mood_setting: int = 3
    """Number of moods."""

SPEC = replace(
    TEXTS,
    data=MoodData,
    learns="name the mood of a text",
    pipeline="mood-detection",
    metrics=("mcc", *TEXTS.metrics),
    where="accel_train.tasks.mood_of_text.task:Mood",
)
'''
TASK = """
from accel_train.tasks.mood_of_text.config import SPEC
from accel_train.tasks.text_classification.task import TextClassification

class Mood(TextClassification):
    spec = SPEC
"""


def called(*words: str) -> dict[str, Any]:
    """Return the exit code of a command, and what it prints."""
    from accel_train.cli.main import main

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = int(str(ended.code or 0))
        except Exception as unexpected:
            return {"code": 1, "text": repr(unexpected)}
    return {"code": code, "text": out.getvalue() + error.getvalue()}


def add_task(folder: Path) -> None:
    package = folder / "mood_of_text"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text(CONFIG)
    (package / "task.py").write_text(TASK)
    accel_train.tasks.__path__.append(str(folder))
    # The line in the table of tasks.
    cast("Any", TASKS)[NAME] = TaskSpec()


def main() -> None:
    os.chdir(sys.argv[1])
    add_task(Path.cwd())
    rows = [{"text": f"text {number} of {number % 2}", "label": "ab"[number % 2]} for number in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bert = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    recipe = {
        "task": NAME, "output_dir": "run", "model": {"config": bert}, "tokenizer": "bytes",
        "data": {"train": "rows.jsonl", "eval_fraction": 0.3, "mood_setting": 4, "num_workers": 0},
        "batch": {"global_batch_size": 4}, "schedule": {"max_steps": 2}, "log": {"progress": False},
    }  # fmt: skip
    Path("r.yaml").write_text(json.dumps(recipe))
    Path("other.yaml").write_text(json.dumps({**recipe, "task": "seq2seq"}))
    commands = {
        "explain": ("explain", "data.mood_setting"),
        "explain of a setting that it uses": ("explain", "loss.class_weights"),
        "setting of another task": ("run", "other.yaml"),
        "help": ("--help",),
        "unknown task": ("run", "r.yaml", "--task", "mood-of-txt"),
        "finetune": ("finetune", "rows.jsonl", "--task", NAME, "--dry-run"),
        "plan": ("plan", "r.yaml"),
        "run": ("run", "r.yaml"),
        "evaluate": ("evaluate", "run"),
        "predict": ("predict", "run", "rows.jsonl", "--out", "predictions.csv"),
        "push": ("push", "run", "me/mood", "--dry-run"),
        "export": ("export", "run", "--out", "exported"),
    }
    found = {name: called(*words) for name, words in commands.items()}
    found["docs"] = {"code": 0, "text": tasks_table()}
    Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
