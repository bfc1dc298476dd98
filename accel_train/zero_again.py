"""How DeepSpeed forgets a pass that broke off: it has no word for that, so what it has noted of the pass is put right, place by place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def knows_order(zero: Any) -> bool:
    """Whether stage 3 knows the order of its layers. Until then processes compare that order as they go, each with its own."""
    return bool(zero._get_param_coordinator().is_complete_trace())


@contextmanager
def without_comparing_order() -> Iterator[None]:
    """Inside, stage 3 takes the order of its layers as it comes: the others are not there to compare it with."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    compare = coordinator.assert_ints_same_as_other_ranks
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    try:
        yield
    finally:
        coordinator.assert_ints_same_as_other_ranks = compare


def forget_order(zero: Any) -> None:
    """Let stage 3 see its layers and gather all weights anew, from the first pass on."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in zero.module.parameters():
        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            parameter.partition()
    coordinator = zero._get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def forget_broken_pass(zero: Any, stage: int) -> None:
    """Let DeepSpeed's optimizer (0.19) begin a forward, whatever became of the one before; gradients are let go."""
    hooks = zero._backward_hook_state
    hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
    hooks.reset_for_new_step()
    reduced = zero.params_already_reduced
    for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
        reduced[key] = False
    for parameter in zero.module.parameters() if stage == 3 else ():
        parameter.grad = None  # before DeepSpeed sees them, which is for devices with streams
    zero.zero_grad()
    if stage == 3:
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        zero.averaged_gradients = {}
        zero.param_reduce_events.clear()
        let_go_of_gathered_weights(zero)
        return
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero.extra_large_param_to_reduce.clear()
    for group in range(len(zero.bit16_groups)):
        zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
    zero._release_ipg_buffers()


def let_go_of_gathered_weights(zero: Any) -> None:
    """In stage 3, whatever was gathered of weights, but for those that stay gathered on all processes; no gradient is touched."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    del FWD_MODULE_STACK[1:]
    coordinator = zero._get_param_coordinator()
    for parameter in zero.module.parameters():
        parameter.ds_active_sub_modules.clear()
    coordinator._clean_inflight_param_registry()
    for parameter in zero.module.parameters():
        if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
            parameter.partition()
    coordinator._PartitionedParameterCoordinator__active_backward_submodules.clear()
    for module in zero.module.modules():
        module._parameters._in_forward = False
        module.ds_recompute_parameters.clear()
