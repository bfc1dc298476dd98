"""Sequences split over processes train as on one: the same losses, each target counted once, checkpoints for any
layout.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train.cli.main import main
from accel_train.data.batch_sizes import resolve_batch
from accel_train.data.text.tokens import collate_windows
from accel_train.model.training_module import TrainingModule
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.dims import ParallelDims, choose_sequences
from accel_train.parallel.sequence_parallel import Slices, slice_of
from accel_train.plan.format import format_plan
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Batch, Recipe
from accel_train.task import load_task
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.comparisons import assert_same_bits, assert_same_run, tensors
from tests.support.processes import run_forked
from tests.support.runs import LLAMA, TINY_MODEL, events, metrics, recipe_dict, write_corpus, write_recipe_file

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


def sit(folder: Path, processes: int, parallel: dict[str, Any], code: int = 0, **sections: Any) -> Path:
    """Train in this folder until all processes end with this code; returns the run folder."""
    folder.mkdir(exist_ok=True)
    write_corpus(folder)
    options = {"ragged": True, "record": str(folder), **sections.pop("options", {})}
    recipe = write_recipe_file(folder, **{**TEXT, "options": options, "parallel": parallel, **sections})
    preload = [ULYSSES] if "sp_size" in parallel else []
    forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes", preload=preload)
    assert forked.wait() == [code] * processes, forked.stderr(0)
    assert not preload or "Warning" not in forked.stderr(0)
    return folder / "run"


def reads(run: Path, rank: int) -> list[int]:
    lines = (run.parent / f"rank-{rank}.jsonl").read_text().splitlines()
    return [index for line in lines for index in json.loads(line)]


def assert_trained_alike(run: Path, other: Path) -> None:
    """Losses, gradient norms, evaluations and counts of two layouts of one run."""
    assert_same_run(run, other)
    ours, theirs = ([each["grad_norm"] for each in metrics(folder)] for folder in (run, other))
    assert ours == pytest.approx(theirs, rel=1e-5)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, other)]
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
        pytest.param(4, SP, marks=pytest.mark.slow),
        pytest.param(2, {**FSDP2, **SP}, marks=pytest.mark.slow),
        pytest.param(4, {**FSDP2, **SP}, marks=pytest.mark.slow),
        pytest.param(4, {**FSDP2, **SP, "dp_shard_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process_and_each_target_is_counted_once(
    tmp_path: Path, undisturbed: Path, processes: int, parallel: dict[str, Any]
) -> None:
    run = sit(tmp_path / "split", processes, parallel)
    assert_trained_alike(run, undisturbed)
    assert not [path for path in run.rglob("config.json") if "sdpa" in path.read_text()]
    shares = [reads(run, rank) for rank in range(processes)]
    assert shares[0::2] == shares[1::2]  # neighbours read the same samples
    assert sorted(index for share in shares[0::2] for index in share) == sorted(reads(undisturbed, 0))


@pytest.mark.parametrize(
    ("parallel", "config"),
    [(SP, LLAMA), pytest.param({**FSDP2, **SP}, TINY_MODEL, marks=pytest.mark.slow)],
    ids=["llama", "fsdp2"],
)
def test_documents_that_reach_over_slices_are_kept_apart_as_on_one_process(
    tmp_path: Path, parallel: dict[str, Any], config: dict[str, Any]
) -> None:
    sections = {"model": {"config": config}, "data": {"mask_documents": True}, "schedule": {"max_steps": 5}}
    runs = [sit(tmp_path / str(n), n, p, **sections) for n, p in ((2, parallel), (1, {}))]
    assert_trained_alike(*runs)
    said = [json.loads((run / "summary.json").read_text())["choices"]["document mask"] for run in runs]
    assert "per-document causal attention" in said[0]
    assert "dense mask" in said[1]  # of windows this short


@pytest.mark.slow
def test_packed_rows_that_reach_over_slices_train_as_on_one_process(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n} plus {n * 7 % 11} is", "completion": f" {n + n * 7 % 11}" * (1 + n % 9)} for n in range(60)
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "data": {"train": str(table), "format": "prompt_completion", "sequence_length": 64},
        "task": "causal-lm",
        "options": {},
        "evaluate": {"every_steps": 4},
        "schedule": {"max_steps": 5},
    }
    assert_trained_alike(*(sit(tmp_path / str(n), n, p, **sections) for n, p in ((2, SP), (1, {}))))


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
    assert_trained_alike(*(sit(tmp_path / str(n), n, p, **sections) for n, p in ((2, SP), (1, {}))))


@pytest.mark.slow
def test_four_slices_of_a_sequence_and_two_heads_of_keys_give_the_losses_of_one_process(tmp_path: Path) -> None:
    sections = {"model": {"config": LLAMA}, "schedule": {"max_steps": 5}}
    assert_trained_alike(*(sit(tmp_path / str(n), n, p, **sections) for n, p in ((4, {"sp_size": 4}), (1, {}))))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [SP, {**FSDP2, **SP}], ids=["ddp", "fsdp2"])
def test_with_checkpointing_and_16_bits_losses_are_near_those_of_one_process(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    sections = {"precision": {"mixed_precision": "bf16", "gradient_checkpointing": True}}
    runs = [sit(tmp_path / str(n), n, p, **sections) for n, p in ((2, parallel), (1, {}))]
    assert_same_run(*runs, tolerance=2e-3)


def whole_and_alone() -> tuple[float, float]:
    """The loss of sequences of an untrained model, and the sum of those of their halves, each of which attends to
    itself only.
    """
    recipe = Recipe.model_validate(recipe_dict(Path("somewhere"), task="causal-lm"))
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
    with pytest.raises(ValueError, match="and these have document_ids, input_ids, labels, position_ids"):
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
    sections = {
        "schedule": {"max_steps": 4, "warmup_steps": 0, "type": "constant"},
        "checkpoint": {"every_steps": 1, "keep": 10},
        "batch": {"global_batch_size": 2, "per_device_batch_size": 2},
        "evaluate": {"every_steps": 0},
        "options": {"nan_at": {"step": 3, "rank": 1}},
    }
    run = sit(tmp_path / "run", 2, SP, **sections)
    for kind in ("model", "optimizer", "average"):
        assert_same_bits(tensors(run, 2, kind), tensors(run, 3, kind))
    name = "transformer.wte.weight"
    assert not torch.equal(tensors(run, 3, "model")[name], tensors(run, 4, "model")[name])
    assert [event["step"] for event in events(run, "skip")] == [3]
    [incident] = (run / "incidents").iterdir()
    assert "sequences are split over the processes" in (incident / "incident.md").read_text()
    kept = load_file(incident / "batch-rank-1.safetensors")
    assert kept["0/input_ids"].shape == (2, 32)
    assert main(["replay", str(incident), "--device", "cpu"]) == 0


@pytest.mark.slow
def test_stopped_when_split_it_goes_on_alone_as_the_run_that_never_stopped(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "chain"
    sit(folder, 2, SP, code=75, options={"term_at": {"step": 6, "rank": 1}})  # of 2 micro-batches a step
    assert 2 < events(folder / "run", "preempted")[-1]["step"] < 6
    assert_same_run(sit(folder, 1, {}), undisturbed)
    assert len(events(folder / "run", "resume")) == 1


Layout = tuple[int, dict[str, Any]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [[(1, {}), (2, SP), (2, {})], [(2, {}), (4, {**FSDP2, **SP}), (2, SP)]], ids=["from one", "to split"]
)
def test_stopped_and_gone_on_under_other_layouts_it_is_the_run_that_never_stopped(
    tmp_path: Path, undisturbed: Path, layouts: list[Layout]
) -> None:
    folder = tmp_path / "chain"
    for number, (processes, parallel) in enumerate(layouts):
        is_last = number == len(layouts) - 1
        options = {} if is_last else {"term_at": {"step": 1, "rank": processes - 1}}
        sit(folder, processes, parallel, code=0 if is_last else 75, options=options)
    steps = [event["step"] for event in events(folder / "run", "resume")]
    assert len(steps) == 2
    assert 0 < steps[0] < steps[1] < 8
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
    sections = {
        "data": {"last_batch": "short", "sequence_length": 64},
        "batch": {"global_batch_size": 12, "per_device_batch_size": 1},
        "schedule": {"max_steps": None, "num_epochs": 1},
        "optimizer": {"learning_rate": 1e-2},
        "evaluate": {"every_steps": 0},
    }
    assert_same_run(*(sit(tmp_path / str(n), n, p, **sections) for n, p in ((4, {**FSDP2, **SP}), (1, {}))))


@pytest.mark.slow
def test_a_finished_run_is_evaluated_with_whole_sequences_and_the_same_result(tmp_path: Path) -> None:
    run = sit(tmp_path / "run", 2, SP, batch={"global_batch_size": 1}, task="causal-lm", options={})
    before = json.loads((run / "evaluation.json").read_text())["metrics"]
    assert main(["evaluate", str(run)]) == 0
    assert json.loads((run / "evaluation.json").read_text())["metrics"] == pytest.approx(before, rel=1e-6)


# --- what is refused, and told, before a model is built
# ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "fault", "remedy"),
    [
        ({"task": "image-classification"}, "is for causal-lm, and task is image-classification", "set it to 1"),
        ({"data": {"sequence_length": 31}}, "does not divide data.sequence_length=31", "use 30 or 32 tokens"),
        (
            {"model": {"config": TINY_MODEL, "attn_implementation": "eager"}},
            "model.attn_implementation is eager",
            "set that to auto",
        ),
        (
            {"precision": {"compile": True}},
            "does not go with precision.compile: DeepSpeed's exchange of heads between processes cannot be compiled",
            "leave that out",
        ),
        ({"model": {"config": {**TINY_MODEL, "n_head": 1}}}, "does not divide the 1 n_head of gpt2", "use 1"),
        (
            {"model": {"config": {**LLAMA, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}}},
            "does not divide the 6 num_attention_heads and 3 num_key_value_heads of llama",
            "use 1, 3",
        ),
        (
            {"model": {"config": {**LLAMA, "model_type": "mistral", "sliding_window": 16}}},
            "mistral attends within 16 tokens",
            "gpt2, llama",
        ),
        (
            {"model": {"config": {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}},
            "rope_type dynamic turns a position by the longest that it sees",
            "use default, linear, yarn, llama3",
        ),
        (
            {"model": {"config": {**LLAMA, "model_type": "mixtral"}}},
            "mixtral is not among the models checked",
            "Set it to 1",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason_and_a_remedy(
    sections: dict[str, Any], fault: str, remedy: str
) -> None:
    recipe = Recipe.model_validate(recipe_dict(Path("somewhere"), **{"task": "causal-lm", "parallel": SP, **sections}))
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        check_compatibility(recipe, load_task(recipe.task))
    assert str(caught.value).startswith("parallel.sp_size=2")
    assert remedy in str(caught.value)


class LooksAhead(CausalLM):
    """A task whose loss is its own, and that says nothing of it."""

    def loss_sum(self, model: Any, batch: Any) -> Any:
        return super().loss_sum(model, batch)


class LooksAheadNot(LooksAhead):
    loss_is_by_position = True


class SaysItTooEarly(LooksAheadNot):
    def evaluate_batch(self, model: Any, batch: Any) -> Any:
        return super().evaluate_batch(model, batch)


class TakesItBack(LooksAheadNot):
    loss_is_by_position = False


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("LooksAhead", True), ("LooksAheadNot", False), ("SaysItTooEarly", True), ("TakesItBack", True)],
)
def test_a_task_with_a_loss_of_its_own_has_to_say_that_it_is_a_sum_over_positions(name: str, is_refused: bool) -> None:
    task = f"{__name__}:{name}"
    recipe = Recipe.model_validate(recipe_dict(Path("somewhere"), task=task, parallel=SP))
    if not is_refused:
        return check_compatibility(recipe, load_task(task))
    with pytest.raises(ValueError, match="needs a loss that is a sum over positions"):
        check_compatibility(recipe, load_task(task))


def test_batches_of_more_than_tokens_and_labels_are_refused() -> None:
    batch = {name: torch.zeros(1, 4, dtype=torch.int64) for name in ("input_ids", "labels")}
    with pytest.raises(ValueError, match="these have input_ids, labels, weights; set it to 1"):
        slice_of({**batch, "weights": torch.zeros(1)}, 0, 2)
    with pytest.raises(ValueError, match="does not divide a batch of 4 tokens"):
        slice_of(batch, 0, 3)


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.parallel.compatibility.find_spec", lambda name: None)
    recipe = Recipe.model_validate(recipe_dict(Path("somewhere"), task="causal-lm", parallel=SP))
    with pytest.raises(ValueError, match=r"pip install 'accel-train\[deepspeed\]'"):
        check_compatibility(recipe, load_task("causal-lm"))


@pytest.mark.parametrize(
    ("parallel", "fault"),
    [
        (
            {"sp_size": 4},
            "parallel.sp_size=4 does not divide the 2 processes of this run; use 1, 2, or run on 4 or 8 processes",
        ),
        ({"sp_size": 2, "strategy": "deepspeed"}, "parallel.sp_size=2 does not work with parallel.strategy deepspeed"),
        ({"sp_size": 2, "strategy": "fsdp2", "tp_size": 2}, "parallel.sp_size=2 does not work with parallel.tp_size=2"),
        ({"cp_size": 2}, "unknown setting parallel.cp_size"),
    ],
)
def test_plan_and_run_end_with_code_2_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: dict[str, Any], fault: str
) -> None:
    write_corpus(tmp_path)
    config = {**TINY_MODEL, "n_head": 4}
    recipe = write_recipe_file(tmp_path, task="causal-lm", parallel=parallel, model={"config": config})
    assert main(["plan", str(recipe), "--world-size", "2"]) == 2
    assert fault in capsys.readouterr().err
    if parallel != {"sp_size": 4}:
        return  # by the same functions
    forked = run_forked(["run", str(recipe)], 1, folder=tmp_path / "processes")
    assert forked.wait() == [2]
    assert "parallel.sp_size=4 does not divide the 1 process of this run; use 1, or run on 4 or 8" in forked.stderr(0)
    assert not (tmp_path / "run").exists()


# --- what a plan says
# --------------------------------------------------------------------------------------------------


def test_neighbours_share_samples_so_fewer_processes_divide_the_global_batch() -> None:
    section = Parallel(**SP)
    sizes = resolve_batch(
        Batch(global_batch_size=12, per_device_batch_size=2), 6, section.num_sharing, section.shared_by
    )
    assert (sizes.world_size, sizes.gradient_accumulation_steps) == (3, 2)
    assert sizes.reason.endswith("3 processes, each with 1 more that reads the same samples (parallel.sp_size)")


def test_plan_counts_what_slices_save_and_what_their_attention_sends(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    model = {"config": {**LLAMA, "max_position_embeddings": 512}}
    sections = {
        "task": "causal-lm",
        "model": model,
        "data": {"sequence_length": 256},
        "batch": {"global_batch_size": 2, "per_device_batch_size": 1},
    }
    plans = [
        resolve_plan(Recipe.model_validate(recipe_dict(tmp_path, parallel=parallel, **sections)), processes, "H100")
        for processes, parallel in ((2, {}), (4, SP))
    ]
    whole, split = ({part.name: part.num_bytes or 0 for part in plan.memory} for plan in plans)
    for name in ("activations", "logits"):
        assert split[name] == pytest.approx(whole[name] / 2, rel=0.1)  # beside slices: weights in 16 bits
    positions, width, of_keys = 128, 32, 16
    assert split["exchange"] == 2 * 2 * positions * (width + 2 * of_keys)  # bf16; as it leaves and as it arrives
    [exchanged] = [each for each in plans[1].scale.traffic if each.kind == "all-to-all"]
    assert exchanged.times == 2 * 4 * 2  # layers, all-to-alls, passes
    assert exchanged.payload_bytes == 2 * 2 * positions * 2 * (2 * width + 2 * of_keys)
    assert exchanged.sent_bytes == exchanged.payload_bytes / 2
    assert plans[0].num_targets == plans[1].num_targets
    text = format_plan(plans[1])
    assert "groups of 2 processes read the same samples, each process has a slice of every sequence" in text
    assert "heads for slices of the sequence (parallel.sp_size); 16 collectives" in text
    assert not any(each.kind == "all-to-all" for each in plans[0].scale.traffic)


@pytest.mark.parametrize("length", [64, 512])
def test_plan_counts_no_mask_for_documents_over_slices(tmp_path: Path, length: int) -> None:
    write_corpus(tmp_path)
    model = {"config": {**LLAMA, "max_position_embeddings": 512}}
    sections = {
        "task": "causal-lm",
        "model": model,
        "parallel": SP,
        "batch": {"global_batch_size": 2, "per_device_batch_size": 1},
    }
    found = []
    for masked in (False, True):
        data = {"sequence_length": length, "mask_documents": masked}
        plan = resolve_plan(Recipe.model_validate(recipe_dict(tmp_path, data=data, **sections)), 4)
        found.append({part.name: part.num_bytes for part in plan.memory})
    assert found[1]["activations"] == pytest.approx(found[0]["activations"], rel=0.1)
    assert "per-document causal attention" in format_plan(plan)


def test_neighbours_on_several_machines_are_told_of() -> None:
    assert "reach over machines" not in choose_sequences(Parallel(sp_size=8), 16, 8).reason
    assert "they reach over machines of 4 processes" in choose_sequences(Parallel(sp_size=8), 16, 4).reason
