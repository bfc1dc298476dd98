"""Data for a plan that reads none: full windows of a vocabulary, from `data.sequence_length` and the tokenizer alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from accel_train.data.tokenizers import pretrained_tokenizer
from accel_train.data.windows import collate_windows
from accel_train.recipe import Recipe, TrainedTokenizer
from accel_train.task import TaskData


@dataclass(frozen=True)
class Vocabulary:
    """What a model has to know of a tokenizer."""

    vocab_size: int
    separator_id: int


class FullWindows(Dataset[NDArray[np.int64]]):
    """As many windows as asked for, each of `sequence_length` tokens with a label: what they say does not matter."""

    def __init__(self, num_samples: int, sequence_length: int) -> None:
        self.num_samples, self.sequence_length = num_samples, sequence_length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Windows of zeros: (B, T + 1) int64."""
        return np.zeros((len(indices), self.sequence_length + 1), np.int64)


def without_data(recipe: Recipe, global_batch_size: int) -> tuple[Recipe, TaskData]:
    """Stand-in data of just as many full windows as the run's steps read, and the recipe as such data takes it.

    Where `schedule.num_epochs` alone says how long the run is, its steps are not known without the data: then the recipe
    has a step more than its warmup, for what a plan says of one step.

    Raises:
        ValueError: the task needs its data for more than their length, or the tokenizer cannot be loaded.
    """
    if recipe.task != "causal-lm":
        raise ValueError(
            f"--no-data: only causal-lm can be planned without data; task={recipe.task} takes its labels or sizes from them"
        )
    choice, schedule, length = recipe.tokenizer_in_use, recipe.schedule, recipe.data.sequence_length
    if isinstance(choice, TrainedTokenizer):
        vocabulary = Vocabulary(choice.train_bpe.vocab_size, 0)
    else:
        tokenizer = pretrained_tokenizer(choice, trust_remote_code=recipe.model.trust_remote_code)
        vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.separator_id)
    max_steps = schedule.max_steps or (schedule.warmup_steps or 0) + 1
    windows = FullWindows(max_steps * global_batch_size, length)
    separator_id, mask = vocabulary.separator_id, recipe.data.mask_documents
    collate: Any = partial(collate_windows, separator_id=separator_id, mask_documents=mask)
    facts = {
        "sources": f"not read (--no-data): each sample counts as data.sequence_length={length} tokens with a label"
    }
    has_eval = recipe.data.eval is not None or recipe.data.eval_fraction > 0
    data = TaskData(windows, windows if has_eval else None, collate, "", facts, source=vocabulary)
    steps = schedule.model_copy(update={"max_steps": max_steps, "num_epochs": None})
    section = recipe.data.model_copy(update={"group_by_length": False})
    return recipe.model_copy(update={"schedule": steps, "data": section}), data
