"""Classification of texts, images and pixels: losses, class weights, labels in the model, further metrics, FLOPs."""

from collections.abc import Mapping, Sequence
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


def classification_loss_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    ignore_index: int = IGNORED_LABEL,
) -> Tensor:
    """Cross-entropy summed over samples or pixels: sum_i w_i ce_i, in fp32.

    With smoothing e, the target of a sample is (1 - e) x its label + e / C for every class (Szegedy et al. 2016, section 7).
    The weight w_i of a sample is that of its class, and for soft labels the mean of the weights under them; what it is
    divided by later is the plain number of samples, not the sum of weights as in torch's `reduction="mean"`.

    Args:
        logits: (N, C), or (N, C, H, W) of images; any floating-point type.
        labels: (N,) or (N, H, W) integers, where `ignore_index` marks what counts nothing; or (N, C) probabilities.
        class_weights: (C,) fp32.
    """
    soft = labels.is_floating_point()
    if logits.ndim == 4 and torch.are_deterministic_algorithms_enabled():
        # CUDA's loss over images adds up in no fixed order; the one over rows does not, at the price of a copy.
        logits, labels = logits.permute(0, 2, 3, 1).flatten(0, 2), labels.flatten()
    targets = labels.float() if soft else labels
    ignored: dict[str, Any] = {} if soft else {"ignore_index": ignore_index}
    losses_of = partial(cross_entropy, logits.float(), targets, label_smoothing=label_smoothing, **ignored)
    if class_weights is None:
        return losses_of(reduction="sum")
    # what is ignored has a loss of 0
    weights = targets @ class_weights if soft else class_weights[labels.clamp(0, len(class_weights) - 1)]
    return (losses_of(reduction="none") * weights).sum()


class ClassLoss:
    """The summed cross-entropy of classes, in training with `loss.label_smoothing` and a weight for each class or None."""

    def __init__(
        self, label_smoothing: float, class_weights: Sequence[float] | None, ignore_index: int = IGNORED_LABEL
    ) -> None:
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)

    def __call__(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        """Return `classification_loss_sum`, plain in an evaluation."""
        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)  # once: a copy a step would wait for the device
        settings: dict[str, Any] = {"ignore_index": self.ignore_index}
        if training:
            settings |= {"label_smoothing": self.label_smoothing, "class_weights": self.class_weights}
        return classification_loss_sum(logits, labels, **settings)


def multi_label_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of each label, averaged over the C labels and summed over samples: (N, C) both, labels 0 or 1.

    Divided by N it is what transformers' models of `problem_type: multi_label_classification` return.
    """
    losses = binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="sum")
    return losses / logits.shape[-1]


def regression_loss_sum(values: Tensor, targets: Tensor) -> Tensor:
    """Squared errors, summed: (N,) both. Divided by N it is transformers' loss of `problem_type: regression`."""
    return mse_loss(values.float(), targets.float(), reduction="sum")


def resolve_class_weights(
    setting: str | Sequence[float] | Mapping[str, float] | None, counts: NDArray[Any], label_names: Sequence[str]
) -> tuple[float, ...] | None:
    """`loss.class_weights` as one weight a class, in the order of ids; None where all count alike.

    `balanced` is n / (C n_c), as scikit-learn computes it: a class of average size has weight 1. A mapping gives some
    classes by name, the others have weight 1. `counts` are the training samples of each class.

    Raises:
        ValueError: a class without training samples under `balanced`, an unknown name, a wrong number of weights, or
            nothing but zeros.
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
                raise ValueError(f"loss.class_weights names {name!r}, which is no label; {remedy}")
        weights = tuple(float(setting.get(name, 1.0)) for name in label_names)
    else:
        weights = tuple(map(float, setting))
        if len(weights) != len(label_names):
            raise ValueError(
                f"loss.class_weights has {len(weights)} weights for {len(label_names)} classes ({listed(label_names)}); "
                "give one for each, or a mapping of some by name"
            )
    if not any(weights):
        raise ValueError("loss.class_weights are all 0, so nothing would be learned; give some class a weight above 0")
    return weights


def listed(names: Sequence[str], most: int = 12, where: str = "") -> str:
    """Return `a, b, c and 9 more`; `where` follows, which says where the others are."""
    more = f" and {len(names) - most} more{where}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_labels(config: PreTrainedConfig, label_names: Sequence[str]) -> PreTrainedConfig:
    """Return the same configuration, changed in place, with a head for these classes."""
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: index for index, name in enumerate(label_names)}
    return config


def row_metrics(names: Sequence[str], totals: Mapping[str, NDArray[Any]], *, allow_hub: bool) -> dict[str, float]:
    """Compute metrics of `rows_predictions`, `rows_labels` and `rows_scores`: every single number that they return."""
    found: dict[str, float] = {}
    for name in names:
        metric = load_metric(name, allow_hub=allow_hub)
        takes_scores = "prediction_scores" in metric.inputs_description
        predictions = ("prediction_scores", "rows_scores") if takes_scores else ("predictions", "rows_predictions")
        result = metric.compute(references=totals["rows_labels"], **{predictions[0]: totals[predictions[1]]})
        found |= {key: float(value) for key, value in (result or {}).items() if np.ndim(value) == 0}
    return found


def forward_flops(factory: Any, config: PreTrainedConfig, **input_shapes: tuple[int, ...]) -> int:
    """Count the floating-point operations of a forward pass, on a copy without weights; inputs called `...input_ids` are integers.

    Raises:
        ValueError, RuntimeError: the model cannot take the input, or looks at its values, which are not there.
    """
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad():
        model = factory.from_config(config, trust_remote_code=False).eval()
        inputs = {
            name: torch.zeros(shape, dtype=torch.long if name.endswith("input_ids") else torch.float32)
            for name, shape in input_shapes.items()
        }
        with counter:
            model(**inputs)
    return int(counter.get_total_flops())


def training_flops(factory: Any, config: PreTrainedConfig, **input_shapes: tuple[int, ...]) -> float | None:
    """Return 3 x the FLOPs of a forward pass, for forward and backward; None where they cannot be counted."""
    try:
        return 3.0 * forward_flops(factory, config, **input_shapes)
    except (ValueError, RuntimeError, AttributeError):  # the last of a model that needs an attention mask
        return None
