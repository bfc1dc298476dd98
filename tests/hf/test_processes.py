"""The Trainer face on two processes: the same run as on one, and every sample evaluated once, in order."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import flat
from tests.support.runs import TESTS, run_forked_command


def result(folder: Path, processes: int) -> dict[str, Any]:
    folder.mkdir()
    done = run_forked_command([str(folder)], processes, TESTS / "support/programs/hf.py")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    one, two = result(tmp_path / "one", 1), result(tmp_path / "two", 2)
    assert [sorted(line) for line in two["log"]] == [sorted(line) for line in one["log"]]
    for name in one:
        assert flat(two[name]) == pytest.approx(flat(one[name]), abs=2e-5, rel=1e-4), name
    assert one["own"]["eval_count"] == 13
    assert one["prepared"][0] == 6
    assert one["stopped_at"] == 2
    assert one["batches"] == [3, 3, 3, 3, 1]
    assert (one["rows_by_flos"], one["rows_by_tokens"]) == (33, 33)
    assert one["loaders"] == [9, 1]
    assert one["syncs"] == [False, True] * 2
    assert two["same_bits"] == two["without_targets"] == [True, True]
    assert one["grown"][:2] == [4, 4]
