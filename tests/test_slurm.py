"""The SLURM script, run by stand-ins for SLURM's commands, with the real program in two processes on two "nodes"."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accel_train.checkpoint import checkpoint_folders, step_of
from forked import free_port, run_forked
from runs import environment, events, losses, write_corpus, write_recipe_file

SCRIPT = Path(__file__).resolve().parent.parent / "launch" / "slurm.sh"
STEPS = 60
SRUN = f"""#!{sys.executable}
# What srun does that the script leans on: a task for each node, signals handed on to all, the highest exit code.
import signal, subprocess, sys
words = sys.argv[1:]
count = int(next(word for word in words if word.startswith("--ntasks=")).partition("=")[2])
command = words[[word.startswith("-") for word in words].index(False):]
tasks = [subprocess.Popen(command) for _ in range(count)]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda got, _: [task.send_signal(got) for task in tasks if task.poll() is None])
sys.exit(max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks]))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
show) tr , '\\n' <<< "$3" ;;
requeue) echo "$2" >> "$SLURM_SUBMIT_DIR/requeued" ;;
esac
"""


class Job:
    """What `sbatch --nodes=N launch/slurm.sh ARGUMENTS` starts, and starts again."""

    def __init__(self, folder: Path, nodes: int, processes_per_node: int, *arguments: str) -> None:
        self.folder, self.arguments, self.restarts = folder, arguments, 0
        self.process: psutil.Popen | None = None
        commands = folder / "slurm"
        commands.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.variables = {
            "PATH": os.pathsep.join((str(commands), str(Path(sys.executable).parent), os.environ["PATH"])),
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_NODELIST": ",".join(["127.0.0.1"] * nodes),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "PROCESSES_PER_NODE": str(processes_per_node),
            "ACCELERATE_USE_CPU": "true",
        }

    def start(self) -> None:
        variables = {
            **self.variables,
            "SLURM_RESTART_COUNT": str(self.restarts),
            "SLURM_JOB_ID": str(free_port() - 20000),
        }
        with (self.folder / f"job-{self.restarts}.out").open("wb") as out:
            self.process = psutil.Popen(
                ["bash", str(SCRIPT), *self.arguments],
                env=environment(**variables),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.restarts += 1

    def wait(self, seconds: float = 90) -> int:
        assert self.process is not None
        return int(self.process.wait(timeout=seconds))

    def output(self) -> str:
        return (self.folder / f"job-{self.restarts - 1}.out").read_text(errors="replace")

    def requeued(self) -> int:
        path = self.folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def end(self) -> None:
        if self.process is None or not self.process.is_running():
            return
        for each in [*self.process.children(recursive=True), self.process]:
            each.kill()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Killed after the test, whatever became of them."""
    some: list[Job] = []
    yield some
    for job in some:
        job.end()


def recipe_in(folder: Path, name: str, step_seconds: float) -> Path:
    path = write_recipe_file(
        folder,
        task="fault_task:FaultTask",
        output_dir=str(folder / name),
        schedule={"max_steps": STEPS},
        options={"seconds": {"step": step_seconds}},
    )
    return path.rename(folder / f"{name}.yaml")


@pytest.mark.slow
def test_job_that_slurm_signals_saves_on_all_nodes_goes_back_into_the_queue_and_then_on_to_its_end(
    tmp_path: Path, jobs: list[Job]
) -> None:
    write_corpus(tmp_path)
    whole = run_forked(["run", str(recipe_in(tmp_path, "whole", 0))], 2, folder=tmp_path / "processes")
    job = Job(tmp_path, 2, 1, "run", str(recipe_in(tmp_path, "run", 0.05)))
    jobs.append(job)
    job.start()
    wait_for_step(tmp_path / "run", 3, job)
    assert job.process is not None
    job.process.send_signal(signal.SIGUSR1)  # to the batch script alone, as --signal=B: does
    assert job.wait() == 75, job.output()
    assert job.requeued() == 1
    stopped = events(tmp_path / "run", "preempted")[-1]["step"]
    assert 3 <= stopped < STEPS
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path / "run" / "checkpoints")] == [stopped]

    job.arguments = ("run", str(tmp_path / "run.yaml"), "--options.seconds.step", "0")
    job.start()
    assert job.wait() == 0, job.output()
    assert job.requeued() == 1
    assert events(tmp_path / "run", "resume")[-1]["step"] == stopped
    assert whole.wait() == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def wait_for_step(run: Path, step: int, job: Job) -> None:
    deadline = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists() or max(losses(run), default=0) < step:
        assert time.monotonic() < deadline, f"the run did not start\n{job.output()}"
        assert job.process is not None
        assert job.process.poll() is None, job.output()
        time.sleep(0.05)


def test_wrong_recipe_ends_the_job_once_and_for_all(tmp_path: Path, jobs: list[Job]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: runs/x\nmodle: {}\n")
    job = Job(tmp_path, 1, 2, "run", str(recipe))
    jobs.append(job)
    job.start()
    assert job.wait() == 2, job.output()
    assert job.requeued() == 0
    assert job.output().count("did you mean model") == 1, job.output()  # and so no restart in place
