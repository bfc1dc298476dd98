"""Steps of a run on pretended GPUs: the host waits for nothing, and a process does what its plan says."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.plan.plan import resolve_plan
from accel_train.recipe.schema import Recipe
from tests.cuda_pretended import SMALL_BYTES
from tests.support.detectors import DETECTORS, YOLOS
from tests.support.runs import recipe_dict, write_base, write_corpus, write_jsonl
from tests.support.text_tasks import BERT, SEGFORMER

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cuda")]
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LENGTH, SAMPLES = 512, 4
"""Tokens of a sample, and samples of a micro-batch."""
STEADY_STEPS = 2
"""Steps in which waits are counted."""
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 768, "n_head": 12, "n_positions": LENGTH, "vocab_size": 50304,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": LENGTH, "vocab_size": 32000,
         "tie_word_embeddings": False}  # fmt: skip
PARALLEL: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"strategy": "fsdp2"},
    "hsdp": {"strategy": "fsdp2", "dp_shard_size": 4},
    "tp": {"strategy": "fsdp2", "tp_size": 2},
    "tp_only": {"strategy": "fsdp2", "tp_size": 8},
    "sp": {"strategy": "fsdp2", "sp_size": 2},
    "offload": {"strategy": "fsdp2", "cpu_offload": True},
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "chunked": {"loss": {"chunked": True}},
    "lora": {"model": {"lora": {"rank": 8, "alpha": 16}}},
    "ema": {"optimizer": {"ema_decay": 0.99}},
    "muon": {"optimizer": {"name": "muon"}},
    "checkpointed": {"precision": {"gradient_checkpointing": True}},
    "unused": {"task": "tests.cuda_pretended.faults:LeavesOneOut"},
}
TASKS: dict[str, dict[str, Any]] = {
    "detection": {
        "task": "object-detection",
        "tokenizer": "auto",
        "model": {"config": {**YOLOS, "hidden_size": 192, "intermediate_size": 768, "image_size": [128, 128]}},
        "data": {"train": "digit-scenes", "image_size": 128, "num_workers": 0},
    },
    "segmentation": {
        "task": "semantic-segmentation",
        "tokenizer": "auto",
        "model": {"config": {**SEGFORMER, "hidden_sizes": [32, 64, 160, 256], "decoder_hidden_size": 768}},
        "data": {"train": "digit-scenes", "image_size": 128, "num_workers": 0},
    },
    "embedding": {
        "task": "sentence-embedding",
        "model": {"config": {**BERT, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}},
        "data": {"train": "stdlib-summaries", "max_length": 64, "num_workers": 0},
    },
    "rows": {"data": {"format": "prompt_completion"}},
    "experts": {"model": {"config": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}}},
    "nf4": {"model": {"lora": {"rank": 8}, "frozen_dtype": "nf4"}},
}
"""Sections of cases that train something else."""
CASES = (
    "1 ddp bf16", "1 ddp fp16 chunked accumulation", "1 ddp no ema llama", "1 ddp bf16 muon", "1 ddp bf16 lora llama",
    "8 ddp bf16", "8 ddp fp16 chunked accumulation", "8 ddp bf16 muon", "8 ddp bf16 lora", "64 ddp no ema",
    "64 ddp bf16 muon", "1024 ddp bf16 llama",
    "8 fsdp2 bf16", "8 fsdp2 fp16 chunked accumulation", "8 fsdp2 bf16 muon", "8 fsdp2 no ema llama",
    "8 fsdp2 bf16 checkpointed llama", "8 fsdp2 fp16 chunked llama accumulation", "8 fsdp2 bf16 lora llama",
    "8 fsdp2 bf16 unused llama accumulation", "64 fsdp2 bf16 lora",
    "1024 fsdp2 bf16 llama accumulation", "64 hsdp bf16 unused",
    "8 hsdp bf16", "64 hsdp fp16 llama accumulation", "1024 hsdp bf16 ema chunked",
    "8 ddp bf16 detection", "8 fsdp2 bf16 detection", "1 ddp fp16 detection accumulation",
    "8 ddp fp16 segmentation", "8 fsdp2 bf16 segmentation", "8 ddp bf16 embedding", "8 fsdp2 bf16 embedding",
    "1 ddp bf16 mixture", "8 ddp fp16 mixture chunked accumulation", "8 fsdp2 bf16 mixture",
    "8 ddp bf16 rows", "8 fsdp2 bf16 rows", "8 ddp bf16 experts", "8 fsdp2 bf16 experts",
    "8 fsdp2 bf16 nf4 llama", "8 sp bf16 llama", "8 sp bf16 llama accumulation",
    "8 tp bf16 muon", "8 tp_only no", "64 tp fp16 chunked accumulation", "1024 tp bf16 ema",
    "8 offload bf16", "64 offload bf16 lora", "8 offload fp16 ema accumulation",
)  # fmt: skip
IN_ORDER = (
    "8 ddp fp16 chunked accumulation", "8 ddp bf16 muon", "8 ddp bf16 detection", "8 ddp bf16 embedding",
    "8 ddp fp16 mixture chunked accumulation",
    "8 fsdp2 fp16 chunked llama accumulation", "8 fsdp2 bf16 muon", "8 fsdp2 bf16 embedding", "8 fsdp2 bf16 experts",
    "8 fsdp2 bf16 segmentation", "8 fsdp2 bf16 nf4 llama", "64 hsdp fp16 llama accumulation", "8 tp bf16 muon",
    "8 tp_only no", "8 sp bf16 llama accumulation", "8 offload fp16 ema accumulation",
)  # fmt: skip
"""Cases in which the last process takes the same steps after rank 0, and has to call the same collectives."""
WAITING = {"offload": {"update.py", "private.py"}, "detection": {"losses.py"}, "embedding": {"losses.py"}}
"""Files of waits. An offload waits for the norm of gradients on the host, and for torch's copies with accumulation.

Detection waits once in a micro-batch, for the costs of its matching. Embeddings wait for the numbers of texts of other
processes.
"""
NOT_ALLOCATED_BY_TORCH = ("CUDA context", "NCCL buffers", "fragmentation")
HIDING = ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES")
FAULTS = {
    "ReadsANumber": ("waits", "item"), "ReadsAList": ("waits", "item"),
    "SendsFromTheHost": ("on_host", "all-reduce"), "MixesDevices": ("error", "cuda:0"),
}  # fmt: skip
"""Tasks of faults.py: the finding that shows each one, and its beginning."""


def merged(recipe: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    kept = {name: recipe.get(name, {}) for name, section in more.items() if isinstance(section, dict)}
    return {**recipe, **{name: {**kept[name], **each} if name in kept else each for name, each in more.items()}}


def recipe_of(case: str, folder: Path, **sections: Any) -> tuple[int, dict[str, Any]]:
    """The number of processes of a case, and its recipe."""
    size, layout, precision, *more = case.split()
    parallel, accumulation = PARALLEL[layout], 2 if "accumulation" in more else 1
    batch = SAMPLES * accumulation * int(size) // (parallel.get("tp_size", 1) * parallel.get("sp_size", 1))
    recipe = recipe_dict(
        folder,
        task="causal-lm",
        output_dir=str(folder / case.replace(" ", "-")),
        model={"config": LLAMA if "llama" in more or "tp" in layout else GPT2},
        data={"train": str(folder / "corpus.jsonl"), "eval_fraction": 0, "sequence_length": LENGTH,
              "cache_dir": str(folder / "cache")},
        parallel=parallel,
        precision={"mixed_precision": precision},
        batch={"global_batch_size": batch, "per_device_batch_size": SAMPLES},
        schedule={"max_steps": 100},
        optimizer={"learning_rate": 1e-3, "max_grad_norm": 1.0},
        guard={"drift_check_steps": 0},
    )  # fmt: skip
    for name in more:
        recipe = merged(recipe, MORE.get(name, {}))
    if (own := next((TASKS[name] for name in more if name in TASKS), None)) is not None:
        kept = ("model", "data") if "task" not in own else ()
        recipe = merged({name: each for name, each in recipe.items() if name in kept or name not in own}, own)
    if "rows" in more:
        recipe["data"]["train"] = str(folder / "rows.jsonl")
    if "mixture" in more:
        train = recipe["data"]["train"]
        recipe["data"]["train"] = [{"source": train, "weight": 3}, {"source": str(folder / "more.jsonl"), "weight": 1}]
    if "nf4" in more:
        recipe["model"] = {"pretrained": str(folder / "base"), **TASKS["nf4"]["model"]}
    return int(size), {**recipe, **sections}


class Driver:
    """Runs cases, all in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, folder / "guard.so"
        compiler, torch_folder = shutil.which("g++"), Path(torch.__file__).parent
        if compiler is None or sys.platform != "linux" or torch.version.cuda is not None:
            pytest.skip("needs g++, Linux, and a CPU build of torch")
        found = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        arguments = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", *found, "-o", str(self.library)]
        subprocess.run([compiler, *arguments, str(HERE / "guard.cpp"), "-lc10", "-ltorch_cpu"], check=True)
        write_corpus(folder, 1000)
        write_base(folder, LLAMA)
        words = [("step " * (20 + 7 * number % 50), "loss " * (10 + 5 * number % 30)) for number in range(2000)]
        write_jsonl(folder / "more.jsonl", ({"text": prompt} for prompt, _ in words))
        write_jsonl(folder / "rows.jsonl", ({"prompt": prompt, "completion": answer} for prompt, answer in words))

    def output_of(self, program: str, *words: str) -> str:
        """Run a program of this folder with the library; return what it prints."""
        more = {"LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # `without_cuda` hides GPUs from this process, and the programs pretend to have some.
        kept = {name: each for name, each in os.environ.items() if name not in HIDING}
        command = [sys.executable, "-W", "ignore", str(HERE / program), *words]
        return subprocess.run(command, env={**kept, **more}, stdout=subprocess.PIPE, text=True, check=True).stdout

    def run(
        self, cases: dict[str, tuple[int, dict[str, Any]]], in_order: Collection[str] = IN_ORDER
    ) -> dict[str, dict[str, Any]]:
        path = self.folder / "cases.json"
        path.write_text(json.dumps({name: (*case, name in in_order) for name, case in cases.items()}))
        output = self.output_of("drive.py", str(path))
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        return {line["case"]: line for line in lines}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("pretended"))


@pytest.mark.parametrize("layout", PARALLEL)
def test_a_step_waits_for_nothing_is_what_its_plan_says_and_calls_what_all_processes_call(
    driver: Driver, layout: str
) -> None:
    cases = {case: recipe_of(case, driver.folder) for case in CASES if case.split()[1] == layout}
    found = driver.run(cases)
    for case, (world_size, recipe) in cases.items():
        seen = found[case]
        assert "error" not in seen, f"{case}: {seen['error']}"
        places = {wait.rpartition(": ")[2].split(" < ")[0].partition(":")[0] for wait in seen["waits"]}
        waiting = [name for name in WAITING if name in case]
        assert places <= WAITING[waiting[0]] if waiting else not places, (case, seen["waits"])
        # With an offload, gloo sends the buffers of the host before the first step.
        assert not seen["on_host"] or layout == "offload", (case, seen["on_host"])
        assert seen["between_hosts"] == ({"all-reduce": 1.0} if "unused" in case else {}), case
        plan = resolve_plan(Recipe.model_validate(recipe), world_size, gpu="H100")
        planned: dict[str, list[float]] = {}
        for each in plan.scale.traffic:
            if each.payload_bytes <= SMALL_BYTES * each.times:
                continue
            calls, num_bytes = planned.get(each.kind, [0, 0])
            planned[each.kind] = [calls + each.times, num_bytes + each.payload_bytes]
        if "embedding" in case:
            # A plan leaves out the exchange of vectors: 2 texts of 256 numbers, and 5 more, of each sample.
            calls, num_bytes = planned.get("all-gather", [0, 0])
            planned["all-gather"] = [calls + 1, num_bytes + world_size * SAMPLES * (2 * 256 + 5) * 4]
        assert seen["traffic"] == {kind: each for kind, each in planned.items() if each[0]}, case
        sizes = {part.name: part.num_bytes or 0 for part in plan.memory}
        expected = sum(sizes.values()) - sum(sizes.get(name, 0) for name in NOT_ALLOCATED_BY_TORCH)
        if "detection" in case:
            assert sum(seen["waits"].values()) == STEADY_STEPS * (1 + ("accumulation" in case)), seen["waits"]
            # A plan leaves out the images of this step and of the next.
            expected += 2 * (1 + ("accumulation" in case)) * SAMPLES * 3 * 128 * 128 * 4
        assert seen["peak_bytes"] == pytest.approx(expected, rel=0.03), (case, sizes)
        assert seen.get("difference", "") == "", case
        assert ("difference" in seen) == (case in IN_ORDER)


def test_a_detector_waits_once_for_its_loss_whatever_its_layers_and_images_and_has_the_memory_of_its_plan(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forwards of transformers read checks of their own: one in each layer of DETR's encoder, for example."""
    # A check that is read on a pretended GPU fails, because it is False.
    monkeypatch.setenv("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")
    cases, size = {}, 256
    for name, config in DETECTORS.items():
        if name == "yolos":
            config = {**config, "image_size": [size, size]}
        for images in (2, SAMPLES):
            case = f"{name}, {images} images"
            _, recipe = recipe_of("1 ddp bf16 detection", driver.folder, model={"config": config})
            batch = {"global_batch_size": images, "per_device_batch_size": images}
            data = {**recipe["data"], "image_size": size}
            cases[case] = 1, {**recipe, "batch": batch, "data": data, "output_dir": str(driver.folder / case)}
    source = (ROOT / "accel_train/tasks/object_detection/losses.py").read_text().splitlines()
    forward = next(number for number, line in enumerate(source, 1) if " = model(" in line)
    for case, seen in driver.run(cases, ()).items():
        assert "error" not in seen, f"{case}: {seen['error']}"
        own = {wait: count for wait, count in seen["waits"].items() if f": losses.py:{forward} < " not in wait}
        assert list(own.values()) == [STEADY_STEPS], (case, own)
        assert next(iter(own)).startswith("copy to the host: losses.py:")
        assert seen["waits"] == own or not case.startswith("yolos"), seen["waits"]
        images = int(case.split()[-2])
        memory = resolve_plan(Recipe.model_validate(cases[case][1]), 1, gpu="H100").memory
        parts = [part.num_bytes for part in memory if part.name not in NOT_ALLOCATED_BY_TORCH]
        # A plan leaves out the images of this step and of the next.
        expected = sum(each or 0 for each in parts) + 2 * images * 3 * size * size * 4
        assert None not in parts, case
        # Torch rounds each tensor up, which counts if images are few.
        assert images < SAMPLES or seen["peak_bytes"] == pytest.approx(expected, rel=0.03), case


def line_in(text: str) -> int:
    """The first line of faults.py that a text names."""
    return int(text.partition("faults.py:")[2].partition(" ")[0])


def test_a_process_that_calls_fewer_collectives_is_found(driver: Driver) -> None:
    task = "tests.cuda_pretended.faults:SkipsACollective"
    size, recipe = recipe_of("8 ddp bf16", driver.folder, task=task)
    seen = driver.run({"skips": (size, {**recipe, "output_dir": str(driver.folder / "skips")})}, {"skips"})["skips"]
    assert "error" not in seen, seen["error"]
    assert "SkipsACollective" in (HERE / "faults.py").read_text().splitlines()[line_in(seen["difference"]) - 1]


def test_what_no_step_may_do_is_found_with_its_line(driver: Driver) -> None:
    cases = {}
    for name in FAULTS:
        size, recipe = recipe_of("8 ddp bf16", driver.folder, task=f"tests.cuda_pretended.faults:{name}")
        cases[name] = (size, {**recipe, "output_dir": str(driver.folder / name)})
    found, lines = driver.run(cases), (HERE / "faults.py").read_text().splitlines()
    for name, (kind, what) in FAULTS.items():
        line = next(number for number, each in enumerate(lines, 1) if each.endswith(f"# {name}"))
        seen = found[name]
        if kind == "error":
            assert f'faults.py", line {line}' in seen["error"]
            assert what in seen["error"]
        else:
            assert "error" not in seen, seen["error"]
            places = list(seen[kind])
            assert places
            assert all(place.startswith(f"{what}: faults.py:{line} ") for place in places), places
