"""Generate text with a causal language model."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from accel_train.data.text.template_trial import check_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_sampling(max_new_tokens: int, temperature: float) -> None:
    """Raise ValueError if the length or the temperature is out of range."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature}: must be a number of at least 0 (0 takes the likeliest token each time)"
        )


def chat_prompt(tokenizer: "PreTrainedTokenizerBase", text: str, earlier: Sequence[dict[str, str]] = ()) -> str:
    """Return the chat template around a user's message, up to the start of the answer, without the begin token.

    `earlier` messages (`role`, `content`) come first.
    """
    messages = [*earlier, {"role": "user", "content": text}]
    check_template(tokenizer, [messages])
    prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return prompt.removeprefix(tokenizer.bos_token or "")


def generate_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str = "",
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    streamer: Any = None,
) -> str:
    """Return the prompt and its continuation by the model, up to the end of the document.

    A `streamer` of transformers is given the tokens as they are written.

    The model reads a document separator first, as in training. When the text fills the model's positions, generation
    continues from its second half. Vocabulary rows that only pad the embedding are never sampled. Temperature 0 takes
    the most likely token.

    The caller's random state and the model's mode are restored.
    """
    import torch

    from accel_train.model.isolation import RandomState

    check_sampling(max_new_tokens, temperature)
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    start = [] if separator is None else [separator]
    tokens = start + tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        raise ValueError("an empty prompt needs a tokenizer with a separator (bos or eos token); give a prompt")
    ends = sorted({token for token in (separator, tokenizer.eos_token_id) if token is not None})
    device = model.device
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**30
    rows = model.get_output_embeddings().weight.shape[0]
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    was_training, state = model.training, RandomState(device)
    model.eval()
    try:
        # Each further token has a new shape, so compiled blocks would be compiled at every token. The compiler takes a
        # second to import, and only a compiled model has imported it.
        is_compiled = "torch._dynamo" in sys.modules
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            torch.manual_seed(seed)
            left = max_new_tokens
            while left > 0:
                window = tokens[-max(1, positions // 2) :] if len(tokens) >= positions else tokens
                given = torch.tensor([window], device=device)
                written = model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=min(left, positions - len(window)),
                    suppress_tokens=list(range(len(tokenizer), rows)) or None,
                    eos_token_id=ends or None,
                    pad_token_id=separator if separator is not None else 0,
                    streamer=streamer,
                    **sampling,
                )[0, len(window) :].tolist()
                tokens += written
                left -= len(written)
                if written[-1] in ends:
                    break
    finally:
        model.train(was_training)
        state.put_back()
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
