"""float8 matrix products in linear layers, by Accelerate's recipe for torchao: one dynamic scale per tensor."""

from typing import Any

from torch import nn

from accel_train.core.state import Choice

MULTIPLE = 16
"""Number that must divide both dimensions of a layer that float8 units multiply."""


def float8_config(*, emulate: bool = False) -> Any:
    """Return torchao's configuration. Weights stay in fp32, and the number of tokens is padded if needed.

    `emulate` computes the same numbers without float8 units, slowly. Tests on a CPU use it.
    """
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(pad_inner_dim=True, emulate=emulate)


def convert_to_float8(model: nn.Module, *, emulate: bool = False) -> Choice[str]:
    """Convert linear layers to float8 products in place; return how many, and why not the others.

    Parameters and their names do not change. The first and the last layer stay as they are, as in Accelerate's recipe,
    because training is unstable otherwise.

    Raises:
        ValueError: no layer can be converted.
    """
    from accelerate.utils import convert_model_to_fp8_ao

    from accel_train.model.lora import is_linear

    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and is_linear(module)
    }
    inner = list(linear)[1:-1]
    converted = {name for name in inner if not any(size % MULTIPLE for size in linear[name].weight.shape)}
    if not converted:
        raise ValueError(
            f"precision.mixed_precision=fp8: no layer of {type(model).__name__} can multiply in float8. It takes an "
            f"nn.Linear between the first and the last with dimensions that are multiples of {MULTIPLE}; use bf16"
        )
    convert_model_to_fp8_ao(model, float8_config(emulate=emulate), lambda _, name: name in converted)
    others = ["the first and the last stay in bf16"]
    if len(converted) < len(inner):
        others.append(f"{len(inner) - len(converted)} have a dimension that is not a multiple of {MULTIPLE}")
    return Choice(f"{len(converted)} of {len(linear)} linear layers", "; ".join(others))
