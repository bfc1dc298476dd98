"""A bad step of a model that is spread over processes (FSDP2) is looked into as one of DDP: rank, sample, module, and whether it stays."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from sharded_fault_task import ShardedLanguageModel
from test_faults_numbers import GAP_STEPS, ONCE, PLACES, assert_named, incident, plan_of, spread
from test_incident import Squares, batch_of
from test_sharding import assert_same_bits, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_train.lockstep import ShardedLockstep
from accel_train.observe.incident_record import read_incident
from accel_train.observe.ledger import write_json
from accel_train.recipe import Recipe
from accel_train.reduction import ShardedReduction
from accel_train.replay import replay_incident
from accel_train.sampling import DataOrder
from accel_train.step import TrainingModule
from forked import Forked, run_forked
from number_fault_task import Regressor
from runs import TINY_MODEL, events, losses, write_corpus

FSDP2 = {"strategy": "fsdp2"}
Start = Callable[..., Forked]


def sample_at(recipe: dict[str, Any], processes: int, place: dict[str, Any]) -> int:
    """What a process reads in a row of a micro-batch of a step."""
    batch = recipe["batch"]
    order = DataOrder(recipe["options"]["num_samples"], batch["global_batch_size"], recipe["seed"])
    rows = batch["global_batch_size"] // processes // batch["gradient_accumulation_steps"]
    share = order.rank_micro_batches(place["step"] - 1, place["rank"], processes, rows)
    return int(share[place["micro_batch"]][place["row"]])


def start(
    folder: Path, name: str, faults: Sequence[dict[str, Any]], steps: int, *, processes: int = 2, **sections: Any
) -> tuple[Forked, list[int]]:
    """Begin to train with these faults; also the samples that they break."""
    options = {"num_samples": steps * 8 * processes, **sections.pop("options", {})}
    guard = {"max_incidents": 1000, "max_skips_per_1000_steps": 1000, "on_spike": "off", **sections.pop("guard", {})}
    common = {"task": "sharded_fault_task:ShardedRegression", "parallel": FSDP2, "options": options, "guard": guard}
    recipe = plan_of(folder, name, processes=processes, steps=steps, recipe={**common, **sections})["recipe"]
    samples = [int(fault["sample"]) if "sample" in fault else sample_at(recipe, processes, fault) for fault in faults]
    keys = ("place", "name", "once")
    recipe["options"]["faults"] = [
        {"sample": sample, "value": str(fault.get("value", "nan")), **{key: fault[key] for key in keys if key in fault}}
        for sample, fault in zip(samples, faults, strict=True)
    ]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    forked = run_forked(
        ["run", str(path)], processes, folder=folder / f"processes {name}", preload=["sharded_fault_task"]
    )
    return forked, samples


def train(folder: Path, name: str, faults: Sequence[dict[str, Any]], steps: int, **more: Any) -> list[int]:
    """The same to the end."""
    forked, samples = start(folder, name, faults, steps, **more)
    assert set(forked.wait()) == {0}, forked.stderr(0) + forked.stderr(1)
    return samples


def at(step: int, rank: int, micro_batch: int, row: int, place: str, name: str = "", **more: Any) -> dict[str, Any]:
    return {
        "step": step, "rank": rank, "micro_batch": micro_batch, "row": row, "place": place, "name": name, **more
    }  # fmt: skip


FAULTS = [
    at(3, 1, 1, 2, "forward", "blocks.1.act"),
    at(13, 0, 0, 0, "forward", "blocks.0", value=math.inf),  # a block: what FSDP2 has put a class of its own around
    at(13, 0, 0, 2, "forward", "blocks.0", value=math.inf),
    at(13, 0, 0, 3, "forward", "blocks.0", value=math.inf),
    at(13, 1, 1, 1, "backward", "blocks.0.widen"),
    at(23, 1, 0, 1, "forward", "head", once=True),
]
STEPS = 26


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs with the same faults: `looked_into` and `left_alone`."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "looked_into", FAULTS, STEPS, checkpoint={"every_steps": 2, "keep": 50})
    train(folder, "left_alone", FAULTS, STEPS, guard={"max_incidents": 0})
    return folder


def assert_same_run(run: Path, other: Path) -> None:
    """Losses and weights, moments and running statistics at the end, to the bit; the steps of the faults skipped."""
    assert losses(run) == losses(other) or str(losses(run)) == str(losses(other))  # NaN is not NaN
    assert [event["step"] for event in events(run, "skip")] == [3, 13, 23]
    for kind in ("model", "optimizer"):
        assert_same_bits(tensors(run, STEPS, kind), tensors(other, STEPS, kind))


def samples_of(run: Path) -> list[int]:
    recipe = yaml.safe_load((run.parent / f"{run.name}.yaml").read_text())
    return [fault["sample"] for fault in recipe["options"]["faults"]]


def test_incidents_name_process_sample_and_module_and_tell_what_stays_from_what_goes(folder: Path) -> None:
    assert_names_all(folder / "looked_into")
    assert "its loss was not finite on process 1 (cpu" in incident(folder / "looked_into", 23)["sentence"]


def assert_names_all(run: Path) -> None:
    """Process, sample and module of each of FAULTS, and what stays of them."""
    samples = samples_of(run)
    assert_named(incident(run, 3), FAULTS[0], samples[0])
    assert incident(run, 3)["processes"][1]["module_kind"] == "GELU"
    both = incident(run, 13)["processes"]
    assert [finding["happens_again"] for finding in both] == [True, True]
    assert (both[0]["samples"], both[0]["module"], both[0]["module_kind"]) == (samples[1:4], "blocks.0", "Block")
    assert (both[1]["samples"], both[1]["place"], both[1]["module"]) == (samples[4:5], "gradient", "blocks.0.widen")
    gone = incident(run, 23)
    assert gone["classification"] == "transient"
    assert not any(finding["error"] for step in (3, 13, 23) for finding in incident(run, step)["processes"])


def test_a_run_whose_bad_steps_are_looked_into_is_to_the_bit_the_one_that_leaves_them_alone(folder: Path) -> None:
    assert not (folder / "left_alone" / "incidents").exists()
    assert_same_run(folder / "looked_into", folder / "left_alone")


@pytest.mark.faults
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_under_zero_incidents_name_the_same(tmp_path: Path, stage: int) -> None:
    sections = under_zero(stage)
    train(tmp_path, "looked_into", FAULTS, STEPS, checkpoint={"every_steps": 2, "keep": 50}, **sections)
    train(tmp_path, "left_alone", FAULTS, STEPS, guard={"max_incidents": 0}, **sections)
    assert_same_run(tmp_path / "looked_into", tmp_path / "left_alone")
    assert_names_all(tmp_path / "looked_into")


def under_zero(stage: int) -> dict[str, Any]:
    """Sections of a recipe; its model is so wide that stage 3 gathers weights (of 100,000 elements and more)."""
    return {"parallel": {"strategy": "deepspeed", "zero_stage": stage}, "options": {"width": 256}}


@pytest.mark.faults
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_under_zero_3_a_process_that_cannot_cut_its_samples_keeps_nobody_waiting(tmp_path: Path, where: str) -> None:
    sections = under_zero(3)
    sections["options"]["fails"] = {"rank": 1, "where": where, "rows_below": 4}
    samples = train(tmp_path, "failing", FAULTS, STEPS, **sections)
    both = incident(tmp_path / "failing", 13)["processes"]
    assert both[0]["samples"] == samples[1:4]
    assert (both[1]["happens_again"], both[1]["samples"]) == (True, [])
    assert both[1]["error"] == "RuntimeError: made to fail"


SAME = (
    "happens_again",
    "place",
    "micro_batch",
    "samples",
    "suspects",
    "module",
    "module_kind",
    "gradients_not_finite",
    "columns",
)


def test_nothing_of_the_turns_is_left_in_a_module(tmp_path: Path) -> None:
    """FSDP2 on one process, which is enough to see which hooks there are, and whose gradients wait."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh, model, batch = init_device_mesh("cpu", (1,)), TrainingModule(Regressor(), Squares()), batch_of(4)  # type: ignore[arg-type]
        blocks = [fully_shard(block, mesh=mesh) for block in model.model.blocks]
        parts = [fully_shard(model, mesh=mesh), *blocks]
        model(batch).backward()
        waiting = [parameter.grad for parameter in model.parameters()]
        groups = [part._get_fsdp_state()._fsdp_param_group for part in parts]
        num_hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        reduction = ShardedReduction(model)
        reduction.sums = sums = [torch.zeros(())]
        with ShardedLockstep(model, torch.device("cpu"), reduction) as lockstep:
            norms = lockstep.take_turn(lambda: lockstep.gradient_norms(model(batch), torch.tensor(2.0)))
        assert reduction.sums is sums
        assert [len(module._forward_pre_hooks) for module in model.modules()] == num_hooks
        assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), waiting, strict=True))
        assert norms.keys() == dict(model.named_parameters()).keys()
        gathered = [each._unsharded_param for group in groups for each in group.fsdp_params]
        assert not any(parameter._post_accumulate_grad_hooks for parameter in gathered)
    finally:
        dist.destroy_process_group()


@pytest.mark.faults
def test_what_is_found_is_what_ddp_finds_gradients_of_each_process_included(folder: Path, tmp_path: Path) -> None:
    train(tmp_path, "whole", FAULTS, STEPS, parallel={"strategy": "ddp"})
    for step in (3, 13, 23):
        ours, theirs = (incident(run, step)["processes"] for run in (folder / "looked_into", tmp_path / "whole"))
        for spread_out, whole in zip(ours, theirs, strict=True):
            assert {name: spread_out[name] for name in SAME} == {name: whole[name] for name in SAME}
            for name in ("loss_sum", "gradient_norm"):
                assert spread_out[name] == pytest.approx(whole[name], rel=1e-4, nan_ok=True)
            norms, expected = (dict(each["largest_gradients"]) for each in (spread_out, whole))
            assert norms == pytest.approx(expected, rel=1e-3)
    assert [len(finding["largest_gradients"]) for finding in ours] == [10, 10]


@pytest.mark.faults
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_process_that_cannot_cut_its_samples_says_so_and_the_other_finds_its_own(
    folder: Path, tmp_path: Path, where: str
) -> None:
    fails = {"rank": 1, "where": where, "rows_below": 4}
    samples = train(tmp_path, "failing", FAULTS, STEPS, options={"fails": fails})
    both = incident(tmp_path / "failing", 13)["processes"]
    assert both[0]["samples"] == samples[1:4]
    assert (both[1]["happens_again"], both[1]["samples"]) == (True, [])
    assert both[1]["error"] == "RuntimeError: made to fail"
    assert_same_run(tmp_path / "failing", folder / "left_alone")


@pytest.mark.faults
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_of_several_copies_of_the_model_none_waits_for_a_process_that_fails(tmp_path: Path, where: str) -> None:
    fails = {"rank": 1, "where": where, "rows_below": 4}
    sections = {"parallel": {**FSDP2, "dp_shard_size": 2}, "options": {"fails": fails}}
    samples = train(tmp_path, "copies", FAULTS, STEPS, processes=4, **sections)
    findings = incident(tmp_path / "copies", 13)["processes"]
    assert [each["samples"] for each in findings] == [samples[1:4], [], [], []]
    assert [each["error"] for each in findings] == [None, "RuntimeError: made to fail", None, None]


@pytest.mark.faults
def test_time_that_is_up_at_once_leaves_the_samples_open_and_nobody_waiting(folder: Path, tmp_path: Path) -> None:
    train(tmp_path, "hurried", FAULTS, STEPS, guard={"incident_seconds": 1e-9})
    finding = incident(tmp_path / "hurried", 3)["processes"][1]
    assert (finding["happens_again"], finding["samples"], finding["module"]) == (True, [], "blocks.1.act")
    assert_same_run(tmp_path / "hurried", folder / "left_alone")


@pytest.fixture
def one_process(not_launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes one; and what `--device cpu` sets is put back."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_an_incident_of_several_processes_is_computed_again_on_one(folder: Path, one_process: None) -> None:
    kept = folder / "looked_into" / "incidents" / "step-00000003"
    replay = replay_incident(kept, "cpu")
    assert replay.weights.startswith("weights.safetensors")
    [again] = replay.micro_batches
    assert (again.file, again.number, again.happens_again) == ("batch-rank-1.safetensors", 1, True)
    first = next(call for call in again.calls if call.inputs_finite and not call.output_finite)
    assert (first.name, first.kind) == ("blocks.1.act", "GELU")
    assert read_incident(kept)["world_size"] == 2


def test_a_checkpoint_stands_in_for_weights_that_were_too_large_to_keep(
    folder: Path, tmp_path: Path, one_process: None
) -> None:
    run = tmp_path / "looked_into"
    shutil.copytree(folder / "looked_into", run)
    kept = run / "incidents" / "step-00000003"
    (kept / "weights.safetensors").unlink()
    record = json.loads((kept / "incident.json").read_text())
    assert record["weights"]["checkpoint"] is None
    write_json(kept / "incident.json", {**record, "weights": {"file": None, "checkpoint": "step-00000002", "of": "x"}})
    replay = replay_incident(kept, "cpu")
    assert replay.weights == "step-00000002, the last checkpoint before the step"
    # The step was skipped, so its weights are those of the step before, which is the one that was saved.
    [again], [before] = replay.micro_batches, replay_incident(folder / kept.relative_to(tmp_path), "cpu").micro_batches
    assert [call.largest for call in again.calls[:4]] == [call.largest for call in before.calls[:4]]


NUM_FORWARDS = 8
"""When step 3 is looked into: two a step, and those of the step after it have been made by then."""


@pytest.mark.faults
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_the_very_first_turn_costs_a_process_its_search_and_no_more(tmp_path: Path, where: str) -> None:
    fails = {"rank": 0, "where": where, "after_calls": NUM_FORWARDS, "until_calls": NUM_FORWARDS + 1}
    samples = train(tmp_path, "run", FAULTS[:1], 6, options={"fails": fails})
    findings = incident(tmp_path / "run", 3)["processes"]
    assert [each["error"] for each in findings] == ["RuntimeError: made to fail", None]
    assert findings[1]["samples"] == samples


@pytest.mark.faults
def test_an_error_in_whatever_a_process_computes_ends_the_job_with_its_text_and_leaves_nobody_waiting(
    tmp_path: Path,
) -> None:
    fails = {"rank": 1, "where": "forward", "after_calls": NUM_FORWARDS}
    forked, _ = start(tmp_path, "run", FAULTS[:1], 6, options={"fails": fails})
    codes = forked.wait(60)
    assert 0 not in codes
    said = forked.stderr(0) + forked.stderr(1)
    assert (
        "looking into a bad step has failed where the other processes cannot go on: RuntimeError: made to fail" in said
    )


@pytest.mark.faults
def test_faults_of_every_kind_are_named_on_either_process(tmp_path: Path) -> None:
    """N1, N2 and N6: 24 faults; 17 stay and 7 go."""
    faults = spread([*PLACES, *ONCE], processes=2)
    steps = faults[-1]["step"] + GAP_STEPS
    samples = train(tmp_path, "run", faults, steps)
    assert [event["step"] for event in events(tmp_path / "run", "skip")] == [fault["step"] for fault in faults]
    for fault, sample in zip(faults, samples, strict=True):
        found = incident(tmp_path / "run", fault["step"])
        if not fault.get("once"):
            assert_named(found, fault, sample)
            continue
        assert found["classification"] == "transient", found["sentence"]
        what = "its loss was not finite" if fault["place"] in ("forward", "loss") else "and gradients were not"
        assert f"{what} on process {fault['rank']} (cpu" in found["sentence"]


LANGUAGE_FAULTS = [
    at(3, 1, 0, 1, "forward", "transformer.h.1.mlp.act"),
    at(13, 0, 1, 2, "forward", "transformer.wte", value=math.inf),
    at(23, 1, 1, 3, "backward", "transformer.h.0.ln_2"),
    at(33, 0, 0, 0, "gradient", "transformer.h.1.attn.c_proj.weight"),
]


def language(folder: Path, **changes: Any) -> dict[str, Any]:
    """The sections of a recipe of language modelling on a corpus that is written there."""
    write_corpus(folder, num_documents=changes.pop("num_documents", 120))
    data = {"train": str(folder / "corpus.jsonl"), **changes.pop("data", {})}
    recipe = Recipe.model_validate(plan_of(folder, "count", processes=1, steps=1, recipe={"data": data})["recipe"])
    count = len(ShardedLanguageModel().load_data(recipe, progress=False).train)  # type: ignore[arg-type]
    sections = {"task": "sharded_fault_task:ShardedLanguageModel", "data": data, "options": {"num_samples": count}}
    return {**sections, "model": {"config": {**TINY_MODEL, "resid_pdrop": 0.1}}, **changes}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("processes", "parallel", "precision"),
    [
        (2, {}, {"gradient_checkpointing": True}),
        (2, {}, {"mixed_precision": "bf16"}),
        (2, {"reshard_after_forward": False}, {}),
        (4, {"dp_shard_size": 2}, {}),
    ],
    ids=["checkpointing", "bf16", "gathered", "copies"],
)
def test_modules_of_a_language_model_are_named(
    tmp_path: Path, processes: int, parallel: dict[str, Any], precision: dict[str, Any]
) -> None:
    sections = language(tmp_path, precision=precision, parallel={**FSDP2, **parallel})
    samples = train(tmp_path, "run", LANGUAGE_FAULTS, 36, processes=processes, **sections)
    for fault, sample in zip(LANGUAGE_FAULTS, samples, strict=True):
        assert_named(incident(tmp_path / "run", fault["step"]), fault, sample)


@pytest.mark.faults
def test_a_spike_is_looked_into_sample_by_sample_whatever_becomes_of_another_process(tmp_path: Path) -> None:
    """N7: what one sample of one process wants is absurd; then the same again, and the other process fails."""
    fault, guard = at(70, 1, 1, 2, "data", "wanted", value=300.0), {"on_spike": "clip", "spike_window_steps": 32}
    samples = train(tmp_path, "run", [fault], 72, guard=guard)
    found = incident(tmp_path / "run", 70)
    assert (found["kind"], found["classification"], found["skipped"]) == ("spike", "deterministic", False)
    assert found["processes"][1]["heaviest"][0]["sample"] == samples[0]
    assert len(found["processes"][0]["heaviest"]) == 8
    assert f"sample {samples[0]} on process 1" in found["sentence"]
    fails = {"rank": 0, "where": "forward", "rows_below": 4}
    train(tmp_path, "failing", [fault], 72, guard=guard, options={"fails": fails})
    findings = incident(tmp_path / "failing", 70)["processes"]
    assert findings[0]["error"] == "RuntimeError: made to fail"
    # The turn in which it failed was spoilt for the other, and made again.
    assert findings[1]["heaviest"] == found["processes"][1]["heaviest"]


@pytest.mark.faults
def test_a_short_step_in_which_a_process_only_keeps_the_others_company_is_looked_into(tmp_path: Path) -> None:
    """Its samples are odd in number, so that the first of two processes forwards one that counts for nothing."""
    corpora = (language(tmp_path, num_documents=number, data={"last_batch": "short"}) for number in range(5, 20))
    sections = next(each for each in corpora if each["options"]["num_samples"] % 2)
    count = sections["options"]["num_samples"]
    size = next(size for size in range(16, 40, 2) if count % size > 1)
    step = count // size
    share = DataOrder(count, size, 1, last_batch="short").rank_micro_batches(step, 1, 2, 1)
    fault = {"sample": share[-1][0], "place": "forward", "name": "transformer.h.1.mlp"}
    batch = {"global_batch_size": size, "per_device_batch_size": 1}
    train(tmp_path, "run", [fault], step + 2, batch=batch, **sections)
    findings = incident(tmp_path / "run", step + 1)["processes"]
    assert [(each["happens_again"], each["samples"]) for each in findings] == [(False, []), (True, share[-1])]
    assert (findings[1]["module"], findings[1]["micro_batch"]) == ("transformer.h.1.mlp", len(share) - 1)
