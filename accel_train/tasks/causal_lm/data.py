"""Read and tokenize the fine-tuning rows of a recipe into memory (`prepare_rows`)."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from multiprocessing import current_process, get_all_start_methods
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_train.core.files import digest64
from accel_train.core.hardware import usable_cores
from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord
from accel_train.data.sources import Source, describe
from accel_train.data.tables import Row, check_text, column_names, read_rows, resolve_both, show_cell, text_cell
from accel_train.data.text.corpus import Corpus
from accel_train.data.text.documents import Split, divide_rows
from accel_train.data.text.kept import Values
from accel_train.data.text.rows_cache import bpe_of, contents_of, open_rows
from accel_train.data.text.sharded_rows import cut_rows, row_shards
from accel_train.data.text.shards import Cut
from accel_train.data.text.tokenizers import KeptBPE, TextTokenizer, prepare_tokenizer, pretrained_tokenizer, train_bpe
from accel_train.data.text.tokens import Tokens, joined
from accel_train.recipe.data import Data, TrainedTokenizer
from accel_train.recipe.schema import Recipe
from accel_train.task import Facts
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.causal_lm.encoding import (
    Encoder,
    Example,
    Messages,
    Warnings,
    chat_encoder,
    chat_template,
    completion_encoder,
)
from accel_train.tasks.causal_lm.packing import TokenRows
from accel_train.tasks.rows import given

_ROWS_AT_ONCE = 1024
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_MEANINGFUL = ("tools", "label", "chosen", "rejected", "system", "input", "context", "history")
"""Columns that change the meaning of a row of chats or prompts. A note lists those that are not read."""

RowCorpus = Corpus[Any]
"""Training rows are `RowShards` or, like evaluation rows, `TokenRows` or several of them."""


def prepare_rows(recipe: Recipe, *, progress: bool) -> RowCorpus:
    """Return a recipe's tokenized fine-tuning rows, split into training and evaluation.

    Each row has at most `sequence_length` targets.

    Raises:
        ValueError: a source, row, tokenizer or chat template is wrong, or no training row is left.
    """
    data, spec = CausalLMData.of(recipe.data), recipe.tokenizer_in_use
    whole, note = cut_rows(data, {}, partial(_examples, data=data, progress=False))
    keep = open_rows(data, progress, sampled=whole is not None)
    name = "bytes" if isinstance(spec, TrainedTokenizer) else spec
    tokenizer = pretrained_tokenizer(name, trust_remote_code=recipe.model.trust_remote_code)
    template = chat_template(tokenizer.tokenizer, data) if data.format == "chat" else ""
    today = time.strftime("%x") if "strftime_now" in template else ""
    kept = keep(
        [contents_of(tokenizer.tokenizer), spec, template, today],
        lambda: _encoded(recipe, tokenizer, whole, progress),
        tuple,
    )
    if isinstance(spec, TrainedTokenizer):
        tokenizer = _trained(kept, spec)
    if template:
        # Saved with the tokenizer, so that others can chat with the model. So is the truncation, which encoding sets.
        tokenizer.tokenizer.chat_template = template
        tokenizer.tokenizer("")

    def rows_of(side: str, count: int) -> Any:
        parts = ([kept[f"{side}_{number}_{each.name}"] for each in fields(TokenRows)] for number in range(count))
        return joined([TokenRows(*part) for part in parts])

    evaluation, fingerprint = rows_of("eval", max(1, len(data.eval_sets))), kept["fingerprint"]
    facts, pins = Facts(**kept["facts"]), dict[Any, Any]()
    facts.notes += note
    if whole is None:
        train = rows_of("train", max(1, len(data.mixture)))
    else:
        split = Split(hashes=frozenset(kept["hashes"]), seed=data.split_seed)
        encode = partial(_encode_shard, tokenizer, data, split)
        contents = tokenizer.digest, template, today
        train, fingerprint, pins = row_shards(data, whole, fingerprint, contents, encode, len)
        facts.cache_folder = str(train.folder)
    return Corpus(
        train=train,
        eval=evaluation if len(evaluation) else None,
        tokenizer=tokenizer.tokenizer,
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        fingerprint=fingerprint,
        facts=facts,
        large_files=pins,
    )


def _encode_shard(
    tokenizer: TextTokenizer, data: CausalLMData, split: Split, sources: Sequence[Source]
) -> list[tuple[Any, ...]]:
    rows = [row for row in _examples(sources, data, False) if not split.holds_out(_key(row))]
    # Their warnings are lost, and those about the first rows are shown.
    encoded = _encode(rows, _encoder(tokenizer, data), data.train_key, data, [], Warnings(list), False)
    return [tuple(vars(encoded).values())]


def _encoded(recipe: Recipe, tokenizer: TextTokenizer, whole: Cut | None, progress: bool) -> Values:
    """Return the encoded rows. Of data in shards, those for evaluation, and the first ones for training."""
    data, spec = CausalLMData.of(recipe.data), recipe.tokenizer_in_use
    sources, eval_sources, notes = resolve_both(data)
    first = whole.sample() if whole else sources
    rows = _read(first, data, data.train_key, progress)
    others, key = rows[:0], f"first rows of {data.train_key}" if whole else data.train_key
    unread = [name for name in column_names(first[0], data) if name in _MEANINGFUL and name not in columns_of(data)]
    notes += [f"{data.train_key}: columns that are not read: {', '.join(unread)}"] if unread else []
    if eval_sources:
        held_out = [_read(each, data, "data.eval", progress) for each in data.by_set(eval_sources)]
    else:
        rows, others = _hold_out(rows, data, notes)
        held_out = [others]
    bpe: Values = {}
    if isinstance(spec, TrainedTokenizer):
        bpe = bpe_of(texts_of(rows), spec)
        tokenizer = _trained(bpe, spec)
    warnings = Warnings(list)
    encode = _encoder(tokenizer, data)
    # The windows of a mixture are of one source each.
    parts = [rows[:_ROWS_AT_ONCE] if whole else rows]
    if data.mixture and not whole:
        parts = [[row for row in rows if row.source == number] for number in range(len(sources))]
    trained = [_encode(part, encode, key, data, notes, warnings, progress) for part in parts]
    targets = np.concatenate([each.targets for each in trained])
    sets = [_encode(each, encode, "data.eval", data, notes, warnings, progress) for each in held_out]
    evaluated = np.concatenate([each.targets for each in sets])
    if not len(targets) and whole is None:
        raise ValueError(
            f"no training row keeps a target: all {len(rows):,} are longer than data.sequence_length="
            f"{data.sequence_length} tokens before their completion begins; raise it"
        )
    return {
        **bpe,
        **{
            f"{side}_{number}_{name}": array
            for side, parts in (("train", [] if whole else trained), ("eval", sets))
            for number, part in enumerate(parts)
            for name, array in vars(part).items()
        },
        "fingerprint": _fingerprint(*trained, *sets),
        "hashes": [digest64(_key(row).encode(), data.split_seed) for row in others] if whole else [],
        "facts": {
            "sources": describe(sources, eval_sources),
            "unigram_perplexity": None if whole else _unigram_perplexity(targets, evaluated, tokenizer.vocab_size),
            "others": {
                "num_train_rows": None if whole else sum(map(len, trained)),
                "num_eval_rows": sum(map(len, sets)),
                "eval_targets": len(evaluated),
            },
            "notes": [*notes, *(said.format(first=at[0], count=f"{len(at):,}") for said, at in warnings.items())],
        },
    }


def _trained(values: Values, spec: TrainedTokenizer) -> TextTokenizer:
    return prepare_tokenizer(train_bpe(KeptBPE(values["bpe"]), spec.train_bpe.vocab_size))


def _examples(sources: Sequence[Source], data: CausalLMData, progress: bool) -> Iterator[Example]:
    rows = ((number, row) for number, each in enumerate(sources) for row in read_rows(each, columns_of(data), data))
    return (check_row(row, data)._replace(source=source) for source, row in _bar(rows, "reading rows", progress))


def _encoder(tokenizer: TextTokenizer, data: CausalLMData) -> Encoder:
    return (chat_encoder if data.format == "chat" else completion_encoder)(tokenizer, data)


def _key(row: Example) -> str:
    return json.dumps(row.parts, sort_keys=True)


def _read(sources: Sequence[Source], data: CausalLMData, key: str, progress: bool) -> list[Example]:
    examples = [*_examples(sources, data, progress)]
    if not examples:
        raise ValueError(f"{key} holds no rows: {describe(sources)}")
    return examples


def columns_of(data: CausalLMData) -> list[str]:
    """Return the columns that `data.format` reads."""
    if data.format == "chat":
        return given(data.messages_column, data.tools_column)
    return given(data.prompt_column, data.completion_column, data.input_column)


def check_row(row: Row, data: CausalLMData) -> Example:
    """Return the example in a table row with the cells of `columns_of`.

    Raises:
        ValueError: a cell has the wrong type or nothing to learn; the message names file, row and column.
    """
    if data.format == "chat":
        messages = _messages(row.cells[0], f"{row.where}: column {data.messages_column!r}", data)
        at = f"{row.where}: column {data.tools_column!r}"
        return Example(messages, row.where, read_tools(row.cells[1], at, data) if data.tools_column else ())
    names = columns_of(data)
    texts = [text_cell(cell or "", name, row.where, data) for cell, name in zip(row.cells[2:], names[2:])]
    prompt, completion = (text_cell(*cell, row.where, data) for cell in zip(row.cells, names[:2]))
    prompt = "\n\n".join([prompt, *filter(None, texts)])
    if not completion:
        raise ValueError(
            f"{row.where}: column {data.completion_column!r} is empty, so there is nothing to learn; drop the row"
        )
    return Example((prompt, completion), row.where)


def _messages(value: Any, at: str, data: CausalLMData) -> Messages:
    shape = "a list of {role: ..., content: ...}"
    if not isinstance(value, list | tuple) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{at} holds {show_cell(value)}, not {shape}; set data.messages_column, or write such lists")
    if not value:
        raise ValueError(f"{at} is an empty list, so there is nothing to learn; drop the row")
    messages: Messages = []
    for number, message in enumerate(value, start=1):
        # Arrow fills absent keys with null.
        given = {name: item for name, item in message.items() if item is not None}
        if "role" not in given and isinstance(given.get("from"), str):  # ShareGPT's keys
            role = given.pop("from")
            key = "tool_calls" if role == "function_call" and data.tools_column is not None else "content"
            given = {"role": _SHAREGPT_ROLES.get(role, role), key: given.pop("value", None), **given}
        if data.tools_column is not None and "tool_calls" in given:
            calls = read_calls(given.pop("tool_calls"), f"{at}, message {number}", data)
            given |= {"tool_calls": calls} if calls else {}
        parts = given.get("content")
        # Parts of text, as in OpenAI's API.
        if isinstance(parts, list) and parts:
            other = next((part for part in parts if not _is_text_part(part)), None)
            if other is not None:
                raise ValueError(
                    f"{at}, message {number}: content has the part {show_cell(other)}; a language model learns only "
                    "parts {type: text, text: ...}; drop the row, or write the part as text"
                )
            given["content"] = "".join(part["text"] for part in parts)
        if given.pop("weight", 1) == 0:  # as in OpenAI's API
            raise ValueError(
                f"{at}, message {number}: weight 0 means not to learn it, and weights are not supported; drop the row"
            )
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
            given["content"] = check_text(content, f"{at}, message {number}", data)
        messages.append(given)
    if data.completion_only_loss and not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"{at} has no message of role 'assistant', so there is nothing to learn; "
            "drop the row, or set data.completion_only_loss: false"
        )
    return messages


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def texts_of(rows: Iterable[Example]) -> Iterator[str]:
    """Yield all texts of the rows, for training a tokenizer."""
    for row in rows:
        if isinstance(row.parts, tuple):
            yield from row.parts
        else:
            yield from (message["content"] for message in row.parts if "content" in message)


def _bar(items: Iterable[Any], title: str, shown: bool) -> Iterator[Any]:
    yield from tqdm(items, desc=title, unit=" rows", disable=None if shown else True, leave=False)


def _hold_out(rows: list[Example], data: CausalLMData, notes: list[str]) -> tuple[list[Example], list[Example]]:
    """Return rows for training and rows for evaluation. Equal rows are on the same side in every run."""
    train, evaluation, split = divide_rows(rows, [*map(_key, rows)], data.eval_fraction, "documents", data.split_seed)
    if split.cut_tail:
        notes.append("all rows are the same: none is held out for evaluation; name some in data.eval")
        return rows, []
    notes += [split.note] if split.note else []
    return train, evaluation


def _encode(
    rows: Sequence[Example],
    encode: Encoder,
    key: str,
    data: CausalLMData,
    notes: list[str],
    warnings: Warnings,
    progress: bool,
) -> TokenRows:
    """Return the tokens of all rows, cut at `sequence_length` targets, without the rows that have no target left."""
    sequence_length, starts = data.sequence_length, range(0, len(rows), _ROWS_AT_ONCE)
    tokens, is_target, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)], [0]
    kept = slice(sequence_length + 1)
    num_cut = num_dropped = 0

    def part(start: Any) -> Any:
        found = Warnings(list)
        # Across processes, a raised error gets another message.
        try:
            return encode(rows[start : start + _ROWS_AT_ONCE], found), found
        except ValueError as error:
            return error

    # Templates run in Python, so forked processes render chats. The first rows test the template before.
    may_fork = data.format == "chat" and "fork" in get_all_start_methods() and not current_process().daemon
    workers = min(usable_cores().value, len(starts) // 2) if may_fork else 0
    workers *= workers > 1
    others: DataLoader[Any] = DataLoader(
        starts[1:],  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=part,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=lambda _: os.environ.update(TOKENIZERS_PARALLELISM="false"),
        generator=torch.Generator(),
    )
    for result in _bar(chain(map(part, starts[:1]), others), f"tokenizing {key}", progress):
        if isinstance(result, ValueError):
            raise result
        encoded, found = result
        for said, places in found.items():
            warnings[said] += places
        for row in encoded:
            if not row.is_target[kept].any():
                num_dropped += 1
                continue
            num_cut += len(row.ids) > sequence_length + 1
            tokens.append(row.ids[kept])
            is_target.append(row.is_target[kept])
            lengths.append(len(tokens[-1]))
    if num_cut:
        notes.append(
            f"{key}: {num_cut:,} of {len(rows):,} rows are cut at data.sequence_length={sequence_length} tokens"
        )
    if num_dropped:
        notes.append(
            f"{key}: {num_dropped:,} of {len(rows):,} rows are left out, because nothing of their completion lies "
            f"within data.sequence_length={sequence_length} tokens"
        )
    return TokenRows(np.concatenate(tokens), np.concatenate(is_target), np.cumsum(lengths))


def _fingerprint(*sides: TokenRows) -> str:
    digest = hashlib.sha256()
    for rows in sides:
        for array in (rows.starts.astype("<i8"), rows.tokens.astype("<i4"), rows.is_target):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _unigram_perplexity(train: Tokens, evaluation: Tokens, vocab_size: int) -> float | None:
    """Return the perplexity of the evaluation targets under add-one unigram frequencies of the training targets."""
    if not len(evaluation):
        return None
    counts = np.bincount(train, minlength=vocab_size) + 1
    return float(np.exp(-np.log(counts / counts.sum())[evaluation].mean()))


def read_calls(value: Any, at: str, data: Data) -> list[JsonRecord]:
    """Return the calls of a message as {type: function, function: {name, arguments}}, with arguments as an object.

    OpenAI writes the arguments as a string, which templates would quote again. ShareGPT writes one call or a list.

    Raises:
        ValueError: a call is not JSON, or has no name or no arguments.
    """
    calls = read_tools(value, at, data)
    for call in calls:
        arguments = _json(call["function"].get("arguments"), at, data)
        if not isinstance(arguments, dict):
            raise ValueError(f"{at}: the arguments of a call are {show_cell(arguments)}, not an object; write {{}}")
        call["function"] = {**call["function"], "arguments": arguments}
    return calls


def read_tools(cell: Any, at: str, data: Data) -> list[JsonRecord]:
    """Return the tools in a cell (JSON, or a string of it) as {type: function, function: {name, ...}}.

    Raises:
        ValueError: the cell is not JSON, or a tool has no name.
    """
    tools, found = [], _json(cell, at, data) or []
    for tool in found if isinstance(found, list) else [found]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{at}: {show_cell(tool)} is not a function with a name; write {{name: ..., ...}}")
        tools.append({"type": "function", **(tool if "function" in tool else {"function": tool})})
    return tools


def _json(value: Any, at: str, data: Data) -> Any:
    """Return the value of a JSON string, or other values without null, with which Arrow fills absent keys."""
    is_string = isinstance(value, str)
    without_null = None if is_string else (lambda each: {name: item for name, item in each.items() if item is not None})
    try:
        text = json.dumps(parse_json(value or "null") if is_string else value, ensure_ascii=False, default=str)
    except ValueError as error:
        raise ValueError(f"{at}: {show_cell(value)} is not JSON ({error}); repair or drop the row") from None
    return parse_json(check_text(text, at, data), object_hook=without_null)
