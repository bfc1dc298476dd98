"""`accel_train.Trainer`: the interface of transformers' Trainer on top of the loop of accel_train.

    from accel_train import Trainer
    args = TrainingArguments("out", num_train_epochs=3)
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()

TrainingArguments become a Recipe (`hf.arguments`). Model, datasets, and collator become a Task (`hf.task`). Callbacks
become an observer (`hf.callbacks`). evaluate and predict read every sample once (`hf.evaluation`). `hf.training` makes
one call of train(). docs/hf_trainer.md lists the arguments, and the differences from transformers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState, TrainingArguments, trainer_utils
from transformers.trainer import Trainer as StockTrainer
from transformers.utils import can_return_loss, logging

from accel_train.core.errors import SettingError
from accel_train.core.json_io import plain_metrics
from accel_train.hf import hub, search, training
from accel_train.hf.argument_table import argument_error
from accel_train.hf.arguments import check_arguments, check_combinations, check_overrides, train_batch_size
from accel_train.hf.checkpoints import save_pretrained, whole_model
from accel_train.hf.evaluation import Evaluation, merged, parts_of, predict_batch
from accel_train.hf.inputs import Collator, Inputs, Metrics, Signature, TokenMetrics, evaluation_loader, train_loader
from accel_train.hf.task import loss_of
from accel_train.optim.optimizers import build_optimizer
from accel_train.recipe.schema import Recipe
from accel_train.runtime.launcher import stop_with_launcher


class Trainer:
    """Trains, evaluates, and predicts with the arguments of `transformers.Trainer`.

    Raises:
        SettingError: an argument or an overridden method is not supported. The message names it and the remedy.
    """

    _replaces = "transformers.trainer:Trainer"
    """The class whose interface this is."""
    _hooks: frozenset[str] = frozenset()
    """Private methods of the replaced trainer that are called here too, so a subclass may override them."""
    generates = False
    """Whether evaluations may generate texts, as in Seq2SeqTrainer."""
    signature: Signature
    recipe: Recipe | None = None
    """Recipe made from the arguments. None before train()."""
    strategy: Any = None
    """Strategy by which the last train() distributed the model. None before train()."""
    whole_model: nn.Module | None = None
    """Copy of a sharded model on the main process, for loading whole weights. None otherwise."""
    modes: dict[nn.Module, bool]  # of each part, before the model was left in evaluation mode
    is_in_train = False
    """Whether train() is running, including its evaluations."""
    hub_model_id: str | None = None
    _token_metrics: TokenMetrics | None = None
    current_gradient_accumulation_steps = 1
    """Divisor of a micro-batch's loss in a training_step copied from transformers. Always 1: the loop divides once."""
    # The loop shards the model, so plugins of Accelerate are not used.
    is_deepspeed_enabled = is_fsdp_enabled = False
    is_model_parallel, place_model_on_device = False, True
    deepspeed = loss_is_scaled_for_ga = None
    # The loop adds its FLOPs to state.total_flos.
    current_flos = _initial_num_input_tokens_seen = 0
    # Set by a search, for transformers' run_hp_search_optuna.
    trial = hp_space = hp_name = hp_search_backend = compute_objective = objective = None  # type: Any
    _accepts_loss_kwargs: bool | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., Metrics] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        match_transformers: bool = False,
    ) -> None:
        stop_with_launcher()
        check_overrides(type(self))
        self.match_transformers = match_transformers
        """Whether to weigh and drop samples as transformers does, where accel_train differs (docs/hf_trainer.md)."""
        self.args = args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(args)
        self._memory_tracker = trainer_utils.TrainerMemoryTracker(args.skip_memory_metrics)
        self._memory_tracker.start()
        logging.set_verbosity(args.get_process_log_level())
        if (model is None) == (model_init is None):
            raise argument_error("no model, or two", "Give exactly one.", "model", "model_init")
        if tokenizer is not None and processing_class is not None:
            raise argument_error("two names of one argument", "Give only one.", "tokenizer", "processing_class")
        self.model_init = model_init
        self.processing_class = processing_class if processing_class is not None else tokenizer
        self.data_collator = data_collator or training.default_collator(self.processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.given_optimizers = optimizers
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        check_combinations(self)
        self._trained_optimizer, self.pushes = self.optimizer, list[Any]()
        training.seed(args)
        self._adopt(self.call_model_init() if model is None else model)
        training.check_optimizer(self)
        self.callback_handler = training.callback_handler(self, callbacks or [])
        zeros = {name: getattr(self, name)() for name in ("is_local_process_zero", "is_world_process_zero")}
        self.control, self.state = TrainerControl(), TrainerState(**zeros)
        if args.push_to_hub:
            self.init_hf_repo()
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        self._memory_tracker.stop_and_update_metrics()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if StockTrainer in cls.__mro__:
            raise SettingError(
                "derives from transformers.Trainer too, whose loop would train",
                "Derive only from accel_train.Trainer (SFTTrainer for TRL's). Other trainers do not work with it.",
                f"class {cls.__name__}",
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

    @cached_property
    def accelerator(self) -> Accelerator:
        """Accelerator of the last train(), or a new one before train()."""
        return training.evaluation_accelerator(self.args)

    def overrides(self, name: str) -> bool:
        """Return whether a subclass, or the object itself, overrides the method `name`."""
        return getattr(type(self), name) is not getattr(Trainer, name) or name in vars(self)

    @property
    def reads_outputs(self) -> bool:
        """True if the program, not the model, computes the loss from the outputs of the model."""
        computes = self.label_smoother is not None or self.compute_loss_func is not None
        return computes or self.overrides("compute_loss") or self.overrides("training_step")

    def _adopt(self, model: nn.Module) -> None:
        """Set the model, and determine how it computes its loss."""
        self.model = self.model_wrapped = model = training.prepared(model, self.args)
        self.strategy, self.modes = None, {}
        match = self.match_transformers and self.compute_loss_func is None
        self.signature = Signature.of(model, self.args.label_names, match=match)
        if self._accepts_loss_kwargs is not None:
            self.model_accepts_loss_kwargs = self._accepts_loss_kwargs
        self.label_names, self._signature_columns = list(self.signature.label_names), list(self.signature.columns)
        self.can_return_loss = bool(can_return_loss(type(trainer_utils.unwrap_peft_model(model))))
        self.label_smoother = training.label_smoother(model, self.args.label_smoothing_factor)
        self._num_flops_parameters = training.num_flops_parameters(model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model of `model_init`, called with the trial of a search if it takes one."""
        return search.new_model(self.model_init, trial)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> trainer_utils.TrainOutput:
        """Train as the arguments say. Resume an earlier run in output_dir if requested, or archive it otherwise.

        Args:
            resume_from_checkpoint: True for the newest valid checkpoint of output_dir, or the folder of a checkpoint.

        Raises:
            SettingError: an argument is not supported, or the checkpoint to resume from does not exist.
            TrainingStopped: the guard's budget of skipped steps is spent. The last checkpoint is good.
            Preempted: the job was asked to stop (SIGTERM, Ctrl-C) and has saved. train(resume_from_checkpoint=True)
                resumes.
            RestartNeeded: a process of a sharded model ran out of memory. train(resume_from_checkpoint=True) uses
                smaller micro-batches.
        """
        return training.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train once per trial, in `output_dir/run-N`, and return the best trial as transformers' `BestRun`.

        Args:
            hp_space: function from a trial to values of TrainingArguments by name. None: transformers' default space.
            compute_objective: function from an evaluation's metrics to the objective. None: the loss, or the sum of
                the metrics.
            direction: minimize or maximize, or a list for several objectives.
            kwargs: arguments of `optuna.create_study` (sampler, pruner, ...), and timeout, n_jobs, catch.
        """
        self.hp_space, self.hp_name = hp_space or trainer_utils.default_hp_space_optuna, hp_name
        self.compute_objective = compute_objective or trainer_utils.default_compute_objective
        return search.search(self, backend, n_trials, direction, kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss of one micro-batch over its targets. `num_items_in_batch` counts only this micro-batch.

        Override it for a custom loss. Return a mean, or a sum divided by `num_items_in_batch`. The loop multiplies by
        the number of targets, adds up over micro-batches and processes, and divides once by all targets of the step.
        """
        loss, outputs = loss_of(self, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context in which `compute_loss` is called. Override it for a custom context."""
        return nullcontext()

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Return the detached loss of one micro-batch, after `self.accelerator.backward(loss)`.

        Override it as in transformers, with a call of this method or with a custom backward. The loop takes the loss
        that is passed to `backward`, or the sum of several losses, and runs backward once. Gradients do not exist yet
        when the call returns.
        """
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def floating_point_ops(self, inputs: Inputs) -> int:
        """Return 6 x tokens x parameters without embeddings (forward and backward), as in transformers."""
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 6 * main.numel() * self._num_flops_parameters if isinstance(main, Tensor) else 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set and return the optimizer: the existing one, or a new one. train() uses one that was made before it."""
        if self.recipe is None or self.optimizer is not None or training.makes_optimizer(self):
            return StockTrainer.create_optimizer(self, model)
        own = self.model if model is None else model
        self.optimizer = build_optimizer(own, self.recipe.optimizer, self.accelerator.device)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Set and return the learning rate scheduler."""
        return StockTrainer.create_scheduler(self, num_training_steps, optimizer)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set the optimizer and the learning rate scheduler."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Return the optimizer class of `optim` with its arguments, as in transformers."""
        return StockTrainer.get_optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay, as in transformers."""
        return StockTrainer.get_decay_parameter_names(self, model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return StockTrainer.get_learning_rates(self)

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the optimizer group of a parameter, or the parameters of all groups."""
        return StockTrainer.get_optimizer_group(self, param)

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Return the samples per step over all processes."""
        args = args or self.args
        return train_batch_size(args) * args.world_size * args.gradient_accumulation_steps

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return an epoch's micro-batches for inspection. Override it to train on another loader, read in order."""
        return train_loader(self)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the evaluation batches for inspection. Override it; every process reads the whole loader."""
        return evaluation_loader(self, self.eval_dataset if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the batches of predict for inspection. Override it as get_eval_dataloader."""
        return evaluation_loader(self, test_dataset)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples in a loader, estimated from its length if its dataset has none."""
        return StockTrainer.num_examples(self, dataloader)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate one dataset, or each of a dict of datasets. Log and return the metrics, named with the prefix."""
        parts = parts_of(self, eval_dataset, metric_key_prefix)
        if parts is not None:
            return merged(self.evaluate(part, ignore_keys, prefix) for part, prefix in parts)
        self._memory_tracker.start()
        metrics = Evaluation(self, ignore_keys, metric_key_prefix).run(eval_dataset).metrics
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> trainer_utils.EvalLoopOutput:
        """Return predictions, labels, and metrics of a loader.

        Every process reads the whole loader and forwards its share. evaluate and predict use an override of it.
        """
        self.callback_handler.eval_dataloader = dataloader
        loop = Evaluation(self, ignore_keys, metric_key_prefix, predicts=description != "Evaluation")
        return loop.of_batches(loop.own_batches(None, dataloader), prediction_loss_only)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> trainer_utils.PredictionOutput:
        """Return predictions and labels in the order of the dataset, and metrics if there are labels."""
        self._memory_tracker.start()
        found = Evaluation(self, ignore_keys, metric_key_prefix, predicts=True).run(test_dataset)
        self._memory_tracker.stop_and_update_metrics(found.metrics)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, found.metrics)
        return trainer_utils.PredictionOutput(found.predictions, found.label_ids, found.metrics)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, outputs, and labels of one batch. The outputs omit the loss and the model's ignored keys.

        evaluate and predict use an override of this method.
        """
        return predict_batch(self, model, inputs, prediction_loss_only, ignore_keys)

    def log(self, logs: Metrics, start_time: float | None = None) -> None:
        """Add numbers to `state.log_history` and call on_log. Arrays and tensors become numbers and lists.

        Raises:
            ValueError: trainer_state.json cannot hold a value. The message names the value.
        """
        plain_metrics(logs)
        place = len(self.state.log_history)
        # Callbacks get the values unchanged, as in transformers.
        StockTrainer.log(self, logs, start_time)
        self.state.log_history[place:] = map(plain_metrics, self.state.log_history[place:])

    def log_metrics(self, split: str, metrics: Metrics) -> None:
        """Print metrics on the main process."""
        StockTrainer.log_metrics(self, split, metrics)

    @staticmethod
    def metrics_format(metrics: Metrics) -> Metrics:
        """Return metrics with readable numbers."""
        return StockTrainer.metrics_format(metrics)

    def save_metrics(self, split: str, metrics: Metrics, combined: bool = True) -> None:
        """Write metrics to SPLIT_results.json, and with `combined` to all_results.json, on the main process."""
        StockTrainer.save_metrics(self, split, plain_metrics(metrics), combined)

    def save_state(self) -> None:
        """Write trainer_state.json to output_dir on the main process."""
        StockTrainer.save_state(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """* Write weights, configuration, and tokenizer for `from_pretrained` on the main process."""
        model = whole_model(self)
        if self.is_world_process_zero():
            save_pretrained(self, model, Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository on the Hub if it does not exist."""
        if self.is_world_process_zero():
            self.hub_model_id = hub.create_repo(self.args, token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload the model and its card to the Hub. Return the commit, or its future if `blocking` is False."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        is_main = self.is_world_process_zero()
        return hub.push_model(self, commit_message, blocking, token, revision, kwargs) if is_main else None

    def create_model_card(self, **facts: Any) -> None:
        """Write `README.md` to output_dir as transformers does (language, license, tags, model_name, ...)."""
        if self.is_world_process_zero():
            hub.write_model_card(self, **facts)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, given as an object or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it, or None."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Return whether this is the main process of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of all machines."""
        return self.args.process_index == 0

    def end(self) -> None:
        """Finish the trackers and leave the process group. Call it last."""
        self.accelerator.end_training()

    # Helpers of transformers for overrides. Subclasses may call these methods, but cannot replace them.

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return StockTrainer._get_collator_with_removed_columns(self, data_collator, description)

    def _get_output_dir(self, trial: Any) -> str:
        return self.args.output_dir

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return StockTrainer._get_eval_sampler(self, eval_dataset)

    def _get_learning_rate(self) -> float:
        return StockTrainer._get_learning_rate(self)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return StockTrainer._get_train_sampler(self, train_dataset)

    def _prepare_input(self, data: Any) -> Any:
        return StockTrainer._prepare_input(self, data)

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        return StockTrainer._prepare_inputs(self, inputs)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return StockTrainer._remove_unused_columns(self, dataset, description)

    def _set_signature_columns_if_needed(self) -> None:
        """Do nothing, because the columns are set with the model. Transformers' helpers call it."""
