"""DeepSpeed's ZeRO, stages 1 to 3: what is asked of it, what it is not asked, and how a step goes through it.

DeepSpeed reduces gradients, keeps each process's part of the optimizer, and gathers weights. What a step is stays ours: the
loss and its division, the ends of accumulation, the norm, the clip, and whether the update is made at all.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.guard import Limits
from accel_train.recipe import Parallel, Recipe
from accel_train.state import Choice
from accel_train.step import TrainingModule
from accel_train.zero_again import (
    forget_broken_pass,
    forget_order,
    knows_order,
    let_go_of_gathered_weights,
    without_comparing_order,
)
from accel_train.zero_parts import ZeroParts

BUCKET_ELEMENTS = 50_000_000
"""Gradients that are reduced at once, at most: 200 MB, which DeepSpeed holds room for while it computes them."""
PASSES_TO_LEARN_FROM = 2
"""Stage 3 notes the order of layers in one pass, and compares it between processes when the next one begins."""
SPREAD = {
    1: "the optimizer's state",
    2: "the optimizer's state and gradients",
    3: "weights, gradients and the optimizer's state",
}


def check_zero(recipe: Recipe, mixed_precision: str) -> None:
    """Refuse what cannot be had under parallel.strategy deepspeed, before anything is built.

    Raises:
        ValueError: names the setting, why, and what to do.
    """
    if recipe.parallel.strategy != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        raise ValueError(
            "parallel.strategy deepspeed needs the package deepspeed; install it: pip install 'accel-train[deepspeed]'"
        )
    for setting, why, remedy in _refused(recipe, mixed_precision):
        raise ValueError(f"{setting} cannot be had with parallel.strategy deepspeed: {why}; {remedy}")


def _refused(recipe: Recipe, mixed_precision: str) -> Iterator[tuple[str, str, str]]:
    """What is asked and cannot be had, why, and what to do."""
    elsewhere = "use parallel.strategy fsdp2 or ddp"
    if mixed_precision == "fp16":
        scale = "its loss scale is not the guarded one of this program"
        yield "precision.mixed_precision fp16", scale, f"use bf16 or no, or {elsewhere.removeprefix('use ')}"
    if recipe.precision.compile:
        yield "precision.compile", "its hooks on weights and gradients break the compiled graph", elsewhere
    if recipe.optimizer.ema_decay is not None and recipe.parallel.zero_stage == 3:
        why = "the average is of whole weights, and in zero_stage 3 no process holds them"
        yield "optimizer.ema_decay", why, f"set parallel.zero_stage to 2, or {elsewhere}"


def choose_zero(section: Parallel, world_size: int) -> Choice[int]:
    """Processes that share what the stage spreads (1: each holds all of it), with the reason."""
    if world_size == 1:
        return Choice(1, "one process: there is nobody to share the model with")
    stage = section.zero_stage
    reason = f"deepspeed, ZeRO stage {stage}: {SPREAD[stage]} spread over {world_size} processes"
    if stage == 3:
        reason += f"; learns the order of layers from {PASSES_TO_LEARN_FROM} passes of one sample, which train nothing"
    return Choice(world_size, reason)


class ZeroModule(nn.Module):
    """DeepSpeed's engine, with the face of DDP: forwarded, backwarded from outside, and told when not to reduce."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *inputs: Any) -> Any:
        """As of the module that was wrapped."""
        return self.engine(*inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, a backward is not the last one of its step (stages 2 and 3 reduce its gradients all the same)."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)


class Zero:
    """The update of a step under ZeRO, and the parts that this process holds."""

    def __init__(self, engine: Any, parts: ZeroParts, stage: int) -> None:
        self._engine, self.parts, self._stage = engine, parts, stage
        self.passes_to_learn_from = PASSES_TO_LEARN_FROM if stage == 3 else 0
        """Forwards and backwards that DeepSpeed has to see before one may break off."""

    def update_within(self, limits: Limits) -> tuple[Tensor, Tensor, None]:
        """As `step.update_within`: clip and step, or leave weights, moments and step counters untouched to the bit."""
        grad_norm = self._norm()
        norm = float(grad_norm)  # one host sync a step, which DeepSpeed makes as well
        is_skipped = not norm <= limits.skip  # NaN is less than nothing, Inf than no limit
        self._step(limits.clip, math.inf if is_skipped else norm)
        return grad_norm, torch.full((), float(is_skipped), device=grad_norm.device), None

    def drop_gradients(self) -> None:
        """Let go of gradients whose update will not be made."""
        self._step(0.0, math.inf)

    @property
    def spreads_weights(self) -> bool:
        """Whether no process holds all weights of the model."""
        return self._stage == 3

    @property
    def can_begin_again(self) -> bool:
        """Whether a step that begins now may break off: not while stage 3 does not know the order of its layers."""
        return not self.spreads_weights or knows_order(self._engine.optimizer)

    def alone(self) -> AbstractContextManager[None]:
        """Inside, stage 3 does not compare the order of its layers with other processes."""
        return without_comparing_order()

    def forget_order(self) -> None:
        """Let stage 3 learn the order of its layers anew, whatever it has seen of it, and gather all weights anew."""
        forget_order(self._engine.optimizer)

    def forget_broken_pass(self) -> None:
        """Let DeepSpeed begin a forward, whatever became of the one before."""
        forget_broken_pass(self._engine.optimizer, self._stage)

    def let_go_of_gathered_weights(self) -> None:
        """Let a forward begin that DeepSpeed is not told of, whatever became of the one before; its gradients stay as they are."""
        let_go_of_gathered_weights(self._engine.optimizer)

    def spoil_gradients(self) -> None:
        """Have NaN in the place of this process's gradients: so no process applies any."""
        self._engine.optimizer.averaged_gradients = {0: [torch.full((), math.nan, device=self.parts.device)]}

    def _norm(self) -> Tensor:
        """Of all gradients, over all processes, 0-dim fp32, the same on all; NaN or Inf where one of them is."""
        grads = [grad for group in self._engine.optimizer.averaged_gradients.values() for grad in group]
        # Squares in fp64: a norm of 1e20 is a number, and is one under DDP.
        squares = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)).double()).square()
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def _step(self, clip: float, norm: float) -> None:
        """DeepSpeed's own step, held to our norm: it clips by that, and one that is not finite makes it let go of the step."""
        optimizer = self._engine.optimizer
        known = torch.full((), norm, device=self.parts.device)
        optimizer.clip_grad = clip
        optimizer.scaled_global_norm = lambda: known  # stages 1 and 2
        optimizer._get_norm_groups = lambda: [known]  # stage 3
        self._engine.step()
        assert optimizer.overflow == (not math.isfinite(norm)), "DeepSpeed has asked for another norm than ours"


def wrap_in_zero(
    accelerator: Accelerator, inner: TrainingModule, optimizer: torch.optim.Optimizer, stage: int
) -> tuple[ZeroModule, Zero]:
    """Spread the training module's weights and its optimizer in place, and give the module that training forwards.

    `optimizer` is over the parameters of `inner.model`, by name (`optim.name_parameters`). From then on its groups hold this
    process's parts; learning rates are set on it as ever.
    """
    deepspeed = import_deepspeed()
    if accelerator.mixed_precision != "no":
        inner.forward = accelerator.autocast()(inner.forward)  # type: ignore[method-assign]
    optimizer.state.clear()  # of whole weights
    num_elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    config = {
        "train_micro_batch_size_per_gpu": 1,  # it counts with it, and nothing else
        "gradient_accumulation_steps": 1,  # it would divide by it
        "gradient_clipping": 0.0,  # set each step
        "steps_per_print": math.inf,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": min(BUCKET_ELEMENTS, num_elements)},
    }
    engine, *_ = deepspeed.initialize(model=inner, optimizer=optimizer, config=config, dist_init_required=False)
    engine.set_gradient_accumulation_boundary(True)
    parts = ZeroParts(engine.optimizer, inner.model, optimizer, stage, accelerator.device)
    return ZeroModule(engine), Zero(engine, parts, stage)


def import_deepspeed() -> Any:
    """The package, told to compile nothing: what it would is for inference. `start_accelerator` has told it which device to use."""
    # All of torch's names that it calls by their old ones, several times a step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
