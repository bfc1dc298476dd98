"""`accel_train.hf.Seq2SeqTrainer`: transformers' Seq2SeqTrainer interface, with evaluations that generate."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.trainer_seq2seq import Seq2SeqTrainer as StockSeq2SeqTrainer
from transformers.trainer_utils import PredictionOutput

from accel_train.hf.evaluation import merged, parts_of
from accel_train.hf.inputs import Inputs
from accel_train.hf.trainer import Trainer

# Default of transformers' generate without a length in the generation config.
_DEFAULT_MAX_LENGTH = 20


class Seq2SeqTrainer(Trainer):
    """Trains, evaluates, and predicts with the arguments of `transformers.Seq2SeqTrainer`.

    With `predict_with_generate` of Seq2SeqTrainingArguments, evaluate and predict generate texts. compute_metrics
    receives them as predictions: token ids, padded as in transformers. Every sample is generated once, in order, on any
    number of processes.

    Raises:
        SettingError: an argument or an overridden method is not supported. The message names it and the remedy.
    """

    generates = True
    _replaces = "transformers.trainer_seq2seq:Seq2SeqTrainer"
    _gen_kwargs: dict[str, object]

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> GenerationConfig:
        """Return the generation config of a file, a model, or an object, as in transformers."""
        return StockSeq2SeqTrainer.load_generation_config(gen_config_arg)

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        return StockSeq2SeqTrainer._pad_tensors_to_max_len(self, tensor, max_length)

    def _adopt(self, model: nn.Module) -> None:
        """Set the model, with the generation config of the arguments if they name one."""
        super()._adopt(model)
        self._gen_kwargs = {}
        named: str | GenerationConfig | None = getattr(self.args, "generation_config", None)
        if named is not None:
            inner: Any = model
            inner.generation_config = self.load_generation_config(named)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate one dataset, or each of a dict of datasets, and return the metrics.

        `gen_kwargs` go to `generate`: `max_length`, `num_beams`, ... Without them, `generation_max_length` and
        `generation_num_beams` of the arguments hold, or the model's generation config.
        """
        parts = parts_of(self, eval_dataset, metric_key_prefix)
        if parts is not None:
            return merged(self.evaluate(part, ignore_keys, prefix, **gen_kwargs) for part, prefix in parts)
        self._gen_kwargs = self._with_arguments(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Return the generated ids and labels in order, with metrics. `gen_kwargs` are used as in evaluate.

        Without predict_with_generate, return logits instead of ids.
        """
        self._gen_kwargs = self._with_arguments(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _with_arguments(self, gen_kwargs: dict[str, object]) -> dict[str, object]:
        """Return the arguments of `generate`: `gen_kwargs`, completed by the training arguments."""
        given = {name: value for name, value in gen_kwargs.items() if value is not None}
        if "max_new_tokens" not in given:
            given.setdefault("max_length", getattr(self.args, "generation_max_length", None))
        given.setdefault("num_beams", getattr(self.args, "generation_num_beams", None))
        return {name: value for name, value in given.items() if value is not None}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return loss, generated ids, and labels of one batch, padded to the generation config's length.

        Without predict_with_generate, or for the loss alone, return the result of Trainer.prediction_step.
        """
        if prediction_loss_only or not getattr(self.args, "predict_with_generate", False):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        labels, loss = inputs.get("labels"), None
        if labels is not None:
            loss, *_ = super().prediction_step(model, dict(inputs), True, ignore_keys=ignore_keys)
        given = {name: value for name, value in inputs.items() if name != "labels"}
        decoder = given.get("decoder_input_ids")
        if labels is not None and decoder is not None and decoder.shape == labels.shape:
            # These inputs are made from the labels, so the generated text would begin with the labels.
            for name in ("decoder_input_ids", "decoder_attention_mask"):
                given.pop(name, None)
        generator: Any = model
        chosen = gen_kwargs or self._gen_kwargs
        unset = [name for name in ("num_beams", "max_length") if chosen.get(name, "") is None]
        tokens = generator.generate(**given, **{name: each for name, each in chosen.items() if name not in unset})
        return loss, self._padded(tokens), None if labels is None else self._padded(labels)

    def _padded(self, tokens: Tensor) -> Tensor:
        """Return ids padded as in transformers: with the padding token, to the generation config's maximum."""
        inner: Any = self.model
        config = inner.generation_config
        width, most_new = config.max_length or _DEFAULT_MAX_LENGTH, config.max_new_tokens
        if tokens.shape[-1] >= width:
            width = 0 if most_new is None else most_new + 1
        return self._pad_tensors_to_max_len(tokens, width) if tokens.shape[-1] < width else tokens
