"""Generate text with a trained language model."""

import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from accel_train.checkpoint.run_recipe import read_recipe_only
from accel_train.core.errors import SettingError, asks_for_own_code, first_line
from accel_train.model.generation import chat_prompt, check_sampling, generate_text
from accel_train.recipe.tasks import TASKS
from accel_train.runtime.driver import uses_cpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Messages = list[dict[str, str]]
"""A chat: each message has `role` and `content`."""


def check_generation(run_folder: Path, *, max_new_tokens: int, temperature: float) -> None:
    """Check that a folder has a model and that arguments are in range, without importing torch.

    Raises:
        ValueError: the model is missing or an argument is out of range; the message names it.
    """
    check_sampling(max_new_tokens, temperature)
    if not (Path(run_folder) / "model" / "config.json").is_file():
        what = "has no trained model yet (no model/config.json)" if Path(run_folder).is_dir() else "does not exist"
        raise ValueError(f"{run_folder} {what}; give the output_dir of a finished run")
    recipe = None
    with suppress(ValueError):
        recipe = read_recipe_only(run_folder)
    if recipe is not None and recipe.task in TASKS and TASKS[recipe.task].gives != "continuation":
        command = f"accel-train predict {shlex.quote(str(run_folder))} DATA"
        raise ValueError(f"{run_folder} is a {recipe.task} run, and continues no text. Type: {command}")


def generate_from_run(
    run_folder: Path, prompt: str = "", *, max_new_tokens: int = 200, temperature: float = 0.8, seed: int = 0
) -> str:
    """Return a text from the finished run's model (`RUN/model`): prompt and continuation, or a chat model's answer.

    Raises:
        ValueError: the folder has no trained model, or an argument is out of range.
    """
    check_generation(run_folder, max_new_tokens=max_new_tokens, temperature=temperature)
    tokenizer, model, is_chat = _load(Path(run_folder))
    start = chat_prompt(tokenizer, prompt) if is_chat else prompt
    text = generate_text(model, tokenizer, start, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return _answer(tokenizer, start, text) if is_chat else text


def chat_with_run(
    run_folder: Path, messages: Iterable[str], *, max_new_tokens: int = 200, temperature: float = 0.8, seed: int = 0
) -> Messages:
    """Print an answer to each message as it is written, and return all messages (`role`, `content`) and answers.

    A chat model reads the earlier messages and answers too, from the oldest that fit. Another language model continues
    each message alone.

    Raises:
        ValueError: the folder has no trained model, or an argument is out of range.
    """
    from transformers import TextStreamer

    check_generation(run_folder, max_new_tokens=max_new_tokens, temperature=temperature)
    tokenizer, model, is_chat = _load(Path(run_folder))
    most = (getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**30) - max_new_tokens
    earlier: Messages = []
    written: Messages = []
    for message in messages:
        start = chat_prompt(tokenizer, message, earlier) if is_chat else message
        while earlier and len(tokenizer.encode(start)) > most:
            del earlier[:2]
            start = chat_prompt(tokenizer, message, earlier)
        text = generate_text(
            model,
            tokenizer,
            start,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed + len(written),
            streamer=TextStreamer(tokenizer, skip_prompt=is_chat, skip_special_tokens=True),
        )
        answer = _answer(tokenizer, start, text)
        written += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        earlier += written[-2:] if is_chat else []
    return written


def _load(run_folder: Path) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel, bool]":
    """Return tokenizer and model, and whether the run was trained on chats. False if its recipe cannot be read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from accel_train.checkpoint.weight_files import check_digests
    from accel_train.data.text.tokenizers import NO_TOKENIZER
    from accel_train.tasks.causal_lm.config import CausalLMData

    check_digests(folder := run_folder / "model")
    logging.disable_progress_bar()
    recipe = None
    with suppress(ValueError):
        recipe = read_recipe_only(run_folder)
    if recipe is not None and recipe.tokenizer == NO_TOKENIZER and not (folder / "tokenizer_config.json").is_file():
        raise SettingError(
            "the run trained on ids alone (tokenizer: none), so it has no texts",
            f"Save the tokenizer that wrote the ids to {folder}",
            at=str(run_folder),
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError) as error:
        if asks_for_own_code(error):
            raise ValueError(
                f"{folder} brings its own code, and generate does not run it. Read the code, and if you trust it, "
                f"load the model in Python: AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)"
            ) from error
        raise ValueError(
            f"{folder} cannot be loaded as a language model: {first_line(error)}; was the run a causal-lm?"
        ) from error
    model.to(torch.device("cuda" if torch.cuda.is_available() and not uses_cpu(os.environ) else "cpu"))
    data = recipe and recipe.data
    return tokenizer, model, isinstance(data, CausalLMData) and data.format == "chat"


def _answer(tokenizer: "PreTrainedTokenizerBase", start: str, text: str) -> str:
    """Return what follows the prompt in a text without special tokens."""
    asked = tokenizer.decode(tokenizer.encode(start, add_special_tokens=False), skip_special_tokens=True)
    return text.removeprefix(str(asked)).strip()
