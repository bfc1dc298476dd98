"""`Trainer`: Hugging Face's Trainer on our loop. Here its arguments, callbacks and datasets become a recipe, a task and an observer.

The loop knows nothing of it."""

from transformers import Seq2SeqTrainingArguments

from accel_train.hf.seq2seq import Seq2SeqTrainer
from accel_train.hf.trainer import Trainer, get_last_checkpoint

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "get_last_checkpoint"]
