"""Masked language modeling: seed, epoch and sample decide which tokens are masked, and masks in rows are filled."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from accel_train.core.json_io import load_json
from accel_train.data.samples import Drawn
from tests.support import text_tasks
from tests.support.runs import metrics, refused
from tests.support.text_tasks import BERT, batch_of, load, predict, run_card, train

recipe_for = partial(text_tasks.recipe_for, "masked-lm")
CORPUS = "corpus.jsonl"


def test_every_token_is_in_one_window_between_the_special_tokens(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus / CORPUS))
    tokenizer, windows = data.source.tokenizer, [data.train[index] for index in range(len(data.train))]
    for window in windows:
        assert (window.ids[0], window.ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert len(window.ids) <= 32
    whole = np.concatenate([np.where(each.labels < 0, each.ids, each.labels)[1:-1] for each in windows])
    path = Path(data.facts.cache_folder) / "train.bin"
    assert whole.tolist() == np.fromfile(path, "<u2")[: len(whole)].tolist()
    assert len(whole) >= data.facts.train_tokens - 1


def test_eight_of_ten_are_masked_one_replaced_one_left_and_special_tokens_never(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus / CORPUS, data={"mlm_probability": 0.3}))
    tokenizer, draw = data.source.tokenizer, data.draw
    assert draw is not None
    drawn = [draw(index, np.random.default_rng((1, index))) for _ in range(3) for index in range(len(data.train))]
    ids, labels = (np.concatenate([each[part] for each in drawn]) for part in (0, 1))
    chosen = labels != -100
    special = np.isin(np.where(chosen, labels, ids), tokenizer.all_special_ids)
    assert special.sum() > 100
    assert not (chosen & special).any()
    assert chosen.sum() / (~special).sum() == pytest.approx(0.3, abs=0.02)
    masked, left = (ids == tokenizer.mask_token_id)[chosen], (ids == labels)[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.03)
    assert left.mean() == pytest.approx(0.1, abs=0.03)
    replaced = ids[chosen][~masked & ~left]
    assert len(set(replaced.tolist())) > 100, "replacements are drawn from all tokens"
    assert not np.isin(replaced, tokenizer.all_special_ids).any()


def test_masks_follow_from_seed_epoch_and_sample_and_those_of_evaluations_never_change(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus / CORPUS))
    assert data.draw is not None
    size = len(data.train)
    draws = [Drawn(data.draw, seed, size) for seed in (1, 1, 2)]
    first, again, other_seed = (drawn[3].labels.tolist() for drawn in draws)
    assert first == again
    assert len({str(each) for each in (first, other_seed, draws[0][size + 3].labels.tolist())}) == 3
    _, other, _ = load(recipe_for(corpus / CORPUS, seed=9))
    assert data.eval is not None
    assert other.eval is not None
    assert all((data.eval[index].ids == other.eval[index].ids).all() for index in range(len(data.eval)))


def test_a_window_without_a_drawn_token_gets_one(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus / CORPUS, data={"mlm_probability": 1e-6}))
    assert data.draw is not None
    assert (data.draw(0, np.random.default_rng(0)).labels != -100).sum() == 1


def test_token_frequencies_are_the_baseline(corpus: Path) -> None:
    task, data, _ = load(recipe_for(corpus / CORPUS))
    baselines = task.baselines(data)
    assert 2 < baselines["unigram_perplexity"] < 257
    assert 0.03 < baselines["unigram_token_accuracy"] < 0.5


def test_masks_in_rows_are_filled_as_transformers_pipeline_fills_them(corpus: Path) -> None:
    task, data, model = load(recipe_for(corpus / CORPUS, tokenizer={"train_bpe": {"vocab_size": 300}}))
    task.save(model, data, corpus / "model")
    texts = ["step4 [MASK]oss1 token", "rank2 batch[MASK]"]
    new, saved = corpus / "new.txt", str(corpus / "model")
    new.write_text("\n".join(texts) + "\n")
    data_of_rows = {"eval": str(new), "label_column": None}
    recipe = recipe_for(new, model={"pretrained": saved}, tokenizer=saved, data=data_of_rows)
    task, rows, same = load(recipe)
    batch, num_targets = batch_of(rows, range(2))
    assert num_targets == 0
    found = {name: value.detach().numpy() for name, value in task.predict_batch(same, batch).items()}
    columns = task.prediction_columns({**found, "index": np.arange(2)}, rows)
    fill = pipeline("fill-mask", model=saved, tokenizer=saved, top_k=300)
    allowed = set(range(300)) - set(data.source.tokenizer.all_special_ids)
    for index, text in enumerate(texts):
        best = next(each for each in fill(text) if each["token"] in allowed)
        assert columns["tokens"][index] == data.source.tokenizer.decode([best["token"]])
        assert columns["score"][index] == pytest.approx(best["score"], abs=1e-5)
        assert columns["filled"][index] == text.replace("[MASK]", columns["tokens"][index])
        assert rows.source.row_ids(index).endswith(f"new.txt:{index + 1}")
    new.write_text("no mask here\n")
    refused(load, recipe, named="new.txt:1|[MASK]|first 32 tokens")


def test_a_mask_of_attention_is_there_for_a_padded_window_alone(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus / CORPUS))
    size = len(data.eval)
    assert len(data.eval[size - 1].ids) < 32, "a short last window, or nothing is padded"
    assert "attention_mask" in batch_of(data, range(size - 2, size))[0]
    assert "attention_mask" not in batch_of(data, range(2))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with everything that training can be asked for but LoRA."""
    return train(
        "masked-lm",
        tmp_path_factory.mktemp("masked"),
        model={"config": {**BERT, "num_hidden_layers": 2}, "freeze": ["*position_embeddings*"]},
        **yaml.safe_load("""
            loss: {label_smoothing: 0.05}
            optimizer: {learning_rate: 0.01, ema_decay: 0.9, layer_decay: 0.9}
            schedule: {max_steps: 30}
            evaluate: {every_steps: 10, metric_for_best_model: token_accuracy, early_stopping_patience: 3}
        """),
    )


def test_a_run_learns_and_its_model_opens_in_transformers(trained: Path) -> None:
    evaluations = metrics(trained, "eval")
    assert evaluations[-1]["loss"] < 0.9 * evaluations[0]["loss"]
    summary = load_json(trained / "summary.json")
    assert summary["eval"]["perplexity"] < summary["baselines"]["unigram_perplexity"] * 1.2
    model = AutoModelForMaskedLM.from_pretrained(trained / "model")
    assert AutoTokenizer.from_pretrained(trained / "model").mask_token_id < model.config.vocab_size
    card = (trained / "model" / "README.md").read_text()
    assert f"on {summary['data']['num_train']:,} windows of" in card
    printed = {'fill("a text with a [MASK]")': 'fill("a [MASK]")[0]["score"] > 0'}
    assert run_card(trained / "model", printed) == "True"


def test_predict_fills_the_masks_of_a_file_and_without_one_those_of_the_evaluation(
    trained: Path, tmp_path: Path, not_launched: None
) -> None:
    (tmp_path / "lines.txt").write_text("step4 [MASK]oss1 token\nrank2 batch[MASK]\nseed[MASK]\n")
    rows = predict(trained, tmp_path / "lines.jsonl", tmp_path / "lines.txt", processes=2)
    assert [row["id"].rpartition(":")[2] for row in rows] == ["1", "2", "3"]
    assert all(row["filled"] and row["tokens"] and 0 < row["score"] <= 1 for row in rows)
    assert predict(trained, tmp_path / "own.jsonl")[0]["id"] == "window 0"
