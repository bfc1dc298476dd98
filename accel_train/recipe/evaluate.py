"""The evaluation section of a recipe: when to evaluate, the data, the metrics, and text generation."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from accel_train.core.format import LARGEST_COUNT
from accel_train.core.metric_names import is_lower_better
from accel_train.recipe.values import Auto, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Generation(Section):
    max_samples: NonNegativeInt | None = 200
    """Number of evenly spaced samples for which an evaluation generates and scores texts. null: all samples.
    0: none.
    """
    num_beams: PositiveInt = 1
    """Number of beams in beam search. 1: the most likely token at each position (greedy)."""
    length_penalty: float = 1.0
    """Length penalty of beam search. Values above 0 prefer longer texts, below 0 shorter ones."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """Length of token sequences that may occur only once in a text. 0: no limit."""
    bleu_tokenizer: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    """BLEU tokenizer, by sacrebleu's names. zh is for Chinese, char for languages without spaces."""


class TestTimeAugmentation(Section):
    # pytest would otherwise collect this class because of its name.
    __test__ = False

    horizontal_flip: bool = True
    """Whether to average over the image and its mirror image."""
    scales: tuple[PositiveFloat, ...] = (1.0,)
    """Scales of the image to average over."""


class Evaluate(Section):
    every_steps: NonNegativeInt = 500
    """Number of steps between two evaluations. 0: only at the end."""
    every_epochs: Annotated[NonNegativeFloat, Field(le=LARGEST_COUNT)] | None = None
    """Number of passes over the training data between two evaluations. If set, it replaces every_steps."""
    at_start: Auto | bool = "auto"
    """Whether to evaluate the initial weights before the first step, on all samples. Their metrics are the baseline
    `untrained` of the trained model. auto: if the initial weights already give usable results (sentence encoders).
    """
    metrics: tuple[str, ...] = ()
    """Metrics in addition to the task's metrics: names of accel_train.metrics, or of the hub with allow_hub_metrics.
    `module:function`: your own function of (predictions, references), two arrays, which returns a number, or numbers by
    name.
    """
    allow_hub_metrics: bool = False
    """Whether to load other metrics from the hub. This runs code from the hub."""
    metric_for_best_model: str = "loss"
    """Metric that defines the best checkpoint: a name that evaluations report. Among equal values, the lower loss is
    better, then the later step.
    """
    greater_is_better: Auto | bool = "auto"
    """Whether greater values of metric_for_best_model are better. auto: lower is better for losses, errors, and
    perplexity, greater for all other metrics.
    """
    early_stopping_patience: PositiveInt | None = Field(default=None, examples=[3])
    """Number of consecutive evaluations without improvement after which training stops. An improvement is a better
    metric_for_best_model, or an equal one with a lower loss.
    """
    early_stopping_threshold: NonNegativeFloat = 0.0
    """Smallest change of the metric that counts as an improvement."""
    test_time_augmentation: TestTimeAugmentation | None = Field(default=None, examples=[{"horizontal_flip": True}])
    """Averaging over flips and scales, for images. Evaluations report results with and without it."""
    window_stride: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[384])
    """Distance between evaluation and prediction windows of `data.crop_size`, in pixels, or
    [down, right]. Logits are averaged where windows overlap. Default: the whole image at `data.image_size`.
    """
    max_samples: PositiveInt | None = None
    """Number of samples per evaluation during training. The last evaluation uses all samples, and is logged as a
    separate curve (`eval_final`). Default: all samples.
    """
    num_examples: NonNegativeInt = 12
    """Number of held-out samples to show in the report, with their texts or pictures, mistakes first. 0: none."""
    null_score_diff_threshold: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Threshold for an empty answer. The answer is empty if the score of no answer exceeds the best
    answer's score by more than this.
    """
    sample_prompt: str | None = None
    """Prompt for a sample text at the end of the run. A language model continues it. A seq2seq model gets it as its
    source.
    """
    sample_tokens: PositiveInt = 200
    """Length of the sample text, in tokens."""
    generation: Generation = Generation()

    def unread(self) -> Mapping[str, str]:
        is_greedy = self.generation.num_beams == 1
        return {"generation.length_penalty": "evaluate.generation.num_beams is 1"} if is_greedy else {}

    @property
    def best_metric(self) -> str:
        """Name of metric_for_best_model without `eval_`, which transformers puts before it."""
        return self.metric_for_best_model.removeprefix("eval_")

    def is_lower_better(self, metric: str) -> bool:
        """Return whether smaller values of a metric are better; greater_is_better decides on metric_for_best_model."""
        is_chosen = metric == self.best_metric and self.greater_is_better != "auto"
        return not self.greater_is_better if is_chosen else is_lower_better(metric)
