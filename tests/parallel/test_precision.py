"""All processes of a run compute in one precision: the weakest that auto comes to on their devices."""

import pytest

from accel_train.core.state import Choice
from accel_train.parallel.precision import weakest_precision


def test_the_weakest_precision_of_all_processes_is_taken_and_its_rank_named() -> None:
    bf16, fp16, no = Choice("bf16", "an A100"), Choice("fp16", "a T4 has no bf16"), Choice("no", "cpu")
    assert weakest_precision([bf16, bf16]) == bf16
    assert weakest_precision([bf16, fp16, bf16]).value == "fp16"
    assert "rank 1: a T4 has no bf16" in weakest_precision([bf16, fp16, bf16]).reason
    assert weakest_precision([bf16, fp16, no]).value == "no"


def test_a_device_without_the_precision_asked_for_is_refused_on_all_processes() -> None:
    with pytest.raises(ValueError, match=r"rank 1: precision\.mixed_precision=bf16 is only emulated"):
        weakest_precision([Choice("bf16", "as set"), "precision.mixed_precision=bf16 is only emulated"])
    with pytest.raises(ValueError, match=r"^precision\.mixed_precision=fp8 needs"):
        weakest_precision(["precision.mixed_precision=fp8 needs another GPU"])
