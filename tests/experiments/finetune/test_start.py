"""`accel_train.finetune`: data, a recipe, a run, and predictions for new rows, in one program."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest

import accel_train
from accel_train.cli.early import check_headers
from accel_train.cli.main import main
from accel_train.inference.generate import chat_with_run
from accel_train.inference.predict import predict_rows
from accel_train.tasks.text_classification.config import TextClassificationData
from tests.support.runs import refused
from tests.support.wording import assert_golden

TEXTS = ["a lovely film", "an awful film", "lovely, wonderful"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "accel_train.RunResult"]:
    folder = tmp_path_factory.mktemp("reviews")
    draw = random.Random(0)
    kinds = [draw.random() < 0.5 for _ in range(120)]
    rows = [f"{'a lovely wonderful' if good else 'an awful boring'} film {n},{'yes' if good else 'no'}"
            for n, good in enumerate(kinds)]  # fmt: skip
    (folder / "reviews.csv").write_text("\n".join(["review,liked", *rows]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = accel_train.finetune("reviews.csv", schedule={"num_epochs": 2}, log={"progress": False}, seed=3)
    return folder, result


def test_it_trains_the_recipe_that_it_wrote_with_the_settings_of_the_call(
    trained: tuple[Path, "accel_train.RunResult"], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = trained
    monkeypatch.chdir(folder)
    written = accel_train.Recipe.from_yaml("runs/reviews.yaml")
    assert (written.schedule.num_epochs, written.seed, written.output_dir) == (2, 3, "runs/reviews")
    assert result.output_dir == Path("runs/reviews")
    assert result.metrics["accuracy"] > 0.9
    weights = (folder / "runs/reviews/model/model.safetensors").stat().st_mtime_ns
    again = accel_train.finetune("reviews.csv", schedule={"num_epochs": 2}, log={"progress": False}, seed=3)
    assert again.metrics == result.metrics
    assert (folder / "runs/reviews/model/model.safetensors").stat().st_mtime_ns == weights
    refused(accel_train.finetune, "reviews.csv", schedule={"num_epochs": 3}, named="runs/reviews.yaml exists")


def test_rows_in_any_form_are_predicted_as_the_command_does(
    trained: tuple[Path, "accel_train.RunResult"], monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    folder, result = trained
    monkeypatch.chdir(folder)
    Path("new.csv").write_text("review\n" + "".join(f'"{text}"\n' for text in TEXTS))
    assert main(["predict", "runs/reviews", "new.csv", "--out", "out.csv"]) == 0
    with open("out.csv", newline="") as file:
        expected = [(row["label"], float(row["score_yes"])) for row in csv.DictReader(file)]
    assert [label for label, _ in expected] == ["yes", "no", "yes"]
    rows = [{"review": text, "other": np.float64("nan")} for text in TEXTS]
    for given in (TEXTS, rows, pandas.DataFrame(rows), "new.csv", Path("new.csv")):
        found = result.predict(given)
        assert [(row["label"], row["score_yes"]) for row in found] == expected
        assert ("id" in found[0]) == (not isinstance(given, list | pandas.DataFrame))
    for wrong in ([3], [{"text": "a"}], []):
        with pytest.raises(ValueError, match=r"review|row"):
            result.predict(wrong)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_template_of_columns_is_the_same_text_in_the_run_and_for_new_rows(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "title": f"{'lovely' if n % 2 else 'awful'} {n}" if n % 5 else "",
            "body": f"a film, {'fine' if n % 2 else 'bad'}",
            "label": ("no", "yes")[n % 2] if kind == "classes" else f"{n % 2 + n / 1000}",
        }
        for n in range(1, 81)
    ]
    joined = [{"text": f"{row['title']}, ({row['body']})", "label": row["label"]} for row in rows]
    for name, table in (("parts", rows), ("joined", joined)):
        with open(f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, [*table[0]])
            writer.writeheader()
            writer.writerows(table)
    steps = ["--label", "label", "--schedule.max_steps", "8", "--log.progress", "false"]
    assert main(["finetune", "parts.csv", "--text", "{title}, ({body})", *steps]) == 0
    assert main(["finetune", "joined.csv", *steps]) == 0
    parts, whole = (json.loads(Path(f"runs/{name}/summary.json").read_text())["eval"] for name in ("parts", "joined"))
    assert parts == whole
    for name in ("parts", "joined"):
        assert main(["evaluate", f"runs/{name}", "--data", f"{name}.csv"]) == 0
    parts, whole = (
        json.loads(Path(f"runs/{name}/evaluation-{name}.json").read_text())["metrics"] for name in ("parts", "joined")
    )
    assert parts == whole
    new = [{"title": None, "body": "a fine film", "year": 1999}, {"title": "awful", "body": ""}]
    assert predict_rows(Path("runs/parts"), new) == predict_rows(Path("runs/joined"), [", (a fine film)", "awful, ()"])
    capsys.readouterr()
    refused(predict_rows, Path("runs/parts"), ["a fine film"], named="Give mappings with 'title', 'body'.")


@pytest.mark.parametrize("text", ["{titel}. {body}", "{title}. {label}"])
def test_a_template_of_a_wrong_column_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("parts.csv").write_text("title,body,label\n" + "one,two words,a\nthree,four words,b\n" * 20)
    assert main(["finetune", "parts.csv", "--text", text, "--label", "label", "--dry-run"]) == 2
    assert_golden(capsys.readouterr().err)
    early = TextClassificationData(train="parts.csv", text_columns=(text,), label_column="label")
    if "titel" in text:
        refused(check_headers, early, named="no column 'titel'; did you mean 'title'")


def test_a_conversation_reads_what_was_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["red", "blue", "green", "gold"] * 10
    chats = [[{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}] for word in words]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    sections = {"schedule": {"max_steps": 3}, "log": {"progress": False}, "data": {"sequence_length": 256}}
    accel_train.finetune("chats.jsonl", **sections)
    capsys.readouterr()
    said = chat_with_run(Path("runs/chats"), ["say red", "say blue"], max_new_tokens=8, temperature=0)
    assert [each["role"] for each in said] == ["user", "assistant"] * 2
    answers = [each["content"] for each in said[1::2]]
    assert capsys.readouterr().out.split() == " ".join(answers).split()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("runs/chats/model")
    model = AutoModelForCausalLM.from_pretrained("runs/chats/model")
    prompt = tokenizer.apply_chat_template(said[:3], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    written = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True).strip() == answers[1]
    assert len(chat_with_run(Path("runs/chats"), ["say red"] * 12, max_new_tokens=100)) == 24  # more than fits
    refused(predict_rows, Path("runs/chats"), ["say red"], named="predicts no labels")
