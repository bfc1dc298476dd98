"""What all tests of the Trainer face share."""

import pytest


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the report takes longer than everything else here together."""
    monkeypatch.setattr("accel_train.training.finish.write_report", lambda runs: runs[0] / "report.html")
