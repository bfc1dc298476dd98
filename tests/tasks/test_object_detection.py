"""Object detection: transformers' losses over the global batch, boxes counted once, and folders that others open."""

import json
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageColor
from torch.nn import BatchNorm2d
from transformers import AutoConfig, AutoModelForObjectDetection, pipeline

from accel_train import train
from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.data.images.boxes import Boxes
from accel_train.data.images.pools import boxed_scenes_pool
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.order import permute
from accel_train.inference.predict import predict_rows
from accel_train.recipe.schema import Recipe
from accel_train.report.pictures import color_of_class
from accel_train.runtime.private import fake_tensors
from accel_train.task import Tensors
from accel_train.tasks.object_detection import losses
from accel_train.tasks.object_detection.metrics import Detection, average_precision
from tests.support.detectors import CROPS, DEFORMABLE, DETECTORS, FAULTY, YOLOS, sections_of, train_boxes
from tests.support.runs import REPOSITORY, refused
from tests.support.tasks.global_loss import assert_resumes_to_the_bit, assert_step_2_is_skipped
from tests.support.text_tasks import batch_of, load
from tests.support.wording import assert_golden


def make_batch() -> Tensors:
    """Four images: with three boxes, one, none, and nine of the same class, more than queries."""
    generator = torch.Generator().manual_seed(0)
    class_ids = torch.full((4, 9), IGNORED_LABEL)
    class_ids[0, :3], class_ids[1, 0], class_ids[3] = torch.tensor([0, 1, 2]), 1, 2
    return {
        "pixel_values": torch.randn(4, 3, 64, 64, generator=generator),
        "boxes": torch.rand(4, 9, 4, generator=generator) * 0.4 + 0.2,
        "class_ids": class_ids,
    }


def model_of(config: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    settings = AutoConfig.for_model(**config, num_labels=3)
    model = AutoModelForObjectDetection.from_config(settings).train()
    for module in model.modules():
        # The statistics of a batch would depend on the micro-batch; without them, only the loss can.
        if isinstance(module, BatchNorm2d):
            module.eval()
    return model


def their_loss(model: Any, batch: Tensors) -> torch.Tensor:
    labels = [
        {"class_labels": ids[ids >= 0], "boxes": boxes[ids >= 0]}
        for ids, boxes in zip(batch["class_ids"], batch["boxes"], strict=True)
    ]
    return model(pixel_values=batch["pixel_values"], labels=labels).loss


def our_loss(model: Any, batch: Tensors, counts: torch.Tensor) -> torch.Tensor:
    terms = losses.detection_terms(model, batch)[1]
    return (terms * losses.weights_of_terms(counts, model.config).to(terms.dtype)).sum()


def gradients(model: Any) -> Tensors:
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", DETECTORS)
def test_a_simulated_forward_leaves_no_tensor_without_values_to_the_next_one(name: str) -> None:
    # An image size of its own: what is kept for one size is kept for all tests of this process.
    pixels = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        model = model_of(DETECTORS[name])
        with fake_tensors() as fake:
            assert type(model(pixel_values=fake.from_tensor(pixels)).logits) is not torch.Tensor
        assert type(model(pixel_values=pixels).logits) is torch.Tensor


@pytest.mark.parametrize("name", DETECTORS)
def test_images_one_by_one_have_the_loss_of_transformers(name: str) -> None:
    model, batch = model_of(DETECTORS[name]), make_batch()
    with torch.no_grad():
        # Some heads begin at zero, and the distillation of D-FINE is then zero as well.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    expected = their_loss(model, batch).item()
    losses.watch(model)
    counts = losses.count(batch["class_ids"], 7)
    assert counts.tolist() == [4, 13, 11, 17]
    with torch.no_grad():
        rows = [{key: value[image : image + 1] for key, value in batch.items()} for image in range(4)]
        found = sum(our_loss(model, row, counts).item() for row in rows)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_parameter_has_the_gradient_of_transformers(name: str) -> None:
    model, batch = model_of(DETECTORS[name]), make_batch()
    their_loss(model, batch).backward()
    theirs = gradients(model)
    trainable = {name for name, each in model.named_parameters() if each.requires_grad}
    assert set(theirs) == trainable, "a parameter without a gradient would hold up other processes"
    losses.watch(model)
    our_loss(model, batch, losses.count(batch["class_ids"], 7)).backward()
    ours = gradients(model)
    largest = max(float(each.abs().max()) for each in theirs.values())
    for key, each in theirs.items():
        torch.testing.assert_close(ours[key], each, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["yolos", "deformable_detr", "rt_detr", "d_fine"])
def test_a_batch_without_boxes_has_the_loss_of_transformers(name: str) -> None:
    model, batch = model_of(DETECTORS[name]), make_batch()
    batch["class_ids"] = torch.full((4, 9), IGNORED_LABEL)
    expected = their_loss(model, batch)
    losses.watch(model)
    found = our_loss(model, batch, losses.count(batch["class_ids"], 7))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.item() > 0


@pytest.mark.parametrize("name", ["yolos", "deformable_detr", "d_fine"])
def test_an_image_that_is_nan_gives_nan_and_raises_nothing(name: str) -> None:
    model, batch = model_of(DETECTORS[name]), make_batch()
    losses.watch(model)
    batch["pixel_values"][1] = torch.nan
    assert our_loss(model, batch, losses.count(batch["class_ids"], 7)).isnan()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "lw_detr"}, "lw_detr|not proved"),
        (DEFORMABLE | {"two_stage": True}, "two_stage"),
        (DETECTORS["rt_detr"] | {"auxiliary_loss": False}, "auxiliary_loss"),
        (YOLOS | {"auxiliary_loss": True}, "auxiliary_loss"),
    ],
)
def test_a_model_whose_loss_is_not_proved_is_refused(tmp_path: Path, config: Any, named: str) -> None:
    refused(load, Recipe.model_validate(sections_of(tmp_path, model=config)), named=f"model|{named}")


def test_denoising_queries_are_left_out_and_a_note_says_so(tmp_path: Path) -> None:
    config = DETECTORS["rt_detr"] | {"num_denoising": 10}
    _, data, model = load(Recipe.model_validate(sections_of(tmp_path, model=config)))
    assert model.config.num_denoising == 0
    assert any("denoising" in note for note in data.facts.notes)


@pytest.mark.parametrize("model", [YOLOS, DEFORMABLE], ids=["yolos", "deformable_detr"])
def test_the_loss_does_not_depend_on_accumulation(tmp_path: Path, model: Any) -> None:
    whole = train_boxes(tmp_path, "whole", model=model)
    _, data, _ = load(Recipe.model_validate(sections_of(tmp_path, model=model, data=CROPS)))
    assert data.draw is not None
    drawn = [len(data.draw(index, np.random.default_rng(index)).boxes) for index in range(64)]
    assert 5 < drawn.count(0) < 60, "images without boxes"
    for per_device in (1, 4):
        parts = train_boxes(tmp_path, f"parts-{per_device}", per_device=per_device, model=model)
        assert parts == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in whole]
        losses_of = [[each[0] for each in found] for found in (parts, whole)]
        assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-6)


def test_steps_without_boxes_train_on_no_object_alone(tmp_path: Path) -> None:
    none = {"augment": {"scale_range": [30.0, 31.0]}, "min_visible": 1.0}
    found = train_boxes(tmp_path, "run", data=none)
    assert all(np.isfinite(each).all() and each[0] > 0 and each[1] > 0 for each in found)


@pytest.mark.parametrize(("size", "processes"), [(1, 1), (3, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_the_evaluation_does_not_depend_on_the_batch_size_or_the_number_of_processes(
    tmp_path: Path, size: int, processes: int
) -> None:
    found = []
    for name, rows, count in (("whole", 8, 1), ("parts", size, processes)):
        train_boxes(tmp_path, name, count, 4, batch={"per_device_eval_batch_size": rows}, schedule={"max_steps": 1})
        found.append(load_json(tmp_path / name / "summary.json")["eval"])
    assert found[1] == pytest.approx(found[0], rel=1e-6 if processes == 1 else 1e-5)


def test_the_evaluation_loss_is_that_of_transformers_on_all_images(tmp_path: Path) -> None:
    task, data, model = load(Recipe.model_validate(sections_of(tmp_path)))
    batch, num_targets = batch_of(data, range(12))
    assert num_targets == 12
    totals = {}
    with torch.no_grad():
        for start in (0, 5, 10):
            part = {name: value[start : start + 5] for name, value in batch.items()}
            for name, value in task.evaluate_batch(model, part).items():
                if not name.startswith("rows_"):
                    totals[name] = totals.get(name, 0) + value.double().numpy()
        del model._loss_function
        expected = their_loss(model, batch).item()
    assert task.loss_of_rows(totals) / 12 == pytest.approx(expected, rel=1e-6)


def test_average_precision_is_that_of_pycocotools_on_files(tmp_path: Path) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    random = np.random.default_rng(0)
    truth, found = list[Boxes](), list[Detection]()
    annotations, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for image in range(12):
        count = int(random.integers(0, 5))
        start = random.uniform(0, 60, (count, 2))
        corners = np.concatenate([start, start + random.uniform(4, 40, (count, 2))], 1).astype(np.float32)
        ids, crowds = random.integers(0, 3, count), random.random(count) < 0.2
        areas = random.uniform(10, 900, count).astype(np.float32)
        truth.append(Boxes(corners, ids, crowds, areas, 100, 100))
        near = np.concatenate([corners + random.normal(0, 2, corners.shape), corners + 9]).astype(np.float32)
        scores, guesses = random.random(2 * count).astype(np.float32), np.concatenate([ids, ids])
        found.append(Detection(scores, guesses, near))
        for box, number, crowd, area in zip(corners.tolist(), ids.tolist(), crowds.tolist(), areas.tolist()):
            sides = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image + 50, "category_id": number + 7, "bbox": sides}
                | {"area": area, "iscrowd": int(crowd)}
            )
        for box, number, score in zip(near.tolist(), guesses.tolist(), scores.tolist()):
            sides = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            results.append({"image_id": image + 50, "category_id": number + 7, "bbox": sides, "score": score})
    categories = [{"id": number + 7, "name": name} for number, name in enumerate("abcd")]
    images = [{"id": image + 50} for image in range(12)]
    (tmp_path / "truth.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories, "info": {}})
    )
    (tmp_path / "results.json").write_text(json.dumps(results))
    with redirect_stdout(StringIO()):
        known = COCO(str(tmp_path / "truth.json"))
        direct = COCOeval(known, known.loadRes(str(tmp_path / "results.json")), "bbox")
        direct.evaluate()
        direct.accumulate()
        direct.summarize()
    scores_found = average_precision(truth, found, "abcd")
    assert any(each.is_crowd.any() for each in truth)
    assert list(scores_found.metrics.values()) == pytest.approx(direct.stats[:3].tolist(), abs=1e-9)
    by_class = scores_found.details["detection"]["average_precision"]
    assert by_class[3] is None, "no box in the truth"
    assert np.mean(by_class[:3]) == pytest.approx(direct.stats[0])
    assert 0.1 < direct.stats[0] < 0.9


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_image_that_is_nan_is_named_and_its_step_changes_no_weight(tmp_path: Path, processes: int) -> None:
    bad = int(permute(np.arange(600), 600, 0, 0)[8 + 3])
    sections = {"checkpoint": {"every_steps": 1, "keep": 9}, "task": FAULTY}
    train_boxes(tmp_path, "run", processes, 4, options={"nan_sample": bad}, **sections)
    assert_step_2_is_skipped(tmp_path / "run", bad)


def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not_to_the_bit(tmp_path: Path) -> None:
    sections = {"model": DEFORMABLE, "task": FAULTY, "schedule": {"max_steps": 5}}
    assert_resumes_to_the_bit(train_boxes, tmp_path, 5, **sections)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "tolerance"),
    [
        ({"precision": {"mixed_precision": "bf16"}}, 0.05),
        ({"precision": {"mixed_precision": "no", "gradient_checkpointing": True}}, 1e-5),
        ({"precision": {"mixed_precision": "no", "compile": True}}, 1e-4),
    ],
    ids=["bf16", "gradient_checkpointing", "compile"],
)
@pytest.mark.parametrize("model", [YOLOS, DEFORMABLE], ids=["yolos", "deformable_detr"])
def test_the_loss_stays_the_same_with_other_ways_to_compute_it(
    tmp_path: Path, model: Any, sections: dict[str, Any], tolerance: float
) -> None:
    plain = train_boxes(tmp_path, "plain", model=model)
    other = train_boxes(tmp_path, "other", model=model, **sections)
    assert [each[0] for each in other] == pytest.approx([each[0] for each in plain], rel=tolerance)


def test_statistics_of_the_backbone_stay_frozen_while_its_weights_train(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(sections_of(tmp_path, model=DEFORMABLE))
    _, _, before = load(recipe, recipe.seed)
    train_boxes(tmp_path, "run", model=DEFORMABLE)
    after = AutoModelForObjectDetection.from_pretrained(tmp_path / "run/model").state_dict()
    initial = before.state_dict()
    statistics = [name for name in after if "backbone" in name and name.endswith(("running_mean", "running_var"))]
    assert len(statistics) > 10
    assert all(torch.equal(after[name], torch.full_like(after[name], "var" in name)) for name in statistics)
    convolutions = [name for name in after if "backbone" in name and "convolution.weight" in name]
    assert any(not torch.equal(after[name], initial[name]) for name in convolutions)


def test_plan_names_the_task_and_images_as_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections_of(tmp_path)))
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.slow
def test_rehearse_passes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections_of(tmp_path)))
    assert main(["rehearse", str(path)]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a COCO file whose ids are not positions, with scenes of two sizes."""
    folder = tmp_path_factory.mktemp("coco")
    (folder / "images").mkdir()
    scenes = boxed_scenes_pool(held_out=False)
    assert scenes.boxes is not None
    content = {"images": [], "annotations": [], "categories": []}
    content["categories"] = [{"id": 3 * number + 5, "name": f"digit {number}"} for number in range(10)]
    for number in range(20):
        scale = 1 + number % 2
        image = scenes.images[number]
        size = (image.width * scale, image.height)
        image.resize(size).save(folder / "images" / f"{number}.png")
        content["images"].append(
            {"id": 900 - number, "file_name": f"{number}.png", "width": size[0], "height": size[1]}
        )
        boxes = scenes.boxes[number]
        for (left, top, right, bottom), digit in zip(boxes.corners.tolist(), boxes.class_ids.tolist()):
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": 900 - number,
                    "category_id": 3 * digit + 5,
                    "bbox": [left * scale, top, (right - left) * scale, bottom - top],
                    "area": (right - left) * scale * (bottom - top),
                    "iscrowd": 0,
                }
            )
    (folder / "instances_train.json").write_text(json.dumps(content))
    data = {"train": str(folder / "instances_train.json"), "eval_fraction": 0.4}
    sections = sections_of(folder, data=data, model=DEFORMABLE, schedule={"max_steps": 2})
    train(Recipe.model_validate(sections | {"evaluate": {"every_steps": 0}}))
    return folder


def test_predictions_as_coco_results_score_as_the_evaluation_does(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    assert main(["predict", str(trained / "run"), "--out", str(trained / "results.json")]) == 0
    results = load_json(trained / "results.json")
    known = COCO(str(trained / "instances_train.json"))
    images = {each["image_id"] for each in results}
    assert len(images) == 8
    evaluation = COCOeval(known, known.loadRes(results), "bbox")
    evaluation.params.imgIds = sorted(images)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    expected = load_json(trained / "run/summary.json")["eval"]
    found = [expected[name] for name in ("map", "map_50", "map_75")]
    assert found == pytest.approx(evaluation.stats[:3].tolist(), abs=1e-4)


def test_the_pipeline_of_transformers_opens_the_model_and_finds_the_same_boxes(trained: Path) -> None:
    assert main(["predict", str(trained / "run"), "--min-score", "0", "--out", str(trained / "rows.jsonl")]) == 0
    finder = pipeline("object-detection", model=str(trained / "run/model"), device="cpu")
    rows = [json.loads(line) for line in (trained / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        found = finder(str(trained / "images" / Path(row["id"]).name), threshold=0.0)
        count = min(len(found), len(row["scores"]))
        assert count >= 60
        scores = [each["score"] for each in found[:count]]
        assert scores == pytest.approx(row["scores"][:count], abs=1e-3)
        left, top, width, height = row["boxes"][0]
        box = found[0]["box"]
        edges = [box["xmin"], box["ymin"], box["xmax"], box["ymax"]]
        assert edges == pytest.approx([left, top, left + width, top + height], abs=1.1)
        assert found[0]["label"] == row["labels"][0]


def test_the_report_draws_truth_and_prediction_side_by_side(trained: Path) -> None:
    examples = load_json(trained / "run/examples.json")
    content = load_json(trained / "instances_train.json")
    assert examples["kind"] == "boxes"
    assert examples["tried"] == 8
    assert 1 <= len(examples["examples"]) <= 8
    page = (trained / "run/report.html").read_text()
    per_image = Counter(each["image_id"] for each in content["annotations"])
    for each in examples["examples"]:
        assert len(each["missed"]) <= len(each["right"]) + len(each["missed"]) <= max(per_image.values())
        truth, prediction = each["images"]
        assert truth.startswith("data:image/png;base64,")
        assert truth in page
        assert prediction in page
        assert each["right"] or truth != prediction


def test_verdicts_in_the_report_are_those_of_the_evaluation(trained: Path) -> None:
    """All images are shown, so the counts give the recall at the least score that the pictures use."""
    examples = load_json(trained / "run/examples.json")
    truth = Counter(name for each in examples["examples"] for name in (*each["right"], *each["missed"]))
    content = load_json(trained / "instances_train.json")
    shown = {int(Path(row["id"]).stem) for row in rows_of(trained / "run")[:: 8 // len(examples["examples"])][:6]}
    names = {each["id"]: each["name"] for each in content["categories"]}
    assert truth == Counter(
        names[each["category_id"]] for each in content["annotations"] if 900 - each["image_id"] in shown
    )
    every = rows_of(trained / "run", "--min-score", str(examples["least_score"]))
    predicted = [len(row["scores"]) for row in every if int(Path(row["id"]).stem) in shown]
    assert sorted(predicted) == sorted(len(each["right"]) + len(each["wrong"]) for each in examples["examples"])


def rows_of(run: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["predict", str(run), *words, "--out", str(run / "rows.jsonl")]) == 0
    return [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]


def said_of_scores(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().err.splitlines() if "--min-score" in line)


def test_predictions_have_the_boxes_from_the_score_with_the_best_f1_on(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run of two steps has none of its own. The score is that of a box, as its evaluation stores it."""
    run, file = trained / "run", trained / "run/evaluation.json"
    kept, record = file.read_bytes(), load_json(file)
    every = rows_of(run, "--min-score", "0")
    scores = sorted((score for row in every for score in row["scores"]), reverse=True)
    assert len(scores) >= 8 * 60
    best = float(np.float32(scores[20]))
    above = [[score for score in row["scores"] if score >= scores[20]] for row in every]
    record["details"]["detection"]["best_f1"] = {"score": best}
    file.write_text(json.dumps(record))
    capsys.readouterr()
    try:
        assert [row["scores"] for row in rows_of(run)] == above
        said = said_of_scores(capsys)
        assert said.startswith(f"{sum(map(len, above))} ")
        assert_golden(said.partition(" ")[2].replace(f"{best:.4g}", "SCORE"), case="best")
        found = predict_rows(run, str(trained / "images"))
        assert min(score for row in found for score in row["scores"]) >= scores[20]
        for words, number in (((), len(scores)), (("--min-score", str(best)), sum(map(len, above)))):
            assert main(["predict", str(run), *words, "--out", str(trained / "results.json")]) == 0
            assert len(load_json(trained / "results.json")) == number
        file.unlink()
        capsys.readouterr()
        assert rows_of(run) == every
        assert_golden(said_of_scores(capsys), case="none")
    finally:
        file.write_bytes(kept)


def test_a_row_per_box_has_its_image_class_score_and_corners(trained: Path) -> None:
    run = trained / "run"
    flat = rows_of(run, "--min-score", "0.02", "--row-per-box")
    lists = rows_of(run, "--min-score", "0.02")
    assert [row["file"] for row in flat] == [row["id"] for row in lists for _ in row["boxes"]]
    assert [(row["class"], row["score"]) for row in flat] == [
        pair for row in lists for pair in zip(row["labels"], row["scores"], strict=True)
    ]
    for row, (left, top, width, height) in zip(flat, [box for each in lists for box in each["boxes"]], strict=True):
        assert [row[name] for name in ("x1", "y1", "x2", "y2")] == pytest.approx(
            [left, top, left + width, top + height]
        )
    assert list(flat[0]) == ["file", "class", "score", "x1", "y1", "x2", "y2"]
    assert main(["predict", str(run), "--row-per-box", "--out", str(trained / "r.json")]) == 2
    assert main(["predict", str(run), "--row-per-box", "--min-score", "1", "--out", str(trained / "none.csv")]) == 0
    assert (trained / "none.csv").read_text() == "file,class,score,x1,y1,x2,y2\n"


def test_each_image_is_drawn_large_with_the_boxes_above_the_score(trained: Path) -> None:
    rows = rows_of(trained / "run", "--min-score", "0", "--draw", str(trained / "drawn"))
    names = sorted(path.name for path in (trained / "drawn").glob("*.jpg"))
    assert names == [f"{number:06d}-{Path(row['id']).stem}.jpg" for number, row in enumerate(rows)]
    rows_of(trained / "run", "--min-score", "1", "--draw", str(trained / "bare"))
    for name, row in zip(names, rows, strict=True):
        with Image.open(trained / "drawn" / name) as drawn, Image.open(trained / "bare" / name) as bare:
            assert max(drawn.size) >= 640
            left, top, width, _ = row["boxes"][0]
            # Scenes are 64 pixels high. The best box is on top.
            scale = drawn.height / 64
            x, y = round((left + width / 2) * scale), round(top * scale) + 1
            pixels = [np.array(each.convert("RGB").getpixel((x, y)), int) for each in (drawn, bare)]
            color = ImageColor.getrgb(color_of_class(int(row["labels"][0].split()[1])))
            assert np.abs(pixels[0] - color).max() < 60
            assert np.abs(pixels[1] - color).max() > 60 or top == 0


def test_each_parameter_of_the_recipes_detector_takes_part_in_the_loss(tmp_path: Path) -> None:
    tree = yaml.safe_load((REPOSITORY / "recipes/object_detection.yaml").read_text())
    _, data, model = load(Recipe.model_validate(tree | {"output_dir": str(tmp_path / "run")}))
    losses.detection_terms(model.train(), batch_of(data, [0, 1])[0])[1].sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "per_device", "strategy", "model"),
    [
        (2, 4, "ddp", YOLOS),
        (2, 1, "ddp", YOLOS),
        (4, 2, "ddp", YOLOS),
        (2, 2, "fsdp2", YOLOS),
        (2, 2, "ddp", DEFORMABLE),
    ],
)
def test_the_loss_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, processes: int, per_device: int, strategy: str, model: Any
) -> None:
    whole = train_boxes(tmp_path, "whole", model=model)
    found = train_boxes(tmp_path, "spread", processes, per_device, model=model, parallel={"strategy": strategy})
    assert [each[0] for each in found] == pytest.approx([each[0] for each in whole], rel=1e-6)
    assert found == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in whole]
