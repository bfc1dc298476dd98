"""Entities are counted as seqeval counts them, whatever the tags, the sentences' lengths and the batches."""

import random
import warnings

import pytest
import torch
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

from accel_train.metrics.entities import entity_counts, entity_tags
from accel_train.metrics.scores import entity_scores

IOB = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
IOBES = (*IOB, "E-LOC", "S-LOC", "E-PER", "S-PER")


def sentences(names: tuple[str, ...], seed: int, right: float) -> list[tuple[list[str], list[str]]]:
    """True and predicted tags of sentences of 1 to 12 words; any tag may follow any other."""
    draw = random.Random(seed)
    found = []
    for _ in range(60):
        truth = [draw.choice(names) for _ in range(draw.randint(1, 12))]
        found.append((truth, [tag if draw.random() < right else draw.choice(names) for tag in truth]))
    return found


def padded(rows: list[list[str]], names: tuple[str, ...]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[names.index(tag) for tag in row] + [-100] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("names", [IOB, IOBES], ids=["IOB", "IOBES"])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_scores_are_those_of_seqeval(names: tuple[str, ...], right: float) -> None:
    tags = entity_tags(names)
    assert tags is not None
    pairs = sentences(names, 3, right)
    truth, predicted = (list(side) for side in zip(*pairs))
    labels, predictions = padded(truth, names), padded(predicted, names).clamp(min=0)
    whole = entity_counts(tags, labels, predictions)
    parts = [
        entity_counts(tags, labels[start : start + 7], predictions[start : start + 7]) for start in range(0, 60, 7)
    ]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    found = entity_scores(whole, tags.types, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = classification_report(truth, predicted, output_dict=True)
        expected = {
            "precision": precision_score(truth, predicted),
            "recall": recall_score(truth, predicted),
            "f1": f1_score(truth, predicted),
            "f1_macro": f1_score(truth, predicted, average="macro"),
        }
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected)
    ours = found.details["classification"]["report"]
    for name in ("LOC", "PER", "macro avg", "weighted avg"):
        assert ours[name] == pytest.approx(report[name])


def test_an_entity_counts_only_where_type_and_both_ends_are_right() -> None:
    tags = entity_tags(IOB)
    assert tags is not None
    labels = torch.tensor([[1, 2, 2, 0, 3, -100, -100]])
    for predicted, found in (
        ([1, 2, 2, 0, 3, 4, 4], [[1, 1, 1], [1, 1, 1]]),  # what fills up counts nowhere
        ([1, 2, 0, 0, 3, 0, 0], [[0, 1, 1], [1, 1, 1]]),
        ([3, 4, 4, 0, 1, 0, 0], [[0, 1, 1], [0, 1, 1]]),
        ([2, 2, 2, 0, 4, 0, 0], [[1, 1, 1], [1, 1, 1]]),  # I- begins one where none is open (IOB1)
        ([1, 1, 2, 0, 3, 3, 0], [[0, 2, 1], [1, 1, 1]]),
    ):
        assert entity_counts(tags, labels, torch.tensor([predicted])).tolist() == found, predicted


def test_tags_that_tell_no_entities_are_plain() -> None:
    assert entity_tags(("NOUN", "VERB", "O")) is None
    assert entity_tags(("O", "X-LOC", "B-LOC")) is None
    assert entity_tags(("O", "S-LOC")) is None
    plain = entity_tags(("B", "I", "O"))
    assert plain is not None
    assert plain.types == ("_",)
