"""What exchanges cost as workers become more: the collectives that they ask for, at prices fitted to measured steps.

    python3 benchmarks/exchange_scaling.py                          # BERT-large, 10 Gbit/s, 4 to 256 workers
    python3 benchmarks/exchange_scaling.py --rate 25gbit --workers 8,32

The link (share of its nominal rate, latency of a hop, the host's work per bucket, encoding) is fitted to the rows of
benchmarks/results/h200_step, as in plan_rows.py. Every exchange is rehearsed on the model's shapes, in merged buckets, by one of P
workers; its requests know their bytes. Prints a Markdown table: ms of the collectives of a step one after another, and in
brackets how many times a step without communication the whole step would take. All methods are charged the encoding of ADTopK.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from plan_rows import FIRST_MB, MERGED_MB, RATES, Case, cut, fit, load_cases  # noqa: E402

import thinwire as tw  # noqa: E402
from thinwire.auto.rehearsal import Traffic  # noqa: E402
from thinwire.bench.models import build_workload  # noqa: E402
from thinwire.layout import describe_module  # noqa: E402
from thinwire.plan.prices import LinkPrices  # noqa: E402

METHODS = {
    "adtopk": tw.ADTopK(density=0.01),
    "topk": tw.TopK(density=0.01),
    "oktopk": tw.OkTopK(density=0.01),
    "exclusive": tw.ExclusiveTopK(density=0.01),
    "gtopk": tw.GTopK(density=0.01),
    "topkdsa": tw.TopKDSA(density=0.01),
}
SILENT_MS = 82.0
"""A step of BERT-large without communication on the H200 that the rows were measured on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--rate", default="10gbit", choices=RATES)
    parser.add_argument("--workers", default="4,16,64,256")
    given = parser.parse_args()
    link = fit(load_cases(ROOT / "benchmarks/results/h200_step/rows.json"))
    model, _ = build_workload(given.model, torch.device("meta"), 1, 384, 0)
    infos = [info for _, info in describe_module(model).values()]
    buckets = cut(infos, itertools.chain([FIRST_MB], itertools.repeat(MERGED_MB)))
    print(
        f"{given.model}, {len(buckets)} merged buckets, {given.rate}: {100 * link.share:.0f} % of it, "
        f"{1e6 * link.hop_s:.0f} us per hop\n"
    )
    print("| workers | " + " | ".join(METHODS) + " |")
    print("|---|" + "---|" * len(METHODS))
    for workers in map(int, given.workers.split(",")):
        traffic = Traffic(workers)
        prices = LinkPrices(RATES[given.rate] * link.share, link.hop_s, workers)
        cells = []
        for name, method in METHODS.items():
            rounds = [traffic.rounds(bucket, method) for bucket in buckets]
            alone = 1e3 * sum(map(prices.seconds, rounds))
            row = {"rate": given.rate, "workers": workers, "method": name, "no_sync_ms": SILENT_MS}
            exposed = Case(row, buckets, rounds).predict_ms(link)
            cells.append(f"{alone:.0f} ({1 + exposed / SILENT_MS:.2f}x)")
        print(f"| {workers} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
