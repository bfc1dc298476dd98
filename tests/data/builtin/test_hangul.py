"""Korean syllables: each is there once, with the names of its letters."""

from accel_train.data.builtin.stdlib import hangul_letters


def test_each_syllable_is_there_once_with_its_letters() -> None:
    rows = hangul_letters()
    letters = dict(zip(rows["source"], rows["target"]))
    assert len(letters) == len(rows) == 19 * 21 * 28
    assert letters["gag"] == "kiyeok a kiyeok"
    assert letters["ggwaelg"] == "ssangkiyeok wae rieul-kiyeok"
    assert rows["id"][0] == "U+AC00"
