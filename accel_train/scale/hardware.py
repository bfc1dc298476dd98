"""Memory and links of GPUs, and networks between nodes, from the makers' sheets: what a model of a step's time divides by."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from accel_train.observe.throughput import matching_device
from accel_train.state import Choice

GB = 10**9

LINK_EFFICIENCY = 0.8
"""Of a link's nominal rate in large collectives: assumed."""
MEMORY_EFFICIENCY = 0.8
"""Of the memory's nominal rate in the optimizer's kernels: assumed."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the model of time needs it."""

    memory_gib: float
    """What torch reports of it, rounded down."""
    memory_gb_per_second: float
    link: str
    """To the other GPUs of a node."""
    link_gb_per_second: float
    """One direction, to all of them together."""


# Memory, its rate, and links: data sheets of the makers. NVLink is quoted there in both directions; here it is one.
GPUS: Mapping[str, Gpu] = {
    "V100": Gpu(15.7, 900, "NVLink 2", 150),
    "T4": Gpu(14.5, 320, "PCIe 3", 16),
    "A100": Gpu(79.1, 2039, "NVLink 3", 300),
    "A100 40GB": Gpu(39.3, 1555, "NVLink 3", 300),
    "A800": Gpu(79.1, 2039, "NVLink 3", 200),
    "A10": Gpu(22.0, 600, "PCIe 4", 32),
    "A10G": Gpu(22.0, 600, "PCIe 4", 32),
    "A30": Gpu(23.5, 933, "PCIe 4", 32),
    "A40": Gpu(44.4, 696, "PCIe 4", 32),
    "RTX A6000": Gpu(47.4, 768, "PCIe 4", 32),
    "RTX 3090": Gpu(23.5, 936, "PCIe 4", 32),
    "RTX 4090": Gpu(23.5, 1008, "PCIe 4", 32),
    "RTX 5090": Gpu(31.3, 1792, "PCIe 5", 64),
    "RTX 6000 Ada": Gpu(47.4, 960, "PCIe 4", 32),
    "L4": Gpu(22.0, 300, "PCIe 4", 32),
    "L40": Gpu(44.4, 864, "PCIe 4", 32),
    "L40S": Gpu(44.4, 864, "PCIe 4", 32),
    "H100": Gpu(79.1, 3350, "NVLink 4", 450),
    "H100 PCIe": Gpu(79.1, 2000, "PCIe 5", 64),
    "H100 NVL": Gpu(93.0, 3900, "PCIe 5", 64),
    "H800": Gpu(79.1, 3350, "NVLink 4, cut down", 200),
    "H20": Gpu(95.0, 4000, "NVLink 4", 450),
    "H200": Gpu(139.8, 4800, "NVLink 4", 450),
    "H200 NVL": Gpu(139.8, 4800, "PCIe 5", 64),
    "GH200": Gpu(94.5, 4000, "NVLink 4", 450),
    "B200": Gpu(178.3, 8000, "NVLink 5", 900),
    "GB200": Gpu(184.0, 8000, "NVLink 5", 900),
    "B300": Gpu(267.0, 8000, "NVLink 5", 900),
    "GB300": Gpu(276.0, 8000, "NVLink 5", 900),
    "MI300X": Gpu(191.9, 5300, "Infinity Fabric", 448),
    "MI325X": Gpu(255.9, 6000, "Infinity Fabric", 448),
    "MI350X": Gpu(287.9, 8000, "Infinity Fabric", 538),
    "MI355X": Gpu(287.9, 8000, "Infinity Fabric", 538),
}


@dataclass(frozen=True)
class Interconnect:
    """A network between nodes."""

    name: str
    gb_per_second: float
    """One direction, of a GPU or of a whole node."""
    per: str
    """`GPU` (an adapter for each) or `node` (one adapter, which its GPUs share)."""


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
    **dict.fromkeys(("NVLink 4", "NVLink 5", "Infinity Fabric"), "infiniband-ndr"),
}
"""The network that GPUs with such links mostly come with: of others nothing is known, and ethernet-100 is assumed."""


def gpu_facts(name: str) -> Gpu | None:
    """The GPU of this name (as `peak_flops` reads names); None where the table has it not."""
    known = matching_device(name, GPUS)
    return None if known is None else GPUS[known]


def choose_interconnect(asked: str | None, gpu: Gpu | None) -> Choice[Interconnect]:
    """The network between nodes: the one asked for, or what GPUs like this one mostly come with.

    Raises:
        ValueError: there is none of that name in the table.
    """
    if asked is not None:
        if asked not in INTERCONNECTS:
            near = get_close_matches(asked, INTERCONNECTS, n=1, cutoff=0.4)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"--interconnect={asked} is not known; {meant}there are {', '.join(INTERCONNECTS)}")
        return Choice(INTERCONNECTS[asked], "as --interconnect says")
    link = "" if gpu is None else gpu.link.partition(",")[0]
    return Choice(INTERCONNECTS[USUAL.get(link, "ethernet-100")], "assumed; --interconnect names another")
