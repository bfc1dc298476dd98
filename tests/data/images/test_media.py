"""Audio, video, and shards of WebDataset are refused by name, and texts and images next to them are read."""

import io
import tarfile
from pathlib import Path

import datasets
import pytest
from PIL import Image

from accel_train.experiments.finetune.recipe import Found, asked_of, minimal_recipe
from accel_train.experiments.finetune.recognise import recognise
from accel_train.experiments.finetune.start import write_recipe
from tests.support.boxes import write_images
from tests.support.runs import refused


def find(path: str, **flags: object) -> Found:
    return recognise(asked_of(path, minimal_recipe(path, []), **flags))  # type: ignore[arg-type]


def write(names: str, text: str = "RIFF") -> None:
    for name in names.split():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize(
    ("files", "path", "named"),
    [
        ("set/a.wav set/b.wav", "set", "set holds audio (a.wav)"),
        ("set/dog/a.MP3 set/rain/b.flac set/LICENSE", "set", "set holds audio"),
        ("set/train/dog/a.ogg set/train/rain/b.m4a", "set", "set holds audio"),
        ("set/a.mp4 set/b.avi set/c.txt", "set", "set holds video (a.mp4)"),
        ("a.wav", "a.wav", "a.wav holds audio"),
        ("set/0.tar set/1.tar", "set", "set holds tar files (0.tar)|webdataset|to_parquet"),
        ("set/0.jpg set/0.cls set/1.jpg set/1.cls", "set", "set holds samples of WebDataset (0.cls, 0.jpg)|to_parquet"),
        ("set/0/0.jpg set/0/0.json set/0/0.txt", "set", "WebDataset (0.jpg, 0.json, 0.txt)"),
    ],
)
def test_files_of_other_data_are_named(files: str, path: str, named: str) -> None:
    write(files)
    refused(find, path, named=named)


@pytest.mark.parametrize("cells", ["audio/a.wav audio/b.wav", "gone/a.flac gone/b.flac", "a.mp4 b.mp4"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_table_of_audio_or_video_is_named(cells: str, is_folder: bool) -> None:
    one, other = cells.split()
    write("set/audio/a.wav set/audio/b.wav")
    Path("set/meta.csv").write_text(f"filename,fold,category\n{one},1,dog\n{other},1,rain\n{one},2,dog\n")
    kind = "video" if "mp4" in cells else "audio"
    refused(find, "set" if is_folder else "set/meta.csv", named=f"set/meta.csv: column 'filename' names {kind} files")


def test_audio_in_a_parquet_file_is_named() -> None:
    cells = [{"bytes": b"RIFF", "path": f"{number}.wav"} for number in range(4)]
    datasets.Dataset.from_dict({"audio": cells, "label": [0, 1, 0, 1]}).to_parquet("set.parquet")
    refused(find, "set.parquet", named="set.parquet: column 'audio' names audio files")


def test_texts_next_to_audio_are_read() -> None:
    write("set/a0.wav set/a1.wav")
    rows = "".join(
        f"a{number}.wav,a text of some words {number},{'joy' if number % 2 else 'fear'}\n" for number in range(8)
    )
    Path("set/meta.csv").write_text(f"file,text,label\n{rows}")
    found = find("set/meta.csv")
    assert (found.task, dict(found.counts)) == ("text-classification", {"fear": 4, "joy": 4})


def test_texts_and_images_with_few_other_files_are_read() -> None:
    for name in ("cat", "dog"):
        write_images(Path("set", name))
    write("set/about.mp4")
    assert find("set").task == "image-classification"
    write("texts/a.txt texts/b.txt texts/c.wav", "Some text of a few words, and more of it. " * 5)
    assert find("texts").task == "causal-lm"


def test_the_samples_of_an_unpacked_shard_are_named_and_the_way_to_a_table_works() -> None:
    with tarfile.open("shard.tar", "w") as shard:
        for number in range(24):
            content = io.BytesIO()
            Image.new("RGB", (20, 20), (number, 0, 0)).save(content, "PNG")
            for name, raw in ((f"{number:06}.png", content.getvalue()), (f"{number:06}.cls", str(number % 2).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(raw)
                shard.addfile(member, io.BytesIO(raw))
    refused(write_recipe, "shard.tar", [], named="WebDataset (000000.cls, 000000.png)|to_parquet('train.parquet')")
    table = datasets.load_dataset("webdataset", data_files="shard.tar", split="train", cache_dir="cache")
    table.to_parquet("train.parquet")
    found = find("train.parquet")
    assert (found.task, dict(found.counts)) == ("image-classification", {"0": 12, "1": 12})
