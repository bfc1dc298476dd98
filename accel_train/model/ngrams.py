"""Text classifier for small data sets: a linear layer over the character and word n-grams of a text.

n-grams are weighted by their rarity. With a few thousand texts and no pretrained model, they are better features than a
network can learn (Wang and Manning 2012, Joulin et al. 2017).

Save and load the model like any transformers model. Saving copies this file next to the weights, so it must not import
the package.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

# Factors of 64-bit mixing (Steele et al. 2014), as signed numbers.
_FACTORS = (-7046029254386353131, -4658895280553007687)

# Pieces of the piecewise linear functions of shares, plus one.
_KNOTS = 9

# Texts whose n-grams are counted together.
_TEXTS_AT_ONCE = 64

# Stands for a place without a key. It is sorted after all keys.
_MISSING = torch.iinfo(torch.long).max

# Keys or table rows of n-grams, and a mask of the places that have one; both (texts, places).
Block = tuple[Tensor, Tensor]


class NgramsConfig(PreTrainedConfig):
    """Sizes of the features.

    Args:
        vocab_size: size of the byte tokenizer's vocabulary. Bytes have ids 0 to 255.
        num_buckets: rows of the weight table. n-grams are hashed into them.
        max_characters: largest n of the byte n-grams.
        max_words: largest n of the word n-grams.
        separate_norms: whether byte and word n-grams are scaled to length 1 separately. Default: together.
        within_words: whether byte n-grams end at white space, with which they may begin and end. Default: no.
        log_counts: whether an n-gram that occurs c times in a text counts as 1 + log c. Default: c times.
        type_vocab_size: 2 for pairs. The model then reads `token_type_ids` and sees which n-grams both texts share.
        logit_temperature: number that divides the logits outside of training, so that probabilities are true shares.
    """

    model_type = "ngrams"

    def __init__(
        self,
        vocab_size: int = 260,
        num_buckets: int = 2**17,
        max_characters: int = 5,
        max_words: int = 2,
        separate_norms: bool = False,
        within_words: bool = False,
        log_counts: bool = False,
        type_vocab_size: int = 1,
        pad_token_id: int | None = None,
        logit_temperature: float = 1.0,
        **more: Any,
    ) -> None:
        self.vocab_size, self.num_buckets = vocab_size, num_buckets
        self.max_characters, self.max_words = max_characters, max_words
        self.separate_norms, self.type_vocab_size = separate_norms, type_vocab_size
        self.within_words, self.log_counts = within_words, log_counts
        self.logit_temperature = logit_temperature
        super().__init__(pad_token_id=pad_token_id, **more)


class NgramsForSequenceClassification(PreTrainedModel):
    """Linear classifier over n-grams.

    The logits are a bias and the sum of one row of `table` for each n-gram of the text. The weights of the rows are
    their `rarity`, scaled to a vector of length 1.

    For a pair, word n-grams that both texts share, or that only one has, have rows of their own. A piecewise linear
    function of each share of common n-grams (`overlap`) is added to the logits.
    """

    config_class = NgramsConfig
    base_model_prefix = "ngrams"
    rarity: Tensor

    def __init__(self, config: NgramsConfig) -> None:
        super().__init__(config)
        self.table = nn.EmbeddingBag(config.num_buckets, config.num_labels, mode="sum")
        self.bias = nn.Parameter(torch.zeros(config.num_labels))
        if config.type_vocab_size > 1:
            sizes = config.max_characters + config.max_words
            self.overlap = nn.Linear(3 * sizes * _KNOTS, config.num_labels, bias=False)
        self.register_buffer("rarity", torch.ones(config.num_buckets))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.EmbeddingBag | nn.Linear):
            nn.init.zeros_(module.weight)
        if module is self:
            nn.init.zeros_(self.bias)
            nn.init.ones_(self.rarity)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table. Its rows are n-grams, so it has more rows than the vocabulary has tokens."""
        return self.table

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Return logits of shape (texts, labels) for bytes of shape (texts, length)."""
        logits = self.logits_of(*self.weighted(input_ids, attention_mask, token_type_ids))
        return SequenceClassifierOutput(logits=logits if self.training else logits / self.config.logit_temperature)

    def weighted(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the table row and the weight of each n-gram, both (texts, places), and the shares of pairs.

        Places without an n-gram have weight 0.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        blocks, shares = self.features(input_ids, mask.bool(), token_type_ids)
        if not self.config.separate_norms:
            blocks = [_joined(blocks)]
        if self.config.log_counts:
            blocks = [_counted(buckets, there) for buckets, there in blocks]
        weights = [self.rarity[buckets] * count for buckets, count in blocks]
        weights = [weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-6) for weight in weights]
        return _joined(blocks)[0], torch.cat(weights, dim=1), shares

    def logits_of(self, buckets: Tensor, weights: Tensor, shares: Tensor | None) -> Tensor:
        """Return the logits of `weighted` n-grams, not divided by the temperature."""
        logits: Tensor = self.table(buckets, per_sample_weights=weights) + self.bias
        if shares is not None:
            knots = torch.arange(_KNOTS, device=shares.device)
            hats = (1 - (shares[..., None] * (_KNOTS - 1) - knots).abs()).clamp(min=0)
            logits = logits + self.overlap(hats.flatten(1) / shares.shape[1] ** 0.5)
        return logits

    def features(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> tuple[list[Block], Tensor | None]:
        """Return the table rows and the mask of each block of n-grams, and the shares of common n-grams of pairs.

        Blocks: n-grams of bytes, n-grams of words, and, for pairs, word n-grams that both texts have, that only the
        first has, and that only the second has.
        """
        # Lowercase A to Z.
        ids = torch.where((ids >= 65) & (ids <= 90), ids + 32, ids)
        if self.config.type_vocab_size == 1:
            bytes_, words = self._keys(ids, mask)
            return [self._rows(bytes_), self._rows(words)], None
        second = torch.zeros_like(mask) if types is None else types.bool()
        # Short batches need room for the largest n, so that all have the same shares.
        short = max(0, max(self.config.max_characters, 2 * self.config.max_words) - ids.shape[1])
        ids, mask, second = (nn.functional.pad(each, (0, short)) for each in (ids, mask, second))
        bytes_a, words_a = self._keys(ids, mask & ~second)
        bytes_b, words_b = self._keys(ids, mask & second)
        shares, both, only_a, only_b = [], [], [], []
        pairs = zip([*bytes_a, *words_a], [*bytes_b, *words_b], strict=True)
        for number, ((keys_a, a), (keys_b, b)) in enumerate(pairs):
            a_in_b, b_in_a = _contained(keys_a, a, keys_b, b), _contained(keys_b, b, keys_a, a)
            (hit_a, all_a), (hit_b, all_b) = (
                ((self._rarity_of(keys) * hit).sum(1), (self._rarity_of(keys) * there).sum(1).clamp(min=1e-6))
                for keys, there, hit in ((keys_a, a, a_in_b), (keys_b, b, b_in_a))
            )
            shares += [hit_a / all_a, hit_b / all_b, (hit_a + hit_b) / (all_a + all_b)]
            if number >= len(bytes_a):
                both.append((_mix(keys_a * 31 + 3), a_in_b))
                only_a.append((_mix(keys_a * 31 + 4), a & ~a_in_b))
                only_b.append((_mix(keys_b * 31 + 5), b & ~b_in_a))
        blocks = [[*bytes_a, *bytes_b], [*words_a, *words_b], both, only_a, only_b]
        return [self._rows(block) for block in blocks], torch.stack(shares, dim=1)

    def _keys(self, ids: Tensor, mask: Tensor) -> tuple[list[Block], list[Block]]:
        is_letter = (
            mask & (ids < 256) & ((ids >= 97) & (ids <= 122) | (ids >= 48) & (ids <= 57) | (ids >= 128) | (ids == 95))
        )
        words, is_word = _words(ids, is_letter)
        breaks = (ids == 32) | (ids >= 9) & (ids <= 13) if self.config.within_words else None
        return (
            _sequences(ids, mask, self.config.max_characters, seed=1, breaks=breaks),
            _sequences(words, is_word, self.config.max_words, seed=2),
        )

    def _rows(self, block: list[Block]) -> Block:
        keys, there = _joined(block)
        return keys.remainder(self.config.num_buckets), there

    def _rarity_of(self, keys: Tensor) -> Tensor:
        return self.rarity[keys.remainder(self.config.num_buckets)]

    @torch.no_grad()
    def measure_rarity(self, texts: Iterable[Tensor]) -> None:
        """Set the weight of each n-gram to its smoothed inverse document frequency, as scikit-learn's TF-IDF computes
        it.

        Args:
            texts: bytes of shape (length,), or bytes and token types of shape (2, length).
        """
        counts, total, rest = torch.zeros_like(self.rarity), 0, iter(texts)
        while batch := [text.reshape(-1, text.shape[-1]).T for text in islice(rest, _TEXTS_AT_ONCE)]:
            padded = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-1)
            ids, types = padded[..., 0], padded[..., 1] > 0 if padded.shape[2] > 1 else None
            rows, weights = _counted(*_joined(self.features(ids, ids >= 0, types)[0]))
            counts += rows[weights > 0].bincount(minlength=len(counts))
            total += len(batch)
        self.rarity.copy_(torch.log((1 + total) / (1 + counts)) + 1)


def register() -> None:
    """Register `ngrams` as a transformers model type whose saved models name the file with their code."""
    AutoConfig.register("ngrams", NgramsConfig, exist_ok=True)
    AutoModelForSequenceClassification.register(NgramsConfig, NgramsForSequenceClassification, exist_ok=True)
    NgramsConfig.register_for_auto_class()
    NgramsForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")


def _joined(blocks: list[Block]) -> Block:
    return torch.cat([keys for keys, _ in blocks], dim=1), torch.cat([there for _, there in blocks], dim=1)


def _contained(keys: Tensor, mask: Tensor, others: Tensor, other_mask: Tensor) -> Tensor:
    """Return a mask of the keys that are among the other text's keys."""
    known = torch.where(other_mask, others, _MISSING).sort(dim=1).values
    place = torch.searchsorted(known, keys.contiguous()).clamp(max=known.shape[1] - 1)
    return mask & (known.gather(1, place) == keys)


def _counted(buckets: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in order, and 1 + the logarithm of each row's count at its first place; 0 elsewhere."""
    ordered = torch.where(there, buckets, _MISSING).sort(dim=1).values
    is_first = nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    group = is_first.long().cumsum(dim=1) - 1
    counts = torch.zeros_like(ordered).scatter_add_(1, group, torch.ones_like(ordered)).gather(1, group)
    is_first = is_first & (ordered < _MISSING)
    return ordered.where(is_first, 0), is_first * (1 + counts.float().log())


def _sequences(items: Tensor, mask: Tensor, longest: int, seed: int, breaks: Tensor | None = None) -> list[Block]:
    """Return a key for each sequence of 1 to `longest` items, and a mask of the sequences without missing items.

    `breaks` marks items that only the ends of a sequence may be.
    """
    keys = [_mix(items * 31 + seed)]
    there = [mask]
    for size in range(1, longest):
        if items.shape[1] > size:
            keys.append(_mix(keys[-1][:, :-1] * 31 + items[:, size:]))
            there.append(there[-1][:, :-1] & mask[:, size:])
            if breaks is not None and size > 1:
                there[-1] = there[-1] & ~breaks[:, size - 1 : -1]
    return list(zip(keys, there, strict=True))


def _words(ids: Tensor, is_letter: Tensor) -> Block:
    """Return a key for each word (a maximal run of letters and digits), and a mask of the places that have a word."""
    before = torch.nn.functional.pad(is_letter[:, :-1], (1, 0))
    starts = is_letter & ~before
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    number = (starts.long().cumsum(dim=1) - 1).clamp(min=0)
    words = torch.zeros(ids.shape[0], ids.shape[1] // 2 + 1, dtype=torch.long, device=ids.device)
    # A word's first place. ONNX has no cummax.
    since = place - words.scatter_add(1, number, torch.where(starts, place, 0)).gather(1, number)
    words = words.scatter_add(1, number, torch.where(is_letter, _mix(ids + since * _FACTORS[0]), 0))
    num_words = starts.sum(dim=1, keepdim=True)
    return words, torch.arange(words.shape[1], device=ids.device) < num_words


def _mix(keys: Tensor) -> Tensor:
    """Return hashes whose low bits depend on all bits of the keys."""
    keys = (keys ^ (keys >> 30)) * _FACTORS[1]
    keys = (keys ^ (keys >> 27)) * _FACTORS[0]
    return keys ^ (keys >> 31)
