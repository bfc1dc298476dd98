"""A multi-GPU trainer on Hugging Face Accelerate."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accel_train.core.version import __version__ as __version__
from accel_train.recipe.loader import Recipe as Recipe

if TYPE_CHECKING:
    from accel_train.experiments.finetune.start import finetune as finetune
    from accel_train.hf import Seq2SeqTrainer as Seq2SeqTrainer
    from accel_train.hf import SFTTrainer as SFTTrainer
    from accel_train.hf import Trainer as Trainer
    from accel_train.inference.export import load_exported as load_exported
    from accel_train.tasks.module import ModuleTask as ModuleTask
    from accel_train.training.callbacks import Callback as Callback
    from accel_train.training.train import RunResult as RunResult
    from accel_train.training.train import fit as fit
    from accel_train.training.train import train as train

__all__ = [
    "Callback",
    "ModuleTask",
    "Recipe",
    "RunResult",
    "SFTTrainer",
    "Seq2SeqTrainer",
    "Trainer",
    "finetune",
    "fit",
    "load_exported",
    "train",
]
_HOMES = {
    **dict.fromkeys(("train", "fit", "RunResult"), "training.train"),
    **dict.fromkeys(("Trainer", "Seq2SeqTrainer", "SFTTrainer"), "hf"),
    "Callback": "training.callbacks",
    "ModuleTask": "tasks.module",
    "finetune": "experiments.finetune.start",
    "load_exported": "inference.export",
}
"""Module of each public name that needs torch."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because torch and transformers take three seconds.

    `--help` needs neither.
    """
    if name in _HOMES:
        return getattr(import_module(f"accel_train.{_HOMES[name]}"), name)
    if name[:1].isupper() and (home := _home_of(name)) is not None:
        # An AttributeError would lose its text in `from accel_train import NAME`.
        raise ImportError(f"accel_train has Trainer, Seq2SeqTrainer, and SFTTrainer alone; {name}: {home}")
    raise AttributeError(f"module 'accel_train' has no attribute {name!r}")


def _home_of(name: str) -> str | None:
    """Return the import of a name that belongs to transformers or TRL. None for other names."""
    for package in ("transformers", "trl"):
        # Both list names without importing the objects.
        if find_spec(package) is not None and name in dir(import_module(package)):
            return f"from {package} import {name}"
    return None
