"""The CPU time of a restart to the next step, as a ratio to the imports of torch, transformers, and the model's class.

    python -m benchmarks.restart [--rounds 3]

Each round runs every program once, in turn, so that other load on the machine affects all of them alike. An optimizer
is part of the comparison, because torch imports its compiler with the first one.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
PLAIN = "import torch, transformers; from transformers import AutoModelForCausalLM, GPT2LMHeadModel\n"
OPTIMIZER = "torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])\n"
FIT = """
import torch
from accel_train import fit
data = [(torch.full((4,), i / 64), torch.zeros(1)) for i in range(64)]
loss = lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(dim=1)
fit(torch.nn.Linear(4, 1), data, loss=loss, output_dir="fit", max_steps=2, resume="never", log={"progress": False})
"""
RUN = f"""
from accel_train import Recipe, train
data = {{"train": "corpus.txt", "sequence_length": 16, "cache_dir": "cache"}}
train(Recipe(task="causal-lm", output_dir="run", model={{"config": {MODEL}}}, data=data, schedule={{"max_steps": 2}},
    batch={{"global_batch_size": 4}}, checkpoint={{"resume": "never"}}, log={{"progress": False}}))
"""
PROGRAMS = {
    "torch": "import torch\n",
    "torch with an optimizer": f"import torch\n{OPTIMIZER}",
    "plain": PLAIN,
    "plain with an optimizer": PLAIN + OPTIMIZER,
    "fit": FIT,
    "run": RUN,
}


def cpu_seconds(program: str, folder: Path) -> float:
    """Return the CPU seconds of a Python program, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the median CPU seconds of each program, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus.txt").write_text("\n\n".join(f"the cat number {i} sleeps" for i in range(400)))
        for _ in range(rounds):
            for name, program in PROGRAMS.items():
                found[name].append(cpu_seconds(program, Path(folder)))
    seconds = {name: round(statistics.median(each), 2) for name, each in found.items()}
    ratios = {
        "run to plain with an optimizer": round(seconds["run"] / seconds["plain with an optimizer"], 2),
        "fit to torch with an optimizer": round(seconds["fit"] / seconds["torch with an optimizer"], 2),
    }
    print(json.dumps({"cpu_seconds": seconds, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
