"""Nothing that lies in a checkpoint, a model folder or a run folder runs code here, whoever wrote it."""

import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from accel_train.checkpoint.rollback_log import read_rollbacks
from accel_train.checkpoint.store import check
from accel_train.checkpoint.weight_files import CARD
from accel_train.core.json_io import read_json
from accel_train.data.text.tokenizers import load_tokenizer
from accel_train.engine.save import restore
from accel_train.inference.finished_run import check_weights, recipe_of_trained
from accel_train.inference.generate import generate_from_run
from accel_train.metrics.registry import load_metric
from accel_train.model.pretrained import pretrained_config
from accel_train.observe.goodput import read_launches
from accel_train.observe.incident_record import KeptBatch
from accel_train.observe.run_folder import RECIPE_FILE, read_events, read_metrics, read_summary
from accel_train.recipe.data import Data
from accel_train.training.setup import prepare_run
from tests.support.commands import call, error_line
from tests.support.marks import faults
from tests.support.number_faults import incident_with
from tests.support.pickle_gadgets import FORMS, gadgets
from tests.support.runs import (
    command,
    ran,
    refused,
    tiny_recipe,
    write_corpus,
    write_recipe_file,
    write_yaml,
)

NOT_READ = ("README.md", "generation_config.json", ".lock", "report.html", "healthy.json", ".accel_train.json")
"""Files that no command needs, so one that is broken is no reason to refuse."""


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that gadgets create: after the test it must not be there."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "code of the file was run"


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def dangerous(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Each gadget in each form, with a name that says which it is."""
    for name, gadget in gadgets(canary, canary.with_name("script.py")).items():
        for form, write in FORMS.items():
            yield f"{name} in a {form}", write(gadget)


def refuses(read: Any, *arguments: Any) -> bool:
    """Whether a reader gives up, by any exception."""
    try:
        read(*arguments)
    except Exception:
        return True
    return False


def forge(folder: Path, name: str, content: bytes) -> None:
    """Put other content into a checkpoint, and write its manifest as somebody who knows the format would."""
    (folder / name).write_bytes(content)
    manifest = read_json(folder / "manifest.json")
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_every_gadget_runs_where_it_is_read_carelessly(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tried = list(dangerous(canary))
    assert len(tried) >= 2 * 12
    for name, content in tried:
        with suppress(Exception):  # pickle's refusal to go on comes after the harm is done
            pickle.loads(content)  # noqa: S301
        with suppress(Exception):
            torch.load(io.BytesIO(content), weights_only=False)
        assert canary.exists(), name
        canary.unlink()


def test_gadget_in_any_file_of_a_checkpoint_is_refused_and_not_run(run: Path, canary: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    for name in files_of(folder):
        before = (folder / name).read_bytes()
        for what, content in dangerous(canary):
            (folder / name).write_bytes(content)
            # A card is text for people. Nothing loads it.
            assert check(folder).problem is not None or name == CARD, f"{what} as {name}"
        (folder / name).write_bytes(before)
    for name in ("model.bin", "optimizer.pt", "random_states_0.pkl", "data.pkl"):
        for what, content in dangerous(canary):
            (folder / name).write_bytes(content)
            assert check(folder).problem is not None, f"{what} as {name}"
        (folder / name).unlink()
    assert check(folder).problem is None


def test_gadget_in_a_checkpoint_with_a_forged_manifest_is_refused_and_not_run(
    trained: Path, run: Path, canary: Path
) -> None:
    other = prepare_run(tiny_recipe(trained, task="causal-lm", output_dir=str(run.parent / "other")))
    folder = run / "checkpoints" / "step-00000004"
    needed = [name for name in files_of(folder) if name.endswith(".safetensors") or name == "trainer.json"]
    assert len(needed) == 3
    with other.resources:
        for name in needed:
            before = (folder / name).read_bytes()
            for what, content in dangerous(canary):
                forge(folder, name, content)
                assert check(folder).problem is None, "the forger did his work badly"
                assert refuses(restore, other.strategy, folder, "adamw"), what
            forge(folder, name, before)
        restore(other.strategy, folder, "adamw")


def read_model_folder(run: Path) -> None:
    """All ways in which the package reads `model/`: to generate, to evaluate, to train on."""
    weights = run / "model"
    generate_from_run(run, "step", max_new_tokens=1)
    recipe = recipe_of_trained(run)
    config = pretrained_config(recipe)
    load_tokenizer(str(weights), trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(transformers.GPT2LMHeadModel.from_pretrained(weights, use_safetensors=True).state_dict())
    check_weights(model, weights, "causal-lm")


def test_gadget_in_any_file_of_a_model_folder_is_not_run_and_refused_where_it_is_read(run: Path, canary: Path) -> None:
    folder = run / "model"
    read_model_folder(run)
    for name in files_of(folder):
        before = (folder / name).read_bytes()
        for what, content in dangerous(canary):
            (folder / name).write_bytes(content)
            refused = refuses(read_model_folder, run)
            assert refused or name in NOT_READ, f"{what} as {name}"
            assert not canary.exists(), f"{what} as {name}"
        (folder / name).write_bytes(before)
    read_model_folder(run)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json", "adapter_model.bin"])
def test_pickled_weights_in_the_place_of_safetensors_are_refused_and_not_run(
    run: Path, canary: Path, name: str
) -> None:
    (run / "model" / "model.safetensors").unlink()
    for what, content in dangerous(canary):
        (run / "model" / name).write_bytes(content)
        assert refuses(generate_from_run, run, "step"), what
        assert not canary.exists(), what


READERS: dict[str, Callable[[Path], object]] = {
    "recipe.resolved.yaml": recipe_of_trained,
    "metrics.jsonl": lambda run: read_metrics(run)[0],  # lines that are none are left out
    "events.jsonl": lambda run: read_events(run)[0],
    "launches.jsonl": lambda run: read_launches(run)[0],
    "examples.json": lambda run: read_json(run / "examples.json"),
    "summary.json": read_summary,
    "evaluation.json": lambda run: read_json(run / "evaluation.json"),
    "rollbacks.json": read_rollbacks,
}


def test_gadget_in_any_other_file_of_a_run_folder_is_refused_and_not_run(run: Path, canary: Path) -> None:
    for name in ("rollbacks.json", "examples.json"):
        (run / name).touch()
    read = [name for name in files_of(run) if name not in NOT_READ]
    assert sorted(READERS) == read
    for name in read:
        for what, content in dangerous(canary):
            (run / name).write_bytes(content + b"\n")
            assert refuses(READERS[name], run), f"{what} as {name}"
    call("report", run)
    for other in (
        "[]",
        '{"examples": 3}',
        '{"examples": [{}, 3], "kind": "mask"}',
        '{"examples": [{"images": ["javascript:x"]}]}',
    ):
        (run / "examples.json").write_text(other)
        call("report", run)
        assert "javascript:x" not in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_meets_a_forged_pickle_passes_it_over_or_stops_with_exit_code_4(
    trained: Path, tmp_path: Path, canary: Path
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    recipe = write_recipe_file(folder, task="causal-lm", schedule={"max_steps": 4}, checkpoint={"every_steps": 2})
    content = FORMS["pickle"](gadgets(canary, tmp_path / "script.py")["os.system"])
    for checkpoint in (folder / "run" / "checkpoints").glob("step-*"):
        for name in ("model.safetensors", "optimizer.safetensors", "trainer.json"):
            forge(checkpoint, name, content)
    done = ran(command(recipe))
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert "step-0000000" in done.stderr


# --- code that comes with a model ---------------------------------------------------------------------------------


@pytest.fixture
def model_with_code(trained: Path, tmp_path: Path, canary: Path) -> Path:
    """A model folder that brings its own classes, as models of the hub do: importing them creates the canary."""
    folder = Path(shutil.copytree(trained / "run" / "model", tmp_path / "model-with-code"))
    harm = f"open({str(canary)!r}, 'w').close()\n"
    (folder / "configuration_own.py").write_text(
        harm + "from transformers import GPT2Config\n\n\nclass OwnConfig(GPT2Config):\n    model_type = 'own'\n"
    )
    (folder / "modeling_own.py").write_text(
        harm + "from transformers import GPT2LMHeadModel\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnModel(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    )
    (folder / "tokenization_own.py").write_text(
        harm
        + "from transformers import PreTrainedTokenizerFast\n\n\n"
        + "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = read_json(folder / "config.json")
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = read_json(folder / "tokenizer_config.json")
    tokenizer |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def own_model(folder: Path, work: Path, **settings: Any) -> Path:
    """A recipe that trains on the weights of a folder; the file's path."""
    write_corpus(work)
    recipe = {"model": {"config": None, "pretrained": str(folder), **settings}, "schedule": {"max_steps": 1}}
    return write_recipe_file(work, task="causal-lm", **recipe)


@pytest.mark.parametrize("tokenizer", [faults("bytes"), "auto"])
def test_code_of_a_model_folder_is_refused_and_no_prompt_is_answered(
    model_with_code: Path, tmp_path: Path, tokenizer: str
) -> None:
    recipe = own_model(model_with_code, tmp_path)
    reader, writer = os.pipe()
    stop = threading.Event()

    def say_yes() -> None:  # yes | accel-train run recipe.yaml
        with suppress(OSError):
            while not stop.is_set():
                os.write(writer, b"y\n" * 100)

    answering = threading.Thread(target=say_yes, daemon=True)
    answering.start()
    variables = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = ran(command(recipe, "--tokenizer", tokenizer), variables=variables, stdin=reader)
    stop.set()
    os.close(reader)
    answering.join(10)
    os.close(writer)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "trust_remote_code" in errors[0]
    assert not list((tmp_path / "modules").rglob("*own*")), "the code was copied to where it is imported from"


@pytest.mark.faults
def test_code_of_a_model_folder_runs_by_consent_in_the_recipe(model_with_code: Path, tmp_path: Path) -> None:
    recipe = own_model(model_with_code, tmp_path, trust_remote_code=True)
    done = ran(command(recipe), variables={"HF_MODULES_CACHE": str(tmp_path / "modules")})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "canary").exists()
    (tmp_path / "canary").unlink()


@pytest.mark.parametrize("name", ["generate", "predict", "evaluate"])
def test_no_command_on_a_finished_run_runs_code_of_its_model_folder(
    model_with_code: Path, run: Path, canary: Path, name: str
) -> None:
    shutil.rmtree(run / "model")
    shutil.copytree(model_with_code, run / "model")
    error_line(name, run)


# --- somebody else's run ------------------------------------------------------------------------------------------


def rewrite_recipe(run: Path, **sections: Any) -> None:
    """Change the recipe of a run folder as its sender may have written it."""
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text())
    for name, fields in sections.items():
        recipe[name] = {**(recipe[name] or {}), **fields} if isinstance(fields, dict) else fields
    write_yaml(run / RECIPE_FILE, recipe)


@pytest.fixture
def someones_run(model_with_code: Path, run: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> Path:
    """A run folder whose model brings code, and whose recipe says that it may run."""
    shutil.rmtree(run / "model")
    shutil.copytree(model_with_code, run / "model")
    consent = {"pretrained": str(run / "model"), "config": None, "trust_remote_code": True}
    rewrite_recipe(run, model=consent, tokenizer="auto")
    incident = run / "incidents" / "step-00000001"
    incident.mkdir(parents=True)
    record = asdict(incident_with(step=1, batches=[KeptBatch("x", 0)]))
    (incident / "incident.json").write_text(json.dumps(record))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(run.parent / "modules"))
    return run


@pytest.mark.parametrize(
    "words", ["generate", "evaluate", "export --quantize int8", "verify --resume-proof", "replay", "predict"]
)
def test_a_senders_consent_to_the_models_code_is_not_the_readers(someones_run: Path, canary: Path, words: str) -> None:
    if words == "predict":  # a language model has no label
        written = yaml.safe_load((someones_run / RECIPE_FILE).read_text())["data"]
        shared = {name: value for name, value in written.items() if name in Data.model_fields}
        rewrite_recipe(someones_run, task="text-classification", data=None)
        rewrite_recipe(someones_run, data={**shared, "label_column": "text"})
    folder = someones_run / "incidents" / "step-00000001" if words == "replay" else someones_run
    name, *flags = words.split()
    error_line(name, folder, *flags, named="trust_remote_code")


def test_the_reader_consents_on_the_command_line(someones_run: Path, canary: Path) -> None:
    words = ["evaluate", str(someones_run), "--model.trust_remote_code", "true"]
    variables = {"HF_MODULES_CACHE": str(someones_run.parent / "modules")}
    done = ran([sys.executable, "-m", "accel_train", *words], variables=variables)
    assert canary.exists(), done.stderr
    canary.unlink()


@pytest.mark.parametrize("named", [{"task": "senders_task:Task"}, {"optimizer": {"name": "senders_task:Task"}}])
def test_a_class_beside_a_run_is_not_imported_to_prove_that_it_resumes(
    named: dict[str, Any], run: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.parent / "senders_task.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Task: pass\n")
    rewrite_recipe(run, **named)
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command may put the current folder there
    call("verify", run, "--resume-proof", code=2, named="senders_task.py")


def test_a_senders_consent_to_metrics_of_the_hub_is_not_the_readers(
    run: Path,
) -> None:
    rewrite_recipe(run, evaluate={"allow_hub_metrics": True})
    assert not recipe_of_trained(run).evaluate.allow_hub_metrics
    assert recipe_of_trained(run, settings=["--evaluate.allow_hub_metrics", "true"]).evaluate.allow_hub_metrics
    refused(load_metric, "a_metric_of_the_hub", named="--evaluate.allow_hub_metrics true")


# --- manifests that lie ------------------------------------------------------------------------------------------

MANIFESTS: dict[str, str] = {
    "a path upwards": '{"format": 1, "step": 4, "files": {"../../../secret": {"bytes": 6, "sha256": ""}}}',
    "an absolute path": '{"format": 1, "step": 4, "files": {"/etc/hostname": {"bytes": 6, "sha256": ""}}}',
    "an absurd size": '{"format": 1, "step": 4, "files": {"model.safetensors": {"bytes": 1e308, "sha256": ""}}}',
    "an infinite size": '{"format": 1, "step": 4, "files": {"model.safetensors": {"bytes": 1e999, "sha256": ""}}}',
    "a negative size": '{"format": 1, "step": 4, "files": {"model.safetensors": {"bytes": -1, "sha256": ""}}}',
    "too many digits": '{"format": 1, "step": ' + "9" * 10_000 + ', "files": {}}',
    "deep nesting": '{"format": 1, "step": 4, "files": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "a list": "[]",
    "nothing": "",
    "no text": "\udcff\udcfe",
}


@pytest.mark.parametrize("lie", MANIFESTS)
def test_verify_names_a_manifest_that_lies_and_reads_nothing_outside(run: Path, lie: str) -> None:
    (run / "secret").write_text("secret")
    folder = run / "checkpoints" / "step-00000004"
    (folder / "manifest.json").write_bytes(MANIFESTS[lie].encode("utf-8", "surrogateescape"))
    table = call("verify", run, named="would use step-00000002").out
    assert "manifest.json" in next(line for line in table.splitlines() if line.startswith("step-00000004")) or (
        "model.safetensors has" in table
    )


@pytest.mark.parametrize("what", ["a file", "the manifest", "the folder", "a pipe"])
def test_verify_refuses_links_and_what_is_no_file(run: Path, what: str) -> None:
    folder = run / "checkpoints" / "step-00000004"
    target = {"the folder": folder, "the manifest": folder / "manifest.json"}.get(what, folder / "trainer.json")
    elsewhere = run / "elsewhere"
    target.rename(elsewhere)
    if what == "a pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(elsewhere)
    call("verify", run, named="would use step-00000002")


def test_a_manifest_of_a_gigabyte_of_nesting_does_not_take_the_memory_of_a_run(run: Path) -> None:
    for checkpoint in (run / "checkpoints").glob("step-*"):
        with (checkpoint / "manifest.json").open("wb") as file:
            file.truncate(2 << 30)  # a hole: it takes no room on the disk
    limited = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_DATA, (4 << 30,) * 2); "
    limited += "sys.argv = ['accel_train', 'verify', sys.argv[1]]; runpy.run_module('accel_train', run_name='__main__')"
    done = ran([sys.executable, "-c", limited, str(run)])
    assert done.returncode == 4, done.stderr
    assert "manifest.json" in done.stdout
