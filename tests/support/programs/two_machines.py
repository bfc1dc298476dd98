"""`accel-train ARGV` in one of several processes that believe to be on machines of two processes each."""

import os

from accel_train.cli.main import program

if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": str(int(os.environ["RANK"]) % 2), "LOCAL_WORLD_SIZE": "2"}
    program()
