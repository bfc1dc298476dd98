"""Models for texts and their training settings. Models from scratch come from the package's recipes."""

from accel_train.core.state import Choice
from accel_train.experiments.finetune.found import Found
from accel_train.experiments.finetune.training import (
    LONGEST,
    Choices,
    Pretrained,
    batch_for,
    epochs_for,
    learning_rate_of,
    metric_for,
    training_of,
)

_CHARS_PER_TOKEN = 3.5
_MANY_TEXTS = 50_000
"""Labeled texts from which a small network from scratch learns better features than n-grams (approximate)."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<assistant>\\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ '<' + message['role'] + '>\\n' + message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}"
)
"""Chat template for tokenizers without one: `<role>`, the message, and the end of text after each answer."""


def text_classifier(found: Found, pretrained: Pretrained | None) -> Choices:
    batch = batch_for(found)
    common: Choices = {"data.group_by_length": Choice(True, "less padding")}
    if pretrained is not None:
        epochs = epochs_for(found, batch, 1_000, 2, 5)
        common |= training_of(found, learning_rate_of(pretrained), epochs, batch, metric_for(found))
        return common | {"optimizer.weight_decay": Choice(0.01, ""), "optimizer.betas": Choice([0.9, 0.999], "")}
    if found.num_samples < _MANY_TEXTS:
        return {
            "model.config": Choice(
                {"model_type": "ngrams"},
                "no --model, and few texts: their n-grams, which do better here than a network from scratch; "
                "pretrained weights know more of the language",
            ),
            "tokenizer": Choice("bytes", "which the n-grams are of"),
            "data.max_length": Choice(2048, "bytes"),
            **common,
            **training_of(
                found,
                Choice(1e-2, "as in the recipe text_ngrams"),
                epochs_for(found, batch, 500, 4, 30),
                batch,
                metric_for(found),
            ),
            "schedule.type": Choice("linear", ""),
            "optimizer.weight_decay": Choice(0.0, ""),
            "optimizer.betas": Choice([0.9, 0.98], ""),
        }
    config = {
        "model_type": "modernbert",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "local_attention": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "classifier_pooling": "mean",
        "embedding_dropout": 0.1,
        "mlp_dropout": 0.1,
        "classifier_dropout": 0.1,
    }
    return {
        "model.config": Choice(
            config, "no --model, so a small one from scratch; pretrained weights learn more from few texts"
        ),
        "tokenizer.train_bpe.vocab_size": Choice(16_000, "a tokenizer trained on these texts"),
        "data.max_length": Choice(256, ""),
        **common,
        **training_of(
            found,
            Choice(3e-3, "as in the recipe text_classification"),
            epochs_for(found, batch, 1_200, 3, 30),
            batch,
            metric_for(found),
        ),
        "optimizer.weight_decay": Choice(0.1, ""),
        "optimizer.betas": Choice([0.9, 0.98], ""),
        "optimizer.ema_decay": Choice(0.99, ""),
        **({"loss.label_smoothing": Choice(0.1, "")} if found.has_one_label else {}),
    }


def language_model(found: Found, pretrained: Pretrained | None) -> Choices:
    has_rows = "data.format" in found.settings
    chosen: Choices = {}
    if found.is_chat and (pretrained is None or not pretrained.has_chat_template):
        whose = "the tokenizer brings none" if pretrained else "a model from scratch has none"
        chosen["data.chat_template"] = Choice(CHAT_TEMPLATE, f"{whose}: <role> and the message, each on its own lines")
    if pretrained is not None:
        return chosen | _trained_on(found, pretrained, has_rows)
    num_tokens = found.num_chars / 3 if found.num_chars > 100_000 else found.num_chars
    is_large = found.num_chars > 20_000_000
    layers, width, length = (6, 256, 256) if is_large else (4, 128, 128)
    if has_rows:
        length = _row_length(found, 512)
    elif num_tokens < 20 * length:
        length = max(8, int(num_tokens / 20))
    batch, size = 16, f"{found.num_chars:,} characters"
    steps = max(100, min(3_000 if is_large else 600, round(10 * num_tokens / (batch * length))))
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": 4,
        "n_embd": width,
        "n_positions": max(length, 16),
        **dropout,
    }
    tokenizer: Choices = {"tokenizer": Choice("bytes", f"{size}, too few to train a tokenizer on")}
    if found.num_chars > 100_000:
        vocabulary = 8192 if is_large else 2048
        tokenizer = {"tokenizer.train_bpe.vocab_size": Choice(vocabulary, f"a tokenizer trained on {size}")}
    return {
        "model.config": Choice(config, "no --model, so a small one from scratch"),
        **tokenizer,
        **chosen,
        "data.sequence_length": Choice(length, "tokens of a sample"),
        "batch.global_batch_size": Choice(batch, f"{batch * length:,} tokens a step"),
        "optimizer.name": Choice("muon", "as in the recipe gpt_tiny"),
        "optimizer.learning_rate": Choice(1.6e-2, "as in the recipe gpt_tiny"),
        "schedule.max_steps": Choice(steps, f"for {size}: at most 10 passes, or 100 steps"),
        "schedule.warmup_ratio": Choice(0.05, ""),
        "schedule.min_lr_ratio": Choice(0.1, ""),
        "evaluate.every_steps": Choice(max(10, steps // 5), ""),
        "evaluate.max_samples": Choice(256, ""),
        "checkpoint.every_steps": Choice(max(10, steps // 5), ""),
    }


def _trained_on(found: Found, pretrained: Pretrained, has_rows: bool) -> Choices:
    """Return the settings for a pretrained language model on text, prompts, or chats."""
    room = min(LONGEST, pretrained.num_positions or LONGEST)
    length = _row_length(found, room) if has_rows else room
    if not has_rows and found.num_chars < 20 * length * _CHARS_PER_TOKEN:
        length = max(8, min(room, int(found.num_chars / _CHARS_PER_TOKEN / 20)))
    why = "19 of 20 rows fit" if has_rows else "what the model can read, 1,024 at most, and 20 samples at least"
    batch = batch_for(found) if has_rows else 16
    epochs = Choice(3 if has_rows else 1, "usual for prompts and chats" if has_rows else "text is read once")
    return {
        "data.sequence_length": Choice(length, why),
        **({} if has_rows else {"data.mask_documents": pretrained.masks_documents}),
        "batch.global_batch_size": Choice(batch, f"of {length} tokens at most"),
        "optimizer.learning_rate": learning_rate_of(pretrained),
        "optimizer.weight_decay": Choice(0.0 if has_rows else 0.1, ""),
        "schedule.num_epochs": epochs,
        "schedule.warmup_ratio": Choice(0.05, ""),
        "schedule.min_lr_ratio": Choice(0.1, ""),
        "evaluate.every_epochs": Choice(0.5, ""),
        "evaluate.max_samples": Choice(512, ""),
        "checkpoint.every_steps": Choice(200, ""),
    }


def _row_length(found: Found, room: int) -> int:
    """Return the tokens that hold 19 of 20 rows, up to `room`, as a multiple of 64 if `room` allows."""
    wanted = found.longest / (1 if found.num_chars <= 100_000 else 2.5) + 32
    return min(room, max(64, -(-int(wanted) // 64) * 64))
