"""Fine-tuning rows: which tokens are learned, packing that changes no loss, and errors that name
file, row and column.
"""

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_train.cli.main import main
from accel_train.core.state import Choice
from accel_train.data.builtin import stdlib
from accel_train.data.text.tokenizers import BYTE_SEPARATOR_ID, byte_tokenizer
from accel_train.model.kernels.attention import _CHECKED_MODEL_TYPES
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm import data as causal
from accel_train.tasks.causal_lm import encoding
from accel_train.tasks.causal_lm.packing import TokenRows, pack
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.hf_models import small_config
from tests.support.runs import TINY_MODEL, events, metrics, recipe_dict, refused, write_jsonl, write_recipe_file
from tests.support.wording import assert_golden

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|endoftext|>\n{%- endgeneration %}"
    "{% else %}{{ message.content }}<|endoftext|>\n{% endif %}{% endfor %}"
)
STRICT = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + "
    "message.role) }}{% endif %}{{ message.content }}<|endoftext|>{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message.role == 'user' %}{{ message.content }}<|endoftext|>{% "
    "endif %}{% endfor %}"
)

WIDE_MODEL = TINY_MODEL | {"n_positions": 160}
Make = Callable[..., Recipe]


@pytest.fixture
def sft_recipe(tmp_path: Path) -> Make:
    """A recipe on these rows, written as jsonl; further arguments are settings of `data`."""

    def make(rows: list[dict[str, Any]], *, model: Any = WIDE_MODEL, **data: Any) -> Recipe:
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        settings = {"train": str(path), "format": "prompt_completion", "eval_fraction": 0, "sequence_length": 48}
        section = {"config": dict(model)} if "model_type" in model else model
        recipe = recipe_dict(tmp_path, task="causal-lm")
        return Recipe.model_validate(recipe | {"model": section, "data": settings | data})

    return make


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose templates would have been tried in a process of their own, which tests of that trial start."""
    found = []
    monkeypatch.setattr(encoding, "check_template", lambda tool, chats, whose, tools: found.append(whose))
    return found


def load(recipe: Recipe) -> tuple[CausalLM, TaskData]:
    task = CausalLM()
    return task, task.load_data(recipe, progress=False)


def ragged_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{number} plus {number * 7 % 11} is" * (1 + number % 2),
            "completion": f" {number + number * 7 % 11}" * (1 + number % 3),
        }
        for number in range(count)
    ]


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]}


def learned(data: TaskData, index: int = 0) -> str:
    """The text of a window's labels; ends of sequences are shown as a bar."""
    labels = data.train[index][1]
    return bytes(124 if token == BYTE_SEPARATOR_ID else token for token in labels[labels >= 0].tolist()).decode()


def loss_of_each_row_alone(model: torch.nn.Module, rows: TokenRows) -> Tensor:
    losses = []
    for begin, end in zip(rows.starts[:-1], rows.starts[1:]):
        ids = torch.from_numpy(rows.tokens[begin:end].astype(np.int64))
        targets = torch.from_numpy(rows.is_target[begin + 1 : end])
        logits = model(ids[None, :-1], use_cache=False).logits[0]
        losses.append(cross_entropy(logits[targets].float(), ids[1:][targets], reduction="sum"))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("model_type", sorted(_CHECKED_MODEL_TYPES))
def test_packed_rows_lose_what_they_lose_alone(sft_recipe: Make, model_type: str) -> None:
    fields = {name: value for name, value in small_config(model_type).to_dict().items() if name != "vocab_size"}
    recipe = sft_recipe(
        ragged_rows(24), model={k: v for k, v in fields.items() if v is not None} | {"model_type": model_type}
    )
    task, data = load(recipe)
    is_packed = len(data.train) < len(data.source.train) / 1.5
    assert is_packed or model_type == "stablelm", "stablelm's attention cannot be exchanged, so its rows stay alone"
    torch.manual_seed(0)
    model = task.build_model(recipe, data).eval()
    batch = data.collate([data.train[index] for index in range(len(data.train))])
    assert batch.pop("num_targets") == len(data.source.train.targets)
    with torch.no_grad():
        torch.testing.assert_close(
            task.loss_sum(model, batch), loss_of_each_row_alone(model, data.source.train), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("settings", [{"attn_implementation": "eager"}, {"config": {"sliding_window": 8}}])
def test_model_that_cannot_keep_rows_apart_gets_each_alone(sft_recipe: Make, settings: dict[str, Any]) -> None:
    fields = {"model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 48, "sliding_window": None} | settings.get("config", {})
    rest = {name: value for name, value in settings.items() if name != "config"}
    recipe = sft_recipe(ragged_rows(10), model={"config": fields, **rest})
    task, data = load(recipe)
    assert len(data.train) == len(data.source.train) == 10
    assert any("a separate sample" in note for note in data.facts.notes)
    model = task.build_model(recipe, data).eval()
    batch = data.collate([data.train[index] for index in range(10)])
    assert batch.pop("num_targets") == len(data.source.train.targets)
    assert batch["input_ids"].shape[1] == 8 * -(-int(data.source.train.lengths.max()) // 8)
    with torch.no_grad():
        torch.testing.assert_close(
            task.loss_sum(model, batch), loss_of_each_row_alone(model, data.source.train), rtol=1e-5, atol=0
        )


def test_packing_places_every_row_once_in_windows_that_hold_it() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(4, 1, 5000).astype(np.int64) + 1, 512)
    packing = pack(lengths, 512)
    assert sorted(np.concatenate(packing).tolist()) == list(range(5000))
    assert max(lengths[rows].sum() for rows in packing) <= 512
    assert len(packing) == -(-lengths.sum() // 512), "fewer windows than the tokens need, or more"
    firsts = [rows[0] for rows in packing]
    assert firsts == sorted(firsts)
    assert len(pack(np.array([6, 4, 5, 5, 3, 7]), 10)) == 3


def test_loss_counts_the_completion_and_its_end_and_nothing_of_the_prompt(sft_recipe: Make) -> None:
    rows = [{"prompt": "Grüße: ", "completion": "hallo<|endoftext|>é"}]
    _, data = load(sft_recipe(rows))
    assert learned(data) == "hallo<|endoftext|>é|", "a text that spells a special token is text"
    inputs, _, positions, documents = data.train[0]
    assert inputs[0] == BYTE_SEPARATOR_ID
    assert bytes(inputs[1:10].tolist()).decode() == "Grüße: "
    num_positions = 1 + len("Grüße: hallo<|endoftext|>é".encode())
    assert (documents == -1).tolist() == [False] * num_positions + [True] * (48 - num_positions)
    assert positions[:num_positions].tolist() == list(range(num_positions))
    _, data = load(sft_recipe(rows, completion_only_loss=False))
    assert learned(data) == "Grüße: hallo<|endoftext|>é|"


def test_a_token_never_reaches_from_the_prompt_into_the_completion(sft_recipe: Make, tmp_path: Path) -> None:
    rows = [{"prompt": "ab" * 20, "completion": "ab" * 20 + "c"}, {"prompt": "a", "completion": "b"}] * 20
    recipe = sft_recipe(rows)
    recipe = recipe.model_validate(recipe.model_dump() | {"tokenizer": {"train_bpe": {"vocab_size": 260}}})
    _, data = load(recipe)
    tokenizer = data.source.tokenizer
    assert tokenizer.encode("ab") == [tokenizer.convert_tokens_to_ids("ab")]
    learned_ids = data.source.train.targets[-2:]
    assert tokenizer.decode(learned_ids) == "b<|endoftext|>"
    assert any("into completion: 20;" in note for note in data.facts.notes)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_loss_of_a_chat_counts_the_assistants_turns_and_their_ends(
    sft_recipe: Make, template: str, tried: list[str]
) -> None:
    rows = [chat("Hi", "olé", "And?", "Grüße")]
    _, data = load(sft_recipe(rows, format="chat", chat_template=template, sequence_length=160))
    expected = "olé|\nGrüße|\n" if template is CHATML else "olé|Grüße|"
    assert learned(data) == expected
    assert data.source.tokenizer.chat_template == template
    assert tried == ["data.chat_template"]


WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML.replace(
    "{{ message.content }}", "{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}"
)
MARKED_WITH_TOOLS = MARKED.replace(
    "{% generation %}", "{% generation %}{{ message.tool_calls | tojson if message.tool_calls }}"
).replace("{% for", "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for", 1)
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Bern"}}
SHAREGPT = {
    "messages": [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "wet"},
        {"from": "gpt", "value": "Yes"},
    ],
    "tools": json.dumps([WEATHER]),
}
OPENAI = {
    "messages": [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}],
        },
        {"role": "tool", "content": "wet"},
        {"role": "assistant", "content": "Yes"},
    ],
    "tools": [{"type": "function", "function": WEATHER | {"strict": None}}],
}


@pytest.mark.parametrize("template", [WITH_TOOLS, MARKED_WITH_TOOLS])
@pytest.mark.parametrize("row", [SHAREGPT, OPENAI], ids=["sharegpt", "openai"])
def test_tools_are_shown_and_their_calls_are_learned(sft_recipe: Make, row: dict[str, Any], template: str) -> None:
    settings = {
        "format": "chat",
        "tools_column": "tools",
        "sequence_length": 400,
        "model": TINY_MODEL | {"n_positions": 400},
    }
    _, data = load(sft_recipe([row], chat_template=template, **settings))
    call = json.dumps([{"type": "function", "function": CALL}])
    shown = bytes(token for token in data.source.train.tokens if token < 256).decode()
    tool = json.dumps([{"type": "function", "function": WEATHER}])
    assert shown.startswith(f"{tool}\n<|im_start|>user\nRain?")
    assert "<|im_start|>tool\nwet" in shown
    assert learned(data).replace("\n", "") == f"{call}|Yes|"
    refused(load, sft_recipe([row], chat_template=CHATML, **settings), named="rows.jsonl:1: |does not show tools")
    shows_tools_only = "{{ tools | tojson if tools }}" + CHATML
    refused(load, sft_recipe([row], chat_template=shows_tools_only, **settings), named="rows.jsonl:1: |the calls of")


def test_a_chat_without_tools_has_the_same_fingerprint_with_and_without_a_column_of_tools(sft_recipe: Make) -> None:
    found = {
        load(sft_recipe([{**chat("a", "b"), "tools": tools}], chat_template=WITH_TOOLS, format="chat", **column))[
            1
        ].fingerprint
        for tools, column in [("[]", {}), ("[]", {"tools_column": "tools"}), (None, {"tools_column": "tools"})]
    }
    assert len(found) == 1


TOOL_FAULTS = [
    ("'tools'|is not JSON", {"tools": "[{"}),
    ("'tools'|3 is not a function", {"tools": "3"}),
    ("'tools'|name", {"tools": [{"type": "function"}]}),
    ("message 2|name", {"messages": [chat("a")["messages"][0], {"from": "function_call", "value": "{}"}]}),
    ("message 1|is not JSON", {"messages": [{"from": "function_call", "value": "weather"}]}),
]


@pytest.mark.parametrize("named, fault", TOOL_FAULTS, ids=[fault[0] for fault in TOOL_FAULTS])
def test_a_wrong_tool_names_file_row_and_column(sft_recipe: Make, named: str, fault: dict[str, Any]) -> None:
    recipe = sft_recipe([SHAREGPT, SHAREGPT | fault], chat_template=WITH_TOOLS, format="chat", tools_column="tools")
    refused(load, recipe, named=f"rows.jsonl:2: |{named}")


def test_generation_mark_ends_after_the_last_byte_of_a_character_and_a_turn_without_its_end_is_reported(
    sft_recipe: Make,
) -> None:
    tight = MARKED.replace("<|endoftext|>\n{%- endgeneration %}", "{% endgeneration %}<|endoftext|>\n")
    assert tight != MARKED
    _, data = load(
        sft_recipe([chat("Hi", "olé", "And?", "ü")], format="chat", chat_template=tight, sequence_length=160)
    )
    assert learned(data) == "oléü"
    assert_golden("\n".join(data.facts.notes), case="end outside")
    _, data = load(sft_recipe([chat("Hi", "olé")], format="chat", chat_template=MARKED, sequence_length=160))
    assert_golden("\n".join(data.facts.notes), case="end inside")


def test_chat_template_without_an_end_gets_the_end_of_sequence_as_a_target(sft_recipe: Make, tmp_path: Path) -> None:
    path = tmp_path / "plain.jinja"
    path.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    _, data = load(sft_recipe([chat("Hi", "yes")], format="chat", chat_template=str(path)))
    assert learned(data) == "assistant: yes\n|"
    assert_golden("\n".join(data.facts.notes))


def test_message_that_spells_a_special_token_is_reported(sft_recipe: Make) -> None:
    _, data = load(
        sft_recipe([chat("Hi<|endoftext|>", "yes")], format="chat", chat_template=CHATML, sequence_length=80)
    )
    assert any("rows.jsonl:1" in note and "special token" in note for note in data.facts.notes)


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], list[int]]:
    """Sets the number of cores, and eight chats a part; returns the processes that have encoded since the last call."""
    found = tmp_path / "processes"
    make_encoder = encoding.chat_encoder

    def noted(*args: Any) -> Any:
        encode = make_encoder(*args)

        def encode_here(rows: Any, warnings: Any) -> Any:
            with found.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return encode(rows, warnings)

        return encode_here

    def on(cores: int) -> list[int]:
        monkeypatch.setattr(causal, "usable_cores", lambda: Choice(cores, ""))
        processes = [*map(int, found.read_text().split())] if found.exists() else []
        found.unlink(missing_ok=True)
        return processes

    monkeypatch.setattr(causal, "_ROWS_AT_ONCE", 8)
    monkeypatch.setattr(causal, "chat_encoder", noted)
    return on


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_chats_that_several_processes_render_have_the_tokens_and_notes_of_one(
    sft_recipe: Make, rendering: Callable[[int], list[int]]
) -> None:
    rows = [chat(f"{number}?" * (1 + number % 9), "yes" * (1 + number % 5)) for number in range(60)]
    for number in (11, 37, 52):
        rows[number] = chat("Hi<|endoftext|>" * (number % 3 + 1), "no")
    recipe = sft_recipe(rows, format="chat", chat_template=CHATML, sequence_length=70)
    state, found = torch.get_rng_state(), []
    for cores in (1, 2):
        rendering(cores)
        _, data = load(recipe)
        found.append((data, rendering(1)))
    (one, alone), (several, processes) = found
    assert {*alone} == {os.getpid()}
    assert len(processes) == len(alone) == 8
    assert len({*processes}) == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert several.fingerprint == one.fingerprint
    assert several.facts.record() == one.facts.record()
    assert any("rows.jsonl:12" in note and ": 3." in note for note in one.facts.notes)
    assert any("are cut" in note for note in one.facts.notes)
    for window, other in zip(one.train, several.train, strict=True):  # type: ignore[call-overload]
        assert all(map(np.array_equal, window, other))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_first_wrong_chat_is_named_as_by_one_process(
    sft_recipe: Make, rendering: Callable[[int], list[int]]
) -> None:
    rows = [WIZARD if number in (33, 50) else chat("a", "b") for number in range(60)]
    recipe, said = sft_recipe(rows, format="chat", chat_template=STRICT), []
    for cores in (1, 2):
        rendering(cores)
        said.append(str(refused(load, recipe, named="rows.jsonl:34")))
    assert said[0] == said[1]


WIZARD = {"messages": [{"role": "wizard", "content": "a"}, {"role": "assistant", "content": "b"}]}
NO_ASSISTANT = {"messages": [{"role": "user", "content": "Hi"}]}
FAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *yaml.safe_load("""
    - ["'completion'", {prompt: a}, {}]
    - ["'completion'|empty", {prompt: a, completion: ''}, {}]
    - ["'prompt' holds 7", {prompt: 7, completion: a}, {}]
    - ['''messages'' holds "hello"', {messages: hello}, {format: chat}]
    - ["'messages'|empty list", {messages: []}, {format: chat}]
    - ["'messages', message 1: role is null", {messages: [{content: a}]}, {format: chat}]
    - ["'messages', message 1: content is 3", {messages: [{role: user, content: 3}]}, {format: chat}]
    """),
    ("'completion'|character 0|lone surrogate", {"prompt": "a", "completion": "\ud800"}, {}),
    ("'talk'", chat("a", "b"), {"format": "chat", "messages_column": "talk"}),
    ("'messages', message 2: the assistant", chat("a", ""), {"format": "chat"}),
    ("'messages'|role 'assistant'", NO_ASSISTANT, {"format": "chat"}),
    ("'messages'|no wizard", WIZARD, {"format": "chat", "chat_template": STRICT}),
]


@pytest.mark.parametrize("named, row, settings", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_wrong_row_names_file_row_and_column(
    sft_recipe: Make, named: str, row: dict[str, Any], settings: dict[str, Any]
) -> None:
    good = chat("a", "b") | {"prompt": "a", "completion": "b", "talk": []}
    rows, line = ([chat("a", "b")], 1) if "talk" in named else ([good], 2)
    recipe = sft_recipe([*rows, row], **{"chat_template": CHATML, **settings})
    refused(load, recipe, named=f"rows.jsonl:{line}: |{named}")


@pytest.mark.parametrize(
    "settings, named",
    [
        ({}, "a chat template|the tokenizer"),
        ({"chat_template": "chat.jinja"}, "Jinja|a file"),
        ({"chat_template": "{% for %}"}, "not Jinja: line 1"),
        ({"chat_template": FORGETFUL}, "message 2|turns before"),
        ({"chat_template": "{{ messages[0].content }}{% generation %}{% endgeneration %}"}, "marks nothing"),
    ],
)
def test_template_that_cannot_be_used_is_refused(sft_recipe: Make, settings: dict[str, Any], named: str) -> None:
    refused(load, sft_recipe([chat("a", "b", "c", "d")], format="chat", **settings), named=named)


def test_long_rows_are_cut_and_rows_without_a_target_left_out_with_a_count(sft_recipe: Make) -> None:
    rows = [{"prompt": "p", "completion": "c" * 60}, {"prompt": "p" * 60, "completion": "c"}, *ragged_rows(3)]
    _, data = load(sft_recipe(rows))
    assert data.facts.others["num_train_rows"] == 4
    assert_golden("\n".join(data.facts.notes))
    cut = next(window for window in map(data.train.__getitem__, range(len(data.train))) if window[3].min() >= 0)
    assert (cut[1] >= 0).sum() == 47, "the first 48 targets, less the one in the prompt"
    refused(load, sft_recipe(rows[1:2]), named="all 1 ")


def test_held_out_rows_are_the_same_in_any_order_and_the_fingerprint_follows_the_rows(sft_recipe: Make) -> None:
    rows = ragged_rows(60)
    sides = []
    for order in (rows, rows[::-1]):
        _, data = load(sft_recipe(order, eval_fraction=0.2))
        held_out = data.source.eval
        sides.append({bytes(held_out.tokens[a:b]) for a, b in zip(held_out.starts, held_out.starts[1:])})
        assert 4 <= len(sides[-1]) <= 20
    assert sides[0] == sides[1]
    fingerprints = {load(sft_recipe(rows, completion_only_loss=only))[1].fingerprint for only in (True, False, True)}
    assert len(fingerprints) == 2


def test_pretrained_model_brings_its_tokenizer_unless_the_recipe_names_one(sft_recipe: Make, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["plus"])
    tokenizer.save_pretrained(tmp_path / "base")
    config = small_config("gpt2")
    config.vocab_size = 320
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    named = sft_recipe(ragged_rows(4), model={"pretrained": str(tmp_path / "base")})
    _, data = load(Recipe.model_validate(named.model_dump() | {"tokenizer": "auto"}))
    assert "plus" in data.source.tokenizer.get_vocab()
    assert data.facts.notes[0].startswith(f"tokenizer: from {tmp_path / 'base'}")
    _, data = load(named)
    assert named.tokenizer == "bytes"
    assert "plus" not in data.source.tokenizer.get_vocab()


def test_every_function_of_stdlib_docstrings_is_whole_python(monkeypatch: pytest.MonkeyPatch) -> None:
    files = stdlib.python_stdlib_files()[::10]
    monkeypatch.setattr(stdlib, "python_stdlib_files", lambda: files)
    rows = stdlib.stdlib_docstrings()
    assert len(rows) > 100
    for row in rows:
        function = ast.parse(row["prompt"] + row["completion"]).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(ast.parse(row["prompt"]).body[0], clean=False)
    assert len(set(zip(rows["prompt"], rows["completion"]))) == len(rows)


def test_chat_run_reports_the_accuracy_of_tokens_and_saves_its_template(tmp_path: Path) -> None:
    rows = [chat(f"{number} + 1", f"it is {number + 1}") for number in range(40)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = {"train": str(path), "format": "chat", "chat_template": CHATML, "eval_fraction": 0.2, "sequence_length": 64}
    recipe = write_recipe_file(
        tmp_path,
        task="causal-lm",
        data=data,
        schedule={"max_steps": 30},
        optimizer={"learning_rate": 1e-2},
        evaluate={"every_steps": 10, "sample_prompt": "3 + 1", "sample_tokens": 4},
    )
    assert main(["run", str(recipe)]) == 0
    scores = [record["token_accuracy"] for record in metrics(tmp_path / "run", "eval")]
    assert 0 <= scores[0] < scores[-1] <= 1
    assert not events(tmp_path / "run", "skip")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == CHATML


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("opened", "learned_text"), [("{{ '<think>\\n' }}", "\n</think>\nyes|"), ("", "<think>\n\n</think>\nyes|")]
)
def test_a_thinking_block_is_learned_but_for_what_the_prompt_opens(
    sft_recipe: Make, opened: str, learned_text: str, marked: bool
) -> None:
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{%- for m in messages %}{{- '@' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
        + begin
        + "{{- '<think>\\n\\n</think>\\n' + m.content + '<|endoftext|>' }}"
        + end
        + "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '@assistant\\n' }}"
        + opened
        + "{%- endif %}"
    )
    _, data = load(sft_recipe([chat("Hi", "yes")], format="chat", chat_template=template, sequence_length=160))
    assert learned(data) == learned_text
