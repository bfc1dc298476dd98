import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.observe.run_folder import RunFolder
from accel_train.report.charts import draw_charts
from accel_train.report.curves import MAX_POINTS, short_number, trend
from accel_train.report.report import write_report
from accel_train.report.run import Run, load_run
from tests.support.report import SUMMARY, Page, make_run


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of one run that finished."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    out = write_report([run])
    assert out == run / "report.html"
    return out.read_text()


def test_the_report_is_one_file_that_needs_no_network(html: str) -> None:
    page = Page(html)
    assert all(target.startswith("#") for target in page.fetched)
    assert not {"script", "link", "iframe", "img", "base"} & set(page.tags)
    assert "@import" not in html
    assert page.tags.count("style") == 1  # those of the charts would hold for the whole page
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {f"#{name}" for name in page.ids}
    assert "https://example.org/recipes" in page.text  # as text of the recipe, only
    assert len(page.ids) == len(set(page.ids))
    assert {target[1:] for target in page.fetched} <= set(page.ids)


def test_everything_that_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>")
    page = Page(write_report([run]).read_text())
    assert not page.handlers
    assert "b" in page.tags  # the page's own, around the prompt
    for text in (
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "<b>was</b> & is",
        "2 x <H200>",
        "<fresh>",
    ):
        assert text in page.text


def test_names_that_matplotlib_would_interpret_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["_hidden", "$x^2$ & <y>", "跑"]
    page = Page(write_report([make_run(tmp_path / name) for name in names], tmp_path / "out.html").read_text())
    for name in names:
        assert page.texts.count(name) >= 4  # the legends of four charts, as text of an SVG


def test_the_headline_numbers_of_the_summary_are_on_the_page(html: str) -> None:
    text = Page(html).text
    for shown in (
        "Finished",
        "124.4 M parameters on 2 processes: 200 steps, 1.638 M tokens in 3m 07s. 1 step was skipped.",
        "Evaluation loss 2.0134",
        "Perplexity 7.489",
        "Bits per byte 1.2034",
        "Throughput 8,743 tokens/s",
        "Model FLOP utilisation 41.2 %",
        "Peak memory 3.0 GiB per device",
        "this run 1.203 xz -9 2.247 byte frequencies 4.512",
        "What it writes The bridge <b>was</b> & is",
        "bf16 (it is supported)",
        "torch.version 2.9.1",
        "num_targets 9,000",
        "77 skip the loss is NaN (process 1)",
    ):
        assert shown in text, shown


def test_nan_and_inf_are_marked_on_the_charts(html: str) -> None:
    page = Page(html)
    assert page.texts.count("NaN or Inf") == 3  # the loss, wide and narrow, and the gradient norm
    assert "skipped step" in page.texts
    assert "checkpoint ×4" in page.texts


def test_charts_lie_beside_the_page_and_the_loss_scale_only_where_there_is_one(tmp_path: Path) -> None:
    plain, fp16 = make_run(tmp_path / "plain"), make_run(tmp_path / "fp16", fp16=True)
    write_report([plain])
    write_report([fp16], tmp_path / "elsewhere" / "mine.html")
    names = {"loss", "learning_rate", "grad_norm", "throughput"}
    assert {path.name for path in plain.glob("*.png")} == {f"report-{name}.png" for name in names}
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {
        "mine.html",
        *(f"mine-{name}.png" for name in (*names, "loss_scale")),
    }
    assert (plain / "report-loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_run_gives_the_same_charts(html: str, tmp_path: Path) -> None:
    again = write_report([make_run(tmp_path / "run")]).read_text()
    charts = [re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL) for page in (html, again)]
    assert charts[0] == charts[1]


def test_colours_of_the_charts_are_left_to_the_page(html: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(charts) == 5
    assert set(re.findall(r"#[0-9a-f]{6}\b", "".join(charts))) <= {"#000000"}  # black: invisible clip outlines
    assert "var(--series-1)" in charts[0]


def test_two_runs_are_compared_number_by_number_and_recipe_by_recipe(tmp_path: Path) -> None:
    worse = {**SUMMARY, "eval": {"loss": 2.5}, "mfu": None}
    runs = [
        make_run(tmp_path / "first"),
        make_run(tmp_path / "second", summary=worse, learning_rate="0.004"),
    ]
    out = write_report(runs)
    html = out.read_text()
    text = Page(html).text
    assert out == tmp_path / "comparison.html"
    assert "Evaluation loss 2.0134 2.5000" in text
    assert '<td class="number best">2.0134</td><td class="number">2.5000</td>' in html
    assert "Model FLOP utilisation 41.2 % –" in text
    assert "setting first second optimizer.learning_rate 0.001 0.004 Bits per byte" in text  # and seed, equal, is not
    assert "first 1.203 xz -9 2.247 byte frequencies 4.512" in text
    assert not list((tmp_path / "first").glob("*.png"))


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
    text = Page(write_report([run]).read_text()).text
    assert "No summary yet: still running, or killed" in text
    assert "Evaluation loss 2.1000" in text
    assert "Steps 200" in text
    assert "Recipe" not in text


def test_a_run_killed_before_its_first_line_is_reported(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").open().close()
    assert "No step has been logged yet." in Page(write_report([tmp_path / "run"]).read_text()).text


@pytest.mark.parametrize("losses", [[math.nan] * 30, [math.inf, 1.0], [0.0] * 30, [-1.0, 2.0], [5.0], [3e38, 1.0]])
@pytest.mark.filterwarnings("error")
def test_no_curve_is_too_odd_to_draw(tmp_path: Path, losses: list[float]) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step, loss in enumerate(losses, start=1):
            line = {"step": step, "split": "train", "loss": loss, "loss_scale": max(loss, 0.0)}
            folder.append_metrics({**line, "tokens_per_second": None})
    assert "<svg" in write_report([tmp_path / "run"]).read_text()


@pytest.mark.parametrize(
    ("task", "name", "unit"),
    [
        ("image-classification", "samples_per_second", "images"),
        ("semantic-segmentation", "pixels_per_second", "pixels"),
        ("semantic-segmentation", "tokens_per_second", "pixels"),  # as runs were written before
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
        assert f"Throughput 250 {unit}/s" in Page(write_report([tmp_path / "run"]).read_text()).text
        folder.write_summary({name: 500.0, "samples_per_second": 500.0 if name.startswith("samples") else 3.0})
    assert f"Throughput 500 {unit}/s" in Page(write_report([tmp_path / "run"]).read_text()).text
    assert (tmp_path / "run" / "report-throughput.png").exists()


def test_a_step_that_was_nan_is_marked_where_the_mean_of_its_line_leaves_it_out(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2, 3):
            own = math.nan if step == 2 else 1.0
            folder.append_metrics({"step": step, "split": "train", "loss": 1.0, "step_loss": own})
    assert "NaN or Inf" in write_report([tmp_path / "run"]).read_text()


def test_a_folder_without_a_run_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run: it has no metrics\.jsonl"):
        write_report([tmp_path])
    with pytest.raises(ValueError, match=r"nowhere holds no run: there is no such folder"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least one run folder"):
        write_report([])


def test_a_failed_report_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    old = write_report([run]).read_bytes()

    def full_disk(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_report([run])
    assert (run / "report.html").read_bytes() == old
    assert not list(run.glob(".*.tmp"))


def test_lines_are_in_the_order_of_their_steps_whatever_the_file_says(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for step in (3, 1, 2):
            folder.append_metrics({"step": step, "split": "train", "loss": 1.0})
    assert [line["step"] for line in load_run(tmp_path).train] == [1, 2, 3]


def test_a_long_curve_is_drawn_small_and_keeps_every_spike() -> None:
    values = np.exp(0.3 * np.random.default_rng(0).standard_normal(100_000))
    values[12_345], values[54_321] = 1e-3, 1e3
    lines = [{"step": step, "grad_norm": value} for step, value in enumerate(values.tolist())]
    (chart,) = draw_charts([Run("run", lines)])
    assert len(chart.svg) < 100_000
    paths = re.findall(r'd="([^"]*)"', chart.svg)
    at, height = np.array(re.findall(r"[ML] ([\d.]+) ([\d.]+)", max(paths, key=len)), dtype=np.float64).T
    share = (at - at.min()) / (at.max() - at.min())
    assert share[height.argmax()] == pytest.approx(0.12345, abs=0.003)
    assert share[height.argmin()] == pytest.approx(0.54321, abs=0.003)
    bulk = np.quantile(height, 0.9) - np.quantile(height, 0.1)
    assert height.max() - height.min() > 3 * bulk


@pytest.mark.parametrize("num_points", [20, 400, 100_000])
def test_the_trend_of_a_straight_line_is_that_line_up_to_both_ends(num_points: int) -> None:
    steps = np.arange(num_points, dtype=np.float64)
    at, values = trend(steps, 7 - 0.01 * steps)
    np.testing.assert_allclose(values, 7 - 0.01 * at, atol=1e-6 if num_points <= MAX_POINTS else 0.01)
    noise = np.random.default_rng(0).normal(size=num_points)
    assert num_points == 20 or trend(steps, noise)[1].std() < 0.6


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (250, "250"), (12_500, "12.5k"), (1.5e6, "1.5M"), (0.003, "0.003"), (3e-5, "3e-5")]
)
def test_axis_labels_are_short(value: float, text: str) -> None:
    assert short_number(value) == text
