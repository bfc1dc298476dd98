"""The model of a step's time (`plan`), held against published figures, and carried on to 1,024 GPUs."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accel_train.core.hardware import GPUS, INTERCONNECTS
from accel_train.model.weights import ModelWeights
from accel_train.plan.formulas import collectives
from accel_train.plan.place import Layout, choose_layout
from accel_train.plan.step_time import StepTime, StepWork, model_step
from accel_train.recipe.parallel import Parallel
from benchmarks.common import markdown_table
from benchmarks.published import GPT2_124M, LLAMA_8B, SERIES, Series

WORLD_SIZES = (8, 16, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Predicted:
    """One published row, and what the model makes of it."""

    series: Series
    num_gpus: int
    published: float
    """Tokens a second of each GPU."""
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was published."""
        return self.predicted / self.published - 1


def predict(series: Series) -> Iterator[Predicted]:
    """Rows of a series: the first gives the seconds that a token takes to compute, the others
    follow from that alone.
    """
    weights = series.shape.weights()
    first, *_ = series.rows
    per_token = computing_per_token(series, weights, first)
    for row in series.rows:
        num_gpus, published, tokens, micro_batches = row
        step = step_of(series, weights, row, per_token)
        yield Predicted(series, num_gpus, published, tokens * micro_batches / step.seconds)


def step_of(series: Series, weights: ModelWeights, row: tuple[int, float, int, int], per_token: float) -> StepTime:
    """The modelled step of a row, at so many seconds of computing a token."""
    num_gpus, _, tokens, micro_batches = row
    layout = choose_layout(Parallel(strategy="fsdp2"), num_gpus, "cuda", 8)
    found = collectives(layout, weights, series.compute_bytes, series.reduce_bytes)
    work = StepWork(per_token * tokens * micro_batches, micro_batches, weights.part_numel(layout.shard_size), 2)
    return model_step(found, work, GPUS[series.gpu], INTERCONNECTS[series.interconnect])


def computing_per_token(series: Series, weights: ModelWeights, row: tuple[int, float, int, int]) -> float:
    """Seconds of computing a token that make the modelled step of a row as long as the published one (by bisection)."""
    _, published, tokens, micro_batches = row
    wanted = tokens * micro_batches / published
    low, high = 0.0, 1 / published
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if step_of(series, weights, row, middle).seconds < wanted else (low, middle)
    return (low + high) / 2


def check_rows() -> list[Predicted]:
    """All published rows."""
    return [row for series in SERIES for row in predict(series)]


@dataclass(frozen=True)
class Simulated:
    """One size of a run that nobody has published."""

    name: str
    layout: Layout
    step: StepTime
    tokens: int
    """Of a GPU in a step."""

    @property
    def tokens_per_second(self) -> float:
        """Of each GPU."""
        return self.tokens / self.step.seconds


def simulate() -> list[Simulated]:
    """Weak scaling on H100 nodes with 400 Gb/s a GPU, from 8 to 1,024 GPUs; computing as published for 8."""
    titan = next(series for series in SERIES if series.name == "Llama 3.1 8B, compiled")
    llama = computing_per_token(titan, LLAMA_8B.weights(), titan.rows[0])
    gpt2 = 1 / 468_000  # llm.c: 140 ms a step of 524,288 tokens on 8 H100
    cases: Sequence[tuple[str, Parallel, ModelWeights, float, int]] = (
        ("Llama 3.1 8B, fsdp2 over all", Parallel(strategy="fsdp2"), LLAMA_8B.weights(), llama, 16_384),
        (
            "Llama 3.1 8B, HSDP, 8 to a copy",
            Parallel(strategy="fsdp2", dp_shard_size=8),
            LLAMA_8B.weights(),
            llama,
            16_384,
        ),
        ("GPT-2 124M, ddp, 64 x 1024 a GPU", Parallel(), GPT2_124M.weights(), gpt2, 65_536),
        ("GPT-2 124M, ddp, 4 x 1024 a GPU", Parallel(), GPT2_124M.weights(), gpt2, 4096),
    )
    found = []
    for name, section, weights, per_token, tokens in cases:
        for num_gpus in WORLD_SIZES:
            layout = choose_layout(section, num_gpus, "cuda", 8)
            work = StepWork(per_token * tokens, 1, weights.part_numel(layout.shard_size), 2)
            step = model_step(collectives(layout, weights, 2), work, GPUS["H100"], INTERCONNECTS["roce-400"])
            found.append(Simulated(name, layout, step, tokens))
    return found


def model_text() -> tuple[str, list[dict[str, Any]]]:
    """The tables of the model, and their figures."""
    checks, sizes = check_rows(), simulate()
    first = {row.series: row.num_gpus for row in reversed(checks)}
    free = [row for row in checks if row.num_gpus != first[row.series]]
    errors = [row.error for row in free]
    rows = [
        [
            row.series.name,
            f"{row.series.gpu}, {row.series.interconnect}",
            str(row.num_gpus),
            f"{row.published:,.0f}",
            f"{row.predicted:,.0f}",
            "taken from it" if row.num_gpus == first[row.series] else f"{row.error:+.1%}",
        ]
        for row in checks
    ]
    headers = ["model", "GPU and network", "GPUs", "published tokens/s/GPU", "modelled", "error"]
    simulated = [
        [
            x.name,
            f"{x.layout.world_size:,}",
            f"{1e3 * x.step.seconds:,.1f}",
            f"{1e3 * x.step.communication_seconds:.1f}",
            f"{1e3 * x.step.exposed_seconds:.2f}",
            f"{x.step.efficiency:.3f}",
            f"{x.tokens_per_second:,.0f}",
        ]
        for x in sizes
    ]
    simulated_headers = [
        "run",
        "GPUs",
        "ms/step",
        "communication ms",
        "of it waited for ms",
        "efficiency",
        "tokens/s/GPU",
    ]
    sources = sorted({row.series.source for row in checks})
    remarks = sorted({f"{s.name}, {s.gpu}: {s.remark}" for s in first if s.remark})
    text = "\n".join(
        [
            "## Model: `plan`'s time of a step beside published figures (FSDP alone, 8 GPUs a node)",
            "",
            markdown_table(headers, rows, text=(headers[0], headers[1])),
            "",
            f"Errors of {len(free)} rows that nothing was taken from: median {statistics.median(errors):+.1%}, "
            f"{min(errors):+.1%} to {max(errors):+.1%}. "
            "The first row of a series gives",
            "the seconds that a token takes to compute, the others follow. The model is too fast on many GPUs: it "
            "knows no stragglers, and no computing",
            "that is slower beside communication or at a smaller micro-batch. No figures for FSDP alone beyond 128 "
            "GPUs were found: what follows there is unchecked.",
            *(f"{remark}." for remark in remarks),
            f"Sources: {'; '.join(sources)}.",
            "",
            "## Model, carried on to 1,024 H100 (8 a node, 400 Gb/s each): nothing here was run",
            "",
            markdown_table(simulated_headers, simulated, text=("run",)),
            "",
            "Computing: Llama as on torchtitan's 8 GPUs, compiled; GPT-2 at 468,000 tokens/s/GPU (llm.c: 140 ms a "
            "step on 8 H100), at any micro-batch.",
        ]
    )
    figures: list[dict[str, Any]] = [
        {
            "model": x.series.name,
            "gpu": x.series.gpu,
            "gpus": x.num_gpus,
            "published": x.published,
            "modelled": x.predicted,
            "error": x.error,
            "source": x.series.source,
        }
        for x in checks
    ] + [
        {"run": x.name, "gpus": x.layout.world_size, "step_seconds": x.step.seconds, "efficiency": x.step.efficiency}
        for x in sizes
    ]
    return text, figures
