"""Shards of raw text: every document is in one, whichever process makes it, and whenever one is killed."""

import csv
import json
import multiprocessing
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from accel_train.core.errors import DataError
from accel_train.data.sources import resolve_sources
from accel_train.data.text import encode as encode_module
from accel_train.data.text import shards as shards_module
from accel_train.data.text.corpus import TextCorpus, prepare_text
from accel_train.data.text.documents import read_documents
from accel_train.data.text.shards import ShardedWindows, Shards, cut
from accel_train.data.text.tokens import PADDING
from accel_train.recipe.data import WindowData
from accel_train.recipe.schema import Recipe
from tests.support.runs import write_file, write_jsonl
from tests.support.wording import raises_golden

MakeRecipe = Callable[..., Recipe]

ROWS = [f"{number}: " + "wörd " * (number * 37 % 90) for number in range(600)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 4096)


def write_parquet(name: str, rows: list[str]) -> str:
    parquet.write_table(arrow.table({"text": rows}), name, row_group_size=11)
    return name


def write_saved(name: str, rows: list[str]) -> str:
    import datasets

    datasets.Dataset.from_dict({"text": rows}).save_to_disk(name)
    return name


def write_rows(name: str, rows: list[str]) -> str:
    return str(write_jsonl(Path(name), ({"text": text} for text in rows)))


def write_many(name: str, rows: list[str]) -> str:
    for number, text in enumerate(rows):
        write_file(f"{name}/{number:04d}.txt", text)
    return name


def write_table(name: str, rows: list[str], encoding: str = "utf-8") -> str:
    with Path(name).open("w", encoding=encoding, newline="") as file:
        csv.writer(file, "excel-tab" if name.endswith(".tsv") else "excel").writerows(
            [["text"], *([row] for row in rows)]
        )
    return name


def write_json(name: str, rows: list[str]) -> str:
    Path(name).write_text(json.dumps([{"text": text} for text in rows]))
    return name


def write_wide(name: str, rows: list[str]) -> str:
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in rows)
    Path(name).write_text(lines, encoding=ENCODINGS.get(name, "utf-16"))
    return name


ENCODINGS = {"latin.jsonl": "latin-1", "gbk.jsonl": "gbk"}
"""Encodings that `data.encoding` names."""

SOURCES: dict[str, Callable[[str, list[str]], str]] = {
    "a.jsonl": write_rows,
    "a.parquet": write_parquet,
    "saved": write_saved,
    "folder": write_many,
    "a.csv": write_table,
    "a.tsv": write_table,
    "wide.csv": partial(write_table, encoding="utf-16"),
    "wide.jsonl": write_wide,
    "latin.jsonl": write_wide,
    "gbk.jsonl": write_wide,
    "a.json": write_json,
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_shards_have_every_document_of_a_source_once_and_in_order(name: str) -> None:
    rows = ROWS
    if name.endswith("csv"):
        rows = [text.replace("d ", 'd,\n"d" ', 9) for text in ROWS]
    elif name == "gbk.jsonl":
        rows = [text.replace("wörd", "世界") for text in ROWS]
    data = WindowData(train=SOURCES[name](name, rows), encoding=ENCODINGS.get(name, "auto"))
    sources = resolve_sources(data.train, data, key="data.train")
    whole = cut(sources, data, list)
    found = [[*map(read_documents, whole.sources_of(number), [data] * 10**6)] for number in range(len(whole))]
    texts = [[document.text for part in shard for document in part] for shard in found]
    assert [text for shard in texts for text in shard] == rows
    if name in ("gbk.jsonl", "a.json"):
        assert len(whole) == 1, "it stays whole"
    else:
        assert len(whole) > 10
        assert max(sum(len(text.encode()) for text in shard) for shard in texts) < 3 * 4096


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "cp1251"])
@pytest.mark.parametrize("sign", ["\n", " ", "ö", "\r\n"])
def test_one_long_text_is_cut_at_lines_at_words_or_at_characters(sign: str, encoding: str) -> None:
    wide = "\u0a0a\u010a\U0001f600" if "16" in encoding else "ö"
    text = "".join(f"{number}{wide}{sign}" for number in range(9000))
    if encoding == "cp1251":
        text = text.replace("ö", "ж")
    path = Path("long.txt")
    path.write_bytes(text.encode(encoding))
    data = WindowData(train=str(path), encoding="auto" if encoding == "utf-16" else encoding)
    whole = cut(resolve_sources(data.train, data, key="data.train"), data, list)
    pieces = [next(read_documents(next(whole.sources_of(number)), data)).text for number in range(len(whole))]
    assert "".join(pieces) == text
    assert len(pieces) == -(-len(text.encode(encoding)) // 4096)
    if sign != "ö":
        assert all(piece.endswith(sign) for piece in pieces)


@pytest.mark.parametrize(("name", "line"), [("a.jsonl", "b"), ("a.csv", "b"), ("a.csv", "b\n")])
def test_a_row_longer_than_a_shard_is_in_one(name: str, line: str) -> None:
    rows = ["a", line * 20_000, "c", "d" * 5000]
    data = WindowData(train=SOURCES[name](name, rows))
    whole = cut(resolve_sources(data.train, data, key="data.train"), data, list)
    found = [
        [each.text for part in whole.sources_of(n) for each in read_documents(part, data)] for n in range(len(whole))
    ]
    # A table is cut at the first record that ends after the size, and not at multiples of it.
    assert [shard for shard in found if shard] == [["a", rows[1]], ["c", rows[3]]]
    assert whole.rule == (4096 if name == "a.jsonl" else [4096, "records"]), "earlier versions kept a table whole"


def test_a_row_that_begins_at_any_byte_near_the_end_of_a_shard_is_in_one() -> None:
    # Rows of 63 bytes begin at each remainder of 4,096, also after the first shard.
    rows = [f"{number:06d}".ljust(50, "x") for number in range(4300)]
    data = WindowData(train=write_rows("a.jsonl", rows))
    assert len(Path("a.jsonl").read_bytes()) == 63 * len(rows)
    whole = cut(resolve_sources(data.train, data, key="data.train"), data, list)
    found = [
        each.text for n in range(len(whole)) for part in whole.sources_of(n) for each in read_documents(part, data)
    ]
    assert found == rows


def prepared(text_recipe: MakeRecipe, **settings: Any) -> TextCorpus:
    settings = {"order": "blocks", "sequence_length": 16, "eval_fraction": 0.05, **settings}
    return prepare_text(text_recipe(write_rows("a.jsonl", ROWS), **settings), progress=False)


def tokens_of(windows: ShardedWindows, number: int) -> list[int]:
    (count,) = windows.counts(np.array([number])).tolist()
    rows = windows.__getitems__([(number << 32) + index for index in range(count)])
    tokens = np.concatenate([*rows[:, :-1], rows[-1, -1:]]) if count else np.zeros(0, np.int64)
    return tokens[tokens != PADDING].tolist()


def test_the_shards_and_the_evaluation_data_have_every_document_once(text_recipe: MakeRecipe) -> None:
    corpus = prepared(text_recipe)
    windows: Any = corpus.train
    tokens = [token for number in range(len(windows.shards.cut)) for token in tokens_of(windows, number)]
    held: Any = corpus.eval
    tokens += held.stream.rows(np.zeros(1, np.int64), held.num_tokens)[0].tolist()
    documents: list[list[int]] = []
    for token in tokens:
        documents.append([]) if token == corpus.separator_id else documents[-1].append(token)
    assert Counter(corpus.tokenizer.decode(document) for document in documents) == Counter(ROWS)
    assert corpus.facts.num_eval_documents == 31
    assert corpus.facts.train_tokens == pytest.approx(len(tokens) - held.num_tokens, rel=0.2)


def test_only_the_held_out_documents_of_the_sample_and_their_copies_are_left_out(
    text_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "SAMPLE_BYTES", 4 * 4096)
    rows = [*ROWS, *ROWS[::-1]]
    recipe = text_recipe(write_rows("a.jsonl", rows), order="blocks", sequence_length=16, eval_fraction=0.3)
    corpus = prepare_text(recipe, progress=False)
    windows: Any = corpus.train
    tokens = [token for number in range(len(windows.shards.cut)) for token in tokens_of(windows, number)]
    documents: list[list[int]] = []
    for token in tokens:
        documents.append([]) if token == corpus.separator_id else documents[-1].append(token)
    counts = Counter(corpus.tokenizer.decode(document) for document in documents)
    left_out = [text for text in ROWS if not counts[text]]
    assert {*counts.values()} == {2}
    assert 0 < len(left_out) < 0.15 * len(ROWS), "0.3 of the sample alone"
    assert corpus.facts.num_eval_documents <= 2 * len(left_out)


def test_a_trained_tokenizer_and_the_shards_do_not_depend_on_the_seed_or_the_cache(text_recipe: MakeRecipe) -> None:
    digests = []
    for seed, cache_dir in ((0, "one"), (0, "two"), (5, "three")):
        recipe = text_recipe(
            write_rows("a.jsonl", ROWS),
            order="blocks",
            cache_dir=cache_dir,
            tokenizer={"train_bpe": {"vocab_size": 400}},
        )
        corpus = prepare_text(recipe.model_copy(update={"seed": seed}), progress=False)
        windows: Any = corpus.train
        numbers = [*range(len(windows.shards.cut))]
        random.Random(seed).shuffle(numbers)
        for number in numbers:
            assert windows.shards.make(number)
        files = sorted(Path(cache_dir).rglob("shards/*/*"))
        assert [file.suffix for file in files] == [".bin"] * len(numbers), "no lock, no file of a build"
        digests.append((corpus.fingerprint, [sha256(file.read_bytes()).hexdigest() for file in files]))
    assert digests[0] == digests[1] == digests[2]


def shards_of(text_recipe: MakeRecipe) -> Shards:
    windows: Any = prepared(text_recipe).train
    shards: Shards = windows.shards
    return shards


def test_a_damaged_shard_is_made_again(text_recipe: MakeRecipe) -> None:
    shards = shards_of(text_recipe)
    shards.make_all([3])
    path = shards.path(3)
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"?" + content[101:])
    shards.stream(3)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "bad", "encoding"),
    [
        ("bad.jsonl", b'{"text": 5}', "auto"),
        ("bad.csv", b"500,a,b", "auto"),
        ("quote.csv", b'500,"a" b', "auto"),
        ("latin.jsonl", b'{"text": "\x81"}', "cp1252"),
        ("wide.jsonl", '{"text": "'.encode("utf-16-be") + b"\xdc\x00", "utf-16-be"),
    ],
    ids=["jsonl", "csv", "quote", "cp1252", "utf-16-be"],
)
def test_a_row_that_cannot_be_read_is_named_when_its_shard_is_made(
    text_recipe: MakeRecipe, name: str, bad: bytes, encoding: str
) -> None:
    code = "utf-8" if encoding == "auto" else encoding
    path, newline = Path(name), "\n".encode(code)
    texts = [f"{number}," + text.split(":")[1] for number, text in enumerate(ROWS)]
    texts = ["id,text", *texts] if name.endswith("csv") else [json.dumps({"text": text}) for text in texts]
    lines = [text.encode(code) for text in texts]
    lines[500] = bad
    path.write_bytes(newline.join(lines))
    recipe = text_recipe(str(path), order="blocks", sequence_length=16, eval_fraction=0, encoding=encoding)
    windows: Any = prepare_text(recipe, progress=False).train
    starts, begin = windows.shards.cut.pieces[:, 2], len(newline.join(lines[:500]) + newline)
    at = int(np.searchsorted(starts, begin, "right")) - 1
    with raises_golden(DataError) as raised:
        windows.shards.make_all(range(at, at + 1))
    # Lines are counted from the first that begins in the part.
    first = next(n for n in range(500) if len(newline.join([*lines[:n], b""])) >= starts[at])
    assert f" from byte {starts[at]:,}" in str(raised.value)
    assert str(500 - first + 1) in re.findall(r":(\d+)|line (\d+)", str(raised.value))[0]


def test_a_source_that_changes_while_it_is_read_gives_no_shard(
    text_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shards_of(text_recipe)

    def encode(texts: Any) -> Any:
        with Path("a.jsonl").open("a") as file:
            file.write("\n")
        return shards.tokenizer.encode(texts)

    monkeypatch.setattr(Shards, "_encode", staticmethod(encode))
    with pytest.raises(DataError):
        shards.make(2)
    assert not shards.path(2).exists()


def test_a_hundred_kills_leave_no_half_shard_and_the_next_process_takes_over(text_recipe: MakeRecipe) -> None:
    shards = shards_of(text_recipe)
    numbers = [*range(len(shards.cut))]
    shards.make_all(numbers)
    whole = {number: shards.path(number).read_bytes() for number in numbers}
    generator, kills, half_done, taken_over = random.Random(1), 0, 0, 0
    context = multiprocessing.get_context("fork")

    def work(missing: list[int], calls_left: int) -> None:
        """Make shards, and die at the start of one of the calls that read, write, or publish tokens."""

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any, **named: Any) -> Any:
                nonlocal calls_left
                calls_left -= 1
                if calls_left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **named)

            return called

        for owner, name in (
            (os, "replace"),
            (shards_module, "sync"),
            (encode_module, "read_documents"),
            (Path, "unlink"),
        ):
            setattr(owner, name, dying(getattr(owner, name)))
        shards_module.ShardWriter.write = dying(shards_module.ShardWriter.write)  # type: ignore[method-assign]
        shards.make_all(missing)

    while kills < 100:
        for number in numbers:
            shards.path(number).unlink(missing_ok=True)
        while missing := [number for number in numbers if not shards.path(number).exists()]:
            workers = [context.Process(target=work, args=(missing, generator.randrange(1, 30))) for _ in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
                assert worker.exitcode in (0, -signal.SIGKILL)
                kills += worker.exitcode == -signal.SIGKILL
            left = [*shards.folder.rglob("*.building")]
            half_done += len(left)
            taken_over += sum(path.with_suffix(".bin").exists() for path in left)
            for number in numbers:
                if shards.path(number).exists():
                    assert shards.path(number).read_bytes() == whole[number]
    assert half_done >= 30, "killed, and nothing is half done"
    assert not taken_over, "what a killed process left became the shard"
