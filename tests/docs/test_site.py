"""`make docs`: the site is built whole, and is read without a network."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs-material is not installed: pip install '.[docs]'"),
]


def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """`strict`: a page outside the navigation, a link or an anchor that leads nowhere ends the build."""
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert (built.returncode, built.stdout) == (0, ""), built.stderr
    pages = sorted(page for page in (tmp_path / "site").glob("*.html") if page.name != "404.html")  # a server's
    assert len(pages) >= 19
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]*\shref=\"?([^\s\">]+)", text)
        assert [address for address in loaded if "//" in address] == [], page.name
        assert [address for address in loaded if not (page.parent / address.split("?")[0]).exists()] == [], page.name
        assert "mermaid" not in text, f"{page.name}: the theme takes what draws it from a CDN"
    settings = (tmp_path / "site" / "settings.html").read_text()
    assert 'id="optimizer.learning_rate"' in settings
