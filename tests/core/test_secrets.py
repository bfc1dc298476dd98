"""Secrets stay where the user put them: no output of a run holds one, and what a run writes is for its owner alone."""

import json
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.redaction import is_secret, redact, redact_text, remember_secrets, without_places
from tests.support.runs import command, environment, events, write_recipe_file

IN_THE_RECIPE: dict[str, Any] = {
    "hub_token": "planted-hub-token",
    "HF_TOKEN": "planted-hf-token",
    "wandb": {"api_key": "planted-wandb-key", "entity": "nobody"},
    "database": {"user": "me", "password": "planted-db-password"},
    "aws_secret_access_key": "planted/aws+key",
    "client_secret": "planted client secret",
    "private_key": "planted-private-key",
    "credentials": ["planted-credentials-1", "planted-credentials-2"],
    "passphrase": "planted.passphrase(*)",
    "store": "https://me:planted-store-password@store.example/bucket",
    "mirror": "https://store.example/x?access_token=planted-in-query&part=1",
    "note": "send it with hf_plantedplantedplantedplanted",
}
ON_THE_COMMAND_LINE = {
    "--options.service_token": "planted-service-token",
    "--options.cache_url": "redis://:planted-redis-password@cache.example:6379/0",
    "--options.pin_key": "7218219900",
}
IN_THE_ENVIRONMENT = {
    "HF_TOKEN": "planted-env-hf-token",
    "WANDB_API_KEY": "planted-env-wandb-key",
    "AWS_SECRET_ACCESS_KEY": "planted-env-aws-key",
    "MLFLOW_TRACKING_PASSWORD": "planted-env-mlflow-password",
    "DATABASE_URL": "postgres://me:planted-env-db-password@db.example/runs",
    "MY_SECRET": "planted-env-secret",
}
MARKS = ("planted", "7218219900")


def secrets_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(secrets_in, value.values()))
    return sum(map(secrets_in, value)) if isinstance(value, list) else sum(mark in str(value) for mark in MARKS)


def start(recipe: Path, *flags: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    given = [word for pair in ON_THE_COMMAND_LINE.items() for word in pair]
    env = environment(**IN_THE_ENVIRONMENT)
    line = command(recipe, *given, *flags, processes=processes)
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=200)


def assert_kept(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """No secret in any file of the folder, in any file's name, or in what was printed."""
    for name, text in {"stdout": done.stdout, "stderr": done.stderr}.items():
        for mark in MARKS:
            assert mark not in text, f"{name}: {next(line for line in text.splitlines() if mark in line)[:600]}"
    for path in folder.rglob("*"):
        assert not any(mark in path.name for mark in MARKS), path
        content = path.read_bytes() if path.is_file() else b""
        for mark in MARKS:
            place = content.find(mark.encode())
            assert place < 0, f"{path}: {content[max(0, place - 100) : place + 60]!r}"


def assert_umask_followed(folder: Path) -> None:
    """All the way down: secrets are kept out of the files, not behind their modes."""
    mask = os.umask(0)
    os.umask(mask)
    others = [
        f"{path.relative_to(folder)} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in (folder, *folder.rglob("*"))
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~mask
    ]
    assert others == []


@pytest.fixture
def recipe(corpus: Path) -> Path:
    """A run with a tracker, an incident (a NaN at step 3) and a report, its recipe full of secrets."""
    return write_recipe_file(
        corpus,
        task="tests.support.tasks.leaks_secrets:TalkativeTask",
        options={**IN_THE_RECIPE, "nan_at": {"step": 3, "rank": 0}},
        schedule={"max_steps": 6},
        checkpoint={"every_steps": 2, "keep": 9},
        log={"trackers": ["tensorboard"], "project": "secret"},
    )


def test_at_least_twenty_secrets_are_planted_and_each_is_one_by_name_or_form() -> None:
    planted = (IN_THE_RECIPE, ON_THE_COMMAND_LINE, IN_THE_ENVIRONMENT)
    assert sum(map(secrets_in, planted)) >= 20
    for place in planted:
        for name, value in place.items():
            hidden = redact({name.removeprefix("--"): value})
            assert secrets_in(hidden) == 0, name


def test_no_secret_reaches_the_run_folder_or_the_screen_and_the_folder_follows_the_umask(
    recipe: Path, tmp_path: Path
) -> None:
    done = start(recipe)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert events(run, "skip")
    for name in ("recipe.resolved.yaml", "report.html", "summary.json", "model/config.json"):
        assert (run / name).is_file(), name
    assert list((run / "secret").rglob("events.out.*")), "the tracker wrote nothing, so nothing is proved"
    assert "store.example/bucket" in (run / "recipe.resolved.yaml").read_text(), "what is no secret is kept"
    assert_kept(run, done)
    assert_umask_followed(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.faults)], ids=["one process", "two processes"]
)
def test_a_crash_that_tells_everything_is_told_without_secrets(recipe: Path, tmp_path: Path, processes: int) -> None:
    # Before the NaN of step 3: looking into it forwards batches again, and survives what that brings.
    done = start(recipe, "--options.fail_at", "2", processes=processes)
    assert done.returncode not in (0, 2, 75), done.stderr
    assert "cannot be reached" in done.stderr
    assert "Traceback" in done.stderr
    assert_kept(tmp_path / "run", done)
    assert_umask_followed(tmp_path / "run")


@pytest.mark.faults
@pytest.mark.parametrize(
    "flags",
    [
        ("--data.train", "https://me:planted-password@data.example/text.txt"),
        ("--data.train", "s3://planted-user:planted-password@bucket/text.jsonl"),
        ("--model.pretrained", "https://me:planted-password@models.example/m"),
        ("--tokenizer", "https://me:planted-password@models.example/t"),
        ("--seed", "hf_plantedplantedplantedplanted"),
        ("--batch.global_batch_size", "https://me:planted-password@x.example"),
        ("--options.api_key", ".inf"),
        ("--hub_token", "planted-token"),
        ("--optimizer.token", "planted-token"),
        ("--optimizer.learning_rate", "-1", "--options.my_secret", "[planted-secret, {a: planted-other}]"),
        ("--checkpoint.resume", "https://me:planted-password@runs.example/step-00000001"),
        ("--output_dir", "/dev/null/s3://me:planted-password@x/run"),
    ],
    ids=lambda flags: flags[0],
)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_refusal_names_the_setting_and_not_the_secret(
    recipe: Path, empty_folder: Path, flags: tuple[str, ...], debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_train.cli.main import main

    monkeypatch.setenv("ACCEL_TRAIN_DEBUG", debug)
    read, write = os.pipe()
    with os.fdopen(read) as reader:
        with os.fdopen(write, "w") as writer, monkeypatch.context() as patch:
            patch.setattr("sys.stderr", writer)
            patch.setattr("sys.stdout", writer)
            code = main(["run", str(recipe), *flags])
        said = reader.read()
    assert code in (2, 4), said
    assert flags[0].removeprefix("--").split(".")[0] in said, said
    assert_kept(empty_folder / "run", subprocess.CompletedProcess([], code, "", said))


# --- what is a secret --------------------------------------------------------------------------------------------


def test_a_secret_that_was_given_is_known_wherever_it_comes_up() -> None:
    remember_secrets({"options.login": {"password": "correct horse (battery)"}, "n": {"a_key": 123456789}})
    assert (
        redact_text("login failed for 'correct horse (battery)' with 123456789")
        == "login failed for 'REDACTED' with REDACTED"
    )
    assert redact({"log": ["correct horse (battery)!"]}) == {"log": ["REDACTED!"]}


def test_the_longer_of_two_secrets_is_redacted_whole() -> None:
    remember_secrets({"a_token": "begins-alike", "b_token": "begins-alike-and-goes-on"})
    assert redact_text("begins-alike-and-goes-on") == "REDACTED"


def test_short_values_paths_and_switches_are_kept_in_texts(tmp_path: Path) -> None:
    remember_secrets({"a_key": "loss", "use_auth": True, "credentials": str(tmp_path)})
    assert redact_text(f"loss True {tmp_path}") == f"loss True {tmp_path}"
    assert is_secret("credentials")


def test_numbers_and_names_of_a_ledger_line_are_left_alone(tmp_path: Path) -> None:
    from accel_train.core.json_io import read_json, write_json

    remember_secrets({"api_key": "1.2345678901"})
    record = {"api_key": 1.2345678901, "classes": {"secret": 0.5}, "path": "https://me:word@host/x"}
    write_json(tmp_path / "file.json", record)
    assert read_json(tmp_path / "file.json") == {**record, "path": "https://REDACTED@host/x"}
    assert json.loads((tmp_path / "file.json").read_text())["classes"] == {"secret": 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{socket.gethostname()} is lost", "HIDDEN is lost"),
        ("MASTER_ADDR=node-7.cluster, RANK=0", "MASTER_ADDR=HIDDEN, RANK=0"),
        ("closed by peer [10.1.2.3]:4567", "closed by peer [HIDDEN]:4567"),
        ("~/.cache/x, '/scratch/me/run 1'", "~HIDDEN, 'HIDDEN 1'"),
        ("12 GB/s, /dev/shm, driver 580.65.06", "12 GB/s, /dev/shm, driver 580.65.06"),
        ("https://download.pytorch.org/whl/cu126", "https://download.pytorch.org/whl/cu126"),
    ],
)
def test_names_of_machines_and_folders_are_hidden_and_rates_versions_and_urls_kept(text: str, expected: str) -> None:
    assert without_places(text) == expected
