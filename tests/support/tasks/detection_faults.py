"""Object detection with a fault on demand: `options` nan_sample (an image that becomes NaN), or term_at."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.object_detection.task import ObjectDetection
from tests.support.tasks.text_faults import Faulty

_BAD = 77


class FaultyObjectDetection(Faulty, ObjectDetection):
    """Object detection."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        data = super().load_data(recipe, progress=progress)
        own_draw, own_collate = data.draw, data.collate
        assert own_draw is not None

        def draw(index: int, generator: np.random.Generator) -> Any:
            sample = own_draw(index, generator)
            is_bad = index == self.options.get("nan_sample")
            return sample._replace(image=np.full_like(sample.image, _BAD)) if is_bad else sample

        def collate(samples: Sequence[Any]) -> dict[str, Any]:
            batch = own_collate(samples)
            for row, sample in enumerate(samples):
                if (sample.image == _BAD).all():
                    batch["pixel_values"][row] = math.nan
            return batch

        return replace(data, draw=draw, collate=collate)
