"""Look at pretrained weights: their size, and what they can read."""

from pathlib import Path
from typing import Any

from accel_train.core.state import Choice
from accel_train.data.images.preprocessing import pretrained_image_size
from accel_train.data.text.tokenizers import load_tokenizer
from accel_train.experiments.finetune.training import LONGEST, Pretrained
from accel_train.model.pretrained import num_pretrained_parameters, pretrained_config
from accel_train.recipe.loader import make_recipe
from accel_train.task import load_task, prove_forward


def look_at(name: str, task: str, *, trust_remote_code: bool) -> Pretrained:
    """Return the facts of pretrained weights, a folder or a name on the hub, of which only the configuration is read.

    Raises:
        ValueError: there is no such model, or its tokenizer cannot be loaded.
    """
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"--model {name}: there is no such folder (seen from {Path.cwd()}); name one, or a model on the hub"
        )
    model = {"pretrained": name, "trust_remote_code": trust_remote_code}
    tree = {"output_dir": "runs", "model": model, "data": {"train": "."}, "schedule": {"max_steps": 1}}
    config = pretrained_config(make_recipe(tree, "--model"))
    is_text = task in ("text-classification", "causal-lm")
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code) if is_text else None
    return Pretrained(
        name,
        num_pretrained_parameters(config, Path(name).expanduser()),
        getattr(config.get_text_config(), "max_position_embeddings", None),
        None if is_text else pretrained_image_size(name, config),
        bool(tokenizer is not None and tokenizer.chat_template),
        *((_document_masks(tree, config),) if task == "causal-lm" else ()),
    )


def _document_masks(tree: dict[str, Any], config: Any) -> Choice[bool]:
    """Return whether this model keeps documents apart that share a window, by the probe of a run's start."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST
    data = {"train": ".", "mask_documents": True, "sequence_length": min(LONGEST, positions)}
    try:
        prove_forward(load_task("causal-lm"), make_recipe({**tree, "data": data}, "--model"))
    except ValueError as error:
        reason = str(error).removeprefix("data.mask_documents=True: ").partition(". Set ")[0]
        return Choice(False, f"documents in a window see each other: {reason}")
    return Choice(True, "attention stays within a document")
