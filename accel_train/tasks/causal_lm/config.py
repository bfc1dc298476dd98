"""The settings of `data` for causal language modeling."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from accel_train.recipe.data import WindowData
from accel_train.recipe.tasks import TEXT, TaskSpec
from accel_train.recipe.values import PositiveInt

_ROWS, _PROMPTS, _CHATS = ("prompt_completion", "chat"), ("prompt_completion",), ("chat",)
_FORMATS = {
    **dict.fromkeys(("text_column", "mask_documents"), ("text",)),
    **dict.fromkeys(("completion_only_loss", "pad_to_multiple_of"), _ROWS),
    **dict.fromkeys(("prompt_column", "completion_column", "input_column"), _PROMPTS),
    **dict.fromkeys(("messages_column", "tools_column", "chat_template"), _CHATS),
}
"""Formats that read a setting."""


class CausalLMData(WindowData):
    """Settings of `data` for causal language modeling."""

    mask_documents: bool = False
    """Whether to restrict attention to tokens of the same document and restart positions at each document. With
    `model.attn_implementation` auto, each document is attended to alone, in memory linear in the length. If this is not
    possible, a dense mask is used. The run log names the method.
    """
    format: Literal["text", "prompt_completion", "chat"] = "text"
    """Format of the data. text: plain text. prompt_completion and chat: rows to fine-tune on; the loss
    counts only completions (assistant turns).
    """
    prompt_column: str = "prompt"
    """Column with the prompts."""
    completion_column: str = "completion"
    """Column with the completions to learn."""
    input_column: str | None = Field(default=None, examples=["input"])
    """Column with an optional text that follows the prompt after a blank line (Alpaca's input).
    """
    messages_column: str = "messages"
    """Column with a chat, as a list of {role, content}. The tokenizer's chat template renders
    it.
    """
    tools_column: str | None = Field(default=None, examples=["tools"])
    """Column with the tools of each chat (a JSON list, or a string of one). The chat template shows them."""
    completion_only_loss: bool = True
    """Whether only completions of fine-tuning rows count in the loss. false: prompts count as well."""
    chat_template: str | None = Field(default=None, examples=["chat_template.jinja"])
    """Jinja chat template, or a file with one, for a tokenizer without a template. A separate process renders a few
    chats first. A template that needs more than 5 seconds or 1 GiB is refused.
    """
    pad_to_multiple_of: PositiveInt = 8
    """Multiple to which the padded length of a batch of texts is rounded up."""

    def unread(self) -> Mapping[str, str]:
        reasons = {name: f"data.format is {self.format}" for name, read in _FORMATS.items() if self.format not in read}
        return reasons | {"id_column": "causal-lm predicts no rows"}


SPEC = TaskSpec(
    where="accel_train.tasks.causal_lm.task:CausalLM",
    data=CausalLMData,
    uses=TEXT
    | {
        "loss.label_smoothing",
        "loss.chunked",
        "loss.router_aux",
        "loss.z_loss",
        "loss.logit_softcap",
        "evaluate.sample_prompt",
        "evaluate.sample_tokens",
    },
    targets="tokens",
    gives="continuation",
    learns="continue a text",
    takes="text; prompts and completions; chats",
    finetune=True,
    auto="AutoModelForCausalLM",
    pipeline="text-generation",
    metrics=("bits_per_byte", "perplexity", "token_accuracy"),
    loss_is_by_position=True,
)
