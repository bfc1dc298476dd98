"""Numbers that go wrong, made to go wrong in real runs: contained to the bit, and the cause named right every time.

Each launch trains one run with many faults, at steps of their own: a sample breaks a module, the way back through one,
the
loss, the gradient of one parameter, or is broken as it is read; on either process, in either micro-batch; each time its
step is computed, or only once. Beside it a run is trained that passes over the same steps: what is left must be equal.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.checkpoint.store import newest_valid
from accel_train.core.errors import CheckpointError, TrainingStopped
from accel_train.engine.save import save_run, weights_problem
from accel_train.observe.observer import Observer
from accel_train.runtime.exit import exit_code
from tests.support.number_faults import GAP_STEPS, ONCE, PLACES, assert_named, incident, launch, plan_of, spread
from tests.support.programs.number_faults import digest, train_with_faults
from tests.support.runs import TINY_MODEL, event_steps, events, losses, metrics, write_corpus
from tests.support.wording import assert_golden, raises_golden

IGNORED = [{"step": 7, "rank": 1, "micro_batch": m, "row": row} for m in (0, 1) for row in range(4)]
"""All that the second process reads in one step, without a target: nothing is wrong with that."""


def assert_contained(plan: Mapping[str, Any], seen: Sequence[Mapping[str, Any]]) -> None:
    """Every bad step, and no other, was skipped on all processes, and left weights, moments and
    counters as they were.
    """
    bad = [fault["step"] for fault in plan["faults"]]
    for process in seen:
        assert process["skipped"] == bad
        for step in range(2, plan["recipe"]["schedule"]["max_steps"] + 1):
            unchanged = process["by_step"][str(step)] == process["by_step"][str(step - 1)]
            assert unchanged == (step in bad), f"step {step}"
    assert all(process["by_step"] == seen[0]["by_step"] for process in seen)


def assert_transient(found: Mapping[str, Any], fault: Mapping[str, Any]) -> None:
    """The incident says that the fault is gone, and on which process it was."""
    assert found["classification"] == "transient", found["sentence"]
    assert not any(finding["happens_again"] for finding in found["processes"])
    processes = found["processes"]
    if fault["place"] in ("forward", "loss"):
        assert [each["rank"] for each in processes if not math.isfinite(each["loss_sum_then"])] == [fault["rank"]]
    if len(processes) > 1:
        assert [each["rank"] for each in processes if not each["gradients_finite_then"]] == [fault["rank"]]
        assert f"on process {fault['rank']} (cpu" in found["sentence"]


def hold_run_against_one_that_never_applied_them(
    folder: Path, kinds: Sequence[dict[str, Any]], *, processes: int, **more: Any
) -> None:
    """Train with the faults, and beside it without their steps: equal to the bit, and each fault named."""
    faults = spread(kinds, processes=processes)
    steps = faults[-1]["step"] + GAP_STEPS
    plan = plan_of(folder, "faults", processes=processes, steps=steps, faults=faults, **more)
    seen = launch(plan, processes)
    assert_contained(plan, seen)
    never = plan_of(
        folder, "never", processes=processes, steps=steps, never_applied=[fault["step"] for fault in faults], **more
    )
    assert launch(never, processes)[0]["final"] == seen[0]["final"]
    assert len(list((folder / "faults" / "incidents").iterdir())) == len(faults)
    for fault, sample in zip(faults, seen[0]["samples"], strict=True):
        found = incident(folder / "faults", fault["step"])
        if fault.get("once"):
            assert_transient(found, fault)
        else:
            assert_named(found, fault, sample)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"recipe": {"precision": {"mixed_precision": "bf16"}}},
    "fp16": {"fp16_scale": 16.0},
}


def test_one_fault_of_each_kind_is_contained_and_named(tmp_path: Path) -> None:
    faults = spread([PLACES[0], PLACES[6], PLACES[9], PLACES[12], PLACES[16], ONCE[0]], processes=1)
    steps = faults[-1]["step"] + GAP_STEPS
    run, watching, samples = train_with_faults(plan_of(tmp_path, "faults", processes=1, steps=steps, faults=faults))
    assert watching.skipped == [fault["step"] for fault in faults]
    never = plan_of(tmp_path, "never", processes=1, steps=steps, never_applied=watching.skipped)
    assert digest(run) == digest(train_with_faults(never)[0])
    for fault, sample in zip(faults[:-1], samples, strict=False):
        assert_named(incident(tmp_path / "faults", fault["step"]), fault, sample)
    assert_transient(incident(tmp_path / "faults", faults[-1]["step"]), faults[-1])


@pytest.mark.faults
@pytest.mark.parametrize("precision", PRECISIONS)
def test_faults_on_either_of_two_processes_are_contained_to_the_bit_and_named(tmp_path: Path, precision: str) -> None:
    """N1, N2, N3, N6 and N8: 24 injections a precision, 72 in all; 17 stay and 7 go, and each is
    told for what it is.
    """
    more = {"ignored": IGNORED, **PRECISIONS[precision]}
    hold_run_against_one_that_never_applied_them(tmp_path, [*PLACES, *ONCE], processes=2, **more)


LANGUAGE_FAULTS: list[dict[str, Any]] = [
    {"place": "forward", "name": "transformer.h.1.mlp.act"},
    {"place": "forward", "name": "transformer.h.0.attn"},
    {"place": "forward", "name": "transformer.wte", "value": math.inf},
    {"place": "backward", "name": "transformer.h.0.ln_2"},
    {"place": "backward", "name": "transformer.h.1.attn"},
    {"place": "gradient", "name": "transformer.h.1.attn.c_proj.weight"},
    {"place": "loss"},
]


@pytest.mark.faults
@pytest.mark.parametrize("checkpointing", ["off", "blocks", "selective"])
def test_modules_of_a_language_model_are_named(tmp_path: Path, checkpointing: str) -> None:
    write_corpus(tmp_path, num_documents=120)
    faults = spread(LANGUAGE_FAULTS, processes=1)
    recipe = {
        "task": "tests.support.tasks.number_faults:FaultyLanguageModel",
        "data": {"train": str(tmp_path / "corpus.jsonl")},
        "model": {"config": {**TINY_MODEL, "resid_pdrop": 0.1}},
        "precision": {"gradient_checkpointing": checkpointing},
    }
    plan = plan_of(tmp_path, "faults", processes=1, steps=faults[-1]["step"] + 2, faults=faults, recipe=recipe)
    _, watching, samples = train_with_faults(plan)
    assert watching.skipped == [fault["step"] for fault in faults]
    for fault, sample in zip(faults, samples, strict=True):
        assert_named(incident(tmp_path / "faults", fault["step"]), fault, sample)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_first_step_that_is_skipped_leaves_no_trace_in_the_optimizer(tmp_path: Path, name: str) -> None:
    faults = [{"step": 1, "rank": 0, "micro_batch": 0, "row": 0, "place": "loss"}]
    recipe = {"optimizer": {"name": name, "learning_rate": 1e-2, "momentum": 0.9}}
    plan = plan_of(tmp_path, "faults", processes=1, steps=6, faults=faults, recipe=recipe)
    run, watching, _ = train_with_faults(plan)
    assert watching.skipped == [1]
    never = plan_of(tmp_path, "never", processes=1, steps=6, never_applied=[1], recipe=recipe)
    assert digest(train_with_faults(never)[0]) == digest(run)


@pytest.mark.faults
def test_poisoned_steps_in_a_row_cause_one_rollback_which_a_kill_does_not_undo(tmp_path: Path) -> None:
    """N4: three steps are broken where two in a row are allowed."""
    faults = [
        {"step": step, "rank": 0, "micro_batch": 0, "row": 1, "place": "data", "name": "features"}
        for step in (21, 22, 23)
    ]
    guard = {"max_consecutive_skips": 2, "healthy_after_steps": 3, "rollback_skip_steps": 4, "on_spike": "off"}
    recipe = {"guard": guard, "checkpoint": {"every_steps": 5, "keep": 3, "in_background": False}}
    plan = plan_of(tmp_path, "faults", processes=1, steps=40, faults=faults, recipe=recipe)
    launch({**plan, "kill_at": 32}, 1, expect=-9)
    folder = tmp_path / "faults"
    assert [event["to_step"] for event in events(folder, "rollback")] == [15]
    seen = launch(plan, 1)[0]
    (rollback,) = events(folder, "rollback")
    passed_over = set(range(rollback["skip_first"], rollback["skip_last"] + 1))
    assert {21, 22, 23} <= passed_over
    assert event_steps(folder, "resume")[0] == 30
    assert set(losses(folder)) == set(range(1, 41)) - passed_over
    whole = plan_of(tmp_path, "whole", processes=1, steps=40, faults=faults, recipe=recipe)
    assert launch(whole, 1)[0]["final"] == seen["final"]


@pytest.mark.faults
def test_gradients_that_always_overflow_in_fp16_end_the_run_with_the_scale_at_its_floor(tmp_path: Path) -> None:
    """N5: the guard stops it, exit code 3, with finite weights and a scale of 1."""
    faults = [{"sample": -1, "place": "gradient", "name": "blocks.0.widen.weight", "value": math.inf}]
    recipe = {"guard": {"max_rollbacks": 0, "fp16_scale_floor": 1.0}}
    plan = plan_of(tmp_path, "faults", processes=1, steps=200, faults=faults, recipe=recipe, fp16_scale=65536.0)
    with raises_golden(TrainingStopped) as stopped:
        train_with_faults(plan)
    assert exit_code(stopped.value) == 3
    scales = [record["loss_scale"] for record in metrics(tmp_path / "faults")]
    assert scales == [2.0**power for power in range(16, 0, -1)] + [1.0] * 6
    found = incident(tmp_path / "faults", 17)
    assert found["processes"][0]["gradients_not_finite"] == ["blocks.0.widen.weight"]
    assert (found["processes"][0]["module"], found["loss_scale"]) == ("blocks.0.widen", 1.0)


def test_samples_without_a_target_are_no_incident(tmp_path: Path) -> None:
    """N6: a micro-batch of them, and a whole step."""
    places = [*range(4, 8), *range(8, 16)]
    ignored = [{"step": 4 + place // 8, "rank": 0, "micro_batch": place % 8 // 4, "row": place % 4} for place in places]
    _, watching, _ = train_with_faults(plan_of(tmp_path, "ignored", processes=1, steps=8, ignored=ignored))
    assert watching.skipped == [5]  # nothing to learn from: momentum and weight decay wait as well
    assert [step for step, loss in watching.losses.items() if not math.isfinite(loss)] == [5]  # it has no mean
    assert watching.losses[4] > 0
    assert not (tmp_path / "ignored" / "incidents").exists()


@pytest.mark.faults
def test_a_spike_is_clipped_its_sample_named_and_the_loss_is_soon_back(tmp_path: Path) -> None:
    """N7: three samples want something absurd, in three steps in a row."""
    faults = [
        {"step": step, "rank": 0, "micro_batch": 1, "row": 2, "place": "data", "name": "wanted", "value": 300.0}
        for step in (120, 121, 122)
    ]
    recipe = {"guard": {"on_spike": "clip", "spike_window_steps": 32}}
    plan = plan_of(tmp_path, "faults", processes=1, steps=180, faults=faults, recipe=recipe)
    _, watching, samples = train_with_faults(plan)
    before = sorted(watching.losses[step] for step in range(90, 120))[15]
    after = sorted(watching.losses[step] for step in range(150, 180))[15]
    assert watching.losses[120] > 100 * before
    assert after < 1.1 * before
    found = incident(tmp_path / "faults", 120)
    assert (found["kind"], found["classification"], found["skipped"]) == ("spike", "deterministic", False)
    assert found["processes"][0]["heaviest"][0]["sample"] == samples[0]
    assert f"sample {samples[0]} on process 0" in found["sentence"]
    assert event_steps(tmp_path / "faults", "spike") == [120, 121, 122]


def test_weights_that_are_not_finite_are_not_saved_and_the_checkpoint_before_stays_the_newest(tmp_path: Path) -> None:
    """N9: the weights are damaged between the last step and the save."""
    plan = plan_of(tmp_path, "faults", processes=1, steps=4, recipe={"checkpoint": {"every_steps": 2}})
    run, _, _ = train_with_faults(plan)
    with torch.no_grad():
        run.strategy.inner.model.blocks[1].widen.weight[3, 2] = math.nan
    run.state.step = 6
    run.observer = Observer()  # the run's own went with its steps
    assert_golden(str(weights_problem(run)), "of the weights")
    with raises_golden(CheckpointError, case="of the save"):
        save_run(run, wait=True)
    newest, broken = newest_valid(tmp_path / "faults" / "checkpoints")
    assert newest is not None
    assert (newest.name, broken) == ("step-00000004", [])
