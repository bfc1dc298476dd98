"""A step runs a known number of operators outside of compiled code, and benchmarks/README.md shows them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_loops import MODELS, model_config
from benchmarks.nanogpt_style import GPT
from tests.cuda_pretended.test_cuda_pretended import ROOT, Driver, recipe_of
from tests.docs.test_benchmarks import parse_table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cuda")]
MODEL = MODELS["124M"]
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1 micro-batch": ("1 ddp bf16", 1, {"loss": {"chunked": True}}),
    "2 micro-batches": ("1 ddp bf16", 2, {"loss": {"chunked": True}}),
    "whole logits": ("1 ddp bf16", 1, {"loss": {"chunked": False}}),
    "8 processes": ("8 ddp bf16", 1, {"loss": {"chunked": True}}),
}
NANOGPT = "nanoGPT's loop"


def recipe_for(case: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """GPT-2 124M, compiled block by block, with as many samples on each process as in benchmarks/gpu.py."""
    layout, micro_batches, sections = CASES[case]
    size, recipe = recipe_of(layout, folder, output_dir=str(folder / case.replace(" ", "-")))
    recipe["precision"]["compile"], recipe["data"]["sequence_length"] = True, MODEL.shape.block_size
    samples = MODEL.batch_size
    batch = {"global_batch_size": size * samples, "per_device_batch_size": samples // micro_batches}
    return size, {**recipe, "model": {"config": model_config(MODEL)}, "batch": batch, **sections}


def expected(case: str, reductions: float, weights: int) -> dict[str, int]:
    """Operators of one step by the part that runs them, as the code says."""
    layout, m, sections = CASES[case]
    is_chunked, is_alone = sections["loss"]["chunked"], layout.startswith("1 ")
    # Forward: position numbers (2), two embeddings and their sum, the last norm. Backward: the norm, the sum over
    # samples of the positions' gradients, two embeddings, the sum of the gradients of the tied weights.
    model = 6 + 5
    # The only chunk: logits, gradients of hidden states and of weights, the sum of losses, added to the total. Once:
    # two zeros, weights in bf16, the mask, hidden states in bf16 and masked, the mask of their gradient, the scale and
    # two products with it.
    loss = 5 + 10
    if not is_chunked:
        # Products of the head (3), casts of their inputs and gradients (4); log-softmax, loss, a cast; backward.
        model, loss = model + 3 + 4, 2 * 3
    # Loss: its weight (2) and whether it is finite, summed over micro-batches. Numbers: packed, copied to the host.
    step = 3 * m + (m - 1) + (2 if m > 1 else 0) + 2
    gradients = weights * (m - 1)
    if not is_alone:
        # The collective: sent numbers (a copy, and the last step's twice), all-reduce, weight of a target (6), outcome.
        step += 12
        # Each bucket: one copy, sum, division, all-reduce. Then the fault, and the sum of sums.
        gradients += 4 * int(reductions) + 3
    # The norm (3); NaN without targets (2) and for a fault; the decision (3) and the clip factor (3).
    clip = 3 + 2 + 1 + 3 + 3
    # Two groups: count the step, update, and take the count back if the step is skipped.
    counted = {"batch": 2 * m, "model": model * m, "loss": loss * m, "step": step, "gradients": gradients, "clip": clip}
    return {**counted, "optimizer": 2 * 3}


def test_a_step_runs_the_operators_outside_of_compiled_code_that_the_page_shows(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    (tmp_path / "cases.json").write_text(json.dumps({**{n: recipe_for(n, tmp_path) for n in CASES}, NANOGPT: None}))
    lines = driver.output_of("operators.py", str(tmp_path / "cases.json")).splitlines()
    records = [json.loads(line) for line in lines if line.startswith('{"case"')]
    found = {record["case"]: record for record in records}
    weights = len(list(GPT(MODEL.shape).parameters()))
    counted = {}
    for case, record in found.items():
        counted[case] = {part: sum(names.values()) for part, names in record["outside"].items()}
        if case in CASES:
            parts = expected(case, record["reductions"], weights)
            assert counted[case] == {part: number for part, number in parts.items() if number}, (case, record)
    page = (
        (ROOT / "benchmarks" / "README.md").read_text().partition("## What a step launches\n")[2].partition("\n## ")[0]
    )
    rows = {row.pop("part"): {case: int(cell) for case, cell in row.items()} for row in parse_table(page)}
    totals = rows.pop("all")
    assert totals == {case: sum(parts.values()) for case, parts in counted.items()}
    for part, row in rows.items():
        assert row == {case: parts.get(part.partition(":")[0], 0) for case, parts in counted.items()}, part
