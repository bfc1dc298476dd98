"""K2: a run of two processes that is killed at random, half of the time in a save, and run again each time, is the run
that
was never killed: no checkpoint corrupt, none lost, every loss, weight and moment the same to the bit."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from accel_train.checkpoint.store import check
from accel_train.core.json_io import read_json
from tests.support.comparisons import assert_same_bits_of_runs
from tests.support.detectors import CROPS, DEFORMABLE, sections_of
from tests.support.goodput import assert_accounts_add_up
from tests.support.kills import KilledRun, Tally
from tests.support.processes import run_forked
from tests.support.runs import (
    TINY_MODEL,
    command,
    environment,
    event_steps,
    losses,
    wait_for_step,
    write_base,
    write_corpus,
    write_jsonl,
    write_recipe_file,
    write_yaml,
)
from tests.support.text_tasks import BERT

MAX_STEPS = 120


def recipe_in(folder: Path, name: str, max_steps: int, model: dict[str, Any] | None = None) -> Path:
    """Saves every third step beside the training, evaluates every fifth; ragged batches, two micro-batches, dropout."""
    path = write_recipe_file(
        folder,
        task="tests.support.tasks.kill_points:KillTask",
        output_dir=str(folder / name),
        model=model or {"config": {**TINY_MODEL, "resid_pdrop": 0.1}},
        batch={"global_batch_size": 8, "gradient_accumulation_steps": 2},
        schedule={"max_steps": max_steps},
        checkpoint={"every_steps": 3, "keep": 2},
        evaluate={"every_steps": 5, "max_samples": 32},
        options={"ragged": True},
    )
    return path.rename(folder / f"{name}.yaml")


def kill_and_compare(
    folder: Path, num_kills: int, max_steps: int, seed: int, write: Callable[[Path, str, int], Path] = recipe_in
) -> Tally:
    write_corpus(folder)
    forked = run_forked(["run", str(write(folder, "whole", max_steps))], 2, folder=folder / "processes")
    forked.expect(0, 240)
    whole, generator, tally = folder / "whole", random.Random(seed), Tally()
    while tally.num_kills < num_kills:
        name, began = f"killed-{tally.finished}", time.time()
        run = KilledRun(write(folder, name, max_steps), folder / name, generator, tally)
        if not run.kill_until_finished(num_kills):
            run.finish()
        killed = folder / name
        assert_accounts_add_up(killed, began)
        assert_same_bits_of_runs(killed, whole, max_steps)
    assert tally.corrupt == []
    assert tally.lost == []
    return tally


@pytest.mark.faults
@pytest.mark.timeout(1500)
def test_two_hundred_kills_half_of_them_in_a_save_change_nothing(tmp_path: Path) -> None:
    tally = kill_and_compare(tmp_path, 200, MAX_STEPS, seed=2)
    print(tally)
    assert tally.num_kills == 200
    assert tally.kills["in save"] >= 80
    assert tally.half_done >= 10, "killed in a save, and nothing is half done"


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_kills_change_nothing_of_a_run_whose_checkpoints_hold_adapters_alone(tmp_path: Path) -> None:
    model = {"config": None, "pretrained": str(write_base(tmp_path)), "lora": {"rank": 2, "dropout": 0.1}}
    tally = kill_and_compare(tmp_path, 12, 40, seed=3, write=partial(recipe_in, model=model))
    print(tally)
    assert tally.kills["in save"] >= 3


def small_recipe_in(folder: Path, name: str, max_steps: int, sections: dict[str, Any]) -> Path:
    """Saves every third step, evaluates every fourth, averages weights, accumulates two micro-batches."""
    recipe = {
        **sections,
        "output_dir": str(folder / name),
        "batch": {"global_batch_size": 8, "gradient_accumulation_steps": 2},
        "optimizer": {"learning_rate": 1e-3, "ema_decay": 0.9},
        "schedule": {"max_steps": max_steps},
        "precision": {"mixed_precision": "no"},
        "evaluate": {"every_steps": 4, "max_samples": 6},
        "checkpoint": {"every_steps": 3, "keep": 2},
        "log": {"every_steps": 1, "progress": False},
    }
    return write_yaml(folder / f"{name}.yaml", recipe)


@pytest.mark.faults
@pytest.mark.parametrize("task", ["sentence-embedding", "object-detection"])
def test_kills_change_nothing_of_a_run_whose_loss_is_over_the_global_batch(tmp_path: Path, task: str) -> None:
    if task == "object-detection":
        sections = sections_of(tmp_path, model={**DEFORMABLE, "dropout": 0.1}, data=CROPS)
        sections["task"] = "tests.support.tasks.kill_points:KillObjectDetection"
    else:
        rows = [
            {"anchor": f"w{n} w{n * n % 31}", "positive": f"w{n} w{n % 7} w{n % 5}", "negative": f"w{n * 3 % 40}"}
            for n in range(60)
        ]
        sections = {
            "task": "tests.support.tasks.kill_points:KillSentenceEmbedding",
            "model": {"config": {**BERT, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}},
            "tokenizer": "bytes",
            "data": {
                "train": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
                "eval_fraction": 0.2,
                "pair_columns": ["anchor", "positive", "negative"],
                "cache_dir": str(tmp_path / "cache"),
            },
        }
    tally = kill_and_compare(tmp_path, 4, 15, seed=4, write=partial(small_recipe_in, sections=sections))
    print(tally)
    assert tally.num_kills == 4


COMPILER = """#!/bin/sh
# A compiler that cuts the output that TRAP names, says so, and waits to be killed.
before=; for word in "$@"; do [ "$before" = -o ] && output=$word; before=$word; done
/usr/bin/env g++ "$@" || exit
case "$output" in *$TRAP)
    truncate -s "$SIZE" "$output"
    echo $$ > "$REACHED.new" && mv "$REACHED.new" "$REACHED"
    exec sleep 600
esac
"""


def kill_in_compiler(recipe: Path, output: str, size: int, **variables: str) -> None:
    """Start a run, and kill it and its compiler while `output`, of which `size` bytes are written, is compiled."""
    reached = recipe.with_name("reached")
    reached.unlink(missing_ok=True)
    process = subprocess.Popen(
        command(recipe),
        env=environment(TRAP=output, SIZE=str(size), REACHED=str(reached), **variables),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not reached.exists():
            assert process.poll() is None, f"the run ended with {process.returncode}, and compiled no {output}"
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with suppress(ProcessLookupError):  # it may be in a session of its own
        os.kill(int(reached.read_text()), signal.SIGKILL)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_while_a_kernel_is_compiled_and_linked_starts_again(corpus: Path) -> None:
    compiler = corpus / "g++"  # torch goes by the name
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    # Nothing ends in the name of a trap that is not set.
    caches = {"ACCEL_TRAIN_CACHE": str(corpus / "cache"), "TMPDIR": str(corpus / "temporary"), "CXX": str(compiler)}
    (corpus / "temporary").mkdir()

    def recipe(name: str) -> Path:
        model = {"config": {**TINY_MODEL, "resid_pdrop": 0.1}}
        sections = {"precision": {"compile": True}, "schedule": {"max_steps": 3}, "data": {"eval_fraction": 0}}
        return write_recipe_file(corpus, output_dir=str(corpus / name), model=model, **sections)

    def train(name: str, **variables: str) -> list[float]:
        subprocess.run(command(recipe(name)), env=environment(**variables), check=True, timeout=300)
        return list(losses(corpus / name).values())

    for output, size in ((".gch", 1_000_000), (".main.so", 0)):
        kill_in_compiler(recipe("killed"), output, size, **caches)
    assert train("killed", **caches, TRAP="none") == train("whole", ACCEL_TRAIN_CACHE=str(corpus / "other-cache"))
    choice = read_json(corpus / "killed" / "summary.json")["choices"]["compile_cache"]
    assert "left unfinished" in json.dumps(choice)


@pytest.mark.faults
def test_processes_of_a_torchrun_that_is_killed_save_and_end_within_ten_seconds(corpus: Path) -> None:
    recipe, folder = recipe_in(corpus, "run", 100_000), corpus / "run"
    launcher = psutil.Popen(
        command(recipe, processes=2), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_step(folder, 5, lambda: launcher.poll() is None)
    ranks = launcher.children(recursive=True)
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    for process in alive:
        process.kill()
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    saved_at = event_steps(folder, "preempted")[0]
    assert check(folder / "checkpoints" / f"step-{saved_at:08d}").problem is None
