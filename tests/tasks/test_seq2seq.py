"""Sequence to sequence: texts are generated for the rows asked for, and what is saved writes the same."""

import csv
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.metrics.texts import TEXT_SCORES, text_scores
from accel_train.task import load_task
from accel_train.tasks.seq2seq.config import SPEC
from tests.support import text_tasks
from tests.support.runs import metrics, run, write_jsonl, write_recipe_file
from tests.support.text_tasks import (
    BART,
    MARIAN,
    T5,
    batch_of,
    evaluated,
    load,
    predict,
    run_card,
    train,
    write_pairs,
)
from tests.support.wording import assert_golden

recipe_for = partial(text_tasks.recipe_for, "seq2seq")


def test_texts_are_generated_for_as_many_rows_as_asked_evenly_spaced_among_those_that_every_evaluation_reads(
    tmp_path: Path,
) -> None:
    path = write_pairs(tmp_path / "a.csv")

    def chosen(**evaluate: Any) -> list[int]:
        task = load_task("seq2seq")
        return list(task.load_data(recipe_for(path, evaluate=evaluate), progress=False).source.generated)

    everything = chosen(generation={"max_samples": None})
    assert everything == list(range(len(everything)))
    assert chosen(generation={"max_samples": 3}) == [index * len(everything) // 3 for index in range(3)]
    read = [index * len(everything) // 4 for index in range(4)]
    assert chosen(max_samples=4, generation={"max_samples": 100}) == read
    assert set(chosen(max_samples=4, generation={"max_samples": 2})) < set(read)
    assert chosen(generation={"max_samples": 0}) == []


def test_without_generation_no_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pairs(tmp_path / "a.csv")
    for name in SPEC.packages:
        monkeypatch.setitem(sys.modules, name, None)
    task, data, model = load(recipe_for(path, evaluate={"generation": {"max_samples": 0}}))
    assert evaluated(task, data, model, 8)[0].keys() == {"loss", "perplexity", "token_accuracy"}
    assert task.baselines(data) == {}


@pytest.mark.parametrize("config", [T5, BART, MARIAN], ids=lambda config: config["model_type"])
def test_what_is_saved_writes_the_same_through_transformers(tmp_path: Path, config: Any) -> None:
    task, data, model = load(
        recipe_for(
            write_pairs(tmp_path / "a.csv"),
            model={"config": config},
            data={"max_target_length": 9, "source_prefix": "say: "},
            evaluate={"generation": {"num_beams": 2}},
        )
    )
    task.save(model, data, tmp_path / "model")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    batch, _ = batch_of(data, range(4))
    rows = {name: value.numpy() for name, value in task.predict_batch(model, batch).items()}
    columns = task.prediction_columns({**rows, "index": np.arange(4)}, data)
    assert columns["target"] == [data.source.evaluated[index].label for index in range(4)]
    for index, text in enumerate(columns["generated"]):
        given = tokenizer("say: " + data.source.evaluated[index].texts[0], return_tensors="pt")
        ids = theirs.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        assert ids.shape[1] <= 10
        assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == text


def test_padding_rows_of_the_vocabulary_are_never_generated(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_pairs(tmp_path / "a.csv")))
    num_tokens = len(data.source.tokenizer)
    head = model.get_output_embeddings().weight
    assert head.shape[0] > num_tokens
    with torch.no_grad():
        head[num_tokens:] = 10 * head[num_tokens:].abs().max()
        head[num_tokens + 1 :: 2] *= -1  # one of two neighbours is above all others, whatever the hidden state
    batch, _ = batch_of(data, range(6))
    generated = task.predict_batch(model, batch)["generated"]
    assert int(generated.max()) < num_tokens


def test_a_source_or_target_that_is_too_long_is_cut_with_its_end_kept_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("source,target\n" + "\n".join(f"{'ab' * length},{'c' * length}" for length in range(1, 12)) + "\n")
    _, data, _ = load(recipe_for(path, data={"max_length": 9, "max_target_length": 5, "eval_fraction": 0.0}))
    end = data.source.tokenizer.eos_token_id
    assert {len(pair.source) for pair in data.train} <= set(range(3, 10))
    assert all(pair.source[-1] == pair.target[-1] == end for pair in data.train)
    assert_golden("\n".join(data.facts.notes))
    assert data.eval is None


def test_equal_sources_are_on_one_side_and_columns_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"en": f"text {row % 10}", "de": f"Text {row}"} for row in range(40)]
    write_jsonl(path, rows)
    _, data, _ = load(recipe_for(path, data={"source_column": "en", "target_column": "de"}))
    held_out = {row.texts for row in data.source.evaluated}
    assert 0 < len(held_out) < 10
    assert len(data.source.evaluated) == 4 * len(held_out)


def test_scores_of_texts_are_those_of_the_packages_and_baselines_are_scored_alike(tmp_path: Path) -> None:
    perfect = text_scores(["the cat sat on the mat"], ["the cat sat on the mat"])
    assert perfect == pytest.approx({"bleu": 100, "chrf": 100, "rouge1": 1, "rouge2": 1, "rougeL": 1, "exact_match": 1})
    two = text_scores(["a b c d e", "x"], ["a b c d f", "y"])
    assert two["rouge1"] == pytest.approx((4 / 5 + 0) / 2)
    assert two["exact_match"] == 0
    assert 0 < two["bleu"] < 100
    task, data, _ = load(recipe_for(write_pairs(tmp_path / "a.csv")))
    baselines = task.baselines(data)
    rows = data.source.evaluated
    copied = text_scores([row.texts[0] for row in rows], [row.label for row in rows])
    assert {name: baselines[f"copied_source_{name}"] for name in copied} == copied
    assert baselines["most_frequent_target_chrf"] > 0


def test_operations_count_for_each_target_token(tmp_path: Path) -> None:
    recipe = recipe_for(write_pairs(tmp_path / "a.csv"))
    task, _, model = load(recipe)
    flops = task.flops_per_target(recipe, model)
    source, target = (round(length) for length in task.mean_lengths)
    blocks = [p for name, p in model.named_parameters() if p.ndim == 2 and "block" in name and "bias" not in name]
    names = [name for name, p in model.named_parameters() if p.ndim == 2 and "block" in name and "bias" not in name]
    encoder = sum(p.numel() for p, name in zip(blocks, names) if name.startswith("encoder"))
    cross = sum(
        p.numel() for p, name in zip(blocks, names) if "EncDecAttention.k" in name or "EncDecAttention.v" in name
    )
    decoder = sum(p.numel() for p, name in zip(blocks, names) if name.startswith("decoder")) - cross
    head = model.get_output_embeddings().weight.numel()
    products = (encoder + cross) * source + (decoder + head) * target
    attention = 2 * 2 * 32 * (source * source + target * target + source * target)
    assert flops == pytest.approx(6 * (products + attention) / target)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with everything that training can be asked for but LoRA."""
    return train(
        "seq2seq",
        tmp_path_factory.mktemp("seq2seq"),
        60,
        model={"config": T5, "freeze": ["shared.*"]},
        **yaml.safe_load("""
            data: {id_column: name, max_length: 16, group_by_length: true}
            loss: {label_smoothing: 0.1}
            optimizer: {learning_rate: 0.01, ema_decay: 0.9, layer_decay: 0.9}
            schedule: {max_steps: 30}
            evaluate: {every_steps: 15, metric_for_best_model: chrf, early_stopping_patience: 3, sample_prompt: '31'}
        """),
    )


def test_a_run_learns_and_reports_scores_texts_and_baselines(trained: Path) -> None:
    evaluations = metrics(trained, "eval")
    assert evaluations[-1]["loss"] < 0.9 * evaluations[0]["loss"]
    summary = load_json(trained / "summary.json")
    assert set(TEXT_SCORES) < summary["eval"].keys()
    assert summary["baselines"]["copied_source_exact_match"] == 0
    assert summary["sample"]["prompt"] == "31"
    details = load_json(trained / "evaluation.json")["details"]["generation"]
    assert details["num_texts"] == summary["data"]["num_eval"]
    assert details["samples"][0].keys() == {"id", "source", "target", "generated"}
    assert "Generated texts" in (trained / "report.html").read_text()


def test_the_code_in_the_model_card_writes_what_predict_writes(trained: Path, not_launched: None) -> None:
    data = load_json(trained / "summary.json")["data"]
    card = (trained / "model" / "README.md").read_text()
    (about,) = (line for line in card.splitlines() if f" {data['num_train']} " in line)
    assert f" {data['num_eval']} " in about
    assert_golden(about)
    assert "up to 16 tokens" in card
    (trained.parent / "one.csv").write_text("source\n31 8\n")
    (row,) = predict(trained, trained.parent / "one.jsonl", trained.parent / "one.csv")
    assert run_card(trained / "model", {"a text": "31 8"}) == row["generated"]


def test_predictions_are_a_row_a_source_with_or_without_targets(
    trained: Path, tmp_path: Path, not_launched: None
) -> None:
    assert main(["predict", str(trained), "--out", str(tmp_path / "own.csv")]) == 0
    own = list(csv.DictReader((tmp_path / "own.csv").read_text().splitlines()))
    assert own[0].keys() == {"id", "source", "generated", "target"}
    assert own[0]["id"].startswith("row-")
    (tmp_path / "new.csv").write_text("source\n12 5\n7 7\n19 4\n")
    rows = predict(trained, tmp_path / "new.jsonl", tmp_path / "new.csv", processes=2)
    assert [row["id"].rpartition(":")[2] for row in rows] == ["2", "3", "4"]
    assert rows[0].keys() == {"id", "source", "generated"}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_a_compiled_model_generates_what_one_does_that_is_not(tmp_path: Path, compiled: str) -> None:
    """Traced alone: what the compiler would make of the graphs is another matter."""
    write_pairs(tmp_path / "pairs.csv")
    found = []
    for number, precision in enumerate(({}, {"compile": compiled, "compile_backend": "aot_eager"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = {"train": str(tmp_path / "pairs.csv"), "eval_fraction": 0.3, "max_length": 16, "max_target_length": 24}
        evaluate = {"every_steps": 2, "generation": {"max_samples": 5}}
        sections = {"model": {"config": T5}, "schedule": {"max_steps": 2}, "precision": precision, "evaluate": evaluate}
        run(write_recipe_file(folder, task="seq2seq", data=data, **sections))
        found.append(load_json(folder / "run" / "evaluation.json"))
    assert found[0]["details"]["generation"] == found[1]["details"]["generation"]
    assert found[1]["metrics"] == pytest.approx(found[0]["metrics"], rel=1e-5)
