"""A model card is written in parts, and a later step replaces a part by its name."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertModel

from accel_train.core.model_card import FILE, FOLDER, SCORES, USE, Card, Use, new_card
from accel_train.task import TaskData
from accel_train.tasks.module import FittedModule


class OwnBert(BertModel):
    """A model of transformers with a class of its own."""


BERT = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)


def test_a_card_is_read_as_it_was_written_and_a_section_is_replaced_by_its_name() -> None:
    card = new_card("Net", "net", "add", Use("x = 1"), "a.csv", 3, None, pipeline="other")
    assert Card.parse(str(card)).sections[0] == card.sections[0]
    assert yaml.safe_load(card.metadata) == {"pipeline_tag": "other", "tags": ["accel_train"]}
    changed = Card.parse(
        str(card.with_section(SCORES, "| f1 | 1 |").with_section("More", "words").with_section(USE, ""))
    )
    assert (changed.metadata, changed.about) == (card.metadata, card.about)
    assert [(name, text.strip()) for name, text in changed.sections] == [(SCORES, "| f1 | 1 |"), ("More", "words")]


def test_a_section_joins_a_card_of_other_origin_without_changing_it() -> None:
    assert str(Card.parse("# Mine\n\nwords\n").with_section(USE, "more")) == "\n# Mine\n\nwords\n\n## Use\n\nmore\n"


@pytest.mark.parametrize(
    "model, library",
    [(nn.Linear(2, 1), None), (BertModel(BERT), "transformers"), (OwnBert(BERT), "transformers")],
    ids=["module", "transformers", "class of its own"],
)
def test_the_card_of_a_task_of_a_program_has_code_that_loads_its_weights(
    model: Any, library: str | None, tmp_path: Path
) -> None:
    data: Any = TaskData([], None, list, "")  # type: ignore[arg-type]
    FittedModule(model).save(model, data, tmp_path)
    card = Card.parse((tmp_path / FILE).read_text())
    assert yaml.safe_load(card.metadata).get("library_name") == library
    found: dict[str, Any] = {}
    exec(dict(card.sections)[USE].split("```python")[1].split("```")[0].replace(FOLDER, str(tmp_path)), found)
    if library is None:
        assert found["weights"].keys() == load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}
    else:
        assert type(found["model"]) is type(model)
