"""Masked language modeling: predict masked tokens from both sides with any BERT-style model of transformers."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from accel_train.core.model_card import FOLDER, Use
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.corpus import prepare_text
from accel_train.data.text.shards import sharded
from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.data.text.tokens import joined, parts_of
from accel_train.metrics.scores import perplexity
from accel_train.model.kernels.chunked_loss import summed_loss
from accel_train.model.kernels.loss_by_source import loss_by_source
from accel_train.recipe.data import TrainedTokenizer
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Facts, Scores, Task, TaskData, Tensors, Totals
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.generation import NO_TOKEN, decoded, spaced
from accel_train.tasks.common.texts import TextRow, text_tokenizer, with_frame
from accel_train.tasks.masked_lm.config import SPEC, MaskedLMData
from accel_train.tasks.masked_lm.data import MaskedWindows, Masking, collate_masked, mask_rows, masking_of, rows_to_fill
from accel_train.tasks.rows import decimals, logits_of, token_accuracy, token_counts

MASKED_LM = models.Head("masked language modelling", AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING)
MOST_COUNTED = 10_000
"""Windows per split that the baseline counts, evenly spaced."""


@dataclass(frozen=True)
class Source:
    """The tokenizer, model configuration, and masking that the task keeps in addition to its samples."""

    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    masking: Masking
    rows: list[TextRow]
    """Texts whose masks are to be filled. Empty if the task masks windows."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer's vocabulary."""
        return len(self.masking.is_special)

    def row_ids(self, index: int) -> str:
        """Return the name of a text, or the number of an evaluation window."""
        return self.rows[index].id if self.rows else f"window {index}"


class MaskedLM(Task):
    """Pretrain a BERT or RoBERTa on text, or continue training pretrained weights."""

    spec = SPEC
    counts_sources = True

    metric_names = SPEC.metrics

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read windows of the recipe's text, tokenized once and reused, or texts to fill.

        Without `data.label_column`, the texts already contain masks, and the task fills them.

        Raises:
            ValueError: the model, tokenizer, or text does not match the recipe.
        """
        section = MaskedLMData.of(recipe.data)
        models.check_model(recipe, MASKED_LM)
        self.label_smoothing, self.probability = recipe.loss.label_smoothing, section.mlm_probability
        self.length = section.sequence_length
        if section.label_column is None:
            return self._rows_with_masks(recipe)
        text = prepare_text(recipe, progress=progress)
        tokenizer, notes = _with_mask(recipe, text.tokenizer)
        source = self._source(recipe, tokenizer, text.separator_id, [])
        train, *sets = (MaskedWindows(each, source.masking, self.length) for each in (text.train, *parts_of(text.eval)))
        evaluation = joined(sets)
        # Baselines of causal models do not compare.
        without = {"unigram_bits_per_byte", "xz_bits_per_byte"}
        facts = Facts(**text.facts.model_dump(exclude_unset=True, exclude=without))
        facts.num_train, facts.num_eval = len(train), 0 if evaluation is None else len(evaluation)
        facts.train_targets = round(self.probability * (facts.train_tokens or 0))
        facts.notes = [*notes, *facts.notes]
        return TaskData(
            train=train,
            eval=evaluation,
            collate=partial(collate_masked, pad_id=int(tokenizer.pad_token_id)),
            fingerprint=text.fingerprint,
            first_fingerprint=f"{text.fingerprint}-{self.probability:g}",
            facts=facts,
            source=source,
            draw=train.draw,
            large_files=text.large_files,
            **sharded(train.windows),
        )

    def _rows_with_masks(self, recipe: Recipe) -> TaskData:
        # A finished run has its tokenizer next to its weights, so no texts are needed to train one.
        tokenizer, _ = _with_mask(recipe, text_tokenizer(recipe, ())[0])
        rows = rows_to_fill(MaskedLMData.of(recipe.data))
        samples = cast("Dataset[Any]", mask_rows(rows, tokenizer, self.length))
        return TaskData(
            train=samples,
            eval=samples,
            collate=partial(collate_masked, pad_id=int(tokenizer.pad_token_id)),
            fingerprint="rows",
            reading_is_free=True,
            source=self._source(recipe, tokenizer, int(tokenizer.pad_token_id), rows),
        )

    def _source(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, separator_id: int, rows: list[TextRow]
    ) -> Source:
        """Return the source, after checking the sequence length against the model's positions."""
        config = models.model_config(recipe, tokenizer, MASKED_LM)
        positions = models.num_positions(config, MASKED_LM)
        if positions is not None and self.length > positions:
            raise ValueError(
                f"data.sequence_length={self.length} is longer than the {positions} positions of the model; "
                f"lower it to {positions}, or raise max_position_embeddings in model.config"
            )
        self.masking = masking_of(tokenizer, vocab_size_of(tokenizer), separator_id, self.probability)
        framed = len(self.masking.prefix) + len(self.masking.suffix)
        if self.length < framed + 2:
            raise ValueError(f"data.sequence_length={self.length} leaves no room for text; give at least {framed + 2}")
        return Source(tokenizer, config, self.masking, rows)

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's masked language model and add notes about its new weights to the facts of `data`.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        source: Source = data.source
        model, notes = models.build_model(recipe, source.config, source.tokenizer, MASKED_LM)
        data.add_notes(notes)
        return model

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy summed over masked tokens, with `loss.label_smoothing` in training."""
        smoothing = self.label_smoothing if model.training else 0.0
        by_source = loss_by_source(model, batch["labels"], self.counted)
        logits = logits_of(model, batch)
        return summed_loss(logits, batch["labels"], smoothing, by_source=by_source)

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs of one window's forward pass, divided by the mean number of tokens it predicts."""
        assert isinstance(model, PreTrainedModel)
        flops = classification.training_flops(AutoModelForMaskedLM, model.config, input_ids=(1, self.length))
        return None if flops is None else flops / (self.probability * self.length)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss, the number of masked tokens, and the number whose likeliest token is right."""
        return token_counts(logits_of(model, batch), batch["labels"])

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return the perplexity and accuracy of the masked tokens. All evaluations use the same masks.

        The perplexity is exp of the loss with all masks of a window at once, as in transformers' `run_mlm`. Masking one
        token at a time (the pseudo-perplexity of Salazar et al. 2020) would need one forward pass per token and give a
        lower value.
        """
        return Scores({"perplexity": perplexity(loss), "token_accuracy": token_accuracy(totals)})

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of the training tokens' frequencies on the tokens that evaluations predict."""
        if data.eval is None or data.source.rows:
            return {}
        special = data.source.masking.is_special
        counts, wanted = (_token_counts(side, len(special)) for side in (data.train, data.eval))
        # Adding one to each count keeps every token possible.
        counts += ~special
        known = wanted > 0
        nats = -np.log(counts[known] / counts.sum())
        return {
            "unigram_perplexity": float(np.exp((wanted[known] * nats).sum() / wanted.sum())),
            "unigram_token_accuracy": float(wanted[counts.argmax()] / wanted.sum()),
        }

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Fill masks with the likeliest tokens and return `filled`, `tokens`, and `score` (N,).

        `filled` holds the text's ids, and `tokens` the ids at the masks: both (N, `data.sequence_length`), -1
        elsewhere. The score is the mean probability of the filled tokens.
        """
        ids, logits = batch["input_ids"], logits_of(model, batch).float()
        masking = self.masking
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        allowed[: len(masking.is_special)] = torch.from_numpy(~masking.is_special).to(logits.device)
        score, likeliest = logits.softmax(-1).masked_fill(~allowed, -1.0).max(-1)
        is_mask, is_text = ids == masking.mask_id, batch.get("attention_mask", torch.ones_like(ids)) > 0
        rows = {
            "filled": torch.where(is_mask, likeliest, ids).masked_fill(~is_text, NO_TOKEN),
            "tokens": likeliest.masked_fill(~is_mask, NO_TOKEN),
        }
        width = self.length - ids.shape[1]
        padded = {name: nn.functional.pad(each, (0, width), value=NO_TOKEN) for name, each in rows.items()}
        return {**padded, "score": (score * is_mask).sum(1) / is_mask.sum(1).clamp(min=1)}

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return the texts with filled masks, the tokens at the masks, and their score."""
        tokenizer = data.source.tokenizer
        return {
            "filled": decoded(rows["filled"], tokenizer),
            "tokens": ["|".join(tokenizer.decode([token]) for token in row[row >= 0]) for row in rows["tokens"]],
            "score": decimals(rows["score"]),
        }

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration and tokenizer in the layout of transformers, and a model card."""
        super().save_description(model, data, folder)
        models.save_tokenizer(data.source.tokenizer, self.length, folder)

    def use(self, model: nn.Module, data: TaskData) -> Use:
        mask = data.source.tokenizer.mask_token
        return Use(
            f"""from transformers import pipeline

fill = pipeline("fill-mask", model="{FOLDER}")
print(fill("a text with a {mask}"))""",
            [
                f"Gives: the tokens that stand at `{mask}`; {self.probability:.0%} of all tokens were predicted in "
                "training",
                f"Reads: up to {self.length} tokens",
            ],
            f"windows of {self.length} tokens",
        )


def _with_mask(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Add mask and padding tokens to `tokenizer` and return it with notes.

    A byte tokenizer or a trained tokenizer also frames each text with [CLS] and [SEP].
    """
    choice, notes = recipe.tokenizer_in_use, []
    if isinstance(choice, TrainedTokenizer) or choice == "bytes":
        tokenizer = with_frame(tokenizer)
    elif recipe.tokenizer == "auto":
        notes.append(f"tokenizer: from {choice}, as in its training")
    missing = {
        role: token
        for role, token in (("mask_token", "[MASK]"), ("pad_token", "[PAD]"))
        if getattr(tokenizer, role) is None
    }
    tokenizer.add_special_tokens(missing)
    if missing and isinstance(choice, str) and choice != "bytes":
        notes.append(f"the tokenizer {choice} got the tokens {', '.join(missing.values())}, because it had none")
    return tokenizer, notes


def _token_counts(windows: Any, size: int) -> NDArray[np.int64]:
    """Return the counts (size,) of masked tokens in up to MOST_COUNTED evenly spaced windows."""
    counts = np.zeros(size, dtype=np.int64)
    for index in spaced(MOST_COUNTED, len(windows)):
        labels = windows[index].labels
        counts += np.bincount(labels[labels != IGNORED_LABEL], minlength=size)
    return counts
