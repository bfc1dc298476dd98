"""How fast a run is: tokens and samples per second, and the share of the hardware's arithmetic that it uses."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
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


# Dense peak TFLOP/s of one device as torch sees it (an MI250X is two), from the makers' data sheets: half the figure
# where a sheet counts 2:4 sparsity, and the rate with fp32 accumulation where a GeForce has two.
# Words of torch.cuda.get_device_name: (bf16, fp16, tf32, fp32); None: the device has no such units.
PEAK_TFLOPS: dict[str, tuple[float | None, float | None, float | None, float]] = {
    "P100 PCIE": (None, 18.7, None, 9.3),
    "P100 SXM2": (None, 21.2, None, 10.6),
    "V100": (None, 125, None, 15.7),
    "V100 PCIE": (None, 112, None, 14),
    "V100S PCIE": (None, 130, None, 16.4),
    "T4": (None, 65, None, 8.1),
    "Quadro RTX 6000": (None, 130.5, None, 16.3),
    "Quadro RTX 8000": (None, 130.5, None, 16.3),
    "RTX 2080 Ti": (None, 53.8, None, 13.4),
    "A100": (312, 312, 156, 19.5),
    "A800": (312, 312, 156, 19.5),
    "A30": (165, 165, 82, 10.3),
    "A10": (125, 125, 62.5, 31.2),
    "A10G": (70, 70, 35, 31.5),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "RTX A4000": (76.7, 76.7, 38.3, 19.2),
    "RTX A5000": (111.1, 111.1, 55.6, 27.8),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX 3080": (59.5, 59.5, 29.8, 29.8),
    "RTX 3090": (71, 71, 35.6, 35.6),
    "RTX 3090 Ti": (80, 80, 40, 40),
    "L4": (121, 121, 60, 30.3),
    "L20": (119.5, 119.5, 59.8, 59.8),
    "L40": (181, 181, 90.5, 90.5),
    "L40S": (362, 362, 183, 91.6),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    "RTX 4080": (97.5, 97.5, 48.7, 48.7),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 5080": (112.6, 112.6, 56.3, 56.3),
    "RTX 5090": (209.5, 209.5, 104.8, 104.8),
    "H100": (989.4, 989.4, 494.7, 66.9),  # SXM; torch names it "NVIDIA H100 80GB HBM3"
    "H100 PCIe": (756, 756, 378, 51),
    "H100 NVL": (835, 835, 417.5, 60),
    "H800": (989.4, 989.4, 494.7, 66.9),
    "H20": (148, 148, 74, 44),
    "H200": (989.4, 989.4, 494.7, 66.9),
    "H200 NVL": (835, 835, 417.5, 60),
    "GH200": (989.4, 989.4, 494.7, 66.9),
    "B200": (2250, 2250, 1125, 75),
    "GB200": (2500, 2500, 1250, 80),
    "B300": (2250, 2250, 1125, 75),
    "GB300": (2500, 2500, 1250, 80),
    "MI210": (181, 181, None, 45.3),
    "MI250": (181, 181, None, 45.3),
    "MI250X": (191.5, 191.5, None, 47.9),
    "MI300A": (980.6, 980.6, 490.3, 122.6),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4),
    "MI325X": (1307.4, 1307.4, 653.7, 163.4),
    "MI350X": (2306.9, 2306.9, None, 144.2),
    "MI355X": (2516.6, 2516.6, None, 157.3),
}
PEAK_DTYPES = ("bf16", "fp16", "tf32", "fp32")
# Another chip, or a part of one, under an otherwise equal name.
_VARIANT_WORDS = frozenset({"ti", "super", "laptop", "mobile", "max", "d", "mig"})


def peak_flops(device_name: str, dtype: str) -> float | None:
    """What one GPU can do at most, dense, in floating-point operations per second; None where that is not known.

    `device_name` is what `torch.cuda.get_device_name()` says. The longest name of the table whose words all occur
    in it decides; a laptop, Ti, Super or MIG variant only matches itself.

    Raises:
        ValueError: `dtype` is not one of bf16, fp16, tf32, fp32.
    """
    if dtype not in PEAK_DTYPES:
        raise ValueError(f"dtype={dtype!r} has no peak in the table; give one of {', '.join(PEAK_DTYPES)}")
    known = matching_device(device_name, PEAK_TFLOPS)
    tflops = None if known is None else PEAK_TFLOPS[known][PEAK_DTYPES.index(dtype)]
    return None if tflops is None else tflops * 1e12


def matching_device(device_name: str, names: Iterable[str]) -> str | None:
    """The longest of `names` whose words all occur in a device's name; None without one."""
    words = _words(device_name)
    matching = [
        name for name in names if _words(name) <= words and _words(name) & _VARIANT_WORDS == words & _VARIANT_WORDS
    ]
    return max(matching, key=len, default=None)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


@dataclass(frozen=True)
class Rates:
    """How fast a stretch of training was; None where it took no time, or where the hardware's peak is not known."""

    tokens_per_second: float | None
    samples_per_second: float | None
    mfu: float | None
    """Model FLOP utilisation: the operations the model needs, over those the devices could have done (0 to 1)."""


class Meter:
    """A clock that runs while the run trains: rates between two log lines and over the whole sitting.

    Evaluation and checkpoints are left out with `paused()`. All numbers are of the whole run, over all processes.

    Args:
        flops_per_token: of `model_flops_per_token`; None if the model's shape is not known: no MFU then.
        peak_flops: of all devices together, operations per second; None if not known: no MFU then.
        train_seconds: training time of earlier sittings, from the checkpoint.
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
        """Count one step."""
        self._num_tokens += num_tokens
        self._num_samples += num_samples

    @property
    def train_seconds(self) -> float:
        """Training time over all sittings, pauses left out."""
        return self.train_seconds_at(None)

    def train_seconds_at(self, time: float | None) -> float:
        """The same up to a time of the clock, since when there was no pause; None: now."""
        return self._seconds_before + (self._now() if time is None else time) - self._begin

    def window(self, *, restart: bool, until: float | None = None) -> Rates:
        """The rates since the last restart, up to a time of the clock (since when there was no pause) or now; `restart` begins the
        next window there."""
        now = self._now() if until is None else until
        rates = self._rates(
            self._num_tokens - self._window_tokens, self._num_samples - self._window_samples, now - self._window_begin
        )
        if restart:
            self._window_begin, self._window_tokens, self._window_samples = now, self._num_tokens, self._num_samples
        return rates

    def overall(self) -> Rates:
        """The rates of this sitting, its first steps (compilation, warm-up of the allocator) included."""
        return self._rates(self._num_tokens, self._num_samples, self._now() - self._begin)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within is not training; pauses may be nested."""
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
