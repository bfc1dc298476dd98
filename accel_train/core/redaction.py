"""Recognize secrets by name, by form or by registration, and replace them in every text."""

import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.core.terminal import without_controls

REDACTED = "REDACTED"
SHORTEST_SECRET = 6
"""Shortest secret to replace in texts, in characters. Shorter values would match ordinary words."""

_SECRET_WORDS = re.compile(
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key|(^|_)auth$|_key$"
)
_TOKEN = re.compile(r"(^|_)token$")
_MODEL_TOKEN = re.compile(
    r"^(bos|eos|pad|unk|cls|sep|mask|image|video|audio|boi|eoi|boa|eoa|start|end|stop|decoder_start)_token$"
)
# user:password or a token in front of a host.
_IN_URL = re.compile(r"(?<=://)[^\s/@]+(?=@)")
_SECRETS_IN_TEXT = (
    _IN_URL,
    re.compile(r"(?i)(?<=[?&])((?:[\w-]*(?:token|secret|password|key|signature|sig))=)[^&#\s]+"),
    re.compile(r"(?i)(\b(?:bearer|basic|token) )[A-Za-z0-9+/=_.~-]{16,}"),
    re.compile(r"(?i)(\bauthorization['\"]?: ?)[^\s'\"]+(?: [^\s'\"]+)?"),
    re.compile(
        r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{20,}"
        r"|xox[a-z]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16})"
    ),
)
shown_as: dict[str, str] = {}
"""Beginnings of paths, each with the text that users see for it: copies of files in a bucket have their URLs."""
_known: set[str] = set()
_known_in_text: re.Pattern[str] | None = None


def is_secret(name: str) -> bool:
    """Return whether a value with this name is a secret: `HF_TOKEN`, `apiKey`, `db-password`; not `pad_token_id`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).replace("-", "_").lower()
    return bool(_SECRET_WORDS.search(snake) or (_TOKEN.search(snake) and not _MODEL_TOKEN.search(snake)))


def remember_secrets(value: Any) -> None:
    """Register secrets for `redact`: values of secret names, passwords in URLs, and targets of `notify`.

    Searches mappings and lists. Secrets stay registered for the lifetime of the process.
    """
    global _known_in_text
    found = {text for text in _secrets_of(value, "") if len(text) >= SHORTEST_SECRET} - _known
    if found:
        _known.update(found)
        # A secret may be the beginning of another.
        longest_first = sorted(_known, key=len, reverse=True)
        _known_in_text = re.compile("|".join(map(re.escape, longest_first)))


def _secrets_of(value: Any, name: str) -> set[str]:
    if isinstance(value, Mapping):
        return {
            text for key, item in value.items() for text in _secrets_of(item, name if is_secret(name) else str(key))
        }
    if isinstance(value, list | tuple):
        return {text for item in value for text in _secrets_of(item, name)}
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {str(value)} if is_number and is_secret(name) else set()
    inside = {part for user in _IN_URL.findall(value) for part in (user, user.partition(":")[2]) if part}
    # Anyone who knows a webhook's address can write to it. A refused target may hold credentials too.
    if name.rpartition(".")[2] == "notify" and not value.startswith("$") and value != REDACTED:
        inside.add(value)
    # A path only shows where the secret lies, and messages need it.
    return inside | {value} if is_secret(name) and value != REDACTED and not os.path.exists(value) else inside


def redact(value: Any, name: str = "") -> Any:
    """Return a value without secrets: values of names such as `hub_token` or `WANDB_API_KEY`, and passwords in URLs.

    `pad_token`, `num_tokens` and `tokenizer` are not secrets. Searches mappings and lists.
    """
    if is_secret(name) and value not in (None, "", REDACTED) and not isinstance(value, bool):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(item) for item in value)
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return a text without registered secrets and without strings that look like secrets; as users know its paths."""
    for path, shown in shown_as.items():
        text = text.replace(path, shown)
    if _known_in_text is not None:
        text = _known_in_text.sub(REDACTED, text)
    for pattern in _SECRETS_IN_TEXT:
        text = pattern.sub(lambda found: (found.group(1) if found.lastindex else "") + REDACTED, text)
    return text


def without_places(text: str) -> str:
    """Return a text without absolute paths, IPv4 addresses, MASTER_ADDR, and the name of this machine."""
    host = re.escape(socket.gethostname())
    # A path is not the end of a URL or of a unit. /dev/shm is the same on every machine.
    places = rf"\b{host}\b|(?<=MASTER_ADDR=)[^\s,]+|\b\d+(\.\d+){{3}}\b|(?<![\w.:/])/(?!dev/shm)[\w.~/+-]+"
    return re.sub(places, "HIDDEN", text)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line with secrets redacted: `--options.hub_token VALUE` and `--options.hub_token=VALUE`."""
    shown = []
    for before, word in zip(["", *words], words):
        name, equals, _ = word.partition("=")
        if word.startswith("--") and equals and is_secret(name):
            shown.append(f"{name}={REDACTED}")
        elif before.startswith("--") and "=" not in before and is_secret(before):
            shown.append(REDACTED)
        else:
            shown.append(redact_text(word))
    return shown


def print_traceback(error: BaseException) -> None:
    """Print a traceback on stderr without secrets."""
    text = redact_text("".join(traceback.format_exception(error)))
    print(without_controls(text), end="", file=sys.stderr, flush=True)


def keep_secrets_out_of_tracebacks() -> None:
    """Install exception hooks that print tracebacks without the secrets of the environment, in all threads."""
    remember_secrets(os.environ)
    sys.excepthook = lambda kind, error, trace: print_traceback(error)
    threading.excepthook = lambda failed: None if failed.exc_value is None else print_traceback(failed.exc_value)
