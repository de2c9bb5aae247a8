"""Words per rank of every exchange on virtual ranks, against its formula: P = 256 on a laptop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.exchange_cases import (
    WORD,
    ExchangeCase,
    ExchangePlan,
    Worker,
    make_gradient,
    make_group,
)
from thinwire.engine import run_virtual
from thinwire.exchange import Place
from thinwire.observe import Ledger, Traffic


def measure_virtual(
    case: ExchangeCase, world: int, numel: int, measured: ExchangePlan
) -> tuple[dict[str, Any], list[Ledger]]:
    """(row, ledger of every rank): words of the busiest rank per step, the mean over ranks, how good the update is."""
    device = torch.device("cpu")
    method, steps = case.make(measured), measured.iters
    workers = [Worker(method, make_group(numel, device), Place(r, world)) for r in range(world)]
    k = max(1, int(numel * measured.density))
    busiest, means, contractions = [], [], []
    traffic = Traffic()
    books = [Ledger(world) for _ in workers]
    began = time.perf_counter()
    for step in range(steps):
        gradients = [make_gradient(numel, rank, step, device) for rank in range(world)]
        ledgers, update, compensated = _step(workers, gradients)
        totals = [ledger.total() for ledger in ledgers]
        words = [total.payload_bytes / WORD for total in totals]
        busiest.append(max(words))
        means.append(sum(words) / world)
        contractions.append(contraction(update, compensated, k))
        for book, ledger, total in zip(books, ledgers, totals, strict=True):
            book.include(ledger)
            traffic.add(total)
    sent = max(1, traffic.sent_bytes)
    formula = case.words(k, numel, world)
    row = {
        "method": case.name,
        "ranks": world,
        "count": numel,
        "k": k,
        "words": max(busiest),
        "words_mean": sum(means) / steps,
        "words_per_k": sum(means) / steps / k,
        "flat": sum(means) / steps / k * world / max(1, world - 1),
        "formula": case.formula,
        "formula_words": formula,
        "inside": max(means) <= formula + 2 * world,
        "padding": traffic.padding_bytes / sent,
        "control": traffic.control_bytes / sent,
        "messages": traffic.messages / world / steps,
        "wire_bytes": traffic.sent_bytes / world / steps,
        "dense_bytes": 2 * numel * (world - 1) / world * WORD,
        "contraction": sum(contractions[steps // 2 :]) / len(contractions[steps // 2 :]),
        "seconds": time.perf_counter() - began,
    }
    return row, books


def contraction(update: Tensor, compensated: Tensor, k: int) -> float:
    """What the update takes away of the mean compensated gradient, over what its k largest entries would; squared norms."""
    ideal = (compensated.abs().topk(k).values.double() ** 2).sum()
    whole = (compensated.double() ** 2).sum()
    left = ((compensated - update).double() ** 2).sum()
    return float((whole - left) / ideal)


def _step(
    workers: Sequence[Worker], gradients: Sequence[Tensor]
) -> tuple[list[Ledger], Tensor, Tensor]:
    """(ledger of each rank, update, mean of what the memories handed to selection)."""
    opened = [w.open(g.clone()) for w, g in zip(workers, gradients, strict=True)]
    # Nothing has been written off yet: a program begins with its first request.
    handed = [
        g if one.account is None else one.account.c
        for one, g in zip(opened, gradients, strict=True)
    ]
    compensated = torch.stack(handed).mean(0)
    ledgers = [Ledger(len(workers)) for _ in workers]
    outcomes = run_virtual([one.program for one in opened], ledgers)
    good = torch.zeros((), dtype=torch.bool)
    for one in opened:
        if one.account is not None:
            one.account.settle(good)
    return ledgers, outcomes[0].update, compensated
