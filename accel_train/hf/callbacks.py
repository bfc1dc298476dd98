"""The bridge between our loop and transformers' callbacks: an observer that keeps TrainerState and calls CallbackHandler.

At each step, evaluation and checkpoint it calls the event that transformers' Trainer would call there, and turns the callbacks'
TrainerControl into requests to the loop. Where no callback can request anything, the host does not wait for steps: then a
step is reported while the next one runs.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from accel_train.checkpoint.contents import optimizer_tensors
from accel_train.checkpoint.store import checkpoint_folders, step_of
from accel_train.core.state import Requests, StepResult
from accel_train.hf.arguments import Length
from accel_train.hf.checkpoints import link_checkpoints
from accel_train.hf.hub import push_checkpoint
from accel_train.observe.observer import Observer

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext
    from accel_train.hf import Trainer

TRAINER_STATE = "trainer_state.json"
CLOCKS = ("runtime", "_per_second", "epoch")
"""Values that `Trainer.evaluate` returns next to metrics, by the end of its names."""


class Flow(Observer):
    """An observer on every process that keeps `trainer.state`, calls the callbacks, and writes the log."""

    def __init__(
        self, trainer: "Trainer", length: Length, requests: Requests | None, ignore_keys: list[str] | None
    ) -> None:
        self.trainer, self.length, self.requests, self.ignore_keys = trainer, length, requests, ignore_keys
        self.flops = 0.0
        """Operations since this process started; over all processes after `end`."""
        self.run: RunContext | None = None
        self._by_step: dict[int, dict[str, float]] = {}
        self._is_best_loaded, self._has_links, self._is_optimizer_checked = False, True, False
        self._since_log: list[StepResult] = []
        self._applied_sum, self._num_applied = 0.0, 0
        self._num_skipped = 0
        self.began = self.ended = time.time()
        """Times at which the loop began and ended, without preparation and report."""

    def begin(self, run: "RunContext") -> None:
        """Set a new state, or that of the checkpoint which is resumed; then call on_train_begin.

        Raises:
            OSError: the checkpoint's state cannot be read.
        """
        trainer, args = self.trainer, self.trainer.args
        self.run, self.began = run, time.time()
        state = TrainerState(stateful_callbacks=self._exportable())
        saved = run.plan.resume_point.path / TRAINER_STATE if run.plan.resume_point.path is not None else None
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
        self._link_checkpoints()  # the folder may hold those of a run that was killed, or archived
        handler = trainer.callback_handler
        handler.model, handler.optimizer = trainer.model, run.strategy.optimizer
        handler.lr_scheduler = trainer.lr_scheduler
        self._call("on_train_begin")
        self._begin_step_after(run.state.step)

    def _call(self, event: str) -> None:
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _begin_step_after(self, step: int) -> None:
        if step < self.length.max_steps:
            if step % self.length.steps_per_epoch == 0:
                self._call("on_epoch_begin")
            self._call("on_step_begin")

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Call on_step_end, and on_epoch_end where it ends one; log now, and request the rest from the loop.

        Raises:
            ValueError: a callback asks to end an epoch early.
        """
        trainer, state = self.trainer, self.trainer.state
        state.global_step, state.epoch = result.step, self._epoch(result.step)
        self._note_best()
        if not (self._is_optimizer_checked or result.skipped) and self.run is not None:
            optimizer_tensors(self.run.strategy.optimizer)  # refuse now what the first save could not hold
            self._is_optimizer_checked = True
        self._since_log.append(result)
        if result.skipped:
            self._num_skipped += 1
        else:
            self._applied_sum += result.loss
            self._num_applied += 1
        self._call("on_step_end")
        if result.step % self.length.steps_per_epoch == 0 or result.step == self.length.max_steps:
            self._call("on_epoch_end")
        if trainer.control.should_epoch_stop:
            raise ValueError(
                f"a callback set control.should_epoch_stop at step {result.step}: which samples make a step is fixed beforehand, so "
                "an epoch cannot end early; set should_training_stop, or lower num_train_epochs"
            )
        if trainer.control.should_log:
            self._log(result, learning_rate)
        self._request(result.step)
        self._begin_step_after(result.step)

    def _log(self, result: StepResult, learning_rate: float) -> None:
        """Log the mean loss since the last log, as transformers does; a NaN in it makes it NaN."""
        logs: dict[str, float] = {
            "loss": sum(each.loss for each in self._since_log) / len(self._since_log),
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
        }
        if num_skipped := sum(each.skipped for each in self._since_log):
            logs["skipped_steps"] = num_skipped
        self._since_log = []
        self.trainer.log(logs, self.began)

    def _request(self, step: int) -> None:
        """Turn the callbacks' signals into requests; one process that signals is enough."""
        control = self.trainer.control
        if self.requests is None:
            return
        signals = torch.tensor(
            [control.should_training_stop, control.should_save, control.should_evaluate], dtype=torch.int32
        )
        if self.trainer.args.world_size > 1:
            signals = signals.to(self.trainer.accelerator.device)
            dist.all_reduce(signals, op=dist.ReduceOp.MAX)
        stop, save, evaluate = map(bool, signals.tolist())
        self.requests.stop |= stop and step < self.length.max_steps
        self.requests.save |= save
        if evaluate and self.trainer.args.eval_strategy == "no":
            self.trainer.evaluate()  # the loop evaluates only where the arguments say so
        else:
            self.requests.evaluate |= evaluate

    def evaluate(self) -> dict[str, float]:
        """Run `trainer.evaluate()` for the loop, once for each state of the weights, and note the best metric.

        Returns the metrics without `eval_` before their names; where there is no loss, it is NaN.
        """
        assert self.run is not None
        trainer, state = self.trainer, self.trainer.state
        step = self.run.state.step if not self._is_best_loaded else self.run.state.best_step or 0
        if self._is_best_loaded and step not in self._by_step:
            # A newest logged evaluation counts, also one of an earlier process: transformers evaluates once, too.
            lines = (line for line in state.log_history if line["step"] == step)
            logged = {name: value for line in lines for name, value in line.items() if name.startswith("eval_")}
            self._by_step |= {step: logged} if logged else {}
        if step not in self._by_step:
            self._by_step[step] = trainer.evaluate(ignore_keys=self.ignore_keys)
        found = {name.removeprefix("eval_"): value for name, value in self._by_step[step].items()}
        metrics = {name: v for name, v in found.items() if isinstance(v, float | int) and not name.endswith(CLOCKS)}
        if self.requests is not None and trainer.control.should_training_stop:  # EarlyStoppingCallback, in on_evaluate
            self.requests.stop |= state.global_step < self.length.max_steps
        return {"loss": math.nan, **metrics}

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Call on_save on the process that saved; note loaded best weights; forget evaluations that a rollback undoes."""
        if kind == "checkpoint":
            self._link_checkpoints()
            self._call("on_save")
            push_checkpoint(self.trainer, Path(self._folder(step)))
        if kind == "rollback":
            self._by_step = {done: metrics for done, metrics in self._by_step.items() if done <= facts["to_step"]}
        if kind == "best_model":
            self._is_best_loaded = True

    def pause(self) -> AbstractContextManager[None]:
        """Copy the state for the checkpoint that may follow: an evaluation or a checkpoint begins."""
        if self.run is None:
            return nullcontext()
        self._note_best()
        if self.trainer.is_world_process_zero():
            self._find_best_checkpoint()
            exported = TrainerState(stateful_callbacks=self._exportable())
            self.trainer.state.stateful_callbacks = exported.stateful_callbacks
            text = json.dumps(dataclasses.asdict(self.trainer.state), indent=2)
            self.run.facts.description[TRAINER_STATE] = text.encode()
        return nullcontext()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Note the end of training; the report is not training time."""
        self.ended = time.time()
        self._link_checkpoints()  # without those that a rotation has removed since

    def count(self, inputs: dict[str, Any]) -> None:
        """Add the operations of a micro-batch; a compiled graph counts none."""
        if not torch.compiler.is_compiling() and self.trainer.model.training:
            self.flops += self.trainer.floating_point_ops(inputs)

    def end(self) -> None:
        """Sum the operations over processes, after everything is written."""
        if self.trainer.args.world_size > 1:
            flops = torch.tensor(self.flops, device=self.trainer.accelerator.device)
            dist.all_reduce(flops)
            self.flops = float(flops)
        self._note_best()
        self._find_best_checkpoint()

    def training_loss(self) -> tuple[float, int]:
        """Return the mean loss of the steps applied since this process started, and the number skipped."""
        if self._num_applied == 0:
            return (math.nan if self._num_skipped else 0.0), self._num_skipped
        return self._applied_sum / self._num_applied, self._num_skipped

    def _epoch(self, step: int) -> float:
        return self.length.epoch_at(step, self.trainer.args.gradient_accumulation_steps)

    def _folder(self, step: int) -> str:
        """Return the folder of a checkpoint by transformers' name, or by ours where the file system has no links."""
        assert self.run is not None
        output_dir = self.run.plan.output_dir
        return str(output_dir / (f"checkpoint-{step}" if self._has_links else f"checkpoints/step-{step:08d}"))

    def _link_checkpoints(self) -> None:
        """Let `checkpoint-N` in the run folder name each published checkpoint: scripts look for them there."""
        assert self.run is not None
        if self.trainer.is_world_process_zero():
            try:
                in_the_way = link_checkpoints(self.run.plan.output_dir)
            except OSError as error:
                self._has_links, in_the_way = False, []
                self.run.observer.note(f"checkpoint-N: no links to checkpoints/ can be made here ({error})")
            for path in in_the_way:
                self.run.observer.note(f"{path} was there before and is left alone; this run's is in checkpoints/")

    def _note_best(self) -> None:
        """Copy the best metric so far, and its step, from the loop."""
        assert self.run is not None
        state, args, own = self.trainer.state, self.trainer.args, self.run.state
        if args.metric_for_best_model is not None and own.best_step is not None:
            state.best_metric = own.best_metric
            state.best_global_step = own.best_step if args.save_strategy != "no" else None

    def _find_best_checkpoint(self) -> None:
        """Set `state.best_model_checkpoint` to the folder of the best step, which exists or is about to."""
        assert self.run is not None
        state = self.trainer.state
        saved = {step_of(folder) for folder in checkpoint_folders(self.run.plan.output_dir / "checkpoints")}
        if state.best_global_step is not None and state.best_global_step in saved | {self.run.state.step}:
            state.best_model_checkpoint = self._folder(state.best_global_step)

    def _exportable(self) -> list[Any]:
        callbacks = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]

    def _restore_callbacks(self, state: TrainerState) -> None:
        """Give each callback that exports a state the saved one; several of one class in the order they were given."""
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
