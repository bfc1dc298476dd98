"""Token classification: words keep their tags whatever the tokenizer cuts, the loss is transformers' own, mistakes are
named.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from accel_train.cli.main import main
from accel_train.data.builtin.stdlib_tags import tagged_words
from accel_train.data.sources import resolve_sources
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.token_classification.config import TokenClassificationData
from accel_train.tasks.token_classification.data import read_sentences
from accel_train.tasks.token_classification.task import TokenClassification, word_logits
from tests.support.runs import metrics, write_recipe_file

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
BERT = {"model_type": "bert", **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PEOPLE, PLACES = ("Ada Lovelace", "Emmy Noether", "Zoë"), ("New York", "Erlangen", "Bonn")


def sentence(number: int) -> tuple[list[str], list[str]]:
    """Who went where, in three forms."""
    who, where = PEOPLE[number % 3].split(), PLACES[number // 3 % 3].split()
    form = (["to", "{where}", "went", "{who}"], ["{who}", "left", "{where}", "."], ["{who}", "knows", "{who}"])[
        number % 5 % 3
    ]
    words: list[str] = []
    tags: list[str] = []
    for part in [*form, f"no{number}"]:
        name, kind = {"{who}": (who, "PER"), "{where}": (where, "LOC")}.get(part, ([part], ""))
        words += name
        tags += [f"{'I' if place else 'B'}-{kind}" if kind else "O" for place in range(len(name))]
    return words, tags


def write_conll(path: Path, num_rows: int = 60) -> Path:
    rows = ["\n".join(f"{word}\t{tag}" for word, tag in zip(*sentence(number))) for number in range(num_rows)]
    path.write_text("-DOCSTART- -X- O\n\n" + "\n\n\n".join(rows) + "\n")
    return path


def recipe_for(train: Path | str, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "token-classification",
        "output_dir": "run",
        "model": {"config": BERT},
        "data": {},
        "schedule": {"max_steps": 1},
        **sections,
    }
    settings["data"] = {"train": str(train), "eval_fraction": 0.3, **settings["data"]}
    return Recipe.model_validate(settings)


def load(recipe: Recipe) -> tuple[TokenClassification, TaskData, nn.Module]:
    task = load_task("token-classification")
    assert isinstance(task, TokenClassification)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(0)
    return task, data, task.build_model(recipe, data).eval()


def batch_of(data: TaskData, indices: range, *, train: bool = False) -> tuple[dict[str, Tensor], int]:
    samples = data.train if train else data.eval
    assert samples is not None
    batch = data.collate([samples[index] for index in indices])
    return batch, batch.pop("num_targets")


def refusal(train: Path | str, **sections: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what each test looks at)
        load(recipe_for(train, **sections))
    return str(caught.value)


def test_conll_jsonl_csv_and_parquet_are_read_as_the_same_samples(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [dict(zip(("tokens", "ner_tags"), sentence(number))) for number in range(60)]
    write_conll(tmp_path / "a.conll")
    write_conll(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cells = [" ".join(row["tokens"]) + ',"' + json.dumps(row["ner_tags"]).replace('"', '""') + '"' for row in rows]
    (tmp_path / "a.csv").write_text("tokens,ner_tags\n" + "\n".join(cells) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    task = load_task("token-classification")
    found = {
        name: task.load_data(recipe_for(tmp_path / f"a.{name}", data={"tags_column": "ner_tags"}), progress=False)
        for name in ("conll", "txt", "jsonl", "csv", "parquet")
    }
    assert len({data.fingerprint for data in found.values()}) == 1
    assert len(found["conll"].train) + len(found["conll"].eval) == 60  # type: ignore[arg-type]
    assert found["conll"].facts["label_names"] == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


@pytest.mark.parametrize("tokenizer", ["bytes", {"train_bpe": {"vocab_size": 300}}], ids=["bytes", "bpe"])
def test_a_words_label_stands_at_its_first_token_and_nowhere_else(tmp_path: Path, tokenizer: Any) -> None:
    _, data, _ = load(recipe_for(write_conll(tmp_path / "a.conll"), tokenizer=tokenizer))
    own, scheme = data.source.tokenizer, data.source.sentences.scheme
    for row, sample in zip(data.source.sentences.eval, data.source.samples, strict=True):
        tokens = [own.decode([token]) for token in sample.ids]
        assert sample.words.tolist() == list(range(len(row.words)))
        assert [scheme.names[label] for label in sample.labels] == list(row.tags)
        bounds = [*sample.starts.tolist(), len(sample.ids) - 1]
        for word, first, after in zip(row.words, bounds, bounds[1:]):
            assert tokens[first].strip(), "a blank stands for no word"
            assert own.decode(sample.ids[first:after]).strip() == word


def test_what_looks_like_a_special_token_is_a_word_and_one_without_a_token_is_left_out(tmp_path: Path) -> None:
    rows = [{"tokens": ["[SEP]", "", "x"], "tags": ["B-X", "O", "O"]}, {"tokens": ["y"], "tags": ["O"]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, data, _ = load(recipe_for(tmp_path / "a.jsonl", data={"eval_fraction": 0.0}))
    sample = data.train[0]
    assert bytes(sample.ids[1:-1].astype("uint8")) == b"[SEP]  x"
    assert (sample.words.tolist(), sample.starts.tolist()) == ([0, 2], [1, 8])
    assert any(note.startswith("1 words of 1 of 2 training sentences have no token") for note in data.facts["notes"])


def test_the_loss_is_the_models_own_and_so_is_its_gradient(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_conll(tmp_path / "a.conll")))
    batch, num_targets = batch_of(data, range(8), train=True)
    assert num_targets == (batch["labels"] >= 0).sum() == sum(len(data.train[row].labels) for row in range(8))
    by_token = torch.full_like(batch["input_ids"], -100)
    for row in range(8):
        sample = data.train[row]
        by_token[row, torch.from_numpy(sample.starts).long()] = torch.from_numpy(sample.labels)
    its = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=by_token).loss
    ours = task.loss_sum(model, batch) / num_targets
    torch.testing.assert_close(ours, its)
    torch.testing.assert_close(*(torch.autograd.grad(loss, model.classifier.weight)[0] for loss in (ours, its)))


def test_smoothing_and_weights_count_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    path = write_conll(tmp_path / "a.conll")
    plain, _, _ = load(recipe_for(path))
    task, data, model = load(recipe_for(path, loss={"label_smoothing": 0.2, "class_weights": {"O": 0.25}}))
    batch, _ = batch_of(data, range(8), train=True)
    torch.testing.assert_close(task.loss_sum(model, batch), plain.loss_sum(model, batch))
    torch.testing.assert_close(task.evaluate_batch(model, batch)["loss_sum"], plain.loss_sum(model, batch))
    known = batch["labels"] >= 0
    logits, labels = word_logits(model, batch)[known], batch["labels"][known]
    losses = nn.functional.cross_entropy(logits, labels, label_smoothing=0.2, reduction="none")
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.25])[labels]
    torch.testing.assert_close(task.loss_sum(model.train(), batch), (losses * weights).sum())


def test_comments_and_numbers_of_words_in_conll_are_no_words_and_a_word_ends_at_a_plain_blank(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("# id 7\tdomain=en\nParis _ _ B-LOC\nis _ _ O\n\n")
    assert 'a.conll:2: "Paris _ _ B-LOC" has 4 columns, and line 1 has 2' in refusal(path)
    path.write_text("".join(f"{number}\tword\tO\n" for number in range(1, 5)))
    assert "a.conll:1: the first column numbers the words" in refusal(path)
    path.write_text("10\u00a0000 B-NUM\neuros O\n\n" * 9 + "and O\n")
    (source,) = resolve_sources(str(path), data := TokenClassificationData(train=str(path)), key="data.train")
    assert read_sentences([source], data, key="data.train")[0].words == ("10\u00a0000", "euros")


def test_plain_tags_are_scored_as_classes_and_the_baseline_knows_each_words_tag(tmp_path: Path) -> None:
    rows = [f"the\tDET\ncat{number % 4}\tNOUN\nsleeps\t{'VERB' if number % 3 else 'NOUN'}\n" for number in range(40)]
    (tmp_path / "a.conll").write_text("\n".join(rows))
    task, data, model = load(recipe_for(tmp_path / "a.conll"))
    batch, _ = batch_of(data, range(len(data.eval)))  # type: ignore[arg-type]
    totals = {name: value.detach().numpy() for name, value in task.evaluate_batch(model, batch).items()}
    assert {"accuracy", "f1_macro"} <= task.score(0.0, totals, data).metrics.keys()
    labels = batch["labels"].numpy()
    best = torch.tensor([[0, 1, 2]]).expand(len(labels), 3).numpy()  # DET, NOUN, VERB
    assert task.baselines(data)["most_frequent_tag_accuracy"] == pytest.approx((labels == best).mean())


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"data": {"label_names": ["O", "B-PER", "I-PER"]}},
            "word 2, column 'tags': \"B-LOC\" is not one of the labels",
        ),
        ({"data": {"max_length": 300}}, "data.max_length=300 is longer than the 128 positions of the model"),
        ({"model": {"config": {"model_type": "vit"}}}, "has no model for token classification"),
        ({"loss": {"class_weights": {"B-PRE": 2.0}}}, "did you mean 'B-PER'?"),
        ({"evaluate": {"metrics": ["f1"]}}, "reports the scores of entities"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    assert said in refusal(write_conll(tmp_path / "a.conll"), **sections)


def test_rows_that_are_no_tagged_sentences_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for row, said in (
        (
            {"tokens": ["a", "b"], "tags": ["O"]},
            "a.jsonl:1: column 'tags' has 1 tags for the 2 words of column 'tokens'",
        ),
        ({"tokens": 3, "tags": ["O"]}, "a.jsonl:1: column 'tokens' holds 3, not a list"),
        ({"tokens": ["a"], "ner_tags": ["O"]}, "no column 'tags'; did you mean 'ner_tags'?"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "column 'tokens' holds 3, not a string"),
    ):
        path.write_text(json.dumps(row) + "\n")
        assert said in refusal(path)
    conll = tmp_path / "a.conll"
    conll.write_text("Ada\tB-PER\nsleeps\n")
    assert 'a.conll:2: "sleeps" has no tag; write a word, a tab' in refusal(conll)


def test_names_of_a_function_are_tagged_as_python_understands_them() -> None:
    words, tags = tagged_words("def f(self, x=LIMIT):\n    y = os.path.join(x, sep=self.a)\n    return y  # z\n")
    assert list(zip(words, tags)) == [
        ("def", "O"),
        ("f", "B-function"),
        ("(", "O"),
        ("self", "B-parameter"),
        (",", "O"),
        ("x", "B-parameter"),
        ("=", "O"),
        ("LIMIT", "B-global"),
        (")", "O"),
        (":", "O"),
        ("y", "B-variable"),
        ("=", "O"),
        ("os", "B-call"),
        (".", "I-call"),
        ("path", "I-call"),
        (".", "I-call"),
        ("join", "I-call"),
        ("(", "O"),
        ("x", "B-parameter"),
        (",", "O"),
        ("sep", "B-keyword"),
        ("=", "O"),
        ("self", "B-attribute"),
        (".", "I-attribute"),
        ("a", "I-attribute"),
        (")", "O"),
        ("return", "O"),
        ("y", "B-variable"),
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run on sentences about people and places; the last ones are longer
    than its max_length.
    """
    folder = tmp_path_factory.mktemp("finished")
    write_conll(folder / "a.conll")
    recipe = write_recipe_file(
        folder,
        task="token-classification",
        model={"config": BERT},
        tokenizer={"train_bpe": {"vocab_size": 300}},
        data={"train": str(folder / "a.conll"), "eval_fraction": 0.2, "group_by_length": True, "max_length": 24},
        batch={"global_batch_size": 16, "per_device_eval_batch_size": 3},
        optimizer={"learning_rate": 1e-2},
        schedule={"max_steps": 40},
        evaluate={"every_steps": 20, "metric_for_best_model": "f1"},
    )
    assert main(["run", str(recipe)]) == 0
    return folder


def test_a_run_learns_the_entities_and_reports_scores_by_type_beside_the_baseline(finished: Path) -> None:
    assert metrics(finished / "run", "eval")[-1]["f1"] > 0.9
    evaluation = json.loads((finished / "run" / "evaluation.json").read_text())
    assert evaluation["details"]["classification"]["report"]["PER"]["f1-score"] > 0.8
    summary = json.loads((finished / "run" / "summary.json").read_text())
    assert 0 < summary["baselines"]["most_frequent_tag_f1"] <= 1
    assert summary["words_per_second"] > 0


def test_predict_writes_each_word_with_its_tag_and_none_for_what_was_cut(finished: Path, not_launched: None) -> None:
    (finished / "new.conll").write_text("to\nBonn\nwent\nZoë\n\n" + "\n".join(["Bonn"] * 40) + "\n")
    out = finished / "new.jsonl"
    assert main(["predict", str(finished / "run"), str(finished / "new.conll"), "--out", str(out)]) == 0
    short, long = (json.loads(line) for line in out.read_text().splitlines())
    assert short["words"] == ["to", "Bonn", "went", "Zoë"]
    assert short["tags"] == ["O", "B-LOC", "O", "B-PER"]
    assert all(0.2 < score <= 1 for score in short["scores"])
    assert "true_tags" not in short
    assert len(long["tags"]) == 40
    assert long["tags"][0] is not None
    assert long["tags"][-1] is long["scores"][-1] is None
    assert main(["predict", str(finished / "run"), "--out", str(finished / "own.csv")]) == 0
    head, first, *_ = (finished / "own.csv").read_text().splitlines()
    assert head == "id,words,tags,scores,true_tags"
    assert '[""' in first


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # of any byte-level BPE
def test_the_saved_model_answers_the_same_through_transformers_pipeline(finished: Path) -> None:
    folder = str(finished / "run" / "model")
    tag = pipeline("token-classification", model=folder, aggregation_strategy="first")
    found = tag("Ada Lovelace left New York . no1")
    assert [(each["entity_group"], each["word"].strip()) for each in found] == [
        ("PER", "Ada Lovelace"),
        ("LOC", "New York"),
    ]
    assert AutoModelForTokenClassification.from_pretrained(folder).config.num_labels == 5
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 24
