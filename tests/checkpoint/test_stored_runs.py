"""A run folder of an earlier version is resumed to the same losses, and its fingerprint is compared value by value."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from accel_train import Recipe, train
from accel_train.checkpoint.fingerprint import Settings, identity_changes, setting_changes, upgraded
from tests.checkpoint.stored_runs.make import FINGERPRINTS, RUNS, data_of, fingerprint_of, recipe_of, write_data
from tests.support.processes import run_forked
from tests.support.runs import TESTS, events, losses, steps_of

STORED = sorted(path for path in (Path(__file__).parent / "stored_runs").iterdir() if (path / "gpt").is_dir())
VERSIONS = pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)


@pytest.fixture(autouse=True)
def here(empty_folder: Path) -> None:
    """A folder with the data of the stored runs."""
    write_data(empty_folder)


def compared(stored: Path, name: str, recipe: Recipe) -> tuple[list[str], dict[str, Any]]:
    """Names of the values that a resume of a stored run with this recipe refuses or reports; today's fingerprint."""
    was, data = json.loads((stored / "fingerprints.json").read_text())[name], data_of(recipe)
    now = fingerprint_of(recipe, data)
    saved = upgraded(was["identity"], now["identity"], data.first_fingerprint)
    changes = identity_changes(saved, was["origins"], now["identity"], now["origins"], recipe)
    changes += setting_changes(was, Settings(now["settings"], now["origins"]), recipe)
    return [change.name for change in changes], now["identity"]


def check_resumed(stored: Path, run: Path) -> None:
    """The steps after the checkpoint have the losses of the run that was not interrupted."""
    expected = json.loads((stored / run.name / "losses.json").read_text())
    assert losses(run) == pytest.approx(dict(enumerate(expected, 1)), rel=1e-4)
    assert steps_of(run, "resume") == [3]
    assert not events(run, "changes_accepted")
    assert (run / "model/model.safetensors").is_file()


@VERSIONS
@pytest.mark.parametrize("name", RUNS)
def test_a_run_folder_of_an_earlier_version_resumes_to_the_same_losses(stored: Path, name: str) -> None:
    shutil.copytree(stored / name, name)
    lines = Path(name, "metrics.jsonl").read_text().splitlines(keepends=True)
    Path(name, "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 3))
    train(recipe_of(name).model_copy(update={"output_dir": name}))
    check_resumed(stored, Path(name))


@VERSIONS
@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_stored_fingerprint_equals_that_of_the_same_recipe_today(stored: Path, name: str) -> None:
    assert compared(stored, name, recipe_of(name))[0] == []


@VERSIONS
def test_a_new_setting_in_any_section_leaves_older_runs_as_they_are(stored: Path, tmp_path: Path) -> None:
    program = TESTS / "support/programs/newer_version.py"
    run = run_forked([str(stored)], 1, folder=tmp_path / "log", cwd=str(tmp_path), program=program)
    run.expect(0)
    found = json.loads((tmp_path / "log/rank-0.out").read_text().splitlines()[-1])
    assert {name: changes for name, (changes, _) in found.items()} == {name: [] for name in FINGERPRINTS}
    # The new setting is in the fingerprint wherever a section is, so a value of it would be noticed.
    assert {name: count for name, (_, count) in found.items()} == {
        name: 3 + (name in ("digits", "scenes", "boxes")) + 2 * (name == "lora") for name in FINGERPRINTS
    }
    for name in RUNS:
        check_resumed(stored, tmp_path / name)


@pytest.mark.parametrize(
    "name, section, field, value, found",
    [
        ("gpt", "model", "pad_vocab_to_multiple_of", 8, "model.pad_vocab_to_multiple_of"),
        ("gpt", "loss", "z_loss", 1e-4, "loss.z_loss"),
        ("gpt", "optimizer", "state_dtype", "bf16", "optimizer.state_dtype"),
        ("gpt", "data", "split_seed", 3, "data.fingerprint data.split_seed"),
        ("lora", "optimizer", "groups", [{"match": ["*bias"], "lr_scale": 0.2}], "optimizer.groups.0.lr_scale"),
        ("lora", "model", "lora", {"rank": 4}, "model.lora.rank"),
        ("bpe", "tokenizer", "train_bpe", {"vocab_size": 270}, "data.fingerprint"),
        ("digits", "data", "augment", {"random_resized_crop": [0.5, 1.0]}, "data.augment.random_resized_crop"),
    ],
)
def test_a_changed_value_is_found_by_its_name_in_a_stored_fingerprint(
    name: str, section: str, field: str, value: Any, found: str
) -> None:
    names = compared(STORED[0], name, recipe_of(name, **{section: {field: value}}))[0]
    assert set(found.split()) <= set(names)
    assert set(names) <= {*found.split(), "data.fingerprint"}


@pytest.mark.parametrize(
    "name, changed, found",
    [
        ("boxes", {"min_visible": 0.5}, "data.min_visible"),
        ("scenes", {"ignore_index": 240}, "data.ignore_index"),
        ("digits", {"image_mean": [0.5]}, "data.preprocessing.mean"),
        ("masked", {"mlm_probability": 0.2}, "data.mlm_probability"),
    ],
)
def test_a_setting_of_the_samples_is_named_and_the_first_format_noticed_it(
    name: str, changed: dict[str, Any], found: str
) -> None:
    recipe = recipe_of(name, data=changed)
    assert compared(STORED[0], name, recipe)[0] == ["data.fingerprint"]
    was, now = (fingerprint_of(each) for each in (recipe_of(name), recipe))
    changes = identity_changes(was["identity"], was["origins"], now["identity"], now["origins"], recipe)
    assert [change.name for change in changes] == [found]


def test_a_setting_of_another_version_counts_if_it_was_set() -> None:
    recipe = recipe_of("lora")
    now = fingerprint_of(recipe)
    for section in ("model", "loss", "schedule"):
        for set_by, found in (("default", []), ("recipe.yaml:3", [f"{section}.of_another_version"])):
            was = {**now["identity"], section: {**now["identity"][section], "of_another_version": 7}}
            origins = {**now["origins"], f"{section}.of_another_version": set_by}
            changes = identity_changes(was, origins, now["identity"], now["origins"], recipe)
            assert [change.name for change in changes] == found
