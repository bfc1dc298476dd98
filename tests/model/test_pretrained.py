"""A pretrained model whose weights stay in their files until they are read one at a time is the same model."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from accel_train import finetune
from accel_train.checkpoint.base import digests_of_base
from accel_train.core.state import Choice
from accel_train.model import tensors
from accel_train.model.kernels.frozen import keep_frozen
from accel_train.model.pretrained import (
    check_plain_weights,
    grow_embedding,
    pretrained_config,
    transformers_model,
)
from accel_train.model.tensors import StandIns
from accel_train.parallel.building import allocate
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.loader import load_recipe
from tests.support.downloads import REVISION, save_bert
from tests.support.runs import LLAMA, TINY_MODEL, Settings, tiny_recipe
from tests.support.text_tasks import BART, BERT, MODERNBERT, ROBERTA, T5
from tests.support.wording import raises_golden

CPU = torch.device("cpu")
SEQUENCES = AutoModelForSequenceClassification
VIT = {"model_type": "vit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16}
VIT |= {"num_attention_heads": 2, "patch_size": 4}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
IDS = {f"{name}_token_id": 0 for name in ("pad", "cls", "sep", "bos", "eos")}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, tuple[Any, Any, Settings]] = {
    "gpt2": (AutoModelForCausalLM, AutoModelForCausalLM, TINY_MODEL),
    "gpt2 untied": (AutoModelForCausalLM, AutoModelForCausalLM, {**TINY_MODEL, "tie_word_embeddings": False}),
    "llama": (AutoModelForCausalLM, AutoModelForCausalLM, LLAMA),
    "llama without its head": (AutoModel, AutoModelForCausalLM, LLAMA),
    "a classifier of bert": (AutoModel, SEQUENCES, BERT),
    "a classifier of a masked language model": (transformers.AutoModelForMaskedLM, SEQUENCES, ROBERTA),
    "modernbert": (transformers.AutoModelForMaskedLM, transformers.AutoModelForMaskedLM, {**MODERNBERT, **IDS}),
    "t5": (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSeq2SeqLM, T5),
    "bart": (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSeq2SeqLM, BART),
    "vit": (AutoModel, transformers.AutoModelForImageClassification, VIT),
    "resnet": (AutoModel, transformers.AutoModelForImageClassification, RESNET),
}
"""The model that is saved, the model that is loaded, and the configuration."""


def saved(folder: Path, factory: Any, fields: Settings, **kwargs: Any) -> nn.Module:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{"vocab_size": 100, **fields})
    model: nn.Module = factory.from_config(config)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.5)
    model.to(kwargs.pop("dtype", torch.float32)).save_pretrained(folder, **kwargs)  # type: ignore[operator]
    return model


def load(name: Path | str, factory: Any, rows: int = 0) -> tuple[Any, Any, torch.Tensor]:
    """The model, its loading report, and the random numbers that follow."""
    recipe = tiny_recipe(Path("run"), model={"config": None, "pretrained": str(name)})
    torch.manual_seed(11)
    is_new = factory is not AutoModelForCausalLM
    model, report = transformers_model(factory, recipe, AutoConfig.from_pretrained(name), {}, takes_new_head=is_new)
    if rows:
        grow_embedding(model, rows)
    return model, report, torch.rand(3)


def load_from_files(name: Path | str, factory: Any, rows: int = 0) -> tuple[Any, Any, torch.Tensor, dict[str, Any]]:
    with torch.device("meta"):
        empty = factory.from_config(AutoConfig.from_pretrained(name))
    check_plain_weights(empty)
    with StandIns.active() as stand_ins:
        model, report, numbers = load(name, factory, rows)
        sources = stand_ins.take_out(model, empty.all_tied_weights_keys)
    return model, report, numbers, sources


def facts(model: Any) -> dict[str, Any]:
    names = {id(each): name for name, each in model.named_parameters()}
    return {
        "config": model.config.to_dict(),
        "generation": getattr(model, "generation_config", None) and model.generation_config.to_dict(),
        "modes": {name: each.training for name, each in model.named_modules()},
        "ties": {name: names[id(each)] for name, each in model.named_parameters(remove_duplicate=False)},
        "trained": {name: each.requires_grad for name, each in model.named_parameters()},
        "kinds": {name: type(each) for name, each in model.named_modules()},
        "initialized": {name: vars(each).keys() for name, each in model.named_parameters()},
        "layouts": {name: (each.dtype, each.stride()) for name, each in model.state_dict().items()},
    }


def assert_same_model(ours: Any, theirs: Any) -> None:
    assert facts(ours) == facts(theirs)
    for kind in ("state_dict", "named_buffers"):
        left, right = (dict(getattr(model, kind)()) for model in (ours, theirs))
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_read_one_at_a_time_make_the_model_of_from_pretrained_to_the_bit(tmp_path: Path, family: str) -> None:
    before, factory, fields = FAMILIES[family]
    saved(tmp_path, before, fields, max_shard_size="20KB")
    theirs, their_report, their_numbers = load(tmp_path, factory)
    ours, report, numbers, sources = load_from_files(tmp_path, factory)
    unread = {name: each for name, each in ours.named_parameters() if each.is_meta}
    assert unread.keys() == sources.keys()
    assert sum(each.numel() for each in unread.values()) > 0.8 * sum(each.numel() for each in theirs.parameters())
    assert_same_model(allocate(ours, CPU, sources), theirs)
    assert report == their_report
    assert torch.equal(numbers, their_numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_type_in_the_files_become_the_same_fp32(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 700)  # several blocks of each matrix
    saved(tmp_path, AutoModelForCausalLM, LLAMA, dtype=dtype)
    theirs, *_ = load(tmp_path, AutoModelForCausalLM)
    ours, _, _, sources = load_from_files(tmp_path, AutoModelForCausalLM)
    names = {name for name, _ in theirs.named_parameters()}
    assert digests_of_base(ours, names, sources) == digests_of_base(theirs, names)
    assert_same_model(allocate(ours, CPU, sources), theirs)


def test_frozen_matrices_never_lie_in_memory_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, largest = tensors.FileTensor.blocks, 0

    def seen(self: Any, rows: slice) -> Iterator[tuple[int, torch.Tensor]]:
        nonlocal largest
        for row, block in blocks(self, rows):
            largest = max(largest, block.untyped_storage().nbytes())
            yield row, block

    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(tensors.FileTensor, "blocks", seen)
    saved(tmp_path, AutoModelForCausalLM, LLAMA)
    theirs, *_ = load(tmp_path, AutoModelForCausalLM)
    ours, _, _, sources = load_from_files(tmp_path, AutoModelForCausalLM)
    names = {name for name, _ in theirs.named_parameters()}
    for model in (theirs, ours):
        model.requires_grad_(False)
        keep_frozen(model, names, Choice("bf16", "as set"), "bf16")
    assert all(each.is_meta for each in ours.parameters() if each.dim() > 1)
    allocate(ours, CPU, sources)
    assert sum(each.dtype == torch.bfloat16 for each in ours.parameters()) == 15  # 2 x 7, and the head
    assert 0 < largest <= 1024
    assert_same_model(ours, theirs)


def test_weights_in_the_cache_of_the_hub_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "blobs", AutoModelForCausalLM, LLAMA)
    home = tmp_path / "models--org--tiny"
    (snapshot := home / "snapshots" / REVISION).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    theirs, *_ = load("org/tiny", AutoModelForCausalLM)
    ours, _, _, sources = load_from_files("org/tiny", AutoModelForCausalLM)
    assert {source.path.parent for source in sources.values()} == {snapshot}
    assert_same_model(allocate(ours, CPU, sources), theirs)


@pytest.mark.parametrize("family", ["gpt2", "gpt2 untied", "bart"])
def test_an_embedding_that_grows_is_read_first(tmp_path: Path, family: str) -> None:
    _, factory, fields = FAMILIES[family]
    saved(tmp_path, factory, fields)
    theirs, _, their_numbers = load(tmp_path, factory, rows=128)
    ours, _, numbers, sources = load_from_files(tmp_path, factory, rows=128)
    assert_same_model(allocate(ours, CPU, sources), theirs)
    assert torch.equal(numbers, their_numbers)


def test_new_rows_do_not_outweigh_pretrained_tokens_whose_logits_are_far_below_zero(tmp_path: Path) -> None:
    fields = {**TINY_MODEL, "tie_word_embeddings": False}
    model, tokens = saved(tmp_path, AutoModelForCausalLM, fields), torch.arange(8)[None]
    with torch.no_grad():
        hidden = model.transformer(tokens).last_hidden_state[0, -1]
        model.lm_head.weight -= 50 * hidden / hidden.dot(hidden)  # the same loss: softmax ignores a shift
        expected = model(tokens).logits[0, -1].softmax(-1)
        grow_embedding(model, (num := len(expected)) + 47)
        found = model(tokens).logits[0, -1].softmax(-1)
    assert found[num:].sum() <= 47 / num
    torch.testing.assert_close(found[:num] / found[:num].sum(), expected)


def test_experts_that_transformers_merges_are_loaded_whole(tmp_path: Path) -> None:
    saved(tmp_path, AutoModelForCausalLM, MIXTRAL)
    with raises_golden():
        load_from_files(tmp_path, AutoModelForCausalLM)


def test_a_conversion_that_nobody_has_declared_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, AutoModelForCausalLM, MIXTRAL)
    with StandIns.active() as stand_ins:
        model, *_ = load(tmp_path, AutoModelForCausalLM)
        with raises_golden():
            stand_ins.take_out(model, model.all_tied_weights_keys)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_weights_that_a_file_holds_twice_are_loaded_whole(tmp_path: Path, change: float) -> None:
    saved(tmp_path, AutoModelForCausalLM, TINY_MODEL)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"] + change
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises_golden():
        load_from_files(tmp_path, AutoModelForCausalLM)


def test_quantized_weights_are_loaded_whole(tmp_path: Path) -> None:
    saved(tmp_path, AutoModelForCausalLM, LLAMA)
    config = json.loads((tmp_path / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.config.quantization_config = {"quant_method": "fp8"}
    with raises_golden():
        check_plain_weights(model)


class Own(transformers.LlamaForCausalLM):
    """A model of a program."""


def test_a_model_with_its_own_code_is_loaded_whole() -> None:
    with torch.device("meta"), raises_golden():
        check_plain_weights(Own(AutoConfig.for_model(**LLAMA)))


def made_from(tmp_path: Path) -> tuple[StandIns, nn.Module]:
    """A model of one layer of a file."""
    save_file({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    length = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    version = tensors.version_of(tmp_path / "model.safetensors")
    stand_ins, layer = StandIns(), nn.Linear(3, 3)
    layer.all_tied_weights_keys = {}  # type: ignore[assignment]
    for name, start in (("weight", 0), ("bias", 36)):
        shape = getattr(layer, name).shape
        source = tensors.FileTensor(tmp_path / "model.safetensors", version, torch.float32, shape, 8 + length + start)
        setattr(layer, name, nn.Parameter(stand_ins.make(source)))
    return stand_ins, layer


def test_a_stand_in_that_is_changed_or_computed_with_is_noticed(tmp_path: Path) -> None:
    def transpose(layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().t())

    def scale(layer: Any) -> None:
        layer.weight.data = layer.weight.data * 2

    def derive(layer: Any) -> None:
        layer.register_buffer("norm", layer.weight.detach().norm(), persistent=False)

    def count(layer: Any) -> None:
        layer.register_buffer("count", layer.weight.detach().sum().long())

    def remember(layer: Any) -> None:
        layer.first = layer.weight.detach()[0].clone()

    for act in (transpose, scale, derive, count, remember):
        stand_ins, layer = made_from(tmp_path)
        act(layer)
        with raises_golden(case=act.__name__):
            stand_ins.take_out(layer, {})
    stand_ins, layer = made_from(tmp_path)
    with pytest.raises(RuntimeError, match="single memory location"):
        layer.weight.data.mul_(2)
    assert stand_ins.take_out(layer, {}).keys() == {"weight", "bias"}


def test_a_file_that_is_replaced_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    stand_ins, layer = made_from(tmp_path)
    sources = stand_ins.take_out(layer, {})
    save_file({"weight": torch.ones(3, 3), "bias": torch.zeros(3)}, tmp_path / "new")
    os.utime(tmp_path / "new", ns=(0, 0))  # both files were written within one tick of the file system's clock
    (tmp_path / "new").replace(tmp_path / "model.safetensors")
    with raises_golden():
        allocate(layer, CPU, sources)


def test_a_process_reads_a_configuration_once_and_again_after_a_change(empty_folder: Path) -> None:
    save_bert(base := empty_folder / "bert")
    (data := empty_folder / "a.csv").write_text("text,label\n" + "".join(f"good {n},a\nbad {n},b\n" for n in range(20)))
    opened: list[str] = []
    # Python cannot remove a hook, which keeps the list.
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    file = str(base / "config.json")
    finetune(data, model=str(base), schedule={"max_steps": 1})
    # One bounds its numbers and nesting, and one is transformers'.
    assert opened.count(file) == 2
    recipe = load_recipe("runs/a.yaml")
    resolve_plan(recipe)
    assert opened.count(file) == 2
    change_config(base, hidden_dropout_prob=0.25)
    opened.clear()
    assert pretrained_config(recipe).hidden_dropout_prob == 0.25
    pretrained_config(recipe).hidden_dropout_prob = 0.5
    assert pretrained_config(recipe).hidden_dropout_prob == 0.25
    assert opened.count(file) == 2


def test_a_pretrained_model_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_bert(tmp_path / "bert")
    recipe = tiny_recipe(Path("run"), model={"config": None, "pretrained": "~/bert"})
    assert pretrained_config(recipe).model_type == "bert"


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "hidden_size", 64),
        ("a classifier of bert", "type_vocab_size", 3),
        ("vit", "intermediate_size", 64),
        ("resnet", "embedding_size", 16),
        ("an encoder", "intermediate_size", 64),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused_with_both_shapes(
    tmp_path: Path, family: str, field: str, value: int
) -> None:
    before, factory, fields = {**FAMILIES, "an encoder": (AutoModel, AutoModel, BERT)}[family]
    saved(tmp_path, before, fields)
    before_shapes = {tuple(each.shape) for each in load_file(tmp_path / "model.safetensors").values()}
    change_config(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load(tmp_path, factory)
    shapes = [ast.literal_eval(found) for found in re.findall(r"\([0-9, ]+,[0-9 ]*\)", str(caught.value))]
    assert shapes[0] in before_shapes
    assert value in shapes[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 10**12),
        ("num_hidden_layers", 10**7),
        ("hidden_size", 10**30),
        ("text_config", {"decoder_layers": 1001}),
        ("depths", [2, 1 << 25]),
    ],
)
def test_a_size_that_the_weight_files_cannot_have_is_refused_before_a_model_is_built(
    tmp_path: Path, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, *FAMILIES["llama"][1:])
    recipe = tiny_recipe(Path("run"), model={"config": None, "pretrained": str(tmp_path)})
    change_config(tmp_path, max_position_embeddings=10_485_760)
    assert pretrained_config(recipe).max_position_embeddings == 10_485_760
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("was built"))
    change_config(tmp_path, **{field: value})
    with raises_golden():
        pretrained_config(recipe)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
