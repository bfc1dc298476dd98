"""All commands by name, in the order of `accel-train --help`.

The module of a command imports its dependencies when the command runs. Code in this package must not import torch.
"""

from accel_train.cli.command import Command
from accel_train.cli.commands.finetune import FINETUNE
from accel_train.cli.commands.recipes import COMPLETION, EXPLAIN, INIT, RECIPES
from accel_train.cli.commands.rehearse import REHEARSE, VERIFY
from accel_train.cli.commands.runs import CHAT, DOCTOR, EVALUATE, EXPORT, GENERATE, PREDICT, REPLAY, REPORT, WATCH
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
    "chat": CHAT,
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
