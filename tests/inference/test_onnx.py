"""`accel-train export --onnx`: graphs that compute the model's logits at any size, and nothing written otherwise."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy.typing import NDArray
from onnxruntime import InferenceSession
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from accel_train.core import errors
from accel_train.inference import onnx_export, onnx_int8
from accel_train.inference.export import load_exported
from accel_train.model.ngrams import register
from tests.inference.conftest import Cli, run_card
from tests.support import text_tasks
from tests.support.runs import answers, refused, write_recipe_file
from tests.support.text_tasks import BERT, GPT2, MODERNBERT, ROBERTA, SEGFORMER
from tests.support.wording import assert_golden, raises_golden

Config = dict[str, Any]
SECOND = ["one number", "x"]
TEXTS = ["a step", "the device memory of the host is 3 and more, and more, and more"]
# As finetune writes them.
NGRAMS = {
    "model_type": "ngrams",
    "num_buckets": 4096,
    "separate_norms": True,
    "within_words": True,
    "log_counts": True,
}
PAIR = {"data": {"text_columns": ["text", "more"]}}
DISTILBERT = {"model_type": "distilbert", "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 2}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
UPERNET = {
    "model_type": "upernet",
    "hidden_size": 8,
    "pool_scales": [1, 2],
    "use_auxiliary_head": False,
    "backbone_config": {**RESNET, "out_features": ["stage1", "stage2"]},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exported(run: Path, cli: Cli) -> tuple[Path, Config]:
    """The folder that `export --onnx --json` wrote, and the details of its result."""
    result = cli.result(f"export {run} --onnx")
    assert (result["onnx"], result["folder"]) == (True, str(run / "export-onnx"))
    details = result["details"]
    assert details["metrics"]["after"] == pytest.approx(details["metrics"]["before"], rel=1e-4, abs=1e-4)
    assert max(details["onnx"]["largest_difference"].values()) < 1e-3
    assert details["onnx"]["num_ties"] == 0
    assert min(details["samples_per_second"].values()) > 0
    assert not list((run / "export-onnx").glob("*.safetensors*"))
    return run / "export-onnx", details


def assert_same_logits(folder: Path, model: Any, feed: Config) -> None:
    """`feed` is the processor's result, and the graph takes no other name and leaves none out."""
    session = InferenceSession(folder / "model.onnx")
    outputs = [each.name for each in session.get_outputs()]
    found = session.run(None, dict(feed))
    with torch.no_grad():
        expected = model.eval()(**{name: torch.from_numpy(rows) for name, rows in feed.items()})
    for name, logits in zip(outputs, found, strict=True):
        np.testing.assert_allclose(logits, expected[name].numpy(), rtol=1e-4, atol=1e-4)
        assert np.ptp(logits) > 1e-3


slow = pytest.mark.slow
CLASSES = "AutoModelForSequenceClassification"
CASES: dict[str, tuple[str, str, Config, Config]] = {
    "text": ("text-classification", CLASSES, BERT, {}),
    "ngrams": ("text-classification", CLASSES, NGRAMS, {}),
    "answers": ("question-answering", "AutoModelForQuestionAnswering", BERT, {}),
    "choices": ("multiple-choice", "AutoModelForMultipleChoice", BERT, {}),
    "tokens": ("token-classification", "AutoModelForTokenClassification", BERT, {}),
    "masked": ("masked-lm", "AutoModelForMaskedLM", BERT, {}),
    "pairs": ("text-classification", CLASSES, BERT, PAIR),
    "pairs of ngrams": ("text-classification", CLASSES, {**NGRAMS, "type_vocab_size": 2}, PAIR),
    "regression": ("text-classification", CLASSES, MODERNBERT, {}),
    "roberta": ("text-classification", CLASSES, ROBERTA, {}),
    "distilbert": ("text-classification", CLASSES, DISTILBERT, {}),
    "gpt2": ("text-classification", CLASSES, GPT2, {}),
}


def train(case: str, folder: Path) -> Path:
    """A run of three steps, whose weights are large enough for logits that differ from text to text."""
    task, _, config, sections = CASES[case]
    rows = [60, float] if case == "regression" else []
    is_ngrams = config["model_type"] == "ngrams"
    settings = {"schedule": {"max_steps": 3}, "optimizer": {"learning_rate": 0.1 if is_ngrams else 1e-3}, **sections}
    model = {"config": config if is_ngrams else {**config, "initializer_range": 0.5}}
    return text_tasks.train(task, folder, *rows, model=model, **settings)


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if at < 3 else slow) for at, name in enumerate(CASES)])
def test_a_graph_computes_the_logits_of_from_pretrained_for_texts_of_any_size(
    case: str, tmp_path: Path, cli: Cli
) -> None:
    task, factory, *_ = CASES[case]
    run = train(case, tmp_path)
    folder, _ = exported(run, cli)
    is_pair = "pairs" in case or task in ("question-answering", "multiple-choice")
    texts = (TEXTS, SECOND) if is_pair else (TEXTS,)
    tokens = AutoTokenizer.from_pretrained(folder)(*texts, padding=True, return_tensors="np")
    register()
    model = getattr(transformers, factory).from_pretrained(run / "model")
    if case == "choices":
        tokens = {name: rows[None] for name, rows in tokens.items()}
    assert_same_logits(folder, model, tokens)
    assert_same_logits(
        folder, model, {name: np.tile(rows, (3, *[1] * (rows.ndim - 1))) for name, rows in tokens.items()}
    )
    refused(load_exported, folder, named="InferenceSession")
    if case == "text":
        assert run_card(folder, texts=TEXTS[:1])["outputs"][0].shape == (1, 3)


BROKEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, str]] = {
    "other logits": (lambda logits: logits + 0.1, 1e-3, "the logits of the graph differ from the model's by 0.1;"),
    "other metrics": (lambda logits: -logits, 100.0, " for the graph; the tolerance is 0.0001"),
    "an operator that ONNX lacks": (
        lambda logits: logits.cummax(0).values,
        1e-3,
        "torch cannot export BertForSequenceClassification: No ONNX function found for <OpOverload(op='aten.cummax'",
    ),
}


def test_a_graph_that_is_not_the_model_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    run = train("text", tmp_path)
    before, whole = sorted(run.rglob("*")), onnx_export._Outputs.forward
    for change, tolerance, said in BROKEN.values():
        monkeypatch.setattr(
            onnx_export._Outputs, "forward", lambda self, *given, change=change: (change(whole(self, *given)[0]),)
        )
        monkeypatch.setattr(onnx_export, "TOLERANCE", tolerance)
        [error] = answers(cli(f"export {run} --onnx", code=2))
        assert said in error
        assert sorted(run.rglob("*")) == before
    (tmp_path / "a.jsonl").rename("moved.jsonl")
    assert_golden(cli.refusal(f"export {run} --onnx"))


@pytest.mark.parametrize(
    "name, graph, model",
    [
        ("logits", [math.nan, 1.0], [1.0, 1.0]),
        ("logits", [1.0, 1.0], [math.inf, 1.0]),
        ("logits", [1.0, 1.002], [1.0, 1.0]),
        ("logits", [2.0, 1.0], [1.0, 9.0]),
        # Numbers of a normalized vector are small, and the tolerance is a share of them.
        ("sentence_embedding", [0.1, 0.1005], [0.1, 0.1]),
    ],
)
def test_one_bad_batch_of_many_refuses_the_graph(name: str, graph: list[float], model: list[float]) -> None:
    node, batches = SimpleNamespace(name=name), iter([np.float32([each]) for each in graph])
    given = SimpleNamespace(get_inputs=list, get_outputs=lambda: [node], run=lambda *_: [next(batches)])
    expected = iter(model)
    reference = torch.nn.Identity()
    reference.forward = lambda **_: {name: torch.tensor([next(expected)])}
    checked = onnx_export.OnnxModel(given, reference)
    for _ in graph:
        checked(input_ids=torch.zeros(1))
    with raises_golden():
        onnx_export._check(checked, {}, {})


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq", "own:Task", "text-classification"])
def test_a_refusal_comes_before_torch_and_names_the_fix(task: str, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    Path("run").mkdir()
    Path("run/recipe.resolved.yaml").write_text(
        f"task: {task}\noutput_dir: run\nmodel: {{pretrained: m}}\ndata: {{train: d}}\nschedule: {{max_steps: 1}}\n"
    )
    if task == "text-classification":
        monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "onnxscript" else name)
    assert_golden(cli("export run --onnx", code=2))


def exported_in_int8(run: Path, cli: Cli) -> tuple[InferenceSession, onnx.ModelProto, Config]:
    """The graph that `export --onnx --quantize int8` wrote, as a session and as a file, and the details."""
    result = cli.result(f"export {run} --onnx --quantize int8")
    folder = run / "export-onnx-int8"
    assert (result["onnx"], result["quantize"], result["folder"]) == (True, "int8", str(folder))
    details, file = result["details"], folder / "model.onnx"
    assert [each.name for each in folder.glob("*.onnx*")] == ["model.onnx"]
    assert not list(folder.glob("*.safetensors*"))
    assert details["weights_bytes"]["after"] == file.stat().st_size < details["weights_bytes"]["onnx"]
    for name in ("metrics", "samples_per_second"):
        assert list(details[name]) == ["before", "onnx", "after"]
    assert details["metrics"]["onnx"] == pytest.approx(details["metrics"]["before"], rel=1e-4, abs=1e-4)
    evaluated = cli.result(f"evaluate {run}")["metrics"]
    assert details["metrics"]["before"] == pytest.approx(
        {name: evaluated[name] for name in details["metrics"]["before"]}
    )
    return InferenceSession(file), onnx.load(file), details


def int8_weights(graph: onnx.ModelProto) -> list[tuple[NDArray[np.int8], NDArray[np.float32]]]:
    """The int8 tensors with more than one axis, and their scales."""
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in graph.graph.initializer}
    wide = {name: each for name, each in tensors.items() if each.dtype == np.int8 and each.ndim > 1}
    return [(each, tensors[name.removesuffix("_quantized") + "_scale"]) for name, each in wide.items()]


@pytest.mark.parametrize("case", ["text", pytest.param("pairs", marks=slow), pytest.param("gpt2", marks=slow)])
def test_an_int8_graph_of_texts_holds_every_matrix_in_int8_and_is_near_the_model(
    case: str, tmp_path: Path, cli: Cli
) -> None:
    run = train(case, tmp_path)
    session, graph, details = exported_in_int8(run, cli)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    # A Conv1D of GPT-2 holds its inputs first, as the graph does.
    layers = [each for each in model.modules() if isinstance(each, torch.nn.Linear | Conv1D)]
    linear = [each.weight.detach() if isinstance(each, Conv1D) else each.weight.detach().T for each in layers]
    counts = {"num_matrices": len(linear), "num_convolutions": 0, "num_weights": sum(map(torch.numel, linear))}
    assert {name: details["int8"][name] for name in counts} == counts
    assert details["int8"]["share_of_parameters"] == pytest.approx(
        counts["num_weights"] / sum(each.numel() for each in model.parameters())
    )
    matrices = int8_weights(graph)
    assert len(matrices) == len(linear)
    for numbers, scales in matrices:
        # One scale per output, and 7 bits.
        assert scales.shape == numbers.shape[1:]
        assert np.abs(numbers).max(0).tolist() == [64] * len(scales)
        errors = [np.abs(numbers * scales - each.numpy()) for each in linear if each.shape == numbers.shape]
        assert min((error / scales).max() for error in errors) <= 0.5001
    words = AutoTokenizer.from_pretrained(run / "model")
    for texts in (TEXTS, TEXTS[:1], TEXTS * 3):
        others = [(SECOND * 3)[: len(texts)]] if case == "pairs" else []
        tokens = words(texts, *others, padding=True, return_tensors="np")
        (logits,) = session.run(None, dict(tokens))
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(rows) for name, rows in tokens.items()}).logits.numpy()
        assert 0 < np.abs(logits - expected).max() < 0.25 * np.abs(expected).max()
    assert 1e-3 < details["int8"]["largest_difference"]["logits"] < 0.25 * details["onnx"]["largest_value"]["logits"]
    refused(load_exported, run / "export-onnx-int8", named="InferenceSession")
    if case == "text":
        assert run_card(run / "export-onnx-int8", texts=TEXTS[:1])["outputs"][0].shape == (1, 3)


def test_a_model_without_matrices_is_refused_in_int8_and_nothing_is_written(tmp_path: Path, cli: Cli) -> None:
    run = train("ngrams", tmp_path)
    before = sorted(run.rglob("*"))
    assert_golden(cli.refusal(f"export {run} --onnx --quantize int8"))
    assert sorted(run.rglob("*")) == before
    (run / "export-onnx-int8").mkdir()
    (run / "export-onnx-int8" / "mine.txt").write_text("mine")
    assert "mine.txt" in cli(f"export {run} --onnx --quantize int8", code=2)
    assert [each.name for each in (run / "export-onnx-int8").iterdir()] == ["mine.txt"]


def test_a_channel_of_zeros_and_each_other_channel_has_a_scale_that_uses_all_of_int8() -> None:
    weight = (
        np.random.default_rng(0).normal(size=(4, 3, 2, 2)).astype(np.float32)
        * np.float32([1, 100, 0, 1e-3])[:, None, None, None]
    )
    numbers, scales = onnx_int8._in_int8(weight)
    assert scales.shape == (4, 1, 1, 1)
    assert np.abs(numbers).reshape(4, -1).max(1).tolist() == [127, 127, 0, 127]
    largest = np.abs(weight).reshape(4, -1).max(1)
    error = np.abs(numbers * scales - weight).reshape(4, -1).max(1)
    assert (error <= largest / 127 / 2 * 1.0001).all()


def write_images(folder: Path, masks: bool) -> Path:
    generator = np.random.default_rng(0)
    for number in range(12):
        pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        image = folder / ("images" if masks else "ab"[number % 2]) / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(image)
        if masks:
            (folder / "masks").mkdir(exist_ok=True)
            Image.fromarray(pixels[..., 0] // 86).save(folder / "masks" / image.name)
    return folder


def train_images(config: Config, folder: Path, cli: Cli) -> Path:
    """A run of three steps."""
    masks = config in (SEGFORMER, UPERNET)
    data = {"train": str(write_images(folder / "set", masks)), "image_size": 32, "eval_fraction": 0.3}
    data |= {"cache_dir": None, "sequence_length": None}
    recipe = write_recipe_file(
        folder,
        task="semantic-segmentation" if masks else "image-classification",
        model={"config": config},
        data=data,
        evaluate={"test_time_augmentation": {"horizontal_flip": True}},
        schedule={"max_steps": 3},
    )
    cli(f"run {recipe}")
    return folder / "run"


@pytest.mark.parametrize("config", [RESNET, pytest.param(VIT, marks=slow), pytest.param(UPERNET, marks=slow)])
def test_an_int8_graph_of_images_holds_matrices_and_convolutions_in_int8_and_is_near_the_model(
    config: Config, tmp_path: Path, cli: Cli
) -> None:
    run = train_images(config, tmp_path, cli)
    session, graph, details = exported_in_int8(run, cli)
    name = "AutoModelForSemanticSegmentation" if config is UPERNET else "AutoModelForImageClassification"
    model = getattr(transformers, name).from_pretrained(run / "model").eval()
    kinds = {"num_matrices": torch.nn.Linear, "num_convolutions": torch.nn.Conv2d}
    layers = {kind: [each for each in model.modules() if isinstance(each, type_)] for kind, type_ in kinds.items()}
    assert {kind: details["int8"][kind] for kind in kinds} == {kind: len(found) for kind, found in layers.items()}
    assert len(int8_weights(graph)) == sum(map(len, layers.values()))
    images = [Image.new("RGB", (50, 50), color) for color in ("red", "green", "navy")]
    pixels = AutoImageProcessor.from_pretrained(run / "export-onnx-int8")(images, return_tensors="np")["pixel_values"]
    for given in (pixels, pixels[:1], *([] if config is VIT else [np.tile(pixels, (1, 1, 2, 3))])):
        (logits,) = session.run(None, {"pixel_values": given})
        with torch.no_grad():
            expected = model(torch.from_numpy(given)).logits.numpy()
        assert logits.shape == expected.shape
        assert 0 < np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "config, size",
    [
        (RESNET, "any"),
        pytest.param(VIT, 32, marks=slow),
        pytest.param(SEGFORMER, 32, marks=slow),
        pytest.param(UPERNET, "any", marks=slow),
    ],
)
def test_a_graph_computes_the_logits_of_images_of_any_size_that_the_model_takes(
    config: Config, size: Any, tmp_path: Path, cli: Cli
) -> None:
    masks = config in (SEGFORMER, UPERNET)
    folder, details = exported(train_images(config, tmp_path, cli), cli)
    sizes = details["onnx"]["inputs"]["pixel_values"]
    assert sizes == ["batch", 3, *(["height", "width"] if size == "any" else [size, size])]
    name = "AutoModelForSemanticSegmentation" if masks else "AutoModelForImageClassification"
    model = getattr(transformers, name).from_pretrained(tmp_path / "run" / "model")
    images = [Image.new("RGB", (50, 50), color) for color in ("red", "green", "navy")]
    pixels = dict(AutoImageProcessor.from_pretrained(folder)(images, return_tensors="np"))
    assert_same_logits(folder, model, pixels)
    if size == "any":
        assert_same_logits(folder, model, {"pixel_values": np.tile(pixels["pixel_values"], (1, 1, 2, 3))})
