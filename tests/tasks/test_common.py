"""Parts that several tasks share, at their edges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DebertaV2Config, ViTConfig

from accel_train.data.text.tokenizers import byte_tokenizer
from accel_train.recipe.schema import Recipe
from accel_train.task import load_task
from accel_train.tasks.common.classification import listed
from accel_train.tasks.common.image_views import rescale
from accel_train.tasks.common.text_models import SEQUENCES, model_config, with_token_types
from accel_train.tasks.common.texts import characters_as_words
from accel_train.tasks.common.vocabulary import padded_vocab_size
from tests.support.every_task import recipe_of
from tests.support.runs import write_jsonl
from tests.support.text_tasks import load, recipe_for, write_data
from tests.support.wording import assert_golden


def test_a_vocabulary_is_padded_up_to_a_multiple_and_by_a_multiple_of_0_not_at_all() -> None:
    assert [padded_vocab_size(1001, multiple) for multiple in (0, 1, 64)] == [1001, 1001, 1024]
    assert padded_vocab_size(1024, 64) == 1024


def test_twelve_names_are_listed_and_the_others_counted() -> None:
    names = [str(number) for number in range(14)]
    assert listed(names[:12]) == ", ".join(names[:12])
    assert listed(names) == f"{', '.join(names[:12])} and 2 more"


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_an_image_that_shrinks_is_smoothed(scale: float) -> None:
    pixels = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    size = round(16 * scale)
    expected = torch.nn.functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    torch.testing.assert_close(rescale(pixels, scale, takes_any_size=True), expected)


def test_scripts_without_spaces_are_counted_by_one_to_three_characters() -> None:
    analyze = characters_as_words(["\u6c34\u706b\u6728\u91d1"])
    assert analyze is not None
    assert {len(each) for each in analyze("\u6c34\u706b\u6728\u91d1")} == {1, 2, 3}


@pytest.mark.parametrize(("text", "is_unspaced"), [("\u6c34ab", False), ("\u6c34\u706ba", True), ("1 2", False)])
def test_a_text_is_of_a_script_without_spaces_if_most_of_its_letters_are(text: str, is_unspaced: bool) -> None:
    assert (characters_as_words([text]) is not None) is is_unspaced


def test_a_pretrained_model_without_the_head_is_refused_and_by_consent_is_not(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    for consents in (False, True):
        model = {"pretrained": str(tmp_path), "trust_remote_code": consents}
        recipe = recipe_for("text-classification", tmp_path / "rows.jsonl", model=model, tokenizer="bytes")
        if consents:
            assert isinstance(model_config(recipe, tokenizer, SEQUENCES), ViTConfig)
        else:
            with pytest.raises(ValueError, match="trust_remote_code"):
                model_config(recipe, tokenizer, SEQUENCES)


@pytest.mark.parametrize(("sizes", "takes"), [(0, False), (1, False), (2, True)])
def test_a_model_takes_token_types_if_it_has_at_least_two(sizes: int, takes: bool) -> None:
    tokenizer = byte_tokenizer()
    assert with_token_types(tokenizer, DebertaV2Config(type_vocab_size=sizes)) is takes
    assert ("token_type_ids" in tokenizer.model_input_names) is takes


@pytest.mark.parametrize("task", ["seq2seq", "question-answering", "multiple-choice"])
def test_what_is_in_both_files_is_noted(task: str, tmp_path: Path) -> None:
    path = write_data(task, tmp_path)
    notes = load(recipe_for(task, path, data={"eval": str(path), "eval_fraction": 0}))[1].facts.notes
    assert_golden("\n".join(notes))


def test_samples_of_text_tasks_vary_in_length(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}", "label": str(number % 2)} for number in range(20)]
    data = load(recipe_for("text-classification", write_jsonl(tmp_path / "rows.jsonl", rows)))[1]
    assert data.lengths_vary


@pytest.mark.parametrize(("wanted", "noted"), [(5000, True), (262, False)])
def test_a_vocabulary_that_the_texts_do_not_support_is_noted(wanted: int, noted: bool, tmp_path: Path) -> None:
    tokenizer = {"train_bpe": {"vocab_size": wanted}}
    recipe = recipe_for("text-classification", write_data("text-classification", tmp_path), tokenizer=tokenizer)
    notes = load(recipe)[1].facts.notes
    assert any(f"tokenizer.train_bpe.vocab_size={wanted}" in note for note in notes) is noted


def test_a_model_without_an_auxiliary_head_is_taken_as_it_is(tmp_path: Path) -> None:
    task: Any = load_task("semantic-segmentation")
    recipe = Recipe.model_validate(recipe_of("semantic-segmentation", tmp_path))
    config, notes = task.model_config(recipe)
    assert notes == []
    assert not hasattr(config, "use_auxiliary_head")
