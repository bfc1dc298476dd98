"""Recognition of a table's columns: texts, labels, prompts, chats, or image names.

An ambiguous table raises an error that shows the flag.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.data.encoding import check_encoding
from accel_train.data.samples import group_names
from accel_train.data.tables import Row, columns_read, refuse_parts, text_of
from accel_train.experiments.finetune.annotated.text_tasks import (
    anchored,
    annotated,
    conll_settings,
    marked,
    recognise_annotated,
    with_languages,
)
from accel_train.experiments.finetune.columns import Column, Table, files_at, read_table, with_settings
from accel_train.experiments.finetune.images import recognise_images
from accel_train.experiments.finetune.recipe import Asked, Found, lengths, listed, missing_column, places_of
from accel_train.experiments.finetune.values.labels import recognise_label
from accel_train.experiments.finetune.values.misread import (
    refuse_bad_answers,
    refuse_lists_as_text,
    refuse_media,
    refuse_words_by_row,
)

_USUAL = "text sentence review content comment message tweet body question document abstract description"
_TEXT_NAMES = frozenset(_USUAL.split())
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("input", "output"),
)
_WORDS_OF_A_PAIR = 4.0
_MOST_WORDS_TO_ONE = 6.0
"""Least mean words of the shorter text of a pair, and the most words of the longer text for each of its words."""
_CHOICES = ("choices", "options", "endings")
_FURTHER_OF_CHATS = ("functions", "system")
"""Columns that a chat template could show, but that are not passed to it."""
_FURTHER_INPUTS = ("input", "context", "system", "system_prompt", "history", *_CHOICES)
"""Columns that belong to the prompt, even short ones, because the answer depends on them."""


def recognise_table(asked: Asked, path: Path, held_out: Path | None) -> Found:
    """Return the task of a table and its columns. `held_out` is a table to evaluate on.

    Raises:
        ValueError: a row cannot be read, or no column or several columns fit. The message shows the flag.
    """
    if conll_settings(files_at(path)[0], asked) is not None:
        return recognise_annotated(asked, "token-classification", path, held_out)
    asked, table = with_languages(asked, read_table(path, asked))
    if len(asked.label) == 1 and asked.label[0] not in table:
        asked = replace(asked, label=tuple(asked.label[0].split(",")))
    _check_flags(asked, table)
    table = _with_templates(asked, table)
    about = f"{path}: {format_count(len(table.wheres), 'row')}, columns {table.names}"
    settings = {**places_of(asked, path, held_out), **table.settings}
    if held_out is not None and held_out.is_file() and "data.eval" in settings:
        check_encoding(held_out, with_settings(asked.data, table.settings))
    found = marked(asked, table)
    if found is None and asked.is_open:
        refuse_lists_as_text(table)
    columns = {name: column.cells for name, column in table.columns.items() if name not in (*asked.label, *asked.text)}
    refuse_parts(str(path), columns, table.columns)
    found = found or _chats(asked, table) or annotated(asked, table)
    if found is None and asked.is_open:
        refuse_words_by_row(table)
    found = found or anchored(asked, table) or _pairs(asked, table)
    found = found or recognise_images(asked, table) or _plain_text(asked, table) or _labelled(asked, table)
    is_split = "data.eval" in settings and "data.group_column" not in asked.given
    settings |= found.settings
    if is_split:
        settings.pop("data.group_column", None)
    read = {*found.read, *columns_in(settings)}
    left_out = [
        f"column {name!r} is left out: {where} does not have it"
        for name, where in table.partial.items()
        if name not in read
    ]
    others = [repr(name) for name in table.found if name not in read]
    unused = [f"{'column' if len(others) == 1 else 'columns'} {listed(others)}"] if others else []
    if found.num_dropped:
        unused.append(f"{format_count(found.num_dropped, 'row')} without a label")
    return replace(
        found,
        description=about,
        settings=settings,
        num_samples=found.num_samples or len(table.wheres) - found.num_dropped,
        # Image classification lists unused columns itself, and unused images.
        unused=tuple(unused) if found.unused is None else found.unused,
        notes=(*table.notes, *left_out, *found.notes),
    )


def _with_templates(asked: Asked, table: Table) -> Table:
    """Return the table with a column for each template of --text, in place of the columns that the template reads."""
    columns = dict(table.columns)
    for text, names in ((text, columns_read(text)) for text in asked.text if text not in table):
        if labels := [name for name in names if name in asked.label]:
            raise ValueError(f"--text {text}: the model would see the label {labels[0]!r}. Leave it out")
        rows = zip(table.wheres, zip(*(table[name].cells for name in names)))
        columns[text] = Column(text, tuple(text_of(text, iter(cells), where, asked.data) for where, cells in rows))
        gone = {*names} - {asked.data.group_column, *asked.text}
        columns = {name: column for name, column in columns.items() if name not in gone}
    return replace(table, columns=columns)


def columns_in(settings: Choices) -> set[str]:
    """Return the columns that settings name."""
    values = [each.value for name, each in settings.items() if "_column" in name]
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def _check_flags(asked: Asked, table: Table) -> None:
    group = asked.data.group_column
    for flag, names in {**asked.flags, "--data.group_column": (group,) if group else ()}.items():
        for name in chain(*map(columns_read, names)):
            if name in table.partial:
                raise ValueError(
                    f"{flag} {name}: {table.partial[name]} does not have this column. Fill it in, or drop the row"
                )
            if name not in table:
                raise ValueError(missing_column(flag, name, str(table.path), list(table.columns)))


def _chats(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table with a column of chats, or None."""
    chats = [column for column in table.each if column.is_chat]
    pair = None if chats else _pair_of(asked, table)
    refuse_bad_answers(asked, table, {"messages_column": chats[0].name} if chats else _named(*pair) if pair else {})
    if not chats or asked.label or not asked.allows("causal-lm"):
        return None
    named = [column for column in chats if column.name == asked.data.messages_column] or chats
    if len(named) > 1:
        names = [column.name for column in named]
        raise ValueError(f"{' and '.join(names)} hold messages. Choose one: --data.messages_column {names[0]}")
    (column,) = named
    keys = set(next(filter(None, column.cells))[0])
    if not {"role", "content"} <= keys and not {"from", "value"} <= keys:
        raise ValueError(
            f"column {column.name!r} holds messages with the keys {', '.join(sorted(keys))}. Write each message as "
            "{role: user or assistant, content: ...}"
        )
    texts = (str(each.get("content") or each.get("value")) for cell in column.cells for each in cell or ())
    refuse_media(asked, table, {"messages_column": column.name}, texts)
    others = [name for name in table.found if name in _FURTHER_OF_CHATS]
    if others and "data.messages_column" not in asked.given:
        raise ValueError(
            f"{table.path}: column {column.name!r} holds chats, and the model would not see {', '.join(others)}. "
            "Put the text into the chats as a message with the role system; or leave it out: "
            f"--data.messages_column {column.name}"
        )
    tools = asked.data.tools_column
    if "data.tools_column" not in asked.given and "tools" in table.found:
        tools = "tools"
    if tools is not None and tools not in table:
        raise ValueError(
            f"{table.partial.get(tools, table.path)}: no column {tools!r}. Write an empty list in rows without tools, "
            "or leave all tools out: --data.tools_column null"
        )
    shape = "role, content" if "content" in keys else "from, value"
    settings: Choices = {
        "data.format": Choice("chat", f"each is a list of {{{shape}}}; the loss counts the assistant's messages"),
        "data.messages_column": Choice(column.name, "the column of chats"),
    }
    if tools:
        settings["data.tools_column"] = Choice(tools, "its name; the chat template shows them")
    sizes = (
        sum(len(str(each.get("content") or each.get("tool_calls", ""))) for each in row.parts)
        + len(str(row.tools or ""))
        for row in _checked_rows(asked, table, settings)
    )
    why = f"column {column.name!r} holds chats"
    return Found("causal-lm", why, settings=settings, **lengths(sizes), is_chat=True)


def _checked_rows(asked: Asked, table: Table, settings: Choices) -> list[Any]:
    """Return the examples of all rows, read as the run will read them.

    Raises:
        ValueError: as for `check_row`.
    """
    from accel_train.tasks.causal_lm.data import check_row, columns_of  # imports torch

    data: Any = with_settings(asked.data, settings)
    cells = zip(*(table[name].cells for name in columns_of(data)))
    return [check_row(Row(row, where, 0), data) for row, where in zip(cells, table.wheres)]


def _named(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt_column": prompt, "completion_column": completion}


def _pair_of(asked: Asked, table: Table) -> tuple[str, str] | None:
    """Return the columns of prompts and completions, or None. Capitals in their names do not matter."""
    own = (asked.data.prompt_column, asked.data.completion_column)
    names = {name.lower(): name for name in table.columns}
    pairs = (own, *((names.get(one, one), names.get(other, other)) for one, other in _PAIRS))
    pair = next((pair for pair in pairs if set(pair) <= set(table.columns)), None)
    return pair if pair is not None and all(table[name].is_strings for name in pair) else None


def _pairs(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table with columns of prompts and completions, or None."""
    if asked.text or asked.label or not asked.allows("causal-lm") or "data.text_column" in asked.given:
        return None
    is_given = bool({"data.prompt_column", "data.completion_column"} & asked.given)
    pair = _pair_of(asked, table)
    if pair is None or ("label" in table and not is_given):
        return None
    refuse_media(asked, table, _named(*pair), (text for name in pair for text in table[name].cells))
    inputs = asked.data.input_column
    if inputs is None and (pair[0].lower(), pair[1].lower()) == ("instruction", "output"):
        inputs = next(
            (name for name, column in table.columns.items() if name.lower() == "input" and column.is_strings), None
        )
    others = [
        name
        for name, column in table.columns.items()
        if name not in (*pair, inputs) and (column.is_text or (name.lower() in _FURTHER_INPUTS and any(column.cells)))
    ] + [name for name in table.partial if name.lower() in _FURTHER_INPUTS]
    if others and not is_given:
        raise ValueError(
            f"{table.path}: {' and '.join(pair)} look like prompt and completion, "
            f"and {', '.join(others)} would not be read. Join them in your data; put one after the prompt: "
            f"--data.input_column {others[0]}; or leave them out: "
            f"--data.prompt_column {pair[0]} --data.completion_column {pair[1]}"
        )
    settings: Choices = {
        "data.format": Choice("prompt_completion", "the loss counts the completions"),
        "data.prompt_column": Choice(pair[0], "its name"),
        "data.completion_column": Choice(pair[1], "its name"),
    }
    if inputs:
        settings["data.input_column"] = Choice(inputs, "it follows the prompt, after a blank line")
    _checked_rows(asked, table, settings)
    cells = zip(*(table[name].cells for name in (*pair, *([inputs] if inputs else []))))
    return Found(
        "causal-lm",
        f"columns {pair[0]!r} and {pair[1]!r} are prompt and completion",
        settings=settings,
        **lengths(sum(len(cell or "") for cell in row) for row in cells),
    )


def _plain_text(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table with one text column and no label, for a language model, or None."""
    is_alone = len(table.columns) == len(table.strings) == 1 and not asked.label and not table.partial
    if asked.task != "causal-lm" and not (asked.task is None and is_alone):
        return None
    column, why = _text_of(asked, table, ())
    if len(column) > 1:
        raise ValueError(f"--text {','.join(asked.text)}: a language model reads one column. Name one")
    text = column[0]
    return Found(
        "causal-lm",
        "from --task" if asked.task else "one column of text and no label: a language model learns to continue it",
        settings={"data.text_column": Choice(text.name, why)},
        **lengths(_sizes_of(column)),
    )


def _sizes_of(texts: Sequence[Column]) -> Iterator[int]:
    """Yield the characters of each row in some columns."""
    return (sum(len(str(cell)) for cell in row) for row in zip(*(column.cells for column in texts)))


def _labelled(asked: Asked, table: Table) -> Found:
    """Return the facts of a table with one or two text columns and a label column."""
    if not asked.allows("text-classification"):
        raise ValueError(
            f"--task {asked.task}: {table.path} is a table without a column of images. Name a folder of images"
        )
    choices = [name for name in _CHOICES if name in table and isinstance(table[name].cells[0], list | dict)]
    if choices and not (asked.text and asked.label):
        raise ValueError(
            f"{table.path}: column {choices[0]!r} holds the choices of a question, "
            "and a text classifier does not see them. Write columns text, endings and label for accel-train run "
            "multiple_choice; or leave them out with --text and --label"
        )
    texts, why = _text_of(asked, table, asked.label or (("label",) if "label" in table else ()))
    label = recognise_label(asked, table, *(column.name for column in texts))
    held = f"column {label.name!r} holds {'labels' if label.counts else 'numbers'}"
    if "data.label_columns" in label.settings:
        held = f"columns {label.name} hold one label each"
    return Found(
        "text-classification",
        f"{'columns' if len(texts) > 1 else 'column'} {' and '.join(repr(column.name) for column in texts)} "
        f"{'are' if len(texts) > 1 else 'is'} text, {held}",
        settings={
            "data.text_columns": Choice([column.name for column in texts], why),
            **label.settings,
            **_group_of(asked, table, texts),
        },
        counts=label.counts,
        has_one_label=label.is_one,
        num_dropped=label.num_dropped,
        **lengths(_sizes_of(texts)),
    )


def _group_of(asked: Asked, table: Table, texts: Sequence[Column]) -> Choices:
    """Return the column of groups: the one asked for, or a text of pairs that many rows have in common.

    Raises:
        SettingError: a row has no group, or all rows are one group.
    """
    name = asked.data.group_column
    if name is not None:
        group_names(table[name].cells, table.wheres, name)
        return {"data.group_column": Choice(name, "from the command line")}
    if {"data.group_column", "data.eval"} & asked.given or not asked.data.eval_fraction or len(texts) != 2:
        return {}
    shared = {column.name: sum(count for count in Counter(column.cells).values() if count > 1) for column in texts}
    name = max(shared, key=lambda each: shared[each])
    num_rows, cells = len(table.wheres), set(table[name].cells)
    if shared[name] <= _MOST_SHARED * num_rows or len(cells) < _LEAST_GROUPS or not all(cells):
        return {}
    why = (
        f"{shared[name]:,} of {num_rows:,} rows share this text with another row, so a split of single rows would hold "
        "out texts that are trained on; --data.group_column null splits single rows"
    )
    return {"data.group_column": Choice(name, why)}


_MOST_SHARED = 0.05
"""Share of rows with a repeated text above which pairs are held out by this text."""
_MOST_FEATURES = 3
"""Columns of numbers and classes next to names, up to which one of them is the label."""
_LEAST_GROUPS = 20
"""Groups below which the held-out share would be far from the fraction that was asked for."""
_NO_TABLES = (
    "accel_train has no task for tables of numbers. Gradient-boosted trees are the right tool: "
    "HistGradientBoostingClassifier of scikit-learn, XGBoost or LightGBM"
)


def _text_of(asked: Asked, table: Table, labels: Sequence[str]) -> tuple[list[Column], str]:
    named = [table[name] for name in asked.text] or table.each
    if all(column.is_numbers or column.is_dates for column in named):
        columns = "the columns of --text" if asked.text else "all columns"
        raise ValueError(f"{table.path}: {columns} hold numbers or dates, and {_NO_TABLES}")
    if asked.text:
        return [table[name] for name in asked.text], "from --text"
    others = [column for column in table.each if column.name not in labels and not column.is_dates]
    if "text" in table and table["text"].is_strings:
        ignored = [column.name for column in others if column.is_text and column.name != "text"]
        also = f"; {', '.join(ignored)} is not read (for both: --text text,{ignored[0]})" if ignored else ""
        return [table["text"]], f"its name{also}"
    texts = [column for column in others if column.is_text]
    texts = texts or [column for column in others if column.is_strings and column.name.lower() in _TEXT_NAMES]
    if len(texts) == 1:
        if asked.task != "causal-lm":
            _refuse_features(table, texts[0], labels)
        return texts, f"the only text column: {texts[0].mean_words:.0f} words on average"
    if len(texts) == 2 and asked.task != "causal-lm" and _may_be_pair(*texts):
        names = [column.name for column in texts]
        return texts, f"the only two text columns, read as a pair (for one: --text {quote(names[0])})"
    unnamed = [column for column in texts if not column.is_names]
    if len(unnamed) == 1:
        return (
            unnamed,
            f"the only text column besides {listed([each.name for each in texts if each.is_names])}, of names",
        )
    if texts:
        names = [quote(column.name) for column in texts]
        pair = f", or --text {names[0]},{names[1]} for both as a pair" if asked.task != "causal-lm" else ""
        raise ValueError(f"{table.path}: columns {', '.join(names)} are all text. Choose one: --text {names[0]}{pair}")
    strings = [column for column in others if column.is_strings]
    if len(strings) == 1 and strings[0].is_ids:
        name = strings[0].name
        raise ValueError(
            f"{table.path}: column {name!r} holds one word in each row, all different: names, not texts. "
            f"If they name images, put the files into one folder next to the table (images/{strings[0].cells[0]}.jpg); "
            f"if they are texts: --text {name}"
        )
    if len(strings) == 1 and not strings[0].may_be_labels:
        return strings, "the only column of strings"
    num_numbers = sum(column.is_numbers or column.is_dates for column in table.each)
    num_classes = sum(column.may_be_labels for column in strings)
    if 2 * num_numbers > len(table.columns) or (num_numbers and num_numbers + num_classes == len(table.columns)):
        raise ValueError(
            f"{table.path}: {num_numbers} of {len(table.columns)} columns hold numbers or dates, and {_NO_TABLES}. "
            "For a column of text: --text COLUMN"
        )
    raise ValueError(f"{table.path}: no column is clearly text (columns: {table.names}). Name it: --text COLUMN")


def _refuse_features(table: Table, text: Column, labels: Sequence[str]) -> None:
    """Raise ValueError if the only text column holds names, and the other columns describe the named (Titanic)."""
    others = [column for column in table.each if column.name not in (text.name, *labels)]
    features = [column.name for column in others if column.is_numbers or column.may_be_labels]
    if text.is_names and len(features) > _MOST_FEATURES:
        more = f"{{{text.name}}}, {{{features[-1]}}}"
        raise ValueError(
            f"{table.path}: the only text, column {text.name!r}, holds names, and a text classifier would not see "
            f"{listed(features)}. {_NO_TABLES}. To learn from the names alone: --text {quote(text.name)}; with other "
            f"columns: --text {quote(more)}"
        )


def _may_be_pair(one: Column, other: Column) -> bool:
    """Return whether two columns hold texts of comparable lengths, and neither holds dates or numbers."""
    sizes = sorted((one.mean_words, other.mean_words))
    words = [[word for cell in column.cells for word in cell.split()] for column in (one, other)]
    are_words = all(2 * sum(word[0].isalpha() for word in each) > len(each) for each in words)
    return are_words and sizes[0] >= _WORDS_OF_A_PAIR and sizes[1] <= _MOST_WORDS_TO_ONE * sizes[0]
