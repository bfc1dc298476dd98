"""One graph serves all blocks and any length, nothing is compiled twice, and compiled code is kept where no other user
can write.
"""

import errno
import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch._inductor import codecache

from accel_train import train
from accel_train.core.errors import OutOfMemory, SettingError
from accel_train.data.batch_sizes import resolve_batch
from accel_train.model import compile as compiling
from accel_train.model.compile import GraphCount, choose_cache, compile_module, machine_kind
from accel_train.recipe.schema import Batch, Precision
from accel_train.runtime.exit import exit_code, message_of
from benchmarks.model_path import FAMILIES, SIZES, build, step_of
from tests.support.processes import run_forked
from tests.support.runs import (
    TINY_MODEL,
    Settings,
    events,
    losses,
    settings_refused,
    summary_of,
    tiny_recipe,
    write_corpus,
    write_jsonl,
    write_recipe_file,
)
from tests.support.wording import assert_golden, raises_golden


@pytest.fixture
def traced_only() -> Iterator[None]:
    """Graphs are made and counted as ever, and computed as they are: nothing waits for a C++ compiler."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.compiler.set_default_backend("eager")
    yield
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(compiling.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "torchinductor_me" / "precompiled_headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", codecache._HEADER_LOCK_DIR)
    return tmp_path / "cache" / "compiled" / machine_kind()


def compiled_run(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    """Train for a few steps; returns the events of the compiler."""
    write_corpus(folder)
    sections = {"precision": {"compile": True}, "schedule": {"max_steps": 6}, **sections}
    train(tiny_recipe(folder, **sections))
    return events(folder / "run", "compiled") + events(folder / "run", "recompiled")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths_vary", [False, True], ids=["one length", "varying lengths"])
def test_all_blocks_share_one_graph_and_nothing_is_compiled_again(
    traced_only: None, own_cache: Path, family: str, lengths_vary: bool
) -> None:
    sizes = {**SIZES, "layers": 3, "heads": 2, "width": 16, "block": 32, "batch": 2}
    model, graphs = build(family, sizes, stock=False, compiled=False), GraphCount()
    compile_module(model, Precision(compile=True), graphs, lengths_vary=lengths_vary)
    for length in (24, 17, 32, 9) if lengths_vary else (24, 24, 24):
        step_of(model, torch.randint(65, (2, length + 1)))()
        assert graphs.num_graphs == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


class Scaled(torch.nn.Module):
    """Its floats are attributes, as eps, dropout and the attention's scale are."""

    scale = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.scale


@pytest.mark.parametrize("lengths_vary", [False, True], ids=["one length", "varying lengths"])
def test_the_choice_says_whether_a_model_is_compiled_for_any_length(
    traced_only: None, own_cache: Path, lengths_vary: bool
) -> None:
    sizes = {**SIZES, "layers": 3, "heads": 2, "width": 16, "block": 32, "batch": 2}
    model = build("gpt2", sizes, stock=False, compiled=False)
    assert_golden(compile_module(model, Precision(compile=True), lengths_vary=lengths_vary)["precision.compile"].reason)


def test_a_model_for_any_length_is_traced_once(traced_only: None, own_cache: Path) -> None:
    torch.compiler.set_default_backend("aot_eager")
    model = Scaled()
    compile_module(model, Precision(compile="model"), lengths_vary=True)
    for length in (4, 7, 9):
        model(torch.randn(length, 8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == 1


def test_a_run_says_what_compiling_cost_and_leaves_evaluations_out(
    traced_only: None, own_cache: Path, tmp_path: Path
) -> None:
    [compiled] = compiled_run(tmp_path, evaluate={"every_steps": 4})
    assert (compiled["step"], compiled["num_graphs"]) == (1, 1)
    assert compiled["first_step_seconds"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1, "an evaluation has graphs of its own"


def test_fine_tuning_on_rows_of_varying_lengths_compiles_once(
    traced_only: None, own_cache: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "ab " * (1 + i % 5), "completion": "cd " * (1 + i * i % 7)} for i in range(80)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = {"train": str(path), "format": "prompt_completion", "pad_to_multiple_of": 4}
    apart = {"config": TINY_MODEL, "attn_implementation": "eager"}  # which does not keep apart rows of one window
    [compiled] = compiled_run(tmp_path, task="causal-lm", data=data, model=apart)
    assert compiled["num_graphs"] == 1


def test_a_step_that_compiles_again_is_an_event(traced_only: None, own_cache: Path, tmp_path: Path) -> None:
    sections: Settings = {"data": {"last_batch": "short"}, "schedule": {"max_steps": None, "num_epochs": 1}}
    compiled, recompiled = compiled_run(tmp_path, **sections)
    assert (compiled["num_graphs"], recompiled["num_graphs"]) == (1, 1)
    assert_golden(recompiled["message"])


def test_nothing_is_chosen_or_told_where_nothing_is_compiled(own_cache: Path, tmp_path: Path) -> None:
    assert compiled_run(tmp_path, precision={"compile": False}) == []
    assert "compile_cache" not in summary_of(tmp_path / "run")["choices"]
    assert not own_cache.exists()


def test_compiled_code_is_kept_in_a_folder_that_its_user_alone_can_enter(own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True, mode=0o755)
    for _ in range(2):  # the second time torch's variable is set, by the first
        choice = choose_cache()
        assert choice.value == str(own_cache) == os.environ[compiling.CACHE_VARIABLE]
        assert_golden(choice.reason)
    assert {folder.stat().st_mode & 0o777 for folder in (own_cache, own_cache.parent)} == {0o700}


def test_the_folder_that_torch_sets_by_itself_counts_as_not_set(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiling.CACHE_VARIABLE, "/tmp/torchinductor_somebody")
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: "/tmp")
    assert choose_cache().value == str(own_cache)


def test_the_users_own_folder_for_compiled_code_is_taken(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "mine"))
    choice = choose_cache()
    assert choice.value == os.environ[compiling.CACHE_VARIABLE] == str(tmp_path / "mine")
    assert_golden(choice.reason)
    assert not own_cache.exists()


@pytest.mark.parametrize("trouble", ["another's", "open to others", "a link", "a file"])
def test_compiled_code_that_others_could_have_written_is_not_executed(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble in ("a link", "a file"):
        own_cache.parent.mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir()
        own_cache.symlink_to(tmp_path / "elsewhere") if trouble == "a link" else own_cache.write_text("")
    else:
        own_cache.mkdir(parents=True)
    if trouble == "open to others":
        own_cache.chmod(0o770)
    if trouble == "another's":
        monkeypatch.setattr(os, "getuid", lambda: own_cache.stat().st_uid + 1)
    choice = choose_cache()
    used = Path(choice.value)
    assert used != own_cache
    assert (used.stat().st_mode & 0o777, os.environ[compiling.CACHE_VARIABLE]) == (0o700, str(used))
    told = choice.reason.replace(str(own_cache), "CACHE").replace(f"user {own_cache.stat().st_uid}", "user UID")
    assert_golden(told.replace(f"[Errno {errno.EEXIST}] {os.strerror(errno.EEXIST)}", "REASON"))
    used.rmdir()


def test_a_folder_that_torch_cannot_name_to_a_compiler_is_not_used(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "my cache"))
    choice = choose_cache()
    assert not any(map(str.isspace, choice.value))
    assert "my cache" in choice.reason
    Path(choice.value).rmdir()


KEY = "cab4"
SECTIONS_BEGIN, SECTION_SIZE, NUM_SECTIONS = 1000, 64, 2
_FIELDS = (b"\x7fELF", 2, 1, 1, 3, 62, 1, 0, 64, SECTIONS_BEGIN, 0, 64, 56, 1, SECTION_SIZE, NUM_SECTIONS, 1)
WHOLE = struct.pack("<4sBBB9xHHIQQQIHHHHHH", *_FIELDS).ljust(SECTIONS_BEGIN + NUM_SECTIONS * SECTION_SIZE, b"\1")
"""A shared library as linkers leave it: the table of its sections is its end."""


def write_kernel(cache: Path, content: bytes, *, marked: bool = False) -> Path:
    """Leave what torch keeps of one kernel, and the mark of a compiler that has not finished."""
    folder = cache / KEY[1:3]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{KEY}.main.cpp").touch()
    if marked:
        (folder / f"{KEY}.main_CxxBuild").mkdir()
    library = folder / f"{KEY}.main.so"
    library.write_bytes(content)
    return library


@pytest.mark.parametrize(
    ("content", "marked", "is_kept"),
    [
        pytest.param(WHOLE, False, True, id="whole"),
        pytest.param(b"", False, False, id="empty"),
        pytest.param(WHOLE[:40], False, False, id="cut in its header"),
        pytest.param(WHOLE[:-1], False, False, id="cut by a byte"),
        pytest.param(bytes(len(WHOLE)), False, False, id="zeros, of a machine that lost power"),
        pytest.param(WHOLE, True, False, id="whole, and its compiler was killed"),
    ],
)
def test_libraries_that_no_linker_has_finished_are_removed_and_said(
    own_cache: Path, content: bytes, marked: bool, is_kept: bool
) -> None:
    library = write_kernel(own_cache, content, marked=marked)
    own_cache.chmod(0o700)
    own_cache.parent.chmod(0o700)
    assert ("1 file " in choose_cache().reason) == (not is_kept)
    assert library.exists() == is_kept
    assert sorted(path.name for path in library.parent.iterdir() if path != library) == [f"{KEY}.main.cpp"]
    assert "removed" not in choose_cache().reason


def test_a_library_that_another_process_compiles_now_is_left_alone(own_cache: Path) -> None:
    library = write_kernel(own_cache, b"", marked=True)
    (own_cache / "locks").mkdir()
    with FileLock(own_cache / "locks" / f"{KEY}.lock"):
        assert compiling.drop_unfinished(own_cache, "??/*") == 0
        assert library.exists()
    assert compiling.drop_unfinished(own_cache, "??/*") == 1
    assert not library.exists()


def test_a_folder_of_the_users_own_is_looked_through_and_may_be_closed_to_writing(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = write_kernel(tmp_path / "mine", b"")
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "mine"))
    (tmp_path / "mine" / "locks").touch()  # so that no lock can be taken, by root either
    assert "removed" not in choose_cache().reason
    assert library.exists()
    (tmp_path / "mine" / "locks").unlink()
    assert "1 file " in choose_cache().reason
    assert not library.exists()


def test_code_that_cannot_be_loaded_later_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = write_kernel(tmp_path, b"")

    def load() -> BaseException:
        spec = importlib.util.spec_from_file_location("kernel", library)
        assert spec is not None
        with pytest.raises(ImportError) as caught:
            importlib.util.module_from_spec(spec)
        return caught.value

    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path))
    assert exit_code(load()) == 1
    assert f"Remove {library}" in message_of(load())
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "other"))
    assert exit_code(load()) is None


def test_headers_that_no_compiler_has_finished_are_removed(own_cache: Path) -> None:
    headers = Path(codecache._HEADER_DIR)
    (headers / f"{KEY}.h_CxxBuild").mkdir(parents=True)
    for name in (f"{KEY}.h", f"{KEY}.h.gch", "cde.h.gch"):
        (headers / name).touch()
    assert "1 file " in choose_cache().reason
    assert {path.name for path in headers.iterdir()} == {f"{KEY}.h", "cde.h.gch", "locks"}


def test_headers_in_a_folder_that_others_may_write_to_are_not_used(own_cache: Path) -> None:
    guessed = Path(codecache._HEADER_DIR).parent
    guessed.mkdir()
    guessed.chmod(0o777)
    choose_cache()
    own = own_cache / "precompiled_headers"
    assert str(own) == codecache._HEADER_DIR
    assert str(own / "locks") == codecache._HEADER_LOCK_DIR


@pytest.mark.slow
def test_a_second_start_loads_what_two_processes_have_compiled_at_once(corpus: Path) -> None:
    compiled = []
    for name in ("cold", "warm"):
        sections = {"precision": {"compile": True}, "schedule": {"max_steps": 3}, "output_dir": str(corpus / name)}
        sections["data"] = {"eval_fraction": 0}  # an evaluation compiles graphs of its own
        recipe = write_recipe_file(corpus, **sections)
        cache = {"ACCEL_TRAIN_CACHE": str(corpus / "cache")}
        forked = run_forked(["run", str(recipe)], 2, folder=corpus / f"{name} processes", **cache)
        forked.expect(0, 300)
        compiled += events(corpus / name, "compiled")
    assert [event["warm"] for event in compiled] == [False, True]
    assert [event["num_graphs"] for event in compiled] == [1, 1]
    assert compiled[1]["first_step_seconds"] < 0.5 * compiled[0]["first_step_seconds"]  # other tests run beside it


def test_a_compiler_that_is_not_there_is_refused() -> None:
    refused = settings_refused(lambda: Precision(compile=True, compile_backend="indukctor"))
    assert refused == ("precision.compile_backend",)


def test_the_backend_and_the_mode_reach_torch(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **by: asked.append(by))
    for given in ({"compile_backend": "eager"}, {"compile_mode": "max-autotune"}, {}):
        compile_module(torch.nn.Linear(2, 2), Precision(compile=True, **given))
    assert asked[0]["backend"] == "eager"
    assert asked[1]["mode"] == "max-autotune"
    assert "backend" not in asked[2]
    assert "mode" not in asked[2]


GRAPHS: Settings = {"compile": "model", "compile_mode": "reduce-overhead"}


@pytest.mark.parametrize(
    ("precision", "batch", "is_refused"),
    [
        (GRAPHS, {"gradient_accumulation_steps": 2}, True),
        ({"compile": True, "compile_mode": "max-autotune"}, {"per_device_batch_size": 4}, True),
        (GRAPHS, {"gradient_accumulation_steps": 1}, False),
        ({"compile": True, "compile_mode": "max-autotune-no-cudagraphs"}, {"per_device_batch_size": 4}, False),
        ({"compile": False, "compile_mode": "max-autotune"}, {"per_device_batch_size": 4}, False),
    ],
)
def test_cuda_graphs_with_accumulation_are_refused_before_a_model_is_built(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Settings,
    batch: Settings,
    is_refused: bool,
) -> None:
    built: list[bool] = []
    monkeypatch.setattr("accel_train.training.setup.build_run", lambda *_: built.append(True))
    recipe = tiny_recipe(corpus, precision=precision, batch=batch)
    with pytest.raises(SettingError if is_refused else AttributeError) as caught:
        train(recipe)
    assert built == [] if is_refused else [True]
    if isinstance(caught.value, SettingError):
        assert caught.value.settings == ("precision.compile_mode", "batch.gradient_accumulation_steps")
        assert "max-autotune-no-cudagraphs" in caught.value.remedy


def test_cuda_graphs_are_refused_if_a_search_finds_that_the_run_accumulates(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve_batch(Batch(global_batch_size=8, per_device_batch_size=4), 1)
    monkeypatch.setattr("accel_train.training.build.fit_micro_batch", lambda *_, is_empty: (found, {}, None))
    with pytest.raises(SettingError) as caught:
        train(tiny_recipe(corpus, precision=GRAPHS))
    assert caught.value.settings == ("precision.compile_mode", "batch.gradient_accumulation_steps")
    assert " 2 micro-batches " in caught.value.problem


def test_cuda_graphs_get_a_mark_at_each_step_and_no_smaller_micro_batch_after_out_of_memory(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[bool] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(True))
    monkeypatch.setattr("accel_train.training.build.compile_module", lambda *_, **__: {})
    options = {"no_room": {"rank": 0, "rows": 4, "where": "forward", "from_step": 3}}
    with raises_golden(OutOfMemory):
        train(tiny_recipe(corpus, precision=GRAPHS, options=options))
    assert len(marks) == 3
    assert list(losses(corpus / "run")) == [1, 2]


def test_a_sample_text_of_a_compiled_run_makes_no_graphs(traced_only: None, own_cache: Path, tmp_path: Path) -> None:
    compiled_run(tmp_path, evaluate={"at_start": False}, task="causal-lm", options={})
    plain = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    sampled = {"at_start": False, "sample_prompt": "step", "sample_tokens": 5}
    compiled_run(tmp_path, evaluate=sampled, task="causal-lm", options={}, output_dir=str(tmp_path / "other"))
    assert summary_of(tmp_path / "other")["sample"]["prompt"] == "step"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == plain
