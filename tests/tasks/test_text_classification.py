"""Text classification: the loss is transformers' own whatever the batch, labels and weights are kept, mistakes are
named.
"""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, pipeline

from accel_train.data.text.tokenizers import train_bpe
from accel_train.metrics.scores import auroc, auroc_from_histogram
from accel_train.metrics.tally import score_histogram
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.text_classification.task import TextClassification
from tests.support.runs import REPOSITORY, metrics, run, write_recipe_file

RECIPE = REPOSITORY / "recipes/text_classification.yaml"

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
BERT = {"model_type": "bert", **SIZES}
MODERNBERT = {"model_type": "modernbert", "classifier_pooling": "mean", "local_attention": 16, **SIZES}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}

TOPICS = {"loop": "step batch epoch update", "number": "loss norm mean sum", "machine": "rank device memory host"}


def write_texts(path: Path, num_rows: int = 60, label: Callable[[int], Any] | None = None) -> Path:
    """Texts of very different lengths about three topics; returns the path."""
    names = list(TOPICS)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "more", "label"])
        for number in range(num_rows):
            words = TOPICS[names[number % 3]].split()
            text = " ".join(words[(number + i * i) % 4] for i in range(1 + number * 7 % 18)) + f" {number}"
            value = names[number % 3] if label is None else label(number)
            writer.writerow([f"row-{number}", text, f"and {words[0]} {number}", value])
    return path


def recipe_for(train: Path | str, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "text-classification",
        "output_dir": "run",
        "model": {"config": BERT},
        "data": {},
        "schedule": {"max_steps": 1},
        **sections,
    }
    settings["data"] = {"train": str(train), "eval_fraction": 0.3, **settings["data"]}
    return Recipe.model_validate(settings)


def load(recipe: Recipe, seed: int = 0) -> tuple[TextClassification, TaskData, nn.Module]:
    task = load_task("text-classification")
    assert isinstance(task, TextClassification)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(seed)
    model = task.build_model(recipe, data)
    return task, data, model.eval()


def batch_of(data: TaskData, indices: range, *, train: bool = False) -> tuple[dict[str, Tensor], int]:
    samples = data.train if train else data.eval
    assert samples is not None
    batch = data.collate([samples[index] for index in indices])
    return batch, batch.pop("num_targets")


def evaluated(task: TextClassification, data: TaskData, model: nn.Module, batch_size: int) -> dict[str, Any]:
    """Loss and scores as an evaluation adds them up."""
    found: dict[str, list[Tensor]] = {}
    num_targets, size = 0, len(data.eval)  # type: ignore[arg-type]
    with torch.no_grad():
        for start in range(0, size, batch_size):
            batch, count = batch_of(data, range(start, min(start + batch_size, size)))
            num_targets += count
            for name, value in task.evaluate_batch(model, batch).items():
                found.setdefault(name, []).append(value)
    totals = {
        name: torch.cat(values).numpy() if name.startswith("rows_") else torch.stack(values).double().sum(0).numpy()
        for name, values in found.items()
    }
    loss = float(totals["loss_sum"]) / num_targets
    return {"loss": loss, **task.score(loss, totals, data).metrics}


def refusal(train: Path | str, **sections: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what each test looks at)
        load(recipe_for(train, **sections))
    return str(caught.value)


@pytest.mark.parametrize("config", [BERT, MODERNBERT, GPT2], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("columns", [("text",), ("text", "more")], ids=["one", "pair"])
def test_the_evaluation_does_not_depend_on_the_batch_size(
    tmp_path: Path, config: dict[str, Any], columns: tuple[str, ...]
) -> None:
    path = write_texts(tmp_path / "a.csv")
    task, data, model = load(recipe_for(path, model={"config": config}, data={"text_columns": columns}))
    alone = evaluated(task, data, model, 1)
    widths = {batch_of(data, range(start, start + 1))[0]["input_ids"].shape[1] for start in range(12)}
    assert len(widths) > 4, "texts of one length would show nothing"
    for batch_size in (2, 7, 32):
        together = evaluated(task, data, model, batch_size)
        assert together == pytest.approx(alone, abs=1e-6), batch_size


@pytest.mark.parametrize(
    ("label", "problem_type"),
    [
        (None, "single_label_classification"),
        (lambda number: number / 7 + 0.5, "regression"),
    ],
)
def test_the_loss_is_the_models_own_and_so_is_its_gradient(tmp_path: Path, label: Any, problem_type: str) -> None:
    task, data, model = load(recipe_for(write_texts(tmp_path / "a.csv", label=label)))
    assert model.config.problem_type == problem_type
    batch, num_targets = batch_of(data, range(8), train=True)
    assert num_targets == 8
    ours = task.loss_sum(model, batch) / num_targets
    its = model(**batch).loss
    torch.testing.assert_close(ours, its)
    parameter = model.classifier.weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, parameter)[0] for loss in (ours, its)))


def write_several_labels(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(60):
            labels = [name for index, name in enumerate(TOPICS) if number % (index + 2) == 0]
            file.write(json.dumps({"text": f"text {number} " + " ".join(labels), "label": labels}) + "\n")
    return path


def test_further_metrics_of_several_labels_are_counted_and_are_those_of_single_rows(tmp_path: Path) -> None:
    path = write_several_labels(tmp_path / "a.jsonl")
    names = ["accuracy", "auroc", "f1", "f1_micro", "precision", "recall_weighted"]
    task, data, model = load(recipe_for(path, evaluate={"metrics": names}))
    assert data.eval is not None
    batch, num_targets = batch_of(data, range(len(data.eval)))  # type: ignore[arg-type]
    assert not any(name.startswith("rows_") for name in task.evaluate_batch(model, batch))
    scores, found = evaluated(task, data, model, 7), task.predict_batch(model, batch)
    truth = batch["labels"].bool()
    assert scores["accuracy"] == pytest.approx((found["labels"] == truth).all(1).sum().item() / num_targets)
    exact = [auroc(found["scores"][:, label].detach().numpy(), truth[:, label].long().numpy()) for label in range(3)]
    assert scores["auroc"] == pytest.approx(np.mean(exact), abs=2e-2)
    assert (scores["f1"], scores["precision"]) == (scores["f1_macro"], scores["precision_macro"])
    plain_task, plain, _ = load(recipe_for(path))
    without = evaluated(plain_task, plain, model, 7)
    assert {**scores, **without} == scores
    assert scores.keys() - without.keys() == {"accuracy", "auroc", "f1", "precision"}
    assert "'mcc': it does not fit a multi_label problem" in refusal(path, evaluate={"metrics": ["mcc"]})


def test_auroc_of_two_labels_that_may_occur_together_is_the_mean_of_both() -> None:
    scores = torch.tensor([[3.0, -1.0], [1.0, -2.0], [-1.0, 4.0], [-3.0, 1.0], [2.0, 2.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [-100.0, -100.0]])
    histogram = score_histogram(scores, labels, 2)
    assert histogram is not None
    assert histogram.sum() == 8
    assert auroc_from_histogram(histogram.numpy(), may_occur_together=True) == pytest.approx((1 + 0.5) / 2)


def test_the_loss_of_several_labels_is_the_models_own_and_is_scored_by_label(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_several_labels(tmp_path / "a.jsonl")))
    batch, num_targets = batch_of(data, range(8), train=True)
    torch.testing.assert_close(task.loss_sum(model, batch) / num_targets, model(**batch).loss)
    assert model.config.problem_type == "multi_label_classification"
    scores = evaluated(task, data, model, 7)
    assert scores == pytest.approx(evaluated(task, data, model, 1), abs=1e-6)
    assert 0 <= scores["f1_macro"] <= 1
    predicted = task.predict_batch(model, batch)
    assert predicted["labels"].shape == predicted["scores"].shape == (8, 3)
    assert torch.equal(predicted["labels"], predicted["scores"] > 0.5)
    baselines = task.baselines(data)
    assert baselines["bag_of_words_f1_macro"] > baselines["majority_f1_macro"]


def test_smoothing_and_weights_count_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv", label=lambda number: "often" if number % 5 else "seldom")
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    settings = {"model": {"config": {**BERT, **off}}}
    plain_task, plain, model = load(recipe_for(path, **settings))
    task, data, same_model = load(
        recipe_for(path, loss={"label_smoothing": 0.2, "class_weights": "balanced"}, **settings)
    )
    batch, _ = batch_of(data, range(16), train=True)
    torch.testing.assert_close(task.loss_sum(same_model, batch), plain_task.loss_sum(model, batch))
    torch.testing.assert_close(task.evaluate_batch(same_model, batch)["loss_sum"], plain_task.loss_sum(model, batch))
    counts = np.bincount([sample.label for sample in plain.train])
    weights = counts.sum() / (2 * counts)
    logits = same_model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.2, reduction="none")
    expected = (losses * torch.tensor(weights)[batch["labels"]]).sum()
    torch.testing.assert_close(task.loss_sum(same_model.train(), batch).double(), expected)


def test_saved_it_answers_the_same_through_transformers_pipeline(tmp_path: Path) -> None:
    recipe = recipe_for(write_texts(tmp_path / "a.csv"), data={"id_column": "id", "max_length": 24})
    task, data, model = load(recipe)
    task.save(model, data, tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), tokenizer=str(tmp_path))
    rows = data.source.texts.eval
    batch, _ = batch_of(data, range(6))
    predicted = task.predict_batch(model, batch)
    for index in range(6):
        answer = classify(rows[index].texts[0], truncation=True)[0]
        assert answer["label"] == data.source.label_names[predicted["label"][index]]
        assert answer["score"] == pytest.approx(predicted["score"][index].item(), abs=1e-5)
        assert data.source.row_ids(index) == rows[index].id
    assert rows[0].id.startswith("row-")
    card = (tmp_path / "README.md").read_text()
    assert "loop, machine, number" in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_pretrained_weights_keep_a_head_that_fits_and_say_what_is_new(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    tokenizer = {"train_bpe": {"vocab_size": 300}}
    task, data, model = load(recipe_for(path, tokenizer=tokenizer))
    task.save(model, data, tmp_path / "model")

    again, data_again, same = load(recipe_for(path, model={"pretrained": str(tmp_path / "model")}), seed=5)
    for (name, one), other in zip(model.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert any("tokenizer: that of" in note for note in data_again.facts["notes"])
    assert not any("new:" in note for note in data_again.facts["notes"])
    assert evaluated(again, data_again, same, 8) == pytest.approx(evaluated(task, data, model, 8))

    two = write_texts(tmp_path / "b.csv", label=lambda number: number % 2)
    _, other_data, other = load(recipe_for(two, model={"pretrained": str(tmp_path / "model")}))
    assert other.classifier.weight.shape == (2, 32)
    assert "not pretrained, so new: classifier.bias, classifier.weight" in other_data.facts["notes"]
    assert torch.equal(other.bert.pooler.dense.weight, model.bert.pooler.dense.weight)


def test_a_classifier_that_knows_the_labels_keeps_their_ids(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    names = ("number", "loop", "machine")
    task, data, model = load(recipe_for(path, data={"label_names": names}))
    task.save(model, data, tmp_path / "model")
    _, data_again, _ = load(recipe_for(path, model={"pretrained": str(tmp_path / "model")}))
    assert data_again.source.label_names == names
    assert data_again.fingerprint == data.fingerprint


def test_a_tokenizer_larger_than_the_embedding_makes_it_grow_and_says_so(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, vocab_size=64)
    BertModel(config).save_pretrained(tmp_path / "body")
    tokenizer = train_bpe(["a text", "another text"], 300)  # no padding token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sections = {"model": {"pretrained": str(tmp_path / "body")}, "tokenizer": str(tmp_path / "tokenizer")}
    recipe = recipe_for(write_texts(tmp_path / "a.csv"), **sections)
    task, data, model = load(recipe)
    notes = " ".join(data.facts["notes"])
    assert "[PAD] was added" in notes
    assert "the embedding grew from 64 to" in notes
    assert model.get_input_embeddings().num_embeddings % 64 == 0
    assert model.get_input_embeddings().num_embeddings > data.source.tokenizer.pad_token_id
    batch, _ = batch_of(data, range(6))
    assert (batch["input_ids"][batch["attention_mask"] == 0] == data.source.tokenizer.pad_token_id).all()
    assert math.isfinite(task.loss_sum(model, batch).item())
    with torch.device("meta"):
        assert task.build_model(recipe, data).get_input_embeddings().weight.is_meta


def test_a_pair_is_told_apart_by_types_where_the_model_takes_them(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    for config, has_types in ((BERT, True), (MODERNBERT, False)):
        _, data, _ = load(recipe_for(path, model={"config": config}, data={"text_columns": ("text", "more")}))
        batch, _ = batch_of(data, range(4))
        assert ("token_type_ids" in batch) == has_types
        if has_types:
            tokenizer = data.source.tokenizer
            row = data.source.texts.eval[0].texts
            expected = tokenizer(*row, return_token_type_ids=True)
            length = len(expected["input_ids"])
            assert batch["input_ids"][0, :length].tolist() == expected["input_ids"]
            assert batch["token_type_ids"][0, :length].tolist() == expected["token_type_ids"]
            assert not batch["token_type_ids"][0, length:].any()


def test_what_looks_like_a_special_token_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n[PAD] [SEP] <|endoftext|>,a\nplain,b\n")
    _, data, _ = load(recipe_for(path, data={"eval_fraction": 0.0}))
    tokenizer = data.source.tokenizer
    ids = data.train[0].ids
    assert data.eval is None
    assert ids[0] == tokenizer.cls_token_id
    assert ids[-1] == tokenizer.sep_token_id
    assert bytes(ids[1:-1].astype(np.uint8)) == b"[PAD] [SEP] <|endoftext|>"


def test_padding_stops_at_the_longest_the_model_can_take(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    _, data, model = load(
        recipe_for(path, model={"config": {**BERT, "max_position_embeddings": 30}}, data={"pad_to_multiple_of": 16})
    )
    batch, _ = batch_of(data, range(12))
    assert batch["input_ids"].shape[1] == 30
    assert model(**batch).logits.shape == (12, 3)
    assert any("reach data.max_length=30 tokens" in note for note in data.facts["notes"])
    assert data.lengths is not None
    assert data.lengths.max() == 30


def test_the_fingerprint_follows_the_samples_and_nothing_else(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    task = load_task("text-classification")
    first, again, shorter, other_split, more_names = (
        task.load_data(recipe_for(path, **sections), progress=False).fingerprint
        for sections in (
            {},
            {"seed": 3, "data": {"pad_to_multiple_of": 2}},
            {"data": {"max_length": 20}},
            {"data": {"eval_fraction": 0.5}},
            {"data": {"label_names": (*sorted(TOPICS), "other")}},
        )
    )
    assert first == again
    assert len({first, shorter, other_split, more_names}) == 4


def test_operations_are_those_of_a_text_of_mean_length(tmp_path: Path) -> None:
    recipe = recipe_for(write_texts(tmp_path / "a.csv"))
    task, data, model = load(recipe)
    parameters = sum(p.numel() for name, p in model.named_parameters() if "layer" in name and p.ndim == 2)
    length = round(float(data.lengths.mean()))  # type: ignore[union-attr]
    flops = task.flops_per_target(recipe, model)
    attention, head = 2 * 12 * length**2 * 32, 6 * (32 * 32 + 32 * 3)
    assert flops == pytest.approx(6 * parameters * length + attention + head)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"text_columns": ["txt"]}}, "a.csv:1: no column 'txt'; did you mean 'text'?"),
        (
            {"data": {"label_names": ["loop", "number"]}},
            "a.csv:4, column 'label': \"machine\" is not one of the labels",
        ),
        ({"data": {"max_length": 200}}, "data.max_length=200 is longer than the 128 positions of the model"),
        ({"data": {"max_length": 2}}, "data.max_length=2 leaves no token for the text; give at least 3"),
        ({"model": {"config": {"model_type": "gpt_bigcode2"}}}, "is not a model type of transformers"),
        ({"model": {"config": {"model_type": "vit"}}}, "has no model for sequence classification"),
        ({"model": {"config": {**BERT, "hiden_size": 3}}}, "did you mean hidden_size?"),
        ({"model": {"config": {**BERT, "vocab_size": 100}}}, "is smaller than the tokenizer's 260 tokens"),
        ({"model": {"pretrained": "./nothing"}}, "model.pretrained='./nothing' (python) cannot be loaded"),
        ({"model": {"config": BERT, "problem_type": "regression"}}, '"machine" is not a number'),
        ({"loss": {"class_weights": {"lop": 2.0}}}, "did you mean 'loop'?"),
        ({"evaluate": {"metrics": ["acuracy"]}}, "did you mean 'accuracy'?"),
        ({"evaluate": {"metrics": ["pearson"]}}, "'pearson': it does not fit a single_label problem"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    assert said in refusal(write_texts(tmp_path / "a.csv"), **sections)


def test_an_evaluation_label_that_training_does_not_know_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    train = write_texts(tmp_path / "train.csv")
    (tmp_path / "eval.csv").write_text("text,label\nsome text,planet\n")
    files = {"eval": str(tmp_path / "eval.csv")}
    assert "eval.csv:2, column 'label': \"planet\" is not one of the labels (loop, machine, number)" in refusal(
        train, data=files
    )
    names = [*TOPICS, "planet"]
    _, data, _ = load(recipe_for(train, data={**files, "label_names": names}))
    assert "no training text has the label planet: it cannot be learned" in data.facts["notes"]
    assert data.facts["num_train_of_label"] == {"loop": 20, "number": 20, "machine": 20, "planet": 0}
    (tmp_path / "eval.csv").write_text("text,label\n")
    assert "data.eval holds no rows" in refusal(train, data=files)


def test_texts_without_labels_are_predicted_by_the_classes_of_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text("text\nstep batch\nloss norm\n")
    asked = {"label_column": None, "eval": str(path)}
    task, data, model = load(recipe_for(path, data={**asked, "label_names": list(TOPICS)}))
    batch, num_targets = batch_of(data, range(2))
    assert num_targets == 0
    assert task.loss_sum(model, batch) == 0.0
    assert task.predict_batch(model, batch)["label"].shape == (2,)
    assert data.source.row_ids(1) == f"{path}:3"
    for problem_type, width in (("multi_label", 3), ("regression", 1)):
        names = None if problem_type == "regression" else list(TOPICS)
        task, data, model = load(
            recipe_for(path, model={"config": BERT, "problem_type": problem_type}, data={**asked, "label_names": names})
        )
        assert model.config.num_labels == width
    assert "data.label_names says the classes" in refusal(path, data=asked)


def test_models_that_count_positions_from_the_padding_say_how_many_they_have(tmp_path: Path) -> None:
    roberta = {**BERT, "model_type": "roberta", "max_position_embeddings": 300}
    said = refusal(write_texts(tmp_path / "a.csv"), model={"config": roberta}, data={"max_length": 64})
    assert "longer than the 42 positions" in said  # [PAD] is token 257 of the byte tokenizer


def test_further_metrics_are_computed_from_rows_and_agree_with_the_counts(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv", 90)
    names = ["accuracy", "f1_weighted", "auroc"]
    task, data, model = load(recipe_for(path, evaluate={"metrics": names}))
    plain_task, plain, _ = load(recipe_for(path))
    scores, counted = evaluated(task, data, model, 8), evaluated(plain_task, plain, model, 8)
    # Exact here, and there from a histogram, in which the scores of a model that has not learned lie close together.
    assert scores.pop("auroc") == pytest.approx(counted.pop("auroc"), abs=2e-2)
    assert scores == pytest.approx(counted)


def test_a_constant_a_bag_of_words_and_a_weighted_one_are_scored_on_the_same_texts(tmp_path: Path) -> None:
    task, data, _ = load(recipe_for(write_texts(tmp_path / "a.csv", 120)))
    baselines = task.baselines(data)
    labels = data.source.texts.eval_labels
    majority = np.bincount(data.source.texts.train_labels).argmax()
    assert baselines["majority_accuracy"] == pytest.approx((labels == majority).mean())
    assert baselines["bag_of_words_accuracy"] > 0.9  # a topic has words of its own
    assert set(baselines) == {
        f"{name}_{metric}" for name in ("majority", "bag_of_words", "tfidf") for metric in ("accuracy", "f1_macro")
    }
    task, data, _ = load(recipe_for(write_texts(tmp_path / "b.csv", 60, label=lambda number: number % 3 + 0.5)))
    baselines = task.baselines(data)
    assert baselines["mean_rmse"] > baselines["bag_of_words_rmse"] > 0
    assert baselines["mean_rmse"] > baselines["tfidf_rmse"] > 0
    _, without, _ = load(recipe_for(tmp_path / "a.csv", data={"eval_fraction": 0.0}))
    assert task.baselines(without) == {}


def test_a_run_learns_the_topics_and_reports_scores_beside_baselines(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.csv", 120)
    recipe = write_recipe_file(
        tmp_path,
        task="text-classification",
        model={"config": MODERNBERT},
        tokenizer={"train_bpe": {"vocab_size": 320}},
        data={"train": str(tmp_path / "a.csv"), "eval_fraction": 0.2, "group_by_length": True},
        batch={"global_batch_size": 16},
        loss={"label_smoothing": 0.05},
        optimizer={"learning_rate": 5e-3},
        schedule={"max_steps": 80},
        evaluate={"every_steps": 40, "metric_for_best_model": "f1_macro"},
    )
    run(recipe)
    evaluations = metrics(tmp_path / "run", "eval")
    assert evaluations[-1]["accuracy"] > 0.9
    assert evaluations[-1]["f1_macro"] > 0.9
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["baselines"]["bag_of_words_accuracy"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    answer = model(**tokenizer("step batch epoch update", return_tensors="pt")).logits.argmax()
    assert model.config.id2label[int(answer)] == "loop"
    assert AutoConfig.from_pretrained(tmp_path / "run" / "model").num_labels == 3


@pytest.mark.slow
def test_the_recipe_in_3_of_8_epochs_is_better_than_words_counted_or_weighted_on_the_same_texts(tmp_path: Path) -> None:
    flags = ("--schedule.num_epochs", "3", "--output_dir", str(tmp_path / "run"))
    run(RECIPE, *flags)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["f1_macro"] >= 0.92
    assert summary["eval"]["f1_macro"] > summary["baselines"]["bag_of_words_f1_macro"] + 0.05
    assert summary["eval"]["f1_macro"] > summary["baselines"]["tfidf_f1_macro"] > 0.9
