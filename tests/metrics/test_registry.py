"""The modules of `evaluate`: equal to scikit-learn and scipy, combined and in several processes, without network or
files.
"""

import math
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from accel_train.metrics import METRICS, load_metric
from tests.support.predictions import draw
from tests.support.runs import refused
from tests.support.wording import raises_golden

CLASS_METRICS = {
    "accuracy": sk.accuracy_score,
    "mcc": sk.matthews_corrcoef,
    **{
        f"{name}_{average}": lambda y, p, score=score, average=average: score(y, p, average=average, zero_division=0)
        for name, score in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score))
        for average in ("macro", "micro", "weighted")
    },
}


@pytest.fixture
def quiet_cache(tmp_path: Path) -> dict[str, Any]:
    """`evaluate` makes a folder for each module, wherever it keeps the values."""
    return {"cache_dir": str(tmp_path / "cache")}


@pytest.mark.parametrize("name", CLASS_METRICS)
def test_a_module_scores_what_sklearn_does(name: str, quiet_cache: dict[str, Any]) -> None:
    labels, predictions = draw(100, 4)
    labels[labels == 2] = 9  # any integers are labels
    metric = load_metric(name, **quiet_cache)
    metric.add_batch(predictions=predictions[:70].tolist(), references=labels[:70].tolist())
    metric.add_batch(predictions=torch.tensor(predictions[70:]), references=torch.tensor(labels[70:]))
    assert metric.compute() == pytest.approx({name: CLASS_METRICS[name](labels, predictions)}, abs=1e-12)


def test_the_average_of_a_module_can_be_chosen_later_and_binary_is_about_one_class(quiet_cache: dict[str, Any]) -> None:
    labels, predictions = draw(50, 2)
    f1 = load_metric("f1", **quiet_cache)
    for average in ("macro", "binary"):
        found = f1.compute(predictions=predictions, references=labels, average=average)
        assert found == pytest.approx({"f1": sk.f1_score(labels, predictions, average=average)}, abs=1e-12)
    found = load_metric("f1_binary", **quiet_cache).compute(predictions=predictions, references=labels, pos_label=0)
    assert found == pytest.approx({"f1_binary": sk.f1_score(labels, predictions, pos_label=0)}, abs=1e-12)
    for average in ("binary", "makro"):
        classes = [0, 1, 2]
        named = f"average|'{average}'|'macro'"
        refused(f1.compute, predictions=classes, references=classes, average=average, named=named)


@pytest.mark.parametrize("name", CLASS_METRICS)
def test_a_module_without_a_sample_scores_nan(name: str, quiet_cache: dict[str, Any]) -> None:
    assert math.isnan(load_metric(name, **quiet_cache).compute(predictions=[], references=[])[name])


def test_auroc_and_correlation_modules_score_what_sklearn_and_scipy_do(quiet_cache: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    binary, scores = generator.integers(0, 2, 60), generator.random(60).round(1)
    metric = load_metric("auroc", **quiet_cache)
    found = metric.compute(prediction_scores=scores, references=binary)
    assert found == pytest.approx({"auroc": sk.roc_auc_score(binary, scores)}, abs=1e-12)
    labels, probabilities = generator.integers(0, 3, 60), generator.dirichlet([1, 1, 1], 60)
    found = metric.compute(prediction_scores=probabilities, references=labels)
    wanted = sk.roc_auc_score(labels, probabilities, multi_class="ovr")
    assert found == pytest.approx({"auroc": wanted}, abs=1e-12)
    for name, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        found = load_metric(name, **quiet_cache).compute(predictions=scores, references=binary + scores**2)
        assert found == pytest.approx({name: function(scores, binary + scores**2).statistic}, abs=1e-12)


def test_mean_iou_takes_masks_of_any_size_and_ignores_what_it_is_told(quiet_cache: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    masks = [generator.integers(0, 3, shape) for shape in ((4, 6), (5, 3))]
    said = [np.where(generator.random(mask.shape) < 0.7, mask, 0) for mask in masks]
    masks[0][0] = 255
    metric = load_metric("mean_iou", **quiet_cache)
    for mask, prediction in zip(masks, said, strict=True):
        metric.add_batch(predictions=prediction[None], references=mask[None])
    found = metric.compute(num_labels=4, ignore_index=255)
    truth, flat = (np.concatenate([mask.ravel() for mask in each]) for each in (masks, said))
    each = sk.jaccard_score(truth[truth < 4], flat[truth < 4], average=None)
    assert found["mean_iou"] == pytest.approx(each.mean(), abs=1e-12)
    assert found["per_class_iou"] == pytest.approx([*each, math.nan], abs=1e-12, nan_ok=True)
    equal = np.zeros((2, 3, 3), dtype=np.int64)  # of one size, which `datasets` stacks
    assert metric.compute(predictions=equal, references=equal, num_labels=2)["mean_iou"] == 1.0
    with raises_golden():
        metric.compute(predictions=[[[0]]], references=[[[0, 1]]], num_labels=2)


def test_perplexity_is_of_all_targets_alike(quiet_cache: dict[str, Any]) -> None:
    metric = load_metric("perplexity", **quiet_cache)
    found = metric.compute(loss_sums=[6.0, 1.0], num_targets=[3, 1])
    assert found == pytest.approx({"perplexity": math.exp(7 / 4)})
    assert metric.compute(loss_sums=[1e9], num_targets=[1]) == {"perplexity": math.inf}
    metric.add(loss_sums=0.0, num_targets=0)
    assert math.isnan(metric.compute()["perplexity"])


def test_modules_can_be_combined_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    monkeypatch.chdir(tmp_path)
    names = ("accuracy", "f1", "f1_weighted", "mcc")
    combined = evaluate.combine([load_metric(name, cache_dir=str(tmp_path / "cache")) for name in names])
    labels, predictions = draw(40, 3)
    for part in (slice(15), slice(15, None)):
        combined.add_batch(predictions=predictions[part], references=labels[part])
    found = combined.compute()
    assert found == pytest.approx(
        {name: CLASS_METRICS["f1_macro" if name == "f1" else name](labels, predictions) for name in names}, abs=1e-12
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_several_processes_score_together(tmp_path: Path) -> None:
    """The second process is a real one; this one is the first, which computes."""
    labels, predictions = draw(30, 3)
    shared = {"num_process": 2, "experiment_id": "both", "cache_dir": str(tmp_path), "timeout": 100}
    code = (
        "import sys; from accel_train.metrics import load_metric; metric = load_metric('f1', process_id=1, "
        f"**{shared!r}); print('ready', flush=True); sys.stdin.readline(); "
        f"metric.add_batch(predictions={predictions[20:].tolist()}, references={labels[20:].tolist()}); "
        "assert metric.compute() is None; print('done')"
    )
    other = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdin is not None
        metric = load_metric("f1", process_id=0, **shared)
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        metric.add_batch(predictions=predictions[:20], references=labels[:20])
        found = metric.compute()
        other.communicate()
    assert other.returncode == 0
    assert found == pytest.approx({"f1": CLASS_METRICS["f1_macro"](labels, predictions)}, abs=1e-12)
    assert not list(tmp_path.rglob("*.arrow"))


def test_every_name_loads_a_module_of_its_own_name_that_can_be_pickled(quiet_cache: dict[str, Any]) -> None:
    for name in METRICS:
        metric = load_metric(name, **quiet_cache)
        assert name.startswith(metric.name)
        assert pickle.loads(pickle.dumps(metric)).name == metric.name  # noqa: S301


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    for name in ("acuracy", "zzz"):
        with raises_golden(case=name):
            load_metric(name)


def test_the_hub_is_asked_only_with_permission_and_only_for_what_is_not_here(
    monkeypatch: pytest.MonkeyPatch, quiet_cache: dict[str, Any]
) -> None:
    from evaluate import loading

    asked = []

    def no_network(name: str, **options: Any) -> None:
        asked.append(name)
        raise ConnectionError("the network is off\nsecond line")

    monkeypatch.setattr(loading, "load", no_network)
    load_metric("accuracy", allow_hub=True, **quiet_cache)
    refused(load_metric, "rouge", named="metric 'rouge'|allow_hub_metrics")
    assert asked == []
    with raises_golden():
        load_metric("rouge", allow_hub=True)
    assert asked == ["rouge"]


def test_naming_the_metrics_imports_neither_torch_nor_evaluate() -> None:
    code = (
        "import sys, accel_train.metrics.scores; print([name for name in ('torch', 'evaluate') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_function_of_a_module_gives_a_number_under_its_name_or_numbers_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("metrics_of_mine")
    module.cost = lambda predictions, references: (predictions != references).sum()  # type: ignore[attr-defined]
    module.both = lambda predictions, references: {"a": 1.0, "b": 2.0}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "metrics_of_mine", module)
    columns = {"predictions": np.array([0, 1, 1]), "references": np.array([1, 1, 0])}
    assert load_metric("metrics_of_mine:cost").compute(**columns) == {"cost": 2}
    assert load_metric("metrics_of_mine:both").compute(**columns) == {"a": 1.0, "b": 2.0}
    refused(load_metric, "metrics_of_mine:missing", named="evaluate.metrics='metrics_of_mine:missing'")
