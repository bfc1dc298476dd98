"""Fine-tuning rows for a causal LM: packed into windows where its attention can keep them apart, else each alone."""

from functools import partial
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase

from accel_train.causal_attention import CAUSAL_SDPA, choose_attention
from accel_train.data.fine_tuning import RowCorpus
from accel_train.data.packing import PackedRows, TokenRows, collate_alone, collate_packed, one_row_each, pack
from accel_train.recipe import Recipe
from accel_train.state import Choice
from accel_train.task import TaskData


def rows_as_samples(recipe: Recipe, corpus: RowCorpus, config: PreTrainedConfig) -> TaskData:
    """The data of a run on tokenised rows; `facts["positions_per_target"]` says how much is computed for each target."""
    packed = can_keep_rows_apart(recipe, config)
    length = recipe.data.sequence_length

    def windows(rows: TokenRows) -> PackedRows:
        packing = pack(rows.lengths, length) if packed.value else one_row_each(len(rows))
        return PackedRows(rows, packing, sequence_length=length, padding_id=corpus.separator_id)

    train = windows(corpus.train)
    held_out = None if corpus.eval is None else windows(corpus.eval)
    alone = partial(collate_alone, pad_to_multiple_of=recipe.data.pad_to_multiple_of)
    num_positions = len(train) * length if packed.value else int(train.rows.lengths.sum())
    facts: dict[str, Any] = {
        "num_train": len(train),
        "num_eval": 0 if held_out is None else len(held_out),
        "fill": train.fill if packed.value else None,
        "positions_per_target": num_positions / corpus.facts["train_targets"],
        "notes": [*corpus.facts["notes"], _packing_note(train, packed)],
    }
    return TaskData(
        train=train,
        eval=held_out,
        collate=collate_packed if packed.value else alone,
        fingerprint=corpus.fingerprint,
        facts=corpus.facts | facts,
        reading_is_free=True,
        source=corpus,
    )


def can_keep_rows_apart(recipe: Recipe, config: PreTrainedConfig) -> Choice[bool]:
    """Whether rows may share a window: only where a mask and positions are known to keep them apart exactly."""
    asked = recipe.model.attn_implementation
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Choice(False, f"{config.model_type} is not among the models checked for packing")
    if asked not in ("auto", "sdpa"):
        return Choice(False, f"attn_implementation {asked} is not checked for packing")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    choice = choose_attention("auto", model_class, config, recipe.data.sequence_length)
    return Choice(choice.value == CAUSAL_SDPA, choice.reason)


def _packing_note(train: PackedRows, packed: Choice[bool]) -> str:
    if not packed.value:
        return f"each row is a sample of its own, padded: {packed.reason}"
    return (
        f"{len(train.rows):,} rows are packed into {len(train):,} windows of {train.sequence_length} tokens, "
        f"{train.fill:.1%} full; attention and positions stay within a row"
    )


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """What a user says, as the chat template puts it before the assistant's answer; less a beginning-of-text token."""
    messages = [{"role": "user", "content": text}]
    prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return prompt.removeprefix(tokenizer.bos_token or "")
