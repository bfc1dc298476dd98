"""Every mistake a user can make in a recipe, its data or the flags: one line that names it and the remedy, before a
model exists.
"""

import copy
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from accel_train.cli.main import main
from accel_train.parallel import compatibility

GOOD: dict[str, Any] = {
    "output_dir": "out",
    "model": {"config": {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 32}},
    "data": {"train": "text.txt", "eval_fraction": 0, "sequence_length": 16, "cache_dir": "cache"},
    "batch": {"global_batch_size": 4},
    "schedule": {"max_steps": 2},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "log": {"progress": False},
}

LLAMA = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 32}"
)

Edit = Callable[[dict[str, Any]], object]


def setting(name: str, value: Any) -> Edit:
    """An edit that sets one setting, by its dotted name."""

    def edit(recipe: dict[str, Any]) -> None:
        *sections, leaf = name.split(".")
        for section in sections:
            recipe = recipe.setdefault(section, {})
        recipe[leaf] = value

    return edit


def without(section: str, leaf: str) -> Edit:
    return lambda recipe: recipe[section].pop(leaf)


def both(*edits: Edit) -> Edit:
    return lambda recipe: [edit(recipe) for edit in edits]


def free() -> Edit:
    return both(setting("optimizer.name", "schedule_free_adamw"), setting("schedule.type", "constant"))


# What is wrong, and what the one line must say: the name of the thing, and what to do.
RECIPES: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "typo in a section": (setting("optimzer.eps", 1), ("optimzer", "did you mean optimizer?")),
    "typo in a setting": (setting("optimizer.learning_rat", 1), ("r.yaml:", "did you mean optimizer.learning_rate?")),
    "setting in the wrong section": (setting("schedule.learning_rate", 1), ("did you mean optimizer.learning_rate?",)),
    "setting at the top": (setting("learning_rate", 1), ("did you mean optimizer.learning_rate?",)),
    "wrong type": (setting("schedule.max_steps", "many"), ("schedule.max_steps=many", "a whole number")),
    "number in quotes": (
        setting("optimizer.learning_rate", "0.5"),
        ("optimizer.learning_rate='0.5'", "without quotes"),
    ),
    "true for a number": (setting("batch.global_batch_size", True), ("batch.global_batch_size=true", "a whole number")),
    "negative learning rate": (
        setting("optimizer.learning_rate", -1),
        ("optimizer.learning_rate=-1", "greater than 0"),
    ),
    "learning rate 0": (setting("optimizer.learning_rate", 0), ("optimizer.learning_rate=0", "greater than 0")),
    "learning rate NaN": (
        setting("optimizer.learning_rate", float("nan")),
        ("optimizer.learning_rate=.nan", "greater than 0"),
    ),
    "weight decay infinite": (
        setting("optimizer.weight_decay", float("inf")),
        ("optimizer.weight_decay=.inf", "at least 0"),
    ),
    "weight decay NaN": (
        setting("optimizer.weight_decay", float("nan")),
        ("optimizer.weight_decay=.nan", "at least 0"),
    ),
    "learning rate infinite": (
        setting("optimizer.learning_rate", float("inf")),
        ("optimizer.learning_rate=.inf", "greater than 0"),
    ),
    "negative epochs": (setting("schedule", {"num_epochs": -3}), ("schedule.num_epochs=-3", "greater than 0")),
    "no accumulation": (
        setting("batch.gradient_accumulation_steps", 0),
        ("batch.gradient_accumulation_steps=0", "at least 1"),
    ),
    "batch of 0": (setting("batch.per_device_batch_size", 0), ("batch.per_device_batch_size=0", "at least 1")),
    "batch that does not divide": (
        setting("batch", {"global_batch_size": 7, "per_device_batch_size": 2}),
        ("global_batch_size=7", "try 6 or 8"),
    ),
    "batch that contradicts itself": (
        setting("batch", {"global_batch_size": 8, "per_device_batch_size": 2, "gradient_accumulation_steps": 2}),
        ("global_batch_size=8", "set global_batch_size to 4"),
    ),
    "both lengths": (
        setting("schedule.num_epochs", 1),
        ("exactly one of schedule.max_steps and schedule.num_epochs", "r.yaml:"),
    ),
    "no length": (
        setting("schedule", {"type": "cosine"}),
        ("exactly one of schedule.max_steps and schedule.num_epochs",),
    ),
    "both warmups": (
        setting("schedule", {"max_steps": 9, "warmup_steps": 1, "warmup_ratio": 0.1}),
        ("warmup_steps and schedule.warmup_ratio", "not both"),
    ),
    "warmup longer than training": (
        setting("schedule.warmup_steps", 9),
        ("schedule.warmup_steps=9", "Lower warmup_steps"),
    ),
    "warmup longer than the epochs": (
        setting("schedule", {"num_epochs": 1e-9, "warmup_steps": 9}),
        ("schedule.warmup_steps=9", "lower warmup_steps"),
    ),
    "both sources of weights": (
        setting("model.pretrained", "gpt2"),
        ("exactly one of model.pretrained", "model.config"),
    ),
    "no training data": (without("data", "train"), ("data.train is missing", "add `train: python-stdlib`")),
    "unknown task": (setting("task", "causal-llm"), ("causal-llm", "did you mean 'causal-lm'?")),
    "unknown module of a task": (setting("task", "no_such_module:Task"), ("no_such_module:Task", "PYTHONPATH")),
    "unknown model type": (
        setting("model.config.model_type", "gpt22"),
        ("model.config.model_type=gpt22", "did you mean gpt2"),
    ),
    "no model type": (setting("model.config", {"n_layer": 2}), ("model.config needs a model_type",)),
    "unknown field of the model": (setting("model.config.n_layr", 2), ("model.config.n_layr", "did you mean n_layer?")),
    "field of the model of the wrong type": (setting("model.config.n_layer", "two"), ("n_layer", "expected int")),
    "heads that do not divide": (setting("model.config.n_head", 3), ("n_embd=8", "not divisible by n_head=3")),
    "model that is no language model": (setting("model.config", {"model_type": "vit"}), ("vit", "causal")),
    "vocabulary smaller than the tokenizer's": (
        setting("model.config.vocab_size", 100),
        ("model.config.vocab_size=100", "257"),
    ),
    "missing pretrained model": (
        both(without("model", "config"), setting("model.pretrained", "./nowhere")),
        ("model.pretrained", "./nowhere"),
    ),
    "seed that torch does not take": (setting("seed", 2**70), (f"seed={2**70}", f"at most {2**64 - 1}")),
    "negative number of layers": (
        setting("model.config.n_layer", -1),
        ("model.config.n_layer=-1", "must not be negative", "12 by default"),
    ),
    "batch that no data fills": (
        setting("batch.global_batch_size", 10**9),
        (f"batch.global_batch_size={10**9}", "training samples", "lower it to at most"),
    ),
    "unknown optimizer": (
        setting("optimizer.name", "moun"),
        ("optimizer.name=moun", "or module:Class", "did you mean muon?"),
    ),
    "unknown module of an optimizer": (
        setting("optimizer.name", "no_such_module:Lamb"),
        ("no_such_module:Lamb", "PYTHONPATH"),
    ),
    "class that is no optimizer": (
        setting("optimizer.name", "torch.nn:Linear"),
        ("torch.nn:Linear", "derived from torch.optim.Optimizer"),
    ),
    "options that an optimizer refuses": (
        setting("optimizer", {"name": "adafactor", "options": {"beta": 1}}),
        ("adafactor", "'beta'", "correct optimizer.options"),
    ),
    "options for an optimizer without": (
        setting("optimizer", {"name": "lion", "options": {"beta": 1}}),
        ("optimizer.name=lion", "optimizer.options", "Leave them out"),
    ),
    "optimizer that needs a closure": (
        setting("optimizer", {"name": "torch.optim:LBFGS", "weight_decay": 0}),
        ("torch.optim:LBFGS", "LBFGS"),
    ),
    "optimizer without weight decay": (
        setting("optimizer.name", "torch.optim:Rprop"),
        ("torch.optim:Rprop", "set optimizer.weight_decay to 0"),
    ),
    "state that no checkpoint holds": (
        setting("optimizer.name", "tests.support.optimizers:KeepsLists"),
        ("keeps history as a list",),
    ),
    "options that are no mapping": (
        setting("optimizer", {"name": "adafactor", "options": 3}),
        ("optimizer.options=3", "mapping"),
    ),
    "optimizer that is no name": (setting("optimizer.name", 3), ("optimizer.name=3", "or module:Class")),
    "muon under deepspeed": (
        both(setting("optimizer.name", "muon"), setting("parallel", {"strategy": "deepspeed"})),
        ("optimizer.name muon", "adamw, adam, sgd"),
    ),
    "frozen dtype that is none": (
        setting("model.frozen_dtype", "int4"),
        ("model.frozen_dtype=int4", "auto or one of fp32, bf16, nf4"),
    ),
    "frozen dtype, nothing frozen": (
        setting("model.frozen_dtype", "nf4"),
        ("model.frozen_dtype=nf4", "model.lora or model.freeze"),
    ),
    "bf16 weights, fp32 products": (
        both(
            setting("model.lora", {}), setting("model.frozen_dtype", "bf16"), setting("precision.mixed_precision", "no")
        ),
        ("model.frozen_dtype=bf16", "mixed_precision bf16", "to auto"),
    ),
    "4 bits of random weights": (
        both(setting("model.lora", {}), setting("model.frozen_dtype", "nf4")),
        ("model.frozen_dtype=nf4", "needs model.pretrained"),
    ),
    "4 bits under fsdp2": (
        both(setting("model.lora", {}), setting("model.frozen_dtype", "nf4"), setting("parallel.strategy", "fsdp2")),
        ("model.frozen_dtype=nf4", "ddp"),
    ),
    "4 bits under deepspeed": (
        both(
            setting("model.freeze", ["*.wte.*"]),
            setting("model.frozen_dtype", "nf4"),
            setting("parallel.strategy", "deepspeed"),
        ),
        ("model.frozen_dtype=nf4", "deepspeed", "to auto"),
    ),
    "4 bits, compiled": (
        both(setting("model.lora", {}), setting("model.frozen_dtype", "nf4"), setting("precision.compile", True)),
        ("model.frozen_dtype=nf4", "precision.compile"),
    ),
    "8 bits under deepspeed": (
        both(setting("optimizer.name", "adamw_8bit"), setting("parallel", {"strategy": "deepspeed"})),
        ("optimizer.name adamw_8bit", "adamw, adam, sgd"),
    ),
    "options of 8 bits": (
        setting("optimizer", {"name": "adamw_8bit", "options": {"is_paged": True}}),
        ("optimizer.name=adamw_8bit", "optimizer.options", "Leave them out"),
    ),
    "typo in 8 bits": (
        setting("optimizer.name", "adam_8bit"),
        ("optimizer.name=adam_8bit", "did you mean adamw_8bit?"),
    ),
    "schedule-free with a schedule": (
        setting("optimizer.name", "schedule_free_adamw"),
        ("schedule.type=warmup_cosine: schedule_free_adamw has its own warm-up", "set schedule.type to constant"),
    ),
    "schedule-free with two warm-ups": (
        both(free(), setting("schedule.warmup_steps", 2)),
        ("schedule.warmup_steps=2: schedule_free_adamw", "set optimizer.options to {warmup_steps: 2}"),
    ),
    "schedule-free with a warm-up by ratio": (
        both(free(), setting("schedule.warmup_ratio", 0.1)),
        ("schedule.warmup_ratio=0.1", "set optimizer.options to {warmup_steps: N}"),
    ),
    "two averages": (
        both(free(), setting("optimizer.ema_decay", 0.9)),
        ("optimizer.ema_decay=0.9: schedule_free_adamw", "Leave it out"),
    ),
    "schedule-free without a first beta": (
        both(free(), setting("optimizer.betas", [0, 0.9])),
        ("optimizer.betas=[0.0, 0.9]", "Use 0.9"),
    ),
    "warm-up that is no number of steps": (
        both(free(), setting("optimizer.options", {"warmup_steps": -1})),
        ("warmup_steps=-1 is no number of steps", "correct optimizer.options"),
    ),
    "unknown option of schedule-free": (
        both(free(), setting("optimizer.options", {"warmup": 2})),
        ("schedule_free_adamw", "'warmup'", "correct optimizer.options"),
    ),
    "schedule-free under deepspeed": (
        both(free(), setting("parallel", {"strategy": "deepspeed"})),
        ("optimizer.name schedule_free_adamw", "adamw, adam, sgd"),
    ),
    "unknown schedule": (setting("schedule.type", "cosin"), ("schedule.type=cosin", "did you mean cosine?")),
    "fp8 as a setting": (setting("precision.fp8", True), ("precision.fp8", "did you mean precision.mixed_precision?")),
    "unknown precision": (
        setting("precision.mixed_precision", "fp61"),
        ("precision.mixed_precision=fp61", "did you mean fp16?"),
    ),
    "nothing to learn from": (
        both(
            setting("task", "text-classification"),
            without("data", "sequence_length"),
            setting("data.label_column", None),
        ),
        ("data.label_column", "predict"),
    ),
    "unknown encoding": (
        setting("data.encoding", "latin-11"),
        ("data.encoding=latin-11", "unknown encoding", "cp1252"),
    ),
    "delimiter of two characters": (setting("data.delimiter", "::"), ("data.delimiter='::'", "not one character")),
    "unknown tracker": (setting("log.trackers", ["tensorbord"]), ("tensorbord", "tensorboard")),
    "missing file": (setting("data.train", "txt.txt"), ("data.train", "txt.txt", "text.txt")),
    "glob without a match": (setting("data.train", "*.nothing"), ("data.train", "*.nothing", "check")),
    "no file named": (setting("data.train", []), ("data.train", "name a file")),
    "unknown data set": (setting("data.train", "no-such/data-set"), ("data.train", "no-such/data-set")),
    "unknown kind of file": (setting("data.train", "text.xyz"), ("text.xyz", ".jsonl")),
    "missing column": (
        both(setting("data.train", "rows.jsonl"), setting("data.text_column", "txt")),
        ("txt", "text_column"),
    ),
    "file that is not UTF-8": (setting("data.train", "latin.txt"), ("latin.txt", "encoding_errors")),
    "broken line of jsonl": (setting("data.train", "broken.jsonl"), ("broken.jsonl", "line 2")),
    "corpus without text": (setting("data.train", "empty.txt"), ("empty.txt",)),
    "samples longer than the corpus": (
        both(setting("data.sequence_length", 5000), setting("model.config.n_positions", 5000)),
        ("sequence_length=5000",),
    ),
    "samples longer than the model's positions": (
        setting("data.sequence_length", 64),
        ("data.sequence_length=64", "raise model.config.n_positions"),
    ),
    "bad name of a tokenizer": (setting("tokenizer", "no-such/tokenizer"), ("tokenizer", "no-such/tokenizer")),
    "run folder is a file": (setting("output_dir", "text.txt"), ("output_dir=text.txt", "give a folder")),
}

TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "key set twice": (
        "a: 1\noptimizer:\n  eps: 1\n  eps: 2\n",
        ("r.yaml:4", "optimizer.eps is set twice, on lines 3 and 4", "remove one"),
    ),
    "tab": ("model:\n\tconfig: 1\n", ("r.yaml:2:1", "indent with spaces")),
    "bracket that is not closed": ("a: [1, 2\nb: 3\n", ("r.yaml:2", "'b: 3'")),
    "list": ("- a\n- b\n", ("r.yaml", "not a mapping")),
    "pattern without quotes": (
        "model:\n  freeze: [*embedder*]\n",
        ("r.yaml:2", "put quotes around a pattern", "'*name*'"),
    ),
    "word": ("hello\n", ("r.yaml", "not a mapping")),
    "empty": ("", ("r.yaml is empty", "output_dir:")),
    "only comments": ("# nothing\n", ("r.yaml is empty",)),
    "object of Python": ("a: !!python/object/apply:os.system [ls]\n", ("r.yaml:1", "plain values only")),
}

FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no hyphens": (
        ("run", "r.yaml", "optimizer.learning_rate=1e-3"),
        ("optimizer.learning_rate=1e-3: settings begin with two hyphens. Write --optimizer.learning_rate 1e-3",),
    ),
    "no hyphens before the recipe": (("plan", "log.every_steps=a b", "r.yaml"), ("Write --log.every_steps 'a b'",)),
    "no hyphens in place of data": (
        ("evaluate", "run", "seed=1"),
        ("seed=1: settings begin with two hyphens. Write --seed 1",),
    ),
    "two sets of data": (
        ("evaluate", "run", "a.csv", "--data", "b.csv"),
        ("DATA a.csv and --data b.csv differ",),
    ),
    "unknown": (("run", "r.yaml", "--zzz", "1"), ("unknown flag --zzz", "a recipe has task")),
    "typo": (("run", "r.yaml", "--optimizer.learning_rat", "1"), ("did you mean --optimizer.learning_rate?",)),
    "abbreviated": (
        ("run", "r.yaml", "--optimizer.learn", "1"),
        ("unknown flag --optimizer.learn", "--optimizer.learning_rate?"),
    ),
    "without its section": (("run", "r.yaml", "--learning_rate", "1"), ("did you mean --optimizer.learning_rate?",)),
    "without a value": (("run", "r.yaml", "--seed"), ("--seed needs a value",)),
    "followed by a flag": (("run", "r.yaml", "--seed", "--optimizer.eps", "1"), ("--seed needs a value",)),
    "of the wrong type": (("run", "r.yaml", "--seed", "x"), ("seed=x (--seed)", "a whole number")),
    "NaN": (
        ("run", "r.yaml", "--optimizer.learning_rate", ".nan"),
        ("optimizer.learning_rate=.nan (--optimizer.learning_rate)",),
    ),
    "section": (("run", "r.yaml", "--optimizer", "adamw"), ("optimizer=adamw (--optimizer)", "a mapping of name")),
    "contradiction": (
        ("run", "r.yaml", "--model.pretrained", "x", "--model.config", "{model_type: gpt2}"),
        ("exactly one of model.pretrained",),
    ),
    "of the command, mistyped": (("plan", "r.yaml", "--world-siz", "2"), ("did you mean --world-size?",)),
    "world size of 0": (("plan", "r.yaml", "--world-size", "0"), ("--world-size=0", "at least 1")),
    "world size that is no number": (("plan", "r.yaml", "--world-size", "two"), ("--world-size", "'two'")),
    "one argument too many": (("run", "r.yaml", "s.yaml"), ("s.yaml",)),
    "no recipe": (("run",), ("RECIPE", "accel-train run --help")),
    "missing recipe": (("run", "s.yaml"), ("s.yaml: no such recipe file", "did you mean r.yaml?")),
    "folder for a recipe": (("run", "."), (". is a folder", "it holds r.yaml")),
    "unknown command": (("rnu", "r.yaml"), ("unknown command 'rnu'", "did you mean run?")),
    "command of another trainer": (("train", "r.yaml"), ("unknown command 'train'", "did you mean run?")),
    "flag without a command": (("--seed",), ("--seed", "needs a command")),
    "verify without a run": (("verify", "nowhere"), ("nowhere", "output_dir")),
    "report without a run": (("report", "nowhere"), ("nowhere", "output_dir")),
    "generate without a run": (("generate", "nowhere"), ("nowhere does not exist", "output_dir")),
    "generate before the end": (("generate", "."), ("no trained model yet", "finished run")),
    "generate nothing": (("generate", ".", "--max-new-tokens", "0"), ("max_new_tokens=0", "at least 1")),
    "negative temperature": (("generate", ".", "--temperature", "-1"), ("temperature=-1", "at least 0")),
}


BERT = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}
TABLE = "text,label\n" + "".join(f"words {number},{number % 3}\n" for number in range(30))
JSONL = "".join(f'{{"text": "words {number}", "label": "{"abc"[number % 3]}"}}\n' for number in range(30))
NAMES = {"label_names": ["a", "b", "c"]}

# A table for text classification: its file, its content, settings of `data`, and what the one line must say.
TABLES: dict[str, tuple[str, str | bytes, dict[str, Any], tuple[str, ...]]] = {
    "column that is missing": ("t.csv", TABLE.replace("text,", "txt,"), {}, ("t.csv:1", "'text'", "txt, label")),
    "no header": (
        "t.csv",
        TABLE.partition("\n")[2],
        {},
        ("t.csv:1", "no column 'text'", "words 0, 0", "first line of the file must hold the names"),
    ),
    "another delimiter than named": ("t.csv", TABLE, {"delimiter": ";"}, ("t.csv:1", "no column 'text'", "text,label")),
    "header without rows": ("t.csv", "text,label\n", {}, ("t.csv", "no rows")),
    "file of 0 bytes": ("t.jsonl", "", {}, ("t.jsonl", "no rows")),
    "column twice": ("t.csv", "text,text,label\na,b,1\n", {}, ("t.csv:1", "'text' is there 2 times")),
    "label out of range": ("t.csv", TABLE.replace("words 7,1", "words 7,9"), NAMES, ("t.csv:9", "'label'", "0 to 2")),
    "negative label": ("t.csv", TABLE.replace("words 7,1", "words 7,-1"), NAMES, ("t.csv:9", "'label'", '"-1"')),
    "label that is no integer": (
        "t.jsonl",
        JSONL.replace('"words 7", "label": "b"', '"w", "label": 1.5'),
        {},
        ("t.jsonl:8", "1.5"),
    ),
    "label of another type": (
        "t.csv",
        TABLE,
        {**NAMES, "label_names": ["x", "y", "z"], "train": "s.jsonl"},
        ("s.jsonl:1", "(x, y, z)"),
    ),
    "row without a label": ("t.csv", TABLE.replace("words 7,1", "words 7,"), {}, ("t.csv:9", "'label'", "no label")),
    "one class": ("t.csv", "text,label\na,1\nb,1\n", {}, ("every row has the same label",)),
    "field too many": ("t.csv", TABLE.replace("words 7,1", "words 7,1,1"), {}, ("t.csv:9", "3 fields")),
    "field too few": ("t.csv", TABLE.replace("words 7,1", "words 7"), {}, ("t.csv:9", "1 fields")),
    "quote that does not close": ("t.csv", TABLE.replace("words 7", '"words 7'), {}, ("t.csv:", "quotes")),
    "NUL": ("t.csv", TABLE.replace("words 7", "words \0"), {}, ("t.csv", "line 9", "0x00", "encoding_errors")),
    "Latin-1": (
        "t.csv",
        TABLE.replace("words 7", "wörds").encode("latin-1"),
        {},
        ("t.csv", "line 9", "0xf6", "data.encoding (latin-1, say)"),
    ),
    "UTF-16 without its mark": ("t.csv", TABLE.encode("utf-16-le"), {}, ("t.csv", "0x00", "binary")),
    "another encoding than named": (
        "t.csv",
        TABLE.encode(),
        {"encoding": "utf-16"},
        ("t.csv", "is not utf-16", "another data.encoding"),
    ),
    "line without a label": (
        "t.txt",
        "__label__a good\nbad\n",
        {"lines": "fasttext"},
        ("t.txt:2", "no label", "__label__LABEL TEXT"),
    ),
    "lone surrogate": ("t.jsonl", JSONL.replace("words 7", "\\ud800"), {}, ("t.jsonl:8", "surrogate")),
    "object that is cut off": ("t.jsonl", JSONL[:-12], {}, ("t.jsonl:30", "not JSON")),
    "line that is a list": (
        "t.jsonl",
        JSONL.replace('{"text": "words 7", "label": "b"}', "[1]"),
        {},
        ("t.jsonl:8", "not an object", "[1]"),
    ),
    "text that is null": ("t.jsonl", JSONL.replace('"words 7"', "null"), {}, ("t.jsonl:8", "'text'", "null")),
    "text that is a number": ("t.jsonl", JSONL.replace('"words 7"', "5"), {}, ("t.jsonl:8", "'text'", "5")),
    "row without the column": (
        "t.jsonl",
        JSONL.replace('"text": "words 7"', '"txt": "w"'),
        {},
        ("t.jsonl:8", "'text'", "'txt'"),
    ),
    "parquet that is none": ("t.parquet", "PAR1", {}, ("t.parquet", "not a parquet file")),
    "evaluation data that is missing": ("t.csv", TABLE, {"eval": "other.csv"}, ("data.eval", "other.csv")),
    "evaluation label that is new": ("t.csv", TABLE, {"eval": "s.jsonl"}, ("s.jsonl:1", '"a"', "label")),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe and data of every kind of badness; building a model in it is a failure."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCEL_TRAIN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    Path("r.yaml").write_text(yaml.safe_dump(GOOD))
    Path("text.txt").write_text("one two three " * 40)
    Path("text.xyz").write_text("text")
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes("schön".encode("latin-1") * 20)
    Path("rows.jsonl").write_text('{"text": "a"}\n' * 9)
    Path("s.jsonl").write_text(JSONL)
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return tmp_path


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Building a model is noted, by the name of its builder."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    built: list[str] = []

    def note(model_class: Any, name: str) -> Callable[..., Any]:
        original = getattr(model_class, name)

        def build(*args: Any, **kwargs: Any) -> Any:
            # The probe builds a toy.
            if not any(frame.filename.endswith("probe.py") for frame in traceback.extract_stack()):
                built.append(name)
            return original(*args, **kwargs)

        return build

    for model_class in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        for name in ("from_config", "from_pretrained"):
            monkeypatch.setattr(model_class, name, note(model_class, name))
    return built


def assert_one_line(arguments: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    code = main(arguments)
    assert time.process_time() - began < 5, "a mistake is found within 5 seconds"
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert code == 2, captured.err
    assert len(lines) == 1, captured.err
    assert all(text in lines[0] for text in said), lines[0]
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe_is_one_line(name: str, no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    edit, said = RECIPES[name]
    recipe = copy.deepcopy(GOOD)
    edit(recipe)
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    assert_one_line(["run", "r.yaml"], said, capsys)
    assert no_model == []


@pytest.mark.parametrize("name", TABLES)
def test_a_bad_table_is_one_line(name: str, no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file, content, settings, said = TABLES[name]
    Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe = copy.deepcopy(GOOD)
    columns = {"label_column": "label", "eval_fraction": 0.2}
    del recipe["data"]["sequence_length"]
    recipe |= {"task": "text-classification", "model": {"config": BERT}}
    recipe["data"] |= {"train": file, **columns, **settings}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    assert_one_line(["run", "r.yaml"], said, capsys)
    assert no_model == []


def test_a_missing_column_of_images_names_the_setting_that_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("file,label\na.png,x\n")
    recipe = {**GOOD, "task": "image-classification", "model": {"config": {"model_type": "resnet"}}}
    Path("r.yaml").write_text(yaml.safe_dump({**recipe, "data": {"train": "t.csv"}}))
    assert_one_line(["plan", "r.yaml"], ("t.csv:1: no column 'image'", "(data.image_column names"), capsys)


def test_a_csv_file_of_tabs_is_read_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text(TABLE.replace(",", "\t"))
    recipe = {**GOOD, "task": "text-classification", "model": {"config": BERT}, "data": {"train": "t.csv"}}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["plan", "r.yaml"]) == 0
    assert "separated by tabs" in capsys.readouterr().out


def test_at_least_60_mistakes_are_tried() -> None:
    assert len(RECIPES) + len(TEXTS) + len(FLAGS) + len(TABLES) >= 60


@pytest.mark.parametrize("name", TEXTS)
def test_bad_yaml_is_one_line(name: str, no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text, said = TEXTS[name]
    Path("r.yaml").write_text(text)
    assert_one_line(["run", "r.yaml"], said, capsys)
    assert no_model == []


@pytest.mark.parametrize("name", FLAGS)
def test_a_bad_flag_is_one_line(name: str, no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = FLAGS[name]
    assert_one_line(list(arguments), said, capsys)
    assert no_model == []


def loop(folder: Path) -> Path:
    """A folder with three links to itself, which a walk that follows links never leaves."""
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.txt").write_text("one two three " * 40)
    for name in ("x", "y", "z"):
        (folder / "inner" / name).symlink_to("..")
    return folder


def bomb() -> str:
    """Nine levels of nine aliases: 400 million values in ten lines."""
    levels = ("".join(f"*{chr(96 + level)}, " * 9) for level in range(1, 10))
    return "a: &a [x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{items}]\n" for n, items in enumerate(levels))


# What a program waits for, or reads, without end: how it comes about, the recipe's file, its data, what the line says.
ENDLESS: dict[str, tuple[Callable[[], object], str, str, str]] = {
    "pipe as text": (lambda: os.mkfifo("p.txt"), "r.yaml", "p.txt", "p.txt is not a regular file"),
    "pipe as tokens": (lambda: os.mkfifo("p.bin"), "r.yaml", "p.bin", "p.bin is not a regular file"),
    "link to a device": (lambda: os.symlink("/dev/zero", "z.txt"), "r.yaml", "z.txt", "z.txt is not a regular file"),
    "folders in a circle": (lambda: loop(Path("texts")), "r.yaml", "texts/**/*.txt", "inner/x links to"),
    "pipe as recipe": (lambda: os.mkfifo("p.yaml"), "p.yaml", "text.txt", "p.yaml is a pipe"),
    "device as recipe": (
        lambda: None,
        "/dev/zero",
        "text.txt",
        "/dev/zero is not a recipe: it has more than 1,048,576 bytes",
    ),
    "aliases of aliases": (lambda: Path("b.yaml").write_text(bomb()), "b.yaml", "text.txt", "b.yaml: aliases"),
}


@pytest.fixture
def has_an_end() -> Iterator[None]:
    """Fails what waits or reads for long; alone nothing here takes more than 6 seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError("it waits, or reads, without end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)  # of a busy machine
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_refused(
    name: str, has_an_end: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accel_train.recipe.loader._WAIT_SECONDS", 0.1)
    make, recipe, data, said = ENDLESS[name]
    make()
    assert_one_line(["plan", recipe, "--data.train", data], (said,), capsys)


@pytest.mark.parametrize("place", ["pipe", "folders in a circle", "array"])
def test_images_that_have_no_end_are_refused(place: str, has_an_end: None, capsys: pytest.CaptureFixture[str]) -> None:
    for label in "ab":
        Path("images", label).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(f"images/{label}/0.png")
    if place == "folders in a circle":
        loop(Path("images/a"))
    else:
        os.mkfifo("images/a/p.png" if place == "pipe" else "images/p.npz")
    recipe = {**GOOD, "task": "image-classification", "model": {"config": {"model_type": "resnet"}}}
    recipe["data"] = {"train": "images/p.npz" if place == "array" else "images"}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    said = "links to" if place == "folders in a circle" else "is not a regular file"
    assert_one_line(["plan", "r.yaml"], (said,), capsys)


def test_a_recipe_is_read_from_a_pipe_that_somebody_writes_into(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("p.yaml")
    text = Path("r.yaml").read_text()
    writer = threading.Thread(target=lambda: Path("p.yaml").write_text(text))
    writer.start()
    assert main(["plan", "p.yaml", "--data.train", "gone.txt"]) == 2
    writer.join()
    assert "gone.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "said"),
    [("fp16", ("CUDA", "auto, bf16 or no")), ("fp8", ("H100 and later)", "cpu", "bf16 or auto"))],
)
def test_precision_that_a_cpu_does_not_have_is_one_line(
    no_model: list[str], capsys: pytest.CaptureFixture[str], without_cuda: None, precision: str, said: tuple[str, ...]
) -> None:
    flags = ["--model.config", LLAMA, "--precision.mixed_precision", precision]
    assert_one_line(["run", "r.yaml", *flags], (f"precision.mixed_precision={precision}", *said), capsys)
    assert no_model == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.lora.rank", "4"], ("with model.lora", "bf16")),
        (["--parallel.strategy", "fsdp2", "--parallel.tp_size", "2"], ("parallel.tp_size", "one of them")),
        (["--parallel.sp_size", "2"], ("parallel.sp_size", "one of them")),
        (["--parallel.strategy", "deepspeed"], ("deepspeed", "bf16, or parallel.strategy fsdp2 or ddp")),
        (["--parallel.strategy", "fsdp2", "--parallel.cpu_offload", "true"], ("cpu_offload", "one of them")),
        (["--model.config", "{model_type: gpt2}"], ("gpt2", "Conv1D", "bf16, or another")),
    ],
    ids=["lora", "tp", "sp", "zero", "offload", "conv1d"],
)
def test_fp8_with_what_it_does_not_go_with_is_one_line(
    no_model: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], said: tuple[str, ...]
) -> None:
    words = ["run", "r.yaml", "--model.config", LLAMA, "--precision.mixed_precision", "fp8", *flags]
    assert_one_line(words, ("precision.mixed_precision=fp8", *said), capsys)
    assert no_model == []


def test_fp8_on_a_planned_gpu_without_it_is_one_line(no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "r.yaml", "--model.config", LLAMA, "--precision.mixed_precision", "fp8", "--gpu", "A100"]
    assert_one_line(words, ("precision.mixed_precision=fp8 needs", "A100", "bf16 or auto"), capsys)


def test_fp8_without_torchao_says_how_to_get_it(
    no_model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "_is_installed", lambda name: name != "torchao")
    words = ["run", "r.yaml", "--model.config", LLAMA, "--precision.mixed_precision", "fp8"]
    assert_one_line(words, ("needs the package torchao", "pip install 'accel-train[quantize]'"), capsys)
    assert no_model == []


@pytest.mark.parametrize("name", ["missing file", "samples longer than the model's positions", "unknown tracker"])
def test_plan_refuses_what_run_refuses(name: str, no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    edit, said = RECIPES[name]
    recipe = copy.deepcopy(GOOD)
    edit(recipe)
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    assert_one_line(["plan", "r.yaml"], said, capsys)
    assert no_model == []


def test_several_problems_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text(yaml.safe_dump({**GOOD, "optimzer": {}, "sed": 1}))
    assert main(["run", "r.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        "error: unknown setting optimzer",
        "error: unknown setting sed",
    ]


def test_the_good_recipe_is_good(no_model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "r.yaml"]) == 0
    assert no_model == ["from_config"]
    assert "Memory of each" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "find-lr r.yaml --steps N", "find-lr r.yaml --min F", "plan r.yaml --world-size N", "plan r.yaml --mfu F",
        "plan r.yaml --mtbf F",
        "rehearse r.yaml --steps N", "generate run --max-new-tokens N", "generate run --temperature F",
        "generate run --seed N", "report run --port N", "watch run --every F", "sweep r.yaml --random N",
    ],
)  # fmt: skip
def test_a_number_on_the_command_line_that_nothing_can_use_is_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("nan", "inf", "1e400") if words.endswith("F") else ("100000000000000000000", "1" * 5000):
        assert main([*words.split()[:-1], number]) == 2
        assert capsys.readouterr().err.count("\n") == 1
