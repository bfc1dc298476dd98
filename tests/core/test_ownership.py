"""What lies where a command might write is left alone, refused in one line, or kept in `previous-N/`: never lost."""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train import Recipe
from accel_train.checkpoint.rollback_log import ROLLBACKS
from accel_train.cli.main import main
from accel_train.core.ownership import MARKER, RUN_NAMES, check_claim, check_file, claim, write_file
from accel_train.observe.run_folder import EXAMPLES_FILE, RECIPE_FILE, SUMMARY_FILE, RunFolder, read_events
from accel_train.observe.trackers import RUN_IDS
from tests.support.marks import slow
from tests.support.runs import SCENES, Capture, recipe_dict, refused, summary_of, write_corpus
from tests.support.wording import assert_golden, raises_golden

LM: dict[str, Any] = {
    "task": "causal-lm",
    "schedule": {"max_steps": 2},
    "checkpoint": {"every_steps": 1},
    "evaluate": {"max_samples": 2},
}
FOREIGN = b"the user's own\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs: `text` of a language model, and `scenes` of a segmentation."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, recipe in (("text", recipe_dict(Path(), **LM)), ("scenes", SCENES)):
            Path(f"{name}.yaml").write_text(yaml.safe_dump({**recipe, "output_dir": name}))
            assert main(["run", f"{name}.yaml"]) == 0
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> Path:
    """A copy of that folder, as the current one."""
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def plant(path: Path, kind: str) -> None:
    """Something of the user's at a path: a file, a folder with a file in it, or a link to a file elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_bytes(FOREIGN + path.name.encode())
    elif kind == "folder":
        path.mkdir()
        (path / "note.txt").write_bytes(FOREIGN + path.name.encode())
    else:
        target = path.absolute().parent / f"target-of-{path.name.lstrip('.')}"
        target.write_bytes(FOREIGN + path.name.encode())
        path.symlink_to(target)


def digests(folder: Path) -> dict[str, str]:
    """Of each file, by its place; of a link, where it points to. What is cached, and the markers, are the program's
    own.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())
    files = (path for path in files if folder / "cache" not in path.parents and path.name != MARKER)
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else digest(path) for path in files
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def error_of(capsys: Capture) -> str:
    """The one line that a refused command ends with."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


WRITERS = {
    "predict": (["predict", "scenes", "--out", "out/p.csv"], ["out/p.csv", "out/p-masks", "out/.tmp-p-masks"]),
    "predict with pictures": (["predict", "scenes", "--out", "out/p.csv", "--draw", "out/d"], ["out/d", "out/.tmp-d"]),
    "predict in the run": (["predict", "scenes"], ["scenes/predictions.csv", "scenes/predictions-masks"]),
    "evaluate": (["evaluate", "scenes"], ["scenes/evaluation.json"]),
    "evaluate other data": (
        ["evaluate", "text", "--data", "corpus.jsonl"],
        ["text/evaluation-corpus.json"],
    ),
    "export": (["export", "text", "--out", "out/e"], ["out/e", "out/.tmp-e"]),
    "export in the run": (["export", "text"], ["text/export"]),
    "int8": (["export", "text", "--quantize", "int8"], ["text/export-int8"]),
    "find-lr": (["find-lr", "text.yaml", "--steps", "20", "--out", "out"], ["out/find-lr.json", "out/find-lr.png"]),
    "report": (["report", "text", "--out", "out/r.html"], ["out/r.html"]),
    "report in the run": (["report", "text"], ["text/report.html"]),
    "comparison": (["report", "text", "scenes"], ["comparison.html"]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_command_replaces_what_it_wrote_itself(here: Path, name: str) -> None:
    Path("out").mkdir()
    for _ in range(2):
        assert main(WRITERS[name][0]) == 0
    assert not list(here.rglob("previous-*"))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_command_refuses_in_one_line_to_replace_what_it_did_not_write(
    here: Path, name: str, kind: str, capsys: Capture
) -> None:
    words, places = WRITERS[name]
    Path("out").mkdir()
    for place in places:
        path = Path(place)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        plant(path, kind)
        before = digests(here)
        into_folder = name == "report" and kind == "folder" and path.suffix == ".html"
        assert main(words) == (0 if into_folder else 2), place
        if into_folder:
            assert before.items() <= digests(here).items()
        else:
            error_of(capsys)
            assert digests(here) == before, place
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "text", "--max-new-tokens", "1"],
        ["verify", "text"],
        ["plan", "text.yaml"],
        ["replay", "text/incidents/none"],
        ["doctor"],
        ["predict", "scenes", "--out", "out/p.csv"],
        ["evaluate", "text", "--data", "corpus.jsonl"],
        ["export", "text", "--out", "new"],
        ["find-lr", "text.yaml", "--steps", "20", "--out", "out"],
        ["report", "text", "--out", "out/r.html"],
        ["run", "text.yaml", "--output_dir", "out"],
        slow(["rehearse", "text.yaml", "--output_dir", "out"]),
    ],
    ids=lambda words: words[0],
)
def test_a_command_leaves_all_other_files_of_the_folders_it_writes_to(here: Path, words: list[str]) -> None:
    for folder in ("out", "text", "scenes"):
        for number, name in enumerate(
            (".notes.tmp", ".tmp-mine", ".trash-mine", "recipe.yaml", "previous-1", "README.md")
        ):
            plant(here / folder / name, ("file", "folder", "link")[number % 3])
        plant(here / folder / ".probe", "file")
    before = digests(here)
    assert main(words) in (0, 2)
    after = digests(here)
    ours = ("metrics.jsonl", "events.jsonl")
    assert {name: value for name, value in before.items() if not name.endswith(ours)} == {
        name: after.get(name) for name in before if not name.endswith(ours)
    }


def test_a_run_is_refused_where_it_would_replace_what_no_run_wrote(corpus: Path, capsys: Capture) -> None:
    path = write_recipe(corpus)
    assert {SUMMARY_FILE, EXAMPLES_FILE, RUN_IDS, ROLLBACKS} <= set(RUN_NAMES)
    for name in RUN_NAMES:
        for kind in ("file", "folder", "link"):
            plant(corpus / "run" / name, kind)
            refused(check_claim, corpus / "run", named=f"output_dir={corpus / 'run'} | {name},")
            # The command checks before it writes: one name stands for all.
            if name == SUMMARY_FILE:
                before = digests(corpus)
                assert main(["run", str(path)]) == 2
                assert_golden(error_of(capsys))
                assert digests(corpus) == before
            shutil.rmtree(corpus / "run")


def write_recipe(folder: Path, **sections: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe_dict(folder, **{**LM, **sections})))
    return path


def test_what_was_put_or_changed_in_a_run_folder_is_kept_when_the_run_writes_there_again(here: Path) -> None:
    text = Path("text")
    kept = ["model/README.md", "report.html", "summary.json", "evaluation.json", RECIPE_FILE, "model/note.txt"]
    kept.append("checkpoints/step-00000001/note.txt")
    for name in kept:
        with (text / name).open("ab") as file:
            file.write(b"\n# changed by the user\n")
    wanted = {digest(text / name) for name in kept}
    assert main(["run", "text.yaml", "--checkpoint.keep", "1", "--schedule.max_steps", "4", "--accept-changes"]) == 0
    assert wanted <= {digest(path) for path in text.rglob("*") if path.is_file()}
    assert summary_of(text)["steps"] == 4


def test_a_finished_run_without_its_checkpoints_is_not_trained_over(here: Path, capsys: Capture) -> None:
    shutil.rmtree("text/checkpoints")
    model, metrics = digests(Path("text/model")), digest(Path("text/metrics.jsonl"))
    assert main(["run", "text.yaml"]) == 2
    assert_golden(error_of(capsys))
    assert (digests(Path("text/model")), digest(Path("text/metrics.jsonl"))) == (model, metrics)
    assert main(["run", "text.yaml", "--checkpoint.resume", "never"]) == 0
    assert digests(Path("text/previous-1/model")) == model
    assert digest(Path("text/previous-1/metrics.jsonl")) == metrics


@pytest.mark.parametrize("through", ["text/model", "link/model", "text/../link/model"])
def test_a_model_in_the_output_folder_that_the_run_would_replace_is_refused(
    here: Path, through: str, capsys: Capture
) -> None:
    Path("link").symlink_to("text")
    recipe = yaml.safe_load(Path("text.yaml").read_text())
    recipe["model"] = {"pretrained": through}
    Path("again.yaml").write_text(yaml.safe_dump(recipe))
    before = digests(here)
    assert main(["run", "again.yaml"]) == 2
    assert_golden(error_of(capsys))
    assert digests(here) == before


def test_a_foreign_recipe_yaml_in_output_dir_is_left_alone_and_runs_twice(corpus: Path) -> None:
    path = write_recipe(corpus)
    mine = corpus / "run" / "recipe.yaml"
    mine.parent.mkdir()
    mine.write_text("# a comment worth keeping\n" + path.read_text())
    before = digest(mine)
    for _ in range(2):
        assert main(["run", str(mine)]) == 0
        assert digest(mine) == before
    assert main(["run", str(mine.parent / RECIPE_FILE)]) == 0
    assert not list(mine.parent.glob("previous-*"))


@pytest.mark.parametrize("part", [".", "checkpoints"])
def test_a_run_resumes_from_a_copy_without_hidden_files(here: Path, part: str) -> None:
    shutil.copytree(Path("text", part), Path("copy", part), ignore=shutil.ignore_patterns(".*"))
    before = {digest(path) for path in Path("copy").rglob("*") if path.is_file()}
    assert main(["run", "text.yaml", "--output_dir", "copy", "--schedule.max_steps", "3", "--accept-changes"]) == 0
    assert [event["step"] for event in read_events(here / "copy") if event["event"] == "resume"] == [2]
    kept = {digest(path) for path in Path("copy/previous-1").rglob("*") if path.is_file()}
    assert kept <= before
    assert bool(kept) == (part == ".")


@pytest.mark.parametrize("place", ["", "  ", "https://bucket/run", "az://b/r", "s3://"])
def test_a_place_that_is_blank_or_no_folder_is_refused(here: Path, place: str, capsys: Capture) -> None:
    before = digests(here)
    errors = []
    for words in (
        *("run text.yaml --output_dir", "plan text.yaml --output_dir"),
        *("predict scenes --out", "export text --out", "find-lr text.yaml --out", "report text --out"),
    ):
        assert main([*words.split(), place]) == 2
        errors.append(error_of(capsys))
    assert errors == [errors[0]] * 2 + [errors[-1]] * 4
    assert_golden(f"{errors[0]}\n{errors[-1]}")
    told = errors[-1].partition(f"={place!r} ")[2]
    refused(Recipe.model_validate, {**recipe_dict(here), "output_dir": place}, named=told)
    assert digests(here) == before


def test_out_follows_a_link_and_writes_into_what_is_no_regular_file(here: Path, capsys: Capture) -> None:
    Path("elsewhere").mkdir()
    for command, name, wrote in (("report", "r.html", ""), ("export", "folder", "config.json")):
        Path(name).symlink_to(Path("elsewhere", name).absolute())
        for _ in range(2):
            assert main([command, "text", "--out", name]) == 0
            assert Path(name).is_symlink()
            assert Path("elsewhere", name, wrote).stat().st_size > 300
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()))
    reader.start()
    assert main(["report", "text", "--out", "pipe"]) == 0
    reader.join()
    assert read[0].startswith(b"<!doctype html>")
    assert Path("pipe").is_fifo()
    capsys.readouterr()
    assert main(["predict", "scenes", "--out", "/dev/null"]) == 2
    assert_golden(error_of(capsys))
    assert not list(Path().glob("pipe-*"))


def test_a_device_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        check_file(path, tmp_path, "--out")
        write_file(path, b"nothing", tmp_path)
    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "null").is_symlink()


def test_a_file_of_ours_is_replaced_until_somebody_changes_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    claim(tmp_path / "run")
    path = tmp_path / "table.csv"
    for content in (b"1", b"2"):
        check_file(path, tmp_path / "run", "--out table.csv")
        write_file(path, content, tmp_path / "run")
    path.write_bytes(b"mine")
    with raises_golden():
        check_file(path, tmp_path / "run", "--out table.csv")
    write_file(path, b"3", tmp_path / "run")  # it came while the command worked
    assert (path.read_bytes(), (tmp_path / "previous-1" / "table.csv").read_bytes()) == (b"3", b"mine")
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_everything_a_run_leaves_follows_the_umask(corpus: Path, mask: int, umask: Callable[[int], int]) -> None:
    path = write_recipe(corpus, output_dir=str(corpus / "runs" / "one"))
    umask(mask)
    assert main(["run", str(path)]) == 0
    made = [corpus / "runs", *(corpus / "runs").rglob("*"), *(corpus / "cache").rglob("*")]
    wrong = [
        f"{each.relative_to(corpus)} {each.stat().st_mode & 0o777:o}"
        for each in made
        if each.stat().st_mode & 0o777 != (0o777 if each.is_dir() else 0o666) & ~mask
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "flags", [["--data.train", "nowhere.jsonl"], ["--data.text_column", "words"], ["--seed", "-1"]]
)
def test_data_that_cannot_be_read_leave_no_run_folder(corpus: Path, flags: list[str]) -> None:
    assert main(["run", str(write_recipe(corpus, output_dir=str(corpus / "runs" / "one"))), *flags]) == 2
    assert not (corpus / "runs").exists()


def test_a_run_in_use_is_said_before_data_are_read(corpus: Path, capsys: Capture) -> None:
    path = write_recipe(corpus)
    with RunFolder(corpus / "run"):
        assert main(["run", str(path), "--data.train", "nowhere.jsonl"]) == 2
    assert f"process {os.getpid()}" in error_of(capsys)
