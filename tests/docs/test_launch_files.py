"""Launch files say where a run runs, never how it trains."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from torch.distributed.run import determine_local_world_size, get_args_parser

from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Recipe
from accel_train.runtime.launch_environment import with_launch_environment
from tests.support.runs import REPOSITORY, environment, losses, recipe_dict, write_recipe_file

LAUNCH = REPOSITORY / "launch"
CONFIGS = sorted(path for path in LAUNCH.glob("*.yaml") if "\ncompute_environment:" in path.read_text())
KEYS_THAT_SAY_WHERE = {
    "compute_environment",
    "distributed_type",
    "num_machines",
    "num_processes",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "rdzv_backend",
    "same_network",
    "main_training_function",
    "fsdp_config",
    "parallelism_config",
    "deepspeed_config",
}
FSDP_KEYS = {"fsdp_version", "fsdp_reshard_after_forward", "fsdp_offload_params"}
PRINT_ENVIRONMENT = """
import json, os, pathlib
pathlib.Path(os.environ["SEEN"], os.environ.get("RANK", "0")).write_text(json.dumps(dict(os.environ)))
"""

configs = pytest.mark.parametrize("path", CONFIGS, ids=[path.name for path in CONFIGS])


def environment_of(path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, str]:
    """What `accelerate launch` adds to the environment of the processes, by its own code."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        monkeypatch.delenv(name)
    # Files for any number of GPUs do not name it.
    count = () if load_config_from_file(str(path)).num_processes > 0 else ("--num_processes", "8")
    flags = ("--main_process_port", "0", *count, *flags)
    words = ["--config_file", str(path), *flags, "-m", "accel_train", "run", "x.yaml"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    prepare = prepare_multi_gpu_env if arguments.multi_gpu or arguments.use_fsdp else prepare_simple_launcher_cmd_env
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        prepare = prepare_deepspeed_cmd_env
    prepared = prepare(arguments)
    exported = prepared if isinstance(prepared, dict) else prepared[1]
    processes = arguments.num_processes
    assert processes == int(getattr(arguments, "nproc_per_node", 1)) * arguments.num_machines
    return {**{name: value for name, value in exported.items() if name not in os.environ}, "WORLD_SIZE": str(processes)}


@configs
def test_accelerate_reads_the_file_and_finds_no_word_on_how_to_train(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.mixed_precision is None
    assert (config.megatron_lm_config, config.dynamo_config, config.fp8_config) == ({}, {}, {})
    assert set(config.deepspeed_config) <= {"zero_stage"}
    assert set(yaml.safe_load(path.read_text())) <= KEYS_THAT_SAY_WHERE
    assert set(config.fsdp_config) <= FSDP_KEYS
    exported = environment_of(path, monkeypatch)
    # Exported always, and "no" stands for nothing said: the program passes its own.
    assert exported["ACCELERATE_MIXED_PRECISION"] == "no"
    assert exported.get("ACCELERATE_DYNAMO_BACKEND", "NO") == "NO"
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING", "USE_MEGATRON_LM"):
        assert f"ACCELERATE_{name}" not in exported
    assert ("ACCELERATE_USE_DEEPSPEED" in exported) == path.name.startswith("zero")
    assert exported.get("FSDP_ACTIVATION_CHECKPOINTING", "false") == "false"


FILES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_gpu.yaml": (1, {}),
    "ddp.yaml": (1, {}),
    "two_machines.yaml": (2, {}),
    "many_machines.yaml": (32, {}),
    "fsdp2.yaml": (1, {"strategy": "fsdp2"}),
    "hsdp.yaml": (4, {"strategy": "fsdp2", "dp_shard_size": 8}),
    "zero2.yaml": (1, {"strategy": "deepspeed", "zero_stage": 2}),
    "zero3.yaml": (1, {"strategy": "deepspeed", "zero_stage": 3}),
    "tp.yaml": (1, {"strategy": "fsdp2", "dp_shard_size": 4, "tp_size": 2}),
    "sp.yaml": (1, {"strategy": "fsdp2", "dp_shard_size": 8, "sp_size": 2}),
}
"""Machines, and section `parallel`, of each file."""


@configs
def test_a_file_gives_a_recipe_the_machines_and_the_layout_of_its_name_and_changes_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, parallel = FILES[path.name]
    assert load_config_from_file(str(path)).num_machines == machines
    recipe = Recipe.model_validate(recipe_dict(Path("somewhere")))
    launched = with_launch_environment(recipe, environment_of(path, monkeypatch))
    assert launched.parallel == Parallel(**parallel)
    assert {**launched.model_dump(), "parallel": None} == {**recipe.model_dump(), "parallel": None}


def test_each_of_these_launch_files_exists_and_the_first_starts_one_process() -> None:
    assert {path.name for path in CONFIGS} == set(FILES)
    assert load_config_from_file(str(LAUNCH / "one_gpu.yaml")).num_processes == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "variable"), [("fsdp2", "fsdp2", "FSDP"), ("zero3", "deepspeed", "DEEPSPEED")]
)
def test_accelerate_launch_with_a_sharding_file_trains_a_sharded_model(
    name: str, strategy: str, variable: str, corpus: Path
) -> None:
    recipe = write_recipe_file(corpus, schedule={"max_steps": 3})
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{name}.yaml")]
    command += ["--num_processes", "2", "--main_process_port", "0", "-m", "accel_train", "run", str(recipe)]
    subprocess.run(command, env=environment(ACCELERATE_USE_CPU="true"), check=True, timeout=240)
    assert list(losses(corpus / "run")) == [1, 2, 3]
    resolved = (corpus / "run" / "recipe.resolved.yaml").read_text()
    assert f"strategy: {strategy}  # ACCELERATE_USE_{variable} of the launch" in resolved


def environments(command: list[str], folder: Path, **variables: str) -> list[dict[str, str]]:
    """The environment of each process that a command starts with the program PRINT_ENVIRONMENT, by rank."""
    seen = folder / "seen"
    seen.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    subprocess.run(command, env={**clean, **variables, "SEEN": str(seen)}, cwd=folder, check=True, timeout=300)
    return [json.loads(path.read_text()) for path in sorted(seen.iterdir())]


@pytest.mark.parametrize(("name", "num_processes"), [("one_gpu.yaml", 1), ("ddp.yaml", 2)])
def test_accelerate_launch_starts_the_processes_and_changes_no_training(
    name: str, num_processes: int, tmp_path: Path
) -> None:
    script = tmp_path / "print_environment.py"
    script.write_text(PRINT_ENVIRONMENT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / name)]
    if num_processes > 1:
        command += ["--num_processes", str(num_processes), "--main_process_port", "0"]
    started = environments([*command, str(script)], tmp_path)
    assert [seen.get("WORLD_SIZE", "1") for seen in started] == [str(num_processes)] * num_processes
    for seen in started:
        assert seen["ACCELERATE_MIXED_PRECISION"] == "no"  # exported always; the program passes its own
        assert seen["ACCELERATE_DYNAMO_BACKEND"] == "NO"
        for unset in ("GRADIENT_ACCUMULATION_STEPS", "USE_DEEPSPEED", "USE_FSDP"):
            assert f"ACCELERATE_{unset}" not in seen


def test_the_cpu_script_starts_the_program_in_two_processes(tmp_path: Path) -> None:
    # A package of the same name, found first, stands in for the program: the test is about what the script starts.
    stand_in = tmp_path / "accel_train"
    stand_in.mkdir()
    (stand_in / "__init__.py").touch()
    check = "assert sys.argv[1:] == ['run', 'x.yaml']\n"
    (stand_in / "__main__.py").write_text(f"import sys\n{PRINT_ENVIRONMENT}{check}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [str(LAUNCH / "cpu_two_processes.sh"), "run", "x.yaml"]
    started = environments(command, tmp_path, PYTHONPATH=str(tmp_path), PATH=path)
    assert [process["LOCAL_RANK"] for process in started] == ["0", "1"]
    assert all(process["ACCELERATE_USE_CPU"] == "true" for process in started)


PAGES = [
    *(REPOSITORY / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted(path for path in LAUNCH.iterdir() if path.suffix in (".md", ".yaml")),
    *sorted((REPOSITORY / "recipes").glob("*.yaml")),
]
COMMAND = re.compile(r"(?:accelerate launch|accel_train\.torchrun|torchrun) [^`\n]*-m accel_train\b[^`\n]*")


def commands_for_gpus(text: str) -> list[list[str]]:
    """The launches that a page prints, but those for CPUs, for one GPU, and for numbers that a shell fills in."""
    lines = re.sub(r"\\\n#?\s*", "", text).splitlines()
    on_gpus = [line for line in lines if "CPU" not in line and "one_gpu" not in line and "$" not in line]
    return [shlex.split(command, comments=True) for line in on_gpus for command in COMMAND.findall(line)]


def processes_on_a_machine(words: list[str]) -> int:
    """How many processes a launch starts on each machine, by the launcher's own code."""
    words = [str(LAUNCH / "ddp.yaml") if word == "FILE" else word.replace("launch/", f"{LAUNCH}/") for word in words]
    if words[0] == "accelerate":
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        return int(arguments.num_processes // arguments.num_machines)
    return int(determine_local_world_size(get_args_parser().parse_args(words[1:]).nproc_per_node))


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_every_launch_that_is_printed_uses_all_of_eight_gpus(path: Path, eight_gpus: None) -> None:
    fewer = [words for words in commands_for_gpus(path.read_text()) if processes_on_a_machine(words) != 8]
    assert fewer == []


def test_check_of_the_launches_can_fail(eight_gpus: None) -> None:
    text = "`torchrun --nproc_per_node 2 -m accel_train x`\n"
    text += "#   accelerate launch --num_processes \\\n#     2 -m accel_train x"
    assert [processes_on_a_machine(words) for words in commands_for_gpus(text)] == [2, 2]
    assert sum(len(commands_for_gpus(path.read_text())) for path in PAGES) >= 20


@configs
def test_a_file_for_one_machine_is_for_any_number_of_gpus_or_for_what_its_parts_multiply_to(path: Path) -> None:
    config = load_config_from_file(str(path))
    sizes = config.parallelism_config.values()
    if config.num_machines == 1 and path.name != "one_gpu.yaml":
        assert config.num_processes == (math.prod(sizes) if sizes else -1)
