"""The quick starts and the cookbook, done as a reader would: the blocks of a section in order, and what each command
prints.
"""

import re
import shlex
from pathlib import Path

import pytest

from accel_train.cli.main import main
from tests.support.runs import REPOSITORY

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(python|console|bash)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
QUICK = ("--schedule.max_steps", "2", "--log.progress", "false")
TINY = ("--data.train", "own.txt", "--data.eval_fraction", "0.1", "--tokenizer", "bytes")
"""For recipes of language models: text that is there, and needs no tokenizer."""
FEWER_RUNS = {"--seed": "0", "--random": "2", "--optuna": "2"}
"""Of a sweep: what is tried in place of what the page says."""
NARROW = (
    "{model_type: modernbert, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, "
    "layer_types: [full_attention]}"
)


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (REPOSITORY / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


QUICK_STARTS = {name: text for name, text in sections("docs/quick_starts.md").items() if "```" in text}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder, a cache of its own, and no launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCEL_TRAIN_DEBUG"):
        monkeypatch.delenv(name, raising=False)


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


def test_commands_of_the_cookbook_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All but those whose block says in its first line what they need."""
    Path("own.txt").write_text("".join(f"The number {number} is followed by {number + 1}.\n" for number in range(2000)))
    rows = [f"{'good' if number % 2 else 'bad'} film number {number},{number % 2}" for number in range(80)]
    for name in ("own.csv", "other.csv"):
        Path(name).write_text("\n".join(["text,label", *rows]) + "\n")
    columns = ("--data.train", "own.csv", "--data.eval_fraction", "0.2", "--data.text_columns", "[text]")
    trained = ("--output_dir", "runs/text-classification", "--data.label_column", "label", *columns)
    assert main(["run", "text_classification", "--model.config", NARROW, "--tokenizer", "bytes", *trained, *QUICK]) == 0
    done = []
    for section, text in sections("docs/cookbook.md").items():
        for block in (
            block for language, block in BLOCK.findall(text) if language == "bash" and "# needs" not in block
        ):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line)[1:]
                more = {
                    "run": (*TINY, *QUICK),
                    "find-lr": (*TINY, "--steps", "20"),
                    "sweep": (*TINY, "--schedule.max_steps", "2"),
                }.get(words[0], ())
                words = [FEWER_RUNS.get(before, word) for before, word in zip(["", *words], words, strict=False)]
                assert main([*words, *more]) == 0, f"{section}: {line}\n{capsys.readouterr()}"
                done.append(words[0])
    assert set(done) >= {"evaluate", "predict", "export", "find-lr", "plan", "sweep"}
