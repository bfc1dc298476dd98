"""Find the task of the user's data, write its recipe, and train it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from accel_train.core.redaction import redact_text
from accel_train.core.state import Choices
from accel_train.core.terminal import is_main, print_line
from accel_train.experiments.finetune import recipe as own
from accel_train.experiments.finetune.unpack import unpacked
from accel_train.recipe.loader import Recipe, make_recipe
from accel_train.recipe.yaml_core import one_line

if TYPE_CHECKING:
    from accel_train.training.train import RunResult


@dataclass(frozen=True)
class Written:
    """The recipe that was written for the user's data."""

    recipe: Recipe
    path: Path
    is_new: bool
    """Whether the file was written. False if it existed with the same settings."""
    found: own.Found
    choices: Choices
    """Recognized and chosen settings, with reasons."""

    def lines(self, *, show_all: bool = False) -> list[str]:
        """Return lines about the data and the main decisions, or with `show_all` each decision, and about the file."""
        lines = own.format_choices(self.found, self.choices, self.recipe, show_all=show_all)
        if not show_all:
            as_it_was = "" if self.is_new else " (as it was)"
            return [*lines, f"all settings and reasons: {self.path}{as_it_was}"]
        place = quote(str(self.path))
        file = (
            f"recipe: {self.path} ({'written' if self.is_new else 'as it was'}; edit it, and `accel-train run {place}`)"
        )
        return [*lines, file, *own.how_to_test(self.found, self.recipe)]


def write_recipe(
    path: str,
    settings: Sequence[str],
    *,
    model: str | None = None,
    text: Sequence[str] = (),
    label: Sequence[str] = (),
    group: str | None = None,
    task: str | None = None,
    output_dir: str | None = None,
    file: str | None = None,
) -> Written:
    """Look at the data, and write a recipe for them. On processes other than the first, wait for its file.

    Args:
        path: a file or a folder.
        settings: `--section.field VALUE` words, which replace what would be chosen.
        model: folder or hub name of pretrained weights. None: train from scratch.
        text: text column, or two text columns that are a pair.
        label: label column, or several columns of 0 and 1.
        group: column of groups that are not divided between training and held-out rows.
        task: task. None: found from the data.
        output_dir: run folder. None: runs/NAME, after the data.
        file: recipe file. None: the run folder's name and .yaml.

    Raises:
        ValueError: the data are ambiguous or not understood, or the file has other settings. The message names the fix.
    """
    path = own.path_of(path)
    settings = [*settings, *([] if group is None else ["--data.group_column", group])]
    minimal = own.minimal_recipe(path, settings)
    flags: dict[str, Any] = {"task": task, "text": tuple(text), "label": tuple(label)}
    asked = own.asked_of(path, minimal, **flags)
    own.check_there(path)
    if is_main():
        print_line(f"{path}: looking at the data ...")
    place, output_dir, note = unpacked(asked, output_dir)
    if note is not None:
        asked = own.asked_of(place, own.minimal_recipe(place, settings), **flags)
    own.check_header(asked)
    from accel_train.experiments.finetune.models import choose, look_at
    from accel_train.experiments.finetune.recognise import recognise

    found = recognise(asked)
    if note is not None:
        found = replace(found, notes=(note, *found.notes))
    pretrained = None
    if name := model or minimal.model.pretrained:
        if is_main():
            print_line(f"{name}: looking at the model ...")
        pretrained = look_at(name, found.task, trust_remote_code=minimal.model.trust_remote_code)
        is_hidden = pretrained.has_chat_template and not pretrained.template_has_tools
        if is_hidden and "data.tools_column" in found.settings and "data.chat_template" not in asked.given:
            raise ValueError(
                f"{name}: its chat template does not show tools, so the model would not see them. Use a model whose "
                "template shows tools, set --data.chat_template, or leave them out: --data.tools_column null"
            )
    choices = {**found.settings, **_as_long_as(asked, choose(found, pretrained))}
    written = Path(file or f"{output_dir.rstrip('/')}.yaml")
    recipe = make_recipe(own.tree_of(found.task, choices, output_dir), str(written), arguments=settings)
    is_new = own.keep(written, recipe, own.format_recipe_file(recipe, found, choices, written))
    return Written(recipe, written, is_new, found, choices)


def _as_long_as(asked: own.Asked, chosen: Choices) -> Choices:
    """Give a model from scratch the positions for the sequence length that was asked for."""
    config = chosen["model.config"].value if "model.config" in chosen else {}
    if "data.sequence_length" not in asked.given or "n_positions" not in config:
        return chosen
    positions = max(config["n_positions"], asked.data.sequence_length)
    changed = replace(chosen["model.config"], value={**config, "n_positions": positions})
    return {**chosen, "model.config": changed}


def finetune(
    path: str | Path,
    /,
    model: str | Mapping[str, Any] | None = None,
    *,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    group: str | None = None,
    task: str | None = None,
    output_dir: str | Path | None = None,
    **sections: Any,
) -> "RunResult":
    """Train on your own data: find the task, write a recipe, and train it, as `accel-train finetune` does.

    Prints each decision with its reason. Call it again to resume, or to get the finished model.

        result = accel_train.finetune("reviews.csv", model="answerdotai/ModernBERT-base")
        result.metrics
        result.predict(["good", "bad"])

    Args:
        path: a table (csv, tsv, jsonl, parquet), text files, chats, CoNLL or SQuAD files, or a folder of images by
            class, with masks, or with boxes.
        model: pretrained weights: a folder or a hub name; or settings, as in `sections`. None: a small model from
            scratch.
        text: text column, or two text columns that are a pair. None: found from the data.
        label: label column, or several columns of 0 and 1. None: found from the data.
        group: column of groups that are not divided between training and held-out rows. None: found for pairs.
        task: task. None: found from the data.
        output_dir: run folder. None: runs/NAME, after the data. The recipe is written next to it.
        sections: recipe settings: `schedule={"num_epochs": 1}, data={"sequence_length": 512}, seed=1`.

    Raises:
        ValueError: the data are ambiguous or not understood, or a setting is wrong. The message names the fix.
        TrainingStopped, CheckpointError, Preempted: as in `accel_train.train`.
    """
    from accel_train.training.train import train

    if isinstance(model, Mapping):
        model, sections = None, {"model": model, **sections}
    settings = [word for name, section in sections.items() for word in _words(name, section)]
    texts, labels = ((each,) if isinstance(each, str) else tuple(each or ()) for each in (text, label))
    folder = None if output_dir is None else str(output_dir)
    written = write_recipe(
        str(path), settings, model=model, text=texts, label=labels, group=group, task=task, output_dir=folder
    )
    if is_main():
        print_line(redact_text("\n".join(written.lines())))
    return train(written.recipe)


def _words(name: str, section: Any) -> list[str]:
    """Return settings as words of a command line."""
    if isinstance(section, Mapping):
        return [word for key, value in section.items() for word in _words(f"{name}.{key}", value)]
    return [f"--{name}", section if isinstance(section, str) else one_line(section)]
