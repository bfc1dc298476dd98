"""Language modelling: predict each next token of text, with any causal LM of transformers."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from accel_train.causal_attention import choose_attention, use_for_generation
from accel_train.data import IGNORED_LABEL, TextCorpus, collate_windows, prepare_text
from accel_train.data.fine_tuning import RowCorpus, prepare_rows
from accel_train.model_check import pretrained_config
from accel_train.observe.throughput import model_flops_per_token
from accel_train.recipe import Model, Recipe
from accel_train.task import Scores, TaskData
from accel_train.tasks.fine_tuning import chat_prompt, rows_as_samples


class CausalLM:
    """GPT-style pretraining, training on from pretrained weights, and fine-tuning on prompts with completions or chats."""

    loss_is_by_position = True
    """The loss is a sum over positions, of each one's logits and label, so that sequences may be split (`parallel.sp_size`)."""
    positions_per_target = 1.0
    """Positions that the model computes for each that has a target."""
    counts_hits = False
    """Fine-tuning reports the accuracy of tokens, which costs a pass over the logits."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Tokenised windows of the recipe's text, tokenised once, then reused; or rows of `data.format`, in memory."""
        tokenizer_notes = []
        if recipe.tokenizer == "auto" and recipe.model.pretrained is not None:
            tokenizer_notes = [f"tokenizer: that of {recipe.model.pretrained}, which the model was trained with"]
        if recipe.data.format == "text":
            data = self._load_text(recipe, progress)
        else:
            corpus = prepare_rows(recipe, progress=progress)
            data = rows_as_samples(recipe, corpus, model_config(recipe, corpus.vocab_size, corpus.separator_id))
            self.positions_per_target, self.counts_hits = data.facts["positions_per_target"], True
        data.facts["notes"] = [*tokenizer_notes, *data.facts["notes"]]
        return data

    def _load_text(self, recipe: Recipe, progress: bool) -> TaskData:
        corpus = prepare_text(recipe, progress=progress)
        collate = partial(collate_windows, separator_id=corpus.separator_id, mask_documents=recipe.data.mask_documents)
        return TaskData(
            train=corpus.train,
            eval=corpus.eval,
            collate=collate,
            fingerprint=corpus.fingerprint,
            facts=corpus.facts.as_dict(),
            reading_is_free=True,
            source=corpus,
            large_files=corpus.large_files,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """The causal LM of the recipe, its vocabulary padded to a multiple that suits the hardware.

        Raises:
            ValueError: the model cannot take the tokenizer's vocabulary or the sequence length, or cannot be loaded.
        """
        corpus: TextCorpus | RowCorpus = data.source
        config = model_config(recipe, corpus.vocab_size, corpus.separator_id)
        kwargs = attention_arguments(recipe, config)
        if recipe.model.pretrained is None:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kwargs)
        else:
            with quiet_bars():
                model = AutoModelForCausalLM.from_pretrained(
                    recipe.model.pretrained,
                    config=config,
                    dtype=torch.float32,
                    trust_remote_code=recipe.model.trust_remote_code,
                    use_safetensors=True,  # a pickled weight file could run code
                    **kwargs,
                )
            rows = padded_vocab_size(corpus.vocab_size, recipe.model.pad_vocab_to_multiple_of)
            if model.get_input_embeddings().num_embeddings < rows:
                model.resize_token_embeddings(rows, mean_resizing=False)
        if recipe.precision.gradient_checkpointing:
            # transformers renamed it in 5.23
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the labels that are not -100, in fp32.

        The loss is ours and not the model's: transformers divides by the tokens of the micro-batch, and for GPT-2 warns in
        the middle of the graph.
        """
        return summed_loss(next_token_logits(model, batch), batch["labels"])

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """6 N - 2 F + 12 L D T (PaLM, appendix B), N without embeddings that are only looked up, F of them frozen (LoRA); prompts
        and padding count too."""
        assert isinstance(model, PreTrainedModel)
        text, used = model.config.get_text_config(), matmul_parameters(model)
        return self.positions_per_target * model_flops_per_token(
            sum(each.numel() for each in used),
            text.num_hidden_layers,
            text.hidden_size,
            recipe.data.sequence_length,
            num_frozen=sum(each.numel() for each in used if not each.requires_grad),
        )

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loss; when fine-tuning also how many targets there are, and for how many the likeliest token is the right one."""
        if not self.counts_hits:
            return {"loss_sum": self.loss_sum(model, batch)}
        logits, labels = next_token_logits(model, batch), batch["labels"]
        return {
            "loss_sum": summed_loss(logits, labels),
            "num_hits": (logits.argmax(-1) == labels).sum(),
            "num_labels": (labels != IGNORED_LABEL).sum(),
        }

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Perplexity; for text also bits per byte, which does not depend on the tokenizer; for rows the accuracy of tokens."""
        scores = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
        facts = data.facts
        if facts.get("eval_bytes"):
            scores["bits_per_byte"] = loss / math.log(2) * (facts["eval_tokens"] - 1) / facts["eval_bytes"]
        if "num_hits" in totals:
            scores["token_accuracy"] = float(totals["num_hits"] / max(1, totals["num_labels"]))
        return Scores(scores)

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing: a window of text has no label; `accel-train generate` writes text."""
        return {}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """What knows no language reaches on the same evaluation data."""
        names = ("unigram_bits_per_byte", "xz_bits_per_byte", "unigram_perplexity")
        return {name: data.facts[name] for name in names if data.facts.get(name) is not None}

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Configuration and tokenizer in transformers' own layout."""
        assert isinstance(model, PreTrainedModel)
        model.config.save_pretrained(folder)
        data.source.tokenizer.save_pretrained(folder)

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Weights, configuration and tokenizer in transformers' own layout."""
        assert isinstance(model, PreTrainedModel)
        with quiet_bars():
            model.save_pretrained(folder)
        data.source.tokenizer.save_pretrained(folder)

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        """A text that the model writes on from `evaluate.sample_prompt`."""
        if recipe.evaluate.sample_prompt is None:
            return None
        from accel_train.generate import generate_text

        assert isinstance(model, PreTrainedModel)
        prompt = recipe.evaluate.sample_prompt
        text = generate_text(
            use_for_generation(model),
            data.source.tokenizer,
            chat_prompt(data.source.tokenizer, prompt) if recipe.data.format == "chat" else prompt,
            max_new_tokens=recipe.evaluate.sample_tokens,
            temperature=0.8,
            seed=recipe.seed,
        )
        return {"prompt": prompt, "text": text}


def next_token_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, T, vocabulary), in the precision of the model; attention and positions stay within a document, if there are ids."""
    inputs = {"input_ids": batch["input_ids"]}
    if "position_ids" in batch:
        inputs["position_ids"] = batch["position_ids"]
    if "document_ids" in batch:
        inputs["attention_mask"] = same_document_mask(batch["document_ids"])
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32, summed over the labels that are not -100."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


@contextmanager
def quiet_bars() -> Iterator[None]:
    """No progress bar of transformers inside: it would be drawn into ours."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The next multiple; 0 leaves the size alone."""
    return vocab_size if multiple == 0 else -(-vocab_size // multiple) * multiple


def fields_with_vocabulary(section: Model, vocab_size: int) -> dict[str, Any]:
    """`model.config` with a vocabulary of so many tokens, padded to the recipe's multiple where it names no size itself.

    Raises:
        ValueError: it names one that is too small.
    """
    assert section.config is not None
    fields = dict(section.config)
    rows = padded_vocab_size(vocab_size, section.pad_vocab_to_multiple_of)
    if fields.setdefault("vocab_size", rows) < vocab_size:
        raise ValueError(
            f"model.config.vocab_size={fields['vocab_size']} is smaller than the tokenizer's {vocab_size} tokens; "
            f"leave it out, or give at least {vocab_size}"
        )
    return fields


def model_config(recipe: Recipe, vocab_size: int, separator_id: int) -> PreTrainedConfig:
    """The transformers configuration of the recipe's model, checked against tokenizer and sequence length.

    Raises:
        ValueError: it cannot be loaded, is no causal LM, or is too small for the vocabulary or the sequence length.
    """
    section = recipe.model
    if section.pretrained is not None:
        config = pretrained_config(recipe)
    else:
        fields = fields_with_vocabulary(section, vocab_size)
        for name in ("bos_token_id", "eos_token_id"):
            fields.setdefault(name, separator_id)
        config = AutoConfig.for_model(**fields)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not section.trust_remote_code:
        raise ValueError(
            f"model type {config.model_type!r} is no causal language model of transformers; gpt2 and llama are"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < recipe.data.sequence_length:
        raise ValueError(
            f"data.sequence_length={recipe.data.sequence_length} is longer than the {positions} positions of the model; "
            f"lower it to {positions}, or raise n_positions or max_position_embeddings in model.config"
        )
    return config


def attention_arguments(recipe: Recipe, config: PreTrainedConfig) -> dict[str, str]:
    """`attn_implementation` for transformers' model factories, or nothing where the library chooses."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    choice = choose_attention(recipe.model.attn_implementation, model_class, config, recipe.data.sequence_length)
    if recipe.data.mask_documents and choice.value == "eager":
        raise ValueError(
            "data.mask_documents needs an attention that takes a mask of true and false, and model.attn_implementation=eager adds "
            "it up as numbers; use sdpa or auto"
        )
    return {} if choice.value == "library default" else {"attn_implementation": choice.value}


def same_document_mask(document_ids: Tensor) -> Tensor:
    """Who may look at whom: (B, 1, T, T), true where the key is in the query's document and not after it."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    length = document_ids.shape[1]
    return same & torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()


def matmul_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters that take part in a matrix product: all but position embeddings and an untied input embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    tied = {id(head.weight)} if head is not None else set()
    return [each for each in model.parameters() if id(each) not in embeddings - tied]
