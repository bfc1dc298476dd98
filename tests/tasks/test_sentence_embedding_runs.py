"""Sentence embeddings in whole runs: 4-bit bases on shards, processes without rows, and predictions of several."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from tests.support.runs import events, write_jsonl
from tests.support.text_tasks import predict
from tests.support.wording import assert_golden
from tests.tasks.test_sentence_embedding import BERT, FAULTY, TRIPLETS, train_rows, write_rows

STEPS = 6
FSDP2: dict[str, Any] = {"strategy": "fsdp2"}


def on_4_bits(folder: Path, **optimizer: float) -> dict[str, Any]:
    """Return sections that train adapters on random weights of `BERT`, written to `folder`, in 4 bits."""
    torch.manual_seed(5)
    path = folder / "base"
    AutoModel.from_config(AutoConfig.for_model(**BERT | {"vocab_size": 320})).save_pretrained(path)
    return {
        "model": {"pretrained": str(path), "frozen_dtype": "nf4", "lora": {"rank": 4}},
        "optimizer": {"learning_rate": 1e-2, **optimizer},
        "schedule": {"max_steps": STEPS},
        "data": TRIPLETS,
        "task": FAULTY,
    }


@pytest.mark.slow
def test_adapters_on_a_4_bit_base_train_on_shards_as_on_one_process_and_resume_to_the_bit(tmp_path: Path) -> None:
    sections = on_4_bits(tmp_path, ema_decay=0.9)
    one = train_rows(tmp_path, "one", 1, 8, **sections)
    whole = train_rows(tmp_path, "whole", 2, 2, parallel=FSDP2, **sections)
    assert [loss for loss, _ in whole] == pytest.approx([loss for loss, _ in one], rel=1e-6)
    assert whole == [pytest.approx(each, rel=1e-5) for each in one]
    assert one[0][0] - one[-1][0] > 0.05, "the losses do not move, so nothing is compared"
    term = {"term_at": {"step": 3, "rank": 1}}
    train_rows(tmp_path, "parts", 2, 2, expect=75, parallel=FSDP2, options=term, **sections)
    assert train_rows(tmp_path, "parts", 2, 2, parallel=FSDP2, **sections) == whole
    [resumed] = events(tmp_path / "parts", "resume")
    assert 0 < resumed["step"] < STEPS
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs, alone = (load_file(tmp_path / name / file) for name in ("parts", "whole", "one"))
        assert ours.keys() == theirs.keys() == alone.keys()
        assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
        for name, each in alone.items():
            torch.testing.assert_close(ours[name], each, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_4_bit_run_of_two_shards_goes_on_in_one_process(tmp_path: Path) -> None:
    sections = on_4_bits(tmp_path)
    one = train_rows(tmp_path, "one", 1, 8, **sections)
    term = {"term_at": {"step": 3, "rank": 0}}
    train_rows(tmp_path, "parts", 2, 4, expect=75, parallel=FSDP2, options=term, **sections)
    found = train_rows(tmp_path, "parts", 1, 4, **sections)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in one], rel=1e-6)
    assert len(events(tmp_path / "parts", "resume")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_device", "parallel"),
    [(4, {}), (2, {}), (2, FSDP2), (4, FSDP2)],
    ids=["one micro-batch", "two", "two, sharded", "one, sharded"],
)
def test_a_process_without_rows_at_the_end_of_an_epoch_changes_no_loss(
    tmp_path: Path, per_device: int, parallel: dict[str, Any]
) -> None:
    """Of 17 rows, the third step of an epoch has one, so one of two processes has none."""
    data = {**TRIPLETS, "train": str(write_rows(tmp_path, 17).rename(tmp_path / "short.jsonl"))}
    sections = {"data": data, "schedule": {"max_steps": 7}}
    whole = train_rows(tmp_path, "whole", **sections)
    found = train_rows(tmp_path, "parts", 2, per_device, parallel=parallel, **sections)
    assert len(found) == 7
    # Cosines are scaled by 20, and so are their roundings. The loss of one row is small next to that.
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in whole], rel=1e-6, abs=2e-6)
    assert found == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in whole]
    assert all(norm > 0 for _, norm in found)


@pytest.mark.slow
def test_two_processes_predict_each_row_once_in_order(tmp_path: Path) -> None:
    train_rows(tmp_path, "run", data=TRIPLETS)
    lines = [json.loads(line) for line in write_rows(tmp_path, 21).read_text().splitlines()]
    rows = write_jsonl(tmp_path / "new.jsonl", [{"id": f"row {number}", **each} for number, each in enumerate(lines)])
    for columns, name in (("[anchor, positive]", "similarity"), ("[anchor]", "embedding")):
        found = []
        for processes in (1, 2):
            flags = ("--data.pair_columns", columns, "--data.id_column", "id")
            out = tmp_path / f"{name}-{processes}.jsonl"
            found.append(predict(tmp_path / "run", out, rows, *flags, processes=processes))
        assert [row["id"] for row in found[1]] == [f"row {number}" for number in range(21)]
        for row, other in zip(*found, strict=True):
            assert row["id"] == other["id"]
            assert row[name] == pytest.approx(other[name], abs=1e-6)


def test_the_similarity_of_a_row_is_the_product_of_its_two_embeddings_with_the_prompts_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_rows(tmp_path, "run", data={**TRIPLETS, "anchor_prompt": "query: ", "positive_prompt": "passage: "})
    rows = write_rows(tmp_path, 5)
    found, said = [], []
    for number, (columns, *more) in enumerate(
        (
            ("[anchor]",),
            ("[positive]",),
            ("[anchor, positive]",),
            ("[positive, anchor]",),
            ("[positive]", "--data.column_prompts", "[query]"),
        )
    ):
        flags = ("--data.pair_columns", columns, *more)
        found.append(predict(tmp_path / "run", tmp_path / f"{number}.jsonl", rows, *flags))
        said.append(capsys.readouterr().err)
    assert [len(each) for each in found] == [5] * 5
    for columns, err in zip(("anchor", "positive", "both", "turned", "as query"), said, strict=True):
        assert_golden("\n".join(line for line in err.splitlines() if " prompt " in line), case=columns)
    for anchor, positive, both, turned, as_query in zip(*found, strict=True):
        assert turned["similarity"] == pytest.approx(both["similarity"], abs=1e-6)
        assert as_query["embedding"] != pytest.approx(positive["embedding"], abs=1e-3)
        product = torch.tensor(anchor["embedding"]) @ torch.tensor(positive["embedding"])
        assert both["similarity"] == pytest.approx(float(product), abs=1e-6)
        assert torch.tensor(anchor["embedding"]).norm() == pytest.approx(1.0, abs=1e-5)
