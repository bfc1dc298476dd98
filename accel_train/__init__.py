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


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because torch and transformers take three seconds.

    `--help` needs neither.
    """
    if name in ("train", "fit", "RunResult"):
        from accel_train.training import train as door

        return getattr(door, name)
    if name == "Callback":
        from accel_train.training import callbacks

        return callbacks.Callback
    if name == "finetune":
        from accel_train.experiments.finetune import start

        return start.finetune
    if name == "ModuleTask":
        from accel_train.task import load_class

        return load_class("task", "accel_train.tasks.module:ModuleTask", "accel_train.task.Task")
    if name in ("Trainer", "Seq2SeqTrainer", "SFTTrainer"):
        from accel_train import hf

        return getattr(hf, name)
    if name == "load_exported":
        from accel_train.inference import export

        return export.load_exported
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
