"""A loss in chunks trains as one of whole logits does, however the model is spread over processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from accel_train.engine.resolve import check_recipe
from tests.parallel.conftest import assert_same_norms, train_in
from tests.support.comparisons import assert_same_run
from tests.support.marks import slow
from tests.support.processes import TESTS, run_forked
from tests.support.runs import LLAMA, Settings, events, metrics, tiny_recipe, write_jsonl
from tests.support.wording import raises_golden

UNTIED = {**LLAMA, "tie_word_embeddings": False}
TEXT = {
    "model": {"config": UNTIED},
    "batch": {"global_batch_size": 8, "per_device_batch_size": 2},
    "schedule": {"max_steps": 6},
    "evaluate": {"every_steps": 3},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},  # every gradient is clipped
}
PROGRAM = TESTS / "support/programs/split_head.py"
AT_ONCE = 20 * 320
"""Logits of 20 positions, where a micro-batch has 64 or 32."""


def sit(folder: Path, processes: int, *, chunked: bool, **sections: Any) -> Path:
    options = {"ragged": True, "logits_at_once": AT_ONCE}
    loss = {"chunked": "auto" if chunked else False}
    return train_in(folder, processes, **{**TEXT, "options": options, "loss": loss, **sections})


def choice(run: Path) -> str:
    lines = (run.parent / "processes" / "rank-0.out").read_text().splitlines()
    [line] = [each for each in lines if "loss.chunked" in each]
    return line


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process with whole logits."""
    run = sit(tmp_path_factory.mktemp("whole") / "one", 1, chunked=False)
    assert "as set" in choice(run)
    return run


SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    slow(2, {}, id="ddp"),
    pytest.param(2, {"strategy": "fsdp2"}, id="fsdp2"),
    slow(2, {"strategy": "fsdp2", "reshard_after_forward": False}, id="fsdp2-gathered"),
    slow(2, {"strategy": "deepspeed", "zero_stage": 2}, id="zero-2"),
    slow(2, {"strategy": "deepspeed", "zero_stage": 3}, id="zero-3"),
    slow(2, {"sp_size": 2}, id="sp"),
    slow(4, {"strategy": "fsdp2", "sp_size": 2}, id="fsdp2-sp"),
    pytest.param(2, {"strategy": "fsdp2", "tp_size": 2}, id="tp"),
    slow(4, {"strategy": "fsdp2", "tp_size": 2}, id="fsdp2-tp"),
]


@pytest.mark.parametrize(("processes", "parallel"), LAYOUTS)
def test_losses_and_gradient_norms_are_those_of_whole_logits(
    tmp_path: Path, whole: Path, processes: int, parallel: Settings
) -> None:
    run = sit(tmp_path / "chunked", processes, chunked=True, parallel=parallel)
    at_once = 20 * parallel.get("tp_size", 1)  # of its share of the vocabulary
    assert "True" in choice(run).split()
    assert f" {at_once} positions" in choice(run)
    assert_same_norms(run, whole)
    assert events(run, "skip") == []


CHANGES: dict[str, Settings] = {
    "tied": {"model": {"config": {**LLAMA, "tie_word_embeddings": True}}},
    "frozen": {"model": {"config": UNTIED, "freeze": ("lm_head.*",)}},
    "lora": {"model": {"config": UNTIED, "lora": {"rank": 2}}},
    "checkpointing": {"precision": {"gradient_checkpointing": True}},
    "smoothing": {"loss": {"label_smoothing": 0.1}},
    "z-loss": {"loss": {"z_loss": 0.01}},
    "z-loss of packed documents": {"loss": {"z_loss": 0.01}, "data": {"mask_documents": True}},
}


@SLOW
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"strategy": "fsdp2"},
        {"strategy": "deepspeed", "zero_stage": 3},
        {"strategy": "fsdp2", "tp_size": 2},
        {"sp_size": 2},
    ],
    ids=["ddp", "fsdp2", "zero-3", "tp", "sp"],
)
def test_the_losses_are_those_of_whole_logits_however_the_run_is_changed(
    tmp_path: Path, change: str, parallel: Settings
) -> None:
    if change == "lora" and "tp_size" in parallel:
        pytest.skip("refused: adapters are not split")
    sections = {**CHANGES[change]}
    smoothing = sections.pop("loss", {})
    ours, theirs = (
        sit(
            tmp_path / str(chunked), processes, chunked=chunked, parallel=spread,
            **sections, **({"loss": {**smoothing, "chunked": "auto" if chunked else False}} if smoothing else {}),
        )
        for chunked, processes, spread in ((True, 2, parallel), (False, 1, {}))
    )  # fmt: skip
    assert "loss.chunked" in choice(ours)
    assert "True" in choice(ours)
    assert_same_run(ours, theirs)


def test_processes_that_split_the_output_layer_make_the_loss_the_gradients_and_the_hits_of_one_in_chunks(
    tmp_path: Path,
) -> None:
    forked = run_forked([str(tmp_path)], 2, folder=tmp_path / "processes", program=PROGRAM)
    forked.expect(0)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    for case, found in first.items():
        for fact in ("errors", "num_hits"):
            assert second[case][fact] == found[fact], (case, "the processes differ")
        assert found["has_all_gradients"] == [True, True], case
        assert case == "bf16" or len(set(found["num_hits"])) == 1, case
        for name, (ours, of_whole_logits) in found["errors"].items():
            # In bf16 an error is chance: of what is rounded to 8 bits.
            allowed = 1e-6 if "loss" in name and case != "bf16" else max(1e-6, 1.5 * of_whole_logits)
            assert ours <= allowed, (case, name, ours, of_whole_logits)
        if case not in ("bf16", "all ignored"):  # a CPU copies the weight to fp32, which is as wide
            assert found["widest"][0] == 8 < found["widest"][1], case
    assert first["untied"]["num_hits"][0] > 0


@SLOW
@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp2", "tp_size": 2}], ids=["ddp", "tp"])
def test_fine_tuning_in_chunks_has_the_token_accuracy_of_whole_logits(tmp_path: Path, parallel: Settings) -> None:
    rows = [{"prompt": f"{n} is", "completion": " aaaa" if n % 3 else f" {n * 7 % 11}"} for n in range(60)]
    table = write_jsonl(tmp_path / "rows.jsonl", rows)
    sections = {
        "data": {"train": str(table), "format": "prompt_completion", "sequence_length": 32, "eval_fraction": 0.3},
        "options": {},
        "task": "causal-lm",
    }
    ours, theirs = (
        sit(tmp_path / str(chunked), processes, chunked=chunked, parallel=spread, **sections, loss={"chunked": chunked})
        for chunked, processes, spread in ((True, 2, parallel), (False, 1, {}))
    )
    assert_same_run(ours, theirs)
    accuracies = [[each["token_accuracy"] for each in metrics(run, "eval")] for run in (ours, theirs)]
    assert accuracies[0] == accuracies[1]
    assert 0 < accuracies[1][-1] < 1


@SLOW
@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp2"}], ids=["ddp", "fsdp2"])
def test_in_bf16_losses_are_near_those_of_whole_logits(tmp_path: Path, parallel: Settings) -> None:
    ours, theirs = (
        sit(tmp_path / str(chunked), 2, chunked=chunked, parallel=parallel, precision={"mixed_precision": "bf16"})
        for chunked in (True, False)
    )
    assert_same_run(ours, theirs, tolerance=2e-3)


@SLOW
def test_a_compiled_run_warns_of_nothing_and_has_the_losses_of_whole_logits(tmp_path: Path, whole: Path) -> None:
    run = sit(tmp_path / "compiled", 1, chunked=True, precision={"compile": "model"})
    assert_same_run(run, whole, tolerance=1e-5)
    assert "Warning" not in (tmp_path / "compiled" / "processes" / "rank-0.err").read_text()


def test_chunks_of_another_task_are_refused_before_data_is_read(tmp_path: Path) -> None:
    sections = {"task": "text-classification", "data": {"label_column": "label"}, "loss": {"chunked": True}}
    recipe = tiny_recipe(tmp_path, **{**TEXT, **sections})
    with raises_golden():
        check_recipe(recipe)
