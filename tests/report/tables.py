"""Check of a table on a page."""


def assert_table(text: str, *rows: str) -> None:
    """Assert that the text of a page holds these rows one after the other, blanks between cells."""
    assert " ".join(rows) in text, f"{rows}\nnot in\n{text}"
