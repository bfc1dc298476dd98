"""Shared parts of classification tasks: losses, class weights, label names, further metrics, and FLOPs."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from accel_train.core.format import did_you_mean
from accel_train.data.labels import IGNORED_LABEL
from accel_train.metrics import load_metric
from accel_train.model.fake_step import take_shapes_only
from accel_train.model.tensors import FINITE, replaced, without_values
from accel_train.runtime.private import fake_tensors


def classification_loss_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    ignore_index: int = IGNORED_LABEL,
) -> Tensor:
    """Return the fp32 cross-entropy summed over samples or pixels: sum_i w_i ce_i.

    With smoothing e, the target of a sample is (1 - e) x its label + e / C for every class (Szegedy et al. 2016,
    section 7). The weight w_i of a sample is the weight of its class. With soft labels, it is the mean of the class
    weights under them. Callers divide by the number of samples, not by the sum of weights as torch's `reduction="mean"`
    does.

    Args:
        logits: (N, C), or (N, C, H, W) for images, in any floating-point type.
        labels: (N,) or (N, H, W) integers, with `ignore_index` at positions without a loss; or (N, C) probabilities.
        class_weights: (C,) fp32.
    """
    soft = labels.is_floating_point()
    if logits.ndim == 4 and torch.are_deterministic_algorithms_enabled():
        # The CUDA loss over images adds up in a varying order. The loss over rows is deterministic but costs a copy.
        logits, labels = logits.permute(0, 2, 3, 1).flatten(0, 2), labels.flatten()
    targets = labels.float() if soft else labels
    ignored: dict[str, Any] = {} if soft else {"ignore_index": ignore_index}
    losses_of = partial(cross_entropy, logits.float(), targets, label_smoothing=label_smoothing, **ignored)
    if class_weights is None:
        return losses_of(reduction="sum")
    # Ignored positions have a loss of 0, so their weight does not matter.
    weights = targets @ class_weights if soft else class_weights[labels.clamp(0, len(class_weights) - 1)]
    return (losses_of(reduction="none") * weights).sum()


class ClassLoss:
    """A summed cross-entropy over classes. Training applies `loss.label_smoothing` and the class weights, if any."""

    def __init__(
        self, label_smoothing: float, class_weights: Sequence[float] | None, ignore_index: int = IGNORED_LABEL
    ) -> None:
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)

    def __call__(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        """Return `classification_loss_sum` of the batch, without smoothing and weights in an evaluation."""
        if self.class_weights is not None and self.class_weights.device != logits.device:
            # Moved once: a copy per step would wait for the device.
            self.class_weights = self.class_weights.to(logits.device)
        settings: dict[str, Any] = {"ignore_index": self.ignore_index}
        if training:
            settings |= {"label_smoothing": self.label_smoothing, "class_weights": self.class_weights}
        return classification_loss_sum(logits, labels, **settings)


def multi_label_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy, averaged over the C labels and summed over the N samples.

    Both arguments are (N, C); labels are 0 or 1. Divided by N, the result equals the loss of transformers' models with
    `problem_type: multi_label_classification`.
    """
    losses = binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="sum")
    return losses / logits.shape[-1]


def regression_loss_sum(values: Tensor, targets: Tensor) -> Tensor:
    """Return the summed squared errors of `values` and `targets`, both (N,).

    Divided by N, the result equals the loss of transformers' models with `problem_type: regression`.
    """
    return mse_loss(values.float(), targets.float(), reduction="sum")


def resolve_class_weights(
    setting: str | Sequence[float] | Mapping[str, float] | None, counts: NDArray[Any], label_names: Sequence[str]
) -> tuple[float, ...] | None:
    """Return one weight per class in the order of ids from `loss.class_weights`, or None if all classes count alike.

    `balanced` is n / (C n_c), as scikit-learn computes it: a class of average size has weight 1. A mapping sets some
    classes by name, and the other classes get weight 1. `counts` holds the number of training samples per class.

    Raises:
        ValueError: `balanced` meets a class without training samples, a name is unknown, the number of weights is
            wrong, or all weights are 0.
    """
    if setting is None:
        return None
    if isinstance(setting, str):
        empty = [name for name, count in zip(label_names, counts, strict=True) if count == 0]
        if empty:
            raise ValueError(
                f"loss.class_weights=balanced: no training sample has the label {empty[0]!r}, so its weight would be "
                "infinite; take it out of data.label_names, or give the weights by name"
            )
        balanced = np.sum(counts) / (len(counts) * np.asarray(counts, dtype=np.float64))
        return tuple(float(weight) for weight in balanced)
    if isinstance(setting, Mapping):
        for name in setting:
            if name not in label_names:
                remedy = did_you_mean(name, label_names, f"the labels are {listed(label_names)}", show=repr)
                raise ValueError(f"loss.class_weights names {name!r}, not a label; {remedy}")
        weights = tuple(float(setting.get(name, 1.0)) for name in label_names)
    else:
        weights = tuple(map(float, setting))
        if len(weights) != len(label_names):
            raise ValueError(
                f"loss.class_weights has {len(weights)} weights for {len(label_names)} classes "
                f"({listed(label_names)}); "
                "give one for each, or a mapping of some by name"
            )
    if not any(weights):
        raise ValueError("loss.class_weights are all 0, so nothing would be learned; give some class a weight above 0")
    return weights


def listed(names: Sequence[str], most: int = 12, where: str = "") -> str:
    """Return at most `most` names as text: `a, b, c and 9 more`. `where` is appended to point to the other names."""
    more = f" and {len(names) - most} more{where}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_labels(config: PreTrainedConfig, label_names: Sequence[str]) -> PreTrainedConfig:
    """Set a head for these classes in `config`, in place, and return it."""
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: index for index, name in enumerate(label_names)}
    return config


def row_metrics(names: Sequence[str], totals: Mapping[str, NDArray[Any]], *, allow_hub: bool) -> dict[str, float]:
    """Return every scalar of the named metrics, computed from `rows_predictions`, `rows_labels`, and `rows_scores`."""
    found: dict[str, float] = {}
    for name in names:
        metric = load_metric(name, allow_hub=allow_hub)
        takes_scores = "prediction_scores" in metric.inputs_description
        predictions = ("prediction_scores", "rows_scores") if takes_scores else ("predictions", "rows_predictions")
        result = metric.compute(references=totals["rows_labels"], **{predictions[0]: totals[predictions[1]]})
        found |= {key: float(value) for key, value in (result or {}).items() if np.ndim(value) == 0}
    return found


def forward_flops(
    factory: Any, config: PreTrainedConfig, *, is_assumed: bool = False, **input_shapes: tuple[int, ...]
) -> int:
    """Return the floating-point operations of a forward pass, counted on a meta copy of the model without values.

    Inputs whose names end in `input_ids` are integers. With `is_assumed`, the checks of values that the model makes are
    assumed to hold. This takes several times as long.

    Raises:
        ValueError, RuntimeError: the model does not accept the input, or reads values that a meta tensor does not have.
    """
    counter = FlopCounterMode(display=False)
    with without_values():
        model = factory.from_config(config, trust_remote_code=False).eval().requires_grad_(False)
    with fake_tensors() if is_assumed else without_values(), torch.no_grad():
        if is_assumed:
            take_shapes_only(model)
        inputs = {
            name: torch.zeros(shape, dtype=torch.long if name.endswith("input_ids") else torch.float32)
            for name, shape in input_shapes.items()
        }
        with counter, replaced(FINITE if is_assumed else {}):
            model(**inputs)
    return int(counter.get_total_flops())


def training_flops(factory: Any, config: PreTrainedConfig, **input_shapes: tuple[int, ...]) -> float | None:
    """Return 3 x the FLOPs of a forward pass, for forward and backward, or None if they cannot be counted."""
    for is_assumed in (False, True):
        # AttributeError: the model needs an attention mask.
        with suppress(ValueError, RuntimeError, AttributeError):
            return 3.0 * forward_flops(factory, config, is_assumed=is_assumed, **input_shapes)
    return None
