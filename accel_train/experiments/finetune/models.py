"""Choice of model and training settings: small models from scratch, or settings by the size of a pretrained model.

Models from scratch come from the package's recipes.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.core.errors import SettingError, missing_packages
from accel_train.core.state import Choice, Choices, JsonRecord
from accel_train.experiments.finetune.amounts import (
    AMOUNTS,
    LORA_FROM_PARAMETERS,
    Passes,
    Pretrained,
    batch_for,
    eval_fraction_for,
    held_out_for,
    learning_rate_of,
    num_parameters_in_words,
    training_of,
)
from accel_train.experiments.finetune.recipe import Found
from accel_train.recipe.loader import Recipe, load_recipe, make_recipe, shipped_recipes
from accel_train.recipe.tasks import TASKS

Start = Pretrained | None
"""What a training starts from: pretrained weights, or None for a small model from scratch."""

LONGEST = 1024
"""Maximum length of a pretrained language model's windows, in tokens."""


def choose(found: Found, pretrained: Start) -> Choices:
    """Return model, optimizer, schedule, and evaluation settings for the data, each with its reason."""
    by_task = {
        "text-classification": text_classifier,
        "causal-lm": language_model,
        "image-classification": image_classifier,
        "semantic-segmentation": segmenter,
        "object-detection": detector,
        "token-classification": tagger,
        "question-answering": answerer,
        "seq2seq": translator,
        "sentence-embedding": embedder,
    }
    chosen = by_task[found.task](found, pretrained)
    if pretrained is not None:
        size = f"{num_parameters_in_words(pretrained.num_parameters)} parameters"
        chosen = {"model.pretrained": Choice(pretrained.name, f"from --model; {size}"), **chosen}
        if pretrained.image_resize is not None:
            chosen["data.image_resize"] = pretrained.image_resize
        if pretrained.num_parameters >= LORA_FROM_PARAMETERS:
            why = f"{size}: adapters need a fraction of the memory"
            chosen["model.lora"] = Choice({"rank": 16, "alpha": 32.0}, why)
    best = Choice(True, "model/ holds the weights with the best evaluation")
    return {**chosen, **held_out_for(found), "checkpoint.load_best_model_at_end": best}


def _recipe_of(task: str) -> Recipe:
    """Return the recipe of this package with a small model from scratch."""
    name = AMOUNTS[task].recipe if task in AMOUNTS else "gpt_tiny"
    return load_recipe(shipped_recipes()[name].path)


def _config_of(task: str, **changes: Any) -> JsonRecord:
    return {**(_recipe_of(task).model.config or {}), **changes}


def _trained(
    found: Found,
    pretrained: Start,
    batch: int,
    metric: Choice[str] | None = None,
    rate: Choice[float] | None = None,
) -> Choices:
    """Return batch, optimizer, schedule, and evaluation: as in the task's recipe, or by the size of the weights."""
    amounts = AMOUNTS[found.task]
    if pretrained is not None:
        rate = rate or learning_rate_of(pretrained)
        return training_of(found, batch, rate, amounts.pretrained, amounts.weight_decay, metric)
    own = _recipe_of(found.task).optimizer
    rate = rate or Choice(own.learning_rate, f"as in the recipe {amounts.recipe}")
    return training_of(found, batch, rate, amounts.from_scratch, own.weight_decay, metric)


def look_at(name: str, task: str, *, trust_remote_code: bool) -> Pretrained:
    """Return the facts of pretrained weights in a folder or on the hub. Only their configuration is read.

    Raises:
        ValueError: the model does not exist, or its tokenizer cannot be loaded.
    """
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"--model {name}: folder not found (relative to {Path.cwd()}). Name a folder, or a model on the hub"
        )
    from accel_train.data.images.processors import pretrained_image_size  # imports torch
    from accel_train.data.text.tokenizers import load_tokenizer
    from accel_train.model.pretrained import num_pretrained_parameters, pretrained_config

    model = {"pretrained": name, "trust_remote_code": trust_remote_code}
    tree = {"output_dir": "runs", "model": model, "data": {"train": "."}, "schedule": {"max_steps": 1}}
    recipe = make_recipe(tree, "--model")
    config = pretrained_config(recipe)
    is_text = "tokenizer" in TASKS[task].uses
    size = None if is_text else pretrained_image_size(recipe.model, config)
    template = load_tokenizer(name, trust_remote_code=trust_remote_code).chat_template if is_text else None
    num_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return Pretrained(
        name,
        num_pretrained_parameters(config, Path(str(recipe.model.pretrained))),
        num_positions,
        size,
        bool(template),
        **({"masks_documents": _document_masks(tree, num_positions)} if task == "causal-lm" else {}),
        template_has_tools="tools" in str(template),
        is_t5="t5" in config.model_type,
        image_resize=None if is_text else _image_resize({**tree, "task": task}, config, size or 224),
    )


def _image_resize(tree: JsonRecord, config: Any, size: int) -> Choice[str] | None:
    """Return whether whole images are resized, because the model's image processor does what no recipe can."""
    from accel_train.data.images.processors import model_preprocessing

    recipe = make_recipe({**tree, "data": {"train": ".", "image_size": size}}, "--model")
    try:
        model_preprocessing(recipe, config, is_whole=recipe.task != "image-classification")
    except SettingError as error:
        if "data.image_resize" not in error.settings:
            raise
        return Choice("whole", error.problem.partition(";")[0])
    return None


def _document_masks(tree: JsonRecord, num_positions: int | None) -> Choice[bool]:
    """Return whether the model can keep documents in a window apart, by the probe that starts a run."""
    from accel_train.task import load_task

    data = {"train": ".", "mask_documents": True, "sequence_length": min(LONGEST, num_positions or LONGEST)}
    try:
        load_task("causal-lm").prove(make_recipe({**tree, "data": data}, "--model"))
    except ValueError as error:
        reason = str(error)
        if isinstance(error, SettingError) and "data.mask_documents" in error.settings:
            reason = error.problem
        return Choice(False, f"documents in a window see each other: {reason}")
    return Choice(True, "attention stays within a document")


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
TOOLS_TEMPLATE = "{% if tools %}{{ '<tools>\\n' + tools | tojson + '\\n' }}{% endif %}" + CHAT_TEMPLATE.replace(
    "message['content']", "(message['content'] or '')"
).replace(
    "{% generation %}{{",
    "{% generation %}{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{",
)
"""The same with tools before the chat, and calls of tools as JSON."""


def text_classifier(found: Found, pretrained: Start) -> Choices:
    batch = batch_for(found)
    common: Choices = {"data.group_by_length": Choice(True, "less padding")}
    if pretrained is not None:
        return common | _trained(found, pretrained, batch) | {"optimizer.betas": Choice([0.9, 0.999])}
    if found.num_samples < _MANY_TEXTS:
        columns = found.settings.get("data.text_columns")
        is_pair = columns is not None and len(columns.value) == 2
        # Squared errors diverge at twice these rates if a table repeats its texts.
        rate = Choice(0.05 if is_pair else 0.1, "for squared errors")
        if found.counts or found.has_one_label:
            rate = Choice(10.0, "for features of length 1")
        config: JsonRecord = {
            "model_type": "ngrams",
            "separate_norms": True,
            "within_words": True,
            "log_counts": True,
        }
        if is_pair:
            config["type_vocab_size"] = 2
        return {
            "model.config": Choice(
                config,
                "no --model, and few texts: n-grams learn more from them than a network from scratch; "
                "pretrained weights know more of the language",
            ),
            "tokenizer": Choice("bytes", "the n-grams are made of bytes"),
            "data.max_length": Choice(2048, "bytes"),
            **common,
            **training_of(found, batch, rate, Passes(500, 4, 30), 0.0, None),
            "schedule.type": Choice("linear"),
            "optimizer.name": Choice("sgd", "rare n-grams stay small, as in a support vector machine"),
            "optimizer.max_grad_norm": Choice(0.0),
        }
    config = _config_of(
        found.task,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention"] * 2,
        embedding_dropout=0.1,
        mlp_dropout=0.1,
        classifier_dropout=0.1,
    )
    why = "no --model: a small model from scratch; pretrained weights learn more from few texts"
    common = {"data.max_length": Choice(256), **common}
    chosen = _from_scratch(found, Choice(config, why), common, _trained(found, None, batch), vocabulary=16_000)
    chosen["optimizer.ema_decay"] = Choice(0.99)
    return chosen | ({"loss.label_smoothing": Choice(0.1)} if found.has_one_label else {})


def language_model(found: Found, pretrained: Start) -> Choices:
    has_rows = "data.format" in found.settings
    chosen: Choices = {}
    if found.is_chat and (pretrained is None or not pretrained.has_chat_template):
        whose = "the tokenizer" if pretrained else "a model from scratch"
        template = TOOLS_TEMPLATE if "data.tools_column" in found.settings else CHAT_TEMPLATE
        chosen["data.chat_template"] = Choice(
            template, f"{whose} has no template; this one writes <role> and the message on separate lines"
        )
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
    config = _config_of(found.task, n_layer=layers, n_embd=width, n_positions=max(length, 16))
    tokenizer: Choices = {"tokenizer": Choice("bytes", f"{size} are too few to train a tokenizer")}
    if found.num_chars > 100_000:
        vocabulary = 8192 if is_large else 2048
        tokenizer = {"tokenizer.train_bpe.vocab_size": Choice(vocabulary, f"a tokenizer trained on {size}")}
    return {
        "model.config": Choice(config, "no --model: a small model from scratch"),
        **tokenizer,
        **chosen,
        "data.sequence_length": Choice(length, "tokens per sample"),
        "batch.global_batch_size": Choice(batch, f"{batch * length:,} tokens per step"),
        "optimizer.name": Choice("muon", "as in the recipe gpt_tiny"),
        "optimizer.learning_rate": Choice(1.6e-2, "as in the recipe gpt_tiny"),
        "schedule.max_steps": Choice(steps, f"for {size}: at most 10 passes, or 100 steps"),
        "schedule.warmup_ratio": Choice(0.05),
        "schedule.min_lr_ratio": Choice(0.1),
        "evaluate.every_steps": Choice(max(10, steps // 5)),
        "evaluate.max_samples": Choice(256),
        "checkpoint.every_steps": Choice(max(10, steps // 5)),
    }


def _trained_on(found: Found, pretrained: Pretrained, has_rows: bool) -> Choices:
    """Return the settings for a pretrained language model on text, prompts, or chats."""
    room = _room(pretrained, LONGEST)
    length = _row_length(found, room) if has_rows else room
    if not has_rows and found.num_chars < 20 * length * _CHARS_PER_TOKEN:
        length = max(8, min(room, int(found.num_chars / _CHARS_PER_TOKEN / 20)))
    why = "19 of 20 rows fit" if has_rows else "as long as the model can read, at most 1,024, with at least 20 samples"
    batch = batch_for(found) if has_rows else 16
    epochs = Choice(3 if has_rows else 1, "usual for prompts and chats" if has_rows else "the text is read once")
    return {
        "data.sequence_length": Choice(length, why),
        **({} if has_rows else {"data.mask_documents": pretrained.masks_documents}),
        "batch.global_batch_size": Choice(batch, f"samples of at most {length} tokens"),
        "optimizer.learning_rate": learning_rate_of(pretrained),
        "optimizer.weight_decay": Choice(0.0 if has_rows else 0.1),
        "schedule.num_epochs": epochs,
        "schedule.warmup_ratio": Choice(0.05),
        "schedule.min_lr_ratio": Choice(0.1),
        "evaluate.every_epochs": Choice(0.5),
        "evaluate.max_samples": Choice(512),
        "checkpoint.every_steps": Choice(200),
    }


def _row_length(found: Found, room: int) -> int:
    """Return the tokens that hold 19 of 20 rows, up to `room`, as a multiple of 64 if `room` allows."""
    wanted = found.longest / (1 if found.num_chars <= 100_000 else 2.5) + 32
    return min(room, max(64, -(-int(wanted) // 64) * 64))


def image_classifier(found: Found, pretrained: Start) -> Choices:
    batch = batch_for(found)
    flip = Choice(0.0, "gray images may be characters, which a mirror changes") if found.is_gray else Choice(0.5)
    chosen: Choices = {"data.augment.horizontal_flip": flip, "loss.label_smoothing": Choice(0.1)}
    trained = _trained(found, pretrained, batch)
    if pretrained is not None:
        return {**chosen, "data.image_size": _own_size(pretrained, 224), **trained}
    size = Choice(_from_scratch_size(found), f"the median image has a short edge of {found.edge} pixels")
    larger = {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2]} if size.value > 64 else {}
    config = _config_of(found.task, num_channels=3, **larger)
    gray = "; all images are gray, and pipeline() reads them in color" if found.is_gray else ""
    return {
        "model.config": Choice(config, f"no --model: a small ResNet from scratch{gray}"),
        "data.image_size": size,
        "data.augment.random_resized_crop": Choice([0.7, 1.0] if found.is_gray else [0.35, 1.0]),
        **chosen,
        **trained,
        "optimizer.ema_decay": Choice(0.99),
    }


def _room(pretrained: Start, most: int) -> int:
    """Return the tokens of the longest text that a model can read, up to `most`."""
    return most if pretrained is None else min(most, pretrained.num_positions or most)


def _own_size(pretrained: Pretrained, usual: int) -> Choice[int]:
    size = pretrained.image_size
    return Choice(size, "the size that the model was trained with") if size else Choice(usual, "the usual size")


def _from_scratch_size(found: Found) -> int:
    return next((size for size in (32, 64, 128) if found.edge <= size * 1.25), 128)


def _size_of_aspect(found: Found, edge: int) -> Choice[Any]:
    """Return the image size for this short edge: a square, or (height, width) with the median image's aspect.

    The longer edge is a multiple of 32.
    """
    why = f"the median image has a short edge of {found.edge} pixels"
    longer = round(edge * min(2.0, max(found.aspect, 1 / found.aspect)) / 32) * 32
    if longer == edge:
        return Choice(edge, why)
    shape = [edge, longer] if found.aspect > 1 else [longer, edge]
    return Choice(shape, f"height and width: {why} and is {found.aspect:.2g} times as wide as high")


def _pretrained_sizes(found: Found, own: Choice[int]) -> Choices:
    """Return the image size of a pretrained segmenter. Larger images are seen in windows, to keep their details."""
    size = own.value
    edge = min(2 * size, found.edge // 32 * 32)
    if edge <= 1.25 * size:
        return {"data.image_size": own}
    return {
        "data.image_size": _size_of_aspect(found, edge),
        "data.crop_size": Choice(size, f"{own.reason}; training sees crops"),
        "evaluate.window_stride": Choice(
            size * 2 // 3, "evaluation and prediction use windows of data.crop_size that overlap by a third"
        ),
    }


def segmenter(found: Found, pretrained: Start) -> Choices:
    batch = 8 if found.num_samples < 200 else 16
    metric = Choice("mean_iou", "every class counts equally, even with few pixels")
    trained = _trained(found, pretrained, batch, metric)
    if pretrained is not None:
        return {**_pretrained_sizes(found, _own_size(pretrained, 512)), **trained}
    why = "no --model: a small UPerNet from scratch, as in the recipe segmentation"
    return {
        "model.config": Choice(_config_of(found.task), why),
        "data.image_size": _size_of_aspect(found, _from_scratch_size(found)),
        **trained,
    }


def detector(found: Found, pretrained: Start) -> Choices:
    batch = 8 if found.num_samples < 500 else 16
    metric = Choice("map", "mean average precision, as COCO defines it")
    rate = Choice(1e-3, "usual for small models from scratch")
    if pretrained is not None:
        rate = Choice(5e-5, "usual for pretrained detectors")
    trained = _trained(found, pretrained, batch, metric, rate)
    trained["optimizer.max_grad_norm"] = Choice(0.1, "usual for detectors (DETR)")
    if pretrained is not None:
        return {"data.image_size": _own_size(pretrained, 480), **trained}
    # As many boxes as COCO's scores count of an image.
    config = _config_of(found.task, num_queries=100)
    return {
        "model.config": Choice(config, "no --model: a small detector from scratch; it finds up to 100 boxes"),
        "data.image_size": _size_of_aspect(found, _from_scratch_size(found)),
        **trained,
    }


def tagger(found: Found, pretrained: Start) -> Choices:
    from accel_train.metrics.entities import entity_tags  # imports torch

    is_entities = entity_tags(tuple(found.counts)) is not None
    return _small_model(found, pretrained, 512, Choice("f1", "of whole entities") if is_entities else None)


def answerer(found: Found, pretrained: Start) -> Choices:
    room = _room(pretrained, 256 if pretrained is None else 384)
    return _small_model(found, pretrained, room, Choice("f1", "of the words of an answer"))


def translator(found: Found, pretrained: Start) -> Choices:
    metric, number = Choice("chrf", "the characters that generated texts share with targets"), Choice(100)
    if missing_packages(TASKS["seq2seq"].packages):
        why = "scores of generated texts need pip install 'accel-train[seq2seq]'"
        metric, number = Choice("loss", why), Choice(0, why)
    room = _room(pretrained, 512)
    length = _row_length(replace(found, longest=found.longest_target), min(256, room))
    return {
        "data.max_target_length": Choice(length, "tokens; 19 of 20 targets fit"),
        "evaluate.generation.max_samples": number,
        **_small_model(found, pretrained, room, metric),
    }


def _small_model(found: Found, pretrained: Start, room: int, metric: Choice[str] | None) -> Choices:
    """Return the settings of the task's recipe, fitted to the data. `room` is the most tokens of a text."""
    common: Choices = {
        "data.max_length": Choice(_row_length(found, room), "tokens"),
        "data.group_by_length": Choice(True, "less padding"),
    }
    is_t5 = pretrained is not None and pretrained.is_t5 and pretrained.num_parameters < LORA_FROM_PARAMETERS
    trained = _trained(found, pretrained, batch_for(found), metric, Choice(3e-4, "usual for T5") if is_t5 else None)
    if pretrained is not None:
        return common | trained
    why = f"no --model: a small model from scratch, as in the recipe {AMOUNTS[found.task].recipe}"
    return _from_scratch(found, Choice(_config_of(found.task), why), common, trained)


def _from_scratch(
    found: Found,
    config: Choice[JsonRecord],
    common: Choices,
    trained: Choices,
    *,
    vocabulary: int = 4_000,
    why: str = "a tokenizer trained on these texts",
) -> Choices:
    """Return the settings of a model of texts, with the betas and the average of the task's recipe."""
    own = _recipe_of(found.task).optimizer
    return {
        "model.config": config,
        "tokenizer.train_bpe.vocab_size": Choice(vocabulary, why),
        **common,
        **trained,
        "optimizer.betas": Choice([*own.betas]),
        "optimizer.ema_decay": Choice(own.ema_decay),
    }


def embedder(found: Found, pretrained: Start) -> Choices:
    has_scores = "data.score_column" in found.settings
    metric = Choice("spearman", "the order of the similarities") if has_scores else Choice("mrr_at_10")
    length = _row_length(found, _room(pretrained, 256))
    num_train = found.num_samples * (1 - eval_fraction_for(found))
    batch = max(2, min(128, 2 ** int(math.log2(max(num_train / 8, 1)))))
    is_adapted = pretrained is None or pretrained.num_parameters >= LORA_FROM_PARAMETERS
    rate = None if is_adapted else Choice(2e-5, "usual for pretrained sentence encoders")
    trained = _trained(found, pretrained, batch, metric, rate)
    # The other rows of the batch are negatives.
    why = f"each pair has {batch - 1} negatives, on any number of GPUs"
    trained["batch.global_batch_size"] = Choice(batch, "all pairs of the batch are compared" if has_scores else why)
    common: Choices = {"data.max_length": Choice(length, "tokens")}
    if pretrained is not None:
        return common | trained
    config, why = _config_of(found.task), "as in the recipe sentence_embedding"
    config["max_position_embeddings"] = max(config["max_position_embeddings"], length)
    model = Choice(config, f"no --model: a small model from scratch, {why}; pretrained weights know more")
    return _from_scratch(found, model, common, trained, vocabulary=600, why=f"short tokens, {why}")
