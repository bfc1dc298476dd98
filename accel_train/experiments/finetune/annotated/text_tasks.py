"""Recognition of words with tags, questions, pairs of texts, and translations. The readers of the tasks check them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.data.encoding import read_lines
from accel_train.data.sources import file_kind, resolve_sources
from accel_train.data.text.aligned import target_file
from accel_train.experiments.finetune.annotated.annotations import find_spans
from accel_train.experiments.finetune.columns import TAG, Column, Table, data_at, files_at, readings, with_settings
from accel_train.experiments.finetune.recipe import Asked, Found, Names, lengths, listed, places_of, refuse_columns
from accel_train.experiments.finetune.tree import Tree


class _Kind(NamedTuple):
    """A kind of annotated text."""

    settings: Names
    """Settings of `data` that name its columns."""
    table: str
    """Reason for the task, with the names of the columns."""
    needs: str
    file: str = ""
    """Form of its files without columns."""
    unit: str = ""


_KINDS: Mapping[str, _Kind] = {
    "token-classification": _Kind(
        ("tokens_column", "tags_column"),
        "column {!r} holds words, column {!r} their tags",
        "columns of words and tags, as lists: --text tokens --label ner_tags",
        "lines with a word and its tag",
        "sentence",
    ),
    "question-answering": _Kind(
        ("question_column", "context_column", "answers_column"),
        "columns {!r}, {!r} and {!r} are a question, a text, and answers in it",
        "columns question, context and answers ({text: [...], answer_start: [...]}); --data.question_column, "
        "--data.context_column and --data.answers_column name others",
        "questions in SQuAD's form",
        "question",
    ),
    "seq2seq": _Kind(
        ("source_column", "target_column"),
        "column {!r} is the text to read, column {!r} the text to write",
        "two columns of texts: --text SOURCE --label TARGET",
    ),
}
_ANCHORED = (("anchor", "positive"), ("query", "positive"), ("query", "document"))
"""Columns of sentence embeddings: a text, and one that belongs to it."""
_SENTENCES = (("sentence1", "sentence2"), ("text1", "text2"))
"""Columns of pairs whose names do not show whether they are embedded or classified."""
_NEGATIVE = re.compile(r"negative(?:_?[0-9]+)?")
_SCORES = ("score", "similarity", "similarity_score")
_WORDS = ("tokens", "words", "token", "word")
_TAGS = ("ner_tags", "tags", "labels")
_SENTENCE = re.compile(r"sent(?:ence)?[ _]?(?:#|id|idx|no|num|number)?", re.IGNORECASE)
"""Columns that number sentences, in tables with a word in each row."""
_LINES_LOOKED_AT = 1_000
_NAMES = "source-target src-tgt src-trg article-highlights article-summary document-summary text-summary"
PAIRS = [tuple(pair.split("-")) for pair in (*_NAMES.split(), "dialogue-summary")]
"""Names of sources and targets."""
_CODES = (
    "af ar bg bn ca cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy is it ja ka kk kn ko lt lv mk ml mr ms "
    "mt nb ne nl nn no pa pl pt ro ru si sk sl sq sr sv sw ta te th tl tr uk ur uz vi zh zu"
)
LANGUAGES = frozenset(_CODES.split())
"""Two-letter codes of languages, without `id` (Indonesian), which usually names a column of ids."""


def conll_settings(path: Path, asked: Asked) -> Choices | None:
    """Return the settings to read a .tsv file as CoNLL, or None for a table."""
    if not asked.allows("token-classification") or path.suffix.lower() != ".tsv" or asked.text or asked.label:
        return None
    blocks = tagged_lines(path, asked)
    if len(blocks) < 2:
        return None
    settings: Choices = {"data.tag_format": Choice("conll", "blank lines between sentences, and a tag in each line")}
    numbers = [[fields[0] for fields in block] for block in blocks]
    if any(len(each) > 1 for each in numbers) and all(each == [*map(str, range(1, len(each) + 1))] for each in numbers):
        settings["data.tokens_column"] = Choice("2", "the first column numbers the words")
        fields = [fields for block in blocks for fields in block]
        columns = list(zip(*fields))[2:]
        tags = next((place for place, column in enumerate(columns, 2) if all(map(TAG.fullmatch, column))), 2)
        more = f"; column {len(fields[0])} is not read" if tags < len(fields[0]) - 1 else ""
        settings["data.tags_column"] = Choice(str(tags + 1), f"the first column of tags{more}")
    return settings


def tagged_lines(path: Path, asked: Asked) -> list[list[list[str]]]:
    """Return the first sentences of a file, as fields of lines that end with entity tags. Empty for another file."""
    try:
        lines = [line.strip() for line, _ in islice(read_lines(path, data_at(path, asked)), _LINES_LOOKED_AT)]
    # The reader of plain text will report the line.
    except ValueError:
        return []
    blocks: list[list[list[str]]] = [[]]
    for line in lines:
        fields = line.split("\t" if "\t" in line else None)
        if not line or fields[0] == "-DOCSTART-":
            blocks.append([])
        # A comment in front of a sentence.
        elif blocks[-1] or not fields[0].startswith("#") or TAG.fullmatch(fields[-1]):
            blocks[-1].append(fields)
    words = [fields for block in blocks for fields in block]
    are_tagged = all(len(fields) > 1 and TAG.fullmatch(fields[-1]) for fields in words)
    # The last of several columns of tags may have no entity.
    tags = {field for fields in words for field in fields[1:] if TAG.fullmatch(field)}
    return [block for block in blocks if block] if are_tagged and tags - {"O"} else []


def recognise_annotated(asked: Asked, task: str, path: Path, held_out: Path | None) -> Found:
    """Return the facts of a CoNLL or SQuAD file. `held_out` is a file to evaluate on.

    Raises:
        ValueError: the file cannot be read, or a flag does not fit. The message names the line or the flag.
    """
    kind = _KINDS[task]
    if not asked.allows(task):
        raise ValueError(f"--task {asked.task}: {path} holds {kind.file}. Leave the flag out")
    refuse_columns(asked, path, kind.file)
    settings = readings(files_at(path)[0], asked) if task == "token-classification" else {}
    if (lines := conll_settings(path, asked)) is not None:
        settings = {name: choice for name, choice in settings.items() if name != "data.header"} | lines
    facts = facts_of(asked, task, str(path), settings)
    settings |= places_of(asked, path, held_out)
    about = f"{path}: {format_count(facts['num_samples'], kind.unit)}"
    return Found(task, f"it holds {kind.file}", about, settings=settings, unused=(), **facts)


def annotated(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table of words with tags, questions with answers, or texts to rewrite, or None.

    Raises:
        ValueError: several columns hold tags, a row cannot be read, or the columns do not fit `--task`.
    """
    if not asked.allows(*_KINDS) or (asked.task is None and not asked.is_open):
        return None
    given = (*asked.text, *asked.label)
    finders = {"token-classification": _tagged, "question-answering": _questions, "seq2seq": _pair}
    for task in _KINDS if asked.task is None else [asked.task]:
        names = given or finders[task](asked, table)
        kind = _KINDS[task]
        if names is None or len(names) != len(kind.settings):
            continue
        why = "from the command line" if given else "by its name and its cells"
        settings: Choices = {f"data.{setting}": Choice(name, why) for setting, name in zip(kind.settings, names)}
        if task == "token-classification" and (numbers := _number_of_sentences(table, names[0])) is not None:
            settings["data.sentence_column"] = Choice(numbers, "each row is one word of a sentence")
        facts = facts_of(asked, task, str(table.path), {**table.settings, **settings})
        return Found(task, kind.table.format(*names), settings=settings, **facts)
    if asked.task is not None:
        raise ValueError(f"--task {asked.task} needs {_KINDS[asked.task].needs}. {table.path} has: {table.names}")
    return None


def marked(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table of texts with spans, or None.

    Raises:
        ValueError: a span cannot be read, or annotations of the table are not read.
    """
    found = find_spans(asked, table)
    if found is None:
        return None
    settings: Choices = {
        "data.tag_format": Choice(found.form, found.why),
        "data.tokens_column": Choice(found.text, "the text"),
        "data.tags_column": Choice(found.spans, "the spans"),
    }
    facts = facts_of(asked, "token-classification", str(table.path), {**table.settings, **settings})
    why = f"column {found.spans!r} holds spans of column {found.text!r}"
    return Found("token-classification", why, settings=settings, read=found.read, **facts)


def anchored(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table of texts that belong together, or of scored pairs, or None.

    Raises:
        ValueError: a row cannot be read, or the columns do not show what the texts of a row have in common.
    """
    is_asked = asked.task == "sentence-embedding"
    if not is_asked and (not asked.is_open or "label" in table):
        return None
    names, why = asked.text, "from --text"
    if not names and "data.pair_columns" in asked.given:
        names, why = tuple(asked.data.pair_columns), "from the command line"
    if not names:
        pairs = (*_ANCHORED, *(_SENTENCES if is_asked else ()))
        pair = next((pair for pair in pairs if {*pair} <= {*table.columns}), None)
        if pair is None and not is_asked:
            return None
        names = (*(pair or ()), *(name for name in table.columns if pair and _NEGATIVE.fullmatch(name)))
        why = "their names"
    if len(names) < 2:
        raise ValueError(
            f"--task sentence-embedding needs a column of anchors and a column of their positives: --text ONE,OTHER. "
            f"{table.path} has: {table.names}"
        )
    score, why_score = next(iter(asked.label), None), "from --label"
    if "data.score_column" in asked.given:
        score, why_score = asked.data.score_column, "from the command line"
    elif score is None and len(names) == 2:
        # A score that is not a number is refused when the rows are read: pairs with a low score do not belong together.
        score = next((name for name in _SCORES if name in table), None)
        why_score = "its name"
    further = [column for name, column in table.columns.items() if name not in (*names, score)]
    unclear = [column.name for column in further if column.is_text or column.is_decimal or column.may_be_labels]
    if unclear and not is_asked:
        raise ValueError(
            f"{table.path}: {' and '.join(names)} look like texts that belong together (sentence-embedding), and "
            f"{listed(unclear)} may say more about them. To leave it out: --task sentence-embedding. To set every "
            f"column: accel-train run sentence_embedding --data.train {table.path} --data.pair_columns "
            f"'[{', '.join(names)}]' --data.id_column null --data.group_column null"
        )
    settings: Choices = {"data.pair_columns": Choice(list(names), why)}
    if score is not None:
        settings["data.score_column"] = Choice(score, why_score)
    from accel_train.tasks.sentence_embedding.data import read_anchor_rows  # imports torch

    data: Any = with_settings(asked.data, {**table.settings, **settings})
    rows = read_anchor_rows(resolve_sources(str(table.path), data, key=str(table.path)), data, key=str(table.path))
    held = "texts that belong together" if score is None else f"pairs of texts, and {score!r} their similarity"
    return Found(
        "sentence-embedding",
        f"columns {', '.join(map(repr, names[:-1]))} and {names[-1]!r} are {held}",
        settings=settings,
        **lengths(len(text) for row in rows for text in row.texts),
    )


def _tagged(asked: Asked, table: Table) -> Names | None:
    known = (asked.data.tokens_column.lower(), *_WORDS)
    own = (name for name in (asked.data.tokens_column, *table.columns) if name in table and name.lower() in known)
    words = next(own, None)
    if words is None:
        return None
    if _number_of_sentences(table, words) is not None:
        tags = [name for name, column in table.columns.items() if all(map(TAG.fullmatch, map(str, column.cells)))]
        return (words, tags[0]) if len(tags) == 1 else None
    sizes = _sizes(table[words])
    if sizes is None or not all(isinstance(each, str) for cell in table[words].cells for each in cell):
        return None
    names = [name for name, column in table.columns.items() if name != words and _sizes(column) == sizes]
    if "data.tags_column" in asked.given:
        return words, asked.data.tags_column
    usual = [name for name in _TAGS if name in names] or names
    if len(usual) > 1 and usual == names:
        raise ValueError(
            f"{table.path}: columns {listed(names)} may each hold the tags. Choose one: --data.tags_column {names[0]}"
        )
    return (words, usual[0]) if usual else None


def _number_of_sentences(table: Table, words: str) -> str | None:
    """Return the column that numbers the sentences of a table with a word in each row, or None."""
    has_words = table[words].is_strings and table[words].mean_words <= 1
    return next((name for name in table.columns if has_words and _SENTENCE.fullmatch(name)), None)


def _sizes(column: Column) -> list[int] | None:
    return [len(cell) for cell in column.cells] if all(isinstance(cell, list) for cell in column.cells) else None


def _questions(asked: Asked, table: Table) -> Names | None:
    names = tuple(getattr(asked.data, setting) for setting in _KINDS["question-answering"].settings)
    are_there = set(names) <= set(table.columns)
    has_places = are_there and any("answer_start" in str(cell) for cell in table[names[2]].cells)
    return names if has_places or (are_there and asked.task is not None) else None


def _pair(asked: Asked, table: Table) -> Names | None:
    strings = [column.name for column in table.strings]
    languages = tuple(name for name in strings if name.lower() in LANGUAGES)
    own = (asked.data.source_column, asked.data.target_column)
    pairs = [pair for pair in (own, *PAIRS, languages) if len(pair) == 2 and set(pair) <= set(strings)]
    if not pairs:
        return None
    columns = [table[name] for name in pairs[0]]
    others = [name for name in strings if name not in pairs[0] and table[name].is_text]
    are_texts = any(column.is_text for column in columns) and not any(column.may_be_labels for column in columns)
    is_clear = are_texts and not others and "label" not in table
    return pairs[0] if is_clear or asked.task is not None else None


def facts_of(asked: Asked, task: str, path: str, settings: Choices) -> dict[str, Any]:
    """Return sizes, classes, and notes of annotated texts, read as the run will read them."""
    data: Any = with_settings(asked.data, settings)
    sources = resolve_sources(path, data, key=path)
    notes: list[str] = []
    # The readers of tasks import torch.
    if task == "token-classification":
        from accel_train.tasks.token_classification.data import encode_tags, read_sentences, tag_scheme

        sentences = read_sentences(sources, data, key=path, notes=notes)
        scheme = tag_scheme(sentences, sources, data)
        numbers = np.bincount(np.concatenate(encode_tags(scheme, sentences)), minlength=len(scheme.names)).tolist()
        counts = {name: number for name, number in zip(scheme.names, numbers, strict=True) if number}
        texts = [sentence.key for sentence in sentences]
        facts: dict[str, Any] = {"counts": counts, "notes": tuple(notes)}
    elif task == "question-answering":
        from accel_train.tasks.question_answering.data import read_questions

        rows = read_questions(sources, data, key=path)
        count = format_count(sum(not row.answers for row in rows), "question")
        texts = [f"{row.question} {row.context}" for row in rows]
        facts = {"notes": () if count.startswith("0 ") else (f"{count} without an answer in the text",)}
    else:
        from accel_train.tasks.seq2seq.data import read_pairs

        pairs = read_pairs(sources, data, key=path, notes=notes)
        texts = [row.texts[0] for row in pairs]
        facts = {"longest_target": lengths(len(row.label) for row in pairs)["longest"], "notes": tuple(notes)}
    return {"num_samples": len(texts), **facts, **lengths(map(len, texts))}


_SIDES = frozenset(side for pair in PAIRS for side in pair)


def with_languages(asked: Asked, table: Table) -> tuple[Asked, Table]:
    """Return a table with a column for each language of a column that maps languages to texts, and their direction.

    Raises:
        ValueError: the direction is open.
    """
    for name, column in table.columns.items():
        keys = list(column.cells[0]) if isinstance(column.cells[0], Mapping) else []
        are_texts = (
            len(keys) > 1
            and all(map(_is_language, keys))
            and all(
                isinstance(cell, Mapping) and {*cell} == {*keys} and all(isinstance(cell[key], str) for key in keys)
                for cell in column.cells
            )
        )
        if not asked.allows("seq2seq") or not are_texts:
            continue
        source, target = _direction(asked, keys, table.path)
        columns = {key: Column(key, tuple(cell[key] for cell in column.cells)) for key in keys}
        others = {other: each for other, each in table.columns.items() if other != name}
        settings = {**table.settings, "data.translation_column": Choice(name, "it maps languages to texts")}
        asked = replace(asked, task="seq2seq", text=(source,), label=(target,))
        return asked, replace(table, columns={**others, **columns}, settings=settings)
    return asked, table


def recognise_aligned(asked: Asked, tree: Tree) -> Found | str:
    """Return the facts of line-aligned files, STEM.de and STEM.en. If the path is one of them, it is the source.

    Raises:
        ValueError: the direction is open, the files are packed, cannot be read, or differ in lines.
    """
    files, path, stems = tree.files, tree.path, dict[Path, dict[str, Path]]()
    if not tree.is_folder:
        is_text = file_kind(path) in (None, "text")
        files = sorted(tree.folder.glob(f"{path.with_suffix('').name}.*")) if is_text else []
    named = {*asked.text, *asked.label} if asked.task == "seq2seq" else frozenset[str]()
    for file in files if asked.allows("seq2seq") else ():
        name = file.with_suffix("") if file.suffix == ".gz" else file
        suffix = name.suffix[1:]
        if _is_language(suffix) or suffix in _SIDES or suffix in named:
            stems.setdefault(name.with_suffix(""), {})[suffix] = file
    # .cs, .pl, and others are suffixes of programs, too.
    found = [each for each in stems.values() if len(each) > 1 and not all(map(file_kind, each.values()))]
    if path in files:
        found = [each for each in found if path in each.values()]
        asked = replace(asked, text=asked.text or (path.suffix[1:],))
    if not found:
        return "no STEM.de and STEM.en"
    if packed := [file for each in found for file in each.values() if file.suffix == ".gz"]:
        raise ValueError(f"{packed[0]}: aligned files are read in place. Unpack them: gunzip {packed[0].parent}/*.gz")
    names = sorted({suffix for each in found for suffix in each})
    are_classes = "; if they are classes: --task text-classification" if len(stems) == 1 else ""
    source, target = _direction(asked, names, path, are_classes)
    train, held_out = tree.chosen([each[source] for each in found if {source, target} <= {*each}])
    why = f"a line belongs to the same line of {target_file(train, target).name}"
    settings = {**readings(train, asked), "data.target_suffix": Choice(target, why)}
    facts = facts_of(asked, "seq2seq", str(train), settings)
    settings |= places_of(asked, train, held_out)
    about = f"{train}: {format_count(facts['num_samples'], 'pair')} of lines"
    return Found("seq2seq", "two files hold the same texts, line by line", about, settings=settings, unused=(), **facts)


def _is_language(name: str) -> bool:
    """Return whether a name is the code of a language, perhaps with a region or script: de, pt_BR, zh-Hans."""
    return re.fullmatch(r"[a-z]{2}(?:[-_][A-Za-z]{2,4})?", name) is not None and name[:2] in (*LANGUAGES, "id")


def _direction(asked: Asked, names: Sequence[str], where: Path, otherwise: str = "") -> tuple[str, str]:
    """Return source and target among the names of languages or sides, by --text and --label or by their names.

    Raises:
        ValueError: a flag names something else, or the direction is open.
    """
    for flag, given in asked.flags.items():
        if len(given) > 1 or not {*given} <= {*names}:
            raise ValueError(f"{flag} {','.join(given)}: {where} has {', '.join(names)}. Name one of them")
    usual = next((pair for pair in PAIRS if {*pair} == {*names}), None)
    if usual is not None and not asked.text and not asked.label:
        return usual[0], usual[1]
    sources = asked.text or [name for name in names if name not in asked.label]
    targets = asked.label or [name for name in names if name not in asked.text]
    if len(sources) != 1 or len(targets) != 1 or sources[0] == targets[0]:
        raise ValueError(
            f"{where}: {listed(names)} look like translations. Choose the direction: --text {names[0]} --label "
            f"{names[1]}, or --text {names[1]} --label {names[0]}{otherwise}"
        )
    return sources[0], targets[0]
