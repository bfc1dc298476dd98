"""Throughput that others have published for FSDP alone on several numbers of GPUs: what a model of a step is held
against.
"""

from dataclasses import dataclass

from accel_train.model.weights import ModelWeights, Weight, WeightGroup


@dataclass(frozen=True)
class Shape:
    """A decoder, as far as its weights go."""

    layers: int
    width: int
    vocab: int
    positions: int
    """Rows of learned positions; 0: rotary ones."""
    mlp: tuple[int, ...]
    """Output widths of the matrices of the MLP that read the hidden state; one more leads back."""
    kv_width: int
    biases: bool
    tied: bool

    def weights(self) -> ModelWeights:
        """Its weights, grouped as FSDP does: a block each, the ends unless they are tied, and the rest."""
        d, inner = self.width, self.mlp[0]
        norm = [(d, 1)] * (2 if self.biases else 1)
        matrices = [(d + 2 * self.kv_width, d), (d, d), *((m, d) for m in self.mlp), (d, inner)]
        biases = [(rows, 1) for rows, _ in matrices] if self.biases else []
        embedding, positions = [(self.vocab, d)], [(self.positions, d)] if self.positions else []
        ends = ([], []) if self.tied else (embedding, [*norm, *embedding])
        rest = _group([*embedding, *positions, *norm] if self.tied else positions)
        block = _group([*matrices, *biases, *norm, *norm])
        first, last = map(_group, ends)
        every = first.weights + rest.weights + last.weights + block.weights * self.layers
        return ModelWeights(every, rest, (block,) * self.layers, (first, last))


def _group(shapes: list[tuple[int, int]]) -> WeightGroup:
    return WeightGroup(tuple(Weight(rows, columns, True) for rows, columns in shapes))


def mpt(layers: int, width: int, positions: int = 2048) -> Shape:
    """A model of MosaicML's benchmark: GPT-2's form, 50,368 tokens, learned positions."""
    return Shape(layers, width, 50_368, positions, (4 * width,), width, True, True)


LLAMA_8B = Shape(32, 4096, 128_256, 0, (14_336, 14_336), 1024, False, False)
GPT2_124M = Shape(12, 768, 50_304, 1024, (3072,), 768, True, True)


@dataclass(frozen=True)
class Series:
    """One model and cluster on growing numbers of GPUs, 8 of them in a node."""

    name: str
    shape: Shape
    gpu: str
    interconnect: str
    compute_bytes: int
    reduce_bytes: int
    rows: tuple[tuple[int, float, int, int], ...]
    """GPUs, tokens a second of each, tokens of a micro-batch on each, micro-batches; the first row is what the rest
    follows from.
    """
    source: str
    remark: str = ""


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MOSAIC = "llm-foundry, scripts/train/benchmarking/README.md"
UNSTATED = "the network is not stated there: infiniband-ndr is assumed"
SERIES = (
    Series(
        "Llama 3.1 8B, eager", LLAMA_8B, "H100", "roce-400", 2, 4, ((8, 5762, 16_384, 1), (128, 5605, 16_384, 1)), TITAN
    ),
    Series(
        "Llama 3.1 8B, compiled",
        LLAMA_8B,
        "H100",
        "roce-400",
        2,
        4,
        ((8, 6667, 16_384, 1), (128, 6514, 16_384, 1)),
        TITAN,
    ),
    Series(
        "Llama 3.1 8B, compiled, fp8",
        LLAMA_8B,
        "H200",
        "infiniband-ndr",
        1,
        4,
        ((32, 10938, 16_384, 1), (64, 10753, 16_384, 1)),
        "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    ),
    Series(
        "MPT 1B",
        mpt(24, 2048),
        "H100",
        "infiniband-ndr",
        2,
        4,
        ((8, 45455, 28_672, 1), (16, 46037, 40_960, 1), (32, 45130, 40_960, 1), (64, 44402, 40_960, 1)),
        MOSAIC,
        UNSTATED,
    ),
    Series(
        "MPT 3B",
        mpt(32, 2560),
        "H100",
        "infiniband-ndr",
        2,
        4,
        ((16, 24142, 20_480, 3), (32, 23021, 12_288, 3), (64, 22525, 12_288, 3)),
        MOSAIC,
        UNSTATED,
    ),
    Series(
        "MPT 13B",
        mpt(40, 5120),
        "H100",
        "infiniband-ndr",
        2,
        4,
        ((8, 4792, 4096, 1), (16, 4767, 4096, 1), (32, 4811, 4096, 1), (64, 4800, 4096, 1)),
        MOSAIC,
        UNSTATED,
    ),
    Series(
        "MPT 125M",
        mpt(12, 768),
        "A100 40GB",
        "roce-200",
        2,
        2,
        (
            (8, 136334, 53_248, 3),
            (16, 130535, 53_248, 1),
            (32, 127122, 53_248, 1),
            (64, 125234, 53_248, 1),
            (128, 123936, 53_248, 1),
        ),
        MOSAIC,
    ),
    Series(
        "MPT 1B",
        mpt(24, 2048),
        "A100 40GB",
        "roce-200",
        2,
        2,
        (
            (8, 19271, 16_384, 8),
            (16, 19085, 16_384, 1),
            (32, 15555, 20_480, 1),
            (64, 19001, 20_480, 1),
            (128, 18647, 20_480, 1),
        ),
        MOSAIC,
        "the row of 32 GPUs is far below its neighbours there",
    ),
    Series(
        "MPT 3B",
        mpt(32, 2560),
        "A100 40GB",
        "roce-200",
        2,
        2,
        (
            (8, 10065, 10_240, 8),
            (16, 9750, 10_240, 1),
            (32, 9914, 12_288, 1),
            (64, 9736, 12_288, 1),
            (128, 9538, 12_288, 1),
        ),
        MOSAIC,
    ),
    Series(
        "MPT 7B, checkpointed",
        mpt(32, 4096),
        "A100 40GB",
        "roce-200",
        2,
        2,
        (
            (8, 3679, 24_576, 4),
            (16, 3645, 32_768, 1),
            (32, 3725, 36_864, 1),
            (64, 3665, 36_864, 1),
            (128, 3623, 36_864, 1),
        ),
        MOSAIC,
    ),
    Series(
        "MPT 13B, checkpointed",
        mpt(40, 5120),
        "A100 40GB",
        "roce-200",
        2,
        2,
        ((16, 1993, 20_480, 1), (32, 1998, 28_672, 1), (64, 1976, 32_768, 1), (128, 1972, 32_768, 1)),
        MOSAIC,
    ),
)
NUM_PARAMETERS = {"MPT 125M": 125_311_488, "MPT 1B": 1_315_950_592, "MPT 3B": 2_651_837_440, "MPT 13B": 12_853_954_560}
"""As the tables print them."""
