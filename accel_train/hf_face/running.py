"""One call of Trainer.train(): translate, prepare, run the loop, and leave the state as transformers' users expect it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments

from accel_train.batching import resolve_batch
from accel_train.checkpoint import checkpoint_folders
from accel_train.doctor import check_launcher
from accel_train.ending import exits_are_errors
from accel_train.hf_face.arguments import Length, length_of, schedule_of, to_recipe
from accel_train.hf_face.checks import is_overridden
from accel_train.hf_face.flow import Flow, check_callbacks, may_ask
from accel_train.hf_face.inputs import epoch_order, is_stream, readable
from accel_train.hf_face.optimizers import ScheduledRates
from accel_train.hf_face.task import HFTask
from accel_train.launch_environment import refuse_sharded_launch
from accel_train.loop import train_run
from accel_train.precision import choose_mixed_precision, start_accelerator, start_processes
from accel_train.prepare import Extensions, prepare_run
from accel_train.recipe import Batch, Guard, Precision, Recipe
from accel_train.state import Requests

if TYPE_CHECKING:
    from accel_train.hf import Trainer


@exits_are_errors()
def run_training(
    trainer: "Trainer", resume_from_checkpoint: str | bool | None, ignore_keys: list[str] | None
) -> tuple[Flow, int]:
    """Train; returns who kept the numbers, and how many steps this sitting made.

    Raises:
        ValueError: something cannot be honoured.
    """
    args = trainer.args
    check_callbacks(trainer.callback_handler.callbacks)
    refuse_sharded_launch()
    loader = trainer.get_train_dataloader() if is_overridden(trainer, "get_train_dataloader") else None
    if loader is None and trainer.train_dataset is None:
        raise ValueError("training needs a train_dataset")
    rows = readable(trainer.train_dataset, trainer.signature, args.remove_unused_columns) if loader is None else None
    num_samples = None if rows is None or is_stream(rows) else len(rows)
    length = length_of(args, num_samples, _batches_in(loader), trainer.world_size)
    by_callbacks = may_ask(trainer.callback_handler.callbacks) or args.eval_delay > 0
    requests = Requests() if by_callbacks else None
    recipe = trainer.recipe = to_recipe(
        args,
        length,
        trainer.model,
        decayed=trainer.get_decay_parameter_names(trainer.model),
        resume=resume_of(args, resume_from_checkpoint),
        by_callbacks=by_callbacks,
        has_eval=trainer.eval_dataset is not None,
        train_name=f"{type(trainer.train_dataset if loader is None else loader).__name__} of the program",
    )
    flow = Flow(trainer, length, requests, ignore_keys)
    build, rates = _optimizer_and_rates(trainer, length)
    extensions = Extensions(
        observers=(flow,),
        build_optimizer=build,
        group_learning_rates=rates,
        epoch_order=_order(args, rows) if loader is None else None,
        evaluate=flow.evaluate if args.eval_strategy != "no" else None,
        find_unused_parameters=find_unused_parameters(trainer, recipe),
        requests=requests,
    )
    run = prepare_run(recipe, HFTask(trainer, flow, length, rows, loader), extensions)
    trainer.kept_accelerator = run.accelerator
    first_step = run.state.step
    try:
        flow.begin(run)
        if args.eval_on_start and trainer.eval_dataset is not None:
            trainer.evaluate(ignore_keys=ignore_keys)
    except BaseException:
        run.resources.close()  # the lock on the folder; train_run lets it go once it has begun
        raise
    train_run(run)
    flow.end()
    return flow, run.state.step - first_step


def find_unused_parameters(trainer: "Trainer", recipe: Recipe) -> bool:
    """As transformers decides where the arguments do not: for its own models, unless activations are checkpointed."""
    asked: bool | None = trainer.args.ddp_find_unused_parameters
    if asked is not None:
        return asked
    return isinstance(trainer.model, PreTrainedModel) and not recipe.precision.gradient_checkpointing


def _batches_in(loader: DataLoader[Any] | None) -> int | None:
    try:
        return None if loader is None else len(loader)
    except TypeError:  # over a data set without a length
        return None


def _order(args: TrainingArguments, rows: Any) -> Callable[[int], Any] | None:
    if is_stream(rows) or args.train_sampling_strategy == "sequential":
        return None
    return epoch_order(len(rows), args.seed if args.data_seed is None else args.data_seed)


def _optimizer_and_rates(
    trainer: "Trainer", length: Length
) -> tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[int], list[float]] | None]:
    """`create_optimizer`, and a scheduler's rates where the recipe cannot say them: for an optimizer or a scheduler of the user."""
    is_own = (
        trainer.given_optimizers[0] is not None
        or trainer.optimizer_cls_and_kwargs is not None
        or is_overridden(trainer, "create_optimizer")
        or is_overridden(trainer, "create_scheduler")
        or schedule_of(trainer.args) is None
    )
    scheduled: list[ScheduledRates] = []

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = trainer.create_optimizer()
        if is_own:
            scheduled.append(ScheduledRates(optimizer, trainer.create_scheduler(length.max_steps, optimizer)))
        return optimizer

    return build, (lambda step: scheduled[0](step)) if is_own else None


def resume_of(args: TrainingArguments, asked: str | bool | None) -> str:
    """`checkpoint.resume`: never, auto, or a folder; transformers' name checkpoint-N means our checkpoints/step-N.

    Raises:
        ValueError: there is nothing to go on from.
    """
    if asked is None or asked is False:
        return "never"
    root = Path(args.output_dir) / "checkpoints"
    if asked is True:
        if not checkpoint_folders(root):
            raise ValueError(
                f"resume_from_checkpoint=True: there is no checkpoint in {root}; leave it out to start anew"
            )
        return "auto"
    path = Path(asked)
    theirs = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if not path.exists() and theirs:
        path = path.parent / "checkpoints" / f"step-{int(theirs.group(1)):08d}"
    if not path.exists():
        raise ValueError(f"resume_from_checkpoint={asked}: there is no such folder; checkpoints are in {root}")
    return str(path)


def evaluation_accelerator(args: TrainingArguments) -> Accelerator:
    """For evaluate() and predict() without a train() before it.

    Raises:
        ValueError: the launcher started more processes than there are here, or the device lacks the precision.
    """
    processes = start_processes()
    check_launcher(processes.num_processes)
    section = Precision(mixed_precision="fp16" if args.fp16 else "bf16" if args.bf16 else "no")
    sizes = resolve_batch(Batch(per_device_batch_size=args.per_device_train_batch_size), processes.num_processes)
    precision = choose_mixed_precision(section, processes.device)
    return start_accelerator(precision.value, section, Guard(), sizes, processes.device)
