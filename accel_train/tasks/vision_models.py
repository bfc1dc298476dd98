"""Vision models of transformers: built from a configuration or from pretrained weights, with our classes in their head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from accel_train.model_check import pretrained_config
from accel_train.recipe import Recipe
from accel_train.tasks.causal_lm import quiet_bars


def vision_config(recipe: Recipe, known: Mapping[Any, Any], purpose: str) -> PreTrainedConfig:
    """The configuration of the recipe's model, before it knows our classes.

    `known` maps the configurations that transformers has a model for to that model; `purpose` is what such a model does.

    Raises:
        ValueError: it cannot be loaded, or there is no such model of it.
    """
    section = recipe.model
    if section.config is not None:
        fields = dict(section.config)
        fields.pop("num_labels", None)  # the data says
        config = AutoConfig.for_model(**fields)
        if getattr(config, "image_size", None) is not None and "image_size" not in fields:
            config.image_size = recipe.data.image_size
    else:
        config = pretrained_config(recipe)
    if type(config) not in known and not section.trust_remote_code:
        raise ValueError(
            f"model type {config.model_type!r} has no model for {purpose} in transformers; "
            f"there are {', '.join(sorted(kind.model_type for kind in known))}"
        )
    return config


def with_labels(config: PreTrainedConfig, label_names: tuple[str, ...]) -> PreTrainedConfig:
    """The same configuration, changed in place, with a head for these classes."""
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: index for index, name in enumerate(label_names)}
    return config


def build_vision_model(recipe: Recipe, config: PreTrainedConfig, factory: Any) -> tuple[PreTrainedModel, list[str]]:
    """The model in fp32, and notes on what of it is not pretrained; `factory` is an Auto class of transformers.

    Raises:
        ValueError: the weights cannot be loaded, are no safetensors, or belong to another model.
    """
    section = recipe.model
    kwargs: dict[str, Any] = {"dtype": torch.float32}
    if section.attn_implementation != "auto":
        kwargs["attn_implementation"] = section.attn_implementation
    notes = []
    if section.pretrained is None or torch.get_default_device().type == "meta":
        model = factory.from_config(config, trust_remote_code=section.trust_remote_code, **kwargs)
    else:
        try:
            with quiet_bars():
                model, loaded = factory.from_pretrained(
                    section.pretrained,
                    config=config,
                    trust_remote_code=section.trust_remote_code,
                    use_safetensors=True,  # a pickled weight file could run code
                    ignore_mismatched_sizes=True,  # a head for other classes: it is new, and the notes say so
                    output_loading_info=True,
                    **kwargs,
                )
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"model.pretrained={section.pretrained!r} cannot be loaded: {reason}") from error
        new = sorted({*loaded["missing_keys"], *(entry[0] for entry in loaded["mismatched_keys"])})
        if len(new) > len(model.state_dict()) // 2:
            raise ValueError(
                f"model.pretrained={section.pretrained!r} has next to no weights for {type(model).__name__} "
                f"(not {', '.join(new[:3])} ...); name a model of type {config.model_type!r}"
            )
        notes += [f"not pretrained, so new: {', '.join(new)}"] if new else []
    if recipe.precision.gradient_checkpointing:
        # transformers renamed it in 5.23
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, notes


def image_logits(model: nn.Module, pixel_values: Tensor) -> Tensor:
    """What the model answers, in the precision it has."""
    logits: Tensor = model(pixel_values=pixel_values).logits
    return logits


def refusal_of_size(config: PreTrainedConfig, factory: Any, channels: int, image_size: int) -> str | None:
    """Why a model of this configuration cannot take images of a size; None if it can, as far as can be told.

    Tried on a copy without weights; models that look at the values of their input cannot run there.
    """
    try:
        _forward_flops(config, factory, channels, image_size)
    except ValueError as error:
        return str(error).strip().partition("\n")[0]
    except RuntimeError as error:
        return None if "meta" in str(error) else str(error).strip().partition("\n")[0]
    return None


def check_image_size(config: PreTrainedConfig, factory: Any, channels: int, image_size: int) -> None:
    """Refuse a data.image_size that the model cannot take, before anything is trained.

    Raises:
        ValueError: says why, and which size the model has.
    """
    reason = refusal_of_size(config, factory, channels, image_size)
    if reason is not None:
        its_own = getattr(config, "image_size", None)
        remedy = f"set data.image_size: {its_own}, or another model" if its_own else "try a larger one"
        raise ValueError(f"data.image_size={image_size} does not suit {config.model_type!r} ({reason}); {remedy}")


def flops_per_image(config: PreTrainedConfig, factory: Any, channels: int, image_size: int) -> float | None:
    """Floating-point operations of forward and backward (3 x forward) of one image; None where they cannot be counted."""
    try:
        return 3.0 * _forward_flops(config, factory, channels, image_size)
    except (ValueError, RuntimeError):
        return None


def _forward_flops(config: PreTrainedConfig, factory: Any, channels: int, image_size: int) -> int:
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), torch.no_grad():
        model = factory.from_config(config).eval()
        with counter:
            image_logits(model, torch.zeros(1, channels, image_size, image_size))
    return int(counter.get_total_flops())
