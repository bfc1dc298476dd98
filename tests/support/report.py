"""A run folder to report on, and the page that comes of it."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from accel_train.core.json_io import utc_event
from accel_train.observe.run_folder import RunFolder

SUMMARY: dict[str, Any] = {
    "status": "finished",
    "steps": 200,
    "num_targets": 1_638_400,
    "train_seconds": 187.4,
    "eval": {"loss": 2.0134, "perplexity": 7.4888, "bits_per_byte": 1.2034, "num_targets": 9000},
    "baselines": {"unigram_bits_per_byte": 4.512, "xz_bits_per_byte": 2.247},
    "sample": {"prompt": "The bridge", "text": "The bridge <b>was</b> & is"},
    "peak_memory_bytes": {"train": 3 * 2**30, "evaluate": 2**30},
    "tokens_per_second": 8742.8,
    "mfu": 0.4123,
    "parameters": 124_439_808,
    "world_size": 2,
    "environment": {"gpu": "2 x <H200>", "torch": {"version": "2.9.1"}},
    "choices": {"precision": "bf16 (it is supported)"},
    "skipped_steps": 1,
}


RECIPE = """# see https://example.org/recipes
seed: {seed}                # default
output_dir: "<script>alert(1)</script>"
optimizer:
  learning_rate: {learning_rate}   # command line
"""


def make_run(path: Path, *, summary: dict[str, Any] | None = SUMMARY, fp16: bool = False, **recipe: Any) -> Path:
    randomness = random.Random(0)
    with RunFolder(path) as folder:
        folder.append_event(utc_event("start", 0, "starting <fresh>", None, {}))
        for step in range(1, 201):
            skipped = step == 77
            if skipped:
                folder.append_event(utc_event("skip", step, "the loss is NaN", 1, {}))
            if step % 5 == 0 or skipped:
                line = {
                    "step": step,
                    "split": "train",
                    "loss": math.nan if skipped else 2 + 8 / step + randomness.gauss(0, 0.01),
                    "learning_rate": 1e-3,
                    "grad_norm": math.inf if skipped else 0.4,
                    "loss_scale": 16384.0 if fp16 else None,
                    "skipped": skipped,
                    "tokens_per_second": 8000.0,
                    "train_seconds": step / 10,
                }
                folder.append_metrics(line)
            if step % 50 == 0:
                folder.append_metrics({"step": step, "split": "eval", "loss": 2.1})
                folder.append_event(utc_event("checkpoint", step, f"saved step-{step}", None, {}))
        folder.write_text("recipe.resolved.yaml", RECIPE.format(**{"seed": 0, "learning_rate": 0.001, **recipe}))
        if summary is not None:
            folder.write_summary(summary)
    return path


class Page(HTMLParser):
    """What a browser would fetch, run and show."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.fetched.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.texts.append(data)
        elif self.cdata_elem == "script":
            self.scripts.append(data)

    @property
    def charts(self) -> dict[str, dict[str, Any]]:
        """What the page's script draws, by the name of the chart."""
        return {chart["name"]: chart for chart in json.loads(self.scripts[0])["charts"]}

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))
