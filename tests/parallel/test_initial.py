"""Each process makes only its part of the initial weights: the bits of a build that makes all of them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.parallel import initial
from accel_train.parallel.building import READING_THREADS
from accel_train.parallel.initial import Drawn, Recording, draws_as_expected
from accel_train.runtime.private import watch_operators
from tests.parallel.conftest import train_in
from tests.support.comparisons import assert_same_bits
from tests.support.marks import slow
from tests.support.runs import LLAMA, TINY_MODEL, Settings, summary_of
from tests.support.tasks.initial import Live

FSDP2: Settings = {"strategy": "fsdp2"}
HSDP, TP = {**FSDP2, "dp_shard_size": 2}, {**FSDP2, "tp_size": 2}
DEEP = {**LLAMA, "vocab_size": 320, "num_hidden_layers": 6, "hidden_size": 96, "intermediate_size": 160}
GPT2 = {**TINY_MODEL, "vocab_size": 301, "n_layer": 6, "n_embd": 96}
MIXTRAL = {**DEEP, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 320, "state_size": 4}
KINDS = {
    "llama": DEEP,
    "tied": {**DEEP, "tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "gpt2": GPT2,
    # Its layers draw random numbers while they are made, and its decay is computed.
    "mamba": MAMBA,
    # Its embedding has a row of zeros.
    "opt": {**LLAMA, "model_type": "opt", "vocab_size": 320, "ffn_dim": 48, "word_embed_proj_dim": 32},
}
STATE_BYTES = 5056
"""Bytes of a state of the generator. There is one for each weight that is drawn, and one more while it is made."""


@pytest.fixture(autouse=True)
def jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jump over the numbers of small weights, too."""
    monkeypatch.setattr(initial, "LEAST_JUMP", 64)


def start(folder: Path, processes: int, parallel: Settings, model: Settings, **options: Any) -> Path:
    """Train a step; the folder then also has what the task writes."""
    (written := folder / "written").mkdir(parents=True)
    return train_in(
        folder,
        processes,
        parallel,
        task="tests.support.tasks.initial:InitialLM",
        model={"config": model, "pad_vocab_to_multiple_of": 320},
        schedule={"max_steps": 1},
        batch={"global_batch_size": 4},
        options={"folder": str(written), **options},
    )


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run.parent / "written" / "weights.safetensors")


def facts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run.parent / "written").glob("rank-*.json"))]


@pytest.mark.parametrize(
    ("processes", "parallel", "model"),
    [
        (2, FSDP2, KINDS["tied"]),
        slow(2, FSDP2, GPT2),
        slow(2, FSDP2, MIXTRAL),
        slow(4, FSDP2, DEEP),
        slow(4, FSDP2, MIXTRAL),
        slow(4, HSDP, GPT2),
        slow(2, TP, DEEP),
        slow(4, TP, DEEP),
    ],
)
def test_processes_make_the_weights_of_one_process_in_the_memory_of_their_part(
    tmp_path: Path, processes: int, parallel: Settings, model: Settings
) -> None:
    run, whole = start(tmp_path / "run", processes, parallel, model), start(tmp_path / "whole", 1, {}, model)
    assert summary_of(run)["choices"]["initial weights"].startswith("in parts")
    assert "initial weights" not in summary_of(whole)["choices"]
    assert_same_bits(weights(run), weights(whole))
    states = (len(weights(run)) + 2 * READING_THREADS) * STATE_BYTES
    [alone] = facts(whole)
    assert alone["peak"] >= alone["held"]
    found = facts(run)
    assert len(found) == processes
    for each in found:
        assert each["held"] <= each["peak"] <= each["held"] + READING_THREADS * each["largest_part"] + states
        assert each["peak"] < alone["held"]
        assert each["next"] == alone["next"]


def test_the_main_process_makes_all_weights_if_torch_draws_in_another_order(tmp_path: Path) -> None:
    run = start(tmp_path / "run", 2, FSDP2, DEEP, order="other")
    assert_same_bits(weights(run), weights(start(tmp_path / "whole", 1, {}, DEEP)))
    said = summary_of(run)["choices"]["initial weights"]
    assert said.startswith("whole")
    assert "another order" in said


def made(config: Settings) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model


def part_of(source: Drawn, first: int, end: int) -> Tensor:
    """Rows of a tensor, made without the others."""
    rows = torch.empty(end - first, *source.shape[1:])
    source.copy_to(rows, [slice(first, end), *(slice(0, size) for size in source.shape[1:])])
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_any_rows_have_the_bits_of_a_build_in_memory(kind: str) -> None:
    torch.manual_seed(5)
    whole = made(KINDS[kind])
    after = torch.rand(9)
    torch.manual_seed(5)
    recording = Recording()
    with recording.active():
        model = made(KINDS[kind])
    assert torch.equal(torch.rand(9), after)
    sources = recording.take_out(model)
    expected = dict(whole.named_parameters())
    matrices = {name for name, each in expected.items() if each.dim() > 1}
    assert len(matrices - sources.keys()) < len(matrices) / 4
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, each in model.named_parameters():
        if name not in sources:
            assert torch.equal(each, expected[name]), name
            continue
        rows = expected[name].shape[0]
        cuts = [0, 1, rows // 3, rows // 2, rows - 1, rows]
        parts = [part_of(sources[name], *pair) for pair in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), expected[name]), name
    assert_same_bits(dict(model.named_buffers()), dict(whole.named_buffers()))


@pytest.mark.parametrize("numel", [15, 16, 17, 31, 32, 33, 47, 48, 49, 1000])
@pytest.mark.parametrize("name", ["normal_", "uniform_"])
def test_each_range_of_a_vector_has_the_bits_of_the_whole(name: str, numel: int) -> None:
    torch.manual_seed(numel)
    whole = getattr(torch.empty(numel), name)()
    after = torch.rand(9)
    torch.manual_seed(numel)
    recording = Recording()
    with recording.active():
        model = nn.Module()
        model.weight = nn.Parameter(getattr(torch.empty(numel), name)())
    assert torch.equal(torch.rand(9), after)
    source = recording.take_out(model)["weight"]
    for first in range(0, numel, 1 + numel // 9):
        for end in range(first + 1, numel + 1, 1 + numel // 15):
            assert torch.equal(part_of(source, first, end), whole[first:end]), (first, end)


def test_a_part_takes_no_memory_of_the_other_rows() -> None:
    recording, live = Recording(), Live()
    with watch_operators(live.see), recording.active():
        layer = nn.Linear(256, 1000)
        nn.init.normal_(layer.weight)
    assert live.peak < 10 * STATE_BYTES
    source = recording.take_out(layer)["weight"]
    with watch_operators(live.see):
        part_of(source, 500, 510)
    # The rows, and where they are copied to.
    assert 2 * 10 * 256 * 4 <= live.peak < 3 * 10 * 256 * 4 + 4 * STATE_BYTES
    assert live.peak < 1000 * 256 * 4 / 10


class Made(nn.Module):
    """A layer that its own code initializes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        with torch.no_grad():
            getattr(self, kind)()

    def empty(self) -> None:
        """Nothing gives the weight values."""

    def orthogonal(self) -> None:
        nn.init.orthogonal_(self.weight)

    def read(self) -> None:
        self.weight.normal_()
        self.weight.mul_(self.weight.norm().item())

    def other(self) -> None:
        self.weight.bernoulli_(0.5)

    def generator(self) -> None:
        self.weight.normal_(generator=torch.Generator().manual_seed(1))

    def computed(self) -> None:
        self.weight.fill_(2)
        self.register_buffer("double", self.weight * 2)

    def buffer(self) -> None:
        self.weight.fill_(2)
        self.register_buffer("made", torch.empty(3).fill_(1))


@pytest.mark.parametrize("kind", ["empty", "orthogonal", "read", "other", "generator", "computed", "buffer"])
def test_what_cannot_be_made_later_is_refused(kind: str) -> None:
    recording = Recording()

    def build() -> None:
        with recording.active():
            model = Made(kind)
        recording.take_out(model)

    with pytest.raises((ValueError, RuntimeError)):
        build()


class Other(nn.Module):
    """A weight with steps that change rows, depend on other tensors, or ask for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40, 6))
        table = torch.arange(6.0)
        with torch.no_grad():
            if self.weight.device.type != "meta" and not self.weight.is_meta:
                self.weight.uniform_(-1, 1).erfinv_().clamp_(-1, 1)
            self.weight[3].zero_()
            self.weight[5:7].copy_(table)
            table.add_(1)  # the weight keeps the values of before
            self.weight.T[2].mul_(3).add_(1)


def test_steps_on_rows_and_with_other_tensors_have_the_bits_of_a_build_in_memory() -> None:
    torch.manual_seed(1)
    whole = Other().weight
    torch.manual_seed(1)
    recording = Recording()
    with recording.active():
        model = Other()
    assert model.weight.is_meta
    source = recording.take_out(model)["weight"]
    assert torch.equal(part_of(source, 2, 31), whole[2:31])


def test_this_torch_draws_in_the_expected_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draws_as_expected.__wrapped__()
    monkeypatch.setattr(initial, "BLOCK", 8)
    assert not draws_as_expected.__wrapped__()
