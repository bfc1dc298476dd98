"""The SLURM script, run by stand-ins for SLURM's commands, with the real program in two processes on two "nodes"."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from accel_train.checkpoint.store import checkpoint_folders, step_of
from tests.support.processes import free_port, run_forked
from tests.support.runs import (
    REPOSITORY,
    environment,
    event_steps,
    losses,
    wait_for_step,
    write_lines,
    write_recipe_file,
)
from tests.support.wording import assert_golden

SCRIPT = REPOSITORY / "launch" / "slurm.sh"
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
codes = [code if code >= 0 else 128 - code for code in [task.wait() for task in tasks]]
for task, code in enumerate(codes):
    if code:
        print(f"srun: error: node{{task}}: task {{task}}: Exited with exit code {{code}}", file=sys.stderr)
sys.exit(max(codes))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show hostnames") tr , '\\n' <<< "$3" ;;
"show job")
  printf 'JobId=%s JobName=accel_train\\n   ReqNodeList=(null) ExcNodeList=%s\\n' "$3" "${EXCLUDED:-(null)}" ;;
requeue*) echo "$2" >> "$SLURM_SUBMIT_DIR/requeued" ;;
update*) [ -e "$SLURM_SUBMIT_DIR/requeued" ] && echo "$3" >> "$SLURM_SUBMIT_DIR/updated" ;;  # of pending jobs alone
esac
"""


class Job:
    """What `sbatch --nodes=N launch/slurm.sh ARGUMENTS` starts, and starts again."""

    process: psutil.Popen

    def __init__(self, folder: Path, nodes: int, processes_per_node: int, *arguments: str) -> None:
        self.folder, self.arguments, self.restarts = folder, arguments, 0
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
        numbers = {"SLURM_RESTART_COUNT": str(self.restarts), "SLURM_JOB_ID": str(free_port() - 20000)}
        variables, words = environment(**self.variables, **numbers), ["bash", str(SCRIPT), *self.arguments]
        with (self.folder / f"job-{self.restarts}.out").open("ab") as out:
            self.process = psutil.Popen(words, env=variables, stdout=out, stderr=subprocess.STDOUT)
        self.restarts += 1

    def wait(self) -> int:
        return int(self.process.wait(timeout=90))

    def wait_for_step(self, step: int) -> None:
        """Wait until the run in `run` has logged a step."""
        wait_for_step(self.folder / "run", step, lambda: self.process.poll() is None, self.output)

    def output(self) -> str:
        return (self.folder / f"job-{self.restarts - 1}.out").read_text(errors="replace")

    def requeued(self) -> int:
        path = self.folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def end(self) -> None:
        if self.process.is_running():
            for each in [*self.process.children(recursive=True), self.process]:
                each.kill()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job in the test's folder. It is killed after the test, whatever became of it."""
    jobs: list[Job] = []

    def make(nodes: int, processes_per_node: int, *arguments: str) -> Job:
        jobs.append(Job(tmp_path, nodes, processes_per_node, *arguments))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def recipe_in(folder: Path, name: str, step_seconds: float) -> Path:
    path = write_recipe_file(
        folder,
        task="tests.support.tasks.process_faults:FaultTask",
        output_dir=str(folder / name),
        schedule={"max_steps": STEPS},
        options={"seconds": {"step": step_seconds}},
    )
    return path.rename(folder / f"{name}.yaml")


@pytest.mark.slow
def test_job_that_slurm_signals_saves_on_all_nodes_goes_back_into_the_queue_and_then_on_to_its_end(
    corpus: Path, make_job: Callable[..., Job]
) -> None:
    whole = run_forked(["run", str(recipe_in(corpus, "whole", 0))], 2, folder=corpus / "processes")
    job, run = make_job(2, 1, "run", str(recipe_in(corpus, "run", 0.05))), corpus / "run"
    job.start()
    job.wait_for_step(3)
    job.process.send_signal(signal.SIGUSR1)  # to the batch script alone, as --signal=B: does
    assert job.wait() == 75, job.output()
    assert job.requeued() == 1
    stopped = event_steps(run, "preempted")[-1]
    assert 3 <= stopped < STEPS
    assert [step_of(folder) for folder in checkpoint_folders(run / "checkpoints")] == [stopped]

    job.arguments = ("run", str(corpus / "run.yaml"), "--options.seconds.step", "0")
    job.start()
    assert job.wait() == 0, job.output()
    assert job.requeued() == 1
    assert event_steps(run, "resume")[-1] == stopped
    whole.expect(0)
    assert losses(run) == losses(corpus / "whole")


def test_wrong_recipe_ends_the_job_once_and_for_all(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    recipe = write_lines(tmp_path / "recipe.yaml", "output_dir: runs/x", "modle: {}")
    job = make_job(1, 2, "run", str(recipe))
    job.start()
    assert job.wait() == 2, job.output()
    assert job.requeued() == 0
    (line,) = (line for line in job.output().splitlines() if "modle" in line)  # and so no restart in place
    assert_golden(line)


@pytest.mark.parametrize(
    ("codes", "hosts", "restarts", "requeued", "excluded"),
    [
        ([5, 5], ["b.cluster"], 0, True, "b"),
        ([5, 5], ["b", "b"], 9, True, "b"),
        ([5, 5], ["b"], 10, False, None),  # no further: the same would happen for ever
        ([5, 5], ["elsewhere"], 0, True, None),
        ([5, 5], ["b", "a"], 0, True, None),  # which of them is bad?
        ([5, 5], [], 0, True, None),
        ([75, 75], ["b"], 99, True, None),
        ([2, 5], [], 0, False, None),
        ([5, 3], [], 0, False, None),
        ([4, 4], [], 0, False, None),
        ([6, 6], [], 0, False, None),
        ([1, 5], [], 0, False, None),
    ],
)
def test_job_goes_back_into_the_queue_where_that_helps_and_without_the_node_that_is_named_bad(
    codes: list[int],
    hosts: list[str],
    restarts: int,
    requeued: bool,
    excluded: str | None,
    tmp_path: Path,
    make_job: Callable[..., Job],
) -> None:
    job = make_job(2, 1, "run", "recipe.yaml")
    (tmp_path / "slurm" / "python").write_text(
        "#!/usr/bin/env bash\n"
        f"codes=({' '.join(map(str, codes))})\n"
        'mkdir "$SLURM_SUBMIT_DIR/first" 2>/dev/null; task=$?\n'
        '[ "$task" = 0 ] && printf %b "$HOSTS" >> "$ACCEL_TRAIN_LOST_HOSTS"\n'
        'exit "${codes[$task]}"\n'
    )
    (tmp_path / "slurm" / "python").chmod(0o755)
    job.variables |= {"SLURM_JOB_NODELIST": "a,b", "EXCLUDED": "c", "HOSTS": "".join(f"{host}\\n" for host in hosts)}
    job.restarts = restarts
    job.start()
    assert job.wait() == (max(codes) if set(codes) <= {5, 75} else min(set(codes) - {5})), job.output()
    assert job.requeued() == int(requeued), job.output()
    updated = tmp_path / "updated"
    assert (updated.read_text().split() if updated.exists() else []) == (
        [f"ExcNodeList=c,{excluded}"] if excluded else []
    )
    assert ("without b," in job.output()) is (excluded is not None)


def test_job_asks_for_the_cores_and_the_memory_of_its_processes_and_says_how_much() -> None:
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in SCRIPT.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert int(asked["cpus-per-task"]) >= 5 * int(asked["gpus-per-node"])  # a process and its four readers
    assert asked["mem"] == "0"  # all that the node has
    assert (
        "--cpus-per-task=" in SCRIPT.read_text().partition("srun --nodes")[2]
    )  # srun does not take it over since 22.05


@pytest.mark.slow
def test_node_whose_process_was_killed_is_excluded_by_what_the_run_itself_says(
    corpus: Path, make_job: Callable[..., Job]
) -> None:
    job = make_job(1, 2, "run", str(recipe_in(corpus, "run", 0.05)))
    job.variables |= {"SLURM_JOB_NODELIST": socket.gethostname().partition(".")[0], "MAX_RESTARTS": "0"}
    job.start()
    job.wait_for_step(2)
    workers = [each for each in job.process.children(recursive=True) if each.environ().get("RANK") == "1"]
    workers[0].kill()
    assert job.wait() == 5, job.output()
    assert job.requeued() == 1
    excluded = f"ExcNodeList={job.variables['SLURM_JOB_NODELIST']}"
    assert (corpus / "updated").read_text().split() == [excluded], job.output()
