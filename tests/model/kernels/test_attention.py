"""Masks of padded rows, built without a read from a GPU. A tensor without values stands for one that the host cannot
read.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from accel_train.model.kernels.attention import masks_without_reading, with_keys
from accel_train.training.setup import prepare_run
from tests.support.hf_models import small_config
from tests.support.runs import tiny_recipe

ENCODERS = ("bert", "roberta", "electra", "modernbert")
FIELDS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_of(model_type: str) -> PreTrainedModel:
    """A model without values whose attention is SDPA."""
    with torch.device("meta"):
        if model_type in ENCODERS:
            config = AutoConfig.for_model(model_type, vocab_size=64, pad_token_id=0, local_attention=4, **FIELDS)
            return AutoModel.from_config(config, attn_implementation="sdpa")
        return AutoModelForCausalLM.from_config(small_config(model_type), attn_implementation="sdpa")


@pytest.mark.parametrize("model_type", [*ENCODERS, "gpt2", "llama"])
def test_padded_rows_are_masked_without_a_read(model_type: str) -> None:
    model = model_of(model_type)
    ids, mask = (torch.ones(2, 8, dtype=torch.long, device="meta") for _ in range(2))
    with pytest.raises(RuntimeError, match="meta"):
        model(input_ids=ids, attention_mask=mask)
    with masks_without_reading():
        assert model(input_ids=ids, attention_mask=mask)[0].shape[:2] == (2, 8)


def test_a_query_without_keys_attends_to_all_and_others_stay_as_they_are() -> None:
    mask = torch.tensor([[[[True, False, False], [True, True, False], [False, False, False]]]])
    assert with_keys(mask).tolist() == [[[[True, False, False], [True, True, False], [True, True, True]]]]


def test_a_run_builds_its_masks_so_and_leaves_the_library_as_it_was(corpus: Path) -> None:
    run = prepare_run(tiny_recipe(corpus, task="causal-lm"))
    with run.resources:
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
