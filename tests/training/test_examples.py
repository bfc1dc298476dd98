"""What a run gets wrong is kept for the report: the same samples that `predict` gets wrong, the
most confident first.
"""

import base64
import csv
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from accel_train.cli.main import main

TEXTS = "--data.train texts.csv --model.config.num_buckets 4096 --schedule.num_epochs {} --output_dir run"


pytestmark = pytest.mark.usefixtures("empty_folder")


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_texts_that_are_taken_for_another_class_are_those_of_predict_the_most_confident_first() -> None:
    words = {"sea": "wave salt ship tide", "land": "hill road tree farm"}
    texts = [
        (f"{words[label].split()[number % 4]} {'and sand ' * (number % 3)}", label)
        for number in range(60)
        for label in words
    ]
    texts += [(f"wave and road {number}", "land" if number % 3 else "sea") for number in range(60)]
    Path("texts.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in texts))
    settings = TEXTS.format(1).split()
    assert main(["run", "text_ngrams", *settings]) == 0
    found = json.loads(Path("run/examples.json").read_text())
    assert main(["predict", "run"]) == 0
    table = rows("run/predictions.csv")
    wrong = sorted((row for row in table if row["label"] != row["true_label"]), key=lambda row: -float(row["score"]))
    assert (found["kind"], found["tried"], found["wrong"]) == ("label", len(table), len(wrong))
    assert len(wrong) > 2
    shown = found["examples"]
    assert [each["score"] for each in shown] == pytest.approx([float(row["score"]) for row in wrong[:12]], rel=1e-5)
    assert all(each["truth"] != each["prediction"] for each in shown)
    assert {(each["text"], each["truth"]) for each in shown} <= {(text.strip(), label) for text, label in texts} | set(
        texts
    )
    page = Path("run/report.html").read_text()
    assert f"{shown[0]['truth']}, predicted as {shown[0]['prediction']} ({shown[0]['score']:.0%})" in page


def test_pictures_of_masks_are_image_truth_and_prediction() -> None:
    settings = "--schedule.max_steps 2 --schedule.num_epochs null --output_dir run --evaluate.max_samples 8"
    assert main(["run", "segmentation", *settings.split()]) == 0
    found = json.loads(Path("run/examples.json").read_text())
    assert found["kind"] == "mask"
    assert [each["wrong"] for each in found["examples"]] == sorted(
        (each["wrong"] for each in found["examples"]), reverse=True
    )
    accuracy = json.loads(Path("run/evaluation.json").read_text())["metrics"]["pixel_accuracy"]
    assert found["wrong"] / found["tried"] == pytest.approx(1 - accuracy, abs=0.02), "of the samples tried, and of all"
    for each in found["examples"]:
        pictures = [Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) for image in each["images"]]
        assert len(pictures) == 3
        assert len(pictures[1].convert("RGB").getcolors(1000) or ()) > 1, "a truth of several classes"
        drawn = {"#" + bytes(colour).hex() for _, colour in pictures[1].convert("RGB").getcolors(1000) or ()}
        assert drawn <= {colour for _, colour in found["colours"]}, "the key has every colour of a truth"
    assert {name for name, _ in found["colours"]} <= {"background", *"0123456789"}
    page = Path("run/report.html").read_text()
    assert all(f'<i style="background: {colour}"></i>{name}</span>' in page for name, colour in found["colours"])
    assert Path("run/report.html").read_text().count("<img") == 3 * len(found["examples"])


def test_without_a_mistake_there_is_nothing_to_show_and_at_0_nothing_is_copied() -> None:
    lines = "".join(f"{word} {number},{word}\n" for number in range(60) for word in ("sea", "land"))
    Path("texts.csv").write_text("text,label\n" + lines)
    settings = TEXTS.format(3).split()
    assert main(["run", "text_ngrams", *settings]) == 0
    found = json.loads(Path("run/examples.json").read_text())
    assert (found["wrong"], found["examples"]) == (0, [])
    assert ">Mistakes<" not in Path("run/report.html").read_text()
    assert main(["run", "text_ngrams", *settings, "--output_dir", "private", "--evaluate.num_examples", "0"]) == 0
    assert not Path("private/examples.json").exists()
