"""A run that is killed again and again while it uploads, on machines that keep nothing but the bucket."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from accel_train import train
from accel_train.buckets.store import LOCK, local_run
from accel_train.checkpoint.store import check, step_of
from tests.buckets.conftest import Bucket
from tests.support.processes import run_forked
from tests.support.runs import events, losses, tiny_recipe, write_recipe_file

SETTINGS = {
    "task": "causal-lm",
    "checkpoint": {"every_steps": 3, "keep": 2},
    "schedule": {"max_steps": 900},
    "model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}},
}


class Folder(Bucket):
    """A folder of this machine as a bucket."""

    def __init__(self, path: Path) -> None:
        self.path, self.url = path, f"file://{path}"

    def names(self, below: str = "") -> list[str]:
        files = (path for path in (self.path / below).rglob("*") if path.is_file())
        return [str(path.relative_to(self.path)) for path in files]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def remove(self, below: str) -> None:
        (self.path / below).unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind, kills", [("file", 20), ("s3", 50)])
def test_a_run_killed_while_uploading_leaves_no_half_checkpoint_and_goes_on_from_the_bucket_alone(
    corpus: Path, request: pytest.FixtureRequest, kind: str, kills: int
) -> None:
    whole = train(tiny_recipe(corpus, **SETTINGS))
    bucket: Bucket = request.getfixturevalue("bucket") if kind == "s3" else Folder(corpus / "bucket")
    url = f"{bucket.url}/run"
    recipe, here = write_recipe_file(corpus, **SETTINGS, output_dir=url), Path(local_run(url))
    variables: dict[str, Any] = {
        name: value for name, value in os.environ.items() if name.startswith(("AWS_", "ACCEL_TRAIN_CACHE"))
    }
    generator, newest, half, alone, resumed = random.Random(0), 0, 0, 0, 0
    for kill in range(kills):
        forked = run_forked(["run", str(recipe)], 1, folder=corpus / "processes", **variables)
        seen = steps(bucket)
        deadline, had_some = time.monotonic() + 120, complete(bucket) != []
        # Until a checkpoint is on its way, and then a random moment of it or after it.
        while steps(bucket) <= seen and forked.exit_code(0) is None:
            assert time.monotonic() < deadline, forked.stderr(0)[-3000:]
            time.sleep(0.001 if kind == "file" else 0.02)
        time.sleep(generator.uniform(0, 0.1 if kind == "file" else 0.3))
        if forked.exit_code(0) is not None:
            forked.expect(0)
            break
        forked.end()
        forked.wait()
        if alone:
            assert events(here, "resume")[-1]["step"] == alone, f"kill {kill}: the newest one there"
            resumed += 1
        found = complete(bucket)
        half += len(steps(bucket)) > len(found)
        assert found or not had_some, f"kill {kill}: the bucket has no complete checkpoint"
        assert max(found, default=0) >= newest, f"kill {kill}: step {newest} is lost"
        for step in found:
            name = f"run/checkpoints/step-{step:08d}"
            bucket.fetch(name, corpus / "fetched")
            assert check(corpus / "fetched" / name).problem is None, f"kill {kill}: step {step}"
            shutil.rmtree(corpus / "fetched")
        newest, alone = max(found, default=0), 0
        # A new machine: nothing is left but the bucket, and the lock there is stale.
        if newest and generator.random() < 0.7:
            shutil.rmtree(here)
            bucket.remove(f"run/{LOCK}")
            alone = newest
    run_forked(["run", str(recipe)], 1, folder=corpus / "processes", **variables).expect(0)
    print(f"{kill + 1} kills, {half} left half a checkpoint, {resumed} times the bucket alone was left")
    assert half > 0
    assert resumed > 3
    assert losses(here) == losses(whole.output_dir)
    assert json.loads(bucket.read("run/summary.json"))["steps"] == 900


def steps(bucket: Bucket) -> set[int]:
    """The steps of the checkpoints in the bucket, also of those that are not complete."""
    return {step_of(Path(name).parents[0]) or 0 for name in bucket.names("run/checkpoints") if "/step-" in name}


def complete(bucket: Bucket) -> list[int]:
    """The steps of the checkpoints in the bucket that a resume takes."""
    manifests = (name for name in bucket.names("run/checkpoints") if name.endswith("manifest.json"))
    return sorted(step_of(Path(name).parent) or 0 for name in manifests if bucket.read(name))
