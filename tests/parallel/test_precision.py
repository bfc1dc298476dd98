"""All processes of a run compute in one precision: the weakest that auto comes to on their devices."""

from typing import Any

import pytest
import torch

from accel_train.core.state import Choice
from accel_train.parallel import precision
from accel_train.parallel.precision import agree_on_mixed_precision, weakest_precision
from accel_train.recipe.schema import Precision
from tests.support.wording import assert_golden, raises_golden


def test_the_weakest_precision_of_all_processes_is_taken_and_its_rank_named() -> None:
    bf16, fp16, no = Choice("bf16", "an A100"), Choice("fp16", "a T4 has no bf16"), Choice("no", "cpu")
    assert weakest_precision([bf16, bf16]) == bf16
    assert weakest_precision([bf16, fp16, bf16]).value == "fp16"
    assert_golden(weakest_precision([bf16, fp16, bf16]).reason)
    assert weakest_precision([bf16, fp16, no]).value == "no"


def test_a_device_without_the_precision_asked_for_is_refused_on_all_processes() -> None:
    with raises_golden(case="of two"):
        weakest_precision([Choice("bf16", "as set"), "precision.mixed_precision=bf16 is only emulated"])
    with raises_golden(case="alone"):
        weakest_precision(["precision.mixed_precision=fp8 needs another GPU"])


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([("NVIDIA A100", (8, 0))], ""),
        ([("Tesla T4", (7, 5))], "NVIDIA A100 8.0 (rank 0 and 1 more), Tesla T4 7.5 (rank 2)"),
        ([("NVIDIA A100", (8, 6))], "NVIDIA A100 8.0 (rank 0 and 1 more), NVIDIA A100 8.6 (rank 2)"),
    ],
)
def test_devices_of_several_kinds_are_noted_with_their_ranks(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, tuple[int, int]]], said: str
) -> None:
    gpus = [("NVIDIA A100", (8, 0)), ("NVIDIA A100", (8, 0)), *others]
    sent: list[Any] = []

    def resolve() -> Choice[str]:
        return agree_on_mixed_precision(Precision(mixed_precision="no"), torch.device("cuda"), len(gpus))

    class Sent(Exception):
        pass

    def send(own: Any, conclude: Any) -> Any:
        sent.append(own)
        raise Sent

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    for name, capability in gpus:
        monkeypatch.setattr(precision, "device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        monkeypatch.setattr(precision, "concluded", send)
        with pytest.raises(Sent):
            resolve()
    monkeypatch.setattr(precision, "concluded", lambda own, conclude: conclude(sent))
    assert resolve().value == "no"
    assert resolve().reason.removeprefix("as set") == (f"; the devices differ: {said}" if said else "")
