"""Split sequences train as one process: the same losses, targets counted once, any layout resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train.cli.main import main
from accel_train.data.text.tokens import collate_windows
from accel_train.model.kernels.attention import DENSE, PER_DOCUMENT
from accel_train.model.training_module import TrainingModule
from accel_train.parallel.dims import ParallelDims
from accel_train.parallel.sequence_parallel import Slices, slice_of
from accel_train.tasks.causal_lm.task import CausalLM
from tests.parallel.conftest import SHORT_STEPS, assert_same_norms, assert_skipped_to_the_bit, nan_at, reads, train_in
from tests.support.comparisons import Layout, assert_same_bits, assert_same_run, tensors
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import (
    LLAMA,
    TINY_MODEL,
    Settings,
    events,
    steps_of,
    summary_of,
    tiny_recipe,
    write_corpus,
    write_jsonl,
    write_recipe_file,
)
from tests.support.wording import raises_golden

SP = {"sp_size": 2}
FSDP2 = {"strategy": "fsdp2"}
TEXT = {
    "batch": {"global_batch_size": 4, "per_device_batch_size": 2},
    "schedule": {"max_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 5},
    "evaluate": {"every_steps": 4, "sample_prompt": "loss", "sample_tokens": 6},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5, "ema_decay": 0.9},  # every gradient is clipped
}
ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"


def sit(folder: Path, processes: int, parallel: Settings, code: int = 0, **sections: Any) -> Path:
    options = {"ragged": True, "record": str(folder), **sections.pop("options", {})}
    return train_in(folder, processes, parallel, code=code, **{**TEXT, "options": options, **sections})


def beside_one(folder: Path, layout: Layout, **sections: Any) -> list[Path]:
    """The same run under a layout and on one process."""
    return [sit(folder / str(n), n, parallel, **sections) for n, parallel in (layout, (1, {}))]


def assert_trained_alike(run: Path, other: Path) -> None:
    """Losses, gradient norms, evaluations and counts of two layouts of one run."""
    assert_same_norms(run, other)
    summaries = [summary_of(folder) for folder in (run, other)]
    for name in ("num_targets", "parameters", "sample"):
        assert summaries[0][name] == summaries[1][name]
    assert summaries[0]["eval"] == pytest.approx(summaries[1]["eval"], rel=1e-6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process."""
    return sit(tmp_path_factory.mktemp("one") / "one", 1, {})


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (2, SP),
        slow(4, SP),
        slow(2, {**FSDP2, **SP}),
        slow(4, {**FSDP2, **SP}),
        slow(4, {**FSDP2, **SP, "dp_shard_size": 2}),
    ],
)
def test_losses_are_those_of_one_process_and_each_target_is_counted_once(
    tmp_path: Path, undisturbed: Path, processes: int, parallel: Settings
) -> None:
    run = sit(tmp_path / "split", processes, parallel)
    assert_trained_alike(run, undisturbed)
    assert not [path for path in run.rglob("config.json") if "sdpa" in path.read_text()]
    shares = [reads(run, rank) for rank in range(processes)]
    assert shares[0::2] == shares[1::2]  # neighbours read the same samples
    assert sorted(index for share in shares[0::2] for index in share) == sorted(reads(undisturbed, 0))


@pytest.mark.parametrize(
    ("parallel", "config"),
    [(SP, LLAMA), slow({**FSDP2, **SP}, TINY_MODEL)],
    ids=["llama", "fsdp2"],
)
def test_documents_that_reach_over_slices_are_kept_apart_as_on_one_process(
    tmp_path: Path, parallel: Settings, config: Settings
) -> None:
    sections = {"model": {"config": config}, "data": {"mask_documents": True}, "schedule": {"max_steps": 5}}
    runs = beside_one(tmp_path, (2, parallel), **sections)
    assert_trained_alike(*runs)
    said = [summary_of(run)["choices"]["document mask"] for run in runs]
    assert PER_DOCUMENT in said[0]
    assert DENSE in said[1]  # of windows this short


@pytest.mark.slow
def test_packed_rows_that_reach_over_slices_train_as_on_one_process(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n} plus {n * 7 % 11} is", "completion": f" {n + n * 7 % 11}" * (1 + n % 9)} for n in range(60)
    ]
    table = write_jsonl(tmp_path / "rows.jsonl", rows)
    sections = {
        "data": {"train": str(table), "format": "prompt_completion", "sequence_length": 64},
        "task": "causal-lm",
        "options": {},
        "evaluate": {"every_steps": 4},
        "schedule": {"max_steps": 5},
    }
    assert_trained_alike(*beside_one(tmp_path, (2, SP), **sections))


KINDS = {
    "llama with keys shared by heads": LLAMA,
    "fewer keys than processes": {**LLAMA, "num_key_value_heads": 1},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "gpt_neox": {**LLAMA, "model_type": "gpt_neox", "num_key_value_heads": None},
    "opt": {
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "gemma": {**LLAMA, "model_type": "gemma", "head_dim": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gives_the_losses_and_the_text_of_one_process(tmp_path: Path, kind: str) -> None:
    config = {name: value for name, value in KINDS[kind].items() if value is not None}
    sections = {"model": {"config": config}, "schedule": {"max_steps": 5}}
    assert_trained_alike(*beside_one(tmp_path, (2, SP), **sections))


@pytest.mark.slow
def test_four_slices_of_a_sequence_and_two_heads_of_keys_give_the_losses_of_one_process(tmp_path: Path) -> None:
    sections = {"model": {"config": LLAMA}, "schedule": {"max_steps": 5}}
    assert_trained_alike(*beside_one(tmp_path, (4, {"sp_size": 4}), **sections))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [SP, {**FSDP2, **SP}], ids=["ddp", "fsdp2"])
def test_with_checkpointing_and_16_bits_losses_are_near_those_of_one_process(
    tmp_path: Path, parallel: Settings
) -> None:
    sections = {"precision": {"mixed_precision": "bf16", "gradient_checkpointing": True}}
    assert_same_run(*beside_one(tmp_path, (2, parallel), **sections), tolerance=2e-3)


def whole_and_alone() -> tuple[float, float]:
    """The loss of sequences of an untrained model, and the sum of those of their halves, each of which attends to
    itself only.
    """
    recipe = tiny_recipe(Path("somewhere"), task="causal-lm")
    torch.manual_seed(0)
    task = CausalLM()
    corpus = type("Corpus", (), {"vocab_size": 257, "separator_id": 256})()
    model = TrainingModule(task.build_model(recipe, type("Data", (), {"source": corpus})()), task)
    rows = torch.randint(0, 256, (3, 33), generator=torch.Generator().manual_seed(1)).numpy()
    batch = collate_windows(rows, separator_id=256, mask_documents=False)
    with torch.no_grad():
        return float(model(batch)), sum(float(model(slice_of(batch, part, 2))) for part in range(2))


def test_slices_that_attend_to_themselves_only_have_another_loss_than_the_comparisons_here_let_pass() -> None:
    whole, alone = whole_and_alone()
    assert abs(alone / whole - 1) > 1e-5


def test_slices_hold_each_token_with_its_position_and_each_target_once_borders_included() -> None:
    rows = torch.arange(2 * 13).view(2, 13).numpy().copy()
    rows[1, 10:] = -1  # a short last window, whose last slice has no target
    collate = lambda rows: collate_windows(rows, separator_id=99, mask_documents=False)  # noqa: E731
    whole, slices = collate(rows), [Slices(collate, part, 3)(rows) for part in range(3)]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([each[name] for each in slices], dim=1), whole[name])
    assert torch.equal(torch.cat([each["position_ids"] for each in slices], dim=1), torch.arange(12).repeat(2, 1))
    assert [each["labels"][0, -1].item() for each in slices] == [4, 8, 12]  # the first input of the next slice
    assert [each["num_targets"] for each in slices] == [8, 8, 5]
    assert sum(each["num_targets"] for each in slices) == whole["num_targets"] == 21


def test_slices_keep_the_positions_within_documents_and_the_lengths_of_whole_ones() -> None:
    rows = torch.arange(1, 14).repeat(2, 1).numpy().copy()
    rows[0, [0, 5]] = rows[1, 3] = 99
    collate = lambda rows: collate_windows(rows, separator_id=99, mask_documents=True)  # noqa: E731
    whole, slices = collate(rows), [Slices(collate, part, 2)(rows) for part in range(2)]
    assert torch.equal(torch.cat([each["position_ids"] for each in slices], dim=1), whole["position_ids"])
    for each in slices:
        assert each["document_lengths"].tolist() == [[5, 7], [3, 9]]
        assert "document_ids" not in each
    with raises_golden():
        slice_of(
            {name: value for name, value in whole.items() if name not in ("document_lengths", "num_targets")}, 0, 2
        )


def test_processes_of_a_group_read_alike_and_draw_and_count_each_for_itself() -> None:
    groups = [ParallelDims(rank // 2, 2, sp_size=2, place=rank % 2) for rank in range(4)]
    assert [(each.rank, each.slice_index, each.random_rank) for each in groups] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    assert all(each.is_first_in_group for each in groups)
    alike = [ParallelDims(rank // 2, 2, tp_size=2, place=rank % 2) for rank in range(4)]
    assert [(each.rank, each.random_rank, each.is_first_in_group) for each in alike] == [
        (0, 0, True), (0, 0, False), (1, 1, True), (1, 1, False)
    ]  # fmt: skip


def test_nan_on_one_process_is_skipped_on_all_to_the_bit_and_the_incident_keeps_whole_sequences(tmp_path: Path) -> None:
    batch = {"global_batch_size": 2, "per_device_batch_size": 2}
    run = sit(tmp_path / "run", 2, SP, batch=batch, evaluate={"every_steps": 0}, **nan_at(3, last=4))
    assert_skipped_to_the_bit(run, 3)
    [incident] = (run / "incidents").iterdir()
    assert "(parallel.sp_size)" in (incident / "incident.md").read_text()
    kept = load_file(incident / "batch-rank-1.safetensors")
    assert kept["0/input_ids"].shape == (2, 32)
    assert main(["replay", str(incident), "--device", "cpu"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [[(2, SP), (1, {})], [(1, {}), (2, SP), (2, {})], [(2, {}), (4, {**FSDP2, **SP}), (2, SP)]],
    ids=["to one", "from one", "to split"],
)
def test_stopped_and_gone_on_under_other_layouts_it_is_the_run_that_never_stopped(
    tmp_path: Path, undisturbed: Path, layouts: list[Layout]
) -> None:
    folder = tmp_path / "chain"
    for number, (processes, parallel) in enumerate(layouts):
        is_last = number == len(layouts) - 1
        options = {} if is_last else {"term_at": {"step": 1, "rank": processes - 1}}
        sit(folder, processes, parallel, code=0 if is_last else 75, options=options)
    steps = steps_of(folder / "run", "resume")
    assert len(steps) == len(layouts) - 1
    assert sorted({0, *steps, 8}) == [0, *steps, 8]
    assert_same_run(folder / "run", undisturbed)


@pytest.mark.slow
def test_killed_and_resumed_on_as_many_processes_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    model = {"config": {**TINY_MODEL, "resid_pdrop": 0.1, "attn_pdrop": 0.1}}
    whole = sit(tmp_path / "whole", 4, SP, model=model)
    folder = tmp_path / "broken"
    sit(folder, 4, SP, code=75, model=model, options={"term_at": {"step": 3, "rank": 3}})
    again = sit(folder, 4, SP, model=model)
    assert 2 < events(again, "resume")[-1]["step"] < 8
    for kind in ("model", "optimizer"):
        assert_same_bits(tensors(whole, 8, kind), tensors(again, 8, kind))


@pytest.mark.slow
def test_a_process_that_dies_ends_those_with_the_other_slices_and_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_corpus(folder)
    recipe = write_recipe_file(folder, **{**TEXT, "options": {"kill_at": {"step": 5, "rank": 1}}, "parallel": SP})
    forked = run_forked(["run", str(recipe)], 4, folder=folder / "processes", preload=[ULYSSES])
    assert forked.wait() == [5, -9, 5, 5]


@pytest.mark.slow
def test_short_steps_that_leave_groups_with_unequal_shares_hang_nobody(tmp_path: Path) -> None:
    sections = {**SHORT_STEPS, "evaluate": {"every_steps": 0}}
    assert_same_run(*beside_one(tmp_path, (4, {**FSDP2, **SP}), **sections))


@pytest.mark.slow
def test_a_finished_run_is_evaluated_with_whole_sequences_and_the_same_result(tmp_path: Path) -> None:
    run = sit(tmp_path / "run", 2, SP, batch={"global_batch_size": 1}, task="causal-lm", options={})
    before = json.loads((run / "evaluation.json").read_text())["metrics"]
    assert main(["evaluate", str(run)]) == 0
    assert json.loads((run / "evaluation.json").read_text())["metrics"] == pytest.approx(before, rel=1e-6)


def test_batches_of_more_than_tokens_and_labels_are_refused() -> None:
    batch = {name: torch.zeros(1, 4, dtype=torch.int64) for name in ("input_ids", "labels")}
    with raises_golden(case="weights"):
        slice_of({**batch, "weights": torch.zeros(1)}, 0, 2)
    with raises_golden(case="a length of 4"):
        slice_of(batch, 0, 3)
