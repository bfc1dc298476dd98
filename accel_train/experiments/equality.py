"""Equality of a layout: whether several processes compute what one process computes, at toy size, in fp32 on the CPU.

The layout is a recipe's own: strategy, split layers and sequences, accumulation, chunked loss, compile, checkpointing,
packing, and adapters. The reference is one process with one whole micro-batch and plain layers. Both train a few steps
on the recipe's own data by the same code as a run, and their metrics and checkpoints are compared.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.checkpoint.store import folder_of
from accel_train.core.json_io import json_digest, to_json
from accel_train.core.state import JsonRecord
from accel_train.experiments.compare_runs import pairs_of_tensors
from accel_train.experiments.processes import Failure, Processes
from accel_train.observe.run_folder import read_metrics
from accel_train.recipe.evaluate import Evaluate
from accel_train.recipe.optimizer import Optimizer
from accel_train.recipe.schedule import Schedule
from accel_train.recipe.schema import Checkpoint, Guard, Log, Recipe
from accel_train.recipe.tasks import TASKS

if TYPE_CHECKING:
    from torch import Tensor

STEPS, RESUMED_AFTER = 4, 2
SAME = 1e-5
"""Largest relative difference that counts as rounding."""
MARGIN = 10.0
"""Multiple of the difference that rounding alone makes, up to which a larger difference counts as rounding too."""
ROUNDINGS = 3
"""Trainings that measure the difference that rounding makes."""
MOST_PROCESSES = 4
SAMPLES = 8
"""Samples per step."""
LEARNING_RATE = 0.05
"""A step then changes a weight by about a hundredth, so that a wrong gradient shows in it."""
LONGEST = 64
"""Maximum tokens of a sample."""
FLOOR = 1e-2
"""Smallest scale of a weight's difference. A bias that starts at 0 and gets no gradient only holds rounding."""
ALONE, NO_TOY = "one process fails", "the model has no toy size"
"""Beginnings of two reasons why nothing was compared."""
QUICK_BACKEND = "aot_eager"
"""Compiler of a toy. It traces the same graphs and gradients as inductor, but generates no code."""


class Equality(NamedTuple):
    """The comparison of a layout with one process."""

    processes: int
    steps: int = STEPS
    difference: float | None = None
    """Largest relative difference of a loss, a gradient norm, or a weight. None if nothing was compared."""
    first: str | None = None
    """First step and number that differ, or the failure of the layout. None if the layout is equal."""
    reason: str | None = None
    """Reason why nothing was compared."""
    of_rounding: float | None = None
    """Difference that rounding alone makes, if the difference is above `SAME`."""

    @property
    def is_different(self) -> bool:
        """Return whether the layout computes something else, or fails where one process does not."""
        return self.first is not None

    def __str__(self) -> str:
        """Return the verdict: `equal to 1.2e-07`, `DIFFERENT: ...`, or `not compared: ...`."""
        if self.reason is not None:
            return f"not compared: {self.reason}"
        if self.first is not None:
            return f"DIFFERENT: {self.first}"
        rounding = "" if self.of_rounding is None else f", and rounding alone makes {self.of_rounding:.1e}"
        return f"equal to {self.difference:.1e}{rounding}"


def failed(failure: Failure, processes: int, *, alone: bool = False) -> Equality:
    """Return the comparison that ended with a failure: in the layout, or (`alone`) in the one process."""
    if failure.is_refusal:
        return Equality(processes, reason=failure.text)
    if alone:
        return Equality(processes, reason=f"{ALONE}: {failure.text}")
    return Equality(processes, first=f"training fails: {failure.text}")


class Layout(NamedTuple):
    """A recipe at toy size, and the number of its processes."""

    recipe: Recipe
    processes: int


def compare_layout(recipe: Recipe, world_size: int, folder: Path) -> Equality:
    """Train a recipe's layout and one process at toy size in `folder`, and compare them."""
    try:
        layout, plain = toy_layouts(recipe, world_size)
    except ValueError as error:
        return Equality(0, reason=str(error))
    with Processes(1) as one, Processes(layout.processes) as several:
        return compare_layouts(layout, plain, one, several, folder)


def compare_layouts(layout: Layout, plain: Layout, one: Processes, several: Processes, folder: Path) -> Equality:
    """Compare two trainings with one seed; if they differ, with another seed too, and with the effect of rounding.

    Rounding can route a token to another expert. With other weights it does not. A wrong layout differs with any.
    """
    found = Equality(layout.processes)
    for seed in (0, 1):
        reference, failure = train_plain(plain, one, folder, seed)
        if failure is not None:
            return failed(failure, layout.processes, alone=True)
        output = folder / f"layout-{seed}"
        failure = _train(layout, several, seed, output)
        if failure is not None and layout.recipe.precision.compiles:
            # It cannot run some graphs that the compiler can.
            layout = layout._replace(recipe=_changed(layout.recipe, precision={"compile_backend": "inductor"}))
            failure = _train(layout, several, seed, output)
        if failure is not None:
            return failed(failure, layout.processes)
        found = compare_folders(reference, output, layout.processes)
        if not found.is_different:
            break
    if found.is_different:
        found = compare_beyond_rounding(plain, one, reference, output, layout.processes, seed)
    if found.is_different and _splits_batch_norms(layout, reference):
        return Equality(
            layout.processes, reason="batch norms use statistics of each micro-batch (parallel.sync_batch_norm)"
        )
    return found


def compare_beyond_rounding(
    plain: Layout, one: Processes, reference: Path, layout: Path, processes: int, seed: int = 0, since: int = 0
) -> Equality:
    """Compare two runs. If they differ, the one process also trains with weights that are rounded differently.

    It does so `ROUNDINGS` times, because one of these differences may be small by chance.
    """
    found = compare_folders(reference, layout, processes, since)
    if not found.is_different:
        return found
    floor: dict[str, float] = {}
    for number in range(ROUNDINGS):
        rounded = reference.with_name(f"{reference.name}-rounded-{number}")
        if not rounded.exists():
            failure = _train(plain, one, seed, rounded, rounding=number)
            if failure is not None:
                return failed(failure, processes, alone=True)
        for name, gap in _differences(reference, rounded, since)[0].items():
            floor[name] = max(gap, floor.get(name, 0.0))
    return compare_folders(reference, layout, processes, since, floor)


def _splits_batch_norms(layout: Layout, reference: Path) -> bool:
    weights = CheckpointReader(_saved(reference), "model").shapes
    section, is_whole = layout.recipe.parallel, layout.recipe.batch.gradient_accumulation_steps == 1
    return any("running_mean" in name for name in weights) and not (section.sync_batch_norm and is_whole)


def train_plain(plain: Layout, one: Processes, folder: Path, seed: int = 0) -> tuple[Path, Failure | None]:
    """Train the reference, unless `folder` has it. Return its run folder, and the failure if there is one."""
    output = (
        folder / f"plain-{json_digest(to_json(plain.recipe.model_dump(exclude={'output_dir', 'seed'})))[:8]}-{seed}"
    )
    return output, None if _saved(output).exists() else _train(plain, one, seed, output)


def _train(
    layout: Layout, processes: Processes, seed: int, folder: Path, rounding: int | None = None
) -> Failure | None:
    shutil.rmtree(folder, ignore_errors=True)
    recipe = layout.recipe.model_copy(update={"seed": seed, "output_dir": str(folder)})
    return processes.call(partial(train_toy, recipe, rounding=rounding))


def _saved(run: Path) -> Path:
    return folder_of(run / "checkpoints", STEPS)


def compare_folders(
    plain: Path, layout: Path, processes: int, since: int = 0, floor: Mapping[str, float] = MappingProxyType({})
) -> Equality:
    """Compare losses and gradient norms of the steps after `since`, and the weights after the last step.

    `floor` has the differences that rounding alone makes in this model, by name. They may be large, but not in the
    first loss, where rounding has not been amplified yet.
    """
    differences, said = _differences(plain, layout, since)
    limits = {name: max(SAME, MARGIN * floor.get(name, 0.0)) for name in differences} | {"loss of step 1": SAME}
    wrong = next((name for name, gap in differences.items() if gap > limits[name]), None)
    largest, first = max(differences.values()), None
    if wrong is not None:
        first = f"{said[wrong]} (relative difference {differences[wrong]:.1e}, at most {largest:.1e})"
    of_rounding = max(floor.values()) if largest > SAME and floor else None
    return Equality(processes, difference=largest, first=first, of_rounding=of_rounding)


def _differences(plain: Path, layout: Path, since: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the relative differences of two runs by the name of a number, and each in words."""
    rows = [{row["step"]: row for row in read_metrics(each) if row["split"] == "train"} for each in (plain, layout)]
    differences: dict[str, float] = {}
    said: dict[str, str] = {}
    for step in range(since + 1, STEPS + 1):
        for name, field in (("loss", "loss"), ("gradient norm", "grad_norm")):
            values = [float(side[step][field]) if step in side else math.nan for side in rows]
            key = f"{name} of step {step}"
            differences[key] = _relative(abs(values[0] - values[1]), abs(values[0]))
            said[key] = f"{key} is {values[1]:.7g}, one process has {values[0]:.7g}"
    for name, one, two in pairs_of_tensors(*(CheckpointReader(_saved(each), "model") for each in (plain, layout))):
        said[name] = f"weight {name} after step {STEPS}"
        if one is None or two is None or one.shape != two.shape:
            differences[name], said[name] = math.inf, f"weight {name} has another shape"
        elif one.numel():
            one, two = one.double(), two.double()
            differences[name] = _relative(float((one - two).abs().max()), max(float(one.abs().max()), FLOOR))
    return differences, said


def _relative(gap: float, scale: float) -> float:
    found = gap / scale if scale else gap
    return math.inf if math.isnan(found) else found


def toy_layouts(recipe: Recipe, world_size: int, most: int = MOST_PROCESSES) -> tuple[Layout, Layout]:
    """Return a recipe's layout at toy size on at most `most` processes, and the same model on one plain process.

    Raises:
        ValueError: the model cannot be shrunk, or the layout is refused.
    """
    section = recipe.parallel
    if recipe.task not in TASKS:
        raise ValueError(f"task {recipe.task} builds its own model")
    if recipe.model.trust_remote_code:
        raise ValueError("model.trust_remote_code runs code that a toy model would not")
    tp_size, sp_size = min(section.tp_size, 2), min(section.sp_size, 2)
    has_copies = section.dp_shard_size not in ("auto", 1)
    shards = 2 if has_copies else section.dp_shard_size
    is_split = section.strategy != "ddp" and tp_size * sp_size == 1
    least = tp_size * sp_size * (4 if has_copies else 2 if is_split else 1)
    processes = max(least, min(world_size, most) // least * least)
    parallel = section.model_copy(update={"tp_size": tp_size, "sp_size": sp_size, "dp_shard_size": shards})
    shares, micro_batches = processes // (tp_size * sp_size), 2 if _accumulates(recipe, world_size) else 1
    each = max(SAMPLES // (micro_batches * shares), 1)
    batch = {"per_device_batch_size": each, "gradient_accumulation_steps": micro_batches}
    samples = each * micro_batches * shares
    layout = _toy(recipe, parallel.model_dump(), {**batch, "global_batch_size": samples})
    layout = _with_toy_model(recipe, layout)
    chunked = recipe.loss.chunked if recipe.loss.chunked != "auto" else _is_large(recipe)
    layout = _changed(layout, loss={"chunked": chunked and "auto" if tp_size > 1 else chunked})
    # Attention of transformers itself. Rows of a table are packed as attention allows, so they need the recipe's own.
    is_text = getattr(recipe.data, "format", "") == "text"
    model = {"attn_implementation": "eager"} if is_text and recipe.model.attn_implementation == "auto" else {}
    plain = _changed(
        layout,
        model={**model, "fused_kernels": False},
        parallel={name: each.default for name, each in type(section).model_fields.items()},
        precision={"compile": False, "gradient_checkpointing": "off"},
        loss={"chunked": False},
        batch={"global_batch_size": samples, "per_device_batch_size": samples, "gradient_accumulation_steps": 1},
    )
    return Layout(layout, processes), Layout(plain, 1)


def _accumulates(recipe: Recipe, world_size: int) -> bool:
    batch = recipe.batch
    if isinstance(batch.gradient_accumulation_steps, int):
        return batch.gradient_accumulation_steps > 1
    each, shares = batch.per_device_batch_size, max(world_size // recipe.parallel.num_sharing, 1)
    return isinstance(each, int) and batch.global_batch_size is not None and each * shares < batch.global_batch_size


def _is_large(recipe: Recipe) -> bool:
    """Return whether the recipe's own logits come in chunks; a toy's fit into one."""
    from accel_train.model.kernels.toy import chunks_loss
    from accel_train.model.pretrained import config_of

    if "loss.chunked" not in TASKS[recipe.task].uses:
        return False
    each = recipe.batch.per_device_batch_size
    samples = each if isinstance(each, int) else recipe.batch.global_batch_size or 1
    return chunks_loss(config_of(recipe), samples * (recipe.data.window or 0))


def _toy(recipe: Recipe, parallel: Mapping[str, Any], batch: Mapping[str, Any]) -> Recipe:
    """Return the recipe for a few small fp32 steps without evaluation. Its model is not changed."""
    lengths = {
        name: min(value or LONGEST, LONGEST)
        for name in ("sequence_length", "max_length")
        if (value := getattr(recipe.data, name, 0)) != 0
    }
    clip = recipe.optimizer.max_grad_norm
    sections = {
        # With AdamW, rounding in a gradient of 0 would become a whole update.
        "optimizer": Optimizer(name="sgd", learning_rate=LEARNING_RATE, max_grad_norm=clip),
        "schedule": Schedule(type="constant", max_steps=STEPS, warmup_steps=0),
        "guard": Guard(on_spike="off", on_nonfinite="stop", straggler_factor=None),
        "checkpoint": Checkpoint(
            every_steps=RESUMED_AFTER,
            keep=STEPS,
            in_background=False,
            accept_changes=True,
            load_best_model_at_end=False,
        ),
        "evaluate": Evaluate(every_steps=0, max_samples=SAMPLES, num_examples=0),
        "log": Log(every_steps=1, progress=False),
    }
    toy = recipe.model_copy(update=sections)
    precision = {"mixed_precision": "no", "deterministic": False, "compile_mode": "default"}
    return _changed(
        toy,
        data={**lengths, "num_workers": 0},
        parallel=parallel,
        batch={"per_device_eval_batch_size": "auto", **batch},
        precision={**precision, "compile_backend": QUICK_BACKEND},
    )


def _changed(recipe: Recipe, **sections: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values, checked like a file's."""
    tree = recipe.model_dump()
    for name, values in sections.items():
        tree[name] = {**tree[name], **values}
    return Recipe.model_validate(tree)


def _with_toy_model(recipe: Recipe, toy: Recipe) -> Recipe:
    """Return `toy` with the smallest model of its kind that fits its layout."""
    from accel_train.model.kernels.toy import toy_fields
    from accel_train.model.pretrained import config_of
    from accel_train.parallel.compatibility import check_compatibility
    from accel_train.task import load_task

    given, found = recipe.model.config, list[Recipe]()
    of_tokenizer = {"vocab_size", "bos_token_id", "eos_token_id"} if given is not None else set()
    lora = recipe.model.lora and {**recipe.model.lora.model_dump(), "dropout": 0.0}
    update: dict[str, Any] = {"pretrained": None, "lora": lora, "frozen_dtype": "auto"}
    reads_texts = "tokenizer" in load_task(recipe.task).spec.uses
    tokenizer = recipe.tokenizer_in_use if reads_texts else recipe.tokenizer

    def check(fields: JsonRecord) -> None:
        kept = {name: value for name, value in fields.items() if name in (given or ()) or name not in of_tokenizer}
        small = toy.model_copy(update={"tokenizer": tokenizer})
        small = _changed(small, model={**update, "config": {"model_type": config.model_type, **kept}})
        check_compatibility(small, load_task(small.task))
        found.append(small)

    config = config_of(recipe)
    check_compatibility(recipe, load_task(recipe.task))
    try:
        toy_fields(config, is_causal=TASKS[recipe.task].gives == "continuation", check=check)
    except ValueError as error:
        raise ValueError(f"{NO_TOY}: {error}") from error
    return found[-1]


def train_toy(recipe: Recipe, *, rounding: int | None = None) -> None:
    """Train a recipe on this process and the others, without its final evaluation.

    `rounding` is the seed of a change of each initial weight by its last bit.
    """
    from accel_train.runtime.signals import StopRequest
    from accel_train.training.loop import run_steps
    from accel_train.training.setup import prepare_run

    with StopRequest() as stop:
        run = prepare_run(recipe, stop=stop)
        if rounding is not None:
            _round_differently(run.strategy.module.parameters(), rounding)
        with run.resources, run.stop:
            run_steps(run)


def _round_differently(weights: Iterable["Tensor"], seed: int) -> None:
    """Move each weight, frozen ones too, to a neighboring number."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in weights:
            is_down = torch.rand(each.shape, generator=generator) < 0.5
            each.copy_(torch.nextafter(each, torch.where(is_down, -math.inf, math.inf)))
