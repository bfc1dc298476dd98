"""tiktoken as an encoder of documents, where its ids are those of the tokenizer (`faster_encoder`).

The tokenizers library merges the pair of tokens that comes first in the list of merges. tiktoken joins the neighbors
whose bytes are the token with the lowest id. Ids are equal if

1. both libraries split text into equal words,
2. each token that tiktoken knows is the encoding of its own bytes, and
3. ids are in the order of merges.

Proof: let both be in equal states, and let two neighbors join to the bytes of a token. No merge has crossed the
borders of these bytes, so the same merges happen to the bytes alone. By 2, the last of these merges joins the two
neighbors. So both have the same candidates, by 3 in the same order. Of equal candidates, both take the leftmost.

2 and 3 are computed here. The tests check 1 for every character with the versions of constraints.txt. Other versions
may know another Unicode, so ids are also compared before use: of each character between others, and of a sample.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from accel_train.core.json_io import parse_json
from accel_train.core.state import Choice
from accel_train.data.text.tokenizers import Encode, TextTokenizer, TokenIds, encode_bytes

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# cl100k has the same pattern.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_PATTERNS = {
    '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}': _GPT2,
    f'{{"type": "Sequence", "pretokenizers": [{{"type": "Split", "pattern": {{"Regex": {json.dumps(_LLAMA3)}}}, '
    '"behavior": "Isolated", "invert": false}, {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, '
    '"use_regex": false}]}': _LLAMA3,
}
"""Pattern that splits text into words, by the pre-tokenizer in tokenizer.json."""
_HARD = (
    "I'm you'LL 'Re'S'ſt 12345 1a2b ½²x \t\n\r\n \r x\x85\u2028\u3000\u200b\ufeff\0  世界 e\u0301 👩‍👩‍👧🇩🇪 "
    "aaaaaaaaaaaaa abababababa              \n\n\n\n\n ========= ééééééééé 世世世世世\r\r\r\n\n\n"
)
"""Text on which tokenizers differ most: contractions, digits, spaces, joined signs, and repetition."""
# For a short text, the comparison costs more than it saves.
_BATCHES_BEFORE_CHOICE = 2

Batch = TypeVar("Batch", bound=Sequence[tuple[Any, ...]])


def encode_ahead(
    tokenizer: TextTokenizer, batches: Iterable[Batch], *, progress: bool
) -> Iterator[tuple[Batch, list[TokenIds]]]:
    """Yield each batch of texts with its tokens. Other threads encode the next batches meanwhile.

    The text of an item comes first. The tokenizers library uses all cores for a batch, and one batch alone leaves cores
    idle at its end. tiktoken takes a batch for each core: its own threads take a third longer.
    """
    encode, started = tokenizer.encode, list[Future[tuple[Batch, list[TokenIds]]]]()
    num_cores, num_ahead = os.cpu_count() or 1, 2

    def encode_batch(batch: Batch) -> tuple[Batch, list[TokenIds]]:
        return batch, encode([text for text, *_ in batch])

    # A tokenizer written in Python may not be safe to use from two threads.
    with ThreadPoolExecutor(max(2, num_cores) if tokenizer.tokenizer.is_fast else 1) as threads:
        for index, batch in enumerate(batches):
            if index == _BATCHES_BEFORE_CHOICE and encode is not encode_bytes:
                choice = faster_encoder(tokenizer, batch[0][0])
                if choice.value is not encode:
                    encode, num_ahead = choice.value, max(2, num_cores)
                if progress:
                    tqdm.write(f"tokenizing {choice.reason}", file=sys.stderr)
            started.append(threads.submit(encode_batch, batch))
            if len(started) > num_ahead:
                yield started.pop(0).result()
        for future in started:
            yield future.result()


def faster_encoder(tokenizer: TextTokenizer, sample: str) -> Choice[Encode]:
    """Return tiktoken's encoding of documents if its ids are equal, or the tokenizer's own, with the reason.

    `sample` is text of the corpus. Both encode it.
    """
    # Hangul, surrogates, and private use do not change any more.
    characters = map(chr, (*range(0xAC00), *range(0xF900, 0x20000)))
    texts = [sample, _HARD, "".join(f"a{it}1{it}!" for it in characters), *tokenizer.tokenizer.get_added_vocab()]
    faster = _tiktoken_encoder(tokenizer)
    if isinstance(faster, str):
        return Choice(tokenizer.encode, f"without tiktoken: {faster}")
    if all(map(np.array_equal, tokenizer.encode(texts), faster(texts))):
        return Choice(faster, "with tiktoken: equal ids, by the order of merges and on a sample of this text")
    return Choice(tokenizer.encode, "without tiktoken: its ids differ on a sample")


def _tiktoken_encoder(tokenizer: TextTokenizer) -> Encode | str:
    """Return the encoding with tiktoken, or why its ids are not known to be equal."""
    from tokenizers import Tokenizer, models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer.tokenizer, "backend_tokenizer", None)
    state = parse_json(backend.to_str()) if backend else {}
    pattern = _PATTERNS.get(json.dumps(state.get("pre_tokenizer")))
    if pattern is None:
        return "text is split by other rules than those of GPT-2 and Llama 3"
    if state["normalizer"]:
        return "a normalizer changes text"
    if not all(token["special"] for token in state["added_tokens"]):
        return "added tokens occur in text"
    model = state["model"]
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = model["vocab"]
    odd = map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    if model["type"] != "BPE" or any(odd) or byte_of.keys() - vocabulary.keys():
        return "it is not a BPE of bytes"
    merges = [(left, right) for left, right in model["merges"]]
    order = [vocabulary[left + right] for left, right in merges]
    if order != sorted(order):
        return "ids are not in the order of merges"
    tokens = [token for token in vocabulary if set(token) <= byte_of.keys()]
    lengths = list(map(len, Tokenizer(models.BPE(vocabulary, merges)).encode_batch_fast(tokens)))
    # A word that is a token becomes this token, though merges may not form it. tiktoken does so too.
    takes_words = model["ignore_merges"]
    if takes_words and 2 in lengths:
        return "two tokens make a third without a merge"
    ranks = {
        bytes(map(byte_of.__getitem__, token)): vocabulary[token]
        for token, length in zip(tokens, lengths)
        if length == 1 or takes_words
    }
    if tokenizer.separator_id in ranks.values():
        return "text can contain the separator"
    try:
        from tiktoken import Encoding
    except ImportError:
        return "pip install 'accel-train[tiktoken]' makes it faster"
    encoding = Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(texts: Sequence[str]) -> list[TokenIds]:
        return [np.array(encoding.encode_ordinary(text), np.uint32) for text in texts]

    return encode
