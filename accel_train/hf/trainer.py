"""`accel_train.Trainer`: the interface of transformers' Trainer on top of the loop of accel_train.

    from accel_train import Trainer
    args = TrainingArguments("out", num_train_epochs=3)
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()

TrainingArguments become a Recipe (`hf.arguments`). Model, datasets, and collator become a Task (`hf.task`). Callbacks
become an observer (`hf.callbacks`). evaluate and predict read every sample once (`hf.evaluation`). The loop provides
steps, guard, data order, checkpoints, and resume. docs/hf_trainer.md lists how each argument is treated, and the
differences from transformers.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer import Trainer as StockTrainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import (
    TrainerMemoryTracker,
    TrainOutput,
    align_special_tokens,
    enable_full_determinism,
    speed_metrics,
    unwrap_peft_model,
    validate_quantization_for_training,
)
from transformers.utils import can_return_loss, logging

from accel_train.hf import evaluation, hub, inputs, search, sharding, step, task, training
from accel_train.hf.argument_table import has_recipe_optimizer
from accel_train.hf.arguments import check_arguments, check_combinations, check_overrides
from accel_train.hf.checkpoints import get_last_checkpoint
from accel_train.hf.inputs import Signature
from accel_train.hf.sharding import load_whole
from accel_train.hf.training import (
    check_optimizer,
    evaluation_accelerator,
    model_hooks,
    run_training,
    with_liger_kernels,
)
from accel_train.recipe.schema import Recipe
from accel_train.runtime.private import with_plain_names

__all__ = ["Trainer", "get_last_checkpoint"]


class Trainer:
    """Trains, evaluates, and predicts with the arguments of `transformers.Trainer`.

    Raises:
        ValueError: an argument or an overridden method is not supported. The message names it and the remedy.
    """

    generates = False
    """Whether evaluations may generate texts, as in Seq2SeqTrainer."""
    signature: Signature
    _accepts_loss_kwargs: bool | None = None

    from transformers.trainer_pt_utils import (
        get_learning_rates,
        get_num_trainable_parameters,
        get_optimizer_group,
        log_metrics,
        metrics_format,
        save_state,
    )

    # Methods of transformers' Trainer that read only `args`, `state`, `control`, and `callback_handler`.
    add_callback = StockTrainer.add_callback
    pop_callback = StockTrainer.pop_callback
    remove_callback = StockTrainer.remove_callback
    get_decay_parameter_names = StockTrainer.get_decay_parameter_names
    is_local_process_zero = StockTrainer.is_local_process_zero
    is_world_process_zero = StockTrainer.is_world_process_zero
    num_examples = StockTrainer.num_examples
    create_optimizer_and_scheduler = StockTrainer.create_optimizer_and_scheduler
    create_scheduler = StockTrainer.create_scheduler
    get_optimizer_cls_and_kwargs = staticmethod(StockTrainer.get_optimizer_cls_and_kwargs)

    # Overrides may call these methods, but a subclass cannot replace them.
    _get_collator_with_removed_columns = StockTrainer._get_collator_with_removed_columns
    _get_output_dir = StockTrainer._get_output_dir
    _get_eval_sampler = StockTrainer._get_eval_sampler
    _get_learning_rate = StockTrainer._get_learning_rate
    _get_train_sampler = StockTrainer._get_train_sampler
    _prepare_input = StockTrainer._prepare_input
    _prepare_inputs = StockTrainer._prepare_inputs
    _remove_unused_columns = StockTrainer._remove_unused_columns
    _set_signature_columns_if_needed = StockTrainer._set_signature_columns_if_needed
    # The loop shards the model, so plugins of Accelerate are not used.
    is_deepspeed_enabled = is_fsdp_enabled = False
    is_model_parallel, place_model_on_device = False, True
    hp_search_backend = deepspeed = loss_is_scaled_for_ga = None
    # The loop adds its FLOPs to state.total_flos.
    current_flos = 0
    current_gradient_accumulation_steps = 1
    """Divisor of a micro-batch's loss in a training_step copied from transformers. Always 1: the loop divides once."""

    # Methods that other modules of this package define.
    get_total_train_batch_size = sharding.get_total_train_batch_size
    call_model_init = search.call_model_init
    hyperparameter_search = search.hyperparameter_search
    create_optimizer = training.create_optimizer
    log = evaluation.log
    save_metrics = evaluation.save_metrics
    save_model = task.save_model
    compute_loss = step.compute_loss
    compute_loss_context_manager = step.compute_loss_context_manager
    training_step = step.training_step
    floating_point_ops = step.floating_point_ops
    get_train_dataloader = inputs.get_train_dataloader
    get_eval_dataloader = inputs.get_eval_dataloader
    get_test_dataloader = inputs.get_test_dataloader
    evaluate = evaluation.evaluate
    evaluation_loop = evaluation.evaluation_loop
    predict = evaluation.predict
    prediction_step = step.prediction_step
    init_hf_repo = hub.init_hf_repo
    push_to_hub = hub.push_to_hub
    create_model_card = hub.create_model_card

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        match_transformers: bool = False,
    ) -> None:
        check_overrides(type(self), Trainer)
        self.match_transformers = match_transformers
        """Whether to weigh and drop samples as transformers does, where accel_train differs (docs/hf_trainer.md)."""
        self.args = args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(args)
        self._memory_tracker = TrainerMemoryTracker(args.skip_memory_metrics)
        self._memory_tracker.start()
        self.is_in_train = False
        """Whether train() is running, including its evaluations."""
        logging.set_verbosity(args.get_process_log_level())
        if (model is None) == (model_init is None):
            raise ValueError("give exactly one of model and model_init")
        if tokenizer is not None and processing_class is not None:
            raise ValueError("tokenizer is the old name of processing_class; give one of the two")
        self.model_init = model_init
        self.processing_class = processing_class if processing_class is not None else tokenizer
        pads = isinstance(self.processing_class, PreTrainedTokenizerBase | transformers.SequenceFeatureExtractor)
        default = transformers.DataCollatorWithPadding(self.processing_class) if pads else default_data_collator
        self.data_collator = data_collator or default
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.given_optimizers = optimizers
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        check_combinations(self)
        self._trained_optimizer = self.optimizer
        self.recipe: Recipe | None = None
        """Recipe made from the arguments. None before train()."""
        self.strategy: Any = None
        """Strategy by which the last train() distributed the model. None before train()."""
        self.whole_model: nn.Module | None = None
        """Copy of a sharded model on the main process, for loading whole weights. None otherwise."""
        self.trial: Any = None
        self.hp_space: Any = None
        self.hp_name: Any = None
        self.compute_objective: Any = None
        self.objective: float | None = None
        self._initial_num_input_tokens_seen = 0
        self.hub_model_id: str | None = None
        self.pushes: list[Any] = []
        self._seed()
        self._adopt(self.call_model_init() if model is None else model)
        check_optimizer(self)
        reporting = get_reporting_integration_callbacks(args.report_to)
        printing = [transformers.PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK]
        self.callback_handler = CallbackHandler(
            [transformers.DefaultFlowCallback, *reporting, *(callbacks or []), *printing],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.control, self.state = TrainerControl(), TrainerState()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        if args.push_to_hub:
            self.init_hf_repo()
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        self._memory_tracker.stop_and_update_metrics()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if StockTrainer in cls.__mro__:
            raise ValueError(
                f"class {cls.__name__}: it is derived from transformers.Trainer too, whose loop would train; "
                "derive it from accel_train.Trainer alone (TRL, sentence-transformers and setfit need "
                "transformers.Trainer)"
            )

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Return whether the model divides its loss by `num_items_in_batch`. Scripts may set it, as in transformers."""
        return self.signature.takes_num_items

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, accepts: bool) -> None:
        # Kept for models that model_init makes later.
        self._accepts_loss_kwargs = accepts
        weighs_batches = self.match_transformers and self.compute_loss_func is None and not accepts
        self.signature = replace(self.signature, takes_num_items=accepts, weighs_batches=weighs_batches)

    @property
    def _train_batch_size(self) -> int:
        return self.args.train_batch_size

    @property
    def neftune_noise_alpha(self) -> float | None:
        """Return the argument `neftune_noise_alpha`."""
        return self.args.neftune_noise_alpha

    @property
    def gather_function(self) -> Callable[..., Any]:
        """Return the function that gathers tensors of all processes."""
        return self.accelerator.gather_for_metrics

    def overrides(self, name: str) -> bool:
        """Return whether a subclass, or the object itself, overrides the method `name`."""
        return getattr(type(self), name) is not getattr(Trainer, name) or name in vars(self)

    def _seed(self) -> None:
        enable_full_determinism(self.args.seed) if self.args.full_determinism else transformers.set_seed(self.args.seed)

    def _adopt(self, model: nn.Module) -> None:
        """Set the model, and determine how it computes its loss."""
        model = with_plain_names(model)
        validate_quantization_for_training(model)
        if self.args.deepspeed:
            load_whole(model)
        if self.args.use_liger_kernel:
            with_liger_kernels(model, self.args)
        self.model = self.model_wrapped = model
        self.strategy = None
        match = self.match_transformers and self.compute_loss_func is None
        self.signature = Signature.of(model, self.args.label_names, match=match)
        if self._accepts_loss_kwargs is not None:
            self.model_accepts_loss_kwargs = self._accepts_loss_kwargs
        self.label_names = list(self.signature.label_names)
        self._signature_columns: list[str] | None = None
        self.can_return_loss = bool(can_return_loss(type(unwrap_peft_model(model))))
        config = getattr(model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache
        epsilon = self.args.label_smoothing_factor
        if epsilon and getattr(config, "problem_type", None) == "multi_label_classification":
            raise ValueError(
                f"label_smoothing_factor={epsilon}: labels that are several at once cannot be smoothed; set it to 0"
            )
        self.label_smoother = LabelSmoother(epsilon=epsilon) if epsilon else None
        inner = unwrap_peft_model(model)
        is_known = isinstance(inner, PreTrainedModel)
        self._num_flops_parameters = inner.num_parameters(exclude_embeddings=True) if is_known else 0

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as the arguments say. Resume an earlier run in output_dir if requested, or archive it otherwise.

        Args:
            resume_from_checkpoint: True for the newest valid checkpoint of output_dir, or the folder of a checkpoint.

        Raises:
            ValueError: an argument is not supported, or the checkpoint to resume from does not exist.
            TrainingStopped: the guard's budget of skipped steps is spent. The last checkpoint is good.
            Preempted: the job was asked to stop (SIGTERM, Ctrl-C) and has saved. train(resume_from_checkpoint=True)
                resumes.
            RestartNeeded: a process of a sharded model ran out of memory. train(resume_from_checkpoint=True) uses
                smaller micro-batches.
        """
        self._memory_tracker.start()
        if self.model_init is not None:
            self._seed()
            self._adopt(self.call_model_init(trial))
        knows_tokens = isinstance(self.processing_class, PreTrainedTokenizerBase | transformers.ProcessorMixin)
        if knows_tokens and isinstance(self.model, PreTrainedModel):
            align_special_tokens(self.model, self.processing_class)
        # Since the last train(), create_optimizer() was called or the attribute was set.
        if self.optimizer is not self._trained_optimizer:
            # A scheduler from create_scheduler, or the recipe's stand-in, is made again for the new run.
            is_made_anew = getattr(self, "_created_lr_scheduler", False) or isinstance(
                self.lr_scheduler, step.RecipeRates
            )
            self.given_optimizers = (self.optimizer, None if is_made_anew else self.lr_scheduler)
        self.optimizer, self.lr_scheduler = self.given_optimizers
        self.is_in_train = True
        try:
            with search.trial_arguments(self, trial), model_hooks(self):
                flow, num_steps = run_training(self, resume_from_checkpoint or None, ignore_keys_for_eval)
        finally:
            self.is_in_train, self._trained_optimizer = False, self.optimizer
        loss, num_skipped = flow.training_loss()
        share = num_steps / max(self.state.max_steps, 1)
        began = time.time() - (flow.ended - flow.began)
        metrics = speed_metrics(
            "train", began, num_samples=flow.length.num_samples_planned * share, num_steps=num_steps
        )
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        if num_skipped:
            metrics["train_skipped_steps"] = num_skipped
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        hub.finish_pushes(self)
        return TrainOutput(self.state.global_step, loss, metrics)

    @property
    def makes_optimizer(self) -> bool:
        """Return whether the optimizer's class comes from transformers or the user instead of the recipe."""
        own = self.optimizer_cls_and_kwargs is not None or self.overrides("get_optimizer_cls_and_kwargs")
        return own or not has_recipe_optimizer(self.args)

    def end(self) -> None:
        """Finish the trackers and leave the process group. Call it last."""
        self.accelerator.end_training()

    @cached_property
    def accelerator(self) -> Accelerator:
        """Accelerator of the last train(), or a new one before train()."""
        return evaluation_accelerator(self.args)
