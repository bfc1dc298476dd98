"""Pictures with boxes and masks, for the report and for `predict --draw`. Their colors suit color-blind readers."""

import base64
import colorsys
import io
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

Dash = Literal["solid", "dashed", "dotted"]
DASHES: dict[Dash, tuple[int, int]] = {"solid": (1, 0), "dashed": (6, 3), "dotted": (2, 2)}
"""Lengths of a stroke and of the gap after it, in widths of the line."""
VERDICTS: dict[str, tuple[str, Dash]] = {
    "right": ("#0072b2", "solid"),
    "wrong": ("#d55e00", "dashed"),
    "missed": ("#cc79a7", "dotted"),
}
"""Color and line of a box by its verdict."""
NO_CLASS = 255
_SAFE = ("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "332288", "882255")
"""Colors that color-blind readers tell apart: seven of Okabe and Ito (2008), and two of Tol (2021)."""
_GOLDEN = 0.618034


class Box(NamedTuple):
    """A box to draw, and the text beside it."""

    corners: Sequence[float]
    """Left, top, right, bottom in pixels of the image."""
    text: str
    color: str
    dash: Dash = "solid"


@cache
def class_colors() -> tuple[str, ...]:
    """Return the color of each number of a mask as `#rrggbb`, the same in all pictures.

    0, usually the background, is black, and 255 (no class) is white.
    """
    further = (colorsys.hls_to_rgb(n * _GOLDEN % 1, (0.35, 0.7, 0.52)[n % 3], 0.6) for n in range(NO_CLASS))
    colors = [*_SAFE, *(bytes(round(255 * each) for each in color).hex() for color in further)]
    return ("#000000", *(f"#{color}" for color in colors[: NO_CLASS - 1]), "#ffffff")


@cache
def palette() -> NDArray[np.uint8]:
    """Return `class_colors` as numbers, (256, 3)."""
    return np.array([ImageColor.getrgb(color) for color in class_colors()], np.uint8)


def color_of_class(class_id: int) -> str:
    """Return the color of a class that has no background before it."""
    return class_colors()[1 + class_id % (NO_CLASS - 1)]


def resized(image: Image.Image, scale: float) -> Image.Image:
    """Return the image, scaled. Enlarged pixels stay squares."""
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR)


def address_of(picture: Image.Image, edge: int) -> str:
    """Return a thumbnail, `edge` pixels long, as an address that holds the picture itself."""
    file = io.BytesIO()
    resized(picture, edge / max(picture.size)).quantize(64).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def draw_boxes(image: Image.Image, boxes: Sequence[Box], scale: float) -> Image.Image:
    """Return an RGB picture of the scaled image with boxes, and the text of each beside its box.

    The first boxes are on top, and have the best places for their texts.
    """
    picture = resized(image.convert("RGB"), scale)
    draw, font, width = ImageDraw.Draw(picture), _font(picture), max(2, max(picture.size) // 200)
    placed = []
    for box in boxes:
        left, top, right, bottom = (round(edge * scale) for edge in box.corners)
        placed.append((box, (left, top, max(right, left + width), max(bottom, top + width))))
    for box, corners in reversed(placed):
        pieces = list(_line(corners, width, *DASHES[box.dash]))
        # A white rim keeps the line visible on any image.
        for x, y, right, bottom in pieces:
            draw.rectangle((x - 1, y - 1, right + 1, bottom + 1), "white")
        for piece in pieces:
            draw.rectangle(piece, box.color)
    taken: list[tuple[float, float, float, float]] = []
    for box, corners in placed:
        tag = _place(picture.size, corners, (font.getlength(box.text) + 4, font.size + 2), taken)
        taken.append(tag)
        draw.rectangle(tag, box.color)
        draw.text((tag[0] + 2, (tag[1] + tag[3]) / 2), box.text, _ink(box.color), font, "lm")
    return picture


def draw_mask(image: Image.Image, mask: NDArray[np.uint8], names: Sequence[str], scale: float) -> Image.Image:
    """Return an RGB picture of the scaled image under its mask (H, W), with the names of the colors below."""
    picture = resized(image.convert("RGB"), scale)
    colors = Image.fromarray(palette()[mask]).resize(picture.size, Image.Resampling.NEAREST)
    font, key = _font(picture), [(names[n], class_colors()[n]) for n in np.unique(mask).tolist() if n < len(names)]
    lines, x, height = 1, 4.0, font.size + 8
    places = []
    for name, color in key:
        width = font.size + 6 + font.getlength(name) + 12
        if x > 4 and x + width > picture.width:
            lines, x = lines + 1, 4.0
        places.append((x, picture.height + height * (lines - 1) + 4, name, color))
        x += width
    page = Image.new("RGB", (picture.width, picture.height + round(height * lines)), "white")
    page.paste(Image.blend(picture, colors, 0.5))
    draw = ImageDraw.Draw(page)
    for x, y, name, color in places:
        draw.rectangle((x, y, x + font.size, y + font.size), color, "black")
        draw.text((x + font.size + 6, y + font.size / 2), name, "black", font, "lm")
    return page


def _font(picture: Image.Image) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(max(12, max(picture.size) // 40))
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _ink(color: str) -> str:
    """Return black or white, whichever stands out more from a color."""
    red, green, blue = ImageColor.getrgb(color)[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "white"


def _line(corners: tuple[int, int, int, int], width: int, stroke: int, gap: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the strokes of a box as rectangles, inside its corners."""
    left, top, right, bottom = corners
    every, length = (stroke + gap) * width, stroke * width
    for x in range(left, right, every):
        end = min(x + length, right) - 1
        yield x, top, end, top + width - 1
        yield x, bottom - width, end, bottom - 1
    for y in range(top, bottom, every):
        end = min(y + length, bottom) - 1
        yield left, y, left + width - 1, end
        yield right - width, y, right - 1, end


def _place(
    picture: tuple[int, int],
    corners: tuple[int, int, int, int],
    size: tuple[float, float],
    taken: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """Return the place of a text as corners: beside its box, and not over another text, if there is room."""
    (left, top, right, bottom), (width, height) = corners, size
    slid = max(0.0, min(left, picture[0] - width))
    beside = [(slid, top - height - 1), (slid, bottom + 1), (right + 1, top), (left - width - 1, top)]
    places = [(x, y, x + width, y + height) for x, y in (*beside, (slid, max(0, top)))]
    inside = [each for each in places if min(each) >= 0 and each[2] <= picture[0] and each[3] <= picture[1]]
    free = [each for each in inside if not any(_overlap(each, other) for other in taken)]
    return next(iter((*free, *inside, places[-1])))


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
