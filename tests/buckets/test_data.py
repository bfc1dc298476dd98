"""Data in a bucket: a run on it is the run on local files, and only what has changed is copied again."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from accel_train import train
from accel_train.buckets.files import fetch_files, local_files
from accel_train.buckets.store import Store
from accel_train.cli.main import main
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.schema import Recipe
from tests.support.every_task import CASES
from tests.support.runs import Capture, losses, recipe_dict, refused, write_yaml


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are copied."""
    names: list[str] = []
    get = Store.get

    def counted(store: Store, name: str, path: Path) -> None:
        names.append(name)
        get(store, name, path)

    monkeypatch.setattr(Store, "get", counted)
    return names


def write(url: str, content: bytes) -> None:
    files, root = fsspec.url_to_fs(url)
    files.pipe_file(root, content)


def recipe_of(folder: Path, name: str, train: Any, **sections: Any) -> Recipe:
    sections["data"] = {"train": train, **sections.get("data", {})}
    return Recipe.model_validate(recipe_dict(folder, task="causal-lm", output_dir=str(folder / name), **sections))


def test_lines_and_files_name_the_data_there_and_not_its_copy(corpus: Path, capsys: Capture) -> None:
    url, root = "memory://bucket/rows.csv", str(corpus / "own-cache" / "files")
    rows = "".join(f"cup {number},tea\nwheel {number},car\n" for number in range(30))
    write(url, f"text,label\n{rows}a lid,\n".encode())
    sections = CASES["text-classification"](corpus)
    sections["data"] |= {"train": url, "eval_fraction": 0.2}
    recipe = recipe_dict(corpus, task="text-classification", output_dir=str(corpus / "run"), **sections)
    path = str(write_yaml(corpus / "recipe.yaml", recipe))
    assert main(["run", path]) == 2
    for command in ("plan", "data", "run"):
        assert main([command, path, "--data.missing_labels", "drop"]) == 0
    assert main(["evaluate", str(corpus / "run"), url]) == 2
    told = capsys.readouterr()
    assert (told.out + told.err).count(f"{url}:62") == 5
    assert root not in told.out + told.err
    assert [*(corpus / "run").rglob("data.html")]
    for file in (corpus / "run").rglob("*"):
        assert not file.is_file() or root.encode() not in file.read_bytes()


@pytest.mark.parametrize("pattern", ["corpus.jsonl", "*.jsonl", ""])
def test_a_run_on_a_file_a_pattern_or_a_folder_of_a_bucket_is_the_run_on_local_files(
    corpus: Path, pattern: str
) -> None:
    write("memory://bucket/text/corpus.jsonl", (corpus / "corpus.jsonl").read_bytes())
    if pattern != "":
        write("memory://bucket/text/other.csv", b"not,text\n1,2\n")
    there = train(recipe_of(corpus, "there", f"memory://bucket/text/{pattern}".rstrip("/")))
    here = train(recipe_of(corpus, "here", str(corpus / "corpus.jsonl")))
    assert losses(there.output_dir) == losses(here.output_dir)
    assert "memory://bucket/text" in (there.output_dir / "recipe.resolved.yaml").read_text()
    identities = [
        json.loads((sorted(run.output_dir.glob("checkpoints/*"))[-1] / "trainer.json").read_text())["identity"]
        for run in (there, here)
    ]
    assert identities[0] == identities[1], "a run goes on with the same data elsewhere"


def test_only_new_and_changed_files_are_copied_and_removed_ones_go(copied: list[str]) -> None:
    for name in "abc":
        write(f"memory://bucket/{name}.txt", name.encode())
    folder = Path(fetch_files("memory://bucket"))
    assert sorted(copied) == ["a.txt", "b.txt", "c.txt"]
    copied.clear()
    fetch_files("memory://bucket")
    assert copied == []
    write("memory://bucket/b.txt", b"other")
    fsspec.filesystem("memory").rm_file("/bucket/c.txt")
    fetch_files("memory://bucket")
    assert copied == ["b.txt"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.txt": b"a", "b.txt": b"other"}
    fetch_files("memory://bucket/*.txt")
    fetch_files("memory://bucket/a.txt")
    assert copied == ["b.txt", ""], "a file alone is not yet known as one of the folder"


def test_a_copy_that_was_interrupted_is_made_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("memory://bucket/a.txt", b"whole")

    def torn(store: Store, name: str, path: Path) -> None:
        path.write_bytes(b"wh")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", torn)
        with pytest.raises(KeyboardInterrupt):
            fetch_files("memory://bucket/a.txt")
    assert not Path(local_files("memory://bucket/a.txt")).exists()
    assert Path(fetch_files("memory://bucket/a.txt")).read_bytes() == b"whole"


def test_data_that_is_not_there_is_one_line_before_the_model(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("memory://bucket/a.txt", b"a")
    refused(train, recipe_of(corpus, "run", "memory://bucket/*.jsonl").model_dump(), named="memory://bucket/*.jsonl")
    sections = recipe_dict(corpus, task="causal-lm", data={"train": "file:///nowhere/at-all"})
    assert main(["run", str(write_yaml(corpus / "run.yaml", sections))]) == 2
    assert "file:///nowhere/at-all" in capsys.readouterr().err


def test_weights_and_evaluation_sets_take_names_of_buckets(corpus: Path) -> None:
    for name in ("web", "code"):
        write(f"memory://bucket/{name}.jsonl", (corpus / "corpus.jsonl").read_bytes())
    sources = [{"source": f"memory://bucket/{name}.jsonl", "weight": 1} for name in ("web", "code")]
    sets = {name: f"memory://bucket/{name}.jsonl" for name in ("web", "code")}
    plan = resolve_plan(recipe_of(corpus, "run", sources, data={"eval": sets}))
    assert len([note for note in plan.notes if note.startswith("source ")]) == 2
