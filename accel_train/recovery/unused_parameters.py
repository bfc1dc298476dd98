"""Find trained parameters that take no part in the loss of the first step, and name them.

They get no update.
"""

import torch
import torch.distributed as dist

from accel_train.core.errors import RecipeError, StepAgain
from accel_train.engine.run import RunContext
from accel_train.model.tensors import trained
from accel_train.observe.incident_record import named
from accel_train.parallel.strategy import Strategy


class UnusedParameters(StepAgain):
    """Raised if parameters took no part in the first step and DDP does not look for them yet."""


def check_first_step(run: RunContext) -> bool:
    """Name the parameters that took no part in the first step; return whether to repeat the step.

    The step is repeated if DDP has to look for such parameters.

    Raises:
        RecipeError: the recipe rules out such parameters, or DeepSpeed would decay them.
    """
    setting, strategy = run.plan.recipe.parallel.find_unused_parameters, run.strategy
    names = _without_gradient(strategy)
    if not names:
        return False
    has_to_look = strategy.waits_for_all_parameters and strategy.keeps_gradients
    if has_to_look and setting == "auto" and not strategy.looks_for_unused:
        if strategy.is_replicated:
            return True
        strategy.look_for_unused()
    unused = f"the loss of the first step does not use {named(names)}"
    remedy = f"model.freeze: [{', '.join(repr(name) for name in names[:3])}{', ...' if len(names) > 3 else ''}]"
    if setting is False:
        raise RecipeError(
            f"{unused}, and parallel.find_unused_parameters is false. Freeze unused parameters ({remedy}), or set "
            "parallel.find_unused_parameters to auto"
        )
    if not strategy.keeps_gradients:
        raise RecipeError(
            f"{unused}. DeepSpeed would apply weight decay to parameters without a gradient, unlike one process. "
            f"Freeze them ({remedy}), or use parallel.strategy ddp or fsdp2"
        )
    cost = "DDP looks for unused parameters in each step, at the cost of a graph traversal and one more collective"
    if has_to_look and not strategy.is_replicated:
        cost = "fsdp2 looks for unused parameters in each step, with one more collective between the hosts"
    elif not has_to_look:
        cost = f"unused parameters get no update and no weight decay. With several processes, {cost}"
    message = f"{unused}: {cost}. Frozen parameters cost nothing: {remedy}"
    run.observer.on_event("unused_parameters", run.state.step, message, parameters=names)
    return False


def check_later_step(run: RunContext) -> None:
    """Check that each parameter took part in the step, if the reduction would otherwise hang or mix gradients.

    Raises:
        RecipeError: a parameter took no part. Other processes of DDP wait for their gradients and get NaN.
    """
    if (names := run.strategy.end_incomplete_reduction()) is None:
        return
    remedy = "Set parallel.find_unused_parameters to true, so that each step looks for unused parameters"
    if not run.strategy.keeps_gradients:
        remedy = "DeepSpeed would still apply weight decay, or mix gradients. Use parallel.strategy ddp or fsdp2"
    unused = named(names or ["a parameter (in the last micro-batch)"])
    raise RecipeError(f"step {run.state.step + 1}: the loss does not use {unused}, unlike other steps. {remedy}")


def _without_gradient(strategy: Strategy) -> list[str]:
    """Return the trained parameters without a gradient after the backward passes of a step.

    If the strategy waits for all parameters, a parameter counts if it has no gradient on any process. This takes one
    small collective.
    """
    here = set(strategy.without_gradient())
    names = list(trained(strategy.inner.model))
    has_none = torch.tensor([name in here for name in names], dtype=torch.uint8)
    if strategy.waits_for_all_parameters:
        has_none = has_none.to(strategy.accelerator.device)
        dist.all_reduce(has_none, op=dist.ReduceOp.MAX)
    return [name for name, is_unused in zip(names, has_none.tolist(), strict=True) if is_unused]
