"""Text classification: labels and weights are kept, scores and baselines are scikit-learn's, and what is saved answers
the same.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PerceiverConfig,
    pipeline,
)

from accel_train.core.json_io import load_json
from accel_train.data.text.tokenizers import byte_tokenizer, train_bpe
from accel_train.metrics.scores import auroc, auroc_from_histogram
from accel_train.metrics.tally import score_histogram
from accel_train.task import load_task
from accel_train.tasks.text_classification.data import LabelledTexts
from accel_train.tasks.text_classification.metrics import baseline_scores
from tests.support import text_tasks
from tests.support.runs import metrics, refused
from tests.support.text_tasks import (
    BERT,
    MODERNBERT,
    SIZES,
    TOPICS,
    batch_of,
    evaluated,
    load,
    several_topics,
    train,
    write_csv,
    write_texts,
)
from tests.support.wording import assert_golden

recipe_for = partial(text_tasks.recipe_for, "text-classification")


def test_further_metrics_of_several_labels_are_counted_and_are_those_of_single_rows(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", label=several_topics)
    names = ["accuracy", "auroc", "f1", "f1_micro", "precision", "recall_weighted"]
    task, data, model = load(recipe_for(path, evaluate={"metrics": names}))
    batch, num_targets = batch_of(data)
    assert not any(name.startswith("rows_") for name in task.evaluate_batch(model, batch))
    scores, found = evaluated(task, data, model, 7)[0], task.predict_batch(model, batch)
    truth = batch["labels"].bool()
    assert scores["accuracy"] == pytest.approx((found["labels"] == truth).all(1).sum().item() / num_targets)
    exact = [auroc(found["scores"][:, label].detach().numpy(), truth[:, label].long().numpy()) for label in range(3)]
    assert scores["auroc"] == pytest.approx(np.mean(exact), abs=2e-2)
    assert (scores["f1"], scores["precision"]) == (scores["f1_macro"], scores["precision_macro"])
    plain_task, plain, _ = load(recipe_for(path))
    without, _ = evaluated(plain_task, plain, model, 7)
    assert {**scores, **without} == scores
    assert scores.keys() - without.keys() == {"accuracy", "auroc", "f1", "precision"}
    refused(load, recipe_for(path, evaluate={"metrics": ["mcc"]}), named="'mcc'|multi_label")


def test_auroc_of_two_labels_that_may_occur_together_is_the_mean_of_both() -> None:
    scores = torch.tensor([[3.0, -1.0], [1.0, -2.0], [-1.0, 4.0], [-3.0, 1.0], [2.0, 2.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [-100.0, -100.0]])
    histogram = score_histogram(scores, labels, 2)
    assert histogram is not None
    assert histogram.sum() == 8
    assert auroc_from_histogram(histogram.numpy(), may_occur_together=True) == pytest.approx((1 + 0.5) / 2)


def test_several_labels_are_predicted_above_one_half_and_have_baselines(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_texts(tmp_path / "a.jsonl", label=several_topics)))
    assert model.config.problem_type == "multi_label_classification"
    batch, _ = batch_of(data, range(8))
    predicted = task.predict_batch(model, batch)
    assert predicted["labels"].shape == predicted["scores"].shape == (8, 3)
    assert torch.equal(predicted["labels"], predicted["scores"] > 0.5)
    baselines = task.baselines(data)
    assert baselines["bag_of_words_f1_macro"] > baselines["majority_f1_macro"]


def test_saved_it_answers_the_same_through_transformers_pipeline(tmp_path: Path) -> None:
    recipe = recipe_for(write_texts(tmp_path / "a.csv"), data={"id_column": "id", "max_length": 24})
    task, data, model = load(recipe)
    task.save(model, data, tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), tokenizer=str(tmp_path))
    rows = data.source.rows.eval
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


def test_pretrained_weights_get_a_new_head_for_other_labels_and_say_so(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_texts(tmp_path / "a.csv")))
    task.save(model, data, tmp_path / "model")
    two = write_texts(tmp_path / "b.csv", label=lambda number: number % 2)
    _, other_data, other = load(recipe_for(two, model={"pretrained": str(tmp_path / "model")}))
    assert other.classifier.weight.shape == (2, 32)
    assert_golden("\n".join(other_data.facts.notes))
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
    notes = " ".join(data.facts.notes)
    assert "[PAD] was added" in notes
    assert "from 64 to" in notes
    assert model.get_input_embeddings().num_embeddings % 64 == 0
    assert model.get_input_embeddings().num_embeddings > data.source.tokenizer.pad_token_id
    batch, _ = batch_of(data, range(6))
    assert (batch["input_ids"][batch["attention_mask"] == 0] == data.source.tokenizer.pad_token_id).all()
    assert math.isfinite(task.loss_sum(model, batch).item())
    with torch.device("meta"):
        assert task.build_model(recipe, data).get_input_embeddings().weight.is_meta


def write_perceiver(folder: Path, vocab_size: int) -> Path:
    """A model without a matrix of embeddings that could grow."""
    sizes = {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 1}
    names = dict(enumerate(("loop", "machine", "number")))
    heads = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    config = PerceiverConfig(**sizes, **heads, vocab_size=vocab_size, id2label=names)
    assert not hasattr(config, "pad_token_id")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_configuration_that_has_no_padding_token_gets_the_tokenizers(tmp_path: Path) -> None:
    sections = {"model": {"pretrained": str(write_perceiver(tmp_path / "model", 264))}, "tokenizer": "auto"}
    task, data, model = load(recipe_for(write_texts(tmp_path / "a.csv"), **sections, data={"max_length": 32}))
    assert data.source.config.pad_token_id == data.source.tokenizer.pad_token_id
    batch, _ = batch_of(data, range(4))
    assert math.isfinite(task.loss_sum(model, batch).item())


def test_tokens_of_a_model_that_cannot_grow_are_refused(tmp_path: Path) -> None:
    sections = {"model": {"pretrained": str(write_perceiver(tmp_path / "model", 100))}, "tokenizer": "auto"}
    recipe = recipe_for(write_texts(tmp_path / "a.csv"), **sections, data={"max_length": 32})
    refused(load, recipe, named="258 tokens|perceiver|100 rows")


def test_a_pair_is_told_apart_by_types_where_the_model_takes_them(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    for config, has_types in ((BERT, True), (MODERNBERT, False)):
        _, data, _ = load(recipe_for(path, model={"config": config}, data={"text_columns": ("text", "more")}))
        batch, _ = batch_of(data, range(4))
        assert ("token_type_ids" in batch) == has_types
        if has_types:
            tokenizer = data.source.tokenizer
            row = data.source.rows.eval[0].texts
            expected = tokenizer(*row, return_token_type_ids=True)
            length = len(expected["input_ids"])
            assert batch["input_ids"][0, :length].tolist() == expected["input_ids"]
            assert batch["token_type_ids"][0, :length].tolist() == expected["token_type_ids"]
            assert not batch["token_type_ids"][0, length:].any()


def test_padding_stops_at_the_longest_the_model_can_take(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv")
    _, data, model = load(
        recipe_for(path, model={"config": {**BERT, "max_position_embeddings": 30}}, data={"pad_to_multiple_of": 16})
    )
    batch, _ = batch_of(data, range(12))
    assert batch["input_ids"].shape[1] == 30
    assert model(**batch).logits.shape == (12, 3)
    assert_golden("\n".join(data.facts.notes))
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
    config = {**BERT, "num_hidden_layers": 2}
    recipe = recipe_for(write_texts(tmp_path / "a.csv"), model={"config": config})
    task, data, model = load(recipe)
    parameters = sum(p.numel() for name, p in model.named_parameters() if "layer" in name and p.ndim == 2)
    length = round(float(data.lengths.mean()))  # type: ignore[union-attr]
    flops = task.flops_per_target(recipe, model)
    attention, head = 2 * 12 * length**2 * 32, 6 * (32 * 32 + 32 * 3)
    assert flops == pytest.approx(6 * parameters * length + attention + head)


def test_an_evaluation_label_that_training_does_not_know_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    train = write_texts(tmp_path / "train.csv")
    (tmp_path / "eval.csv").write_text("text,label\nsome text,planet\n")
    files = {"eval": str(tmp_path / "eval.csv")}
    refused(load, recipe_for(train, data=files), named="eval.csv:2|'label'|planet|loop, machine, number")
    names = [*TOPICS, "planet"]
    _, data, _ = load(recipe_for(train, data={**files, "label_names": names}))
    assert any("planet" in note for note in data.facts.notes)
    assert data.facts.num_train_of_label == {"loop": 20, "number": 20, "machine": 20, "planet": 0}
    (tmp_path / "eval.csv").write_text("text,label\n")
    refused(load, recipe_for(train, data=files), named="data.eval")


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
    refused(load, recipe_for(path, data=asked), named="data.label_names")


def test_further_metrics_are_computed_from_rows_and_agree_with_the_counts(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.csv", 90)
    names = ["accuracy", "f1_weighted", "auroc"]
    task, data, model = load(recipe_for(path, evaluate={"metrics": names}))
    plain_task, plain, _ = load(recipe_for(path))
    (scores, _), (counted, _) = evaluated(task, data, model, 8), evaluated(plain_task, plain, model, 8)
    # Exact here, and there from a histogram, in which the scores of a model that has not learned lie close together.
    assert scores.pop("auroc") == pytest.approx(counted.pop("auroc"), abs=2e-2)
    assert scores == pytest.approx(counted)


def test_a_constant_a_bag_of_words_and_a_weighted_one_are_scored_on_the_same_texts(tmp_path: Path) -> None:
    task, data, _ = load(recipe_for(write_texts(tmp_path / "a.csv", 120)))
    baselines = task.baselines(data)
    labels = data.source.rows.eval_labels
    majority = np.bincount(data.source.rows.train_labels).argmax()
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


def tfidf_accuracy(texts: LabelledTexts, **settings: Any) -> float:
    vectorizer = TfidfVectorizer(sublinear_tf=True, **settings)
    model = LogisticRegression(C=10.0, max_iter=200)
    assert texts.eval is not None
    model.fit(vectorizer.fit_transform(row.texts[0] for row in texts.train), texts.train_labels)
    answers = model.predict(vectorizer.transform(row.texts[0] for row in texts.eval))
    return float((answers == texts.eval_labels).mean())


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("first", ["一", "ぁ", "ก", "ກ", "က", "ក", "\U00020000"])
def test_baselines_of_scripts_without_spaces_count_characters(tmp_path: Path, first: str, share: float) -> None:
    """The class is the order of two letters. Other texts of the corpus are English, and of either class."""
    draw, letters = np.random.default_rng(0), [chr(ord(first) + place) for place in range(22)]
    rows = []
    for number in range(int(300 / share)):
        label, text = (number + number // 10) % 2, "".join(draw.choice(letters[2:], 12))
        if number % (1 / share) < 1:
            place = int(draw.integers(12))
            text = text[:place] + "".join(letters[:2] if label else letters[1::-1]) + text[place:]
        else:
            text = f"{['cats', 'dogs'][label]} sleep {number}"
        rows.append([text, f"c{label}"])
    _, data, _ = load(recipe_for(write_csv(tmp_path / "a.csv", ["text", "label"], *rows)))
    texts = data.source.rows
    found = baseline_scores(texts)
    assert {name.removesuffix("_accuracy") for name in found if name.endswith("accuracy")} == {
        "majority",
        "bag_of_characters",
        "tfidf_of_characters",
    }
    assert found["tfidf_of_characters_accuracy"] > 0.95
    assert tfidf_accuracy(texts) < 1 - 0.3 * share
    if share == 1:
        expected = tfidf_accuracy(texts, analyzer="char", ngram_range=(1, 3), max_features=50_000)
        assert found["tfidf_of_characters_accuracy"] == expected


@pytest.mark.parametrize(
    "words", [*TOPICS.values(), "좋은 나쁜 영화 음식", "अच्छा बुरा खाना फिल्म", "хорошо плохо кино еда"]
)
def test_baselines_of_scripts_with_spaces_count_words(tmp_path: Path, words: str) -> None:
    known = words.split()
    rows = [[f"{known[number % 2]} {known[2]} {number}", (number + number // 7) % 2] for number in range(200)]
    rows[7][0] = "这 一 条 是 中文"
    _, data, _ = load(recipe_for(write_csv(tmp_path / "a.csv", ["text", "label"], *rows)))
    found = baseline_scores(data.source.rows)
    assert found["tfidf_accuracy"] == tfidf_accuracy(data.source.rows)
    assert "bag_of_words_accuracy" in found


def test_a_run_learns_the_topics_and_reports_scores_next_to_baselines(tmp_path: Path) -> None:
    run = train(
        "text-classification",
        tmp_path,
        120,
        model={"config": MODERNBERT},
        **yaml.safe_load("""
            tokenizer: {train_bpe: {vocab_size: 320}}
            data: {group_by_length: true}
            batch: {global_batch_size: 16}
            loss: {label_smoothing: 0.05}
            optimizer: {learning_rate: 0.01}
            schedule: {max_steps: 40}
            evaluate: {every_steps: 20, metric_for_best_model: f1_macro}
        """),
    )
    evaluations = metrics(run, "eval")
    assert evaluations[-1]["accuracy"] > 0.9
    assert evaluations[-1]["f1_macro"] > 0.9
    summary = load_json(run / "summary.json")
    assert summary["baselines"]["bag_of_words_accuracy"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    answer = model(**tokenizer("step batch epoch update", return_tensors="pt")).logits.argmax()
    assert model.config.id2label[int(answer)] == "loop"
    assert AutoConfig.from_pretrained(run / "model").num_labels == 3
