import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.observe.run_folder import RunFolder
from accel_train.report.charts import MOST_MARKS, describe_charts, part_means, short_number, thin
from accel_train.report.html import MOST_EVENTS, compare_headlines, differ_in_evaluation_data, main_metrics
from accel_train.report.report import render_page, write_report
from accel_train.report.run import Run, load_run
from tests.report.tables import assert_table, page_of
from tests.support.report import SUMMARY, Page, make_run
from tests.support.wording import assert_golden, raises_golden


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of one run that finished."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    out = write_report([run])
    assert out == run / "report.html"
    return out.read_text()


def test_the_report_is_one_file_that_needs_no_network(html: str) -> None:
    page = Page(html)
    assert not page.fetched
    assert not {"link", "iframe", "img", "base"} & set(page.tags)
    assert "@import" not in html
    assert "url(" not in html
    assert "default-src 'none'" in html  # the browser, too, is told to fetch nothing
    assert "https://example.org/recipes" in page.text  # as text of the recipe, only
    assert len(page.ids) == len(set(page.ids))


def test_the_library_that_draws_the_charts_comes_with_its_licence(html: str) -> None:
    assert "Copyright (c) 2022 Leon Sorokin" in html
    assert re.search(r"github.com/leeoniya/uPlot \(v\d+\.\d+\.\d+\)", html)


def test_the_report_says_where_the_time_of_all_launches_went(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "the time went" not in page_of(run).text
    accounts = {"launch": 1, "step": 9, "steps": 9, "saves": 0}
    lines = [
        {**accounts, "started": 1000.0, "seconds": 60.0, "accounts": {"start_up": 10.0, "productive_steps": 50.0}},
        {
            **accounts,
            "started": 1090.0,
            "seconds": 10.0,
            "accounts": {"repeated_steps": 10.0, "of a later version": 1.0},
        },
    ]
    (run / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = " ".join(page_of(run).text.split())
    assert "50.0% of 1m 40s" in text
    assert "Steps done again 10.0 s, 10.0%" in text
    assert "Between launches 30.0 s, 30.0%" in text


def test_everything_that_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>")
    page = page_of(run)
    assert not page.handlers
    assert page.tags.count("script") == 3  # the data, uPlot, and our own
    assert "b" in page.tags  # the page's own, around the prompt
    for text in (
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "<b>was</b> & is",
        "2 x <H200>",
        "<fresh>",
    ):
        assert text in page.text


def test_names_of_any_kind_reach_the_charts_as_they_are(tmp_path: Path) -> None:
    names = ["_hidden", "$x^2$ & <y>", "跑", "<!--<script>"]
    html = write_report([make_run(tmp_path / name) for name in names], tmp_path / "out.html").read_text()
    assert json.loads(Page(html).scripts[0])["runs"] == names
    assert "<y>" not in html
    assert "<!--" not in html


def test_the_headline_numbers_of_the_summary_are_on_the_page(html: str) -> None:
    text = Page(html).text
    for shown in (
        "Finished",
        "124.4 M parameters on 2 processes: 200 steps, 1.638 M tokens in 3m 07s. 1 step was skipped.",
        "Evaluation loss 2.0134",
        "Perplexity 7.489",
        "Bits per byte 1.2034",
        "Throughput 8,743 tokens/s",
        "Model FLOP utilization 41.2 %",
        "Peak memory 3.0 GiB per device",
        "this run 1.203 xz -9 2.247 byte frequencies 4.512",
        "What it writes The bridge <b>was</b> & is",
        "bf16 (it is supported)",
        "torch.version 2.9.1",
        "Targets 9,000",
        "77 skip the loss is NaN (process 1)",
    ):
        assert shown in text, shown


def test_nan_and_inf_and_events_are_marked_on_the_charts(html: str) -> None:
    charts = Page(html).charts
    assert charts["loss"]["curves"][0]["up"] == charts["grad_norm"]["curves"][0]["up"] == [77]
    marks = {mark["label"]: mark["x"] for mark in charts["loss"]["marks"]}
    assert marks == {"checkpoint": [50, 100, 150, 200], "skipped step": [77]}
    assert charts["loss"]["evaluations"] == [{"run": 0, "x": [50, 100, 150, 200], "y": [2.1] * 4}]


def test_the_loss_scale_has_a_chart_only_where_there_is_one_and_nothing_lies_beside_the_page(tmp_path: Path) -> None:
    names = {"loss", "learning_rate", "grad_norm", "throughput"}
    plain, fp16 = make_run(tmp_path / "plain"), make_run(tmp_path / "fp16", fp16=True)
    before = set(plain.iterdir())
    assert set(page_of(plain).charts) == names
    assert {path.name for path in set(plain.iterdir()) - before} <= {"report.html", ".accel_train.json"}
    elsewhere = write_report([fp16], tmp_path / "elsewhere" / "mine.html")
    assert set(Page(elsewhere.read_text()).charts) == {*names, "loss_scale"}
    assert list((tmp_path / "elsewhere").iterdir()) == [elsewhere]


def test_charts_hold_the_numbers_of_metrics_jsonl_to_five_digits(html: str, tmp_path: Path) -> None:
    lines = [line for line in load_run(make_run(tmp_path / "run")).train if not line["skipped"]]
    for name in ("loss", "grad_norm", "learning_rate", "throughput"):
        (curve,) = Page(html).charts[name]["curves"]
        kept = [line for line in lines if line["step"] in set(curve["x"])]
        assert len(kept) >= len(lines) == 40
        assert curve["y"][: len(kept)] == pytest.approx([line[name] for line in lines][: len(kept)], rel=5e-5)


def test_the_same_run_gives_the_same_charts(html: str, tmp_path: Path) -> None:
    again = write_report([make_run(tmp_path / "run")]).read_text()
    assert Page(again).charts == Page(html).charts


def test_two_runs_are_compared_number_by_number_and_recipe_by_recipe(tmp_path: Path) -> None:
    worse = {**SUMMARY, "eval": {"loss": 2.5}, "mfu": None}
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", summary=worse, learning_rate="0.004")]
    out = write_report(runs)
    html = out.read_text()
    text = Page(html).text
    assert out == tmp_path / "comparison.html"
    assert "Evaluation loss 2.0134 2.5000" in text
    assert '<td class="number best">2.0134</td><td class="number">2.5000</td>' in html
    assert "Model FLOP utilization 41.2 % –" in text
    assert_table(text, "setting first second", "optimizer.learning_rate 0.001 0.004", "Bits per byte")  # no seed
    assert "first 1.203 xz -9 2.247 byte frequencies 4.512" in text


@pytest.mark.parametrize("other", [False, True])
def test_no_score_is_best_where_runs_were_evaluated_on_different_data(other: bool) -> None:
    runs = [
        Run(
            name,
            summary={
                "eval": {"loss": loss, "accuracy": 1 - loss, "num_targets": 50},
                "data": {"num_eval": 50},
                "mfu": loss,
            },
            recipe_text=f"data: {{train: {'ab'[other and number]}.csv, eval_fraction: 0.1}}",
        )
        for number, (name, loss) in enumerate((("a", 0.2), ("b", 0.4)))
    ]
    best = {row["label"]: row["best"] for row in compare_headlines(runs)}
    assert differ_in_evaluation_data(runs) == other
    assert best["Evaluation loss"] == best["Accuracy"] == ([] if other else [0])
    assert best["Model FLOP utilization"] == [1]


def test_the_first_numbers_of_a_custom_task_are_what_it_reports_and_its_recipe_says_what_is_better() -> None:
    recipe = "task: a:B\nevaluate: {metric_for_best_model: eval_my_cost, greater_is_better: false}"
    runs = [
        Run(str(cost), summary={"eval": {"loss": 0.2, "score {1}": 0.5, "my_cost": cost}}, recipe_text=recipe)
        for cost in (3.0, 2.0)
    ]
    assert main_metrics(runs[0]) == ["my_cost", "score {1}", "loss"]
    rows = {row["label"]: row["best"] for row in compare_headlines(runs)}
    assert list(rows) == ["My cost", "Score {1}", "Evaluation loss"]
    assert rows["My cost"] == [1]
    assert {name for text in ("[", "evaluate: [1]") for name in main_metrics(Run("a", recipe_text=text))} == {"loss"}


@pytest.mark.parametrize("setting", ["split_seed: 1", "group_column: author", "stratify: true", "eval_fraction: 0.2"])
def test_runs_that_hold_out_other_rows_of_the_same_file_are_evaluated_on_different_data(setting: str) -> None:
    summary = {"eval": {"loss": 0.2, "num_targets": 50}}
    texts = [f"data: {{train: a.csv, {each}}}" for each in ("eval_fraction: 0.1", setting, "split_seed: 0")]
    one, other, plain = (Run(name, summary=summary, recipe_text=text) for name, text in zip("abc", texts, strict=True))
    assert differ_in_evaluation_data([one, other])
    assert not differ_in_evaluation_data([plain, Run("d", summary=summary, recipe_text="data: {train: a.csv}")])


@pytest.mark.parametrize("change", [{}, {"parameters": 5}, {"world_size": 4}, {"environment": {"gpu": "1 x T4"}}])
def test_no_throughput_is_best_where_models_processes_or_devices_differ(change: dict[str, Any]) -> None:
    summary = {"parameters": 4, "world_size": 2, "environment": {"gpu": "2 x T4"}}
    runs = [
        Run("a", summary={**summary, "throughput": 10.0}),
        Run("b", summary={**summary, **change, "throughput": 20.0}),
    ]
    best = {row["label"]: row["best"] for row in compare_headlines(runs)}
    assert best["Throughput"] == ([] if change else [1])


def test_the_step_of_the_weights_in_model_is_marked_where_the_best_ones_were_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", summary={**SUMMARY, "best_step": 150})
    label = "weights in model/"
    assert label not in [mark["label"] for mark in page_of(run).charts["loss"]["marks"]]
    with (run / "events.jsonl").open("a") as file:
        event = {
            "time": "2026-01-01T00:00:00Z",
            "step": 200,
            "event": "best_model",
            "message": "the weights of step 150",
        }
        file.write(json.dumps(event) + "\n")
    marks = {mark["label"]: mark["x"] for mark in page_of(run).charts["loss"]["marks"]}
    assert marks[label] == [150]


def test_a_report_shows_the_lines_that_use_the_model_with_its_path(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "Use this model" not in page_of(run).text
    (run / "model").mkdir()
    code = 'classify = pipeline("text-classification", model="path/of/this/folder")\nclassify("a < b")'
    (run / "model" / "README.md").write_text(f"# A model\n\n```python\n{code}\n```\n")
    text = page_of(run).text
    assert f"Use this model accel-train generate {run.as_posix()} --prompt 'Once upon a time' classify = " in text
    assert f'classify = pipeline("text-classification", model="{run.as_posix()}/model")' in text
    assert 'classify("a < b")' in text


def test_runs_of_the_same_name_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    text = Page(write_report(runs, tmp_path).read_text()).text
    assert "a/run" in text
    assert "b/run" in text


def test_a_killed_run_is_reported_from_what_it_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", summary=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 205, "spl')
    (run / "recipe.resolved.yaml").unlink()
    page = page_of(run)
    assert_golden(next(text for text in page.texts if "summary" in text))
    assert "Evaluation loss 2.1000" in page.text
    assert "200 steps in 20s" in page.text
    assert "Recipe" not in page.text


def test_a_run_killed_before_its_first_line_is_reported(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").open().close()
    assert_golden(next(text for text in page_of(tmp_path / "run").texts if "step" in text))


@pytest.mark.parametrize("losses", [[math.nan] * 30, [math.inf, 1.0], [0.0] * 30, [-1.0, 2.0], [5.0], [3e38, 1.0]])
@pytest.mark.filterwarnings("error")
def test_no_curve_is_too_odd_to_draw(tmp_path: Path, losses: list[float]) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step, loss in enumerate(losses, start=1):
            line = {"step": step, "split": "train", "loss": loss, "loss_scale": max(loss, 0.0)}
            folder.append_metrics({**line, "tokens_per_second": None})
    (curve,) = page_of(tmp_path / "run").charts["loss"]["curves"]
    assert len(curve["x"]) + len(curve["up"]) == len(losses)


@pytest.mark.parametrize(
    ("task", "name", "unit"),
    [
        ("image-classification", "samples_per_second", "images"),
        ("semantic-segmentation", "pixels_per_second", "pixels"),
        ("my_task:Mine", "targets_per_second", "targets"),
        ("causal-lm", "tokens_per_second", "tokens"),
    ],
)
def test_throughput_is_shown_under_any_of_its_names(tmp_path: Path, task: str, name: str, unit: str) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2, 3):
            line = {"step": step, "split": "train", "loss": 1.0, name: 250.0}
            folder.append_metrics({**line, "samples_per_second": 250.0 if name.startswith("samples") else 3.0})
        folder.write_text("recipe.resolved.yaml", f"task: {task}\n")
        assert f"Throughput 250 {unit}/s" in page_of(tmp_path / "run").text
        folder.write_summary({name: 500.0, "samples_per_second": 500.0 if name.startswith("samples") else 3.0})
    assert f"Throughput 500 {unit}/s" in page_of(tmp_path / "run").text
    title = Page((tmp_path / "run" / "report.html").read_text()).charts["throughput"]["title"]
    assert title == f"{unit.capitalize()} per second"


def test_a_step_that_was_nan_is_marked_where_the_mean_of_its_line_leaves_it_out(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2, 3):
            own = math.nan if step == 2 else 1.0
            folder.append_metrics({"step": step, "split": "train", "loss": 1.0, "step_loss": own})
    assert page_of(tmp_path / "run").charts["loss"]["curves"][0]["up"] == [2]


def test_a_folder_without_a_run_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    for name, folders in (("empty", [tmp_path]), ("nowhere", [tmp_path / "nowhere"]), ("none", [])):
        with raises_golden(case=name):
            write_report(folders)


def test_a_failed_report_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    old, error = write_report([run]).read_bytes(), OSError(errno.ENOSPC, "full")

    def full_disk(source: Any, target: Any) -> None:
        raise error

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError) as caught:  # noqa: PT011 (it is compared below)
        write_report([run])
    assert caught.value is error
    assert (run / "report.html").read_bytes() == old
    assert not list(run.glob(".*.tmp"))


def test_lines_are_in_the_order_of_their_steps_whatever_the_file_says(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for step in (3, 1, 2):
            folder.append_metrics({"step": step, "split": "train", "loss": 1.0})
    assert [line["step"] for line in load_run(tmp_path).train] == [1, 2, 3]


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_every_extreme_of_its_parts() -> None:
    values = np.exp(0.3 * np.random.default_rng(0).standard_normal(100_000))
    values[12_345], values[54_321] = 1e-3, 1e3
    steps = np.arange(100_000.0)
    x, y = thin(steps, values, 1_000)
    assert len(x) <= 1_000
    assert (np.diff(x) > 0).all()
    np.testing.assert_array_equal(values[x.astype(int)], y)
    assert {0, 12_345, 54_321, 99_999} <= set(x)
    size = math.ceil(len(values) / 499)
    for start in range(0, len(values), size):
        inside = (x >= start) & (x < start + size)
        part = values[start : start + size]
        assert (y[inside].min(), y[inside].max()) == (part.min(), part.max())
    few = thin(steps[:50], values[:50], 50)
    np.testing.assert_array_equal(few, (steps[:50], values[:50]))
    at, means = part_means(steps, 7 - 0.01 * steps, 1_200)
    np.testing.assert_allclose(means, 7 - 0.01 * at)


def test_the_page_of_a_hundred_thousand_steps_is_small_and_keeps_extremes_and_marks(tmp_path: Path) -> None:
    randomness = np.random.default_rng(0)
    losses = (2 + 9 / np.sqrt(np.arange(1, 100_001)) + 0.1 * randomness.standard_normal(100_000)).tolist()
    losses[66_665], losses[77_776] = 42.125, math.nan
    train = [
        {
            "step": step,
            "split": "train",
            "loss": loss,
            "learning_rate": 1e-3 * (1 - step / 100_001),
            "grad_norm": loss / 3,
            "loss_scale": 65536.0,
            "throughput": 1e5 * loss,
        }
        for step, loss in enumerate(losses, start=1)
    ]
    events = [{"step": step, "event": "checkpoint", "message": "saved"} for step in range(10, 100_000, 10)]
    skips = [{"step": 77_777, "event": "skip", "message": "the loss is NaN"}]
    run = Run("run", train, [{"step": 100_000, "split": "eval", "loss": 2.0}], sorted([*events, *skips], key=by_step))
    html = render_page([run])
    assert len(html.encode()) < 1_500_000
    page = Page(html)
    (curve,) = page.charts["loss"]["curves"]
    assert 4_000 < len(curve["x"]) <= 8_000
    assert curve["y"][curve["x"].index(66_666)] == max(curve["y"]) == 42.125
    assert curve["up"] == [77_777]
    kinds = {mark["label"]: mark for mark in page.charts["loss"]["marks"]}
    assert kinds["skipped step"]["x"] == [77_777]
    assert (len(kinds["checkpoint"]["x"]), kinds["checkpoint"]["num_x"]) == (MOST_MARKS, 9_999)
    assert f"The {10_000 - MOST_EVENTS:,} events" in page.text
    many = describe_charts([Run("run", train[:2_000])] * 30)
    assert sum(len(curve["x"]) for chart in many for curve in chart["curves"]) < 70_000


def by_step(line: dict[str, Any]) -> int:
    return int(line["step"])


def test_facts_about_data_are_in_words_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    data = {"num_empty_documents": 3, "notes": [], "num_train_of_label": {"cat": 1200}, "reused": True}
    run = make_run(tmp_path / "run", summary={**SUMMARY, "data": data | {"sources": ["a", "b"]}})
    page = page_of(run)
    assert_table(page.text, "Empty documents 3", "Train of label: cat 1,200", "Reused yes", "Sources a; b")
    assert "notes" not in page.text


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (250, "250"), (12_500, "12.5k"), (1.5e6, "1.5M"), (0.003, "0.003"), (3e-5, "3e-5")]
)
def test_axis_labels_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


def test_the_machine_has_charts_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "The machine over" not in page_of(run).text
    with RunFolder(run) as folder:
        for step in range(1, 9):
            numbers = {"cpu_percent": 50.0, "process_memory_bytes": step * 2**30, "gpu_watts": None}
            folder.append_metrics({"step": step, "split": "system", **numbers})
            # One point is no curve.
            assert ("The machine over" in page_of(run).text) == (step > 1)
    page = page_of(run)
    assert "The machine over" in page.text
    machine = {name: chart for name, chart in page.charts.items() if chart["group"] == "machine"}
    assert list(machine) == ["cpu_percent", "process_memory_gib"]
    assert machine["process_memory_gib"]["curves"][0]["y"] == list(range(1, 9))
