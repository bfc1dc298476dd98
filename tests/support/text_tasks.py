"""The text tasks: a tiny model and data of each, and what their tests do with them."""

import csv
import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from accel_train.cli.main import main
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from tests.support.runs import run_forked_command, write_corpus, write_jsonl, write_recipe_file

_MODELS = yaml.safe_load("""
sizes: &sizes {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2,
  max_position_embeddings: 128}
bert: {model_type: bert, <<: *sizes, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
modernbert: {model_type: modernbert, classifier_pooling: mean, local_attention: 16, <<: *sizes}
gpt2: {model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 128}
t5: {model_type: t5, d_model: 32, d_kv: 8, d_ff: 48, num_layers: 2, num_heads: 4, dropout_rate: 0.0}
bart: {model_type: bart, d_model: 32, encoder_layers: 2, decoder_layers: 2, encoder_attention_heads: 2,
  decoder_attention_heads: 2, encoder_ffn_dim: 48, decoder_ffn_dim: 48, max_position_embeddings: 64, dropout: 0.0}
segformer: {model_type: segformer, hidden_sizes: [8, 8, 16, 16], depths: [1, 1, 1, 1],
  num_attention_heads: [1, 1, 2, 2], decoder_hidden_size: 16}
""")
SIZES, BERT, MODERNBERT, GPT2, T5, BART, SEGFORMER = _MODELS.values()
ROBERTA = {**BERT, "model_type": "roberta", "max_position_embeddings": 400}
"""Counts positions from the id of the padding."""
MARIAN = {**BART, "model_type": "marian"}

TOPICS = {"loop": "step batch epoch update", "number": "loss norm mean sum", "machine": "rank device memory host"}
PEOPLE, PLACES = ("Ada Lovelace", "Emmy Noether", "Zoë"), ("New York", "Erlangen", "Bonn")
COLORS, THINGS = ("red", "green", "blue"), ("house", "boat", "door", "hat")
SOUNDS = {"cat": "meows", "dog": "barks", "cow": "moos"}
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def write_csv(path: Path, *rows: list[Any]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def write_texts(path: Path, num_rows: int = 60, label: Callable[[int], Any] | None = None) -> Path:
    """Texts of very different lengths about three topics, as csv or jsonl."""
    rows, names = [], list(TOPICS)
    for number in range(num_rows):
        words = TOPICS[names[number % 3]].split()
        text = " ".join(words[(number + i * i) % 4] for i in range(1 + number * 7 % 18)) + f" {number}"
        value = names[number % 3] if label is None else label(number)
        rows.append([f"row-{number}", text, f"and {words[0]} {number}", value])
    columns = ["id", "text", "more", "label"]
    if path.suffix == ".csv":
        return write_csv(path, columns, *rows)
    return write_jsonl(path, (dict(zip(columns, row)) for row in rows))


def several_topics(number: int) -> list[str]:
    """Any of the labels."""
    return [name for index, name in enumerate(TOPICS) if number % (index + 2) == 0]


def sentence(number: int) -> tuple[list[str], list[str]]:
    """Who went where, in three forms: words and tags."""
    who, where = PEOPLE[number % 3].split(), PLACES[number // 3 % 3].split()
    form = (["to", "{where}", "went", "{who}"], ["{who}", "left", "{where}", "."], ["{who}", "knows", "{who}"])[
        number % 5 % 3
    ]
    words: list[str] = []
    tags: list[str] = []
    for part in [*form, f"no{number}"]:
        name, kind = {"{who}": (who, "PER"), "{where}": (where, "LOC")}.get(part, ([part], ""))
        words += name
        tags += [f"{'I' if place else 'B'}-{kind}" if kind else "O" for place in range(len(name))]
    return words, tags


def write_conll(path: Path, num_rows: int = 60) -> Path:
    rows = ["\n".join(f"{word}\t{tag}" for word, tag in zip(*sentence(number))) for number in range(num_rows)]
    path.write_text("-DOCSTART- -X- O\n\n" + "\n\n\n".join(rows) + "\n")
    return path


def write_spans(folder: Path) -> dict[str, Any]:
    """Label Studio's export of people in sentences; returns the settings that read it."""
    rows = []
    for number in range(60):
        text = " ".join(sentence(number)[0])
        found = [(text.find(name), name) for name in PEOPLE if name in text]
        values = [{"start": at, "end": at + len(name), "labels": ["PER"], "text": name} for at, name in found[:1]]
        rows.append({"data": {"text": text}, "annotations": [{"result": [{"value": value} for value in values]}]})
    (folder / "a.json").write_text(json.dumps(rows))
    return {"train": str(folder / "a.json"), "tag_format": "label_studio", "tokens_column": "text"}


def write_lines(folder: Path) -> dict[str, Any]:
    """Line-aligned files; returns the settings that read them."""
    for suffix in ("de", "en"):
        (folder / f"a.{suffix}").write_text("".join(f"{suffix} {number % 7}\n" for number in range(40)))
    return {"train": str(folder / "a.de"), "target_suffix": "en", "max_length": 24, "max_target_length": 24}


def questions(count: int = 60, *, unanswered: int = 0) -> list[dict[str, Any]]:
    """Which color something has, in contexts of very different lengths; each `unanswered`-th question has no answer."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        color, thing = COLORS[number % 3], THINGS[number // 3 % 4]
        before, after = "so it was said " * (number % 4), " and that was number" * (number % 5 % 3)
        context = f"{before}The {thing} is {color}{after} {number}."
        has_answer = not unanswered or number % unanswered
        texts, starts = ([color], [context.index(color)]) if has_answer else ([], [])
        question = f"Which color has the {thing}?" if has_answer else f"Who owns the {thing}?"
        answers = {"text": texts, "answer_start": starts}
        found.append({"id": f"q{number}", "question": question, "context": context, "answers": answers})
    return found


def choices(count: int = 60) -> list[dict[str, Any]]:
    """Sounds of an animal: one of three endings is right, the one that is loud."""
    found = []
    for number in range(count):
        animal = list(SOUNDS)[number % 3]
        sounds = [list(SOUNDS.values())[(number // 3 + place) % 3] for place in range(3)]
        right = sounds.index(SOUNDS[animal])
        endings = [f"and {sound} {'loudly' if place == right else 'never'}" for place, sound in enumerate(sounds)]
        text = f"{'so ' * (number % 7)}the {animal} {number}"
        found.append({"id": f"row-{number}", "text": text, "endings": endings, "label": right})
    return found


def write_pairs(path: Path, num_rows: int = 40) -> Path:
    """Numbers and their digits in words, of one to four digits."""
    rows = []
    for row in range(num_rows):
        digits = str(7 + row * row * 13)[: 1 + row % 4]
        rows.append([f"row-{row}", f"{digits} {row}", " ".join(NUMBERS[int(digit)] for digit in digits)])
    return write_csv(path, ["name", "source", "target"], *rows)


class TextTask(NamedTuple):
    """A task: its data, and its recipe's `model.config` and `data`."""

    file: str
    write: Callable[..., Path]
    """Takes the path; further arguments are for single tests."""
    config: Mapping[str, Any]
    data: Mapping[str, Any]


def write_questions(path: Path, count: int = 60, *, unanswered: int = 0) -> Path:
    return write_jsonl(path, questions(count, unanswered=unanswered))


TASKS = {
    "text-classification": TextTask("a.jsonl", write_texts, BERT, {}),
    "token-classification": TextTask("a.conll", write_conll, BERT, {}),
    "question-answering": TextTask("q.jsonl", write_questions, BERT, {"id_column": "id"}),
    "multiple-choice": TextTask("m.jsonl", lambda path, count=60: write_jsonl(path, choices(count)), BERT, {}),
    "seq2seq": TextTask("pairs.csv", write_pairs, T5, {"max_length": 24, "max_target_length": 24}),
    "masked-lm": TextTask(
        "corpus.jsonl", lambda path: write_corpus(path.parent), BERT, {"sequence_length": 32, "num_workers": 0}
    ),
}


def write_data(task: str, folder: Path, *args: Any, **rows: Any) -> Path:
    """Write the data of a task into a folder; returns the file."""
    return TASKS[task].write(folder / TASKS[task].file, *args, **rows)


def recipe_for(task: str, train: Path | str, **sections: Any) -> Recipe:
    """A recipe of one step; a section of the caller's replaces the whole section, but for `data`."""
    data = {"train": str(train), "eval_fraction": 0.3, **TASKS[task].data, **sections.pop("data", {})}
    if task == "masked-lm":
        data = {"cache_dir": str(Path(train).parent / "cache"), **data}
    model = {"config": dict(TASKS[task].config)}
    rest = {"task": task, "output_dir": "run", "model": model, "schedule": {"max_steps": 1}, "data": data}
    return Recipe.model_validate({**rest, **sections})


def load(recipe: Recipe, seed: int = 0) -> tuple[Any, TaskData, Any]:
    """The task, its data, and a new model that evaluates."""
    task = load_task(recipe.task)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(seed)
    return task, data, task.build_model(recipe, data).eval()


def batch_of(data: TaskData, indices: range | None = None, *, train: bool = False) -> tuple[dict[str, Tensor], int]:
    """Some samples, or all, and the number of their targets."""
    samples: Any = data.train if train else data.eval
    batch = data.collate([samples[index] for index in indices or range(len(samples))])
    return batch, batch.pop("num_targets")


def evaluated(task: Any, data: Any, model: nn.Module, batch_size: int) -> tuple[dict[str, float], Any]:
    """Loss, scores, and details as an evaluation adds them up."""
    found: dict[str, list[Tensor]] = {}
    num_targets, size = 0, len(data.eval)
    with torch.no_grad():
        for start in range(0, size, batch_size):
            batch, count = batch_of(data, range(start, min(start + batch_size, size)))
            num_targets += count
            for name, value in task.evaluate_batch(model, batch).items():
                found.setdefault(name, []).append(value)
    totals = {
        name: torch.cat(values).numpy() if name.startswith("rows_") else torch.stack(values).double().sum(0).numpy()
        for name, values in found.items()
    }
    totals["rows_index"] = np.arange(size)
    loss = float(totals["loss_sum"]) / num_targets
    scores = task.score(loss, totals, data)
    return {"loss": loss, **scores.metrics}, scores.details


def train(task: str, folder: Path, *rows: Any, **sections: Any) -> Path:
    """Train on data of a task in this process; returns the run's folder. `sections` go into a small recipe."""
    data = {"train": str(write_data(task, folder, *rows)), "eval_fraction": 0.2, **TASKS[task].data}
    model = {"config": dict(TASKS[task].config)}
    settings = {"task": task, "model": model, **sections, "data": data | sections.pop("data", {})}
    assert main(["run", str(write_recipe_file(folder, **settings))]) == 0
    return folder / "run"


def run_card(model: Path, replaced: Mapping[str, str]) -> str:
    """Run the code in a model's README.md with other words in it; returns the printed text."""
    code = (model / "README.md").read_text().split("```python")[1].split("```")[0]
    for old, new in {"path/of/this/folder": str(model), **replaced}.items():
        assert old in code
        code = code.replace(old, new)
    with redirect_stdout(StringIO()) as printed:
        exec(code, {})
    return printed.getvalue().rstrip("\n")


def predict(run: Path, out: Path, *words: Path | str, processes: int = 0) -> list[dict[str, Any]]:
    """Run `accel-train predict` in this process, or in new ones; returns the rows of the jsonl file."""
    call = ["predict", str(run), *map(str, words), "--out", str(out)]
    if processes:
        done = run_forked_command(call, processes)
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        assert main(call) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]
