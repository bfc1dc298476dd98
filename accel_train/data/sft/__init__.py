"""Chats and instructions for supervised fine-tuning: reading, templates, packing.

Plain text is in `data.text`.
"""
