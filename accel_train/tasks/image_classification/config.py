"""The settings of `data` for image classification."""

from accel_train.recipe.data import ClassData, ImageData


class ImageClassificationData(ImageData, ClassData):
    """Settings of `data` for image classification."""
