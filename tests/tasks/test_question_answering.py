"""Question answering: answers stay at their place whatever the windows, each question counts once, and answers that are
not in their context are named.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForQuestionAnswering

from accel_train.core.json_io import load_json
from accel_train.data.builtin.stdlib import _questions
from accel_train.task import load_task
from accel_train.tasks.question_answering.answers import best_spans, overlap_answers, position_loss_sum
from accel_train.tasks.question_answering.data import Question
from tests.support import text_tasks
from tests.support.runs import metrics, write_jsonl
from tests.support.text_tasks import batch_of, evaluated, load, predict, questions, run_card, train

recipe_for = partial(text_tasks.recipe_for, "question-answering")


def test_jsonl_parquet_csv_and_squads_own_form_are_read_as_the_same_samples(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    asked = questions(20, unanswered=4)
    write_jsonl(tmp_path / "a.jsonl", asked)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(asked), tmp_path / "a.parquet")
    cells = [{**row, "answers": json.dumps(row["answers"])} for row in asked]
    pyarrow.csv.write_csv(pyarrow.Table.from_pylist(cells), tmp_path / "a.csv")
    squad = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "is_impossible": not row["answers"]["text"],
                    "answers": [dict(zip(("text", "answer_start"), pair)) for pair in zip(*row["answers"].values())],
                }
            ],
        }
        for row in asked
    ]
    (tmp_path / "a.json").write_text(json.dumps({"version": "v2.0", "data": [{"title": "", "paragraphs": squad}]}))
    task = load_task("question-answering")
    found = [
        task.load_data(recipe_for(tmp_path / f"a.{kind}"), progress=False)
        for kind in ("jsonl", "parquet", "csv", "json")
    ]
    assert len({data.fingerprint for data in found}) == 1
    assert [data.source.row_ids(0) for data in found] == [found[0].source.evaluated[0].id] * 4
    assert found[0].facts.others["num_unanswered"] > 0


@pytest.mark.parametrize(
    ("tokenizer", "max_length"), [("bytes", 64), ({"train_bpe": {"vocab_size": 300}}, 28)], ids=["bytes", "bpe"]
)
def test_every_answer_is_whole_in_some_window_of_its_question_and_says_its_text(
    tmp_path: Path, tokenizer: Any, max_length: int
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", questions())
    _, data, _ = load(recipe_for(path, tokenizer=tokenizer, data={"max_length": max_length, "doc_stride": 7}))
    num_windows = [len(windows) for windows in data.eval]
    assert max(num_windows) > 1
    for row, windows in zip(data.source.evaluated, data.eval):
        answered = [window for window in windows if window.answer != (0, 0)]
        assert answered
        for window in answered:
            first, last = (place - window.context[0] for place in window.answer)
            offsets = window.offsets.reshape(-1, 2)
            assert row.context[offsets[first, 0] : offsets[last, 1]].strip() == row.answers[0]
        covered = {
            place for window in windows for start, end in window.offsets.reshape(-1, 2) for place in range(start, end)
        }
        assert covered >= {place for place, letter in enumerate(row.context) if not letter.isspace()}
    batch, num_targets = batch_of(data, range(5))
    assert num_targets == sum(num_windows[:5]) == len(batch["input_ids"])
    assert batch["windows"].shape[0] == 5
    assert data.train[0].offsets.size == 0


def test_a_smoothed_place_is_shared_among_the_places_of_its_window_alone() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    expected = torch.nn.functional.cross_entropy(logits[:1], torch.tensor([4]), label_smoothing=0.2)
    expected = expected + torch.nn.functional.cross_entropy(logits[1:, :3], torch.tensor([0]), label_smoothing=0.2)
    torch.testing.assert_close(position_loss_sum(logits, torch.tensor([4, 0]), mask, 0.2), expected)


def test_the_best_answers_are_those_of_all_pairs_of_all_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    start, end = (torch.randn(3, 7, generator=generator) for _ in range(2))
    context = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]])
    at = torch.arange(7)[None] + torch.tensor([[0], [4], [0]])
    batch = {
        "context": context,
        "offsets": torch.stack([3 * at, 3 * at + 3], -1),
        "windows": torch.tensor([[0, 1], [2, -1]]),
    }
    found = best_spans(start, end, batch, num_best=4, max_answer_length=3)
    for question, windows in enumerate(([0, 1], [2])):
        pairs = [
            ((start[w, i] + end[w, j]).item(), [int(3 * at[w, i]), int(3 * at[w, j] + 3)])
            for w in windows for i in range(7) for j in range(i, min(i + 3, 7)) if context[w, i] and context[w, j]
        ]  # fmt: skip
        expected = sorted(pairs, reverse=True)[:4]
        assert found["scores"][question].tolist() == pytest.approx([score for score, _ in expected])
        assert found["spans"][question].tolist() == [span for _, span in expected]
        null = min((start[w, 0] + end[w, 0]).item() for w in windows)
        assert found["null"][question].item() == pytest.approx(null)
    few = best_spans(start, end, batch, num_best=40, max_answer_length=1)["scores"]
    assert few.isfinite().sum(1).tolist() == [7, 6]


def test_no_answer_is_given_where_the_threshold_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", questions(unanswered=5))
    for threshold, accuracy in ((-100.0, 1.0), (100.0, 0.0)):
        task, data, model = load(recipe_for(path, evaluate={"null_score_diff_threshold": threshold}))
        assert evaluated(task, data, model, 8)[0]["no_answer_accuracy"] == accuracy
        assert any(f"null_score_diff_threshold={threshold:g}" in note for note in data.facts.notes)
    task, data, model = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", questions())))
    assert "no_answer_accuracy" not in evaluated(task, data, model, 8)[0]


def test_the_baselines_are_the_words_near_those_of_the_question_and_no_answer(tmp_path: Path) -> None:
    train = [Question("?", "a b", (), (), "", ""), Question("?", "x", (), (), "", "")]
    context = "cats sleep well . the small red boat sinks . dogs bark"
    assert overlap_answers(train, [Question("which small boat sinks ?", context, (), (), "", "")]) == ["red"]
    assert overlap_answers(train, [Question("小 船 ?", "猫睡了。小红船沉了", (), (), "", "")]) == ["红"]
    task, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", questions(unanswered=3))))
    wanted = [bool(row.answers) for row in data.source.evaluated]
    baselines = task.baselines(data)
    assert baselines["no_answer_f1"] == pytest.approx(1 - sum(wanted) / len(wanted))
    assert baselines.keys() == {
        f"{name}_{metric}" for name in ("sliding_window", "no_answer") for metric in ("exact_match", "f1")
    }


def test_a_question_longer_than_a_window_is_cut_to_leave_room_and_said(tmp_path: Path) -> None:
    long = {
        "id": "long",
        "question": "why " * 60,
        "context": "The hat is red",
        "answers": {"text": ["red"], "answer_start": [11]},
    }
    _, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", [long, *questions(8)]), data={"eval_fraction": 0.0}))
    assert data.train[0].answer != (0, 0)
    assert any(note == "training questions longer than half a window, and cut there: 1" for note in data.facts.notes)


def test_questions_on_functions_are_answered_by_pythons_parser() -> None:
    text = (
        "def f(a, b=1, *, c=None):\n    x = a + b\n    for y in x:\n        pass\n    if x: raise KeyError(y)\n    "
        "return x\n"
    )
    found = dict(_questions(text))
    assert {question: answer and answer[0] for question, answer in found.items()} == {
        "What is the default of a?": None,
        "What is the default of b?": "1",
        "What is the default of c?": "None",
        "What is assigned to x?": "a + b",
        "What does the loop over y go over?": "x",
        "What does it return?": "x",
        "Which exception does it raise?": "KeyError",
    }
    assert all(text[at : at + len(answer)] == answer for answer, at in filter(None, found.values()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on questions of which some have no answer."""
    folder = tmp_path_factory.mktemp("finished")
    write_jsonl(folder / "a.jsonl", questions(90, unanswered=4))
    return train(
        "question-answering",
        folder,
        data={"train": str(folder / "a.jsonl"), "max_length": 40},
        **yaml.safe_load("""
            tokenizer: {train_bpe: {vocab_size: 320}}
            batch: {global_batch_size: 16, per_device_eval_batch_size: 3}
            optimizer: {learning_rate: 0.01}
            schedule: {max_steps: 60}
            evaluate: {every_steps: 30, metric_for_best_model: f1, max_samples: 5}
        """),
    )


def test_a_run_learns_to_answer_and_reports_scores_next_to_baselines(finished: Path) -> None:
    last = metrics(finished, "eval_final")[-1]
    summary = load_json(finished / "summary.json")
    assert last["f1"] > max(0.7, *(value for name, value in summary["baselines"].items() if name.endswith("f1")))
    assert len(metrics(finished, "eval")) == 2
    model = AutoModelForQuestionAnswering.from_pretrained(finished / "model")
    assert model.config.may_be_unanswered


def test_the_code_in_the_model_card_answers_a_question(finished: Path) -> None:
    replaced = {"a question": "Which color has the boat?", "a text": "so it was said The boat is green 9."}
    assert run_card(finished / "model", replaced).strip() == "green"


def test_predict_answers_new_questions_and_leaves_those_without_an_answer_empty(
    finished: Path, not_launched: None
) -> None:
    rows = questions(12, unanswered=4)
    asked = [{name: row[name] for name in ("id", "question", "context")} for row in rows]
    new = write_jsonl(finished.parent / "new.jsonl", asked)
    found = predict(finished, finished.parent / "out.jsonl", new)
    assert [row["id"] for row in found] == [f"q{number}" for number in range(12)]
    right = [row["answer"] == ("".join(truth["answers"]["text"])) for row, truth in zip(found, rows)]
    assert sum(right) >= 9
    assert all(row["answer"] in ("", row["best_answers"][0]) and 0 <= row["score"] <= 1 for row in found)
    assert all((row["answer"] == "") == (row["null_score"] > 0) for row in found)
    assert not math.isinf(found[0]["null_score"])
    assert "true_answers" not in found[0]
