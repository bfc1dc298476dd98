"""A run that is killed again and again while it uploads, on machines that keep nothing but the bucket."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from accel_train import train
from accel_train.buckets.store import LOCK, local_run
from accel_train.checkpoint.store import check, step_of
from tests.support.processes import run_forked
from tests.support.runs import events, losses, tiny_recipe, write_recipe_file

KILLS = 20
SETTINGS = {
    "task": "causal-lm",
    "checkpoint": {"every_steps": 3, "keep": 2},
    "schedule": {"max_steps": 900},
    "model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}},
}


@pytest.mark.slow
def test_a_run_killed_while_uploading_leaves_no_half_checkpoint_and_goes_on_from_the_bucket_alone(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(corpus / "own-cache"))
    whole = train(tiny_recipe(corpus, **SETTINGS))
    bucket, url = corpus / "bucket", f"file://{corpus}/bucket/run"
    recipe = write_recipe_file(corpus, **SETTINGS, output_dir=url)
    root, here = bucket / "run" / "checkpoints", Path(local_run(url))
    generator, newest, resumed, half = random.Random(0), 0, 0, 0
    for kill in range(KILLS):
        forked = run_forked(
            ["run", str(recipe)], 1, folder=corpus / "processes", ACCEL_TRAIN_CACHE=str(here.parents[1])
        )
        deadline, begun = time.monotonic() + 120, len(complete(root))
        seen = {path.name for path in root.glob("step-*")}
        # Until a checkpoint is on its way, and then a random moment of it or after it.
        while {path.name for path in root.glob("step-*")} <= seen and forked.exit_code(0) is None:
            assert time.monotonic() < deadline, forked.stderr(0)[-3000:]
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.1))
        if forked.exit_code(0) is not None:
            forked.expect(0)
            break
        forked.end()
        forked.wait()
        found = complete(root)
        half += len(list(root.glob("step-*"))) > len(found)
        assert begun == 0 or found, f"kill {kill}: the bucket has no complete checkpoint"
        assert max(found, default=0) >= newest, f"kill {kill}: step {newest} is lost"
        for step in found:
            assert check(root / f"step-{step:08d}").problem is None, f"kill {kill}: step {step}"
        newest = max(found, default=0)
        # A new machine: nothing is left but the bucket, and the lock there is stale.
        if (here / "checkpoints").exists() and generator.random() < 0.7:
            shutil.rmtree(here)
            (bucket / "run" / LOCK).unlink(missing_ok=True)
            resumed += newest > 0
    run_forked(["run", str(recipe)], 1, folder=corpus / "processes", ACCEL_TRAIN_CACHE=str(here.parents[1])).expect(0)
    print(f"{kill + 1} kills, {half} left half a checkpoint, {resumed} times the bucket alone was left")
    assert half > 0
    assert resumed > 3
    assert losses(here) == losses(whole.output_dir)
    steps = [event["step"] for event in events(here, "resume")]
    assert steps == sorted(steps)
    assert json.loads((bucket / "run" / "summary.json").read_text())["steps"] == 900


def complete(root: Path) -> list[int]:
    """The steps of the checkpoints in the bucket that a resume takes."""
    manifests = (path for path in root.glob("step-*/manifest.json") if path.stat().st_size)
    return sorted(step_of(path.parent) or 0 for path in manifests)
