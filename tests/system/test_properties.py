"""Claims about every order, table, and recipe: hypothesis draws them, the same ones in each run of the tests."""

import csv
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from accel_train.data.order import DataOrder, LastBatch, evaluation_batches, permute
from accel_train.data.tables import read_rows
from accel_train.recipe.data import Data
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.writer import format_recipe
from accel_train.recipe.yaml_core import one_line, parse_yaml
from tests.support.runs import sources_of

pytestmark = pytest.mark.usefixtures("empty_folder")
# All examples of a test share its empty folder, and each writes its own files.
drawn = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SEEDS = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TABLES = st.lists(st.tuples(TEXTS, st.sampled_from(["good", "bad", "1"])), min_size=1, max_size=8)
SYNTAX = st.text("ab1: ,;-[]{}\n\r\t'\"#&*!|>%@`?~.<=\\\x00\u2028\u00e9", max_size=60)
ODD = ("yes", "true", "False", "NULL", "1e3", "0x10", "1_000", "~", "null", ".5", "1:30", "=", "- a", "a: b", "#")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | TEXTS
    | st.sampled_from(ODD),
    lambda value: (
        st.lists(value, max_size=3) | st.dictionaries(TEXTS.filter(lambda key: key != "<<"), value, max_size=3)
    ),
    max_leaves=8,
)


@drawn
@given(st.integers(1, 2**62), SEEDS, st.integers(0, 2**40), st.data())
def test_samples_of_an_epoch_are_distinct_and_depend_on_their_position_alone(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, n - 1))
    positions = np.arange(start, min(n, start + 300))
    samples = permute(positions, n, seed, epoch)
    assert np.unique(samples).size == positions.size
    assert 0 <= samples.min() <= samples.max() < n
    assert np.array_equal(permute(positions[::-7], n, seed, epoch), samples[::-7])


@drawn
@given(
    st.integers(1, 1500),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)),
    SEEDS,
    st.sampled_from(["carry", "short", "drop"]),
    st.booleans(),
    st.booleans(),
)
def test_epochs_hold_each_sample_once_and_processes_share_each_step(
    n: int, sizes: tuple[int, int, int], seed: int, last_batch: LastBatch, shuffle: bool, has_lengths: bool
) -> None:
    world_size, accumulation, per_device = sizes
    batch = world_size * accumulation * per_device
    assume(last_batch != "drop" or batch <= n)
    lengths = np.random.default_rng(n).integers(1, 50, n) if has_lengths else None
    order = DataOrder(n, batch, seed, shuffle=shuffle, last_batch=last_batch, lengths=lengths)
    steps = -(-2 * n // batch) if last_batch == "carry" else int(2 * order.steps_per_epoch)
    draws = [order.step_draws(step) for step in range(steps)]
    for step in range(0, steps, 1 + steps // 9):
        shares = [order.rank_micro_batches(step, rank, world_size, per_device) for rank in range(world_size)]
        assert [sample for share in shares for each in share for sample in each] == (draws[step] % n).tolist()
        assert max(map(len, shares)) <= accumulation
    counts = np.bincount(np.concatenate(draws), minlength=2 * n)
    assert counts.max() == 1
    if last_batch == "drop":
        assert counts.sum() == steps * batch
    # Groups of like length reach into the next epoch, where steps carry over.
    elif last_batch == "short" or not has_lengths:
        assert counts[: 2 * n].all()


@drawn
@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 9))
def test_evaluation_reads_each_sample_once_in_batches_that_no_process_changes(
    n: int, per_device: int, world_size: int
) -> None:
    ranks = [list(evaluation_batches(n, per_device, rank, world_size)) for rank in range(world_size)]
    assert sorted(batch for rank in ranks for batch in rank) == list(evaluation_batches(n, per_device, 0, 1))
    assert sorted(sample for rank in ranks for batch in rank for sample in batch) == list(range(n))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def read_or_refuse(name: str, content: bytes) -> list[tuple[Any, ...]] | None:
    """Return the rows of a file; None if the reader refuses it with an error for users."""
    Path(name).write_bytes(content)
    data = Data(train=name)
    try:
        (source,) = sources_of(data)
        return [row.cells for row in read_rows(source, ("text", "label"), data)]
    except (UnicodeError, json.JSONDecodeError):
        raise
    except ValueError:
        return None


@drawn
@given(
    TABLES,
    st.sampled_from(",;\t|"),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_a_csv_file_of_any_dialect_is_read_right_or_refused(
    table: list[tuple[str, str]], delimiter: str, quoting: Any, end: str, encoding: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=end)
    writer.writerows([("text", "label"), *table])
    assert read_or_refuse("a.csv", text.getvalue().encode(encoding)) in (table, None)


@drawn
@given(TABLES, st.sampled_from(["jsonl", "json", "parquet"]), st.booleans())
def test_rows_of_json_and_parquet_are_read_right_or_refused(
    table: list[tuple[str, str]], kind: str, escapes: bool
) -> None:
    rows = [{"text": text, "label": label} for text, label in table]
    if kind == "parquet":
        content = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), content)
        written = content.getvalue()
    elif kind == "json":
        written = json.dumps(rows, ensure_ascii=escapes).encode()
    else:
        written = "\n".join(json.dumps(row, ensure_ascii=escapes) for row in rows).encode()
    assert read_or_refuse(f"a.{kind}", written) in (table, None)


@drawn
@given(st.binary(max_size=200) | SYNTAX.map(str.encode), st.sampled_from(["csv", "tsv", "jsonl", "json", "parquet"]))
def test_any_bytes_are_read_or_refused_for_users(content: bytes, kind: str) -> None:
    read_or_refuse(f"a.{kind}", content)
    if kind in ("csv", "tsv"):
        read_or_refuse(f"a.{kind}", b"text,label\n" + content)


@drawn
@given(VALUES)
def test_a_value_on_one_line_of_yaml_is_read_as_the_same(value: Any) -> None:
    read, _ = parse_yaml(f"a: {one_line(value)}\n", "r.yaml")
    assert json.dumps(read) == json.dumps({"a": value})


@drawn
@given(SYNTAX)
def test_any_text_is_a_recipe_or_refused_for_users(text: str) -> None:
    with suppress(ValueError):
        parse_yaml(text, "r.yaml")


SETTINGS = (
    "seed",
    "output_dir",
    "precision.mixed",
    "optimizer.learning_rate",
    "data.train",
    "evaluate.metrics",
    "checkpoint.keep",
)


@drawn
@given(st.dictionaries(st.sampled_from(SETTINGS), VALUES, min_size=1, max_size=3))
def test_a_recipe_that_is_written_is_read_as_the_same(flags: dict[str, Any]) -> None:
    Path("r.yaml").write_text(
        "model: {config: {model_type: gpt2}}\ndata: {train: t.txt}\noutput_dir: run\nschedule: {max_steps: 3}\n"
    )
    arguments = [word for name, value in flags.items() for word in (f"--{name}", one_line(value))]
    try:
        recipe = load_recipe("r.yaml", arguments=arguments)
    except ValueError:
        return
    Path("written.yaml").write_text(format_recipe(recipe))
    assert load_recipe("written.yaml").model_dump() == recipe.model_dump()
