"""Tell which files of a model folder are safe to give to others."""

from pathlib import Path

KNOWN_SUFFIXES = (".safetensors", ".json", ".txt", ".md", ".model", ".spm", ".tiktoken", ".jinja")
KNOWN_NAMES = ("LICENSE", "NOTICE")


def is_known(path: Path) -> bool:
    """Return whether a file is weights, a configuration, a tokenizer, or a text, but no pickle and no code.

    A folder is known unless it is hidden.
    """
    if path.is_dir():
        return not path.name.startswith(".")
    return (path.suffix in KNOWN_SUFFIXES and ".bin." not in path.name) or path.name in KNOWN_NAMES
