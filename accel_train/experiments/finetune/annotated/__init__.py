"""Recognition of texts that come with more than a class: tags, spans, answers, and translations.

`annotations.py` knows the exports of annotation tools, and `text_tasks.py` words with tags, questions, pairs, and
line-aligned files.
"""
