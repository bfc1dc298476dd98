"""Encode fine-tuning rows (prompts with completions, chats by template) as tokens with a target mask."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.core.state import JsonRecord
from accel_train.data.text.template_trial import MOST_CHARACTERS, check_template
from accel_train.data.text.tokenizers import TextTokenizer
from accel_train.tasks.causal_lm.config import CausalLMData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = re.compile(r"\b(?:enable_)?thinking\b")
"""Variables that switch thinking on and off in templates of Qwen, GLM, Nemotron, SmolLM and DeepSeek."""
_ROWS_TRIED = 8
"""Number of chats that a template renders in a limited process first."""
Messages = list[JsonRecord]
Render = Callable[..., Any]
"""Renders the messages of one row with its tools, by the tokenizer's template."""


class Example(NamedTuple):
    """The checked content of one row and its place: prompt and completion, or the messages of a chat."""

    parts: tuple[str, str] | Messages
    where: str
    tools: Sequence[JsonRecord] = ()
    source: int = 0
    """Number of its source in `data.train`."""


class Encoded(NamedTuple):
    """One row of tokens."""

    ids: NDArray[np.int32]
    is_target: NDArray[np.bool_]


JOINED = "rows where a token would reach from prompt into completion: {count}; it was cut in two, as when generating"
SPECIAL_TOKENS = (
    "chats that spell a special token in a message ({first}), which is read as that token: {count}. Take these rows "
    "out unless you trust them"
)
WITHOUT_END = "chats that end without a special token: {count}; the end-of-sequence token was added as a target"
END_NOT_LEARNED = (
    "chats that end in a token that the chat template leaves outside {{% generation %}}: {count}; the model does not "
    "learn to end its turn; put it inside"
)

Warnings = defaultdict[str, list[str]]
"""Places of affected rows by warning sentence, collected during encoding."""


Encoder = Callable[[Sequence[Example], Warnings], list[Encoded]]
"""Encodes rows, and adds to the warnings."""


def completion_encoder(tokenizer: TextTokenizer, data: CausalLMData) -> Encoder:
    """Return a function that encodes rows as beginning, prompt, completion, end.

    The beginning is the token that `generate` starts with. The end is a target. No token spans prompt and completion,
    because generation starts from the tokens of the prompt alone. Special tokens in the texts are encoded as plain
    characters.
    """
    bos = tokenizer.tokenizer.bos_token_id
    begin = np.array([tokenizer.separator_id if bos is None else bos], np.int32)
    end = np.array([end_of(tokenizer)], np.int32)

    def encode(rows: Sequence[Example], warnings: Warnings) -> list[Encoded]:
        pairs = [row.parts for row in rows if isinstance(row.parts, tuple)]
        prompts = tokenizer.encode([prompt for prompt, _ in pairs])
        wholes = tokenizer.encode([prompt + completion for prompt, completion in pairs])
        encoded = []
        for row, (_, text), prompt, whole in zip(rows, pairs, prompts, wholes):
            completion = whole[len(prompt) :]
            # Cut from the whole text, so that a tokenizer that marks the start of a text puts no mark in the middle.
            if not np.array_equal(whole[: len(prompt)], prompt) or not len(completion):
                warnings[JOINED].append(row.where)
                completion = tokenizer.encode([text])[0]
            ids = np.concatenate((begin, prompt, completion, end)).astype(np.int32)
            is_target = np.ones(len(ids), np.bool_)
            is_target[: 1 + len(prompt) if data.completion_only_loss else 1] = False
            encoded.append(Encoded(ids, is_target))
        return encoded

    return encode


def end_of(tokenizer: TextTokenizer) -> int:
    """Return the token that ends a completion."""
    end = tokenizer.tokenizer.eos_token_id
    return tokenizer.separator_id if end is None else int(end)


def chat_encoder(tokenizer: TextTokenizer, data: CausalLMData) -> Encoder:
    """Return a function that encodes chats with the tokenizer's template. Targets are inside `{% generation %}`.

    A template without `{% generation %}` is rendered turn by turn. The targets of an assistant turn are the text that
    it adds to the preceding turns and its generation prompt. Text that a generation prompt supplies, with thinking on
    or off, is never a target (for example, an empty thinking block).

    Raises:
        ValueError: no chat template exists, or the tokenizer does not report token offsets.
    """
    tool = tokenizer.tokenizer
    template = chat_template(tool, data)
    # Saved with the tokenizer, so that others can chat with the model.
    tool.chat_template = template
    marks_turns = _GENERATION.search(template) is not None
    special_ids = {*tool.all_special_ids, *tool.added_tokens_decoder}
    special_tokens = tool.convert_ids_to_tokens(sorted(special_ids))

    def encode_row(row: Example, warnings: Warnings) -> Encoded:
        assert isinstance(row.parts, list)
        at = f"{row.where}: column {data.messages_column!r}"
        render = partial(_rendered, tool, at=at, tools=row.tools or None)
        said = [message.get("content", "") for message in row.parts]
        if data.tools_column is not None:
            said.append(_check_tools(render, row, at))
        if any(token in text for text in said for token in special_tokens):
            warnings[SPECIAL_TOKENS].append(row.where)
        if marks_turns and data.completion_only_loss:
            ids, is_target = _marked(tool, render, row.parts)
        else:
            ids, is_target = _by_prefixes(tool, render, row.parts, at, data)
        is_target[:1] = False
        if data.completion_only_loss and not is_target.any():
            raise ValueError(
                f"{at}: the chat template marks nothing in it as the assistant's; put {{% generation %}} around what "
                "the assistant says in data.chat_template"
            )
        if row.parts[-1]["role"] == "assistant":
            end = _end_of_turn(ids, special_ids, tool)
            if end is None:
                warnings[WITHOUT_END].append(row.where)
                ids, is_target = np.append(ids, np.int32(end_of(tokenizer))), np.append(is_target, True)
            elif not is_target[end]:
                warnings[END_NOT_LEARNED].append(row.where)
        return Encoded(ids, is_target)

    def encode(rows: Sequence[Example], warnings: Warnings) -> list[Encoded]:
        tried = [row.parts for row in rows[:_ROWS_TRIED] if isinstance(row.parts, list)]
        tools = next((row.tools for row in rows if row.tools), None)
        check_template(tool, tried, "data.chat_template" if data.chat_template is not None else "", tools)
        return [encode_row(row, warnings) for row in rows]

    return encode


def chat_template(tokenizer: "PreTrainedTokenizerBase", data: CausalLMData) -> str:
    """Return `data.chat_template` (Jinja, or a file), or the tokenizer's template by default.

    Raises:
        ValueError: neither exists, the file cannot be read, or the tokenizer is not a fast one.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer: {tokenizer.name_or_path!r} is written in Python and does not give the positions of its "
            f"tokens in a text. data.format=chat needs them: use a tokenizer with a tokenizer.json"
        )
    given = data.chat_template
    if given is None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this one"
            raise ValueError(
                f"data.format=chat needs a chat template, and the tokenizer ({name}) brings none; "
                "set data.chat_template to Jinja text or to a file with it"
            )
        # Some tokenizers have a template of their own for chats with tools.
        return str(tokenizer.get_chat_template(tools=None if data.tools_column is None else []))
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat_template={given!r} is neither Jinja (it has no {{{{ or {{%) nor a file that can be read: "
            f"{error}"
        ) from error


def _end_of_turn(ids: NDArray[np.int32], special_ids: set[int], tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the position of the special token that ends the text, ignoring trailing white space; or None."""
    for index, token in reversed(list(enumerate(ids.tolist()))):
        if token in special_ids or tokenizer.decode([token]).strip():
            return index if token in special_ids else None
    return None


def _check_tools(render: Render, row: Example, at: str) -> str:
    """Return the tools and calls of a chat as JSON. Raises ValueError if the chat template leaves out one of them."""
    assert isinstance(row.parts, list)
    calls = [call["function"] for message in row.parts for call in message.get("tool_calls", ())]
    if row.tools or calls:
        without = render(row.parts, tokenize=False, tools=None)
        hidden = "tools" if row.tools and render(row.parts, tokenize=False) == without else ""
        if hidden or not all(call["name"] in without for call in calls):
            raise ValueError(
                f"{at}: the chat template does not show {hidden or 'the calls of tools'}, so the model would not see "
                "them. Use a model whose template shows tools, set data.chat_template, or leave the tools out: "
                "data.tools_column: null"
            )
    return json.dumps([row.tools, calls], ensure_ascii=False)


def _marked(
    tokenizer: "PreTrainedTokenizerBase", render: Render, messages: Messages
) -> tuple[NDArray[Any], NDArray[Any]]:
    options = {"verbose": False, "return_offsets_mapping": True}
    returned = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    encoding = render(messages, **returned, tokenizer_kwargs=options)
    is_target = np.array(encoding["assistant_masks"], np.bool_)
    ends_before = 0
    for index, (start, end) in enumerate(encoding["offset_mapping"]):
        # transformers' mask ends at the first token of the last character. The character may have several (UTF-8
        # bytes).
        if index and start < ends_before and is_target[index - 1]:
            is_target[index] = True
        ends_before = end
    starts = np.array([start for start, _ in encoding["offset_mapping"]], np.int64)
    firsts = np.flatnonzero(is_target & ~np.append(False, is_target[:-1]))
    if len(firsts):
        whole = render(messages, tokenize=False)
        supplied = _supplied(tokenizer, render, messages)
        for first in firsts:
            begin = int(starts[first])
            end = max((_end_of_supplied(whole, begin, each) for each in supplied), default=begin)
            is_target[first:] &= starts[first:] >= end
    return np.array(encoding["input_ids"], np.int32), is_target


def _supplied(tokenizer: "PreTrainedTokenizerBase", render: Render, messages: Messages) -> set[str]:
    """Return the texts that generation prompts add before assistant turns."""
    found = set()
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            try:
                before = render(messages[:index], tokenize=False)
                prompts = _prompts(tokenizer, render, messages[:index])
            # The template only accepts whole chats.
            except ValueError:
                continue
            found |= {prompt.removeprefix(before) for prompt in prompts if prompt.startswith(before)}
    return found


def _end_of_supplied(text: str, begin: int, supplied: str) -> int:
    """Return the end of a generation prompt in the text if the prompt reaches into a turn's targets, or `begin`.

    The targets of the turn start at `begin`.
    """
    for split in range(len(supplied)):
        head, rest = supplied[:split], supplied[split:]
        if text.startswith(rest, begin) and text.endswith(head, 0, begin):
            return begin + len(rest)
    return begin


def _prompts(tokenizer: "PreTrainedTokenizerBase", render: Render, messages: Messages) -> list[str]:
    """Return the generation prompts after these turns: the template's default first, then thinking off and on."""
    names = sorted(set(_THINKING.findall(str(tokenizer.chat_template))))
    modes: list[dict[str, Any]] = [{}, *({name: value} for name in names for value in (False, True))]
    return [str(render(messages, tokenize=False, add_generation_prompt=True, **mode)) for mode in modes]


def _by_prefixes(
    tokenizer: "PreTrainedTokenizerBase", render: Render, messages: Messages, at: str, data: CausalLMData
) -> tuple[NDArray[Any], NDArray[Any]]:
    whole = render(messages, tokenize=False)
    encoding = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoding["input_ids"], np.int32)
    if not data.completion_only_loss:
        return ids, np.ones(len(ids), np.bool_)
    starts = np.array([start for start, _ in encoding["offset_mapping"]], np.int64)
    is_target = np.zeros(len(ids), np.bool_)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompts = _prompts(tokenizer, render, messages[:index]) if index else [""]
        after = render(messages[: index + 1], tokenize=False) if index + 1 < len(messages) else whole
        before = max((each for each in prompts if after.startswith(each)), key=len, default=None)
        if before is None or not whole.startswith(after):
            raise ValueError(
                f"{at}, message {index + 1}: the chat template renders the turns before differently once this one "
                "follows, so the assistant's text cannot be found; put {% generation %} around the assistant's text "
                "in data.chat_template (trl/chat_templates of the package trl has such templates of Qwen, Phi, "
                "DeepSeek, gpt-oss and others), or set data.completion_only_loss: false"
            )
        is_target |= (starts >= len(before)) & (starts < len(after))
    return ids, is_target


def _rendered(tokenizer: "PreTrainedTokenizerBase", messages: Messages, *, at: str, **options: Any) -> Any:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        found = tokenizer.apply_chat_template(messages, **options)
        if isinstance(found, str) and len(found) > MOST_CHARACTERS:
            raise ValueError(f"it makes {len(found):,} characters of it, and at most {MOST_CHARACTERS:,} are allowed")
        return found
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not Jinja: line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, KeyError, ValueError, ArithmeticError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"{at}: the chat template refuses it: {error} (roles: {roles})") from error
