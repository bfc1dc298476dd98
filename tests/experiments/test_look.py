"""`accel-train data` names defects that are planted into small data sets, and nothing else. It names nothing on the
embedded sets.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from accel_train.checkpoint.run_recipe import named_recipe
from accel_train.cli.main import main
from accel_train.experiments.look import look as look_module
from accel_train.experiments.look import units
from accel_train.experiments.look.checks import KINDS
from accel_train.experiments.look.look import Look, look_at
from accel_train.experiments.look.units import near_pairs
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Collated, Task, TaskData
from accel_train.training import output
from tests.cli.test_json import VALIDATOR
from tests.support.detectors import YOLOS
from tests.support.runs import SCENES, TINY_MODEL, recipe_dict, tiny_recipe, write_jsonl, write_recipe_file, write_rows
from tests.support.text_tasks import BERT

Row = dict[str, Any]
Settings = dict[str, Any]
Rows = list[Row]
Plant = Callable[[Rows, Rows, Settings], None]

TEA = "leaf cup steam green black water pot milk sugar spoon kettle brew sip warm taste garden hill bush harvest tray"
IRON = "ore forge hammer anvil rust steel furnace coal heat bar nail chain bridge rail bolt mill slag cast weld plate"
VOCABULARY = {"tea": TEA.split(), "iron": IRON.split()}
SIDE = 16
"""Pixels of an image's edge."""


def rows_of(count: int, seed: int) -> Rows:
    """Texts of 20 words about two topics, none of which is near another."""
    draw, names = random.Random(seed), list(VOCABULARY)
    return [
        {"text": " ".join(draw.choices(VOCABULARY[names[number % 2]], k=20)), "label": names[number % 2]}
        for number in range(count)
    ]


def looked(folder: Path, **sections: Any) -> Look:
    return look_at(
        Recipe.model_validate(recipe_dict(folder, windows="sequence_length" in sections["data"], **sections))
    )


def of_texts(folder: Path, plant: Plant) -> Look:
    """Look at a table of 320 texts and one of 160 to evaluate on. `plant` changes rows and the settings of `data`."""
    train, held = rows_of(320, 1), rows_of(160, 2)
    data: Settings = {"max_length": 512, "num_workers": 0}
    plant(train, held, data)
    sections = data.pop("sections", {})
    for name, rows in (("train", train), ("eval", held)):
        files = {row.pop("file", name) for row in rows} if name == "eval" else None
        assert not files or files == {"eval"}
        by_file: dict[str, Rows] = {}
        for row in rows:
            by_file.setdefault(row.pop("file", name), []).append(row)
        data[name] = [write_rows(str(folder / f"{file}.jsonl"), part) for file, part in by_file.items()]
    sections = {
        "task": "text-classification",
        "model": {"config": {**BERT, "max_position_embeddings": 512}},
        "tokenizer": "bytes",
        **sections,
    }
    return looked(folder, data=data, **sections)


def one_class(train: Rows, held: Rows, data: Settings) -> None:
    data["label_names"] = list(VOCABULARY)
    train[:] = [row for row in train if row["label"] == "tea"]
    held[:] = [row for row in [*held, *rows_of(160, 3)] if row["label"] == "tea"]


def leak(train: Rows, held: Rows, data: Settings) -> None:
    held[:8] = [dict(row) for row in train[:8]]


def near_leak(train: Rows, held: Rows, data: Settings) -> None:
    held[:40] = [{**row, "text": f"{row['text']} again"} for row in train[:40]]


def swapped_labels(train: Rows, held: Rows, data: Settings) -> None:
    other = {"tea": "iron", "iron": "tea"}
    for number, row in enumerate(train):
        row["file"] = f"part-{number % 3}"
        if row["file"] == "part-2":
            row["label"] = other[row["label"]]


def contradiction(train: Rows, held: Rows, data: Settings) -> None:
    train += [{"text": row["text"], "label": "iron"} for row in train[:40:2]]


def other_template(train: Rows, held: Rows, data: Settings) -> None:
    for row in train[:5]:
        row["text"] = f"<|im_start|>user\n{row['text']}<|im_end|>"


def wrong_encoding(train: Rows, held: Rows, data: Settings) -> None:
    for row in train[::8]:
        row["text"] = f"café {row['text']}".encode().decode("latin-1")


def unknown_tokens(train: Rows, held: Rows, data: Settings) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {
        word: number
        for number, word in enumerate(
            ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *VOCABULARY["tea"], *VOCABULARY["iron"][:16]]
        )
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(data["folder"])
    data["sections"] = {"tokenizer": str(data.pop("folder"))}


def empty(train: Rows, held: Rows, data: Settings) -> None:
    for number, row in enumerate(train[:10]):
        row["text"] = " " * number


def missing_class(train: Rows, held: Rows, data: Settings) -> None:
    data["label_names"] = [*VOCABULARY, "salt"]


def one_class_steps(train: Rows, held: Rows, data: Settings) -> None:
    train.sort(key=lambda row: str(row["label"]))
    data["shuffle"] = False


def other_shares(train: Rows, held: Rows, data: Settings) -> None:
    held[:] = [row for row in [*held, *rows_of(160, 3)] if row["label"] == "tea"]


def doubtful_labels(train: Rows, held: Rows, data: Settings) -> None:
    for row in train[:40:2]:
        row["label"] = "Tea"


def duplicates(train: Rows, held: Rows, data: Settings) -> None:
    train += [dict(row) for row in train[:40]]


def near_duplicates(train: Rows, held: Rows, data: Settings) -> None:
    train += [{**row, "text": f"{row['text']} again"} for row in train[:160]]


def cut(train: Rows, held: Rows, data: Settings) -> None:
    data["max_length"] = 32


def padding(train: Rows, held: Rows, data: Settings) -> None:
    for number, row in enumerate(train):
        row["text"] = row["text"][: 500 if number % 8 == 0 else 12] + f" {number}"
    for row in train[::8]:
        row["text"] *= 3


def few_held_out(train: Rows, held: Rows, data: Settings) -> None:
    del held[60:]


def cut_answers(train: Rows, held: Rows, data: Settings) -> None:
    for row in [*train, *held]:
        row.update(prompt=row["text"][:20], completion=row["text"])
    for row in train[:60]:
        row["completion"] = " ".join(VOCABULARY["tea"] * 2)
    data |= {"format": "prompt_completion", "prompt_column": "prompt", "completion_column": "completion"}
    del data["max_length"]
    data["sequence_length"] = 192
    config = {**TINY_MODEL, "n_positions": 192}
    data["sections"] = {"task": "causal-lm", "model": {"config": config}}


PLANTED: Sequence[Plant] = (
    *(one_class, leak, near_leak, swapped_labels, contradiction, other_template, wrong_encoding, unknown_tokens, empty),
    *(missing_class, one_class_steps, other_shares, doubtful_labels, duplicates, near_duplicates, cut, padding),
    *(few_held_out, cut_answers),
)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_defect_of_texts_is_found_and_nothing_else(tmp_path: Path, plant: Plant) -> None:
    def with_folder(train: Rows, held: Rows, data: Settings) -> None:
        if plant is unknown_tokens:
            data["folder"] = str(tmp_path / "tokenizer")
        plant(train, held, data)

    look = of_texts(tmp_path, with_folder)
    assert [each.kind for each in look.findings] == [plant.__name__, *(["missing_class"] if plant is one_class else [])]
    if plant is few_held_out:
        assert [*look.findings[0].examples] == output.few_held_out(look.data.facts, "a file", 0.0)


def test_clean_texts_have_no_finding(tmp_path: Path) -> None:
    assert of_texts(tmp_path, lambda train, held, data: None).findings == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rare_class_is_not_missing_because_only_some_samples_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(units, "MOST_TEXTS", 40)

    def rare(train: Rows, held: Rows, data: Settings) -> None:
        data["label_names"] = [*VOCABULARY, "salt"]
        if is_there:
            train[1]["label"] = "salt"

    look = of_texts(tmp_path, rare)
    assert len(look.train) == 40
    found = [each for each in look.findings if each.kind == "missing_class"]
    assert [each.examples for each in found] == ([] if is_there else [("salt",)])


def images_of(count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for _ in range(count)]


def of_masks(folder: Path, change: Callable[[int, np.ndarray[Any, Any]], np.ndarray[Any, Any]], **more: Any) -> Look:
    """Look at 128 images with masks of two classes. `change` gets the number and the mask of each."""
    for number, pixels in enumerate(images_of(128, 1)):
        mask = (np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 5 > 2).astype(np.uint8)
        for kind, content in (("images", pixels), ("masks", change(number, mask))):
            (folder / "data" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(folder / "data" / kind / f"{number}.png")
    data = {"train": str(folder / "data"), "image_size": SIDE, "label_names": ["sky", "tree"], "num_workers": 0, **more}
    return looked(folder, task="semantic-segmentation", model=SCENES["model"], data=data)


MASKS: dict[str, Callable[[int, Any], Any]] = {
    "": lambda number, mask: mask,
    "teaches_nothing": lambda number, mask: np.full_like(mask, 255),
    "no_target": lambda number, mask: np.full_like(mask, 255) if number % 8 == 0 else mask,
    "unreadable": lambda number, mask: mask[:-2] if number == 9 else mask,
    "empty_masks": lambda number, mask: mask * (number % 4 == 0),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_defect_of_masks_comes_first(tmp_path: Path, kind: str) -> None:
    look = of_masks(tmp_path, MASKS[kind])
    found = [each.kind for each in look.findings]
    assert found[:1] == ([kind] if kind else [])
    assert look.stops == (kind in ("teaches_nothing", "unreadable"))
    if kind == "unreadable":
        assert look.findings[0].count == 1
        assert "9.png has 16 x 16 pixels and its mask" in look.findings[0].examples[0]


@pytest.mark.parametrize("allowed", [0, 2, 3])
def test_broken_training_samples_within_max_broken_are_a_finding_with_the_limit_and_no_stop(
    tmp_path: Path, allowed: int
) -> None:
    """A start does not decode every other image."""
    untried = sorted((str(number) for number in range(128)), key=lambda name: f"{name}.png")[1:6:2]
    look = of_masks(
        tmp_path,
        lambda number, mask: mask[:-2] if str(number) in untried else mask,
        max_broken=allowed,
        eval_fraction=0,
        shuffle=False,
    )
    first = look.findings[0]
    assert look.stops == first.stops == (allowed < 3)
    assert (first.kind, first.count, first.total) == (("broken", 3, 3) if allowed == 3 else ("unreadable", 3, 128))
    assert len(first.examples) == 3
    # The first step keeps its other samples.
    assert len(look.batch["pixel_values"]) == (5 if allowed else 8)


def of_boxes(folder: Path, has_boxes: Callable[[int], bool], **changes: Any) -> Look:
    (folder / "data").mkdir()
    images, boxes = [], []
    for number, pixels in enumerate(images_of(32, 2)):
        Image.fromarray(pixels).save(folder / "data" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": SIDE, "height": SIDE})
        if has_boxes(number):
            box = {"id": number, "image_id": number, "category_id": 1, "bbox": [2, 2, 8, 6], "area": 48, "iscrowd": 0}
            boxes.append(box)
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    (folder / "data" / "boxes.json").write_text(json.dumps(content))
    data = {"train": str(folder / "data" / "boxes.json"), "image_size": 64, "num_workers": 0}
    return looked(folder, task="object-detection", model={"config": YOLOS}, data=data | changes)


def test_images_without_boxes_are_found(tmp_path: Path) -> None:
    assert [each.kind for each in of_boxes(tmp_path, lambda number: number % 4 == 0).findings] == ["no_boxes"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_images_with_boxes_have_no_finding(tmp_path: Path, shuffle: bool) -> None:
    assert of_boxes(tmp_path, lambda number: number % 4 > 0, shuffle=shuffle).findings == []


def test_black_images_are_found(tmp_path: Path) -> None:
    for number, pixels in enumerate(images_of(240, 3)):
        folder = tmp_path / "data" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels * (number % 30 > 0)).save(folder / f"{number}.png")
    config = {"model_type": "vit", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    data = {"train": str(tmp_path / "data"), "image_size": SIDE, "eval_fraction": 0.5, "num_workers": 0}
    model = {"config": {**config, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 4}}
    look = looked(tmp_path, task="image-classification", model=model, data=data)
    assert "blank_images" in [each.kind for each in look.findings]


class Broken(Task):
    """A task of its own, whose samples are vectors; one of them is not finite."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        samples = torch.arange(64.0).reshape(32, 2)
        samples[5, 1] = torch.nan

        def collate(chosen: Sequence[Tensor]) -> Collated:
            return {"vectors": torch.stack([*chosen]), "num_targets": len(chosen)}

        return TaskData(samples, None, collate, "broken")  # type: ignore[arg-type]

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        raise AssertionError("no model is built")

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        raise AssertionError("no loss is computed")


def test_a_sample_that_is_not_finite_is_found_in_a_custom_task(tmp_path: Path) -> None:
    look = looked(tmp_path, task="tests.experiments.test_look:Broken", data={"train": "none", "eval_fraction": 0})
    assert [(each.kind, each.count, each.total) for each in look.findings] == [("not_finite", 1, 32)]
    assert look.findings[0].examples == ("train 6: ",)


def test_every_kind_is_planted() -> None:
    planted = {each.__name__ for each in PLANTED} | MASKS.keys() | {"no_boxes", "blank_images", "not_finite", "broken"}
    assert planted - {""} == KINDS.keys()


@pytest.mark.parametrize(
    "recipe",
    [
        *("text_classification", "token_classification", "seq2seq", "masked_lm", "gpt_tiny", "image_classification"),
        *("segmentation", "object_detection", "sentence_embedding"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("multiple_choice", "question_answering")),
    ],
)
def test_the_embedded_sets_have_no_finding(tmp_path: Path, recipe: str) -> None:
    look = look_at(named_recipe(recipe, ["--output_dir", str(tmp_path)]))
    assert look.findings == []
    assert look.train
    assert look.held


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[place : place + 5]) for place in range(len(words) - 4)}


def test_near_pairs_share_four_of_five_groups_of_words(tmp_path: Path) -> None:
    texts = list[str]()

    def plant(train: Rows, held: Rows, data: Settings) -> None:
        for number, row in enumerate(rows_of(120, 4)):
            # Every third word changed, or the last, or none of them.
            words = row["text"].split()
            words[-1 :: -(3 if number % 2 else 20)] = ["again"] * len(words[-1 :: -(3 if number % 2 else 20)])
            train.append({**row, "text": " ".join(words)})
            train.append(row)
        texts.extend(row["text"] for row in [*train, *held])

    look = of_texts(tmp_path, plant)
    read = [*look.train, *look.held]
    shares = {
        (later, earlier): len(grams(texts[later]) & grams(texts[earlier]))
        / len(grams(texts[later]) | grams(texts[earlier]))
        for later in range(320, len(read))
        for earlier in (later - 1,)
    }
    near = {pair for pair, share in shares.items() if share > 0.85}
    assert len(near) == 60
    assert set(near_pairs(read)) == near


def test_the_command_writes_its_page_and_fails_if_a_batch_would_teach_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_masks(tmp_path, MASKS["teaches_nothing"])
    settings = {"image_size": SIDE, "label_names": ["sky", "tree"], "num_workers": 0, "train": str(tmp_path / "data")}
    path = write_recipe_file(
        tmp_path, task="semantic-segmentation", model=SCENES["model"], data=settings, windows=False
    )
    capsys.readouterr()
    assert main(["data", str(path), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(answer)
    result = answer["result"]
    assert [(each["kind"], each["stops"]) for each in result["findings"]][:1] == [("teaches_nothing", True)]
    page = Path(result["file"]).read_text()
    assert result["findings"][0]["sentence"] in page
    assert page.count("data:image/png;base64,") == 8
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)


def test_a_sample_of_many_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (units, look_module):
        monkeypatch.setattr(module, "MOST_TEXTS", 40)
    look = of_texts(tmp_path, lambda train, held, data: None)
    assert (len(look.train), len(look.held)) == (40, 40)
    assert "40 of 320 training and 40 evaluation samples were read" in look.lead


def test_a_page_of_the_user_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.html").write_text("mine")
    assert main(["data", "image_classification", "--out", str(tmp_path / "mine.html")]) == 2
    assert (tmp_path / "mine.html").read_text() == "mine"
    for _ in range(2):
        assert main(["data", "image_classification", "--out", str(tmp_path / "other.html")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".accel_train.json", "mine.html", "other.html"]


def test_targets_are_shown_in_parts(tmp_path: Path) -> None:
    look = of_texts(tmp_path, cut_answers)
    (prompt, is_target), (answer, is_answer) = look.train[-1].parts or look.train[0].parts
    assert (is_target, is_answer) == (False, True)
    assert prompt
    assert answer


@pytest.mark.parametrize("mixed", [False, True])
def test_fine_tuning_rows_are_looked_at_one_by_one_also_in_a_mixture(tmp_path: Path, mixed: bool) -> None:
    names = ("a.jsonl", "b.jsonl")
    for name in names:
        write_jsonl(tmp_path / name, ({"prompt": f"{name} {n}", "completion": f" is {n}"} for n in range(30)))
    files = [str(tmp_path / name) for name in names]
    train = [{"source": file, "weight": 1} for file in files] if mixed else files
    data = {"train": train, "format": "prompt_completion", "eval_fraction": 0}
    look = look_at(tiny_recipe(tmp_path, task="causal-lm", data=data, options={}))
    assert len(look.train) == 60
    assert len(look.data.train) < 60, "windows hold several rows"
