"""`accel-train export`: folders that load again, and int8 that computes what its numbers say."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification
from transformers.pytorch_utils import Conv1D

from accel_train.checkpoint.weight_files import accept_weights
from accel_train.cli.main import main
from accel_train.core.json_io import load_object
from accel_train.inference.export import load_exported
from accel_train.inference.finished_run import open_run
from accel_train.inference.int8 import int8_tensors, left_alone, matrices, put_int8_tensors, quantize_int8
from accel_train.inference.int8_cost import samples_per_second
from accel_train.observe.run_folder import RECIPE_FILE
from tests.inference.conftest import Cli, run_card
from tests.support import runs as runs
from tests.support.wording import assert_golden, raises_golden


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished language model `run`, and `adapted`, trained on with adapters that are not merged."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runs.write_corpus(folder)
        recipe = runs.write_recipe_file(folder, task="causal-lm")
        assert main(["run", str(recipe), "--schedule.max_steps", "3"]) == 0
        adapted = runs.recipe_dict(
            folder, task="causal-lm", output_dir="adapted", optimizer={"learning_rate": 0.1}, schedule={"max_steps": 3}
        )
        adapted["model"] = {"pretrained": "run/model", "lora": {"rank": 2, "merge": False}}
        Path("adapted.yaml").write_text(yaml.safe_dump(adapted))
        assert main(["run", "adapted.yaml"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that folder."""
    monkeypatch.chdir(finished)


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens()).logits
    return found


def bert(**settings: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **settings
    )
    return BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("kind", ["linear", "without bias", "conv1d"])
def test_an_int8_layer_computes_with_the_dequantized_weights(kind: str) -> None:
    torch.manual_seed(0)
    module = Conv1D(40, 24) if kind == "conv1d" else nn.Linear(24, 40, bias=kind == "linear")
    model = nn.Sequential(module)
    whole = module.weight.detach().T.clone() if kind == "conv1d" else module.weight.detach().clone()
    inputs = torch.randn(5, 7, 24)
    scale = whole.abs().amax(dim=1, keepdim=True) / 127.5
    by_hand = (whole / scale).round().clamp(-128, 127)

    assert quantize_int8(model) == ("0",)
    tensors = int8_tensors(model, ("0",))
    saved = tensors["0.weight.int8"]
    assert saved.dtype == torch.int8
    torch.testing.assert_close(tensors["0.weight.scale"], scale)
    assert (
        saved - by_hand
    ).abs().max() <= 1  # w / s lies halfway in a few places, where w (1 / s) is rounded otherwise
    dequantized = saved * tensors["0.weight.scale"]
    assert (dequantized - whole).abs().max() <= 0.501 * scale.max()
    with torch.no_grad():
        found = model(inputs)
    torch.testing.assert_close(found, linear(inputs, dequantized, module.bias), rtol=1e-5, atol=1e-5)
    assert (found - linear(inputs, whole, module.bias)).abs().max() > 1e-4


def test_tied_matrices_stay_whole_and_what_stays_is_counted() -> None:
    model = AutoModelForCausalLM.from_pretrained("run/model")
    names = matrices(model)
    assert "lm_head" not in names
    assert len(names) == 8  # four matrices a block
    num_whole = sum(parameter.numel() for parameter in model.parameters())
    num_int8 = sum(model.get_parameter(f"{name}.weight").numel() for name in names)
    assert sum(left_alone(model, names).values()) == num_whole - num_int8
    untied = bert(num_labels=3)
    assert {"classifier", "bert.pooler.dense"} <= set(matrices(untied))


def test_a_model_without_matrices_is_refused() -> None:
    with raises_golden():
        quantize_int8(nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_int8_tensors_make_the_same_model_again() -> None:
    model, other = bert(num_labels=3), bert(num_labels=3)
    names = quantize_int8(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    put_int8_tensors(other, names, int8_tensors(model, names))
    with torch.no_grad():
        assert torch.equal(other(tokens() % 64).logits, model(tokens() % 64).logits)
    tensors = int8_tensors(model, names)
    del tensors["classifier.weight.scale"]
    with raises_golden(case="scale"):
        put_int8_tensors(bert(num_labels=3), names, tensors)
    tensors = int8_tensors(model, names)
    del tensors["bert.pooler.dense.bias"]
    with raises_golden(case="bias"):
        put_int8_tensors(bert(num_labels=3), names, tensors)


def test_an_export_is_for_from_pretrained(cli: Cli) -> None:
    assert cli("export run").startswith("run/export: 0.")
    whole = logits(whole_model())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("run/export").eval()), whole)
    assert torch.equal(logits(load_exported("run/export")), whole)
    assert Path("run/export/tokenizer.json").is_file()


def test_an_int8_export_loads_again_and_says_what_it_costs(cli: Cli) -> None:
    printed = cli("export run --quantize int8 --out small")
    record = load_object(Path("small/export.json"))
    assert record["weights_bytes"]["after"] < record["weights_bytes"]["before"]
    assert record["weights_bytes"]["after"] == Path("small/model-int8.safetensors").stat().st_size
    ended_with = load_object(Path("run/evaluation.json"))["metrics"]
    assert {name: record["metrics"]["before"][name] for name in ended_with} == ended_with
    assert record["metrics"]["after"]["loss"] == pytest.approx(ended_with["loss"], rel=0.01)
    assert record["metrics"]["after"]["loss"] != ended_with["loss"]
    assert record["samples_per_second"]["after"] > 0
    for said in ("before", "samples per second", "perplexity", "on this machine (cpu", "left in floating point"):
        assert said in printed

    whole, small = logits(whole_model()), logits(load_exported("small"))
    assert 0 < (whole - small).abs().max() < 0.05 * whole.abs().max()
    with safe_open("small/model-int8.safetensors", "pt") as file:
        assert "transformer.h.0.attn.c_attn.weight.int8" in file.keys()  # noqa: SIM118
    assert not list(Path("small").glob("*.bin"))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained("small")  # and does not load a part of it
    assert "load_exported" in Path("small/README.md").read_text()


def whole_model() -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained("run/model").eval()
    return model


def test_adapters_that_were_not_merged_are_merged_in_an_export(cli: Cli) -> None:
    cli("evaluate adapted")
    ended_with = load_object(Path("adapted/summary.json"))["eval"]["loss"]
    assert load_object(Path("adapted/evaluation.json"))["metrics"]["loss"] == ended_with
    cli("export adapted")
    exported, base = load_exported("adapted/export"), whole_model()
    assert not torch.equal(logits(exported), logits(base))
    run = open_run(Path("adapted"))
    torch.testing.assert_close(logits(exported), logits(run.inner.model), rtol=1e-4, atol=1e-4)
    assert [rate > 0 for rate in samples_per_second([run], seconds=0.01)] == [True]


def test_an_earlier_export_is_replaced_and_nothing_else(cli: Cli) -> None:
    cli("export run --out again")
    cli("export run --out again")
    Path("again/note.txt").write_text("mine, too")
    assert_golden(cli.refusal("export run --out again"), "a file more")
    assert Path("again/note.txt").read_text() == "mine, too"
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("mine")
    assert_golden(cli.refusal("export run --out mine"), "no export")
    assert Path("mine/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("arguments", ["nowhere", "run --out recipe.yaml", "run --out no/where", "run --quantize int4"])
def test_a_mistake_is_one_line_and_exits_with_2(arguments: str, cli: Cli) -> None:
    assert_golden(cli.refusal(f"export {arguments}").partition(" (choose")[0])


def test_without_torchao_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert_golden(cli.refusal("export run --quantize int8 --out none"))
    assert not Path("none").exists()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The run in a folder of its own."""
    return shutil.copytree("run", tmp_path / "copied")


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def lose_a_shard(model: Path) -> None:
    whole_model().save_pretrained(model, max_shard_size="40KB")
    (model / "model.safetensors").unlink()
    next(model.glob("model-00002*.safetensors")).unlink()


def lose_tensors(model: Path) -> None:
    save_file({"x": torch.ones(1)}, model / "model.safetensors", {"format": "pt"})
    accept_weights(model)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "holds no weights (*.safetensors)"),
    "cut short": (lambda model: cut_short(model / "model.safetensors"), "model.safetensors is damaged"),
    "a shard is missing": (lose_a_shard, "which model.safetensors.index.json names"),
    "a tensor is missing": (lose_tensors, "from_pretrained would invent"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_missing_or_damaged_weights_are_one_line_and_nothing_is_written(copied: Path, case: str, cli: Cli) -> None:
    spoil, said = BROKEN[case]
    spoil(copied / "model")
    before = sorted(copied.rglob("*"))
    for command in ("export", "evaluate", "generate"):
        if (command, case) == ("generate", "a tensor is missing"):
            continue
        error = cli(command, copied, code=2)
        assert error.count("error:") == 1
        if (command, case) != ("evaluate", "a tensor is missing"):
            assert said in error
    assert sorted(copied.rglob("*")) == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


def test_a_flipped_bit_in_the_weights_is_refused_by_every_command_until_it_is_accepted(copied: Path, cli: Cli) -> None:
    run, model = copied, copied / "model"
    weights = model / "model.safetensors"
    flip(weights)
    trains = f"--model.config null --model.pretrained {model} --output_dir {copied / 'next'}"
    commands = [f"run {copied / RECIPE_FILE} {trains}", f"push {run} name --dry-run"]
    for command in (*commands, *(f"{name} {run}" for name in ("evaluate", "generate", "chat", "export"))):
        error = cli(command, code=2)
        assert [token for token in (str(weights), "SHA-256") if token not in error] == [], error
    assert not (copied / "next" / "checkpoints").exists()
    cli(f"verify {run} --json", code=4)
    [found] = json.loads(cli.out)["result"]["models"]
    assert (found["path"], found["has_digests"], list(found["changed"])) == (str(model), True, [weights.name])
    cli(f"verify {model} --accept-weights")
    cli("export", run)
    flip(copied / "export" / weights.name)
    with raises_golden():
        load_exported(copied / "export")


def test_pickles_and_code_are_left_out_of_an_export_and_named(copied: Path, cli: Cli) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "state.pkl", "modeling_x.py"):
        (copied / "model" / name).write_bytes(b"x")
    said = cli(f"export {copied}")
    written = {path.name for path in (copied / "export").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= written
    assert {Path(name).suffix for name in written} == {".safetensors", ".json"} | (
        {".md"} if "README.md" in written else set()
    )
    assert_golden(next(line for line in said.splitlines() if "modeling_x.py" in line))


@pytest.mark.slow
def test_code_in_the_card_of_an_int8_export_works_as_it_stands(copied: Path, cli: Cli) -> None:
    card = "# A card\n\n## Use\n\n```python\nfrom transformers import AutoModel\nAutoModel.from_pretrained('.')\n```\n"
    (copied / "model" / "README.md").write_text(card)
    cli(f"export {copied} --quantize int8")
    assert type(run_card(copied / "export-int8")["model"]).__name__ == "GPT2LMHeadModel"


def test_what_a_task_of_somebodys_own_saved_is_not_promised_to_from_pretrained(copied: Path, cli: Cli) -> None:
    recipe = yaml.safe_load((copied / RECIPE_FILE).read_text())
    (copied / RECIPE_FILE).write_text(yaml.safe_dump({**recipe, "task": "tests.support.tasks.probe:ProbeTask"}))
    save_file({"own.weight": torch.ones(2)}, copied / "model" / "model.safetensors", {"format": "pt"})
    (copied / "model" / "config.json").write_text('{"own": true}')
    accept_weights(copied / "model")
    said, _, reason = cli(f"export {copied}").partition(" (")
    error = cli.refusal(f"export {copied} --quantize int8")
    assert reason == f"{error.removeprefix('error: ')})\n"
    assert_golden(said, "whole")
    assert_golden(": ".join(error.split(": ")[:2]), "int8")


def test_a_moved_run_is_exported_without_its_data_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    for name in ("run", "adapted"):
        shutil.copytree(name, tmp_path / name)
        recipe = yaml.safe_load((tmp_path / name / RECIPE_FILE).read_text())
        recipe["data"]["train"], recipe["data"]["cache_dir"] = "gone/corpus.jsonl", "/proc/nobody/cache"
        (tmp_path / name / RECIPE_FILE).write_text(yaml.safe_dump(recipe))
    whole = logits(whole_model())
    monkeypatch.chdir(tmp_path)
    cli("export run")
    assert torch.equal(logits(load_exported("run/export")), whole)
    cli("export adapted")
    assert not torch.equal(logits(load_exported("adapted/export")), whole)
    said = cli("export run --quantize int8")
    assert_golden(next(line for line in said.splitlines() if "corpus.jsonl" in line).partition(" (")[0])
    assert torch.allclose(logits(load_exported("run/export-int8")), whole, atol=0.1)


def test_a_launch_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_golden(cli.refusal("export run"))


@pytest.mark.slow
def test_what_torchao_says_at_its_import_does_not_reach_the_screen() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel_train", "export", "run", "--quantize", "int8", "--out", "quiet"],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_golden(done.stderr)
