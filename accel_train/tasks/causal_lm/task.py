"""Causal language modeling: predict each next token of a text with any causal LM of transformers."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from accel_train.core.errors import SettingError
from accel_train.core.model_card import FOLDER, Use
from accel_train.core.state import Choice, Choices, JsonRecord
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.corpus import Corpus, prepare_text
from accel_train.data.text.shards import sharded
from accel_train.data.text.tokenizers import named_tokenizer
from accel_train.data.text.tokens import collate_windows, marks_documents
from accel_train.metrics.scores import perplexity
from accel_train.model.kernels.attention import (
    attention_window,
    choose_attention,
    describe_document_attention,
    document_mask,
    use_for_generation,
)
from accel_train.model.kernels.chunked_loss import (
    choose_chunking,
    chunked_counts,
    chunked_loss,
    has_plain_head,
    head_for_chunks,
    rows_at_once,
    summed_loss,
)
from accel_train.model.kernels.experts import RouterLoss, choose_router_loss
from accel_train.model.kernels.loss_by_source import loss_by_source
from accel_train.model.pretrained import config_of, pretrained_config, transformers_model
from accel_train.model.tensors import unpacked_numel
from accel_train.observe.throughput import model_flops_per_token
from accel_train.recipe.data import TrainedTokenizer
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Facts, Scores, Task, TaskData, Tensors, Totals
from accel_train.tasks.causal_lm.config import SPEC, CausalLMData
from accel_train.tasks.causal_lm.data import prepare_rows
from accel_train.tasks.causal_lm.packing import rows_as_samples, shares_windows
from accel_train.tasks.causal_lm.probe import SOFTCAP, Forward, prove
from accel_train.tasks.common.vocabulary import fields_with_vocabulary, grow_vocabulary
from accel_train.tasks.rows import token_accuracy, token_counts


class CausalLM(Task):
    """Pretrain a GPT-style model, continue training pretrained weights, or fine-tune on completions or chats."""

    spec = SPEC

    positions_per_target = 1.0
    """Positions that the model computes per position with a label."""
    counts_sources = True
    counts_hits = False
    """Whether evaluations report the token accuracy. True when fine-tuning. It costs a pass over the logits."""
    chunked: bool | str = "auto"
    """Setting `loss.chunked`."""
    label_smoothing = 0.0
    z_loss = 0.0
    compiled = False
    """Whether `precision.compile` is on."""
    fuses_loss = False
    """Whether it is on with torch's default backend, which then compiles a loss in chunks too."""
    global_loss: RouterLoss | None = None
    """Router loss of a mixture of experts (`loss.router_aux`). None for other models."""
    whole_up_to = 0
    """Positions of the largest micro-batch so far whose loss used whole logits. Smaller micro-batches use them too."""

    def prove(self, recipe: Recipe) -> Choices:
        """Probe the recipe's forward pass on a toy-size copy of its model (see `tasks/causal_lm/probe.py`).

        Raises:
            ValueError: a setting changes the model's result.
        """
        softcap = recipe.loss.logit_softcap
        # The program has its own forward, or builds its own model.
        if (recipe.task != "causal-lm" and softcap is None) or type(self).build_model is not CausalLM.build_model:
            return {}
        config = config_of(recipe)
        cap_logits(config, softcap)
        return prove(recipe, config, FORWARD)

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read windows of the recipe's text, tokenized once and reused, or load rows of `data.format`."""
        tokenizer_notes = []
        if recipe.tokenizer == "auto" and recipe.model.pretrained is not None:
            tokenizer_notes = [f"tokenizer: from {recipe.model.pretrained}, as in its training"]
        section = CausalLMData.of(recipe.data)
        if section.format == "text":
            text, masked = prepare_text(recipe, progress=progress), section.mask_documents
            # With `auto`, the model may be compiled later.
            compiled = recipe.precision.compile is not False
            data = TaskData(
                train=text.train,
                eval=text.eval,
                collate=partial(
                    collate_windows,
                    separator_id=text.separator_id,
                    mask_documents=masked,
                    compiled=compiled,
                    marked=marks_documents(text.train),
                ),
                fingerprint=text.fingerprint,
                first_fingerprint=text.first_fingerprint,
                facts=text.facts,
                reading_is_free=True,
                source=text,
                large_files=text.large_files,
                **sharded(text.train),
            )
        else:
            rows = prepare_rows(recipe, progress=progress)
            data = rows_as_samples(recipe, rows, model_config(recipe, rows.vocab_size, rows.separator_id), progress)
            self.positions_per_target, self.counts_hits = data.facts.positions_per_target or 1.0, True
        data.facts.notes = [*tokenizer_notes, *data.facts.notes]
        return data

    def stand_in_data(self, recipe: Recipe, num_samples: int) -> TaskData:
        section, choice = CausalLMData.of(recipe.data), recipe.tokenizer_in_use
        if isinstance(choice, TrainedTokenizer):
            tokenizer: Any = SimpleNamespace(vocab_size=choice.train_bpe.vocab_size, separator_id=0)
        else:
            tokenizer = named_tokenizer(recipe, choice)
        length = section.sequence_length
        # Takes no memory.
        windows: Any = np.broadcast_to(np.int64(0), (num_samples, length + 1))
        collate = partial(collate_windows, separator_id=tokenizer.separator_id, mask_documents=section.mask_documents)
        sources = f"not read (--no-data): each sample counts as data.sequence_length={length} tokens with a label"
        has_eval = section.eval is not None or section.eval_fraction > 0
        return TaskData(windows, windows if has_eval else None, collate, "", Facts(sources=sources), source=tokenizer)

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's causal LM, with a vocabulary padded to a multiple that suits the hardware.

        Raises:
            ValueError: the model cannot be loaded, or is too small for the vocabulary or the sequence length.
        """
        corpus: Corpus[Any] = data.source
        self.chunked, self.label_smoothing = recipe.loss.chunked, recipe.loss.label_smoothing
        self.z_loss = recipe.loss.z_loss
        self.compiled = recipe.precision.compiles
        self.fuses_loss = self.compiled and recipe.precision.compile_backend == "inductor"
        config = model_config(recipe, corpus.vocab_size, corpus.separator_id)
        attention = attention_arguments(recipe, config)
        model, _ = transformers_model(AutoModelForCausalLM, recipe, config, attention, takes_new_head=False)
        if recipe.model.pretrained is not None and corpus.tokenizer is not None:
            data.add_notes(grow_vocabulary(recipe, model, corpus.tokenizer, pads=True))
        router = router_choice(recipe, model)
        if router is None or not router.value:
            self.global_loss = None
        else:
            self.global_loss = self.global_loss or RouterLoss()
            self.global_loss.watch(model, router.value)
        return model

    def choices(self, recipe: Recipe, model: nn.Module) -> Choices:
        """Return whether the loss is computed in chunks, how documents are masked, and the router coefficient.

        Raises:
            ValueError: `loss.chunked` is true, but the model does not allow it, or the model does not have
                `loss.logit_softcap`.
        """
        softcap = recipe.loss.logit_softcap
        config_of_text = getattr(getattr(model, "config", None), "get_text_config", dict)
        if softcap is not None and getattr(config_of_text(), SOFTCAP, None) != softcap:
            raise SettingError(
                f"the model that {type(self).__name__}.build_model returns has another {SOFTCAP}",
                "Leave the cap out, or write it into the configuration of the model",
                f"loss.logit_softcap={softcap:g}",
                ("loss.logit_softcap",),
            )
        chunking = choose_chunking(recipe.loss.chunked, model, recipe.parallel.tp_size, self.spare_bytes)
        choices: Choices = {"loss.chunked": chunking}
        if isinstance(model, PreTrainedModel) and shares_windows(recipe, model.config):
            choices["document mask"] = describe_document_attention(recipe, model.config)
        router = router_choice(recipe, model)
        if router is not None:
            value = f"coefficient {router.value:g}" if router.value else "off"
            choices["loss.router_aux"] = Choice(value, router.reason)
        return choices

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy summed over the labels that are not -100.

        In training, add label smoothing (`loss.label_smoothing`), the z-loss (`loss.z_loss`), and the router loss
        (`loss.router_aux`).
        """
        # The model's own loss is not used: transformers divides it by the tokens of the micro-batch, and its code for
        # GPT-2 warns in the middle of the graph.
        if self.global_loss is not None and model.training:
            with self.global_loss.recording():
                loss_sum = self.cross_entropy_sum(model, batch)
            return loss_sum + self.global_loss.loss_sum(batch["labels"])
        return self.cross_entropy_sum(model, batch)

    def global_part(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the routers' distribution over experts, for `GlobalLoss.over`, without computing logits or loss."""
        assert self.global_loss is not None
        with self.global_loss.recording():
            hidden_states(model, batch, self.compiled)
        return self.global_loss.routing(batch["labels"])

    def cross_entropy_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over the labels, without the router loss."""
        labels = batch["labels"]
        smoothing, z_loss = (self.label_smoothing, self.z_loss) if model.training else (0.0, 0.0)
        head = self.head_for_chunks(model, labels.numel())
        by_source = loss_by_source(model, labels, self.counted)
        if head is None:
            return summed_loss(next_token_logits(model, batch, self.compiled), labels, smoothing, z_loss, by_source)
        hidden = hidden_states(model, batch, self.compiled)
        rows = rows_at_once(head, spare_bytes=self.spare_bytes)
        return chunked_loss(
            head, hidden, labels, smoothing, rows, z_loss=z_loss, compiled=self.fuses_loss, by_source=by_source
        )

    def head_for_chunks(self, model: nn.Module, num_positions: int) -> nn.Linear | None:
        """Return the output layer if the loss of `num_positions` is computed in chunks, or None to use whole logits."""
        # The check below costs 24 us, so its answer is remembered.
        if num_positions <= self.whole_up_to:
            return None
        head = head_for_chunks(self.chunked, model, num_positions)
        if head is None and not torch.compiler.is_compiling():
            self.whole_up_to = num_positions
        return head

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return the FLOPs per target: 6 N - 2 F + 12 L D T (PaLM, appendix B).

        N counts the parameters that take part in matrix products, and F counts the frozen ones (LoRA). L is the number
        of layers, D the hidden size, and T the sequence length. Prompts and padding count too.
        """
        assert isinstance(model, PreTrainedModel)
        text, used = model.config.get_text_config(), matmul_parameters(model)
        return self.positions_per_target * model_flops_per_token(
            sum(map(unpacked_numel, used)),
            text.num_hidden_layers,
            text.hidden_size,
            CausalLMData.of(recipe.data).sequence_length,
            num_frozen=sum(unpacked_numel(each) for each in used if not each.requires_grad),
        )

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss and, when fine-tuning, the counts of labels and of correct predictions."""
        if not self.counts_hits:
            return {"loss_sum": self.loss_sum(model, batch)}
        labels = batch["labels"]
        head = self.head_for_chunks(model, labels.numel())
        if head is None:
            return token_counts(next_token_logits(model, batch, self.compiled), labels)
        loss_sum, num_hits = chunked_counts(head, hidden_states(model, batch, self.compiled), labels)
        return {"loss_sum": loss_sum, "num_hits": num_hits, "num_labels": (labels != IGNORED_LABEL).sum()}

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return the perplexity, with bits per byte for text or token accuracy for rows.

        Bits per byte do not depend on the tokenizer.
        """
        scores = {"perplexity": perplexity(loss)}
        facts = data.facts
        if facts.eval_bytes and facts.eval_tokens:
            num_targets = facts.eval_tokens - max(1, len(facts.eval_sets))
            scores["bits_per_byte"] = loss / math.log(2) * num_targets / facts.eval_bytes
        if "num_hits" in totals:
            scores["token_accuracy"] = token_accuracy(totals)
        return Scores(scores)

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of unigram frequencies and xz on the same evaluation data."""
        names = {"unigram_bits_per_byte", "xz_bits_per_byte", "unigram_perplexity"}
        return data.facts.model_dump(include=names, exclude_none=True)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration and the tokenizer to `folder` in the layout of transformers, and a model card."""
        super().save_description(model, data, folder)
        if data.source.tokenizer is not None:
            data.source.tokenizer.save_pretrained(folder)

    def use(self, model: nn.Module, data: TaskData) -> Use:
        if data.source.tokenizer is None:
            return Use(
                f"""import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{FOLDER}")
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=40)[0])""",
                samples="windows",
            )
        start, read = '"a text"', ""
        if getattr(data.source.tokenizer, "chat_template", None):
            start, read = '[{"role": "user", "content": "a message"}]', '[-1]["content"]'
        # A model with code of its own is saved with it.
        consent = "" if type(model).__module__.startswith("transformers.") else ", trust_remote_code=True"
        return Use(
            f"""from transformers import pipeline

write = pipeline("text-generation", model="{FOLDER}"{consent})
print(write({start}, max_new_tokens=40)[0]["generated_text"]{read})""",
            samples="windows",
        )

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> JsonRecord | None:
        """Generate a text that begins with `evaluate.sample_prompt`. Return None without a prompt."""
        if recipe.evaluate.sample_prompt is None:
            return None
        from accel_train.model.generation import chat_prompt, generate_text

        assert isinstance(model, PreTrainedModel)
        prompt = recipe.evaluate.sample_prompt
        text = generate_text(
            use_for_generation(model),
            data.source.tokenizer,
            chat_prompt(data.source.tokenizer, prompt) if CausalLMData.of(recipe.data).format == "chat" else prompt,
            max_new_tokens=recipe.evaluate.sample_tokens,
            temperature=0.8,
            seed=recipe.seed,
        )
        return {"prompt": prompt, "text": text}


def next_token_logits(model: nn.Module, batch: Batch, compiled: bool = False) -> Tensor:
    """Return logits (B, T, vocabulary) in the model's precision.

    Document ids in the batch restrict attention and positions to each document.
    """
    # A plain head is called directly. This skips the output records of transformers and saves 50 us.
    if not compiled and has_plain_head(model):
        return model.get_output_embeddings()(hidden_states(model, batch))  # type: ignore[operator]
    return model(**model_inputs(model, batch, compiled)).logits


def hidden_states(model: nn.Module, batch: Batch, compiled: bool = False) -> Tensor:
    """Return the hidden states (B, T, hidden size) that the output layer reads."""
    assert isinstance(model, PreTrainedModel)
    return model.base_model(**model_inputs(model, batch, compiled)).last_hidden_state


def model_inputs(model: nn.Module, batch: Batch, compiled: bool) -> dict[str, Any]:
    """Return the keyword arguments of a forward pass over whole sequences."""
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    if "document_ids" in batch or "document_lengths" in batch:
        inputs["attention_mask"] = document_mask(model, batch, compiled=compiled)
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        # RouterLoss computes its own loss from the router logits; the model's router loss does not mask documents.
        inputs["output_router_logits"] = False
    return {**inputs, "use_cache": False}


def router_choice(recipe: Recipe, model: nn.Module) -> Choice[float] | None:
    """Return the coefficient of the router loss (see `choose_router_loss`)."""
    place = "parallel.strategy deepspeed" if recipe.parallel.strategy == "deepspeed" else ""
    if recipe.parallel.sp_size > 1:
        place = "parallel.sp_size above 1"
    return choose_router_loss(recipe.loss.router_aux, model, place)


def model_config(recipe: Recipe, vocab_size: int, separator_id: int) -> PreTrainedConfig:
    """Return the transformers configuration of the recipe's model, checked against the tokenizer and sequence length.

    Raises:
        ValueError: the configuration cannot be loaded, is not a causal LM, or is too small for the vocabulary or the
            sequence length.
    """
    section = recipe.model
    if section.pretrained is not None:
        config = pretrained_config(recipe)
    else:
        fields = fields_with_vocabulary(section, vocab_size)
        for name in ("bos_token_id", "eos_token_id"):
            fields.setdefault(name, separator_id if separator_id >= 0 else None)
        config = AutoConfig.for_model(**fields)
    cap_logits(config, recipe.loss.logit_softcap)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not section.trust_remote_code:
        raise ValueError(
            f"model type {config.model_type!r} is not a causal language model of transformers; gpt2 and llama are"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = recipe.data.window
    if length is not None and positions is not None and positions < length:
        raise ValueError(
            f"data.sequence_length={length} is longer than the {positions} positions of the model; "
            f"lower it to {positions}, or raise n_positions or max_position_embeddings in model.config"
        )
    return config


def cap_logits(config: PreTrainedConfig, softcap: float | None) -> None:
    """Write `loss.logit_softcap`, if set, into a configuration. The probe checks that the model's forward applies it.

    Raises:
        ValueError: the model type has no such field, so the saved model would not cap its logits.
    """
    text = config.get_text_config()
    if softcap is None:
        return
    if not hasattr(text, SOFTCAP):
        raise ValueError(
            f"loss.logit_softcap={softcap:g}: the configuration of {config.model_type} has no {SOFTCAP}, so "
            "transformers would not apply the cap to the saved model. Leave it out, or use a model with this field, "
            "for example gemma2"
        )
    setattr(text, SOFTCAP, softcap)


def matmul_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters used in matrix products: all except position embeddings and an untied input embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    tied = {id(head.weight)} if head is not None else set()
    return [each for each in model.parameters() if id(each) not in embeddings - tied]


def attention_arguments(recipe: Recipe, config: PreTrainedConfig) -> dict[str, str]:
    """Return `attn_implementation` for the model factories of transformers, or nothing if the library chooses."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    data = CausalLMData.of(recipe.data)
    choice = choose_attention(recipe.model.attn_implementation, model_class, config, data.sequence_length)
    window = attention_window(config)
    if data.mask_documents and window is not None and window < data.sequence_length:
        raise ValueError(
            f"data.mask_documents would take the place of the mask by which this model attends within {window} tokens; "
            "use "
            f"data.sequence_length up to {window}, or leave data.mask_documents out"
        )
    return {} if choice.value == "library default" else {"attn_implementation": choice.value}


FORWARD = Forward(attention_arguments, next_token_logits, hidden_states, summed_loss)
"""Forward functions that the probe of a run uses. Training uses the same ones."""
