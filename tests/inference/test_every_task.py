"""A run of each task predicts what its description says, is exported, and has a card whose code runs."""

import html
import json
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from PIL import Image

from accel_train.cli.main import main
from accel_train.core.model_card import FILE, FOLDER, SCORES, Card
from accel_train.inference.export import load_exported
from accel_train.inference.predict import predict_rows
from accel_train.inference.push import push_run
from accel_train.recipe.tasks import TASKS
from accel_train.report.run import command_to_use, how_to_use
from accel_train.task import is_of_transformers
from tests.inference.conftest import Cli, code_of
from tests.support.every_task import CASES, recipe_of, task_of
from tests.support.wording import raises_golden

COLUMNS = {
    "text": {"generated"},
    "tokens": {"filled", "tokens", "score"},
    "class": {"label", "score"},
    "tags": {"words", "tags", "scores"},
    "answer": {"question", "answer", "score"},
    "choice": {"label", "ending", "score"},
    "boxes": {"labels", "scores", "boxes"},
    "mask": {"mask"},
    "vector": {"similarity"},
}
"""Columns by what a task gives. A row of one text has an `embedding` instead."""
OTHER_COLUMNS = {"text-classification of numbers": {"value"}}


@pytest.fixture(scope="module", params=CASES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a case, and its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = recipe_of(request.param, folder, schedule={"max_steps": 2, "warmup_steps": 0})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", str(folder / "recipe.yaml")]) == 0
    return request.param, folder / "run"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_predictions_have_the_columns_of_what_the_task_gives(finished: tuple[str, Path], cli: Cli) -> None:
    case, run = finished
    gives = TASKS[task_of(case)].gives
    if gives == "continuation":
        assert f"accel-train generate {run}" in cli(f"predict {run}", code=2)
        return
    assert f"accel-train predict {run} DATA" in cli(f"generate {run}", code=2)
    cli(f"predict {run} --out rows.jsonl")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert gives is not None
    assert OTHER_COLUMNS.get(case, COLUMNS[gives]) <= rows[0].keys()
    # The rows in memory would name masks that nobody wrote.
    if gives == "mask":
        assert {Path(row["mask"]).is_file() for row in rows} == {True}
        with raises_golden():
            predict_rows(run, "x")
    cli(f"predict {run} --out rows.json", code=0 if gives == "boxes" else 2)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # the tokenizer of bytes
def test_the_code_of_the_card_runs_on_the_saved_model(finished: tuple[str, Path]) -> None:
    _, run = finished
    Image.new("RGB", (40, 30)).save("image.png")
    code = code_of((run / "model" / FILE).read_text())
    assert FOLDER in code
    with redirect_stdout(StringIO()) as printed:
        exec(code.replace(FOLDER, str(run / "model")), {})
    assert printed.getvalue().strip()


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_the_last_lines_of_a_run_and_its_report_show_a_command_and_code_that_run(
    finished: tuple[str, Path], cli: Cli
) -> None:
    case, run = finished
    recipe = yaml.safe_load((run / "recipe.resolved.yaml").read_text())
    page = html.unescape((run / "report.html").read_text())
    command = command_to_use(run, recipe)
    assert command in page
    assert FOLDER not in page
    Path("FOLDER").mkdir()
    Image.new("RGB", (40, 30)).save("FOLDER/image.png")
    data = recipe["data"]["train"]
    if TASKS[task_of(case)].gives == "tokens":
        # The corpus has no tokens to fill in.
        Path(data := "masked.jsonl").write_text(json.dumps({"text": "a [MASK]"}))
    program, name, *words = shlex.split(command)
    assert (program, name) == ("accel-train", "generate" if TASKS[task_of(case)].gives == "continuation" else "predict")
    cli(name, *(data if word.startswith("NEW.") else word for word in words))
    first, *lines = how_to_use(run, recipe)
    assert (first, lines[0].strip()) == ("Use it:", command)
    if lines[1].startswith("  in Python: see "):
        assert Path(lines[1].removeprefix("  in Python: see ")).read_text().count("```python") == 1
        return
    Path("FOLDER/image.png").rename("image.png")
    with redirect_stdout(StringIO()) as printed:
        exec("\n".join(line.removeprefix("  ") for line in lines[1:]), {})
    assert printed.getvalue().strip()


def test_a_pushed_card_has_the_tasks_names_and_the_scores(finished: tuple[str, Path]) -> None:
    case, run = finished
    spec, card = TASKS[task_of(case)], push_run(run, "me/tiny", is_dry_run=True).card
    metadata = yaml.safe_load(Card.parse(card).metadata)
    assert (metadata["library_name"], metadata["pipeline_tag"]) == (spec.library, spec.pipeline)
    assert "license" not in metadata
    assert metadata["tags"] == ["accel_train", *spec.tags]
    assert spec.learns in card
    assert (FOLDER in card, str(run.parent) in card) == (False, False)
    assert '"me/tiny"' in code_of(card)
    summary = json.loads((run / "summary.json").read_text())["eval"]
    scores = dict(Card.parse(card).sections)[SCORES]
    assert all(f"| {name} |" in scores for name in summary.keys() - {"num_targets"})


def test_an_export_is_for_from_pretrained_and_a_graph_of_what_is_generated_is_refused(
    finished: tuple[str, Path], cli: Cli
) -> None:
    case, run = finished
    cli(f"export {run} --out out")
    assert is_of_transformers(load_exported("out"))
    assert code_of(Path("out", FILE).read_text())
    if TASKS[task_of(case)].gives in ("text", "continuation"):
        assert "token by token" in cli(f"export {run} --onnx", code=2)
