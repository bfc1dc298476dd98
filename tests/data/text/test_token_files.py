"""Token shards of others (`.bin`) are recognised, checked, cut at a document, and kept as raw ones."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.data.text.corpus import prepare_text
from accel_train.data.text.tokenizers import BYTE_SEPARATOR_ID
from accel_train.data.text.tokens import WindowDataset
from accel_train.recipe.schema import Recipe
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.runs import refused, write_file

MakeRecipe = Callable[..., Recipe]


def stream(windows: WindowDataset | None) -> list[int]:
    assert windows is not None
    return windows.stream.rows(np.zeros(1, np.int64), windows.num_tokens)[0].tolist()


def write_tokens(name: str, tokens: list[int], *, header: tuple[int, int] | None = None, dtype: str = "<u2") -> str:
    start = np.zeros(256 if header else 0, "<i4")
    if header:
        start[:3] = (*header, len(tokens))
    write_file(name, start.tobytes() + np.array(tokens, dtype).tobytes())
    return name


@pytest.mark.parametrize(
    ("header", "dtype"),
    [(None, "<u2"), ((20240520, 1), "<u2"), ((20240801, 7), "<u4")],
    ids=["raw", "llm.c", "llama 3"],
)
def test_token_shards_are_read_with_and_without_header(
    text_recipe: MakeRecipe, header: tuple[int, int] | None, dtype: str
) -> None:
    tokens = [BYTE_SEPARATOR_ID, *b"hello world", BYTE_SEPARATOR_ID, *b"second document"]
    names = tuple(write_tokens(f"{n}.bin", tokens, header=header, dtype=dtype) for n in range(2))
    corpus = prepare_text(text_recipe(names, eval_fraction=0), progress=False)
    assert stream(corpus.train) == tokens * 2
    assert corpus.facts.num_documents == 4
    assert corpus.facts.train_bytes is corpus.facts.eval_bytes is corpus.facts.xz_bits_per_byte is None
    assert corpus.train.stream.files == tuple(Path(name) for name in names)
    assert corpus.facts.cache_folder is None
    assert [path.name for path in Path("cache").rglob("*.bin")] == [], "no token is copied"


@pytest.mark.parametrize(
    ("separators", "cut", "note"),
    [((0, 70, 85), 85, "beginning of a document"), ((0, 76), 76, "beginning"), ((0, 20), 80, "not at a separator")],
)
def test_the_held_out_tail_of_tokens_begins_at_the_nearest_document(
    text_recipe: MakeRecipe, separators: tuple[int, ...], cut: int, note: str
) -> None:
    tokens = [BYTE_SEPARATOR_ID if n in separators else n for n in range(100)]
    names = (write_tokens("a.bin", tokens[:78]), write_tokens("b.bin", tokens[78:]))
    corpus = prepare_text(text_recipe(names, eval_fraction=0.2), progress=False)
    assert stream(corpus.train) == tokens[:cut]
    assert stream(corpus.eval) == tokens[cut:]
    assert note in corpus.facts.notes[0]
    assert f"the last {100 - cut} tokens" in corpus.facts.notes[0]


def test_separate_evaluation_shards_are_taken_whole(text_recipe: MakeRecipe) -> None:
    train, held_out = write_tokens("a.bin", [1] * 50), write_tokens("b.bin", [2] * 30)
    corpus = prepare_text(text_recipe(train, eval=held_out), progress=False)
    assert stream(corpus.train) == [1] * 50
    assert stream(corpus.eval) == [2] * 30


def test_tokens_beyond_the_vocabulary_are_named_by_file_and_position(text_recipe: MakeRecipe) -> None:
    names = (write_tokens("a.bin", [5] * 50), write_tokens("b.bin", [1, 2, 257, 3]))
    refused(prepare_text, text_recipe(names), progress=False, named="b.bin: token 257|position 2|vocabulary size 257")


def test_incomplete_token_shards_are_refused(text_recipe: MakeRecipe) -> None:
    write_file("odd.bin", b"\0" * 33)
    refused(prepare_text, text_recipe("odd.bin"), progress=False, named="odd.bin: its size in bytes, 33,|uint16")
    path = Path(write_tokens("cut.bin", [1] * 50, header=(20240520, 1)))
    path.write_bytes(path.read_bytes()[:-2])
    named = "cut.bin: |50 tokens, 1124 bytes|1122 bytes"
    refused(prepare_text, text_recipe(str(path)), progress=False, named=named)


def test_no_tokenizer_is_trained_on_tokens(text_recipe: MakeRecipe) -> None:
    path = write_tokens("a.bin", [1] * 50)
    recipe = text_recipe(path, tokenizer={"train_bpe": {"vocab_size": 300}})
    refused(prepare_text, recipe, progress=False, named="train_bpe needs text|data.train")


def write_index(path: Path, code: int, lengths: list[int], places: list[int], documents: list[int]) -> None:
    """Write Megatron's index by its published layout."""
    path.write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(places)}q", *places)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def write_megatron(documents: list[list[int]], dtype: str = "<i4", code: int = 4) -> str:
    """Write documents as Megatron does, one of them in two sequences, and the first one last in the file."""
    sequences = [*documents[:1], documents[1][:2], documents[1][2:], *documents[2:]]
    size, order = np.dtype(dtype).itemsize, [*range(1, len(sequences)), 0]
    places = dict(zip(order, np.cumsum([0, *(size * len(sequences[each]) for each in order)]).tolist()))
    Path("m.bin").write_bytes(b"".join(np.array(sequences[each], dtype).tobytes() for each in order))
    starts = [0, 1, *range(3, len(sequences) + 1)]
    write_index(Path("m.idx"), code, [*map(len, sequences)], [places[n] for n in range(len(sequences))], starts)
    return "m.bin"


def write_datatrove(documents: list[list[int]], dtype: str = "<u2") -> str:
    tokens = np.concatenate(documents).astype(dtype)
    tokens.tofile("d.ds")
    np.cumsum([len(each) for each in documents]).astype("<u8").tofile("d.ds.index")
    Path("d.ds.metadata").write_text(f"gpt2|{tokens.itemsize}\n{len(tokens)}\n{len(tokens)} T")
    return "d.ds"


def write_mds(samples: list[list[int]], encoding: str, dtype: str, others: bool = False) -> str:
    """Write a folder of two shards as StreamingDataset's MDSWriter does."""
    shards = []
    for number, part in enumerate((samples[:2], samples[2:])):
        rows = []
        for sample in part:
            values = np.array(sample, dtype).tobytes()
            if encoding.startswith("ndarray") and encoding.count(":") == 1:
                width = 0 if len(sample) < 256 else 1
                values = bytes([1 << 2 | width]) + len(sample).to_bytes(2**width, "little") + values
            sizes = struct.pack("<I", len(values)) if encoding.count(":") < 2 else b""
            rows.append(struct.pack("<I", 3) + sizes + b"abc" + bytes(8) + values if others else sizes + values)
        start = 8 + 4 * len(rows)
        offsets = start + np.cumsum([0, *map(len, rows)])
        content = struct.pack("<I", len(rows)) + offsets.astype("<u4").tobytes() + b"".join(rows)
        name = f"shard.{number:05d}.mds"
        write_file(f"mds/{name}", content)
        fixed = len(samples[0]) * np.dtype(dtype).itemsize if encoding.count(":") == 2 else None
        shards.append(
            {
                "column_names": ["name", "score", "tokens"] if others else ["tokens"],
                "column_encodings": ["str", "float64", encoding] if others else [encoding],
                "column_sizes": [None, 8, fixed] if others else [fixed],
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "samples": len(rows),
                "version": 2,
                "zip_data": None,
            }
        )
    write_file("mds/index.json", json.dumps({"version": 2, "shards": shards}))
    return "mds"


DOCUMENTS = [[BYTE_SEPARATOR_ID, *range(n, n + 4 + n)] for n in range(9)]
TOKENS = [token for document in DOCUMENTS for token in document]
LONG = [list(range(200)), [7] * 256, [*range(250), *range(250)], [5]]


@pytest.mark.parametrize(
    ("write", "documents"),
    [
        (lambda: write_tokens("n.bin", TOKENS), DOCUMENTS),
        (lambda: write_tokens("l.bin", TOKENS, header=(20240801, 7), dtype="<u4"), DOCUMENTS),
        (lambda: write_megatron(DOCUMENTS), DOCUMENTS),
        (lambda: write_megatron(DOCUMENTS, "<u2", 8), DOCUMENTS),
        (lambda: write_datatrove(DOCUMENTS), DOCUMENTS),
        (lambda: write_datatrove(DOCUMENTS, "<u4"), DOCUMENTS),
        (lambda: write_mds(DOCUMENTS, "ndarray:uint16", "<u2"), DOCUMENTS),
        (lambda: write_mds(DOCUMENTS, "ndarray:int32", "<i4", others=True), DOCUMENTS),
        (lambda: write_mds(DOCUMENTS, "bytes", "<i8"), DOCUMENTS),
        (lambda: write_mds(LONG, "ndarray:uint16", "<u2"), LONG),
        (lambda: write_mds([LONG[1]] * 3, "ndarray:uint16:256", "<u2"), [LONG[1]] * 3),
        (lambda: write_mds([LONG[1]] * 3, "ndarray:uint16:256", "<u2", others=True), [LONG[1]] * 3),
    ],
)
def test_each_format_gives_the_same_windows_without_a_copy(
    text_recipe: MakeRecipe, write: Callable[[], str], documents: list[list[int]]
) -> None:
    tokens = [token for document in documents for token in document]
    corpus = prepare_text(text_recipe(write(), eval_fraction=0, sequence_length=6), progress=False)
    padded = [*tokens, *[-1] * 6]
    expected = [padded[start : start + 7] for start in range(0, len(tokens) - 1, 6)]
    assert corpus.train.__getitems__(range(len(corpus.train))).tolist() == expected
    shuffled = [4, 0, len(expected) - 1, 2, 4]
    assert corpus.train.__getitems__(shuffled).tolist() == [expected[number] for number in shuffled]
    assert not [path for path in Path("cache").rglob("*") if path.suffix in (".bin", ".ds", ".mds")]
    pickled = pickle.dumps(corpus.train)
    assert pickle.loads(pickled)[1].tolist() == expected[1]  # noqa: S301 (our own bytes)


def refusal(text_recipe: MakeRecipe, name: str, named: str, **data: Any) -> None:
    refused(prepare_text, text_recipe(name, eval_fraction=0, **data), progress=False, named=named)


def cut(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-2])


def test_broken_indexes_of_megatron_are_refused(text_recipe: MakeRecipe) -> None:
    name = write_megatron(DOCUMENTS)
    index = Path("m.idx")
    good, tokens = index.read_bytes(), Path(name).read_bytes()
    for content, named in (
        (good[:-4], "m.idx: |copy it again"),
        (b"TNTIDX\0\0\0" + good[9:], "m.idx: |MMIDIDX"),
        (good[:9] + struct.pack(">Q", 1) + good[17:], "m.idx: |big-endian"),
        (good[:17] + b"\7" + good[18:], "m.idx: |type code 7"),
    ):
        index.write_bytes(content)
        refusal(text_recipe, name, named)
    index.write_bytes(good)
    cut(name)
    refusal(text_recipe, name, f"m.bin: |{len(tokens)} bytes|{len(tokens) - 2}")
    write_file("x_text_document.bin", tokens)
    refusal(text_recipe, "x_text_document.bin", "x_text_document.bin: |x_text_document.idx")


def test_broken_files_of_datatrove_are_refused(text_recipe: MakeRecipe) -> None:
    name = write_datatrove(DOCUMENTS)
    cut(name)
    refusal(text_recipe, name, f"d.ds: |{len(TOKENS)} tokens|{len(TOKENS) - 1}")
    write_datatrove(DOCUMENTS)
    Path("d.ds.metadata").unlink()
    assert stream(prepare_text(text_recipe(name, eval_fraction=0), progress=False).train) == TOKENS
    Path("d.ds.index").unlink()
    refusal(text_recipe, name, "d.ds: |d.ds.metadata")


def test_broken_folders_of_mosaic_are_refused(text_recipe: MakeRecipe) -> None:
    name = write_mds(DOCUMENTS, "ndarray:uint16", "<u2")
    refusal(text_recipe, write_mds(DOCUMENTS, "ndarray:float32", "<f4"), "index.json: |float32")
    write_mds(DOCUMENTS, "ndarray:uint16", "<u2")
    cut("mds/shard.00001.mds")
    refusal(text_recipe, name, "shard.00001.mds: ")
    write_mds(DOCUMENTS, "ndarray:uint16", "<u2")
    Path("mds/shard.00001.mds").rename("mds/shard.00001.mds.zstd")
    refusal(text_recipe, name, "shard.00001.mds.zstd is compressed")
    Path("mds/shard.00001.mds.zstd").unlink()
    Path("mds/index.json").unlink()
    refusal(text_recipe, name, "shard.00000.mds: |index.json")


def test_big_endian_files_are_refused(text_recipe: MakeRecipe) -> None:
    write_file("h.bin", np.array([20240520, 1, 4], ">i4").tobytes() + bytes(1020))
    refusal(text_recipe, "h.bin", "h.bin: |big-endian")
    refusal(text_recipe, write_tokens("r.bin", TOKENS, dtype=">u2"), "r.bin: token 512 at position 3|big-endian")


def test_an_index_and_not_the_separator_says_where_documents_begin(text_recipe: MakeRecipe) -> None:
    documents = [[1, 2, 3], [BYTE_SEPARATOR_ID, 4], [5, 6, 7, 8, 9, BYTE_SEPARATOR_ID]]
    for name in (write_datatrove(documents), write_megatron(documents)):
        recipe = text_recipe(name, eval_fraction=0, sequence_length=5)
        with_mask = recipe.model_copy(update={"data": recipe.data.model_copy(update={"mask_documents": True})})
        data = CausalLM().load_data(with_mask, progress=False)
        batch = data.collate([data.train[0], data.train[1]])
        assert batch["input_ids"].tolist() == [[1, 2, 3, 256, 4], [5, 6, 7, 8, 9]]
        assert batch["labels"].tolist() == [[2, 3, 256, 4, 5], [6, 7, 8, 9, 256]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
        assert batch["document_lengths"][:, :2].tolist() == [[3, 2], [5, 0]]
        assert data.facts.num_documents == 3
        unmasked = prepare_text(recipe, progress=False).train
        assert unmasked[0].tolist() == [1, 2, 3, 256, 4, 5]


def test_a_tail_of_documents_in_an_index_begins_at_one(text_recipe: MakeRecipe) -> None:
    name = write_datatrove([[1] * 60, [2] * 16, [3] * 24])
    corpus = prepare_text(text_recipe(name, eval_fraction=0.2), progress=False)
    assert stream(corpus.eval) == [3] * 24
    assert corpus.facts.num_eval_documents == 1
    assert corpus.facts.num_documents == 3
    assert corpus.facts.notes[1] == "the metadata of the token files name the tokenizer gpt2"
