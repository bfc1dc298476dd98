"""Looking into a bad step: what is found, what is written, and that nothing of the run is changed by it."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from accel_train.checkpoint.store import free_path
from accel_train.model.batch_norm import RunningStatistics
from accel_train.model.training_module import TrainingModule
from accel_train.observe.incident_record import (
    Finding,
    KeptBatch,
    KeptWeights,
    classify,
    incident_folders,
    next_actions,
    read_incident,
    summarise_incident,
)
from accel_train.observe.run_folder import RunFolder
from accel_train.recovery.diagnosis import DiagnosisRequest, Recomputation, SamplesOf, examine, find_rows
from accel_train.recovery.module_watch import ModuleWatch
from accel_train.report.report import write_report
from tests.support.number_faults import incident_with, plan_of
from tests.support.programs.number_faults import train_with_faults
from tests.support.runs import events
from tests.support.tasks.number_faults import Fault, Faults, Regressor

CPU = torch.device("cpu")


class Squares:
    """The summed squares of what a model returns, with faults where the test wants them."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.faults.samples = batch.get("sample", torch.zeros(0))
        return self.faults.break_loss(model(batch["x"]).float().square().sum())


def batch_of(rows: int, width: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(rows, width, generator=generator), "sample": torch.arange(100, 100 + rows)}


def request_of(samples: list[list[int]] | None, **changes: Any) -> DiagnosisRequest:
    known = {"step": 5, "seed": 1, "rank": 0, "random_rank": 0, "world_size": 1, "num_targets": 8, "loss_scale": None}
    return DiagnosisRequest(
        **{**known, "samples": samples, "is_spike": False, "compiled": False, "seconds": 60.0, **changes}
    )


def look_at(model: nn.Module, faults: Sequence[Fault], rows: int = 8, **changes: Any) -> Any:
    """What `examine` finds in one micro-batch of samples 100, 101 ..."""
    broken = Faults()
    broken.put_into(model, faults)
    micro_batch = (batch_of(rows), rows)
    inner = TrainingModule(model, Squares(broken))  # type: ignore[arg-type]
    finding, _ = examine(inner, [micro_batch], request_of([list(range(100, 100 + rows))], **changes), CPU)
    return finding


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights, buffers, gradients, moments and the state of all generators."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [entry for state in optimizer.state.values() for entry in state.values()]
    numbers: Any = np.random.get_state()[1]
    return [*(t.detach().clone() for t in tensors), torch.get_rng_state(), random.getstate(), numbers.tolist()]


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)


@pytest.mark.parametrize("fault", ["none", "forward", "gradient", "raises"])
def test_weights_gradients_moments_buffers_and_random_numbers_are_as_they_were(fault: str) -> None:
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch_of(8)["x"]).square().sum().backward()
        optimizer.step()
    torch.manual_seed(99)
    before = everything(model, optimizer)
    kinds = {
        "forward": Fault(103, "forward", "blocks.0.act"),
        "gradient": Fault(103, "gradient", "blocks.0.widen.weight"),
        "raises": Fault(103, "forward", "blocks.0.act", value="no number"),  # type: ignore[arg-type]
    }
    finding = look_at(model, [kinds[fault]] if fault in kinds else [])
    assert finding.happens_again is {"none": False, "raises": None}.get(fault, True)
    assert (finding.error is not None) == (fault == "raises")
    after = everything(model, optimizer)
    assert len(before) == len(after)
    assert all(same(left, right) for left, right in zip(before, after, strict=True))
    assert model.training
    assert model.statistics.training


def test_all_samples_that_alone_are_bad_are_named() -> None:
    finding = look_at(Regressor(), [Fault(sample, "forward", "blocks.1.norm") for sample in (101, 102, 107)])
    assert finding.samples == [101, 102, 107]
    assert (finding.place, finding.module, finding.module_kind) == ("module", "blocks.1.norm", "LayerNorm")


def test_samples_that_are_bad_only_together_are_suspects() -> None:
    class Crowded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (math.inf if len(x) > 5 else 1.0)

    finding = look_at(nn.Sequential(nn.Linear(6, 4), Crowded()), [])
    assert (finding.samples, finding.suspects) == ([], list(range(100, 108)))
    assert (finding.place, finding.module) == ("module", "1")


@pytest.mark.parametrize("bad", [[0], [3], [7], [2, 3], [0, 7], list(range(8)), []])
def test_rows_are_found_by_halving(bad: list[int]) -> None:
    looked_at = []

    def is_bad(rows: Sequence[int]) -> bool:
        looked_at.append(len(rows))
        return bool(set(rows) & set(bad))

    assert find_rows(is_bad, range(8)) == bad
    assert len(looked_at) <= max(2, 6 * len(bad))


def test_module_is_blamed_for_a_gradient_that_it_makes_not_finite_by_nature() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.detach()).abs().sqrt() + x  # finite, and without a derivative at 0

    model = nn.Sequential(nn.Linear(6, 4), Root(), nn.Linear(4, 1))
    finding = look_at(model, [])
    assert (finding.place, finding.module, finding.module_kind) == ("gradient", "1", "Root")
    assert sorted(finding.gradients_not_finite) == ["0.bias", "0.weight"]
    assert sorted(name for name, _ in finding.largest_gradients) == ["2.bias", "2.weight"]


def test_module_that_always_returns_minus_infinity_is_not_blamed() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.arange(x.shape[1]) > 3, -math.inf)

    model = nn.Sequential(nn.Linear(6, 6), Masked(), nn.Softmax(dim=-1), nn.Linear(6, 1))
    finding = look_at(model, [Fault(104, "forward", "3")])
    assert (finding.samples, finding.module) == ([104], "3")


def test_residual_beside_a_broken_module_does_not_share_the_blame() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.left(x) + self.right(x)

    for name in ("1.right", "1.left"):
        model = nn.Sequential(nn.Linear(6, 6), Split(), nn.Linear(6, 1))
        assert look_at(model, [Fault(102, "backward", name)]).module == name


def test_weights_that_are_not_finite_are_named_before_any_sample() -> None:
    model = Regressor()
    with torch.no_grad():
        model.blocks[0].back.bias[1] = math.inf
    finding = look_at(model, [])
    assert (finding.place, finding.weights_not_finite, finding.samples) == ("weights", ["blocks.0.back.bias"], [])


def test_time_that_is_up_leaves_the_samples_open() -> None:
    finding = look_at(Regressor(), [Fault(103, "forward", "embed")], seconds=0.0)
    assert (finding.happens_again, finding.samples, finding.module) == (True, [], "embed")


def test_gradient_computed_again_is_that_of_the_step() -> None:
    torch.manual_seed(0)
    model = Regressor().eval()
    inner = TrainingModule(model, Squares())  # type: ignore[arg-type]
    recomputation = Recomputation(inner, request_of(None, num_targets=16, world_size=2, loss_scale=8.0), CPU)
    outcome = recomputation.compute((batch_of(8), 8))
    (model(batch_of(8)["x"]).square().sum() * 2 / 16).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert outcome.norms[name] == pytest.approx(float(parameter.grad.norm()), rel=1e-5)


@pytest.mark.parametrize(
    "batch",
    [
        {"tokens": torch.zeros(1, 64), "starts": torch.zeros(5)},
        {"padded time first": torch.zeros(7, 3, 2), "samples": torch.zeros(3)},
        {"as many steps as samples": torch.zeros(3, 3, 2), "samples": torch.zeros(3, 0)},
        {"nodes": torch.zeros(11, 4), "graph of node": torch.zeros(11), "label": torch.zeros(3)},
    ],
    ids=["packed", "time first", "square", "graphs"],
)
def test_a_batch_without_a_row_for_each_sample_is_not_cut(batch: dict[str, Tensor]) -> None:
    assert not SamplesOf((batch, 64), [3, 8, 9]).can_be_cut


# torch's compiler looks at the gradient of a block's input, and torch warns of it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.faults
def test_module_inside_compiled_blocks_is_named(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "compiled", processes=1, steps=6, recipe={"precision": {"compile": "blocks"}})
    run, _, _ = train_with_faults(plan)
    with torch.no_grad():
        run.strategy.inner.model.blocks[1].widen.weight.fill_(math.nan)
    zeros, ones = torch.zeros(4), torch.ones(4)
    batch = {"features": torch.zeros(4, 6), "wanted": zeros, "counts": ones, "sample": torch.arange(4)}
    finding, _ = examine(run.strategy.inner, [(batch, 4)], request_of([[0, 1, 2, 3]], compiled=True), CPU)
    assert finding.error is None
    assert (finding.place, finding.module) == ("weights", "blocks.1.widen")


# --- what is written ---------------------------------------------------------------------------------------------


def train_with(folder: Path, *faults: dict[str, Any], steps: int = 5, **recipe: Any) -> Any:
    """Train with faults: of the loss, unless they say otherwise."""
    faults = tuple({"rank": 0, "micro_batch": 0, "row": 0, "place": "loss", **fault} for fault in faults)
    return train_with_faults(plan_of(folder, "run", processes=1, steps=steps, faults=faults, recipe=recipe))


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 steps with one bad sample, in step 3."""
    folder = tmp_path_factory.mktemp("broken")
    train_with(folder, {"step": 3, "micro_batch": 1, "row": 2, "place": "forward", "name": "blocks.1.act"})
    return folder / "run"


def test_incident_holds_what_a_stranger_needs(broken_run: Path) -> None:
    folder = broken_run / "incidents" / "step-00000003"
    names = {path.name for path in folder.iterdir()}
    assert names == {"incident.json", "incident.md", "batch-rank-0.safetensors", "weights.safetensors"}
    record = read_incident(folder)
    assert [step for step, _ in record.last_losses] == [1, 2, 3]
    assert record.learning_rate > 0
    assert torch.__version__.startswith(record.environment["torch"])
    text = (folder / "incident.md").read_text()
    sample = record.processes[0].samples[0]
    for said in (f"sample {sample} on process 0", "`blocks.1.act` (GELU)", "What to do", "replay", f"row {sample} of"):
        assert said in text, said
    with safe_open(folder / "batch-rank-0.safetensors", framework="pt") as file:
        assert {name.partition("/")[0] for name in file.keys()} == {"1"}  # noqa: SIM118
        assert sample in file.get_tensor("1/sample").tolist()
    [event] = events(broken_run, "skip")
    assert event["incident"] == "step-00000003"
    assert event["message"].endswith(" incidents/step-00000003/incident.md")


def test_report_shows_the_incident(broken_run: Path) -> None:
    page = write_report([broken_run]).read_text()
    record = read_incident(broken_run / "incidents" / "step-00000003")
    assert "<h2>Incidents</h2>" in page
    assert page.count(record.sentence) >= 2  # among the events, too
    assert 'href="incidents/step-00000003/incident.md"' in page
    assert "blocks.1.act" in page


def test_step_that_goes_wrong_again_on_another_branch_gets_a_folder_of_its_own(broken_run: Path) -> None:
    assert free_path(broken_run / "incidents" / "step-00000003").name == "step-00000003-2"
    assert free_path(broken_run / "incidents" / "step-00000004").name == "step-00000004"
    assert [path.name for path in incident_folders(broken_run)] == ["step-00000003"]


def test_incident_that_cannot_be_written_costs_the_folder_and_not_the_run(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").open().close()  # a run's own folder from now on
    (tmp_path / "run" / "incidents").write_text("in the way")
    run, watching, _ = train_with(tmp_path, {"step": 3})
    assert run.state.step == 5
    assert watching.skipped == [3]
    [event] = events(tmp_path / "run", "skip")
    assert event["incident"] is None
    assert "loss" in event["message"]
    assert str(tmp_path / "run/incidents") in event["message"]


def test_no_more_incidents_than_the_guard_allows_are_looked_into(tmp_path: Path) -> None:
    train_with(tmp_path, *({"step": step} for step in (2, 12, 22)), steps=24, guard={"max_incidents": 2})
    assert [path.name for path in incident_folders(tmp_path / "run")] == ["step-00000002", "step-00000012"]
    assert [event["incident"] for event in events(tmp_path / "run", "skip")][2] is None


def test_batches_and_weights_above_their_limits_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_BATCHES_BYTES", "MAX_WEIGHTS_BYTES"):
        monkeypatch.setattr(f"accel_train.recovery.investigate.{name}", 100)
    train_with(tmp_path, {"step": 2}, steps=3)
    [folder] = incident_folders(tmp_path / "run")
    record = read_incident(folder)
    assert (record.batches, record.weights.file) == ([], None)
    assert not list(folder.glob("*.safetensors"))


BATCH, FILE, OF = [KeptBatch("batch-rank-0.safetensors", 0)], "weights.safetensors", "the weights before the step"


@pytest.mark.parametrize(
    "batches, weights, said",
    [
        (BATCH, KeptWeights(FILE, None, OF), "sample and module"),
        (BATCH, KeptWeights(None, "step-00000002", OF), "before step-00000002"),
        (BATCH, KeptWeights(None, None, OF), "checkpoint.every_steps"),
        ([], KeptWeights(FILE, None, OF), "too large"),
    ],
)
def test_what_to_do_about_a_step_that_was_not_diagnosed_follows_from_what_was_kept(
    batches: list[KeptBatch], weights: KeptWeights, said: str
) -> None:
    incident = incident_with(not_diagnosed="sharded", folder="step-00000003", batches=batches, weights=weights)
    assert said in " ".join(next_actions(incident))


def finding_of(rank: int, **changes: Any) -> Finding:
    known = {"happens_again": False, "host": "n3", "loss_sum_then": 1.0, "loss_sum": 1.0, "gradient_norm": 1.0}
    return Finding(rank, "cuda:1 (GPU)", **{**known, **changes})


@pytest.mark.parametrize(
    "findings, expected, said",
    [
        ([finding_of(0), finding_of(1, loss_sum_then=math.nan)], "transient", "process 1 (cuda:1 (GPU), host n3)"),
        ([finding_of(0), finding_of(1, gradients_finite_then=False)], "transient", "process 1 (cuda:1 (GPU), host n3)"),
        ([finding_of(0), finding_of(1)], "transient", "which one"),
        ([finding_of(0), finding_of(1, happens_again=None, error="OutOfMemoryError: no")], "unknown", "OutOfMemory"),
    ],
)
def test_kind_of_an_incident_follows_from_all_findings(findings: list[Finding], expected: str, said: str) -> None:
    incident = incident_with(processes=findings)
    incident.classification = classify(incident)
    assert incident.classification == expected
    assert said in summarise_incident(incident)


@pytest.mark.parametrize(
    "loss, norm, expected", [(9.0, 9.0, "deterministic"), (1.0, 9.0, "transient"), (9.0, 1.0, "transient")]
)
def test_spike_that_is_not_as_large_again_was_transient(loss: float, norm: float, expected: str) -> None:
    findings = [finding_of(rank, loss_sum=loss * 4, gradient_norm=norm) for rank in (0, 1)]
    assert classify(incident_with(kind="spike", processes=findings)) == expected


def test_spike_that_could_not_be_computed_again_everywhere_is_unknown() -> None:
    for changed in ({"error": "OutOfMemoryError: no"}, {"loss_sum": None}):
        assert classify(incident_with(kind="spike", processes=[finding_of(0), finding_of(1, **changed)])) == "unknown"


# --- batch norm --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_running_statistics_of_a_bad_step_are_put_back(value: float) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    statistics = RunningStatistics(model)
    statistics.keep()
    model(batch_of(8)["x"])
    statistics.put_back(torch.tensor(0.0))
    good = [buffer.clone() for buffer in model.buffers()]
    assert int(model[1].num_batches_tracked) == 1
    statistics.keep()
    model(batch_of(8)["x"].index_fill(0, torch.tensor([2]), value))
    assert not all(torch.isfinite(buffer).all() for buffer in model.buffers())
    # With 1e30 loss and gradients are finite, so the step is not skipped.
    statistics.put_back(torch.tensor(float(math.isnan(value))))
    assert all(torch.equal(left, right) for left, right in zip(good, model.buffers(), strict=True))


def test_watch_leaves_no_hook_behind() -> None:
    model = Regressor()
    with ModuleWatch(model):
        model(batch_of(4)["x"])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
