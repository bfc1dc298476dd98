"""Chats as their template renders them, with the assistant's part found in the tokens."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel_train.data.conversations import Encoded, Encoder, Example, Messages, Oddities, end_of
from accel_train.data.tokenizers import TextTokenizer
from accel_train.recipe_data import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_encoder(tokenizer: TextTokenizer, data: Data, oddities: Oddities) -> Encoder:
    """Chats as the tokenizer's template renders them; targets are what stands in `{% generation %}`.

    A template without that is rendered turn by turn, and an assistant's turn is what it adds to the turns before it and
    to its own generation prompt.

    Raises:
        ValueError: there is no chat template, or the tokenizer cannot say where in the text its tokens are.
    """
    tool = tokenizer.tokenizer
    template = chat_template(tool, data)
    tool.chat_template = template  # saved with the tokenizer, for whoever chats with the model
    marks_turns = _GENERATION.search(template) is not None
    special_ids = {*tool.all_special_ids, *tool.added_tokens_decoder}
    special_tokens = tool.convert_ids_to_tokens(sorted(special_ids))

    def encode(rows: Sequence[Example]) -> list[Encoded]:
        return [encode_row(row) for row in rows]

    def encode_row(row: Example) -> Encoded:
        assert isinstance(row.parts, list)
        at = f"{row.where}: column {data.messages_column!r}"
        if any(token in message.get("content", "") for message in row.parts for token in special_tokens):
            oddities.num_spelled += 1
            oddities.first_spelled = oddities.first_spelled or row.where
        if marks_turns and data.completion_only_loss:
            ids, is_target = _marked(tool, row.parts, at)
        else:
            ids, is_target = _by_prefixes(tool, row.parts, at, data)
        is_target[:1] = False
        if data.completion_only_loss and not is_target.any():
            raise ValueError(
                f"{at}: the chat template marks nothing in it as the assistant's; put {{% generation %}} around what the "
                "assistant says in data.chat_template"
            )
        if row.parts[-1]["role"] == "assistant":
            end = _end_of_turn(ids, special_ids, tool)
            if end is None:
                oddities.num_unended += 1
                ids, is_target = np.append(ids, np.int32(end_of(tokenizer))), np.append(is_target, True)
            elif not is_target[end]:
                oddities.num_endless += 1
        return Encoded(ids, is_target)

    return encode


def chat_template(tokenizer: "PreTrainedTokenizerBase", data: Data) -> str:
    """`data.chat_template` (Jinja, or a file with it), else the tokenizer's own.

    Raises:
        ValueError: there is neither, the file cannot be read, or the tokenizer is not one of the tokenizers library.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer: {tokenizer.name_or_path!r} is written in Python and cannot say where its tokens are in a text, "
            "which data.format=chat needs; use one with a tokenizer.json"
        )
    given = data.chat_template
    if given is None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this one"
            raise ValueError(
                f"data.format=chat needs a chat template, and the tokenizer ({name}) brings none; "
                "set data.chat_template to Jinja text or to a file with it"
            )
        return str(tokenizer.get_chat_template())
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat_template={given!r} is neither Jinja (it has no {{{{ or {{%) nor a file that can be read: {error}"
        ) from error


def _end_of_turn(ids: NDArray[np.int32], special_ids: set[int], tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Where the special token is that ends the text, white space behind it or not; None without one."""
    for index in range(len(ids) - 1, -1, -1):
        token = int(ids[index])
        if token in special_ids:
            return index
        if tokenizer.decode([token]).strip():
            return None
    return None


def _marked(tokenizer: "PreTrainedTokenizerBase", messages: Messages, at: str) -> tuple[NDArray[Any], NDArray[Any]]:
    options = {"verbose": False, "return_offsets_mapping": True}
    encoding = _rendered(
        tokenizer,
        messages,
        at,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs=options,
    )
    is_target = np.array(encoding["assistant_masks"], np.bool_)
    ends_before = 0
    for index, (start, end) in enumerate(encoding["offset_mapping"]):
        # transformers' mask ends at the first token of the last character, which may be several (UTF-8 bytes).
        if index and start < ends_before and is_target[index - 1]:
            is_target[index] = True
        ends_before = end
    return np.array(encoding["input_ids"], np.int32), is_target


def _by_prefixes(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, at: str, data: Data
) -> tuple[NDArray[Any], NDArray[Any]]:
    whole = _rendered(tokenizer, messages, at, tokenize=False)
    encoding = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoding["input_ids"], np.int32)
    if not data.completion_only_loss:
        return ids, np.ones(len(ids), np.bool_)
    starts = np.array([start for start, _ in encoding["offset_mapping"]], np.int64)
    is_target = np.zeros(len(ids), np.bool_)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(tokenizer, messages[:index], at, tokenize=False, add_generation_prompt=True) if index else ""
        after = _rendered(tokenizer, messages[: index + 1], at, tokenize=False) if index + 1 < len(messages) else whole
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                f"{at}, message {index + 1}: the chat template renders the turns before differently once this one follows, "
                "so what the assistant adds cannot be told apart; put {% generation %} around what the assistant says in "
                "data.chat_template, or set data.completion_only_loss: false"
            )
        is_target |= (starts >= len(before)) & (starts < len(after))
    return ids, is_target


def _rendered(tokenizer: "PreTrainedTokenizerBase", messages: Messages, at: str, **options: Any) -> Any:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not Jinja: line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, KeyError, ValueError, ArithmeticError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"{at}: the chat template refuses it: {error} (roles: {roles})") from error
