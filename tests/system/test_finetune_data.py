"""Reported faults of reading data with `finetune`: its input is read right, or refused."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from accel_train.core.json_io import read_json
from accel_train.data.delimited import read_delimited
from accel_train.data.tables import read_rows
from accel_train.recipe.data import Data
from accel_train.recipe.loader import load_recipe
from accel_train.tasks.causal_lm.data import check_row, columns_of
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from accel_train.tasks.text_classification.data import load_labelled_texts
from tests.support.commands import call, dry_run, refused_data
from tests.support.runs import sources_of, write_jsonl, write_lines
from tests.support.wording import assert_golden

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_data_01_a_cut_letter_does_not_turn_utf8_into_mojibake() -> None:
    words = {"ru": "поезд", "el": "τρένο"}
    rows = [f"{word} {number},{name}" for name, word in words.items() for number in range(20)]
    whole = "\n".join(["text,language", *rows, ""]).encode()
    cut = whole.replace("поезд 7".encode(), "поезд".encode()[:-1])
    assert len(cut) < len(whole)
    Path("cut.csv").write_bytes(cut)
    refused_data("cut.csv", named="cut.csv:9:|data.encoding_errors: replace")
    assert not Path("runs").exists()
    assert "encoding" not in dry_run("cut.csv", "--data.encoding_errors", "replace")[1]["data"]
    Path("whole.csv").write_bytes(whole)
    refused_data("whole.csv", "--data.encoding", "latin-1", named="whole.csv is UTF-8")
    legacy = whole.decode().replace("поезд", "schön").replace("τρένο", "für").encode("latin-1")
    Path("legacy.csv").write_bytes(legacy)
    assert dry_run("legacy.csv")[1]["data"]["encoding"] == "cp1252"


def test_data_02_a_tsv_without_csv_quoting_is_read() -> None:
    rows = [f"{'spam' if n % 2 else 'ham'}\tsee you at lunch number {n}" for n in range(18)]
    rows[5] = 'spam\t"Quoted" and more'  # strict csv refuses it
    write_lines("sms.tsv", "label\ttext", *rows)
    dry_run("sms.tsv", named="sms.tsv: 18 rows")
    read = list(read_delimited(Path("sms.tsv"), Data(train="sms.tsv")))
    assert read[6].fields == ["spam", '"Quoted" and more']
    refused_data("sms.tsv", "--data.quoting", "csv", "--output_dir", "runs/b", named="data.quoting: none")


def test_data_03_rows_without_a_label_are_counted_and_dropped_on_request() -> None:
    rows = [f"a {word} day number {n},{word if n != 7 else ''}" for n in range(20) for word in ("good", "bad")]
    write_lines("reviews.csv", "words,Kind", *rows)
    refused_data("reviews.csv", named="reviews.csv:16, column 'Kind'|2 of 40|data.missing_labels: drop")
    dry_run("reviews.csv", "--data.missing_labels", "drop", named="2 rows without|2 classes: bad 19, good 19")
    texts = load_labelled_texts(load_recipe(Path("runs/reviews.yaml")), None)
    assert len(texts.train) + len(texts.eval or []) == 38
    assert any("2 of 40 rows" in note for note in texts.notes)


def _save(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def _photo(number: int, edge: int = 48) -> Any:
    return np.random.default_rng(number).integers(0, 256, (edge, edge, 3))


def test_data_04_ids_are_the_images_of_a_folder_and_never_texts() -> None:
    ids = [f"{number:08x}a{number % 7}" for number in range(1, 13)]
    write_lines("labels.csv", "id,label", *(f"{name},{('pug', 'beagle')[n % 2]}" for n, name in enumerate(ids)))
    refused_data("labels.csv", named="'id'")
    for number, name in enumerate(ids):
        _save(Path("train", name + (".jpg", ".png")[number % 2]), _photo(number, 100))
        _save(Path("test", f"other{number}.jpg"), _photo(number + 50, 100))
    for path in ("labels.csv", "."):
        _, recipe = dry_run(path, "--output_dir", "runs/dogs", named="test/")
    assert (recipe["task"], recipe["data"]["image_column"]) == ("image-classification", "id")
    assert recipe["data"]["image_size"] == 128
    call("plan", "runs/dogs.yaml")


def _chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(12)]


def test_data_05_bad_examples_are_not_learned() -> None:
    chats = _chats()
    write_jsonl("kto.jsonl", [{"messages": chat, "label": n % 3 > 0} for n, chat in enumerate(chats)])
    refused_data("kto.jsonl", named="'label' is false in 4 of 12 rows")
    write_jsonl("pairs.jsonl", [{"prompt": f"{n}?", "completion": "yes", "label": n % 2 > 0} for n in range(12)])
    refused_data("pairs.jsonl", named="'label' is false in 6 of 12 rows")
    write_jsonl("dpo.jsonl", [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(12)])
    flags = ("--data.prompt_column", "prompt", "--data.completion_column", "chosen")
    refused_data("dpo.jsonl", named=f"DPO|{' '.join(flags)}")
    dry_run("dpo.jsonl", *flags, named="leaves out column 'rejected'")
    assert not Path("runs/kto.yaml").exists()


def test_data_06_columns_of_zeros_and_ones_are_several_labels() -> None:
    rows = [f"{n},this is comment number {n},{n % 2},{n // 2 % 2},{n // 4 % 2}" for n in range(40)]
    write_lines("toxic.csv", "id,comment,toxic,threat,insult", *rows)
    # The flag chooses one of them.
    data = dry_run("toxic.csv", named="--label toxic")[1]["data"]
    assert (data["text_columns"], data["label_columns"]) == (["comment"], ["toxic", "threat", "insult"])


_WORDS = ("the film was long and dull", "a bright and funny story", "few people laughed at the end", "we all cried")


def _aclimdb(folder: str) -> None:
    for part in ("train", "test"):
        for label in ("pos", "neg", *(["unsup"] if part == "train" else [])):
            Path(folder, part, label).mkdir(parents=True)
            for number in range(8):
                text = f"{label} {_WORDS[number % 4]} {number}" + "\nsecond line" * (number == 3)
                Path(folder, part, label, f"{number}.txt").write_text(text)
    Path(folder, "train", "urls_pos.txt").write_text("http://x\n")
    Path(folder, "README").write_text("about")
    Path(folder, "imdb.vocab").write_text("the\na\n")


def test_data_07_class_folders_of_texts_are_labels() -> None:
    _aclimdb("imdb")
    quick = ("--schedule.max_steps", "2", "--log.progress", "false", "--model.config.num_buckets", "4096")
    printed = call("finetune", "imdb", *quick).out
    recipe = yaml.safe_load(Path("runs/imdb.yaml").read_text())
    assert recipe["task"] == "text-classification"
    assert recipe["data"]["train"] == ["imdb/train/neg", "imdb/train/pos"]
    assert "eval" not in recipe["data"]
    assert "accel-train evaluate runs/imdb imdb/test\n" in printed
    for name in ("README", "imdb.vocab", "train/urls_pos.txt", "train/unsup/* (8 files)"):
        assert name in printed[printed.index("leaves out ") :].splitlines()[0]
    facts = read_json(Path("runs/imdb/summary.json"))["data"]
    assert facts["num_train"] + facts["num_eval"] == 16
    assert facts["label_names"] == ["neg", "pos"]
    call("run", "runs/imdb.yaml")  # finished: it is found as it was
    call("evaluate", "runs/imdb", "imdb/test")
    call("predict", "runs/imdb", "imdb/test", "--out", "predicted.csv")
    with open("predicted.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["id"], row["true_label"]) for row in rows)[0] == ("imdb/test/neg/0.txt", "neg")
    assert len(rows) == 16
    assert dry_run("imdb", "--task", "causal-lm", "--output_dir", "runs/lm")[1]["data"]["train"] == "imdb/train"
    Path("flat").mkdir()
    for part in ("pos", "neg"):
        Path("imdb/test", part).rename(Path("flat", part))
    data = dry_run("flat")[1]["data"]
    assert (data["train"], data["lines"]) == ("flat", "folder_names")


def test_data_08_a_quote_in_a_tsv_swallows_no_rows() -> None:
    rows = [f"{'spam' if n % 2 else 'ham'}\tsee you at lunch number {n}" for n in range(18)]
    rows[2], rows[9] = 'ham\t"good things take time and so on', 'spam\twin a "prize" now"'
    write_lines("quotes.tsv", "label\ttext", *rows)
    dry_run("quotes.tsv", named="quotes.tsv: 18 rows")
    names = ["label", "text"]
    read = list(read_delimited(Path("quotes.tsv"), Data(train="quotes.tsv")))
    assert [record.fields for record in read] == [names, *(row.split("\t") for row in rows)]
    assert len(list(read_delimited(Path("quotes.tsv"), Data(train="", quoting="none")))) == 19
    Path("multi.tsv").write_text('label\ttext\nham\t"one\nand two"\nspam\t"said ""hi"""\n')  # as csv writes it
    read = list(read_delimited(Path("multi.tsv"), Data(train="multi.tsv")))
    assert [record.fields for record in read] == [names, ["ham", "one\nand two"], ["spam", 'said "hi"']]


PAIRS_OF_NAMES = (
    ("image", "label"),
    ("image", "mask"),
    ("Images", "Masks"),
    ("imgs", "masks"),
    ("img", "mask"),
    ("input", "target"),
    ("images", "gt"),
    ("original", "segmented"),
    ("JPEGImages", "SegmentationClassPNG"),
    ("images_prepped_train", "annotations_prepped_train"),
)


def _pairs_of_images(folder: Path, images: str, masks: str, count: int = 6) -> None:
    for number in range(count):
        _save(folder / images / f"{number}.png", _photo(number))
        _save(folder / masks / f"{number}.png", (_photo(number)[..., 0] > 127) * 255)


def test_data_09_images_with_masks_are_pairs_and_never_two_classes() -> None:
    for number, (images, masks) in enumerate(PAIRS_OF_NAMES):
        _pairs_of_images(Path(f"set{number}"), images, masks)
        _, recipe = dry_run(f"set{number}", named="leaves out nothing")
        assert recipe["task"] == "semantic-segmentation"
        assert recipe["data"]["mask_values"] == [0, 255]
    _pairs_of_images(Path("unknown"), "left", "right")
    for folder in ("set0", "set2", "unknown"):
        call("plan", "image_classification", "--data.train", folder, code=2)
    refused_data("unknown", named="left/|right/")
    dry_run("unknown", "--task", "image-classification", "--data.label_names", "[left, right]")


def test_data_10_tools_inputs_and_parts_of_messages_are_read_or_refused() -> None:
    chats = _chats()
    write_jsonl("tools.jsonl", [{"messages": chat, "tools": [{"type": "function"}]} for chat in chats])
    refused_data("tools.jsonl", named="tools")
    alpaca = [{"instruction": "To French", "input": f"cat {n}" if n else "", "output": f"chat {n}"} for n in range(12)]
    Path("alpaca.json").write_text(json.dumps(alpaca))
    write_jsonl("alpaca.jsonl", alpaca)
    for name in ("alpaca.json", "alpaca.jsonl"):
        flags = ("--output_dir", f"runs/{name}", "--data.eval_fraction", "0")
        dry_run(name, *flags, named="leaves out nothing")
        recipe = load_recipe(Path(f"runs/{name}.yaml"))
        (source,) = sources_of(recipe.data)
        parts = [check_row(row, recipe.data).parts for row in read_rows(source, columns_of(recipe.data), recipe.data)]
        assert parts == [("To French", "chat 0"), *((f"To French\n\ncat {n}", f"chat {n}") for n in range(1, 12))]
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]} for chat in chats]
    Path("sharegpt.json").write_text(json.dumps(sharegpt))
    write_jsonl("lines.json", sharegpt)
    in_parts = [[{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat] for chat in chats]
    write_jsonl("parts.jsonl", [{"messages": chat} for chat in in_parts])
    for name in ("sharegpt.json", "lines.json", "parts.jsonl"):
        dry_run(name, "--output_dir", f"runs/{name}")
        recipe = load_recipe(Path(f"runs/{name}.yaml"))
        (source,) = sources_of(recipe.data)
        rows = read_rows(source, columns_of(recipe.data), recipe.data)
        assert [check_row(row, recipe.data).parts for row in rows] == chats
    in_parts[3][0]["content"] = [{"type": "image_url", "image_url": "x"}]
    write_jsonl("parts.jsonl", [{"messages": chat} for chat in in_parts])
    refused_data("parts.jsonl", "--output_dir", "runs/other", named="parts.jsonl:4")


def test_data_11_the_size_of_images_comes_from_their_bytes() -> None:
    rows = []
    for number in range(8):
        file = io.BytesIO()
        Image.new("RGB", (400, 400), (number * 9, 40 * (number % 2), 200)).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": ["cat", "dog"][number % 2]})
    pq.write_table(pa.Table.from_pylist(rows), "pictures.parquet")
    assert dry_run("pictures.parquet")[1]["data"]["image_size"] == 128
    write_lines("labels.csv", "file,label", *(f"{n}.png,{'ab'[n % 2]}" for n in range(8)))
    refused_data("labels.csv")
    assert not Path("runs/labels.yaml").exists()


def _shard(path: str, numbers: range) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    names = {"label": {"names": ["negative", "positive"], "_type": "ClassLabel"}}
    table = pa.table({"text": [f"{_WORDS[n % 4]} {n}" for n in numbers], "label": [n % 2 for n in numbers]})
    schema = {"huggingface": json.dumps({"info": {"features": {"text": {"_type": "Value"}, **names}}})}
    pq.write_table(table.replace_schema_metadata(schema), path)


def test_data_12_shards_are_one_table_and_test_shards_are_left_alone() -> None:
    for number in range(2):
        _shard(f"hub/data/train-{number:05d}-of-00002.parquet", range(20 * number, 20 * number + 20))
    _shard("hub/data/test-00000-of-00001.parquet", range(50, 60))
    held_out = "accel-train evaluate runs/hub 'hub/data/test-*-of-00001.parquet'"
    dry_run("hub", named=f"40 rows|2 classes: negative 20, positive 20|{held_out}")
    recipe = load_recipe(Path("runs/hub.yaml"))
    assert recipe.data.train == "hub/data/train-*-of-00002.parquet"
    texts = load_labelled_texts(recipe, None)
    assert texts.scheme.names == ("negative", "positive")
    assert len(texts.train) + len(texts.eval or []) == 40
    dry_run("hub/data/train-*.parquet", "--output_dir", "runs/b")
    printed, _ = dry_run("hub/data/train-00000-of-00002.parquet", "--output_dir", "runs/c")
    assert "train-00001-of-00002.parquet" in printed.split("leaves out")[-1]


def test_data_13_a_readme_is_not_the_corpus() -> None:
    Path("polarity").mkdir()
    Path("polarity/README.txt").write_text("about these data\n" * 20)
    for suffix in ("pos", "neg"):
        Path("polarity", f"rt.{suffix}").write_text("a text\n" * 20)
    assert "README" not in refused_data("polarity", named="rt.neg, rt.pos")
    Path("polarity/rt.pos").rename("polarity/more.txt")
    dry_run("polarity", named="1 file, 140 characters|leaves out files README.txt, rt.neg")
    (source,) = sources_of(Data(train="polarity"))
    assert [path.name for path in source.files] == ["more.txt"]
    assert any("README.txt" in note for note in source.notes)


def test_data_14_several_labels_in_a_cell_are_not_a_class() -> None:
    tags = ("python", "python,sql", "css,html", "python,sql")
    write_lines("tags.csv", "text,tags", *(f'how do I do {n} here,"{tags[n % 4]}"' for n in range(24)))
    refused_data("tags.csv", named="commas|--model.problem_type single_label")
    dry_run("tags.csv", "--model.problem_type", "single_label")
    lists = ("['css', 'html']", "['css']")
    write_lines("lists.csv", "text,tags", *(f'how do I do {n} here,"{lists[n % 2]}"' for n in range(24)))
    dry_run("lists.csv", named="2 classes: css 24, html 12")
    kept = (("Bonn, NW", "Washington, DC"), ("Austin, TX", "Dallas, TX"), ("(none)", "good", "bad"))
    for number, names in enumerate(kept):
        rows = (f'a text {n} here,"{names[n % len(names)]}"' for n in range(24))
        write_lines(f"kept{number}.csv", "text,place", *rows)
        dry_run(f"kept{number}.csv")


def test_test_data_next_to_the_training_data_is_named() -> None:
    for name in ("train", "test", "val"):
        rows = [f"{n},{_WORDS[n % 4]} {n},{'xy'[n % 2]}" for n in range(40)]
        write_lines(f"{name}.csv", "id,text,label", *rows)
    unused = dry_run("train.csv")[0].split("leaves out ")[1]
    assert_golden(unused.partition("\n")[0])
    printed, recipe = dry_run(".", "--output_dir", "runs/b")
    assert "data.eval_fraction" not in printed
    data = recipe["data"]
    assert (data["train"], data["eval"]) == ("train.csv", "val.csv")
    assert "eval_fraction" not in data


def test_pairs_that_share_a_side_with_training_pairs_are_counted() -> None:
    rows = [f"question {n // 10} of many,answer {n} to it,{n % 2}" for n in range(100)]
    write_lines("pairs.csv", "q,a,label", *rows)
    dry_run("pairs.csv", "--text", "q,a")
    texts = load_labelled_texts(load_recipe(Path("runs/pairs.yaml")), None)
    held_out, trained = texts.eval or [], {row.texts[0] for row in texts.train}
    count = sum(row.texts[0] in trained for row in held_out)
    assert count > 0
    assert [
        note
        for note in texts.notes
        if note.startswith(f"{count} of {len(held_out)} evaluation pairs") and "'q'" in note
    ]
    assert not any("'a'" in note for note in texts.notes)


def test_the_steps_that_are_announced_are_those_that_run() -> None:
    rows = [f"{_WORDS[n % 4]} {n},{'xy'[n % 2]}" for n in range(6_000)]
    write_lines("many.csv", "text,label", *rows)
    said = re.search(r"schedule.num_epochs: (\d+) \(about ([\d,]+) steps of (\d+)\)", dry_run("many.csv")[0])
    assert said is not None
    epochs, steps, batch = (int(number.replace(",", "")) for number in said.groups())
    texts = load_labelled_texts(load_recipe(Path("runs/many.yaml")), None)
    assert steps == pytest.approx(epochs * len(texts.train) / batch, rel=0.03)


def test_tables_of_numbers_are_refused() -> None:
    write_lines("sonar.csv", *(f"{n / 7:.3f},{n / 3:.3f},{n % 2}" for n in range(40)))
    for flags in ((), ("--text", "1", "--label", "3")):
        refused_data("sonar.csv", *flags, named="tables of numbers")


BOXES = {
    "a/1.txt": "0 0.5 0.5 0.2 0.3\n",
    "a/1.xml": "<annotation><object><bndbox></bndbox></object></annotation>",
    "a/1.json": '{"shapes": [], "version": "5"}',
    "instances_train.json": '{"images": [], "annotations": [], "categories": []}',
}

NO_BOXES = {"a/1.txt": "7 12 30 8 4", "a/1.json": '{"caption": "x"}', "annotations.json": '{"1.png": "a"}'}


def test_boxes_between_images_are_refused_and_captions_and_lists_of_labels_are_not() -> None:
    for number in range(12):
        _save(Path("set", "ab"[number % 2], f"{number}.png"), _photo(number))
    for name, text in NO_BOXES.items():
        Path("set", name).write_text(text)
    dry_run("set")
    for name, text in BOXES.items():
        before = Path("set", name).read_text() if name in NO_BOXES else None
        Path("set", name).write_text(text)
        assert name in refused_data("set")
        assert name in call("plan", "image_classification", "--data.train", "set", code=2).err
        Path("set", name).unlink() if before is None else Path("set", name).write_text(before)


def test_folders_that_a_table_has_other_classes_for_are_not_classes() -> None:
    for number in range(16):
        _save(Path("set", f"part_{number % 2}", f"scan{number}.png"), _photo(number))
    rows = [f"scan{n},{('mole', 'wart')[n // 2 % 2]},{n % 3}" for n in range(16)]
    write_lines("set/metadata.csv", "image_id,dx,age", *rows)
    refused_data("set", named="'image_id'")
    dry_run("set", "--task", "image-classification", "--output_dir", "runs/a")
    write_lines("set/metadata.csv", "image_id,dx", *(f"scan{n},class {n % 2}" for n in range(16)))
    Path("set/broken.csv").write_text('a,b\n"1')
    dry_run("set", "--output_dir", "runs/b", named="metadata.csv")


def test_train_and_train_masks_are_images_and_masks() -> None:
    for number in range(6):
        _save(Path("set/train", f"{number}.png"), _photo(number))
        _save(Path("set/train_masks", f"{number}_mask.png"), (_photo(number)[..., 0] > 127) * 255)
    assert dry_run("set")[1]["task"] == "semantic-segmentation"


@pytest.mark.parametrize("held_out, num_eval, num_shown", [("eval", 8, 8), ("Test", None, 8), (None, None, 16)])
def test_only_the_folder_train_is_trained_on(held_out: str | None, num_eval: int | None, num_shown: int) -> None:
    for number in range(24):
        part = "train" if number < 16 else held_out
        if part is not None:
            _save(Path("set", part, "ab"[number % 2], f"{number}.png"), _photo(number))
    dry_run("set")
    sets = read_labelled_images(load_recipe(Path("runs/set.yaml")).data)
    assert sets.label_names == ("a", "b")
    assert sets.eval is not None
    assert len(sets.eval) == (num_eval or 16 - len(sets.train))
    shown = read_labelled_images(ImageClassificationData(train="set", eval="set"))
    assert shown.label_names == ("a", "b")
    assert len(shown.train) == num_shown


@pytest.mark.parametrize("encoding", ["gbk", "cp1251", "koi8_r"])
def test_letters_of_other_scripts_are_not_read_as_western_ones(encoding: str) -> None:
    text = "这个电影很好看" if encoding == "gbk" else "это хороший фильм"
    rows = "".join(f"{text} {number},{'ab'[number % 2]}\n" for number in range(40))
    Path("d.csv").write_bytes(("text,label\n" + rows).encode(encoding))
    refused_data("d.csv", named="data.encoding")
    dry_run("d.csv", "--data.encoding", encoding)


def test_a_mark_for_one_class_is_not_its_name() -> None:
    rows = (f"gj04\t{n % 2}\t{'*' if n % 2 == 0 else ''}\tthe words of sentence {n}" for n in range(40))
    write_lines("cola.tsv", *rows)
    dry_run("cola.tsv")
    assert load_recipe(Path("runs/cola.yaml")).data.label_column == "2"


def test_choices_system_prompts_and_weights_are_not_left_out() -> None:
    asked = [{"question": f"what is number {n} of the list", "answer": n % 2} for n in range(40)]
    refused: dict[str, list[dict[str, Any]]] = {
        "choices": [{**row, "choices": ["this", "that"]} for row in asked],
        "letters": [{**row, "choices": ["this", "that"], "answer": "AB"[row["answer"]]} for row in asked],
        "system_prompt": [
            {"system_prompt": "Be kind.", "question": row["question"], "response": "a reply to it"} for row in asked
        ],
        "weight 0": [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]}
            for weight in (1, 0)
        ],
    }
    for said, refused_rows in refused.items():
        write_jsonl("d.jsonl", refused_rows)
        assert said.replace("letters", "choices") in refused_data("d.jsonl")
    write_jsonl("d.jsonl", [{**row, "answer": f"it is {row['answer']}"} for row in asked])
    dry_run("d.jsonl")
