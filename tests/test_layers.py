"""Imports point downward, importing does nothing heavy, and nothing in the package runs code that came with data.

Imports are read from the source, those inside functions too; only what stands under `if TYPE_CHECKING` is no import.
"""

import ast
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

# From the top. A module, or the folder it lies in, may import from its own layer and from those below. Whatever is not
# named here is a service, so that a new data source, tracker or checkpoint part needs no line here.
LAYERS = (
    ("__init__", "__main__"),
    ("cli",),
    ("hf",),
    ("hf_face", "rehearse", "find_lr"),
    ("loop",),
    ("finish", "saving", "rollback", "incident", "drift", "stragglers", "fallback"),
    ("prepare",),
    ("introduction", "preflight"),
    ("run",),
    ("tasks",),
    ("services",),
    ("schedule", "guard", "batching", "sampling"),
    ("recipe_file", "model_check"),
    ("recipe_errors",),
    ("recipe_writing",),
    ("recipe_names",),
    ("recipe_yaml",),
    ("recipe",),
    ("recipe_data", "recipe_optimizer"),
    ("recipe_values", "state", "redaction"),
)
UPWARD_ON_PURPOSE = {
    ("recipe", "recipe_file"),  # Recipe.from_yaml, when it is called
}
PURE = ("state", "schedule", "guard", "batching", "sampling")
MAY_KNOW_TRANSFORMERS = {
    "data.tokenizers",  # loads tokenizers
    "model_check",  # checks model.config against transformers' configurations
    "generate",  # loads a finished run's model
    "export",  # writes a folder for from_pretrained, and loads it again
    "int8",  # tells transformers' Conv1D from a linear layer
    "tensor_parallel",  # splits a model by transformers' own plan for it
    "causal_attention",  # registers an attention with transformers
    "sequence_parallel",  # the same, over sequences that are split
    "lora",  # tells transformers' Conv1D from a linear layer
    "data.vision",  # reads what a pretrained model says of its images
    "hf",  # the Trainer face is about transformers' TrainingArguments, callbacks and collators
    *map("hf_face.{}".format, ("arguments", "checks", "evaluation", "flow", "hub")),
    *map("hf_face.{}".format, ("inputs", "loss", "optimizers", "running", "task")),
}
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
    """The imported module without the package's name, if it is one of ours."""
    if found.target == "accel_train":
        return None  # a name of the package itself, such as __version__
    return found.target.removeprefix("accel_train.") if found.target.startswith("accel_train.") else None


def height(module: str) -> int:
    """0 for the bottom layer."""
    for number, layer in enumerate(reversed(LAYERS)):
        if module in layer or module.split(".")[0] in layer:
            return number
    return height("services")


def test_the_walk_sees_the_package() -> None:
    assert {"__init__", "recipe", "loop", "data", "data.tokenizers", "tasks.causal_lm"} <= set(modules())
    assert Import("loop", "accel_train.recipe", lazy=False) in imports()
    assert Import("recipe", "accel_train.recipe_file", lazy=True) in imports()
    assert not any(found.module == "task" and found.target == "torch" for found in imports())  # TYPE_CHECKING only


def test_imports_point_downward() -> None:
    upward = [
        f"{found.module} imports {target}"
        for found in imports()
        if (target := internal(found))
        and height(target) > height(found.module)
        and (found.module, target) not in UPWARD_ON_PURPOSE
    ]
    assert upward == []


def test_no_two_modules_need_each_other_to_be_imported() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        target = internal(found)
        # A package's __init__ collects its own parts, so only imports from outside it count for it.
        if target and not found.lazy and not target.startswith(f"{found.module}."):
            graph[found.module].add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_the_standard_library_only(module: str) -> None:
    allowed = {*sys.stdlib_module_names, *(["numpy"] if module == "sampling" else [])}
    foreign = [
        found.target
        for found in imports()
        if found.module == module
        and found.target.split(".")[0] not in allowed
        and internal(found) not in (*PURE, "recipe", "recipe_optimizer")
    ]
    assert foreign == []


def test_only_tasks_and_named_modules_know_transformers() -> None:
    knowing = {found.module for found in imports() if found.target.split(".")[0] == "transformers"}
    assert {name for name in knowing if not name.startswith("tasks.")} <= MAY_KNOW_TRANSFORMERS


def test_only_the_registry_and_the_command_line_import_tasks_and_nothing_imports_the_command_line() -> None:
    for found in imports():
        target = internal(found) or ""
        if target.split(".")[0] == "tasks":
            assert found.module.split(".")[0] in ("tasks", "task", "cli"), found
        if target == "cli":
            assert found.module in ("__main__", "cli"), found


@pytest.mark.parametrize(
    "module", ["accel_train", "accel_train.cli", "accel_train.metrics", "accel_train.recipe_file", "accel_train.task"]
)
def test_importing_starts_nothing_heavy(module: str) -> None:
    heavy = ("torch", "transformers", "accelerate", "datasets", "evaluate", "matplotlib")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"
    assert result.stderr == ""


def runs_foreign_code(tree: ast.AST) -> Iterator[str]:
    """Calls and arguments by which data, weights or a hub could bring code that runs here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
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
    assert not list(runs_foreign_code(ast.parse("model.eval(); yaml.safe_load(text); f(weights_only=True)")))


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_module_runs_code_that_came_with_data(name: str) -> None:
    found_here = list(runs_foreign_code(ast.parse(modules()[name].read_text())))
    assert found_here == RUNS_FOREIGN_CODE_BY_CONSENT.get(name, [])
    for found in imports():
        if found.module == name:
            assert not RUNS_CODE_FROM_DATA & {found.target, found.target.split(".")[0]}, found
