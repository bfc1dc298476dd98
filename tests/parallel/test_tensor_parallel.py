"""Split layers train as one process: the same losses, samples counted once, checkpoints for any layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.core.errors import SettingError
from accel_train.parallel.tensor_parallel import SUMMED, check_plan, styles_of
from tests.parallel.conftest import assert_same_norms, assert_skipped_to_the_bit, nan_at, reads, train_in
from tests.support.comparisons import assert_same_bits, assert_same_run, tensors
from tests.support.marks import slow
from tests.support.runs import LLAMA as TINY_LLAMA
from tests.support.runs import Settings, events, summary_of

TP = {"strategy": "fsdp2", "tp_size": 2}
LLAMA = {**TINY_LLAMA, "vocab_size": 259}  # which two processes cannot divide, and four cannot
TEXT = {
    "model": {"config": LLAMA},
    "batch": {"global_batch_size": 12, "per_device_batch_size": 2},
    "schedule": {"max_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 5},
    "evaluate": {"every_steps": 4},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5, "ema_decay": 0.9},  # every gradient is clipped
}
Train = Callable[..., Path]
CPU = torch.device("cpu")


def sit(folder: Path, processes: int, parallel: Settings | None = None, **sections: Any) -> Path:
    options = {"ragged": True, "record": str(folder)}
    return train_in(folder, processes, parallel, **{**TEXT, "options": options, **sections})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process."""
    return sit(tmp_path_factory.mktemp("one") / "one", 1)


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_losses_are_those_of_one_process_and_neighbours_read_the_same_samples_once(
    tmp_path: Path, undisturbed: Path, processes: int
) -> None:
    run = sit(tmp_path / "split", processes, TP)
    assert_same_norms(run, undisturbed)
    summaries = [summary_of(folder) for folder in (run, undisturbed)]
    assert summaries[0]["num_targets"] == summaries[1]["num_targets"]
    assert summaries[0]["eval"]["num_targets"] == summaries[1]["eval"]["num_targets"]
    assert summaries[0]["parameters"] == summaries[1]["parameters"]
    assert summaries[0]["world_size"] == processes
    shares = [reads(run, rank) for rank in range(processes)]
    assert shares[0::2] == shares[1::2]
    assert sorted(index for share in shares[0::2] for index in share) == sorted(reads(undisturbed, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "processes"),
    [
        ({"tie_word_embeddings": True}, 4),
        ({"model_type": "qwen3", "head_dim": 8}, 2),  # norms of the heads, held by all, each seeing its own
        ({"model_type": "olmo2"}, 2),
        ({"model_type": "gpt_neox", "num_key_value_heads": None}, 2),
        ({"model_type": "apertus", "hidden_act": "xielu"}, 2),  # trained activations of each process's own columns
        # Linear attention, which reads the weight of its convolution without calling it.
        ({"model_type": "olmo_hybrid", "linear_num_value_heads": 2, "linear_num_key_heads": 2, "pad_token_id": 0}, 2),
    ],
    ids=["tied", "qwen3", "olmo2", "gpt_neox", "apertus", "olmo_hybrid"],
)
def test_every_kind_of_plan_gives_the_losses_of_one_process(tmp_path: Path, changed: Settings, processes: int) -> None:
    config = {name: value for name, value in {**LLAMA, **changed}.items() if value is not None}
    sections = {"model": {"config": config}, "schedule": {"max_steps": 5}}
    runs = [sit(tmp_path / str(n), n, parallel, **sections) for n, parallel in ((processes, TP), (1, {}))]
    assert_same_run(*runs)


def test_weights_between_split_layers_are_summed_if_activations_and_refused_if_unknown() -> None:
    def styles(model_type: str) -> dict[str, str]:
        config = AutoConfig.for_model(**{**LLAMA, "model_type": model_type})
        with torch.device("meta"):
            return styles_of(AutoModelForCausalLM.from_config(config), 2)

    summed = {name.rpartition(".")[2] for name, style in styles("apertus").items() if style == SUMMED}
    assert summed == {"q_norm", "k_norm", "weight", "act_fn"}  # `weight` of the norms
    assert {name for name, style in styles("olmo2").items() if style == SUMMED} == set()  # its norms see whole rows
    with pytest.raises(SettingError) as refused:
        styles("doge")  # its plan leaves out the norms of the heads
    assert refused.value.settings == ("parallel.tp_size",)
    assert "self_attn.A" in str(refused.value)


def test_a_plan_that_fails_in_the_first_step_is_refused() -> None:
    config = AutoConfig.for_model("gemma3n_text")
    with pytest.raises(SettingError) as refused:
        check_plan(config, config.base_model_tp_plan, 2)
    assert refused.value.settings == ("parallel.tp_size",)


@pytest.mark.slow
def test_with_checkpointing_and_16_bits_losses_are_near_those_of_one_process(tmp_path: Path) -> None:
    precision = {"mixed_precision": "bf16", "gradient_checkpointing": True}
    runs = [sit(tmp_path / str(n), n, parallel, precision=precision) for n, parallel in ((4, TP), (1, {}))]
    assert_same_run(*runs, tolerance=2e-3)


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_nan_on_one_process_is_skipped_on_all_to_the_bit(train: Train, processes: int) -> None:
    sections = {**TEXT, "batch": {"global_batch_size": 4}, "evaluate": {"every_steps": 0}, **nan_at(4, last=5)}
    run = train("run", processes, TP, **sections)
    assert_skipped_to_the_bit(run, 4)
    [incident] = (run / "incidents").iterdir()
    assert "(parallel.tp_size)" in (incident / "incident.md").read_text()
    kept = load_file(incident / "weights.safetensors")  # whole, so that one process can compute it again
    assert_same_bits({key: tensors(run, 4, "model")[key] for key in kept}, kept)


@pytest.mark.slow
def test_stopped_and_gone_on_under_other_layouts_it_is_the_run_that_never_stopped(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder, done = tmp_path / "chain", 0
    for processes, parallel, stop in ((2, TP, 1), (4, TP, 4), (2, {"strategy": "fsdp2"}, None)):
        options: Settings = {"ragged": True, "first_step": done}
        options |= {} if stop is None else {"term_at": {"step": stop, "rank": processes - 1}}
        sections = {**TEXT, "batch": {"global_batch_size": 12}, "options": options}
        train_in(folder, processes, parallel, code=0 if stop is None else 75, **sections)
        done = 8 if stop is None else events(folder / "run", "preempted")[-1]["step"]
    assert len(events(folder / "run", "resume")) == 2
    assert_same_run(folder / "run", undisturbed)
