"""The commands that start from a recipe: `run`, `plan`, `prepare`, and `find-lr`."""

import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from accel_train.cli import results
from accel_train.cli.command import (
    RECIPE,
    VERBOSE,
    Arguments,
    Command,
    Outcome,
    Settings,
    finite_number,
    flag,
    importing,
    out_of,
    recipe_of,
    result_of,
    say,
    show,
    users_mistakes,
    value,
    whole_number,
)
from accel_train.cli.early import check_before_torch
from accel_train.core.errors import Preempted, TrainingStopped
from accel_train.core.hardware import known_gpu
from accel_train.core.redaction import redact_text
from accel_train.core.terminal import is_main, use_colour
from accel_train.runtime.driver import installed_torch, unused_driver
from accel_train.runtime.exit import end_process_group
from accel_train.runtime.signals import StopRequest

if TYPE_CHECKING:
    from accel_train.plan.plan import Plan


def _run(arguments: Arguments, settings: Settings) -> Outcome:
    accept = ("--checkpoint.accept_changes", "true") if arguments.accept_changes else ()
    return Outcome(run_recipe(arguments.recipe, [*settings, *accept], verbose=arguments.verbose))


def run_recipe(path: str, settings: Settings, *, verbose: bool, is_named: bool = False) -> results.RunResult:
    """Train the recipe in a file, or resume it; return the result. The process ends after it.

    `is_named` says that the user has just read the name of the file.
    """
    # OpenMP reads this when torch is imported. On a busy CPU, OpenMP threads with a long spin made steps ten times
    # slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # It stays open to the end of the process, because the process ends with a specific exit code. `main` closes it.
    stop = StopRequest().__enter__()
    with users_mistakes(), stop.preparing():
        from accel_train.checkpoint.run_recipe import named_recipe

        recipe = named_recipe(path, settings)
        # This is known before torch is imported. Whether a GPU build finds the GPUs is only known after it.
        if (build := installed_torch()) is not None and build.is_for_cpu and (problem := unused_driver(os.environ)):
            raise ValueError(problem)
        check_before_torch(recipe)
        if is_main() and not is_named:
            print(redact_text(f"{path}: to be trained in {recipe.output_dir}"), flush=True)
        with importing("" if is_named else path, recipe.task):
            from accel_train.engine.run import Extensions
            from accel_train.training.setup import prepare_run
        run = prepare_run(recipe, extensions=Extensions(owns_process=True, verbose=verbose), stop=stop)
    from accel_train.training.train import train_run

    try:
        trained = train_run(run)
    finally:
        # Destroy the group only if all processes get here. After a fault of one process, this would wait for the
        # others.
        if sys.exc_info()[0] in (None, TrainingStopped, Preempted):
            end_process_group()
    return {"output_dir": str(trained.output_dir), "summary": trained.summary}


@users_mistakes()
def _plan(arguments: Arguments, settings: Settings) -> Outcome:
    world_size, no_data = arguments.world_size, arguments.no_data
    if arguments.gpu is not None:
        known_gpu(arguments.gpu)
    recipe = recipe_of(arguments, settings)
    with importing(arguments.recipe, recipe.task):
        from accel_train.plan.format import format_plan
        from accel_train.plan.place import Hardware
        from accel_train.plan.plan import resolve_plan
    if not no_data:
        say("reading the data (text is tokenized once and cached for runs; --no-data skips this) ...")
    hardware = Hardware(arguments.gpus_per_node, arguments.interconnect, arguments.mfu, arguments.mtbf)
    plan = resolve_plan(recipe, world_size, arguments.gpu, hardware, progress=sys.stderr.isatty(), no_data=no_data)
    show(format_plan(plan, colour=use_colour(sys.stdout), show_all=arguments.all))
    return Outcome(_planned(plan))


def _planned(plan: "Plan") -> results.PlanResult:
    """Return the numbers of a plan."""
    from accel_train.core.json_io import dotted_items
    from accel_train.core.redaction import redact

    known, sizes, step = plan.has_length, plan.sizes, plan.scale.step
    return result_of(
        results.PlanResult,
        plan,
        output_dir=plan.recipe.output_dir,
        processes=plan.world_size,
        precision=plan.precision.value,
        parameters=plan.num_parameters,
        trainable_parameters=plan.num_trainable,
        global_batch_size=sizes.global_batch_size,
        per_device_batch_size=sizes.per_device_batch_size,
        gradient_accumulation_steps=sizes.gradient_accumulation_steps,
        steps=plan.steps.max_steps if known else None,
        epochs=plan.steps.num_epochs if known and plan.reads_data else None,
        learning_rate=plan.learning_rate.value,
        training_samples=plan.num_samples if plan.reads_data else None,
        targets=plan.num_targets if known else None,
        memory=[result_of(results.MemoryOfPlan, part, bytes=part.num_bytes) for part in plan.memory],
        step_seconds=None if step is None else step.seconds,
        choices={name: str(choice) for name, choice in plan.model_choices.items()},
        settings=dict(dotted_items(redact(plan.recipe.model_dump(mode="json")))),
    )


@users_mistakes()
def _prepare(arguments: Arguments, settings: Settings) -> Outcome:
    since = time.monotonic()
    recipe = recipe_of(arguments, settings)
    with importing(arguments.recipe, recipe.task):
        from accel_train.plan.prepare import format_parts, prepare
    parts, seconds = prepare(recipe, progress=sys.stderr.isatty()), time.monotonic() - since
    print(redact_text(format_parts(parts, seconds)))
    prepared = [
        result_of(results.PreparedPart, part, path=part.path and str(part.path), bytes=part.num_bytes) for part in parts
    ]
    return Outcome(results.PrepareResult(parts=prepared, seconds=seconds))


def _find_lr(arguments: Arguments, settings: Settings) -> Outcome:
    with users_mistakes():
        recipe = recipe_of(arguments, settings)
        with importing(arguments.recipe, recipe.task):
            from accel_train.experiments import find_lr
        rates = find_lr.rates_of_test(arguments.min, arguments.max, arguments.steps)
        out = out_of(arguments) or Path(recipe.output_dir)
        find_lr.check_place(out)
    with TemporaryDirectory(prefix="accel-train-find-lr-") as folder:
        # These are the messages of the run. The answer is the table.
        with users_mistakes(), redirect_stdout(sys.stderr):
            run, recorder = find_lr.prepare_test(recipe, rates, Path(folder))
        test = find_lr.run_test(run, recorder, rates)
    result = None
    if run.accelerator.is_main_process:
        print(find_lr.format_test(test))
        files = find_lr.write_test(test, out)
        print(*files, sep="\n", file=sys.stderr)
        result = {**find_lr.record_of(test), "files": files}
    end_process_group()
    return Outcome(result)


RUN = Command(
    _run,
    results.RunResult,
    "train a recipe; run the same command again to resume",
    {
        "recipe": RECIPE,
        "--accept-changes": flag("resume even if the recipe has changed since the checkpoint"),
        "--verbose": VERBOSE,
    },
    processes="all",
    resumes=True,
)

PLAN = Command(
    _plan,
    results.PlanResult,
    "compute steps, memory, time, and settings of a run before it costs anything",
    {
        "recipe": RECIPE,
        "--world-size": value("N", "processes (GPUs) to plan for; default: the GPUs of this machine", whole_number(1)),
        "--gpu": value("NAME", "GPU to plan for: H200, A100, ...; default: the GPU of this machine"),
        "--gpus-per-node": value("N", "GPUs of each machine; default: 8, or all if there are fewer", whole_number(1)),
        "--interconnect": value(
            "NAME", "network between machines: infiniband-ndr, roce-200, ethernet-100, ...; default: assumed"
        ),
        "--mfu": value(
            "X",
            "share of peak FLOPS that the model reaches; default: 0.4 if it is compiled, otherwise 0.3",
            finite_number(most=1),
        ),
        "--mtbf": value(
            "HOURS", "mean hours between two failures of the run; default: a published rate", finite_number()
        ),
        "--all": flag("show every setting with who set it, and how each number was found"),
        "--no-data": flag("read no data: plan from sequence length and vocabulary alone"),
    },
)

PREPARE = Command(
    _prepare,
    results.PrepareResult,
    "download and tokenize what a run reads, on a machine without GPUs",
    {"recipe": RECIPE},
    processes="one",
)

FIND_LR = Command(
    _find_lr,
    results.FindLrResult,
    "find a learning rate: raise it while training until the loss stops falling",
    {
        "recipe": RECIPE,
        "--min": value("LR", "first learning rate", finite_number(), "1e-6"),
        "--max": value("LR", "last learning rate", finite_number(), "1"),
        "--steps": value("N", "steps to train, at least 20", whole_number(20), "100"),
        "--out": value("FOLDER", "folder for find-lr.json and find-lr.png; default: the recipe's output_dir"),
    },
    processes="all",
)
