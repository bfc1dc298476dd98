"""What a plan says of many GPUs, as rows of a name and a text; each says how far its number is to be trusted."""

from collections.abc import Iterator

from accel_train.observe.progress import format_seconds
from accel_train.recipe import Checkpoint
from accel_train.scale.estimate import Scale
from accel_train.scale.failures import RESTART_SECONDS
from accel_train.scale.hardware import GB, LINK_EFFICIENCY
from accel_train.scale.saving_cost import (
    COPY_BYTES_PER_SECOND,
    STORAGE_BYTES_PER_SECOND,
    WRITE_BYTES_PER_SECOND,
    WRITING_SHARE,
    Interval,
)
from accel_train.scale.traffic import Traffic

Row = tuple[str, str]
MUCH_PADDING = 0.02


def layout_rows(scale: Scale) -> Iterator[Row]:
    """Where the processes are, and the links between them."""
    layout, gpu, network = scale.layout, scale.gpu, scale.network
    nodes = "1 node" if layout.num_nodes == 1 else f"{layout.num_nodes:,} nodes"
    yield "processes", f"{layout.world_size:,} on {nodes} of {layout.gpus_per_node}"
    yield "model", layout.reason
    if gpu is not None and layout.gpus_per_node > 1:
        yield "in a node", f"{gpu.link}, {gpu.link_gb_per_second:g} GB/s of a GPU, one direction, by its data sheet"
    if layout.num_nodes > 1:
        rate = f"{network.value.gb_per_second:g} GB/s of a {network.value.per}, one direction"
        yield "between nodes", f"{network.value.name}, {rate} ({network.reason})"


def traffic_rows(scale: Scale) -> Iterator[Row]:
    """What each process sends in a step."""
    for each in scale.traffic:
        yield each.kind, f"{size(each.sent_bytes)}  {_arithmetic(each)}"
    yield (
        "in all",
        f"{size(sum(each.sent_bytes for each in scale.traffic))}  sent by each process in a step, and as much received",
    )
    padding = scale.weights.padding(scale.layout.shard_size)
    if padding > MUCH_PADDING:
        yield (
            "padding",
            f"{padding:10.1%}  of weights held and gathered: parts are whole rows, {scale.layout.shard_size} of them; a smaller dp_shard_size has less",
        )


def _arithmetic(each: Traffic) -> str:
    factor = "2 (n - 1) / n" if each.kind == "all-reduce" else "(n - 1) / n"
    payload = size(each.payload_bytes).strip()
    how_many = f"1 collective of {payload}" if each.times == 1 else f"{each.times:,} collectives of {payload} together"
    return f"arithmetic: {each.purpose}; {how_many}, x {factor}"


def step_rows(scale: Scale, peak_flops: float, device: str) -> Iterator[Row]:
    """The time of a step, by what it goes to."""
    step, layout = scale.step, scale.layout
    assert step is not None
    peak = f"{layout.world_size:,} x {peak_flops / 1e12:g} TFLOP/s"
    yield (
        "computing",
        f"{duration(step.compute_seconds)}  model: at an MFU of {scale.mfu.value:.3g} of {peak} ({device}; MFU {scale.mfu.reason})",
    )
    yield (
        "optimizer",
        f"{duration(step.optimizer_seconds)}  model: its passes over weights, gradients and moments, at the memory's rate",
    )
    if layout.world_size > 1:
        yield (
            "waiting",
            f"{duration(step.exposed_seconds)}  model: of {duration(step.communication_seconds).strip()} of communication, which else runs beside forward and backward; links at {LINK_EFFICIENCY:.0%} of their rate",
        )
    reached = scale.mfu.value * step.compute_seconds / step.seconds
    share = f"{step.efficiency:.1%} of processes that never wait"
    yield "a step", f"{duration(step.seconds)}  model: MFU {reached:.1%}, {share}"
    if layout.num_nodes > 1:
        note = "published runs on 64 and 128 GPUs took up to 10 % longer than this model says: stragglers are not in it"
        yield "", f"{' ' * 10}  {note}"


def run_rows(scale: Scale, num_steps: int | None, targets_per_step: float, targets: str) -> Iterator[Row]:
    """The whole run at that time of a step; of an unknown number of steps only what a day makes."""
    step = scale.step
    assert step is not None
    if num_steps is None:
        yield "training", "unknown: the number of steps is"
    else:
        seconds = num_steps * step.seconds
        gpu_hours = seconds * scale.layout.world_size / 3600
        yield (
            "training",
            f"{format_seconds(seconds)}, {gpu_hours:,.1f} GPU-hours: {num_steps:,} steps of that model; evaluation, saves and failures left out",
        )
    yield "in a day", f"{86_400 / step.seconds * targets_per_step:.4g} {targets}"


def failure_rows(scale: Scale, section: Checkpoint, num_steps: int | None) -> Iterator[Row]:
    """What a save costs, how often the run fails, and how often it is worth saving."""
    saving, step = scale.saving, scale.step
    assert step is not None
    who = f"{saving.num_writers:,} processes" if saving.num_writers > 1 else "1 process"
    rate = f"{WRITE_BYTES_PER_SECOND / GB:g} GB/s a process and {STORAGE_BYTES_PER_SECOND / GB:g} GB/s in all"
    yield (
        "writing",
        f"{duration(saving.write_seconds)}  estimate: by {who}, at an assumed {rate}"
        + ("; beside the training" if saving.in_background else ""),
    )
    yield (
        "standing still",
        f"{duration(saving.stall_seconds)}  estimate: a copy to host memory at an assumed {COPY_BYTES_PER_SECOND / GB:g} GB/s"
        + ("" if saving.in_background else ", and the writing"),
    )
    for each in scale.intervals:
        yield "failures", f"{each.failures_per_week:.2g} a week at a published rate. {each.rate.source}"
    for each in scale.intervals:
        yield "best interval", _interval(each, step.seconds, num_steps)
    for each in scale.intervals:
        yield "this recipe", _now(each, section, step.seconds)


def _interval(each: Interval, step_seconds: float, num_steps: int | None) -> str:
    if num_steps is not None and each.best_steps >= num_steps:
        return (
            f"all {num_steps:,} steps of this run, whose end is saved: at {each.failures_per_week:.2g} failures a week it would be "
            f"{each.best_steps:,} steps ({format_seconds(each.best_steps * step_seconds)})"
        )
    formulas = f"Daly {format_seconds(each.daly_seconds)}, Young {format_seconds(each.young_seconds)}"
    return (
        f"{each.best_steps:,} steps ({format_seconds(each.best_steps * step_seconds)}) at {each.failures_per_week:.2g} failures a week; "
        f"model: {each.lost_at_best:.2%} of the time lost ({formulas}, and {WRITING_SHARE:.0%} of the time writing at most)"
    )


def _now(each: Interval, section: Checkpoint, step_seconds: float) -> str:
    if each.lost_now is None:
        return f"checkpoint.every_steps is 0: at {each.failures_per_week:.2g} failures a week each costs the whole run so far"
    every = f"every {section.every_steps:,} steps ({format_seconds(section.every_steps * step_seconds)})"
    lost = f"model: {each.lost_now:.2%} of the time lost at {each.failures_per_week:.2g} failures a week, restarts of {format_seconds(RESTART_SECONDS)} in it"
    return f"{every}; {lost}"


def size(num_bytes: float | None) -> str:
    """Bytes in ten columns."""
    if num_bytes is None:
        return "unknown".rjust(10)
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:,.1f} {name}".rjust(10)


def duration(seconds: float) -> str:
    """Seconds in ten columns."""
    if seconds >= 120:
        return format_seconds(seconds).rjust(10)
    return (f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms").rjust(10)
