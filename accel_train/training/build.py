"""Build the run of a plan: its model, wrapped and restored, and everything else that a step needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from accel_train.checkpoint.base import base_problem, digests_of_base, left_out
from accel_train.checkpoint.fingerprint import (
    OF_BEST,
    Change,
    Settings,
    changes_evaluation,
    setting_changes,
    training_settings,
)
from accel_train.checkpoint.health import Health
from accel_train.checkpoint.rollback_log import apply_rollbacks
from accel_train.checkpoint.saver import Saver
from accel_train.checkpoint.store import read_trainer
from accel_train.core.errors import first_line
from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices, Requests, TrainState
from accel_train.data.cache import DigestCheck
from accel_train.engine.batch_search import BatchCache, Trials, fit_micro_batch
from accel_train.engine.resolve import change_model, makes_new_models
from accel_train.engine.run import Calendar, ModelFacts, RunContext, RunPlan, make_guard
from accel_train.engine.save import restore
from accel_train.model.batch_norm import RunningStatistics, sync_batch_norms
from accel_train.model.compile import GraphCount, compile_module
from accel_train.model.kernels.float8 import convert_to_float8
from accel_train.model.kernels.frozen import keep_frozen
from accel_train.model.memory_estimate import build_without_weights
from accel_train.model.pretrained import check_plain_weights
from accel_train.model.tensors import FileTensor, StandIns, packed, split_state, without_values
from accel_train.model.training_module import TrainingModule
from accel_train.optim.muon import Muon, orthogonalise
from accel_train.optim.optimizers import build_optimizer, describe_optimizer, name_parameters
from accel_train.optim.schedule import make_schedule
from accel_train.parallel.building import Builders, Source, Unread, empty_until_restored, read_layer
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.initial import Drawn, Recording, draws_as_expected
from accel_train.parallel.sequence_parallel import attend_over_slices
from accel_train.parallel.strategy import Strategy
from accel_train.recipe.optimizer import Groups
from accel_train.runtime.consistency import check_choices
from accel_train.runtime.memory import PeakMemory
from accel_train.runtime.process_group import concluded, first_problem, on_main
from accel_train.runtime.signals import StopRequest
from accel_train.runtime.watchdog import Watchdog
from accel_train.task import Task, TaskData
from accel_train.training.output import device_peak

LOADED, MADE = "pretrained weights", "initial weights"
"""Choices of how the weights of `model.pretrained` are loaded, and the weights of a new model made."""


def build_run(plan: RunPlan, strategy: Strategy, stop: StopRequest, watchdog: Watchdog) -> RunContext:
    """Build and wrap the model, restore the checkpoint, and return the run."""
    recipe, accelerator = plan.recipe, strategy.accelerator
    inner, plan, batch_cache, digests = build_model(plan, strategy)
    base, graphs = check_base(plan, inner, digests), GraphCount()
    plan = wrap_model(plan, strategy, inner, graphs)
    check_choices(plan.choices)
    own_rates = plan.extensions.group_learning_rates
    settings = settings_of(plan, strategy.optimizer.param_groups if own_rates else None)
    peak_flops, mfu = device_peak(accelerator.device, plan.choices)
    plan = plan.with_choices({"mfu": mfu})
    # No library can load a checkpoint without its base weights, so such a checkpoint needs no model files.
    describes = accelerator.is_main_process and not inner.base
    description = describe_model(plan.task, inner.model, plan.data) if describes else {}
    facts = ModelFacts(description, plan.task.flops_per_target(recipe, inner.model), peak_flops, settings, base)
    state, changes = restore_state(plan, strategy, settings)
    checkpoints, large_files = plan.output_dir / "checkpoints", plan.data.large_files
    return RunContext(
        plan=plan,
        facts=facts,
        strategy=strategy,
        schedule=schedule_of(plan),
        statistics=RunningStatistics(inner, shared=not strategy.syncs_buffers and accelerator.num_processes > 1),
        state=state,
        sizes=plan.sizes,
        guard=make_guard(plan, state),
        calendar=Calendar(plan, compares_weights=strategy.num_copies > 1),
        saver=Saver(checkpoints, in_background=recipe.checkpoint.in_background),
        health=Health(
            checkpoints if accelerator.is_main_process else None, recipe.guard.healthy_after_steps, state.last_incident
        ),
        memory=PeakMemory(accelerator.device),
        requests=plan.extensions.requests or Requests(),
        stop=stop,
        watchdog=watchdog,
        batch_cache=batch_cache,
        digest_check=DigestCheck(large_files) if large_files and accelerator.is_local_main_process else None,
        graphs=graphs,
        changes=changes,
    )


def describe_model(task: Task, model: nn.Module, data: TaskData) -> dict[str, bytes]:
    """Return the files that `from_pretrained` needs in addition to weights (configuration, tokenizer), by name."""
    with TemporaryDirectory() as folder:
        task.save_description(model, data, Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def settings_of(plan: RunPlan, own_groups: Groups | None = None) -> Settings:
    """Return the settings that training depends on. It also works before the model is built."""
    return training_settings(
        plan.recipe, {"optimizer.learning_rate": plan.rate, **plan.choices}, plan.data.inputs, own_groups
    )


def schedule_of(plan: RunPlan) -> Callable[[int], float | Sequence[float]]:
    """Return the program's own learning rates, or the recipe's schedule times its peak."""
    if plan.extensions.group_learning_rates is not None:
        return plan.extensions.group_learning_rates
    multiplier = make_schedule(plan.recipe.schedule, plan.max_steps, plan.steps.warmup_steps)
    return lambda step: plan.rate.value * multiplier(step)


def build_model(plan: RunPlan, strategy: Strategy) -> tuple[TrainingModule, RunPlan, BatchCache | None, dict[str, str]]:
    """Build the model on its device, not yet wrapped, and fit the micro-batch to the remaining memory.

    Also return the digests of the frozen base weights that `model.pretrained` has and checkpoints leave out. On a
    resume, all processes that load these weights have the digests. At a start, only the main process has them.
    """
    recipe, task, data, accelerator = plan.recipe, plan.task, plan.data, strategy.accelerator
    kept, precision, device = plan.choices.get("model.frozen_dtype"), accelerator.mixed_precision, accelerator.device
    is_nf4 = kept is not None and kept.value == "nf4"
    resumed, is_pretrained = plan.resume_point.path, recipe.model.pretrained is not None
    takes_digests = is_pretrained and (resumed or accelerator.is_main_process)
    choices: Choices = {}
    frozen: set[str] = set()
    base: dict[str, str] = {}

    def build(*, has_values: bool = True) -> nn.Module:
        torch.manual_seed(recipe.seed)  # equal initial weights on every process, however often it builds
        make = task.build_model if plan.extensions.materialize else partial(build_without_weights, task=task)
        model, changes, names = change_model(recipe, task, make(recipe, data=data))
        choices.update(changes)
        frozen.update(names)
        if has_values and takes_digests:
            base.update(digests_of_base(model, frozen))
        choices.update(keep_frozen(model, frozen, kept, precision, device))
        return model

    def build_empty() -> nn.Module:
        with without_values():
            model, _, names = change_model(recipe, task, build_without_weights(recipe, task, data))
        frozen.update(names)
        choices.update(keep_frozen(model, names, kept, precision))
        return model

    def build_restored() -> nn.Module | None:
        if resumed is None or not makes_new_models(task):
            return None
        # A checkpoint that leaves out the base does not fill it. bitsandbytes quantizes values only.
        if left_out(resumed) or is_nf4:
            return None
        with StandIns.active():
            return empty_until_restored(partial(build, has_values=False), resumed)

    def build_unread() -> Unread | None:
        is_wanted = plan.extensions.materialize and (is_pretrained or strategy.builds_empty)
        if not is_wanted or (resumed and not left_out(resumed)):
            return None
        generator, found, problem = torch.get_rng_state(), None, ""
        files, drawn, recording = dict[str, FileTensor](), dict[str, Drawn](), Recording()
        if not makes_new_models(task):
            problem = "the task builds its own model"
        elif not is_pretrained and not draws_as_expected():
            problem = "this torch draws random numbers in another order"
        else:
            try:
                if not is_pretrained:
                    with recording.active():
                        found = change_model(recipe, task, task.build_model(recipe, data))
                    drawn = recording.take_out(found.model)
                else:
                    empty: Any = build_without_weights(recipe, task, data)
                    check_plain_weights(empty)
                    with StandIns.active() as stand_ins:
                        found = change_model(recipe, task, task.build_model(recipe, data))
                        files = stand_ins.take_out(found.model, empty.all_tied_weights_keys)
            # A full build reports the errors of the recipe.
            except Exception as error:
                problem = first_line(error)
        versions = sorted({each.version for each in files.values()})
        sources: dict[str, Source] = {**files, **drawn}
        own = problem, versions, {name: each.shape for name, each in sources.items()}
        problem, same_files, same_weights = concluded(own, _compare_sources)
        if found is None or problem or not same_weights:
            torch.set_rng_state(generator)
            who = "the main process" if strategy.builds_empty else "each process"
            does = f"{who} {'loads' if is_pretrained else 'makes'} all weights in fp32 first"
            problem = problem or "the processes see other files"
            choices[LOADED if is_pretrained else MADE] = Choice("whole", f"{does}, because {problem}")
            return None
        choices.update(found.choices)
        frozen.update(found.frozen)
        unread = Unread(found.model, sources, same_files)
        if is_pretrained and (accelerator.is_main_process or (resumed and not strategy.builds_empty)):
            base.update(digests_of_base(found.model, frozen, files))
        # The main process sends packed layers to the others.
        has_values = not strategy.builds_empty or accelerator.is_main_process
        read = partial(read_layer, unread, has_values=has_values) if is_nf4 else None
        count, stays = len(sources), not strategy.builds_empty
        choices.update(keep_frozen(found.model, frozen, kept, precision, device, read, stays=stays))
        if is_pretrained:
            choices[LOADED] = describe(unread, count, is_sharded=strategy.builds_empty)
        else:
            choices[MADE] = Choice("in parts", f"each process makes only its part of {count} weights")
        return unread

    torch.manual_seed(recipe.seed)
    model = strategy.build(Builders(build, build_empty, build_restored, build_unread))
    if strategy.whole_because:
        reason = f"each process makes all of them, because {strategy.whole_because}"
        choices[MADE] = Choice("whole", reason)
    packed(split_state(model)[1])  # refuses extra state that no checkpoint can keep
    inner = TrainingModule(model, task, frozenset(frozen if is_pretrained else ()))
    if precision == "fp8":
        choices["precision.float8"] = convert_to_float8(inner.model)
    trials = Trials(recipe, data, inner, accelerator)
    sizes, fitted, batch_cache = fit_micro_batch(trials, plan.sizes, is_empty=strategy.builds_empty)
    check_compatibility(recipe, task, precision, sizes.gradient_accumulation_steps)
    attend_over_slices(accelerator, inner.model)
    batch = Choice(sizes.global_batch_size, sizes.reason)
    choices |= {**fitted, "batch": batch, "optimizer.learning_rate": plan.rate}
    return inner, replace(plan, sizes=sizes).with_choices(choices), batch_cache, base


def describe(unread: Unread, count: int, *, is_sharded: bool) -> Choice[str]:
    """Return how the processes read the `count` weights of a model. `unread` lacks those that are quantized."""
    if not is_sharded:
        return Choice("one at a time", f"{count} weights are read from their files onto the device")
    if not unread.is_shared:
        why = "the others see other files"
        return Choice("sent", f"the main process reads {count} weights and sends them one at a time; {why}")
    left = len(unread.sources)
    packed = f"; the main process reads the {count - left} to quantize" if left < count else ""
    return Choice("in parts", f"each process reads only its part of {left} weights{packed}")


def _compare_sources(everywhere: list[tuple[str, Any, Any]]) -> tuple[str, bool, bool]:
    """Return the first problem of a process, and whether all have the same versions of files, and the same weights."""
    problems, files, weights = zip(*everywhere)
    same_files, same_weights = (all(each == found[0] for each in found) for found in (files, weights))
    return first_problem(problems), same_files, same_weights


def check_base(plan: RunPlan, inner: TrainingModule, digests: dict[str, str]) -> Mapping[str, str]:
    """Return the digests of the weights that the run's checkpoints leave out, after checking the base of a resume.

    If the run resumes from a checkpoint of all weights, nothing is left out: weights that are frozen now were trained
    before.

    Raises:
        ValueError: on all processes, if some process loaded another base than the checkpoint was trained on.
    """
    path = plan.resume_point.path
    if path is None:
        return digests
    has_loaded = digests or not inner.base
    if problem := concluded(base_problem(path, digests) if has_loaded else "", first_problem):
        raise ValueError(problem)
    if not left_out(path):
        inner.base = frozenset()
        return {}
    return digests


def wrap_model(plan: RunPlan, strategy: Strategy, inner: TrainingModule, graphs: GraphCount) -> RunPlan:
    """Compile and wrap the training module, and make its optimizer and its averaged weights."""
    recipe, extensions, accelerator = plan.recipe, plan.extensions, strategy.accelerator
    choices: Choices = compile_module(
        inner,
        recipe.precision,
        graphs,
        lengths_vary=plan.data.lengths_vary,
        auto=plan.choices.get("precision.compile"),
    )
    if recipe.parallel.sync_batch_norm and accelerator.num_processes > 1:
        reason = f"the statistics of {format_count(sync_batch_norms(inner.model), 'batch norm')} are over all processes"
        choices["parallel.sync_batch_norm"] = Choice(True, reason)
    for name, value in extensions.ddp.items():
        setattr(accelerator.ddp_handler, name, value)
    own = extensions.build_optimizer
    make_optimizer = own or (lambda model: build_optimizer(model, recipe.optimizer, accelerator.device))
    wrapped = strategy.wrap(
        inner,
        lambda model: name_parameters(make_optimizer(model), model),
        find_unused=recipe.parallel.find_unused_parameters is True or extensions.find_unused_parameters,
    )
    if wrapped is not None:
        choices["parallel.wrapped"] = wrapped
    if own is None and (chosen := describe_optimizer(strategy.optimizer, recipe.optimizer.name)) is not None:
        choices["optimizer"] = chosen
    if isinstance(muon := strategy.optimizer, Muon) and recipe.optimizer.name == "muon":
        if plan.choices["optimizer.muon_dtype"].value == "bf16":
            muon.dtype = torch.bfloat16
        # A CPU compiles for longer than it saves. The backends for debugging are for the model.
        compiles = recipe.precision.compiles and recipe.precision.compile_backend == "inductor"
        if compiles and accelerator.device.type == "cuda":
            muon.orthogonalise = torch.compile(orthogonalise)
    strategy.make_average(recipe.optimizer.ema_decay)
    return plan.with_choices(choices)


def restore_state(plan: RunPlan, strategy: Strategy, settings: Settings) -> tuple[TrainState, list[Change]]:
    """Restore the checkpoint of the resume point, if any; return its counters and the settings changed since."""
    point, state, changes = plan.resume_point, TrainState(), list[Change]()
    if (path := point.path) is not None:
        state = restore(strategy, path, plan.recipe.optimizer.name)
        # All processes use the main process's changes. They decide whether the run has finished and what is best.
        changes = on_main(lambda: setting_changes(read_trainer(path), settings, plan.recipe))
        # A program's own evaluation reads other data than the fingerprint's.
        is_other = plan.extensions.evaluate is None and changes_evaluation(point.changes)
        if is_other:
            state.untrained = {}
        if state.step < plan.max_steps and (is_other or any(change.name in OF_BEST for change in changes)):
            state.best_metric = state.best_step = state.best_loss = None
            state.evaluations_without_improvement = 0
    apply_rollbacks(state, point.rollbacks)
    return state, changes
