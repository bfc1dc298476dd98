"""The loop against a loop written by hand, and what it may not cost: no host read, no copy, no graph break."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train import Recipe, train
from accel_train.engine.evaluation import EvaluationReader, evaluate
from accel_train.engine.run import RunContext
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from tests.support.marks import slow
from tests.support.runs import TINY_MODEL, Settings, losses, metrics, tiny_recipe


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    return tiny_recipe(folder, task="causal-lm", **sections)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def losses_by_hand(run: RunContext, steps: int, accumulation: int) -> list[float]:
    """200 lines of experience in 20: the same data and first weights, plain PyTorch, no part of the loop."""
    torch.manual_seed(run.plan.recipe.seed)
    model = transformers.GPT2LMHeadModel(run.strategy.inner.model.config)
    model.set_attn_implementation("sdpa")
    decay = [p for name, p in model.named_parameters() if p.ndim > 1]
    rest = [p for name, p in model.named_parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    trace = []
    for step in range(steps):
        indices = run.plan.order.step_samples(step).tolist()
        windows = torch.as_tensor(run.plan.data.train.__getitems__(indices))
        lr = 3e-3 * (step / 20 if step < 20 else 0.5 * (1 + math.cos(math.pi * (step - 20) / (steps - 20))))
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, labels = windows[:, :-1].clamp(min=0), windows[:, 1:].clone()
        count = int((labels >= 0).sum())
        labels[labels < 0] = -100
        total = 0.0
        for x, y in zip(inputs.chunk(accumulation), labels.chunk(accumulation), strict=True):
            logits = model(x, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        trace.append(total)
    return trace


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_a_loop_written_by_hand_over_200_steps(corpus: Path, accumulation: int) -> None:
    recipe = recipe_of(
        corpus,
        batch={"global_batch_size": 8, "gradient_accumulation_steps": accumulation},
        schedule={"max_steps": 200, "warmup_steps": 20},
    )
    run = prepare_run(recipe)
    expected = losses_by_hand(run, 200, accumulation)
    with run.resources:
        run_steps(run)
    got = losses(corpus / "run")
    assert len(got) == 200
    assert expected[0] - expected[-1] > 1, "nothing was learnt, so nothing is compared"
    for step, loss in got.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-5), f"step {step}"


class CountHostReads(TorchDispatchMode):
    """Counts what waits for a device: .item(), float(), bool(), nonzero."""

    def __init__(self) -> None:
        super().__init__()
        self.where: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            frame = sys._getframe()
            while "site-packages/torch" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
                frame = frame.f_back  # type: ignore[assignment]
            self.where[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1
        return function(*args, **(kwargs or {}))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("model", [TINY_MODEL, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("mask_documents", [False, True], ids=["", "documents masked"])
def test_steady_step_reads_no_tensor_on_the_host(
    corpus: Path, model: Settings, accumulation: int, mask_documents: bool
) -> None:
    recipe = recipe_of(
        corpus,
        model={"config": model},
        data={"mask_documents": mask_documents},
        batch={"global_batch_size": 4, "gradient_accumulation_steps": accumulation},
        checkpoint={"every_steps": 8},
        schedule={"max_steps": 16},
    )
    run = prepare_run(recipe)
    reads: list[int] = []
    counter = CountHostReads()
    on_step = run.observer.on_step

    def count(result: Any, learning_rate: float) -> None:
        reads.append(sum(counter.where.values()))
        on_step(result, learning_rate)

    run.observer.on_step = count  # type: ignore[method-assign]
    with run.resources, counter:
        run_steps(run)
    steady = reads[6] - reads[1], reads[14] - reads[9]
    assert steady == (0, 0), counter.where


def test_evaluation_loss_does_not_depend_on_the_batch_size_and_leaves_the_modes_alone(corpus: Path) -> None:
    run = prepare_run(recipe_of(corpus, data={"eval_fraction": 0.3}))
    run.strategy.inner.train()
    run.strategy.inner.model.transformer.h[0].eval()
    with run.resources:
        results = [
            evaluate(EvaluationReader(run.accelerator, run.plan.data, size), run.strategy.inner)
            for size in (1, 2, 7, 32)
        ]
    assert run.strategy.inner.training
    assert not run.strategy.inner.model.transformer.h[0].training
    assert run.strategy.inner.model.transformer.h[1].training
    assert {result.num_targets for result in results} == {run.plan.data.facts.eval_tokens - 1}
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)


def test_evaluation_and_logging_in_between_change_no_weight(corpus: Path) -> None:
    model = {"config": {**TINY_MODEL, "resid_pdrop": 0.2}}
    weights = []
    for name, extra in {"bare": {}, "busy": {"evaluate": {"every_steps": 3}, "checkpoint": {"every_steps": 2}}}.items():
        recipe = recipe_of(corpus, model=model, output_dir=str(corpus / name), **extra)
        run = prepare_run(recipe)
        with run.resources:
            run_steps(run)
        weights.append([parameter.detach().clone() for parameter in run.strategy.inner.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*weights, strict=True))


def test_rates_around_an_evaluation_are_those_of_steps_and_not_of_when_the_host_heard_of_them(corpus: Path) -> None:
    sections: Settings = {"evaluate": {"every_steps": 2}, "schedule": {"max_steps": 6}, "log": {"every_steps": 1}}
    train(tiny_recipe(corpus, **sections, options={"seconds_a_forward": 0.1}))
    lines = metrics(corpus / "run", "train")
    assert len(lines) == 6
    assert [line for line in lines if line["targets_per_second"] * 0.1 > line["num_targets"]] == []


def test_readers_in_other_processes_bring_the_same_samples(corpus: Path) -> None:
    for name, workers in (("none", 0), ("two", 2)):
        recipe = recipe_of(corpus, output_dir=str(corpus / name), data={"num_workers": workers})
        run = prepare_run(recipe)
        with run.resources:
            run_steps(run)
    assert losses(corpus / "none") == losses(corpus / "two")


# torch's compiler looks at the gradient of a block's input, and torch warns of it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "precision",
    [
        {"mixed_precision": "bf16"},
        {"gradient_checkpointing": True},
        {"compile": "blocks"},
        {"compile": "model"},
        slow({"compile": "blocks", "gradient_checkpointing": "selective"}),
        slow({"compile": "model", "gradient_checkpointing": {"memory_budget": 0.5}}),
    ],
    ids=["bf16", "gradient checkpointing", "compiled blocks", "compiled model", "compiled selective", "memory budget"],
)
def test_precision_settings_train_to_nearly_the_same_losses(corpus: Path, precision: Settings) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for name, section in (("plain", {}), ("other", precision)):
        recipe = recipe_of(corpus, output_dir=str(corpus / name), precision=section, schedule={"max_steps": 6})
        run = prepare_run(recipe)
        with run.resources:
            run_steps(run)
    tolerance = 2e-2 if "mixed_precision" in precision else 1e-5
    plain, other = losses(corpus / "plain"), losses(corpus / "other")
    assert other == pytest.approx(plain, rel=tolerance)
    if "mixed_precision" in precision:
        assert other != plain, "the setting had no effect"
    if "compile" in precision:
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1, "one graph, for all blocks or for the model"
        assert not counters["graph_break"]


def test_trained_run_leaves_everything_a_person_wants(corpus: Path) -> None:
    recipe = recipe_of(corpus, evaluate={"every_steps": 6, "sample_prompt": "step", "sample_tokens": 8})
    result = train(recipe)
    folder = corpus / "run"
    for name in (
        "recipe.resolved.yaml",
        "metrics.jsonl",
        "events.jsonl",
        "summary.json",
        "report.html",
        "model/model.safetensors",
    ):
        assert (folder / name).is_file(), name
    assert result.summary["steps"] == 12
    assert result.summary["sample"]["text"].startswith("step")
    last = metrics(folder, "eval")[-1]
    assert last["loss"] == pytest.approx(result.summary["eval"]["loss"])
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    facts = result.summary["data"]
    bits = last["loss"] * last["num_targets"] / math.log(2) / facts["eval_bytes"]
    assert last["bits_per_byte"] == pytest.approx(bits, rel=0.02)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.vocab_size % 64 == 0
    assert tokenizer.decode(tokenizer("loss")["input_ids"]) == "loss"
    again = Recipe.from_yaml(str(folder / "recipe.resolved.yaml"))
    assert again == recipe
