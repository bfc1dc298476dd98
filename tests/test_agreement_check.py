"""Processes that were started with different recipes, data or code are told so, before a model is built."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train import Recipe
from accel_train.agreement_check import disagreements, facts_of
from accel_train.task import TaskData
from forked import run_forked
from runs import recipe_dict, write_corpus, write_recipe_file


def facts(folder: Path, fingerprint: str = "f", **sections: Any) -> dict[str, Any]:
    data = TaskData([1, 2, 3], None, lambda rows: {}, fingerprint, {"vocab_size": 256}, True, None)  # type: ignore[arg-type]
    return facts_of(Recipe.model_validate(recipe_dict(folder, **sections)), data)


def test_a_setting_that_differs_is_named_with_both_values_and_the_rank(tmp_path: Path) -> None:
    everywhere = [facts(tmp_path), facts(tmp_path), facts(tmp_path, optimizer={"learning_rate": 0.5})]
    assert disagreements(everywhere) == ["optimizer.learning_rate is 0.5 on rank 2, and 0.003 on rank 0"]


def test_data_and_versions_that_differ_are_named(tmp_path: Path) -> None:
    here, there = facts(tmp_path), {**facts(tmp_path, fingerprint="g"), "package torch": "1.0"}
    said = disagreements([here, there])
    assert len(said) == 2
    assert "package torch is '1.0' on rank 1" in said[0]
    assert "'fingerprint': 'g'" in said[1]


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
)
def test_processes_that_disagree_exit_with_2_and_say_in_what_before_a_model_is_built(
    tmp_path: Path, options: dict[str, Any], of_rank_1: dict[str, Any], said: str
) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, task="fault_task:FaultTask", options={**options, "raise_in_build": 0})
    changed = {**yaml.safe_load(recipe.read_text()), **of_rank_1}
    (tmp_path / "rank-1.yaml").write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **changed}))
    (tmp_path / "rank-0.yaml").write_text(recipe.read_text())
    forked = run_forked(["run", str(tmp_path / "rank-{rank}.yaml")], 2, folder=tmp_path / "processes")
    assert forked.wait() == [2, 2]
    lines = [line for rank in (0, 1) for line in forked.stderr(rank).splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith("error: the processes of this run do not agree: ")
    assert said in lines[0]
