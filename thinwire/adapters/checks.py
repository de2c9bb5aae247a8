"""What adapters refuse before any gradient flows."""

from __future__ import annotations

from torch import nn

from thinwire.errors import UsageError


def check_parameters(module: nn.Module | None, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse at attach what a hook could not handle later."""
    if not parameters:
        raise UsageError(
            "the model has no parameter that requires a gradient; there is nothing to compress"
        )
    for name, parameter in parameters.items():
        if not parameter.dtype.is_floating_point:
            raise UsageError(
                f"parameter {name!r} has dtype {parameter.dtype}; only float16, bfloat16, float32 and float64 gradients can be sent"
            )
    for name, child in module.named_modules() if module is not None else ():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise UsageError(
                f"module {name!r} has sparse=True, which gives sparse-layout gradients; only dense ones can be sent, set sparse=False"
            )
