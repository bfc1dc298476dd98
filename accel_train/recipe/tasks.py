"""The table of tasks: where each is defined, and what its loss counts. A new task is a folder and a line here."""

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from accel_train.recipe.data import Data, OwnData

ANY_TASK = "any"
"""Task of a recipe whose data is still to be recognized: its `data` takes the settings of all tasks."""


class BuiltIn(NamedTuple):
    """A task of the package."""

    name: str
    """Name of its class in `accel_train/tasks/FOLDER/task.py`. `config.py` has the class of its data, `{name}Data`."""
    targets: str
    """Unit that its loss is divided by."""
    folder: str

    @property
    def path(self) -> str:
        """Return the class as module:Class."""
        return f"accel_train.tasks.{self.folder}.task:{self.name}"

    @property
    def data(self) -> type[Data]:
        """Return the class of its `data` section, without importing torch."""
        section: type[Data] = getattr(
            importlib.import_module(f"accel_train.tasks.{self.folder}.config"), f"{self.name}Data"
        )
        return section


TASKS: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "causal-lm": BuiltIn("CausalLM", "tokens", "causal_lm"),
        "text-classification": BuiltIn("TextClassification", "samples", "text_classification"),
        "image-classification": BuiltIn("ImageClassification", "images", "image_classification"),
        "semantic-segmentation": BuiltIn("SemanticSegmentation", "pixels", "semantic_segmentation"),
        "object-detection": BuiltIn("ObjectDetection", "images", "object_detection"),
        "token-classification": BuiltIn("TokenClassification", "words", "token_classification"),
        "seq2seq": BuiltIn("Seq2Seq", "tokens", "seq2seq"),
        "masked-lm": BuiltIn("MaskedLM", "targets", "masked_lm"),
        "question-answering": BuiltIn("QuestionAnswering", "samples", "question_answering"),
        "multiple-choice": BuiltIn("MultipleChoice", "samples", "multiple_choice"),
        "sentence-embedding": BuiltIn("SentenceEmbedding", "samples", "sentence_embedding"),
    }
)
"""Built-in tasks by the name that a recipe uses, imported only when used."""


def targets_of(task: str, default: str = "targets") -> str:
    """Return the unit that a task's loss is divided by; `default` for a custom task."""
    return TASKS[task].targets if task in TASKS else default


@cache
def data_section(task: str) -> type[Data]:
    """Return the class of a task's `data` section. A custom task's class is known once the task is loaded."""
    if task == ANY_TASK:
        return type("AnyData", tuple(entry.data for entry in TASKS.values()), {"__doc__": "Settings of all tasks."})
    return TASKS[task].data if task in TASKS else OwnData


@cache
def tasks_with(field: str) -> tuple[str, ...]:
    """Return the tasks whose `data` has a setting; empty if it is unknown. A shared setting has all of them."""
    return tuple(name for name, entry in TASKS.items() if field in entry.data.model_fields)
