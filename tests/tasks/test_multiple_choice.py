"""Multiple choice: endings keep their places, however they are written, and rows without a right ending are named."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.task import load_task
from tests.support import text_tasks
from tests.support.runs import metrics, write_jsonl
from tests.support.text_tasks import MODERNBERT, batch_of, choices, load, predict, run_card, train, write_csv

recipe_for = partial(text_tasks.recipe_for, "multiple-choice")


def test_lists_columns_and_letters_are_read_as_the_same_samples(tmp_path: Path) -> None:
    samples = choices(20)
    write_jsonl(tmp_path / "a.jsonl", samples)
    write_jsonl(tmp_path / "letters.jsonl", [{**row, "label": "ABC"[row["label"]]} for row in samples])
    cells = [
        [row["text"], "and", *(end.removeprefix("and ") for end in row["endings"]), row["label"]] for row in samples
    ]
    write_csv(tmp_path / "a.csv", ["text", "begin", "e0", "e1", "e2", "label"], *cells)
    task = load_task("multiple-choice")
    apart = {"text_columns": ["text", "begin"], "choices_columns": ["e0", "e1", "e2"]}
    found = [
        task.load_data(recipe_for(tmp_path / name, data=section), progress=False).fingerprint
        for name, section in (("a.jsonl", {}), ("letters.jsonl", {}), ("a.csv", apart))
    ]
    assert len(set(found)) == 1


def test_three_endings_are_a_row_of_inputs_and_operations_are_counted_but_for_a_mean_of_states(tmp_path: Path) -> None:
    recipe = recipe_for(write_jsonl(tmp_path / "a.jsonl", choices()))
    task, data, model = load(recipe)
    batch, _ = batch_of(data, range(8))
    assert batch["input_ids"].shape[:2] == (8, 3)
    assert "token_type_ids" in batch
    assert task.flops_per_target(recipe, model) > 0
    recipe = recipe_for(tmp_path / "a.jsonl", model={"config": MODERNBERT})
    task, data, model = load(recipe)
    assert "token_type_ids" not in batch_of(data, range(8))[0]
    assert task.flops_per_target(recipe, model) is None  # a mean needs a mask, and counting has none


def test_each_ending_is_read_with_its_text_and_knows_where_it_begins(tmp_path: Path) -> None:
    _, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", choices())))
    own, row, sample = data.source.tokenizer, data.source.rows.eval[0], data.eval[0]
    assert len(sample.ids) == 3
    for ids, begin, ending in zip(sample.ids, sample.second_from, row.endings, strict=True):
        assert own.decode(ids[begin:-1]) == ending
        assert own.decode(ids[1 : begin - 1]) == row.text
    assert data.source.row_ids(0) == row.where


@pytest.mark.parametrize(
    ("text", "endings"), [("a red hat", ["is blue", "is a red hat"]), ("这是红帽子", ["天空很蓝", "帽子是红的"])]
)
def test_baselines_are_a_place_and_the_words_that_the_text_has(tmp_path: Path, text: str, endings: list[str]) -> None:
    samples = [{"text": f"{text} {number}", "endings": endings, "label": int(number % 4 > 0)} for number in range(60)]
    task, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", samples)))
    share = np.mean([row.label for row in data.source.rows.eval])
    assert task.baselines(data) == {
        "majority_accuracy": pytest.approx(share),
        "word_overlap_accuracy": pytest.approx(share),
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on animals."""
    return train(
        "multiple-choice",
        tmp_path_factory.mktemp("finished"),
        120,
        **yaml.safe_load("""
            tokenizer: {train_bpe: {vocab_size: 320}}
            data: {group_by_length: true, id_column: id}
            batch: {global_batch_size: 16}
            optimizer: {learning_rate: 0.005}
            schedule: {max_steps: 60}
            evaluate: {every_steps: 30, metric_for_best_model: accuracy}
        """),
    )


def test_a_run_learns_which_ending_is_right_and_reports_it_next_to_baselines(finished: Path) -> None:
    last = metrics(finished, "eval")[-1]
    summary = load_json(finished / "summary.json")
    assert last["accuracy"] > max(0.9, *summary["baselines"].values())
    assert AutoModelForMultipleChoice.from_pretrained(finished / "model").config.model_type == "bert"


def test_the_code_in_the_model_card_chooses_an_ending(finished: Path) -> None:
    replaced = {"a text": "the cow 4", "one ending": "and moos loudly", "another ending": "and barks never"}
    assert run_card(finished / "model", replaced) == "and moos loudly"
    inputs = AutoTokenizer.from_pretrained(finished / "model")("the cow 4", "and moos loudly")
    assert set(inputs["token_type_ids"]) == {0, 1}, "as in training: which of the two texts a token is of"


def test_predict_writes_the_place_of_the_right_ending_and_a_score_for_each(finished: Path, not_launched: None) -> None:
    rows, out = choices(9), finished.parent / "out.jsonl"
    new = [{name: value for name, value in row.items() if name != "label"} for row in rows]
    found = predict(finished, out, write_jsonl(finished.parent / "new.jsonl", new))
    assert [row["label"] for row in found] == [str(row["label"]) for row in rows]
    assert [row["ending"] for row in found] == [row["endings"][row["label"]] for row in rows]
    assert not any("true_label" in row for row in found)
    assert all(sum(row[f"score_{place}"] for place in range(3)) == pytest.approx(1, abs=1e-5) for row in found)
    places = {row["id"]: str(row["label"]) for row in choices(120)}
    assert all(row["true_label"] == places[row["id"]] for row in predict(finished, out))
    assert main(["evaluate", str(finished), "--data", str(finished.parent / "m.jsonl")]) == 0
