"""The data sections of a recipe: data, image augmentation, and the tokenizer."""

import codecs
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr

from accel_train.core.format import LARGEST_COUNT
from accel_train.recipe.values import (
    Auto,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

LABEL_COLUMNS = {
    "semantic-segmentation": "mask_column",
    "token-classification": "tags_column",
    "seq2seq": "target_column",
    "question-answering": "answers_column",
}
"""The setting of `data` that names the labels, by task; `label_column` for the others. None there: samples to predict."""


def _known_encoding(name: str) -> str:
    try:
        is_text = name == "auto" or codecs.lookup(name)._is_text_encoding
    except LookupError:
        is_text = False
    if not is_text:
        raise ValueError(f"data.encoding={name} is no encoding that Python knows; latin-1, cp1252 and utf-16 are some")
    return name


def _one_character(delimiter: str) -> str:
    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
    if delimiter != "auto" and (len(delimiter) != 1 or delimiter in '\r\n"'):
        raise ValueError(f"data.delimiter={delimiter!r} is not one character; give ';', tab or '|', say")
    return delimiter


class TrainBPE(Section):
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] = 4096
    """Tokens in the vocabulary, the 256 bytes and the document separator included."""


class TrainedTokenizer(Section):
    train_bpe: TrainBPE
    """A byte-level BPE, trained on the training documents."""


class Augment(Section):
    """Augmentation of training images, not of evaluation images; drawn from (seed, epoch, sample) alone."""

    random_resized_crop: tuple[Fraction, Fraction] | None = (0.35, 1.0)
    """Cut out a part of between these fractions of the area, and resize it; none: resize and crop the centre."""
    horizontal_flip: Fraction = 0.5
    """Probability."""
    vertical_flip: Fraction = 0.0
    """Probability."""
    color_jitter: NonNegativeFloat = 0.0
    """Brightness, contrast and saturation change by a factor between 1 - x and 1 + x."""
    rand_augment_ops: NonNegativeInt = 0
    """RandAugment (Cubuk et al. 2020): operations an image goes through."""
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """RandAugment: how strong, of 30."""
    mixup_alpha: NonNegativeFloat = 0.0
    """Mixup (Zhang et al. 2018): images and labels are mixed by a Beta(alpha, alpha) share; 0: never."""
    cutmix_alpha: NonNegativeFloat = 0.0
    """CutMix (Yun et al. 2019): a box comes from another image; with mixup as well, each image draws one of the two."""
    scale_range: tuple[PositiveFloat, PositiveFloat] | None = (0.5, 2.0)
    """semantic-segmentation: images and masks are resized by a factor of this range before `crop_size` is cut out."""


class Data(Section):
    train: str | tuple[str, ...]
    """Embedded data (`python-stdlib`, `stdlib-functions`, `digits`, ...), a file, glob or folder (txt, md, py, jsonl, csv,
    parquet, conll, SQuAD's json, bin; images by class; images and masks; npz), or a data set name."""
    eval: str | tuple[str, ...] | None = None
    """Evaluation data; none: `eval_fraction` of the training documents."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """Samples held out of `train` for evaluation, chosen by a hash of each (document, text, image); 0 holds out none."""
    text_column: str = "text"
    """The column with the text, in jsonl, csv, parquet and data sets."""
    subset: str | None = None
    """The configuration name of a data set (`wikitext-103-raw-v1`)."""
    split: str = "train"
    """The split of a data set to train on."""
    sequence_length: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 1024
    """Tokens a sample predicts: each window reads this many tokens and predicts the next of each."""
    mask_documents: bool = False
    """Attention stays within a document, and positions restart at each. Where `model.attn_implementation` is auto each document is
    attended to alone, in memory linear in the length; where that is not possible, under a dense mask. The start says which."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "auto"
    """Text files, csv, tsv and jsonl: the name of an encoding as Python has it (latin-1, cp1252, utf-16); auto: UTF-8, or UTF-16 where
    the file begins with its byte order mark."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """A byte that is not of the encoding stops the run, naming file and position, or becomes U+FFFD."""
    header: Literal["first_line", "none"] = "first_line"
    """csv and tsv: where the names of the columns stand; none: there are none, and columns are called "1", "2", ..."""
    delimiter: Annotated[str, AfterValidator(_one_character)] = "auto"
    """csv: one character, or tab; auto: comma, tab, semicolon or bar, the first that divides the first lines alike."""
    quoting: Literal["auto", "csv", "none"] = "auto"
    """csv and tsv: quotes bind a field together (csv), or are characters of the text (none); auto: csv, and none for tabs where each
    line has as many and csv quoting would fail or swallow lines."""
    lines: Literal["label_text", "fasttext", "fasttext_multi", "folder_names"] | None = None
    """Text files for a classifier: each line is `LABEL TEXT` (label_text), or `__label__LABEL TEXT` (fasttext; fasttext_multi: with
    several labels); or each file is a text, and the name of its folder the label (folder_names). Their columns are called label and
    text; none: text files have no columns."""
    shuffle: bool = True
    """Read the samples of each epoch in a permuted order; off: in the order of the source."""
    num_workers: Auto | NonNegativeInt = "auto"
    """Processes that read ahead, per training process."""
    pin_memory: Auto | bool = "auto"
    """Page-locked host buffers, so that copies to the GPU overlap with work."""
    cache_dir: str | None = Field(default=None, examples=["/scratch/accel_train"])
    """Where token shards are kept; none: $ACCEL_TRAIN_CACHE, else ~/.cache/accel_train."""
    last_batch: Literal["carry", "short", "drop"] = "carry"
    """Where an epoch is no whole number of steps: carry: the step continues with the next epoch; short: the last step of an
    epoch has fewer samples (as in transformers' Trainer); drop: the rest of an epoch is left out."""
    text_columns: tuple[str, ...] = ("text",)
    """text-classification, multiple-choice: one column, or two that are read as a pair."""
    label_column: str | None = "label"
    """The column with the label: a name, an integer, a number (regression), or a list of names (multi_label); none: rows to
    predict, without labels."""
    label_names: tuple[str, ...] | None = Field(default=None, examples=[["negative", "positive"]])
    """The classes, in the order of their ids; none: those of the training data, sorted."""
    missing_labels: Literal["error", "drop"] = "error"
    """text-classification: a row without a label stops the run, naming it, or is left out (drop); the start says how many."""
    label_ids_from: NonNegativeInt = 0
    """The number of the first class, where the labels are numbers and label_names has their names."""
    id_column: str | None = None
    """A column that names a row in predictions; none: its file and row."""
    tokens_column: str = "tokens"
    """token-classification: the column with the words of a sentence, a list (in csv a JSON list, or words between blanks) ..."""
    tags_column: str | None = "tags"
    """... and the one with a tag for each word, a list of names or ids; none: sentences to predict."""
    question_column: str = "question"
    """question-answering: the column with the question ..."""
    context_column: str = "context"
    """... the one with the text that answers it ..."""
    answers_column: str | None = "answers"
    """... and the one with {text: [...], answer_start: [...]}, empty lists where there is no answer; none: questions to predict."""
    doc_stride: PositiveInt | None = None
    """question-answering: tokens that neighbouring windows of a long context share; none: a quarter of max_length."""
    max_answer_length: PositiveInt = 30
    """question-answering: tokens of an answer at most."""
    choices_columns: tuple[str, ...] = ("endings",)
    """multiple-choice: one column with a list of endings, or a column for each; of two text_columns the second begins each ending."""
    max_length: PositiveInt | None = None
    """Longer texts are cut to this many tokens; none: what the model can take, 512 at most."""
    pad_to_multiple_of: PositiveInt = 8
    """Batches of texts are padded to their longest, rounded up to this."""
    group_by_length: bool = False
    """Batches of texts of like length, for less padding; the order stays a function of seed and step."""
    prompt_column: str = "prompt"
    """causal-lm fine-tuning: the column with prompts ..."""
    completion_column: str = "completion"
    """... and the one with the completions that are learned."""
    input_column: str | None = Field(default=None, examples=["input"])
    """causal-lm fine-tuning: a column whose text, where a row has some, follows the prompt after a blank line (Alpaca's input)."""
    messages_column: str = "messages"
    """causal-lm fine-tuning: the column with a chat, a list of {role, content}; rendered by the tokenizer's chat template."""
    format: Literal["text", "prompt_completion", "chat"] = "text"
    """causal-lm: plain text; or rows to fine-tune on, whose loss counts completions (assistant turns) only."""
    completion_only_loss: bool = True
    """Fine-tuning rows: off counts the loss on prompts as well."""
    chat_template: str | None = Field(default=None, examples=["chat_template.jinja"])
    """A Jinja chat template, or a file with one, where the tokenizer brings none. A few chats are rendered first in a process of its
    own: a template that needs more than 5 seconds or 1 GiB is refused."""
    source_column: str = "source"
    """seq2seq: the column with the text that is read ..."""
    target_column: str | None = "target"
    """... and the one with the text that is learned; none: rows to predict, without targets."""
    source_prefix: str = Field(default="", examples=["summarize: "])
    """seq2seq: stands before each source, `summarize: ` say."""
    max_target_length: PositiveInt = 128
    """seq2seq: longer targets are cut to this many tokens, and no longer texts are generated; sources are cut to max_length."""
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """masked-lm: the share of the tokens that are to be predicted: 8 of 10 are masked, 1 is replaced at random, 1 is left."""
    image_column: str = "image"
    """The column with the image: bytes, a `datasets` image, or a path relative to the table."""
    mask_column: str | None = "mask"
    """semantic-segmentation: the column with the mask; none: images to predict, without masks."""
    reduce_labels: bool = False
    """semantic-segmentation: 0 in a mask is no class and counts nowhere, and class 0 is 1 there (ADE20K)."""
    mask_values: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = Field(default=None, examples=[[0, 128, 255]])
    """semantic-segmentation: the numbers in masks, in the order of the classes ([0, 255] for black and white); others count nowhere."""
    image_mean: tuple[Fraction, ...] | None = Field(default=None, examples=[[0.485, 0.456, 0.406]])
    """Mean of each colour, as a fraction of 255; none: the model's own, else ImageNet's."""
    image_std: tuple[PositiveFloat, ...] | None = Field(default=None, examples=[[0.229, 0.224, 0.225]])
    """Standard deviation of each colour, as image_mean."""
    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    """Images are resized and cropped to this square; semantic-segmentation: or to [height, width], so that their aspect is kept."""
    crop_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[512])
    """semantic-segmentation: training crops of this square, or [height, width]; none: image_size."""
    ignore_index: Annotated[int, Field(ge=0, le=255)] = 255
    """semantic-segmentation: pixels of this value count nowhere."""
    augment: Augment = Augment()
    _train_key: str = PrivateAttr("data.train")

    def shown_as(self, key: str) -> Self:
        """Return this section for data that a trained model is shown; messages call the data `key`, as its user names it."""
        shown = self.model_copy()
        shown._train_key = key
        return shown

    @property
    def train_key(self) -> str:
        """What messages call the data of `train`."""
        return self._train_key

    @property
    def is_for_training(self) -> bool:
        """False for data that a trained model is shown."""
        return self._train_key == "data.train"

    def of_training(self, rows: str) -> str:
        """Return what notes call the rows of `train`: `training texts`, or `texts` where a trained model is shown them."""
        return f"training {rows}" if self.is_for_training else rows
