"""Checkpoints that all processes write together."""

import json
from pathlib import Path

from accel_train.checkpoint.shard_index import Part, ShardIndex
from accel_train.core.errors import CheckpointError
from tests.support.processes import run_forked
from tests.support.programs import many_shards, sharded_saves
from tests.support.wording import raises_golden


def test_plans_are_exchanged_and_memory_is_taken_once_for_each_layout_and_every_save_reads_back(tmp_path: Path) -> None:
    forked = run_forked(
        [str(tmp_path / "checkpoints")], 2, folder=tmp_path / "processes", program=Path(sharded_saves.__file__)
    )
    forked.expect(0)
    main, other = (json.loads((tmp_path / f"processes/rank-{rank}.out").read_text()) for rank in range(2))
    # Each part and the table are copied once, the step counters together, and the number.
    copies = [[5, 5], [5, 0], [6, 1], [6, 0]]
    assert main == [2, [], copies]
    assert other == [0, [], copies]


def test_a_process_opens_the_shards_that_hold_its_parts_however_many_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    forked = run_forked([str(folder)], 1, folder=tmp_path / "process", program=Path(many_shards.__file__))
    forked.expect(0)
    indexed, headers = json.loads((tmp_path / "process/rank-0.out").read_text().splitlines()[-1])
    num_shards, num_others, num_bytes, is_right, index_bytes = indexed
    # One for each of four reads; what all processes hold alike is opened for each kind.
    assert (num_shards, num_others, is_right) == (4, 3, True)
    assert num_bytes < 5_000
    assert index_bytes < 100 * many_shards.WORLD
    # A checkpoint without an index is looked through once.
    assert headers[:2] + headers[3:] == [many_shards.WORLD + 4, 3, True]


def test_an_index_reads_back_and_finds_each_part_of_a_region() -> None:
    parts = [Part(f"shard-{n}", name, "F32", (3 * n, 0), (3 if n < 2 else 1, 2)) for name in "ab" for n in range(3)]
    index = ShardIndex.of([*parts, Part("shard-1", "number", "I64", (), ())])
    assert index.shape("a") == (7, 2)
    assert len(json.loads(index.text())["divisions"]) == 2
    region = (slice(2, 7), slice(1, 2))
    assert list(index.find("b", region)) == [
        ("shard-0", (slice(2, 3), slice(1, 2)), (slice(0, 1), slice(0, 1))),
        ("shard-1", (slice(0, 3), slice(1, 2)), (slice(1, 4), slice(0, 1))),
        ("shard-2", (slice(0, 1), slice(1, 2)), (slice(4, 5), slice(0, 1))),
    ]
    assert list(index.find("number", ())) == [("shard-1", (), ())]
    with raises_golden(CheckpointError):
        list(ShardIndex.of(parts[:-2]).find("b", region))
