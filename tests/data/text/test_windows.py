"""Windows cover the stream exactly once, and batches say which labels count."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.tokens import TokenStream, WindowDataset, collate_windows
from tests.support.wording import raises_golden

SEPARATOR = 99


def dataset(tokens: list[int], sequence_length: int, dtype: str = "<u2") -> WindowDataset:
    path = Path("tokens.bin")
    np.array(tokens, dtype).tofile(path)
    return WindowDataset(TokenStream.of(path, np.dtype(dtype), len(tokens)), sequence_length=sequence_length)


def test_windows_overlap_by_one_token_and_the_last_is_padded() -> None:
    windows = dataset(list(range(10, 21)), 4)
    assert len(windows) == 3
    rows = windows.__getitems__([2, 0, 1, 2])
    assert rows.dtype == np.int64
    assert rows.tolist() == [[18, 19, 20, -1, -1], [10, 11, 12, 13, 14], [14, 15, 16, 17, 18], [18, 19, 20, -1, -1]]
    assert windows[1].tolist() == rows[2].tolist()


@pytest.mark.parametrize("num_tokens", range(12))
def test_every_token_but_the_first_is_a_target_exactly_once(num_tokens: int) -> None:
    windows = dataset(list(range(num_tokens)), 4)
    targets: list[int] = []
    counted = 0
    for index in range(len(windows)):
        batch = collate_windows(windows.__getitems__([index]), separator_id=SEPARATOR, mask_documents=False)
        targets += batch["labels"][batch["labels"] != IGNORED_LABEL].tolist()
        assert batch["num_targets"] > 0, "no window is empty"
        counted += batch["num_targets"]
    assert targets == list(range(1, num_tokens))
    assert counted == max(0, num_tokens - 1)


def test_each_label_is_the_token_after_its_input() -> None:
    tokens = np.random.default_rng(0).integers(0, 70_000, 35).tolist()
    windows = dataset(tokens, 8, dtype="<u4")
    batch = collate_windows(windows.__getitems__(range(len(windows))), separator_id=SEPARATOR, mask_documents=False)
    valid = batch["labels"] != IGNORED_LABEL
    assert batch["input_ids"][valid].tolist() == tokens[:-1]
    assert batch["labels"][valid].tolist() == tokens[1:]
    assert batch["input_ids"][~valid][1:].eq(SEPARATOR).all(), "padding is a token that an embedding has"


def test_a_batch_has_the_types_of_the_contract() -> None:
    windows = dataset(list(range(20)), 8)
    rows = windows.__getitems__([0, 1])
    batch = collate_windows(rows, separator_id=SEPARATOR, mask_documents=False)
    assert sorted(batch) == ["input_ids", "labels", "num_targets"]
    assert type(batch["num_targets"]) is int
    assert batch["num_targets"] == 16
    for name in ("input_ids", "labels"):
        assert batch[name].dtype == torch.int64
        assert batch[name].shape == (2, 8)
        assert batch[name].is_contiguous()
    assert rows.tolist() == windows.__getitems__([0, 1]).tolist(), "collating leaves the rows as they were"
    as_list = collate_windows(list(rows), separator_id=SEPARATOR, mask_documents=False)
    assert torch.equal(as_list["labels"], batch["labels"])


def test_positions_restart_and_documents_count_at_each_separator() -> None:
    tokens = [SEPARATOR, 1, 2, SEPARATOR, 3, 4, 5, SEPARATOR, SEPARATOR, 6, 7]
    windows = dataset(tokens, 6)
    batch = collate_windows(windows.__getitems__([0, 1]), separator_id=SEPARATOR, mask_documents=True)
    assert batch["input_ids"].tolist() == [[99, 1, 2, 99, 3, 4], [5, 99, 99, 6, 7, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 0]]
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2, 2, 2], [0, 1, 2, 2, 2, 3]]
    assert batch["document_lengths"].tolist() == [[3, 3, 0, 0], [1, 1, 3, 1]]
    assert batch["labels"].tolist() == [[1, 2, 99, 3, 4, 5], [99, 99, 6, 7, -100, -100]]
    assert batch["num_targets"] == 10
    assert batch["position_ids"].dtype == batch["document_ids"].dtype == torch.int64


def test_padding_is_one_document_of_its_own() -> None:
    windows = dataset([SEPARATOR, 1, 2], 6)
    batch = collate_windows(windows.__getitems__([0]), separator_id=SEPARATOR, mask_documents=True)
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2, 2, 2]]
    assert batch["document_lengths"].tolist() == [[3, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_a_window_that_is_not_there_is_an_index_error(index: int) -> None:
    with raises_golden(IndexError):
        dataset(list(range(11)), 4).__getitems__([0, index])


def test_a_pickled_dataset_is_a_path_and_not_the_tokens() -> None:
    windows = dataset(list(range(60_000)), 8)
    before = windows[7].tolist()
    pickled = pickle.dumps(windows)
    assert len(pickled) < 2_000
    assert pickle.loads(pickled)[7].tolist() == before  # noqa: S301 (our own bytes)
