"""Stand-in data for a plan without data: full windows, from `data.sequence_length` and the tokenizer alone."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel_train.data.text.tokenizers import pretrained_tokenizer
from accel_train.data.text.tokens import collate_windows
from accel_train.recipe.schema import Recipe, TrainedTokenizer
from accel_train.task import TaskData


def without_data(recipe: Recipe, global_batch_size: int) -> tuple[Recipe, TaskData]:
    """Return the recipe adapted to stand-in data, and that data: as many full windows as the run's steps read.

    If only `schedule.num_epochs` sets the length of the run, its steps are unknown without data. The returned recipe
    then has one step more than its warmup, enough to plan a single step. It does not profile steps.

    Raises:
        ValueError: the task needs more from its data than the length, or the tokenizer cannot be loaded.
    """
    if recipe.task != "causal-lm":
        raise ValueError(
            f"--no-data: only causal-lm can be planned without data; task={recipe.task} takes its labels or sizes "
            "from them"
        )
    choice, schedule, length = recipe.tokenizer_in_use, recipe.schedule, recipe.data.sequence_length
    if isinstance(choice, TrainedTokenizer):
        tokenizer: Any = SimpleNamespace(vocab_size=choice.train_bpe.vocab_size, separator_id=0)
    else:
        tokenizer = pretrained_tokenizer(choice, trust_remote_code=recipe.model.trust_remote_code)
    max_steps = schedule.max_steps or (schedule.warmup_steps or 0) + 1
    # A broadcast array does not take memory.
    windows: Any = np.broadcast_to(np.int64(0), (max_steps * global_batch_size, length + 1))
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
