"""`accel_train.SFTTrainer`: the interface of TRL's SFTTrainer on top of the loop of accel_train.

    from accel_train import SFTTrainer
    trainer = SFTTrainer("Qwen/Qwen3-0.6B", SFTConfig("out", packing=True), train_dataset=rows)
    trainer.train()

TRL tokenizes, masks, and packs the rows, so that both trainers see the same tokens. The rest is `accel_train.Trainer`.
`hf.sft_setup` has the treatment of each field of SFTConfig, and docs/hf_trainer.md the differences from TRL.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from torch import Tensor, nn

from accel_train.hf import training
from accel_train.hf.argument_table import argument_error
from accel_train.hf.arguments import check_overrides
from accel_train.hf.hub import write_card
from accel_train.hf.inputs import Collator, Inputs, Metrics, TokenMetrics, num_items_in
from accel_train.hf.sft_rows import (
    check_kind,
    check_vocabulary,
    data_error,
    first_empty,
    formatted,
    kinds_of,
    with_equal_lengths,
)
from accel_train.hf.sft_setup import (
    check_adapter,
    collator_for,
    config_of,
    joins_rows,
    label_log_probs,
    label_scores,
    loaded,
    prepare_forward,
    router_weight,
    tokenizer_of,
    version_error,
    with_adapter,
    with_chat_template,
)
from accel_train.hf.trainer import Trainer
from accel_train.model.kernels.toy import in_words
from accel_train.runtime.heartbeat import is_peer_error, lost_peer_named, open_heartbeats
from accel_train.runtime.launcher import stop_with_launcher

LOG = logging.getLogger(__name__)


class SFTTrainer(Trainer):
    """Trains a causal language model with the arguments of `trl.SFTTrainer`.

    Raises:
        SettingError: an argument, a combination, or the data are not supported. The message names the remedy.
    """

    args: Any
    _replaces = "trl.trainer.sft_trainer:SFTTrainer"
    _hooks = frozenset({"_prepare_dataset"})
    # Read by TRL's model card, and set by subclasses.
    _tag_names, _name, _paper, _template_file = ["trl", "sft"], "SFT", dict[str, str](), None
    _token_metrics: TokenMetrics
    router_aux_loss_coef = 0.0
    """Weight of the router loss of a mixture-of-experts model."""

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., Metrics] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
    ) -> None:
        stop_with_launcher()
        self.args = args = config_of(args, model)
        check_overrides(type(self))
        self._formatting_func = formatting_func
        peers = open_heartbeats(args.process_index, args.world_size)
        first = self._check_rows(train_dataset, "train_dataset")
        parts = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
        for name, part in parts.items():
            if part is not None:
                self._check_rows(part, f"eval_dataset[{name!r}]" if part is not eval_dataset else "eval_dataset")
        self.padding_free = args.padding_free or args.packing
        if self.padding_free and data_collator is not None:
            raise argument_error("needs TRL's collator", "Remove data_collator.", **joins_rows(args))
        if args.loss_type == "dft" and compute_loss_func is not None:
            raise argument_error("has its own loss", "Remove compute_loss_func.", loss_type="dft")
        is_pair = "pair" in kinds_of(first, args.dataset_text_field) and formatting_func is None
        self.completion_only_loss = is_pair if args.completion_only_loss is None else args.completion_only_loss
        check_adapter(model, peft_config, args)

        # Adapters start from the seed, as in TRL.
        training.seed(args)
        model, revision = loaded(model, args, quantization_config)
        processing_class = tokenizer_of(processing_class, model, revision, args)
        self.processing_class = self._tokenizer = processing_class
        model, added = with_chat_template(model, processing_class, args)
        self.chat_template = self._training_template(first)
        model = with_adapter(model, args, peft_config, added)
        if data_collator is None:
            data_collator = collator_for(model, processing_class, args, padding_free=self.padding_free)
        self._vocabulary = model.config.get_text_config().vocab_size
        self._is_fused = prepare_forward(model, args, padding_free=self.padding_free)
        self.router_aux_loss_coef = router_weight(model, args)
        self._token_metrics = TokenMetrics(has_router=self.aux_loss_enabled)
        # The main process prepares first, while the others wait.
        with lost_peer_named(peers):
            train_dataset = self._prepared(train_dataset, args.packing, "train")
            if eval_dataset is not None:
                eval_dataset = self._prepared_evaluation(eval_dataset)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if hasattr(model, "add_model_tags"):
            model.add_model_tags(self._tag_names)

    @property
    def aux_loss_enabled(self) -> bool:
        """Return whether the router loss of a mixture-of-experts model is added."""
        return self.router_aux_loss_coef != 0.0

    def _adopt(self, model: nn.Module) -> None:
        """Set the model. Labels are shifted for every model, and the collator's columns are the data's."""
        super()._adopt(model)
        columns = (*self.signature.columns, "seq_lengths")
        self.signature = replace(self.signature, columns=columns, shifts_labels=True, label_names=("labels",))
        self.label_names = ["labels"]

    def _training_template(self, first: Mapping[str, Any]) -> str | None:
        """Return the template that marks the assistant's tokens, or None if the tokenizer's own does or none is needed.

        Raises:
            SettingError: the rows are not chats, or TRL cannot patch the template.
        """
        if not self.args.assistant_only_loss:
            return None
        from trl.chat_template_utils import (
            get_training_chat_template,
            has_generation_markers,
            is_chat_template_stop_token_trained,
        )

        own, template = self.processing_class.chat_template, None
        if not has_generation_markers(own):
            try:
                template = get_training_chat_template(self.processing_class)
            except ValueError as error:
                raise argument_error(
                    "the chat template does not mark the assistant's text, and TRL does not know it",
                    "Put {% generation %} around the assistant's text and its end token, in chat_template_path.",
                    assistant_only_loss=True,
                ) from error
        if not is_chat_template_stop_token_trained(self.processing_class, chat_template=template):
            self._warn(
                "the chat template leaves the token that ends the assistant's turn outside {% generation %}, so the "
                "model does not learn to stop. Put it inside."
            )
        return template

    def _warn(self, text: str) -> None:
        if self.args.process_index == 0:
            LOG.warning("SFTTrainer: %s", text)

    def _check_rows(self, dataset: Any, at: str) -> Mapping[str, Any]:
        """Return the first row of a dataset, after checking that its columns are of one known kind.

        Raises:
            SettingError: the dataset has an unsupported type, no rows, or columns of no kind or of several.
        """
        if not isinstance(dataset, Dataset | IterableDataset):
            raise data_error(
                at,
                f"got {type(dataset).__name__}",
                "Give a datasets.Dataset: Dataset.from_list(rows), or one split of a DatasetDict.",
            )
        first: Mapping[str, Any] | None = next(iter(dataset), None)
        if first is None:
            raise data_error(at, "has no rows", "Give at least one.")
        if "image" in first or "images" in first:
            raise data_error(at, "images are not supported", "Use trl.SFTTrainer for vision models.")
        if self._skips_preparation:
            if "labels" not in first and first.keys() & {"completion_mask", "assistant_masks"}:
                raise data_error(
                    at,
                    "skip_prepare_dataset ignores the mask columns, and there are no labels",
                    "Add labels with -100 where nothing is learned.",
                )
        elif isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
            raise data_error(
                at, "with_transform may give other rows at each read", "Use dataset.map, or skip_prepare_dataset."
            )
        elif self._formatting_func is not None and "input_ids" not in first:
            for name in ("completion_only_loss", "assistant_only_loss"):
                if getattr(self.args, name):
                    raise argument_error(
                        "formatting_func makes plain text, which has neither completion nor assistant",
                        "Remove one of the two.",
                        **{name: True},
                    )
        elif not self._prepares_rows:
            check_kind(first, self.args, at)
        return first

    @property
    def _prepares_rows(self) -> bool:
        """True if a subclass overrides `_prepare_dataset`, so rows may be of any kind."""
        return type(self)._prepare_dataset is not SFTTrainer._prepare_dataset

    @property
    def _skips_preparation(self) -> bool:
        return bool((self.args.dataset_kwargs or {}).get("skip_prepare_dataset"))

    def _prepared(self, dataset: Any, packing: bool, name: str) -> Any:
        """Return the dataset as rows of tokens, checked against the model's vocabulary."""
        if self._skips_preparation:
            return dataset
        at = "train_dataset" if name == "train" else "eval_dataset"
        rows = self._prepare_dataset(dataset, self.processing_class, self.args, packing, self._formatting_func, name)
        check_vocabulary(rows, self.processing_class, self._vocabulary, at)
        return rows

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Callable[[Any], str] | None,
        dataset_name: str,
    ) -> Any:
        """Return the dataset as rows of `input_ids` and `labels`, made by TRL; packed rows have `seq_lengths` too.

        Override it to make other tokens and labels, as in TRL.

        Raises:
            SettingError: a row cannot be formatted, or has no assistant token that the loss could use.
        """
        at = "train_dataset" if dataset_name == "train" else "eval_dataset"
        first = next(iter(dataset))
        is_chat = "chat" in kinds_of(first, args.dataset_text_field) or isinstance(first.get("prompt"), list)
        if "input_ids" in first:
            dataset = with_equal_lengths(dataset, at)
        elif formatting_func is not None:
            is_chat, dataset = False, formatted(dataset, formatting_func, args)
        elif self._prepares_rows:
            check_kind(first, self.args, at)
        if is_chat and processing_class.chat_template is None:
            problem, remedy = "the tokenizer has no chat template", "Set chat_template_path in SFTConfig."
            raise argument_error(problem, remedy, "processing_class", chat_template_path=None)
        before = len(dataset) if isinstance(dataset, Dataset) else None
        prepare: Any = resolve_name(self._replaces)._prepare_dataset
        try:
            rows = prepare(self, dataset, processing_class, args, packing, None, dataset_name)
        except (RuntimeError, AttributeError, IndexError, KeyError, TypeError, ValueError, TemplateError) as error:
            if is_peer_error(error):
                raise
            if isinstance(error, AttributeError) and error.obj is self:
                raise version_error(f"it reads SFTTrainer.{error.name}") from error
            if isinstance(error, RuntimeError) and "assistant tokens" in str(error):
                raise argument_error(
                    f"a row of the {dataset_name} data has no token of the assistant by this chat template",
                    "Put {% generation %} around the assistant's text, and give each chat an assistant's turn.",
                    assistant_only_loss=True,
                ) from error
            raise data_error(
                at,
                f"TRL cannot prepare the rows{first_empty(dataset, args.dataset_text_field)}: {in_words(error)}",
                "Correct the rows, or the chat template.",
            ) from error
        if before is not None and isinstance(rows, Sized):
            cut = f"no label within max_length={args.max_length}"
            if not len(rows):
                raise data_error(at, f"all rows have {cut}", "Raise max_length.")
            if not packing and len(rows) < before:
                self._warn(f"{before - len(rows)} of {before} {dataset_name} rows have {cut}; they are left out")
        return rows

    def _prepared_evaluation(self, data: Any, name: str = "eval") -> Any:
        """Return evaluation datasets prepared as in TRL. The trainer's own, by name or as they are, stay the same."""
        if isinstance(data, dict):
            return {each: self._prepared_evaluation(part, each) for each, part in data.items()}
        own = getattr(self, "eval_dataset", None)
        if isinstance(data, str) or any(data is each for each in (own.values() if isinstance(own, dict) else [own])):
            return data
        self._check_rows(data, "eval_dataset")
        return self._prepared(
            data, self.args.packing if self.args.eval_packing is None else self.args.eval_packing, name
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate one dataset, or each of a dict of datasets, of any kind that training takes."""
        if eval_dataset is not None and not isinstance(eval_dataset, dict):
            eval_dataset = self._prepared_evaluation(eval_dataset)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Return predictions and labels in the order of a dataset of any kind that training takes."""
        return super().predict(self._prepared_evaluation(test_dataset), ignore_keys, metric_key_prefix)

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss of one micro-batch over its label tokens, plus the weighted router loss.

        TRL's forward computes the log-probabilities of the labels without the logits of all tokens. With
        `return_outputs`, or a loss that needs logits, the model's own forward is used.
        """
        if self.aux_loss_enabled:
            inputs = {**inputs, "output_router_logits": True}
        is_dft = self.args.loss_type == "dft"
        needs_logits = self.compute_loss_func is not None or (self.label_smoother is not None and not is_dft)
        if needs_logits or not (self._is_fused or is_dft) or (return_outputs and not is_dft):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            logits = getattr(outputs, "logits", None)
            if logits is not None and inputs.get("labels") is not None:
                self._token_metrics.note(inputs, outputs, *label_scores(logits, inputs["labels"]))
            return (loss, outputs) if return_outputs else loss
        unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
        if self._is_fused:
            outputs = model(**inputs, fused_lm_head=True)
            log_probs, count = outputs.log_probs, outputs.label_mask.sum()
            self._token_metrics.note(inputs, outputs, count, outputs.entropy.detach().sum(), outputs.is_top1.sum())
            if return_outputs:
                with torch.no_grad():
                    outputs = model(**unlabelled)
        else:
            outputs = model(**unlabelled)
            log_probs, count = label_log_probs(outputs.logits, inputs["labels"])
            self._token_metrics.note(inputs, outputs, *label_scores(outputs.logits, inputs["labels"]))
        losses = -log_probs * log_probs.exp().detach() if is_dft else -log_probs
        loss = losses.sum() / torch.as_tensor(count if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        return (loss, outputs) if return_outputs else loss

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write TRL's `README.md` to output_dir."""
        if not self.is_world_process_zero():
            return
        with TemporaryDirectory() as folder:
            # TRL writes it into the output_dir of its arguments, over a README of the user.
            view = copy.copy(self)
            view.args = SimpleNamespace(output_dir=folder, process_index=0)
            resolve_name(self._replaces).create_model_card(view, model_name, dataset_name, tags)
            write_card(self, (Path(folder) / "README.md").read_text(encoding="utf-8"))

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, logits, and labels of one batch. The loss alone needs no logits."""
        if not prediction_loss_only or inputs.get("labels") is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with self.compute_loss_context_manager():
            return self.compute_loss(model, inputs, num_items_in_batch=num_items_in(self, inputs)), None, None
