"""Runs on token files where they lie: resumes, changes of a file that the background finds, and ids alone."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.cli.main import main
from accel_train.core.json_io import json_digest
from accel_train.data import cache
from accel_train.data.text.corpus import prepare_text
from accel_train.data.text.tokenizers import byte_tokenizer, tokenizer_digest
from accel_train.recipe.schema import Recipe
from tests.data.text.test_token_files import write_datatrove, write_tokens
from tests.support.runs import forget, losses, metrics, recipe_dict, run, steps_of, write_recipe_file

FLIPPED_AT = 10_000
"""A byte of a file of 2 MB that lies between the samples of `sample_digest`."""


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token file that counts as large, of 2 MB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "CHECKED_AT_OPENING_BYTES", 2**20)
    np.random.default_rng(0).integers(0, 256, 10**6).astype("<u2").tofile("large.bin")
    return tmp_path / "large.bin"


def recipe_of(path: Path | str, **sections: Any) -> Path:
    data = {"train": str(path), "eval_fraction": 0.001, **sections.pop("data", {})}
    return write_recipe_file(Path.cwd(), task="causal-lm", data=data, **sections)


def flip(path: Path, *, keeps_time: bool = False) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(FLIPPED_AT)
        value = file.read(1)[0]
        file.seek(FLIPPED_AT)
        file.write(bytes([value ^ 1]))
    if keeps_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def waits_for_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a short run wait for the background check, as a run of an epoch does."""
    start = cache.DigestCheck.start

    def start_and_wait(check: cache.DigestCheck) -> None:
        start(check)
        check.wait()

    monkeypatch.setattr(cache.DigestCheck, "start", start_and_wait)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_resume_finds_a_byte_that_changed_since_the_first_run(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keeps_time: bool
) -> None:
    waits_for_digests(monkeypatch)
    recipe = recipe_of(large, schedule={"max_steps": 2})
    before = cache.sample_digest(large)
    assert main(["run", str(recipe)]) == 0
    (pin,) = Path("cache/text/pinned").iterdir()
    assert pin.name == before
    assert pin.read_text() == cache.sha256(large)
    assert main(["run", str(recipe), "--schedule.max_steps", "3", "--checkpoint.accept_changes", "true"]) == 0
    flip(large, keeps_time=keeps_time)
    assert cache.sample_digest(large) == before, "the samples do not show it"
    capsys.readouterr()
    assert main(["run", str(recipe), "--schedule.max_steps", "4", "--checkpoint.accept_changes", "true"]) == 2
    line = error_of(capsys)
    assert f"error: {large} has changed since a run read it" in line
    assert pin.name in line
    assert max(losses(Path("run"))) == 3


def test_a_byte_that_changes_while_the_first_run_reads_is_found(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits_for_digests(monkeypatch)
    digest = cache.sha256

    def digest_of_changed(path: Path, *further: Any) -> str:
        if path == large:
            flip(path)
        return digest(path, *further)

    monkeypatch.setattr(cache, "sha256", digest_of_changed)
    assert main(["run", str(recipe_of(large, schedule={"max_steps": 2}))]) == 2
    assert f"error: {large} was written while a run trained on it" in error_of(capsys)
    assert not Path("cache/text/pinned").exists()


def test_a_changed_sample_of_a_large_file_is_other_data_at_the_start(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(large, schedule={"max_steps": 2})
    assert main(["run", str(recipe)]) == 0
    tokens = np.fromfile(large, "<u2")
    tokens[3] ^= 1
    tokens.tofile(large)
    capsys.readouterr()
    assert main(["run", str(recipe), "--schedule.max_steps", "3", "--checkpoint.accept_changes", "false"]) == 2
    assert "data.fingerprint" in capsys.readouterr().err


def copied_fingerprint(path: str) -> str:
    """The fingerprint of versions that copied token files, by the layout of their cache keys."""
    contents = {
        "format": 1,
        "train": [[[[".bin", cache.sha256(Path(path))]]]],
        "eval": [],
        "eval_fraction": 0.001,
        "text_column": "text",
        "encoding": "auto",
        "encoding_errors": "strict",
        "header": "first_line",
        "delimiter": "auto",
        "quoting": "auto",
        "tokenizer": tokenizer_digest(byte_tokenizer()),
    }
    return json_digest([json_digest(contents)[:32], contents["tokenizer"]])


def test_fingerprints_are_those_of_the_copies_and_large_files_keep_them_as_accepted(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(
        recipe_dict(large.parent, task="causal-lm", data={"train": str(large), "eval_fraction": 0.001})
    )
    sampled = prepare_text(recipe, progress=False)
    assert callable(sampled.first_fingerprint)
    assert sampled.first_fingerprint() == copied_fingerprint("large.bin") != sampled.fingerprint
    monkeypatch.setattr(cache, "CHECKED_AT_OPENING_BYTES", 2**28)
    assert prepare_text(recipe, progress=False).fingerprint == copied_fingerprint("large.bin")


def test_a_run_that_began_with_the_copied_fingerprint_resumes(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(cache, "CHECKED_AT_OPENING_BYTES", 2**28)
        recipe = recipe_of(large, schedule={"max_steps": 4}, checkpoint={"every_steps": 2, "keep": 3})
        assert main(["run", str(recipe)]) == 0
    whole = losses(Path("run"))
    forget(Path("run"), 3)
    assert main(["run", str(recipe)]) == 0
    assert steps_of(Path("run"), "resume") == [2]
    assert losses(Path("run")) == whole


@pytest.mark.slow
def test_one_process_and_then_two_give_the_losses_of_one_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    name = write_datatrove([rng.integers(0, 256, int(length)).tolist() for length in rng.integers(5, 90, 90)])
    data = {"mask_documents": True, "eval_fraction": 0.1}
    recipe = recipe_of(name, data=data, schedule={"max_steps": 40}, checkpoint={"every_steps": 10, "keep": 9})
    run(recipe)
    whole = losses(Path("run"))
    forget(Path("run"), 31)
    run(recipe, processes=2)
    assert steps_of(Path("run"), "resume") == [30]
    assert losses(Path("run")) == pytest.approx(whole, rel=1e-6)


def test_ids_alone_train_and_what_needs_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokens("a.bin", np.random.default_rng(2).integers(0, 300, 4000).tolist())
    model = {
        "config": {
            "model_type": "gpt2",
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 16,
            "n_positions": 32,
            "bos_token_id": None,
            "eos_token_id": None,
            "vocab_size": 300,
        }
    }
    sections: dict[str, Any] = {"model": model, "tokenizer": "none", "data": {"eval_fraction": 0.1}}
    recipe = recipe_of("a.bin", schedule={"max_steps": 2}, **sections)
    assert main(["run", str(recipe)]) == 0
    assert {path.name for path in Path("run/model").iterdir()} == {
        ".accel_train.json",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    (evaluation,) = metrics(Path("run"), "eval")
    assert "perplexity" in evaluation
    assert "bits_per_byte" not in evaluation
    assert main(["evaluate", "run"]) == 0
    for words in (
        ["generate", "run", "--prompt", "a"],
        ["run", str(recipe), "--output_dir", "other", "--evaluate.sample_prompt", "a"],
        ["run", str(recipe), "--output_dir", "other", "--data.format", "chat"],
        ["run", str(recipe), "--output_dir", "other", "--data.train", "python-stdlib"],
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert "none" in error_of(capsys)
