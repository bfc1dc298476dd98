"""Test a chat template in a separate process under limits, because it is untrusted code."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_train.core.state import JsonRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_SECONDS = 5
"""CPU time for all chats of a trial, in seconds. Normal templates take milliseconds."""
MEMORY_BYTES = 2**30
"""Memory above the interpreter's own, in bytes."""
MOST_CHARACTERS = 2**24
"""Longest rendered chat, in characters."""
_WALL_SECONDS = 300.0
_TOO_LARGE = 65
"""Exit code of a trial that exceeds the memory or length limit."""
_TRIAL = """
import sys
sys.path[:] = [path for path in sys.path if path]  # nothing is imported from the current folder
import json, os, resource
from transformers.utils.chat_template_utils import render_jinja_template
template, chats, tools, names, seconds, num_bytes, most = json.load(sys.stdin)
# The data segment, and not the address space: libraries reserve much more of that than they use.
pages = int(open("/proc/self/statm").read().split()[5]) if os.path.exists("/proc/self/statm") else 2**19
num_bytes += pages * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
seconds += int(sum(os.times()[:2]))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
for chat, is_prompt in chats:
    try:
        options = {"tools": tools, "chat_template": template, "add_generation_prompt": is_prompt}
        text = render_jinja_template([chat], **options, **names)[0][0]
    except (MemoryError, OverflowError):
        os._exit(65)
    except Exception:
        continue  # the training renders this chat, too, and names it
    if len(text) > most:
        os._exit(65)
os._exit(0)
"""


_tried: set[tuple[str, bool]] = set()
"""Templates that have passed in this process, each with whether it was given tools."""


def check_template(
    tokenizer: "PreTrainedTokenizerBase",
    chats: Sequence[Sequence[JsonRecord]],
    whose: str = "",
    tools: Sequence[JsonRecord] | None = None,
) -> None:
    """Render chats with the tokenizer's template in another process, with and without a generation prompt.

    `whose` names the origin of the template in messages. Default: the tokenizer. `tools` are given to each chat.

    Raises:
        ValueError: the template exceeds `CPU_SECONDS`, `MEMORY_BYTES` or `MOST_CHARACTERS`.
    """
    # A tokenizer may have several named templates.
    given = tokenizer.chat_template
    template = given if isinstance(given, str) else str(tokenizer.get_chat_template())
    if (template, tools is not None) in _tried:
        return
    tries = [(list(chat), is_prompt) for chat in chats for is_prompt in (False, True)]
    names = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    limits = (CPU_SECONDS, MEMORY_BYTES, MOST_CHARACTERS)
    text = json.dumps([template, tries, tools, names, *limits], default=str)
    try:
        code = subprocess.run(
            [sys.executable, "-c", _TRIAL], input=text.encode(), capture_output=True, timeout=_WALL_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        code = -1
    whose = whose or f"the chat template of the tokenizer {tokenizer.name_or_path}"
    remedy = "correct the template, or set data.chat_template to another one"
    if code < 0:  # killed by the CPU limit, or timed out
        raise ValueError(f"{whose} renders for longer than {CPU_SECONDS} seconds; {remedy}")
    if code == _TOO_LARGE:
        raise ValueError(
            f"{whose} needs more than {MEMORY_BYTES >> 20:,} MiB, or makes a chat longer than {MOST_CHARACTERS:,} "
            f"characters; {remedy}"
        )
    _tried.add((template, tools is not None))
