"""Augmentation: each operation against values worked out by hand, and each draw against its distribution."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.data.images import augment
from accel_train.data.images.augment import (
    OPERATIONS,
    augment_image,
    color_jitter,
    cutmix,
    draw_mix,
    mixup,
    rand_augment,
    random_crop_box,
)
from accel_train.data.images.images import ArrayImages
from accel_train.data.images.labelled import ImageRows
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.recipe.data import Augment
from accel_train.tasks.image_classification.data import ClassificationImages, ImageSample, draw_sample
from tests.support.runs import settings_refused

NOTHING = Augment(random_resized_crop=None, horizontal_flip=0.0)
EVERYTHING = Augment(
    random_resized_crop=(0.3, 1.0),
    vertical_flip=0.5,
    color_jitter=0.4,
    rand_augment_ops=2,
    mixup_alpha=0.4,
    cutmix_alpha=1.0,
)


def seeded(seed: Any = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def grey(*rows: list[int]) -> Image.Image:
    return Image.fromarray(np.array(rows, dtype=np.uint8))


def pixels(image: Image.Image) -> list[list[int]]:
    return np.asarray(image).tolist()


def noise(size: int = 16, seed: int = 0) -> Image.Image:
    return Image.fromarray(seeded(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def some_images(count: int = 40) -> ClassificationImages:
    array = seeded(3).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8)
    labelled = ImageRows(ArrayImages(array, "noise.npz"), np.arange(count), None, np.arange(count) % 5)
    return ClassificationImages(labelled, Preprocessing(16))


def test_a_crop_has_a_uniform_share_of_the_area_and_a_log_uniform_aspect() -> None:
    generator = seeded()
    boxes = np.array([random_crop_box(100, 100, (0.2, 0.5), generator) for _ in range(4000)])
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0
    assert boxes.max() <= 100
    share = wide * high / 1e4
    # 0.05 and 0.95 quantiles and the mean of a uniform distribution, within four standard errors.
    assert share.min() >= 0.2 - 1e-9
    assert share.max() <= 0.5 + 1e-9
    assert share.mean() == pytest.approx(0.35, abs=4 * 0.0866 / 4000**0.5)
    aspect = np.log(wide / high) / np.log(4 / 3)
    assert abs(aspect).max() <= 1 + 1e-9
    assert np.quantile(aspect, [0.25, 0.5, 0.75]) == pytest.approx([-0.5, 0, 0.5], abs=0.06)
    room = boxes[:, 0] / (100 - wide)
    assert np.quantile(room, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.03)


def test_a_crop_that_never_fits_is_the_centre_with_the_nearest_aspect() -> None:
    assert random_crop_box(90, 30, (0.9, 1.0), seeded()) == pytest.approx((25, 0, 65, 30))
    assert random_crop_box(30, 90, (0.9, 1.0), seeded()) == pytest.approx((0, 25, 30, 65))


def test_without_augmentation_a_square_of_the_right_size_is_left_as_it_is() -> None:
    image = noise(16)
    for seed in range(20):
        assert augment_image(image, NOTHING, Preprocessing(16), seeded(seed)) is image


@pytest.mark.parametrize(
    "field, expected", [("horizontal_flip", [[2, 1], [4, 3]]), ("vertical_flip", [[3, 4], [1, 2]])]
)
def test_a_flip_mirrors_the_image_as_often_as_its_probability_says(field: str, expected: list[list[int]]) -> None:
    image, plain = grey([1, 2], [3, 4]), [[1, 2], [3, 4]]
    preprocessing = Preprocessing(2, mean=(0.0,), std=(1.0,))
    always, sometimes = (NOTHING.model_copy(update={field: chance}) for chance in (1.0, 0.25))
    assert pixels(augment_image(image, always, preprocessing, seeded())) == expected
    generator = seeded()
    drawn = [pixels(augment_image(image, sometimes, preprocessing, generator)) for _ in range(2000)]
    assert all(one in (plain, expected) for one in drawn)
    assert drawn.count(expected) / 2000 == pytest.approx(0.25, abs=0.04)


def test_color_jitter_scales_brightness_contrast_and_saturation_within_its_range() -> None:
    image = Image.new("RGB", (1, 1), (100, 100, 100))  # of one grey: contrast and saturation leave it alone
    generator = seeded()
    values = [color_jitter(image, 0.4, generator).getpixel((0, 0))[0] for _ in range(2000)]
    assert 60 <= min(values) < 63
    assert 137 < max(values) <= 140
    assert np.mean(values) == pytest.approx(100, abs=2)
    red = Image.new("RGB", (1, 1), (200, 0, 0))
    saturations = {color_jitter(red, 0.9, seeded(seed)).getpixel((0, 0))[1] > 0 for seed in range(30)}
    assert saturations == {True, False}
    assert color_jitter(image, 0.0, generator) is image


def test_color_jitter_beyond_one_never_inverts() -> None:
    image = Image.new("RGB", (1, 1), (100, 100, 100))
    values = [color_jitter(image, 3.0, seeded(seed)).getpixel((0, 0))[0] for seed in range(300)]
    assert min(values) < 15  # a factor near 0, and never below it
    assert max(values) == 255


ROW = [0, 64, 128, 200]
IMAGE = [ROW, ROW, ROW, ROW]


@pytest.mark.parametrize(
    "name, share, sign, expected",
    [
        ("posterize", 1.0, 1, [[0, 64, 128, 192]] * 4),  # 4 bits are left: 200 = 0b11001000
        ("posterize", 0.25, -1, [[0, 64, 128, 200]] * 4),  # 7 bits
        ("solarize", 1.0, 1, [[255, 191, 127, 55]] * 4),  # everything is inverted
        ("solarize", 0.5, 1, [[0, 64, 127, 55]] * 4),  # 128 and above
        ("brightness", 1.0, -1, [[0, 6, 12, 20]] * 4),  # x 0.1
        ("brightness", 0.5, 1, [[0, 92, 185, 255]] * 4),  # x 1.45
        ("contrast", 1.0, -1, [[88, 94, 101, 108]] * 4),  # 98 + 0.1 (p - 98), the mean is 98
        ("auto_contrast", 0.3, 1, [[0, 81, 163, 255]] * 4),  # 255 / 200
        ("identity", 1.0, 1, IMAGE),
    ],
)
def test_an_operation_on_values_is_what_the_paper_says(
    name: str, share: float, sign: int, expected: list[list[int]]
) -> None:
    found = np.array(pixels(OPERATIONS[name](grey(*IMAGE), share, sign)))
    assert abs(found - np.array(expected)).max() <= 1  # Pillow rounds down, the mean too


def test_a_shift_is_the_papers_share_of_the_image_and_lays_grey_bare() -> None:
    image = grey(*[[10 * x + y for x in range(20)] for y in range(20)])
    values = np.asarray(image)
    distance = int(0.5 * 150 / 331 * 20)  # 4 pixels
    moved = np.asarray(OPERATIONS["translate_x"](image, 0.5, 1))
    assert (moved[:, :-distance] == values[:, distance:]).all()
    assert (moved[:, -distance:] == 128).all()
    moved = np.asarray(OPERATIONS["translate_y"](image, 0.5, -1))
    assert (moved[distance:] == values[:-distance]).all()
    assert (moved[:distance] == 128).all()


def test_a_shear_moves_each_row_by_its_share_of_the_height() -> None:
    step = np.zeros((11, 40), dtype=np.uint8)
    step[:, 20:] = 200
    sheared = np.asarray(OPERATIONS["shear_x"](Image.fromarray(step), 1.0, 1)).astype(float)
    edges = 40 - (sheared[:, :30] == 0).sum(1)
    # Row y comes from x + 0.3 y: the edge at 20 moves left by 0.3 pixels a row.
    assert edges[0] - edges[10] == pytest.approx(-3, abs=1)
    turned = np.asarray(OPERATIONS["shear_y"](Image.fromarray(step.T.copy()), 1.0, 1))
    assert (turned == sheared.T).all()


def test_turning_left_is_turning_a_mirror_image_right() -> None:
    image = noise(17)
    mirror = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    left = OPERATIONS["rotate"](image, 1.0, 1)
    right = OPERATIONS["rotate"](mirror, 1.0, -1).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert abs(np.asarray(left).astype(int) - np.asarray(right)).max() <= 1
    spot = np.full((17, 17), 128, np.uint8)
    spot[8, 14] = 255
    turned = np.asarray(OPERATIONS["rotate"](Image.fromarray(spot), 1.0, 1)).astype(float) - 128
    y, x = (float((turned * axis).sum() / turned.sum()) for axis in np.mgrid[:17, :17])
    # Counter-clockwise around the centre: 6 pixels to the right become 6 (cos 30, -sin 30).
    assert (x, y) == pytest.approx((8 + 6 * 0.866, 8 - 6 * 0.5), abs=0.3)


def test_there_are_fourteen_operations_and_magnitude_0_leaves_the_twelve_that_have_one_alone() -> None:
    image = noise()
    assert len(OPERATIONS) == 14
    changed = {name for name, operation in OPERATIONS.items() if pixels(operation(image, 0.0, 1)) != pixels(image)}
    assert changed <= {"auto_contrast", "equalize"}
    full = {name for name, operation in OPERATIONS.items() if pixels(operation(image, 1.0, 1)) != pixels(image)}
    assert full >= set(OPERATIONS) - {"identity", "auto_contrast"}


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_operation_keeps_size_and_colours(mode: str) -> None:
    image = noise().convert(mode)
    for operation in OPERATIONS.values():
        result = operation(image, 0.7, -1)
        assert (result.size, result.mode) == (image.size, mode)


def test_rand_augment_draws_each_operation_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[str] = Counter()
    signs: Counter[float] = Counter()

    def record(name: str, image: Image.Image, share: float, sign: float) -> Image.Image:
        assert share == 0.5
        drawn[name] += 1
        signs[sign] += 1
        return image

    for name in list(OPERATIONS):
        monkeypatch.setitem(OPERATIONS, name, partial(record, name))
    generator = seeded()
    for _ in range(1400):
        rand_augment(noise(2), 2, 15.0, generator)
    assert set(drawn) == set(augment.OPERATION_NAMES)
    assert all(150 < count < 250 for count in drawn.values())  # 200 expected, 3.6 standard deviations
    assert set(signs) == {1.0, -1.0}
    assert abs(signs[1.0] - 1400) < 110


def test_mixup_is_the_weighted_mean_rounded() -> None:
    first, second = np.full((2, 2, 3), 200, np.uint8), np.full((2, 2, 3), 99, np.uint8)
    assert (mixup(first, second, 0.25) == 124).all()  # 50 + 74.25
    assert (mixup(first, second, 1.0) == 200).all()


def test_cutmix_keeps_exactly_the_share_of_pixels_it_returns() -> None:
    first, second = np.zeros((12, 20), np.uint8), np.full((12, 20), 255, np.uint8)
    generator = seeded()
    for wanted in (0.0, 0.1, 0.5, 0.9, 1.0) * 20:
        mixed, share = cutmix(first, second, wanted, generator)
        assert (mixed == 0).mean() == pytest.approx(share)
        assert share >= wanted - 1e-9  # the box may be cut off, never grow
        rows, columns = np.nonzero(mixed)
        if len(rows):  # what came from the partner is one box
            assert (mixed[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] == 255).all()
    assert not first.any()  # the image itself is left alone


def test_each_image_draws_mixup_or_cutmix_and_a_uniform_partner() -> None:
    generator = seeded()
    assert draw_mix(NOTHING, 10, generator) is None
    settings = NOTHING.model_copy(update={"mixup_alpha": 1.0, "cutmix_alpha": 1.0})
    draws = [mix for _ in range(4000) if (mix := draw_mix(settings, 10, generator)) is not None]
    assert len(draws) == 4000
    assert sum(mix.kind == "mixup" for mix in draws) / 4000 == pytest.approx(0.5, abs=0.03)
    assert min(Counter(mix.partner for mix in draws).values()) > 320
    assert np.quantile([mix.share for mix in draws], [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.03)
    only = NOTHING.model_copy(update={"cutmix_alpha": 0.2})
    shares = np.array(
        [mix.share for _ in range(2000) if (mix := draw_mix(only, 10, generator)) and mix.kind == "cutmix"]
    )
    assert len(shares) == 2000
    assert shares.var() == pytest.approx(0.25 / 1.4, rel=0.1)  # of Beta(a, a): 1 / (4 (2 a + 1))


def test_a_draw_is_the_same_bits_for_the_same_generator_and_leaves_global_generators_alone() -> None:
    images = some_images()
    before = np.random.get_state()[1].tolist()
    draws: list[list[ImageSample]] = [
        [draw_sample(images, EVERYTHING, index, seeded((7, epoch, index))) for index in range(40)]
        for epoch in (0, 0, 1)
    ]
    assert np.random.get_state()[1].tolist() == before
    for first, again in zip(draws[0], draws[1]):
        assert first.image.tobytes() == again.image.tobytes()
        assert first[1:] == again[1:]
    assert all(first.image.tobytes() != other.image.tobytes() for first, other in zip(draws[0], draws[2]))
    assert {sample.image.dtype for sample in draws[0]} == {np.dtype(np.uint8)}
    assert {sample.image.shape for sample in draws[0]} == {(16, 16, 3)}


def test_a_mixed_sample_has_the_label_of_its_partner_and_the_share_that_is_left() -> None:
    images = some_images()
    labels = images.labelled.labels
    settings = NOTHING.model_copy(update={"mixup_alpha": 0.4})
    for index in range(40):
        generator = seeded((0, 0, index))
        sample = draw_sample(images, settings, index, generator)
        # The draws in their order: flips, then kind, partner and share.
        again = seeded((0, 0, index))
        again.random(2)
        mix = draw_mix(settings, 40, again)
        assert (sample.label, sample.partner_label, sample.share) == (labels[index], labels[mix.partner], mix.share)
        expected = mix.share * images[index].image.astype(float) + (1 - mix.share) * images[mix.partner].image
        assert abs(sample.image - expected).max() <= 0.5 + 1e-4


def test_evaluation_images_are_not_touched_by_augmentation() -> None:
    images = some_images()
    plain = [images[index].image.tobytes() for index in range(len(images))]
    for index in range(len(images)):
        draw_sample(images, EVERYTHING, index, seeded(index))
    assert [images[index].image.tobytes() for index in range(len(images))] == plain
    assert {sample.share for sample in (images[0], images[1])} == {1.0}


@pytest.mark.parametrize(
    "field, bounds",
    [("random_resized_crop", (0.8, 0.2)), ("random_resized_crop", (0.0, 1.0)), ("scale_range", (2.0, 1.0))],
)
def test_a_range_that_ends_before_it_begins_is_refused(field: str, bounds: tuple[float, float]) -> None:
    assert settings_refused(lambda: Augment.model_validate({field: bounds})) == (f"data.augment.{field}",)
