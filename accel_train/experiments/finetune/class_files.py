"""Decide whether text files side by side are classes with a text on each line. Imports no torch."""

import re
from collections.abc import Mapping
from itertools import pairwise, permutations
from pathlib import Path
from statistics import median

from accel_train.data.encoding import read_lines
from accel_train.data.parts import part_of
from accel_train.data.sources import file_kind, is_about_data
from accel_train.experiments.finetune.recipe import Asked

_LEAST_LINES, _MOST_CHARACTERS = 20, 200
"""Least lines of a class, and median length of lines above which they are paragraphs."""
_MOST_CONTINUED, _MOST_SHARED = 0.2, 0.5
"""Largest share of lines that continue a sentence, and of distinct lines that another file has too."""
_LABELS = frozenset(["pos", "neg", "positive", "negative", "neutral", "ham", "spam"])
_NO_CLASS = re.compile(
    r"\d|(?<![a-z])(?:chapter|part|section|vol|volume|books?"
    r"|act|scene|page|shard|split|fold|chunk|half|first|second|third|last|one|two|three|four|five|six|seven|eight|nine"
    r"|ten|[ivx]+|[a-z]|prologue|epilogue|intro|introduction|preface|appendix|corpus|data|texts?|raw|clean|all|src|tgt"
    r"|source|target|input|output|vocab|vocabulary|(?:stop)?words|dictionary|labels?|classes|merges|news|web|wiki"
    r"|wikipedia|logs?|out|err|errors?|access|requirements|old|new|bak|notes|todo)(?![a-z])"
)
"""Names of chapters, kinds of text for a language model, and files about other files."""
_LOG_OR_CODE = re.compile(r"\s|[\[{(<#\d]|//|.*[{};]$")


def are_classes(files: Mapping[str, Path], asked: Asked) -> bool:
    """Return whether files by name hold a short text on each line, and can hardly be anything but classes."""
    names = {name.lower() for name in files}
    if len(names) < 2 or any(_NO_CLASS.search(name) or part_of(name) for name in names):
        return False
    texts = [[line.rstrip() for line, _ in read_lines(path, asked.data)] for path in files.values()]
    # Files with equally many lines may be aligned: sentences and their translations, or words and tags.
    if not all(map(_are_texts, texts)) or (len({*map(len, texts)}) == 1 and not _LABELS.issuperset(names)):
        return False
    distinct = [{*lines} for lines in texts]
    return all(len(one & other) <= _MOST_SHARED * len(one) for one, other in permutations(distinct, 2))


def _are_texts(lines: list[str]) -> bool:
    """Return whether lines are short and without gaps, and neither prose, verse, a log, nor source code."""
    if len(lines) < _LEAST_LINES or not all(lines) or median(map(len, lines)) >= _MOST_CHARACTERS:
        return False
    num_continued = sum(one[-1] in ",;:-" or (one[-1].isalpha() and two[0].islower()) for one, two in pairwise(lines))
    num_odd = sum(_LOG_OR_CODE.match(line) is not None for line in lines)
    return num_continued <= _MOST_CONTINUED * len(lines) and 2 * num_odd <= len(lines)


def classes_by_suffix(asked: Asked, folder: Path) -> dict[str, Path]:
    """Return the files STEM.CLASS of a folder by class. Without `--task`, CLASS must be a usual label: pos, neg."""
    if asked.task not in (None, "text-classification") or asked.data.lines is not None:
        return {}
    paths = [path for path in folder.iterdir() if not path.name.startswith(".") and not is_about_data(path, folder)]
    files = {path.suffix[1:]: path for path in sorted(paths) if path.is_file() and not file_kind(path)}
    if len(paths) < 2 or len(files) != len(paths) or "" in files or len({path.stem for path in paths}) > 1:
        return {}
    is_safe = asked.task is not None or (_LABELS.issuperset(files) and are_classes(files, asked))
    return files if is_safe else {}
