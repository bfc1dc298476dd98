"""Checkpoints that all processes write together."""

import json
from pathlib import Path

from tests.support.processes import run_forked
from tests.support.programs import sharded_saves


def test_plans_are_exchanged_and_memory_is_taken_once_for_each_layout_and_every_save_reads_back(tmp_path: Path) -> None:
    forked = run_forked(
        [str(tmp_path / "checkpoints")], 2, folder=tmp_path / "processes", program=Path(sharded_saves.__file__)
    )
    assert forked.wait() == [0, 0], forked.stderr(0)
    main, other = (json.loads((tmp_path / f"processes/rank-{rank}.out").read_text()) for rank in range(2))
    # Each part and the table are copied once, the step counters together, and the number.
    copies = [[5, 5], [5, 0], [6, 1], [6, 0]]
    assert main == [2, [], copies]
    assert other == [0, [], copies]
