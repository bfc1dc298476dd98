"""Token shards of others (`.bin`) are recognised, checked, cut at a document, and kept as raw ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel_train.data.text.corpus import prepare_text
from accel_train.data.text.tokenizers import BYTE_SEPARATOR_ID
from accel_train.data.text.tokens import WindowDataset, inspect_token_file
from accel_train.recipe.schema import Recipe
from tests.support.runs import refused, write_file

MakeRecipe = Callable[..., Recipe]


def stream(windows: WindowDataset | None) -> list[int]:
    return np.fromfile(windows.path, windows.dtype).tolist()


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
    written = inspect_token_file(corpus.train.path)
    assert written.offset_bytes == 0
    assert written.map().tolist() == tokens * 2
    again = prepare_text(text_recipe(str(corpus.train.path), eval_fraction=0), progress=False)
    assert stream(again.train) == tokens * 2


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
