"""The settings of `data` for image classification."""

from accel_train.core.metric_names import OF_CLASSES
from accel_train.recipe.data import ClassData, ImageData
from accel_train.recipe.tasks import TARS, TaskSpec


class ImageClassificationData(ImageData, ClassData):
    """Settings of `data` for image classification."""


SPEC = TaskSpec(
    where="accel_train.tasks.image_classification.task:ImageClassification",
    data=ImageClassificationData,
    uses=frozenset(
        (
            "loss.label_smoothing",
            "loss.class_weights",
            "evaluate.metrics",
            "evaluate.allow_hub_metrics",
            "evaluate.num_examples",
            "evaluate.test_time_augmentation",
            "data.augment.random_resized_crop",
            "data.augment.rand_augment_ops",
            "data.augment.rand_augment_magnitude",
            "data.augment.mixup_alpha",
            "data.augment.cutmix_alpha",
        )
    ),
    targets="images",
    gives="class",
    learns="name the class of an image",
    takes=f"folders of images by class, tables, arrays, {TARS}",
    finetune=True,
    auto="AutoModelForImageClassification",
    pipeline="image-classification",
    metrics=(*OF_CLASSES, "top_5_accuracy"),
)
