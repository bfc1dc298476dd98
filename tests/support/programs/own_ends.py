"""`own_ends.py FOLDER CASE...`, in several processes: language models under FSDP2, with the embedding and the head as
groups of their own, and in the root group.

`FOLDER/rank-R.json` has for each case the number of groups, and the first number that differs (null if none does).
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from accel_train.data.batch_sizes import BatchSizes
from accel_train.guard.guard import Limits
from accel_train.model.activation_checkpointing import checkpoint_activations
from accel_train.model.kernels import chunked_loss
from accel_train.model.lora import add_adapters
from accel_train.model.training_module import TrainingModule
from accel_train.parallel import fsdp2
from accel_train.parallel.fsdp2 import Fsdp2, allow_sharding
from accel_train.parallel.precision import start_accelerator
from accel_train.parallel.strategies import open_strategy
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Guard, LoRA, Precision
from accel_train.runtime.process_group import start_processes
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.hf_models import small_config

STEPS, MICRO_BATCHES, POSITIONS = 3, 2, 24


class Unused(CausalLM):
    """Its loss reads the head of hidden states that neither the last block nor the last norm has computed."""

    def loss_sum(self, model: Any, batch: Any) -> Tensor:
        states = model.model(batch["input_ids"], output_hidden_states=True, use_cache=False).hidden_states
        return chunked_loss.summed_loss(model.lm_head(states[1]), batch["labels"])


def batch_of(step: int, micro_batch: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    ids = torch.randint(1, 60, (2, POSITIONS), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def train(
    *,
    apart: bool,
    model_type: str = "llama",
    chunked: bool = False,
    precision: str = "no",
    frozen: str = "",
    lora: bool = False,
    checkpointed: bool = False,
    unused: bool = False,
    tied: bool = False,
    generates: bool = False,
    computes_between: bool = False,
    **parallel: Any,
) -> dict[str, Any]:
    """Train a few steps; return every number of it, by name."""
    config, size = small_config(model_type), dist.get_world_size()
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    if lora:
        add_adapters(model, LoRA(rank=2))
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    if checkpointed:
        checkpoint_activations(model, Precision(gradient_checkpointing=True))
    whole = copy.deepcopy(model) if generates else None
    task = Unused() if unused else CausalLM()
    task.chunked = chunked
    strategy = open_strategy(Parallel(strategy="fsdp2", **parallel), size, torch.device("cpu"))
    allow_sharding(torch.device("cpu"))
    sizes = BatchSizes(2 * size * MICRO_BATCHES, 2, MICRO_BATCHES, 2, size, "")
    plugins = strategy.accelerator_arguments(size, precision)
    strategy.attach(start_accelerator(precision, Precision(), Guard(), sizes, torch.device("cpu"), plugins))
    inner = TrainingModule(model, task)
    own = fsdp2.separate_ends if apart else (lambda model: None)
    with mock.patch.object(fsdp2, "separate_ends", own):
        strategy.wrap(inner, lambda model: torch.optim.SGD(model.parameters(), 0.5), find_unused=unused)
    assert isinstance(strategy, Fsdp2)
    states = {id(each._get_fsdp_state()) for each in inner.modules() if isinstance(each, FSDPModule)}
    found: dict[str, Any] = {"groups": len(states)}
    rank = dist.get_rank() // parallel.get("tp_size", 1)
    for step in range(STEPS):
        inner.train()
        strategy.begin_step()
        for number in range(MICRO_BATCHES):
            with strategy.accumulating(number == MICRO_BATCHES - 1):
                loss = inner(batch_of(step, number, rank))
                loss.backward()
            found[f"loss {step}.{number}"] = loss.item()
        strategy.end_incomplete_reduction()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[f"gradient {step} {name}"] = whole_of(parameter.grad)
        # The weights gathered here are those before the update.
        if computes_between:
            with torch.no_grad():
                inner(batch_of(step, 9, rank))
                model.base_model(batch_of(step, 0, rank)["input_ids"])
        found[f"norm {step}"] = strategy.update_within(Limits(0.5), torch.ones(())).grad_norm.item()
        inner.eval()
        with torch.no_grad():
            found[f"evaluation {step}"] = inner(batch_of(step, 9, rank)).item()
    if whole is not None:
        found["text"] = model.generate(batch_of(0, 0, 0)["input_ids"][:, :4], max_new_tokens=8, do_sample=False)
    found |= {f"weight {name}": whole_of(each) for name, each in model.state_dict().items()}
    if whole is not None:
        with torch.no_grad():
            for name, each in whole.named_parameters():
                each.copy_(found[f"weight {name}"])
        expected = whole.eval().generate(batch_of(0, 0, 0)["input_ids"][:, :4], max_new_tokens=8, do_sample=False)
        found["generates"] = torch.equal(found.pop("text"), expected)
    return found


def whole_of(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else None if tensor is None else tensor.clone()


def compare(**case: Any) -> dict[str, Any]:
    ours = train(apart=True, **case)
    theirs = train(apart=False, **{**case, "generates": False, "computes_between": False})
    groups, generates = (ours.pop("groups"), theirs.pop("groups")), ours.pop("generates", None)
    assert ours.keys() == theirs.keys()
    different = None
    for name, mine in ours.items():
        other = theirs[name]
        same = torch.equal(mine, other) if isinstance(mine, Tensor) and isinstance(other, Tensor) else mine == other
        if not same and different is None:
            different = f"{name}: {mine} and {other}"
    missing = [name for name, each in ours.items() if each is None]
    moved = not isinstance(ours["loss 0.0"], Tensor) and ours["loss 0.0"] != ours["loss 2.0"]
    return {"groups": groups, "different": different, "generates": generates, "missing": missing, "moved": moved}


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    start_processes()
    chunked_loss.LOGITS_AT_ONCE = 64 * 20
    found = {name: compare(**case) for name, case in cases.items()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
