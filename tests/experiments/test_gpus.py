"""`doctor --gpus` on processes of the CPU: sound ones pass, and a planted fault is found, named, and ends in time."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_train.checkpoint.run_recipe import named_recipe
from accel_train.core.state import JsonRecord
from accel_train.experiments import gpus
from accel_train.experiments.equality import toy_layouts
from accel_train.experiments.gpus import examine_gpus
from accel_train.experiments.processes import Processes
from accel_train.runtime.doctor import Finding
from accel_train.runtime.links import measure, transfers
from tests.support.commands import call, error_line
from tests.support.wording import assert_golden

LINKS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Return a function that plants a fault in the processes that work together."""

    def plant(fault: Callable[[], None]) -> None:
        def start(size: int, *, on_gpus: bool) -> Processes:
            return Processes(size, fault if size > 1 else None, on_gpus=on_gpus)

        monkeypatch.setattr(gpus, "Processes", start)

    return plant


def change_weights() -> None:
    """Plant a fault in this process: rank 1 begins with other weights."""
    from accel_train.training import loop

    whole = loop.run_steps

    def run_steps(run: Any) -> None:
        with torch.no_grad():
            for each in run.strategy.module.parameters() if dist.get_rank() == 1 else ():
                each.mul_(1.5)
        whole(run)

    loop.run_steps = run_steps


def _send_from_1_to_2(instead: Callable[[], None]) -> None:
    whole = dist.send

    def send(tensor: torch.Tensor, to: int) -> None:
        instead() if (dist.get_rank(), to) == (1, 2) else whole(tensor, to)

    dist.send = send  # type: ignore[assignment]


def hang_from_1_to_2() -> None:
    """Plant a fault in this process: rank 1 never sends to rank 2."""
    _send_from_1_to_2(partial(time.sleep, 3600))


def die_from_1_to_2() -> None:
    """Plant a fault in this process: rank 1 dies instead of sending to rank 2."""
    _send_from_1_to_2(partial(os._exit, 1))


def gather_nothing() -> None:
    """Plant a fault in this process: an all-gather does not write its result."""
    dist.all_gather_into_tensor = lambda *_: None


@pytest.mark.slow
def test_sound_processes_pass_and_train_as_one_does() -> None:
    record: JsonRecord = {}
    first, *found = examine_gpus(2, record, on_gpus=False)
    assert (first.status, first.subject) == ("ok", "links")
    assert "gloo on the CPU" in first.text
    assert "not compared" in first.text
    assert [(each.status, each.subject) for each in found] == [
        ("ok", name) for name in (*LINKS, "rank 0 to 1", "ddp", "fsdp2")
    ]
    assert list(record["gb_per_second"]) == list(transfers(2))
    assert all(rate > 0 for rate in record["gb_per_second"].values())
    for each in found[-2:]:
        assert "4 steps on 2 processes and on 1: equal to " in each.text
        assert float(each.text.split("equal to ")[1].split()[0]) < 1e-5


@pytest.mark.parametrize(("strategy", "expected"), [("ddp", [2, 3, 8, 16]), ("fsdp2", [2, 2, 8, 16])])
def test_training_takes_all_gpus_or_all_but_one_that_fsdp2_leaves_over(strategy: str, expected: list[int]) -> None:
    recipe = named_recipe("gpt_tiny", ["--parallel.strategy", strategy])
    layouts = [toy_layouts(recipe, number, number) for number in (2, 3, 8, 16)]
    assert [layout.processes for layout, _ in layouts] == expected
    for layout, plain in layouts:
        batch = layout.recipe.batch
        assert batch.global_batch_size == plain.recipe.batch.global_batch_size
        assert batch.global_batch_size == int(batch.per_device_batch_size) * layout.processes


@pytest.mark.slow
def test_other_weights_on_one_rank_are_a_bad_finding_of_each_strategy(plant: Callable[..., None]) -> None:
    plant(change_weights)
    *links, ddp, fsdp2 = examine_gpus(2, {}, on_gpus=False)
    assert {each.status for each in links} == {"ok"}
    assert ddp.status == fsdp2.status == "bad"
    # With whole weights on each rank, the trainer itself compares them.
    assert "DIFFERENT: training fails: TrainingStopped: step 2: weights differ between processes" in ddp.text
    assert "DIFFERENT: loss of step 1 is " in fsdp2.text


@pytest.mark.slow
def test_a_pair_that_hangs_is_named_within_the_time_limit_and_ends_the_examination(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(hang_from_1_to_2)
    monkeypatch.setattr(gpus, "TRANSFER_SECONDS", 15.0)
    *passed, last = examine_gpus(3, {}, on_gpus=False)
    assert [each.subject for each in passed] == ["links", *LINKS, "rank 0 to 1", "rank 0 to 2"]
    assert (last.status, last.subject) == ("bad", "rank 1 to 2")
    assert last.text.startswith("not over after 15 seconds")


def test_a_process_that_dies_is_found_in_its_transfer(plant: Callable[..., None]) -> None:
    plant(die_from_1_to_2)
    *passed, last = examine_gpus(3, {}, on_gpus=False)
    assert {each.status for each in passed} == {"ok"}
    assert (last.status, last.subject) == ("bad", "rank 1 to 2")


def test_a_transfer_that_changes_data_is_bad(plant: Callable[..., None]) -> None:
    plant(gather_nothing)
    *_, last = examine_gpus(2, {}, on_gpus=False)
    assert (last.status, last.subject) == ("bad", "all-gather")
    assert "process 0 received wrong values" in last.text


@pytest.mark.parametrize(("name", "status"), [("NVIDIA H100 80GB HBM3", "warn"), ("Unknown GPU", "ok")])
def test_a_rate_below_half_of_what_plan_assumes_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, name: str, status: str
) -> None:
    monkeypatch.setattr(gpus, "Processes", lambda size, on_gpus: Processes(size))
    monkeypatch.setattr(gpus, "BYTES_ON_GPU", 2**16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (1, 0))
    record: JsonRecord = {}
    peer_access, links, *found = islice(examine_gpus(2, record, on_gpus=True), 2 + len(transfers(2)))
    assert (peer_access.status, peer_access.text) == ("warn", "missing from 1 to 0")
    # The data sheet's 450 GB/s at 80 %.
    assert record["assumed_gb_per_second"] == (360.0 if status == "warn" else 0.0)
    assert ("360 GB/s" in links.text) == (status == "warn")
    assert {each.status for each in found} == {status}


@pytest.mark.slow
def test_processes_for_gpus_are_new_interpreters_that_see_the_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with Processes(2, on_gpus=True) as several:
        assert several.call(partial(measure, "all-reduce", (), 2**10, tmp_path), 300.0) is None
        assert several.call(partial(_write_state, tmp_path)) is None
    assert {path.name for path in tmp_path.glob("all-reduce-*")} == {"all-reduce-0", "all-reduce-1"}
    state = json.loads((tmp_path / "state").read_text())
    assert state == {"visible": "0,1", "parent": os.getpid()}


def _write_state(folder: Path) -> None:
    state = {"visible": os.environ["CUDA_VISIBLE_DEVICES"], "parent": os.getppid()}
    (folder / "state").write_text(json.dumps(state))


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("bad", 1)])
def test_the_results_are_written_to_a_new_file_without_names_of_machine_and_folders(
    monkeypatch: pytest.MonkeyPatch, empty_folder: Path, not_launched: None, status: Any, code: int
) -> None:
    def examine(num_processes: int, record: JsonRecord, *, on_gpus: bool) -> Iterator[Finding]:
        record["gb_per_second"] = {"all-reduce": 1.5}
        text = f"{socket.gethostname()} at 10.0.0.7 has no {Path.cwd()}/a.json in /home/me, 3 GB/s"
        yield Finding(status, "all-reduce", text)

    monkeypatch.setattr(gpus, "examine_gpus", examine)
    monkeypatch.setattr("accel_train.runtime.doctor.examine", lambda: [Finding("ok", "python", "3.12")])
    Path("doctor-gpus-1.json").write_text("mine")
    answer = json.loads(call("doctor", "--cpu", "2", "--json", code=code).out)
    assert (answer["result"]["file"], answer["exit_code"]) == ("doctor-gpus-2.json", code)
    assert Path("doctor-gpus-1.json").read_text() == "mine"
    written = json.loads(Path("doctor-gpus-2.json").read_text())
    assert written["gb_per_second"] == {"all-reduce": 1.5}
    assert [each["subject"] for each in written["findings"]] == ["python", "all-reduce"]
    assert written["findings"][1]["text"] == "HIDDEN at HIDDEN has no HIDDEN in HIDDEN, 3 GB/s"
    said = call("doctor", "--cpu", "2", code=code).out
    assert said.splitlines()[-1].startswith("doctor-gpus-3.json ")


def test_without_gpus_the_error_names_the_rehearsal(empty_folder: Path, without_cuda: None, not_launched: None) -> None:
    assert_golden(error_line("doctor", "--gpus"))
    assert list(empty_folder.iterdir()) == []


def test_a_launch_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "without a launcher" in call("doctor", "--cpu", "2", code=2).err
