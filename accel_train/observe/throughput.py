"""Throughput of a run: tokens and samples per second, and the share of the hardware's arithmetic that it uses."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def model_flops_per_token(
    num_parameters_without_position_embeddings: int,
    num_layers: int,
    hidden_size: int,
    sequence_length: int,
    *,
    num_frozen: int = 0,
) -> int:
    """Floating-point operations that training on one token needs: 6 N - 2 F + 12 L D T, forward and backward.

    N parameters without position embeddings, F of them frozen (gradients pass through them, and none is computed for them),
    L layers, D hidden size, T tokens of context; recomputation does not count, and causal attention is not halved.
    PaLM (arXiv:2204.02311) appendix B; nanoGPT's `estimate_mfu`.
    """
    weights = 6 * num_parameters_without_position_embeddings - 2 * num_frozen
    return weights + 12 * num_layers * hidden_size * sequence_length


@dataclass(frozen=True)
class Rates:
    """Rates of a stretch of training; None where it took no time, or where the hardware's peak is not known."""

    tokens_per_second: float | None
    samples_per_second: float | None
    mfu: float | None
    """Model FLOP utilisation: the operations the model needs, over those the devices could have done (0 to 1)."""


class Meter:
    """A clock that runs while the run trains: rates between two log lines and over the whole launch.

    Evaluation and checkpoints are left out with `paused()`. All numbers are of the whole run, over all processes.

    Args:
        flops_per_token: of `model_flops_per_token`; None if the model's shape is not known: no MFU then.
        peak_flops: of all devices together, operations per second; None if not known: no MFU then.
        train_seconds: training time of earlier launches, from the checkpoint.
        clock: seconds, rising.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None,
        peak_flops: float | None,
        train_seconds: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mfu_per_token_rate = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._clock = clock
        self._seconds_before = train_seconds
        self._paused_since: float | None = None
        self._num_tokens = self._num_samples = 0
        self._window_tokens = self._window_samples = 0
        self._begin = self._window_begin = clock()

    def add(self, num_tokens: int, num_samples: int) -> None:
        self._num_tokens += num_tokens
        self._num_samples += num_samples

    @property
    def train_seconds(self) -> float:
        """Training time over all launches, pauses left out."""
        return self.train_seconds_at(None)

    def train_seconds_at(self, time: float | None) -> float:
        """Return the training time up to a time of the clock, since when there was no pause; None: now."""
        return self._seconds_before + (self._now() if time is None else time) - self._begin

    def window(self, *, restart: bool, until: float | None = None) -> Rates:
        """Return the rates since the last restart, up to a time of the clock (since when there was no pause) or now.

        `restart` begins the next window there.
        """
        now = self._now() if until is None else until
        rates = self._rates(
            self._num_tokens - self._window_tokens, self._num_samples - self._window_samples, now - self._window_begin
        )
        if restart:
            self._window_begin, self._window_tokens, self._window_samples = now, self._num_tokens, self._num_samples
        return rates

    def overall(self) -> Rates:
        """Return the rates of this launch, its first steps (compilation, warm-up of the allocator) included."""
        return self._rates(self._num_tokens, self._num_samples, self._now() - self._begin)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context for time that is not training; pauses may be nested."""
        if self._paused_since is not None:
            yield
            return
        self._paused_since = self._clock()
        try:
            yield
        finally:
            pause_seconds = self._clock() - self._paused_since
            self._paused_since = None
            self._begin += pause_seconds  # a clock that stood still: both origins move by the pause
            self._window_begin += pause_seconds

    def _now(self) -> float:
        return self._clock() if self._paused_since is None else self._paused_since

    def _rates(self, num_tokens: int, num_samples: int, seconds: float) -> Rates:
        if seconds <= 0:
            return Rates(None, None, None)
        tokens_per_second = num_tokens / seconds
        mfu = None if self._mfu_per_token_rate is None else tokens_per_second * self._mfu_per_token_rate
        return Rates(tokens_per_second, num_samples / seconds, mfu)
