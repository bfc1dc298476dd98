"""Token classification: words keep their tags whatever the tokenizer cuts, other rows are named."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.data.builtin.stdlib import tagged_words
from accel_train.data.sources import resolve_sources
from accel_train.data.text.spans import spans_of, word_places
from accel_train.task import load_task
from accel_train.tasks.token_classification.config import TokenClassificationData
from accel_train.tasks.token_classification.data import read_sentences
from tests.support import text_tasks
from tests.support.runs import metrics, refused, write_jsonl
from tests.support.text_tasks import batch_of, load, predict, sentence, train, write_conll

recipe_for = partial(text_tasks.recipe_for, "token-classification")


def test_conll_jsonl_csv_and_parquet_are_read_as_the_same_samples(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [dict(zip(("tokens", "ner_tags"), sentence(number))) for number in range(60)]
    write_conll(tmp_path / "a.conll")
    write_conll(tmp_path / "a.txt")
    write_jsonl(tmp_path / "a.jsonl", rows)
    cells = [" ".join(row["tokens"]) + ',"' + json.dumps(row["ner_tags"]).replace('"', '""') + '"' for row in rows]
    (tmp_path / "a.csv").write_text("tokens,ner_tags\n" + "\n".join(cells) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    task = load_task("token-classification")
    found = {
        name: task.load_data(recipe_for(tmp_path / f"a.{name}", data={"tags_column": "ner_tags"}), progress=False)
        for name in ("conll", "txt", "jsonl", "csv", "parquet")
    }
    assert len({data.fingerprint for data in found.values()}) == 1
    assert len(found["conll"].train) + len(found["conll"].eval) == 60
    assert found["conll"].facts.label_names == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


@pytest.mark.parametrize("tokenizer", ["bytes", {"train_bpe": {"vocab_size": 300}}], ids=["bytes", "bpe"])
def test_a_words_label_stands_at_its_first_token_and_nowhere_else(tmp_path: Path, tokenizer: Any) -> None:
    _, data, _ = load(recipe_for(write_conll(tmp_path / "a.conll"), tokenizer=tokenizer))
    own, scheme = data.source.tokenizer, data.source.rows.scheme
    tags_of = {tuple(text): tags for text, tags in map(sentence, range(60))}
    for row, sample in zip(data.source.rows.eval, data.eval, strict=True):
        tokens = [own.decode([token]) for token in sample.ids]
        assert sample.words.tolist() == list(range(len(row.words)))
        assert [scheme.names[label] for label in sample.labels] == tags_of[row.words]
        bounds = [*sample.starts.tolist(), len(sample.ids) - 1]
        for word, first, after in zip(row.words, bounds, bounds[1:]):
            assert tokens[first].strip(), "a blank stands for no word"
            assert own.decode(sample.ids[first:after]).strip() == word


def test_what_looks_like_a_special_token_is_a_word_and_one_without_a_token_is_left_out(tmp_path: Path) -> None:
    rows = [{"tokens": ["[SEP]", "", "x"], "tags": ["B-X", "O", "O"]}, {"tokens": ["y"], "tags": ["O"]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    _, data, _ = load(recipe_for(tmp_path / "a.jsonl", data={"eval_fraction": 0.0}))
    sample = data.train[0]
    assert bytes(sample.ids[1:-1].astype("uint8")) == b"[SEP]  x"
    assert (sample.words.tolist(), sample.starts.tolist()) == ([0, 2], [1, 8])
    assert any("length=" in note and ": 1, of 1 of 2 " in note for note in data.facts.notes)


def test_a_word_of_conll_ends_at_a_plain_blank(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("10\u00a0000 B-NUM\neuros O\n\n" * 9 + "and O\n")
    (source,) = resolve_sources(str(path), data := TokenClassificationData(train=str(path)), key="data.train")
    assert read_sentences([source], data, key="data.train", notes=[])[0].words == ("10\u00a0000", "euros")


def test_plain_tags_are_scored_as_classes_and_the_baseline_knows_each_words_tag(tmp_path: Path) -> None:
    rows = [f"the\tDET\ncat{number % 4}\tNOUN\nsleeps\t{'VERB' if number % 3 else 'NOUN'}\n" for number in range(40)]
    (tmp_path / "a.conll").write_text("\n".join(rows))
    task, data, model = load(recipe_for(tmp_path / "a.conll"))
    batch, _ = batch_of(data)
    totals = {name: value.detach().numpy() for name, value in task.evaluate_batch(model, batch).items()}
    assert {"accuracy", "f1_macro"} <= task.score(0.0, totals, data).metrics.keys()
    labels = batch["labels"].numpy()
    best = torch.tensor([[0, 1, 2]]).expand(len(labels), 3).numpy()  # DET, NOUN, VERB
    assert task.baselines(data)["most_frequent_tag_accuracy"] == pytest.approx((labels == best).mean())


def test_names_of_a_function_are_tagged_as_python_understands_them() -> None:
    words, tags = tagged_words("def f(self, x=LIMIT):\n    y = os.path.join(x, sep=self.a)\n    return y  # z\n")
    assert " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True)) == (
        "def/O f/B-function (/O self/B-parameter ,/O x/B-parameter =/O LIMIT/B-global )/O :/O y/B-variable =/O "
        "os/B-call ./I-call path/I-call ./I-call join/I-call (/O x/B-parameter ,/O sep/B-keyword =/O "
        "self/B-attribute ./I-attribute a/I-attribute )/O return/O y/B-variable"
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on sentences about people and places; the last ones are longer
    than its max_length.
    """
    return train(
        "token-classification",
        tmp_path_factory.mktemp("finished"),
        **yaml.safe_load("""
            tokenizer: {train_bpe: {vocab_size: 300}}
            data: {group_by_length: true, max_length: 24}
            batch: {global_batch_size: 16, per_device_eval_batch_size: 3}
            optimizer: {learning_rate: 0.01}
            schedule: {max_steps: 40}
            evaluate: {every_steps: 20, metric_for_best_model: f1}
        """),
    )


def test_a_run_learns_the_entities_and_reports_scores_by_type_beside_the_baseline(finished: Path) -> None:
    assert metrics(finished, "eval")[-1]["f1"] > 0.9
    evaluation = load_json(finished / "evaluation.json")
    assert evaluation["details"]["classification"]["report"]["PER"]["f1-score"] > 0.8
    summary = load_json(finished / "summary.json")
    assert 0 < summary["baselines"]["most_frequent_tag_f1"] <= 1
    assert summary["words_per_second"] > 0


def test_predict_writes_each_word_with_its_tag_and_none_for_what_was_cut(finished: Path, not_launched: None) -> None:
    (finished.parent / "new.conll").write_text("to\nBonn\nwent\nZoë\n\n" + "\n".join(["Bonn"] * 40) + "\n")
    short, long = predict(finished, finished.parent / "new.jsonl", finished.parent / "new.conll")
    assert short["words"] == ["to", "Bonn", "went", "Zoë"]
    assert short["tags"] == ["O", "B-LOC", "O", "B-PER"]
    assert all(0.2 < score <= 1 for score in short["scores"])
    assert "true_tags" not in short
    assert len(long["tags"]) == 40
    assert long["tags"][0] is not None
    assert long["tags"][-1] is long["scores"][-1] is None
    out = finished.parent / "own.csv"
    assert main(["predict", str(finished), "--out", str(out)]) == 0
    head, first, *_ = out.read_text().splitlines()
    assert head == "id,words,tags,scores,true_tags"
    assert '[""' in first


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # of any byte-level BPE
def test_the_saved_model_answers_the_same_through_transformers_pipeline(finished: Path) -> None:
    folder = str(finished / "model")
    tag = pipeline("token-classification", model=folder, aggregation_strategy="first")
    found = tag("Ada Lovelace left New York . no1")
    assert [(each["entity_group"], each["word"].strip()) for each in found] == [
        ("PER", "Ada Lovelace"),
        ("LOC", "New York"),
    ]
    assert AutoModelForTokenClassification.from_pretrained(folder).config.num_labels == 5
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 24


def marked(number: int) -> dict[str, Any]:
    """A sentence as a text with spans."""
    words, tags = sentence(number)
    text = " ".join(words)
    return {"text": text, "label": spans_of(text, word_places(text), tags)}


def test_forms_of_the_same_spans_are_read_as_the_same_samples(tmp_path: Path) -> None:
    rows = [marked(number) for number in range(60)]
    write_jsonl(tmp_path / "spans.jsonl", rows)
    write_jsonl(tmp_path / "prodigy.jsonl", ({**row, "answer": "accept"} for row in rows))
    results = [[{"value": {**span, "labels": [span["label"]]}} for span in row["label"]] for row in rows]
    tasks = [{"data": {"text": row["text"]}, "annotations": [{"result": each}]} for row, each in zip(rows, results)]
    (tmp_path / "label_studio.json").write_text(json.dumps(tasks))
    task, found = load_task("token-classification"), {}
    for path in tmp_path.iterdir():
        data = {"tokens_column": "text", "tags_column": "label", "tag_format": path.stem}
        found[path.stem] = task.load_data(recipe_for(path, data=data), progress=False)
    # Words without punctuation are the same in CoNLL.
    found["conll"] = task.load_data(recipe_for(write_conll(tmp_path / "a.conll")), progress=False)
    assert len({data.fingerprint for data in found.values()}) == 1
    assert found["spans"].facts.label_names == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


def test_predicted_spans_have_their_places_in_the_text(tmp_path: Path, not_launched: None) -> None:
    path = write_jsonl(tmp_path / "spans.jsonl", (marked(number) for number in range(60)))
    folder = train(
        "token-classification",
        tmp_path,
        data={"train": str(path), "tokens_column": "text", "tags_column": "label", "tag_format": "spans"},
        **yaml.safe_load("""
            tokenizer: {train_bpe: {vocab_size: 300}}
            batch: {global_batch_size: 16}
            optimizer: {learning_rate: 0.01}
            schedule: {max_steps: 40}
        """),
    )
    text = "to  New York\n went Zoë"
    new = write_jsonl(tmp_path / "new.jsonl", [{"text": text}, {"text": "Ada left Bonn .", "label": [[0, 3, "PER"]]}])
    (row, _) = predict(folder, tmp_path / "found.jsonl", new)
    expected = [{"start": 4, "end": 12, "label": "LOC"}, {"start": 19, "end": 22, "label": "PER"}]
    assert row["words"] == text.split()
    assert row["spans"] == [{**span, "text": text[span["start"] : span["end"]]} for span in expected]
    rows = predict(folder, tmp_path / "own.jsonl", path)
    assert [len(each["true_tags"]) for each in rows] == [len(sentence(number)[0]) for number in range(60)]


def test_a_span_of_several_words_in_evaluation_data_has_a_tag_although_training_data_have_none(tmp_path: Path) -> None:
    one = {"text": "Ada left", "label": [[0, 3, "PER"]]}
    train_rows = write_jsonl(tmp_path / "train.jsonl", [one] * 3)
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"text": "Ada Lovelace left", "label": [[0, 12, "PER"]]}])
    data = {"tokens_column": "text", "tags_column": "label", "tag_format": "spans", "eval": str(held_out)}
    _, found, _ = load(recipe_for(train_rows, data=data))
    names = found.facts.label_names
    assert [names[tag] for tag in found.eval[0].labels] == ["B-PER", "I-PER", "O"]


@pytest.mark.parametrize(
    ("lines", "settings", "words", "tags"),
    [
        ("# id 1\tx\nAda\t_\tB-X\nwent\t_\tO\n", {}, ["Ada", "went"], ["B-X", "O"]),
        ("# B-X\nwent O\n", {}, ["#", "went"], ["B-X", "O"]),
        ("1\tAda\tB-X\tO\n2\twent\tO\tO\n", {"tokens_column": "2", "tags_column": "3"}, ["Ada", "went"], ["B-X", "O"]),
    ],
)
def test_comments_and_columns_of_conll(
    lines: str, settings: dict[str, str], words: list[str], tags: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"{lines}\n{lines}")
    data = TokenClassificationData(train=str(path), tag_format="conll", **settings)  # type: ignore[arg-type]
    rows = read_sentences(resolve_sources(str(path), data, key="data.train"), data, key="data.train", notes=[])
    assert [(list(row.words), list(row.tags)) for row in rows] == [(words, tags)] * 2
    assert rows[1].where == f"{path}:{lines.count(chr(10)) + 2 + lines.startswith('# id')}"


def test_rows_of_a_word_are_sentences_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    data = TokenClassificationData(train=str(path), tokens_column="w", tags_column="t", sentence_column="s")

    def read(rows: str) -> list[Any]:
        path.write_text(f"s,w,t\n{rows}")
        return read_sentences(resolve_sources(str(path), data, key="data.train"), data, key="data.train", notes=[])

    rows = read("1,Ada,B-X\n,went,O\n2,she,O\n2,left,O\n")
    assert [(row.words, row.tags, row.where) for row in rows] == [
        (("Ada", "went"), ("B-X", "O"), f"{path}:2"),
        (("she", "left"), ("O", "O"), f"{path}:4"),
    ]
    refused(read, ",Ada,B-X\n", named="a.csv:2|column 's' is empty")
