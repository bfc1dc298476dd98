"""The settings of `data` for semantic segmentation."""

from typing import Annotated, ClassVar

from pydantic import Field

from accel_train.recipe.data import ImageData
from accel_train.recipe.tasks import TARS, TaskSpec
from accel_train.recipe.values import PositiveInt

Byte = Annotated[int, Field(ge=0, le=255)]
"""Value of a pixel."""


class SemanticSegmentationData(ImageData):
    """Settings of `data` for semantic segmentation."""

    label_setting: ClassVar[str | None] = "mask_column"
    mask_column: str | None = "mask"
    """Column with the mask. null: images to predict, without masks."""
    reduce_labels: bool = False
    """Whether 0 in a mask means "no class" and is not counted. Class 0 is then stored as 1
    (ADE20K).
    """
    mask_values: tuple[Byte, ...] | None = Field(default=None, examples=[[0, 128, 255]])
    """Values in the masks, in the order of the classes ([0, 255] for black and white). Other
    values are not counted.
    """
    crop_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[512])
    """Side of the training crops in pixels, or [height, width]. Default: image_size."""
    ignore_index: Byte = 255
    """Value of mask pixels that are not counted."""


SPEC = TaskSpec(
    where="accel_train.tasks.semantic_segmentation.task:SemanticSegmentation",
    data=SemanticSegmentationData,
    uses=frozenset(
        (
            "loss.label_smoothing",
            "loss.class_weights",
            "evaluate.num_examples",
            "evaluate.test_time_augmentation",
            "evaluate.window_stride",
            "data.augment.scale_range",
        )
    ),
    targets="pixels",
    gives="mask",
    learns="name the class of each pixel of an image",
    takes=f"images and masks: folders, lists, tables, arrays, {TARS}",
    finetune=True,
    auto="AutoModelForSemanticSegmentation",
    pipeline="image-segmentation",
    metrics=("mean_iou", "pixel_accuracy"),
)
