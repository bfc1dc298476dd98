"""What `fit` promised and did not hold: the count of samples, resumes on changed inputs, names of weights, sections."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate

from accel_train import fit
from accel_train.cli.main import main
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


def _notes(folder: Path, event: str) -> list[str]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line["message"] for line in lines if line["event"] == event]


def _attack(folder: Path, label: int = 1, activation: type[nn.Module] = nn.ReLU, **changed: Any) -> Any:
    torch.manual_seed(0)
    rows = torch.randn(32, 4)
    data = [(row, torch.tensor(label)) for row in rows]
    model = nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3))
    sign = changed.pop("sign", 1.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return sign * nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"ones": (model(batch[0]).argmax(1) == 1).float()}

    arguments: dict[str, Any] = {
        "loss": loss, "metrics": metrics, "eval_data": data, "max_steps": 12, "batch_size": 8, **QUIET, "learning_rate": 0.05,
        **changed,
    }  # fmt: skip
    return fit(model, data, output_dir=folder, **arguments)  # type: ignore[arg-type]


def test_attack_01_changed_inputs_train_a_new_model_and_keep_the_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    first = _attack(run)
    assert first.metrics["ones"] == 1.0
    events = (run / "events.jsonl").read_bytes()
    capsys.readouterr()
    again = _attack(run)  # nothing has changed
    assert f"{run}: finished at step 12" in capsys.readouterr().out
    assert (run / "events.jsonl").read_bytes() == events
    assert not list(run.glob("previous-*"))
    assert torch.equal(again.model.state_dict()["2.bias"], first.model.state_dict()["2.bias"])

    assert _attack(run, label=2).metrics["ones"] == 0.0
    assert (run / "previous-1/summary.json").is_file()
    assert "training data has changed" in _notes(run, "start")[-1]
    for number, (changed, said) in enumerate(
        [
            ({"sign": 2.0}, "loss has changed"),
            ({"activation": nn.Tanh}, "model has changed"),
            (
                {"metrics": lambda model, batch: {"twos": (model(batch[0]).argmax(1) == 2).float()}},
                "metrics has changed",
            ),
            ({"collate": lambda samples: default_collate(list(samples)[::-1])}, "collate has changed"),
            ({"learning_rate": 0.04}, "optimizer.learning_rate was 0.05"),
        ],
        start=2,
    ):
        _attack(run, label=2)
        _attack(run, label=2, **changed)
        assert len(_notes(run, "start")) == 1
        assert said in _notes(run, "start")[0]
        assert (run / f"previous-{2 * number - 2}/summary.json").is_file()


def test_attack_01_an_interrupted_run_is_not_continued_under_another_loss(tmp_path: Path) -> None:
    class Killed(Exception):
        """Ends a run in its middle."""

    class Rows:
        """Data that end the run at a read, while `left` is set."""

        left = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            if torch.utils.data.get_worker_info() is None and Rows.left:
                Rows.left -= 1
                if not Rows.left:
                    raise Killed
            return torch.full((4,), float(index % 3)), torch.tensor(1)

    def start(sign: float, **more: Any) -> Any:
        torch.manual_seed(0)
        loss = lambda model, batch: sign * nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
        common: dict[str, Any] = {"max_steps": 12, "batch_size": 8, "checkpoint": {"every_steps": 4}, **QUIET}
        common["data"] = {"train": "custom", "num_workers": 0}
        common["checkpoint"] = {"every_steps": 4}
        return fit(nn.Linear(4, 3), Rows(), loss=loss, output_dir=tmp_path, **{**common, **more})  # type: ignore[arg-type]

    Rows.left = 32 + 6 * 8
    with pytest.raises(Killed):
        start(1.0)
    Rows.left = 0
    assert (tmp_path / "checkpoints/step-00000004").is_dir()
    start(-1.0)
    assert losses(tmp_path)[1] < 0
    assert len(losses(tmp_path)) == 12
    assert (tmp_path / "previous-1/checkpoints/step-00000004").is_dir()
    finished = start(1.0, resume="always")  # insists on the finished run of the other loss
    assert losses(tmp_path)[1] < 0
    assert finished.summary["steps"] == 12


def test_attack_09_changed_options_of_a_task_are_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nfrom accel_train import ModuleTask\n\n"
        "class Weighted(ModuleTask):\n"
        "    def data(self):\n        x = torch.ones(16, 3)\n        return TensorDataset(x, x.sum(1)), None\n"
        "    def model(self):\n        return nn.Linear(3, 1)\n"
        "    def loss(self, model, batch):\n"
        "        return self.recipe.options['weight'] * (model(batch[0])[:, 0] - batch[1]).square()\n"
    )
    (tmp_path / "weighted_task.py").write_text(source)
    recipe = {
        "task": "weighted_task:Weighted", "output_dir": "run", "schedule": {"max_steps": 8}, "options": {"weight": 1.0},
        "batch": {"global_batch_size": 4}, "checkpoint": {"every_steps": 4}, "log": {"progress": False},
    }  # fmt: skip
    (tmp_path / "w.yaml").write_text(json.dumps(recipe))
    assert main(["run", "w.yaml"]) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000008")
    (tmp_path / "weighted_task.py").write_text(source.replace(".square()", ".abs()"))
    sys.modules.pop("weighted_task")
    importlib.invalidate_caches()
    assert main(["run", "w.yaml", "--options", "{weight: 0.5}"]) == 0
    lines = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    changed = {line["setting"]: (line["was"], line["now"]) for line in lines if line["event"] == "settings_changed"}
    assert changed["options.weight"] == (1.0, 0.5)
    assert "inputs.task" in changed
    sys.modules.pop("weighted_task")


def test_attack_02_a_sweep_on_changed_data_trains_its_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [("good fine", "pos"), ("bad sad", "neg")] * 20
    data = tmp_path / "d.csv"
    data.write_text("text,label\n" + "".join(f"{text} {number},{label}\n" for number, (text, label) in enumerate(rows)))
    recipe = {
        "task": "text-classification", "output_dir": "out", "tokenizer": "bytes", "schedule": {"max_steps": 2},
        "model": {"config": {"model_type": "ngrams", "num_buckets": 2048, "max_characters": 3, "max_words": 1}},
        "data": {"train": "d.csv", "eval_fraction": 0.2, "max_length": 32, "num_workers": 0}, "batch": {"global_batch_size": 8},
    }  # fmt: skip
    (tmp_path / "tc.yaml").write_text(json.dumps(recipe))
    sweep = ["sweep", "tc.yaml", "--seed", "0,1", "--output_dir", "out"]
    assert main(sweep) == 0
    assert main(sweep) == 0
    assert len(_notes(tmp_path / "out/seed=0", "start")) == 1
    assert not (tmp_path / "out/seed=0/previous-1").exists()
    data.write_text(data.read_text().replace(",pos", ",x").replace(",neg", ",pos").replace(",x", ",neg"))
    assert main(sweep) == 0
    assert "data.fingerprint was" in _notes(tmp_path / "out/seed=0", "start")[0]
    assert (tmp_path / "out/seed=0/previous-1/summary.json").is_file()


@pytest.mark.parametrize("where", ["whole", "part"])
def test_bugs_04_weights_of_a_compiled_module_have_its_own_names(tmp_path: Path, where: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    given: Any = torch.compile(plain, backend="eager")
    if where == "part":
        given = nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1])
    data = TensorDataset(torch.randn(8, 3), torch.randn(8))
    result = fit(
        given, data, loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(), output_dir=tmp_path,
        max_steps=2, batch_size=4, **QUIET,
    )  # fmt: skip
    assert result.model is given
    saved = load_file(tmp_path / "model/model.safetensors")
    assert saved.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(saved["0.weight"], plain[0].weight)
    assert plain._compiled_call_impl is not None or where == "part"


def test_bugs_06_a_part_of_a_section_is_enough(tmp_path: Path) -> None:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return model(batch[0])[:, 0].square()

    rows = torch.arange(8.0)[:, None].expand(8, 3)
    more: dict[str, Any] = {"data": {"shuffle": False}}
    fit(
        nn.Linear(3, 1), TensorDataset(rows), loss=loss, output_dir=tmp_path, max_steps=2, batch_size=4, **more, **QUIET
    )
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]
