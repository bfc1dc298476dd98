"""The page about your own code, done as a reader would: its files in an empty folder, and the commands of a section."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from accel_train.cli.main import main
from accel_train.core.json_io import read_json
from tests.docs.test_quick_starts import sections
from tests.support.runs import losses, metrics, summary_of

SECTIONS = {name: text for name, text in sections("docs/extending.md").items() if "```bash" in text}
FILE = re.compile(r"^```(?:python|yaml)\n(# (\w+\.(?:py|yaml)).*?)^```$", flags=re.DOTALL | re.MULTILINE)
FILES = [found for text in SECTIONS.values() for found in FILE.findall(text)]
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
QUICK = ("--schedule.max_steps", "2")
"""For `finetune`, which trains for 20 epochs or so."""


@pytest.fixture(autouse=True)
def files(empty_folder: Path) -> None:
    """All files of the page in an empty folder."""
    for text, name in FILES:
        Path(name).write_text(text)


def type_commands(section: str) -> None:
    """Run each command as a process of its own would: it has imported none of the files."""
    for line in "".join(COMMANDS.findall(SECTIONS[section])).replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        path = [*sys.path]
        try:
            if program == "python":
                runpy.run_path(words[0], run_name="__main__")
            else:
                assert main([*words, *(QUICK if words[0] == "finetune" else ())]) == 0, line
        finally:
            sys.path[:] = path
            for _, name in FILES:
                sys.modules.pop(name.partition(".")[0], None)


def rates(run: str) -> dict[int, float]:
    return {row["step"]: row["learning_rate"] for row in metrics(Path(run))}


def test_every_section_with_commands_has_a_test() -> None:
    tested = re.findall(r'type_commands\("(.*)"\)', Path(__file__).read_text())
    assert sorted({*tested}) == sorted(SECTIONS)


def test_the_task_learns_and_its_run_is_evaluated() -> None:
    type_commands("Add a task")
    assert summary_of(Path("runs/line"))["eval"]["loss"] < 0.1


def test_the_changed_task_reads_its_setting() -> None:
    type_commands("Change a built-in task")
    plain = ("--data.noise", "0", "--output_dir", "runs/plain")
    assert main(["run", "noise.yaml", *plain]) == 0
    assert losses(Path("runs/noise")) != losses(Path("runs/plain"))


def test_the_task_that_counts_its_targets_learns() -> None:
    type_commands("Count your own targets")
    assert summary_of(Path("runs/line-fit"))["eval"]["loss"] < 0.1


def test_the_data_set_is_read_in_a_program() -> None:
    type_commands("Read your own dataset")
    assert Path("waves.bin").stat().st_size == 200 * 65 * 4
    assert summary_of(Path("runs/waves"))["steps"] == -(-200 // 32)


def test_the_metric_is_the_recall_of_the_worst_class_and_chooses_the_best_weights() -> None:
    type_commands("Add a metric")
    found = read_json(Path("runs/example/evaluation.json"))
    report, names = (found["details"]["classification"][key] for key in ("report", "label_names"))
    assert found["metrics"]["worst_recall"] == pytest.approx(min(report[name]["recall"] for name in names))


def test_the_optimizer_learns_the_line() -> None:
    type_commands("Add an optimizer")
    assert summary_of(Path("runs/sign"))["eval"]["loss"] < 0.1


def test_the_schedule_gives_the_rates_of_the_page() -> None:
    type_commands("Add a schedule")
    found = rates("runs/sawtooth")
    assert sorted(found) == [10, 20, 30, 40, 50]
    assert found == pytest.approx({step: 0.3 * (1 - (step - 1) % 20 / 20) for step in found})


def test_the_callback_ends_the_run_at_its_loss() -> None:
    type_commands("Add a callback")
    evaluated = {row["step"]: row["loss"] for row in metrics(Path("runs/stopped"), "eval")}
    *before, last = sorted(evaluated)
    assert last == summary_of(Path("runs/stopped"))["steps"] < 50
    assert evaluated[last] < 0.01 <= min(evaluated[step] for step in before)
