"""`rehearse` and `verify`: will a run resume, and with the same result?"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.cli.command import RECIPE, Command, use_colour, users_mistakes
from accel_train.core.errors import CheckpointError

if TYPE_CHECKING:
    from accel_train.experiments.rehearse_report import Rehearsal

PROCESSES = {"metavar": "N", "type": int, "help": "default: the GPUs here; for --resume-proof, as many as it had"}
STEPS = {"metavar": "K", "type": int, "default": 8, "help": "of the rehearsal; default: 8"}


def _rehearse(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    from accel_train.experiments.rehearse import rehearse_recipe

    return _exit_code_of(partial(rehearse_recipe, arguments.recipe), arguments, settings, with_plan=True)


def _verify(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    with users_mistakes():
        from accel_train.checkpoint.verify import format_verified, verify

        if settings and not arguments.resume_proof:
            raise ValueError(f"{settings[0]} changes nothing of what is verified; it is for --resume-proof")
        verified = verify(Path(arguments.run))
    print(format_verified(verified))
    if verified.newest is None:
        raise CheckpointError(f"{arguments.run} has no valid checkpoint; --checkpoint.resume never starts anew")
    if not arguments.resume_proof:
        return 0
    from accel_train.experiments.rehearse import prove_resume

    return _exit_code_of(partial(prove_resume, Path(arguments.run)), arguments, settings, with_plan=False)


def _exit_code_of(
    rehearse: "Callable[..., Rehearsal]", arguments: argparse.Namespace, settings: Sequence[str], *, with_plan: bool
) -> int:
    from accel_train.experiments.rehearse_report import format_rehearsal

    say = partial(print, file=sys.stderr, flush=True)
    with users_mistakes():
        rehearsal = rehearse(settings, processes=arguments.processes, steps=arguments.steps, say=say)
    print(format_rehearsal(rehearsal, colour=use_colour(), with_plan=with_plan))
    return 0 if rehearsal.same else 4


REHEARSE = Command(_rehearse, "step, evaluate, save, kill, run again: minutes on the real recipe, and whether the result is the same", {
    "recipe": RECIPE,
    "--processes": PROCESSES,
    "--steps": STEPS,
})  # fmt: skip

VERIFY = Command(_verify, "check every checkpoint's digests, and say which one a resume would use", {
    "run": {"metavar": "RUN", "help": "the output_dir of a run"},
    "--resume-proof": {"action": "store_true", "help": "also resume it from copies of its newest checkpoint, once killed and once not, and compare"},
    "--processes": PROCESSES,
    "--steps": STEPS,
})  # fmt: skip
