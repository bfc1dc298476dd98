"""The look of every chart, and how a figure becomes an SVG that follows the page's colours, and a PNG."""

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# The light theme. In an SVG each of these becomes a CSS variable, so that the page can turn dark.
PAPER, INK, MUTED, GRID, ALERT = "#fdfdfb", "#33373b", "#7c8187", "#e3e2dc", "#c4383a"
SERIES = ("#2b6cb0", "#c9662b", "#2f8a63", "#8457b3", "#a8861c", "#b0487f")
CSS_COLORS = {
    PAPER: "--paper",
    INK: "--ink-soft",
    MUTED: "--muted",
    GRID: "--line",
    ALERT: "--alert",
    **{color: f"--series-{number}" for number, color in enumerate(SERIES, start=1)},
}

Size = tuple[float, float]
"""Width and height in CSS pixels, with text of 11."""

WIDE, HALF, THIRD, PHONE = (960.0, 370.0), (450.0, 260.0), (330.0, 230.0), (340.0, 320.0)
"""Charts across the page, two in a row, three in a row, and the wide one again for a phone."""

LOOK: dict[str, Any] = {
    "svg.fonttype": "none",  # real text: it takes the page's font, and can be searched
    "font.size": 11.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "grid.color": GRID,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 7),
    "path.simplify_threshold": 1.0,  # pixels: a curve of 100,000 steps takes 70 kB, and keeps every spike
}
PNG_DPI = 160  # of 72 per CSS pixel: sharp on a screen with two pixels for one


def render(
    draw: Callable[[Figure], None],
    name: str,
    title: str,
    size: Size,
    *,
    png: bool = True,
    about: str = "over the steps",
) -> tuple[str, bytes]:
    """Let `draw` fill a figure; return its SVG for the page, and a PNG file (empty if `png` is off). matplotlib's global state is not changed for good.

    `about` follows the title in the description of the picture in words.
    """
    salt = {"svg.hashsalt": f"{name}-{size[0]}"}  # the same run gives the same file, and no two figures share an id
    with rc_context(LOOK | salt), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a run may be named in any script
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained", facecolor=PAPER)
        figure.suptitle(title, x=0.002, ha="left", fontsize=12, fontweight="bold", parse_math=False)
        draw(figure)
        svg, bitmap = io.BytesIO(), io.BytesIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
        if png:
            figure.savefig(bitmap, format="png", dpi=PNG_DPI)
    return _for_page(svg.getvalue().decode(), f"{title} {about}"), bitmap.getvalue()


def draw_legend(figure: Figure, entries: Sequence[tuple[Line2D, str]]) -> None:
    """Name what is drawn, below the axes, in rows of equal length."""
    if not entries:
        return
    widest = max(len(label) for _, label in entries)
    fitting = max(1, int(figure.get_size_inches()[0] * 72 / (5.8 * min(widest, 40) + 50)))
    legend = figure.legend(
        [handle for handle, _ in entries],
        [str(number) for number in range(len(entries))],  # placeholders
        loc="outside lower left",
        ncols=math.ceil(len(entries) / math.ceil(len(entries) / fitting)),
        frameon=False,
        fontsize=10,
        handlelength=1.6,
        handletextpad=0.6,
        columnspacing=1.6,
        borderaxespad=0.2,
    )
    for text, (_, label) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)  # a run may be called "$x$", or "_x", which a legend would hide
        text.set_text(label if len(label) <= 40 else label[:39] + "…")
        text.set_color(INK)


def _for_page(svg: str, description: str) -> str:
    """Return the SVG without what a page has already (declaration, style, fonts, size), its colours as CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to a group; the page holds several figures
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}">'
    svg = head + svg[svg.index(">") + 1 :].rstrip()
    for color, variable in CSS_COLORS.items():
        svg = svg.replace(color, f"var({variable})")
    return svg
