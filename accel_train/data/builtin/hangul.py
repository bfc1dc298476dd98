"""`hangul-letters`: Korean syllables from Python's Unicode data, as translation pairs."""

import unicodedata
from typing import TYPE_CHECKING

from accel_train.data.builtin.stdlib import data_set

if TYPE_CHECKING:
    import datasets

_FIRST, _LAST = 0xAC00, 0xD7A3


def hangul_letters() -> "datasets.Dataset":
    """Return columns `source`, `target` and `id` (`U+AC01`) for all 11,172 syllables in Unicode order.

    The source is the Unicode name of a syllable in Latin letters (`ggwaelg`). The target lists the names of its two or
    three letters (`ssangkiyeok wae rieul-kiyeok`). The source does not mark letter boundaries; they follow from the
    other letters.
    """
    rows = []
    for syllable in map(chr, range(_FIRST, _LAST + 1)):
        letters = [unicodedata.name(part).split(" ", 2)[2] for part in unicodedata.normalize("NFD", syllable)]
        source = unicodedata.name(syllable).removeprefix("HANGUL SYLLABLE ")
        rows.append((source.lower(), " ".join(letters).lower(), f"U+{ord(syllable):04X}"))
    return data_set(("source", "target", "id"), rows)
