"""Boxes as their files store them: COCO, YOLO, Pascal VOC, and tables such as metadata.jsonl.

Readers collect the faults of all files. `checks.py` turns rows into `Boxes`, and `folders.py` finds the files.
"""
