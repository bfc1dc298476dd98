"""A layout at toy size equals one process, and a planted fault of a layout is found and named."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from accel_train.cli.main import main
from accel_train.experiments import equality
from accel_train.experiments.equality import Equality, compare_layout, compare_layouts, toy_layouts
from accel_train.experiments.processes import Processes
from accel_train.observe.run_folder import read_metrics
from accel_train.recipe.schema import Recipe
from benchmarks import equality as benchmark
from tests.support.runs import LLAMA, TINY_MODEL, recipe_dict, write_corpus

FSDP2_TP = {"strategy": "fsdp2", "tp_size": 2}
ROWS = {"data": {"format": "prompt_completion", "sequence_length": 48}}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Make a recipe of a Llama over a small corpus, or over prompts with completions of very different lengths."""
    write_corpus(tmp_path)
    lines = [{"prompt": "ab" * (1 + row % 5), "completion": "c" * (1 + row * row * 7 % 37)} for row in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def make(**sections: Any) -> Recipe:
        sections = {"task": "causal-lm", "model": {"config": LLAMA}, **sections}
        tree = recipe_dict(tmp_path, **sections)
        if "format" in tree["data"]:
            tree["data"]["train"] = str(tmp_path / "rows.jsonl")
        return Recipe.model_validate(tree)

    return make


def divide_by_local_tokens() -> None:
    """Plant a fault in this process: each process divides its loss by its own tokens."""
    from accel_train.engine.step import Agreement

    whole = Agreement.share_of_a_target

    def share(self: Agreement) -> Tensor:
        return whole(self) * 0 + 1 / self._here.num_targets

    Agreement.share_of_a_target = share  # type: ignore[method-assign]


def double_gradients() -> None:
    """Plant a fault in this process: gradients are added twice."""
    from accel_train.training import loop

    once = loop.forward_backward

    def twice(strategy: Any, *arguments: Any, **options: Any) -> Tensor:
        loss = once(strategy, *arguments, **options)
        for parameter in strategy.parameters:
            parameter.grad.mul_(2)
        return loss

    loop.forward_backward = twice


def fail() -> None:
    """Plant a fault in this process: training fails by a library's error, which is not a refusal."""
    from accel_train.training import loop

    def broken(*arguments: Any, **options: Any) -> Tensor:
        return Tensor.view(Tensor([1.0]), 0, 7)

    loop.forward_backward = broken


@pytest.mark.parametrize(
    ("plant", "sections", "named"),
    [
        (divide_by_local_tokens, ROWS, "gradient norm of step 1"),
        (double_gradients, {}, "gradient norm of step 1"),
        (fail, {}, "training fails: RuntimeError"),
    ],
)
def test_a_planted_fault_of_a_layout_is_found_and_named(
    recipe: Callable[..., Recipe], tmp_path: Path, plant: Callable[[], None], sections: dict[str, Any], named: str
) -> None:
    layout, plain = toy_layouts(recipe(**sections), 2)
    with Processes(1) as one, Processes(2, begin=plant) as several:
        found = compare_layouts(layout, plain, one, several, tmp_path / "toy")
    assert found.is_different
    assert str(found).startswith(f"DIFFERENT: {named}")


@pytest.mark.parametrize(
    "sections",
    [
        {
            "parallel": {"strategy": "fsdp2"},
            "batch": {"global_batch_size": 8, "gradient_accumulation_steps": 2},
            "precision": {"gradient_checkpointing": "blocks", "compile": True},
            "loss": {"chunked": True},
            "data": {"mask_documents": True},
        },
        {"parallel": FSDP2_TP, "model": {"config": {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096}}},
        {**ROWS, "model": {"config": TINY_MODEL, "lora": {"rank": 2, "dropout": 0.1}}},
    ],
    ids=["fsdp2", "tp", "lora"],
)
def test_a_sound_layout_is_equal_to_one_process(
    recipe: Callable[..., Recipe], tmp_path: Path, sections: dict[str, Any]
) -> None:
    found = compare_layout(recipe(**sections), 2, tmp_path / "toy")
    assert found.difference is not None
    assert 0 < found.difference < 1e-5
    assert str(found) == f"equal to {found.difference:.1e}"


@pytest.mark.parametrize(("floor", "is_different"), [(3e-6, False), (1e-6, True), (0.0, True)])
def test_a_difference_up_to_ten_times_that_of_rounding_is_rounding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, floor: float, is_different: bool
) -> None:
    found = {"loss of step 1": 2e-6, "gradient norm of step 1": 2e-5}
    monkeypatch.setattr(equality, "_differences", lambda *_: (found, {name: f"{name} is 2" for name in found}))
    verdict = equality.compare_folders(tmp_path, tmp_path, 2, floor={"gradient norm of step 1": floor})
    assert (verdict.difference, verdict.of_rounding, verdict.is_different) == (2e-5, floor, is_different)
    assert (verdict.first or "").startswith("gradient norm of step 1" if is_different else "")


def test_rounding_never_excuses_the_first_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"loss of step 1": 2e-5, "loss of step 2": 2e-5}
    monkeypatch.setattr(equality, "_differences", lambda *_: (found, {name: f"{name} is 2" for name in found}))
    verdict = equality.compare_folders(tmp_path, tmp_path, 2, floor=dict.fromkeys(found, 1.0))
    assert (verdict.first or "").startswith("loss of step 1")


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2}}], ids=["whole", "lora"])
def test_rounding_of_the_initial_weights_alone_changes_a_sound_model_by_little_from_its_first_loss_on(
    recipe: Callable[..., Recipe], tmp_path: Path, model: dict[str, Any]
) -> None:
    _, plain = toy_layouts(recipe(model={"config": TINY_MODEL, **model}), 1)
    firsts, differences = set[float](), list[float | None]()
    with Processes(1) as one:
        reference, _ = equality.train_plain(plain, one, tmp_path / "toy")
        # One rounding may leave the first loss as it is.
        for rounding in range(4):
            folder = tmp_path / f"other-{rounding}"
            other = plain.recipe.model_copy(update={"output_dir": str(folder), "seed": 0})
            assert one.call(partial(equality.train_toy, other, rounding=rounding)) is None
            differences.append(equality.compare_folders(reference, folder, 1).difference)
            firsts.add(next(iter(read_metrics(folder)))["loss"])
    assert all(found is not None and 0 < found < 1e-5 for found in differences)
    # Adapters begin at zero, so only frozen weights change this.
    assert len({*firsts, next(iter(read_metrics(reference)))["loss"]}) > 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"config": TINY_MODEL}, "parallel": FSDP2_TP}, "split gpt2"),
        ({"task": "tests.support.tasks.probe:ProbeTask"}, "builds its own model"),
        ({"model": {"config": LLAMA, "trust_remote_code": True}}, "trust_remote_code"),
    ],
)
def test_a_layout_that_is_not_compared_says_why(
    recipe: Callable[..., Recipe], tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    found = compare_layout(recipe(**sections), 2, tmp_path)
    assert (found.difference, found.is_different) == (None, False)
    assert said in str(found.reason)


def test_a_layout_is_as_small_as_its_parts_allow(recipe: Callable[..., Recipe]) -> None:
    sections = {"batch": {"global_batch_size": 64, "per_device_batch_size": 2}, "loss": {"chunked": True}}
    layout, plain = toy_layouts(recipe(parallel={"strategy": "fsdp2", "dp_shard_size": 8}, **sections), 16)
    assert (layout.processes, layout.recipe.parallel.dp_shard_size) == (4, 2)
    assert layout.recipe.batch.gradient_accumulation_steps == 2
    assert (plain.processes, plain.recipe.parallel.strategy, plain.recipe.loss.chunked) == (1, "ddp", False)
    assert plain.recipe.batch.gradient_accumulation_steps == 1
    assert plain.recipe.batch.global_batch_size == layout.recipe.batch.global_batch_size


@pytest.mark.slow
@pytest.mark.parametrize(("first", "code"), [(None, 0), ("loss of step 1", 4)])
def test_rehearse_reports_the_layout_and_a_difference_sets_the_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    not_launched: None,
    first: str | None,
    code: int,
) -> None:
    write_corpus(tmp_path)
    tree = recipe_dict(tmp_path, task="causal-lm", model={"config": LLAMA}, schedule={"max_steps": 500})
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    if first is not None:
        monkeypatch.setattr(
            "accel_train.experiments.rehearse.compare_layout", lambda *_: Equality(2, difference=1.0, first=first)
        )
    assert main(["rehearse", str(tmp_path / "recipe.yaml"), "--steps", "4", "--processes", "2", "--json"]) == code
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["same"], result["equality"]["first"], result["equality"]["processes"]) == (True, first, 2)


FAMILIES = ("llama gpt2 qwen3", "gemma mistral phi3", "opt gpt_neox mixtral", "olmo2 bloom gptj", "apertus diffllama")


@pytest.mark.slow
@pytest.mark.parametrize("families", FAMILIES)
def test_every_layout_of_a_family_is_equal_or_refused(families: str) -> None:
    for family, cells in benchmark.run(families.split(), list(benchmark.CELLS)).items():
        del cells["commit"]
        left = {name: each for name, each in cells.items() if not each.startswith(("equal", "refused"))}
        # AdamW is compared in fp64, in which torch cannot multiply experts.
        without_fp64 = {name for name, each in left.items() if "matrix, got Double" in each}
        assert left.keys() == without_fp64 == ({"AdamW"} if family == "mixtral" else set()), (family, left)
        assert sum(each.startswith("equal") for each in cells.values()) >= 8, family


def test_measured_cells_are_kept_and_only_missing_ones_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(row: str, cell: str, *_: object, **__: object) -> Equality:
        asked.append((row, cell))
        return Equality(2, difference=2e-7) if cell == "DDP" else Equality(0, reason="parallel.tp_size=2: no plan")

    monkeypatch.setattr(benchmark, "measure", measure)
    save = tmp_path / "cells.json"
    benchmark.run(["llama"], ["DDP"], save)
    cells = benchmark.run(["llama", "gpt2"], ["DDP", "TP"], save)
    assert asked == [("llama", "DDP"), ("llama", "TP"), ("gpt2", "DDP"), ("gpt2", "TP")]
    assert "| DDP (2e-07) | TP | - | `llama`, `gpt2` |" in benchmark.section_of(cells)
    cells |= {"qwen3_5_text": {"DDP": "equal to 3.0e-09 in fp64", "TP": "refused: no plan", "commit": "0000000"}}
    cells["gpt2"]["AdamW"] = "equal to 4.0e-12 in fp64"
    section = benchmark.section_of(cells)
    assert "| DDP (2e-07) | TP | - | `llama`, `gpt2` |" in section
    assert "| DDP (3e-09) | TP | - | `qwen3_5_text`* |" in section
    assert "in fp64: equal (4e-12) for `gpt2`." in section
    assert "1 at `0000000`" in section
