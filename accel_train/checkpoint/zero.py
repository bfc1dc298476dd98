"""The parts of weights and moments that a process holds under DeepSpeed's ZeRO, and the whole of them: gathered, and put back.

DeepSpeed flattens the parameters of a group one after the other (in stage 3 each process's share of each of them), and the
optimizer works on that flat tensor. A checkpoint knows nothing of it: it holds tensors by name, as under DDP.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.checkpoint.contents import check_known
from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.model.tensors import unpacked_numel

COUNTER = "step"
"""The optimizer's entry that is one number for all elements."""


@dataclass(frozen=True)
class Part:
    """The shard of one parameter on this process: `numel` elements from `offset` of the whole, which are at `start` of `flat`."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    """Shape of the full parameter."""
    flat: Tensor
    """The tensor that the optimizer steps, and the key of its state; of a frozen weight, what is kept of it here."""
    start: int
    offset: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """This part of the flat weights, or of moments that lie like them."""
        return flat.detach()[self.start : self.start + self.numel]

    def cut(self, whole: Tensor) -> Tensor:
        """Return the same part of the whole tensor."""
        return whole.flatten()[self.offset : self.offset + self.numel]


class ZeroShards:
    """All parts of a model and its optimizer; what gathers, every process calls at once."""

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
            (flat, begin)  # of the group, all its parameters one after the other, each process has as much as `flat`
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
        room = parameter.partition_numel()  # the last processes' shares are padded to it
        offset = room * dist.get_rank()
        numel = max(min(offset + room, parameter.ds_numel) - offset, 0)
        if parameter.requires_grad:
            group, start, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
            flat = self._zero.fp32_partitioned_groups_flat[group]
        else:
            flat, start = parameter.ds_tensor, 0
        flat.detach()[start + numel : start + room].zero_()  # DeepSpeed leaves there what lay in memory: a NaN as well
        return Part(name, parameter, parameter.ds_shape, flat, start, offset, numel)

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this process's shards of weights and moments by name: the same names on all, a zero where it holds nothing."""
        found = {}
        for name, part in self._parts.items():
            for kind, flat in {"": part.flat, **self._optimizer.state.get(part.flat, {})}.items():
                if flat.dim() > 0:
                    found[f"{kind}.{name}" if kind else name] = part.of(flat) if part.numel else flat.new_zeros(1)
        return found

    def _state(self) -> Iterator[tuple[str, Tensor, Part | None]]:
        """Yield the model's state by name, tied tensors once, each with its part."""
        parts, seen = {id(part.parameter): part for part in self._parts.values()}, set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor, parts.get(id(tensor))

    def weights(self, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return `contents.model_tensors` in host memory of the main process; nothing on the others."""
        found = {}
        for name, tensor, part in self._state():
            if name in without:
                continue
            if self._stage == 3 and part is not None:
                found[name] = self._gather(part, part.flat)
            else:
                found[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return found if dist.get_rank() == 0 else {}

    def moments(self) -> dict[str, Tensor]:
        """Return `contents.optimizer_tensors` in host memory of the main process; nothing on the others."""
        found = {}
        for name, part in self._parts.items():
            for key, value in self._optimizer.state.get(part.flat, {}).items():
                if value is not None:
                    is_counter = value.dim() == 0
                    found[f"{key}.{name}"] = value.detach().cpu().clone() if is_counter else self._gather(part, value)
        return found if dist.get_rank() == 0 else {}

    def _gather(self, part: Part, flat: Tensor) -> Tensor:
        """Return a full tensor on the main process: the parts do not overlap, and their sum as integers keeps every bit."""
        whole = torch.zeros(part.shape.numel(), dtype=flat.dtype, device=self.device)
        whole[part.offset : part.offset + part.numel] = part.of(flat)
        assert whole.element_size() == 4, "weights and moments are fp32"
        dist.reduce(whole.view(torch.int32), 0)
        return whole.reshape(part.shape).cpu() if dist.get_rank() == 0 else whole.new_empty(0)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the model's whole state by name."""
        return {name: tensor.shape if part is None else part.shape for name, tensor, part in self._state()}

    def load_weights(self, folder: Path) -> None:
        """Read the weights of a checkpoint of any layout; its names and shapes are known to fit."""
        stored = CheckpointReader(folder, "model")
        with torch.no_grad():
            for name, tensor, part in self._state():
                if name not in stored.shapes:  # of the base, which the checkpoint leaves out
                    continue
                whole = stored.read(name).to(self.device)
                if part is None or self._stage != 3:
                    tensor.copy_(whole)
                if part is not None:
                    self._put(part, part.flat, whole)
                    if self._stage == 3:
                        self._put_in_3(part, whole)

    @staticmethod
    def _put(part: Part, flat: Tensor, whole: Tensor) -> None:
        part.of(flat).copy_(part.cut(whole))

    def _put_in_3(self, part: Part, whole: Tensor) -> None:
        """Write what a forward uses: this process's shard, and small weights in full, which stay gathered between steps."""
        parameter: Any = part.parameter
        parameter.ds_tensor.detach()[: part.numel].copy_(part.cut(whole))
        if parameter.data.shape == part.shape:
            parameter.data.copy_(whole)

    def load_moments(self, folder: Path) -> None:
        """Put the optimizer's state of a checkpoint back.

        Raises:
            ValueError: it is of other parameters, or some of them have made other steps than the rest.
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
                        f"{name} has made {whole.item():g} steps, others {state[entry].item():g}: ZeRO counts them together; "
                        "use parallel.strategy fsdp2 or ddp"
                    )
                continue
            flat = state.setdefault(entry, torch.zeros_like(part.flat.detach()))
            self._put(part, flat, whole)


def whole_numel(parameters: Sequence[nn.Parameter]) -> int:
    """Return the elements of parameters, with those that ZeRO stage 3 keeps elsewhere, and those of 4 bits unpacked."""
    return sum(int(getattr(parameter, "ds_numel", unpacked_numel(parameter))) for parameter in parameters)
