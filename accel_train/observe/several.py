"""Several observers behind one: the run's own, and those that a program brings along."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from accel_train.observe.observer import Observer
from accel_train.state import StepResult


class Several:
    """Tells each observer in turn; the first one keeps the time."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self._open = ExitStack()

    @property
    def train_seconds(self) -> float:
        """Of the first."""
        return self.observers[0].train_seconds

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.on_step(result, learning_rate)

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Tell all."""
        for observer in self.observers:
            observer.on_evaluation(step, metrics, split)

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.on_event(kind, step, message, rank=rank, **facts)

    def note(self, text: str) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.note(text)

    def pause(self) -> AbstractContextManager[None]:
        """Pause all."""
        return self._pause()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.pause())
            yield

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.finish(summary)

    def __enter__(self) -> Self:
        for observer in self.observers:
            self._open.enter_context(observer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
