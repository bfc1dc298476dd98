"""Forward and backward of a step, and its random numbers. Nothing here waits for the device."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from accel_train.engine.agreement import Agreement
from accel_train.model.kernels.router_loss import RouterLoss
from accel_train.optim.update import number_on_host
from accel_train.parallel.strategy import Strategy

MicroBatch = tuple[Mapping[str, Tensor], int]
"""Tensors by name on the device, and their number of targets on this process."""


def forward_backward(
    strategy: Strategy, micro_batches: Sequence[MicroBatch], agreement: Agreement, *, reduce: bool = True
) -> Tensor:
    """Accumulate the gradient of (loss sum / targets of the global batch); return this process's loss sum, detached.

    The loss is divided once, by the count over all processes and micro-batches. So the gradient does not depend on how
    the global batch is split. A loss that is not finite sends NaN through the backward. All processes share the
    gradient norm, so all of them see the NaN. Without `reduce`, each process keeps its gradients for a later reduction.
    """
    if agreement.router_loss is not None:
        with _over_the_global_batch(agreement.router_loss, strategy, micro_batches):
            return _accumulate(strategy, micro_batches, agreement, reduce)
    return _accumulate(strategy, micro_batches, agreement, reduce)


def _over_the_global_batch(
    router_loss: RouterLoss, strategy: Strategy, micro_batches: Sequence[MicroBatch]
) -> AbstractContextManager[None]:
    return router_loss.over(
        lambda batch: strategy.inner(batch, "routing"),
        micro_batches,
        strategy.accelerator.device,
        is_alone=strategy.accelerator.num_processes == 1,
        one_each=strategy.accelerator.gradient_accumulation_steps == 1,
        can_fail_alone=not strategy.meets_in_forward,
    )


def _accumulate(strategy: Strategy, micro_batches: Sequence[MicroBatch], agreement: Agreement, reduce: bool) -> Tensor:
    loss_sums = []
    last = len(micro_batches) - 1
    strategy.fault = None
    for index, (batch, num_targets) in enumerate(micro_batches):
        strategy.accelerator.sync_gradients = index == last  # read by user code
        with strategy.accumulating(reduce and index == last):
            loss_sum = strategy.module(batch)
            detached = loss_sum.detach()
            if index == 0:
                share = agreement.share_of_a_target()
                if strategy.accelerator.scaler is not None:
                    share = strategy.accelerator.scaler.scale(share)
            # A filler that keeps processes together, or a batch without labels, has no weight.
            if num_targets == 0:
                loss_sum.backward(0 * share)
                detached = torch.zeros_like(detached)
            else:
                weight = _weight(share, detached)
                if weight is not share:
                    fault = weight - weight
                    strategy.fault = fault if strategy.fault is None else strategy.fault + fault
                loss_sum.backward(weight)
            loss_sums.append(detached)
    return loss_sums[0] if last == 0 else torch.stack(loss_sums).sum()


def _weight(share: Tensor, loss: Tensor) -> Tensor:
    """Return the weight of a loss in the gradient: its share, or NaN if the loss is not finite."""
    # If the host has the number, launch no operators.
    if type(loss) is Tensor and loss.device.type == "cpu" and math.isfinite(number_on_host(loss)):
        return share
    return share + (loss - loss)  # x - x is 0, or NaN if x is not finite


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random numbers of a step (dropout) from `seed`, `step`, and `rank`.

    So a checkpoint needs no generator states, and a resume repeats the same dropout. An evaluation or a text sample in
    between changes nothing. The mixing function is splitmix64 (Steele, Lea & Flood 2014).
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    # `torch.manual_seed` would visit every backend, so the default generators are seeded directly.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(mixed)
