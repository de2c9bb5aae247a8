"""What a bucket costs the host beside the driver: the fused kernels' Python on a CPU, with launches that do nothing.

    python3 benchmarks/host_cost.py bert-large resnet152 --method adtopk,dgc

Needs no GPU. Prints the time per bucket of the fastest and of the median step, what `StreamDriver` takes between the two to find
out what it has to keep alive, and how often each kernel is launched per bucket and step. The rest of the driver's own time, and
what torch's operations cost more on a GPU than on a CPU, come on top.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from thinwire.bench.compress_fleet import DECODE, ENCODE, Fleet  # noqa: E402
from thinwire.bench.compress_layout import describe_model  # noqa: E402
from thinwire.engine.streams import find_held  # noqa: E402
from thinwire.kernels.cuda.launch import Arguments  # noqa: E402
from thinwire.kernels.cuda.source import Defines  # noqa: E402
from thinwire.kernels.cuda.toolchain import Toolchain, use_toolchain  # noqa: E402
from thinwire.tools.methods import build_method, expand_all, keep_taken  # noqa: E402

WORLD = 2
STEPS = 30
WARM_STEPS = 3


class IdleKernel:
    """Takes what a compiled kernel takes, and hands it to a function of the C library that looks at its first argument alone."""

    launched: ClassVar[Counter[str]] = Counter()
    _call = ctypes.CDLL(None).abs

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, blocks: int, threads: int, args: Sequence[Any] | Arguments) -> None:
        self.launched[self.name] += 1
        if not isinstance(args, Arguments):
            args = Arguments(args)
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        self._call(1, *grid, *block, 0, ctypes.c_void_p(0), args.pointers, None)


class IdleToolchain(Toolchain):
    def compile(self, file: str, name: str, defines: Defines) -> IdleKernel:
        return IdleKernel(name)


class Watch:
    """Adds up the processor time of rank 0's spans; other processes do not count."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.spent[name] += time.thread_time() - began


def show(model: str, name: str) -> None:
    method = build_method(name, keep_taken(name, density=0.01))
    device = torch.device("cpu")
    fleet = Fleet(describe_model(model), method, world=WORLD, device=device, bucket_mb=None)
    fleet.gradients.fill = lambda *args: None
    buckets = len(fleet.buckets[0])
    for _ in range(WARM_STEPS):
        fleet.lap(Watch())
    gc.collect()
    gc.freeze()
    IdleKernel.launched.clear()
    watches = [Watch() for _ in range(STEPS)]
    for watch in watches:
        fleet.lap(watch)
    print(f"{model} {name}: {buckets} buckets")
    for span in (ENCODE, DECODE):
        spent = [1e6 * watch.spent[span] / buckets for watch in watches]
        print(f"    {span}: {min(spent):.0f} us, median {statistics.median(spent):.0f}")
    per_bucket = {
        name: round(count / (STEPS * WORLD * buckets), 2)
        for name, count in IdleKernel.launched.items()
    }
    held = [1e6 * one for one in time_held(fleet)]
    print(f"    held: {min(held):.0f} us, median {statistics.median(held):.0f}")
    print("    launches: " + ", ".join(f"{name} {times:g}" for name, times in per_bucket.items()))


@torch.no_grad()
def time_held(fleet: Fleet) -> list[float]:
    """Seconds in which all that a bucket's suspended program holds is found, many times. The fleet is of no use afterwards."""
    fleet.reducers[0].reduce(fleet.buckets[0][-1])
    program, _ = fleet.drivers[0].pending.pop()
    next(program)
    spent = []
    for _ in range(STEPS):
        began = time.thread_time()
        find_held(program)
        spent.append(time.thread_time() - began)
    program.close()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--method", default="adtopk", help="names with commas between them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with use_toolchain("cpu", IdleToolchain()):
        for model in options.models:
            for name in expand_all(options.method.split(",")):
                show(model, name)


if __name__ == "__main__":
    main()
