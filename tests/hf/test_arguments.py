"""TrainingArguments: every field is translated, honored or refused, and docs/hf_trainer.md says which."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import TrainingArguments

import accel_train
from accel_train.core.json_io import dotted_items
from accel_train.hf import Trainer
from accel_train.hf.argument_table import FIELDS
from accel_train.hf.arguments import check_arguments, length_of, to_recipe, with_decay_of
from accel_train.optim.optimizers import parameter_groups
from accel_train.recipe.names import recipe_names
from accel_train.recipe.schema import Recipe
from tests.support.hf_models import Given, Plain, arguments, bert, made, refused, rows, table
from tests.support.runs import REPOSITORY
from tests.support.wording import assert_generated, assert_golden, raises_golden

DOCS = REPOSITORY / "docs" / "hf_trainer.md"

# A value of each refused field (and of fields that are honored for some values only) that has to be an error.
REFUSED: Given = {
    "average_tokens_across_devices": False,
    "lr_scheduler_type": "greedy",
    "optim": "galore_adamw_layerwise",
    "save_only_model": True,
    "save_on_each_node": True,
    "accelerator_config": {"use_seedable_sampler": False},
    "train_sampling_strategy": "batch_rebalance",
    "ddp_static_graph": True,
    "debug": "tpu_metrics_debug",
}
RENAMED = {"activation_checkpointing", "activation_checkpointing_kwargs"}
"""Names that transformers has since 5.23."""
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
MULTI_LABEL = bert(problem_type="multi_label_classification")
MIN_RATE: Given = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
BEST: Given = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
INDEPENDENT: Given = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-4,
    "weight_decay": 0.05,
    "adam_beta1": 0.8,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "tf32": False,
    CHECKPOINTING: True,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "max-autotune",
    "full_determinism": True,
    "disable_tqdm": False,
    "per_device_eval_batch_size": 3,
    "save_total_limit": 3,
    "seed": 7,
    "dataloader_drop_last": True,
    "dataloader_num_workers": 2,
    "max_steps": 9,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "logging_steps": 7,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "train_sampling_strategy": "sequential",
}
"""Arguments that set leaves, whatever the others are."""
LEAVES: Given = {
    "batch.per_device_batch_size": 4,
    "batch.gradient_accumulation_steps": 2,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.05,
    "optimizer.betas": (0.8, 0.98),
    "optimizer.eps": 1e-6,
    "optimizer.max_grad_norm": 0.5,
    "loss.label_smoothing": 0.1,
    "precision.mixed_precision": "bf16",
    "precision.tf32": False,
    "precision.gradient_checkpointing": True,
    "precision.compile": True,
    "precision.compile_backend": "eager",
    "precision.compile_mode": "max-autotune",
    "precision.deterministic": True,
    "log.progress": False,
    "batch.per_device_eval_batch_size": 3,
    "checkpoint.keep": 3,
    "seed": 7,
    "data.last_batch": "drop",
    "data.num_workers": 2,
    "schedule.max_steps": 9,
    "schedule.type": "cosine",
    "schedule.warmup_steps": 3,
    "log.every_steps": 7,
    "evaluate.every_steps": 4,
    "data.shuffle": False,
}
TRANSLATED: list[tuple[Given, Given]] = [
    (INDEPENDENT, LEAVES),
    (MIN_RATE, {"schedule.min_lr_ratio": 0.1}),
    (BEST, {"checkpoint.load_best_model_at_end": True}),
    ({"num_train_epochs": 3}, {"schedule.max_steps": 15}),
    ({"warmup_steps": 0.25}, {"schedule.warmup_steps": 3}),
    ({"optim": "sgd"}, {"optimizer.name": "sgd"}),
    ({"optim": "adamw_bnb_8bit"}, {"optimizer.name": "adamw_8bit"}),
    ({"optim": "adamw_8bit"}, {"optimizer.name": "adamw_8bit"}),
    ({"optim": "sgd", "optim_args": "momentum=0.8"}, {"optimizer.momentum": 0.8}),
    ({"logging_steps": 0.3}, {"log.every_steps": 3}),
    ({"eval_strategy": "epoch"}, {"evaluate.every_steps": 5}),
    ({"save_strategy": "epoch"}, {"checkpoint.every_steps": 5}),
    ({"save_strategy": "best", "metric_for_best_model": "loss"}, {"checkpoint.keep_best": True}),
    ({"save_strategy": "steps", "save_steps": 0.5}, {"checkpoint.every_steps": 5}),
    (
        {"metric_for_best_model": "eval_f1"},
        {"evaluate.metric_for_best_model": "f1", "evaluate.greater_is_better": True},
    ),
    ({"train_sampling_strategy": "group_by_length"}, {"data.group_by_length": True}),
]


def recipe_of(args: TrainingArguments, model: Any = None, num_samples: int = 40) -> Recipe:
    model = model or Plain()
    length = length_of(args, num_samples, None, 1)
    recipe = to_recipe(args, length, model, resume="never", by_callbacks=False, has_eval=True, train_name="rows")
    return with_decay_of(recipe, model, Trainer.get_decay_parameter_names(None, model))


def set_field(args: TrainingArguments, name: str, value: Any) -> TrainingArguments:
    """As if it had been given: some values need hardware or packages that TrainingArguments ask for at once."""
    setattr(args, name, value)
    return args


def test_every_field_has_a_rule_and_no_rule_is_of_a_field_that_is_not_there() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert FIELDS.keys() - RENAMED <= fields <= FIELDS.keys()


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    assert_generated(DOCS, "hf/argument_table.py", table())


def test_every_refused_field_is_refused_by_name_with_its_value_and_a_remedy(tmp_path: Path) -> None:
    partly = {name for name, rule in FIELDS.items() if rule.allowed is not None}
    never = {name for name, rule in FIELDS.items() if rule.kind == "refused"}
    assert never <= REFUSED.keys()
    assert len(never) <= 8
    assert REFUSED.keys() <= partly
    early_or_unsaved = [("optim", optim) for optim in ("adamw_torch_8bit", "adamw_torch_4bit", "lomo")]
    for name, value in (*REFUSED.items(), *early_or_unsaved):
        args = set_field(arguments(tmp_path), name, value)
        error = refused(lambda args=args: check_arguments(args), name)
        shown = FIELDS[name].remedy or FIELDS[name].text
        assert (error.settings, error.problem) == ((name,), f"{name}={value!r}: {shown}")


def test_a_refused_field_stops_the_trainer_at_once_and_all_are_named(tmp_path: Path) -> None:
    given = {"save_only_model": True, "optim": "galore_adamw_layerwise"}
    error = refused(lambda: made(tmp_path, Plain(), **given), "save_only_model", "optim")
    assert "optim='galore_adamw_layerwise'" in error.problem


def test_defaults_and_fields_of_a_subclass_are_accepted_and_new_ones_of_transformers_are_refused_once_set(
    tmp_path: Path, monkeypatch: Any
) -> None:
    more = dataclasses.make_dataclass("More", [("labels_from", str, "file")], bases=(TrainingArguments,))
    check_arguments(more(str(tmp_path), use_cpu=True, labels_from="folder"))
    monkeypatch.delitem(FIELDS, "seed")
    check_arguments(TrainingArguments(str(tmp_path), use_cpu=True))
    error = refused(lambda: check_arguments(TrainingArguments(str(tmp_path), use_cpu=True, seed=7)), "seed")
    assert "seed=7" in error.problem


@pytest.mark.parametrize(("given", "expected"), TRANSLATED, ids=lambda value: ",".join(value)[:80])
def test_fields_become_leaves_of_the_recipe(tmp_path: Path, given: Given, expected: Given) -> None:
    leaves = dict(dotted_items(recipe_of(arguments(tmp_path, **given)).model_dump()))
    assert {name: leaves[name] for name in expected} == expected


def test_every_translated_field_is_in_the_test_above_and_names_leaves_that_exist() -> None:
    tested = {name for given, _ in TRANSLATED for name in given}
    elsewhere = {"output_dir", "fp16", "gradient_checkpointing", "greater_is_better", "dataloader_pin_memory"}
    sharded = {"fsdp", "fsdp_config", "deepspeed", "parallelism_config"}  # test_processes.py
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    translated = {name for name, rule in FIELDS.items() if rule.kind == "translated" and name in fields}
    assert translated <= tested | elsewhere | sharded
    for name in translated:
        assert FIELDS[name].leaves, name
        assert all(leaf in recipe_names() for leaf in FIELDS[name].leaves), name


def test_old_names_switches_and_tokens(tmp_path: Path) -> None:
    is_old = CHECKPOINTING != "gradient_checkpointing"
    with pytest.warns(FutureWarning, match="gradient_checkpointing") if is_old else nullcontext():
        args = arguments(tmp_path, gradient_checkpointing=True)
    assert recipe_of(args).precision.recomputed == "blocks"
    args = set_field(arguments(tmp_path, hub_token="hf_secret", greater_is_better=False), "fp16", True)
    recipe = recipe_of(args)
    assert recipe.precision.mixed_precision == "fp16"
    assert recipe.evaluate.greater_is_better is False
    assert recipe.output_dir == str(tmp_path)
    assert "hf_secret" not in recipe.model_dump_json()
    assert recipe.options["training_arguments"]["num_train_epochs"] == 2
    assert recipe_of(set_field(arguments(tmp_path), "dataloader_pin_memory", True)).data.pin_memory == "auto"
    assert recipe_of(arguments(tmp_path)).data.pin_memory is False  # TrainingArguments(use_cpu=True) switches it off


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": 0.0},
        {"warmup_steps": 50, "max_steps": 10},
        {"num_train_epochs": 0},
        {"adam_beta1": 1.5},
        {"seed": -1},
    ],
)
def test_a_value_that_breaks_a_rule_is_named_as_the_user_wrote_it(tmp_path: Path, given: Given) -> None:
    name, value = next(iter(given.items()))
    assert f"{name}={value}: " in refused(lambda: recipe_of(arguments(tmp_path, **given)), name).problem


def test_steps_and_epochs_are_counted_over_processes_and_without_a_length(tmp_path: Path) -> None:
    """On one process: the cases of test_training.py."""
    for given, num_samples, world_size, expected in (
        ({}, 45, 4, (2, 2, 4, 2)),
        ({"max_steps": 9}, None, 1, (9, 9, 9, 1)),
    ):
        found = length_of(arguments(tmp_path, **given), num_samples, None, world_size)
        assert (found.batches_per_epoch, found.steps_per_epoch, found.max_steps, found.num_epochs) == expected


def test_a_last_step_that_the_recipe_cannot_say_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, dataloader_drop_last=True, gradient_accumulation_steps=2)
    error = refused(lambda: length_of(args, 45, None, 1), "dataloader_drop_last", "gradient_accumulation_steps")
    assert_golden(str(error))
    refused(lambda: length_of(arguments(tmp_path, dataloader_drop_last=True), 3, None, 1), "train_dataset")


def test_weight_decay_falls_on_the_parameters_that_transformers_decays(tmp_path: Path) -> None:
    """Ours spares every class called norm; theirs decays a BatchNorm in a list."""

    class Mixed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Embedding(3, 4)])

    model = Mixed()
    for weight_decay in (0.0, 0.1):
        recipe = recipe_of(arguments(tmp_path, weight_decay=weight_decay), model)
        groups = parameter_groups(model, recipe.optimizer)
        ours = {name for group in groups for name, _ in group["params"] if group["weight_decay"]}
        assert ours == (set(Trainer.get_decay_parameter_names(None, model)) if weight_decay else set())
    assert "blocks.0.weight" in ours


@pytest.mark.parametrize(
    ("given", "settings", "fact"),
    [
        ({"model": None}, ["model", "model_init"], "exactly one"),
        ({"model_init": Plain}, ["model", "model_init"], "exactly one"),
        ({"tokenizer": 1, "processing_class": 2}, ["tokenizer", "processing_class"], "Give only one"),
        ({"data_collator": 3}, ["data_collator"], "data_collator=3"),
        ({"optimizers": (None, object())}, ["optimizers"], "Give both"),
        ({"optim": "galore_adamw", "optim_target_modules": ["layer"]}, ["optim"], "galore_torch"),
        (
            {"optim": "galore_adamw", "optim_target_modules": ["layer", "atn"]},
            ["optim_target_modules"],
            "'atn'; there is, for example, ",
        ),
        ({"eval_strategy": "epoch"}, ["eval_strategy"], "eval_dataset"),
        ({"use_liger_kernel": True}, ["use_liger_kernel"], "GPU"),
        ({"model": MULTI_LABEL, "label_smoothing_factor": 0.1}, ["label_smoothing_factor"], "0.1"),
        ({"save_strategy": "best"}, ["save_strategy", "metric_for_best_model"], "best"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_arguments_that_contradict_each_other_or_this_machine_are_refused_when_the_trainer_is_made(
    tmp_path: Path, given: Given, settings: list[str], fact: str
) -> None:
    assert fact in str(refused(lambda: made(tmp_path, given.pop("model", Plain()), **given), *settings))


def test_a_trainer_refuses_a_bucket() -> None:
    arguments = TrainingArguments("s3://bucket/run", use_cpu=True, report_to=[])
    told = refused(lambda: Trainer(Plain(), arguments), "output_dir")
    assert "a folder of this machine" in str(told)


def test_calls_without_data_are_refused(tmp_path: Path) -> None:
    trainer = made(tmp_path, Plain())
    for call in (trainer.evaluate, trainer.get_eval_dataloader):
        refused(call, "eval_dataset")
    for call in (trainer.train, trainer.get_train_dataloader):
        refused(call, "train_dataset")


def test_models_are_set_up_as_transformers_does(tmp_path: Path) -> None:
    model = bert()
    model.config.use_cache = True
    trainer = made(tmp_path, model, rows(16))
    assert model.config.use_cache is False
    assert trainer.label_names == ["labels"]
    assert trainer.signature.takes_num_items
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (8, 12)
    assert trainer.is_world_process_zero() is trainer.is_local_process_zero() is True


@pytest.mark.parametrize("name", ["DPOTrainer", "SFTConfig", "EarlyStoppingCallback"])
def test_a_name_of_trl_or_transformers_says_where_to_import_it_from(name: str) -> None:
    with raises_golden(ImportError):
        getattr(accel_train, name)
    with pytest.raises(AttributeError):
        accel_train.NoSuchTrainer  # noqa: B018
