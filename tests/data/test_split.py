"""Held-out rows: whole groups, the same share of each class, and another split for each seed."""

import csv
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from accel_train.checkpoint.fingerprint import identity_changes, run_identity
from accel_train.cli.main import main
from accel_train.data.images.labelled import ImageSets
from accel_train.data.samples import held_out_units
from accel_train.recipe.loader import load_recipe, make_recipe
from accel_train.tasks.common.texts import TextRow, hold_out, text_rows
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from accel_train.tasks.question_answering.config import QuestionAnsweringData
from accel_train.tasks.question_answering.data import read_questions
from accel_train.tasks.seq2seq.config import Seq2SeqData
from accel_train.tasks.text_classification.data import LabelledTexts, load_labelled_texts
from tests.support.runs import refused, sources_of
from tests.support.text_tasks import BERT, write_csv
from tests.support.wording import assert_golden


def hash_of(text: str, seed: int = 0) -> int:
    """A text's 64 bits of BLAKE2b, salted with the seed."""
    raw = hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(16, "big")).digest()
    return int.from_bytes(raw, "big")


def recipe_of(path: Path | str, **settings: Any) -> Any:
    data = {"train": str(path), "text_columns": ["q", "a"], "eval_fraction": 0.2, **settings.pop("data", {})}
    tree = {"task": "text-classification", "output_dir": "run", "model": {"config": BERT}, "data": data}
    return make_recipe({**tree, "schedule": {"max_steps": 1}, **settings}, "recipe")


def load(path: Path, **data: Any) -> LabelledTexts:
    return load_labelled_texts(recipe_of(path, data=data), None)


def texts_of(rows: list[TextRow] | None) -> set[tuple[str, ...]]:
    return {row.texts for row in rows or []}


def write_pairs(name: str, num_rows: int = 470) -> Path:
    """Rows of 4 questions in a row, of one of three labels of different sizes."""
    rows = [[f"q {n // 4}", f"a {n}", "abbbbbbccc"[n % 10], n // 4] for n in range(num_rows)]
    return write_csv(Path(name), ["q", "a", "label", "who"], *rows)


def test_a_seed_holds_out_the_rows_whose_salted_hash_is_low_and_0_those_of_before() -> None:
    path = write_pairs("pairs.csv")
    rows = [row[:2] for row in csv.reader(path.read_text().splitlines())][1:]
    sides = []
    for seed in (0, 1, 2**31 - 1):
        found = load(path, split_seed=seed)
        expected = {(q, a) for q, a in rows if hash_of(f"{q}\x1e{a}", seed) < 0.2 * 2**64}
        assert texts_of(found.eval) == expected
        assert len(found.train) + len(expected) == len(rows)
        sides.append(expected)
    assert len(sides[0] & sides[1]) < len(sides[0]) / 2


def test_without_a_group_questions_leak_and_with_one_none_does() -> None:
    path = write_pairs("pairs.csv")
    for group, leaks in (({}, True), ({"group_column": "q"}, False), ({"group_column": "who", "split_seed": 5}, False)):
        found = load(path, **group)
        trained = {row.texts[0] for row in found.train}
        shared = sum(row.texts[0] in trained for row in found.eval or [])
        assert (shared > 40) if leaks else (shared == 0)
    # 118 groups of 4 rows (the last of 2): the lowest hashes, up to the fraction of the rows
    order = sorted({str(n // 4) for n in range(470)}, key=lambda name: hash_of(name, 5))
    expected = set(order[: round(0.2 * 470) // 4 + (round(0.2 * 470) % 4 > 2)])
    held = {row.texts[0].removeprefix("q ") for row in found.eval}
    assert len(held ^ expected) <= 1, "the group of two rows fits where one of four does not"
    assert abs(len(found.eval) - 94) <= 2
    [note] = [note for note in found.notes if note.startswith("data.group_column=who: ")]
    percent = f"{len(found.eval) / 4.7:.1f}"
    assert re.findall(r"\d+\.?\d*", note) == [str(118 - len(held)), str(len(held)), percent, "470"]
    assert_golden(note)


def test_a_large_group_stays_in_training_and_groups_that_are_all_large_give_the_smallest() -> None:
    many = [*[7] * 60, *range(100, 140)]
    held = held_out_units(many, [0] * 100, 0.1)
    assert [value for value, chosen in zip(many, held) if chosen] == list(range(100, 110))
    three = [*[1] * 50, *[2] * 30, *[3] * 40]
    assert {value for value, chosen in zip(three, held_out_units(three, [0] * 120, 0.05)) if chosen} == {2}


def test_each_class_is_held_out_in_proportion_by_its_lowest_hashes() -> None:
    path = write_pairs("pairs.csv", num_rows=400)
    rows = [tuple(row[:3]) for row in csv.reader(path.read_text().splitlines())][1:]
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([["q", "x", "two", 0], ["q", "y", "two", 0], ["q", "z", "one", 0]])
    found = load(path, stratify=True, eval_fraction=0.15, split_seed=3)
    counts = Counter(row.label for row in found.eval)
    assert counts == {"a": 6, "b": 36, "c": 18, "two": 1}, "15 % of 40, 240 and 120; one of two; none of one"
    for label in "abc":
        of_class = sorted((q, a) for q, a, own in rows if own == label)
        lowest = sorted(of_class, key=lambda pair: hash_of("\x1e".join(pair), 3))[: counts[label]]
        assert {row.texts for row in found.eval if row.label == label} == set(lowest)
    again = load(path, stratify=True, eval_fraction=0.15, split_seed=3)
    assert texts_of(again.eval) == texts_of(found.eval)


def test_copies_of_a_text_stay_on_one_side_of_a_stratified_split() -> None:
    rows = [[f"q {n % 50}", "a", "xyy"[n % 3]] for n in range(300)]
    found = load(write_csv(Path("a.csv"), ["q", "a", "label"], *rows), stratify=True)
    assert found.eval
    assert not texts_of(found.train) & texts_of(found.eval)
    assert abs(len(found.eval) - 60) <= 6


def test_images_are_held_out_by_class_and_by_seed() -> None:
    for number in range(60):
        name = "few" if number % 6 == 0 else "many"
        Path("set", name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(f"set/{name}/{number}.png")

    def read(**settings: Any) -> ImageSets:
        settings = {"train": "set", "eval_fraction": 0.2, **settings}
        return read_labelled_images(ImageClassificationData(**settings))

    held = []
    for seed in (0, 1):
        sets = read(stratify=True, split_seed=seed)
        assert Counter(sets.label_names[number] for number in sets.eval.labels) == {"few": 2, "many": 10}
        held.append(set(sets.eval.rows.tolist()))
    assert held[0] != held[1]
    plain, other = read().eval, read(split_seed=1).eval
    assert set(plain.rows.tolist()) != set(other.rows.tolist())


def test_other_tasks_group_their_rows_too() -> None:
    path = Path("a.jsonl")
    rows = [{"source": f"s {n}", "question": f"s {n}", "context": "c", "who": n % 40} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = Seq2SeqData(train=str(path), target_column=None, group_column="who", eval_fraction=0.1)
    asked = QuestionAnsweringData(train=str(path), answers_column=None, group_column="who", eval_fraction=0.1)
    sources = sources_of(pairs)
    for found, data in (
        (text_rows(sources, pairs, ("source",), None, key="data.train"), pairs),
        (read_questions(sources, asked, key="data.train"), asked),
    ):
        train, held, _ = hold_out(list(found), data, sources)  # type: ignore[type-var]
        groups = [{int(row.where.rpartition(":")[2]) % 40 for row in side} for side in (train, held or [])]
        assert len(held or []) == 20
        assert not groups[0] & groups[1]


@pytest.mark.parametrize(
    ("rows", "data", "said"),
    [
        ([["q", "a", "x", ""]], {"group_column": "who"}, "a.csv:42|no group|Fill in"),
        ([], {"group_column": "one"}, "'one'|data.group_column"),
        ([], {"group_column": "same"}, "all 40|'s'"),
    ],
)
def test_groups_and_classes_that_the_rows_do_not_have_are_refused(
    rows: list[list[Any]], data: dict[str, Any], said: str
) -> None:
    made = [[f"q {n}", "a", "xy"[n % 2], n % 9, "s", n + 0.5] for n in range(40)]
    path = write_csv(
        Path("a.csv"), ["q", "a", "label", "who", "same", "number"], *made, *([*row, "s", 0.5] for row in rows)
    )
    refused(load, path, named=said, **data)


def test_settings_that_contradict_each_other_are_refused_before_the_data_is_read() -> None:
    refused(recipe_of, "missing.csv", data={"group_column": "label"}, named="data.group_column=label|labels")


def test_finetune_groups_pairs_by_the_side_that_repeats_and_stratifies_other_labels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_csv(
        Path("p.csv"),
        ["q", "a", "label", "who"],
        *([f"question {n // 10} of many", f"answer {n} to it", n % 2, n // 2] for n in range(470)),
    )

    def written(name: str, *flags: str) -> Any:
        assert main(["finetune", "p.csv", "--dry-run", "--output_dir", name, *flags]) == 0
        return yaml.safe_load(Path(f"{name}.yaml").read_text())["data"]

    found = written("pair", "--text", "q,a")
    assert found["group_column"] == "q"
    assert "stratify" not in found
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "--data.group_column null" in line)
    assert_golden(line)
    texts = load_labelled_texts(load_recipe(Path("pair.yaml")), None)
    assert not {row.texts[0] for row in texts.train} & {row.texts[0] for row in texts.eval or []}
    alone = written("alone", "--text", "q,a", "--data.group_column", "null")
    assert (alone.get("group_column"), alone["stratify"]) == (None, True)
    assert written("own", "--text", "q,a", "--group", "who")["group_column"] == "who"
    one = written("one", "--text", "a")
    assert (one.get("group_column"), one["stratify"]) == (None, True)
    assert "stratify" not in written("eval", "--text", "a", "--data.eval", "p.csv")


def test_another_split_is_another_run_and_the_default_split_is_the_run_of_before() -> None:
    def identity(**data: Any) -> dict[str, Any]:
        facts: Any = SimpleNamespace(fingerprint="same", settings={}, global_batch_size=8, max_steps=1, warmup_steps=0)
        return run_identity(recipe_of("a.csv", data=data), facts, facts, facts)

    default, recipe = identity(), recipe_of("a.csv")
    for name, value in {"split_seed": 3, "group_column": "q", "stratify": True}.items():
        before = {setting: each for setting, each in default.items() if setting != f"data.{name}"}
        assert identity_changes(before, {}, default, {}, recipe) == []
        [change] = identity_changes(before, {}, identity(**{name: value}), {}, recipe)
        assert (change.name, change.now) == (f"data.{name}", value)
