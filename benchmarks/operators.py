"""What a bucket costs on an accelerator, counted without one: operators of torch, kernels, numbers read and written.

    python3 benchmarks/operators.py bert-large --method gaussiank,sidco,randomk

Tensors have no data (the meta device), so that whatever would be read back by the host ends the count and is named. Operators
that only make a view are left out. *Passes* are the elements of all tensors that operators and kernels read or wrote, per element of the model: a
kernel counts for what it is handed as bucket, memory and update.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from benchmarks.host_cost import IdleKernel, IdleToolchain  # noqa: E402
from thinwire.bench.compress_fleet import Fleet  # noqa: E402
from thinwire.bench.compress_layout import describe_model  # noqa: E402
from thinwire.kernels.cuda.toolchain import use_toolchain  # noqa: E402
from thinwire.tools.methods import build_method, expand_all, keep_taken  # noqa: E402

META = torch.device("meta")
WORLD = 4
VIEWS = {
    "as_strided",
    "slice",
    "select",
    "unbind",
    "split",
    "split_with_sizes",
    "unsqueeze",
    "detach",
    "expand",
}


class Counting(TorchDispatchMode):
    """Counts inside `span` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.numbers = 0
        self._on = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        launched = IdleKernel.launched.copy()
        self._on = True
        yield
        self._on = False
        for kernel, count in (IdleKernel.launched - launched).items():
            self.operators[f"kernel {kernel}"] += count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._on and name.strip("_") not in VIEWS and "view" not in name:
            self.operators[name] += 1
            made = [leaf for leaf in tree_leaves([args, result]) if isinstance(leaf, torch.Tensor)]
            self.numbers += sum(tensor.numel() for tensor in made)
        return result


def show(model: str, name: str, detailed: bool, steps: int) -> None:
    method = build_method(name, keep_taken(name, density=0.01))
    infos = describe_model(model)
    with patch("thinwire.bench.compress_fleet.Gradients"):
        fleet = Fleet(infos, method, world=WORLD, device=META, bucket_mb=25)
    buckets, counting = len(fleet.buckets[0]), Counting()
    numel = sum(bucket.flat.numel() for bucket in fleet.buckets[0])
    try:
        with counting:
            for _ in range(steps):
                counting.operators.clear()
                counting.numbers = 0
                fleet.lap(counting)
    except (RuntimeError, NotImplementedError) as error:
        print(f"{model} {name}: waits for the host: {str(error).splitlines()[0][:160]}")
        return
    kernels = sum(n for what, n in counting.operators.items() if what.startswith("kernel "))
    operators = sum(counting.operators.values()) - kernels
    print(
        f"{model} {name}: per bucket {operators / buckets:.1f} operators, {kernels / buckets:.1f} kernels; "
        f"operators pass {counting.numbers / numel:.1f} times over the model"
    )
    if detailed:
        for what, count in counting.operators.most_common():
            print(f"    {what}: {count / buckets:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--method", default="adtopk", help="names with commas between them")
    parser.add_argument("--detailed", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="the last one is counted")
    options = parser.parse_args()
    with use_toolchain("meta", IdleToolchain()):
        for model in options.models:
            for name in expand_all(options.method.split(",")):
                show(model, name, options.detailed, options.steps)


if __name__ == "__main__":
    main()
