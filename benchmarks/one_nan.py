"""Train one script with two trainers on 64 samples, one of which contains a NaN, and print what each did.

    python -m benchmarks.one_nan

The model has 10 parameters. Each trainer runs in its own process on the CPU, with its default settings.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import arguments_of, child_environment, markdown_table, print_result, run_child, show

TRAINERS = ("accel_train.Trainer", "transformers.Trainer")
BAD_SAMPLE = 17


def train(trainer: str, folder: Path) -> dict[str, Any]:
    """Train with the class TRAINER below FOLDER; return the weights' state, the logged losses, and the events."""
    import torch
    from torch import nn
    from transformers import TrainingArguments

    if trainer == "transformers.Trainer":
        from transformers import Trainer
    else:
        from accel_train import Trainer

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.linear(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = [{"x": torch.randn(4), "labels": index % 2} for index in range(64)]
    rows[BAD_SAMPLE]["x"][2] = float("nan")
    model = Net()
    arguments = TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=8, logging_steps=1, use_cpu=True
    )
    run = Trainer(model=model, args=arguments, train_dataset=rows)
    run.train()
    events = folder / "events.jsonl"
    return {
        "nan_weights": sum(int(weight.isnan().sum()) for weight in model.parameters()),
        "weights": sum(weight.numel() for weight in model.parameters()),
        "losses": [str(row["loss"]) for row in run.state.log_history if "loss" in row],
        "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
    }


def row(name: str, result: dict[str, Any]) -> list[str]:
    """Return the row of one trainer in the table."""
    skips = [event["message"] for event in result["events"] if event["event"] == "skip"]
    found = next(
        (text.partition("Deterministic: ")[2].partition(";")[0] for text in skips if "Deterministic" in text), ""
    )
    zeros = sum(float(loss) == 0 for loss in result["losses"])
    weights = f"{result['nan_weights']} of {result['weights']} are NaN"
    return [name, weights, f"{zeros} of {len(result['losses'])}", str(len(skips)), found or "no message"]


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--child":
        print_result(train(sys.argv[2], Path(sys.argv[3])))
        return
    given = arguments_of(__doc__).parse_args()
    environment = {**child_environment(1), "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        results = {
            name: run_child(
                "benchmarks.one_nan",
                ["--child", name, os.path.join(folder, name)],
                environment=environment,
                timeout_seconds=300,
            ).result
            for name in TRAINERS
        }
    headers = ["trainer (exit code 0)", "weights", "steps logged as loss 0", "steps skipped", "message"]
    table = markdown_table(headers, [row(*each) for each in results.items()], text={headers[0], headers[-1]})
    show([table], results, save=given.save, name="one_nan")


if __name__ == "__main__":
    main()
