"""FSDP2 trains as one process: the same losses, the same guard, checkpoints for any layout."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_train.checkpoint.store import newest_valid, step_of
from accel_train.core.errors import SettingError
from accel_train.model.weights import gathers_two_types
from accel_train.parallel.fsdp2 import Fsdp2
from accel_train.recipe.parallel import Parallel
from tests.parallel.conftest import IMAGES, SHORT_STEPS, assert_same_norms, assert_skipped_to_the_bit, nan_at, train_in
from tests.support.comparisons import Train, assert_same_run
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import TINY_MODEL, Settings, events, losses, steps_of, write_corpus, write_recipe_file

FSDP2 = {"strategy": "fsdp2"}
CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TEXT = {
    "batch": {"global_batch_size": 12, "per_device_batch_size": 3},
    "schedule": {"max_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 5},
    "evaluate": {"every_steps": 4},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5, "ema_decay": 0.9},  # every gradient is clipped
    "options": {"ragged": True},
}


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (2, {}),
        slow(4, {}),
        slow(4, {"dp_shard_size": 2}),
        slow(2, {"reshard_after_forward": False}),
    ],
)
def test_losses_are_those_of_one_process_with_clipping_accumulation_and_averaged_weights(
    train: Train, undisturbed: Path, processes: int, parallel: Settings
) -> None:
    assert_same_norms(train("run", processes, parallel={**FSDP2, **parallel}, **TEXT), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"precision": {"gradient_checkpointing": True}},
        {"model": {"config": {**TINY_MODEL, "tie_word_embeddings": False}}},
        {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "model": {"lora": {"rank": 2}}},
    ],
    ids=["checkpointing", "untied", "adapters-and-sgd"],
)
def test_losses_are_those_of_ddp_however_the_model_is_changed(train: Train, sections: Settings) -> None:
    text = {name: section for name, section in TEXT.items() if name != "optimizer"}
    assert_same_run(train("sharded", 2, parallel=FSDP2, **text, **sections), train("ddp", 2, **text, **sections))


@pytest.mark.slow
@pytest.mark.parametrize("merge", [True, False])
def test_adapters_and_the_model_at_the_end_are_those_of_one_process(train: Train, merge: bool) -> None:
    text = {name: section for name, section in TEXT.items() if name != "optimizer"}
    lora = {"model": {"lora": {"rank": 2, "merge": merge}}}
    one, sharded = train("one", 1, **text, **lora), train("sharded", 2, parallel=FSDP2, **text, **lora)
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        ours, theirs = load_file(sharded / name), load_file(one / name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (sharded / "adapter/adapter_config.json").read_text() == (one / "adapter/adapter_config.json").read_text()


@pytest.mark.slow
def test_copies_are_summed_once_a_step_also_after_a_skipped_one_and_after_unused_groups(
    train: Train, undisturbed: Path
) -> None:
    copies = {**FSDP2, "dp_shard_size": 2}
    one_each = {**TEXT, "batch": {"global_batch_size": 12, "per_device_batch_size": 1}}
    assert_same_run(train("run", 4, parallel=copies, **one_each), undisturbed)
    run = train("skipped", 4, copies, batch={"global_batch_size": 8, "per_device_batch_size": 1}, **nan_at(7))
    assert_skipped_to_the_bit(run, 4)


@pytest.mark.slow
def test_selective_checkpointing_trains_as_none_under_ddp_and_fsdp2(train: Train) -> None:
    selective = {**TEXT, "precision": {"gradient_checkpointing": "selective"}}
    plain = train("plain", 2, **TEXT)
    assert_same_run(train("ddp", 2, **selective), plain, tolerance=0)
    assert_same_run(train("sharded", 2, parallel=FSDP2, **selective), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "task": "semantic-segmentation",
            "model": {
                "config": {
                    "model_type": "segformer",
                    "num_channels": 1,
                    "num_encoder_blocks": 2,
                    "depths": [1, 1],
                    "sr_ratios": [2, 1],
                    "hidden_sizes": [8, 16],
                    "patch_sizes": [3, 3],
                    "strides": [2, 2],
                    "num_attention_heads": [1, 2],
                    "mlp_ratios": [2, 2],
                    "decoder_hidden_size": 16,
                }
            },
            "data": {"train": "digit-scenes", "image_size": 32},
        },
        {
            "task": "text-classification",
            "model": {
                "config": {
                    "model_type": "bert",
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "intermediate_size": 32,
                    "max_position_embeddings": 64,
                }
            },
            "data": {"train": "stdlib-functions", "max_length": 32},
        },
    ],
    ids=["images", "segmentation", "texts"],
)
def test_every_task_trains_as_with_ddp_running_statistics_included(train: Train, sections: Settings) -> None:
    # Biases before a batch norm have gradients of rounding noise, which Adam makes steps of.
    sections = {**IMAGES, **sections}
    assert_same_run(train("sharded", 2, FSDP2, **sections), train("ddp", 2, **sections), 2e-5)


@pytest.mark.slow
def test_batch_norm_trains_in_bf16_as_with_ddp(train: Train) -> None:
    sections = {**IMAGES, "precision": {"mixed_precision": "bf16"}}
    assert_same_run(train("sharded", 2, parallel=FSDP2, **sections), train("ddp", 2, **sections), 2e-3)


@pytest.mark.slow
@pytest.mark.skipif(not gathers_two_types(), reason="torch 2.15 has it")
@pytest.mark.parametrize(
    ("config", "first"),
    [({}, 1e-7), (LLAMA, 1e-7), (MIXTRAL, 2e-5)],
    ids=["gpt2", "llama", "mixtral"],
)
def test_bf16_with_norms_embeddings_and_routers_in_fp32_trains_as_with_ddp(
    train: Train, config: Settings, first: float
) -> None:
    sections = {**TEXT, "precision": {"mixed_precision": "bf16"}, **({"model": {"config": config}} if config else {})}
    sharded, ddp = train("sharded", 2, parallel=FSDP2, **sections), train("ddp", 2, **sections)
    assert_same_run(sharded, ddp, 5e-5)
    assert losses(sharded)[1] == pytest.approx(losses(ddp)[1], rel=first)


@pytest.mark.slow
@pytest.mark.skipif(gathers_two_types(), reason="torch before 2.15 alone rounds norms and embeddings")
def test_bf16_is_further_from_fp32_than_under_ddp_by_what_the_run_says(train: Train) -> None:
    sections: Settings = {"schedule": {"max_steps": 20, "warmup_steps": 0}}
    bf16 = {"precision": {"mixed_precision": "bf16"}}
    exact = losses(train("fp32", 2, **sections))

    def error(run: Path) -> float:
        return sum(abs(loss / exact[step] - 1) for step, loss in losses(run).items()) / len(exact)

    ddp, sharded = train("ddp", 2, **sections, **bf16), train("sharded", 2, parallel=FSDP2, **sections, **bf16)
    assert 1.5 * error(ddp) < error(sharded) < 15 * error(ddp)
    assert error(sharded) < 1e-3
    said = [(run.parent / "processes" / "rank-0.out").read_text() for run in (ddp, sharded)]
    assert ["3 to 9 times" in each for each in said] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_short_steps_that_leave_processes_with_unequal_shares_hang_nobody(train: Train, processes: int) -> None:
    assert_same_run(train("sharded", processes, FSDP2, **SHORT_STEPS), train("one", 1, **SHORT_STEPS))


def test_nan_on_one_process_is_skipped_on_all_to_the_bit_and_the_incident_keeps_its_batch(train: Train) -> None:
    run = train("run", 2, FSDP2, **nan_at(4))
    assert_skipped_to_the_bit(run, 4)
    [incident] = (run / "incidents").iterdir()
    assert (incident / "batch-rank-1.safetensors").exists()
    assert not (incident / "batch-rank-0.safetensors").exists()
    assert "holds a shard" in (incident / "incident.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_part_is_named_and_the_checkpoint_before_used(train: Train, damage: str) -> None:
    run = train("run", 2, parallel=FSDP2, **TEXT)
    whole = losses(run)
    part = sorted((run / "checkpoints" / "step-00000008").glob("shard-00002-*"))[0]
    if damage == "flipped":
        content = bytearray(part.read_bytes())
        content[-5] ^= 1
        part.write_bytes(content)
    else:
        part.unlink()
    train("run", 2, parallel=FSDP2, **TEXT)
    [told] = events(run, "checkpoint_invalid")
    assert part.name in told["message"]
    assert steps_of(run, "resume") == [4]
    assert losses(run) == whole


@pytest.mark.slow
def test_a_part_that_cannot_be_written_costs_the_checkpoint_and_two_in_a_row_end_all_processes(tmp_path: Path) -> None:
    sections = {**TEXT, "options": {"file_limit": {"bytes": 50_000, "rank": 1}}, "checkpoint": {"every_steps": 2}}
    task = "tests.support.tasks.process_faults:FaultTask"
    train_in(tmp_path, 2, FSDP2, code=4, task=task, **sections)
    failed = [event["message"] for event in events(tmp_path / "run", "checkpoint_failed")]
    assert len(failed) == 2
    assert all("process 1: " in said and "File too large" in said for said in failed)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.faults
def test_killed_in_a_save_the_checkpoint_before_stands_and_the_run_is_the_same(train: Train, tmp_path: Path) -> None:
    sections = {
        **TEXT,
        "task": "tests.support.tasks.disk_faults:DiskTask",
        "parallel": FSDP2,
        "checkpoint": {"every_steps": 2, "keep": 2},
        "options": {"slow_fsync": 0.05},  # so that a look finds a save before it is over
    }
    folder = tmp_path / "run"
    folder.mkdir()
    write_corpus(folder)
    recipe = write_recipe_file(folder, **sections)
    root = folder / "run" / "checkpoints"
    newest = []
    for victim, number in ((0, 2), (1, 2), (1, 2), (0, 1)):  # who is killed, in the so-manieth save of a sitting
        forked = run_forked(["run", str(recipe)], 2, folder=folder / "processes")
        saves: set[str] = set()
        while len(saves) < number:
            assert None in forked.exit_codes(), forked.stderr(0)
            saves.update(aside.name for aside in root.glob(f".tmp-*-{forked.pids[0]}"))
        forked.kill(victim, signal.SIGKILL)
        forked.wait()
        valid, broken = newest_valid(root)
        assert broken == []
        newest.append(valid and step_of(valid))
    assert newest == [2, 4, 6, 6]
    undisturbed = train("undisturbed", 1, **{**sections, "options": {}, "parallel": {}})
    assert_same_run(train("run", 2, **sections), undisturbed)
    assert not list(root.glob(".tmp-*"))


@pytest.mark.slow
def test_no_process_holds_more_than_its_part_of_weights_gradients_and_moments(train: Train) -> None:
    run = train("run", 2, parallel=FSDP2, **TEXT)
    sizes = [path.stat().st_size for path in sorted((run / "checkpoints" / "step-00000008").glob("shard-*"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    section = Parallel(strategy="fsdp2", dp_shard_size=3)
    with pytest.raises(SettingError) as refused:
        Fsdp2.choose(section, 4, CPU)
    assert "4" in refused.value.problem.split()
    assert (refused.value.at, refused.value.remedy) == ("parallel.dp_shard_size=3", "Use 1, 2, 4 or auto")
    with pytest.raises(SettingError) as refused:
        Fsdp2.choose(Parallel(strategy="fsdp2", cpu_offload=True), 2, CPU)
    assert refused.value.settings == ("parallel.cpu_offload",)
    assert Fsdp2.choose(Parallel(strategy="fsdp2"), 1, CPU).value == 1
