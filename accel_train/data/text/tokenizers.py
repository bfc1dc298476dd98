"""Tokenizers (bytes, a BPE trained here, or pretrained) and their encoding of documents.

Each has one separator token that begins every document. No document can contain it, because special tokens in a text
are encoded as plain characters.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from accel_train.core.errors import asks_for_own_code, setting_error
from accel_train.core.json_io import json_digest, parse_json
from accel_train.data.hub import known_config, without_hub
from accel_train.recipe.data import TrainedTokenizer
from accel_train.recipe.schema import Model, Recipe
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NO_TOKENIZER = "none"
"""Value of `tokenizer` for ids alone."""
# Separator of the tokenizers made here.
SEPARATOR = "<|endoftext|>"

BYTE_SEPARATOR_ID = 256

Row = TypeVar("Row")
TokenIds = NDArray[np.integer[Any]]
Encode = Callable[[Sequence[str]], list[TokenIds]]
"""Function from texts to the token ids of each text, without special tokens."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and its encoding of documents."""

    tokenizer: Any
    """A `PreTrainedTokenizerBase`. None: ids without a tokenizer."""
    separator_id: int
    """Token that begins every document. -1: none is known."""
    vocab_size: int
    """Number of embedding rows. Every id is below it."""
    encode: Encode
    digest: str
    """Hex digest of everything that determines the ids of a text."""


def pretrained_tokenizer(name: str, *, trust_remote_code: bool) -> TextTokenizer:
    """Return `bytes`, or the tokenizer with this name or folder.

    Raises:
        ValueError: the tokenizer cannot be loaded or has no token to separate documents.
    """
    if name == "bytes":
        return prepare_tokenizer(byte_tokenizer(), encode=encode_bytes)
    return prepare_tokenizer(load_tokenizer(name, trust_remote_code=trust_remote_code))


def named_tokenizer(recipe: Recipe, name: str) -> TextTokenizer:
    """Return the tokenizer with this name or folder, `bytes`, or `none` with the ids of the recipe's model.

    Raises:
        ValueError: the tokenizer cannot be loaded, or the recipe does not say how many ids there are.
    """
    model = recipe.model
    if name != NO_TOKENIZER:
        return pretrained_tokenizer(name, trust_remote_code=model.trust_remote_code)
    fields = model.config
    if fields is None:
        assert model.pretrained is not None
        from transformers import AutoConfig

        place = os.path.expanduser(model.pretrained)
        read = partial(AutoConfig.from_pretrained, place, trust_remote_code=model.trust_remote_code)
        fields = known_config(place, model.trust_remote_code, read).get_text_config().to_dict()
    vocab_size, separator_id = fields.get("vocab_size"), fields.get("eos_token_id")
    if vocab_size is None:
        problem = "nothing says how many ids there are. Set model.config.vocab_size, for example 50304"
        raise setting_error("tokenizer", NO_TOKENIZER, problem)
    separator_id = separator_id if isinstance(separator_id, int) else -1
    return TextTokenizer(None, separator_id, vocab_size, encode_bytes, json_digest([vocab_size, separator_id]))


def prepare_tokenizer(tokenizer: "PreTrainedTokenizerBase", *, encode: Encode | None = None) -> TextTokenizer:
    """Return a tokenizer with its separator, size, digest and encoding function (by default, its own)."""
    separator_id = separator_of(tokenizer)
    encode = encode or document_encoder(tokenizer, separator_id)
    return TextTokenizer(tokenizer, separator_id, vocab_size_of(tokenizer), encode, tokenizer_digest(tokenizer))


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer with the UTF-8 bytes as ids 0 to 255 and the separator as id 256. It round-trips any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = _wrap(backend)
    assert tokenizer.convert_tokens_to_ids(SEPARATOR) == BYTE_SEPARATOR_ID
    return tokenizer


def encode_bytes(texts: Sequence[str]) -> list[TokenIds]:
    """Return the UTF-8 bytes of texts: the ids of `byte_tokenizer`, but at gigabytes per second."""
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class KeptBPE(str):
    """A trained BPE as JSON. It takes the place of its training texts."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Return a byte-level BPE (as in GPT-2) trained on texts, or a kept BPE. The separator is token 0.

    Equal texts give equal tokenizers. A small corpus may support fewer than `vocab_size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    use_rust_threads()
    if isinstance(texts, KeptBPE):
        return _wrap(Tokenizer.from_str(texts))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return _wrap(backend)


def load_tokenizer(name: str, *, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """Return a pretrained tokenizer from a folder or by its name on the hub.

    Raises:
        ValueError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    place = os.path.expanduser(name)
    # Without it, transformers reads the configuration again.
    config = known_config(place, trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(place, config=config, trust_remote_code=trust_remote_code)
    # transformers raises OSError, ValueError, KeyError and others for a wrong name.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if asks_for_own_code(error):
            raise ValueError(
                f"tokenizer: {name!r} brings its own code. Read the code, and give --model.trust_remote_code true to "
                f"run it, or use another tokenizer (for example bytes)"
            ) from error
        raise ValueError(
            f"tokenizer: {name!r} cannot be loaded as a folder (seen from {os.getcwd()}) or as a "
            f"tokenizer of the hub: {reason}; other choices: bytes, or {{train_bpe: {{vocab_size: 4096}}}}"
            f"{without_hub(place)}"
        ) from error


def check_tokenizer(recipe: Recipe) -> None:
    """Check that the tokenizer's ids match the tokens that the pretrained weights were trained with.

    Raises:
        ValueError: the tokenizer is new or has another vocabulary, and the recipe does not accept this.
    """
    model, spec = recipe.model, recipe.tokenizer_in_use
    if model.pretrained is None or model.accept_new_tokenizer or spec in (model.pretrained, NO_TOKENIZER):
        return
    remedy = (
        "leave tokenizer out for the model's own, or set model.accept_new_tokenizer: true to train its embedding again"
    )
    if isinstance(spec, TrainedTokenizer):
        raise ValueError(
            f"tokenizer={show(spec)} trains a new vocabulary, and the weights of model.pretrained={model.pretrained} "
            f"know another; {remedy}"
        )
    own = vocabulary_of(model)
    tokenizer = byte_tokenizer() if spec == "bytes" else load_tokenizer(spec, trust_remote_code=model.trust_remote_code)
    new = tokenizer.get_vocab()
    if own is None or own.items() <= new.items() or new.items() <= own.items():
        return
    token = next(token for token in sorted(new, key=new.__getitem__) if own.get(token) != new[token])
    meant = f"is {own[token]}" if token in own else "is not there"
    raise ValueError(
        f"tokenizer={show(spec)} ({who_set(recipe, 'tokenizer')}) has another vocabulary than "
        f"model.pretrained={model.pretrained} was trained with: {token!r} is token {new[token]}, and {meant} in the "
        f"model's own; {remedy}"
    )


def vocabulary_of(model: Model) -> dict[str, int] | None:
    """Return the vocabulary that a pretrained model was trained with, or None if no tokenizer is stored with it."""
    assert model.pretrained is not None
    try:
        tokenizer = load_tokenizer(model.pretrained, trust_remote_code=model.trust_remote_code)
    except ValueError:
        return None
    own = tokenizer.get_vocab()
    # Without files, transformers makes up a tokenizer from the model type. It only has special tokens.
    return own if own.keys() - set(tokenizer.all_special_tokens) else None


def separator_of(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the token that begins every document: eos, or bos, or a BERT's sep or cls.

    Raises:
        ValueError: the tokenizer has none of these.
    """
    for role in ("eos", "bos", "sep", "cls"):
        token_id = getattr(tokenizer, f"{role}_token_id")
        if token_id is not None:
            return int(token_id)
    raise ValueError(
        f"tokenizer: {tokenizer.name_or_path!r} has no eos, bos, sep or cls token to separate documents; "
        "add an eos_token to it and save it, or use another"
    )


def vocab_size_of(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of embedding rows: the number of tokens, or the largest id + 1 if ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hex digest of everything that determines the ids of a text."""
    if tokenizer.is_fast:
        content = parse_json(tokenizer.backend_tokenizer.to_str())
        for state in ("truncation", "padding", "post_processor"):  # not used on documents
            content.pop(state, None)
    else:
        content = {
            "class": type(tokenizer).__qualname__,
            "added": sorted(map(str, tokenizer.added_tokens_decoder.items())),
        }
    content = [content, sorted(tokenizer.get_vocab().items()), separator_of(tokenizer)]
    return json_digest(content)


def document_encoder(tokenizer: "PreTrainedTokenizerBase", separator_id: int) -> Encode:
    """Return a function that encodes texts with a tokenizer. A fast tokenizer uses all cores.

    The function raises ValueError if the tokenizer gives the separator's id to ordinary text.
    """
    encode_raw = _fast_encoder(tokenizer) if tokenizer.is_fast else partial(_encode_slowly, tokenizer)
    separator = tokenizer.convert_ids_to_tokens(separator_id)

    def encode(texts: Sequence[str]) -> list[TokenIds]:
        encoded = encode_raw(texts)
        for index, ids in enumerate(encoded):
            if (ids == separator_id).any():
                encoded[index] = _encode_around(texts[index], separator, separator_id, encode_raw)
        return encoded

    return encode


def _fast_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encode:
    from tokenizers import Tokenizer

    use_rust_threads()
    # A copy, so that the user's tokenizer does not change.
    backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[TokenIds]:
        return [np.array(it.ids, np.uint32) for it in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


def _encode_slowly(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[TokenIds]:
    settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return [np.array(tokenizer(text, **settings)["input_ids"], np.uint32) for text in texts]


def _encode_around(text: str, separator: str, separator_id: int, encode_raw: Encode) -> TokenIds:
    """Encode a text that has the separator as an ordinary word, by splitting each occurrence in two."""
    first, *others = text.split(separator)
    heads = [first, *(separator[1:] + other for other in others)]
    parts = [*(head + separator[:1] for head in heads[:-1]), heads[-1]]
    ids = np.concatenate(encode_raw(parts))
    if (ids == separator_id).any():
        raise ValueError(
            f"tokenizer: it gives ordinary text the id {separator_id} of its separator {separator!r} (for characters "
            "that it does not know, perhaps); documents could not be separated, so use another tokenizer, for example "
            "bytes"
        )
    return ids


def _wrap(backend: "Tokenizer") -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SEPARATOR, clean_up_tokenization_spaces=False, model_max_length=int(1e30)
    )


def use_rust_threads() -> None:
    """Enable the threads of the tokenizers library.

    If unset, the library warns in each DataLoader worker that is forked later.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def plain_encoder(tokenizer: "PreTrainedTokenizerBase", **settings: Any) -> Callable[..., Any]:
    """Return the tokenizer, set to truncate, and to encode special tokens in a text as plain characters."""
    fixed = {"truncation": True, "split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    return partial(tokenizer, **fixed | settings)


def parts_to_tokenize(
    rows: Sequence[Row], size: int, unit: str, *, progress: bool
) -> Iterator[tuple[int, Sequence[Row]]]:
    """Yield parts of `size` rows, each with the index of its first row, under a progress bar in `unit`."""
    use_rust_threads()
    hidden = None if progress else True
    with tqdm(total=len(rows), desc="tokenizing", unit=f" {unit}", disable=hidden, leave=False, delay=1) as bar:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield start, part
            bar.update(len(part))
