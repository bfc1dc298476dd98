"""Low-rank adapters (LoRA, Hu et al. 2021), by peft: added before training, merged into the weights after it."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from accel_train.core.errors import first_line
from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.model.freeze import ends_with, matches, matching
from accel_train.model.tensors import numel, trained
from accel_train.recipe.schema import LoRA, Model

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Model types whose kernels read the weight of `out_proj` past its adapter, which peft therefore refuses."""


def add_adapters(model: nn.Module, section: LoRA) -> Choice[int]:
    """Add adapters to the model in place; return the number of trained elements.

    Only the adapters and the weights that `train_also` names are trained. Adapters start as the identity, so the
    model's output does not change.

    Raises:
        ValueError: an entry of `target_modules` or `train_also` matches nothing, or peft cannot adapt the model.
    """
    from peft import inject_adapter_in_model

    whole = _trained_whole(model, section)
    config = adapter_config(model, section)
    try:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ValueError(f"model.lora.target_modules={section.target_modules!r}: {first_line(error)}") from error
    # peft asks for an input embedding, and transformers raises this for models without one (Deformable DETR).
    except NotImplementedError as error:
        problem = f"peft cannot adapt {type(model).__name__} ({first_line(error)})"
        raise ValueError(f"model.lora: {problem}. Leave it out, or name another model") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name in whole)
    count = numel(trained(model).values())
    also = f", and {format_count(len(whole), 'tensor')} trained whole" if whole else ""
    scale = f"scaled by {section.alpha:g} / {section.rank}"
    total = numel(model.parameters())
    share = f"trained numbers, {100 * count / total:.2g} % of the weights"
    reason = f"{share}: rank {section.rank}, {scale}, in {format_count(len(_adapted(model)), 'layer')}"
    return Choice(count, reason + also + _frozen_experts(model, total))


def _trained_whole(model: nn.Module, section: LoRA) -> set[str]:
    """Return the names of the parameters that `train_also` names. Its default names heads that few models have."""
    names = [name for name, _ in model.named_parameters()]
    if section.train_also == type(section).model_fields["train_also"].default:
        return {name for name in names if matches(name, section.train_also)}
    return matching(names, section.train_also, "model.lora.train_also")


def _frozen_experts(model: nn.Module, total: int) -> str:
    """Return a note about fused experts without adapters: one parameter for all experts of a layer, not a module."""
    fused = [each for name, each in model.named_parameters() if each.ndim == 3 and ".experts." in name]
    share = numel(each for each in fused if not each.requires_grad) / total
    return f"; the experts, {100 * share:.2g} % of the weights, have no adapters and stay frozen" if share else ""


def adapter_config(model: nn.Module, section: LoRA) -> "LoraConfig":
    """Return peft's configuration for a model.

    `all-linear` becomes a list of layers, without the output embedding, layers with a forward of their own (routers),
    `out_proj` of Mamba, and the layers that `train_also` trains whole.
    """
    from peft import LoraConfig

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if section.target_modules != "all-linear":
        targets = list(section.target_modules)
        # A name that peft does not find is dropped if it finds another.
        modules = [name for name, _ in model.named_modules() if name]
        matching(modules, targets, "model.lora.target_modules", kind="module", match=ends_with)
    else:
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        left_out = _trained_whole(model, section)
        if isinstance(model, PreTrainedModel) and model.config.model_type in MAMBA:
            left_out |= {f"{name}.weight" for name in layers if name.endswith(".out_proj")}
        targets = [
            name
            for name, module in layers.items()
            if module is not head and is_linear(module) and f"{name}.weight" not in left_out
        ]
    # GPT-2 keeps its matrices as (inputs, outputs), in the class Conv1D.
    chosen = [module for name, module in layers.items() if any(ends_with(name, end) for end in targets)]
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen),
    )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes the product with its matrix. Some subclasses route tokens, or split heads."""
    own = type(module).forward
    return own in (nn.Linear.forward, Conv1D.forward) or type(module).__name__ == "FalconLinear"


def without_adapters(model: nn.Module, *, merge: bool = False) -> nn.Module:
    """Return the model without adapters; `merge` first adds them to its weights: W + alpha / rank * B A.

    The result shares all weights that do not change with the model.
    """
    names = _adapted(model)
    layers: list[Any] = [model.get_submodule(name) for name in names] if merge else []
    changing = {id(each) for layer in layers for each in layer.get_base_layer().parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    bare = copy.deepcopy(model, {id(each): each for each in tensors if id(each) not in changing})
    for name in names:
        layer: Any = bare.get_submodule(name)
        if merge:
            layer.merge()
        bare.set_submodule(name, layer.get_base_layer())
    return bare


def save_adapters(model: nn.Module, recipe_model: Model, folder: Path) -> None:
    """Write only the adapters, in the format that `PeftModel.from_pretrained(base, folder)` reads."""
    assert recipe_model.lora is not None
    folder.mkdir(exist_ok=True)
    bare = without_adapters(model)
    config = adapter_config(bare, recipe_model.lora)
    config.base_model_name_or_path = recipe_model.pretrained
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": parameter.detach().contiguous().cpu()
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def _adapted(model: nn.Module) -> list[str]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
