"""Scripts in the style of TRL's documentation and notebooks. Only the import of SFTTrainer differs."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.support.hub import record_uploads
from tests.support.sft import MARKS, llama, losses, rows, tokenizer

pytestmark = MARKS
IMPORT = "from trl import SFTTrainer\n"
TRL_IMPORT = "from trl import SFTTrainer, get_dataset, get_peft_config, get_quantization_config"
SCRIPTS = {
    "chats": """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig
from trl import SFTTrainer

model = AutoModelForCausalLM.from_pretrained("tiny")
tokenizer = AutoTokenizer.from_pretrained("tiny")
dataset = load_dataset("json", data_files="chat.jsonl", split="train")
training_args = SFTConfig(
    output_dir="out", max_length=128, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=5e-3,
    num_train_epochs=2, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
)
trainer = SFTTrainer(model=model, args=training_args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
trainer.save_model("final")
""",
    "prompts and completions, evaluated": """
import numpy as np
from datasets import load_dataset
from trl import SFTConfig
from trl import SFTTrainer

dataset = load_dataset("json", data_files="pair.jsonl", split="train").train_test_split(test_size=8, seed=0)

def compute_metrics(pred):
    labels, predicted = pred.label_ids[:, 1:], np.argmax(pred.predictions[:, :-1], axis=-1)
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}

trainer = SFTTrainer(
    model="tiny",
    args=SFTConfig(
        "out", eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, num_train_epochs=2,
        learning_rate=5e-3, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
assert 0 <= metrics["eval_accuracy"] <= 1
trainer.save_model("final")
""",
    "LoRA": """
from datasets import load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from trl import SFTConfig
from trl import SFTTrainer

dataset = load_dataset("json", data_files="chat.jsonl", split="train")
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(
    "tiny",
    SFTConfig(
        "out", learning_rate=2e-2, max_steps=12, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=True, lr_scheduler_type="cosine", warmup_steps=2,
    ),
    train_dataset=dataset,
    peft_config=peft_config,
)
trainer.train()
trainer.save_model("final")
merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("tiny"), "final").merge_and_unload()
""",
    "packed": """
from datasets import load_dataset
from trl import SFTConfig
from trl import SFTTrainer

dataset = load_dataset("json", data_files="text.jsonl", split="train")
training_args = SFTConfig(
    "out", packing=True, max_length=96, dataset_num_proc=2, per_device_train_batch_size=2, learning_rate=5e-3,
    max_steps=12, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
)
trainer = SFTTrainer(model="tiny", args=training_args, train_dataset=dataset)
trainer.train()
trainer.save_model("final")
""",
    "assistant only, with a callback": """
from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig
from trl import SFTTrainer

class Printer(TrainerCallback):
    seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(logs)

dataset = load_dataset("json", data_files="chat.jsonl", split="train")
trainer = SFTTrainer(
    model="tiny",
    args=SFTConfig(
        "out", assistant_only_loss=True, neftune_noise_alpha=5, learning_rate=5e-3, max_steps=12, logging_steps=1,
        use_cpu=True, bf16=False, report_to="none",
    ),
    train_dataset=dataset,
    callbacks=[Printer()],
)
trainer.train()
trainer.save_model("final")
assert len(Printer.seen) >= 12
""",
    "formatting_func, and a path with model_init_kwargs": """
import torch
from datasets import load_dataset
from trl import SFTConfig
from trl import SFTTrainer

def formatting_func(example):
    return f"### Question: {example['prompt']}\\n### Answer: {example['completion']}"

trainer = SFTTrainer(
    model="tiny",
    args=SFTConfig(
        "out", model_init_kwargs={"dtype": torch.float32, "attn_implementation": "eager"}, learning_rate=5e-3,
        completion_only_loss=False, max_steps=12, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
    ),
    train_dataset=load_dataset("json", data_files="pair.jsonl", split="train"),
    formatting_func=formatting_func,
)
trainer.train()
trainer.save_model("final")
""",
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: Any) -> Path:
    """The current folder, with a tiny model and data."""
    monkeypatch.chdir(tmp_path)
    (tool := tokenizer()).save_pretrained("tiny")
    llama(len(tool)).save_pretrained("tiny")
    for name in ("chat", "pair", "text"):
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(name)))
    return tmp_path


@pytest.mark.parametrize(
    "more", [["--use_peft", "--lora_target_modules", "q_proj", "v_proj"], ["--packing"]], ids=["LoRA", "full"]
)
def test_trls_own_script_runs_to_its_last_line_and_pushes(
    stand_ins: Path, monkeypatch: Any, capsys: Any, more: list[str]
) -> None:
    uploads = record_uploads(monkeypatch)
    (data := stand_ins / "data").mkdir()
    (stand_ins / "chat.jsonl").rename(data / "train.jsonl")
    flags = "--max_steps 2 --max_length 64 --use_cpu --bf16 false --report_to none --logging_steps 1 --push_to_hub"
    given = ["--model_name_or_path", "tiny", "--dataset_name", str(data), "--output_dir", "out"]
    monkeypatch.setattr("sys.argv", ["sft.py", *given, *flags.split(), *more])
    code = Path(find_spec("trl.scripts.sft").origin).read_text()
    assert code.count(TRL_IMPORT) == 1
    code = code.replace(TRL_IMPORT, f"{TRL_IMPORT.replace('SFTTrainer, ', '')}; from accel_train import SFTTrainer")
    exec(compile(code, "sft.py", "exec"), {"__name__": "__main__"})
    assert "Model pushed" in capsys.readouterr().out
    card = ModelCard.load(stand_ins / "out/README.md")
    assert card.data.datasets == str(data)
    assert {"trl", "sft"} <= set(card.data.tags)
    (weights,) = (name for name in uploads[-1]["files"] if name.endswith(".safetensors"))
    assert weights == ("model.safetensors" if "--packing" in more else "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("package", ["trl", "accel_train"])
def test_a_script_in_the_style_of_trl_trains_with_one_changed_import(package: str, name: str, stand_ins: Path) -> None:
    assert SCRIPTS[name].count(IMPORT) == 1
    names: dict[str, Any] = {}
    exec(compile(SCRIPTS[name].replace(IMPORT, f"from {package} import SFTTrainer\n"), f"{name}.py", "exec"), names)
    assert type(names["trainer"]).__module__.split(".")[0] == package
    found = losses(names["trainer"])
    assert len(found) >= 10
    assert all(math.isfinite(each) for each in found)
    assert sum(found[-3:]) < 0.97 * sum(found[:3])
    assert list(stand_ins.glob("final/*.safetensors"))
