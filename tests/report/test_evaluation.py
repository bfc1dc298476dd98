"""What the report shows of an evaluation: metrics and baselines, classes, mistakes, curves, and what is missing."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from accel_train.core.json_io import write_json
from accel_train.core.metric_names import label, show_value
from accel_train.metrics.scores import classification_scores, multilabel_scores, segmentation_scores
from accel_train.observe.run_folder import RunFolder
from accel_train.report.metric_names import MAX_CURVES, metrics_with_curves
from accel_train.report.report import write_report
from accel_train.report.run import load_run
from tests.report.tables import assert_table, page_of
from tests.support.report import Page
from tests.support.wording import assert_golden

CATS = np.array([[30, 4, 0], [1, 50, 9], [0, 0, 6]])
NAMES = ["cat", "<b>dog</b>", "$emu$"]
BASELINES = {"majority_accuracy": 0.6, "bag_of_words_f1_macro": 0.71, "elsewhere_rouge": 1.0}


def make_run(
    path: Path,
    *,
    details: Any = None,
    metrics: dict[str, Any] | None = None,
    evals: list[dict[str, Any]] | None = None,
    task: str = "text-classification",
    baselines: dict[str, float] = BASELINES,
) -> Path:
    """A run with two training steps, three evaluations, and the evaluation.json that is asked for."""
    with RunFolder(path) as folder:
        for step in (10, 20):
            folder.append_metrics({"step": step, "split": "train", "loss": 1 / step, "tokens_per_second": 90.0})
        found = [{"accuracy": 0.5}, {"accuracy": math.nan}, {"accuracy": 0.8}] if evals is None else evals
        for number, scores in enumerate(found, start=1):
            folder.append_metrics({"step": 10 * number, "split": "eval", "loss": 1 / number, "seconds": 1.0, **scores})
        folder.write_text("recipe.resolved.yaml", f"task: {task}\n")
        folder.write_summary({"status": "finished", "num_targets": 640, "baselines": baselines, "steps": 20})
        if metrics is not None or details is not None:
            write_json(path / "evaluation.json", {"step": 20, "metrics": metrics or {}, "details": details or {}})
    return path


def classified(path: Path, matrix: Any = CATS, names: list[str] = NAMES, **more: Any) -> Path:
    scores = classification_scores(matrix, names)
    return make_run(path, details={**scores.details, **more}, metrics={"loss": 0.3, **scores.metrics})


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    tta = {"without": {"accuracy": 0.86}, "with": {"accuracy": 0.88, "mcc": None}}
    return write_report([classified(tmp_path_factory.mktemp("runs") / "run", test_time_augmentation=tta)]).read_text()


def test_metrics_stand_beside_the_baselines_that_bear_their_names(html: str) -> None:
    text = Page(html).text
    head = "Evaluation at step 20 Metrics this run majority bag of words"
    assert_table(text, head, "Loss 0.3000 – –", "Accuracy 0.8600 0.6000 –")
    assert re.search(r"F1, macro 0\.\d{4} – 0\.7100", text)
    assert "rouge" not in text.split("Evaluation at step 20")[1].split("The run")[0]
    assert "Precision, weighted" not in text  # it stands below the table of classes
    assert_table(text, "Test-time augmentation without with change", "Accuracy 0.8600 0.8800 +0.0200")
    assert "Matthews correlation – – –" in text


def test_the_headlines_are_those_of_the_task_and_count_its_targets(html: str) -> None:
    text = Page(html).text
    scores = "Evaluation loss 0.3000 F1, macro 0.7906 Accuracy 0.8600 Best baseline: majority 0.6000 beaten"
    for shown in (scores, "640 samples", "Throughput 90 samples/s"):
        assert shown in text
    assert Page(html).charts["throughput"]["title"] == "Samples per second"
    assert "oken" not in text.split("Recipe")[0]


@pytest.mark.parametrize(
    "task, word",
    [("image-classification", "images"), ("semantic-segmentation", "pixels"), ("my.tasks:Mine", "targets")],
)
def test_the_unit_is_named_after_the_task(tmp_path: Path, task: str, word: str) -> None:
    assert f"640 {word}" in page_of(make_run(tmp_path / "run", task=task)).text


def test_every_class_has_a_row_and_the_averages_follow(html: str) -> None:
    page = Page(html)
    assert_table(page.text, "By class class precision recall F1 samples", "cat 0.968 0.882 0.923 34", "<b>dog</b>")
    assert re.search(r"accuracy 0\.860 100 macro average [\d. ]+ 100 weighted average", page.text)
    assert "precision recall f1-score support" in page.text  # as text
    assert "<b>dog" not in html


def test_the_confusion_matrix_is_a_table_whose_colours_are_shares_of_the_rows(html: str) -> None:
    table = html.split('<table class="matrix">')[1].split("</table>")[0]
    text = Page(table).text
    assert "rows: the truth; columns: the prediction cat <b>dog</b> $emu$ cat 30 4 0" in text
    assert "<b>dog</b> 1 50 9 $emu$ 0 0 6" in text
    depths = [float(depth) for depth in re.findall(r"--depth: ([\d.]+)", table)]
    assert depths[2] == depths[6] == depths[7] == 0.0  # a cell that counts nothing has no colour
    assert depths[8] == max(depths)  # six of six
    assert 0 < depths[1] < depths[0]


def test_many_classes_get_a_table_of_mistakes_instead_of_the_picture(tmp_path: Path) -> None:
    matrix = 7 * np.eye(30, dtype=np.int64)
    matrix[3, 4], matrix[8, 9] = 13, 5
    run = classified(tmp_path / "run", matrix, [f"class {number}" for number in range(30)])
    page = page_of(run)
    head = "Most frequent mistakes truth predicted as samples of the class"
    assert_table(page.text, head, "class 3 class 4 13 65.0 %", "class 8 class 9 5 41.7 %")
    assert "By class 30 classes" in page.text
    assert "Confusion matrix" not in page.text


def test_a_segmentation_is_shown_by_class(tmp_path: Path) -> None:
    matrix = np.array([[900_000, 100_000, 0], [50_000, 450_000, 0], [0, 0, 0]])
    scores = segmentation_scores(matrix, ["ground", "tree", "sky"])
    run = make_run(tmp_path / "run", details=scores.details, metrics=scores.metrics, task="semantic-segmentation")
    text = page_of(run).text
    assert_table(text, "ground 0.857", "tree 0.750", "sky does not occur", "mean 0.804")
    assert_table(text, "truth predicted as pixels of the class", "ground tree 100,000 10.0 %")
    assert "Mean IoU 0.8036" in text


def test_a_baseline_belongs_to_the_longest_metric_that_its_name_ends_with(tmp_path: Path) -> None:
    metrics = {"accuracy": 0.5, "pixel_accuracy": 0.9}
    run = make_run(tmp_path / "run", metrics=metrics, baselines={"majority_pixel_accuracy": 0.4})
    text = page_of(run).text
    assert_table(text, "Metrics this run majority", "Accuracy 0.5000 –", "Pixel accuracy 0.9000 0.4000")


def test_labels_that_may_occur_together_have_a_table_and_no_matrix(tmp_path: Path) -> None:
    scores = multilabel_scores([[5, 1, 2, 12], [3, 0, 0, 17]], ["rain", "wind"])
    text = Page(
        write_report([make_run(tmp_path / "run", details=scores.details, metrics=scores.metrics)]).read_text()
    ).text
    assert "rain 0.833 0.714 0.769 7 wind 1.000 1.000 1.000 3 micro average" in text
    assert "Hamming loss 0.0750" in text
    assert "Confusion matrix" not in text


def test_metrics_have_curves_over_the_steps_with_nan_marked(html: str) -> None:
    page = Page(html)
    assert page.charts["eval_accuracy"]["curves"][0]["up"] == [20]
    assert html.count("Accuracy over the") == 1


def test_scores_share_a_chart_beside_the_loss_and_errors_have_their_own(tmp_path: Path) -> None:
    evals = [{"accuracy": 0.5 + step / 9, "mcc": step / 9, "mae": 70.0, "mine": 3.0} for step in range(2)]
    run = make_run(tmp_path / "run", evals=evals)
    page = page_of(run)
    assert [name for name in page.charts if name.startswith("eval_")] == ["eval_scores", "eval_mae", "eval_mine"]
    found = [(each["name"], each["color"], each["y"]) for each in page.charts["eval_scores"]["curves"]]
    assert found == [("Accuracy", 0, [0.5, 0.61111]), ("Matthews correlation", 1, [0.0, 0.11111])]
    assert [name for name, each in page.charts.items() if each["is_first"]] == ["loss", "eval_scores"]
    assert not page.charts["loss"]["across"]
    compared = page_of(run, make_run(tmp_path / "other", evals=evals))
    assert "eval_scores" not in compared.charts
    assert [each["run"] for each in compared.charts["eval_accuracy"]["curves"]] == [0, 1]


def test_boxes_are_told_right_wrong_and_missed_by_class_with_a_key_of_their_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", task="object-detection")
    example = {"images": [], "right": ["cat", "cat", "<dog>"], "wrong": [], "missed": ["cat"]}
    none = {"images": [], "right": [], "wrong": [], "missed": []}
    write_json(
        run / "examples.json",
        {"kind": "boxes", "tried": 2, "wrong": 0, "least_score": 0.25, "examples": [example, none]},
    )
    html = write_report([run]).read_text()
    assert_golden("\n".join(text for text in Page(html).texts if "predicted" in text or "missed:" in text))
    for line in ("solid", "dashed", "dotted"):
        assert html.count(f'<i style="border: 3px {line} #') == 1


def test_the_texts_of_mistakes_after_the_sixth_are_folded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    examples = [
        {"truth": "a", "prediction": "b", "score": 0.5, "text": f"text number {number}."} for number in range(8)
    ]
    write_json(run / "examples.json", {"kind": "label", "tried": 9, "wrong": 8, "examples": examples})
    shown, folded = write_report([run]).read_text().split("<summary>2 more</summary>")
    assert "text number 5." in shown
    assert "text number 6." not in shown
    assert "text number 7." in folded


def test_the_nearest_texts_of_queries_are_a_table(tmp_path: Path) -> None:
    near = [{"text": "a <lynx>", "similarity": 0.91, "is_right": True}, {"text": "a boat", "similarity": 0.2}]
    details = {"retrieval": {"queries": [{"query": "a cat", "nearest": near}, "odd", {"nearest": 3}]}}
    text = page_of(make_run(tmp_path / "run", details=details, task="sentence-embedding")).text
    head = "Nearest texts of some queries query nearest texts similarity"
    assert_table(text, head, "a cat a <lynx> right 0.91", "a boat 0.20")


def test_only_metrics_that_were_evaluated_twice_and_tell_something_new_have_curves(tmp_path: Path) -> None:
    scores = {"perplexity": 3.0, "f1_macro": 0.5, "f1_micro": 0.5, "recall_macro": 0.1, "note": "text", "passed": True}
    evals = [{**scores, "auroc": None}, {**scores, "rouge": 0.4}]
    run = load_run(make_run(tmp_path / "run", evals=evals))
    assert metrics_with_curves([run]) == ["f1_macro"]
    many = [{f"metric_{number}": float(step) for number in range(40)} for step in range(3)]
    assert len(metrics_with_curves([load_run(make_run(tmp_path / "many", evals=many))])) == MAX_CURVES


def test_a_metric_of_any_name_is_drawn_and_escaped(tmp_path: Path) -> None:
    name = 'a"b <i>$x$</i>/../c'
    run = make_run(tmp_path / "run", evals=[{name: 1.0}, {name: 2.0}], metrics={name: 2.0})
    html = write_report([run]).read_text()
    assert "<i>" not in html
    assert not Page(html).handlers
    assert Page(html).texts.count(label(name)) == 2  # the headline numbers and the table
    assert Page(html).charts[f"eval_{name}"]["title"] == label(name)


def test_several_runs_are_compared_metric_by_metric(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "one", metrics={"accuracy": 0.9, "mcc": math.nan}),
        make_run(tmp_path / "two", metrics={"accuracy": 0.8, "rouge_l": 0.25}),
    ]
    html = write_report(runs).read_text()
    text = Page(html).text
    rows = ("Accuracy 0.9000 0.8000", "Matthews correlation NaN –", "Rouge l – 0.2500")
    assert_table(text, "Metrics one two", *rows)
    assert '<td class="number best">0.9000</td><td class="number">0.8000</td>' in html
    assert "Samples 640 640" in text


def test_a_language_model_whose_headlines_say_it_all_has_no_section(tmp_path: Path) -> None:
    scores = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 1.2}
    run = make_run(tmp_path / "run", metrics=scores, evals=[scores, scores], task="causal-lm")
    text = page_of(run).text
    assert "Evaluation at" not in text
    assert "Evaluation over the" not in text
    assert "Perplexity 7.4" in text


def test_a_run_without_evaluation_file_shows_its_last_evaluation(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "run")).text
    assert_table(text, "Evaluation Metrics this run majority", "Loss 0.3333 –", "Accuracy 0.8000 0.6000")


ODD: list[Any] = [
    *yaml.safe_load("""
    - {}
    - []
    - text
    - {classification: null, segmentation: [], test_time_augmentation: 3}
    - {classification: {label_names: [a, b], confusion_matrix: [[1, 2]]}}
    - {classification: {label_names: [a], confusion_matrix: [[x]], report: {a: null, accuracy: null}}}
    - {classification: {label_names: [a, b], confusion_matrix: [[0, 0], [0, 0]], report: {a: {}}}}
    - {classification: {label_names: ab, confusion_matrix: [[-1, 0], [0, 0]], report_text: 7}}
    - {classification: {label_names: [], confusion_matrix: [], report: {}, report_text: ''}}
    - {segmentation: {label_names: [a], iou: [2.0, 3.0]}}
    """),
    {"classification": {"label_names": [math.nan, 3], "confusion_matrix": [[1, 0], [0, 10**9]]}},
    {"segmentation": {"label_names": ["a", "b"], "iou": [math.nan, "x"], "confusion_matrix": None}},
    {"test_time_augmentation": {"without": {"accuracy": math.nan}, "with": None}},
]


@pytest.mark.parametrize("details", ODD, ids=range(len(ODD)))
@pytest.mark.filterwarnings("error")
def test_no_evaluation_is_too_odd_to_report(tmp_path: Path, details: Any) -> None:
    run = make_run(tmp_path / "run", details=details, metrics={"accuracy": math.nan, "auroc": None, "loss": math.inf})
    text = page_of(run).text
    assert "Accuracy NaN" in text
    assert "Loss ∞" in text


def test_scores_of_an_empty_evaluation_are_shown_as_what_they_are(tmp_path: Path) -> None:
    text = Page(write_report([classified(tmp_path / "run", np.zeros((2, 2)), ["a", "b"])]).read_text()).text
    assert "a – – – 0 b – – – 0 accuracy NaN" in text
    assert "Confusion matrix" not in text


def test_an_early_stop_is_marked_on_the_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "events.jsonl").write_text('{"step": 20, "event": "early_stop", "message": "stopped early"}\n')
    page = page_of(run)
    assert [mark["label"] for mark in page.charts["loss"]["marks"]] == ["stopped early"]
    assert "stopped early" in page.texts  # the list of events


@pytest.mark.parametrize(
    "name, text", [("f1_macro", "F1, macro"), ("mean_iou", "Mean IoU"), ("my_metric_macro", "My metric macro")]
)
def test_metrics_have_names_that_people_say(name: str, text: str) -> None:
    assert label(name) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "–"),
        (0.5, "0.5000"),
        (0.0, "0.0000"),
        (1e-5, "1e-05"),
        (12345.6, "12,345.6"),
        (1e9, "1e+09"),
        (7, "7"),
        (-math.inf, "−∞"),
    ],
)
def test_values_are_short(value: Any, text: str) -> None:
    assert show_value(value) == text
