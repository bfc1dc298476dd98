"""Mixtures of experts train with their router loss; what the generation prompt supplies is not a target; one choice on all processes."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train import Recipe, train
from accel_train.data.sft.encoding import Example, chat_encoder
from accel_train.data.text.tokenizers import pretrained_tokenizer
from accel_train.recipe.data import Data
from accel_train.tasks.causal_lm import CausalLM
from tests.support.runs import metrics, recipe_dict, run, run_forked_command, write_corpus, write_recipe_file

MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


def a_mixture(
    folder: Path, name: str, processes: int = 1, per_device: int = 8, **sections: Any
) -> list[tuple[float, ...]]:
    """Train it for 4 steps; return each step's loss, router loss and gradient norm."""
    sections = {
        "task": "causal-lm",
        "model": {"config": MIXTURE},
        "batch": {"global_batch_size": 8, "per_device_batch_size": per_device},
        "schedule": {"max_steps": 4},
        **sections,
    }
    recipe = recipe_dict(folder, output_dir=str(folder / name), **sections)
    if processes == 1:
        train(Recipe.model_validate(recipe))
    else:
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        run(path, processes=processes)
    steps = metrics(folder / name)
    return [(each["step_loss"], each.get("router_aux_loss", 0.0), each["grad_norm"]) for each in steps]


def test_field_02_the_loss_is_that_of_transformers_with_its_router_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    seen: list[tuple[float, float]] = []
    ours = CausalLM.loss_sum

    def compared(task: CausalLM, model: Any, batch: Any) -> Any:
        if not model.training:
            return ours(task, model, batch)
        with torch.no_grad():
            whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MIXTURE, "vocab_size": 320}))
            whole.load_state_dict(model.state_dict())
            out = whole(batch["input_ids"])
            loss = cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten()) + 0.5 * out.aux_loss
        seen.append((float(loss), float(out.aux_loss)))
        return ours(task, model, batch)

    monkeypatch.setattr(CausalLM, "loss_sum", compared)
    got = a_mixture(tmp_path, "run")
    assert [step[0] for step in got] == pytest.approx([each[0] for each in seen], rel=1e-6)
    assert [step[1] for step in got] == pytest.approx([each[1] for each in seen], rel=1e-6)


@pytest.mark.parametrize("mask", [False, True])
def test_field_02_the_router_loss_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path, mask: bool) -> None:
    write_corpus(tmp_path)
    data = {"mask_documents": mask}
    whole = a_mixture(tmp_path, "whole", data=data)
    assert all(1.9 < router < 4 for _, router, _ in whole)
    parts = a_mixture(tmp_path, "parts", per_device=2, data=data)
    off = a_mixture(tmp_path, "off", data=data, loss={"router_aux": False})
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-6, atol=2e-6)
    assert whole[0][0] - off[0][0] == pytest.approx(0.5 * whole[0][1], rel=1e-5)
    assert off[0][1] == 0


@pytest.mark.parametrize(
    ("processes", "per_device", "strategy"),
    [(2, 4, "ddp"), (2, 1, "ddp"), (4, 2, "ddp"), (2, 4, "fsdp2"), (2, 2, "fsdp2")],
)
def test_field_02_the_router_loss_is_the_same_on_any_number_of_processes(
    tmp_path: Path, processes: int, per_device: int, strategy: str
) -> None:
    write_corpus(tmp_path)
    whole = a_mixture(tmp_path, "whole")
    spread = a_mixture(tmp_path, "spread", processes, per_device, parallel={"strategy": strategy})
    torch.testing.assert_close(torch.tensor(spread), torch.tensor(whole), rtol=1e-6, atol=2e-6)


THINKING = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}OPEN{%- if m.thoughts %}"
    "{{- '<think>\\n' + m.thoughts + '\\n</think>\\n\\n' }}{%- elif loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>' }}CLOSE{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""As Qwen3's: the last turn of the assistant has a block of thoughts, which may be empty."""


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("thoughts", "learned"), [("", "yes<|im_end|>"), ("hm", "<think>\nhm\n</think>\n\nyes<|im_end|>")]
)
def test_field_03_what_the_generation_prompt_supplies_is_not_a_target(
    marked: bool, thoughts: str, learned: str
) -> None:
    marks = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = THINKING.replace("OPEN", marks[0]).replace("CLOSE", marks[1])
    tokenizer = pretrained_tokenizer("bytes", trust_remote_code=False)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "thoughts": thoughts}]
    data = Data.model_validate({"train": "chats.jsonl", "format": "chat", "chat_template": template})
    [encoded] = chat_encoder(tokenizer, data, defaultdict(list))([Example(chat, "row 1")])
    text = tokenizer.tokenizer.decode(encoded.ids[encoded.is_target])
    assert text.removesuffix("<|endoftext|>").rstrip("\n") == learned


MIXED = """
import os
import sys

import accel_train.parallel.precision as precision
import accel_train.training.setup as setup
from accel_train.cli.main import main
from accel_train.core.state import Choice

kind, rank = sys.argv[1], int(os.environ["RANK"])
if kind == "precision":
    value = ("bf16", "no")[rank]
    precision.choose_mixed_precision = lambda section, device: Choice(value, f"as a GPU of kind {rank}")
else:
    wrap = setup.wrap_model
    setup.wrap_model = lambda plan, *rest: wrap(plan, *rest).with_choices({"document mask": Choice(rank, "")})
sys.exit(main(["run", sys.argv[2]]))
"""
"""Two processes as on machines of two kinds."""


def test_mixed_01_processes_train_in_the_weakest_precision_of_all(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    recipe = recipe_dict(tmp_path, schedule={"max_steps": 2}, parallel={"strategy": "ddp"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = run_forked_command(["precision", str(tmp_path / "recipe.yaml")], 2, program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "as a GPU of kind 1" in done.stdout
    mixed = [each["step_loss"] for each in metrics(tmp_path / "run")]
    run(write_recipe_file(tmp_path, output_dir=str(tmp_path / "fp32"), schedule={"max_steps": 2}), processes=2)
    assert mixed == [each["step_loss"] for each in metrics(tmp_path / "fp32")]


def test_mixed_02_choices_that_differ_between_processes_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    path = write_recipe_file(tmp_path, schedule={"max_steps": 2})
    done = run_forked_command(["choice", str(path)], 2, program)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "document mask is '1' on rank 1, and '0' on rank 0" in done.stderr
