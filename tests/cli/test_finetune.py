"""`finetune`: from data of the user's own to a model that transformers opens, by one command; and what is wrong with
such data.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from transformers import pipeline

from accel_train.cli.main import main
from accel_train.data.builtin.digit_scenes import digit_scenes
from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.experiments.finetune.recognise import recognise
from tests.support.runs import run_forked_command, write_base

QUICK = ("--schedule.max_steps", "2", "--log.progress", "false", "--data.cache_dir", "cache")
NARROW = (
    "{model_type: modernbert, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, "
    "layer_types: [full_attention]}"
)
WORDS = ("the film was long and dull", "a bright and funny story", "nobody laughed at the end of it", "we all cried")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in no launch."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCEL_TRAIN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write_reviews(name: str = "reviews.csv", header: str = "id,review,stars") -> None:
    rows = [f"{number},{WORDS[number % 4]} {number},{'good' if number % 2 else 'bad'}" for number in range(60)]
    Path(name).write_text("\n".join([header, *rows]) + "\n")


def write_digits(folder: str = "digits") -> None:
    digits = load_digits()
    for number in range(40):
        path = Path(folder, f"digit-{digits.target[number] % 2}", f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(path)


def write_scenes(folder: str = "scenes") -> None:
    for name, images in zip(("images", "masks"), digit_scenes(held_out=True)):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for number in range(16):
            images[number].save(Path(folder, name, f"{number}.png"))


def write_chats(name: str = "chats.jsonl", **keys: str) -> None:
    lines = []
    for number in range(60):
        said = (("user", f"what is {number % 7} plus {number}?"), ("assistant", f"it is {number % 7 + number}."))
        turns = [{keys.get("role", "role"): role, keys.get("content", "content"): text} for role, text in said]
        lines.append(json.dumps({"messages": turns}) + "\n")
    Path(name).write_text("".join(lines))


def recipe_of(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())


def test_a_csv_becomes_a_text_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    write_reviews()
    with Path("reviews.csv").open("a") as file:
        file.write("60,,good\n61,,bad\n")
    assert main(["finetune", "reviews.csv", "--model.config.num_buckets", "4096", *QUICK]) == 0
    printed = capsys.readouterr().out
    sizes = re.search(r"^data +(\d+) samples to train on, (\d+) held out$", printed, flags=re.MULTILINE)
    assert sizes is not None
    assert sum(map(int, sizes.groups())) == 62
    assert " training texts are empty (reviews.csv:62 is the first), and trained on as they are" in printed
    assert (
        'pipeline("text-classification", model="runs/reviews/model", trust_remote_code=True)("a text", truncation=True)'
        in printed
    )
    assert "data.text_columns: [review] (the only column of texts: 6 words on average)" in printed
    assert "data.label_column: stars (its name)" in printed
    assert "evaluate.metric_for_best_model: accuracy (the classes are of like size)" in printed
    assert "recipe: runs/reviews.yaml (written" in printed
    assert "accel-train predict runs/reviews NEW.csv" in printed
    (answer,) = pipeline("text-classification", model="runs/reviews/model")("a funny story")
    assert answer["label"] in ("good", "bad")


def test_a_folder_of_images_becomes_an_image_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    """The folder has the name of embedded data, which are not what is asked for."""
    write_digits()
    assert main(["finetune", "digits", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "digits: 40 images in 2 classes (digit-0, digit-1)" in printed
    assert "data.image_size: 32 (the median image has a short edge of 8 pixels)" in printed
    answers = pipeline("image-classification", model="runs/digits/model")(str(next(Path("digits").rglob("*.png"))))
    assert {answer["label"] for answer in answers} == {"digit-0", "digit-1"}


def test_a_table_of_image_files_and_labels_becomes_an_image_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    write_digits("t")
    rows = [f"{path.relative_to('t')},{path.parent.name}" for path in sorted(Path("t").rglob("*.png"))]
    Path("t/labels.csv").write_text("\n".join(["file,kind", *rows]))
    assert main(["finetune", "t/labels.csv", "--dry-run"]) == 0
    assert "data.image_size: 32 (the median image has a short edge of 8 pixels)" in capsys.readouterr().out
    data = recipe_of("runs/labels.yaml")["data"]
    assert (data["image_column"], data["label_column"]) == ("file", "kind")


@pytest.mark.slow
def test_two_processes_train_the_recipe_that_the_first_writes() -> None:
    write_chats()
    for said in ("written", "as it was"):
        done = run_forked_command(["finetune", "chats.jsonl", *QUICK], 2)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("looking at the data") == 1
        assert f"recipe: runs/chats.yaml ({said}" in done.stdout
        assert done.stdout.count("Use it:") == 1


def test_images_and_masks_become_a_segmentation_model(capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes()
    assert main(["finetune", "scenes", *QUICK]) == 0
    assert "scenes/images and scenes/masks: 16 pairs" in capsys.readouterr().out
    found = pipeline("image-segmentation", model="runs/scenes/model")("scenes/images/0.png")
    assert found[0]["mask"].size == (64, 64)


def test_chats_become_a_model_that_chats(capsys: pytest.CaptureFixture[str]) -> None:
    write_chats()
    assert main(["finetune", "chats.jsonl", *QUICK]) == 0
    assert "data.format: chat (each is a list of {role, content}" in capsys.readouterr().out
    chat = pipeline("text-generation", model="runs/chats/model")
    (answer,) = chat([{"role": "user", "content": "what is 3 plus 4?"}], max_new_tokens=3)
    assert answer["generated_text"][-1]["role"] == "assistant"

    capsys.readouterr()
    assert main(["generate", "runs/chats", "--prompt", "what is 3 plus 4?", "--max-new-tokens", "3"]) == 0
    assert "plus" not in capsys.readouterr().out  # the answer alone


def test_a_text_file_becomes_a_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("corpus.txt").write_text(" ".join(WORDS) * 60)
    assert main(["finetune", "corpus.txt", *QUICK]) == 0
    assert "corpus.txt: a text file, 5,760 characters" in capsys.readouterr().out
    (answer,) = pipeline("text-generation", model="runs/corpus/model")("the film", max_new_tokens=3)
    assert answer["generated_text"].startswith("the film")


def test_a_pretrained_model_is_trained_on_with_settings_for_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(Path())
    from accel_train.data.text.tokenizers import byte_tokenizer

    byte_tokenizer().save_pretrained(str(base))
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(40))
    )
    assert main(["finetune", "rows.jsonl", "--model", str(base), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "model.pretrained: base (as --model says; 0.0378M parameters)" in printed
    assert "optimizer.learning_rate: 0.0005 (usual for 0.0378M pretrained parameters: the larger, the lower)" in printed
    assert recipe_of("runs/rows.yaml")["data"]["format"] == "prompt_completion"


def test_the_same_command_again_keeps_the_recipe_and_one_with_other_settings_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_reviews()
    again = ["finetune", "reviews.csv", "--dry-run", "--optimizer.learning_rate", "1e-3"]
    assert main(again) == 0
    written = Path("runs/reviews.yaml").read_text()
    assert "learning_rate: 0.001  # as the command line says" in written
    assert main(again) == 0
    assert "recipe: runs/reviews.yaml (as it was" in capsys.readouterr().out
    assert main(["finetune", "reviews.csv", "--dry-run"]) == 2
    assert "error: runs/reviews.yaml is there already, and not what finetune would write now" in capsys.readouterr().err
    assert Path("runs/reviews.yaml").read_text() == written
    assert not Path("runs/reviews").exists()  # --dry-run trains nothing


def test_a_table_without_header_in_latin_1_between_semicolons_is_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{'gut' if number % 2 else 'schlecht'};der Film war sch\u00f6n lang {number}, ja" for number in range(40)]
    Path("filme.csv").write_bytes("\n".join(rows).encode("latin-1"))
    assert main(["finetune", "filme.csv", "--model.config", NARROW, *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "filme.csv: read as separated by semicolons, which divide its first lines alike" in printed
    assert (
        "data.encoding: cp1252 (byte 0xf6 at position 25 is not UTF-8; Windows' Latin-1 can read all of it)" in printed
    )
    assert (
        "data.header: none ('schlecht' of the first row comes again in later rows, so it is no name of a column)"
        in printed
    )
    assert "data.text_columns: ['2'] (the only column of texts: 7 words on average)" in printed
    (answer,) = pipeline("text-classification", model="runs/filme/model")("ein Film")
    assert answer["label"] in ("gut", "schlecht")


def test_decimal_numbers_beside_a_text_are_predicted_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.jsonl").write_text(
        "".join(json.dumps({"text": f"{WORDS[n % 4]} {n}", "score": n / 7}) + "\n" for n in range(40))
    )
    assert main(["finetune", "t.jsonl", "--dry-run"]) == 0
    assert "data.label_column: score (the only column of decimal numbers)" in capsys.readouterr().out
    recipe = recipe_of("runs/t.yaml")
    assert (recipe["model"]["problem_type"], recipe["evaluate"]["metric_for_best_model"]) == ("regression", "pearson")
    assert "loss" not in recipe


@pytest.mark.parametrize(
    ("lines", "flags", "labels", "said"),
    [
        ("__label__{0} {1}", (), {"lines": "fasttext"}, "lines begin with __label__"),
        ("__label__{0} __label__x {1}", (), {"lines": "fasttext_multi"}, "lines begin with __label__"),
        (
            "{0} {1}",
            ("--task", "text-classification"),
            {"lines": "label_text"},
            "each line begins with one of 2 words, the labels",
        ),
    ],
)
def test_lines_with_labels_are_read_as_such(
    lines: str, flags: tuple[str, ...], labels: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.txt").write_text("\n".join(lines.format("ab"[n % 2], WORDS[n % 4]) for n in range(40)))
    assert main(["finetune", "t.txt", "--dry-run", *flags]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    several = labels["lines"] == "fasttext_multi"
    assert f"metric_for_best_model: {'f1_macro' if several else 'accuracy'}" in printed
    assert labels.items() <= recipe_of("runs/t.yaml")["data"].items()


def test_names_of_numeric_labels_are_found_in_the_table_or_in_a_file_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("World", "Sports", "Business")
    rows = [f"{n % 3 + 1},{WORDS[n % 4]} {n},{names[n % 3]}" for n in range(30)]
    Path("news.csv").write_text("\n".join(["label,text,label_name", *rows]))
    assert main(["finetune", "news.csv", "--dry-run"]) == 0
    assert recipe_of("runs/news.yaml")["data"]["label_column"] == "label_name"
    Path("plain.csv").write_text("\n".join(row.rpartition(",")[0] for row in rows))
    Path("classes.txt").write_text("\n".join(names))
    assert main(["finetune", "plain.csv", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "label_names: [World, Sports, Business] (the lines of classes.txt)" in printed
    assert "data.label_ids_from: 1 (column '1' counts from 1)" in printed
    Path("news").mkdir()
    for file in ("plain.csv", "classes.txt", "classes"):  # the name of the last is a part of the reason for the names
        shutil.copy(Path(file if file != "classes" else "plain.csv"), Path("news", file))
    assert recognise(asked_of("news", minimal_recipe("news", []))).unused == ("files classes",)


def test_camvids_folders_are_trained_and_evaluated_on(capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("train", "val"):
        write_scenes(f"camvid/{side}")
        Path(f"camvid/{side}/masks").rename(f"camvid/{side}annot")
        Path(f"camvid/{side}/images").rename("camvid/images")
        Path(f"camvid/{side}").rmdir()
        Path("camvid/images").rename(f"camvid/{side}")
    assert main(["finetune", "camvid", "--dry-run"]) == 0
    data = recipe_of("runs/camvid.yaml")["data"]
    assert (data["train"], data["eval"]) == ("camvid/train", "camvid/val")
    assert "camvid/train and camvid/trainannot: 16 pairs" in capsys.readouterr().out


def test_a_list_of_images_and_masks_is_found_by_what_its_lines_name(capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes("s")
    Path("s/train.txt").write_text("".join(f"/data/s/images/{n}.png /data/s/masks/{n}.png\n" for n in range(16)))
    assert main(["finetune", "s/train.txt", "--dry-run"]) == 0
    assert "task: semantic-segmentation (each line names an image and its mask)" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_found_by_its_zeros(encoding: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_reviews()
    Path("reviews.csv").write_bytes(Path("reviews.csv").read_text().encode(encoding))
    assert main(["finetune", "reviews.csv", "--dry-run"]) == 0
    assert f"data.encoding: {encoding} (every second byte is 0, as in UTF-16" in capsys.readouterr().out


def test_black_and_white_masks_are_two_classes_to_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes("photos")
    for path in Path("photos/masks").glob("*.png"):
        Image.fromarray(np.where(np.asarray(Image.open(path)) > 0, 255, 0).astype(np.uint8)).save(path)
    assert main(["finetune", "photos", *QUICK]) == 0
    assert (
        "data.mask_values: [0, 255] (masks hold 0 and 255 alone, so they are black and white)"
        in capsys.readouterr().out
    )
    found = pipeline("image-segmentation", model="runs/photos/model")("photos/images/0.png")
    assert {each["label"] for each in found} <= {"background", "object"}


def test_masks_whose_first_class_is_0_are_asked_whether_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes("photos")
    hint = "where it means no class (ADE20K): --data.reduce_labels true"
    assert main(["finetune", "photos", "--dry-run"]) == 0
    assert hint in capsys.readouterr().out
    assert main(["finetune", "photos", "--dry-run", "--data.reduce_labels", "true", "--output_dir", "runs/b"]) == 0
    assert hint not in capsys.readouterr().out


def numbers_far_apart() -> None:
    write_scenes("t")
    for path in Path("t/masks").glob("*.png"):
        Image.fromarray((np.asarray(Image.open(path)) % 3 * 100).astype(np.uint8)).save(path)


def columns(header: str, row: Callable[[int], str]) -> Callable[[], None]:
    return lambda: (
        Path("t.csv").write_text("\n".join([header, *map(row, range(40))]) + "\n"),
        None,
    )[1]


def jsonl(row: Callable[[int], dict[str, Any]]) -> Callable[[], None]:
    return lambda: (Path("t.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(40))), None)[1]


def parts_in_place_of_classes() -> None:
    write_digits("t")
    for name, part in (("digit-0", "Training"), ("digit-1", "Testing")):
        Path("t", part).mkdir()
        Path("t", name).rename(Path("t", part, name))


def image_outside_a_class() -> None:
    write_digits("t")
    next(Path("t").rglob("*.png")).rename("t/loose.png")


def mask_missing() -> None:
    write_scenes("t")
    Path("t/masks/3.png").unlink()


WRONG: dict[str, tuple[Callable[[], None], str, tuple[str, ...], str]] = {
    "two columns of text": (
        columns("title,body,label", lambda n: f"{WORDS[n % 4]},{WORDS[n % 3]},{n % 2}"),
        "t.csv",
        (),
        "t.csv: columns title, body are all text; choose one: --text title, or --text title,body for both as a pair",
    ),
    "two columns of labels": (
        columns("text,colour,size", lambda n: f"{WORDS[n % 4]} {n},{'rg'[n % 2]},{'SML'[n % 3]}"),
        "t.csv",
        (),
        "t.csv: 2 columns may be the label; choose one: --label colour or --label size",
    ),
    "no column of labels": (
        columns("id,text", lambda n: f"{n},{WORDS[n % 4]} {n}"),
        "t.csv",
        (),
        "t.csv: no column looks like a label beside text (there are id); name it: --label COLUMN; or --task causal-lm "
        "--text text "
        "for a language model of the texts",
    ),
    "a label that is another one in each row": (
        columns("text,label", lambda n: f"{WORDS[n % 4]},{n}"),
        "t.csv",
        (),
        "t.csv: column 'label' has 40 different values in 40 rows, too many for labels; name another: --label COLUMN; "
        "or for numbers to "
        "predict: --model.problem_type regression",
    ),
    "a column that is not there": (
        columns("text,label", lambda n: f"{WORDS[n % 4]},{n % 2}"),
        "t.csv",
        ("--label", "lable"),
        "--label lable: t.csv has no such column; did you mean 'label'? There are text, label",
    ),
    "a folder of weights that is not there": (
        columns("text,label", lambda n: f"{WORDS[n % 4]},{n % 2}"),
        "t.csv",
        ("--model", "/no/such"),
        "--model /no/such: there is no such folder (seen from {here}); name one, or a model on the hub",
    ),
    "images outside of class folders": (
        image_outside_a_class,
        "t",
        (),
        "t: t/loose.png lies in no class folder; for classes put each image into t/CLASS/; for segmentation put "
        "images into t/images/ "
        "and masks of the same names into t/masks/",
    ),
    "an image without a mask": (
        mask_missing,
        "t",
        (),
        "t/images/3.png has no mask: there is no t/masks/3.png (or another image format); add it, or remove the image",
    ),
    "masks with numbers far apart": (
        numbers_far_apart,
        "t",
        (),
        "t: masks hold the numbers 0, 100, 200, too far apart to be classes in order; say which are, in order: "
        "--data.mask_values "
        "'[0, 100, 200]'",
    ),
    "chats with other keys": (
        lambda: write_chats("t.jsonl", role="speaker", content="value"),
        "t.jsonl",
        (),
        "column 'messages' holds messages with the keys speaker, value; write each as {role: user or assistant, "
        "content: ...}",
    ),
    "prompts with a third column": (
        lambda: (
            Path("t.jsonl").write_text(
                (json.dumps({"instruction": "translate", "context": "a word", "output": "ein Wort"}) + "\n") * 3
            ),
            None,
        )[1],
        "t.jsonl",
        (),
        "t.jsonl: instruction and output look like prompt and completion, and context would not be read; join them in "
        "your data; --data.input_column "
        "context puts it behind the prompt; or leave it out: --data.prompt_column instruction "
        "--data.completion_column output",
    ),
    "lines that may begin with labels": (
        lambda: (Path("t.txt").write_text("".join(f"{'ab'[n % 2]} {WORDS[n % 4]}\n" for n in range(20))), None)[1],
        "t.txt",
        (),
        "t.txt: each line begins with one of 2 words (a, b ...); say --task text-classification if they are labels, "
        "or --task "
        "causal-lm if it is plain text",
    ),
    "a table that is called a text": (
        lambda: (
            Path("t.txt").write_text("text|label\n" + "".join(f"{WORDS[n % 4]} {n}|{n % 2}\n" for n in range(20))),
            None,
        )[1],
        "t.txt",
        (),
        "t.txt: vertical bars divide all lines alike; if it is a table, rename it to t.csv; if it is plain text, say "
        "--task causal-lm",
    ),
    "a row without a label": (
        columns("text,label", lambda n: f"{WORDS[n % 4]},{'xy'[n % 2] if n != 7 else ''}"),
        "t.csv",
        (),
        "t.csv:9, column 'label': there is no label; fill it in, or drop the row (1 of 40 have none: "
        "data.missing_labels: drop leaves them out)",
    ),
    "a row of jsonl without a label": (
        jsonl(lambda n: {"text": f"{WORDS[n % 4]} {n}"} | ({"label": "xy"[n % 2]} if n != 4 else {})),
        "t.jsonl",
        (),
        "t.jsonl:5 has no 'label', which other rows have; fill it in, drop the row, or name another column: --label "
        "COLUMN",
    ),
    "a first row of jsonl without a label": (
        jsonl(lambda n: {"text": f"{WORDS[n % 4]} {n}"} | ({"mood": "xy"[n % 2]} if n else {})),
        "t.jsonl",
        (),
        "t.jsonl: no column looks like a label beside text (there is no other column; not in all rows: mood); name "
        "it: --label COLUMN; or "
        "--task causal-lm --text text for a language model of the texts",
    ),
    "labels as rows of zeros and ones": (
        jsonl(lambda n: {"text": f"{WORDS[n % 4]} {n}", "labels": [n % 2, 1, 0]}),
        "t.jsonl",
        (),
        "t.jsonl:1, column 'labels': [0, 1, 0] is a row of zeros and ones; write the labels that a text has, as a "
        "list of their names",
    ),
    "folders of training and test images in place of classes": (
        parts_in_place_of_classes,
        "t",
        (),
        "t: Testing, Training are no classes, but parts of the data, by their names; say which is trained on: "
        "accel-train finetune "
        "t/Training; after training: accel-train evaluate RUN t/Testing",
    ),
    "an empty text file": (
        lambda: Path("t.txt").touch(),
        "t.txt",
        (),
        "t.txt is empty; name text that a model can learn from",
    ),
    "one JSON document": (
        lambda: (Path("t.json").write_text("{}"), None)[1],
        "t.json",
        (),
        "t.json: finetune reads an array of objects, or one object on each line (.jsonl), and this is one document: "
        "write [row, row, ...]; "
        "SQuAD's own files: accel-train run question_answering --data.train t.json",
    ),
    "a task of another kind": (
        lambda: (Path("t.txt").write_text("text"), None)[1],
        "t.txt",
        ("--task", "text-classification"),
        "--task text-classification: t.txt is plain text, from which a language model learns (causal-lm); "
        "text-classification needs a table "
        "(.csv, .tsv, .jsonl, .parquet), lines of a label and a text, or images",
    ),
}


def test_a_table_as_spreadsheets_write_it_has_its_own_header_and_every_class_is_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [f"{WORDS[n % 4]} {n};{'good' if n % 2 else 'bad'}{' ' * (n == 7)};;" for n in range(60)]
    Path("t.csv").write_text("\n".join(["sep=;", "text;label;;", *rows]) + "\n")
    assert main(["finetune", "t.csv", "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "t.csv: 60 rows, columns text, label" in said
    assert "  3 classes: bad 30, good 29, 'good ' 1" in said
    assert any("f1_macro (1 of 60 are 'good ': accuracy would hardly count it)" in line for line in said)


def test_a_recipe_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_reviews()
    assert main(["finetune", "reviews.csv", "--dry-run", "--output_dir", "reviews.csv/run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: reviews.csv/run.yaml cannot be written (Not a directory); name another place: --output_dir"
    )


def test_commands_that_are_shown_can_be_pasted_where_a_name_has_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    write_reviews("my reviews.csv")
    assert main(["finetune", "my reviews.csv", "--dry-run"]) == 0
    assert "`accel-train run 'runs/my reviews.yaml'`" in capsys.readouterr().out
    assert "#   accel-train run 'runs/my reviews.yaml'" in Path("runs/my reviews.yaml").read_text().splitlines()
    assert main(["finetune", "my reviews.csv", "--dry-run", "--seed", "2"]) == 2
    assert "accel-train run 'runs/my reviews.yaml'; or write another" in capsys.readouterr().err


@pytest.mark.parametrize("what", WRONG)
def test_wrong_data_are_one_line_that_shows_the_flag(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    write, path, flags, said = WRONG[what]
    write()
    assert main(["finetune", path, "--dry-run", *flags]) == 2
    assert capsys.readouterr().err == f"error: {said.replace('{here}', str(Path.cwd()))}\n"
    assert not Path("runs").exists()


def test_a_table_of_numbers_with_classes_by_name_is_refused_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [",".join([*(f"{(n * k) % 7 / 3:.3f}" for k in (1, 2, 3, 4)), "RM"[n % 2]]) for n in range(60)]
    Path("sonar.csv").write_text("\n".join(rows) + "\n")
    assert main(["finetune", "sonar.csv", "--dry-run"]) == 2
    assert "no task for tables of numbers" in capsys.readouterr().err


def test_boxes_next_to_the_training_images_are_refused_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    write_digits("coco/train")
    for path in Path("coco/train").glob("*/*.png"):
        path.rename(Path("coco/train", path.name))
    for folder in Path("coco/train").glob("digit-*"):
        folder.rmdir()
    Path("coco/annotations").mkdir()
    Path("coco/annotations/instances.json").write_text('{"images": [], "annotations": [], "categories": []}')
    assert main(["finetune", "coco", "--dry-run"]) == 2
    assert "coco/annotations/instances.json holds boxes or polygons (COCO)" in capsys.readouterr().err
