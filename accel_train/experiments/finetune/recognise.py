"""Recognition of the data at a path. The files are listed once, and a table of forms is tried on them."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from accel_train.core.files import files_below
from accel_train.core.format import did_you_mean
from accel_train.data.encoding import read_text
from accel_train.data.images.images import IMAGE_SUFFIXES, list_images
from accel_train.data.images.labelled import eval_beside_train
from accel_train.data.images.misread import refuse_other_data
from accel_train.data.images.pairs import LISTED_SUFFIXES, lists_pairs
from accel_train.data.parts import Part, is_unlabeled, part_of, pick, top_part
from accel_train.data.sources import file_kind, files_of, is_about_data, is_saved_dataset, resolve_sources
from accel_train.data.tables import column_names, has_object_lines
from accel_train.experiments.finetune.annotated.annotations import refuse_files_of_tools
from accel_train.experiments.finetune.annotated.text_tasks import holds_questions, holds_tags, recognise_annotated
from accel_train.experiments.finetune.annotated.translations import find_aligned, recognise_aligned
from accel_train.experiments.finetune.boxes import find_boxes, recognise_boxes
from accel_train.experiments.finetune.columns import files_at, read_table, source_of, with_settings
from accel_train.experiments.finetune.images import (
    Pairs,
    find_pairs,
    image_column,
    lie_in_classes,
    recognise_classes,
    recognise_masks,
    refuse_other_classes,
)
from accel_train.experiments.finetune.recipe import MOST_LISTED, Asked, Found, check_there, listed
from accel_train.experiments.finetune.tables import recognise_table
from accel_train.experiments.finetune.texts import (
    class_folders,
    find_label_lines,
    is_file_per_class,
    recognise_class_folders,
    recognise_files_of_classes,
    recognise_lines,
    recognise_text,
    training_texts,
)
from accel_train.experiments.finetune.values.labels import NAME_FILES, names_in
from accel_train.experiments.finetune.values.parts import parts_of_card
from accel_train.recipe.data import Data
from accel_train.recipe.tasks import finetune_tasks

_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.parquet")
_TABLES = ("csv", "jsonl", "parquet")
_MOST_TAGGED = 20
"""Text files in a folder up to which each is tried as words with tags."""


@dataclass(frozen=True)
class Tree:
    """The files at a path: all below a folder, those of a pattern, or one."""

    path: Path
    is_folder: bool
    listed: Sequence[Path]
    """All files, without hidden ones."""

    @property
    def folder(self) -> Path:
        """Return the folder that holds all files."""
        return self.path if self.is_folder else self.path.parent

    @cached_property
    def files(self) -> list[Path]:
        """Return the files that may hold data: in a folder, those that do not describe the data by their names."""
        return [path for path in self.listed if not self.is_folder or not is_about_data(path, self.path)]

    @cached_property
    def images(self) -> list[str]:
        """Return the names of images below a folder, relative to it."""
        return list_images(self.path) if self.is_folder else []

    @cached_property
    def card(self) -> dict[Part, Path]:
        """Return the tables of the parts that the README.md of a folder names."""
        parts = parts_of_card(self.path) if self.is_folder else {}
        are_tables = all(file_kind(file) in _TABLES for path in parts.values() for file in files_at(path))
        return parts if "train" in parts and are_tables else {}

    def of_kind(self, *kinds: str) -> list[Path]:
        return [path for path in self.files if file_kind(path) in kinds]


Reader = Callable[[], Found]


class Form(NamedTuple):
    """A form of data."""

    name: str
    tasks: tuple[str, ...]
    """Tasks that it is read for."""
    find: Callable[[Asked, Tree], Reader | str]
    """Return what reads the data in this form, or why they do not have it."""


def recognise(asked: Asked) -> Found:
    """Return the kind of data at the path, with the recipe's settings for it.

    Raises:
        ValueError: the data are not suited for training, or are ambiguous. The message shows the flag.
    """
    if asked.task is not None and asked.task not in finetune_tasks():
        meant = did_you_mean(asked.task, finetune_tasks(), f"it knows {', '.join(finetune_tasks())}")
        raise ValueError(f"--task {asked.task}: finetune does not know this task; {meant}")
    refuse_other_data(asked.path, is_asked=asked.task is not None)
    found = _recognise(asked, _tree_of(asked))
    is_beside = found.task == "image-classification" and eval_beside_train(asked.data)[1] is not None
    if is_beside or "data.eval" in {*found.settings, *asked.given}:
        return replace(found, eval_fraction=0.0)
    return replace(found, eval_fraction=asked.data.eval_fraction) if "data.eval_fraction" in asked.given else found


def _tree_of(asked: Asked) -> Tree:
    path = Path(asked.path).expanduser()
    if path.is_dir():
        return Tree(path, True, [each for each in files_below(path) if each.is_file()])
    check_there(asked.path)
    if not path.exists() and file_kind(path) == "json":
        raise ValueError(f"{path}: finetune reads one .json file. Write shards as .jsonl")
    return Tree(path, False, files_at(path))


def _recognise(asked: Asked, tree: Tree) -> Found:
    failed = []
    for form in FORMS:
        found = form.find(asked, tree)
        if not isinstance(found, str):
            return _with_unused_files(found(), asked, tree)
        if asked.task in (None, *form.tasks):
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


def _saved(asked: Asked, tree: Tree) -> Reader | str:
    if not tree.is_folder or not is_saved_dataset(tree.path):
        return "no state.json or dataset_dict.json"
    if (located := find_boxes(asked, tree.path)) is not None:
        return partial(recognise_boxes, asked, located)

    def read() -> Found:
        splits = [each.name for each in tree.path.iterdir() if each.is_dir()]
        found = recognise_table(asked, tree.path, tree.path if pick(splits, "eval") else None)
        test = pick(splits, "test")
        return replace(found, unused=(*(found.unused or ()), *((f"split {test}",) if test else ())))

    return read


def _masks(asked: Asked, tree: Tree) -> Reader | str:
    pairs, is_asked = None, asked.task == "semantic-segmentation"
    if tree.is_folder:
        is_open = asked.task not in ("image-classification", "object-detection")
        pairs = find_pairs(asked.path) if is_open else None
    elif tree.path.suffix.lower() in LISTED_SUFFIXES and is_asked:
        pairs = Pairs(asked.path, None, "from --task: a list of images with their masks")
    elif tree.path.suffix.lower() in LISTED_SUFFIXES and asked.task is None and tree.path.exists():
        is_list = lists_pairs(tree.path, asked.data)
        pairs = Pairs(asked.path, None, "each line names an image and its mask") if is_list else None
    return "no images/ and masks/" if pairs is None else partial(recognise_masks, asked, pairs)


def _boxes(asked: Asked, tree: Tree) -> Reader | str:
    is_read = tree.is_folder or tree.path.exists() or file_kind(tree.path) == "parquet"
    located = find_boxes(asked, tree.path) if is_read else None
    return "no COCO, YOLO, or Pascal VOC" if located is None else partial(recognise_boxes, asked, located)


def _images(asked: Asked, tree: Tree) -> Reader | str:
    if asked.task in ("causal-lm", "text-classification") or not tree.images:
        return "no images"
    tables = tree.of_kind(*_TABLES)
    if tables and not lie_in_classes(tree.path, tree.images):
        named = [path for path in tables if part_of(path.relative_to(tree.path).as_posix()) != "test"]
        named = [path for path in named if image_column(read_table(path, asked.data, asked.given)) is not None]
        if named:
            return partial(recognise_table, asked, *_chosen(tree, named))
    elif asked.task is None:
        refuse_other_classes(asked, tree.path, tree.images, tables)
    return partial(recognise_classes, asked, tree.path, tables)


def _of_tools(asked: Asked, tree: Tree) -> Reader | str:
    refuse_files_of_tools(tree.files, asked)
    return "no .ann, .spacy, or .xmi"


def _aligned(asked: Asked, tree: Tree) -> Reader | str:
    files = tree.files
    if not tree.is_folder:
        is_text = file_kind(tree.path) in (None, "text")
        files = sorted(tree.folder.glob(f"{tree.path.with_suffix('').name}.*")) if is_text else []
    if (found := find_aligned(asked, tree.path, files)) is None:
        return "no STEM.de and STEM.en"
    return partial(recognise_aligned, asked, found.target_suffix, *_chosen(tree, found.sources))


def _table(asked: Asked, tree: Tree) -> Reader | str:
    tables = tree.of_kind(*_TABLES)
    if not tables and not tree.of_kind("text", "conll"):
        tables = [path for path in tree.of_kind("json") if _holds_rows(path, asked)]
    if not tables:
        return "no .csv, .tsv, .jsonl, .parquet, or .json with an array"
    return partial(recognise_table, asked, *_chosen(tree, tables))


def _holds_rows(path: Path, asked: Asked) -> bool:
    return has_object_lines(path, asked.data) or read_text(path, asked.data).lstrip()[:1] == "["


def _tags(asked: Asked, tree: Tree) -> Reader | str:
    texts = tree.of_kind("text")
    is_few = len(texts) <= _MOST_TAGGED or not tree.is_folder
    tagged = tree.of_kind("conll") or [path for path in texts if is_few and _is_tagged(asked, path)]
    if not tagged:
        return "no tag like B-PER at the end of each line"
    return partial(recognise_annotated, asked, "token-classification", *_chosen(tree, tagged))


def _is_tagged(asked: Asked, path: Path) -> bool:
    """Return whether a text file is read as words with tags."""
    is_free = asked.task is None and "data.lines" not in asked.given
    return asked.task == "token-classification" or (is_free and holds_tags(path, asked))


def _questions(asked: Asked, tree: Tree) -> Reader | str:
    files = [path for path in tree.of_kind("json") if holds_questions(path, asked)]
    if not files:
        return "no .json with paragraphs and qas"
    return partial(recognise_annotated, asked, "question-answering", *_chosen(tree, files))


def _class_folders(asked: Asked, tree: Tree) -> Reader | str:
    texts = tree.of_kind("text")
    is_open = tree.is_folder and texts and asked.task != "causal-lm"
    if not is_open or (found := class_folders(tree.path, texts)) is None:
        return "no CLASS/*.txt"
    return partial(recognise_class_folders, asked, tree.path, *found)


def _files_of_classes(asked: Asked, tree: Tree) -> Reader | str:
    texts = tree.of_kind("text")
    if not tree.is_folder or not is_file_per_class(asked, tree.path, texts):
        return "no files with a text on each line, named by classes"
    return partial(recognise_files_of_classes, asked, texts)


def _label_lines(asked: Asked, tree: Tree) -> Reader | str:
    files, parts = training_texts(asked, tree.of_kind("text"), tree.folder, is_folder=tree.is_folder)
    found = find_label_lines(asked, files, are_parts=bool(parts)) if files else None
    return "no label on each line" if found is None else partial(recognise_lines, asked, files, parts, found)


def _plain_text(asked: Asked, tree: Tree) -> Reader | str:
    texts = tree.of_kind("text")
    files, parts = training_texts(asked, texts, tree.folder, is_folder=tree.is_folder)
    if not files:
        return "no text files"
    others = [path for path in tree.files if path not in {*texts}] if tree.is_folder else []
    return partial(recognise_text, asked, files, parts, others)


FORMS = (
    Form("saved data set", finetune_tasks(), _saved),
    Form("images with masks", ("semantic-segmentation",), _masks),
    Form("images with boxes", ("object-detection",), _boxes),
    Form("images by class", ("image-classification",), _images),
    Form("files of annotation tools", (), _of_tools),
    Form("translations, line by line", ("seq2seq",), _aligned),
    Form(
        "table",
        tuple(task for task in finetune_tasks() if task not in ("semantic-segmentation", "object-detection")),
        _table,
    ),
    Form("words with tags", ("token-classification",), _tags),
    Form("questions", ("question-answering",), _questions),
    Form("texts by folder", ("text-classification",), _class_folders),
    Form("texts by file", ("text-classification",), _files_of_classes),
    Form("labeled lines", ("text-classification",), _label_lines),
    Form("plain text", ("causal-lm",), _plain_text),
)
"""Forms of data, the surest evidence first: the first that is found is read."""


def _chosen(tree: Tree, tables: Sequence[Path]) -> tuple[Path, Path | None]:
    """Return the table to train on, and the table to evaluate on if a name or the README.md shows one."""
    if not tree.is_folder:
        return tree.path, None
    if tree.card and {*files_at(tree.card["train"])} <= {*tables}:
        return tree.card["train"], tree.card.get("eval")
    folder = tree.path
    tables = list(dict.fromkeys(map(_shards_of, tables)))
    parts = {path: part_of(path.name) or part_of(path.relative_to(folder).as_posix()) for path in tables}
    held_out = [path for path in tables if parts[path] == "eval"]
    others = [path for path in tables if parts[path] == "train"] or [path for path in tables if parts[path] is None]
    if len(others) != 1 or len(held_out) > 1:
        named = ", ".join(str(path) for path in tables[:5])
        raise ValueError(
            f"{folder} holds several files of data ({named}). Name one: accel-train finetune "
            f"{quote(str([*others, *tables][0]))}"
        )
    return others[0], held_out[0] if held_out else None


def _shards_of(path: Path) -> Path:
    """Return the pattern of all shards of a parquet file, as the hub names them. Other paths are returned unchanged."""
    shard = _SHARD.fullmatch(path.name)
    return path if shard is None else path.with_name(f"{shard[1]}-*-of-{shard[2]}.parquet")


def _with_unused_files(found: Found, asked: Asked, tree: Tree) -> Found:
    """Return `found` with the files that the run will not read: all below a folder, or test data next to a file."""
    path, folder = tree.path, tree.folder
    if found.unused is None or found.edge or is_saved_dataset(path):
        return found
    data, read = with_settings(asked.data, found.settings), set[Path]()
    for names in (data.train, data.eval):
        if names is not None:
            read |= {file.resolve() for file in files_of(resolve_sources(names, data, key=str(path)))}
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
        file for file, (top, part) in tops.items() if part == "test" and (file_kind(file) or data.reads_any_suffix)
    ]
    tests = [file for file in tests if not is_unlabeled(tops[file][0].name)]
    if tree.card:
        tests = files_at(tree.card["test"]) if "test" in tree.card else []
    if not tree.is_folder:
        held_out = [file for file in others if tops[file][1] == "eval"]
        shards = [file for file in others if _shards_of(file) == _shards_of(path) != path]
        others = [file for file in (*held_out, *shards, *tests) if file.suffix == path.suffix]
        tests = [file for file in tests if file in others]
    top = sorted({_shards_of(folder / tops[test][0]) for test in tests})
    test = str(tree.card.get("test", top[0])) if top else None
    rest = _by_folder([file.relative_to(folder) for file in others if file not in tests])
    unused = (*found.unused, *((f"files {rest}",) if rest else ()))
    return replace(
        found, unused=unused, test=test, test_has_labels=all(_has_labels(each, found, data) for each in tests)
    )


_LABELS = ("label_column", "label_columns", "tags_column", "answers_column", "target_column", "score_column")


def _has_labels(test: Path, found: Found, data: Data) -> bool:
    """Return whether a table of test data has the columns of labels that the recipe names. True for other files."""
    values = [choice.value for name, choice in found.settings.items() if name.removeprefix("data.") in _LABELS]
    names = {name for value in values for name in ([value] if isinstance(value, str) else value)}
    try:
        return file_kind(test) not in _TABLES or names <= {*column_names(source_of(test), data)}
    # The file is broken, or has another encoding. Reading it will say so.
    except ValueError:
        return True


def _by_folder(files: Sequence[Path]) -> str:
    """Return the names of files. Many files of one folder are shown as one entry."""
    counts = Counter(path.parent for path in files)
    names = []
    for path in files:
        name = (
            path.as_posix()
            if counts[path.parent] <= MOST_LISTED
            else f"{path.parent}/* ({counts[path.parent]:,} files)"
        )
        names.append(name if path.parent != Path() else path.name)
    return listed(list(dict.fromkeys(names)))
