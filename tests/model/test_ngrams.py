"""N-grams of bytes and words: the same whatever stands beside a text, weighted as TF-IDF weights them, loaded without
the package.
"""

import csv
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import pipeline

from accel_train.cli.main import main
from accel_train.model.ngrams import NgramsConfig, NgramsForSequenceClassification, register
from tests.support.comparisons import assert_same_run
from tests.support.runs import Capture, answers, environment, run, summary_of
from tests.support.wording import assert_golden

TEXTS = ["The cat, the CAT.", "a cat", "do_it(2) twice", "", "é déjà vu", "x" * 40]
OLD_LOGITS = [[0.05399834364652634, 1.2077627182006836], [0.035983845591545105, 1.6531226634979248]]


NEW = {"separate_norms": True, "within_words": True, "log_counts": True}


def model(**sizes: int) -> NgramsForSequenceClassification:
    return NgramsForSequenceClassification(NgramsConfig(num_buckets=2**22, num_labels=3, **sizes)).eval()


def encoded(texts: list[str], beside: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [list(text.encode()) for text in texts]
    length = max(map(len, rows)) + beside
    ids = torch.tensor([row + [257] * (length - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])


def keys_of(text: str, **sizes: int) -> list[int]:
    buckets, weights, _ = model(**sizes).weighted(*encoded([text], beside=3))
    return sorted(buckets[weights > 0].tolist())


def test_there_is_one_key_for_each_ngram_of_bytes_and_words_and_equal_ones_have_equal_keys() -> None:
    for text in TEXTS:
        content = text.lower().encode() if text.isascii() else text.encode()
        grams = [("c", content[at : at + size]) for size in (1, 2, 3) for at in range(len(content) - size + 1)]
        words = [
            bytes(word)
            for word in "".join(c if c.isalnum() or c == "_" else " " for c in content.decode()).encode().split()
        ]
        grams += [("w", word) for word in words] + [("w", one + b" " + two) for one, two in pairwise(words)]
        counts = {gram: grams.count(gram) for gram in grams}
        found = keys_of(text, max_characters=3, max_words=2)
        assert sorted(found.count(key) for key in set(found)) == sorted(counts.values())
    assert set(keys_of("cat")) <= set(keys_of("The CAT"))
    assert not set(keys_of("cat", max_characters=1)) & set(keys_of("dog", max_characters=1))


def test_ngrams_within_words_begin_and_end_with_white_space_at_most() -> None:
    text = "do it\tnow, now"
    grams = [text[at : at + size] for size in range(1, 5) for at in range(len(text) - size + 1)]
    kept = [gram for gram in grams if not any(character.isspace() for character in gram[1:-1])]
    assert "o i" not in kept
    assert "it\t" in kept
    sizes = {"max_characters": 4, "max_words": 1, "separate_norms": True}
    (buckets, there), _words = model(**sizes, within_words=True).features(*encoded([text], beside=3))[0]
    (plain, is_plain), _words = model(**sizes).features(*encoded([text], beside=3))[0]
    key_of = dict(zip(grams, plain[is_plain].tolist(), strict=True))
    assert sorted(buckets[there].tolist()) == sorted(key_of[gram] for gram in kept)


def test_logarithms_of_counts_weigh_ngrams_as_scikit_learn_does() -> None:
    texts = ["aaaa ba", "ab ab ab c", "cc"]
    sizes = {"max_characters": 2, "max_words": 1, "separate_norms": True, "log_counts": True}
    classifier = model(**sizes)
    tokens = [torch.tensor(list(text.encode())) for text in texts]
    classifier.measure_rarity(tokens)
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True)
    expected = vectorizer.fit_transform(texts).toarray()
    with torch.no_grad():
        for gram, column in vectorizer.vocabulary_.items():
            [key] = classifier.features(*encoded([gram]))[0][0][0][:, -1].tolist()
            classifier.table.weight.zero_()[key] = 1
            logits = classifier(*encoded(texts, beside=2)).logits[:, 0]
            torch.testing.assert_close(logits, torch.tensor(expected[:, column]).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ways", [{}, NEW])
def test_padding_and_the_other_texts_of_a_batch_change_nothing(ways: dict[str, bool]) -> None:
    with torch.no_grad():
        classifier = model(**ways)
        classifier.table.weight.normal_()
        together = classifier(*encoded(TEXTS, beside=7)).logits
        alone = torch.cat([classifier(*encoded([text], beside=1)).logits for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def encoded_pairs(pairs: list[tuple[str, str]], beside: int = 0) -> dict[str, torch.Tensor]:
    ids, mask = encoded([first + second for first, second in pairs], beside)
    seconds = torch.tensor([len(first.encode()) for first, _ in pairs])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": ((torch.arange(ids.shape[1]) >= seconds[:, None]) & mask).long(),
    }


@pytest.mark.parametrize("ways", [{"separate_norms": True}, NEW])
def test_padding_and_the_other_pairs_of_a_batch_change_nothing(ways: dict[str, bool]) -> None:
    pairs = [("the cat", "a cat sat"), ("", "x"), ("one", ""), ("x" * 40, "xy z"), ("é déjà", "vu déjà")]
    with torch.no_grad():
        classifier = model(**ways, type_vocab_size=2)
        classifier.table.weight.normal_()
        classifier.overlap.weight.normal_()
        together = classifier(**encoded_pairs(pairs, beside=7)).logits
        alone = torch.cat([classifier(**encoded_pairs([pair], beside=1)).logits for pair in pairs])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_shares_count_the_ngrams_that_both_texts_have() -> None:
    classifier = model(max_characters=1, max_words=1, separate_norms=True, type_vocab_size=2)
    batch = encoded_pairs([("the cat sat", "cat x"), ("abc", "abc"), ("abc", "def")])
    shares = classifier.features(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])[1]
    assert shares is not None
    # Columns 3 to 5 are words: share of the first text, of the second, and of both.
    torch.testing.assert_close(shares[:, 3:], torch.tensor([[1 / 3, 1 / 2, 2 / 5], [1, 1, 1], [0, 0, 0]]))


@pytest.mark.parametrize("is_pair", [False, True])
def test_only_a_model_of_pairs_learns_whether_new_texts_share_a_word(is_pair: bool) -> None:
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefghijklmnop"), 5)) for _ in range(400)]

    def pairs_of(words: list[str], count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        pairs, labels = [], []
        for number in range(count):
            first, second = generator.permutation(words)[:8].reshape(2, 4)
            second[0] = first[0] if number % 2 else second[0]
            pairs.append((" ".join(first), " ".join(generator.permutation(second))))
            labels.append(number % 2)
        return encoded_pairs(pairs), torch.tensor(labels)

    (train, labels), (new, expected) = pairs_of(words[:300], 200), pairs_of(words[300:], 100)
    config = NgramsConfig(num_buckets=2**12, num_labels=2, separate_norms=True, type_vocab_size=1 + is_pair)
    classifier = NgramsForSequenceClassification(config)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=5.0, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(classifier(**train).logits, labels).backward()
        optimizer.step()
    accuracy = (classifier(**new).logits.argmax(dim=1) == expected).float().mean().item()
    assert accuracy > 0.95 if is_pair else accuracy < 0.65


def test_fields_that_old_folders_lack_mean_the_old_model() -> None:
    """OLD_LOGITS are the first version's."""
    classifier = NgramsForSequenceClassification(NgramsConfig(num_buckets=97, num_labels=2)).eval()
    assert sorted(classifier.state_dict()) == ["bias", "rarity", "table.weight"]
    with torch.no_grad():
        classifier.table.weight.copy_(torch.arange(194.0).sin().view(97, 2))
        classifier.rarity.copy_(1 + torch.arange(97.0).cos() ** 2)
        logits = classifier(*encoded(["The cat sat", "é déjà vu 2"])).logits
    torch.testing.assert_close(logits, torch.tensor(OLD_LOGITS), rtol=0, atol=1e-6)


def test_rarity_is_the_inverse_document_frequency_of_scikit_learn() -> None:
    texts = ["the cat sat", "the dog sat", "a bird flew", "the end"]
    classifier = model(max_characters=1, max_words=1)
    classifier.measure_rarity([torch.tensor(list(text.encode())) for text in texts])
    vectorizer = TfidfVectorizer(token_pattern=r"\w+").fit(texts)
    single = model(max_characters=1, max_words=1)
    for word in ("the", "sat", "bird"):
        buckets, weights, _ = single.weighted(*encoded([word]))
        weight = classifier.rarity[buckets[weights > 0]][-1]
        assert weight.item() == pytest.approx(vectorizer.idf_[vectorizer.vocabulary_[word]], rel=1e-6)


def test_it_trains_past_its_baselines_and_its_folder_works_without_the_package(
    empty_folder: Path, capsys: Capture
) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for number in range(300):  # the kind is in the middle of a word, which no whole word tells
        middle, label = ("ing", "one") if number % 2 else ("ion", "two")
        syllables = ["".join(generator.choice(list("abcdefghklmnoprstuvwz"), 3)) for _ in range(6)]
        rows.append(f"{syllables[0]}{middle}{syllables[1]} {' '.join(syllables[2:])},{label}")
    Path("rows.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    settings = [
        "--data.train",
        "rows.csv",
        "--schedule.num_epochs",
        "4",
        "--output_dir",
        "run",
        "--model.config.num_buckets",
        "8192",
    ]
    assert main(["run", "text_ngrams", *settings]) == 0
    summary = summary_of(Path("run"))
    assert summary["eval"]["accuracy"] > summary["baselines"]["tfidf_accuracy"] + 0.2

    register()
    loaded = NgramsForSequenceClassification.from_pretrained("run/model").eval()
    ids, mask = encoded(["abcingdef xyz"])
    expected = loaded(ids, mask).logits.tolist()
    program = (
        "import sys; sys.modules['accel_train'] = None\n"
        "from transformers import AutoModelForSequenceClassification as Auto, AutoTokenizer; import torch\n"
        "model = Auto.from_pretrained('run/model', trust_remote_code=True).eval()\n"
        f"print(model(torch.tensor({ids.tolist()})).logits.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(HF_HUB_OFFLINE="1"), check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(expected)
    assert "trust_remote_code=True" in Path("run/model/README.md").read_text()


@pytest.mark.parametrize("text", ["title", "title,body"])
def test_numbers_of_texts_that_repeat_are_learned_without_divergence(empty_folder: Path, text: str) -> None:
    draw = np.random.default_rng(0)
    rows = ["title,body,price"]
    for _ in range(300):
        first, second = draw.choice(["villa", "flat", "garden", "garage"], 2, replace=False)
        rows.append(f"a house with {first},{first} and {second},{draw.uniform(1e5, 9e5):.2f}")
    Path("houses.csv").write_text("\n".join(rows) + "\n")
    assert main(["finetune", "houses.csv", "--text", text, "--label", "price"]) == 0
    summary = summary_of(Path("runs/houses"))
    # The prices are random, so the mean is the best prediction.
    assert summary["eval"]["rmse"] < 1.5 * summary["baselines"]["mean_rmse"]


def test_another_tokenizer_is_refused(empty_folder: Path, capsys: Capture) -> None:
    assert main(["plan", "text_ngrams", "--tokenizer.train_bpe.vocab_size", "300"]) == 2
    assert_golden("\n".join(answers(capsys.readouterr().err)))


@pytest.mark.slow
def test_pairs_train_alike_on_two_processes_and_the_pipeline_gives_the_scores_of_predict(
    empty_folder: Path, capsys: Capture
) -> None:
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefgh"), 4)) for _ in range(400)]
    rows = []
    for number in range(400):
        one, other = (list(generator.choice(words, 6)) for _ in range(2))
        other[:3] = one[:3] if number % 2 else other[:3]
        rows.append(f"{' '.join(one)},{' '.join(other)},{'same' if number % 2 else 'other'}")
    Path("pairs.csv").write_text("one,two,label\n" + "\n".join(rows) + "\n")
    assert main(["finetune", "pairs.csv", "--dry-run", "--schedule.max_steps", "16", "--data.num_workers", "0"]) == 0
    # With the recipe's rate the last loss is 1e-3, and a rounding of the probabilities is more than 1e-6 of it.
    rate = ("--optimizer.learning_rate", "1")
    run(Path("runs/pairs.yaml"), "--output_dir", "alone", *rate)
    run(Path("runs/pairs.yaml"), "--output_dir", "both", *rate, processes=2)
    assert_same_run(Path("both"), Path("alone"))
    assert summary_of(Path("both"))["eval"]["accuracy"] > 0.9

    assert main(["predict", "both", "pairs.csv", "--out", "found.csv"]) == 0
    with Path("found.csv").open(newline="") as file:
        found = list(csv.DictReader(file))[:40]
    pipe = pipeline("text-classification", model="both/model", trust_remote_code=True, top_k=None)
    for row, expected in zip(rows, found, strict=False):
        one, other, _ = row.split(",")
        scores = {each["label"]: each["score"] for each in pipe({"text": one, "text_pair": other}, truncation=True)}
        assert scores["same"] == pytest.approx(float(expected["score_same"]), abs=1e-6)
