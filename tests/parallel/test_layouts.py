"""Layouts of processes: what is refused before a model is built, and what a plan says."""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig

from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import resolve_batch
from accel_train.model.kernels.attention import PER_DOCUMENT
from accel_train.model.kernels.experts import RouterLoss
from accel_train.model.training_module import TrainingModule
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.ddp import Ddp
from accel_train.parallel.dims import across_machines, choose_sequences
from accel_train.parallel.fsdp2 import Fsdp2
from accel_train.plan.format import format_plan
from accel_train.plan.place import choose_layout
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Batch, Recipe
from accel_train.task import load_task
from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.tasks.sentence_embedding.task import SentenceEmbedding
from tests.support.comparisons import Train, assert_loaded_to_the_bit, assert_same_bits_of_runs
from tests.support.hf_models import refused
from tests.support.marks import slow
from tests.support.plan_recipe import parts_of
from tests.support.processes import run_forked
from tests.support.runs import LLAMA as TINY_LLAMA
from tests.support.runs import TINY_MODEL, Capture, Settings, recipe_dict, tiny_recipe, write_corpus, write_recipe_file

SP, TP = {"sp_size": 2}, {"strategy": "fsdp2", "tp_size": 2}
LLAMA = {**TINY_LLAMA, "vocab_size": 259}
CPU = torch.device("cpu")


FSDP2 = {"strategy": "fsdp2"}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "one": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, FSDP2),
    "fsdp2-4": (4, FSDP2),
    "copies": (4, {**FSDP2, "dp_shard_size": 2}),
    "tp": (2, TP),
    "fsdp2-tp": (4, TP),
    **{f"zero-{stage}": (2, {"strategy": "deepspeed", "zero_stage": stage}) for stage in (1, 2, 3)},
}
PAIRS = [
    "zero-3>ddp",
    *("fsdp2>one", "one>fsdp2", "fsdp2>fsdp2-4", "copies>ddp", "fsdp2-4>copies"),
    *("tp>one", "one>tp", "tp>fsdp2", "fsdp2>tp", "fsdp2-tp>ddp"),
    *("ddp>fsdp2-tp", "fsdp2-tp>tp", "tp>fsdp2-tp", "fsdp2-tp>fsdp2", "fsdp2>fsdp2-tp"),
    *("ddp>zero-3", "zero-1>zero-3", "fsdp2>zero-2", "zero-2>fsdp2", "fsdp2>zero-3"),
]


@pytest.mark.parametrize("pair", [PAIRS[0], *(slow(each) for each in PAIRS[1:])])
def test_what_is_saved_under_one_layout_is_loaded_under_another_to_the_bit(train: Train, pair: str) -> None:
    text = {
        **of(LLAMA),
        "batch": {"global_batch_size": 12, "per_device_batch_size": 3},
        "schedule": {"max_steps": 3},
        "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
    }
    saved, loaded = (LAYOUTS[name] for name in pair.split(">"))
    assert_loaded_to_the_bit(train, saved, loaded, 3, text)


def test_ddp_that_copies_a_bucket_of_gradients_at_once_trains_to_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for name, preload in (("at-once", []), ("each", ["tests.support.tasks.copies_each"])):
        folder = tmp_path / name
        folder.mkdir()
        write_corpus(folder)
        batch = {"global_batch_size": 8, "per_device_batch_size": 2}  # 2 micro-batches on each process
        recipe = write_recipe_file(folder, batch=batch, schedule={"max_steps": 4})
        run_forked(["run", str(recipe)], 2, folder=folder / "processes", preload=preload).expect(0)
        runs.append(folder / "run")
    assert_same_bits_of_runs(runs[0], runs[1], 4)


def of(config: Settings, **changes: Any) -> Settings:
    return {"model": {"config": {**config, **changes}}}


SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
THREE_HEADS = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
EAGER = {"model": {"config": TINY_MODEL, "attn_implementation": "eager"}}


@pytest.mark.parametrize(
    ("parallel", "sections", "other", "fault", "remedy"),
    [
        (TP, of(TINY_MODEL), None, "plan to split gpt2", "llama, mistral"),
        (TP, of(LLAMA, model_type="mixtral"), None, "plan of mixtral", "tp_size to 1"),
        (TP, of(LLAMA, **THREE_HEADS), None, "3 num_attention_heads of llama", "1, 3"),
        (TP, of(LLAMA, num_key_value_heads=1), None, "1 num_key_value_heads", "Use 1"),
        (TP, {"precision": {"compile": True}}, "precision.compile", "split layers", "one of them"),
        (TP, {"model": {"config": LLAMA, "lora": {"rank": 2}}}, "model.lora", "adapters", "one of them"),
        ({**TP, "cpu_offload": True}, {}, "parallel.cpu_offload", "not tested", "one of them"),
        (TP, {"task": "image-classification"}, "task", "image-classification", "tp_size to 1"),
        (SP, {"task": "image-classification"}, "task", "image-classification", "sp_size to 1"),
        (SP, {"data": {"sequence_length": 31}}, "data.sequence_length", "31", "30 or 32 tokens"),
        (SP, EAGER, "model.attn_implementation", "eager", "to auto"),
        (SP, {"precision": {"compile": True}}, "precision.compile", "exchange of heads", "to false"),
        (SP, of(TINY_MODEL, n_head=1), None, "1 n_head of gpt2", "Use 1"),
        (SP, of(LLAMA, **SIX_HEADS), None, "6 num_attention_heads and 3 num_key_value_heads of llama", "Use 1, 3"),
        (SP, of(LLAMA, model_type="mistral", sliding_window=16), None, "16 tokens", "gpt2, llama"),
        (SP, of(LLAMA, **DYNAMIC), None, "rope_type dynamic", "default, linear, yarn, llama3"),
        (SP, of(LLAMA, model_type="mixtral"), None, "mixtral", "sp_size to 1"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason_and_a_remedy(
    parallel: Settings, sections: Settings, other: str | None, fault: str, remedy: str
) -> None:
    sections = {"task": "causal-lm", "model": {"config": LLAMA}, "parallel": parallel, **sections}
    recipe = tiny_recipe(Path("somewhere"), **sections)
    with pytest.raises(SettingError) as caught:
        check_compatibility(recipe, load_task(recipe.task))
    error, setting = caught.value, "parallel.sp_size" if parallel is SP else "parallel.tp_size"
    assert (error.at, error.settings) == (f"{setting}=2", (setting, *([other] if other else [])))
    assert fault in error.problem
    assert remedy in error.remedy


@pytest.mark.parametrize(("index", "expected"), [(0, "true"), (3, "false")])
def test_ddp_does_not_name_a_gpu_that_its_process_does_not_see(
    monkeypatch: pytest.MonkeyPatch, index: int, expected: str
) -> None:
    monkeypatch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "false")
    fake: Any = SimpleNamespace(
        device=torch.device("cuda", index), local_process_index=3, ddp_handler=SimpleNamespace()
    )
    fake.prepare = lambda *_: (None, SimpleNamespace(optimizer=None))
    fake.num_processes = 1
    ddp, inner = Ddp(Parallel(), Choice(1, "")), TrainingModule(torch.nn.Linear(1, 1), load_task("causal-lm"))
    ddp.accelerator = fake
    ddp.wrap(inner, lambda model: torch.optim.SGD(model.parameters(), 0.1), find_unused=False)
    assert os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] == expected


class LooksAhead(CausalLM):
    """A task whose loss is its own, and that says nothing of it."""

    def loss_sum(self, model: Any, batch: Any) -> Any:
        return super().loss_sum(model, batch)


class LooksAheadNot(LooksAhead):
    spec = CausalLM.spec


class SaysItTooEarly(LooksAheadNot):
    def evaluate_batch(self, model: Any, batch: Any) -> Any:
        return super().evaluate_batch(model, batch)


class TakesItBack(LooksAheadNot):
    spec = replace(CausalLM.spec, loss_is_by_position=False)


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("LooksAhead", True), ("LooksAheadNot", False), ("SaysItTooEarly", True), ("TakesItBack", True)],
)
def test_a_task_with_a_loss_of_its_own_has_to_say_that_it_is_a_sum_over_positions(name: str, is_refused: bool) -> None:
    task = f"{__name__}:{name}"
    recipe = tiny_recipe(Path("somewhere"), task=task, parallel=SP)
    if not is_refused:
        return check_compatibility(recipe, load_task(task))
    error = refused(lambda: check_compatibility(recipe, load_task(task)), "parallel.sp_size", "task")
    assert "loss_is_by_position" in error.remedy


class Embeds(SentenceEmbedding):
    """A custom task with the loss of its base class."""


class Balances(CausalLM):
    """A custom task whose loss over the global batch is known once its data is read."""

    def __init__(self) -> None:
        super().__init__()
        self.global_loss = RouterLoss()


GRAPHS: Settings = {"precision": {"compile": True, "compile_mode": "reduce-overhead"}}
DEEPSPEED: Settings = {"parallel": {"strategy": "deepspeed"}}


@pytest.mark.parametrize("task", ["sentence-embedding", f"{__name__}:Embeds", f"{__name__}:Balances", "causal-lm"])
@pytest.mark.parametrize(
    ("sections", "setting"), [(GRAPHS, "precision.compile_mode"), (DEEPSPEED, "parallel.strategy")]
)
def test_a_loss_over_the_global_batch_refuses_what_is_not_tested_with_it(
    task: str, sections: Settings, setting: str
) -> None:
    recipe = tiny_recipe(Path("somewhere"), task=task, **sections)
    if task == "causal-lm":
        return check_compatibility(recipe, load_task(task))
    with pytest.raises(SettingError) as caught:
        check_compatibility(recipe, load_task(task))
    assert caught.value.settings == (setting, "task")
    assert task in caught.value.problem


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.parallel.compatibility.find_spec", lambda name: None)
    recipe = tiny_recipe(Path("somewhere"), task="causal-lm", parallel=SP)
    error = refused(lambda: check_compatibility(recipe, load_task("causal-lm")), "parallel.sp_size")
    assert error.remedy.endswith("pip install 'accel-train[deepspeed]'")


@pytest.mark.parametrize(
    ("parallel", "fault"),
    [
        ({"sp_size": 4}, "run on 4 or 8 processes"),
        ({"sp_size": 2, "strategy": "deepspeed"}, "parallel.strategy deepspeed"),
        ({**TP, "sp_size": 2}, "parallel.tp_size=2"),
        ({"cp_size": 2}, "unknown setting parallel.cp_size"),
        ({"tp_size": 2}, "is not read: it needs strategy fsdp2"),
        ({**TP, "tp_size": 4}, "the 2 processes"),
        ({**TP, "dp_shard_size": 2}, "parallel.dp_shard_size=2 x parallel.tp_size=2: "),
        (TP, "plan to split gpt2"),
    ],
)
def test_plan_and_run_end_with_code_2_and_say_why(
    corpus: Path, capsys: Capture, parallel: Settings, fault: str
) -> None:
    is_gpt2 = parallel == TP or "sp_size" in parallel
    model = (of(TINY_MODEL, n_head=4) if is_gpt2 else of(LLAMA, num_key_value_heads=4))["model"]
    recipe = write_recipe_file(corpus, task="causal-lm", parallel=parallel, model=model)
    assert main(["plan", str(recipe), "--world-size", "2"]) == 2
    assert fault in capsys.readouterr().err
    if parallel != {"sp_size": 4}:
        return  # by the same functions
    forked = run_forked(["run", str(recipe)], 1, folder=corpus / "processes")
    assert forked.wait() == [2]
    assert fault in forked.stderr(0)
    assert not (corpus / "run").exists()


def test_a_model_of_ones_own_task_without_a_plan_is_refused_before_it_has_weights(corpus: Path) -> None:
    recipe = tiny_recipe(corpus, parallel=TP)  # the probe task, with a GPT-2
    assert "gpt2 (base_model_tp_plan)" in refused(lambda: resolve_plan(recipe, 2), "parallel.tp_size").problem


def test_one_weight_that_is_split_under_one_name_alone_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(GPTNeoXConfig.base_model_tp_plan, "embed_in", raising=False)  # as before transformers 5.24
    config = {**LLAMA, "model_type": "gpt_neox", "tie_word_embeddings": True}
    del config["num_key_value_heads"]
    recipe = recipe_dict(corpus, task="causal-lm", parallel=TP, model={"config": config})
    error = refused(lambda: resolve_plan(Recipe.model_validate(recipe), 2), "parallel.tp_size")
    assert "gpt_neox" in error.problem.split()
    assert "model.config.tie_word_embeddings" in error.remedy


@pytest.mark.parametrize("parallel", [SP, TP])
def test_neighbours_share_samples_so_fewer_processes_divide_the_global_batch(parallel: Settings) -> None:
    section, batch = Parallel(**parallel), Batch(global_batch_size=12, per_device_batch_size=2)
    sizes = resolve_batch(batch, 6, section.num_sharing, section.shared_by)
    assert (sizes.world_size, sizes.gradient_accumulation_steps) == (3, 2)
    assert re.findall(r"\d+", sizes.reason) == ["12", "2", "2", "3", "1"]
    assert sizes.reason.endswith(f"(parallel.{'sp_size' if parallel is SP else 'tp_size'})")
    assert resolve_batch(Batch(global_batch_size=12), 6) == resolve_batch(Batch(global_batch_size=12), 6, 1)


def test_layout_counts_groups_of_neighbours() -> None:
    layout = choose_layout(Parallel(**TP), 16, "cuda")
    assert (layout.shard_size, layout.tp_size, layout.num_copies) == (8, 2, 1)
    choice = Fsdp2.choose(Parallel(**TP), 2, CPU)
    assert choice.value == 1
    assert "fsdp2" not in choice.reason


def test_neighbours_on_several_machines_are_told_of(corpus: Path) -> None:
    assert "machines" not in choose_sequences(Parallel(sp_size=8), 16, 8).reason
    assert "machines of 4 processes" in choose_sequences(Parallel(sp_size=8), 16, 4).reason
    assert across_machines(Parallel(strategy="fsdp2", tp_size=8), 8) is None
    assert "machines of 4 processes" in str(across_machines(Parallel(strategy="fsdp2", tp_size=8), 4))
    model = of(LLAMA, num_attention_heads=16, num_key_value_heads=16)["model"]
    sections = {"parallel": {"strategy": "fsdp2", "tp_size": 16}, "model": model, "task": "causal-lm"}
    plan = resolve_plan(tiny_recipe(corpus, **sections), 16, "H100")
    assert "machines of 8 processes" in format_plan(plan)


def test_plan_counts_what_slices_save_and_what_their_attention_sends(corpus: Path) -> None:
    model = {"config": {**LLAMA, "max_position_embeddings": 512}}
    sections = {
        "task": "causal-lm",
        "model": model,
        "data": {"sequence_length": 256},
        "batch": {"global_batch_size": 2, "per_device_batch_size": 1},
    }
    plans = [
        resolve_plan(tiny_recipe(corpus, parallel=parallel, **sections), processes, "H100")
        for processes, parallel in ((2, {}), (4, SP))
    ]
    whole, split = map(parts_of, plans)
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
    assert "groups of 2 processes" in text
    assert any("parallel.sp_size" in line and " 16 collectives" in line for line in text.splitlines())
    assert not any(each.kind == "all-to-all" for each in plans[0].scale.traffic)


@pytest.mark.parametrize("length", [64, 512])
def test_plan_counts_no_mask_for_documents_over_slices(corpus: Path, length: int) -> None:
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
        plan = resolve_plan(tiny_recipe(corpus, data=data, **sections), 4)
        found.append(parts_of(plan))
    assert found[1]["activations"] == pytest.approx(found[0]["activations"], rel=0.1)
    assert PER_DOCUMENT in format_plan(plan)
