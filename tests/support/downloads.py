"""What recipes would download, made small and put where the libraries keep downloads: below HF_HOME.

With HF_HUB_OFFLINE=1 `datasets` and `transformers` then find the names of a recipe there, as after a first run with a
network.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from accel_train.data.text.tokenizers import train_bpe

REVISION = "0123456789abcdef0123456789abcdef01234567"
SUBJECTS = ("the company", "the minister", "a court", "the union", "an analyst", "the hospital")
VERBS = ("said on friday", "denied", "will announce", "has rejected", "expects", "confirmed")
OBJECTS = ("the offer", "higher profits", "a new chairman", "the report", "more layoffs", "the ruling")

TINY_RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "bottleneck",
}


class Pairs(datasets.GeneratorBasedBuilder):
    """MRPC as the hub has it: its splits, its columns and their types."""

    BUILDER_CONFIGS = [datasets.BuilderConfig(name="mrpc", version=datasets.Version("0.0.0"))]  # noqa: RUF012

    def _info(self) -> datasets.DatasetInfo:
        text, label = datasets.Value("string"), datasets.ClassLabel(names=["not_equivalent", "equivalent"])
        columns = {"sentence1": text, "sentence2": text, "label": label, "idx": datasets.Value("int32")}
        return datasets.DatasetInfo(features=datasets.Features(columns))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        sizes = {"train": (0, 80), "validation": (80, 24), "test": (104, 8)}
        return [
            datasets.SplitGenerator(name=name, gen_kwargs={"first": first, "count": count})
            for name, (first, count) in sizes.items()
        ]

    def _generate_examples(self, first: int, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in range(first, first + count):
            one, other, same = sentence_pair(number)
            yield number, {"sentence1": one, "sentence2": other, "label": int(same), "idx": number}


def sentence_pair(number: int) -> tuple[str, str, bool]:
    """Two sentences, and whether they say the same in another order: two thirds do, as in MRPC."""
    subject, verb, thing = (words[number // by % 6] for words, by in ((SUBJECTS, 1), (VERBS, 6), (OBJECTS, 36)))
    same = number % 3 != 0
    told = thing if same else OBJECTS[(number // 36 + 1) % 6]
    return f"{subject} {verb} {thing}.", f"{told}, {subject} {verb}.", same


def write_pairs(home: Path) -> None:
    """`nyu-mll/glue`, subset mrpc."""
    builder = Pairs(
        cache_dir=str(home / "datasets"),
        dataset_name="glue",
        config_name="mrpc",
        repo_id="nyu-mll/glue",
        hash=REVISION,
    )
    builder.download_and_prepare()


def write_model(home: Path, name: str, save: Callable[[Path], None]) -> None:
    """A repository of the hub, as its cache keeps it."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    save(snapshot)


def save_bert(folder: Path) -> None:
    """The parts of `google-bert/bert-base-cased`: a body, and the heads that it was pretrained with."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for part in (*SUBJECTS, *VERBS, *OBJECTS) for word in part.split()})
    vocabulary = {word: index for index, word in enumerate([*special, ".", ",", *words])}
    BertTokenizer(vocab=vocabulary, do_lower_case=False, model_max_length=512).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertForPreTraining(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)


def save_modernbert(folder: Path) -> None:
    """The parts of `answerdotai/ModernBERT-base`."""
    tokenizer = train_bpe(["def read(self, path): return path", "class Reader: pass"] * 20, 300)
    tokenizer.add_special_tokens(
        {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")}
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(str(folder))
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep", "eos")}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = ModernBertConfig(vocab_size=len(tokenizer), bos_token_id=special["cls_token_id"], **special, **sizes)
    ModernBertForMaskedLM(config).save_pretrained(folder)


def save_resnet(folder: Path) -> None:
    """The parts of `microsoft/resnet-50`: it knows classes of its own."""
    names = {index: f"thing {index}" for index in range(7)}
    torch.manual_seed(0)
    fields = {name: value for name, value in TINY_RESNET.items() if name != "model_type"}
    config = ResNetConfig(**fields, id2label=names, label2id={name: index for index, name in names.items()})
    ResNetForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"crop_pct": 0.875, "do_normalize": true, "do_resize": true, "image_mean": [0.485, 0.456, 0.406], '
        '"image_processor_type": "ConvNextImageProcessor", "image_std": [0.229, 0.224, 0.225], "resample": 3, '
        '"size": {"shortest_edge": 224}}'
    )


def write_images(folder: Path, sizes: dict[str, int]) -> None:
    """SPLIT/CLASS/*.jpg with so many digits of each of three classes, 256 x 256, in colour."""
    digits = load_digits()
    for number, name in enumerate(("n01440764", "n01443537", "n01484850")):
        images = iter(digits.images[digits.target == number])
        for split, count in sizes.items():
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                grey = Image.fromarray((next(images) * 15).astype(np.uint8)).resize((256, 256))
                grey.convert("RGB").save(folder / split / name / f"{name}_{index}.jpg")
