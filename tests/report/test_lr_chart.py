"""The picture of a learning-rate range test marks the suggested rate, and is drawn whatever the losses are."""

import io

import numpy as np
import pytest
from PIL import Image, ImageColor

from accel_train.report.charts import Array
from accel_train.report.lr_chart import LEFT, SMOOTHED, SUGGESTED, WIDTH, draw_range_test

RATES = np.geomspace(1e-6, 1.0, 40)
FALLING = np.linspace(4.0, 2.0, 40)
NONE = np.full(40, np.nan)


def pixels_of(color: str, png: bytes) -> tuple[Array, Array]:
    """Rows and columns above the legend that have a color."""
    plot = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))[:680]
    rows, columns = (plot == ImageColor.getrgb(color)).all(-1).nonzero()
    return rows.astype(float), columns.astype(float)


def test_the_suggested_rate_is_marked_at_its_place_on_the_log_axis() -> None:
    _, columns = pixels_of(SUGGESTED, draw_range_test(RATES, FALLING, FALLING, 26))
    assert columns.mean() == pytest.approx((LEFT + WIDTH * (0.02 + 0.96 * 26 / 39)) / 2, abs=1.5)
    assert not len(pixels_of(SUGGESTED, draw_range_test(RATES, FALLING, FALLING, None))[0])


@pytest.mark.parametrize("losses", [NONE, np.where(RATES < 2e-6, 4.0, NONE), np.full(40, 2.0), FALLING * 0, -FALLING])
@pytest.mark.parametrize("rates", [RATES, np.geomspace(1e-32, 1e-31, 40), np.geomspace(1e-60, 1.0, 40)])
def test_losses_and_rates_of_any_kind_are_drawn(rates: Array, losses: Array) -> None:
    assert Image.open(io.BytesIO(draw_range_test(rates, losses, losses[np.isfinite(losses)], None))).size == (1600, 820)


def test_a_diverged_loss_leaves_the_axis_to_the_others() -> None:
    diverged = np.append(FALLING[:-3], [1e300, np.inf, np.nan])
    rows, _ = pixels_of(SMOOTHED, draw_range_test(RATES, diverged, FALLING[:-3], None))
    assert np.ptp(rows) > 250
