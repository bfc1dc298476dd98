"""Mixtures of experts: the router loss over the whole global batch, and products in the type of autocast.

The router loss has the formula of transformers:

    loss = coefficient x E x sum over experts e of f_e x P_e

E: number of experts. f_e: assignments to e per position. P_e: mean router probability of e (Switch Transformer,
equations 4 to 6). f_e has no gradient. Once it is known for the global batch, the rest is a sum over positions. Losses
and gradients then do not depend on the number of processes or on accumulation. With several micro-batches per step,
counting f_e takes one more forward.

torch's autocast leaves out `grouped_mm`, which multiplies the experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from sys import modules
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_train.core.state import Choice, Choices
from accel_train.data.labels import IGNORED_LABEL
from accel_train.model.kernels.global_loss import SummedParts, sums_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AS_IN_MIXTRAL = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Arguments of `load_balancing_loss_func` in the model files that share Mixtral's definition."""


class Routing(NamedTuple):
    """The routing of a batch in all layers, as sums over the positions that count."""

    assigned: Tensor
    """(E,) assignments to each expert."""
    probabilities: Tensor
    """(E,) router probabilities, with their graph."""
    num_positions: Tensor
    """Number of positions times layers, 0-dim."""
    num_targets: Tensor
    """Number of targets, 0-dim."""

    def packed(self, dtype: torch.dtype) -> Tensor:
        """Return all sums as one vector (2 E + 2,), without the graph."""
        parts = (self.assigned, self.probabilities.detach(), self.num_positions[None], self.num_targets[None])
        return torch.cat([part.to(dtype) for part in parts])


class RouterLoss(SummedParts):
    """Computes the router loss of a model's micro-batches, once the routing of the global batch is known.

    `loss` is without the coefficient.
    """

    coefficient: float
    num_experts: int
    top_k: int

    def __init__(self) -> None:
        super().__init__()
        self._logits: Sequence[Tensor] | None = None
        self._records = False

    @property
    def num_terms(self) -> int:
        """Number of packed sums: assignments and probabilities by expert, positions, and targets."""
        return 2 * self.num_experts + 2

    def watch(self, model: "PreTrainedModel", coefficient: float) -> None:
        """Record the routers of a model. Several models of the same recipe may be watched."""
        config = model.config.get_text_config()
        self.coefficient = coefficient
        self.num_experts = int(getattr(model, "num_experts", None) or config.num_experts)
        self.top_k = int(getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok)
        base: nn.Module = model.base_model
        base.register_forward_pre_hook(self._ask, with_kwargs=True)
        base.register_forward_hook(self._keep)

    def __deepcopy__(self, _: Any) -> "RouterLoss":
        # The hooks of a copied model report to the same object.
        return self

    def _ask(self, _: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return (args, {**inputs, "output_router_logits": True}) if self._records else None

    def _keep(self, _: nn.Module, __: Any, outputs: Any) -> None:
        if self._records:
            self._logits = outputs.router_logits

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the router logits of the model's forward inside the context."""
        self._records, self._logits = True, None
        try:
            yield
        finally:
            self._records = False

    def loss_sum(self, labels: Tensor) -> Tensor:
        """Return this micro-batch's share of the loss, times the number of targets of the global batch.

        The caller divides by that number later. Outside of a step, the micro-batch counts as the global batch.
        """
        routing = self._routing(labels)
        totals = self.whole(routing.packed(sums_dtype(labels.device)))
        assigned, probabilities = totals[: self.num_experts], totals[self.num_experts : -2]
        num_positions, num_targets = totals[-2].clamp(min=1), totals[-1]
        per_probability = self.num_experts * assigned / num_positions.square()
        if self.is_in_step:
            self.loss = (per_probability * probabilities).sum()
        weights = (self.coefficient * num_targets * per_probability).to(routing.probabilities.dtype)
        return (weights * routing.probabilities).sum()

    def routing(self, labels: Tensor) -> Tensor:
        """Return the packed sums of the last recorded forward."""
        return self._routing(labels).packed(sums_dtype(labels.device))

    def _routing(self, labels: Tensor) -> Routing:
        """Sum over the positions on which a target depends: up to the last target of each row.

        Later positions are padding, or text that is not trained on.
        """
        assert self._logits is not None, "recorded by the forward"
        is_target = labels != IGNORED_LABEL
        counts = (is_target.flip(-1).cumsum(-1) > 0).flip(-1).reshape(-1, 1).float()
        assigned = probabilities = torch.zeros(self.num_experts, device=labels.device)
        for logits in self._logits:
            of_layer = logits.flatten(0, -2).float().softmax(-1)
            chosen = torch.zeros_like(of_layer).scatter_(1, of_layer.topk(self.top_k).indices, 1.0)
            # A matrix product would be rounded by autocast.
            assigned = assigned + (counts * chosen).sum(0)
            probabilities = probabilities + (counts * of_layer).sum(0)
        num_layers, self._logits = len(self._logits), None
        return Routing(assigned.detach(), probabilities, counts.sum() * num_layers, is_target.sum())


def choose_router_loss(requested: bool | str, model: nn.Module, place: str = "") -> Choice[float] | None:
    """Return the coefficient of the router loss (0 if it is not trained); None for a model without routers.

    Args:
        requested: `loss.router_aux`.
        place: the setting that splits the inputs of the loss, if any.

    Raises:
        ValueError: the recipe or the configuration asks for the loss, and it cannot be computed.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    coefficient, asks = router_coefficient(model), asks_for_router_loss(model)
    if requested is False or (requested == "auto" and not asks):
        reason = "output_router_logits is false in the model's configuration; set loss.router_aux to true to train it"
        return None if coefficient is None else Choice(0.0, "as set" if requested is False else reason)
    origin = "as set" if requested is True else "output_router_logits is true in the model's configuration"
    problem = place and f"not tested with {place}"
    if coefficient is None:
        problem = f"{type(model).__name__} has no known load-balancing loss"
    if problem:
        raise ValueError(f"loss.router_aux: {problem} ({origin}); set it to false to train without the router loss")
    if not coefficient:
        return Choice(0.0, "router_aux_loss_coef is 0 in the model's configuration")
    return Choice(coefficient, f"{origin}; balanced over the global batch")


def asks_for_router_loss(model: "PreTrainedModel") -> bool:
    """Return whether the model's configuration asks for its router loss."""
    configs = (model.config, model.config.get_text_config())
    return any(getattr(config, "output_router_logits", False) for config in configs)


def router_coefficient(model: "PreTrainedModel") -> float | None:
    """Return the router loss coefficient of a language model with Mixtral's router loss; None for other models."""
    function = getattr(modules[type(model).__module__], "load_balancing_loss_func", None)
    has_loss = function is not None and tuple(signature(function).parameters) == AS_IN_MIXTRAL
    if not has_loss or not type(model).__name__.endswith("ForCausalLM"):
        return None
    found = getattr(model, "router_aux_loss_coef", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    return None if found is None else float(found)


AUTOCAST_GROUPED = "autocast_grouped_mm"
"""Name of `grouped_in_autocast` among transformers' implementations of experts."""
ALIGNMENT_BYTES = 16
"""Rows of weights that `grouped_mm` multiplies are a multiple of this long."""


def autocast_experts(model: nn.Module) -> Choices:
    """Let the experts of a transformers model compute in the type of autocast; return the choice, if it has experts.

    transformers casts the input of `grouped_mm` to the type of its weights. That is fp32 on one GPU and under DDP, and
    16 bits if FSDP2 gathers the weights.
    """
    experts: list[Any] = [each for each in model.modules() if hasattr(each, "has_post_expert_norm")]
    if not experts:
        return {}
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_GROUPED, grouped_in_autocast)
    for each in experts:
        if each.config._experts_implementation == "grouped_mm":
            each.config._experts_implementation = AUTOCAST_GROUPED
    used = experts[0].config._experts_implementation
    why = "as the model's configuration says"
    if used == AUTOCAST_GROUPED:
        why = "products in 16 bits in mixed precision, like linear layers; transformers alone computes in fp32"
    return {"experts": Choice(used, why)}


def grouped_in_autocast(experts: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
    """Compute (positions, width) outputs of all experts by transformers' grouped products, with cast weights."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return grouped_mm_experts_forward(experts, hidden, *routing)
    dtype = torch.get_autocast_dtype(kind)
    sizes = {size for each in experts.parameters(recurse=False) if each.dim() > 2 for size in each.shape[1:]}
    if any(size * dtype.itemsize % ALIGNMENT_BYTES for size in sizes):
        dtype = torch.float32
    return grouped_mm_experts_forward(_Cast(experts, dtype), hidden, *routing)


class _Cast:
    """A module whose own weights have another type."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
