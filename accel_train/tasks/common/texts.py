"""Rows with texts, their split into training and evaluation, their words, and the tokenizers of encoders."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from accel_train.core.files import digest64
from accel_train.core.json_io import parse_json
from accel_train.data.samples import group_names, held_out_units
from accel_train.data.sources import Source, describe, resolve_both
from accel_train.data.tables import columns_read, read_rows, show_cell, text_of
from accel_train.data.text.documents import divide_rows
from accel_train.data.text.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from accel_train.recipe.data import Data, TextData, TrainedTokenizer
from accel_train.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNSPACED = (
    # Thai, Lao, Tibetan, Burmese; Khmer; Tai; Balinese; Chinese and Japanese; Javanese.
    "\u0e00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Ranges of letters and vowel signs of scripts that put no space between words."""
_RUNS = re.compile(f"[{_UNSPACED}]+")
WORD = rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+"
"""Pattern of a word; or of a character, for scripts without spaces."""
_LEAST_UNSPACED_TEXTS = 0.05
_MOST_CHARACTERS = 3

# Joins a pair into one text for hashing. ASCII's record separator does not occur in written text.
_BETWEEN_TEXTS = "\x1e"


class Keyed(Protocol):
    """A row with a text key. Rows with equal keys are on the same side of a split."""

    @property
    def key(self) -> str:
        """The key text."""

    @property
    def where(self) -> str:
        """File and line or row."""


KeyedRow = TypeVar("KeyedRow", bound=Keyed)


class TextRow(NamedTuple):
    """One text or pair with its label."""

    texts: tuple[str, ...]
    label: Any
    """Label, or None without `data.label_column`. With `data.label_columns`, a tuple of their cells."""
    where: str
    """File and line or row."""
    id: str
    """Name of the row in predictions: its id column, or `where`."""

    @property
    def key(self) -> str:
        """Return the row's texts joined into one."""
        return _BETWEEN_TEXTS.join(self.texts)


def joined(rows: Iterable[TextRow]) -> list[str]:
    """Return each row's texts joined into one, for hashing and for counting words."""
    return [row.key for row in rows]


def characters_as_words(texts: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Return an analyzer for scikit-learn's vectorizers if texts are in a script without spaces, or None.

    It counts 1 to 3 characters of these scripts, and words elsewhere. Returns None if fewer than 5 % of the texts are
    mainly in these scripts.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    if sum(map(_is_unspaced, texts)) < _LEAST_UNSPACED_TEXTS * len(texts):
        return None
    words = CountVectorizer().build_analyzer()
    characters = CountVectorizer(analyzer="char", ngram_range=(1, _MOST_CHARACTERS)).build_analyzer()

    def analyze(text: str) -> list[str]:
        runs = _RUNS.findall(text)
        return [*words(_RUNS.sub(" ", text)), *(each for run in runs for each in characters(run))]

    return analyze


def _is_unspaced(text: str) -> bool:
    """Return whether most letters of a text's beginning are of a script without spaces."""
    start = text[:1000]
    letters = sum(map(str.isalpha, start))
    return letters > 0 and 2 * sum(map(len, _RUNS.findall(start))) > letters


def text_rows(
    sources: Sequence[Source],
    data: Data,
    columns: Sequence[str],
    label_column: str | tuple[str, ...] | None,
    *,
    key: str,
) -> list[TextRow]:
    """Return all rows of sources with the texts of these columns, in memory. Several label columns give a tuple.

    Raises:
        ValueError: no rows exist, a column is missing, or a cell is not text; the message names file, row and column.
    """
    labels = label_column if isinstance(label_column, tuple) else () if label_column is None else (label_column,)
    further = labels if data.id_column is None else (*labels, data.id_column)
    rows, names = [], [name for column in columns for name in columns_read(column)]
    for source in sources:
        for row in read_rows(source, (*names, *further), data):
            unread = iter(row.cells)
            texts = tuple(text_of(column, unread, row.where, data) for column in columns)
            cells = tuple(islice(unread, len(labels)))
            label = cells if isinstance(label_column, tuple) else cells[0] if cells else None
            rows.append(TextRow(texts, label, row.where, row.where if data.id_column is None else str(row.cells[-1])))
    if not rows:
        raise ValueError(f"{key} holds no rows: {describe(sources)}; name a table with rows")
    return rows


def list_cell(cell: Any, column: str, where: str) -> Sequence[Any]:
    """Return a cell that holds a list. Text (csv) is read as a JSON list or as space-separated items.

    Raises:
        ValueError: the cell is not a list; the message names file, row and column.
    """
    found = cell
    if isinstance(cell, str):
        try:
            found = parse_json(cell) if cell.lstrip().startswith("[") else cell.split()
        except ValueError:
            found = None
    if not isinstance(found, list | tuple):
        raise ValueError(
            f"{where}: column {column!r} holds {show_cell(cell)}, not a list; write one entry for each word"
        )
    return found


@dataclass(frozen=True)
class Divided(Generic[KeyedRow]):
    """Rows in memory, on their sides."""

    train: list[KeyedRow]
    eval: list[KeyedRow] | None
    description: str
    notes: list[str]
    """Notes for the user, as sentences."""


def read_both(
    data: TextData, read: Callable[[Sequence[Source], str, list[str]], list[KeyedRow]], *, is_labelled: bool = True
) -> Divided[KeyedRow]:
    """Return the rows of `data.train` and `data.eval`. Without `data.eval`, a part of `data.train` is held out.

    `read` returns the rows of sources, given the setting that names them, and adds to notes.
    """
    sources, eval_sources, notes = resolve_both(data)
    train, evaluation, split_notes = hold_out(read(sources, data.train_key, notes), data, sources, eval_sources)
    notes += split_notes
    if eval_sources:
        evaluation = read(eval_sources, "data.eval", notes)
        notes += repeated_texts(train, evaluation, data) if is_labelled else []
    return Divided(train, evaluation, describe(sources, eval_sources), notes)


def hold_out(
    rows: list[KeyedRow],
    data: TextData,
    sources: Sequence[Source],
    eval_sources: Sequence[Source] = (),
    classes: Sequence[int] | None = None,
) -> tuple[list[KeyedRow], list[KeyedRow] | None, list[str]]:
    """Return training rows, evaluation rows (None if nothing is to be held out), and notes.

    Rows with equal texts are on the same side, or with `data.group_column` rows of one group, read from `sources`.
    With `classes`, each class has the same share of its rows on each side.

    Raises:
        ValueError: one side would be empty, or a row has no group.
    """
    fraction = 0.0 if eval_sources else data.eval_fraction
    if fraction and (data.group_column is not None or classes is not None):
        return _hold_out_units(rows, data, sources, classes)
    train, evaluation, split = divide_rows(rows, [row.key for row in rows], fraction, "texts", data.split_seed)
    if split.cut_tail:
        raise ValueError(
            "data.train has one text only (repeated, perhaps), so none can be held out for evaluation; give more, or "
            "set data.eval, or data.eval_fraction: 0"
        )
    return train, evaluation or None, [split.note] if split.note else []


def _hold_out_units(
    rows: list[KeyedRow], data: TextData, sources: Sequence[Source], classes: Sequence[int] | None
) -> tuple[list[KeyedRow], list[KeyedRow] | None, list[str]]:
    column, keys = data.group_column, [row.key for row in rows]
    if column is not None:
        found = {row.where: row.cells[0] for source in sources for row in read_rows(source, (column,), data)}
        if not found.keys() >= {row.where for row in rows}:
            raise ValueError(f"data.group_column={column}: {describe(sources)} has no columns; give rows of a table")
        keys = group_names([found[row.where] for row in rows], [row.where for row in rows], column)
    hashes = [digest64(key.encode(errors="surrogatepass"), data.split_seed) for key in keys]
    is_held_out = held_out_units(hashes, [0] * len(rows) if classes is None else classes, data.eval_fraction)
    train, evaluation = ([row for row, held in zip(rows, is_held_out) if held is side] for side in (False, True))
    if not evaluation:
        raise ValueError(
            "data.stratify=true: no class has two different texts, so none can be held out; set it to false"
        )
    if column is None:
        return train, evaluation, []
    num_held_out = len({key for key, held in zip(keys, is_held_out) if held})
    note = (
        f"data.group_column={column}: {len({*keys}) - num_held_out:,} groups to train on, {num_held_out:,} held out "
        f"({len(evaluation) / len(rows):.1%} of {len(rows):,} texts)"
    )
    return train, evaluation, [note, *repeated_texts(train, evaluation, data)]


def repeated_texts(train: Sequence[Keyed], evaluation: Sequence[Keyed], data: Data) -> list[str]:
    """Return a note if evaluation texts are also training texts."""
    if not data.is_for_training:
        return []
    trained = {row.key for row in train}
    count = sum(row.key in trained for row in evaluation)
    if not count:
        return []
    return [f"{count:,} of {len(evaluation):,} evaluation texts are in data.train too, so their score says little"]


def classifier_tokenizer(recipe: Recipe, texts: Iterable[str]) -> tuple["PreTrainedTokenizerBase", list[str]]:
    """Return the recipe's tokenizer with a padding token, and notes on its choice.

    `bytes` and a BPE trained here get [CLS], [SEP] and [PAD]. They encode a text as [CLS] text [SEP] and a pair as
    [CLS] first [SEP] second [SEP]. `auto` selects the tokenizer of `model.pretrained`, or bytes without one.
    """
    tokenizer, notes, is_own = text_tokenizer(recipe, texts)
    return with_frame(tokenizer) if is_own else tokenizer, notes


def text_tokenizer(recipe: Recipe, texts: Iterable[str]) -> tuple["PreTrainedTokenizerBase", list[str], bool]:
    """Return the recipe's tokenizer, notes, and whether it was made here.

    A BPE is trained on `texts`. A tokenizer made here has no padding token yet.
    """
    choice = recipe.tokenizer_in_use
    notes: list[str] = []
    if isinstance(choice, TrainedTokenizer):
        wanted = choice.train_bpe.vocab_size
        trained = train_bpe(texts, wanted)
        if len(trained) < wanted:
            notes.append(
                f"the training texts support {len(trained)} tokens, not tokenizer.train_bpe.vocab_size={wanted}"
            )
        return trained, notes, True
    if choice == "bytes":
        return byte_tokenizer(), notes, True
    if recipe.tokenizer == "auto":
        notes.append(f"tokenizer: from {choice}, as in its training")
    tokenizer = load_tokenizer(choice, trust_remote_code=recipe.model.trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        notes.append(f"the tokenizer {choice} has no padding token: [PAD] was added, as id {tokenizer.pad_token_id}")
    return tokenizer, notes, False


def with_frame(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Return the tokenizer with [CLS], [SEP] and [PAD] added. It puts [CLS] and [SEP] around a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
    )
    return tokenizer
