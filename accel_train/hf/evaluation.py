"""Trainer.evaluate and Trainer.predict: every sample once, in the order of the dataset, on any number of processes.

The loss is a sum divided once by its targets, so it does not depend on the batch size. Predictions go to the host batch
by batch. Batches of different widths are padded with -100, as in transformers.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import convert_to_fp32, send_to_device
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer import Trainer as StockTrainer
from transformers.trainer_pt_utils import find_batch_size, nested_concat, nested_numpify
from transformers.trainer_pt_utils import save_metrics as stock_save_metrics
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, denumpify_detensorize, speed_metrics

from accel_train.core.json_io import plain_metrics
from accel_train.data.order import evaluation_batches
from accel_train.engine.evaluation import evaluation_mode
from accel_train.engine.loader import Reading, read_batches
from accel_train.engine.step import MicroBatch
from accel_train.hf.inputs import (
    collate_of,
    collator_of,
    counted,
    get_eval_dataloader,
    get_test_dataloader,
    in_batches,
    is_columns,
    is_stream,
    loader_of_override,
    readable,
    reading_of,
)
from accel_train.hf.sharding import is_spread
from accel_train.hf.sharding import prediction_step as prediction_step_of

if TYPE_CHECKING:
    from accel_train.hf import Trainer


ONLY_FORWARDED = -1
"""Marks a batch in place of its number of targets: forwarded only because processes of a sharded model meet."""


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


def evaluate(
    trainer: "Trainer", eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
) -> dict[str, float]:
    """Evaluate one dataset, or each of a dict of datasets. Log and return the metrics, named with the prefix."""
    data = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if isinstance(data, dict) and not is_columns(data):
        metrics: dict[str, float] = {}
        for name, part in data.items():
            chosen = name if eval_dataset is None else part
            metrics |= trainer.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}")
        return metrics
    trainer._memory_tracker.start()
    found = run_evaluation(trainer, data, ignore_keys, metric_key_prefix)
    trainer._memory_tracker.stop_and_update_metrics(found.metrics)
    trainer.log(found.metrics)
    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, found.metrics)
    return found.metrics


def log(trainer: "Trainer", logs: dict[str, Any], start_time: float | None = None) -> None:
    """Add numbers to `state.log_history` and call on_log. Arrays and tensors become numbers and lists.

    Raises:
        ValueError: trainer_state.json cannot hold a value. The message names the value.
    """
    plain_metrics(logs)
    place = len(trainer.state.log_history)
    # Callbacks get the values unchanged, as in transformers.
    StockTrainer.log(trainer, logs, start_time)
    trainer.state.log_history[place:] = map(plain_metrics, trainer.state.log_history[place:])


def save_metrics(trainer: "Trainer", split: str, metrics: dict[str, Any], combined: bool = True) -> None:
    """Write metrics to SPLIT_results.json, and with `combined` to all_results.json, on the main process."""
    stock_save_metrics(trainer, split, plain_metrics(metrics), combined)


def predict(
    trainer: "Trainer", test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
) -> PredictionOutput:
    """Return predictions and labels in the order of the dataset, and metrics if there are labels."""
    trainer._memory_tracker.start()
    found = run_evaluation(trainer, test_dataset, ignore_keys, metric_key_prefix, predicts=True)
    trainer._memory_tracker.stop_and_update_metrics(found.metrics)
    trainer.control = trainer.callback_handler.on_predict(trainer.args, trainer.state, trainer.control, found.metrics)
    return PredictionOutput(found.predictions, found.label_ids, found.metrics)


def run_evaluation(
    trainer: "Trainer", data: Any, ignore_keys: list[str] | None, prefix: str, *, predicts: bool = False
) -> EvalLoopOutput:
    """Forward all batches of a dataset, or of a dataset given by name, and pass their outputs to compute_metrics.

    Raises:
        ValueError: no dataset was given, or the override's loader was already prepared for several processes.
    """
    args, began = trainer.args, time.time()
    loader_method = "get_test_dataloader" if predicts else "get_eval_dataloader"
    has_own_loop = trainer.overrides("evaluation_loop")
    is_own = has_own_loop or trainer.overrides(loader_method)
    loader: Any = loader_of_override(trainer, loader_method, data) if is_own else None
    if loader is None and data is None:
        raise ValueError("evaluation needs an eval_dataset: give one to the Trainer or to evaluate()")
    if loader is None:
        make = get_test_dataloader if predicts or not isinstance(data, str) else get_eval_dataloader
        trainer.callback_handler.eval_dataloader = make(trainer, data)
    loss_only = None if predicts or trainer.compute_metrics is not None else True
    if has_own_loop:
        what = "Prediction" if predicts else "Evaluation"
        found = trainer.evaluation_loop(loader, what, loss_only, ignore_keys, prefix)
    else:
        if loader is not None:
            trainer.callback_handler.eval_dataloader = loader
        batches = _own_batches(trainer, trainer.eval_dataset[data] if isinstance(data, str) else data, loader)
        found = _evaluate_batches(trainer, batches, loss_only, ignore_keys, prefix, keep=predicts)
    num_steps = math.ceil((found.num_samples or 0) / (args.per_device_eval_batch_size * args.world_size))
    found.metrics.update(speed_metrics(prefix, began, num_samples=found.num_samples, num_steps=num_steps))
    return found


def evaluation_loop(
    trainer: "Trainer",
    dataloader: DataLoader[Any],
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> EvalLoopOutput:
    """Return predictions, labels, and metrics of a loader.

    Every process reads the whole loader and forwards its share of the batches. evaluate and predict use an override of
    this method.
    """
    trainer.callback_handler.eval_dataloader = dataloader
    batches, keep = _own_batches(trainer, None, dataloader), description != "Evaluation"
    return _evaluate_batches(trainer, batches, prediction_loss_only, ignore_keys, metric_key_prefix, keep=keep)


def _evaluate_batches(
    trainer: "Trainer",
    batches: Iterator[MicroBatch],
    loss_only: bool | None,
    ignore_keys: list[str] | None,
    prefix: str,
    *,
    keep: bool,
) -> EvalLoopOutput:
    args, accelerator = trainer.args, trainer.accelerator
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
        forwarded = (_forward(trainer, dict(inputs), targets, loss_only, ignore_keys) for inputs, targets in batches)
        own = (each for each in forwarded if each.num_targets != ONLY_FORWARDED)
        if by_batch:
            outputs, scores = _score_by_batch(trainer, own, keep=keep)
        else:
            outputs, scores = in_turn(accelerator.num_processes, _read_losses(list(own))), {}
    if not trainer.is_in_train:
        # The mode stays, as in transformers, because inference often follows.
        trainer.model.eval()
    predictions, labels, inputs = (
        joined([getattr(one, name) for one in outputs], args.eval_do_concat_batches)
        for name in ("predictions", "labels", "inputs")
    )
    if trainer.compute_metrics is not None and not by_batch and predictions is not None and labels is not None:
        scores = _score(trainer, outputs, predictions, labels, inputs)
    metrics: dict[str, Any] = {}
    if outputs and outputs[0].loss is not None:
        weights = [one.num_samples if trainer.match_transformers else one.num_targets for one in outputs]
        # The loss of a batch without targets is NaN.
        total = sum(one.loss * weight for one, weight in zip(outputs, weights, strict=True) if weight)
        metrics["loss"] = total / max(sum(weights), 1)
    metrics |= denumpify_detensorize(dict(scores))
    metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}
    return EvalLoopOutput(predictions, labels, metrics, sum(one.num_samples for one in outputs))


def _own_batches(trainer: "Trainer", dataset: Any, loader: Any) -> Iterator[MicroBatch]:
    """Yield this process's batches, from the dataset or as each W-th batch of the user's loader."""
    accelerator, args = trainer.accelerator, trainer.args
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if loader is None:
        dataset = readable(trainer, dataset)
        if not is_stream(dataset):
            size = args.per_device_eval_batch_size
            drops = trainer.match_transformers and args.dataloader_drop_last
            num_samples = len(dataset) // size * size if drops else len(dataset)
            pin = args.dataloader_pin_memory and accelerator.device.type == "cuda"
            read = partial(read_batches, dataset, collate_of(trainer), device=accelerator.device)
            reading = Reading(args.dataloader_num_workers, pin, **reading_of(args))
            yield from read(evaluation_batches(num_samples, size, rank, world_size), reading=reading)
            if is_spread(trainer) and 0 < -(-num_samples // size) % world_size <= rank:
                for inputs, _ in read(iter([[0]]), reading=Reading(0, pin)):
                    yield inputs, ONLY_FORWARDED
            return
        loader = in_batches(dataset, args.per_device_eval_batch_size, collator_of(trainer))
    number, first = -1, None
    for number, batch in enumerate(loader):
        inputs, num_targets = counted(batch, trainer.signature)
        first = inputs if first is None else first
        if number % world_size == rank:
            yield send_to_device(inputs, accelerator.device), num_targets
    if is_spread(trainer) and first is not None and 0 < (number + 1) % world_size <= rank:
        yield send_to_device(first, accelerator.device), ONLY_FORWARDED


def _forward(
    trainer: "Trainer", inputs: dict[str, Any], num_targets: int, loss_only: bool, ignore_keys: list[str] | None
) -> BatchOutputs:
    name = getattr(trainer.model, "main_input_name", "input_ids")
    kept = inputs.get(name) if "inputs" in trainer.args.include_for_metrics else None
    rows = find_batch_size(inputs) or 1
    with torch.no_grad():
        loss, logits, labels = prediction_step_of(trainer, inputs, loss_only, ignore_keys)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        logits = convert_to_fp32(logits)
    trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    if not trainer.args.batch_eval_metrics:
        logits, labels, kept = (None if one is None else nested_numpify(one) for one in (logits, labels, kept))
    mean = None if loss is None else loss.detach().float().mean()
    return BatchOutputs(mean, num_targets, rows, logits, labels, kept)


def _read_losses(outputs: list[BatchOutputs]) -> list[BatchOutputs]:
    """Copy all losses to the host at once."""
    with_loss = [one for one in outputs if one.loss is not None]
    if with_loss:
        for one, loss in zip(with_loss, torch.stack([one.loss for one in with_loss]).tolist(), strict=True):
            one.loss = loss
    return outputs


def _score_by_batch(
    trainer: "Trainer", own: Iterator[BatchOutputs], *, keep: bool
) -> tuple[list[BatchOutputs], dict[str, Any]]:
    """Call compute_metrics with one batch at a time, in order. Without `keep`, return only losses."""
    world_size = trainer.accelerator.num_processes
    everything: list[BatchOutputs] = []
    metrics: dict[str, Any] = {}
    following, has_more = next(own, None), True
    while has_more:
        this, following = following, next(own, None)
        turn = in_turn(world_size, [] if this is None else _read_losses([this]))
        has_more = any(in_turn(world_size, [following is not None]))
        for one in turn:
            is_last = not has_more and one is turn[-1]
            metrics = _score(trainer, [one], one.predictions, one.labels, one.inputs, compute_result=is_last)
            one.predictions = nested_numpify(one.predictions) if keep else None
            one.labels = nested_numpify(one.labels) if keep else None
            one.inputs = None
        everything += turn
    return everything, metrics


def _score(
    trainer: "Trainer", outputs: list[BatchOutputs], predictions: Any, labels: Any, inputs: Any, **options: bool
) -> dict[str, Any]:
    """Call compute_metrics. A sample's loss is the mean of its batch, as in transformers.

    Raises:
        ValueError: compute_metrics did not return a dict.
    """
    losses = None
    if "loss" in trainer.args.include_for_metrics:
        means = np.asarray([one.loss for one in outputs], dtype=np.float32)
        losses = np.repeat(means, [one.num_samples for one in outputs])
    assert trainer.compute_metrics is not None
    given = EvalPrediction(predictions=predictions, label_ids=labels, inputs=inputs, losses=losses)
    metrics = trainer.compute_metrics(given, **options)
    if metrics is None and options.get("compute_result") is False:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(f"compute_metrics returned {metrics!r}; it has to return a dict of numbers by name")
    return dict(metrics)


def in_turn(world_size: int, own: list[Any]) -> list[Any]:
    """Return the items of all processes in the order of the batches: the first of each process, then the second, ..."""
    if world_size == 1:
        return own
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, own)
    return [of_rank[turn] for turn in range(max(map(len, gathered))) for of_rank in gathered if turn < len(of_rank)]


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
