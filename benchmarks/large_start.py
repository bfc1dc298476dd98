"""Host memory and seconds until the first forward of a large model on two CPU processes.

    python -m benchmarks.large_start ddp|fsdp2 FOLDER [LAYERS] [pretrained]

The model starts from scratch and resumes. With `pretrained` it starts from files instead: with all weights trained, and
with adapters on weights in bf16. `whole` loads all weights in fp32 first, `parts` reads what a process needs.

With 16 layers the model has 0.95 billion weights. The folder takes 4 bytes a weight.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.training import build

FACTS = {"VmHWM": "peak", "RssAnon": "held"}
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "all": ({}, {}),
    "adapters": ({"lora": {"rank": 8}, "frozen_dtype": "bf16"}, {"mixed_precision": "bf16"}),
}
"""Sections `model` and `precision` of the starts from files."""


def facts() -> dict[str, float]:
    """Return this process's memory in GiB. Pages of files that are mapped count in `peak` alone."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 2**20 for key, name in FACTS.items()}


def bytes_read() -> int:
    """Return the bytes that this process has read by now, without mapped files."""
    return int(Path("/proc/self/io").read_text().split()[1])


class StartTask(CausalLM):
    """Language modelling that writes down a process's memory at its first forward; stops at the second step's."""

    calls = 0

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss."""
        self.calls += 1
        options, rank = self.options, os.environ.get("RANK", "0")
        if self.calls == 1:
            found = facts() | {
                "before": self.before,
                "to build": self.to_build,
                "seconds": time.time() - options["began"],
            }
            found["read"] = (bytes_read() - self.read_before) / 2**30
            Path(options["folder"], f"{options['kind']}-{rank}.json").write_text(json.dumps(found))
            if "whole" in options:
                dist.barrier()
                os._exit(0)
        if self.calls == 2 and rank == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss_sum(model, batch)

    def load_data(self, recipe, *, progress):  # type: ignore[no-untyped-def]
        """Keep the options, and begin to watch the memory."""
        self.options, self.read_before = recipe.options, bytes_read()
        self.most = self.before = facts()["held"]
        self.to_build = 0.0
        if self.options.get("whole"):
            vars(build)["check_plain_weights"] = _refuse
        threading.Thread(target=self.watch, daemon=True).start()
        return super().load_data(recipe, progress=progress)

    def flops_per_target(self, recipe, model):  # type: ignore[no-untyped-def]
        """Keep the most memory that was held until the model is wrapped."""
        self.to_build = self.most
        return super().flops_per_target(recipe, model)

    def watch(self) -> None:
        """Keep the most memory that this process has held."""
        while True:
            self.most = max(self.most, facts()["held"])
            time.sleep(0.02)


def _refuse(_: object) -> None:
    raise ValueError("it is measured")


def write_model(folder: Path, config: dict[str, object]) -> None:
    """Write a model of random weights in bf16, in files of 500 MB."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=32000, **config))
    model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="500MB")


def main(strategy: str, folder: Path, layers: int = 16, *, pretrained: bool = False) -> None:
    """Start and resume, or start from files; print GiB and seconds of each process."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("one two three four five\n" * 200)
    config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 16, "tie_word_embeddings": False, "max_position_embeddings": 128}
    recipe: dict[str, Any] = {
        "task": "benchmarks.large_start:StartTask", "output_dir": str(folder / "run"), "tokenizer": "bytes",
        "model": {"config": config, "pad_vocab_to_multiple_of": 32000}, "parallel": {"strategy": strategy},
        "data": {"train": str(folder / "text.txt"), "sequence_length": 16, "cache_dir": str(folder / "cache")},
        "batch": {"global_batch_size": 2}, "optimizer": {"name": "sgd", "learning_rate": 1e-3, "momentum": 0.0},
        "schedule": {"max_steps": 3}, "evaluate": {"every_steps": 0}, "guard": {"drift_check_steps": 0},
    }  # fmt: skip
    kinds = ["start", "resume"]
    if pretrained:
        write_model(folder / "model", config)
        kinds = [f"{kind}-{how}" for kind in KINDS for how in ("whole", "parts")]
    for kind in kinds:
        recipe["options"] = {"folder": str(folder), "kind": kind, "began": time.time()}
        if pretrained:
            model, precision = KINDS[kind.split("-")[0]]
            recipe["model"] = {"pretrained": str(folder / "model"), **model}
            recipe |= {"precision": precision, "output_dir": str(folder / kind)}
            recipe["options"]["whole"] = kind.endswith("whole")
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += ["-m", "accel_train", "run", str(folder / "recipe.yaml")]
        with (folder / f"{kind}.log").open("w") as log:
            subprocess.run(command, check=False, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for path in sorted(folder.glob(f"{kind}-*.json")):
            print(strategy, path.stem, {key: round(value, 2) for key, value in json.loads(path.read_text()).items()})


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[3:] if each != "pretrained"]
    main(sys.argv[1], Path(sys.argv[2]), *numbers, pretrained=sys.argv[-1] == "pretrained")
