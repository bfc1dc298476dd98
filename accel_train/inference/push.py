"""Push the model of a finished run to the Hugging Face Hub, with a card that has its scores.

The Hub gets one commit: all files, or none.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.repocard_data import EvalResult
from huggingface_hub.utils import validate_repo_id

from accel_train.checkpoint.run_recipe import read_recipe_only
from accel_train.checkpoint.weight_files import check_digests
from accel_train.core.errors import SettingError
from accel_train.core.format import format_count
from accel_train.core.json_io import load_object
from accel_train.core.model_card import FILE, FOLDER, OF_TENSORS, SCORES, Card, Use, new_card, of_transformers
from accel_train.core.ownership import MARKER
from accel_train.core.work import working
from accel_train.inference.finished_run import check_finished, keeps_adapters
from accel_train.inference.model_files import is_known
from accel_train.observe.run_folder import SUMMARY_FILE, read_summary
from accel_train.recipe.tasks import TASKS, TaskSpec
from accel_train.task import Facts

_FOLDERS = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\`'\"]+[/\\])+")
"""Folders of an absolute path. A public card has only the last part."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
Answer = TypeVar("Answer")


class Push(NamedTuple):
    """A push: its files, its card, and its address on the Hub."""

    name: str
    """Repository. In a dry run without an owner, it has none here either."""
    private: bool
    files: Mapping[str, int]
    """Sizes in bytes by path in the repository."""
    left_out: tuple[str, ...]
    """Files of the model folder that are not sent: pickles, code that the model does not name, hidden files."""
    card: str
    url: str | None
    """Address of the commit; None for a dry run."""
    kept: tuple[str, ...] = ()
    """Files that the repository has from before, and the model does not have."""


def push_run(
    folder: Path, name: str, *, private: bool = False, updates: bool = False, is_dry_run: bool = False
) -> Push:
    """Send the model of a finished run to the repository `name` (or `owner/name`), in one commit.

    Args:
        private: make the new repository private.
        updates: allow a repository that has files. They stay in its history.
        is_dry_run: only return what would be sent. This needs no network.

    Raises:
        ValueError: the run has no whole model, the name is invalid, no token is set, the repository has other
            files, or the Hub refuses. The message names the fix.
    """
    check_finished(folder)
    recipe, source = read_recipe_only(folder), folder / "model"
    if keeps_adapters(recipe.model):
        raise ValueError(
            f"{folder} keeps its adapters apart (model.lora.merge: false), and model/ lacks them. Merge them with "
            f"`accel-train export {folder} --out FOLDER`, then `hf upload {name} FOLDER`"
        )
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. Give a name, or owner/name") from error
    paths, left_out = _files_of(source)
    card = card_of(folder, name)
    files = {path: (source / path).stat().st_size for path in paths} | {FILE: len(card.encode())}
    check_digests(source)
    push = Push(name, private, files, left_out, card, None)
    return push if is_dry_run else _send(push, source, folder, updates=updates)


def _files_of(source: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the files of a model folder to send, without the card, and those that are left out."""
    config = load_object(source / "config.json")
    code = {str(value).rpartition("--")[2].split(".")[0] for value in (config.get("auto_map") or {}).values()}
    sent: list[str] = []
    left_out: list[str] = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_dir() or name in (FILE, MARKER):
            continue
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        is_own_code = path.suffix == ".py" and path.parent == source and path.stem in code
        (sent if not is_hidden and (is_known(path) or is_own_code) else left_out).append(name)
    return sent, tuple(left_out)


def card_of(folder: Path, name: str) -> str:
    """Return the model card of a run: model/README.md if it exists, with the scores and the metadata for the Hub."""
    recipe = read_recipe_only(folder)
    summary = read_summary(folder) if (folder / SUMMARY_FILE).is_file() else {}
    path, facts = folder / "model" / FILE, Facts.model_construct(**summary.get("data") or {})
    card = Card.parse(path.read_text(encoding="utf-8")) if path.is_file() else _new_card(folder, recipe.task, facts)
    data: Any = ModelCard(str(card)).data
    data.tags = [*(data.tags or ()), *({"accel_train"} - {*(data.tags or ())})]
    base = recipe.model.pretrained
    # A path says nothing to others.
    if base is not None and not Path(base).exists() and _HUB_NAME.fullmatch(base):
        data.base_model = base
    scores = {
        key: value
        for key, value in (summary.get("eval") or {}).items()
        if isinstance(value, int | float) and math.isfinite(value) and key != "num_targets"
    }
    if scores:
        data.model_name = name.rpartition("/")[2]
        data.eval_results = [
            EvalResult(
                task_type=data.pipeline_tag or recipe.task,
                dataset_type="held-out",
                dataset_name=_FOLDERS.sub("", facts.sources or "held-out data"),
                metric_type=key,
                metric_value=value,
            )
            for key, value in scores.items()
        ]
    card = card.with_section(SCORES, _scores_table(scores, summary))
    # Metadata have no folders, and their scores are nested.
    public = Card.parse(_FOLDERS.sub("", str(replace(card, metadata=""))).replace(FOLDER, name))
    return str(replace(public, metadata=data.to_yaml()))


def _new_card(folder: Path, task: str, facts: Facts) -> Card:
    """Return the card of a model that was saved without one."""
    config = load_object(folder / "model" / "config.json")
    spec = TASKS[task] if task in TASKS else TaskSpec()
    (name,) = config.get("architectures") or [spec.auto]
    use = Use(of_transformers(spec.auto or name) if name else OF_TENSORS)
    kind = str(config.get("model_type") or config.get("module", "torch"))
    title, about = folder.absolute().name, (use, facts.sources, facts.num_train, facts.num_eval)
    return new_card(title, kind, spec.learns, *about, spec.library if name else "", spec.pipeline, spec.tags)


def _scores_table(scores: Mapping[str, float], summary: Mapping[str, Any]) -> str:
    if not scores:
        return ""
    rows = [f"| {key} | {value:.4g} |" for key, value in scores.items()]
    rows += [f"| baseline {key} | {value:.4g} |" for key, value in (summary.get("baselines") or {}).items()]
    return "\n".join(["On the held-out data:\n", "| metric | value |", "|---|---|", *rows])


def _send(push: Push, source: Path, folder: Path, *, updates: bool) -> Push:
    token = get_token()
    if token is None:
        raise ValueError("no token of the Hugging Face Hub. Log in with `hf auth login`, or set HF_TOKEN")
    api, name, kept = HfApi(token=token), push.name, set()
    if "/" not in name:
        name = f"{ask_hub(api.whoami)['name']}/{name}"
        push = push._replace(name=name, card=card_of(folder, name))
    if ask_hub(lambda: api.repo_exists(name)):
        kept = set(ask_hub(lambda: api.list_repo_files(name))) - {".gitattributes"}
        if kept and not updates:
            raise ValueError(
                f"the repository {name} has {format_count(len(kept), 'file')} already. Give another name, or --update "
                "to add a commit; the old files stay in its history"
            )
        if push.private and not ask_hub(lambda: api.repo_info(name)).private:
            raise ValueError(
                f"the repository {name} exists and is public. Make it private on the Hub, or leave out --private"
            )
    ask_hub(lambda: api.create_repo(name, private=push.private, exist_ok=True))
    files: list[Any] = [CommitOperationAdd(path, source / path) for path in push.files if path != FILE]
    files.append(CommitOperationAdd(FILE, push.card.encode()))
    message = f"Add the model of {folder.absolute().name}"
    commit = ask_hub(lambda: api.create_commit(name, files, commit_message=message))
    sizes = {**push.files, FILE: len(push.card.encode())}
    return push._replace(files=sizes, url=str(commit.commit_url), kept=tuple(sorted(kept - {*push.files})))


def ask_hub(request: Callable[[], Answer], more: str = "", setting: str = "") -> Answer:
    """Return the answer of the Hugging Face Hub.

    Raises:
        SettingError: it refused, or cannot be reached. `more` continues the remedy.
    """
    try:
        with working("calling the Hugging Face Hub"):
            return request()
    # A network service can raise any error.
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise SettingError(
            f"the request failed ({type(error).__name__}: {said})",
            f"Check the token (`hf auth login`), the network, and HF_HUB_OFFLINE{more}",
            "Hugging Face Hub",
            (setting,) if setting else (),
        ) from error


def format_push(push: Push) -> str:
    """Return what `push` prints."""
    kind = "private" if push.private else "public"
    head = f"{push.name} ({kind}): " + (f"sent, {push.url}" if push.url else "dry run, nothing is sent")
    width = max(map(len, push.files))
    sizes = {**push.files, "all": sum(push.files.values())}
    lines = [head, *(f"  {path:<{width}}  {size:>15,} bytes" for path, size in sizes.items())]
    if push.left_out:
        lines.append(f"left out: {', '.join(push.left_out)}")
    if push.kept:
        lines.append(f"also there, from before: {', '.join(push.kept)}")
    if push.url is None:
        lines += [f"{FILE}:", *(f"  {line}".rstrip() for line in push.card.splitlines())]
    return "\n".join(lines)
