"""Runs of one recipe for each combination of some settings' values, one after the other, each a run of its own that resumes.

The folder of a combination lies in the recipe's `output_dir` and has the values for its name: `lr=1e-4,seed=0`.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.errors import Preempted
from accel_train.core.files import make_folders
from accel_train.core.format import format_count, format_seconds
from accel_train.core.json_io import json_digest, json_text
from accel_train.core.ownership import check_file, write_file
from accel_train.core.state import JsonRecord
from accel_train.experiments.subprocess_run import TrainingProcess
from accel_train.experiments.sweep_table import Row, describe_rows, format_rows, row_of
from accel_train.observe.run_folder import SUMMARY_FILE, read_record
from accel_train.plan.place import count_processes
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.schema import Recipe
from accel_train.report.report import write_report
from accel_train.runtime.signals import StopRequest

SWEEP_FILE = "sweep.json"
LOG_FOLDER = ".logs"
REPORT_FILE = "comparison.html"
SHORT_NAMES = {"learning_rate": "lr", "weight_decay": "wd", "global_batch_size": "batch"}
LONGEST_NAME = 120
"""Characters; a longer name of a folder is cut, and ends with a digest."""
MOST_RUNS = 1000
ATTEMPTS = 3
"""Launches of a run that asks for the same command again (it ran out of memory and remembers a smaller micro-batch)."""
STOP_SECONDS = 600.0
POLL_SECONDS = 0.1
FINISHED, FAILED, STOPPED, WAITING = "finished", "failed", "stopped", "waiting"


class Combination(NamedTuple):
    """One choice of values: the name of its folder, the swept values by their setting, and the recipe that comes of it."""

    name: str
    values: dict[str, str]
    recipe: Recipe


class Swept(NamedTuple):
    """The outcome of a sweep: its table, the report that compares the runs (None: none has trained), its exit code, and its folder."""

    table: str
    report: Path | None
    exit_code: int
    root: Path


def split_values(text: str) -> list[str]:
    """Return the values of `1e-4,3e-4`: commas within brackets, braces and quotation marks do not split."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def split_settings(settings: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the settings of one value as they are, and the values of the others by name.

    Raises:
        ValueError: no setting has several values, or a value is empty, given twice, or of a setting that cannot be swept.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    rest = list(settings)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        words = [f"{flag}{equals}{text}"]
        if not equals and rest and not rest[0].startswith("--"):
            words.append(text := rest.pop(0))
        values, name = split_values(text), flag.removeprefix("--")
        if len(values) == 1:
            fixed += words
            continue
        if name == "output_dir" or name in swept:
            problem = "takes one value: the folder of all runs" if name == "output_dir" else "is given twice"
            raise ValueError(f"{flag} {problem}")
        if "" in values:
            raise ValueError(f"{flag} {text}: a value is empty; write the values with one comma between two")
        if twice := [value for value, times in Counter(values).items() if times > 1]:
            raise ValueError(f"{flag} {text}: {twice[0]} is there twice; give each value once")
        swept[name] = values
    if not swept:
        raise ValueError("there is nothing to sweep; give a setting several values, with commas: --seed 0,1,2")
    return fixed, swept


def combine(
    path: str, settings: Sequence[str], *, num_random: int | None = None, draw_seed: int = 0
) -> list[Combination]:
    """Return the combinations of a grid, or `num_random` of them drawn without repetition, each with its recipe.

    Raises:
        ValueError: as `split_settings`; a recipe is wrong (a line a problem); there are too many, or too few to draw from.
    """
    fixed, swept = split_settings(settings)
    size = prod(map(len, swept.values()))
    if num_random is not None and not 1 <= num_random <= size:
        raise ValueError(f"--random={num_random}: must be between 1 and {size}, the number of combinations")
    if num_random is None and size > MOST_RUNS:
        raise ValueError(
            f"these are {size:,} combinations, more than {MOST_RUNS:,}; leave out values, or draw some: --random 20"
        )
    drawn = range(size) if num_random is None else sorted(random.Random(draw_seed).sample(range(size), num_random))
    keys = _short_keys(swept)
    problems: dict[str, None] = {}
    found = []
    for number in drawn:
        values = _combination(swept, number)
        words = [word for name, value in values.items() for word in (f"--{name}", value)]
        try:
            recipe = load_recipe(path, arguments=[*fixed, *words])
        except ValueError as error:
            problems.update(dict.fromkeys(str(error).splitlines()))
            continue
        found.append(Combination(_folder_name(keys, values), values, recipe))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _combination(swept: dict[str, list[str]], number: int) -> dict[str, str]:
    """Return one of all combinations; the last setting changes from each to the next."""
    values = {}
    for name in reversed(swept):
        number, place = divmod(number, len(swept[name]))
        values[name] = swept[name][place]
    return {name: values[name] for name in swept}


def sweep(
    path: str,
    settings: Sequence[str],
    *,
    num_random: int | None = None,
    draw_seed: int = 0,
    processes: int | None = None,
    say: Callable[[str], None],
    launch: Callable[..., TrainingProcess] = TrainingProcess,
) -> Swept:
    """Train each combination in a process of its own; finished ones are skipped, others resume.

    A run that fails does not end the sweep. The exit code is 0 where every run has finished or was stopped by its guard and
    one at least has finished, else that of the first other failure.

    Raises:
        ValueError: as `combine`, before anything runs; a file of the user's is in the way.
        Preempted: a signal came; the run of that moment was asked to save.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"--processes={processes}: must be at least 1")
    combinations = combine(path, settings, num_random=num_random, draw_seed=draw_seed)
    fixed, _ = split_settings(settings)
    root = Path(combinations[0].recipe.output_dir)
    world_size = count_processes(processes, None)
    try:
        make_folders(root)
    except OSError as error:
        raise ValueError(
            f"output_dir={root} cannot be written: {error.strerror}; give a folder you can write"
        ) from error
    for name in (SWEEP_FILE, REPORT_FILE):
        check_file(root / name, root, str(root / name))
    earlier = {record.get("name"): record for record in read_record(root / SWEEP_FILE).get("runs", [])}
    records = [_begun(each, root, earlier.get(each.name, {})) for each in combinations]
    on = format_count(world_size, "process", "processes")
    say(f"{format_count(len(records), 'run')} on {on}, one after the other, in {root}")
    with StopRequest() as stop:
        for number, (each, record) in enumerate(zip(combinations, records, strict=True), start=1):
            where = f"[{number}/{len(records)}] {each.name}"
            if record["status"] == FINISHED:
                say(f"{where}: finished before")
                continue
            say(f"{where}: training; its output is in {root / LOG_FOLDER / each.name}.txt")
            words = [*fixed, *(word for name, value in each.values.items() for word in (f"--{name}", value))]
            _write(root, records)
            code, reason = _train(launch, each.name, path, words, root / each.name, world_size, stop, record)
            row = row_of(root / each.name, each.recipe, each.values)
            record.update(exit_code=code, metric=row.metric, value=row.value)
            record["status"] = FINISHED if code == 0 else STOPPED if stop.requested else FAILED
            _write(root, records)
            result = (
                f"{row.metric} {row.value:.4g}"
                if code == 0 and row.value is not None
                else reason * (not stop.requested)
            )
            say(f"{where}: {record['status']} in {format_seconds(record['seconds'])}{f': {result}' if result else ''}")
            if stop.requested and any(record["status"] != FINISHED for record in records):
                raise Preempted(f"{each.name} was asked to stop; run the same command again to resume the sweep")
    return _conclude(root, combinations, records)


def _train(
    launch: Callable[..., TrainingProcess],
    name: str,
    path: str,
    words: Sequence[str],
    folder: Path,
    world_size: int,
    stop: StopRequest,
    record: JsonRecord,
) -> tuple[int, str]:
    """Run one combination to its end, or to a stop request; return its exit code, and its error in one line."""
    begin, before = time.monotonic(), record["seconds"]
    for _ in range(ATTEMPTS):
        with launch(name, path, words, folder, world_size, log_folder=folder.parent / LOG_FOLDER) as training:
            while (code := training.exit_code()) is None:
                if stop.requested:
                    training.stop(STOP_SECONDS)
                    code = training.exit_code()
                    break
                time.sleep(POLL_SECONDS)
            reason = "" if code == 0 else training.errors().partition("\n")[0]
        record["seconds"] = round(before + time.monotonic() - begin, 3)
        if code != 75 or stop.requested:
            break
    return (1 if code is None else code), reason or ("" if code == 0 else f"exit code {code}")


def _conclude(root: Path, combinations: Sequence[Combination], records: Sequence[JsonRecord]) -> Swept:
    """Write the table of means and the comparison of the runs that have trained."""
    rows = [
        row_of(root / each.name, each.recipe, each.values, str(record["status"]))
        for each, record in zip(combinations, records, strict=True)
    ]
    table = describe_rows(rows, combinations[0].recipe)
    _write(root, records, table.facts)
    trained = [
        root / each.name
        for each in _best_first(combinations, rows, table.order)
        if (root / each.name / "metrics.jsonl").is_file()
    ]
    report = write_report(trained, root / REPORT_FILE, home=root, tables=[table.block]) if trained else None
    failures = [int(record["exit_code"]) for record in records if record["status"] != FINISHED]
    others = [code for code in failures if code != 3]
    return Swept(
        format_rows(table, failed=[(str(r["name"]), int(r["exit_code"])) for r in records if r["status"] != FINISHED]),
        report,
        others[0] if others else 3 if len(failures) == len(records) else 0,
        root,
    )


def _best_first(
    combinations: Sequence[Combination], rows: Sequence[Row], order: Sequence[str]
) -> Iterable[Combination]:
    pairs = sorted(zip(combinations, rows, strict=True), key=lambda pair: order.index(pair[1].name))
    return [each for each, _ in pairs]


def _begun(each: Combination, root: Path, earlier: JsonRecord) -> JsonRecord:
    """Return the line of a combination in sweep.json: finished where it was and its recipe is the same."""
    settings: dict[str, Any] = each.recipe.model_dump(mode="json", exclude={"output_dir"})
    digest = json_digest(settings)
    is_done = earlier.get("status") == FINISHED and earlier.get("recipe_digest") == digest
    if is_done and (root / each.name / SUMMARY_FILE).is_file():
        return earlier
    seconds = earlier.get("seconds", 0.0) if earlier.get("recipe_digest") == digest else 0.0
    return {
        "name": each.name, "settings": each.values, "status": WAITING, "exit_code": None, "seconds": seconds,
        "recipe_digest": digest,
    }  # fmt: skip


def _write(root: Path, records: Sequence[JsonRecord], combinations: Sequence[JsonRecord] = ()) -> None:
    write_file(root / SWEEP_FILE, json_text({"runs": records, "combinations": combinations}).encode(), root)


def _short_keys(names: Iterable[str]) -> dict[str, str]:
    """Return a short name a setting: its last part, or all of it where two would be the same."""
    last = {name: name.rpartition(".")[2] for name in names}
    short = {name: SHORT_NAMES.get(part, part) for name, part in last.items()}
    times = Counter(short.values())
    return {name: part if times[part] == 1 else name for name, part in short.items()}


def _folder_name(keys: dict[str, str], values: dict[str, str]) -> str:
    """Return `lr=1e-4,seed=0`; a digest follows where characters had to be replaced or the name is too long."""
    whole = ",".join(f"{keys[name]}={value}" for name, value in values.items())
    safe = re.sub(r"[^A-Za-z0-9._+=,-]+", "_", whole)
    return safe if safe == whole and len(safe) <= LONGEST_NAME else f"{safe[:LONGEST_NAME]}-{json_digest(whole)[:6]}"
