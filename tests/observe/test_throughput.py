import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accel_train.core.hardware import GPUS, peak_flops
from accel_train.observe import read_metrics
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.run_folder import RunFolder
from accel_train.observe.throughput import LARGEST_SHARE, LEAST_SECONDS, Meter, SystemMetrics, model_flops_per_token
from tests.observe.test_observer import STEP, observing
from tests.support.runs import refused


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_gpt2_124m_needs_the_flops_per_token_of_palm_appendix_b() -> None:
    # nanoGPT's estimate_mfu for GPT-2 124M: N = 123.65e6 without positions, L=12, D=768, T=1024.
    assert model_flops_per_token(123_653_376, 12, 768, 1024) == 6 * 123_653_376 + 12 * 12 * 768 * 1024 == 855_166_464


@pytest.mark.parametrize(
    "device_name, dtype, tflops",
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A40", "fp32", 37.4),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("Quadro RTX 6000", "fp16", 130.5),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla P100-PCIE-16GB", "fp32", 9.3),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI250X / MI250", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI325X", "fp16", 1307.4),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_the_name_torch_gives_it(device_name: str, dtype: str, tflops: float) -> None:
    assert peak_flops(device_name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "device_name, dtype",
    [
        ("cpu", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("Tesla T4", "bf16"),
        ("Tesla V100-SXM2-16GB", "tf32"),
        ("NVIDIA H1000", "bf16"),
    ],
)
def test_the_peak_is_unknown_for_another_chip_or_a_part_of_one(device_name: str, dtype: str) -> None:
    assert peak_flops(device_name, dtype) is None


def test_a_dtype_without_a_column_is_an_error() -> None:
    refused(peak_flops, "NVIDIA H100 80GB HBM3", "fp8", named="dtype='fp8' has no known peak")


def test_every_gpu_is_faster_in_16_bits_than_in_tf32_than_in_32() -> None:
    for name, gpu in GPUS.items():
        bf16, fp16, tf32, fp32 = gpu.peak_tflops
        order = [value for value in (fp32, tf32, fp16) if value is not None]
        assert order == sorted(order), name
        assert bf16 in (None, fp16), name


def test_rates_are_counts_over_the_seconds_between_two_log_lines() -> None:
    clock = Clock()
    meter = Meter(flops_per_token=100.0, peak_flops=1e5, clock=clock)
    for _ in range(10):
        meter.add(50, 2)
    clock.now += 4
    rates = meter.window(restart=True)
    assert (rates.tokens_per_second, rates.samples_per_second) == (125.0, 5.0)
    assert rates.mfu == pytest.approx(125 * 100 / 1e5)
    meter.add(10, 1)
    clock.now += 1
    assert meter.window(restart=False).tokens_per_second == 10.0  # the first ten steps are not counted again
    assert meter.overall().tokens_per_second == pytest.approx(510 / 5)


def test_pauses_count_neither_in_the_window_nor_in_the_training_time() -> None:
    clock = Clock()
    meter = Meter(flops_per_token=None, peak_flops=1e15, train_seconds=1000.0, clock=clock)
    meter.add(100, 1)
    clock.now += 1
    with meter.paused():
        clock.now += 30
        with meter.paused():
            clock.now += 30
        assert meter.train_seconds == 1001.0  # a checkpoint written during a pause records this
        clock.now += 40
    clock.now += 1
    assert meter.train_seconds == 1002.0
    assert meter.window(restart=True).tokens_per_second == 50.0
    assert meter.overall().mfu is None


def test_a_window_may_end_before_now_where_no_pause_began_since() -> None:
    clock = Clock()
    meter = Meter(flops_per_token=None, peak_flops=None, clock=clock)
    meter.add(100, 1)
    clock.now += 1.9
    assert meter.window(restart=True, until=101.0).tokens_per_second == 100.0
    with meter.paused():
        clock.now += 30
    meter.add(100, 1)
    clock.now += 0.1
    assert meter.train_seconds_at(132.0) == pytest.approx(2.0)
    assert meter.window(restart=True, until=132.0).tokens_per_second == pytest.approx(100.0)


def test_an_error_inside_a_pause_lets_the_clock_run_again() -> None:
    clock = Clock()
    meter = Meter(flops_per_token=None, peak_flops=None, clock=clock)
    with suppress(RuntimeError), meter.paused():
        clock.now += 5
        raise RuntimeError
    clock.now += 2
    assert meter.train_seconds == 2.0


def test_no_time_gives_no_rate() -> None:
    rates = Meter(flops_per_token=1.0, peak_flops=1.0, clock=Clock()).window(restart=True)
    assert (rates.tokens_per_second, rates.samples_per_second, rates.mfu) == (None, None, None)


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


@pytest.mark.parametrize(
    "busy, waiting, remedy, said",
    [
        ([0, 90, 88, 92], 0.1, "do so", True),  # the first sample is of the first step, which compiles
        ([90, 97, 96, 98], 0.1, "do so", False),
        ([90, 90, 88, 92], 2.0, "do so", False),  # data is late
        ([90, 90, 88, 92], 0.1, "", False),
        ([90, 90, 88], 0.1, "do so", False),
    ],
)
def test_a_gpu_that_idles_is_named_once_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: list[float], waiting: float, remedy: str, said: bool
) -> None:
    accounts = {"waiting_for_data": waiting, "productive_steps": 10.0}
    monkeypatch.setattr(LaunchClock, "accounts", lambda clock: accounts)
    system = SystemMetrics(torch.device("cpu"))
    samples = iter([{"gpu_percent": percent} for percent in [*busy, *[90] * 5][: len(busy) if len(busy) < 4 else 9]])
    monkeypatch.setattr(system, "sample", lambda: next(samples, {}))
    with observing(tmp_path, every=1, system=system, idle_remedy=remedy) as seen:
        for step in range(1, 10):
            seen.observer.on_step(STEP._replace(step=step), 1e-3)
    assert seen.screen.getvalue().count("idle for 10 % of the time: do so") == said


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
