"""A long metrics.jsonl: what is kept of it, whichever way it is read."""

import json
import os
from pathlib import Path

import pytest

from accel_train.observe import metrics_reader
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.observe.run_folder import parse_line, read_metrics
from tests.support.runs import write_jsonl, write_lines


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(metrics_reader, "WHOLE_BYTES", 2**14)
    monkeypatch.setattr(metrics_reader, "GROUPS", 20)
    monkeypatch.setattr(metrics_reader, "LAST_LINES", 3)
    return tmp_path / "metrics.jsonl"


def lines_of(num_steps: int) -> list[str]:
    """Train lines with an evaluation every 40 steps, a machine line every 15, and some without a gradient norm."""
    lines = []
    for step in range(1, num_steps + 1):
        line = {"step": step, "split": "train", "loss": 5 + (step * 7919 % 101) / 1e7, "grad_norm": step * 31 % 97}
        if step % 50 == 0:
            del line["grad_norm"]
        lines.append(json.dumps(line))
        if step % 15 == 0:
            lines.append(json.dumps({"step": step, "split": "system", "rss_bytes": 1}))
        if step % 40 == 0:
            lines.append(json.dumps({"step": step, "split": "eval", "loss": 4.0}))
    return lines


def test_each_group_keeps_its_extremes(path: Path) -> None:
    lines = lines_of(2_000)
    write_lines(path, *lines)
    kept = MetricsReader(path).read()
    expected, group, num_bytes = [], [], 0
    for number, line in enumerate(lines):
        group.append((number, json.loads(line)))
        num_bytes += len(line) + 1
        if num_bytes >= path.stat().st_size // 20 or number == len(lines) - 1:
            train = [each for each in group if each[1]["split"] == "train"]
            normed = [each for each in train if "grad_norm" in each[1]]
            expected += [
                min(train, key=lambda each: each[1]["loss"]),
                max(train, key=lambda each: each[1]["loss"]),
                max(normed, key=lambda each: each[1]["grad_norm"]),
                *(each for each in group if each[1]["split"] == "eval"),
                *[each for each in group if each[1]["split"] == "system"][:1],
            ]
            group, num_bytes = [], 0
    last = [each for each in enumerate(map(json.loads, lines)) if each[1]["split"] == "train"][-3:]
    assert kept == [line for _, line in sorted({number: (number, line) for number, line in expected + last}.values())]


def test_a_file_that_grows_keeps_its_extremes_and_evaluations(path: Path) -> None:
    lines = [json.loads(line) for line in lines_of(2_000)]
    lines[1_900]["loss"], lines[1_950]["grad_norm"] = 99.0, 999.0
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    reader, begin = MetricsReader(path), len(content) * 2 // 3
    with path.open("wb") as file:
        for start, end in [(0, begin), *((at, at + 777) for at in range(begin, len(content), 777))]:
            file.write(content[start:end])  # cut within a line, most times
            file.flush()
            kept = reader.read()
    assert [line for line in kept if line["split"] == "eval"] == [line for line in lines if line["split"] == "eval"]
    assert lines[1_900] in kept
    assert lines[1_950] in kept
    assert kept[-1] == lines[-1]
    assert len(kept) < 300


def test_lines_are_parsed_once_and_a_file_that_was_cut_is_read_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(path, *lines_of(2_000))
    reader, parsed = MetricsReader(path), []
    assert len(reader.read()) < 300
    monkeypatch.setattr(metrics_reader, "parse_line", lambda *a: (parsed.append(a), parse_line(*a))[1])
    added = {"split": "train", "step": 2_001, "loss": 1.5}
    with path.open("a") as file:
        file.write(json.dumps(added) + "\n")
    assert reader.read()[-1] == added
    assert len(parsed) < 100
    os.truncate(path, 3_000)  # a rollback
    assert reader.read() == read_metrics(path.parent)


@pytest.mark.parametrize("at", [1, 700, 1_301])
@pytest.mark.parametrize("text", ['{"step": 3, "split": "train", "loss": 1.5', '"split": "train"', "[]", "\0" * 30])
def test_a_damaged_line_is_named_by_its_number(at: int, text: str, path: Path) -> None:
    lines = lines_of(2_000)
    lines.insert(at - 1, text)
    write_lines(path, *lines)
    damage: list[str] = []
    assert MetricsReader(path).read(damage)[-1]["step"] == 2_000
    assert len(damage) == 1
    assert damage[0].startswith(f"{path}:{at} is damaged")


def test_a_number_that_is_not_finite_is_kept(path: Path) -> None:
    lines = [json.loads(line) for line in lines_of(2_000)]
    lines[333]["loss"], lines[900]["other"], lines[1_500]["grad_norm"] = "NaN", "Infinity", "-Infinity"
    write_jsonl(path, lines)
    kept = {line["step"] for line in MetricsReader(path).read()}
    assert {lines[at]["step"] for at in (333, 900, 1_500)} <= kept
