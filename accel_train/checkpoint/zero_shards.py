"""Parts of weights and moments under DeepSpeed ZeRO: gather them, and load them back.

DeepSpeed concatenates the parameters of a group into a flat tensor (in stage 3, each process's share of each
parameter). The optimizer works on the flat tensor. A checkpoint holds tensors by name, as under DDP.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.checkpoint.contents import check_known, restore_extra_state
from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.core.work import beat
from accel_train.model.tensors import Tensors, packed, split_state

COUNTER = "step"
"""Optimizer entry that is one number for all elements."""


@dataclass(frozen=True)
class Part:
    """One parameter's shard on this process.

    It has `numel` elements: from `offset` in the full parameter, and from `start` in `flat`.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    """Shape of the full parameter."""
    flat: Tensor
    """Tensor that the optimizer steps, and the key of its state. For a frozen weight, the local share."""
    start: int
    offset: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """Return this part of the flat weights, or of moments with the same layout."""
        return flat.detach()[self.start : self.start + self.numel]

    def cut(self, whole: Tensor) -> Tensor:
        """Return the same part of the full tensor."""
        return whole.flatten()[self.offset : self.offset + self.numel]

    def put(self, flat: Tensor, whole: Tensor) -> None:
        """Copy this part of the full tensor into the flat weights, or into moments with the same layout."""
        self.of(flat).copy_(self.cut(whole))


class ZeroShards:
    """All parts of a model and its optimizer. Every process must call the gathering methods together."""

    def __init__(
        self, zero: Any, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, device: torch.device
    ) -> None:
        self._zero, self._model, self._optimizer, self._stage, self.device = zero, model, optimizer, stage, device
        find = self._part_of_3 if stage == 3 else self._part_of_1_and_2
        spread = [each for each in model.named_parameters() if stage == 3 or each[1].requires_grad]
        self._parts = {name: find(name, parameter) for name, parameter in spread}

    def _part_of_1_and_2(self, name: str, parameter: nn.Parameter) -> Part:
        zero = self._zero
        [(flat, begin)] = [
            # Each process holds `flat.numel()` elements of the group's concatenated parameters.
            (flat, begin)
            for flat, *group in zip(
                zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets
            )
            for each, begin in zip(*group)
            if each is parameter
        ]
        here = dist.get_rank() * flat.numel()
        first = max(begin, here)
        numel = min(begin + parameter.numel(), here + flat.numel()) - first
        if numel <= 0:
            return Part(name, parameter, parameter.shape, flat, 0, 0, 0)
        return Part(name, parameter, parameter.shape, flat, first - here, first - begin, numel)

    def _part_of_3(self, name: str, parameter: Any) -> Part:
        # The last processes' shares are padded to this size.
        room = parameter.partition_numel()
        offset = room * dist.get_rank()
        numel = max(min(offset + room, parameter.ds_numel) - offset, 0)
        if parameter.requires_grad:
            group, start, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
            flat = self._zero.fp32_partitioned_groups_flat[group]
        else:
            flat, start = parameter.ds_tensor, 0
        # DeepSpeed leaves this padding uninitialized, so it may contain NaN.
        flat.detach()[start + numel : start + room].zero_()
        return Part(name, parameter, parameter.ds_shape, flat, start, offset, numel)

    def local_tensors(self) -> Tensors:
        """Return this process's shards of weights and moments by name.

        All processes have the same names. A process without elements has a single zero.
        """
        found = {}
        for name, part in self._parts.items():
            for kind, flat in {"": part.flat, **self._optimizer.state.get(part.flat, {})}.items():
                if flat.dim() > 0:
                    found[f"{kind}.{name}" if kind else name] = part.of(flat) if part.numel else flat.new_zeros(1)
        return found

    def _state(self) -> Iterator[tuple[str, Tensor, Part | None]]:
        """Yield (name, tensor, part) of the model's weights and persistent buffers. Tied tensors occur once."""
        parts, seen = {id(part.parameter): part for part in self._parts.values()}, set()
        for name, tensor in split_state(self._model)[0].items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor, parts.get(id(tensor))

    def weights(self, without: Collection[str] = (), narrow: Collection[str] = ()) -> Tensors:
        """Return `contents.model_tensors` in host memory on the main process, and an empty dict on the others.

        Weights in `narrow` become bf16.
        """
        found = {}
        for name, tensor, part in self._state():
            if name in without:
                continue
            if self._stage == 3 and part is not None:
                found[name] = self._gather(part, part.flat)
            else:
                found[name] = tensor.detach().to("cpu", copy=True).contiguous()
            if name in narrow:
                found[name] = found[name].bfloat16()
        extra = {name: each.cpu().contiguous() for name, each in packed(split_state(self._model)[1]).items()}
        return found | extra if dist.get_rank() == 0 else {}

    def moments(self) -> Tensors:
        """Return `contents.optimizer_tensors` in host memory on the main process, and an empty dict on the others."""
        found = {}
        for name, part in self._parts.items():
            for key, value in self._optimizer.state.get(part.flat, {}).items():
                if value is not None:
                    is_counter = value.dim() == 0
                    found[f"{key}.{name}"] = value.detach().cpu().clone() if is_counter else self._gather(part, value)
        return found if dist.get_rank() == 0 else {}

    def _gather(self, part: Part, flat: Tensor) -> Tensor:
        """Return a full tensor on the main process.

        The parts do not overlap, so a sum as integers keeps every bit.
        """
        whole = torch.zeros(part.shape.numel(), dtype=flat.dtype, device=self.device)
        whole[part.offset : part.offset + part.numel] = part.of(flat)
        assert whole.element_size() == 4, "weights and moments are fp32"
        dist.reduce(whole.view(torch.int32), 0)
        beat()
        return whole.reshape(part.shape).cpu() if dist.get_rank() == 0 else whole.new_empty(0)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the model's full weights and persistent buffers by name."""
        return {name: tensor.shape if part is None else part.shape for name, tensor, part in self._state()}

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint of any layout. Its names and shapes must fit."""
        stored = CheckpointReader(folder, "model")
        with torch.no_grad():
            for name, tensor, part in self._state():
                # A base weight that the checkpoint leaves out.
                if name not in stored.shapes:
                    continue
                whole = stored.read(name).to(self.device)
                if part is None or self._stage != 3:
                    tensor.copy_(whole)
                if part is not None:
                    part.put(part.flat, whole)
                    if self._stage == 3:
                        self._put_in_3(part, whole)
        restore_extra_state(stored, self._model, split_state(self._model)[1])

    def _put_in_3(self, part: Part, whole: Tensor) -> None:
        """Write the weights that a forward pass uses: this process's shard, and full small weights.

        Small weights stay gathered between steps.
        """
        parameter: Any = part.parameter
        parameter.ds_tensor.detach()[: part.numel].copy_(part.cut(whole))
        if parameter.data.shape == part.shape:
            parameter.data.copy_(whole)

    def load_moments(self, folder: Path) -> None:
        """Load the optimizer's state of a checkpoint.

        Raises:
            ValueError: the state belongs to other parameters, or parameters have different step counts.
        """
        stored = CheckpointReader(folder, "optimizer")
        check_known(stored.shapes, self._parts)
        self._optimizer.state.clear()
        for key in stored.shapes:
            entry, name = key.split(".", 1)
            part, whole = self._parts[name], stored.read(key).to(self.device)
            state: Any = self._optimizer.state[part.flat]
            if entry == COUNTER:
                if not torch.equal(state.setdefault(entry, whole), whole):
                    raise ValueError(
                        f"{name} has made {whole.item():g} steps, others {state[entry].item():g}: ZeRO counts them "
                        "together; use parallel.strategy fsdp2 or ddp"
                    )
                continue
            flat = state.setdefault(entry, torch.zeros_like(part.flat.detach()))
            part.put(flat, whole)
