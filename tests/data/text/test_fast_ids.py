"""tiktoken encodes documents where its ids are those of the tokenizer, and nowhere else."""

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from accel_train.data.text import encode, fast_ids
from accel_train.data.text.corpus import prepare_text
from accel_train.data.text.documents import cut_text
from accel_train.data.text.fast_ids import faster_encoder
from accel_train.data.text.tokenizers import SEPARATOR, TextTokenizer, prepare_tokenizer, train_bpe
from accel_train.recipe.schema import Recipe
from tests.support.runs import TESTS, write_file
from tests.support.wording import assert_golden

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
CODE = "\n".join(file.read_text() for file in sorted((TESTS / "data").rglob("*.py")))
DOCUMENTS = [
    CODE[:60_000],
    "",
    "四月は君の嘘。これは日本語の文章です。한국어 문장도 있습니다. 中文文本在这里。" * 40,
    "👩‍👩‍👧 👍🏽 🇩🇪🇫🇷 e\u0301 \ufeff\u200b ½ ² Ⅷ ٣٤ ſt K" * 20,
    " " * 5_000 + "x" + " " * 777 + "\t\t \n \n" + " " * 3,
    "line\r\nline\r\n\r\n\rline\n\r" * 50,
    f"{SEPARATOR} a{SEPARATOR}{SEPARATOR}b <|begin_of_text|></s> it's IT'S you'LL 'ſ 1234567",
    "a" * 5_000 + "ab" * 5_000 + "=" * 3_000 + "\n" * 3_000,
    "\0\x01\x7f\x85\u2028\u3000\u00a0\u180e\ufffd",
]
ALPHABET = list(bytes_to_unicode().values())


def splitting(name: str) -> Any:
    """The pre-tokenizer of GPT-2, or of Llama 3."""
    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def bpe(merges: list[tuple[str, str]], splits: str = "gpt2", **settings: Any) -> Tokenizer:
    """A byte-level BPE with these merges. The separator is the last token."""
    tokens = dict.fromkeys([*ALPHABET, *map("".join, merges)])
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges, **settings))
    backend.pre_tokenizer, backend.decoder = splitting(splits), decoders.ByteLevel()
    return backend


def wrapped(backend: Tokenizer, separator: str = SEPARATOR) -> TextTokenizer:
    return prepare_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=separator))


def trained(splits: str) -> TextTokenizer:
    if splits == "gpt2":
        return prepare_tokenizer(train_bpe(DOCUMENTS, 1500))
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = splitting(splits)
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=ALPHABET, show_progress=False)
    backend.train_from_iterator(DOCUMENTS, trainer)
    return wrapped(backend)


def equal(tokenizer: TextTokenizer, encode: Callable[..., Any], texts: list[str]) -> bool:
    return all(map(np.array_equal, tokenizer.encode(texts), encode(texts)))


@pytest.mark.parametrize("splits", ["gpt2", "llama3"])
def test_tiktoken_gives_the_ids_of_the_tokenizer_on_every_kind_of_text(splits: str) -> None:
    tokenizer = trained(splits)
    choice = faster_encoder(tokenizer, DOCUMENTS[0])
    assert choice.value is not tokenizer.encode
    assert_golden(choice.reason, splits)
    assert equal(tokenizer, choice.value, DOCUMENTS)
    assert sum(map(len, choice.value(DOCUMENTS))) < sum(map(len, DOCUMENTS)) / 2
    assert {ids.dtype for ids in choice.value(DOCUMENTS)} == {np.dtype(np.uint32)}
    assert tokenizer.separator_id not in np.concatenate(choice.value(DOCUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize("splits", ["gpt2", "llama3"])
def test_both_libraries_end_a_word_at_the_same_characters(splits: str) -> None:
    """Every byte merges with the letter, digit, or sign beside it, so the ids show between which of them words end."""
    pairs = [pair for byte in ALPHABET for pair in (("a", byte), (byte, "1"), (byte, "!"))]
    tokenizer = wrapped(bpe(list(dict.fromkeys(pairs)), splits))
    encode = fast_ids._tiktoken_encoder(tokenizer)
    assert callable(encode)
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    blocks = [
        "".join(f"a{it}1{it}!{it}" for it in characters[start : start + 4096])
        for start in range(0, len(characters), 4096)
    ]
    assert equal(tokenizer, encode, blocks)
    assert [len(ids) for ids in encode(["aé", "a1"])] == [2, 2], "one word of three bytes, and two words"


def test_merges_in_any_order_give_equal_ids() -> None:
    """Random merges form tokens in odd orders: some are never reached, and some overlap themselves."""
    differ = 0
    for seed in range(150):
        choose = random.Random(seed)
        tokens, merges = list("abc"), list[tuple[str, str]]()
        while len(merges) < 25:
            pair = (choose.choice(tokens), choose.choice(tokens))
            if "".join(pair) not in tokens:
                merges.append(pair)
                tokens.append("".join(pair))
        tokenizer = wrapped(bpe(merges))
        texts = ["".join(choose.choices("abc", k=40)) for _ in range(60)]
        encode = fast_ids._tiktoken_encoder(tokenizer)
        assert callable(encode)
        assert equal(tokenizer, encode, texts), seed
        differ += any(len(ids) > 1 for ids in tokenizer.encode(tokens))
    assert differ > 50, "merges that never apply must be among them"


def json_of(change: Callable[[Any], None]) -> TextTokenizer:
    """A trained tokenizer after a change of its tokenizer.json."""
    state = json.loads(trained("gpt2").tokenizer.backend_tokenizer.to_str())
    change(state)
    return wrapped(Tokenizer.from_str(json.dumps(state)))


def with_normalizer() -> TextTokenizer:
    backend = bpe([("a", "b")])
    backend.normalizer = normalizers.NFC()
    return wrapped(backend)


def with_digits() -> TextTokenizer:
    backend = bpe([("a", "b")])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return wrapped(backend)


def with_added_token() -> TextTokenizer:
    backend = bpe([("a", "b")])
    backend.add_tokens(["def"])
    return wrapped(backend)


def with_late_merge_first() -> TextTokenizer:
    return json_of(lambda state: state["model"]["merges"].reverse())


def with_suffix() -> TextTokenizer:
    return wrapped(bpe([("a", "b")], end_of_word_suffix="</w>"))


def with_missing_bytes() -> TextTokenizer:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.pre_tokenizer = splitting("gpt2")
    return wrapped(backend)


def with_unmerged_token() -> TextTokenizer:
    """Its word abc is a token, which no merge forms. tiktoken would form it inside of longer words."""
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    backend = bpe(merges)
    state = json.loads(backend.to_str())
    state["model"] |= {"merges": [["a", "b"], ["b", "c"]], "ignore_merges": True}
    return wrapped(Tokenizer.from_str(json.dumps(state)))


def with_separator_as_a_word() -> TextTokenizer:
    return wrapped(bpe([("a", "b")]), separator="ab")


def written_in_python() -> TextTokenizer:
    return prepare_tokenizer(ByT5Tokenizer())


@pytest.mark.parametrize(
    "make",
    [
        with_normalizer,
        with_digits,
        with_added_token,
        with_late_merge_first,
        with_suffix,
        with_missing_bytes,
        with_unmerged_token,
        with_separator_as_a_word,
        written_in_python,
    ],
)
def test_a_tokenizer_with_other_ids_keeps_its_own_encoding(make: Callable[[], TextTokenizer]) -> None:
    tokenizer = make()
    choice = faster_encoder(tokenizer, "some text")
    assert choice.value is tokenizer.encode
    assert_golden(choice.reason, make.__name__)


def test_other_ids_for_the_sample_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both libraries had another idea of a word."""
    monkeypatch.setattr(fast_ids, "_PATTERNS", dict.fromkeys(fast_ids._PATTERNS, r"\s?\w+|\W+"))
    tokenizer = trained("gpt2")
    choice = faster_encoder(tokenizer, DOCUMENTS[0])
    assert choice.value is tokenizer.encode
    assert_golden(choice.reason)


def test_without_tiktoken_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizer = trained("gpt2")
    choice = faster_encoder(tokenizer, DOCUMENTS[0])
    assert choice.value is tokenizer.encode
    assert_golden(choice.reason)


def test_a_corpus_has_the_same_tokens_and_the_same_cache_with_tiktoken(
    text_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("gpt2").tokenizer.save_pretrained("tokenizer")
    rows = [
        {"text": text}
        for text in [*DOCUMENTS, "a lone surrogate: \ud800", *(f"{n} {CODE[n:][:900]}" for n in range(99))]
    ]
    write_file("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 9_000)
    monkeypatch.setattr(encode, "cut_text", partial(cut_text, limit=4_000))
    found = []
    for batches in (10**9, 2):
        monkeypatch.setattr(fast_ids, "_BATCHES_BEFORE_CHOICE", batches)
        recipe = text_recipe("a.jsonl", tokenizer="tokenizer", encoding_errors="replace", cache_dir=f"cache-{batches}")
        prepared = prepare_text(recipe, progress=True)
        files = [windows.stream.files[0].read_bytes() for windows in (prepared.train, prepared.eval) if windows]
        found.append((files, prepared.fingerprint, prepared.facts.record() | {"cache_folder": None}))
        told = capsys.readouterr().err
    assert_golden(told)
    assert found[0] == found[1]
    assert len(found[0][0][0]) > 100_000


def test_batches_come_in_order_while_others_are_encoded() -> None:
    batches = [[(f"{number} ", number), ("x" * choose, -1)] for number, choose in enumerate([90_000, 1, 40_000, 2, 3])]
    tokenizer = prepare_tokenizer(train_bpe(DOCUMENTS, 300))
    found = list(fast_ids.encode_ahead(tokenizer, batches, progress=False))
    assert [batch for batch, _ in found] == batches
    for batch, encoded in found:
        assert equal(tokenizer, lambda _, encoded=encoded: encoded, [text for text, _ in batch])


def test_an_error_while_text_is_encoded_ahead_ends_the_work() -> None:
    def batches() -> Any:
        yield [("a",)]
        raise ValueError("a.jsonl:2: not a row")

    with pytest.raises(ValueError, match="jsonl:2: not"):
        list(fast_ids.encode_ahead(prepare_tokenizer(train_bpe(DOCUMENTS, 300)), batches(), progress=False))
