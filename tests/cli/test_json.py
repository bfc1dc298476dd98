"""`--json`: each command prints one object that follows the schema and nothing else, also where it fails."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from typing_extensions import is_typeddict

from accel_train.cli.commands import COMMANDS
from accel_train.cli.main import main
from accel_train.cli.results.schema import json_schema, schema_page
from accel_train.core.json_io import read_json
from tests.cli.test_main import failing
from tests.recovery.test_replay import run_with
from tests.support.commands import call
from tests.support.runs import ran, run_forked_command, write_lines, write_recipe_file

Answer = dict[str, Any]
Ask = Callable[..., Answer]
VALIDATOR = jsonschema.Draft202012Validator(json_schema(closed=True))


def answer_in(text: str) -> Answer:
    """The one object in a text that holds nothing else."""
    [line] = text.splitlines()
    answer: Answer = json.loads(line)
    VALIDATOR.validate(answer)
    return answer


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], not_launched: None) -> Ask:
    """Runs a command with --json in this process; returns its object, which has to have the exit code and the result
    that it claims.
    """

    def ask(*words: str, fails: bool = False) -> Answer:
        capsys.readouterr()
        code = main([*words, "--json"])
        answer = answer_in(capsys.readouterr().out)
        assert (answer["command"], answer["exit_code"], answer["ok"]) == (words[0], code, code == 0)
        assert (answer["error"] is not None) == fails
        assert (answer["result"] is None) == fails
        return answer

    return ask


@pytest.fixture
def there(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(finished)
    return finished


def test_every_command_has_a_result_and_the_schema_is_one() -> None:
    assert all(is_typeddict(command.result) for command in COMMANDS.values())
    for closed in (False, True):
        jsonschema.Draft202012Validator.check_schema(json_schema(closed=closed))
    page = schema_page()
    assert all(f"\n## {name}\n" in page for name in COMMANDS)
    assert "| `seconds_left` | number or null |  |" in page


def test_schema_refuses_what_it_does_not_describe() -> None:
    good = {"schema_version": 1, "command": "init", "ok": True, "exit_code": 0, "error": None}
    VALIDATOR.validate({**good, "result": {"recipe": "a", "file": "b"}})
    for result in (
        {"recipe": "a"},
        {"recipe": "a", "file": 1},
        {"recipe": "a", "file": "b", "more": 1},
        {"shell": "a"},
    ):
        assert not VALIDATOR.is_valid({**good, "result": result})
    assert not VALIDATOR.is_valid({**good, "result": None, "schema_version": 2})
    # Whoever holds an older schema may meet a newer field.
    newer = {**good, "result": {"recipe": "a", "file": "b", "more": 1}}
    jsonschema.Draft202012Validator(json_schema()).validate(newer)


def test_recipes_init_explain_doctor_and_completion(ask: Ask, empty_folder: Path) -> None:
    assert "gpt_tiny" in [each["name"] for each in ask("recipes")["result"]["recipes"]]
    assert ask("init", "gpt_tiny")["result"] == {"recipe": "gpt_tiny", "file": "gpt_tiny.yaml"}
    [seed] = ask("explain", "seed")["result"]["settings"]
    assert (seed["name"], seed["default"]) == ("seed", "0")
    assert "optimizer.lr_scaling.rule" in [each["name"] for each in ask("explain", "optimizer")["result"]["settings"]]
    assert {each["status"] for each in ask("doctor")["result"]["findings"]} <= {"ok", "warn", "bad"}
    assert "complete" in ask("completion", "bash")["result"]["script"]


def test_run_plan_and_what_is_done_with_a_run(ask: Ask, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("run", "r.yaml")["result"]["summary"]["steps"] == 3
    plan = ask("plan", "r.yaml", "--no-data")["result"]
    assert (plan["steps"], plan["settings"]["checkpoint.every_steps"]) == (3, 2)
    evaluated = ask("evaluate", "out")["result"]
    assert evaluated["metrics"]["loss"] == pytest.approx(read_json(Path("out/summary.json"))["eval"]["loss"])
    with monkeypatch.context() as with_a_gpu:
        with_a_gpu.setenv("ACCELERATE_USE_CPU", "true")
        with_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        assert ask("generate", "out", "--prompt", "one")["result"]["text"].startswith("one")
    assert ask("export", "out")["result"]["folder"] == "out/export"
    assert ask("report", "out")["result"] == {"file": "out/report.html", "runs": ["out"]}
    watched = ask("watch", "out")["result"]
    assert {"has_ended": True, "status": "finished", "step": 3, "total_steps": 3}.items() <= watched.items()
    verified = ask("verify", "out")["result"]
    assert [each["step"] for each in verified["checkpoints"]] == [2, 3]
    assert verified["newest"].endswith("step-00000003")


def test_find_lr(ask: Ask, there: Path) -> None:
    found = ask("find-lr", "r.yaml", "--steps", "20", "--out", "test")["result"]
    assert len(found["steps"]) == 20
    assert found["files"] == ["test/find-lr.json", "test/find-lr.png"]


def test_finetune_and_predict(ask: Ask, empty_folder: Path) -> None:
    rows = [f"a {'good' if number % 2 else 'bad'} film {number},{number % 2}" for number in range(60)]
    write_lines("reviews.csv", "text,label", *rows)
    words = ("finetune", "reviews.csv", "--schedule.num_epochs", "1", "--data.cache_dir", "cache")
    found = ask(*words, "--dry-run")["result"]
    assert (found["task"], found["recipe_is_new"], found["run"]) == ("text-classification", True, None)
    trained = ask(*words)["result"]
    assert (trained["recipe_is_new"], trained["run"]["output_dir"]) == (False, "runs/reviews")
    predicted = ask("predict", "runs/reviews", "reviews.csv", "--out", "p.jsonl")["result"]
    assert predicted["rows"] == len(Path("p.jsonl").read_text().splitlines()) == 60


def test_replay(ask: Ask, tmp_path: Path) -> None:
    incident = run_with(tmp_path, {"sample": 7, "place": "forward", "name": "blocks.1.act"})
    replayed = ask("replay", str(incident), "--device", "cpu")["result"]
    assert replayed["classification"] == "deterministic"
    assert [each["first_module"] for each in replayed["micro_batches"]] == ["blocks.1.act"]
    assert replayed["micro_batches"][0]["loss_sum"] == "NaN"


@pytest.mark.slow
def test_rehearse_and_sweep(ask: Ask, there: Path) -> None:
    rehearsed = ask("rehearse", "r.yaml", "--steps", "4", "--processes", "1")["result"]
    assert rehearsed["same"]
    swept = ask("sweep", "r.yaml", "--seed", "0,1", "--processes", "1", "--output_dir", "sweep")["result"]
    assert [each["status"] for each in swept["runs"]] == ["finished", "finished"]
    assert swept["report"] == "sweep/comparison.html"


def test_mistakes_have_the_same_exit_code_and_one_object(ask: Ask, there: Path) -> None:
    answer = ask("plan", "r.yaml", "--no-data", "--seed", "-1", "--batch.global_batch_size", "0", fails=True)
    assert answer["exit_code"] == 2
    assert len(answer["error"]["message"].splitlines()) == 2
    for words in (
        ["run"],
        ["run", "nowhere.yaml"],
        ["watch", "nowhere"],
        ["evaluate", "out", "--none"],
        ["report", "out", "--follow"],
    ):
        assert ask(*words, fails=True)["exit_code"] == 2
    for words in ([], ["bogus"]):
        assert answer_in(call(*words, "--json", code=2).out)["command"] is None


def test_flag_may_stand_before_the_command_and_help_is_text(there: Path) -> None:
    assert answer_in(call("--json", "plan", "r.yaml", "--no-data").out)["command"] == "plan"
    assert call("plan", "--help", "--json").out.startswith("usage: accel-train plan")


def test_a_damaged_run_has_a_result_and_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    captured = call("verify", tmp_path, "--json", code=4)
    answer = answer_in(captured.out)
    assert answer["result"]["checkpoints"][0]["problem"]
    assert answer["error"]["type"] == "CheckpointError"
    assert captured.err.splitlines()[-1] == f"error: {answer['error']['message']}"


def test_a_fault_that_nobody_foresaw_is_an_object_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = KeyError("ours")
    monkeypatch.setitem(COMMANDS, "doctor", failing("doctor", error))
    with pytest.raises(KeyError) as caught:
        main(["doctor", "--json"])
    assert caught.value is error
    answer = answer_in(capsys.readouterr().out)
    assert (answer["exit_code"], answer["error"]) == (1, {"type": "KeyError", "message": "'ours'"})


def test_what_libraries_and_children_write_goes_to_standard_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import os, subprocess
from accel_train.cli import main as cli
from accel_train.cli.command import Outcome

def loud(*arguments):
    print("printed")
    os.write(1, b"written\\n")
    subprocess.run(["echo", "of a child"], check=True)
    return Outcome({"findings": [], "file": None})

cli.COMMANDS["doctor"] = cli.COMMANDS["doctor"]._replace(run=loud)
cli.program()
""")
    words = [sys.executable, str(program), "doctor", "--json"]
    done = ran(words, check=True)
    assert answer_in(done.stdout)["ok"]
    assert sorted(done.stderr.splitlines()) == ["of a child", "printed", "written"]


def test_main_process_alone_prints_the_object_of_a_run(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, schedule={"max_steps": 2})
    done = run_forked_command(["run", str(recipe), "--json"], 2)
    assert done.returncode == 0, done.stderr
    assert answer_in(done.stdout)["result"]["summary"]["world_size"] == 2
    assert str(recipe) in done.stderr


def test_a_process_that_a_watchdog_ends_prints_why(corpus: Path) -> None:
    """A step that hangs never comes back: the object comes from the watchdog's thread."""
    recipe = write_recipe_file(corpus)
    program = corpus / "program.py"
    program.write_text("""
import time
from accel_train.cli.main import program
from accel_train.training import loop

loop.seed_step = lambda *_: time.sleep(600)
program()
""")
    done = run_forked_command(["run", str(recipe), "--guard.hang_timeout_seconds", "1", "--json"], 1, program)
    answer = answer_in(done.stdout)
    assert (done.returncode, answer["exit_code"], answer["error"]["type"]) == (5, 5, "hang")
    assert "guard.hang_timeout_seconds" in answer["error"]["message"]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_on_an_output_without_these_letters_has_their_escapes(
    encoding: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Zürich 日本"
    with capfd.disabled(), (tmp_path / "out").open("w", encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["plan", str(tmp_path / f"{name}.yaml"), "--json"]) == 2
    raw = (tmp_path / "out").read_bytes()
    assert name in json.loads(raw)["error"]["message"]
    assert ("日本".encode() in raw) == (encoding == "utf-8")
