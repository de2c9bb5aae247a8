"""Methods in Adam's scale for the step benchmark, which takes AdamW for them. The first step is dense.

sudo python3 benchmarks/h200_step.py --out out --cells adam_methods@BIT1:bert-large:10gbit,adam_methods@BIT1_REFRESHED:bert-large:10gbit
"""

from __future__ import annotations

import thinwire as tw


def bits(sums: int | None, every: int = 50) -> tw.AdamScale:
    """One bit of everything, its sums in as many; the divisor refreshed every so many steps."""
    return tw.AdamScale(
        method=tw.Quantized(bits=1, sum_bits=sums),
        start=1,
        divisor=tw.memory.Refresh(every=every),
        limit=3.0,
    )


BIT1 = bits(None)
BIT1_SUMS4 = bits(4)
BIT1_REFRESHED = bits(None, every=1)
"""A refresh in every step: what one costs."""
TOPK1 = tw.AdamScale(method=tw.TopK(density=0.01), start=1)
