"""Processes that read a cache while another one removes what is in it."""

from collections.abc import Sequence
from typing import Any


def read_while_removed(readers: Sequence[Any], remover: Any) -> None:
    """Start processes, wait for the readers, which must end well, and kill the one that removes."""
    for process in (*readers, remover):
        process.start()
    for process in readers:
        process.join()
    remover.kill()
    remover.join()
    assert [process.exitcode for process in readers] == [0] * len(readers)
