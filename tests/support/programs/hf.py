"""A program as a user writes it, which test_hf_processes runs under torchrun: train, evaluate, predict, and say what came of it."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import EvalPrediction, TrainerCallback

from accel_train import Trainer
from tests.support.hf_models import Plain, arguments, history, pad, plain_rows, token_bert, token_rows


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


def main(folder: Path) -> None:
    """`folder/result.json` has everything that should not depend on the number of processes of one global batch."""
    sizes: list[int] = []

    def metrics(found: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        sizes.append(len(found.label_ids))
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
        "weights": [parameter.flatten().tolist() for parameter in trainer.model.parameters()],
        "own": {name: own[name] for name in ("eval_loss", "eval_count")},
        "stream": [parameter.flatten().tolist() for parameter in stream.model.parameters()],
        "prepared": [prepared.train().global_step, [each.tolist() for each in prepared.model.parameters()]],
        "best": ranks.state.best_metric,
        "stopped_at": stopped.train().global_step,
        "batches": list(sizes),
    }
    if trainer.is_world_process_zero():
        (folder / "result.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
