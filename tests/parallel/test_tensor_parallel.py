"""Layers split over neighbouring processes train as on one: the same losses, samples counted once, checkpoints for any
layout.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig

from accel_train.cli.main import main
from accel_train.data.batch_sizes import resolve_batch
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.dims import across_machines
from accel_train.parallel.fsdp2 import Fsdp2
from accel_train.plan.format import format_plan
from accel_train.plan.place import choose_layout
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Batch, Recipe
from accel_train.task import load_task
from tests.support.comparisons import assert_loaded_to_the_bit, assert_same_bits, assert_same_run, tensors
from tests.support.processes import run_forked
from tests.support.runs import LLAMA as TINY_LLAMA
from tests.support.runs import events, metrics, recipe_dict, write_corpus, write_recipe_file

TP = {"strategy": "fsdp2", "tp_size": 2}
LLAMA = {**TINY_LLAMA, "vocab_size": 259}  # which two processes cannot divide, and four cannot
TEXT = {
    "model": {"config": LLAMA},
    "batch": {"global_batch_size": 12, "per_device_batch_size": 2},
    "schedule": {"max_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 5},
    "evaluate": {"every_steps": 4},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5, "ema_decay": 0.9},  # every gradient is clipped
}
Train = Callable[..., Path]
CPU = torch.device("cpu")


def train_in(folder: Path, processes: int, **sections: Any) -> Path:
    folder.mkdir()
    write_corpus(folder)
    options = {"ragged": True, "record": str(folder)}
    recipe = write_recipe_file(folder, **{**TEXT, "options": options, **sections})
    forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes")
    assert forked.wait() == [0] * processes, forked.stderr(0)
    return folder / "run"


def reads(run: Path, rank: int) -> list[int]:
    lines = (run.parent / f"rank-{rank}.jsonl").read_text().splitlines()
    return [index for line in lines for index in json.loads(line)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process."""
    return train_in(tmp_path_factory.mktemp("one") / "one", 1)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_process_and_neighbours_read_the_same_samples_once(
    tmp_path: Path, undisturbed: Path, processes: int
) -> None:
    run = train_in(tmp_path / "split", processes, parallel=TP)
    assert_same_run(run, undisturbed)
    ours, theirs = ([each["grad_norm"] for each in metrics(folder)] for folder in (run, undisturbed))
    assert ours == pytest.approx(theirs, rel=1e-5)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, undisturbed)]
    assert summaries[0]["num_targets"] == summaries[1]["num_targets"]
    assert summaries[0]["eval"]["num_targets"] == summaries[1]["eval"]["num_targets"]
    assert summaries[0]["parameters"] == summaries[1]["parameters"]
    assert summaries[0]["world_size"] == processes
    shares = [reads(run, rank) for rank in range(processes)]
    assert shares[0::2] == shares[1::2]
    assert sorted(index for share in shares[0::2] for index in share) == sorted(reads(undisturbed, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "processes"),
    [
        ({"tie_word_embeddings": True}, 4),
        ({"model_type": "qwen3", "head_dim": 8}, 2),  # norms of the heads, held by all, each seeing its own
        ({"model_type": "olmo2"}, 2),
        ({"model_type": "gpt_neox", "num_key_value_heads": None}, 2),
    ],
    ids=["tied", "qwen3", "olmo2", "gpt_neox"],
)
def test_every_kind_of_plan_gives_the_losses_of_one_process(
    tmp_path: Path, changed: dict[str, Any], processes: int
) -> None:
    config = {name: value for name, value in {**LLAMA, **changed}.items() if value is not None}
    sections = {"model": {"config": config}, "schedule": {"max_steps": 5}}
    runs = [train_in(tmp_path / str(n), n, parallel=parallel, **sections) for n, parallel in ((processes, TP), (1, {}))]
    assert_same_run(*runs)


@pytest.mark.slow
def test_with_checkpointing_and_16_bits_losses_are_near_those_of_one_process(tmp_path: Path) -> None:
    precision = {"mixed_precision": "bf16", "gradient_checkpointing": True}
    runs = [
        train_in(tmp_path / str(n), n, parallel=parallel, precision=precision) for n, parallel in ((4, TP), (1, {}))
    ]
    assert_same_run(*runs, tolerance=2e-3)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_nan_on_one_process_is_skipped_on_all_to_the_bit(train: Train, processes: int) -> None:
    sections = {
        **TEXT,
        "schedule": {"max_steps": 5, "warmup_steps": 0, "type": "constant"},
        "checkpoint": {"every_steps": 1, "keep": 10},
        "batch": {"global_batch_size": 4},
        "evaluate": {"every_steps": 0},
        "options": {"nan_at": {"step": 4, "rank": 1}},
    }
    run = train("run", processes, parallel=TP, **sections)
    for kind in ("model", "optimizer", "average"):
        assert_same_bits(tensors(run, 3, kind), tensors(run, 4, kind))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(tensors(run, 4, "model")[name], tensors(run, 5, "model")[name])
    assert [event["step"] for event in events(run, "skip")] == [4]
    [incident] = (run / "incidents").iterdir()
    assert "several processes compute each layer together" in (incident / "incident.md").read_text()
    kept = load_file(incident / "weights.safetensors")  # whole, so that one process can compute it again
    assert_same_bits({key: tensors(run, 4, "model")[key] for key in kept}, kept)


LAYOUTS = {"one": (1, {}), "ddp": (2, {}), "fsdp2": (2, {"strategy": "fsdp2"}), "tp": (2, TP), "fsdp2-tp": (4, TP)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp", "one"), ("one", "tp"), ("tp", "fsdp2"), ("fsdp2", "tp"), ("fsdp2-tp", "ddp"), ("ddp", "fsdp2-tp"),
        ("fsdp2-tp", "tp"), ("tp", "fsdp2-tp"), ("fsdp2-tp", "fsdp2"), ("fsdp2", "fsdp2-tp"),
    ],
)  # fmt: skip
def test_what_is_saved_under_one_layout_is_loaded_under_another_to_the_bit(
    train: Train,
    saved: str,
    loaded: str,
) -> None:
    text = {**TEXT, "optimizer": {"learning_rate": 3e-3}, "schedule": {"max_steps": 3}, "evaluate": {"every_steps": 0}}
    assert_loaded_to_the_bit(train, LAYOUTS[saved], LAYOUTS[loaded], 3, text)


@pytest.mark.slow
def test_stopped_and_gone_on_under_other_layouts_it_is_the_run_that_never_stopped(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder, done = tmp_path / "chain", 0
    folder.mkdir()
    write_corpus(folder)
    for name, stop in (("tp", 1), ("fsdp2-tp", 4), ("fsdp2", None)):
        processes, parallel = LAYOUTS[name]
        options: dict[str, Any] = {"ragged": True, "first_step": done}
        if stop is not None:
            options["term_at"] = {"step": stop, "rank": processes - 1}
        sections = {**TEXT, "batch": {"global_batch_size": 12}, "parallel": parallel, "options": options}
        recipe = write_recipe_file(folder, **sections)
        forked = run_forked(["run", str(recipe)], processes, folder=folder / name)
        assert forked.wait() == [0 if stop is None else 75] * processes, (name, forked.stderr(0))
        done = 8 if stop is None else events(folder / "run", "preempted")[-1]["step"]
    assert len(events(folder / "run", "resume")) == 2
    assert_same_run(folder / "run", undisturbed)


# --- what is refused, and told, before a model is built
# ----------------------------------------------------------------

CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64},
    "mixtral": {**LLAMA, "model_type": "mixtral"},
    "three heads": {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
    "one pair": {**LLAMA, "num_key_value_heads": 1},
}


@pytest.mark.parametrize(
    ("sections", "fault", "remedy"),
    [
        ({"model": {"config": CONFIGS["gpt2"]}}, "no plan of how to split gpt2", "llama, mistral"),
        ({"model": {"config": CONFIGS["mixtral"]}}, "the plan of mixtral splits layers by", "tp_size to 1"),
        (
            {"model": {"config": CONFIGS["three heads"]}},
            "does not divide the 3 num_attention_heads of llama",
            "use 1, 3",
        ),
        ({"model": {"config": CONFIGS["one pair"]}}, "does not divide the 1 num_key_value_heads", "use 1"),
        (
            {"precision": {"compile": True}},
            "does not go with precision.compile: split layers swap their weights",
            "leave one of them out",
        ),
        (
            {"model": {"config": LLAMA, "lora": {"rank": 2}}},
            "does not go with model.lora: adapters are plain tensors, which cannot be multiplied",
            "leave one of them out",
        ),
        ({"parallel": {**TP, "cpu_offload": True}}, "does not go with parallel.cpu_offload", "leave one of them out"),
        ({"task": "image-classification"}, "is for causal-lm", "set it to 1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason_and_a_remedy(
    sections: dict[str, Any], fault: str, remedy: str
) -> None:
    recipe = recipe_dict(
        Path("somewhere"), **{"task": "causal-lm", "model": {"config": LLAMA}, "parallel": TP, **sections}
    )
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        check_compatibility(Recipe.model_validate(recipe), load_task(recipe["task"]))
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "model_type", "fault"),
    [
        ({"tp_size": 2}, "llama", "parallel.tp_size=2 needs parallel.strategy fsdp2, not ddp"),
        ({**TP, "tp_size": 4}, "llama", "parallel.tp_size=4 does not divide the 2 processes of this run"),
        (
            {**TP, "dp_shard_size": 2},
            "llama",
            "parallel.dp_shard_size=2 x parallel.tp_size=2 is not the number of processes, 2",
        ),
        (TP, "gpt2", "no plan of how to split gpt2"),
    ],
)
def test_run_and_plan_end_with_code_2_and_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: dict[str, Any], model_type: str, fault: str
) -> None:
    write_corpus(tmp_path)
    config = CONFIGS["gpt2"] if model_type == "gpt2" else {**LLAMA, "num_key_value_heads": 4}
    recipe = write_recipe_file(tmp_path, task="causal-lm", parallel=parallel, model={"config": config})
    assert main(["plan", str(recipe), "--world-size", "2"]) == 2
    assert fault in capsys.readouterr().err
    if model_type == "llama":
        return  # by the same functions
    forked = run_forked(["run", str(recipe)], 2, folder=tmp_path / "processes")
    assert forked.wait() == [2, 2]
    assert fault in forked.stderr(0)
    assert not (tmp_path / "run").exists()


def test_a_model_of_ones_own_task_without_a_plan_is_refused_before_it_has_weights(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = Recipe.model_validate(recipe_dict(tmp_path, parallel=TP))  # the probe task, with a GPT-2
    with pytest.raises(ValueError, match="no plan of how to split gpt2"):
        resolve_plan(recipe, 2)


def test_one_weight_that_is_split_under_one_name_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(GPTNeoXConfig.base_model_tp_plan, "embed_in", raising=False)  # as before transformers 5.24
    write_corpus(tmp_path)
    config = {**LLAMA, "model_type": "gpt_neox", "tie_word_embeddings": True}
    del config["num_key_value_heads"]
    recipe = recipe_dict(tmp_path, task="causal-lm", parallel=TP, model={"config": config})
    with pytest.raises(ValueError, match="are one weight, and the plan of gpt_neox splits only one of them"):
        resolve_plan(Recipe.model_validate(recipe), 2)


def test_neighbours_share_samples_so_fewer_processes_divide_the_global_batch() -> None:
    sizes = resolve_batch(Batch(global_batch_size=12, per_device_batch_size=2), 6, 2)
    assert (sizes.world_size, sizes.gradient_accumulation_steps) == (3, 2)
    assert sizes.reason == (
        "12 = 2 per device x 2 accumulation x 3 processes, each with 1 more that reads the same samples "
        "(parallel.tp_size)"
    )
    assert resolve_batch(Batch(global_batch_size=12), 6) == resolve_batch(Batch(global_batch_size=12), 6, 1)


def test_layout_counts_groups_of_neighbours() -> None:
    layout = choose_layout(Parallel(**TP), 16, "cuda")
    assert (layout.shard_size, layout.tp_size, layout.num_copies) == (8, 2, 1)
    choice = Fsdp2.choose(Parallel(**TP), 2, CPU)
    assert choice.value == 1
    assert "fsdp2" not in choice.reason


def test_neighbours_on_several_machines_are_told_of(tmp_path: Path) -> None:
    assert across_machines(Parallel(strategy="fsdp2", tp_size=8), 8) is None
    told = across_machines(Parallel(strategy="fsdp2", tp_size=8), 4)
    assert told is not None
    assert "reaches over machines of 4 processes" in told
    write_corpus(tmp_path)
    config = {**LLAMA, "num_attention_heads": 16, "num_key_value_heads": 16}
    sections = {"parallel": {"strategy": "fsdp2", "tp_size": 16}, "model": {"config": config}, "task": "causal-lm"}
    plan = resolve_plan(Recipe.model_validate(recipe_dict(tmp_path, **sections)), 16, "H100")
    assert "reaches over machines of 8 processes" in format_plan(plan)
