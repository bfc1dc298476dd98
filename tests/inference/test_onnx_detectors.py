"""`accel-train export --onnx` of detectors: logits and boxes of each family, and a comparison that ties do not fool."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection
from transformers.image_transforms import center_to_corners_format

from accel_train import Recipe
from accel_train.inference import onnx_export
from accel_train.inference.int8 import quiet
from accel_train.tasks.object_detection.metrics import Detection, average_precision
from tests.inference.conftest import Cli, run_card
from tests.inference.test_onnx import exported, exported_in_int8
from tests.support.detectors import DETECTORS, YOLOS
from tests.support.runs import write_recipe_file
from tests.support.text_tasks import load
from tests.support.wording import raises_golden


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def distinct(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with weights so large that queries differ from each other."""
    spread = {"initializer_range": 0.3, "init_std": 0.3}
    backbone = {"backbone_config": config["backbone_config"] | spread} if "backbone_config" in config else {}
    return config | spread | backbone


FAMILIES = ("detr", "conditional_detr", "deformable_detr of all layers", "yolos", "rt_detr_v2")
"""Families with different operators. Table Transformer is DETR, and RT-DETR and D-FINE are near its second version."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_a_graph_gives_the_logits_and_boxes_of_a_detector(family: str, tmp_path: Path) -> None:
    config = distinct(DETECTORS[family])
    kind = config.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForObjectDetection.from_config(AutoConfig.for_model(kind, **config)).eval()
    example, file = {"pixel_values": torch.randn(2, 3, 64, 64)}, tmp_path / "model.onnx"
    with quiet():
        onnx_export._write(model, kind, example, file, is_any_size=False)
    checked, session = onnx_export._opened(file, model, leaves_out_ties=True)
    assert [each.name for each in session.get_outputs()] == ["logits", "pred_boxes"]
    for count in (1, 2, 5):
        pixels = torch.randn(count, 3, 64, 64)
        with torch.no_grad():
            checked(pixel_values=pixels)
            expected = model(pixel_values=pixels)
        found = session.run(["logits", "pred_boxes"], {"pixel_values": pixels.numpy()})
        # The set of queries is equal, in any order.
        for name, rows in zip(("logits", "pred_boxes"), found, strict=True):
            for ours, theirs in zip(rows, expected[name].numpy(), strict=True):
                np.testing.assert_allclose(np.sort(ours.sum(-1)), np.sort(theirs.sum(-1)), atol=1e-3)
            assert np.ptp(rows) > 1e-4
    assert max(checked.differences.values()) < 1e-4
    assert checked.num_ties == 0
    assert checked.num_images == (8 if kind == "rt_detr_v2" else 0)


@pytest.mark.slow
def test_a_graph_of_a_detector_gives_the_boxes_of_its_image_processor(tmp_path: Path, cli: Cli) -> None:
    recipe = write_recipe_file(
        tmp_path,
        task="object-detection",
        model={"config": {**YOLOS, "initializer_range": 0.3}},
        data={"train": "digit-scenes", "image_size": 64, "cache_dir": None, "sequence_length": None},
        schedule={"max_steps": 2},
    )
    cli(f"run {recipe}")
    folder, details = exported(tmp_path / "run", cli)
    assert details["onnx"]["inputs"] == {"pixel_values": ["batch", 3, 64, 64]}
    assert details["onnx"]["outputs"] == {"logits": ["batch", 7, 11], "pred_boxes": ["batch", 7, 4]}
    assert set(details["metrics"]["before"]) == {"map", "map_50", "map_75", "num_targets"}
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8))
    card = folder / "README.md"
    card.write_text(card.read_text().replace("threshold=0.5", "threshold=0.0"))
    read = run_card(folder, image=image)
    model = AutoModelForObjectDetection.from_pretrained(tmp_path / "run/model").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "run/model")
    with torch.no_grad():
        outputs = model(**processor(image, return_tensors="pt"))
    (expected,) = processor.post_process_object_detection(outputs, 0.0, [(50, 90)])
    assert len(expected["boxes"]) == 7
    for name in ("boxes", "scores", "labels"):
        torch.testing.assert_close(read["found"][name], expected[name], atol=1e-3, rtol=1e-4)
    session, _, details = exported_in_int8(tmp_path / "run", cli)
    assert details["int8"]["num_matrices"] > 4
    assert details["metrics"]["after"]["map"] == pytest.approx(precision_of(session, recipe), rel=1e-6)
    assert details["metrics"]["after"]["map"] > 0


def precision_of(session: InferenceSession, recipe: Path) -> float:
    """Return the mAP of a graph, from its outputs for the evaluation images."""
    found = []
    _, data, _ = load(Recipe.from_yaml(str(recipe)))
    truth = [data.source.sets.eval.boxes_of(index) for index in range(len(data.eval))]
    # The scales of inputs in int8 depend on the batch: twice the size of training.
    for first in range(0, len(truth), 16):
        batch = data.collate([data.eval[index] for index in range(first, min(first + 16, len(truth)))])
        outputs = map(torch.from_numpy, session.run(None, {"pixel_values": batch["pixel_values"].numpy()}))
        for logits, centers, boxes in zip(*outputs, truth[first:]):
            edges = torch.tensor([boxes.width, boxes.height] * 2)
            corners = (center_to_corners_format(centers) * edges).clamp(min=0).minimum(edges)
            scores, labels = logits.softmax(-1)[:, :-1].max(-1)
            order = scores.argsort(descending=True)
            found.append(Detection(*(each[order].numpy() for each in (scores, labels, corners))))
    return average_precision(truth, found, data.source.label_names).metrics["map"]


QUERIES = torch.tensor([[[1.0, 2.0], [5.0, 6.0], [9.0, 8.0]]])
"""Logits of three queries of an image, of two classes."""
BOXES = torch.arange(12.0).reshape(1, 3, 4) / 12
OTHER = QUERIES.clone().index_fill_(1, torch.tensor([2]), 3.0)


@pytest.mark.parametrize(
    "logits, boxes, gap, learned, difference, num_ties",
    [
        (QUERIES[:, [2, 0, 1]], BOXES[:, [2, 0, 1]], 0.5, False, 0.0, 0),
        (QUERIES[:, [2, 0, 1]], BOXES, 0.5, False, 0.0, 0),
        (OTHER, BOXES, 0.5, False, 6.0, 0),
        (OTHER, BOXES, 1e-4, False, 0.0, 1),
        (QUERIES + 1e-4, BOXES, 1e-4, False, 1e-4, 0),
        (OTHER * math.nan, BOXES, 1e-4, False, math.nan, 0),
        # A tie of the first two queries changes which content a query has only if contents are learned.
        (OTHER, BOXES, -1e-4, False, 6.0, 0),
        (OTHER, BOXES, -1e-4, True, 0.0, 1),
    ],
)
def test_queries_are_compared_in_any_order_and_left_out_only_where_a_rounding_decides(
    logits: torch.Tensor, boxes: torch.Tensor, gap: float, learned: bool, difference: float, num_ties: int
) -> None:
    nodes = [SimpleNamespace(name=name) for name in ("logits", "pred_boxes")]
    arrays = [logits.numpy(), boxes.numpy()]
    session = SimpleNamespace(get_inputs=list, get_outputs=lambda: nodes, run=lambda *_: arrays)
    # A negative gap is between the first two queries, and a positive one between the last that is chosen and the next.
    scores = [4.0, 4.0 + gap, 2.0, 1.0] if gap < 0 else [4.0, 3.0, 2.0, 2.0 - gap]
    reference = torch.nn.Identity()
    reference.config = SimpleNamespace(num_queries=3, learn_initial_query=learned)
    reference.forward = lambda **_: {
        "logits": QUERIES,
        "pred_boxes": BOXES,
        "enc_outputs_class": torch.tensor(scores)[None, :, None],
    }
    checked = onnx_export.OnnxModel(session, reference, leaves_out_ties=True)
    checked(pixel_values=torch.zeros(1))
    assert (checked.num_images, checked.num_ties) == (1, num_ties)
    if not num_ties:
        assert checked.differences["logits"] == pytest.approx(difference, abs=1e-5, nan_ok=True)
        is_swapped = boxes is BOXES and logits.equal(QUERIES[:, [2, 0, 1]])
        assert (checked.differences["pred_boxes"] > 0.1) == is_swapped
    if num_ties or not difference <= 1e-3 or is_swapped:
        with raises_golden():
            onnx_export._check(checked, {}, {})
    # In int8, all images count.
    rounded = onnx_export.OnnxModel(session, reference)
    rounded(pixel_values=torch.zeros(1))
    assert rounded.num_ties == 0
