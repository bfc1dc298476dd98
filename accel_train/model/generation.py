"""Text from a trained language model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate_from_run(
    run_folder: Path, prompt: str = "", *, max_new_tokens: int = 200, temperature: float = 0.8, seed: int = 0
) -> str:
    """A text by the finished run in this folder (`RUN/model`), which begins with the prompt.

    Raises:
        ValueError: the folder holds no trained model, or an argument is out of its range.
    """
    check_sampling(max_new_tokens, temperature)
    folder = Path(run_folder) / "model"
    if not (folder / "config.json").is_file():
        what = "has no trained model yet (no model/config.json)" if Path(run_folder).is_dir() else "does not exist"
        raise ValueError(f"{run_folder} {what}; give the output_dir of a finished run")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from accel_train.model_check import check_weight_files

    check_weight_files(folder)
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        if "custom code" in reason:
            raise ValueError(
                f"{folder} brings code of its own, which generate does not run; read that code, and if you trust it load the "
                "model in Python: AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)"
            ) from error
        raise ValueError(
            f"{folder} cannot be loaded as a language model: {reason}; was the run a causal-lm?"
        ) from error
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return generate_text(model, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def check_sampling(max_new_tokens: int, temperature: float) -> None:
    """Raise ValueError for a length or temperature that makes no sense."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature}: must be a number of at least 0 (0 takes the likeliest token each time)"
        )


def generate_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str = "",
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The prompt and what the model writes after it, up to the end of the document.

    The model reads a document separator first, as in training. A text longer than the model's positions goes on from its
    second half. Rows that pad the vocabulary past the tokenizer are never sampled. The caller's random state and the
    model's mode are left as they were. Temperature 0 takes the likeliest token.
    """
    import torch

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
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
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
                    **sampling,
                )[0, len(window) :].tolist()
                tokens += written
                left -= len(written)
                if written[-1] in ends:
                    break
    finally:
        model.train(was_training)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
