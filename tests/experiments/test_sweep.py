"""A sweep refuses bad values before anything runs, and names its combinations by their values."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_train.cli.main import main
from accel_train.core.json_io import read_json
from accel_train.experiments.sweep import combine, split_values
from accel_train.observe.run_folder import read_events
from tests.support.runs import environment, write_corpus, write_recipe_file


def test_commas_within_brackets_and_quotation_marks_do_not_split() -> None:
    assert split_values("1e-4,3e-4") == ["1e-4", "3e-4"]
    assert split_values("[0.9, 0.95],[0.9,0.99]") == ["[0.9, 0.95]", "[0.9,0.99]"]
    assert split_values("{a: 1, b: 2}") == ["{a: 1, b: 2}"]
    assert split_values('"a,b",c') == ['"a,b"', "c"]


def test_combinations_are_a_grid_or_drawn_from_it_the_same_each_time(tmp_path: Path) -> None:
    recipe = str(write_recipe_file(tmp_path))
    words = ["--optimizer.learning_rate", "1e-4,3e-4", "--seed=0,1"]
    names = [each.name for each in combine(recipe, words)]
    assert names == ["lr=1e-4,seed=0", "lr=1e-4,seed=1", "lr=3e-4,seed=0", "lr=3e-4,seed=1"]
    drawn = [[each.name for each in combine(recipe, words, num_random=2, draw_seed=5)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) < set(names)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--seed", "0"], "nothing to sweep"),
        (["--seed", "0,,1"], "a value is empty"),
        (["--seed", "0,0"], "is there twice"),
        (["--output_dir", "a,b"], "takes one value"),
        (["--seed", "0,1", "--random", "3"], "must be between 1 and 2"),
        (["--seed", "0,x"], "--seed"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["sweep", str(write_recipe_file(tmp_path)), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_runs_of_two_processes_each_are_stopped_resumed_and_keep_their_own_exit_code(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    sections = {"schedule": {"max_steps": 200}, "guard": {"on_nonfinite": "stop", "max_rollbacks": 0}}
    recipe = write_recipe_file(tmp_path, **sections)
    # The second rate makes weights that are not finite in its first step.
    words = ["sweep", str(recipe), "--optimizer.learning_rate", "1e-3,1e38", "--processes", "2", "--json"]
    command = [sys.executable, "-m", "accel_train", *words]

    first = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "lr=1e-3" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and first.poll() is None:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    answer, said = first.communicate(timeout=120)
    assert (first.returncode, json.loads(answer)["error"]["type"]) == (75, "Preempted"), said
    assert read_events(metrics.parent)[-1]["event"] == "preempted"

    again = subprocess.run(command, env=environment(), capture_output=True, text=True)
    runs = json.loads(again.stdout)["result"]["runs"]
    assert again.returncode == 0, again.stderr
    assert [(run["status"], run["exit_code"]) for run in runs] == [("finished", 0), ("failed", 3)]
    assert [event["event"] for event in read_events(metrics.parent)].count("resume") == 1
    assert read_json(metrics.parent / "summary.json")["world_size"] == 2


@pytest.mark.slow
def test_a_sweep_is_stopped_resumed_and_compared_and_finished_runs_are_not_trained_again(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, schedule={"max_steps": 400}, checkpoint={"every_steps": 0})
    own = tmp_path / "run" / "seed=0.txt"
    own.parent.mkdir()
    own.write_text("mine")
    command = [
        sys.executable,
        "-m",
        "accel_train",
        "sweep",
        str(recipe),
        "--optimizer.learning_rate",
        "1e-3,1e-30",
        "--seed",
        "0,1",
    ]
    names = ["lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=1e-30,seed=0", "lr=1e-30,seed=1"]

    first = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / names[0] / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and first.poll() is None:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 75, said
    assert "run the same command again to resume the sweep" in said

    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    runs = {record["name"]: record for record in read_json(tmp_path / "run" / "sweep.json")["runs"]}
    assert [(name, runs[name]["status"]) for name in names] == [(name, "finished") for name in names]
    kinds = [[event["event"] for event in read_events(tmp_path / "run" / name)] for name in names]
    assert [("start" in found, "resume" in found) for found in kinds] == [(True, True), *[(True, False)] * 3]
    table = done.stdout.splitlines()
    assert table[1].startswith("optimizer.learning_rate 1e-3 "), "what learns is the best"
    assert "2 of 2" in table[1]
    assert "lr=1e-30,seed=1" in (tmp_path / "run" / "comparison.html").read_text()

    weights = {name: (tmp_path / "run" / name / "model" / "model.safetensors").stat().st_mtime_ns for name in names}
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert again.stderr.count("finished before") == 4
    assert again.stdout == done.stdout
    assert weights == {
        name: (tmp_path / "run" / name / "model" / "model.safetensors").stat().st_mtime_ns for name in names
    }
    assert own.read_text() == "mine"


@pytest.mark.slow
def test_a_run_that_its_guard_stops_is_listed_and_the_others_are_trained(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(
        tmp_path, schedule={"max_steps": 8}, guard={"max_consecutive_skips": 1, "max_rollbacks": 0}
    )
    command = [sys.executable, "-m", "accel_train", "sweep", str(recipe), "--optimizer.learning_rate", "1e30,1e-3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    runs = {record["name"]: record for record in read_json(tmp_path / "run" / "sweep.json")["runs"]}
    assert (runs["lr=1e30"]["status"], runs["lr=1e30"]["exit_code"]) == ("failed", 3)
    assert runs["lr=1e-3"]["status"] == "finished"
    assert "lr=1e30" in done.stdout
