"""`precision.compile: auto` compiles where it pays off, a failure of the compiler costs no run, and a loss in chunks
takes the memory that a step leaves free.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch
from torch._inductor import compile_fx
from torch._inductor import config as inductor

from accel_train import train
from accel_train.core.ownership import RECIPE_FILE
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import resolve_batch
from accel_train.engine import compilation
from accel_train.engine.compilation import BLOCKS_SECONDS, Machine, choose_compile, spare_bytes
from accel_train.engine.resolve import check_recipe
from accel_train.model.fake_step import simulate_step
from accel_train.model.kernels import chunked_loss
from accel_train.model.kernels.chunked_loss import BYTES_PER_LOGIT
from accel_train.model.kernels.held_rows import HeldRows
from accel_train.model.memory_estimate import build_without_weights, largest_samples
from accel_train.recipe.schema import Recipe
from accel_train.task import Task, TaskData
from tests.support.runs import Settings, events, losses, tiny_recipe, write_corpus
from tests.support.wording import assert_golden

GPT2 = {"model_type": "gpt2", "n_positions": 1024}
H100 = Machine("NVIDIA H100 80GB HBM3", 80 * 2**30, "bf16", is_here=False)
STEP_SECONDS = 6 * (124_475_904 - 1024 * 768 + 2 * 12 * 768 * 1024) * 32 * 1024 / 989.4e12
"""The arithmetic of a step of 32 windows of GPT-2 124M on an H100 at its peak."""


def planned(folder: Path, **sections: Any) -> tuple[Recipe, Task, TaskData]:
    own: Settings = {
        "task": "causal-lm",
        "options": {},
        "data": {"train": str(folder / "none.txt"), "sequence_length": 1024, "eval_fraction": 0},
        "tokenizer": {"train_bpe": {"vocab_size": 50257}},
        "model": {"config": GPT2, "pad_vocab_to_multiple_of": 64},
        "batch": {"global_batch_size": 32},
    }
    for name, value in sections.items():
        own[name] = {**own.get(name, {}), **value} if isinstance(value, dict) else value
    recipe, task = check_recipe(tiny_recipe(folder, **own))
    data = task.stand_in_data(recipe, 64)
    assert data is not None
    return recipe, task, data


def chosen(
    folder: Path, max_steps: int = 10_000, machine: Machine = H100, world_size: int = 1, **sections: Any
) -> Choice[Any]:
    recipe, task, data = planned(folder, **sections)
    return choose_compile(recipe, task, data, resolve_batch(recipe.batch, world_size), max_steps, machine)


def test_auto_compiles_if_the_steps_save_more_than_twice_the_time_of_compiling(tmp_path: Path) -> None:
    limit = 2 * BLOCKS_SECONDS / (STEP_SECONDS / 0.3 - STEP_SECONDS / 0.4)
    assert 1_500 < limit < 2_500, "GPT-2 124M: about 2,000 steps on an H100"
    assert [chosen(tmp_path, round(part * limit)).value for part in (0.98, 1.02)] == [False, "blocks"]


def test_auto_compiles_the_whole_model_in_long_runs_of_one_process(tmp_path: Path) -> None:
    assert chosen(tmp_path, 200_000).value == "model"
    assert chosen(tmp_path, 200_000, world_size=2).value == "blocks"
    assert chosen(tmp_path, 200_000, precision={"gradient_checkpointing": "blocks"}).value == "blocks"


TP: Settings = {"parallel": {"tp_size": 2, "strategy": "fsdp2"}, "model": {"config": {"model_type": "llama"}}}
BLOOM: Settings = {"model": {"config": {"model_type": "bloom", "n_layer": 1, "hidden_size": 64}}}
GRAPHS: Settings = {"batch": {"gradient_accumulation_steps": 2}, "precision": {"compile_mode": "reduce-overhead"}}
OBSTACLES: dict[str, tuple[Settings, Machine]] = {
    "a CPU": ({}, Machine("cpu", None, "bf16", is_here=True)),
    "fp32": ({}, H100._replace(precision="no")),
    "an unknown GPU": ({}, H100._replace(name="Some GPU 9")),
    "split layers": (TP, H100),
    "a model that is not checked": (BLOOM, H100),
    "accumulated graphs": (GRAPHS, H100),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_auto_leaves_a_run_as_it_is(name: str, tmp_path: Path) -> None:
    sections, machine = OBSTACLES[name]
    world_size = 2 if name == "split layers" else 1
    choice = chosen(tmp_path, 200_000, machine, world_size, **sections)
    assert choice.value is False
    assert_golden(choice.reason, case=name)


@pytest.fixture
def planned_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs choose as on an H100, and any step saves enough. They compile and compute on this CPU."""
    monkeypatch.setattr(Machine, "here", lambda *_: H100._replace(num_bytes=None))
    monkeypatch.setattr(compilation, "BLOCKS_SECONDS", 0.0)
    torch.compiler.reset()


def run(folder: Path, **sections: Any) -> dict[int, float]:
    folder.mkdir(exist_ok=True)
    write_corpus(folder)
    own: Settings = {"task": "causal-lm", "options": {}, "schedule": {"max_steps": 4}, **sections}
    train(tiny_recipe(folder, **own))
    return losses(folder / "run")


def test_a_run_of_auto_is_compiled_and_keeps_auto_in_its_recipe(planned_gpu: None, tmp_path: Path) -> None:
    found = run(tmp_path)
    [event] = events(tmp_path / "run", "compiled")
    assert event["num_graphs"] == 1
    line = next(line for line in (tmp_path / "run" / RECIPE_FILE).read_text().splitlines() if " compile:" in line)
    assert line.split()[:2] == ["compile:", "auto"]
    assert "auto chose blocks" in line
    assert found == pytest.approx(run(tmp_path / "eager", precision={"compile": False}), rel=1e-5)


class Broken(compile_fx.GraphLowering):
    """Inductor's lowering, which fails in some passes."""

    in_backward = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_backward == self.in_backward:
            raise RuntimeError("no such kernel")
        return super().run(*args, **kwargs)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled before is used."""
    torch.compiler.reset()
    chunked_loss.fused_differentiate.cache_clear()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()
    chunked_loss.fused_differentiate.cache_clear()


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_run_of_auto_goes_on_without_a_compiler_that_fails(
    planned_gpu: None, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    monkeypatch.setattr(Broken, "in_backward", in_backward)
    monkeypatch.setattr(compile_fx, "GraphLowering", Broken)
    found = run(tmp_path)
    [event] = events(tmp_path / "run", "compiled")
    assert "no such kernel" in event["failure"]
    assert found == run(tmp_path / "eager", precision={"compile": False})


def test_a_loss_goes_on_without_a_compiler_that_fails(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_fx, "GraphLowering", Broken)
    logits, labels = torch.randn(6, 11), torch.randint(11, (6, 1))
    arguments = labels, HeldRows(0, 11), (0.0, 0.0), torch.float32
    expected = chunked_loss._differentiate(logits.clone(), *arguments)
    fused = chunked_loss.fused_differentiate()
    with pytest.warns(UserWarning, match="no such kernel"):
        found = fused(logits.clone(), *arguments)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, fused(logits.clone(), *arguments), expected)), "without a warning"


def test_a_loss_in_chunks_takes_the_memory_that_a_step_leaves_free(tmp_path: Path) -> None:
    small = {"config": {**GPT2, "n_layer": 2, "n_embd": 128, "n_head": 2}}
    recipe, task, data = planned(tmp_path, model=small, precision={"compile": True}, batch={"global_batch_size": 8})
    sizes = resolve_batch(recipe.batch, 1)
    spare = spare_bytes(recipe, task, data, sizes, H100)
    assert 0.85 * 72 * 2**30 < spare < 72 * 2**30, "of 80 GiB, a tenth stays free"

    def peak(num_bytes: int) -> int:
        task.spare_bytes = num_bytes
        batch = data.collate(largest_samples(data, 0, 8))
        batch.pop("num_targets")
        found = simulate_step(task, build_without_weights(recipe, task, data), batch, "bf16", like_cuda=True)
        return sum(found.values())

    few, some, all_of_them = peak(0), peak(2**30), peak(spare)
    num_logits = 8 * 1024 * 50304
    assert few < some <= few + 2**30
    assert some < all_of_them <= few + BYTES_PER_LOGIT * num_logits


@pytest.mark.parametrize(
    "changes, machine",
    [({"precision": {"compile": False}}, H100), ({"precision": {"compile": True}}, H100._replace(num_bytes=2**31))],
    ids=["eager", "full"],
)
def test_an_eager_loss_and_a_full_device_keep_small_chunks(tmp_path: Path, changes: Settings, machine: Machine) -> None:
    recipe, task, data = planned(tmp_path, **changes)
    assert spare_bytes(recipe, task, data, resolve_batch(recipe.batch, 1), machine) == 0


def test_the_model_of_a_program_is_not_built_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, task, data = planned(tmp_path, precision={"compile": True})
    recipe = recipe.model_copy(update={"task": "my_package:MyTask"})

    def fail(*_: Any) -> Any:
        raise AssertionError("built")

    monkeypatch.setattr(task, "build_model", fail)
    sizes = resolve_batch(recipe.batch, 1)
    assert spare_bytes(recipe, task, data, sizes, H100) == 0
    assert choose_compile(recipe, task, data, sizes, 200_000, H100).value is False
