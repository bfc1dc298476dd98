"""Tensor parallelism: neighboring processes split layers, by the plan that transformers has for a model.

transformers' styles split the weights that the plan names. The rest (norms, for example) becomes replicated tensors of
the same mesh. The gradient norm, the fused optimizer, and a checkpoint then see tensors of one kind, each counted once.
(Accelerate 1.15's `prepare` should do this, but the class that it uses is missing in transformers 5.23.)
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from accel_train.core.errors import setting_error
from accel_train.data.batch_sizes import divisors
from accel_train.model.pretrained import value_of

ROWS, COLUMNS, WHOLE = 0, -1, None
STYLES: dict[str, int | None] = {
    "colwise": ROWS,
    "colwise_gather_output": ROWS,
    "embedding_rowwise": ROWS,
    "rowwise": COLUMNS,
    "rowwise_split_input": COLUMNS,
    "replicated_with_grad_allreduce": WHOLE,
}
"""transformers styles that are known to train as one process does, and the dimension of a weight that each splits."""
SUMMED = "replicated_with_grad_allreduce"
"""Style of a replicated weight that each process applies to its own heads. Its gradient is the sum over processes."""
FAILING = ("gemma3n_text",)
"""Models with a plan that fails in the first step: gemma3n multiplies split and whole tensors between its layers."""
MODELS = "Use for example llama, mistral, qwen2, qwen3, gemma or gpt_neox, or set parallel.tp_size to 1"
_refusal = partial(setting_error, "parallel.tp_size")


def check_plan(config: Any, plan: Mapping[str, str], size: int) -> None:
    """Check that a model's plan can split it over `size` processes.

    Raises:
        ValueError: the model has no plan, a plan with other styles, or heads that do not divide.
    """
    text = config.get_text_config()
    if not plan:
        problem = f"transformers does not have a plan to split {text.model_type} (base_model_tp_plan)"
        raise _refusal(size, problem, f"{MODELS}, which leaves the model to fsdp2")
    if text.model_type in FAILING:
        raise _refusal(size, f"the plan of {text.model_type} fails in the first step", MODELS)
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        problem = f"the plan of {text.model_type} uses unsupported styles: {', '.join(unknown)}"
        raise _refusal(size, problem, MODELS)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = value_of(text, name)
        if isinstance(heads, int) and heads % size:
            problem = f"does not divide the {heads} {text.attribute_map.get(name, name)} of {text.model_type}"
            raise _refusal(size, problem, f"Use {', '.join(map(str, divisors(heads)))}, so that heads stay whole")


def styles_of(model: nn.Module, size: int) -> dict[str, str]:
    """Return the style of each module and parameter that the model's plan names, by its full name.

    Raises:
        ValueError: no plan, styles or heads that do not fit, a split weight that is tied to a whole weight, or a
            weight between split layers that the plan leaves out.
    """
    plan = getattr(model, "tp_plan", None)
    config = getattr(model, "config", None)
    expand = getattr(model, "_expand_parallel_plan", None)
    if config is None or not callable(expand):
        problem = f"{type(model).__name__} is not a transformers model, so it does not define how to split it"
        raise _refusal(size, problem, "Set parallel.tp_size to 1")
    check_plan(config, plan or {}, size)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    found: dict[str, str] = expand(plan)
    for first, *others in tied_names(model):
        split = {name: STYLES.get(found.get(name.rpartition(".")[0], SUMMED)) for name in (first, *others)}
        if len(set(split.values())) > 1:
            problem = f"{first} and {others[0]} are tied, but the plan of {config.model_type} splits only one of them"
            remedy = "Set model.config.tie_word_embeddings to false, or parallel.tp_size to 1"
            raise _refusal(size, problem, remedy)
    found = {name: style for name, style in found.items() if name in parameters or name in modules}
    return found | dict.fromkeys(_activations_between(model, found, size), SUMMED)


def _activations_between(model: nn.Module, styles: Mapping[str, str], size: int) -> list[str]:
    """Return the trained activations between split layers. Each process applies them to its own columns.

    Raises:
        ValueError: other weights lie between split layers, and the plan leaves them out. Whether their gradients are
            sums over the processes is then unknown.
    """
    siblings: dict[str, set[str]] = {}
    for name, style in styles.items():
        siblings.setdefault(name.rpartition(".")[0], set()).add(style)
    found = []
    for name, module in model.named_modules():
        parents = [name[:at] for at, letter in enumerate(name) if letter == "."] + [name]
        is_between = any({"colwise", "rowwise"} <= siblings.get(parent, set()) for parent in parents)
        own = [each for each, _ in module.named_parameters(prefix=name, recurse=False) if each not in styles]
        if name in styles or not is_between or not own:
            continue
        if type(module).__module__ != "transformers.activations":
            kind = type(model).__name__
            problem = f"transformers' plan for {kind} leaves out {own[0]}, which lies between split layers"
            raise _refusal(size, problem, MODELS)
        found.append(name)
    return found


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(module: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie the parameters again: replace all parameters of each list by its first one."""
    for first, *others in tied:
        for name in others:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, module.get_parameter(first))


def split_layers(model: nn.Module, mesh: DeviceMesh) -> str:
    """Split a model in place over the processes of a 1-D mesh; return how many weights are split, in words.

    All processes must hold the same weights, or weights on the meta device.

    Raises:
        ValueError: see `styles_of`.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    styles, tied = styles_of(model, mesh.size()), tied_names(model)
    split = {name: style for name, style in styles.items() if style != SUMMED}
    apply_tensor_parallelism(model, mesh, split)
    tie(model, tied)
    whole = {module: _hold_alike(module, mesh) for module in model.modules()}
    summed = {module for name, module in model.named_modules() if styles.get(name) == SUMMED}
    for module in model.modules():
        _show_plain(module, whole, summed)
    held = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    count = sum(not all(each.is_replicate() for each in parameter.placements) for parameter in held)
    return f"{count} weights are split over groups of {mesh.size()} processes, and each process holds the others"


def _hold_alike(module: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Convert a module's whole parameters to replicated DTensors, and return their names."""
    whole = {name: p for name, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor)}
    for name, parameter in whole.items():
        alike = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(alike, requires_grad=parameter.requires_grad))
    return list(whole)


def _show_plain(module: nn.Module, whole: Mapping[nn.Module, Sequence[str]], summed: Collection[nn.Module]) -> None:
    """Let the module's forward see plain tensors in place of the replicated DTensors, also in its convolutions.

    State-space and linear-attention layers read the weight of their convolution without calling it.
    """
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    shown = [(each, name) for each in (module, *convolutions) for name in whole[each]]
    if not shown:
        return
    forward = module.forward

    def with_plain(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for owner, name in shown:
                # FSDP has set the gathered parameter there.
                if isinstance(held := getattr(owner, name), DTensor):
                    placements = [Partial() if owner in summed else Replicate()]
                    # An attribute of the instance takes precedence over a parameter.
                    vars(owner)[name] = held.to_local(grad_placements=placements)
                    stack.callback(vars(owner).pop, name)
            return forward(*args, **kwargs)

    module.forward = with_plain


def keep_gradients_in_parts(model: nn.Module) -> None:
    """Redistribute each gradient to the layout of its weight when it is computed.

    An embedding's gradient arrives whole on every process. This is for models without FSDP2, because FSDP2
    redistributes gradients in its reduction. Call it after the weights have storage.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_like_its_weight)


def _like_its_weight(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    assert isinstance(parameter, DTensor)
    assert isinstance(gradient, DTensor)
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def part_shapes(model: nn.Module, size: int) -> dict[int, torch.Size]:
    """Return the shape of the largest shard of each parameter over `size` processes, by the parameter's id.

    Raises:
        ValueError: see `styles_of`.
    """
    styles = styles_of(model, size)
    shapes: dict[int, torch.Size] = {}
    for name, parameter in model.named_parameters():
        style = styles.get(name, styles.get(name.rpartition(".")[0], SUMMED))
        dimension = STYLES[style]
        shape = list(parameter.shape)
        # A bias is split by rows, or not at all.
        if dimension is not None and (dimension == ROWS or len(shape) > 1):
            shape[dimension] = -(-shape[dimension] // size)
        shapes[id(parameter)] = torch.Size(shape)
    return shapes
