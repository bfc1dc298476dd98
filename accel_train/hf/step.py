"""Parts of a step: loss and outputs of a batch, as in transformers' Trainer, and update events of callbacks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.optimization import AdafactorSchedule
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_pt_utils import nested_detach
from transformers.trainer_utils import unwrap_peft_model

from accel_train.hf.arguments import Length
from accel_train.hf.inputs import targets_in

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext
    from accel_train.hf import Trainer


OF_AN_UPDATE = ("on_pre_optimizer_step", "on_optimizer_step")
CACHES = ["past_key_values", "cache"]
"""Names of a model's generation cache among its outputs: before transformers 5.24, and since."""
ASKS_NOTHING = (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    DEFAULT_PROGRESS_CALLBACK,
    *INTEGRATION_TO_CALLBACK.values(),
)


def compute_loss(
    trainer: "Trainer",
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Return the mean loss of one micro-batch over its targets. `num_items_in_batch` counts only this micro-batch.

    Override it for a custom loss. Return a mean, or a sum divided by `num_items_in_batch`. The loop multiplies by the
    number of targets, adds up over micro-batches and processes, and divides once by all targets of the step.

    Raises:
        ValueError: the model returned no loss.
    """
    inputs = dict(inputs)
    takes_labels = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    labels = inputs.pop("labels", None) if takes_labels else None
    if trainer.signature.takes_num_items and num_items_in_batch is not None:
        inputs["num_items_in_batch"] = num_items_in_batch
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        loss = trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
    elif labels is not None and trainer.label_smoother is not None:
        is_causal = type(unwrap_peft_model(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        options = {"shift_labels": is_causal, "num_items_in_batch": num_items_in_batch}
        loss = trainer.label_smoother(outputs, labels, **options)
    elif isinstance(outputs, dict) and "loss" not in outputs:
        raise ValueError(
            f"the model returned no loss, only {', '.join(outputs)}, from the inputs {', '.join(inputs)}; "
            "give it labels, pass compute_loss_func, or override compute_loss"
        )
    else:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return (loss, outputs) if return_outputs else loss


def compute_loss_context_manager(trainer: "Trainer") -> AbstractContextManager[Any]:
    """Return the context in which `compute_loss` is called, inside autocast. Override it for a custom context."""
    return nullcontext()


def training_step(
    trainer: "Trainer", model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
) -> Tensor:
    """Return the detached loss of one micro-batch, after `self.accelerator.backward(loss)`.

    Override it as in transformers, with a call of this method or with a custom backward. The loop takes the loss that
    is passed to `backward`, or the sum of several losses, and runs backward once. Gradients do not exist yet when the
    call returns.
    """
    model.train()
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    trainer.accelerator.backward(loss)
    return loss.detach()


def loss_of_step(trainer: "Trainer", model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return the mean loss of a micro-batch with its graph.

    Raises:
        ValueError: an overridden training_step called backward in another way, or not at all.
    """
    num_items = num_items_in(trainer, inputs)
    if not trainer.overrides("training_step"):
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items)
        return loss
    handed: list[Tensor] = []
    accelerator: Any = trainer.accelerator
    accelerator.backward = lambda loss, **_: handed.append(loss)
    try:
        returned = trainer.training_step(model, dict(inputs), num_items)
    finally:
        del accelerator.backward
    if not handed and isinstance(returned, Tensor) and returned.requires_grad:
        return returned
    if not handed:
        raise ValueError(
            f"{type(trainer).__name__}.training_step never called self.accelerator.backward(loss); call that, "
            "and not loss.backward(): the loop goes backward itself, once it is known what the loss is divided by"
        )
    return torch.stack(handed).sum() if len(handed) > 1 else handed[0]


def floating_point_ops(trainer: "Trainer", inputs: dict[str, Any]) -> int:
    """Return 6 x tokens x parameters without embeddings (forward and backward) for `total_flos`, as in transformers."""
    main = inputs.get(getattr(trainer.model, "main_input_name", "input_ids"))
    return 6 * main.numel() * trainer._num_flops_parameters if isinstance(main, Tensor) else 0


def num_items_in(trainer: "Trainer", inputs: dict[str, Any]) -> Tensor | int | None:
    """Return `num_items_in_batch` of one batch, or None if no loss divides by it, as in transformers."""
    if "labels" not in inputs or not (trainer.signature.takes_num_items or trainer.compute_loss_func is not None):
        return None
    count = targets_in(inputs, trainer.signature)
    # Without targets the sum is 0, and 0 / 0 would be NaN.
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def prediction_step(
    trainer: "Trainer",
    model: nn.Module,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
) -> tuple[Tensor | None, Any, Any]:
    """Return the loss, outputs, and labels of one batch. The outputs omit the loss and the model's ignored keys.

    evaluate and predict use an override of this method.
    """
    names = trainer.signature.label_names
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    gives_loss = not names and bool(
        trainer.can_return_loss if inputs.get("return_loss") is None else inputs["return_loss"]
    )
    if ignore_keys is None:
        ignore_keys = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", CACHES)
    loss = labels = None
    if has_labels or gives_loss:
        labels = nested_detach(tuple(inputs.get(name) for name in names))
        labels = labels[0] if len(labels) == 1 else labels
        num_items = num_items_in(trainer, inputs)
        with trainer.compute_loss_context_manager():
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
    else:
        outputs = model(**inputs)
    if prediction_loss_only:
        return loss, None, None
    if isinstance(outputs, dict):
        drop = {*ignore_keys, "loss"} if loss is not None else set(ignore_keys)
        logits: Any = tuple(value for name, value in outputs.items() if name not in drop)
    else:
        logits = outputs[1:] if loss is not None and isinstance(outputs, list | tuple) else outputs
    logits = nested_detach(logits)
    return loss, logits[0] if isinstance(logits, list | tuple) and len(logits) == 1 else logits, labels


def looks_into_steps(callback: TrainerCallback) -> bool:
    """Return whether a callback overrides an event of the optimizer update."""
    own = (getattr(getattr(callback, event), "__func__", None) for event in OF_AN_UPDATE)
    return any(method is not getattr(TrainerCallback, event) for method, event in zip(own, OF_AN_UPDATE, strict=True))


def watch_updates(
    optimizer: torch.optim.Optimizer,
    callbacks: Sequence[TrainerCallback],
    call: Callable[[str], None],
    hooks: ExitStack,
) -> None:
    """Call the update events of the callbacks until `hooks` is closed.

    Gradients are clipped before the first event and still exist in the second one. The events are also called for
    updates that are skipped on the device.
    """
    if not any(map(looks_into_steps, callbacks)):
        return

    def before(updated: Any, *_: Any) -> None:
        # Apply the clipping here, because the fused update would only apply it later.
        if (scale := getattr(updated, "grad_scale", None)) is not None:
            for parameter in (each for group in updated.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            updated.grad_scale = None
        call("on_pre_optimizer_step")

    hooks.callback(optimizer.register_step_pre_hook(before).remove)
    hooks.callback(optimizer.register_step_post_hook(lambda *_: call("on_optimizer_step")).remove)


def rate_in_use(scheduler: AdafactorSchedule) -> float:
    """Return the rate of Adafactor's last update, derived from its state. Write it to `get_last_lr` and the groups."""
    optimizer: Any = scheduler.optimizer
    firsts = [(group, optimizer.state.get(group["params"][0])) for group in optimizer.param_groups]
    if all(state for _, state in firsts):
        scheduler._last_lr = [float(optimizer._get_lr(group, state)) for group, state in firsts]
        for (group, _), rate in zip(firsts, scheduler._last_lr, strict=True):
            group["lr"] = rate
    return float(scheduler.get_last_lr()[0])


class RecipeRates(LRScheduler):
    """A read-only scheduler that shows the recipe's rates to callbacks. The loop sets the rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float) -> None:
        self.optimizer, self.base_lrs = optimizer, [peak for _ in optimizer.param_groups]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate of each parameter group for the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class NextRates:
    """The learning rates of the next step, set before callbacks run. A change by a callback lasts one step."""

    def __init__(self, run: "RunContext") -> None:
        self._run, self._schedule, self._step = run, run.schedule, -1
        self._given: list[float] = []
        run.schedule = self

    def __call__(self, step: int) -> float | Sequence[float]:
        in_use = self._in_use()
        return in_use if step == self._step and in_use != self._given else self._schedule(step)

    def set(self, step: int) -> None:
        """Set the schedule's rates of a 0-based step."""
        self._run.set_learning_rate(step)
        self._step, self._given = step, self._in_use()

    def _in_use(self) -> list[float]:
        return [float(group["lr"]) for group in self._run.strategy.optimizer.param_groups]


def may_ask(callbacks: list[TrainerCallback]) -> bool:
    """Return whether a callback may request something. The host then waits for each step."""
    return any(type(callback) not in ASKS_NOTHING for callback in callbacks)


def signals_of_all(trainer: "Trainer") -> list[bool]:
    """* Return whether callbacks of any process ask to stop, to save, and to evaluate."""
    control = trainer.control
    signals = torch.tensor(
        [control.should_training_stop, control.should_save, control.should_evaluate], dtype=torch.int32
    )
    if trainer.args.world_size > 1:
        signals = signals.to(trainer.accelerator.device)
        dist.all_reduce(signals, op=dist.ReduceOp.MAX)
    return [bool(signal) for signal in signals.tolist()]


def sum_of_all(trainer: "Trainer", number: Any) -> float:
    """* Return the sum of a number, or of a one-element tensor, over all processes."""
    if trainer.args.world_size == 1:
        return float(number)
    total = torch.as_tensor(number, device=trainer.accelerator.device)
    dist.all_reduce(total)
    return float(total)


def stop_in_last_epoch(control: TrainerControl, length: Length, step: int) -> None:
    """Turn a callback's request to end the last epoch at this step into a request to stop.

    A request at the end of an epoch changes nothing.

    Raises:
        ValueError: the request concerns an epoch before the last one.
    """
    epochs, step_in_epoch = divmod(step, length.steps_per_epoch)
    if not control.should_epoch_stop or step_in_epoch == 0:
        return
    if epochs < length.num_epochs - 1:
        raise ValueError(
            f"a callback set control.should_epoch_stop at step {step}: which samples make a step is fixed beforehand, "
            "so no epoch but the last can end early; set should_training_stop, or lower num_train_epochs"
        )
    control.should_training_stop = True
