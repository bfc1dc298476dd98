"""How long a step takes on many GPUs: a roofline of arithmetic, memory and links, with what hides behind what."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accel_train.scale.hardware import GB, MEMORY_EFFICIENCY, Gpu, Interconnect
from accel_train.scale.traffic import Collective

OPTIMIZER_ACCESSES = 8
"""Of 4 bytes for each element: AdamW reads weight, gradient and two moments and writes three of them; the norm reads the gradient."""


@dataclass(frozen=True)
class StepTime:
    """The parts of a step, in seconds. A model: stragglers, and computing that is slower beside communication, are not in it."""

    compute_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    """Of all collectives, as if nothing ran beside them."""
    exposed_seconds: float
    """What of that nothing hides: the GPU waits."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_seconds + self.optimizer_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """Of a run that never waited for another process, 0 to 1."""
        return (self.compute_seconds + self.optimizer_seconds) / self.seconds


def model_step(
    found: Sequence[Collective],
    *,
    compute_seconds: float,
    num_micro_batches: int,
    optimizer_elements: int,
    num_moments: int,
    gpu: Gpu,
    network: Interconnect,
    overlap: bool = True,
) -> StepTime:
    """The time of a step, of which `compute_seconds` are arithmetic: a third forward, two thirds backward.

    Hidden collectives run beside the pass they belong to, one after the other, as they share the links; what of them is
    longer than the pass is waited for, and so are those that nothing runs beside. `overlap` off: all are waited for.
    """
    accesses = OPTIMIZER_ACCESSES - 2 * (2 - num_moments)
    optimizer = 4 * accesses * optimizer_elements / (gpu.memory_gb_per_second * GB * MEMORY_EFFICIENCY)

    def seconds(some: Iterable[Collective]) -> float:
        return sum(each.ring.seconds(each.kind, each.num_bytes, gpu, network) for each in some)

    total = exposed = 0.0
    for last in (False, True):
        times = 1 if last else num_micro_batches - 1
        now = [each for each in found if last or not each.per_step]
        total += times * seconds(now)
        if not overlap:
            exposed += times * seconds(now)
            continue
        for phase, share in (("forward", 1 / 3), ("backward", 2 / 3)):
            beside = seconds(each for each in now if each.phase == phase and each.is_hidden)
            alone = seconds(each for each in now if each.phase == phase and not each.is_hidden)
            exposed += times * (alone + max(0.0, beside - share * compute_seconds / num_micro_batches))
    return StepTime(compute_seconds, optimizer, total, exposed)
