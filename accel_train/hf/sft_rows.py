"""The rows of an SFTTrainer: their kinds, and checks of what TRL would accept without a word."""

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.compute
from datasets import Dataset

from accel_train.core.errors import SettingError
from accel_train.hf.argument_table import argument_error

KINDS = {"input_ids": "tokens", "messages": "chat", "conversations": "chat", "prompt": "pair", "completion": "pair"}
"""Kinds of rows by column. The kind of the text column is `text`."""
PREFERENCES = ("chosen", "rejected")


def data_error(at: str, problem: str, remedy: str) -> SettingError:
    """Return the error about the rows of a dataset."""
    return SettingError(problem, remedy, at, ("train_dataset",))


def check_kind(first: Mapping[str, Any], args: Any, at: str) -> None:
    """Check that a row is of one kind, which has the masks that the arguments ask for.

    Raises:
        SettingError: it is not. The message names the columns.
    """
    from trl.data_utils import is_conversational, is_conversational_from_value

    names, text_field = first.keys(), args.dataset_text_field
    found = kinds_of(first, text_field)
    is_chat = is_conversational(dict(first)) or is_conversational_from_value(dict(first))
    for is_wrong, problem, remedy in (
        (
            not names.isdisjoint(PREFERENCES),
            "chosen and rejected are preference data",
            "Rename chosen to messages, drop rejected.",
        ),
        (
            not found,
            f"has the columns {', '.join(names)}",
            f"Name them messages, prompt and completion, {text_field}, or input_ids.",
        ),
        (
            len(found) > 1 and "tokens" not in found,
            f"{' and '.join(each for each in names if each in KINDS or each == text_field)} hold different kinds "
            "of rows",
            "Keep one kind: dataset.remove_columns(...).",
        ),
        (
            found == {"pair"} and not {"prompt", "completion"} <= names,
            f"has the columns {', '.join(names)}",
            "Give both prompt and completion.",
        ),
        (
            found == {"chat"} and not is_chat,
            "the chats have no role and content",
            "Give lists of {'role': ..., 'content': ...}.",
        ),
        (
            args.completion_only_loss and "pair" not in found and not names & {"completion_mask", "labels"},
            "completion_only_loss=True needs prompt and completion",
            "Remove it; for the assistant's turns of a chat, set assistant_only_loss=True.",
        ),
        (
            args.assistant_only_loss and not is_chat and not names & {"assistant_masks", "labels"},
            "assistant_only_loss=True needs chats",
            "Remove it, or give messages, or assistant_masks with input_ids.",
        ),
        (
            args.completion_only_loss is None and "completion_mask" in names and "labels" not in names,
            "completion_mask has no effect by default",
            "Set completion_only_loss: True to learn completions alone, False to learn all tokens.",
        ),
    ):
        if is_wrong:
            raise data_error(at, problem, remedy)


def kinds_of(row: Mapping[str, Any], text_field: str) -> set[str]:
    """Return the kinds of rows that the columns belong to. One kind is unambiguous."""
    return {kind for name, kind in {text_field: "text", **KINDS}.items() if name in row}


def formatted(dataset: Any, function: Callable[[Any], str], args: Any) -> Any:
    """Return the texts that `formatting_func` makes of the rows, in the text column alone.

    Raises:
        SettingError: the function does not return one string for one row.
    """
    first = next(iter(dataset))
    if not isinstance(found := function(first), str):
        raise argument_error(
            f"returned {type(found).__name__} for one row",
            "Return one string; the function gets one row.",
            "formatting_func",
        )
    options: dict[str, object] = {"num_proc": args.dataset_num_proc} if isinstance(dataset, Dataset) else {}
    return dataset.map(lambda row: {args.dataset_text_field: function(row)}, remove_columns=list(first), **options)


def with_equal_lengths(dataset: Any, at: str) -> Any:
    """Return rows of tokens whose labels and masks are as long as `input_ids`. Rows of a stream are checked when read.

    Raises:
        SettingError: a column has another length. TRL would cut the longer one, or move labels to other tokens.
    """
    names = ("labels", "completion_mask", "assistant_masks")

    def check(row: dict[str, Any], index: int) -> dict[str, Any]:
        for name in names:
            if name in row and (found := len(row[name])) != (expected := len(row["input_ids"])):
                raise data_error(
                    at, f"row {index} has {expected} input_ids but {found} {name}", "Give one for each token."
                )

        return row

    if not isinstance(dataset, Dataset):
        return dataset.map(check, with_indices=True)
    columns = [name for name in ("input_ids", *names) if name in dataset.column_names]
    for index, row in enumerate(dataset.select_columns(columns).with_format(None)):
        check(row, index)
    return dataset


def first_empty(dataset: Any, text_field: str) -> str:
    """Return the place of the first row without content, in parentheses; empty if all have content."""
    for index, row in enumerate(dataset):
        if names := [name for name in (text_field, *KINDS) if name in row and not row[name]]:
            return f" (row {index} has an empty {names[0]})"
    return ""


def check_vocabulary(rows: Any, tokenizer: Any, size: int, at: str) -> None:
    """Check that the model has an embedding for each token of a dataset. Streams and rows without tokens are not read.

    Raises:
        SettingError: a token, or the padding token, is outside.
    """
    largest = tokenizer.pad_token_id or 0
    if isinstance(rows, Dataset) and "input_ids" in rows.column_names:
        for batch in rows.select_columns("input_ids").with_format("arrow").iter(10_000):
            largest = max(largest, pyarrow.compute.max(batch["input_ids"].combine_chunks().flatten()).as_py() or 0)
    if largest >= size:
        raise SettingError(
            f"token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) is not among the model's {size}",
            "Give the model's tokenizer, or call model.resize_token_embeddings(len(tokenizer)).",
            at,
            ("train_dataset", "processing_class"),
        )
