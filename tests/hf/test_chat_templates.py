"""Eight chat templates: the tokens that are learned are the assistant's text and its stop token, in both turns."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import trl
from datasets import Dataset
from transformers import AddedToken

from accel_train import SFTTrainer
from accel_train.recipe.schema import Recipe
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.hf_models import refused
from tests.support.runs import recipe_dict, write_jsonl
from tests.support.sft import MARKS, llama, made, tokenizer
from tests.support.wording import raises_golden

pytestmark = MARKS
SHIPPED = Path(trl.__file__).parent / "chat_templates"
SAID = ("A color.", "Älter 🙂")
CHAT = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": SAID[0]},
    {"role": "user", "content": "And é?"},
    {"role": "assistant", "content": SAID[1]},
]
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
MARKED_MISTRAL = MISTRAL.replace("{{ ' '", "{% generation %}{{ ' '").replace(
    "eos_token }}{% endif", "eos_token }}{% endgeneration %}{% endif"
)


class Family(NamedTuple):
    """The special tokens of a family of models, and what is around the assistant's text in the learned tokens."""

    special: tuple[str, ...]
    """The first begins the text, the second ends it."""
    stops: tuple[str, str]
    """Ends of the two turns."""
    header: str = ""
    """Learned before the text by the template for training."""
    trl_header: str = ""
    """Learned before it with SFTTrainer alone, as in TRL: recipes leave out what a generation prompt supplies."""
    plain: tuple[str, str] | Literal["", "refused"] = ""
    """What a recipe learns by the model's own template, which may be refused. Default: the same."""


DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
)
FAMILIES = {
    "llama3": Family(
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), ("<|eot_id|>",) * 2
    ),
    "qwen3": Family(
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
        ("<|im_end|>\n",) * 2,
        trl_header="<think>\n\n</think>\n\n",
        plain="refused",
    ),
    "gemma3": Family(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>\n",) * 2),
    "mistral": Family(("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",) * 2, header=" "),
    "phi3": Family(
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("<|end|>\n", "<|end|>\n<|endoftext|>"),
        plain="refused",
    ),
    "deepseekv3": Family(DEEPSEEK, (DEEPSEEK[1],) * 2, header="<｜Assistant｜>", plain="refused"),
    "glm4moe": Family(
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>"),
        ("<|user|>",) * 2,
        header="\n<think></think>\n",
        plain=(f"\n<think></think>\n{SAID[0]}", f"\n<think></think>\n{SAID[1]}<|endoftext|>"),
    ),
    "gptoss": Family(
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        ("<|end|>", "<|return|>"),
        header="<|channel|>final<|message|>",
        trl_header="<|start|>assistant",
        plain="refused",
    ),
}


def template(name: str, *, marked: bool = False) -> str:
    if name == "mistral":
        return MARKED_MISTRAL if marked else MISTRAL
    return (SHIPPED / f"{name}{'_training' if marked else ''}.jinja").read_text()


def tool(name: str, *, marked: bool = False) -> Any:
    begin, end, *_ = FAMILIES[name].special
    made = tokenizer(template(name, marked=marked), end)
    tokens = [AddedToken(each, special=True, normalized=False) for each in FAMILIES[name].special]
    made.add_tokens(tokens, special_tokens=True)
    made.bos_token = begin
    return made


def learned(tokenizer: Any, labels: list[int]) -> list[str]:
    """The texts of uninterrupted labels."""
    runs = [[]]
    for label in labels:
        if label >= 0:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def expected(family: Family, header: str) -> list[str]:
    return [f"{header}{text}{stop}" for text, stop in zip(SAID, family.stops)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_trainer_learns_the_assistants_text_and_its_stop_token(name: str, tmp_path: Path, caplog: Any) -> None:
    data, family = Dataset.from_list([{"messages": CHAT}] * 4), FAMILIES[name]
    given = {"train_dataset": data, "assistant_only_loss": True}
    if name == "mistral":
        unmarked = {"processing_class": tool(name), **given}
        error = refused(lambda: made(SFTTrainer, tmp_path, "", **unmarked), "assistant_only_loss")
        assert "chat_template_path" in error.remedy
        given["chat_template_path"] = str(tmp_path / "mistral.jinja")
        Path(given["chat_template_path"]).write_text(template(name, marked=True))
    trainer = made(SFTTrainer, tmp_path, "", processing_class=tool(name), **given)
    row = trainer.train_dataset[0]
    assert learned(trainer.processing_class, row["labels"]) == expected(family, family.trl_header + family.header)
    text = trainer.processing_class.decode(row["input_ids"])
    assert all(message["content"] in text for message in CHAT)
    assert "{% generation %}" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("marked", [False, True], ids=["own template", "template for training"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_learns_the_assistants_text_and_its_stop_token(name: str, marked: bool, tmp_path: Path) -> None:
    base, family = tmp_path / "base", FAMILIES[name]
    (tokens := tool(name)).save_pretrained(base)
    llama(len(tokens)).save_pretrained(base)
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [{"messages": CHAT}]))
    data = {"train": rows, "format": "chat", "eval_fraction": 0, "sequence_length": 512}
    if marked:
        (tmp_path / "chat.jinja").write_text(template(name, marked=True))
        data["chat_template"] = str(tmp_path / "chat.jinja")
    recipe = Recipe.model_validate(
        recipe_dict(tmp_path, task="causal-lm", tokenizer="auto") | {"model": {"pretrained": str(base)}, "data": data}
    )
    if family.plain == "refused" and not marked:
        with raises_golden():
            CausalLM().load_data(recipe, progress=False)
        return
    found = CausalLM().load_data(recipe, progress=False)
    wanted = list(family.plain) if family.plain and not marked else expected(family, family.header)
    assert learned(tokens, found.train[0][1].tolist()) == wanted
    has_note = any("end-of-sequence token was added" in note for note in found.facts.notes)
    assert has_note == (name == "glm4moe" and not marked)
