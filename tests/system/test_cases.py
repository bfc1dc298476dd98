"""Every reported fault, rebuilt small: its input is read right, or refused. A test name begins with the case."""

import csv
import importlib
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)
from transformers.optimization import AdafactorSchedule
from transformers.trainer import Trainer as StockTrainer

import accel_train
from accel_train import fit, train
from accel_train.checkpoint.store import changed_descriptions, check
from accel_train.checkpoint.trainer_state import read_state
from accel_train.checkpoint.verify import format_verified, verify
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError, DataError
from accel_train.core.redaction import redact_text
from accel_train.core.terminal import without_controls
from accel_train.data.delimited import read_delimited
from accel_train.data.sources import resolve_sources
from accel_train.data.tables import read_rows
from accel_train.data.text.tokenizers import byte_tokenizer, pretrained_tokenizer
from accel_train.hf import Seq2SeqTrainer, Trainer
from accel_train.inference.finished_run import recipe_of_trained
from accel_train.model.compile import CACHE_VARIABLE, machine_kind
from accel_train.model.kernels.documents import same_document_mask
from accel_train.observe import metrics_reader
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.observe.run_folder import RECIPE_FILE, RunFolder, parse_line, read_metrics
from accel_train.recipe.data import Data
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.schema import Recipe
from accel_train.report.report import load_runs
from accel_train.runtime.heartbeat import HeartbeatStore
from accel_train.task import Scores, TaskData
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.causal_lm.data import check_row, columns_of
from accel_train.tasks.causal_lm.encoding import Example, chat_encoder
from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from accel_train.tasks.text_classification.data import load_labelled_texts
from tests.support.hf_models import Plain, arguments, bert, both, difference, plain_rows, rows
from tests.support.runs import (
    SCENES,
    TINY_MODEL,
    events,
    losses,
    metrics,
    recipe_dict,
    run,
    run_forked_command,
    write_base,
    write_corpus,
    write_recipe_file,
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    """An empty current folder, in no launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_TRAIN_DEBUG", raising=False)


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
    assert "training data has changed" in _starts(run)[-1]
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
        common["checkpoint"] = {"every_steps": 4}
        return fit(nn.Linear(4, 3), Rows(), loss=loss, output_dir=tmp_path, **{**common, **more})  # type: ignore[arg-type]

    Rows.left = 32 + 6 * 8
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
    data.write_text("text,label\n" + "".join(f"{text} {number},{label}\n" for number, (text, label) in enumerate(rows)))
    recipe = {
        "task": "text-classification",
        "output_dir": "out",
        "tokenizer": "bytes",
        "schedule": {"max_steps": 2},
        "model": {"config": {"model_type": "ngrams", "num_buckets": 2048, "max_characters": 3, "max_words": 1}},
        "data": {"train": "d.csv", "eval_fraction": 0.2, "max_length": 32, "num_workers": 0},
        "batch": {"global_batch_size": 8},
    }
    (tmp_path / "tc.yaml").write_text(json.dumps(recipe))
    sweep = ["sweep", "tc.yaml", "--seed", "0,1", "--output_dir", "out"]
    assert main(sweep) == 0
    assert main(sweep) == 0
    assert len(_starts(tmp_path / "out/seed=0")) == 1
    assert not (tmp_path / "out/seed=0/previous-1").exists()
    data.write_text(data.read_text().replace(",pos", ",x").replace(",neg", ",pos").replace(",x", ",neg"))
    assert main(sweep) == 0
    assert "data.fingerprint was" in _starts(tmp_path / "out/seed=0")[0]
    assert (tmp_path / "out/seed=0/previous-1/summary.json").is_file()


def _strangers_run(folder: Path, **sections: Any) -> Path:
    """Write the files of a finished run that the readers of run folders need, without training one."""
    run = folder / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (run / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    write_corpus(folder)
    (run / RECIPE_FILE).write_text(yaml.safe_dump(recipe_dict(folder, **sections)))
    lines = [{"split": "train", "step": step, "loss": 5.0 / step} for step in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text(json.dumps({"step": 0, "event": "start", "message": "starting"}) + "\n")
    return run


@pytest.mark.parametrize(
    "target", ['curl -H "Authorization: Bearer BEARERSECRET777" x', ["curl", "-u", "bob:PASSWORD555"]]
)
def test_attack_03_a_command_in_log_notify_is_refused_and_reaches_no_file_or_terminal(
    target: str | list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, log={"notify": [target]})
    assert main(["run", str(recipe)]) == 2
    said = "".join(capsys.readouterr())
    assert said.count("error:") == 1
    assert "log.notify" in said
    assert not [secret for secret in ("BEARERSECRET777", "PASSWORD555") if secret in said]
    assert not (tmp_path / "run").exists()


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
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "both.html")]) == 0
    assert "cannot be read" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    "record", ['{"step":3,"kind":"nonfinite"}', '{"format": 1, "step": 3}', "[]", "{", '{"format": 1, "processes": 3}']
)
def test_attack_06_a_damaged_incident_costs_neither_the_report_nor_the_end_of_a_run(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _strangers_run(tmp_path)
    incident = run / "incidents" / "step-00000003" / "incident.json"
    incident.parent.mkdir(parents=True)
    incident.write_text(record)
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").is_file()
    assert str(incident) in capsys.readouterr().err
    assert main(["watch", str(run), "--once"]) == 0
    assert main(["replay", str(incident.parent)]) == 2
    assert capsys.readouterr().err.count("error:") == 1


class _EndsBadly(CausalLM):
    """Fails in everything that comes after the weights."""

    def baselines(self, data: TaskData) -> dict[str, float]:
        raise KeyError("a baseline")

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        raise RuntimeError("a sample")


def test_attack_06_nothing_after_the_weights_changes_the_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("folder")

    for name in ("write_report", "examples_of", "_note_end"):
        monkeypatch.setattr(f"accel_train.training.finish.{name}", fail)
    monkeypatch.setattr("accel_train.observe.run_folder.RunFolder.write_summary", fail)
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, task=f"{__name__}:_EndsBadly", schedule={"max_steps": 2})
    assert main(["run", str(recipe)]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    said = capfd.readouterr().out
    assert said.count("warning: ") == 6, said


class CountedStore:
    """A store that counts its calls."""

    def __init__(self) -> None:
        self.store, self.num_calls = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.num_calls += 1
            return getattr(self.store, name)(*arguments)

        return call


@pytest.mark.parametrize("rank", [0, 8])
def test_attack_07_the_start_of_a_process_makes_as_many_store_calls_in_a_large_run_as_in_a_small_one(rank: int) -> None:
    calls = {}
    for num_processes in (64, 4096):
        store = CountedStore()
        others = [HeartbeatStore(store, each, num_processes) for each in range(rank + 1, rank + 8)]
        for other in others:
            other.exchange()
        status = store.get(f"status/{rank + 1}").decode().replace(socket.gethostname(), "elsewhere")
        for each in {*range(num_processes)} - {*range(rank, rank + 8)}:
            store.set(f"status/{each}", status)
        store.add("joined", num_processes - 8)
        own, before = HeartbeatStore(store, rank, num_processes), store.num_calls
        own.meet()
        start = store.num_calls
        own.exchange()
        calls[num_processes] = (start - before, store.num_calls - start)
        assert sorted(own._known) == sorted({0, *range(rank, rank + 8)})
    assert calls[4096] == calls[64]
    assert calls[64][1] < 8


def test_attack_08_a_long_run_is_read_once_in_little_memory_and_keeps_its_extremes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_reader, "WHOLE_BYTES", 2**16)
    monkeypatch.setattr(metrics_reader, "GROUPS", 50)
    run = _strangers_run(tmp_path)
    steps = 20_000
    odd = {7_001: 99.0, 7_002: "NaN", 9_001: -3.0}
    lines = [
        {"split": "train", "step": n, "loss": odd.get(n, 5.0), "grad_norm": 1.0 + (n == 123)} for n in range(1, steps)
    ]
    lines.insert(100, {"split": "eval", "step": 100, "loss": 4.0})
    path = run / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    reader = MetricsReader(path)
    kept = reader.read()
    assert len(kept) < 500
    assert [line["step"] for line in kept] == sorted(line["step"] for line in kept)
    by_step = {line["step"]: line for line in kept if line["split"] == "train"}
    assert by_step[7_001]["loss"] == 99.0
    assert math.isnan(by_step[7_002]["loss"])
    assert by_step[9_001]["loss"] == -3.0
    assert by_step[123]["grad_norm"] == 2.0
    assert [step for step in range(steps - 60, steps) if step not in by_step] == []
    assert [line for line in kept if line["split"] == "eval"] == [lines[100]]
    parsed = []
    monkeypatch.setattr(metrics_reader, "parse_line", lambda *a: (parsed.append(a), parse_line(*a))[1])
    with path.open("a") as file:
        file.write(f'ain", "step": {steps}, "loss": 1.5}}\n')
    assert reader.read()[-1] == {"split": "train", "step": steps, "loss": 1.5}
    assert len(parsed) < 500
    os.truncate(path, 3_000)  # a rollback
    assert reader.read() == read_metrics(run)


@pytest.mark.parametrize("damaged", [False, True])
def test_attack_08_a_resume_reads_the_end_of_the_metrics_only(damaged: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder:
        path = tmp_path / "run" / "metrics.jsonl"
        lines = [json.dumps({"split": "train", "step": n, "loss": 5.0}) for n in range(1, 30_001)]
        lines[29_500] += "damaged" * damaged
        lines.insert(29_000, json.dumps({"split": "eval", "step": 29_000, "loss": 5.0}))
        path.write_text("".join(f"{line}\n" for line in lines))
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
    (tmp_path / "w.yaml").write_text(json.dumps(recipe))
    assert main(["run", "w.yaml"]) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000008")
    (tmp_path / "weighted_task.py").write_text(source.replace(".square()", ".abs()"))
    sys.modules.pop("weighted_task")
    importlib.invalidate_caches()
    assert main(["run", "w.yaml", "--options", "{weight: 0.5}"]) == 0
    changes = events(tmp_path / "run", "settings_changed")
    changed = {change["setting"]: (change["was"], change["now"]) for change in changes}
    assert changed["options.weight"] == (1.0, 0.5)
    assert "inputs.task" in changed
    sys.modules.pop("weighted_task")


@pytest.mark.parametrize("place", ["beside the run", "in the run folder", "below the current folder"])
def test_attack_10_a_module_that_came_with_a_run_is_imported_by_consent_only(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"in the run folder": tmp_path / "run", "below the current folder": tmp_path / "evil"}.get(place, tmp_path)
    name = "evil.deep" if place == "below the current folder" else "evil"
    run = _strangers_run(tmp_path, task=f"{name}:Task")
    folder.mkdir(exist_ok=True)
    (folder / f"{name.rpartition('.')[2]}.py").write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w').close()\nclass Task: pass\n"
    )
    monkeypatch.chdir(run if place == "in the run folder" else tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", ".")
    shown = os.path.relpath(run)
    for words in (
        ["evaluate"],
        ["predict"],
        ["export"],
        ["export", "--quantize", "int8"],
        ["verify", "--resume-proof"],
    ):
        assert main([words[0], shown, *words[1:]]) in ((2, 4) if words[0] == "verify" else (2,)), words
        said = capsys.readouterr().err
        assert not (tmp_path / "canary").exists(), words
        assert words[0] == "verify" or f"--task {name}:Task" in said, said
        assert str(Path.cwd()) not in sys.path
    assert main(["evaluate", shown, "--task", "other:Task"]) == 2
    assert not (tmp_path / "canary").exists()
    assert main(["evaluate", shown, "--task", f"{name}:Task"]) == 2  # it is not a task, which only its import shows
    assert (tmp_path / "canary").exists()
    assert "lacks" in capsys.readouterr().err
    for loaded in ("evil.deep", "evil"):
        sys.modules.pop(loaded, None)


def test_attack_10_an_installed_module_needs_no_consent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _strangers_run(tmp_path / "sent", task="a_task_of_mine:Task")
    own = tmp_path / "own"
    own.mkdir()
    (own / "a_task_of_mine.py").write_text("class Task: pass\n")
    monkeypatch.chdir(tmp_path / "sent")
    monkeypatch.setattr(sys, "path", [*sys.path, str(own)])
    assert main(["evaluate", str(run)]) == 2
    assert "a_task_of_mine:Task' lacks" in capsys.readouterr().err
    assert str(Path.cwd()) not in sys.path, "an optional import of the task would be looked up there"
    del sys.modules["a_task_of_mine"]
    # A file of the same name where the reader stands would be imported in its place by `python -m`.
    shutil.copy(own / "a_task_of_mine.py", tmp_path / "sent")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "sent"), *sys.path])
    assert main(["evaluate", str(run)]) == 2
    assert "--task a_task_of_mine:Task" in capsys.readouterr().err


def test_attack_11_an_empty_kernel_in_the_kept_cache_is_removed_and_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.delenv(CACHE_VARIABLE)
    kept = tmp_path / "cache" / "compiled" / machine_kind()
    kernel = kept / "ab" / "cabc.main.so"
    kernel.parent.mkdir(parents=True)
    for folder in (kept.parent, kept):
        folder.chmod(0o700)
    kernel.touch()
    write_corpus(tmp_path)
    recipe = recipe_dict(tmp_path, precision={"compile": True}, schedule={"max_steps": 2})
    torch.compiler.reset()
    torch.compiler.set_default_backend("eager")  # nothing waits for a C++ compiler
    try:
        train(Recipe.model_validate(recipe))
    finally:
        torch.compiler.set_default_backend(None)
        torch.compiler.reset()
    assert not kernel.exists()
    choice = json.loads((tmp_path / "run" / "summary.json").read_text())["choices"]["compile_cache"]
    assert "removed 1 file" in json.dumps(choice)


@pytest.mark.parametrize("batch", ["time first", "graphs", "nested", "weights first", "0-dim first"])
def test_bugs_01_loss_is_divided_by_the_samples(batch: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randn(length, 3, generator=generator) for length in (10, 5, 7, 6)]
    targets = torch.randn(4, generator=generator)
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    collate: Callable[[Sequence[Any]], Any] | None = None
    samples: list[Any] = list(zip(sequences, targets, strict=True))
    predict: Callable[[nn.Module, Any], Tensor]
    if batch == "nested":
        samples = [({"x": row[0], "z": row[1]}, target) for row, target in samples]
        predict = lambda model, batch: model(batch[0]["x"] + batch[0]["z"])[:, 0]  # noqa: E731
    elif batch == "graphs":
        samples = [(row[:4], target) for row, target in samples]
        collate = lambda samples: [  # noqa: E731
            torch.cat([row for row, _ in samples]),
            torch.stack([target for _, target in samples]),
            torch.arange(len(samples)).repeat_interleave(4),
        ]
        predict = lambda model, batch: torch.zeros(len(batch[1])).index_add(0, batch[2], model(batch[0])[:, 0])  # noqa: E731
    else:
        first = {"time first": (), "weights first": (torch.ones(3),), "0-dim first": (torch.tensor(2.0),)}[batch]
        collate = lambda samples: (  # noqa: E731
            *first,
            pad_sequence([row for row, _ in samples]),
            torch.stack([target for _, target in samples]),
        )
        predict = lambda model, batch: model(batch[-2]).sum(0)[:, 0]  # noqa: E731

    def target(batch: Any) -> Tensor:
        found: Tensor = batch[1] if batch_name in ("nested", "graphs") else batch[-1]
        return found

    batch_name = batch

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (predict(model, batch) - target(batch)).square().mean()

    def off(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"off": (predict(model, batch) - target(batch)).abs()}

    whole = (collate or default_collate)(samples)
    expected = loss(model, whole)
    gradient = torch.linalg.vector_norm(
        torch.stack([each.norm() for each in torch.autograd.grad(expected, list(model.parameters()))])
    )
    common: dict[str, Any] = {"loss": loss, "collate": collate, "max_steps": 1, "batch_size": 4, **QUIET}
    result = fit(model, samples, eval_data=samples, metrics=off, output_dir=tmp_path / "run", **common)  # type: ignore[arg-type]
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(gradient.item(), rel=1e-5)
    with torch.no_grad():
        assert result.metrics["off"] == pytest.approx(off(model, whole)["off"].mean().item(), rel=1e-5)
        assert result.metrics["loss"] == pytest.approx(loss(model, whole).item(), rel=1e-5)


def test_bugs_02_a_trainer_whose_labels_are_all_ignored_changes_no_bit_and_ends(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [{"input_ids": torch.arange(8) + 2, "labels": torch.full((8,), -100)} for _ in range(10)]
    settings: dict[str, Any] = {"max_steps": 20, "learning_rate": 0.01, "weight_decay": 0.1, "logging_steps": 1}
    args = TrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=2, report_to="none", use_cpu=True, **settings
    )
    with pytest.raises(DataError):
        Trainer(model, args, train_dataset=rows).train()
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    lines = metrics(tmp_path / "run")
    assert lines
    assert all(line["skipped"] and line["loss"] == "NaN" and line["num_targets"] == 0 for line in lines)


def test_bugs_02_one_ignored_batch_of_a_trainer_changes_no_bit_and_counts_in_no_mean(tmp_path: Path) -> None:
    """The second step reads rows 2 and 3, whose labels are ignored."""
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip

    ids = [(torch.arange(8) * (row + 3)) % 30 + 2 for row in range(6)]
    rows = [
        {"input_ids": each, "labels": torch.full((8,), -100) if row in (2, 3) else each} for row, each in enumerate(ids)
    ]
    weights, means = [], []
    for steps in (1, 2, 3):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        settings: dict[str, Any] = {"max_steps": steps, "learning_rate": 0.01, "weight_decay": 0.1, "logging_steps": 1}
        args = TrainingArguments(
            str(tmp_path / str(steps)), per_device_train_batch_size=2, report_to="none", use_cpu=True,
            lr_scheduler_type="constant", save_strategy="no", train_sampling_strategy="sequential", **settings,
        )  # fmt: skip
        means.append(Trainer(model, args, train_dataset=rows).train().training_loss)
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert not all(weights[1][name].equal(weights[2][name]) for name in weights[0])
    assert means[1] == means[0] > 1


def test_bugs_02_masks_that_are_all_ignored_end_a_run_with_exit_2(tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for number in range(8):
        image = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(image).save(f"data/images/{number}.png")
        Image.fromarray(np.full((32, 32), 255, np.uint8)).save(f"data/masks/{number}.png")
    data = {"train": "data", "eval_fraction": 0, "image_size": 32, "label_names": ["a", "b"], "num_workers": 0}
    recipe = {
        **SCENES,
        "output_dir": "run",
        "data": data,
        "batch": {"global_batch_size": 4},
        "schedule": {"max_steps": 12},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "recipe.yaml"]) == 2
    assert not Path("run/model").exists()


EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}


def test_bugs_03_a_metric_that_is_an_array_is_logged_as_a_list_and_the_run_ends_saved(tmp_path: Path) -> None:
    given = {"f1_by_class": np.array([0.5, 0.7]), "best": np.float32(0.25), "spread": torch.tensor([[1.0, 2.0]])}
    trainer = Trainer(
        Plain(),
        arguments(tmp_path, **EVALUATING),
        train_dataset=plain_rows(16),
        eval_dataset=plain_rows(8),
        compute_metrics=lambda prediction: dict(given),
    )
    trainer.train()
    (tmp_path / "model" / "model.safetensors").stat()
    for folder in ("model", "checkpoints/step-00000004"):
        assert (tmp_path / folder).is_dir()
    logged = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    for line in logged:
        found = (line["eval_f1_by_class"], line["eval_best"], line["eval_spread"])
        assert found == ([0.5, 0.7], 0.25, [[1.0, 2.0]])
    assert [line["f1_by_class"] for line in metrics(tmp_path, "eval")] == [[0.5, 0.7]] * 2
    trainer.save_metrics("eval", trainer.evaluate())
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_f1_by_class"] == [0.5, 0.7]


def test_bugs_03_a_metric_that_json_cannot_hold_is_refused_by_name_at_the_first_evaluation(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train_dataset": plain_rows(16), "eval_dataset": plain_rows(8)}
    trainer = Trainer(Plain(), arguments(tmp_path, **EVALUATING), compute_metrics=lambda _: {"plot": object()}, **data)
    with pytest.raises(ValueError, match="eval_plot"):
        trainer.train()
    assert trainer.state.global_step == 2


class Remembers(TrainerCallback, transformers.trainer_callback.ExportableState):
    """A callback whose state holds what it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"value": self.value}}


def test_bugs_03_the_state_of_a_callback_is_saved_as_lists_or_refused_before_the_first_step(tmp_path: Path) -> None:
    def trained(folder: Path, value: Any) -> Trainer:
        args = arguments(folder, max_steps=1)
        trainer = Trainer(Plain(), args, callbacks=[Remembers(value)], train_dataset=plain_rows(16))
        trainer.train()
        return trainer

    trained(tmp_path / "array", np.arange(3))
    saved = json.loads((tmp_path / "array" / "checkpoint-1" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Remembers"]["attributes"] == {"value": [0, 1, 2]}
    with pytest.raises(ValueError, match="callback"):
        trained(tmp_path / "object", object())
    assert not (tmp_path / "object" / "checkpoints" / "step-00000001").exists()


class ArrayScores(CausalLM):
    """A task whose metrics and data facts are what NumPy and torch return."""

    def score(self, loss: float, totals: Mapping[str, Any], data: Any) -> Scores:
        found: Any = {"worst": np.float32(loss), "by_class": np.array([1.0, 2.0])}
        return Scores(found, {"matrix": torch.eye(2), "kind": {1}})

    def baselines(self, data: Any) -> dict[str, float]:
        return {}


def test_bugs_03_a_task_may_return_arrays_as_metrics_and_the_best_may_be_a_numpy_number(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_dict(
        tmp_path,
        task=f"{__name__}:ArrayScores",
        schedule={"max_steps": 2},
        evaluate={"every_steps": 1, "metric_for_best_model": "worst"},
        checkpoint={"every_steps": 1},
    )
    result = train(Recipe.model_validate(recipe))
    assert result.summary["eval"]["by_class"] == [1.0, 2.0]
    assert [line["by_class"] for line in metrics(tmp_path / "run", "eval")] == [[1.0, 2.0]] * 2
    assert type(result.summary["best_metric"]) is float
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["details"]["matrix"] == [
        [1.0, 0.0],
        [0.0, 1.0],
    ]
    refused = recipe_dict(
        tmp_path,
        task=f"{__name__}:ArrayScores",
        output_dir=str(tmp_path / "refused"),
        schedule={"max_steps": 1},
        evaluate={"every_steps": 1, "metric_for_best_model": "by_class"},
    )
    with pytest.raises(ValueError, match=r"metric_for_best_model=by_class"):
        train(Recipe.model_validate(refused))


@pytest.mark.parametrize("where", ["whole", "part"])
def test_bugs_04_weights_of_a_compiled_module_have_its_own_names(tmp_path: Path, where: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    given: Any = torch.compile(plain, backend="eager")
    if where == "part":
        given = nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1])
    data = TensorDataset(torch.randn(8, 3), torch.randn(8))
    result = fit(
        given, data, loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(), output_dir=tmp_path,
        max_steps=2, batch_size=4, **QUIET,
    )  # fmt: skip
    assert result.model is given
    saved = load_file(tmp_path / "model/model.safetensors")
    assert saved.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(saved["0.weight"], plain[0].weight)
    assert plain._compiled_call_impl is not None or where == "part"


def test_bugs_05_a_loss_of_another_shape_than_the_samples_is_refused(tmp_path: Path) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1))
    arguments: dict[str, Any] = {"output_dir": tmp_path / "run", "max_steps": 1, "batch_size": 4, **QUIET}
    with pytest.raises(ValueError, match=r"loss has shape \(4, 4\) for 4 samples"):
        fit(nn.Linear(3, 1), data, loss=lambda model, batch: (model(batch[0]) - batch[1]).square(), **arguments)
    with pytest.raises(ValueError, match=r"loss has shape \(4, 1\) for 4 samples"):
        fit(nn.Linear(3, 1), data, loss=lambda model, batch: model(batch[0]).square(), **arguments)
    with pytest.raises(ValueError, match=r"metric wide has shape \(8, 8\) for 8 samples"):
        fit(
            nn.Linear(3, 1),
            data,
            eval_data=data,
            loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
            metrics=lambda model, batch: {"wide": model(batch[0]) - batch[1]},
            **arguments,
        )


def test_bugs_06_a_part_of_a_section_is_enough(tmp_path: Path) -> None:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return model(batch[0])[:, 0].square()

    rows = torch.arange(8.0)[:, None].expand(8, 3)
    more: dict[str, Any] = {"data": {"shuffle": False}}
    fit(
        nn.Linear(3, 1), TensorDataset(rows), loss=loss, output_dir=tmp_path, max_steps=2, batch_size=4, **more, **QUIET
    )
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


FIT_WITH_BATCH_NORM = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from accel_train import fit

torch.manual_seed(0)
features = torch.randn(36, 3)
# A bias before a batch norm has a gradient of 0, and Adam makes steps of its rounding.
module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))
fit(
    module, TensorDataset(features, features.sum(1)), output_dir=sys.argv[1], max_steps=4, batch_size=8,
    loss=lambda module, batch: (module(batch[0])[:, 0] - batch[1]).square(), learning_rate=0.01,
    log={"every_steps": 1}, parallel={"sync_batch_norm": sys.argv[2] == "synced"},
    data={"train": "custom", "last_batch": sys.argv[3]}, batch={"per_device_batch_size": int(sys.argv[4])},
)
"""


@pytest.mark.parametrize("norm", ["own", "synced"])
def test_bugs_07_batch_norm_is_the_same_on_2_processes_where_it_is_synced_and_said_to_differ_elsewhere(
    tmp_path: Path, norm: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(FIT_WITH_BATCH_NORM)
    said = []
    for processes in (1, 2):
        words = [str(tmp_path / f"run-{processes}"), norm if processes == 2 else "own", "carry", str(8 // processes)]
        done = run_forked_command(words, processes, program)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    alone, together = (load_file(tmp_path / f"run-{number}" / "model" / "model.safetensors") for number in (1, 2))
    assert alone.keys() == together.keys()
    gap = max(float((alone[name].double() - together[name].double()).abs().max()) for name in alone)
    apart = max(abs(losses(tmp_path / "run-1")[step] - losses(tmp_path / "run-2")[step]) for step in (1, 2, 3, 4))
    assert (gap < 2e-6 and apart < 1e-5) == (norm == "synced"), (gap, apart)
    assert "take statistics of" not in said[0]
    assert ("take statistics of 4 samples" in said[1] and "parallel.sync_batch_norm" in said[1]) == (norm == "own")


def test_bugs_07_a_last_batch_of_one_sample_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Of 36 samples in steps of 7, the last step of an epoch has one."""
    program = tmp_path / "program.py"
    program.write_text(
        FIT_WITH_BATCH_NORM.replace("batch_size=8", "batch_size=7").replace("max_steps=4", "max_steps=6")
    )
    dropped = run_forked_command([str(tmp_path / "drop"), "own", "drop", "7"], 1, program)
    assert dropped.returncode == 0, dropped.stderr
    short = run_forked_command([str(tmp_path / "short"), "own", "short", "7"], 1, program)
    assert short.returncode != 0
    assert "data.last_batch" in short.stderr
    assert not (tmp_path / "short" / "metrics.jsonl").exists() or not losses(tmp_path / "short")


def _recipe(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())


def test_data_01_a_cut_letter_does_not_turn_utf8_into_mojibake(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{word} {number},{name}" for name, word in (("ru", "поезд"), ("el", "τρένο")) for number in range(20)]
    whole = "\n".join(["text,language", *rows, ""]).encode()
    cut = whole.replace("поезд 7".encode(), "поезд".encode()[:-1])
    assert len(cut) < len(whole)
    Path("cut.csv").write_bytes(cut)
    assert main(["finetune", "cut.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "cut.csv:9:" in said
    assert "data.encoding_errors: replace" in said
    assert not Path("runs").exists()
    assert main(["finetune", "cut.csv", "--dry-run", "--data.encoding_errors", "replace"]) == 0
    assert "encoding" not in _recipe("runs/cut.yaml")["data"]
    Path("whole.csv").write_bytes(whole)
    assert main(["finetune", "whole.csv", "--dry-run", "--data.encoding", "latin-1"]) == 2
    assert "whole.csv is UTF-8" in capsys.readouterr().err
    legacy = whole.decode().replace("поезд", "schön").replace("τρένο", "für").encode("latin-1")
    Path("legacy.csv").write_bytes(legacy)
    assert main(["finetune", "legacy.csv", "--dry-run"]) == 0
    assert _recipe("runs/legacy.yaml")["data"]["encoding"] == "cp1252"


def test_data_02_a_tsv_without_csv_quoting_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{'spam' if n % 2 else 'ham'}\tsee you at lunch number {n}" for n in range(18)]
    rows[5] = 'spam\t"Quoted" and more'  # strict csv refuses it
    Path("sms.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    assert main(["finetune", "sms.tsv", "--dry-run"]) == 0
    assert "sms.tsv: 18 rows" in capsys.readouterr().out
    read = list(read_delimited(Path("sms.tsv"), Data(train="sms.tsv")))
    assert read[6].fields == ["spam", '"Quoted" and more']
    assert main(["finetune", "sms.tsv", "--dry-run", "--data.quoting", "csv", "--output_dir", "runs/b"]) == 2
    assert "data.quoting: none" in capsys.readouterr().err


def test_data_03_rows_without_a_label_are_counted_and_dropped_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"a {word} day number {n},{word if n != 7 else ''}" for n in range(20) for word in ("good", "bad")]
    Path("reviews.csv").write_text("\n".join(["words,Kind", *rows, ""]))
    assert main(["finetune", "reviews.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "reviews.csv:16, column 'Kind'" in said
    assert "2 of 40" in said
    assert "data.missing_labels: drop" in said
    assert main(["finetune", "reviews.csv", "--dry-run", "--data.missing_labels", "drop"]) == 0
    printed = capsys.readouterr().out
    assert "not used: 2 rows without a label" in printed
    assert "2 classes: bad 19, good 19" in printed
    texts = load_labelled_texts(load_recipe(Path("runs/reviews.yaml")), None)
    assert len(texts.train) + len(texts.eval or []) == 38
    assert any("2 of 40 rows" in note for note in texts.notes)


def _save(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def _photo(number: int, edge: int = 48) -> Any:
    return np.random.default_rng(number).integers(0, 256, (edge, edge, 3))


def test_data_04_ids_are_the_images_of_a_folder_and_never_texts(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [f"{number:08x}a{number % 7}" for number in range(1, 13)]
    rows = "".join(f"{name},{('pug', 'beagle')[n % 2]}\n" for n, name in enumerate(ids))
    Path("labels.csv").write_text("id,label\n" + rows)
    assert main(["finetune", "labels.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "'id'" in said
    for number, name in enumerate(ids):
        _save(Path("train", name + (".jpg", ".png")[number % 2]), _photo(number, 100))
        _save(Path("test", f"other{number}.jpg"), _photo(number + 50, 100))
    for path in ("labels.csv", "."):
        assert main(["finetune", path, "--dry-run", "--output_dir", "runs/dogs"]) == 0
    recipe = _recipe("runs/dogs.yaml")
    assert (recipe["task"], recipe["data"]["image_column"]) == ("image-classification", "id")
    assert recipe["data"]["image_size"] == 128
    assert main(["plan", "runs/dogs.yaml"]) == 0
    assert "test/" in capsys.readouterr().out


def _jsonl(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_data_05_bad_examples_are_not_learned(capsys: pytest.CaptureFixture[str]) -> None:
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(12)
    ]
    _jsonl("kto.jsonl", [{"messages": chat, "label": n % 3 > 0} for n, chat in enumerate(chats)])
    assert main(["finetune", "kto.jsonl", "--dry-run"]) == 2
    assert "'label' is false in 4 of 12 rows" in capsys.readouterr().err
    _jsonl("pairs.jsonl", [{"prompt": f"{n}?", "completion": "yes", "label": n % 2 > 0} for n in range(12)])
    assert main(["finetune", "pairs.jsonl", "--dry-run"]) == 2
    assert "'label' is false in 6 of 12 rows" in capsys.readouterr().err
    _jsonl("dpo.jsonl", [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(12)])
    assert main(["finetune", "dpo.jsonl", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "DPO" in said
    flags = ("--data.prompt_column", "prompt", "--data.completion_column", "chosen")
    assert " ".join(flags) in said
    assert main(["finetune", "dpo.jsonl", "--dry-run", *flags]) == 0
    assert "not used: column 'rejected'" in capsys.readouterr().out
    assert not Path("runs/kto.yaml").exists()


def test_data_06_columns_of_zeros_and_ones_name_the_way_to_many_labels(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{n},this is comment number {n},{n % 2},{n // 2 % 2},{n // 4 % 2}" for n in range(40)]
    Path("toxic.csv").write_text("\n".join(["id,comment,toxic,threat,insult", *rows, ""]))
    assert main(["finetune", "toxic.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "--label toxic or --label threat or --label insult" in said
    assert "list" in said


_WORDS = ("the film was long and dull", "a bright and funny story", "few people laughed at the end", "we all cried")


def _aclimdb(folder: str) -> None:
    for part in ("train", "test"):
        for label in ("pos", "neg", *(["unsup"] if part == "train" else [])):
            Path(folder, part, label).mkdir(parents=True)
            for number in range(8):
                text = f"{label} {_WORDS[number % 4]} {number}" + "\nsecond line" * (number == 3)
                Path(folder, part, label, f"{number}.txt").write_text(text)
    Path(folder, "train", "urls_pos.txt").write_text("http://x\n")
    Path(folder, "README").write_text("about")
    Path(folder, "imdb.vocab").write_text("the\na\n")


def test_data_07_class_folders_of_texts_are_labels(capsys: pytest.CaptureFixture[str]) -> None:
    _aclimdb("imdb")
    quick = ("--schedule.max_steps", "2", "--log.progress", "false", "--model.config.num_buckets", "4096")
    assert main(["finetune", "imdb", *quick]) == 0
    printed = capsys.readouterr().out
    recipe = _recipe("runs/imdb.yaml")
    assert recipe["task"] == "text-classification"
    assert recipe["data"]["train"] == ["imdb/train/neg", "imdb/train/pos"]
    assert "eval" not in recipe["data"]
    assert "accel-train evaluate runs/imdb imdb/test)" in printed
    for name in ("README", "imdb.vocab", "train/urls_pos.txt", "train/unsup/* (8 files)"):
        assert name in printed[printed.index("  not used: ") :].splitlines()[0]
    facts = json.loads(Path("runs/imdb/summary.json").read_text())["data"]
    assert facts["num_train"] + facts["num_eval"] == 16
    assert facts["label_names"] == ["neg", "pos"]
    assert main(["run", "runs/imdb.yaml"]) == 0  # finished: it is found as it was
    assert main(["evaluate", "runs/imdb", "imdb/test"]) == 0
    assert main(["predict", "runs/imdb", "imdb/test", "--out", "predicted.csv"]) == 0
    with open("predicted.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["id"], row["true_label"]) for row in rows)[0] == ("imdb/test/neg/0.txt", "neg")
    assert len(rows) == 16
    assert main(["finetune", "imdb", "--task", "causal-lm", "--dry-run", "--output_dir", "runs/lm"]) == 0
    assert _recipe("runs/lm.yaml")["data"]["train"] == "imdb/train"
    Path("flat").mkdir()
    for part in ("pos", "neg"):
        Path("imdb/test", part).rename(Path("flat", part))
    assert main(["finetune", "flat", "--dry-run"]) == 0
    data = _recipe("runs/flat.yaml")["data"]
    assert (data["train"], data["lines"]) == ("flat", "folder_names")


def test_data_08_a_quote_in_a_tsv_swallows_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{'spam' if n % 2 else 'ham'}\tsee you at lunch number {n}" for n in range(18)]
    rows[2], rows[9] = 'ham\t"good things take time and so on', 'spam\twin a "prize" now"'
    Path("quotes.tsv").write_text("\n".join(["label\ttext", *rows, ""]))
    assert main(["finetune", "quotes.tsv", "--dry-run"]) == 0
    assert "quotes.tsv: 18 rows" in capsys.readouterr().out
    names = ["label", "text"]
    read = list(read_delimited(Path("quotes.tsv"), Data(train="quotes.tsv")))
    assert [record.fields for record in read] == [names, *(row.split("\t") for row in rows)]
    assert len(list(read_delimited(Path("quotes.tsv"), Data(train="", quoting="none")))) == 19
    Path("multi.tsv").write_text('label\ttext\nham\t"one\nand two"\nspam\t"said ""hi"""\n')  # as csv writes it
    read = list(read_delimited(Path("multi.tsv"), Data(train="multi.tsv")))
    assert [record.fields for record in read] == [names, ["ham", "one\nand two"], ["spam", 'said "hi"']]


PAIRS_OF_NAMES = (
    ("image", "label"),
    ("image", "mask"),
    ("Images", "Masks"),
    ("imgs", "masks"),
    ("img", "mask"),
    ("input", "target"),
    ("images", "gt"),
    ("original", "segmented"),
    ("JPEGImages", "SegmentationClassPNG"),
    ("images_prepped_train", "annotations_prepped_train"),
)


def _pairs_of_images(folder: Path, images: str, masks: str, count: int = 6) -> None:
    for number in range(count):
        _save(folder / images / f"{number}.png", _photo(number))
        _save(folder / masks / f"{number}.png", (_photo(number)[..., 0] > 127) * 255)


def test_data_09_images_with_masks_are_pairs_and_never_two_classes(capsys: pytest.CaptureFixture[str]) -> None:
    for number, (images, masks) in enumerate(PAIRS_OF_NAMES):
        _pairs_of_images(Path(f"set{number}"), images, masks)
        assert main(["finetune", f"set{number}", "--dry-run"]) == 0
        recipe = _recipe(f"runs/set{number}.yaml")
        assert recipe["task"] == "semantic-segmentation"
        assert recipe["data"]["mask_values"] == [0, 255]
    assert "not used: nothing" in capsys.readouterr().out
    _pairs_of_images(Path("unknown"), "left", "right")
    for folder in ("set0", "set2", "unknown"):
        assert main(["plan", "image_classification", "--data.train", folder]) == 2
    assert main(["finetune", "unknown", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "left/" in said
    assert "right/" in said
    given = ("--task", "image-classification", "--data.label_names", "[left, right]")
    assert main(["finetune", "unknown", "--dry-run", *given]) == 0


def test_data_10_tools_inputs_and_parts_of_messages_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(12)
    ]
    _jsonl("tools.jsonl", [{"messages": chat, "tools": [{"type": "function"}]} for chat in chats])
    assert main(["finetune", "tools.jsonl", "--dry-run"]) == 2
    assert "tools" in capsys.readouterr().err
    alpaca = [{"instruction": "To French", "input": f"cat {n}" if n else "", "output": f"chat {n}"} for n in range(12)]
    Path("alpaca.json").write_text(json.dumps(alpaca))
    _jsonl("alpaca.jsonl", alpaca)
    for name in ("alpaca.json", "alpaca.jsonl"):
        flags = ("--output_dir", f"runs/{name}", "--data.eval_fraction", "0")
        assert main(["finetune", name, "--dry-run", *flags]) == 0
        assert "not used: nothing" in capsys.readouterr().out
        recipe = load_recipe(Path(f"runs/{name}.yaml"))
        (source,) = resolve_sources(name, recipe.data, key="data.train")
        parts = [check_row(row, recipe.data).parts for row in read_rows(source, columns_of(recipe.data), recipe.data)]
        assert parts == [("To French", "chat 0"), *((f"To French\n\ncat {n}", f"chat {n}") for n in range(1, 12))]
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]} for chat in chats]
    Path("sharegpt.json").write_text(json.dumps(sharegpt))
    _jsonl("lines.json", sharegpt)
    in_parts = [[{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat] for chat in chats]
    _jsonl("parts.jsonl", [{"messages": chat} for chat in in_parts])
    for name in ("sharegpt.json", "lines.json", "parts.jsonl"):
        assert main(["finetune", name, "--dry-run", "--output_dir", f"runs/{name}"]) == 0
        recipe = load_recipe(Path(f"runs/{name}.yaml"))
        (source,) = resolve_sources(name, recipe.data, key="data.train")
        rows = read_rows(source, columns_of(recipe.data), recipe.data)
        assert [check_row(row, recipe.data).parts for row in rows] == chats
    in_parts[3][0]["content"] = [{"type": "image_url", "image_url": "x"}]
    _jsonl("parts.jsonl", [{"messages": chat} for chat in in_parts])
    assert main(["finetune", "parts.jsonl", "--dry-run", "--output_dir", "runs/other"]) == 2
    assert "parts.jsonl:4" in capsys.readouterr().err


def test_data_11_the_size_of_images_comes_from_their_bytes() -> None:
    rows = []
    for number in range(8):
        file = io.BytesIO()
        Image.new("RGB", (400, 400), (number * 9, 40 * (number % 2), 200)).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": ["cat", "dog"][number % 2]})
    pq.write_table(pa.Table.from_pylist(rows), "pictures.parquet")
    assert main(["finetune", "pictures.parquet", "--dry-run"]) == 0
    assert _recipe("runs/pictures.yaml")["data"]["image_size"] == 128
    Path("labels.csv").write_text("file,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(8)))
    assert main(["finetune", "labels.csv", "--dry-run"]) == 2
    assert not Path("runs/labels.yaml").exists()


def _shard(path: str, numbers: range) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    names = {"label": {"names": ["negative", "positive"], "_type": "ClassLabel"}}
    table = pa.table({"text": [f"{_WORDS[n % 4]} {n}" for n in numbers], "label": [n % 2 for n in numbers]})
    schema = {"huggingface": json.dumps({"info": {"features": {"text": {"_type": "Value"}, **names}}})}
    pq.write_table(table.replace_schema_metadata(schema), path)


def test_data_12_shards_are_one_table_and_test_shards_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        _shard(f"hub/data/train-{number:05d}-of-00002.parquet", range(20 * number, 20 * number + 20))
    _shard("hub/data/test-00000-of-00001.parquet", range(50, 60))
    assert main(["finetune", "hub", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "40 rows" in printed
    assert "2 classes: negative 20, positive 20" in printed
    assert "accel-train evaluate runs/hub 'hub/data/test-*-of-00001.parquet'" in printed
    recipe = load_recipe(Path("runs/hub.yaml"))
    assert recipe.data.train == "hub/data/train-*-of-00002.parquet"
    texts = load_labelled_texts(recipe, None)
    assert texts.scheme.names == ("negative", "positive")
    assert len(texts.train) + len(texts.eval or []) == 40
    assert main(["finetune", "hub/data/train-*.parquet", "--dry-run", "--output_dir", "runs/b"]) == 0
    assert main(["finetune", "hub/data/train-00000-of-00002.parquet", "--dry-run", "--output_dir", "runs/c"]) == 0
    assert "train-00001-of-00002.parquet" in capsys.readouterr().out.split("not used:")[-1]


def test_data_13_a_readme_is_not_the_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    Path("polarity").mkdir()
    Path("polarity/README.txt").write_text("about these data\n" * 20)
    for suffix in ("pos", "neg"):
        Path("polarity", f"rt.{suffix}").write_text("a text\n" * 20)
    assert main(["finetune", "polarity", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "rt.neg, rt.pos" in said
    assert "README" not in said
    Path("polarity/rt.pos").rename("polarity/more.txt")
    assert main(["finetune", "polarity", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "1 file, 140 characters" in printed
    assert "not used: files README.txt, rt.neg" in printed
    (source,) = resolve_sources("polarity", Data(train="polarity"), key="data.train")
    assert [path.name for path in source.files] == ["more.txt"]
    assert any("README.txt" in note for note in source.notes)


def test_data_14_several_labels_in_a_cell_are_not_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    tags = ("python", "python,sql", "css,html", "python,sql")
    Path("tags.csv").write_text("text,tags\n" + "".join(f'how do I do {n} here,"{tags[n % 4]}"\n' for n in range(24)))
    assert main(["finetune", "tags.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "commas" in said
    assert "--model.problem_type single_label" in said
    assert main(["finetune", "tags.csv", "--dry-run", "--model.problem_type", "single_label"]) == 0
    lists = ("['css', 'html']", "['css']")
    Path("lists.csv").write_text("text,tags\n" + "".join(f'how do I do {n} here,"{lists[n % 2]}"\n' for n in range(24)))
    assert main(["finetune", "lists.csv", "--dry-run"]) == 2
    assert "brackets" in capsys.readouterr().err
    kept = (("Bonn, NW", "Washington, DC"), ("Austin, TX", "Dallas, TX"), ("(none)", "good", "bad"))
    for number, names in enumerate(kept):
        rows = (f'a text {n} here,"{names[n % len(names)]}"\n' for n in range(24))
        Path(f"kept{number}.csv").write_text("text,place\n" + "".join(rows))
        assert main(["finetune", f"kept{number}.csv", "--dry-run"]) == 0


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
DELTA = {
    "model_type": "qwen3_5_text",
    **SIZES,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
CONV = {"model_type": "lfm2", **SIZES, "layer_types": ["conv", "full_attention"] * 2}
MAMBA = {
    "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8,
    "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
LAYERS = [(DELTA, "GatedDeltaNet"), (CONV, "ShortConv"), (MAMBA, "Mamba2Mixer")]


def _difference_of_packed_document(fields: dict[str, Any]) -> float:
    """Compare the logits of a packed document under the dense mask with the same document alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **{**fields, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (1, 40))
    positions = torch.cat([torch.arange(24), torch.arange(16)])[None]
    mask = same_document_mask((torch.arange(40) >= 24).long()[None])
    with torch.no_grad():
        alone = model(input_ids=ids[:, 24:], use_cache=False).logits
        packed = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 24:]
    return float((packed - alone).abs().max() / alone.abs().max())


@pytest.mark.parametrize(("fields", "layer"), LAYERS)
def test_field_01_a_layer_that_reaches_into_the_next_document_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], layer: str
) -> None:
    assert _difference_of_packed_document(fields) > 1e-5
    write_corpus(tmp_path)
    sections: dict[str, Any] = {"task": "causal-lm", "model": {"config": fields}, "schedule": {"max_steps": 1}}
    path = write_recipe_file(tmp_path, **sections, data={"mask_documents": True})
    for command in ("run", "plan"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert layer in error
        assert "data.mask_documents" in error
    assert not (tmp_path / "run").exists()
    assert main(["run", str(path), "--data.mask_documents", "false"]) == 0


def test_field_01_attention_alone_keeps_documents_apart_and_the_start_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"model_type": "llama", **SIZES}
    assert _difference_of_packed_document(fields) < 1e-5
    write_corpus(tmp_path)
    sections: dict[str, Any] = {"task": "causal-lm", "model": {"config": fields}, "schedule": {"max_steps": 1}}
    path = write_recipe_file(tmp_path, **sections, data={"mask_documents": True})
    assert main(["run", str(path)]) == 0
    (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if "probe  " in line]
    assert "equal" in line
    assert "packed documents" in line


@pytest.mark.parametrize(("fields", "is_masked"), [(TINY_MODEL, True), (MAMBA, False), (DELTA, False)])
def test_field_01_finetune_masks_documents_only_where_that_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_masked: bool
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    base = write_base(Path(), fields)
    byte_tokenizer().save_pretrained(str(base))
    Path("texts.txt").write_text("a text to train on, line by line\n" * 400)
    assert main(["finetune", "texts.txt", "--model", str(base), "--dry-run"]) == 0
    data = yaml.safe_load(Path("runs/texts.yaml").read_text())["data"]
    assert data.get("mask_documents", False) is is_masked


MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


def _mixture(
    folder: Path, name: str, processes: int = 1, per_device: int = 8, **sections: Any
) -> list[tuple[float, ...]]:
    """Train it for 4 steps; return each step's loss, router loss and gradient norm."""
    sections = {
        "task": "causal-lm",
        "model": {"config": MIXTURE},
        "batch": {"global_batch_size": 8, "per_device_batch_size": per_device},
        "schedule": {"max_steps": 4},
        **sections,
    }
    recipe = recipe_dict(folder, output_dir=str(folder / name), **sections)
    if processes == 1:
        train(Recipe.model_validate(recipe))
    else:
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        run(path, processes=processes)
    steps = metrics(folder / name)
    return [(each["step_loss"], each.get("router_aux_loss", 0.0), each["grad_norm"]) for each in steps]


def test_field_02_the_loss_is_that_of_transformers_with_its_router_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    seen: list[tuple[float, float]] = []
    ours = CausalLM.loss_sum

    def compared(task: CausalLM, model: Any, batch: Any) -> Any:
        if not model.training:
            return ours(task, model, batch)
        with torch.no_grad():
            whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MIXTURE, "vocab_size": 320}))
            whole.load_state_dict(model.state_dict())
            out = whole(batch["input_ids"])
            loss = cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten()) + 0.5 * out.aux_loss
        seen.append((float(loss), float(out.aux_loss)))
        return ours(task, model, batch)

    monkeypatch.setattr(CausalLM, "loss_sum", compared)
    got = _mixture(tmp_path, "run")
    assert [step[0] for step in got] == pytest.approx([each[0] for each in seen], rel=1e-6)
    assert [step[1] for step in got] == pytest.approx([each[1] for each in seen], rel=1e-6)


@pytest.mark.parametrize("mask", [False, True])
def test_field_02_the_router_loss_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path, mask: bool) -> None:
    write_corpus(tmp_path)
    data = {"mask_documents": mask}
    whole = _mixture(tmp_path, "whole", data=data)
    assert all(1.9 < router < 4 for _, router, _ in whole)
    parts = _mixture(tmp_path, "parts", per_device=2, data=data)
    off = _mixture(tmp_path, "off", data=data, loss={"router_aux": False})
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-6, atol=2e-6)
    assert whole[0][0] - off[0][0] == pytest.approx(0.5 * whole[0][1], rel=1e-5)
    assert off[0][1] == 0


@pytest.mark.parametrize(
    ("processes", "per_device", "strategy"),
    [(2, 4, "ddp"), (2, 1, "ddp"), (4, 2, "ddp"), (2, 4, "fsdp2"), (2, 2, "fsdp2")],
)
def test_field_02_the_router_loss_is_the_same_on_any_number_of_processes(
    tmp_path: Path, processes: int, per_device: int, strategy: str
) -> None:
    write_corpus(tmp_path)
    whole = _mixture(tmp_path, "whole")
    assert all(1.9 < router < 4 for _, router, _ in whole)
    spread = _mixture(tmp_path, "spread", processes, per_device, parallel={"strategy": strategy})
    torch.testing.assert_close(torch.tensor(spread), torch.tensor(whole), rtol=1e-6, atol=2e-6)


THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}OPEN{%- if "
    "m.thoughts %}"
    "{{- '<think>\\n' + m.thoughts + '\\n</think>\\n\\n' }}{%- elif loop.last %}{{- '<think>\\n\\n</think>\\n\\n' "
    "}}{%- endif %}"
    "{{- m.content + '<|im_end|>' }}CLOSE{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor "
    "%}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not "
    "enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""As Qwen3's: the last turn of the assistant has a block of thoughts, which may be empty."""


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("thoughts", "learned"), [("", "yes<|im_end|>"), ("hm", "<think>\nhm\n</think>\n\nyes<|im_end|>")]
)
def test_field_03_what_the_generation_prompt_supplies_is_not_a_target(
    marked: bool, thoughts: str, learned: str
) -> None:
    marks = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = THINKING.replace("OPEN", marks[0]).replace("CLOSE", marks[1])
    tokenizer = pretrained_tokenizer("bytes", trust_remote_code=False)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "thoughts": thoughts}]
    data = CausalLMData.model_validate({"train": "chats.jsonl", "format": "chat", "chat_template": template})
    [encoded] = chat_encoder(tokenizer, data, defaultdict(list))([Example(chat, "row 1")])
    text = tokenizer.tokenizer.decode(encoded.ids[encoded.is_target])
    assert text.removesuffix("<|endoftext|>").rstrip("\n") == learned


class Adds(TrainerCallback):
    """Writes a file and a folder into each checkpoint, as callbacks do with an adapter or a metrics file."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "extra.json").write_text("{}")
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")


def test_hf_00_checkpoints_to_which_a_callback_added_files_are_rotated_and_a_foreign_file_is_kept(
    tmp_path: Path,
) -> None:
    args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 1}

    class Drops(Adds):
        """Leaves a file in the checkpoint before, after its save."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (Path(args.output_dir) / "checkpoint-2" / "mine.txt").write_text("mine")

    for name, callback in (("own", Adds()), ("foreign", Drops())):
        trainer = Trainer(
            Plain(), arguments(tmp_path / name, **args), callbacks=[callback], train_dataset=plain_rows(64)
        )
        trainer.train()
        assert (tmp_path / name / "checkpoint-4" / "extra.json").is_file()
    left = [path.name for path in (tmp_path / "own" / "checkpoints").iterdir() if path.is_dir()]
    assert left == ["step-00000004"]
    assert check(tmp_path / "own" / "checkpoints" / "step-00000004").problem is None
    kept = tmp_path / "foreign" / "checkpoints" / "kept-step-00000002"
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["mine.txt"]
    assert [event["step"] for event in events(tmp_path / "foreign", "kept_files")] == [3]


class Rewrites(TrainerCallback):
    """Writes the configuration of each checkpoint again, and adds a file; or overwrites its weights."""

    def __init__(self, name: str = "config.json") -> None:
        self.name = name

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.name == "config.json":
            model.config.id2label = {0: "neg", 1: "pos", 2: "none"}
            model.config.save_pretrained(folder)
            (folder / "extra.json").write_text("{}")
        else:
            (folder / self.name).write_bytes(b"other weights")


def test_hf_01_a_rewritten_config_of_a_checkpoint_does_not_keep_a_run_from_resuming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(callback: Any, steps: int = 2) -> Trainer:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        return Trainer(bert(), args, callbacks=[callback], train_dataset=rows(16))

    make(Rewrites()).train()
    newest = tmp_path / "checkpoints" / "step-00000002"
    assert (check(newest).problem, changed_descriptions(newest)) == (None, [])
    (newest / "config.json").write_text("{}")  # by hand, later
    (newest / "README.md").write_text("mine")
    (newest / "extra.json").unlink()
    assert changed_descriptions(newest) == ["README.md", "config.json"]
    assert "config.json" in format_verified(verify(tmp_path))
    assert make(Rewrites(), 4).train(resume_from_checkpoint=True).global_step == 4
    assert [event["step"] for event in events(tmp_path, "checkpoint_changed")] == [2]
    assert [line["step"] for line in metrics(tmp_path)][-1] == 4
    make(Rewrites("model.safetensors"), 6).train(resume_from_checkpoint=True)
    assert [event["step"] for event in events(tmp_path, "checkpoint_changed")] == [2, 6]
    assert check(tmp_path / "checkpoints" / "step-00000006").problem is not None
    assert "model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"])
def test_hf_02_schedule_free_optimizers_train_evaluate_and_resume_as_in_transformers(
    tmp_path: Path, optim: str
) -> None:
    pytest.importorskip("schedulefree")
    args = {"optim": optim, "lr_scheduler_type": "linear", "max_steps": 6, "logging_steps": 1, "learning_rate": 0.01}
    args |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    data = {"train_dataset": plain_rows(64), "eval_dataset": plain_rows(8, seed=2)}
    theirs, ours, *_ = both(tmp_path, Plain, args=args, **data)
    expected, found = (
        [line.get("loss", line.get("eval_loss")) for line in trainer.state.log_history][:-1]
        for trainer in (theirs, ours)
    )
    assert found == pytest.approx(expected, abs=1e-5)
    assert difference(theirs.model, ours.model) < 1e-5
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected[-1], abs=1e-5)
    again = Trainer(Plain(seed=3), arguments(tmp_path / "ours", **args), **data)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert difference(again.model, ours.model) == 0


def test_hf_03_generation_settings_that_are_none_are_left_out(tmp_path: Path) -> None:
    class OfTheScript(Seq2SeqTrainer):
        """As transformers' trainer_seq2seq_qa.py."""

        def evaluate(self, eval_dataset: Any = None, **gen_kwargs: Any) -> Any:
            self._gen_kwargs = gen_kwargs
            return self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation").metrics

    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to="none", disable_tqdm=True
    )
    data = [{"input_ids": [5, 6, 7, 1], "labels": [8, 9, 1]}] * 4
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    found = OfTheScript(model, args, eval_dataset=data, processing_class=tokenizer).evaluate(
        max_length=8, num_beams=None
    )
    assert np.isfinite(found["eval_loss"])


def test_hf_04_metrics_by_batch_may_be_none_until_the_last(tmp_path: Path) -> None:
    def make_scorer() -> Any:
        seen: list[float] = []

        def score(prediction: Any, compute_result: bool) -> dict[str, float] | None:
            seen.append(float((prediction.predictions.argmax(-1) == prediction.label_ids).float().mean()))
            return {"accuracy": sum(seen) / len(seen)} if compute_result else None

        return score

    *_, expected, found = both(
        tmp_path, Plain, act=lambda trainer: trainer.evaluate(), eval_dataset=plain_rows(16),
        make_compute_metrics=make_scorer, args={"batch_eval_metrics": True, "per_device_eval_batch_size": 4},
    )  # fmt: skip
    assert found["eval_accuracy"] == expected["eval_accuracy"]


def test_hf_05_callbacks_get_both_loaders(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        """Notes the lengths of the loaders."""

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(len(kwargs["train_dataloader"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen += [len(kwargs["train_dataloader"]), len(kwargs["eval_dataloader"])]

    data = {"train_dataset": plain_rows(40), "eval_dataset": plain_rows(20)}
    trainers = both(tmp_path, Plain, args=EVALUATING, make_callbacks=lambda: [Looks()], **data)[:2]
    theirs, ours = (trainer.pop_callback(Looks).seen for trainer in trainers)
    assert ours == theirs == [5, 5, 3, 5, 3]


def test_hf_06_strategies_may_be_set_as_text_afterwards(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    args.save_strategy, args.eval_strategy, args.lr_scheduler_type, args.optim = "no", "epoch", "linear", "adamw_torch"
    trainer = Trainer(Plain(), args, train_dataset=plain_rows(16), eval_dataset=plain_rows(8))
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == [2]


def test_hf_07_a_patched_import_of_transformers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "Trainer", Trainer)
    args = arguments(tmp_path, max_steps=1, optim="rmsprop")
    trainer = transformers.Trainer(Plain(), args, train_dataset=plain_rows(8))
    assert isinstance(trainer.create_optimizer(), torch.optim.RMSprop)
    assert trainer.train().global_step == 1

    class Never(Trainer):
        """Overrides what is never called."""

        def _save_checkpoint(self, *args: Any) -> None:
            """Do nothing."""

    with pytest.raises(ValueError, match="_save_checkpoint"):
        Never(Plain(), arguments(tmp_path))


def test_hf_08_both_trainers_are_imported_from_the_package() -> None:
    assert accel_train.Seq2SeqTrainer is Seq2SeqTrainer
    assert {"Trainer", "Seq2SeqTrainer"} <= set(accel_train.__all__)


def test_hf_09_the_rate_that_adafactor_chooses_is_logged(tmp_path: Path) -> None:
    rates = []
    for kind in (StockTrainer, Trainer):
        model = bert()
        own: dict[str, Any] = {"scale_parameter": True, "relative_step": True, "warmup_init": True, "lr": None}
        optimizer = transformers.Adafactor(model.parameters(), **own)
        optimizers = (optimizer, AdafactorSchedule(optimizer))
        args = arguments(tmp_path / kind.__module__, max_steps=3, logging_steps=1)
        trainer = kind(model, args, train_dataset=rows(32), optimizers=optimizers)
        trainer.train()
        rates.append([line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line])
    assert len(rates[0]) == 3
    assert rates[1] == pytest.approx(rates[0], rel=1e-4)


def test_hf_a_class_of_both_trainers_is_refused() -> None:
    class OfALibrary(StockTrainer):
        """As SFTTrainer."""

    with pytest.raises(ValueError, match="class Mixed"):
        type("Mixed", (OfALibrary, Trainer), {})


def test_hf_default_callbacks_and_attributes_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    theirs, ours, *_ = both(tmp_path, Plain, act=lambda trainer: None, args={"disable_tqdm": False})
    names = [[type(each).__name__ for each in trainer.callback_handler.callbacks] for trainer in (theirs, ours)]
    assert names[1] == names[0]
    same = ("is_model_parallel", "place_model_on_device", "_train_batch_size", "current_flos", "neftune_noise_alpha")
    for name in (*same, "hp_search_backend", "deepspeed", "model_accepts_loss_kwargs"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours._get_output_dir(None) == ours.args.output_dir
    assert ours.gather_function(torch.ones(2)).tolist() == [1.0, 1.0]
    assert isinstance(ours.pop_callback(transformers.ProgressCallback), transformers.ProgressCallback)


def test_hf_the_last_micro_batch_of_a_step_synchronises_and_the_plan_is_logged_at_info(
    tmp_path: Path,
) -> None:
    class Looks(Trainer):
        """Notes in which micro-batches gradients are synchronised."""

        seen: tuple[bool, ...] = ()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += (self.accelerator.sync_gradients,)
            return super().compute_loss(*args, **kwargs)

    verbosity, logged = transformers.logging.get_verbosity(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage().strip())  # type: ignore[method-assign]
    logging.getLogger("transformers.trainer").addHandler(handler)
    try:
        args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=3, log_level="info")
        trainer = Looks(Plain(), args, train_dataset=plain_rows(48))
        trainer.train()
    finally:
        transformers.logging.set_verbosity(verbosity)
        logging.getLogger("transformers.trainer").removeHandler(handler)
    assert trainer.seen == (False, False, True) * 2
    assert {"***** Running training *****", "Num examples = 48", "Total optimization steps = 2"} <= set(logged)


class Grows(Plain):
    """A model with a buffer that grows, which its own load_state_dict makes room for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.zeros(0))

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            self.order = torch.cat([self.order, features.sum().reshape(1)])
        return super().forward(features, labels)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.order = torch.zeros_like(state_dict["order"])
        return super().load_state_dict(state_dict, strict, assign)


def test_hf_the_load_state_dict_of_a_model_is_called_when_a_run_resumes(tmp_path: Path) -> None:
    args: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = Trainer(Grows(), arguments(tmp_path, **args), train_dataset=plain_rows(32))
    whole.train()
    again = Trainer(Grows(), arguments(tmp_path, **args), train_dataset=plain_rows(32))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(whole.model.order) == 4
    assert again.model.order.tolist() == whole.model.order.tolist()


def test_hf_a_step_that_is_made_again_counts_its_operations_once(tmp_path: Path) -> None:
    class RunsOut(Trainer):
        """Has no room for 8 rows, once."""

        has_room = False

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            if len(inputs["labels"]) > 4 and not self.has_room:
                self.has_room = True
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().compute_loss(model, inputs, **kwargs)

    found = []
    for kind in (Trainer, RunsOut):
        trainer = kind(bert(), arguments(tmp_path / kind.__name__, max_steps=3), train_dataset=rows(24))
        trainer.train()
        found.append(trainer.state.total_flos)
    assert found[1] == found[0] > 0


MIXED = """
import os
import sys

import accel_train.parallel.precision as precision
import accel_train.training.build as build
from accel_train.cli.main import main
from accel_train.core.state import Choice

kind, rank = sys.argv[1], int(os.environ["RANK"])
if kind == "precision":
    value = ("bf16", "no")[rank]
    precision.choose_mixed_precision = lambda section, device: Choice(value, f"as a GPU of kind {rank}")
else:
    wrap = build.wrap_model
    build.wrap_model = lambda plan, *rest: wrap(plan, *rest).with_choices({"document mask": Choice(rank, "")})
sys.exit(main(["run", sys.argv[2]]))
"""
"""Two processes as on machines of two kinds."""


def test_mixed_01_processes_train_in_the_weakest_precision_of_all(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    recipe = recipe_dict(tmp_path, schedule={"max_steps": 2}, parallel={"strategy": "ddp"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = run_forked_command(["precision", str(tmp_path / "recipe.yaml")], 2, program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "as a GPU of kind 1" in done.stdout
    mixed = [each["step_loss"] for each in metrics(tmp_path / "run")]
    run(write_recipe_file(tmp_path, output_dir=str(tmp_path / "fp32"), schedule={"max_steps": 2}), processes=2)
    assert mixed == [each["step_loss"] for each in metrics(tmp_path / "fp32")]


def test_mixed_02_choices_that_differ_between_processes_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    path = write_recipe_file(tmp_path, schedule={"max_steps": 2})
    done = run_forked_command(["choice", str(path)], 2, program)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "document mask is '1' on rank 1, and '0' on rank 0" in done.stderr


def test_new_01_of_equal_accuracies_the_weights_with_the_lowest_held_out_loss_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = ("customer wants a refund for order", "customer wants help with login")
    rows = [f"ticket {number}: {texts[number % 2]} {number * 37 % 9973},{'ba'[number % 2]}" for number in range(300)]
    Path("easy.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    recipe = {
        "task": "text-classification",
        "output_dir": "run",
        "model": {"config": {"model_type": "ngrams"}},
        "tokenizer": "bytes",
        "data": {"train": "easy.csv", "eval_fraction": 0.2, "max_length": 32, "num_workers": 0, "cache_dir": "cache"},
        "batch": {"global_batch_size": 16},
        "optimizer": {"learning_rate": 0.02},
        "schedule": {"max_steps": 60},
        "evaluate": {"every_steps": 10, "metric_for_best_model": "accuracy"},
        "log": {"progress": False},
        "checkpoint": {"load_best_model_at_end": True, "every_steps": 0},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "recipe.yaml"]) == 0
    lines = metrics(Path("run"), "eval")
    assert sum(line["accuracy"] == 1.0 for line in lines) >= 3, "no tie, so nothing is tested"
    lowest = min((line for line in lines if line["accuracy"] == 1.0), key=lambda line: line["loss"])
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["best_step"] == lowest["step"] > lines[0]["step"]
    assert summary["eval"]["loss"] == pytest.approx(lowest["loss"])
    assert "overfitting" not in capsys.readouterr().out


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
        assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
        assert main(["watch", str(run), "--once"]) == 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["a" * 300, "\udcff"])
def test_a_name_that_no_folder_can_have_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path)
    assert main(["run", str(recipe), "--output_dir", str(tmp_path / name)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "output_dir" in errors[0]


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


def test_test_data_next_to_the_training_data_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "test", "val"):
        rows = [f"{n},{_WORDS[n % 4]} {n},{'xy'[n % 2]}" for n in range(40)]
        Path(f"{name}.csv").write_text("\n".join(["id,text,label", *rows, ""]))
    assert main(["finetune", "train.csv", "--dry-run"]) == 0
    unused = capsys.readouterr().out.split("not used: ")[1]
    assert unused.startswith("column 'id'; files val.csv; test.csv, ")
    assert "accel-train evaluate runs/train test.csv" in unused
    assert main(["finetune", ".", "--dry-run", "--output_dir", "runs/b"]) == 0
    printed = capsys.readouterr().out
    assert "data.eval_fraction" not in printed
    data = _recipe("runs/b.yaml")["data"]
    assert (data["train"], data["eval"]) == ("train.csv", "val.csv")
    assert "eval_fraction" not in data


def test_pairs_that_share_a_side_with_training_pairs_are_counted() -> None:
    rows = [f"question {n // 10} of many,answer {n} to it,{n % 2}" for n in range(100)]
    Path("pairs.csv").write_text("\n".join(["q,a,label", *rows, ""]))
    assert main(["finetune", "pairs.csv", "--text", "q,a", "--dry-run"]) == 0
    texts = load_labelled_texts(load_recipe(Path("runs/pairs.yaml")), None)
    held_out, trained = texts.eval or [], {row.texts[0] for row in texts.train}
    count = sum(row.texts[0] in trained for row in held_out)
    assert count > 0
    assert [note for note in texts.notes if note.startswith(f"{count} of {len(held_out)} evaluation pairs have a 'q'")]
    assert not any("'a'" in note for note in texts.notes)


def test_the_steps_that_are_announced_are_those_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{_WORDS[n % 4]} {n},{'xy'[n % 2]}" for n in range(6_000)]
    Path("many.csv").write_text("\n".join(["text,label", *rows, ""]))
    assert main(["finetune", "many.csv", "--dry-run"]) == 0
    said = re.search(r"schedule.num_epochs: (\d+) \(about ([\d,]+) steps of (\d+)\)", capsys.readouterr().out)
    assert said is not None
    epochs, steps, batch = (int(number.replace(",", "")) for number in said.groups())
    texts = load_labelled_texts(load_recipe(Path("runs/many.yaml")), None)
    assert steps == pytest.approx(epochs * len(texts.train) / batch, rel=0.03)


def test_tables_of_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sonar.csv").write_text("".join(f"{n / 7:.3f},{n / 3:.3f},{n % 2}\n" for n in range(40)))
    for flags in ((), ("--text", "1", "--label", "3")):
        assert main(["finetune", "sonar.csv", "--dry-run", *flags]) == 2
        assert "no task for tables of numbers" in capsys.readouterr().err


def test_texts_named_train_and_test_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wiki").mkdir()
    for part in ("train", "valid", "test"):
        Path("wiki", f"wiki.{part}.txt").write_text(f"text of {part}\n" * 50)
    assert main(["finetune", "wiki", "--dry-run"]) == 0
    data = _recipe("runs/wiki.yaml")["data"]
    assert (data["train"], data["eval"]) == ("wiki/wiki.train.txt", "wiki/wiki.valid.txt")
    assert "accel-train evaluate runs/wiki wiki/wiki.test.txt" in capsys.readouterr().out


BOXES = {
    "a/1.txt": "0 0.5 0.5 0.2 0.3\n",
    "a/1.xml": "<annotation><object><bndbox></bndbox></object></annotation>",
    "a/1.json": '{"shapes": [], "version": "5"}',
    "instances_train.json": '{"images": [], "annotations": [], "categories": []}',
}
NO_BOXES = {"a/1.txt": "7 12 30 8 4", "a/1.json": '{"caption": "x"}', "annotations.json": '{"1.png": "a"}'}


def test_boxes_between_images_are_refused_and_captions_and_lists_of_labels_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(12):
        _save(Path("set", "ab"[number % 2], f"{number}.png"), _photo(number))
    for name, text in NO_BOXES.items():
        Path("set", name).write_text(text)
    assert main(["finetune", "set", "--dry-run"]) == 0
    for name, text in BOXES.items():
        before = Path("set", name).read_text() if name in NO_BOXES else None
        Path("set", name).write_text(text)
        assert main(["finetune", "set", "--dry-run"]) == 2
        assert name in capsys.readouterr().err
        assert main(["plan", "image_classification", "--data.train", "set"]) == 2
        assert name in capsys.readouterr().err
        Path("set", name).unlink() if before is None else Path("set", name).write_text(before)


def test_folders_that_a_table_has_other_classes_for_are_not_classes(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(16):
        _save(Path("set", f"part_{number % 2}", f"scan{number}.png"), _photo(number))
    rows = [f"scan{n},{('mole', 'wart')[n // 2 % 2]},{n % 3}" for n in range(16)]
    Path("set/metadata.csv").write_text("\n".join(["image_id,dx,age", *rows, ""]))
    assert main(["finetune", "set", "--dry-run"]) == 2
    assert "'image_id'" in capsys.readouterr().err
    assert main(["finetune", "set", "--dry-run", "--task", "image-classification", "--output_dir", "runs/a"]) == 0
    agreeing = [f"scan{n},class {n % 2}" for n in range(16)]
    Path("set/metadata.csv").write_text("\n".join(["image_id,dx", *agreeing, ""]))
    Path("set/broken.csv").write_text('a,b\n"1')
    assert main(["finetune", "set", "--dry-run", "--output_dir", "runs/b"]) == 0
    assert "metadata.csv" in capsys.readouterr().out


def test_train_and_train_masks_are_images_and_masks() -> None:
    for number in range(6):
        _save(Path("set/train", f"{number}.png"), _photo(number))
        _save(Path("set/train_masks", f"{number}_mask.png"), (_photo(number)[..., 0] > 127) * 255)
    assert main(["finetune", "set", "--dry-run"]) == 0
    assert _recipe("runs/set.yaml")["task"] == "semantic-segmentation"


@pytest.mark.parametrize("held_out, num_eval", [("eval", 8), ("Test", None), (None, None)])
def test_only_the_folder_train_is_trained_on(held_out: str | None, num_eval: int | None) -> None:
    for number in range(24):
        part = "train" if number < 16 else held_out
        if part is not None:
            _save(Path("set", part, "ab"[number % 2], f"{number}.png"), _photo(number))
    assert main(["finetune", "set", "--dry-run"]) == 0
    sets = read_labelled_images(load_recipe(Path("runs/set.yaml")).data)
    assert sets.label_names == ("a", "b")
    assert sets.eval is not None
    assert len(sets.eval) == (num_eval or 16 - len(sets.train))
    shown = read_labelled_images(ImageClassificationData(train="set", eval="set"))
    assert shown.label_names == ("a", "b")
    assert len(shown.train) == (num_eval or 16)


@pytest.mark.parametrize("encoding", ["gbk", "cp1251", "koi8_r"])
def test_letters_of_other_scripts_are_not_read_as_western_ones(
    encoding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "这个电影很好看" if encoding == "gbk" else "это хороший фильм"
    rows = "".join(f"{text} {number},{'ab'[number % 2]}\n" for number in range(40))
    Path("d.csv").write_bytes(("text,label\n" + rows).encode(encoding))
    assert main(["finetune", "d.csv", "--dry-run"]) == 2
    assert "data.encoding" in capsys.readouterr().err
    assert main(["finetune", "d.csv", "--dry-run", "--data.encoding", encoding]) == 0


def test_a_mark_for_one_class_is_not_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"gj04\t{n % 2}\t{'*' if n % 2 == 0 else ''}\tthe words of sentence {n}\n" for n in range(40))
    Path("cola.tsv").write_text(rows)
    assert main(["finetune", "cola.tsv", "--dry-run"]) == 0
    assert load_recipe(Path("runs/cola.yaml")).data.label_column == "2"


def test_choices_system_prompts_and_weights_are_not_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [{"question": f"what is number {n} of the list", "answer": n % 2} for n in range(40)]
    refused: dict[str, list[dict[str, Any]]] = {
        "choices": [{**row, "choices": ["this", "that"]} for row in asked],
        "letters": [{**row, "choices": ["this", "that"], "answer": "AB"[row["answer"]]} for row in asked],
        "system_prompt": [
            {"system_prompt": "Be kind.", "question": row["question"], "response": "a reply to it"} for row in asked
        ],
        "weight 0": [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]}
            for weight in (1, 0)
        ],
    }
    for said, refused_rows in refused.items():
        _jsonl("d.jsonl", refused_rows)
        assert main(["finetune", "d.jsonl", "--dry-run"]) == 2
        assert said.replace("letters", "choices") in capsys.readouterr().err
    _jsonl("d.jsonl", [{**row, "answer": f"it is {row['answer']}"} for row in asked])
    assert main(["finetune", "d.jsonl", "--dry-run"]) == 0
