"""`finetune`: what it finds in data of the user's own, the recipe that it writes, and what is wrong with such data.

One test trains; tests/docs/test_quick_starts.py trains data of every kind and opens the models with transformers.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from transformers import pipeline

from accel_train.data.builtin.digit_scenes import digit_scenes
from accel_train.data.text.tokenizers import byte_tokenizer
from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.experiments.finetune.recognise import recognise
from benchmarks.shapes import sharegpt_with_tools
from tests.support.boxes import write_yolo
from tests.support.commands import call, dry_run, refused_data
from tests.support.runs import environment, run_forked_command, write_base, write_corpus, write_jsonl, write_lines
from tests.support.text_tasks import write_questions, write_texts
from tests.support.wording import assert_golden, assert_wording

pytestmark = pytest.mark.usefixtures("empty_folder")
Write = Callable[[], Path | str]
"""Writes data, and returns what to give to finetune."""
QUICK = ("--schedule.max_steps", "2", "--log.progress", "false", "--data.cache_dir", "cache")
WORDS = ("the film was long and dull", "a bright and funny story", "nobody laughed at the end of it", "we all cried")


def write_reviews(name: str = "reviews.csv") -> Path:
    rows = [f"{number},{WORDS[number % 4]} {number},{'good' if number % 2 else 'bad'}" for number in range(60)]
    return write_lines(name, "id,review,stars", *rows)


def write_digits(folder: str = "digits") -> None:
    digits = load_digits()
    for number in range(40):
        path = Path(folder, f"digit-{digits.target[number] % 2}", f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(path)


def write_scenes(folder: str = "scenes", numbers: Callable[[Any], Any] = np.asarray) -> str:
    """Write 16 images and masks. `numbers` replaces the numbers of a mask."""
    for name, images in zip(("images", "masks"), digit_scenes(held_out=True)):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for number in range(16):
            image = images[number] if name == "images" else numbers(np.asarray(images[number])).astype(np.uint8)
            (image if name == "images" else Image.fromarray(image)).save(Path(folder, name, f"{number}.png"))
    return folder


def write_chats(name: str = "chats.jsonl", role: str = "role", content: str = "content") -> Path:
    said = [(f"what is {n % 7} plus {n}?", f"it is {n % 7 + n}.") for n in range(60)]
    turns = [zip(("user", "assistant"), each) for each in said]
    return write_jsonl(name, ({"messages": [{role: who, content: text} for who, text in each]} for each in turns))


def classes_in(printed: str) -> list[tuple[str, int]]:
    """The classes that finetune lists, with their numbers of samples."""
    ((number, listed),) = re.findall(r"^  (\d+) classes: (.+)$", printed, flags=re.MULTILINE)
    found = [each.rpartition(" ") for each in listed.split(", ")]
    assert len(found) == int(number)
    return [(name, int(count)) for name, _, count in found]


def test_a_csv_becomes_a_text_classifier() -> None:
    write_reviews()
    with Path("reviews.csv").open("a") as file:
        file.write("60,,good\n61,,bad\n")
    printed = call("finetune", "reviews.csv", "--model.config.num_buckets", "4096", *QUICK).out
    sizes = re.search(r"^data +(\d+) samples to train on, (\d+) held out;", printed, flags=re.MULTILINE)
    assert sizes is not None
    assert sum(map(int, sizes.groups())) == 62
    assert re.findall(r"reviews\.csv:\d+", printed) == ["reviews.csv:62"], "the first of the empty texts is named"
    use = 'pipeline("text-classification", model="runs/reviews/model", trust_remote_code=True)'
    for said in (use, "accel-train predict runs/reviews NEW.csv", "all settings and reasons: runs/reviews.yaml"):
        assert said in printed
    assert "optimizer.learning_rate" not in printed
    data = yaml.safe_load(Path("runs/reviews.yaml").read_text())["data"]
    assert (data["text_columns"], data["label_column"]) == (["review"], "stars")
    (answer,) = pipeline("text-classification", model="runs/reviews/model")("a funny story")
    assert answer["label"] in ("good", "bad")


@pytest.mark.parametrize("width", [60, 80])
def test_findings_wrap_between_words_at_the_columns_that_are_set(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reviews()
    plain, _ = dry_run("reviews.csv")
    assert max(map(len, plain.splitlines())) > 120, "without a terminal and COLUMNS, lines stay whole"
    monkeypatch.setenv("COLUMNS", str(width))
    wrapped, _ = dry_run("reviews.csv")
    assert max(map(len, wrapped.splitlines())) <= width
    assert "\n    " in wrapped, "what continues a line of two blanks hangs by two more"


def test_a_folder_of_images_becomes_an_image_classifier() -> None:
    """The folder has the name of embedded data, which are not what is asked for."""
    write_digits()
    _, recipe = dry_run("digits", named="digits: 40 images in 2 classes (digit-0, digit-1)")
    assert (recipe["task"], recipe["data"]["train"]) == ("image-classification", "./digits")
    assert recipe["data"]["image_size"] == 32


def test_a_table_of_image_files_and_labels_becomes_an_image_classifier() -> None:
    write_digits("t")
    rows = [f"{path.relative_to('t')},{path.parent.name}" for path in sorted(Path("t").rglob("*.png"))]
    write_lines("t/labels.csv", "file,kind", *rows)
    _, recipe = dry_run("t/labels.csv")
    facts = {"image_column": "file", "label_column": "kind", "image_size": 32}
    assert facts.items() <= recipe["data"].items()


@pytest.mark.parametrize("data", ["reviews.csv", "digits"])
def test_the_findings_need_no_torch(data: str) -> None:
    write_reviews()
    write_digits()
    program = (
        "import sys; from accel_train.cli.main import main; "
        "code = main(sys.argv[1:]); print(code, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    words = [sys.executable, "-c", program, "finetune", f"./{data}", "--output_dir", "runs/x", "--dry-run"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.slow
def test_two_processes_train_the_recipe_that_the_first_writes() -> None:
    write_chats()
    for said in ("first", "again"):
        done = run_forked_command(["finetune", "chats.jsonl", *QUICK], 2)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("chats.jsonl: looking") == 1
        assert ("runs/chats.yaml (as" in done.stdout) == (said == "again")
        assert done.stdout.count("Use it:") == 1


def test_chats_become_a_model_that_chats() -> None:
    write_chats()
    _, recipe = dry_run("chats.jsonl")
    assert recipe["task"] == "causal-lm"
    assert recipe["data"]["format"] == "chat"
    assert "{% generation %}" in recipe["data"]["chat_template"]


def test_chats_with_tools_need_a_template_that_shows_them_or_get_one() -> None:
    sharegpt_with_tools()
    _, recipe = dry_run("glaive_toolcall_en_demo.json")
    assert recipe["data"]["tools_column"] == "tools"
    assert "tools | tojson" in recipe["data"]["chat_template"]
    base, tokenizer = write_base(Path()), byte_tokenizer()
    words = ("glaive_toolcall_en_demo.json", "--output_dir", "runs/base", "--model", str(base))
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(str(base))
    refused_data(*words, named="does not show tools")
    tokenizer.chat_template = "{{ tools | tojson if tools }}{{ messages[0].content }}"
    tokenizer.save_pretrained(str(base))
    dry_run(*words)
    messages = [{"role": "assistant", "content": "a"}]
    write_jsonl("some.jsonl", [{"messages": messages, "tools": []}, {"messages": messages}])
    refused_data("some.jsonl", named="some.jsonl:2: no column 'tools'")


def test_a_text_file_becomes_a_language_model() -> None:
    Path("corpus.txt").write_text(" ".join(WORDS) * 60)
    _, recipe = dry_run("corpus.txt", named="corpus.txt: a text file, 5,760 characters")
    assert (recipe["task"], recipe["tokenizer"]) == ("causal-lm", "bytes")


def test_a_pretrained_model_is_trained_on_with_settings_for_its_size() -> None:
    base = write_base(Path())
    byte_tokenizer().save_pretrained(str(base))
    write_jsonl("rows.jsonl", ({"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(40)))
    printed, recipe = dry_run("rows.jsonl", "--model", str(base))
    assert printed.count("0.0378M") == 2, "the model's size is a reason"
    assert (recipe["model"]["pretrained"], recipe["optimizer"]["learning_rate"]) == ("base", 5e-4)
    assert recipe["data"]["format"] == "prompt_completion"


def test_the_same_command_again_keeps_the_recipe_and_one_with_other_settings_is_refused() -> None:
    write_reviews("my reviews.csv")
    again = ["finetune", "my reviews.csv", "--dry-run", "--optimizer.learning_rate", "1e-3"]
    path = Path("runs/my reviews.yaml")
    call(*again)
    written = path.read_text()
    told = [line.strip() for line in written.splitlines() if "learning_rate: " in line or "accel-train run" in line]
    assert_golden("\n".join(told))
    call(*again, named="recipe: runs/my reviews.yaml (as it was|`accel-train run 'runs/my reviews.yaml'`")
    refused_data("my reviews.csv", named="accel-train run 'runs/my reviews.yaml';|--output_dir DIR|--recipe FILE")
    assert path.read_text() == written
    assert not Path("runs/my reviews").exists(), "--dry-run trains nothing"


def test_a_table_without_header_in_latin_1_between_semicolons_is_read() -> None:
    rows = [f"{'gut' if number % 2 else 'schlecht'};der Film war sch\u00f6n lang {number}, ja" for number in range(40)]
    Path("filme.csv").write_bytes("\n".join(rows).encode("latin-1"))
    _, recipe = dry_run(
        "filme.csv", named="semicolons|byte 0xf6 at position 25|'schlecht'|2 classes: gut 20, schlecht 20"
    )
    facts = {"encoding": "cp1252", "header": "none", "text_columns": ["2"], "label_column": "1"}
    assert facts.items() <= recipe["data"].items()


def test_decimal_numbers_beside_a_text_are_predicted_as_numbers() -> None:
    write_jsonl("t.jsonl", ({"text": f"{WORDS[n % 4]} {n}", "score": n / 7} for n in range(40)))
    _, recipe = dry_run("t.jsonl")
    assert recipe["data"]["label_column"] == "score"
    assert (recipe["model"]["problem_type"], recipe["evaluate"]["metric_for_best_model"]) == ("regression", "pearson")
    assert "loss" not in recipe


@pytest.mark.parametrize(
    ("line", "flags", "lines", "reason"),
    [
        ("__label__{0} {1}", (), "fasttext", "__label__"),
        ("__label__{0} __label__x {1}", (), "fasttext_multi", "__label__"),
        ("{0} {1}", ("--task", "text-classification"), "label_text", "one of 2 words"),
    ],
)
def test_lines_with_labels_are_read_as_such(line: str, flags: tuple[str, ...], lines: str, reason: str) -> None:
    write_lines("t.txt", *(line.format("ab"[n % 2], WORDS[n % 4]) for n in range(40)))
    printed, recipe = dry_run("t.txt", *flags)
    assert re.search(rf"data\.lines: {lines} \(.*{reason}", printed)
    assert recipe["evaluate"]["metric_for_best_model"] == ("f1_macro" if lines == "fasttext_multi" else "accuracy")
    assert recipe["data"]["lines"] == lines


EMOTIONS = ("anger", "fear", "joy", "trust")


def write_emotions(name: str = "t.tsv", *, more: str = "", cell: str = "0") -> Path:
    """Write tweets in the form of SemEval's E-c. Nobody trusts. `cell` is row 7's joy."""
    rows = [
        [f"id-{n}", f"{WORDS[n % 4]} {n}", *([str(n % 9)] * bool(more)), n % 2, n // 2 % 2, cell if n == 7 else 1, 0]
        for n in range(40)
    ]
    rows[3][-2] = 0
    header = ["ID", "Tweet", *([more] * bool(more)), *EMOTIONS]
    return write_lines(name, *("\t".join(map(str, row)) for row in (header, *rows)))


def test_adjacent_columns_of_0_and_1_are_several_labels_and_one_of_them_can_be_chosen() -> None:
    write_emotions()
    found = "data.label_columns: [anger, fear, joy, trust] (4 adjacent columns hold only 0 and 1; "
    printed, recipe = dry_run("t.tsv", named=f"{found}|for one of them: --label anger)|leaves out column 'ID'")
    assert classes_in(printed) == [("joy", 38), ("anger", 20), ("fear", 20), ("trust", 0)]
    assert recipe["data"]["label_columns"] == list(EMOTIONS)
    assert recipe["evaluate"]["metric_for_best_model"] == "f1_macro"
    assert "label_column" not in recipe["data"]
    _, one = dry_run("t.tsv", "--label", "anger", "--output_dir", "runs/one")
    assert one["data"]["label_column"] == "anger"
    _, two = dry_run("t.tsv", "--label", "joy,anger", "--output_dir", "runs/two")
    assert two["data"]["label_columns"] == ["joy", "anger"], "the order is the user's"
    _, same = dry_run("t.tsv", "--data.label_columns", "[joy, anger]", "--output_dir", "runs/same")
    assert same["data"] == two["data"]


def test_columns_with_one_1_in_each_row_are_said_to_be_one_label() -> None:
    rows = [f"{WORDS[n % 4]} {n},{','.join('1' if n % 3 == k else '0' for k in range(3))}" for n in range(42)]
    write_lines("t.csv", "text,good,bad,mixed", *rows)
    assert_golden(next(line for line in dry_run("t.csv")[0].splitlines() if " one 1" in line))


def test_names_of_numeric_labels_are_found_in_the_table_or_in_a_file_beside_it() -> None:
    names = ["World", "Sports", "Business"]
    rows = [f"{n % 3 + 1},{WORDS[n % 4]} {n},{names[n % 3]}" for n in range(30)]
    write_lines("news.csv", "label,text,label_name", *rows)
    assert dry_run("news.csv")[1]["data"]["label_column"] == "label_name"
    write_lines("plain.csv", *(row.rpartition(",")[0] for row in rows))
    write_lines("classes.txt", *names)
    _, recipe = dry_run("plain.csv", named="(the lines of classes.txt)")
    assert {"label_names": names, "label_ids_from": 1}.items() <= recipe["data"].items()
    Path("news").mkdir()
    for file in ("plain.csv", "classes.txt", "classes"):  # the name of the last is a part of the reason for the names
        shutil.copy(Path(file if file != "classes" else "plain.csv"), Path("news", file))
    assert recognise(asked_of("news", minimal_recipe("news", []))).unused == ("files classes",)


def test_camvids_folders_are_trained_and_evaluated_on() -> None:
    for side in ("train", "val"):
        write_scenes(f"camvid/{side}")
        Path(f"camvid/{side}/masks").rename(f"camvid/{side}annot")
        Path(f"camvid/{side}/images").rename("camvid/images")
        Path(f"camvid/{side}").rmdir()
        Path("camvid/images").rename(f"camvid/{side}")
    _, recipe = dry_run("camvid", named="camvid/train and camvid/trainannot: 16 pairs")
    assert (recipe["data"]["train"], recipe["data"]["eval"]) == ("camvid/train", "camvid/val")


def test_a_list_of_images_and_masks_is_found_by_what_its_lines_name() -> None:
    write_scenes("s")
    write_lines("s/train.txt", *(f"/data/s/images/{n}.png /data/s/masks/{n}.png" for n in range(16)))
    assert dry_run("s/train.txt")[1]["task"] == "semantic-segmentation"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_found_by_its_zeros(encoding: str) -> None:
    write_reviews()
    Path("reviews.csv").write_bytes(Path("reviews.csv").read_text().encode(encoding))
    assert dry_run("reviews.csv")[1]["data"]["encoding"] == encoding


def test_black_and_white_masks_are_two_classes() -> None:
    write_scenes("photos", lambda mask: np.where(mask > 0, 255, 0))
    _, recipe = dry_run("photos")
    facts = {"mask_values": [0, 255], "label_names": ["background", "object"]}
    assert facts.items() <= recipe["data"].items()


def test_masks_whose_first_class_is_0_are_asked_whether_it_is_one() -> None:
    write_scenes("photos")
    hint = "(ADE20K): --data.reduce_labels true"
    printed, recipe = dry_run("photos", named="photos/images and photos/masks: 16 pairs")
    assert hint in printed
    assert recipe["task"] == "semantic-segmentation"
    assert hint not in dry_run("photos", "--data.reduce_labels", "true", "--output_dir", "runs/b")[0]


WALK = [("Ada", "B-PER"), ("Lovelace", "I-PER"), ("walks", "O"), ("to", "O"), ("Rome", "B-LOC")]


def write_conll(name: str, count: int = 30) -> Path:
    Path(name).parent.mkdir(exist_ok=True)
    sentences = [WALK[n % 3 :] for n in range(count)]
    return write_lines(name, *("".join(f"{word}\t{tag}\n" for word, tag in sentence) for sentence in sentences))


def question(number: int) -> dict[str, Any]:
    context = f"In {1900 + number} Ada lived in Rome."
    answers = {"text": ["Rome"], "answer_start": [context.index("Rome")]} if number % 3 else {}
    return {"question": "Where?", "context": context, "answers": answers or {"text": [], "answer_start": []}}


@pytest.mark.parametrize("name", ["t.conll", "t.bio", "t.iob", "t.txt"])
def test_words_with_tags_are_read_from_files(name: str) -> None:
    write_conll(name)
    printed, recipe = dry_run(name)
    # 10 sentences each begin at the first, second, and third word.
    assert classes_in(printed) == [("O", 60), ("B-LOC", 30), ("I-PER", 20), ("B-PER", 10)]
    assert (recipe["task"], recipe["evaluate"]["metric_for_best_model"]) == ("token-classification", "f1")
    assert recipe["model"]["config"]["model_type"] == "modernbert"


def test_lists_of_words_and_tags_are_columns_and_other_tags_are_named() -> None:
    rows = [{"tokens": [w for w, _ in WALK], "pos_tags": [len(w) for w, _ in WALK], "ner_tags": [t for _, t in WALK]}]
    write_jsonl("t.jsonl", rows * 20)
    _, recipe = dry_run("t.jsonl", named="leaves out column 'pos_tags'")
    assert (recipe["task"], recipe["data"]["tags_column"]) == ("token-classification", "ner_tags")
    _, recipe = dry_run("t.jsonl", "--data.tags_column", "pos_tags", "--output_dir", "runs/pos")
    assert recipe["evaluate"]["metric_for_best_model"] != "f1", "plain tags have no entities"


def test_squads_form_and_a_table_of_questions_become_question_answering() -> None:
    rows = [question(number) for number in range(30)]
    write_jsonl("t.jsonl", rows)
    Path("squad").mkdir()
    for part in ("train", "dev"):
        paragraphs = [
            {"context": row["context"], "qas": [{"id": str(n), "question": "Where?", "answers": row["answers"]}]}
            for n, row in enumerate(rows)
        ]
        Path(f"squad/{part}-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    for path in ("t.jsonl", "squad"):
        _, recipe = dry_run(path, named="10 questions without an answer")
        assert (recipe["task"], recipe["evaluate"]["metric_for_best_model"]) == ("question-answering", "f1")
    assert recipe["data"]["eval"] == "squad/dev-v2.0.json"


@pytest.mark.parametrize(("source", "target"), [("en", "de"), ("src", "tgt"), ("article", "highlights")])
def test_pairs_of_texts_are_read_in_the_order_of_their_names(source: str, target: str) -> None:
    table(f"{source},id,{target}", lambda n: f"{WORDS[n % 4]} {n},{n},{WORDS[(n + 1) % 4]}")()
    _, recipe = dry_run("t.csv", named="leaves out column 'id'")
    assert (recipe["task"], recipe["data"]["source_column"]) == ("seq2seq", source)
    assert recipe["data"]["target_column"] == target
    _, recipe = dry_run("t.csv", "--task", "seq2seq", "--text", target, "--label", source, "--output_dir", "runs/back")
    assert (recipe["data"]["source_column"], recipe["data"]["target_column"]) == (target, source)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "txt", "conll"])
def test_shards_that_match_a_pattern_are_one_data_set(suffix: str) -> None:
    Path("t").mkdir()
    for shard in range(3):
        texts = [f"{WORDS[n % 4]} {n}" for n in range(10)]
        lines = {
            "csv": ["text,label", *(f"{text},{n % 2}" for n, text in enumerate(texts))],
            "jsonl": [json.dumps({"text": text, "label": n % 2}) for n, text in enumerate(texts)],
            "txt": texts,
        }
        if suffix == "conll":
            write_conll(f"t/train-{shard}.conll", 10)
        else:
            write_lines(f"t/train-{shard}.{suffix}", *lines[suffix])
    printed, recipe = dry_run(f"t/train-*.{suffix}", "--output_dir", "runs/t", named="leaves out nothing")
    assert recipe["data"]["train"] == f"t/train-*.{suffix}"
    assert {"csv": "30 rows", "jsonl": "30 rows", "txt": "3 files", "conll": "30 sentences"}[suffix] in printed


def test_a_folder_of_save_to_disk_evaluates_on_its_validation_split() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"{WORDS[n % 4]} {n}" for n in range(40)], "label": ["a", "b"] * 20})
    datasets.DatasetDict({"train": rows, "validation": rows.select(range(4)), "test": rows}).save_to_disk("saved")
    rows.save_to_disk("alone")
    _, recipe = dry_run("saved", named="saved: 40 rows, columns text, label|leaves out split test")
    assert (recipe["data"]["train"], recipe["data"]["eval"]) == ("saved", "saved")
    _, recipe = dry_run("alone")
    assert "eval" not in recipe["data"]


def test_text_parts_of_a_chat_are_joined() -> None:
    sizes = []
    for name, parts in (("texts", False), ("parts", True)):
        said = [f"{WORDS[n % 4]} {n}" for n in range(20)]
        cut = [
            [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}] if parts else text for text in said
        ]
        chats = [[{"role": role, "content": each} for role in ("user", "assistant")] for each in cut]
        write_jsonl(f"{name}.jsonl", ({"messages": chat} for chat in chats))
        printed, _ = dry_run(f"{name}.jsonl")
        sizes.append(re.findall(r"for ([\d,]+ characters)", printed))
    assert sizes[0] == sizes[1] != []


def test_a_tiny_example_of_words_questions_and_pairs_trains() -> None:
    write_conll("w.conll")
    write_jsonl("q.jsonl", map(question, range(30)))
    write_lines("p.csv", "src,tgt", *(f"{WORDS[n % 4]} {n},{WORDS[n % 3]}" for n in range(30)))
    for path in ("w.conll", "q.jsonl", "p.csv"):
        call("finetune", path, *QUICK, named=f"accel-train predict runs/{path[0]} NEW{Path(path).suffix}")
        assert Path("runs", path[0], "report.html").is_file()
        assert Path("runs", path[0], "model/README.md").is_file()


def table(header: str, row: Callable[[int], str]) -> Write:
    return lambda: write_lines("t.csv", *([header] if header else []), *map(row, range(40)))


def jsonl(row: Callable[[int], dict[str, Any]]) -> Write:
    return lambda: write_jsonl("t.jsonl", map(row, range(40)))


def text(*lines: str) -> Write:
    return lambda: write_lines("t.txt", *lines)


def parts_in_place_of_classes() -> str:
    write_digits("t")
    for name, part in (("digit-0", "Validation"), ("digit-1", "Testing")):
        Path("t", part).mkdir()
        Path("t", name).rename(Path("t", part, name))
    return "t"


def image_outside_a_class() -> str:
    write_digits("t")
    next(Path("t").rglob("*.png")).rename("t/loose.png")
    return "t"


def mask_missing() -> str:
    write_scenes("t")
    Path("t/masks/3.png").unlink()
    return "t"


def boxes_beside_images() -> str:
    write_digits("t/train")
    for path in Path("t/train").glob("*/*.png"):
        path.rename(Path("t/train", path.name))
    for folder in Path("t/train").glob("digit-*"):
        folder.rmdir()
    Path("t/annotations").mkdir()
    Path("t/annotations/instances.json").write_text('{"images": [], "annotations": [], "categories": []}')
    return "t"


TEXTS = table("text,label", lambda n: f"{WORDS[n % 4]},{n % 2}")
NO_LABEL = "--label COLUMN|--task causal-lm --text text"
WRONG: dict[str, tuple[Write, str] | tuple[Write, str, str]] = {
    "three columns of text": (
        table("title,body,note,label", lambda n: f"{WORDS[n % 4]},{WORDS[n % 3]},{WORDS[n % 2]},{n % 2}"),
        "t.csv:|title, body, note|--text title, or --text title,body",
    ),
    "two columns of labels": (
        table("text,colour,size", lambda n: f"{WORDS[n % 4]} {n},{'rg'[n % 2]},{'SML'[n % 3]}"),
        "t.csv: 2 columns|--label colour or --label size",
    ),
    "two columns of 0 and 1": (
        table("text,rude,loud", lambda n: f"{WORDS[n % 4]} {n},{n % 2},{n // 2 % 2}"),
        "t.csv: 2 columns|--label rude or --label loud;|both together: --label rude,loud",
    ),
    "columns of 0 and 1 and another candidate": (
        lambda: write_emotions(more="rater"),
        "t.tsv: 4 columns|--label rater or --label anger|the 3 columns of 0 and 1 together|--label anger,fear,joy",
    ),
    "columns of 0 and 1 for a regression": (
        write_emotions,
        "t.tsv: 3 columns|--label fear or --label joy",
        "--model.problem_type regression",
    ),
    "a label column that is neither 0 nor 1": (
        lambda: write_emotions(cell="2"),
        "t.tsv:9, column 'joy'|\"2\" is not 0 or 1",
        "--label anger,joy",
    ),
    "a row without one of its labels": (
        lambda: write_emotions(cell=""),
        "t.tsv:9, column 'joy'|1 of 40|data.missing_labels: drop",
    ),
    "one of several label columns that is not there": (
        write_emotions,
        "--label jox: t.tsv|'joy'?",
        "--label anger,jox",
    ),
    "no column of labels": (table("id,text", lambda n: f"{n},{WORDS[n % 4]} {n}"), f"t.csv:|columns: id)|{NO_LABEL}"),
    "a label that is another one in each row": (
        table("text,label", lambda n: f"{WORDS[n % 4]},{n}"),
        "t.csv: column 'label'|40 different values|--label COLUMN|--model.problem_type regression",
    ),
    "a column that is not there": (TEXTS, "--label lable: t.csv|'label'?|text, label", "--label lable"),
    "a folder of weights that is not there": (TEXTS, "--model /no/such:|{here}", "--model /no/such"),
    "images outside of class folders": (image_outside_a_class, "t: t/loose.png|t/CLASS/|t/images/|t/masks/"),
    "an image without a mask": (mask_missing, "t/images/3.png|t/masks/3.png"),
    "masks with numbers far apart": (
        lambda: write_scenes("t", lambda mask: mask % 3 * 100),
        "t: masks|numbers 0, 100, 200,|--data.mask_values '[0, 100, 200]'",
    ),
    "chats with other keys": (
        lambda: write_chats("t.jsonl", "speaker", "value"),
        "column 'messages'|speaker, value|{role: user or assistant, content: ...}",
    ),
    "prompts with a third column": (
        jsonl(lambda n: {"instruction": "translate", "context": "a word", "output": "ein Wort"}),
        "t.jsonl: instruction and output|--data.input_column context|"
        "--data.prompt_column instruction --data.completion_column output",
    ),
    "lines that may begin with labels": (
        text(*(f"{'ab'[n % 2]} {WORDS[n % 4]}" for n in range(20))),
        "t.txt:|2 words (a, b|--task text-classification|--task causal-lm",
    ),
    "a table that is called a text": (
        text("text|label", *(f"{WORDS[n % 4]} {n}|{n % 2}" for n in range(5))),
        "t.txt: vertical bars|t.csv|--task causal-lm",
    ),
    "a row without a label": (
        table("text,label", lambda n: f"{WORDS[n % 4]},{'xy'[n % 2] if n != 7 else ''}"),
        "t.csv:9, column 'label'|1 of 40|data.missing_labels: drop",
    ),
    "a row of jsonl without a label": (
        jsonl(lambda n: {"text": f"{WORDS[n % 4]} {n}"} | ({"label": "xy"[n % 2]} if n != 4 else {})),
        "t.jsonl:5|'label'|--label COLUMN",
    ),
    "a first row of jsonl without a label": (
        jsonl(lambda n: {"text": f"{WORDS[n % 4]} {n}"} | ({"mood": "xy"[n % 2]} if n else {})),
        f"t.jsonl:|some rows: mood|{NO_LABEL}",
    ),
    "labels as rows of zeros and ones": (
        jsonl(lambda n: {"text": f"{WORDS[n % 4]} {n}", "labels": [n % 2, 1, 0]}),
        "t.jsonl:1, column 'labels'|[0, 1, 0]|zeros and ones",
    ),
    "folders of held-out images in place of classes": (
        parts_in_place_of_classes,
        "t: Testing, Validation|t/train/CLASS/|accel-train finetune t/Validation",
    ),
    "an empty text file": (text(), "t.txt is empty"),
    "one JSON document": (lambda: write_lines("t.json", "{}"), "t.json|.jsonl|SQuAD|[row, row, ...]"),
    "a task of another kind": (
        text("text"),
        "--task text-classification: t.txt|causal-lm|.csv, .tsv, .jsonl, .parquet",
        "--task text-classification",
    ),
    "a table of numbers with classes by name": (
        table("", lambda n: ",".join([*(f"{(n * k) % 7 / 3:.3f}" for k in (1, 2, 3, 4)), "RM"[n % 2]])),
        "t.csv:|tables of numbers|XGBoost",
    ),
    "several lists of tags": (
        jsonl(lambda n: {"tokens": ["a", "b"], "xpos": ["x", "y"], "upos": ["x", "z"]}),
        "t.jsonl: columns xpos, upos|--data.tags_column xpos",
    ),
    "an answer that is not in its text": (
        jsonl(lambda n: question(1) | {"answers": {"text": ["Bonn"], "answer_start": [0]}}),
        "t.jsonl:1|Bonn|answer_start",
    ),
    "a chat with an image": (
        jsonl(lambda n: {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.jpg"}]}]}),
        "t.jsonl:1: column 'messages', message 1|a.jpg|{type: text, text: ...}",
    ),
    "a pair of texts beside a third": (
        table("src,tgt,note", lambda n: ",".join(f"{WORDS[k]} {n}" for k in range(3))),
        "t.csv: columns src, tgt, note|--text src",
    ),
    "columns that do not fit the task": (
        TEXTS,
        "--task question-answering needs|question, context and answers|t.csv has: text, label",
        "--task question-answering",
    ),
    "boxes next to the training images": (boxes_beside_images, "t/annotations/instances.json|lists no images"),
    "a recipe that cannot be written": (
        TEXTS,
        "t.csv/run.yaml|(Not a directory)|--output_dir DIR|--recipe FILE",
        "--output_dir t.csv/run",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_data_are_one_line_that_shows_the_flag(what: str) -> None:
    write, facts, *flags = WRONG[what]
    said = refused_data(str(write()), *shlex.split(" ".join(flags)), named=facts.replace("{here}", str(Path.cwd())))
    assert re.fullmatch("error: .+\n", said)
    assert not Path("runs").exists()


def test_a_table_as_spreadsheets_write_it_has_its_own_header_and_every_class_is_listed() -> None:
    rows = [f"{WORDS[n % 4]} {n};{'good' if n % 2 else 'bad'}{' ' * (n == 7)};;" for n in range(60)]
    write_lines("t.csv", "sep=;", "text;label;;", *rows)
    printed, recipe = dry_run("t.csv", "--model.problem_type", "single_label", named="(1 of 60 are 'good '")
    assert_golden(next(line for line in printed.splitlines() if line.startswith("t.csv: 60 ")))
    assert classes_in(printed) == [("bad", 30), ("good", 29), ("'good '", 1)]
    assert recipe["evaluate"]["metric_for_best_model"] == "f1_macro"


def _with_test_data() -> str:
    for name in ("train", "val", "test"):
        write_reviews(f"{name}.csv")
    Path("notes.md").write_text("about\n")
    return "."


def _with_missing_labels() -> Path:
    path = write_reviews()
    path.write_text(path.read_text().replace("2,bad", "2,"))
    return path


def _with_classes_of_images() -> str:
    write_digits("images/train")
    write_digits("images/val")
    Path("images/notes.md").write_text("about\n")
    return "images"


FORMS: dict[str, Write] = {
    "a table with ids": write_reviews,
    "labels are missing": _with_missing_labels,
    "numbers": lambda: write_texts(Path("t.csv"), label=lambda number: number / 3),
    "parts": _with_test_data,
    "lines": lambda: write_lines("t.txt", *(f"{n % 2}\t{WORDS[n % 4]} {n}" for n in range(60))),
    "pairs": lambda: write_jsonl("p.jsonl", ({"en": f"{n} {WORDS[n % 4]}", "de": f"so {WORDS[0]}"} for n in range(40))),
    "words": lambda: write_conll("w.conll"),
    "questions": lambda: write_questions(Path("q.jsonl")),
    "embeddings": lambda: write_jsonl(
        "e.jsonl", ({"query": f"{n} {WORDS[n % 4]}", "document": f"{n}"} for n in range(40))
    ),
    "chats": write_chats,
    "plain text": lambda: write_lines("t.txt", *["".join(WORDS)] * 40),
    "files of text": lambda: write_corpus(Path()).parent,
    "images by class": _with_classes_of_images,
    "masks": write_scenes,
    "boxes": lambda: write_yolo("yolo", ("train", "val")).parent,
}
FLAGS = {"labels are missing": ("--data.missing_labels", "drop"), "plain text": ("--task", "causal-lm")}


@pytest.mark.parametrize("form", FORMS)
def test_the_sentence_before_the_run_names_what_is_learned_and_what_is_left_out(form: str) -> None:
    printed, _ = dry_run(str(FORMS[form]()), *FLAGS.get(form, ()))
    (sentence,) = (line for line in printed.splitlines() if line.startswith("Learns "))
    # Two lines of 88 columns.
    assert len(sentence) <= 176
    assert_wording("learns", f"finetune: {form}", sentence)
