"""Question answering: answers stay at their place whatever the windows, each question counts once,
mistakes are named.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering

from accel_train.cli.main import main
from accel_train.data.builtin.stdlib_questions import _questions
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.question_answering.answers import best_spans, overlap_answers, position_loss_sum
from accel_train.tasks.question_answering.data import Question
from accel_train.tasks.question_answering.task import QuestionAnswering
from tests.support.runs import metrics, write_recipe_file

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
BERT = {"model_type": "bert", **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
COLOURS, THINGS = ("red", "green", "blue"), ("house", "boat", "door", "hat")


def rows(count: int = 60, *, unanswered: int = 0) -> list[dict[str, Any]]:
    """What colour something has, in contexts of very different lengths; each `unanswered`-th question has no answer."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        colour, thing = COLOURS[number % 3], THINGS[number // 3 % 4]
        before, after = "so it was said " * (number % 4), " and that was number" * (number % 5 % 3)
        context = f"{before}The {thing} is {colour}{after} {number}."
        has_answer = not unanswered or number % unanswered
        texts, starts = ([colour], [context.index(colour)]) if has_answer else ([], [])
        question = f"Which colour has the {thing}?" if has_answer else f"Who owns the {thing}?"
        found.append(
            {
                "id": f"q{number}",
                "question": question,
                "context": context,
                "answers": {"text": texts, "answer_start": starts},
            }
        )
    return found


def write_jsonl(path: Path, questions: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return path


def recipe_for(train: Path | str, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "question-answering",
        "output_dir": "run",
        "model": {"config": BERT},
        "data": {},
        "schedule": {"max_steps": 1},
        **sections,
    }
    settings["data"] = {"train": str(train), "eval_fraction": 0.3, "id_column": "id", **settings["data"]}
    return Recipe.model_validate(settings)


def load(recipe: Recipe) -> tuple[QuestionAnswering, TaskData, nn.Module]:
    task = load_task("question-answering")
    assert isinstance(task, QuestionAnswering)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(0)
    return task, data, task.build_model(recipe, data).eval()


def batch_of(data: TaskData, indices: range, *, train: bool = False) -> tuple[dict[str, Tensor], int]:
    samples = data.train if train else data.eval
    assert samples is not None
    batch = data.collate([samples[index] for index in indices])
    return batch, batch.pop("num_targets")


def evaluated(task: QuestionAnswering, data: TaskData, model: nn.Module, batch_size: int) -> dict[str, float]:
    """Loss and scores as an evaluation adds them up."""
    found: dict[str, list[Tensor]] = {}
    num_targets, size = 0, len(data.eval)  # type: ignore[arg-type]
    with torch.no_grad():
        for start in range(0, size, batch_size):
            batch, count = batch_of(data, range(start, min(start + batch_size, size)))
            num_targets += count
            for name, value in task.evaluate_batch(model, batch).items():
                found.setdefault(name, []).append(value)
    loss = torch.stack(found.pop("loss_sum")).sum().item() / num_targets
    totals = {name: torch.cat(values).numpy() for name, values in found.items()}
    return {"loss": loss, **task.score(loss, totals, data).metrics}


def test_jsonl_parquet_csv_and_squads_own_form_are_read_as_the_same_samples(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    questions = rows(20, unanswered=4)
    write_jsonl(tmp_path / "a.jsonl", questions)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions), tmp_path / "a.parquet")
    cells = [{**row, "answers": json.dumps(row["answers"])} for row in questions]
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
        for row in questions
    ]
    (tmp_path / "a.json").write_text(json.dumps({"version": "v2.0", "data": [{"title": "", "paragraphs": squad}]}))
    task = load_task("question-answering")
    found = [
        task.load_data(recipe_for(tmp_path / f"a.{kind}"), progress=False)
        for kind in ("jsonl", "parquet", "csv", "json")
    ]
    assert len({data.fingerprint for data in found}) == 1
    assert [data.source.row_ids(0) for data in found] == [found[0].source.asked[0].id] * 4
    assert found[0].facts["num_unanswered"] > 0


@pytest.mark.parametrize(
    ("tokenizer", "max_length"), [("bytes", 64), ({"train_bpe": {"vocab_size": 300}}, 28)], ids=["bytes", "bpe"]
)
def test_every_answer_is_whole_in_some_window_of_its_question_and_says_its_text(
    tmp_path: Path, tokenizer: Any, max_length: int
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows())
    _, data, _ = load(recipe_for(path, tokenizer=tokenizer, data={"max_length": max_length, "doc_stride": 7}))
    num_windows = [len(windows) for windows in data.eval]  # type: ignore[union-attr]
    assert max(num_windows) > 1
    for row, windows in zip(data.source.asked, data.eval):  # type: ignore[call-overload]
        answered = [window for window in windows if window.answer != (0, 0)]
        assert answered
        for window in answered:
            first, last = (place - window.context[0] for place in window.answer)
            assert row.context[window.offsets[first, 0] : window.offsets[last, 1]].strip() == row.answers[0].text
        covered = {place for window in windows for start, end in window.offsets for place in range(start, end)}
        assert covered >= {place for place, letter in enumerate(row.context) if not letter.isspace()}
    batch, num_targets = batch_of(data, range(5))
    assert num_targets == sum(num_windows[:5]) == len(batch["input_ids"])
    assert batch["windows"].shape[0] == 5
    assert data.train[0].offsets.size == 0


def test_the_loss_is_the_models_own_where_nothing_is_padded_and_padding_changes_nothing(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", rows()), data={"pad_to_multiple_of": 1}))
    alone = [batch_of(data, range(row, row + 1), train=True)[0] for row in range(8)]
    for batch in alone:
        ours, its = task.loss_sum(model, batch), model(**batch).loss
        torch.testing.assert_close(ours, its)
        weight = model.qa_outputs.weight
        torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, its)))
    together, num_targets = batch_of(data, range(8), train=True)
    assert num_targets == 8
    assert len({batch["input_ids"].shape[1] for batch in alone}) > 2
    expected = sum(task.loss_sum(model, batch) for batch in alone)
    torch.testing.assert_close(task.loss_sum(model, together), expected)


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


@pytest.mark.parametrize("unanswered", [0, 5])
def test_the_evaluation_counts_each_question_once_whatever_the_batches_and_windows(
    tmp_path: Path, unanswered: int
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(unanswered=unanswered))
    task, data, model = load(recipe_for(path, data={"max_length": 64}))
    alone = evaluated(task, data, model, 1)
    assert ("no_answer_accuracy" in alone) == bool(unanswered)
    for batch_size in (2, 7, 32):
        assert evaluated(task, data, model, batch_size) == pytest.approx(alone, abs=1e-5), batch_size


def test_no_answer_is_given_where_the_threshold_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(unanswered=5))
    for threshold, accuracy in ((-100.0, 1.0), (100.0, 0.0)):
        task, data, model = load(recipe_for(path, evaluate={"null_score_diff_threshold": threshold}))
        assert evaluated(task, data, model, 8)["no_answer_accuracy"] == accuracy
        assert any(f"null_score_diff_threshold={threshold:g}" in note for note in data.facts["notes"])


def test_the_baselines_are_the_words_near_those_of_the_question_and_no_answer(tmp_path: Path) -> None:
    train = [Question("?", "a b", (), "", ""), Question("?", "x", (), "", "")]
    context = "cats sleep well . the small red boat sinks . dogs bark"
    assert overlap_answers(train, [Question("which small boat sinks ?", context, (), "", "")]) == ["red"]
    task, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", rows(unanswered=3))))
    wanted = [bool(row.answers) for row in data.source.asked]
    baselines = task.baselines(data)
    assert baselines["no_answer_f1"] == pytest.approx(1 - sum(wanted) / len(wanted))
    assert baselines.keys() == {
        f"{name}_{metric}" for name in ("sliding_window", "no_answer") for metric in ("exact_match", "f1")
    }


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"doc_stride": 40}}, "data.doc_stride=40 is more than a quarter of data.max_length=128"),
        ({"data": {"answers_column": "answer"}}, "no column 'answer'; did you mean 'answers'?"),
        ({"model": {"config": {"model_type": "vit"}}}, "has no model for question answering"),
        ({"loss": {"class_weights": "balanced"}}, "loss.class_weights is for classes"),
        ({"evaluate": {"metrics": ["f1"]}}, "reports exact match and F1"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what the test looks at)
        load(recipe_for(write_jsonl(tmp_path / "a.jsonl", rows()), **sections))
    assert said in str(caught.value)


def test_an_answer_that_is_not_in_its_context_is_named(tmp_path: Path) -> None:
    for answers, said in (
        (None, "the row has no answers; fill them in (an empty list: the context has none)"),
        (
            {"text": ["red"], "answer_start": [3]},
            'the answer "red" is not at character 3 of its context, where " ho" stands',
        ),
        ({"text": ["red"], "answer_start": []}, "are not {text: [...], answer_start: [...]}"),
        (3, "are not {text: [...], answer_start: [...]}"),
    ):
        row = {"id": 1, "question": "?", "context": "The house is red", "answers": answers}
        with pytest.raises(ValueError, match=r"a\.jsonl:1") as caught:
            load(recipe_for(write_jsonl(tmp_path / "a.jsonl", [row])))
        assert said in str(caught.value)


def test_a_question_longer_than_a_window_is_cut_to_leave_room_and_said(tmp_path: Path) -> None:
    long = {
        "id": "long",
        "question": "why " * 60,
        "context": "The hat is red",
        "answers": {"text": ["red"], "answer_start": [11]},
    }
    _, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", [long, *rows(8)]), data={"eval_fraction": 0.0}))
    assert data.train[0].answer != (0, 0)
    assert any("1 training questions are longer than half a window" in note for note in data.facts["notes"])


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
    """A folder with a finished run on questions of which some have no answer."""
    folder = tmp_path_factory.mktemp("finished")
    write_jsonl(folder / "a.jsonl", rows(90, unanswered=4))
    recipe = write_recipe_file(
        folder,
        task="question-answering",
        model={"config": BERT},
        tokenizer={"train_bpe": {"vocab_size": 320}},
        data={"train": str(folder / "a.jsonl"), "eval_fraction": 0.2, "id_column": "id", "max_length": 40},
        batch={"global_batch_size": 16, "per_device_eval_batch_size": 3},
        optimizer={"learning_rate": 1e-2},
        schedule={"max_steps": 60},
        evaluate={"every_steps": 30, "metric_for_best_model": "f1", "max_samples": 5},
    )
    assert main(["run", str(recipe)]) == 0
    return folder


def test_a_run_learns_to_answer_and_reports_scores_beside_baselines(finished: Path) -> None:
    last = metrics(finished / "run", "eval_final")[-1]
    summary = json.loads((finished / "run" / "summary.json").read_text())
    assert last["f1"] > max(0.7, *(value for name, value in summary["baselines"].items() if name.endswith("f1")))
    assert len(metrics(finished / "run", "eval")) == 2
    model = AutoModelForQuestionAnswering.from_pretrained(finished / "run" / "model")
    assert model.config.may_be_unanswered


def test_the_code_in_the_model_card_answers_a_question(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = finished / "run" / "model"
    code = (model / "README.md").read_text().split("```python")[1].split("```")[0]
    code = code.replace("path/of/this/folder", str(model)).replace("a question", "Which colour has the boat?")
    exec(code.replace("a text", "so it was said The boat is green 9."), {})
    assert capsys.readouterr().out.strip() == "green"


def test_predict_answers_new_questions_and_leaves_those_without_an_answer_empty(
    finished: Path, not_launched: None
) -> None:
    asked = [{name: row[name] for name in ("id", "question", "context")} for row in rows(12, unanswered=4)]
    new, out = write_jsonl(finished / "new.jsonl", asked), finished / "out.jsonl"
    assert main(["predict", str(finished / "run"), str(new), "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found] == [f"q{number}" for number in range(12)]
    right = [row["answer"] == ("".join(truth["answers"]["text"])) for row, truth in zip(found, rows(12, unanswered=4))]
    assert sum(right) >= 9
    assert all(row["answer"] in ("", row["best_answers"][0]) and 0 <= row["score"] <= 1 for row in found)
    assert all((row["answer"] == "") == (row["null_score"] > 0) for row in found)
    assert not math.isinf(found[0]["null_score"])
    assert "true_answers" not in found[0]
