"""State that modules hold beside their weights: extra state and buffers that forwards change, and modes of parts."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel

from accel_train import RunResult, fit
from accel_train.core.errors import SettingError
from accel_train.hf import Trainer
from accel_train.model.isolation import Buffers
from accel_train.model.tensors import PACKED, as_tensors, packed, unpacked
from tests.support.hf_models import arguments
from tests.support.marks import slow
from tests.support.runs import Capture, Settings, events, metrics, run_forked_command, steps_of, summary_of
from tests.support.wording import assert_golden, raises_golden

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(FEATURES, (FEATURES.sum(1) > 0).long())
SETTINGS: Settings = {
    "batch_size": 8,
    "schedule": {"type": "constant"},
    "data": {"num_workers": 0},
    "log": {"every_steps": 1, "progress": False},
}


pytestmark = pytest.mark.usefixtures("empty_folder")


class Counted(nn.Module):
    """A layer whose output grows with the number of training forwards, which it keeps as extra state of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.done, self.kind = nn.Linear(4, 2), 0, kind
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training:
            self.done += 1
            self.seen.append(self.done)
        found = self.layer(x) * (1 + 0.1 * self.done)
        return found if labels is None else {"loss": nn.functional.cross_entropy(found, labels), "logits": found}

    def get_extra_state(self) -> Any:
        return {
            "tensor": torch.tensor(self.done),
            "tensor of any length": torch.arange(self.done),
            "dict": {"done": self.done, 3: [None, (float("inf"), "x")]},
            "dict of tensors": OrderedDict(done=torch.tensor([self.done])),
        }[self.kind]

    def set_extra_state(self, state: Any) -> None:
        self.done = {
            "tensor": lambda: int(state),
            "tensor of any length": lambda: len(state),
            "dict": lambda: state["done"],
            "dict of tensors": lambda: int(state["done"]),
        }[self.kind]()


class Computed(Counted):
    """The same number, in an entry of `state_dict` that the module computes, as metrics of torchmetrics do."""

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "done"] = torch.tensor(self.done)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.done = int(state_dict.pop(prefix + "done", self.done))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def made(kind: str) -> Counted:
    return Computed(kind) if kind == "computed" else Counted(kind)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(model: nn.Module, output_dir: str = "run", *, loss: Any = cross_entropy, **settings: Any) -> RunResult:
    return fit(model, DATA, loss=loss, output_dir=output_dir, **SETTINGS, **settings)


def loaded(kind: str, folder: Path | str) -> Counted:
    """The model that a run or a trainer has written."""
    model = made(kind)
    with as_tensors(model):
        load_model(model, f"{folder}/model.safetensors")
    return model


KINDS = ["tensor", "tensor of any length", "dict", "dict of tensors", "computed"]


@pytest.mark.parametrize("kind", KINDS)
def test_extra_state_is_resumed_to_the_bit_with_an_average_and_is_in_the_model(kind: str) -> None:
    class Cut(Exception):
        """Ends a run in its sixth step."""

    def cut(module: Any, inputs: Any) -> None:
        if module.training and module.done == 5:
            raise Cut

    common: Settings = {"max_steps": 8, "checkpoint": {"every_steps": 4}, "optimizer": {"ema_decay": 0.9}}
    whole, broken, again = made(kind), made(kind), made(kind)
    first = trained(whole, "whole", **common).model
    broken.register_forward_pre_hook(cut)
    with pytest.raises(Cut):
        trained(broken, "cut", **common)
    second = trained(again, "cut", resume="always", **common).model
    assert again.seen == [5, 6, 7, 8]
    assert (whole.done, again.done) == (8, 8)
    assert torch.equal(first.layer.weight, second.layer.weight)
    written = loaded(kind, "cut/model")
    assert written.done == 8
    assert torch.equal(written.layer.weight, first.layer.weight)


def test_a_rollback_and_the_best_model_have_their_own_extra_state() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        if not model.training:
            return value * 0 + (model.done - 6) ** 2
        return value * float("nan") if model.done in (10, 11) and not events(Path("run"), "rollback") else value

    model = made("dict")
    trained(
        model, loss=loss, max_steps=14, eval_data=DATA,
        evaluate={"every_steps": 3, "at_start": False},
        checkpoint={"every_steps": 3, "load_best_model_at_end": True},
        guard={"healthy_after_steps": 3, "max_consecutive_skips": 1, "rollback_skip_steps": 2, "lowered_steps": 2},
    )  # fmt: skip
    (event,) = events(Path("run"), "rollback")
    num_skipped = event["skip_last"] - event["skip_first"] + 1
    losses = {line["step"]: line["loss"] for line in metrics(Path("run"), "eval")}
    assert losses[14] == (14 - num_skipped - 6) ** 2
    assert summary_of(Path("run"))["best_step"] == 6
    assert model.done == 6


@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_skipped_leaves_extra_state_as_it_was(kind: str, bad: int) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * (float("nan") if len(model.seen) == bad else 1)

    model = made(kind)
    trained(model, loss=loss, max_steps=6)
    assert steps_of(Path("run"), "skip") == [bad]
    assert model.done == 5


@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_repeated_after_out_of_memory_counts_once_in_extra_state(
    kind: str, bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "cache"))

    def loss(model: Any, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        if len(model.seen) == bad:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value

    model = made(kind)
    trained(model, loss=loss, max_steps=5)
    assert steps_of(Path("run"), "out_of_memory") == [bad]
    # From the repeated step on, each step has two micro-batches.
    assert model.done == bad - 1 + 2 * (6 - bad)


def test_extra_state_that_no_checkpoint_can_keep_is_refused_by_module_before_the_first_step() -> None:
    class Odd(Counted):
        def get_extra_state(self) -> Any:
            return {"seen": {1, 2}}

    model = nn.Sequential(nn.Linear(4, 4), Odd("dict"))
    with raises_golden(SettingError):
        trained(model, max_steps=1)
    assert not metrics(Path("run"))


def test_packed_extra_state_is_equal_after_unpacking_and_damage_is_named() -> None:
    value = {"a": [1, 2.5, float("-inf"), None, True, "x"], (1, "b"): OrderedDict(t=torch.arange(3, dtype=torch.int8))}
    tensors = packed({"part._extra_state": value})
    assert tensors.keys() == {f"part._extra_state{PACKED}"}
    found = unpacked(tensors, torch.device("cpu"))["part._extra_state"]
    assert found["a"] == value["a"]
    inner = found[1, "b"]
    assert type(inner) is OrderedDict
    assert torch.equal(inner["t"], torch.arange(3, dtype=torch.int8))
    assert inner["t"].dtype == torch.int8
    with raises_golden():
        unpacked({name: each[:-3] for name, each in tensors.items()}, torch.device("cpu"))


def test_a_forward_on_trial_leaves_extra_state_unchanged() -> None:
    model = made("dict")
    kept = Buffers(model)
    model(FEATURES)
    kept.put_back()
    assert model.done == 0


SHARDED = """
import sys
import torch
from tests.training.test_module_state import made, trained

kind, strategy = sys.argv[1:]
for folder, lengths in (("whole", [8]), ("cut", [4, 8])):
    for length in lengths:
        trained(made(kind), folder, resume="always", max_steps=length, parallel={"strategy": strategy})
"""


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("ddp", "dict"), ("fsdp2", "dict of tensors"), slow("fsdp2", "tensor")],
)
def test_extra_state_is_resumed_to_the_bit_on_2_processes(tmp_path: Path, strategy: str, kind: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARDED)
    done = run_forked_command([kind, strategy], 2, program)
    assert done.returncode == 0, done.stderr[-3000:]
    models = [loaded(kind, f"{folder}/model") for folder in ("whole", "cut")]
    assert [model.done for model in models] == [8, 8]
    assert torch.equal(models[0].layer.weight, models[1].layer.weight)


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_a_trainer_resumes_extra_state_to_the_bit_and_saves_it(tmp_path: Path, kind: str) -> None:
    rows = [{"x": x, "labels": label} for x, label in zip(*DATA.tensors, strict=True)]
    settings: Settings = {"max_steps": 8, "save_steps": 4, "lr_scheduler_type": "constant"}
    trainers = []
    for folder, resumes in (("whole", [False]), ("cut", [False, True])):
        for resume in resumes:
            args = arguments(tmp_path / folder, **{**settings, "max_steps": 4 if resumes[-1] > resume else 8})
            trainers.append(Trainer(made(kind), args, train_dataset=rows))
            trainers[-1].train(resume_from_checkpoint=resume)
    whole, _, cut = (trainer.model for trainer in trainers)
    assert (whole.done, cut.done, cut.seen) == (8, 8, [5, 6, 7, 8])
    assert torch.equal(whole.layer.weight, cut.layer.weight)
    trainers[-1].save_model(str(tmp_path / "saved"))
    assert loaded(kind, tmp_path / "saved").done == 8


class Remembering(nn.Module):
    """A layer with buffers that each forward changes: one in checkpoints, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bank = nn.Linear(4, 2), nn.Module()
        self.bank.register_buffer("mean", torch.zeros(4))
        self.bank.register_buffer("last", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.bank.mean.lerp_(x.mean(0), 0.1)
            self.bank.last.copy_(x.mean(0))
        return self.layer(x)


@pytest.mark.parametrize("micro_batch", [8, 4])
def test_state_that_a_forward_changes_is_said_where_it_depends_on_the_layout_or_is_lost(
    micro_batch: int, capsys: Capture
) -> None:
    batch = {"per_device_batch_size": micro_batch}
    trained(Remembering(), max_steps=2, batch=batch)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a forward changes")]
    layout = [line for line in lines if "'bank.mean', 'bank.last'" in line]
    assert len(layout) == (micro_batch < 8)
    assert [line for line in lines if line not in layout and "persistent" in line and "'bank.mean'" not in line]


def parts() -> nn.Sequential:
    torch.manual_seed(0)
    back = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return nn.Sequential(back, nn.Dropout(0.1), nn.Linear(4, 2))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in model.named_modules()}


def recorded(model: nn.Module) -> list[dict[str, bool]]:
    """A list that gets the modes of all parts at each forward with gradients."""
    found: list[dict[str, bool]] = []
    model.register_forward_pre_hook(lambda *_: found.append(modes(model)) if torch.is_grad_enabled() else None)
    return found


def test_fit_keeps_the_mode_of_each_part_and_trains_a_model_that_comes_in_eval(
    capsys: Capture,
) -> None:
    model = parts()
    model[0].requires_grad_(False).eval()
    given, seen, before = modes(model), recorded(model), model[0][1].running_mean.clone()
    trained(model, "mixed", max_steps=2, eval_data=DATA)
    assert seen == [given] * 2
    assert torch.equal(model[0][1].running_mean, before)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "eval()" in line]
    assert_golden(line)
    model = parts().eval()
    seen = recorded(model)
    trained(model, "eval", max_steps=2)
    assert len(seen) == 2
    assert all(all(each.values()) for each in seen)


@pytest.mark.parametrize("frozen", [False, True])
def test_fit_trains_a_pretrained_part_that_comes_in_eval_unless_it_is_frozen(frozen: bool, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        max_position_embeddings=8,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert")
    back = BertModel.from_pretrained(tmp_path / "bert").requires_grad_(not frozen)
    model = nn.ModuleDict({"back": back, "head": nn.Linear(4, 2)})
    seen = recorded(model["head"])
    modes_of_back: list[bool] = []
    back.encoder.register_forward_pre_hook(lambda part, _: modes_of_back.append(part.training))

    def loss(model: Any, batch: Any) -> Tensor:
        ids = (batch[0] > 0).long()
        return nn.functional.cross_entropy(model["head"](model["back"](ids).pooler_output), batch[1], reduction="none")

    trained(model, loss=loss, max_steps=2)
    assert seen == [{"": True}] * 2
    assert modes_of_back[-2:] == [not frozen] * 2


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = parts()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.parts(x)
        return {"loss": nn.functional.cross_entropy(found, labels), "logits": found}


def test_a_trainer_keeps_the_mode_of_each_part_after_an_evaluation_and_an_earlier_training(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            return super().training_step(model, inputs, num_items_in_batch)

    rows = [{"x": x, "labels": label} for x, label in zip(*DATA.tensors, strict=True)]
    model = Classifier()
    model.parts[0].eval()
    given, seen = modes(model), recorded(model)
    trainer = Own(model, arguments(tmp_path, max_steps=2), train_dataset=rows, eval_dataset=rows)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert not model.training
    trainer.train()
    assert seen == [given] * 4
