"""Broken lines of jsonl within `data.max_broken`: left out of text and rows, named by their byte, counted once."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from accel_train import train
from accel_train.core.errors import SettingError
from accel_train.experiments.look.look import look_at
from accel_train.recipe.loader import Recipe
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import Settings, event_steps, events, metrics, run, summary_of, write_yaml
from tests.training.test_blocks import blocks as text_in_blocks
from tests.training.test_blocks import short_blocks
from tests.training.test_blocks_of_rows import blocks as prompts_in_blocks
from tests.training.test_blocks_of_rows import recorded

SHARD = {"options": {"shard_bytes": 1024}}


def of_text(folder: Path, name: str, **data: Any) -> Settings:
    return text_in_blocks(folder, 50_000, output_dir=str(folder / name), data=data, **SHARD)


def of_prompts(folder: Path, name: str, **data: Any) -> Settings:
    return prompts_in_blocks(folder, 250, output_dir=str(folder / name), data=data, **SHARD)


def of_labels(folder: Path, name: str, **data: Any) -> Settings:
    return recorded(folder, "RecordedTexts", name, output_dir=str(folder / name), data=data)[0]


def of_pairs(folder: Path, name: str, **data: Any) -> Settings:
    return recorded(folder, "RecordedPairs", name, output_dir=str(folder / name), data=data)[0]


def of_rewrites(folder: Path, name: str, **data: Any) -> Settings:
    return recorded(folder, "RecordedRewrites", name, output_dir=str(folder / name), data=data)[0]


MADE: dict[str, Any] = {
    "text": of_text,
    "prompts": of_prompts,
    "labels": of_labels,
    "pairs": of_pairs,
    "rewrites": of_rewrites,
}


def broken_recipes(folder: Path, kind: str, **data: Any) -> tuple[Settings, Settings, dict[int, int]]:
    """A recipe whose first, last, and other lines are broken, one where blanks replace them, and the places of these
    lines: their first bytes, by number.
    """
    made, encoding = MADE[kind], data.get("encoding", "utf-8")
    path = Path(made(folder, "first")["data"]["train"])
    lines = [line.encode(encoding) for line in path.read_text().splitlines(keepends=True)]
    count = len(lines)
    numbers = [0, count // 3, count // 3 + 1, 2 * count // 3, count - 1]
    starts = [sum(map(len, lines[:number])) for number in numbers]
    blank, newline = " ".encode(encoding), "\n".encode(encoding)
    blanks = [len(lines[number].removesuffix(newline)) // len(blank) * blank + newline for number in numbers]
    ways = [
        '{"text": "cut'.encode(encoding),
        b"\xff\xd8" * 5,
        '{"other": "no text"}'.encode(encoding),
        '{"text": 3, "prompt": 3, "label": "a"}'.encode(encoding),
        '["a list"]'.encode(encoding),
    ]
    names = {}
    for name, parts in (("broken", ways), ("blank", blanks)):
        for number, part, whole in zip(numbers, parts, blanks):
            lines[number] = part + whole[len(part) :]
        names[name] = folder / f"{name}.jsonl"
        names[name].write_bytes(b"".join(lines))
    section, reference = (
        made(folder, name, train=str(file), cache_dir=str(folder / f"cache of {name}"), **data)
        for name, file in names.items()
    )
    section["data"]["max_broken"] = len(numbers)
    return section, reference, dict(zip(numbers, starts))


def place_in(message: str) -> int:
    """The first byte of the part of the file that a message names."""
    found = re.search(r"broken\.jsonl from byte ([\d,]+)", message)
    return int(found[1].replace(",", "")) if found else 0


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_run_is_that_on_the_other_lines_to_the_bit_and_names_each_broken_line_once(
    tmp_path: Path, kind: str, processes: int
) -> None:
    section, reference, places = broken_recipes(tmp_path, kind)
    for each in (section, reference):
        run(write_yaml(tmp_path / "run.yaml", each), processes=processes)
    lines, others = (metrics(Path(each["output_dir"])) for each in (section, reference))
    assert [line["step_loss"] for line in lines] == [line["step_loss"] for line in others]
    assert len({summary_of(Path(each["output_dir"]))["eval"]["loss"] for each in (section, reference)}) == 1
    named = events(Path(section["output_dir"]), "broken_sample")
    # A run need not read all lines, but each block has some of them.
    met = [place_in(each["message"]) for each in named]
    assert len(met) == len({*met}) >= 2
    assert {*met} <= {*places.values()}
    assert [f"broken sample {number}, and data.max_broken is {len(places)}" for number in range(1, len(met) + 1)] == [
        each["message"][-len(f"broken sample 1, and data.max_broken is {len(places)}") - 1 : -1] for each in named
    ]


def test_an_epoch_meets_all_of_them_also_in_utf_16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    section, reference, places = broken_recipes(tmp_path, "prompts", encoding="utf-16-le")
    for each in (section, reference):
        train({**each, "schedule": {"max_steps": None, "num_epochs": 2}})
    lines, others = (metrics(Path(each["output_dir"])) for each in (section, reference))
    assert [line["step_loss"] for line in lines] == [line["step_loss"] for line in others]
    named = events(Path(section["output_dir"]), "broken_sample")
    assert sorted(place_in(each["message"]) for each in named) == [*places.values()], "the second epoch counts no more"


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.parametrize("kind", ["text", "labels"])
def test_one_more_than_max_broken_stops_the_run_with_the_count(tmp_path: Path, kind: str, processes: int) -> None:
    section, _, places = broken_recipes(tmp_path, kind)
    section["data"]["max_broken"] = len(places) - 1
    section["schedule"] = {"max_steps": 10_000}
    done = run(write_yaml(tmp_path / "run.yaml", section), processes=processes, expect=2)
    last = f"broken sample {len(places)}, and data.max_broken is {len(places) - 1}"
    (named,) = [line for line in done.stderr.splitlines() if last in line]
    assert place_in(named) in places.values()


def test_a_file_of_broken_lines_stops_after_the_first_few(tmp_path: Path) -> None:
    section, _, _ = broken_recipes(tmp_path, "prompts", completion_column="answer")
    done = run(write_yaml(tmp_path / "run.yaml", section), expect=2)
    assert "no column 'answer'" in done.stderr
    assert "broken sample 6, and data.max_broken is 5" in done.stderr


def test_without_the_setting_the_first_broken_line_stops_the_run(tmp_path: Path) -> None:
    section, _, places = broken_recipes(tmp_path, "prompts")
    del section["data"]["max_broken"]
    done = run(write_yaml(tmp_path / "run.yaml", section), expect=2)
    assert min(places) == 0
    assert "broken.jsonl:1: not JSON" in done.stderr


def test_a_broken_line_of_the_evaluation_data_stops_the_run(tmp_path: Path) -> None:
    section, reference, _ = broken_recipes(tmp_path, "labels")
    section["data"] |= {"train": reference["data"]["train"], "eval": section["data"]["train"]}
    done = run(write_yaml(tmp_path / "run.yaml", section), expect=2)
    assert "broken.jsonl:1: not JSON" in done.stderr


@pytest.mark.parametrize(
    ("kind", "data"),
    [("prompts", {"order": "shuffled"}), ("text", {"last_batch": "short"}), ("labels", {"group_by_length": True})],
)
def test_what_needs_all_rows_before_training_is_refused_by_name(tmp_path: Path, kind: str, data: Settings) -> None:
    section, _, _ = broken_recipes(tmp_path, kind, **data)
    with pytest.raises(SettingError, match=f"data.{next(iter(data))}") as caught:
        train(section)
    assert caught.value.settings == ("data.max_broken",)


@pytest.mark.parametrize("other", ["rows.csv", "saved", "array.json"])
def test_other_data_than_lines_of_jsonl_is_refused_by_name(tmp_path: Path, other: str) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 9
    (tmp_path / "rows.csv").write_text("prompt,completion\n" + "a,b\n" * 9)
    (tmp_path / "array.json").write_text(json.dumps(rows))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    section, _, _ = broken_recipes(tmp_path, "prompts")
    section["data"]["train"] = [section["data"]["train"], str(tmp_path / other)]
    with pytest.raises(SettingError, match="lines of jsonl") as caught:
        train(section)
    assert caught.value.settings == ("data.max_broken",)


def test_the_order_is_chosen_for_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    section, _, places = broken_recipes(tmp_path, "prompts", order="auto")
    look = look_at(Recipe.model_validate({**section, "task": "causal-lm", "options": {}}))
    assert look.data.settings["data.order"] == "blocks"
    (found,) = [each for each in look.findings if each.kind == "broken"]
    assert 0 < found.count <= found.total == len(places)


@pytest.mark.faults
def test_killed_and_gone_on_with_2_1_4_processes_a_run_with_broken_lines_is_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    section, reference, _ = broken_recipes(tmp_path, "labels")
    run(write_yaml(tmp_path / "run.yaml", reference))
    for processes, last_read in ((2, 9), (1, 12), (4, 0)):
        reads = tmp_path / f"reads on {processes}"
        reads.mkdir()
        kill_at = {"read": last_read, "rank": processes - 1 if last_read else -1}
        section["options"] |= {"kill_at": kill_at, "record": str(reads)}
        section["checkpoint"] = {"every_steps": 3}
        path = write_yaml(tmp_path / "run.yaml", section)
        done = run_forked(["run", str(path)], processes, folder=tmp_path / f"of {processes}")
        assert (done.wait()[-1] == 0) == (not last_read)
    output = Path(section["output_dir"])
    assert len(event_steps(output, "resume")) == 2
    for line, before in zip(metrics(output), metrics(Path(reference["output_dir"])), strict=True):
        assert line["step_loss"] == pytest.approx(before["step_loss"], rel=1e-5)
