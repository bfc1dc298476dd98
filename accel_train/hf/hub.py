"""The Hub, through huggingface_hub: a repository, uploads after saves and at the end, a model card."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, ModelCard
from transformers.modelcard import TrainingSummary

from accel_train.ownership import write_file
from accel_train.snapshot import OPTIMIZER, TRAINER

if TYPE_CHECKING:
    from accel_train.hf import Trainer

OURS_ALONE = [OPTIMIZER, TRAINER, "manifest.json"]
NOT_PUSHED = ["_*", "checkpoints/*", "previous-*/*", ".*"]


def open_repository(trainer: "Trainer", token: str | None, private: bool | None) -> str:
    """Create the repository if it is not there; returns its id.

    Raises:
        ValueError: the Hub cannot be reached, or nobody is logged in.
    """
    args = trainer.args
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    wanted = args.hub_private_repo if private is None else private
    return str(
        _ask(lambda: HfApi(token=token or args.hub_token).create_repo(name, private=wanted, exist_ok=True)).repo_id
    )


def push_checkpoint(trainer: "Trainer", folder: Path) -> None:
    """Upload a checkpoint just saved, in the background, as `hub_strategy` says.

    Raises:
        ValueError: the Hub cannot be reached, or nobody is logged in.
    """
    args = trainer.args
    strategy = args.hub_strategy.value
    if not args.push_to_hub or strategy == "end":
        return
    if not args.hub_always_push and any(not job.done() for job in trainer.pushes):
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    said = f"Training in progress, step {trainer.state.global_step}"
    trainer.pushes.append(_upload(trainer, folder, said, ignore=OURS_ALONE))
    if strategy in ("checkpoint", "all_checkpoints"):
        place = "last-checkpoint" if strategy == "checkpoint" else folder.name
        trainer.pushes.append(_upload(trainer, folder, f"{said}, checkpoint", path_in_repo=place))


def push_output(trainer: "Trainer", message: str | None, token: str | None, revision: str | None, *, wait: bool) -> Any:
    """Upload output_dir (the model, its card; no checkpoints), after the uploads under way."""
    finish_pushes(trainer)
    return _upload(
        trainer,
        Path(trainer.args.output_dir),
        message,
        ignore=NOT_PUSHED,
        token=token,
        revision=revision,
        background=not wait,
    )


def finish_pushes(trainer: "Trainer") -> None:
    """Wait for the uploads under way."""
    for job in trainer.pushes:
        _ask(job.result)
    trainer.pushes.clear()


def write_card(trainer: "Trainer", **facts: Any) -> None:
    """`README.md` in output_dir, as transformers writes it; tags of an earlier card are kept."""
    path = Path(trainer.args.output_dir) / "README.md"
    tags = facts.pop("tags", None)
    tags = [tags] if isinstance(tags, str) else list(tags or [])
    if path.exists():
        tags += [tag for tag in ModelCard.load(path).data.tags or [] if tag not in tags]
    path.parent.mkdir(parents=True, exist_ok=True)
    card = TrainingSummary.from_trainer(trainer, tags=tags or None, **facts).to_model_card()
    write_file(path, card.encode(), path.parent)  # a README of the user's is kept in previous-N


def _upload(
    trainer: "Trainer",
    folder: Path,
    message: str | None,
    *,
    path_in_repo: str | None = None,
    ignore: list[str] | None = None,
    token: str | None = None,
    revision: str | None = None,
    background: bool = True,
) -> Any:
    args = trainer.args
    assert trainer.hub_model_id is not None
    upload: Any = HfApi(token=token or args.hub_token).upload_folder
    return _ask(
        lambda: upload(
            repo_id=trainer.hub_model_id,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=message,
            ignore_patterns=ignore,
            revision=revision or args.hub_revision,
            run_as_future=background,
        )
    )


def _ask(call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # any error of a service on the network
        raise ValueError(
            f"the Hugging Face Hub did not take it ({type(error).__name__}: {str(error).strip().splitlines()[0]}); log in with "
            "`hf auth login` or hub_token, unset HF_HUB_OFFLINE, or set push_to_hub=False: what was trained is in output_dir"
        ) from error
