"""`stdlib-summaries`: sentences with the signatures of their functions; no text is in two rows."""

import pytest

from accel_train.data.builtin.stdlib import _documented, stdlib_summaries

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
