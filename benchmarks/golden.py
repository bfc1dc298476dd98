"""Compare what two revisions compute: losses, weights, files, results, readings of data, and exit codes.

    python -m benchmarks.golden --before main~5              the working tree's HEAD against main~5
    python -m benchmarks.golden --before main~5 --only seq2seq --only inputs

Run this before and after a refactoring. Each revision is unpacked below build/golden and driven by its command line
alone:
every recipe for 30 steps in one process, on two DDP and two FSDP2 processes, each command on the finished run,
`finetune --dry-run` on data of many shapes, and the exit codes of bad inputs. Times, paths, and sentences are left out,
so wording may change; floats are compared to the last bit. Prints each path that differs and how many records it
differs in; exit code 1 if any does. Records are kept per commit and reused: `--again` makes them anew. A full revision
takes about 40 CPU minutes.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import REPOSITORY, arguments_of, flags_of

FOLDER = REPOSITORY / "build" / "golden"
STEPS = 30
LIMIT_SECONDS = 900

COMMON = {
    "schedule.max_steps": STEPS,
    "evaluate.max_samples": 64,
    "checkpoint.every_steps": 15,
    "checkpoint.keep": 1,
    "log.every_steps": 1,
}
"""Settings of every run here. The evaluations and the number of epochs of a recipe give way to these."""
TEXT = {
    "tokenizer.train_bpe.vocab_size": 512,
    "data.train": "python-stdlib",
    "data.sequence_length": 64,
    "batch.global_batch_size": 8,
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt_tiny": {},
    "gpt2_124m": {**TEXT, "model.config": "{model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 32, n_positions: 64}"},
    "llama_1b": {
        **TEXT,
        "batch.per_device_batch_size": 4,
        "model.config": "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
        "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}",
    },
    "continue_pretraining": {
        "model.pretrained": "work/gpt_tiny-one/model",
        "data.train": "python-stdlib",
        "data.sequence_length": 64,
        "batch.global_batch_size": 8,
        "batch.per_device_batch_size": 4,
    },
    "sft_lora": {"model.pretrained": "work/gpt_tiny-one/model"},
    "masked_lm": {},
    "multiple_choice": {},
    "question_answering": {},
    "sentence_embedding": {},
    "seq2seq": {},
    "text_classification": {},
    "text_ngrams": {},
    "token_classification": {},
    "image_classification": {},
    "segmentation": {},
}
"""Recipe -> what replaces its downloads and its size."""
DROPPED = {"data.subset": ("gpt2_124m", "llama_1b"), "precision.compile": ("gpt2_124m", "llama_1b")}
LAYOUTS: dict[str, tuple[int, dict[str, str]]] = {
    "one": (1, {}),
    "ddp2": (2, {}),
    "fsdp2": (2, {"parallel.strategy": "fsdp2"}),
}
AFTERWARDS = (
    ("plan", "{recipe}"),
    ("evaluate", "{run}"),
    ("predict", "{run}", "--out", "{run}/predictions.jsonl"),
    ("verify", "{run}"),
    ("export", "{run}", "--out", "{run}/export"),
    ("report", "{run}"),
)
ONCE = (
    ("explain",),
    ("recipes",),
    ("generate", "work/gpt_tiny-one", "--prompt", "def ", "--max-new-tokens", "20"),
    ("find-lr", "seq2seq", "--output_dir", "work/find-lr"),
    ("rehearse", "text_ngrams", "--output_dir", "work/rehearse", "--processes", "2"),
    (
        "sweep",
        "text_ngrams",
        "--output_dir",
        "work/sweep",
        "--seed",
        "0,1",
        "--schedule.max_steps",
        "4",
        "--processes",
        "1",
    ),
    ("report", "work/seq2seq-one", "work/text_ngrams-one"),
)

_MOVING = re.compile(
    r"seconds|_per_second|(^|_)(mfu|time|date|host|pid|port|command|commit|percent|version|digest)($|_)|memory"
    r"|^(accounts|productive_share|checkpoint_bytes|reused|message|how|meaning|about)$"
)
"""Names of values that differ between two runs of one revision, or that are prose."""


def comparable(value: Any, name: str = "") -> Any:
    """Reduce a JSON value to what two revisions must share: floats as hex, no prose, no paths, no times."""
    if isinstance(value, Mapping):
        return {key: comparable(each, str(key)) for key, each in value.items() if not _MOVING.search(str(key))}
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(each, Mapping) and "name" in each for each in value)
    ):
        return {each["name"]: comparable({**each, "name": None}) for each in value}
    if isinstance(value, list | tuple):
        return [comparable(each, name) for each in value]
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, str):
        # A choice and its reason: `no (cpu: fp32 is exact)`.
        word = re.match(r"(\S+) \(", value)
        value = word.group(1) if word else value
        return "..." if re.search(r"[\s/]", value) else value
    return value


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a JSON value with its path: `metrics.3.loss`."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from flat(each, f"{path}.{index}")
    else:
        yield path, value


# --- what one revision does ------------------------------------------------------------------------------------------


Make = Callable[["Revision"], dict[str, Any]]


@dataclass(frozen=True)
class Revision:
    """A commit that is unpacked below build/golden, with its records."""

    commit: str
    folder: Path

    @classmethod
    def unpack(cls, name: str, *, again: bool) -> "Revision":
        """Unpack the revision NAME; with `again`, forget its records.

        Raises:
            SystemExit: git does not know NAME (exit code 2).
        """
        git = ["git", "-C", str(REPOSITORY)]
        found = subprocess.run([*git, "rev-parse", "--verify", f"{name}^{{commit}}"], capture_output=True, text=True)
        if found.returncode:
            print(f"{name}: unknown revision. Give a commit, a branch, or a tag.", file=sys.stderr)
            raise SystemExit(2)
        commit = found.stdout.strip()
        folder = FOLDER / commit[:12]
        if again:
            shutil.rmtree(folder, ignore_errors=True)
        for part in ("source", "work", "records", "cache", "home"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=archive, check=True)
        return cls(commit, folder)

    def call(self, *arguments: str, processes: int = 1) -> tuple[int, str, str]:
        """Run accel-train with ARGUMENTS on a number of processes; return its exit code, output, and error output."""
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "XDG_"))
        } | {
            "PYTHONPATH": str(self.folder / "source"),
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "80",
        }
        launcher = (
            ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
        )
        command = [sys.executable, "-m", *launcher, "accel_train", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        return done.returncode, done.stdout, done.stderr

    def result(self, *arguments: str) -> dict[str, Any]:
        """Return the exit code and the comparable JSON of one command."""
        code, output, _ = self.call(*arguments, "--json")
        last = output.strip().splitlines()[-1:] or ["null"]
        return {"exit_code": code, "json": comparable(json.loads(last[0]) if last[0].startswith("{") else None)}

    def record(self, name: str, make: Make) -> None:
        """Write the record NAME, unless it is there."""
        file = self.folder / "records" / f"{name}.json"
        if not file.exists():
            record = make(self)
            file.write_text(json.dumps(record, indent=1))
            print(f"{self.commit[:7]} {name}", flush=True)


def train(recipe: str, layout: str, revision: Revision) -> dict[str, Any]:
    """Train RECIPE under LAYOUT, call every command on the run, and return what it wrote."""
    name, (processes, settings) = f"work/{recipe}-{layout}", LAYOUTS[layout]
    shutil.rmtree(revision.folder / name, ignore_errors=True)
    file = revision.folder / "work" / f"{recipe}-{layout}.yaml"
    file.write_text(shrunk(recipe, (revision.folder / "source" / "recipes" / f"{recipe}.yaml").read_text()))
    code, _, errors = revision.call("run", str(file), "--output_dir", name, *flags_of(settings), processes=processes)
    run = revision.folder / name
    record = {"exit_code": code, **(written(run) if code == 0 else {"failed": errors.strip()[-300:]})}
    if layout == "one" and code == 0:
        for command, *rest in AFTERWARDS:
            words = [word.format(run=name, recipe=file) for word in rest]
            record[command] = revision.result(command, *words)
        record["predictions"] = [comparable(row) for row in rows_of(run / "predictions.jsonl")[:200]]
        record["export_files"] = files_of(run / "export")
    return record


def shrunk(recipe: str, text: str) -> str:
    """Return the text of RECIPE for a short run of a small model without a network."""
    import yaml

    tree = yaml.safe_load(text)
    for path, recipes in DROPPED.items():
        if recipe in recipes:
            section, name = path.split(".")
            tree[section].pop(name, None)
    for section, names in (("schedule", ("num_epochs", "warmup_steps")), ("evaluate", ("every_epochs", "every_steps"))):
        for name in names:
            tree.get(section, {}).pop(name, None)
    if tree.get("evaluate", {}).get("generation"):
        tree["evaluate"]["generation"]["max_samples"] = 16
    for path, value in {**COMMON, "evaluate.every_steps": STEPS, **SMALL[recipe]}.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = yaml.safe_load(value) if isinstance(value, str) and value.startswith("{") else value
    return str(yaml.safe_dump(tree, sort_keys=False))


def written(run: Path) -> dict[str, Any]:
    """Return what a run wrote: rows, events, the summary, settings, file names, and a digest of each weight file."""
    import yaml

    return {
        "metrics": [comparable(row) for row in rows_of(run / "metrics.jsonl") if row["split"] != "system"],
        "events": [comparable(row) for row in rows_of(run / "events.jsonl")],
        "summary": comparable(json.loads((run / "summary.json").read_text())),
        "settings": comparable(yaml.safe_load((run / "recipe.resolved.yaml").read_text())),
        "files": files_of(run),
        "weights": {
            str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(run.rglob("*.safetensors"))
            # torch.distributed.checkpoint writes the tensors of a shard in an order that varies.
            if not file.name.startswith("shard-")
        },
    }


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def files_of(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def once(revision: Revision) -> dict[str, Any]:
    """Return the results of the commands that need no run of their own."""
    return {" ".join(words[:2]): revision.result(*words) for words in ONCE}


# --- how it reads data -----------------------------------------------------------------------------------------------


def readings(revision: Revision) -> dict[str, Any]:
    """Return what `finetune --dry-run` finds in data of many shapes, and the recipe that it writes."""
    import yaml

    folder = revision.folder / "data"
    shutil.rmtree(folder, ignore_errors=True)
    record = {}
    for name in write_shapes(folder):
        result = revision.result("finetune", f"data/{name}", "--dry-run", "--output_dir", f"readings/{name}")
        recipe = revision.folder / "readings" / f"{name}.yaml"
        record[name] = {**result, "recipe": comparable(yaml.safe_load(recipe.read_text())) if recipe.exists() else None}
    return record


def write_shapes(folder: Path) -> list[str]:
    """Write data sets of many shapes into FOLDER and return their names."""
    import pyarrow.parquet
    from PIL import Image

    rows = [
        (f"{word} film, number {index}", label)
        for index in range(40)
        for word, label in (("good", "pos"), ("bad", "neg"))
    ]
    table = "\n".join(f'"{text}",{label}' for text, label in rows)
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": label}]}
        for text, label in rows
    ]
    texts: dict[str, str | bytes] = {
        "comma.csv": f"text,label\n{table}\n",
        "semicolon.csv": "text;label\n" + "".join(f"{text};{label}\n" for text, label in rows),
        "tab.tsv": "sentence\tclass\n" + "".join(f"{text}\t{label}\n" for text, label in rows),
        "no_header.csv": table,
        "latin.csv": f"texte,étiquette\n{table}\n".replace("film", "été").encode("latin-1"),
        "numbers.csv": "text,stars\n" + "".join(f'"{text}",{1 + 4 * (label == "pos")}\n' for text, label in rows),
        "pairs.csv": "premise,hypothesis,label\n"
        + "".join(f'"{text}","it is {label}",{label}\n' for text, label in rows),
        "rows.jsonl": "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows),
        "chats.jsonl": "".join(json.dumps(chat) + "\n" for chat in chats),
        "prompts.jsonl": "".join(json.dumps({"prompt": text, "completion": label}) + "\n" for text, label in rows),
        "only_text.jsonl": "".join(json.dumps({"text": text * 9}) + "\n" for text, _ in rows),
        "book.txt": "\n\n".join(text * 9 for text, _ in rows),
        "empty.csv": "",
        "torn.jsonl": '{"text": "a", "label": "b"}\n{"text": "c", "lab',
    }
    folder.mkdir(parents=True)
    for name, content in texts.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    columns = {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    rng = np.random.default_rng(0)
    for index in range(16):
        pixels = rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)
        for part in (f"images/{'cat' if index % 2 else 'dog'}", "scenes/images"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / part / f"{index}.png")
        (folder / "scenes" / "masks").mkdir(exist_ok=True)
        Image.fromarray((pixels[..., 0] > 127).astype(np.uint8)).save(folder / "scenes" / "masks" / f"{index}.png")
    return [*texts, "rows.parquet", "images", "scenes"]


# --- what it refuses -------------------------------------------------------------------------------------------------


BAD = (
    ("run", "no_such_recipe.yaml"),
    ("run", "gpt_tiny", "--optimizer.learning_rat", "1"),
    ("run", "gpt_tiny", "--optimizer.name", "none_such"),
    ("run", "gpt_tiny", "--schedule.type", "none_such"),
    ("run", "gpt_tiny", "--task", "none-such"),
    ("run", "gpt_tiny", "--data.train", "none_such.txt"),
    ("run", "gpt_tiny", "--model.config", "{model_type: none_such}"),
    ("run", "gpt_tiny", "--parallel.tp_size", "2"),
    ("run", "text_classification", "--data.train", "data/torn.jsonl"),
    ("run", "text_classification", "--data.train", "data/comma.csv", "--data.label_column", "none_such"),
    ("plan", "gpt_tiny", "--gpu", "none_such"),
    ("evaluate", "none_such"),
    ("predict", "none_such"),
    ("generate", "work/seq2seq-one"),
    ("export", "work/seq2seq-one", "--out", "work"),
    ("replay", "work/seq2seq-one"),
    ("verify", "none_such"),
    ("watch", "none_such"),
    ("finetune", "none_such"),
    ("finetune", "data/empty.csv"),
    ("explain", "none_such"),
    ("sweep", "gpt_tiny"),
    ("none_such",),
)


def inputs(revision: Revision) -> dict[str, Any]:
    """Return the exit code of each bad input: those above, and a word for every setting that takes a number."""
    settings = json.loads(revision.call("explain", "--json")[1])["result"]["settings"]
    numbers = [each["name"] for each in settings if "number" in each["takes"]]
    wrong = [("plan", "gpt_tiny", f"--{name}", value) for name in numbers for value in ("many", "-7e99")]
    return {" ".join(words): revision.call(*words)[0] for words in (*BAD, *wrong)}


# --- both, compared --------------------------------------------------------------------------------------------------


def tasks(only: Sequence[str]) -> list[tuple[str, Make]]:
    """Return the name and the function of each record, those first that others read."""
    runs = [(f"{recipe}-{layout}", partial(train, recipe, layout)) for recipe in SMALL for layout in LAYOUTS]
    rest = [("readings", readings), ("inputs", inputs), ("once", once)]
    return [(name, make) for name, make in runs + rest if not only or any(word in name for word in only)]


def make_records(revision: Revision, only: Sequence[str], jobs: int) -> None:
    """Make the records that are missing, JOBS at a time."""
    wanted = tasks(only)
    needed = (
        {"seq2seq-one", "text_ngrams-one", "readings"} if {"inputs", "once"} & {name for name, _ in wanted} else set()
    )
    if any(name.startswith(("continue", "sft", "once")) for name, _ in wanted):
        needed.add("gpt_tiny-one")
    first = [each for each in tasks(()) if each[0] in needed]
    for batch in (first, [each for each in wanted if each[0] not in needed]):
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda each: revision.record(*each), batch))


def differences(before: Revision, after: Revision, only: Sequence[str]) -> list[str]:
    """Return a line for each path that differs, with the number of records and the first pair of values."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, _ in tasks(only):
        old, new = (
            dict(flat(json.loads((each.folder / "records" / f"{name}.json").read_text()))) for each in (before, after)
        )
        for path in dict.fromkeys([*old, *new]):
            if (left := old.get(path, "(absent)")) != (right := new.get(path, "(absent)")):
                found[re.sub(r"\.\d+", ".*", path)].append(f"{name} {path}: {left} -> {right}")
    return [f"{len(pairs):5d} x {path}\n        {pairs[0]}" for path, pairs in found.items()]


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--before", required=True, metavar="REV", help="the revision to compare with")
    parser.add_argument("--after", default="HEAD", metavar="REV", help="default: HEAD")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="records whose name has WORD; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="records made at the same time; default: 2")
    parser.add_argument("--again", action="store_true", help="make records that exist once more")
    given = parser.parse_args()
    if not tasks(given.only):
        parser.error(f"--only {' '.join(given.only)}: no record has this in its name")
    revisions = [Revision.unpack(name, again=given.again) for name in dict.fromkeys((given.before, given.after))]
    for revision in revisions:
        make_records(revision, given.only, given.jobs)
    lines = differences(revisions[0], revisions[-1], given.only)
    compared = f"{len(tasks(given.only))} records of {revisions[0].commit[:12]} and {revisions[-1].commit[:12]}"
    print("\n".join([*lines, f"{compared}: {len(lines)} paths differ" if lines else f"{compared}: identical"]))
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
