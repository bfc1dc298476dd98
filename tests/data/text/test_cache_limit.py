"""`data.cache_limit`: shards are removed, and nobody who reads them notices."""

import errno
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train import train
from accel_train.core.errors import DataError, SettingError
from accel_train.data.cache import evict
from accel_train.data.text import shards as shards_module
from accel_train.data.text.corpus import prepare_text
from accel_train.data.text.shards import ShardedWindows, Shards
from accel_train.engine import block_order as block_order_module
from accel_train.engine.block_order import block_orders
from accel_train.engine.resolve import check_recipe
from accel_train.recipe.data import WindowData
from accel_train.recipe.schema import Recipe
from tests.support.readers import read_while_removed
from tests.support.runs import Settings, losses, recipe_dict, write_rows

MakeRecipe = Callable[..., Recipe]
ROWS = [{"text": f"{number}: " + "wörd " * (number * 37 % 90)} for number in range(900)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 4096)
    monkeypatch.setattr(shards_module, "EVICTED_EVERY", 4)


def windows_of(text_recipe: MakeRecipe, **data: Any) -> ShardedWindows:
    recipe = text_recipe(write_rows("a.jsonl", ROWS), order="blocks", sequence_length=16, **data)
    windows: Any = prepare_text(recipe, progress=False).train
    return windows


def files_in(root: Path, suffix: str) -> list[Path]:
    return sorted(root.rglob(f"shards/*/*.{suffix}"))


def samples_of(windows: ShardedWindows, number: int) -> list[list[int]]:
    (count,) = windows.counts(np.array([number])).tolist()
    rows: list[list[int]] = windows.__getitems__([(number << 32) + index for index in range(count)]).tolist()
    return rows


def test_sizes_are_written_as_text() -> None:
    assert WindowData(train="a", cache_limit="1.5GiB").limit_bytes == 3 << 29
    assert WindowData(train="a", cache_limit="2kB").limit_bytes == 2000
    assert WindowData(train="a").limit_bytes is None


def test_no_more_than_the_limit_stays_and_the_rest_is_counted_and_made_again(
    text_recipe: MakeRecipe, tmp_path: Path
) -> None:
    whole = windows_of(text_recipe, cache_dir=str(tmp_path / "whole"))
    numbers = np.arange(len(whole.shards.cut))
    counts = whole.counts(numbers).tolist()
    content = [path.read_bytes() for path in files_in(tmp_path / "whole", "bin")]
    windows = windows_of(text_recipe, cache_limit="100kB")
    shards = windows.shards
    shards.make_all(numbers.tolist())
    kept = files_in(tmp_path / "cache", "bin")
    sizes = [len(each) for each in content]
    assert sum(sizes) > 300_000
    assert 60_000 < sum(path.stat().st_size for path in kept) <= 100_000 + 4 * max(sizes)
    assert kept[-1] == shards.path(int(numbers[-1])), "the first ones are removed"
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "_make", lambda self, number, path: made.append(number))
        assert windows.counts(numbers).tolist() == counts
    assert made == []
    assert samples_of(windows, 0) == samples_of(whole, 0)
    assert shards.path(0).read_bytes() == content[0]
    assert not windows.count(progress=False), "nothing was never made"


def test_a_shard_that_was_read_last_stays(text_recipe: MakeRecipe, tmp_path: Path) -> None:
    windows = windows_of(text_recipe, cache_limit="1GB")
    windows.shards.make_all(range(6))
    for number in range(6):
        os.utime(windows.shards.path(number), (number + 1, number + 1))
    windows.shards.stream(0)
    evict(tmp_path / "cache", 2 * windows.shards.path(0).stat().st_size)
    assert windows.shards.path(0).exists()
    assert not windows.shards.path(1).exists()


def test_two_processes_read_while_a_third_one_removes(text_recipe: MakeRecipe, tmp_path: Path) -> None:
    whole = windows_of(text_recipe, cache_dir=str(tmp_path / "whole"))
    wanted = [samples_of(whole, number) for number in range(20)]
    root, context = tmp_path / "cache", multiprocessing.get_context("fork")
    windows = windows_of(text_recipe, cache_limit="1GB")
    made, removed = context.Value("q", 0), context.Value("q", 0)
    make = Shards._make

    def counted(shards: Shards, number: int, path: Path) -> None:
        with made.get_lock():
            made.value += 1
        make(shards, number, path)

    def read(seed: int) -> None:
        Shards._make = counted  # type: ignore[method-assign, assignment]
        generator = random.Random(seed)
        for _ in range(150):
            number = generator.randrange(20)
            windows._opened.clear()
            assert samples_of(windows, number) == wanted[number], number

    def remove() -> None:
        while True:
            removed.value += len(files_in(root, "bin"))
            evict(root, 0)
            time.sleep(0.002)

    readers = [context.Process(target=read, args=(seed,)) for seed in range(2)]
    remover = context.Process(target=remove)
    read_while_removed(readers, remover)
    assert made.value > 40, "few shards were made again"
    assert removed.value > 20


def test_a_full_disk_is_one_line(text_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = windows_of(text_recipe).shards

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError) as raised:
        shards.make(0)
    assert str(raised.value) == (
        f"tokens cannot be written to {shards.path(0)} (No space left on device). Name another data.cache_dir"
    )


def test_a_limit_below_what_is_read_next_is_refused(text_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_order_module, "SHARDS_AHEAD", 8)
    recipe = text_recipe("a.jsonl", cache_limit="1kiB")
    windows = windows_of(text_recipe, cache_limit="1kiB")
    with pytest.raises(SettingError) as raised:
        block_orders(recipe, windows, 8)
    assert raised.value.settings == ("data.cache_limit",)
    block_orders(recipe, windows_of(text_recipe, cache_limit="1MiB"), 8)


def test_a_resume_after_all_shards_are_gone_makes_those_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 1024)
    source = write_rows(str(tmp_path / "a.jsonl"), ROWS)
    data = {"train": source, "order": "blocks", "eval_fraction": 0.01, "cache_limit": "1GiB"}
    sections: Settings = {"schedule": {"max_steps": 40}, "checkpoint": {"every_steps": 20, "keep": 3}, "data": data}
    recipe = recipe_dict(tmp_path, batch={"global_batch_size": 64}, **sections)
    whole = losses(train(recipe).output_dir)
    for name in ("checkpoints/step-00000040", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / "summary.json").unlink()
    before = len(files_in(tmp_path / "cache", "bin"))
    evict(tmp_path / "cache", 0)
    assert len(files_in(tmp_path / "cache", "bin")) == 1, "the newest stays"
    assert len(files_in(tmp_path / "cache", "size")) == before - 1
    assert losses(train(recipe).output_dir) == whole
    again, gone = ({int(path.stem) for path in files_in(tmp_path / "cache", suffix)} for suffix in ("bin", "size"))
    checked = check_recipe(Recipe.model_validate(recipe))[0]
    windows: Any = prepare_text(checked, progress=False).train
    first = block_orders(checked, windows, 64)[0].shards_from(0, 8, 0).tolist()
    assert {*first} <= gone - again, "the first block is counted, not made"
    assert len(gone & again) > 8


def test_shards_that_are_made_to_be_counted_are_shown(
    text_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = windows_of(text_recipe)
    windows.counts(np.arange(4))
    assert "tokenizing" not in capsys.readouterr().err
    monkeypatch.setattr(shards_module, "_SHOWN_AFTER_SECONDS", 1e-9)
    make = Shards.make

    def slow(shards: Shards, number: int) -> bool:
        time.sleep(0.05)
        return make(shards, number)

    monkeypatch.setattr(Shards, "make", slow)
    windows.counts(np.arange(12))
    assert "tokenizing" in (told := capsys.readouterr().err)
    assert "/8" in told
