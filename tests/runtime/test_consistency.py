"""Processes that were started with different recipes, data, code or folders are told so, before a model is built."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train import Recipe
from accel_train.runtime.consistency import disagreements, facts_of
from accel_train.task import TaskData
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import event_steps, losses, recipe_dict, write_recipe_file, write_yaml
from tests.support.wording import assert_golden


def facts(folder: Path, fingerprint: str = "f", **sections: Any) -> dict[str, Any]:
    samples: Any = [1, 2, 3]
    data = TaskData(samples, None, lambda rows: {}, fingerprint)
    return facts_of(Recipe.model_validate(recipe_dict(folder, **sections)), data)


def test_a_setting_that_differs_is_named_with_both_values_and_the_rank(tmp_path: Path) -> None:
    everywhere = [facts(tmp_path), facts(tmp_path), facts(tmp_path, optimizer={"learning_rate": 0.5})]
    assert_golden("\n".join(disagreements(everywhere)))


def test_data_and_versions_that_differ_are_named(tmp_path: Path) -> None:
    here = {**facts(tmp_path), "package torch": "2.0"}
    there = {**facts(tmp_path, fingerprint="g"), "package torch": "1.0"}
    assert_golden("\n".join(disagreements([here, there])))


def test_paths_and_workers_of_one_machine_may_differ(tmp_path: Path) -> None:
    elsewhere = facts(
        tmp_path,
        output_dir="/elsewhere",
        data={"cache_dir": "/scratch", "num_workers": 3, "train": "/scratch/corpus.jsonl"},
        log={"every_steps": 7},
    )
    assert disagreements([facts(tmp_path), elsewhere]) == []


@pytest.mark.parametrize(
    ("options", "of_rank_1", "said"),
    [
        ({}, {"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate is 0.5 on rank 1, and 0.003 on rank 0"),
        ({"other_data": 1}, {}, "the data is {'fingerprint': '0123456789abcdef'"),
    ],
    ids=["setting", "data"],
)
def test_processes_that_disagree_exit_with_2_and_say_in_what_before_a_model_is_built(
    corpus: Path, options: dict[str, Any], of_rank_1: dict[str, Any], said: str
) -> None:
    recipe = write_recipe_file(
        corpus, task="tests.support.tasks.process_faults:FaultTask", options={**options, "raise_in_build": 0}
    )
    changed = {**yaml.safe_load(recipe.read_text()), **of_rank_1}
    write_yaml(corpus / "rank-1.yaml", {**yaml.safe_load(recipe.read_text()), **changed})
    (corpus / "rank-0.yaml").write_text(recipe.read_text())
    forked = run_forked(["run", str(corpus / "rank-{rank}.yaml")], 2, folder=corpus / "processes")
    forked.expect(2)
    lines = [line for rank in (0, 1) for line in forked.stderr(rank).splitlines() if line.startswith("error")]
    assert len(lines) == 1
    begin, _, differs = lines[0].removeprefix("error: rank ")[3:].partition(": ")
    assert_golden(begin)
    assert differs.startswith(said)


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2")])
def test_an_output_dir_that_the_processes_do_not_share_is_refused_before_a_model_is_built(
    corpus: Path, strategy: str
) -> None:
    options = {"raise_in_build": 0}
    recipe = write_recipe_file(
        corpus, task="tests.support.tasks.process_faults:FaultTask", parallel={"strategy": strategy}, options=options
    )
    here, there = corpus / "machine-0", corpus / "machine-1"
    words = ["run", str(recipe), "--output_dir", str(corpus / "machine-{rank}")]
    forked = run_forked(words, 2, folder=corpus / "processes")
    forked.expect(2)
    lines = [line for rank in (0, 1) for line in forked.stderr(rank).splitlines() if line.startswith("error")]
    assert len(lines) == 1
    told = lines[0].removeprefix("error: rank ")[3:]
    assert_golden(told.replace(f"process {forked.pids[1]} on {socket.gethostname()}", "PROCESS"))
    assert not there.exists()
    assert not list(here.rglob("*.tmp"))


@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp2"])
def test_an_output_dir_that_has_another_path_on_each_machine_trains_and_resumes(corpus: Path, strategy: str) -> None:
    (corpus / "storage").mkdir()
    for machine in (0, 1):
        (corpus / f"machine-{machine}").mkdir()
        (corpus / f"machine-{machine}" / f"mount-{machine}").symlink_to(corpus / "storage")
    sections = {"parallel": {"strategy": strategy}, "checkpoint": {"every_steps": 3, "keep": 5}}
    recipe = write_recipe_file(corpus, schedule={"max_steps": 6}, **sections)
    words, run = ["run", str(recipe), "--output_dir", "mount-{rank}/run"], corpus / "storage" / "run"
    for _ in range(2):
        forked = run_forked(words, 2, folder=corpus / "processes", cwd=str(corpus / "machine-{rank}"))
        forked.expect(0)
        assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
        shutil.rmtree(run / "checkpoints" / "step-00000006")
    assert event_steps(run, "resume") == [3]


@pytest.mark.slow
def test_a_checkpoint_to_resume_that_a_process_does_not_see_is_refused(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, checkpoint={"every_steps": 3}, schedule={"max_steps": 3})
    assert run_forked(["run", str(recipe)], 1, folder=corpus / "processes").wait() == [0]
    for machine in (0, 1):
        (corpus / f"machine-{machine}").mkdir()
    (corpus / "run" / "checkpoints" / "step-00000003").rename(corpus / "machine-0" / "step-00000003")
    words = ["run", str(recipe), "--output_dir", str(corpus / "next"), "--checkpoint.resume", "step-00000003"]
    forked = run_forked(words, 2, folder=corpus / "processes", cwd=str(corpus / "machine-{rank}"))
    forked.expect(2)
    [line] = [line for rank in (0, 1) for line in forked.stderr(rank).splitlines() if line.startswith("error")]
    told = line.removeprefix("error: rank ")[3:]
    assert_golden(told.replace(f"process {forked.pids[1]} on {socket.gethostname()}", "PROCESS"))
