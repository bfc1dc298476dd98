"""Reported faults of the Trainer: callbacks, optimizers, resumes."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback
from transformers.optimization import AdafactorSchedule
from transformers.trainer import Trainer as StockTrainer

import accel_train
from accel_train.checkpoint.store import changed_descriptions, check
from accel_train.checkpoint.verify import format_verified, verify
from accel_train.hf import Seq2SeqTrainer, Trainer
from tests.support.hf_models import Grows, Plain, arguments, bert, both, difference, plain_rows, rows
from tests.support.runs import event_steps, metrics, refused
from tests.system.test_fits import EVALUATING

pytestmark = pytest.mark.usefixtures("empty_folder")


class Adds(TrainerCallback):
    """Writes a file and a folder into each checkpoint, as callbacks do with an adapter or a metrics file."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "extra.json").write_text("{}")
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")


def test_hf_00_checkpoints_to_which_a_callback_added_files_are_rotated_and_a_foreign_file_is_kept(
    tmp_path: Path,
) -> None:
    args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 1}

    class Drops(Adds):
        """Leaves a file in the checkpoint before, after its save."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (Path(args.output_dir) / "checkpoint-2" / "mine.txt").write_text("mine")

    for name, callback in (("own", Adds()), ("foreign", Drops())):
        trainer = Trainer(
            Plain(), arguments(tmp_path / name, **args), callbacks=[callback], train_dataset=plain_rows(64)
        )
        trainer.train()
        assert (tmp_path / name / "checkpoint-4" / "extra.json").is_file()
    left = [path.name for path in (tmp_path / "own" / "checkpoints").iterdir() if path.is_dir()]
    assert left == ["step-00000004"]
    assert check(tmp_path / "own" / "checkpoints" / "step-00000004").problem is None
    kept = tmp_path / "foreign" / "checkpoints" / "kept-step-00000002"
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["mine.txt"]
    assert event_steps(tmp_path / "foreign", "kept_files") == [3]


class Rewrites(TrainerCallback):
    """Writes the configuration of each checkpoint again, and adds a file; or overwrites its weights."""

    def __init__(self, name: str = "config.json") -> None:
        self.name = name

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.name == "config.json":
            model.config.id2label = {0: "neg", 1: "pos", 2: "none"}
            model.config.save_pretrained(folder)
            (folder / "extra.json").write_text("{}")
        else:
            (folder / self.name).write_bytes(b"other weights")


def test_hf_01_a_rewritten_config_of_a_checkpoint_does_not_keep_a_run_from_resuming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(callback: Any, steps: int = 2) -> Trainer:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        return Trainer(bert(), args, callbacks=[callback], train_dataset=rows(16))

    make(Rewrites()).train()
    newest = tmp_path / "checkpoints" / "step-00000002"
    assert (check(newest).problem, changed_descriptions(newest)) == (None, [])
    (newest / "config.json").write_text("{}")  # by hand, later
    (newest / "README.md").write_text("mine")
    (newest / "extra.json").unlink()
    assert changed_descriptions(newest) == ["README.md", "config.json"]
    assert "config.json" in format_verified(verify(tmp_path))
    assert make(Rewrites(), 4).train(resume_from_checkpoint=True).global_step == 4
    assert event_steps(tmp_path, "checkpoint_changed") == [2]
    assert [line["step"] for line in metrics(tmp_path)][-1] == 4
    make(Rewrites("model.safetensors"), 6).train(resume_from_checkpoint=True)
    assert event_steps(tmp_path, "checkpoint_changed") == [2, 6]
    assert check(tmp_path / "checkpoints" / "step-00000006").problem is not None
    assert "model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"])
def test_hf_02_schedule_free_optimizers_train_evaluate_and_resume_as_in_transformers(
    tmp_path: Path, optim: str
) -> None:
    pytest.importorskip("schedulefree")
    args = {"optim": optim, "lr_scheduler_type": "linear", "max_steps": 6, "logging_steps": 1, "learning_rate": 0.01}
    args |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    data = {"train_dataset": plain_rows(64), "eval_dataset": plain_rows(8, seed=2)}
    theirs, ours, *_ = both(tmp_path, Plain, args=args, **data)
    expected, found = (
        [line.get("loss", line.get("eval_loss")) for line in trainer.state.log_history][:-1]
        for trainer in (theirs, ours)
    )
    assert found == pytest.approx(expected, abs=1e-5)
    assert difference(theirs.model, ours.model) < 1e-5
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected[-1], abs=1e-5)
    again = Trainer(Plain(seed=3), arguments(tmp_path / "ours", **args), **data)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert difference(again.model, ours.model) == 0


def test_hf_03_generation_settings_that_are_none_are_left_out(tmp_path: Path) -> None:
    class OfTheScript(Seq2SeqTrainer):
        """As transformers' trainer_seq2seq_qa.py."""

        def evaluate(self, eval_dataset: Any = None, **gen_kwargs: Any) -> Any:
            self._gen_kwargs = gen_kwargs
            return self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation").metrics

    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to="none", disable_tqdm=True
    )
    data = [{"input_ids": [5, 6, 7, 1], "labels": [8, 9, 1]}] * 4
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    found = OfTheScript(model, args, eval_dataset=data, processing_class=tokenizer).evaluate(
        max_length=8, num_beams=None
    )
    assert np.isfinite(found["eval_loss"])


def test_hf_04_metrics_by_batch_may_be_none_until_the_last(tmp_path: Path) -> None:
    def make_scorer() -> Any:
        seen: list[float] = []

        def score(prediction: Any, compute_result: bool) -> dict[str, float] | None:
            seen.append(float((prediction.predictions.argmax(-1) == prediction.label_ids).float().mean()))
            return {"accuracy": sum(seen) / len(seen)} if compute_result else None

        return score

    *_, expected, found = both(
        tmp_path, Plain, act=lambda trainer: trainer.evaluate(), eval_dataset=plain_rows(16),
        make_compute_metrics=make_scorer, args={"batch_eval_metrics": True, "per_device_eval_batch_size": 4},
    )  # fmt: skip
    assert found["eval_accuracy"] == expected["eval_accuracy"]


def test_hf_05_callbacks_get_both_loaders(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        """Notes the lengths of the loaders."""

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(len(kwargs["train_dataloader"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen += [len(kwargs["train_dataloader"]), len(kwargs["eval_dataloader"])]

    data = {"train_dataset": plain_rows(40), "eval_dataset": plain_rows(20)}
    trainers = both(tmp_path, Plain, args=EVALUATING, make_callbacks=lambda: [Looks()], **data)[:2]
    theirs, ours = (trainer.pop_callback(Looks).seen for trainer in trainers)
    assert ours == theirs == [5, 5, 3, 5, 3]


def test_hf_06_strategies_may_be_set_as_text_afterwards(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    args.save_strategy, args.eval_strategy, args.lr_scheduler_type, args.optim = "no", "epoch", "linear", "adamw_torch"
    trainer = Trainer(Plain(), args, train_dataset=plain_rows(16), eval_dataset=plain_rows(8))
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [2]


def test_hf_07_a_patched_import_of_transformers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "Trainer", Trainer)
    args = arguments(tmp_path, max_steps=1, optim="rmsprop")
    trainer = transformers.Trainer(Plain(), args, train_dataset=plain_rows(8))
    assert isinstance(trainer.create_optimizer(), torch.optim.RMSprop)
    assert trainer.train().global_step == 1

    class Never(Trainer):
        """Overrides what is never called."""

        def _save_checkpoint(self, *args: Any) -> None:
            """Do nothing."""

    refused(Never, Plain(), arguments(tmp_path), named="_save_checkpoint")


def test_hf_08_both_trainers_are_imported_from_the_package() -> None:
    assert accel_train.Seq2SeqTrainer is Seq2SeqTrainer
    assert {"Trainer", "Seq2SeqTrainer"} <= set(accel_train.__all__)


def test_hf_09_the_rate_that_adafactor_chooses_is_logged(tmp_path: Path) -> None:
    rates = []
    for kind in (StockTrainer, Trainer):
        model = bert()
        own: dict[str, Any] = {"scale_parameter": True, "relative_step": True, "warmup_init": True, "lr": None}
        optimizer = transformers.Adafactor(model.parameters(), **own)
        optimizers = (optimizer, AdafactorSchedule(optimizer))
        args = arguments(tmp_path / kind.__module__, max_steps=3, logging_steps=1)
        trainer = kind(model, args, train_dataset=rows(32), optimizers=optimizers)
        trainer.train()
        rates.append([line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line])
    assert len(rates[0]) == 3
    assert rates[1] == pytest.approx(rates[0], rel=1e-4)


def test_hf_a_class_of_both_trainers_is_refused() -> None:
    class OfALibrary(StockTrainer):
        """As SFTTrainer."""

    refused(type, "Mixed", (OfALibrary, Trainer), {}, named="class Mixed")


def test_hf_default_callbacks_and_attributes_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    theirs, ours, *_ = both(tmp_path, Plain, act=lambda trainer: None, args={"disable_tqdm": False})
    names = [[type(each).__name__ for each in trainer.callback_handler.callbacks] for trainer in (theirs, ours)]
    assert names[1] == names[0]
    same = ("is_model_parallel", "place_model_on_device", "_train_batch_size", "current_flos", "neftune_noise_alpha")
    for name in (*same, "hp_search_backend", "deepspeed", "model_accepts_loss_kwargs"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours._get_output_dir(None) == ours.args.output_dir
    assert ours.gather_function(torch.ones(2)).tolist() == [1.0, 1.0]
    assert isinstance(ours.pop_callback(transformers.ProgressCallback), transformers.ProgressCallback)


def test_hf_the_last_micro_batch_of_a_step_synchronises_and_the_plan_is_logged_at_info(
    tmp_path: Path,
) -> None:
    class Looks(Trainer):
        """Notes in which micro-batches gradients are synchronised."""

        seen: tuple[bool, ...] = ()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += (self.accelerator.sync_gradients,)
            return super().compute_loss(*args, **kwargs)

    verbosity, logged = transformers.logging.get_verbosity(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage().strip())  # type: ignore[method-assign]
    logging.getLogger("transformers.trainer").addHandler(handler)
    try:
        args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=3, log_level="info")
        trainer = Looks(Plain(), args, train_dataset=plain_rows(48))
        trainer.train()
    finally:
        transformers.logging.set_verbosity(verbosity)
        logging.getLogger("transformers.trainer").removeHandler(handler)
    assert trainer.seen == (False, False, True) * 2
    assert {"***** Running training *****", "Num examples = 48", "Total optimization steps = 2"} <= set(logged)


def test_hf_the_load_state_dict_of_a_model_is_called_when_a_run_resumes(tmp_path: Path) -> None:
    args: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = Trainer(Grows(), arguments(tmp_path, **args), train_dataset=plain_rows(32))
    whole.train()
    again = Trainer(Grows(), arguments(tmp_path, **args), train_dataset=plain_rows(32))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(whole.model.order) == 4
    assert again.model.order.tolist() == whole.model.order.tolist()


def test_hf_a_step_that_is_made_again_counts_its_operations_once(tmp_path: Path) -> None:
    class RunsOut(Trainer):
        """Has no room for 8 rows, once."""

        has_room = False

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            if len(inputs["labels"]) > 4 and not self.has_room:
                self.has_room = True
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().compute_loss(model, inputs, **kwargs)

    found = []
    for kind in (Trainer, RunsOut):
        trainer = kind(bert(), arguments(tmp_path / kind.__name__, max_steps=3), train_dataset=rows(24))
        trainer.train()
        found.append(trainer.state.total_flos)
    assert found[1] == found[0] > 0
