"""From the user's data sets to batches: columns, collators, and how many targets a batch holds."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset as TableDataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
    default_data_collator,
)
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import RemoveColumnsCollator, unwrap_peft_model
from transformers.utils import find_labels

if TYPE_CHECKING:
    from accel_train.hf import Trainer


@dataclass(frozen=True)
class Signature:
    """What a model's forward takes, and which of it are labels."""

    columns: tuple[str, ...]
    label_names: tuple[str, ...]
    takes_num_items: bool
    """Its loss is a sum divided by `num_items_in_batch`, where that is given."""
    shifts_labels: bool
    """Position i predicts label i + 1, so the first label of a row is no target."""

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None) -> "Signature":
        """As transformers' Trainer finds it out."""
        inner = unwrap_peft_model(model)
        parameters = inspect.signature(inner.forward).parameters
        labels = tuple(find_labels(type(inner)) if label_names is None else label_names)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        loss_type = getattr(inner, "loss_type", None)
        is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        shifts = is_causal or LOSS_MAPPING.get(loss_type) is ForCausalLMLoss
        return cls(
            columns=(*parameters, "label", "label_ids", *labels),
            label_names=labels,
            takes_num_items=getattr(inner, "accepts_loss_kwargs", takes_any),
            shifts_labels=shifts and not getattr(getattr(inner, "config", None), "is_encoder_decoder", False),
        )


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Padding where there is a tokenizer or feature extractor to pad with, plain stacking else; as in transformers."""
    if isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator


class Columns(Dataset[dict[str, Any]]):
    """A mapping of columns (what a tokenizer returns, a dict of tensors) as a data set of rows."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a data set given as a dict of columns needs columns of one length; these have {lengths}")
        self.columns = dict(columns)
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def is_columns(data: Any) -> bool:
    """Whether a mapping holds columns; a dict of data sets holds data sets."""
    return isinstance(data, Mapping) and all(
        isinstance(column, Tensor | np.ndarray)
        or (isinstance(column, list | tuple) and not (column and isinstance(column[0], Mapping)))
        for column in data.values()
    )


def is_stream(data: Any) -> bool:
    """Whether a data set is read from its beginning only."""
    return isinstance(data, IterableDataset) or not isinstance(data, Sized)


def readable(data: Any, signature: Signature, remove_unused: bool) -> Any:
    """The data set as rows; a `datasets.Dataset` without the columns that the model's forward does not take.

    Raises:
        ValueError: no column is one that the model takes.
    """
    if is_columns(data):
        return Columns(data)
    if not remove_unused or not isinstance(data, TableDataset):
        return data
    names = data.column_names
    unused = [name for name in names if name not in signature.columns]
    if len(unused) == len(names) and names:
        raise ValueError(
            f"no column of the data set ({', '.join(names)}) is an argument of the model's forward "
            f"({', '.join(signature.columns)}); rename them, or set remove_unused_columns=False"
        )
    return data.remove_columns(unused)


def without_unused(collate: Callable[[list[Any]], Any], signature: Signature) -> Callable[[list[Any]], Any]:
    """The collator, given only what the model's forward takes of each sample."""
    remover: Callable[[list[Any]], Any] = RemoveColumnsCollator(collate, signature.columns)
    return remover


@dataclass(frozen=True)
class Collate:
    """Samples -> the model's inputs, and how many targets they hold. Readers' processes get a copy of it."""

    collator: Callable[[list[Any]], Any]
    signature: Signature

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        return with_targets(self.collator(list(samples)), self.signature)


def with_targets(inputs: Any, signature: Signature) -> dict[str, Any]:
    """A batch as the loop reads it: the inputs, and `num_targets` for the host.

    Raises:
        ValueError: the collator returned no mapping, or an empty one.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise ValueError(
            f"the data collator returned {type(inputs).__name__ if not isinstance(inputs, Mapping) else 'an empty mapping'}; "
            f"it has to return the model's inputs by name ({', '.join(signature.columns)})"
        )
    return {**inputs, "num_targets": int(targets_in(inputs, signature))}


def targets_in(inputs: Mapping[str, Any], signature: Signature) -> Tensor | int:
    """What a batch's mean loss is a mean over: labels that are not -100 (less the shift of causal models), else rows.

    A tensor where the inputs are on a device, so that nothing waits for it.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return int(find_batch_size(dict(inputs)) or 1)
    if isinstance(inputs.get("shift_labels"), Tensor):
        labels = inputs["shift_labels"]
    elif signature.shifts_labels:
        labels = labels[..., 1:]
    return labels.ne(-100).sum()


def loader_over(trainer: "Trainer", data: Any, batch_size: int, *, is_training: bool = False) -> DataLoader[Any]:
    """A plain DataLoader with the batches of one process; in training those of the first epoch."""
    args = trainer.args
    rows = readable(data, trainer.signature, args.remove_unused_columns)
    order = None
    if is_training and not is_stream(rows) and args.train_sampling_strategy != "sequential":
        order = epoch_order(len(rows), args.seed if args.data_seed is None else args.data_seed)(0).tolist()
    return DataLoader(
        rows,
        batch_size=batch_size,
        sampler=order,
        collate_fn=trainer.collator_for(data),
        num_workers=args.dataloader_num_workers,
        drop_last=is_training and args.dataloader_drop_last,
    )


def fingerprint(data: Any) -> str:
    """Changes with the number of rows, and with 16 rows of them where the data set is plain values (no code makes them).

    A resume asks for the same data; rows that a `__getitem__` makes may differ each time, so they are not looked at.
    """
    digest = hashlib.sha256(type(data).__name__.encode())
    if is_stream(data):
        return digest.hexdigest()
    digest.update(str(len(data)).encode())
    rows = data.with_format(None) if isinstance(data, TableDataset) else data
    if len(data) and isinstance(data, TableDataset | list | tuple | Columns):
        for number in range(min(16, len(data))):
            row = rows[number * len(data) // min(16, len(data))]
            digest.update(json.dumps(row, default=_plain, sort_keys=True).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def lengths_of(data: Any, column: str, input_name: str) -> NDArray[np.int64]:
    """Tokens of each training sample: a column that says so, else of the model's main input.

    Raises:
        ValueError: the samples have neither.
    """
    if isinstance(data, TableDataset) and column in data.column_names:
        return np.asarray(data[column], dtype=np.int64)
    if len(data) == 0 or not isinstance(data[0], Mapping) or input_name not in data[0]:
        raise ValueError(
            f"train_sampling_strategy=group_by_length needs samples with {input_name!r}, or a column {column!r} with lengths"
        )
    return np.asarray([len(data[index][input_name]) for index in range(len(data))], dtype=np.int64)


def epoch_order(num_samples: int, seed: int) -> Callable[[int], NDArray[np.int64]]:
    """The samples of each epoch as transformers reads them: torch.randperm, seeded by seed + epoch.

    Source: `accelerate.data_loader.SeedableRandomSampler`. The last order is kept: a permutation of 10^6 costs 20 ms.
    """
    kept: dict[int, NDArray[np.int64]] = {}

    def order(epoch: int) -> NDArray[np.int64]:
        if epoch not in kept:
            for old in [known for known in kept if known < epoch - 1]:
                del kept[old]  # readers are ahead of the loop by less than an epoch
            generator = torch.Generator().manual_seed(seed + epoch)
            kept[epoch] = torch.randperm(num_samples, generator=generator).numpy()
        return kept[epoch]

    return order


def stream_batches(
    batches_of_epoch: Callable[[int], Iterator[Any]],
    signature: Signature,
    *,
    max_steps: int,
    accumulation: int,
    rank: int,
    world_size: int,
) -> Callable[[int], Iterator[list[tuple[dict[str, Any], int]]]]:
    """The micro-batches of each step out of batches that can only be read in order: `TaskData.step_batches`.

    Every process reads all of them and keeps each W-th, so that they need not be told apart; a step in which a process has
    none forwards the step's first one, which counts as no target. A resume reads up to its place.
    """

    def steps() -> Iterator[list[Any]]:
        for epoch in range(max_steps):
            step: list[Any] = []
            is_empty = True
            for batch in batches_of_epoch(epoch):
                is_empty = False
                step.append(batch)
                if len(step) == accumulation * world_size:
                    yield step
                    step = []
            if step:
                yield step
            if is_empty:
                raise ValueError(
                    f"the training data yields nothing in epoch {epoch}; it must be readable once for each epoch"
                )

    def from_step(first_step: int) -> Iterator[list[tuple[dict[str, Any], int]]]:
        for number, step in enumerate(steps()):
            if number >= max_steps:
                return
            if number < first_step:
                continue
            own = [with_targets(batch, signature) for batch in step[rank::world_size]]
            if own:
                yield [(batch, batch.pop("num_targets")) for batch in own]
            else:
                spare = with_targets(step[0], signature)
                spare.pop("num_targets")
                yield [(spare, 0)]

    return from_step
