"""The probe task on a machine that emulates float8: the numbers of the float8 units, computed without them."""

from functools import partial

from accel_train.model.kernels.float8 import convert_to_float8
from accel_train.parallel import precision
from accel_train.training import build
from tests.support.tasks.probe import ProbeTask


class EmulatedFloat8(ProbeTask):
    def __init__(self) -> None:
        precision.has_float8 = lambda device: True
        build.convert_to_float8 = partial(convert_to_float8, emulate=True)
