"""Images with masks or boxes of the tasks that have them, in folders, of which some can be broken."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.detectors import YOLOS
from tests.support.every_task import recipe_of
from tests.support.runs import SCENES
from tests.support.tars import write_tar

SIZE = 64
NUM_IMAGES = 12
CALM = {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
MODELS = {"semantic-segmentation": SCENES["model"]["config"] | CALM, "object-detection": YOLOS}
AS_THEY_ARE = {"scale_range": None, "horizontal_flip": 0.0, "color_jitter": 0.0}


def _stored(pixels: Any, form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def image_of(number: int) -> bytes:
    """A JPEG, whose header says nothing about its end."""
    return _stored(np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), np.uint8), "JPEG")


def mask_of(number: int, size: int = SIZE) -> bytes:
    return _stored(np.random.default_rng(number).integers(0, 3, (size, size), np.uint8), "PNG")


def objects_of(number: int) -> dict[str, Any]:
    """Boxes as left, top, width, and height, one or two of them."""
    boxes = [[4.0, 4.0 + number % 12, 20.0, 30.0], [30.0, 2.0, 30.0, 20.0 + number % 12]][: 1 + number % 2]
    return {"bbox": boxes, "category": [number % 2, 1][: len(boxes)]}


def damaged(content: bytes) -> bytes:
    """An image with a whole header whose last pixels are gone."""
    return content[: len(content) // 2]


def write_folder(task: str, folder: Path, numbers: range | list[int] = range(NUM_IMAGES)) -> Path:
    """Write images of a task with their masks or boxes."""
    place = folder / "images" if task == "semantic-segmentation" else folder
    place.mkdir(parents=True)
    for number in numbers:
        (place / f"{number:03d}.jpg").write_bytes(image_of(number))
    if task == "semantic-segmentation":
        (folder / "masks").mkdir()
        for number in numbers:
            (folder / "masks" / f"{number:03d}.png").write_bytes(mask_of(number))
    else:
        rows = [{"file_name": f"{number:03d}.jpg", "objects": objects_of(number)} for number in numbers]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def write_tars(task: str, folder: Path, *, per_tar: int = 4, form: int = 0) -> Path:
    """Write the images of `write_folder` to tars. `form` 1 has the other names, order, and layout of annotations."""
    for start in range(0, NUM_IMAGES, per_tar):
        members = list[tuple[str, bytes]]()
        for number in range(start, start + per_tar):
            key, objects = f"{number:03d}", objects_of(number)
            image = (f"{key}.jpg", image_of(number))
            if task == "semantic-segmentation":
                sample = [image, (f"{key}{'.mask' * form}.png", mask_of(number))]
            else:
                pairs = zip(objects["bbox"], objects["category"], strict=True)
                one_by_one = [{"bbox": box, "category_id": label} for box, label in pairs]
                content = {"annotations": one_by_one} if form else {"objects": objects}
                sample = [image, (f"{key}.json", json.dumps(content).encode())]
            members += sample[::-1] if form else sample
        write_tar(folder / f"{start // per_tar}.tar", members)
    return folder


def recipe_of_annotated(task: str, folder: Path, train: Path | str, *, batch: int, **sections: Any) -> dict[str, Any]:
    """A recipe whose weights do not move, in micro-batches of one image."""
    names = ["a", "b", "c"] if task == "semantic-segmentation" else ["a", "b"]
    data: dict[str, Any] = {
        "train": str(train),
        "eval": None,
        "image_size": SIZE,
        "eval_fraction": 0,
        "shuffle": False,
        "augment": AS_THEY_ARE,
    }
    data |= {"label_names": names, **sections.pop("data", {})}
    return recipe_of(
        task,
        folder,
        model={"config": MODELS[task]},
        data=data,
        batch={"global_batch_size": batch, "per_device_batch_size": 1},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0},
        **sections,
    )
