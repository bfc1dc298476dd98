"""A script whose last act is a collective: its interpreter ends while a thread of gloo still lets go of the tensor."""

import sys

import torch
import torch.distributed as dist

from accel_train.runtime.process_group import start_processes

if __name__ == "__main__":
    start_processes()
    dist.all_reduce(torch.ones(1))
    # So many seconds nobody else gets the interpreter's lock, unless this thread waits for something.
    sys.setswitchinterval(1000)
    dist.all_reduce(torch.ones(1))
