"""Poisoned runs end where clean ones do, unattended: benchmarks/poison.py with fewer steps and one seed."""

from pathlib import Path

import pytest

from benchmarks.poison import (
    MOST_LOSS_ABOVE,
    MOST_ROLLBACKS,
    POISONS,
    Outcome,
    excess,
    holds,
    poison_of,
    run_one,
    table,
)

STEPS, SEED = 400, 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("poison")


@pytest.fixture(scope="module")
def clean(runs: Path) -> Outcome:
    return run_one(runs, "none", 1, SEED, STEPS)


@pytest.mark.faults
@pytest.mark.parametrize("kind", [kind for kind in POISONS if kind != "nan_samples"])
def test_a_poisoned_run_ends_within_one_percent_of_the_clean_one(runs: Path, clean: Outcome, kind: str) -> None:
    outcome = run_one(runs, kind, 1, SEED, STEPS)
    assert holds(outcome, clean), f"{outcome}, clean {clean.loss}"
    troubles = outcome.skipped + outcome.clipped + outcome.rollbacks
    assert troubles > 0, "the poison had no effect, so nothing is proved"
    if kind == "nan_batches":
        assert outcome.rollbacks == 1
        assert 6 <= outcome.skipped < 10, "the rest is skipped by the rollback, after six in a row"


@pytest.mark.faults
def test_a_sample_that_is_poisoned_in_every_epoch_costs_its_steps_and_no_more(runs: Path) -> None:
    clean, outcome = (run_one(runs, kind, 3, SEED, STEPS) for kind in ("none", "nan_samples"))
    assert holds(outcome, clean), f"{outcome}, clean {clean.loss}"
    assert 3 <= outcome.skipped <= 9


# --- the bar -----------------------------------------------------------------------------------------------------


def ended(loss: float | None, *, code: int = 0, rollbacks: int = 0) -> Outcome:
    return Outcome("nan_batches", 1, code, loss, 6, 0, rollbacks, "")


def test_the_bar_is_missed_by_a_loss_a_rollback_or_an_exit_code_too_many() -> None:
    clean = ended(2.0)
    assert holds(ended(2.0 * (1 + MOST_LOSS_ABOVE) - 1e-6, rollbacks=MOST_ROLLBACKS), clean)
    assert not holds(ended(2.0 * (1 + MOST_LOSS_ABOVE) + 1e-6), clean)
    assert not holds(ended(2.0, rollbacks=MOST_ROLLBACKS + 1), clean)
    assert not holds(ended(None, code=3), clean)
    assert excess(ended(None, code=3), clean) is None
    printed = table({"clean": [clean], "nan_batches": [ended(2.2)]})
    assert "+10.00%" in printed
    assert "0 of 1 MISSED" in printed


@pytest.mark.parametrize("kind", POISONS)
def test_each_poison_lies_inside_the_run(kind: str) -> None:
    poison = poison_of(kind, STEPS)
    places = poison.get("steps") or [sample // 16 for sample in poison["samples"]]
    assert len(places) >= 3
    assert 1 <= min(places) <= max(places) <= STEPS
