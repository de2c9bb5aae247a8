"""The multi-rank contracts on real ranks, for every method: NCCL on one GPU or many, gloo without.

    thinwire lab --hosts 4 --rate 10gbit --share-gpu --mps -- python -m tests.gpu.contracts --out verdicts.json
    torchrun --nproc-per-node 3 -m tests.gpu.contracts --device cpu adtopk

Checks: replicas stay bit-identical; nothing is lost; training resumes bit for bit; a non-finite gradient is seen by
every rank and poisons nothing. How verdicts are kept: `tests/gpu/seats.py`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import thinwire as tw
from tests.gpu.seats import NAMED, Check, Seat, Skip, make_method, run_script
from tests.models import batches, make_cnn

STEPS = 12
MOMENTUM = 0.9
LEARNING_RATE = 0.02
TOLERANCE = 1e-6
POISONED = "6.weight"
LOSSY = {
    "gtopk": "as published it drops what an inner merge of the tree drops",
    "signsgd": "it keeps no memory",
}
"""Lossy by design, and why."""


class Training:
    """A small network in training under one method; local gradients can be looked at."""

    def __init__(
        self, seat: Seat, name: str, *, deterministic: bool = False, bucket_kb: int = 20
    ) -> None:
        self.seat = seat
        self.model = make_cnn().to(seat.device)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_kb / 1024)
        rate = LEARNING_RATE * NAMED[name].lr_scale
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=rate, momentum=MOMENTUM)
        self.method = make_method(name)
        self.handle = tw.attach(
            self.ddp, self.method, optimizer=self.optimizer, deterministic=deterministic
        )
        self.local: dict[str, Tensor] = {}
        self.poison: float | None = None
        for parameter_name, parameter in self.model.named_parameters():
            parameter.register_hook(lambda g, n=parameter_name: self._see(n, g))

    def _see(self, name: str, gradient: Tensor) -> Tensor:
        """This rank's own gradient, before anything is exchanged; spoiled in one element if asked for."""
        if name == POISONED and self.poison is not None:
            gradient = gradient.clone()
            gradient.view(-1)[7] = self.poison
        self.local[name] = gradient.detach().clone()
        return gradient

    def backward(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = (tensor.to(self.seat.device) for tensor in batch)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(images), labels).backward()

    def train(self, data: Iterable[tuple[Tensor, Tensor]]) -> None:
        for batch in data:
            self.backward(batch)
            self.optimizer.step()

    def held(self) -> dict[str, Tensor]:
        """What is held back of every compressed parameter."""
        names = [row.info.name for row in self.handle.plan() if not row.dense]
        assert names, "nothing is compressed"
        return {name: self.handle.residual(name) for name in names}

    def due(self) -> dict[str, Tensor]:
        """What memory alone would hand to selection now: residual + momentum x the momentum kept here."""
        due = {}
        for name, held in self.held().items():
            momentum = self.handle.reducer.assignments.held(name, "momentum")
            due[name] = held.double() + (0.0 if momentum is None else MOMENTUM * momentum.double())
        return due

    def flat(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def close(self) -> None:
        self.handle.close()


def check_replicas(seat: Seat, name: str) -> None:
    """All ranks hold the same bits after every step, and the parameters move."""
    training = Training(seat, name)
    seen = []
    for batch in batches(seat.rank, STEPS):
        training.train([batch])
        seen.append(training.flat())
    assert training.handle.stats().steps == STEPS
    training.close()
    raw = [bytes(flat.view(torch.uint8).tolist()) for flat in seen]
    prints = [hashlib.sha1(bits).hexdigest() for bits in raw]
    assert len(set(prints)) == STEPS, "the parameters stood still"
    for rank, other in enumerate(seat.gather(prints)):
        for step, (ours, theirs) in enumerate(zip(prints, other, strict=True)):
            assert ours == theirs, f"rank {rank} differs from rank {seat.rank} in step {step}"


def check_conservation(seat: Seat, name: str) -> str:
    """In every step: world x update + sum of residuals = sum of what memory handed out."""
    if name in LOSSY:
        raise Skip(f"lossy by design: {LOSSY[name]}")
    training, worst = Training(seat, name), 0.0
    for batch in batches(seat.rank, 8):
        if name == "dense":
            due = {n: torch.zeros_like(p) for n, p in training.model.named_parameters()}
        else:
            due = training.due()
        training.backward(batch)
        after = {} if name == "dense" else training.held()
        for parameter_name, before in due.items():
            c = before.double() + training.local[parameter_name].double()
            held = after[parameter_name].double() if after else torch.zeros_like(c)
            c, held = _sum_over_ranks(c, held)
            update = training.model.get_parameter(parameter_name).grad
            assert update is not None
            lost = (seat.world * update.double() + held - c).abs().sum() / c.abs().sum()
            worst = max(worst, float(lost))
            assert lost <= TOLERANCE, f"{parameter_name} lost {float(lost):.2e} of its gradient"
    training.close()
    return f"at most {worst:.1e}"


def check_resume(seat: Seat, name: str) -> None:
    """Training, stopping and resuming in other buckets gives the bits of training through."""
    data = list(batches(seat.rank, 8))
    through = Training(seat, name, deterministic=True)
    through.train(data[:4])
    file = io.BytesIO()
    state = {
        "model": through.model.state_dict(),
        "optimizer": through.optimizer.state_dict(),
        "handle": through.handle.state_dict(),
    }
    torch.save(state, file)
    through.train(data[4:])

    resumed = Training(seat, name, deterministic=True, bucket_kb=4)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.handle.load_state_dict(state["handle"])
    resumed.train(data[4:])
    assert torch.equal(resumed.flat(), through.flat()), "the parameters differ"
    if name != "dense":
        held = through.held()
        for parameter_name, values in resumed.held().items():
            assert torch.equal(values, held[parameter_name]), f"{parameter_name}: residuals differ"
    resumed.close()
    through.close()


def check_non_finite(seat: Seat, name: str) -> None:
    """One infinite element on one rank: every rank sees it, nothing of it stays, and nothing finite is lost."""
    training = Training(seat, name)
    data = list(batches(seat.rank, 6))
    training.train(data[:3])
    keeps = name != "dense" and name != "signsgd"
    due = training.due() if keeps else {}
    training.poison = torch.inf if seat.rank == min(1, seat.world - 1) else None
    training.backward(data[3])
    training.poison = None
    bad = [n for n, p in training.model.named_parameters() if not p.grad.isfinite().all()]
    assert POISONED in bad and all(other == bad for other in seat.gather(bad)), f"seen in {bad}"
    for parameter_name, before in due.items():
        held = training.handle.residual(parameter_name).double()
        assert held.isfinite().all(), f"the residual of {parameter_name} was poisoned"
        local = training.local[parameter_name].double()
        c, held = _sum_over_ranks(before + torch.where(local.isfinite(), local, 0.0), held)
        lost = (held - c).abs().sum() / c.abs().sum()
        assert lost <= TOLERANCE, f"{parameter_name} lost {float(lost):.2e} in the bad step"
    training.train(data[4:])
    for parameter_name, parameter in training.model.named_parameters():
        assert parameter.isfinite().all(), f"{parameter_name} was poisoned"
    training.close()


def _sum_over_ranks(*tensors: Tensor) -> Tensor:
    both = torch.stack(tensors)
    dist.all_reduce(both)
    return both


CHECKS: dict[str, Check] = {
    "replicas": check_replicas,
    "conservation": check_conservation,
    "resume": check_resume,
    "non-finite": check_non_finite,
}

if __name__ == "__main__":
    run_script("The multi-rank contracts of every method.", CHECKS, list(NAMED))
