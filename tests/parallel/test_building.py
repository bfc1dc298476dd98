"""A resume builds its model without weights, and goes on as if it had them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.model.tensors import without_values
from accel_train.model.weights import in_bf16
from accel_train.parallel.building import allocate, empty_until_restored, filled
from tests.support.comparisons import Train, assert_same_bits, assert_same_run, files_of_model, tensors
from tests.support.marks import slow
from tests.support.runs import LLAMA, Settings, losses, summary_of, write_base

DDP: Settings = {}
FSDP2 = {"strategy": "fsdp2"}
TIED = {**LLAMA, "tie_word_embeddings": True}
TP, ZERO = {**FSDP2, "tp_size": 2}, {"strategy": "deepspeed", "zero_stage": 2}
EVEN = {**LLAMA, "vocab_size": 260}
PRETRAINED = {"model": {"config": None, "pretrained": "base"}}
SLOW = pytest.mark.slow
STEPS: Settings = {
    "schedule": {"max_steps": 4},
    "checkpoint": {"every_steps": 2, "keep": 5},
    "optimizer": {"ema_decay": 0.9},
}


def held(folder: Path) -> list[int]:
    """Bytes of weights with values after each build, over the processes."""
    return [int(line) for path in sorted(folder.iterdir()) for line in path.read_text().split()]


@pytest.mark.parametrize(
    ("processes", "parallel", "sections"),
    [
        (
            1,
            DDP,
            {
                "model": {"config": TIED},
            },
        ),
        (
            2,
            FSDP2,
            {
                "model": {"config": TIED},
            },
        ),
        slow(2, DDP, {"model": {"config": LLAMA}}),
        slow(4, {**FSDP2, "dp_shard_size": 2}, {"model": {"config": LLAMA}}),
        slow(4, TP, {"model": {"config": EVEN}}),
        slow(2, ZERO, {"model": {"config": TIED}}),
        slow(2, DDP, PRETRAINED),
        slow(2, FSDP2, PRETRAINED),
        slow(2, FSDP2, {"model": {"lora": {"rank": 2}}}),
    ],
)
def test_a_resume_makes_no_weight_and_goes_on_to_the_bit(
    train: Train, tmp_path: Path, processes: int, parallel: Settings, sections: Settings
) -> None:
    if "pretrained" in sections["model"]:
        sections = {"model": {"config": None, "pretrained": str(write_base(tmp_path, LLAMA))}}
    whole = train("whole", processes, parallel, **STEPS, **sections)
    stop = {"term_at": {"step": 3, "rank": processes - 1}}
    train("stopped", processes, parallel, code=75, **STEPS, **sections, options=stop)
    (weighed := tmp_path / "weighed").mkdir()
    resumed = train("stopped", processes, parallel, **STEPS, **sections, options={"weighs": str(weighed)})
    builds = held(weighed)
    # At the end of a sharded run, the main process builds the model that it writes.
    assert builds[:1] + builds[-1:] == [0, 0]
    assert len(builds) <= processes + 1
    assert losses(resumed) == losses(whole)
    for kind in ("model", "optimizer", "average"):
        assert_same_bits(tensors(resumed, 4, kind), tensors(whole, 4, kind))
    written = [files_of_model(run) for run in (resumed, whole)]
    assert written[0] == written[1]


class Small(nn.Module):
    """A layer, a buffer that checkpoints leave out, and a tie."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.head.weight = self.layer.weight
        self.alias = [self.layer.weight]
        values = {"scale": lambda: torch.arange(3.0), "drawn": lambda: torch.rand(3), "weights": self.layer.weight.sum}
        self.register_buffer("buffer", values[kind]().detach(), persistent=False)


@pytest.mark.parametrize(("kind", "is_empty"), [("scale", True), ("drawn", False), ("weights", False)])
def test_a_buffer_that_needs_values_or_random_numbers_makes_the_build_whole(
    tmp_path: Path, kind: str, is_empty: bool
) -> None:
    values = Small(kind).state_dict()
    save_file({name: values[name].clone() for name in ("layer.weight", "layer.bias")}, tmp_path / "model.safetensors")
    made = empty_until_restored(lambda: Small(kind), tmp_path)
    assert (made is not None) == is_empty
    if made is not None:
        assert all(each.is_meta for each in made.parameters())
        allocate(made, torch.device("cpu"))
        assert isinstance(made, Small)
        assert made.head.weight is made.layer.weight is made.alias[0]
        assert not made.head.weight.any()
        assert torch.equal(made.buffer, torch.arange(3.0))  # type: ignore[arg-type]


def test_a_checkpoint_of_another_shape_makes_the_build_whole(tmp_path: Path) -> None:
    save_file({"layer.weight": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    assert empty_until_restored(lambda: Small("scale"), tmp_path) is None


@pytest.mark.parametrize("keeps_types", [True, False])
def test_a_filled_model_holds_each_weight_once_and_stays_tied(keeps_types: bool) -> None:
    def make() -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**TIED, vocab_size=320))

    whole = make().eval()
    with torch.device("meta"):
        empty = make().eval()
    weights = {name: each.detach().bfloat16() for name, each in whole.named_parameters()}
    given = {name: each.data_ptr() for name, each in weights.items()}
    found = filled(empty, weights, dict(whole.named_buffers()), keeps_types=keeps_types)
    assert found is empty
    assert weights == {}
    dtype = torch.bfloat16 if keeps_types else torch.float32
    assert {each.dtype for each in found.parameters()} == {dtype}
    assert ({name: each.data_ptr() for name, each in found.named_parameters()} == given) is keeps_types
    assert found.lm_head.weight is found.model.embed_tokens.weight
    ids = torch.arange(8)[None]
    expected = in_bf16(whole) if keeps_types else in_bf16(whole).float()
    assert torch.equal(found(ids).logits, expected(ids).logits)


def test_an_empty_build_takes_no_random_numbers_from_the_whole_build_after_it() -> None:
    def make() -> Any:  # its layers draw random numbers while they are made
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "model_type": "diffllama"}))

    torch.manual_seed(0)
    alone = make()
    torch.manual_seed(0)
    with without_values():
        make()
    assert_same_bits(dict(make().named_parameters()), dict(alone.named_parameters()))


@pytest.mark.parametrize("empty", ["fails", "differs"])
def test_a_task_that_cannot_build_without_values_starts_as_one_process_does(train: Train, empty: str) -> None:
    sections: Settings = {
        "task": "tests.support.tasks.unused:Unused",
        "windows": False,
        "batch": {"global_batch_size": 16},
        "schedule": {"max_steps": 2},
    }
    options = {"num_samples": 64, "empty": empty}
    two = train("two", 2, FSDP2, **sections, options=options)
    assert_same_run(two, train("one", 1, **sections, options={"num_samples": 64}))
    choices = summary_of(two)["choices"]
    assert choices["initial weights"].startswith("whole")


def test_a_model_with_values_or_other_weights_is_not_filled() -> None:
    with torch.device("meta"):
        empty, more = nn.Linear(2, 2), nn.BatchNorm1d(2)
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    assert filled(nn.Linear(2, 2), weights, {}, keeps_types=True) is None
    assert filled(nn.Sequential(empty), weights, {}, keeps_types=True) is None
    assert filled(more, {**weights, "weight": torch.ones(2)}, {}, keeps_types=True) is None
    assert len(weights) == 2
