"""The losses of detectors: queries get the boxes of transformers' matchers, and the host reads nothing else."""

from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForObjectDetection, PreTrainedConfig

from accel_train.data.labels import IGNORED_LABEL
from accel_train.model.fake_step import simulate_step
from accel_train.model.tensors import replaced, without_values
from accel_train.task import Tensors
from accel_train.tasks.object_detection import losses
from accel_train.tasks.object_detection.task import ObjectDetection
from tests.support.detectors import DETECTORS

aten = torch.ops.aten
NUM_BOXES = (3, 1, 0, 9)
"""Boxes of each image. The last one has more than the model has queries, 7."""
FAMILIES = {**DETECTORS, "rt_detr without focal costs": {**DETECTORS["rt_detr"], "use_focal_loss": False}}


def config_of(name: str) -> PreTrainedConfig:
    return AutoConfig.for_model(**FAMILIES[name], num_labels=3)


def boxes_of(seed: int, image_size: int = 64) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    class_ids = torch.randint(0, 3, (4, 9), generator=generator)
    for row, number in zip(class_ids, NUM_BOXES):
        row[number:] = IGNORED_LABEL
    boxes = torch.rand(4, 9, 4, generator=generator) * 0.4 + 0.2
    images = torch.randn(4, 3, image_size, image_size, generator=generator)
    return {"pixel_values": images, "boxes": boxes, "class_ids": class_ids}


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    model = AutoModelForObjectDetection.from_config(config_of(name)).train()
    losses.watch(model)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_each_query_gets_the_box_that_the_matcher_of_transformers_gives_it(name: str) -> None:
    config = config_of(name)
    terms, generator = losses.Terms(config), torch.Generator().manual_seed(0)
    for seed in range(20):
        batch = boxes_of(seed)
        layer = {
            "logits": torch.randn(4, 7, 3 + (config.model_type in losses.SOFTMAX), generator=generator) * 3,
            "pred_boxes": torch.rand(4, 7, 4, generator=generator) * 0.4 + 0.2,
        }
        # Numbers that are not finite are matched last.
        layer["logits"][0, 2] = torch.nan
        labels = [
            {"class_labels": ids[:number], "boxes": boxes[:number]}
            for ids, boxes, number in zip(batch["class_ids"], batch["boxes"], NUM_BOXES)
        ]
        costs = terms._costs(layer, batch)
        for own, number, theirs in zip(costs, NUM_BOXES, terms.criterion.matcher(layer, labels), strict=True):
            assert own[:, number:].isinf().all()
            queries, boxes = linear_sum_assignment(own[:, :number])
            assert [queries.tolist(), boxes.tolist()] == [each.tolist() for each in theirs]


class Reads(TorchDispatchMode):
    """Lists operators that would wait for a device. The tensors are on a CPU, so copies to the host are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket
        by_mask = name in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if by_mask or name in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select):
            self.found.append(str(name))
        return func(*args, **(kwargs or {}))


def one_hot(values: Tensor, num_classes: int) -> Tensor:
    """Return what torch's function returns. It compares all values with the number of classes, but not on a GPU."""
    return torch.eye(num_classes, dtype=torch.int64)[values]


@pytest.mark.parametrize("name", DETECTORS)
def test_a_loss_reads_no_number_but_the_copied_costs(name: str) -> None:
    model, batch, reads = model_of(name), boxes_of(0), Reads()
    own = model.loss_function

    def watched(*args: Any, **kwargs: Any) -> Any:
        with reads, replaced({(functional, "one_hot"): one_hot}):
            return own(*args, **kwargs)

    model.loss_function = watched
    assert losses.detection_terms(model, batch)[1].isfinite().all()
    assert reads.found == []
    del model._loss_function
    labels = [
        {"class_labels": ids[:number], "boxes": boxes[:number]}
        for ids, boxes, number in zip(batch["class_ids"], batch["boxes"], NUM_BOXES)
    ]
    with reads:
        model(pixel_values=batch["pixel_values"], labels=labels)
    assert len(reads.found) >= 4, "the loss of transformers reads"


@pytest.mark.parametrize("name", DETECTORS)
def test_the_memory_of_a_step_is_known_and_grows_with_the_images(name: str) -> None:
    peaks = []
    for size in (64, 128):
        with without_values():
            model = AutoModelForObjectDetection.from_config(config_of(name))
        losses.watch(model)
        peaks.append(simulate_step(ObjectDetection(), model, boxes_of(0, size)).total())
    assert 2 * peaks[0] < peaks[1] < 5 * peaks[0]
