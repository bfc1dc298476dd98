"""Sequences split over neighbouring processes (sequence parallelism), by DeepSpeed's Ulysses attention.

Each process of a group reads the same samples and computes its slice of every sequence. What works on one position at a time
(embeddings, norms, linear layers, the loss) needs nothing else. Attention does: DeepSpeed's class exchanges "all heads of my
slice" for "some heads of all slices", attends, and exchanges back (all-to-all; Jacobs et al. 2023, arXiv 2309.14509). Weights are
those of every process, so their gradients are summed over all processes of the run, as ever: by DDP, or by FSDP2.

DeepSpeed's engine and its data loader are not used, nor is its registration: that puts itself in the place of transformers'
own `sdpa`, for everything else in the process as well.
"""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn

from accel_train.batching import divisors
from accel_train.data_group import data_group
from accel_train.model_check import pretrained_config
from accel_train.precision import COLLECTIVE_TIMEOUT_SECONDS
from accel_train.recipe import Parallel, Recipe
from accel_train.sharding import processes_on_machine
from accel_train.state import Choice
from accel_train.task import TASKS, Task
from accel_train.zero import import_deepspeed

BY_POSITION = "loss_is_by_position"
"""What a task of one's own says that may have its sequences split: its loss is a sum over positions, of each one's logits and label."""

ROPES_OF_EACH_POSITION = ("default", "linear", "yarn", "llama3")
"""Rotary embeddings by transformers' names that turn a position the same way whatever else is in the batch."""


def check_sequence_parallel(recipe: Recipe, task: Task) -> None:
    """Refuse what cannot be trained on slices of sequences, before data is read or a model is built.

    Raises:
        ValueError: names the setting, why, and what to do.
    """
    size = recipe.parallel.sp_size
    if size == 1:
        return
    for what, remedy in _refused(recipe, task):
        raise ValueError(f"parallel.sp_size={size} {what}; {remedy}")
    if recipe.task not in TASKS:
        return  # its model tells (`check_model`)
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from accel_train.causal_attention import choose_attention

    fields = dict(recipe.model.config or {})
    config = pretrained_config(recipe) if not fields else CONFIG_MAPPING[fields.pop("model_type")](**fields)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:  # else the task says that it is no language model
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        attention = choose_attention("auto", model_class, config, recipe.data.sequence_length)
        _check_attention(config, attention.value, attention.reason, size)


def _refused(recipe: Recipe, task: Task) -> Iterator[tuple[str, str]]:
    """What is asked and cannot be had, and what to do."""
    size, data, off = recipe.parallel.sp_size, recipe.data, "or set parallel.sp_size to 1"
    if recipe.task in TASKS and recipe.task != "causal-lm":
        yield f"is for causal-lm, and task is {recipe.task}", "set it to 1"
    if not _is_by_position(task):
        said = f"needs a loss that is a sum over positions, which {recipe.task} does not say of its own"
        yield said, f"set {BY_POSITION} = True in the class that defines it where that is so, {off}"
    if data.format != "text":
        yield f"is for text, and data.format is {data.format}, whose rows share windows under a mask", "set it to 1"
    if data.mask_documents:
        why = "does not go with data.mask_documents: attention over slices takes no mask"
        yield why, f"leave that out, {off}"
    if data.sequence_length % size:
        nearest = data.sequence_length // size * size
        fitting = " or ".join(str(length) for length in (nearest, nearest + size) if length)
        yield f"does not divide data.sequence_length={data.sequence_length}", f"use {fitting} tokens, {off}"
    if recipe.model.attn_implementation != "auto":
        asked = recipe.model.attn_implementation
        yield f"attends by causal SDPA, and model.attn_implementation is {asked}", f"set that to auto, {off}"
    if recipe.precision.compile is not False:
        why = "does not go with precision.compile: DeepSpeed's exchange of heads between processes cannot be compiled"
        yield why, f"leave that out, {off}"
    if find_spec("deepspeed") is None:
        yield "needs the package deepspeed", "install it: pip install 'accel-train[deepspeed]'"


def _is_by_position(task: Task) -> bool:
    """Whether the class whose loss it is says so itself: one that puts another in its place has not been asked."""
    classes = type(task).__mro__
    for method in ("loss_sum", "evaluate_batch"):
        defined = next((number for number, each in enumerate(classes) if method in vars(each)), 0)
        said = (vars(each)[BY_POSITION] for each in classes[: defined + 1] if BY_POSITION in vars(each))
        if next(said, False) is not True:
            return False
    return True


def _check_attention(config: Any, attention: str, reason: str, size: int) -> None:
    from accel_train.causal_attention import CAUSAL_SDPA

    text = config.get_text_config()
    if attention != CAUSAL_SDPA:
        raise ValueError(
            f"parallel.sp_size={size} needs plain causal attention over the whole sequence: {reason}. Set it to 1, or take another "
            "model: gpt2, llama, mistral and qwen3 are some that can"
        )
    for kind in _rope_types(getattr(text, "rope_parameters", None) or {}):
        if kind not in ROPES_OF_EACH_POSITION:
            raise ValueError(
                f"parallel.sp_size={size}: rope_type {kind} turns a position by the longest that it sees, and each slice sees others; "
                f"use {', '.join(ROPES_OF_EACH_POSITION)}, or set it to 1"
            )
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (key_heads % size and size % key_heads):
        fitting = [n for n in divisors(heads) if key_heads % n == 0 or n % key_heads == 0]
        pairs = f" and {key_heads} num_key_value_heads" if key_heads != heads else ""
        raise ValueError(
            f"parallel.sp_size={size} does not divide the {heads} {text.attribute_map.get('num_attention_heads', 'num_attention_heads')}"
            f"{pairs} of {text.model_type}, and each process attends with whole heads; use {', '.join(map(str, fitting))}"
        )


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Of a model's `rope_parameters`, which may be one set or one for each kind of layer."""
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for each in parameters.values():
        if isinstance(each, Mapping):
            yield from _rope_types(each)


def check_model(model: nn.Module, size: int) -> None:
    """Refuse a model whose attention is not known to be exact over slices; one without weights will do.

    Raises:
        ValueError: it is no model of transformers, has another attention, or heads that do not divide.
    """
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "set_attn_implementation", None)):
        raise ValueError(
            f"parallel.sp_size={size}: {type(model).__name__} is no model of transformers, whose attention could be exchanged; "
            "set it to 1"
        )
    attention = config._attn_implementation
    _check_attention(config, attention, f"that of {type(model).__name__} is {attention}", size)


def choose_sequences(section: Parallel, world_size: int, on_machine: int | None = None) -> Choice[int]:
    """Processes that split each sequence, with what that means; a machine has `on_machine` of them, or what the launcher says.

    Raises:
        ValueError: the number of processes is no multiple of them.
    """
    size = section.sp_size
    if world_size % size:
        raise ValueError(
            f"parallel.sp_size={size} does not divide the {world_size} process{'es' * (world_size > 1)} of this run; use "
            f"{', '.join(map(str, divisors(world_size)))}, or run on {size} or {2 * size} processes"
        )
    reason = f"{size} neighbours read the same samples, each has a slice of every sequence, and DeepSpeed's attention joins them"
    on_machine = on_machine or processes_on_machine(world_size)
    if on_machine % size:
        reason += (
            f"; they reach over machines of {on_machine} processes, and each layer waits for the network several times: "
            f"use {', '.join(map(str, divisors(on_machine)))}"
        )
    return Choice(size, reason)


def tell_accelerator(accelerator: Accelerator, size: int) -> None:
    """Let Accelerate's ParallelismConfig say how many processes split each sequence, so that whoever asks finds it there.

    Once it is built: on a CPU Accelerate knows no ParallelismConfig without FSDP2, and one with sequences in it makes no mesh,
    which copies of a sharded model need.
    """
    if size == 1:
        return
    config = accelerator.parallelism_config
    if config is None:
        config = ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)
    config.sp_size = size
    accelerator.state.parallelism_config = config


def attend_over_slices(accelerator: Accelerator, model: nn.Module) -> None:
    """From now on the model attends together with those that have the other slices of its sequences, if there are any; all
    processes call it.

    Raises:
        ValueError: as `check_model`.
    """
    size = data_group(accelerator).num_slices
    if size == 1:
        return
    check_model(model, size)
    import_deepspeed()
    from deepspeed import comm
    from transformers import AttentionInterface

    from accel_train.causal_attention import SEQUENCE_SDPA

    comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS))
    AttentionInterface.register(SEQUENCE_SDPA, UlyssesAttention(group))
    model.set_attn_implementation(SEQUENCE_SDPA)  # type: ignore[operator]


class UlyssesAttention:
    """DeepSpeed's attention over the slices of a group of processes, with the face of one of transformers' attentions."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._of_shape: dict[tuple[int, ...], Any] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, heads, T / n, head size) of this slice -> (B, T / n, heads, head size), causal over all T positions."""
        assert attention_mask is None, "an attention of this name is given no mask"
        batch, heads, length, size = query.shape
        # DeepSpeed gathers positions for attentions that look for packed documents in them. Ours does not.
        kwargs["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
        groups = getattr(module, "num_key_value_groups", None)
        joined = self._joined(batch, heads, key.shape[1], size)
        output, weights = joined(module, query, key, value, None, **kwargs)
        if groups is not None:  # it sets its own where it repeats heads, and what comes after has all of them
            module.num_key_value_groups = groups
        return output.view(batch, length, heads, size), weights

    def _joined(self, batch: int, heads: int, key_heads: int, size: int) -> Any:
        """DeepSpeed's module for micro-batches of this size: it is made for one, and takes any length."""
        shape = (batch, heads, key_heads, size)
        if shape not in self._of_shape:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            from accel_train.causal_attention import causal_sdpa

            self._of_shape[shape] = UlyssesSPAttentionHF(
                causal_sdpa,
                batch_size=batch,
                attn_head_count=heads,
                attn_head_size=size,
                kv_head_count=key_heads,
                num_hidden_layers=1,  # of a mode for debugging
                process_group=self.group,
                seq_length_is_variable=True,
            )
        return self._of_shape[shape]
