"""Trained parameters that take no part in the loss: found in the first step, named, and left without an update."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from accel_train.core.errors import RecipeError, StepAgain
from accel_train.engine.run import RunContext
from accel_train.observe.incident_record import named
from accel_train.parallel.strategy import Strategy


class UnusedParameters(StepAgain):
    """Parameters took no part in the first step, and DDP does not look for them yet."""


@contextmanager
def gradients_seen(model: nn.Module) -> Iterator[set[str]]:
    """Inside, collect the names of parameters that get a gradient: DeepSpeed does not keep gradients where torch does."""
    seen: set[str] = set()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(lambda _, name=name: seen.add(name)) for name, each in trained]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def check_first_step(run: RunContext, seen: Collection[str] | None = None) -> bool:
    """Name the parameters that took no part in the first step; return whether DDP has to look for them from now on.

    `seen` are the names of those with a gradient, under DeepSpeed.

    Raises:
        RecipeError: the recipe says that there are none, or DeepSpeed would decay them.
    """
    setting, strategy = run.plan.recipe.parallel.find_unused_parameters, run.strategy
    names = _without_gradient(strategy, seen)
    if not names:
        return False
    is_ddp = strategy.waits_for_all_parameters
    if is_ddp and setting == "auto" and not strategy.looks_for_unused:
        return True
    no_part = f"{_take(names)} no part in the loss of the first step"
    remedy = f"model.freeze: [{', '.join(repr(name) for name in names[:3])}{', ...' if len(names) > 3 else ''}]"
    if setting is False:
        raise RecipeError(
            f"{no_part}, and parallel.find_unused_parameters is false; freeze what never takes part ({remedy}), or set it to auto"
        )
    if not strategy.keeps_gradients:
        raise RecipeError(
            f"{no_part}, and DeepSpeed would apply weight decay to what has no gradient, unlike one process: freeze it ({remedy}), or "
            "use parallel.strategy ddp or fsdp2"
        )
    cost = "DDP looks for such parameters in each step, which costs a walk through the graph and one more collective"
    gets, costs = ("it gets", "it costs") if len(names) == 1 else ("they get", "they cost")
    if not is_ddp:
        cost = f"{gets} no update and no weight decay, on one process as on several (where {cost})"
    message = f"{no_part}: {cost}. Frozen, {costs} nothing: {remedy}"
    run.observer.on_event("unused_parameters", run.state.step, message, parameters=names)
    return False


def check_later_step(run: RunContext) -> None:
    """Check that each parameter took part, after a reduction by DDP, which ends only then.

    Raises:
        RecipeError: some did not; the other processes, which wait for their gradients, get NaN.
    """
    if (names := run.strategy.end_incomplete_reduction()) is not None:
        raise RecipeError(
            f"step {run.state.step + 1}: {_take(names or ['a parameter (in the last micro-batch)'])} no part in the loss, as in other "
            "steps; set parallel.find_unused_parameters to true, and DDP looks in each step for those that do not (a walk through the "
            "graph)"
        )


def _without_gradient(strategy: Strategy, seen: Collection[str] | None) -> list[str]:
    """Return the trained parameters that have no gradient after the backward passes of a step, on some process of DDP.

    One small collective there; the processes of a sharded model all compute the same names. `seen` as in `check_first_step`.
    """
    trained = {name: each.grad for name, each in strategy.inner.model.named_parameters() if each.requires_grad}
    if seen is not None:
        return [name for name in trained if name not in seen]
    has_none = torch.tensor([gradient is None for gradient in trained.values()], dtype=torch.uint8)
    if strategy.is_replicated and strategy.num_copies > 1:
        has_none = has_none.to(strategy.accelerator.device)
        dist.all_reduce(has_none, op=dist.ReduceOp.MAX)
    return [name for name, is_unused in zip(trained, has_none.tolist(), strict=True) if is_unused]


def _take(names: Sequence[str]) -> str:
    """Return `a takes`, `a, b take`, `a, b, c and 2 more take`."""
    return f"{named(names)} take{'s' * (len(names) == 1)}"
