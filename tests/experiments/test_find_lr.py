"""`accel-train find-lr`: it finds up to which rate the loss falls steeply, says when it cannot tell, and touches
nothing.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import yaml
from PIL import Image

from accel_train.cli.main import main
from accel_train.core.state import StepResult
from accel_train.experiments.find_lr import RangeTest, Recorder, prepare_test, rates_of_test, run_test, suggest
from accel_train.recipe.loader import Recipe
from accel_train.report.charts import local_lines
from tests.support import runs as runs
from tests.support.runs import REPOSITORY
from tests.support.wording import assert_golden


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> Path:
    """In a folder with a recipe and its data, in no launch."""
    monkeypatch.chdir(tmp_path)
    runs.write_corpus(tmp_path)
    recipe = runs.recipe_dict(
        tmp_path,
        task="causal-lm",
        output_dir="run",
        optimizer={"lr_scaling": {"rule": "linear", "base_batch_size": 32}, "ema_decay": 0.9, "layer_decay": 0.5},
        evaluate={"every_steps": 1},
        checkpoint={"every_steps": 1},
    )
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


RATES = np.geomspace(1e-6, 1.0, 100)


def fall(at: np.ndarray, middle: float, width: float) -> np.ndarray:
    return -1 / (1 + np.exp((middle - at) / width))


CURVES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], tuple[float, float]]] = {
    # The loss over the share of the test that is done, and where in it a suggestion may lie.
    "one steep fall": (lambda at: 3 + 2 * fall(at, 0.6, 0.05) + 40 * np.maximum(at - 0.9, 0), (0.6, 0.75)),
    "a long even fall": (lambda at: 3 - 3 * np.clip(at - 0.3, 0, 0.33) + 12 * np.maximum(at - 0.65, 0), (0.5, 0.64)),
    "a small fall and then a great one": (
        lambda at: 3 + 0.3 * fall(at, 0.35, 0.02) + 1.2 * fall(at, 0.6, 0.05) + 20 * np.maximum(at - 0.8, 0),
        (0.6, 0.75),
    ),
    "a cliff": (lambda at: 3 - 3 * np.clip(at - 0.3, 0, 0.3) + 50 * (at > 0.6), (0.4, 0.58)),
}


def curve(name: str = "one steep fall", num_steps: int = 100, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    loss = CURVES[name][0](np.linspace(0, 1, num_steps))
    return loss + noise * np.random.default_rng(seed).standard_normal(num_steps)


def find_learning_rate(recipe: Recipe, *, low: float = 1e-6, high: float = 1.0, num_steps: int = 100) -> RangeTest:
    rates = rates_of_test(low, high, num_steps)
    with TemporaryDirectory() as folder:
        run, recorder = prepare_test(recipe, rates, Path(folder))
        return run_test(run, recorder, rates)


def step(number: int, loss: float) -> StepResult:
    return StepResult(number, loss, 1.0, 1, False, None, False)


@pytest.mark.parametrize("num_steps", [60, 100, 300])
@pytest.mark.parametrize("name", CURVES)
def test_the_last_steep_fall_before_the_lowest_loss_is_found(name: str, num_steps: int) -> None:
    suggestion = suggest(np.geomspace(1e-6, 1.0, num_steps), curve(name, num_steps), diverged=True)
    low, high = CURVES[name][1]
    assert suggestion.index is not None, suggestion.reason
    assert low < suggestion.index / num_steps < high


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("name", CURVES)
def test_seeds_agree_within_a_factor_of_3_or_it_cannot_be_told(name: str, noise: float) -> None:
    found = []
    for seed in range(5):
        suggestion = suggest(RATES, curve(name, noise=noise, seed=seed), diverged=True)
        if suggestion.index is not None:
            found.append(RATES[suggestion.index])
        else:
            assert suggestion.reason.startswith("unclear: ")
            assert noise == 0.3
    assert max(found, default=1) <= 3 * min(found, default=1)


def test_a_steeper_fall_after_the_lowest_point_is_not_taken() -> None:
    wild = np.concatenate([curve(), [30.0, 29.0, 12.0, 7.0, 5.0]])
    found = suggest(np.geomspace(1e-6, 2.0, 105), wild, diverged=True).index
    assert found is not None
    assert 60 < found < 75


def test_the_first_steps_do_not_count() -> None:
    losses = curve(noise=0.02)
    losses[:3] += [2.0, 1.0, 0.5]  # of a model that has just been made
    found = suggest(RATES, losses, diverged=True).index
    assert found is not None
    assert 60 < found < 75


@pytest.mark.parametrize("rise", [0.0, 2.0])
def test_losses_that_only_scatter_or_rise_give_no_suggestion(rise: float) -> None:
    for seed in range(20):
        losses = np.linspace(3, 3 + rise, 100) + 0.1 * np.random.default_rng(seed).standard_normal(100)
        suggestion = suggest(RATES, losses, diverged=False)
        assert suggestion.index is None
        assert "unclear" in suggestion.reason


def test_a_loss_that_diverges_at_once_gives_no_suggestion() -> None:
    suggestion = suggest(RATES[:4], np.array([2.0, 2.1, 9.0, math.nan]), diverged=True)
    assert suggestion.index is None
    assert_golden(suggestion.reason)


def test_a_loss_that_never_rises_asks_for_a_higher_end() -> None:
    suggestion = suggest(RATES[:50], 3 - np.linspace(0, 1, 50) ** 4, diverged=False)
    assert suggestion.index is not None
    assert_golden(suggestion.reason)


def test_a_local_line_is_exact_on_a_line() -> None:
    line = 5 - 0.3 * np.arange(50.0)
    level, slope = local_lines(line, 3.0)
    np.testing.assert_allclose(level, line, atol=1e-9)
    np.testing.assert_allclose(slope, -0.3, atol=1e-9)


@pytest.mark.parametrize("end", [math.nan, math.inf, 50.0])
def test_the_test_ends_when_the_loss_diverges(end: float) -> None:
    recorder = Recorder(num_steps=100)
    ended = 0
    for number in range(1, 60):
        try:
            recorder.on_step(step(number, 3.0 if number < 30 else end), 0.1)
        except Exception:
            ended = number
            break
    assert 30 <= ended <= 31
    assert recorder.diverged


def test_a_step_without_targets_is_no_divergence_and_no_loss_of_0() -> None:
    recorder = Recorder(num_steps=100)
    for number in range(1, 40):
        empty = StepResult(number, math.nan, math.nan, 0, True, None, False)
        recorder.on_step(empty if number in (5, 20) else step(number, 3.0), 0.1)
    assert (recorder.losses, recorder.diverged) == ([3.0] * 39, False)


def test_rates_rise_by_one_factor() -> None:
    rates = rates_of_test(1e-5, 1e-1, 41)
    np.testing.assert_allclose(rates[1:] / rates[:-1], 10**0.1)
    assert rates[0] == pytest.approx(1e-5)
    assert rates[-1] == pytest.approx(1e-1)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--min", "0"], "--min: 0 is not a number above 0"),
        (["--max", "nan"], "--max: nan is not a number"),
        (["--data.train", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["find-lr", "r.yaml", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.splitlines()[-1].startswith("error: ")


def test_a_recipe_gets_a_rate_for_its_learning_rate_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert main(["find-lr", "r.yaml", "--steps", "100", "--min", "1e-5"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(Path("run/find-lr.json").read_text())
    # 8 samples a step for a base of 32: the optimizer gets a quarter of what the recipe says.
    assert found["learning_rate"] / 4 == pytest.approx(found["learning_rate_after_scaling"], rel=0.06)
    assert 1e-4 < found["learning_rate_after_scaling"] < 0.3
    assert f"optimizer.learning_rate: {found['learning_rate']:g}\n" in printed
    assert "(lr_scaling turns" in printed
    assert "<- last steep" in printed
    assert found["steps"][0]["learning_rate"] == pytest.approx(1e-5)
    assert len(found["steps"]) <= 100
    with Image.open("run/find-lr.png") as picture:
        assert picture.size[0] > 1000
    assert sorted(path.name for path in Path("run").iterdir()) == [".accel_train.json", "find-lr.json", "find-lr.png"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_earlier_run_in_the_folder_is_left_as_it_is() -> None:
    def contents() -> dict[Path, bytes]:
        # The ledger notes the two new files.
        files = (path for path in Path("run").rglob("*") if path.is_file() and path.name != ".accel_train.json")
        return {path: path.read_bytes() for path in files}

    assert main(["run", "r.yaml", "--schedule.max_steps", "2"]) == 0
    before = contents()
    assert main(["find-lr", "r.yaml", "--steps", "20"]) == 0
    after = contents()
    assert before.items() <= after.items()
    assert {path.name for path in after.keys() - before.keys()} == {"find-lr.json", "find-lr.png"}


def test_the_steps_are_those_of_a_run_at_the_rates_of_the_test() -> None:
    # At rates too small to move a weight, each loss is that of the untrained model on the run's own samples.
    tiny = ["--optimizer.learning_rate", "1e-30", "--optimizer.ema_decay", "null", "--optimizer.layer_decay", "1"]
    assert main(["run", "r.yaml", "--output_dir", "still", "--schedule.max_steps", "20", *tiny]) == 0
    trained = [line["loss"] for line in runs.metrics(Path("still"))]
    recipe = Recipe.from_yaml("r.yaml", optimizer={"ema_decay": None, "layer_decay": 1.0})
    test = find_learning_rate(recipe, low=1e-32, high=1e-31, num_steps=20)
    assert test.losses.tolist() == pytest.approx(trained, rel=1e-6)
    assert test.learning_rate is None


def test_each_group_of_parameters_keeps_its_share_of_the_rate() -> None:
    recipe = Recipe.from_yaml("r.yaml", optimizer={"layer_decay": 1e-9, "lr_scaling": {"rule": "none"}})
    slow = find_learning_rate(recipe, low=1e-5, high=1.0, num_steps=40)
    recipe = Recipe.from_yaml("r.yaml", optimizer={"layer_decay": 1.0, "lr_scaling": {"rule": "none"}})
    whole = find_learning_rate(recipe, low=1e-5, high=1.0, num_steps=40)
    assert slow.losses.min() > whole.losses.min() + 0.1  # only the last norm learns


@pytest.mark.slow
def test_seeds_agree_on_texts_that_are_grouped_by_length_under_dropout(tmp_path: Path) -> None:
    recipes = REPOSITORY / "recipes"
    found = []
    for seed in range(3):
        recipe = Recipe.from_yaml(
            str(recipes / "text_classification.yaml"),
            seed=seed,
            data={"cache_dir": str(tmp_path / "cache"), "max_length": 16},
        )
        found.append(find_learning_rate(recipe))
    rates = [test.learning_rate for test in found if test.learning_rate is not None]
    assert all("unclear" in test.suggestion.reason for test in found if test.learning_rate is None)
    assert rates
    assert max(rates) <= 3 * min(rates)
    assert all(3e-4 < rate < 1e-2 for rate in rates)  # the loss falls until 4e-3
