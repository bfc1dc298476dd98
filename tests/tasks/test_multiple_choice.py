"""Multiple choice: the loss is transformers' own whatever the batch, endings keep their places, mistakes are named."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from accel_train.cli.main import main
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.multiple_choice.task import MultipleChoice
from tests.support.runs import REPOSITORY, metrics, run, write_recipe_file

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
BERT = {"model_type": "bert", **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERNBERT = {"model_type": "modernbert", "local_attention": 16, "classifier_pooling": "mean", **SIZES}
PAIRS = {"cat": "meows", "dog": "barks", "cow": "moos"}


def rows(count: int = 60) -> list[dict[str, Any]]:
    """What an animal does: one of three endings is right, the one that is loud."""
    found = []
    for number in range(count):
        animal = list(PAIRS)[number % 3]
        sounds = [list(PAIRS.values())[(number // 3 + place) % 3] for place in range(3)]
        right = sounds.index(PAIRS[animal])
        endings = [f"and {sound} {'loudly' if place == right else 'never'}" for place, sound in enumerate(sounds)]
        found.append(
            {
                "id": f"row-{number}",
                "text": f"{'so ' * (number % 7)}the {animal} {number}",
                "endings": endings,
                "label": right,
            }
        )
    return found


def write_jsonl(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    return path


def recipe_for(train: Path | str, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "multiple-choice",
        "output_dir": "run",
        "model": {"config": BERT},
        "data": {},
        "schedule": {"max_steps": 1},
        **sections,
    }
    settings["data"] = {"train": str(train), "eval_fraction": 0.3, **settings["data"]}
    return Recipe.model_validate(settings)


def load(recipe: Recipe) -> tuple[MultipleChoice, TaskData, nn.Module]:
    task = load_task("multiple-choice")
    assert isinstance(task, MultipleChoice)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(0)
    return task, data, task.build_model(recipe, data).eval()


def batch_of(data: TaskData, indices: range, *, train: bool = False) -> tuple[dict[str, Tensor], int]:
    samples = data.train if train else data.eval
    assert samples is not None
    batch = data.collate([samples[index] for index in indices])
    return batch, batch.pop("num_targets")


def test_lists_columns_and_letters_are_read_as_the_same_samples(tmp_path: Path) -> None:
    samples = rows(20)
    write_jsonl(tmp_path / "a.jsonl", samples)
    write_jsonl(tmp_path / "letters.jsonl", [{**row, "label": "ABC"[row["label"]]} for row in samples])
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "begin", "e0", "e1", "e2", "label"])
        writer.writerows(
            [row["text"], "and", *(end.removeprefix("and ") for end in row["endings"]), row["label"]] for row in samples
        )
    task, apart = (
        load_task("multiple-choice"),
        {"text_columns": ["text", "begin"], "choices_columns": ["e0", "e1", "e2"]},
    )
    found = [
        task.load_data(recipe_for(tmp_path / name, data=section), progress=False).fingerprint
        for name, section in (("a.jsonl", {}), ("letters.jsonl", {}), ("a.csv", apart))
    ]
    assert len(set(found)) == 1


@pytest.mark.parametrize("config", [BERT, MODERNBERT], ids=["bert", "modernbert"])
def test_the_loss_is_the_models_own_whatever_the_batch_and_so_is_its_gradient(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    task, data, model = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", rows()), model={"config": config}))
    batch, num_targets = batch_of(data, range(8), train=True)
    assert batch["input_ids"].shape[:2] == (8, 3)
    assert ("token_type_ids" in batch) == (config is BERT)
    ours, its = task.loss_sum(model, batch) / num_targets, model(**batch).loss
    torch.testing.assert_close(ours, its)
    flops = task.flops_per_target(recipe_for("a"), model)
    assert flops is None if config is MODERNBERT else flops and flops > 0  # a mean needs a mask, which counting has not
    weight = model.classifier.weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, its)))
    alone = sum(task.loss_sum(model, batch_of(data, range(row, row + 1), train=True)[0]) for row in range(8))
    torch.testing.assert_close(task.loss_sum(model, batch), alone)


def test_each_ending_is_read_with_its_text_and_knows_where_it_begins(tmp_path: Path) -> None:
    _, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", rows())))
    own, row, sample = data.source.tokenizer, data.source.choices.eval[0], data.eval[0]  # type: ignore[index]
    assert len(sample.ids) == 3
    for ids, begin, ending in zip(sample.ids, sample.second_from, row.endings, strict=True):
        assert own.decode(ids[begin:-1]) == ending
        assert own.decode(ids[1 : begin - 1]) == row.text
    assert data.source.row_ids(0) == row.where


def test_smoothing_counts_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows())
    plain, _, _ = load(recipe_for(path))
    task, data, model = load(recipe_for(path, loss={"label_smoothing": 0.2}))
    batch, _ = batch_of(data, range(8), train=True)
    torch.testing.assert_close(task.evaluate_batch(model, batch)["loss_sum"], plain.loss_sum(model, batch))
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    expected = nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(task.loss_sum(model.train(), batch), expected)


def test_baselines_are_a_place_and_the_words_that_the_text_has(tmp_path: Path) -> None:
    samples = [
        {"text": f"a red hat {number}", "endings": ["is blue", "is a red hat"], "label": int(number % 4 > 0)}
        for number in range(60)
    ]
    task, data, _ = load(recipe_for(write_jsonl(tmp_path / "a.jsonl", samples)))
    share = np.mean([row.label for row in data.source.choices.eval])
    assert task.baselines(data) == {
        "majority_accuracy": pytest.approx(share),
        "word_overlap_accuracy": pytest.approx(share),
    }


def test_a_mistake_is_named_with_its_remedy(tmp_path: Path) -> None:
    good = {"text": "a", "endings": ["b", "c"], "label": 1}
    for samples, sections, said in (
        (
            [good, {**good, "label": 2}],
            {},
            "a.jsonl:2, column 'label': 2 is the place of no ending; there are 2, 0 to 1 or A to B",
        ),
        ([good, {**good, "label": None}], {}, "a.jsonl:2, column 'label': null is the place of no ending"),
        ([good, {**good, "endings": ["b", "c", "d"]}], {}, "a.jsonl:2: 3 endings, and"),
        ([{**good, "endings": ["b"]}], {}, "a.jsonl:1: column 'endings' has 1 endings; at least two"),
        ([{**good, "endings": 3}], {}, "a.jsonl:1: column 'endings' holds 3, not a list"),
        ([good], {"data": {"choices_columns": ["ending"]}}, "no column 'ending'; did you mean 'endings'?"),
        ([good], {"loss": {"class_weights": "balanced"}}, "loss.class_weights is for classes"),
        ([good], {"model": {"config": {"model_type": "gpt2"}}}, "has no model for multiple choice"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what the test looks at)
            load(recipe_for(write_jsonl(tmp_path / "a.jsonl", samples), **sections))
        assert said in str(caught.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run on animals."""
    folder = tmp_path_factory.mktemp("finished")
    write_jsonl(folder / "a.jsonl", rows(120))
    recipe = write_recipe_file(
        folder,
        task="multiple-choice",
        model={"config": BERT},
        tokenizer={"train_bpe": {"vocab_size": 320}},
        data={"train": str(folder / "a.jsonl"), "eval_fraction": 0.2, "id_column": "id", "group_by_length": True},
        batch={"global_batch_size": 16},
        optimizer={"learning_rate": 5e-3},
        schedule={"max_steps": 60},
        evaluate={"every_steps": 30, "metric_for_best_model": "accuracy"},
    )
    assert main(["run", str(recipe)]) == 0
    return folder


def test_a_run_learns_which_ending_is_right_and_reports_it_beside_baselines(finished: Path) -> None:
    last = metrics(finished / "run", "eval")[-1]
    summary = json.loads((finished / "run" / "summary.json").read_text())
    assert last["accuracy"] > max(0.9, *summary["baselines"].values())
    assert AutoModelForMultipleChoice.from_pretrained(finished / "run" / "model").config.model_type == "bert"


def test_the_code_in_the_model_card_chooses_an_ending(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = finished / "run" / "model"
    code = (model / "README.md").read_text().split("```python")[1].split("```")[0]
    code = code.replace("path/of/this/folder", str(model)).replace("a text", "the cow 4")
    exec(code.replace("one ending", "and moos loudly").replace("another ending", "and barks never"), {})
    assert capsys.readouterr().out.strip() == "and moos loudly"
    inputs = AutoTokenizer.from_pretrained(model)("the cow 4", "and moos loudly")
    assert set(inputs["token_type_ids"]) == {0, 1}, "as in training: which of the two texts a token is of"


def test_predict_writes_the_place_of_the_right_ending_and_a_score_for_each(finished: Path, not_launched: None) -> None:
    new = write_jsonl(
        finished / "new.jsonl", [{name: value for name, value in row.items() if name != "label"} for row in rows(9)]
    )
    out = finished / "out.jsonl"
    assert main(["predict", str(finished / "run"), str(new), "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["label"] for row in found] == [str(row["label"]) for row in rows(9)]
    assert [row["ending"] for row in found] == [row["endings"][row["label"]] for row in rows(9)]
    assert not any("true_label" in row for row in found)
    assert all(sum(row[f"score_{place}"] for place in range(3)) == pytest.approx(1, abs=1e-5) for row in found)
    assert main(["predict", str(finished / "run"), "--out", str(out)]) == 0
    held_out = [json.loads(line) for line in out.read_text().splitlines()]
    places = {row["id"]: str(row["label"]) for row in rows(120)}
    assert all(row["true_label"] == places[row["id"]] for row in held_out)
    assert main(["evaluate", str(finished / "run"), "--data", str(finished / "a.jsonl")]) == 0


@pytest.mark.slow
def test_the_recipe_beats_the_words_in_common_in_two_fifths_of_its_steps(tmp_path: Path) -> None:
    shorter = ["--schedule.num_epochs", "null", "--schedule.max_steps", "200", "--evaluate.every_epochs", "null"]
    run(REPOSITORY / "recipes/multiple_choice.yaml", *shorter, "--output_dir", str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["accuracy"] > max(summary["baselines"].values()) + 0.1
