"""The first minutes on several GPUs: measure every link, and compare training on all GPUs with training on one.

Both run in processes of their own, one per GPU. Every part has a time limit.
"""

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from accel_train.checkpoint.run_recipe import named_recipe
from accel_train.core.hardware import LINK_EFFICIENCY, find_gpu
from accel_train.core.state import JsonRecord
from accel_train.core.terminal import busy
from accel_train.experiments.equality import SAME, STEPS, compare_layouts, toy_layouts
from accel_train.experiments.processes import Processes
from accel_train.runtime.doctor import Finding, finding_of
from accel_train.runtime.links import bus_gb_per_second, measure, transfers

START_SECONDS = 300.0
"""Time limit of the first transfer, for which the processes start and connect. They may read torch from a slow disk."""
TRANSFER_SECONDS = 60.0
"""Time limit of one transfer with its repetitions."""
BYTES_ON_GPU, BYTES_ON_CPU = 2**26, 2**18
"""Bytes of a measured tensor per process."""
SLOW_REMEDY = (
    "below half of what `plan` assumes, or through the host: `nvidia-smi topo -m` shows how the GPUs are connected. "
    "Without a switch, a pair has only a part of the links"
)


def examine_gpus(num_processes: int, record: JsonRecord, *, on_gpus: bool) -> Iterator[Finding]:
    """Yield the findings about links and training, until a transfer fails. Add the numbers to `record`.

    Args:
        num_processes: number of GPUs, or of processes on the CPU; at least 2.
        record: receives the rates in GB/s.
        on_gpus: whether to use GPUs. Rates of the CPU are not compared.
    """
    rates = dict[str, float]()
    assumed, num_bytes = 0.0, num_processes * (BYTES_ON_GPU if on_gpus else BYTES_ON_CPU)
    if on_gpus:
        if gpu := find_gpu(torch.cuda.get_device_name()):
            assumed = gpu.link_gb_per_second * LINK_EFFICIENCY
        missing = [
            f"{a} to {b}"
            for a, b in permutations(range(num_processes), 2)
            if not torch.cuda.can_device_access_peer(a, b)
        ]
        text = f"missing from {', '.join(missing)}" if missing else "between all GPUs"
        yield finding_of(missing, "peer access", text, SLOW_REMEDY)
    text = f"`plan` assumes {assumed:.3g} GB/s" if assumed else "not compared"
    yield Finding("ok", "links", f"{'NCCL' if on_gpus else 'gloo on the CPU'}, bus bandwidth as in nccl-tests; {text}")
    record |= {"bytes": num_bytes, "assumed_gb_per_second": assumed, "gb_per_second": rates}
    start = partial(Processes, on_gpus=on_gpus)
    with TemporaryDirectory() as temporary, start(1) as one:
        folder = Path(temporary)
        with start(num_processes) as several:
            for name, pair in transfers(num_processes).items():
                with busy(name):
                    failure = several.call(
                        partial(measure, name, pair, num_bytes, folder), TRANSFER_SECONDS if rates else START_SECONDS
                    )
                if failure is not None:
                    yield Finding(
                        "bad",
                        name,
                        f"{failure.text}; nothing after it was examined",
                        "if it works with NCCL_P2P_DISABLE=1, turn off ACS and IOMMU (NCCL's guide, Troubleshooting)",
                    )
                    return
                slowest = max(float(file.read_text()) for file in folder.glob(f"{name}-*"))
                rates[name] = rate = bus_gb_per_second(name, num_bytes, slowest, num_processes)
                yield finding_of(rate < assumed / 2, name, f"{rate:.3g} GB/s", SLOW_REMEDY)
        for strategy in ("ddp", "fsdp2"):
            recipe = named_recipe("gpt_tiny", ["--parallel.strategy", strategy])
            layout, plain = toy_layouts(recipe, num_processes, num_processes)
            with busy(f"training with {strategy}"), start(layout.processes) as several:
                equality = compare_layouts(layout, plain, one, several, folder)
            yield finding_of(
                equality.first or equality.reason,
                strategy,
                f"{STEPS} steps on {layout.processes} processes and on 1: {equality} (limit {SAME:g})",
                "do not train with this strategy here",
                "bad",
            )
