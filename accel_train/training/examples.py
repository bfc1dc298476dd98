"""Held-out samples that a finished run gets wrong, the most confident mistakes first, for the report."""

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from accel_train.engine.evaluation import evaluation_mode
from accel_train.engine.run import RunContext

MAX_TRIED = 256
"""Samples that are predicted once more, evenly spaced: seconds, whatever the size of the evaluation data."""
SHOWN_OF_MASKS = 3
"""One in so many of `evaluate.num_examples`: each is three pictures."""
MAX_CHARACTERS = 400
EDGE = 160
_NO_CLASS = 255


def examples_of(run: RunContext, model: nn.Module) -> dict[str, Any]:
    """Return samples with truth and prediction, as plain JSON values; empty where the task predicts no class.

    `kind` is "label" (a class a sample) or "mask" (a class a pixel), `tried` how many samples were predicted, `wrong` how many of them
    (which share of their pixels) were not right, and `examples` those to show. Called on the main process, with whole weights.
    """
    plan = run.plan
    data, source = plan.data, plan.data.source
    most = plan.recipe.evaluate.num_examples
    if data.eval is None or not most or not hasattr(source, "shown") or not run.strategy.is_replicated:
        return {}
    number = len(data.eval)  # type: ignore[arg-type]
    indices = np.unique(np.linspace(0, number - 1, min(number, MAX_TRIED)).astype(int)).tolist()
    found: list[dict[str, Any]] = []
    with evaluation_mode(model), run.accelerator.autocast():
        for at in range(0, len(indices), size := run.sizes.per_device_eval_batch_size):
            here = indices[at : at + size]
            batch = data.collate([data.eval[index] for index in here])
            batch.pop("num_targets")
            device = next(model.parameters()).device
            batch = {name: value.to(device) for name, value in batch.items()}
            predicted = plan.task.predict_batch(model, batch)
            if "labels" not in batch or not predicted.keys() & {"label", "mask"}:
                return {}
            found += _of_labels(here, batch, predicted) if "label" in predicted else _of_masks(here, batch, predicted)
    kind = "mask" if found and "mask" in found[0] else "label"
    wrong = sorted((each for each in found if each["wrong"]), key=lambda each: -each["confidence"])
    most = most if kind == "label" else -(-most // SHOWN_OF_MASKS)
    shown = [_shown(each, source.shown(each["index"]), source.label_names) for each in wrong[:most]]
    facts = {"kind": kind, "tried": len(found), "wrong": sum(each["wrong"] for each in found), "examples": shown}
    return facts if kind == "label" else {**facts, "colours": _colours(wrong[:most], source.label_names)}


def _of_labels(
    indices: list[int], batch: Mapping[str, Tensor], predicted: Mapping[str, Tensor]
) -> Iterator[dict[str, Any]]:
    labels, guesses, scores = (
        each.cpu().tolist() for each in (batch["labels"], predicted["label"], predicted["score"])
    )
    for index, truth, guess, score in zip(indices, labels, guesses, scores):
        if truth >= 0:
            yield {"index": index, "wrong": int(truth != guess), "confidence": score, "truth": truth, "guess": guess}


def _of_masks(
    indices: list[int], batch: Mapping[str, Tensor], predicted: Mapping[str, Tensor]
) -> Iterator[dict[str, Any]]:
    masks, labels = predicted["mask"].cpu().numpy(), batch["labels"].cpu().numpy()
    sizes = zip(predicted["height"].tolist(), predicted["width"].tolist())
    for index, mask, truth, (height, width) in zip(indices, masks, labels, sizes):
        mask, truth = mask[:height, :width], truth[:height, :width]
        known = (truth != _NO_CLASS) & (truth >= 0)
        share = float((mask != truth)[known].mean()) if known.any() else 0.0
        yield {"index": index, "wrong": share, "confidence": share, "truth": truth, "mask": mask}


def _shown(found: dict[str, Any], sample: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if "mask" in found:
        pictures = [sample["image"].convert("RGB"), _coloured(found["truth"]), _coloured(found["mask"])]
        return {"images": [_png(picture) for picture in pictures], "wrong": found["wrong"]}
    shown: dict[str, Any] = {
        "truth": names[found["truth"]],
        "prediction": names[found["guess"]],
        "score": found["confidence"],
    }
    if "image" in sample:
        return {**shown, "images": [_png(sample["image"].convert("RGB"))]}
    text = sample["text"]
    return {**shown, "text": text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."}


def _colours(found: list[dict[str, Any]], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the name and the colour (`#rrggbb`) of each class in these masks."""
    numbers = sorted(
        {number for each in found for mask in ("truth", "mask") for number in np.unique(each[mask]).tolist()}
    )
    hues = _hues()
    return [
        (names[number] if 0 <= number < len(names) else "no class", f"#{hues[number].tobytes().hex()}")
        for number in numbers
    ]


def _hues() -> NDArray[np.uint8]:
    """Return a colour for each number of a mask, the same in all pictures: (256, 3)."""
    hues = np.random.default_rng(7).integers(40, 230, (256, 3), dtype=np.uint8)
    hues[0], hues[_NO_CLASS] = 0, 255
    return hues


def _coloured(mask: NDArray[Any]) -> Image.Image:
    return Image.fromarray(_hues()[mask.astype(np.uint8)])


def _png(picture: Image.Image) -> str:
    """Return a thumbnail as an address that holds the picture itself."""
    scale = EDGE / max(picture.size)
    size = tuple(max(1, round(edge * scale)) for edge in picture.size)
    picture = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR)  # type: ignore[arg-type]
    file = io.BytesIO()
    picture.quantize(64).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
