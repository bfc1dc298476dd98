"""`split_head.py FOLDER`, in several processes: the loss of language models whose output layer they split, in chunks
and whole.

`FOLDER/rank-R.json` has for each case the errors of both against one process in fp64, and what each of them made.
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from accel_train.model.kernels import chunked_loss
from accel_train.parallel.tensor_parallel import keep_gradients_in_parts, split_layers
from accel_train.runtime.private import watch_operators
from accel_train.tasks.causal_lm.task import CausalLM, next_token_logits
from tests.support.hf_models import small_config

VOCABULARY, CHUNK = 211, 8
"""Tokens, which no number of processes divides, and positions at a time."""
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"model_type": "phi"},
    "smoothed and checkpointed": {"smoothing": 0.1, "checkpointed": True},
    "frozen head": {"frozen": "lm_head"},
    "frozen body": {"frozen": "model"},
    "all ignored": {"num_ignored": 24},
    "bf16": {"dtype": torch.bfloat16},
}


def main(folder: Path) -> None:
    """Compute every case."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    chunked_loss.LOGITS_AT_ONCE = CHUNK * -(-VOCABULARY // mesh.size())
    found = {name: compare(mesh, **case) for name, case in CASES.items()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compare(
    mesh: Any,
    *,
    model_type: str = "llama",
    smoothing: float = 0.0,
    frozen: str | None = None,
    checkpointed: bool = False,
    num_ignored: int = 5,
    dtype: torch.dtype = torch.float32,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """What becomes of one model's loss, gradients and hits."""
    config = small_config(model_type)
    config.vocab_size, config.tie_word_embeddings = VOCABULARY, tie_word_embeddings
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()
    if model_type == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    with torch.no_grad():  # two tokens in different shares, likely and alike: the first counts
        model.lm_head.weight[3] *= 4
        model.lm_head.weight[VOCABULARY - 1] = model.lm_head.weight[3]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(f"{frozen}."))
    model = model.to(dtype)
    batch = batch_of(num_ignored)
    exact = _values(copy.deepcopy(model).double(), batch, smoothing, chunked=None)
    if checkpointed:
        model.activation_checkpointing_enable()
    split_layers(model, mesh)
    keep_gradients_in_parts(model)
    ours, whole = (_values(model, batch, smoothing, chunked=chunked) for chunked in (True, False))
    names = [name for name in exact if name not in ("widest", "num_hits")]
    return {
        "widest": [ours["widest"], whole["widest"]],
        "num_hits": [each["num_hits"] for each in (ours, whole, exact)],
        "has_all_gradients": [list(each) == list(exact) for each in (ours, whole)],
        "errors": {name: [error(each[name], exact[name]) for each in (ours, whole)] for name in names},
    }


def batch_of(num_ignored: int) -> dict[str, Tensor]:
    """48 positions; every other label is the first of the two likely tokens."""
    ids = torch.randint(1, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[:, ::2] = 3
    labels[:, :num_ignored] = -100
    return {"input_ids": ids, "labels": labels}


def _values(
    model: PreTrainedModel, batch: dict[str, Tensor], smoothing: float, *, chunked: bool | None
) -> dict[str, Any]:
    """Loss, gradients and counts by name; None: of whole logits in fp64."""
    task: CausalLM = InFp64() if chunked is None else CausalLM()
    task.chunked, task.label_smoothing, task.counts_hits = bool(chunked), smoothing, True
    model.zero_grad()
    found: dict[str, Any] = {}
    with watch_operators(widest := _Widest(model)):
        loss = task.loss_sum(model.train(), batch)
        (loss * 0.37).backward()
        with torch.no_grad():
            counts = task.evaluate_batch(model.eval(), batch)
    found["loss"], found["widest"] = whole_of(loss), widest.rows
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = whole_of(parameter.grad)
    found["loss of evaluation"], found["num_hits"] = whole_of(counts["loss_sum"]), int(counts["num_hits"])
    return found


class InFp64(CausalLM):
    """Nothing is rounded to fp32."""

    def loss_sum(self, model: Any, batch: Any) -> Tensor:
        logits = next_token_logits(model, batch).flatten(0, 1)
        smoothing = self.label_smoothing if model.training else 0.0
        return cross_entropy(logits, batch["labels"].flatten(), reduction="sum", label_smoothing=smoothing)

    def evaluate_batch(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {**super().evaluate_batch(model, batch), "loss_sum": self.loss_sum(model, batch)}


class _Widest:
    """The most positions whose logits a process made at once, of its share of the vocabulary or of all of it."""

    rows = 0

    def __init__(self, model: PreTrainedModel) -> None:
        weight = model.lm_head.weight
        self._weight = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()

    def __call__(self, arguments: Any, result: Any) -> None:
        if not isinstance(result, Tensor) or isinstance(result, DTensor) or result.dim() == 0:
            return
        is_wide = result.shape[-1] in (len(self._weight), VOCABULARY)
        if is_wide and result.data_ptr() != self._weight.data_ptr():  # which is transposed to be multiplied with
            self.rows = max(self.rows, result.shape[:-1].numel())


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor that all processes hold together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm of what is exact."""
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
