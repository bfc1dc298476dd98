"""Vision models of transformers, built from a configuration or pretrained weights for the data's classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from accel_train.core.model_card import FOLDER, Use
from accel_train.data.images.labelled import ImageSets
from accel_train.data.images.preprocessing import (
    Preprocessing,
    Size,
    height_width,
    note_of_lost_colours,
)
from accel_train.data.images.processors import model_preprocessing
from accel_train.model.pretrained import chosen_attention, new_weights, pretrained_config, transformers_model
from accel_train.recipe.data import ImageData
from accel_train.recipe.schema import Recipe
from accel_train.task import Facts, Task, TaskData
from accel_train.tasks.common.classification import forward_flops, listed, training_flops, with_labels
from accel_train.tasks.common.image_views import Windows, image_views, window_logits


@dataclass(frozen=True)
class ImageSource:
    """The images and their preprocessing, for prediction, evaluation and export."""

    sets: ImageSets
    preprocessing: Preprocessing

    @property
    def label_names(self) -> tuple[str, ...]:
        """Class names in the order of their ids."""
        return self.sets.label_names

    def facts(self, notes: list[str], **others: Any) -> Facts:
        """Return the facts about the images. `others` are the task's own."""
        sets, preprocessing = self.sets, self.preprocessing
        own = {"image_size": preprocessing.image_size, "mean": preprocessing.mean, "std": preprocessing.std}
        return Facts(
            sources=sets.description,
            num_train=len(sets.train),
            num_eval=0 if sets.eval is None else len(sets.eval),
            label_names=list(sets.label_names),
            others={**own, **others},
            notes=notes,
        )

    def row_ids(self, index: int) -> str:
        """Return the name of an evaluation image: its id column, or its file, or file and row."""
        assert self.sets.eval is not None
        return self.sets.eval.row_id(index)

    def shown(self, index: int) -> dict[str, Any]:
        """Return an evaluation image as stored, for display in a report."""
        assert self.sets.eval is not None
        return {"image": self.sets.eval.image(index)}


class VisionTask(Task):
    """Base of the image tasks: builds and saves their models. A subclass adds data, loss, and scores."""

    factory: Any
    """Auto class of transformers that builds the models."""
    models: Mapping[Any, Any]
    """Mapping of configuration classes to model classes of transformers."""
    purpose: str
    predicts_pixels: bool
    """Whether the model is trained on crops and predicts a class per pixel. False: one class per image."""
    resizes_whole_images: bool
    """Whether evaluation images are not cropped, because masks or boxes belong to them."""
    example: str
    """Code of the model card that uses `model(**inputs)`."""

    def read_images(
        self, recipe: Recipe, read: Callable[[Any, tuple[str, ...] | None], ImageSets]
    ) -> tuple[ImageSource, list[str]]:
        """Read the recipe's images, prepare test-time augmentation, and return the images with notes.

        `read` receives the class names of a pretrained model, or None.
        """
        config, notes = self.model_config(recipe)
        preprocessing, further_notes = model_preprocessing(recipe, config, is_whole=self.resizes_whole_images)
        known_names = tuple(config.id2label.values()) if recipe.model.pretrained is not None else None
        sets = read(recipe.data, known_names)
        lost_colours = note_of_lost_colours(sets.train.images, preprocessing)
        self.windows = self._windows(recipe)
        self._prepare_test_time(recipe, with_labels(config, sets.label_names), preprocessing)
        return ImageSource(sets, preprocessing), [*notes, *further_notes, *lost_colours, *sets.notes]

    def _windows(self, recipe: Recipe) -> Windows | None:
        stride = recipe.evaluate.window_stride
        if stride is None:
            return None
        whole, window = height_width(ImageData.of(recipe.data).image_size), height_width(self.train_size(recipe))
        steps = height_width(stride)
        if any(step > edge for step, edge in zip(steps, window)) or all(w >= e for w, e in zip(window, whole)):
            raise ValueError(
                f"evaluate.window_stride={stride}: windows of data.crop_size, here {list(window)}, "
                f"move over images of data.image_size, here {list(whole)}, by a stride of at most the window; "
                "set data.crop_size to the size that the model is trained on, and data.image_size to a larger one"
            )
        return Windows(window, steps)

    def _prepare_test_time(self, recipe: Recipe, config: PreTrainedConfig, preprocessing: Preprocessing) -> None:
        self.test_time, self.takes_any_size = recipe.evaluate.test_time_augmentation, True
        if self.test_time is None:
            return
        for scale in self.test_time.scales:
            height, width = height_width(preprocessing.image_size)
            size = (round(height * scale), round(width * scale))
            if self.windows is not None:
                size = (min(size[0], self.windows.size[0]), min(size[1], self.windows.size[1]))
            reason = None if scale == 1 else self.refusal_of_size(config, len(preprocessing.mean), size)
            if self.predicts_pixels and reason is not None:
                raise ValueError(
                    f"evaluate.test_time_augmentation.scales: {scale:g} makes images of {size[1]} x {size[0]} pixels, "
                    f"which {config.model_type!r} does not take ({reason}); leave it out"
                )
            self.takes_any_size &= reason is None
        small = [scale for scale in self.test_time.scales if scale < 1]
        if small and not self.takes_any_size:
            raise ValueError(
                f"evaluate.test_time_augmentation.scales: {small[0]} is below 1, "
                "and the model takes images of one size only, so there is nothing to fill the rim with; "
                "give scales of 1 and above"
            )
        if not self.test_time.scales:
            raise ValueError("evaluate.test_time_augmentation.scales is empty; write [1.0] for the image as it is")

    def whole_logits(self, model: nn.Module, pixel_values: Tensor) -> Tensor:
        """Return the logits of whole images, computed in one pass or in windows (`evaluate.window_stride`)."""
        if self.windows is None:
            return image_logits(model, pixel_values)
        return window_logits(partial(image_logits, model), pixel_values, self.windows)

    def views(self, model: nn.Module, pixel_values: Tensor, logits: Tensor) -> list[Tensor]:
        """Return the logits of all views to average. Pixel logits (N, C, h, w) of mirrored views are flipped back.

        `logits` belong to the unaugmented images.
        """
        if self.test_time is None:
            return [logits]
        found = []
        for view in image_views(pixel_values, self.test_time, takes_any_size=self.takes_any_size):
            answer = logits if view.is_original else self.whole_logits(model, view.pixel_values)
            found.append(answer.flip(-1) if view.is_flipped and answer.ndim == 4 else answer)
        return found

    def model_config(self, recipe: Recipe) -> tuple[PreTrainedConfig, list[str]]:
        """Return the configuration of the recipe's model, before the data's classes are set, and notes about it.

        Auxiliary heads of segmentation models (UPerNet, BEiT, DPT) are left out. Transformers does not return their
        logits, so they would not be trained, and processes would wait for their gradients.

        Raises:
            ValueError: the configuration cannot be loaded, or transformers has no model of its type for this task.
        """
        section = recipe.model
        if section.config is not None:
            fields = dict(section.config)
            # The data determines the number of labels.
            fields.pop("num_labels", None)
            config = AutoConfig.for_model(**fields)
            if getattr(config, "image_size", None) is not None and "image_size" not in fields:
                by_windows = recipe.evaluate.window_stride is not None
                config.image_size = self.train_size(recipe) if by_windows else ImageData.of(recipe.data).image_size
        else:
            config = pretrained_config(recipe)
        if type(config) not in self.models and not section.trust_remote_code:
            raise ValueError(
                f"model type {config.model_type!r} has no model for {self.purpose} in transformers; "
                f"there are {', '.join(sorted(kind.model_type for kind in self.models))}"
            )
        if not self.predicts_pixels or not getattr(config, "use_auxiliary_head", False):
            return config, []
        config.use_auxiliary_head = False
        return config, ["the model's auxiliary head is left out: the loss uses its last logits only"]

    def train_size(self, recipe: Recipe) -> Size:
        """Return the size of the training images."""
        return ImageData.of(recipe.data).image_size

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's model in fp32 for the data's classes, and add new weights to the notes of `data`.

        Raises:
            ValueError: the model cannot be loaded, is for another task, or does not take data.image_size or
                data.crop_size.
        """
        config = with_labels(self.model_config(recipe)[0], data.source.label_names)
        seen_whole = set() if self.windows is not None else {ImageData.of(recipe.data).image_size}
        for size in {*seen_whole, self.train_size(recipe)}:
            reason = self.refusal_of_size(config, len(data.source.preprocessing.mean), size)
            if reason is not None:
                its_own = getattr(config, "image_size", None)
                remedy = f"set data.image_size: {its_own}, or another model" if its_own else "try a larger one"
                shown = size if isinstance(size, int) else list(size)
                raise ValueError(f"data.image_size={shown} does not suit {config.model_type!r} ({reason}); {remedy}")
        model, loaded = transformers_model(self.factory, recipe, config, chosen_attention(recipe), takes_new_head=True)
        new = new_weights(loaded)
        if len(new) > len(model.state_dict()) // 2:
            raise ValueError(
                f"model.pretrained={recipe.model.pretrained!r} has next to no weights for {type(model).__name__} "
                f"(not {', '.join(new[:3])} ...); name a model of type {config.model_type!r}"
            )
        data.add_notes([f"not pretrained, so new: {', '.join(new)}"] if new else [])
        return model

    def refusal_of_size(self, config: PreTrainedConfig, channels: int, size: Size) -> str | None:
        """Return why the model cannot take images of this size, or None if it can or if this is unknown.

        The check runs on a meta copy without values. Models that read the values of their input cannot run there.
        """
        try:
            forward_flops(self.factory, config, pixel_values=(1, channels, *height_width(size)))
        except (ValueError, RuntimeError) as error:
            is_untold = not isinstance(error, ValueError) and "meta" in str(error)
            return None if is_untold else str(error).strip().partition("\n")[0]
        return None

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs of a forward pass, per image or per pixel of a crop."""
        assert isinstance(model, PreTrainedModel)
        (height, width), channels = height_width(self.train_size(recipe)), getattr(model.config, "num_channels", 3)
        flops = training_flops(self.factory, model.config, pixel_values=(1, channels, height, width))
        return flops / (height * width) if flops is not None and self.predicts_pixels else flops

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration and image processor in the layout of transformers, and a short model card."""
        super().save_description(model, data, folder)
        preprocessing, config = data.source.preprocessing, getattr(model, "config", None)
        if self.windows is not None and self.refusal_of_size(config, len(preprocessing.mean), preprocessing.image_size):
            # Transformers has no windows, so the image processor uses the window size.
            preprocessing = replace(preprocessing, image_size=self.windows.size)
        preprocessing.save(folder, crops=not self.resizes_whole_images)

    def use(self, model: nn.Module, data: TaskData) -> Use:
        preprocessing, names = data.source.preprocessing, data.source.label_names
        (height, width), factory = height_width(preprocessing.image_size), self.factory.__name__
        only = ""
        code = f"""from transformers import pipeline

predict = pipeline("{self.spec.pipeline}", model="{FOLDER}")
print(predict("image.png"))"""
        if preprocessing.mode == "L":
            only = ". It takes one channel: images must be converted to grayscale, and `pipeline()` does not do this"
            code = f"""from PIL import Image
from transformers import AutoImageProcessor, {factory}

model = {factory}.from_pretrained("{FOLDER}")
processor = AutoImageProcessor.from_pretrained("{FOLDER}")
image = Image.open("image.png").convert("L")
inputs = processor(image, return_tensors="pt")
{self.example}"""
        return Use(
            code,
            [
                f"Knows: {len(names)} classes: {listed(names, 20, ' (config.json)')}",
                f"Reads: images of {width} x {height} pixels; `preprocessor_config.json` says how they are made{only}",
            ],
            "images",
        )


def image_logits(model: nn.Module, pixel_values: Tensor) -> Tensor:
    """Return the model's logits in the model's precision."""
    logits: Tensor = model(pixel_values=pixel_values).logits
    return logits
