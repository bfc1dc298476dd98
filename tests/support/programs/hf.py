"""A program as a user writes it, which test_hf_processes runs under torchrun: train, evaluate, predict, and say what
came of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction, TrainerCallback

from accel_train import Trainer
from accel_train.core.errors import DataError
from tests.support.hf_models import (
    Grows,
    Plain,
    arguments,
    bert,
    history,
    pad,
    plain_rows,
    rows,
    token_bert,
    token_rows,
)
from tests.support.processes import end_group


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(plain_rows(44))


class StopsOnOne(TrainerCallback):
    """Asks to stop on the last process only."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = args.process_index == args.world_size - 1 and state.global_step == 2


class OwnLoader(Trainer):
    """Prepares its loaders, as those of transformers have to be."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(DataLoader(self.eval_dataset, batch_size=3, collate_fn=self.data_collator))


class Looks(Trainer):
    """Notes in which micro-batches gradients are synchronised."""

    seen: tuple[bool, ...] = ()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.training and self.state.global_step in (2, 3):  # earlier steps forward a micro-batch once more
            self.seen += (self.accelerator.sync_gradients,)
        return super().compute_loss(*args, **kwargs)


class Loaders(TrainerCallback):
    """Notes the batches of the loaders that callbacks are given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lengths.append(len(kwargs["train_dataloader"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lengths.append(len(kwargs["eval_dataloader"]))


def ignoring(numbers: range) -> list[dict[str, Any]]:
    """Rows of `Plain`, in their order, of which some have no target."""
    return [{**row, "labels": -100} if number in numbers else row for number, row in enumerate(plain_rows(24))]


def weights(trainer: Trainer) -> list[Any]:
    return [parameter.flatten().tolist() for parameter in trainer.model.parameters()]


def surface(folder: Path, per_device: int) -> dict[str, Any]:
    """What the Trainer gives to callbacks, models and optimizers, and steps without a target."""
    common = {"per_device_train_batch_size": per_device, "learning_rate": 1e-2, "logging_steps": 1, "max_steps": 4}
    saves = {"save_strategy": "steps", "save_steps": 2}
    loaders = Loaders()
    halves = {**common, "per_device_train_batch_size": per_device // 2, "gradient_accumulation_steps": 2}
    halves["max_steps"] = 5  # the last one has one row, so one of two processes has none
    halves["include_num_input_tokens_seen"] = "all"
    looks = Looks(
        bert(), arguments(folder / "looks", **halves), train_dataset=rows(33), eval_dataset=rows(5), callbacks=[loaders]
    )
    looks.train()
    looks.evaluate()
    free = {**common, **saves, "optim": "schedule_free_adamw", "eval_strategy": "steps", "eval_steps": 2}
    data = {"train_dataset": plain_rows(40), "eval_dataset": plain_rows(13, seed=5)}
    whole = Trainer(Plain(), arguments(folder / "free", **free), **data)
    whole.train()
    again = Trainer(Plain(), arguments(folder / "free", **free), **data)
    again.train(resume_from_checkpoint=str(folder / "free" / "checkpoint-2"))
    grows = Grows()
    Trainer(grows, arguments(folder / "grows", **common, **saves), train_dataset=plain_rows(40)).train()
    grown = Trainer(Grows(), arguments(folder / "grows", **common, **saves), train_dataset=plain_rows(40))
    grown.train(resume_from_checkpoint=str(folder / "grows" / "checkpoint-2"))
    ignored = {**common, "max_steps": -1, "num_train_epochs": 1, "train_sampling_strategy": "sequential"}
    ignored |= {"weight_decay": 0.5, "lr_scheduler_type": "constant"}
    with_empty, without = (
        Trainer(Plain(), arguments(folder / name, **ignored), train_dataset=each)
        for name, each in (("empty", ignoring(range(16, 24))), ("full", plain_rows(24)[:16]))
    )
    with_empty.train(), without.train()
    untrained = Trainer(Plain(), arguments(folder / "none", **ignored), train_dataset=ignoring(range(24)))
    is_refused = False
    try:
        untrained.train()
    except DataError:
        is_refused = True
    parameters = looks.model.num_parameters(exclude_embeddings=True)
    return {
        "syncs": list(looks.seen),
        "loaders": loaders.lengths,
        "rows_by_tokens": looks.state.num_input_tokens_seen / 12,
        "rows_by_flos": looks.state.total_flos / (6 * 12 * parameters),
        "without_targets": [
            is_refused,
            weights(untrained) == [each.flatten().tolist() for each in Plain().parameters()],
        ],
        "same_bits": [weights(again) == weights(whole), weights(with_empty) == weights(without)],
        "free": weights(whole),
        "grown": [len(grows.order), len(grown.model.order), weights(grown)],
    }


def main(folder: Path) -> None:
    """`folder/result.json` has everything that should not depend on the number of processes of one global batch."""
    sizes: list[int] = []

    def metrics(found: EvalPrediction, compute_result: bool = True) -> dict[str, float] | None:
        sizes.append(len(found.label_ids))
        if not compute_result:
            return None
        return {"count": sizes[-1], "sum": float((found.label_ids * (found.label_ids > 0)).sum())}

    per_device = 8 // arguments(folder).world_size
    common = {"per_device_train_batch_size": per_device, "max_steps": 5, "learning_rate": 1e-2, "logging_steps": 1}
    args = arguments(folder / "tokens", **common, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3)
    data, held_out = token_rows(20), token_rows(13, seed=5)
    trainer = Trainer(token_bert(), args, pad, data, held_out, compute_metrics=metrics)
    result = trainer.train()
    predicted = trainer.predict(held_out)
    own = OwnLoader(Plain(), arguments(folder / "own"), eval_dataset=plain_rows(13), compute_metrics=metrics).evaluate()
    stream = Trainer(Plain(), arguments(folder / "stream", **common), train_dataset=Stream())
    stream.train()
    epochs = {**common, "max_steps": -1, "num_train_epochs": 2}
    prepared = OwnLoader(Plain(), arguments(folder / "prepared", **epochs), train_dataset=plain_rows(24))
    best = {"save_strategy": "best", "metric_for_best_model": "own", "greater_is_better": True}
    rank_args = arguments(folder / "ranks", **common, eval_strategy="steps", eval_steps=2, **best)
    sign = -1 if rank_args.process_index else 1  # as metrics that draw samples, each process finds another number
    score = {"compute_metrics": lambda found: {"own": sign * ranks.state.global_step}}
    ranks = Trainer(Plain(), rank_args, train_dataset=plain_rows(40), eval_dataset=plain_rows(8), **score)
    ranks.train()
    stopped = Trainer(
        Plain(), arguments(folder / "stop", **common), train_dataset=plain_rows(40), callbacks=[StopsOnOne()]
    )
    by_batch = arguments(folder / "batches", batch_eval_metrics=True, per_device_eval_batch_size=3)
    batches = Trainer(Plain(), by_batch, eval_dataset=plain_rows(13), compute_metrics=metrics)
    sizes.clear()
    batches.evaluate()
    found = {
        # Of fewer rows at once fewer are padding, so the operations differ.
        "log": [{name: value for name, value in line.items() if name != "total_flos"} for line in history(trainer)],
        "train_loss": result.training_loss,
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        "weights": weights(trainer),
        "own": {name: own[name] for name in ("eval_loss", "eval_count")},
        "stream": [parameter.flatten().tolist() for parameter in stream.model.parameters()],
        "prepared": [prepared.train().global_step, [each.tolist() for each in prepared.model.parameters()]],
        "best": ranks.state.best_metric,
        "stopped_at": stopped.train().global_step,
        "batches": list(sizes),
        **surface(folder, per_device),
    }
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps(found))
    end_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
