"""A call of Trainer.train(): translate the arguments, prepare, run the loop, and set the state that users expect."""

import time
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.debug_utils import DebugOption, DebugUnderflowOverflow
from transformers.integrations import activate_neftune, deactivate_neftune, get_reporting_integration_callbacks
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import (
    TrainOutput,
    align_special_tokens,
    check_target_module_exists,
    enable_full_determinism,
    speed_metrics,
    unwrap_peft_model,
    validate_quantization_for_training,
)
from transformers.utils import logging

from accel_train.core.errors import SettingError
from accel_train.core.state import Requests
from accel_train.core.work import working
from accel_train.data.batch_sizes import resolve_batch
from accel_train.engine.run import Door, Extensions
from accel_train.hf.argument_table import argument_error, has_recipe_optimizer, name_of
from accel_train.hf.arguments import OURS, Length, length_of, precision_of, schedule_of, to_recipe, with_decay_of
from accel_train.hf.callbacks import Flow, RecipeRates, may_ask, rates_of
from accel_train.hf.checkpoints import load_stock_weights, load_whole, resume_of, resume_stock, stock_checkpoint
from accel_train.hf.evaluation import parts_of
from accel_train.hf.hub import finish_pushes
from accel_train.hf.inputs import (
    SUMS,
    Collator,
    EpochOrder,
    TrainLoader,
    epoch_order,
    loader_of_override,
    readable,
    reading_of,
    train_loader,
)
from accel_train.hf.search import trial_arguments
from accel_train.hf.task import HFTask
from accel_train.model.freeze import matching
from accel_train.optim.custom import try_given
from accel_train.optim.schedule import set_rate
from accel_train.optim.schedule_free import always_training
from accel_train.parallel.precision import agree_on_mixed_precision, start_accelerator
from accel_train.recipe.schema import Batch, Guard, Precision, Recipe
from accel_train.runtime.doctor import check_launcher
from accel_train.runtime.exit import exits_are_errors
from accel_train.runtime.launch_environment import with_launch_environment
from accel_train.runtime.private import with_plain_names
from accel_train.runtime.process_group import start_processes
from accel_train.training.setup import prepare_run
from accel_train.training.train import train_run

if TYPE_CHECKING:
    from accel_train.hf import Trainer


def seed(args: TrainingArguments) -> None:
    """Seed all random generators."""
    (enable_full_determinism if args.full_determinism else transformers.set_seed)(args.seed)


def default_collator(processing_class: Any) -> Collator:
    """Return the collator of a Trainer without one. It pads if the tokenizer or feature extractor can."""
    pads = isinstance(processing_class, PreTrainedTokenizerBase | transformers.SequenceFeatureExtractor)
    return transformers.DataCollatorWithPadding(processing_class) if pads else transformers.default_data_collator


def makes_optimizer(trainer: "Trainer") -> bool:
    """Return whether the optimizer's class comes from transformers or the user instead of the recipe."""
    own = trainer.optimizer_cls_and_kwargs is not None or trainer.overrides("get_optimizer_cls_and_kwargs")
    return own or not has_recipe_optimizer(trainer.args)


def prepared(model: nn.Module, args: TrainingArguments) -> nn.Module:
    """Return the user's model, set up as the arguments say.

    Raises:
        SettingError: kernels of liger-kernel are asked for, but the device is a CPU, or the package is not installed.
    """
    model = with_plain_names(model)
    validate_quantization_for_training(model)
    if args.deepspeed:
        load_whole(model)
    if args.use_liger_kernel:
        if args.device.type == "cpu":
            problem = "the kernels need a GPU, but the device is the CPU"
            raise argument_error(problem, "Remove it.", use_liger_kernel=True)
        try:
            apply_liger_kernel(model, args.liger_kernel_config)
        except ImportError as error:
            raise argument_error(str(error), use_liger_kernel=True) from error
    if (config := getattr(model, "config", None)) is not None:
        config.use_cache = args.use_cache
    return model


def label_smoother(model: nn.Module, epsilon: float) -> LabelSmoother | None:
    """Return transformers' label smoother, or None for an `epsilon` of 0."""
    if epsilon and getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        raise argument_error(
            "several labels per sample cannot be smoothed", "Set it to 0.", label_smoothing_factor=epsilon
        )
    return LabelSmoother(epsilon=epsilon) if epsilon else None


def num_flops_parameters(model: nn.Module) -> int:
    """Return the number of parameters without embeddings, or 0 for models that are not from transformers."""
    inner = unwrap_peft_model(model)
    return inner.num_parameters(exclude_embeddings=True) if isinstance(inner, PreTrainedModel) else 0


class WatchedCallbacks(CallbackHandler):
    """A handler whose callbacks may take longer than the hang timeout: an upload, a generation.

    Each event is progress, for example each batch of an evaluation.
    """

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> Any:
        with working(f"calling {event}"):
            return super().call_event(event, *args, **kwargs)


def callback_handler(trainer: "Trainer", callbacks: list[Any]) -> CallbackHandler:
    """Return the handler of the user's callbacks and the default ones."""
    reporting = get_reporting_integration_callbacks(trainer.args.report_to)
    printing = transformers.PrinterCallback if trainer.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK
    every = [transformers.DefaultFlowCallback, *reporting, *callbacks, printing]
    return WatchedCallbacks(every, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler)


def train(trainer: "Trainer", resume: str | bool | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
    """Train, report the result, and return it."""
    trainer._memory_tracker.start()
    if trainer.model_init is not None:
        seed(trainer.args)
        trainer._adopt(trainer.call_model_init(trial))
    knows_tokens = isinstance(trainer.processing_class, PreTrainedTokenizerBase | transformers.ProcessorMixin)
    if knows_tokens and isinstance(trainer.model, PreTrainedModel):
        align_special_tokens(trainer.model, trainer.processing_class)
    # Since the last train(), create_optimizer() was called or the attribute was set.
    if trainer.optimizer is not trainer._trained_optimizer:
        # A scheduler from create_scheduler, or the recipe's stand-in, is made again for the new run.
        is_renewed = getattr(trainer, "_created_lr_scheduler", False) or isinstance(trainer.lr_scheduler, RecipeRates)
        trainer.given_optimizers = (trainer.optimizer, None if is_renewed else trainer.lr_scheduler)
    trainer.optimizer, trainer.lr_scheduler = trainer.given_optimizers
    trainer.is_in_train = True
    try:
        with trial_arguments(trainer, trial), model_hooks(trainer):
            flow, num_steps = run_training(trainer, resume or None, ignore_keys)
    finally:
        trainer.is_in_train, trainer._trained_optimizer = False, trainer.optimizer
    loss, num_skipped = flow.training_loss()
    num_samples = flow.length.num_samples_planned * num_steps / max(trainer.state.max_steps, 1)
    began = time.time() - (flow.ended - flow.began)
    metrics = speed_metrics("train", began, num_samples=num_samples, num_steps=num_steps)
    metrics |= {"total_flos": trainer.state.total_flos, "train_loss": loss}
    if num_skipped:
        metrics["train_skipped_steps"] = num_skipped
    trainer._memory_tracker.stop_and_update_metrics(metrics)
    trainer.log(metrics)
    trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    finish_pushes(trainer)
    return TrainOutput(trainer.state.global_step, loss, metrics)


@exits_are_errors()
def run_training(
    trainer: "Trainer", resume_from_checkpoint: str | bool | None, ignore_keys: list[str] | None
) -> tuple[Flow, int]:
    """Train, and return the observer with its numbers and the number of steps of this call.

    Raises:
        SettingError: an argument is not supported.
    """
    args = trainer.args
    method = "get_train_dataloader"
    check_metric(trainer)
    loader = loader_of_override(trainer, method) if trainer.overrides(method) else None
    source = trainer.train_dataset
    if isinstance(loader, TrainLoader) and loader.is_as_made:
        source, loader = loader.source, None
    if loader is None and source is None:
        raise argument_error("required for training", "Give one.", "train_dataset")
    rows = readable(trainer, source) if loader is None else None
    num_samples = len(rows) if isinstance(rows, Sized) else None
    # length_hint is 0 without a loader, and for a loader over a dataset without a length.
    num_batches = length_hint(loader) or None
    length = length_of(args, num_samples, num_batches, args.world_size)
    counts_tokens = args.include_num_input_tokens_seen not in ("no", False)
    # An overridden `log` may use sums of steps that the host must wait for.
    asks = may_ask(trainer.callback_handler.callbacks) or trainer.overrides("log")
    by_callbacks = asks or args.eval_delay > 0 or counts_tokens
    requests = Requests() if by_callbacks else None
    recipe = to_recipe(
        args,
        length,
        trainer.model,
        resume=resume_of(args, resume_from_checkpoint),
        by_callbacks=by_callbacks,
        has_eval=trainer.eval_dataset is not None,
        train_name=f"{type(source if loader is None else loader).__name__} of the program",
    )
    decayed = trainer.get_decay_parameter_names(trainer.model)
    recipe = trainer.recipe = with_decay_of(recipe, trainer.model, decayed)
    flow = Flow(trainer, length, requests, ignore_keys)
    extensions = extensions_of(trainer, recipe, flow, None if loader is not None else epoch_order(args, rows))
    stock = flow.stock_checkpoint = stock_checkpoint(args, resume_from_checkpoint)
    check_sharded(trainer, with_launch_environment(recipe), stock)
    if stock is not None:
        load_stock_weights(trainer.model, stock)
    run = prepare_run(recipe, HFTask(trainer, flow, length, source, loader), extensions)
    trainer.accelerator, trainer.strategy = run.accelerator, run.strategy
    try:
        if stock is not None:
            resume_stock(trainer, run, stock)
        first_step = run.state.step
        log_plan(trainer, length, num_samples, first_step)
        shown = loader if loader is not None else train_loader(trainer)
        if isinstance(shown, TrainLoader):
            shown.num_batches = length.batches_per_epoch
        trainer.callback_handler.train_dataloader = shown
        flow.begin(run)
        if args.eval_on_start and trainer.eval_dataset is not None:
            trainer.evaluate(ignore_keys=ignore_keys)
    except BaseException:
        # This releases the lock on the folder. Once train_run has begun, train_run releases it.
        run.resources.close()
        raise
    train_run(run)
    # Later evaluations and saves use the averaged weights of a schedule-free optimizer.
    if run.strategy.average is not None:
        with torch.no_grad():
            averages = run.strategy.average.tensors()
            for name, parameter in trainer.model.named_parameters():
                if name in averages:
                    parameter.copy_(averages[name])
    flow.end()
    flow.names.leave_as_transformers()
    return flow, run.state.step - first_step


def check_sharded(trainer: "Trainer", recipe: Recipe, stock: Path | None) -> None:
    """Check that the trainer's settings work with a sharded model.

    Raises:
        SettingError: a setting does not. The message names it and the remedy.
    """
    args, strategy = trainer.args, recipe.parallel.strategy
    if recipe.parallel.num_sharing > 1:
        raise SettingError(
            f"{recipe.parallel.shared_by}={recipe.parallel.num_sharing} (the launch): "
            "accel_train.Trainer does not split layers or sequences",
            f"Launch with launch/fsdp2.yaml, or {OURS}.",
        )
    if strategy == "ddp" or args.world_size == 1:
        return
    found = None
    if trainer.strategy is not None:
        found = "this trainer's model is already sharded", "Make a new Trainer with the model that this one saved."
    elif stock is not None:
        found = f"{stock} is a checkpoint of transformers' Trainer", "Resume it unsharded for a step and save, first."
    elif trainer.given_optimizers[0] is not None:
        found = (
            "the given optimizer holds whole weights",
            "Override create_optimizer, which is called after the weights are sharded.",
        )
    elif makes_optimizer(trainer):
        found = f"optim={args.optim} is not tested with sharding", "Use adamw_torch or sgd."
    elif args.bf16_full_eval or args.fp16_full_eval:
        found = "a sharded model cannot be cast later", "Remove bf16_full_eval and fp16_full_eval."
    if found is not None:
        at = f"parallel.strategy {strategy} (fsdp, deepspeed or the launch)"
        raise SettingError(*found, at, ("fsdp", "deepspeed"))


def log_plan(trainer: "Trainer", length: Length, num_samples: int | None, first_step: int) -> None:
    """Log the lines that transformers' Trainer logs before the first step, at `log_level="info"`."""
    args, logger = trainer.args, logging.get_logger("transformers.trainer")
    logger.info("***** Running training *****")
    for name, number in (
        ("Num examples", length.num_samples_planned if num_samples is None else num_samples),
        ("Num Epochs", length.num_epochs),
        ("Num update steps per epoch", length.steps_per_epoch),
        ("Instantaneous batch size per device", args.per_device_train_batch_size),
        ("Total train batch size (w. parallel, distributed & accumulation)", length.global_batch_size),
        ("Gradient Accumulation steps", args.gradient_accumulation_steps),
        ("Total optimization steps", length.max_steps),
        ("Number of trainable parameters", trainer.get_num_trainable_parameters()),
    ):
        logger.info(f"  {name} = {number:,}")
    if first_step:
        logger.info(f"  Resuming training from checkpoint with global step {first_step}")


def extensions_of(trainer: "Trainer", recipe: Recipe, flow: Flow, order: EpochOrder | None) -> Extensions:
    """Return the settings of the arguments and the trainer that a recipe cannot express."""
    args, rates = trainer.args, ScheduledRates(trainer, flow, flow.length.max_steps)
    finds_unused = isinstance(trainer.model, PreTrainedModel) and recipe.precision.recomputed == "nothing"
    # None: as in transformers, for its own models.
    given = args.ddp_find_unused_parameters
    return Extensions(
        observers=(flow,),
        build_optimizer=rates.build_optimizer,
        group_learning_rates=rates if rates.are_used else None,
        epoch_order=order,
        evaluate=flow.evaluate if args.eval_strategy != "no" else None,
        find_unused_parameters=finds_unused if given is None else given,
        requests=flow.requests,
        reading=reading_of(args),
        door=Door(
            "call train() again",
            "call train(resume_from_checkpoint=True)",
            "pass load_best_model_at_end=True to TrainingArguments",
        ),
        ddp={} if args.ddp_bucket_cap_mb is None else {"bucket_cap_mb": args.ddp_bucket_cap_mb},
    )


def check_optimizer(trainer: "Trainer") -> None:
    """Check that `optim` can be built here, and that checkpoints can hold the state of a given optimizer.

    Raises:
        SettingError: the package of `optim` is missing, `optim_args` are wrong, a name of `optim_target_modules` is not
            in the model, or the state cannot be saved.
    """
    args, given = trainer.args, trainer.given_optimizers[0]
    if given is not None:
        try_given(given)
    is_given = given is not None or trainer.optimizer_cls_and_kwargs is not None
    if not (is_given or has_recipe_optimizer(args) or trainer.overrides("create_optimizer")):
        if isinstance(args.optim_target_modules, list):
            layers = [name for name, module in trainer.model.named_modules() if isinstance(module, nn.Linear)]
            found = lambda name, target: bool(check_target_module_exists([target], name))  # noqa: E731
            matching(layers, args.optim_target_modules, "optim_target_modules", kind="linear layer", match=found)
        try:
            trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
        # Each handler of transformers raises another type of error.
        except Exception as error:
            raise argument_error(str(error), optim=name_of(args.optim)) from error


@contextmanager
def model_hooks(trainer: "Trainer") -> Iterator[None]:
    """Attach the hooks that the arguments request to the model, inside the block.

    Raises:
        SettingError: neftune_noise_alpha is set, but the model has no input embeddings.
    """
    args, handle = trainer.args, None
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        DebugUnderflowOverflow(trainer.model)
    if args.neftune_noise_alpha is not None:
        if not hasattr(trainer.model, "get_input_embeddings"):
            problem = f"{type(trainer.model).__name__} has no get_input_embeddings"
            raise argument_error(problem, neftune_noise_alpha=args.neftune_noise_alpha)
        handle = activate_neftune(trainer.model, args.neftune_noise_alpha)
    try:
        yield
    finally:
        if handle is not None:
            deactivate_neftune(trainer.model, handle)


def check_metric(trainer: "Trainer") -> None:
    """Check that evaluations report `metric_for_best_model`, before the first step, if their metrics are known.

    Raises:
        SettingError: they do not. The message names the metrics.
    """
    wanted = trainer.args.metric_for_best_model
    if wanted is None or trainer.args.eval_strategy == "no" or trainer.compute_metrics is not None:
        return
    own = ("evaluate", "evaluation_loop", "prediction_step", "compute_loss", "log")
    adds = [getattr(trainer, name).__module__ for name in own]
    adds += [type(callback).__module__ for callback in trainer.callback_handler.callbacks]
    # Methods and callbacks of the program may add metrics.
    if any(each.split(".")[0] not in ("accel_train", "transformers") for each in adds):
        return
    metrics = trainer._token_metrics
    found = ["loss", *([] if metrics is None else metrics.of([[1.0] * len(SUMS)]))]
    parts = parts_of(trainer, None, "eval") or [(None, "eval")]
    names = sorted(f"{prefix}_{name}".removeprefix("eval_") for _, prefix in parts for name in found)
    if wanted.removeprefix("eval_") not in names:
        raise argument_error(
            f"evaluations report only {', '.join(names)}",
            "Name one of them, or give compute_metrics.",
            metric_for_best_model=wanted,
        )


class ScheduledRates:
    """The optimizer of `create_optimizer`, and the rates of its torch scheduler as a function of the step.

    The scheduler runs ahead of the loop, with one call per step. A scheduler that follows a metric (ReduceLROnPlateau)
    is stepped after each evaluation.
    """

    _optimizer: torch.optim.Optimizer

    def __init__(self, trainer: "Trainer", flow: Flow, max_steps: int) -> None:
        self._trainer, self._flow, self._max_steps = trainer, flow, max_steps
        self.are_used = (
            trainer.given_optimizers[0] is not None
            or makes_optimizer(trainer)
            or any(map(trainer.overrides, ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")))
            or schedule_of(trainer.args) is None
        )
        """Whether the user or transformers made the optimizer or schedule. Otherwise the recipe sets the rates."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, and start its rates.

        Raises:
            SettingError: the scheduler is not from torch.optim.lr_scheduler.
        """
        trainer = self._trainer
        if self.are_used:
            trainer.create_optimizer_and_scheduler(self._max_steps)
            scheduler = trainer.lr_scheduler
            if trainer.optimizer is None:
                raise argument_error("did not set self.optimizer", "Set it.", "create_optimizer_and_scheduler")
            self._optimizer = trainer.optimizer = always_training(trainer.optimizer)
            if isinstance(scheduler, ReduceLROnPlateau):
                self._flow.scheduler = scheduler
            elif not isinstance(scheduler, LRScheduler):
                raise argument_error(
                    f"{type(scheduler).__name__} is not a scheduler of torch.optim.lr_scheduler",
                    "Use one of them.",
                    "lr_scheduler",
                )
            self._scheduler, self._rates = scheduler, [rates_of(self._optimizer)]
            return self._optimizer
        return trainer.create_optimizer()

    def __call__(self, step: int) -> list[float]:
        in_use = rates_of(self._optimizer)
        # Each evaluation sets the rates.
        if self._flow.scheduler is not None:
            return in_use
        while len(self._rates) <= step:
            # Many schedulers compute the next rate from the current one.
            self._set(self._rates[-1])
            with warnings.catch_warnings():
                # Torch warns that the optimizer has not stepped yet. The scheduler is ahead on purpose.
                warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step()
            self._rates.append(rates_of(self._optimizer))
        self._set(in_use)
        return self._rates[step]

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            set_rate(group, rate)


def evaluation_accelerator(args: TrainingArguments) -> Accelerator:
    """Return an Accelerator for evaluate() and predict() before any train().

    Raises:
        SettingError: the launcher started more processes than the process group has, or the device lacks the precision.
    """
    processes = start_processes()
    check_launcher(processes.num_processes)
    section = Precision.model_validate({"mixed_precision": precision_of(args)})
    sizes = resolve_batch(Batch(per_device_batch_size=args.per_device_train_batch_size), processes.num_processes)
    precision = agree_on_mixed_precision(section, processes.device, processes.num_processes)
    return start_accelerator(precision.value, section, Guard(), sizes, processes.device)
