"""A plan as aligned text. Each number is marked as arithmetic, an estimate, or a model."""

from collections.abc import Iterator

from accel_train.core.format import format_blocks, format_bytes, format_count, format_seconds
from accel_train.core.hardware import LINK_EFFICIENCY
from accel_train.core.redaction import redact
from accel_train.core.terminal import paint
from accel_train.data.batch_sizes import is_open
from accel_train.plan.plan import Plan
from accel_train.plan.saving import SaveInterval
from accel_train.plan.step_time import Scale, StepTime
from accel_train.recipe.writer import format_settings
from accel_train.task import Facts

Row = tuple[str, str]
Rows = Iterator[Row]
Blocks = Iterator[tuple[str, list[Row]]]
"""Titles, each with its rows."""
MUCH_PADDING = 0.02
MODEL_ROWS = {
    "model.attn_implementation": "attention",
    "model.fused_kernels": "fused kernels",
    "loss.chunked": "loss in chunks",
}
"""Row names of the model's resolved settings. A setting that is not listed keeps its own name."""


def format_plan(plan: Plan, *, colour: bool = False, show_all: bool = True) -> str:
    """Return the plan as aligned text: a verdict, and with `show_all` each setting, and the origin of each number."""
    lines = format_blocks([("Plan", list(_verdict(plan, colour)))], colour=colour)[1:]
    if show_all:
        lines += ["", *format_settings(plan.recipe, colour=colour)]
    blocks = list(_blocks(plan)) if show_all else []
    if plan.notes:
        blocks.append(("Notes", [("-", note) for note in plan.notes]))
    lines += format_blocks(blocks, colour=colour)
    if not show_all:
        lines += ["", "--all shows every setting with who set it, and how each number was found"]
    return str(redact("\n".join(lines)))


def _verdict(plan: Plan, colour: bool) -> Rows:
    steps = plan.steps
    samples = format_count(plan.sizes.global_batch_size, "sample")
    length = format_count(steps.max_steps, "step") if plan.has_length else "an unknown number of steps"
    epochs = (
        f", {steps.num_epochs:.4g} epoch{'s' * (steps.num_epochs != 1)}" if plan.has_length and plan.reads_data else ""
    )
    yield "trains", f"{format_count(plan.num_trainable)} parameters for {length} of {samples}{epochs}"
    if data := ", ".join(f"{count} {name}" for name, count in _counts(plan.data_facts) if name != "documents"):
        yield "data", data
    room = _room(plan)
    room = paint(f"{room}: it fits", "green", on=colour) if plan.fits else paint(room, "red", on=colour and room != "")
    yield "memory", f"{size(plan.memory_bytes)} for each process ({plan.device}){room}"
    seconds = plan.train_seconds
    if plan.scale.step is None or seconds is None:
        yield "time", _time(plan)
    else:
        took = "under a minute" if seconds < 60 else format_seconds(seconds)
        yield "time", f"{took} (modeled), {seconds * plan.world_size / 3600:,.1f} GPU-hours"
    each = (
        f"{format_count(plan.num_checkpoints, 'checkpoint')} of {size(plan.checkpoint_bytes)} (weights and optimizer,"
    )
    yield "disk", f"{size(plan.disk_bytes)} at most: {each} fp32), and the final weights"


def _counts(facts: Facts) -> list[Row]:
    counts = {
        "documents": facts.num_documents,
        "tokens to train on": facts.train_tokens,
        "tokens held out": facts.eval_tokens,
        "samples to train on": facts.num_train,
        "samples held out": facts.num_eval,
        **{f"samples of {name}": sizes["num_eval"] for name, sizes in facts.eval_sets.items()},
    }
    return [(name, format_count(count)) for name, count in counts.items() if count is not None]


def _blocks(plan: Plan) -> Blocks:
    sizes, facts = plan.sizes, plan.data_facts
    yield "Steps", [
        ("global batch", f"{sizes.reason}; {sizes.per_device_eval_batch_size} per device in evaluation"),
        ("learning rate", f"{plan.learning_rate.value:g} at its peak ({plan.learning_rate.reason})"),
        ("schedule", f"{plan.recipe.schedule.type}, {_warmup(plan)}"),
        *_length_rows(plan),
    ]  # fmt: skip
    yield "Data", [*([] if facts.sources is None else [("sources", facts.sources)]), *_counts(facts)]
    yield "Model", list(_model_rows(plan))
    memory = [row(part.name, size(part.num_bytes), f"{part.kind}: {part.how}") for part in plan.memory]
    yield f"Memory of each process ({plan.device})", [*memory, ("total", f"{size(plan.memory_bytes):>10}{_room(plan)}")]
    yield from _scale_blocks(plan)


def _length_rows(plan: Plan) -> Rows:
    steps, per_step = plan.steps, format_count(plan.num_targets / plan.steps.max_steps)
    if not plan.has_length:
        epochs = f"schedule.num_epochs is {plan.recipe.schedule.num_epochs:g}"
        yield "steps", f"unknown: {epochs}, and the plan reads no data. Set schedule.max_steps"
        yield plan.targets, f"at most {per_step} per step, if every sample is full"
        return
    samples = format_count(steps.max_steps * plan.sizes.global_batch_size, "sample")
    epochs = f", {format_count(plan.num_samples)} in an epoch"
    full = "" if plan.reads_data else " at most, if every sample is full"
    yield "steps", f"{format_count(steps.max_steps)} ({steps.max_steps_reason})"
    yield "in total", samples + (epochs if plan.reads_data else "; the size of an epoch is unknown")
    yield plan.targets, f"{format_count(plan.num_targets)} with a label, {per_step} per step{full}"


def _warmup(plan: Plan) -> str:
    steps, schedule = plan.steps, plan.recipe.schedule
    if plan.has_length or schedule.warmup_steps is not None:
        return f"{format_count(steps.warmup_steps, 'step')} of warmup ({steps.warmup_reason})"
    return "warmup unknown: a share of all steps"


def _scale_blocks(plan: Plan) -> Blocks:
    scale, step = plan.scale, plan.scale.step
    if plan.world_size > 1:
        yield "Processes", list(_layout_rows(scale))
        yield "Communication", list(_traffic_rows(scale))
    if step is None or plan.peak_flops is None:
        return
    yield "Time of a step", list(_step_rows(scale, step, plan.peak_flops, plan.device))
    training = "unknown, because the number of steps is unknown"
    if (seconds := plan.train_seconds) is not None:
        took = f"{format_seconds(seconds)}, {seconds * plan.world_size / 3600:,.1f} GPU-hours"
        training = (
            f"{took}: {format_count(plan.steps.max_steps, 'modeled step')}, without evaluation, saves, and failures"
        )
    in_a_day = f"{86_400 / step.seconds * plan.num_targets / plan.steps.max_steps:.4g} {plan.targets}"
    save_every = _save_every(scale.save_interval, step.seconds, plan.recipe.checkpoint.every_steps)
    yield "Time", [("training", training), ("in a day", in_a_day), ("save every", save_every)]


def _model_rows(plan: Plan) -> Rows:
    frozen = plan.num_parameters - plan.num_trainable
    yield "parameters", format_count(plan.num_parameters) + f", {format_count(frozen)} of them frozen" * bool(frozen)
    if plan.vocabulary is not None:
        tokens, rows = plan.vocabulary
        multiple = plan.recipe.model.pad_vocab_to_multiple_of
        why = f", {rows - tokens} never used (model.pad_vocab_to_multiple_of is {multiple})" if rows != tokens else ""
        yield "vocabulary", f"{format_count(tokens)} tokens in {format_count(rows)} rows{why}"
    yield "precision", f"{_precision(plan)} ({plan.precision.reason})"
    for name, choice in plan.model_choices.items():
        value = {True: "yes", False: "no"}.get(choice.value, choice.value)
        yield MODEL_ROWS.get(name, name.removeprefix("model.")), f"{value} ({choice.reason})"
    if plan.flops_per_target is None or plan.total_flops is None:
        yield "FLOPs", "unknown for this task"
        return
    formula = f"6 N {'- 2 for each frozen one ' * bool(frozen)}+ 12 L D T per token; " * (plan.targets == "tokens")
    in_all = f"{plan.total_flops:.4g}" if plan.has_length else "an unknown number"
    rates = f"{plan.flops_per_target:.4g} for each of the {plan.targets}"
    rates += f", {plan.total_flops / plan.steps.max_steps:.4g} per step, {in_all} in total"
    yield "FLOPs", f"{rates} ({formula}without evaluation and recomputation)"


def _precision(plan: Plan) -> str:
    return "fp32" if plan.precision.value == "no" else str(plan.precision.value)


def _time(plan: Plan) -> str:
    seconds, mfu = plan.train_seconds, plan.scale.mfu
    if plan.peak_flops is None:
        return f"unknown: the peak of {plan.device} in {_precision(plan)} is unknown. Name a GPU: plan --gpu NAME"
    if plan.recipe.parallel.cpu_offload:
        return "unknown: copies to host memory and the update there (parallel.cpu_offload) are not modeled"
    if not plan.has_length:
        return "unknown, because the number of steps is unknown"
    if seconds is None:
        return "unknown, because the FLOPs of this task are unknown"
    peak = f"{plan.world_size} x {plan.peak_flops / 1e12:g} TFLOP/s"
    return (
        f"{format_seconds(seconds)}, an estimate at an MFU of {mfu.value:.3g} ({mfu.reason}) of {peak} "
        f"({plan.device}), without evaluation, and without communication, because this GPU's links are unknown"
    )


def _room(plan: Plan) -> str:
    """Return whether the memory of a process fits into its GPU; empty if either is unknown."""
    if plan.fits is None:
        return ""
    if plan.fits:
        return f", of {size(plan.device_bytes)}"
    ways = list(_ways_to_less(plan))
    remedy = " or ".join(filter(None, [", ".join(ways[:-1]), *ways[-1:]]))
    if is_open(plan.recipe.batch) and plan.sizes.per_device_batch_size > 1:
        remedy = "a run cuts its samples into smaller micro-batches (Notes)"
    return f", MORE than the {size(plan.device_bytes)} of this GPU: {remedy}"


def _ways_to_less(plan: Plan) -> Iterator[str]:
    """Yield the changes that would lower the memory of each process."""
    parallel, spread = plan.recipe.parallel, plan.scale.layout.shard_size
    if plan.sizes.per_device_batch_size > 1:
        yield "lower batch.per_device_batch_size"
    if plan.recipe.precision.recomputed != "blocks":
        yield "set precision.gradient_checkpointing"
    if spread == 1 and plan.world_size > 1:
        yield "set parallel.strategy fsdp2"
    if 1 < spread < plan.world_size:
        yield "raise parallel.dp_shard_size"
    if spread > 1 and not parallel.reshard_after_forward:
        yield "set parallel.reshard_after_forward"
    if spread > 1 and not parallel.cpu_offload:
        yield "set parallel.cpu_offload"
    yield "use GPUs with more memory"


def _layout_rows(scale: Scale) -> Rows:
    layout, gpu, network = scale.layout, scale.gpu, scale.network
    yield "processes", f"{layout.world_size:,} on {format_count(layout.num_nodes, 'node')} of {layout.gpus_per_node}"
    yield "model", layout.reason
    if gpu is not None and layout.gpus_per_node > 1:
        yield "in a node", f"{gpu.link}, {gpu.link_gb_per_second:g} GB/s per GPU, one direction (data sheet)"
    if layout.num_nodes > 1:
        rate = f"{network.value.gb_per_second:g} GB/s per {network.value.per}, one direction"
        yield "between nodes", f"{network.value.name}, {rate} ({network.reason})"


def _traffic_rows(scale: Scale) -> Rows:
    for each in scale.traffic:
        factor = "2 (n - 1) / n" if each.kind == "all-reduce" else "(n - 1) / n"
        payload = f"of {size(each.payload_bytes)}{' together' * (each.times != 1)}"
        how = f"arithmetic: {each.purpose}; {format_count(each.times, 'collective')} {payload}, x {factor}"
        yield row(each.kind, size(each.sent_bytes), how)
    sent = sum(each.sent_bytes for each in scale.traffic)
    yield row("in total", size(sent), "sent by each process per step; it receives as much")
    shards = scale.layout.shard_size
    if (padding := scale.weights.padding(shards)) > MUCH_PADDING:
        how = (
            f"of held and gathered weights, because {shards} parts have whole rows. A smaller dp_shard_size needs less"
        )
        yield row("padding", f"{padding:.1%}", how)


def _step_rows(scale: Scale, step: StepTime, peak_flops: float, device: str) -> Rows:
    layout, mfu = scale.layout, scale.mfu
    peak = f"{layout.world_size:,} x {peak_flops / 1e12:g} TFLOP/s ({device}; MFU {mfu.reason})"
    yield row("computing", duration(step.compute_seconds), f"model: at an MFU of {mfu.value:.3g} of {peak}")
    how = "model: passes over weights, gradients, and moments at the memory's rate"
    yield row("optimizer", duration(step.optimizer_seconds), how)
    if layout.world_size > 1:
        how = f"communication without overlap, of {duration(step.communication_seconds)} in total"
        how = f"model: {how}; links at {LINK_EFFICIENCY:.0%} of their rate"
        yield row("waiting", duration(step.exposed_seconds), how)
    reached = mfu.value * step.compute_seconds / step.seconds
    how = f"model: MFU {reached:.1%}, {step.efficiency:.1%} of the speed without waiting"
    yield row("a step", duration(step.seconds), how)
    if layout.num_nodes > 1:
        how = "published runs on 64 and 128 GPUs took up to 10 % longer, because the model leaves out stragglers"
        yield row("", "", how)


def _save_every(found: SaveInterval, step_seconds: float, every_steps: int) -> str:
    stall, mtbf = found.stall_seconds, found.mtbf_seconds
    times = f"{duration(stall.value)} for a save ({stall.reason}), {format_seconds(mtbf.value)} between failures"
    steps = f"{format_count(max(1, round(found.seconds / step_seconds)), 'step')} ({format_seconds(found.seconds)})"
    return f"{steps}; checkpoint.every_steps is {every_steps:,}. Young's sqrt(2 x save x MTBF): {times} ({mtbf.reason})"


def row(name: str, value: str, text: str) -> Row:
    """Return a row with the value right-aligned in ten columns before its text."""
    return name, f"{value:>10}  {text}"


def size(num_bytes: float | None) -> str:
    """Return a size as text: `1.5 GiB`, `10.0 MiB`, or `unknown` for None."""
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def duration(seconds: float) -> str:
    """Return a duration as text: `3m 07s` from two minutes on, below that `1.23 s` or `4.56 ms`."""
    if seconds >= 120:
        return format_seconds(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
