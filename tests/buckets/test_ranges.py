"""Text that is read from a bucket by ranges: the same shards and losses as from local files, without a copy."""

import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as arrow
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from accel_train import train
from accel_train.buckets.files import RemoteFile, local_files, remote_files
from accel_train.core.errors import DataError
from accel_train.data.sources import files_of, resolve_sources
from accel_train.data.text import shards as shards_module
from accel_train.data.text.corpus import prepare_text
from accel_train.plan.plan import resolve_plan
from accel_train.plan.prepare import prepare
from accel_train.recipe.data import WindowData
from accel_train.recipe.schema import Recipe
from tests.support.runs import Settings, losses, recipe_dict, samples_by_step, train_recipe, write_rows

ROWS = [f"{number}: " + "wörd " * (number * 37 % 90) for number in range(900)]


class Counting(MemoryFileSystem):
    """A store that counts what is read, and that fails every `every`-th request."""

    protocol = "memory"
    num_bytes = num_requests = every = 0
    copied: ClassVar[list[str]] = []

    def ask(self) -> None:
        Counting.num_requests += 1
        if self.every and self.num_requests % self.every == 0:
            raise ConnectionError("connection reset")

    def cat_file(self, *args: Any, **options: Any) -> Any:
        self.ask()
        content = super().cat_file(*args, **options)
        Counting.num_bytes += len(content)
        return content

    def info(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().info(*args, **options)

    def find(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().find(*args, **options)

    def get_file(self, rpath: str, *args: Any, **options: Any) -> Any:
        self.ask()
        self.copied.append(rpath)
        return super().get_file(rpath, *args, **options)


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counting]]:
    """The store of `memory://`. Shards have 4 KiB, and requests read some more ahead."""
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 4096)
    monkeypatch.setattr("accel_train.buckets.files.READ_AHEAD_BYTES", 4608)
    monkeypatch.setattr("accel_train.buckets.store.FIRST_PAUSE_SECONDS", 0.001)
    for name, value in (("num_bytes", 0), ("num_requests", 0), ("every", 0), ("copied", [])):
        monkeypatch.setattr(Counting, name, value)
    fsspec.register_implementation("memory", Counting, clobber=True)
    yield Counting
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


def put(url: str, path: Path) -> str:
    """The URL of a copy of a file or folder."""
    files, root = fsspec.url_to_fs(url)
    for each in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        place = f"{root}/{each.relative_to(path)}" if path.is_dir() else root
        files.makedirs(place.rpartition("/")[0], exist_ok=True)
        files.pipe_file(place, each.read_bytes())
    return url


def jsonl(place: Path) -> Path:
    return Path(write_rows(str(place / "a.jsonl"), [{"text": text} for text in ROWS]))


def groups(place: Path) -> Path:
    path = place / "a.parquet"
    parquet.write_table(arrow.table({"text": ROWS, "other": [row[::-1] for row in ROWS]}), path, row_group_size=60)
    return path


def long_text(place: Path) -> Path:
    path = place / "a.txt"
    path.write_text("\n".join(ROWS))
    return path


def folder(place: Path) -> Path:
    folder = place / "folder"
    for number, text in enumerate(ROWS):
        path = folder / ("a-b", "a", "c")[number % 3] / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("README.md", ".hidden.txt", "about.json", "left.out", "a/.git/x.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("other")
    jsonl(folder)
    groups(folder)
    return folder


def wide(place: Path) -> Path:
    path = place / "wide.jsonl"
    path.write_text(jsonl(place).read_text(), encoding="utf-16")
    return path


KINDS = {make.__name__: make for make in (jsonl, groups, long_text, folder, wide)}


def recipe_of(place: Path, name: str, source: Any, **data: Any) -> Recipe:
    data = {"train": source, "order": "blocks", "sequence_length": 16, "eval_fraction": 0.05, **data}
    own: Settings = {"output_dir": str(place / name), "data": {"cache_dir": str(place / f"{name}-cache"), **data}}
    return Recipe.model_validate(recipe_dict(place, task="causal-lm", **own))


def shards_of(recipe: Recipe) -> Any:
    windows: Any = prepare_text(recipe, progress=False).train
    return windows.shards


def tokens_of(shards: Any) -> list[bytes]:
    shards.make_all(range(len(shards.cut)))
    return [shards.path(number).read_bytes() for number in range(len(shards.cut))]


@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_shards_are_those_of_the_same_files_on_this_machine(tmp_path: Path, kind: str, scheme: str) -> None:
    path = KINDS[kind](tmp_path)
    url = put(f"memory://bucket/{path.name}" if scheme == "memory" else f"file://{tmp_path}/bucket/{path.name}", path)
    here, there = (shards_of(recipe_of(tmp_path, name, source)) for name, source in (("a", str(path)), ("b", url)))
    assert {*map(type, files_of(there.cut.sources))} == {RemoteFile}
    found = tokens_of(there)
    assert len(found) > 8
    assert found == tokens_of(here)
    assert not Path(local_files(url)).exists()


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.txt", "?-b/*", "a*/00?.txt", "[ac]*/*.txt"])
def test_a_pattern_finds_the_files_that_it_finds_on_this_machine(tmp_path: Path, pattern: str) -> None:
    path = folder(tmp_path)
    data = WindowData(train=put("memory://bucket", path) + f"/{pattern}")
    there = files_of(resolve_sources(data.train, data, key="data.train", by_ranges=True))
    here = files_of(resolve_sources(f"{path}/{pattern}", data, key="data.train"))
    assert [file.relative_to(local_files("memory://bucket")) for file in there] == [f.relative_to(path) for f in here]
    assert here


def test_saved_data_sets_and_tables_are_copied(tmp_path: Path, counting: type[Counting]) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "a.csv").write_text("text\n" + "\n".join(ROWS))
    for path in (tmp_path / "saved", tmp_path / "a.csv"):
        shards = shards_of(recipe_of(tmp_path, path.stem, put(f"memory://bucket/{path.name}", path)))
        assert RemoteFile not in map(type, files_of(shards.cut.sources))
        assert counting.copied
        counting.copied.clear()


def test_little_text_is_copied_unless_blocks_are_wanted(tmp_path: Path, counting: type[Counting]) -> None:
    url = put("memory://bucket/a.jsonl", jsonl(tmp_path))
    prepare_text(recipe_of(tmp_path, "small", url, order="auto"), progress=False)
    assert counting.copied == ["/bucket/a.jsonl"]


def test_much_text_is_read_by_ranges_once(
    tmp_path: Path, counting: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SHARD_BYTES", 1 << 17), ("SAMPLE_BYTES", 1)):
        monkeypatch.setattr(shards_module, name, value)
    monkeypatch.setattr("accel_train.buckets.files.READ_AHEAD_BYTES", 17 << 13)
    monkeypatch.setattr("accel_train.data.encoding._LINE_WITHIN_BYTES", 1 << 12)
    monkeypatch.setattr(f"{__name__}.ROWS", ROWS * 12)
    monkeypatch.setattr("accel_train.data.text.corpus.SHUFFLED_UP_TO_BYTES", 1000)
    for make in (jsonl, groups, long_text):
        counting.num_bytes = 0
        path = make(tmp_path)
        tokens_of(
            shards_of(recipe_of(tmp_path, make.__name__, put(f"memory://bucket/{path.name}", path), order="auto"))
        )
        size = path.stat().st_size
        print(make.__name__, counting.num_bytes / size, counting.num_requests)
        assert counting.num_bytes < 1.3 * size
        assert not counting.copied


def test_a_store_that_fails_every_third_request_gives_the_same_shards(
    tmp_path: Path, counting: type[Counting], capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path)
    whole = tokens_of(shards_of(recipe_of(tmp_path, "here", str(path))))
    monkeypatched = recipe_of(tmp_path, "there", put("memory://bucket/a.jsonl", path))
    counting.every = 3
    assert tokens_of(shards_of(monkeypatched)) == whole
    assert "a request failed (ConnectionError: connection reset), and is repeated" in capsys.readouterr().out


def test_a_file_that_changes_gives_no_shard(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    url = put("memory://bucket/a.jsonl", path)
    shards = shards_of(recipe_of(tmp_path, "run", url))
    shards.make_all([2])
    path.write_text(path.read_text().replace("wörd", "word "))
    put(url, path)
    with pytest.raises(DataError, match="changed while it was tokenized"):
        shards.make(3)
    assert not shards.path(3).exists()


def test_the_same_bucket_has_the_same_shards_on_any_machine_until_it_changes(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    url = put("memory://bucket/a.jsonl", path)
    prints = [prepare_text(recipe_of(tmp_path, name, url), progress=False).fingerprint for name in "ab"]
    put(url, path)
    prints.append(prepare_text(recipe_of(tmp_path, "c", url), progress=False).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_forked_and_started_processes_read_a_remote_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    (file,) = remote_files(put(f"file://{tmp_path}/bucket/a.jsonl", path))
    assert file.read_bytes() == path.read_bytes()
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(RemoteFile.read_bytes, (file,)) == path.read_bytes()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_on_a_bucket_is_the_run_on_local_files(tmp_path: Path, processes: int) -> None:
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=4)) for _ in range(60)]
    path = Path(write_rows(str(tmp_path / "big.jsonl"), [{"text": " ".join(generator.choices(words, k=400))}] * 200))
    url = put(f"file://{tmp_path}/bucket/big.jsonl", path)
    found = []
    for name, source in (("here", str(path)), ("there", url)):
        reads = tmp_path / f"{name}-reads"
        reads.mkdir()
        data = {"train": source, "order": "blocks", "cache_dir": str(tmp_path / f"{name}-cache")}
        own: Settings = {"data": data, "options": {"record": str(reads), "shard_bytes": 4096}}
        train_recipe(recipe_dict(tmp_path, output_dir=str(tmp_path / name), **own), processes)
        found.append((losses(tmp_path / name), samples_by_step(reads, processes, 8)))
    assert found[0] == found[1]
    assert not Path(local_files(url)).exists()


def test_plan_prepare_and_a_second_start_read_the_bucket(tmp_path: Path) -> None:
    url = put("memory://bucket/a.jsonl", jsonl(tmp_path))
    recipe = recipe_of(tmp_path, "run", url)
    assert resolve_plan(recipe).steps.max_steps == 12
    prepare(recipe, progress=False)
    train(recipe)
    assert "memory://bucket" in (tmp_path / "run" / "recipe.resolved.yaml").read_text()
    assert not Path(local_files(url)).exists()


class Client(AsyncFileSystemWrapper):
    """A store whose client does not work in a forked process, as those of S3 and others."""

    protocol = "memory"
    _strip_protocol = MemoryFileSystem._strip_protocol

    def __init__(self, **options: Any) -> None:
        super().__init__(MemoryFileSystem(), asynchronous=False, **options)


def test_a_forked_process_has_its_own_client(tmp_path: Path, counting: type[Counting]) -> None:
    path = jsonl(tmp_path)
    url = put("memory://bucket/a.jsonl", path)
    fsspec.register_implementation("memory", Client, clobber=True)
    (file,) = remote_files(url)
    assert file.read_bytes() == path.read_bytes()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(RemoteFile.read_bytes, (file,)).get(20) == path.read_bytes()
