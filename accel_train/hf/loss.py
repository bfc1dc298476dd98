"""The loss of a batch, as transformers' Trainer computes it: the model's own, compute_loss_func's, or a smoothed one."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from accel_train.hf.inputs import targets_in

if TYPE_CHECKING:
    from accel_train.hf import Trainer


def compute_loss(
    trainer: "Trainer",
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Return the mean loss of one micro-batch over its targets; `num_items_in_batch` are this micro-batch's.

    Override it for a loss of your own: return a mean, or a sum divided by `num_items_in_batch`. The loop multiplies by
    the targets, adds up over micro-batches and processes, and divides once by all targets of the step.

    Raises:
        ValueError: the model returned no loss.
    """
    inputs = dict(inputs)
    takes_labels = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    labels = inputs.pop("labels", None) if takes_labels else None
    if trainer.signature.takes_num_items and num_items_in_batch is not None:
        inputs["num_items_in_batch"] = num_items_in_batch
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        loss = trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
    elif labels is not None and trainer.label_smoother is not None:
        is_causal = type(unwrap_peft_model(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        options = {"shift_labels": is_causal, "num_items_in_batch": num_items_in_batch}
        loss = trainer.label_smoother(outputs, labels, **options)
    elif isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"the model returned no loss, only {', '.join(outputs)}, from the inputs {', '.join(inputs)}; give it labels, pass "
            "compute_loss_func, or override compute_loss"
        )
    else:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return (loss, outputs) if return_outputs else loss


def num_items_in(trainer: "Trainer", inputs: dict[str, Any]) -> Tensor | int | None:
    """Return `num_items_in_batch` of one batch; None where nothing divides by it, as in transformers."""
    if "labels" not in inputs or not (trainer.signature.takes_num_items or trainer.compute_loss_func is not None):
        return None
    count = targets_in(inputs, trainer.signature)
    return count.clamp(min=1) if isinstance(count, Tensor) else count  # without targets a sum is 0, and 0 / 0 is NaN
