"""`hangul-letters`: Korean syllables from Python's Unicode data, as translation pairs."""

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets

_FIRST, _LAST = 0xAC00, 0xD7A3
_SYLLABLE = "HANGUL SYLLABLE "


def hangul_letters() -> "datasets.Dataset":
    """Return columns `source`, `target` and `id` (`U+AC01`) for all 11,172 syllables in Unicode order.

    The source is the Unicode name of a syllable in Latin letters (`ggwaelg`). The target lists the names of its two or
    three letters (`ssangkiyeok wae rieul-kiyeok`). The source does not mark letter boundaries; they follow from the
    other letters.
    """
    import datasets

    syllables = [chr(code) for code in range(_FIRST, _LAST + 1)]
    letters = [
        [unicodedata.name(part).split(" ", 2)[2] for part in unicodedata.normalize("NFD", each)] for each in syllables
    ]
    columns = {
        "source": [unicodedata.name(each).removeprefix(_SYLLABLE).lower() for each in syllables],
        "target": [" ".join(names).lower() for names in letters],
        "id": [f"U+{ord(each):04X}" for each in syllables],
    }
    return datasets.Dataset.from_dict(columns)
