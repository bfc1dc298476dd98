"""The first lines of a run: warnings that apply to it, with a remedy that applies as well."""

from accel_train.training.output import few_held_out


def test_few_held_out_samples_are_warned_of_with_what_can_be_done_about_them() -> None:
    labelled = {"num_eval": 20, "num_train_of_label": {"a": 90, "b": 90}}
    [split] = few_held_out(labelled, None)
    assert "5.0%" in split
    assert "data.eval_fraction" in split
    [own] = few_held_out(labelled, "test.csv")
    assert "data.eval_fraction" not in own, "it is not used with data.eval"
    [regression] = few_held_out({"num_eval": 20, "problem_type": "regression (numbers)"}, None)
    assert "accuracy" not in regression
    assert few_held_out({**labelled, "num_eval": 100}, None) == few_held_out({"num_eval": 20}, None) == []
