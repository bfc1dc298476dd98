"""Callbacks: code of a program or of a recipe's own module that reads a run, and may ask it to stop, save, or evaluate.

All processes call them with the same numbers. Nothing waits for the device unless a callback overrides `ask`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from accel_train.core.errors import SettingError
from accel_train.core.state import Requests, StepResult
from accel_train.engine.run import Extensions, RunContext
from accel_train.observe.observer import Observer
from accel_train.recipe.schema import Recipe
from accel_train.task import load_class


@dataclass(frozen=True)
class RunFacts:
    """A run as callbacks see it. Read it only: a change of weights or rates is not the same run on all processes."""

    recipe: Recipe
    output_dir: Path
    model: nn.Module
    """The model, unwrapped. If it is sharded, each process holds parts of its weights."""
    optimizer: torch.optim.Optimizer
    first_step: int
    """Number of steps done before this start. Not 0 after a resume."""
    max_steps: int
    is_main: bool
    """Whether this is the main process, the one that writes files."""
    note: Callable[[str], None]
    """Function that prints a line above the progress bar, on the main process."""


class Callback:
    """A reader of a run. Override the methods that you need; by default they do nothing.

    Every process calls them. Steps count from 1. A resume makes new objects.
    """

    def on_start(self, run: RunFacts) -> None:
        """Handle the start, before the first step of this launch."""

    def on_step(self, step: StepResult) -> None:
        """Handle a step's result. The device already computes the next step."""

    def ask(self, step: StepResult, requests: Requests) -> None:
        """Set `requests.stop`, `.save`, or `.evaluate` after a step. The host then waits for every step."""

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], requests: Requests) -> None:
        """Handle an evaluation. `requests.stop` and `requests.save` count here as well, without a wait."""

    def on_event(self, kind: str, step: int, message: str) -> None:
        """Handle an event of events.jsonl: checkpoint, skip, rollback, ... Only the main process sees some of them."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Handle the end of the run. `summary` holds summary.json, on the main process; the others get an empty one."""


def with_callbacks(recipe: Recipe, extensions: Extensions) -> Extensions:
    """Return the extensions with the callbacks of the recipe, and with requests if a callback overrides `ask`.

    Raises:
        ValueError: a callback cannot be imported or built, or is not derived from Callback.
    """
    given: list[Any] = [*extensions.callbacks]
    for name in recipe.log.callbacks:
        try:
            given.append(load_class("log.callbacks", name, "accel_train.Callback")())
        except TypeError as error:
            raise ValueError(f"log.callbacks={name!r} cannot be built without arguments: {error}") from error
    for each in given:
        if not isinstance(each, Callback):
            kind = f"the class {each.__name__}" if isinstance(each, type) else f"an object of {type(each).__name__}"
            raise SettingError(
                f"{kind} is not an object of a class derived from accel_train.Callback",
                "Derive your class from it, and give an object of it",
                "callbacks",
                ("log.callbacks",),
            )
    requests = extensions.requests or (Requests() if override(given, "ask") else None)
    return replace(extensions, callbacks=tuple(given), requests=requests)


def override(callbacks: Sequence[Callback], method: str) -> bool:
    """Return whether one of the callbacks overrides a method."""
    return any(getattr(type(each), method) is not getattr(Callback, method) for each in callbacks)


class CallbackObserver(Observer):
    """The observer that calls the callbacks of a run, and makes a request of one process the request of all."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._callbacks = run, run.plan.extensions.callbacks
        self._asks = override(self._callbacks, "ask")
        self._evaluates, self._stops = override(self._callbacks, "on_evaluation"), False

    def __enter__(self) -> Self:
        run = self._run
        facts = RunFacts(
            recipe=run.plan.recipe,
            output_dir=run.plan.output_dir,
            model=run.strategy.inner.model,
            optimizer=run.strategy.optimizer,
            first_step=run.state.step,
            max_steps=run.plan.max_steps,
            is_main=run.accelerator.is_main_process,
            note=lambda text: run.observer.note(text),
        )
        for callback in self._callbacks:
            callback.on_start(facts)
        return self

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        for callback in self._callbacks:
            callback.on_step(result)
        if self._asks:
            for callback in self._callbacks:
                callback.ask(result, self._run.requests)
            self._agree(result.step)

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        for callback in self._callbacks:
            callback.on_evaluation(step, metrics, self._run.requests)
        if self._evaluates:
            self._agree(step)

    def on_event(
        self, kind: str, step: int, message: str, *, rank: int | None = None, names_step: bool = False, **facts: Any
    ) -> None:
        for callback in self._callbacks:
            callback.on_event(kind, step, message)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_end(summary)

    def _agree(self, step: int) -> None:
        """* Make each request that some process has one of all processes, and record a stop before the last step."""
        run, requests = self._run, self._run.requests
        if run.accelerator.num_processes > 1:
            asked = torch.tensor([requests.stop, requests.save, requests.evaluate], device=run.accelerator.device).int()
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
            requests.stop, requests.save, requests.evaluate = map(bool, asked.tolist())
        requests.stop &= step < run.plan.max_steps and not run.state.stopped_early
        if requests.stop and not self._stops:
            self._stops = True
            run.observer.on_event("early_stop", step, "stopped early, as a callback asked")
