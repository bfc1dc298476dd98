"""The user's request, the recognized data, and the recipe file: each value with its reason."""

import glob
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from accel_train.core.files import make_folders, write_atomically
from accel_train.core.format import did_you_mean, format_count
from accel_train.core.redaction import redact
from accel_train.core.state import Choice, Choices, JsonRecord
from accel_train.core.terminal import is_main, printable
from accel_train.data.builtin.digit_scenes import EMBEDDED_IMAGES
from accel_train.data.delimited import columns_by_setting
from accel_train.data.labels import class_notes
from accel_train.data.sources import EMBEDDED_CORPORA, Source, file_kind
from accel_train.data.tables import column_names, columns_read
from accel_train.recipe.loader import Recipe, load_recipe, make_recipe
from accel_train.recipe.tasks import ANY_TASK, TASKS
from accel_train.recipe.yaml_core import one_line

Names = tuple[str, ...]
"""Names of columns or files."""


@dataclass(frozen=True)
class Asked:
    """The user's request: the path, and flags."""

    path: str
    data: Any
    """Section `data` of `ANY_TASK`, with the settings of the command line. The path is `data.train`."""
    task: str | None = None
    text: Names = ()
    """Name of the text column, or of two columns that are read as a pair."""
    label: Names = ()
    """Name of the label column, or of several columns of 0 and 1."""
    problem_type: str = "auto"
    """Setting `model.problem_type`. Default: auto."""
    given: frozenset[str] = frozenset()
    """Dotted names of the settings on the command line. finetune does not choose these settings."""

    @property
    def place(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def flags(self) -> dict[str, Names]:
        """Return the columns that the flags name, by flag."""
        return {"--text": self.text, "--label": self.label}

    @property
    def is_open(self) -> bool:
        """Return whether no flag names the task or a column."""
        return self.task is None and not self.text and not self.label

    def allows(self, *tasks: str) -> bool:
        """Return whether the flag leaves the task open, or names one of these."""
        return self.task in (None, *tasks)

    def encoded(self, text: str) -> bytes:
        """Return text in the encoding that the recipe will name."""
        return text.encode(self.data.encoding if "data.encoding" in self.given else "utf-8")

    def jsonl(self, rows: Iterable[Any]) -> bytes:
        return self.encoded("".join(f"{json.dumps(row)}\n" for row in rows))


class Converted(NamedTuple):
    """Files in a form that finetune reads, by name, and words about the conversion."""

    files: Mapping[str, bytes]
    how: str = ""


@dataclass(frozen=True)
class Found:
    """The recognized data: task, sizes, and columns."""

    task: str
    why: str
    """Reason for the task."""
    description: str = ""
    """Path, sizes, and columns, in words."""
    num_samples: int = 0
    """Number of rows, texts, or images. For plain text, the number of files."""
    num_dropped: int = 0
    """Number of rows without a label, which are left out."""
    settings: Choices = field(default_factory=dict)
    """Settings of the section `data`, and other settings that depend only on the data."""
    num_chars: int = 0
    """Characters of all texts."""
    longest: int = 0
    """Length of a long text in characters. One of 20 texts is longer."""
    longest_target: int = 0
    """The same for the texts that a seq2seq model writes."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Samples by class. Empty without classes."""
    edge: int = 0
    """Short edge of the median image, in pixels."""
    aspect: float = 1.0
    """Width of the median image divided by its height."""
    has_one_label: bool = False
    """Whether each text has exactly one label, as opposed to a number or a list of labels."""
    is_gray: bool = False
    is_chat: bool = False
    eval_fraction: float | None = None
    """Held-out share from the command line, or 0 with named evaluation data. None: finetune chooses it."""
    read: Names = ()
    """Columns that are read without a setting that names them."""
    unused: Names | None = None
    """Columns and files that are not read. None if unknown."""
    test: str | None = None
    """File or folder of test data. Training does not use it."""
    test_has_labels: bool = True
    notes: Names = ()
    """Sentences about how the data are read."""


Answer = Found | str
"""The recognized data, or why they do not have a form."""
MOST_LISTED = 5


def listed(names: Sequence[str]) -> str:
    """Return names separated by commas. Long lists show only the first names."""
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def lengths(sizes: Iterable[int]) -> dict[str, Any]:
    """Return the length fields of `Found` from the sizes of texts in characters."""
    ordered = sorted(sizes)
    return {"num_chars": sum(ordered), "longest": ordered[len(ordered) * 19 // 20]}


def places_of(asked: Asked, train: str | Path, held_out: str | Path | None) -> Choices:
    """Return the settings that name the training data, and evaluation data that their name shows."""
    found: Choices = {"data.train": Choice(str(train))}
    if held_out is not None and "data.eval" not in asked.given:
        found["data.eval"] = Choice(str(held_out), "evaluation data by its name")
    return found


WAIT_SECONDS = 60.0
"""Seconds that a process of a launch waits for the recipe of the first process."""


def default_output_dir(path: str) -> str:
    """Return runs/NAME for a file or folder called NAME."""
    return str(Path("runs") / (Path(path).expanduser().resolve().stem or "finetune"))


def path_of(path: str) -> str:
    """Return a path that is not the name of embedded data: a folder `digits` becomes ./digits."""
    is_name = path in (*EMBEDDED_CORPORA, *EMBEDDED_IMAGES)
    return os.path.join(os.curdir, path) if is_name else path


def check_there(path: str) -> None:
    """Check that a file or folder exists, or that shards match a pattern.

    Raises:
        ValueError: with the nearest name in the same folder.
    """
    place = Path(path).expanduser()
    if os.path.exists(place) or (glob.has_magic(place.name) and any(place.parent.glob(place.name))):
        return
    names = {entry.stem: str(entry) for entry in place.parent.iterdir()} if place.parent.is_dir() else {}
    meant = did_you_mean(place.stem, names, "check the path", show=names.__getitem__)
    raise ValueError(f"{path}: file or folder not found (relative to {Path.cwd()}); {meant}")


def check_header(asked: Asked) -> None:
    """Check that the columns of flags are in the header of a csv or tsv file, before torch is imported.

    A number may name a column of a table without a header, and a comma several columns.

    Raises:
        ValueError: a column is missing; the message names the flag.
    """
    path = asked.place
    named = [
        (flag, name) for flag, names in asked.flags.items() for each in names for name in (each, *columns_read(each))
    ]
    if not named or not path.is_file() or file_kind(path) != "csv":
        return
    names = column_names(Source(asked.path, "", (path,)), asked.data)
    for flag, name in named:
        if name not in names and not name.isdigit() and "," not in name and columns_read(name) == [name]:
            raise ValueError(missing_column(flag, name, asked.path, names))


def missing_column(flag: str, name: str, path: str, names: Sequence[str]) -> str:
    """Return the message about a column that a flag names and a table does not have."""
    meant = did_you_mean(name, names, "choose another.", show=repr)
    return f"{flag} {name}: {path} does not have this column; {meant} Its columns: {', '.join(names)}"


def refuse_columns(asked: Asked, folder: str | Path, what: str) -> None:
    for flag, given in asked.flags.items():
        if given:
            raise ValueError(f"{flag}: {folder} holds {what}, not columns. Leave the flag out, or name a table")


def tree_of(task: str, choices: Choices, output_dir: str) -> JsonRecord:
    """Return the recognized and chosen settings as nested mappings for `make_recipe`."""
    tree: JsonRecord = {"task": task, "output_dir": output_dir}
    for name, choice in choices.items():
        *sections, key = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = choice.value
    return tree


def set_by_flags(recipe: Recipe) -> frozenset[str]:
    """Return the dotted names of the settings that the command line gave."""
    return frozenset(name for name, origin in recipe.origins().items() if origin.kind == "command line")


def format_recipe_file(recipe: Recipe, found: Found, choices: Choices, path: Path) -> str:
    """Return the recipe as YAML: the settings that differ from the defaults, each followed by its reason.

    Raises:
        ValueError: a setting of the command line holds a secret. Secrets are not written to a file.
    """
    reasons = {"task": found.why, **{name: choice.reason for name, choice in choices.items()}}
    flags = set_by_flags(recipe)
    lines = [
        f"# {printable(found.description)}",
        "#",
        f"#   accel-train run {quote(str(path))}",
        "#",
        f"# Written by `accel-train finetune {printable(str(choices['data.train'].value))}`; the reason follows "
        "each value.",
        "# Edit it freely. A run does not resume with other settings, so give an edited recipe another output_dir.",
    ]
    for name, value in _lines(recipe.model_dump(exclude_unset=True)):
        key = name.rpartition(".")[2]
        if redact(value, key) != value:
            raise ValueError(
                f"--{name} holds a secret, and finetune does not write secrets to {path}. Write the "
                "recipe with --dry-run, and give the secret to `accel-train run`"
            )
        reason = "from the command line" if name in flags else reasons.get(name, "")
        shown = "" if value is None else f" {one_line(value)}"
        lines.append("  " * name.count(".") + f"{key}:{shown}" + (f"  # {printable(reason)}" if reason else ""))
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each set field. A top-level section has its own line without a value."""
    for key, value in tree.items():
        is_section = prefix == "" and isinstance(value, dict) and key not in ("tokenizer", "options")
        if value is None or (is_section and not any(each is not None for each in value.values())):
            continue
        yield prefix + key, None if is_section else value
        if is_section:
            yield from _lines(value, f"{key}.")


def keep(path: Path, recipe: Recipe, text: str) -> bool:
    """Write the recipe, and return whether it is new. A file with the same settings stays unchanged.

    Processes of a launch other than the first wait for its file.

    Raises:
        ValueError: a file of that name has other settings, or the file cannot be written.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_main() and not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if path.exists():
        if load_recipe(path) != recipe:
            raise ValueError(
                f"{path} exists, and finetune would now write another recipe (edited file, other data or flags). "
                f"Train the file: accel-train run {quote(str(path))}; or write another: --output_dir DIR, "
                "or --recipe FILE"
            )
        return False
    try:
        make_folders(path.parent)
        write_atomically(path, text.encode())
    except (PermissionError, NotADirectoryError, FileExistsError, FileNotFoundError) as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}). Name another place: --output_dir DIR, or --recipe FILE"
        ) from error
    return True


ROUTINE = {"max_length", "sequence_length", "group_by_length", "eval_fraction", "image_size", "crop_size", "augment"}
"""Settings of `data` that are left out by default: they do not change which data are read, and how."""


def format_choices(found: Found, choices: Choices, recipe: Recipe, *, show_all: bool) -> list[str]:
    """Return lines about the recognized and chosen settings with reasons, without settings of the command line.

    Without `show_all`, only the data and the model are described, with all columns in one line.
    """
    flags = set_by_flags(recipe)
    named = {name: choice for name, choice in choices.items() if choice.reason and name not in flags}
    lines = [found.description, *(f"  {note}" for note in found.notes), f"  task: {found.task} ({found.why})"]
    # The training counts the classes too, so that its lines are enough.
    lines += [f"  {note}" for note in class_notes(found.counts)[0 if show_all else 1 :]] if found.counts else []
    columns = [] if show_all else [name for name in named if name.endswith(("_column", "_columns"))]
    if columns:
        shown = [
            f"{name.removeprefix('data.').partition('_column')[0]} {_short(named[name])} ({named[name].reason})"
            for name in columns
        ]
        lines.append(f"  columns: {', '.join(shown)}")
    for name, choice in named.items():
        section, _, key = name.partition(".")
        is_main = section == "model" or (section == "data" and key.partition(".")[0] not in ROUTINE)
        if show_all or (is_main and name not in columns):
            lines.append(f"  {name}: {_short(choice)} ({choice.reason})")
    return [*lines, summary(found, recipe)]


def summary(found: Found, recipe: Recipe) -> str:
    """Return the sentence that a person checks before training: what is learned from what, and what is left out."""
    data = recipe.data
    is_read = data.model_fields_set if data.lines is None else {"label_column", "text_columns"}
    columns = {
        name: [f"column {each}" if each.isdigit() else each for each in names]
        for name, names in columns_by_setting(data).items()
        if name in is_read
    }
    targets = [each for name in (data.label_setting, *_TARGETS) for each in columns.pop(name or "", ())]
    inputs = [each for name, names in columns.items() if name not in _NOT_LEARNED for each in names]
    unit = "image" if found.edge else "file" if found.task == "causal-lm" else "text"
    unit = "row" if (targets or inputs) and data.lines is None else unit
    classes = len(found.counts) or len(getattr(data, "label_names", None) or ())
    kind = f" ({format_count(classes, 'class', 'classes')})" if classes and len(targets) < 2 else ""
    kind = " (a number)" if recipe.model.problem_type == "regression" else kind
    learned = f"{listed(targets)}{kind} from " if targets else f"to {TASKS[found.task].learns}{kind}, from "
    place = data.train if isinstance(data.train, str) else format_count(len(data.train), "place")
    folder = Path(found.settings["data.train"].value if isinstance(data.train, str) else os.curdir).expanduser().parent
    fed = f"{_joined(inputs)}, " if inputs else ""
    parts = [
        f"Learns {learned}{fed}{format_count(found.num_samples, unit)} of {_below(place, folder)}",
        f"evaluates on {_held_out(found, recipe, unit, folder)}",
    ]
    if found.unused is not None:
        test = [] if found.test is None else [_below(_below(found.test, folder), Path(_below(place, folder)))]
        left = [each for each in found.unused if each.rstrip("/") not in test]
        parts.append(f"leaves out {_joined([*left, *(f'{name} (test data)' for name in test)]) or 'nothing'}")
    return f"{'; '.join(parts)}."


_TARGETS = ("label_columns", "completion_column", "score_column")
"""Columns that a model learns to give, besides `label_setting`."""
_NOT_LEARNED = ("id_column", "group_column")


def _held_out(found: Found, recipe: Recipe, unit: str, folder: Path) -> str:
    data, held = recipe.data, recipe.data.eval
    if held is None and found.task == "image-classification":
        from accel_train.data.images.labelled import eval_beside_train

        held = eval_beside_train(data)[1]
    if held is not None:
        places = [held] if isinstance(held, str) else held
        return "its validation part" if held == data.train else _joined([_below(place, folder) for place in places])
    if not data.eval_fraction:
        return "nothing"
    if found.num_samples == 1:
        return f"its last {data.eval_fraction:.0%}"
    group = getattr(data, "group_column", None)
    count = format_count(max(1, round(found.num_samples * data.eval_fraction)), f"held-out {unit}")
    return f"about {count}{f', by {group}' if group else ''}"


def _below(path: str, folder: Path) -> str:
    """Return a path relative to a folder above it."""
    place = Path(path).expanduser()
    return str(place.relative_to(folder)) if place.is_relative_to(folder) else path


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _short(choice: Choice[Any]) -> str:
    if isinstance(choice.value, dict) and "model_type" in choice.value:
        return str(choice.value["model_type"])
    shown = one_line(choice.value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def how_to_test(found: Found, recipe: Recipe) -> list[str]:
    """Return a line with the command for the test data, if some lie next to the training data."""
    if found.test is None:
        return []
    run, test = quote(recipe.output_dir), quote(found.test)
    command = f"evaluate {run} {test}" if found.test_has_labels else f"predict {run} {test} --out predictions.csv"
    return [f"Test it: accel-train {command}"]


def minimal_recipe(path: str, arguments: Sequence[str]) -> Recipe:
    """Return a recipe that has only the command line's settings, to check them and to know how to read the data.

    Raises:
        ValueError: a setting breaks a rule. The message names the setting.
    """
    tree = {
        "task": ANY_TASK,
        "output_dir": "runs",
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"train": path},
        "schedule": {"max_steps": 10**9},
    }
    return make_recipe(tree, path, arguments=arguments)


def asked_of(path: str, recipe: Recipe, **flags: Any) -> Asked:
    """Return the user's request from a `minimal_recipe` and the flags of the command.

    Raises:
        ValueError: --data.train was given in addition to the path.
    """
    given = set_by_flags(recipe)
    if "data.train" in given:
        raise ValueError("--data.train: PATH already names the training data. Leave one of them out")
    flags["label"] = flags.get("label") or getattr(recipe.data, "label_columns", None) or ()
    return Asked(path, recipe.data, given=given, problem_type=recipe.model.problem_type, **flags)
