"""All commands by name, in the order of `accel-train --help`.

The module of a command imports its dependencies when the command runs. Code in this package must not import torch.
"""

from accel_train.cli.command import Command
from accel_train.cli.commands.data import DATA
from accel_train.cli.commands.finetune import FINETUNE
from accel_train.cli.commands.recipes import COMPLETION, EXPLAIN, INIT, RECIPES
from accel_train.cli.commands.rehearse import REHEARSE, VERIFY
from accel_train.cli.commands.runs import CHAT, DOCTOR, EVALUATE, EXPORT, GENERATE, PREDICT, PUSH, REPLAY, REPORT, WATCH
from accel_train.cli.commands.sweep import SWEEP
from accel_train.cli.commands.train import FIND_LR, PLAN, PREPARE, RUN

GROUPS: dict[str, dict[str, Command]] = {
    "start": {"finetune": FINETUNE, "run": RUN, "recipes": RECIPES, "init": INIT},
    "before you pay": {
        "data": DATA,
        "plan": PLAN,
        "prepare": PREPARE,
        "rehearse": REHEARSE,
        "find-lr": FIND_LR,
        "sweep": SWEEP,
    },
    "use a finished run": {
        "evaluate": EVALUATE,
        "predict": PREDICT,
        "generate": GENERATE,
        "chat": CHAT,
        "export": EXPORT,
        "push": PUSH,
    },
    "see what happened": {"report": REPORT, "watch": WATCH, "replay": REPLAY, "verify": VERIFY},
    "help": {"doctor": DOCTOR, "explain": EXPLAIN, "completion": COMPLETION},
}
"""Commands by name, as `accel-train --help` lists them."""
COMMANDS: dict[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}
