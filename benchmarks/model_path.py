"""A training step of a model as accel_train builds it, beside transformers' own, for four families, eager and compiled.

    python -m benchmarks.model_path --save

One fresh process per family, on one thread. All variants have the same weights and batches, and take turns of a few
steps, so that what else the machine does affects all of them alike; ratios are of CPU time in one round: median (least
to most). No loop is around the model: forward, loss, backward and fused AdamW. Compiled means the repeated blocks, as
`precision.compile`.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import (
    arguments_of,
    markdown_table,
    median_and_range,
    print_result,
    run_child,
    show,
)

FAMILIES = ("gpt2", "llama", "qwen2", "mistral")
SIZES = {
    "layers": 4,
    "heads": 4,
    "width": 128,
    "block": 64,
    "batch": 12,
    "vocab": 65,
    "rounds": 15,
    "steps": 4,
    "compile": 1,
}
"""nanoGPT's model for a CPU; `steps` are those of a turn."""
HEADERS = ("model", "fused", "stock ms", "eager", "stock compiled", "compiled", "largest difference")


def config_of(family: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the recipe's `model.config` of a family: as many heads for keys as for queries, no dropout."""
    common = {
        "model_type": family,
        "vocab_size": sizes["vocab"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    if family == "gpt2":
        shape = {
            "n_layer": sizes["layers"],
            "n_head": sizes["heads"],
            "n_embd": sizes["width"],
            "n_positions": sizes["block"],
        }
        return common | shape | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), sizes["heads"])
    widths = {"hidden_size": sizes["width"], "intermediate_size": 8 * sizes["width"] // 3 // 8 * 8}
    return common | heads | widths | {"num_hidden_layers": sizes["layers"], "max_position_embeddings": sizes["block"]}


def build(family: str, sizes: dict[str, int], *, stock: bool, compiled: bool) -> Any:
    """Return the model with the weights of seed 0, as accel_train or transformers builds it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from accel_train import Recipe
    from accel_train.model.compile import compile_module
    from accel_train.model.pretrained import transformers_model
    from accel_train.recipe.schema import Precision
    from accel_train.tasks.causal_lm.task import attention_arguments

    fields = config_of(family, sizes)
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    if stock:
        model = AutoModelForCausalLM.from_config(config)
    else:
        data = {"train": "unused", "sequence_length": sizes["block"]}
        sections: dict[str, Any] = {"model": {"config": fields}, "data": data, "schedule": {"max_steps": 1}}
        recipe = Recipe(output_dir="unused", **sections)
        attention = attention_arguments(recipe, config)
        model, _ = transformers_model(AutoModelForCausalLM, recipe, config, attention, takes_new_head=False)
    compile_module(model, Precision(compile="blocks" if compiled else False))
    return model.train()


def step_of(model: Any, ids: Any) -> Callable[[], None]:
    """Return one training step on a batch of ids (B, T + 1)."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(family: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return CPU milliseconds a step by variant and round, and how far the eager outputs are apart
    at the same weights.
    """
    import torch

    from accel_train.model.kernels.activations import describe_activations

    torch.set_num_threads(1)
    ids = torch.randint(
        sizes["vocab"], (sizes["batch"], sizes["block"] + 1), generator=torch.Generator().manual_seed(0)
    )
    ways = [("eager", False), *([("compiled", True)] if sizes["compile"] else [])]
    models = {
        f"{who} {way}": build(family, sizes, stock=who == "stock", compiled=compiled)
        for way, compiled in ways
        for who in ("stock", "ours")
    }
    with torch.no_grad():
        stock, ours = (
            models[f"{who} eager"](input_ids=ids[:, :-1], use_cache=False).logits for who in ("stock", "ours")
        )
    steps = {name: step_of(model, ids) for name, model in models.items()}
    for step in steps.values():
        for _ in range(3):  # what is compiled, or allocated once
            step()
    ms: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(sizes["rounds"]):
        for name, step in steps.items():
            began = time.process_time()
            for _ in range(sizes["steps"]):
                step()
            ms[name].append((time.process_time() - began) / sizes["steps"] * 1e3)
    fused = describe_activations(models["ours eager"], "auto").value
    return {"model": family, "fused": fused, "ms": ms, "difference": float((ours - stock).abs().max())}


def cells(figures: dict[str, Any]) -> list[str]:
    """Return a row of the table; a ratio is ours to stock in the same round, `stock compiled` compiled to eager."""
    ms = figures["ms"]

    def ratio(one: str, other: str) -> str:
        if one not in ms:
            return "-"
        return median_and_range([a / b for a, b in zip(ms[one], ms[other], strict=True)], ".3f")

    return [
        figures["model"],
        figures["fused"],
        f"{statistics.median(ms['stock eager']):.2f}",
        ratio("ours eager", "stock eager"),
        ratio("stock compiled", "stock eager"),
        ratio("ours compiled", "stock compiled"),
        f"{figures['difference']:.1e}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = arguments_of(__doc__)
    parser.add_argument("--sizes", type=json.loads, default={}, help=f"JSON; default {json.dumps(SIZES)}")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: all")
    parser.add_argument("--child", choices=FAMILIES, help="measure this family in this process")
    given = parser.parse_args(arguments)
    if given.child is not None:
        print_result(measure(given.child, SIZES | given.sizes))
        return
    runs = [
        run_child(
            "benchmarks.model_path",
            ["--child", family, "--sizes", json.dumps(given.sizes)],
            timeout_seconds=1800,
        )
        for family in given.families
    ]
    table = markdown_table(HEADERS, [cells(each.result) for each in runs], text=("model", "fused"))
    lines = [
        "## A step of accel_train's models over one of transformers', CPU time, 1 thread",
        "",
        table,
        "",
        f"Other processes used {statistics.mean(each.others_cores for each in runs):.2f} cores meanwhile.",
    ]
    show(
        lines,
        {"sizes": SIZES | given.sizes, "runs": [each.result for each in runs]},
        save=given.save,
        name="model_path",
    )


if __name__ == "__main__":
    main()
