"""A run in one process imports what it uses: a restart is mostly imports."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.runs import environment

NEVER = ("bitsandbytes", "matplotlib", "onnx", "optuna", "pandas", "peft", "schedulefree", "sklearn", "trl")
"""Packages that none of the runs uses."""
OF_MODELS = ("scipy", "torchao", "transformers.modeling_utils", "transformers.quantizers")
"""Modules that come with any model of transformers, and cost more than a second together."""
PROGRAM = f"""
import json, sys
from accel_train import Recipe, fit, train

def imported(names):
    return [name for name in names if name in sys.modules]

found = []
import torch
data = [(torch.full((4,), i / 64), torch.zeros(1)) for i in range(64)]
loss = lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(dim=1)
fit(torch.nn.Linear(4, 1), data, loss=loss, output_dir="fit", max_steps=2, log={{"progress": False}})
found.append(imported({NEVER + OF_MODELS}))
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps({{"text": f"text {{i}}", "label": "ab"[i % 2]}}) + chr(10) for i in range(64))
shared = dict(schedule={{"max_steps": 2}}, batch={{"global_batch_size": 4}}, tokenizer="bytes")
gpt = {{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}}
bert = {{"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}}
text = {{"train": "rows.jsonl", "sequence_length": 16, "cache_dir": "cache"}}
train(Recipe(task="causal-lm", output_dir="gpt", model={{"config": gpt}}, data=text, **shared))
found.append(imported({NEVER}))
rows = {{"train": "rows.jsonl", "eval_fraction": 0}}
train(Recipe(task="text-classification", output_dir="bert", model={{"config": bert}}, data=rows, **shared))
found.append(imported({NEVER}))
print(json.dumps(found))
"""


def test_a_run_in_one_process_imports_no_package_that_it_does_not_use(tmp_path: Path) -> None:
    call = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(call, cwd=tmp_path, env=environment(), check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[], [], []]
