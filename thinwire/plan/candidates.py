"""Candidates: what `tw.Auto` may choose from, and the evidence by which each is safe or not.

This is the one table of that evidence. A class says what is the boldest a candidate needs:

    safe       level with dense in runs of this repository, for that kind of optimizer (docs/learning.md)
    balanced   usual practice, or level in runs of others; not shown here for that kind of optimizer
    fastest    learns less per step than dense in our own runs, or was never compared
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.refresh import Refresh
from thinwire.methods.acpsgd import ACPSGD
from thinwire.methods.adam_scale import AdamScale
from thinwire.methods.adtopk import ADTopK
from thinwire.methods.base import ADAM_TAKEOVER, MOMENTUM_TAKEOVER, Dense, Method
from thinwire.methods.dgc import DGC
from thinwire.methods.exclusive import ExclusiveTopK
from thinwire.methods.oktopk import OkTopK
from thinwire.methods.quantized import Quantized
from thinwire.methods.topk import TopK

QUALITIES = ("safe", "balanced", "fastest")
SGD, ADAM, UNKNOWN = "sgd", "adam", "unknown"
"""Kinds of optimizers: SGD with momentum, Adam and its kin, anything else or none that was handed over."""

TAKEN_FROM = {SGD: MOMENTUM_TAKEOVER, ADAM: ADAM_TAKEOVER}
"""What methods can take over from the usual optimizers of a kind."""

DENSE = "dense"


@dataclass(frozen=True)
class Candidate:
    """A method under a short name, and what it keeps of a gradient."""

    label: str
    method: Method
    rounding: float = 0.0
    """Share of the squared sum that rounding takes away."""
    density: float | None = None
    """Fraction of the entries that arrive at once; None where all of them do."""

    def kept(self, curve: EnergyCurve) -> float:
        """Share of the squared sum that arrives at once."""
        share = 1.0 if self.density is None else curve.share(self.density)
        return share * (1 - self.rounding)


@dataclass(frozen=True)
class EnergyCurve:
    """Share of the squared sum in the largest entries, by the fraction of entries that they are."""

    points: tuple[tuple[float, float], ...]
    """(fraction of the entries, share), growing."""

    def share(self, density: float) -> float:
        below = (0.0, 0.0)
        for point in self.points:
            if point[0] >= density:
                width = point[0] - below[0]
                part = (density - below[0]) / width if width else 1.0
                return below[1] + part * (point[1] - below[1])
            below = point
        return 1.0


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    label: str
    make: Callable[[], Method]
    classes: Mapping[str, str]
    """The boldest class that it needs, by kind of optimizer; it is no candidate for kinds that are missing."""
    rounding: float = 0.0
    density: float | None = None
    least_workers: int = 2


def corrected(method: Callable[..., Method], density: float) -> Callable[[], Method]:
    """A sparse method with the optimizer's momentum before compression, not masked: what learns best under SGD."""
    return lambda: method(density=density, memory=MomentumCorrection(masking=False))


def in_adams_scale(method: Method, **settings: Any) -> Callable[[], Method]:
    """A method that takes Adam's step over at once: Auto waits until Adam has learned what to divide by."""
    return lambda: AdamScale(method=method, start=1, **settings)


def everywhere(quality: str) -> dict[str, str]:
    return dict.fromkeys((SGD, ADAM, UNKNOWN), quality)


def compared(quality: str) -> dict[str, str]:
    """For the kinds that runs of this repository compare; usual practice for the other."""
    return {SGD: quality, ADAM: quality, UNKNOWN: "balanced"}


_TABLE: list[Entry] = [
    Entry(DENSE, Dense, everywhere("safe")),
    # No run of this repository compares it; torch's own hook does the same.
    Entry("bf16", lambda: Dense(dtype=torch.bfloat16), everywhere("balanced"), rounding=1e-5),
    # docs/learning.md: 4 bits are level with SGD on CIFAR-10 after 30 epochs, and with AdamW on byte-level GPTs. 8 lose less.
    Entry("int8", lambda: Quantized(bits=8), compared("safe"), rounding=4e-5),
    Entry("int4", lambda: Quantized(bits=4), compared("safe"), rounding=0.012),
    # Behind dense where it was tried, by 3 and 11 % of the loss.
    Entry("int2", lambda: Quantized(bits=2), everywhere("fastest"), rounding=0.2),
    Entry("int1", lambda: Quantized(bits=1), everywhere("fastest"), rounding=0.4),
    # docs/learning.md: CIFAR-10, three seeds, 30 epochs, level at 1 % after epochs at higher densities. Auto has no such warm-up.
    Entry("adtopk-1%", corrected(ADTopK, 0.01), {SGD: "balanced"}, density=0.01),
    Entry("topk-1%", corrected(TopK, 0.01), {SGD: "balanced"}, density=0.01),
    Entry("topk-5%", corrected(TopK, 0.05), {SGD: "balanced"}, density=0.05),
    # Level is what has no masking, which is topk-1%. As published, with masking, it ended 0.4 points lower, from one seed.
    Entry("dgc-1%", lambda: DGC(density=0.01), {SGD: "fastest"}, density=0.01),
    # docs/learning.md: 0.75 points behind after 30 epochs, without masking.
    Entry("dgc-0.1%", corrected(DGC, 0.001), {SGD: "fastest"}, density=0.001),
    # docs/learning.md, "With Adam", small models: after a long dense start 1 bit with sums in 4 is level, with sums in 1 bit up to 4 %
    # behind dense, which is 2.8 bits per element against 1.3; top-k 1 % is 1 to 5 % behind; 4 bits in Adam's scale were not compared.
    Entry("adam-int4", in_adams_scale(Quantized(bits=4)), {ADAM: "fastest"}, rounding=0.012),
    Entry(
        "adam-int1",
        in_adams_scale(Quantized(bits=1, sum_bits=4), divisor=Refresh(every=50), limit=3.0),
        {ADAM: "fastest"},
        rounding=0.4,
    ),
    Entry("adam-topk-1%", in_adams_scale(TopK(density=0.01)), {ADAM: "fastest"}, density=0.01),
    # A plain residual: 2.9 points behind after 15 epochs of CIFAR-10, far behind with Adam.
    Entry("adtopk-residual-1%", lambda: ADTopK(density=0.01), everywhere("fastest"), density=0.01),
    Entry("topk-residual-5%", lambda: TopK(density=0.05), everywhere("fastest"), density=0.05),
    Entry(
        "adtopk-residual-0.1%", lambda: ADTopK(density=0.001), everywhere("fastest"), density=0.001
    ),
    # docs/learning.md: OkTopK 0.7 points behind after 30 epochs; ExclusiveTopK was not compared there.
    Entry("oktopk-1%", lambda: OkTopK(density=0.01), everywhere("fastest"), 0.0, 0.01, 16),
    Entry(
        "exclusive-1%", lambda: ExclusiveTopK(density=0.01), everywhere("fastest"), 0.0, 0.01, 16
    ),
    # docs/learning.md: 1.8 points behind after 30 epochs. As many numbers as a few entries in a hundred would be.
    Entry("acpsgd-4", lambda: ACPSGD(rank=4), everywhere("fastest"), density=0.005),
]


def register_candidate(entry: Entry) -> None:
    """Add a line to the table; one with a known label replaces it."""
    _TABLE[:] = [line for line in _TABLE if line.label != entry.label]
    _TABLE.append(entry)


def find_candidates(
    quality: str, optimizer: str, world: int, *, takes_over: str | None = None
) -> list[Candidate]:
    """What may be chosen: no bolder than `quality` for that kind of optimizer, among so many workers.

    `takes_over` is what can be taken over from the optimizer, as `Method.takes_over` names it. Where Adam's step can be,
    what Adam itself would be misled by is no candidate.
    """
    boldest = QUALITIES.index(quality)
    found = []
    for line in _TABLE:
        needs = line.classes.get(optimizer)
        if needs is None or QUALITIES.index(needs) > boldest or world < line.least_workers:
            continue
        method = line.make()
        misled = takes_over == ADAM_TAKEOVER and not method.suits_adam
        if method.takes_over in (None, takes_over) and not misled:
            found.append(Candidate(line.label, method, line.rounding, line.density))
    return found


def families(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates that can work side by side: an optimizer's work is taken over for all parameters or for none."""
    plain = [one for one in candidates if one.method.takes_over is None]
    owners = [one for one in candidates if one.method.takes_over is not None]
    dense = [one for one in plain if one.method == Dense()]
    return [plain, *([[*dense, *owners]] if owners else [])]
