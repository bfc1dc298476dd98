"""The metrics that TRL's SFTTrainer logs, as sums over label tokens that are divided once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SUMS = ("num_labels", "num_tokens", "entropy", "mean_token_accuracy", "aux_loss")
"""Numbers of a micro-batch, summed over its tokens. The last three are sums whose means over labels are metrics."""


class TokenMetrics:
    """The numbers that `compute_loss` notes, and the metrics that they make."""

    def __init__(self, *, has_router: bool) -> None:
        self._means = SUMS[2:] if has_router else SUMS[2:4]
        self._noted: Tensor | None = None
        self.num_tokens = 0
        """Tokens of all training batches so far."""

    def note(self, inputs: Mapping[str, Any], outputs: Any, count: Tensor, entropy: Tensor, correct: Tensor) -> None:
        """Keep the numbers of a micro-batch on the device. A compiled graph notes nothing."""
        if torch.compiler.is_compiling():
            return
        mask, router = inputs.get("attention_mask"), entropy.new_zeros(())
        if "aux_loss" in self._means and outputs.aux_loss is not None:
            router = outputs.aux_loss.detach() * count
        tokens = count.new_full((), inputs["labels"].numel()) if mask is None else mask.sum()
        self._noted = torch.stack([each.float() for each in (count, tokens, entropy, correct, router)])

    def take(self) -> Tensor | None:
        """Return the numbers of the last micro-batch, once."""
        noted, self._noted = self._noted, None
        return noted

    def of(self, steps: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the metrics of the sums of several steps, or of one evaluation. Empty without labels."""
        labeled = [dict(zip(SUMS, step, strict=True)) for step in steps if step and step[0]]
        means = {name: [step[name] / step["num_labels"] for step in labeled] for name in self._means}
        found = {name: sum(values) / len(values) for name, values in means.items() if values}
        return {**found, "num_tokens": float(self.num_tokens)} if found else {}
