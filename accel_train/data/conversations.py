"""Rows to fine-tune on, prompts with completions or chats, as tokens that know which of them are to be learned."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.data.lines import show_cell
from accel_train.data.tables import Row
from accel_train.data.tokenizers import TextTokenizer
from accel_train.recipe_data import Data

Messages = list[dict[str, Any]]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Example(NamedTuple):
    """What one row holds, checked."""

    parts: tuple[str, str] | Messages
    """Prompt and completion, or the messages of a chat."""
    where: str
    """File and row, for messages."""


class Encoded(NamedTuple):
    """One row of tokens."""

    ids: NDArray[np.int32]
    is_target: NDArray[np.bool_]


@dataclass
class Oddities:
    """What was met while rows were encoded that a user should know of."""

    num_joined: int = 0
    """Rows whose tokenizer would have joined the end of the prompt with the beginning of the completion."""
    num_spelled: int = 0
    """Chats that spell a special token in a message."""
    first_spelled: str = ""
    num_unended: int = 0
    """Chats that the template leaves without a special token at their end."""
    num_endless: int = 0
    """Chats whose last special token the template does not count as the assistant's."""

    def notes(self) -> Iterator[str]:
        """Sentences, one for each kind that was met."""
        if self.num_joined:
            yield f"{self.num_joined:,} rows: a token would reach from prompt into completion; it was cut in two, as when generating"
        if self.num_spelled:
            yield (
                f"{self.num_spelled:,} chats spell a special token in a message ({self.first_spelled}), which is read as "
                "that token: take such rows out unless you trust them"
            )
        if self.num_unended:
            yield f"{self.num_unended:,} chats end without a special token; the end-of-sequence token was added as a target"
        if self.num_endless:
            yield (
                f"{self.num_endless:,} chats end in a token that the chat template leaves outside {{% generation %}}: the model "
                "does not learn to end its turn; put it inside"
            )


Encoder = Callable[[Sequence[Example]], list[Encoded]]


def columns_of(data: Data) -> tuple[str, ...]:
    """The columns that `data.format` reads."""
    return (data.messages_column,) if data.format == "chat" else (data.prompt_column, data.completion_column)


def check_row(row: Row, data: Data) -> Example:
    """What a table's row gives to learn from; the row has the cells of `columns_of`.

    Raises:
        ValueError: a cell is of another type, or has nothing to learn; the text names file, row and column.
    """
    if data.format == "chat":
        return Example(_messages(row.cells[0], f"{row.where}: column {data.messages_column!r}", data), row.where)
    texts = []
    for column, cell, leaf in zip(columns_of(data), row.cells, ("data.prompt_column", "data.completion_column")):
        at = f"{row.where}: column {column!r}"
        if not isinstance(cell, str):
            raise ValueError(f"{at} holds {show_cell(cell)}, not a string; drop the row, or set {leaf}")
        texts.append(_text(cell, at, data))
    if not texts[1]:
        raise ValueError(
            f"{row.where}: column {data.completion_column!r} is empty, so there is nothing to learn; drop the row"
        )
    return Example((texts[0], texts[1]), row.where)


def _text(value: str, at: str, data: Data) -> str:
    """JSON can spell half of a UTF-16 pair, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if data.encoding_errors == "replace":
            return _LONE_SURROGATE.sub("\ufffd", value)
        raise ValueError(
            f"{at}: character {error.start} is the lone surrogate {value[error.start]!r}, which is not text; "
            "repair the row, or set data.encoding_errors: replace"
        ) from None
    return value


def _messages(value: Any, at: str, data: Data) -> Messages:
    shape = "a list of {role: ..., content: ...}"
    if not isinstance(value, list | tuple) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{at} holds {show_cell(value)}, not {shape}; set data.messages_column, or write such lists")
    if not value:
        raise ValueError(f"{at} is an empty list, so there is nothing to learn; drop the row")
    messages: Messages = []
    for number, message in enumerate(value, start=1):
        given = {name: item for name, item in message.items() if item is not None}  # Arrow fills absent keys with null
        role, content = given.get("role"), given.get("content")
        if not isinstance(role, str):
            raise ValueError(
                f"{at}, message {number}: role is {show_cell(role)}, not a string; each message is {shape}"
            )
        if not isinstance(content, str) and (content is not None or "tool_calls" not in given):
            raise ValueError(
                f"{at}, message {number}: content is {show_cell(content)}, not a string; each message is {shape}"
            )
        if role == "assistant" and not content and "tool_calls" not in given:
            raise ValueError(f"{at}, message {number}: the assistant says nothing; drop the message or the row")
        if isinstance(content, str):
            given["content"] = _text(content, f"{at}, message {number}", data)
        messages.append(given)
    if data.completion_only_loss and not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"{at} has no message of role 'assistant', so there is nothing to learn; "
            "drop the row, or set data.completion_only_loss: false"
        )
    return messages


def texts_of(rows: Iterable[Example]) -> Iterator[str]:
    """All that the rows say: what a tokenizer is trained on."""
    for row in rows:
        if isinstance(row.parts, tuple):
            yield from row.parts
        else:
            yield from (message["content"] for message in row.parts if "content" in message)


def completion_encoder(tokenizer: TextTokenizer, data: Data, oddities: Oddities) -> Encoder:
    """Rows as beginning, prompt, completion, end: the beginning is what `generate` begins with, the end is a target.

    A token never reaches from the prompt into the completion, because there is no such token when the prompt is all that
    is given. Special tokens inside the texts are encoded as the characters that they are.
    """
    begin = np.array([begin_of(tokenizer)], np.int32)
    end = np.array([end_of(tokenizer)], np.int32)

    def encode(rows: Sequence[Example]) -> list[Encoded]:
        pairs = [row.parts for row in rows if isinstance(row.parts, tuple)]
        prompts = tokenizer.encode([prompt for prompt, _ in pairs])
        wholes = tokenizer.encode([prompt + completion for prompt, completion in pairs])
        encoded = []
        for (_, text), prompt, whole in zip(pairs, prompts, wholes):
            completion = whole[len(prompt) :]
            # Cut from the whole, so that a tokenizer which marks the beginning of a text puts no mark in the middle.
            if not np.array_equal(whole[: len(prompt)], prompt) or not len(completion):
                oddities.num_joined += 1
                completion = tokenizer.encode([text])[0]
            ids = np.concatenate((begin, prompt, completion, end)).astype(np.int32)
            is_target = np.ones(len(ids), np.bool_)
            is_target[: 1 + len(prompt) if data.completion_only_loss else 1] = False
            encoded.append(Encoded(ids, is_target))
        return encoded

    return encode


def begin_of(tokenizer: TextTokenizer) -> int:
    """The token that a prompt follows when text is generated."""
    begin = tokenizer.tokenizer.bos_token_id
    return tokenizer.separator_id if begin is None else int(begin)


def end_of(tokenizer: TextTokenizer) -> int:
    """The token that ends a completion."""
    end = tokenizer.tokenizer.eos_token_id
    return tokenizer.separator_id if end is None else int(end)
