"""The loss of a batch, as transformers' Trainer computes it: the model's own, compute_loss_func's, or a smoothed one."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from accel_train.hf_face.inputs import targets_in

if TYPE_CHECKING:
    from accel_train.hf import Trainer


def mean_loss(trainer: "Trainer", model: nn.Module, inputs: dict[str, Any], num_items: Any) -> tuple[Tensor, Any]:
    """The mean over the batch's targets, and the model's outputs. Models that divide by `num_items` are given it.

    Raises:
        ValueError: the model returned no loss.
    """
    inputs = dict(inputs)
    takes_labels = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    labels = inputs.pop("labels", None) if takes_labels else None
    if trainer.signature.takes_num_items and num_items is not None:
        inputs["num_items_in_batch"] = num_items
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        return trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items), outputs
    if labels is not None and trainer.label_smoother is not None:
        is_causal = type(unwrap_peft_model(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        loss: Tensor = trainer.label_smoother(outputs, labels, shift_labels=is_causal, num_items_in_batch=num_items)
        return loss, outputs
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"the model returned no loss, only {', '.join(outputs)}, from the inputs {', '.join(inputs)}; give it labels, pass "
            "compute_loss_func, or override compute_loss"
        )
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs


def num_items_in(trainer: "Trainer", inputs: dict[str, Any]) -> Tensor | int | None:
    """What `num_items_in_batch` is for one batch; None where nothing divides by it, as in transformers."""
    counts = "labels" in inputs and (trainer.signature.takes_num_items or trainer.compute_loss_func is not None)
    if not counts:
        return None
    count = targets_in(inputs, trainer.signature)
    return count.clamp(min=1) if isinstance(count, Tensor) else count  # without targets a sum is 0, and 0 / 0 is NaN
