"""Hostile or damaged inputs and run folders: commands, escapes, bombs, foreign code. Names begin with the case."""

import importlib
import json
import os
import shutil
import signal
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from accel_train import fit, train
from accel_train.checkpoint.resume import read_state
from accel_train.checkpoint.run_recipe import named_recipe, read_recipe
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError
from accel_train.core.json_io import read_json
from accel_train.core.redaction import redact_text
from accel_train.core.terminal import without_controls
from accel_train.inference.finished_run import recipe_of_trained
from accel_train.model.compile import CACHE_VARIABLE, machine_kind
from accel_train.observe.run_folder import RECIPE_FILE, RunFolder
from accel_train.recipe.schema import Recipe
from accel_train.report.report import load_runs
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.commands import call, error_line
from tests.support.runs import (
    events,
    losses,
    recipe_dict,
    tiny_recipe,
    write_corpus,
    write_jsonl,
    write_lines,
    write_recipe_file,
    write_yaml,
)

pytestmark = pytest.mark.usefixtures("empty_folder")


def _starts(folder: Path) -> list[str]:
    return [event["message"] for event in events(folder, "start")]


QUIET: dict[str, Any] = {"learning_rate": 1e-3, "log": {"every_steps": 1, "progress": False}}


def _fitted(folder: Path, label: int = 1, activation: type[nn.Module] = nn.ReLU, **changed: Any) -> Any:
    torch.manual_seed(0)
    rows = torch.randn(32, 4)
    data = [(row, torch.tensor(label)) for row in rows]
    model = nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3))
    sign = changed.pop("sign", 1.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return sign * nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"ones": (model(batch[0]).argmax(1) == 1).float()}

    arguments: dict[str, Any] = {
        "loss": loss,
        "metrics": metrics,
        "eval_data": data,
        "max_steps": 12,
        "batch_size": 8,
        **QUIET,
        "learning_rate": 0.05,
        **changed,
    }
    return fit(model, data, output_dir=folder, **arguments)  # type: ignore[arg-type]


def test_attack_01_changed_inputs_train_a_new_model_and_keep_the_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    first = _fitted(run)
    assert first.metrics["ones"] == 1.0
    events = (run / "events.jsonl").read_bytes()
    capsys.readouterr()
    again = _fitted(run)  # nothing has changed
    assert f"{run}: finished at step 12" in capsys.readouterr().out
    assert (run / "events.jsonl").read_bytes() == events
    assert not list(run.glob("previous-*"))
    assert torch.equal(again.model.state_dict()["2.bias"], first.model.state_dict()["2.bias"])

    assert _fitted(run, label=2).metrics["ones"] == 0.0
    assert (run / "previous-1/summary.json").is_file()
    assert "training data" in _starts(run)[-1]
    for number, (changed, said) in enumerate(
        [
            ({"sign": 2.0}, "loss has changed"),
            ({"activation": nn.Tanh}, "model has changed"),
            (
                {"metrics": lambda model, batch: {"twos": (model(batch[0]).argmax(1) == 2).float()}},
                "metrics has changed",
            ),
            ({"collate": lambda samples: default_collate(list(samples)[::-1])}, "collate has changed"),
            ({"learning_rate": 0.04}, "optimizer.learning_rate was 0.05"),
        ],
        start=2,
    ):
        _fitted(run, label=2)
        _fitted(run, label=2, **changed)
        assert len(_starts(run)) == 1
        assert said in _starts(run)[0]
        assert (run / f"previous-{2 * number - 2}/summary.json").is_file()


def test_attack_01_an_interrupted_run_is_not_continued_under_another_loss(tmp_path: Path) -> None:
    class Killed(Exception):
        """Ends a run in its middle."""

    class Rows:
        """Data that end the run at a read, while `left` is set."""

        left = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            if torch.utils.data.get_worker_info() is None and Rows.left:
                Rows.left -= 1
                if not Rows.left:
                    raise Killed
            return torch.full((4,), float(index % 3)), torch.tensor(1)

    def start(sign: float, **more: Any) -> Any:
        torch.manual_seed(0)
        loss = lambda model, batch: sign * nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        common: dict[str, Any] = {"max_steps": 12, "batch_size": 8, "checkpoint": {"every_steps": 4}, **QUIET}
        common["data"] = {"train": "custom", "num_workers": 0}
        rows: Any = Rows()
        return fit(nn.Linear(4, 3), rows, loss=loss, output_dir=tmp_path, **{**common, **more})

    Rows.left = 32 + 16 + 6 * 8  # for the digest of the data, the trial of the loss, and six steps
    with pytest.raises(Killed):
        start(1.0)
    Rows.left = 0
    assert (tmp_path / "checkpoints/step-00000004").is_dir()
    start(-1.0)
    assert losses(tmp_path)[1] < 0
    assert len(losses(tmp_path)) == 12
    assert (tmp_path / "previous-1/checkpoints/step-00000004").is_dir()
    finished = start(1.0, resume="always")  # insists on the finished run of the other loss
    assert losses(tmp_path)[1] < 0
    assert finished.summary["steps"] == 12


def test_attack_02_a_sweep_on_changed_data_trains_its_runs_again(tmp_path: Path) -> None:
    rows = [("good fine", "pos"), ("bad sad", "neg")] * 20
    data = tmp_path / "d.csv"
    write_lines(data, "text,label", *(f"{text} {number},{label}" for number, (text, label) in enumerate(rows)))
    recipe = {
        "task": "text-classification",
        "output_dir": "out",
        "tokenizer": "bytes",
        "schedule": {"max_steps": 2},
        "model": {"config": {"model_type": "ngrams", "num_buckets": 2048, "max_characters": 3, "max_words": 1}},
        "data": {"train": "d.csv", "eval_fraction": 0.2, "max_length": 32, "num_workers": 0},
        "batch": {"global_batch_size": 8},
    }
    write_yaml("tc.yaml", recipe)
    sweep = ["sweep", "tc.yaml", "--seed", "0,1", "--output_dir", "out"]
    call(*sweep)
    call(*sweep)
    assert len(_starts(tmp_path / "out/seed=0")) == 1
    assert not (tmp_path / "out/seed=0/previous-1").exists()
    data.write_text(data.read_text().replace(",pos", ",x").replace(",neg", ",pos").replace(",x", ",neg"))
    call(*sweep)
    assert "data.fingerprint was" in _starts(tmp_path / "out/seed=0")[0]
    assert (tmp_path / "out/seed=0/previous-1/summary.json").is_file()


def _strangers_run(folder: Path, **sections: Any) -> Path:
    """Write the files of a finished run that the readers of run folders need, without training one."""
    run = folder / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (run / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    write_corpus(folder)
    write_yaml(run / RECIPE_FILE, recipe_dict(folder, **sections))
    write_jsonl(run / "metrics.jsonl", ({"split": "train", "step": step, "loss": 5.0 / step} for step in range(1, 5)))
    write_jsonl(run / "events.jsonl", [{"step": 0, "event": "start", "message": "starting"}])
    return run


@pytest.mark.parametrize(
    "target", ['curl -H "Authorization: Bearer BEARERSECRET777" x', ["curl", "-u", "bob:PASSWORD555"]]
)
def test_attack_03_a_command_in_log_notify_is_refused_and_reaches_no_file_or_terminal(
    target: str | list[str], corpus: Path
) -> None:
    recipe = write_recipe_file(corpus, log={"notify": [target]})
    said = "".join(call("run", recipe, code=2, named="log.notify"))
    assert said.count("error:") == 1
    assert not [secret for secret in ("BEARERSECRET777", "PASSWORD555") if secret in said]
    assert not (corpus / "run").exists()


def test_a_run_s_webhooks_are_left_out_when_it_is_opened(tmp_path: Path) -> None:
    run = _strangers_run(tmp_path, log={"notify": ["$WEBHOOK"]})
    assert recipe_of_trained(run).log.notify == ()


@pytest.mark.parametrize(
    "text",
    [
        "-H 'Authorization: Bearer {}'",
        '"Authorization": "Basic {}"',
        "bearer {}",
        "glpat-{}",
        "xoxb-{}",
        "github_pat_{}",
    ],
)
def test_attack_03_credentials_are_known_by_their_form(text: str) -> None:
    secret = "Abcd1234" * 3
    assert secret not in redact_text(f"a text {text.format(secret)} and more")
    assert redact_text(f"a text {text.format(secret)} and more").endswith("and more")
    assert redact_text("key AKIAABCDEFGHIJKLMNOP.") == "key REDACTED."
    plain = "the basic configuration, a bearer of news, token classification of xoxo"
    assert redact_text(plain) == plain


_ESCAPES = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;PWNED\x07\x1b[8mhidden\x1b[2A\x9b2J\x7f\rover"


@pytest.mark.parametrize(
    "words", [["watch", "RUN", "--once"], ["report", "RUN"], ["evaluate", "RUN"], ["verify", "RUN"]]
)
def test_attack_04_no_control_character_of_a_run_reaches_the_terminal(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _strangers_run(tmp_path / "a\x1b]0;PWNED\x07b", task=f"evil{_ESCAPES}:Task")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": "train", "step": _ESCAPES}) + "\n")
    event = {"time": "2026-11-25T00:00:00+00:00", "step": 4, "event": "done", "rank": 0, "message": f"ended{_ESCAPES}"}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    main([str(run) if word == "RUN" else word for word in words])
    for text in capsys.readouterr():
        assert not [c for c in text if c != "\n" and unicodedata.category(c) == "Cc"], text


def test_attack_04_colours_and_progress_bars_stay() -> None:
    ours = ["\r 10%|###", "\x1b[A", "\x1b[1;31merror:\x1b[0m text\n", "a\tb\n", "\x1b[H\x1b[J"]
    assert [without_controls(text) for text in ours] == ours
    assert without_controls("line\r\nline") == "line\nline"
    assert without_controls("\x1b[H\x1b[Jtext \udcff") == "?[H?[Jtext ?"


def test_attack_05_an_alias_bomb_in_a_recipe_ends_a_comparison_at_once(tmp_path: Path) -> None:
    runs = [_strangers_run(tmp_path / name) for name in ("a", "b")]
    bomb = ["zzz:", "  k0: &a0 {a: x, b: x}"]
    bomb += [f"  k{n}: &a{n} {{{', '.join(f'{c}: *a{n - 1}' for c in 'abcdefghi')}}}" for n in range(1, 9)]
    with (runs[1] / RECIPE_FILE).open("a") as file:
        file.write("\n" + "\n".join(bomb) + "\n")
    loaded = load_runs(runs)
    assert loaded[1].recipe is None  # 2 * 9^8 values
    call("report", *runs, "--out", tmp_path / "both.html")
    assert "cannot be read" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    "record", ['{"step":3,"kind":"nonfinite"}', '{"format": 1, "step": 3}', "[]", "{", '{"format": 1, "processes": 3}']
)
def test_attack_06_a_damaged_incident_costs_neither_the_report_nor_the_end_of_a_run(
    record: str, tmp_path: Path
) -> None:
    run = _strangers_run(tmp_path)
    incident = run / "incidents" / "step-00000003" / "incident.json"
    incident.parent.mkdir(parents=True)
    incident.write_text(record)
    assert str(incident) in call("report", run).err
    assert (run / "report.html").is_file()
    call("watch", run, "--once")
    error_line("replay", incident.parent)


class _EndsBadly(CausalLM):
    """Fails in everything that comes after the weights."""

    def baselines(self, data: TaskData) -> dict[str, float]:
        raise KeyError("a baseline")

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        raise RuntimeError("a sample")


def test_attack_06_nothing_after_the_weights_changes_the_exit_code(
    corpus: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("folder")

    for name in ("write_report", "examples_of", "_note_end"):
        monkeypatch.setattr(f"accel_train.training.finish.{name}", fail)
    monkeypatch.setattr("accel_train.observe.run_folder.RunFolder.write_summary", fail)
    recipe = write_recipe_file(corpus, task=f"{__name__}:_EndsBadly", schedule={"max_steps": 2})
    assert main(["run", str(recipe)]) == 0
    assert (corpus / "run" / "model" / "model.safetensors").is_file()
    said = capfd.readouterr().out
    assert said.count("warning: ") == 6, said


@pytest.mark.parametrize("damaged", [False, True])
def test_attack_08_a_resume_reads_the_end_of_the_metrics_only(damaged: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder:
        path = tmp_path / "run" / "metrics.jsonl"
        lines = [json.dumps({"split": "train", "step": n, "loss": 5.0}) for n in range(1, 30_001)]
        lines[29_500] += "damaged" * damaged
        lines.insert(29_000, json.dumps({"split": "eval", "step": 29_000, "loss": 5.0}))
        write_lines(path, *lines)
        inode = path.stat().st_ino
        folder.rewind(29_000, evaluated=False)
        expected = lines[:29_000] + [lines[29_501]] * damaged
        assert path.read_text().splitlines() == expected
        assert (path.stat().st_ino == inode) is not damaged, "cut off in its place"
        folder.append_metrics({"split": "train", "step": 29_001})
        folder.rewind(0)
        assert path.read_text().splitlines() == [lines[29_501]] * damaged
        path.write_text("torn")
        folder.rewind(5)
        assert path.read_text() == ""


def test_attack_09_changed_options_of_a_task_are_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nfrom accel_train import "
        "ModuleTask\n\n"
        "class Weighted(ModuleTask):\n"
        "    def data(self):\n        x = torch.ones(16, 3)\n        return TensorDataset(x, x.sum(1)), None\n"
        "    def model(self):\n        return nn.Linear(3, 1)\n"
        "    def loss(self, model, batch):\n"
        "        return self.recipe.options['weight'] * (model(batch[0])[:, 0] - batch[1]).square()\n"
    )
    (tmp_path / "weighted_task.py").write_text(source)
    recipe = {
        "task": "weighted_task:Weighted", "output_dir": "run", "schedule": {"max_steps": 8}, "options": {"weight": 1.0},
        "batch": {"global_batch_size": 4}, "checkpoint": {"every_steps": 4}, "log": {"progress": False},
    }  # fmt: skip
    write_yaml("w.yaml", recipe)
    call("run", "w.yaml")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000008")
    (tmp_path / "weighted_task.py").write_text(source.replace(".square()", ".abs()"))
    sys.modules.pop("weighted_task")
    importlib.invalidate_caches()
    call("run", "w.yaml", "--options", "{weight: 0.5}")
    changes = events(tmp_path / "run", "settings_changed")
    changed = {change["setting"]: (change["was"], change["now"]) for change in changes}
    assert changed["options.weight"] == (1.0, 0.5)
    assert "inputs.task" in changed
    sys.modules.pop("weighted_task")


LISTS = ("evaluate.metrics", "log.callbacks")
"""Settings that name code in a list."""


@pytest.mark.parametrize("named", ["task", "optimizer.name", "schedule.type", "evaluate.metrics"])
@pytest.mark.parametrize("place", ["beside the run", "in the run folder", "below the current folder"])
def test_attack_10_a_module_that_came_with_a_run_is_imported_by_consent_only(
    place: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"in the run folder": tmp_path / "run", "below the current folder": tmp_path / "evil"}.get(place, tmp_path)
    name = "evil.deep:Task" if place == "below the current folder" else "evil:Task"
    run, canary = _strangers_run(tmp_path, **_sections(named, name)), tmp_path / "canary"
    _canary_module(folder / f"{name.partition(':')[0].rpartition('.')[2]}.py", canary)
    monkeypatch.chdir(run if place == "in the run folder" else tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", ".")
    shown = os.path.relpath(run)
    for words in ("evaluate", "predict", "export", "export --quantize int8"):
        command, *flags = words.split()
        call(command, shown, *flags, code=2, named=f"--{named} {_value(named, name)}")
        assert not canary.exists(), words
        assert str(Path.cwd()) not in sys.path
    call("evaluate", shown, f"--{named}", "other:Task", code=2)
    assert not canary.exists()
    if named == "task":
        # It is not a task, which only its import shows.
        call("evaluate", shown, "--task", name, code=2, named="not derived")
        assert canary.exists()
    for loaded in ("evil.deep", "evil"):
        sys.modules.pop(loaded, None)


def test_attack_10_all_code_of_a_run_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = {"metrics": ["accuracy", "evil_b:score"]}
    run = _strangers_run(tmp_path, task="evil_a:Task", evaluate=evaluation, schedule={"type": "evil_b:curve"})
    for name in ("evil_a", "evil_b"):
        _canary_module(tmp_path / f"{name}.py", tmp_path / "canary")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = ["--task", "evil_a:Task", "--schedule.type", "evil_b:curve"]
    metrics = "--evaluate.metrics '[accuracy, evil_b:score]'"
    call("evaluate", run, code=2, named=f"add {' '.join(flags)} {metrics} if you trust them")
    call("evaluate", run, *flags, code=2, named=f"add {metrics} if you trust it")
    assert not (tmp_path / "canary").exists()


def _sections(named: str, name: str) -> dict[str, Any]:
    """Return the sections of a recipe that names code of one's own in a setting."""
    section, _, field = named.partition(".")
    value = [name] if named in LISTS else name
    return {"task": name} if named == "task" else {section: {field: value}, "task": "causal-lm"}


def _value(named: str, name: str) -> str:
    """Return the value of the flag that consents, as a shell takes it."""
    return f"'[{name}]'" if named in LISTS else name


def test_attack_10_an_installed_module_needs_no_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _strangers_run(tmp_path / "sent", task="a_task_of_mine:Task")
    own = tmp_path / "own"
    own.mkdir()
    (own / "a_task_of_mine.py").write_text("class Task: pass\n")
    monkeypatch.chdir(tmp_path / "sent")
    monkeypatch.setattr(sys, "path", [*sys.path, str(own)])
    call("evaluate", run, code=2, named="a_task_of_mine:Task' is not derived")
    assert str(Path.cwd()) not in sys.path, "an optional import of the task would be looked up there"
    del sys.modules["a_task_of_mine"]
    # A file of the same name where the reader stands would be imported in its place by `python -m`.
    shutil.copy(own / "a_task_of_mine.py", tmp_path / "sent")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "sent"), *sys.path])
    call("evaluate", run, code=2, named="--task a_task_of_mine:Task")


def _canary_module(file: Path, canary: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"open({str(canary)!r}, 'w').close()\nclass Task: pass\n")


@pytest.mark.parametrize("named", ["task", "optimizer.name", "schedule.type", *LISTS])
@pytest.mark.parametrize("place", ["a run folder", "below the current folder"])
def test_code_beside_a_strangers_recipe_runs_by_consent_on_the_command_line_only(
    place: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "stranger_a.code:Task" if place == "below the current folder" else "stranger_b:Task"
    sections = _sections(named, name)
    if place == "a run folder":
        recipe = _strangers_run(tmp_path, **sections) / RECIPE_FILE
        _canary_module(tmp_path / "stranger_b.py", tmp_path / "canary")
    else:
        write_corpus(tmp_path)
        _canary_module(tmp_path / "stranger_a" / "code.py", tmp_path / "canary")
        recipe = tmp_path / "stranger_a" / "recipe.yaml"
        write_yaml(recipe, recipe_dict(tmp_path, **sections))
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    for words in (["plan"], ["data"], ["prepare"], ["find-lr"], ["run"], ["rehearse"], ["sweep"]):
        more = ["--seed", "0,1"] if words == ["sweep"] else []
        call(*words, recipe, *more, code=2, named=f"--{named} {_value(named, name)}")
        assert not (tmp_path / "canary").exists(), words
    if named not in LISTS:  # a plan imports neither metrics nor callbacks
        call("plan", recipe, f"--{named}", name, code=2)  # not of the kind, which only its import shows
        assert (tmp_path / "canary").exists()
    for module in ("stranger_b", "stranger_a.code", "stranger_a"):
        sys.modules.pop(module, None)


def test_a_module_in_the_current_folder_needs_no_consent_for_a_recipe_of_ones_own(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    for folder in (corpus, corpus / "recipes"):
        _canary_module(corpus / "of_ones_own.py", corpus / "canary")
        folder.mkdir(exist_ok=True)
        write_yaml(folder / "recipe.yaml", recipe_dict(corpus, task="of_ones_own:Task"))
        call("plan", folder / "recipe.yaml", code=2, named="not derived")
        assert (corpus / "canary").exists()
        (corpus / "canary").unlink()
        sys.modules.pop("of_ones_own")


def test_commands_on_a_run_leave_its_callbacks_out(tmp_path: Path) -> None:
    run = _strangers_run(tmp_path, log={"callbacks": ["evil:Callback"]})
    assert read_recipe(run).log.callbacks == ()


def test_a_recipe_of_a_run_does_not_consent_to_the_code_of_a_model(tmp_path: Path) -> None:
    run = _strangers_run(tmp_path, task="causal-lm", model={"trust_remote_code": True})
    for path, consents in ((run / RECIPE_FILE, False), (tmp_path / "mine.yaml", True)):
        if consents:
            shutil.copy(run / RECIPE_FILE, path)
        assert named_recipe(path).model.trust_remote_code is consents
    assert named_recipe(run / RECIPE_FILE, ["--model.trust_remote_code", "true"]).model.trust_remote_code


def test_attack_11_an_empty_kernel_in_the_kept_cache_is_removed_and_the_run_starts(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(corpus / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.delenv(CACHE_VARIABLE)
    kept = corpus / "cache" / "compiled" / machine_kind()
    kernel = kept / "ab" / "cabc.main.so"
    kernel.parent.mkdir(parents=True)
    for folder in (kept.parent, kept):
        folder.chmod(0o700)
    kernel.touch()
    recipe = tiny_recipe(corpus, precision={"compile": True}, schedule={"max_steps": 2})
    torch.compiler.reset()
    torch.compiler.set_default_backend("eager")  # nothing waits for a C++ compiler
    try:
        train(recipe)
    finally:
        torch.compiler.set_default_backend(None)
        torch.compiler.reset()
    assert not kernel.exists()
    choice = read_json(corpus / "run" / "summary.json")["choices"]["compile_cache"]
    assert "removed 1 file" in json.dumps(choice)


@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "events.jsonl",
        "launches.jsonl",
        "evaluation.json",
        "examples.json",
        RECIPE_FILE,
        ".accel_train.json",
    ],
)
def test_a_pipe_in_place_of_a_file_of_a_run_hangs_no_reader(name: str, tmp_path: Path) -> None:
    run = _strangers_run(tmp_path)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    try:
        call("report", run, "--out", tmp_path / "page.html")
        call("watch", run, "--once")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["a" * 300, "\udcff"])
def test_a_name_that_no_folder_can_have_is_one_line(name: str, corpus: Path) -> None:
    recipe = write_recipe_file(corpus)
    assert "output_dir" in error_line("run", recipe, "--output_dir", corpus / name)


@pytest.mark.parametrize(
    ("change", "step"),
    [({"settings": [1]}, 3), ({"origins": 3}, 3), ({"state": {"step": 3, "num_targets_seen": 10**400}}, 3)],
)
def test_a_trainer_json_that_no_run_wrote_is_one_error(change: dict[str, Any], step: int, tmp_path: Path) -> None:
    usual = {
        "state": {"step": step},
        "identity": {"schedule.max_steps": 9},
        "settings": {},
        "origins": {},
        "scaler": None,
    }
    (tmp_path / "manifest.json").write_text(json.dumps({"step": step}))
    (tmp_path / "trainer.json").write_text(json.dumps(usual))
    assert read_state(tmp_path).step == step
    (tmp_path / "trainer.json").write_text(json.dumps({**usual, **change}))
    with pytest.raises(CheckpointError):
        read_state(tmp_path)
