"""The commands `rehearse` and `verify`: check whether a run resumes, and with the same result."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.cli import results
from accel_train.cli.command import (
    RECIPE,
    Arguments,
    Command,
    Outcome,
    Settings,
    flag,
    importing,
    importing_for,
    recipe_of,
    result_of,
    say,
    show,
    users_mistakes,
    value,
    whole_number,
)
from accel_train.core.errors import CheckpointError
from accel_train.core.terminal import busy, use_colour

if TYPE_CHECKING:
    from accel_train.experiments.rehearse import Rehearsal


def _rehearse(arguments: Arguments, settings: Settings) -> Outcome:
    with users_mistakes():
        recipe = recipe_of(arguments, settings)
        with importing(arguments.recipe, recipe.task):
            from accel_train.experiments.rehearse import rehearse_recipe

    result = _rehearsed(partial(rehearse_recipe, arguments.recipe), arguments, settings, with_plan=True)
    is_different = result["equality"] is not None and result["equality"]["first"] is not None
    return Outcome(result, 0 if result["same"] and not is_different else 4)


def _verify(arguments: Arguments, settings: Settings) -> Outcome:
    with users_mistakes():
        from accel_train.checkpoint.verify import format_verified, model_problem, verify
        from accel_train.checkpoint.weight_files import has_digests

        if settings and not arguments.resume_proof:
            raise ValueError(
                f"{settings[0]} has no effect without --resume-proof. Add --resume-proof, or leave it out."
            )
        with busy(f"{arguments.run}: reading every checkpoint"):
            verified = verify(Path(arguments.run), accepts_weights=arguments.accept_weights)
    print(format_verified(verified))
    result: results.VerifyResult = {
        "run": arguments.run,
        "newest": None if verified.newest is None else str(verified.newest),
        "checkpoints": [
            result_of(
                results.CheckpointOfRun,
                each,
                path=str(each.path),
                changed=list(verified.changed.get(each.path, ())),
                healthy=each.step in verified.healthy,
                abandoned=each.path in verified.abandoned,
            )
            for each in verified.statuses
        ],
        "models": [
            {"path": str(folder), "has_digests": has_digests(folder), "changed": dict(problems)}
            for folder, problems in verified.models.items()
        ],
        "resume_proof": None,
    }
    if (problem := model_problem(verified)) is not None:
        return Outcome(result, error=CheckpointError(problem))
    if verified.newest is None and Path(arguments.run) not in verified.models:
        error = f"{arguments.run} has no valid checkpoint; --checkpoint.resume never starts a new run"
        return Outcome(result, error=CheckpointError(error))
    if not arguments.resume_proof:
        return Outcome(result)
    with users_mistakes(), importing_for(Path(arguments.run), settings):
        from accel_train.experiments.rehearse import prove_resume

    proof = _rehearsed(partial(prove_resume, Path(arguments.run)), arguments, settings, with_plan=False)
    return Outcome({**result, "resume_proof": proof}, 0 if proof["same"] else 4)


def _rehearsed(
    rehearse: "Callable[..., Rehearsal]", arguments: Arguments, settings: Settings, *, with_plan: bool
) -> results.RehearseResult:
    from accel_train.experiments.rehearse import format_rehearsal

    with users_mistakes():
        rehearsal = rehearse(settings, processes=arguments.processes, steps=arguments.steps, say=say)
    show(format_rehearsal(rehearsal, colour=use_colour(sys.stdout), with_plan=with_plan, show_all=arguments.all))
    equality = rehearsal.equality
    return result_of(
        results.RehearseResult,
        rehearsal,
        processes=rehearsal.plan.world_size,
        compared=[result_of(results.ComparisonOfRuns, each) for each in rehearsal.compared],
        equality=None if equality is None else result_of(results.EqualityResult, equality),
    )


REHEARSE = Command(
    _rehearse,
    results.RehearseResult,
    "test your real recipe in minutes: train, evaluate, save, kill, resume, and compare, also with one process",
    {
        "recipe": RECIPE,
        "--processes": value("N", "processes to train with; default: one per GPU", whole_number(1)),
        "--steps": value("K", "steps to train, at least 4", whole_number(4), "8"),
        "--all": flag("show each step of the rehearsal, every comparison, and the plan"),
    },
)

VERIFY = Command(
    _verify,
    results.VerifyResult,
    "check the digests of every checkpoint and of model/, and name the checkpoint that a resume would use",
    {
        "run": value("RUN", "output_dir of a run"),
        "--accept-weights": flag("accept the files of the written model as they are: you changed them on purpose"),
        "--resume-proof": flag(
            "also resume from copies of the newest checkpoint, once with a kill and once without, and compare"
        ),
        "--processes": value("N", "processes for --resume-proof; default: as in the run", whole_number(1)),
        "--steps": value("K", "steps to train for --resume-proof", whole_number(4), "8"),
        "--all": flag("show each step and every comparison of --resume-proof"),
    },
)
