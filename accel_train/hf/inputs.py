"""Batches from the user's datasets: columns, collators, the number of targets per batch, and other counts."""

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from datasets import Dataset as TableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import RemoveColumnsCollator, unwrap_peft_model
from transformers.utils import find_labels

from accel_train.core.errors import SettingError
from accel_train.data.order import Indices
from accel_train.hf.argument_table import argument_error

if TYPE_CHECKING:
    from accel_train.hf import Trainer


Inputs = dict[str, Any]
"""A batch as the model's forward takes it, by argument."""
Metrics = dict[str, Any]
"""Metrics by name, as `compute_metrics` returns them. A metric of your own may be any value."""
Collator = Callable[[list[Any]], Any]
"""A `data_collator`: makes a batch of samples."""
EpochOrder = Callable[[int], Indices]
"""Order of the samples of an epoch, by its number."""


@dataclass(frozen=True)
class Signature:
    """The arguments of a model's forward, and the labels among them."""

    columns: tuple[str, ...]
    label_names: tuple[str, ...]
    takes_num_items: bool
    """Whether the model's loss is a sum divided by `num_items_in_batch`, if that is given."""
    shifts_labels: bool
    """Whether position i predicts label i + 1. The first label of a row is then not a target."""
    weighs_batches: bool = False
    """Whether all micro-batches have the same weight, independent of their targets."""

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None, *, match: bool = False) -> "Signature":
        """Return the signature as transformers' Trainer determines it. With `match`, also count targets as it does."""
        inner = unwrap_peft_model(model)
        parameters = inspect.signature(inner.forward).parameters
        labels = tuple(find_labels(type(inner)) if label_names is None else label_names)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        loss_type = getattr(inner, "loss_type", None)
        shifts = (is_causal(model) and not match) or LOSS_MAPPING.get(loss_type) is ForCausalLMLoss
        takes_num_items = getattr(inner, "accepts_loss_kwargs", takes_any)
        return cls(
            columns=(*parameters, "label", "label_ids", *labels),
            label_names=labels,
            takes_num_items=takes_num_items,
            weighs_batches=match and not takes_num_items,
            shifts_labels=shifts and not getattr(getattr(inner, "config", None), "is_encoder_decoder", False),
        )


def is_causal(model: nn.Module) -> bool:
    """Return whether transformers lists the model, without its adapters, as a causal language model."""
    return type(unwrap_peft_model(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


class Columns(Dataset[Inputs]):
    """A mapping of columns (a tokenizer's output, a dict of tensors) as a dataset of rows."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise SettingError(f"the columns of a dict must have one length, but have {lengths}", at="dataset")
        self.columns = dict(columns)
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Inputs:
        return {name: column[index] for name, column in self.columns.items()}


def is_columns(data: Any) -> bool:
    """Return whether a mapping holds columns instead of datasets."""
    return isinstance(data, Mapping) and all(
        isinstance(column, Tensor | np.ndarray)
        or (isinstance(column, list | tuple) and not (column and isinstance(column[0], Mapping)))
        for column in data.values()
    )


def is_stream(data: Any) -> bool:
    """Return whether a dataset can only be read from its beginning."""
    return isinstance(data, IterableDataset) or not isinstance(data, Sized)


def readable(trainer: "Trainer", data: Any) -> Any:
    """Return the dataset as rows. A `datasets.Dataset` loses the columns that the model's forward does not take.

    Raises:
        SettingError: the model takes none of the columns.
    """
    if is_columns(data):
        return Columns(data)
    if not trainer.args.remove_unused_columns or not isinstance(data, TableDataset):
        return data
    names, taken = data.column_names, trainer.signature.columns
    unused = [name for name in names if name not in taken]
    if len(unused) == len(names) and names:
        raise argument_error(
            f"the model's forward takes none of the dataset's columns ({', '.join(names)}), only {', '.join(taken)}",
            "Rename the columns, or set it False.",
            remove_unused_columns=True,
        )
    return data.remove_columns(unused)


def collator_of(trainer: "Trainer") -> Collator:
    """Return the trainer's collator. It sees only the columns that the model's forward takes."""
    own: Collator = trainer.data_collator
    return RemoveColumnsCollator(own, trainer.signature.columns) if trainer.args.remove_unused_columns else own


def collate_of(trainer: "Trainer") -> Callable[[Sequence[Any]], Inputs]:
    """Return the collation of samples to model inputs and `num_targets`. Worker processes receive a copy."""
    return partial(_collate, collator_of(trainer), trainer.signature)


def _collate(collator: Collator, signature: Signature, samples: Sequence[Any]) -> Inputs:
    inputs, num_targets = counted(collator(list(samples)), signature)
    return {**inputs, "num_targets": num_targets}


def counted(inputs: Any, signature: Signature) -> tuple[Inputs, int]:
    """Return a batch's inputs and its number of targets.

    Raises:
        SettingError: the collator did not return a mapping, or returned an empty one.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        kind = "an empty mapping" if isinstance(inputs, Mapping) else type(inputs).__name__
        raise argument_error(
            f"returned {kind}", f"Return the model's inputs by name ({', '.join(signature.columns)}).", "data_collator"
        )
    return dict(inputs), int(targets_in(inputs, signature))


def targets_in(inputs: Mapping[str, Any], signature: Signature) -> Tensor | int:
    """Return the divisor of a batch's mean loss: its labels that are not -100, or its rows without such labels.

    Causal models lose one label per row by the shift. For inputs on a device, the result is a tensor, so nothing waits.
    """
    if signature.weighs_batches:
        return 1
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return int(find_batch_size(dict(inputs)) or 1)
    if isinstance(inputs.get("shift_labels"), Tensor):
        labels = inputs["shift_labels"]
    elif signature.shifts_labels:
        labels = labels[..., 1:]
    return labels.ne(-100).sum()


def num_items_in(trainer: "Trainer", inputs: Mapping[str, Any]) -> Tensor | int | None:
    """Return `num_items_in_batch` of one batch, or None if no loss divides by it, as in transformers."""
    if "labels" not in inputs or not (trainer.signature.takes_num_items or trainer.compute_loss_func is not None):
        return None
    count = targets_in(inputs, trainer.signature)
    # Without targets the sum is 0, and 0 / 0 would be NaN.
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def reading_of(args: TrainingArguments) -> dict[str, Any]:
    """Return the DataLoader options of the workers that the arguments set."""
    given = {"prefetch_factor": args.dataloader_prefetch_factor}
    given["multiprocessing_context"] = args.dataloader_multiprocessing_context
    return {name: value for name, value in given.items() if value is not None}


def num_input_tokens(trainer: "Trainer", inputs: Mapping[str, Any]) -> Any:
    """Return a batch's tokens for `include_num_input_tokens_seen`, or 0 if they cannot be counted."""
    main = inputs.get(getattr(trainer.model, "main_input_name", "input_ids"))
    if not isinstance(main, Tensor):
        return 0
    if trainer.args.include_num_input_tokens_seen == "non_padding":
        if isinstance(inputs.get("attention_mask"), Tensor):
            return inputs["attention_mask"].sum()
        if (pad := getattr(trainer.processing_class, "pad_token_id", None)) is not None:
            return main.ne(pad).sum()
    return main.numel()


class TrainLoader(DataLoader[Any]):
    """The loader that this Trainer makes. An override that returns it unchanged counts as no override."""

    def __init__(self, source: Any, rows: Any, **options: Any) -> None:
        super().__init__(rows, **options)
        self.source = source
        """Dataset with all its columns."""
        self._made_with = self.collate_fn
        self.num_batches: int | None = None
        """Batches per epoch on one process. None: this process reads all of them."""

    def __len__(self) -> int:
        return super().__len__() if self.num_batches is None else self.num_batches

    @property
    def is_as_made(self) -> bool:
        """Return whether the collator is still the Trainer's. Torch forbids other changes."""
        return self.collate_fn is self._made_with


def train_loader(trainer: "Trainer") -> TrainLoader:
    """Return an epoch's micro-batches for inspection."""
    args, source = trainer.args, trainer.train_dataset
    if source is None:
        raise argument_error("required for training", "Give one.", "train_dataset")
    rows = readable(trainer, source)
    seed = _order_seed(args, rows)
    return TrainLoader(
        source,
        rows,
        batch_size=args.per_device_train_batch_size,
        sampler=None if seed is None else SeedableRandomSampler(rows, generator=torch.Generator(), data_seed=seed),
        collate_fn=collator_of(trainer),
        num_workers=args.dataloader_num_workers,
        drop_last=args.dataloader_drop_last,
    )


def evaluation_loader(trainer: "Trainer", data: Any) -> DataLoader[Any]:
    """Return the batches of a dataset, or of an evaluation dataset given by name, for inspection."""
    if data is None:
        raise argument_error("required for an evaluation", "Give one.", "eval_dataset")
    return DataLoader(
        readable(trainer, trainer.eval_dataset[data] if isinstance(data, str) else data),
        batch_size=trainer.args.per_device_eval_batch_size,
        collate_fn=collator_of(trainer),
        num_workers=trainer.args.dataloader_num_workers,
    )


def loader_of_override(trainer: "Trainer", method: str, *data: Any) -> Any:
    """Return the result of an overridden `get_..._dataloader`.

    Every process reads the whole loader and takes its share. Inside the override, `self.accelerator.prepare` leaves a
    loader unchanged, because it would divide the loader a second time.

    Raises:
        SettingError: another Accelerator prepared the loader for several processes.
    """
    accelerator: Any = trainer.accelerator
    accelerator.prepare = lambda *loaders, **_: loaders[0] if len(loaders) == 1 else loaders
    try:
        loader = getattr(trainer, method)(*data)
    finally:
        del accelerator.prepare
    if accelerator.num_processes > 1 and isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        raise argument_error(
            "returned a prepared loader", "Return the DataLoader itself; every process reads all of it.", method
        )
    return loader


def _order_seed(args: TrainingArguments, rows: Any) -> int | None:
    """Return the seed of the order of samples, or None for sequential order."""
    if is_stream(rows) or args.train_sampling_strategy == "sequential":
        return None
    return args.seed if args.data_seed is None else args.data_seed


def epoch_order(args: TrainingArguments, rows: Any) -> EpochOrder | None:
    """Return the sample order of each epoch as in transformers, or None for sequential order.

    The order is torch.randperm, seeded by seed + epoch, as in `SeedableRandomSampler` of Accelerate. Two orders are
    cached: a permutation of 10^6 costs 20 ms, and readers are less than an epoch ahead of the loop.
    """
    seed = _order_seed(args, rows)
    if seed is None:
        return None

    @lru_cache(maxsize=2)
    def order(epoch: int) -> Indices:
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).numpy()

    return order


SUMS = ("num_labels", "num_tokens", "entropy", "mean_token_accuracy", "aux_loss")
"""Numbers of a micro-batch, summed over its tokens. The last three are sums whose means over labels are metrics."""


class TokenMetrics:
    """The numbers that `compute_loss` notes, and the metrics that they make."""

    def __init__(self, *, has_router: bool) -> None:
        self._means = SUMS[2:] if has_router else SUMS[2:4]
        self._noted: Tensor | None = None
        self.num_tokens = 0
        """Tokens of all training batches so far."""

    def note(self, inputs: Mapping[str, Any], outputs: Any, count: Tensor, entropy: Tensor, correct: Tensor) -> None:
        """Keep the numbers of a micro-batch on the device. A compiled graph notes nothing."""
        if torch.compiler.is_compiling():
            return
        mask, router = inputs.get("attention_mask"), entropy.new_zeros(())
        if "aux_loss" in self._means and outputs.aux_loss is not None:
            router = outputs.aux_loss.detach() * count
        tokens = count.new_full((), inputs["labels"].numel()) if mask is None else mask.sum()
        self._noted = torch.stack([each.float() for each in (count, tokens, entropy, correct, router)])

    def take(self) -> Tensor | None:
        """Return the numbers of the last micro-batch, once."""
        noted, self._noted = self._noted, None
        return noted

    def of(self, steps: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the metrics of the sums of several steps, or of one evaluation. Empty without labels."""
        labeled = [dict(zip(SUMS, step, strict=True)) for step in steps if step and step[0]]
        means = {name: [step[name] / step["num_labels"] for step in labeled] for name in self._means}
        found = {name: sum(values) / len(values) for name, values in means.items() if values}
        return {**found, "num_tokens": float(self.num_tokens)} if found else {}
