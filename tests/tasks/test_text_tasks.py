"""Claims that hold for each text task: its loss is transformers' own, the batch size and the number of processes change
nothing, mistakes are named, and saved weights are loaded again.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import AutoTokenizer

from accel_train.core.errors import SettingError
from accel_train.core.json_io import load_json
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TASKS as BUILT_IN
from accel_train.tasks.token_classification.task import word_logits
from tests.support.comparisons import assert_same_run
from tests.support.runs import (
    REPOSITORY,
    events,
    losses,
    metrics,
    refused,
    run,
    write_corpus,
    write_jsonl,
    write_recipe_file,
)
from tests.support.text_tasks import (
    BART,
    BERT,
    GPT2,
    MARIAN,
    MODERNBERT,
    ROBERTA,
    T5,
    TASKS,
    batch_of,
    evaluated,
    load,
    recipe_for,
    several_topics,
    write_data,
    write_lines,
    write_spans,
)

PAIR = {"data": {"text_columns": ["text", "more"]}}
BEAMS = {
    "data": {"max_target_length": 12, "pad_to_multiple_of": 1},
    "evaluate": {"generation": {"num_beams": 2, "max_samples": 5}},
}
WINDOWS = {"data": {"max_length": 64, "pad_to_multiple_of": 1}}


def using(config: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"config": config}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("text-classification", {}, {}),
    "text, modernbert": ("text-classification", {}, using(MODERNBERT)),
    "text, gpt2": ("text-classification", {}, using(GPT2)),
    "pair": ("text-classification", {}, PAIR),
    "pair, modernbert": ("text-classification", {}, using(MODERNBERT) | PAIR),
    "pair, gpt2": ("text-classification", {}, using(GPT2) | PAIR),
    "regression": ("text-classification", {"label": lambda number: number / 7 + 0.5}, {}),
    "several labels": ("text-classification", {"label": several_topics}, {}),
    "words": ("token-classification", {}, {}),
    "questions": ("question-answering", {}, WINDOWS),
    "unanswered questions": ("question-answering", {"unanswered": 5}, WINDOWS),
    "choices": ("multiple-choice", {}, {}),
    "choices, modernbert": ("multiple-choice", {}, using(MODERNBERT)),
    "t5": ("seq2seq", {}, BEAMS),
    "bart": ("seq2seq", {}, using(BART) | BEAMS),
    "marian": ("seq2seq", {}, using(MARIAN) | BEAMS),
    "masked": ("masked-lm", {}, {}),
    "masked, roberta": ("masked-lm", {}, using(ROBERTA)),
}
"""Task, arguments of its data, sections of its recipe."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, Any, Any]:
    """A task by name, with its data and a model."""
    task, rows, sections = CASES[request.param]
    return task, *load(recipe_for(task, write_data(task, tmp_path, **rows), **sections))


def its_loss(task: str, data: Any, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Loss of transformers' own model, a mean over targets."""
    if task == "question-answering":  # transformers lets a place be at the padding, and we do not
        rows = [batch_of(data, range(row, row + 1), train=True)[0] for row in range(8)]
        return torch.stack([model(**row).loss for row in rows]).mean()
    if task == "token-classification":
        by_token = torch.full_like(batch["input_ids"], -100)
        for row in range(8):
            sample = data.train[row]
            by_token[row, torch.from_numpy(sample.starts).long()] = torch.from_numpy(sample.labels)
        batch = {**batch, "labels": by_token}
    if task in ("token-classification", "seq2seq"):
        batch = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    return model(**batch).loss


def test_the_loss_is_the_models_own_and_so_is_its_gradient(case: Any) -> None:
    name, task, data, model = case
    batch, num_targets = batch_of(data, range(8), train=True)
    is_by_token = name in ("token-classification", "seq2seq", "masked-lm")
    assert num_targets == (int((batch["labels"] != -100).sum()) if is_by_token else 8)
    ours, its = task.loss_sum(model, batch) / num_targets, its_loss(name, data, model, batch)
    assert_close(ours, its)
    weight = model.get_input_embeddings().weight
    assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, its)))


def test_loss_scores_and_details_do_not_depend_on_the_batch_size(case: Any) -> None:
    _, task, data, model = case
    # In fp32, the correlation of scores that hardly differ depends on the CPU's rounding.
    model = model.double()
    alone, details = evaluated(task, data, model, 1)
    widths = {batch_of(data, range(row, row + 1))[0]["input_ids"].shape[-1] for row in range(len(data.eval))}
    assert len(widths) > 1, "texts of one length would show nothing"
    for batch_size in (2, 7, 32):
        together, same_details = evaluated(task, data, model, batch_size)
        assert together == pytest.approx(alone, rel=1e-6, abs=1e-6), batch_size
        assert same_details == details
    rows = [batch_of(data, range(row, row + 1), train=True)[0] for row in range(8)]
    whole, _ = batch_of(data, range(8), train=True)
    assert_close(task.loss_sum(model, whole), sum(task.loss_sum(model, row) for row in rows))


@pytest.mark.parametrize(
    ("task", "weights"),
    [
        ("text-classification", "balanced"),
        ("token-classification", {"O": 0.25}),
        ("multiple-choice", None),
        ("seq2seq", None),
        ("masked-lm", None),
    ],
)
def test_smoothing_and_weights_count_in_training_and_not_in_evaluation(tmp_path: Path, task: str, weights: Any) -> None:
    rows = {"label": lambda number: "often" if number % 5 else "seldom"} if weights == "balanced" else {}
    path = write_data(task, tmp_path, **rows)
    plain, *_ = load(recipe_for(task, path))
    smooth, data, model = load(recipe_for(task, path, loss={"label_smoothing": 0.2, "class_weights": weights}))
    batch, _ = batch_of(data, range(16), train=True)
    assert_close(smooth.loss_sum(model, batch), plain.loss_sum(model, batch))
    assert_close(smooth.evaluate_batch(model, batch)["loss_sum"], plain.loss_sum(model, batch))
    labels, known = batch["labels"], batch["labels"] >= 0
    logits = word_logits(model, batch) if task == "token-classification" else model(**batch).logits
    each = cross_entropy(logits[known], labels[known], label_smoothing=0.2, reduction="none")
    of_label = np.ones(logits.shape[-1])
    if weights == "balanced":
        counts = np.bincount([sample.label for sample in data.train])
        of_label = counts.sum() / (2 * counts)
    elif weights:
        of_label = np.array([1, 1, 1, 1, 0.25])
    expected = (each * torch.tensor(of_label)[labels[known]]).sum()
    assert_close(smooth.loss_sum(model.train(), batch), expected.float())


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    *yaml.safe_load("""
    - [text-classification, {data: {text_columns: [txt]}}, "a.jsonl:1|'txt'|'text'|data.text_columns"]
    - [text-classification, {data: {label_names: [loop, number]}}, "a.jsonl:3|'label'|machine|data.label_names"]
    - [text-classification, {data: {max_length: 200}}, data.max_length=200|128]
    - [text-classification, {data: {max_length: 2}}, data.max_length=2|at least 3]
    - [text-classification, {model: {config: {model_type: gpt_bigcode2}}}, 'gpt_bigcode2|gpt_bigcode?']
    - [text-classification, {model: {config: {model_type: vit}}}, "'vit'|bert"]
    - [text-classification, {model: {pretrained: ./nothing}}, model.pretrained='./nothing'|cannot be loaded]
    - [text-classification, {loss: {class_weights: {lop: 2.0}}}, "'lop'|'loop'"]
    - [text-classification, {evaluate: {metrics: [acuracy]}}, "'acuracy'|'accuracy'"]
    - [text-classification, {evaluate: {metrics: [pearson]}}, "'pearson'|single_label"]
    - [token-classification, {data: {label_names: [O, B-PER]}}, "a.conll:3|word 2|'tags'|B-LOC"]
    - [token-classification, {data: {max_length: 300}}, data.max_length=300|128]
    - [token-classification, {model: {config: {model_type: vit}}}, "'vit'|bert"]
    - [token-classification, {loss: {class_weights: {B-PRE: 2.0}}}, "'B-PRE'|'B-PER'"]
    - [question-answering, {data: {doc_stride: 40}}, data.doc_stride=40|data.max_length=128|32]
    - [question-answering, {data: {answers_column: answer}}, "q.jsonl:1|'answer'|'answers'|data.answers_column"]
    - [question-answering, {model: {config: {model_type: vit}}}, "'vit'|bert"]
    - [multiple-choice, {data: {choices_columns: [ending]}}, "m.jsonl:1|'ending'|'endings'|data.choices_columns"]
    - [multiple-choice, {model: {config: {model_type: gpt2}}}, "'gpt2'|bert"]
    - [seq2seq, {data: {source_column: sorce}}, "pairs.csv:1|'sorce'|'source'|data.source_column"]
    - [seq2seq, {model: {config: {model_type: bert}}}, "'bert'|bart"]
    - [seq2seq, {data: {max_target_length: 1}}, data.max_target_length=1|at least 2]
    - [masked-lm, {data: {sequence_length: 129}}, data.sequence_length=129|128 positions]
    - [masked-lm, {data: {sequence_length: 3}}, data.sequence_length=3|at least 4]
    - [masked-lm, {model: {config: {model_type: gpt2}}}, "'gpt2'|bert"]
    """),
    ("text-classification", using({**BERT, "hiden_size": 3}), "hiden_size|hidden_size?"),
    ("text-classification", using({**BERT, "vocab_size": 100}), "vocab_size=100|260 tokens|at least 260"),
    (
        "text-classification",
        {"model": {"config": BERT, "problem_type": "regression"}},
        "a.jsonl:3|machine|problem_type",
    ),
    (  # [PAD] is token 257 of the byte tokenizer, and positions count from it
        "text-classification",
        using({**ROBERTA, "max_position_embeddings": 300}) | WINDOWS,
        "data.max_length=64|42 positions",
    ),
    ("seq2seq", using(BART) | {"data": {"max_length": 65}}, "data.max_length=65|64 positions|encoder"),
    ("seq2seq", using(BART) | {"data": {"max_target_length": 65}}, "data.max_target_length=65|64 positions|decoder"),
    ("seq2seq", using({**T5, "vocab_size": 100}), "vocab_size=100|258 tokens|at least 258"),
    ("masked-lm", using({**ROBERTA, "max_position_embeddings": 280}), "data.sequence_length=32|22 positions"),
]


@pytest.mark.parametrize(("task", "sections", "named"), MISTAKES, ids=[f"{task}-{said}" for task, _, said in MISTAKES])
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, task: str, sections: dict[str, Any], named: str) -> None:
    refused(load, recipe_for(task, write_data(task, tmp_path), **sections), named=named)


SPECIAL = "[PAD][SEP]<|endoftext|>"
CHOICE = {"text": "a", "endings": ["b", "c"], "label": 1}
QUESTION = {"id": 1, "question": "?", "context": "The house is red"}
ROWS: list[tuple[str, Any, str]] = [
    *yaml.safe_load("""
    - [token-classification, [{tokens: [a, b], tags: [O]}], "a.jsonl:1|'tags'|1 tag |2 words|'tokens'"]
    - [token-classification, [{tokens: 3, tags: [O]}], "a.jsonl:1|'tokens'|holds 3"]
    - [token-classification, [{tokens: [a], ner_tags: [O]}], "a.jsonl:1|'tags'|'ner_tags'"]
    - [token-classification, [{tokens: [a, 3], tags: [O, O]}], "a.jsonl:1|'tokens'|holds 3"]
    - [seq2seq, [{source: a, target: 3}], "a.jsonl:1|'target' holds 3|data.target_column"]
    """),
    ("token-classification", "Ada\tB-PER\nsleeps\n", "a.conll:2|sleeps|no tag|a tab"),
    ("token-classification", "1\ta\tO\n2\tb\tO\n3\tc\tO\n4\td\tO\n", "a.conll:1: the first column"),
    ("question-answering", [{**QUESTION, "answers": None}], "a.jsonl:1|no answers|empty list"),
    (
        "question-answering",
        [{**QUESTION, "answers": {"text": ["red"], "answer_start": [3]}}],
        'a.jsonl:1|"red"|character 3|" ho"',
    ),
    (
        "question-answering",
        [{**QUESTION, "answers": {"text": ["red"], "answer_start": []}}],
        "a.jsonl:1|{text: [...], answer_start: [...]}",
    ),
    ("question-answering", [{**QUESTION, "answers": 3}], "a.jsonl:1|{text: [...], answer_start: [...]}"),
    ("multiple-choice", [CHOICE, {**CHOICE, "label": 2}], "a.jsonl:2|'label'|2|0 to 1|A to B"),
    ("multiple-choice", [CHOICE, {**CHOICE, "label": None}], "a.jsonl:2|'label'|null"),
    ("multiple-choice", [CHOICE, {**CHOICE, "endings": ["b", "c", "d"]}], "a.jsonl:2|3 endings"),
    ("multiple-choice", [{**CHOICE, "endings": ["b"]}], "a.jsonl:1|'endings'|1 endings|at least two"),
    ("multiple-choice", [{**CHOICE, "endings": 3}], "a.jsonl:1|'endings'|holds 3"),
    ("multiple-choice", [{**CHOICE, "endings": "[b"}], "a.jsonl:1|'endings'|[b|not a list"),
]


@pytest.mark.parametrize(("task", "rows", "named"), ROWS, ids=[f"{task}-{named}" for task, _, named in ROWS])
def test_a_row_that_a_task_cannot_use_is_named(tmp_path: Path, task: str, rows: Any, named: str) -> None:
    path = tmp_path / ("a.conll" if isinstance(rows, str) else "a.jsonl")
    if isinstance(rows, str):
        path.write_text(rows)
    else:
        write_jsonl(path, rows)
    refused(load, recipe_for(task, path), named=named)


@pytest.mark.parametrize(
    ("task", "fields", "read"),
    [
        ("text-classification", {"text": SPECIAL, "label": "a"}, lambda sample: [sample.ids[1:-1]]),
        ("seq2seq", {"source": SPECIAL, "target": SPECIAL}, lambda pair: [pair.source[:-1], pair.target[:-1]]),
        (
            "multiple-choice",
            {"text": "a", "endings": [SPECIAL] * 2, "label": 0},
            lambda sample: [ids[begin:-1] for ids, begin in zip(sample.ids, sample.second_from)],
        ),
    ],
)
def test_what_looks_like_a_special_token_is_read_as_text(tmp_path: Path, task: str, fields: Any, read: Any) -> None:
    other = {name: "b" if isinstance(value, str) else value for name, value in fields.items()}
    path = write_jsonl(tmp_path / "a.jsonl", [fields, other])
    _, data, _ = load(recipe_for(task, path, data={"eval_fraction": 0.0}))
    assert data.eval is None
    assert {bytes(ids.astype(np.uint8)).decode() for ids in read(data.train[0])} == {SPECIAL}


@pytest.mark.parametrize("task", TASKS)
def test_saved_weights_and_their_tokenizer_are_loaded_again(tmp_path: Path, task: str) -> None:
    path = write_data(task, tmp_path)
    one, data, model = load(recipe_for(task, path, tokenizer={"train_bpe": {"vocab_size": 300}}))
    one.save(model, data, tmp_path / "model")
    base = {"pretrained": str(tmp_path / "model")}
    again, same_data, same = load(recipe_for(task, path, model=base, tokenizer="auto"), seed=5)
    for (name, tensor), other in zip(model.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    notes = same_data.facts.notes
    assert any(note.startswith("tokenizer: ") and str(tmp_path / "model") in note for note in notes)
    assert not any("not pretrained" in note for note in notes)
    assert evaluated(again, same_data, same, 8)[0] == pytest.approx(evaluated(one, data, model, 8)[0])


def add_tokens(folder: Path) -> None:
    """Add two tokens to the tokenizer of a folder, and no rows to its model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("task", [*TASKS, "causal-lm"])
def test_tokens_that_the_base_lacks_train_or_are_refused(tmp_path: Path, task: str) -> None:
    small = {"pad_vocab_to_multiple_of": 0}
    if task == "causal-lm":
        data = {"train": str(write_corpus(tmp_path)), "sequence_length": 16, "cache_dir": str(tmp_path / "cache")}
        sections = {"task": task, "output_dir": "run", "schedule": {"max_steps": 1}, "data": data}
        first = Recipe.model_validate({**sections, "tokenizer": "bytes", "model": {"config": GPT2, **small}})
    else:
        first = recipe_for(task, write_data(task, tmp_path), tokenizer="bytes")
        first = Recipe.model_validate({**first.model_dump(), "model": {"config": first.model.config, **small}})
    one, data, model = load(first)
    one.save(model, data, tmp_path / "model")
    before = model.get_input_embeddings().num_embeddings
    add_tokens(tmp_path / "model")

    def changed(**model: Any) -> Recipe:
        model = {"pretrained": str(tmp_path / "model"), **small, **model}
        return Recipe.model_validate({**first.model_dump(), "tokenizer": "auto", "model": model})

    _, grown, model = load(changed())
    assert model.get_input_embeddings().num_embeddings == before + 2
    assert any(f" {before + 2} rows " in note and " 2 tokens " in note for note in grown.facts.notes)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    rows = {id(layer.weight) for layer in layers if layer is not None}
    names = [name for name, each in model.named_parameters() if id(each) in rows]
    for setting, frozen in (("lora.train_also", {"lora": {"rank": 2}}), ("freeze", {"freeze": names[:1]})):
        with pytest.raises(SettingError) as caught:
            load(changed(**frozen))
        assert caught.value.settings == (f"model.{setting}", "tokenizer")
        assert " 2 tokens " in caught.value.problem
        assert names[0] in caught.value.problem
    load(changed(lora={"rank": 2, "train_also": names}))


def test_tokens_with_the_row_of_another_token_are_refused_and_padding_is_not(tmp_path: Path) -> None:
    first = recipe_for("text-classification", write_data("text-classification", tmp_path), tokenizer="bytes")
    one, data, model = load(first)
    one.save(model, data, tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    model_section = {"pretrained": str(tmp_path / "model"), "accept_new_tokenizer": True, "lora": {"rank": 2}}
    sections = {**first.model_dump(), "tokenizer": str(tmp_path / "other"), "model": model_section}
    load(Recipe.model_validate(sections))
    add_tokens(tmp_path / "other")  # padding of the embedding has rows for them
    with pytest.raises(SettingError) as caught:
        load(Recipe.model_validate(sections))
    assert caught.value.settings == ("model.lora.train_also", "tokenizer")
    assert " 2 tokens " in caught.value.problem
    assert data.source.tokenizer.pad_token == "[PAD]"


TWO_LAYERS = {**BERT, "num_hidden_layers": 2}
"""Layer decay needs several."""
FAULTY = pytest.mark.parametrize("task", [task for task in TASKS if task != "text-classification"])


def is_reader(task: str) -> bool:
    return task not in ("seq2seq", "masked-lm")


def faulty_recipe(folder: Path, task: str, model: dict[str, Any] | None = None, **sections: Any) -> Path:
    """Six steps with everything that changes a step, on data that `folder` gets; `options` break it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"train": str(write_data(task, folder)), "eval_fraction": 0.3, **TASKS[task].data}
    data["id_column"] = {"seq2seq": "name", "question-answering": "id", "multiple-choice": "id"}.get(task)
    if is_reader(task):
        data |= {"max_length": 48, "group_by_length": True}
    config = T5 if task == "seq2seq" else TWO_LAYERS | ({"initializer_range": 0.2} if is_reader(task) else {})
    generation = {"generation": {"max_samples": 7}} if task == "seq2seq" else {}
    weights = "balanced" if task == "token-classification" else None
    settings = {
        "task": f"tests.support.tasks.text_faults:Faulty{BUILT_IN[task].where.partition(':')[2]}",
        "windows": task == "masked-lm",
        "model": {"config": config, **(model or {})},
        "data": data,
        "loss": {"label_smoothing": 0.1, "class_weights": weights},
        "optimizer": {"learning_rate": 1e-2 if is_reader(task) else 3e-3, "ema_decay": 0.9, "layer_decay": 0.9},
        "schedule": {"max_steps": 6},
        "evaluate": {"every_steps": 3, "early_stopping_patience": 9, **generation},
        "checkpoint": {"every_steps": 3},
        "options": {},
    }
    return write_recipe_file(folder, **{**settings, **sections})


def last_evaluation(folder: Path) -> dict[str, float]:
    found = metrics(folder, "eval")[-1]
    return {name: value for name, value in found.items() if isinstance(value, float) and name != "seconds"}


@pytest.mark.slow
@FAULTY
def test_ddp_fsdp2_zero_and_a_run_that_is_stopped_on_two_processes_and_resumed_on_one_are_one_run(
    tmp_path: Path, task: str
) -> None:
    alone, sharded, zero, elastic = (tmp_path / name for name in ("alone", "sharded", "zero", "elastic"))
    run(faulty_recipe(alone, task))
    run(faulty_recipe(sharded, task, parallel={"strategy": "fsdp2"}), processes=2)
    run(faulty_recipe(zero, task, parallel={"strategy": "deepspeed", "zero_stage": 2}), processes=2)
    run(faulty_recipe(elastic, task, options={"term_at": {"step": 2, "rank": 1}}), processes=2, expect=75)
    run(faulty_recipe(elastic, task))
    assert len(events(elastic / "run", "resume")) == 1
    for other in (sharded, zero, elastic):
        assert_same_run(other / "run", alone / "run", 1e-5)
        assert last_evaluation(other / "run") == pytest.approx(last_evaluation(alone / "run"), rel=1e-4, abs=1e-5)
        ours, theirs = (load_json(each / "run" / "evaluation.json") for each in (other, alone))
        assert ours["details"] == theirs["details"], "each sample counts once, in order"
    if task == "seq2seq":
        generation = theirs["details"]["generation"]
        assert generation["num_texts"] == 7
        assert any(each["generated"] for each in generation["samples"])


@pytest.mark.parametrize(("task", "write"), [("token-classification", write_spans), ("seq2seq", write_lines)])
def test_a_run_on_files_that_are_read_in_place_is_stopped_and_resumed_as_one_run(
    task: str, write: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    for name in ("alone", "stopped"):
        (tmp_path / name).mkdir()
    data = {"eval_fraction": 0.3, **write(tmp_path)}
    run(faulty_recipe(tmp_path / "alone", task, data=data))
    term = {"term_at": {"step": 2, "rank": 0}}
    run(faulty_recipe(tmp_path / "stopped", task, data=data, options=term), expect=75)
    run(faulty_recipe(tmp_path / "stopped", task, data=data))
    assert len(events(tmp_path / "stopped" / "run", "resume")) == 1
    assert losses(tmp_path / "stopped" / "run") == losses(tmp_path / "alone" / "run")
    assert last_evaluation(tmp_path / "stopped" / "run") == last_evaluation(tmp_path / "alone" / "run")


@FAULTY
def test_a_nan_is_skipped_adapters_are_merged_and_a_metric_that_gets_no_better_stops_the_run(
    tmp_path: Path, task: str
) -> None:
    metric = {"multiple-choice": "accuracy", "seq2seq": "chrf", "masked-lm": "token_accuracy"}.get(task, "f1")
    head = "*qa_outputs*" if task == "question-answering" else "*classifier*"
    lora = {"rank": 2, "train_also": [head]} if is_reader(task) else {"rank": 2}
    frozen = {"freeze": ["*embeddings*"]} if is_reader(task) else {}
    run(
        faulty_recipe(
            tmp_path,
            task,
            model={"lora": lora, **frozen},
            options={"nan_at": {"step": 2, "rank": 0}},
            optimizer={"learning_rate": 1e-12},
            evaluate={"every_steps": 1, "metric_for_best_model": metric, "early_stopping_patience": 2},
            checkpoint={"every_steps": 0},
        )
    )
    folder = tmp_path / "run"
    assert [event["step"] for event in events(folder, "skip")] == [2]
    stops = events(folder, "early_stop")
    assert stops[0]["step"] == max(losses(folder)) < 6
    assert metric in stops[0]["message"]
    weights = load_file(folder / "model" / "model.safetensors")
    assert not any("lora" in name for name in weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any("lora_A" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "flags", "metric", "margins"),
    [
        (
            "text_classification",
            ["--schedule.num_epochs", "3"],
            "f1_macro",
            {"bag_of_words_f1_macro": 0.05, "tfidf_f1_macro": 0.0},
        ),
        (
            "multiple_choice",
            ["--schedule.num_epochs", "null", "--schedule.max_steps", "200", "--evaluate.every_epochs", "null"],
            "accuracy",
            {"majority_accuracy": 0.1, "word_overlap_accuracy": 0.1},
        ),
        ("sentence_embedding", ["--schedule.num_epochs", "3"], "mrr_at_10", {"tfidf_mrr_at_10": 0.15}),
        ("seq2seq", ["--schedule.num_epochs", "1"], "chrf", {"copied_source_chrf": 70.0}),
        ("masked_lm", ["--schedule.max_steps", "220"], "token_accuracy", {"unigram_token_accuracy": 0.1}),
    ],
)
def test_a_recipe_beats_its_baselines_in_a_part_of_its_steps(
    tmp_path: Path, recipe: str, flags: list[str], metric: str, margins: dict[str, float]
) -> None:
    run(REPOSITORY / f"recipes/{recipe}.yaml", *flags, "--output_dir", str(tmp_path / "run"))
    summary = load_json(tmp_path / "run" / "summary.json")
    assert all(summary["eval"][metric] > summary["baselines"][name] + margin for name, margin in margins.items())
    least = {"text_classification": 0.92, "seq2seq": 0.7}
    assert summary["eval"]["exact_match" if recipe == "seq2seq" else metric] > least.get(recipe, 0)
