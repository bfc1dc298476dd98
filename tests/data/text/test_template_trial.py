"""Chat templates that take too much are refused in a process of their own; others pass."""

from types import SimpleNamespace
from typing import Any

import pytest

from accel_train.data.text import template_trial
from accel_train.data.text.template_trial import check_template
from tests.support.runs import refused

CHATS = [[{"role": "user", "content": "hello"}]]


def tokenizer(template: str) -> Any:
    return SimpleNamespace(chat_template=template, special_tokens_map={"bos_token": "<s>"}, name_or_path="hub/name")


def test_a_template_that_is_right_or_that_refuses_a_chat_passes() -> None:
    check_template(tokenizer("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"), CHATS)
    check_template(tokenizer("{{ raise_exception('no') }}"), CHATS)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ range(10**12) | list }}",
        "{{ 'x' | center(10**10) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{{ messages[0].content * (2**22 if add_generation_prompt else 1) }}",
    ],
)
def test_a_template_that_takes_too_much_memory_is_refused(template: str) -> None:
    refused(check_template, tokenizer(template), CHATS, named="hub/name|1,024 MiB|data.chat_template")


def test_a_template_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trial, "CPU_SECONDS", 1)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    refused(check_template, tokenizer(loops), CHATS, "data.chat_template", named="data.chat_template|1 seconds")
