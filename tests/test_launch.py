"""Launch files say where a run runs, never how it trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
CONFIGS = sorted(LAUNCH.glob("*.yaml"))
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
}
PRINT_ENVIRONMENT = """
import json, os, pathlib
pathlib.Path(os.environ["SEEN"], os.environ.get("RANK", "0")).write_text(json.dumps(dict(os.environ)))
"""

configs = pytest.mark.parametrize("path", CONFIGS, ids=[path.name for path in CONFIGS])


def test_there_is_a_launch_file_for_one_gpu_for_several_and_for_two_machines() -> None:
    loaded = {path.name: load_config_from_file(str(path)) for path in CONFIGS}
    assert loaded["one_gpu.yaml"].num_processes == 1
    assert loaded["ddp.yaml"].num_processes > loaded["ddp.yaml"].num_machines == 1
    assert loaded["two_machines.yaml"].num_machines == 2
    assert loaded["two_machines.yaml"].num_processes % 2 == 0


@configs
def test_accelerate_reads_the_file_and_finds_no_word_on_how_to_train(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.mixed_precision is None
    plugins = (config.deepspeed_config, config.fsdp_config, config.megatron_lm_config, config.dynamo_config)
    assert plugins == ({}, {}, {}, {})
    assert set(yaml.safe_load(path.read_text())) <= KEYS_THAT_SAY_WHERE


@pytest.mark.parametrize(("name", "num_processes"), [("one_gpu.yaml", 1), ("ddp.yaml", 2)])
def test_accelerate_launch_starts_the_processes_and_changes_no_training(
    name: str, num_processes: int, tmp_path: Path
) -> None:
    script = tmp_path / "print_environment.py"
    script.write_text(PRINT_ENVIRONMENT)
    seen = tmp_path / "seen"
    seen.mkdir()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / name)]
    if num_processes > 1:
        command += ["--num_processes", str(num_processes), "--main_process_port", "0"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    subprocess.run([*command, str(script)], env={**clean, "SEEN": str(seen)}, check=True, timeout=120)

    environments = [json.loads((seen / str(rank)).read_text()) for rank in range(num_processes)]
    assert len(list(seen.iterdir())) == num_processes
    for environment in environments:
        assert environment.get("WORLD_SIZE", "1") == str(num_processes)
        assert environment["ACCELERATE_MIXED_PRECISION"] == "no"  # exported always; the program passes its own
        assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO"
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment
        assert "ACCELERATE_USE_DEEPSPEED" not in environment
        assert "ACCELERATE_USE_FSDP" not in environment


def test_the_cpu_script_starts_the_program_in_two_processes(tmp_path: Path) -> None:
    # A package of the same name, found first, stands in for the program: what is held is what the script starts.
    stand_in = tmp_path / "accel_train"
    stand_in.mkdir()
    (stand_in / "__init__.py").touch()
    (stand_in / "__main__.py").write_text(
        "import sys\n" + PRINT_ENVIRONMENT + "assert sys.argv[1:] == ['run', 'x.yaml']\n"
    )
    seen = tmp_path / "seen"
    seen.mkdir()
    environment = {
        **os.environ,
        "SEEN": str(seen),
        "PYTHONPATH": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    script = LAUNCH / "cpu_two_processes.sh"
    subprocess.run([str(script), "run", "x.yaml"], env=environment, cwd=tmp_path, check=True, timeout=120)
    started = [json.loads(path.read_text()) for path in sorted(seen.iterdir())]
    assert [process["LOCAL_RANK"] for process in started] == ["0", "1"]
    assert all(process["ACCELERATE_USE_CPU"] == "true" for process in started)
