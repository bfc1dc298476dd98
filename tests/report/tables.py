"""The page of a report, and a check of a table on it."""

from pathlib import Path

from accel_train.report.report import write_report
from tests.support.report import Page


def page_of(*runs: Path) -> Page:
    """Return the page of a report on a run, or of a comparison of several."""
    return Page(write_report(runs).read_text())


def assert_table(text: str, *rows: str) -> None:
    """Assert that the text of a page holds these rows one after the other, blanks between cells."""
    assert " ".join(rows) in text, f"{rows}\nnot in\n{text}"
