"""How well the planner predicts rows of the step benchmark that it has not seen.

    python3 benchmarks/plan_rows.py                       # benchmarks/results/h200_step
    python3 benchmarks/plan_rows.py --rows rows.json

For each model in turn: the link and the work of encoding are fitted to the rows of the other models, then every row of this
one is predicted from its step without communication, its buckets and the collectives that its exchanges ask for. The rows
hold no ready times: a bucket counts as ready when its share of all tensors has been passed, in two thirds of the step.
Prints a Markdown table: exposed time measured and predicted, and what choosing by prediction costs (regret).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import thinwire as tw  # noqa: E402
from thinwire.auto.rehearsal import Traffic  # noqa: E402
from thinwire.bench.models import build_workload  # noqa: E402
from thinwire.layout import ParameterInfo, describe_module  # noqa: E402
from thinwire.plan.prices import LinkPrices, Rounds  # noqa: E402
from thinwire.plan.step_model import Conditions, Cost, predict_step  # noqa: E402

FIRST_MB, CAP_MB = 1, 25
"""DDP's own buckets."""
MERGED_MB = 100
"""Compressed buckets are encoded together up to this."""
BACKWARD = 2 / 3
"""Of a step without communication."""
RATES = {"1gbit": 1e9, "10gbit": 1e10, "25gbit": 2.5e10}
METHODS = {"ddp": tw.Dense, "dense": tw.Dense, "adtopk": tw.ADTopK, "topk": tw.TopK}


@dataclass(frozen=True)
class Link:
    """What is fitted: how much of the nominal rate there is, the latency of a hop, the host's work per bucket."""

    share: float
    hop_s: float
    host_s: float
    encode_s: float
    """Per element that is compressed, the decoding included."""


@dataclass
class Case:
    """A row, and what it sends."""

    row: dict[str, Any]
    buckets: list[list[ParameterInfo]]
    rounds: list[Rounds]

    @property
    def exposed_ms(self) -> float:
        return self.row["ms"] - self.row["no_sync_ms"]

    def predict_ms(self, link: Link) -> float:
        """Exposed milliseconds."""
        rate = RATES[self.row["rate"]] * link.share
        prices = LinkPrices(rate, link.hop_s, self.row["workers"])
        total = sum(len(bucket) for bucket in self.buckets)
        passed = itertools.accumulate(len(bucket) for bucket in self.buckets)
        silent = self.row["no_sync_ms"] / 1e3
        ready = [BACKWARD * silent * count / total for count in passed]
        first = ready[0]
        conditions = Conditions(tuple(one - first for one in ready), silent - ready[-1] + first)
        compressed = self.row["method"] not in ("ddp", "dense")
        costs = [
            Cost(
                link.host_s + link.encode_s * sum(i.numel for i in bucket) if compressed else 0.0,
                prices.seconds(rounds),
                0.0,
            )
            for bucket, rounds in zip(self.buckets, self.rounds, strict=True)
        ]
        return 1e3 * predict_step(conditions, costs).exposed_s


def cut(infos: Sequence[ParameterInfo], caps: Iterable[float]) -> list[list[ParameterInfo]]:
    """Parameters from the last to the first, in buckets of at least these sizes."""
    buckets: list[list[ParameterInfo]] = []
    current: list[ParameterInfo] = []
    limits = iter(caps)
    limit = next(limits)
    for info in reversed(infos):
        current.append(info)
        if sum(one.numel * one.dtype.itemsize for one in current) >= limit * 2**20:
            buckets.append(current)
            current, limit = [], next(limits)
    return [*buckets, *([current] if current else [])]


def load_cases(path: Path) -> list[Case]:
    cases = []
    shapes: dict[str, list[ParameterInfo]] = {}
    traffic: dict[int, Traffic] = {}
    for row in json.loads(path.read_text()):
        if row["status"] != "ok" or row["method"] not in METHODS or row["rate"] not in RATES:
            continue
        if row["bucket_mb"] is not None:
            continue
        name = row["model"]
        if name not in shapes:
            model, _ = build_workload(name, torch.device("meta"), 1, row["length"], 0)
            shapes[name] = [info for _, info in describe_module(model).values()]
        density = {} if row["density"] is None else {"density": row["density"]}
        method = METHODS[row["method"]](**density)
        cap = CAP_MB if method.is_dense else MERGED_MB
        buckets = cut(shapes[name], itertools.chain([FIRST_MB], itertools.repeat(cap)))
        known = traffic.setdefault(row["workers"], Traffic(row["workers"]))
        cases.append(Case(row, buckets, [known.rounds(bucket, method) for bucket in buckets]))
    return cases


def fit(cases: Sequence[Case]) -> Link:
    """The link with the least median error, by trying a grid."""
    grid = itertools.product(
        (0.6, 0.7, 0.8, 0.85, 0.9, 0.95),
        (25e-6, 100e-6, 300e-6),
        (0.0, 2e-4, 5e-4, 1e-3),
        (0.0, 1e-11, 2e-11, 4e-11),
    )
    links = [Link(*values) for values in grid]
    return min(links, key=lambda link: sum(min(1.0, miss(case, link)) for case in cases))


def miss(case: Case, link: Link) -> float:
    """Relative to the measured exposed time, or to 15 ms, where 3 ms are as good as exact."""
    return abs(case.predict_ms(link) - case.exposed_ms) / max(15.0, case.exposed_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rows", type=Path, default=ROOT / "benchmarks/results/h200_step/rows.json"
    )
    cases = load_cases(parser.parse_args().rows)
    models = list(dict.fromkeys(case.row["model"] for case in cases))
    print("| model | link | method | exposed ms | predicted | error | within max(3 ms, 20 %) |")
    print("|---|---|---|---|---|---|---|")
    errors, regrets = [], []
    for model in models:
        link = fit([case for case in cases if case.row["model"] != model])
        own = [case for case in cases if case.row["model"] == model]
        for case in own:
            row, predicted = case.row, case.predict_ms(link)
            error = predicted - case.exposed_ms
            fine = abs(error) <= max(3.0, 0.2 * case.exposed_ms)
            errors.append(abs(error) / max(3.0, 0.2 * case.exposed_ms))
            density = "" if row["density"] is None else f" {100 * row['density']:g} %"
            print(
                f"| {model} | {row['rate']} | {row['method']}{density} | {case.exposed_ms:.1f} | "
                f"{predicted:.1f} | {error:+.1f} | {'yes' if fine else 'no'} |"
            )
        for rate in dict.fromkeys(case.row["rate"] for case in own):
            there = [case for case in own if case.row["rate"] == rate]
            chosen = min(there, key=lambda case: case.predict_ms(link))
            # Rows come from several sittings; each is compared with its own processes' step without communication.
            best = min(case.row["ratio_no_sync"] for case in there)
            regret = chosen.row["ratio_no_sync"] / best - 1
            regrets.append((regret, model, rate, chosen.row["method"]))
    print()
    print(
        f"Median error {median(errors):.2f} of what is allowed; {sum(e <= 1 for e in errors)} of {len(errors)} "
        "rows are within it."
    )
    for regret, model, rate, method in regrets:
        print(f"{model} at {rate}: chooses {method}, regret {100 * regret:.1f} %")


if __name__ == "__main__":
    main()
