"""`accel_train.Trainer`: transformers' Trainer by its interface, our loop inside.

    from accel_train import Trainer
    trainer = Trainer(model, TrainingArguments("out", num_train_epochs=3), train_dataset=rows, processing_class=tokenizer)
    trainer.train()

How each idea maps: TrainingArguments become a Recipe (`hf_face.arguments`), model, data sets and collator a Task
(`hf_face.task`), callbacks listen and ask through an observer (`hf_face.flow`), and evaluate and predict read every sample
once (`hf_face.evaluation`). Steps, guard, data order, checkpoints and resume are the loop's own. docs/hf_trainer.md says
what becomes of every argument, and where this differs from transformers.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DefaultFlowCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProcessorMixin,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import (
    PredictionOutput,
    TrainOutput,
    align_special_tokens,
    enable_full_determinism,
    speed_metrics,
    unwrap_peft_model,
    validate_quantization_for_training,
)
from transformers.utils import can_return_loss, logging

from accel_train.checkpoint import newest_valid
from accel_train.hf_face import hub
from accel_train.hf_face.arguments import check_arguments
from accel_train.hf_face.checks import check_combinations, check_overrides, is_overridden
from accel_train.hf_face.evaluation import own_batches, predict_one, run_evaluation
from accel_train.hf_face.inputs import Signature, default_collator, is_columns, loader_over, without_unused
from accel_train.hf_face.loss import mean_loss
from accel_train.hf_face.optimizers import decayed_names, optimizer_of_class
from accel_train.hf_face.running import evaluation_accelerator, run_training
from accel_train.hf_face.task import save_pretrained
from accel_train.optim import build_optimizer
from accel_train.recipe import Recipe

__all__ = ["Trainer", "get_last_checkpoint"]


def get_last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint of a run folder that proves itself, or None; half-written and broken ones are passed over.

    Raises:
        CheckpointError: there are checkpoints, and none is valid.
    """
    path, _ = newest_valid(Path(output_dir) / "checkpoints")
    return None if path is None else str(path)


class Trainer:
    """Trains, evaluates and predicts with the arguments of `transformers.Trainer`.

    Raises:
        ValueError: an argument or an overridden method cannot be honoured; the text names it and says what to do.
    """

    from transformers.trainer_pt_utils import (
        get_learning_rates,
        get_num_trainable_parameters,
        get_optimizer_group,
        log_metrics,
        metrics_format,
        save_metrics,
        save_state,
    )

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
    ) -> None:
        check_overrides(type(self), Trainer)
        self.args = args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(args)
        logging.set_verbosity(args.get_process_log_level())
        if (model is None) == (model_init is None):
            raise ValueError("give exactly one of model and model_init")
        if tokenizer is not None and processing_class is not None:
            raise ValueError("tokenizer is the old name of processing_class; give one of the two")
        self.model_init = model_init
        self.processing_class = processing_class if processing_class is not None else tokenizer
        self.data_collator = data_collator or default_collator(self.processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.given_optimizers = optimizers
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        check_combinations(self)
        self.recipe: Recipe | None = None
        """What the arguments were translated into, once train() has begun."""
        self.kept_accelerator: Accelerator | None = None
        self.hub_model_id: str | None = None
        self.pushes: list[Any] = []
        self._seed()
        self._adopt(self.call_model_init() if model is None else model)
        reporting = get_reporting_integration_callbacks(args.report_to)
        printing = [PrinterCallback] if args.disable_tqdm else []
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *reporting, *(callbacks or []), *printing],
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

    def _seed(self) -> None:
        enable_full_determinism(self.args.seed) if self.args.full_determinism else set_seed(self.args.seed)

    def _adopt(self, model: nn.Module) -> None:
        """Take a model in, and find out how it counts its loss."""
        validate_quantization_for_training(model)
        self.model = model
        self.signature = Signature.of(model, self.args.label_names)
        self.label_names = list(self.signature.label_names)
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
        inner: Any = model
        is_known = isinstance(model, PreTrainedModel)
        self._num_flops_parameters = inner.num_parameters(exclude_embeddings=True) if is_known else 0

    # Train

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train what the arguments say. An earlier run in output_dir is gone on from if asked, and set aside if not.

        Args:
            resume_from_checkpoint: True: the newest valid checkpoint of output_dir; or a checkpoint's folder.

        Raises:
            ValueError: something cannot be honoured, or there is no checkpoint to go on from.
            TrainingStopped: the guard's budget of skipped steps is spent; the last checkpoint is good.
            Preempted: the job was asked to stop (SIGTERM, Ctrl-C), and saved; train(resume_from_checkpoint=True) goes on.
        """
        if trial is not None:
            raise ValueError(
                "train(trial=...) belongs to hyperparameter_search, which is not here; call train() for each trial"
            )
        if self.model_init is not None:
            self._seed()
            self._adopt(self.call_model_init())
        if isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin) and isinstance(
            self.model, PreTrainedModel
        ):
            align_special_tokens(self.model, self.processing_class)
        self.optimizer, self.lr_scheduler = self.given_optimizers
        flow, num_steps = run_training(self, resume_from_checkpoint or None, ignore_keys_for_eval)
        loss, num_skipped = flow.training_loss()
        share = num_steps / max(self.state.max_steps, 1)
        began = time.time() - (flow.ended - flow.began)
        metrics = speed_metrics(
            "train", began, num_samples=flow.length.num_samples_planned * share, num_steps=num_steps
        )
        self.state.total_flos += flow.flops
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        if num_skipped:
            metrics["train_skipped_steps"] = num_skipped
        self.log(metrics)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        hub.finish_pushes(self)
        return TrainOutput(self.state.global_step, loss, metrics)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of one micro-batch over its targets; `num_items_in_batch` are this micro-batch's.

        Override it for a loss of your own: return a mean, or a sum divided by `num_items_in_batch`. The loop multiplies by
        the targets, adds up over micro-batches and processes, and divides once by all targets of the step.
        """
        loss, outputs = mean_loss(self, model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Of forward and backward: 6 x tokens x parameters without embeddings, as in transformers; for `total_flos`."""
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 6 * main.numel() * self._num_flops_parameters if isinstance(main, Tensor) else 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The given optimizer, one of `optimizer_cls_and_kwargs`, or the recipe's."""
        model = self.model if model is None else model
        if self.optimizer is None and self.optimizer_cls_and_kwargs is not None:
            cls, kwargs = self.optimizer_cls_and_kwargs
            decayed = self.get_decay_parameter_names(model)
            self.optimizer = optimizer_of_class(model, cls, kwargs, decayed, self.args.weight_decay)
        elif self.optimizer is None:
            assert self.recipe is not None, "train() translates the arguments first"
            self.optimizer = build_optimizer(model, self.recipe.optimizer, self.device)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The given scheduler, or transformers' own; asked only where the recipe cannot say the schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer or self.optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters with weight decay: not those of LayerNorms, and not those called bias or norm."""
        return decayed_names(model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model of `model_init`."""
        assert self.model_init is not None
        model = self.model_init()
        if model is None:
            raise ValueError("model_init returned None; it has to return a model")
        return model

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The first epoch's micro-batches, to look at. Override it to train on a loader of your own, which is read in order."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        return loader_over(self, self.train_dataset, self.args.per_device_train_batch_size, is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The evaluation's batches, to look at. Override it to evaluate on a loader of your own; every process reads all of it."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data
        if data is None:
            raise ValueError("evaluation needs an eval_dataset")
        return loader_over(self, data, self.args.per_device_eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The same for predict."""
        return loader_over(self, test_dataset, self.args.per_device_eval_batch_size)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Samples in a loader's data set."""
        return len(dataloader.dataset)  # type: ignore[arg-type]

    def collator_for(self, dataset: Any) -> Callable[[list[Any]], Any]:
        """The collator, which sees only what the model's forward takes."""
        return (
            without_unused(self.data_collator, self.signature)
            if self.args.remove_unused_columns
            else self.data_collator
        )

    # Evaluate and predict

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate one data set, or each of a dict of them; returns and logs the metrics, named with the prefix."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict) and not is_columns(data):
            metrics: dict[str, float] = {}
            for name, part in data.items():
                chosen = name if eval_dataset is None else part
                metrics |= self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        found = self._predict(data, "get_eval_dataloader", self.compute_metrics is None, ignore_keys, metric_key_prefix)
        self.log(found.metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found.metrics)
        return found.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions and labels in the order of the data set, and the metrics where there are labels."""
        found = self._predict(test_dataset, "get_test_dataloader", None, ignore_keys, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, found.metrics)
        return PredictionOutput(found.predictions, found.label_ids, found.metrics)

    def _predict(
        self, data: Any, loader_method: str, loss_only: bool | None, ignore: list[str] | None, prefix: str
    ) -> Any:
        self.model.to(self.device)
        began = time.time()
        loader = getattr(self, loader_method)(data) if is_overridden(self, loader_method) else None
        if loader is None and data is None:
            raise ValueError("evaluation needs an eval_dataset: give one to the Trainer or to evaluate()")
        rows = self.eval_dataset[data] if isinstance(data, str) else data
        only = self.args.prediction_loss_only if loss_only is None else loss_only
        keeps = loader_method == "get_test_dataloader"
        found = run_evaluation(self, own_batches(self, rows, loader), only, ignore, prefix, keep=keeps)
        steps = math.ceil(found.num_samples / (self.args.per_device_eval_batch_size * self.world_size))
        found.metrics.update(speed_metrics(prefix, began, num_samples=found.num_samples, num_steps=steps))
        return found

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, outputs and labels of one batch. An override is used in evaluate and predict."""
        return predict_one(self, model, inputs, prediction_loss_only, ignore_keys)

    # Write down

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Put numbers into state.log_history and hand them to the callbacks (and so to what report_to names)."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights, configuration and tokenizer for `from_pretrained`, by the main process."""
        if self.is_world_process_zero():
            save_pretrained(self, self.model, Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository on the Hub if it is not there; a clear error where the Hub cannot be reached."""
        if self.is_world_process_zero():
            self.hub_model_id = hub.open_repository(self, token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload the model and its card to the Hub; returns the commit, or a future of it where `blocking` is False."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        return hub.push_output(self, commit_message, token, revision, wait=blocking)

    def create_model_card(self, **facts: Any) -> None:
        """`README.md` in output_dir, as transformers writes it (language, license, tags, model_name, ...)."""
        if self.is_world_process_zero():
            hub.write_card(self, **facts)

    # Callbacks, and who we are

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Have a callback told from now on."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Take a callback out, and return it."""
        popped: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return popped

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Take a callback out."""
        self.callback_handler.remove_callback(callback)

    @property
    def accelerator(self) -> Accelerator:
        """That of the last train(), else one of these arguments."""
        if self.kept_accelerator is None:
            self.kept_accelerator = evaluation_accelerator(self.args)
        return self.kept_accelerator

    @property
    def device(self) -> torch.device:
        """What the model runs on."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def world_size(self) -> int:
        """Processes."""
        return int(self.args.world_size)

    @property
    def process_index(self) -> int:
        """This one."""
        return int(self.args.process_index)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its node."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return bool(self.args.process_index == 0)
