"""Every task trains in bf16 under every layout as under DDP, and gets the numbers of its batches as they are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.every_task import CASES, recipe_of
from tests.support.processes import run_forked
from tests.support.programs import recipes
from tests.support.runs import Settings, losses, summary_of

LAYOUTS: dict[str, tuple[int, Settings]] = {
    "one": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "hsdp": (4, {"strategy": "fsdp2", "dp_shard_size": 2}),
}
OF_NUMBERS = ("text-classification of numbers", "sentence-embedding of scores", "object-detection")
"""Cases whose batches have targets that are numbers."""
IN_BF16 = 1e-2
"""Largest relative difference of a loss that rounding to 8 bits makes in two steps (measured: 4e-3)."""
OF_LARGE_LABELS = 1e-5
"""The same where labels near 1000 make the loss. Labels in bf16 change it by 2e-3."""


class Trained(NamedTuple):
    losses: list[float]
    """Of the two steps, and of the evaluation."""
    types: set[tuple[str, str]]
    """Names and types of the tensors in batches, of all kinds of forward."""
    kinds: set[str]


def train_in(layout: str, precision: str, cases: Sequence[str], folder: Path) -> dict[str, Trained]:
    """Train the cases one after the other in the processes of one layout."""
    size, parallel = LAYOUTS[layout]
    sections: Settings = {
        "parallel": parallel,
        "precision": {"mixed_precision": precision},
        "batch": {"global_batch_size": 8, "per_device_batch_size": 2},
        "schedule": {"max_steps": 2, "warmup_steps": 0},
    }
    made = {case: recipe_of(case, folder / case.replace(" ", "-"), **sections) for case in cases}
    (folder / "recipes.json").write_text(json.dumps(list(made.values())))
    words = [str(folder / "recipes.json"), str(folder / "seen-{rank}.json")]
    forked = run_forked(words, size, folder=folder / "processes", program=Path(recipes.__file__))
    assert forked.wait(stop_at_failure=True) == [0] * size, "\n".join(map(forked.stderr, range(size)))
    seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(size)]
    found = {}
    for case, recipe in made.items():
        run = Path(recipe["output_dir"])
        batches = [of_kind for of_rank in seen for of_kind in of_rank[str(run)].items()]
        types = {entry for _, entries in batches for entry in entries.items()}
        evaluated = summary_of(run)["eval"]
        found[case] = Trained([*losses(run).values(), evaluated["loss"]], types, {kind for kind, _ in batches})
    return found


def test_labels_scores_and_boxes_reach_the_loss_and_the_scores_in_fp32_under_fsdp2(tmp_path: Path) -> None:
    for case, (_, types, kinds) in train_in("fsdp2", "bf16", OF_NUMBERS, tmp_path).items():
        assert {dtype for _, dtype in types if "float" in dtype} == {"torch.float32"}, (case, types)
        assert "counts" in kinds
        assert kinds & {"loss", "part"}


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return train_in("one", "no", list(CASES), tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="module")
def under_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return train_in("ddp", "bf16", list(CASES), tmp_path_factory.mktemp("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
def test_every_task_trains_in_bf16_as_under_ddp_and_as_in_fp32(
    tmp_path: Path, in_fp32: dict[str, Trained], under_ddp: dict[str, Trained], layout: str
) -> None:
    found = under_ddp if layout == "ddp" else train_in(layout, "bf16", list(CASES), tmp_path)
    for case, (values, types, _) in found.items():
        tolerance = OF_LARGE_LABELS if "numbers" in case else IN_BF16
        for expected in (in_fp32, under_ddp):
            assert values == pytest.approx(expected[case].losses, rel=tolerance), case
            assert types == expected[case].types, case
        # Rounding shows somewhere, so this run did compute in bf16.
        assert values != in_fp32[case].losses, case
