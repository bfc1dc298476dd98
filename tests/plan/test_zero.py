"""What ZeRO cannot do is refused before anything is built, and a plan counts what it takes of each process."""

from pathlib import Path

import pytest
import torch

from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.zero import Zero
from accel_train.plan.format import format_plan
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.schema import Recipe
from accel_train.task import load_task
from tests.support.plan_recipe import parts_of, rows_of
from tests.support.runs import Capture, Settings, tiny_recipe, write_recipe_file
from tests.support.wording import assert_golden, raises_golden

DDP: Settings = {}


def zero(stage: int) -> Settings:
    return {"strategy": "deepspeed", "zero_stage": stage}


@pytest.mark.parametrize(
    ("sections", "fault", "remedy"),
    [
        ({"precision": {"mixed_precision": "fp16"}}, "precision.mixed_precision", "bf16"),
        ({"precision": {"compile": True}}, "precision.compile", "fsdp2 or ddp"),
        ({"evaluate": {"at_start": True}}, "evaluate.at_start", "Leave one"),
        ({"optimizer": {"ema_decay": 0.9}}, "optimizer.ema_decay", "parallel.zero_stage to 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_under_zero_is_refused_by_name_with_what_to_do(
    tmp_path: Path, sections: Settings, fault: str, remedy: str
) -> None:
    recipe = tiny_recipe(tmp_path, **sections, parallel=zero(3))
    with pytest.raises(SettingError) as caught:
        check_compatibility(recipe, load_task(recipe.task), recipe.precision.mixed_precision)
    assert caught.value.settings == ("parallel.strategy", fault)
    assert remedy in caught.value.remedy
    allowed = Recipe.model_validate({**recipe.model_dump(), "parallel": DDP})
    check_compatibility(allowed, load_task(recipe.task), "fp16")


def test_one_process_alone_is_not_put_under_deepspeed() -> None:
    recipe = tiny_recipe(Path("somewhere"), parallel=zero(3))
    cuda = torch.device("cuda")
    assert Zero.choose(recipe.parallel, 1, cuda).value == 1
    assert Zero.choose(recipe.parallel, 4, cuda).value == 4


def test_refused_settings_end_plan_and_run_with_exit_code_2_before_a_model_is_built(
    corpus: Path, capsys: Capture
) -> None:
    recipe = str(write_recipe_file(corpus, parallel=zero(3), optimizer={"ema_decay": 0.9}))
    for command in ("plan", "run"):
        assert main([command, recipe]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert "optimizer.ema_decay" in line
        assert "deepspeed" in line
    assert not (corpus / "run" / "recipe.yaml").exists()


def test_without_the_package_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.parallel.compatibility.find_spec", lambda name: None)
    recipe = tiny_recipe(tmp_path, parallel=zero(2))
    with raises_golden():
        check_compatibility(recipe, load_task(recipe.task))


@pytest.mark.parametrize(
    ("stage", "held"),
    [
        # Of 4 bytes a weight, on 2 processes: weights, a copy of the half that is updated, gradients, 2 moments of a
        # half,
        # gradients on their way, and in stage 3 the weights that are gathered.
        (1, 1 + 0.5 + 1.5 + 1 + 1),
        (2, 1 + 0.5 + 0.5 + 1 + 1),
        (3, 0.5 + 0.5 + 0.5 + 1 + 1 + 1),
    ],
)
def test_plan_counts_the_memory_of_each_stage_and_models_the_time_of_a_step(
    corpus: Path, stage: int, held: float
) -> None:
    recipe = tiny_recipe(corpus, parallel=zero(stage))
    plan = resolve_plan(recipe, 2, "H100")
    parts = parts_of(plan)
    names = ("parameters", "updated weights", "gradients", "gathered weights", "optimizer", "collectives")
    assert sum(parts.get(name, 0) for name in names) == pytest.approx(4 * plan.num_parameters * held)
    assert_golden(rows_of(format_plan(plan), "model", "Time of"))
    assert plan.scale.step is not None
    assert plan.train_seconds == plan.steps.max_steps * plan.scale.step.seconds
