"""A bad step of a sharded run is skipped on all processes, and `replay` names sample and module."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from accel_train.core.json_io import read_json, write_json
from accel_train.data.order import DataOrder
from accel_train.observe.incident_record import read_incident
from accel_train.recipe.schema import Recipe
from accel_train.recovery.replay import Replay, format_replay, replay_incident
from accel_train.task import with_data_of
from tests.support.comparisons import assert_same_bits, tensors
from tests.support.number_faults import GAP_STEPS, ONCE, PLACES, assert_named, incident, plan_of, spread
from tests.support.processes import run_forked
from tests.support.runs import TINY_MODEL, event_steps, events, losses, write_corpus, write_yaml
from tests.support.tasks.number_faults_sharded import ShardedLanguageModel

FSDP2 = {"parallel": {"strategy": "fsdp2"}}


def under_zero(stage: int) -> dict[str, Any]:
    """Sections of a recipe; its model is so wide that stage 3 gathers weights (of 100,000 elements and more)."""
    return {"parallel": {"strategy": "deepspeed", "zero_stage": stage}, "options": {"width": 256}}


@pytest.fixture(autouse=True)
def one_process(not_launched: None) -> None:
    """A replay takes one."""


def sample_at(recipe: dict[str, Any], processes: int, place: dict[str, Any]) -> int:
    """What a process reads in a row of a micro-batch of a step."""
    batch = recipe["batch"]
    order = DataOrder(recipe["options"]["num_samples"], batch["global_batch_size"], recipe["seed"])
    rows = batch["global_batch_size"] // processes // batch["gradient_accumulation_steps"]
    share = order.rank_micro_batches(place["step"] - 1, place["rank"], processes, rows)
    return int(share[place["micro_batch"]][place["row"]])


def train(
    folder: Path, name: str, faults: Sequence[dict[str, Any]], steps: int, *, processes: int = 2, **sections: Any
) -> list[int]:
    """Train with these faults; returns the samples that they break."""
    options = {"num_samples": steps * 8 * processes, **sections.pop("options", {})}
    guard = {"max_incidents": 1000, "max_skips_per_1000_steps": 1000, "on_spike": "off", **sections.pop("guard", {})}
    common = {"task": "tests.support.tasks.number_faults_sharded:ShardedRegression", "options": options, "guard": guard}
    recipe = plan_of(folder, name, processes=processes, steps=steps, recipe={**common, **sections})["recipe"]
    samples = [int(fault["sample"]) if "sample" in fault else sample_at(recipe, processes, fault) for fault in faults]
    keys = ("place", "name", "once")
    recipe["options"]["faults"] = [
        {"sample": sample, "value": str(fault.get("value", "nan")), **{key: fault[key] for key in keys if key in fault}}
        for sample, fault in zip(samples, faults, strict=True)
    ]
    path = folder / f"{name}.yaml"
    write_yaml(path, recipe)
    forked = run_forked(
        ["run", str(path)],
        processes,
        folder=folder / f"processes {name}",
        preload=["tests.support.tasks.number_faults_sharded"],
    )
    forked.expect(0)
    return samples


def replayed(run: Path, step: int, *settings: str) -> tuple[Replay, dict[str, Any]]:
    """The replay of an incident, and the incident's record with what the replay found."""
    replay = replay_incident(run / "incidents" / f"step-{step:08d}", "cpu", settings=settings)
    kept = {found.rank: found for found in replay.findings}
    verdict = format_replay(replay).rpartition("verdict: ")[2].splitlines()[0]
    processes = [asdict(kept.get(found.rank, found)) for found in replay.incident.processes]
    classification = verdict.partition(":")[0].lower()
    return replay, {
        **asdict(replay.incident),
        "processes": processes,
        "classification": classification,
        "sentence": verdict,
    }


def at(step: int, rank: int, micro_batch: int, row: int, place: str, name: str = "", **more: Any) -> dict[str, Any]:
    return {
        "step": step, "rank": rank, "micro_batch": micro_batch, "row": row, "place": place, "name": name, **more
    }  # fmt: skip


FAULTS = [
    at(3, 1, 1, 2, "forward", "blocks.1.act"),
    at(13, 1, 1, 1, "backward", "blocks.0.widen"),
    at(23, 0, 0, 0, "forward", "blocks.0", value=math.inf),  # a block: what FSDP2 has put a class of its own around
    at(23, 0, 0, 2, "forward", "blocks.0", value=math.inf),
    at(23, 0, 0, 3, "forward", "blocks.0", value=math.inf),
]
STEPS = 26


def assert_kept_and_named(run: Path, samples: Sequence[int]) -> None:
    """Batches and whole weights of each of FAULTS are kept, and a replay names process, sample and module."""
    folder = run / "incidents" / "step-00000003"
    assert f"accel-train replay {folder} " in events(run, "skip")[0]["message"]
    assert "shard of the weights" in read_incident(folder).not_diagnosed
    assert "accel-train replay incidents/step-00000003" in (folder / "incident.md").read_text()
    # Only the process whose loss was not finite; both where gradients were summed before anything looked at them.
    assert [each.rank for each in read_incident(folder).batches] == [1]
    assert [each["rank"] for each in incident(run, 13)["batches"]] == [0, 1]
    kept, saved = load_file(folder / "weights.safetensors"), tensors(run, 2, "model")
    assert_same_bits({name: saved[name] for name in kept if "statistics" not in name}, {
        name: kept[name] for name in kept if "statistics" not in name
    })  # fmt: skip
    replay, found = replayed(run, 3)
    assert_named(found, FAULTS[0], samples[0])
    assert found["processes"][1]["module_kind"] == "GELU"
    text = format_replay(replay)
    assert f"row {samples[0]} of nowhere" in text
    assert "optimizer.learning_rate" in text.splitlines()[-1]
    [again] = replay.micro_batches
    first = again.watch.first_not_finite()
    assert first is not None
    assert (again.file, again.number, first.name) == ("batch-rank-1.safetensors", 1, "blocks.1.act")
    _, found = replayed(run, 13)
    assert_named(found, FAULTS[1], samples[1])
    for process in found["processes"]:  # with dropout: the random numbers are those of the run
        assert process["loss_sum"] == pytest.approx(process["loss_sum_then"], rel=1e-6)
    _, found = replayed(run, 23)
    broken = found["processes"][0]
    assert (broken["samples"], broken["module"], broken["module_kind"]) == (samples[2:5], "blocks.0", "Block")


def assert_same_run(run: Path, other: Path) -> None:
    """Losses and weights, moments and running statistics at the end, to the bit; the steps of the faults skipped."""
    assert losses(run) == losses(other) or str(losses(run)) == str(losses(other))  # NaN is not NaN
    assert event_steps(run, "skip") == [3, 13, 23]
    for kind in ("model", "optimizer"):
        assert_same_bits(tensors(run, STEPS, kind), tensors(other, STEPS, kind))
    assert not (other / "incidents").exists()


SAVING = {"every_steps": 1, "keep": 50}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs under FSDP2 with the same faults: `kept` and `left_alone`."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "kept", FAULTS, STEPS, checkpoint=SAVING, **FSDP2)
    train(folder, "left_alone", FAULTS, STEPS, guard={"max_incidents": 0}, **FSDP2)
    return folder


def samples_of(run: Path) -> list[int]:
    recipe = yaml.safe_load((run.parent / f"{run.name}.yaml").read_text())
    return [fault["sample"] for fault in recipe["options"]["faults"]]


def test_batches_and_weights_are_kept_and_a_replay_on_one_process_names_sample_and_module(folder: Path) -> None:
    assert_kept_and_named(folder / "kept", samples_of(folder / "kept"))


def test_a_run_that_keeps_bad_steps_is_to_the_bit_the_one_that_does_not(folder: Path) -> None:
    assert_same_run(folder / "kept", folder / "left_alone")
    for step in (3, 13, 23):  # skipped on all processes: weights and moments as they were
        for kind in ("model", "optimizer"):
            before, after = (tensors(folder / "kept", at, kind) for at in (step - 1, step))
            running = [name for name in before if "statistics.running" in name or "num_batches" in name]
            assert_same_bits(*({name: each[name] for name in each if name not in running} for each in (before, after)))


def test_a_replay_reads_a_checkpoint_where_weights_were_too_large_to_keep(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "kept"
    shutil.copytree(folder / "kept", run)
    kept = run / "incidents" / "step-00000003"
    (kept / "weights.safetensors").unlink()
    record = read_json(kept / "incident.json")
    assert record["weights"]["checkpoint"] is None
    write_json(kept / "incident.json", {**record, "weights": {"file": None, "checkpoint": "step-00000002", "of": "x"}})
    replay, found = replayed(run, 3)
    assert replay.weights.startswith("step-00000002, ")
    assert_named(found, FAULTS[0], samples_of(folder / "kept")[0])


@pytest.mark.slow
def test_under_zero_3_batches_and_weights_are_kept_and_a_replay_on_one_process_names_sample_and_module(
    tmp_path: Path,
) -> None:
    samples = train(tmp_path, "kept", FAULTS, STEPS, checkpoint=SAVING, **under_zero(3))
    assert_kept_and_named(tmp_path / "kept", samples)
    train(tmp_path, "left_alone", FAULTS, STEPS, guard={"max_incidents": 0}, **under_zero(3))
    assert_same_run(tmp_path / "kept", tmp_path / "left_alone")


@pytest.mark.faults
@pytest.mark.parametrize("stage", [1, 2])
def test_under_zero_1_and_2_the_run_itself_names_process_sample_and_module(tmp_path: Path, stage: int) -> None:
    samples = train(tmp_path, "looked_into", FAULTS, STEPS, **under_zero(stage))
    train(tmp_path, "left_alone", FAULTS, STEPS, guard={"max_incidents": 0}, **under_zero(stage))
    assert_same_run(tmp_path / "looked_into", tmp_path / "left_alone")
    for fault, sample in zip(FAULTS[:2], samples, strict=False):
        assert_named(incident(tmp_path / "looked_into", fault["step"]), fault, sample)
    assert incident(tmp_path / "looked_into", 23)["processes"][0]["samples"] == samples[2:5]


@pytest.mark.faults
def test_faults_of_every_kind_are_named_on_either_process(tmp_path: Path) -> None:
    """N1, N2 and N6: 24 faults; 17 stay and 7 go."""
    faults = spread([*PLACES, *ONCE], processes=2)
    steps = faults[-1]["step"] + GAP_STEPS
    samples = train(tmp_path, "run", faults, steps, **FSDP2)
    assert event_steps(tmp_path / "run", "skip") == [fault["step"] for fault in faults]
    for fault, sample in zip(faults, samples, strict=True):
        if not fault.get("once"):
            assert_named(replayed(tmp_path / "run", fault["step"])[1], fault, sample)
            continue
        _, found = replayed(tmp_path / "run", fault["step"], "--options.faults", "[]")
        assert found["classification"] == "transient", found["sentence"]
        if fault["place"] in ("forward", "loss"):
            assert f"process {fault['rank']} (cpu" in found["sentence"]


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
    named = {"task": "tests.support.tasks.number_faults_sharded:ShardedLanguageModel", "data": data}
    recipe = Recipe.model_validate(plan_of(folder, "count", processes=1, steps=1, recipe=named)["recipe"])
    task = ShardedLanguageModel()
    count = len(task.load_data(with_data_of(task, recipe), progress=False).train)  # type: ignore[arg-type]
    sections = {
        **named,
        "options": {"num_samples": count},
    }
    return {**FSDP2, **sections, "model": {"config": {**TINY_MODEL, "resid_pdrop": 0.1}}, **changes}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("processes", "parallel", "precision"),
    [
        (2, {}, {"gradient_checkpointing": "selective"}),
        (2, {}, {"mixed_precision": "bf16"}),
        (4, {"dp_shard_size": 2}, {}),
    ],
    ids=["checkpointing", "bf16", "copies"],
)
def test_modules_of_a_language_model_are_named(
    tmp_path: Path, processes: int, parallel: dict[str, Any], precision: dict[str, Any]
) -> None:
    sections = language(tmp_path, precision=precision, parallel={**FSDP2["parallel"], **parallel})
    samples = train(tmp_path, "run", LANGUAGE_FAULTS, 36, processes=processes, **sections)
    for fault, sample in zip(LANGUAGE_FAULTS, samples, strict=True):
        assert_named(replayed(tmp_path / "run", fault["step"])[1], fault, sample)


@pytest.mark.faults
def test_a_replay_names_the_sample_of_a_spike_that_contributes_most(tmp_path: Path) -> None:
    """N7: what one sample of one process wants is absurd."""
    fault, guard = at(70, 1, 1, 2, "data", "wanted", value=300.0), {"on_spike": "skip", "spike_window_steps": 32}
    samples = train(tmp_path, "run", [fault], 72, guard=guard, **FSDP2)
    assert (incident(tmp_path / "run", 70)["kind"], incident(tmp_path / "run", 70)["skipped"]) == ("spike", True)
    _, found = replayed(tmp_path / "run", 70)
    assert f"sample {samples[0]} on process 1" in found["sentence"]
    assert found["processes"][1]["heaviest"][0]["sample"] == samples[0]


@pytest.mark.faults
def test_a_short_step_in_which_a_process_only_keeps_the_others_company_is_replayed(tmp_path: Path) -> None:
    """Its samples are odd in number, so that the first of two processes forwards one that counts for nothing."""
    corpora = (language(tmp_path, num_documents=number, data={"last_batch": "short"}) for number in range(5, 20))
    sections = next(each for each in corpora if each["options"]["num_samples"] % 2)
    count = sections["options"]["num_samples"]
    size = next(size for size in range(16, 40, 2) if count % size > 1)
    step = count // size
    share = DataOrder(count, size, 1, last_batch="short").rank_micro_batches(step, 1, 2, 1)
    fault = {"sample": share[-1][0], "place": "backward", "name": "transformer.h.1.mlp"}
    batch = {"global_batch_size": size, "per_device_batch_size": 1}
    train(tmp_path, "run", [fault], step + 2, batch=batch, **sections)
    _, found = replayed(tmp_path / "run", step + 1)
    both = found["processes"]
    assert [(each["happens_again"], each["samples"]) for each in both] == [(False, []), (True, share[-1])]
    assert (both[1]["module"], both[1]["micro_batch"]) == ("transformer.h.1.mlp", len(share) - 1)
