"""The settings of images as the first format of fingerprints hashed them, so that its checkpoints can be resumed."""

from typing import Any

FIELDS = {
    "Preprocessing": ("image_size", "mean", "std", "crop_fraction", "resample"),
    "Augment": (
        *("random_resized_crop", "horizontal_flip", "vertical_flip", "color_jitter", "rand_augment_ops"),
        *("rand_augment_magnitude", "mixup_alpha", "cutmix_alpha", "scale_range"),
    ),
    "SegmentSettings": ("preprocessing", "crop_size", "num_classes", "ignore_index", "augment"),
    "DetectionSettings": ("preprocessing", "augment", "min_visible"),
}
"""Fields of each class at that time, in their order. Later fields are not added."""


def first_repr(settings: Any) -> str:
    """Return the `repr` of settings at that time."""
    kind = type(settings).__name__
    if kind not in FIELDS:
        return repr(settings)
    return f"{kind}({', '.join(f'{name}={first_repr(getattr(settings, name))}' for name in FIELDS[kind])})"
