"""What several test files share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Read when huggingface_hub is first imported: a test that asks the network fails at once instead of retrying.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from accel_train.recipe import Recipe


@pytest.fixture
def text_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe for a text, with its token shards below the test's own folder."""

    def make(train: Any, *, tokenizer: Any = "bytes", **data: Any) -> Recipe:
        settings = {"sequence_length": 8, "cache_dir": str(tmp_path / "cache"), **data, "train": train}
        return Recipe.model_validate(
            {
                "output_dir": str(tmp_path / "run"),
                "model": {"config": {"model_type": "gpt2"}},
                "tokenizer": tokenizer,
                "data": settings,
                "schedule": {"max_steps": 1},
            }
        )

    return make
