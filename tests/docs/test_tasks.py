"""The pages' lists of tasks, extras, and exit codes are those of the program."""

import ast
import inspect
import re
import tomllib

from accel_train.cli import main
from accel_train.recipe.tasks import TASKS
from accel_train.runtime import exit as ending
from tests.support.docs_tables import tasks_table
from tests.support.runs import REPOSITORY
from tests.support.wording import assert_generated

FOR_DEVELOPERS = {"dev", "docs", "mutants"}
SERVICES = {"wandb", "trackio", "buckets"}


def test_the_page_about_tasks_has_the_table_of_the_program() -> None:
    assert_generated(REPOSITORY / "docs" / "tasks.md", "the description of each task", tasks_table().rstrip("\n"))
    for task, spec in TASKS.items():
        (row,) = (line for line in tasks_table().splitlines() if line.startswith(f"| `{task}` |"))
        assert spec.learns in row
        assert spec.takes in row
        assert f" | `{spec.metrics[0]}`" in row
        assert re.search(r"\| `\w+`", row.partition(spec.metrics[0])[2]), "each task has a recipe"


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {name: needs for name, needs in project["optional-dependencies"].items() if name not in FOR_DEVELOPERS}


def test_the_questions_name_every_extra_and_tasks_name_extras_that_exist() -> None:
    (listed,) = re.findall(
        r"^Extras, as in (?:.*?): (.*?)\.", (REPOSITORY / "docs" / "faq.md").read_text(), re.M | re.S
    )
    assert {*re.findall(r"`(\w+)`", listed), "all"} == extras().keys()
    assert {spec.extra for spec in TASKS.values()} - {""} <= extras().keys()


def test_the_extra_all_has_every_extra_but_services_and_the_docker_image_has_it() -> None:
    named = {name for each in extras()["all"] for name in re.findall(r"\w+", each.partition("[")[2])}
    assert named == extras().keys() - {"all"} - SERVICES
    assert "'/src[all]'" in (REPOSITORY / "Dockerfile").read_text()


def test_pages_and_help_name_the_exit_codes_of_the_program() -> None:
    tree = ast.parse(inspect.getsource(ending.exit_code))
    codes = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int}
    codes |= {0, ending.INTERRUPTED, ending.OUTPUT_CLOSED}
    table = (REPOSITORY / "AGENTS.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    assert {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")} == codes
    assert {*map(int, re.findall(r"^    (\d+) ", main.__doc__ or "", re.M))} == codes
