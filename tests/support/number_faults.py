"""Runs with faults in their numbers, and what their incidents have to say."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.core.json_io import read_json
from accel_train.observe.incident_record import Incident
from tests.support.processes import run_forked
from tests.support.runs import TESTS, recipe_dict

GAP_STEPS = 10
"""Steps closer than 10 belong to one incident."""


PLACES: list[dict[str, Any]] = [
    {"place": "forward", "name": "blocks.0.act"},
    {"place": "forward", "name": "blocks.1", "value": math.inf},
    {"place": "forward", "name": "statistics"},
    {"place": "forward", "name": "embed"},
    {"place": "forward", "name": "head", "value": -math.inf},
    {"place": "forward", "name": "blocks.1.norm"},
    {"place": "backward", "name": "blocks.0.act"},
    {"place": "backward", "name": "blocks.1.widen", "value": math.inf},
    {"place": "backward", "name": "head"},
    {"place": "gradient", "name": "blocks.0.widen.weight"},
    {"place": "gradient", "name": "head.bias", "value": math.inf},
    {"place": "gradient", "name": "embed.weight", "value": -math.inf},
    {"place": "loss"},
    {"place": "loss", "value": math.inf},
    {"place": "data", "name": "features"},
    {"place": "data", "name": "features", "value": math.inf},
    {"place": "data", "name": "wanted", "value": 3e38},
]
"""Of the regression. What is wanted may be 3e38, which is finite, and its square is not."""


ONCE: list[dict[str, Any]] = [
    {"place": "forward", "name": "blocks.1.act", "once": True},
    {"place": "loss", "once": True},
    {"place": "backward", "name": "blocks.0.widen", "once": True},
    {"place": "gradient", "name": "blocks.1.back.weight", "once": True},
    {"place": "forward", "name": "head", "value": math.inf, "once": True},
    {"place": "loss", "value": math.inf, "once": True},
    {"place": "gradient", "name": "statistics.weight", "value": math.inf, "once": True},
]


def spread(kinds: Sequence[dict[str, Any]], *, processes: int, micro_batches: int = 2) -> list[dict[str, Any]]:
    """Each kind at a step of its own, going through processes, micro-batches and rows."""
    return [
        {
            "step": 3 + GAP_STEPS * number,
            "rank": number % processes,
            "micro_batch": (number // processes) % micro_batches,
            "row": number % 4,
            **kind,
        }
        for number, kind in enumerate(kinds)
    ]


def plan_of(
    folder: Path, name: str, *, processes: int, steps: int, faults: Sequence[Any] = (), **more: Any
) -> dict[str, Any]:
    """What `number_fault_program.py` runs; `recipe` in `more` is merged into its recipe."""
    out = folder / f"seen {name}"
    out.mkdir(exist_ok=True)
    sections = {
        "task": "tests.support.tasks.number_faults:FaultyRegression",
        "options": {"num_samples": steps * 8 * processes},
        "data": {"train": "none", "num_workers": 0},
        "batch": {"global_batch_size": 8 * processes, "gradient_accumulation_steps": 2},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"max_steps": steps, "warmup_steps": 0},
        "guard": {"max_incidents": 1000, "max_skips_per_1000_steps": 1000, "on_spike": "off", "fp16_scale_floor": 16},
        "output_dir": str(folder / name),
        **more.pop("recipe", {}),
    }
    return {
        "recipe": recipe_dict(folder, windows="Regression" not in sections["task"], **sections),
        "faults": list(faults),
        "out": str(out),
        **more,
    }


def launch(plan: Mapping[str, Any], processes: int, expect: int = 0) -> list[dict[str, Any]]:
    """Run the plan on this many processes; what each of them saw, if it came to its end."""
    path = Path(plan["out"]) / "plan.json"
    path.write_text(json.dumps(plan))
    folder, program = Path(plan["out"]) / "processes", TESTS / "support/programs/number_faults.py"
    forked = run_forked([str(path)], processes, folder=folder, program=program)
    forked.wait(300.0, stop_at_failure=True)
    assert forked.first_failure() == expect, "\n".join(forked.stderr(rank)[-5000:] for rank in range(processes))
    seen = [Path(plan["out"]) / f"rank-{rank}.json" for rank in range(processes)]
    return [json.loads(path.read_text()) for path in seen if expect == 0]


def incident_with(**changes: Any) -> Incident:
    """An incident as a run of one process writes it, with these fields in place of the usual ones."""
    numbers = {"loss": 9.0, "grad_norm": 9.0, "learning_rate": 1e-3, "max_grad_norm": 1.0, "seconds": 0.0}
    counts = {"step": 3, "num_targets": 8, "seed": 1, "world_size": 1, "num_sharing": 1}
    texts = {"run": "run", "time": "", "kind": "not finite", "action": "skip", "reason": "", "precision": "no"}
    rest: dict[str, Any] = {"loss_scale": None, "skipped": True, "not_diagnosed": None, "processes": []}
    return Incident(**{**numbers, **counts, **texts, **rest, **changes})


def incident(folder: Path, step: int) -> dict[str, Any]:
    return read_json(folder / "incidents" / f"step-{step:08d}" / "incident.json")


def assert_named(found: Mapping[str, Any], fault: Mapping[str, Any], sample: int) -> None:
    """The incident names process, sample and module of a fault that comes with its sample."""
    said = f"{fault}: {found['sentence']}"
    assert found["classification"] == "deterministic", said
    assert [each["rank"] for each in found["processes"] if each["happens_again"]] == [fault["rank"]], said
    finding = found["processes"][fault["rank"]]
    assert (finding["samples"], finding["micro_batch"]) == ([sample], fault["micro_batch"]), said
    assert f"sample {sample} on process {fault['rank']}" in found["sentence"]
    place, module = fault["place"], fault.get("name")
    if place == "data":
        assert f"row {sample} of nowhere" in finding["origins"][0]
    if place == "data" and math.isfinite(fault.get("value", math.nan)):
        place, module = ("loss", None) if fault["name"] == "wanted" else ("module", "embed")
    elif place == "data":
        module = "embed"
        assert finding["columns"]["features"]["not_finite"] == 1
    elif place == "loss":
        module = None
    elif place == "gradient":
        assert finding["gradients_not_finite"] == [module]
        module = str(module).rpartition(".")[0]
    elif place == "backward":
        place = "gradient"
    expected = {"forward": "module", "data": "batch"}.get(place, place)
    assert (finding["place"], finding["module"]) == (expected, module), said
