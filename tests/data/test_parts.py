"""The names of parts: one table, which every reader of a folder follows."""

import pytest

from accel_train.data.parts import Part, are_parts, part_of, pick

NAMES: dict[Part | None, str] = {
    "train": "train Train TRAIN training Training trainset train_set training_set TrainSet train2017 train-images "
    "train-00000-of-00002.parquet esp.train X_train trainval train_val wiki.train.txt training_notes.txt",
    "eval": "valid Valid val validation validate valset val_set validation_set val2017 dev DevSet devset dev-clean "
    "devel develop development eval evaluation evalset holdout hold_out held_out HeldOut eng.testa training-eval.json",
    "test": "test Test testing Testing tests testset test_set TestSet test-other test2 test-dev PublicTest eng.testb "
    "sample_submission.csv submission",
    None: "trainer trains retrain constraint rain developer devil device evaluate evaluated value valley validity "
    "contest latest attest tester testament protest holder invalid unsup data images extra cats",
}
PARTS = {name: part for part, names in NAMES.items() for name in names.split()}


@pytest.mark.parametrize("name", PARTS)
def test_a_name_tells_the_part_by_a_whole_word(name: str) -> None:
    assert len(PARTS) >= 60
    assert part_of(name) == PARTS[name]
    assert part_of(f"data/{name}") == PARTS[name]


@pytest.mark.parametrize(
    ("names", "are"),
    [
        ("train test", True),
        ("Training Testing", True),
        ("training eval", True),
        ("train test extra", True),
        ("train unsup", False),
        ("train", False),
        ("bus train car", False),
        ("trains test bus", False),
        ("freight_train bus", False),
    ],
)
def test_folders_are_parts_if_all_are_or_if_train_has_a_held_out_one_beside_it(names: str, are: bool) -> None:
    assert are_parts(names.split()) is are


@pytest.mark.parametrize(
    ("names", "part", "beside", "chosen"),
    [
        ("dev val validation", "eval", None, "validation"),
        ("eval dev", "eval", None, "dev"),
        ("val2014 val2017", "eval", "train2017", "val2017"),
        ("validation_a validation_b", "eval", None, None),
        ("test test_unlabeled", "test", None, "test"),
        ("Testing", "test", "Training", "Testing"),
        ("cats dogs", "train", None, None),
    ],
)
def test_of_several_names_the_usual_one_is_chosen(names: str, part: Part, beside: str | None, chosen: str) -> None:
    assert pick(names.split(), part, beside) == chosen
