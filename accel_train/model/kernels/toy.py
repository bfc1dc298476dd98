"""Models at toy size: the smallest configuration with the same kinds of modules and layers as a given one."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, TypeVar

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from accel_train.core.state import JsonRecord
from accel_train.model.kernels.chunked_loss import LOGITS_AT_ONCE, why_whole
from accel_train.model.pretrained import whole_numbers
from accel_train.model.tensors import without_values

SMALL = 2_000_000
"""Parameters up to which a model is probed at its own size."""
LARGEST = 40_000_000
"""Maximum parameters of a toy model. Its forward pass takes about a second on one core."""
LARGEST_WITH_VOCABULARY = 5 * LARGEST // 2
"""The same for a model that keeps its vocabulary, whose rows may be most of it."""
VOCABULARY = 128

T = TypeVar("T")

_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|depth)$")
_HEAD_SIZE = re.compile(r"head_?dim|d_head|dim_head|head_size|kv_channels|d_kv|rotary_dim|rope_dim")
_HEADS = re.compile(r"heads?(_per_layer)?$")
_WIDTH = re.compile(r"size|dim|rank|embd|ffn|inner|width|d_model|d_ff|dff|state|intermediate|channels|ssm|hidden")
_NO_WIDTH = re.compile(
    r"vocab|position|window|chunk|block|kernel|patch|image|expand|buckets|group|spatial|temporal|max_|type|conv|layers"
    r"|lm_head|num_"
)
_TOKEN_ID = re.compile(r"token_(id|index)$")
_OF_FILES = {"transformers_version", "architectures", "dtype", "_name_or_path", "_attn_implementation_autoset"}


def toy_model(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the smallest causal LM with the same kinds of modules and layers as the configuration's model.

    Its weights are larger than initial weights, so that leaks from one document to the next are visible.

    Raises:
        ValueError: the model is large, and no smaller configuration has the same kinds of modules.
    """

    def build(of: PreTrainedConfig, device: str) -> PreTrainedModel:
        return _built(AutoModelForCausalLM, of, device, trust_remote_code=trust_remote_code)

    def check(small: PreTrainedConfig) -> PreTrainedModel:
        model = _with_large_weights(build(small, "cpu"))
        if small is not config:
            model.eval()(input_ids=torch.full((1, 9), 3), use_cache=False)
        return model

    return _find(config, build, check)


def chunks_loss(config: PreTrainedConfig, num_positions: int) -> bool:
    """Return whether a causal LM computes its loss in chunks if the recipe leaves the choice to the program."""
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 0
    is_large = num_positions * vocabulary > LOGITS_AT_ONCE
    return is_large and why_whole(_built(AutoModelForCausalLM, config, "meta")) is None


def toy_fields(config: PreTrainedConfig, *, is_causal: bool, check: Callable[[JsonRecord], None]) -> JsonRecord:
    """Return `model.config` of the smallest model of a kind that `check` accepts. Tokens and positions are kept.

    Its initial weights are larger than usual, so that attention counts, and it has no dropout.

    Raises:
        ValueError: as in `toy_model`, or `check` accepts no small configuration.
    """
    factory = AutoModelForCausalLM if is_causal else AutoModel

    def of(small: PreTrainedConfig) -> JsonRecord:
        if is_causal and small is not config:
            _built(factory, small, "cpu").eval()(input_ids=torch.full((1, 9), 3), use_cache=False)
        fields = type(small).from_dict(_without_dropout(small.to_dict())).to_diff_dict()
        fields = {name: fields[name] for name in sorted(fields.keys() - _OF_FILES)}
        check(fields)
        return fields

    return _find(config, lambda small, device: _built(factory, small, device), of, keeps_vocabulary=True)


def _without_dropout(fields: Mapping[str, Any]) -> JsonRecord:
    def of(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _without_dropout(value)
        if isinstance(value, float) and re.search(r"dropout|pdrop|drop_path|layerdrop|drop_rate|jitter", name):
            return 0.0
        return 0.1 if name == "initializer_range" else value

    return {name: of(name, value) for name, value in fields.items()}


def _built(factory: Any, config: PreTrainedConfig, device: str, **options: Any) -> PreTrainedModel:
    config = deepcopy(config)
    config.use_cache = False
    with without_values() if device == "meta" else torch.device(device):
        return factory.from_config(config, dtype=torch.float32, **options)


def _find(
    config: PreTrainedConfig,
    build: Callable[[PreTrainedConfig, str], PreTrainedModel],
    check: Callable[[PreTrainedConfig], T],
    *,
    keeps_vocabulary: bool = False,
) -> T:
    """Return the result of `check` for the first small configuration that it accepts."""
    try:
        whole = build(config, "meta")
    except Exception as error:
        raise ValueError(
            f"transformers cannot build this configuration of {config.model_type}: {in_words(error)}"
        ) from error
    if whole.num_parameters() <= SMALL:
        return check(config)
    kinds, num_layers = _kinds(whole), getattr(config.get_text_config(), "num_hidden_layers", 2)
    problem = "none is small"
    counts = [count for count in (2, 3, 4, 6, 8, 12, 16, 24) if count < num_layers] + [num_layers]
    # Fractions of a head and groups of heads need more than the minimum.
    sizes = ((4, 16), (8, 16), (4, 32), (16, 16), (1024, 32), (4, 1024), (1024, 1024))
    for layers, (heads, head_size) in product(counts, sizes):
        try:
            fields = _shrunk_fields(config.to_dict(), layers, heads, head_size, keeps_vocabulary)
            small = type(config).from_dict(fields)
            small._name_or_path = config._name_or_path
            model = build(small, "meta")
            if _kinds(model) != kinds:
                problem = "a kind of layer is missing"
                continue
            if model.num_parameters() <= (LARGEST_WITH_VOCABULARY if keeps_vocabulary else LARGEST):
                return check(small)
        except Exception as error:
            problem = in_words(error)
    raise ValueError(f"no smaller configuration of {config.model_type} has all its kinds of layers: {problem}")


def _kinds(model: PreTrainedModel) -> set[str]:
    """Return the names of all module classes, and of all types in the configuration's lists of layers."""
    text = model.config.get_text_config()
    lists = [of for name, of in text.to_dict().items() if "layer" in name and isinstance(of, list)]
    listed = {each for of in lists for each in map(str, of) if not each.isdigit()}
    return {type(module).__name__ for module in model.modules()} | listed


def _shrunk_fields(
    fields: Mapping[str, Any], layers: int, heads: int, head_size: int, keeps_vocabulary: bool
) -> JsonRecord:
    """Return the fields of a configuration with `layers` layers and at least `heads` heads of `head_size` elements.

    Ratios are kept.
    """
    counts = [each for name, value in fields.items() if _is_heads(name) for each in whole_numbers(value) if each > 0]
    sizes = [
        each for name, value in fields.items() if _HEAD_SIZE.search(name) for each in whole_numbers(value) if each > 0
    ]
    widths = [each for name in ("hidden_size", "n_embd", "d_model") for each in whole_numbers(fields.get(name))]
    if not sizes and counts and widths:
        sizes = [widths[0] // max(counts)]
    fewer = _common_divisor(counts, heads)
    narrower = _common_divisor(sizes, head_size)
    if not counts and widths:
        narrower = _common_divisor(widths, 64)
    depth = max((value for name, value in fields.items() if _LAYERS.match(name) and type(value) is int), default=0)

    def shrink(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            is_part = "model_type" in value
            return _shrunk_fields(value, layers, heads, head_size, keeps_vocabulary) if is_part else value
        if type(value) is int and _LAYERS.match(name):
            return min(value, layers)
        if isinstance(value, list | str) and len(value) == depth > layers and name != "model_type":
            value = value[:layers]
        if isinstance(value, list):
            if re.search(r"(ind(ic|ex)es|idxs|layer_ids|layers)$", name) and all(type(each) is int for each in value):
                return [each for each in value if each < layers] if len(value) != layers else value
            return [shrink(name, each) for each in value]
        if type(value) is not int:
            return value
        if "vocab_size" in name or _TOKEN_ID.search(name):
            if keeps_vocabulary:
                return value
            return min(value, VOCABULARY) if "vocab_size" in name else value % VOCABULARY
        if _HEAD_SIZE.search(name):
            return _divided(value, narrower)
        if _is_heads(name):
            return _divided(value, fewer, least=1)
        if _WIDTH.search(name) and not _NO_WIDTH.search(name):
            return _divided(value, fewer * narrower)
        return value

    dropped = ("dtype", "torch_dtype", "transformers_version")
    return {name: shrink(name, value) for name, value in fields.items() if name not in dropped}


def _is_heads(name: str) -> bool:
    return bool(_HEADS.search(name)) and not _HEAD_SIZE.search(name) and "chunk" not in name


def _common_divisor(numbers: Sequence[int], least: int) -> int:
    """Return the largest power of two that divides all numbers and leaves their maximum at `least` or above."""
    divisor = 1
    while numbers and max(numbers) // (2 * divisor) >= least and all(each % (2 * divisor) == 0 for each in numbers):
        divisor *= 2
    return divisor


def _divided(value: int, by: int, least: int = 8) -> int:
    return value if value < least else max(least, value // by)


def _with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Scale random matrices to a gain of about 1 and shift vectors, in place, and return the model."""
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim < 2:
                each.add_(0.1 * torch.randn_like(each))
                continue
            deviation, mean = float(each.std()), float(each.mean())
            if deviation > 0 and abs(mean) < 0.5 * deviation:
                each.mul_(1 / (deviation * each.shape[-1] ** 0.5))
    return model


def in_words(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
