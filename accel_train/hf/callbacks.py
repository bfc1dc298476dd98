"""The bridge between our loop and transformers' callbacks: an observer that keeps TrainerState and calls CallbackHandler.

The loop tells it of steps, evaluations and checkpoints; it calls the event that transformers' Trainer would call there, and
turns what callbacks ask for (TrainerControl) into requests to the loop. Where no callback can ask for anything, there are
no requests, and the host does not wait for steps: then a step is told while the next one runs.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import ExportableState

from accel_train.checkpoint import checkpoint_folders, step_of
from accel_train.hf_face.arguments import Length
from accel_train.hf_face.hub import push_checkpoint
from accel_train.state import Requests, StepResult

if TYPE_CHECKING:
    from accel_train.hf import Trainer
    from accel_train.run import Run

TRAINER_STATE = "trainer_state.json"
CLOCKS = ("runtime", "_per_second", "epoch")
"""What `Trainer.evaluate` returns beside metrics, by the end of its names."""
INSIDE_A_STEP = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
ASKS_NOTHING = (DefaultFlowCallback, PrinterCallback, ProgressCallback, *INTEGRATION_TO_CALLBACK.values())


def check_callbacks(callbacks: list[TrainerCallback]) -> None:
    """Refuse callbacks that look into a step: gradients are clipped and used there in one go, on the device.

    Raises:
        ValueError: naming the callback and its method.
    """
    for callback in callbacks:
        for event in INSIDE_A_STEP:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                raise ValueError(
                    f"{type(callback).__name__}.{event} would never be called: nothing is told inside a step; use on_step_end "
                    "(the gradient norm is in state.log_history and metrics.jsonl)"
                )


def may_ask(callbacks: list[TrainerCallback]) -> bool:
    """Whether a callback can ask for something, so that the host has to wait for each step."""
    return any(type(callback) not in ASKS_NOTHING for callback in callbacks)


class Flow:
    """Told by the loop, on every process; keeps `trainer.state`, calls the callbacks, and writes the log."""

    train_seconds = 0.0  # the run's own observer keeps the time

    def __init__(
        self, trainer: "Trainer", length: Length, requests: Requests | None, ignore_keys: list[str] | None
    ) -> None:
        self.trainer, self.length, self.requests, self.ignore_keys = trainer, length, requests, ignore_keys
        self.flops = 0.0
        """Of this sitting, on this process; over all processes after `end`."""
        self.run: Run | None = None
        self._by_step: dict[int, dict[str, float]] = {}
        self._is_best_loaded = False
        self._losses: list[float] = []
        self._applied_sum, self._num_applied = 0.0, 0
        self._num_skipped = self._skipped_since_log = 0
        self.began = self.ended = time.time()
        """Of the loop, without what was prepared before and reported after it."""

    def begin(self, run: "Run") -> None:
        """The run is ready: a new state, or that of the checkpoint it goes on from; then on_train_begin.

        Raises:
            OSError: the checkpoint's state cannot be read.
        """
        trainer, args = self.trainer, self.trainer.args
        self.run, self.began = run, time.time()
        state = TrainerState(stateful_callbacks=self._exportable())
        saved = run.found.path / TRAINER_STATE if run.found.path is not None else None
        if saved is not None and saved.exists():
            state = TrainerState.load_from_json(str(saved))
            if args.restore_callback_states_from_checkpoint:
                self._restore_callbacks(state)
        state.compute_steps(args, self.length.max_steps)
        state.train_batch_size = args.per_device_train_batch_size
        state.max_steps, state.num_train_epochs = self.length.max_steps, self.length.num_epochs
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.global_step, state.epoch = run.state.step, self._epoch(run.state.step)
        trainer.state = state
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, run.optimizer, trainer.lr_scheduler
        trainer.control = handler.on_train_begin(args, state, trainer.control)
        if run.state.step < self.length.max_steps:
            if run.state.step % self.length.steps_per_epoch == 0:
                trainer.control = handler.on_epoch_begin(args, state, trainer.control)
            trainer.control = handler.on_step_begin(args, state, trainer.control)

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """on_step_end, on_epoch_end where it ends one, and what they ask for: a log now, the rest from the loop.

        Raises:
            ValueError: a callback asks to end an epoch early.
        """
        trainer, state, handler = self.trainer, self.trainer.state, self.trainer.callback_handler
        args = trainer.args
        state.global_step, state.epoch = result.step, self._epoch(result.step)
        self._losses.append(result.loss)
        if result.skipped:
            self._num_skipped += 1
            self._skipped_since_log += 1
        else:
            self._applied_sum += result.loss
            self._num_applied += 1
        trainer.control = handler.on_step_end(args, state, trainer.control)
        ends_epoch = result.step % self.length.steps_per_epoch == 0 or result.step == self.length.max_steps
        if ends_epoch:
            trainer.control = handler.on_epoch_end(args, state, trainer.control)
        if trainer.control.should_epoch_stop:
            raise ValueError(
                f"a callback set control.should_epoch_stop at step {result.step}: which samples make a step is fixed beforehand, so "
                "an epoch cannot end early; set should_training_stop, or lower num_train_epochs"
            )
        if trainer.control.should_log:
            self._log(result, learning_rate)
        self._ask(result.step)
        if result.step < self.length.max_steps:
            if ends_epoch:
                trainer.control = handler.on_epoch_begin(args, state, trainer.control)
            trainer.control = handler.on_step_begin(args, state, trainer.control)

    def _log(self, result: StepResult, learning_rate: float) -> None:
        """As transformers logs: the mean loss since the last log. It is not repaired: a NaN in it makes it NaN."""
        logs: dict[str, float] = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
        }
        if self._skipped_since_log:
            logs["skipped_steps"] = self._skipped_since_log
        self._losses, self._skipped_since_log = [], 0
        self.trainer.log(logs, self.began)

    def _ask(self, step: int) -> None:
        """Callbacks' wishes as requests; where processes disagree, one that asks is enough."""
        control = self.trainer.control
        if self.requests is None:
            return
        wishes = torch.tensor(
            [control.should_training_stop, control.should_save, control.should_evaluate], dtype=torch.int32
        )
        if self.trainer.world_size > 1:
            wishes = wishes.to(self.trainer.device)
            dist.all_reduce(wishes, op=dist.ReduceOp.MAX)
        stop, save, evaluate = (bool(wish) for wish in wishes.tolist())
        self.requests.stop |= stop and step < self.length.max_steps
        self.requests.save |= save
        if evaluate and self.trainer.args.eval_strategy == "no":
            self.trainer.evaluate()  # the loop evaluates only where the arguments say so
        else:
            self.requests.evaluate |= evaluate

    def evaluate(self) -> dict[str, float]:
        """The loop's evaluation: `trainer.evaluate()`, once for each state of the weights; then the best metric.

        Returns the metrics without `eval_` before their names; where there is no loss, it is NaN.
        """
        assert self.run is not None
        trainer, state = self.trainer, self.trainer.state
        step = self.run.state.step if not self._is_best_loaded else self.run.state.best_step or 0
        if self._is_best_loaded and step not in self._by_step and (logged := self._logged_at(step)):
            self._by_step[step] = logged
        if step not in self._by_step:
            self._by_step[step] = trainer.evaluate(ignore_keys=self.ignore_keys)
            self._note_best(self._by_step[step])
        found = {name.removeprefix("eval_"): value for name, value in self._by_step[step].items()}
        metrics = {name: v for name, v in found.items() if isinstance(v, float | int) and not name.endswith(CLOCKS)}
        if self.requests is not None and trainer.control.should_training_stop:  # EarlyStoppingCallback, in on_evaluate
            self.requests.stop |= state.global_step < self.length.max_steps
        return {"loss": math.nan, **metrics}

    def _logged_at(self, step: int) -> dict[str, float]:
        """What the newest evaluation of a step found, in a sitting before this one perhaps: transformers does it once, too."""
        lines = [line for line in self.trainer.state.log_history if line["step"] == step]
        return {name: value for line in lines for name, value in line.items() if name.startswith("eval_")}

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        args, state = self.trainer.args, self.trainer.state
        if args.metric_for_best_model is None:
            return
        value = metrics.get(f"eval_{args.metric_for_best_model.removeprefix('eval_')}")
        if value is None or not math.isfinite(value):
            return  # the loop says so where the name is wrong
        is_better = state.best_metric is None or (
            value > state.best_metric if args.greater_is_better else value < state.best_metric
        )
        if is_better:
            state.best_metric = value
            if args.save_strategy != "no":
                state.best_global_step = state.global_step

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Nothing: `evaluate` was there when it happened."""

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """on_save, on the process that saved; the best weights' return; and what is done again after a rollback."""
        trainer = self.trainer
        if kind == "checkpoint":
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
            push_checkpoint(trainer, Path(self._folder(step)))
        if kind == "rollback":
            self._by_step = {done: found for done, found in self._by_step.items() if done <= facts["to_step"]}
        if kind == "best_model":
            self._is_best_loaded = True

    def note(self, text: str) -> None:
        """Nothing."""

    def pause(self) -> AbstractContextManager[None]:
        """An evaluation or a checkpoint begins: what a checkpoint holds of the state is that of now."""
        if self.run is not None and self.trainer.is_world_process_zero():
            self._find_best_checkpoint()
            exported = TrainerState(stateful_callbacks=self._exportable())
            self.trainer.state.stateful_callbacks = exported.stateful_callbacks
            self.run.description[TRAINER_STATE] = json.dumps(dataclasses.asdict(self.trainer.state), indent=2).encode()
        return nullcontext()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Training is over; what the loop writes from now on (the report) is not training time."""
        self.ended = time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def count(self, inputs: dict[str, Any]) -> None:
        """Add up the operations of a micro-batch; a compiled graph is left as it is, and counts none."""
        if not torch.compiler.is_compiling() and self.trainer.model.training:
            self.flops += self.trainer.floating_point_ops(inputs)

    def end(self) -> None:
        """The last step is done, and everything is written."""
        if self.trainer.world_size > 1:
            flops = torch.tensor(self.flops, device=self.trainer.device)
            dist.all_reduce(flops)
            self.flops = float(flops)
        self._find_best_checkpoint()

    def training_loss(self) -> tuple[float, int]:
        """Mean loss of this sitting's steps that were applied, and how many were skipped."""
        if self._num_applied == 0:
            return (math.nan if self._num_skipped else 0.0), self._num_skipped
        return self._applied_sum / self._num_applied, self._num_skipped

    def _epoch(self, step: int) -> float:
        return self.length.epoch_at(step, self.trainer.args.gradient_accumulation_steps)

    def _folder(self, step: int) -> str:
        assert self.run is not None
        return str(self.run.output_dir / "checkpoints" / f"step-{step:08d}")

    def _find_best_checkpoint(self) -> None:
        """`state.best_model_checkpoint`: the folder of the best step, which is there or about to be."""
        assert self.run is not None
        state = self.trainer.state
        saved = {step_of(folder) for folder in checkpoint_folders(self.run.output_dir / "checkpoints")}
        if state.best_global_step is not None and state.best_global_step in saved | {self.run.state.step}:
            state.best_model_checkpoint = self._folder(state.best_global_step)

    def _exportable(self) -> list[Any]:
        callbacks = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]

    def _restore_callbacks(self, state: TrainerState) -> None:
        """`restore_callback_states_from_checkpoint`: each callback that exports a state gets back the saved one.

        Several of one class get theirs in the order in which they were given to the trainer.
        """
        assert self.run is not None
        callbacks = [callback for callback in self._exportable() if isinstance(callback, TrainerCallback)]
        for kind, saved in (state.stateful_callbacks or {}).items():
            if kind == "TrainerControl":
                continue
            states = saved if isinstance(saved, list) else [saved]
            alike = [callback for callback in callbacks if type(callback).__name__ == kind]
            for callback, one in zip(alike, states, strict=False):
                for name, value in {**one["args"], **one["attributes"]}.items():
                    setattr(callback, name, value)
            if len(alike) != len(states):
                self.run.observer.note(
                    f"callbacks: the checkpoint has the state of {len(states)} {kind}, and there are {len(alike)}; "
                    f"{min(len(states), len(alike))} got it back"
                )
