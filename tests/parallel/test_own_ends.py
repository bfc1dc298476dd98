"""FSDP2 with the embedding and the head as groups of their own: the bits of one root group, for every checked model."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_train.model.kernels.chunked_loss import num_parts, why_whole
from accel_train.model.lora import add_adapters
from accel_train.model.weights import group_weights, separate_ends
from accel_train.recipe.schema import LoRA
from tests.model.kernels.test_chunked_loss import CHECKED_TYPES, model_of
from tests.support.marks import slow
from tests.support.processes import TESTS, run_forked
from tests.support.runs import Settings

PROGRAM = TESTS / "support/programs/own_ends.py"
QUICK: dict[str, Settings] = {
    "chunked": {"chunked": True, "generates": True},
    "unused": {"unused": True},
    "gathered before the update": {"computes_between": True},
}
CASES: dict[str, Settings] = {
    "tied": {"tied": True, "chunked": True},
    "frozen embedding": {"frozen": "embed_tokens"},
    "frozen head": {"frozen": "lm_head", "chunked": True},
    "frozen norm": {"frozen": "model.norm"},
    "adapters": {"lora": True, "chunked": True},
    "bf16": {"precision": "bf16"},
    "bf16 and layer norm": {"model_type": "gpt2", "precision": "bf16", "chunked": True},
    "checkpointed": {"checkpointed": True},
    "kept": {"reshard_after_forward": False},
    "a head with a bias": {"model_type": "phi", "chunked": True},
    **{each: {"model_type": each} for each in CHECKED_TYPES},
}
ON_FOUR: dict[str, Settings] = {
    **QUICK,
    "bf16": {"precision": "bf16"},
    "copies": {"dp_shard_size": 2, "computes_between": True},
    "copies and unused": {"dp_shard_size": 2, "unused": True},
    "split": {"tp_size": 2},
    "split and chunked": {"tp_size": 2, "chunked": True, "checkpointed": True},
    "split in bf16": {"tp_size": 2, "precision": "bf16"},
}
IN_ROOT = ("tied", "opt", "gemma")
"""Cases whose root group has the ends: tied weights, and a norm that is not where other models have it."""


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, QUICK), slow(2, CASES), slow(4, ON_FOUR)],
    ids=["quick", "two", "four"],
)
def test_losses_gradients_norms_and_weights_are_those_of_one_root_group_to_the_bit(
    tmp_path: Path, processes: int, cases: dict[str, Settings]
) -> None:
    arguments = [str(tmp_path), json.dumps(cases)]
    forked = run_forked(arguments, processes, folder=tmp_path / "out", program=PROGRAM, timeout_seconds=400)
    forked.expect(0, 400)
    # FSDP2 warns of blocks that return a view, such as OPT's.
    assert not re.findall(r"FSDPEmbedding\) returned|FSDPLinear\) returned", forked.stderr(0))
    for rank in range(processes):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found.keys() == cases.keys()
        for case, seen in found.items():
            assert seen["different"] is None, (case, seen["different"])
            # Two blocks and the root.
            assert seen["groups"] == [3 if case in IN_ROOT else 5, 3], case
            assert seen["moved"], case
            assert seen["generates"] in (None, True), case
            names = {name.partition(" ")[2].partition(" ")[2] for name in seen["missing"]}
            skipped = names and {name for name in names if "layers.1." in name or name == "model.norm.weight"}
            assert names == skipped
            assert ("model.norm.weight" in names) == ("unused" in case), case


@pytest.mark.parametrize("model_type", CHECKED_TYPES)
def test_a_plan_has_the_weights_of_the_ends_and_keeps_their_order(model_type: str) -> None:
    model = model_of(model_type, tie_word_embeddings=False)
    ends, weights = separate_ends(model), group_weights(model)
    in_blocks = sum(block.numel for block in weights.blocks)
    outside = [each for name, each in model.named_parameters() if "layers." not in name and ".h." not in name]
    assert [each.numel for each in weights.root.weights] == [each.numel() for each in outside]
    assert in_blocks + weights.root.numel == sum(each.numel() for each in model.parameters())
    assert (ends is None) == (model_type in IN_ROOT)
    if ends is not None:
        embedding, head = weights.ends
        assert embedding.numel == ends.embedding.weight.numel()
        assert head.numel == sum(each.numel() for end in (ends.norm, ends.head) for each in end.parameters())
        assert embedding.numel + weights.rest.numel + head.numel == weights.root.numel
        # A norm that is not the one before the head would be called at another time.
        called: list[nn.Module] = []
        for end in (ends.embedding, ends.norm, ends.head):
            end.register_forward_hook(lambda module, *_: called.append(module))
        model(torch.zeros(1, 4, dtype=torch.long))
        assert called == [ends.embedding, ends.norm, ends.head]


def test_what_another_module_shares_or_an_adapter_replaces_stays_in_the_root() -> None:
    assert separate_ends(model_of("llama", tie_word_embeddings=True)) is None
    assert separate_ends(model_of("gemma2", tie_word_embeddings=False)) is None
    for target in ("embed_tokens", "lm_head"):
        adapted = model_of("llama", tie_word_embeddings=False)
        add_adapters(adapted, LoRA(rank=2, target_modules=[target]))
        assert separate_ends(adapted) is None
    shared = model_of("llama", tie_word_embeddings=False)
    shared.model.layers[1].input_layernorm.weight = shared.model.norm.weight
    assert separate_ends(shared) is None
    renormalized = model_of("llama", tie_word_embeddings=False)
    renormalized.model.embed_tokens.max_norm = 1.0
    assert separate_ends(renormalized) is None


def test_a_sharded_head_that_is_not_split_is_whole(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = model_of("llama", tie_word_embeddings=False)
        torch.distributed.fsdp.fully_shard([model.model.norm, model.lm_head])
        assert why_whole(model) is None
        assert num_parts(model.lm_head) == 1
    finally:
        torch.distributed.destroy_process_group()
