"""What torch.compile costs at a start: the first step without and with a folder of compiled code, graphs and
recompilations.

    python -m benchmarks.compile --save

Models of four families, their repeated blocks compiled as `precision.compile: true` does. For each, two fresh processes
on one thread after another share an empty folder for compiled code: the first finds nothing (cold), the second all of
it (warm). A step is forward, loss, backward and fused AdamW. A third process trains with batches of other lengths, for
which the model is compiled from the start, as in fine-tuning; its graphs are made and not compiled further: those after
the first step count as compiled again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import arguments_of, child_environment, markdown_table, print_result, run_child, show
from benchmarks.model_path import FAMILIES, SIZES, build, step_of

BAR_WARM = 0.2
"""Seconds of the first step with a warm folder, of those with a cold one."""
HEADERS = ("model", "cold s", "warm s", "warm / cold", "bar", "later step ms", "graphs", "compiled again")


def measure(family: str, sizes: dict[str, int], backend: str, *, varies: bool) -> dict[str, Any]:
    """Return wall seconds of each step, and the graphs after the first and after the last."""
    import torch

    from accel_train.model.compile import GraphCount, compile_module
    from accel_train.recipe.schema import Precision

    torch.set_num_threads(1)
    torch.compiler.set_default_backend(backend)
    model, graphs = build(family, sizes, stock=False, compiled=False), GraphCount()
    compile_module(model, Precision(compile=True), graphs, lengths_vary=varies)
    seconds, counts = [], []
    longest = sizes["block"]
    for length in (longest, longest, *((longest // 2, longest // 2 + 3, longest - 1) if varies else ()), longest):
        step = step_of(model, torch.randint(sizes["vocab"], (sizes["batch"], length + 1)))
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
        counts.append(graphs.num_graphs)
    return {"step_seconds": seconds, "graphs": counts[0], "compiled_again": counts[-1] - counts[0]}


def row(family: str, cold: dict[str, Any], warm: dict[str, Any], varying: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    first = [each["step_seconds"][0] for each in (cold, warm)]
    share = first[1] / first[0]
    return [
        family,
        f"{first[0]:.1f}",
        f"{first[1]:.1f}",
        f"{share:.2f}",
        f"<= {BAR_WARM} {'met' if share <= BAR_WARM else 'MISSED'}",
        f"{warm['step_seconds'][-1] * 1e3:.0f}",
        str(warm["graphs"]),
        str(max(each["compiled_again"] for each in (cold, warm, varying))),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = arguments_of(__doc__)
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON; default: those of benchmarks.model_path")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; another one only tries the benchmark")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: all")
    parser.add_argument("--varies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=FAMILIES, help="measure this family in this process")
    given = parser.parse_args(arguments)
    sizes = SIZES | given.sizes
    if given.child is not None:
        print_result(measure(given.child, sizes, given.backend, varies=given.varies))
        return
    runs: dict[str, dict[str, Any]] = {}
    others = []
    for family in given.families:
        runs[family] = {}
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm", "varying"):
                backend = ["--backend", "eager", "--varies"] if state == "varying" else ["--backend", given.backend]
                child = run_child(
                    "benchmarks.compile",
                    ["--child", family, "--sizes", json.dumps(given.sizes), *backend],
                    environment={**child_environment(1), "TORCHINDUCTOR_CACHE_DIR": folder},
                    timeout_seconds=1800,
                )
                runs[family][state] = child.result
                others.append(child.others_cores)
    rows = [row(family, **each) for family, each in runs.items()]
    shape = f"{sizes['layers']} layers, width {sizes['width']}, up to {sizes['batch']} x {sizes['block']} tokens"
    lines = [
        f"## The first step of a compiled model, cold and warm: {shape}; fp32, one thread, wall time",
        "",
        markdown_table(HEADERS, rows, text=("model", "bar")),
        "",
        f"Other processes used {max(others):.2f} cores meanwhile, at most.",
    ]
    show(lines, {"sizes": sizes, "backend": given.backend, "runs": runs}, save=given.save, name="compile")


if __name__ == "__main__":
    main()
