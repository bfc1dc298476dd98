"""The command `sweep`: train a recipe with several values of some settings."""

import sys

from accel_train.cli import results
from accel_train.cli.command import (
    Arguments,
    Command,
    Outcome,
    Settings,
    importing,
    say,
    users_mistakes,
    value,
    whole_number,
)


def _sweep(arguments: Arguments, settings: Settings) -> Outcome:
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
    result = results.SweepResult(
        output_dir=str(swept.root),
        runs=record["runs"],
        combinations=record["combinations"],
        report=None if swept.report is None else str(swept.report),
    )
    return Outcome(result, swept.exit_code)


SWEEP = Command(
    _sweep,
    results.SweepResult,
    "train every combination of setting values and compare the runs; run it again to resume",
    {
        "recipe": value(
            "RECIPE",
            "recipe file, or a name from `accel-train recipes`; give settings several values, --seed 0,1,2, or "
            "a range, --optimizer.learning_rate 1e-5..1e-3; commas within [ ], { }, and quotation marks do not split",
        ),
        "--random": value(
            "N", "train N combinations drawn from the lists and ranges, each with every seed", whole_number(1)
        ),
        "--optuna": value(
            "N",
            "train N combinations chosen by Optuna's TPE from the results so far, each with every seed",
            whole_number(1),
        ),
        "--draw-seed": value("S", "seed of --random and --optuna", whole_number(0, 2**64 - 1), "0"),
        "--processes": value("N", "processes of each run; default: one per GPU", whole_number(1)),
    },
    processes="one",
    resumes=True,
)
