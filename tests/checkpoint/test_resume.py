"""Resume from a named checkpoint, start a new run, and verify: nothing is lost or mixed up."""

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accel_train import Recipe, train
from accel_train.checkpoint.health import add_tags
from accel_train.checkpoint.resume import set_aside
from accel_train.checkpoint.rollback_log import ROLLBACKS, read_rollbacks, write_rollbacks
from accel_train.checkpoint.store import checkpoint_folders, folder_of, publish, step_of
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError
from accel_train.core.state import Rollback
from accel_train.training.model_selection import load_best
from accel_train.training.setup import prepare_run
from tests.support.comparisons import assert_same_bits
from tests.support.programs.disk_driver import files
from tests.support.runs import Capture, checkpoint, events, losses, recipe_dict
from tests.support.wording import assert_golden

RUN: dict[str, Any] = {"task": "causal-lm", "checkpoint": {"every_steps": 4, "keep": 9}}
ROLLBACK = Rollback(number=1, at_step=5, to_step=4, skip_first=6, skip_last=7)


def recipe_of(folder: Path, resume: str | Path = "auto", **sections: Any) -> Recipe:
    recipe = recipe_dict(folder, **RUN, **sections)
    recipe["checkpoint"]["resume"] = str(resume)
    return Recipe.model_validate(recipe)


def steps_in(folder: Path) -> list[int | None]:
    return [step_of(found) for found in checkpoint_folders(folder / "checkpoints")]


@pytest.fixture
def trained(corpus: Path) -> Path:
    """The folder of a run with checkpoints of steps 4, 8 and 12."""
    train(recipe_of(corpus))
    return corpus / "run"


def test_going_back_to_a_named_checkpoint_sets_the_newer_ones_aside_and_ends_the_same(trained: Path) -> None:
    before = checkpoint(trained, 12)
    train(recipe_of(trained.parent, trained / "checkpoints" / "step-00000004"))
    assert steps_in(trained) == [4, 8, 12]
    assert steps_in(trained / "previous-1") == [8, 12]
    assert events(trained, "resume")[-1]["step"] == 4
    assert list(losses(trained)) == list(range(1, 13))
    after = checkpoint(trained, 12)
    assert_same_bits(before, after)


def test_a_link_to_a_checkpoint_names_it_too(trained: Path) -> None:
    (trained / "latest").symlink_to(trained / "checkpoints" / "step-00000008")
    train(recipe_of(trained.parent, trained / "latest"))
    assert steps_in(trained / "previous-1") == [12]


def test_going_on_from_another_run_takes_its_skip_list_along_and_sets_what_is_here_aside(trained: Path) -> None:
    write_rollbacks(trained, [ROLLBACK])
    prepared = prepare_run(recipe_of(trained.parent))
    with prepared.resources:
        assert prepared.state.rollbacks == [ROLLBACK], "of the record: the checkpoint was made before"
    assert steps_in(trained) == [4], "8 and 12 were given up"
    train(recipe_of(trained.parent))
    elsewhere = trained.parent / "elsewhere"
    train(recipe_of(trained.parent, output_dir=str(elsewhere)))
    prepared = prepare_run(
        recipe_of(trained.parent, trained / "checkpoints" / "step-00000008", output_dir=str(elsewhere))
    )
    with prepared.resources:
        assert (prepared.state.step, prepared.state.rollbacks) == (8, [ROLLBACK])
    assert steps_in(elsewhere) == []
    assert steps_in(elsewhere / "previous-1") == [4, 8, 12]


def test_starting_anew_takes_rollbacks_and_incidents_along_and_counts_on_after_removed_folders(tmp_path: Path) -> None:
    for number in (1, 2):
        publish(tmp_path / "checkpoints", number, files(number))
        write_rollbacks(tmp_path, [ROLLBACK])
        (tmp_path / "incidents" / "step-5").mkdir(parents=True)
        for name in ("report.html", "examples.json", "trackers.json"):
            (tmp_path / name).touch()
        assert set_aside(tmp_path) == tmp_path / f"previous-{number}"
        moved = {path.name for path in (tmp_path / f"previous-{number}").iterdir()}
        assert moved == {"checkpoints", "examples.json", "incidents", "report.html", ROLLBACKS, "trackers.json"}
        assert read_rollbacks(tmp_path) == []
    (tmp_path / "previous-1").rename(tmp_path / "kept elsewhere")
    publish(tmp_path / "checkpoints", 3, files(3))
    assert set_aside(tmp_path) == tmp_path / "previous-3"
    assert set_aside(tmp_path) is None


def test_a_broken_checkpoint_is_set_aside_so_that_it_does_not_count_among_those_kept(trained: Path) -> None:
    (trained / "checkpoints" / "step-00000012" / "optimizer.safetensors").unlink()
    recipe = recipe_dict(trained.parent, **RUN, evaluate={"every_steps": 3})
    recipe["checkpoint"] |= {"keep": 1, "every_steps": 1}
    run = prepare_run(Recipe.model_validate(recipe))
    with run.resources:
        assert run.state.step == 8
        (event,) = events(trained, "checkpoint_invalid")
        assert_golden(event["message"])
    assert steps_in(trained) == [4, 8]
    assert (trained / "checkpoints" / "broken-step-00000012" / "model.safetensors").exists()


def test_best_weights_that_cannot_be_read_are_told_and_the_last_ones_kept(trained: Path) -> None:
    (trained / "summary.json").unlink(missing_ok=True)  # not finished
    run = prepare_run(recipe_of(trained.parent))
    with run.resources:
        run.state.best_step = 8
        assert load_best(run)
        weights = folder_of(trained / "checkpoints", 4) / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        before = {name: tensor.clone() for name, tensor in run.strategy.inner.model.state_dict().items()}
        for step, problem in ((4, "model.safetensors differs from its digest"), (6, "the folder does not exist")):
            run.state.best_step = step
            assert not load_best(run)
            assert problem in events(trained, "best_model_lost")[-1]["message"]
        assert_same_bits(run.strategy.inner.model.state_dict(), before)


def test_verify_tells_healthy_abandoned_and_broken_checkpoints_and_what_a_resume_would_use(
    trained: Path, capsys: Capture
) -> None:
    add_tags(trained / "checkpoints", [4])
    write_rollbacks(trained, [Rollback(number=1, at_step=12, to_step=8, skip_first=9, skip_last=11)])
    os.truncate(trained / "checkpoints" / "step-00000008" / "model.safetensors", 7)
    capsys.readouterr()
    assert main(["verify", str(trained)]) == 0
    assert_golden(re.sub(r"not \d+", "not #", capsys.readouterr().out))


@pytest.mark.parametrize(
    "content",
    [b"[]", b'{"state": 1, "identity": {}}', b'{"state": {}}', b"[" * 200_000, b"\xff", b'{"a":' * 50_000],
    ids=["list", "number", "no identity", "deep", "no text", "deep object"],
)
def test_a_checkpoint_that_proves_itself_and_is_no_run_s_is_refused_with_exit_code_4(
    corpus: Path, content: bytes, capsys: Capture
) -> None:
    writers = {**files(4), "trainer.json": lambda path: path.write_bytes(content)}
    publish(corpus / "run" / "checkpoints", 4, writers)
    (corpus / "recipe.yaml").write_text(json.dumps(recipe_dict(corpus, **RUN)))
    assert main(["run", str(corpus / "recipe.yaml")]) == 4
    assert str(corpus / "run/checkpoints/step-00000004/trainer.json") in capsys.readouterr().err


def test_weights_of_the_right_digest_that_are_no_safetensors_are_a_checkpoint_error(trained: Path) -> None:
    (trained / "checkpoints" / "step-00000012").rename(trained / "real")
    contents = {path.name: path.read_bytes() for path in (trained / "real").iterdir() if path.name != "manifest.json"}
    contents["optimizer.safetensors"] = b"\xff" * 100
    writers = {name: partial(Path.write_bytes, data=content) for name, content in contents.items()}
    publish(trained / "checkpoints", 12, writers)
    with pytest.raises(CheckpointError) as refused:
        prepare_run(recipe_of(trained.parent))
    assert "step-00000012/optimizer.safetensors" in str(refused.value)
