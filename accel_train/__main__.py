"""Entry point of `python -m accel_train`, the same program as `accel-train`."""

from accel_train.cli.main import program

if __name__ == "__main__":
    program()
