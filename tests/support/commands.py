"""Commands of the program, run in this process."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from accel_train.cli.main import main


class Printed(NamedTuple):
    """What a command printed on standard output and standard error."""

    out: str
    err: str


def call(*words: object, code: int = 0, named: str = "") -> Printed:
    """Run `accel-train WORDS`, check its exit code, and return what it prints.

    A failed command has to print all parts of `named`, which bars divide, on standard error, and others on standard
    output.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = main([*map(str, words)])
    printed = Printed(out.getvalue(), err.getvalue())
    assert found == code, (words, *printed)
    text = printed.err if code else printed.out
    assert [part for part in named.split("|") if part not in text] == [], (words, text)
    return printed


def error_line(*words: object, named: str = "") -> str:
    """Return the one error line of a command that ends with exit code 2."""
    said = call(*words, code=2, named=named).err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    return line


def dry_run(path: str, *flags: str, named: str = "") -> tuple[str, Any]:
    """Run `finetune PATH --dry-run`; return what it prints and the recipe that it writes."""
    printed = call("finetune", path, "--dry-run", *flags, named=named).out
    (written,) = re.findall(r"^recipe: (.+) \(", printed, flags=re.MULTILINE)
    return printed, yaml.safe_load(Path(written).read_text())


def refused_data(path: str, *flags: str, named: str = "") -> str:
    """Return the error of `finetune PATH --dry-run` about data that it refuses."""
    return call("finetune", path, "--dry-run", *flags, code=2, named=named).err
