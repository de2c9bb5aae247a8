"""Cells of the byte-level studies: what one training is, and the methods by their names in the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import thinwire as tw


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training."""

    method: str
    seed: int = 0
    lr: float = 1e-3
    steps: int = 1500
    start: int = 5
    """Dense steps at the beginning, in per cent of all; 5 are 75 of 1500."""
    workers: int = 8
    layers: int = 4
    width: int = 256
    context: int = 256
    batch: int = 8
    """Sequences of every worker and step."""
    narrow: bool = False
    """Products and attention in bf16; weights and what the blocks add up in fp32."""

    @property
    def key(self) -> str:
        size = f"{self.layers}x{self.width}x{self.batch}-{self.steps}"
        return f"{self.method}-{size}-lr{self.lr:g}-start{self.start}-seed{self.seed}"


REFRESH = tw.memory.Refresh(every=50)
PLAIN: dict[str, tw.Method] = {
    "int8": tw.Quantized(bits=8),
    "int4": tw.Quantized(bits=4),
    "int8-stochastic": tw.Quantized(bits=8, rounding="stochastic"),
    "int4-stochastic": tw.Quantized(bits=4, rounding="stochastic"),
    "int4-sums16": tw.Quantized(bits=4, sum_bits=16),
    "int8-no-memory": tw.Quantized(bits=8, memory=tw.memory.NoMemory()),
    "int4-no-memory": tw.Quantized(bits=4, memory=tw.memory.NoMemory()),
    "bit1": tw.Quantized(bits=1),
    "topk1": tw.TopK(density=0.01),
}
SCALED: dict[str, tuple[tw.Method, dict[str, Any]]] = {
    "topk1-adam": (tw.TopK(density=0.01), {}),
    "adtopk1-adam": (tw.ADTopK(density=0.01), {}),
    "topk10-adam-refresh": (tw.TopK(density=0.1), {"divisor": REFRESH, "limit": 10.0}),
    "bit2-adam": (tw.Quantized(bits=2, block=64), {}),
    "bit2-adam-refresh": (tw.Quantized(bits=2, block=64), {"divisor": REFRESH, "limit": 3.0}),
    "bit1-adam": (tw.Quantized(bits=1), {}),
    "bit1-adam-refresh": (tw.Quantized(bits=1), {"divisor": REFRESH, "limit": 3.0}),
    **{
        f"bit1-adam-refresh-sums{bits}": (
            tw.Quantized(bits=1, sum_bits=bits),
            {"divisor": REFRESH, "limit": 3.0},
        )
        for bits in (2, 4, 8)
    },
    "bit1-adam-refresh-block32": (
        tw.Quantized(bits=1, block=32),
        {"divisor": REFRESH, "limit": 3.0},
    ),
    "bit1-adam-refresh-free": (tw.Quantized(bits=1), {"divisor": REFRESH}),
}
LOCAL: dict[str, tuple[int, tw.Method, dict[str, Any]]] = {
    # DiLoCo's outer optimizer is the default of local steps.
    **{f"diloco-{every}": (every, tw.Dense(), {}) for every in (8, 32)},
    **{
        f"sparseloco-{every}": (
            every,
            tw.Compose(
                select=tw.select.ChunkwiseTopK(1 / 64, chunk=4096),
                memory=tw.memory.Residual(beta=0.95),
                wire=tw.wire.Wire(values="int2", indices="rice"),
            ),
            {"outer": {"lr": 1.0}},
        )
        for every in (8, 32)
    },
}
"""(inner steps of a round, how differences are sent, settings of `tw.LocalSteps`)."""
METHODS = ("dense", *PLAIN, *SCALED, *LOCAL)
"""The names in the tables."""


def build_method(cell: Cell) -> tw.Method:
    """All of them begin with the same dense steps."""
    start = max(1, cell.steps * cell.start // 100)
    if cell.method in PLAIN:
        return tw.Timeline(phases=((0, tw.Dense()), (start, PLAIN[cell.method])))
    if cell.method in SCALED:
        method, settings = SCALED[cell.method]
        return tw.AdamScale(method=method, start=start, **settings)
    return tw.Dense()
