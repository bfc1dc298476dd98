"""The model and the training that suit what was found: small ones from scratch, or settings by the size of a pretrained one."""

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.experiments.finetune.found import Found
from accel_train.experiments.finetune.image_models import image_classifier, segmenter
from accel_train.experiments.finetune.text_models import language_model, text_classifier
from accel_train.experiments.finetune.training import (
    LORA_FROM_PARAMETERS,
    Choices,
    Pretrained,
    eval_fraction_for,
    num_parameters_in_words,
)


def choose(found: Found, pretrained: Pretrained | None) -> Choices:
    """Return model, optimizer, schedule and evaluation for what was found, each with its reason."""
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
