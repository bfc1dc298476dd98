"""What users of other trainers type is answered with the command that does it."""

import shlex
from pathlib import Path

import pytest

from accel_train.cli.commands import COMMANDS
from tests.support.commands import call

pytestmark = pytest.mark.usefixtures("empty_folder")
TORCHRUN = "torchrun --standalone --nproc_per_node 2 -m accel_train"
MEANT = {
    "run r.yaml --num_processes 2": f"{TORCHRUN} run r.yaml",
    "train r.yaml --gpus=2 --lr 1e-3": f"{TORCHRUN} run r.yaml --optimizer.learning_rate 1e-3",
    "finetune t.csv --nproc-per-node 2": f"{TORCHRUN} finetune t.csv",
    "plan r.yaml --gpus 2": "accel-train plan r.yaml --world-size 2",
    "rehearse r.yaml --gpus 2": "accel-train rehearse r.yaml --processes 2",
    "run r.yaml --fp16": "accel-train run r.yaml --precision.mixed_precision fp16",
    "run --bf16 r.yaml": "accel-train run r.yaml --precision.mixed_precision bf16",
    "run r.yaml --fp16 False": "accel-train run r.yaml --precision.mixed_precision no",
    "run r.yaml --epochs 3 --seed 1": "accel-train run r.yaml --schedule.num_epochs 3 --seed 1",
    "run r.yaml --warmup-ratio=0.1": "accel-train run r.yaml --schedule.warmup_ratio 0.1",
    "run r.yaml -optimizer.eps 1e-3": "accel-train run r.yaml --optimizer.eps 1e-3",
    "run r.yaml --precision.compile": "accel-train run r.yaml --precision.compile true",
    "run r.yaml --resume": "accel-train run r.yaml",
    "run r.yaml --resume_from_checkpoint latest": "accel-train run r.yaml",
    "run --recipe r.yaml": "accel-train run r.yaml",
    "run r.yaml --model_name_or_path gpt2": "accel-train run r.yaml --model.pretrained gpt2",
    "run r.yaml --model.config {model_type: gpt2}": "accel-train run r.yaml --model.config '{model_type: gpt2}'",
    "run r.yaml --log.trackers=[wandb, mlflow]": "accel-train run r.yaml --log.trackers '[wandb, mlflow]'",
    "run r.yaml --log.trackers wandb mlflow": "accel-train run r.yaml --log.trackers '[wandb, mlflow]'",
    "run r.yaml --run_name runs/b": "accel-train run r.yaml --output_dir runs/b",
    "run r.yaml --schedule.name linear": "accel-train run r.yaml --schedule.type linear",
    "run r.yaml --eval_batch_size 8": "accel-train run r.yaml --batch.per_device_eval_batch_size 8",
    "run r.yaml --micro_batch_size 8": "accel-train run r.yaml --batch.per_device_batch_size 8",
    "finetune --data t.csv --target y": "accel-train finetune t.csv --label y",
    "finetune t.csv --text title body": "accel-train finetune t.csv --text title,body",
    "finetune t.csv --model_name_or_path m --output o": "accel-train finetune t.csv --model m --output_dir o",
    "sweep r.yaml --seed 0 1": "accel-train sweep r.yaml --seed 0,1",
    "sweep r.yaml --lr 1e-3 1e-4 --seed=0": "accel-train sweep r.yaml --optimizer.learning_rate 1e-3,1e-4 --seed 0",
    "evaluate --run runs/a --json": "accel-train evaluate runs/a --json",
}
UNCLEAR = (
    "run r.yaml --nonsense 3",
    "run r.yaml --gpus all",
    "run r.yaml --gpus 2 4",
    "run --lr 1e-3",
    "run r.yaml --batch.global_batch_size 64, 32",
    "generate runs/a --prompt",
    "frobnicate r.yaml --gpus 2",
    "run r.yaml --bleu_token 3",
    "run r.yaml --hub_strategy every_save",
    "run r.yaml --dropout 0.1",
    "run r.yaml --min_lr 1e-5",
    "run r.yaml --gpus 2 --options.api_key k-1234",
    "run r.yaml --lr https://me:password@x.example",
)


@pytest.mark.parametrize("typed", MEANT)
def test_the_command_that_is_meant_ends_the_error(typed: str) -> None:
    assert shlex.split(call(*typed.split(), code=2).err.partition("Type: ")[2]) == shlex.split(MEANT[typed])


@pytest.mark.parametrize("typed", UNCLEAR)
def test_no_command_is_offered_where_several_may_be_meant(typed: str) -> None:
    assert "Type: " not in call(*typed.split(), code=2).err


# Data in place of a recipe are answered with `finetune`, and in place of a run they come second.
OF_DATA = {
    "run t.csv": "finetune t.csv",
    "run folder": "finetune folder",
    "plan t.csv": "finetune t.csv --dry-run",
    "plan folder": "finetune folder --dry-run",
    "rehearse t.csv": "finetune t.csv --dry-run",
    "rehearse folder": "finetune folder --dry-run",
    "train t.csv": "finetune t.csv",
    "fit t.csv": "finetune t.csv",
    "predict t.csv runs/a": "predict runs/a t.csv",
    "predict t.csv": "predict RUN t.csv",
    "evaluate t.csv runs/a": "evaluate runs/a t.csv",
    "evaluate t.csv": "evaluate RUN t.csv",
}


@pytest.mark.parametrize("typed", OF_DATA)
def test_data_in_the_place_of_something_else_are_answered_with_the_command_that_takes_them(typed: str) -> None:
    Path("folder").mkdir()
    Path("t.csv").write_text("text,label\n")
    assert call(*typed.split(), code=2).err.partition("Type: accel-train ")[2].strip() == OF_DATA[typed]


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_offers_a_resume_where_the_command_resumes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, name, COMMANDS[name]._replace(run=interrupted))
    arguments = COMMANDS[name].arguments.items()
    needed = [options for each, options in arguments if each[0] != "-" and options.get("nargs") != "?"]
    words = [options.get("choices", ["x"])[0] for options in needed]
    said = call(name, *words, code=130).err
    assert ("same command" in said) == (name in ("run", "finetune", "sweep"))


@pytest.mark.parametrize("command", ["run", "plan", "finetune"])
def test_a_path_that_no_file_can_have_is_one_line(command: str) -> None:
    assert call(command, "a" * 300, code=2).err.count("error: ") == 1
