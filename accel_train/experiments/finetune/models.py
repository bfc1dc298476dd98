"""Choice of model and training settings: small models from scratch, or settings by the size of a pretrained model."""

from pathlib import Path
from typing import Any

from accel_train.core.errors import SettingError
from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.images.preprocessing import pretrained_image_size
from accel_train.data.text.tokenizers import load_tokenizer
from accel_train.experiments.finetune.found import Found
from accel_train.experiments.finetune.image_models import image_classifier, segmenter
from accel_train.experiments.finetune.text_models import language_model, text_classifier
from accel_train.experiments.finetune.training import (
    LONGEST,
    LORA_FROM_PARAMETERS,
    Choices,
    Pretrained,
    eval_fraction_for,
    num_parameters_in_words,
)
from accel_train.model.pretrained import num_pretrained_parameters, pretrained_config
from accel_train.recipe.loader import make_recipe
from accel_train.task import load_task, prove_forward


def choose(found: Found, pretrained: Pretrained | None) -> Choices:
    """Return model, optimizer, schedule, and evaluation settings for the data, each with its reason."""
    by_task = {
        "text-classification": text_classifier,
        "causal-lm": language_model,
        "image-classification": image_classifier,
        "semantic-segmentation": segmenter,
    }
    chosen = by_task[found.task](found, pretrained)
    if pretrained is not None:
        chosen = {
            "model.pretrained": Choice(
                pretrained.name, f"as --model says; {num_parameters_in_words(pretrained.num_parameters)} parameters"
            ),
            **chosen,
            **_adapters(pretrained),
        }
    return {
        **chosen,
        **({"data.eval_fraction": _held_out(found)} if found.eval_fraction is None else {}),
        "checkpoint.load_best_model_at_end": Choice(True, "model/ holds the weights that evaluated best"),
    }


def _adapters(pretrained: Pretrained) -> Choices:
    if pretrained.num_parameters < LORA_FROM_PARAMETERS:
        return {}
    why = f"{num_parameters_in_words(pretrained.num_parameters)} parameters: adapters take a fraction of the memory"
    return {"model.lora": Choice({"rank": 16, "alpha": 32.0}, why)}


def _held_out(found: Found) -> Choice[float]:
    number = found.num_samples
    fraction = eval_fraction_for(found)
    if number == 1:
        return Choice(fraction, "the end of the one document")
    return Choice(fraction, f"of {format_count(number, 'sample')}, by a hash of each: the same in every run")


def look_at(name: str, task: str, *, trust_remote_code: bool) -> Pretrained:
    """Return the facts of pretrained weights in a folder or on the hub. Only their configuration is read.

    Raises:
        ValueError: the model does not exist, or its tokenizer cannot be loaded.
    """
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"--model {name}: there is no such folder (seen from {Path.cwd()}); name one, or a model on the hub"
        )
    model = {"pretrained": name, "trust_remote_code": trust_remote_code}
    tree = {"output_dir": "runs", "model": model, "data": {"train": "."}, "schedule": {"max_steps": 1}}
    config = pretrained_config(make_recipe(tree, "--model"))
    is_text = task in ("text-classification", "causal-lm")
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code) if is_text else None
    return Pretrained(
        name,
        num_pretrained_parameters(config, Path(name).expanduser()),
        getattr(config.get_text_config(), "max_position_embeddings", None),
        None if is_text else pretrained_image_size(name, config),
        bool(tokenizer is not None and tokenizer.chat_template),
        *((_document_masks(tree, config),) if task == "causal-lm" else ()),
    )


def _document_masks(tree: dict[str, Any], config: Any) -> Choice[bool]:
    """Return whether the model can keep documents in a window apart, by the probe that starts a run."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST
    data = {"train": ".", "mask_documents": True, "sequence_length": min(LONGEST, positions)}
    try:
        prove_forward(load_task("causal-lm"), make_recipe({**tree, "data": data}, "--model"))
    except ValueError as error:
        reason = str(error)
        if isinstance(error, SettingError) and "data.mask_documents" in error.settings:
            reason = error.problem
        return Choice(False, f"documents in a window see each other: {reason}")
    return Choice(True, "attention stays within a document")
