"""The user's model, datasets, and collator as a task of the loop, with the loss of a micro-batch."""

import copy
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from datasets import Dataset as TableDataset
from datasets import IterableDataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from accel_train.core.errors import SettingError
from accel_train.core.json_io import parse_json
from accel_train.data.digest import digest_of_code, digest_of_data
from accel_train.data.samples import seed_reads
from accel_train.engine.step import Counted
from accel_train.hf.argument_table import argument_error
from accel_train.hf.arguments import Length, train_batch_size
from accel_train.hf.callbacks import Flow
from accel_train.hf.checkpoints import STREAM, copy_whole, is_spread, save_description, save_pretrained
from accel_train.hf.inputs import (
    SUMS,
    Columns,
    Inputs,
    collate_of,
    collator_of,
    counted,
    is_causal,
    is_columns,
    is_stream,
    num_items_in,
    readable,
    targets_in,
)
from accel_train.model.activation_checkpointing import enable_method
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TaskSpec
from accel_train.runtime.private import stream_facts
from accel_train.task import Batch, Facts, Task, TaskData

if TYPE_CHECKING:
    from accel_train.hf import Trainer


PLAIN = (TableDataset, list, tuple, Columns)
"""Dataset types with plain rows. Other types compute rows in a program's `__getitem__`."""


class HFTask(Task):
    """A Trainer as a task: its data in order, its model, and `compute_loss`. `Flow.evaluate` evaluates."""

    spec = TaskSpec(uses=frozenset(("loss.label_smoothing",)))

    def __init__(
        self, trainer: "Trainer", flow: Flow, length: Length, source: Any, loader: DataLoader[Any] | None
    ) -> None:
        self.trainer, self.flow, self.length, self.source = trainer, flow, length, source
        self.loader = loader
        """Loader of an overridden get_train_dataloader. None otherwise."""
        self.counted = Counted(len(SUMS)) if trainer._token_metrics else None
        self.batch_size = train_batch_size(trainer.args) if loader is None else 1
        """Samples of a stream, or batches of a loader, in a micro-batch."""
        self.files = ""
        """Digest of the list of files or shards of a `datasets.IterableDataset`. Empty for other data."""
        self.why_in_order = "only a datasets.IterableDataset has a state that can be saved"
        """Reason why a resume cannot continue from a saved state of the data, or an empty string."""
        if loader is None and isinstance(source, IterableDataset):
            files, is_buffered, is_split, self.start = stream_facts(source)
            self.files = digest_of_code(files)
            self.why_in_order = "datasets does not save the contents of a shuffle buffer" if is_buffered else ""
            if is_split and trainer.args.world_size > 1:
                raise argument_error(
                    "split by node, but every process reads all of it and keeps its share",
                    "Give the whole stream, without split_dataset_by_node.",
                    "train_dataset",
                )

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Return the training data as rows in the loop's order, or as a stream."""
        trainer, args = self.trainer, self.trainer.args
        dataset: Any = readable(trainer, self.source) if self.loader is None else None
        streamed = self.loader is not None or is_stream(dataset)
        lengths: NDArray[Any] | None = None
        if args.train_sampling_strategy == "group_by_length" and not streamed:
            lengths = lengths_of(trainer, dataset if is_columns(self.source) else self.source)
        per_epoch = self.length.steps_per_epoch * self.length.global_batch_size
        facts = Facts(num_train=per_epoch if streamed else len(dataset))
        inputs = self._code()
        if self.files:
            inputs["the list of files of train_dataset"] = self.files
        if not streamed and not isinstance(dataset, PLAIN) and trainer.is_world_process_zero():
            inputs["training data"], is_stable = digest_of_data(dataset)
            if not is_stable:
                note = "training data change between reads, so a resume compares only the number of samples"
                facts.notes = [note]
        return TaskData(
            # For streams only the length of the Subset is read.
            train=Subset(dataset, range(per_epoch)) if streamed else dataset,
            eval=None,
            collate=collate_of(trainer),
            fingerprint=fingerprint(dataset) if self.loader is None else type(self.loader).__name__,
            inputs=inputs,
            facts=facts,
            lengths=lengths,
            seeds_reading=True,
            step_batches=self._read_from if streamed else None,
        )

    def _code(self) -> dict[str, str]:
        """Return digests of the program's functions and classes by name. A resume lists the ones that have changed."""
        trainer = self.trainer
        parts = {
            "data_collator": trainer.data_collator,
            "compute_loss_func": trainer.compute_loss_func,
            "the class of the trainer": type(trainer),
        }
        # For a collator object only the class's code counts, because its tokenizer changes while it is used.
        return {
            name: digest_of_code(part if isinstance(part, type | FunctionType) else type(part))
            for name, part in parts.items()
        }

    def _read_from(self, first_step: int) -> Iterator[list[tuple[Inputs, int]]]:
        """Yield each step's micro-batches from data that can only be read in order.

        Every process reads all samples and keeps each W-th batch. A process without a batch forwards the step's first
        batch with 0 targets. Processes of a sharded model meet in each forward, so all of them forward the same number
        of batches.
        """
        args = self.trainer.args
        for number, step in enumerate(
            islice(self._resumed(first_step), self.length.max_steps - first_step), first_step
        ):
            count = -(-len(step) // self.batch_size)
            own = range(args.process_index, count, args.world_size)
            wanted = 1 if self.trainer.strategy.is_replicated else -(-count // args.world_size)
            batches = [self._counted(step, number, index) for index in own]
            if len(own) < args.gradient_accumulation_steps:
                self.flow.own_of_short_steps[number] = len(own)
            if len(own) < wanted:
                batches += [(self._counted(step, number, 0)[0], 0)] * (wanted - len(own))
            yield batches

    def _counted(self, step: list[Any], number: int, index: int) -> tuple[Inputs, int]:
        """Return a batch of a step with its number of targets. Random masks depend on the batch, not on the process."""
        batch = step[index]
        if self.loader is None:
            seed_reads(self.trainer.args.seed, number, index)
            # Some collators remove columns, and a resume compares the samples.
            batch = collator_of(self.trainer)([*map(copy.copy, step[index * self.batch_size :][: self.batch_size])])
        return counted(batch, self.trainer.signature)

    def _resumed(self, first_step: int) -> Iterator[list[Any]]:
        """Return the steps from `first_step` on. The step before, which is read again, must have the same samples."""
        run: Any = self.flow.run
        if not first_step:
            return self._steps()
        *saved, known = parse_json(run.facts.description.get(STREAM, b"[0, null]"))
        why = self.why_in_order or ("" if known else "the checkpoint has no state of it")
        for place in [saved, [0]][saved == [0] :]:
            again = f"reading {first_step - place[0]} steps again"
            run.observer.note(
                f"train_dataset is read in order: {again}, because {why}. If they hold the same samples, the resume is "
                "exact"
                if why
                else f"train_dataset continues from its saved state: {again}, to compare the samples"
            )
            steps = self._steps(*place)
            # Data that have changed may not know this state.
            with suppress(*[Exception] * (place != [0])):
                [samples] = deque(islice(steps, first_step - place[0]), 1)
                if known in (None, digest_of_data(samples)[0]):
                    return steps
            why = "its saved state gives other samples than before"
        run.observer.on_event(
            "stream_changed",
            first_step,
            f"train_dataset has other samples in step {first_step} than before, so the resume is not exact. Give the "
            "same data in the same order.",
        )
        return steps

    def _steps(self, number: int = 0, first_epoch: int = 0, state: Any = None) -> Iterator[list[Any]]:
        """Yield the samples of each step over all processes, from step `number` on: of a loader, the batches.

        `state` is the stream's state at this step. None: the step is the first one of the epoch.
        """
        args, place = self.trainer.args, [0]
        per_step = args.gradient_accumulation_steps * args.world_size * self.batch_size
        for epoch in range(first_epoch, self.length.max_steps):
            if self.files:
                place = [number, epoch, state]
            seed_reads(args.seed, number)
            source = self._source(epoch, state)
            samples, begun, state = iter(source), number, None
            while step := list(islice(samples, per_step)):
                self.flow.last_read = place, step
                yield step
                number += 1
                if not self.why_in_order:
                    place = [number, epoch, source.state_dict()]
                seed_reads(args.seed, number)
            if number == begun:
                raise argument_error(
                    f"no data in epoch {epoch}", "The data must be readable once for each epoch.", "train_dataset"
                )

    def _source(self, epoch: int, state: Any) -> Any:
        """Return the loader or the data at the beginning of an epoch, or a stream at its state."""
        source: Any = self.loader if self.loader is not None else self.source
        if self.files:
            # A copy, because all iterators of a stream, and of streams made from it, write to one state.
            source = source.shard(1, 0)
            source.load_state_dict(state or self.start)
        for settable in (source, getattr(source, "sampler", None), getattr(source, "dataset", None)):
            if settable is not None and hasattr(settable, "set_epoch"):
                settable.set_epoch(epoch)
        if state is None:
            # This makes a shuffle without its own generator the same on all processes.
            torch.manual_seed(self.trainer.args.seed + epoch)
        return source

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Return the user's model itself, so that training changes `trainer.model`.

        Once the model is sharded, return a copy for loading whole weights.
        """
        trainer, args = self.trainer, self.trainer.args
        if is_spread(trainer) and trainer.whole_model is not None:
            return trainer.whole_model
        model = trainer.model
        if not model.training:
            for part, training in trainer.modes.items():
                part.training = training
        if trainer.whole_model is None:
            trainer.whole_model = copy_whole(trainer, recipe)
        if recipe.precision.recomputed == "blocks":
            enable = enable_method(model)
            if enable is None:
                methods = "gradient_checkpointing_enable or activation_checkpointing_enable"
                raise argument_error(
                    f"{type(model).__name__} does not have {methods}", "Set it False.", gradient_checkpointing=True
                )
            enable(getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs)
        return model

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return `compute_loss`, a mean however the model counts, times the batch's number of targets."""
        trainer = self.trainer
        inputs = dict(batch)
        if not all(isinstance(value, Tensor) for value in inputs.values()):
            # This moves nested values. The reader has moved the tensors.
            inputs = send_to_device(inputs, trainer.accelerator.device)
        is_own = self.flow.count(inputs)
        with as_prepared(trainer, model):
            loss_sum = loss_of_step(trainer, model, inputs).float() * targets_in(inputs, trainer.signature)
        noted = trainer._token_metrics.take() if is_own and trainer._token_metrics is not None else None
        if noted is not None and self.counted is not None:
            self.counted.add(noted)
        return loss_sum

    def predict_batch(self, model: nn.Module, batch: Any) -> Any:
        """Return the result of `prediction_step`. The forward of a sharded model must pass through here."""
        inputs, loss_only, ignore_keys = batch
        with as_prepared(self.trainer, model, predicts=True):
            return self.trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration and tokenizer, so that `from_pretrained` reads a checkpoint."""
        save_description(self.trainer, model, folder)

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the weights, configuration, and tokenizer."""
        save_pretrained(self.trainer, model, folder)


def fingerprint(data: Any) -> str:
    """Return a digest of the number of rows, and of 16 rows if the dataset has plain rows.

    Rows that a `__getitem__` makes may differ at each read. For them `digest_of_data` reads twice on the main process.
    """
    digest = hashlib.sha256(type(data).__name__.encode())
    if is_stream(data):
        return digest.hexdigest()
    digest.update(str(len(data)).encode())
    rows = data.with_format(None) if isinstance(data, TableDataset) else data
    if len(data) and isinstance(data, PLAIN):
        for number in range(min(16, len(data))):
            row = rows[number * len(data) // min(16, len(data))]
            digest.update(json.dumps(row, default=_plain, sort_keys=True).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def lengths_of(trainer: "Trainer", data: Any) -> NDArray[np.int64]:
    """Return the length of each training sample in tokens, from the length column or the model's main input.

    Raises:
        SettingError: the samples have neither.
    """
    names = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
    column, input_name = trainer.args.length_column_name, names[0]
    if isinstance(data, TableDataset) and column in data.column_names:
        return np.asarray(data[column], dtype=np.int64)
    if len(data) == 0 or not isinstance(data[0], Mapping) or input_name not in data[0]:
        raise argument_error(
            f"needs samples with {input_name!r}, or a column {column!r} with lengths",
            train_sampling_strategy="group_by_length",
        )
    return np.asarray([len(data[index][input_name]) for index in range(len(data))], dtype=np.int64)


@contextmanager
def as_prepared(trainer: "Trainer", model: nn.Module, *, predicts: bool = False) -> Iterator[None]:
    """Limit autocast to the model's forward, and convert its outputs to fp32, as Accelerate's `prepare` does.

    A loss of the program then computes in fp32. If the model computes its loss alone, nothing changes, so logits that
    no code reads are not copied.
    """
    kind = trainer.accelerator.device.type
    reads = trainer.reads_outputs or (predicts and trainer.overrides("prediction_step"))
    if not reads or not torch.is_autocast_enabled(kind) or torch.compiler.is_compiling():
        yield
        return
    dtype, entered = torch.get_autocast_dtype(kind), list[torch.autocast]()

    def enter(*_: Any) -> None:
        entered.append(torch.autocast(kind, dtype))
        entered[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return convert_to_fp32(outputs)

    hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(trainer: "Trainer", model: nn.Module, inputs: Inputs, num_items_in_batch: Any) -> tuple[Any, Any]:
    """Return the mean loss of one micro-batch, and the model's outputs.

    Raises:
        SettingError: the model returned no loss.
    """
    inputs = dict(inputs)
    takes_labels = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    labels = inputs.pop("labels", None) if takes_labels else None
    if trainer.signature.takes_num_items and num_items_in_batch is not None:
        inputs["num_items_in_batch"] = num_items_in_batch
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        return trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch), outputs
    if labels is not None and trainer.label_smoother is not None:
        options = {"shift_labels": is_causal(model), "num_items_in_batch": num_items_in_batch}
        return trainer.label_smoother(outputs, labels, **options), outputs
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise SettingError(
            f"the model returned no loss, only {', '.join(outputs)}, from the inputs {', '.join(inputs)}",
            "Add labels, pass compute_loss_func, or override compute_loss.",
        )
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0], outputs


def loss_of_step(trainer: "Trainer", model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the mean loss of a micro-batch with its graph.

    Raises:
        SettingError: an overridden training_step called backward in another way, or not at all.
    """
    num_items = num_items_in(trainer, inputs)
    if not trainer.overrides("training_step"):
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
    handed: list[Tensor] = []
    accelerator: Any = trainer.accelerator
    accelerator.backward = lambda loss, **_: handed.append(loss)
    try:
        returned = trainer.training_step(model, dict(inputs), num_items)
    finally:
        del accelerator.backward
    if not handed and isinstance(returned, Tensor) and returned.requires_grad:
        return returned
    if not handed:
        raise argument_error(
            "never called self.accelerator.backward(loss)",
            "Call it instead of loss.backward(), because the loop divides the loss before it runs backward.",
            f"{type(trainer).__name__}.training_step",
        )
    return torch.stack(handed).sum() if len(handed) > 1 else handed[0]
