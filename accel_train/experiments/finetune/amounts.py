"""Settings by the sizes of the data and of pretrained weights: learning rate, batch, epochs, metric."""

from typing import NamedTuple

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.experiments.finetune.recipe import Choices, Found

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


def epochs_for(found: Found, batch: int, steps: int, least: int, most: int) -> Choice[int]:
    """Return the passes over the data, between `least` and `most`, that make about `steps` steps."""
    per_epoch = max(1, round(found.num_samples * (1 - eval_fraction_for(found)) / batch))
    epochs = min(most, max(least, round(steps / per_epoch)))
    return Choice(epochs, f"about {epochs * per_epoch:,} steps of {batch}")


def eval_fraction_for(found: Found) -> float:
    """Return the share of samples held out for evaluation. Larger datasets have smaller shares."""
    if found.eval_fraction is not None:
        return found.eval_fraction
    if found.task == "causal-lm" and found.num_chars > 20_000_000:
        return 0.02
    return 0.2 if found.num_samples < 2_000 else 0.1 if found.num_samples < 20_000 else 0.05


def held_out_for(found: Found) -> Choice[float]:
    number = found.num_samples
    fraction = eval_fraction_for(found)
    if number == 1:
        return Choice(fraction, "the end of the one document")
    return Choice(fraction, f"of {format_count(number, 'sample')}, chosen by hash: the same samples in every run")


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


def training_of(
    found: Found,
    batch: int,
    rate: Choice[float],
    epochs: tuple[int, int, int],
    weight_decay: float,
    metric: Choice[str] | None = None,
) -> Choices:
    """Return batch, optimizer, schedule, and evaluation settings. `epochs` are the last arguments of `epochs_for`."""
    num_epochs = epochs_for(found, batch, *epochs)
    return {
        "batch.global_batch_size": Choice(batch, format_count(found.num_samples, "sample")),
        "optimizer.learning_rate": rate,
        "optimizer.weight_decay": Choice(weight_decay, ""),
        "schedule.type": Choice("warmup_cosine", ""),
        "schedule.num_epochs": num_epochs,
        "schedule.warmup_ratio": Choice(0.1, ""),
        "evaluate.every_epochs": Choice(max(1, num_epochs.value // 8), ""),
        "evaluate.metric_for_best_model": metric or metric_for(found),
        "checkpoint.every_steps": Choice(0, "saves after each best evaluation, and when the run is stopped"),
    }


def stratified(found: Found) -> Choices:
    has_classes = found.task == "image-classification" or (found.task == "text-classification" and found.has_one_label)
    if not has_classes or eval_fraction_for(found) == 0 or "data.group_column" in found.settings:
        return {}
    return {"data.stratify": Choice(True, "each class has the same share of its samples held out")}


def adapters(pretrained: Pretrained) -> Choices:
    if pretrained.num_parameters < LORA_FROM_PARAMETERS:
        return {}
    why = f"{num_parameters_in_words(pretrained.num_parameters)} parameters: adapters need a fraction of the memory"
    return {"model.lora": Choice({"rank": 16, "alpha": 32.0}, why)}
