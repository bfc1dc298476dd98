"""What the values of a table mean to `finetune`: the same in every format, or a question whose offers work."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from accel_train.data.labels import number_in
from accel_train.experiments.finetune.start import Written, write_recipe
from accel_train.tasks.text_classification.data import LabelledTexts, load_labelled_texts
from tests.cli.test_finetune import WRONG
from tests.support.offers import dead_ends, offers
from tests.support.runs import refused
from tests.support.wording import raises_golden

WORDS = ("the film was long and dull", "a bright and funny story", "nobody laughed at the end", "we all cried")
FORMATS = ("csv", "tsv", "jsonl", "json", "parquet")
Row = dict[str, Any]


def write(rows: Sequence[Row], suffix: str, name: str = "t") -> str:
    path = Path(f"{name}.{suffix}")
    if suffix in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if suffix == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if suffix == "json" else "".join(f"{line}\n" for line in lines))
    return str(path)


def finetune(path: str, *flags: str, **named: Any) -> Written:
    return write_recipe(
        path, flags, output_dir=f"runs/{len(list(Path('runs').glob('*'))) if Path('runs').exists() else 0}", **named
    )


def refusal(path: str, flags: Sequence[str] = ()) -> str | None:
    """Return the message of a refused call, or None. `--task`, `--text`, and `--label` are flags of the command."""
    named: Row = {}
    settings: list[str] = []
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        key = flag.removeprefix("--")
        if key in ("text", "label"):
            named[key] = tuple(value.split(","))
        elif key in ("task", "model"):
            named[key] = value
        else:
            settings += [flag, value]
    try:
        finetune(path, *settings, **named)
    except ValueError as error:
        return str(error)
    return None


def asked(path: str, *facts: str, flags: Sequence[str] = ()) -> str:
    """Return the message of a refused call, which holds these facts."""
    message = refusal(path, flags)
    assert message is not None
    assert [fact for fact in facts if fact not in message] == []
    return message


def labelled(cells: Sequence[Any], count: int = 60) -> list[Row]:
    return [{"text": f"{WORDS[n % 4]} {n}", "label": cells[n % len(cells)]} for n in range(count)]


CLASSES: Mapping[str, Sequence[Any]] = {
    "whole numbers": [0, 1, 2],
    "whole numbers with decimals": [0.0, 1.0],
    "stars": [1.0, 2.0, 5.0],
    "true and false": [True, False],
    "words": ["good", "bad"],
    "signs": ["+", "-"],
    "a scale": [-1, 0, 1],
    "emoji": ["\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"],
    "words with spaces": ["New York", "New Jersey", "York"],
    "a word more": ["very good", "good", "bad", "very bad"],
    "places": ["Austin, TX", "Dallas, TX"],
    "none as a class": ["none", "favor", "against"],
    "None as a class": ["None", "Favor", "Against"],
    "NA as a continent": ["NA", "EU", "AS"],
    "letters": ["A", "a", "b"],
    "ids from 1": list(range(1, 31)),
    "ids with gaps": [*range(0, 50, 2)],
    "one value in spaces": ["a", " b"],
}


@pytest.mark.parametrize("what", CLASSES)
def test_classes_are_the_same_in_every_format(what: str) -> None:
    cells, found = CLASSES[what], []
    for suffix in FORMATS:
        written = finetune(write(labelled(cells), suffix))
        assert "model.problem_type" not in written.found.settings
        texts = load_labelled_texts(written.recipe, None)
        found.append((_by_value(texts.scheme.names), {row.texts: label for row, label in _rows(texts)}))
    names, labels = found[0]
    assert {*names} == {*_by_value([str(cell) for cell in cells])}
    assert all(other == found[0] for other in found[1:])
    assert len(labels) == 60


def _by_value(names: Sequence[str]) -> list[Any]:
    return [name.lower() if number_in(name) is None else number_in(name) for name in names]


def _rows(texts: LabelledTexts) -> list[tuple[Any, float]]:
    rows = [*texts.train, *(texts.eval or [])]
    return list(zip(rows, np.concatenate([texts.train_labels, texts.eval_labels]).tolist(), strict=True))


@pytest.mark.parametrize("cells", [[0.5, 1.0, 2.0], [n / 7 for n in range(60)], [1.0, -2.5]], ids=str)
def test_numbers_with_fractions_are_a_regression_in_every_format(cells: Sequence[float]) -> None:
    for suffix in FORMATS:
        written = finetune(write(labelled(cells), suffix))
        assert written.recipe.model.problem_type == "regression"
        texts = load_labelled_texts(written.recipe, None)
        assert sorted(label for _, label in _rows(texts)) == pytest.approx(
            sorted(row["label"] for row in labelled(cells))
        )


KEEP = ("--model.problem_type", "single_label")
NUMBERS = ("--model.problem_type", "regression")
ASKED: Mapping[str, tuple[Sequence[Any], Sequence[tuple[str, ...]]]] = {
    "a sign for no label": (["joy", "fear", "-"], [("--data.missing_labels", '["-"]'), KEEP]),
    "NA among words": (["joy", "fear", "NA"], [("--data.missing_labels", '["NA"]'), KEEP]),
    "None among small words": (["joy", "fear", "None"], [("--data.missing_labels", '["None"]'), KEEP]),
    "two words": (["joy", "N/A", "?", "fear"], [("--data.missing_labels", '["?", "N/A"]'), KEEP]),
    "nan among numbers": (["1", "nan", "2"], [("--data.missing_labels", '["nan"]'), KEEP]),
    "NA among fractions": (["1.5", "NA", "2.5"], [("--data.missing_labels", '["NA"]'), KEEP]),
    "-1 before ids": ([-1, 0, 1, 2], [("--data.missing_labels", '["-1"]'), KEEP]),
    "spaces and capitals": (["joy", "joy ", "Joy", "fear"], [KEEP]),
    "one number twice": (["1", "1.0", "2"], [KEEP]),
    "percent": ([f"{n}%" for n in range(20)], [KEEP]),
    "money": (["$12", "$15"], [KEEP]),
    "decimal commas": (["4,5", "1,0", "5"], [KEEP]),
    "thousands between spaces": (["1 234,5", "2 500"], [KEEP]),
    "thousands": (["3,412.50", "1,200"], [KEEP]),
    "tags with spaces": (["clear primary", "clear", "haze primary water", "clear primary road"], [KEEP]),
    "tags with commas": (["python", "python,sql", "css,html"], [KEEP]),
    "lists": (["['css', 'html']", "css"], [KEEP]),
    "years": ([*range(1985, 2015)], [NUMBERS, KEEP]),
    "prices": ([100 * n for n in range(30)], [NUMBERS, KEEP]),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_may_be_no_class_is_asked_in_every_format_and_the_offers_work(what: str) -> None:
    cells, offered = ASKED[what]
    for suffix in FORMATS:
        path = write(labelled(cells, 80), suffix)
        message = asked(path)
        assert offers(message) == list(offered)
        if suffix in ("csv", "jsonl"):
            assert dead_ends(partial(refusal, path)) == []


LISTS: Mapping[str, Sequence[Any]] = {
    "lists": [["a b c", "d"], ["d"], []],
    "JSON": ['["a b c", "d"]', '["d"]', "[]"],
    "JSON with escapes": ['["a b c", "\\u0064"]', '["d"]', "[]"],
    "as Python writes them": ["['a b c', 'd']", "['d']", "[]"],
}


@pytest.mark.parametrize("what", LISTS)
@pytest.mark.parametrize("column", ["label", "annotation"])
def test_lists_of_labels_are_several_labels_in_every_format(what: str, column: str) -> None:
    rows = [{"text": row["text"], column: row["label"]} for row in labelled(LISTS[what])]
    for suffix in FORMATS:
        written = finetune(write(rows, suffix))
        texts = load_labelled_texts(written.recipe, None)
        assert (written.recipe.data.label_column, texts.scheme.problem_type) == (column, "multi_label")
        assert texts.scheme.names == ("a b c", "d")
        assert written.found.counts == {"a b c": 20, "d": 40}
        assert texts.scheme.encode(LISTS[what], str).tolist() == [[1, 1], [0, 1], [0, 0]]


@pytest.mark.parametrize("form", [dict, json.dumps, str, lambda cell: [cell], lambda cell: json.dumps([cell])])
def test_objects_are_not_classes_in_any_format_and_the_key_of_the_label_is_named(form: Callable[[Row], Any]) -> None:
    for suffix in FORMATS:
        for column in ("label", "annotation"):
            rows = [
                {"text": f"{WORDS[n % 4]} {n}", column: form({"sentiment": "ab"[n % 2], "by": "ann"})}
                for n in range(20)
            ]
            asked(write(rows, suffix), f"'{column}'", "'sentiment'")
        recipe = finetune(write(labelled(["a", "b"]), suffix, "plain")).recipe
        path = write(
            [{"text": row["text"], "label": form({"label": "ab"[n % 2]})} for n, row in enumerate(rows)], suffix
        )
        with pytest.raises(ValueError, match=r"""'label'.*\{"label": "a"\}"""):
            load_labelled_texts(
                recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": path})}), None
            )


def test_a_column_of_json_is_no_text() -> None:
    rows = [
        {"review": f"{WORDS[n % 4]} {n}", "about": json.dumps({"by": "ann b", "n": n}), "label": "ab"[n % 2]}
        for n in range(20)
    ]
    for suffix in FORMATS:
        assert finetune(write(rows, suffix)).recipe.data.text_columns == ("review",)


def test_words_for_a_missing_label_are_left_out_and_the_rest_keeps_its_kind() -> None:
    words = ("--data.missing_labels", '["NA"]')
    for cells, kind in ((["joy", "NA", "", "fear"], "auto"), (["1.5", "NA", "", "2.5"], "regression")):
        for suffix in FORMATS:
            written = finetune(write(labelled(cells), suffix), *words)
            assert written.recipe.model.problem_type == kind
            texts = load_labelled_texts(written.recipe, None)
            assert (written.found.num_samples, len(_rows(texts))) == (30, 30)


def test_a_column_with_many_empty_cells_names_the_flag_that_leaves_its_rows_out() -> None:
    rows = [
        {"one": f"{WORDS[n % 4]} {n}", "other": f"{WORDS[n % 3]} {n}", "s": n / 7 if n % 2 else None} for n in range(60)
    ]
    for suffix in FORMATS:
        path = write(rows, suffix)
        message = asked(path, "'s'", "30 of 60")
        assert offers(message) == [("--data.missing_labels", "drop")]
        written = finetune(path, "--data.missing_labels", "drop")
        assert written.recipe.data.label_column == "s"
        assert written.found.num_samples == 30


def test_decimals_of_many_whole_numbers_are_asked_by_run_too() -> None:
    for suffix in FORMATS:
        path = write(labelled([float(100 * n) for n in range(30)]), suffix)
        recipe = finetune(path, *KEEP).recipe
        auto = recipe.model_copy(update={"model": recipe.model.model_copy(update={"problem_type": "auto"})})
        with raises_golden(case=suffix):
            load_labelled_texts(auto, None)


def test_a_model_with_whole_classes_reads_their_decimals(tmp_path: Path) -> None:
    texts = load_labelled_texts(finetune(write(labelled([0, 1]), "csv")).recipe, None)
    assert texts.scheme.encode(["1.0", 1.0, "1", "0.0"], str).tolist() == [1, 1, 1, 0]
    named = load_labelled_texts(
        finetune(write(labelled([0.0, 1.0]), "jsonl"), "--data.label_names", "[neg, pos]").recipe, None
    )
    assert named.scheme.encode(["1.0", 0.0], str).tolist() == [1, 0]
    refused(named.scheme.encode, ["0.5"], str, named="0.5")


def test_ids_are_no_labels() -> None:
    ids = ([f"B{n % 12:03}K" for n in range(60)], [f"{n % 12}" for n in range(60)])
    for name, cells in (("asin", ids[0]), ("code", ids[0]), ("productID", ids[1]), ("user_id", ids[1])):
        rows = [{"review": f"{WORDS[n % 4]} {n}", name: cells[n], "grade": float(n % 5)} for n in range(60)]
        for suffix in FORMATS:
            assert finetune(write(rows, suffix)).recipe.data.label_column == "grade"
        path = write([{key: row[key] for key in ("review", name)} for row in rows], "csv")
        asked(path, name)
        assert refusal(path, ("--label", name)) is None


def test_a_repeated_header_is_named_with_its_row() -> None:
    rows = labelled(["good", "bad"], 20)
    rows[9] = {"text": "text", "label": "label"}
    for suffix, where in zip(FORMATS, ("t.csv:11", "t.tsv:11", "t.jsonl:10", "t.json, row 10", "t.parquet, row 10")):
        message = asked(write(rows, suffix))
        assert message.startswith(f"{where}: ")


def test_a_first_row_that_is_repeated_is_data_if_its_label_is_elsewhere() -> None:
    Path("t.csv").write_text(
        "ham,ok then\n" * 3 + "".join(f"{'ham' if n % 2 else 'spam'},{WORDS[n % 4]} {n}\n" for n in range(40))
    )
    written = finetune("t.csv")
    assert written.recipe.data.header == "none"
    assert written.found.num_samples == 43


def test_classes_of_one_row_and_numbers_without_an_order_are_noted() -> None:
    rows = labelled(["good", "bad"])
    rows[7]["label"] = "odd"
    assert any("'odd'" in line for line in finetune(write(rows, "csv")).lines())
    assert any("0 to 39" in line for line in finetune(write(labelled(range(40), 120), "csv")).lines())


def chat(n: int) -> list[Row]:
    return [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}]


JUDGED: Mapping[str, tuple[Any, Any]] = {
    "label": (1, 0),
    "kto_tag": (True, False),
    "thumbs_up": (1, 0),
    "thumbs_down": (0, 1),
    "feedback": ("thumbs_up", "thumbs_down"),
    "reaction": ("\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"),
    "is_good": ("yes", "no"),
    "isRejected": (False, True),
    "status": ("accepted", "rejected"),
    "vote": (1, -1),
    "stars": (5, 2),
    "score": (1, 0),
    "reply_rating": ("good", "bad"),
}


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("as_float", [False, True])
def test_answers_that_a_column_calls_bad_are_not_learned(name: str, as_float: bool) -> None:
    good, bad = JUDGED[name]
    if as_float:
        good, bad = (float(each) if isinstance(each, int) else each for each in (good, bad))
    pairs = {"prompt": "say {} in words", "completion": "it is {} of them"}
    for suffix in FORMATS:
        for is_chat in (True, False):
            if is_chat and suffix in ("csv", "tsv"):
                continue
            answers = [
                {"messages": chat(n)} if is_chat else {key: text.format(n) for key, text in pairs.items()}
                for n in range(12)
            ]
            path = write([{**row, name: bad if n % 3 == 0 else good} for n, row in enumerate(answers)], suffix)
            asked(path, repr(name), "4 of 12")
            assert dead_ends(partial(refusal, path)) == []
            path = write([{**row, name: good} for row in answers], suffix, "good")
            assert (
                refusal(path, ("--data.completion_column", "completion") if name == "label" and not is_chat else ())
                is None
            )


def test_a_judgement_that_only_some_rows_have_is_named() -> None:
    path = write([{"messages": chat(n)} | ({"feedback": "bad"} if n == 3 else {}) for n in range(12)], "jsonl")
    message = asked(path)
    assert message.startswith("t.jsonl:1 ")
    assert dead_ends(partial(refusal, path)) == []


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("multi_turn", (True, False)),
        ("follow_up", (True, False)),
        ("source", ("web", "book")),
        ("tokens", (12, 40)),
        ("score", (4.5, 3.5)),
        ("lang", ("no", "en")),
    ],
)
def test_columns_that_judge_no_answer_are_left_out(name: str, cells: tuple[Any, Any]) -> None:
    written = finetune(write([{"messages": chat(n), name: cells[n % 2]} for n in range(12)], "jsonl"))
    assert written.found.unused == (f"column {name!r}",)


DPO: Mapping[str, Callable[[int], Row]] = {
    "texts with a prompt": lambda n: {"prompt": f"{n}?", "chosen": "yes", "rejected": "no"},
    "texts alone": lambda n: {"chosen": f"Human: {n}? Assistant: yes", "rejected": f"Human: {n}? Assistant: no"},
    "whole chats": lambda n: {"chosen": chat(n), "rejected": chat(n + 1)},
    "answers as chats": lambda n: {"prompt": chat(n)[:1], "chosen": chat(n)[1:], "rejected": chat(n + 1)[1:]},
    "answers as messages": lambda n: {
        "conversations": [{"from": "human", "value": f"{n}?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
}


@pytest.mark.parametrize("what", DPO)
def test_preferences_offer_only_flags_that_learn_the_chosen_answers(what: str) -> None:
    for suffix in ("jsonl", "json", "parquet"):
        path = write([DPO[what](n) for n in range(12)], suffix)
        message = asked(path)
        assert bool(offers(message)) == (not what.startswith("answers"))
        if offers(message):
            assert dead_ends(partial(refusal, path)) == []


MEDIA: Mapping[str, Callable[[int], Row]] = {
    "images": lambda n: {"messages": chat(n), "images": [f"{n}.jpg"]},
    "audios": lambda n: {"messages": chat(n), "audios": [f"{n}.wav"]},
    "img_path": lambda n: {"messages": chat(n), "img_path": f"{n}.jpg"},
    "image": lambda n: {"instruction": f"what is in picture {n}", "output": "a cat on a mat", "image": f"{n}.jpg"},
    "places": lambda n: {
        "messages": [{"role": "user", "content": f"<image>\n{n}?"}, {"role": "assistant", "content": "a cat"}]
    },
}


@pytest.mark.parametrize("what", MEDIA)
def test_texts_about_images_are_not_learned_without_them(what: str) -> None:
    for suffix in ("jsonl", "json", "parquet"):
        path = write([MEDIA[what](n) for n in range(12)], suffix)
        message = asked(path)
        assert offers(message)
        assert dead_ends(partial(refusal, path)) == []
    written = finetune(write([{"messages": chat(n), "images": []} for n in range(12)], "jsonl", "text"))
    assert written.found.task == "causal-lm"


@pytest.mark.parametrize(
    "names", [("train", "validation", "test"), ("Train", "dev", "Test"), ("training", "val", None)]
)
@pytest.mark.parametrize("column", ["split", "fold", "set", "Partition"])
def test_a_column_of_parts_divides_the_rows(names: tuple[str, str, str | None], column: str) -> None:
    rows = [
        {**row, column: names[0] if n % 5 < 3 else names[n % 2 + 1] or names[1]}
        for n, row in enumerate(labelled(["a", "b"]))
    ]
    for suffix in FORMATS:
        written = finetune(write(rows, suffix))
        texts = load_labelled_texts(written.recipe, None)
        of = {name: {row["text"] for row in rows if row[column] == name} for name in names}
        assert {row.texts[0] for row in texts.train} == of[names[0]]
        assert {row.texts[0] for row in texts.eval or ()} == of[names[1]]
        assert (written.found.test is not None) == (names[2] is not None)


def test_flags_of_one_part_divide_the_rows_and_rows_of_no_part_are_refused() -> None:
    rows = [{**row, "is_valid": n % 4 == 0} for n, row in enumerate(labelled(["a", "b"]))]
    for suffix in FORMATS:
        texts = load_labelled_texts(finetune(write(rows, suffix)).recipe, None)
        assert (len(texts.train), len(texts.eval or ())) == (45, 15)
    rows = [{**row, "split": ("train", "test", "extra")[n % 3]} for n, row in enumerate(labelled(["a", "b"]))]
    asked(write(rows, "csv", "odd"), "'extra'")
    assert refusal(write(rows, "csv", "odd"), ("--label", "split")) is None


def test_parts_named_in_a_file_of_splits_are_known_or_named() -> None:
    rows = [["where is my card", "card"], ["tell me a joke", "joke"]] * 10
    for key in ("oos_train", "version", "extra"):
        Path("d.json").write_text(json.dumps({"train": rows, "val": rows, key: rows if key != "version" else 1}))
        asked("d.json", repr(key), "'val'")


NUMBERS_AND_DATES: Mapping[str, Callable[[int], Row]] = {
    "a date and a number": lambda n: {"Date": f"1981-01-{n % 28 + 1:02}", "Temp": n / 7},
    "long dates": lambda n: {"when": f"{n % 28 + 1} March 2020 10:30", "sold": n, "price": n / 7},
    "as many words as numbers": lambda n: {"age": n, "work": "ab"[n % 2], "hours": n * 3, "sex": "MF"[n // 2 % 2]},
}


@pytest.mark.parametrize("what", NUMBERS_AND_DATES)
def test_tables_of_numbers_and_dates_are_for_trees(what: str) -> None:
    rows = [NUMBERS_AND_DATES[what](n) for n in range(60)]
    for suffix in FORMATS:
        path = write(rows, suffix)
        for flags in ((), ("--text", next(iter(rows[0])))):
            asked(path, "trees", flags=flags)


NAMES = ("John", "Mary Ann", "Owen", "Laura")


def test_names_next_to_many_features_are_not_the_text_unless_they_are_asked_for() -> None:
    rows: list[Row] = [
        {"Survived": n % 3 % 2, "Name": f"Braund{n}, Mr. {NAMES[n % 4]}", "Sex": "mf"[n % 2], "Age": n % 40 + 0.5,
         "SibSp": n % 4, "Fare": n / 7} for n in range(60)
    ]  # fmt: skip
    for suffix in FORMATS:
        path = write(rows, suffix)
        for flags in ((), ("--label", "Survived")):
            message = asked(path, "'Name'", "trees", flags=flags)
            assert offers(message) == [("--text", "Name"), ("--text", "{Name}, {Fare}")]
            assert dead_ends(partial(refusal, path), flags) == []
        named = write([{key: row[key] for key in ("Name", "Sex")} for row in rows], suffix, "names")
        assert finetune(named).recipe.data.text_columns == ("Name",)
        plain = write([{**row, "Name": f"{WORDS[n % 4]} {n}"} for n, row in enumerate(rows)], suffix, "plain")
        assert finetune(plain, label=("Survived",)).recipe.data.text_columns == ("Name",)


def test_names_next_to_a_text_are_left_out() -> None:
    rows = [{"user": f"{NAMES[n % 4]} Smith {n}", "review": f"{WORDS[n % 4]} {n}", "stars": n % 5} for n in range(60)]
    for suffix in FORMATS:
        written = finetune(write(rows, suffix))
        assert written.recipe.data.text_columns == ("review",)
        assert written.found.unused == ("column 'user'",)


def test_words_with_tags_in_rows_and_lists_as_text_are_named() -> None:
    words = [{"Word": "word", "POS": "NN", "Tag": ("O", "B-geo", "I-geo")[n % 3]} for n in range(60)]
    lists = [{"tokens": "['EU', 'rejects']", "ner_tags": "['B-ORG', 'O']"} for _ in range(20)]
    chats = [{"messages": str(chat(n))} for n in range(20)]
    for rows, fact in ((words, "'Tag'"), (lists, "'tokens'"), (chats, "'messages'")):
        asked(write(rows, "csv"), fact, ".jsonl")


def test_questions_and_answers_in_capitals_are_pairs() -> None:
    rows = [{"Question": f"what is {n} and {n}", "Answer": f"it is {2 * n}"} for n in range(20)]
    for suffix in FORMATS:
        data = finetune(write(rows, suffix)).recipe.data
        assert (data.prompt_column, data.completion_column) == ("Question", "Answer")


def test_lists_of_mappings_are_chats_by_their_keys() -> None:
    spans = [
        {"text": f"{WORDS[n % 4]} {n}", "marks": [{"begin": 0, "end": 3}], "label": "ab"[n % 2]} for n in range(40)
    ]
    assert finetune(write(spans, "jsonl")).found.task == "text-classification"
    turns = [{"turns": [{"speaker": "a", "value": "b"}]} for _ in range(20)]
    assert "speaker" in (refusal(write(turns, "jsonl", "u")) or "")


@pytest.mark.parametrize("place", ["images", "."])
def test_several_tags_of_an_image_and_parts_of_images_are_asked(place: str) -> None:
    tags = ("clear primary", "clear", "haze primary water", "clear primary road")
    for n in range(12):
        path = Path("set", place, f"{n}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (n * 20, 0, 0)).save(path)
    rows = [{"image": f"{place}/{n}.png", "tags": tags[n % 4]} for n in range(12)]
    for suffix in ("csv", "jsonl"):
        path = write(rows, suffix, "set/t")
        message = asked(path)
        assert [flags[0] for flags in offers(message)] == ["--data.label_names"]
        assert dead_ends(partial(refusal, path)) == []
        parted = [{**row, "tags": "ab"[n % 2], "split": ("train", "test")[n % 4 == 0]} for n, row in enumerate(rows)]
        asked(write(parted, suffix, "set/t"), "train 9, test 3")
        Path(path).unlink()


def test_comments_before_a_header_are_named() -> None:
    lines = [f"{WORDS[n % 4]} {n},{n % 2}\n" for n in range(40)]
    Path("t.csv").write_text("".join(["# made in 2020\n", "# by hand\n", "text,label\n", *lines]))
    message = asked("t.csv")
    assert message.startswith("t.csv:3: ")
    assert "comments" in message


@pytest.mark.parametrize("what", WRONG)
def test_the_flags_that_a_refusal_offers_lead_to_a_recipe(what: str) -> None:
    write_data, _, *flags = WRONG[what]
    path, given = str(write_data()), " ".join(flags).split()
    message = refusal(path, given)
    if message is not None and offers(message):
        assert dead_ends(partial(refusal, path), given) == []
