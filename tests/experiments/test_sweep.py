"""A sweep refuses bad values before anything runs, and names its combinations by their values."""

import json
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from filelock import FileLock

from accel_train.cli.main import main
from accel_train.core.json_io import read_json
from accel_train.experiments.sweep import sweep as sweep_module
from accel_train.experiments.sweep.sweep import Row, Selection, combine, describe_rows, inputs_digest
from accel_train.experiments.sweep.values import Outcome, draws, grid, propose, read_space, split_values
from accel_train.observe.run_folder import read_events
from accel_train.recipe.schema import Recipe
from accel_train.runtime.signals import StopRequest
from tests.support.runs import environment, recipe_dict, write_corpus, write_recipe_file

EVERY = Selection()


def test_commas_within_brackets_and_quotation_marks_do_not_split() -> None:
    assert split_values("1e-4,3e-4") == ["1e-4", "3e-4"]
    assert split_values("[0.9, 0.95],[0.9,0.99]") == ["[0.9, 0.95]", "[0.9,0.99]"]
    assert split_values("{a: 1, b: 2}") == ["{a: 1, b: 2}"]
    assert split_values('"a,b",c') == ['"a,b"', "c"]


def names(recipe: str, words: list[str], selection: Selection = EVERY) -> list[str]:
    return [each.name for each in combine(recipe, read_space(words), selection)]


def test_combinations_are_a_grid_or_drawn_from_it_and_a_seed_is_never_drawn(tmp_path: Path) -> None:
    recipe = str(write_recipe_file(tmp_path))
    words = ["--optimizer.learning_rate", "1e-4,3e-4", "--seed=0,1"]
    assert names(recipe, words) == ["lr=1e-4,seed=0", "lr=1e-4,seed=1", "lr=3e-4,seed=0", "lr=3e-4,seed=1"]
    drawn = [names(recipe, words, Selection(num_random=1, draw_seed=5)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 2
    assert set(drawn[0]) in ({"lr=1e-4,seed=0", "lr=1e-4,seed=1"}, {"lr=3e-4,seed=0", "lr=3e-4,seed=1"})


def test_draws_from_ranges_are_spread_differ_and_are_the_first_of_a_longer_sweep() -> None:
    words = "--optimizer.learning_rate 1e-5..1e-2 --optimizer.momentum 0.8..0.9 --schedule.max_steps 1..3"
    space = read_space([*words.split(), "--optimizer.betas", "[0.9, 0.95],[0.9, 0.99]"])
    found = list(islice(draws(space, 3), 400))
    assert found[:30] == list(islice(draws(space, 3), 30))
    assert found[:30] != list(islice(draws(space, 4), 30))
    assert len({tuple(each.values()) for each in found}) == 400
    logs = [math.log10(float(each["optimizer.learning_rate"])) for each in found]
    momenta = [float(each["optimizer.momentum"]) for each in found]
    assert [sum(low <= log < low + 1 for log in logs) / 400 for low in (-5, -4, -3)] == pytest.approx([1 / 3] * 3, 0.2)
    assert sum(momentum < 0.85 for momentum in momenta) / 400 == pytest.approx(0.5, abs=0.07)
    assert -5 <= min(logs) <= max(logs) <= -2
    assert {each["schedule.max_steps"] for each in found} == {"1", "2", "3"}


@pytest.mark.parametrize(
    "text, values", [("5..40", set(map(str, range(5, 41)))), ("2,4,8", {"2", "4", "8"})], ids=["range", "list"]
)
def test_draws_end_when_each_combination_was_drawn_once(text: str, values: set[str]) -> None:
    space = read_space(["--schedule.max_steps", text])
    found = [each["schedule.max_steps"] for each in draws(space, 0)]
    assert space.size == len(found) == len(values)
    assert set(found) == values


def test_what_takes_no_number_is_no_range() -> None:
    space = read_space(["--data.train", "1..3", "--seed", "0,1"])
    assert space.fixed == ["--data.train", "1..3"]
    assert grid(space) == [{}]


@pytest.mark.parametrize("greater_is_better", [True, False])
def test_optuna_draws_near_the_best_and_the_same_from_the_same_outcomes(greater_is_better: bool) -> None:
    space = read_space(["--optimizer.learning_rate", "1e-6..1", "--optimizer.name", "adamw,muon", "--seed", "0,1"])
    outcomes: list[Outcome] = []
    for _ in range(25):
        values = propose(space, outcomes, greater_is_better=greater_is_better, draw_seed=1)
        assert values == propose(space, outcomes, greater_is_better=greater_is_better, draw_seed=1)
        rate = float(values["optimizer.learning_rate"])
        distance = abs(math.log10(rate) + 3) + (values["optimizer.name"] == "muon")
        score = -distance if greater_is_better else distance
        outcomes.append(Outcome(values, None, True) if rate > 0.1 else Outcome(values, score))
    last = [math.log10(float(each.values["optimizer.learning_rate"])) for each in outcomes[15:]]
    assert statistics.median(abs(each + 3) for each in last) < 0.5, "1.5 where they are drawn at random"
    assert sum(each.values["optimizer.name"] == "adamw" for each in outcomes[15:]) >= 6


def test_of_combinations_with_equal_means_the_lower_loss_comes_first() -> None:
    recipe = Recipe.model_validate(recipe_dict(Path(), evaluate={"metric_for_best_model": "accuracy"}))
    rows = [
        Row(name, "accuracy", value, loss) for name, value, loss in (("a", 1.0, 0.5), ("b", 1.0, 0.1), ("c", 0.9, 0.0))
    ]
    assert [fact["combination"] for fact in describe_rows(rows, recipe)] == ["b", "a", "c"]


def test_a_changed_shard_file_at_home_or_task_of_the_program_is_another_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from accel_train.tasks.module import ModuleTask\n\nclass Own(ModuleTask):\n    data = model = loss = lambda "
        "self: 1\n"
    )
    files = {"part-0.txt": "one", "own.txt": "two", "own_swept_task.py": source}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    data = {"train": [str(tmp_path / "part-*.txt"), "~/own.txt"]}
    recipe = Recipe.model_validate(recipe_dict(tmp_path) | {"task": "own_swept_task:Own", "data": data})
    digests = [inputs_digest(recipe), inputs_digest(recipe)]
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("o", "0") if name.endswith(".txt") else text.replace(": 1", ": 22"))
        sys.modules.pop("own_swept_task", None)
        digests.append(inputs_digest(recipe))
    assert len(set(digests)) == 4


def test_data_that_all_runs_share_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)
    read: list[str] = []
    monkeypatch.setattr(sweep_module, "digests_of", lambda _, names: read.extend(names) or {names[0]: "digest"})
    space = read_space(["--optimizer.learning_rate", "1e-4,3e-4", "--seed", "0,1,2"])
    recipe = str(write_recipe_file(tmp_path))
    running = sweep_module._Sweep(recipe, space, EVERY, tmp_path, 1, StopRequest(), print)
    records = [running._begun(each) for each in combine(recipe, space, EVERY)]
    assert len(records) == 6
    assert len({record["inputs"] for record in records}) == len(read) == 1


def test_optuna_never_chooses_the_same_twice() -> None:
    space = read_space(["--schedule.max_steps", "1..6"])
    outcomes: list[Outcome] = []
    for _ in range(6):
        values = propose(space, outcomes, greater_is_better=False, draw_seed=0)
        outcomes.append(Outcome(values, float(values["schedule.max_steps"])))
    assert sorted(each.values["schedule.max_steps"] for each in outcomes) == list("123456")


@pytest.mark.parametrize(
    "words, said",
    [
        ("--seed 0,,1", "0,,1: a value is empty"),
        ("--seed 0,0", "0 is repeated"),
        ("--output_dir a,b", "--output_dir takes one value"),
        ("--seed 0,1 --random 3", "--random=3: nothing to draw"),
        ("--optimizer.name adamw,muon --random 3", "between 1 and 2"),
        ("--optimizer.learning_rate 1e-5..1e-3", "--random 20, or --optuna 20"),
        ("--optimizer.learning_rate 1e-3..1e-5 --random 2", "1e-3..1e-5: a range must"),
        ("--optimizer.learning_rate 1e-5..1e-3,1e-2 --random 2", "1e-5..1e-3 is a range"),
        ("--optimizer.learning_rate 1e-5..1e-3 --random 2 --optuna 2", "--random=2 and --optuna=2"),
        ("--optimizer.weight_decay -1..3 --optuna 2", "optimizer.weight_decay=-1"),
        ("--batch.global_batch_size 1.5..8 --random 2", "whole numbers"),
        ("--seed 0..3 --random 2", "--seed 0..3:"),
        ("--optimizer.weight_decay 0..1 --optuna 2000", "2,000 runs"),
        ("--seed 0,x", "--seed"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert main(["sweep", str(write_recipe_file(tmp_path)), *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def command_of(recipe: Path, words: str) -> list[str]:
    return [sys.executable, "-m", "accel_train", "sweep", str(recipe), *words.split()]


def done(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


def stopped_in_its_first_run(command: list[str], metrics: Path) -> tuple[str, str]:
    """Standard output and error of a sweep that gets SIGTERM when its first run has logged a step."""
    first = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (metrics.exists() and metrics.stat().st_size) and first.poll() is None:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    told = first.communicate(timeout=300)
    assert first.returncode == 75, told[1]
    return told


@pytest.mark.slow
def test_runs_of_two_processes_each_are_stopped_resumed_and_keep_their_own_exit_code(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    sections = {"schedule": {"max_steps": 200}, "guard": {"on_nonfinite": "stop", "max_rollbacks": 0}}
    # The second rate makes weights that are not finite in its first step.
    words = "--optimizer.learning_rate 1e-3,1e38 --processes 2 --json"
    command = command_of(write_recipe_file(tmp_path, **sections), words)
    metrics = tmp_path / "run" / "lr=1e-3" / "metrics.jsonl"
    answer, _ = stopped_in_its_first_run(command, metrics)
    assert json.loads(answer)["error"]["type"] == "Preempted"
    assert read_events(metrics.parent)[-1]["event"] == "preempted"

    again = done(command)
    assert again.returncode == 0, again.stderr
    runs = json.loads(again.stdout)["result"]["runs"]
    assert [(run["status"], run["exit_code"]) for run in runs] == [("finished", 0), ("failed", 3)]
    assert "lr=1e38 (exit code 3)" in again.stderr, "the table lists the run that its guard stopped"
    assert [event["event"] for event in read_events(metrics.parent)].count("resume") == 1
    assert read_json(metrics.parent / "summary.json")["world_size"] == 2


@pytest.mark.slow
def test_a_sweep_is_stopped_resumed_and_compared_and_finished_runs_are_not_trained_again(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, schedule={"max_steps": 400}, checkpoint={"every_steps": 0})
    own = tmp_path / "run" / "seed=0.txt"
    own.parent.mkdir()
    own.write_text("mine")
    command = command_of(recipe, "--optimizer.learning_rate 1e-3,1e-30 --seed 0,1")
    runs_of = ["lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=1e-30,seed=0", "lr=1e-30,seed=1"]
    folders = [tmp_path / "run" / name for name in runs_of]
    stopped_in_its_first_run(command, folders[0] / "metrics.jsonl")

    whole = done(command)
    assert whole.returncode == 0, whole.stderr
    runs = {record["name"]: record for record in read_json(tmp_path / "run" / "sweep.json")["runs"]}
    assert [(name, runs[name]["status"]) for name in runs_of] == [(name, "finished") for name in runs_of]
    kinds = [[event["event"] for event in read_events(folder)] for folder in folders]
    assert [("start" in found, "resume" in found) for found in kinds] == [(True, True), *[(True, False)] * 3]
    table = whole.stdout.splitlines()
    assert table[1].startswith("optimizer.learning_rate 1e-3 "), "what learns is the best"
    assert "2 of 2" in table[1]
    assert "lr=1e-30,seed=1" in (tmp_path / "run" / "comparison.html").read_text()

    weights = [(folder / "model" / "model.safetensors").stat().st_mtime_ns for folder in folders]
    again = done(command)
    assert again.stderr.count(": finished before") == 4
    assert again.stdout == whole.stdout
    assert weights == [(folder / "model" / "model.safetensors").stat().st_mtime_ns for folder in folders]
    assert own.read_text() == "mine"


@pytest.mark.slow
def test_a_search_is_stopped_and_resumed_and_a_longer_one_keeps_what_was_chosen(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, task="causal-lm", schedule={"max_steps": 4})

    def searched(number: int, folder: str = "run") -> subprocess.CompletedProcess[str]:
        where = f"--output_dir {tmp_path / folder} --optuna {number}"
        return done(command_of(recipe, f"--optimizer.learning_rate 1e-6..1e-1 --seed 0,1 {where}"))

    def chosen(folder: str = "run") -> list[str]:
        return [record["name"] for record in read_json(tmp_path / folder / "sweep.json")["runs"]]

    first = searched(1)
    assert first.returncode == 0, first.stderr
    again = searched(2)
    assert again.stderr.count(": finished before") == 2
    assert chosen("run")[:2] == re.findall(r"\] (\S+): training", first.stderr)
    assert searched(2, "whole").returncode == 0
    assert chosen("whole") == chosen("run"), "a search in two parts chooses what one in one chooses"
    assert len(chosen()) == 4
    assert "2 of 2" in again.stdout


def test_a_second_sweep_in_a_folder_is_refused_while_the_first_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".sweep.lock"):
        assert main(["sweep", str(write_recipe_file(tmp_path)), "--seed", "0,1"]) == 2
    assert "another sweep" in capsys.readouterr().err
