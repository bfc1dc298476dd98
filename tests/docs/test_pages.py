"""The pages say what is so: links and anchors lead somewhere, and commands, settings, recipes and code are those of the
program.
"""

import re
import shlex
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.commands import COMMANDS
from accel_train.cli.main import parse_arguments
from accel_train.cli.reference import commands_page, recipes_page, settings_page
from accel_train.core.errors import UserError
from accel_train.experiments.sweep.sweep import Selection, combine
from accel_train.experiments.sweep.values import read_space
from accel_train.recipe.explain import explained
from accel_train.recipe.loader import load_recipe, shipped_recipes
from accel_train.recipe.names import free_names, is_section, recipe_names
from accel_train.recipe.schema import Recipe
from accel_train.training.train import train
from tests.docs.test_scaling_guide import is_taken
from tests.support.runs import REPOSITORY, losses, refused

PAGES = [
    "README.md", "AGENTS.md", "CONTRIBUTING.md", "launch/README.md",
    *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")),
]  # fmt: skip
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SECTIONS = {name.partition(".")[0] for name in recipe_names() if "." in name}
NO_SETTINGS = {"model.generate", "data.py", "model.safetensors", "optimizer.pt"}
"""What looks like a setting, and is none: methods of transformers, files."""
OTHER_FLAGS = {"--nnodes", "--rdzv_backend", "--max_restarts", "--max-restarts", "--count-reads", "--save", "--preset"}
"""Flags of torchrun and of benchmarks."""
PLACEHOLDERS = {"INCIDENT": "runs/a/incidents/step-00000001", "SETTING": "seed", "NAME": "gpt_tiny"}


@cache
def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text()


def blocks(page: str, *languages: str) -> list[str]:
    return [code for language, code in CODE.findall(text_of(page)) if language in languages]


@cache
def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text_of(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    names = re.findall(r"`(?!output_dir)(\w+/[\w/]+(?:\.py|/))`", text_of(page))
    assert page != "docs/architecture.md" or len(names) > 40
    folders = (REPOSITORY / "accel_train", REPOSITORY)
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_the_table_of_files_to_change_names_files_and_functions_that_exist() -> None:
    rows = [
        row
        for row in text_of("docs/architecture.md").partition("## Find the file to change")[2].splitlines()
        if row.startswith("| ")
    ][1:]
    assert len(rows) >= 45
    package, lacking = REPOSITORY / "accel_train", []
    for row in rows:
        path = package / "__init__.py"
        for name in re.findall(r"`([^`]+)`", row.split(" | ", 1)[1]):
            if name.isidentifier():
                found = re.search(rf"^\s*(?:def |class |){name}\b", path.read_text(), re.M) is not None
            elif "/" in name or name.endswith(".py"):
                # A name without a folder lies beside the one before it.
                places = [base / name for base in (package, REPOSITORY, REPOSITORY / "tests", path.parent)]
                place = next((place for place in places if place.exists()), None)
                found = place is not None
                path = place if place is not None and place.is_file() else path
            else:
                continue
            lacking += [] if found else [(row, name)]
    assert lacking == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_leads_somewhere(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text_of(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = ((REPOSITORY / page).parent / path).resolve() if path else REPOSITORY / page
        if not target.exists() or (anchor and anchor not in anchors(str(target.relative_to(REPOSITORY)))):
            broken.append(link)
    assert broken == []


def test_check_of_links_can_fail() -> None:
    assert "a-bad-step-the-guards-policy" in anchors("docs/when_it_goes_wrong.md")
    assert "a-bad-step" not in anchors("docs/when_it_goes_wrong.md")


def inline_code(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", CODE.sub("", text_of(page)))


def is_setting(name: str) -> bool:
    return name in recipe_names() or any(name.startswith(f"{free}.") for free in free_names())


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    named = [match[0] for code in inline_code(page) for match in re.finditer(r"^([a-z_]+(?:\.[a-z_0-9]+)+)", code)]
    unknown = {name for name in named if name.partition(".")[0] in SECTIONS and not is_setting(name)}
    assert unknown - NO_SETTINGS == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    flags = (
        {flag for command in COMMANDS.values() for flag in command.arguments}
        | OTHER_FLAGS
        | {"--help", "--version", "--json"}
    )
    named = [match for code in inline_code(page) for match in re.findall(r"^(--[\w.-]+)", code)]
    unknown = {flag for flag in named if flag not in flags and not is_setting(flag.removeprefix("--"))}
    assert unknown - {"--section.field", "--rdzv_endpoint", "--signal"} == set()


def command_lines(page: str) -> list[str]:
    """Whole lines of shell blocks, and what stands in backticks; flags in brackets taken as given."""
    code = "".join(blocks(page, "", "bash", "console")).replace("\\\n", " ")
    lines = [line.removeprefix("$ ").split(" #")[0].strip() for line in code.splitlines()] + inline_code(page)
    programs = ("accel-train ", "torchrun ", "accelerate launch --config", "python -m accel_train.torchrun ", "sbatch ")
    return [re.sub(r"\[(-[^\]]*|RUN \.\.\.|DATA)\]", r"\1", line) for line in lines if line.startswith(programs)]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("docs/scaling.md", "launch/README.md")])
def test_every_command_line_is_taken_by_its_program(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_scaling_guide.py has the two pages that are left out."""
    monkeypatch.chdir(REPOSITORY)
    for line in command_lines(page):
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
        if len(words) == 1 or words[1] == "COMMAND" or "..." in words or "--section.field" in words:
            continue
        if words[0] == "accel-train" and len(words) == 2 and words[1] in COMMANDS:
            continue  # the command's name alone
        words = ["gpt_tiny" if word == "RECIPE" else word for word in words]
        if words[0] == "accel-train":
            arguments, settings = parse_arguments(words[1:])
            if arguments.command == "sweep":
                selection = Selection(arguments.random, arguments.optuna)
                combine(arguments.recipe, read_space(settings), selection)
            elif getattr(arguments, "recipe", None) in shipped_recipes():
                load_recipe(arguments.recipe, arguments=settings)
        elif not set(words) & {"N", "my.yaml"}:
            is_taken(["recipes/gpt_tiny.yaml" if word == "gpt_tiny" else word for word in words])


def test_check_of_command_lines_can_fail() -> None:
    with pytest.raises(UserError, match="--world 8"):
        parse_arguments(["report", "runs/a", "--world", "8"])
    refused(load_recipe, "gpt_tiny", arguments=["--optimizer.learning_rat", "1"], named="optimizer.learning_rat")


def merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_and_part_of_one_is_taken(page: str) -> None:
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block)
        base = re.match(r"# added to (recipes/\w+\.yaml)", block)
        if base is not None:
            tree = merged(yaml.safe_load(text_of(base[1])), tree)
        assert {"task", "schedule"} <= set(tree), f"neither whole nor `# added to recipes/...`:\n{block}"
        Recipe.model_validate(tree)


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_python_and_what_runs_as_it_stands_runs(page: str, empty_folder: Path) -> None:
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(page, "python")):
        code = compile(block, f"{page}, python block {number}", "exec")
        if block.startswith("# runs as it stands"):
            names = {"__name__": "page"}
        if block.startswith(("# runs as it stands", "# runs after the one before")):
            exec(code, names)
    assert page != "docs/coming_from.md" or names["result"].metrics["loss"] < 1.0


EXCERPTS = {"docs/architecture.md": 1, "docs/hf_trainer.md": 2, "README.md": 1}
"""Python blocks that are compiled and do not run: parts of a file, and scripts of which a page shows the end."""


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_runs_in_a_test_or_says_what_it_needs(page: str) -> None:
    """Those of the quick starts run in test_quick_starts.py, and files and calls of `fit` here and
    in test_readme.py.
    """
    starts = ("# needs ", "# runs ", "# config/", "from accel_train import fit ")
    left = [
        block
        for block in blocks(page, "python")
        if not block.startswith(starts) and not re.match(r"# \w+\.py", block) and page != "docs/quick_starts.md"
    ]
    assert len(left) == EXCERPTS.get(page, 0), left


def test_every_guarantee_has_an_id_of_its_own_and_names_the_tests_that_hold_it() -> None:
    lines = [line for line in text_of("docs/guarantees.md").splitlines() if line.startswith("| ") and "`tests/" in line]
    rows = [re.fullmatch(r"\| ([a-z]+-\d\d) \| .* \| (`tests/.*`) \|", line) for line in lines]
    assert [line for line, row in zip(lines, rows, strict=True) if row is None] == []
    assert len({row[1] for row in rows if row}) == len(lines) > 90
    named = {file for row in rows if row for file in re.findall(r"`([^`]+)`", row[2])}
    assert [file for file in named if not (REPOSITORY / file).is_file()] == []


def test_recipe_of_the_page_for_newcomers_is_its_config_of_nanogpt() -> None:
    (config,) = (block for block in blocks("docs/coming_from.md", "python") if block.startswith("# config/"))
    (recipe,) = (block for block in blocks("docs/coming_from.md", "yaml") if block.startswith("# shakespeare.yaml"))
    theirs: dict[str, Any] = {}
    exec(config, theirs)
    ours = Recipe.model_validate(yaml.safe_load(recipe))
    model, schedule = ours.model.config or {}, ours.schedule
    expected = {
        **{name: model[name] for name in ("n_layer", "n_head", "n_embd")},
        "block_size": model["n_positions"],
        "dropout": model["resid_pdrop"],
        "batch_size": ours.batch.global_batch_size,
        "learning_rate": ours.optimizer.learning_rate,
        "beta2": ours.optimizer.betas[1],
        "max_iters": schedule.max_steps,
        "warmup_iters": schedule.warmup_steps,
        "min_lr": pytest.approx(schedule.min_lr_ratio * ours.optimizer.learning_rate),
        "gradient_accumulation_steps": 1,
    }
    assert {name: theirs[name] for name in expected} == expected


def test_the_task_of_the_page_for_newcomers_learns_by_its_recipe(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/coming_from.md"
    (source,) = (block for block in blocks(page, "python") if block.startswith("# fit_task.py"))
    module = types.ModuleType("fit_task")
    monkeypatch.setitem(sys.modules, "fit_task", module)
    exec(compile(source, f"{page}, fit_task.py", "exec"), module.__dict__)
    (recipe,) = (block for block in blocks(page, "yaml") if block.startswith("# fit_task.yaml"))
    found = list(losses(train(yaml.safe_load(recipe)).output_dir).values())
    assert found[-1] < 0.1 * found[0]


def test_reference_has_every_setting_command_flag_and_recipe() -> None:
    settings, commands, recipes = settings_page(), commands_page(), recipes_page()
    documented = [name for name, info in recipe_names().items() if not is_section(info)]
    assert re.findall(r"^### `(.*)` ", settings, flags=re.MULTILINE) == documented
    assert settings.count("; no default\n") == sum(
        each.default is None for each in explained("") if each.name in documented
    )
    for name, command in COMMANDS.items():
        _, _, below = commands.partition(f"\n## {name}\n")
        own = below.partition("\n## ")[0]
        flags = [flag for flag in command.arguments if flag.startswith("-")]
        assert below
        assert [flag for flag in flags if flag not in own] == []
    assert [name for name in shipped_recipes() if f"## {name}\n" not in recipes] == []


def test_cookbook_has_nineteen_recipes_and_agents_a_hundred_lines_at_most() -> None:
    assert text_of("docs/cookbook.md").count("\n## ") == 19
    assert len(text_of("AGENTS.md").splitlines()) <= 100


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = re.findall(r": (\w+\.md)$", text_of("mkdocs.yml"), flags=re.MULTILINE)
    assert len(named) == len(set(named))
    assert {path.name for path in (REPOSITORY / "docs").glob("*.md")} - set(named) == set()
