"""The module that training forwards: a task's loss around the model."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accel_train.core.errors import RecipeError
from accel_train.task import Task


class TrainingModule(nn.Module):
    """The module that Accelerate wraps: the model together with its loss.

    Only a scalar leaves the wrapped forward, so Accelerate's conversion of 16-bit outputs to fp32 never copies the logits
    (2.5 GB for GPT-2 at 12 x 1024 tokens), and DDP sees the one output that is differentiated.
    """

    def __init__(self, model: nn.Module, task: Task, base: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.base = base
        """Names of frozen weights that checkpoints leave out, because `model.pretrained` has them."""

    def forward(
        self, batch: Mapping[str, Tensor], wanted: Literal["loss", "counts", "predictions", "routing"] = "loss"
    ) -> Any:
        """Return the loss summed over the targets of the micro-batch, 0-dim; or what evaluation counts, or predicts, by name.

        `routing` is for a task with a router loss (`RouterLoss.over`). All through one forward, because that is what Accelerate casts to the mixed precision.
        """
        if wanted == "loss":
            return checked_loss(self.task.loss_sum(self.model, batch))
        if wanted == "routing":
            return self.task.routing(self.model, batch)  # type: ignore[attr-defined]
        return (
            self.task.evaluate_batch(self.model, batch)
            if wanted == "counts"
            else self.task.predict_batch(self.model, batch)
        )


def checked_loss(loss: Any) -> Tensor:
    """Return the loss of a micro-batch as it is, where it can be trained on; nothing is read of the device.

    Raises:
        RecipeError: it is no 0-dim tensor, or no gradient leads back from it.
    """
    if not isinstance(loss, Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__} and no tensor"
    elif loss.dim() > 0:
        found = f"a tensor of shape {list(loss.shape)}"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        found = "a tensor without a gradient (detached, made anew, or of weights that are all frozen)"
    else:
        return loss
    raise RecipeError(
        f"loss_sum of the task returned {found}; return the loss summed over the targets of the micro-batch as a 0-dim tensor that "
        "was computed from the model's output"
    )
