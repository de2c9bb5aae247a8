"""Writers: where statistics go, by what each tool's own door is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.errors import UsageError


def write_values(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Hand `values` to a TensorBoard writer, a W&B run, MLflow, or any function of (values, step)."""
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(dict(values), step=step)
    elif hasattr(writer, "log"):
        writer.log(dict(values), step=step)
    elif callable(writer):
        writer(dict(values), step)
    else:
        raise UsageError(
            f"writer is a {type(writer).__name__}; it must be a TensorBoard SummaryWriter, a W&B run, mlflow or a function of "
            "(values, step)"
        )
