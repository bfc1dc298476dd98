"""The quick starts and the cookbook, done as a reader would: the blocks of a section in order, and what each command
prints.
"""

import re
import shlex
from pathlib import Path

import pytest

from accel_train.cli.main import main
from tests.support.runs import REPOSITORY, write_lines

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(python|console|bash)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
QUICK = ("--schedule.max_steps", "2", "--log.progress", "false")
TINY = ("--data.train", "own.txt", "--data.eval_fraction", "0.1", "--tokenizer", "bytes")
"""For recipes of language models: text that is there, and needs no tokenizer."""
FEWER_RUNS = {"--seed": "0", "--random": "2", "--optuna": "2"}
"""Of a sweep: what is tried in place of what the page says."""
SHORT = {
    **dict.fromkeys(("run", "finetune", "sweep"), ("--schedule.max_steps", "2")),
    "find-lr": ("--steps", "20"),
}
STAND_INS = {"RECIPE": "gpt_tiny", "RUN": "runs/gpt-tiny", "DATA": "own.csv", "FOLDER": "exported", "NAME": "me/mine"}
OF_PAGE = {"docs/tasks.md": {"FOLDER": "own"}, "docs/scaling.md": {"RECIPE": "gpt2_124m"}}
COMMANDS = {
    "README.md": {"finetune"},
    "AGENTS.md": {
        *("finetune", "recipes", "explain", "plan", "prepare", "rehearse", "run", "evaluate", "verify", "report"),
        *("export", "push", "doctor"),
    },
    "docs/cookbook.md": {"explain", "evaluate", "predict", "export", "push", "sweep", "find-lr", "plan"},
    "docs/faq.md": {"run"},
    "docs/programs.md": {"plan", "run"},
    "docs/scaling.md": {"plan", "prepare", "doctor"},
    "docs/tasks.md": {"run", "finetune"},
    "docs/when_it_goes_wrong.md": {"run", "verify"},
}
"""Commands in the blocks of each page."""
NARROW = (
    "{model_type: modernbert, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, "
    "layer_types: [full_attention]}"
)


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (REPOSITORY / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


QUICK_STARTS = {name: text for name, text in sections("docs/quick_starts.md").items() if "```" in text}


@pytest.fixture(autouse=True)
def folder(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder, a cache of its own, and no launch."""
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(empty_folder / "cache"))


def without_numbers(line: str) -> str:
    """Numbers depend on the machine and the version of Python, and so do the blanks before them.

    The test trains for two steps, so its model beats no baseline.
    """
    line = re.sub(r"best baseline: .*", "best baseline: ...", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "#", line)).strip()


@pytest.mark.parametrize("name", QUICK_STARTS)
def test_quick_start_runs_and_prints_what_the_page_shows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for language, block in BLOCK.findall(QUICK_STARTS[name]):
        if language == "python":
            exec(compile(block, name, "exec"), {"__name__": "page"})
            continue
        command, *shown = block.removeprefix("$ ").splitlines()
        words = shlex.split(command)[1:]
        capsys.readouterr()
        assert main([*words, *(QUICK if words[0] == "finetune" else ())]) == 0
        printed = iter([without_numbers(line) for line in capsys.readouterr().out.splitlines()])
        for line in map(without_numbers, shown):
            assert line == "..." or line in printed, f"{line}\nis not printed, or not at this place, by: {command}"


def own_files() -> None:
    """What the pages say that the reader has."""
    write_lines("own.txt", *(f"The number {number} is followed by {number + 1}." for number in range(2000)))
    rows = [f"{'good' if number % 2 else 'bad'} film number {number},{number % 2}" for number in range(80)]
    Path("own").mkdir()
    for name in ("own.csv", "other.csv", "own/own.csv"):
        write_lines(name, "text,label", *rows)


def words_of(line: str, page: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a line that calls the program, on small data; none for other programs."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["export"]:
        monkeypatch.setenv(words[1].partition("=")[0], "http://127.0.0.1:9/")  # nobody listens there
    if words[:1] != ["accel-train"] or "INCIDENT" in words:
        return []
    words = [(STAND_INS | OF_PAGE.get(page, {})).get(word, word) for word in words[1:]]
    words = [FEWER_RUNS.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    tiny = TINY if words[1:2] in (["gpt_tiny"], ["gpt2_124m"]) else ()
    return [*words, *tiny, *SHORT.get(words[0], ())]


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_of_a_page_run_in_their_order(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those whose block says in its first line what they need, and those of other programs."""
    own_files()
    if page == "docs/cookbook.md":
        columns = ("--data.train", "own.csv", "--data.eval_fraction", "0.2", "--data.text_columns", "[text]")
        trained = ("--output_dir", "runs/text-classification", "--data.label_column", "label", *columns)
        model = ("--model.config", NARROW, "--tokenizer", "bytes")
        assert main(["run", "text_classification", *model, *trained, *QUICK]) == 0
    done = set()
    for language, block in BLOCK.findall((REPOSITORY / page).read_text()):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" and "# needs" not in block else ():
            if words := words_of(line, page, monkeypatch):
                assert main(words) == 0, f"{line}\n{capsys.readouterr()}"
                done.add(words[0])
    assert done == COMMANDS[page]


def test_output_of_the_page_about_finetune_is_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """And its lines of Python run after it."""
    words = {"bad": "waste dull", "mixed": "fair long", "good": "great fine"}
    stars = [*["bad"] * 319, *["mixed"] * 291, *["good"] * 290]
    rows = [f"{n},{' '.join([words[star], 'film', *[f'w{n % 7}'] * 19])},{star}" for n, star in enumerate(stars)]
    write_lines("reviews.csv", "id,review,stars", *rows)
    page = (REPOSITORY / "docs/finetune.md").read_text()
    shown = page.partition("```\n$ ")[2].partition("```")[0]
    command, *lines = shown.splitlines()
    assert main([*shlex.split(command)[1:], *QUICK]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.strip() != "..." and line not in printed] == []
    (block,) = (code for language, code in BLOCK.findall(page) if language == "python")
    exec(compile(block.replace("num_epochs", "max_steps"), "docs/finetune.md", "exec"), {"__name__": "page"})
    assert [float(line) > 0.3 for line in capsys.readouterr().out.splitlines() if line.startswith("0.")] == [True]
