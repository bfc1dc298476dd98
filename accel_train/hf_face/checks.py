"""What a Trainer cannot do, said before anything is built: combinations of arguments, and methods that are never called."""

from typing import TYPE_CHECKING

import transformers

if TYPE_CHECKING:
    from accel_train.hf import Trainer

REMEDIES = {
    "training_step": "override compute_loss: the loop owns backward, accumulation and the clip",
    "evaluation_loop": "override evaluate or prediction_step, or use compute_metrics",
    "_get_train_sampler": "override get_train_dataloader",
    "_get_eval_sampler": "override get_eval_dataloader",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
    "_maybe_log_save_evaluate": "use a callback (on_step_end, control.should_log, should_evaluate, should_save)",
    "_save_checkpoint": "use a callback (on_save); checkpoints are published whole or not at all",
    "_save": "override save_model",
}
"""By transformers' name of the method; for others a callback is the remedy."""


def check_overrides(kind: type, base: type) -> None:
    """Hold a subclass of our Trainer against the methods that transformers' Trainer calls.

    Raises:
        ValueError: naming each overridden method that would never be called, and what to override instead.
    """
    problems = []
    for cls in kind.__mro__[: kind.__mro__.index(base)]:
        for name in vars(cls):
            known = callable(getattr(transformers.Trainer, name, None)) and not name.startswith("__")
            if known and not hasattr(base, name):
                remedy = REMEDIES.get(name, "use a callback, or transformers.Trainer")
                problems.append(f"{cls.__name__}.{name}: {remedy}")
    if problems:
        raise ValueError(f"overridden methods that accel_train.Trainer never calls: {'; '.join(problems)}")


def is_overridden(trainer: "Trainer", name: str) -> bool:
    """Whether a subclass, or the object itself, brings its own method."""
    owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
    return owner.__module__ != "accel_train.hf" or name in vars(trainer)


def check_combinations(trainer: "Trainer") -> None:
    """What no single argument shows.

    Raises:
        ValueError: two arguments contradict each other, or one needs another.
    """
    args, (optimizer, scheduler) = trainer.args, trainer.given_optimizers
    if optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
        raise ValueError("give one of optimizers and optimizer_cls_and_kwargs")
    if trainer.model_init is not None and optimizer is not None:
        raise ValueError(
            "model_init makes new parameters, which optimizers do not have; override create_optimizer instead"
        )
    if optimizer is None and scheduler is not None:
        raise ValueError("optimizers=(None, scheduler): a scheduler belongs to its optimizer; give both")
    if args.eval_strategy != "no" and trainer.eval_dataset is None:
        raise ValueError(f"eval_strategy={args.eval_strategy.value} needs an eval_dataset; give one, or set it to no")
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ValueError("save_strategy=best needs metric_for_best_model")
    if not callable(trainer.data_collator):
        raise ValueError(
            f"data_collator={trainer.data_collator!r} cannot be called; give a function of a list of samples"
        )
