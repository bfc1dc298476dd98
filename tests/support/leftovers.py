"""What a test leaves in its process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accel_train.runtime.private import separate_accelerate_state


@contextmanager
def nothing_left() -> Iterator[None]:
    """Restore the environment and Accelerate's device, which decide how every later run of the process starts."""
    before = dict(os.environ)
    with separate_accelerate_state():
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
