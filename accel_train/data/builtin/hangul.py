"""Korean syllables from the Unicode data that comes with Python, as pairs to translate: `hangul-letters`."""

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets

_FIRST, _LAST = 0xAC00, 0xD7A3
_SYLLABLE = "HANGUL SYLLABLE "


def hangul_letters() -> "datasets.Dataset":
    """Return columns `source`, `target` and `id` (`U+AC01`), for all 11,172 syllables in the order of Unicode.

    A source is a syllable in Latin letters (`ggwaelg`), as Unicode names it; the target is the names of the two or three letters that
    it is written with (`ssangkiyeok wae rieul-kiyeok`). Where a letter ends in the source follows from the others.
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
