"""The settings of `data` for object detection."""

from typing import ClassVar, Literal

from pydantic import Field

from accel_train.recipe.data import BoxData
from accel_train.recipe.tasks import TARS, TaskSpec
from accel_train.recipe.values import Fraction


class ObjectDetectionData(BoxData):
    """Settings of `data` for object detection."""

    label_setting: ClassVar[str | None] = "annotations"
    annotations: str | None = Field(default="auto", examples=["coco/annotations/instances_train2017.json"])
    """File or folder with the boxes of the images in `train`. auto: found at `train`: COCO, YOLO, Pascal VOC,
    metadata.jsonl, or a table of boxes. null: images to predict, without boxes.
    """
    eval_annotations: str | None = Field(default=None, examples=["coco/annotations/instances_val2017.json"])
    """File or folder with the boxes of the images in `eval`. Default: found at `eval`."""
    invalid_boxes: Literal["refuse", "drop"] = "refuse"
    """Handling of boxes that lie outside their image or have no area. refuse: the run lists them and does not start.
    drop: they are left out, and the run prints their number.
    """
    min_visible: Fraction = 0.3
    """Least share of a box's area inside a training crop. Boxes with a smaller share are left out of the sample."""


SPEC = TaskSpec(
    where="accel_train.tasks.object_detection.task:ObjectDetection",
    data=ObjectDetectionData,
    uses=frozenset(("evaluate.num_examples", "data.augment.scale_range")),
    targets="images",
    gives="boxes",
    learns="find objects in an image, each with a box and a class",
    takes=f"images and boxes: COCO, YOLO, Pascal VOC, tables, {TARS}",
    finetune=True,
    auto="AutoModelForObjectDetection",
    pipeline="object-detection",
    metrics=("map", "map_50", "map_75"),
    extra="detection",
    packages=("pycocotools",),
    loss_is_global=True,
)
