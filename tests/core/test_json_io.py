import json
import math
from typing import Any

import pytest

from accel_train.core.json_io import DEEPEST_NESTING, json_line, parse_json
from tests.support.wording import raises_golden


@pytest.mark.parametrize("digits", [309, 310, 400, 4301, 100_000])
@pytest.mark.parametrize("encoding", [None, "utf-8", "utf-8-sig", "utf-16"])
def test_whole_numbers_beyond_a_float_are_infinite(digits: int, encoding: str | None) -> None:
    text = f'{{"a": [{"9" * digits}, -{"9" * digits}, 7, {2**70}], "{"1" * 400}": "{"1" * 400}"}}'
    value = parse_json(text if encoding is None else text.encode(encoding))
    assert value["a"] == [math.inf, -math.inf, 7, 2**70]
    assert value["1" * 400] == "1" * 400


def test_the_largest_number_of_a_float_is_kept() -> None:
    assert parse_json(str(10**308)) == 10**308
    assert parse_json(f"[{int(1.7e308)}]") == [int(1.7e308)]


def test_nesting_is_bounded() -> None:
    for begin, end in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")):
        levels = DEEPEST_NESTING // (2 if "[{" in begin else 1)
        assert parse_json(begin * levels + "1" + end * levels) is not None
        for deep in (levels + 1, 600, 200_000):
            with raises_golden():
                parse_json(begin * deep + "1" + end * deep)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    rows: list[Any] = [{"a": [number, "[[[["]} for number in range(1000)]
    assert parse_json(json.dumps(rows)) == rows


def test_half_of_a_surrogate_pair_is_written_and_read_again() -> None:
    value = {"name": "file \udcff", "text": "é \U0001f600"}
    line = json_line(value)
    assert parse_json(line) == value
    assert "é \U0001f600".encode() in line
