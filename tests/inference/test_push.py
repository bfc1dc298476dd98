"""`accel-train push`: the files that the Hub gets, and those that it never gets, against a fake of its API."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from accel_train.cli.main import main
from accel_train.core.model_card import FILE as CARD
from accel_train.inference import push
from tests.inference.conftest import Cli
from tests.support import runs
from tests.support.wording import assert_golden


class Hub:
    """Repositories by name, each with its files and whether it is private."""

    def __init__(self) -> None:
        self.repositories: dict[str, tuple[dict[str, bytes], bool]] = {}
        self.calls: list[str] = []
        self.failure: Exception | None = None

    def api(self, token: str) -> Any:
        assert token == "secret"
        return self

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def repo_exists(self, name: str) -> bool:
        return name in self.repositories

    def list_repo_files(self, name: str) -> list[str]:
        return list(self.repositories[name][0])

    def repo_info(self, name: str) -> Any:
        return SimpleNamespace(private=self.repositories[name][1])

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.repositories.setdefault(name, ({".gitattributes": b""}, private))

    def create_commit(self, name: str, operations: list[Any], *, commit_message: str) -> Any:
        if self.failure is not None:
            raise self.failure
        for each in operations:
            with each.as_file() as file:
                self.repositories[name][0][each.path_in_repo] = file.read()
        self.calls.append(commit_message)
        return SimpleNamespace(commit_url=f"https://huggingface.co/{name}/commit/1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `run`."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runs.write_corpus(folder)
        recipe = runs.write_recipe_file(folder, task="causal-lm")
        assert main(["run", str(recipe), "--schedule.max_steps", "3"]) == 0
    return folder


@pytest.fixture(autouse=True)
def hub(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub without repositories, and somebody who is logged in."""
    monkeypatch.chdir(finished)
    made = Hub()
    monkeypatch.setattr(push, "HfApi", made.api)
    monkeypatch.setattr(push, "get_token", lambda: "secret")
    yield made
    for name in ("model/pickled.bin", "model/.hidden.json", "model/own.py"):
        Path("run", name).unlink(missing_ok=True)


def model_files() -> list[Path]:
    return [path for path in Path("run/model").iterdir() if not path.name.startswith(".")]


def sent(*words: str) -> dict[str, Any]:
    result = push.push_run(Path("run"), *words)._asdict()
    return result


def test_a_dry_run_asks_nobody_and_names_each_file_with_its_size(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(push, "get_token", lambda: None)
    result = cli.result("push run tiny --dry-run")
    sizes = {path.name: path.stat().st_size for path in model_files()}
    assert result["files"] == {**sizes, "README.md": len(result["card"].encode())}
    assert (result["url"], result["repository"], hub.repositories) == (None, "tiny", {})


@pytest.mark.parametrize(("base", "shown"), [("me/base", "me/base"), ("base", "base"), ("./base", None), ("run", None)])
def test_the_card_names_a_base_model_of_the_hub_and_no_folder(base: str, shown: str | None, tmp_path: Path) -> None:
    copied = shutil.copytree("run", tmp_path / "run")
    resolved = copied / "recipe.resolved.yaml"
    tree = yaml.safe_load(resolved.read_text())
    resolved.write_text(yaml.safe_dump({**tree, "model": {"pretrained": base}}))
    card = push.push_run(copied, "me/tiny", is_dry_run=True).card
    assert ModelCard(card).data.base_model == shown


def test_the_hub_gets_the_model_and_the_scores_of_the_summary(hub: Hub, cli: Cli) -> None:
    result = cli.result("push run tiny --private")
    files, is_private = hub.repositories["me/tiny"]
    assert is_private
    assert result["url"] == "https://huggingface.co/me/tiny/commit/1"
    for path in model_files():
        assert path.name == CARD or files[path.name] == path.read_bytes()
    card = ModelCard(files["README.md"].decode())
    found = {each.metric_type: each.metric_value for each in card.data.eval_results}
    summary = json.loads(Path("run/summary.json").read_text())["eval"]
    assert found == {name: value for name, value in summary.items() if name != "num_targets"}
    assert card.data.pipeline_tag == "text-generation"
    assert 'model="me/tiny"' in card.text
    assert str(Path.cwd()) not in files["README.md"].decode()


def test_pickles_hidden_files_and_foreign_code_stay_here(hub: Hub) -> None:
    for name in ("pickled.bin", ".hidden.json", "own.py"):
        Path("run/model", name).write_text("x")
    found = sent("me/tiny")
    assert found["left_out"] == (".hidden.json", "own.py", "pickled.bin")
    assert not {".hidden.json", "own.py", "pickled.bin"} & hub.repositories["me/tiny"][0].keys()


def test_code_that_the_model_names_is_sent(hub: Hub, finished: Path) -> None:
    config, code = Path("run/model/config.json"), Path("run/model/own.py")
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "auto_map": {"AutoConfig": "own.Config"}}))
    code.write_text("Config = None")
    try:
        assert "own.py" in sent("me/tiny")["files"]
    finally:
        config.write_text(before)


def test_a_repository_with_files_is_refused_and_an_update_keeps_its_other_files(hub: Hub, cli: Cli) -> None:
    hub.repositories["me/tiny"] = ({".gitattributes": b"", "mine.txt": b"kept"}, False)
    assert "--update" in cli("push run me/tiny", code=2)
    assert hub.calls == []
    assert push.push_run(Path("run"), "me/tiny", updates=True).kept == ("mine.txt",)
    assert hub.repositories["me/tiny"][0]["mine.txt"] == b"kept"


@pytest.mark.parametrize("words", ["run a--b", "none tiny", "run me/public --private"])
def test_what_cannot_be_pushed_is_one_error(words: str, hub: Hub, cli: Cli) -> None:
    hub.repositories["me/public"] = ({}, False)
    *_, error = cli.refusal(f"push {words}").rpartition("'a--b'. ")  # the Hub's own words come before it
    assert_golden(error)
    assert hub.calls == []


def test_nobody_logged_in_and_a_refusal_of_the_hub_are_errors_with_the_remedy(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    hub.failure = ConnectionError("no route\nto the hub")
    assert "ConnectionError: no route" in cli("push run me/tiny", code=2)
    monkeypatch.setattr(push, "get_token", lambda: None)
    assert "hf auth login" in cli("push run me/tiny", code=2)


def test_folders_of_this_machine_are_not_in_the_card(finished: Path) -> None:
    path = Path("run/summary.json")
    before = path.read_text()
    summary = json.loads(before)
    summary["data"]["sources"] = "/home/me/secret/rows.csv: 5 rows; https://example.org/a/b.csv"
    path.write_text(json.dumps(summary))
    try:
        card = push.card_of(Path("run"), "me/tiny")
    finally:
        path.write_text(before)
    metadata = yaml.safe_load(card.split("---")[1])
    assert "rows.csv: 5 rows; https://example.org/a/b.csv" in card
    assert "/home" not in card
    assert metadata["model-index"][0]["results"][0]["dataset"]["name"].startswith("rows.csv")
