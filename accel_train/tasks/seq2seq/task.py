"""Sequence to sequence: translate, summarize, or rewrite texts with any encoder-decoder (T5, BART, Marian, ...)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from accel_train.core.model_card import FOLDER, Use
from accel_train.core.state import JsonRecord
from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.metrics.scores import perplexity
from accel_train.metrics.texts import TEXT_SCORES, text_scores
from accel_train.model.kernels.chunked_loss import summed_loss
from accel_train.model.kernels.loss_by_source import loss_by_source
from accel_train.model.pretrained import pretrained_config, value_of
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Facts, Scores, Task, TaskData, Tensors, Totals
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.generation import TextGenerator, decoded, spaced
from accel_train.tasks.common.texts import Divided, TextRow
from accel_train.tasks.common.vocabulary import fields_with_vocabulary
from accel_train.tasks.rows import (
    Kept,
    TextSource,
    token_accuracy,
    token_counts,
)
from accel_train.tasks.seq2seq.config import SPEC, Seq2SeqData
from accel_train.tasks.seq2seq.data import (
    Pair,
    arrays_of,
    collate_pairs,
    load_pairs,
    pair_tokenizer,
    read_pairs,
    tokenize_pairs,
)

NUM_SHOWN = 10
"""Number of generated texts in the report."""


@dataclass(frozen=True)
class Source(TextSource[Divided[TextRow]]):
    """The pairs of texts, and the rows to generate texts for."""

    generated: Sequence[int]
    """Indices of the evaluation rows for which texts are generated."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer's vocabulary."""
        return vocab_size_of(self.tokenizer)


class Seq2Seq(Task):
    """Fine-tune any encoder-decoder of transformers on pairs of texts, or train one from a configuration."""

    spec = SPEC
    counts_sources = True

    metric_names: tuple[str, ...]
    """Metrics that evaluations report. Includes metrics of generated texts if `evaluate.generation` asks for texts."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all pairs of texts into memory.

        Raises:
            ValueError: the model, tokenizer, or rows do not match the recipe, or a package that scores texts is
                missing.
        """
        data, section = Seq2SeqData.of(recipe.data), recipe.evaluate.generation
        models.check_model(recipe, SEQ2SEQ)
        reasons = {
            f"data.{name} is not read in blocks": getattr(data, name) is not None
            for name in ("target_suffix", "translation_column")
        }
        read = partial(read_pairs, data=data, key=data.train_key, notes=[])
        keep = Kept(recipe, progress, read=read, not_in_blocks=reasons)
        texts = keep.rows(partial(load_pairs, recipe, keep.whole), TextRow)
        words = (text for row in texts.train for text in (*row.texts, row.label) if text is not None)
        tokenizer, tokenizer_notes = pair_tokenizer(recipe, keep.words(words))
        config = encoder_decoder_config(recipe, tokenizer)
        lengths = resolve_lengths(recipe, config, tokenizer)
        rows = texts.eval or []
        is_scored = data.is_labelled and section.max_samples != 0
        generated = _generated_rows(recipe, len(rows)) if is_scored else []
        encode = partial(
            tokenize_pairs,
            tokenizer=tokenizer,
            max_lengths=lengths,
            prefix=data.source_prefix,
            progress=progress,
        )
        self.max_lengths = lengths
        kept = keep.samples(
            tokenizer,
            [lengths, generated],
            replace(texts, eval=rows),
            lambda side: encode(side, generated=generated if side is rows else ()),
            Pair,
            (),
            arrays_of,
            lambda pairs, _: {"sizes": np.array([(len(pair.source), len(pair.target)) for pair in pairs])},
        )
        train, sizes = kept["train"], kept["sizes"]
        self.generator = TextGenerator(section, lengths[1], vocab_size_of(tokenizer))
        self.source_prefix = data.source_prefix
        self.bleu_tokenizer, self.label_smoothing = section.bleu_tokenizer, recipe.loss.label_smoothing
        self.metric_names = ("perplexity", "token_accuracy", *(TEXT_SCORES if generated else ()))
        self.mean_lengths = sizes.mean(axis=0).tolist()
        found = TaskData(
            # The DataLoader reads a list as a map-style dataset.
            train=cast("Dataset[Any]", train),
            eval=cast("Dataset[Any] | None", kept["eval"] or None),
            collate=partial(
                collate_pairs, pad_id=int(tokenizer.pad_token_id), multiple=data.pad_to_multiple_of, max_lengths=lengths
            ),
            fingerprint=kept["fingerprint"],
            facts=Facts(
                sources=texts.description,
                num_train=len(train),
                num_eval=len(rows),
                others={
                    "max_source_length": lengths[0],
                    "max_target_length": lengths[1],
                    "mean_source_length": round(self.mean_lengths[0], 1),
                    "mean_target_length": round(self.mean_lengths[1], 1),
                    "num_generated": len(generated),
                },
                notes=[*texts.notes, *tokenizer_notes, *_cut(sizes, lengths, data)],
            ),
            reading_is_free=True,
            source=Source(texts, tokenizer, config, generated),
            lengths=sizes.sum(axis=1),
            lengths_vary=True,
        )
        found = keep.in_blocks(found, texts, partial(encode, generated=(), progress=False), Pair)
        found.facts.train_targets = round(self.mean_lengths[1] * found.facts.num_train)
        return found

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's encoder-decoder and add notes about its new weights to the facts of `data`.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        source: Source = data.source
        model, notes = models.build_model(recipe, source.config, source.tokenizer, SEQ2SEQ)
        data.add_notes(notes)
        return model

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy summed over target tokens, with `loss.label_smoothing` in training."""
        smoothing = self.label_smoothing if model.training else 0.0
        by_source = loss_by_source(model, batch["labels"], self.counted)
        return summed_loss(decoder_logits(model, batch), batch["labels"], smoothing, by_source=by_source)

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs per target token of the forward pass of a mean-length pair, without padding."""
        assert isinstance(model, PreTrainedModel)
        source, target = (max(1, round(length)) for length in self.mean_lengths)
        shapes = {"input_ids": (1, source), "decoder_input_ids": (1, target)}
        flops = classification.training_flops(AutoModelForSeq2SeqLM, model.config, **shapes)
        return None if flops is None else flops / target

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss, the counts of target tokens and correct predictions, and generated texts.

        Predictions are teacher-forced. Texts are generated only for the chosen rows.
        """
        counted = token_counts(decoder_logits(model, batch), batch["labels"])
        if len(self.metric_names) > 2:
            rows = batch["rows"]
            counted["rows_number"] = rows
            counted["rows_generated"] = self.generator.generate(model, model_inputs(batch), rows >= 0)
        return counted

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return perplexity and token accuracy, with BLEU, chrF, ROUGE, and exact match of generated texts."""
        source: Source = data.source
        metrics = {"perplexity": perplexity(loss), "token_accuracy": token_accuracy(totals)}
        chosen = totals.get("rows_number", np.array(())) >= 0
        if not chosen.any():
            return Scores(metrics)
        rows = [source.evaluated[number] for number in totals["rows_number"][chosen]]
        texts = decoded(totals["rows_generated"][chosen], source.tokenizer)
        shown = [
            {"id": row.id, "source": row.texts[0], "target": row.label, "generated": text}
            for row, text in zip(rows, texts, strict=True)
        ]
        details = {"generation": {"num_texts": len(texts), "samples": shown[:NUM_SHOWN]}}
        return Scores(metrics | self._text_scores(texts, rows), details)

    def _text_scores(self, texts: Sequence[str], rows: Sequence[TextRow]) -> dict[str, float]:
        return text_scores(texts, [row.label.strip() for row in rows], bleu_tokenizer=self.bleu_tokenizer)

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of two answers without a model: the source, and the most frequent training target."""
        source: Source = data.source
        rows = [source.evaluated[number] for number in source.generated]
        if not rows:
            return {}
        most_frequent = mode(row.label for row in source.rows.train)
        answers = {"copied_source": [row.texts[0] for row in rows], "most_frequent_target": [most_frequent] * len(rows)}
        return {
            f"{name}_{score}": value
            for name, texts in answers.items()
            for score, value in self._text_scores(texts, rows).items()
        }

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Generate a text per source. Return token ids `generated` (N, `data.max_target_length`), -1 after the end."""
        return {"generated": self.generator.generate(model, model_inputs(batch))}

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return the generated texts, and the targets if known."""
        source: Source = data.source
        targets = [source.evaluated[number].label for number in rows["index"]]
        columns: Columns = {"generated": decoded(rows["generated"], source.tokenizer)}
        return columns | ({"target": targets} if targets[0] is not None else {})

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration, tokenizer, model card, and generation config to `folder`.

        With this generation config, `model.generate` decodes as the evaluations did.
        """
        assert isinstance(model, PreTrainedModel)
        super().save_description(model, data, folder)
        self.generator.config(model).save_pretrained(folder)
        models.save_tokenizer(data.source.tokenizer, self.max_lengths[0], folder)

    def use(self, model: nn.Module, data: TaskData) -> Use:
        return Use(
            f"""from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")
model = AutoModelForSeq2SeqLM.from_pretrained("{FOLDER}")
tokens = tokenizer({self.source_prefix + "a text"!r}, truncation=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens)[0], skip_special_tokens=True))""",
            [
                f"Gives: up to {self.max_lengths[1]} tokens",
                models.reads(self.max_lengths[0]),
                *([f"Before each text stands: `{self.source_prefix}`"] if self.source_prefix else []),
            ],
            "pairs of texts",
        )

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> JsonRecord | None:
        """Generate a text for the source `evaluate.sample_prompt`. Return None without a prompt."""
        prompt, tokenizer = recipe.evaluate.sample_prompt, data.source.tokenizer
        if prompt is None:
            return None
        assert isinstance(model, PreTrainedModel)
        settings = {"truncation": True, "max_length": self.max_lengths[0], "return_attention_mask": True}
        given = tokenizer(self.source_prefix + prompt, return_tensors="pt", **settings).to(model.device)
        was_training = model.training
        with torch.no_grad():
            rows = self.generator.generate(model.eval(), model_inputs(given))
        model.train(was_training)
        return {"prompt": prompt, "text": decoded(rows.cpu().numpy(), tokenizer)[0]}


def _generated_rows(recipe: Recipe, num_rows: int) -> Sequence[int]:
    """Return the indices of rows to generate texts for, evenly spaced among the rows that evaluations read."""
    section = recipe.evaluate
    read = spaced(num_rows if section.max_samples is None else section.max_samples, num_rows)
    wanted = section.generation.max_samples
    return read if wanted is None else [read[index] for index in spaced(wanted, len(read))]


def _cut(sizes: NDArray[np.int64], lengths: tuple[int, int], data: Seq2SeqData) -> list[str]:
    """Return notes about training texts that reach a length limit. The count includes a few that fit exactly."""
    sides = zip(("sources", "targets"), ("max_length", "max_target_length"), lengths, sizes.T, strict=True)
    return [
        f"{count:,} of {len(sizes):,} {data.of_training(side)} reach data.{name}={most} tokens, and are cut there"
        for side, name, most, own in sides
        if (count := int((own >= most).sum()))
    ]


SEQ2SEQ = models.Head("sequence-to-sequence", AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
_BEGIN_WITH_LAST_LABEL = ("mbart", "plbart")
"""Model types whose decoder begins with the last label, the token that ends a text."""


def encoder_decoder_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration of the recipe's model. A new model gets the tokenizer's special tokens.

    A new model's decoder begins with the token that its family uses: padding (T5, Marian) or end of text (BART).

    Raises:
        ValueError: the configuration cannot be loaded, is not an encoder-decoder for text, or has too few rows for the
            tokenizer.
    """
    section = recipe.model
    if section.pretrained is not None:
        config = pretrained_config(recipe)
    else:
        fields = fields_with_vocabulary(section, vocab_size_of(tokenizer))
        default = CONFIG_MAPPING[fields["model_type"]]()
        known, start = default.to_dict(), getattr(default, "decoder_start_token_id", None)
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        begins_with_end = fields["model_type"] in _BEGIN_WITH_LAST_LABEL or start == value_of(default, "eos_token_id")
        special = {"pad_token_id": pad, "eos_token_id": end, "bos_token_id": end, "forced_eos_token_id": end}
        fields = {name: value for name, value in special.items() if name in known} | fields
        config = AutoConfig.for_model(**{"decoder_start_token_id": end if begins_with_end else pad} | fields)
    if type(config) not in SEQ2SEQ.mapping and not section.trust_remote_code:
        raise ValueError(
            f"{section.pretrained_at} is of type {config.model_type!r}, not an encoder-decoder of "
            f"transformers; t5, bart and marian are"
        )
    return config


def resolve_lengths(recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the maximum lengths of a source (`data.max_length`) and of a target (`data.max_target_length`) in tokens.

    The default is the limit of model and tokenizer, at most 512.

    Raises:
        ValueError: the model has fewer positions, or the length leaves no room for text.
    """
    section = Seq2SeqData.of(recipe.data)
    found = []
    for side, name, asked in (
        ("encoder", "max_length", section.max_length),
        ("decoder", "max_target_length", section.max_target_length),
    ):
        positions = getattr(config, f"max_{side}_position_embeddings", getattr(config, "max_position_embeddings", None))
        if asked is None:
            asked = min(models.DEFAULT_MAX_LENGTH, tokenizer.model_max_length, positions or models.DEFAULT_MAX_LENGTH)
        if positions is not None and asked > positions:
            raise ValueError(
                f"data.{name}={asked} is longer than the {positions} positions of the model's {side}; "
                f"lower it to {positions}, or raise max_position_embeddings in model.config"
            )
        least = tokenizer.num_special_tokens_to_add() + 1
        if asked < least:
            raise ValueError(f"data.{name}={asked} leaves no token for the text; give at least {least}")
        found.append(asked)
    return found[0], found[1]


def decoder_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return logits (N, T, vocabulary) for `labels` (N, T). The model shifts the labels for its decoder."""
    labels = batch["labels"]
    # M2M-100 and a few other models do not have this method.
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    decoder: dict[str, Any] = {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels)}
    return model(**model_inputs(batch), **decoder, use_cache=False).logits


def model_inputs(batch: Batch) -> Tensors:
    """Return the encoder inputs of a batch."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}
