"""Suites: the benchmark matrices of papers, as lists of cells.

acpsgd: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning" (ICDCS'23):
S-SGD, PowerSGD and ACP-SGD on four models, with sweeps of bucket size, batch, rank, workers and network. The paper
used 32 GPUs on 1GbE, 10GbE and 100 Gbit/s InfiniBand; the last is an unshaped lab here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thinwire.bench.step_cell import StepCell, plan_cell, unique
from thinwire.lab.rates import UNSHAPED
from thinwire.tools.settings.names import check_name

SENTENCE = 64
NETWORKS = ("10gbit", "1gbit", UNSHAPED)
BUCKETS_MB = (0, 25, 50, 100, 500, 1000, 1500)
BATCHES = (8, 16, 24, 32)
RANKS = (4, 32, 64, 128, 256)
WORKERS = (2, 4, 8, 16, 32, 64)

ACPSGD_METHODS = ("noop", "ddp", "ddp-powersgd", "powersgd", "acpsgd")
"""S-SGD is DDP; PowerSGD as torch has it (the paper's baseline) and as thinwire has it."""

ACPSGD_MODELS: tuple[dict[str, Any], ...] = (
    {"model": "resnet50", "rank": 4, "batch": 64},
    {"model": "resnet152", "rank": 4, "batch": 32},
    {"model": "bert-base", "rank": 32, "batch": 32, "length": SENTENCE},
    {"model": "bert-large", "rank": 32, "batch": 8, "length": SENTENCE},
)


def plan_acpsgd(
    *, workers: int, rates: Sequence[str] = NETWORKS, model: str | None = None, **settings: Any
) -> list[StepCell]:
    """The paper's matrix; `model` takes the place of all its models.

    1. Every model on every network.
    2. Bucket sizes and ranks with BERT-large, batches with ResNet-152, on the first network.
    3. Numbers of workers up to `workers`, every model.
    """
    first = rates[0]
    models = [{**entry, "model": model or entry["model"]} for entry in ACPSGD_MODELS]
    _, resnet, _, bert = models
    plans: list[dict[str, Any]] = [
        {**entry, "rate": rate, "workers": workers} for rate in rates for entry in models
    ]
    base = {"rate": first, "workers": workers}
    plans += [{**bert, **base, "bucket_mb": float(size)} for size in BUCKETS_MB]
    plans += [{**resnet, **base, "batch": batch} for batch in BATCHES]
    plans += [{**bert, **base, "rank": rank} for rank in RANKS]
    plans += [
        {**entry, "rate": first, "workers": count}
        for count in WORKERS
        if count <= workers
        for entry in models
    ]
    return unique(
        plan_cell(**plan, method=method, **settings) for plan in plans for method in ACPSGD_METHODS
    )


SUITES: dict[str, Callable[..., list[StepCell]]] = {"acpsgd": plan_acpsgd}


def find_suite(name: str) -> Callable[..., list[StepCell]]:
    check_name("suite", name, SUITES)
    return SUITES[name]
