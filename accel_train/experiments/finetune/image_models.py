"""Models for images and their training settings. Models from scratch come from the package's recipes."""

from accel_train.core.state import Choice
from accel_train.experiments.finetune.found import Found
from accel_train.experiments.finetune.training import (
    Choices,
    Pretrained,
    batch_for,
    epochs_for,
    learning_rate_of,
    metric_for,
    training_of,
)


def image_classifier(found: Found, pretrained: Pretrained | None) -> Choices:
    batch = batch_for(found)
    flip = Choice(0.0, "grey images may be characters, which a mirror changes") if found.is_grey else Choice(0.5, "")
    chosen: Choices = {"data.augment.horizontal_flip": flip, "loss.label_smoothing": Choice(0.1, "")}
    if pretrained is not None:
        size = Choice(
            pretrained.image_size or 224, "what the model was trained with" if pretrained.image_size else "usual"
        )
        training = training_of(
            found, learning_rate_of(pretrained), epochs_for(found, batch, 1_000, 3, 10), batch, metric_for(found)
        )
        return chosen | {"data.image_size": size, **training, "optimizer.weight_decay": Choice(0.05, "")}
    config = {
        "model_type": "resnet",
        "num_channels": 3,
        "embedding_size": 32,
        "hidden_sizes": [32, 64, 128, 256] if _from_scratch_size(found) > 64 else [32, 64, 128],
        "depths": [2, 2, 2, 2] if _from_scratch_size(found) > 64 else [1, 1, 1],
        "layer_type": "basic",
    }
    grey = "; all images are grey, and pipeline() reads them in colour" if found.is_grey else ""
    return {
        "model.config": Choice(config, f"no --model, so a small ResNet from scratch{grey}"),
        "data.image_size": Choice(
            _from_scratch_size(found), f"the median image has a short edge of {found.edge} pixels"
        ),
        "data.augment.random_resized_crop": Choice([0.7, 1.0] if found.is_grey else [0.35, 1.0], ""),
        **chosen,
        **training_of(
            found,
            Choice(3e-3, "as in the recipe image_classification"),
            epochs_for(found, batch, 600, 5, 40),
            batch,
            metric_for(found),
        ),
        "optimizer.weight_decay": Choice(0.05, ""),
        "optimizer.ema_decay": Choice(0.99, ""),
    }


def _from_scratch_size(found: Found) -> int:
    return next((size for size in (32, 64, 128) if found.edge <= size * 1.25), 128)


def _size_of_aspect(found: Found, edge: int) -> tuple[int | list[int], str]:
    """Return the image size for this short edge: a square, or (height, width) with the median image's aspect.

    The longer edge is a multiple of 32.
    """
    why = f"the median image has a short edge of {found.edge} pixels"
    longer = round(edge * min(2.0, max(found.aspect, 1 / found.aspect)) / 32) * 32
    if longer == edge:
        return edge, why
    shape = [edge, longer] if found.aspect > 1 else [longer, edge]
    return shape, f"height and width: {why}, and is {found.aspect:.2g} times as wide as high"


def _pretrained_sizes(found: Found, pretrained: Pretrained) -> Choices:
    """Return the image size of a pretrained segmenter. Larger images are seen in windows, to keep their details."""
    own = pretrained.image_size or 512
    why = "what the model was trained with" if pretrained.image_size else "usual"
    edge = min(2 * own, found.edge // 32 * 32)
    if edge <= 1.25 * own:
        return {"data.image_size": Choice(own, why)}
    shape, of_aspect = _size_of_aspect(found, edge)
    return {
        "data.image_size": Choice(shape, of_aspect),
        "data.crop_size": Choice(own, f"{why}; training sees crops"),
        "evaluate.window_stride": Choice(
            own * 2 // 3, "evaluation and prediction see windows of data.crop_size, which overlap by a third"
        ),
    }


def segmenter(found: Found, pretrained: Pretrained | None) -> Choices:
    batch = 8 if found.num_samples < 200 else 16
    metric = Choice("mean_iou", "each class counts alike, however few its pixels")
    if pretrained is not None:
        training = training_of(
            found, learning_rate_of(pretrained), epochs_for(found, batch, 1_500, 10, 60), batch, metric
        )
        return {**_pretrained_sizes(found, pretrained), **training, "optimizer.weight_decay": Choice(0.01, "")}
    shape, why = _size_of_aspect(found, _from_scratch_size(found))
    config = {
        "model_type": "upernet",
        "hidden_size": 32,
        "pool_scales": [1, 2],
        "use_auxiliary_head": False,
        "backbone_config": {
            "model_type": "resnet",
            "layer_type": "basic",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 96],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    }
    return {
        "model.config": Choice(config, "no --model, so a small UPerNet from scratch, as in the recipe segmentation"),
        "data.image_size": Choice(shape, why),
        **training_of(
            found, Choice(1e-2, "as in the recipe segmentation"), epochs_for(found, batch, 800, 5, 100), batch, metric
        ),
        "optimizer.weight_decay": Choice(0.01, ""),
    }
