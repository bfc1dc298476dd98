"""The loss of classification, for texts and images alike, and how much each class counts in it."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss


def classification_loss_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy summed over samples: sum_i w_i ce_i, in fp32.

    With smoothing e, the target of a sample is (1 - e) x its label + e / C for every class (Szegedy et al. 2016, section 7).
    The weight w_i of a sample is that of its class, and for soft labels the mean of the weights under them; what it is
    divided by later is the plain number of samples, not the sum of weights as in torch's `reduction="mean"`.

    Args:
        logits: (N, C), any floating-point type.
        labels: (N,) integers, where `ignore_index` marks a sample that counts nothing; or (N, C) probabilities.
        class_weights: (C,) fp32.
    """
    logits = logits.float()
    if not labels.is_floating_point():
        losses = cross_entropy(
            logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
        )
        if class_weights is None:
            return losses.sum()
        return (
            losses * class_weights[labels.clamp(0, logits.shape[-1] - 1)]
        ).sum()  # an ignored sample has a loss of 0
    targets = labels.float()
    losses = cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    return losses.sum() if class_weights is None else (losses * (targets @ class_weights)).sum()


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
    setting: str | Sequence[float] | Mapping[str, float] | None,
    counts: NDArray[Any],
    label_names: Sequence[str],
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
                near = get_close_matches(name, label_names, n=1)
                remedy = f"did you mean {near[0]!r}?" if near else f"the labels are {_listed(label_names)}"
                raise ValueError(f"loss.class_weights names {name!r}, which is no label; {remedy}")
        weights = tuple(float(setting.get(name, 1.0)) for name in label_names)
    else:
        weights = tuple(map(float, setting))
        if len(weights) != len(label_names):
            raise ValueError(
                f"loss.class_weights has {len(weights)} weights for {len(label_names)} classes ({_listed(label_names)}); "
                "give one for each, or a mapping of some by name"
            )
    if not any(weights):
        raise ValueError("loss.class_weights are all 0, so nothing would be learned; give some class a weight above 0")
    return weights


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
