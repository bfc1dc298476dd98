"""What a plan says of several processes, beside what real ones hold and send."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from accel_train.plan.plan import Plan, resolve_plan
from tests.support.plan_recipe import parts_of
from tests.support.processes import run_forked
from tests.support.runs import TINY_MODEL, Settings, tiny_recipe, write_corpus, write_recipe_file

pytestmark = pytest.mark.usefixtures("without_cuda")
STEPS = 3
MODEL = {**TINY_MODEL, "n_layer": 3, "n_embd": 48, "n_head": 3}  # 48 rows: whole for 2 and 4 processes


SPLIT = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def run_and_plan(
    folder: Path, world_size: int, optimizer: str = "adamw", precision: str = "no", **parallel: Any
) -> tuple[list[dict[str, Any]], Plan]:
    """What each of the processes held and sent, and the plan of the same run."""
    write_corpus(folder)
    sections: Settings = {
        "task": "tests.support.tasks.memory_census:HeldTask",
        "model": {"config": SPLIT if {"tp_size", "sp_size"} & parallel.keys() else MODEL},
        "parallel": parallel,
        "schedule": {"max_steps": STEPS},
        "batch": {
            "global_batch_size": 16,
            "per_device_batch_size": 16 // (world_size // parallel.get("tp_size", parallel.get("sp_size", 1))) // 2,
        },
        "guard": {"drift_check_steps": 0},
        "optimizer": {"name": optimizer},
        "precision": {"mixed_precision": precision},
        "options": {"held": str(folder), "calls_a_step": 2 if optimizer == "muon" else 1},  # AdamW's is another
    }
    run_forked(["run", str(write_recipe_file(folder, **sections))], world_size, folder=folder / "out").wait()
    sections["options"]["planned"] = True
    plan = resolve_plan(tiny_recipe(folder, **sections), world_size)
    return [json.loads((folder / f"held-{rank}.json").read_text()) for rank in range(world_size)], plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, parallel",
    [
        (2, {"strategy": "fsdp2"}),
        (2, {"strategy": "fsdp2", "precision": "bf16"}),
        (2, {"strategy": "fsdp2", "optimizer": "muon"}),
        (4, {"strategy": "fsdp2", "optimizer": "muon", "dp_shard_size": 2}),
        (4, {"strategy": "fsdp2", "optimizer": "muon", "tp_size": 2}),
        (2, {"optimizer": "muon"}),
        (4, {"optimizer": "muon"}),
        (4, {"strategy": "fsdp2"}),
        (4, {"strategy": "fsdp2", "dp_shard_size": 2, "reshard_after_forward": False}),
        (2, {"strategy": "fsdp2", "tp_size": 2}),
        (4, {"strategy": "fsdp2", "tp_size": 2}),
        (2, {"strategy": "fsdp2", "sp_size": 2}),
        (4, {"strategy": "fsdp2", "sp_size": 2}),
    ],
)
def test_a_process_holds_and_sends_what_the_plan_says(tmp_path: Path, world_size: int, parallel: Settings) -> None:
    held, plan = run_and_plan(tmp_path, world_size, **parallel)
    planned = parts_of(plan)
    if parallel.get("optimizer") == "muon" and "strategy" in parallel:
        # Whole matrices arrive, at each process of other sizes.
        mean = sum(each["sent"]["all-to-all"] for each in held) / world_size
        held = [{**each, "sent": {**each["sent"], "all-to-all": mean}} for each in held]
    for each in held:
        for name in ("parameters", "gradients", "optimizer"):
            assert each[name] == pytest.approx(planned[name], rel=0.1)
        payloads: dict[str, int] = {}
        for traffic in plan.scale.traffic:
            payloads[traffic.kind] = payloads.get(traffic.kind, 0) + traffic.payload_bytes
        assert each["sent"] == payloads


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sends_what_the_plan_says(corpus: Path, stage: int) -> None:
    """Small and large weights, and two micro-batches a step, which some collectives are of."""
    sections: Settings = {
        "task": "tests.support.tasks.memory_census:HeldTask",
        "model": {"config": {**TINY_MODEL, "n_embd": 160, "n_head": 4}},
        "parallel": {"strategy": "deepspeed", "zero_stage": stage},
        "schedule": {"max_steps": STEPS},
        "batch": {"global_batch_size": 8, "per_device_batch_size": 2},
        "options": {"held": str(corpus), "calls_a_step": 2 if stage == 3 else 1},
    }
    forked = run_forked(["run", str(write_recipe_file(corpus, **sections))], 2, folder=corpus / "out")
    forked.expect(0)
    sections["options"]["planned"] = True
    plan = resolve_plan(tiny_recipe(corpus, **sections), 2)
    planned = Counter[str]()
    for traffic in plan.scale.traffic:
        planned[traffic.kind] += traffic.payload_bytes
    for rank in range(2):
        assert json.loads((corpus / f"held-{rank}.json").read_text())["sent"] == planned
