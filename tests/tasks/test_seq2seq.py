"""Sequence to sequence: the loss is transformers' own, texts are generated for the rows asked for, and what is saved
writes the same.
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from accel_train.cli.main import main
from accel_train.metrics import texts as text_metrics
from accel_train.metrics.texts import TEXT_SCORES, text_scores
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, load_task
from accel_train.tasks.seq2seq.task import Seq2Seq
from tests.support.runs import REPOSITORY, metrics, run, run_forked_command, write_recipe_file

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "model_type": "bart",
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
MARIAN = {**BART, "model_type": "marian"}
FAMILIES = pytest.mark.parametrize("config", [T5, BART, MARIAN], ids=lambda config: config["model_type"])


def write_pairs(path: Path, num_rows: int = 40) -> Path:
    """Numbers and their digits in words, of one to four digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "source", "target"])
        for row in range(num_rows):
            digits = str(7 + row * row * 13)[: 1 + row % 4]
            writer.writerow([f"row-{row}", f"{digits} {row}", " ".join(NUMBERS[int(digit)] for digit in digits)])
    return path


def recipe_for(train: Path | str, **sections: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "seq2seq",
        "output_dir": "run",
        "model": {"config": T5},
        "schedule": {"max_steps": 1},
        **sections,
    }
    defaults = {"train": str(train), "eval_fraction": 0.3, "max_length": 24, "max_target_length": 24}
    settings["data"] = {**defaults, **settings.get("data", {})}
    return Recipe.model_validate(settings)


def load(recipe: Recipe, seed: int = 0) -> tuple[Seq2Seq, TaskData, nn.Module]:
    task = load_task("seq2seq")
    assert isinstance(task, Seq2Seq)
    data = task.load_data(recipe, progress=False)
    torch.manual_seed(seed)
    return task, data, task.build_model(recipe, data).eval()


def batch_of(data: TaskData, indices: range, *, train: bool = False) -> tuple[dict[str, Tensor], int]:
    samples = data.train if train else data.eval
    assert samples is not None
    batch = data.collate([samples[index] for index in indices])
    return batch, batch.pop("num_targets")


def evaluated(task: Seq2Seq, data: TaskData, model: nn.Module, batch_size: int) -> tuple[dict[str, float], Any]:
    found: dict[str, list[Tensor]] = {}
    num_targets, size = 0, len(data.eval)  # type: ignore[arg-type]
    with torch.no_grad():
        for start in range(0, size, batch_size):
            batch, count = batch_of(data, range(start, min(start + batch_size, size)))
            num_targets += count
            for name, value in task.evaluate_batch(model, batch).items():
                found.setdefault(name, []).append(value)
    totals = {
        name: torch.cat(values).numpy() if name.startswith("rows_") else torch.stack(values).double().sum(0).numpy()
        for name, values in found.items()
    }
    loss = float(totals["loss_sum"]) / num_targets
    scores = task.score(loss, totals, data)
    return {"loss": loss, **scores.metrics}, scores.details


@FAMILIES
def test_the_loss_is_the_models_own_with_its_shift_and_so_is_its_gradient(tmp_path: Path, config: Any) -> None:
    task, data, model = load(recipe_for(write_pairs(tmp_path / "a.csv"), model={"config": config}))
    batch, num_targets = batch_of(data, range(9), train=True)
    labels = batch["labels"]
    assert num_targets == int((labels != -100).sum()) < labels.numel()
    assert (labels == data.source.tokenizer.eos_token_id).sum() == 9
    ours = task.loss_sum(model, batch) / num_targets
    its = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    torch.testing.assert_close(ours, its)
    weight = model.get_input_embeddings().weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, its)))


@FAMILIES
def test_loss_scores_and_texts_do_not_depend_on_the_batch_size(tmp_path: Path, config: Any) -> None:
    recipe = recipe_for(
        write_pairs(tmp_path / "a.csv"),
        model={"config": config},
        data={"max_target_length": 12},
        evaluate={"generation": {"num_beams": 2, "max_samples": 5}},
    )
    task, data, model = load(recipe)
    alone, details = evaluated(task, data, model, 1)
    assert alone.keys() == {"loss", "perplexity", "token_accuracy", *TEXT_SCORES}
    assert details["generation"]["num_texts"] == 5
    together, same_details = evaluated(task, data, model, 7)
    assert together == pytest.approx(alone, rel=1e-5)
    assert same_details == details


def test_texts_are_generated_for_as_many_rows_as_asked_evenly_spaced_among_those_that_every_evaluation_reads(
    tmp_path: Path,
) -> None:
    path = write_pairs(tmp_path / "a.csv")

    def chosen(**evaluate: Any) -> list[int]:
        task = load_task("seq2seq")
        return list(task.load_data(recipe_for(path, evaluate=evaluate), progress=False).source.generated)

    everything = chosen(generation={"max_samples": None})
    assert everything == list(range(len(everything)))
    assert chosen(generation={"max_samples": 3}) == [index * len(everything) // 3 for index in range(3)]
    read = [index * len(everything) // 4 for index in range(4)]
    assert chosen(max_samples=4, generation={"max_samples": 100}) == read
    assert set(chosen(max_samples=4, generation={"max_samples": 2})) < set(read)
    assert chosen(generation={"max_samples": 0}) == []


def test_without_generation_no_package_is_needed_and_a_missing_one_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pairs(tmp_path / "a.csv")
    monkeypatch.setattr(text_metrics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"sacrebleu and rouge-score.*accel-train\[seq2seq\]"):
        load(recipe_for(path))
    task, data, model = load(recipe_for(path, evaluate={"generation": {"max_samples": 0}}))
    assert evaluated(task, data, model, 8)[0].keys() == {"loss", "perplexity", "token_accuracy"}
    assert task.baselines(data) == {}


@FAMILIES
def test_what_is_saved_writes_the_same_through_transformers(tmp_path: Path, config: Any) -> None:
    task, data, model = load(
        recipe_for(
            write_pairs(tmp_path / "a.csv"),
            model={"config": config},
            data={"max_target_length": 9, "source_prefix": "say: "},
            evaluate={"generation": {"num_beams": 2}},
        )
    )
    task.save(model, data, tmp_path / "model")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    batch, _ = batch_of(data, range(4))
    rows = {name: value.numpy() for name, value in task.predict_batch(model, batch).items()}
    columns = task.prediction_columns({**rows, "index": np.arange(4)}, data)
    assert columns["target"] == [data.source.rows[index].label for index in range(4)]
    for index, text in enumerate(columns["generated"]):
        given = tokenizer("say: " + data.source.rows[index].texts[0], return_tensors="pt")
        ids = theirs.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        assert ids.shape[1] <= 10
        assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == text
    again = recipe_for(tmp_path / "a.csv", model={"pretrained": str(tmp_path / "model")})
    _, _, same = load(again, seed=5)
    for (name, one), other in zip(model.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_padding_rows_of_the_vocabulary_are_never_generated(tmp_path: Path) -> None:
    task, data, model = load(recipe_for(write_pairs(tmp_path / "a.csv")))
    num_tokens = len(data.source.tokenizer)
    head = model.get_output_embeddings().weight
    assert head.shape[0] > num_tokens
    with torch.no_grad():
        head[num_tokens:] = 10 * head[num_tokens:].abs().max()
        head[num_tokens + 1 :: 2] *= -1  # one of two neighbours is above all others, whatever the hidden state
    batch, _ = batch_of(data, range(6))
    generated = task.predict_batch(model, batch)["generated"]
    assert int(generated.max()) < num_tokens


def test_a_source_or_target_that_is_too_long_is_cut_with_its_end_kept_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("source,target\n" + "\n".join(f"{'ab' * length},{'c' * length}" for length in range(1, 12)) + "\n")
    _, data, _ = load(recipe_for(path, data={"max_length": 9, "max_target_length": 5, "eval_fraction": 0.0}))
    end = data.source.tokenizer.eos_token_id
    assert {len(pair.source) for pair in data.train} <= set(range(3, 10))  # type: ignore[attr-defined]
    assert all(pair.source[-1] == pair.target[-1] == end for pair in data.train)  # type: ignore[attr-defined]
    assert "8 of 11 training sources reach data.max_length=9 tokens, and are cut there" in data.facts["notes"]
    assert "8 of 11 training targets reach data.max_target_length=5 tokens, and are cut there" in data.facts["notes"]
    assert data.eval is None


def test_what_looks_like_a_special_token_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("source,target\n[PAD] <|endoftext|>,<|endoftext|>\nplain,text\n")
    _, data, _ = load(recipe_for(path, data={"eval_fraction": 0.0, "max_length": 40}))
    assert bytes(data.train[0].source[:-1].astype(np.uint8)) == b"[PAD] <|endoftext|>"
    assert bytes(data.train[0].target[:-1].astype(np.uint8)) == b"<|endoftext|>"


def test_equal_sources_are_on_one_side_and_columns_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"en": f"text {row % 10}", "de": f"Text {row}"} for row in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, data, _ = load(recipe_for(path, data={"source_column": "en", "target_column": "de"}))
    held_out = {row.texts for row in data.source.rows}
    assert 0 < len(held_out) < 10
    assert len(data.source.rows) == 4 * len(held_out)


def test_scores_of_texts_are_those_of_the_packages_and_baselines_are_scored_alike(tmp_path: Path) -> None:
    perfect = text_scores(["the cat sat on the mat"], ["the cat sat on the mat"])
    assert perfect == pytest.approx({"bleu": 100, "chrf": 100, "rouge1": 1, "rouge2": 1, "rougeL": 1, "exact_match": 1})
    two = text_scores(["a b c d e", "x"], ["a b c d f", "y"])
    assert two["rouge1"] == pytest.approx((4 / 5 + 0) / 2)
    assert two["exact_match"] == 0
    assert 0 < two["bleu"] < 100
    task, data, _ = load(recipe_for(write_pairs(tmp_path / "a.csv")))
    baselines = task.baselines(data)
    rows = data.source.rows
    copied = text_scores([row.texts[0] for row in rows], [row.label for row in rows])
    assert {name: baselines[f"copied_source_{name}"] for name in copied} == copied
    assert baselines["most_frequent_target_chrf"] > 0


def test_operations_count_for_each_target_token(tmp_path: Path) -> None:
    recipe = recipe_for(write_pairs(tmp_path / "a.csv"))
    task, _, model = load(recipe)
    flops = task.flops_per_target(recipe, model)
    source, target = (round(length) for length in task.mean_lengths)
    blocks = [p for name, p in model.named_parameters() if p.ndim == 2 and "block" in name and "bias" not in name]
    names = [name for name, p in model.named_parameters() if p.ndim == 2 and "block" in name and "bias" not in name]
    encoder = sum(p.numel() for p, name in zip(blocks, names) if name.startswith("encoder"))
    cross = sum(
        p.numel() for p, name in zip(blocks, names) if "EncDecAttention.k" in name or "EncDecAttention.v" in name
    )
    decoder = sum(p.numel() for p, name in zip(blocks, names) if name.startswith("decoder")) - cross
    head = model.get_output_embeddings().weight.numel()
    products = (encoder + cross) * source + (decoder + head) * target
    attention = 2 * 2 * 32 * (source * source + target * target + source * target)
    assert flops == pytest.approx(6 * (products + attention) / target)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"source_column": "sorce"}}, "a.csv:1: no column 'sorce'; did you mean 'source'?"),
        ({"model": {"config": {"model_type": "bert"}}}, "has no model for sequence-to-sequence in transformers"),
        ({"model": {"config": BART}, "data": {"max_length": 65}}, "data.max_length=65 is longer than the 64 positions"),
        (
            {"model": {"config": BART}, "data": {"max_target_length": 65}},
            "data.max_target_length=65 is longer than the 64",
        ),
        ({"data": {"max_target_length": 1}}, "data.max_target_length=1 leaves no token for the text; give at least 2"),
        ({"model": {"config": {**T5, "vocab_size": 100}}}, "is smaller than the tokenizer's 258 tokens"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what the test looks at)
        load(recipe_for(write_pairs(tmp_path / "a.csv"), **sections))
    assert said in str(caught.value)


def test_a_cell_that_is_no_text_is_named_by_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n{"source": "c", "target": 3}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: column 'target' holds 3, not a string.*data\.target_column"):
        load(recipe_for(path))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with everything that training can be asked for but LoRA."""
    folder = tmp_path_factory.mktemp("seq2seq")
    write_pairs(folder / "a.csv", 60)
    recipe = write_recipe_file(
        folder,
        task="seq2seq",
        model={"config": T5, "freeze": ["shared.*"]},
        data={
            "train": str(folder / "a.csv"),
            "id_column": "name",
            "eval_fraction": 0.2,
            "max_length": 16,
            "max_target_length": 24,
            "group_by_length": True,
        },
        loss={"label_smoothing": 0.1},
        optimizer={"learning_rate": 1e-2, "ema_decay": 0.9, "layer_decay": 0.9},
        schedule={"max_steps": 30},
        evaluate={
            "every_steps": 10,
            "metric_for_best_model": "chrf",
            "early_stopping_patience": 3,
            "sample_prompt": "31",
        },
        checkpoint={"every_steps": 0},
    )
    run(recipe)
    return folder / "run"


def test_a_run_learns_and_reports_scores_texts_and_baselines(trained: Path) -> None:
    evaluations = metrics(trained, "eval")
    assert evaluations[-1]["loss"] < 0.9 * evaluations[0]["loss"]
    summary = json.loads((trained / "summary.json").read_text())
    assert set(TEXT_SCORES) < summary["eval"].keys()
    assert summary["baselines"]["copied_source_exact_match"] == 0
    assert summary["sample"]["prompt"] == "31"
    details = json.loads((trained / "evaluation.json").read_text())["details"]["generation"]
    assert details["num_texts"] == summary["data"]["num_eval"]
    assert details["samples"][0].keys() == {"id", "source", "target", "generated"}
    assert "Generated texts" in (trained / "report.html").read_text()


def test_the_code_in_the_model_card_writes_what_predict_writes(
    trained: Path, capsys: pytest.CaptureFixture[str], not_launched: None
) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    card = (trained / "model" / "README.md").read_text()
    assert (
        f"on {summary['data']['num_train']} pairs of texts, evaluated on {summary['data']['num_eval']} others" in card
    )
    assert "Reads: up to 16 tokens" in card
    (trained.parent / "one.csv").write_text("source\n31 8\n")
    assert (
        main(["predict", str(trained), str(trained.parent / "one.csv"), "--out", str(trained.parent / "one.jsonl")])
        == 0
    )
    capsys.readouterr()
    code = card.split("```python")[1].split("```")[0].replace("path/of/this/folder", str(trained / "model"))
    exec(code.replace("a text", "31 8"), {})
    assert capsys.readouterr().out.rstrip("\n") == json.loads((trained.parent / "one.jsonl").read_text())["generated"]


def test_predictions_are_a_row_a_source_with_or_without_targets(trained: Path, tmp_path: Path) -> None:
    done = run_forked_command(["predict", str(trained), "--out", str(tmp_path / "own.csv")], 1)
    assert done.returncode == 0, done.stderr[-3000:]
    own = list(csv.DictReader((tmp_path / "own.csv").read_text().splitlines()))
    assert own[0].keys() == {"id", "generated", "target"}
    assert own[0]["id"].startswith("row-")
    (tmp_path / "new.csv").write_text("source\n12 5\n7 7\n19 4\n")
    words = ["predict", str(trained), str(tmp_path / "new.csv"), "--out", str(tmp_path / "new.jsonl")]
    done = run_forked_command(words, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert [row["id"].rpartition(":")[2] for row in rows] == ["2", "3", "4"]
    assert rows[0].keys() == {"id", "generated"}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_a_compiled_model_generates_what_one_does_that_is_not(tmp_path: Path, compiled: str) -> None:
    """Traced alone: what the compiler would make of the graphs is another matter."""
    write_pairs(tmp_path / "pairs.csv")
    found = []
    for number, precision in enumerate(({}, {"compile": compiled, "compile_backend": "aot_eager"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = {"train": str(tmp_path / "pairs.csv"), "eval_fraction": 0.3, "max_length": 16, "max_target_length": 24}
        evaluate = {"every_steps": 2, "generation": {"max_samples": 5}}
        sections = {"model": {"config": T5}, "schedule": {"max_steps": 2}, "precision": precision, "evaluate": evaluate}
        run(write_recipe_file(folder, task="seq2seq", data=data, **sections))
        found.append(json.loads((folder / "run" / "evaluation.json").read_text()))
    assert found[0]["details"]["generation"] == found[1]["details"]["generation"]
    assert found[1]["metrics"] == pytest.approx(found[0]["metrics"], rel=1e-5)


@pytest.mark.slow
def test_the_recipe_beats_a_copy_of_the_source_in_one_of_its_epochs(tmp_path: Path) -> None:
    recipe = REPOSITORY / "recipes/seq2seq.yaml"
    run(recipe, "--schedule.num_epochs", "1", "--output_dir", str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["chrf"] > summary["baselines"]["copied_source_chrf"] + 70
    assert summary["eval"]["exact_match"] > 0.7
