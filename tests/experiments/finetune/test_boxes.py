"""finetune finds boxes in COCO, YOLO, Pascal VOC and metadata.jsonl, and writes data settings that read them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import YolosConfig, YolosForObjectDetection

import accel_train
from accel_train.cli.main import main
from accel_train.data.builtin.digit_scenes import digit_scenes
from accel_train.experiments.finetune.recipe import Found, asked_of, minimal_recipe
from accel_train.experiments.finetune.recognise import recognise
from accel_train.experiments.finetune.start import write_recipe
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.object_detection.data import read_boxed_images
from tests.support.box_tables import BY_VALUES, FORMATS, csv_lines, write_table
from tests.support.boxes import THINGS, coco_content, write_coco, write_images, write_metadata, write_voc, write_yolo
from tests.support.runs import refused
from tests.support.wording import assert_golden


def find(path: str, *settings: str, **flags: Any) -> Found:
    return recognise(asked_of(path, minimal_recipe(path, settings), **flags))


def write_every_kind() -> None:
    for part in ("train2017", "val2017"):
        write_coco(Path(f"coco/annotations/instances_{part}.json"), Path("coco", part))
    for part in ("train", "valid", "test"):
        write_coco(Path("robo", part, "_annotations.coco.json"), Path("robo", part))
    write_yolo(Path("yolo"), ("train", "val"))
    write_yolo(Path("half"))
    write_voc(Path("voc"))
    lists = Path("voc/ImageSets/Main")
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\nempty\n")
    (lists / "val.txt").write_text("b\n")
    write_metadata(Path("table"))


@pytest.mark.parametrize(
    ("path", "train", "held", "num_images", "classes"),
    [
        (
            "coco",
            "coco/annotations/instances_train2017.json",
            "coco/annotations/instances_val2017.json",
            3,
            {"dog": 2, "cat": 1},
        ),
        (
            "coco/annotations/instances_val2017.json",
            "coco/annotations/instances_val2017.json",
            None,
            3,
            {"dog": 2, "cat": 1},
        ),
        ("robo", "robo/train/_annotations.coco.json", "robo/valid/_annotations.coco.json", 3, {"dog": 2, "cat": 1}),
        ("yolo", "yolo/data.yaml", "yolo/data.yaml", 3, {"cat": 1, "dog": 2}),
        ("yolo/data.yaml", "yolo/data.yaml", "yolo/data.yaml", 3, {"cat": 1, "dog": 2}),
        ("half", "half/data.yaml", None, 3, {"cat": 1, "dog": 2}),
        ("table", "table/metadata.jsonl", None, 3, {"cat": 1, "dog": 2}),
        ("table/metadata.jsonl", "table/metadata.jsonl", None, 3, {"cat": 1, "dog": 2}),
    ],
)
def test_boxes_of_every_kind_are_found(
    path: str, train: str, held: str | None, num_images: int, classes: dict[str, int]
) -> None:
    write_every_kind()
    found = find(path)
    assert found.task == "object-detection"
    assert found.settings["data.train"].value == train
    assert (found.settings["data.eval"].value if "data.eval" in found.settings else None) == held
    assert found.eval_fraction == (None if held is None else 0.0)
    assert (found.num_samples, dict(found.counts)) == (num_images, classes)
    assert list(found.counts) == list(classes)
    data = ObjectDetectionData(**{name.removeprefix("data."): each.value for name, each in found.settings.items()})
    sets = read_boxed_images(data)
    assert sets.label_names == tuple(classes)


def test_the_lists_of_voc_and_the_test_part_are_found() -> None:
    write_every_kind()
    write_voc(Path("voc"), (*THINGS[:2], THINGS[2]._replace(name="cat")))
    found = find("voc")
    assert found.settings["data.train"].value == "voc/ImageSets/Main/train.txt"
    assert found.settings["data.eval"].value == "voc/ImageSets/Main/val.txt"
    assert dict(found.counts) == {"cat": 1, "dog": 1}
    found = find("robo")
    assert found.test == "robo/test/_annotations.coco.json"
    assert_golden("\n".join(found.notes), "with a part to evaluate on")
    Path("robo/valid/_annotations.coco.json").unlink()
    assert_golden("\n".join(find("robo").notes), "without")


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("coco", "nothing"),
        ("robo", "test/"),
        ("yolo", "extra.txt"),
        ("half", "nothing"),
        ("voc", "notes/"),
        ("table", "x"),
    ],
)
def test_only_files_that_are_not_read_are_called_unused(path: str, left: str) -> None:
    write_every_kind()
    Path("yolo/extra.txt").write_text("")
    Path("voc/notes").mkdir()
    Path("table/x").write_text("")
    assert ", ".join(find(path).unused or ["nothing"]) == left


def test_tables_with_boxes_are_found_in_another_column_and_in_shards() -> None:
    write_metadata(Path("table"))
    file = Path("table/metadata.jsonl")
    file.write_text(file.read_text().replace('"objects"', '"litter"'))
    found = find("table", "--data.objects_column", "litter")
    assert (found.task, dict(found.counts)) == ("object-detection", {"cat": 1, "dog": 2})
    table = datasets.load_dataset("imagefolder", data_dir="table", split="train")
    table = datasets.Dataset.from_list(
        [
            {"image": Path(row["image"]["path"]).read_bytes(), "objects": row["litter"]}
            for row in table.cast_column("image", datasets.Image(decode=False))
        ],
        features=datasets.Features({"image": datasets.Image(), "objects": table.features["litter"]}),
    )
    table.save_to_disk("saved")
    for number in range(2):
        table.shard(2, number).to_parquet(f"shards/train-0000{number}-of-00002.parquet")
    for path in ("saved", "shards", "shards/train-*.parquet"):
        found = find(path)
        assert (found.task, found.num_samples, dict(found.counts)) == ("object-detection", 3, {"cat": 1, "dog": 2})
    assert find("saved").unused == ()
    assert_golden(find("shards").description)
    datasets.DatasetDict(train=table, validation=table, test=table).save_to_disk("parts")
    found = find("parts")
    assert found.unused == ("test/",)
    assert found.settings["data.eval"].value == "parts"


def test_flags_replace_what_is_found() -> None:
    write_every_kind()
    found = find("coco", "--data.eval", "robo/valid")
    assert "data.eval" not in found.settings
    write_images(Path("there"))
    found = find("there", "--data.annotations", "coco/annotations/instances_val2017.json")
    assert found.settings["data.train"].value == "there"
    assert found.task == "object-detection"


def test_faults_end_in_one_list() -> None:
    content = coco_content()
    content["annotations"][0]["bbox"] = [0, 0, 99, 1]
    content["annotations"][2]["category_id"] = 3
    write_coco(Path("set/annotations.json"), Path("set"), content)
    error = refused(find, "set", named="2 faults|annotation 1000|annotation 1006")
    assert len(str(error).splitlines()) == 3
    refused(find, "set", "--data.invalid_boxes", "drop", named="1 fault |annotation 1006")


def test_polygons_are_masks_unless_detection_is_asked_for() -> None:
    from accel_train.experiments.finetune.masks import find_polygons

    content = coco_content()
    for each in content["annotations"]:
        left, top, width, height = each["bbox"]
        each["segmentation"] = [[left, top, left + width, top, left + width, top + height]]
    write_coco(Path("set/annotations.json"), Path("set"), content)
    asked = asked_of("set", minimal_recipe("set", []))
    assert find_polygons(asked, "set") is not None
    asked = asked_of("set", minimal_recipe("set", []), task="object-detection")
    assert find_polygons(asked, "set") is None
    assert recognise(asked).task == "object-detection"
    write_coco(Path("boxes/annotations.json"), Path("boxes"))
    assert find_polygons(asked_of("boxes", minimal_recipe("boxes", [])), "boxes") is None


def test_a_folder_without_boxes_is_refused_for_detection() -> None:
    write_images(Path("set/cat"))
    write_images(Path("set/dog"))
    refused(find, "set", task="object-detection", named="--task object-detection|set has no boxes|data.yaml")
    Path("captions.json").write_text(json.dumps({"images": [], "annotations": [{"caption": "a"}], "categories": []}))
    refused(find, "captions.json", task="object-detection", named="captions.json has no boxes")


def test_other_tasks_do_not_look_for_boxes() -> None:
    for name in ("cat", "dog"):
        write_images(Path("set", name))
    write_coco(Path("set/annotations.json"), Path("set/cat"), coco_content())
    assert find("set", "--data.label_names", "[cat, dog]", task="image-classification").task == "image-classification"


@pytest.mark.parametrize("path", ["coco", "robo", "yolo", "voc", "table"])
def test_the_recipe_of_every_kind_can_be_run(path: str) -> None:
    write_every_kind()
    written = write_recipe(path, [])
    assert written.recipe.task == "object-detection"
    assert written.recipe.model.config is not None
    assert written.recipe.data.image_size in (32, [32, 64], (32, 64))
    assert written.recipe.evaluate.metric_for_best_model == "map"
    assert accel_train.Recipe.from_yaml(written.path) == written.recipe


def test_a_pretrained_detector_keeps_its_image_size() -> None:
    write_every_kind()
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16, image_size=[96, 96]
    )
    YolosForObjectDetection(config).save_pretrained("weights")
    recipe = write_recipe("coco", [], model="weights").recipe
    assert recipe.model.pretrained == "weights"
    assert recipe.data.image_size in (96, 480)
    assert (recipe.optimizer.learning_rate, recipe.optimizer.max_grad_norm) == (5e-5, 0.1)


def write_digits(root: Path, number: int) -> None:
    """Write digit scenes as COCO, with parts to train and to evaluate on."""
    for part in ("train", "val"):
        images, _, boxes = digit_scenes(held_out=part == "val")
        content: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
        content["categories"] = [{"id": 5 + digit, "name": f"digit {digit}"} for digit in range(10)]
        (root / part).mkdir(parents=True)
        for index in range(number):
            images[index].save(root / part / f"{index}.png")
            content["images"].append({"id": index, "file_name": f"{index}.png", "width": 64, "height": 64})
            for digit, (left, top, right, bottom) in zip(
                boxes[index].class_ids.tolist(), boxes[index].corners.tolist()
            ):
                box = [left, top, right - left, bottom - top]
                key = len(content["annotations"])
                content["annotations"].append({"id": key, "image_id": index, "category_id": 5 + digit, "bbox": box})
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_finetune_trains_evaluates_and_predicts_boxes(not_launched: None, capsys: pytest.CaptureFixture[str]) -> None:
    write_digits(Path("digits-coco"), 24)
    result = accel_train.finetune("digits-coco", schedule={"num_epochs": 2}, log={"progress": False})
    assert 0 <= result.metrics["map"] <= 1
    run = str(result.output_dir)
    assert main(["evaluate", run, "digits-coco/annotations/instances_val.json", "--json"]) == 0
    capsys.readouterr()
    assert main(["predict", run, "digits-coco/val", "--out", "boxes.csv"]) == 0
    assert len(Path("boxes.csv").read_text().splitlines()) == 1 + 24


@pytest.mark.parametrize("name", FORMATS)
def test_tables_of_boxes_are_found_with_the_order_of_their_numbers(name: str) -> None:
    write_images(Path("set/images"))
    write_table(name)
    found = find("set")
    assert (found.task, found.num_samples, dict(found.counts)) == ("object-detection", 3, {"cat": 1, "dog": 2})
    assert ("data.box_format" in found.settings) == (name in BY_VALUES)
    assert found.unused == (("images/",) if name == "bytes.parquet" else ())


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_finetune_trains_on_tables_of_boxes(name: str, not_launched: None) -> None:
    write_images(Path("set/images"))
    path = str(write_table(name))
    result = accel_train.finetune(path, schedule={"max_steps": 2}, log={"progress": False}, data={"eval": path})
    run = str(result.output_dir)
    assert result.summary["steps"] == 2
    assert main(["evaluate", run, path, "--json"]) == 0
    assert main(["predict", run, path, "--out", "boxes.csv"]) == 0
    assert len(Path("boxes.csv").read_text().splitlines()) == 1 + 3


def test_boxes_in_an_unknown_form_are_no_classes_of_images() -> None:
    write_images(Path("set"))
    Path("set/boxes.csv").write_text("image,bbox,label\n" + "a.png,left,cat\nb.png,right,dog\n" * 3)
    refused(find, "set/boxes.csv", named="set/boxes.csv holds boxes (columns image, bbox, label)|filename, class, xmin")
    refused(find, "set/boxes.csv", task="image-classification", named="one row for each image")
    Path("set/boxes.csv").write_text("image,bbox,label\na.png,1 1 3 3,cat\nb.png,1 1 3 3,dog\n")
    assert find("set/boxes.csv", task="image-classification").task == "image-classification"


def test_a_flag_names_the_class_of_boxes_or_the_texts_about_them() -> None:
    write_images(Path("set/images"))
    Path("set/boxes.csv").write_text(csv_lines("image,kind,xmin,ymin,xmax,ymax", "{image},{class},{l},{t},{r},{b}"))
    refused(find, "set/boxes.csv", named="data.class_column: kind")
    found = find("set/boxes.csv", label=("kind",))
    assert found.settings["data.class_column"].value == "kind"
    assert dict(found.counts) == {"cat": 1, "dog": 2}
    refused(find, "set/boxes.csv", label=("kind", "image"), named="--label")
    text = csv_lines("image,xmin,ymin,xmax,ymax,text,label", "{image},{l},{t},{r},{b},some words {class},{class}")
    Path("set/boxes.csv").write_text(text + text.partition("\n")[2] * 2)
    assert find("set/boxes.csv", text=("text",)).task == "text-classification"
    refused(find, "set/boxes.csv", text=("text",), task="object-detection", named="--text")


def test_a_folder_named_like_a_parquet_file_is_no_file_of_boxes() -> None:
    Path("set/rows.parquet").mkdir(parents=True)
    Path("set/rows.csv").write_text("text,label\n" + "".join(f"text {n} of {n % 2},{'ab'[n % 2]}\n" for n in range(40)))
    assert find("set").task == "text-classification"
