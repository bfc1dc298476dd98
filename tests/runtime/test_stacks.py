"""Where threads are, read from another thread."""

import gc
import sys
from typing import Any

import pytest

from accel_train.runtime.stacks import place_of_main_thread


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(monkeypatch: Any, is_enabled: bool) -> None:
    seen, read = [], sys._current_frames

    def noted() -> Any:
        seen.append(gc.isenabled())
        return read()

    monkeypatch.setattr(sys, "_current_frames", noted)
    (gc.enable if is_enabled else gc.disable)()
    try:
        place, waits = place_of_main_thread()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    assert seen == [False]
    assert (place.partition(":")[0], waits) == ("runtime/test_stacks.py", False)
