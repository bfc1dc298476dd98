"""`--json`: print one JSON object on standard output, and everything else on standard error."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Self

from accel_train.cli.command import Outcome
from accel_train.core.json_io import to_json
from accel_train.core.state import JsonRecord
from accel_train.core.terminal import is_main
from accel_train.runtime.exit import message_of
from accel_train.runtime.watchdog import Watchdog

SCHEMA_VERSION = 1
FLAG = "--json"
FLAG_HELP = "print one JSON object on stdout, and all text on stderr"


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether the words of a command line ask for JSON. Help and version are always text."""
    return FLAG in words and not set(words) & {"-h", "--help", "--version"}


class JsonOutput:
    """Reserves standard output for one JSON object, printed on closing: `with JsonOutput("plan") as output:`.

    Inside the context, standard output is redirected to standard error. This includes Python, libraries, and child
    processes. The main process of a launch prints the object. The others print nothing.
    """

    def __init__(self, command: str | None) -> None:
        self._command = command
        self.outcome = Outcome()
        """Outcome that the caller sets before this closes. An error that leaves the block replaces it."""

    def __enter__(self) -> Self:
        sys.stdout.flush()
        self._stdout, self._kept = sys.stdout, os.dup(1)
        sys.stdout = sys.stderr
        os.dup2(2, 1)
        Watchdog.at_end.append(self._print_at_once)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        Watchdog.at_end.remove(self._print_at_once)
        sys.stdout.flush()
        sys.stdout = self._stdout
        os.dup2(self._kept, 1)
        os.close(self._kept)
        outcome = self.outcome if error is None else Outcome(None, 1, error)
        failed = outcome.error
        reported = None if failed is None else {"type": type(failed).__name__, "message": message_of(failed)}
        if is_main():
            print(self._line(outcome.exit_code, outcome.result, reported), flush=True)

    def _print_at_once(self, kind: str, message: str, exit_code: int) -> None:
        """Print why the watchdog ends this process. The process does not return to its caller."""
        if is_main():
            line = self._line(exit_code, None, {"type": kind, "message": message})
            os.write(self._kept, f"{line}\n".encode(errors="backslashreplace"))

    def _line(self, exit_code: int, result: Any, error: JsonRecord | None) -> str:
        record = {
            "schema_version": SCHEMA_VERSION,
            "command": self._command,
            "ok": exit_code == 0,
            "exit_code": exit_code,
            "result": result,
            "error": error,
        }
        # Other encodings lack letters. Only JSON's own escapes may stand for them, and for names in no encoding.
        is_utf8 = (self._stdout.encoding or "").lower().replace("_", "-") in ("utf-8", "utf8")
        text = json.dumps(to_json(record), allow_nan=False, ensure_ascii=not is_utf8)
        return text.encode(errors="backslashreplace").decode()
