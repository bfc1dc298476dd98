"""A start from pretrained weights reads only what a process holds, and trains to the same bits as a whole load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForMaskedLM

from tests.parallel.conftest import train_in
from tests.support.comparisons import assert_same_bits, files_of_model, tensors
from tests.support.marks import slow
from tests.support.runs import LLAMA, TINY_MODEL, Settings, forget, losses, steps_of, summary_of, write_base
from tests.support.text_tasks import BERT, write_texts
from tests.support.wording import assert_golden

FSDP2: Settings = {"strategy": "fsdp2"}
HSDP, TP = {**FSDP2, "dp_shard_size": 2}, {**FSDP2, "tp_size": 2}
ZERO = {"strategy": "deepspeed", "zero_stage": 2}
LORA = {"lora": {"rank": 2}}
BF16 = {"precision": {"mixed_precision": "bf16"}}
NARROW = {**LORA, "frozen_dtype": "bf16"}
SLOW = pytest.mark.slow
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {**LLAMA, "model_type": "qwen2"}  # its layers have biases
EVEN = {**LLAMA, "vocab_size": 320}
STEPS: Settings = {
    "task": "tests.support.tasks.unread:UnreadLM",
    "schedule": {"max_steps": 4},
    "checkpoint": {"every_steps": 2, "keep": 5},
    "optimizer": {"learning_rate": 3e-3},
}


def start(folder: Path, processes: int, parallel: Settings, base: Path, model: Settings, **sections: Any) -> Path:
    model = {"config": None, "pretrained": str(base), "pad_vocab_to_multiple_of": 8, **model}
    return train_in(folder, processes, parallel, **{**STEPS, **sections, "model": model})


def chosen(run: Path) -> str:
    """The value and the reason of how the weights were loaded."""
    said: str = summary_of(run)["choices"]["pretrained weights"]
    return said


def read_by(folder: Path) -> list[int]:
    """Bytes that each process read."""
    return [sum(map(int, path.read_text().split())) for path in sorted(folder.glob("rank-*"))]


def matrices(base: Path) -> list[torch.Size]:
    """Shapes of the weights that are left in files. Vectors are read with the model, on each process."""
    shapes = [each.shape for each in load_file(base / "model.safetensors").values()]
    return [shape for shape in shapes if len(shape) > 1]


def assert_same_runs(run: Path, other: Path) -> None:
    assert losses(run) == losses(other)
    assert len(set(losses(run).values())) == 4
    for kind in ("model", "optimizer"):
        assert_same_bits(tensors(run, 4, kind), tensors(other, 4, kind))
    records = [json.loads((each / "checkpoints/step-00000004/trainer.json").read_text()) for each in (run, other)]
    assert records[0].get("base") == records[1].get("base")
    written = [files_of_model(each) for each in (run, other)]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("processes", "parallel", "config", "model", "sections"),
    [
        (2, FSDP2, LLAMA, {}, {}),
        (1, {}, LLAMA, NARROW, BF16),
        slow(1, {}, QWEN, {**LORA, "frozen_dtype": "nf4"}, {}),
        slow(2, {}, LLAMA, {}, {}),
        slow(2, {}, TINY_MODEL, NARROW, BF16),
        slow(2, FSDP2, TINY_MODEL, NARROW, BF16),
        slow(2, FSDP2, TINY_MODEL, {"pad_vocab_to_multiple_of": 300}, {}),
        slow(2, FSDP2, LLAMA, {"freeze": ["*.layers.0.*"]}, {}),
        slow(4, HSDP, LLAMA, LORA, {}),
        slow(2, TP, EVEN, {}, {}),
        slow(4, TP, EVEN, {}, {}),
        slow(2, ZERO, LLAMA, {}, {}),
    ],
)
def test_a_start_that_reads_parts_trains_to_the_bits_of_one_that_loads_the_whole_model(
    tmp_path: Path, processes: int, parallel: Settings, config: Settings, model: Settings,
    sections: Settings,
) -> None:  # fmt: skip
    base = write_base(tmp_path, config)
    whole = start(tmp_path / "whole", processes, parallel, base, model, **sections, options={"whole": "every"})
    run = start(tmp_path / "parts", processes, parallel, base, model, **sections)
    assert chosen(run).split(" (")[0] == ("in parts" if parallel.get("strategy") == "fsdp2" else "one at a time")
    assert chosen(whole).startswith("whole")
    assert_same_runs(run, whole)


@pytest.mark.parametrize(("processes", "parallel"), [(1, {}), slow(2, {}), slow(2, FSDP2)])
def test_a_new_head_is_the_same(tmp_path: Path, processes: int, parallel: Settings) -> None:
    rows = write_texts(tmp_path / "rows.jsonl")
    torch.manual_seed(3)
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**BERT, vocab_size=300)).save_pretrained(tmp_path / "base")
    sections = {"task": "tests.support.tasks.unread:UnreadClasses", "data": {"train": str(rows), "max_length": 32}}
    sections |= {"windows": False, "tokenizer": "bytes"}
    runs = [
        start(tmp_path / name, processes, parallel, tmp_path / "base", {}, **sections, options=options)
        for name, options in (("parts", {}), ("whole", {"whole": "every"}))
    ]
    assert [chosen(run).startswith("whole") for run in runs] == [False, True]
    assert_same_runs(*runs)


@pytest.mark.parametrize("model", [{}, slow(LORA)])
def test_a_process_reads_its_rows_alone_and_the_main_process_all_frozen_weights_once_more(
    tmp_path: Path, model: Settings
) -> None:
    base = write_base(tmp_path, {**LLAMA, "vocab_size": 321})
    (reads := tmp_path / "reads").mkdir()
    start(tmp_path / "parts", 2, FSDP2, base, {**model, "pad_vocab_to_multiple_of": 0}, options={"reads": str(reads)})
    first = [4 * -(-shape[0] // 2) * shape[1:].numel() for shape in matrices(base)]
    every = sum(4 * shape.numel() for shape in matrices(base))
    assert read_by(reads) == [sum(first) + (every if model else 0), every - sum(first)]


@pytest.mark.slow
def test_a_process_that_trains_adapters_reads_each_weight_twice(tmp_path: Path) -> None:
    base = write_base(tmp_path, LLAMA)
    (reads := tmp_path / "reads").mkdir()
    start(tmp_path / "parts", 2, {}, base, LORA, options={"reads": str(reads)})
    every = sum(4 * shape.numel() for shape in matrices(base))
    assert read_by(reads) == [2 * every, every]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "parallel"), [(2, {}), (2, FSDP2)])
def test_a_resume_reads_the_base_that_its_checkpoint_leaves_out(
    tmp_path: Path, processes: int, parallel: Settings
) -> None:
    base = write_base(tmp_path, LLAMA)
    whole = start(tmp_path / "whole", processes, parallel, base, LORA, options={"whole": "every"})
    run = start(tmp_path / "run", processes, parallel, base, LORA)
    forget(run, 4)
    start(tmp_path / "run", processes, parallel, base, LORA)
    assert steps_of(run, "resume") == [2]
    assert not chosen(run).startswith("whole")
    assert_same_runs(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [FSDP2, {}])
def test_a_process_that_sees_other_files_gets_the_weights_of_the_main_process(
    tmp_path: Path, parallel: Settings
) -> None:
    base = write_base(tmp_path, LLAMA)
    (reads := tmp_path / "reads").mkdir()
    options = {"reads": str(reads), "version": 1}
    run = start(tmp_path / "parts", 2, parallel, base, {}, options=options)
    whole = start(tmp_path / "whole", 2, parallel, base, {}, options={"whole": "every"})
    assert chosen(run).split(" (")[0] == ("sent" if parallel else "one at a time")
    assert len(read_by(reads)) == (1 if parallel else 2)
    assert_same_runs(run, whole)


@pytest.mark.parametrize(
    ("processes", "parallel", "config", "options", "reason"),
    [
        (1, {}, MIXTRAL, {}, "converts weights of Mixtral"),
        slow(2, FSDP2, MIXTRAL, {}, "converts weights of Mixtral"),
        slow(2, FSDP2, LLAMA, {"whole": 1}, "the test asks for it"),
        slow(2, {}, LLAMA, {"whole": 0}, "the test asks for it"),
    ],
)
def test_the_model_is_loaded_whole_by_all_processes_if_one_has_a_reason(
    tmp_path: Path, processes: int, parallel: Settings, config: Settings, options: Settings,
    reason: str,
) -> None:  # fmt: skip
    base = write_base(tmp_path, config)
    run = start(tmp_path / "run", processes, parallel, base, {}, options=options)
    whole = start(tmp_path / "whole", processes, parallel, base, {}, options={"whole": "every"})
    assert chosen(run).startswith("whole (" + ("the main process" if parallel else "each process"))
    assert reason in chosen(run)
    assert_same_runs(run, whole)


def test_a_task_that_builds_its_own_model_loads_it_whole(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    run = start(tmp_path / "run", 1, {}, base, LORA, task="tests.support.tasks.frozen:TeacherTask")
    assert_golden(chosen(run))
