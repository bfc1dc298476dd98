"""The page of a look at data: one HTML file in the report's style, without a network."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from accel_train.core.format import format_count
from accel_train.core.ownership import write_file
from accel_train.core.redaction import redact_text
from accel_train.core.state import JsonRecord
from accel_train.experiments.look.look import Look
from accel_train.report.pictures import Box, address_of, color_of_class, draw_boxes, draw_mask
from accel_train.report.report import made_by, page_template

_EDGE = 240
_MOST_PICTURES = 12


def write_page(look: Look, path: Path) -> Path:
    """Write the page of a look, and return its path. `core.ownership.check_file` must have accepted the path."""
    page = page_template("data.html").render(
        title=f"Data of {look.recipe.output_dir}",
        findings=format_count(len(look.findings), "finding"),
        look=look,
        pictures=list(_pictures(look)),
        uplot={"css": ""},
        footer=made_by(),
    )
    return write_file(path, redact_text(page).encode(errors="replace"), path.parent)


def _pictures(look: Look) -> Iterator[JsonRecord]:
    """Yield pictures of the first micro-batch, with masks and boxes drawn, and a caption of their classes."""
    batch, names, others = look.batch, look.label_names, look.data.facts.others
    labels = batch.get("soft_labels", batch.get("labels"))
    for number, pixels in enumerate(map(np.asarray, batch.get("pixel_values", ())[:_MOST_PICTURES])):
        std, mean = (np.reshape(others.get(name, default), (-1, 1, 1)) for name, default in (("std", 1), ("mean", 0)))
        values = np.clip(255 * (pixels * std + mean), 0, 255).astype(np.uint8)
        image = Image.fromarray(values.transpose(1, 2, 0).squeeze())
        scale, caption = _EDGE / max(image.size), ""
        if "boxes" in batch:
            image = draw_boxes(image, list(_boxes(look, number, image.size)), scale)
        elif labels is not None and labels.ndim == 3:
            image = draw_mask(image, labels[number].numpy().astype(np.uint8), names, scale)
        elif labels is not None and labels.ndim == 2:
            caption = ", ".join(f"{name} {share:.0%}" for name, share in zip(names, labels[number].tolist()) if share)
        elif labels is not None and names:
            caption = names[int(labels[number])]
        yield {"address": address_of(image, _EDGE), "caption": caption}


def _boxes(look: Look, number: int, size: tuple[int, int]) -> Iterator[Box]:
    centers, sides = np.hsplit(look.batch["boxes"][number].numpy(), 2)
    edges = np.hstack([centers - sides / 2, centers + sides / 2]) * (size * 2)
    for corners, label in zip(edges.tolist(), look.batch["class_ids"][number].tolist()):
        if label >= 0:
            yield Box(corners, look.label_names[label], color_of_class(label))
