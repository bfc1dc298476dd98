"""Text classifier for small data sets: a linear layer over the character and word n-grams of a text.

n-grams are weighted by their rarity. With a few thousand texts and no pretrained model, they are better features than a
network can learn (Wang and Manning 2012, Joulin et al. 2017).

Save and load the model like any transformers model. Saving copies this file next to the weights, so it must not import
the package.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

# Factors of 64-bit mixing (Steele et al. 2014), as signed numbers.
_FACTORS = (-7046029254386353131, -4658895280553007687)


class NgramsConfig(PreTrainedConfig):
    """Sizes of the features.

    Args:
        vocab_size: size of the byte tokenizer's vocabulary. Bytes have ids 0 to 255.
        num_buckets: rows of the weight table. n-grams are hashed into them.
        max_characters: largest n of the byte n-grams.
        max_words: largest n of the word n-grams.
    """

    model_type = "ngrams"

    def __init__(
        self,
        vocab_size: int = 260,
        num_buckets: int = 2**17,
        max_characters: int = 5,
        max_words: int = 2,
        pad_token_id: int | None = None,
        **more: Any,
    ) -> None:
        self.vocab_size, self.num_buckets = vocab_size, num_buckets
        self.max_characters, self.max_words = max_characters, max_words
        super().__init__(pad_token_id=pad_token_id, **more)


class NgramsForSequenceClassification(PreTrainedModel):
    """Linear classifier over n-grams.

    The logits are a bias and the sum of one row of `table` for each n-gram of the text. The weights of the rows are
    their `rarity`, scaled to a vector of length 1.
    """

    config_class = NgramsConfig
    base_model_prefix = "ngrams"
    rarity: Tensor

    def __init__(self, config: NgramsConfig) -> None:
        super().__init__(config)
        self.table = nn.EmbeddingBag(config.num_buckets, config.num_labels, mode="sum")
        self.bias = nn.Parameter(torch.zeros(config.num_labels))
        self.register_buffer("rarity", torch.ones(config.num_buckets))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.EmbeddingBag):
            nn.init.zeros_(module.weight)
        if module is self:
            nn.init.zeros_(self.bias)
            nn.init.ones_(self.rarity)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table. Its rows are n-grams, so it has more rows than the vocabulary has tokens."""
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SequenceClassifierOutput:
        """Return logits of shape (texts, labels) for bytes of shape (texts, length)."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        buckets, is_ngram = self.ngrams(input_ids, mask.bool())
        weights = self.rarity[buckets] * is_ngram
        weights = weights / weights.norm(dim=1, keepdim=True).clamp(min=1e-6)
        return SequenceClassifierOutput(logits=self.table(buckets, per_sample_weights=weights) + self.bias)

    def ngrams(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table row of each n-gram, and a mask of the places that have an n-gram; both (texts, places)."""
        # Lowercase A to Z.
        ids = torch.where((ids >= 65) & (ids <= 90), ids + 32, ids)
        keys, there = _sequences(ids, mask, self.config.max_characters, seed=1)
        is_letter = (
            mask & (ids < 256) & ((ids >= 97) & (ids <= 122) | (ids >= 48) & (ids <= 57) | (ids >= 128) | (ids == 95))
        )
        words, is_word = _words(ids, is_letter)
        more, more_there = _sequences(words, is_word, self.config.max_words, seed=2)
        buckets = torch.cat([*keys, *more], dim=1).remainder(self.config.num_buckets)
        return buckets, torch.cat([*there, *more_there], dim=1)

    @torch.no_grad()
    def measure_rarity(self, texts: Iterable[Tensor]) -> None:
        """Set the weight of each n-gram to its smoothed inverse document frequency, as scikit-learn's TF-IDF computes
        it.
        """
        counts, total = torch.zeros_like(self.rarity), 0
        for ids in texts:
            buckets, is_ngram = self.ngrams(ids[None], torch.ones_like(ids[None], dtype=torch.bool))
            counts[buckets[is_ngram].unique()] += 1
            total += 1
        self.rarity.copy_(torch.log((1 + total) / (1 + counts)) + 1)


def register() -> None:
    """Register `ngrams` as a transformers model type whose saved models name the file with their code."""
    AutoConfig.register("ngrams", NgramsConfig, exist_ok=True)
    AutoModelForSequenceClassification.register(NgramsConfig, NgramsForSequenceClassification, exist_ok=True)
    NgramsConfig.register_for_auto_class()
    NgramsForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")


def _sequences(items: Tensor, mask: Tensor, longest: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a key for each sequence of 1 to `longest` items, and a mask of the sequences without missing items."""
    keys, there = [_mix(items * 31 + seed)], [mask]
    for size in range(1, longest):
        if items.shape[1] > size:
            keys.append(_mix(keys[-1][:, :-1] * 31 + items[:, size:]))
            there.append(there[-1][:, :-1] & mask[:, size:])
    return keys, there


def _words(ids: Tensor, is_letter: Tensor) -> tuple[Tensor, Tensor]:
    """Return a key for each word (a maximal run of letters and digits), and a mask of the places that have a word."""
    before = torch.nn.functional.pad(is_letter[:, :-1], (1, 0))
    starts = is_letter & ~before
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    since = place - torch.where(starts, place, 0).cummax(dim=1).values
    number = (starts.long().cumsum(dim=1) - 1).clamp(min=0)
    words = torch.zeros(ids.shape[0], ids.shape[1] // 2 + 1, dtype=torch.long, device=ids.device)
    words.scatter_add_(1, number, torch.where(is_letter, _mix(ids + since * _FACTORS[0]), 0))
    num_words = starts.sum(dim=1, keepdim=True)
    return words, torch.arange(words.shape[1], device=ids.device) < num_words


def _mix(keys: Tensor) -> Tensor:
    """Return hashes whose low bits depend on all bits of the keys."""
    keys = (keys ^ (keys >> 30)) * _FACTORS[1]
    keys = (keys ^ (keys >> 27)) * _FACTORS[0]
    return keys ^ (keys >> 31)
