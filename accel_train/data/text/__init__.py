"""Text as token windows and as labeled rows: documents, tokenizers, token files.

Rows to fine-tune on are in `tasks.causal_lm`.
"""
