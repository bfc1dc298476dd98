"""Profile the steps of `log.profile_steps`: write a trace and the ten costliest operations to the run folder."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from accel_train.core.files import make_folders
from accel_train.core.ownership import write_file
from accel_train.engine.run import RunContext
from accel_train.engine.step import MicroBatch
from accel_train.observe.run_folder import PROFILE_FOLDER

NUM_OPERATIONS = 10
Steps = Iterator[tuple[int, list[MicroBatch]]]
"""Iterator of 0-based steps with their micro-batches."""


class StepProfiler(AbstractContextManager["StepProfiler"]):
    """Profiler of the steps of `log.profile_steps` that this launch runs. Without the setting it does nothing.

    Each process writes `profile/rank-R-steps-A-B.json.gz`, a trace for Perfetto, and a table of the same name in
    `.txt`. A to B are the steps of one uninterrupted sequence. They are fewer than the recipe's if the run ends or is
    set back among them. A user's file in that place is moved to `previous-N/`.
    """

    def __init__(self, run: RunContext) -> None:
        self._run, self._asked = run, run.plan.recipe.log.profile_steps
        self._is_cuda = run.accelerator.device.type == "cuda"
        self._profile: profile | None = None
        self._first = self._last = 0

    def reading(self, batches: Steps) -> Steps:
        """Return the same batches. If steps are to be profiled, reading them starts and stops the profile."""
        self._end()  # the run was set back and starts reading again
        return batches if self._asked is None else self._profiled(batches, *self._asked)

    def _profiled(self, batches: Steps, first: int, last: int) -> Steps:
        for step, micro_batches in batches:
            number = step + 1
            if not first <= number <= last:
                yield step, micro_batches
                continue
            if self._profile is None:
                self._first, self._profile = number, profile(profile_memory=self._is_cuda)
                self._profile.start()
            self._last = number
            with record_function(f"step {number}"):
                yield step, micro_batches
            if number == last:
                self._end()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Stop and write the current profile, if any."""
        found, self._profile = self._profile, None
        if found is None:
            return
        run, steps = self._run, f"{self._first}-{self._last}"
        with run.observer.pause("profiling"):
            if self._is_cuda:
                torch.cuda.synchronize()  # the last step's kernels belong to the trace
            found.stop()
            name = f"{PROFILE_FOLDER}/rank-{run.accelerator.process_index}-steps-{steps}"
            try:
                _write(found, run.plan.output_dir, name, f"self_{'device' if self._is_cuda else 'cpu'}_time_total")
            except OSError as error:  # a full disk should not end the training
                run.observer.note(f"the profile of steps {steps} could not be written ({error})")
                return
        message = f"profiled steps {self._first} to {self._last}: {name}.json.gz (for ui.perfetto.dev) and {name}.txt"
        run.observer.on_event("profile", self._last, message)


def _write(found: profile, home: Path, name: str, sort_by: str) -> None:
    table = found.key_averages().table(sort_by=sort_by, row_limit=NUM_OPERATIONS)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        found.export_chrome_trace(str(trace))
        content = trace.read_bytes()
    make_folders(home / PROFILE_FOLDER)
    write_file(home / f"{name}.json.gz", content, home)
    write_file(home / f"{name}.txt", table.encode(), home)
