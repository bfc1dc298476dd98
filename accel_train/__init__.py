"""A multi-GPU trainer on Hugging Face Accelerate."""

from typing import TYPE_CHECKING, Any

from accel_train.recipe import Recipe as Recipe

if TYPE_CHECKING:
    from accel_train.hf import Trainer as Trainer
    from accel_train.loop import RunResult as RunResult
    from accel_train.loop import train as train

__version__ = "0.1.0"
__all__ = ["Recipe", "RunResult", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    """Import the loop, and with it torch, or the Trainer, and with it transformers, when it is first asked for: `--help` should not wait three seconds."""
    if name in ("train", "RunResult"):
        from accel_train import loop

        return getattr(loop, name)
    if name == "Trainer":
        from accel_train import hf

        return hf.Trainer
    raise AttributeError(f"module 'accel_train' has no attribute {name!r}")
