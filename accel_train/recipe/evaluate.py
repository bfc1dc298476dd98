"""The evaluation section of a recipe: when, on what, by which metrics, and how texts are generated for it."""

from typing import Annotated, Literal

from pydantic import Field

from accel_train.core.format import LARGEST_COUNT
from accel_train.recipe.values import (
    Auto,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class Generation(Section):
    max_samples: NonNegativeInt | None = 200
    """seq2seq: evaluations generate texts for this many samples, evenly spaced, and score them; none: for all, 0: for none."""
    num_beams: PositiveInt = 1
    """Sequences that the search keeps at a time; 1 takes the likeliest token each time (greedy)."""
    length_penalty: float = 1.0
    """Beam search: above 0 prefers longer texts, below 0 shorter ones."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """No sequence of so many tokens comes twice in a text; 0: any may."""
    bleu_tokenizer: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    """How BLEU cuts texts into words, by sacrebleu's names; zh is for Chinese, char for languages without spaces."""


class TestTimeAugmentation(Section):
    __test__ = False  # no test class, whatever pytest makes of its name

    horizontal_flip: bool = True
    """Average over the image and its mirror image."""
    scales: tuple[PositiveFloat, ...] = (1.0,)
    """Average over the image at these scales."""


class Evaluate(Section):
    every_steps: NonNegativeInt = 500
    """Steps between two evaluations; 0: only at the end."""
    every_epochs: Annotated[NonNegativeFloat, Field(le=LARGEST_COUNT)] | None = None
    """The same in passes over the training data; given, it replaces every_steps."""
    metrics: tuple[str, ...] = ()
    """Further metrics beside the task's own: names of accel_train.metrics, or of the hub with allow_hub_metrics."""
    allow_hub_metrics: bool = False
    """Load metrics that are not in the package from the hub, which runs code from there."""
    metric_for_best_model: str = "loss"
    """What "best" means: a name that evaluations report. Of equal values, the lower loss is better, then the later step."""
    greater_is_better: Auto | bool = "auto"
    """auto: lower is better for losses, errors and perplexity, greater for everything else."""
    early_stopping_patience: PositiveInt | None = Field(default=None, examples=[3])
    """Stop after this many evaluations in a row without a better metric_for_best_model, or an equal one with a lower loss."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """How much better counts as better."""
    test_time_augmentation: TestTimeAugmentation | None = Field(default=None, examples=[{"horizontal_flip": True}])
    """Images: evaluate with and without averaging over flips and scales."""
    window_stride: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[384])
    """semantic-segmentation: evaluate and predict by windows of `data.crop_size`, so many pixels apart, or [down, right], whose logits
    are averaged where they overlap; none: the whole image at `data.image_size` at once."""
    max_samples: PositiveInt | None = None
    """Evaluate on this many samples during training; the last evaluation takes all, and is a curve of its own (`eval_final`)."""
    num_examples: NonNegativeInt = 12
    """Held-out samples that the model gets wrong, shown in the report with their text or picture; 0: none is copied."""
    null_score_diff_threshold: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """question-answering: the answer is empty where the score of no answer is higher than that of the best one by more than this."""
    sample_prompt: str | None = None
    """causal-lm: print a text that begins with this at the end of the run; seq2seq: one that is generated from this source."""
    sample_tokens: PositiveInt = 200
    """causal-lm: length of that text."""
    generation: Generation = Generation()
