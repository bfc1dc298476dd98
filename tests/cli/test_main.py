"""The command line: what each command prints, and what each kind of failure exits with."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train import __version__
from accel_train.cli.command import Command, data_of
from accel_train.cli.commands import COMMANDS
from accel_train.cli.main import main, parse_arguments
from accel_train.core.errors import CheckpointError, Preempted, TrainingStopped
from accel_train.core.json_io import read_json
from accel_train.recipe.tasks import TASKS, finetune_tasks
from tests.cli import test_bad_input
from tests.support.commands import call
from tests.support.runs import REPOSITORY, ran, refused, run_forked_command, write_yaml
from tests.support.wording import assert_golden

GOOD: dict[str, Any] = {
    **test_bad_input.GOOD,
    "schedule": {"max_steps": 3},
    "checkpoint": {"every_steps": 2},
    "log": {"every_steps": 1, "progress": False},
}


@pytest.fixture(autouse=True)
def folder(empty_folder: Path) -> Path:
    """A folder with a good recipe and its data, in no launch."""
    write_yaml("r.yaml", GOOD)
    Path("text.txt").write_text("one two three " * 40)
    return empty_folder


def failing(name: str, error: BaseException) -> Command:
    def run(*_: Any) -> int:
        raise error

    return COMMANDS[name]._replace(run=run)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (TrainingStopped("6 skips in a row"), 3, "error: 6 skips in a row\n"),
        (CheckpointError("no checkpoint is valid"), 4, "error: no checkpoint is valid\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "error: [Errno 28] No space left on device\n"),
        (torch.distributed.DistBackendError("peer gone"), 5, "error: peer gone\n"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), 5, "closed by peer"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried"),
            6,
            "error: out of memory: CUDA out of memory.; lower batch.",
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), 6, "set precision.gradient_checkpointing"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 6, "out of memory"),
        (Preempted("saved at step 7; run again"), 75, "preempted: saved at step 7; run again\n"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (SystemExit(0), 1, "error: exit(0) was called before the run was done ("),
        (SystemExit(), 1, "error: exit() was called before the run was done ("),
    ],
)
def test_each_failure_has_its_exit_code_and_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "doctor", failing("doctor", error))
    captured = call("doctor", code=code).err
    assert said in captured
    assert captured.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ValueError("ours"), RuntimeError("ours"), OSError(errno.EPERM, "ours"), KeyError("ours")]
)
def test_a_fault_that_nobody_foresaw_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "doctor", failing("doctor", error))
    with pytest.raises(type(error)) as caught:
        main(["doctor"])
    assert caught.value is error


def test_a_value_error_while_training_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import accel_train.training.train

    error = ValueError("shapes do not match")

    def break_down(run: Any) -> None:
        run.resources.close()
        raise error

    monkeypatch.setattr(accel_train.training.train, "train_run", break_down)
    assert refused(main, ["run", "r.yaml"], named="") is error


def test_a_value_error_while_preparing_is_the_users() -> None:
    call("run", "r.yaml", "--data.train", "nowhere.txt", code=2, named="error: data.train: |'nowhere.txt'")


def test_debug_shows_where_a_mistake_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_DEBUG", "1")
    captured = call("run", "nowhere.yaml", code=2, named="Traceback").err
    assert captured.splitlines()[-1].startswith("error: nowhere.yaml: ")


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a launcher's variables of one of four processes."""
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("error", [TrainingStopped("s"), CheckpointError("c"), Preempted("p")])
def test_what_all_processes_agree_on_is_said_by_rank_0_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_rank(1, monkeypatch)
    monkeypatch.setitem(COMMANDS, "run", failing("run", error))
    main(["run", "r.yaml"])
    assert capsys.readouterr().err == ""


def test_a_mistake_that_only_another_process_sees_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(3, monkeypatch)
    monkeypatch.setattr("accel_train.runtime.exit.WAIT_FOR_RANK_0_SECONDS", 0.0)
    assert_golden(call("run", "nowhere.yaml", code=2).err)


def test_what_is_not_training_is_done_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(1, monkeypatch)
    assert call("doctor").out == ""


def test_two_processes_say_a_mistake_once() -> None:
    done = run_forked_command(["run", "no.yaml"], 2)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert_golden(line)


def test_a_crash_of_native_code_leaves_the_python_line_that_led_to_it() -> None:
    code = """
import os, signal, sys
from accel_train.cli import main as cli

def crash(*arguments):
    os.kill(os.getpid(), signal.SIGSEGV)

cli.COMMANDS["doctor"] = cli.COMMANDS["doctor"]._replace(run=crash)
sys.argv = ["accel-train", "doctor"]
cli.program()
"""
    done = ran([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert "in crash" in done.stderr


def test_no_command_prints_the_help() -> None:
    printed = call().out
    assert all(command in printed for command in COMMANDS)
    assert all(f"\n  {task:24}{TASKS[task].learns[:20]}" in printed for task in TASKS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_has_help(command: str) -> None:
    printed = call(command, "--help").out
    assert printed.startswith(f"usage: accel-train {command}")
    listed = [task for task in TASKS if f"\n  {task:24}{TASKS[task].learns[:20]}" in printed]
    assert listed == ([*finetune_tasks()] if command == "finetune" else [])


def test_the_module_is_the_same_program() -> None:
    assert ran([sys.executable, "-m", "accel_train", "--version"]).stdout == f"accel-train {__version__}\n"


def until_torch(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    """Start the program, and end it with exit code 9 once it imports torch, which then says so."""
    (folder / "torch.py").write_text("import os\nos.write(2, b'torch is imported')\nos._exit(9)\n")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", **variables}
    command = [sys.executable, "-m", "accel_train", *words]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize(("rank", "lines"), [("0", ["r.yaml: to be trained in out"]), ("1", [])])
def test_a_run_says_what_it_is_about_before_it_imports_torch(folder: Path, rank: str, lines: list[str]) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    code, out, err = ended(until_torch(folder, "run", "r.yaml", **ranks))
    importing = "r.yaml: importing torch and transformers ...\n" if lines else ""
    assert (code, out.splitlines(), err) == (9, lines, f"{importing}torch is imported")


def test_mistakes_that_need_no_torch_end_before_its_import(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "own.csv").write_text("text,label\none,a\ntwo,b\n")
    table = {"task": "text-classification", "output_dir": "own", "model": {"config": {"model_type": "ngrams"}}}
    table["data"] = {"train": "own.csv", "text_columns": ["text"], "label_column": "label"}
    write_yaml(folder / "own.yaml", {**table, "schedule": {"num_epochs": 1}})
    (folder / "trained").mkdir()
    (folder / "trained" / "recipe.resolved.yaml").write_bytes((folder / "own.yaml").read_bytes())
    cases = {
        "run own.yaml --data.label_column kind": "own.csv: no column 'kind'",
        "run own.yaml --data.text_columns [txt]": "did you mean 'text'",
        "run r.yaml --output_dir /proc/run": "/proc cannot be written",
        "finetune own.csv --label kind": "--label kind: own.csv does not have this column",
        "finetune own.csv --text {txt}.": "--text txt: own.csv does not have this column; did you mean 'text'",
        "run r.yaml --data.train gone.txt": "'gone.txt'",
        "plan r.yaml --data.eval gone/*.csv": "'gone/*.csv'",
        "rehearse r.yaml --data.train gone.txt": "'gone.txt'",
        "run r.yaml --output_dir file/run": "file/run",
        "run r.yaml --log.trackers [aim]": "aim<4",
        "finetune gone.csv": "gone.csv",
        "run r.yaml --gpus 2": "--nproc_per_node 2",
        "predict trained gone.csv": "DATA: no file or folder 'gone.csv'",
        "predict trained own.csv --out own.foo": "must end in .csv, .jsonl, .parquet",
        "predict trained own.csv --out gone/own.csv": "folder gone does not exist",
        "predict trained own.csv --out own.csv": "was not written by this run",
        "evaluate trained --data gone/*.csv": "--data: no file matches 'gone/*.csv'",
    }
    started = {typed: until_torch(folder, *typed.split()) for typed in cases}
    for typed, process in started.items():
        code, _, said = ended(process)
        assert (code, said.count("\n"), cases[typed] in said) == (2, 1, True), (typed, said)


def test_each_command_says_what_it_does_before_it_imports_torch(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "recipe.resolved.yaml").write_bytes((folder / "r.yaml").read_bytes())
    of_recipes = ("plan", "find-lr", "rehearse", "sweep")
    (folder / "run" / "model").mkdir()
    (folder / "run" / "model" / "config.json").write_text("{}")
    of_runs = ("evaluate", "predict", "generate", "export", "replay")
    names = dict.fromkeys(of_recipes, "r.yaml") | dict.fromkeys(of_runs, "run")
    more = {"sweep": ("--seed", "0,1")}
    started = {command: until_torch(folder, command, name, *more.get(command, ())) for command, name in names.items()}
    for command, process in started.items():
        said = f"{names[command]}: importing torch and transformers ...\ntorch is imported"
        assert ended(process) == (9, "", said), command


def test_export_names_the_consents_that_it_takes_and_no_other_setting() -> None:
    said = call("export", "--help", named="--task MODULE:CLASS|--optimizer.name MODULE:CLASS").out
    assert "any setting" not in said
    call("export", "run", "--data.train", "x", code=2)


@pytest.mark.parametrize(
    "arguments, gpu, settings",
    [
        (["plan", "r", "--a.b", "1"], None, ["--a.b", "1"]),
        (["plan", "--a.b", "1", "r"], None, ["--a.b", "1"]),
        (["plan", "--a.b=1", "r"], None, ["--a.b=1"]),
        (["plan", "r", "--a.b", "-1"], None, ["--a.b", "-1"]),
        (["plan", "r", "--a.b", "-x"], None, ["--a.b", "-x"]),
        (["plan", "--a.b", "--c=2", "--gpu", "H200", "r"], "H200", ["--a.b", "--c=2"]),
        (["plan", "--gpu", "H200", "r", "--a.b", "1"], "H200", ["--a.b", "1"]),
        (["plan", "--gpu=H200", "r"], "H200", []),
    ],
)
def test_the_recipes_settings_are_told_from_the_commands_own_flags(
    arguments: list[str], gpu: str | None, settings: list[str]
) -> None:
    parsed, found = parse_arguments(arguments)
    assert (parsed.recipe, parsed.gpu, found) == ("r", gpu, settings)


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize("words", [["a.csv"], ["--data", "a.csv"], ["--data=a.csv"]])
def test_data_is_the_second_argument_of_evaluate_and_predict_or_a_flag(command: str, words: list[str]) -> None:
    assert data_of(parse_arguments([command, "run", *words])[0]) == "a.csv"
    assert data_of(parse_arguments([command, "run"])[0]) is None


def test_a_run_is_trained_verified_reported_and_generates() -> None:
    call("run", "--schedule.max_steps", "4", "r.yaml", "--seed=5")
    assert read_json(Path("out/summary.json"))["steps"] == 4
    written = Path("out/recipe.resolved.yaml").read_text()
    for line in ("max_steps: 4  # --schedule.max_steps", "seed: 5  # --seed", "per_device_batch_size: auto  # default"):
        assert line in written

    rows = call("verify", "out").out.splitlines()
    assert [row.split() for row in rows[1:3]] == [["step-00000002", "2", "ok"], ["step-00000004", "4", "ok"]]
    assert rows[3].split() == ["model/", "ok"]
    assert rows[4].endswith("would use step-00000004")

    assert call("report", "out", "--out", "r.html").out == "r.html\n"
    assert Path("r.html").read_text().startswith("<!")

    words = ("generate", "out", "--prompt", "one ", "--max-new-tokens", 40, "--seed")
    texts = [call(*words, seed).out for seed in (1, 1, 2)]
    assert texts[0].startswith("one ")
    assert len(texts[0]) > 32  # goes on past the model's 32 positions
    assert texts[0] == texts[1] != texts[2]

    damaged = next(Path("out/checkpoints/step-00000004").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    rows = call("verify", "out").out.splitlines()
    assert f"{damaged.name} differs" in rows[2]
    assert rows[4].endswith("would use step-00000002")

    (Path("out/checkpoints/step-00000002") / "manifest.json").unlink()
    captured = call("verify", "out", code=4)
    rows = captured.out.splitlines()
    assert_golden("\n".join([rows[1].strip(), *captured.err.splitlines()]))


def test_the_recipe_in_the_run_folder_runs_again() -> None:
    call("run", "r.yaml")
    call("run", "out/recipe.resolved.yaml", "--output_dir", "again")
    first, again = (read_json(Path(run, "summary.json")) for run in ("out", "again"))
    assert first["steps"] == again["steps"] == 3


def test_padding_rows_of_the_vocabulary_are_never_sampled() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from accel_train.data.text.tokenizers import byte_tokenizer
    from accel_train.model.generation import generate_text

    tokenizer = byte_tokenizer()
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=320, bos_token_id=256, eos_token_id=256)
    )
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wte.weight[300] = 100.0  # a padding row that would win every time
        model.transformer.ln_f.bias.fill_(1.0)
    model.train()
    before = torch.random.get_rng_state()
    text = generate_text(model, tokenizer, "", max_new_tokens=30, temperature=1.0, seed=0)
    assert text
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "variables",
    [
        "WORLD_SIZE=1 RANK=3",
        "WORLD_SIZE=2 RANK=2 MASTER_ADDR=127.0.0.1",
        "WORLD_SIZE=two RANK=0",
        "WORLD_SIZE=4 RANK=0 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
        "WORLD_SIZE=2 RANK=0",
        "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
    ],
)
def test_impossible_launcher_variables_are_one_line_at_once(variables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    error = call("run", "r.yaml", code=2).err
    assert len(error.splitlines()) == 1
    assert_golden(error)
    assert time.monotonic() - began < 5  # else it would wait for processes that never come


def test_output_that_nobody_reads_any_more_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "accel_train", "doctor"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert done.returncode == 141
    assert_golden(done.stderr)


def test_a_shell_completes_commands_settings_and_their_words() -> None:
    Path("completion.bash").write_text(call("completion", "bash").out)
    Path("try.bash").write_text(
        "source completion.bash\n"
        'complete() { :; }; try() { COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=(); '
        '_shtab_accel_train; echo "${COMPREPLY[@]}"; }\n'
        "try accel-train ev; try accel-train run --optimizer.lr; try accel-train plan --schedule.type war\n"
    )
    done = subprocess.run(["bash", "try.bash"], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "evaluate",
        "--optimizer.lr_scaling.rule --optimizer.lr_scaling.base_batch_size",
        "warmup_cosine warmup_stable_decay",
    ]
