"""Fine-tuning rows for a causal LM: packed into windows if attention can keep them apart, otherwise one per sample."""

from functools import partial

import numpy as np
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from accel_train.core.state import Choice
from accel_train.model.kernels.attention import CAUSAL_SDPA, choose_attention
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.causal_lm.data import RowCorpus
from accel_train.tasks.causal_lm.packing import PackedRows, TokenRows, collate_packed, pack


def rows_as_samples(recipe: Recipe, corpus: RowCorpus, config: PreTrainedConfig) -> TaskData:
    """Return the data of a run on tokenized rows, packed or one row per sample."""
    packed = can_keep_rows_apart(recipe, config)
    length = CausalLMData.of(recipe.data).sequence_length

    def windows(rows: TokenRows) -> PackedRows:
        rows_of = pack(rows.lengths, length) if packed.value else list(np.arange(len(rows))[:, None])
        return PackedRows(rows, rows_of, sequence_length=length, padding_id=corpus.separator_id)

    train, held_out = windows(corpus.train), None if corpus.eval is None else windows(corpus.eval)
    multiple = None if packed.value else CausalLMData.of(recipe.data).pad_to_multiple_of
    num_positions = len(train) * length if packed.value else int(train.rows.lengths.sum())
    note = f"each row is a separate sample, padded: {packed.reason}"
    if packed.value:
        note = (
            f"{len(train.rows):,} rows are packed into {len(train):,} windows of {length} tokens, "
            f"{train.fill:.1%} full; attention and positions stay within a row"
        )
    facts = corpus.facts
    facts.num_train, facts.num_eval = len(train), 0 if held_out is None else len(held_out)
    facts.positions_per_target = num_positions / facts.train_targets
    facts.others["fill"] = train.fill if packed.value else None
    facts.notes.append(note)
    return TaskData(
        train=train,
        eval=held_out,
        collate=partial(collate_packed, pad_to_multiple_of=multiple),
        fingerprint=corpus.fingerprint,
        facts=facts,
        reading_is_free=True,
        source=corpus,
        lengths_vary=not packed.value,
    )


def shares_windows(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Return whether documents or fine-tuning rows share windows and are masked from each other."""
    is_text = CausalLMData.of(recipe.data).format == "text"
    return CausalLMData.of(recipe.data).mask_documents if is_text else can_keep_rows_apart(recipe, config).value


def can_keep_rows_apart(recipe: Recipe, config: PreTrainedConfig) -> Choice[bool]:
    """Return whether rows may share a window. This requires attention and positions known to separate them exactly."""
    implementation = recipe.model.attn_implementation
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Choice(False, f"{config.model_type} is not among the models checked for packing")
    if implementation not in ("auto", "sdpa"):
        return Choice(False, f"attn_implementation {implementation} is not checked for packing")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    choice = choose_attention("auto", model_class, config, CausalLMData.of(recipe.data).sequence_length)
    return Choice(choice.value == CAUSAL_SDPA, choice.reason)
