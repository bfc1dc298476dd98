"""Write run folders and fingerprints of the installed version, which later versions must still resume.

    PYTHONPATH=CHECKOUT_OF_A_RELEASE python tests/checkpoint/stored_runs/make.py FOLDER

`FOLDER/NAME/` has the checkpoint of step 3 of a run of 6 steps, and `losses.json` its losses without an interruption.
`FOLDER/fingerprints.json` has fingerprints of further recipes. Add a folder for a release. Never write one again.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_train import Recipe, train
from accel_train.checkpoint.fingerprint import identity_origins, run_identity, training_settings
from accel_train.task import TaskData, load_task, read_data
from tests.support.runs import Settings

GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4, "n_positions": 16}
BERT = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
RESNET = {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
SHARED: Settings = {
    "seed": 3,
    "output_dir": "run",
    "batch": {"global_batch_size": 4},
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"max_steps": 6},
    "checkpoint": {"every_steps": 3, "keep": 9},
    "evaluate": {"every_steps": 0},
    "log": {"every_steps": 1, "progress": False},
}
TEXT = {"train": "corpus.txt", "eval_fraction": 0.2, "sequence_length": 16, "cache_dir": "cache"}
SCENES = {"train": "digit-scenes", "image_size": 32, "augment": {"color_jitter": 0.2}}
RUNS: dict[str, Settings] = {
    "gpt": {"task": "causal-lm", "model": {"config": GPT}, "tokenizer": "bytes", "data": TEXT},
    "digits": {
        "task": "image-classification",
        "model": {"config": {**RESNET, "num_channels": 1}},
        "data": {"train": "digits", "image_size": 8, "augment": {"random_resized_crop": [0.7, 1.0]}},
        "optimizer": {"ema_decay": 0.9},
    },
}
"""Recipes that are trained, without the part of `SHARED`."""
FINGERPRINTS: dict[str, Settings] = {
    **RUNS,
    "lora": {
        **RUNS["gpt"],
        "model": {"config": GPT, "lora": {"rank": 2}},
        "optimizer": {"groups": [{"match": ["*bias"], "lr_scale": 0.5}]},
    },
    "bpe": {**RUNS["gpt"], "tokenizer": {"train_bpe": {"vocab_size": 260}}},
    "masked": {
        "task": "masked-lm",
        "model": {"config": BERT},
        "tokenizer": "bytes",
        "data": {**TEXT, "mlm_probability": 0.3},
    },
    "classes": {
        "task": "text-classification",
        "model": {"config": BERT},
        "tokenizer": "bytes",
        "data": {"train": "rows.jsonl", "split_seed": 2, "stratify": True, "eval_fraction": 0.2},
    },
    "scenes": {
        "task": "semantic-segmentation",
        "model": {"config": {"model_type": "upernet", "backbone_config": RESNET}},
        "data": {**SCENES, "crop_size": 24, "ignore_index": 250},
    },
    "boxes": {
        "task": "object-detection",
        "model": {"config": {"model_type": "detr", "backbone_config": RESNET}},
        "data": {**SCENES, "min_visible": 0.2},
    },
}
"""Recipes whose data are read, without the part of `SHARED`."""


def recipe_of(name: str, **sections: Any) -> Recipe:
    """Return a stored recipe with further settings by section."""
    tree: Settings = {}
    for part in (SHARED, FINGERPRINTS[name], sections):
        for section, value in part.items():
            tree[section] = {**tree[section], **value} if isinstance(tree.get(section), dict) else value
    return Recipe(**tree)


def write_data(folder: Path) -> None:
    """Write the training data of the stored runs into a folder."""
    lines = [f"the cat number {i} runs over {i * 7 % 91} hills and sleeps.\n" for i in range(60)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    rows = [{"text": line, "label": "abc"[i % 3]} for i, line in enumerate(lines)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_of(recipe: Recipe) -> TaskData:
    """Return the data of a recipe."""
    task: Any = load_task(recipe.task)
    return read_data(task() if isinstance(task, type) else task, recipe, progress=False)


def fingerprint_of(recipe: Recipe, data: TaskData | None = None) -> Settings:
    """Return the parts of `trainer.json` that a resume compares, as a run of the recipe would store them."""
    sizes: Any = SimpleNamespace(global_batch_size=4, max_steps=6, warmup_steps=0)
    identity = run_identity(recipe, data or data_of(recipe), sizes, sizes)
    settings = training_settings(recipe, {}, {})
    origins = {**settings.origins, **identity_origins(recipe, identity)}
    return {"identity": identity, "settings": settings.values, "origins": origins}


def main(folder: Path) -> None:
    """Write all runs and fingerprints."""
    folder = folder.resolve()
    folder.mkdir()
    for name in RUNS:
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)
            write_data(Path())
            train(recipe_of(name))
            lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
            losses = [line["loss"] for line in lines if line["split"] == "train"]
            # As if it was killed between steps 3 and 6.
            for kept in ("checkpoints/step-00000003", "metrics.jsonl", "events.jsonl", "recipe.resolved.yaml"):
                (shutil.copytree if "step" in kept else shutil.copy)(f"run/{kept}", _made(folder / name / kept))
            (folder / name / "losses.json").write_text(json.dumps(losses) + "\n")
            _forget_machine(folder / name / "events.jsonl")
            os.chdir(folder)
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        write_data(Path())
        found = {name: fingerprint_of(recipe_of(name)) for name in FINGERPRINTS}
        os.chdir(folder)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items())
    (folder / "fingerprints.json").write_text(f"{{\n{lines}\n}}\n")


def _forget_machine(events: Path) -> None:
    """Replace the names of this machine and its folders."""
    neutral = {"command": "make.py FOLDER", "host": "host", "folder": "/run"}
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    kept = [{name: neutral.get(name, value) for name, value in line.items()} for line in lines]
    events.write_text("".join(json.dumps(line) + "\n" for line in kept))


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
