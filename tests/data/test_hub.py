"""Names of the hub without a network: one short try, then downloaded files alone."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from accel_train.data import hub
from accel_train.data.sources import resolve_sources
from accel_train.data.text.tokenizers import load_tokenizer
from accel_train.model.pretrained import pretrained_config
from accel_train.recipe.data import Data
from accel_train.recipe.loader import make_recipe
from tests.support.downloads import save_bert, write_model
from tests.support.hub import serve_hub, use_hub
from tests.support.runs import refused


@pytest.fixture
def endpoint() -> str:
    """The address of a hub that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    hub._go_offline_without_hub.cache_clear()


def recipe_of(name: str) -> dict[str, object]:
    sections = {"model": {"pretrained": name}, "data": {"train": "x.txt"}, "schedule": {"max_steps": 2}}
    return {"task": "masked-lm", "output_dir": "out", **sections}


LOOKUPS = {
    "model": lambda name: pretrained_config(make_recipe(recipe_of(name), "r.yaml")),
    "tokenizer": lambda name: load_tokenizer(name, trust_remote_code=False),
    "dataset": lambda name: resolve_sources(name, Data(train=name), key="data.train"),
}


@pytest.mark.parametrize("what", LOOKUPS)
def test_an_unknown_name_without_a_network_costs_one_short_try(
    what: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, endpoint, tmp_path)
    since = time.perf_counter()
    refused(
        LOOKUPS[what], "someone/thing", named=f"someone/thing|{endpoint}|HF_HOME to {tmp_path}, or name a local folder"
    )
    assert time.perf_counter() - since < 3


def test_downloaded_files_are_used_without_a_network(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "someone/bert", save_bert)
    use_hub(monkeypatch, endpoint, tmp_path)
    since = time.perf_counter()
    assert LOOKUPS["model"]("someone/bert").model_type == "bert"
    assert load_tokenizer("someone/bert", trust_remote_code=False).mask_token == "[MASK]"
    assert time.perf_counter() - since < 3


def test_a_hub_that_answers_is_used_even_if_it_answers_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bert(repository := tmp_path / "bert")
    with serve_hub({"someone/bert": repository}) as (served, asked):
        use_hub(monkeypatch, served, tmp_path / "home")
        assert LOOKUPS["model"]("someone/bert").model_type == "bert"
        assert asked[0] == "HEAD /"  # which this hub answers with 404
        assert hub.without_hub("someone/thing") == ""
        assert "HF_HOME" not in str(refused(LOOKUPS["model"], "someone/thing", named="someone/thing"))
        assert asked.count("HEAD /") == 1
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_folder_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bert(tmp_path / "bert")
    with serve_hub({}) as (served, asked):
        use_hub(monkeypatch, served, tmp_path)
        hub.look_for_hub(str(tmp_path / "bert"))
        assert asked == []
