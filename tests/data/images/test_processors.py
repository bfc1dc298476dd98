"""Evaluation pixels of pretrained image models against the image processors of all families of transformers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import BitImageProcessorPil, SegformerConfig

from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from accel_train.data.images.first_format import first_repr
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.data.images.processors import model_preprocessing, pretrained_image_size
from accel_train.recipe.loader import make_recipe
from accel_train.recipe.schema import Model
from benchmarks import pixels
from benchmarks.pixels import Family
from tests.support.runs import refused

SHRINK = 7.0
"""Images of a seventh of the default size, for speed."""
CLASSES = list(
    {
        (family.task, family.processor): family for family in pixels.families() if pixels.class_of(family) is not None
    }.values()
)


def write(task: str, model_type: str, processor: str, **settings: Any) -> Family:
    """Write a model into the working directory. `settings` change those of its processor."""
    family = Family(task, model_type, processor)
    pixels.write_folder(Path(), family, {**pixels.settings_of(family, SHRINK), **settings})
    return family


def preprocessing(family: Family, **data: Any) -> Preprocessing:
    return pixels.preprocessing_of(Path(), family.task, **data)


def check(family: Family, change: dict[str, Any]) -> bool:
    """Return whether the pixels are equal to those of the changed processor, and written. If not: refused by name."""
    write(family.task, family.model_type, family.processor, **change)
    verdict = pixels.compare(Path(), family)
    assert verdict.is_right, (family, change, verdict)
    if verdict.difference is None:
        pixel_settings = set(change) - {"do_convert_annotations"}
        assert all(name in verdict.refusal for name in pixel_settings), (family, change, verdict.refusal)
    return verdict.difference is not None


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: f"{family.task}-{family.processor}")
def test_each_setting_of_a_processor_changes_our_pixels_alike_or_is_refused_by_name(family: Family) -> None:
    equal = [check(family, change) for change in ({}, *pixels.changes_of(family, all_forms=False))]
    assert len(equal) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSES, ids=lambda family: f"{family.task}-{family.processor}")
def test_each_form_of_a_setting_changes_our_pixels_alike_or_is_refused_by_name(family: Family) -> None:
    for change in pixels.changes_of(family):
        check(family, change)


def test_the_page_has_every_family_and_says_which_are_equal() -> None:
    table = pixels.PAGE.read_text().partition(pixels.MARKS[0])[2].partition(pixels.MARKS[1])[0]
    shown: dict[tuple[str, str], str] = {}
    for task, verdict, names in re.findall(r"^\| ([a-z-]+) \| (.*?) \| (.*) \|$", table, re.MULTILINE):
        shown |= {(task, name): verdict for name in re.findall("`([^`]+)`", names)}
    assert set(shown) == {(family.task, family.model_type) for family in pixels.families()}
    for family in CLASSES:
        if family.model_type != "donut-swin":  # rounding makes its seventh another shape
            is_equal = check(family, {})
            assert is_equal == (shown[family.task, family.model_type] == "equal"), family
    assert sum(verdict == "equal" for verdict in shown.values()) > 40


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: f"{family.task}-{family.processor}")
def test_the_written_processor_has_the_pixels_of_the_run(family: Family) -> None:
    write(family.task, family.model_type, family.processor)
    is_whole = family.task != "image-classification"
    for number, data in enumerate(({}, {"image_resize": "whole"}, {"image_mean": (0.2, 0.4, 0.7)})):
        try:
            found = preprocessing(family, image_size=24, **data)
        except SettingError:
            continue
        other = Path(str(number))
        pixels.write_folder(other, family, {})
        assert pixels.written(found, other, is_whole=is_whole) <= pixels.TOLERANCE, data
        assert found.mean == pytest.approx(data.get("image_mean", found.mean))
        # What is written is read as it was.
        again = pixels.preprocessing_of(other, family.task, image_size=24)
        for image in pixels.images():
            pair = [pixels.ours(each, image, is_whole=is_whole) for each in (found, again)]
            assert pixels.distance(*pair) <= pixels.TOLERANCE


def test_a_recipes_own_size_keeps_the_part_of_the_image_that_a_processor_shows() -> None:
    family = Family("image-classification", "resnet", "BitImageProcessorPil")
    size = {"size": {"shortest_edge": 64}, "crop_size": {"height": 48, "width": 48}}
    pixels.write_folder(Path(), family, json.loads(BitImageProcessorPil(**size).to_json_string()))
    found = preprocessing(family, image_size=24)
    assert found == Preprocessing(24, found.mean, found.std, 0.75, 3, on_white=True)


def test_a_mean_that_a_processor_does_not_read_is_refused() -> None:
    asked = {"image_mean": (0.1, 0.2, 0.3)}
    found = preprocessing(write("image-classification", "vit", "ViTImageProcessorPil"), **asked)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    family = write("image-classification", "mobilevit", "MobileViTImageProcessorPil")
    named = "data.image_mean|MobileViTImageProcessor|do_flip_channel_order"
    refused(preprocessing, family, **asked, named=named)


def test_a_damaged_file_is_refused_and_a_missing_file_is_told() -> None:
    family = write("image-classification", "vit", "ViTImageProcessorPil")
    Path("preprocessor_config.json").write_text("{")
    refused(preprocessing, family, named="model.pretrained=.|cannot be loaded")
    Path("preprocessor_config.json").unlink()
    assert preprocessing(family) == Preprocessing(32)


def test_a_processor_that_keeps_the_aspect_ends_a_run_with_2_before_a_model_is_built(
    capsys: pytest.CaptureFixture[str],
) -> None:
    family = Family("object-detection", "detr", "DetrImageProcessorPil")
    pixels.write_folder(Path(), family, pixels.settings_of(family))
    tree = {"task": family.task, "output_dir": "run", "schedule": {"max_steps": 1}}
    tree |= {"model": {"pretrained": "."}, "data": {"train": "digit-scenes", "image_size": 64}}
    Path("r.yaml").write_text(json.dumps(tree))
    assert main(["run", "r.yaml"]) == 2
    told = capsys.readouterr().err
    for words in ("DetrImageProcessor", "'longest_edge': 1333", "do_pad=True", "data.image_resize: whole"):
        assert words in told
    assert preprocessing(family, image_resize="whole") == Preprocessing(32)


def test_the_size_of_a_pretrained_model_is_that_of_its_pixels() -> None:
    for kind, size in (("BitImageProcessorPil", 224), ("DeiTImageProcessorPil", 224), ("DetrImageProcessorPil", 800)):
        family = Family("image-classification", "resnet", kind)
        pixels.write_folder(Path(), family, pixels.settings_of(family))
        assert pretrained_image_size(Model(pretrained="."), None) == size


def test_transparent_pixels_are_white_only_where_a_processor_converts_colors() -> None:
    image = Image.fromarray(np.array([[[0, 0, 0, 0]] * 4] * 4, np.uint8))
    for name, kind, color in (("clip", "CLIPImageProcessorPil", 255), ("vit", "ViTImageProcessorPil", 0)):
        decoded = preprocessing(write("image-classification", name, kind)).decoded(image, "image")
        assert decoded.getpixel((0, 0)) == (color,) * 3


def test_fingerprints_of_plain_preprocessing_stay() -> None:
    plain = Preprocessing(32, (0.5,), (0.25,), 1.0, 3)
    own = replace(plain, on_white=True, own=object(), own_pixels="a")
    text = "Preprocessing(image_size=32, mean=(0.5,), std=(0.25,), crop_fraction=1.0, resample=3)"
    assert first_repr(plain) == first_repr(own) == text
    assert own.changed_fields() == plain.changed_fields() | {"on_white": True, "own_pixels": "a"}
    assert plain.changed_fields() == {"image_size": 32, "mean": (0.5,), "std": (0.25,), "resample": 3}


def test_a_processor_that_reduces_labels_is_told_where_the_recipe_does_not() -> None:
    family = write("semantic-segmentation", "segformer", "SegformerImageProcessorPil", do_reduce_labels=True)
    for reduces in (False, True):
        data = {"train": "a", "image_size": 32, "reduce_labels": reduces}
        tree = {"task": family.task, "output_dir": "a", "data": data, "schedule": {"max_steps": 1}}
        recipe = make_recipe({**tree, "model": {"pretrained": "."}}, "here", arguments=[])
        notes = model_preprocessing(recipe, SegformerConfig(), is_whole=True)[1]
        assert ["do_reduce_labels" in note for note in notes] == ([] if reduces else [True])
