"""Rows are encoded once: later starts and other processes map the same samples, and say the same about them."""

import errno
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.data.text import rows_cache
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.causal_lm import data as causal
from accel_train.tasks.text_classification import data as labelled
from accel_train.tasks.text_classification.metrics import baseline_scores
from tests.support.processes import run_forked
from tests.support.runs import TINY_MODEL, losses, recipe_dict, refused, write_jsonl, write_recipe_file
from tests.support.text_tasks import BERT, several_topics, write_texts

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
KINDS = (*LABELLED, "pairs", "chats", "completions")


def noted(calls: list[str], function: Any, *args: Any, **settings: Any) -> Any:
    calls.append(function.__name__)
    return function(*args, **settings)


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that read or encoded rows. Rows of any size are kept."""
    found: list[str] = []
    monkeypatch.setattr(rows_cache, "LEAST_BYTES", 0)
    for module, name in ((labelled, "load_labelled_texts"), (labelled, "tokenize_rows"), (causal, "_encoded")):
        monkeypatch.setattr(module, name, partial(noted, found, getattr(module, name)))
    return found


def sections(folder: Path, kind: str, **data: Any) -> dict[str, Any]:
    """The sections of a small recipe on rows of a kind, which are written."""
    path = folder / "rows.jsonl"
    settings: dict[str, Any] = {"train": str(path), "eval_fraction": 0.3, "cache_dir": str(folder / "cache")}
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
    arrays = [np.asarray(value) for side in sides for sample in side for value in sample]
    batches = [data.collate([side[number] for number in range(2)]) for side in sides]
    arrays += [np.asarray(value) for batch in batches for value in batch.values()]
    return [(array.dtype, array.shape, array.tolist()) for array in arrays]


def entries(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "cache/text").glob("*/meta.json"))


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
    assert warm.facts.notes or kind in ("lists", "numbers", "pairs")
    if kind in LABELLED:
        assert baseline_scores(warm.source.rows) == baseline_scores(plain.source.rows)
    if warm.lengths is not None:
        assert warm.lengths.tolist() == [len(sample.ids) for sample in plain.train]  # type: ignore[attr-defined]
        assert [warm.source.row_ids(number) for number in range(9)] == [plain.source.row_ids(n) for n in range(9)]


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
@pytest.mark.parametrize("kind", ["words", "chats"])
def test_what_changes_the_rows_makes_another_entry(tmp_path: Path, encoded: list[str], kind: str, change: str) -> None:
    load(recipe_of(tmp_path, kind))
    before, calls = entries(tmp_path), len(encoded)
    settings: dict[str, Any] = {
        "tokenizer": {"tokenizer": BPE},
        "template": {"chat_template": CHATML + " "} if kind == "chats" else {"text_columns": ["more"]},
        "length": {"sequence_length": 60} if kind == "chats" else {"max_length": 9},
        "split": {"split_seed": 3},
    }.get(change, {})
    recipe = recipe_of(tmp_path, kind, **settings)
    if change == "source":
        path = tmp_path / "rows.jsonl"
        path.write_text(path.read_text().replace("1", "2"))
    changed = load(recipe)
    assert len(encoded) > calls
    assert {*entries(tmp_path)} > {*before}
    calls = len(encoded)
    assert samples_of(load(recipe)) == samples_of(changed)
    assert len(encoded) == calls


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
    assert not [*tmp_path.glob("cache/text/*.building")]


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


@pytest.mark.parametrize(("kind", "num_entries"), [("words", 2), ("chats", 1)])
def test_two_processes_build_each_entry_once_after_one_that_was_killed(
    tmp_path: Path, kind: str, num_entries: int
) -> None:
    path = write_recipe_file(tmp_path, schedule={"max_steps": 2}, **sections(tmp_path, kind))
    builds = tmp_path / "builds"
    killed = run_forked(["run", str(path)], 1, folder=tmp_path / "a", program=PROGRAM, BUILDS=str(builds), DIES="1")
    assert killed.wait() == [-signal.SIGKILL]
    left = [each.name for each in (tmp_path / "cache/text").iterdir() if each.is_dir()]
    assert left == builds.read_text().split()
    assert entries(tmp_path) == []
    builds.unlink()
    run_forked(["run", str(path)], 2, folder=tmp_path / "b", program=PROGRAM, BUILDS=str(builds)).expect(0)
    assert len(builds.read_text().split()) == num_entries == len(entries(tmp_path))
    assert not [*(tmp_path / "cache/text").glob("*.building")]
    assert len(losses(tmp_path / "run")) == 2
