"""The Hub, through huggingface_hub: repository, uploads, and model card."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, ModelCard
from transformers import TrainingArguments
from transformers.modelcard import TrainingSummary
from transformers.trainer_utils import _is_peft_model

from accel_train.checkpoint.contents import AVERAGE, MODEL, OPTIMIZER, TRAINER
from accel_train.checkpoint.store import MANIFEST
from accel_train.core.ownership import write_file
from accel_train.hf.argument_table import name_of
from accel_train.hf.checkpoints import is_spread
from accel_train.inference.push import ask_hub

if TYPE_CHECKING:
    from accel_train.hf import Trainer

ONLY_FOR_RESUMING = [OPTIMIZER, AVERAGE, TRAINER, MANIFEST]
NOT_PUSHED = [
    *("_*", ".*", "checkpoints/*", "checkpoint-*/*", "previous-*/*", "run-*/*"),
    # `save_model` writes the same weights to the run folder itself.
    "model/*",
    *("events.jsonl*", "metrics.jsonl*", "launches.jsonl", "incidents/*", "profile/*", "*.log"),
]
"""Patterns of files in a run folder that only matter to the person who trained. They are not uploaded."""
_ask = partial(ask_hub, more=", or set push_to_hub=False. The trained model is in output_dir", setting="push_to_hub")


def create_repo(args: TrainingArguments, token: str | None, private: bool | None) -> str:
    """Create the repository on the Hub if it does not exist, and return its id.

    Raises:
        SettingError: the Hub cannot be reached, or the user is not logged in.
    """
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    wanted = args.hub_private_repo if private is None else private
    api = HfApi(token=token or args.hub_token)
    return str(_ask(lambda: api.create_repo(name, private=wanted, exist_ok=True)).repo_id)


def push_checkpoint(trainer: "Trainer", folder: Path) -> None:
    """Upload a new checkpoint in the background, as `hub_strategy` says.

    Raises:
        SettingError: the Hub cannot be reached, or the user is not logged in.
    """
    args = trainer.args
    strategy = name_of(args.hub_strategy)
    if not args.push_to_hub or strategy == "end":
        return
    if not args.hub_always_push and any(not job.done() for job in trainer.pushes):
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    message = f"Training in progress, step {trainer.state.global_step}"
    # An adapter run resumes from its adapters. Its base may not be the user's to publish.
    base = [MODEL] if _is_peft_model(trainer.model) else []
    trainer.pushes.append(_upload(trainer, folder, message, ignore_patterns=[*ONLY_FOR_RESUMING, *base]))
    if strategy in ("checkpoint", "all_checkpoints"):
        place = "last-checkpoint" if strategy == "checkpoint" else folder.name
        # Without its base, it is no checkpoint with a manifest. It resumes as transformers' checkpoints do.
        unused = [*base, MANIFEST] if base and not is_spread(trainer) else None
        job = _upload(trainer, folder, f"{message}, checkpoint", path_in_repo=place, ignore_patterns=unused)
        trainer.pushes.append(job)


def push_model(
    trainer: "Trainer", message: str | None, blocking: bool, token: str | None, revision: str | None, card: Any
) -> Any:
    """Upload the saved model and its card to the Hub. Return the commit, or its future if `blocking` is False."""
    args = trainer.args
    folder = Path(args.output_dir)
    name = folder.name if args.hub_model_id is None else args.hub_model_id.split("/")[-1]
    tags = _joined(card.get("tags"), getattr(trainer.model, "model_tags", None))
    trainer.create_model_card(**{"model_name": name, **card, **({"tags": tags} if tags else {})})
    finish_pushes(trainer)
    options = {"revision": revision or args.hub_revision, "run_as_future": not blocking}
    return _upload(trainer, folder, message, token, ignore_patterns=NOT_PUSHED, **options)


def _joined(tags: str | Iterable[str] | None, more: Iterable[str] | None) -> list[str]:
    """Return one or several tags, followed by the others of `more`."""
    return list(dict.fromkeys((*([tags] if isinstance(tags, str) else tags or ()), *(more or ()))))


def finish_pushes(trainer: "Trainer") -> None:
    """Wait for the uploads that still run."""
    for job in trainer.pushes:
        _ask(job.result)
    trainer.pushes.clear()


def write_model_card(trainer: "Trainer", tags: str | list[str] | None = None, **facts: Any) -> None:
    """Write `README.md` to output_dir as transformers does. Tags of an existing README are kept."""
    path = Path(trainer.args.output_dir) / "README.md"
    tags = _joined(tags, ModelCard.load(path).data.tags if path.exists() else None)
    write_card(trainer, TrainingSummary.from_trainer(trainer, tags=tags or None, **facts).to_model_card())


def write_card(trainer: "Trainer", card: str) -> None:
    """Write `README.md` to output_dir. A README of the user is kept in previous-N."""
    path = Path(trainer.args.output_dir) / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, card.encode(), path.parent)


def _upload(trainer: "Trainer", folder: Path, message: str | None, token: str | None = None, **options: Any) -> Any:
    """Call huggingface_hub's `upload_folder`, in the background by default."""
    args = trainer.args
    upload: Any = HfApi(token=token or args.hub_token).upload_folder
    options = {"path_in_repo": None, "revision": args.hub_revision, "run_as_future": True, **options}
    return _ask(lambda: upload(repo_id=trainer.hub_model_id, folder_path=folder, commit_message=message, **options))
