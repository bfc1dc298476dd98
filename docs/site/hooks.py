"""Hooks of MkDocs: pages that are made when the site is built, and links that hold on GitHub and in the site.

`iframe-worker` (MIT) lets the search work in pages that are opened as files; the theme's own address of it is a CDN's.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from accel_train.cli.reference import commands_page, recipes_page, settings_page
from accel_train.cli.results.schema import schema_page

REPOSITORY = Path(__file__).parents[2]
OTHER_PAGES = {
    "index.md": "README.md",
    "agents.md": "AGENTS.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "launch.md": "launch/README.md",
    "benchmarks.md": "benchmarks/README.md",
}
"""Pages of the site that are files outside `docs/`."""
GENERATED = {
    "settings.md": settings_page, "commands.md": commands_page, "recipes.md": recipes_page, "results.md": schema_page,
}  # fmt: skip
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of `docs/`."""
    for page, path in OTHER_PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / path).read_text()))
    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    for name in ("site.css", "logo.svg", "iframe-worker/shim.js", "iframe-worker/LICENSE"):
        content = (REPOSITORY / "docs" / "site" / name).read_text()
        files.append(File.generated(config, f"assets/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, leave the text alone of those to other files of the repository, and draw no
    drawings.
    """
    name = page.file.src_uri
    folder = os.path.dirname(OTHER_PAGES.get(name, f"docs/{name}"))

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        address = _address(os.path.normpath(os.path.join(folder, path)))
        if address is None:
            return text
        return f"{mark}[{text}]({address}{'#' + anchor if anchor else ''})"

    if "<table>" in markdown:  # code side by side: room for two, and Markdown within the cells
        page.meta["hide"] = ["toc"]
        markdown = re.sub(r"<(table|tr|td)>", r'<\1 markdown="block">', markdown)
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part.replace("```mermaid", "```text") if part.startswith("```") else _lists_apart(LINK.sub(link, part))
        for part in parts
    )


def _address(path: str) -> str | None:
    """Return the address in the site of a file of the repository, None where it has none."""
    for page, source in OTHER_PAGES.items():
        if path == source:
            return page
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "recipes":
        return "recipes.md"
    if path.startswith("recipes/") and path.endswith(".yaml"):
        return f"recipes.md#{Path(path).stem}"
    return None


def _lists_apart(text: str) -> str:
    """Return a text with an empty line before each list, which GitHub does not need, and Python-Markdown does."""
    return re.sub(r"^(?!\s*(?:[-*]|\d+\.) )(\S.*)\n(?=(?:[-*]|1\.) )", r"\1\n\n", text, flags=re.MULTILINE)
