"""Reach the Hugging Face hub, or do without it: one short try, and then only files that were downloaded before.

Without this try, each file of a name costs `huggingface_hub` 23 seconds of retries on a machine without a network.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from accel_train.data.cache import stamp_of

CONNECT_SECONDS = 3.0
"""Seconds to wait for a connection. A slow answer is waited for as long as the libraries wait."""
_NO_CONNECTION = {"ConnectError", "ConnectTimeout", "ProxyError"}
"""Errors of httpx and httpx2, which versions of `huggingface_hub` use."""
_configs: dict[tuple[object, ...], Any] = {}
"""Configurations that this process has read, by name, consent, and the sizes and times of their files."""


def known_config(name: str, trust_remote_code: bool, read: Callable[[], Any] | None = None) -> Any:
    """Return a copy of a model's configuration if this process has read it and its files have not changed.

    Otherwise, `read` reads it; None without `read`. A name of the hub is looked up as in `look_for_hub`.
    """
    look_for_hub(name)
    folder = Path(name) if os.path.isdir(name) else downloaded(name)
    files = () if folder is None else (*folder.glob("config.json"), *folder.glob("*.py"))
    version = name, trust_remote_code, *(each for file in files for each in stamp_of(file))
    if version not in _configs and read is not None:
        _configs[version] = read()
    return deepcopy(_configs.get(version))


def look_for_hub(name: str) -> None:
    """Switch this process to downloaded files if `name` is looked up on the hub, and the hub cannot be reached.

    The first call tries once, with the proxies of the environment and HF_ENDPOINT. HF_HUB_OFFLINE needs no try.
    """
    if not os.path.exists(name):
        _go_offline_without_hub()


def without_hub(name: str) -> str:
    """Return the end of an error on a name: what to do without a network; empty if the hub was reached or not asked."""
    from huggingface_hub import constants

    if os.path.exists(name) or not constants.HF_HUB_OFFLINE:
        return ""
    reason = f"{constants.ENDPOINT} cannot be reached" if _go_offline_without_hub() else "HF_HUB_OFFLINE is set"
    return (
        f". {reason}, so only downloaded files are used. Check the name. Then run `accel-train prepare RECIPE` on a "
        f"machine with a network and copy its HF_HOME to {constants.HF_HOME}, or name a local folder"
    )


def downloaded(name: str) -> Path | None:
    """Return the folder with the downloaded files of a model on the hub, or None."""
    from huggingface_hub import try_to_load_from_cache

    config = None
    # Not every name can be one of the hub.
    with suppress(ValueError):
        config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


@cache
def _go_offline_without_hub() -> bool:
    """Return whether this process was switched to downloaded files."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    # Any class: the module of the client depends on the version.
    session: Any = get_session()
    try:
        session.head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except Exception as error:
        if type(error).__name__ in _NO_CONNECTION:
            constants.HF_HUB_OFFLINE = True
            # `datasets` copies the value when it is imported.
            if (datasets := sys.modules.get("datasets")) is not None:
                datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
            return True
    return False
