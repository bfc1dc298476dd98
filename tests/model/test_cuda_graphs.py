"""Replays of CUDA graphs, imitated on a CPU: what a run keeps is never what a later replay overwrites."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from accel_train import train
from accel_train.recipe.schema import Precision
from tests.support.runs import losses, tiny_recipe, write_jsonl

SETTINGS: dict[str, Any] = {
    "loss": {"chunked": False},
    "evaluate": {"every_steps": 2},
    "schedule": {"max_steps": 6},
    "batch": {"per_device_eval_batch_size": 4},
}


class Replays:
    """A backend of torch.compile. The first replay after a mark overwrites the results of all replays before it."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.counts = [0]
        """Number of replays since each mark."""

    def mark(self) -> None:
        self.counts.append(0)

    def compile(self, graph: Any, _: Any) -> Any:
        def replay(*inputs: Any) -> Any:
            if not self.counts[-1]:
                for result in self.results:
                    with torch.autograd._unsafe_preserve_version_counter(result), torch.no_grad():
                        result.fill_(float("nan") if result.is_floating_point() else -(2**30))
                self.results.clear()
            self.counts[-1] += 1
            results = graph(*inputs)
            given = {each.untyped_storage().data_ptr() for each in inputs if isinstance(each, Tensor)}
            made = [each for each in results if isinstance(each, Tensor)]
            self.results += [each.detach() for each in made if each.untyped_storage().data_ptr() not in given]
            return results

        return make_boxed_func(replay)


def windows(_: Path) -> dict[str, Any]:
    return {"task": "causal-lm"}


def answers(folder: Path) -> dict[str, Any]:
    rows = [{"prompt": f"{number}?", "completion": "a" * (number % 7 + 1)} for number in range(60)]
    train = write_jsonl(folder / "answers.jsonl", rows)
    return {
        "task": "causal-lm",
        "data": {"train": str(train), "format": "prompt_completion", "sequence_length": 16, "eval_fraction": 0.5},
    }


def labels(folder: Path) -> dict[str, Any]:
    rows = [{"text": f"{number} {'ab'[number % 2] * 8}", "label": number % 2} for number in range(60)]
    train = write_jsonl(folder / "labels.jsonl", rows)
    model = {
        "config": {
            "model_type": "bert",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
    }
    return {"task": "text-classification", "model": model, "data": {"train": str(train), "max_length": 16}}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    found = Replays()
    backend = aot_autograd(fw_compiler=found.compile, bw_compiler=found.compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", found.mark)
    monkeypatch.setattr(Precision, "has_cuda_graphs", property(lambda section: section.compile is not False))
    torch.compiler.reset()
    torch._dynamo.register_backend(backend, name="replays")
    yield found
    del torch._dynamo.backends.registry._COMPILER_FNS["replays"]
    torch.compiler.reset()


@pytest.mark.parametrize("part", ["model", "blocks"])
@pytest.mark.parametrize("task", [windows, answers, labels])
def test_losses_and_scores_are_those_without_graphs(corpus: Path, replays: Replays, task: Any, part: str) -> None:
    found = []
    for name, precision in (("plain", {}), ("graphs", {"compile": part, "compile_backend": "replays"})):
        recipe = tiny_recipe(
            corpus, output_dir=str(corpus / name), precision=precision, options={}, **SETTINGS, **task(corpus)
        )
        summary = train(recipe).summary
        found.append(([*losses(corpus / name).values()], summary["eval"]))
    (plain, scores), (graphs, scores_of_graphs) = found
    assert graphs == pytest.approx(plain, rel=1e-5)
    assert scores_of_graphs == pytest.approx(scores, rel=1e-5)
    assert max(replays.counts) <= 8
