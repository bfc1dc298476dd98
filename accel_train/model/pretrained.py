"""Whether transformers knows every field of `model.config`, and what the configuration of a pretrained model is."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.recipe import Recipe
from accel_train.recipe_writing import show, who_set

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_model_config(recipe: Recipe) -> None:
    """Refuse a `model.config` that transformers would take in silence, or only refuse once the model is built.

    Raises:
        ValueError: an unknown model_type or field, a value of the wrong type, or too few positions for the samples.
    """
    if recipe.model.config is None:
        return
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    fields = dict(recipe.model.config)
    model_type = fields.pop("model_type")
    at = f"({who_set(recipe, 'model.config')})"
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), CONFIG_MAPPING, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "gpt2 and llama are two"
        raise ValueError(f"model.config.model_type={show(model_type)} {at} is no model type of transformers; {remedy}")
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    known = {*default.to_dict(), *config_class.attribute_map} - {"model_type", "transformers_version"}
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}  # what transformers 4 called them, and 5 still reads
    problems = []
    for field in fields.keys() - known:
        near = get_close_matches(field, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
        where = recipe.origin(f"model.config.{field}")
        problems.append(
            f"model.config.{field} ({where}): {model_type} has no such field, and would ignore it; {remedy}"
        )
    for field, value in fields.items():
        usual = getattr(default, field, None)
        counts = (value, usual) if isinstance(value, list) and isinstance(usual, list | tuple) else ([value], [usual])
        if (
            not field.endswith(("_id", "_index"))
            and any(type(each) is int and each < 0 for each in counts[0])
            and all(type(each) is int and each >= 0 for each in counts[1])
        ):
            where = recipe.origin(f"model.config.{field}")
            problems.append(
                f"model.config.{field}={show(value)} ({where}): must not be negative; {model_type} has {usual} by default"
            )
    if problems:
        raise ValueError("\n".join(sorted(problems)))
    unset = {name: None for name in ("bos_token_id", "eos_token_id") if name in known}  # a run takes the tokenizer's
    try:
        config = config_class(**unset | fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.config {at} is not accepted by {model_type}: {reason}") from error
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    heads_have_own_size = any(name in field for field in known for name in ("head_dim", "d_kv", "kv_channels"))
    if isinstance(hidden, int) and isinstance(heads, int) and not heads_have_own_size and (heads < 1 or hidden % heads):
        names = [config_class.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")]
        raise ValueError(
            f"model.config {at}: {names[0]}={hidden} is not divisible by {names[1]}={heads}; change one of them"
        )
    rotary = getattr(config, "rope_parameters", None) is not None
    positions = getattr(config, "max_position_embeddings", None)
    reads_windows = recipe.task == "causal-lm" or ":" in recipe.task
    if reads_windows and positions is not None and not rotary and recipe.data.sequence_length > positions:
        field = config_class.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ValueError(
            f"data.sequence_length={recipe.data.sequence_length} ({who_set(recipe, 'data.sequence_length')}) is longer than "
            f"the {positions} positions of {model_type}; raise model.config.{field}, or lower data.sequence_length"
        )


def pretrained_config(recipe: Recipe) -> "PreTrainedConfig":
    """The configuration of `model.pretrained`; no weights are loaded.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoConfig

    name = recipe.model.pretrained
    assert name is not None, "the recipe names a pretrained model"
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        if "custom code" in reason:
            reason = "it brings code of its own; read that, and give --model.trust_remote_code true to run it"
        raise ValueError(
            f"model.pretrained={name!r} ({who_set(recipe, 'model.pretrained')}) cannot be loaded: {reason}"
        ) from error


def check_weight_files(folder: Path) -> None:
    """Refuse a folder without weights, or with weights that a copy or a full disk has cut short; only headers are read.

    Raises:
        ValueError: names the file.
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
