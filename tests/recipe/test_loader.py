"""Recipe files: what YAML means, who set what, how mistakes are named, and that what is written can be run again."""

import random
import shlex
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from accel_train.core.redaction import is_secret, redact
from accel_train.core.state import Choice
from accel_train.model.pretrained import check_model_config
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.names import nearest_names, numbers_of, recipe_names
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import tasks_with
from accel_train.recipe.values import Origin, value_of
from accel_train.recipe.writer import format_recipe
from accel_train.recipe.yaml_core import one_line, parse_yaml
from tests.support.runs import Settings, refused, settings_refused
from tests.support.wording import assert_golden, raises_golden

RECIPE = """\
output_dir: runs/x
model:
  config: {model_type: gpt2, n_layer: 2}
data:
  train: python-stdlib
tokenizer: {train_bpe: {vocab_size: 512}}
optimizer:
  learning_rate: 1e-4
  betas: [0.9, 0.99]
schedule:
  max_steps: 1000
  warmup_steps: 10
"""


def lines_of(lines: Iterable[str], *names: str) -> str:
    """The lines of a recipe that set these names."""
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in names)


@pytest.fixture
def recipe_file(empty_folder: Path) -> Path:
    path = Path("r.yaml")
    path.write_text(RECIPE)
    return path


def error_of(path: Path, text: str | None = None, *arguments: str, **overrides: Any) -> str:
    if text is not None:
        path.write_text(text)
    return str(refused(load_recipe, path, named="", arguments=arguments, overrides=overrides))


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1E+3", -1000.0),
        ("1_000", "1_000"),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("~", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ("=", "="),
        ("e3", "e3"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(f"key: {text}", "f")[0]["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "value", ["name", "null", "True", "nUll", "no", "inf", "e5", "1e5", "", "é", "a b", "~", "class"]
)
def test_text_that_is_written_on_one_line_reads_as_the_same_text(value: str) -> None:
    assert parse_yaml(f"key: {one_line(value)}\n{one_line(value)}: 1", "f")[0] == {"key": value, value: 1}


def test_aliases_work_and_one_that_contains_itself_is_an_error() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: *x", "f")[0] == {"a": [1, 2], "b": [1, 2]}
    with raises_golden():
        parse_yaml("a: &x [*x]", "f")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb:\n  c: 1\n  c: 2",
        "a: 1\n\tb: 2",
        "a: [1,\nb: 2",
        "a: b: c",
        "a: !!python/object/apply:os.getcwd []",
        "a: !!binary aGk=",
        "<<: {a: 1}",
        "? [1, 2]\n: 3",
        "a: 1\n---\nb: 2",
        "a: \x01",
        pytest.param("[" * 5000, id="deep"),
    ],
)
def test_a_yaml_mistake_names_its_place(text: str) -> None:
    with raises_golden():
        parse_yaml(text, "f")


def test_each_value_knows_who_set_it(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        overrides={"batch": {"global_batch_size": 8}, "seed": 4},
        arguments=["--optimizer.learning_rate=2e-3", "--model.config.n_layer", "5"],
    )
    assert (recipe.optimizer.learning_rate, str(recipe.origin("optimizer.learning_rate"))) == (
        2e-3,
        "--optimizer.learning_rate",
    )
    assert recipe.origin("optimizer.betas") == Origin("file", "r.yaml:9")
    assert recipe.origin("tokenizer.train_bpe.vocab_size") == Origin("file", "r.yaml:6")
    assert (recipe.batch.global_batch_size, recipe.origin("batch.global_batch_size").kind) == (8, "python")
    assert (recipe.seed, recipe.origin("seed").kind) == (4, "python")
    assert recipe.model.config == {"model_type": "gpt2", "n_layer": 5}
    assert recipe.origin("model.config.n_layer").kind == "command line"
    assert recipe.origin("model.config.model_type") == Origin("file", "r.yaml:3")
    assert recipe.origin("optimizer.eps") == Origin("default")


def test_the_command_line_wins_over_python_and_python_over_the_file(recipe_file: Path) -> None:
    overrides = {"optimizer": {"learning_rate": 1.0, "eps": 2.0}}
    recipe = load_recipe(recipe_file, overrides=overrides, arguments=["--optimizer.learning_rate", "3"])
    assert (recipe.optimizer.learning_rate, recipe.optimizer.eps) == (3.0, 2.0)
    assert recipe.optimizer.betas == (0.9, 0.99)


@pytest.mark.parametrize(
    "flag, text, leaf, value",
    [
        ("--data.train", "[a.txt, 'b c.txt']", "data.train", ("a.txt", "b c.txt")),
        ("--data.train", "data/*.txt", "data.train", "data/*.txt"),
        ("--evaluate.sample_prompt", "def f(x):", "evaluate.sample_prompt", "def f(x):"),
        ("--evaluate.sample_prompt", "Once: upon", "evaluate.sample_prompt", "Once: upon"),
        ("--data.subset", "2016", "data.subset", "2016"),
        ("--data.subset", "null", "data.subset", None),
        ("--data.split", "no", "data.split", "no"),
        ("--data.shuffle", "false", "data.shuffle", False),
        ("--seed", "0x10", "seed", 16),
        ("--schedule.max_steps", "1e3", "schedule.max_steps", 1000),
        ("--optimizer", "{weight_decay: 0, eps: 1e-6}", "optimizer.eps", 1e-6),
        ("--tokenizer", "bytes", "tokenizer", "bytes"),
        ("--tokenizer.train_bpe.vocab_size", "300", "tokenizer.train_bpe.vocab_size", 300),
        ("--tokenizer", "{train_bpe: {}}", "tokenizer.train_bpe.vocab_size", 512),
        ("--model.config", "{model_type: llama}", "model.config", {"model_type": "llama"}),
        ("--model.config.rope_parameters.factor", "2", "model.config.rope_parameters", {"factor": 2}),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_a_flag_sets_its_leaf(recipe_file: Path, flag: str, text: str, leaf: str, value: object, joined: bool) -> None:
    recipe: Any = load_recipe(recipe_file, arguments=[f"{flag}={text}"] if joined else [flag, text])
    for field in leaf.split("."):
        recipe = recipe[field] if isinstance(recipe, dict) else getattr(recipe, field)
    assert recipe == value
    assert type(recipe) is type(value)


@pytest.mark.parametrize(
    "setting, text, value",
    [
        ("data.text_columns", "sentence", ("sentence",)),
        ("data.label_names", "a", ("a",)),
        ("model.freeze", "*wte*", ("*wte*",)),
        ("log.trackers", "tensorboard", ("tensorboard",)),
        ("data.text_columns", "[a, b]", ("a", "b")),
        ("data.train", "a", "a"),
    ],
)
def test_one_text_stands_for_a_list_of_one(recipe_file: Path, setting: str, text: str, value: object) -> None:
    task = ["--task", next(iter(tasks_with(setting)), "causal-lm")]
    assert value_of(load_recipe(recipe_file, arguments=[*task, f"--{setting}", text]), setting) == value
    section, field = setting.split(".")
    given = [part.strip() for part in text.strip("[]").split(",")] if text.startswith("[") else text
    assert value_of(load_recipe(recipe_file, overrides={section: {field: given}}, arguments=task), setting) == value


def test_a_section_given_as_a_flag_keeps_its_other_fields(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, arguments=["--optimizer", "{weight_decay: 0}"])
    assert (recipe.optimizer.weight_decay, recipe.optimizer.learning_rate) == (0.0, 1e-4)


def test_of_the_same_flag_twice_the_last_one_holds(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, arguments=["--seed", "1", "--seed=2"]).seed == 2


@pytest.mark.parametrize(
    "arguments, gone",
    [
        (["--model.pretrained", "gpt2"], "model.config"),
        (["--schedule.num_epochs", "2"], "schedule.max_steps"),
        (["--schedule.warmup_ratio", "0.1"], "schedule.warmup_steps"),
    ],
)
def test_a_flag_replaces_what_it_excludes(recipe_file: Path, arguments: list[str], gone: str) -> None:
    recipe = load_recipe(recipe_file, arguments=arguments)
    section, leaf = gone.split(".")
    assert getattr(getattr(recipe, section), leaf) is None
    assert arguments[0] in str(recipe.origin(gone))
    assert "r.yaml:" in str(recipe.origin(gone))


def test_python_overrides_replace_what_they_exclude_and_flags_replace_python(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file, overrides={"schedule": {"num_epochs": 2}}, arguments=["--schedule.max_steps", "70"]
    )
    assert (recipe.schedule.max_steps, recipe.schedule.num_epochs) == (70, None)


def test_two_exclusive_flags_contradict_each_other(recipe_file: Path) -> None:
    said = error_of(recipe_file, None, "--schedule.max_steps", "7", "--schedule.num_epochs", "2")
    assert_golden(said)


def test_an_empty_section_takes_its_defaults(recipe_file: Path) -> None:
    recipe_file.write_text(RECIPE + "guard:\nlog: {}\n")
    assert load_recipe(recipe_file).guard.max_consecutive_skips == 5


@pytest.mark.parametrize(
    "old, new",
    [
        ("learning_rate: 1e-4", "learning_rate: -1"),
        ("learning_rate: 1e-4", "learning_rate: .nan"),
        ("learning_rate: 1e-4", "learning_rate: .inf"),
        ("learning_rate: 1e-4", "learning_rate: true"),
        ("learning_rate: 1e-4", "learning_rate: '1e-4'"),
        ("learning_rate: 1e-4", "learning_rate:"),
        ("betas: [0.9, 0.99]", "betas: [0.9, .nan]"),
        ("betas: [0.9, 0.99]", "betas: [0.9]"),
        ("betas: [0.9, 0.99]", "no_decay: [norms]"),
        ("betas: [0.9, 0.99]", "lr_scaling: {rule: lineer}"),
        ("vocab_size: 512", "vocab_size: 5"),
        ("tokenizer: {train_bpe: {vocab_size: 512}}", "tokenizer: 7"),
        ("tokenizer: {train_bpe: {vocab_size: 512}}", "tokenizer: {}"),
        ("train: python-stdlib", "trian: python-stdlib"),
        ("  train: python-stdlib", "  split: train"),
        ("max_steps: 1000", "max_steps: 5"),
        ("max_steps: 1000", "max_steps: 1.5"),
        ("schedule:", "shedule:"),
        ("output_dir: runs/x", "output_dir: runs/x\noptimizer.eps: 1"),
        ("output_dir: runs/x", "output_dir: runs/x\nlearning_rate: 1"),
        ("output_dir: runs/x", "output_dir: runs/x\nfp16: true"),
        ("output_dir: runs/x", "output_dir: runs/x\nguard: 5"),
        ("output_dir: runs/x", "output_dir: runs/x\n1: 5"),
        ("output_dir: runs/x", "output_dir: runs/x\nbatch: {per_device_batch_size: 0}"),
        ("output_dir: runs/x", "output_dir: runs/x\nprecision: {tf32: 1}"),
        ("output_dir: runs/x", "output_dir: runs/x\nprecision: {compile: yes}"),
        ("output_dir: runs/x", "output_dir: runs/x\noptions: {a: [.inf]}"),
        ("n_layer: 2", "n_layer: .nan"),
    ],
)
def test_a_wrong_value_is_named_with_place_rule_and_remedy(recipe_file: Path, old: str, new: str) -> None:
    assert old in RECIPE
    assert_golden(error_of(recipe_file, RECIPE.replace(old, new)))


def test_a_tilde_is_the_home_folder_and_a_name_with_a_dollar_sign_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tree: Settings = parse_yaml(RECIPE, "r.yaml")[0]
    assert Recipe.model_validate(tree | {"output_dir": "~/runs/a"}).output_dir == f"{tmp_path}/runs/a"
    assert Recipe.model_validate(tree | {"output_dir": "runs/5$"}).output_dir == "runs/5$"
    (tmp_path / "$data.txt").write_text("text")
    named = Recipe.model_validate(tree | {"data": {"train": f"{tmp_path}/$data.txt"}})
    assert named.data.train == f"{tmp_path}/$data.txt"


@pytest.mark.parametrize(
    ("section", "about"),
    [
        ({"schedule": {"max_steps": 5, "warmup_steps": 10}}, ("schedule.warmup_steps",)),
        ({"schedule": {"max_steps": 5, "num_epochs": 2}}, ("schedule.max_steps", "schedule.num_epochs")),
        ({"model": {"config": {"n_layer": 2}}}, ("model.config",)),
        ({"output_dir": "https://bucket"}, ("output_dir",)),
        ({"output_dir": "$HOME/x"}, ("output_dir",)),
        ({"output_dir": "a/${USER}"}, ("output_dir",)),
        ({"data": {"train": "a.txt", "cache_dir": "$SCRATCH"}}, ("data.cache_dir",)),
        ({"data": {"train": ["a.txt", "$HOME/a.txt"]}}, ("data.train",)),
        ({"data": {"train": "a.txt", "eval": "${HOME}/a.txt"}}, ("data.eval",)),
        ({"model": {"pretrained": "$HOME/model"}}, ("model.pretrained",)),
        ({"tokenizer": "$HOME/tokenizer"}, ("tokenizer",)),
        ({"checkpoint": {"resume": "$HOME/run/checkpoints/step-1"}}, ("checkpoint.resume",)),
        ({"log": {"profile_steps": [5, 2]}}, ("log.profile_steps",)),
        ({"parallel": {"sp_size": 2, "tp_size": 2}}, ("parallel.sp_size", "parallel.tp_size", "parallel.strategy")),
    ],
)
def test_a_rule_about_several_settings_names_them_in_fields(section: Settings, about: tuple[str, ...]) -> None:
    assert settings_refused(lambda: Recipe.model_validate(parse_yaml(RECIPE, "r.yaml")[0] | section)) == about
    assert set(about) <= recipe_names().keys()


def test_a_value_that_is_the_name_of_a_setting_is_not_taken_for_one(recipe_file: Path) -> None:
    said = error_of(recipe_file, RECIPE + "seed: 3\n", "--data.encoding", "seed")
    assert_golden(said)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("seed", {"integer"}),
        ("optimizer.betas", {"number"}),
        ("guard.on_spike", set()),
        ("parallel.zero_stage", set()),
        ("batch.per_device_batch_size", {"integer"}),
    ],
)
def test_numbers_that_a_setting_takes_are_read_from_its_type(name: str, numbers: set[str]) -> None:
    assert numbers_of(name) == numbers


def test_one_problem_is_one_line_and_all_are_named(recipe_file: Path) -> None:
    said = error_of(recipe_file, RECIPE.replace("1e-4", "-1").replace("max_steps: 1000", "max_steps: 0"))
    assert [line.partition("=")[0] for line in said.splitlines()] == ["optimizer.learning_rate", "schedule.max_steps"]


def test_a_wrong_value_names_the_flag_that_set_it(recipe_file: Path) -> None:
    assert_golden(error_of(recipe_file, None, "--optimizer.learning_rate", "0"), "flag")
    assert_golden(error_of(recipe_file, None, optimizer={"learning_rate": 0}), "python")


@pytest.mark.parametrize(
    "words",
    [
        "--learning_rat 1",
        "--optimizer.learning 1",
        "--optimizer.learning-rate 1",
        "--lr 1",
        "--every_steps 1",
        "--model.confg.n_layer 1",
        "--seed",
        "--seed --optimizer.eps 1",
        "--optimizer 1",
        "--optimizer '{learning_rat: 1}'",
        "--seed '[1'",
        "-x",
        "7",
    ],
)
def test_a_wrong_flag_is_refused_with_the_right_one(recipe_file: Path, words: str) -> None:
    assert_golden(error_of(recipe_file, None, *shlex.split(words)))


def test_a_negative_number_is_a_value_and_no_flag(recipe_file: Path) -> None:
    assert "seed=-1 (--seed): " in error_of(recipe_file, None, "--seed", "-1")


@pytest.mark.parametrize("name", ["s.yaml", "zzzzzzzzz", "."])
def test_a_file_that_cannot_be_read_is_named(recipe_file: Path, name: str) -> None:
    assert_golden(error_of(Path(name)))


def test_a_file_that_is_not_utf8_is_named(recipe_file: Path) -> None:
    recipe_file.write_bytes(b"output_dir: \xff")
    assert_golden(error_of(recipe_file))


def single_edits(word: str, rng: random.Random) -> Iterator[str]:
    for i in range(len(word)):
        other = rng.choice([c for c in string.ascii_lowercase if c != word[i]])
        yield word[:i] + word[i + 1 :]
        yield word[:i] + other + word[i + 1 :]
        yield word[:i] + other + word[i:]
        yield word[:i] + word[i : i + 2][::-1] + word[i + 2 :]


@pytest.mark.parametrize("where", ["in its section", "without a section", "in another section"])
def test_at_least_95_percent_of_single_edit_typos_get_the_right_name(where: str) -> None:
    rng = random.Random(0)
    tried = right = 0
    for name in recipe_names():
        section, _, leaf = name.rpartition(".")
        for typo in single_edits(leaf, rng):
            prefix = {"in its section": section, "without a section": "", "in another section": "guard"}[where]
            typed = f"{prefix}.{typo}" if prefix else typo
            if typed in recipe_names() or not typo or rng.random() < 0.94:
                continue
            near = nearest_names(typed)
            tried += 1
            # Several sections have `every_steps`: the section, where it is given, decides.
            right += near == [name] if where == "in its section" else name in near
    assert tried > 400
    assert right / tried >= 0.95, f"{right} of {tried}"


def every_single_edit(word: str) -> list[str]:
    """All words one insertion, deletion, replacement, or exchange of neighbours away, in letters and underscores."""
    letters = string.ascii_lowercase + "_"
    cuts = range(len(word))
    found = {word[:i] + letter + word[i:] for i in range(len(word) + 1) for letter in letters}
    found |= {word[:i] + letter + word[i + 1 :] for i in cuts for letter in letters}
    found |= {word[:i] + word[i + 1 :] for i in cuts} | {word[:i] + word[i : i + 2][::-1] + word[i + 2 :] for i in cuts}
    return sorted(found - {word, ""})


@pytest.mark.faults
def test_of_all_single_edits_of_all_names_95_percent_get_the_right_name() -> None:
    typos = [
        (name, f"{section}.{typo}" if section else typo)
        for name in recipe_names()
        for section, _, leaf in (name.rpartition("."),)
        for typo in every_single_edit(leaf)
    ]
    assert len(typos) > 100_000
    tried = [
        (name, typed) for name, typed in typos[::61] if typed not in recipe_names()
    ]  # all of them take half an hour
    right = sum(nearest_names(typed) == [name] for name, typed in tried)
    assert right / len(tried) >= 0.95, f"{right} of {len(tried)}"


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--optimizer.groups", "[{match: [a], lr_scale: -1}]"),
        ("--optimizer.groups", "[{lr_scale: 1}]"),
        ("--data.train", "[{source: a.txt, weight: -1}]"),
        ("--data.train", "[{source: a.txt, weight: true}]"),
        ("--data.train", "[{source: a.txt, weight: 1, wieght: 2}]"),
        ("--data.train", "[{source: a.txt, weight: {3: 1}}]"),
        ("--data.train", "[{source: a.txt, weight: 1}, {source: b/a.txt, weight: 1}]"),
    ],
)
def test_a_wrong_value_in_an_item_of_a_list_is_named(recipe_file: Path, flag: str, value: str) -> None:
    with raises_golden():
        load_recipe(recipe_file, arguments=[flag, value])


def test_what_is_written_loads_as_the_same_recipe(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        overrides={
            "options": {"a b": 'x: "y" # z', "lines": "1\n2\t3", "1e3": ["1e-4", "no", None, {"k": [1, 2.5]}], "e": ""},
            "evaluate": {"sample_prompt": "  ü\u2028 'q' \\ "},
            "schedule": {"num_epochs": 1e-9},
            "optimizer": {"groups": [{"match": ["*bias", "a: b"], "lr_scale": 0.5}, {"match": ["x"]}]},
            "data": {"train": ["- a", "[b]", "&c", "~"], "subset": "0x10"},
        },
    )
    out = tmp_path / "out.yaml"
    out.write_text(format_recipe(recipe), encoding="utf-8")
    again = load_recipe(out)
    assert again == recipe
    out.write_text(format_recipe(again), encoding="utf-8")
    assert load_recipe(out) == recipe
    mixed = [{"source": "- a", "weight": {0: 0.5, 8000: 1e-9}}, {"source": "[b]", "weight": 3, "max_epochs": 0.5}]
    recipe = load_recipe(recipe_file, overrides={"data": {"train": mixed}})
    out.write_text(format_recipe(recipe), encoding="utf-8")
    assert load_recipe(out) == recipe
    assert load_recipe(out).data.mixture[0].weights == {0: 0.5, 8000: 1e-9}


def test_recipes_are_equal_by_their_settings_whoever_set_them(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    by_flag = load_recipe(recipe_file, arguments=["--optimizer.learning_rate", "1e-4", "--seed", "0"])
    assert by_flag.origin("seed") != recipe.origin("seed")
    assert by_flag == recipe
    assert load_recipe(recipe_file, arguments=["--seed", "1"]) != recipe
    assert recipe != recipe.model_dump()
    with pytest.raises(TypeError):
        hash(recipe)


def test_a_written_recipe_says_who_set_each_value_and_what_auto_chose(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, arguments=["--seed", "3", "--schedule.num_epochs", "2"])
    choices: dict[str, Choice[Any]] = {
        "batch.per_device_batch_size": Choice(8, "32 / 4 processes"),
        "optimizer.learning_rate": Choice(2e-4, "linear: 0.0001 x 2"),
        "schedule.warmup_steps": Choice(10, "as written"),
        "batch": Choice(32, "32 = 8 x 1 x 4"),
    }
    lines = [line.strip() for line in format_recipe(recipe, choices).splitlines()]
    names = ("seed", "betas", "eps", "n_layer", "per_device_batch_size", "learning_rate", "warmup_steps", "batch")
    assert_golden(lines_of(lines, *names, "max_steps"))
    sections = {name.rpartition(".")[2] for name in recipe_names()}
    assert all("#" in line for line in lines if line.removesuffix(":") not in sections)


def test_a_recipe_built_in_python_says_so() -> None:
    recipe = Recipe.model_validate(
        {
            "output_dir": "o",
            "model": {"pretrained": "m"},
            "data": {"train": "t"},
            "schedule": {"max_steps": 1},
            "seed": 7,
        }
    )
    assert_golden(lines_of(format_recipe(recipe).splitlines(), "seed", "task", "output_dir"))


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "hub_token",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "api_key",
        "apiKey",
        "secret",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "db-password",
        "passwd",
        "PRIVATE_KEY",
        "auth",
        "my_key",
        "access_token",
        "credentials",
        "options.hub_token",
    ],
)
def test_a_secret_is_redacted_by_its_name(name: str) -> None:
    assert is_secret(name)
    assert redact({name: "s3cr3t", "n": {name: ["s3cr3t"]}}) == {name: "REDACTED", "n": {name: "REDACTED"}}


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "num_tokens",
        "pad_token_id",
        "sample_tokens",
        "eos_token",
        "pad_token",
        "max_new_tokens",
        "keyboard",
        "keep",
        "author",
        "monkey",
    ],
)
def test_a_name_that_only_looks_like_a_secret_is_kept(name: str) -> None:
    assert redact({name: "x"}) == {name: "x"}


def test_no_setting_of_the_schema_is_taken_for_a_secret() -> None:
    assert [name for name in recipe_names() if is_secret(name)] == []


@pytest.mark.parametrize(
    "text, clean",
    [
        ("see https://me:s3cr3t@host:80/x?y=1#z", "see https://REDACTED@host:80/x?y=1#z"),
        ("https://h/x?a=1&access_token=s3cr3t&b=2", "https://h/x?a=1&access_token=REDACTED&b=2"),
        ("hf_abcdefghijklmnopqrstuv", "REDACTED"),
        ("user@host.org", "user@host.org"),
        ("https://host/path@v1", "https://host/path@v1"),
    ],
)
def test_secrets_inside_a_text_are_redacted(text: str, clean: str) -> None:
    assert redact([text]) == [clean]


def test_no_planted_secret_reaches_the_written_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        arguments=[
            "--data.train",
            "https://me:s3cr3t@h/x.txt",
            "--options.hub_token",
            "s3cr3t",
            "--options.db.password",
            "s3cr3t",
        ],
    )
    text = format_recipe(recipe, {"batch": Choice(1, "from https://me:s3cr3t@h/")})
    assert "s3cr3t" not in text
    assert_golden(lines_of(text.splitlines(), "train", "hub_token", "password", "batch"))
    assert recipe.options["hub_token"] == "s3cr3t"


@pytest.mark.parametrize(
    "config",
    [
        "{model_type: [gpt2]}",
        "{model_type: gpt2, n_layr: 2}",
        "{model_type: gpt2, n_positions: 8}",
    ],
)
def test_a_model_config_that_transformers_would_take_in_silence_is_refused(recipe_file: Path, config: str) -> None:
    recipe_file.write_text(RECIPE.replace("{model_type: gpt2, n_layer: 2}", config))
    recipe = load_recipe(recipe_file)
    with raises_golden():
        check_model_config(recipe)


@pytest.mark.parametrize(
    "config, named",
    [
        ("{model_type: gpt22}", "model.config.model_type=gpt22 (r.yaml:3)|mean gpt2 "),
        ("{model_type: gpt2, n_layer: two}", "model.config (r.yaml:3)|'n_layer'|int, got str"),
    ],
)
def test_what_transformers_says_of_a_model_config_is_passed_on(recipe_file: Path, config: str, named: str) -> None:
    recipe_file.write_text(RECIPE.replace("{model_type: gpt2, n_layer: 2}", config))
    refused(check_model_config, load_recipe(recipe_file), named=named)


@pytest.mark.parametrize(
    "config",
    [
        "{model_type: gpt2, n_layer: 2, n_head: 2, hidden_size: 8, attn_pdrop: 0.0, tie_word_embeddings: false, "
        "vocab_size: 512}",
        "{model_type: llama, rope_theta: 5e5, max_position_embeddings: 8, num_key_value_heads: 4, dtype: float32}",
        "{model_type: bloom, n_head: 2}",
        "{model_type: mixtral, num_experts: 2}",
        "{model_type: bart, id2label: {0: bad, 1: good}}",
        "{model_type: gemma4_text, head_dim: 16}",
        "{model_type: cwm, num_hidden_layers: 2}",
        "{model_type: glm4_moe, num_hidden_layers: 2}",
    ],
)
def test_a_sound_model_config_passes(recipe_file: Path, config: str) -> None:
    recipe_file.write_text(RECIPE.replace("{model_type: gpt2, n_layer: 2}", config))
    check_model_config(load_recipe(recipe_file))


def numeric_settings() -> Iterator[tuple[str, str, str]]:
    """Yield each form of each numeric setting: its name, its kind, and a flag's value with `#` for the number."""

    def forms(schema: Any) -> Iterator[tuple[str, str]]:
        if "anyOf" in schema:
            for each in schema["anyOf"]:
                yield from forms(each)
        elif "prefixItems" in schema:
            yield from ((kind, f"[{form}, {form}]") for kind, form in forms(schema["prefixItems"][0]))
        elif "items" in schema:
            yield from ((kind, f"[{form}]") for kind, form in forms(schema["items"]))
        elif "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
            yield from ((kind, f"{{a: {form}}}") for kind, form in forms(schema["additionalProperties"]))
        elif schema.get("type") in ("integer", "number"):
            yield schema["type"], "#"

    for name, info in recipe_names().items():
        if isinstance(info, FieldInfo):
            for kind, form in forms(TypeAdapter(Annotated[info.annotation, info]).json_schema()):
                yield name, kind, form


@pytest.mark.parametrize(("name", "kind", "form"), [*numeric_settings()])
def test_a_number_that_no_run_can_use_is_refused_by_its_setting(
    name: str, kind: str, form: str, recipe_file: Path
) -> None:
    huge = ["100000000000000000000", "9223372036854775808", "-100000000000000000000", "1" * 5000, "1e400"]
    for number in (
        huge
        if kind == "integer"
        else ["1e400", ".inf", "-.inf", ".nan", *["1e300"] * name.endswith(("_seconds", "_epochs"))]
    ):
        if name == "seed" and number == "9223372036854775808":  # torch's seeds have 64 bits without a sign
            continue
        arguments = [f"--{name}={form.replace('#', number)}"]
        if tasks_with(name):
            arguments.append(f"--task={tasks_with(name)[0]}")
        if name == "schedule.num_epochs":
            arguments.append("--schedule.max_steps=null")
        assert "\n" not in str(refused(load_recipe, recipe_file, named=name, arguments=arguments))


def test_the_message_for_a_large_number_says_how_large_it_may_be(recipe_file: Path) -> None:
    assert "2,147,483,647" in error_of(recipe_file, None, "--schedule.max_steps=100000000000000000000")
    assert "2,147,483,647" not in error_of(recipe_file, None, "--seed=100000000000000000000")
