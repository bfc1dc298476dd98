"""Data for a plan that reads none: full windows of a vocabulary, from `data.sequence_length` and the tokenizer alone."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel_train.data.text.tokenizers import pretrained_tokenizer
from accel_train.data.text.tokens import collate_windows
from accel_train.recipe.schema import Recipe, TrainedTokenizer
from accel_train.task import TaskData


def without_data(recipe: Recipe, global_batch_size: int) -> tuple[Recipe, TaskData]:
    """Return stand-in data of as many full windows as the run's steps read, and the recipe as such data takes it.

    Where `schedule.num_epochs` alone says how long the run is, its steps are not known without the data: then the recipe
    has a step more than its warmup, for what a plan says of one step, and profiles none.

    Raises:
        ValueError: the task needs its data for more than their length, or the tokenizer cannot be loaded.
    """
    if recipe.task != "causal-lm":
        raise ValueError(
            f"--no-data: only causal-lm can be planned without data; task={recipe.task} takes its labels or sizes from them"
        )
    choice, schedule, length = recipe.tokenizer_in_use, recipe.schedule, recipe.data.sequence_length
    if isinstance(choice, TrainedTokenizer):
        tokenizer: Any = SimpleNamespace(vocab_size=choice.train_bpe.vocab_size, separator_id=0)
    else:
        tokenizer = pretrained_tokenizer(choice, trust_remote_code=recipe.model.trust_remote_code)
    max_steps = schedule.max_steps or (schedule.warmup_steps or 0) + 1
    windows: Any = np.broadcast_to(np.int64(0), (max_steps * global_batch_size, length + 1))  # takes no memory
    mask = recipe.data.mask_documents
    collate = partial(collate_windows, separator_id=tokenizer.separator_id, mask_documents=mask)
    facts = {
        "sources": f"not read (--no-data): each sample counts as data.sequence_length={length} tokens with a label"
    }
    has_eval = recipe.data.eval is not None or recipe.data.eval_fraction > 0
    data = TaskData(windows, windows if has_eval else None, collate, "", facts, source=tokenizer)
    steps = schedule.model_copy(update={"max_steps": max_steps, "num_epochs": None})
    section = recipe.data.model_copy(update={"group_by_length": False})
    log = recipe.log if schedule.max_steps else recipe.log.model_copy(update={"profile_steps": None})
    return recipe.model_copy(update={"schedule": steps, "data": section, "log": log}), data
