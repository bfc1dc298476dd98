"""Every mistake a user can make in a recipe, its data or the flags: one line that names it and the remedy, before a
model exists.
"""

import copy
import os
import shlex
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from accel_train.parallel import compatibility
from tests.support.commands import call, error_line
from tests.support.runs import write_yaml
from tests.support.wording import assert_golden, assert_wording, read_wording

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

FREE = {"optimizer.name": "schedule_free_adamw", "schedule.type": "constant"}
FOUR_BITS = {"model.lora": {}, "model.frozen_dtype": "nf4"}
ZERO = {"parallel.strategy": "deepspeed"}
GONE = object()
"""In place of a value: the setting is taken out."""

# A mistake in a recipe. wording/recipe.txt has its error line.
RECIPES: dict[str, dict[str, Any]] = {
    "typo in a section": {"optimzer.eps": 1},
    "typo in a setting": {"optimizer.learning_rat": 1},
    "setting in the wrong section": {"schedule.learning_rate": 1},
    "setting at the top": {"learning_rate": 1},
    "wrong type": {"schedule.max_steps": "many"},
    "number in quotes": {"optimizer.learning_rate": "0.5"},
    "true for a number": {"batch.global_batch_size": True},
    "negative learning rate": {"optimizer.learning_rate": -1},
    "learning rate 0": {"optimizer.learning_rate": 0},
    "learning rate NaN": {"optimizer.learning_rate": float("nan")},
    "weight decay infinite": {"optimizer.weight_decay": float("inf")},
    "weight decay NaN": {"optimizer.weight_decay": float("nan")},
    "learning rate infinite": {"optimizer.learning_rate": float("inf")},
    "negative epochs": {"schedule": {"num_epochs": -3}},
    "no accumulation": {"batch.gradient_accumulation_steps": 0},
    "batch of 0": {"batch.per_device_batch_size": 0},
    "batch that does not divide": {"batch": {"global_batch_size": 7, "per_device_batch_size": 2}},
    "batch that contradicts itself": {
        "batch": {"global_batch_size": 8, "per_device_batch_size": 2, "gradient_accumulation_steps": 2}
    },
    "both lengths": {"schedule.num_epochs": 1},
    "no length": {"schedule": {"type": "cosine"}},
    "both warmups": {"schedule": {"max_steps": 9, "warmup_steps": 1, "warmup_ratio": 0.1}},
    "warmup longer than training": {"schedule.warmup_steps": 9},
    "warmup longer than the epochs": {"schedule": {"num_epochs": 1e-9, "warmup_steps": 9}},
    "both sources of weights": {"model.pretrained": "gpt2"},
    "no training data": {"data.train": GONE},
    "unknown task": {"task": "causal-llm"},
    "unknown module of a task": {"task": "no_such_module:Task"},
    "unknown model type": {"model.config.model_type": "gpt22"},
    "no model type": {"model.config": {"n_layer": 2}},
    "unknown field of the model": {"model.config.n_layr": 2},
    "field of the model of the wrong type": {"model.config.n_layer": "two"},
    "heads that do not divide": {"model.config.n_head": 3},
    "model that is no language model": {"model.config": {"model_type": "vit"}},
    "vocabulary smaller than the tokenizer's": {"model.config.vocab_size": 100},
    "missing pretrained model": {"model.config": GONE, "model.pretrained": "./nowhere"},
    "seed that torch does not take": {"seed": 2**70},
    "negative number of layers": {"model.config.n_layer": -1},
    "batch that no data fills": {"batch.global_batch_size": 10**9},
    "unknown optimizer": {"optimizer.name": "moun"},
    "unknown module of an optimizer": {"optimizer.name": "no_such_module:Lamb"},
    "class that is no optimizer": {"optimizer.name": "torch.nn:Linear"},
    "options that an optimizer refuses": {"optimizer.name": "adafactor", "optimizer.options": {"beta": 1}},
    "options for an optimizer without": {"optimizer.name": "lion", "optimizer.options": {"beta": 1}},
    "optimizer that needs a closure": {"optimizer.name": "torch.optim:LBFGS", "optimizer.weight_decay": 0},
    "optimizer without weight decay": {"optimizer.name": "torch.optim:Rprop"},
    "state that no checkpoint holds": {"optimizer.name": "tests.support.optimizers:KeepsLists"},
    "options that are no mapping": {"optimizer.name": "adafactor", "optimizer.options": 3},
    "optimizer that is no name": {"optimizer.name": 3},
    "muon under deepspeed": {"optimizer.name": "muon", **ZERO},
    "unknown frozen dtype": {"model.frozen_dtype": "int4"},
    "frozen dtype, nothing frozen": {"model.frozen_dtype": "nf4"},
    "bf16 weights, fp32 products": {"model.lora": {}, "model.frozen_dtype": "bf16", "precision.mixed_precision": "no"},
    "4 bits of random weights": FOUR_BITS,
    "4 bits in host memory": {**FOUR_BITS, "parallel": {"strategy": "fsdp2", "cpu_offload": True}},
    "4 bits in slices of sequences": {**FOUR_BITS, "parallel": {"strategy": "fsdp2", "sp_size": 2}},
    "4 bits under deepspeed": {"model.freeze": ["*.wte.*"], "model.frozen_dtype": "nf4", **ZERO},
    "4 bits, compiled": {**FOUR_BITS, "precision.compile": True},
    "8 bits under deepspeed": {"optimizer.name": "adamw_8bit", **ZERO},
    "options of 8 bits": {"optimizer.name": "adamw_8bit", "optimizer.options": {"is_paged": True}},
    "typo in 8 bits": {"optimizer.name": "adam_8bit"},
    "schedule-free with a schedule": {"optimizer.name": "schedule_free_adamw"},
    "schedule-free with two warm-ups": {**FREE, "schedule.warmup_steps": 2},
    "schedule-free with a warm-up by ratio": {**FREE, "schedule.warmup_ratio": 0.1},
    "two averages": {**FREE, "optimizer.ema_decay": 0.9},
    "schedule-free without a first beta": {**FREE, "optimizer.betas": [0, 0.9]},
    "warm-up that is no number of steps": {**FREE, "optimizer.options": {"warmup_steps": -1}},
    "unknown option of schedule-free": {**FREE, "optimizer.options": {"warmup": 2}},
    "schedule-free under deepspeed": {**FREE, **ZERO},
    "unknown schedule": {"schedule.type": "cosin"},
    "fp8 as a setting": {"precision.fp8": True},
    "unknown precision": {"precision.mixed_precision": "fp61"},
    "nothing to learn from": {"task": "text-classification", "data.sequence_length": GONE, "data.label_column": None},
    "unknown encoding": {"data.encoding": "latin-11"},
    "delimiter of two characters": {"data.delimiter": "::"},
    "unknown tracker": {"log.trackers": ["tensorbord"]},
    "missing file": {"data.train": "txt.txt"},
    "glob without a match": {"data.train": "*.nothing"},
    "no file named": {"data.train": []},
    "unknown data set": {"data.train": "no-such/data-set"},
    "unknown kind of file": {"data.train": "text.xyz"},
    "missing column": {"data.train": "rows.jsonl", "data.text_column": "txt"},
    "file that is not UTF-8": {"data.train": "latin.txt"},
    "broken line of jsonl": {"data.train": "broken.jsonl"},
    "corpus without text": {"data.train": "empty.txt"},
    "samples longer than the corpus": {"data.sequence_length": 5000, "model.config.n_positions": 5000},
    "samples longer than the model's positions": {"data.sequence_length": 64},
    "bad name of a tokenizer": {"tokenizer": "no-such/tokenizer"},
    "run folder is a file": {"output_dir": "text.txt"},
}

# A mistake in a recipe's YAML. wording/yaml.txt has its error line.
TEXTS: dict[str, str] = {
    "key set twice": "a: 1\noptimizer:\n  eps: 1\n  eps: 2\n",
    "tab": "model:\n\tconfig: 1\n",
    "bracket that is not closed": "a: [1, 2\nb: 3\n",
    "list": "- a\n- b\n",
    "pattern without quotes": "model:\n  freeze: [*embedder*]\n",
    "word": "hello\n",
    "empty": "",
    "only comments": "# nothing\n",
    "line without a colon": "task causal-lm\noutput_dir: runs/x\n",
    "line that is indented too deep": "task: causal-lm\n output_dir: runs/x\n",
    "task that does not exist, and nothing else": "task: causal-llm\n",
    "object of Python": "a: !!python/object/apply:os.system [ls]\n",
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

# A table for text classification: its file, its content, and settings of `data`. wording/table.txt has its error line.
TABLES: dict[str, tuple[str, str | bytes, dict[str, Any]]] = {
    "column that is missing": ("t.csv", TABLE.replace("text,", "txt,"), {}),
    "no header": ("t.csv", TABLE.partition("\n")[2], {}),
    "another delimiter than named": ("t.csv", TABLE, {"delimiter": ";"}),
    "header without rows": ("t.csv", "text,label\n", {}),
    "file of 0 bytes": ("t.jsonl", "", {}),
    "column twice": ("t.csv", "text,text,label\na,b,1\n", {}),
    "label out of range": ("t.csv", TABLE.replace("words 7,1", "words 7,9"), NAMES),
    "negative label": ("t.csv", TABLE.replace("words 7,1", "words 7,-1"), NAMES),
    "label that is no integer": ("t.jsonl", JSONL.replace('"words 7", "label": "b"', '"w", "label": 1.5'), {}),
    "label of another type": ("t.csv", TABLE, {**NAMES, "label_names": ["x", "y", "z"], "train": "s.jsonl"}),
    "row without a label": ("t.csv", TABLE.replace("words 7,1", "words 7,"), {}),
    "one class": ("t.csv", "text,label\na,1\nb,1\n", {}),
    "field too many": ("t.csv", TABLE.replace("words 7,1", "words 7,1,1"), {}),
    "field too few": ("t.csv", TABLE.replace("words 7,1", "words 7"), {}),
    "quote that does not close": ("t.csv", TABLE.replace("words 7", '"words 7'), {}),
    "NUL": ("t.csv", TABLE.replace("words 7", "words \0"), {}),
    "Latin-1": ("t.csv", TABLE.replace("words 7", "wörds").encode("latin-1"), {}),
    "UTF-16 without its mark": ("t.csv", TABLE.encode("utf-16-le"), {}),
    "another encoding than named": ("t.csv", TABLE.encode(), {"encoding": "utf-16"}),
    "line without a label": ("t.txt", "__label__a good\nbad\n", {"lines": "fasttext"}),
    "lone surrogate": ("t.jsonl", JSONL.replace("words 7", "\\ud800"), {}),
    "object that is cut off": ("t.jsonl", JSONL[:-12], {}),
    "line that is a list": ("t.jsonl", JSONL.replace('{"text": "words 7", "label": "b"}', "[1]"), {}),
    "text that is null": ("t.jsonl", JSONL.replace('"words 7"', "null"), {}),
    "text that is a number": ("t.jsonl", JSONL.replace('"words 7"', "5"), {}),
    "row without the column": ("t.jsonl", JSONL.replace('"text": "words 7"', '"txt": "w"'), {}),
    "text named parquet": ("t.parquet", "PAR1", {}),
    "evaluation data that is missing": ("t.csv", TABLE, {"eval": "other.csv"}),
    "evaluation label that is new": ("t.csv", TABLE, {"eval": "s.jsonl"}),
}


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> Path:
    """A folder with a good recipe and data of every kind of badness; building a model in it is a failure."""
    write_yaml("r.yaml", GOOD)
    Path("text.txt").write_text("one two three " * 40)
    Path("text.xyz").write_text("text")
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes("schön".encode("latin-1") * 20)
    Path("rows.jsonl").write_text('{"text": "a"}\n' * 9)
    Path("s.jsonl").write_text(JSONL)
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return empty_folder


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


def assert_refused(words: Sequence[str], file: str, heading: str) -> None:
    """Assert exit code 2 and one error line, whose wording is the golden file's."""
    began = time.process_time()
    line = error_line(*words)
    assert time.process_time() - began < 5, "a mistake is found within 5 seconds"
    assert_wording(file, heading, line)


def changed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the good recipe with other settings, by their dotted names."""
    recipe = copy.deepcopy(GOOD)
    for name, value in settings.items():
        *sections, leaf = name.split(".")
        section = recipe
        for each in sections:
            section = section.setdefault(each, {})
        section[leaf] = value
        if value is GONE:
            del section[leaf]
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe_is_one_line(name: str, no_model: list[str]) -> None:
    write_yaml("r.yaml", changed(RECIPES[name]))
    assert_refused(["run", "r.yaml"], "recipe", name)
    assert no_model == []


@pytest.mark.parametrize("name", TABLES)
def test_a_bad_table_is_one_line(name: str, no_model: list[str]) -> None:
    file, content, settings = TABLES[name]
    Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    data = {"train": file, "label_column": "label", "eval_fraction": 0.2, "cache_dir": "cache", **settings}
    write_recipe_of("text-classification", BERT, **data)
    assert_refused(["run", "r.yaml"], "table", name)
    assert no_model == []


def write_recipe_of(task: str, model: dict[str, Any], **data: Any) -> None:
    """Write the good recipe for another task, with its model and its whole section `data`."""
    write_yaml("r.yaml", {**GOOD, "task": task, "model": {"config": model}, "data": data})


RESNET = {"model_type": "resnet"}


def test_a_missing_column_of_images_names_the_setting_that_says_which() -> None:
    Path("t.csv").write_text("file,label\na.png,x\n")
    write_recipe_of("image-classification", RESNET, train="t.csv")
    assert_refused(["plan", "r.yaml"], "table", "column of images that is missing")


def test_a_csv_file_of_tabs_is_read_and_it_is_said() -> None:
    Path("t.csv").write_text(TABLE.replace(",", "\t"))
    write_recipe_of("text-classification", BERT, train="t.csv")
    call("plan", "r.yaml", named="separated by tabs")


@pytest.mark.parametrize("name", TEXTS)
def test_bad_yaml_is_one_line(name: str, no_model: list[str]) -> None:
    Path("r.yaml").write_text(TEXTS[name])
    assert_refused(["run", "r.yaml"], "yaml", name)
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


# An endless read: how it comes about, the recipe's file, and its data. wording/endless.txt has its error line.
ENDLESS: dict[str, tuple[Callable[[], object], str, str]] = {
    "pipe as text": (lambda: os.mkfifo("p.txt"), "r.yaml", "p.txt"),
    "pipe as tokens": (lambda: os.mkfifo("p.bin"), "r.yaml", "p.bin"),
    "link to a device": (lambda: os.symlink("/dev/zero", "z.txt"), "r.yaml", "z.txt"),
    "folders in a circle": (lambda: loop(Path("texts")), "r.yaml", "texts/**/*.txt"),
    "pipe as recipe": (lambda: os.mkfifo("p.yaml"), "p.yaml", "text.txt"),
    "device as recipe": (lambda: None, "/dev/zero", "text.txt"),
    "aliases of aliases": (lambda: Path("b.yaml").write_text(bomb()), "b.yaml", "text.txt"),
}


PLACES = ("pipe", "folders in a circle", "array")


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
def test_what_has_no_end_is_refused(name: str, has_an_end: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.recipe.loader._WAIT_SECONDS", 0.1)
    make, recipe, data = ENDLESS[name]
    make()
    assert_refused(["plan", recipe, "--data.train", data], "endless", name)


@pytest.mark.parametrize("place", PLACES)
def test_images_that_have_no_end_are_refused(place: str, has_an_end: None) -> None:
    for label in "ab":
        Path("images", label).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(f"images/{label}/0.png")
    if place == "folders in a circle":
        loop(Path("images/a"))
    else:
        os.mkfifo("images/a/p.png" if place == "pipe" else "images/p.npz")
    write_recipe_of("image-classification", RESNET, train="images/p.npz" if place == "array" else "images")
    assert_refused(["plan", "r.yaml"], "endless", f"images: {place}")


def test_a_recipe_is_read_from_a_pipe_that_somebody_writes_into() -> None:
    os.mkfifo("p.yaml")
    text = Path("r.yaml").read_text()
    writer = threading.Thread(target=lambda: Path("p.yaml").write_text(text))
    writer.start()
    call("plan", "p.yaml", "--data.train", "gone.txt", code=2, named="gone.txt")
    writer.join()


# Flags of a Llama recipe on a machine without a GPU. wording/precision.txt has the error line.
PRECISIONS: dict[str, str] = {
    "fp16": "",
    "fp8": "",
    "fp8, LoRA": "--model.lora.rank 4",
    "fp8, tensor parallel": "--parallel.strategy fsdp2 --parallel.tp_size 2",
    "fp8, sequence parallel": "--parallel.sp_size 2",
    "fp8, ZeRO": "--parallel.strategy deepspeed",
    "fp8, offload": "--parallel.strategy fsdp2 --parallel.cpu_offload true",
    "fp8, Conv1D": "--model.config '{model_type: gpt2}'",
    "fp8, A100": "--gpu A100",
    "fp8, no torchao": "",
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_bad_precision_is_one_line(
    name: str,
    without_cuda: None,
    no_model: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "torchao" in name:
        monkeypatch.setattr(compatibility, "_is_installed", lambda package: package != "torchao")
    words = ["plan" if "A100" in name else "run", "r.yaml", "--model.config", LLAMA]
    words += ["--precision.mixed_precision", name.partition(",")[0], *shlex.split(PRECISIONS[name])]
    assert_refused(words, "precision", name)
    assert no_model == []


@pytest.mark.parametrize("name", ["missing file", "samples longer than the model's positions", "unknown tracker"])
def test_plan_refuses_what_run_refuses(name: str, no_model: list[str]) -> None:
    write_yaml("r.yaml", changed(RECIPES[name]))
    assert_refused(["plan", "r.yaml"], "recipe", name)
    assert no_model == []


def test_several_problems_are_a_line_each() -> None:
    write_yaml("r.yaml", {**GOOD, "optimzer": {}, "sed": 1})
    assert_golden(call("run", "r.yaml", code=2).err)


def test_a_recipe_without_a_task_is_told_which_one_it_has() -> None:
    Path("r.yaml").write_text("output_dir: runs/x\n")
    lines = call("run", "r.yaml", code=2).err.splitlines()
    assert [line.partition(" is missing")[0].removeprefix("error: ") for line in lines] == [
        "task", "model", "data", "schedule",
    ]  # fmt: skip


def test_the_good_recipe_is_good(no_model: list[str]) -> None:
    call("plan", "r.yaml", "--all", named="Memory of each")
    assert no_model == ["from_config"]


@pytest.mark.parametrize(
    "words",
    [
        "find-lr r.yaml --steps N", "find-lr r.yaml --min F", "plan r.yaml --world-size N", "plan r.yaml --mfu F",
        "plan r.yaml --mtbf F",
        "rehearse r.yaml --steps N", "generate run --max-new-tokens N", "generate run --temperature F",
        "generate run --seed N", "report run --port N", "watch run --every F", "sweep r.yaml --random N",
    ],
)  # fmt: skip
def test_a_number_on_the_command_line_that_nothing_can_use_is_one_line(words: str) -> None:
    for number in ("nan", "inf", "1e400") if words.endswith("F") else ("100000000000000000000", "1" * 5000):
        assert call(*words.split()[:-1], number, code=2).err.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("recipe", RECIPES),
        ("table", (*TABLES, "column of images that is missing")),
        ("yaml", TEXTS),
        ("endless", (*ENDLESS, *(f"images: {place}" for place in PLACES))),
        ("precision", PRECISIONS),
    ],
)
def test_each_golden_line_has_its_case(file: str, names: Iterable[str]) -> None:
    assert set(read_wording(file)) == set(names)
