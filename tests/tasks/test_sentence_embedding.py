"""Sentence embeddings: the loss of the global batch, however it is cut; exact scores; a folder others can open."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor
from torch.nn.functional import cosine_similarity

from accel_train import load_exported
from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.recipe.schema import Recipe
from accel_train.tasks.sentence_embedding import losses
from accel_train.tasks.sentence_embedding.losses import Objective, Table
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding, nearest_texts, retrieval
from tests.support import text_tasks
from tests.support.runs import events, metrics, train_recipe, write_jsonl
from tests.support.tasks.global_loss import assert_resumes_to_the_bit, assert_step_2_is_skipped
from tests.support.text_tasks import load

BERT = {**text_tasks.BERT, "max_position_embeddings": 64}


def write_rows(folder: Path, count: int = 22) -> Path:
    """Rows of which some share an anchor, a positive, or a negative that is another row's positive."""
    words, rows = [f"w{number}" for number in range(40)], []
    draw = random.Random(0)
    for number in range(count):
        row = [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(3)]
        if number % 4 == 3:
            row[number // 4 % 3] = rows[-1][number // 4 % 3]
        if number % 7 == 6:
            row[2] = rows[-2][1]
        rows.append(row)
    path = folder / "rows.jsonl"
    names = ("anchor", "positive", "negative")
    path.write_text("".join(json.dumps({**dict(zip(names, row)), "score": draw.randint(0, 5)}) + "\n" for row in rows))
    return path


def train_rows(
    folder: Path,
    name: str,
    processes: int = 1,
    per_device: int = 8,
    global_batch: int = 8,
    expect: int = 0,
    **sections: Any,
) -> list[tuple[float, float]]:
    """Train; return each step's loss and gradient norm."""
    own = {"train": str(write_rows(folder)), "eval_fraction": 0, "cache_dir": str(folder / f"{name}-cache")}
    data = {**own, **sections.pop("data", {})}
    recipe = {
        "task": "sentence-embedding",
        "output_dir": str(folder / name),
        "model": {"config": BERT},
        "tokenizer": "bytes",
        "data": {"last_batch": "short", **data},
        "batch": {"global_batch_size": global_batch, "per_device_batch_size": per_device},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"max_steps": 4},
        "precision": {"mixed_precision": "no"},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1},
        **sections,
    }
    return train_recipe(recipe, processes, expect)


def plain_loss(vectors: Tensor, texts: Tensor, *, symmetric: bool = False) -> Tensor:
    """The mean ranking loss by loops, over distinct texts: equal texts do not count as negatives of each other."""
    total = torch.zeros(())
    for row, (anchor, positive, *_) in enumerate(texts.tolist()):
        wrong = []
        for other, (its_anchor, *documents) in enumerate(texts.tolist()):
            for place, document in enumerate(documents, start=1):
                is_right = document in (anchor, positive) or (place == 1 and its_anchor == anchor)
                if (other, place) == (row, 1) or not is_right:
                    wrong.append(20 * cosine_similarity(vectors[row, 0], vectors[other, place], 0))
        own = 20 * cosine_similarity(vectors[row, 0], vectors[row, 1], 0)
        loss = torch.stack(wrong).logsumexp(0) - own
        if symmetric:
            others = [
                20 * cosine_similarity(vectors[row, 1], vectors[other, 0], 0)
                for other, (its_anchor, its_positive, *_) in enumerate(texts.tolist())
                if other == row or not (its_anchor in (anchor, positive) or its_positive == positive)
            ]
            loss = (loss + torch.stack(others).logsumexp(0) - own) / 2
        total = total + loss
    return total / len(texts)


def plain_cosent(vectors: Tensor, scores: Tensor) -> Tensor:
    cosines = 20 * cosine_similarity(vectors[:, 0], vectors[:, 1], -1)
    terms = [cosines[j] - cosines[i] for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b]
    return torch.stack([torch.zeros(()), *terms]).logsumexp(0)


@pytest.mark.parametrize("chunk", [1, 30, 2**20])
def test_losses_and_gradients_are_those_of_plain_loops(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_LARGEST_CHUNK", chunk)
    torch.manual_seed(0)
    vectors, texts = torch.randn(9, 3, 8), torch.arange(27).reshape(9, 3)
    texts[3, 1], texts[4, 0], texts[5, 2], texts[6, 2] = texts[2, 1], texts[1, 0], texts[5, 1], texts[7, 0]
    scores = torch.tensor([0.0, 1, 1, 3, 2, 2, 0, 5, 4])

    def triplet(each: Tensor, _: Any) -> Tensor:
        near, far = (cosine_similarity(each[:, 0], each[:, place], -1) for place in (1, 2))
        found = (far - near + 0.5).relu()
        return torch.where(texts[:, 2] == texts[:, 1], 0.0, found).mean()

    plain: Any
    for name, symmetric, dims, plain in (
        ("ranking", False, (), lambda each, _: plain_loss(each, texts)),
        ("ranking", True, (), lambda each, _: plain_loss(each, texts, symmetric=True)),
        ("ranking", False, (8, 3), lambda each, _: plain_loss(each, texts) + plain_loss(each[..., :3], texts)),
        ("cosent", False, (), plain_cosent),
        ("triplet", False, (), triplet),
    ):
        objective = Objective(name, 3, 20.0, symmetric, 0.5, dims)  # type: ignore[arg-type]
        given = vectors.clone().requires_grad_()
        wanted = plain(given, scores)
        found, gradient = objective.row_losses(Table(vectors, texts, scores))
        torch.testing.assert_close(found.mean(), wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient / 9, torch.autograd.grad(wanted, given)[0], rtol=1e-5, atol=1e-6)


TRIPLETS = {"pair_columns": ["anchor", "positive", "negative"], "symmetric": True}
SCORED = {"score_column": "score"}


def test_a_step_has_the_loss_and_the_gradient_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    ours = SentenceEmbedding.loss_sum

    def compared(task: SentenceEmbedding, model: Any, batch: Any) -> Tensor:
        hidden = model(batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1)).last_hidden_state
        mask = batch["attention_mask"].flatten(0, 1)
        vectors = torch.stack([each[: int(own.sum())].mean(0) for each, own in zip(hidden, mask)])
        loss = plain_loss(vectors.unflatten(0, (-1, 3)), batch["texts"], symmetric=True)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        seen.append((float(loss.detach()), float(torch.stack([each.norm() for each in gradients]).norm())))
        return ours(task, model, batch)

    monkeypatch.setattr(SentenceEmbedding, "loss_sum", compared)
    found = train_rows(tmp_path, "run", data=TRIPLETS)
    assert len(found) == 4
    assert found == [pytest.approx(each, rel=1e-6, abs=1e-6) for each in seen]


@pytest.mark.parametrize("data", [TRIPLETS, SCORED], ids=["ranking", "cosent"])
def test_the_loss_does_not_depend_on_accumulation(tmp_path: Path, data: dict[str, Any]) -> None:
    whole = train_rows(tmp_path, "whole", data=data)
    for per_device in (1, 4):
        parts = train_rows(tmp_path, f"parts-{per_device}", per_device=per_device, data=data)
        assert parts == [pytest.approx(each, rel=1e-6, abs=1e-6) for each in whole]
    assert all(loss > 0.5 for loss, _ in whole)


def test_both_forwards_of_a_micro_batch_draw_the_same_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient would otherwise be of other vectors than the loss over the global batch compared."""
    drawn = []
    ours = SentenceEmbedding._table

    def drawing(task: SentenceEmbedding, model: Any, batch: Any) -> Table:
        table = ours(task, model, batch)
        assert model.training
        drawn.append(table.vectors.detach())
        return table

    monkeypatch.setattr(SentenceEmbedding, "_table", drawing)
    model = {"config": {**BERT, "hidden_dropout_prob": 0.3}}
    train_rows(tmp_path, "run", per_device=4, data=TRIPLETS, model=model, schedule={"max_steps": 2})
    for first, second, first_again, second_again in (drawn[:4], drawn[4:8]):
        assert torch.equal(first, first_again)
        assert torch.equal(second, second_again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "per_device", "strategy", "data"),
    [
        (2, 4, "ddp", TRIPLETS),
        (2, 1, "ddp", TRIPLETS),
        (4, 2, "ddp", TRIPLETS),
        (2, 2, "fsdp2", TRIPLETS),
        (2, 2, "ddp", SCORED),
    ],
)
def test_the_loss_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, processes: int, per_device: int, strategy: str, data: dict[str, Any]
) -> None:
    whole = train_rows(tmp_path, "whole", data=data)
    found = train_rows(tmp_path, "spread", processes, per_device, data=data, parallel={"strategy": strategy})
    assert found[0] == pytest.approx(whole[0], rel=1e-6)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in whole], rel=1e-6)
    # After the first update, the weights differ by a rounding, and so do the gradients at these weights.
    assert found == [pytest.approx(each, rel=1e-5) for each in whole]


@pytest.mark.slow
@pytest.mark.parametrize("forward", [4, 6])
def test_memory_that_runs_out_between_the_exchanges_of_a_step_costs_no_step(tmp_path: Path, forward: int) -> None:
    """The first step takes three forwards, and the second two, so these are the first forwards of steps 2 and 3."""
    whole = train_rows(tmp_path, "whole", data=TRIPLETS)
    options = {"no_room_at": {"step": forward, "rank": 1}}
    found = train_rows(
        tmp_path, "spread", 2, 4, data=TRIPLETS, task=FAULTY, options=options, guard={"hang_timeout_seconds": 20}
    )
    assert found == [pytest.approx(each, rel=1e-6, abs=1e-6) for each in whole]
    assert [each["ranks"] for each in events(tmp_path / "spread", "out_of_memory")] == [[1]]


FAULTY = "tests.support.tasks.text_faults:FaultySentenceEmbedding"


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_row_whose_vector_is_nan_is_named_and_its_step_changes_no_weight(tmp_path: Path, processes: int) -> None:
    lines = write_rows(tmp_path).read_text().splitlines()
    bad = json.loads(lines[5])["positive"]
    sections = {"checkpoint": {"every_steps": 1, "keep": 9}, "schedule": {"max_steps": 3}}
    train_rows(tmp_path, "run", processes, 4, data=TRIPLETS, task=FAULTY, options={"nan_text": bad}, **sections)
    assert_step_2_is_skipped(tmp_path / "run", 5)


def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not_to_the_bit(tmp_path: Path) -> None:
    sections = {"data": TRIPLETS, "task": FAULTY, "schedule": {"max_steps": 8}}
    assert_resumes_to_the_bit(train_rows, tmp_path, 3, **sections)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tolerance", "sections"),
    [
        (
            1e-6,
            {"model": {"config": BERT, "lora": {"rank": 2}}, "optimizer": {"learning_rate": 1e-2, "ema_decay": 0.9}},
        ),
        (1e-5, {"precision": {"mixed_precision": "no", "compile": True}}),
        (2e-2, {"precision": {"mixed_precision": "bf16"}}),
    ],
    ids=["lora, ema", "compile", "bf16"],
)
def test_with_other_features_the_loss_does_not_depend_on_accumulation_either(
    tmp_path: Path, tolerance: float, sections: dict[str, Any]
) -> None:
    whole = train_rows(tmp_path, "whole", data=TRIPLETS, **sections)
    parts = train_rows(tmp_path, "parts", per_device=2, data=TRIPLETS, **sections)
    assert parts == [pytest.approx(each, rel=tolerance) for each in whole]
    weights = load_file(tmp_path / "parts/model/model.safetensors")
    assert not any("lora" in name for name in weights)


def test_retrieval_counts_equal_texts_once_and_ties_against_the_model() -> None:
    texts = np.array([[1, 11], [2, 12], [1, 13], [3, 11]])
    unit = {1: [1.0, 0.0], 2: [0.0, 1.0], 3: [0.6, 0.8], 11: [0.9, 0.1], 12: [0.0, 1.0], 13: [0.2, 0.3]}
    first, second = (np.array([unit[text] for text in side]) for side in texts.T)
    found = retrieval(texts, lambda rows, others: first[rows] @ second[others].T)
    # Anchor 1 finds 11 first and 13 second, anchor 2 finds 12 first, anchor 3 finds 11 after 12.
    assert found["recall_at_1"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["mrr_at_10"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert found["ndcg_at_10"] == pytest.approx((1 + 1 + 1 / np.log2(3)) / 3)
    alike = retrieval(texts, lambda rows, others: np.ones((len(rows), len(others))))
    assert alike["recall_at_1"] == 0


def test_the_nearest_texts_of_evenly_spaced_queries_are_those_of_all_products() -> None:
    rng = np.random.default_rng(0)
    unit = rng.normal(size=(9, 2, 4))
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    texts = np.stack([np.arange(9), 100 + np.arange(9)], axis=1)
    texts[4, 0], texts[8, 1], unit[8, 1] = texts[0, 0], texts[2, 1], unit[2, 1]
    shown = [(f"query {a}", f"text {b}") for a, b in texts.tolist()]
    found = nearest_texts(texts, unit, shown, 3)
    assert [each["query"] for each in found] == ["query 0", "query 2", "query 5"]
    for each in found:
        query = int(each["query"].split()[1])
        ranked = sorted(range(8), key=lambda row: -float(unit[query, 0] @ unit[row, 1]))[:3]
        assert [near["text"] for near in each["nearest"]] == [f"text {100 + row}" for row in ranked]
        right = {0: {100, 104}}.get(query, {100 + query})
        assert [near["is_right"] for near in each["nearest"]] == [100 + row in right for row in ranked]
        products = [float(unit[query, 0] @ unit[row, 1]) for row in ranked]
        assert [near["similarity"] for near in each["nearest"]] == pytest.approx(products)
    assert nearest_texts(texts, unit, shown, 0) == []
    (cut, *_) = nearest_texts(texts, unit, [("a" * 500, "b" * 500)] * 9, 1)
    assert len(cut["query"]) == len(cut["nearest"][0]["text"]) == 204


def test_the_report_of_a_run_has_three_nearest_texts_of_a_third_as_many_queries_as_examples(tmp_path: Path) -> None:
    train_rows(tmp_path, "run", data={"eval_fraction": 0.5}, evaluate={"every_steps": 0, "num_examples": 4})
    queries = load_json(tmp_path / "run/evaluation.json")["details"]["retrieval"]["queries"]
    assert [len(each["nearest"]) for each in queries] == [3, 3]
    page = (tmp_path / "run/report.html").read_text()
    assert all(f">{each['query']}<" in page for each in queries)


def test_baselines_of_scripts_without_spaces_compare_characters(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(200):
        anchor, positive = ("".join(chr(0x4E00 + draw.randrange(90)) for _ in range(12)) for _side in range(2))
        rows.append({"anchor": anchor, "positive": positive[:6] + anchor[3:6] + positive[6:]})
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = {"train": str(path), "pair_columns": ["anchor", "positive"], "eval_fraction": 0.3}
    sections = {"model": {"config": BERT}, "data": data, "schedule": {"max_steps": 1}, "tokenizer": "bytes"}
    task, found, _ = load(Recipe.model_validate({"task": "sentence-embedding", "output_dir": "run", **sections}))
    pairs = [row.texts for row in found.source.rows.eval]
    vectorizer = TfidfVectorizer(sublinear_tf=True, analyzer="char", ngram_range=(1, 3))
    vectorizer.fit(text for row in found.source.rows.train for text in row.texts)
    first, second = (vectorizer.transform(side) for side in zip(*pairs, strict=True))
    places = np.arange(len(pairs))
    expected = retrieval(np.stack([places, places], 1), lambda of, others: (first[of] @ second[others].T).toarray())
    assert task.baselines(found) == pytest.approx({f"tfidf_of_characters_{name}": expected[name] for name in expected})
    assert expected["recall_at_1"] > 0.5


@pytest.mark.parametrize(
    ("size", "processes", "strategy"),
    [
        (1, 1, "ddp"),
        pytest.param(3, 2, "ddp", marks=pytest.mark.slow),
        pytest.param(3, 2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_the_evaluations_do_not_depend_on_batch_size_or_processes(
    tmp_path: Path, size: int, processes: int, strategy: str
) -> None:
    data, found = {**TRIPLETS, "eval_fraction": 0.5}, []
    for name, rows, count in (("whole", 8, 1), ("parts", size, processes)):
        batch = {"global_batch_size": 4, "per_device_batch_size": 2, "per_device_eval_batch_size": rows}
        layout = {"strategy": "ddp" if count == 1 else strategy}
        train_rows(tmp_path, name, count, data=data, batch=batch, evaluate={"every_steps": 4}, parallel=layout)
        found.append(metrics(tmp_path / name, "eval"))
        assert [line["step"] for line in found[-1]] == [0, 4]
        baselines = load_json(tmp_path / name / "summary.json")["baselines"]
        assert baselines["untrained_mrr_at_10"] == found[-1][0]["mrr_at_10"]
    for whole, parts in zip(*found, strict=True):
        for name in ("loss", "recall_at_1", "mrr_at_10", "ndcg_at_10"):
            assert whole[name] == pytest.approx(parts[name], rel=1e-6)
    assert found[0][0]["loss"] != found[0][1]["loss"]


def test_sentence_transformers_opens_the_folder_and_gives_the_same_vectors(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from accel_train.inference.predict import predict_rows

    data = {"pooling": "last", "anchor_prompt": "query: ", "positive_prompt": "document: "}
    train_rows(tmp_path, "run", data=data)
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "run/model"), device="cpu")
    texts = ["w1 w2 w3", "w7", "w30 w31 w4 w4 w9"]
    queries, documents = (model.encode(texts, prompt_name=name) for name in ("query", "document"))
    rows = [{"anchor": text, "positive": other} for text, other in zip(texts, reversed(texts))]
    found = [row["similarity"] for row in predict_rows(tmp_path / "run", rows)]
    assert found == pytest.approx((queries * documents[::-1]).sum(-1).tolist(), abs=1e-6)
    assert model.max_seq_length == 64


def test_export_leaves_out_the_pooler(tmp_path: Path) -> None:
    train_rows(tmp_path, "run", data=SCORED)
    names = []
    for flags in ([], ["--quantize", "int8"]):
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / f"out{len(flags)}"), *flags]) == 0
        names.append({name for name, _ in load_exported(tmp_path / f"out{len(flags)}").named_modules()})
        assert (tmp_path / f"out{len(flags)}/1_Pooling/config.json").is_file()
    assert not any(name.startswith("pooler") for name in names[1])


@pytest.mark.parametrize(
    ("pooling", "sections"),
    [
        ("mean", {}),
        pytest.param("last", {"matryoshka_dims": [32, 8], "symmetric": True}, marks=pytest.mark.slow),
        pytest.param("cls", {"score_column": "score"}, marks=pytest.mark.slow),
    ],
)
def test_a_graph_gives_the_vectors_of_sentence_transformers_for_texts_of_any_length(
    pooling: str,
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("accel_train.inference.int8_cost._TIMED_SECONDS", 0.01)
    data = {"pooling": pooling, "eval_fraction": 0.5, "anchor_prompt": "query: ", **sections}
    # Weights so large that vectors differ from text to text.
    train_rows(tmp_path, "run", data=data, model={"config": {**BERT, "initializer_range": 0.5}})
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "run/model"), device="cpu")
    texts = ["w1 w2 w3", "w7", "w30 w31 w4 w4 w9 " * 9]
    exports = [("onnx", []), ("onnx-int8", ["--quantize", "int8"])]
    for name, flags in exports[: 1 if pooling == "mean" else 2]:
        assert main(["export", str(tmp_path / "run"), "--onnx", *flags, "--json"]) == 0
        details = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]["details"]
        assert list(details["onnx"]["inputs"]) == ["input_ids", "attention_mask"]
        assert details["onnx"]["outputs"] == {"sentence_embedding": ["batch", 32]}
        measured = details["metrics"]["before"]
        assert {"spearman", "pearson"} <= set(measured) or {"recall_at_1", "mrr_at_10"} <= set(measured)
        assert details["metrics"]["onnx" if flags else "after"] == pytest.approx(measured, rel=1e-4, abs=1e-4)
        monkeypatch.chdir(tmp_path / f"run/export-{name}")
        for given in (texts, texts[:1], texts[1:]):
            found = {"texts": given}
            exec(Path("README.md").read_text().split("```python")[1].split("```")[0], found)
            expected = model.encode(given)
            vectors, similarities = found["vectors"], found["similarities"]
            assert vectors.shape == (len(given), 32)
            assert np.diag(similarities) == pytest.approx(np.ones(len(given)), abs=1e-5)
            difference = np.abs(vectors - expected).max()
            assert 1e-4 < difference < 0.2 if flags else difference < 1e-5
        assert "`query: `" in Path("README.md").read_text()
        assert similarities[0, 1] < 0.99
