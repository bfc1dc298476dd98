"""An observer that connects the loop to transformers' callbacks, TrainerState, and CallbackHandler.

At each step, evaluation, and checkpoint, the observer calls the event that transformers' Trainer would call there. It
turns the callbacks' TrainerControl into requests to the loop. If no callback can request anything, the host does not
wait for steps. Each step is then reported while the next one runs.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.optimization import AdafactorSchedule
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, TRAINER_STATE_NAME

from accel_train.checkpoint.contents import optimizer_tensors
from accel_train.checkpoint.store import accept_changes, files_below, folder_of
from accel_train.core.errors import SettingError
from accel_train.core.json_io import plain
from accel_train.core.state import Requests, StepResult
from accel_train.core.work import working
from accel_train.data.digest import digest_of_data
from accel_train.hf.argument_table import argument_error
from accel_train.hf.arguments import Length
from accel_train.hf.checkpoints import (
    SCHEDULER_STATE,
    STREAM,
    CheckpointNames,
    adapter_files,
    as_text,
    exportable,
    first_state,
    leave_in_evaluation_mode,
    state_text,
)
from accel_train.hf.hub import push_checkpoint
from accel_train.hf.inputs import SUMS, Inputs, Metrics, num_input_tokens
from accel_train.hf.search import report_to_search
from accel_train.observe.observer import Observer

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext
    from accel_train.hf import Trainer

ASKS_NOTHING = (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    DEFAULT_PROGRESS_CALLBACK,
    *INTEGRATION_TO_CALLBACK.values(),
)
"""Callbacks that request nothing from the loop, except at the steps that the arguments set."""
CLOCKS = ("runtime", "_per_second", "epoch")
"""Suffixes of values that `Trainer.evaluate` returns in addition to metrics."""


class Flow(Observer):
    """An observer on every process that keeps `trainer.state`, calls the callbacks, and writes the log."""

    run: "RunContext | None" = None
    stock_checkpoint: Path | None = None
    """Checkpoint of transformers' own Trainer to resume from. None otherwise."""
    scheduler: ReduceLROnPlateau | None = None
    """Schedule that follows the evaluations. None for other schedules."""
    # FLOPs of this process since it started, and FLOPs of all processes in the checkpoint.
    _flops = _flops_before = 0.0
    _is_best_loaded = _is_optimizer_checked = False
    _epoch_ended_at = 0
    last_read: tuple[list[Any], list[Any]] | None = None
    """Samples of the last step of a stream, after a place at or before them, as `HFTask._steps` takes it."""
    _applied_sum, _num_applied, _num_skipped = 0.0, 0, 0
    _begun_step, _flops_at_step, _shown_rate = -1, 0.0, 0.0
    _num_micro_batches = _num_own = 0
    """Micro-batches of the current step so far, and those with samples of this process."""

    def __init__(
        self, trainer: "Trainer", length: Length, requests: Requests | None, ignore_keys: list[str] | None
    ) -> None:
        self.trainer, self.length, self.requests, self.ignore_keys = trainer, length, requests, ignore_keys
        self._by_step: dict[int, dict[str, float]] = {}
        self._since_log: list[StepResult] = []
        self.own_of_short_steps: dict[int, int] = {}
        """Batches of this process by 0-based step, for steps of a stream in which it has fewer than usual."""
        self._tokens: list[Any] = []
        """Input tokens of each micro-batch since the last step."""
        self._hooks = ExitStack()
        self.began = self.ended = time.time()
        """Times (seconds since the epoch) at which the loop began and ended, without preparation and report."""

    def begin(self, run: "RunContext") -> None:
        """Set a new state, or the state of the resumed checkpoint, and call on_train_begin.

        Raises:
            OSError: the checkpoint's state cannot be read.
            SettingError: a callback exports a state that JSON cannot hold.
        """
        trainer, args = self.trainer, self.trainer.args
        self.run, self.began = run, time.time()
        folder = self.stock_checkpoint or run.plan.resume_point.path
        if folder and (folder / STREAM).is_file():
            run.facts.description[STREAM] = (folder / STREAM).read_bytes()
        state = first_state(trainer, folder, self.scheduler, run.observer.note)
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        if trainer._token_metrics is not None:
            trainer._token_metrics.num_tokens = run.state.num_input_tokens_seen
        state.compute_steps(args, self.length.max_steps)
        state.train_batch_size = args.per_device_train_batch_size
        state.max_steps, state.num_train_epochs = self.length.max_steps, self.length.num_epochs
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        state.global_step, state.epoch = run.state.step, self.length.epoch_at(run.state.step)
        self._epoch_ended_at, self._flops_before = run.state.step, state.total_flos
        try:
            state_text(TrainerState(stateful_callbacks=exportable(trainer)), plain)
        except TypeError as error:
            raise SettingError(f"the state() of a callback cannot be saved: {error}", at="callbacks") from None
        trainer.state = state
        self.names = CheckpointNames(run, trainer)
        # The folder may hold links of a killed or archived run.
        self.names.link()
        handler, self.rates = trainer.callback_handler, NextRates(run)
        if trainer.lr_scheduler is None:
            trainer.lr_scheduler = RecipeRates(run.strategy.optimizer, args.learning_rate)
        handler.model, handler.optimizer = trainer.model, run.strategy.optimizer
        handler.lr_scheduler = trainer.lr_scheduler
        self.rates.set(run.state.step)
        watch_updates(run.strategy.optimizer, handler.callbacks, self._call, self._hooks)
        self._call("on_train_begin")
        if self.requests is None:
            self._begin_step_after(run.state.step)

    def _call(self, event: str) -> None:
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _end_epoch(self) -> None:
        self._epoch_ended_at = self.trainer.state.global_step
        self._call("on_epoch_end")

    def _begin_step_after(self, step: int) -> None:
        if step < self.length.max_steps:
            if step % self.length.steps_per_epoch == 0:
                self._call("on_epoch_begin")
            self._call("on_step_begin")

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def on_step_begin(self, step: int) -> None:
        """Update the state, and call on_epoch_begin and on_step_begin if callbacks saw the last step."""
        self._num_micro_batches, self._num_own = 0, self._own_micro_batches(step)
        # The step is repeated: out of memory, or to find the weights that a step leaves unused.
        if step == self._begun_step:
            self._flops, self._tokens = self._flops_at_step, []
        self._begun_step, self._flops_at_step = step, self._flops
        self.trainer.state.global_step, self.trainer.state.epoch = step, self.length.epoch_at(step)
        if self.requests is not None and self.run is not None:
            self._begin_step_after(step)

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Call on_step_end, and on_epoch_end at the end of an epoch. Log now, and request other actions of the loop.

        Raises:
            SettingError: a callback asks to end an epoch early, but the epoch is not the last.
        """
        trainer, state = self.trainer, self.trainer.state
        state.global_step, state.epoch = result.step, self.length.epoch_at(result.step)
        self.names.note_best()
        if not (self._is_optimizer_checked or result.skipped) and self.run is not None:
            # DeepSpeed uses other names, and does not use an optimizer of the user.
            if self.run.strategy.keeps_gradients:
                # This raises now for a state that the first save could not hold.
                optimizer_tensors(self.run.strategy.optimizer)
            self._is_optimizer_checked = True
        self._since_log.append(result)
        if (metrics := trainer._token_metrics) is not None and self.run is not None:
            metrics.num_tokens += int(result.counts[SUMS.index("num_tokens")])
            self.run.state.num_input_tokens_seen = metrics.num_tokens
        if trainer.args.include_num_input_tokens_seen not in ("no", False):
            state.num_input_tokens_seen += int(self._over_processes([sum(self._tokens)])[0])
            self._tokens = []
        if (every := trainer.args.torch_empty_cache_steps) and result.step % every == 0:
            clear_device_cache()
        if result.skipped:
            self._num_skipped += 1
        else:
            self._applied_sum += result.loss
            self._num_applied += 1
        if self.requests is not None or result.step == self.length.max_steps:
            self.rates.set(result.step)
        # The log of a step shows the rate of the previous step.
        if isinstance(trainer.lr_scheduler, AdafactorSchedule):
            learning_rate, self._shown_rate = self._shown_rate, rate_in_use(trainer.lr_scheduler)
        self._call("on_step_end")
        if trainer.control.should_log:
            self._log(result, learning_rate)
        control = trainer.control
        self._stop_in_last_epoch(result.step)
        is_last = control.should_training_stop or result.step == self.length.max_steps
        # A requested evaluation or save comes before the end of its epoch.
        asks = is_last and (control.should_evaluate or control.should_save)
        if not asks and (is_last or result.step % self.length.steps_per_epoch == 0):
            self._end_epoch()
        # At most one log per step, as in transformers.
        if trainer.control.should_log and self._since_log:
            self._log(result, learning_rate)
        self._request(result.step)
        if self.requests is None:
            self._begin_step_after(result.step)

    def _log(self, result: StepResult, learning_rate: float) -> None:
        """Log the mean loss of the steps with targets since the last log. A NaN among them makes it NaN."""
        losses = [each.loss for each in self._since_log if each.num_targets]
        logs: dict[str, float] = {
            "loss": sum(losses) / len(losses) if losses else math.nan,
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
        }
        if num_skipped := sum(each.skipped for each in self._since_log):
            logs["skipped_steps"] = num_skipped
        if self.trainer._token_metrics is not None:
            logs |= self.trainer._token_metrics.of([each.counts for each in self._since_log])
        self._since_log = []
        self.trainer.log(logs, self.began)

    def _request(self, step: int) -> None:
        """Turn the callbacks' signals into requests. A signal of one process is enough."""
        if self.requests is None:
            return
        control = self.trainer.control
        signals = self._over_processes(
            [control.should_training_stop, control.should_save, control.should_evaluate], dist.ReduceOp.MAX
        )
        stop, save, evaluate = map(bool, signals)
        control.should_training_stop |= stop
        self.requests.stop |= stop and step < self.length.max_steps
        self.requests.save |= save
        if evaluate and self.trainer.args.eval_strategy == "no":
            # The loop evaluates only if the arguments ask for it.
            self.trainer.evaluate()
        else:
            self.requests.evaluate |= evaluate

    def evaluate(self) -> Metrics:
        """Run `trainer.evaluate()` for the loop, once per state of the weights, and note the best metric.

        Return the metrics without the prefix `eval_`. A missing loss is NaN.
        """
        assert self.run is not None
        trainer, state = self.trainer, self.trainer.state
        step = self.run.state.step if not self._is_best_loaded else self.run.state.best_step or 0
        if self._is_best_loaded and step not in self._by_step:
            # A logged evaluation of this step counts, even from an earlier process. Transformers also evaluates only
            # once.
            lines = (line for line in state.log_history if line["step"] == step)
            logged = {name: value for line in lines for name, value in line.items() if name.startswith("eval_")}
            self._by_step |= {step: logged} if logged else {}
        if step not in self._by_step:
            counts_nothing = trainer.overrides("evaluate") or trainer.overrides("evaluation_loop")
            with working("evaluating") if counts_nothing else nullcontext():
                found = [trainer.evaluate(ignore_keys=self.ignore_keys)]
            # All processes then choose the same best step, even if compute_metrics draws samples.
            broadcast_object_list(found)
            self._by_step[step] = found[0]
            report_to_search(trainer, self._by_step[step])
            if self.scheduler is not None:
                name = f"eval_{(trainer.args.metric_for_best_model or 'loss').removeprefix('eval_')}"
                if name not in found[0]:
                    raise argument_error(f"the evaluation has only {', '.join(found[0])}", metric_for_best_model=name)
                self.scheduler.step(found[0][name])
        named = {name.removeprefix("eval_"): as_text(value) for name, value in self._by_step[step].items()}
        metrics = {
            name: v for name, v in named.items() if isinstance(v, float | int | list) and not name.endswith(CLOCKS)
        }
        self._stop_in_last_epoch(state.global_step)
        # EarlyStoppingCallback requests a stop in on_evaluate.
        if self.requests is not None and trainer.control.should_training_stop:
            self.requests.stop |= state.global_step < self.length.max_steps
        return {"loss": math.nan, **metrics}

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Call on_save after a checkpoint, note loaded best weights, and forget evaluations after a rollback."""
        if kind == "checkpoint":
            self.names.link()
            self._call_on_save(step)
            push_checkpoint(self.trainer, Path(self.names.folder(step)))
        if kind == "rollback":
            self._by_step = {done: metrics for done, metrics in self._by_step.items() if done <= facts["to_step"]}
        if kind == "best_model":
            self._is_best_loaded = True

    def _call_on_save(self, step: int) -> None:
        """Call on_save, and accept files that callbacks write to the checkpoint as a part of it."""
        assert self.run is not None
        folder = folder_of(self.run.saver.root, step)
        before = files_below(folder)
        self._call("on_save")
        if not self.trainer.is_world_process_zero() or not folder.is_dir():
            return
        for name in accept_changes(folder, before):
            message = f"{folder.name}/{name}: changed by a callback's on_save, so a resume refuses this checkpoint"
            self.run.observer.on_event("checkpoint_changed", step, f"{message}. Write another file.")

    def pause(self, account: str) -> AbstractContextManager[None]:
        """Copy the state for a checkpoint that may follow. The loop calls this before evaluations and saves."""
        if self.run is None:
            return nullcontext()
        self.names.note_best()
        if account == "saving":
            self._sum_flops()
        if self.trainer.is_world_process_zero():
            self.names.find_best()
            exported = TrainerState(stateful_callbacks=exportable(self.trainer))
            self.trainer.state.stateful_callbacks = exported.stateful_callbacks
            self.run.facts.description[TRAINER_STATE_NAME] = state_text(self.trainer.state, as_text).encode()
            self.run.facts.description.update(adapter_files(self.trainer))
            if self.scheduler is not None:
                text = json.dumps(self.scheduler.state_dict(), default=as_text)
                self.run.facts.description[SCHEDULER_STATE] = text.encode()
            if account == "saving" and self.last_read:
                place, samples = self.last_read
                entry = [*place, digest_of_data(samples)[0]]
                self.run.facts.description[STREAM] = json.dumps(entry, default=as_text).encode()
        return nullcontext()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the end of training. The report that follows does not count as training time."""
        self.ended = time.time()
        step = self.trainer.state.global_step
        is_over = self.trainer.control.should_training_stop or step == self.length.max_steps
        if is_over and step != self._epoch_ended_at:
            self._end_epoch()
        # Remove links to checkpoints that a rotation has deleted since.
        self.names.link()

    def count(self, inputs: Inputs) -> bool:
        """Add the FLOPs and tokens of a micro-batch, and announce the previous one. Return whether it counts."""
        if torch.compiler.is_compiling() or not self.trainer.model.training:
            return False
        if self._num_micro_batches == self._num_own:
            return False
        self._flops += self.trainer.floating_point_ops(inputs)
        if self._num_micro_batches and self.requests is not None:
            self._call("on_substep_end")
        self._num_micro_batches += 1
        if self.trainer.args.include_num_input_tokens_seen not in ("no", False):
            self._tokens.append(num_input_tokens(self.trainer, inputs))
        return True

    def _own_micro_batches(self, step: int) -> int:
        """Return the number of a step's micro-batches with samples of this process. Others keep processes together."""
        assert self.run is not None
        plan, rank, sizes = self.run.plan, self.run.strategy.dims.rank, self.run.sizes
        if plan.data.step_batches is not None:
            return self.own_of_short_steps.get(step, sizes.gradient_accumulation_steps)
        if (step + 1) % self.length.steps_per_epoch:
            return sizes.gradient_accumulation_steps
        return len(plan.order.rank_micro_batches(step, rank, sizes.world_size, sizes.per_device_batch_size))

    def end(self) -> None:
        """Sum the FLOPs over processes, after all files are written."""
        self._sum_flops()
        if self.trainer.state.global_step in self._by_step:
            # Transformers leaves the model in this mode if an evaluation came last.
            leave_in_evaluation_mode(self.trainer)
        self.names.note_best()
        self.names.find_best()

    def _sum_flops(self) -> None:
        self.trainer.state.total_flos = self._flops_before + self._over_processes([self._flops])[0]

    def _over_processes(self, numbers: Sequence[Any], op: Any = dist.ReduceOp.SUM) -> list[float]:
        """* Return numbers, or tensors of one element, reduced over all processes."""
        if self.trainer.args.world_size == 1:
            return [float(number) for number in numbers]
        reduced = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device=self.trainer.accelerator.device)
        dist.all_reduce(reduced, op=op)
        return reduced.tolist()

    def _stop_in_last_epoch(self, step: int) -> None:
        """Turn a callback's request to end the last epoch at this step into a request to stop.

        A request at the end of an epoch changes nothing.

        Raises:
            SettingError: the request concerns an epoch before the last one.
        """
        epochs, step_in_epoch = divmod(step, self.length.steps_per_epoch)
        if not self.trainer.control.should_epoch_stop or step_in_epoch == 0:
            return
        if epochs < self.length.num_epochs - 1:
            raise argument_error(
                f"a callback set control.should_epoch_stop at step {step}, but only the last epoch can end early, "
                "because the samples of each step are fixed in advance",
                "Set should_training_stop, or lower it.",
                num_train_epochs=self.trainer.args.num_train_epochs,
            )
        self.trainer.control.should_training_stop = True

    def training_loss(self) -> tuple[float, int]:
        """Return the mean loss of the applied steps since this process started, and the number of skipped steps."""
        if self._num_applied == 0:
            return (math.nan if self._num_skipped else 0.0), self._num_skipped
        return self._applied_sum / self._num_applied, self._num_skipped


def may_ask(callbacks: list[TrainerCallback]) -> bool:
    """Return whether a callback may request something. The host then waits for each step."""
    return any(type(callback) not in ASKS_NOTHING for callback in callbacks)


def watch_updates(
    optimizer: torch.optim.Optimizer,
    callbacks: Sequence[TrainerCallback],
    call: Callable[[str], None],
    hooks: ExitStack,
) -> None:
    """Call the update events of callbacks that override one, until `hooks` is closed.

    Gradients are clipped before the first event and still exist in the second one. The events are also called for
    updates that are skipped on the device.
    """
    if not any(
        getattr(getattr(callback, event), "__func__", None) is not getattr(TrainerCallback, event)
        for callback in callbacks
        for event in ("on_pre_optimizer_step", "on_optimizer_step")
    ):
        return

    def before(updated: Any, *_: Any) -> None:
        # Apply the clipping here, because the fused update would only apply it later.
        if (scale := getattr(updated, "grad_scale", None)) is not None:
            for parameter in (each for group in updated.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            updated.grad_scale = None
        call("on_pre_optimizer_step")

    hooks.callback(optimizer.register_step_pre_hook(before).remove)
    hooks.callback(optimizer.register_step_post_hook(lambda *_: call("on_optimizer_step")).remove)


def rate_in_use(scheduler: AdafactorSchedule) -> float:
    """Return the rate of Adafactor's last update, derived from its state. Write it to `get_last_lr` and the groups."""
    optimizer: Any = scheduler.optimizer
    firsts = [(group, optimizer.state.get(group["params"][0])) for group in optimizer.param_groups]
    if all(state for _, state in firsts):
        scheduler._last_lr = [float(optimizer._get_lr(group, state)) for group, state in firsts]
        for (group, _), rate in zip(firsts, scheduler._last_lr, strict=True):
            group["lr"] = rate
    return float(scheduler.get_last_lr()[0])


def rates_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


class RecipeRates(LRScheduler):
    """A read-only scheduler that shows the recipe's rates to callbacks. The loop sets the rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float) -> None:
        self.optimizer, self.base_lrs = optimizer, [peak for _ in optimizer.param_groups]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate of each parameter group for the next step."""
        return rates_of(self.optimizer)


class NextRates:
    """The learning rates of the next step, set before callbacks run. A change by a callback lasts one step."""

    def __init__(self, run: "RunContext") -> None:
        self._run, self._schedule, self._step = run, run.schedule, -1
        self._given: list[float] = []
        run.schedule = self

    def __call__(self, step: int) -> float | Sequence[float]:
        in_use = rates_of(self._run.strategy.optimizer)
        return in_use if step == self._step and in_use != self._given else self._schedule(step)

    def set(self, step: int) -> None:
        """Set the schedule's rates of a 0-based step."""
        self._run.set_learning_rate(step)
        self._step, self._given = step, rates_of(self._run.strategy.optimizer)
