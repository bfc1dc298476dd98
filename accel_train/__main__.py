"""`python -m accel_train` is the same program as `accel-train`."""

import sys

from accel_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
