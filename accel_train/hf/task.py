"""The user's model, data sets and collator as a task of the loop."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from transformers.trainer_utils import _is_peft_model

from accel_train.hf_face.arguments import Length
from accel_train.hf_face.evaluation import in_batches
from accel_train.hf_face.flow import Flow
from accel_train.hf_face.inputs import (
    Collate,
    fingerprint,
    is_columns,
    is_stream,
    lengths_of,
    stream_batches,
    targets_in,
)
from accel_train.hf_face.loss import num_items_in
from accel_train.recipe import Recipe
from accel_train.snapshot import model_tensors
from accel_train.task import Scores, TaskData

if TYPE_CHECKING:
    from accel_train.hf import Trainer


class OnlyLength(Dataset[None]):
    """As many samples as an epoch has, of data that the task reads itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class HFTask:
    """What the loop asks of a Trainer: its data in order, its model, `compute_loss`, `evaluate`."""

    def __init__(
        self, trainer: "Trainer", flow: Flow, length: Length, rows: Any, loader: DataLoader[Any] | None
    ) -> None:
        self.trainer, self.flow, self.length, self.rows = trainer, flow, length, rows
        self.loader = loader
        """Of an overridden get_train_dataloader."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """The training data as rows in our order, or as a stream."""
        trainer, args, dataset = self.trainer, self.trainer.args, self.rows
        collate = Collate(trainer.collator_for(trainer.train_dataset), trainer.signature)
        streamed = self.loader is not None or is_stream(dataset)
        lengths: NDArray[Any] | None = None
        if args.train_sampling_strategy == "group_by_length" and not streamed:
            names = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
            lengths = lengths_of(
                trainer.train_dataset if not is_columns(trainer.train_dataset) else dataset,
                args.length_column_name,
                names[0],
            )
        per_epoch = self.length.steps_per_epoch * self.length.global_batch_size
        return TaskData(
            train=OnlyLength(per_epoch) if streamed else dataset,
            eval=None,
            collate=collate,
            fingerprint=fingerprint(dataset) if self.loader is None else type(self.loader).__name__,
            facts={"num_train": per_epoch if streamed else len(dataset)},
            lengths=lengths,
            step_batches=self._in_order(collate) if streamed else None,
        )

    def _in_order(self, collate: Collate) -> Any:
        trainer, args = self.trainer, self.trainer.args

        def batches_of_epoch(epoch: int) -> Iterator[Any]:
            torch.manual_seed(
                args.seed + epoch
            )  # what shuffles without a generator of its own shuffles alike everywhere
            source = self.loader if self.loader is not None else trainer.train_dataset
            for settable in (source, getattr(source, "sampler", None), getattr(source, "dataset", None)):
                set_epoch = getattr(settable, "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(epoch)
            if self.loader is not None:
                return iter(self.loader)
            return in_batches(source, args.per_device_train_batch_size, collate.collator)

        return stream_batches(
            batches_of_epoch,
            collate.signature,
            max_steps=self.length.max_steps,
            accumulation=args.gradient_accumulation_steps,
            rank=trainer.process_index,
            world_size=trainer.world_size,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """The user's model itself, so that `trainer.model` is what was trained."""
        model, args = self.trainer.model, self.trainer.args
        if recipe.precision.gradient_checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)
            if enable is None:
                raise ValueError(
                    f"activation_checkpointing=True: {type(model).__name__} has no activation_checkpointing_enable; set it False"
                )
            enable(args.activation_checkpointing_kwargs)
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """`compute_loss`, which is a mean whichever way the model counts, times what it is a mean over."""
        trainer = self.trainer
        inputs = dict(batch)
        if not all(isinstance(value, Tensor) for value in inputs.values()):
            inputs = send_to_device(inputs, trainer.device)  # what is nested; the reader moved the rest
        self.flow.count(inputs)
        loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in(trainer, inputs))
        return loss.float() * targets_in(inputs, trainer.signature)

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing: the loop's evaluation is `Flow.evaluate`."""
        return {}

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Nothing, likewise."""
        return Scores({})

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing: `Trainer.predict` predicts."""
        return {}

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Not known: a target is a row for one model and a token for another."""
        return None

    def baselines(self, data: TaskData) -> dict[str, float]:
        """None."""
        return {}

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        """None."""
        return None

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Configuration and tokenizer, so that `from_pretrained` reads a checkpoint."""
        save_description(self.trainer, model, folder)

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """The weights, and the same."""
        save_pretrained(self.trainer, model, folder)


def save_description(trainer: "Trainer", model: Any, folder: Path) -> None:
    """What loading the model needs beside its weights."""
    if isinstance(model, PreTrainedModel):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    if _is_peft_model(model):
        for config in model.peft_config.values():
            config.save_pretrained(folder)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(folder)


def save_pretrained(trainer: "Trainer", model: Any, folder: Path) -> None:
    """Weights, configuration and tokenizer in a folder, as transformers' Trainer.save_model writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel) or _is_peft_model(model):
        model.save_pretrained(folder)
    else:
        tensors = {name: tensor.cpu() for name, tensor in model_tensors(model).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_description(trainer, model, folder)
    arguments = trainer.args.to_json_string()  # tokens are masked in it
    (folder / "training_args.json").write_text(arguments, encoding="utf-8")
