"""Text as token windows and as labeled rows: documents, tokenizers, token files.

Chats and instructions are in `data.sft`.
"""
