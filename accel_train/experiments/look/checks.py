"""Findings about the samples of both sides and the batches of the first steps, in order of harm."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from accel_train.data.labels import class_doubts
from accel_train.experiments.look.units import Unit, Units, near_pairs
from accel_train.task import Collated, TaskData

KINDS = {
    "teaches_nothing": "{} of the first {} steps have no target, so they teach nothing. Check labels and masks",
    "unreadable": "{} of {} samples cannot be read, and the run stops there. Repair or remove them",
    "broken": "{} of {} broken samples that data.max_broken allows. Training leaves them out. Repair or remove them",
    "not_finite": "{} of {} samples hold NaN or Inf. Repair or remove them",
    "one_class": "{} of {} training samples are of one class, so there is nothing to learn. Add other classes",
    "leak": "{} of {} evaluation samples are training samples too, so their score says little. Remove them",
    "near_leak": "{} of {} evaluation texts are nearly training texts. Remove them, or set data.group_column",
    "swapped_labels": "{} of {} samples have another class than such texts in other files. Compare their labels",
    "contradiction": "{} of {} samples have the input of another sample, and another class. Keep one of them",
    "other_template": "{} of {} texts hold marks of another chat template, which the model reads as plain text. Write "
    "chats as messages (data.format: chat)",
    "wrong_encoding": "{} of {} texts have broken characters. Set data.encoding, or repair the files",
    "no_target": "{} of {} samples have no target, so they teach nothing. Label or remove them",
    "cut_answers": "{} of {} answers are cut, so the model does not learn to end them. Raise the maximum length",
    "unknown_tokens": "{} of {} texts have many unknown tokens. Use a tokenizer of their language",
    "empty": "{} of {} texts are empty. Remove them",
    "blank_images": "{} of {} images have one color only. Remove them",
    "empty_masks": "{} of {} masks have one value only. Check their numbers (data.mask_values)",
    "no_boxes": "{} of {} images have no boxes. Check that their annotations are found",
    "missing_class": "{} of {} classes have no training sample, so they are not learned. Add some",
    "one_class_steps": "{} of the first {} steps have samples of one class only. Set data.shuffle: true",
    "other_shares": "{} of {} evaluation samples need another class for the shares of training. Split one source",
    "doubtful_labels": "{} of {} classes are doubtful",
    "duplicates": "{} of {} training samples are copies of others. Remove them",
    "near_duplicates": "{} of {} training texts are nearly copies of others. Remove them, or accept their weight",
    "cut": "{} of {} texts are cut. Raise the maximum length",
    "padding": "{} of {} positions in the first steps are padding. Set data.group_by_length: true",
    "few_held_out": "{} of {} samples are held out, too few to measure",
}
"""Sentence of each kind of finding, with a count and a total, in order of harm."""
LEAST_SHARES = {
    "duplicates": 0.05,
    "near_duplicates": 0.2,
    "leak": 0.01,
    "near_leak": 0.1,
    "contradiction": 0.02,
    "wrong_encoding": 0.005,
    "empty": 0.01,
    "blank_images": 0.01,
    "empty_masks": 0.5,
    "no_boxes": 0.5,
    "cut": 0.5,
    "cut_answers": 0.05,
    "one_class": 0.999,
    "one_class_steps": 0.5,
    "other_shares": 0.3,
    "padding": 0.7,
}
"""Share of the total up to which the kind is usual, and no finding."""
STOPS = {"teaches_nothing", "unreadable", "not_finite", "one_class"}
"""Findings with which a batch would teach nothing."""
MOST_EXAMPLES = 3
_FEWEST_NEAR = 20
"""Units of a side from which near copies are a finding. Of a few long documents, some are often alike."""
MOST_FILES = 50
_FEWEST_COMPARED = 100
"""Evaluation samples from which their shares of classes are compared with the shares in training."""
_FEWEST_OF_FILE = 10
"""Samples of a class in a file from which its classes are compared with the other files' classes."""
_BUCKETS = 4096


Steps = Sequence[Sequence[Collated]]
"""Micro-batches of each step."""


@dataclass(frozen=True)
class Finding:
    """Something about the data that harms a training."""

    kind: str
    count: int
    total: int
    examples: tuple[str, ...] = ()
    """Files and rows of the first samples."""

    @property
    def sentence(self) -> str:
        """Return the finding with its numbers, and what to do."""
        return KINDS[self.kind].format(f"{self.count:,}", f"{self.total:,}")

    @property
    def stops(self) -> bool:
        """Return whether a batch would teach nothing."""
        return self.kind in STOPS


def find(
    train: Units, held: Units, data: TaskData, of_steps: Iterable[Finding], too_few: Sequence[str]
) -> list[Finding]:
    """Return the findings about training samples, evaluation samples, and steps, the most harmful first.

    `too_few` are the run's sentences on too few samples that are held out.
    """
    names = data.facts.label_names or ()
    found = chain(
        _of_samples([*train, *held]),
        _repeated(train, held),
        _of_classes(train, held, names, data),
        [Finding("few_held_out", len(held) if too_few else 0, len(train) + len(held), (*too_few,))],
        [_finding("swapped_labels", list(_swapped(train)), len(train))],
        of_steps,
    )
    kept = (each for each in found if each.count > LEAST_SHARES.get(each.kind, 0) * each.total)
    return sorted(kept, key=lambda each: [*KINDS].index(each.kind))


def _finding(kind: str, units: Units, total: int) -> Finding:
    return Finding(kind, len(units), total, tuple(f"{unit.where}: {unit.beginning}" for unit in units[:MOST_EXAMPLES]))


def _of_samples(units: Units) -> Iterator[Finding]:
    for kind in {kind for unit in units for kind in unit.problems}:
        yield _finding(kind, [unit for unit in units if kind in unit.problems], len(units))


def _repeated(train: Units, held: Units) -> Iterator[Finding]:
    first: dict[int, Unit] = {}
    copies = [(unit, before) for unit in train if (before := first.setdefault(unit.digest, unit)) is not unit]
    yield _finding("contradiction", [unit for unit, before in copies if unit.label != before.label], len(train))
    yield _finding("duplicates", [unit for unit, before in copies if unit.label == before.label], len(train))
    yield _finding("leak", [unit for unit in held if unit.digest in first], len(held))
    if min(len(train), len(held) or len(train)) < _FEWEST_NEAR:
        return
    both = [*train, *held]
    pairs = list(near_pairs(both))
    near = dict.fromkeys(later for later, _ in pairs if later < len(train))
    leaks = dict.fromkeys(later for later, earlier in pairs if earlier < len(train) <= later)
    yield _finding("near_duplicates", [both[number] for number in near], len(train))
    yield _finding("near_leak", [both[number] for number in leaks], len(held))


def _of_classes(train: Units, held: Units, names: Sequence[str], data: TaskData) -> Iterator[Finding]:
    counts, others = (Counter(chain.from_iterable(unit.classes for unit in side)) for side in (train, held))
    # A sentence need not have every tag.
    if not counts or all(unit.label is None and unit.length for unit in train):
        return
    known = data.facts.num_train_of_label
    # Rare classes may be absent from the units of a large set, and from the shards that are read.
    is_whole = data.shards is None and (known or len(train) >= (data.facts.num_train or 0))
    missing = [name for number, name in enumerate(names) if is_whole and not known.get(name, counts[number])]
    yield Finding("missing_class", len(missing), len(names), tuple(missing[:MOST_EXAMPLES]))
    if all(unit.label is None for unit in train):
        return
    yield Finding("one_class", max(counts.values()), len(train))
    doubts = [doubt.problem for doubt in class_doubts({names[number]: count for number, count in counts.items()})]
    yield Finding("doubtful_labels", len(doubts), len(names), tuple(doubts))
    moved = sum(max(0, others[number] - counts[number] * len(held) / len(train)) for number in others)
    yield Finding("other_shares", round(moved) if len(held) >= _FEWEST_COMPARED else 0, len(held))


def findings_of_steps(steps: Steps, *, shuffled: bool) -> list[Finding]:
    """Return what the batches of the first steps show; last, the positions that hold padding."""
    targets = [sum(batch["num_targets"] for batch in step) for step in steps]
    alike = [] if shuffled else list(filter(_is_of_one_class, steps))
    masks = [batch["attention_mask"] for batch in chain(*steps) if "attention_mask" in batch]
    return [
        Finding("teaches_nothing", targets.count(0), len(steps)),
        Finding("one_class_steps", len(alike), len(steps)),
        Finding("padding", sum(int((mask == 0).sum()) for mask in masks), sum(mask.numel() for mask in masks)),
    ]


def _is_of_one_class(step: Sequence[Collated]) -> bool:
    labels = [batch["labels"] for batch in step if "labels" in batch]
    return bool(labels) and all(each.ndim == 1 for each in labels) and len(torch.cat(labels).unique()) == 1


def _swapped(train: Units) -> Iterator[Unit]:
    """Yield the samples of two classes of a file that the words of the other files exchange.

    The other files are the data of a naive Bayes classifier, which must mostly take both classes for each other.
    """
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.metrics import confusion_matrix
    from sklearn.naive_bayes import MultinomialNB

    units = [unit for unit in train if unit.label is not None and len(unit.words)]
    files, labels = (np.array([getattr(unit, name) for unit in units]) for name in ("file", "label"))
    names = {*files.tolist()}
    if not 1 < len(names) <= MOST_FILES:
        return
    hasher = FeatureHasher(_BUCKETS, input_type="string", alternate_sign=False)
    words = hasher.transform([map(str, unit.words) for unit in units])
    for name in sorted(names):
        is_own = files == name
        taken = MultinomialNB().fit(words[~is_own], labels[~is_own]).predict(words[is_own])
        counts = confusion_matrix(labels[is_own], taken, labels=range(labels.max() + 1))
        is_mostly = counts > np.maximum(counts.sum(axis=1, keepdims=True) / 2, _FEWEST_OF_FILE)
        np.fill_diagonal(is_mostly, False)
        exchanged = (is_mostly & is_mostly.T).any(axis=1)
        yield from (units[number] for number in np.flatnonzero(is_own & exchanged[labels]))
