"""The `data` section that all tasks share, the parts that several tasks share, augmentation, and the tokenizer.

Each task adds its own settings in `accel_train/tasks/TASK/config.py`.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, ByteSize, ConfigDict, Field, PrivateAttr, TypeAdapter, model_validator

from accel_train.core.errors import SettingError, setting_error
from accel_train.core.format import LARGEST_COUNT
from accel_train.recipe.values import (
    Auto,
    Fraction,
    Length,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Item = TypeVar("Item")


def _known_encoding(name: str) -> str:
    try:
        is_text = name == "auto" or codecs.lookup(name)._is_text_encoding
    except LookupError:
        is_text = False
    if not is_text:
        problem = f"data.encoding={name} is an unknown encoding"
        raise SettingError(
            problem, "Use a Python codec name, for example latin-1 or cp1252.", settings=("data.encoding",)
        )
    return name


def _one_character(delimiter: str) -> str:
    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
    if delimiter != "auto" and (len(delimiter) != 1 or delimiter in '\r\n"'):
        problem = f"data.delimiter={delimiter!r} is not one character"
        raise SettingError(problem, "Give one, for example ';', tab or '|'.", settings=("data.delimiter",))
    return delimiter


def _sets_with_names(names: Any) -> Any:
    if isinstance(names, dict) and not all(map(str.isidentifier, names or [""])):
        problem = f"data.eval={names} is not a mapping of words to data"
        raise SettingError(
            problem, "Name each set, for example {web: web.txt, code: code.txt}.", settings=("data.eval",)
        )
    return names


def listed(names: Any) -> tuple[str, ...]:
    """Return the names in a value of `data.train` or `data.eval`, in order. None has no names."""
    if isinstance(names, dict):
        return sum(map(listed, names.values()), ())
    if isinstance(names, str):
        return (names,)
    return tuple(each.source if isinstance(each, WeightedSource) else each for each in names or ())


class TrainBPE(Section):
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] = 4096
    """Number of tokens in the vocabulary, including the 256 bytes and the document separator."""


class TrainedTokenizer(Section):
    train_bpe: TrainBPE
    """Byte-level BPE tokenizer, trained on the training documents."""


RAND_AUGMENT_MAGNITUDE = 9.0


class Augment(Section):
    """Augmentation of training images. Evaluation images are not augmented. Random numbers depend only on (seed, epoch,
    sample).
    """

    random_resized_crop: tuple[Fraction, Fraction] | None = (0.35, 1.0)
    """Range of the area fraction to cut out and resize. null: resize and crop the center."""
    horizontal_flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    vertical_flip: Fraction = 0.0
    """Probability of a vertical flip."""
    color_jitter: NonNegativeFloat = 0.0
    """Strength x of the color jitter. Brightness, contrast, and saturation change by a factor between 1 - x and 1 + x.
    """
    rand_augment_ops: NonNegativeInt = 0
    """Number of RandAugment operations per image (Cubuk et al. 2020)."""
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=30)] = RAND_AUGMENT_MAGNITUDE
    """Strength of RandAugment, from 0 to 30."""
    mixup_alpha: NonNegativeFloat = 0.0
    """Parameter of mixup (Zhang et al. 2018). Images and labels are mixed by a Beta(alpha, alpha) share; 0: off."""
    cutmix_alpha: NonNegativeFloat = 0.0
    """Parameter of CutMix (Yun et al. 2019). A box comes from another image; 0: off. If mixup is also on, each image
    draws one of the two.
    """
    scale_range: tuple[PositiveFloat, PositiveFloat] | None = (0.5, 2.0)
    """Range of the factor that resizes images with their masks or boxes before a crop is cut out."""

    @model_validator(mode="after")
    def ranges_rise(self) -> Self:
        for name in ("random_resized_crop", "scale_range"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 < bounds[0] <= bounds[1]:
                problem = "is not a range. Put the smaller number first, and both above 0."
                raise setting_error(f"data.augment.{name}", list(bounds), problem)
        return self


class WeightedSource(Section):
    """A source of a mixture."""

    source: str = Field(examples=["code/**/*.py"])
    """Its data, named as in `data.train`."""
    weight: NonNegativeFloat | dict[NonNegativeInt, NonNegativeFloat] = Field(examples=[0.7])
    """Share of the samples, in proportion to the weights of the other sources. Or a mapping from the number of steps
    after which a weight counts to that weight: `{0: 0.7, 8000: 0.2}`.
    """
    max_epochs: Length | None = Field(default=None, examples=[4])
    """Number of its epochs after which the other sources take its share. Default: it starts again."""
    name: Annotated[str, Field(pattern=r"^\w+$", title="letters, digits, and _")] | None = Field(
        default=None, examples=["web"]
    )
    """Name in metrics. Default: the name of its file or folder without the suffix."""

    @property
    def title(self) -> str:
        """Return the name in metrics."""
        return self.name or re.sub(r"\W+", "_", Path(self.source).stem).strip("_") or "source"

    @property
    def weights(self) -> dict[int, float]:
        """Return the weight by the 0-based step from which on it counts."""
        return self.weight if isinstance(self.weight, dict) else {0: self.weight}

    def weight_at(self, step: int) -> float:
        """Return the weight of a 0-based step."""
        return self.weights[max(at for at in self.weights if at <= step)]


class Data(Section):
    """Settings of `data` that every task has. A task's own class adds its columns and lengths."""

    label_setting: ClassVar[str | None] = None
    """Name of the setting that names the label column. A null value means samples to predict."""

    train: str | tuple[str, ...] | tuple[WeightedSource, ...]
    """Training data: embedded data, a path, or a data set name. Embedded data are `python-stdlib`, `stdlib-functions`,
    `digits`, and others. A path is a file, glob, or folder, here or in a bucket (`s3://`). Formats: txt, md, py, jsonl,
    csv, parquet, conll, SQuAD's json, bin, ds, mds, npz, tar (WebDataset). Images are in folders by class, or together
    with masks. Several names are read as one. For a mixture, give each source its weight: `[{source: web/*.jsonl,
    weight: 0.7}, {source: code, weight: 0.3}]`.
    """
    eval: Annotated[
        str | tuple[str, ...] | dict[str, str | tuple[str, ...]] | None, AfterValidator(_sets_with_names)
    ] = None
    """Evaluation data. With a mapping of names to data, `{web: web.txt, code: code.txt}`, evaluations also report the
    metrics of each set: `web/loss`, `code/loss`. Default: `eval_fraction` of the training documents.
    """
    eval_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """Fraction of `train` held out for evaluation. A hash of each sample (document, text, image) selects it. 0: nothing
    is held out.
    """
    split_seed: NonNegativeInt = 0
    """Seed of the choice of held-out samples. Each seed holds out other samples; the run's `seed` does not matter."""
    subset: str | None = None
    """Configuration name of a data set (`wikitext-103-raw-v1`)."""
    split: str = "train"
    """Split of a data set to train on."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "auto"
    """Encoding of text files, csv, tsv, and jsonl: a Python codec name (latin-1, cp1252, utf-16). auto: UTF-8, or
    UTF-16 if the file begins with its byte order mark.
    """
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Handling of bytes that are invalid in the encoding. strict: the run stops and names the file and position.
    replace: they become U+FFFD.
    """
    header: Literal["first_line", "none", "left_out"] = "first_line"
    """Location of the column names in csv and tsv. none: the file has no header, and columns are called "1", "2", ...
    left_out: the same names, and the first line is not read.
    """
    delimiter: Annotated[str, AfterValidator(_one_character)] = "auto"
    """Delimiter of csv: one character, or tab. auto: the first of comma, tab, semicolon, and bar that divides the first
    lines equally.
    """
    quoting: Literal["auto", "csv", "none"] = "auto"
    """Meaning of quotes in csv and tsv. csv: they enclose a field. none: they are characters of the text. auto: csv,
    except for tab-separated lines of equal length where csv quoting would fail or swallow lines.
    """
    lines: Literal["label_text", "fasttext", "fasttext_multi", "folder_names", "file_names"] | None = None
    """Format of text files for a classifier. label_text: each line is `LABEL TEXT`. fasttext: each line is
    `__label__LABEL TEXT`. fasttext_multi: the same with several labels. folder_names: each file is a text, and its
    folder's name is the label. file_names: each line is a text, and its file's name is the label. The columns are
    called label and text. Default: text files have no columns.
    """
    id_column: str | None = None
    """Column that names a row in predictions. Default: its file and row number."""
    shuffle: bool = True
    """Whether to read the samples of each epoch in a permuted order. false: in the order of the source."""
    group_by_length: bool = False
    """Whether to batch texts of similar length, for less padding. The order remains a function of seed and step."""
    last_batch: Literal["carry", "short", "drop"] = "carry"
    """Handling of an epoch that does not end at a step. carry: the step continues with the next epoch. short: the last
    step of an epoch has fewer samples (as in transformers' Trainer). drop: the rest of an epoch is left out.
    """
    num_workers: Auto | NonNegativeInt = "auto"
    """Number of processes that read ahead, per training process."""
    pin_memory: Auto | bool = "auto"
    """Whether to use page-locked host buffers, so that copies to the GPU overlap with work."""
    cache_dir: str | None = Field(default=None, examples=["/scratch/accel_train"])
    """Folder for tokens, encoded rows, and digests of images. Default: $ACCEL_TRAIN_CACHE, or ~/.cache/accel_train if
    that is not set.
    """
    cache_limit: (
        Annotated[str, Field(pattern=r"^\d+(\.\d+)?[kMGT]i?B$", title="a size such as 500MB or 200GiB")] | None
    ) = Field(default=None, examples=["200GiB"])
    """Size of token shards (`order: blocks`), encoded rows, and digests of images that stay in `cache_dir`, of all
    runs. Above it, those that were used longest ago are removed, and made again when they are read. Default: no limit.
    """
    _train_key: str = PrivateAttr("data.train")

    def shown_as(self, key: str) -> Self:
        """Return this section for data that a trained model is shown; messages call the data `key`, as its user names
        it.
        """
        shown = self.model_copy()
        shown._train_key = key
        return shown

    @property
    def train_key(self) -> str:
        """Return the name of the `train` data in messages."""
        return self._train_key

    @property
    def limit_bytes(self) -> int | None:
        """Return `cache_limit` in bytes."""
        return TypeAdapter(ByteSize).validate_python(self.cache_limit) if self.cache_limit else None

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Return the columns of texts that predictions repeat, so that a row can be read without its source."""
        return ()

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each name of `train` and `eval`, after the name of its setting in messages."""
        for key, names in ((self.train_key, self.train), ("data.eval", self.eval)):
            for name in listed(names):
                yield key, name

    @property
    def mixture(self) -> tuple[WeightedSource, ...]:
        """Return the weighted sources of `train`; empty if it has no weights."""
        return tuple(each for each in self.train if isinstance(each, WeightedSource))

    @property
    def train_names(self) -> tuple[str, ...]:
        """Return the names in `train`."""
        return listed(self.train)

    @model_validator(mode="after")
    def mixture_is_complete(self) -> Self:
        titles = [each.title for each in self.mixture]
        twice = [title for title in titles if titles.count(title) > 1]
        late = [each.title for each in self.mixture if 0 not in each.weights]
        steps = sorted({step for each in self.mixture for step in each.weights})
        empty = [step for step in steps if not any(each.weight_at(step) for each in self.mixture)] if not late else []
        problem, fix = "", ""
        if twice:
            problem, fix = f"two sources have the name {twice[0]!r} in metrics", "Give each a name"
        elif late:
            problem, fix = f"source {late[0]!r} has no weight for step 0", "Begin its weights with 0: ..."
        elif empty:
            problem, fix = f"all weights are 0 from step {empty[0]} on", "Give one source a weight above 0"
        elif self.mixture and (self.last_batch != "carry" or self.group_by_length):
            name = "group_by_length" if self.group_by_length else "last_batch"
            problem = f"data.{name} does not go with weights, which hold at every step and know no end of an epoch"
            fix = f"Leave data.{name} out, or the weights"
        if problem:
            raise SettingError(problem, fix, settings=("data.train",))
        return self

    @property
    def eval_sets(self) -> Mapping[str, Any]:
        """Return the sets that `eval` names. Empty if it names none."""
        return self.eval if isinstance(self.eval, dict) else {}

    def by_set(self, items: Iterable[Item]) -> list[tuple[Item, ...]]:
        """Return items, one for each name in `eval`, by set. Without named sets, all are one set."""
        left = iter(items)
        return [tuple(islice(left, len(listed(names)))) for names in self.eval_sets.values()] or [tuple(left)]

    @property
    def is_for_training(self) -> bool:
        """False for data that a trained model is shown."""
        return self._train_key == "data.train"

    def of_training(self, rows: str) -> str:
        """Return the name of the rows of `train` in notes: `training texts`, or `texts` for a trained model."""
        return f"training {rows}" if self.is_for_training else rows

    @classmethod
    def of(cls, data: "Data") -> Self:
        """Return a recipe's `data` as this class, which the recipe's task has declared.

        Raises:
            TypeError: the recipe is for a task without these settings.
        """
        if not isinstance(data, cls):
            raise TypeError(
                f"data is a {type(data).__name__}, but this task reads a {cls.__name__}. Set `Data` of the task."
            )
        return data

    def as_trained(self, trained: "Data") -> Self:
        """Return this section, for other data, with what the model learned of each column in training."""
        return self

    @property
    def window(self) -> int | None:
        """Return the number of tokens in each sample, or None if samples have lengths of their own or no tokens."""
        return None

    @property
    def reads_any_suffix(self) -> bool:
        """Return whether files are read as lines of text, whatever their suffix."""
        return False

    @property
    def is_labelled(self) -> bool:
        """Return whether the samples have labels."""
        return self.label_setting is None or getattr(self, self.label_setting) is not None

    def without_labels(self) -> Self:
        """Return this section for samples to predict."""
        return self if self.label_setting is None else self.model_copy(update={self.label_setting: None})


class OwnData(Data):
    """Section of a custom task before the task is loaded: the shared settings, and any others as they are written."""

    model_config = ConfigDict(extra="allow")


def renamed(data: Data, place_of: Callable[[str], str]) -> Data:
    """Return data settings with other names of files."""

    def places_of(names: Any) -> Any:
        if isinstance(names, WeightedSource):
            return names.model_copy(update={"source": place_of(names.source)})
        if isinstance(names, dict):
            return {name: places_of(each) for name, each in names.items()}
        return tuple(map(places_of, names)) if isinstance(names, tuple) else names and place_of(names)

    names = [name for name in ("train", "eval", "chat_template") if hasattr(data, name)]
    return data.model_copy(update={name: places_of(getattr(data, name)) for name in names})


class BrokenData(Data):
    """Settings of data whose training samples may be broken."""

    max_broken: NonNegativeInt = 0
    """Number of different training samples that may turn out broken before the run stops. What has been met since the
    start or the last resume counts. A broken image, also by its mask, has weight 0, and its step keeps the others. A
    broken line of jsonl (bytes that are not text, no JSON object, a column that is missing or of another type) is left
    out of the data, and needs `data.order: blocks`. A broken evaluation sample always stops the run.
    """


class BlockData(BrokenData):
    """Settings of data that may be encoded while the run trains."""

    order: Literal["auto", "shuffled", "blocks"] = "auto"
    """Order of the samples. shuffled: all samples, once everything is tokenized. blocks: data is tokenized while
    the run trains, in shards of 1 MiB. Shards in random order form blocks of 8 MiB at first, and 256 MiB later, and
    samples are shuffled within a block. auto: blocks for more than 32 MiB of text, or 1 GiB of rows, and with
    `max_broken`.
    """


class WindowData(BlockData):
    """Settings of language modeling on documents that are joined and cut into windows of tokens."""

    text_column: str = "text"
    """Column with the text, in jsonl, csv, parquet, and data sets, or a template of columns: `{title}. {body}`."""
    sequence_length: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 1024
    """Number of tokens that a sample reads. The targets are the next token at each position."""

    @property
    def window(self) -> int:
        """Return the number of tokens in each sample."""
        return self.sequence_length


class TextData(Data):
    """Settings of tasks that read one text, or a few, per sample."""

    max_length: PositiveInt | None = None
    """Maximum length of a text, in tokens. Longer texts are cut. Default: the model's maximum, at most 512."""
    pad_to_multiple_of: PositiveInt = 8
    """Multiple to which the padded length of a batch of texts is rounded up."""
    group_column: str | None = Field(default=None, examples=["user_id"])
    """Column of groups (a question, an author, a patient). Rows of a group are all for training or all held out.
    Default: a hash of each text selects the held-out rows.
    """

    @model_validator(mode="after")
    def group_is_not_the_label(self) -> Self:
        label = self.label_setting and getattr(self, self.label_setting)
        if self.group_column is not None and self.group_column == label:
            raise SettingError(
                "the column holds the labels, and a class would be held out as a whole",
                "Name another column; data.stratify holds out the same share of each class",
                f"data.group_column={self.group_column}",
                ("data.group_column", f"data.{self.label_setting}"),
            )
        return self


class NamedClassesData(Data):
    """Settings of tasks that predict classes with names."""

    label_names: tuple[str, ...] | None = Field(default=None, examples=[["negative", "positive"]])
    """Class names in the order of their ids. Default: the classes of the training data, sorted."""


class ClassData(NamedClassesData):
    """Settings of tasks that assign one class to each sample."""

    label_setting: ClassVar[str | None] = "label_column"
    label_column: str | None = "label"
    """Column with the label: a name, an integer, a number (regression), or a list of names (multi_label). null: rows to
    predict, without labels.
    """
    label_ids_from: NonNegativeInt = 0
    """Number of the first class, if the labels are numbers and label_names has their names."""
    stratify: bool = False
    """Whether to hold out `eval_fraction` of each class, and at least one sample of a class with two. false: of all
    samples.
    """

    def unread(self) -> Mapping[str, str]:
        group = getattr(self, "group_column", None)
        return {} if group is None else {"stratify": f"data.group_column={group} holds out whole groups"}


class ImageData(NamedClassesData, BrokenData):
    """Settings of image tasks."""

    image_column: str = "image"
    """Column with the image: bytes, a `datasets` image, or a path relative to the table."""
    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    """Side of the square, in pixels, to which images are resized and cropped. With masks or boxes: or
    [height, width], to keep the aspect ratio.
    """
    image_resize: Literal["processor", "whole"] = "processor"
    """How evaluation images get `image_size`. processor: as the image processor of `model.pretrained` resizes, crops,
    and pads them; from scratch, the short edge is resized and the center cropped (classification). whole: the whole
    image is resized to it.
    """
    image_mean: tuple[Fraction, ...] | None = Field(default=None, examples=[[0.485, 0.456, 0.406]])
    """Mean of each color, as a fraction of 255. Default: the model's mean, or ImageNet's if the model has none."""
    image_std: tuple[PositiveFloat, ...] | None = Field(default=None, examples=[[0.229, 0.224, 0.225]])
    """Standard deviation of each color, as a fraction of 255. Default: as for image_mean."""
    augment: Augment = Augment()

    def unread(self) -> Mapping[str, str]:
        reason = "data.augment.rand_augment_ops is 0"
        return {} if self.augment.rand_augment_ops else {"augment.rand_augment_magnitude": reason}


class BoxData(ImageData):
    """Settings of tables with boxes."""

    objects_column: str = "objects"
    """Column of a table with the boxes of an image: a mapping of `bbox` and `category` (or `categories`) to lists. A
    table with other columns of boxes, such as xmin, ymin, xmax and ymax, does not need it.
    """
    class_column: str | None = Field(default=None, examples=["species"])
    """Column with the class of a box, in a table with columns of boxes. Default: found by its name (class, label,
    category, ...).
    """
    box_format: Literal["auto", "xyxy", "xywh", "cxcywh"] = "auto"
    """Order of the four numbers of a box in YOLO's files, or a table whose column names do not tell. xyxy: left, top,
    right, bottom. xywh: left, top, width, height. cxcywh: center x, center y, width, height. auto: cxcywh in YOLO's
    files; xywh in `objects_column`; in other columns, the order in which the boxes fit their images.
    """
