"""Imports point downward, importing does nothing heavy, and nothing in the package runs code that came with data.

Imports are read from the source, those inside functions too; only what stands under `if TYPE_CHECKING` is no import.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "accel_train"

# From the top. A package imports from lower lines only; packages of one line do not know each other.
LINES = (
    ("__init__", "__main__", "torchrun"),
    ("cli",),
    ("hf", "experiments"),
    ("training",),
    ("recovery", "inference", "plan"),
    ("engine",),
    ("parallel",),
    ("checkpoint", "tasks", "report"),
    ("optim",),
    ("model",),
    ("guard", "metrics", "data", "observe", "runtime"),
    ("task",),
    ("recipe",),
    ("buckets",),
    ("core",),
)
LARGEST_PACKAGE = 15  # modules, packages inside counted as one
PURE = {"core": (), "guard": ("core", "recipe")}  # the standard library, and these packages
MOST_LINES = 500
LONG = {
    "task": "what a task may define, each with its docstring",
    "recipe.schema": "all settings, each with its docstring",
}
MAY_KNOW_TRANSFORMERS = ("task", "model", "hf", "data.text", "data.images", "parallel", "inference")
RUNS_FOREIGN_CODE_BY_CONSENT = {
    "metrics.registry": ["loading.load"],  # a metric of the hub, when evaluate.allow_hub_metrics says so
}
RUNS_CODE_FROM_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.package"}


@dataclass(frozen=True)
class Import:
    module: str
    """The importing module, without the package's name: `data.tokenizers`; the package itself is `__init__`."""
    target: str
    """The imported module by its full name; for `from a import b`, `a.b` where that is a module of this package."""
    lazy: bool
    """Inside a function: done when it is called."""


@cache
def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in imports_of(name, ast.parse(path.read_text())))


def imports_of(name: str, tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import; write it out"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.removeprefix("accel_train.") in modules()
                yield Import(name, full if is_module else str(node.module), lazy)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from imports_of(name, other, lazy=lazy)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(name, node, lazy=lazy or inside)


def internal(found: Import) -> str | None:
    """The imported module without the package's name, if it is one of ours; `__init__` is the package itself."""
    if found.target == "accel_train":
        return "__init__"
    return found.target.removeprefix("accel_train.") if found.target.startswith("accel_train.") else None


def height(module: str) -> int:
    """0 for the bottom line; a module is on the line of its package."""
    package = module.split(".")[0]
    return next(number for number, line in enumerate(reversed(LINES)) if package in line)


def test_the_walk_sees_the_package() -> None:
    assert {"__init__", "recipe.schema", "training.loop", "data", "data.text.tokenizers"} <= set(modules())
    assert Import("training.train", "accel_train.recipe.schema", lazy=False) in imports()
    assert not any(found.module == "task" and found.target == "torch" for found in imports())  # TYPE_CHECKING only


def test_only_the_listed_modules_are_long() -> None:
    assert {name for name, path in modules().items() if len(path.read_text().splitlines()) > MOST_LINES} == LONG.keys()


def test_every_module_lies_in_a_package_of_the_table() -> None:
    packages = {name.split(".")[0] for name in modules()}
    assert packages == {package for line in LINES for package in line}


def test_imports_point_to_lower_lines_and_packages_of_one_line_do_not_know_each_other() -> None:
    upward = [
        f"{found.module} imports {target}"
        for found in imports()
        if (target := internal(found))
        and found.module != "__init__"
        and target.split(".")[0] != found.module.split(".")[0]
        and height(target) >= height(found.module)
    ]
    assert upward == []


def test_packages_stay_small_and_say_what_lives_in_them() -> None:
    for folder in {path.parent for path in modules().values()} - {PACKAGE}:
        parts = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }
        assert len(parts - {"__init__"}) <= LARGEST_PACKAGE, folder
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert docstring.count(".") >= 2, f"{folder}: say in two sentences what lives there and what may not"


def test_no_two_modules_import_each_other_not_even_when_called() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        target = internal(found)
        if target:
            graph[found.module].add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_import_the_standard_library_only(package: str) -> None:
    foreign = [
        f"{found.module} imports {found.target}"
        for found in imports()
        if found.module.split(".")[0] == package
        and found.target.split(".")[0] not in sys.stdlib_module_names
        and (internal(found) or "?").split(".")[0] not in (package, *PURE[package])
    ]
    assert foreign == []


def test_only_some_packages_know_transformers() -> None:
    knowing = {found.module for found in imports() if found.target.split(".")[0] == "transformers"}
    assert [name for name in knowing if not name.startswith(MAY_KNOW_TRANSFORMERS)] == []


def test_tasks_are_imported_by_name_alone_and_the_command_line_by_nothing() -> None:
    for found in imports():
        package = (internal(found) or "").split(".")[0]
        if package == "tasks" and found.target.split(".")[3:4] != ["config"]:  # settings alone: no torch
            assert found.module.startswith(("tasks", "experiments.finetune")), found
        if package == "cli":
            assert found.module.split(".")[0] in ("__main__", "cli"), found


def test_tasks_do_not_know_each_other() -> None:
    for found in imports():
        name = internal(found) or ""
        if name.startswith("tasks.") and found.module.startswith("tasks."):
            ours, theirs = found.module.split(".")[1], name.split(".")[1]
            assert theirs in (ours, "common", "rows"), found


@pytest.mark.parametrize(
    "module",
    ["accel_train", "accel_train.cli.main", "accel_train.metrics", "accel_train.recipe.loader", "accel_train.task"],
)
def test_importing_starts_nothing_heavy(module: str) -> None:
    heavy = ("torch", "transformers", "accelerate", "datasets", "evaluate")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"
    assert result.stderr == ""


READERS = {
    "core.json_io": {"json.loads"},  # bounds numbers and nesting
    "data.images.decoding": {"Image.open"},  # only formats that start no program
}


def reads_of_files(tree: ast.AST) -> set[str]:
    """Return the calls and imports that parse JSON or open an image in their own way."""
    names = ("json.loads", "json.load", "json.JSONDecoder", "Image.open", "PIL.Image.open")
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    imported = {
        f"{node.module}.{each.name}".replace("PIL.", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    return (calls | imported) & {*names}


@pytest.mark.parametrize(
    "code", ["json.loads(text)", "Image.open(path)", "from json import loads", "from PIL.Image import open"]
)
def test_the_scan_for_readers_sees(code: str) -> None:
    assert reads_of_files(ast.parse(code))
    assert not reads_of_files(ast.parse("json.dumps(value); image.open(); parse_json(text)"))


def test_json_and_images_of_files_are_read_in_one_place_each() -> None:
    found = {name: reads_of_files(ast.parse(path.read_text())) for name, path in modules().items()}
    assert {name: calls for name, calls in found.items() if calls} == READERS


def plain_value_errors(tree: ast.AST) -> list[int]:
    """Lines that raise a ValueError without the fields of a SettingError."""
    raised = (
        (node.lineno, ast.unparse(node.exc)) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc
    )
    return [line for line, error in raised if error.partition("(")[0] == "ValueError"]


@pytest.mark.parametrize("code", ["raise ValueError", "raise ValueError(text)", "raise ValueError(text) from None"])
def test_the_scan_for_plain_value_errors_sees(code: str) -> None:
    assert plain_value_errors(ast.parse(code)) == [1]
    assert not plain_value_errors(ast.parse("raise SettingError(text)"))


def test_a_mistake_in_a_setting_is_raised_with_the_fields_of_a_setting_error() -> None:
    of_settings = [
        name for name in modules() if name.startswith("recipe.") or re.fullmatch(r"tasks\.\w+\.config", name)
    ]
    found = {name: plain_value_errors(ast.parse(modules()[name].read_text())) for name in of_settings}
    assert len(found) > 20
    assert {name: lines for name, lines in found.items() if lines} == {}


def runs_foreign_code(tree: ast.AST) -> Iterator[str]:
    """Calls and arguments by which data, weights or a hub could bring code that runs here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            only_tensors = any(
                each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords
            )
            if called == "torch.load" and only_tensors:
                continue
            if called in ("eval", "exec", "compile", "torch.load", "evaluate.load", "loading.load", "__import__"):
                yield called
            if called.startswith("yaml.") and called.split(".")[1] in ("load", "load_all", "unsafe_load", "full_load"):
                yield called
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, value) in (
                    ("weights_only", False),
                    ("trust_remote_code", True),
                    ("allow_pickle", True),
                ):
                    yield f"{keyword.arg}={value!r}"


@pytest.mark.parametrize(
    "code",
    [
        "eval(text)",
        "torch.load(path)",
        "yaml.load(text, Loader=L)",
        "evaluate.load('f1')",
        "f(weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_scan_for_foreign_code_sees(code: str) -> None:
    assert list(runs_foreign_code(ast.parse(code)))
    assert not list(
        runs_foreign_code(ast.parse("model.eval(); yaml.safe_load(text); torch.load(path, weights_only=True)"))
    )


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_module_runs_code_that_came_with_data(name: str) -> None:
    found_here = list(runs_foreign_code(ast.parse(modules()[name].read_text())))
    assert found_here == RUNS_FOREIGN_CODE_BY_CONSENT.get(name, [])
    for found in imports():
        if found.module == name:
            assert not RUNS_CODE_FROM_DATA & {found.target, found.target.split(".")[0]}, found
