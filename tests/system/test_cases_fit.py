"""What `fit` promised and did not hold: the count of samples, resumes on changed inputs, names of weights, sections."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate

from accel_train import fit
from tests.support.runs import losses

QUIET: dict[str, Any] = {"learning_rate": 1e-3, "log": {"every_steps": 1, "progress": False}}


def _first_loss(folder: Path) -> float:
    return losses(folder)[1]


@pytest.mark.parametrize("batch", ["time first", "graphs", "nested", "weights first", "0-dim first"])
def test_bugs_01_loss_is_divided_by_the_samples(batch: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randn(length, 3, generator=generator) for length in (10, 5, 7, 6)]
    targets = torch.randn(4, generator=generator)
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    collate: Callable[[Sequence[Any]], Any] | None = None
    samples: list[Any] = list(zip(sequences, targets, strict=True))
    predict: Callable[[nn.Module, Any], Tensor]
    if batch == "nested":
        samples = [({"x": row[0], "z": row[1]}, target) for row, target in samples]
        predict = lambda model, batch: model(batch[0]["x"] + batch[0]["z"])[:, 0]  # noqa: E731
    elif batch == "graphs":
        samples = [(row[:4], target) for row, target in samples]
        collate = lambda samples: [  # noqa: E731
            torch.cat([row for row, _ in samples]),
            torch.stack([target for _, target in samples]),
            torch.arange(len(samples)).repeat_interleave(4),
        ]
        predict = lambda model, batch: torch.zeros(len(batch[1])).index_add(0, batch[2], model(batch[0])[:, 0])  # noqa: E731
    else:
        first = {"time first": (), "weights first": (torch.ones(3),), "0-dim first": (torch.tensor(2.0),)}[batch]
        collate = lambda samples: (  # noqa: E731
            *first,
            pad_sequence([row for row, _ in samples]),
            torch.stack([target for _, target in samples]),
        )
        predict = lambda model, batch: model(batch[-2]).sum(0)[:, 0]  # noqa: E731

    def target(batch: Any) -> Tensor:
        found: Tensor = batch[1] if batch_name in ("nested", "graphs") else batch[-1]
        return found

    batch_name = batch

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (predict(model, batch) - target(batch)).square().mean()

    def off(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"off": (predict(model, batch) - target(batch)).abs()}

    whole = (collate or default_collate)(samples)
    expected = loss(model, whole)
    gradient = torch.linalg.vector_norm(
        torch.stack([each.norm() for each in torch.autograd.grad(expected, list(model.parameters()))])
    )
    common: dict[str, Any] = {"loss": loss, "collate": collate, "max_steps": 1, "batch_size": 4, **QUIET}
    result = fit(model, samples, eval_data=samples, metrics=off, output_dir=tmp_path / "run", **common)  # type: ignore[arg-type]
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(gradient.item(), rel=1e-5)
    with torch.no_grad():
        assert result.metrics["off"] == pytest.approx(off(model, whole)["off"].mean().item(), rel=1e-5)
        assert result.metrics["loss"] == pytest.approx(loss(model, whole).item(), rel=1e-5)


def test_bugs_05_a_loss_of_another_shape_than_the_samples_is_refused(tmp_path: Path) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1))
    arguments: dict[str, Any] = {"output_dir": tmp_path / "run", "max_steps": 1, "batch_size": 4, **QUIET}
    with pytest.raises(ValueError, match=r"loss has shape \(4, 4\) for 4 samples"):
        fit(nn.Linear(3, 1), data, loss=lambda model, batch: (model(batch[0]) - batch[1]).square(), **arguments)
    with pytest.raises(ValueError, match=r"loss has shape \(4, 1\) for 4 samples"):
        fit(nn.Linear(3, 1), data, loss=lambda model, batch: model(batch[0]).square(), **arguments)
    with pytest.raises(ValueError, match=r"metric wide has shape \(8, 8\) for 8 samples"):
        fit(
            nn.Linear(3, 1),
            data,
            eval_data=data,
            loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
            metrics=lambda model, batch: {"wide": model(batch[0]) - batch[1]},
            **arguments,
        )
