"""The README.md that lies beside the weights of a classifier: what it is, and how it is used."""

from collections.abc import Mapping
from typing import Any


def model_card(facts: Mapping[str, Any], model_type: str) -> str:
    """A model card in Markdown, with the metadata block that the hub reads."""
    names = facts["label_names"]
    is_regression = facts["problem_type"].startswith("regression")
    gives = f"a number ({names[0]})" if is_regression else f"{len(names)} labels: " + ", ".join(names[:40])
    if len(names) > 40:
        gives += f" and {len(names) - 40} more (config.json has all)"
    return f"""---
library_name: transformers
pipeline_tag: text-classification
---

# A text classifier

A `{model_type}` model, trained with accel_train on {facts["num_train"]:,} texts, evaluated on {facts["num_eval"]:,} others.

- Problem: {facts["problem_type"]}
- Gives: {gives}
- Reads: up to {facts["max_length"]} tokens; longer texts are cut
- Data: {facts["sources"]}

The scores are in `summary.json` and `report.html` of the run folder.

```python
from transformers import pipeline

classify = pipeline("text-classification", model="path/of/this/folder")
classify("a text", truncation=True)
```
"""
