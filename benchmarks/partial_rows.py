"""Partial sparsification against all, none and the published rule, simulated from committed rows of the step benchmark.

    python3 benchmarks/partial_rows.py        # Markdown, from benchmarks/results/h200_step

Nothing here is measured at these rates. The link (its share of the nominal rate, the latency of a hop) and the work per bucket
and per element are fitted to all committed rows, as in `plan_rows.py`; steps without communication are the rows' own. Buckets
are DDP's, of 25 MB, each decided by itself: all = ADTopK 1 % everywhere, none = dense everywhere, partial = the least
sparsification whose step is within 2 % of the fastest, by exact search, published = small tensors exempt by size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from plan_rows import BACKWARD, CAP_MB, FIRST_MB, ROOT, Case, Link, cut, fit, load_cases

import thinwire as tw
from thinwire.auto.rehearsal import Traffic
from thinwire.layout import ParameterInfo
from thinwire.methods.adtopk import size_threshold
from thinwire.plan.prices import LinkPrices, Rounds
from thinwire.plan.search import Level, find_best, find_fastest
from thinwire.plan.step_model import Conditions, Cost, predict_step

GBITS = (10, 25, 40)
DENSITY = 0.01
NEAR = 1.02


def main() -> None:
    cases = load_cases(ROOT / "benchmarks/results/h200_step/rows.json")
    link = fit(cases)
    print("| model | Gbit/s | none | all | partial | dense in it | published | dense in it |")
    print("|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(case.row["model"] for case in cases):
        own = [case for case in cases if case.row["model"] == name]
        for gbit in GBITS:
            print(f"| {name} | {gbit} | {' | '.join(simulate(own, link, gbit))} |")
    print()
    print(f"Fitted: {link}. Milliseconds per step of {own[0].row['workers']} workers on one GPU.")


def simulate(own: Sequence[Case], link: Link, gbit: float) -> list[str]:
    workers = own[0].row["workers"]
    infos = list(reversed([info for bucket in own[0].buckets for info in bucket]))
    buckets = cut(infos, itertools.chain([FIRST_MB], itertools.repeat(CAP_MB)))
    silent = median(case.row["no_sync_ms"] for case in own) / 1e3
    passed = itertools.accumulate(len(bucket) for bucket in buckets)
    ready = [BACKWARD * silent * count / len(infos) for count in passed]
    moments = tuple(one - ready[0] for one in ready)
    conditions = Conditions(moments, silent - moments[-1], coalesce_bytes=512 << 10)
    prices = LinkPrices(gbit * 1e9 * link.share, link.hop_s, workers)
    traffic = Traffic(workers)
    threshold = size_threshold(sorted(info.numel for info in infos), DENSITY)

    def cost(small: Sequence[ParameterInfo], large: Sequence[ParameterInfo]) -> Cost:
        """Of a bucket whose small tensors are dense and whose large ones are sparse."""
        rounds: Rounds = ()
        for part, method in ((small, tw.Dense()), (large, tw.ADTopK(density=DENSITY))):
            rounds += traffic.rounds(part, method) if part else ()
        encode = link.host_s + link.encode_s * sum(i.numel for i in large) if large else 0.0
        sent = sum(one.sent_bytes for batch in rounds for one in batch)
        return Cost(encode, prices.seconds(rounds), 0.0, prices.latencies(rounds), sent)

    dense, sparse = [cost(b, []) for b in buckets], [cost([], b) for b in buckets]
    by_size = [
        cost([i for i in b if i.numel <= threshold], [i for i in b if i.numel > threshold])
        for b in buckets
    ]
    sizes = [sum(info.numel for info in bucket) for bucket in buckets]
    levels = [
        [Level(whole, float(size)), Level(part, 0.0)]
        for whole, part, size in zip(dense, sparse, sizes, strict=True)
    ]
    fastest = find_fastest(conditions, levels)
    found = find_best(conditions, levels, NEAR * fastest.step_s)
    exempt = sum(info.numel for info in infos if info.numel <= threshold)
    none, everywhere, published = (
        f"{1e3 * predict_step(conditions, costs).step_s:.1f}" for costs in (dense, sparse, by_size)
    )
    shares = [f"{part / sum(sizes):.0%}" for part in (found.kept, exempt)]
    return [none, everywhere, f"{1e3 * found.step_s:.1f}", shares[0], published, shares[1]]


if __name__ == "__main__":
    main()
