"""Object detection: average precision counted by hand, the mean-box baseline, and predictions of the trained model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForObjectDetection, pipeline

from accel_train.core.json_io import load_json
from accel_train.data.images.boxes import Boxes, match_boxes
from accel_train.model.lora import add_adapters
from accel_train.recipe.schema import LoRA
from accel_train.tasks.object_detection.config import SPEC
from accel_train.tasks.object_detection.metrics import (
    Detection,
    average_precision,
    coco_box,
    mean_boxes,
)
from tests.support.detectors import DEFORMABLE, YOLOS
from tests.support.runs import metrics, run, run_forked_command, write_recipe_file

NAMES = ("cat", "dog")
SMALL: dict[str, Any] = YOLOS | {
    "num_hidden_layers": 1, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4,
    "use_mid_position_embeddings": False,
}  # fmt: skip


def boxes(*rows: tuple[float, float, float, float, int], crowd: tuple[int, ...] = ()) -> Boxes:
    """Boxes (left, top, right, bottom, class) of an image of 100 x 80."""
    corners = np.array([row[:4] for row in rows], np.float32).reshape(-1, 4)
    is_crowd = np.isin(np.arange(len(rows)), crowd)
    areas = ((corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])).astype(np.float32)
    return Boxes(corners, np.array([row[4] for row in rows], np.int64), is_crowd, areas, 100, 80)


def found(*rows: tuple[float, float, float, float, int, float]) -> Detection:
    """Predicted boxes (left, top, right, bottom, class, score)."""
    corners = np.array([row[:4] for row in rows], np.float32).reshape(-1, 4)
    return Detection(
        np.array([row[5] for row in rows], np.float32), np.array([row[4] for row in rows], np.int64), corners
    )


A, B = (10, 10, 30, 30, 0), (50, 40, 90, 80, 1)


def test_right_boxes_have_a_precision_of_1_and_a_class_without_boxes_does_not_count() -> None:
    scores = average_precision([boxes(A)], [found((*A, 0.9))], NAMES)
    assert scores.metrics == dict.fromkeys(SPEC.metrics, pytest.approx(1.0))
    assert scores.details["detection"] == {
        "label_names": ["cat", "dog"],
        "average_precision": [pytest.approx(1.0), None],
        "num_boxes": [1, 0],
        "best_f1": {"score": pytest.approx(0.9), "precision": 1.0, "recall": 1.0, "f1": 1.0},
    }


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Right, wrong, right: two of three are right, which beats one of one for two boxes (F1 0.8, 0.67).
        ([(*A, 0.9), (60, 10, 70, 20, 0, 0.8), (*B, 0.7)], (0.7, 2 / 3, 1.0, 0.8)),
        ([(*A, 0.9), (60, 10, 70, 20, 0, 0.8), (60, 10, 70, 20, 1, 0.8), (*B, 0.2)], (0.9, 1.0, 0.5, 2 / 3)),
        # A least score cannot take the right one of two boxes with the same score alone.
        ([(*A, 0.9), (60, 10, 70, 20, 0, 0.9)], (0.9, 0.5, 0.5, 0.5)),
        ([(60, 10, 70, 20, 0, 0.9)], None),
    ],
)
def test_the_best_least_score_is_counted_by_hand(rows: list[Any], expected: tuple[float, ...] | None) -> None:
    best = average_precision([boxes(A, B)], [found(*rows)], NAMES).details["detection"]["best_f1"]
    values = None if best is None else [best[name] for name in ("score", "precision", "recall", "f1")]
    assert values == (None if expected is None else pytest.approx(list(expected)))


def test_matched_boxes_are_those_of_pycocotools() -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rng = np.random.default_rng(0)

    def some(number: int) -> np.ndarray[Any, Any]:
        starts = rng.integers(0, 40, (number, 2))
        return np.concatenate([starts, starts + rng.integers(15, 40, (number, 2))], 1).astype(np.float32)

    num_matched = 0
    for _ in range(30):
        truth = boxes(*((*map(float, each), int(rng.integers(2))) for each in some(6)), crowd=(5,))
        corners, classes = some(20), rng.integers(0, 2, 20)
        matched = match_boxes(truth, corners, classes)
        known = COCO()
        known.dataset = {
            "info": {},
            "images": [{"id": 1, "width": 100, "height": 80}],
            "categories": [{"id": 1}, {"id": 2}],
            "annotations": [
                {
                    "id": number + 1, "image_id": 1, "category_id": int(class_id) + 1, "bbox": coco_box(edges),
                    "area": 1.0, "iscrowd": int(crowd),
                }
                for number, (edges, class_id, crowd) in enumerate(zip(truth.corners, truth.class_ids, truth.is_crowd))
            ],
        }  # fmt: skip
        known.createIndex()
        results = [
            {"image_id": 1, "category_id": int(class_id) + 1, "bbox": coco_box(edges), "score": 1 - number / 99}
            for number, (edges, class_id) in enumerate(zip(corners, classes))
        ]
        evaluation = COCOeval(known, known.loadRes(results), "bbox")
        evaluation.params.areaRng, evaluation.params.maxDets = [[0, 1e10]], [100]
        evaluation.evaluate()
        theirs = np.full(20, -1)
        for each in filter(None, evaluation.evalImgs):
            theirs[np.array(each["dtIds"]) - 1] = each["dtMatches"][0] - 1
        np.testing.assert_array_equal(matched, theirs)
        num_matched += int((matched >= 0).sum())
    assert num_matched > 50


def test_boxes_of_crowds_count_neither_as_right_nor_as_wrong_in_the_best_least_score() -> None:
    truth = boxes(A, (0, 0, 100, 80, 0), crowd=(1,))
    inside = (40, 40, 60, 60, 0, 0.95)
    best = average_precision([truth], [found(inside, (*A, 0.5))], NAMES).details["detection"]["best_f1"]
    assert best == {"score": pytest.approx(0.5), "precision": 1.0, "recall": 1.0, "f1": 1.0}


def test_a_box_that_overlaps_by_06_counts_at_the_thresholds_up_to_06() -> None:
    # 20 x 20 and the same box cut to 12 x 20: IoU 0.6, which passes 0.50, 0.55, and 0.60.
    scores = average_precision([boxes(A)], [found((10, 10, 22, 30, 0, 0.9))], NAMES)
    assert scores.metrics["map_50"] == pytest.approx(1.0)
    assert scores.metrics["map_75"] == 0.0
    assert scores.metrics["map"] == pytest.approx(0.3)


def test_a_wrong_box_with_a_higher_score_halves_the_precision_and_a_lower_one_does_not() -> None:
    wrong = (60, 10, 70, 20, 0)
    for score, expected in ((0.95, 0.5), (0.5, 1.0)):
        scores = average_precision([boxes(A)], [found((*A, 0.9), (*wrong, score))], NAMES)
        assert scores.metrics["map"] == pytest.approx(expected)


def test_a_missed_box_leaves_the_recalls_below_one_half() -> None:
    # Recalls 0, 0.01 ... 0.50 of 101 are reached with precision 1.
    second = (60, 10, 80, 30, 0)
    scores = average_precision([boxes(A, second)], [found((*A, 0.9))], NAMES)
    assert scores.metrics["map"] == pytest.approx(51 / 101)


def test_boxes_in_a_crowd_are_neither_right_nor_wrong() -> None:
    truth = boxes(A, (40, 10, 90, 60, 0), crowd=(1,))
    inside = [(45 + 5 * n, 20, 55 + 5 * n, 30, 0, 0.99) for n in range(3)]
    scores = average_precision([truth], [found(*inside, (*A, 0.5))], NAMES)
    assert scores.metrics["map"] == pytest.approx(1.0)
    assert scores.details["detection"]["num_boxes"] == [1, 0]


def test_images_do_not_share_boxes() -> None:
    scores = average_precision([boxes(A), boxes(B)], [found((*B, 0.9)), found((*A, 0.8))], NAMES)
    assert scores.metrics["map"] == 0.0


def test_no_prediction_is_0_and_no_truth_is_unknown() -> None:
    assert average_precision([boxes(A)], [found()], NAMES).metrics == dict.fromkeys(SPEC.metrics, 0.0)
    assert all(np.isnan(value) for value in average_precision([boxes()], [found((*A, 0.9))], NAMES).metrics.values())


def test_mean_box_is_relative_to_the_image_and_scored_by_the_share_of_images() -> None:
    train = [boxes((0, 0, 20, 40, 0), (20, 0, 40, 40, 0)), boxes((0, 0, 100, 80, 1)), boxes((0, 0, 40, 8, 0))]
    wide = Boxes(
        np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, np.float32), 200, 80
    )
    [detection] = mean_boxes(train, [wide], 2)
    assert detection.class_ids.tolist() == [0, 1]
    assert detection.scores.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert detection.corners[0] == pytest.approx([200 * 0.2 / 3, 0, 200 * (0.2 + 0.4 + 0.4) / 3, (40 + 40 + 8) / 3])


def write_coco(folder: Path, number: int = 12) -> Path:
    """Images with a bright box each: red is a cat, green a dog."""
    generator, annotations, images = np.random.default_rng(0), [], []
    (folder / "images").mkdir(parents=True)
    for index in range(number):
        width, height = ((40, 30), (24, 48))[index % 2]
        pixels = generator.integers(0, 60, (height, width, 3), dtype=np.uint8)
        left, top = (int(generator.integers(0, edge - 12)) for edge in (width, height))
        pixels[top : top + 10, left : left + 12, index % 2] = 250
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
        images.append({"id": 100 + index, "file_name": f"{index}.png", "width": width, "height": height})
        box = {"id": index, "image_id": 100 + index, "category_id": 3 + 4 * (index % 2), "bbox": [left, top, 12, 10]}
        annotations.append({**box, "area": 120, "iscrowd": 0})
    categories = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
    path = folder / "annotations.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detect")
    annotations = write_coco(folder / "set")
    images = str(folder / "set" / "images")
    data = {"train": images, "annotations": str(annotations), "image_size": 32, "eval_fraction": 0.3}
    recipe = write_recipe_file(
        folder,
        task="object-detection",
        model={"config": SMALL},
        data=data,
        batch={"global_batch_size": 4},
        schedule={"max_steps": 4},
    )
    recipe.write_text(recipe.read_text().replace("    model_type: gpt2\n", ""))
    run(recipe)
    return folder / "run"


def test_run_reports_the_scores_and_the_baseline_of_the_held_out_images(trained: Path) -> None:
    end = load_json(trained / "summary.json")
    assert set(SPEC.metrics) <= set(end["eval"])
    assert set(end["baselines"]) == {f"mean_box_{name}" for name in SPEC.metrics}
    assert all(np.isfinite(line["loss"]) for line in metrics(trained))


def test_adapters_of_yolos_are_merged_into_a_model_with_the_scores_of_the_run(trained: Path, tmp_path: Path) -> None:
    recipe = write_recipe_file(
        tmp_path,
        task="object-detection",
        model={"pretrained": str(trained / "model"), "lora": {"rank": 2}},
        data={"train": str(trained.parent / "set"), "image_size": 32, "eval_fraction": 0.3},
        batch={"global_batch_size": 4},
        optimizer={"learning_rate": 0.1},
        schedule={"max_steps": 3},
    )
    content = yaml.safe_load(recipe.read_text())
    del content["model"]["config"]
    recipe.write_text(yaml.safe_dump(content))
    run(recipe)
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (trained, tmp_path / "run"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("query" in name for name in changed)
    assert not any("patch_embeddings" in name for name in changed)
    end = load_json(tmp_path / "run" / "summary.json")["eval"]
    again = run_forked_command(["evaluate", str(tmp_path / "run"), "--json"], 1)
    assert json.loads(again.stdout)["result"]["metrics"]["loss"] == pytest.approx(end["loss"], rel=1e-5)


def test_a_detector_that_peft_cannot_adapt_is_refused() -> None:
    model = AutoModelForObjectDetection.from_config(AutoConfig.for_model(**DEFORMABLE))
    with pytest.raises(ValueError, match=r"model\.lora") as caught:
        add_adapters(model, LoRA(rank=2))
    assert "DeformableDetrForObjectDetection" in str(caught.value)


def test_pipeline_of_transformers_opens_the_model_and_finds_the_predicted_boxes(trained: Path, tmp_path: Path) -> None:
    from accel_train.inference.predict import predict_rows

    rows = predict_rows(trained, trained.parent / "set" / "images", min_score=0)
    detect = pipeline("object-detection", model=str(trained / "model"))
    for row in rows:
        theirs = detect(Image.open(row["id"]), threshold=0.0)
        assert [each["label"] for each in theirs] == row["labels"]
        assert [each["score"] for each in theirs] == pytest.approx(row["scores"], abs=1e-5)
        for one, (left, top, width, height) in zip(theirs, row["boxes"], strict=True):
            corners = [one["box"][name] for name in ("xmin", "ymin", "xmax", "ymax")]
            assert corners == pytest.approx([left, top, left + width, top + height], abs=1.01)
