"""What is still to be sent when a backward has ended, by how its buckets are cut into units: a model of a step, without a GPU.

    python3 benchmarks/unit_tail.py bert-large vit-large --sent 0.032

Units are what `BucketMerger` makes of DDP's buckets, beside those that all hold as many bytes. A bucket is ready when the layers
behind it have had their share of the backward, by multiplications; `thinwire/plan/step_model.py` does the rest. The rate and
the latency are those with which the model comes nearest to the steps of ADTopK and TopK in `results/h200_step_3`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.futures import Future  # noqa: E402

from thinwire.bench.compress_layout import describe_model, lay_out_buckets  # noqa: E402
from thinwire.bench.models import find_model  # noqa: E402
from thinwire.engine.merging import BucketMerger, ReadyBucket  # noqa: E402
from thinwire.layout import Bucket, BucketLayout  # noqa: E402
from thinwire.plan.step_model import Conditions, Cost, predict_step  # noqa: E402

ENOUGH = 100 << 20
BACKWARD_S = {
    "bert-large": 0.053,
    "vit-large": 0.053,
    "resnet152": 0.067,
    "vgg16": 0.053,
    "gpt2-large": 0.090,
}
"""Two thirds of a step without communication; GPT-2's is a guess."""
ENCODE_S = (11e-6, 0.85e-12)
DECODE_S = (5e-6, 0.37e-12)
"""On the device, for a unit and for each of its bytes: `results/compress`, in 25 MB buckets and in one."""
META = torch.device("meta")

Units = list[list[BucketLayout]]


def work_of(model: str) -> dict[str, float]:
    """Multiplications by parameter. All layers of a transformer see as many tokens; embeddings are looked up."""
    spec = find_model(model)
    found: dict[int, float] = {}

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        weight = module.weight
        channels = output.shape[1] if isinstance(module, nn.Conv2d) else output.shape[-1]
        found[id(weight)] = weight.numel() * output.numel() / channels

    with META:
        workload = spec.build(META, spec.batch, spec.length)
        modules = list(workload.model.modules())
        looked_up = {id(one.weight) for one in modules if isinstance(one, nn.Embedding)}
        if any(isinstance(module, nn.Conv2d) for module in modules):
            for module in modules:
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.register_forward_hook(note)
            workload.loss(workload.model, workload.draw())
        else:
            found = {id(one): one.numel() for one in workload.model.parameters()}
    names = {id(one): name for name, one in workload.model.named_parameters()}
    return {names[key]: work for key, work in found.items() if key not in looked_up}


def merged_units(layouts: Sequence[BucketLayout]) -> Units:
    buckets = [
        ReadyBucket(Bucket(one, torch.empty(one.numel, device=META)), Future()) for one in layouts
    ]
    parameters = sum(len(layout.slots) for layout in layouts)
    merger = BucketMerger(ENOUGH, parameters, sum(one.bucket.flat.nbytes for one in buckets))
    units = chain(*map(merger.add, buckets), merger.end())
    return [[ready.bucket.layout for ready in unit] for unit in units]


def even_units(layouts: Sequence[BucketLayout]) -> Units:
    """All of `ENOUGH` bytes, but for the last bucket."""
    units: Units = [[]]
    for layout in layouts[:-1]:
        if nbytes_of(units[-1]) >= ENOUGH:
            units.append([])
        units[-1].append(layout)
    return [*units, [layouts[-1]]]


def nbytes_of(unit: Sequence[BucketLayout]) -> int:
    return sum(4 * layout.numel for layout in unit)


def tail_of(model: str, units: Units, options: argparse.Namespace) -> float:
    """Seconds from the end of the backward to the last update, which is beside what encoding adds to the backward."""
    work = work_of(model)
    shares = [sum(work.get(slot.name, 0.0) for one in unit for slot in one.slots) for unit in units]
    ready = [BACKWARD_S[model] * done / sum(shares) for done in accumulate(shares)]
    costs = []
    for nbytes in map(nbytes_of, units):
        encode, decode = (each + per_byte * nbytes for each, per_byte in (ENCODE_S, DECODE_S))
        exchange = 1e-3 * options.latency_ms + options.sent * nbytes / (1e9 * options.rate_gb)
        costs.append(Cost(encode, exchange, decode))
    return predict_step(Conditions(tuple(ready), 0.0, options.sharing), costs).exposed_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(BACKWARD_S))
    parser.add_argument("--sent", type=float, default=0.032, help="bytes per byte of gradient")
    parser.add_argument("--rate-gb", type=float, default=1.0, help="GB/s of the link")
    parser.add_argument("--latency-ms", type=float, default=0.7, help="of a unit's collectives")
    parser.add_argument("--sharing", type=int, default=4, help="workers on the GPU")
    options = parser.parse_args()
    for model in options.models:
        layouts = lay_out_buckets(describe_model(model), META, None)
        for title, units in (("even", even_units(layouts)), ("merged", merged_units(layouts))):
            sizes = " ".join(f"{nbytes_of(unit) / 2**20:.0f}" for unit in units)
            print(
                f"{model:11} {title:6} {1e3 * tail_of(model, units, options):5.1f} ms in {len(units)} units of MB: {sizes}"
            )


if __name__ == "__main__":
    main()
