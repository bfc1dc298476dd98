import math
from typing import Any

import pytest
from scipy.stats import fisher_exact

from accel_train.core.metric_names import is_lower_better, show_metric
from accel_train.metrics.baselines import (
    Unbeaten,
    compare,
    format_main_score,
    format_scores,
    likely_causes,
    rows_of,
    unbeaten_baseline,
)
from tests.support.wording import assert_golden

FACTS: dict[str, Any] = {
    "run_folder": "runs/a", "steps": 1200, "epochs": 3.0, "pretrained": False, "parameters": 124_000, "samples": 5000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "baselines", "main", "expected"),
    [
        ({"accuracy": 0.9}, {"majority_accuracy": 0.5, "tfidf_accuracy": 0.89}, "loss", None),
        (
            {"accuracy": 0.8},
            {"majority_accuracy": 0.5, "tfidf_accuracy": 0.89},
            "loss",
            ("TF-IDF", "accuracy", 0.8, 0.89),
        ),
        (
            {"accuracy": 0.4},
            {"majority_accuracy": 0.5, "tfidf_accuracy": 0.89},
            "loss",
            ("TF-IDF", "accuracy", 0.4, 0.89),
        ),
        # A model that answers with the commonest class has learned nothing.
        ({"accuracy": 0.5}, {"majority_accuracy": 0.5}, "loss", ("majority", "accuracy", 0.5, 0.5)),
        ({"accuracy": 1.0}, {"tfidf_accuracy": 1.0}, "loss", None),
        ({"mae": 0.0}, {"mean_mae": 0.0}, "loss", None),
        # The metric that the run is about decides.
        ({"accuracy": 0.9, "f1_macro": 0.3}, {"bow_accuracy": 0.8, "bow_f1_macro": 0.6}, "accuracy", None),
        (
            {"accuracy": 0.9, "f1_macro": 0.3},
            {"bow_accuracy": 0.8, "bow_f1_macro": 0.6},
            "f1_macro",
            ("bow", "f1_macro", 0.3, 0.6),
        ),
        # Smaller is better.
        ({"bits_per_byte": 2.0}, {"xz_bits_per_byte": 2.2, "unigram_bits_per_byte": 4.5}, "loss", None),
        (
            {"bits_per_byte": 3.0},
            {"xz_bits_per_byte": 2.2, "unigram_bits_per_byte": 2.5},
            "loss",
            ("xz", "bits_per_byte", 3.0, 2.2),
        ),
        ({"rmse": 1.5}, {"mean_rmse": 1.4}, "rmse", ("mean", "rmse", 1.5, 1.4)),
        # Nothing can be compared.
        ({"accuracy": math.nan}, {"majority_accuracy": 0.5}, "loss", None),
        ({"accuracy": 0.1}, {"majority_f1": 0.5}, "loss", None),
        ({}, {"majority_accuracy": 0.5}, "loss", None),
        ({"accuracy": 0.1}, {}, "loss", None),
    ],
)
def test_the_best_baseline_that_the_model_does_not_beat_is_found(
    scores: dict[str, float], baselines: dict[str, float], main: str, expected: tuple[Any, ...] | None
) -> None:
    assert unbeaten_baseline(scores, baselines, main) == expected


@pytest.mark.parametrize(
    ("scores", "baselines", "expected"),
    [
        (
            {"accuracy": 0.9},
            {"a_accuracy": 0.7, "b_accuracy": 0.8},
            "Accuracy 0.9000; best baseline: b 0.8000 (beaten)",
        ),
        ({"accuracy": 0.8}, {"b_accuracy": 0.8}, "Accuracy 0.8000; best baseline: b 0.8000 (equaled)"),
        ({"accuracy": math.nan}, {"b_accuracy": 0.8}, "Accuracy NaN; best baseline: b 0.8000 (not beaten)"),
        (
            {"accuracy": 0.1, "mse": 2.0},
            {"mean_mse": 3.0, "zero_mse": 1.0},
            "Accuracy 0.1000, Mean squared error 2.000; best baseline: zero 1.000 (not beaten)",
        ),
        (
            {"accuracy": 0.6, "mse": 2.0},
            {"untrained_accuracy": 0.5, "untrained_mse": 9.0, "mean_mse": 3.0},
            "Accuracy 0.6000, Mean squared error 2.000; best baseline: mean 3.000 (beaten)",
        ),
        ({"accuracy": 0.9}, {}, "Accuracy 0.9000"),
    ],
)
def test_one_line_compares_the_main_score_with_the_best_baseline(
    scores: dict[str, Any], baselines: dict[str, Any], expected: str
) -> None:
    assert format_main_score(scores, "accuracy", compare(scores, baselines, "accuracy")) == expected


@pytest.mark.parametrize(("own", "other", "rows"), [(260, 250, 284), (275, 250, 284), (30, 45, 300), (6, 9, 10)])
def test_a_difference_of_few_rows_is_within_chance(own: int, other: int, rows: int) -> None:
    found = compare({"accuracy": own / rows}, {"tfidf_accuracy": other / rows}, "accuracy", rows)
    assert found is not None
    word, difference, *rest = found.verdict.replace(", ", ": ").split(": ")
    assert (word, difference) == (
        "beaten" if own > other else "not beaten",
        f"{'+' if own > other else '-'}{abs(own - other)} of {rows} rows",
    )
    _, p_value = fisher_exact([[own, rows - own], [other, rows - other]])
    assert rest == ([] if p_value < 0.05 else ["within chance"])


def test_only_a_metric_that_counts_samples_is_compared_in_rows() -> None:
    scores, baselines = {"f1_macro": 0.9, "accuracy": 0.9}, {"tfidf_f1_macro": 0.8, "tfidf_accuracy": 0.9}
    found = [compare(scores, baselines, metric, 100) for metric in ("f1_macro", "accuracy")]
    assert [each and each.verdict for each in found] == ["beaten", "equaled"]
    assert rows_of({"num_targets": 90}, {"num_eval": 100}, "samples") == 90, "10 have no label"
    assert rows_of({"num_targets": 130}, {"num_eval": 100}, "samples") == 100, "some questions have two windows"
    assert rows_of({"num_targets": 90}, {"num_eval": 100}, "pixels") is None
    assert rows_of({}, {"num_eval": 100}, "images") is None


def test_the_sentence_has_both_numbers() -> None:
    assert_golden(str(Unbeaten("bag of words", "f1_macro", 0.80812, 0.874)))


@pytest.mark.parametrize("best_step", [None, 1200, 400, 1100])
def test_the_likeliest_cause_comes_first(best_step: int | None) -> None:
    assert_golden("\n".join(likely_causes(**FACTS, loss_rose=True, best_step=best_step)))


def test_an_early_best_step_is_no_overfitting_while_the_held_out_loss_falls() -> None:
    causes = likely_causes(**FACTS, loss_rose=False, best_step=900)
    assert not any(each.startswith(("overfitting", "too few steps")) for each in causes)
    assert "step 900 of 1,200" in causes[-1]


def test_who_has_pretrained_weights_is_not_told_to_take_some() -> None:
    assert "pretrained" not in " ".join(likely_causes(**{**FACTS, "pretrained": True}, loss_rose=True, best_step=1100))


def test_errors_are_better_when_they_are_smaller() -> None:
    assert all(map(is_lower_better, ("eval_loss", "hamming_loss", "rmse", "perplexity", "bits_per_byte")))
    assert not any(map(is_lower_better, ("accuracy", "f1_macro", "mean_iou", "r2")))
    # The words of an unknown name decide.
    assert is_lower_better("word_error_rate")
    assert not is_lower_better("my_score")


def test_a_recipe_may_say_which_values_are_better() -> None:
    scores, baselines = {"cost": 3.0}, {"zero_cost": 2.0}
    assert unbeaten_baseline(scores, baselines, "cost") is None
    assert unbeaten_baseline(scores, baselines, "cost", lambda name: name == "cost") == ("zero", "cost", 3.0, 2.0)
    found = compare(scores, baselines, "cost", is_lower_better=lambda name: name == "cost")
    assert found is not None
    assert not found.is_beaten


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.5, "0.5000"),
        ("bleu", 100.0, "100.0"),
        ("perplexity", 7.48912, "7.489"),
        ("perplexity", 50257.0, "50,257.0"),
        ("mse", 1e-5, "1e-05"),
        ("mine", math.inf, "∞"),
        ("num_targets", 12345, "12,345"),
        ("mine", None, "–"),
    ],
)
def test_a_metric_is_shown_in_its_own_format(name: str, value: Any, text: str) -> None:
    assert show_metric(name, value) == text


def test_scores_are_a_table_with_a_column_for_each_baseline() -> None:
    scores = {"loss": 0.25, "accuracy": 0.9, "f1_macro": 0.88, "num_targets": 12345}
    baselines = {"majority_accuracy": 0.5, "tfidf_accuracy": 0.8, "tfidf_f1_macro": 0.75, "of_no_metric": 1.0}
    assert format_scores(scores, baselines).splitlines() == [
        "             this model  majority  TF-IDF",
        "  Loss           0.2500",
        "  Accuracy       0.9000    0.5000  0.8000",
        "  F1, macro      0.8800            0.7500",
        "  Targets        12,345",
    ]
