"""What users of other trainers type is answered with the command that does it."""

import shlex
from pathlib import Path

import pytest

from accel_train.cli.commands import COMMANDS
from tests.support.commands import call

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
def test_the_command_that_is_meant_ends_the_error(typed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shlex.split(call(*typed.split(), code=2).err.partition("Type: ")[2]) == shlex.split(MEANT[typed])


@pytest.mark.parametrize("typed", UNCLEAR)
def test_no_command_is_offered_where_several_may_be_meant(typed: str) -> None:
    assert "Type: " not in call(*typed.split(), code=2).err


@pytest.mark.parametrize(("typed", "flags"), [("run", ""), ("plan", " --dry-run"), ("rehearse", " --dry-run")])
@pytest.mark.parametrize("place", ["t.csv", "folder"])
def test_data_in_place_of_a_recipe_are_answered_with_finetune(
    typed: str,
    flags: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("t.csv").write_text("text,label\n")
    assert call(typed, place, code=2).err.partition("Type: accel-train ")[2].strip() == f"finetune {place}{flags}"


@pytest.mark.parametrize("typed", ["train", "fit"])
def test_to_train_data_is_to_finetune(typed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("text,label\n")
    assert call(typed, "t.csv", code=2).err.partition("Type: accel-train ")[2].strip() == "finetune t.csv"


@pytest.mark.parametrize(("typed", "meant"), [("t.csv runs/a", "runs/a t.csv"), ("t.csv", "RUN t.csv")])
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_data_in_place_of_a_run_come_second(
    command: str, typed: str, meant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("text,label\n")
    said = call(command, *typed.split(), code=2).err
    assert said.partition("Type: accel-train ")[2].strip() == f"{command} {meant}"


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
