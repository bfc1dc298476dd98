"""Plant 20 known bugs of training code, one at a time, and run the tests that must catch them.

    python -m benchmarks.planted [NUMBER ...]

Each bug was reported publicly, for another project. It is planted in a copy of the package, and the named tests run
against the copy. A bug counts as caught if they fail. The exit code is 1 if a bug is not caught.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KEPT = ("tests", "recipes", "benchmarks", "docs", "launch", "pyproject.toml", "README.md")
"""Files next to the package, linked into the copy."""


class Bug(NamedTuple):
    """A bug, where it was reported, how it is planted, and the tests that catch it."""

    name: str
    thread: str
    """Public report, as owner/repository#number."""
    file: str
    """File of the package."""
    right: str
    """Text of the file that is replaced. It occurs once."""
    wrong: str
    test: str
    """Test file, and `-k` expression after a space."""


BUGS = (
    Bug(
        "recurrent state leaks between packed documents",
        "PrimeIntellect-ai/prime-rl#3000",
        "tasks/causal_lm/probe.py",
        "return self.differences.get(check, np.inf) <= self.rounding",
        "return check in self.differences",
        "tests/system/test_models.py test_field_01_a_layer_that_reaches_into_the_next_document",
    ),
    Bug(
        "tensor parallelism adds a bias once per process",
        "huggingface/text-generation-inference#1036",
        "parallel/tensor_parallel.py",
        "    tie(model, tied)\n    whole",
        "    tie(model, tied)\n"
        "    for name, module in model.named_modules():\n"
        '        if styles.get(name) == "rowwise" and module.bias is not None:\n'
        "            module.register_forward_hook(lambda own, _, output: output + own.bias.detach().full_tensor())\n"
        "    whole",
        "tests/parallel/test_tensor_parallel.py test_every_kind_of_plan",
    ),
    Bug(
        "gradients of experts are doubled on two processes",
        "pytorch/pytorch#160285",
        "parallel/ddp.py",
        "        self.take(inner, make_optimizer)\n        self.module, prepared",
        "        self.take(inner, make_optimizer)\n"
        "        for each in inner.parameters():\n"
        "            if each.dim() == 3 and self.accelerator.num_processes > 1:\n"
        "                each.register_hook(lambda gradient: 2 * gradient)\n"
        "        self.module, prepared",
        "tests/system/test_models.py test_field_02_the_router_loss_is_the_same_on_any_number",
    ),
    Bug(
        "routers get no gradient from their loss",
        "huggingface/transformers#48687",
        "model/kernels/experts.py",
        "of_layer = logits.flatten(0, -2).float().softmax(-1)",
        "of_layer = logits.flatten(0, -2).float().softmax(-1).detach()",
        "tests/model/kernels/test_experts.py gradients",
    ),
    Bug(
        "the auxiliary loss is not normalized by layers",
        "huggingface/transformers#31464",
        "model/kernels/experts.py",
        "counts.sum() * num_layers",
        "counts.sum()",
        "tests/model/kernels/test_experts.py gradients",
    ),
    Bug(
        "the loss is divided by the tokens of one process",
        "huggingface/transformers#34373",
        "engine/step.py",
        "torch.where(self._sums[0] > 0, self._sums[0], math.nan)",
        "(self._sums[0] * 0 + self.world_size * self._here.num_targets)",
        "tests/system/test_invariants.py test_world_size_and_accumulation",
    ),
    Bug(
        "the last micro-batch of a step has another weight",
        "huggingface/transformers#38837",
        "engine/step.py",
        "                loss_sum.backward(weight)\n",
        "                loss_sum.backward(weight / 2 if index == last > 0 else weight)\n",
        "tests/engine/test_step.py test_gradient_is_that_of_the_mean",
    ),
    Bug(
        "gradients are unscaled twice",
        "huggingface/accelerate#113",
        "optim/update.py",
        "        scaler.unscale_(optimizer)\n",
        "        scaler.unscale_(optimizer)\n"
        "        torch._foreach_div_([each.grad for each in parameters if each.grad is not None], scale)\n",
        "tests/engine/test_step.py test_loss_scale_does_not_change_the_update",
    ),
    Bug(
        "each process clips by the norm of its shards",
        "pytorch/pytorch#170862",
        "optim/update.py",
        "    dist.all_reduce(squares, group=group)\n",
        "",
        "tests/parallel/test_fsdp2.py test_losses_are_those_of_one_process_with_clipping",
    ),
    Bug(
        "the sample order depends on the number of processes",
        "NVlabs/LongLive#71",
        "data/order.py",
        "        share = samples[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size].tolist()",
        "        samples = samples if world_size == 1 else self.step_samples(step + 1)\n"
        "        share = samples[rank * len(samples) // world_size : (rank + 1) * len(samples) // world_size].tolist()",
        "tests/system/test_properties.py test_epochs_hold_each_sample_once_and_processes_share_each_step",
    ),
    Bug(
        "the sliding window of attention is dropped",
        "unslothai/unsloth#8253",
        "model/kernels/attention.py",
        "if window is not None and window < sequence_length:",
        "if window is not None and window < 0:",
        "tests/tasks/test_causal_lm.py sliding_window",
    ),
    Bug(
        "all processes draw the same random numbers",
        "huggingface/accelerate#236",
        "engine/step.py",
        " + rank * 0x94D049BB133111EB",
        "",
        "tests/engine/test_step.py test_random_numbers_of_a_step",
    ),
    Bug(
        "the moving average counts each step twice",
        "SWivid/F5-TTS#631",
        "training/loop.py",
        "run.strategy.average.update(step, update.skipped)",
        "run.strategy.average.update(2 * step, update.skipped)",
        "tests/training/test_choices.py test_averaged_weights",
    ),
    Bug(
        "labels are shifted twice",
        "huggingface/transformers#47394",
        "data/text/tokens.py",
        "inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()",
        "inputs, labels = tokens[:, :-1].copy(), np.roll(tokens[:, 1:], -1, axis=1)",
        "tests/training/test_loop.py test_losses_are_those_of_a_loop_written_by_hand",
    ),
    Bug(
        "weight decay shrinks norms and biases",
        "huggingface/transformers#35927",
        "optim/optimizers.py",
        "if any(kinds[kind] for kind in section.no_decay):",
        "if False:",
        "tests/model/test_changes.py test_without_groups_and_decay",
    ),
    Bug(
        "the schedule steps once per process",
        "huggingface/accelerate#2926",
        "engine/run.py",
        "rate = self.schedule(step)",
        "rate = self.schedule(step * self.accelerator.num_processes)",
        "tests/system/test_invariants.py test_world_size_and_accumulation",
    ),
    Bug(
        "a 16-bit copy of a weight is not refreshed",
        "NVIDIA/Megatron-LM#6336",
        "model/kernels/chunked_loss.py",
        "yield weight.to(dtype), None if bias is None else bias.to(dtype)",
        'yield vars(weight).setdefault("copy", weight.to(dtype).clone()), None if bias is None else bias.to(dtype)',
        "tests/parallel/test_chunked_loss.py test_in_bf16",
    ),
    Bug(
        "a resume repeats a batch",
        "huggingface/accelerate#2016",
        "engine/loader.py",
        "                step, run.strategy.dims.rank,",
        "                step - (step == first_step > 0), run.strategy.dims.rank,",
        "tests/training/test_fit.py test_fit_again_resumes",
    ),
    Bug(
        "padding counts in the loss",
        "EleutherAI/gpt-neo#45",
        "data/text/tokens.py",
        "labels[labels == PADDING] = IGNORED_LABEL",
        "labels[labels == PADDING] = separator_id",
        "tests/data/text/test_windows.py test_every_token_but_the_first",
    ),
    Bug(
        "tied weights come apart",
        "facebookresearch/lingua#75",
        "parallel/fsdp2.py",
        '    split = ""\n    if parallel_dims',
        "    for _, *others in tied:\n"
        "        for name in others:\n"
        '            path, _, leaf = name.rpartition(".")\n'
        "            apart = torch.nn.Parameter(inner.get_parameter(name).detach().clone())\n"
        "            setattr(inner.get_submodule(path), leaf, apart)\n"
        '    tied = []\n    split = ""\n    if parallel_dims',
        "tests/parallel/test_fsdp2.py test_losses_are_those_of_one_process_with_clipping",
    ),
)


def plant(bug: Bug, folder: Path) -> None:
    """Write a copy of the package with a bug into an empty folder, next to links to the tests and recipes.

    Raises:
        ValueError: the text to replace does not occur once.
    """
    text = (ROOT / "accel_train" / bug.file).read_text()
    if text.count(bug.right) != 1:
        raise ValueError(f"accel_train/{bug.file} has {text.count(bug.right)} places for: {bug.name}")
    for name in KEPT:
        (folder / name).symlink_to(ROOT / name)
    copytree(ROOT / "accel_train", folder / "accel_train")
    (folder / "accel_train" / bug.file).write_text(text.replace(bug.right, bug.wrong))


def run_tests(bug: Bug, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of a bug in a folder that `plant` wrote, with the package of that folder."""
    file, _, names = bug.test.partition(" ")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-k", names]
    command = [sys.executable, "-m", "pytest", file, *options]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def is_caught(bug: Bug) -> tuple[bool, str]:
    """Return whether the tests of a bug fail with it, and the first line of the failure."""
    with TemporaryDirectory() as folder:
        plant(bug, Path(folder))
        done = run_tests(bug, Path(folder))
    errors = [line for line in done.stdout.splitlines() if line.startswith("E ")]
    # pytest's exit code 1: tests ran, and some failed. Other codes: no test was found, or none could be imported.
    return done.returncode == 1, (errors or done.stdout.splitlines()[-1:] or [done.stderr[-300:]])[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="bugs to plant, from 1; default: all")
    chosen = parser.parse_args(arguments).numbers or range(1, len(BUGS) + 1)
    missed = 0
    for number in chosen:
        bug = BUGS[number - 1]
        caught, line = is_caught(bug)
        missed += not caught
        print(f"{number:2} {'caught' if caught else 'NOT CAUGHT'}: {bug.name} ({bug.thread})\n   {line}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
