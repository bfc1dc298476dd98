"""Every field of `transformers.TrainingArguments` and its treatment here: the table of docs/hf_trainer.md.

A field is translated into recipe fields, honored by the Trainer itself, or refused. A refused field accepts only values
without any effect. Other values raise a ValueError that names the field, its value, and the remedy.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainingArguments

from accel_train.hf.sharding import accelerator_settings

Allowed = Callable[[Any], bool]


@dataclass(frozen=True)
class Rule:
    """The rule for one field."""

    kind: Literal["translated", "honoured", "refused"]
    text: str
    """Text in the last column of the table."""
    allowed: Allowed | None = None
    """Predicate of supported values. None: all. The remedy for other values is `remedy`, or `text` by default."""
    remedy: str = ""
    leaves: tuple[str, ...] = ()
    """Recipe fields that the argument sets."""
    value_of: Callable[[Any], Any] | None = None
    """Function from the argument to the recipe field. None: `to_recipe` computes the field from several arguments."""


def leaf(name: str, value_of: Callable[[Any], Any] = lambda value: value, *, note: str = "", **rule: Any) -> Rule:
    """Return the rule of an argument that sets one recipe field alone."""
    return computed(name, note=note, value_of=value_of, **rule)


def computed(*names: str, note: str = "", text: str = "", **rule: Any) -> Rule:
    """Return the rule of an argument that sets recipe fields together with other arguments."""
    shown = " and ".join(f"`{name}`" for name in names) + (f": {note}" if note else "")
    return Rule("translated", text or shown, leaves=names, **rule)


def honoured(how: str, *, allowed: Allowed | None = None, remedy: str = "") -> Rule:
    """Return the rule of an argument that the Trainer itself honors."""
    return Rule("honoured", how, allowed, remedy)


def refused(remedy: str, *, allowed: Allowed | None = None) -> Rule:
    """Return a rule that accepts only values without any effect: `allowed`, or by default false and empty values."""
    return Rule("refused", remedy, allowed or (lambda value: not value))


def _is(*values: Any) -> Allowed:
    return lambda value: any(value is known or value == known for known in values)


def name_of(value: Any) -> str:
    """Return the text of an enum value of transformers. Scripts may also set it as plain text."""
    return str(getattr(value, "value", value))


def _or_auto(value: Any) -> Any:
    return "auto" if value is None else value


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
    "num_train_epochs": computed("schedule.max_steps", note="times the steps of an epoch, unless max_steps is given"),
    "max_steps": computed("schedule.max_steps"),
    "gradient_accumulation_steps": leaf("batch.gradient_accumulation_steps"),
    "average_tokens_across_devices": honoured(
        "always: the loss is a sum divided once by the targets of the global batch",
        allowed=bool,
        remedy="leave it True: the loss is always divided by the targets of all devices",
    ),
    "auto_find_batch_size": honoured(
        "always: a step that runs out of memory is made again with smaller micro-batches, of the same global batch"
    ),
    # Optimizer and schedule
    "learning_rate": leaf("optimizer.learning_rate"),
    "lr_scheduler_type": computed(
        "schedule.type",
        text="`schedule.type`; where the recipe has no field for the kwargs, transformers' scheduler gives all rates",
        allowed=lambda value: name_of(value) != "greedy",
        remedy=(
            "its rate depends on each step's loss, for which the host would wait; use cosine, or reduce_lr_on_plateau"
        ),
    ),
    "lr_scheduler_kwargs": computed("schedule.min_lr_ratio", "schedule.num_cycles", "schedule.power", note="as above"),
    "warmup_steps": computed("schedule.warmup_steps", note="below 1, a fraction of all steps, rounded up"),
    "optim": leaf(
        "optimizer.name",
        lambda value: OPTIMIZERS.get(name_of(value), "adamw"),
        note=f"{', '.join(OPTIMIZERS)}; any other is made by transformers, whose scheduler then gives the rates",
        allowed=lambda value: not re.search("layerwise|lomo|adamw_torch_[48]bit", name_of(value)),
        remedy=(
            "layerwise and LOMO optimizers update weights within the backward pass, before a bad step can be skipped, "
            "and no checkpoint can hold the state of torchao's 4-bit and 8-bit ones; use another (adamw_bnb_8bit, say)"
        ),
    ),
    "optim_args": leaf(
        "optimizer.momentum",
        lambda value: float(value.split("=")[1]) if is_momentum(value) else 0.0,
        text="`optimizer.momentum` for sgd; any other goes to the optimizer that transformers makes",
    ),
    "optim_target_modules": honoured("by the optimizer that transformers makes (GaLore, APOLLO)"),
    "weight_decay": leaf("optimizer.weight_decay", note="on the parameters that transformers decays"),
    "adam_beta1": computed("optimizer.betas"),
    "adam_beta2": computed("optimizer.betas"),
    "adam_epsilon": leaf("optimizer.eps"),
    "max_grad_norm": leaf("optimizer.max_grad_norm", lambda value: value or 0.0),
    "label_smoothing_factor": leaf(
        "loss.label_smoothing", note="computed by transformers' LabelSmoother, in evaluation too"
    ),
    # Precision and speed
    "bf16": computed("precision.mixed_precision"),
    "fp16": computed("precision.mixed_precision", note="with a loss scale that starts at 2^14 and has a floor"),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        honoured("evaluate and predict outside train() cast the model to it, for good, as in transformers"),
    ),
    "tf32": leaf("precision.tf32", _or_auto),
    "activation_checkpointing": computed("precision.gradient_checkpointing"),
    "activation_checkpointing_kwargs": honoured("passed to the model's activation_checkpointing_enable"),
    "gradient_checkpointing": computed("precision.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": honoured("the old name of activation_checkpointing_kwargs"),
    "torch_compile": leaf("precision.compile", bool, note="block by block where the model repeats blocks"),
    "torch_compile_backend": leaf("precision.compile_backend", lambda value: value or "inductor"),
    "torch_compile_mode": leaf("precision.compile_mode", lambda value: value or "default"),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        honoured(
            "by transformers' apply_liger_kernel, when the model is taken (package liger-kernel); refused on a CPU"
        ),
    ),
    "use_cache": honoured("set on model.config, as transformers does"),
    "neftune_noise_alpha": honoured("by transformers' hook on the embedding, while train() runs"),
    "torch_empty_cache_steps": honoured("the device's cache is emptied after every so many steps"),
    "full_determinism": leaf("precision.deterministic"),
    "use_cpu": honoured("TrainingArguments itself chooses the device, and the run follows it"),
    # Logging
    "logging_strategy": honoured("by DefaultFlowCallback: what goes into state.log_history, and when"),
    "logging_steps": computed(
        "log.every_steps", note="below 1, a fraction of all steps; metrics.jsonl has its lines there too"
    ),
    "logging_first_step": honoured("by DefaultFlowCallback"),
    "log_on_each_node": honoured("as transformers: who sets log_level"),
    "logging_nan_inf_filter": honoured(
        "never: a NaN is logged as NaN, with the number of skipped steps; both values are accepted"
    ),
    "include_num_input_tokens_seen": honoured(
        "`all` and `non_padding`, in the log and in the state; the host then waits for every step"
    ),
    **dict.fromkeys(("log_level", "log_level_replica"), honoured("sets transformers' verbosity, as there")),
    "disable_tqdm": leaf(
        "log.progress",
        lambda value: False,
        note="by ProgressCallback, or with True PrinterCallback, as in transformers",
    ),
    "report_to": honoured("by transformers' own reporting callbacks, which are given what is logged"),
    **dict.fromkeys(("run_name", "project"), honoured("by those reporting callbacks")),
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        honoured("by transformers' TrackioCallback"),
    ),
    # Evaluation
    "eval_strategy": computed("evaluate.every_steps", note="epoch: the steps of an epoch"),
    "eval_steps": computed("evaluate.every_steps", note="below 1, a fraction of all steps"),
    "eval_delay": honoured("by DefaultFlowCallback; the host then waits for every step"),
    "per_device_eval_batch_size": leaf("batch.per_device_eval_batch_size"),
    "prediction_loss_only": honoured("predict and evaluate keep no predictions"),
    "eval_on_start": honoured("evaluate() before the first step"),
    "eval_do_concat_batches": honoured("False: predictions and labels are lists of batches"),
    "eval_use_gather_object": honoured("always: predictions are gathered as objects, of any shape"),
    "eval_accumulation_steps": honoured("always 1: predictions go to the host batch by batch, so the GPU holds one"),
    "include_for_metrics": honoured("inputs and loss are passed to compute_metrics"),
    "batch_eval_metrics": honoured("compute_metrics gets batch by batch, and compute_result=True with the last"),
    # Checkpoints
    "save_only_model": refused(
        "checkpoints hold the optimizer, so that a run can resume from them; `model/` holds weights only"
    ),
    "save_strategy": computed("checkpoint.every_steps", "checkpoint.keep_best", note="the last step is always saved"),
    "save_steps": computed("checkpoint.every_steps", note="below 1, a fraction of all steps"),
    "save_on_each_node": refused("the main process writes checkpoints; give output_dir on storage that all nodes see"),
    "save_total_limit": leaf("checkpoint.keep", lambda value: value or KEEP_ALL, note="newest ones, and the best"),
    "enable_jit_checkpoint": honoured("always: SIGTERM saves after the step that runs, and train() raises Preempted"),
    "load_best_model_at_end": leaf("checkpoint.load_best_model_at_end"),
    "metric_for_best_model": leaf(
        "evaluate.metric_for_best_model",
        lambda value: (value or "loss").removeprefix("eval_"),
        note="without its eval_ prefix",
    ),
    "greater_is_better": leaf("evaluate.greater_is_better", _or_auto),
    "ignore_data_skip": honoured(
        "always: a resume reads none of the samples before its step; True begins no epoch anew either"
    ),
    "restore_callback_states_from_checkpoint": honoured("callbacks that export a state get back the checkpoint's"),
    "resume_from_checkpoint": honoured("not read by transformers' Trainer either: pass it to train()"),
    # Hub
    "push_to_hub": honoured("through huggingface_hub, after each save and at the end, as hub_strategy says"),
    "hub_token": honoured("never written anywhere"),
    "hub_private_repo": honoured("when the repository is created"),
    "hub_model_id": honoured("the repository; none: the name of output_dir"),
    "hub_strategy": honoured("end, every_save, checkpoint, all_checkpoints"),
    "hub_always_push": honoured("False: a save is not pushed while the last push is under way"),
    "hub_revision": honoured("the branch"),
    # Reproducibility and data
    "seed": leaf("seed"),
    "data_seed": honoured(
        "the order of epoch e is torch.randperm of the seed data_seed (none: seed) + e, as in transformers"
    ),
    "accelerator_config": honoured(
        "`split_batches`: a batch size is that of all processes; `dispatch_batches`, `even_batches`, `non_blocking`: "
        "both values give the same batches",
        allowed=_known_accelerator_config,
        remedy=(
            "use_seedable_sampler=False and gradient_accumulation_kwargs leave the order and the accumulation to "
            "Accelerate; leave them out"
        ),
    ),
    "parallelism_config": computed(
        "parallel.dp_shard_size", note="and data parallelism around it; else accel-train run"
    ),
    "dataloader_drop_last": leaf(
        "data.last_batch", lambda value: "drop" if value else "short", note="False: short; True: drop"
    ),
    "dataloader_num_workers": leaf("data.num_workers"),
    "dataloader_pin_memory": leaf(
        "data.pin_memory", lambda value: "auto" if value else False, note="True: where there is a GPU"
    ),
    "dataloader_persistent_workers": honoured("always in training: one set of workers reads the whole run"),
    "dataloader_prefetch_factor": honoured("micro-batches that each worker reads ahead; none: 4"),
    "dataloader_multiprocessing_context": honoured("fork, spawn or forkserver"),
    "dataloader_in_order": honoured(
        "always: False lets transformers train on whichever batch is ready; here the order stays"
    ),
    "remove_unused_columns": honoured("by the signature of the model's forward, as in transformers"),
    "label_names": honoured("which inputs are labels; none: by the signature of the model's forward"),
    "train_sampling_strategy": computed(
        "data.shuffle",
        "data.group_by_length",
        note="random, sequential, group_by_length",
        allowed=_is("random", "sequential", "group_by_length"),
        remedy="use random, sequential or group_by_length",
    ),
    "length_column_name": honoured("the lengths for group_by_length"),
    # Launching
    "ddp_find_unused_parameters": honoured("none: as in transformers, for its own models"),
    "ddp_bucket_cap_mb": honoured("passed to DDP"),
    "ddp_broadcast_buffers": honoured(
        "always where a model has running statistics: they are kept alike on all processes"
    ),
    "ddp_static_graph": refused("a step that is skipped or made again has another graph; leave it out"),
    **dict.fromkeys(("ddp_backend", "ddp_timeout"), honoured("TrainingArguments itself starts the process group")),
    "fsdp": computed("parallel.strategy", note="fsdp2, block by block"),
    "fsdp_config": computed(
        "parallel.reshard_after_forward",
        "parallel.cpu_offload",
        "precision.gradient_checkpointing",
        note="the other keys change no result, and nothing here; FSDP1 is refused",
    ),
    "deepspeed": computed(
        "parallel.strategy",
        "parallel.zero_stage",
        note="ZeRO 1 to 3; what else its configuration says has to be `auto`, or what the arguments say",
    ),
    "debug": honoured(
        "underflow_overflow: transformers' DebugUnderflowOverflow watches the model",
        allowed=lambda value: "tpu" not in str(value).lower(),
        remedy="XLA is not here; leave it out",
    ),
    "skip_memory_metrics": honoured("False: transformers' TrainerMemoryTracker adds its metrics"),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"),
        honoured("not read by transformers' Trainer either: it is for your script"),
    ),
    "local_rank": honoured("not read by transformers' Trainer either: the launcher says it"),
}


def table() -> str:
    """Return the table of docs/hf_trainer.md, with a line per field."""
    lines = ["| TrainingArguments | here | how, or what to do instead |", "|---|---|---|"]
    for name, rule in FIELDS.items():
        remedy = f"; refused else: {rule.remedy}" if rule.remedy else ""
        lines.append(f"| `{name}` | {rule.kind} | {rule.text}{remedy} |")
    return "\n".join(lines)
