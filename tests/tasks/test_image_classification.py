"""Image classification: samples, loss, metrics and the written model, on tiny models and on images made here."""

import json
import pickle
import shutil
from ast import literal_eval
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.random import default_rng
from PIL import Image
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch.nn.functional import cross_entropy, log_softmax
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    MobileViTConfig,
    MobileViTForImageClassification,
    MobileViTImageProcessorPil,
)

from accel_train.cli.main import main
from accel_train.core.json_io import load_json
from accel_train.core.model_card import FOLDER
from accel_train.recipe.evaluate import TestTimeAugmentation as Averaging
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.common.image_views import image_views, rescale
from accel_train.tasks.image_classification.task import ImageClassification
from tests.support import runs
from tests.support.runs import REPOSITORY, refused
from tests.support.text_tasks import batch_of, evaluated, load
from tests.support.wording import assert_golden

SMALL = yaml.safe_load("""
resnet: {embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], layer_type: basic}
vit: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, patch_size: 8}
convnext: {hidden_sizes: [8, 8, 8, 8], depths: [1, 1, 1, 1]}
mobilenet_v2: {depth_multiplier: 0.25}
regnet: {hidden_sizes: [8, 8], depths: [1, 1], embedding_size: 8, groups_width: 8}
swin: {embed_dim: 8, depths: [1, 1], num_heads: [1, 2], window_size: 2}
""")
"""A small model of each family."""
RESNET, VIT = ({"model_type": name, **SMALL[name]} for name in ("resnet", "vit"))
CLASSES = ("black", "blue", "green")


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes that a glance tells apart: 20 training and 9 evaluation images of each, of different sizes."""
    root = tmp_path_factory.mktemp("colours")
    generator = default_rng(0)
    for split, each in (("train", 20), ("val", 9)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number in range(each):
                height, width = generator.integers(33, 50, 2)
                image = generator.integers(0, 90, (height, width, 3), dtype=np.uint8)
                if label:
                    image[..., 3 - label] += 120
                Image.fromarray(image).save(root / split / name / f"{number:02d}.png")
    return root


def make_recipe(train: Path | str, **sections: Any) -> Recipe:
    fields = {
        "task": "image-classification",
        "output_dir": "nowhere",
        "model": {"config": RESNET},
        "data": {"train": str(train), "image_size": 32},
        "schedule": {"max_steps": 1},
    }
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section}
    return Recipe.model_validate(fields)


@pytest.fixture(scope="module")
def trained(colours: Path) -> tuple[ImageClassification, TaskData, torch.nn.Module]:
    """A ResNet after 30 steps by hand: it tells most images, not all."""
    recipe = make_recipe(colours, evaluate={"metrics": ["auroc", "f1_weighted"]})
    task, data, model = load(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    assert data.draw is not None
    model.train()
    for step in range(30):
        samples = [data.draw(int(i), default_rng((0, step, int(i)))) for i in default_rng(step).permutation(60)[:16]]
        batch = data.collate(samples)
        (task.loss_sum(model, batch) / batch["num_targets"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task, data, model


def test_a_few_steps_learn_what_a_glance_tells_with_scores_of_scikit_learn_in_any_batches(trained: Any) -> None:
    task, data, model = trained
    metrics, details = evaluated(task, data, model.eval(), 32)
    assert metrics["accuracy"] > 0.8
    found = details["classification"]
    assert found["label_names"] == list(CLASSES)
    assert np.sum(found["confusion_matrix"]) == 27
    for batch_size in (1, 7):
        others, same_details = evaluated(task, data, model, batch_size)
        assert others == pytest.approx(metrics, abs=1e-6)
        assert same_details == details
    batch, _ = batch_of(data)
    truth = batch["labels"].numpy()
    with torch.no_grad():
        probabilities = model(pixel_values=batch["pixel_values"]).logits.softmax(-1).double().numpy()
    assert metrics["accuracy"] == pytest.approx(accuracy_score(truth, probabilities.argmax(-1)), abs=1e-12)
    assert metrics["auroc"] == pytest.approx(roc_auc_score(truth, probabilities, multi_class="ovr"), abs=0.01)
    assert metrics["f1_weighted"] == pytest.approx(f1_score(truth, probabilities.argmax(-1), average="weighted"))
    assert metrics["f1_weighted"] == pytest.approx(found["report"]["weighted avg"]["f1-score"])


def test_predictions_are_the_likeliest_class_with_its_probability_and_are_named_by_file(
    trained: Any, colours: Path
) -> None:
    task, data, model = trained
    model.eval()
    batch, _ = batch_of(data, [0, 10, 20])
    with torch.no_grad():
        found = task.predict_batch(model, batch)
        probabilities = model(pixel_values=batch["pixel_values"]).logits.softmax(-1)
    assert found["label"].tolist() == probabilities.argmax(-1).tolist()
    assert found["score"].tolist() == pytest.approx(probabilities.max(-1).values.tolist())
    assert data.source.row_ids(10) == str(colours / "val/blue/01.png")


def test_what_is_saved_is_loaded_by_the_auto_classes_with_the_same_answers(trained: Any, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    task, data, model = trained
    model.eval()
    task.save(model, data, tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert again.config.id2label == dict(enumerate(CLASSES))
    assert again.config.label2id["green"] == 2
    for index in (0, 13, 26):
        image = Image.open(data.source.row_ids(index))
        assert image.size != (32, 32)
        inputs = processor(image, return_tensors="pt")["pixel_values"]
        ours = batch_of(data, [index])[0]["pixel_values"]
        assert torch.allclose(inputs, ours, atol=1e-5)
        with torch.no_grad():
            assert torch.allclose(again(pixel_values=inputs).logits, model(pixel_values=ours).logits, atol=1e-5)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-classification\n")
    assert "black, blue, green" in card
    described = tmp_path / "description"
    described.mkdir()
    task.save_description(model, data, described)
    assert {file.name for file in described.iterdir()} == {"README.md", "config.json", "preprocessor_config.json"}


def test_training_on_takes_weights_preprocessing_and_order_of_classes(
    trained: Any, tmp_path: Path, colours: Path
) -> None:
    task, data, model = trained
    task.save(model, data, tmp_path)
    settings = load_json(tmp_path / "preprocessor_config.json")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    config = load_json(tmp_path / "config.json")
    config["id2label"] = {"0": "green", "1": "black", "2": "blue"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, on, again = load(make_recipe(colours, model={"config": None, "pretrained": str(tmp_path)}))
    assert on.source.label_names == ("green", "black", "blue")
    assert on.source.preprocessing.mean == (0.1, 0.2, 0.3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not [note for note in on.facts.notes if "not pretrained" in note]


def loss_by_transformers(folder: Path, images: Path) -> float:
    """The mean loss of a model in a folder over class folders of images, through its own image processor."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor, losses = AutoImageProcessor.from_pretrained(folder, backend="pil"), []
    for path in sorted(images.glob("*/*.png")):
        with Image.open(path) as image, torch.no_grad():
            inputs = processor(image, return_tensors="pt")
            losses.append(float(model(**inputs, labels=torch.tensor([CLASSES.index(path.parent.name)])).loss))
    return float(np.mean(losses))


def test_a_mobilevit_is_trained_evaluated_and_written_with_its_own_order_of_channels_and_scale(
    colours: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8] * 3, "neck_hidden_sizes": [8] * 7, "num_attention_heads": 1, "expand_ratio": 1.0}
    own = MobileViTForImageClassification(MobileViTConfig(image_size=64, id2label=dict(enumerate(CLASSES)), **sizes))
    # With the weights and statistics of its initialization, all images have the same logits.
    for module in own.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    own.train()(torch.rand(32, 3, 1, 1) * torch.rand(32, 3, 64, 64))
    own.classifier.weight.data.normal_(0, 50)
    own.save_pretrained(tmp_path / "own")
    processor = MobileViTImageProcessorPil(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path / "own")
    model = {"config": None, "pretrained": str(tmp_path / "own")}
    task, data, loaded = load(make_recipe(colours, model=model, data={"image_size": 64}))
    found = evaluated(task, data, loaded, 8)[0]["loss"]
    assert found == pytest.approx(loss_by_transformers(tmp_path / "own", colours / "val"), abs=1e-5)
    assert data.draw is not None
    blue = [index for index in range(60) if data.train[index].label == CLASSES.index("blue")]
    drawn = data.collate([data.draw(index, default_rng(index)) for index in blue])["pixel_values"]
    shown = data.collate([data.train[index] for index in blue])["pixel_values"]
    for pixels in (drawn, shown):
        assert pixels.mean((0, 2, 3)).argmax() == 0
        assert 0 <= pixels.min() < 0.1 < 0.5 < pixels.max() <= 1
    (tmp_path / "model").mkdir()
    task.save(loaded, data, tmp_path / "model")
    settings = load_json(tmp_path / "model" / "preprocessor_config.json")
    assert (settings["image_processor_type"], settings["do_flip_channel_order"]) == ("MobileViTImageProcessor", True)
    assert found == pytest.approx(loss_by_transformers(tmp_path / "model", colours / "val"), abs=1e-5)
    settings["do_flip_channel_order"] = False
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    assert abs(loss_by_transformers(tmp_path / "model", colours / "val") - found) > 1e-2


def test_other_classes_get_a_new_head_and_the_notes_say_so(trained: Any, tmp_path: Path) -> None:
    task, data, model = trained
    task.save(model, data, tmp_path)
    recipe = make_recipe("digits", model={"config": None, "pretrained": str(tmp_path)})
    _, on, again = load(recipe)
    assert again.config.num_labels == 10
    assert torch.equal(
        again.state_dict()["resnet.embedder.embedder.convolution.weight"],
        model.state_dict()["resnet.embedder.embedder.convolution.weight"],
    )
    assert_golden("\n".join(on.facts.notes))


def test_pickled_weights_are_refused(trained: Any, tmp_path: Path, colours: Path) -> None:
    task, data, model = trained
    task.save(model, data, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    recipe = make_recipe(colours, model={"config": None, "pretrained": str(tmp_path)})
    refused(load, recipe, named="model.pretrained=|cannot be loaded")


@pytest.mark.parametrize("name", SMALL)
def test_every_family_of_models_is_built_for_the_classes_with_and_without_weights(colours: Path, name: str) -> None:
    recipe = make_recipe(colours, model={"config": {"model_type": name, **SMALL[name]}})
    task, data, model = load(recipe)
    assert model.config.num_labels == 3
    batch, _ = batch_of(data, [0, 1])
    model.train()
    task.loss_sum(model, batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.device("meta"):
        bare = task.build_model(recipe, data)
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert sum(p.numel() for p in bare.parameters()) == sum(p.numel() for p in model.parameters())
    assert task.flops_per_target(recipe, model) == task.flops_per_target(recipe, bare)


def test_flops_are_three_times_those_of_the_convolutions(colours: Path) -> None:
    recipe = make_recipe(colours)
    task, _, model = load(recipe)
    sizes = []

    def count(module: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        weight = module.weight
        sizes.append(2 * output[0].numel() * weight[0].numel())

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model.eval()(pixel_values=torch.zeros(1, 3, 32, 32))
    assert task.flops_per_target(recipe, model) == 3 * sum(sizes)


def test_a_size_that_the_model_does_not_take_is_refused_before_training(colours: Path) -> None:
    recipe = make_recipe(colours, model={"config": {**VIT, "image_size": 48}})
    refused(load, recipe, named="data.image_size=32|'vit'|data.image_size: 48")
    _, _, model = load(make_recipe(colours, model={"config": VIT}))
    assert model.config.image_size == 32


def test_a_model_of_one_channel_gets_grey_images(colours: Path) -> None:
    _, data, model = load(make_recipe(colours, model={"config": {**RESNET, "num_channels": 1}}))
    batch, _ = batch_of(data, [0, 1, 2])
    assert batch["pixel_values"].shape == (3, 1, 32, 32)
    assert data.draw is not None
    assert data.draw(0, default_rng(0)).image.shape == (32, 32)
    assert model(pixel_values=batch["pixel_values"]).logits.shape == (3, 3)


def test_colours_that_a_model_of_one_channel_does_not_see_are_noted(colours: Path) -> None:
    grey = {"config": {**RESNET, "num_channels": 1}}

    def notes(train: Path | str, **model: Any) -> list[str]:
        return [note for note in load(make_recipe(train, **model))[1].facts.notes if "num_channels" in note]

    (note,) = notes(colours, model=grey)
    assert_golden(note)
    assert notes(colours) == notes("digits", model=grey) == []


@pytest.mark.parametrize("channels", [1, 3])
@torch.no_grad()
def test_the_code_in_the_written_readme_answers_as_we_do(
    colours: Path, tmp_path: Path, channels: int, capsys: pytest.CaptureFixture[str]
) -> None:
    task, data, model = load(make_recipe(colours, model={"config": {**RESNET, "num_channels": channels}}))
    task.save(model.eval(), data, tmp_path)
    image = colours / "val" / "blue" / "00.png"
    at = data.source.sets.eval.images.names.index("blue/00.png")
    ours = task.predict_batch(model, batch_of(data, [at])[0])
    name, score = data.source.label_names[int(ours["label"][0])], pytest.approx(float(ours["score"][0]), abs=1e-4)
    code = (tmp_path / "README.md").read_text().split("```python")[1].split("```")[0]
    exec(code.replace(FOLDER, str(tmp_path)).replace("image.png", str(image)), {})
    # An import of transformers may print a line before.
    last = capsys.readouterr().out.splitlines()[-1]
    said, probability = literal_eval(last)[0].values() if channels == 3 else last.split()
    assert (said, float(probability)) == (name, score)


def test_the_training_loss_has_smoothing_and_class_weights_and_the_evaluation_neither(colours: Path) -> None:
    recipe = make_recipe(colours, loss={"label_smoothing": 0.1, "class_weights": {"blue": 3.0}})
    task, data, model = load(recipe)
    batch, _ = batch_of(data, [0, 10, 20, 12])
    model.train()
    logits = model(pixel_values=batch["pixel_values"]).logits
    log_p = log_softmax(logits, -1)
    weights, labels = torch.tensor([1.0, 3.0, 1.0]), batch["labels"]
    assert labels.tolist() == [0, 1, 2, 1]
    each = -(0.9 * log_p[torch.arange(4), labels] + 0.1 * log_p.mean(-1))
    assert torch.allclose(task.loss_sum(model, batch), (weights[labels] * each).sum())
    model.eval()
    logits = model(pixel_values=batch["pixel_values"]).logits
    assert torch.allclose(task.loss_sum(model, batch), cross_entropy(logits, labels, reduction="sum"))


def test_a_batch_with_a_mixed_image_has_soft_labels_and_its_loss_is_the_mixed_loss(colours: Path) -> None:
    task, data, model = load(make_recipe(colours, data={"augment": {"mixup_alpha": 0.5}}))
    assert data.draw is not None
    plain = data.train[0]
    mixed = plain._replace(partner_label=2, share=0.7)
    assert "labels" in data.collate([plain, plain])
    batch = data.collate([plain, mixed])
    assert "labels" not in batch
    assert torch.allclose(batch["soft_labels"], torch.tensor([[1.0, 0, 0], [0.7, 0, 0.3]]))
    model.train()
    log_p = log_softmax(model(pixel_values=batch["pixel_values"]).logits, -1)
    expected = -(log_p[0, 0] + 0.7 * log_p[1, 0] + 0.3 * log_p[1, 2])
    assert torch.allclose(task.loss_sum(model, batch), expected)
    drawn = [data.draw(index, default_rng(index)) for index in range(30)]
    assert sum(sample.share < 1 for sample in drawn) > 25


def test_the_fingerprint_changes_with_what_changes_samples_and_with_nothing_else(colours: Path) -> None:
    def fingerprint(**data: Any) -> str:
        found = ImageClassification().load_data(make_recipe(colours, data=data), progress=False)
        return f"{found.fingerprint} {found.settings}"

    first = fingerprint()
    assert fingerprint(num_workers=3) == fingerprint(augment={"mixup_alpha": 0.2}) == first
    others = [
        fingerprint(image_size=40),
        fingerprint(label_names=["green", "blue", "black"]),
        fingerprint(eval=str(colours / "train")),
    ]
    assert len({first, *others}) == 4


def test_only_arrays_that_are_seen_as_they_are_cost_nothing_to_read(colours: Path) -> None:
    plain = {"random_resized_crop": None, "horizontal_flip": 0.0}
    for train, augment, free in (("digits", plain, True), ("digits", {}, False), (colours, plain, False)):
        data = ImageClassification().load_data(make_recipe(train, data={"augment": augment}), progress=False)
        assert data.reading_is_free is free
        assert (data.draw is None) == (augment is plain)


@pytest.mark.parametrize(
    "sections, named",
    [
        ({"evaluate": {"metrics": ["perplexity"]}}, "'perplexity'"),
        ({"evaluate": {"metrics": ["acuracy"]}}, "did you mean 'accuracy'"),
        ({"loss": {"class_weights": [1.0, 2.0]}}, "class_weights|2 weights for 3 classes"),
        (
            {"model": {"config": VIT}, "evaluate": {"test_time_augmentation": {"scales": [0.75]}}},
            "scales: 0.75|one size only",
        ),
        ({"model": {"config": {**RESNET, "num_channels": 4}}}, "4 channels"),
        ({"model": {"config": {"model_type": "gpt2"}}}, "'gpt2'|image classification|resnet"),
    ],
)
def test_settings_that_do_not_fit_are_refused(colours: Path, sections: dict[str, Any], named: str) -> None:
    refused(load, make_recipe(colours, **sections), named=named)


def test_views_are_the_image_at_each_scale_and_its_mirror_image() -> None:
    images = torch.arange(64.0).view(1, 1, 8, 8)
    views = list(image_views(images, Averaging(scales=(1.0, 1.5)), takes_any_size=True))
    assert [(view.scale, view.is_flipped, tuple(view.pixel_values.shape[-2:])) for view in views] == [
        (1.0, False, (8, 8)),
        (1.0, True, (8, 8)),
        (1.5, False, (12, 12)),
        (1.5, True, (12, 12)),
    ]
    assert views[0].is_original
    assert torch.equal(views[1].pixel_values, images.flip(-1))
    assert torch.equal(views[3].pixel_values, views[2].pixel_values.flip(-1))
    zoomed = rescale(images, 2.0, takes_any_size=False)
    assert zoomed.shape == images.shape
    assert zoomed.min() >= images[..., 2:6, 2:6].min()
    assert zoomed.max() <= images[..., 2:6, 2:6].max()


@pytest.mark.parametrize("config, takes_any_size", [(RESNET, True), (VIT, False)])
def test_averaging_at_test_time_is_the_mean_of_probabilities_and_is_reported_beside_the_plain_metrics(
    colours: Path, config: dict[str, Any], takes_any_size: bool
) -> None:
    settings = {"test_time_augmentation": {"scales": [1.0, 1.5]}}
    task, data, model = load(make_recipe(colours, model={"config": config}, evaluate=settings))
    assert task.takes_any_size is takes_any_size
    metrics, details = evaluated(task, data, model, 10)
    found = details["test_time_augmentation"]
    assert found["without"]["accuracy"] == metrics["accuracy"]
    batch, _ = batch_of(data, range(27))
    pixels = batch["pixel_values"]
    large = rescale(pixels, 1.5, takes_any_size=takes_any_size)
    with torch.no_grad():
        answers = [
            model(pixel_values=view).logits.softmax(-1) for view in (pixels, pixels.flip(-1), large, large.flip(-1))
        ]
        predicted = task.predict_batch(model, batch)
    mean = torch.stack(answers).mean(0)
    assert torch.allclose(predicted["score"], mean.max(-1).values, atol=1e-6)
    assert predicted["label"].tolist() == mean.argmax(-1).tolist()
    assert found["with"]["accuracy"] == pytest.approx(float((mean.argmax(-1) == batch["labels"]).float().mean()))


def test_more_than_ten_classes_have_a_top_5_accuracy(tmp_path: Path) -> None:
    images = default_rng(0).integers(0, 256, (120, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(120) % 12)
    task, data, model = load(make_recipe(tmp_path / "a.npz", data={"eval_fraction": 0.3}))
    metrics, _ = evaluated(task, data, model, 16)
    batch, _ = batch_of(data)
    with torch.no_grad():
        top = model(pixel_values=batch["pixel_values"]).logits.topk(5).indices
    expected = (top == batch["labels"][:, None]).any(1).float().mean()
    assert metrics["top_5_accuracy"] == pytest.approx(float(expected))


def test_baselines_know_the_commonest_class_and_what_a_linear_model_reaches(trained: Any) -> None:
    task, data, _ = trained
    found = task.baselines(data)
    assert found["majority_accuracy"] == pytest.approx(1 / 3)
    assert 0.6 <= found["logistic_regression_accuracy"] <= 1  # black is dark; blue and green are grey alike


def write(folder: Path, train: Path, **sections: Any) -> Path:
    fields = make_recipe(train, **sections).model_dump(mode="json", exclude_unset=True)
    fields |= {"output_dir": str(folder / "run"), "log": {"every_steps": 1, "progress": False}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.mark.slow
def test_a_run_on_two_processes_with_readers_draws_what_one_process_draws(colours: Path, tmp_path: Path) -> None:
    """A vision transformer has no statistics over the batch, so the loss has to be the same."""
    losses = []
    for processes, workers in ((1, 0), (2, 2)):
        folder = tmp_path / str(processes)
        folder.mkdir()
        recipe = write(
            folder,
            colours,
            model={"config": {**VIT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
            data={"num_workers": workers, "augment": {"rand_augment_ops": 1, "mixup_alpha": 0.3, "cutmix_alpha": 0.3}},
            batch={"global_batch_size": 8},
            schedule={"max_steps": 6},
            precision={"mixed_precision": "no"},
        )
        runs.run(recipe, processes=processes)
        losses.append(runs.losses(folder / "run"))
    assert list(losses[0]) == list(losses[1]) == [1, 2, 3, 4, 5, 6]
    assert list(losses[0].values()) == pytest.approx(list(losses[1].values()), rel=1e-4)


@pytest.mark.slow
def test_batch_norms_train_on_two_processes_and_the_result_is_written(colours: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    sections = {
        "batch": {"global_batch_size": 16},
        "schedule": {"max_steps": 25},
        "optimizer": {"learning_rate": 2e-3},
    }
    runs.run(write(tmp_path, colours, **sections), processes=2)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run/model")
    statistics = [b for name, b in model.named_buffers() if name.endswith("running_mean")]
    assert all(bool(buffer.any()) for buffer in statistics)
    evaluation = runs.metrics(tmp_path / "run", "eval")[-1]
    assert evaluation["accuracy"] > 0.6


def test_a_broken_body_stops_the_run_and_names_the_file(
    colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(colours, tmp_path / "images")
    large = Image.fromarray(default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    broken = tmp_path / "images/train/blue/07.png"
    large.save(broken)
    broken.write_bytes(broken.read_bytes()[:3000])
    recipe = write(tmp_path, tmp_path / "images", batch={"global_batch_size": 8}, schedule={"max_steps": 8})
    assert main(["run", str(recipe), "--data.num_workers", "1"]) == 2
    assert f"{broken}: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_reads_digits_as_well_as_it_says(tmp_path: Path) -> None:
    recipe = REPOSITORY / "recipes/image_classification.yaml"
    runs.run(recipe, "--output_dir", str(tmp_path / "run"))
    assert runs.metrics(tmp_path / "run", "eval")[-1]["accuracy"] >= 0.98
