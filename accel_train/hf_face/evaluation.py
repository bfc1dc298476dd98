"""Trainer.evaluate and Trainer.predict: every sample once, in the order of the data set, whatever the processes.

The loss is a sum divided once by its targets, so it does not depend on the batch size. Predictions go to the host batch by
batch, and are padded with -100 where batches are of different widths, as in transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import convert_to_fp32, send_to_device
from transformers import EvalPrediction
from transformers.trainer_pt_utils import find_batch_size, nested_detach, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from accel_train.evaluation import evaluation_mode
from accel_train.hf_face.inputs import Collate, is_stream, readable, with_targets
from accel_train.hf_face.loss import num_items_in
from accel_train.loading import read_batches
from accel_train.sampling import evaluation_batches
from accel_train.step import MicroBatch

if TYPE_CHECKING:
    from accel_train.hf import Trainer

PADDING = -100


@dataclass
class Seen:
    """What one batch left behind, on the host."""

    loss: Any
    """Mean over its targets: a tensor on the device until all batches are through, so that none is waited for."""
    num_targets: int
    num_samples: int
    predictions: Any
    labels: Any
    inputs: Any


def own_batches(trainer: "Trainer", dataset: Any, loader: Any) -> Iterator[MicroBatch]:
    """This process's batches: of the data set, or each W-th of a loader that the user made.

    Raises:
        ValueError: that loader was already prepared for several processes.
    """
    accelerator, args = trainer.accelerator, trainer.args
    rank, world_size = accelerator.process_index, accelerator.num_processes
    dataset = readable(dataset, trainer.signature, args.remove_unused_columns) if loader is None else None
    if loader is None and not is_stream(dataset):
        collate = Collate(trainer.collator_for(dataset), trainer.signature)
        lists = evaluation_batches(len(dataset), args.per_device_eval_batch_size, rank, world_size)
        pin = args.dataloader_pin_memory and accelerator.device.type == "cuda"
        yield from read_batches(dataset, collate, lists, accelerator.device, args.dataloader_num_workers, pin)
        return
    if loader is None:
        loader = in_batches(dataset, args.per_device_eval_batch_size, trainer.collator_for(dataset))
    if world_size > 1 and isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        raise ValueError(
            "get_eval_dataloader returned a prepared loader; return the DataLoader itself, every process reads it"
        )
    for number, batch in enumerate(loader):
        if number % world_size == rank:
            counted = with_targets(batch, trainer.signature)
            num_targets = counted.pop("num_targets")
            yield send_to_device(counted, accelerator.device), num_targets


def in_batches(samples: Any, batch_size: int, collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """A stream of samples as collated batches; the last one is short."""
    waiting = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == batch_size:
            yield collate(waiting)
            waiting = []
    if waiting:
        yield collate(waiting)


def run_evaluation(
    trainer: "Trainer",
    batches: Iterator[MicroBatch],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
    prefix: str,
    *,
    keep: bool = False,
) -> EvalLoopOutput:
    """Forward all batches and hand what came of them to compute_metrics.

    Args:
        keep: predictions are wanted by the caller, not only by compute_metrics.
    """
    args, accelerator = trainer.args, trainer.accelerator
    by_batch = args.batch_eval_metrics and trainer.compute_metrics is not None and not prediction_loss_only
    with evaluation_mode(trainer.model), accelerator.autocast():
        seen = (
            _forward(trainer, dict(batch), num_targets, prediction_loss_only, ignore_keys)
            for batch, num_targets in batches
        )
        if by_batch:
            everything, found = _score_by_batch(trainer, seen, keep)
        else:
            everything, found = in_turn(accelerator.num_processes, _read_losses(list(seen))), {}
    predictions, labels, inputs = (
        joined([getattr(one, name) for one in everything], args.eval_do_concat_batches)
        for name in ("predictions", "labels", "inputs")
    )
    if trainer.compute_metrics is not None and not by_batch and predictions is not None and labels is not None:
        extras = {
            "inputs": inputs if "inputs" in args.include_for_metrics else None,
            "losses": _losses(everything) if "loss" in args.include_for_metrics else None,
        }
        found = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **extras))
    metrics: dict[str, Any] = {}
    if everything and everything[0].loss is not None:
        targets = sum(one.num_targets for one in everything)
        total = sum(one.loss * one.num_targets for one in everything if one.num_targets)  # without targets it is NaN
        metrics["loss"] = total / max(targets, 1)
    metrics |= denumpify_detensorize(dict(found))
    metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}
    return EvalLoopOutput(predictions, labels, metrics, sum(one.num_samples for one in everything))


def _forward(
    trainer: "Trainer", inputs: dict[str, Any], num_targets: int, loss_only: bool, ignore_keys: list[str] | None
) -> Seen:
    name = getattr(trainer.model, "main_input_name", "input_ids")
    kept = inputs.get(name) if "inputs" in trainer.args.include_for_metrics else None
    rows = find_batch_size(inputs) or 1
    with torch.no_grad():
        loss, logits, labels = trainer.prediction_step(trainer.model, inputs, loss_only, ignore_keys=ignore_keys)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        logits = convert_to_fp32(logits)
    trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    if not trainer.args.batch_eval_metrics:
        logits, labels, kept = (None if one is None else nested_numpify(one) for one in (logits, labels, kept))
    mean = None if loss is None else loss.detach().float().mean()
    return Seen(mean, num_targets, rows, logits, labels, kept)


def _read_losses(seen: list[Seen]) -> list[Seen]:
    """Bring the losses to the host, all at once."""
    with_loss = [one for one in seen if one.loss is not None]
    if with_loss:
        for one, loss in zip(with_loss, torch.stack([one.loss for one in with_loss]).tolist(), strict=True):
            one.loss = loss
    return seen


def _score_by_batch(trainer: "Trainer", own: Iterator[Seen], keep: bool) -> tuple[list[Seen], dict[str, Any]]:
    """`batch_eval_metrics`: compute_metrics sees one batch at a time, in order, and nothing is kept but the losses."""
    everything: list[Seen] = []
    metrics: dict[str, Any] = {}
    ahead, goes_on = next(own, None), True
    while goes_on:
        this, ahead = ahead, next(own, None)
        turn = in_turn(trainer.accelerator.num_processes, [] if this is None else _read_losses([this]))
        goes_on = any(in_turn(trainer.accelerator.num_processes, [ahead is not None]))
        for number, seen in enumerate(turn, start=1):
            is_last = not goes_on and number == len(turn)
            extras = {
                "inputs": seen.inputs if "inputs" in trainer.args.include_for_metrics else None,
                "losses": _losses([seen]) if "loss" in trainer.args.include_for_metrics else None,
            }
            pair = EvalPrediction(predictions=seen.predictions, label_ids=seen.labels, **extras)
            metrics = trainer.compute_metrics(pair, compute_result=is_last)  # type: ignore[misc]  # it is not None here
            if keep:
                seen.predictions, seen.labels = nested_numpify(seen.predictions), nested_numpify(seen.labels)
            else:
                seen.predictions = seen.labels = None
            seen.inputs = None
        everything += turn
    return everything, metrics


def in_turn(world_size: int, own: list[Any]) -> list[Any]:
    """What all processes have, in the order in which the batches were dealt out: the first of each, the second of each."""
    if world_size == 1:
        return own
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, own)
    return [of_rank[turn] for turn in range(max(map(len, gathered))) for of_rank in gathered if turn < len(of_rank)]


def joined(parts: list[Any], concatenate: bool) -> Any:
    """Arrays of batches as one array each, also inside tuples and dicts; padded with -100 in the second dimension."""
    if not parts or parts[0] is None:
        return None
    if not concatenate:
        return parts
    if isinstance(parts[0], dict):
        return type(parts[0])({name: joined([part[name] for part in parts], True) for name in parts[0]})
    if isinstance(parts[0], list | tuple):
        return type(parts[0])(joined(list(same), True) for same in zip(*parts, strict=True))
    arrays = [np.atleast_1d(part) for part in parts]
    widths = {array.shape[1] for array in arrays if array.ndim > 1}
    if len(widths) <= 1:
        return np.concatenate(arrays)
    rows = sum(len(array) for array in arrays)
    whole = np.full((rows, max(widths), *arrays[0].shape[2:]), PADDING, dtype=np.result_type(*arrays))
    start = 0
    for array in arrays:
        whole[start : start + len(array), : array.shape[1]] = array
        start += len(array)
    return whole


def _losses(everything: list[Seen]) -> Any:
    """The mean loss of its batch for each sample, as transformers hands it out."""
    return np.repeat(
        np.asarray([one.loss for one in everything], dtype=np.float32), [one.num_samples for one in everything]
    )


def predict_one(
    trainer: "Trainer", model: torch.nn.Module, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
) -> tuple[torch.Tensor | None, Any, Any]:
    """transformers' `prediction_step`: loss, outputs (all but the loss and what the model says to ignore), labels."""
    signature = trainer.signature
    names = signature.label_names
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    gives_loss = not names and bool(
        trainer.can_return_loss if inputs.get("return_loss") is None else inputs["return_loss"]
    )
    config = getattr(model, "config", None)
    ignored = (
        ignore_keys if ignore_keys is not None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
    )
    labels = None
    if has_labels or gives_loss:
        labels = nested_detach(tuple(inputs.get(name) for name in names))
        labels = labels[0] if len(labels) == 1 else labels
        loss, outputs = trainer.compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in(trainer, inputs)
        )
    else:
        loss, outputs = None, model(**inputs)
    if loss_only:
        return loss, None, None
    if isinstance(outputs, dict):
        drop = {*ignored, "loss"} if loss is not None else set(ignored)
        logits: Any = tuple(value for name, value in outputs.items() if name not in drop)
    else:
        logits = outputs[1:] if loss is not None and isinstance(outputs, list | tuple) else outputs
    logits = nested_detach(logits)
    return loss, logits[0] if isinstance(logits, list | tuple) and len(logits) == 1 else logits, labels
