"""Settings follow from the size of pretrained weights and of the data, within what the schema takes."""

from pathlib import Path
from typing import Any

import pytest
from transformers import RTDetrImageProcessorPil, YolosConfig, YolosForObjectDetection, YolosImageProcessorPil

from accel_train.core.state import Choice
from accel_train.experiments.finetune.amounts import Pretrained
from accel_train.experiments.finetune.models import choose, look_at
from accel_train.experiments.finetune.recipe import Found, tree_of
from accel_train.recipe.loader import make_recipe
from accel_train.recipe.tasks import TASKS, finetune_tasks, refuse_unreported, refuse_unused
from tests.support.wording import assert_golden


def found(task: str = "text-classification", number: int = 1_000, **facts: Any) -> Found:
    facts = {"counts": {"a": number // 2, "b": number // 2}, "has_one_label": True, "num_chars": 100 * number, **facts}
    return Found(task, "why", "data", num_samples=number, settings={"data.train": Choice("data", "")}, **facts)


def pretrained(num_parameters: float, **facts: Any) -> Pretrained:
    known = {"num_positions": 512, "image_size": None, "has_chat_template": False, **facts}
    return Pretrained("name", int(num_parameters), **known)


@pytest.mark.parametrize(
    ("num_parameters", "rate"), [(1e6, 5e-4), (22e6, 2e-4), (110e6, 5e-5), (350e6, 3e-5), (700e6, 2e-5), (7e9, 2e-4)]
)
def test_the_learning_rate_falls_with_the_size_and_large_models_take_adapters(
    num_parameters: float, rate: float
) -> None:
    for task in finetune_tasks():
        chosen = choose(found(task), pretrained(num_parameters))
        # Detectors and sentence encoders have usual rates.
        usual = {"object-detection": 5e-5, "sentence-embedding": 2e-5 if num_parameters < 1e9 else rate}
        assert chosen["optimizer.learning_rate"].value == usual.get(task, rate)
        assert ("model.lora" in chosen) == (num_parameters >= 1e9)


@pytest.mark.parametrize(("number", "batch"), [(4, 2), (60, 4), (500, 32), (1_999, 128), (100_000, 128)])
def test_a_batch_of_embeddings_has_many_negatives_and_an_epoch_has_several_steps(number: int, batch: int) -> None:
    for model in (None, pretrained(110e6)):
        chosen = choose(found("sentence-embedding", number), model)
        assert chosen["batch.global_batch_size"].value == batch


@pytest.mark.parametrize("task", finetune_tasks())
@pytest.mark.parametrize("number", [4, 500, 5_000, 100_000])
@pytest.mark.parametrize("model", [None, pretrained(110e6)])
def test_what_is_chosen_is_a_recipe(task: str, number: int, model: Pretrained | None) -> None:
    facts = found(task, number, edge=300, aspect=1.6)
    recipe = make_recipe(tree_of(facts.task, {**facts.settings, **choose(facts, model)}, "runs/x"), "chosen")
    assert recipe.task == task
    assert recipe.checkpoint.load_best_model_at_end
    refuse_unused(recipe, TASKS[task])
    refuse_unreported(recipe, TASKS[task])


def test_more_samples_are_read_fewer_times_and_a_smaller_part_is_held_out() -> None:
    few, many = (choose(found(number=number), pretrained(110e6)) for number in (300, 100_000))
    assert few["schedule.num_epochs"].value > many["schedule.num_epochs"].value
    assert few["data.eval_fraction"].value > many["data.eval_fraction"].value


@pytest.mark.parametrize(
    ("counts", "metric"), [({"a": 50, "b": 50}, "accuracy"), ({"a": 90, "b": 10}, "f1_macro"), ({}, "pearson")]
)
def test_the_metric_follows_from_the_labels(counts: dict[str, int], metric: str) -> None:
    assert choose(found(number=100, counts=counts), None)["evaluate.metric_for_best_model"].value == metric


def test_images_that_are_wide_are_seen_wide_where_masks_belong_to_them() -> None:
    chosen = choose(found("semantic-segmentation", edge=360, aspect=480 / 360), None)
    assert chosen["data.image_size"].value == [128, 160]


@pytest.mark.parametrize(("edge", "image_size"), [(300, 512), (640, 512), (800, [800, 1216]), (3000, [1024, 1536])])
def test_images_larger_than_a_pretrained_segmenter_takes_are_seen_by_windows(edge: int, image_size: Any) -> None:
    model = pretrained(30e6, image_size=512)
    chosen = choose(found("semantic-segmentation", edge=edge, aspect=1.5), model)
    assert chosen["data.image_size"].value == image_size
    by_windows = isinstance(image_size, list)
    assert ("data.crop_size" in chosen, "evaluate.window_stride" in chosen) == (by_windows, by_windows)
    if by_windows:
        assert (chosen["data.crop_size"].value, chosen["evaluate.window_stride"].value) == (512, 341)


def test_a_detector_whose_processor_keeps_the_aspect_is_shown_whole_images_and_the_reason_names_it(
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    YolosForObjectDetection(YolosConfig(image_size=[32, 48], **sizes)).save_pretrained(tmp_path)
    YolosImageProcessorPil().save_pretrained(tmp_path)
    model = look_at(str(tmp_path), "object-detection", trust_remote_code=False)
    choice = choose(found("object-detection"), model)["data.image_resize"]
    assert choice.value == "whole"
    assert_golden(choice.reason)
    RTDetrImageProcessorPil().save_pretrained(tmp_path)
    model = look_at(str(tmp_path), "object-detection", trust_remote_code=False)
    assert "data.image_resize" not in choose(found("object-detection"), model)
    assert model.image_size == 640
