"""All commands by name, in the order of `accel-train --help`.

A command's module imports what it needs when it runs. Nothing here imports torch."""

from accel_train.cli.command import Command
from accel_train.cli.commands.finetune import FINETUNE
from accel_train.cli.commands.recipes import COMPLETION, EXPLAIN, INIT, RECIPES
from accel_train.cli.commands.rehearse import REHEARSE, VERIFY
from accel_train.cli.commands.runs import DOCTOR, EVALUATE, EXPORT, GENERATE, PREDICT, REPLAY, REPORT, WATCH
from accel_train.cli.commands.sweep import SWEEP
from accel_train.cli.commands.train import FIND_LR, PLAN, RUN

COMMANDS: dict[str, Command] = {
    "run": RUN,
    "finetune": FINETUNE,
    "plan": PLAN,
    "evaluate": EVALUATE,
    "predict": PREDICT,
    "export": EXPORT,
    "find-lr": FIND_LR,
    "rehearse": REHEARSE,
    "sweep": SWEEP,
    "generate": GENERATE,
    "report": REPORT,
    "watch": WATCH,
    "replay": REPLAY,
    "verify": VERIFY,
    "doctor": DOCTOR,
    "recipes": RECIPES,
    "init": INIT,
    "explain": EXPLAIN,
    "completion": COMPLETION,
}
