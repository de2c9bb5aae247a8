"""How near the fused kernels come to one pass over memory, by row length: kernel times as torch's profiler sees them.

    python3 benchmarks/h200_kernels.py

Prints the time per step and the ratio to the floor of 12 bytes per element (read gradient and residual, write residual) at the
copy speed measured in the same run. Gradients differ from step to step, so that searches start as far off as they do in training.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import thinwire as tw  # noqa: E402
from tests.contracts.cluster import Cluster  # noqa: E402

NUMEL = 200_000_000
LENGTHS = (64, 256, 576, 1024, 1280, 2304, 4096, 4608, 25_088)
STEPS = 3
WARM_STEPS = 12
"""Whole tensors are read twice while their thresholds grow by a tenth per step."""
WORTH_SHOWING = 0.02
KERNELS = (
    "stream",
    "encode",
    "columns",
    "decode",
    "multi_block",
    "give_back",
    "open_payload",
    "poison",
)


def copy_speed() -> float:
    """Bytes read and written per second by a plain copy."""
    source = torch.empty(NUMEL, device="cuda")
    target = torch.empty_like(source)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        began.record()
        target.copy_(source)
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1e3)
    return 2 * source.nbytes / best


def show(label: str, shapes: dict[str, tuple[int, ...]], method: tw.Method, speed: float) -> None:
    cluster = Cluster(1, method, shapes=shapes, device="cuda")
    draws = [
        [{n: torch.randn(i.shape, device="cuda") for n, i in cluster.infos.items()}]
        for _ in range(WARM_STEPS + STEPS)
    ]
    for draw in draws[:WARM_STEPS]:
        cluster.step(draw)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for draw in draws[WARM_STEPS:]:
            cluster.step(draw)
        torch.cuda.synchronize()
    numel = sum(info.numel for info in cluster.infos.values())
    floor = 12 * numel / speed * 1e3
    print(f"{label}: {numel / 1e6:.1f} M elements, floor {floor:.3f} ms")
    for event in sorted(watched.key_averages(), key=lambda e: -e.device_time_total):
        spent = event.device_time_total / 1e3 / STEPS
        if event.key.startswith(KERNELS) and spent > WORTH_SHOWING * floor:
            print(f"    {event.key:20s} {spent:7.3f} ms  {spent / floor:5.2f}x")


def main() -> None:
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {speed / 1e9:.0f} GB/s")

    def rows(axis: int) -> tw.ADTopK:
        return tw.ADTopK(density=0.01, axis=axis, dense_fallback=False)

    whole = tw.TopK(density=0.01, dense_fallback=False)
    for length in LENGTHS:
        show(f"rows of {length}", {"a": (NUMEL // length, length)}, rows(1), speed)
    show("columns of 1280", {"a": (1280, 40_960)}, rows(0), speed)
    show("columns of 5120", {"a": (5120, 10_240)}, rows(0), speed)
    show("columns of 30522", {"a": (30_522, 1024)}, rows(0), speed)
    show("40 whole tensors", {f"a{i}": (1024, 4096) for i in range(40)}, whole, speed)
    show("one whole tensor", {"a": (30_522, 1024)}, whole, speed)


if __name__ == "__main__":
    main()
