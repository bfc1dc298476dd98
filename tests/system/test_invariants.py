"""The promises, held with real processes: the same run on any number of them, after any kill,
whatever a batch holds.
"""

import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.comparisons import assert_same_bits, assert_same_bits_of_runs
from tests.support.marks import slow
from tests.support.runs import (
    TINY_MODEL,
    assert_saved_at_the_stop,
    checkpoint,
    command,
    environment,
    event_steps,
    events,
    losses,
    metrics,
    ran,
    recipe_dict,
    run,
    samples_by_step,
    train_recipe,
    wait_for_step,
    write_recipe_file,
)
from tests.support.wording import assert_golden

WITH_DROPOUT = {**TINY_MODEL, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.mark.slow
def test_world_size_and_accumulation_change_neither_losses_nor_samples(corpus: Path) -> None:
    cuts = {"1x32": (1, 32), "4x8": (1, 8), "8x4": (1, 4), "2 processes": (2, 16), "4 processes": (4, 2)}
    traces, samples = {}, {}
    for name, (processes, per_device) in cuts.items():
        reads = corpus / f"reads {name}"
        reads.mkdir()
        recipe = recipe_dict(
            corpus,
            output_dir=str(corpus / f"run {name}"),
            batch={"global_batch_size": 32, "per_device_batch_size": per_device},
            schedule={"max_steps": 15, "warmup_steps": 2},
            options={"ragged": True, "record": str(reads)},
        )
        train_recipe(recipe, processes)
        traces[name] = losses(corpus / f"run {name}")
        samples[name] = samples_by_step(reads, processes, 32)[:15]
    reference = traces["1x32"]
    assert len({round(loss, 2) for loss in reference.values()}) > 5, "the losses do not move, so nothing is compared"
    for name in cuts:
        assert samples[name] == samples["1x32"]
        for step, loss in traces[name].items():
            assert loss == pytest.approx(reference[step], rel=1e-6), f"{name} at step {step}"


@pytest.mark.slow
def test_killed_at_a_random_step_and_run_again_equals_the_uninterrupted_run_to_the_bit(corpus: Path) -> None:
    """Of several processes: `test_faults_kill.py`, 200 times."""
    common = {
        "model": {"config": WITH_DROPOUT},
        "schedule": {"max_steps": 20},
        "checkpoint": {"every_steps": 4, "keep": 2, "keep_best": False},
        "evaluate": {"every_steps": 6},
    }
    recipe = write_recipe_file(corpus, output_dir=str(corpus / "whole"), **common)
    run(recipe)
    killed_at = random.Random(1).randrange(6, 19)
    recipe = write_recipe_file(
        corpus,
        output_dir=str(corpus / "killed"),
        options={"kill_at": {"step": killed_at, "rank": 0}},
        **common,
    )
    assert run(recipe, expect=None).returncode != 0
    assert not (corpus / "killed" / "summary.json").exists()
    recipe = write_recipe_file(corpus, output_dir=str(corpus / "killed"), **common)
    run(recipe)
    resumed = event_steps(corpus / "killed", "resume")
    assert resumed in ([], [4]), "the save of step 4 may have been under way"
    assert_same_bits_of_runs(corpus / "killed", corpus / "whole", 20)


@pytest.mark.parametrize("fault", ["nan_at", slow("inf_at")])
def test_nonfinite_loss_on_one_rank_skips_the_step_on_all(corpus: Path, fault: str) -> None:
    recipe = write_recipe_file(
        corpus,
        schedule={"max_steps": 6, "warmup_steps": 0, "type": "constant"},
        checkpoint={"every_steps": 1, "keep": 10},
        options={fault: {"step": 4, "rank": 1}},
    )
    run(recipe, processes=2)
    folder = corpus / "run"
    assert_same_bits(checkpoint(folder, 3), checkpoint(folder, 4))
    assert not torch.equal(
        checkpoint(folder, 4)["model.safetensors:transformer.wte.weight"],
        checkpoint(folder, 5)["model.safetensors:transformer.wte.weight"],
    )
    assert [record["skipped"] for record in metrics(folder)] == [False, False, False, True, False, False]
    assert metrics(folder)[3]["loss"] in ("NaN", "Infinity")
    assert event_steps(folder, "skip") == [4]


@pytest.mark.slow
def test_spent_skip_budget_stops_all_processes_with_exit_code_3_and_a_good_checkpoint(corpus: Path) -> None:
    recipe = write_recipe_file(
        corpus,
        schedule={"max_steps": 30},
        checkpoint={"every_steps": 5},
        guard={"max_consecutive_skips": 3},
        options={"nan_from": 8},
    )
    done = run(recipe, processes=1, expect=3)
    assert "3 in a row" not in done.stderr
    limit = "guard.max_consecutive_skips"
    assert any("4 in a row" in line and f"{limit} allows 3" in line for line in done.stderr.splitlines())
    folder = corpus / "run"
    assert event_steps(folder, "skip") == [8, 9, 10, 11]
    assert event_steps(folder, "stop") == [11]
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint(folder, 5).values())
    two = write_recipe_file(
        corpus,
        output_dir=str(corpus / "two"),
        schedule={"max_steps": 30},
        guard={"on_nonfinite": "stop"},
        options={"nan_at": {"step": 3, "rank": 1}},
    )
    done = run(two, processes=2, expect=3)
    assert "step 3: not finite" in done.stderr


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_asked_to_stop_on_one_rank_all_save_the_same_step_and_the_run_goes_on_to_the_bit(
    corpus: Path, processes: int
) -> None:
    common = {"model": {"config": WITH_DROPOUT}, "schedule": {"max_steps": 14}}
    run(write_recipe_file(corpus, output_dir=str(corpus / "whole"), **common), processes=processes)
    options = {"term_at": {"step": 6, "rank": processes - 1}}
    stopped = write_recipe_file(corpus, output_dir=str(corpus / "stopped"), options=options, **common)
    run(stopped, processes=processes, expect=75)
    assert 6 <= event_steps(corpus / "stopped", "preempted")[0] <= 8
    run(write_recipe_file(corpus, output_dir=str(corpus / "stopped"), **common), processes=processes)
    assert_same_bits_of_runs(corpus / "stopped", corpus / "whole", 14)


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGUSR1)])
def test_signal_from_outside_at_any_moment_ends_in_a_checkpoint_and_exit_code_75(
    corpus: Path, number: signal.Signals
) -> None:
    recipe = write_recipe_file(
        corpus, schedule={"max_steps": 100_000, "warmup_steps": 10}, log={"every_steps": 1, "progress": False}
    )
    process = subprocess.Popen(command(recipe), env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for_step(corpus / "run", 1, lambda: process.poll() is None)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert ("Ctrl-C" in stderr) == (number == signal.SIGINT)
    assert_saved_at_the_stop(corpus / "run")


@pytest.mark.slow
def test_damaged_newest_checkpoint_is_named_and_the_one_before_used(corpus: Path) -> None:
    common = {"schedule": {"max_steps": 12}, "checkpoint": {"every_steps": 4, "keep": 3}}
    recipe = write_recipe_file(corpus, **common)
    run(recipe)
    whole = losses(corpus / "run")
    weights = corpus / "run" / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    run(recipe)
    folder = corpus / "run"
    assert "model.safetensors differs" in events(folder, "checkpoint_invalid")[0]["message"]
    assert event_steps(folder, "resume")[0] == 8
    assert losses(folder) == whole


@pytest.mark.slow
def test_another_recipe_in_the_same_folder_is_refused_and_named(corpus: Path) -> None:
    run(write_recipe_file(corpus))
    changed = write_recipe_file(corpus, batch={"global_batch_size": 4}, schedule={"max_steps": 20})
    done = run(changed, expect=2)
    assert_golden("\n".join(line for line in done.stderr.splitlines() if " was " in line))
    run(changed, "--checkpoint.accept_changes", "true")
    assert max(losses(corpus / "run")) == 20
    run(changed, "--checkpoint.resume", "never")
    assert list(losses(corpus / "run")) == list(range(1, 21))
    assert (corpus / "run" / "previous-1" / "checkpoints").is_dir()


@pytest.mark.slow
def test_finished_run_started_again_trains_no_step(corpus: Path) -> None:
    recipe = write_recipe_file(corpus)
    run(recipe)
    before = losses(corpus / "run")
    run(recipe)
    assert losses(corpus / "run") == before


@pytest.mark.slow
def test_launcher_that_asks_for_more_processes_than_accelerate_sees_is_refused(corpus: Path) -> None:
    recipe = write_recipe_file(corpus)
    launched = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "accel_train", "run", str(recipe)]
    done = ran([command(recipe)[0], "-m", *launched])
    assert done.returncode != 0
    assert "torchrun --nproc_per_node N" in done.stderr
