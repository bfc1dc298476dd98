"""`prepare_text`: tokens are conserved, split by content, built once, and rebuilt when something changed."""

import json
import lzma
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from accel_train.cli.main import main
from accel_train.core.errors import DataError
from accel_train.data import cache
from accel_train.data.text.corpus import TextCorpus, prepare_text
from accel_train.data.text.tokenizers import BYTE_SEPARATOR_ID, SEPARATOR
from accel_train.recipe.schema import Recipe
from tests.support.runs import TESTS, metrics, refused, write_file, write_jsonl, write_recipe_file
from tests.support.wording import assert_golden

MakeRecipe = Callable[..., Recipe]


def write_texts(name: str, texts: list[str]) -> str:
    return str(write_jsonl(Path(name), ({"text": text} for text in texts)))


Prepare = Callable[..., TextCorpus]


@pytest.fixture
def prepare(text_recipe: MakeRecipe) -> Prepare:
    """Prepares a recipe, a named source, or texts that are written to a.jsonl."""

    def prepared(source: Any, **settings: Any) -> TextCorpus:
        source = write_texts("a.jsonl", source) if isinstance(source, list) else source
        recipe = source if isinstance(source, Recipe) else text_recipe(source, **settings)
        return prepare_text(recipe, progress=False)

    return prepared


def stream(corpus: TextCorpus, side: str) -> list[int]:
    windows = corpus.train if side == "train" else corpus.eval
    return windows.stream.rows(np.zeros(1, np.int64), windows.num_tokens)[0].tolist()


def decoded_documents(corpus: TextCorpus, side: str) -> list[str]:
    """The documents of a shard, cut at the separators: each begins with one."""
    texts: list[list[int]] = []
    for token in stream(corpus, side):
        if token == corpus.separator_id:
            texts.append([])
        else:
            texts[-1].append(token)
    return [corpus.tokenizer.decode(text) for text in texts]


BPE = {"train_bpe": {"vocab_size": 300}}
ROWS = [f"document {n}: {SEPARATOR} " + "word " * (n % 7) + f"ünïcode {n}" for n in range(200)]


@pytest.mark.parametrize("tokenizer", ["bytes", BPE])
def test_every_document_is_kept_once_after_a_separator(prepare: Prepare, tokenizer: Any) -> None:
    corpus = prepare([*ROWS[:100], "", *ROWS[100:]], tokenizer=tokenizer, eval_fraction=0.2)
    train, held_out = decoded_documents(corpus, "train"), decoded_documents(corpus, "eval")
    assert sorted(train + held_out) == sorted(ROWS)
    assert train == [row for row in ROWS if row in train], "in the order of the source"
    facts = corpus.facts
    assert (facts.num_documents, facts.num_empty_documents) == (200, 1)
    assert facts.num_eval_documents == len(held_out)
    assert 20 <= len(held_out) <= 60
    assert facts.train_bytes == sum(len(text.encode()) for text in train)
    assert facts.eval_bytes == sum(len(text.encode()) for text in held_out)
    assert facts.train_tokens == len(stream(corpus, "train"))
    encoded = [len(corpus.tokenizer(text, split_special_tokens=True).input_ids) for text in ROWS]
    assert facts.train_tokens + facts.eval_tokens == sum(encoded) + 200
    assert corpus.vocab_size == len(corpus.tokenizer)
    assert stream(corpus, "train")[0] == corpus.separator_id
    assert json.loads(json.dumps(facts.record())) == facts.record(), "facts are plain values"


def test_the_baselines_are_what_they_say(prepare: Prepare) -> None:
    corpus = prepare(ROWS, eval_fraction=0.2)
    counts = Counter(stream(corpus, "train"))
    total = sum(counts.values()) + 257
    bits = sum(-math.log2((counts[token] + 1) / total) for token in stream(corpus, "eval")[1:])
    text = "".join(decoded_documents(corpus, "eval")).encode()
    assert corpus.facts.unigram_bits_per_byte == pytest.approx(bits / len(text))
    assert corpus.facts.xz_bits_per_byte == pytest.approx(8 * len(lzma.compress(text)) / len(text))


def test_a_document_stays_on_its_side_whatever_the_order_seed_and_company(
    prepare: Prepare, text_recipe: MakeRecipe
) -> None:
    first = prepare(ROWS, eval_fraction=0.2)
    others = [f"another {n}" for n in range(50)]
    recipe = text_recipe(write_texts("b.jsonl", others + ROWS[::-1] + ROWS), eval_fraction=0.2)
    second = prepare(recipe.model_copy(update={"seed": 7}))
    held_out = set(decoded_documents(first, "eval"))
    assert {text for text in decoded_documents(second, "eval") if text in ROWS} == held_out
    assert not held_out & set(decoded_documents(second, "train"))


def test_of_few_documents_the_last_is_held_out_with_its_copies(prepare: Prepare) -> None:
    texts = ["the last one", "first document", "second document", "the last one"]
    corpus = prepare(texts, eval_fraction=1e-9)
    assert decoded_documents(corpus, "train") == texts[1:3]
    assert decoded_documents(corpus, "eval") == ["the last one"] * 2
    assert corpus.facts.notes


def test_of_a_single_document_the_tail_is_held_out(prepare: Prepare) -> None:
    text = "".join(map(chr, range(200, 300)))
    write_file("a.txt", text)
    corpus = prepare("a.txt", eval_fraction=0.1)
    assert decoded_documents(corpus, "train") == [text[:90]]
    assert decoded_documents(corpus, "eval") == [text[90:]]
    assert (corpus.facts.num_documents, corpus.facts.num_eval_documents) == (1, 1)
    assert "its last 0.1" in corpus.facts.notes[0]


def test_a_trained_tokenizer_has_not_seen_the_held_out_text(prepare: Prepare) -> None:
    words = ["apple tree " * 40, "quince quince quince " * 40]
    corpus = prepare(words, tokenizer={"train_bpe": {"vocab_size": 280}}, eval_fraction=1e-9)
    assert decoded_documents(corpus, "eval") == words[1:]
    assert "apple" in corpus.tokenizer.get_vocab()
    assert not [token for token in corpus.tokenizer.get_vocab() if "qu" in token]
    assert any("supports" in note for note in corpus.facts.notes), "so little text has fewer than 280 tokens"


def test_separate_evaluation_files_are_all_and_only_the_evaluation(prepare: Prepare) -> None:
    held_out = write_texts("b.jsonl", ROWS[50:60])
    corpus = prepare(ROWS[:50], eval=held_out, eval_fraction=0.5)
    assert decoded_documents(corpus, "train") == ROWS[:50]
    assert decoded_documents(corpus, "eval") == ROWS[50:60]
    assert (corpus.facts.num_documents, corpus.facts.num_eval_documents) == (60, 10)
    both = prepare(("a.jsonl", held_out), eval=held_out)
    assert_golden(both.facts.notes[0])


def test_too_little_text_is_refused_with_its_size(prepare: Prepare) -> None:
    refused(prepare, ["0123", "4567"], eval_fraction=0, sequence_length=10, named="=10|needs 11|gives 10|to 9")
    corpus = prepare("a.jsonl", eval_fraction=0, sequence_length=9)
    assert len(corpus.train) == 1
    assert corpus.eval is None
    assert corpus.facts.eval_tokens == 0
    assert corpus.facts.unigram_bits_per_byte is corpus.facts.xz_bits_per_byte is None


def test_sources_without_documents_are_refused(prepare: Prepare) -> None:
    for name, content in (("empty.txt", ""), ("header.csv", "text\n"), ("empty.jsonl", ""), ("empty.csv", "")):
        write_file(name, content)
        refused(prepare, name, named=f"data.train|no documents|{name}")
    refused(prepare, ROWS, eval="header.csv", named="data.eval|no documents")
    refused(prepare, ROWS[:3], eval_fraction=0.99999, named="all 3|data.eval_fraction=0.99999")


def test_the_second_time_reads_nothing_and_gives_the_same(prepare: Prepare) -> None:
    first, second = (prepare(source, tokenizer=BPE) for source in (ROWS, "a.jsonl"))
    assert (first.facts.reused, second.facts.reused) == (False, True)
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    assert first.facts.record() | {"reused": True} == second.facts.record()
    longer = prepare("a.jsonl", tokenizer=BPE, sequence_length=32)
    assert longer.facts.reused, "windows are cut when read: their length asks for no new shards"


def test_a_changed_source_is_noticed_even_with_the_same_size_and_time(prepare: Prepare) -> None:
    first, path = prepare(ROWS), Path("a.jsonl")
    stat = path.stat()
    path.write_text(path.read_text().replace("word", "WORD"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepare("a.jsonl")
    assert second.fingerprint != first.fingerprint
    assert not second.facts.reused
    assert "the sources changed" in second.facts.notes[-1]
    assert "WORD" in "".join(decoded_documents(second, "train"))


def test_defaults_that_are_written_out_are_the_same_data(prepare: Prepare, text_recipe: MakeRecipe) -> None:
    """As in the resolved recipe of a run, which resumes it."""
    recipe = text_recipe(write_texts("a.jsonl", ROWS))
    written_out = Recipe.model_validate(recipe.model_dump())
    assert len(written_out.data.model_fields_set) > len(recipe.data.model_fields_set)
    assert prepare(written_out).fingerprint == prepare(recipe).fingerprint


def test_unchanged_files_are_not_read_again(prepare: Prepare) -> None:
    path = write_texts("a.jsonl", ROWS)
    os.utime(path, (1_000_000, 1_000_000))
    prepare(path)
    sidecar = Path("cache/text/digests.json")
    ((name, entry),) = json.loads(sidecar.read_text()).items()
    assert name == os.path.abspath(path)
    sidecar.write_text(json.dumps({name: [*entry[:2], "0" * 64]}))
    assert not prepare(path).facts.reused, "the digest came from the file, not from the sidecar"


def test_tokenizer_split_and_content_each_make_other_shards(prepare: Prepare) -> None:
    changes = [
        {},
        {"eval_fraction": 0.3},
        {"tokenizer": BPE},
        {"tokenizer": {"train_bpe": {"vocab_size": 301}}},
        {"eval": write_texts("b.jsonl", ROWS[:9])},
    ]
    found = {prepare(ROWS, **change).fingerprint for change in changes}
    found.add(prepare(write_texts("c.jsonl", ROWS[::-1])).fingerprint)
    assert len(found) == len(changes) + 1
    assert prepare(write_texts("elsewhere.jsonl", ROWS)).facts.reused, "a corpus may move"


def flip_a_byte(path: Path, position: int = 100) -> None:
    """Damage that leaves the size as it is."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (cut_a_byte, "train.bin"),
        (cut_a_byte, "meta.json"),
        (flip_a_byte, "train.bin"),
        (flip_a_byte, "eval.bin"),
        (flip_a_byte, "tokenizer/tokenizer.json"),
    ],
)
def test_damaged_shards_are_built_again(prepare: Prepare, damage: Callable[[Path], None], name: str) -> None:
    first = prepare(ROWS, tokenizer=BPE)
    whole = stream(first, "train"), stream(first, "eval")
    damage(Path(first.facts.cache_folder, name))
    second = prepare("a.jsonl", tokenizer=BPE)
    assert not second.facts.reused
    assert "damaged" in second.facts.notes[-1]
    assert second.fingerprint == first.fingerprint
    assert (stream(second, "train"), stream(second, "eval")) == whole
    assert prepare("a.jsonl", tokenizer=BPE).facts.reused


@pytest.mark.parametrize("when", ["in the first epoch", "at its end"])
def test_damage_in_a_large_shard_stops_the_run_before_its_first_epoch_ends(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setattr(cache, "CHECKED_AT_OPENING_BYTES", 0)
    recipe = write_recipe_file(corpus, task="causal-lm", schedule={"max_steps": 100_000})
    assert main(["plan", str(recipe)]) == 0
    (shard,) = (corpus / "cache").rglob("train.bin")
    assert json.loads(shard.with_name("meta.json").read_text())["files"]["train.bin"] > 1000
    flip_a_byte(shard)
    if when == "at its end":  # the thread is slow, and the epoch short
        compare = cache.sha256
        monkeypatch.setattr(cache, "sha256", lambda *args: time.sleep(0.5) or compare(*args))
    assert main(["run", str(recipe)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: {shard} is damaged")
    assert f"remove {shard.parent}" in line
    steps = [record["step"] for record in metrics(corpus / "run")]
    num_samples = -(-shard.stat().st_size // 2 // 32)
    assert max(steps, default=0) <= -(-num_samples // 8)
    assert not (corpus / "run" / "model").exists()


def test_a_short_run_does_not_wait_for_the_digests_and_says_so(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "CHECKED_AT_OPENING_BYTES", 0)
    recipe = write_recipe_file(corpus, task="causal-lm", schedule={"max_steps": 2})
    assert main(["plan", str(recipe)]) == 0
    compare = cache.sha256
    # The corpus itself may be hashed again, because it is new: its time of change does not yet say that it is the same.
    monkeypatch.setattr(
        cache, "sha256", lambda path, *args: (path.suffix == ".bin" and time.sleep(60)) or compare(path, *args)
    )
    began = time.monotonic()
    assert main(["run", str(recipe)]) == 0
    assert time.monotonic() - began < 50
    shown = "".join(capsys.readouterr())
    assert "train.bin" in shown
    assert "its digest" in shown


def test_a_token_that_no_vocabulary_has_is_an_error_of_the_data_and_not_of_the_device(prepare: Prepare) -> None:
    corpus = prepare(ROWS, eval_fraction=0)
    shard = corpus.train.stream.files[0]
    tokens = np.fromfile(shard, "<u2")
    tokens[19] = 40_000
    tokens.tofile(shard)
    corpus.train[0]
    named = "train.bin: token 40000|position 19|size 257|remove"
    assert isinstance(refused(corpus.train.__getitem__, 2, named=named), DataError)


def test_a_cache_folder_that_cannot_be_made_is_refused(prepare: Prepare) -> None:
    write_file("file", "")
    refused(prepare, ROWS, cache_dir="file", named="data.cache_dir|file/text")


def test_a_failed_build_leaves_no_shards_behind(prepare: Prepare) -> None:
    path = write_texts("a.jsonl", ROWS)
    write_file(path, Path(path).read_text() + "broken")
    refused(prepare, path, eval_fraction=0, named="a.jsonl:201: not JSON")
    assert not [entry.name for entry in Path("cache/text").iterdir() if entry.suffix not in (".lock", "")]
    assert not list(Path("cache/text").rglob("*.bin"))


def test_what_a_killed_build_left_is_cleared(prepare: Prepare) -> None:
    folder = Path(prepare(ROWS).facts.cache_folder)
    building = folder.with_name(folder.name + ".building")
    folder.rename(building)
    (building / "train.bin").write_bytes(b"half")
    assert not prepare("a.jsonl").facts.reused
    assert not building.exists()


def _prepare_at_once(recipe: Recipe, barrier: Any, results: Any) -> None:
    barrier.wait(120)
    corpus = prepare_text(recipe, progress=False)
    results.put((corpus.facts.reused, corpus.fingerprint, sum(stream(corpus, "train"))))


@pytest.mark.slow
def test_of_two_processes_at_once_one_builds_and_the_other_reads(text_recipe: MakeRecipe) -> None:
    recipe = text_recipe(write_texts("a.jsonl", ROWS * 50), tokenizer=BPE)
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_prepare_at_once, args=(recipe, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=180) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(reused for reused, _, _ in outcomes) == [False, True]
    assert outcomes[0][1:] == outcomes[1][1:]


def test_a_long_document_is_one_document(prepare: Prepare) -> None:
    text = "a line of text\n" * 70_000
    write_file("a.txt", text)
    corpus = prepare("a.txt", eval_fraction=0.25)
    assert stream(corpus, "train").count(BYTE_SEPARATOR_ID) == 1
    assert "".join(decoded_documents(corpus, "train") + decoded_documents(corpus, "eval")) == text


def test_a_large_vocabulary_takes_four_bytes_a_token(prepare: Prepare) -> None:
    words = {SEPARATOR: 0, **{f"w{number}": number for number in range(1, (1 << 16) + 1)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SEPARATOR, unk_token="w1")
    tokenizer.save_pretrained("tokenizer")
    corpus = prepare(["w2 w65536 w3", *ROWS], tokenizer="tokenizer", eval_fraction=0)
    assert corpus.train.stream.dtypes == (np.uint32,)
    assert stream(corpus, "train")[:4] == [0, 2, 65536, 3]
    assert corpus.vocab_size == 65537


def test_progress_is_shown_only_when_wanted(
    prepare: Prepare, text_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(ROWS)
    assert capsys.readouterr() == ("", "")
    prepare_text(text_recipe("a.jsonl", eval_fraction=0.2), progress=True)
    assert capsys.readouterr() == ("", ""), "a bar was drawn into something that is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    prepare_text(text_recipe("a.jsonl", eval_fraction=0.3), progress=True)
    shown = capsys.readouterr()
    assert "tokenizing" in shown.err
    assert shown.out == ""
