"""`Trainer`: Hugging Face's Trainer on our loop. Here its arguments, callbacks and datasets become a recipe, a task and an observer.

The loop knows nothing of it."""

from accel_train.hf.trainer import Trainer, get_last_checkpoint

__all__ = ["Trainer", "get_last_checkpoint"]
