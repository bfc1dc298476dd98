"""Recognition of the data at a path. The files are listed once, and a table of forms is tried on them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from accel_train.core.format import did_you_mean
from accel_train.data.encoding import read_text
from accel_train.data.images.images import IMAGE_SUFFIXES
from accel_train.data.images.labelled import eval_beside_train
from accel_train.data.images.misread import refuse_other_data
from accel_train.data.parts import is_unlabeled, part_of, pick, top_part
from accel_train.data.sources import file_kind, files_of, is_saved_dataset, resolve_sources
from accel_train.data.tables import column_names, has_object_lines
from accel_train.experiments.finetune.annotated.annotations import refuse_files_of_tools
from accel_train.experiments.finetune.annotated.text_tasks import recognise_aligned, recognise_annotated, tagged_lines
from accel_train.experiments.finetune.boxes import recognise_boxes
from accel_train.experiments.finetune.columns import files_at, read_table, source_of, with_settings
from accel_train.experiments.finetune.images import (
    image_column,
    lie_in_classes,
    recognise_classes,
    recognise_masks,
    refuse_other_classes,
)
from accel_train.experiments.finetune.recipe import MOST_LISTED, Answer, Asked, Found, listed
from accel_train.experiments.finetune.tables import columns_in, recognise_table
from accel_train.experiments.finetune.texts import (
    recognise_class_folders,
    recognise_files_of_classes,
    recognise_lines,
    recognise_text,
)
from accel_train.experiments.finetune.tree import MOST_TAGGED, TABLES, Tree, shards_of
from accel_train.experiments.finetune.values.labels import NAME_FILES, names_in
from accel_train.recipe.data import Data
from accel_train.recipe.tasks import finetune_tasks


class Form(NamedTuple):
    """A form of data."""

    name: str
    tasks: tuple[str, ...]
    """Tasks that it is read for."""
    find: Callable[[Asked, Tree], Answer]
    """Return the data in this form, or why they do not have it."""


def recognise(asked: Asked) -> Found:
    """Return the kind of data at the path, with the recipe's settings for it.

    Raises:
        ValueError: the data are not suited for training, or are ambiguous. The message shows the flag.
    """
    if asked.task is not None and asked.task not in finetune_tasks():
        meant = did_you_mean(asked.task, finetune_tasks(), f"it knows {', '.join(finetune_tasks())}")
        raise ValueError(f"--task {asked.task}: finetune does not know this task; {meant}")
    refuse_other_data(asked.path, is_asked=asked.task is not None)
    if not asked.place.exists() and file_kind(asked.place) == "json":
        raise ValueError(f"{asked.place}: finetune reads one .json file. Write shards as .jsonl")
    found = _recognise(asked, Tree(asked.place))
    is_beside = found.task == "image-classification" and eval_beside_train(asked.data)[1] is not None
    if is_beside or "data.eval" in {*found.settings, *asked.given}:
        return replace(found, eval_fraction=0.0)
    return replace(found, eval_fraction=asked.data.eval_fraction) if "data.eval_fraction" in asked.given else found


def _recognise(asked: Asked, tree: Tree) -> Found:
    failed = []
    for form in FORMS:
        found = form.find(asked, tree)
        if not isinstance(found, str):
            return _with_unused_files(found, asked, tree)
        if asked.allows(*form.tasks):
            failed.append(f"{form.name} ({found})")
    if not tree.is_folder:
        raise ValueError(_about_file(tree.path))
    there = listed([path.relative_to(tree.path).as_posix() for path in tree.files])
    raise ValueError(
        f"{tree.path}: finetune cannot read these files ({there or 'no files'}). It tried: {', '.join(failed)}. "
        "Write a table with a column of texts and a column of labels; for files STEM.CLASS with a text per line, use "
        "--task text-classification; for aligned lines of STEM.ONE and STEM.OTHER, use --task seq2seq --text ONE "
        "--label OTHER"
    )


def _about_file(path: Path) -> str:
    """Return why a file is not read, and what to do."""
    kind = file_kind(path)
    if kind == "json":
        return (
            f"{path} is one JSON document. finetune reads an array of objects, one object per line (.jsonl), or "
            "SQuAD's form (data, paragraphs, qas), or {train: [...], validation: [...]}. Write [row, row, ...]"
        )
    if kind == "tokens":
        return f"{path}: finetune does not read token files. Use: accel-train run gpt_tiny --data.train {path}"
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return f"{path} is one image. Name the folder of all images, with the layout CLASS/*{path.suffix}"
    return (
        f"{path}: finetune cannot read {path.suffix or 'a file without an extension'}. It reads tables (.csv, .tsv, "
        ".jsonl, .parquet), text (.txt, .md, ...), and folders. Rename or convert the file"
    )


def _saved(asked: Asked, tree: Tree) -> Answer:
    if not tree.is_folder or not is_saved_dataset(tree.path):
        return "no state.json or dataset_dict.json"
    if not isinstance(boxes := recognise_boxes(asked, tree), str):
        return boxes
    splits = [each.name for each in tree.path.iterdir() if each.is_dir()]
    found = recognise_table(asked, tree.path, tree.path if pick(splits, "eval") else None)
    test = pick(splits, "test")
    return replace(found, unused=(*(found.unused or ()), *((f"split {test}",) if test else ())))


def _images(asked: Asked, tree: Tree) -> Answer:
    if asked.task in ("causal-lm", "text-classification") or not tree.images:
        return "no images"
    tables = tree.of_kind(*TABLES)
    if tables and not lie_in_classes(tree.path, tree.images):
        named = [path for path in tables if part_of(path.relative_to(tree.path).as_posix()) != "test"]
        named = [path for path in named if image_column(read_table(path, asked)) is not None]
        if named:
            return recognise_table(asked, *tree.chosen(named))
    elif asked.task is None:
        refuse_other_classes(asked, tree.path, tree.images, tables)
    return recognise_classes(asked, tree.path, tables)


def _table(asked: Asked, tree: Tree) -> Answer:
    tables = tree.of_kind(*TABLES)
    if not tables and not tree.of_kind("text", "conll"):
        tables = [
            path
            for path in tree.of_kind("json")
            if has_object_lines(path, asked.data) or read_text(path, asked.data).lstrip()[:1] == "["
        ]
    if not tables:
        return "no .csv, .tsv, .jsonl, .parquet, or .json with an array"
    return recognise_table(asked, *tree.chosen(tables))


def _tags(asked: Asked, tree: Tree) -> Answer:
    texts = tree.of_kind("text")
    is_few = len(texts) <= MOST_TAGGED or not tree.is_folder
    is_asked, is_free = asked.task == "token-classification", asked.task is None and "data.lines" not in asked.given
    tagged = tree.of_kind("conll") or [
        path for path in texts if is_few and (is_asked or (is_free and tagged_lines(path, asked)))
    ]
    if not tagged:
        return "no tag like B-PER at the end of each line"
    return recognise_annotated(asked, "token-classification", *tree.chosen(tagged))


def _questions(asked: Asked, tree: Tree) -> Answer:
    texts = {path: read_text(path, asked.data) for path in tree.of_kind("json")}
    # The form of SQuAD.
    files = [
        path
        for path, text in texts.items()
        if text.lstrip().startswith("{") and '"paragraphs"' in text and '"qas"' in text
    ]
    return (
        recognise_annotated(asked, "question-answering", *tree.chosen(files))
        if files
        else "no .json with paragraphs and qas"
    )


FORMS = (
    Form("saved data set", finetune_tasks(), _saved),
    Form("images with masks", ("semantic-segmentation",), recognise_masks),
    Form("images with boxes", ("object-detection",), recognise_boxes),
    Form("images by class", ("image-classification",), _images),
    Form("files of annotation tools", (), refuse_files_of_tools),
    Form("translations, line by line", ("seq2seq",), recognise_aligned),
    Form(
        "table",
        tuple(task for task in finetune_tasks() if task not in ("semantic-segmentation", "object-detection")),
        _table,
    ),
    Form("words with tags", ("token-classification",), _tags),
    Form("questions", ("question-answering",), _questions),
    Form("texts by folder", ("text-classification",), recognise_class_folders),
    Form("texts by file", ("text-classification",), recognise_files_of_classes),
    Form("labeled lines", ("text-classification",), recognise_lines),
    Form("plain text", ("causal-lm",), recognise_text),
)
"""Forms of data, the surest evidence first: the first that is found is read."""


def _with_unused_files(found: Found, asked: Asked, tree: Tree) -> Found:
    """Return `found` with the files that the run will not read: all below a folder, or test data next to a file."""
    path, folder = tree.path, tree.folder
    if found.unused is None or found.edge or is_saved_dataset(path):
        return found
    data = with_settings(asked.data, found.settings)
    sources = [source for _, name in data.named() for source in resolve_sources(name, data, key=str(path))]
    read = {file.resolve() for file in files_of(sources)}
    others = tree.listed if tree.is_folder else [file for file in sorted(folder.iterdir()) if file.is_file()]
    others = [file for file in others if file.resolve() not in read]
    if "data.target_suffix" in found.settings:
        others = [file for file in others if file.suffix != f".{found.settings['data.target_suffix'].value}"]
    if "data.label_names" in found.settings:
        names = found.settings["data.label_names"].value
        beside = [Path(str(data.train)).with_name(name) for name in NAME_FILES]
        read_names = next((file for file in beside if file in others and names_in(file, asked.data) == names), None)
        others = [file for file in others if file != read_names]
    tops = {file: top_part(file.relative_to(folder)) for file in others}
    tests = [
        file
        for file, (top, part) in tops.items()
        if part == "test" and not is_unlabeled(top.name) and (file_kind(file) or data.reads_any_suffix)
    ]
    if tree.card:
        tests = files_at(tree.card["test"]) if "test" in tree.card else []
    if not tree.is_folder:
        held_out = [file for file in others if tops[file][1] == "eval"]
        shards = [file for file in others if shards_of(file) == shards_of(path) != path]
        others = [file for file in (*held_out, *shards, *tests) if file.suffix == path.suffix]
        tests = [file for file in tests if file in others]
    top = sorted({shards_of(folder / tops[test][0]) for test in tests})
    test = str(tree.card.get("test", top[0])) if top else None
    rest = _by_folder([file.relative_to(folder) for file in others if file not in tests])
    unused = (*found.unused, *((f"files {rest}",) if rest else ()))
    return replace(
        found, unused=unused, test=test, test_has_labels=all(_has_labels(each, found, data) for each in tests)
    )


_LABELS = ("label_column", "label_columns", "tags_column", "answers_column", "target_column", "score_column")


def _has_labels(test: Path, found: Found, data: Data) -> bool:
    """Return whether a table of test data has the columns of labels that the recipe names. True for other files."""
    names = columns_in(
        {name: choice for name, choice in found.settings.items() if name.removeprefix("data.") in _LABELS}
    )
    try:
        return file_kind(test) not in TABLES or names <= {*column_names(source_of(test), data)}
    # The file is broken, or has another encoding. Reading it will say so.
    except ValueError:
        return True


def _by_folder(files: Sequence[Path]) -> str:
    """Return the names of files. Many files of one folder are shown as one entry."""
    counts = Counter(path.parent for path in files)
    names = (
        path.as_posix()
        if path.parent == Path() or counts[path.parent] <= MOST_LISTED
        else f"{path.parent}/* ({counts[path.parent]:,} files)"
        for path in files
    )
    return listed(list(dict.fromkeys(names)))
