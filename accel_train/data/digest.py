"""Digests of a program's data and code: equal in every process and after a restart, different if the content differs.

Addresses, line numbers and comments are ignored. Code of installed packages counts by name only. Weights and buffers
are ignored, except the class weights of torch's losses.
"""

import copy
import dis
import hashlib
import inspect
import logging
import random
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

NUM_ITEMS = 16
"""Number of items of a data set to read, evenly spaced."""
MOST_VALUES = 100_000
"""Most values of a list to digest. Longer lists are subsampled evenly."""
LOG = logging.getLogger(__name__)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_IN_PLACE = re.compile(r"append|extend|add|update|insert|setdefault|pop|clear|[^_].*_")
"""Methods that change their object."""
_DEEPEST = 12
_NAMED = (ModuleType, logging.Logger, random.Random)
"""Objects that change without a change of the program."""
_WITH_REPR = {*sys.stdlib_module_names, "torch"}
"""Packages whose objects show their value in their repr."""
_OF_DATA = -1
"""Marker among the ids of enclosing objects: the value is part of a sample, so private state counts."""


def digest_of_data(data: Any) -> tuple[str, bool]:
    """Return a digest of a data set's class, length and 16 items, and whether the items are stable.

    If an item differs between two reads, the digest covers class and length only.
    """
    kind = f"{type(data).__qualname__} {len(data)}"
    numbers = np.unique(np.linspace(0, max(len(data) - 1, 0), NUM_ITEMS).astype(int)).tolist() if len(data) else []
    twin = apart(data)
    with _same_random_numbers() as seed:
        first, second = ([_item(twin, number, seed) for number in numbers] for _ in range(2))
    is_stable = first == second
    return _hash([kind, *first] if is_stable else [kind]), is_stable


def digest_of_code(value: Any) -> str:
    """Return a digest of a function, class or object: code, constants, and the simple values and user code it uses."""
    return _digest(value, _parts(value, frozenset(), 0))


def digest_of_module(module: nn.Module) -> str:
    """Return a digest of a module: structure, weight shapes, trainable flags, and the code of user classes."""
    return _digest(module, _parts_of_module(module))


def _parts_of_module(module: nn.Module) -> Iterator[str]:
    weights = [
        (name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in module.named_parameters()
    ]
    yield from (_ADDRESS.sub("", repr(module)), repr(weights))
    for kind in dict.fromkeys(map(type, module.modules())):
        yield from _parts(kind, frozenset(), 0)
    for part in module.modules():
        yield from _parts(_settings_of(part), frozenset(), 0)
        if isinstance(part, _Loss):
            yield from _parts(dict(part.named_buffers(recurse=False)), frozenset(), 0)


def _digest(value: Any, parts: Iterator[str]) -> str:
    """Return the digest of all parts, or of those before a failure.

    A failure is logged: digests serve a note at a resume, and must not stop a run.
    """
    known: list[str] = []
    try:
        known.extend(parts)  # keeps the parts before a failure
    # Anything that a program refers to can fail when it is looked at.
    except Exception as error:
        name = getattr(value, "__qualname__", type(value).__qualname__)
        LOG.warning("%s: a resume compares only a part of it (%s: %s)", name, type(error).__name__, error)
    return _hash(known)


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def apart(data: Any) -> Any:
    """Return a shallow copy for reading that shares the samples.

    A read may open a file in the copy. The original stays clean, so that forked workers do not inherit the open file.
    """
    twin = data
    with suppress(Exception):
        twin = copy.copy(data)
        for name in {"dataset", "datasets"} & vars(twin).keys():
            inner = getattr(twin, name)
            setattr(twin, name, [apart(each) for each in inner] if isinstance(inner, list) else apart(inner))
    return twin


@contextmanager
def _same_random_numbers() -> Iterator[Any]:
    """Yield a function that seeds the generators of this process; restore the generators on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)

    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _item(data: Any, number: int, seed: Any) -> str:
    seed()
    try:
        return _hash([*_parts(data[number], frozenset([_OF_DATA]), 0)])
    # A sample that cannot be read must fail the step that needs it, not the start.
    except Exception as error:
        return type(error).__name__


def _parts(value: Any, seen: frozenset[int], depth: int) -> Iterator[str]:
    """Yield texts that represent a value. `seen` holds the ids of enclosing objects."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes) or value is Ellipsis:
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in seen or depth > _DEEPEST:
        yield "above"
        return
    inside, deeper = seen | {id(value)}, depth + 1

    def of(*values: Any) -> Iterator[str]:
        for each in values:
            yield from _parts(each, inside, deeper)

    value = getattr(value, "_torchdynamo_orig_callable", value) if callable(value) else value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        yield from _numbers(value)
    elif isinstance(value, Mapping):
        yield f"{type(value).__name__} {len(value)}"
        for key, each in value.items():
            yield from [*of(key, each)]
    elif isinstance(value, set | frozenset):
        yield f"{type(value).__name__} {len(value)}"
        yield from sorted(_hash([*of(each)]) for each in value)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}"
        yield from of(*value[:: 1 + len(value) // MOST_VALUES])
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        yield " ".join(value.co_names)
        yield from of(*value.co_consts)
    elif isinstance(value, partial):
        yield from of((value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from [*of(value.__func__, value.__self__)]
    elif isinstance(value, FunctionType):
        function = inspect.unwrap(value)
        yield from _parts_of_function(function, inside, deeper) if isinstance(function, FunctionType) else ["callable"]
    elif isinstance(value, type):
        yield from _parts_of_class(value, inside, deeper)
    elif isinstance(value, nn.Module):
        yield digest_of_module(value)
    elif isinstance(value, Enum):
        yield from (f"{type(value).__qualname__}.{value.name}", *of(value.value))
    elif isinstance(value, _NAMED):
        yield f"{type(value).__name__} {getattr(value, '__name__', '')}"
    elif callable(value) and _is_library(type(value)) and _OF_DATA not in seen:
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
        # For example, under functools.cache.
        if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):
            yield from of(wrapped)
        yield from _parts_of_object(value, inside, deeper)
    else:
        yield type(value).__qualname__
        if hasattr(value, "tobytes"):  # an image
            yield from (repr(getattr(value, "size", "")), hashlib.sha256(value.tobytes()).hexdigest())
        elif _OF_DATA in seen and (copied := _as_copied(value)) is not None:  # for example, a graph or a date
            yield from of(copied)
            return
        elif not _is_library(type(value)) and callable(value):
            yield from _parts_of_class(type(value), inside, deeper)
        yield from _parts_of_object(value, inside, deeper)


def _parts_of_object(value: Any, seen: frozenset[int], depth: int) -> Iterator[str]:
    """Yield the settings of an object, or its repr if it has none (a path, pattern, date or dtype)."""
    settings = _settings_of(value)
    yield from _parts(settings, seen, depth)
    if not settings and str(type(value).__module__).partition(".")[0] in _WITH_REPR:
        yield _ADDRESS.sub("", repr(value))


def _as_copied(value: Any) -> Any:
    """Return the state from which a copy of an object is built, private state included. None if it cannot be copied."""
    try:
        made = value.__reduce_ex__(4)
    except TypeError:
        return None
    return made if isinstance(made, str) else made[1:3]


def _numbers(value: Any) -> Iterator[str]:
    """Yield dtype, shape and content of a tensor or array."""
    yield f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Tensor):
        # Sparse and quantized tensors and tensors without values raise.
        with suppress(RuntimeError, TypeError, NotImplementedError):
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            yield hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    elif value.dtype == object:
        yield from _parts(value.tolist(), frozenset([_OF_DATA]), 1)
    else:
        yield hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _parts_of_function(function: FunctionType, seen: frozenset[int], depth: int) -> Iterator[str]:
    """Yield code, defaults, and the outer values that a function reads.

    Outer values that the function changes (a counter, a log) are left out.
    """
    if _is_library(function):
        yield f"{function.__module__}.{function.__qualname__}"
        return
    code = function.__code__
    yield from _parts((code, function.__defaults__, function.__kwdefaults__), seen, depth)
    codes = list(_codes(code))
    names = {name for each in codes for name in each.co_names}
    steps = [step for each in codes for step in dis.get_instructions(each)]
    assigned = {step.argval for step in steps if step.opname in ("STORE_DEREF", "STORE_GLOBAL")}
    changed = {name for each in codes for name in _changed_in_place(each)}
    around = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # empty cell
            around[name] = cell.cell_contents
    around |= {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    for name, value in sorted(around.items()):
        if name in assigned or (name in changed and isinstance(value, list | dict | set | Tensor | np.ndarray)):
            continue
        if isinstance(value, ModuleType) and not _is_library(value):
            value = {each: vars(value)[each] for each in sorted(names & vars(value).keys())}
        yield name
        yield from _parts(value, seen, depth)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _changed_in_place(code: CodeType) -> Iterator[str]:
    """Yield the names whose content the code changes through an item or a method."""
    steps = list(dis.get_instructions(code))
    for number, step in enumerate(steps):
        if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            # `log[key] += 1` computes with copies of the container and the key.
            copies = [at for at in range(1, number) if steps[at - 1].opname == steps[at].opname == "COPY"]
            end = copies[-1] - 1 if copies and steps[number - 1].opname == "SWAP" else number
            yield steps[_start(steps, _start(steps, end))].argval
        elif step.opname in ("LOAD_METHOD", "LOAD_ATTR") and _IN_PLACE.fullmatch(step.argval):
            yield steps[_start(steps, number)].argval


def _start(steps: Sequence[dis.Instruction], end: int) -> int:
    """Return the start of the expression whose value is on top of the stack before step `end`."""
    depth = 0
    for start in range(end - 1, -1, -1):
        depth += dis.stack_effect(steps[start].opcode, steps[start].arg, jump=False)
        if depth >= 1:
            return start
    return 0


def _parts_of_class(kind: type, seen: frozenset[int], depth: int) -> Iterator[str]:
    for base in kind.__mro__:
        yield f"{base.__module__}.{base.__qualname__}"
        for name, value in sorted(vars(base).items()) if not _is_library(base) else ():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType) or not name.startswith("_"):
                yield name
                yield from _parts(value, seen, depth)


def _settings_of(value: Any) -> dict[str, Any]:
    """Return an object's public values, without those that a method other than __init__ sets.

    For a callable library object, only numbers and strings count, because its parts may grow.
    """
    kind: Any = type(value)
    state, is_opaque = _state_names(kind), callable(value) and _is_library(kind)
    found: dict[str, Any] = {}
    for slots in (base.__dict__.get("__slots__", ()) for base in kind.__mro__):
        names = [slots] if isinstance(slots, str) else slots
        found |= {name: getattr(value, name) for name in names if not name.startswith("_") and hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {
        name: each
        for name, each in sorted(found.items())
        if not name.startswith("_") and name not in state and not (is_opaque and not _is_simple(each))
    }


def _is_simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= NUM_ITEMS and all(map(_is_simple, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


@cache
def _state_names(kind: type) -> set[str]:
    methods = [each for base in kind.__mro__ if not _is_library(base) for each in vars(base).values()]
    codes = [each.__code__ for each in methods if isinstance(each, FunctionType) and each.__name__ != "__init__"]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    return {step.argval for step in steps if step.opname == "STORE_ATTR"} | {"training"}


def _is_library(value: Any) -> bool:
    """Return whether a function, class or module belongs to Python, an installed package, or accel_train."""
    name = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", None) or "")
    if name.partition(".")[0] in {"accel_train", "torch", "builtins"}:
        return True
    code = getattr(value, "__code__", None)
    file = code.co_filename if isinstance(code, CodeType) else getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name != "__main__"
    return str(file).startswith((*_libraries(tuple(sys.path)), "<frozen"))


@cache
def _libraries(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders of Python and of installed packages: of this interpreter and user, and the folders of `paths`
    that hold an installed distribution (`pip install --target`, a .pth file).
    """
    python = {*sysconfig.get_paths().values()} - {sysconfig.get_paths()["data"]}
    holding = {path for path in paths if any(Path(path or ".").glob("*.dist-info"))}
    return tuple(sorted({*python, *site.getsitepackages(), site.getusersitepackages(), *holding} - {""}))
