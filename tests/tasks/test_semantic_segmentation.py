"""Segmentation: images and masks that go together, labels at their own size, counts of pixels, and faults that name
both files.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.random import default_rng
from PIL import Image
from torch.nn.functional import conv2d, cross_entropy, interpolate, pad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

from accel_train.core.errors import DataError
from accel_train.core.json_io import load_json
from accel_train.data.builtin.digit_scenes import LABEL_NAMES, digit_scenes, digits
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.metrics.scores import segmentation_scores
from accel_train.recipe.data import Augment
from accel_train.recipe.loader import Recipe
from accel_train.tasks.common.classification import classification_loss_sum
from accel_train.tasks.common.image_views import Windows, at_label_size, mean_pixel_probabilities, window_logits
from accel_train.tasks.semantic_segmentation.config import SemanticSegmentationData
from accel_train.tasks.semantic_segmentation.data import (
    SegmentSettings,
    augment_pair,
    count_pixels,
    read_mask,
    read_masked_images,
    read_pair,
)
from tests.support.runs import metrics, recipe_dict, refused, run, run_forked_command, write_recipe_file
from tests.support.text_tasks import SEGFORMER, batch_of, load

UPERNET, MOBILENET, DPT = yaml.safe_load("""
- model_type: upernet
  hidden_size: 8
  pool_scales: [1, 2]
  auxiliary_channels: 8
  auxiliary_in_channels: 8
  auxiliary_in_index: 0
  backbone_config: {model_type: resnet, embedding_size: 8, hidden_sizes: [8, 8], depths: [1, 1], layer_type: basic,
    out_features: [stage1, stage2]}
- {model_type: mobilenet_v2, depth_multiplier: 0.1, min_depth: 8, finegrained_output: false}
- model_type: dpt
  hidden_size: 16
  intermediate_size: 16
  num_hidden_layers: 4
  num_attention_heads: 2
  patch_size: 8
  backbone_out_indices: [0, 1, 2, 3]
  neck_hidden_sizes: [8, 8, 8, 8]
  fusion_hidden_size: 8
""")
"""DPT takes squares alone."""
AS_IT_IS = Augment(scale_range=None, horizontal_flip=0.0)
Make = Callable[..., Recipe]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Twelve pictures of three sizes; a mask is the picture's red channel by thirds, its rim ignored."""
    generator = default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / "set" / kind).mkdir(parents=True)
    for number in range(12):
        height, width = ((24, 40), (33, 33), (48, 20))[number % 3]
        pixels = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        mask = np.asarray(image)[..., 0] // 86
        mask[:2] = 255
        image.save(tmp_path / "set" / "images" / f"{number}.bmp")
        Image.fromarray(mask).save(tmp_path / "set" / "masks" / f"{number}.png")
    return tmp_path / "set"


@pytest.fixture
def seg_recipe(tmp_path: Path) -> Make:
    def make(train: Any, *, model: Any = SEGFORMER, **sections: Any) -> Recipe:
        data = {"train": str(train), "image_size": 32, "eval_fraction": 0.3} | sections.pop("data", {})
        recipe = recipe_dict(tmp_path, task="semantic-segmentation", **sections)
        return Recipe.model_validate(recipe | {"data": data, "model": {"config": model}})

    return make


def test_scenes_are_always_the_same_and_training_shows_no_digit_of_evaluation() -> None:
    (first, masks, _), (again, *_) = digit_scenes(held_out=False), digit_scenes(held_out=False)
    held_out, held_out_masks, _ = digit_scenes(held_out=True)
    assert np.array_equal(first.array, again.array)
    assert (len(first), len(held_out)) == (600, 150)
    for found in (masks, held_out_masks):
        assert found.array.shape[1:] == (64, 64)
        assert np.bincount(found.array.reshape(-1)).nonzero()[0].tolist() == list(range(len(LABEL_NAMES)))
    assert len(np.unique(first.array.reshape(600, -1), axis=0)) == 600
    shapes, _ = digits()
    every_fifth = {shape.tobytes() for shape in shapes.array[::5]}
    others = {shape.tobytes() for index, shape in enumerate(shapes.array) if index % 5}
    assert not every_fifth & others, "the set holds no digit twice, so sides that differ by number differ in looks"


@pytest.mark.parametrize("crop", [48, (40, 56)])
@pytest.mark.parametrize(
    "settings", [AS_IT_IS, Augment(horizontal_flip=1.0, vertical_flip=1.0), Augment(scale_range=(0.3, 2.0))]
)
def test_image_and_mask_go_through_the_same(settings: Augment, crop: int | tuple[int, int]) -> None:
    mask = default_rng(1).integers(0, 6, (7, 9), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    image = Image.fromarray((mask * 40)[..., None].repeat(3, 2))
    preprocessing = Preprocessing(64, resample=Image.Resampling.NEAREST)
    all_settings = SegmentSettings(preprocessing, crop, 6, 255, settings)
    for seed in range(20):
        pixels, labels = augment_pair(image, mask, all_settings, default_rng(seed))
        assert pixels.shape == (*(crop if isinstance(crop, tuple) else (crop, crop)), 3)
        inside = labels != 255
        assert inside.any()
        assert (pixels[..., 0][inside] == labels[inside] * 40).all()
        assert (pixels[~inside] == np.round(255 * np.array(preprocessing.mean))).all(), (
            "beyond the image is mean colour"
        )
        again = augment_pair(image, mask, all_settings, default_rng(seed))
        assert np.array_equal(pixels, again[0])


def test_colours_change_the_image_and_not_the_mask() -> None:
    mask = default_rng(1).integers(0, 6, (32, 32), dtype=np.uint8)
    image = Image.fromarray(default_rng(2).integers(0, 255, (32, 32, 3), dtype=np.uint8))
    settings = Augment(scale_range=None, horizontal_flip=0.0, color_jitter=0.5)
    all_settings = SegmentSettings(Preprocessing(32), 32, 6, 255, settings)
    pixels, labels = augment_pair(image, mask, all_settings, default_rng(0))
    assert np.array_equal(labels, mask)
    assert not np.array_equal(pixels, np.asarray(image))


def test_logits_reach_labels_of_several_sizes_as_if_each_image_were_alone() -> None:
    torch.manual_seed(0)
    logits, sizes = torch.randn(3, 5, 8, 8), [(24, 40), (33, 33), (4, 5)]
    batch = {
        "labels": torch.zeros(3, 33, 40, dtype=torch.uint8),
        "label_sizes": torch.tensor(sizes, dtype=torch.float32),
    }
    found = at_label_size(logits, batch)
    assert found.shape == (3, 5, 33, 40)
    for index, (height, width) in enumerate(sizes):
        alone = interpolate(logits[index : index + 1], (height, width), mode="bilinear", align_corners=False)[0]
        assert_close(found[index, :, :height, :width], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, (1.0, 0.0, 2.5)])
def test_pixels_count_as_samples_do_also_with_deterministic_algorithms(
    smoothing: float, weights: tuple[float, ...] | None
) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 5, 7), torch.randint(0, 3, (2, 5, 7))
    labels[0, :2] = 255
    options = {"ignore_index": 255, "label_smoothing": smoothing}
    options["class_weights"] = None if weights is None else torch.tensor(weights)
    expected = classification_loss_sum(logits.movedim(1, -1).flatten(0, 2), labels.flatten(), **options)
    assert_close(classification_loss_sum(logits, labels, **options), expected)
    torch.use_deterministic_algorithms(True)
    try:
        assert_close(classification_loss_sum(logits, labels, **options), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("model", [SEGFORMER, UPERNET, MOBILENET], ids=lambda model: model["model_type"])
def test_evaluation_counts_each_pixel_once_at_the_masks_own_size(pairs: Path, seg_recipe: Make, model: Any) -> None:
    recipe = seg_recipe(pairs, model=model)
    task, data, network = load(recipe)
    batch, num_targets = batch_of(data)
    assert len({sample.mask.shape for sample in (data.eval[i] for i in range(len(data.eval)))}) > 1
    with torch.no_grad():
        counts = task.evaluate_batch(network, batch)
        masks = task.predict_batch(network, batch)
        confusion, loss = np.zeros((3, 3), np.int64), 0.0
        for index in range(len(data.eval)):
            sample = data.eval[index]
            logits = network(data.collate([sample])["pixel_values"]).logits
            full = interpolate(logits, sample.mask.shape, mode="bilinear", align_corners=False)
            truth, predicted = sample.mask, full.argmax(1)[0].numpy()
            np.add.at(confusion, (truth[truth != 255], predicted[truth != 255]), 1)
            loss += float(cross_entropy(full, torch.from_numpy(truth).long()[None], ignore_index=255, reduction="sum"))
            height, width = truth.shape
            assert (int(masks["height"][index]), int(masks["width"][index])) == (height, width)
            assert (masks["mask"][index, :height, :width].numpy() == predicted).mean() > 0.999
            assert (masks["mask"][index].numpy() != 255).sum() == height * width
    assert np.abs(counts["confusion"].numpy() - confusion).sum() <= 4, "but for ties that rounding decides"
    assert counts["confusion"].sum() == num_targets == confusion.sum()
    assert counts["loss_sum"].item() == pytest.approx(loss, rel=1e-4)
    scores = task.score(0.0, {"confusion": confusion}, data)
    ious = [confusion[c, c] / (confusion[c].sum() + confusion[:, c].sum() - confusion[c, c]) for c in range(3)]
    assert scores.metrics["mean_iou"] == pytest.approx(np.mean(ious))
    assert scores.details["segmentation"]["iou"] == pytest.approx(ious)


def test_every_parameter_of_a_model_with_an_auxiliary_head_is_trained(pairs: Path, seg_recipe: Make) -> None:
    recipe = seg_recipe(pairs, model=UPERNET)
    task, data, model = load(recipe)
    assert any("auxiliary head" in note for note in data.facts.notes)
    batch = data.collate([data.draw(index, default_rng(index)) for index in range(4)])
    task.loss_sum(model.train(), batch).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_class_number_that_is_ignored_is_neither_learned_nor_counted(pairs: Path, seg_recipe: Make) -> None:
    for path in (pairs / "masks").iterdir():
        with Image.open(path) as mask:
            values = np.asarray(mask).copy()
        values[values == 255] = 0
        Image.fromarray(values).save(path)
    recipe = seg_recipe(pairs, data={"ignore_index": 0, "label_names": ["none", "a", "b"]})
    task, data, model = load(recipe)
    batch, num_targets = batch_of(data)
    with torch.no_grad():
        counts = task.evaluate_batch(model, batch)
    truth = [data.eval[index].mask for index in range(len(data.eval))]
    assert num_targets == sum((mask != 0).sum() for mask in truth)
    assert counts["confusion"][0].sum() == 0
    assert counts["confusion"].sum() == num_targets


def test_averaging_over_flips_is_the_mean_of_turned_back_probabilities(pairs: Path, seg_recipe: Make) -> None:
    recipe = seg_recipe(pairs, evaluate={"test_time_augmentation": {"horizontal_flip": True, "scales": [1.0, 2.0]}})
    task, data, model = load(recipe)
    batch, _ = batch_of(data)
    pixels = batch["pixel_values"]
    with torch.no_grad():
        expected = []
        for size in (32, 64):
            view = interpolate(pixels, (size, size), mode="bilinear", align_corners=False) if size != 32 else pixels
            expected.append(at_label_size(model(view).logits, batch).softmax(1))
            expected.append(at_label_size(model(view.flip(-1)).logits.flip(-1), batch).softmax(1))
        assert task.test_time is not None
        views = task.views(model, pixels, model(pixels).logits)
        found = mean_pixel_probabilities(views, batch)
        counts = task.evaluate_batch(model, batch)
    assert_close(found, torch.stack(expected).mean(0))
    details = task.score(0.0, {name: value.numpy() for name, value in counts.items()}, data).details
    assert set(details["test_time_augmentation"]["with"]) == {"mean_iou", "pixel_accuracy"}


def test_overlapping_windows_are_averaged_as_by_mmsegmentation() -> None:
    """Its `slide_inference`, written out; the forward depends on the rim, so each window answers in its own way."""
    generator = torch.Generator().manual_seed(0)
    images, weight = torch.randn(2, 3, 45, 64, generator=generator), torch.randn(5, 3, 7, 7, generator=generator)
    (high, wide), (down, right) = windows = Windows((32, 24), (21, 16))

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        return conv2d(pixels, weight, padding=3)

    total, count = torch.zeros(2, 5, 45, 64), torch.zeros(1, 1, 45, 64)
    for row in range(max(45 - high + down - 1, 0) // down + 1):
        for column in range(max(64 - wide + right - 1, 0) // right + 1):
            bottom, end = min(row * down + high, 45), min(column * right + wide, 64)
            top, left = max(bottom - high, 0), max(end - wide, 0)
            total += pad(forward(images[:, :, top:bottom, left:end]), (left, 64 - end, top, 45 - bottom))
            count[:, :, top:bottom, left:end] += 1
    assert_close(window_logits(forward, images, windows), total / count)
    small = images[..., :32, :24]
    assert torch.equal(window_logits(forward, small, windows), forward(small))


def test_windows_let_a_model_of_one_size_evaluate_and_predict_larger_images(pairs: Path, seg_recipe: Make) -> None:
    data = {"image_size": [48, 64], "crop_size": 32}
    whole = seg_recipe(pairs, model=DPT, data=data)
    refused(load, whole, named="'dpt'")
    recipe = seg_recipe(pairs, model=DPT, data=data, evaluate={"window_stride": 16, "test_time_augmentation": {}})
    task, found, model = load(recipe)
    batch, num_targets = batch_of(found)
    with torch.no_grad():
        counts, logits = task.evaluate_batch(model, batch), task.whole_logits(model, batch["pixel_values"])
        mask = task.predict_batch(model, batch)["mask"]
    assert logits.shape[-2:] == (96, 128)  # twice the images' size, as DPT gives
    assert int(counts["confusion"].sum()) == int(counts["confusion_averaged"].sum()) == num_targets
    assert mask.shape == batch["labels"].shape
    task.save_description(model, found, pairs)
    assert AutoImageProcessor.from_pretrained(pairs).size == {"height": 32, "width": 32}  # what transformers can pass


@pytest.mark.parametrize(("stride", "crop"), [(40, 32), (16, None)])
def test_windows_that_leave_gaps_or_are_as_large_as_the_image_are_refused(
    pairs: Path, seg_recipe: Make, stride: int, crop: int | None
) -> None:
    recipe = seg_recipe(pairs, data={"image_size": 64, "crop_size": crop}, evaluate={"window_stride": stride})
    refused(load, recipe, named=f"evaluate.window_stride={stride}|data.crop_size")


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.bytes = max([self.bytes, *(each.nbytes for each in made)])
        return result


@pytest.mark.parametrize("augmented", [False, True])
def test_evaluation_and_prediction_hold_one_images_logits_at_full_resolution(
    pairs: Path, seg_recipe: Make, augmented: bool
) -> None:
    scales = {"test_time_augmentation": {"horizontal_flip": True}} if augmented else {}
    recipe = seg_recipe(pairs, evaluate=scales)
    task, _, model = load(recipe)
    labels = torch.randint(0, 3, (8, 200, 300), dtype=torch.uint8)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": labels}
    of_one_image = 3 * 200 * 300 * 4
    with torch.no_grad(), LargestTensor() as largest:
        counts, found = task.evaluate_batch(model, batch), task.predict_batch(model, batch)
    assert int(counts["confusion"].sum()) == labels.numel()
    assert found["mask"].shape == labels.shape
    assert largest.bytes <= of_one_image


def test_baseline_calls_every_pixel_the_commonest_class(pairs: Path, seg_recipe: Make) -> None:
    task, data, _ = load(seg_recipe(pairs))
    sides = [data.source.sets.train, data.source.sets.eval]
    values = [np.concatenate([read_mask(side, index).reshape(-1) for index in range(len(side))]) for side in sides]
    train, held_out = (side[side != 255] for side in values)
    majority = np.bincount(train).argmax()
    confusion = np.zeros((3, 3))
    np.add.at(confusion, (held_out, np.full_like(held_out, majority)), 1)
    expected = segmentation_scores(confusion, ("0", "1", "2")).metrics
    assert task.baselines(data) == {
        "majority_mean_iou": pytest.approx(expected["mean_iou"]),
        "majority_pixel_accuracy": pytest.approx((held_out == majority).mean()),
    }


def test_balanced_weights_come_from_the_pixels_of_the_training_masks(pairs: Path, seg_recipe: Make) -> None:
    task, data, _ = load(seg_recipe(pairs, loss={"class_weights": "balanced"}))
    counts = count_pixels(data.source.sets.train)[:3]
    assert task.loss.class_weights is not None
    assert task.loss.class_weights.tolist() == pytest.approx((counts.sum() / (3 * counts)).tolist())


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_mask_is_read_by_its_numbers_and_never_by_its_colours(pairs: Path, mode: str) -> None:
    path = pairs / "masks" / "0.png"
    values = np.asarray(Image.open(path))
    mask = Image.fromarray(values.astype(np.uint16) if mode == "I;16" else values)
    if mode == "P":
        mask = Image.fromarray(values)
        mask.putpalette(default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    assert mask.mode == mode
    mask.save(path)
    sets = read_masked_images(SemanticSegmentationData(train=str(pairs), eval_fraction=0))
    assert np.array_equal(read_mask(sets.train, 0), values)
    assert sets.label_names == ("0", "1", "2")


def test_pairs_of_a_folder_a_table_and_an_array_are_the_same(pairs: Path, tmp_path: Path) -> None:
    (pairs / "table.csv").write_text(
        "image,mask,name\n" + "".join(f"images/{n}.bmp,masks/{n}.png,no {n}\n" for n in range(12))
    )
    square = [number for number in range(12) if number % 3 == 1]
    images, masks = (
        np.stack([np.asarray(Image.open(pairs / kind / f"{n}.{end}")) for n in square])
        for kind, end in (("images", "bmp"), ("masks", "png"))
    )
    np.savez(tmp_path / "arrays.npz", images=images, masks=masks)
    folder = read_masked_images(SemanticSegmentationData(train=str(pairs), eval_fraction=0)).train
    table = read_masked_images(
        SemanticSegmentationData(train=str(pairs / "table.csv"), eval=str(pairs / "table.csv"), id_column="name")
    )
    arrays = read_masked_images(SemanticSegmentationData(train=str(tmp_path / "arrays.npz"), eval_fraction=0)).train
    assert table.eval is not None
    assert table.eval.ids == [f"no {number}" for number in range(12)]
    order = sorted(range(12), key=lambda number: f"{number}.bmp")
    for position, number in enumerate(order):
        image, mask = read_pair(folder, position, Preprocessing(64), 3, 255)
        other_image, other_mask = read_pair(table.train, number, Preprocessing(64), 3, 255)
        assert np.array_equal(np.asarray(image), np.asarray(other_image))
        assert np.array_equal(mask, other_mask)
    assert np.array_equal(read_pair(arrays, 1, Preprocessing(64), 3, 255)[1], read_mask(table.train, square[1]))


def damage(pairs: Path, fault: str) -> None:
    image, mask = pairs / "images" / "5.bmp", pairs / "masks" / "5.png"
    if fault == "size":
        Image.fromarray(np.zeros((9, 8), np.uint8)).save(mask)
    elif fault == "value":
        values = np.asarray(Image.open(mask)).copy()
        values[7, 3] = 77
        Image.fromarray(values).save(mask)
    elif fault == "colour":
        Image.open(image).save(mask)
    elif fault == "no mask":
        mask.unlink()
    elif fault == "JPEG":
        Image.open(mask).save(mask.with_suffix(".jpg"))
        mask.unlink()
    elif fault == "broken mask":
        mask.write_bytes(mask.read_bytes()[:60])
    elif fault == "broken image":
        image.write_bytes(image.read_bytes()[:60])


FAULTS = {
    "size": "images/5.bmp|20 x 48|masks/5.png|8 x 9",
    "value": "masks/5.png|images/5.bmp|x=3, y=7|77|3 classes|data.ignore_index: 77",
    "JPEG": "masks/5.jpg|JPEG|PNG|images/5.bmp",
    "colour": "masks/5.png|mode RGB|images/5.bmp",
    "no mask": "images/5.bmp|no mask|masks/5.png",
    "broken mask": "masks/5.png|an image|images/5.bmp",
    "broken image": "images/5.bmp|an image|masks/5.png",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_image_and_mask_before_training(pairs: Path, seg_recipe: Make, fault: str) -> None:
    damage(pairs, fault)
    error = refused(load, seg_recipe(pairs, data={"label_names": ["a", "b", "c"]}), named=FAULTS[fault])
    assert isinstance(error, DataError) == (fault != "no mask")


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"data": {"mask_column": None}}, "data.mask_column: none"),
        ({"model": SEGFORMER | {"model_type": "gpt2"}}, "gpt2|semantic segmentation"),
    ],
)
def test_setting_that_makes_no_sense_for_masks_is_refused(
    pairs: Path, seg_recipe: Make, settings: Any, named: str
) -> None:
    refused(load, seg_recipe(pairs, **settings), named=named)


def test_images_without_masks_are_read_for_prediction(pairs: Path, seg_recipe: Make) -> None:
    for mask in (pairs / "masks").iterdir():
        mask.unlink()
    recipe = seg_recipe(pairs / "images", data={"mask_column": None, "label_names": ["a", "b", "c"]})
    task, data, model = load(recipe)
    batch, num_targets = batch_of(data)
    assert num_targets == 0
    with torch.no_grad():
        found = task.predict_batch(model, batch)
    sizes = []
    for index in range(len(found["mask"])):
        with Image.open(data.source.row_ids(index)) as image:
            sizes.append(image.size)
    assert sizes == list(zip(found["width"].tolist(), found["height"].tolist()))


def test_images_of_height_and_width_are_resized_to_both_by_us_and_by_transformers(
    pairs: Path, seg_recipe: Make, tmp_path: Path
) -> None:
    recipe = seg_recipe(pairs, data={"image_size": [32, 64]})
    task, data, model = load(recipe)
    batch, _ = batch_of(data)
    assert batch["pixel_values"].shape[-2:] == (32, 64)
    assert data.collate([data.train[0]])["labels"].shape[-2:] == (32, 64)
    assert task.loss_sum(model, data.collate([data.draw(0, default_rng(0))])).isfinite()
    assert (task.flops_per_target(recipe, model) or 0) > 0
    task.save_description(model, data, tmp_path)
    assert " 64 x 32 " in (tmp_path / "README.md").read_text()
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    theirs = processor(Image.open(data.source.row_ids(0)), return_tensors="pt")
    assert_close(theirs["pixel_values"][0], batch["pixel_values"][0], rtol=0, atol=1e-2)


@pytest.mark.slow
def test_windows_give_the_same_metrics_on_one_process_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--data.eval_fraction", "0.1", "--schedule.max_steps", "4", "--output_dir", "run"]
    flags += ["--data.image_size", "64", "--data.crop_size", "32", "--evaluate.window_stride", "[16, 32]"]
    found = []
    for processes, words in ((1, ["run", "segmentation", *flags]), (2, ["evaluate", "run"])):
        done = run_forked_command(words, processes)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(load_json(Path("run/evaluation.json")))
    assert found[1]["metrics"] == pytest.approx(found[0]["metrics"], rel=1e-6)
    averaged = [each["details"]["test_time_augmentation"]["with"] for each in found]
    assert averaged[1] == pytest.approx(averaged[0], rel=1e-6)


@pytest.mark.slow
def test_run_writes_a_model_that_transformers_loads_and_whose_masks_are_ours(tmp_path: Path) -> None:
    recipe = write_recipe_file(
        tmp_path,
        task="semantic-segmentation",
        model={"config": SEGFORMER},
        data={"train": "digit-scenes", "image_size": 64, "crop_size": 48, "num_workers": 0},
        schedule={"max_steps": 4},
        evaluate={"every_steps": 2, "max_samples": 10},
    )
    recipe.write_text(recipe.read_text().replace(f"train: {tmp_path / 'corpus.jsonl'}", "train: digit-scenes"))
    run(recipe)
    folder = tmp_path / "run" / "model"
    assert {"mean_iou", "pixel_accuracy", "loss"} <= set(metrics(tmp_path / "run", "eval")[-1])
    model = AutoModelForSemanticSegmentation.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert tuple(model.config.id2label.values()) == LABEL_NAMES
    task, data, _ = load(Recipe.from_yaml(str(recipe)))
    image = digit_scenes(held_out=True)[0][0]
    with torch.no_grad():
        theirs = processor(image, return_tensors="pt")
        outputs = model(**theirs)
        batch = data.collate([data.eval[0]])
        batch.pop("num_targets")
        ours = task.predict_batch(model, batch)["mask"][0]
    assert_close(theirs["pixel_values"], batch["pixel_values"], rtol=0, atol=1e-5)
    (mask,) = processor.post_process_semantic_segmentation(outputs, target_sizes=[(64, 64)])
    assert (mask == ours).float().mean() > 0.999
