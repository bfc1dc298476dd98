"""transformers models: check `model.config`, load configurations and weights."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.core.errors import asks_for_own_code
from accel_train.core.format import LARGEST_COUNT, did_you_mean
from accel_train.core.json_io import dotted_items
from accel_train.core.state import Choice
from accel_train.recipe.schema import Recipe
from accel_train.recipe.writer import who_set
from accel_train.recipe.yaml_core import show

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def check_model_config(recipe: Recipe) -> None:
    """Check the `model.config` of a recipe for errors that transformers ignores or reports only when it builds the
    model.

    Raises:
        ValueError: an unknown model_type or field, a value of the wrong type, or too few positions for the samples.
    """
    if recipe.model.config is None:
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
    problems = [
        *_unknown_fields(recipe, fields, known),
        *_negative_counts(recipe, fields, default),
        *_large_numbers(recipe, fields),
    ]
    if problems:
        raise ValueError("\n".join(sorted(problems)))
    # A run takes these ids from the tokenizer.
    unset = {name: None for name in ("bos_token_id", "eos_token_id") if name in known}
    try:
        config = config_class(**unset | fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.config {at} is not accepted by {model_type}: {reason}") from error
    has_head_size = any(name in field for field in known for name in ("head_dim", "d_kv", "kv_channels"))
    if not has_head_size:
        _check_heads(config, at)
    _check_positions(recipe, config)


def _unknown_fields(recipe: Recipe, fields: Iterable[str], known: set[str]) -> Iterator[str]:
    for field in set(fields) - known:
        remedy = did_you_mean(field, known, f"it has {', '.join(sorted(known))}")
        name = f"model.config.{field}"
        model_type = recipe.model.config["model_type"]  # type: ignore[index]
        yield f"{name} ({recipe.origin(name)}): {model_type} has no such field, and would ignore it; {remedy}"


def _negative_counts(recipe: Recipe, fields: Mapping[str, Any], default: Any) -> Iterator[str]:
    for field, value in fields.items():
        usual, name = getattr(default, field, None), f"model.config.{field}"
        counts = (value, usual) if isinstance(value, list) and isinstance(usual, list | tuple) else ([value], [usual])
        is_count = not field.endswith(("_id", "_index")) and all(type(each) is int and each >= 0 for each in counts[1])
        if is_count and any(type(each) is int and each < 0 for each in counts[0]):
            usually = f"{default.model_type} has {usual} by default"
            yield f"{name}={show(value)} ({recipe.origin(name)}): must not be negative; {usually}"


def _large_numbers(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in dotted_items(fields, "model.config."):
        numbers = value if isinstance(value, list) else [value]
        if any(type(each) is int and abs(each) > LARGEST_COUNT for each in numbers):
            yield f"{name}={show(value)} ({recipe.origin(name)}): no size is above {LARGEST_COUNT:,}; lower it"


def _check_heads(config: Any, at: str) -> None:
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if isinstance(hidden, int) and isinstance(heads, int) and (heads < 1 or hidden % heads):
        names = [config.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")]
        raise ValueError(
            f"model.config {at}: {names[0]}={hidden} is not divisible by {names[1]}={heads}; change one of them"
        )


def _check_positions(recipe: Recipe, config: Any) -> None:
    is_rotary = getattr(config, "rope_parameters", None) is not None
    positions = getattr(config, "max_position_embeddings", None)
    length = None if recipe.task == "masked-lm" else recipe.data.window
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
    from transformers import AutoConfig

    from accel_train.model import ngrams

    ngrams.register()
    name = recipe.model.pretrained
    assert name is not None, "the recipe names a pretrained model"
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        if asks_for_own_code(error):
            reason = "it brings its own code. Read the code, and give --model.trust_remote_code true to run it"
        raise ValueError(
            f"model.pretrained={name!r} ({who_set(recipe, 'model.pretrained')}) cannot be loaded: {reason}"
        ) from error


def num_pretrained_parameters(config: "PreTrainedConfig", folder: Path) -> int:
    """Return the number of pretrained parameters: from the files of a local folder, or else from the configuration."""
    import torch
    from safetensors import SafetensorError, safe_open
    from transformers import AutoModel, AutoModelForSemanticSegmentation

    num_parameters = 0
    # The run itself reports a damaged file.
    with suppress(SafetensorError):
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (it is no mapping)
            num_parameters += sum(map(math.prod, shapes))
    if num_parameters:
        return num_parameters
    with torch.device("meta"):
        for factory in (AutoModel, AutoModelForSemanticSegmentation):
            if type(config) in factory._model_mapping:
                return sum(each.numel() for each in factory.from_config(config).parameters())
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

    from accel_train.model.kernels.activations import fuse_activations
    from accel_train.model.kernels.router_loss import choose_router_loss

    section = recipe.model
    kwargs = {"dtype": torch.float32, "trust_remote_code": section.trust_remote_code, **attention}
    loaded: Mapping[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
    if section.pretrained is None or torch.get_default_device().type == "meta":
        model = factory.from_config(config, **kwargs)
    else:
        try:
            with quiet_bars(reports=not takes_new_head):
                model, loaded = factory.from_pretrained(
                    section.pretrained,
                    config=config,
                    # A pickled weight file could run code.
                    use_safetensors=True,
                    ignore_mismatched_sizes=takes_new_head,
                    output_loading_info=True,
                    **kwargs,
                )
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"model.pretrained={section.pretrained!r} cannot be loaded: {reason}") from error
    fuse_activations(model, section.fused_kernels)
    # Check that the router loss is known if the configuration asks for it.
    choose_router_loss(recipe.loss.router_aux, model)
    return model, loaded


def describe_kernels(recipe: Recipe, model: "nn.Module") -> dict[str, Choice[Any]]:
    """Return the choices of attention and activations of a transformers model; empty for any other model."""
    from transformers import PreTrainedModel

    from accel_train.model.kernels.activations import describe_activations
    from accel_train.model.kernels.attention import describe_attention

    if not isinstance(model, PreTrainedModel):
        return {}
    section = recipe.model
    return {
        "model.attn_implementation": describe_attention(model, section.attn_implementation, recipe.data.window or 0),
        "model.fused_kernels": describe_activations(model, section.fused_kernels),
    }


def chosen_attention(recipe: Recipe) -> dict[str, str]:
    """Return `attn_implementation` for transformers' model factories; empty if the recipe leaves it at auto."""
    chosen = recipe.model.attn_implementation
    return {} if chosen == "auto" else {"attn_implementation": chosen}


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


def check_weight_files(folder: Path) -> None:
    """Check that a folder holds weight files that a copy or a full disk has not truncated. Only headers are read.

    Raises:
        ValueError: a file is missing or damaged. The message names it.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights (*.safetensors); was the run finished?")
    for path in (*folder.glob("*.safetensors.index.json"), *files):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    continue
            named = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
            missing = sorted({name for name in named if not (folder / name).is_file()})
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy it again from where the run was trained") from error
        if missing:
            raise ValueError(
                f"{folder} lacks {missing[0]}, which {path.name} names; copy it from where the run was trained"
            )
