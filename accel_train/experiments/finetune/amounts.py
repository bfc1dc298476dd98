"""Settings by the sizes of the data and of pretrained weights: learning rate, batch, epochs, metric."""

from typing import NamedTuple

from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.experiments.finetune.recipe import Found

LORA_FROM_PARAMETERS = 1_000_000_000
"""Parameters from which adapters are trained. AdamW on all weights would take 16 bytes per parameter."""


class Pretrained(NamedTuple):
    """The facts about pretrained weights that decide how they are trained."""

    name: str
    num_parameters: int
    num_positions: int | None
    """Length of the longest text that the model can read, in tokens. None without a limit."""
    image_size: int | None
    has_chat_template: bool
    masks_documents: Choice[bool] = Choice(True, "attention stays within a document")
    """Value of `data.mask_documents` for text, with its reason."""
    template_has_tools: bool = False
    is_t5: bool = False
    """Whether the model is of the T5 family, which learns at a higher rate."""
    image_resize: Choice[str] | None = None
    """Value of `data.image_resize`, with its reason. None: the model's image processor resizes images."""


def num_parameters_in_words(number: int) -> str:
    """Return a number of parameters as text, such as 22.7M or 1.1B."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def learning_rate_of(pretrained: Pretrained) -> Choice[float]:
    size = pretrained.num_parameters
    if size >= LORA_FROM_PARAMETERS:
        return Choice(2e-4, "usual for LoRA")
    steps = ((10e6, 5e-4), (50e6, 2e-4), (200e6, 5e-5), (500e6, 3e-5), (float("inf"), 2e-5))
    rate = next(rate for limit, rate in steps if size < limit)
    return Choice(
        rate, f"usual for {num_parameters_in_words(size)} pretrained parameters; larger models need lower rates"
    )


def batch_for(found: Found) -> int:
    return 16 if found.num_samples < 2_000 else 32 if found.num_samples < 50_000 else 64


def eval_fraction_for(found: Found) -> float:
    """Return the share of samples held out for evaluation. Larger datasets have smaller shares."""
    if found.eval_fraction is not None:
        return found.eval_fraction
    if found.task == "causal-lm" and found.num_chars > 20_000_000:
        return 0.02
    return 0.2 if found.num_samples < 2_000 else 0.1 if found.num_samples < 20_000 else 0.05


def held_out_for(found: Found) -> Choices:
    """Return the settings of the held-out part."""
    fraction, chosen = eval_fraction_for(found), Choices()
    if found.eval_fraction is None:
        why = f"of {format_count(found.num_samples, 'sample')}, chosen by hash: the same samples in every run"
        chosen["data.eval_fraction"] = Choice(fraction, why if found.num_samples > 1 else "the end of the one document")
    has_classes = found.task == "image-classification" or (found.task == "text-classification" and found.has_one_label)
    if has_classes and fraction and "data.group_column" not in found.settings:
        chosen["data.stratify"] = Choice(True, "each class has the same share of its samples held out")
    return chosen


def metric_for(found: Found) -> Choice[str]:
    counts = found.counts
    if not counts:
        return Choice("pearson", "the correlation of predicted and true numbers")
    if found.task == "text-classification" and not found.has_one_label:
        return Choice("f1_macro", "a text may have several labels")
    total = sum(counts.values())
    most, count = max(counts.items(), key=lambda item: item[1])
    if count > 1.5 * total / len(counts):
        return Choice("f1_macro", f"{count / total:.0%} are {most!r}: accuracy would favor this class")
    least, count = min(counts.items(), key=lambda item: item[1])
    if count < total / len(counts) / 3:
        return Choice("f1_macro", f"{count:,} of {total:,} are {least!r}: accuracy would hardly notice this class")
    return Choice("accuracy", "the classes have similar sizes")


class Passes(NamedTuple):
    """The passes over the data, between `least` and `most`, that make about `steps` steps."""

    steps: int
    least: int
    most: int


class Amounts(NamedTuple):
    """Settings of training by task: from scratch as in a recipe of this package, or with pretrained weights.

    The defaults are for texts.
    """

    recipe: str
    from_scratch: Passes = Passes(1_200, 3, 30)
    pretrained: Passes = Passes(1_000, 2, 5)
    weight_decay: float = 0.01
    """Weight decay of pretrained weights."""


AMOUNTS = {
    "text-classification": Amounts("text_classification"),
    "image-classification": Amounts("image_classification", Passes(600, 5, 40), Passes(1_000, 3, 10), 0.05),
    "semantic-segmentation": Amounts("segmentation", Passes(800, 5, 100), Passes(1_500, 10, 60)),
    "object-detection": Amounts("object_detection", Passes(2_000, 10, 200), Passes(1_500, 10, 60), 1e-4),
    "token-classification": Amounts("token_classification"),
    "question-answering": Amounts("question_answering"),
    "seq2seq": Amounts("seq2seq"),
    "sentence-embedding": Amounts("sentence_embedding", Passes(600, 3, 30), Passes(1_000, 1, 5)),
}


def training_of(
    found: Found, batch: int, rate: Choice[float], passes: Passes, weight_decay: float, metric: Choice[str] | None
) -> Choices:
    """Return batch, optimizer, schedule, and evaluation settings. `metric` is None for a metric by the labels."""
    per_epoch = max(1, round(found.num_samples * (1 - eval_fraction_for(found)) / batch))
    epochs = min(passes.most, max(passes.least, round(passes.steps / per_epoch)))
    return {
        "batch.global_batch_size": Choice(batch, format_count(found.num_samples, "sample")),
        "optimizer.learning_rate": rate,
        "optimizer.weight_decay": Choice(weight_decay),
        "schedule.type": Choice("warmup_cosine"),
        "schedule.num_epochs": Choice(epochs, f"about {format_count(epochs * per_epoch, 'step')} of {batch}"),
        "schedule.warmup_ratio": Choice(0.1),
        "evaluate.every_epochs": Choice(max(1, epochs // 8)),
        "evaluate.metric_for_best_model": metric or metric_for(found),
        "checkpoint.every_steps": Choice(0, "saves after each best evaluation, and when the run is stopped"),
    }
