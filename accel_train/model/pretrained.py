"""transformers models: check `model.config`, load configurations and weights."""

import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.core.errors import asks_for_own_code, first_line
from accel_train.core.format import LARGEST_COUNT, did_you_mean
from accel_train.core.json_io import dotted_items, load_object
from accel_train.core.state import Choices
from accel_train.data.hub import known_config, without_hub
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TASKS
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show
from accel_train.task import is_of_transformers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


MOST_LABELS = 1_000_000
"""Most classes of a pretrained model."""
MOST_LAYERS, MOST_ROWS = 1000, 1 << 24
"""Layers and other sizes that a pretrained model's config.json may state, whatever its weight files hold."""
_LAYERS = re.compile(r"(num|n|encoder|decoder)_(\w+_)?layers?|depth")


def check_model_config(recipe: Recipe) -> None:
    """Check the `model.config` of a recipe for errors that transformers ignores or reports only when it builds the
    model. Check that the configuration of `model.pretrained` can be loaded.

    Raises:
        ValueError: an unknown model_type or field, a value of the wrong type, too few positions for the samples, or a
            configuration that cannot be found.
    """
    if recipe.model.config is None:
        pretrained_config(recipe)
        return
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    from accel_train.model import ngrams

    ngrams.register()
    fields = dict(recipe.model.config)
    model_type = fields.pop("model_type")
    at = f"({who_set(recipe, 'model.config')})"
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        remedy = did_you_mean(str(model_type), CONFIG_MAPPING, "gpt2 and llama are two", at_most=3)
        raise ValueError(
            f"model.config.model_type={show(model_type)} {at} is not a model type of transformers; {remedy}"
        )
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    known = {*default.to_dict(), *config_class.attribute_map} - {"model_type", "transformers_version"}
    if "rope_parameters" in known:
        # transformers 4 used these names, and transformers 5 still reads them.
        known |= {"rope_theta", "rope_scaling"}
    if problems := sorted(_problems_of(recipe, fields, default, known)):
        raise ValueError("\n".join(problems))
    # A run takes these ids from the tokenizer.
    unset = {name: None for name in ("bos_token_id", "eos_token_id") if name in known}
    try:
        try:
            config = config_class(**unset | fields)
        except StrictDataclassError:  # it may want whole numbers for these ids
            config = config_class(**fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.config {at} is not accepted by {model_type}: {reason}") from error
    has_head_size = any(name in field for field in known for name in ("head_dim", "d_kv", "kv_channels"))
    if not has_head_size and _heads_divide(default) and not _heads_divide(config):
        hidden, heads = config.hidden_size, config.num_attention_heads
        names = [config.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")]
        raise ValueError(
            f"model.config {at}: {names[0]}={hidden} is not divisible by {names[1]}={heads}; change one of them"
        )
    _check_positions(recipe, config)


def value_of(config: Any, field: str) -> Any:
    """Return a field of a transformers configuration; None if it does not have it, or if layers differ in it."""
    try:
        return getattr(config, field, None)
    # transformers raises it for a field that each layer has.
    except RuntimeError:
        return None


def whole_numbers(value: Any) -> list[int]:
    """Return a value that is a whole number, or those in a list, without True and False."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def _problems_of(recipe: Recipe, fields: Mapping[str, Any], default: Any, known: set[str]) -> Iterator[str]:
    """Yield the unknown fields of `model.config`, negative counts, and numbers beyond any size."""
    for field, value in fields.items():
        usual, name = value_of(default, field), f"model.config.{field}"
        if field not in known:
            remedy = did_you_mean(field, known, f"it has {', '.join(sorted(known))}")
            problem = f"{default.model_type} has no such field, and would ignore it; {remedy}"
            yield f"{name} ({recipe.origin(name)}): {problem}"
        counts = (value, usual) if isinstance(value, list) and isinstance(usual, list | tuple) else ([value], [usual])
        is_count = not field.endswith(("_id", "_index")) and all(type(each) is int and each >= 0 for each in counts[1])
        if is_count and any(type(each) is int and each < 0 for each in counts[0]):
            usually = f"{default.model_type} has {usual} by default"
            yield f"{name}={show(value)} ({recipe.origin(name)}): must not be negative; {usually}"
    for name, value in dotted_items(fields, "model.config."):
        if any(abs(each) > LARGEST_COUNT for each in whole_numbers(value)):
            yield f"{name}={show(value)} ({recipe.origin(name)}): no size is above {LARGEST_COUNT:,}; lower it"


def _heads_divide(config: Any) -> bool:
    hidden, heads = value_of(config, "hidden_size"), value_of(config, "num_attention_heads")
    return not (isinstance(hidden, int) and isinstance(heads, int)) or (heads > 0 and hidden % heads == 0)


def _check_positions(recipe: Recipe, config: Any) -> None:
    is_rotary = getattr(config, "rope_parameters", None) is not None
    positions = getattr(config, "max_position_embeddings", None)
    # Other models may have relative positions, which their task counts.
    is_causal = recipe.task in TASKS and TASKS[recipe.task].gives == "continuation"
    length = recipe.data.window if is_causal else None
    if length is not None and positions is not None and not is_rotary and length > positions:
        field = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ValueError(
            f"data.sequence_length={length} ({who_set(recipe, 'data.sequence_length')}) is longer "
            f"than the {positions} positions of {config.model_type}; raise model.config.{field}, or lower "
            "data.sequence_length"
        )


def pretrained_config(recipe: Recipe) -> "PreTrainedConfig":
    """Return the configuration of `model.pretrained` without loading weights.

    Raises:
        ValueError: the model cannot be found or loaded.
    """
    from accel_train.model import ngrams

    ngrams.register()
    section, name = recipe.model, recipe.model.pretrained
    assert name is not None, "the recipe names a pretrained model"
    who = f"{section.pretrained_at} ({who_set(recipe, 'model.pretrained')})"
    return known_config(name, section.trust_remote_code, partial(_read_config, name, section.trust_remote_code, who))


def config_of(recipe: Recipe) -> Any:
    """Return the configuration of the recipe's model, pretrained or new."""
    from transformers import AutoConfig

    fields = recipe.model.config
    return pretrained_config(recipe) if fields is None else AutoConfig.for_model(**fields)


def _read_config(name: str, trust_remote_code: bool, who: str) -> "PreTrainedConfig":
    from transformers import AutoConfig

    file = Path(name) / "config.json"
    if os.path.isfile(file):
        # transformers makes a name for each of them.
        number = (fields := load_object(file)).get("num_labels", 0)
        if not isinstance(number, int) or number > MOST_LABELS:
            raise ValueError(f"{who}: {file} states {str(number)[:40]} labels, not up to {MOST_LABELS:,}; correct it")
        _check_sizes(file, fields, who)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    # transformers raises other types for values that it does not expect, or that the model's own code does not.
    except Exception as error:
        if trust_remote_code and not isinstance(error, OSError | ValueError):
            raise
        reason = first_line(error)
        if asks_for_own_code(error):
            reason = "it brings its own code. Read the code, and give --model.trust_remote_code true to run it"
        elif remedy := without_hub(name):
            reason = f"it is not downloaded{remedy}"
        raise ValueError(f"{who} cannot be loaded: {reason}") from error


def _check_sizes(file: Path, fields: Mapping[str, Any], who: str) -> None:
    """Raise ValueError if a config.json states a size that the weight files beside it cannot have.

    transformers would build each layer, and allocate each new weight.
    """
    from safetensors import SafetensorError

    # The run itself reports a damaged file.
    with suppress(SafetensorError):
        shapes = _shapes_in(file.parent)
        numel = sum(map(math.prod, shapes))
        for name, value in dotted_items(fields):
            is_layers = _LAYERS.fullmatch(name.rpartition(".")[2])
            limit = max(MOST_LAYERS, len(shapes)) if is_layers else max(MOST_ROWS, numel)
            if shapes and max(whole_numbers(value), default=0) > limit:
                raise ValueError(
                    f"{who}: {file} states {name}={str(value)[:40]}, and its weight files have {len(shapes)} tensors "
                    f"of {numel:,} numbers in all; correct it"
                )


def _shapes_in(folder: Path) -> list[list[int]]:
    from safetensors import safe_open

    shapes: list[list[int]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes += [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (it is no mapping)
    return shapes


def num_pretrained_parameters(config: "PreTrainedConfig", folder: Path) -> int:
    """Return the number of pretrained parameters: from the files of a local folder, or else from the configuration."""
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoModelForSemanticSegmentation

    from accel_train.model.tensors import without_values

    # The run itself reports a damaged file.
    with suppress(SafetensorError):
        if num_parameters := sum(map(math.prod, _shapes_in(folder))):
            return num_parameters
    with without_values():
        for factory in (AutoModel, AutoModelForSemanticSegmentation):
            if type(config) in factory._model_mapping:
                return int(factory.from_config(config).num_parameters())
    return 0


def transformers_model(
    factory: Any, recipe: Recipe, config: "PreTrainedConfig", attention: Mapping[str, str], *, takes_new_head: bool
) -> tuple["PreTrainedModel", Mapping[str, Any]]:
    """Build the recipe's model in fp32 with a transformers Auto class; return it with its loading report.

    Activations are fused as `model.fused_kernels` says. On the meta device, or without `model.pretrained`, the model is
    built from its configuration alone, and the loading report is empty.

    Args:
        attention: `attn_implementation`, or an empty mapping if the library chooses.
        takes_new_head: initialize weights whose shape differs from the model's. Without it, a different shape is an
            error.

    Returns:
        The model, and transformers' `missing_keys` and `mismatched_keys`.

    Raises:
        ValueError: the weights cannot be loaded or are not safetensors, or `loss.router_aux` cannot be computed.
    """
    import torch
    from transformers import GenerationConfig

    from accel_train.model.kernels.activations import fuse_activations
    from accel_train.model.kernels.experts import choose_router_loss
    from accel_train.model.tensors import StandIns

    section = recipe.model
    kwargs = {"dtype": torch.float32, "trust_remote_code": section.trust_remote_code, **attention}
    loaded: Mapping[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
    if section.pretrained is None or torch.get_default_device().type == "meta":
        model = factory.from_config(config, **kwargs)
        if section.pretrained is not None and model.can_generate():
            # `from_pretrained` reads this file, too.
            with suppress(OSError):
                model.generation_config = GenerationConfig.from_pretrained(section.pretrained)
    else:
        try:
            with quiet_bars(reports=not takes_new_head), StandIns.loading():
                model, loaded = factory.from_pretrained(
                    section.pretrained,
                    config=config,
                    # A pickled weight file could run code.
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **kwargs,
                )
        except (OSError, ValueError) as error:
            raise ValueError(f"{section.pretrained_at} cannot be loaded: {first_line(error)}") from error
        # A task's head may be new. An encoder has none, and its weights have no prefix.
        body = f"{model.base_model_prefix}."
        has_head = takes_new_head and any(name.startswith(body) for name in model.state_dict())
        wrong = sorted(entry for entry in loaded["mismatched_keys"] if not has_head or entry[0].startswith(body))
        if wrong:
            name, there, here = wrong[0]
            raise ValueError(
                f"{section.pretrained_at}: its configuration does not fit its weights: {name} has the "
                f"shape {tuple(there)}, and should have {tuple(here)} ({len(wrong)} of its weights differ). Take the "
                "config.json that belongs to the weights"
            )
        StandIns.read(model.buffers())
    fuse_activations(model, section.fused_kernels)
    # Check that the router loss is known if the configuration asks for it.
    choose_router_loss(recipe.loss.router_aux, model)
    return model, loaded


def check_plain_weights(model: Any) -> None:
    """Check that transformers loads the weights of a model as they are in its files. `model` may be empty.

    Raises:
        ValueError: it converts or dequantizes them, or this is unknown.
    """
    kind = type(model).__name__
    if not type(model).__module__.startswith(("transformers.models.", "accel_train.")):
        raise ValueError(f"{kind} brings its own code")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError("they are quantized")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(model, add_legacy=False)
    except (ImportError, TypeError, AttributeError) as error:
        raise ValueError("this version of transformers does not tell which weights it converts") from error
    if any(isinstance(each, WeightConverter) for each in mapping):
        raise ValueError(f"transformers converts weights of {kind}")


def grow_embedding(model: "PreTrainedModel", rows: int) -> None:
    """Give the embedding of a model more rows, and its output layer too. New rows are the mean of the others.

    Logits of pretrained models are far below 0. Random rows have logits near 0, which would outweigh all tokens.
    """
    import torch

    from accel_train.model.tensors import StandIns

    num_rows = model.get_input_embeddings().num_embeddings
    StandIns.read(each for each in model.parameters() if num_rows in each.shape)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for each in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
                if each is not None and each.shape[0] == rows:
                    each[num_rows:] = each[:num_rows].mean(0)


def describe_kernels(recipe: Recipe, model: "nn.Module") -> Choices:
    """Return the choices of attention and activations of a transformers model; empty for any other model."""
    if not is_of_transformers(model):
        return {}
    from accel_train.model.kernels.activations import describe_activations
    from accel_train.model.kernels.attention import describe_attention

    section = recipe.model
    return {
        "model.attn_implementation": describe_attention(model, section.attn_implementation, recipe.data.window or 0),
        "model.fused_kernels": describe_activations(model, section.fused_kernels),
    }


def chosen_attention(recipe: Recipe) -> dict[str, str]:
    """Return `attn_implementation` for transformers' model factories; empty if the recipe leaves it at auto."""
    chosen = recipe.model.attn_implementation
    return {} if chosen == "auto" else {"attn_implementation": chosen}


def without_pooler(model_class: type) -> dict[str, Any]:
    """Return the argument that builds a model of this class without a pooler, if it has one."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(model_class).parameters else {}


def new_weights(loaded: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the weights that were not pretrained."""
    return sorted({*loaded["missing_keys"], *(entry[0] for entry in loaded["mismatched_keys"])})


@contextmanager
def quiet_bars(*, reports: bool = True) -> Iterator[None]:
    """Hide the progress bars of transformers inside the context, because they would disturb ours.

    Without `reports`, also hide the table of newly initialized weights.
    """
    from transformers.utils import logging

    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not reports:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()


def fetch_weights(recipe: Recipe) -> list[Path]:
    """Return the weight files of `model.pretrained`, downloaded from the hub if they are missing. Loads none of them.

    Raises:
        ValueError: the model has no safetensors files, or they cannot be downloaded.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    name = str(recipe.model.pretrained)
    try:
        # `from_pretrained` reads it, too. Not every model has it.
        cached_file(name, "generation_config.json", _raise_exceptions_for_missing_entries=False)
        if (whole := cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)) is not None:
            return [Path(whole)]
        shards, _ = get_checkpoint_shard_files(name, cached_file(name, SAFE_WEIGHTS_INDEX_NAME))
    except (OSError, ValueError) as error:
        problem = f"no weights (*.safetensors) can be had: {first_line(error)}"
        raise ValueError(f"{recipe.model.pretrained_at}: {problem}") from error
    return [Path(shard) for shard in shards]
