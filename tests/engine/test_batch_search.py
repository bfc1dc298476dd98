"""The largest micro-batch that fits is found by trying, agreed on, and remembered; and no number of the run depends on
it.

The limit is real: on the address space of each process (RLIMIT_AS), where an allocation fails as it does on a GPU.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train import Recipe
from accel_train.data.batch_sizes import resolve_batch
from accel_train.engine.batch_search import Trials, open_batch_cache, search
from accel_train.model.fake_step import PeakTracker
from accel_train.model.training_module import TrainingModule
from accel_train.parallel.precision import DdpArguments
from accel_train.plan.plan import resolve_plan
from accel_train.runtime.private import watch_operators
from accel_train.task import TaskData
from tests.support.comparisons import assert_same_bits
from tests.support.processes import Forked, run_forked
from tests.support.runs import Settings, events, losses, recipe_dict, tiny_recipe, write_recipe_file
from tests.support.wording import assert_golden

SECTIONS: Settings = {"task": "tests.support.tasks.address_space:MemoryTask", "schedule": {"max_steps": 4}}
FACTS: Settings = {"mixed_precision": "no", "device": torch.device("cpu"), "device_bytes": 2**33}


def start(folder: Path, started: list[Forked], name: str, processes: int, **sections: Any) -> str:
    """Run to the end; what the main process has printed."""
    (folder / name).mkdir()
    recipe = write_recipe_file(folder, **SECTIONS, output_dir=str(folder / name / "run"), **sections)
    forked = run_forked(["run", str(recipe)], processes, folder=folder / name)
    started.append(forked)
    forked.expect(0, 60)
    return (folder / name / "rank-0.out").read_text()


def batch_of(said: str) -> str:
    """What was printed of the batch, without the file that remembers it."""
    return "\n".join(line.partition("; remembered")[0] for line in said.splitlines() if line.startswith("batch"))


def forwards(folder: Path, rank: int) -> list[int]:
    """Rows of each training forward of a process since the last time this was asked."""
    path = folder / "forwards" / f"rank-{rank}.txt"
    rows = [int(line) for line in path.read_text().split()]
    path.unlink()
    return rows


@pytest.mark.slow
def test_ranks_agree_on_what_the_smallest_holds_and_remember_it_and_a_wrong_memory_is_corrected(
    corpus: Path, started: list[Forked]
) -> None:
    (corpus / "forwards").mkdir()
    options = {"ragged": True, "mebibytes_a_row": 512, "forwards": str(corpus / "forwards")}
    limited = {**options, "address_space_gibibytes": [8, 4.5]}
    sections: Settings = {"batch": {"global_batch_size": 32}}

    said = start(corpus, started, "without", 2, **sections, options=options)
    assert_golden(batch_of(said), "without")
    for rank in (0, 1):
        assert set(forwards(corpus, rank)) == {16}

    said = start(corpus, started, "searched", 2, **sections, options=limited)
    assert_golden(batch_of(said), "searched")
    first, second = forwards(corpus, 0), forwards(corpus, 1)
    assert (first[:2], set(first[2:])) == ([16, 8], {4})
    assert (second[:3], set(second[3:])) == ([16, 8, 4], {4})
    assert losses(corpus / "searched/run") == pytest.approx(losses(corpus / "without/run"), rel=1e-6)

    said = start(corpus, started, "remembered", 2, **sections, options=limited)
    assert "4  (found 20" in said
    assert forwards(corpus, 0) == first[2:]
    assert forwards(corpus, 1) == second[3:]
    assert losses(corpus / "remembered/run") == losses(corpus / "searched/run")

    records = list((corpus / "cache" / "micro_batches").glob("*.json"))
    assert len(records) == 2  # one for each limit; what nobody searched for is not kept
    for path in records:
        path.write_text(path.read_text().replace('"per_device_batch_size": 4', '"per_device_batch_size": 8'))
    start(corpus, started, "wrong", 2, **sections, options=limited)
    [told] = events(corpus / "wrong/run", "out_of_memory")
    assert told["ranks"] == [1]
    assert "step 1 with 8" in told["message"]
    assert losses(corpus / "wrong/run") == pytest.approx(losses(corpus / "without/run"), rel=1e-6)
    assert {json.loads(path.read_text())["per_device_batch_size"] for path in records} == {4}


@pytest.mark.slow
def test_sharded_model_is_not_tried_and_begins_with_all_samples_at_once(corpus: Path, started: list[Forked]) -> None:
    (corpus / "forwards").mkdir()
    options = {"mebibytes_a_row": 1, "forwards": str(corpus / "forwards"), "address_space_gibibytes": [8, 8]}
    batch = {"global_batch_size": 32}
    said = start(corpus, started, "sharded", 2, batch=batch, parallel={"strategy": "fsdp2"}, options=options)
    assert_golden(batch_of(said))
    assert set(forwards(corpus, 0)) == {16}


class Normalised(nn.Module):
    """Draws, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


class Sums:
    """A task as far as a trial needs one; it draws, and with more rows than `most` it runs out of memory."""

    def __init__(self, most: int = 8) -> None:
        self.most, self.tried = most, list[int]()

    def loss_sum(self, model: Normalised, batch: Mapping[str, Tensor]) -> Tensor:
        self.tried.append(len(batch["rows"]))
        loss = model.layers(batch["rows"]).sum()
        random.random()
        if len(batch["rows"]) > self.most:
            torch.empty(2**62, dtype=torch.uint8)
        return loss


def trials_of(recipe: Recipe, task: Sums, *, num_samples: int = 8) -> Trials:
    torch.manual_seed(0)
    rows = torch.randn(num_samples, 4)

    def collate(samples: Any) -> dict[str, Any]:
        return {"rows": torch.stack(list(samples)), "num_targets": len(samples)}

    data = TaskData(rows, None, collate, "")  # type: ignore[arg-type]
    inner = TrainingModule(Normalised(), task)  # type: ignore[arg-type]
    return Trials(recipe, data, inner, Accelerator(cpu=True))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return tiny_recipe(tmp_path, optimizer={"ema_decay": 0.9})


@pytest.mark.parametrize(
    ("share", "most", "found", "tried"),
    [(8, 8, 8, [8]), (12, 5, 4, [12, 6, 4]), (97, 8, 1, [97]), (6, 0, 1, [6, 3, 2])],
)
def test_sizes_are_tried_from_the_largest_down_and_a_single_sample_is_not(
    recipe: Recipe, share: int, most: int, found: int, tried: list[int]
) -> None:
    task = Sums(most)
    answer = search(trials_of(recipe, task, num_samples=share), share, device_bytes=2**20)
    assert answer.value == found
    assert task.tried == tried
    assert_golden(answer.reason)


def test_the_search_says_that_it_measures_eager_code(recipe: Recipe) -> None:
    compiled = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compile": "blocks"})})
    answer = search(trials_of(compiled, Sums(8), num_samples=8), 8, device_bytes=2**20)
    assert_golden(answer.reason)


def test_nothing_is_tried_where_gradients_and_headroom_do_not_fit(recipe: Recipe) -> None:
    task = Sums()
    answer = search(trials_of(recipe, task), 8, device_bytes=2**62)
    assert answer.value == 1
    assert_golden(answer.reason)
    assert task.tried == []


@pytest.mark.parametrize("fail", [False, True])
def test_trial_leaves_no_trace_also_where_it_fails(recipe: Recipe, fail: bool) -> None:
    trials = trials_of(recipe, Sums(2 if fail else 8))
    parameters = list(trials.inner.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = {name: value.clone() for name, value in trials.inner.state_dict().items()}
    state, own = torch.get_rng_state(), random.getstate()
    with trials.as_in_a_step(0):
        assert all(parameter.grad is not None for parameter in parameters)
        assert trials.fits(4) != fail
        assert int(trials.inner.model.layers[1].num_batches_tracked) == 1  # type: ignore[union-attr,index]
    assert_same_bits(trials.inner.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == own
    assert parameters[0].grad.eq(1).all()
    assert [parameter.grad for parameter in parameters[1:]] == [None] * (len(parameters) - 1)


def test_a_mistake_in_a_forward_is_no_lack_of_memory(recipe: Recipe) -> None:
    trials = trials_of(recipe, Sums(), num_samples=1)
    with trials.as_in_a_step(0), pytest.raises(ValueError, match=r"torch\.Size"):
        trials.fits(1)


def test_trial_holds_what_a_step_holds_beside_activations(recipe: Recipe) -> None:
    trials = trials_of(recipe, Sums())

    def held(headroom_bytes: int = 0) -> int:
        tracker = PeakTracker(None)
        with watch_operators(tracker.see), trials.as_in_a_step(headroom_bytes):
            return tracker.now.total()

    weights, whole = sum(4 * parameter.numel() for parameter in trials.inner.parameters()), held()
    assert held(1000) - whole == 1000
    trials.inner.requires_grad_(False)
    assert whole - held() == 4 * weights  # gradients, two moments of AdamW, and the averaged weights


@pytest.mark.parametrize(("strategy", "processes", "copies"), [("ddp", 2, 1), ("ddp", 1, 0), ("deepspeed", 2, 0)])
def test_a_trial_of_a_step_that_accumulates_holds_ddp_s_buckets_beside_the_gradients(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, strategy: str, processes: int, copies: int
) -> None:
    section = recipe.parallel.model_copy(update={"strategy": strategy})
    trials = replace(trials_of(recipe, Sums()), recipe=recipe.model_copy(update={"parallel": section}))
    monkeypatch.setattr(Accelerator, "num_processes", processes)
    weights = sum(4 * parameter.numel() for parameter in trials.inner.parameters())

    def peak(*, accumulates: bool) -> int:
        tracker = PeakTracker(None)
        with trials.as_in_a_step(0), watch_operators(tracker.see):
            assert trials.fits(4, accumulates=accumulates)
        assert tracker.now.total() == 0
        return tracker.peak.total()

    assert peak(accumulates=True) - peak(accumulates=False) == copies * weights


def test_ddp_adds_nothing_to_what_is_to_come_for_its_buckets_are_the_gradients(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    weights = sum(4 * parameter.numel() for parameter in layers.parameters())
    arguments = DdpArguments(gradient_as_bucket_view=True, batched_grad_copy=True)  # as `start_accelerator` has it
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        module = nn.parallel.DistributedDataParallel(layers, **arguments.to_kwargs())
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            module(torch.randn(1, 256)).sum().backward()
        gradients = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
        buckets = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in gradients}
        del module  # before the group: freeing both could hang (torch 2.13)
    finally:
        dist.destroy_process_group()
    assert len(buckets) < len(gradients) == 8  # memory of several gradients at once is a bucket's
    assert sum(buckets.values()) == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize(
    "changed", ["optimizer", "precision", "model", "sample", "device_bytes", "world_size", "mixed_precision", "frozen"]
)
def test_answer_is_that_of_its_model_input_and_device_alone(recipe: Recipe, changed: str) -> None:
    sample = {"rows": torch.zeros(1, 128)}
    model, sizes = nn.Linear(4, 4), resolve_batch(recipe.batch, 1)
    one = open_batch_cache(recipe, model, sizes, sample, **FACTS)
    one.write(4, "measured")
    assert (open_batch_cache(recipe, model, sizes, sample, **FACTS).read() or [0])[0] == 4
    if changed == "optimizer":
        recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"name": "sgd"})})
    if changed == "precision":
        precision = recipe.precision.model_copy(update={"gradient_checkpointing": True})
        recipe = recipe.model_copy(update={"precision": precision})
    if changed == "model":
        model = nn.Linear(4, 5)
    if changed == "frozen":
        model.weight.requires_grad_(False)
    if changed == "sample":
        sample = {"rows": torch.zeros(1, 256)}
    if changed == "world_size":
        sizes = resolve_batch(recipe.batch, 2)
    others = {"device_bytes": 2**34, "mixed_precision": "bf16"}
    facts = FACTS | ({changed: others[changed]} if changed in others else {})
    assert open_batch_cache(recipe, model, sizes, sample, **facts).read() is None
    assert one.read() is not None


@pytest.mark.parametrize("damage", ["", "{", "[]", "5", '{"per_device_batch_size": "4"}'])
def test_damaged_memory_is_none(recipe: Recipe, damage: str) -> None:
    one = open_batch_cache(recipe, nn.Linear(4, 4), resolve_batch(recipe.batch, 1), {}, **FACTS)
    assert one.read() is None
    one.write(4, "measured")
    whole = json.loads(one.path.read_text())
    for size in (3, 0, -4, 4.0, True, "4", None):
        one.path.write_text(json.dumps({**whole, "per_device_batch_size": size}))
        assert one.read() is None
    one.path.write_text(damage)
    assert one.read() is None


def test_a_cache_that_cannot_be_written_to_is_said_and_no_error(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where the folder should be")
    one = open_batch_cache(recipe, nn.Linear(4, 4), resolve_batch(recipe.batch, 1), {}, **FACTS)
    assert one.write(4, "measured").startswith(f"not remembered: {tmp_path}/cache/micro_batches ")


def test_plan_for_a_gpu_says_that_a_run_will_look(corpus: Path, not_launched: None) -> None:
    def notes(gpu: str | None, **batch: Any) -> str:
        sections = recipe_dict(corpus, task="causal-lm", batch={"global_batch_size": 8, **batch})
        return " ".join(resolve_plan(Recipe.model_validate(sections), 1, gpu).notes)

    said = "before its first step a run measures the largest of 1, 2, 4, 8 that leaves 10% of each GPU free"
    assert said in notes("NVIDIA H200")
    assert said not in notes("NVIDIA H200", gradient_accumulation_steps=1)
    assert said not in notes("NVIDIA H200", per_device_batch_size=4)
