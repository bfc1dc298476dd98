"""Digests of data and code: equal for equal content, in every process, and different for different content."""

import importlib
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from transformers import BertConfig, DataCollatorForLanguageModeling

from accel_train.data import digest
from accel_train.data.digest import digest_of_code, digest_of_data, digest_of_module


def of(item: Any) -> str:
    """The digest of a data set of one item."""
    found, is_stable = digest_of_data([item])
    assert is_stable
    return found


class Mode(Enum):
    """Two values."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(slots=True)
class Slotted:
    """An object without a __dict__."""

    size: int


class Plain:
    """An object without a repr of its own."""

    def __init__(self, size: int) -> None:
        self.size = size


def picture(value: int, mode: str = "L") -> Image.Image:
    return Image.new(mode, (2, 3), value)


def graph(value: int) -> list[Any]:
    """A list that holds itself."""
    items: list[Any] = [value]
    items.append(items)
    return items


def different() -> list[tuple[Any, Any]]:
    """Return pairs of values that differ, made anew."""
    return [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
        (torch.ones(4), torch.ones(4, dtype=torch.bfloat16)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.tensor(1.0), torch.tensor([1.0])),
        (torch.tensor(True), torch.tensor(False)),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
        (torch.zeros(1), -torch.zeros(1)),
        (np.array([1.0, 2.0]), np.array([2.0, 1.0])),
        (np.array([1, 2]), np.array([1, 2], np.int32)),
        (np.array(["a", None], object), np.array(["b", None], object)),
        (np.array(["2020"], "M8[Y]"), np.array(["2021"], "M8[Y]")),
        (torch.ones(2), np.ones(2, np.float64)),
        (1, 1.0),
        (1, True),
        ("1", 1),
        ("a", b"a"),
        (None, "None"),
        ([1, 2], (1, 2)),
        ([1, 2], [2, 1]),
        ([[1], 2], [[1, 2]]),
        (({1}, {2}), ({1, 2}, set())),
        ({1, 2}, frozenset({1, 2})),
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}),
        ({"a": 1}, {"b": 1}),
        ({"x": [torch.zeros(2), ("y", 1)]}, {"x": [torch.zeros(2), ("y", 2)]}),
        (float("nan"), float("inf")),
        (torch.tensor([float("nan")]), torch.tensor([0.0])),
        (picture(1), picture(2)),
        (Plain(1), Plain(2)),
        (Slotted(1), Slotted(2)),
        (SimpleNamespace(size=1), SimpleNamespace(size=2)),
        (Mode.MEAN, Mode.SUM),
        (Path("a"), Path("b")),
        (re.compile("a"), re.compile("b")),
        (date(2026, 1, 1), date(2026, 1, 2)),
        (Decimal("0.1"), Decimal("0.2")),
        (range(3), range(4)),
        (torch.float32, torch.bfloat16),
        (torch.device("cpu"), torch.device("meta")),
        (graph(1), graph(2)),
    ]


class Graph:
    """A sample as libraries of graphs have it: callable, and its content is private."""

    def __init__(self, edges: list[int]) -> None:
        self._store = {"edges": torch.tensor(edges), "above": self}

    def __call__(self) -> Any:
        """Return the content."""
        return self._store


class Slots:
    """A sample without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def different_items() -> list[tuple[Any, Any]]:
    """Return pairs of different items of data, made anew."""
    return [
        *different(),
        (Graph([0, 1]), Graph([0, 2])),
        (Slots(1), Slots(2)),
        (pd.Series([1.0, 2.0]), pd.Series([1.0, 3.0])),
        (np.array([{1}, None]), np.array([{2}, None])),
    ]


@pytest.mark.parametrize("number", range(len(different_items())))
def test_items_of_another_value_order_type_or_shape_are_other_data(number: int) -> None:
    (one, other), (again, _) = different_items()[number], different_items()[number]
    assert of(one) == of(again)
    assert of(one) != of(other)


def test_memory_layout_and_address_do_not_count() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    assert of(rows) == of(rows.t().contiguous().t())
    assert of(rows.numpy()) == of(np.asfortranarray(rows.numpy()))
    assert of(rows) == of(torch.arange(-1.0, 7.0)[1:7].reshape(2, 3))
    assert of(rows.clone().requires_grad_()) == of(rows)
    assert of({"b", "a", "c"}) == of({"c", "b", "a"})
    assert of(object()) == of(object())
    assert of(iter([1])) == of(iter([1]))


def test_a_tensor_counts_whole_however_large_and_a_long_list_by_evenly_spaced_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = torch.zeros(1_000_001)
    other = large.clone()
    other[777_777] = 1
    assert of(large) != of(other)
    monkeypatch.setattr(digest, "MOST_VALUES", 10)
    values = list(range(25))  # of which each third counts
    for index in range(25):
        changed = [*values]
        changed[index] = -1
        assert (of(changed) != of(values)) == (index % 3 == 0), index
    assert of(values) != of(values[:-1])


def test_sixteen_items_and_the_length_of_a_data_set_count() -> None:
    class Counted(Dataset[int]):
        """Notes which items are read."""

        def __init__(self, length: int) -> None:
            self.length, self.read = length, set[int]()

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> int:
            self.read.add(index)
            return 7

    data = Counted(1_000)
    first, is_stable = digest_of_data(data)
    assert is_stable
    assert len(data.read) == 16
    assert {0, 999} <= data.read
    assert first != digest_of_data(Counted(1_001))[0]
    assert digest_of_data([]) == digest_of_data([])
    rows = TensorDataset(torch.arange(10.0))
    assert digest_of_data(Subset(rows, [1, 2])) != digest_of_data(Subset(rows, [2, 1]))
    assert digest_of_data(Subset(rows, [1, 2])) == digest_of_data(Subset(rows, [1, 2]))


def test_data_that_differ_from_read_to_read_count_by_class_and_length() -> None:
    class Fresh(list[int]):
        """Items that no seed decides."""

        def __getitem__(self, index: Any) -> Any:
            return next(numbers)

    numbers = iter(range(10_000))
    first, second = digest_of_data(Fresh(range(20))), digest_of_data(Fresh(range(20)))
    assert first == second
    assert first[1] is False
    assert digest_of_data(Fresh(range(21)))[0] != first[0]


def test_augmented_data_are_stable_and_leave_the_generators_of_the_process_alone() -> None:
    class Augmented(list[int]):
        """Draws from all three generators."""

        def __getitem__(self, index: Any) -> Any:
            return random.random(), np.random.rand(), torch.rand(2)

    draws = []
    for look in (lambda: None, lambda: digest_of_data(Augmented(range(20)))):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        found = look()
        draws.append((random.random(), np.random.rand(), torch.rand(2).tolist()))
    assert draws[0] == draws[1]
    assert found == digest_of_data(Augmented(range(20)))
    assert found[1]


def test_an_item_that_cannot_be_read_does_not_end_the_start() -> None:
    class Broken(list[int]):
        """Fails at one item."""

        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise self.error(f"item {index} at {id(object())}")
            return index

        error: type[Exception] = OSError

    first = digest_of_data(Broken(range(5)))
    assert first == digest_of_data(Broken(range(5)))
    assert first[1]
    assert first[0] != digest_of_data(Broken(range(6)))[0]
    Broken.error = KeyError
    assert first[0] != digest_of_data(Broken(range(5)))[0]


class Tokens:
    """What the collator below needs of a tokenizer."""

    pad_token_id, mask_token = 0, "[MASK]"


def around(value: Any) -> Callable[..., Any]:
    """A function that takes a value from around it."""
    return lambda model, batch: (value, model, batch)


def different_code() -> list[tuple[Any, Any]]:
    """Return pairs of different settings and code, made anew."""
    return [
        *different(),
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()),
        (nn.CrossEntropyLoss(ignore_index=0), nn.CrossEntropyLoss()),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]))),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), nn.BCEWithLogitsLoss(pos_weight=2 * torch.ones(1))),
        (nn.HuberLoss(delta=1.0), nn.HuberLoss(delta=2.0)),
        (nn.MSELoss(), nn.MSELoss(reduction="sum")),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (BertConfig(hidden_size=24), BertConfig(hidden_size=12)),
        (
            DataCollatorForLanguageModeling(Tokens(), mlm_probability=0.1),
            DataCollatorForLanguageModeling(Tokens(), mlm_probability=0.3),
        ),
        (partial(around, 1), partial(around, 2)),
        (around(1), around(2)),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}),
        (lambda x, scale=1: x * scale, lambda x, scale=2: x * scale),
        (lambda x, *, scale=1: x * scale, lambda x, *, scale=2: x * scale),
        (lambda x: x.mean(), lambda x: x.sum()),
        (cache(lambda: 1), cache(lambda: 2)),
        (re, random),
        (max, min),
    ]


@pytest.mark.parametrize("number", range(len(different_code())))
def test_code_with_other_constants_settings_or_values_around_it_is_other_code(number: int) -> None:
    (one, other), (again, _) = different_code()[number], different_code()[number]
    assert digest_of_code(around(one)) == digest_of_code(around(again))
    assert digest_of_code(around(one)) != digest_of_code(around(other))


def of_loss(source: str, **around: Any) -> str:
    """The digest of the function `loss` of a program."""
    names: dict[str, Any] = {"__name__": "own_code", **around}
    exec(compile(source, "own_code.py", "exec"), names)
    return digest_of_code(names["loss"])


def test_lines_and_comments_do_not_count_and_code_that_is_called_does() -> None:
    source = "def scale(x):\n    return 2 * x\ndef loss(x):\n    return [scale(each) for each in x]\n"
    first = of_loss(source)
    assert of_loss("# a comment\n\n" + source.replace("2 * x", "2 * x  # twice")) == first
    assert of_loss(source.replace("2 * x", "3 * x")) != first
    assert of_loss(source.replace("each in x", "each in x[1:]")) != first
    unused = source.replace("scale(each)", "each")
    assert of_loss(unused) == of_loss(unused.replace("2 * x", "3 * x"))


@pytest.mark.parametrize(
    "line",
    ["log.append(x)", "log[0] = x", "log[x['a']['b']] += 1", "log[0][1] = x", "del log[0]", "log.state['n'] = 1"],
)
def test_a_container_that_the_code_changes_itself_does_not_count(line: str) -> None:
    source = f"def loss(x):\n    {line}\n    return x\n"
    assert of_loss(source, log=[1]) == of_loss(source, log=[1, 2])


@pytest.mark.parametrize(
    "line", ["y[x > 0] = 0", "y[x['pad']['at']] += 1", "y.clamp_(0)", "y.append(log)", "y[0] = log"]
)
def test_a_change_of_something_else_hides_no_changed_weights(line: str) -> None:
    source = f"def loss(x):\n    y = x * log\n    {line}\n    return y\n"
    one, other, again = (of_loss(source, log=torch.tensor([1.0, each])) for each in (2, 3, 2))
    assert one == again
    assert one != other


def test_objects_that_change_by_themselves_do_not_count() -> None:
    logger, generator = logging.getLogger("a.logger"), random.Random(0)
    function = around((logger, generator))
    first = digest_of_code(function)
    logging.getLogger("another.logger").addHandler(logging.NullHandler())
    logger.setLevel(logging.DEBUG)
    generator.gauss(0, 1)
    assert digest_of_code(function) == first


class Meter:
    """A callable with a setting, and a count that its calls change."""

    def __init__(self, scale: float) -> None:
        self.scale, self.count, self._cache = scale, 0, object()

    def __call__(self, value: float) -> float:
        self.count += 1
        return value * self.scale


def test_settings_of_a_callable_object_count_and_its_counters_do_not() -> None:
    meter = Meter(2.0)
    first = digest_of_code(meter)
    meter(1.0)
    assert digest_of_code(meter) == first == digest_of_code(Meter(2.0))
    assert digest_of_code(Meter(3.0)) != first
    assert digest_of_code(Meter(2.0).__call__) != digest_of_code(Meter(3.0).__call__)


def test_a_function_that_calls_itself_or_has_an_empty_cell_has_a_digest() -> None:
    def power(x: float, times: int) -> float:
        return x * power(x, times - 1) if times else 1.0

    def early() -> str:
        found = digest_of_code(lambda: later)
        later = 1
        return found

    assert digest_of_code(power) == digest_of_code(power)
    assert early() == early()


class Net(nn.Module):
    """A module of own code."""

    def __init__(self, width: int = 4, scale: float = 1.0, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), activation(), nn.BatchNorm1d(width))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x) * self.scale


class Other(Net):
    """Another forward."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x) + self.scale


def test_a_module_counts_by_structure_settings_and_code_and_not_by_its_weights_or_mode() -> None:
    first = digest_of_module(Net())
    trained = Net().eval()
    trained(torch.randn(5, 3))
    torch.nn.init.zeros_(trained.layers[0].weight)
    assert digest_of_module(trained) == first
    frozen = Net()
    frozen.layers[0].weight.requires_grad_(False)
    others = [Net(5), Net(scale=2.0), Net(activation=nn.Tanh), Net().double(), frozen, Other()]
    found = {digest_of_module(each) for each in others}
    assert len(found - {first}) == len(others)


PROGRAM = """
import torch
from torch import nn
from accel_train.data.digest import digest_of_code, digest_of_data, digest_of_module

names = {"red", "green", "blue", "cyan"}
class Own:
    def __init__(self):
        self.names, self.count = names, 3
def loss(model, batch):
    return len(names), batch in {"a", "b", "c"}, Own(), object
data = [{"names": names, "own": Own(), "values": torch.arange(3)}]
print(digest_of_data(data)[0], digest_of_code(loss), digest_of_module(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))))
"""


def test_digests_are_the_same_in_processes_of_any_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = Path(__file__).parents[2]
    runs = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    found = [run.communicate()[0].split() for run in runs]
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_what_cannot_be_looked_at_is_logged_and_does_not_stop_a_run(caplog: Any) -> None:
    class Broken:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise OSError("gone")

    broken, size = Broken(), 1

    def loss() -> Any:
        return broken, size

    class Layer(nn.Linear):
        def extra_repr(self) -> str:
            raise OSError("gone")

    first = digest_of_code(loss)
    assert digest_of_code(loss) == first
    assert digest_of_module(Layer(1, 1)) == digest_of_module(Layer(1, 1))
    assert [record.getMessage().partition(":")[0].rpartition(".")[2] for record in caplog.records] == [
        *("loss", "loss"),
        *("Layer", "Layer"),
    ]


@pytest.mark.parametrize("layout", ["on the path", "user site"])
def test_packages_outside_the_interpreters_folder_are_libraries(tmp_path: Path, monkeypatch: Any, layout: str) -> None:
    """`pip install --target` with PYTHONPATH or a .pth file, and `pip install --user`."""
    module = f"package_of_{layout.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text("def used():\n    return LIMIT\nLIMIT = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    used = importlib.import_module(module).used
    assert len([*digest._parts(used, frozenset(), 0)]) > 1  # the user's own code
    digest._libraries.cache_clear()
    if layout == "user site":
        monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path))
    else:
        (tmp_path / "some_package-1.0.dist-info").mkdir()
    assert [*digest._parts(used, frozenset(), 0)] == [f"{module}.used"]


def test_a_class_of_a_package_whose_code_is_a_descriptor_is_a_library() -> None:
    assert digest._is_library(type(test_a_class_of_a_package_whose_code_is_a_descriptor_is_a_library))
    made = type("Made", (), {"__code__": property(lambda self: None), "__module__": "datasets.table"})
    assert digest._is_library(made)
