"""`make dist` builds the same bytes from the same commit, and the wheel is all that a user needs."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY, environment, write_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (REPOSITORY / ".git").exists(), reason="make dist builds a commit, and this is no git repository"
    ),
]


def build(clone: Path, umask: int) -> dict[str, Path]:
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    make = ["make", "--silent", "-o", ".venv/.installed", "dist"]
    subprocess.run(make, cwd=clone, check=True, umask=umask, stdout=subprocess.DEVNULL)
    return {path.suffix: path for path in sorted((clone / "dist").iterdir())}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_dist_is_the_same_bytes_under_another_umask_and_its_wheel_works_without_the_repository(tmp_path: Path) -> None:
    built, again = build(tmp_path / "one", 0o022), build(tmp_path / "two", 0o077)
    assert set(built) == {".whl", ".gz"}
    assert {name: digest(path) for name, path in built.items()} == {name: digest(path) for name, path in again.items()}

    # An environment with the wheel alone; the packages that it needs are those of this one.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    wheel = str(built[".whl"])
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", wheel],
        check=True,
    )
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    for clone in ("one", "two"):
        shutil.rmtree(tmp_path / clone)

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    def done(*command: str) -> str:
        return subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True, text=True).stdout

    def command(*words: str) -> str:
        return done(str(tmp_path / "venv" / "bin" / "accel-train"), *words)

    where = done(str(python), "-c", "import accel_train; print(accel_train.__file__)")
    assert where.startswith(str(site))
    assert "gpt_tiny\n" in command("recipes")
    assert "none, linear, sqrt" in command("explain", "optimizer.lr_scaling")
    assert "accel-train" in command("completion", "bash")
    rows = [f"{'good' if number % 2 else 'bad'} film number {number},{number % 2}" for number in range(60)]
    write_lines(folder / "reviews.csv", "text,label", *rows)
    found = command("finetune", "reviews.csv", "--schedule.max_steps", "2", "--model.config.num_buckets", "4096")
    assert "runs/reviews.yaml" in found
    assert (folder / "runs" / "reviews.yaml").exists()
    assert (folder / "runs" / "reviews" / "model" / "config.json").exists()
    (folder / "own.txt").write_text("one two three\n" * 2000)
    command("init", "gpt_tiny", "own.yaml")
    tiny = (
        "--data.train own.txt --data.eval_fraction 0 --tokenizer bytes --schedule.max_steps 2 --evaluate.every_steps 0"
    )
    command("run", "own.yaml", *tiny.split())
    command("run", "gpt_tiny", *tiny.split(), "--output_dir", "named")
    assert command("report", "runs/gpt-tiny", "named", "--out", "both.html").strip() == "both.html"
    assert "uPlot" in (folder / "both.html").read_text()
    assert (folder / "named" / "model" / "model.safetensors").stat().st_size > os.stat(folder / "own.yaml").st_size
