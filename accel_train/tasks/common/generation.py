"""Text generation by sequence-to-sequence models in evaluations and predictions, as rows of token ids."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from accel_train.recipe.evaluate import Generation

NO_TOKEN = -1
"""Fills rows after the end of a text, and rows without a generated text."""


class TextGenerator:
    """Generates texts of at most `max_new_tokens` tokens by greedy or beam search, as `evaluate.generation` sets.

    `num_tokens` is the number of the tokenizer's tokens. Vocabulary rows beyond it are never generated.
    """

    def __init__(self, section: Generation, max_new_tokens: int, num_tokens: int) -> None:
        self.section, self.max_new_tokens, self.num_tokens = section, max_new_tokens, num_tokens

    # Under a fully compiled model, this method is called inside the compiled code.
    @torch.compiler.disable
    def generate(self, model: nn.Module, inputs: Mapping[str, Tensor], wanted: Tensor | None = None) -> Tensor:
        """Return the ids (N, max_new_tokens) int64 of a text per source, or -1 in rows that are not `wanted` (N,) bool.

        All processes of a sharded model call this together. They generate until every process is done.
        """
        assert isinstance(model, PreTrainedModel)
        sources = inputs["input_ids"]
        rows = sources.new_full((len(sources), self.max_new_tokens), NO_TOKEN)
        chosen = torch.arange(len(sources), device=sources.device) if wanted is None else wanted.nonzero()[:, 0]
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        asked = chosen
        if is_sharded and _on_any(len(chosen) > 0, sources.device):
            asked = chosen if len(chosen) else torch.zeros(1, dtype=torch.long, device=sources.device)
        if len(asked):
            # Each further token has a new shape, so compiling would happen at every token.
            with torch.compiler.set_stance("force_eager"):
                found = model.generate(
                    **{name: tensor[asked] for name, tensor in inputs.items()},
                    generation_config=self.config(model),
                    synced_gpus=is_sharded,
                )
            if len(chosen):
                # Drop the decoder's start token.
                found = found[:, 1:]
                rows[chosen, : found.shape[1]] = found
        return rows

    def config(self, model: PreTrainedModel) -> GenerationConfig:
        """Return a copy of the model's generation config with the recipe's settings."""
        config, section = deepcopy(model.generation_config), self.section
        rows = model.get_output_embeddings().weight.shape[0]
        config.max_length, config.max_new_tokens, config.do_sample = None, self.max_new_tokens, False
        config.num_beams, config.no_repeat_ngram_size = section.num_beams, section.no_repeat_ngram_size
        config.suppress_tokens = list(range(self.num_tokens, rows)) or None
        if section.num_beams > 1:
            config.length_penalty = section.length_penalty
        return config


def _on_any(here: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def decoded(rows: NDArray[Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of rows of ids without special tokens. A row without tokens gives an empty text."""
    return [str(tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=True)).strip() for row in rows]


def spaced(count: int, total: int) -> Sequence[int]:
    """Return `count` evenly spaced numbers below `total`, or all of them if `total` is smaller."""
    count = min(count, total)
    return [number * total // count for number in range(count)]
