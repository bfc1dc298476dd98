"""Tokenizers round-trip, are the same each time, and let no document spell the separator."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Config, PreTrainedTokenizerFast

from accel_train.cli.main import main
from accel_train.data.text.documents import cut_text
from accel_train.data.text.tokenizers import (
    BYTE_SEPARATOR_ID,
    SEPARATOR,
    byte_tokenizer,
    check_tokenizer,
    document_encoder,
    encode_bytes,
    load_tokenizer,
    prepare_tokenizer,
    pretrained_tokenizer,
    separator_of,
    tokenizer_digest,
    train_bpe,
)
from accel_train.recipe.loader import load_recipe
from tests.support.runs import refused, write_corpus, write_recipe_file

TRICKY = f"héllo \0 世界 😀 {SEPARATOR}\r\n\t  x\n\n  def f(): return '{SEPARATOR}'  "
TEXTS = [f"def function_{n}(value):\n    return value + {n}\n\n\nclass Name{n}:\n    pass\n" for n in range(50)]


def test_byte_ids_are_the_bytes() -> None:
    tokenizer = byte_tokenizer()
    everything = "".join(map(chr, range(0x500))) + TRICKY
    expected = list(everything.encode())
    assert document_encoder(tokenizer, BYTE_SEPARATOR_ID)([everything])[0].tolist() == expected
    assert encode_bytes([everything])[0].tolist() == expected
    assert tokenizer.decode(expected) == everything
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == BYTE_SEPARATOR_ID


def test_the_byte_tokenizer_survives_saving() -> None:
    byte_tokenizer().save_pretrained(".")
    loaded = AutoTokenizer.from_pretrained(".")
    assert loaded("a ,b").input_ids == list(b"a ,b")
    assert loaded(SEPARATOR).input_ids == [BYTE_SEPARATOR_ID]
    assert loaded.decode(list(b"is n't , it")) == "is n't , it"
    assert tokenizer_digest(loaded) == tokenizer_digest(byte_tokenizer())


def test_a_trained_bpe_is_the_same_each_time_and_round_trips() -> None:
    first, second = train_bpe(TEXTS, 300), train_bpe(iter(TEXTS), 300)
    assert tokenizer_digest(first) == tokenizer_digest(second)
    assert tokenizer_digest(first) != tokenizer_digest(train_bpe(TEXTS, 301))
    assert len(first) == 300
    assert separator_of(first) == 0
    ids = document_encoder(first, 0)([TRICKY])[0]
    assert first.decode(ids) == TRICKY
    assert len(document_encoder(first, 0)([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def test_a_trained_bpe_survives_saving() -> None:
    trained = train_bpe(TEXTS, 300)
    trained.save_pretrained(".")
    loaded = pretrained_tokenizer(".", trust_remote_code=False)
    assert loaded.separator_id == 0
    assert loaded.digest == tokenizer_digest(trained)
    assert loaded.encode(TEXTS)[3].tolist() == document_encoder(trained, 0)(TEXTS)[3].tolist()


def test_bytes_and_bpe_never_read_the_separator_out_of_a_document() -> None:
    for tokenizer in (byte_tokenizer(), train_bpe([TRICKY] * 50, 400)):
        prepared = prepare_tokenizer(tokenizer)
        for ids in (*prepared.encode([TRICKY, SEPARATOR]), prepared.encode([SEPARATOR * 3])[0]):
            assert prepared.separator_id not in ids
        assert tokenizer(SEPARATOR).input_ids == [prepared.separator_id], "the user's tokenizer stays as it was"


def word_level(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary has the separator as an ordinary word: `encode_special_tokens`
    alone lets it pass.
    """
    words = ["<unk>", "</s>", "<", "/s>", "a", "b"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_a_separator_that_is_a_word_of_the_vocabulary_is_cut_in_two() -> None:
    encode = document_encoder(word_level(eos_token="</s>", unk_token="<unk>"), 1)
    assert [ids.tolist() for ids in encode(["a </s> b", "a b", "</s> </s>"])] == [[4, 2, 3, 5], [4, 5], [2, 3, 2, 3]]


def test_a_separator_that_also_means_unknown_is_refused() -> None:
    encode = document_encoder(word_level(eos_token="<unk>"), 0)
    refused(encode, ["a strange word"], named="id 0|'<unk>'")


def test_a_tokenizer_in_python_reads_documents_too() -> None:
    ByT5Tokenizer().save_pretrained(".")
    prepared = pretrained_tokenizer(".", trust_remote_code=False)
    assert not prepared.tokenizer.is_fast
    assert prepared.separator_id == 1
    assert prepared.encode(["ab"])[0].tolist() == [ord("a") + 3, ord("b") + 3]
    assert prepared.separator_id not in prepared.encode(["a</s>b"])[0]
    assert prepared.digest == pretrained_tokenizer(".", trust_remote_code=False).digest


def test_no_special_token_is_read_out_of_a_document() -> None:
    fast = train_bpe(TEXTS, 300)
    fast.add_special_tokens({"pad_token": "<pad>"})
    ids = document_encoder(fast, 0)(["a<pad>b"])[0]
    assert fast.pad_token_id not in ids
    assert fast.decode(ids) == "a<pad>b"
    assert document_encoder(ByT5Tokenizer(), 1)(["<pad>"])[0].tolist() == [byte + 3 for byte in b"<pad>"]


def test_truncation_and_padding_of_a_pretrained_tokenizer_do_not_touch_documents() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    whole = document_encoder(tokenizer, 0)([TEXTS[0] * 9])[0]
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=5000)
    assert document_encoder(tokenizer, 0)([TEXTS[0] * 9])[0].tolist() == whole.tolist()


def test_the_separator_is_eos_then_bos_then_sep_then_cls() -> None:
    assert separator_of(word_level(eos_token="</s>", bos_token="<")) == 1
    assert separator_of(word_level(bos_token="<", sep_token="a")) == 2
    assert separator_of(word_level(cls_token="a", sep_token="b")) == 5
    assert separator_of(word_level(cls_token="a")) == 4
    refused(separator_of, word_level(), named="eos, bos, sep or cls")


def test_a_tokenizer_that_cannot_be_loaded_is_refused_by_name() -> None:
    refused(load_tokenizer, "no-such-tokenizer", trust_remote_code=False, named="'no-such-tokenizer'|a folder")


def test_the_digest_sees_a_changed_vocabulary() -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer.add_tokens(["function"])
    assert tokenizer_digest(tokenizer) != before


def test_pieces_give_the_tokens_of_the_whole_document() -> None:
    text = "".join(TEXTS)
    pieces = list(cut_text(text, limit=700))
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert max(map(len, pieces)) <= 700
    encode = document_encoder(train_bpe(TEXTS, 400), 0)
    assert np.concatenate(encode(pieces)).tolist() == encode([text])[0].tolist()


@pytest.mark.parametrize("text", ["", "x", "x" * 10, "\n" * 30, " \n" * 20 + "x", "ab\ncd\n" * 9, "x" * 21])
def test_pieces_lose_nothing(text: str) -> None:
    pieces = list(cut_text(text, limit=10))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 10 for piece in pieces)


@pytest.fixture
def base() -> Path:
    """A pretrained model as far as a check goes that comes before its weights are read: configuration and tokenizer."""
    train_bpe(TEXTS, 300).save_pretrained("base")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=64, vocab_size=300, bos_token_id=0, eos_token_id=0)
    config.save_pretrained("base")
    return Path("base")


@pytest.mark.parametrize("task", ["causal-lm", "text-classification"])
@pytest.mark.parametrize("tokenizer", ["bytes", "{train_bpe: {vocab_size: 300}}", "other"])
def test_another_tokenizer_than_that_of_pretrained_weights_is_refused_unless_the_recipe_accepts_it(
    base: Path, capsys: pytest.CaptureFixture[str], tokenizer: str, task: str
) -> None:
    train_bpe(["quite another text, with words of its own"], 290).save_pretrained("other")
    chosen = "other" if tokenizer == "other" else tokenizer
    recipe = write_recipe_file(Path(), task=task)
    write_corpus(Path())
    asked = ["--model.pretrained", str(base), "--tokenizer", chosen]
    assert main(["run", str(recipe), *asked]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: tokenizer={chosen} ")
    assert f"model.pretrained={base}" in line
    assert "model.accept_new_tokenizer: true" in line
    check_tokenizer(load_recipe(recipe, arguments=[*asked, "--model.accept_new_tokenizer", "true"]))


@pytest.mark.parametrize("tokenizer", ["auto", "itself", "a copy with a token more"])
def test_the_tokenizer_of_pretrained_weights_is_taken_under_any_name(base: Path, tokenizer: str) -> None:
    own = load_tokenizer(str(base), trust_remote_code=False)
    own.add_tokens(["<|user|>"])
    own.save_pretrained("copy")
    name = {"auto": "auto", "itself": str(base)}.get(tokenizer, "copy")
    recipe = write_recipe_file(Path(), task="causal-lm")
    check_tokenizer(load_recipe(recipe, arguments=["--model.pretrained", str(base), "--tokenizer", name]))


def test_weights_without_a_tokenizer_of_their_own_take_any_that_is_not_trained_anew() -> None:
    GPT2Config(n_layer=1, n_head=2, n_embd=8).save_pretrained("base")
    recipe = write_recipe_file(Path(), task="causal-lm")
    asked = ["--model.pretrained", "base"]
    check_tokenizer(load_recipe(recipe, arguments=[*asked, "--tokenizer", "bytes"]))
    trained = load_recipe(recipe, arguments=[*asked, "--tokenizer", "{train_bpe: {vocab_size: 300}}"])
    refused(check_tokenizer, trained, named="new vocabulary")
