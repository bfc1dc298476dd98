"""The chart of a learning-rate range test: loss over learning rate, and the last rate with a steep fall."""

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from accel_train.report.charts import Array, short_number

# The colors of report.html on light paper.
PAPER, INK, MUTED, GRID, SMOOTHED, SUGGESTED = "#fdfdfb", "#33373b", "#6d7278", "#e3e2dc", "#2b6cb0", "#c9662b"
EACH_STEP = "#9fbcd9"
# Pixels of a drawing twice as large as the file. Pillow does not smooth the edges of lines, and halving smooths them.
SIZE, LEFT, TOP, WIDTH, HEIGHT = (3200, 1640), 180, 200, 2980, 1140
LINE, TEXT = 4, 46


def draw_range_test(rates: Array, losses: Array, smoothed: Array, suggested: int | None) -> bytes:
    """Return a PNG that plots the losses over the learning rates.

    `smoothed` may be shorter than `losses` if the last losses are not finite. The chart cuts off losses far above the
    first ones, from a test that diverged.
    """
    finite = np.isfinite(losses)
    low, high = _loss_range(losses[finite], max(5, len(rates) // 10))
    first, last = (float(np.log10(rate)) for rate in rates[[0, -1]])

    def place(rate: Array, loss: Array) -> list[tuple[float, float]]:
        x = (0.02 + 0.96 * (np.log10(rate) - first) / (last - first)) * WIDTH
        y = (high - np.minimum(loss, 2 * high - low)) / (high - low) * HEIGHT
        return list(zip(x.tolist(), y.tolist()))

    picture, plot = Image.new("RGB", SIZE, PAPER), Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    page, lines, font = ImageDraw.Draw(picture), ImageDraw.Draw(plot), ImageFont.load_default(TEXT)
    for rate in _rate_ticks(first, last):
        [(x, _)] = place(np.array([rate]), np.array([low]))
        lines.line([(x, 0), (x, HEIGHT)], GRID, LINE)
        page.text((LEFT + x, TOP + HEIGHT + 26), short_number(rate), MUTED, font, "mt")
    for loss in _loss_ticks(low, high):
        [(_, y)] = place(rates[:1], np.array([loss]))
        lines.line([(0, y), (WIDTH, y)], GRID, LINE)
        page.text((LEFT - 26, TOP + y), short_number(loss), MUTED, font, "rm")
    legend = [("each step", EACH_STEP, LINE), ("smoothed", SMOOTHED, 2 * LINE)]
    curves = (rates[finite], losses[finite]), (rates[: len(smoothed)], smoothed)
    for (_, color, width), points in zip(legend, curves):
        if len(points[0]):
            lines.line(place(*points), color, width, "curve")
    if suggested is not None:
        [(x, y)] = place(rates[[suggested]], smoothed[[suggested]])
        for dash in range(0, HEIGHT, 28):
            lines.line([(x, dash), (x, dash + 17)], SUGGESTED, LINE)
        lines.circle((x, y), 16, SUGGESTED)
        legend.append((f"last steep fall: {rates[suggested]:.2g}", SUGGESTED, 28))
    picture.paste(plot, (LEFT, TOP))
    page.text((24, 24), "Learning-rate range test", INK, ImageFont.load_default(56), stroke_width=1)
    page.text((24, 108), "training loss", INK, font)
    page.text((LEFT + WIDTH / 2, TOP + HEIGHT + 110), "learning rate, as the optimizer has it", MUTED, font, "mt")
    x, y = 24.0, SIZE[1] - 60
    for name, color, width in legend:
        page.rectangle([x, y - width / 2, x + 88, y + width / 2], color)
        page.text((x + 112, y), name, INK, font, "lm")
        x += 190 + font.getlength(name)
    file = io.BytesIO()
    picture.reduce(2).save(file, "png")
    return file.getvalue()


def _loss_range(losses: Array, num_first: int) -> tuple[float, float]:
    """Return the ends of the loss axis for finite losses.

    The axis leaves out losses far above the median of the `num_first` first losses.
    """
    if not len(losses):
        return 0.0, 1.0
    low, high = float(losses.min()), float(losses.max())
    high = max(low, min(high, 1.5 * float(np.median(losses[:num_first]))))
    margin = max(0.06 * (high - low), 0.01 * abs(high), 1e-9)
    return low - margin, high + margin


def _rate_ticks(first: float, last: float) -> list[float]:
    """Return at most 12 powers of ten between 10^first and 10^last as ticks.

    Below three decades, also return their multiples by 2 and 5.
    """
    decades = range(math.floor(first), math.ceil(last) + 1, 1 + int((last - first) / 12))
    ticks = [factor * 10.0**decade for decade in decades for factor in ((1, 2, 5) if last - first < 3 else (1,))]
    return [tick for tick in ticks if first - 1e-9 <= math.log10(tick) <= last + 1e-9]


def _loss_ticks(low: float, high: float) -> list[float]:
    """Return at most 7 round losses between `low` and `high` as ticks."""
    decade = 10.0 ** math.floor(math.log10((high - low) / 6))
    step = next(factor * decade for factor in (1, 2, 5, 10) if 6 * factor * decade >= high - low)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
