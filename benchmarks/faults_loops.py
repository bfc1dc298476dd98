"""One training run of faults.py in one process: accel_train, transformers.Trainer or an Accelerate loop, with injected
faults.

    python -m benchmarks.faults_loops SYSTEM '{"folder": ..., "tokens": ..., ...}'

The two peers are set up as their documentation shows it: once with their defaults, and once with the flags that help
most against these faults (HF_FLAGS, ACCELERATE_FLAGS). All train the same GPT-2 on the same token file, in which the
first token of a sample is its number: so each forward can record which samples it saw.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import gpt2_fields, print_result

HF_FLAGS: dict[str, Any] = {"enable_jit_checkpoint": True, "logging_nan_inf_filter": False, "ignore_data_skip": False}
ACCELERATE_FLAGS: dict[str, Any] = {"use_seedable_sampler": True, "data_seed": 0}
BATCH, BLOCK, SAMPLES = 2, 16, 24
STEPS_PER_EPOCH = SAMPLES // BATCH


@dataclass(frozen=True)
class Job:
    """Settings of one run."""

    folder: str
    tokens: str
    tokenizer: str
    vocab: int
    steps: int = 24
    save_every_steps: int = 6
    resume: bool = False
    learning_rate: float = 1e-3
    dropout: float = 0.0
    width: int = 32
    step_seconds: float = 0.0
    """How long a step takes at least."""
    nan_at: int = 0
    """The forward (from 1) in which a sample of the batch brings a NaN; 0: none."""
    kill_at: int = 0
    """The forward in which the process kills itself (SIGKILL)."""
    full_from: int = 0
    """From this forward on no file can grow beyond 8 KB, as on a full disk."""
    record: str = "record.jsonl"

    def recorded(self) -> list[dict[str, Any]]:
        """What the forwards of a run wrote down: the samples of each, and its loss."""
        path = Path(self.folder) / self.record
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Faults:
    """What happens inside a forward, in all three systems: record it, and strike."""

    def __init__(self, job: Job) -> None:
        self.job, self.forwards = job, 0

    def factor(self) -> float:
        """What the loss of this forward is multiplied by, so that its gradients are; may not return."""
        self.forwards += 1
        if self.forwards == self.job.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.job.full_from and self.forwards >= self.job.full_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        time.sleep(self.job.step_seconds)
        return float("nan") if self.forwards == self.job.nan_at else 1.0

    def note(self, samples: Any, loss: float) -> None:
        """A line for this forward; a pipe to another file than the job's folder would be full with the disk, too."""
        line = json.dumps({"samples": [int(sample) for sample in samples], "loss": float(loss).hex()})
        file = Path(self.job.folder) / self.job.record
        if not (self.job.full_from and self.forwards >= self.job.full_from):
            with file.open("a") as out:
                out.write(line + "\n")


def model_fields(job: Job) -> dict[str, Any]:
    """Return the fields of a job's GPT-2."""
    return gpt2_fields(vocab=job.vocab, block=BLOCK, layers=2, heads=2, width=job.width, dropout=job.dropout)


def faulty_model(job: Job) -> Any:
    """A GPT-2 of transformers whose forwards go through `Faults`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    faults = Faults(job)

    class FaultyGPT2(GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            factor = faults.factor() if self.training else 1.0
            output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            if self.training:
                output.loss = output.loss * factor
                faults.note(input_ids[:, 0], float(output.loss.detach()))
            return output

    torch.manual_seed(0)
    return FaultyGPT2(GPT2Config(**model_fields(job)))


def samples_of(job: Job) -> Any:
    """The token file as a data set of `input_ids` and `labels`."""
    import numpy as np
    import torch
    from torch.utils.data import Dataset

    tokens = np.fromfile(job.tokens, dtype=np.uint16).astype(np.int64)

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = torch.from_numpy(tokens[index * BLOCK : (index + 1) * BLOCK])
            return {"input_ids": row, "labels": row.clone()}

    return Samples()


def train_hf_trainer(job: Job, **flags: Any) -> Mapping[str, Any]:
    """Train with transformers.Trainer; it resumes with `resume_from_checkpoint=True`, as its documentation says."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=job.folder,
        per_device_train_batch_size=BATCH,
        max_steps=job.steps,
        learning_rate=job.learning_rate,
        save_steps=job.save_every_steps,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **flags,
    )
    trainer = Trainer(model=faulty_model(job), args=arguments, train_dataset=samples_of(job))
    trainer.train(resume_from_checkpoint=True if job.resume else None)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": trainer.model.state_dict(), "logged": logged}


def train_accelerate(job: Job, **flags: Any) -> Mapping[str, Any]:
    """Train with the loop of Accelerate's documentation and example `checkpointing.py`: save_state, load_state,
    skip_first_batches.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**flags))
    model = faulty_model(job).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    loader: Any = DataLoader(samples_of(job), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, logged = 0, []
    if job.resume:
        newest = max(Path(job.folder).glob("step_*"), key=lambda path: path.stat().st_ctime)
        accelerator.load_state(str(newest))
        step = int(newest.name.removeprefix("step_"))
    for epoch in range(step // STEPS_PER_EPOCH, -(-job.steps // STEPS_PER_EPOCH)):
        done = step - epoch * STEPS_PER_EPOCH
        if flags:
            loader.set_epoch(epoch)  # for its seedable sampler
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            logged.append(loss.item())
            step += 1
            if step % job.save_every_steps == 0:
                accelerator.save_state(str(Path(job.folder) / f"step_{step}"))
    return {"weights": accelerator.unwrap_model(model).state_dict(), "logged": logged}


def train_accel_train(job: Job) -> Mapping[str, Any]:
    """Train with accel_train as a user starts it; it finds the run to resume by itself."""
    import yaml
    from safetensors.torch import load_file

    from accel_train.cli.main import main

    folder = Path(job.folder)
    recipe = {
        "task": "benchmarks.faults_task:FaultyText",
        "output_dir": str(folder / "run"),
        "model": {"config": {"model_type": "gpt2", **model_fields(job)}, "pad_vocab_to_multiple_of": 0},
        "tokenizer": job.tokenizer,
        "data": {"train": job.tokens, "eval_fraction": 0, "sequence_length": BLOCK, "cache_dir": str(folder / "cache")},
        "batch": {"global_batch_size": BATCH},
        "optimizer": {"learning_rate": job.learning_rate},
        "schedule": {"max_steps": job.steps},
        "checkpoint": {"every_steps": job.save_every_steps},
        "evaluate": {"every_steps": 0},
        "log": {"every_steps": 1, "progress": False},
        "options": {"job": asdict(job)},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    code = main(["run", str(path)])
    if code:
        sys.exit(code)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [str(line["loss"]) for line in lines if line["split"] == "train"]
    return {"weights": load_file(folder / "run" / "model" / "model.safetensors"), "logged": logged}


SYSTEMS: dict[str, Callable[[Job], Mapping[str, Any]]] = {
    "accel_train": train_accel_train,
    "hf_trainer": train_hf_trainer,
    "hf_trainer, flags": partial(train_hf_trainer, **HF_FLAGS),
    "accelerate": train_accelerate,
    "accelerate, flags": partial(train_accelerate, **ACCELERATE_FLAGS),
}


def main() -> None:
    import torch

    system, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    found = SYSTEMS[system](job)
    weights = {name: tensor.contiguous() for name, tensor in sorted(found["weights"].items())}
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights.values())).hexdigest()
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in weights.values() if tensor.is_floating_point())
    print_result(
        {"weights_finite": finite, "weights_sha256": digest, "logged": [str(loss) for loss in found["logged"]]}
    )


if __name__ == "__main__":
    main()
