"""Names on the page, and the choice of metrics with a curve."""

from collections.abc import Sequence

from accel_train.core.metric_names import follows_from_loss, is_variant
from accel_train.report.run import Run

MAX_CURVES = 12
"""Maximum number of charts of evaluation metrics on a page. The table contains all metrics."""

LABELS = {
    "command": "Command",
    "host": "Host",
    "folder": "Started in",
    "git_commit": "Git commit",
    "gpu": "GPU",
    "cpu_cores": "CPU cores",
    "python": "Python",
    "platform": "Platform",
}
NOT_A_SCORE = frozenset({"step", "split", "seconds", "num_targets"})
"""Columns of an evaluation's line that describe the evaluation, not the model."""


def words(name: str) -> str:
    """Return a name as words.

    `num_empty_documents` becomes `Empty documents`, and `num_train_of_label.cat` becomes `Train of label: cat`.
    """
    name, _, part = name.partition(".")
    text = LABELS.get(name, name.removeprefix("num_").replace("_", " "))
    return text[:1].upper() + text[1:] + (f": {part}" if part else "")


def metrics_with_curves(runs: Sequence[Run]) -> list[str]:
    """Return at most `MAX_CURVES` metrics, without the loss, that some run has evaluated at least twice.

    Of the averages of precision, recall and F1 it returns only the macro F1, because their curves look alike.
    """
    # Whether some run has evaluated a metric twice, by name.
    found: dict[str, bool] = {}
    unusable = set(NOT_A_SCORE)
    for run in runs:
        first_step: dict[str, int] = {}
        for line in run.evals:
            for name, value in line.items():
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    unusable.add(name)
                elif value is not None:
                    again = first_step.setdefault(name, line["step"]) != line["step"]
                    found[name] = found.get(name, False) or again
    names = [name for name, is_curve in found.items() if is_curve and name not in unusable]
    names = [name for name in names if not is_variant(name, names) and not follows_from_loss(name)]
    shown = [*dict.fromkeys(name.rpartition("/")[2] for name in names)][:MAX_CURVES]
    return [name for name in names if name.rpartition("/")[2] in shown]
