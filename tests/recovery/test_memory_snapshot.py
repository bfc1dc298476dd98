"""What is written of a GPU's memory when it has run out."""

from accel_train.recovery.memory_snapshot import block_table

MIB = 2**20


def block(size: int, state: str = "active_allocated") -> dict[str, object]:
    return {"size": size, "requested_size": size, "address": 0, "state": state}


def test_the_blocks_that_take_most_memory_together_come_first_and_free_ones_do_not_count() -> None:
    segments = [
        {"total_size": 20 * MIB, "blocks": [block(6 * MIB), block(4 * MIB, "inactive"), block(4 * MIB)]},
        {"total_size": 12 * MIB, "blocks": [block(4 * MIB), block(2 * MIB), block(6 * MIB, "active_pending_free")]},
    ]
    heading, _, _, *rows = block_table(segments).splitlines()
    assert heading == "16.0 MiB allocated of 32.0 MiB reserved, the largest first:"
    assert [row.split() for row in rows] == [
        ["4.0", "MiB", "2", "8.0", "MiB", "50.0%"],
        ["6.0", "MiB", "1", "6.0", "MiB", "37.5%"],
        ["2.0", "MiB", "1", "2.0", "MiB", "12.5%"],
    ]


def test_no_block_at_all_is_a_table_without_rows() -> None:
    assert block_table([]).splitlines()[0] == "0.0 MiB allocated of 0.0 MiB reserved, the largest first:"
