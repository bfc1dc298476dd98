"""Shards of fine-tuning rows: every row is in one with its own targets, whoever makes it, and whenever."""

import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from accel_train.core.errors import DataError, SettingError
from accel_train.data.text import sharded_rows
from accel_train.data.text import shards as shards_module
from accel_train.data.text.sharded_rows import ESTIMATED, ShardedRows
from accel_train.data.text.tokenizers import BYTE_SEPARATOR_ID
from accel_train.recipe.schema import Recipe
from accel_train.task import Task, TaskData
from accel_train.tasks.causal_lm import encoding
from accel_train.tasks.causal_lm.packing import DOCUMENTS, INPUTS, LABELS, POSITIONS
from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding
from accel_train.tasks.seq2seq.task import Seq2Seq
from accel_train.tasks.text_classification import data as labelled
from accel_train.tasks.text_classification.task import TextClassification
from tests.support.runs import TINY_MODEL, Settings, recipe_dict, refused, write_jsonl
from tests.support.text_tasks import BERT, T5, write_csv
from tests.support.wording import raises_golden

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LENGTH = 96
Pairs = list[tuple[str, str]]

# Prompts and answers of many lengths. The last of ten has no answer within LENGTH tokens, another one is cut.
PAIRS = [
    (f"{number}: " + "wörd " * (number * 7 % 12 if number % 10 else 40), f"{number} is" + " ä" * (number * 5 % 30))
    for number in range(500)
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 4096)
    monkeypatch.setattr(encoding, "check_template", lambda *_: None)


def write_pairs(path: Path, pairs: Pairs) -> str:
    return str(write_jsonl(path, ({"prompt": prompt, "completion": answer} for prompt, answer in pairs)))


def write_cells(path: Path, pairs: Pairs) -> str:
    return str(write_csv(path.with_suffix(".csv"), ["prompt", "completion"], *map(list, pairs)))


def write_chats(path: Path, pairs: Pairs) -> str:
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in pairs]
    return str(write_jsonl(path, ({"messages": each} for each in turns)))


def write_table(path: Path, pairs: Pairs) -> str:
    prompts, answers = map(list, zip(*pairs))
    name = str(path.with_suffix(".parquet"))
    parquet.write_table(arrow.table({"prompt": prompts, "completion": answers}), name, row_group_size=11)
    return name


def encoded_alone(pair: tuple[str, str], is_chat: bool) -> tuple[list[int], list[int]]:
    """What the model reads of a row, and what it learns: byte by byte, without the package's encoders."""
    question, answer = (each.encode() for each in pair)
    before, after = (b"<user>" + question, b"<assistant>" + answer) if is_chat else (question, answer)
    begin = [] if is_chat else [BYTE_SEPARATOR_ID]
    middle = [BYTE_SEPARATOR_ID, *b"<assistant>"] if is_chat else []
    prompt = [*begin, *before, *middle]
    answered = [*(answer if is_chat else after), BYTE_SEPARATOR_ID]
    ids, targets = (prompt + answered)[: LENGTH + 1], ([-100] * len(prompt) + answered)[: LENGTH + 1]
    return ids[:-1], targets[1:]


def rows_in(windows: Any) -> list[tuple[list[int], list[int]]]:
    """What the model reads and learns of each row in windows, each from its own positions."""
    found = []
    for window in windows:
        for document in range(window[DOCUMENTS].max() + 1):
            inside = window[DOCUMENTS] == document
            assert window[POSITIONS, inside].tolist() == [*range(inside.sum())]
            found.append((window[INPUTS, inside].tolist(), window[LABELS, inside].tolist()))
    return found


def load(folder: Path, train: str, *, model: Settings | None = None, tokenizer: Any = "bytes", **data: Any) -> TaskData:
    settings = {"train": train, "order": "blocks", "format": "prompt_completion", "eval_fraction": 0.05, **data}
    settings["sequence_length"] = LENGTH
    model = {"config": {**TINY_MODEL, "n_positions": LENGTH}, **(model or {})}
    recipe = recipe_dict(folder, task="causal-lm", data=settings, model=model, tokenizer=tokenizer)
    return CausalLM().load_data(Recipe.model_validate(recipe), progress=False)


def windows_of(data: TaskData) -> list[Any]:
    rows: Any = data.train
    counts = rows.counts(np.arange(len(rows.shards.cut))).tolist()
    assert len(counts) > 10
    return [window for number, count in enumerate(counts) for window in rows.__getitems__([*_numbers(number, count)])]


def _numbers(shard: int, count: int) -> range:
    return range(shard << 32, (shard << 32) + count)


SOURCES: dict[str, tuple[Callable[[Path, Pairs], str], Settings]] = {
    "prompts": (write_pairs, {}),
    "parquet": (write_table, {}),
    "csv": (write_cells, {}),
    "chats": (write_chats, {"format": "chat", "chat_template": CHATML}),
}


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_shards_and_the_evaluation_data_have_every_row_once_with_its_targets(
    tmp_path: Path, name: str, attention: str
) -> None:
    write, settings = SOURCES[name]
    data = load(tmp_path, write(tmp_path / "rows.jsonl", PAIRS), model={"attn_implementation": attention}, **settings)
    windows, held_out = windows_of(data), [window for window in data.eval]  # type: ignore[union-attr] # noqa: C416
    expected = [encoded_alone(pair, name == "chats") for pair in PAIRS]
    expected = [row for row in expected if max(row[1]) >= 0]
    assert len(expected) < len(PAIRS), "some have no target"
    found = [rows_in(windows), rows_in(held_out)]
    assert Counter(map(str, found[0] + found[1])) == Counter(map(str, expected))
    assert 5 < len(found[1]) < 60
    assert (len(windows) < len(found[0])) == (attention == "auto"), "packed, or each alone"
    assert data.facts.num_train == pytest.approx(len(windows), rel=0.3), "estimated from the first shard"
    batch = data.collate(windows[:3])
    assert batch["num_targets"] == sum(int((window[LABELS] >= 0).sum()) for window in windows[:3])


def test_only_the_held_out_rows_of_the_sample_and_their_copies_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "SAMPLE_BYTES", 3 * 4096)
    pairs = [pair for pair in PAIRS if len(pair[0]) < 90]
    data = load(tmp_path, write_pairs(tmp_path / "rows.jsonl", [*pairs, *pairs[::-1]]), eval_fraction=0.3)
    counts = Counter(map(str, rows_in(windows_of(data))))
    left_out = [pair for pair in pairs if not counts[str(encoded_alone(pair, False))]]
    assert {*counts.values()} == {2}
    assert 0 < len(left_out) < 0.15 * len(pairs), "0.3 of the sample alone"


def test_shards_do_not_depend_on_the_seed_or_the_cache_or_the_folder(tmp_path: Path) -> None:
    found = []
    for cache, order in (("one", 1), ("two", -1), ("one", -1)):
        path = tmp_path / cache / "rows.jsonl"
        path.parent.mkdir(exist_ok=True)
        data = load(tmp_path, write_pairs(path, PAIRS), cache_dir=str(tmp_path / "cache" / cache))
        rows: Any = data.train
        for number in range(len(rows.shards.cut))[::order]:
            assert rows.shards.make(number)
        files = sorted((tmp_path / "cache" / cache).rglob("[0-9][0-9][0-9]/*"))
        assert [file.suffix for file in files] == [".bin"] * len(rows.shards.cut), "no lock, no file of a build"
        found.append((data.fingerprint, [sha256(file.read_bytes()).hexdigest() for file in files]))
    assert found[0] == found[1] == found[2]


def test_chats_that_all_cores_count_give_the_shards_that_one_core_makes(tmp_path: Path) -> None:
    write, settings = SOURCES["chats"]
    made = []
    for number, make in enumerate((windows_of, lambda data: data.train.count(False))):
        data = load(tmp_path, write(tmp_path / "rows.jsonl", PAIRS), cache_dir=str(tmp_path / str(number)), **settings)
        make(data)
        made.append([file.read_bytes() for file in sorted((tmp_path / str(number)).rglob("[0-9][0-9][0-9]/*"))])
    rows: Any = data.train
    assert made[0] == made[1]
    assert len(rows) == rows.counts(np.arange(len(rows.shards.cut))).sum()


def test_a_trained_tokenizer_and_data_of_their_own_to_evaluate_on(tmp_path: Path) -> None:
    evaluated = [(f"asked {number}", f"answered {number}") for number in range(20)]
    own: Settings = {
        "eval": write_pairs(tmp_path / "eval.jsonl", evaluated),
        "tokenizer": {"train_bpe": {"vocab_size": 300}},
    }
    pairs = [pair for pair in PAIRS if len(pair[0]) < 60 and len(pair[1]) < 60]
    data = load(tmp_path, write_pairs(tmp_path / "rows.jsonl", pairs), **own)
    tokenizer = data.source.tokenizer
    assert len(tokenizer) == 300
    for samples, expected in ((windows_of(data), pairs), ([*data.eval], evaluated)):  # type: ignore[misc]
        texts = [
            tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (read, [id for id in learned if id >= 0]))
            for read, learned in rows_in(samples)
        ]
        assert Counter(texts) == Counter((one + other, other) for one, other in expected)


@pytest.mark.parametrize(
    "change", [{"completion_only_loss": False}, {"split_seed": 3}, {"input_column": "completion"}, {"pairs": PAIRS[1:]}]
)
def test_what_changes_the_rows_changes_the_fingerprint_and_the_shards(tmp_path: Path, change: Settings) -> None:
    folders = set()
    for settings in ({}, change):
        train = write_pairs(tmp_path / "rows.jsonl", settings.get("pairs", PAIRS))
        data = load(tmp_path, train, **{name: value for name, value in settings.items() if name != "pairs"})
        folders.add((data.fingerprint, data.facts.cache_folder))
    assert len({fingerprint for fingerprint, _ in folders}) == len({folder for _, folder in folders}) == 2


def test_a_damaged_or_half_shard_is_made_again(tmp_path: Path) -> None:
    rows: Any = load(tmp_path, write_pairs(tmp_path / "rows.jsonl", PAIRS)).train
    rows.shards.make_all([3])
    path = rows.shards.path(3)
    content = path.read_bytes()
    for damaged in (content[:900] + b"?" + content[901:], content[: len(content) // 2]):
        path.write_bytes(damaged)
        rows.shards.stream(3)
        assert path.read_bytes() == content


@pytest.mark.parametrize("line", ['{"prompt": "a"', '{"prompt": "a"}', '{"prompt": "a", "completion": 5}', "ü"])
def test_a_row_that_cannot_be_read_is_named_when_its_shard_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(shards_module, "SAMPLE_BYTES", 4096)
    monkeypatch.chdir(tmp_path)
    path = Path("rows.jsonl")
    write_pairs(path, PAIRS)
    lines = path.read_bytes().splitlines()
    at = len(b"\n".join(lines[:400])) // 4096
    lines[400] = line.encode("latin-1")
    path.write_bytes(b"\n".join(lines))
    rows: Any = load(tmp_path, str(path), eval_fraction=0).train
    with raises_golden(DataError):
        rows.shards.make_all(range(at, at + 2))


def test_auto_chooses_by_the_size_of_the_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = write_pairs(tmp_path / "rows.jsonl", PAIRS)
    size = Path(train).stat().st_size
    for limit, expected in ((size, False), (size - 1, True)):
        monkeypatch.setattr(sharded_rows, "ROWS_AT_ONCE_UP_TO_BYTES", limit)
        for warm in range(2):
            data = load(tmp_path, train, order="auto")
            assert isinstance(data.train, ShardedRows) == expected, warm
            assert any("data.order" in note for note in data.facts.notes) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"last_batch": "short"},
        {"train": "rows.json"},
    ],
)
def test_blocks_of_rows_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Settings
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("rows.jsonl"), PAIRS)
    Path("rows.json").write_text('[{"prompt": "a", "completion": "b"}]')
    refused(lambda: load(tmp_path, **{"train": "rows.jsonl", **change}), named="data.order")


def test_rows_that_are_all_too_long_are_one_error(tmp_path: Path) -> None:
    pairs = [(f"{number} " + "a" * 2 * LENGTH, "b") for number in range(60)]
    with raises_golden(DataError):
        load(tmp_path, write_pairs(tmp_path / "rows.jsonl", pairs), eval_fraction=0)


def test_json_of_a_row_is_its_key_in_the_sample_and_in_the_shards(tmp_path: Path) -> None:
    # The same row, written in another way.
    path = tmp_path / "rows.jsonl"
    write_pairs(path, PAIRS)
    with path.open("a") as file:
        file.writelines(json.dumps({"completion": answer, "prompt": prompt}) + "\n" for prompt, answer in PAIRS)
    counts = Counter(map(str, rows_in(windows_of(load(tmp_path, str(path), eval_fraction=0.2)))))
    assert {*counts.values()} == {2}


TEXTS = [
    {
        "text": f"{number} " + "wörd " * (number * 7 % 12),
        "other": f"so {number % 90}",
        "label": "late" if number > 390 else ("red", "blue")[number % 2],
        "labels": [["a"], ["b", "c"], []][number % 3] if number != 399 else ["d"],
        "value": number / 8,
        "is_red": number % 2,
        "is_late": int(number > 390),
        "some": None if number % 5 == 1 else f"class {number % 3}",
    }
    for number in range(400)
]
PAIR: Settings = {"pair_columns": ["text", "other"]}
ROWS: dict[str, Settings] = {
    "names": {},
    "pairs of texts": {"text_columns": ["text", "other"]},
    "named classes": {"label_names": ["late", "blue", "red"]},
    "lists": {"label_column": "labels"},
    "numbers": {"label_column": "value", "problem_type": "regression"},
    "columns": {"label_columns": ["is_red", "is_late"]},
    "missing": {"label_column": "some", "missing_labels": "drop"},
    "anchors": PAIR,
    "scores": {**PAIR, "score_column": "value"},
    "rewrites": {"source_column": "text", "target_column": "other"},
}
TASKS: dict[str, tuple[type[Task], str]] = {
    "anchors": (SentenceEmbedding, "sentence-embedding"),
    "scores": (SentenceEmbedding, "sentence-embedding"),
    "rewrites": (Seq2Seq, "seq2seq"),
}


def write_kind(folder: Path, kind: str, rows: list[Settings]) -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=23)
        return str(path)
    if kind == "jsonl":
        return str(write_jsonl(path, rows))
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    for number in range(0, len(rows), 40):
        part, header = rows[number : number + 40], [*rows[0]]
        write_csv(folder / f"{number:03d}.csv", header, *([row[name] for name in header] for row in part))
    return str(folder)


def load_rows(folder: Path, train: str, name: str, order: str, **sections: Any) -> TaskData:
    task, kind = TASKS.get(name, (TextClassification, "text-classification"))
    settings = dict(ROWS[name])
    model: Settings = {"config": T5 if kind == "seq2seq" else BERT}
    if "problem_type" in settings:
        model["problem_type"] = settings.pop("problem_type")
    data = {"train": train, "order": order, "eval_fraction": 0.05, "max_length": 64, **settings}
    data |= sections.pop("data", {})
    given = {"tokenizer": "bytes", "model": model, **sections}
    recipe = recipe_dict(folder, task=kind, data=data, **given)
    return task().load_data(Recipe.model_validate(recipe), progress=False)


def samples_in(rows: Any) -> list[Any]:
    counts = rows.counts(np.arange(len(rows.shards.cut))).tolist()
    assert len(counts) > 5
    return [each for number, count in enumerate(counts) for each in rows.__getitems__([*_numbers(number, count)])]


def plain(value: Any) -> Any:
    """The values of a sample, without the types that hold them."""
    return [*map(plain, value)] if isinstance(value, tuple) else getattr(value, "tolist", lambda: value)()


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "jsonl") for name in ROWS), ("names", "parquet"), ("names", "csv"), ("scores", "csv")]
)
def test_shards_of_labeled_texts_and_pairs_have_the_samples_of_all_rows_in_memory(
    tmp_path: Path, name: str, kind: str
) -> None:
    train = write_kind(tmp_path, kind, TEXTS)
    in_shards, in_memory = (load_rows(tmp_path, train, name, order) for order in ("blocks", "shuffled"))
    found: list[Any] = [*samples_in(in_shards.train), *in_shards.eval]  # type: ignore[misc]
    expected: list[Any] = [*in_memory.train, *in_memory.eval]  # type: ignore[misc]
    assert Counter(str(plain(each)) for each in found) == Counter(str(plain(each)) for each in expected)
    assert [*map(plain, in_shards.eval)] == [*map(plain, in_memory.eval)]  # type: ignore[arg-type]
    assert in_shards.facts.label_names == in_memory.facts.label_names
    if name == "rewrites":
        pairs: Any = in_memory.train
        assert in_memory.facts.train_targets == sum(len(each.target) for each in pairs)
        assert in_shards.facts.train_targets == pytest.approx(in_memory.facts.train_targets, rel=0.3)
    position = [*map(plain, expected)].index(plain(found[70]))
    ours, theirs = in_shards.collate([found[70]]), in_memory.collate([expected[position]])
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert np.array_equal(ours[key], value), key
        assert getattr(ours[key], "dtype", None) == getattr(value, "dtype", None), key


def test_a_number_of_samples_that_is_not_counted_is_an_estimate(tmp_path: Path) -> None:
    train = write_kind(tmp_path, "jsonl", TEXTS)
    for schedule in ({"max_steps": 2}, {"max_steps": None, "num_epochs": 1}):
        data = load_rows(tmp_path, train, "names", "blocks", schedule=schedule)
        assert (ESTIMATED in data.facts.notes) == (schedule["max_steps"] is not None)
        assert (data.facts.num_train == len(samples_in(data.train))) == (schedule["max_steps"] is None)
    assert ESTIMATED in load(tmp_path, write_pairs(tmp_path / "pairs.jsonl", PAIRS)).facts.notes


def test_classes_that_are_named_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(labelled, "every_label", lambda *_: read.append("") or [("red", ""), ("blue", "")])
    train = write_kind(tmp_path, "jsonl", TEXTS)
    for name, expected in (("named classes", 0), ("numbers", 0), ("columns", 0), ("names", 1)):
        read.clear()
        monkeypatch.setattr(shards_module, "SAMPLE_BYTES", 4096)
        load_rows(tmp_path, train, name, "blocks", data={"eval_fraction": 0.2})
        assert len(read) == expected, name


def test_numbers_are_not_classes_of_rows_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled, "_MOST_LABELS", 100)
    train = write_kind(tmp_path, "jsonl", TEXTS)
    refused(
        lambda: load_rows(tmp_path, train, "names", "blocks", data={"label_column": "value"}),
        named="data.label_column|model.problem_type",
    )


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("names", {"data": {"group_column": "other"}}),
        ("names", {"data": {"group_by_length": True}}),
        ("names", {"loss": {"class_weights": "balanced"}}),
        ("names", {"model": {"config": {"model_type": "ngrams"}}}),
        ("anchors", {"data": {"group_column": "value"}}),
        ("rewrites", {"data": {"group_by_length": True}}),
    ],
)
def test_what_needs_all_rows_before_step_1_is_refused_in_blocks_and_chosen_against_by_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sections: Settings
) -> None:
    train = write_kind(tmp_path, "jsonl", TEXTS)
    refused(lambda: load_rows(tmp_path, train, name, "blocks", **deepcopy(sections)), named="data.order")
    monkeypatch.setattr(sharded_rows, "ROWS_AT_ONCE_UP_TO_BYTES", 1)
    assert load_rows(tmp_path, train, name, "auto", **deepcopy(sections)).shards is None
    assert load_rows(tmp_path, train, name, "auto").shards is not None


@pytest.mark.parametrize("setting", ["target_suffix", "translation_column"])
def test_aligned_lines_and_columns_of_translations_are_refused_in_blocks(tmp_path: Path, setting: str) -> None:
    train = write_kind(tmp_path, "jsonl", TEXTS)
    with pytest.raises(SettingError, match=setting) as caught:
        load_rows(tmp_path, train, "rewrites", "blocks", data={setting: "other"})
    assert caught.value.settings == ("data.order",)
