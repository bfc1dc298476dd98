"""A plan as aligned text: what each number is, and whether it is arithmetic, an estimate or a model."""

from collections.abc import Iterator

from accel_train.batching import is_open
from accel_train.observe.progress import format_seconds
from accel_train.plan import Plan
from accel_train.recipe_names import recipe_names
from accel_train.recipe_writing import setting_lines
from accel_train.redaction import redact
from accel_train.scale.text import failure_rows, layout_rows, run_rows, size, step_rows, traffic_rows


def format_plan(plan: Plan, *, colour: bool = False) -> str:
    """The plan as aligned text; with `colour`, what is a default is dim (for a terminal)."""
    width = max(len(name.rpartition(".")[2]) + 2 * name.count(".") for name in recipe_names()) + 2
    lines = ["Settings, and who set them"]
    for depth, name, value, who in setting_lines(plan.recipe):
        left = f"{'  ' * (depth + 1)}{name}".ljust(width + 2)
        line = f"{left}{value}".ljust(width + 30) + f"  <- {who}" if who else left.rstrip()
        lines.append(f"\x1b[2m{line}\x1b[0m" if colour and who == "default" else line)
    for title, rows in _blocks(plan):
        lines += ["", f"\x1b[1m{title}\x1b[0m" if colour else title]
        name_width = max((len(row[0]) for row in rows), default=0)
        lines += [f"  {name.ljust(name_width)}  {text}" for name, text in rows]
    return str(redact("\n".join(lines)))


def _blocks(plan: Plan) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    sizes, facts = plan.sizes, plan.data_facts
    yield "Steps", [
        ("global batch", f"{sizes.reason}; {sizes.per_device_eval_batch_size} per device in evaluation"),
        ("learning rate", f"{plan.learning_rate.value:g} at its peak ({plan.learning_rate.reason})"),
        ("schedule", f"{plan.recipe.schedule.type}, {_warmup(plan)}"),
        *_length_rows(plan),
    ]  # fmt: skip
    yield "Data", [(name, str(facts[name])) for name in ("sources",) if name in facts] + [
        (name, _count(facts[name])) for name in ("num_documents", "train_tokens", "eval_tokens", "num_train", "num_eval") if facts.get(name) is not None
    ]  # fmt: skip
    yield "Model", list(_model_rows(plan))
    total = plan.memory_bytes
    memory = [(part.name, f"{size(part.num_bytes)}  {part.kind}: {part.how}") for part in plan.memory]
    room = "" if plan.device_bytes is None or total is None else _room(plan, total, plan.device_bytes)
    yield f"Memory of each process ({plan.device})", [*memory, ("total", f"{size(total)}{room}")]
    yield (
        "Disk",
        [
            ("checkpoint", f"{size(plan.checkpoint_bytes)}  arithmetic: weights and optimizer, fp32"),
            ("in all", f"{size(plan.disk_bytes)}  {plan.num_checkpoints} checkpoints at most, and the final weights"),
        ],
    )
    yield from _scale_blocks(plan)
    if plan.notes:
        yield "Notes", [("-", note) for note in plan.notes]


def _length_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    steps, per_step = plan.steps, _count(plan.num_targets / plan.steps.max_steps)
    if not plan.has_length:
        yield (
            "steps",
            f"unknown: schedule.num_epochs is {plan.recipe.schedule.num_epochs:g}, and the data is not read; schedule.max_steps says them",
        )
        yield plan.targets, f"{per_step} a step at most, where every sample is full"
        return
    samples = f"{_count(steps.max_steps * plan.sizes.global_batch_size)} samples, "
    epochs = f"of {_count(plan.num_samples)} in an epoch: {steps.num_epochs:.4g} epochs"
    full = "" if plan.reads_data else " at most, where every sample is full"
    yield "steps", f"{_count(steps.max_steps)} ({steps.max_steps_reason})"
    yield "in all", samples + (epochs if plan.reads_data else "of an unknown number in an epoch")
    yield plan.targets, f"{_count(plan.num_targets)} with a label, {per_step} a step{full}"


def _warmup(plan: Plan) -> str:
    steps, schedule = plan.steps, plan.recipe.schedule
    if plan.has_length or schedule.warmup_steps is not None:
        return f"{_count(steps.warmup_steps)} steps of warmup ({steps.warmup_reason})"
    return "warmup unknown: it is a part of all steps"


def _scale_blocks(plan: Plan) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    scale, section = plan.scale, plan.recipe.checkpoint
    if plan.world_size > 1:
        yield "Processes", list(layout_rows(scale))
        yield "Communication", list(traffic_rows(scale))
    if scale.step is None or plan.peak_flops is None:
        yield "Time", [("training", _time(plan))]
        return
    yield "Time of a step", list(step_rows(scale, plan.peak_flops, plan.device))
    targets_per_step = plan.num_targets / plan.steps.max_steps
    num_steps = plan.steps.max_steps if plan.has_length else None
    yield "Time", list(run_rows(scale, num_steps, targets_per_step, plan.targets))
    if plan.world_size > 1:
        yield "Failures and checkpoints", list(failure_rows(scale, section, num_steps))


def _model_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    frozen = plan.num_parameters - plan.num_trainable
    yield "parameters", _count(plan.num_parameters) + (f", {_count(frozen)} of them frozen" if frozen else "")
    if plan.vocabulary is not None:
        tokens, rows = plan.vocabulary
        multiple = plan.recipe.model.pad_vocab_to_multiple_of
        why = f", {rows - tokens} never used (model.pad_vocab_to_multiple_of is {multiple})" if rows != tokens else ""
        yield "vocabulary", f"{_count(tokens)} tokens in {_count(rows)} rows{why}"
    yield "precision", f"{plan.precision.value} ({plan.precision.reason})"
    if plan.flops_per_target is None or plan.total_flops is None:
        yield "FLOPs", "not known for this task"
        return
    formula = ""
    if plan.targets == "tokens":
        formula = f"6 N {'- 2 for each frozen one ' if frozen else ''}+ 12 L D T a token; "
    yield (
        "FLOPs",
        (
            f"{plan.flops_per_target:.4g} for each of {plan.targets}, {plan.total_flops / plan.steps.max_steps:.4g} a step, {_total(plan)} in all "
            f"({formula}evaluation and recomputation left out)"
        ),
    )


def _total(plan: Plan) -> str:
    return f"{plan.total_flops:.4g}" if plan.has_length else "an unknown number"


def _time(plan: Plan) -> str:
    """Where the model of a step's time lacks something."""
    seconds, mfu = plan.train_seconds, plan.scale.mfu
    if plan.peak_flops is None:
        return f"unknown: no peak is known for {plan.device} ({plan.precision.value}); plan --gpu NAME names one"
    if plan.recipe.parallel.cpu_offload:
        return "unknown: the copies to host memory and the update there (parallel.cpu_offload) are not modelled"
    if not plan.has_length:
        return "unknown: the number of steps is"
    if seconds is None:
        return "unknown: the FLOPs of this task are not known"
    peak = f"{plan.world_size} x {plan.peak_flops / 1e12:g} TFLOP/s"
    return (
        f"{format_seconds(seconds)}, an estimate: at an MFU of {mfu.value:.3g} ({mfu.reason}) of {peak} ({plan.device}), whose memory and "
        "links are not known: communication and evaluation left out"
    )


def _room(plan: Plan, needed: int, device_bytes: int) -> str:
    if needed <= device_bytes:
        return f", of {size(device_bytes).strip()}"
    if is_open(plan.recipe.batch) and plan.sizes.per_device_batch_size > 1:
        return f", MORE than the {size(device_bytes).strip()} of this GPU: a run cuts its samples into smaller micro-batches (Notes)"
    ways = list(_ways_to_less(plan))
    remedy = " or ".join(filter(None, [", ".join(ways[:-1]), *ways[-1:]]))
    return f", MORE than the {size(device_bytes).strip()} of this GPU: {remedy}"


def _ways_to_less(plan: Plan) -> Iterator[str]:
    """What still can be changed so that each process needs less memory."""
    parallel, spread = plan.recipe.parallel, plan.scale.layout.shard_size
    if plan.sizes.per_device_batch_size > 1:
        yield "lower batch.per_device_batch_size"
    if not plan.recipe.precision.gradient_checkpointing:
        yield "set precision.gradient_checkpointing"
    if spread == 1 and plan.world_size > 1:
        yield "set parallel.strategy fsdp2"
    if 1 < spread < plan.world_size:
        yield "raise parallel.dp_shard_size"
    if spread > 1 and not parallel.reshard_after_forward:
        yield "set parallel.reshard_after_forward"
    if spread > 1 and not parallel.cpu_offload:
        yield "set parallel.cpu_offload"
    yield "take GPUs with more memory"


def _count(number: float) -> str:
    return f"{round(number):,}"
