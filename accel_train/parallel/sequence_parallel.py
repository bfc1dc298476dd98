"""Sequence parallelism: neighboring processes split every sequence, by DeepSpeed's Ulysses attention.

Each process of a group reads the same samples and computes its slice of every sequence. Modules that work on one
position at a time (embeddings, norms, linear layers, the loss) need no change. DeepSpeed's attention class exchanges
"all heads of my slice" for "some heads of all slices". It then attends and exchanges back (all-to-all; Jacobs et al.
2023, arXiv 2309.14509). Every process holds the same weights. DDP or FSDP2 therefore sums the gradients over all
processes of the run.

DeepSpeed's engine, data loader, and registration are not used. Its registration would replace transformers' `sdpa` for
the whole process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn

from accel_train.core.errors import setting_error
from accel_train.data.batch_sizes import divisors
from accel_train.data.labels import IGNORED_LABEL
from accel_train.parallel.dims import ParallelDims, parallel_dims
from accel_train.parallel.zero import import_deepspeed
from accel_train.runtime.process_group import COLLECTIVE_TIMEOUT_SECONDS
from accel_train.task import Collate, Collated, TaskData

SP_OFF = "Set parallel.sp_size to 1"
SPLIT = ("input_ids", "labels")
OF_DOCUMENTS = ("position_ids", "document_ids", "document_lengths")
"""Additional batch entries if several documents share a sequence."""
ROPES_OF_EACH_POSITION = ("default", "linear", "yarn", "llama3")
"""transformers names of rotary embeddings that rotate each position independently of the rest of the batch."""
_refusal = partial(setting_error, "parallel.sp_size")


@dataclass(frozen=True)
class Slices:
    """A task's collate that keeps one slice of each batch."""

    collate: Collate
    """Function from samples to a batch of whole sequences."""
    part: int
    num_parts: int

    def __call__(self, rows: Sequence[Any]) -> Collated:
        """Return this process's slice of the batch, with the slice's `num_targets`."""
        batch = slice_of(self.collate(rows), self.part, self.num_parts)
        return {**batch, "num_targets": int((batch["labels"] != IGNORED_LABEL).sum())}


def in_slices(data: TaskData, group: ParallelDims) -> TaskData:
    """Return the data with this process's slice of each sequence; unchanged if sequences are not split.

    Raises:
        ValueError: the data yields ready-made batches.
    """
    num_parts = group.sp_size
    if num_parts == 1:
        return data
    if data.step_batches is not None:
        raise _refusal(num_parts, "this data defines its own batches", SP_OFF)
    return replace(data, collate=Slices(data.collate, group.slice_index, num_parts))


def slice_of(batch: Mapping[str, Any], part: int, num_parts: int) -> Collated:
    """Return slice `part` (from 0) of `num_parts` equal slices of a batch.

    `input_ids`, `labels`, and `position_ids` become (B, T / num_parts). `document_lengths`, if present, stay the
    lengths in whole sequences, because attention spans those.

    labels[:, t] is the token after input t, already in the whole batch. The last target of a slice is therefore the
    first input of the next slice, and no target is lost between them.

    Raises:
        ValueError: the batch has entries that a plain language model does not read, or `num_parts` does not divide its
            length.
    """
    known = {*SPLIT, "num_targets", *(OF_DOCUMENTS if "document_lengths" in batch else ())}
    others = sorted(name for name in batch if name not in known)
    if others or any(name not in batch for name in SPLIT):
        problem = f"splits batches of input_ids and labels, but these batches have {', '.join(sorted(batch))}"
        raise _refusal(num_parts, problem, SP_OFF)
    num_samples, length = batch["input_ids"].shape
    if length % num_parts:
        raise _refusal(num_parts, f"does not divide a batch of {length} tokens", SP_OFF)
    begin, end = part * length // num_parts, (part + 1) * length // num_parts
    own: Collated = {name: batch[name][:, begin:end].contiguous() for name in SPLIT}
    if "document_lengths" not in batch:
        return {**own, "position_ids": torch.arange(begin, end).repeat(num_samples, 1)}
    positions = batch["position_ids"][:, begin:end].contiguous()
    return {**own, "position_ids": positions, "document_lengths": batch["document_lengths"]}


def check_attention(config: Any, attention: str, reason: str, size: int) -> None:
    """Check that a model's attention over slices equals its attention over the whole sequence.

    Raises:
        ValueError: other attention, rotary embeddings that depend on the batch, or heads that do not divide.
    """
    from accel_train.model.kernels.attention import CAUSAL_SDPA

    text = config.get_text_config()
    if attention != CAUSAL_SDPA:
        problem = f"needs plain causal attention over the whole sequence: {reason}"
        raise _refusal(size, problem, f"{SP_OFF}, or use another model, for example gpt2, llama, mistral or qwen3")
    for kind in _rope_types(getattr(text, "rope_parameters", None) or {}):
        if kind not in ROPES_OF_EACH_POSITION:
            problem = f"rope_type {kind} rotates by the longest position in the batch, which differs between slices"
            raise _refusal(size, problem, f"{SP_OFF}, or use rope_type {', '.join(ROPES_OF_EACH_POSITION)}")
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (key_heads % size and size % key_heads):
        fitting = [n for n in divisors(heads) if key_heads % n == 0 or n % key_heads == 0]
        pairs = f" and {key_heads} num_key_value_heads" if key_heads != heads else ""
        name = text.attribute_map.get("num_attention_heads", "num_attention_heads")
        problem = f"does not divide the {heads} {name}{pairs} of {text.model_type} into whole heads"
        raise _refusal(size, problem, f"Use {', '.join(map(str, fitting))}")


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types in a model's `rope_parameters`: one set, or one set per kind of layer."""
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for each in parameters.values():
        if isinstance(each, Mapping):
            yield from _rope_types(each)


def check_model(model: nn.Module, size: int) -> None:
    """Check that a model's attention is known to be exact over slices. A model without weights is allowed.

    Raises:
        ValueError: the model is not from transformers, has another attention, or heads that do not divide.
    """
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "set_attn_implementation", None)):
        problem = f"{type(model).__name__} is not a transformers model, so its attention cannot be replaced"
        raise _refusal(size, problem, SP_OFF)
    attention = config._attn_implementation
    check_attention(config, attention, f"{type(model).__name__} uses {attention}", size)


def tell_accelerator(accelerator: Accelerator, size: int) -> None:
    """Set the number of processes that split each sequence in Accelerate's ParallelismConfig.

    Other code reads it there. Call this after the Accelerator is built. On a CPU without FSDP2, Accelerate refuses a
    ParallelismConfig. With a sequence size in it, Accelerate makes no mesh, but copies of a sharded model need one.
    """
    if size == 1:
        return
    config = accelerator.parallelism_config
    if config is None:
        config = ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)
    config.sp_size = size
    accelerator.state.parallelism_config = config


def attend_over_slices(accelerator: Accelerator, model: nn.Module) -> None:
    """Make the model attend together with the processes that hold the other slices. All processes call this function.

    Raises:
        ValueError: see `check_model`.
    """
    size = parallel_dims(accelerator).sp_size
    if size == 1:
        return
    check_model(model, size)
    import_deepspeed()
    from deepspeed import comm
    from transformers import AttentionInterface

    from accel_train.model.kernels.attention import SEQUENCE_SDPA

    comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS))
    AttentionInterface.register(SEQUENCE_SDPA, UlyssesAttention(group))
    model.set_attn_implementation(SEQUENCE_SDPA)  # type: ignore[operator]


class UlyssesAttention:
    """DeepSpeed's attention over the slices of a process group, with the interface of a transformers attention."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._of_shape: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention of this slice, causal over all T positions.

        (B, heads, T / n, head size) -> (B, T / n, heads, head size). `attention_mask` may hold the starts of documents
        in whole sequences (`document_starts`).
        """
        batch, heads, length, size = query.shape
        # DeepSpeed gathers positions for attentions that look for packed documents in them. This attention does not.
        kwargs["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
        groups = getattr(module, "num_key_value_groups", None)
        joined = self._joined(batch, heads, key.shape[1], size)
        output, weights = joined(module, query, key, value, attention_mask, **kwargs)
        # DeepSpeed sets its own value where it repeats heads, but later code has all heads.
        if groups is not None:
            module.num_key_value_groups = groups
        return output.view(batch, length, heads, size), weights

    def _joined(self, batch: int, heads: int, key_heads: int, size: int) -> Any:
        """Return DeepSpeed's module for micro-batches of this shape. One module serves one shape, with any length."""
        shape = (batch, heads, key_heads, size)
        if shape not in self._of_shape:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            from accel_train.model.kernels.attention import causal_sdpa

            self._of_shape[shape] = UlyssesSPAttentionHF(
                causal_sdpa,
                batch_size=batch,
                attn_head_count=heads,
                attn_head_size=size,
                kv_head_count=key_heads,
                # Only a debugging mode reads it.
                num_hidden_layers=1,
                process_group=self.group,
                seq_length_is_variable=True,
            )
        return self._of_shape[shape]
