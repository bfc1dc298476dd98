"""`Trainer`: the interface of Hugging Face's Trainer on top of the loop of accel_train.

This package turns its arguments, callbacks, and datasets into a recipe, a task, and an observer. The loop does not
depend on this package."""

from transformers import Seq2SeqTrainingArguments

from accel_train.hf.checkpoints import get_last_checkpoint
from accel_train.hf.seq2seq import Seq2SeqTrainer
from accel_train.hf.sft import SFTTrainer
from accel_train.hf.trainer import Trainer

__all__ = ["SFTTrainer", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "get_last_checkpoint"]
