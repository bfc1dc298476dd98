"""`stdlib-names`: the name is blanked wherever it stands, is one of four, and at no place or by no name alone can it be
told. `stdlib-summaries`: sentences with the signatures of their functions; no text is in two rows.
"""

import re
from collections import Counter

import pytest

from accel_train.data.builtin.stdlib import NUM_CHOICES, _documented, stdlib_names, stdlib_summaries


@pytest.mark.slow
def test_functions_without_their_names_are_told_neither_by_place_nor_by_the_name_alone() -> None:
    rows = stdlib_names()
    assert len(rows) > 5000
    assert len(set(rows["text"])) == len(rows), "no text is in training and evaluation"
    right, wrong, places = Counter[str](), Counter[str](), Counter[int]()
    for text, names, label in zip(rows["text"], rows["endings"], rows["label"]):
        assert len({*names}) == len(names) == NUM_CHOICES
        assert re.match(r"(async )?def _\b", text)
        assert not re.search(rf"\b{names[label]}\b", text)
        right[names[label]] += 1
        wrong.update(name for place, name in enumerate(names) if place != label)
        places[label] += 1
    assert max(places.values()) < 1.1 * len(rows) / NUM_CHOICES
    for name, count in right.most_common(5):
        assert 0.7 < wrong[name] / (NUM_CHOICES - 1) / count < 1.3, name


SOURCE = '''
class Stack:
    def push(self, item, *, twice=False):
        """Put an item
        on top. Later items come first.

        More text.
        """
    def pop(self): return self.items.pop()
async def read(path, /): "Read e.g. a file"
'''


def test_a_function_has_its_first_sentence_and_its_class_and_arguments() -> None:
    assert list(_documented(SOURCE)) == [
        ("Read e.g. a file", "read(path)", 10),
        ("Put an item on top.", "Stack.push(item, twice)", 3),
        ("", "Stack.pop()", 9),
    ]


@pytest.mark.slow
def test_no_text_is_in_two_rows_and_packages_are_many() -> None:
    rows = stdlib_summaries()
    texts = [*rows["anchor"], *rows["positive"]]
    assert len({*texts}) == len(texts) > 10_000
    assert len({*rows["package"]}) > 100
