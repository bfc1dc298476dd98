"""Tasks that count what each process reads of a pretrained model, or load it whole."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_train.model import tensors
from accel_train.model.tensors import FileTensor
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.tasks.text_classification.task import TextClassification
from accel_train.training import build

RANK = int(os.environ.get("RANK", "0"))


def watch(options: dict[str, Any]) -> None:
    """`options`: whole: the rank that refuses to leave weights in their files, or every; reads (folder): a file of each
    process, with the bytes of each block that it reads; version (rank): the process that sees another file."""

    def refuse(_: Any) -> None:
        raise ValueError("the test asks for it")

    blocks = FileTensor.blocks

    def counted(self: FileTensor, rows: slice = slice(0, None)) -> Iterator[tuple[int, Tensor]]:
        for row, block in blocks(self, rows):
            with (Path(options["reads"]) / f"rank-{RANK}").open("a") as file:
                file.write(f"{block.numel() * self.dtype.itemsize}\n")
            yield row, block

    if options.get("whole") in (RANK, "every"):
        vars(build)["check_plain_weights"] = refuse
    if "reads" in options:
        vars(tensors)["FileTensor"].blocks = counted
    if options.get("version") == RANK:
        real = tensors.version_of
        tensors.version_of = lambda path: (*real(path)[:2], real(path)[2] + 1)


class UnreadLM(CausalLM):
    """Language modelling."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        watch(recipe.options)
        return super().load_data(recipe, progress=progress)


class UnreadClasses(TextClassification):
    """Text classification."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        watch(recipe.options)
        return super().load_data(recipe, progress=progress)
