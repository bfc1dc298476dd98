"""Peaks, memory and links of GPUs and networks between nodes, from vendor data sheets; and CPU cores of this process.

`plan` and MFU use the GPUs.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from accel_train.core.format import did_you_mean
from accel_train.core.state import Choice

GB = 10**9

LINK_EFFICIENCY = 0.8
"""Share of a link's nominal rate that large collectives reach. Assumed, not measured."""
MEMORY_EFFICIENCY = 0.8
"""Share of the nominal memory rate that optimizer kernels reach. Assumed, not measured."""
PEAK_DTYPES = ("bf16", "fp16", "tf32", "fp32")
ASSUMED_MFU = {True: 0.4, False: 0.3}
"""Assumed fraction of a GPU's peak, with and without torch.compile, for GPT-like models of 100M or more parameters.

Measured on one H100: GPT-2 of 124M 0.39 compiled and 0.31 not, of 350M 0.43 compiled. Small models reach less.
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it (an MI250X is two). Memory and links are 0 if unknown."""

    peak_tflops: tuple[float | None, float | None, float | None, float]
    """Dense peak for each of `PEAK_DTYPES`, in TFLOP/s. None: the device does not support the type."""
    memory_gib: float = 0
    """Memory in GiB, rounded down, as torch reports it."""
    memory_gb_per_second: float = 0
    link: str = ""
    """Link between the GPUs of a node."""
    link_gb_per_second: float = 0
    """Rate in one direction, to all GPUs of the node together."""


# Peaks of chips that are sold under several names.
_A100, _H100 = (312, 312, 156, 19.5), (989.4, 989.4, 494.7, 66.9)
# Keys are words of torch.cuda.get_device_name; values are from vendor data sheets. If a sheet counts 2:4 sparsity, the
# peak is half its figure. If a GeForce has two rates, the rate with fp32 accumulation counts. Sheets quote NVLink in
# both directions; these rates are for one direction.
GPUS: Mapping[str, Gpu] = {
    "P100 PCIE": Gpu((None, 18.7, None, 9.3)),
    "P100 SXM2": Gpu((None, 21.2, None, 10.6)),
    "V100": Gpu((None, 125, None, 15.7), 15.7, 900, "NVLink 2", 150),
    "V100 PCIE": Gpu((None, 112, None, 14), 15.7, 900, "NVLink 2", 150),
    "V100S PCIE": Gpu((None, 130, None, 16.4)),
    "T4": Gpu((None, 65, None, 8.1), 14.5, 320, "PCIe 3", 16),
    "Quadro RTX 6000": Gpu((None, 130.5, None, 16.3)),
    "Quadro RTX 8000": Gpu((None, 130.5, None, 16.3)),
    "RTX 2080 Ti": Gpu((None, 53.8, None, 13.4)),
    "A100": Gpu(_A100, 79.1, 2039, "NVLink 3", 300),
    "A100 40GB": Gpu(_A100, 39.3, 1555, "NVLink 3", 300),
    "A800": Gpu(_A100, 79.1, 2039, "NVLink 3", 200),
    "A30": Gpu((165, 165, 82, 10.3), 23.5, 933, "PCIe 4", 32),
    "A10": Gpu((125, 125, 62.5, 31.2), 22.0, 600, "PCIe 4", 32),
    "A10G": Gpu((70, 70, 35, 31.5), 22.0, 600, "PCIe 4", 32),
    "A40": Gpu((149.7, 149.7, 74.8, 37.4), 44.4, 696, "PCIe 4", 32),
    "RTX A4000": Gpu((76.7, 76.7, 38.3, 19.2)),
    "RTX A5000": Gpu((111.1, 111.1, 55.6, 27.8)),
    "RTX A6000": Gpu((154.8, 154.8, 77.4, 38.7), 47.4, 768, "PCIe 4", 32),
    "RTX 3080": Gpu((59.5, 59.5, 29.8, 29.8)),
    "RTX 3090": Gpu((71, 71, 35.6, 35.6), 23.5, 936, "PCIe 4", 32),
    "RTX 3090 Ti": Gpu((80, 80, 40, 40)),
    "L4": Gpu((121, 121, 60, 30.3), 22.0, 300, "PCIe 4", 32),
    "L20": Gpu((119.5, 119.5, 59.8, 59.8)),
    "L40": Gpu((181, 181, 90.5, 90.5), 44.4, 864, "PCIe 4", 32),
    "L40S": Gpu((362, 362, 183, 91.6), 44.4, 864, "PCIe 4", 32),
    "RTX 6000 Ada": Gpu((364.2, 364.2, 182.1, 91.1), 47.4, 960, "PCIe 4", 32),
    "RTX 4080": Gpu((97.5, 97.5, 48.7, 48.7)),
    "RTX 4090": Gpu((165.2, 165.2, 82.6, 82.6), 23.5, 1008, "PCIe 4", 32),
    "RTX 5080": Gpu((112.6, 112.6, 56.3, 56.3)),
    "RTX 5090": Gpu((209.5, 209.5, 104.8, 104.8), 31.3, 1792, "PCIe 5", 64),
    # SXM; torch names it "NVIDIA H100 80GB HBM3".
    "H100": Gpu(_H100, 79.1, 3350, "NVLink 4", 450),
    "H100 PCIe": Gpu((756, 756, 378, 51), 79.1, 2000, "PCIe 5", 64),
    "H100 NVL": Gpu((835, 835, 417.5, 60), 93.0, 3900, "PCIe 5", 64),
    "H800": Gpu(_H100, 79.1, 3350, "NVLink 4, cut down", 200),
    "H20": Gpu((148, 148, 74, 44), 95.0, 4000, "NVLink 4", 450),
    "H200": Gpu(_H100, 139.8, 4800, "NVLink 4", 450),
    "H200 NVL": Gpu((835, 835, 417.5, 60), 139.8, 4800, "PCIe 5", 64),
    "GH200": Gpu(_H100, 94.5, 4000, "NVLink 4", 450),
    "B200": Gpu((2250, 2250, 1125, 75), 178.3, 8000, "NVLink 5", 900),
    "GB200": Gpu((2500, 2500, 1250, 80), 184.0, 8000, "NVLink 5", 900),
    "B300": Gpu((2250, 2250, 1125, 75), 267.0, 8000, "NVLink 5", 900),
    "GB300": Gpu((2500, 2500, 1250, 80), 276.0, 8000, "NVLink 5", 900),
    "MI210": Gpu((181, 181, None, 45.3)),
    "MI250": Gpu((181, 181, None, 45.3)),
    "MI250X": Gpu((191.5, 191.5, None, 47.9)),
    "MI300A": Gpu((980.6, 980.6, 490.3, 122.6)),
    "MI300X": Gpu((1307.4, 1307.4, 653.7, 163.4), 191.9, 5300, "Infinity Fabric", 448),
    "MI325X": Gpu((1307.4, 1307.4, 653.7, 163.4), 255.9, 6000, "Infinity Fabric", 448),
    "MI350X": Gpu((2306.9, 2306.9, None, 144.2), 287.9, 8000, "Infinity Fabric", 538),
    "MI355X": Gpu((2516.6, 2516.6, None, 157.3), 287.9, 8000, "Infinity Fabric", 538),
}
FLOAT8_GPUS = (
    "L4", "L20", "L40", "L40S", "RTX 6000 Ada", "RTX 4080", "RTX 4090", "RTX 5080", "RTX 5090", "H100", "H100 PCIe",
    "H100 NVL", "H800", "H20", "H200", "H200 NVL", "GH200", "B200", "GB200", "B300", "GB300",
)  # fmt: skip
"""GPUs that multiply float8 as torchao does: compute capability 8.9 and above."""
# Words that mark a different chip, or a part of a chip, under an otherwise equal name.
_VARIANT_WORDS = frozenset({"ti", "super", "laptop", "mobile", "max", "d", "mig"})


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's instruction sets by their Linux names (`avx512_bf16`). Empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU for a `torch.cuda.get_device_name()`, or None if the table has no match.

    The match is the longest table name whose words all occur in the name. A laptop, Ti, Super or MIG variant only
    matches itself.
    """
    words = _words(name)
    matching = [
        known for known in GPUS if _words(known) <= words and _words(known) & _VARIANT_WORDS == words & _VARIANT_WORDS
    ]
    return GPUS[max(matching, key=len)] if matching else None


def known_gpu(name: str) -> Gpu:
    """Return the GPU of a name that a user gave; raise ValueError if the table has no match."""
    known = find_gpu(name)
    if known is None:
        meant = did_you_mean(name, GPUS, "known GPUs include H100 and A100", at_most=3, least=0.4)
        raise ValueError(f"--gpu {name}: the peak of this GPU is unknown; {meant}")
    return known


def has_float8(name: str) -> bool:
    """Return whether the GPU with this name multiplies float8. False if unknown."""
    gpu = find_gpu(name)
    return any(gpu is GPUS[each] for each in FLOAT8_GPUS)


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the dense peak of a GPU in floating-point operations per second, or None if unknown.

    Raises:
        ValueError: `dtype` is not one of bf16, fp16, tf32, fp32.
    """
    if dtype not in PEAK_DTYPES:
        raise ValueError(f"dtype={dtype!r} has no known peak. Give one of {', '.join(PEAK_DTYPES)}")
    gpu = find_gpu(name)
    tflops = gpu.peak_tflops[PEAK_DTYPES.index(dtype)] if gpu else None
    return tflops and tflops * 1e12


@cache
def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


@dataclass(frozen=True)
class Interconnect:
    """A network between nodes."""

    name: str
    gb_per_second: float
    """Rate in one direction, per GPU or per node."""
    per: str
    """Unit of the rate: `GPU` (one adapter each) or `node` (one adapter, shared by its GPUs)."""


INTERCONNECTS: Mapping[str, Interconnect] = {
    each.name: each
    for each in (
        Interconnect("infiniband-xdr", 100, "GPU"),  # 800 Gb/s
        Interconnect("infiniband-ndr", 50, "GPU"),  # 400 Gb/s: DGX H100
        Interconnect("infiniband-hdr", 25, "GPU"),  # 200 Gb/s: DGX A100
        Interconnect("roce-400", 50, "GPU"),  # Meta's Grand Teton, 400 Gb/s a GPU
        Interconnect("roce-200", 25, "GPU"),  # MosaicML's A100 nodes: 1600 Gb/s for 8 GPUs
        Interconnect("efa-3200", 400, "node"),  # AWS p5: 3200 Gb/s a node
        Interconnect("efa-400", 50, "node"),  # AWS p4d: 400 Gb/s a node
        Interconnect("ethernet-100", 12.5, "node"),
        Interconnect("ethernet-25", 3.125, "node"),
        Interconnect("ethernet-10", 1.25, "node"),
    )
}
USUAL: Mapping[str, str] = {
    "NVLink 3": "infiniband-hdr",
    **dict.fromkeys(("NVLink 4", "NVLink 4, cut down", "NVLink 5", "Infinity Fabric"), "infiniband-ndr"),
}
"""Usual network of GPUs with these links. For other links, ethernet-100 is assumed."""


def choose_interconnect(name: str | None, gpu: Gpu | None) -> Choice[Interconnect]:
    """Return the named network between nodes, or the usual network for this GPU.

    Raises:
        ValueError: the table has no network with this name.
    """
    if name is not None:
        if name not in INTERCONNECTS:
            meant = did_you_mean(name, INTERCONNECTS, least=0.4)
            raise ValueError(
                f"--interconnect={name} is not known; {meant}{' ' * bool(meant)}there are {', '.join(INTERCONNECTS)}"
            )
        return Choice(INTERCONNECTS[name], "as --interconnect says")
    link = "" if gpu is None else gpu.link
    return Choice(INTERCONNECTS[USUAL.get(link, "ethernet-100")], "assumed; --interconnect names another")


def usable_cores(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Choice[int]:
    """Return the number of CPU cores this process may use, and its source: the CPU affinity or the container's quota.

    The quota is cgroup v2's `cpu.max` ("MICROSECONDS PERIOD" or "max PERIOD") of the process's group or of a parent
    group (https://docs.kernel.org/admin-guide/cgroup-v2.html). The smaller limit counts. A quota rounds down to whole
    cores, but to at least one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reason = "in this process's affinity" if cores < (os.cpu_count() or 1) else "of this machine"
    with suppress(OSError):  # not Linux
        groups = [line.removeprefix("0::/") for line in cgroup.read_text().splitlines() if line.startswith("0::/")]
        for group in [Path(name) for name in groups[:1]]:
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # the root group has no cpu.max file, and "max" means no limit
                    quota, period = map(int, (root / folder / "cpu.max").read_text().split())
                    if quota // period < cores:
                        cores, reason = max(1, quota // period), "by the CPU quota of its container (cpu.max)"
    return Choice(cores, reason)
