"""A server that speaks the S3 API, for what no store in memory shows: HTTP, signatures, conditions, and multipart
uploads."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from accel_train.recipe.schema import Recipe
from tests.support.processes import free_port
from tests.support.runs import recipe_dict

SECRET = "planted/secret+of+the+tests"
KEY_ID = "AKIAPLANTEDKEYOFTESTS"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache next to the corpus; the stores in memory end up empty."""
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "own-cache"))
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server."""
    address = f"127.0.0.1:{free_port()}"
    host, _, port = address.partition(":")
    with (tmp_path_factory.mktemp("s3") / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "--host", host, "--port", port], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urlopen(f"http://{address}/moto-api/", timeout=60).close()
                break
            except (URLError, ConnectionError):
                assert server.poll() is None, Path(log.name).read_text()
                assert time.monotonic() < deadline, "no answer"
                time.sleep(0.05)
        yield f"http://{address}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3_environment(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's address and credentials, as programs of AWS read them."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": s3_server,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        # Nothing of this machine.
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
    }.items():
        monkeypatch.setenv(name, value)


def recipe_of(folder: Path, url: str, **sections: Any) -> Recipe:
    sections = {"checkpoint": {"every_steps": 2, "keep": 2}} | sections
    return Recipe.model_validate(recipe_dict(folder, task="causal-lm", output_dir=url, **sections))


class Bucket:
    """An empty bucket, through the client of AWS: independent of fsspec."""

    def __init__(self) -> None:
        import boto3

        self.name = f"of-{time.time_ns()}"
        self.url = f"s3://{self.name}"
        self.client: Any = boto3.client("s3")
        self.client.create_bucket(Bucket=self.name)

    def names(self, below: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=below)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def read(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=name)["Body"].read())

    def write(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=content)

    def remove(self, below: str) -> None:
        for name in self.names(below):
            self.client.delete_object(Bucket=self.name, Key=name)

    def fetch(self, below: str, folder: Path) -> None:
        for name in self.names(below):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(name))

    def uploads(self) -> list[str]:
        """The names of multipart uploads that have not ended."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]


@pytest.fixture
def bucket(s3_environment: None, tmp_path: Path) -> Bucket:
    """An empty bucket of this test."""
    return Bucket()
