"""Object detection in whole runs: other numbers of processes, rates by layer, clipping, commands, and refusals."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForObjectDetection

from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from accel_train.core.json_io import load_json
from accel_train.engine.batch_search import Trials, search
from accel_train.engine.resolve import check_recipe
from accel_train.model.compile import repeated_blocks
from accel_train.model.training_module import TrainingModule
from accel_train.optim.optimizers import layer_scales
from accel_train.recipe.schema import Recipe
from accel_train.tasks.object_detection.task import ObjectDetection
from tests.support.boxes import write_images
from tests.support.comparisons import tensors
from tests.support.detectors import DEFORMABLE, DETECTORS, FAULTY, YOLOS, sections_of, train_boxes
from tests.support.runs import REPOSITORY, events, metrics, run_forked_command, write_jsonl
from tests.support.text_tasks import load, predict

ONE_STACK = YOLOS | {"use_mid_position_embeddings": False}
"""A YOLOS whose weights each have one depth."""
PAPER: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": 0.1, "ema_decay": 0.9}
DDP: dict[str, Any] = {"strategy": "ddp"}
FSDP2: dict[str, Any] = {"strategy": "fsdp2"}


def evaluation_of(run: Path) -> dict[str, float]:
    return load_json(run / "summary.json")["eval"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_boxes(folder, "run", model=DEFORMABLE, optimizer=PAPER, schedule={"max_steps": 6}, task=FAULTY)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [((1, DDP), (2, DDP)), ((2, DDP), (1, DDP)), ((1, DDP), (2, FSDP2)), ((2, FSDP2), (1, DDP))],
    ids=["1 to 2", "2 to 1", "1 to 2 sharded", "2 sharded to 1"],
)
def test_stopped_and_gone_on_with_other_processes_it_is_the_uninterrupted_run(
    tmp_path: Path, uninterrupted: Path, first: Any, second: Any
) -> None:
    sections = {"model": DEFORMABLE, "optimizer": PAPER, "schedule": {"max_steps": 6}, "task": FAULTY}
    (before, how), (after, other) = first, second
    options = {"term_at": {"step": 3, "rank": before - 1}}
    train_boxes(tmp_path, "run", before, 4, expect=75, parallel=how, options=options, **sections)
    found = train_boxes(tmp_path, "run", after, 4, parallel=other, **sections)
    whole = [(each["step_loss"], each["grad_norm"]) for each in metrics(uninterrupted)]
    assert len(found) == len(whole) == 6
    [resumed] = events(tmp_path / "run", "resume")
    assert 3 <= resumed["step"] < 6
    assert [each[0] for each in found] == pytest.approx([each[0] for each in whole], rel=1e-6)
    assert found == [pytest.approx(each, rel=1e-4) for each in whole]
    assert evaluation_of(tmp_path / "run")["loss"] == pytest.approx(evaluation_of(uninterrupted)["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_a_process_without_images_at_the_end_of_an_epoch_changes_no_loss(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """Of 5 images, the second step of an epoch has two, so one of three processes has none."""
    names = [f"{number}.png" for number in range(5)]
    write_images(tmp_path / "images", dict.fromkeys(names, (40, 40)))
    objects = [{"bbox": [[3 + 4 * each, 5, 9, 12] for each in range(n)], "category": ["cat"] * n} for n in range(1, 6)]
    rows = [{"file_name": name, "objects": each} for name, each in zip(names, objects, strict=True)]
    write_jsonl(tmp_path / "images/metadata.jsonl", rows)
    data = {"train": str(tmp_path / "images"), "eval_fraction": 0, "last_batch": "short"}
    sections = {"data": data, "batch": {"global_batch_size": 3}, "schedule": {"max_steps": 6}}
    whole = train_boxes(tmp_path, "whole", 1, 3, **sections)
    found = train_boxes(tmp_path, "parts", 3, 1, parallel=parallel, **sections)
    assert len(found) == 6
    assert [each[0] for each in found] == pytest.approx([each[0] for each in whole], rel=1e-6)
    assert found == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in whole]


@pytest.mark.slow
def test_a_sharded_evaluation_and_predictions_on_two_processes_are_those_of_one(tmp_path: Path) -> None:
    sections = {"model": DEFORMABLE, "data": {}, "optimizer": {"learning_rate": 5e-3}}
    train_boxes(tmp_path, "first", schedule={"max_steps": 40}, **sections)
    found = []
    for name, processes, parallel, size in (("whole", 1, DDP, 8), ("parts", 2, FSDP2, 3)):
        # The rate is too low to change a weight, so both evaluate the same weights.
        recipe = sections_of(
            tmp_path,
            name,
            optimizer={"learning_rate": 1e-30, "weight_decay": 0.0},
            schedule={"max_steps": 1},
            parallel=parallel,
            batch={"global_batch_size": 8, "per_device_eval_batch_size": size},
        )
        recipe["model"] = {"pretrained": str(tmp_path / "first/model")}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        done = run_forked_command(["run", str(tmp_path / f"{name}.yaml")], processes)
        assert done.returncode == 0, done.stderr[-3000:]
        words = ("--min-score", "0", "--draw", tmp_path / f"{name}-drawn")
        found.append(predict(tmp_path / name, tmp_path / f"{name}.jsonl", *words, processes=processes))
    ours, whole = (evaluation_of(tmp_path / name) for name in ("parts", "whole"))
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("parts", "first")]
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    assert ours.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-6)
    assert ours == whole
    assert whole["map"] > 0.001
    drawn = [{path.name for path in (tmp_path / f"{name}-drawn").iterdir()} for name in ("whole", "parts")]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 151  # with the marker of the folder
    assert whole["num_targets"] == len(found[0]) == 150
    for row, other in zip(*found, strict=True):
        assert (row["id"], row["labels"]) == (other["id"], other["labels"])
        assert row["scores"] == pytest.approx(other["scores"], abs=1e-5)
        # Boxes are written with two decimals.
        assert np.array(row["boxes"]) == pytest.approx(np.array(other["boxes"]), abs=0.011)


@pytest.mark.parametrize("name", [name for name in DETECTORS if name != "yolos"])
def test_rates_by_layer_are_refused_for_a_backbone_with_an_encoder_and_a_decoder(tmp_path: Path, name: str) -> None:
    sections = sections_of(tmp_path, model=DETECTORS[name], optimizer={"layer_decay": 0.9})
    with pytest.raises(SettingError) as caught:
        load(Recipe.model_validate(sections))
    assert caught.value.settings == ("optimizer.layer_decay", "model.config")


def test_rates_by_layer_are_refused_for_a_yolos_whose_layers_share_position_embeddings(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        load(Recipe.model_validate(sections_of(tmp_path, optimizer={"layer_decay": 0.9})))
    assert "mid_position_embeddings" in caught.value.problem
    load(Recipe.model_validate(sections_of(tmp_path, model=ONE_STACK, optimizer={"layer_decay": 0.9})))


@pytest.mark.parametrize("layers", [2, 5])
def test_rates_by_layer_follow_the_layers_of_yolos_also_where_its_heads_have_more(layers: int) -> None:
    config = AutoConfig.for_model(**ONE_STACK | {"num_hidden_layers": layers}, num_labels=3)
    model = AutoModelForObjectDetection.from_config(config)
    scales = layer_scales(model, 0.5)
    assert len(repeated_blocks(model)) == layers
    for name, _ in model.named_parameters():
        part = name.split(".")
        if part[:3] == ["vit", "encoder", "layer"]:
            expected = 0.5 ** (layers - int(part[3]))
        else:
            expected = 0.5 ** (layers + 1) if part[:2] == ["vit", "embeddings"] else 1.0
        assert scales.get(name, 1.0) == expected, name


@pytest.mark.parametrize(
    ("processes", "strategy"), [(1, DDP), pytest.param(2, FSDP2, marks=pytest.mark.slow)], ids=["1", "2 sharded"]
)
def test_a_clipped_update_has_the_length_of_the_limit_and_the_model_is_its_average(
    tmp_path: Path, processes: int, strategy: dict[str, Any]
) -> None:
    train_boxes(
        tmp_path,
        "run",
        processes,
        4,
        model=DEFORMABLE,
        optimizer={**PAPER, "name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.5},
        schedule={"type": "constant", "max_steps": 5},
        checkpoint={"every_steps": 1, "keep": 9},
        parallel=strategy,
    )
    steps = [tensors(tmp_path / "run", step, "model") for step in range(1, 6)]
    model = AutoModelForObjectDetection.from_pretrained(tmp_path / "run/model").state_dict()
    trained = [name for name, each in steps[0].items() if not torch.equal(each, steps[-1][name])]
    assert len(trained) > 100
    for before, after in pairwise(steps):
        length = math.sqrt(sum(float((after[name].double() - before[name]).square().sum()) for name in trained))
        assert length == pytest.approx(0.5 * 0.1, rel=1e-4)
    norms = [each["grad_norm"] for each in metrics(tmp_path / "run")]
    assert min(norms) > 1
    # The average begins with the initial weights, and follows with 1 - min(0.9, (1 + t) / (10 + t)).
    recipe = Recipe.model_validate(sections_of(tmp_path, model=DEFORMABLE))
    initial = load(recipe, recipe.seed)[2].state_dict()
    average = {name: initial[name].double() for name in trained}
    for step, weights in enumerate(steps):
        keep = (1 + step) / (10 + step)
        average = {name: keep * each + (1 - keep) * weights[name] for name, each in average.items()}
    for name, each in average.items():
        torch.testing.assert_close(model[name].double(), each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ({"parallel": {"strategy": "deepspeed", "zero_stage": 2}}, ("parallel.strategy", "task")),
        ({"precision": {"compile": True, "compile_mode": "reduce-overhead"}}, ("precision.compile_mode", "task")),
        ({"precision": {"compile": True, "compile_mode": "max-autotune"}}, ("precision.compile_mode", "task")),
        ({"parallel": {"sp_size": 2}}, ("parallel.sp_size", "task")),
        ({"parallel": {"strategy": "fsdp2", "tp_size": 2}}, ("parallel.tp_size", "task")),
    ],
    ids=["zero", "graphs", "autotuned graphs", "sequences", "layers"],
)
def test_layouts_that_are_not_proved_for_detectors_are_refused_before_data_is_read(
    tmp_path: Path, sections: dict[str, Any], settings: tuple[str, ...]
) -> None:
    with pytest.raises(SettingError) as caught:
        check_recipe(Recipe.model_validate(sections_of(tmp_path, data={"train": "nowhere"}, **sections)))
    assert caught.value.settings == settings


def test_the_search_for_a_micro_batch_halves_it_until_it_fits_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_sum, tried = ObjectDetection.loss_sum, []

    def with_room_for_three(task: ObjectDetection, model: Any, batch: Any) -> Any:
        tried.append(len(batch["class_ids"]))
        loss = loss_sum(task, model, batch)
        return loss if tried[-1] <= 3 else torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr(ObjectDetection, "loss_sum", with_room_for_three)
    recipe = Recipe.model_validate(sections_of(tmp_path, model=DETECTORS["rt_detr"]))
    task, data, model = load(recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trials = Trials(recipe, data, TrainingModule(model, task), Accelerator(cpu=True))
    assert search(trials, 8, device_bytes=2**30).value == 2
    assert tried == [8, 4, 2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.slow
def test_batch_norms_over_all_processes_have_the_loss_of_one_process(tmp_path: Path) -> None:
    model = DETECTORS["rt_detr"]
    whole = train_boxes(tmp_path, "whole", model=model)
    found = train_boxes(tmp_path, "spread", 2, 4, model=model, parallel={"sync_batch_norm": True})
    assert [each[0] for each in found] == pytest.approx([each[0] for each in whole], rel=1e-5)
    apart = train_boxes(tmp_path, "apart", 2, 4, model=model)
    assert abs(apart[0][0] / whole[0][0] - 1) > 1e-4, "nothing is compared where the statistics do not matter"


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return the result of a command, from its JSON."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


@pytest.fixture
def starts_processes(monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    """Commands start processes that import the package from the repository, with one thread each."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def recipe_file(folder: Path, **sections: Any) -> Path:
    path, data = folder / "recipe.yaml", {"cache_dir": str(folder / "cache")}
    path.write_text(yaml.safe_dump(sections_of(folder, data=data, **sections)))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("starts_processes")
def test_a_rehearsal_of_sharded_processes_is_the_same_after_a_kill_and_equal_to_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_file(tmp_path, model=DEFORMABLE, optimizer=PAPER, parallel=FSDP2)
    found = answer_of(capsys, "rehearse", str(path), "--steps", "4", "--processes", "2")
    assert found["same"]
    assert (found["equality"]["processes"], found["equality"]["first"]) == (2, None)


@pytest.mark.slow
@pytest.mark.usefixtures("starts_processes")
def test_find_lr_sweep_and_the_comparison_of_its_runs_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe_file(tmp_path)
    found = answer_of(capsys, "find-lr", str(path), "--steps", "20", "--out", str(tmp_path / "rates"))
    assert len(found["steps"]) == 20
    words = ("sweep", str(path), "--optimizer.learning_rate", "1e-30,1e-2", "--processes", "1")
    swept = answer_of(capsys, *words, "--output_dir", str(tmp_path / "sweep"))
    assert [each["status"] for each in swept["runs"]] == ["finished", "finished"]
    still, trained = (each["value"] for each in swept["runs"])
    assert trained < still
    compared = tmp_path / "both.html"
    runs = [str(tmp_path / "sweep" / each["name"]) for each in swept["runs"]]
    answer_of(capsys, "report", *runs, "--out", str(compared))
    assert "lr=1e-2" in compared.read_text()
