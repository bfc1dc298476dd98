"""Tables of answers that would be learned wrongly, or in part: judged answers, preferences, images, lists as text."""

import re
from collections.abc import Iterable, Mapping
from shlex import quote
from typing import Any

from accel_train.core.format import format_count
from accel_train.data.labels import is_missing, means_missing, number_in
from accel_train.data.tables import show_cell
from accel_train.experiments.finetune.columns import TAG, Column, Table, words_of
from accel_train.experiments.finetune.recipe import Asked

_APPROVED = "good up like liked upvote upvoted thumbs_up thumbsup accept accepted approve approved chosen preferred "
_APPROVED += "desirable correct helpful safe pass passed \N{THUMBS UP SIGN}"
_BLAMED = "bad down dislike disliked downvote downvoted thumbs_down thumbsdown reject rejected refused undesirable "
_BLAMED += "incorrect wrong unhelpful unsafe harmful toxic fail failed flagged \N{THUMBS DOWN SIGN}"
_GOOD, _BAD = frozenset(_APPROVED.split()), frozenset(_BLAMED.split())
"""Words that say in any column whether an answer is good."""
_YES, _NO = frozenset(("1", "yes", "true", "y", "positive")), frozenset(("0", "-1", "no", "false", "n", "negative"))
"""Words that say it only in a column with the right name: a word of `_GOOD` (is_safe), of `_BAD`, or of `_JUDGES`."""
_NAMES = "label kto feedback vote votes thumb thumbs rating score reward grade quality preference verdict judgement"
_JUDGES = frozenset(_NAMES.split())
_RATINGS = frozenset(("rating", "ratings", "stars", "feedback"))
"""Names of columns of grades. Answers with less than the best grade are not learned like the others."""
_UNJUDGED = frozenset(("neutral", "unrated", "unknown", "no_feedback", "skip", "skipped"))
_MEDIA_NAMES = "image images img imgs picture pictures photo photos video videos audio audios"
_MEDIA = frozenset(_MEDIA_NAMES.split())
_PLACE = re.compile(r"<(?:image|video|audio)(?:_\d+)?>|<\|(?:image|video|audio)[a-z_]*\|>")
_SKIN_TONES = re.compile("[\N{EMOJI MODIFIER FITZPATRICK TYPE-1-2}-\N{EMOJI MODIFIER FITZPATRICK TYPE-6}\ufe0f]")
_PROMPTS = ("prompt", "instruction", "question", "input")
_LIST = re.compile(r"\s*\[\s*[\[{'\"].*\]\s*", re.DOTALL)
_WORDS = ("tokens", "words")
_WORDS_OF_A_TOKEN = 1.5


def refuse_bad_answers(asked: Asked, table: Table, answers: Mapping[str, str]) -> None:
    """Check that no row is an example of a bad answer, because training would learn it like a good one.

    `answers` are the settings that name the columns of the answers, without `data.`.

    Raises:
        ValueError: a column judges answers, or answers are preferences. The message shows the flags to learn them.
    """
    if asked.text or asked.label or {"data.messages_column", "data.completion_column"} & asked.given:
        return
    if {"chosen", "rejected"} <= {*table.columns}:
        raise ValueError(
            f"{table.path}: chosen and rejected are preferences (DPO), and accel_train has no task for them. "
            f"{_how_to_learn_chosen(table)}"
        )
    for name, where in table.partial.items() if answers else ():
        if not (_GOOD | _BAD | _JUDGES).isdisjoint(_names_of(name)):
            raise ValueError(
                f"{where} does not have {name!r}. In other rows, it may say that an answer is bad. Fill it in; or "
                f"learn all rows: {_flags(answers)}"
            )
    # With a question and an answer, a column `label` is a class.
    may_judge = "messages_column" in answers or answers.get("completion_column") == "completion"
    for column in table.each if answers else ():
        if column.name in answers.values() or (column.name.lower() == "label" and not may_judge):
            continue
        if bad := bad_rows(column):
            raise ValueError(
                f"{table.path}: column {column.name!r} is {show_cell(column.cells[bad[0]])} in {len(bad):,} of "
                f"{format_count(len(column.cells), 'row')}, examples of bad answers (KTO), and accel_train has no task "
                "for them. Drop these rows and the column to learn the other rows; or learn all rows: "
                f"{_flags(answers)}"
            )


def bad_rows(column: Column) -> list[int]:
    """Return the rows whose answer is bad by this column, or an empty list if the column does not judge answers."""
    words = [None if isinstance(cell, list | dict) else _plain(cell) for cell in column.cells]
    found = {word for word in words if word is not None and not is_missing(word) and not means_missing(word)}
    found, names, bad = found - _UNJUDGED, _names_of(column.name), frozenset[str]()
    if found & _BAD and found <= _GOOD | _BAD | _YES | _NO:
        bad = _BAD
    elif names & _BAD and found <= _YES | _NO:
        bad = _YES
    elif names & (_GOOD | _JUDGES) and found <= _YES | _NO:
        # Of -1, 0, and 1, 0 is no vote.
        bad = _NO if "-1" not in found else frozenset({"-1"})
    elif names & _RATINGS and len(found) > 1 and all(number_in(word) is not None for word in found):
        bad = frozenset(found - {max(found, key=float)})
    return [row for row, word in enumerate(words) if word in bad]


def _names_of(name: str) -> set[str]:
    """Return the name and its words, without words that mean nothing alone: the "up" of follow_up."""
    words = words_of(name)
    return {"_".join(words), *words} - {"up", "down", "like", "pass"}


def _plain(cell: Any) -> str:
    """Return a value in lower case with underscores; 1.0 as 1, and None as an empty text."""
    text = re.sub(r"[\s-]+(?=\D)", "_", _SKIN_TONES.sub("", "" if cell is None else str(cell)).strip().lower())
    number = number_in(text)
    return text if number is None or number % 1 else str(int(number))


def _how_to_learn_chosen(table: Table) -> str:
    chosen = table["chosen"]
    prompt = next((name for name in _PROMPTS if name in table and table[name].is_strings), None)
    if chosen.is_chat:
        first = next(filter(None, chosen.cells))
        roles = {message.get("role", message.get("from")) for message in first}
        if len(roles - {"system"}) > 1:
            return "To learn only the chosen answers: --data.messages_column chosen"
    elif chosen.is_strings and prompt is not None:
        return f"To learn only the chosen answers: {_flags({'prompt_column': prompt, 'completion_column': 'chosen'})}"
    elif chosen.is_strings:
        return "To learn only the chosen texts: --task causal-lm --text chosen"
    return "To learn only the chosen answers, write chats that end with them in a column messages"


def _flags(columns: Mapping[str, str]) -> str:
    return " ".join(f"--data.{setting} {quote(name)}" for setting, name in columns.items())


def refuse_media(asked: Asked, table: Table, answers: Mapping[str, str], texts: Iterable[str]) -> None:
    """Check that texts are not about images, videos, or sounds that the model would not see.

    Raises:
        ValueError: a column names them, or most texts have places for them. The message shows the flags.
    """
    if {f"data.{setting}" for setting in answers} & asked.given:
        return
    media = [name for name in table.found if not _MEDIA.isdisjoint(words_of(name))]
    names = [name for name in media if name in table.partial or any(table[name].cells)]
    places = [found[0] for text in texts if (found := _PLACE.search(text))]
    if names or 2 * len(places) > len(table.wheres):
        what = f"column {', '.join(map(repr, names))}" if names else f"the contents of {places[0]}"
        raise ValueError(
            f"{table.path}: the texts are about images, videos or sounds, and the model would not see {what}. "
            f"Remove these rows; or learn the text alone: {_flags(answers)}"
        )


def refuse_lists_as_text(table: Table) -> None:
    """Check that words, tags, and chats are not written as text.

    Raises:
        ValueError: they are. The message says how to write them.
    """
    lists = [column.name for column in table.strings if all(map(_LIST.fullmatch, column.cells))]
    meant = [name for name in lists if name.lower() in _WORDS or table[name].has_chat_name]
    if meant:
        raise ValueError(
            f"{table.path}: column {meant[0]!r} holds lists written as text "
            f"({show_cell(table[meant[0]].cells[0])}). Write them as lists into a .jsonl or .parquet file"
        )


def refuse_words_by_row(table: Table) -> None:
    """Check that a row is not a single word with its tag.

    Raises:
        ValueError: it is. The message says how to write sentences.
    """
    tags = next(
        (column for column in table.strings if all(map(TAG.fullmatch, column.cells)) and len({*column.cells}) > 2), None
    )
    words = [column for column in table.strings if column is not tags and column.mean_words < _WORDS_OF_A_TOKEN]
    if tags is not None and words and not any(column.is_text for column in table.strings):
        raise ValueError(
            f"{table.path}: each row is a word with its tag (column {tags.name!r}). Write a row for each sentence, "
            "with lists of its words and tags (.jsonl), or a line for each word and a blank line after each sentence "
            "(.conll)"
        )
