"""The settings of `data` for object detection."""

from typing import ClassVar, Literal

from pydantic import Field

from accel_train.recipe.data import ImageData
from accel_train.recipe.tasks import TaskSpec
from accel_train.recipe.values import Fraction


class ObjectDetectionData(ImageData):
    """Settings of `data` for object detection."""

    label_setting: ClassVar[str | None] = "annotations"
    annotations: str | None = Field(default="auto", examples=["coco/annotations/instances_train2017.json"])
    """File or folder with the boxes of the images in `train`. auto: found at `train`: COCO, YOLO, Pascal VOC, or
    metadata.jsonl. null: images to predict, without boxes.
    """
    eval_annotations: str | None = Field(default=None, examples=["coco/annotations/instances_val2017.json"])
    """File or folder with the boxes of the images in `eval`. Default: found at `eval`."""
    objects_column: str = "objects"
    """Column of a table with the boxes: a mapping of `bbox` and `category` (or `categories`) to lists. A box is [left,
    top, width, height] in pixels.
    """
    invalid_boxes: Literal["refuse", "drop"] = "refuse"
    """Handling of boxes that lie outside their image or have no area. refuse: the run lists them and does not start.
    drop: they are left out, and the run prints their number.
    """
    min_visible: Fraction = 0.3
    """Least share of a box's area inside a training crop. Boxes with a smaller share are left out of the sample."""


SPEC = TaskSpec(
    where="accel_train.tasks.object_detection.task:ObjectDetection",
    data=ObjectDetectionData,
    uses=frozenset(("evaluate.num_examples",)),
    targets="images",
    gives="boxes",
    learns="find objects in an image by box and class",
    auto="AutoModelForObjectDetection",
    pipeline="object-detection",
    metrics=("map", "map_50", "map_75"),
    extra="detection",
    packages=("pycocotools",),
    loss_is_global=True,
)
