"""Runs and data on a server that speaks the S3 API."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from accel_train import train
from accel_train.buckets.files import fetch_files
from accel_train.buckets.store import LOCK, Store, local_run
from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from tests.buckets.conftest import KEY_ID, SECRET, Bucket, recipe_of
from tests.support.every_task import CASES
from tests.support.runs import Capture, events, losses, recipe_dict, tiny_recipe, write_yaml


def test_a_run_leaves_everything_there_and_removes_what_rotation_removes(
    corpus: Path, bucket: Bucket, capsys: Capture
) -> None:
    folder = train(recipe_of(corpus, f"{bucket.url}/run")).output_dir
    here = {f"run/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    there = {name: bucket.read(name) for name in bucket.names()}
    assert {name: here[name] for name in here.keys() - {"run/.lock", "run/.lock.owner"}} == there
    assert {int(name.split("/")[2][5:]) for name in there if "/step-" in name} == {2, 10, 12}
    told = capsys.readouterr()
    files = [path for path in corpus.rglob("*") if path.is_file()]
    for secret in (SECRET, KEY_ID):
        assert secret not in told.out + told.err
        assert not [name for name, content in there.items() if secret.encode() in content]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_a_run_goes_on_from_the_bucket_alone_and_ends_as_one_that_was_not_interrupted(
    corpus: Path, bucket: Bucket
) -> None:
    whole = train(recipe_of(corpus, str(corpus / "whole")))
    url = f"{bucket.url}/run"
    part = train(recipe_of(corpus, url, checkpoint={"every_steps": 2, "keep": 3}))
    for name in ("checkpoints/step-00000012", "checkpoints/step-00000010", "summary.json", "model"):
        bucket.remove(f"run/{name}")
    shutil.rmtree(part.output_dir)
    folder = train(recipe_of(corpus, url)).output_dir
    assert [event["step"] for event in events(folder, "resume")] == [8]
    assert losses(folder) == losses(whole.output_dir)


def test_parts_of_files_that_a_kill_left_are_removed_and_no_others(corpus: Path, bucket: Bucket) -> None:
    for name in ("run/checkpoints/step-00000002/model.safetensors", "run-2/model.safetensors"):
        started = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=name)
        bucket.client.upload_part(
            Bucket=bucket.name, Key=name, UploadId=started["UploadId"], PartNumber=1, Body=bytes(5 << 20)
        )
    train(recipe_of(corpus, f"{bucket.url}/run"))
    assert bucket.uploads() == ["run-2/model.safetensors"]


def test_a_rollback_goes_to_a_checkpoint_that_came_from_the_bucket(corpus: Path, bucket: Bucket) -> None:
    faulty = {
        "task": "tests.support.tasks.disk_faults:DiskTask",
        "output_dir": f"{bucket.url}/run",
        "checkpoint": {"every_steps": 4, "keep": 2, "accept_changes": True},
        "guard": {"healthy_after_steps": 3, "max_consecutive_skips": 2},
        "options": {"poisoned": [14, 15, 16]},
        "data": {"shuffle": False},
    }
    schedule = {"type": "constant", "warmup_steps": 2}
    folder = train(tiny_recipe(corpus, **faulty, schedule={**schedule, "max_steps": 13})).output_dir
    shutil.rmtree(folder)
    train(tiny_recipe(corpus, **faulty, schedule={**schedule, "max_steps": 20}))
    assert [(event["step"], event["to_step"]) for event in events(folder, "rollback")] == [(16, 8)]


@pytest.mark.parametrize("pattern", ["text/corpus.jsonl", "text/*.jsonl", "text"])
def test_a_run_on_data_there_is_the_run_on_local_files(corpus: Path, bucket: Bucket, pattern: str) -> None:
    bucket.write("text/corpus.jsonl", (corpus / "corpus.jsonl").read_bytes())
    # A folder that was made in the console.
    bucket.write("text/", b"")
    there = train(recipe_of(corpus, str(corpus / "there"), data={"train": f"{bucket.url}/{pattern}"}))
    here = train(recipe_of(corpus, str(corpus / "here")))
    assert losses(there.output_dir) == losses(here.output_dir)


def test_a_folder_that_was_made_in_the_console_does_not_end_a_resume(corpus: Path, bucket: Bucket) -> None:
    for name in ("run/", "run/checkpoints/", "run/model/"):
        bucket.write(name, b"")
    folder = train(recipe_of(corpus, f"{bucket.url}/run")).output_dir
    for name in ("checkpoints/step-00000012", "summary.json", "model/m", "model/."):
        bucket.remove(f"run/{name}")
    shutil.rmtree(folder)
    train(recipe_of(corpus, f"{bucket.url}/run"))
    assert [event["step"] for event in events(folder, "resume")] == [10]


def test_a_changed_file_is_copied_again(corpus: Path, bucket: Bucket) -> None:
    for content in (b"a", b"b"):
        bucket.write("a.txt", content)
        assert Path(fetch_files(f"{bucket.url}/a.txt")).read_bytes() == content
        assert (Path(fetch_files(bucket.url)) / "a.txt").read_bytes() == content


def test_commands_take_the_name_of_a_run_there(corpus: Path, bucket: Bucket, capsys: Capture) -> None:
    url = f"{bucket.url}/run"
    sections = CASES["text-classification"](corpus)
    recipe = write_yaml(
        corpus / "recipe.yaml", recipe_dict(corpus, task="text-classification", output_dir=url, **sections)
    )
    assert main(["run", str(recipe)]) == 0
    folder = Path(local_run(url))
    shutil.rmtree(folder)
    for command in ("watch --once", "watch --json", "report"):
        assert main([*command.split(), url]) == 0
        assert not (folder / "model").exists()
    assert main(["predict", url, sections["data"]["train"], "--out", str(corpus / "found.csv")]) == 0
    assert len((corpus / "found.csv").read_text().splitlines()) == 61
    assert main(["evaluate", url]) == 0
    capsys.readouterr()
    assert main(["report", f"{bucket.url}/none"]) == 2
    assert f"{bucket.url}/none: no run is here" in capsys.readouterr().err


def test_a_lock_there_keeps_out_a_second_run(corpus: Path, bucket: Bucket, capsys: Capture) -> None:
    recipe = write_yaml(corpus / "recipe.yaml", recipe_dict(corpus, task="causal-lm", output_dir=f"{bucket.url}/run"))
    bucket.write(f"run/{LOCK}", f"other another-machine {time.time() - 100}".encode())
    assert main(["run", str(recipe)]) == 2
    assert "a run on another-machine uses it and renewed its lock 10" in capsys.readouterr().err
    assert bucket.names() == [f"run/{LOCK}"]


def takes_lock(url: str, folder: Path, gate: threading.Barrier) -> str:
    """How `take_lock` ends, in a thread that begins together with others."""
    store = Store(url)
    folder.mkdir()
    # The connection is there.
    store.names()
    gate.wait()
    try:
        store.take_lock(folder)
    except SettingError as error:
        return "refused" if " uses it and renewed its lock " in str(error) else str(error)
    return "taken"


def test_of_runs_that_begin_at_once_exactly_one_takes_the_lock(corpus: Path, bucket: Bucket) -> None:
    for turn in range(5):
        gate = threading.Barrier(4)
        with ThreadPoolExecutor(4) as threads:
            takes = [
                threads.submit(takes_lock, f"{bucket.url}/run-{turn}", corpus / f"{turn}-{number}", gate)
                for number in range(4)
            ]
        assert sorted(take.result() for take in takes) == ["refused"] * 3 + ["taken"]


@pytest.fixture
def checked_credentials(s3_server: str) -> Iterator[None]:
    """From now on, the server refuses keys that it does not know."""
    for count in (b"0", b"inf"):
        headers = {"Content-Type": "text/plain"}
        urlopen(Request(f"{s3_server}/moto-api/reset-auth", data=count, headers=headers)).close()
        if count == b"0":
            yield


@pytest.mark.parametrize("place_of", ["output_dir", "data.train"])
@pytest.mark.parametrize("cause", ["unknown key", "no credentials", "no bucket"])
def test_a_bucket_that_cannot_be_used_is_one_line_before_the_model_is_built(
    corpus: Path,
    bucket: Bucket,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    cause: str,
    place_of: str,
) -> None:
    monkeypatch.setattr("accel_train.buckets.store.START_SECONDS", 0.3)
    url = f"{bucket.url}/x" if cause != "no bucket" else "s3://no-such-bucket/x"
    if cause == "unknown key":
        request.getfixturevalue("checked_credentials")
    if cause == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    sections = {"output_dir": url} if place_of == "output_dir" else {"data": {"train": url}}
    recipe = write_yaml(corpus / "recipe.yaml", recipe_dict(corpus, task="causal-lm", **sections))
    assert main(["run", str(recipe)]) == 2
    told = capsys.readouterr()
    (line,) = [line for line in (told.out + told.err).splitlines() if "request" in line or "no file" in line]
    assert line.startswith(f"error: {url}: ")
    assert "trainable parameters" not in told.out
    for secret in (SECRET, KEY_ID):
        assert secret not in told.out + told.err
