"""A later version, with one more setting that does nothing in every section: resume `STORED`'s runs here.

`newer_version.py STORED` prints, as JSON by recipe, the differences that the resume would refuse or report, and how
many of the new settings its fingerprint has.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from accel_train import train
from accel_train.recipe.names import recipe_names
from accel_train.recipe.tasks import TASKS
from accel_train.recipe.values import Section
from tests.checkpoint.stored_runs.make import FINGERPRINTS, RUNS, recipe_of, write_data
from tests.checkpoint.test_stored_runs import compared

NEW = "a_new_setting"


def sections(kind: type[Section] = Section) -> Iterator[type[Section]]:
    """Yield all classes of sections."""
    for each in kind.__subclasses__():
        yield from (each, *sections(each))


def add_a_setting_to_every_section() -> None:
    """Add it as the source of a section would."""
    for task in TASKS.values():
        assert NEW not in task.data.model_fields
    kinds = list(dict.fromkeys(sections()))
    for kind in kinds:
        kind.model_fields[NEW] = FieldInfo.from_annotated_attribute(int, 0)
    # A section is built of the sections in it: the deepest lies three below a recipe.
    for _ in range(3):
        for kind in kinds:
            kind.model_rebuild(force=True)
            for field in kind.model_fields.values():
                if isinstance(field.default, Section):
                    field.default = type(field.default)()
    recipe_names.cache_clear()


if __name__ == "__main__":
    stored = Path(sys.argv[1])
    add_a_setting_to_every_section()
    write_data(Path())
    found = {}
    for name in FINGERPRINTS:
        changes, identity = compared(stored, name, recipe_of(name))
        found[name] = changes, json.dumps(identity).count(NEW)
    for name in RUNS:
        shutil.copytree(stored / name, name)
        train(recipe_of(name).model_copy(update={"output_dir": name}))
    print(json.dumps(found))
