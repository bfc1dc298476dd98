"""`log.profile_steps`: which steps are profiled, what is written, and what is left alone."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from accel_train import Recipe, train
from accel_train.plan.plan import resolve_plan
from accel_train.training.loop import run_steps
from accel_train.training.output import NUM_OPERATIONS, StepProfiler
from accel_train.training.setup import prepare_run
from tests.support.comparisons import assert_same_bits
from tests.support.runs import (
    checkpoint,
    events,
    forget,
    run,
    steps_of,
    tiny_recipe,
    write_recipe_file,
)
from tests.support.wording import raises_golden


def recipe_of(folder: Path, steps: Any, **sections: Any) -> Recipe:
    log = {"every_steps": 1, "progress": False, "profile_steps": steps}
    return tiny_recipe(folder, task="causal-lm", log=log, **sections)


def profiles(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "profile").glob("*"))


def steps_in(trace: Path) -> set[str]:
    """The steps that a trace names."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("step ")}


def test_trace_holds_the_first_and_the_last_step_and_no_other_and_the_report_links_it(corpus: Path) -> None:
    train(recipe_of(corpus, [3, 5], schedule={"max_steps": 6}))
    run, name = corpus / "run", "rank-0-steps-3-5"
    assert profiles(run) == [f"{name}.json.gz", f"{name}.txt"]
    assert steps_in(run / "profile" / f"{name}.json.gz") == {"step 3", "step 4", "step 5"}
    table = (run / "profile" / f"{name}.txt").read_text()
    assert "aten::" in table  # which of them take longest depends on the machine
    rows = [line for line in table.splitlines() if line.count("%") == 2 and "Name" not in line]
    assert len(rows) == NUM_OPERATIONS
    assert steps_of(run, "profile") == [5]
    page = (run / "report.html").read_text()
    assert f'href="profile/{name}.json.gz"' in page
    assert f'href="profile/{name}.txt"' in page


@pytest.mark.parametrize(("steps", "found"), [([1, 3], None), ([3, 6], "5-6"), ([6, 7], "6-7")])
def test_resume_profiles_the_steps_that_it_does_and_none_before_it(corpus: Path, steps: Any, found: str | None) -> None:
    sections = {"schedule": {"max_steps": 8}, "checkpoint": {"every_steps": 4}}
    train(recipe_of(corpus, None, **sections))
    forget(corpus / "run", 8)
    train(recipe_of(corpus, steps, **sections))
    assert events(corpus / "run", "resume")[0]["step"] == 4
    assert profiles(corpus / "run") == ([f"rank-0-steps-{found}.json.gz", f"rank-0-steps-{found}.txt"] if found else [])


def test_profiled_run_learns_the_same_bits_and_an_unprofiled_one_gets_its_batches_as_they_are(corpus: Path) -> None:
    train(recipe_of(corpus, [2, 12]))
    profiled = checkpoint(corpus / "run", 12)
    shutil.move(corpus / "run", corpus / "profiled")
    context = prepare_run(recipe_of(corpus, None))
    with context.resources:
        batches: Any = iter(())
        assert StepProfiler(context).reading(batches) is batches
        run_steps(context)
    assert_same_bits(checkpoint(corpus / "run", 12), profiled)


def test_file_of_the_user_in_the_place_of_a_trace_is_kept(corpus: Path) -> None:
    folder = corpus / "run" / "profile"
    folder.mkdir(parents=True)
    (folder / "rank-0-steps-1-1.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine as well")
    train(recipe_of(corpus, [1, 1], schedule={"max_steps": 1}))
    assert (folder / "previous-1" / "rank-0-steps-1-1.txt").read_text() == "mine"
    assert (folder / "notes.txt").read_text() == "mine as well"
    assert "aten::" in (folder / "rank-0-steps-1-1.txt").read_text()


@pytest.mark.slow
def test_each_process_writes_its_own_trace(corpus: Path) -> None:
    run(write_recipe_file(corpus, task="causal-lm", log={"profile_steps": [1, 2]}), processes=2)
    names = [f"rank-{rank}-steps-1-2.{end}" for rank in (0, 1) for end in ("json.gz", "txt")]
    assert profiles(corpus / "run") == names
    assert "gloo" in gzip.decompress((corpus / "run" / "profile" / names[2]).read_bytes()).decode()


@pytest.mark.parametrize("steps", [[5, 3], [0, 2], [-1, 2], [1], [1, 2, 3], 4, [1.5, 2]])
def test_range_that_is_none_is_refused(corpus: Path, steps: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        recipe_of(corpus, steps)
    assert "profile_steps" in str(refused.value)


def test_range_beyond_the_run_is_refused_before_a_model_is_built_and_by_the_plan(corpus: Path) -> None:
    recipe = recipe_of(corpus, [3, 13])
    for refuse in (resolve_plan, train):
        with raises_golden():
            refuse(recipe)
    assert not (corpus / "run").exists()


def test_plan_without_data_takes_a_range_where_the_number_of_steps_is_unknown(corpus: Path) -> None:
    schedule = {"max_steps": None, "num_epochs": 2}
    assert not resolve_plan(recipe_of(corpus, [30, 40], schedule=schedule), no_data=True).has_length
