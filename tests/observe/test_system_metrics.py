import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accel_train.observe import read_metrics
from accel_train.observe.run_folder import RunFolder
from accel_train.observe.throughput import LARGEST_SHARE, LEAST_SECONDS, SystemMetrics
from tests.observe.test_observer import STEP, observing


class Time:
    now = 0.0
    cost = 0.0

    def __call__(self) -> float:
        self.now += self.cost
        return self.now


def test_a_sample_is_what_psutil_says() -> None:
    system = SystemMetrics(torch.device("cpu"))
    block = bytearray(200 * 2**20)
    block[:: 2**12] = b"x" * len(block[:: 2**12])
    sample = system.sample()
    assert list(sample) == ["cpu_percent", "process_cpu_percent", "memory_bytes", "process_memory_bytes"]
    assert 200 * 2**20 < sample["process_memory_bytes"] < sample["memory_bytes"] < psutil.virtual_memory().total
    assert 0 <= sample["cpu_percent"] <= 100


def test_samples_are_a_second_apart_and_take_a_thousandth_of_the_time_at_most() -> None:
    clock = Time()
    system = SystemMetrics(torch.device("cpu"), clock=clock)
    assert system.sample()
    clock.now += 0.9 * LEAST_SECONDS
    assert system.sample() == {}
    clock.now += 0.2 * LEAST_SECONDS
    clock.cost = 0.01  # a sample asks for the time twice
    assert system.sample()
    clock.now += 0.8 * 0.01 / LARGEST_SHARE
    assert system.sample() == {}
    clock.now += 0.3 * 0.01 / LARGEST_SHARE
    assert system.sample()


def test_a_sample_costs_less_than_a_millisecond_of_this_process() -> None:
    clock = Time()
    system = SystemMetrics(torch.device("cpu"), clock=clock)
    began = time.thread_time()
    for _ in range(20):
        clock.now += 2 * LEAST_SECONDS
        assert system.sample()
    assert (time.thread_time() - began) / 20 < 1e-3


def test_what_a_gpu_does_not_tell_is_left_out_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answers(name: str, value: float | None) -> None:
        def answer(device: Any) -> float:
            asked.append(name)
            if value is None:
                raise RuntimeError("not supported")
            return value

        monkeypatch.setattr(torch.cuda, name, answer)

    for name, value in {
        "utilization": 97,
        "device_memory_used": 2**30,
        "temperature": None,
        "power_draw": 350_500,
    }.items():
        answers(name, value)
    answers("memory_reserved", 2**29)
    clock = Time()
    system = SystemMetrics(torch.device("cuda", 0), clock=clock)
    for _ in range(2):
        clock.now += 2 * LEAST_SECONDS
        sample = {name: value for name, value in system.sample().items() if name.startswith("gpu_")}
        assert sample == {"gpu_reserved_bytes": 2**29, "gpu_percent": 97, "gpu_memory_bytes": 2**30, "gpu_watts": 350.5}
    assert asked.count("temperature") == 1


def test_the_machine_is_a_line_of_its_own_at_log_steps(tmp_path: Path) -> None:
    with observing(tmp_path, every=5, system=SystemMetrics(torch.device("cpu"), clock=Time())) as seen:
        for step in range(1, 11):
            seen.observer.on_step(STEP._replace(step=step), 1e-3)
    train, system = (
        [line for line in read_metrics(tmp_path) if line["split"] == split] for split in ("train", "system")
    )
    assert [line["step"] for line in train] == [5, 10]
    assert [line["step"] for line in system] == [5], "the second comes within a second"
    assert "process_memory_bytes" in system[0]
    assert "process_memory_bytes" not in train[0]
    with RunFolder(tmp_path) as folder:
        folder.rewind(4)
    assert read_metrics(tmp_path) == []
