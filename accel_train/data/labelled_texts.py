"""The labelled texts of a recipe: read, given their labels, and divided into training and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.data.labels import LabelScheme, label_scheme, scheme_without_labels
from accel_train.data.sources import describe, resolve_sources
from accel_train.data.tables import class_names
from accel_train.data.text_rows import TextRows, hold_out, read_text_rows, repeated_texts
from accel_train.recipe import Recipe


@dataclass(frozen=True)
class LabelledTexts:
    """Texts in memory with their labels as `LabelScheme.encode` gives them."""

    scheme: LabelScheme
    train: TextRows
    train_labels: NDArray[Any]
    eval: TextRows | None
    eval_labels: NDArray[Any] | None
    description: str
    """What was read, for people."""
    notes: tuple[str, ...]
    """What a user should know: sentences."""

    @property
    def num_train_of_label(self) -> dict[str, int]:
        """Training texts of each class; empty for a regression."""
        if self.scheme.problem_type == "regression":
            return {}
        labels, names = self.train_labels, self.scheme.names
        known = labels[labels >= 0] if labels.ndim == 1 else labels > 0
        per_class = np.bincount(known, minlength=len(names)) if labels.ndim == 1 else known.sum(axis=0)
        return {name: int(count) for name, count in zip(names, per_class, strict=True)}


def load_labelled_texts(recipe: Recipe, order_of_names: Callable[[tuple[str, ...]], tuple[str, ...]]) -> LabelledTexts:
    """Read `data.train` and `data.eval`, or hold out a part of the first.

    Args:
        order_of_names: which id each class gets, where neither recipe nor data say so.

    Raises:
        ValueError: a row cannot be read, or has no label or an unknown one; the text names file, row and column.
    """
    section = recipe.data
    sources = resolve_sources(section.train, section, leaf="data.train")
    eval_sources = () if section.eval is None else resolve_sources(section.eval, section, leaf="data.eval")
    notes = [note for source in (*sources, *eval_sources) for note in source.notes]
    rows = read_text_rows(sources, section, leaf="data.train")
    if section.label_column is None:
        scheme = scheme_without_labels(recipe.model.problem_type, section.label_names)
    else:
        scheme = label_scheme(
            rows.labels,
            column=section.label_column,
            problem_type=recipe.model.problem_type,
            label_names=section.label_names,
            feature_names=class_names(sources[0], section.label_column),
        )
    if scheme.problem_type != "regression" and section.label_names is None:
        scheme = scheme.renamed(order_of_names(scheme.names))
    evaluation: TextRows | None
    if eval_sources:
        train, evaluation = rows, read_text_rows(eval_sources, section, leaf="data.eval")
        notes += repeated_texts(train, evaluation) if section.label_column is not None else []
    else:
        train, evaluation, split_notes = hold_out(rows, section.eval_fraction)
        notes += split_notes

    def labels_of(some: TextRows) -> NDArray[Any]:
        return scheme.without_labels(len(some)) if section.label_column is None else scheme.encode(some.labels)

    texts = LabelledTexts(
        scheme=scheme,
        train=train,
        train_labels=labels_of(train),
        eval=evaluation,
        eval_labels=None if evaluation is None else labels_of(evaluation),
        description=describe(sources) + (f"; evaluation: {describe(eval_sources)}" if eval_sources else ""),
        notes=tuple(notes),
    )
    missing = [name for name, count in texts.num_train_of_label.items() if count == 0]
    if missing and section.label_column is not None:
        note = f"no training text has the label {', '.join(missing)}: it cannot be learned"
        texts = replace(texts, notes=(*texts.notes, note))
    return texts
