"""Trainer.evaluate and Trainer.predict: every sample once, in the order of the dataset, on any number of processes.

The loss is a sum divided once by its targets, so it does not depend on the batch size. Predictions go to the host batch
by batch. Batches of different widths are padded with -100, as in transformers.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32, gather_object, send_to_device
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import EvalPrediction
from transformers.trainer_pt_utils import find_batch_size, nested_concat, nested_detach, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, speed_metrics

from accel_train.core.work import working
from accel_train.engine.evaluation import EvaluationReader, evaluation_mode
from accel_train.engine.loader import Reading
from accel_train.engine.step import MicroBatch
from accel_train.hf.argument_table import argument_error
from accel_train.hf.checkpoints import is_spread, leave_in_evaluation_mode
from accel_train.hf.inputs import (
    Inputs,
    collate_of,
    collator_of,
    counted,
    evaluation_loader,
    is_columns,
    is_stream,
    loader_of_override,
    num_items_in,
    readable,
    reading_of,
)
from accel_train.hf.task import as_prepared
from accel_train.task import TaskData

if TYPE_CHECKING:
    from accel_train.hf import Trainer


ONLY_FORWARDED = -1
"""Marks a batch in place of its number of targets: forwarded only because processes of a sharded model meet."""
CACHES = ["past_key_values", "cache"]
"""Names of a model's generation cache among its outputs: before transformers 5.24, and since."""


@dataclass
class BatchOutputs:
    """The outputs of one batch. `loss` stays on the device until all batches are done."""

    loss: Any
    """Mean loss over the batch's targets. The host reads it after all batches, so it does not wait for each one."""
    num_targets: int
    num_samples: int
    predictions: Any
    labels: Any
    inputs: Any
    counts: Any = None
    """Numbers that compute_loss counted. None without them."""


def parts_of(trainer: "Trainer", eval_dataset: Any, prefix: str) -> list[tuple[Any, str]] | None:
    """Return the datasets of a dict with their prefixes, or None for one dataset. The trainer's own go by name."""
    data = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if not isinstance(data, dict) or is_columns(data):
        return None
    return [(name if eval_dataset is None else part, f"{prefix}_{name}") for name, part in data.items()]


def merged(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of all parts in one dict."""
    return {name: value for metrics in parts for name, value in metrics.items()}


def predict_batch(
    trainer: "Trainer", model: nn.Module, inputs: Inputs, loss_only: bool, ignore_keys: list[str] | None
) -> tuple[Tensor | None, Any, Any]:
    """Return the loss, outputs, and labels of one batch. The outputs omit the loss and the model's ignored keys."""
    names = trainer.signature.label_names
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    gives_loss = not names and bool(
        trainer.can_return_loss if inputs.get("return_loss") is None else inputs["return_loss"]
    )
    if ignore_keys is None:
        ignore_keys = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", CACHES)
    loss = labels = None
    if has_labels or gives_loss:
        labels = nested_detach(tuple(inputs.get(name) for name in names))
        labels = labels[0] if len(labels) == 1 else labels
        num_items = num_items_in(trainer, inputs)
        with trainer.compute_loss_context_manager():
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
    else:
        outputs = model(**inputs)
    if loss_only:
        return loss, None, None
    if isinstance(outputs, dict):
        drop = {*ignore_keys, "loss"} if loss is not None else set(ignore_keys)
        logits: Any = tuple(value for name, value in outputs.items() if name not in drop)
    else:
        logits = outputs[1:] if loss is not None and isinstance(outputs, list | tuple) else outputs
    logits = nested_detach(logits)
    return loss, logits[0] if isinstance(logits, list | tuple) and len(logits) == 1 else logits, labels


@dataclass(frozen=True)
class Evaluation:
    """One call of evaluate, predict, or evaluation_loop."""

    trainer: "Trainer"
    ignore_keys: list[str] | None
    prefix: str
    """Prefix of the metrics' names, without the underscore."""
    predicts: bool = False
    """Whether the call is predict: the loader is the test loader, and predictions are kept."""

    def run(self, data: Any) -> EvalLoopOutput:
        """Forward all batches of a dataset, or of a dataset given by name, and pass their outputs to compute_metrics.

        Without a dataset, evaluate the trainer's.

        Raises:
            SettingError: no dataset was given, or the override's loader was already prepared for several processes.
        """
        trainer, args, began = self.trainer, self.trainer.args, time.time()
        if data is None and not self.predicts:
            data = trainer.eval_dataset
        method = "get_test_dataloader" if self.predicts else "get_eval_dataloader"
        has_own_loop = trainer.overrides("evaluation_loop")
        is_own = has_own_loop or trainer.overrides(method)
        loader: Any = loader_of_override(trainer, method, data) if is_own else None
        trainer.callback_handler.eval_dataloader = evaluation_loader(trainer, data) if loader is None else loader
        loss_only = None if self.predicts or trainer.compute_metrics is not None else True
        if has_own_loop:
            what = "Prediction" if self.predicts else "Evaluation"
            found = trainer.evaluation_loop(loader, what, loss_only, self.ignore_keys, self.prefix)
        else:
            rows = trainer.eval_dataset[data] if isinstance(data, str) else data
            found = self.of_batches(self.own_batches(rows, loader), loss_only)
        num_steps = math.ceil((found.num_samples or 0) / (args.per_device_eval_batch_size * args.world_size))
        found.metrics.update(speed_metrics(self.prefix, began, num_samples=found.num_samples, num_steps=num_steps))
        return found

    def of_batches(self, batches: Iterator[MicroBatch], loss_only: bool | None) -> EvalLoopOutput:
        """Return predictions, labels, and metrics of this process's batches, gathered from all processes.

        Args:
            loss_only: whether only the loss is computed. None: as `prediction_loss_only` says.
        """
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        if not is_spread(trainer):
            trainer.model.to(accelerator.device)
        if not trainer.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            # The cast is permanent, as in transformers.
            trainer.model.to(torch.float16 if args.fp16_full_eval else torch.bfloat16)
        loss_only = args.prediction_loss_only if loss_only is None else loss_only
        by_batch = args.batch_eval_metrics and trainer.compute_metrics is not None and not loss_only
        in_training = trainer.is_in_train and trainer.strategy is not None
        averaged = trainer.strategy.averaged() if in_training else nullcontext()
        with averaged, evaluation_mode(trainer.model), accelerator.autocast():
            forwarded = (self._forward(dict(inputs), targets, loss_only) for inputs, targets in batches)
            own = (each for each in forwarded if each.num_targets != ONLY_FORWARDED)
            if by_batch:
                outputs, scores = self._score_by_batch(own)
            else:
                outputs, scores = in_turn(_read_losses(list(own))), {}
        if not trainer.is_in_train:
            # The mode stays, as in transformers, because inference often follows.
            leave_in_evaluation_mode(trainer)
        predictions, labels, inputs = (
            joined([getattr(one, name) for one in outputs], args.eval_do_concat_batches)
            for name in ("predictions", "labels", "inputs")
        )
        if trainer.compute_metrics is not None and not by_batch and predictions is not None and labels is not None:
            scores = self._score(outputs, predictions, labels, inputs)
        metrics: dict[str, object] = {}
        if outputs and outputs[0].loss is not None:
            weights = [one.num_samples if trainer.match_transformers else one.num_targets for one in outputs]
            # The loss of a batch without targets is NaN.
            total = sum(one.loss * weight for one, weight in zip(outputs, weights, strict=True) if weight)
            metrics["loss"] = total / max(sum(weights), 1)
        if trainer._token_metrics is not None and (counts := [one.counts for one in outputs if one.counts is not None]):
            metrics |= trainer._token_metrics.of([[math.fsum(column) for column in zip(*counts, strict=True)]])
        metrics |= denumpify_detensorize(dict(scores))
        start = f"{self.prefix}_"
        metrics = {name if name.startswith(start) else start + name: value for name, value in metrics.items()}
        return EvalLoopOutput(predictions, labels, metrics, sum(one.num_samples for one in outputs))

    def own_batches(self, dataset: Any, loader: Any) -> Iterator[MicroBatch]:
        """Yield this process's batches, from the dataset or as each W-th batch of the user's loader."""
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        size = args.per_device_eval_batch_size
        if loader is None:
            dataset = readable(trainer, dataset)
            if not is_stream(dataset):
                if trainer.match_transformers and args.dataloader_drop_last:
                    dataset = Subset(dataset, range(len(dataset) // size * size))
                pin = args.dataloader_pin_memory and accelerator.device.type == "cuda"
                data = TaskData(dataset, dataset, collate_of(trainer), fingerprint="")
                reading = Reading(args.dataloader_num_workers, pin, **reading_of(args))
                reader = EvaluationReader(accelerator, data, size, reading)
                if is_spread(trainer):
                    for (inputs, num_targets), counts in reader.batches_for_all():
                        yield inputs, num_targets if counts else ONLY_FORWARDED
                else:
                    yield from reader.batches()
                return
            stream = iter(dataset)
            loader = map(collator_of(trainer), iter(lambda: [*islice(stream, size)], []))
        rank, world_size = accelerator.process_index, accelerator.num_processes
        number, first = -1, None
        for number, batch in enumerate(loader):
            inputs, num_targets = counted(batch, trainer.signature)
            first = inputs if first is None else first
            if number % world_size == rank:
                yield send_to_device(inputs, accelerator.device), num_targets
        if is_spread(trainer) and first is not None and 0 < (number + 1) % world_size <= rank:
            yield send_to_device(first, accelerator.device), ONLY_FORWARDED

    def _forward(self, inputs: Inputs, num_targets: int, loss_only: bool) -> BatchOutputs:
        trainer = self.trainer
        name = getattr(trainer.model, "main_input_name", "input_ids")
        kept = inputs.get(name) if "inputs" in trainer.args.include_for_metrics else None
        rows = find_batch_size(inputs) or 1
        if trainer.recipe is not None and trainer.recipe.precision.has_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            if is_spread(trainer):
                # Its hooks gather the weights outside of the blocks, so the call is inside the outermost module.
                loss, logits, labels = trainer.strategy.inner((inputs, loss_only, self.ignore_keys), "predictions")
            else:
                with as_prepared(trainer, trainer.model, predicts=True):
                    step = trainer.prediction_step
                    loss, logits, labels = step(trainer.model, inputs, loss_only, ignore_keys=self.ignore_keys)
            if logits is not None and trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            logits = convert_to_fp32(logits)
        trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
        if not trainer.args.batch_eval_metrics:
            logits, labels, kept = (None if one is None else nested_numpify(one) for one in (logits, labels, kept))
        mean = None if loss is None else loss.detach().float().mean()
        counts = None if trainer._token_metrics is None else trainer._token_metrics.take()
        return BatchOutputs(mean, num_targets, rows, logits, labels, kept, counts)

    def _score_by_batch(self, own: Iterator[BatchOutputs]) -> tuple[list[BatchOutputs], dict[str, object]]:
        """Call compute_metrics with one batch at a time, in order. evaluate then keeps only losses."""
        everything: list[BatchOutputs] = []
        metrics: dict[str, object] = {}
        following, has_more = next(own, None), True
        while has_more:
            this, following = following, next(own, None)
            turn = in_turn([] if this is None else _read_losses([this]))
            has_more = any(in_turn([following is not None]))
            for one in turn:
                is_last = not has_more and one is turn[-1]
                metrics = self._score([one], one.predictions, one.labels, one.inputs, compute_result=is_last)
                one.predictions = nested_numpify(one.predictions) if self.predicts else None
                one.labels = nested_numpify(one.labels) if self.predicts else None
                one.inputs = None
            everything += turn
        return everything, metrics

    def _score(
        self, outputs: list[BatchOutputs], predictions: Any, labels: Any, inputs: Any, **options: bool
    ) -> dict[str, object]:
        """Call compute_metrics. A sample's loss is the mean of its batch, as in transformers.

        Raises:
            SettingError: compute_metrics did not return a dict.
        """
        losses = None
        if "loss" in self.trainer.args.include_for_metrics:
            means = np.asarray([one.loss for one in outputs], dtype=np.float32)
            losses = np.repeat(means, [one.num_samples for one in outputs])
        assert self.trainer.compute_metrics is not None
        given = EvalPrediction(predictions=predictions, label_ids=labels, inputs=inputs, losses=losses)
        with working("calling compute_metrics"):
            metrics = self.trainer.compute_metrics(given, **options)
        if metrics is None and options.get("compute_result") is False:
            return {}
        if not isinstance(metrics, Mapping):
            raise argument_error(f"returned {metrics!r}", "Return a dict of numbers by name.", "compute_metrics")
        return dict(metrics)


def _read_losses(outputs: list[BatchOutputs]) -> list[BatchOutputs]:
    """Copy all losses, and all counts, to the host at once."""
    for name in ("loss", "counts"):
        having = [one for one in outputs if getattr(one, name) is not None]
        values = torch.stack([getattr(one, name) for one in having]).tolist() if having else []
        for one, value in zip(having, values, strict=True):
            setattr(one, name, value)
    return outputs


def in_turn(own: list[Any]) -> list[Any]:
    """Return the items of all processes in the order of the batches: the first of each process, then the second, ..."""
    return [item for turn in zip_longest(*gather_object([own])) for item in turn if item is not None]


def joined(batches: list[Any], concatenate: bool) -> Any:
    """Return the batches' arrays joined to one, also inside tuples and dicts.

    The second dimension is padded with -100.
    """
    if not batches or batches[0] is None:
        return None
    half = len(batches) // 2
    if not concatenate or half == 0:
        return batches[0] if concatenate else batches
    return nested_concat(joined(batches[:half], True), joined(batches[half:], True))
