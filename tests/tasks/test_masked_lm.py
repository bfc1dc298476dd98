"""Masked language modelling: which tokens are masked follows from seed, epoch and sample; the loss is transformers'
own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from accel_train.data.samples import Drawn
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.masked_lm.task import MaskedLM
from tests.support.runs import REPOSITORY, metrics, run, run_forked_command, write_corpus, write_recipe_file

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BERT = {"model_type": "bert", **SIZES}
ROBERTA = {
    "model_type": "roberta",
    **SIZES,
    "max_position_embeddings": 400,
}  # it counts positions from the id of the padding


def recipe_for(folder: Path, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "masked-lm",
        "output_dir": "run",
        "model": {"config": BERT},
        "schedule": {"max_steps": 1},
        **sections,
    }
    defaults = {
        "train": str(folder / "corpus.jsonl"),
        "eval_fraction": 0.2,
        "sequence_length": 32,
        "cache_dir": str(folder / "c"),
    }
    settings["data"] = {**defaults, **settings.get("data", {})}
    return Recipe.model_validate(settings)


def load(recipe: Recipe, seed: int = 0) -> tuple[MaskedLM, TaskData, nn.Module]:
    task = load_task("masked-lm")
    assert isinstance(task, MaskedLM)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(seed)
    return task, data, task.build_model(recipe, data).eval()


def batch_of(data: TaskData, indices: Any) -> tuple[dict[str, Tensor], int]:
    assert data.eval is not None
    batch = data.collate([data.eval[index] for index in indices])
    return batch, batch.pop("num_targets")


@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=lambda config: config["model_type"])
def test_the_loss_is_the_models_own_over_masked_tokens_alone(corpus: Path, config: dict[str, Any]) -> None:
    task, data, model = load(recipe_for(corpus, model={"config": config}))
    batch, num_targets = batch_of(data, range(6))
    assert num_targets == int((batch["labels"] != -100).sum())
    ours, its = task.loss_sum(model, batch) / num_targets, model(**batch).loss
    torch.testing.assert_close(ours, its)
    weight = model.get_input_embeddings().weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, its)))


def test_every_token_is_in_one_window_between_the_special_tokens(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus))
    tokenizer, windows = data.source.tokenizer, [data.train[index] for index in range(len(data.train))]  # type: ignore[arg-type]
    for window in windows:
        assert (window.ids[0], window.ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert len(window.ids) <= 32
    whole = np.concatenate([np.where(each.labels < 0, each.ids, each.labels)[1:-1] for each in windows])
    path = Path(data.facts["cache_folder"]) / "train.bin"
    assert whole.tolist() == np.fromfile(path, "<u2")[: len(whole)].tolist()
    assert len(whole) >= data.facts["train_tokens"] - 1


def test_eight_of_ten_are_masked_one_replaced_one_left_and_special_tokens_never(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus, data={"mlm_probability": 0.3}))
    tokenizer, draw = data.source.tokenizer, data.draw
    assert draw is not None
    drawn = [draw(index, np.random.default_rng((1, index))) for _ in range(3) for index in range(len(data.train))]  # type: ignore[arg-type]
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
    _, data, _ = load(recipe_for(corpus))
    assert data.draw is not None
    size = len(data.train)  # type: ignore[arg-type]
    draws = [Drawn(data.draw, seed, size) for seed in (1, 1, 2)]
    first, again, other_seed = (drawn[3].labels.tolist() for drawn in draws)
    assert first == again
    assert len({str(each) for each in (first, other_seed, draws[0][size + 3].labels.tolist())}) == 3
    _, other, _ = load(recipe_for(corpus, seed=9))
    assert data.eval is not None
    assert other.eval is not None
    assert all((data.eval[index].ids == other.eval[index].ids).all() for index in range(len(data.eval)))  # type: ignore[arg-type]


def test_a_window_without_a_drawn_token_gets_one(corpus: Path) -> None:
    _, data, _ = load(recipe_for(corpus, data={"mlm_probability": 1e-6}))
    assert data.draw is not None
    assert (data.draw(0, np.random.default_rng(0)).labels != -100).sum() == 1


def test_the_evaluation_does_not_depend_on_the_batch_size_and_pads_the_last_window(corpus: Path) -> None:
    task, data, model = load(recipe_for(corpus))
    size = len(data.eval)  # type: ignore[arg-type]

    def evaluated(batch_size: int) -> list[float]:
        counts = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for start in range(0, size, batch_size):
                batch, _ = batch_of(data, range(start, min(start + batch_size, size)))
                counts += torch.stack([value.double() for value in task.evaluate_batch(model, batch).values()])
        return counts.tolist()

    assert len(data.eval[size - 1].ids) < 32, "a short last window, or nothing is padded"  # type: ignore[index]
    assert "attention_mask" in batch_of(data, range(size - 2, size))[0]
    assert "attention_mask" not in batch_of(data, range(2))[0]
    assert evaluated(size) == pytest.approx(evaluated(1), rel=1e-6)


def test_token_frequencies_are_the_baseline(corpus: Path) -> None:
    task, data, _ = load(recipe_for(corpus))
    baselines = task.baselines(data)
    assert 2 < baselines["unigram_perplexity"] < 257
    assert 0.03 < baselines["unigram_token_accuracy"] < 0.5


def test_masks_in_rows_are_filled_as_transformers_pipeline_fills_them(corpus: Path) -> None:
    task, data, model = load(recipe_for(corpus, tokenizer={"train_bpe": {"vocab_size": 300}}))
    task.save(model, data, corpus / "model")
    texts = ["step4 [MASK]oss1 token", "rank2 batch[MASK]"]
    (corpus / "new.txt").write_text("\n".join(texts) + "\n")
    recipe = recipe_for(
        corpus,
        model={"pretrained": str(corpus / "model")},
        tokenizer=str(corpus / "model"),
        data={"train": str(corpus / "new.txt"), "eval": str(corpus / "new.txt"), "label_column": None},
    )
    task, rows, same = load(recipe)
    batch, num_targets = batch_of(rows, range(2))
    assert num_targets == 0
    found = {name: value.detach().numpy() for name, value in task.predict_batch(same, batch).items()}
    columns = task.prediction_columns({**found, "index": np.arange(2)}, rows)
    fill = pipeline("fill-mask", model=str(corpus / "model"), tokenizer=str(corpus / "model"), top_k=300)
    allowed = set(range(300)) - set(data.source.tokenizer.all_special_ids)
    for index, text in enumerate(texts):
        best = next(each for each in fill(text) if each["token"] in allowed)
        assert columns["tokens"][index] == data.source.tokenizer.decode([best["token"]])
        assert columns["score"][index] == pytest.approx(best["score"], abs=1e-5)
        assert columns["filled"][index] == text.replace("[MASK]", columns["tokens"][index])
        assert rows.source.row_ids(index).endswith(f"new.txt:{index + 1}")
    (corpus / "new.txt").write_text("no mask here\n")
    with pytest.raises(ValueError, match=r"new\.txt:1: there is no \[MASK\] within the text's first 32 tokens"):
        load(recipe)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"sequence_length": 65}}, "data.sequence_length=65 is longer than the 64 positions of the model"),
        ({"data": {"sequence_length": 3}}, "data.sequence_length=3 leaves no room for text; give at least 4"),
        ({"model": {"config": {"model_type": "gpt2"}}}, "has no model for masked language modelling in transformers"),
        ({"model": {"config": {**ROBERTA, "max_position_embeddings": 280}}}, "longer than the"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(corpus: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what the test looks at)
        load(recipe_for(corpus, **sections))
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with everything that training can be asked for but LoRA."""
    folder = tmp_path_factory.mktemp("masked")
    write_corpus(folder)
    recipe = write_recipe_file(
        folder,
        task="masked-lm",
        model={"config": BERT, "freeze": ["*position_embeddings*"]},
        data={"num_workers": 0},
        loss={"label_smoothing": 0.05},
        optimizer={"learning_rate": 1e-2, "ema_decay": 0.9, "layer_decay": 0.9},
        schedule={"max_steps": 30},
        evaluate={"every_steps": 10, "metric_for_best_model": "token_accuracy", "early_stopping_patience": 3},
    )
    run(recipe)
    return folder / "run"


def test_a_run_learns_and_its_model_opens_in_transformers(trained: Path) -> None:
    evaluations = metrics(trained, "eval")
    assert evaluations[-1]["loss"] < 0.9 * evaluations[0]["loss"]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["eval"]["perplexity"] < summary["baselines"]["unigram_perplexity"] * 1.2
    model = AutoModelForMaskedLM.from_pretrained(trained / "model")
    assert AutoTokenizer.from_pretrained(trained / "model").mask_token_id < model.config.vocab_size
    card = (trained / "model" / "README.md").read_text()
    assert f"on {summary['data']['num_train']:,} windows of" in card
    names: dict[str, Any] = {}
    code = card.split("```python")[1].split("```")[0].replace("path/of/this/folder", str(trained / "model"))
    exec(code, names)
    assert names["fill"]("a [MASK]")[0]["score"] > 0


def test_predict_fills_the_masks_of_a_file_and_without_one_those_of_the_evaluation(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("step4 [MASK]oss1 token\nrank2 batch[MASK]\nseed[MASK]\n")
    words = ["predict", str(trained), str(tmp_path / "lines.txt"), "--out", str(tmp_path / "lines.jsonl")]
    done = run_forked_command(words, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [row["id"].rpartition(":")[2] for row in rows] == ["1", "2", "3"]
    assert all(row["filled"] and row["tokens"] and 0 < row["score"] <= 1 for row in rows)
    done = run_forked_command(["predict", str(trained), "--out", str(tmp_path / "own.jsonl")], 1)
    assert done.returncode == 0, done.stderr[-3000:]
    own = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert own[0]["id"] == "window 0"


@pytest.mark.slow
def test_the_recipe_beats_token_frequencies_in_a_quarter_of_its_steps(tmp_path: Path) -> None:
    recipe = REPOSITORY / "recipes/masked_lm.yaml"
    run(recipe, "--schedule.max_steps", "220", "--output_dir", str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["token_accuracy"] > summary["baselines"]["unigram_token_accuracy"] + 0.1
