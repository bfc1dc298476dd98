"""A program as a user writes it, with the model sharded: `hf_sharded.py FOLDER KIND BASE`, where KIND is none or one of
KINDS.
"""

import json
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM

from accel_train import Trainer
from tests.support.hf_models import arguments, history, pad, rows, token_rows
from tests.support.processes import end_group

LENGTHS = (101, 40, 7, 1)
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "ddp": {},
    "full_shard": {"fsdp": "full_shard"},
    "fsdp": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "activation_checkpointing": True}},
    "deepspeed": {
        "deepspeed": {
            "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
        }
    },
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(22)])


def main(folder: Path, kind: str, base: str) -> None:
    """`folder/result.json` has everything that does not depend on how the model is spread."""
    args: dict[str, Any] = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    args |= {"save_strategy": "steps", "save_steps": 2, "per_device_eval_batch_size": 3}
    args |= {"per_device_train_batch_size": 8 // arguments(folder).world_size, **KINDS[kind]}
    chosen = arguments(folder / "run", **args)
    model = LlamaForCausalLM.from_pretrained(base)  # under ZeRO 3 in parts, because the arguments are there
    trainer = Trainer(model, chosen, pad, token_rows(20), token_rows(13, seed=5))
    trainer.train()
    found: dict[str, Any] = {
        "log": [{name: value for name, value in line.items() if name != "total_flos"} for line in history(trainer)]
    }
    for count in LENGTHS:
        predicted = trainer.predict(token_rows(count, seed=6))
        found[f"loss of {count}"] = predicted.metrics["test_loss"]
        found[f"labels of {count}"] = predicted.label_ids.tolist()
        found[f"predictions of {count}"] = predicted.predictions.sum(-1).tolist()
    trainer.save_model(str(folder / "saved"))
    if kind != "deepspeed":
        # The third step has 3 micro-batches of 2 rows: one process has fewer than the other.
        halves = {
            "per_device_train_batch_size": args["per_device_train_batch_size"] // 2,
            "gradient_accumulation_steps": 2,
        }
        further = arguments(folder / "stream", **{**args, **halves, "eval_strategy": "no"})
        streamed = Trainer(LlamaForCausalLM.from_pretrained(base), further, train_dataset=Stream())
        streamed.train()
        found["streamed"] = [line["loss"] for line in history(streamed) if "loss" in line]
        found["rows_by_flos"] = streamed.state.total_flos / 72 / streamed.model.num_parameters(exclude_embeddings=True)
    if trainer.is_world_process_zero():
        for name in ("saved", "run/model"):
            saved = LlamaForCausalLM.from_pretrained(folder / name)
            found[name] = [float(weight.double().sum()) for weight in saved.state_dict().values()]
        (folder / "result.json").write_text(json.dumps(found))
    end_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
