"""docs/scaling.md and the launch files' own words: every file they name is there, and every command is one that its
program takes.
"""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch.distributed.run import get_args_parser

from accel_train.cli.main import parse_arguments
from accel_train.data.batch_sizes import resolve_batch
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.parallel import Parallel
from accel_train.torchrun import FINAL, PEER, PREEMPTED, SHUTDOWN_SECONDS
from tests.support.runs import REPOSITORY
from tests.support.wording import raises_golden

SCALING = (REPOSITORY / "docs" / "scaling.md").read_text()
STAND_INS = {
    "RECIPE": "recipes/gpt2_124m.yaml",
    "IP": "10.0.0.1",
    "HOST": "host",
    "NAME": "name",
    "FILE": "launch/ddp.yaml",
}
SBATCH = {"--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--time", "--export"}


def commands_of(text: str) -> list[list[str]]:
    """Commands in code blocks, in backticks, or indented in a comment, with placeholders filled in."""
    text = re.sub(
        r"^```\w*\n(.*?)^```$", lambda block: re.sub(r"(.+)", r"`\1`", block[1]), text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r" \\\n#\s+", " ", text)
    quoted = re.findall(r"`([^`]+)`", text) + re.findall(r"^#   (\S.*)$", text, flags=re.MULTILINE)
    programs = (
        "torchrun ",
        "accelerate launch --config",
        "accel-train ",
        "python -m ",
        "sbatch ",
        "kubectl ",
        "sky ",
        "launch/cpu",
    )
    found = [shlex.split(words, comments=True) for words in quoted if words.startswith(programs)]
    return [
        [STAND_INS.get(word, word.replace("=RECIPE", f"={STAND_INS['RECIPE']}")) for word in words] for words in found
    ]


def is_taken_by_program(words: list[str]) -> None:
    """`run RECIPE --section.field VALUE` and its like."""
    parsed, settings = parse_arguments(words)
    if "recipe" in parsed:
        load_recipe(parsed.recipe, arguments=settings)


def is_taken(words: list[str]) -> None:
    """By the program that the first words name; an error of its parser is an exit."""
    files = [word for word in words if word.startswith(("launch/", "recipes/"))]
    assert [file for file in files if not (REPOSITORY / file).exists()] == []
    if words == ["python", "-m", "accel_train.torchrun"]:
        assert find_spec(words[-1])
    elif words[0] == "torchrun" or words[:3] == ["python", "-m", "accel_train.torchrun"]:
        parsed = get_args_parser().parse_args(words[1 if words[0] == "torchrun" else 3 :])
        assert (parsed.module, parsed.training_script) == (True, "accel_train")
        is_taken_by_program(parsed.training_script_args)
    elif words[:2] == ["accelerate", "launch"]:
        parsed, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert (parsed.module, parsed.training_script) == (True, "accel_train")
        is_taken_by_program(parsed.training_script_args)
    elif words[0] == "sbatch":
        script = words.index("launch/slurm.sh")
        assert {word.partition("=")[0] for word in words[1:script]} <= SBATCH
        is_taken_by_program(words[script + 1 :])
    elif words[0] in ("accel-train", "launch/cpu_two_processes.sh"):
        is_taken_by_program(words[1:])
    else:
        assert words[0] in ("kubectl", "sky"), words
        assert files or words == ["sky", "volumes", "apply"], words


@pytest.mark.parametrize(
    "path",
    [
        "docs/scaling.md", "launch/README.md", "launch/slurm.sh", "launch/cpu_two_processes.sh",
        *sorted(f"launch/{path.name}" for path in (REPOSITORY / "launch").glob("*.yaml")),
    ],
)  # fmt: skip
def test_commands_are_taken_by_the_programs_that_they_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    commands = commands_of((REPOSITORY / path).read_text())
    assert commands, "nothing was found to check"
    for words in commands:
        is_taken(words)


def test_check_of_the_commands_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (misspelt,) = commands_of("`torchrun --standalone --proc_per_node 8 -m accel_train run RECIPE`")
    with pytest.raises(SystemExit):
        is_taken(misspelt)
    (absent,) = commands_of("`accelerate launch --config_file launch/tpu.yaml -m accel_train run RECIPE`")
    with pytest.raises(AssertionError, match=r"launch/tpu\.yaml"):
        is_taken(absent)


def test_every_launch_file_is_named_and_is_there() -> None:
    readme = (REPOSITORY / "launch" / "README.md").read_text()
    files = {path.name for path in (REPOSITORY / "launch").iterdir()} - {"README.md"}
    assert {*re.findall(r"\]\((\w+\.\w+)\)", readme)} == files
    assert {*re.findall(r"launch/(\w+\.\w+)", SCALING)} == files - {"one_gpu.yaml"}


def test_scaling_names_the_settings_codes_and_times_of_the_launch_files() -> None:
    sections = [yaml.safe_load(each)["parallel"] for each in re.findall(r"`(parallel: {.*?})`", SCALING)]
    assert [Parallel(**each).strategy for each in sections] == ["fsdp2", "fsdp2", "deepspeed", "ddp"]
    assert Parallel(**sections[0], dp_shard_size=8).dp_shard_size == 8
    codes = SCALING.partition("## Read exit codes")[2].partition("\n## ")[0]
    again, changed = (re.findall(r"\b\d+\b", sentence) for sentence in re.split(r"\.\s", codes)[:2])
    assert ([*map(int, again)], [*map(int, changed)]) == ([PEER, PREEMPTED], [*FINAL])
    slurm = (REPOSITORY / "launch" / "slurm.sh").read_text()
    (signal,) = re.findall(r"^#SBATCH (--signal=\S+)$", slurm, flags=re.MULTILINE)
    (row,) = (line for line in SCALING.splitlines() if line.startswith("| SLURM | "))
    assert f"`{signal}`" in row
    minutes, restarts = re.search(r"(\d+) minutes before", row), re.search(r"in place, (\d+) times", row)
    assert minutes
    assert int(signal.partition("@")[2]) == 60 * int(minutes[1])
    assert restarts
    assert f"${{MAX_RESTARTS:-{restarts[1]}}}" in slurm
    runtime: dict[str, Any] = next(yaml.safe_load_all((REPOSITORY / "launch" / "kubernetes.yaml").read_text()))
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300 <= SHUTDOWN_SECONDS


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt2_350m"])
def test_recipes_of_gpt2_go_on_every_power_of_two_and_read_their_data_once(name: str) -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / f"{name}.yaml")
    for world_size in (2**power for power in range(10)):
        sizes = resolve_batch(recipe.batch, world_size)
        assert sizes.per_device_batch_size * sizes.gradient_accumulation_steps * world_size == 512
    with raises_golden():
        resolve_batch(recipe.batch, 240)
    assert re.search(r"512\s+samples\s+fit\s+on\s+256\s+GPUs,\s+but\s+not\s+on\s+240", SCALING)
    assert 512 * 1024 * (recipe.schedule.max_steps or 0) == pytest.approx(10e9, rel=1e-3)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((REPOSITORY / "launch").glob("*.yaml")) if "num_processes" in path.read_text()],
    ids=lambda path: path.name,
)
def test_recipe_that_a_launch_file_names_as_its_example_divides_among_its_processes(path: Path) -> None:
    text = path.read_text()
    processes = yaml.safe_load(text).get("num_processes", 8)  # files for any number of GPUs leave it out
    for words in commands_of(text):
        _, settings = parse_arguments(words[words.index("accel_train") + 1 :])
        (recipe,) = [word for word in words if word.startswith("recipes/")]
        sizes = resolve_batch(load_recipe(REPOSITORY / recipe, arguments=settings).batch, processes)
        assert sizes.per_device_batch_size * sizes.gradient_accumulation_steps * processes == sizes.global_batch_size
