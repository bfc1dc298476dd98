"""DeepSpeed's ZeRO, stages 1 to 3: the parts of a step that DeepSpeed runs, and the parts that it does not.

DeepSpeed reduces gradients, keeps each process's part of the optimizer, and gathers weights. This program divides the
loss, ends the accumulation, computes the norm, and clips. It also decides whether the update is applied.
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
from accel_train.checkpoint.zero_shards import ZeroShards
from accel_train.core.state import Choice
from accel_train.guard.guard import Limits
from accel_train.model.tensors import Tensors, numel, split_state, trained
from accel_train.model.training_module import TrainingModule
from accel_train.optim.update import Update, nan_without_targets
from accel_train.parallel.dims import check_dimensions
from accel_train.parallel.strategy import ALONE, MakeOptimizer, Strategy
from accel_train.recipe.parallel import Parallel
from accel_train.runtime.private import norms_of, set_gradient_norm

BUCKET_ELEMENTS = 50_000_000
"""Largest number of gradient elements in one reduction. DeepSpeed reserves 200 MB for them during the backward."""
SHARDED = {
    1: "the optimizer's state",
    2: "the optimizer's state and gradients",
    3: "weights, gradients and the optimizer's state",
}


class Zero(Strategy):
    """Strategy in which DeepSpeed shards the optimizer's state over the processes.

    Stage 2 also shards gradients, and stage 3 also weights.
    """

    name = "deepspeed"
    is_replicated = False
    syncs_buffers = False
    keeps_gradients = False
    waits_for_all_parameters = True
    notes_forward_order = True
    num_copies = 1
    parts: ZeroShards
    _gradients: "GradientWatch"
    _engine: Any

    @classmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return the number of all processes."""
        if world_size == 1:
            return Choice(1, ALONE)
        stage = section.zero_stage
        return Choice(
            world_size, f"deepspeed, ZeRO stage {stage}: {SHARDED[stage]} sharded over {world_size} processes"
        )

    def __init__(self, section: Parallel, choice: Choice[int]) -> None:
        super().__init__(section, choice)
        self._stage = section.zero_stage
        self.has_whole_weights = self._stage != 3

    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Wrap the training module in DeepSpeed's engine. It takes over the optimizer built over whole weights."""
        check_dimensions(inner.model, self.name)
        self.take(inner, make_optimizer)
        deepspeed = import_deepspeed()
        if self.accelerator.mixed_precision != "no":
            inner.forward = self.accelerator.autocast()(inner.forward)  # type: ignore[method-assign]
        # The state belongs to whole weights.
        self.optimizer.state.clear()
        config = {
            # DeepSpeed only uses it to count.
            "train_micro_batch_size_per_gpu": 1,
            # DeepSpeed would divide by it.
            "gradient_accumulation_steps": 1,
            # The limit is set at each step.
            "gradient_clipping": 0.0,
            "steps_per_print": math.inf,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self._stage,
                "reduce_bucket_size": min(BUCKET_ELEMENTS, numel(self.parameters)),
            },
        }
        # From here on, the optimizer's groups hold this process's parts.
        self._engine, *_ = deepspeed.initialize(
            model=inner, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self._engine.set_gradient_accumulation_boundary(True)
        self.module, zero = self._engine, self._engine.optimizer
        self.parts = ZeroShards(zero, inner.model, self.optimizer, self._stage, self.accelerator.device)
        self._gradients = GradientWatch(inner.model)
        return None

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        self._gradients.begin_step()

    def without_gradient(self) -> list[str]:
        """Return the trained parameters that had no gradient in some micro-batch of this process."""
        return sorted(self._gradients.lacking)

    def end_incomplete_reduction(self) -> list[str] | None:
        """* Return the parameters that lacked a gradient of this process; None if all have one.

        DeepSpeed has mixed gradients of other processes into theirs.
        """
        return self.without_gradient() or None

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Mark a backward inside the context as the last one of its step or not. Stages 2 and 3 always reduce."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        try:
            yield
            self._gradients.end_backward()
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def independent_modules(self) -> list[nn.Module]:
        """Return the training module; empty in stage 3, because it gathers weights in each forward."""
        return super().independent_modules() if self.has_whole_weights else []

    def local_tensors(self) -> Tensors:
        """Return this process's parts of weights and moments."""
        return self.parts.local_tensors()

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole weights by name."""
        return self.parts.shapes()

    def full_weights(self, without: Collection[str] = (), narrow: Collection[str] = ()) -> Tensors:
        """* Gather the weights on the main process."""
        return self.parts.weights(without, narrow)

    def full_moments(self) -> Tensors:
        """* Gather the optimizer's state on the main process."""
        return self.parts.moments()

    def check_stored(self, folder: Path) -> None:
        """Do nothing: DeepSpeed stores tensors in other types. `restore_weights` checks them."""

    def restore_weights(self, folder: Path) -> None:
        """Load weights and their average into DeepSpeed's parts."""
        base = left_out(folder)
        expected: dict[str, torch.Size | None] = dict.fromkeys(split_state(self.inner.model)[1])
        expected |= {name: shape for name, shape in self.parts.shapes().items() if name not in base}
        check_fit(expected, CheckpointReader(folder, "model").shapes)
        self.parts.load_weights(folder)
        restore_average(folder, self.average)

    def restore_optimizer(self, folder: Path) -> None:
        """Load moments and step counters into DeepSpeed's parts."""
        self.parts.load_moments(folder)

    def update_within(self, limits: Limits, share: Tensor) -> Update:
        """* Clip and update, or leave weights, moments, and step counters bit-identical."""
        grad_norm = nan_without_targets(self._norm(), share)
        # One host sync per step. DeepSpeed also makes one.
        norm = float(grad_norm)
        # Every comparison with NaN is false, and Inf is above every limit.
        is_skipped = not norm <= limits.skip
        self._step(limits.clip, math.inf if is_skipped else norm)
        return Update(grad_norm, torch.full((), float(is_skipped), device=grad_norm.device), None)

    def drop_gradients(self) -> None:
        """Free the gradients of a step that will not be applied."""
        super().drop_gradients()
        self._step(0.0, math.inf)

    def _norm(self) -> Tensor:
        """Return the norm of all gradients over all processes, 0-dim fp32; NaN or Inf if any gradient has one."""
        grads = [grad for group in self._engine.optimizer.averaged_gradients.values() for grad in group]
        # Square in fp64, so that a norm of 1e20 stays finite, as under DDP.
        squares = torch.linalg.vector_norm(torch.stack(norms_of(grads)).double()).square()
        if self.fault is not None:
            squares += self.fault
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def _step(self, clip: float, norm: float) -> None:
        """Run DeepSpeed's step with our norm. DeepSpeed clips by it, and skips the step if it is not finite."""
        optimizer = self._engine.optimizer
        known = torch.full((), norm, device=self.parts.device)
        optimizer.clip_grad = clip
        set_gradient_norm(optimizer, known)
        self._engine.step()
        assert optimizer.overflow == (not math.isfinite(norm)), "DeepSpeed used our norm"


class GradientWatch:
    """Records the trained weights that get no gradient in a backward pass.

    DeepSpeed does not keep gradients where torch does, so hooks record them.
    """

    def __init__(self, module: nn.Module) -> None:
        weights = trained(module)
        self._names, self._seen = set(weights), set[str]()
        self.lacking = set[str]()
        """Names of weights that had no gradient in some micro-batch of the step on this process."""
        for name, each in weights.items():
            each.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        self.lacking.clear()
        self._seen.clear()

    def end_backward(self) -> None:
        """Record the weights that had no gradient in the last backward pass."""
        self.lacking |= self._names - self._seen
        self._seen.clear()


def import_deepspeed() -> Any:
    """Return the deepspeed package, without its compiled extension: it is for inference.

    `start_accelerator` has set its device.
    """
    # DeepSpeed calls several torch functions by their old names, several times per step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
