"""`collective.py RANK STORE SECONDS`: a collective that the other one of two processes never comes to.

Prints how many seconds it took to fail, and whether the error is taken for that of a peer.
"""

import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from accel_train.runtime.heartbeat import is_peer_error
from accel_train.runtime.process_group import COLLECTIVE_TIMEOUT_SECONDS, limit_collectives


def main() -> None:
    rank, store, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    numbers = torch.ones(3)
    dist.all_reduce(numbers)
    limit_collectives(seconds)
    dist.all_reduce(numbers)  # with the new limit, and everybody here
    if rank == 1:
        signal.pause()  # until it is killed
    begin = time.monotonic()
    try:
        dist.all_reduce(numbers)
    except RuntimeError as error:
        print(time.monotonic() - begin, is_peer_error(error), numbers.numel())


if __name__ == "__main__":
    main()
