"""The `parallel` section of a recipe: how a model is sharded over processes."""

from typing import Literal

from pydantic import model_validator

from accel_train.core.errors import SettingError
from accel_train.recipe.values import Auto, PositiveInt, Section


class Parallel(Section):
    """Division of the work among the processes; each resume may choose anew."""

    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """ddp: every process holds the whole model; fsdp2: weights, gradients and optimizer are sharded over the processes;
    deepspeed: DeepSpeed's ZeRO shards what zero_stage says."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: 1 shards the optimizer's state over the processes, 2 gradients as well, 3 weights as well."""
    dp_shard_size: Auto | PositiveInt = "auto"
    """fsdp2: processes that share one copy of the model; auto: all of them. Fewer (those of a node): several copies, whose
    gradients are averaged (HSDP)."""
    reshard_after_forward: bool = True
    """fsdp2: release a block's gathered weights after its forward, and gather them again in the backward pass; off: more
    memory, less communication."""
    cpu_offload: bool = False
    """fsdp2: keep weights and optimizer in host memory, and update them there; slower, for models that fit in no other way."""
    tp_size: PositiveInt = 1
    """fsdp2: neighbouring processes that compute each layer together and read the same samples (tensor parallelism)."""
    sp_size: PositiveInt = 1
    """ddp and fsdp2: neighbouring processes that read the same samples and have a slice each of every sequence (sequence
    parallelism, by DeepSpeed's Ulysses attention)."""
    find_unused_parameters: Auto | bool = "auto"
    """ddp: look in each step for parameters that took no part in the loss (a walk through the graph, and a collective more); auto:
    where the first step leaves some out. true: for a model that leaves out others in later steps (experts, branches); false: such
    a model is an error. To spare the cost, name parameters that never take part in model.freeze."""
    sync_batch_norm: bool = False
    """ddp: batch norms take their statistics over the micro-batches of all processes. Off: over each process's own, so another number
    of processes trains differently."""
    cp_size: PositiveInt = 1
    """Processes that share each sequence by ring attention (context parallelism): only 1; `sp_size` is the way to split sequences."""

    @model_validator(mode="after")
    def strategies_fit(self) -> "Parallel":
        if self.cp_size != 1:
            raise SettingError(
                "context parallelism is not supported, because torch's ring attention has no kernel for the CPU, where this "
                "program proves that several processes train as one does",
                f"leave it at 1, and for sequences that do not fit set parallel.sp_size to {self.cp_size}, and "
                "precision.gradient_checkpointing to blocks",
                at=f"parallel.cp_size={self.cp_size}",
                settings=("parallel.cp_size", "parallel.sp_size", "precision.gradient_checkpointing"),
            )
        if self.sp_size > 1 and (self.tp_size > 1 or self.strategy == "deepspeed"):
            is_tp = self.tp_size > 1
            other = f"tp_size={self.tp_size}" if is_tp else "strategy deepspeed"
            raise SettingError(
                f"parallel.sp_size={self.sp_size} does not go with parallel.{other}",
                "leave one of them out: sequences are split under parallel.strategy ddp and fsdp2",
                settings=("parallel.sp_size", *(("parallel.tp_size",) if is_tp else ()), "parallel.strategy"),
            )
        of_fsdp2 = ("dp_shard_size", "reshard_after_forward", "cpu_offload", "tp_size")
        of_strategy = {
            "fsdp2": of_fsdp2,
            "deepspeed": ("zero_stage",),
            "ddp": ("find_unused_parameters", "sync_batch_norm"),
        }
        for strategy, names in of_strategy.items():
            for name in names if self.strategy != strategy else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise SettingError(
                        f"parallel.{name}={getattr(self, name)} is for parallel.strategy {strategy}, and it is {self.strategy}",
                        settings=(f"parallel.{name}", "parallel.strategy"),
                    )
        return self

    @property
    def num_sharing(self) -> int:
        """Processes that read the same samples."""
        return self.tp_size * self.sp_size

    @property
    def shared_by(self) -> str:
        """The setting that makes processes read the same samples."""
        return "parallel.sp_size" if self.sp_size > 1 else "parallel.tp_size"
