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
"""Setting of `data` that names the label column, by task; `label_column` for other tasks. A null value means samples to
predict.
"""


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
    """Number of tokens in the vocabulary, including the 256 bytes and the document separator."""


class TrainedTokenizer(Section):
    train_bpe: TrainBPE
    """Byte-level BPE tokenizer, trained on the training documents."""


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
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """Strength of RandAugment, from 0 to 30."""
    mixup_alpha: NonNegativeFloat = 0.0
    """Parameter of mixup (Zhang et al. 2018). Images and labels are mixed by a Beta(alpha, alpha) share; 0: off."""
    cutmix_alpha: NonNegativeFloat = 0.0
    """Parameter of CutMix (Yun et al. 2019). A box comes from another image; 0: off. If mixup is also on, each image
    draws one of the two.
    """
    scale_range: tuple[PositiveFloat, PositiveFloat] | None = (0.5, 2.0)
    """semantic-segmentation: range of the factor that resizes images and masks before `crop_size` is cut out."""


class Data(Section):
    train: str | tuple[str, ...]
    """Training data: embedded data, a path, or a data set name. Embedded data are `python-stdlib`, `stdlib-functions`,
    `digits`, and others. A path is a file, glob, or folder. Formats: txt, md, py, jsonl, csv, parquet, conll, SQuAD's
    json, bin, npz. Images are in folders by class, or together with masks.
    """
    eval: str | tuple[str, ...] | None = None
    """Evaluation data. Default: `eval_fraction` of the training documents."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """Fraction of `train` held out for evaluation. A hash of each sample (document, text, image) selects it. 0: nothing
    is held out.
    """
    text_column: str = "text"
    """Column with the text, in jsonl, csv, parquet, and data sets."""
    subset: str | None = None
    """Configuration name of a data set (`wikitext-103-raw-v1`)."""
    split: str = "train"
    """Split of a data set to train on."""
    sequence_length: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 1024
    """Number of tokens that a sample reads. The targets are the next token at each position."""
    mask_documents: bool = False
    """Whether to restrict attention to tokens of the same document and restart positions at each document. With
    `model.attn_implementation` auto, each document is attended to alone, in memory linear in the length. If this is not
    possible, a dense mask is used. The run log names the method.
    """
    encoding: Annotated[str, AfterValidator(_known_encoding)] = "auto"
    """Encoding of text files, csv, tsv, and jsonl: a Python codec name (latin-1, cp1252, utf-16). auto: UTF-8, or
    UTF-16 if the file begins with its byte order mark.
    """
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Handling of bytes that are invalid in the encoding. strict: the run stops and names the file and position.
    replace: they become U+FFFD.
    """
    header: Literal["first_line", "none"] = "first_line"
    """Location of the column names in csv and tsv. none: the file has no header, and columns are called "1", "2", ...
    """
    delimiter: Annotated[str, AfterValidator(_one_character)] = "auto"
    """Delimiter of csv: one character, or tab. auto: the first of comma, tab, semicolon, and bar that divides the first
    lines equally.
    """
    quoting: Literal["auto", "csv", "none"] = "auto"
    """Meaning of quotes in csv and tsv. csv: they enclose a field. none: they are characters of the text. auto: csv,
    except for tab-separated lines of equal length where csv quoting would fail or swallow lines.
    """
    lines: Literal["label_text", "fasttext", "fasttext_multi", "folder_names"] | None = None
    """Format of text files for a classifier. label_text: each line is `LABEL TEXT`. fasttext: each line is
    `__label__LABEL TEXT`. fasttext_multi: the same with several labels. folder_names: each file is a text, and its
    folder's name is the label. The columns are called label and text. Default: text files have no columns.
    """
    shuffle: bool = True
    """Whether to read the samples of each epoch in a permuted order. false: in the order of the source."""
    num_workers: Auto | NonNegativeInt = "auto"
    """Number of processes that read ahead, per training process."""
    pin_memory: Auto | bool = "auto"
    """Whether to use page-locked host buffers, so that copies to the GPU overlap with work."""
    cache_dir: str | None = Field(default=None, examples=["/scratch/accel_train"])
    """Folder for token shards. Default: $ACCEL_TRAIN_CACHE, or ~/.cache/accel_train if that is not set."""
    last_batch: Literal["carry", "short", "drop"] = "carry"
    """Handling of an epoch that does not end at a step. carry: the step continues with the next epoch. short: the last
    step of an epoch has fewer samples (as in transformers' Trainer). drop: the rest of an epoch is left out.
    """
    text_columns: tuple[str, ...] = ("text",)
    """text-classification, multiple-choice: one text column, or two columns that are read as a pair."""
    label_column: str | None = "label"
    """Column with the label: a name, an integer, a number (regression), or a list of names (multi_label). null: rows to
    predict, without labels.
    """
    label_names: tuple[str, ...] | None = Field(default=None, examples=[["negative", "positive"]])
    """Class names in the order of their ids. Default: the classes of the training data, sorted."""
    missing_labels: Literal["error", "drop"] = "error"
    """text-classification: handling of rows without a label. error: the run stops and names the row. drop: rows are
    left out, and the run log prints their number.
    """
    label_ids_from: NonNegativeInt = 0
    """Number of the first class, if the labels are numbers and label_names has their names."""
    id_column: str | None = None
    """Column that names a row in predictions. Default: its file and row number."""
    tokens_column: str = "tokens"
    """token-classification: column with the words of a sentence, as a list. In csv it is a JSON list, or words
    separated by blanks.
    """
    tags_column: str | None = "tags"
    """token-classification: column with one tag per word, as a list of names or ids. null: sentences to predict."""
    question_column: str = "question"
    """question-answering: column with the question."""
    context_column: str = "context"
    """question-answering: column with the text that answers the question."""
    answers_column: str | None = "answers"
    """question-answering: column with {text: [...], answer_start: [...]}, with empty lists for unanswerable questions.
    null: questions to predict.
    """
    doc_stride: PositiveInt | None = None
    """question-answering: overlap between neighboring windows of a long context, in tokens. Default: a quarter of
    max_length.
    """
    max_answer_length: PositiveInt = 30
    """question-answering: maximum length of an answer, in tokens."""
    choices_columns: tuple[str, ...] = ("endings",)
    """multiple-choice: one column with a list of endings, or one column per ending. With two text_columns, the second
    begins each ending.
    """
    max_length: PositiveInt | None = None
    """Maximum length of a text, in tokens. Longer texts are cut. Default: the model's maximum, at most 512."""
    pad_to_multiple_of: PositiveInt = 8
    """Multiple to which the padded length of a batch of texts is rounded up."""
    group_by_length: bool = False
    """Whether to batch texts of similar length, for less padding. The order remains a function of seed and step."""
    prompt_column: str = "prompt"
    """causal-lm fine-tuning: column with the prompts."""
    completion_column: str = "completion"
    """causal-lm fine-tuning: column with the completions to learn."""
    input_column: str | None = Field(default=None, examples=["input"])
    """causal-lm fine-tuning: column with an optional text that follows the prompt after a blank line (Alpaca's input).
    """
    messages_column: str = "messages"
    """causal-lm fine-tuning: column with a chat, as a list of {role, content}. The tokenizer's chat template renders
    it.
    """
    format: Literal["text", "prompt_completion", "chat"] = "text"
    """causal-lm: format of the data. text: plain text. prompt_completion and chat: rows to fine-tune on; the loss
    counts only completions (assistant turns).
    """
    completion_only_loss: bool = True
    """Whether only completions of fine-tuning rows count in the loss. false: prompts count as well."""
    chat_template: str | None = Field(default=None, examples=["chat_template.jinja"])
    """Jinja chat template, or a file with one, for a tokenizer without a template. A separate process renders a few
    chats first. A template that needs more than 5 seconds or 1 GiB is refused.
    """
    source_column: str = "source"
    """seq2seq: column with the text to read."""
    target_column: str | None = "target"
    """seq2seq: column with the text to learn. null: rows to predict, without targets."""
    source_prefix: str = Field(default="", examples=["summarize: "])
    """seq2seq: text in front of each source, for example `summarize: `."""
    max_target_length: PositiveInt = 128
    """seq2seq: maximum length of targets and of generated texts, in tokens. Longer targets are cut. Sources are cut to
    max_length.
    """
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """masked-lm: share of the tokens to predict. Of these, 80 % are masked, 10 % replaced at random, and 10 %
    unchanged.
    """
    image_column: str = "image"
    """Column with the image: bytes, a `datasets` image, or a path relative to the table."""
    mask_column: str | None = "mask"
    """semantic-segmentation: column with the mask. null: images to predict, without masks."""
    reduce_labels: bool = False
    """semantic-segmentation: whether 0 in a mask means "no class" and is not counted. Class 0 is then stored as 1
    (ADE20K).
    """
    mask_values: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = Field(default=None, examples=[[0, 128, 255]])
    """semantic-segmentation: values in the masks, in the order of the classes ([0, 255] for black and white). Other
    values are not counted.
    """
    image_mean: tuple[Fraction, ...] | None = Field(default=None, examples=[[0.485, 0.456, 0.406]])
    """Mean of each color, as a fraction of 255. Default: the model's mean, or ImageNet's if the model has none."""
    image_std: tuple[PositiveFloat, ...] | None = Field(default=None, examples=[[0.229, 0.224, 0.225]])
    """Standard deviation of each color, as a fraction of 255. Default: as for image_mean."""
    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    """Side of the square, in pixels, to which images are resized and cropped. semantic-segmentation: or [height,
    width], to keep the aspect ratio.
    """
    crop_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(default=None, examples=[512])
    """semantic-segmentation: side of the training crops in pixels, or [height, width]. Default: image_size."""
    ignore_index: Annotated[int, Field(ge=0, le=255)] = 255
    """semantic-segmentation: value of mask pixels that are not counted."""
    augment: Augment = Augment()
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
    def is_for_training(self) -> bool:
        """False for data that a trained model is shown."""
        return self._train_key == "data.train"

    def of_training(self, rows: str) -> str:
        """Return what notes call the rows of `train`: `training texts`, or `texts` where a trained
        model is shown them.
        """
        return f"training {rows}" if self.is_for_training else rows
