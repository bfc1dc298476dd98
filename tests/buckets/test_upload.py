"""A run in a bucket: everything arrives there, a resume from there goes on as if nothing had happened, and a bucket
that fails delays uploads only."""

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import BucketFile, HfFileSystem
from huggingface_hub.errors import EntryNotFoundError

from accel_train import train
from accel_train.buckets.store import LOCK, Store, local_run, url_of
from accel_train.checkpoint.health import add_tags
from accel_train.checkpoint.store import check, checkpoint_folders, folder_of, steps_of
from accel_train.cli.main import main
from accel_train.observe.run_folder import RunFolder, read_metrics
from accel_train.training.upload import Upload
from tests.buckets.conftest import recipe_of
from tests.support.runs import Capture, events, losses, recipe_dict, write_yaml


def write(url: str, name: str, content: bytes) -> None:
    files, root = fsspec.url_to_fs(url)
    files.pipe_file(f"{root}/{name}", content)


def files_at(url: str) -> dict[str, bytes]:
    files, root = fsspec.url_to_fs(url)
    return {path.removeprefix(root): files.cat_file(path) for path in files.find(root)}


def test_a_run_in_a_bucket_leaves_everything_there_and_removes_what_rotation_removes(corpus: Path) -> None:
    result = train(recipe_of(corpus, "memory://bucket/run"))
    assert url_of(result.output_dir) == "memory://bucket/run"
    there = files_at("memory://bucket/run")
    here = {f"/{path.relative_to(result.output_dir)}": path for path in result.output_dir.rglob("*") if path.is_file()}
    steps = {int(name.split("/")[2][5:]) for name in there if name.startswith("/checkpoints/step")}
    # Step 2 is protected: a rollback would go there.
    assert steps == {2, 10, 12}
    assert {name: here[name].read_bytes() for name in there} == there
    assert here.keys() - there.keys() == {"/.lock", "/.lock.owner"}
    assert b"output_dir: 'memory://bucket/run'" in there["/recipe.resolved.yaml"]


def test_a_run_goes_on_from_the_bucket_alone_and_ends_as_one_that_was_not_interrupted(corpus: Path) -> None:
    whole = train(recipe_of(corpus, str(corpus / "whole")))
    url = "memory://bucket/run"
    part = train(recipe_of(corpus, url, schedule={"max_steps": 12}, checkpoint={"every_steps": 2, "keep": 3}))
    store = Store(url)
    for name in ("checkpoints/step-00000012", "checkpoints/step-00000010", "summary.json", "model"):
        store.remove(name)
    shutil.rmtree(part.output_dir)
    result = train(recipe_of(corpus, url))
    assert [event["step"] for event in events(result.output_dir, "resume")] == [8]
    assert losses(result.output_dir) == losses(whole.output_dir)
    assert steps_of(result.output_dir / "checkpoints") == [2, 10, 12]


def test_a_run_that_has_finished_in_the_bucket_is_fetched_and_not_trained_again(corpus: Path, capsys: Capture) -> None:
    url = "memory://bucket/run"
    first = train(recipe_of(corpus, url))
    shutil.rmtree(first.output_dir)
    capsys.readouterr()
    second = train(recipe_of(corpus, url))
    assert "finished at step 12" in capsys.readouterr().out
    assert second.summary.items() >= first.summary.items()
    assert len(events(second.output_dir, "start")) == 1


def test_half_a_checkpoint_in_the_bucket_is_neither_taken_nor_kept(corpus: Path) -> None:
    url = "memory://bucket/run"
    folder = train(recipe_of(corpus, url)).output_dir
    store, newest = Store(url), "checkpoints/step-00000012/manifest.json"
    for left in (None, b'{"format": 1, "ste'):
        store.remove(newest)
        if left is not None:
            write(url, newest, left)
        shutil.rmtree(folder)
        train(recipe_of(corpus, url))
        assert [event["step"] for event in events(folder, "resume")][-1] == 10
        assert check(checkpoint_folders(folder / "checkpoints")[-1]).problem is None
    write(url, "checkpoints/step-00000003/model.safetensors", b"half")
    train(recipe_of(corpus, url))
    assert "checkpoints/step-00000003/model.safetensors" not in store.names()


def test_a_lock_in_the_bucket_keeps_out_a_second_run_until_it_is_stale(corpus: Path, capsys: Capture) -> None:
    url, recipe = "memory://bucket/run", corpus / "recipe.yaml"
    write_yaml(recipe, recipe_dict(corpus, task="causal-lm", output_dir=url))
    write(url, LOCK, f"other another-machine {time.time() - 100}".encode())
    assert main(["run", str(recipe)]) == 2
    told = capsys.readouterr()
    assert "a run on another-machine uses it and renewed its lock 100 s ago" in told.err
    assert f"remove {url}/.lock" in told.err
    assert "trainable parameters" not in told.out
    write(url, LOCK, f"other another-machine {time.time() - 2000}".encode())
    assert main(["run", str(recipe)]) == 0
    assert Store(url).read(LOCK) == b""


def test_commands_take_the_name_of_a_run_in_a_bucket(corpus: Path, capsys: Capture) -> None:
    url = "memory://bucket/run"
    folder = train(recipe_of(corpus, url)).output_dir
    shutil.rmtree(folder)
    for command in ("watch --once", "report"):
        assert main([*command.split(), url]) == 0
        assert not (folder / "model").exists()
    assert (folder / "report.html").exists()
    capsys.readouterr()
    assert main(["generate", url, "--prompt", "step"]) == 0
    assert len(capsys.readouterr().out) > 100
    weights = folder / "model" / "model.safetensors"
    read = weights.stat().st_mtime_ns
    assert main(["evaluate", url]) == 0
    assert weights.stat().st_mtime_ns == read, "a model that is here is not fetched again"
    write(url, "model/model.safetensors", b"other")
    write(url, "model/.accel_train.json", b"{}")
    assert main(["generate", url]) != 0
    capsys.readouterr()
    assert main(["report", "memory://bucket/none"]) == 2
    assert "memory://bucket/none: no run is here. Give the output_dir of a run" in capsys.readouterr().err


def test_watch_follows_a_run_in_a_bucket(corpus: Path, capsys: Capture) -> None:
    url = "memory://bucket/run"
    folder = train(recipe_of(corpus, url)).output_dir
    shutil.rmtree(folder)
    ended, store = (f"{url}/{name}" for name in ("summary.json", "launches.jsonl")), fsspec.filesystem("memory")
    kept = {path: store.cat_file(path) for path in ended}
    for path in kept:
        store.rm_file(path)
    timer = threading.Timer(1.0, lambda: [store.pipe_file(path, content) for path, content in kept.items()])
    timer.start()
    assert main(["watch", url, "--every", "0.1"]) == 0
    assert "finished" in capsys.readouterr().out


class Faulty(MemoryFileSystem):
    """A store that fails every third request, is slow, or is away for a while."""

    protocol = "memory"
    num_requests = 0
    every = 3
    until: Path | None = None
    slow_seconds = 0.0
    error: Exception = ConnectionError("connection reset")
    failed = 0

    @classmethod
    def ask(cls) -> None:
        cls.num_requests += 1
        time.sleep(cls.slow_seconds)
        if (cls.every and cls.num_requests % cls.every == 0) or not (cls.until is None or cls.until.exists()):
            cls.failed += 1
            raise cls.error

    def put_file(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().put_file(*args, **options)

    def cat_file(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().cat_file(*args, **options)

    def pipe_file(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().pipe_file(*args, **options)

    def find(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().find(*args, **options)

    def get_file(self, *args: Any, **options: Any) -> Any:
        self.ask()
        return super().get_file(*args, **options)

    def rm_file(self, path: str) -> None:
        self.ask()
        super()._rm(path)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    """The store of `memory://` from now on."""
    fsspec.register_implementation("memory", Faulty, clobber=True)
    for name, value in (("num_requests", 0), ("every", 0), ("until", None), ("slow_seconds", 0.0), ("failed", 0)):
        monkeypatch.setattr(Faulty, name, value)
    yield Faulty
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


def test_a_store_that_fails_every_third_request_gets_everything_and_one_line_says_so(
    corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_train.buckets.store.FIRST_PAUSE_SECONDS", 0.001)
    whole = train(recipe_of(corpus, str(corpus / "whole")))
    faulty.every = 3
    folder = train(recipe_of(corpus, "memory://bucket/run")).output_dir
    assert faulty.failed > 10
    faulty.every = 0
    there = files_at("memory://bucket/run")
    here = {f"/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {name: here[name] for name in here.keys() - {"/.lock", "/.lock.owner"}} == there
    assert losses(folder) == losses(whole.output_dir)
    told = events(folder, "upload_slow")
    assert len(told) <= 1
    assert all("ConnectionError: connection reset" in event["message"] for event in told)


def test_training_goes_on_to_its_end_while_the_store_is_away_and_everything_is_there_once_it_is_back(
    corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, enter = Path(local_run("memory://bucket/run")), Upload.__enter__

    def then_away(upload: Upload) -> Upload:
        entered = enter(upload)
        faulty.until = folder / "report.html"
        return entered

    monkeypatch.setattr(Upload, "__enter__", then_away)
    train(recipe_of(corpus, "memory://bucket/run"))
    assert faulty.failed > 0
    assert Store("memory://bucket/run").read("checkpoints/step-00000012/manifest.json")
    for name in ("summary.json", "metrics.jsonl", "launches.jsonl", "model/model.safetensors"):
        assert Store("memory://bucket/run").read(name) == (folder / name).read_bytes()
    (told,) = events(folder, "upload_slow")
    assert told["message"] == (
        "memory://bucket/run: a request failed (ConnectionError: connection reset), and is repeated"
    )


def test_a_copy_that_differs_is_made_again(corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch) -> None:
    torn: list[str] = []

    def put_file(self: Faulty, path: str, name: str, **options: Any) -> None:
        content = Path(path).read_bytes()
        if name.endswith((".safetensors", "manifest.json")) and torn.count(name) < 2:
            torn.append(name)
            content = content[: len(content) // 2]
        self.pipe_file(name, content)

    monkeypatch.setattr(Faulty, "put_file", put_file)
    folder = train(recipe_of(corpus, "memory://bucket/run")).output_dir
    assert len(torn) > 6
    there = files_at("memory://bucket/run")
    for path in (*folder.glob("checkpoints/*/*"), *folder.glob("model/*")):
        assert there[f"/{path.relative_to(folder)}"] == path.read_bytes()


def test_a_copy_that_cannot_be_read_back_at_once_is_not_made_again(
    corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def fail_once(self: Faulty, path: str, mode: str = "rb", **options: Any) -> Any:
        opened.append(mode)
        if mode == "rb" and opened.count("rb") == 1:
            raise ConnectionError
        return MemoryFileSystem.open(self, path, mode, **options)

    monkeypatch.setattr(Faulty, "open", fail_once)
    store = Store("memory://bucket/run")
    store.put(corpus / "corpus.jsonl", "a")
    assert opened == ["wb", "rb", "rb"]
    assert store.num_failures == 1


def test_rotation_removes_a_checkpoint_only_once_a_newer_one_is_complete_in_the_bucket(
    corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[int] = []
    remove = Faulty.rm_file

    def rm_file(self: Faulty, path: str) -> None:
        step = re.search(r"step-(\d+)", path)
        if step is not None and path.endswith("manifest.json"):
            complete = [int(found[1]) for name in self.store if (found := re.search(r"step-(\d+)/manifest", name))]
            assert max(complete) > int(step[1])
            removed.append(int(step[1]))
        remove(self, path)

    monkeypatch.setattr(Faulty, "rm_file", rm_file)
    monkeypatch.setattr("accel_train.training.upload.POLL_SECONDS", 0.001)
    faulty.slow_seconds = 0.001
    train(recipe_of(corpus, "memory://bucket/run", schedule={"max_steps": 60}))
    assert removed == sorted(removed) != []
    steps = {int(found[1]) for name in files_at("memory://bucket/run") if (found := re.search(r"step-(\d+)/", name))}
    assert not steps & {*removed}


def test_a_manifest_is_copied_last_and_removed_first(
    corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: dict[tuple[str, str], list[str]] = {}
    put, rm = Faulty.put_file, Faulty.rm_file

    def put_file(self: Faulty, path: str, name: str) -> None:
        put(self, path, name)
        done.setdefault(("put", Path(name).parent.name), []).append(Path(name).name)

    def rm_file(self: Faulty, path: str) -> None:
        rm(self, path)
        done.setdefault(("rm", Path(path).parent.name), []).append(Path(path).name)

    monkeypatch.setattr(Faulty, "put_file", put_file)
    monkeypatch.setattr(Faulty, "rm_file", rm_file)
    monkeypatch.setattr("accel_train.training.upload.POLL_SECONDS", 0.001)
    train(recipe_of(corpus, "memory://bucket/run", schedule={"max_steps": 60}))
    whole = {names for names in done if names[1].startswith("step-") and "manifest.json" in done[names]}
    assert {kind for kind, _ in whole} == {"put", "rm"}
    for kind, step in whole:
        at = done[kind, step].index("manifest.json")
        assert at == (0 if kind == "rm" else len(done[kind, step]) - 1)


def test_a_rollback_from_the_bucket_has_a_checkpoint_at_any_time(
    corpus: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    put, rm = Faulty.put_file, Faulty.rm_file

    def count(files: Faulty) -> None:
        """The complete checkpoints that are known to be good."""
        there = {name.removeprefix("/bucket/run/"): file.getvalue() for name, file in files.store.items()}
        tags = json.loads(there.get("checkpoints/healthy.json") or '{"steps": {}}')["steps"]
        manifests = {step: there.get(f"checkpoints/step-{int(step):08d}/manifest.json", b"") for step in tags}
        counts.append(sum(hashlib.sha256(manifests[step]).hexdigest() == tags[step] for step in tags))

    def put_file(self: Faulty, path: str, name: str) -> None:
        # Later than what is saved meanwhile.
        time.sleep(0.01)
        put(self, path, name)
        count(self)

    def rm_file(self: Faulty, path: str) -> None:
        rm(self, path)
        count(self)

    monkeypatch.setattr(Faulty, "put_file", put_file)
    monkeypatch.setattr(Faulty, "rm_file", rm_file)
    monkeypatch.setattr("accel_train.training.upload.POLL_SECONDS", 0.001)
    train(recipe_of(corpus, "memory://bucket/run", schedule={"max_steps": 60}, guard={"healthy_after_steps": 3}))
    assert 0 not in counts[next(at for at, number in enumerate(counts) if number) :]


def test_a_known_good_checkpoint_is_replaced_by_another_one_only(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory://bucket/run")

    def change(*steps: int, removed: int | None = None) -> None:
        """Save checkpoints, of which the first one is known to be good, and rotate another away."""
        for step in steps:
            folder_of(root, step).mkdir(parents=True)
            (folder_of(root, step) / "manifest.json").write_text(f"of {step}")
        add_tags(root, steps[:1])
        if removed is not None:
            shutil.rmtree(folder_of(root, removed))

    def there() -> tuple[set[str], set[str]]:
        complete = {name.split("/")[1] for name in store.names() if name.endswith("manifest.json")}
        return complete, {
            f"step-{int(step):08d}" for step in json.loads(store.read("checkpoints/healthy.json"))["steps"]
        }

    with RunFolder(corpus / "run") as run:
        root, upload = run.path / "checkpoints", Upload(run, "memory://bucket/run")
        change(2)
        upload._copy_changes(False)
        assert there() == ({"step-00000002"}, {"step-00000002"})
        change(4, 6, removed=2)
        upload._copy_changes(False)
        complete, good = there()
        assert complete == {"step-00000004"}, "a known-good one comes before the newest"
        assert complete & good

        put = Upload._put_checkpoint

        def put_slowly(upload: Upload, folder: Path, manifest: bytes) -> None:
            put(upload, folder, manifest)
            change(8, removed=4)
            # The tag of a checkpoint that is gone.
            add_tags(root, [8])

        monkeypatch.setattr(Upload, "_put_checkpoint", put_slowly)
        upload._copy_changes(False)
        monkeypatch.setattr(Upload, "_put_checkpoint", put)
        assert there() == ({"step-00000004", "step-00000006"}, {"step-00000002", "step-00000004"} & good)
        upload._copy_changes(False)
        assert there() == ({"step-00000006", "step-00000008"}, {"step-00000008"})


@pytest.mark.slow
def test_a_slow_store_gets_everything_while_training_goes_on(corpus: Path, faulty: type[Faulty]) -> None:
    faulty.slow_seconds = 0.5
    folder = train(recipe_of(corpus, "memory://bucket/run")).output_dir
    faulty.slow_seconds = 0
    assert Store("memory://bucket/run").read("summary.json") == (folder / "summary.json").read_bytes()
    assert (
        max(line["train_seconds"] for line in read_metrics(folder) if line["split"] == "train")
        < 0.5 * faulty.num_requests
    )


@pytest.mark.parametrize("error", [PermissionError("Access Denied"), ValueError("no credentials: planted-password")])
def test_wrong_credentials_end_a_run_before_its_model_is_built(
    corpus: Path, faulty: type[Faulty], capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from accel_train.core import redaction

    monkeypatch.setattr(redaction, "_known", set())
    monkeypatch.setattr(redaction, "_known_in_text", None)
    redaction.remember_secrets({"AWS_SECRET_ACCESS_KEY": "planted-password"})
    monkeypatch.setattr("accel_train.buckets.store.START_SECONDS", 0.5)
    recipe = write_yaml(corpus / "recipe.yaml", recipe_dict(corpus, task="causal-lm", output_dir="memory://bucket/run"))
    faulty.every, faulty.error = 1, error
    assert main(["run", str(recipe)]) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: memory://bucket/run: a request failed (")
    assert "trainable parameters" not in told.out
    assert "planted-password" not in told.out + told.err
    kept = [path for path in corpus.rglob("*") if path.is_file() and b"planted-password" in path.read_bytes()]
    assert kept == []


def test_a_missing_package_is_one_line_that_names_the_extra(corpus: Path, capsys: Capture) -> None:
    recipe = write_yaml(corpus / "recipe.yaml", recipe_dict(corpus, task="causal-lm", output_dir="gs://bucket/run"))
    pytest.importorskip("fsspec")
    assert main(["run", str(recipe)]) == 2
    assert "gs://bucket/run: needs the package gcsfs. Install it: pip install 'accel-train[buckets]'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["s3://me:password@bucket/run", "s3://", "memory://a/../b", "https://a/b", "runs/x"])
def test_other_names_stand_for_themselves(name: str) -> None:
    assert local_run(name) == name
    assert url_of(Path(name)) is None


@pytest.mark.parametrize("url", ["s3://bucket/a/b", "file:///tmp/a%b", "hf://buckets/me/run", "memory://a"])
def test_a_local_folder_stands_for_a_url(corpus: Path, url: str) -> None:
    assert url_of(Path(local_run(url))) == url
    assert local_run(local_run(url)) == local_run(url)
    assert url_of(Path(local_run(url)) / "lr=1e-4") == f"{url}/lr=1e-4"
    assert url_of(Path(local_run(url)).with_name(".rehearsal")) is None


def test_names_of_the_hub_are_those_that_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """`HfFileSystem` keeps its listings."""
    there = ["run/a"]

    def tree(files: HfFileSystem, bucket_id: str, prefix: str, recursive: bool) -> list[BucketFile]:
        found = [BucketFile(type="file", path=name, size=1, xetHash="") for name in there if name.startswith(prefix)]
        if not found:
            raise EntryNotFoundError(prefix)
        return found

    monkeypatch.setattr(HfFileSystem, "_bucket_exists", lambda files, bucket_id: (True, None))
    monkeypatch.setattr(HfFileSystem, "_list_bucket_tree_with_folders", tree)
    store = Store("hf://buckets/me/own/run")
    assert store.names() == ["a"]
    assert store.names("checkpoints") == []
    there.append("run/checkpoints/step-00000002/manifest.json")
    assert store.names() == ["a", "checkpoints/step-00000002/manifest.json"]
    assert store.names("checkpoints") == ["checkpoints/step-00000002/manifest.json"]
