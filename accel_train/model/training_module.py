"""The module whose forward training calls: the model with its task's loss."""

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accel_train.core.errors import RecipeError
from accel_train.task import Batch, Task


class TrainingModule(nn.Module):
    """The module that Accelerate wraps: the model together with its loss.

    The wrapped forward returns only a scalar. Accelerate converts 16-bit outputs to fp32, and logits would be copied
    (2.5 GB for GPT-2 at 12 x 1024 tokens). DDP also sees only the output that is differentiated.
    """

    def __init__(self, model: nn.Module, task: Task, base: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.base = base
        """Names of frozen weights that checkpoints leave out, because `model.pretrained` has them."""

    def forward(self, batch: Batch, wanted: Literal["loss", "counts", "predictions", "part"] = "loss") -> Any:
        """Return the micro-batch's loss summed over its targets (0-dim), or the other result that `wanted` names.

        `counts` are the task's evaluation counts, and `predictions` its predictions by name. `part` is for a task
        with a loss over the global batch (`GlobalLoss.over`). All go through this forward, because Accelerate casts it
        to the mixed precision.
        """
        if wanted == "loss":
            return self._loss(batch)
        if wanted == "part":
            return self.task.global_part(self.model, batch)  # type: ignore[attr-defined]
        compute = self.task.evaluate_batch if wanted == "counts" else self.task.predict_batch
        return compute(self.model, batch)

    def _loss(self, batch: Batch) -> Tensor:
        if "sources" not in batch:
            return checked_loss(self.task.loss_sum(self.model, batch))
        # Apart from the batch, whose tensors a task may give to its model. A replay counts nothing.
        counted: Any = self.task.counted or SimpleNamespace()
        counted.sources = batch["sources"]
        loss = self.task.loss_sum(self.model, {name: batch[name] for name in batch if name != "sources"})
        counted.sources = None
        return checked_loss(loss)


def checked_loss(loss: Any) -> Tensor:
    """Return the loss of a micro-batch unchanged if training can use it. Nothing is read from the device.

    Raises:
        RecipeError: the loss is not a 0-dim tensor, or has no gradient.
    """
    if not isinstance(loss, Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__} and no tensor"
    elif loss.dim() > 0:
        found = f"a tensor of shape {list(loss.shape)}"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        found = "a tensor without a gradient (detached, newly made, or only of frozen weights)"
    else:
        return loss
    raise RecipeError(
        f"loss_sum of the task returned {found}; return the loss summed over the targets of the micro-batch as a 0-dim "
        "tensor that was computed from the model's output"
    )
