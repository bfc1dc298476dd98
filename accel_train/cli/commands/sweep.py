"""The command `sweep`: train a recipe with several values of some settings."""

import argparse
import sys
from collections.abc import Sequence

from accel_train.cli.command import Command, Outcome, importing, say, users_mistakes, whole_number
from accel_train.cli.results import training as results


def _sweep(arguments: argparse.Namespace, settings: Sequence[str]) -> Outcome:
    with users_mistakes():
        from accel_train.experiments.sweep.values import read_space

        read_space(settings)
        with importing(arguments.recipe):
            from accel_train.experiments.sweep.sweep import SWEEP_FILE, Selection, sweep

        swept = sweep(
            arguments.recipe,
            settings,
            Selection(arguments.random, arguments.optuna, arguments.draw_seed),
            processes=arguments.processes,
            say=say,
        )
    print(swept.table)
    if swept.report is not None:
        print(swept.report, file=sys.stderr)
    from accel_train.observe.run_folder import read_record

    record = read_record(swept.root / SWEEP_FILE)
    result: results.SweepResult = {
        "output_dir": str(swept.root),
        "runs": record["runs"],
        "combinations": record["combinations"],
        "report": None if swept.report is None else str(swept.report),
    }
    return Outcome(result, swept.exit_code)


SWEEP = Command(
    _sweep,
    "train every combination of setting values and compare the runs; run it again to resume",
    {
        "recipe": {
            "metavar": "RECIPE",
            "help": "recipe file, or a name from `accel-train recipes`; give settings several values, --seed 0,1,2, or "
            "a range, --optimizer.learning_rate 1e-5..1e-3; commas within [ ], { }, and quotation marks do not split",
        },
        "--random": {
            "metavar": "N",
            "type": whole_number(1),
            "help": "train N combinations drawn from the lists and ranges, each with every seed",
        },
        "--optuna": {
            "metavar": "N",
            "type": whole_number(1),
            "help": "train N combinations chosen by Optuna's TPE from the results so far, each with every seed",
        },
        "--draw-seed": {
            "metavar": "S",
            "type": whole_number(0, 2**64 - 1),
            "default": 0,
            "help": "seed of --random and --optuna; default: 0",
        },
        "--processes": {"metavar": "N", "type": whole_number(1), "help": "processes of each run; default: one per GPU"},
    },
    processes="one",
)
