"""What `accelerate launch` says sets the recipe where the recipe leaves it open, and nowhere else."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.json_io import read_json
from accel_train.experiments.rehearse import rehearse_recipe
from accel_train.plan.format import format_plan
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.parallel import Parallel
from accel_train.recipe.schema import Recipe
from accel_train.recipe.values import value_of
from accel_train.runtime.launch_environment import launched_with, launcher_flags, with_launch_environment
from tests.support.processes import run_forked
from tests.support.runs import TESTS, environment, losses, ran, recipe_dict, refused, write_recipe_file
from tests.support.wording import assert_golden, raises_golden

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_OFFLOAD_PARAMS": "true",
}
HSDP = {
    **FSDP,
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "WORLD_SIZE": "32",
}


OFFLOADED = {"strategy": "fsdp2", "reshard_after_forward": False, "cpu_offload": True}
SIZES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "WORLD_SIZE": "8"}
TP = {
    **{**FSDP, "FSDP_OFFLOAD_PARAMS": "false", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    **{**SIZES, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4", "PARALLELISM_CONFIG_TP_SIZE": "2"},
}
SP = {**SIZES, "PARALLELISM_CONFIG_SP_SIZE": "2"}
COPIES = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def recipe_with(**parallel: Any) -> Recipe:
    return Recipe.model_validate(recipe_dict(Path("somewhere"), **({"parallel": parallel} if parallel else {})))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process whose variables were read by nobody yet."""
    launched_with.cache_clear()
    yield monkeypatch
    launched_with.cache_clear()


def test_without_a_word_of_the_launcher_the_recipe_is_as_it_was() -> None:
    recipe = recipe_with()
    assert with_launch_environment(recipe, {}) is recipe
    assert with_launch_environment(recipe, {"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}) is recipe


@pytest.mark.parametrize(
    ("variables", "parallel", "setting", "variable"),
    [
        (HSDP, {**OFFLOADED, "dp_shard_size": 8}, "dp_shard_size", "PARALLELISM_CONFIG_DP_SHARD_SIZE"),
        (FSDP, {**OFFLOADED, "dp_shard_size": "auto"}, "cpu_offload", "FSDP_OFFLOAD_PARAMS"),
        (ZERO, {"strategy": "deepspeed", "zero_stage": 3}, "zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        (TP, {"strategy": "fsdp2", "dp_shard_size": 4, "tp_size": 2}, "tp_size", "PARALLELISM_CONFIG_TP_SIZE"),
        (SP, {"sp_size": 2}, "sp_size", "PARALLELISM_CONFIG_SP_SIZE"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **SP, **COPIES},
            {"strategy": "fsdp2", "dp_shard_size": 4, "sp_size": 2},
            "strategy",
            "ACCELERATE_USE_FSDP",
        ),
    ],
    ids=["HSDP", "FSDP", "ZeRO", "layers", "sequences", "sequences and shards"],
)
def test_launcher_sets_what_the_recipe_leaves_at_its_default_and_is_named_for_it(
    variables: dict[str, str], parallel: dict[str, Any], setting: str, variable: str
) -> None:
    recipe = with_launch_environment(recipe_with(), variables)
    assert recipe.parallel == Parallel(**parallel)
    origin = recipe.origin(f"parallel.{setting}")
    assert (origin.kind, str(origin)) == ("environment", f"{variable} of the launch")
    assert recipe.origin("optimizer.learning_rate").kind == "default"  # as of a recipe that was built in Python
    assert with_launch_environment(recipe, variables).parallel == recipe.parallel


def test_who_set_the_rest_of_the_recipe_is_kept(tmp_path: Path) -> None:
    path = write_recipe_file(tmp_path)
    recipe = with_launch_environment(load_recipe(path, arguments=["--seed", "3"]), FSDP)
    assert str(recipe.origin("seed")) == "--seed"
    assert recipe.origin("optimizer.learning_rate").where.startswith(f"{path}:")


def test_recipe_that_says_the_same_keeps_its_word() -> None:
    said = recipe_with(strategy="fsdp2", cpu_offload=True, reshard_after_forward=False)
    assert with_launch_environment(said, FSDP).parallel == said.parallel


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"FSDP_VERSION": "1"}, "FSDP_VERSION=1|fsdp_version: 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "for the recipe to say|precision.gradient_checkpointing"),
        (
            {**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
            "CONFIG_FILE=ds.json: how to train|write zero_stage",
        ),
        ({"ACCELERATE_GRADIENT_CLIPPING": "much"}, "CLIPPING=much|must be a number"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0"}, "ACCUMULATION_STEPS=0|at least 1"),
        ({"ACCELERATE_MIXED_PRECISION": "bf17"}, "ACCELERATE_MIXED_PRECISION of the launch|bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}, "FP8_BACKEND=TE|torchao"),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"},
            "USE_FULLGRAPH=True|dynamo_use_fullgraph",
        ),
        ({"ACCELERATE_DYNAMO_BACKEND": "NONE"}, "ACCELERATE_DYNAMO_BACKEND of the launch|unknown backend"),
        ({"FSDP_IGNORED_MODULES": "head"}, "IGNORED_MODULES=head|fsdp_ignored_modules"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "OFFLOAD_PARAM_DEVICE=cpu|launch/fsdp2.yaml"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}, "ZERO3_INIT=true|launch/fsdp2.yaml"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "ZERO_STAGE=0|launch/ddp.yaml"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not supported|launch/fsdp2.yaml"),
        (
            {"PARALLELISM_CONFIG_TP_SIZE": "2"},
            "8 x PARALLELISM_CONFIG_TP_SIZE=2 is not the number of processes, 32|multiply",
        ),
        (
            {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_FSDP": "false"},
            "TP_SIZE=2: tensor parallelism goes with FSDP2|launch/tp.yaml",
        ),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, "CP_SIZE=2: context parallelism|parallel.sp_size"),
        (
            {"PARALLELISM_CONFIG_SP_SIZE": "2"},
            "8 x PARALLELISM_CONFIG_SP_SIZE=2 is not the number of processes, 32|multiply",
        ),
        (
            {"PARALLELISM_CONFIG_SP_SIZE": "2", **ZERO},
            "SP_SIZE=2: sequences are split under FSDP2 and DDP|launch/sp.yaml",
        ),
        (
            {"PARALLELISM_CONFIG_SP_SIZE": "2", "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "flash_attention_2"},
            "SP_ATTN_IMPLEMENTATION=flash_attention_2|leave it out",
        ),
        ({"WORLD_SIZE": "16"}, "4 x PARALLELISM_CONFIG_DP_SHARD_SIZE=8 is not the number of processes, 16|multiply"),
        ({"FSDP_OFFLOAD_PARAMS": "cpu"}, "FSDP_OFFLOAD_PARAMS=cpu|true or false"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "-1"}, "PARALLELISM_CONFIG_DP_SHARD_SIZE=-1|whole number"),
    ],
)
def test_launch_that_cannot_be_honoured_is_refused_by_name(changed: dict[str, str], named: str) -> None:
    refused(with_launch_environment, recipe_with(), {**HSDP, **changed}, named=named)


BF16, STEPS = {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DYNAMO_MODE": "default"}
ALWAYS = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
}
"""What `accelerate launch` exports without a flag."""


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        (ALWAYS, {}),
        (BF16, {"precision.mixed_precision": "bf16"}),
        ({**ALWAYS, "--mixed_precision": "no"}, {"precision.mixed_precision": "no"}),
        (STEPS, {"batch.gradient_accumulation_steps": 4}),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {"optimizer.max_grad_norm": 0.5}),
        ({"ACCELERATE_GRADIENT_CLIPPING": "auto"}, {}),
        (COMPILED, {"precision.compile": "model", "precision.compile_backend": "eager"}),
        (
            {**COMPILED, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True"},
            {"precision.compile": "blocks", "precision.compile_backend": "eager"},
        ),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "max-autotune"},
            {"precision.compile": "model", "precision.compile_mode": "max-autotune"},
        ),
        ({**ZERO, **STEPS}, {"parallel.strategy": "deepspeed", "batch.gradient_accumulation_steps": 4}),
    ],
)
def test_launcher_sets_how_to_train_where_the_recipe_leaves_it_open(
    variables: dict[str, str], settings: dict[str, Any], tmp_path: Path
) -> None:
    open_recipe = load_recipe(write_recipe_file(tmp_path, batch={"global_batch_size": 8}))
    launched = with_launch_environment(open_recipe, variables)
    assert {name: value_of(launched, name) for name in settings} == settings
    set_by_launch = {name for name, origin in launched.origins().items() if origin.kind == "environment"}
    assert set_by_launch - {"precision.compile_backend", "parallel.zero_stage"} == {*settings} - {
        "precision.compile_backend"
    }


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        ("--parallel.strategy ddp", FSDP, "parallel.strategy=ddp (--parallel.strategy)|ACCELERATE_USE_FSDP=fsdp2"),
        ("--parallel.strategy=fsdp2", ZERO, "parallel.strategy=fsdp2 (|ACCELERATE_USE_DEEPSPEED"),
        ("--parallel.strategy=fsdp2 --parallel.tp_size=4", TP, "parallel.tp_size=4|PARALLELISM_CONFIG_TP_SIZE=2"),
        (
            "--parallel.strategy=fsdp2 --parallel.dp_shard_size=4",
            HSDP,
            "parallel.dp_shard_size=4 (--parallel.dp_shard_size)|PARALLELISM_CONFIG_DP_SHARD_SIZE=8",
        ),
        (
            "--parallel.strategy=fsdp2 --parallel.cpu_offload=false",
            FSDP,
            "parallel.cpu_offload=false (--parallel.cpu_offload)|FSDP_OFFLOAD_PARAMS=true",
        ),
        (
            "--precision.mixed_precision=no",
            BF16,
            "precision.mixed_precision=no (--precision.mixed_precision)|ACCELERATE_MIXED_PRECISION",
        ),
        ("--batch.gradient_accumulation_steps=2", STEPS, "batch.gradient_accumulation_steps=2|ACCUMULATION_STEPS=4"),
        (
            "--optimizer.max_grad_norm=2",
            {"ACCELERATE_GRADIENT_CLIPPING": "1.0"},
            "optimizer.max_grad_norm=2|ACCELERATE_GRADIENT_CLIPPING",
        ),
        ("--precision.compile=false", COMPILED, "precision.compile=false|ACCELERATE_DYNAMO_BACKEND"),
        (
            "--precision.mixed_precision=bf16",
            {"--mixed_precision": "no", **ALWAYS},
            "mixed_precision=bf16|ACCELERATE_MIXED_PRECISION",
        ),
    ],
)
def test_recipe_and_launcher_that_disagree_are_both_named(
    arguments: str, variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    recipe = load_recipe(write_recipe_file(tmp_path), arguments=arguments.split())
    said = str(refused(with_launch_environment, recipe, variables, named="the launch says"))
    assert "\n" not in said
    assert [part for part in named.split("|") if part.lower() not in said.lower()] == [], said


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--precision.mixed_precision=bf16"], BF16),
        (["--precision.mixed_precision=auto"], BF16),
        (["--precision.compile=true", "--precision.compile_backend=eager"], COMPILED),
    ],
)
def test_recipe_and_launcher_that_agree_train(arguments: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    launched = with_launch_environment(load_recipe(write_recipe_file(tmp_path), arguments=arguments), variables)
    assert launched.precision.mixed_precision == ("bf16" if variables == BF16 else "auto")
    assert launched.precision.compiles == (variables == COMPILED)


def test_flags_that_accelerate_does_not_export_are_read_from_its_command(tmp_path: Path) -> None:
    program = ["train.py", "--gradient_accumulation_steps", "8"]
    assert launcher_flags(["accelerate", "launch", "--cpu", "--gradient_accumulation_steps", "4", *program]) == STEPS
    assert launcher_flags(["accelerate", "launch", "--cpu", *program]) == {}
    assert launcher_flags(["accelerate-launch", "--cpu", "--mixed-precision=no", "train.py"]) == {
        "--mixed_precision": "no"
    }
    assert launcher_flags(["torchrun", "--gradient_accumulation_steps", "4", "train.py"]) == {}
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_processes: 1\n"
        "deepspeed_config: {gradient_clipping: 0.5}\n"
    )
    assert launcher_flags(["accelerate.commands.launch", "--config_file", str(file), *program]) == {
        "ACCELERATE_GRADIENT_CLIPPING": "0.5"
    }


PROBE = """
import json, subprocess, sys
from accel_train.runtime.launch_environment import child_environment, launched_with, left_by_parent, settings_of_launch
print(json.dumps([{each[1]: each[2] for each in settings_of_launch(launched_with())}, left_by_parent()]), flush=True)
if sys.argv[1:] == ["nested"]:
    subprocess.run([sys.executable, __file__], check=True)
if sys.argv[1:] == ["run"]:
    subprocess.run([sys.executable, __file__, "nested"], check=True, env=child_environment())
"""


@pytest.fixture
def heard(tmp_path: Path) -> Callable[..., list[Any]]:
    """Start a command that ends with the probe; returns what the probe, and one nested in it, make of their launch."""
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)

    def start(*command: str, **variables: str) -> list[Any]:
        words = [each.replace("PROBE", str(probe)) for each in command]
        done = ran(words, check=True, variables=variables)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return start


OF_BF16, OF_STEPS = {"precision.mixed_precision": "bf16"}, {"batch.gradient_accumulation_steps": 4}


def test_variables_that_a_python_program_left_change_nothing_and_those_of_a_shell_count(heard: Any) -> None:
    assert heard(sys.executable, "PROBE", **BF16) == [[{}, BF16]]
    # A rehearsal or a sweep passes on its launch to its runs, but not to what they start.
    assert heard("sh", "-c", f"{sys.executable} PROBE run; true", **BF16) == [[OF_BF16, {}], [OF_BF16, {}], [{}, BF16]]


@pytest.mark.slow
def test_only_the_launcher_of_a_process_is_heard_and_not_that_of_its_parent(heard: Any) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    flags = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "4"]
    assert heard(*launch, *flags, "PROBE", "nested") == [[{**OF_BF16, **OF_STEPS}, {}], [{}, BF16]]
    assert heard(*launch, "PROBE", "nested") == [[{}, {}], [{}, {}]]
    elastic = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    assert heard(*elastic, "PROBE", "nested", **BF16) == [[OF_BF16, {}], [{}, BF16]]


@pytest.mark.slow
def test_run_fit_and_trainer_obey_the_precision_of_accelerate_launch(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, schedule={"max_steps": 2})
    program = TESTS / "support" / "programs" / "launched.py"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    flags = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "2"]
    for command in (["-m", "accel_train", "run", str(recipe)], [str(program), str(corpus)]):
        subprocess.run([*launch, *flags, *command], env=environment(), check=True, timeout=240)
    choices = read_json(corpus / "run" / "summary.json")["choices"]
    assert choices["precision.mixed_precision"].startswith("bf16")
    assert read_json(corpus / "found.json") == {
        "fit": ["torch.bfloat16"],
        "accel_train.hf.trainer": ["torch.bfloat16"],
        "transformers.trainer": ["torch.bfloat16"],
    }
    resolved = load_recipe(corpus / "run" / "recipe.resolved.yaml")
    assert resolved.batch.gradient_accumulation_steps == 2


def test_plan_shows_that_the_launcher_set_it(corpus: Path, launched: pytest.MonkeyPatch) -> None:
    for name, value in FSDP.items():
        launched.setenv(name, value)
    plan = resolve_plan(Recipe.model_validate(recipe_dict(corpus)), 2, gpu="H100")
    lines = [line for line in format_plan(plan).splitlines() if line.split()[:1] == ["strategy"]]
    assert [line.split() for line in lines] == [
        ["strategy", "fsdp2", "<-", "ACCELERATE_USE_FSDP", "of", "the", "launch"]
    ]


def test_rehearsal_refuses_what_the_run_would_before_it_starts_one(corpus: Path, launched: pytest.MonkeyPatch) -> None:
    launched.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    for name in ("WORLD_SIZE", "RANK"):
        launched.delenv(name, raising=False)
    with raises_golden():
        rehearse_recipe(str(write_recipe_file(corpus)), (), say=print)


@pytest.mark.slow
def test_run_of_two_processes_is_sharded_because_the_launcher_said_so(corpus: Path) -> None:
    variables = {**FSDP, "FSDP_OFFLOAD_PARAMS": "false"}
    recipe = write_recipe_file(corpus, schedule={"max_steps": 3})
    forked = run_forked(["run", str(recipe)], 2, folder=corpus / "processes", **variables)
    forked.expect(0)
    written = (corpus / "run" / "recipe.resolved.yaml").read_text()
    assert list(losses(corpus / "run")) == [1, 2, 3]
    names = ("parallel:", "strategy:", "reshard_after_forward:")
    assert_golden("\n".join(line.strip() for line in written.splitlines() if line.strip().startswith(names)))


def test_run_that_the_launcher_contradicts_ends_with_exit_code_2_and_one_line(corpus: Path) -> None:
    recipe = write_recipe_file(corpus)
    arguments = ["run", str(recipe), "--parallel.strategy", "ddp"]
    forked = run_forked(arguments, 1, folder=corpus / "processes", **FSDP)
    assert forked.wait() == [2]
    (line,) = [line for line in forked.stderr(0).splitlines() if line.startswith("error: ")]
    assert_golden(line)
    assert not (corpus / "run").exists()
