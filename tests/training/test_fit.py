"""`fit` trains any module of a program, with all guarantees; a task of three methods does the same from a recipe."""

import json
import math
import re
import sys
from ast import literal_eval
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from accel_train import Recipe, RunResult, fit, train
from accel_train.cli.main import main
from tests.support.comparisons import assert_same_bits
from tests.support.processes import run_forked
from tests.support.runs import (
    TESTS,
    Capture,
    Settings,
    losses,
    model_of,
    recipe_dict,
    refused,
    steps_of,
    summary_of,
    write_recipe_file,
)
from tests.support.wording import assert_golden, raises_golden

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS @ torch.tensor([1.0, -2.0, 3.0, 0.5])
TRAIN, EVAL = TensorDataset(INPUTS[:80], TARGETS[:80]), TensorDataset(INPUTS[80:], TARGETS[80:])
SETTINGS: Settings = {"batch_size": 8, "learning_rate": 0.05, "log": {"every_steps": 1, "progress": False}}


def module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square()


def error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"absolute_error": (model(batch[0])[:, 0] - batch[1]).abs().mean()}


def fitted(model: nn.Module, data: Any = TRAIN, **settings: Any) -> RunResult:
    return fit(model, data, **{"loss": squared_error, "output_dir": "run", **SETTINGS, **settings})


@pytest.fixture(autouse=True)
def here(empty_folder: Path) -> Iterator[None]:
    """Each test may have a task of its own."""
    yield
    sys.modules.pop("my_task", None)


def test_a_module_is_trained_in_place_and_the_result_has_model_metrics_and_report() -> None:
    model = module()
    result = fitted(model, metrics=error, eval_data=EVAL, num_epochs=6)
    assert isinstance(result, RunResult)
    assert result.model is model
    saved = model_of(Path("run"))
    assert_same_bits(model.state_dict(), saved)
    with torch.no_grad():
        expected = (model.eval()(EVAL.tensors[0])[:, 0] - EVAL.tensors[1]).abs()
    assert result.metrics["loss"] == pytest.approx(expected.square().mean().item(), rel=1e-6)
    assert result.metrics["absolute_error"] == pytest.approx(expected.mean().item(), rel=1e-6)
    found = list(losses(Path("run")).values())
    assert found[-1] < 0.2 * found[0]
    assert "srcdoc" in result.report()._repr_html_()
    assert Path(result.report()).is_file()


def test_fit_again_resumes_where_it_was_left_and_ends_with_the_same_bits() -> None:
    class Killed(Exception):
        """Ends the first call in the middle of its training."""

    def kill(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise Killed

    calls, broken = 0, module()
    broken.register_forward_pre_hook(kill)
    common: Settings = {"max_steps": 30, "checkpoint": {"every_steps": 5}}
    whole = fitted(module(), output_dir="whole", **common).model
    with pytest.raises(Killed):
        fitted(broken, **common)
    resumed = fitted(nn.Sequential(*module().children()), **common).model
    assert_same_bits(whole.state_dict(), resumed.state_dict())
    assert losses(Path("run")) == losses(Path("whole"))
    assert len(steps_of(Path("run"), "resume")) == 1


def test_who_follows_the_advice_of_fit_gets_the_best_weights_without_training_anew(capsys: Capture) -> None:
    # What is learned is wrong on these samples, so each evaluation is worse than the one before.
    common: Settings = {"max_steps": 20, "eval_data": TensorDataset(EVAL.tensors[0], -EVAL.tensors[1])}
    last = fitted(module(), **common).metrics["loss"]
    advice = re.search(r"pass checkpoint=(.*) to fit\(\) and call fit\(\) again", capsys.readouterr().out)
    assert advice is not None
    result = fitted(module(), **common, checkpoint=literal_eval(advice[1]))
    assert result.summary["best_step"] == 5
    assert result.metrics["loss"] < last
    assert_same_bits(result.model.state_dict(), model_of(Path("run")))
    assert [len(steps_of(Path("run"), kind)) for kind in ("start", "resume")] == [1, 1]


class Pair(NamedTuple):
    """A sample with names."""

    inputs: Tensor
    target: Tensor


@pytest.mark.parametrize("form", ["pair", "mapping", "tensor", "named", "nested", "rows of a list"])
def test_a_batch_has_the_form_in_which_the_data_loader_of_torch_makes_it(form: str) -> None:
    rows = torch.cat([INPUTS, TARGETS[:, None]], dim=1)
    samples: dict[str, Sequence[Any]] = {
        "pair": [(row[:4], row[4]) for row in rows],
        "mapping": [{"inputs": row[:4], "target": row[4]} for row in rows],
        "tensor": list(rows),
        "named": [Pair(row[:4], row[4]) for row in rows],
        "nested": [{"id": "a", "of": [row[:4], {"samples": row[4]}]} for row in rows],
        "rows of a list": list(rows),
    }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = {
            "pair": lambda: (batch[0], batch[1]),
            "mapping": lambda: (batch["inputs"], batch["target"]),
            "tensor": lambda: (batch[:, :4], batch[:, 4]),
            "named": lambda: (batch.inputs, batch.target),
            "nested": lambda: (batch["of"][0], batch["of"][1]["samples"]),
            "rows of a list": lambda: (torch.stack(batch)[:, :4], torch.stack(batch)[:, 4]),
        }[form]()
        return (model(inputs)[:, 0] - target).square().mean()

    collate = list if form == "rows of a list" else None
    rows: Any = samples[form]
    fitted(module(), rows, loss=loss, collate=collate, max_steps=4)
    fitted(module(), TensorDataset(INPUTS, TARGETS), output_dir="reference", max_steps=4)
    assert losses(Path("run")) == pytest.approx(losses(Path("reference")), rel=1e-6)


def test_a_batch_that_is_not_finite_does_not_cost_the_weights() -> None:
    bad = INPUTS.clone()
    bad[17] = float("nan")
    result = fitted(module(), TensorDataset(bad, TARGETS), num_epochs=1)
    assert result.summary["skipped_steps"] == 1
    assert all(weight.isfinite().all() for weight in result.model.parameters())


@pytest.mark.parametrize(
    "changed",
    [
        {"max_steps": 3, "num_epochs": 2},
        {"max_steps": 3, "resume": True},
        {"optimizer": {"learning_rat": 1}},
        pytest.param({"loss": lambda model, batch: model(batch[0]).new_zeros(3)}, id="3 losses"),
        pytest.param({"data": TensorDataset(INPUTS[:0])}, id="no data"),
        *({"max_steps": None, "num_epochs": n} for n in (math.nan, math.inf, 0, -1, 1e300)),
        *({"max_steps": n} for n in (10**20, 0, -5, 2.5)),
        {"batch_size": 10**20},
        {"learning_rate": math.inf},
        {"resume": "sometimes"},
    ],
    ids=str,
)
def test_a_mistake_is_an_error_that_says_what_to_do(changed: Settings) -> None:
    with raises_golden():
        fitted(module(), **changed)


def test_a_task_of_three_methods_and_a_recipe_without_model_and_data_train_and_evaluate(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    Path("my_task.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nfrom accel_train import "
        "ModuleTask\n\n"
        "class Line(ModuleTask):\n"
        "    def data(self):\n"
        "        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(self.recipe.seed))\n"
        "        y = x.sum(dim=1)\n"
        "        return TensorDataset(x[16:], y[16:]), TensorDataset(x[:16], y[:16])\n"
        "    def model(self):\n        return nn.Linear(3, 1)\n"
        "    def loss(self, model, batch):\n        return (model(batch[0])[:, 0] - batch[1]).square()\n"
    )
    monkeypatch.syspath_prepend(".")
    recipe = {
        "task": "my_task:Line",
        "output_dir": "run",
        "schedule": {"max_steps": 20},
        "optimizer": {"learning_rate": 0.1},
        "batch": {"global_batch_size": 8},
    }
    Path("line.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "line.yaml"]) == 0
    final = summary_of(Path("run"))["eval"]["loss"]
    assert final < 0.5
    assert main(["evaluate", "run"]) == 0
    assert f"{final:.4f}" in capsys.readouterr().out


def test_a_task_that_lacks_a_method_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    Path("my_task.py").write_text(
        "from accel_train import ModuleTask\n\nclass Half(ModuleTask):\n    def data(self):\n        return [1], None\n"
    )
    monkeypatch.syspath_prepend(".")
    Path("half.yaml").write_text("{task: my_task:Half, output_dir: run, schedule: {max_steps: 1}}")
    assert main(["plan", "half.yaml"]) == 2
    assert_golden(capsys.readouterr().err.splitlines()[-1])


class Unread(Dataset[Any]):
    """Data whose samples are made by code."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], TARGETS[index]


def test_data_of_any_class_with_length_and_items_will_do() -> None:
    assert fitted(module(), Unread(), max_steps=2).metrics == {}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_processes_the_losses_are_those_of_one(tmp_path: Path, strategy: str) -> None:
    program = TESTS / "support" / "programs" / "fit_module.py"
    for processes in (1, 2):
        folder = tmp_path / f"run-{processes}"
        how = strategy if processes == 2 else "ddp"
        forked = run_forked([str(folder), how], processes, folder=tmp_path / f"processes-{processes}", program=program)
        forked.wait(120.0, stop_at_failure=True)
        assert forked.first_failure() == 0, forked.stderr(0)[-3000:]
    assert losses(tmp_path / "run-2") == pytest.approx(losses(tmp_path / "run-1"), rel=1e-6)
    one, two = (load_file(tmp_path / f"run-{number}/model/model.safetensors") for number in (1, 2))
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_steps", [5, 4], ids=["other", "as many as samples"])
def test_no_sample_is_named_for_a_batch_that_is_padded_time_first(tmp_path: Path, num_steps: int) -> None:
    series = torch.randn(12, num_steps, 3, generator=torch.Generator().manual_seed(1))
    series[6, 1] = torch.nan
    fit(
        nn.Linear(3, 1),
        list(series),  # type: ignore[arg-type]
        loss=lambda model, batch: model(batch).square().mean(),
        collate=lambda samples: torch.stack(list(samples), 1),
        output_dir=tmp_path,
        max_steps=3,
        batch_size=4,
        data={"shuffle": False, "num_workers": 0},
        log={"progress": False},
    )
    [record] = [json.loads(path.read_text()) for path in tmp_path.glob("incidents/*/incident.json")]
    [finding] = record["processes"]
    assert (finding["happens_again"], finding["samples"], finding["suspects"]) == (True, [], [4, 5, 6, 7])


@pytest.mark.parametrize("form", ["mapping", "file", "recipe"])
def test_train_takes_a_recipe_its_sections_or_its_file(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stop(recipe: Any, **_: Any) -> None:
        seen.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[train.__module__], "prepare_run", stop)
    path = write_recipe_file(tmp_path, optimizer={"learning_rate": 0.25})
    mapping = recipe_dict(tmp_path, optimizer={"learning_rate": 0.25})
    given = {"mapping": mapping, "file": path, "recipe": Recipe.from_yaml(str(path))}[form]
    with pytest.raises(KeyboardInterrupt):
        train(given)
    assert seen == [Recipe.from_yaml(str(path))]
    assert seen[0].optimizer.learning_rate == 0.25


def test_train_names_the_setting_of_a_mapping_that_is_wrong(tmp_path: Path) -> None:
    refused(train, recipe_dict(tmp_path, batch={"global_batch_size": -1}), named="batch.global_batch_size=-1")
