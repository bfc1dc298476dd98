"""Every field of `transformers.TrainingArguments` and its treatment here: the table of docs/hf_trainer.md.

A field is translated into recipe fields, honored by the Trainer itself, or refused. A refused field accepts only values
without any effect. Other values raise a ValueError that names the field, its value, and the remedy.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass
from functools import partial
from operator import not_
from typing import Any, Literal

from transformers import TrainingArguments

from accel_train.core.errors import SettingError


def argument_error(problem: str, remedy: str = "", *names: str, **values: Any) -> SettingError:
    """Return the error about some arguments, given by name, or by name with their values."""
    at = ", ".join((*names, *(f"{name}={value!r}" for name, value in values.items())))
    return SettingError(problem, remedy, at, (*names, *values))


@dataclass(frozen=True)
class Rule:
    """The rule for one field."""

    kind: Literal["translated", "honored", "refused"]
    text: str
    """Text in the last column of the table."""
    allowed: Callable[[Any], bool] | None = None
    """Predicate of supported values. None: all. The remedy for other values is `remedy`, or `text` by default."""
    remedy: str = ""
    leaves: tuple[str, ...] = ()
    """Recipe fields that the argument sets."""
    value_of: Callable[[Any], Any] | None = None
    """Function from the argument to the recipe field. None: `to_recipe` computes the field from several arguments."""


def leaf(name: str, value_of: Callable[[Any], Any] = lambda value: value, **rule: Any) -> Rule:
    """Return the rule of an argument that sets one recipe field alone."""
    return computed(name, value_of=value_of, **rule)


def computed(*names: str, note: str = "", text: str = "", **rule: Any) -> Rule:
    """Return the rule of an argument that sets recipe fields together with other arguments."""
    shown = " and ".join(f"`{name}`" for name in names) + (f": {note}" if note else "")
    return Rule("translated", text or shown, leaves=names, **rule)


honored = partial(Rule, "honored")
"""Returns the rule of an argument that the Trainer itself honors."""
refused = partial(Rule, "refused", allowed=not_)
"""Returns a rule that accepts only values without any effect: false and empty ones."""


def name_of(value: Any) -> str:
    """Return the text of an enum value of transformers. Scripts may also set it as plain text."""
    return str(getattr(value, "value", value))


def _or_auto(value: Any) -> Any:
    return "auto" if value is None else value


def accelerator_settings(config: Any) -> Mapping[str, Any]:
    """Return the fields of an `accelerator_config`, given as a dict, an object, or None."""
    return config if isinstance(config, dict) else {} if config is None else config.to_dict()


def _known_accelerator_config(config: Any) -> bool:
    settings = accelerator_settings(config)
    return settings.get("use_seedable_sampler", True) and not settings.get("gradient_accumulation_kwargs")


OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
}
"""Recipe optimizers (`optimizer.name`) by `optim`."""


def is_momentum(optim_args: str | None) -> bool:
    """Return whether `optim_args` is only `momentum=NUMBER`."""
    return re.fullmatch(r"\s*momentum\s*=\s*[\d.eE+-]+\s*", optim_args or "") is not None


def has_recipe_optimizer(args: TrainingArguments) -> bool:
    """Return whether the recipe can build the optimizer of `optim`. Transformers builds the others."""
    takes_args = not args.optim_args or (args.optim == "sgd" and is_momentum(args.optim_args))
    return name_of(args.optim) in OPTIMIZERS and takes_args


KEEP_ALL = 1_000_000
"""Number of kept checkpoints for `save_total_limit=None`, more than a run writes."""

FIELDS: dict[str, Rule] = {
    # Output folder, batch sizes, and length of training
    "output_dir": leaf("output_dir", note="the run folder"),
    "per_device_train_batch_size": computed("batch.per_device_batch_size"),
    "num_train_epochs": computed("schedule.max_steps", note="times the steps of an epoch, unless max_steps is set"),
    "max_steps": computed("schedule.max_steps"),
    "gradient_accumulation_steps": leaf("batch.gradient_accumulation_steps"),
    "average_tokens_across_devices": honored(
        "always: the loss is a sum divided once by the targets of the global batch",
        allowed=bool,
        remedy="leave it True: the loss is always divided by the targets of all devices",
    ),
    "auto_find_batch_size": honored(
        "always: after out of memory, a step repeats with smaller micro-batches of the same global batch"
    ),
    # Optimizer and schedule
    "learning_rate": leaf("optimizer.learning_rate"),
    "lr_scheduler_type": computed(
        "schedule.type",
        text="`schedule.type`; transformers' scheduler sets the rates if the recipe has no field for the kwargs",
        allowed=lambda value: name_of(value) != "greedy",
        remedy="the rate needs the loss of every step, so the host would wait; use cosine, or reduce_lr_on_plateau",
    ),
    "lr_scheduler_kwargs": computed("schedule.min_lr_ratio", "schedule.num_cycles", "schedule.power", note="as above"),
    "warmup_steps": computed("schedule.warmup_steps", note="below 1, a fraction of all steps, rounded up"),
    "optim": leaf(
        "optimizer.name",
        lambda value: OPTIMIZERS.get(name_of(value), "adamw"),
        note=f"{', '.join(OPTIMIZERS)}; transformers makes any other, and its scheduler sets the rates",
        allowed=lambda value: not re.search("layerwise|lomo|adamw_torch_[48]bit", name_of(value)),
        remedy=(
            "layerwise and LOMO optimizers update weights during backward, before a bad step can be skipped, and "
            "checkpoints cannot hold the state of torchao's 4-bit and 8-bit optimizers; use another (adamw_bnb_8bit)"
        ),
    ),
    "optim_args": leaf(
        "optimizer.momentum",
        lambda value: float(value.split("=")[1]) if is_momentum(value) else 0.0,
        text="`optimizer.momentum` for sgd; otherwise passed to the optimizer that transformers makes",
    ),
    "optim_target_modules": honored("by the optimizer that transformers makes (GaLore, APOLLO)"),
    "weight_decay": leaf("optimizer.weight_decay", note="on the parameters that transformers decays"),
    "adam_beta1": computed("optimizer.betas"),
    "adam_beta2": computed("optimizer.betas"),
    "adam_epsilon": leaf("optimizer.eps"),
    "max_grad_norm": leaf("optimizer.max_grad_norm", lambda value: value or 0.0),
    "label_smoothing_factor": leaf("loss.label_smoothing", note="by transformers' LabelSmoother, in evaluation too"),
    # Precision and speed
    "bf16": computed("precision.mixed_precision"),
    "fp16": computed("precision.mixed_precision", note="with a loss scale that starts at 2^14 and has a floor"),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        honored("evaluate and predict outside train() cast the model permanently, as in transformers"),
    ),
    "tf32": leaf("precision.tf32", _or_auto),
    "activation_checkpointing": computed("precision.gradient_checkpointing"),
    "activation_checkpointing_kwargs": honored("passed to the model's activation_checkpointing_enable"),
    "gradient_checkpointing": computed("precision.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": honored("the old name of activation_checkpointing_kwargs"),
    "torch_compile": leaf("precision.compile", bool, note="block by block if the model repeats blocks"),
    "torch_compile_backend": leaf("precision.compile_backend", lambda value: value or "inductor"),
    "torch_compile_mode": leaf("precision.compile_mode", lambda value: value or "default"),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        honored(
            "by transformers' apply_liger_kernel when the trainer is made (package liger-kernel); refused on a CPU"
        ),
    ),
    "use_cache": honored("set on model.config, as in transformers"),
    "neftune_noise_alpha": honored("by transformers' hook on the embedding, during train()"),
    "torch_empty_cache_steps": honored("number of steps between two clearings of the device's cache"),
    "full_determinism": leaf("precision.deterministic"),
    "use_cpu": honored("TrainingArguments chooses the device, and the run follows it"),
    # Logging
    "logging_strategy": honored("by DefaultFlowCallback: when to log to state.log_history"),
    "logging_steps": computed("log.every_steps", note="below 1, a fraction of all steps; also for metrics.jsonl"),
    "logging_first_step": honored("by DefaultFlowCallback"),
    "log_on_each_node": honored("as in transformers: which processes set log_level"),
    "logging_nan_inf_filter": honored("both values: a NaN is logged as NaN, with the number of skipped steps"),
    "include_num_input_tokens_seen": honored(
        "`all` and `non_padding`, in the log and in the state; the host then waits for every step"
    ),
    **dict.fromkeys(("log_level", "log_level_replica"), honored("sets transformers' verbosity")),
    "disable_tqdm": leaf(
        "log.progress",
        lambda value: False,
        note="by ProgressCallback, or with True PrinterCallback, as in transformers",
    ),
    "report_to": honored("by transformers' reporting callbacks, which receive the log"),
    **dict.fromkeys(("run_name", "project"), honored("by transformers' reporting callbacks")),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        honored("by transformers' TrackioCallback"),
    ),
    # Evaluation
    "eval_strategy": computed("evaluate.every_steps", note="epoch: the steps of an epoch"),
    "eval_steps": computed("evaluate.every_steps", note="below 1, a fraction of all steps"),
    "eval_delay": honored("by DefaultFlowCallback; the host then waits for every step"),
    "per_device_eval_batch_size": leaf("batch.per_device_eval_batch_size"),
    "prediction_loss_only": honored("predict and evaluate keep no predictions"),
    "eval_on_start": honored("evaluate() before the first step"),
    "eval_do_concat_batches": honored("False: predictions and labels are lists of batches"),
    "eval_use_gather_object": honored("always: predictions are gathered as objects of any shape"),
    "eval_accumulation_steps": honored("always 1: predictions move to the host after each batch"),
    "include_for_metrics": honored("inputs and loss are passed to compute_metrics"),
    "batch_eval_metrics": honored("compute_metrics receives one batch at a time; compute_result=True marks the last"),
    # Checkpoints
    "save_only_model": refused("a resume needs the optimizer in each checkpoint; `model/` holds only weights"),
    "save_strategy": computed("checkpoint.every_steps", "checkpoint.keep_best", note="no saves the last step, too"),
    "save_steps": computed("checkpoint.every_steps", note="below 1, a fraction of all steps"),
    "save_on_each_node": refused("the main process writes checkpoints; put output_dir on storage that all nodes share"),
    "save_total_limit": leaf("checkpoint.keep", lambda value: value or KEEP_ALL, note="one more until the end"),
    "enable_jit_checkpoint": honored("always: SIGTERM saves after the current step, and train() raises Preempted"),
    "load_best_model_at_end": leaf("checkpoint.load_best_model_at_end"),
    "metric_for_best_model": leaf(
        "evaluate.metric_for_best_model",
        lambda value: (value or "loss").removeprefix("eval_"),
        note="without its eval_ prefix",
    ),
    "greater_is_better": leaf("evaluate.greater_is_better", _or_auto),
    "ignore_data_skip": honored("always: a resume does not read earlier samples; True does not restart the epoch"),
    "restore_callback_states_from_checkpoint": honored("callbacks that export a state get the checkpoint's state back"),
    "resume_from_checkpoint": honored("not read, as in transformers: pass it to train()"),
    # Hub
    "push_to_hub": honored("through huggingface_hub, after each save and at the end, as hub_strategy says"),
    "hub_token": honored("never written anywhere"),
    "hub_private_repo": honored("when the repository is created"),
    "hub_model_id": honored("the repository; default: the name of output_dir"),
    "hub_strategy": honored("end, every_save, checkpoint, all_checkpoints"),
    "hub_always_push": honored("False: a save is not pushed while the previous push still runs"),
    "hub_revision": honored("the branch"),
    # Reproducibility and data
    "seed": leaf("seed"),
    "data_seed": honored("epoch e has the order of torch.randperm with seed data_seed (default: seed) + e"),
    "accelerator_config": honored(
        "`split_batches`: a batch size counts all processes; `dispatch_batches`, `even_batches`, `non_blocking`: "
        "both values give the same batches",
        allowed=_known_accelerator_config,
        remedy=(
            "use_seedable_sampler=False and gradient_accumulation_kwargs let Accelerate decide order and accumulation; "
            "remove them"
        ),
    ),
    "parallelism_config": computed("parallel.dp_shard_size", note="with data parallelism; otherwise accel-train run"),
    "dataloader_drop_last": leaf(
        "data.last_batch", lambda value: "drop" if value else "short", note="False: short; True: drop"
    ),
    "dataloader_num_workers": leaf("data.num_workers"),
    "dataloader_pin_memory": leaf("data.pin_memory", lambda value: "auto" if value else False, note="True: on a GPU"),
    "dataloader_persistent_workers": honored("always in training: the same workers read the whole run"),
    "dataloader_prefetch_factor": honored("micro-batches that each worker reads ahead; default: 4"),
    "dataloader_multiprocessing_context": honored("fork, spawn or forkserver"),
    "dataloader_in_order": honored("always: the order stays, even where transformers takes any ready batch (False)"),
    "remove_unused_columns": honored("by the signature of the model's forward, as in transformers"),
    "label_names": honored("the inputs that are labels; default: by the signature of the model's forward"),
    "train_sampling_strategy": computed(
        "data.shuffle",
        "data.group_by_length",
        note="random, sequential, group_by_length",
        allowed=lambda value: value in ("random", "sequential", "group_by_length"),
        remedy="use random, sequential or group_by_length",
    ),
    "length_column_name": honored("the lengths for group_by_length"),
    # Launching
    "ddp_find_unused_parameters": honored("default: as transformers chooses for its own models"),
    "ddp_bucket_cap_mb": honored("passed to DDP"),
    "ddp_broadcast_buffers": honored("always if a model has running statistics: all processes keep the same ones"),
    "ddp_static_graph": refused("a step that is skipped or repeated has another graph; remove it"),
    **dict.fromkeys(("ddp_backend", "ddp_timeout"), honored("TrainingArguments starts the process group")),
    "fsdp": computed("parallel.strategy", note="fsdp2, block by block"),
    "fsdp_config": computed(
        "parallel.reshard_after_forward",
        "parallel.cpu_offload",
        "precision.gradient_checkpointing",
        note="other keys do not change results and are not read; FSDP1 is refused",
    ),
    "deepspeed": computed(
        "parallel.strategy", "parallel.zero_stage", note="ZeRO 1 to 3; other keys must be `auto` or match the arguments"
    ),
    "debug": honored(
        "underflow_overflow: transformers' DebugUnderflowOverflow watches the model",
        allowed=lambda value: "tpu" not in str(value).lower(),
        remedy="XLA is not supported; remove it",
    ),
    "skip_memory_metrics": honored("False: transformers' TrainerMemoryTracker adds its metrics"),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), honored("not read, as in transformers: your script reads it")
    ),
    "local_rank": honored("not read, as in transformers: the launcher sets it"),
}


def check_fields(args: Any, known: Iterable[Field[Any]], rules: Mapping[str, Rule], kind: str, trainer: str) -> None:
    """Check that the known fields of a trainer's arguments have supported values.

    A field without a rule is one of another version of transformers or TRL. It has to keep its default.

    Raises:
        SettingError: a field has another value. The message names each such field, its value, and the remedy.
    """
    problems = {}
    for field in known:
        value, rule = getattr(args, field.name), rules.get(field.name)
        said = f"{field.name}={getattr(value, 'value', value)!r}"
        if rule is None:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if value != default:
                problems[field.name] = f"{said}: accel_train.{trainer} does not know this field; remove it"
        elif rule.allowed is not None and not rule.allowed(value):
            problems[field.name] = f"{said}: {rule.remedy or rule.text}"
    if problems:
        at = f"{kind} that accel_train.{trainer} cannot honor"
        raise SettingError("; ".join(problems.values()), at=at, settings=tuple(problems))
