"""Optimizers of this package over several processes: the same losses, the same skipped steps, resumed to the bit."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.recipe.loader import Recipe
from tests.parallel.conftest import assert_skipped_to_the_bit, nan_at
from tests.support.comparisons import Train, assert_same_bits, assert_same_run, tensors
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.programs import sharded_muon, sharded_update, two_machines
from tests.support.runs import LLAMA, Settings, forget, losses, model_of, steps_of, write_corpus, write_recipe_file

FSDP2 = {"strategy": "fsdp2"}
BY_HOST = ("adamw_8bit", "schedule_free_adamw", "tests.support.optimizers:Momentum")
NOT_SHARDED = ("adafactor", "adamw_8bit")
"""Refused where weights are: state of another shape than its weight."""
BF16 = "adamw with state_dtype bf16"
NAMES = ("muon", "lion", "adafactor", BF16, *BY_HOST)
TEXT: Settings = {
    "batch": {"global_batch_size": 8, "per_device_batch_size": 2},
    "schedule": {"max_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 5},
    "evaluate": {"every_steps": 4},
}
RATES = {"lion": 1e-3, "adafactor": 3e-2, "tests.support.optimizers:Momentum": 0.3}


def sections(name: str) -> Settings:
    """The sections of a recipe that an optimizer needs as they are here."""
    found: Settings = {"optimizer": {"name": name, "learning_rate": RATES.get(name, 5e-3), "max_grad_norm": 0.5}}
    if name == BF16:
        found["optimizer"] |= {"name": "adamw", "state_dtype": "bf16"}
    if name == "schedule_free_adamw":
        found["optimizer"]["options"] = {"warmup_steps": 2}
        return {**found, "schedule": {"max_steps": 8, "type": "constant"}}
    found["optimizer"]["ema_decay"] = 0.9
    return found


LAYOUTS: tuple[tuple[int, Settings], ...] = (
    (2, FSDP2),
    (2, {}),
    (4, {}),
    (4, FSDP2),
    (4, {**FSDP2, "dp_shard_size": 2}),
    (2, {**FSDP2, "tp_size": 2}),
    (4, {**FSDP2, "tp_size": 2}),
)
FEW = (LAYOUTS[0], LAYOUTS[1], LAYOUTS[5])
"""Muon spreads its own work, by the layout; the others keep a state beside each weight, whatever the layout."""
CASES = [
    pytest.param(name, *layout, marks=() if name == "muon" and layout == LAYOUTS[0] else pytest.mark.slow)
    for name in NAMES
    for layout in (LAYOUTS if name == "muon" else FEW)
    if not (name in NOT_SHARDED and layout[1])
]


def assert_resumed_to_the_bit(train: Train, run: Path, processes: int, text: Settings) -> None:
    """Train the last 4 of the 8 steps once more."""
    kinds = ("model", "optimizer", "average")
    whole = [tensors(run, 8, kind) for kind in kinds]
    assert all(whole)
    if text["optimizer"].get("state_dtype") == "bf16":
        dtypes = CheckpointReader(run / "checkpoints" / "step-00000008", "optimizer").dtypes
        assert {dtype for name, dtype in dtypes.items() if not name.startswith("step.")} == {torch.bfloat16}
    forget(run, 8)
    train("run", processes, **text)
    assert steps_of(run, "resume") == [4]
    for kind, before in zip(kinds, whole, strict=True):
        assert_same_bits(tensors(run, 8, kind), before)


@pytest.mark.parametrize(("name", "processes", "parallel"), CASES)
def test_losses_are_those_of_one_process_and_resumed_it_is_the_same_run_to_the_bit(
    train: Train, name: str, processes: int, parallel: Settings
) -> None:
    text = {**TEXT, **sections(name)}
    if "tp_size" in parallel:
        text["model"] = {"config": {**LLAMA, "vocab_size": 259}}
    alone, run = train("one", 1, **text), train("run", processes, parallel=parallel, **text)
    assert_same_run(run, alone, 1e-5)
    said = (run.parent / "processes" / "rank-0.out").read_text()
    assert ("one wait for" in said) == (name in BY_HOST)
    sharing = parallel.get("dp_shard_size", processes)
    assert (f"each of {sharing} processes" in said) == (name == "muon")
    assert ("8 matrices of" in said or "14 matrices of" in said) == (name == "muon")
    if processes == 2 and "tp_size" not in parallel:
        assert_resumed_to_the_bit(train, run, processes, {**text, "parallel": parallel})


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "parallel"), [(2, {}), (2, FSDP2), (4, {**FSDP2, "dp_shard_size": 2})])
def test_muon_in_bf16_is_near_one_process_and_resumed_it_is_the_same_run_to_the_bit(
    train: Train, processes: int, parallel: Settings
) -> None:
    text = {**TEXT, **sections("muon")}
    wide = train("fp32", 1, **text)
    text["optimizer"]["muon_dtype"] = "bf16"
    alone, run = train("one", 1, **text), train("run", processes, parallel=parallel, **text)
    assert_same_run(run, alone, 1e-3)
    assert_same_run(alone, wide, 1e-2)
    assert losses(alone) != losses(wide)
    assert "optimizer.muon_dtype" in (run.parent / "processes" / "rank-0.out").read_text()
    assert_resumed_to_the_bit(train, run, processes, {**text, "parallel": parallel})


@pytest.mark.slow
def test_each_machine_divides_muons_matrices_among_its_own_processes(train: Train, tmp_path: Path) -> None:
    """Four processes that believe to be on two machines. The guard compares their weights."""
    text = {**TEXT, **sections("muon"), "guard": {"drift_check_steps": 1}}
    alone, run = train("one", 1, **text), tmp_path / "two" / "run"
    run.parent.mkdir()
    write_corpus(run.parent)
    recipe = write_recipe_file(run.parent, **text)
    forked = run_forked(
        ["run", "--verbose", str(recipe)], 4, folder=run.parent / "processes", program=Path(two_machines.__file__)
    )
    forked.expect(0)
    assert_same_run(run, alone, 1e-5)
    assert "each of 2 processes" in (run.parent / "processes" / "rank-0.out").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_resumed_in_one_process_it_is_the_same_run_to_the_bit(train: Train, name: str) -> None:
    text = {**TEXT, **sections(name)}
    assert_resumed_to_the_bit(train, train("run", 1, **text), 1, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [*((name, {}) for name in NAMES), *((name, FSDP2) for name in NAMES if name not in NOT_SHARDED)],
)
def test_nan_on_one_process_changes_no_bit_on_any(train: Train, name: str, parallel: Settings) -> None:
    constant = {"schedule": {"max_steps": 6, "type": "constant"}}
    assert_skipped_to_the_bit(train("run", 2, parallel, **{**sections(name), **nan_at(4), **constant}), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "lion", BF16, "schedule_free_adamw"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, FSDP2), (1, {})), ((1, {}), (2, FSDP2))])
def test_a_run_goes_on_under_another_layout(
    train: Train, name: str, saved: tuple[int, Settings], loaded: tuple[int, Settings]
) -> None:
    text = {**TEXT, **sections(name)}
    run = train("run", saved[0], parallel=saved[1], **text)
    whole = losses(run)
    forget(run, 8)
    train("run", loaded[0], parallel=loaded[1], **text)
    assert steps_of(run, "resume") == [4]
    assert losses(run) == pytest.approx(whole, rel=1e-5)


def test_what_is_not_made_for_zero_is_refused_in_one_line(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, optimizer={"name": "muon"}, parallel={"strategy": "deepspeed"})
    forked = run_forked(["plan", str(recipe)], 1, folder=corpus / "processes")
    assert forked.wait() == [2]
    [line] = [line for line in forked.stderr(0).splitlines() if line.startswith("error: ")]
    for fact in ("parallel.strategy=deepspeed: ", "optimizer.name muon", "Use adamw, adam, sgd"):
        assert fact in line
    assert Recipe.from_yaml(str(recipe)).optimizer.name == "muon"


@pytest.mark.parametrize("parallel", [{}, slow(FSDP2)])
def test_the_model_of_a_schedule_free_run_is_its_average(train: Train, parallel: Settings) -> None:
    run = train("run", 2, **{**TEXT, **sections("schedule_free_adamw"), "parallel": parallel})
    average, weights = (tensors(run, 8, kind) for kind in ("average", "model"))
    saved = model_of(run)
    assert_same_bits({name: saved[name] for name in average}, average)
    assert not any(torch.equal(weights[name], average[name]) for name in average)


@pytest.mark.parametrize(("processes", "copies"), [(2, 1), (4, 1), (4, 2)])
def test_each_sharded_matrix_is_made_orthogonal_by_one_process_alone_as_a_whole_one_is(
    tmp_path: Path, processes: int, copies: int
) -> None:
    forked = run_forked([str(copies)], processes, folder=tmp_path, program=Path(sharded_muon.__file__))
    forked.expect(0)
    made = [json.loads((tmp_path / f"rank-{rank}.out").read_text()) for rank in range(processes)]
    matrices = [[shape for count, *shape in each for _ in range(count)] for each in made]
    assert sorted(chain(*matrices)) == sorted([min(shape), max(shape)] for shape in sharded_muon.SHAPES * copies)
    fewest, most = (pick(map(len, matrices)) for pick in (min, max))
    assert most - fewest <= 1
    # Each process stacks what it has of one shape.
    assert all(len({tuple(shape) for _, *shape in each}) == len(each) for each in made)


@pytest.mark.parametrize("processes", [2, 4])
def test_an_update_of_sharded_weights_has_torchs_bits_without_an_operator_on_dtensors(
    tmp_path: Path, processes: int
) -> None:
    forked = run_forked([], processes, folder=tmp_path, program=Path(sharded_update.__file__))
    forked.expect(0)
    for rank in range(processes):
        layouts = json.loads((tmp_path / f"rank-{rank}.out").read_text())
        # torch's own step creates the state.
        assert all(first > 0 and not any(later) for first, *later in layouts), layouts
