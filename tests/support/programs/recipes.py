"""Train recipes one after the other in the same processes: recipes.py FILE (a JSON list of recipes) SEEN.

Write the types of the tensors that each task gets to SEEN: {output_dir: {kind of forward: {entry: type}}}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from accel_train import Recipe, train
from accel_train.model.training_module import TrainingModule

forward = TrainingModule.forward
seen: dict[str, dict[str, dict[str, str]]] = {}


def watched(module: TrainingModule, batch: Any, wanted: Any = "loss") -> Any:
    found = {name: str(each.dtype) for name, each in batch.items() if torch.is_tensor(each)}
    list(seen.values())[-1].setdefault(wanted, found)
    return forward(module, batch, wanted)


if __name__ == "__main__":
    TrainingModule.forward = watched  # type: ignore[method-assign,assignment]
    for recipe in json.loads(Path(sys.argv[1]).read_text()):
        seen[recipe["output_dir"]] = {}
        train(Recipe.model_validate(recipe))
    Path(sys.argv[2]).write_text(json.dumps(seen))
