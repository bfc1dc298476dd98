"""Every public method, constructor argument and event of the installed transformers has a true line in
docs/hf_trainer.md, and overridden methods find on the trainer what they find in transformers.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accel_train.hf import Trainer
from accel_train.hf.inputs import epoch_order
from tests.support.hf_models import (
    Plain,
    both,
    difference,
    history,
    llama,
    made,
    plain_rows,
    refused,
    rows,
    trained_plain,
)
from tests.support.runs import REPOSITORY

DOCS = (REPOSITORY / "docs" / "hf_trainer.md").read_text()


def lines() -> list[tuple[list[str], str]]:
    """The names and the verdict of each line of the table of methods and events."""
    table = DOCS.partition("## Every method and event")[2].partition("## Every argument")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [
        (re.findall(r"`(\w+)`", names)[0:], verdict) for names, verdict in cells if "transformers.Trainer" not in names
    ]


def named(verdict: str) -> list[str]:
    return [name for names, said in lines() for name in names if verdict in said]


def methods(kind: type) -> set[str]:
    return {name for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_every_public_method_and_event_of_transformers_has_a_line_and_no_line_is_of_another() -> None:
    events = {name for name in methods(transformers.TrainerCallback) if name.startswith("on_")}
    listed = [name for names, _ in lines() for name in names]
    here = methods(transformers.Trainer) | events
    assert here <= set(listed)
    assert len(listed) == len(set(listed))
    if transformers.__version__.startswith(("5.23.", "5.24.")):  # the newest that the table is of
        assert set(listed) <= here


def test_methods_that_are_called_here_are_here_under_the_same_arguments() -> None:
    for name in {*named("called where"), *named("to call")} & methods(transformers.Trainer):
        theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (transformers.Trainer, Trainer))
        if not transformers.__version__.startswith(("5.23.", "5.24.")):
            continue  # of the others some take fewer
        takes_any = any(each.kind is each.VAR_KEYWORD for each in ours.values())
        assert list(ours)[1:] == list(theirs)[1:] or takes_any, name


HELPERS = {"_prepare_inputs": "training_step", "_get_train_sampler": "get_train_dataloader", "_save": "save_model"}


@pytest.mark.parametrize("name", [*named("refused"), *HELPERS])
def test_methods_that_are_never_called_are_refused_as_overrides(tmp_path: Path, name: str) -> None:
    own = type("Own", (Trainer,), {name: lambda self, *args: None})
    error = refused(lambda: made(tmp_path, Plain(), kind=own), f"Own.{name}")
    assert HELPERS.get(name, "callback") in error.problem


def test_no_attribute_of_the_class_is_a_function_of_another_module() -> None:
    """Methods stand in the class, where a reader looks for them."""
    functions = [getattr(value, "__func__", value) for value in vars(Trainer).values()]
    assert {each.__module__ for each in functions if inspect.isfunction(each)} == {Trainer.__module__}


def test_the_constructor_takes_every_argument_of_transformers_in_its_order() -> None:
    theirs, ours = (list(inspect.signature(kind.__init__).parameters) for kind in (transformers.Trainer, Trainer))
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == ["tokenizer", "match_transformers"]


def test_methods_are_callable_before_train(tmp_path: Path) -> None:
    trainer = made(tmp_path, Plain(), plain_rows(4))
    assert trainer.get_num_trainable_parameters() == 27
    assert trainer.get_total_train_batch_size() == 8
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    assert trainer.get_learning_rates() == [1e-3, 1e-3]
    assert trainer.get_optimizer_group(trainer.model.layer.weight)["lr"] == 1e-3
    assert trainer.num_examples(trainer.get_train_dataloader()) == 4
    assert trainer.metrics_format({"loss": 0.123456}) == {"loss": 0.1235}


def test_a_loader_of_the_base_with_another_collator_is_read_as_it_is_and_shuffled_anew(tmp_path: Path) -> None:
    firsts: list[Any] = []

    class Collated(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            own = loader.collate_fn
            loader.collate_fn = lambda samples: own(samples[:1] * len(samples))
            return loader

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            assert inputs["features"].std(0).max() == 0.0
            firsts.append(inputs["features"][0].tolist())
            return super().compute_loss(model, inputs, **kwargs)

    trainer = trained_plain(tmp_path, 16, kind=Collated)
    order = epoch_order(trainer.args, trainer.train_dataset)
    assert [*trainer.get_train_dataloader().sampler] == order(0).tolist()
    assert len(firsts) == 4
    assert firsts[:2] != firsts[2:]


def test_weights_in_bf16_are_trained(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(24)]
    theirs, ours, *_ = both(tmp_path, lambda: llama().to(torch.bfloat16), max_steps=4, train_dataset=data)
    assert difference(theirs.model, ours.model) < 1e-2
    assert history(ours)[0]["loss"] == pytest.approx(history(theirs)[0]["loss"], abs=0.02)
