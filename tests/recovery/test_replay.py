"""`accel-train replay`: an incident computed again from what its folder holds."""

import math
import os
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState

from accel_train.core.json_io import read_json, write_json
from accel_train.observe.incident_record import WEIGHTS, read_incident
from accel_train.recovery.replay import format_replay, replay_incident
from accel_train.runtime.process_group import has_accelerator
from tests.support.commands import call, error_line
from tests.support.number_faults import plan_of
from tests.support.programs.number_faults import train_with_faults
from tests.support.runs import ran
from tests.support.wording import assert_golden


@pytest.fixture(autouse=True)
def one_process(not_launched: None) -> None:
    """A replay takes one."""


def run_with(folder: Path, *faults: dict[str, Any], **more: Any) -> Path:
    """The incident of a run whose task itself breaks these samples of the first three steps."""
    options = {"num_samples": 32, "faults": list(faults)}
    train_with_faults(plan_of(folder, "run", processes=1, steps=4, recipe={"options": options, **more}))
    [incident] = (folder / "run" / "incidents").iterdir()
    return incident


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An incident whose sample breaks the activation of the second block, each time it is read."""
    return run_with(tmp_path_factory.mktemp("run"), {"sample": 7, "place": "forward", "name": "blocks.1.act"})


def test_fault_that_comes_with_the_sample_happens_again(broken: Path) -> None:
    said = call("replay", broken, "--device", "cpu", named="verdict: happens again").out
    [first] = [line for line in said.splitlines() if "<- first" in line]
    assert first.split()[:3] == ["blocks.1.act", "GELU", "NO"]
    assert [line.split()[2] for line in said.splitlines() if line.startswith("blocks.0.act")] == ["yes"]
    assert_golden(next(line for line in said.splitlines() if "embed.weight" in line))


@pytest.mark.parametrize("is_damaged", [False, True], ids=["replayed", "refused"])
def test_replay_on_the_cpu_leaves_the_gpu_to_later_runs(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    shutil.copytree(broken.parents[1], tmp_path / "run")
    incident = tmp_path / "run" / "incidents" / broken.name
    if is_damaged:
        (incident / WEIGHTS).write_bytes(b"damaged")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    # An earlier run of a notebook has chosen the GPU.
    PartialState(cpu=True).device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=WEIGHTS) if is_damaged else nullcontext():
        assert replay_incident(incident, "cpu").device == "cpu"
    assert "ACCELERATE_USE_CPU" not in os.environ
    assert has_accelerator()
    assert PartialState().device == torch.device("cuda", 0)
    assert "device" not in AcceleratorState._shared_state


def test_loss_computed_again_is_that_of_the_step_to_the_bit_dropout_included(tmp_path: Path) -> None:
    fault = {"sample": 7, "place": "gradient", "name": "head.weight"}
    folder = run_with(tmp_path, fault, batch={"gradient_accumulation_steps": 1})
    [replayed] = replay_incident(folder, "cpu").micro_batches
    [finding] = read_incident(folder).processes
    assert finding.loss_sum == finding.loss_sum_then == replayed.outcome.loss
    assert replayed.outcome.not_finite == ["head.weight"]
    assert all(call.output_finite for call in replayed.watch.calls)
    assert "verdict: happens again" in format_replay(replay_incident(folder, "cpu"))


def test_way_back_through_a_module_is_named(tmp_path: Path) -> None:
    folder = run_with(tmp_path, {"sample": 7, "place": "backward", "name": "blocks.0.widen"})
    said = format_replay(replay_incident(folder, "cpu")).splitlines()
    assert_golden(next(line for line in said if line.startswith("backward ")))


def test_fault_that_came_once_does_not_happen_again(tmp_path: Path) -> None:
    fault = {"step": 2, "rank": 0, "micro_batch": 1, "row": 0, "place": "loss", "once": True}
    train_with_faults(plan_of(tmp_path, "run", processes=1, steps=4, faults=[fault]))
    replay = replay_incident(tmp_path / "run" / "incidents" / "step-00000002", "cpu")
    assert [each.number for each in replay.micro_batches] == [0, 1]
    assert not any(each.happens_again for each in replay.micro_batches)
    [verdict] = replay.verdict
    assert_golden(verdict)


@pytest.mark.slow
def test_debugger_stops_at_the_first_module_with_its_output_at_hand(broken: Path) -> None:
    program = [sys.executable, "-m", "accel_train", "replay", str(broken), "--device", "cpu", "--debug"]
    keys = "p 'at', name, module\np args[0].isfinite().all(), output.isnan().any()\nc\n"
    done = ran(program, input=keys)
    assert done.returncode == 0, done.stderr
    assert "('at', 'blocks.1.act', GELU(" in done.stdout
    assert "(tensor(True), tensor(True))" in done.stdout
    assert "verdict: happens again" in done.stdout


@pytest.mark.parametrize(
    "case", ["no folder", "no incident", "damaged", "no batch", "no weights", "moved away", "other device"]
)
def test_what_cannot_be_computed_again_is_an_error_that_says_so(
    broken: Path, tmp_path: Path, without_cuda: None, case: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(broken.parent.parent, run)
    folder, device = run / "incidents" / broken.name, "cpu"
    record = read_json(folder / "incident.json")
    if case == "no folder":
        folder = folder / "nothing"
    elif case == "no incident":
        folder = run
    elif case == "damaged":
        (folder / "incident.json").write_text("{")
    elif case == "no batch":
        write_json(folder / "incident.json", {**record, "batches": []})
    elif case == "no weights":
        (folder / "weights.safetensors").write_bytes(b"nothing")
    elif case == "moved away":
        (tmp_path / "elsewhere").mkdir()
        folder = Path(shutil.move(folder, tmp_path / "elsewhere"))
    else:
        device = "cuda"
    said = error_line("replay", folder, "--device", device)
    assert_golden(re.sub(r"(cannot be read|is damaged): .*", r"\1: #", said))


def test_checkpoint_stands_in_for_weights_that_were_too_large_to_keep(tmp_path: Path) -> None:
    fault = {"sample": 7, "place": "forward", "name": "blocks.1.act"}
    folder = run_with(tmp_path, fault, checkpoint={"every_steps": 1, "keep": 5})
    (folder / "weights.safetensors").unlink()
    record = read_json(folder / "incident.json")
    newest = f"step-{max(record['step'] - 1, 1):08d}"
    write_json(folder / "incident.json", {**record, "weights": {"file": None, "checkpoint": newest, "of": "x"}})
    replay = replay_incident(folder, "cpu")
    assert replay.weights.startswith(f"{newest}, ")
    assert math.isnan(replay.micro_batches[0].outcome.loss)
