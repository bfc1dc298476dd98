"""The report in a real browser: a headless Chromium with a real mouse, wide and narrow, light and dark."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.metrics.scores import classification_scores
from accel_train.observe.run_folder import RunFolder
from accel_train.report.follow import ReportServer
from accel_train.report.report import write_report
from tests.report import test_evaluation
from tests.support.browser import Tab, find_browser, open_tab
from tests.support.report import SUMMARY, make_run

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium is installed (apt-get install chromium), so no page of a report is opened and looked at",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a run with bad steps, of two runs, and of a classifier with long names of classes."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / "one", fp16=True), make_run(folder / ("a-name-without-a-place-to-break" * 4))]
    events = [
        {"step": step, "event": kind, "message": kind}
        for step, kind in ((90, "rollback"), (110, "preempted"), (110, "resume"), (150, "overflow"))
    ]
    with (runs[0] / "events.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)
    names = [f"a class with quite a long name, number {number}" for number in range(20)]
    matrix = np.full((20, 20), 12_345)
    scores = classification_scores(matrix, names)
    evals = [{"accuracy": 0.1 * number} for number in range(9)]
    classified = test_evaluation.make_run(folder / "c", details=scores.details, metrics=scores.metrics, evals=evals)
    odd = [[math.nan] * 30, [math.inf, 1.0], [0.0] * 30, [-1.0, 2.0], [5.0], [3e38, 1.0], [2.0] * 30]
    for number, losses in enumerate(odd):
        with RunFolder(folder / f"odd-{number}") as written:
            for step, loss in enumerate(losses, start=1_234_567):
                line = {"step": step, "split": "train", "loss": loss, "loss_scale": max(loss, 0.0)}
                written.append_metrics({**line, "grad_norm": loss, "tokens_per_second": None})
    return {
        "one": write_report(runs[:1]),
        "odd": write_report([folder / f"odd-{number}" for number in range(len(odd))], folder / "odd.html"),
        **{f"odd {number}": write_report([folder / f"odd-{number}"]) for number in (0, 4)},
        "two": write_report(runs, folder / "comparison.html"),
        "classes": write_report([classified]),
    }


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


Show = Callable[..., Tab]


@pytest.fixture
def show(tab: Tab, pages: dict[str, Path]) -> Show:
    """Opens a page by name, and gives its tab."""

    def show(name: str, **how: Any) -> Tab:
        tab.open(pages[name], **how)
        return tab

    return show


def place(tab: Tab, number: int, share: float) -> tuple[float, float]:
    """Where a chart is in the window, `share` of its width from the left; it is scrolled to."""
    box = tab.run(
        f"(() => {{ const over = charts[{number}].plot.over; over.scrollIntoView({{block: 'center'}});"
        "const box = over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    return box[0] + share * box[2], box[1] + box[3] / 2


def legend(tab: Tab, number: int) -> str:
    return tab.run(f"charts[{number}].legend.innerText.replace(/\\s+/g, ' ')")


def shown_steps(tab: Tab) -> list[list[float]]:
    return tab.run("charts.map(({plot}) => [plot.scales.x.min, plot.scales.x.max])")


def inked(tab: Tab, number: int) -> int:
    """How many pixels of a chart are not empty."""
    count = tab.run(
        f"(() => {{ const {{canvas}} = charts[{number}].plot.ctx;"
        "const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "return data.filter((value, n) => n % 4 === 3 && value > 0).length; })()"
    )
    return count


@pytest.mark.parametrize(
    ("name", "width"),
    [
        *((name, width) for name in ("one", "two", "classes") for width in (1400, 420)),
        ("odd", 420),
        ("odd 0", 420),
        ("odd 4", 420),
    ],
)
def test_no_page_has_a_script_error_or_asks_for_anything_or_is_wider_than_the_window(
    tab: Tab, pages: dict[str, Path], name: str, width: int
) -> None:
    tab.errors.clear()
    tab.fetched.clear()
    tab.open(pages[name], width=width)
    tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for _ in range(2):  # every chart on both kinds of axes
        tab.run("document.querySelectorAll('figcaption .control:first-of-type').forEach((each) => each.click())")
        tab.settle()
    assert tab.errors == []
    assert tab.fetched == [pages[name].resolve().as_uri()]
    assert tab.run("document.documentElement.scrollWidth") == width
    assert tab.run("charts.length") == tab.run("document.querySelectorAll('figure').length") >= 2
    assert tab.run(
        f"charts.every(({{place}}) => place.scrollWidth <= place.clientWidth && place.clientWidth <= {width})"
    )
    assert min(inked(tab, number) for number in range(tab.run("charts.length"))) > 500


def test_hovering_shows_values_in_every_chart_and_dragging_zooms_all_until_a_double_click(show: Show) -> None:
    tab = show("one", width=1400)
    assert legend(tab, 0).startswith("each log line trend evaluation NaN or Inf checkpoint ×4")
    everything = shown_steps(tab)
    share = (100 - everything[0][0]) / (everything[0][1] - everything[0][0])
    tab.mouse("mouseMoved", *place(tab, 0, share))
    for number, shown in enumerate(("checkpoint ×4 at 100", "each log line 0.001", "each log line 0.4 trend 0.4")):
        assert shown in legend(tab, number)
        assert legend(tab, number).endswith("step 100")
    assert "evaluation 2.1" in legend(tab, 0)
    tab.mouse("mousePressed", *place(tab, 0, 0.25))
    tab.mouse("mouseMoved", *place(tab, 0, 0.5))
    tab.mouse("mouseReleased", *place(tab, 0, 0.5))
    low, high = everything[0]
    for found in shown_steps(tab):
        assert found == pytest.approx([low + 0.25 * (high - low), low + 0.5 * (high - low)], abs=2)
    tab.run("document.querySelector('figcaption .control').click()")  # a change of the axis keeps the zoom
    assert shown_steps(tab)[0] == pytest.approx([low + 0.25 * (high - low), low + 0.5 * (high - low)], abs=2)
    tab.click(*place(tab, 0, 0.5), clicks=2)
    assert shown_steps(tab) == everything


def test_a_click_on_the_legend_hides_a_curve_and_another_shows_it(show: Show) -> None:
    tab = show("one", width=1400)
    before = inked(tab, 0)
    button = "charts[0].legend.querySelectorAll('button')[1]"
    box = tab.run(f"(({{left, top}}) => [left + 5, top + 5])({button}.getBoundingClientRect())")
    tab.click(*box)
    assert tab.run(f"{button}.ariaPressed") == "false"
    assert inked(tab, 0) < before - 500
    tab.run("slider.value = 6; slider.oninput()")  # what is hidden stays so when charts are drawn again
    assert tab.run(f"{button}.ariaPressed") == "false"
    tab.run("slider.value = 4; slider.oninput()")
    tab.click(*box)
    tab.settle()
    assert inked(tab, 0) == before


def test_the_trend_by_default_is_a_line_fitted_to_a_twentieth_of_the_curve(show: Show) -> None:
    tab = show("one", width=420)
    found = np.array(tab.run("smooth(Array.from({length: 400}, (_, n) => 7 - 0.01 * n), 400 / 90)"))
    np.testing.assert_allclose(found, 7 - 0.01 * np.arange(400), atol=1e-9)
    noise = np.random.default_rng(0).normal(size=400).round(4).tolist()
    assert 0.2 < np.std(tab.run(f"smooth({noise}, 400 / 90)")) < 0.6
    trend = "charts[0].layers.find(({key}) => key === 'trend')"
    raw, default, wide = (tab.run(f"smoothing = {value}; draw(charts[0]); {trend}?.y") for value in (0, 4, 8))
    assert raw is None
    roughness = [np.abs(np.diff(values, 2)).sum() for values in (default, wide)]
    assert roughness[0] > 2 * roughness[1]


def test_charts_follow_the_theme_of_the_system_and_that_of_the_switch(tab: Tab, pages: dict[str, Path]) -> None:
    colors = []
    for dark, switched in ((False, False), (True, False), (True, True), (False, True)):
        tab.open(pages["two"], width=1400, dark=dark)
        if switched:
            tab.run("theme.click()")
            tab.settle()
        paper = tab.run("getComputedStyle(document.body).backgroundColor")
        colors.append((paper, tab.run("charts[0].plot.series[2].stroke()"), tab.run("theme.textContent")))
    light, dark_system, switched_to_light, switched_to_dark = colors
    assert light == switched_to_light == ("rgb(253, 253, 251)", "rgb(43, 108, 176)", "dark")
    assert dark_system == switched_to_dark == ("rgb(21, 23, 26)", "rgb(106, 168, 232)", "light")


def test_downloads_hold_the_values_and_the_picture_of_a_chart(show: Show) -> None:
    tab = show("one", width=1400)
    csv = tab.run("csvOf(charts[0]).trim().split('\\n')")
    head = csv[0].split(",")
    assert head[:5] == ["step", "each log line", "trend", "evaluation", "NaN or Inf"]
    rows = {row.split(",")[0]: row.split(",") for row in csv[1:]}
    assert len(rows) == 41
    assert rows["50"][3] == "2.1"
    assert rows["77"][1:3] == ["", ""]
    size = tab.run("(({width, height}) => [width, height])(pictureOf(charts[0]))")
    assert size[0] > 1000
    assert size[1] > 400
    found = tab.run("pictureOf(charts[0]).toDataURL().slice(0, 22)")
    assert found == "data:image/png;base64,"


def test_without_scripts_the_tables_are_there_and_a_sentence_says_what_is_missing(show: Show) -> None:
    tab = show("one", width=420, script=False)
    text = tab.run("document.body.innerText.replace(/\\s+/g, ' ')")
    assert "need JavaScript" in text
    assert "smoothing" not in text
    assert "Evaluation loss 2.0134" in text
    assert tab.run("document.documentElement.scrollWidth") == 420


def test_ticks_of_an_axis_have_one_notation(show: Show) -> None:
    tab = show("one", width=420)
    for ticks, texts in (
        ([0, 8e-4, 1.6e-3, 2.4e-3], ["0", "0.0008", "0.0016", "0.0024"]),
        ([0, 2e-5, 4e-5], ["0", "2e-5", "4e-5"]),
        ([5000, 10_000, 15_000], ["5k", "10k", "15k"]),
        ([1e-6, 1e-3, 1, 1000], ["1e-6", "1e-3", "1e0", "1e3"]),
        ([0, 250, 500], ["0", "250", "500"]),
    ):
        assert tab.run(f"labels({ticks})") == texts
    assert tab.run("labels([1234567, 2097152], true)") == ["1,234,567", "2,097,152"]
    assert tab.run("[0, 1.5e-7, 0.0094341, 3.7438, 5154.52].map(number)") == [
        "0",
        "1.5e-7",
        "0.0094341",
        "3.7438",
        "5,154.5",
    ]
    assert tab.run("linearTicks(0, 0.0171, 5)") == [0, 0.005, 0.01, 0.015]
    assert tab.run("logTicks(0.9, 12, 10)") == [1, 3, 10]
    assert tab.run("logTicks(8192, 40000, 2)") == [8192, 16384, 32768]


def test_a_page_that_follows_a_run_renews_itself_and_keeps_what_the_reader_has_set(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with ReportServer([run]) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            tab.errors.clear()
            tab.open(server.address, width=420)
            tab.run("(theme.click(), slider.value = 6, slider.oninput())")
            tab.run("document.querySelector('figcaption .control').click()")
            tab.run("charts[0].legend.querySelectorAll('button')[1].click()")
            tab.run("document.querySelectorAll('details').forEach((each) => { each.open = !each.open; })")
            tab.run("charts[0].plot.setScale('x', {min: 50, max: 100})")
            state = (
                "[root.dataset.theme, slider.value, smoothing, charts[0].log, [...charts[0].hidden],"
                "charts[0].plot.scales.x.min, charts[0].plot.scales.x.max,"
                "[...document.querySelectorAll('details')].map((each) => each.open)]"
            )
            before = tab.run(state)
            assert before[:7] == ["dark", "6", 6, True, ["trend"], 50, 100]
            tab.run("window.isOld = true")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 205, "split": "eval", "loss": 2.0, "accuracy": 0.75}) + "\n")
            deadline = time.monotonic() + 120
            while tab.run("window.isOld || document.readyState !== 'complete'") and time.monotonic() < deadline:
                time.sleep(0.05)
            tab.settle()
            assert max(tab.run("charts[0].layers.find(({key}) => key === 'evaluation').x")) == 205
            assert tab.run(state) == before
            assert tab.errors == []
        finally:
            server.shutdown()
            tab.open("about:blank", width=420, script=False)


def test_runs_side_by_side_are_all_there_with_their_times_in_one_table(tab: Tab, tmp_path: Path) -> None:
    defeat = {"sentence": "The model does not beat a baseline", "causes": ["too few steps"]}
    launch = {"launch": 1, "step": 9, "steps": 9, "saves": 0, "started": 1000.0, "seconds": 60.0}
    launch |= {"accounts": {"imports": 10.0, "productive_steps": 50.0}}
    runs = []
    for name in ("a", "b", "c"):
        runs.append(make_run(tmp_path / name, summary={**SUMMARY, "not_beaten": defeat}))
        (runs[-1] / "launches.jsonl").write_text(json.dumps(launch) + "\n")
    tab.open(write_report(runs, tmp_path / "comparison.html"), width=420)
    names = "[...document.querySelectorAll('.run > summary')].map((each) => each.firstChild.textContent.trim())"
    assert tab.run(names) == ["a", "b", "c"]
    text = tab.run("document.querySelector('main').textContent.replace(/\\s+/g, ' ')")
    assert text.count("the time went") == 1
    assert text.count("50.0 s, 83.3%") == 3
    assert "3 of 3 do not" in text
    assert "too few steps" not in text
