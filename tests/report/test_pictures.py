"""Pictures with boxes and masks: colors for color-blind readers, texts beside the boxes, and lines by verdict."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageColor

from accel_train.report.pictures import VERDICTS, Box, class_colors, color_of_class, draw_boxes, draw_mask

# Machado et al. 2009, severity 1, in linear RGB.
SIGHT = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
GREY = (90, 90, 90)


def seen(color: str, sight: str) -> NDArray[np.float64]:
    """A color as CIE Lab, as eyes of a kind see it."""
    part = np.array(ImageColor.getrgb(color)) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    x, y, z = TO_XYZ @ np.clip(SIGHT[sight] @ linear, 0, 1) / [0.95047, 1, 1.08883]
    a, b, c = (np.cbrt(each) if each > (6 / 29) ** 3 else each / (3 * (6 / 29) ** 2) + 4 / 29 for each in (x, y, z))
    return np.array([116 * b - 16, 500 * (a - b), 200 * (b - c)])


@pytest.mark.parametrize("sight", SIGHT)
def test_the_background_and_nine_classes_have_colors_that_every_reader_tells_apart(sight: str) -> None:
    colors = [seen(color, sight) for color in class_colors()[:10]]
    assert min(np.linalg.norm(one - other) for one, other in combinations(colors, 2)) > 15
    assert np.linalg.norm(colors[1] - colors[2]) > 50
    verdicts = [seen(color, sight) for color, _ in VERDICTS.values()]
    assert min(np.linalg.norm(one - other) for one, other in combinations(verdicts, 2)) > 15


def test_each_number_of_a_mask_has_its_own_color_and_no_class_is_white() -> None:
    colors = class_colors()
    assert len({*colors}) == len(colors) == 256
    assert (colors[0], colors[255]) == ("#000000", "#ffffff")
    assert color_of_class(0) == colors[1]
    assert color_of_class(254) == colors[1]


def changed(picture: Image.Image) -> NDArray[np.bool_]:
    return (np.asarray(picture) != GREY).any(-1)


@pytest.mark.parametrize(
    "corners", [(60, 80, 120, 140), (60, 0, 120, 60), (0, 10, 60, 190), (60, 0, 120, 200)], ids=str
)
def test_the_text_stands_beside_its_box(corners: tuple[int, int, int, int]) -> None:
    """Above it, below it at the top of the image, and at its side where it is as high as the image."""
    left, top, right, bottom = corners
    picture = draw_boxes(Image.new("RGB", (200, 200), GREY), [Box(corners, "cat 0.91", "#0072b2")], 1)
    inside = changed(picture)[top + 4 : bottom - 4, left + 4 : right - 4]
    assert not inside.any()
    tag = (np.asarray(picture) == ImageColor.getrgb("#0072b2")).all(-1)
    tag[max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = False
    assert tag.sum() > 200


def test_texts_of_two_boxes_at_one_place_do_not_cover_each_other() -> None:
    corners, colors = (60, 80, 120, 140), ("#0072b2", "#d55e00")
    alone = [draw_boxes(Image.new("RGB", (200, 200), GREY), [Box(corners, "cat", color)], 1) for color in colors]
    both = draw_boxes(Image.new("RGB", (200, 200), GREY), [Box(corners, "cat", color) for color in colors], 1)

    def of_color(picture: Image.Image, color: str) -> int:
        pixels = (np.asarray(picture) == ImageColor.getrgb(color)).all(-1)
        pixels[80:140, 60:120] = False
        return int(pixels.sum())

    assert [of_color(both, color) for color in colors] == pytest.approx(
        [of_color(each, color) for each, color in zip(alone, colors, strict=True)], rel=0.1
    )


def test_a_text_that_fits_nowhere_else_is_drawn_inside() -> None:
    picture = draw_boxes(Image.new("RGB", (80, 80), GREY), [Box((0, 0, 80, 80), "cat", "#0072b2")], 1)
    assert changed(picture)[4:14, 4:20].all()


def test_lines_are_told_apart_without_color() -> None:
    strokes = {}
    for name, (color, dash) in VERDICTS.items():
        picture = draw_boxes(Image.new("RGB", (200, 200), GREY), [Box((20, 60, 180, 180), "", color, dash)], 1)
        line = (np.asarray(picture)[178, 30:170] == ImageColor.getrgb(color)).all(-1).astype(int)
        strokes[name] = (int((np.diff(line) == 1).sum()), float(line.mean()))
    assert strokes["right"] == (0, 1.0)
    assert 3 < strokes["wrong"][0] < strokes["missed"][0]
    assert 1 > strokes["wrong"][1] > strokes["missed"][1]


def test_boxes_are_scaled_with_their_image() -> None:
    image = Image.new("L", (20, 10), 90)
    picture = draw_boxes(image, [Box((5, 2, 15, 8), "", "#0072b2")], 10)
    assert picture.size == (200, 100)
    line = (np.asarray(picture) == ImageColor.getrgb("#0072b2")).all(-1)
    assert line[20:22, 50:150].all()
    assert line[20:80, 148:150].all()
    assert not line[30:, :49].any()
    assert not line[:, 151:].any()


def test_a_mask_lies_half_transparent_over_its_image_with_the_names_of_its_classes_below() -> None:
    mask = np.zeros((4, 6), np.uint8)
    mask[:, 3:] = 2
    picture = draw_mask(Image.new("RGB", (6, 4), GREY), mask, ["ground", "tree", "sky"], 20)
    pixels = np.asarray(picture)
    assert pixels.shape[:2] > (80, 120)
    assert tuple(pixels[10, 10]) == (45, 45, 45)
    sky = np.array(ImageColor.getrgb(class_colors()[2]))
    np.testing.assert_allclose(pixels[10, 110], (sky + 90) / 2, atol=1)
    key = pixels[80:].reshape(-1, 3)
    present = [(key == ImageColor.getrgb(color)).all(-1).any() for color in class_colors()[:3]]
    assert present == [True, False, True]
