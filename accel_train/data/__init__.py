"""Text as windows of tokens. `prepare_text(recipe)` is the way in; nothing runs when this is imported."""

from accel_train.data.facts import CorpusFacts
from accel_train.data.shards import TextCorpus, prepare_text
from accel_train.data.tokenizers import byte_tokenizer
from accel_train.data.windows import IGNORED_LABEL, WindowDataset, collate_windows

__all__ = [
    "IGNORED_LABEL",
    "CorpusFacts",
    "TextCorpus",
    "WindowDataset",
    "byte_tokenizer",
    "collate_windows",
    "prepare_text",
]
