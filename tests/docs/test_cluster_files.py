"""Launch files for Kubernetes and SkyPilot hold to their schemas, and start what torchrun and the program understand.

No cluster is asked: the schemas next to this file are written by hand from the documented fields.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

from accel_train.cli.main import parse_arguments
from accel_train.core.json_io import read_json
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.schema import Recipe
from accel_train.torchrun import FINAL, PEER, PREEMPTED
from tests.support.runs import REPOSITORY, TESTS, environment

LAUNCH = REPOSITORY / "launch"


def hold_to(schema: str, *documents: Any) -> None:
    """Raise where a document has other fields than the schema of this folder."""
    for document in documents:
        jsonschema.validate(document, read_json(TESTS / "docs" / schema))


def understood(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recipe]:
    """What torchrun and the program make of `-m accel_train.torchrun ...`: torchrun's arguments, and the recipe."""
    start = list(words).index("accel_train.torchrun")
    assert words[start - 1] == "-m"
    torchrun = get_args_parser().parse_args(words[start + 1 :])
    assert torchrun.module
    assert torchrun.training_script == "accel_train"
    monkeypatch.chdir(REPOSITORY)
    parsed, settings = parse_arguments(torchrun.training_script_args)
    assert parsed.command == "run"
    return torchrun, load_recipe(parsed.recipe, arguments=settings)


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}


def test_kubernetes_manifests_hold_to_the_documented_fields(manifests: dict[str, dict[str, Any]]) -> None:
    assert set(manifests) == {"TrainingRuntime", "TrainJob"}
    hold_to("kubernetes_schema.json", *manifests.values())
    misspelt = json.loads(json.dumps(manifests["TrainJob"]).replace("numNodes", "nodes"))
    with pytest.raises(jsonschema.ValidationError):
        hold_to("kubernetes_schema.json", misspelt)


def test_kubernetes_job_refers_to_its_runtime_and_its_volumes_are_there(manifests: dict[str, dict[str, Any]]) -> None:
    job, runtime = manifests["TrainJob"]["spec"], manifests["TrainingRuntime"]
    assert (job["runtimeRef"]["kind"], job["runtimeRef"]["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"  # the name that the torch plugin of the operator looks for
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert job["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == job["trainer"]["numProcPerNode"]


def test_kubernetes_starts_the_job_again_unless_its_exit_code_says_that_no_restart_mends_it(
    manifests: dict[str, dict[str, Any]],
) -> None:
    job_set = manifests["TrainingRuntime"]["spec"]["template"]["spec"]
    (rule,) = job_set["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    template = job_set["replicatedJobs"][0]["template"]["spec"]
    (pods,) = template["podFailurePolicy"]["rules"]
    assert pods["action"] == "FailJob"
    assert pods["onExitCodes"]["operator"] == "In"
    assert pods["onExitCodes"]["values"] == list(FINAL)
    assert pods["onExitCodes"]["containerName"] == template["template"]["spec"]["containers"][0]["name"]
    assert template["template"]["spec"]["restartPolicy"] == "Never"  # without it there is no podFailurePolicy
    assert template["backoffLimit"] == 0


def test_kubernetes_command_is_understood(
    manifests: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ["NNODES=2", "NPROC_PER_NODE=8", "NODE_RANK=1", "MASTER_ADDR=a", "MASTER_PORT=29400"]:
        monkeypatch.setenv(*f"PET_{variable}".split("="))  # as the operator does
    torchrun, recipe = understood(manifests["TrainJob"]["spec"]["trainer"]["command"], monkeypatch)
    assert (torchrun.nnodes, torchrun.nproc_per_node, int(torchrun.node_rank)) == ("2", "8", 1)
    assert (torchrun.master_addr, int(torchrun.master_port)) == ("a", 29400)
    assert recipe.output_dir == "/runs/gpt2-124m"


def test_skypilot_task_starts_the_same_run_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    hold_to("skypilot_schema.json", task)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PEER, PREEMPTED]
    stand_in = tmp_path / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    for rank in range(2):
        variables = {
            "NODE_IPS": "10.0.0.1\n10.0.0.2",
            "NUM_NODES": "2",
            "NODE_RANK": str(rank),
            "NUM_GPUS_PER_NODE": "8",
        }
        started = subprocess.run(
            ["bash", "-euc", task["run"]],
            env={**environment(**task["envs"]), **{f"SKYPILOT_{name}": value for name, value in variables.items()}},
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        torchrun, recipe = understood(json.loads(started.stdout), monkeypatch)
        assert (torchrun.nnodes, torchrun.nproc_per_node, int(torchrun.node_rank)) == ("2", "8", rank)
        assert torchrun.master_addr == "10.0.0.1"
        assert recipe.output_dir == "/runs/gpt2_124m"
        assert any(Path(recipe.output_dir).is_relative_to(mounted) for mounted in task["volumes"])
