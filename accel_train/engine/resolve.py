"""Check a recipe and resolve its steps and data order before the model is built, for a run and for its plan."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from accel_train.core.errors import check_packages
from accel_train.core.state import Choices
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.order import DataOrder
from accel_train.data.sources import unread_formats
from accel_train.data.text.tokenizers import check_tokenizer
from accel_train.engine.block_order import block_orders
from accel_train.engine.mixture import describe_mixture, mixed_order
from accel_train.model.activation_checkpointing import checkpoint_activations
from accel_train.model.freeze import freeze, set_training
from accel_train.model.kernels.experts import autocast_experts
from accel_train.model.pretrained import check_model_config, describe_kernels
from accel_train.observe.notify import check_targets
from accel_train.observe.trackers import check_tracker_names
from accel_train.optim.schedule import Rate, StepPlan, make_schedule, resolve_steps, scale_learning_rate
from accel_train.parallel.compatibility import check_compatibility
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TASKS, check_spec, refuse_unread
from accel_train.recipe.writer import who_set
from accel_train.task import Task, TaskData, load_task, with_data_of

MOST_READS_PER_STEP = 100
"""Limit of passes over the data per step. More is a mistake, and the order alone would fill the memory."""


def check_recipe(recipe: Recipe) -> tuple[Recipe, Task]:
    """Return the recipe with its task's `data` section, and the task, after every check that needs no data.

    Raises:
        ValueError: the task does not exist, its model does not know a field, or a package is not installed.
    """
    task = load_task(recipe.task)
    recipe = with_data_of(task, recipe)
    check_spec(recipe, task.spec)
    if recipe.task in TASKS:
        refuse_unread(recipe, unread_formats(recipe.data))
        check_model_config(recipe)
    if "tokenizer" in task.spec.uses:
        check_tokenizer(recipe)
    if not recipe.data.is_labelled:
        raise ValueError(
            f"data.{recipe.data.label_setting}=null leaves nothing to learn from. It is for `accel-train predict` only"
        )
    lora = recipe.model.lora
    if recipe.loss.logit_softcap is not None and lora is not None and not lora.merge:
        raise ValueError(
            "loss.logit_softcap: adapter/ is used with its base model, whose configuration does not have this cap. "
            "Set model.lora.merge to true, or leave the cap out"
        )
    check_compatibility(recipe, task)
    if lora is not None:
        check_packages(("peft",), "lora", "model.lora")
    check_tracker_names(recipe.log.trackers)
    check_targets(recipe.log.notify)
    if recipe.loads_best_model and not recipe.checkpoint.keep_best:
        raise ValueError(
            "checkpoint.load_best_model_at_end needs the best checkpoint: set checkpoint.keep_best to true as well"
        )
    return recipe, task


def resolve_run(
    recipe: Recipe, data: TaskData, sizes: BatchSizes, epoch_order: Callable[[int], NDArray[np.int64]] | None = None
) -> tuple[StepPlan, DataOrder, Rate]:
    """Return the step plan, the data order, and the peak learning rate of a run on this data.

    `epoch_order` replaces the built-in order.

    Raises:
        ValueError: there is nothing to train on, the warmup or `log.profile_steps` exceeds the run, or samples have
            no lengths to group by.
    """
    refuse_unread(recipe, data.unread)
    if data.eval is None:
        refuse_unread(recipe, {"evaluate.at_start": "the recipe holds out no data, as data.eval or data.eval_fraction"})
    num_samples = len(data.train)  # type: ignore[arg-type]
    section = recipe.data
    if sizes.global_batch_size > MOST_READS_PER_STEP * num_samples > 0:
        raise ValueError(
            f"batch.global_batch_size={sizes.global_batch_size} is more than {MOST_READS_PER_STEP} times the "
            f"{num_samples} training samples, so a step would read the same samples again and again; lower it to at "
            f"most {num_samples}"
        )
    steps = resolve_steps(recipe.schedule, num_samples, sizes.global_batch_size, section.last_batch)
    make_schedule(recipe.schedule, steps.max_steps, steps.warmup_steps)  # an own curve fails before a model is built
    if section.group_by_length and data.lengths is None:
        raise ValueError(f"data.group_by_length: all samples of {recipe.task} have the same length. Leave it out")
    profiled = recipe.log.profile_steps
    if profiled is not None and profiled[1] > steps.max_steps:
        raise ValueError(
            f"log.profile_steps={list(profiled)} ({who_set(recipe, 'log.profile_steps')}) ends after step "
            f"{steps.max_steps}, the last of the run; give earlier steps"
        )
    lengths = data.lengths if section.group_by_length else None
    rate = scale_learning_rate(recipe.optimizer, sizes.global_batch_size)
    if section.mixture:
        if epoch_order is not None:
            raise ValueError("an order of epochs does not go with the weights in data.train; leave one of them out")
        mixed = mixed_order(recipe, data, sizes.global_batch_size, steps.max_steps)
        data.add_notes(describe_mixture(mixed, steps.max_steps, section.window))
        return steps, mixed, rate
    if data.shards is not None:
        if epoch_order is not None:
            raise ValueError("an order of epochs does not go with data.order: blocks; leave one of them out")
        return steps, block_orders(recipe, data.shards, sizes.global_batch_size)[0], rate
    order = DataOrder(
        num_samples, sizes.global_batch_size, recipe.seed, section.shuffle, section.last_batch, lengths, epoch_order
    )
    return steps, order, rate


def makes_new_models(task: Task) -> bool:
    """Return whether this package makes the task's model. A program may hold the model that it returns."""
    module = type(task).build_model.__module__
    return module.startswith("accel_train.tasks.") and module != "accel_train.tasks.module"


class Changed(NamedTuple):
    """A model after the recipe's changes."""

    model: nn.Module
    choices: Choices
    frozen: frozenset[str]
    """Names of the weights that the recipe freezes. Weights that the task freezes are not included: the task may change
    them."""


def change_model(recipe: Recipe, task: Task, model: nn.Module) -> Changed:
    """Return the model in training mode with checkpointed blocks, adapters, and frozen parameters, and the choices.

    Parts of a program's model stay in evaluation mode if the program set them (`set_training`).

    Raises:
        ValueError: a pattern of the recipe matches nothing, or the task did not build a module or rejects the
            model. Also raised if the model's blocks cannot be checkpointed.
    """
    if not isinstance(model, nn.Module):
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise ValueError(f"build_model of task={recipe.task!r} returned {kind}; return a torch.nn.Module on the CPU")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    modes = None
    if makes_new_models(task):
        model.train()  # `from_pretrained` returns models in evaluation mode, without dropout
    else:
        modes = set_training(model)
    checkpoint_activations(model, recipe.precision)
    choices = describe_kernels(recipe, model) | autocast_experts(model)
    if modes is not None:
        choices["parts in eval()"] = modes
    if recipe.model.lora is not None:
        from accel_train.model.lora import add_adapters

        choices["model.lora"] = add_adapters(model, recipe.model.lora)
    if recipe.model.freeze or recipe.model.freeze_batch_norm:
        choices["model.freeze"] = freeze(model, recipe.model)
    named = model.named_parameters()
    frozen = frozenset(name for name, each in named if id(each) in trained and not each.requires_grad)
    return Changed(model, choices | task.choices(recipe, model), frozen)
