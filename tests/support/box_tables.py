"""One data set of boxes as tables of many tools: a csv with a box in each row, or lists in jsonl and parquet."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets

from tests.support.boxes import SIZES, THINGS


def fields_of(number: int) -> dict[str, Any]:
    """Return a box under the names that templates of rows use. Fractions are exact in binary, or rounded by csv."""
    thing = THINGS[number]
    (left, top, w, h), (width, height) = thing.box, SIZES[thing.image]
    corners = {"l": left, "t": top, "r": left + w, "b": top + h}
    edges = {"l": width, "t": height, "r": width, "b": height}
    return {
        **corners,
        **{f"f{name}": value / edges[name] for name, value in corners.items()},
        **{"w": w, "h": h, "cx": left + w / 2, "cy": top + h / 2, "W": width, "H": height},
        **{"image": thing.image, "stem": Path(thing.image).stem, "class": thing.name},
        **{"id": ("cat", "dog").index(thing.name), "area": w * h},
    }


def csv_lines(header: str, row: str, empty: str = "") -> str:
    """Return a csv with a row for each box, and a row for the image without boxes."""
    return "\n".join([*([header] if header else []), *(row.format(**fields_of(n)) for n in range(3)), empty]) + "\n"


def via(path: Path) -> None:
    rows = [("filename", "file_size", "file_attributes", "region_count", "region_id")]
    text = ",".join([*rows[0], "region_shape_attributes", "region_attributes"]) + "\n"
    for number in range(3):
        each = fields_of(number)
        shape = {"name": "rect", "x": each["l"], "y": each["t"], "width": each["w"], "height": each["h"]}
        cells = [json.dumps(value).replace('"', '""') for value in (shape, {"kind": each["class"]})]
        text += f'{each["image"]},123,"{{}}",1,0,"{cells[0]}","{cells[1]}"\n'
    path.write_text(text + 'empty.png,123,"{}",0,0,"{}","{}"\n')


def jsonl(path: Path) -> None:
    rows = [
        {"image": f"images/{each['image']}", "label": each["class"], "x1": each["l"], "y1": each["t"], "x2": each["r"],
         "y2": each["b"]} for each in map(fields_of, range(3))
    ] + [{"image": "images/empty.png", "label": None, "x1": None, "y1": None, "x2": None, "y2": None}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))


def parquet(path: Path, *, is_bytes: bool) -> None:
    rows = []
    for name in SIZES:
        own = [thing for thing in THINGS if thing.image == name]
        image = Path("set/images", name).read_bytes() if is_bytes else f"images/{name}"
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (thing.box for thing in own)]
        rows.append({"image": image, "bboxes": boxes, "labels": [thing.name for thing in own]})
    datasets.Dataset.from_list(rows).to_parquet(str(path))


TENSORFLOW = "filename,width,height,class,xmin,ymin,xmax,ymax"
FORMATS: Mapping[str, Callable[[Path], Any] | tuple[str, str, str]] = {
    "tensorflow.csv": (TENSORFLOW, "{image},{W},{H},{class},{l},{t},{r},{b}", "empty.png,16,16,,,,,"),
    "tabs.tsv": (
        TENSORFLOW.replace(",", "\t"),
        "{image}\t{W}\t{H}\t{class}\t{l}\t{t}\t{r}\t{b}",
        "empty.png\t16\t16\t\t\t\t\t",
    ),
    "wheat.csv": (
        "image_id,width,height,bbox,label",
        '{stem},{W},{H},"[{l}, {t}, {w}, {h}]",{class}',
        "empty,16,16,,",
    ),
    "corners.csv": ("image_id,bbox,label", '{stem},"[{l}, {t}, {r}, {b}]",{class}', "empty,[],"),
    "spaces.csv": ("image,box,name", "images/{image},{l} {t} {r} {b},{class}", "images/empty.png,,"),
    "area.csv": ("image,area,bbox,class", '{image},{area},"[{l}, {t}, {w}, {h}]",{class}', "empty.png,,[],"),
    "retinanet.csv": ("", "images/{image},{l},{t},{r},{b},{class}", "images/empty.png,,,,,"),
    "sku.csv": ("", "{image},{l},{t},{r},{b},{class},{W},{H}", "empty.png,,,,,,16,16"),
    "open_images.csv": (
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf",
        "{stem},x,{class},1,{fl},{fr},{ft},{fb},0,0",
        "empty,x,,,,,,,,",
    ),
    "vott.csv": (
        '"image","xmin","ymin","xmax","ymax","label"',
        '"{image}",{l},{t},{r},{b},"{class}"',
        "empty.png,,,,,",
    ),
    "sizes.csv": ("image_name,x_min,y_min,width,height,category", "{image},{l},{t},{w},{h},{class}", "empty.png,,,,,"),
    "centers.csv": ("img;x_center;y_center;w;h;class", "{image};{cx};{cy};{w};{h};{class}", "empty.png;;;;;"),
    "cars.csv": ("fname,bbox_x1,bbox_y1,bbox_x2,bbox_y2,class", "{image},{l},{t},{r},{b},{class}", "empty.png,,,,,"),
    "finding.csv": (
        "image_id,class_name,class_id,rad_id,x_min,y_min,x_max,y_max",
        "{stem},{class},{id},R{id},{l},{t},{r},{b}",
        "empty,No finding,14,R1,,,,",
    ),
    "windows.csv": (
        "filename,width,height,class,xmin,ymin,xmax,ymax",
        "C:\\data\\{image},{W},{H},{class},{l},{t},{r},{b}",
        "C:\\data\\empty.png,16,16,,,,,",
    ),
    "via.csv": via,
    "rows.jsonl": jsonl,
    "paths.parquet": lambda path: parquet(path, is_bytes=False),
    "bytes.parquet": lambda path: parquet(path, is_bytes=True),
}


def write_table(name: str) -> Path:
    """Write a table of the images in set/images, and return its path."""
    path, form = Path("set", name), FORMATS[name]
    path.parent.mkdir(exist_ok=True)
    if isinstance(form, tuple):
        path.write_text(csv_lines(*form))
    else:
        form(path)
    return path


BY_VALUES = (
    "wheat.csv",
    "corners.csv",
    "spaces.csv",
    "area.csv",
    "retinanet.csv",
    "sku.csv",
    "paths.parquet",
    "bytes.parquet",
)
"""Tables whose column names do not tell the order of four numbers."""
