"""The files by which sentence-transformers opens a model, written and read without the package."""

import json
from pathlib import Path
from typing import Any, Literal

from transformers.utils import cached_file

from accel_train.core.errors import first_line
from accel_train.core.json_io import load_json
from accel_train.core.state import JsonRecord
from accel_train.recipe.schema import Model
from accel_train.tasks.sentence_embedding.config import PROMPTS_FILE

Pooling = Literal["mean", "cls", "last"]
_MODES: dict[Pooling, str] = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
_OLD_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
_KNOWN = ("Transformer", "Pooling", "Normalize")


def write_folder(folder: Path, pooling: Pooling, dim: int, max_length: int, prompts: dict[str, str]) -> None:
    """Add the files to the folder of a transformers model and its tokenizer."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    old = {name: mode == _MODES[pooling] for name, mode in _OLD_MODES.items()}
    files: JsonRecord = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": dim, **old, "include_prompt": True},
        # Git keeps no empty folder.
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        PROMPTS_FILE: {
            "prompts": prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def pooling_of(model: Model) -> Pooling | None:
    """Return the pooling of a sentence-transformers folder or repository; None for a plain transformers model.

    Raises:
        ValueError: it has modules or a pooling that this task does not have.
    """
    modules = _read(model, "modules.json")
    if modules is None:
        return None
    kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown or kinds[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"{model.pretrained_at} has the module {[*unknown, *kinds][0]} of sentence-transformers, which "
            "sentence-embedding does not train; name a model of Transformer, Pooling, and Normalize"
        )
    config = _read(model, f"{modules[1]['path']}/config.json") or {}
    modes = config.get("pooling_mode", _modes_of(config))
    modes = [modes] if isinstance(modes, str) else modes
    found = [pooling for pooling, mode in _MODES.items() if modes == [mode]]
    if not found:
        raise ValueError(
            f"{model.pretrained_at} pools by {' and '.join(modes) or 'nothing'}; sentence-embedding knows mean, cls, "
            "and last"
        )
    if config.get("include_prompt") is False:
        raise ValueError(
            f"{model.pretrained_at} leaves prompts out of its pooling (include_prompt: false), which "
            "sentence-embedding does not do; name another model"
        )
    return found[0]


def _modes_of(config: JsonRecord) -> list[str]:
    """Return the modes of the older form: one flag each."""
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return [_OLD_MODES.get(name, name.removeprefix("pooling_mode_")) for name in flags]


def _read(model: Model, name: str) -> Any:
    """Return the JSON of a file of the model; None if it has no such file."""
    try:
        path = cached_file(model.pretrained, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model.pretrained_at}: {name} cannot be read ({first_line(error)}), so its pooling is unknown; download "
            "the model first"
        ) from error
    return None if path is None else load_json(Path(path))
