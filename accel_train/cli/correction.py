"""The command line that a mistyped one means: flags of other trainers, missing quotes, one hyphen for two."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from accel_train.cli.command import Command, Words
from accel_train.cli.commands import COMMANDS
from accel_train.cli.json_output import FLAG
from accel_train.core.errors import UserError
from accel_train.core.redaction import redact_words
from accel_train.recipe import names
from accel_train.recipe.names import OTHER_NAMES

_PROCESSES = {
    "num_processes",
    "nproc_per_node",
    "nproc",
    "num_gpus",
    "n_gpus",
    "ngpus",
    "gpus",
    "devices",
    "world_size",
}
_PRECISIONS = {"fp16", "bf16", "fp8"}
_RESUMES = {"resume", "resume_from_checkpoint", "auto_resume"}
_FLAGS = {
    "label_column": "--label",
    "label_columns": "--label",
    "target": "--label",
    "target_column": "--label",
    "text_column": "--text",
    "text_columns": "--text",
    "model_name": "--model",
    "model_name_or_path": "--model",
    "pretrained": "--model",
    "checkpoint": "--model",
    "out": "--output_dir",
    "output": "--output_dir",
    "out_dir": "--output_dir",
}
"""Flags of some commands, by their names in other programs."""
_PLACES = {
    "path": {"data", "dataset", "dataset_name", "train_file", "train_data", "file", "csv"},
    "recipe": {"recipe", "config", "config_file", "yaml"},
    "run": {"run", "run_dir", "output_dir", "checkpoint"},
}
"""Flags for what a command takes without one, by its name there."""
_TABLES = {".csv", ".tsv", ".jsonl", ".json", ".parquet", ".txt"}


def check_is_run(command: str, path: str, data: str | None) -> None:
    """Refuse a file in place of a run.

    Raises:
        UserError: with the command that has the run first.
    """
    if os.path.isfile(path):
        words = ["accel-train", command, data or "RUN", path]
        raise UserError(f"{path} is a file, not the folder of a run. Type: {shlex.join(words)}")


def check_is_recipe(command: str, path: str) -> None:
    """Refuse a table or a folder in place of a recipe.

    Raises:
        UserError: with the command for such data.
    """
    if _is_data(path):
        words = ["accel-train", "finetune", path, *(() if command in ("run", "sweep") else ("--dry-run",))]
        kind = "a folder" if os.path.isdir(path) else "data"
        raise UserError(f"{path} is {kind}, not a recipe. Type: {shlex.join(words)}")


def _is_data(path: str) -> bool:
    is_folder = os.path.isdir(path) and not any(Path(path).glob("*.y*ml"))
    return is_folder or (Path(path).suffix.lower() in _TABLES and os.path.isfile(path))


def corrected(words: Sequence[str], is_accepted: Callable[[Words], object]) -> str | None:
    """Return the command line that the words mean, quoted for a shell; None if it is not clear, or holds a secret.

    `is_accepted` raises UserError for words that the program does not take.
    """
    name = words[0] if words else ""
    if name in ("train", "fit"):
        name = "finetune" if any(map(_is_data, words[1:])) else "run"
    if (command := COMMANDS.get(name)) is None or redact_words(words) != list(words):
        return None
    line = _Line(command, _joined(words[1:]))
    if not line.is_clear or (fixed := [name, *line.places, *line.flags]) == list(words):
        return None
    try:
        is_accepted(list(fixed))
    except UserError:
        return None
    if line.processes is None:
        return shlex.join(["accel-train", *fixed])
    return shlex.join(["torchrun", "--standalone", "--nproc_per_node", line.processes, "-m", "accel_train", *fixed])


class _Line:
    """The words after a command's name, each flag replaced by what it means here."""

    def __init__(self, command: Command, words: Words) -> None:
        self.command = command
        self.places: Words = []
        self.flags: Words = []
        self.processes: str | None = None
        self.is_clear = True
        self._all_places = [name for name in command.arguments if not name.startswith("-")]
        self._rest = words
        while self._rest and self.is_clear:
            word = self._rest.pop(0)
            if not _is_flag(word):
                self.places.append(word)
            elif word in (FLAG, "-h", "--help"):
                self.flags.append(word)
            else:
                flag, equals, value = word.partition("=")
                self._add(flag.lstrip("-"), [value] if equals else None)

    def _add(self, flag: str, values: Words | None) -> None:
        key, own = flag.replace("-", "_"), self.command.arguments
        same = next((name for name in own if name.startswith("-") and name[2:].replace("-", "_") == key), None)
        place = next((p for p in self._all_places[len(self.places) :] if key in _PLACES.get(p, ())), None)
        if same is not None and own[same].get("action") == "store_true":
            self.flags.append(same)
        elif same is not None or _FLAGS.get(key) in own:
            given = self._values(values, many=True)
            self.is_clear = bool(given)
            self.flags += [same or _FLAGS[key], ",".join(given)]
        elif place is not None:
            self.places += self._values(values)
        elif key in _PROCESSES:
            self._add_processes(self._values(values))
        elif key in _PRECISIONS:
            is_off = "".join(self._values(values, only="true|false|1|0|yes|no")).lower() in ("false", "0", "no")
            self.flags += ["--precision.mixed_precision", "no" if is_off else key]
        elif key in _RESUMES and self.command is COMMANDS["run"]:  # a run resumes by itself
            self._values(values, only=None if len(self.places) == len(self._all_places) else "true|false|auto|latest")
        elif self.command.takes_settings:
            self._add_setting(flag, values)
        else:
            self.is_clear = False

    def _add_processes(self, values: Words) -> None:
        flag = next((name for name in ("--world-size", "--processes") if name in self.command.arguments), None)
        if len(values) != 1 or not values[0].isdecimal() or (flag is None and self.command.processes != "all"):
            self.is_clear = False
        elif flag is not None:
            self.flags += [flag, *values]
        else:
            self.processes = values[0]

    def _add_setting(self, flag: str, values: Words | None) -> None:
        if flag in names.recipe_names() or names.is_free(flag):
            name = flag
        elif "--model" in _FLAGS.get(flag.replace("-", "_"), "") and "--model" not in self.command.arguments:
            name = "model.pretrained"
        else:
            near = names.nearest_names(flag)
            name = near[0] if near else flag
            self.is_clear = len(near) == 1 and _is_near(flag, name)
        kinds = names.kinds_of(name) if name in names.recipe_names() else set()
        # A sweep takes the values of a setting with commas between them.
        is_swept = self.command is COMMANDS["sweep"] and tuple not in kinds
        given = self._values(values, many=is_swept or tuple in kinds)
        if is_swept:
            given = [",".join(given)] if given else []
        if not given and bool in kinds:
            given = ["true"]
        self.is_clear = self.is_clear and bool(given)
        self.flags += [f"--{name}", given[0] if len(given) == 1 else f"[{', '.join(given)}]"]

    def _values(self, given: Words | None, *, many: bool = False, only: str | None = None) -> Words:
        """Return the values of a flag: `given`, or the next word, and with `many` all until the next flag.

        More than one belongs to the flag only if the command has its other words already.
        """
        if given is not None:
            return given
        values: Words = []
        while self._rest and not _is_flag(self._rest[0]):
            if only is not None and re.fullmatch(only, self._rest[0].lower()) is None:
                break
            if values and not (many and len(self.places) >= len(self._all_places)):
                break
            values.append(self._rest.pop(0).rstrip(",") if many else self._rest.pop(0))
        return values


def _is_near(flag: str, name: str) -> bool:
    """Return whether the field of a flag is another trainer's name of a setting, its beginning, or almost its name."""
    typed, field = (each.replace("-", "_").rpartition(".")[2] for each in (flag, name))
    return typed in OTHER_NAMES or field.startswith(typed) or bool(get_close_matches(typed, [field], cutoff=0.8))


def _is_flag(word: str) -> bool:
    return re.match("-{1,2}[A-Za-z]", word) is not None


def _joined(words: Sequence[str]) -> Words:
    """Join the words of a list or mapping in brackets that was not quoted."""
    joined: Words = []
    depth = 0
    for word in words:
        opens = re.match(r"(-{1,2}[\w.]+=)?[\[{]", word) is not None
        if depth > 0:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        if depth > 0 or opens:
            depth += sum(map(word.count, "[{")) - sum(map(word.count, "]}"))
    return joined
