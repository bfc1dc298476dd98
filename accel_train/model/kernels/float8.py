"""float8 matrix products in linear layers, by the recipe that Accelerate has for torchao: tensor by tensor, scaled each time anew."""

from typing import Any

from torch import nn

from accel_train.core.state import Choice

MULTIPLE = 16
"""Both dimensions of a layer that float8 units multiply are multiples of this."""


def float8_config(*, emulate: bool = False) -> Any:
    """Return torchao's configuration: weights stay in fp32, the number of tokens is padded where it has to be.

    `emulate` computes the same numbers without float8 units, slowly: for tests on a CPU.
    """
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(pad_inner_dim=True, emulate=emulate)


def convert_to_float8(model: nn.Module, *, emulate: bool = False) -> Choice[str]:
    """Let linear layers multiply in float8, in place; parameters and their names stay as they were. Returns how many, and why.

    The first and the last one stay as they are, as Accelerate's recipe has it: training is unstable otherwise.

    Raises:
        ValueError: no layer can.
    """
    from accelerate.utils import convert_model_to_fp8_ao

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inner = list(linear)[1:-1]
    converted = {name for name in inner if not any(size % MULTIPLE for size in linear[name].weight.shape)}
    if not converted:
        raise ValueError(
            f"precision.mixed_precision=fp8: no layer of {type(model).__name__} can multiply in float8, which takes an nn.Linear "
            f"between the first and the last whose dimensions are multiples of {MULTIPLE}; use bf16"
        )
    convert_model_to_fp8_ao(model, float8_config(emulate=emulate), lambda _, name: name in converted)
    others = ["the first and the last stay in bf16"]
    if len(converted) < len(inner):
        others.append(f"{len(inner) - len(converted)} have a dimension that is no multiple of {MULTIPLE}")
    return Choice(f"{len(converted)} of {len(linear)} linear layers", "; ".join(others))
