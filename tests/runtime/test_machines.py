"""Machines whose name resolves to a loopback address are refused where gloo would connect them."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import PartialState

from accel_train.runtime import doctor, launcher, process_group
from accel_train.runtime.launcher import loopback_problem, spans_machines
from accel_train.runtime.process_group import start_processes

TWO_MACHINES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of Debian's installer, without a launcher."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    answers = {"node1": "127.0.1.1", "localhost": "127.0.0.1", "10.0.0.1": "10.0.0.1", "2001:db8::1": "2001:db8::1"}
    monkeypatch.setattr(launcher, "_address_of", lambda name: answers.get(name))
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    PartialState._reset_state()
    yield
    PartialState._reset_state()


def test_the_problem_names_machine_address_variable_and_interfaces(debian: None) -> None:
    problem = loopback_problem({}) or ""
    assert [part for part in ("node1", "127.0.1.1", "GLOO_SOCKET_IFNAME", "node1 has ") if part not in problem] == []
    assert loopback_problem({"GLOO_SOCKET_IFNAME": "eth0"}) is None


@pytest.mark.parametrize(("address", "is_refused"), [("10.0.0.7", False), ("2001:db8::1", False), ("::1", True)])
def test_a_name_that_others_reach_passes(monkeypatch: pytest.MonkeyPatch, address: str, is_refused: bool) -> None:
    monkeypatch.setattr(launcher, "_address_of", lambda name: address)
    assert (loopback_problem({}) is not None) == is_refused


@pytest.mark.parametrize(
    ("changes", "spans"),
    [
        ({}, True),
        ({"WORLD_SIZE": "8"}, False),
        ({"MASTER_ADDR": "localhost"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"LOCAL_WORLD_SIZE": ""}, False),
    ],
)
def test_a_launch_spans_machines_if_more_processes_are_elsewhere(
    debian: None, changes: dict[str, str], spans: bool
) -> None:
    assert spans_machines({**TWO_MACHINES, **changes}) == spans


@pytest.mark.parametrize(
    ("has_gpu", "by", "is_refused"),
    [(False, {}, True), (True, {}, False), (True, {"uses_gloo": True}, True), (True, {"offloads": True}, True)],
)
def test_a_run_that_connects_machines_by_gloo_is_refused_before_it_joins(
    debian: None, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, by: dict[str, bool], is_refused: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(process_group, "unused_driver", lambda environment: None)
    joined: list[Any] = []

    def join(**given: Any) -> None:
        joined.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(process_group, "PartialState", join)
    for name, value in TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError if is_refused else KeyboardInterrupt) as caught:
        start_processes(**by)
    assert ("GLOO_SOCKET_IFNAME" in str(caught.value)) == is_refused
    assert len(joined) == (not is_refused)


def test_doctor_names_the_variable_and_is_alarmed_on_several_machines_alone(
    debian: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    [alone] = doctor.check_launch()
    for name, value in TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    *_, several = doctor.check_launch()
    assert (alone.status, several.status) == ("ok", "bad")
    assert "GLOO_SOCKET_IFNAME" in alone.text
    assert "GLOO_SOCKET_IFNAME" in several.remedy
