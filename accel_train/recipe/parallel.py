"""The `parallel` section of a recipe: how a model is sharded over processes."""

from collections.abc import Mapping
from typing import Literal

from pydantic import model_validator

from accel_train.core.errors import SettingError
from accel_train.recipe.values import Auto, PositiveInt, Section


class Parallel(Section):
    """Division of the work among the processes. Each resume may use other settings."""

    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """Strategy that spreads the model over processes. ddp: every process holds the whole model. fsdp2: weights,
    gradients, and optimizer state are sharded over the processes. deepspeed: DeepSpeed's ZeRO shards the state that
    zero_stage selects.
    """
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: ZeRO stage. 1 shards the optimizer's state over the processes, 2 also gradients, 3 also weights."""
    dp_shard_size: Auto | PositiveInt = "auto"
    """fsdp2: number of processes that share one copy of the model. auto: all processes. With fewer (those on one node),
    several copies exist, and their gradients are averaged (HSDP).
    """
    reshard_after_forward: bool = True
    """fsdp2: whether to free a block's gathered weights after its forward and gather them again in the backward pass.
    false: more memory, less communication.
    """
    cpu_offload: bool = False
    """fsdp2: whether to keep weights and optimizer state in host memory and update them there. This is slower, for
    models that do not fit otherwise.
    """
    tp_size: PositiveInt = 1
    """fsdp2: number of neighboring processes that compute each layer together and read the same samples (tensor
    parallelism).
    """
    sp_size: PositiveInt = 1
    """ddp and fsdp2: number of neighboring processes that split every sequence and read the same samples. This is
    sequence parallelism, by DeepSpeed's Ulysses attention.
    """
    find_unused_parameters: Auto | bool = "auto"
    """ddp: whether to look in each step for parameters that took no part in the loss. The search costs a graph
    traversal and one more collective. auto: if the first step leaves out some. true: for a model that leaves out others
    in later steps (experts, branches). false: such a model is an error. To avoid the cost, list parameters that never
    take part in model.freeze.
    """
    sync_batch_norm: bool = False
    """ddp: whether batch norms compute statistics over the micro-batches of all processes. false: over each process's
    micro-batch, so another number of processes trains differently.
    """

    @model_validator(mode="after")
    def strategies_fit(self) -> "Parallel":
        if self.sp_size > 1 and (self.tp_size > 1 or self.strategy == "deepspeed"):
            is_tp = self.tp_size > 1
            other = f"tp_size={self.tp_size}" if is_tp else "strategy deepspeed"
            raise SettingError(
                f"parallel.sp_size={self.sp_size} does not work with parallel.{other}",
                "Leave one of them out: parallel.strategy ddp and fsdp2 split sequences.",
                settings=("parallel.sp_size", *(("parallel.tp_size",) if is_tp else ()), "parallel.strategy"),
            )
        return self

    def unread(self) -> Mapping[str, str]:
        of_strategy = {
            "fsdp2": ("dp_shard_size", "reshard_after_forward", "cpu_offload", "tp_size"),
            "deepspeed": ("zero_stage",),
            "ddp": ("find_unused_parameters", "sync_batch_norm"),
        }
        reason = f"not {self.strategy}"
        of_strategy.pop(self.strategy)
        return {name: f"it needs strategy {kind}, {reason}" for kind, names in of_strategy.items() for name in names}

    @property
    def num_sharing(self) -> int:
        """Number of processes that read the same samples."""
        return self.tp_size * self.sp_size

    @property
    def shared_by(self) -> str:
        """Setting that makes processes read the same samples."""
        return "parallel.sp_size" if self.sp_size > 1 else "parallel.tp_size"
