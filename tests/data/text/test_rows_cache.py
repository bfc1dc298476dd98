"""Rows are encoded once: later starts and other processes map the same samples, and say the same about them."""

import errno
import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_train.data.text import kept, rows_cache
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.causal_lm import data as causal
from accel_train.tasks.multiple_choice import data as choices
from accel_train.tasks.question_answering import data as questions
from accel_train.tasks.sentence_embedding import data as embedding
from accel_train.tasks.seq2seq import task as seq2seq
from accel_train.tasks.text_classification import data as labelled
from accel_train.tasks.text_classification.metrics import baseline_scores
from accel_train.tasks.token_classification import data as words
from tests.support import text_tasks
from tests.support.every_task import of_pairs
from tests.support.processes import run_forked
from tests.support.runs import TINY_MODEL, losses, recipe_dict, refused, write_jsonl, write_recipe_file
from tests.support.text_tasks import BERT, T5, several_topics, write_lines, write_spans, write_texts

PROGRAM = Path(__file__).parents[2] / "support/programs/kept_rows.py"
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|endoftext|>{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
BPE = {"train_bpe": {"vocab_size": 300}}
LABELLED = {
    "words": lambda number: None if number == 9 else str(number % 3),
    "lists": several_topics,
    "numbers": lambda number: number / 4,
}
Sections = dict[str, Any]


def of_file(task: str, file: str, **data: Any) -> Callable[[Path], Sections]:
    """The sections of a recipe whose data are written to a file of this name."""

    def write(folder: Path) -> Sections:
        path = text_tasks.TASKS[task].write(folder / file)
        given = {"train": str(path), **text_tasks.TASKS[task].data, **data}
        return {"task": task, "model": {"config": dict(text_tasks.TASKS[task].config)}, "data": given}

    return write


OTHERS: dict[str, Callable[[Path], Sections]] = {
    "sentences": of_file("token-classification", "rows.conll", max_length=40),
    "spans": lambda folder: {
        "task": "token-classification", "model": {"config": dict(BERT)}, "data": write_spans(folder),
    },
    "questions": of_file("question-answering", "rows.jsonl", max_length=48),
    "choices": of_file("multiple-choice", "rows.jsonl", max_length=36),
    "translations": of_file("seq2seq", "rows.csv", id_column="name"),
    "lines": lambda folder: {"task": "seq2seq", "model": {"config": dict(T5)}, "data": write_lines(folder)},
    "anchors": lambda folder: {"task": "sentence-embedding", **of_pairs(["anchor", "positive"])(folder)},
    "scores": lambda folder: {"task": "sentence-embedding", **of_pairs(["anchor", "positive"], "score")(folder)},
}  # fmt: skip
"""Rows of other tasks: writes them to a folder, and returns the sections that read them."""
TEMPLATES: dict[str, dict[str, Any]] = {
    "words": {"text_columns": ["more"]},
    "chats": {"chat_template": CHATML + " "},
    "questions": {"doc_stride": 3},
    "translations": {"source_prefix": "say: "},
    "lines": {"max_target_length": 9},
    "anchors": {"anchor_prompt": "find: "},
}
"""Settings that change the tokens."""
KINDS = (*LABELLED, "pairs", "chats", "completions", *OTHERS)


def noted(calls: list[str], function: Any, *args: Any, **settings: Any) -> Any:
    # One row is encoded at each start, for the state of the tokenizer.
    if not isinstance(args[0], Sequence) or len(args[0]) != 1:
        calls.append(function.__name__)
    return function(*args, **settings)


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that read or encoded rows. Rows of any size are kept."""
    found: list[str] = []
    monkeypatch.setattr(rows_cache, "LEAST_BYTES", 0)
    functions: dict[Any, tuple[str, ...]] = {
        labelled: ("load_labelled_texts", "tokenize_rows"),
        words: ("load_sentences", "tokenize_sentences"),
        questions: ("load_questions", "tokenize_questions"),
        choices: ("load_choices", "tokenize_choices"),
        embedding: ("load_rows", "tokenize_rows"),
        seq2seq: ("load_pairs", "tokenize_pairs"),
        causal: ("_encoded",),
    }
    for module, names in functions.items():
        for name in names:
            monkeypatch.setattr(module, name, partial(noted, found, getattr(module, name)))
    return found


def sections(folder: Path, kind: str, **data: Any) -> dict[str, Any]:
    """The sections of a small recipe on rows of a kind, which are written."""
    path = folder / "rows.jsonl"
    settings: dict[str, Any] = {"train": str(path), "eval_fraction": 0.3, "cache_dir": str(folder / "cache")}
    if kind in OTHERS:
        found = OTHERS[kind](folder)
        return found | {"data": settings | found["data"] | data}
    if kind in ("chats", "completions"):
        texts = [(f"{number} and {number % 7}?", "yes " * (1 + number % 9)) for number in range(40)]
        if kind == "chats":
            turns = [zip(("user", "assistant"), pair) for pair in texts]
            rows: list[Any] = [
                {"messages": [{"role": role, "content": text} for role, text in pair], "label": 1} for pair in turns
            ]
        else:
            rows = [dict(zip(("prompt", "completion"), pair)) for pair in texts]
        write_jsonl(path, rows)
        settings |= {"sequence_length": 64, "format": "chat" if kind == "chats" else "prompt_completion"}
        settings |= {"chat_template": CHATML} if kind == "chats" else {}
        return {"task": "causal-lm", "model": {"config": TINY_MODEL | {"n_positions": 64}}, "data": settings | data}
    write_texts(path, label=LABELLED.get(kind))
    settings |= {"missing_labels": "drop"} if kind == "words" else {}
    settings |= {"text_columns": ["text", "more"]} if kind == "pairs" else {}
    return {"task": "text-classification", "model": {"config": dict(BERT)}, "data": settings | data}


def recipe_of(folder: Path, kind: str, *, tokenizer: Any = "bytes", **data: Any) -> Recipe:
    recipe = recipe_dict(folder, tokenizer=tokenizer)
    del recipe["data"]
    return Recipe.model_validate(recipe | sections(folder, kind, **data))


def load(recipe: Recipe) -> TaskData:
    return load_task(recipe.task).load_data(recipe, progress=True)


def samples_of(data: TaskData) -> list[Any]:
    """All samples, their types, and the batch of the first."""
    sides: list[Any] = [data.train, data.eval]
    batches = [data.collate([side[number] for number in range(2)]) for side in sides]
    return arrays_in([list(side) for side in sides]) + arrays_in([list(batch.values()) for batch in batches])


def arrays_in(value: Any) -> list[Any]:
    try:
        array = np.asarray(value)
    # Rows of different lengths.
    except ValueError:
        return [found for each in value for found in arrays_in(each)]
    return [(array.dtype, array.shape, array.tolist())]


def entries(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "cache/kept").glob("*/meta.json"))


@pytest.mark.parametrize("tokenizer", ["bytes", BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_start_maps_the_samples_of_the_first_and_says_the_same(
    tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch, kind: str, tokenizer: Any
) -> None:
    recipe = recipe_of(tmp_path, kind, tokenizer=tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(rows_cache, "LEAST_BYTES", 10**9)
        plain = load(recipe)
    assert not (tmp_path / "cache").exists()
    cold = load(recipe)
    calls = len(encoded)
    warm = load(recipe)
    assert len(encoded) == calls > 0
    for each in (cold, warm):
        assert samples_of(each) == samples_of(plain)
        assert each.fingerprint == plain.fingerprint
        assert each.facts.record() == plain.facts.record()
        tools = [found.source.tokenizer for found in (each, plain)]
        assert tools[0].backend_tokenizer.to_str() == tools[1].backend_tokenizer.to_str()
        assert tools[0].chat_template == tools[1].chat_template
        if hasattr(plain.source, "rows"):
            for one, other in zip((each.source.rows.train, each.source.rows.eval), vars(plain.source.rows).values()):
                assert arrays_in(list(one)) == arrays_in(other)
    assert warm.facts.notes or kind in ("lists", "numbers", "pairs", *OTHERS)
    if kind in LABELLED:
        assert baseline_scores(warm.source.rows) == baseline_scores(plain.source.rows)
    if warm.lengths is not None:
        assert plain.lengths is not None
        assert warm.lengths.tolist() == plain.lengths.tolist()
        assert [warm.source.row_ids(number) for number in range(9)] == [plain.source.row_ids(n) for n in range(9)]


@pytest.mark.parametrize("kind", OTHERS)
def test_kept_rows_have_the_scores_predictions_and_baselines_of_the_first_start(tmp_path: Path, kind: str) -> None:
    recipe, found = recipe_of(tmp_path, kind), []
    for _ in range(2):
        task, data, model = text_tasks.load(recipe)
        rows = {"index": np.arange(3)}
        with torch.no_grad():
            batch = text_tasks.batch_of(data, range(3))[0]
            rows |= {name: value.numpy() for name, value in task.predict_batch(model, batch).items()}
        columns = json.dumps(task.prediction_columns(rows, data))
        scores = None if recipe.task == "sentence-embedding" else text_tasks.evaluated(task, data, model, 7)
        found.append((scores, columns, task.baselines(data)))
    assert isinstance(data.source.rows.eval, kept.Rows)
    assert repr(found[0]) == repr(found[1])


@pytest.mark.parametrize("kind", ["words", "chats"])
def test_a_run_on_kept_rows_has_the_losses_of_the_first_run(tmp_path: Path, encoded: list[str], kind: str) -> None:
    from accel_train import train

    recipe = recipe_dict(tmp_path)
    del recipe["data"]
    recipe |= sections(tmp_path, kind) | {"schedule": {"max_steps": 6}}
    found = []
    for name in ("cold", "warm"):
        train(recipe | {"output_dir": str(tmp_path / name)})
        found.append((losses(tmp_path / name), len(encoded)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 6


@pytest.mark.parametrize("change", ["tokenizer", "template", "length", "source", "split"])
@pytest.mark.parametrize("kind", ["words", "chats", *OTHERS])
def test_what_changes_the_rows_makes_another_entry(tmp_path: Path, encoded: list[str], kind: str, change: str) -> None:
    if change == "template" and kind not in TEMPLATES:
        pytest.skip("no template")
    load(recipe_of(tmp_path, kind))
    before, calls = entries(tmp_path), len(encoded)
    settings: dict[str, Any] = {
        "tokenizer": {"tokenizer": BPE},
        "template": TEMPLATES.get(kind, {}),
        "length": {"sequence_length": 60} if kind == "chats" else {"max_length": 9 if kind == "words" else 20},
        "split": {"split_seed": 3},
    }.get(change, {})
    recipe = recipe_of(tmp_path, kind, **settings)
    if change == "source":
        path = tmp_path / "a.en" if kind == "lines" else Path(str(recipe.data.train))
        path.write_text(
            path.read_text().replace(*{"questions": ("blue", "gray"), "spans": ("Bonn", "Rome")}.get(kind, ("1", "2")))
        )
    changed = load(recipe)
    assert len(encoded) > calls
    assert {*entries(tmp_path)} > {*before}
    calls = len(encoded)
    assert samples_of(load(recipe)) == samples_of(changed)
    assert len(encoded) == calls


@pytest.mark.parametrize("kind", ["words", "sentences", "questions", "choices", "anchors"])
def test_a_model_with_fewer_positions_makes_other_samples(tmp_path: Path, encoded: list[str], kind: str) -> None:
    for positions in (128, 24, 128):
        recipe = recipe_of(tmp_path, kind, max_length=None)
        assert recipe.model.config is not None
        recipe.model.config["max_position_embeddings"] = positions
        data = load(recipe)
        assert data.facts.max_length == positions
        assert data.lengths is not None
        assert data.lengths.max() <= positions
    assert len(entries(tmp_path)) == 3
    assert len(encoded) == 5


def test_other_generated_texts_make_other_samples(tmp_path: Path) -> None:
    found = []
    for count in (4, 2, 4):
        content = recipe_of(tmp_path, "translations").model_dump(exclude_unset=True)
        recipe = Recipe.model_validate(content | {"evaluate": {"generation": {"max_samples": count}}})
        found.append([pair.row for pair in load(recipe).eval])  # type: ignore[union-attr]
    assert found[0] == found[2]
    assert [sum(row >= 0 for row in rows) for rows in found] == [4, 2, 4]


def test_another_template_in_the_same_file_makes_another_entry(tmp_path: Path, encoded: list[str]) -> None:
    template = tmp_path / "chat.jinja"
    for text in (CHATML, CHATML.replace("|>", "|> "), CHATML):
        template.write_text(text)
        load(recipe_of(tmp_path, "chats", chat_template=str(template)))
    assert len(encoded) == len(entries(tmp_path)) == 2


def test_settings_that_only_read_the_rows_find_them(tmp_path: Path, encoded: list[str]) -> None:
    load(recipe_of(tmp_path, "words"))
    calls = len(encoded)
    load(recipe_of(tmp_path, "words", shuffle=False, group_by_length=True, num_workers=1, last_batch="drop"))
    assert len(encoded) == calls


@pytest.mark.parametrize("kind", ["words", "chats"])
def test_a_damaged_entry_is_said_and_built_again(
    tmp_path: Path, encoded: list[str], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    first = load(recipe_of(tmp_path, kind))
    calls = len(encoded)
    for number, folder in enumerate(entries(tmp_path)):
        victim = max(
            (path for path in folder.iterdir() if path.name != "meta.json"), key=lambda path: path.stat().st_size
        )
        content = bytearray(victim.read_bytes())
        content[-9] ^= 1
        victim.write_bytes(content if number else content[:-1])
    capsys.readouterr()
    assert samples_of(load(recipe_of(tmp_path, kind))) == samples_of(first)
    said = capsys.readouterr().err
    assert all(f"{folder} is damaged" in said for folder in entries(tmp_path))
    assert len(encoded) == 2 * calls
    load(recipe_of(tmp_path, kind))
    assert len(encoded) == 2 * calls
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["full", "no folder"])
@pytest.mark.parametrize("kind", ["words", "chats"])
def test_a_cache_that_cannot_be_written_is_one_line_and_the_rows_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, fault: str
) -> None:
    recipe = recipe_of(tmp_path, kind)
    if fault == "full":

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(np, "save", full)
    else:
        (tmp_path / "cache").write_text("")
    found = load(recipe)
    said = [line for line in capsys.readouterr().err.splitlines() if "not kept" in line]
    assert len(said) == (2 if kind == "words" and fault == "full" else 1)
    assert len(found.train) > 20  # type: ignore[arg-type]
    assert entries(tmp_path) == []
    assert not [*tmp_path.glob("cache/kept/*.building")]


def test_a_source_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, path = recipe_of(tmp_path, "chats"), tmp_path / "rows.jsonl"
    encode = causal._encode

    def late(*args: Any) -> Any:
        path.write_text(path.read_text() + "\n")
        return encode(*args)

    monkeypatch.setattr(causal, "_encode", late)
    load(recipe)
    assert "changed while it was read" in capsys.readouterr().err
    assert entries(tmp_path) == []


@pytest.mark.parametrize("kind", ["words", "completions"])
def test_a_row_that_fails_fails_at_each_start(tmp_path: Path, kind: str) -> None:
    recipe, path = recipe_of(tmp_path, kind), tmp_path / "rows.jsonl"
    path.write_text(
        path.read_text() + '{"text": 3, "label": "loop", "id": "x", "more": "", "prompt": "", "completion": ""}\n'
    )
    first, second = (str(refused(load, recipe, named=f"{path}:")) for _ in range(2))
    assert first == second
    assert entries(tmp_path) == []


def test_data_to_predict_are_not_kept(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "words")
    load(recipe.model_copy(update={"data": recipe.data.shown_as("FILE")}))
    assert not (tmp_path / "cache").exists()


def test_small_sources_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    load(recipe_of(tmp_path, "words"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("kind", "num_entries"), [("words", 2), ("chats", 1), ("questions", 2)])
def test_two_processes_build_each_entry_once_after_one_that_was_killed(
    tmp_path: Path, kind: str, num_entries: int
) -> None:
    path = write_recipe_file(tmp_path, schedule={"max_steps": 2}, **sections(tmp_path, kind))
    builds = tmp_path / "builds"
    killed = run_forked(["run", str(path)], 1, folder=tmp_path / "a", program=PROGRAM, BUILDS=str(builds), DIES="1")
    assert killed.wait() == [-signal.SIGKILL]
    left = [each.name for each in (tmp_path / "cache/kept").iterdir() if each.is_dir()]
    assert left == builds.read_text().split()
    assert entries(tmp_path) == []
    builds.unlink()
    run_forked(["run", str(path)], 2, folder=tmp_path / "b", program=PROGRAM, BUILDS=str(builds)).expect(0)
    assert len(builds.read_text().split()) == num_entries == len(entries(tmp_path))
    assert not [*(tmp_path / "cache/kept").glob("*.building")]
    assert len(losses(tmp_path / "run")) == 2
