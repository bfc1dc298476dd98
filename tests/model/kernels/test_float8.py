"""float8 products by emulation on a CPU: which layers have them, that they train, resume and shard, and that names
stay.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from accel_train import train
from accel_train.inference.finished_run import open_run
from accel_train.model.kernels.float8 import convert_to_float8
from accel_train.parallel import precision
from accel_train.parallel.precision import has_float8
from accel_train.training import build
from tests.support.runs import LLAMA, events, forget, losses, run, summary_of, tiny_recipe, write_recipe_file
from tests.support.wording import assert_golden, raises_golden


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**LLAMA, vocab_size=64, bos_token_id=0, eos_token_id=0)
    config.update(changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(each).__name__ for name, each in model.named_modules() if isinstance(each, nn.Linear)}


def test_all_linear_layers_but_the_first_and_the_last_are_converted_under_their_names() -> None:
    model = llama()
    before = dict(model.named_parameters())
    choice = convert_to_float8(model, emulate=True)
    found = kinds(model)
    assert [name for name, kind in found.items() if kind == "Linear"] == ["model.layers.0.self_attn.q_proj", "lm_head"]
    assert list(found.values()).count("Float8Linear") == 13
    assert_golden(str(choice))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before), "the optimizer's weights must be those of the model"


def test_layers_whose_dimensions_are_no_multiples_of_16_are_left_and_counted() -> None:
    model = llama(intermediate_size=40)
    choice = convert_to_float8(model, emulate=True)
    assert {name for name, kind in kinds(model).items() if kind == "Linear"} >= {
        f"model.layers.{block}.mlp.{part}_proj" for block in (0, 1) for part in ("gate", "up", "down")
    }
    assert_golden(str(choice))


@pytest.mark.parametrize("sizes", [(32,), (32, 32, 32), (32, 24, 24, 32)], ids=["one", "two", "odd"])
def test_a_model_without_a_layer_to_convert_is_refused(sizes: tuple[int, ...]) -> None:
    layers = [nn.Linear(one, other) for one, other in pairwise(sizes)]
    with raises_golden():
        convert_to_float8(nn.Sequential(*layers), emulate=True)


def test_gradients_are_those_of_bf16_within_the_error_of_float8() -> None:
    batch = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for converts in (False, True):
        model = llama()
        if converts:
            convert_to_float8(model, emulate=True)
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=batch, labels=batch).loss.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    name = "model.layers.0.mlp.up_proj.weight"
    error = (gradients[1][name] - gradients[0][name]).norm() / gradients[0][name].norm()
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize(
    ("device", "capability", "hip", "has"),
    [
        ("cpu", (0, 0), None, False),
        ("cuda", (8, 0), None, False),
        ("cuda", (8, 9), None, True),
        ("cuda", (9, 0), None, True),
        ("cuda", (9, 4), "6.4", False),
    ],
    ids=["cpu", "A100", "L4", "H100", "MI300"],
)
def test_which_devices_multiply_float8(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], hip: str | None, has: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_float8(torch.device(device)) == has


def settings_of(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    settings = {
        "model": {"config": LLAMA},
        "precision": {"mixed_precision": name},
        "batch": {"global_batch_size": 4},
        "schedule": {"type": "constant", "max_steps": 6},
        "checkpoint": {"every_steps": 3},
        "output_dir": str(folder / name),
    }
    return {**settings, **sections}


def check_losses(folder: Path) -> None:
    bf16, fp8 = losses(folder / "bf16"), losses(folder / "fp8")
    assert list(fp8) == list(range(1, 7))
    assert fp8 == pytest.approx(bf16, rel=2e-2)
    assert fp8 != bf16, "the setting had no effect"


def test_a_run_in_float8_trains_like_bf16_resumes_and_leaves_an_ordinary_model(
    corpus: Path, without_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_float8", lambda device: True)
    monkeypatch.setattr(build, "convert_to_float8", partial(convert_to_float8, emulate=True))
    for name in ("bf16", "fp8"):
        train(tiny_recipe(corpus, **settings_of(corpus, name)))
    check_losses(corpus)
    folder = corpus / "fp8"
    choices = summary_of(folder)["choices"]
    assert choices["precision.float8"].startswith("13 of 15 linear layers")
    expected = losses(folder)
    forget(folder, 6)
    train(tiny_recipe(corpus, **settings_of(corpus, "fp8")))
    assert losses(folder) == expected
    assert "at step 3" in events(folder, "resume")[0]["message"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    monkeypatch.undo()
    assert open_run(folder).accelerator.mixed_precision == "no", "a CPU without float8 evaluates in fp32"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_in_float8_train_like_bf16(corpus: Path, strategy: str) -> None:
    for name in ("bf16", "fp8"):
        task = "tests.support.tasks.emulated_float8:EmulatedFloat8"
        sections = settings_of(corpus, name, task=task, parallel={"strategy": strategy})
        run(write_recipe_file(corpus, **sections), processes=2)
    check_losses(corpus)
