"""Text as windows of tokens and as labelled rows: documents, tokenizers, token files.

Chats and instructions are in `data.sft`."""
