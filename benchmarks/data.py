"""How fast text becomes tokens, tokens become batches, and a resumed run finds its place.

    python -m benchmarks.data --save

Everything is measured in one fresh process on one thread, in CPU time where a figure is a rate; rounds alternate
between the variants, and the table gives the median (least to most). References: nanoGPT's way to draw a batch, a
map-style DataLoader of torch, and accelerate.skip_first_batches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import (
    arguments_of,
    child_environment,
    markdown_table,
    print_result,
    run_child,
    show,
    write_tokens,
)

BAR_TOKENS_PER_CPU_SECOND = 150e6
BAR_SKIP_SECONDS = 0.1
VOCAB_SIZE = 50257


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    corpus: str
    """What is tokenised: an embedded corpus, or a path."""
    shard_tokens: int
    batch_size: int
    sequence_length: int
    batches: int
    """Read per round and variant."""
    order_samples: int
    order_steps: int
    """Steps in a row whose samples are computed, per round."""
    resume_samples: int
    resume_batches: int
    """Where the resumed run goes on."""
    rounds: int
    encoded_bytes: int
    """Python source of this environment that is encoded."""
    encode_rounds: int
    first_step_gib: tuple[int, ...]
    """Sizes of raw texts whose first step is waited for."""
    token_file_bytes: int


FULL = Sizes(
    "python-stdlib", 50_000_000, 12, 1024, 500, 10**9, 2000, 10_000_000, 800_000, 7, 40_000_000, 3, (1, 4), 10**10
)


@dataclass(frozen=True)
class Figure:
    """One row of the table: what, in which unit, and one value per round."""

    part: str
    what: str
    unit: str
    values: list[float]
    bar: str = "-"

    def cells(self) -> list[str]:
        low, middle, high = min(self.values), statistics.median(self.values), max(self.values)
        shown = [f"{value:,.0f}" if abs(middle) >= 100 else f"{value:.3g}" for value in (middle, low, high)]
        return [self.part, self.what, f"{shown[0]} ({shown[1]} to {shown[2]})", self.unit, self.bar]


HEADERS = ("part", "what", "median (least to most)", "unit", "bar")


# --- text to tokens ------------------------------------------------------------------------------------------------


def tokenising(sizes: Sizes, folder: Path) -> list[Figure]:
    """The whole of `prepare_text`: reading, splitting, encoding, writing shards, counting; and its reuse."""
    from accel_train import Recipe
    from accel_train.data.text.corpus import TextCorpus, prepare_text

    def prepare(tokenizer: Any, cache: str) -> TextCorpus:
        data = {"train": sizes.corpus, "cache_dir": str(folder / cache), "sequence_length": sizes.sequence_length}
        model = {"config": {"model_type": "gpt2"}}
        sections = {"model": model, "data": data, "tokenizer": tokenizer, "schedule": {"max_steps": 1}}
        recipe = Recipe.model_validate({"output_dir": "unused", **sections})
        return prepare_text(recipe, progress=False)

    def measure(what: str, tokenizer: Any, cache: str, rounds: int) -> tuple[Figure, TextCorpus]:
        rates = []
        for number in range(rounds):
            start = time.perf_counter()
            corpus = prepare(tokenizer, f"{cache}-{number}")
            seconds = time.perf_counter() - start
            facts = corpus.facts
            rates.append(((facts.train_tokens or 0) + (facts.eval_tokens or 0)) / seconds / 1e6)
        return Figure("tokenise", what, "M tokens/s", rates), corpus

    # Wall time: parts of it run on threads of the tokenizers library.
    byte_figure, corpus = measure("bytes", "bytes", "bytes", 2)
    trained_figure, corpus = measure("BPE 4096, its training included", {"train_bpe": {"vocab_size": 4096}}, "bpe", 1)
    saved = folder / "bpe-tokenizer"
    corpus.tokenizer.save_pretrained(saved)
    given_figure, _ = measure("BPE 4096, given", str(saved), "given", 1)
    start = time.perf_counter()
    prepare("bytes", "bytes-0")
    again = Figure("tokenise", "the same corpus again (shards reused)", "s", [time.perf_counter() - start])
    return [byte_figure, trained_figure, given_figure, again]


def encoding(sizes: Sizes, folder: Path) -> list[Figure]:
    """MiB of text per second of the clock and per CPU second, on the cores that this process may use.

    `prepare_text` reads, splits, encodes, writes, and counts. The references only encode; `datasets.map` also writes.
    """
    import datasets

    from accel_train import Recipe
    from accel_train.data.text import fast_ids
    from accel_train.data.text.corpus import prepare_text
    from accel_train.data.text.documents import cut_text
    from accel_train.data.text.tokenizers import document_encoder, prepare_tokenizer, train_bpe

    texts, num_bytes = list[str](), 0
    for file in sorted(Path(datasets.__file__).parents[1].rglob("*.py")):
        if num_bytes < sizes.encoded_bytes:
            texts.append(file.read_text(errors="replace"))
            num_bytes += len(texts[-1].encode())
    source, saved = folder / "texts.jsonl", folder / "encoder"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_bpe(texts[:: len(texts) // 200 + 1], 32_768)
    tokenizer.save_pretrained(saved)
    chunks = [chunk for text in texts for chunk in cut_text(text)]
    rows = datasets.Dataset.from_dict({"text": texts})
    tiktoken = fast_ids._tiktoken_encoder(prepare_tokenizer(tokenizer))
    assert callable(tiktoken), tiktoken
    numbers = iter(range(10**9))

    def prepare(batches_before_choice: int, order: str) -> None:
        fast_ids._BATCHES_BEFORE_CHOICE = batches_before_choice
        cache = str(folder / f"encode-{next(numbers)}")
        data = {"train": str(source), "cache_dir": cache, "sequence_length": 1024, "order": order}
        model = {"config": {"model_type": "gpt2"}}
        # Epochs are counted, so all shards are made.
        sections = {"model": model, "data": data, "tokenizer": str(saved), "schedule": {"num_epochs": 1}}
        prepare_text(Recipe.model_validate({"output_dir": "unused", **sections}), progress=False)

    def map_rows() -> None:
        arrow = str(folder / f"{next(numbers)}.arrow")
        rows.map(lambda batch: tokenizer(batch["text"]), batched=True, cache_file_name=arrow)

    cases: dict[str, Callable[[], object]] = {
        "prepare_text, with tiktoken": lambda: prepare(2, "shuffled"),
        "prepare_text, without": lambda: prepare(10**9, "shuffled"),
        "prepare_text in shards, with tiktoken": lambda: prepare(2, "blocks"),
        "tiktoken alone": lambda: tiktoken(chunks),
        "tokenizers alone": lambda: document_encoder(tokenizer, 0)(chunks),
        "datasets.map": map_rows,
    }
    figures = {(name, unit): Figure("encode", name, unit, []) for name in cases for unit in ("MiB/s", "MiB/CPU s")}
    for _ in range(sizes.encode_rounds):
        for name, case in cases.items():
            wall, cpu = time.perf_counter(), _cpu_seconds()
            case()
            figures[name, "MiB/s"].values.append(num_bytes / 2**20 / (time.perf_counter() - wall))
            figures[name, "MiB/CPU s"].values.append(num_bytes / 2**20 / (_cpu_seconds() - cpu))
    cores = len(os.sched_getaffinity(0))
    return [replace(figure, what=f"{figure.what}, cores: {cores}") for figure in figures.values()]


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def first_step(sizes: Sizes, folder: Path) -> list[Figure]:
    """Seconds from the start of `accel-train run` to the first line of its metrics, with a cold cache; and its memory.

    The memory is what each of the other processes has written, and does not share. The token file is sparse.
    """
    import psutil

    from accel_train.data.builtin.stdlib import python_stdlib_files
    from accel_train.data.text.tokenizers import train_bpe

    texts = [file.read_text(errors="replace") for file in python_stdlib_files()]
    tokenizer = train_bpe(texts[:400], 32_768)
    tokenizer.save_pretrained(folder / "tokenizer")
    with (folder / "0.jsonl").open("w") as file:
        number = 0
        while sizes.first_step_gib and file.tell() < 2**30:
            text = texts[number % len(texts)]
            file.write(json.dumps({"text": f"document {number}\n{text}"}) + "\n")
            number += 1
    model = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64}
    cases = {f"raw text, {gib} GiB": ("<= 10", folder / f"{gib} GiB") for gib in sizes.first_step_gib}
    for gib, (_, source) in zip(sizes.first_step_gib, cases.values()):
        source.mkdir()
        for part in range(gib):
            os.link(folder / "0.jsonl", source / f"{part}.jsonl")
    tokens = folder / "tokens.bin"
    with tokens.open("wb") as content:
        content.truncate(sizes.token_file_bytes)
    cases[f"token file, {sizes.token_file_bytes / 1e9:.3g} GB"] = "<= 5", tokens
    cores, figures = len(os.sched_getaffinity(0)), []
    for name, (bar, source) in cases.items():
        run = folder / f"run {name}"
        recipe = {
            "task": "causal-lm",
            "output_dir": str(run),
            "model": {"config": model},
            "data": {"train": str(source), "cache_dir": str(folder / f"cache {name}"), "sequence_length": 512}
            | {"num_workers": 1},
            "tokenizer": str(folder / "tokenizer"),
            "batch": {"global_batch_size": 4},
            "schedule": {"max_steps": 100_000},
            "log": {"every_steps": 1},
            "evaluate": {"max_samples": 4},
        }
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(recipe))
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "accel_train", "run", str(path)], stderr=subprocess.PIPE
        ) as running:
            while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()):
                if running.poll() is not None:
                    raise SystemExit(running.stderr and running.stderr.read().decode())
                time.sleep(0.02)
            seconds = time.perf_counter() - start
            time.sleep(1)
            children = psutil.Process(running.pid).children(recursive=True)
            memory = [_private_mib(child.pid) for child in children]
            running.kill()
        figures += [
            Figure("first step", f"{name}, cores: {cores}", "s", [seconds], bar),
            Figure("memory", f"{name}, its {len(memory)} other processes", "MiB", memory),
        ]
    return figures


def _private_mib(process: int) -> float:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) / 1024


# --- tokens to batches -----------------------------------------------------------------------------------------------


def reading(sizes: Sizes, folder: Path) -> list[Figure]:
    """Tokens per second of CPU time, from the mapped file to tensors (B, T) int64, in a random order."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    from accel_train.data.text.tokens import TokenStream, WindowDataset, collate_windows
    from benchmarks.nanogpt_style import random_batch

    shard = folder / "shard.bin"
    write_tokens(shard, num_tokens=sizes.shard_tokens, vocab_size=VOCAB_SIZE, seed=0)
    batch, length = sizes.batch_size, sizes.sequence_length
    windows = WindowDataset(TokenStream.of(shard, np.dtype("<u2"), sizes.shard_tokens), sequence_length=length)
    order = np.random.default_rng(0).permutation(len(windows) - 1)
    index_lists = [
        order[np.arange(start, start + batch) % len(order)].tolist() for start in range(0, sizes.batches * batch, batch)
    ]
    mapped = np.memmap(shard, dtype=np.uint16, mode="r")
    tokens = np.asarray(mapped)  # a plain array: slicing an np.memmap costs a Python call each

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return (len(tokens) - 1) // length

        def __getitem__(self, index: int) -> Any:
            row = torch.from_numpy(tokens[index * length : (index + 1) * length + 1].astype(np.int64))
            return {"input_ids": row[:-1], "labels": row[1:]}

    def accel_train() -> None:
        for indices in index_lists:
            collate_windows(windows.__getitems__(indices), separator_id=0, mask_documents=False)

    def nanogpt() -> None:
        for _ in index_lists:
            random_batch(mapped, batch, length, torch.device("cpu"))

    def map_style() -> None:
        for _ in DataLoader(Rows(), batch_sampler=index_lists):
            pass

    rates = _alternate(
        {"accel_train": accel_train, "nanogpt": nanogpt, "map_style": map_style}, sizes.rounds, time.process_time
    )
    per_round = sizes.batches * batch * length
    shape = f"batches of {batch} x {length}"
    figures = []
    for name, what in (
        ("accel_train", f"WindowDataset and collate_windows, {shape}"),
        ("nanogpt", f"nanoGPT's get_batch, {shape}"),
        ("map_style", f"map-style DataLoader, {shape}"),
    ):
        values = [per_round / seconds / 1e6 for seconds in rates[name]]
        bar = "-"
        if name == "accel_train":
            met = statistics.median(values) * 1e6 >= BAR_TOKENS_PER_CPU_SECOND
            bar = f">= {BAR_TOKENS_PER_CPU_SECOND / 1e6:.0f} {'met' if met else 'MISSED'}"
        figures.append(Figure("read", what, "M tokens/CPU s", values, bar))
    return figures


def ordering(sizes: Sizes) -> list[Figure]:
    """What it costs to know which samples make up a step."""
    from accel_train.data.order import DataOrder

    deep = sizes.order_samples * 9 // 10
    seeds = iter(range(10**9))  # a seed of its own for each round, so that no block is left in the cache
    figures = []
    for batch in (16, 512):

        def steps(first_step: int, stride: int, batch: int = batch) -> Callable[[], None]:
            def run() -> None:
                order = DataOrder(sizes.order_samples, batch, next(seeds))
                for number in range(sizes.order_steps):
                    order.step_samples(first_step + number * stride)

            return run

        far_apart = max(1, sizes.order_samples // batch // sizes.order_steps)
        cases = {
            "from step 0": steps(0, 1),
            f"from sample {deep:.1e}": steps(deep // batch, 1),
            "steps far apart": steps(0, far_apart),
        }
        times = _alternate(cases, sizes.rounds, time.process_time)
        for where, seconds in times.items():
            what = f"{batch} of {sizes.order_samples:.0e} samples, {where}"
            figures.append(Figure("order", what, "us/step", [s / sizes.order_steps * 1e6 for s in seconds]))
    return figures


# --- a resumed run finds its place -----------------------------------------------------------------------------------


def resuming(sizes: Sizes, folder: Path) -> list[Figure]:
    """Seconds from nothing to the first batch, at the start and deep in the data (objects are built anew each time)."""
    import numpy as np
    import torch
    from accelerate import Accelerator, skip_first_batches
    from torch.utils.data import DataLoader

    from accel_train.data.order import DataOrder
    from accel_train.data.text.tokens import TokenStream, WindowDataset, collate_windows

    length, batch = 8, sizes.batch_size
    num_tokens = sizes.resume_samples * length + 1
    shard = folder / "sparse.bin"
    with shard.open("wb") as file:
        file.truncate(2 * num_tokens)  # holes: no disk is used, and each page reads as zeros
    accelerator = Accelerator(cpu=True)
    seeds = iter(range(10**9))  # a seed of its own for each run, so that nothing is left in a cache

    def dataset() -> WindowDataset:
        return WindowDataset(TokenStream.of(shard, np.dtype("<u2"), num_tokens), sequence_length=length)

    def collate(rows: Any) -> dict[str, Any]:
        return collate_windows(rows, separator_id=0, mask_documents=False)

    def ours(step: int) -> Callable[[], None]:
        def first_batch() -> None:
            data = dataset()
            order = DataOrder(len(data), batch, next(seeds))
            indices = order.rank_micro_batches(step, 0, 1, batch)[0]
            collate(data.__getitems__(indices))

        return first_batch

    def theirs(skipped: int) -> Callable[[], None]:
        def first_batch() -> None:
            generator = torch.Generator().manual_seed(next(seeds))
            loader = DataLoader(dataset(), batch_size=batch, shuffle=True, generator=generator, collate_fn=collate)
            prepared = accelerator.prepare(loader)
            next(iter(skip_first_batches(prepared, skipped) if skipped else prepared))

        return first_batch

    deep = sizes.resume_batches
    cases = {
        "accel_train, at the start": ours(0),
        f"accel_train, at batch {deep:,}": ours(deep),
        "accelerate, at the start": theirs(0),
        f"accelerate.skip_first_batches, at batch {deep:,}": theirs(deep),
    }
    times = _alternate(cases, min(3, sizes.rounds), time.perf_counter)
    figures = []
    for what, seconds in times.items():
        bar = "-"
        if what.startswith("accel_train, at batch"):
            bar = f"<= {BAR_SKIP_SECONDS} {'met' if statistics.median(seconds) <= BAR_SKIP_SECONDS else 'MISSED'}"
        figures.append(Figure("first batch", f"{what} of {sizes.resume_samples:.0e} samples", "s", seconds, bar))
    return figures


def _alternate(cases: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each case in each round; a first pass, not counted, opens files and fills caches."""
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start = clock()
            case()
            seconds[name].append(clock() - start)
    return seconds


PARTS = ("tokenise", "encode", "first", "read", "order", "resume")


def measure(sizes: Sizes, parts: Sequence[str], folder: Path) -> list[Figure]:
    import torch

    torch.set_num_threads(1)
    figures = []
    if "tokenise" in parts:
        figures += tokenising(sizes, folder)
    if "encode" in parts:
        figures += encoding(sizes, folder)
    if "first" in parts:
        figures += first_step(sizes, folder)
    if "read" in parts:
        figures += reading(sizes, folder)
    if "order" in parts:
        figures += ordering(sizes)
    if "resume" in parts:
        figures += resuming(sizes, folder)
    return figures


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON; changes fields of Sizes")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes(**{**asdict(FULL), **arguments.sizes})
    if arguments.measure:
        if arguments.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
        print_result({"figures": [asdict(figure) for figure in measure(sizes, arguments.parts, arguments.measure)]})
        return
    found, others = [], []
    # Rust threads are as many as the cores that a process may use, and one where all is measured on one thread.
    for cores in (0, 1, os.cpu_count() or 1):
        of_cores = {0: set(PARTS) - {"encode", "first"}, 1: {"encode"}}.get(cores, {"encode", "first"})
        parts = [part for part in arguments.parts if part in of_cores]
        if not parts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            child = run_child(
                "benchmarks.data",
                [
                    *("--measure", folder, "--cores", str(cores), "--parts", *parts),
                    *("--sizes", json.dumps(asdict(sizes))),
                ],
                environment={
                    **child_environment(1),
                    "TOKENIZERS_PARALLELISM": "true",
                    **({} if cores else {"RAYON_NUM_THREADS": "1"}),
                },
                timeout_seconds=1800,
            )
        found += child.result["figures"]
        others.append(child.others_cores)
    figures = [Figure(**figure) for figure in found]
    lines = [
        "## Data: text to tokens to batches, one process, one thread (the part encode: the cores that it names)",
        "",
        markdown_table(HEADERS, [figure.cells() for figure in figures], text=("part", "what", "unit", "bar")),
        "",
        f"Other processes used up to {max(others):.2f} cores meanwhile.",
    ]
    record = {"sizes": asdict(sizes), "figures": found, "others_cores": round(max(others), 2)}
    show(lines, record, save=arguments.save, name="data")


if __name__ == "__main__":
    main()
