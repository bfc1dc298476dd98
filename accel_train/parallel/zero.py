"""DeepSpeed's ZeRO, stages 1 to 3: what is asked of it, what it is not asked, and how a step goes through it.

DeepSpeed reduces gradients, keeps each process's part of the optimizer, and gathers weights. What a step is stays ours: the
loss and its division, the ends of accumulation, the norm, the clip, and whether the update is made at all.
"""

import logging
import math
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.checkpoint.base import left_out
from accel_train.checkpoint.contents import check_fit, restore_average
from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.checkpoint.zero import ZeroShards
from accel_train.core.state import Choice
from accel_train.guard.guard import Limits
from accel_train.model.training_module import TrainingModule
from accel_train.optim.update import Update, nan_without_targets
from accel_train.parallel.dims import check_dimensions
from accel_train.parallel.gradient_watch import ZeroGradients
from accel_train.parallel.strategy import ALONE, MakeOptimizer, Strategy
from accel_train.recipe.parallel import Parallel
from accel_train.runtime.private import norms_of, set_gradient_norm

BUCKET_ELEMENTS = 50_000_000
"""Gradients that are reduced at once, at most: 200 MB, which DeepSpeed holds room for while it computes them."""
SHARDED = {
    1: "the optimizer's state",
    2: "the optimizer's state and gradients",
    3: "weights, gradients and the optimizer's state",
}


class Zero(Strategy):
    """The optimizer's state is sharded over the processes by DeepSpeed, from stage 2 gradients too, in stage 3 weights as well."""

    name = "deepspeed"
    is_replicated = False
    syncs_buffers = False
    num_copies = 1
    keeps_gradients = False
    waits_for_all_parameters = True
    notes_forward_order = True
    parts: ZeroShards
    _gradients: ZeroGradients
    _engine: Any

    @classmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return all processes."""
        if world_size == 1:
            return Choice(1, ALONE)
        reason = f"deepspeed, ZeRO stage {section.zero_stage}: {SHARDED[section.zero_stage]} sharded over {world_size} processes"
        return Choice(world_size, reason)

    def __init__(self, section: Parallel, choice: Choice[int]) -> None:
        super().__init__(section, choice)
        self._stage = section.zero_stage
        self.has_whole_weights = self._stage != 3

    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Wrap the training module in DeepSpeed's engine, which takes over the optimizer that was made of whole weights."""
        check_dimensions(inner.model, self.name)
        self.take(inner, make_optimizer)
        deepspeed = import_deepspeed()
        if self.accelerator.mixed_precision != "no":
            inner.forward = self.accelerator.autocast()(inner.forward)  # type: ignore[method-assign]
        self.optimizer.state.clear()  # of whole weights
        num_elements = sum(parameter.numel() for parameter in self.parameters)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # it counts with it, and nothing else
            "gradient_accumulation_steps": 1,  # it would divide by it
            "gradient_clipping": 0.0,  # set each step
            "steps_per_print": math.inf,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self._stage, "reduce_bucket_size": min(BUCKET_ELEMENTS, num_elements)},
        }
        # From here on the optimizer's groups hold this process's parts.
        self._engine, *_ = deepspeed.initialize(
            model=inner, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self._engine.set_gradient_accumulation_boundary(True)
        self.module, zero = self._engine, self._engine.optimizer
        self.parts = ZeroShards(zero, inner.model, self.optimizer, self._stage, self.accelerator.device)
        self._gradients = ZeroGradients(inner.model)
        return None

    def begin_step(self) -> None:
        """Forget what was noted of the step before."""
        self._gradients.begin_step()

    def without_gradient(self) -> list[str]:
        """Return the trained parameters that had no gradient in some micro-batch of this process."""
        return sorted(self._gradients.lacking)

    def end_incomplete_reduction(self) -> list[str] | None:
        """* Return the parameters that lacked a gradient of this process: DeepSpeed has mixed those of others into theirs; None if none lacks."""
        return self.without_gradient() or None

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Inside, a backward is the last one of its step or not (stages 2 and 3 reduce its gradients all the same)."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        try:
            yield
            self._gradients.end_backward()
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def independent_modules(self) -> list[nn.Module]:
        """Return the training module; none in stage 3, which gathers weights in each forward."""
        return super().independent_modules() if self.has_whole_weights else []

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this process's parts of weights and moments."""
        return self.parts.local_tensors()

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole weights by name."""
        return self.parts.shapes()

    def full_weights(self, without: Collection[str] = ()) -> dict[str, Tensor]:
        """* Gather the weights on the main process."""
        return self.parts.weights(without)

    def full_moments(self) -> dict[str, Tensor]:
        """* Gather the optimizer's state on the main process."""
        return self.parts.moments()

    def check_stored(self, folder: Path) -> None:
        """Leave it to `restore_weights`: DeepSpeed keeps tensors of its own types."""

    def restore_weights(self, folder: Path) -> None:
        """Read weights and their average into DeepSpeed's parts."""
        base = left_out(folder)
        expected = {name: shape for name, shape in self.parts.shapes().items() if name not in base}
        check_fit(expected, CheckpointReader(folder, "model").shapes)
        self.parts.load_weights(folder)
        restore_average(folder, self.average)

    def restore_optimizer(self, folder: Path) -> None:
        """Read moments and step counters into DeepSpeed's parts."""
        self.parts.load_moments(folder)

    def update_within(self, limits: Limits, share: Tensor) -> Update:
        """* Clip and update, or leave weights, moments and step counters untouched to the bit."""
        grad_norm = nan_without_targets(self._norm(), share)
        norm = float(grad_norm)  # one host sync a step, which DeepSpeed makes as well
        is_skipped = not norm <= limits.skip  # NaN is less than nothing, Inf than no limit
        self._step(limits.clip, math.inf if is_skipped else norm)
        return Update(grad_norm, torch.full((), float(is_skipped), device=grad_norm.device), None)

    def drop_gradients(self) -> None:
        """Forget the gradients of a step whose update will not be made."""
        super().drop_gradients()
        self._step(0.0, math.inf)

    def _norm(self) -> Tensor:
        """Return the norm of all gradients over all processes, 0-dim fp32; NaN or Inf where one of them is."""
        grads = [grad for group in self._engine.optimizer.averaged_gradients.values() for grad in group]
        # Squares in fp64: a norm of 1e20 is a number, and is one under DDP.
        squares = torch.linalg.vector_norm(torch.stack(norms_of(grads)).double()).square()
        if self.fault is not None:
            squares += self.fault
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def _step(self, clip: float, norm: float) -> None:
        """DeepSpeed's own step, held to our norm: it clips by that, and one that is not finite makes it skip the step."""
        optimizer = self._engine.optimizer
        known = torch.full((), norm, device=self.parts.device)
        optimizer.clip_grad = clip
        set_gradient_norm(optimizer, known)
        self._engine.step()
        assert optimizer.overflow == (not math.isfinite(norm)), "DeepSpeed used another norm than ours"


def import_deepspeed() -> Any:
    """Return the package, set to compile nothing: what it would is for inference. `start_accelerator` has set its device."""
    # All of torch's names that it calls by their old ones, several times a step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
