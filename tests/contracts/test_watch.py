"""Replicas are watched: one that drifts from the others is named, and repaired if that was asked for."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.adapters import ADAPTERS, make
from tests.models import batches, fingerprint, make_cnn
from thinwire.engine.replicas import Sighting, compare
from thinwire.kernels import fingerprint as prints

METHODS = {
    "ADTopK": tw.ADTopK(density=0.05, dense_fallback=False),
    "Dense": tw.Dense(),
    "DGC": tw.DGC(density=0.05, dense_fallback=False),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
    "OkTopK": tw.OkTopK(density=0.05, dense_fallback=False),
}
EVERY = 3


# -- fingerprints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_single_bit_counts(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 7, generator=generator).to(dtype)
    seen = {int(prints.fingerprint([values]))}
    for byte in range(values.nbytes):
        for bit in range(8):
            other = values.clone()
            other.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            seen.add(int(prints.fingerprint([other])))
    assert len(seen) == 1 + 8 * values.nbytes


def test_fingerprints_know_the_order_and_not_the_layout():
    a, b = torch.randn(3, 4), torch.randn(2, 3, 4, 5)
    assert int(prints.fingerprint([a, b])) != int(prints.fingerprint([b, a]))
    assert int(prints.fingerprint([a, b])) == int(prints.fingerprint([a.clone(), b.clone()]))
    last = b.to(memory_format=torch.channels_last)
    assert prints.flat_in_memory_order(last).data_ptr() == last.data_ptr()
    assert int(prints.fingerprint([a[:, ::2]])) == int(prints.fingerprint([a[:, ::2].clone()]))
    assert int(prints.fingerprint([])) == 0 == int(prints.fingerprint([torch.zeros(0)]))


def test_long_tensors_are_worked_on_in_chunks():
    values = torch.randn(10_000)
    rows = values.view(torch.uint8).view(2, -1)
    found = set()
    for _ in range(2):
        found.add(int(prints.fingerprint([values], chunk=64)))
        found |= set(prints.row_fingerprints(rows, chunk=64).tolist())
        values[7000], values[7064] = values[7064].item(), values[7000].item()
    assert len(found) == 5  # the first row is the same


def test_bytes_that_do_not_come_in_fours():
    values = torch.arange(21, dtype=torch.uint8)
    assert int(prints.row_fingerprints(values[None, 1:])) == int(
        prints.row_fingerprints(values[1:].clone()[None])
    )


# -- who differs -------------------------------------------------------------------------------------------------


def test_the_minority_is_named():
    def found(*words: int):
        return compare([Sighting(rank, word, 0, True) for rank, word in enumerate(words)], 4)

    assert found(5, 5, 5, 5) is None
    assert found(5, 6, 5, 5).ranks == (1,) and found(5, 6, 5, 5).majority == (0, 2, 3)
    assert found(5, 6, 5, 7).majority == () and found(5, 6, 5, 7).ranks == (0, 1, 2, 3)


def test_ranks_that_stand_aside_are_not_compared():
    there = [Sighting(0, 5, 1, True), Sighting(1, 5, 1, True), Sighting(2, 9, 0, False)]
    assert compare(there, 3) is None
    found = compare([*there[:1], Sighting(1, 6, 1, True), there[2]], 3)
    assert found.ranks == (0, 1) and not found.everybody


# -- on real ranks -----------------------------------------------------------------------------------------------


def flip(tensor: Tensor, at: int = 3, bit: int = 22) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[at] ^= 1 << bit


def begin(adapter: str, method, momentum: float = 0.9, **options):
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    if adapter == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        return model, ddp, optimizer, tw.attach(ddp, method, optimizer=optimizer, **options)
    return model, *make(adapter, model, optimizer, method, bucket_kb=1, **options)


def steps(module, optimizer, rank: int, count: int) -> None:
    for inputs, targets in batches(rank, count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()


def raising_job(rank: int, world: int, adapter: str, name: str) -> str:
    model, module, optimizer, handle = begin(adapter, METHODS[name], watch=EVERY)
    steps(module, optimizer, rank, 4)
    if rank == 1:
        flip(model[0].weight)
    with pytest.raises(tw.ExchangeError) as caught:
        steps(module, optimizer, rank, EVERY)
    handle.close()
    return str(caught.value)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["ADTopK", "ACPSGD"])
def test_a_replica_that_drifts_is_named_by_every_rank(pools, adapter, name):
    said = set(pools(3).run(raising_job, adapter, name))
    assert len(said) == 1
    wanted = r"the replicas differ: rank 1 is not like the others from .*0\.weight.*; go back to a"
    assert re.match(wanted, said.pop())


def repaired_job(rank: int, world: int, adapter: str, name: str) -> tuple[str, str]:
    options = {"watch": EVERY, "on_difference": "repair"}
    model, module, optimizer, handle = begin(adapter, METHODS[name], **options)
    steps(module, optimizer, rank, 2)
    if rank == 2:
        # What damaged messages leave behind: another update, other momentum, other factors.
        assignments = handle.reducer.assignments
        shared = assignments.shared_state()
        for tensor in (*shared.values(), model[6].weight):
            flip(tensor, bit=20)
        assignments.load_shared_state(shared)
        flip(optimizer.state[model[3].weight].get("momentum_buffer", model[3].weight))
    before = fingerprint(model)
    steps(module, optimizer, rank, 2 * EVERY)
    handle.check_replicas()
    assert bool(handle.reducer.assignments.shared_state()) == (name in ("DGC", "ACPSGD"))
    handle.close()
    return before, fingerprint(model)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["Dense", "DGC", "ACPSGD", "ADTopK"])
def test_repaired_replicas_stay_alike(pools, adapter, name):
    replies = pools(3).run(repaired_job, adapter, name)
    assert len({before for before, _ in replies}) == 2
    assert len({end for _, end in replies}) == 1


def by_hand_job(rank: int, world: int) -> list[str]:
    model, module, optimizer, handle = begin("ddp", METHODS["ADTopK"], on_difference="repair")
    steps(module, optimizer, rank, 2)
    handle.check_replicas()
    if rank == 0:
        flip(model[0].weight)
    handle.check_replicas()
    ends = [fingerprint(model)]
    steps(module, optimizer, rank, 3)
    ends.append(fingerprint(model))
    handle.close()
    with pytest.raises(tw.UsageError, match="closed"):
        handle.check_replicas()
    return ends


def test_replicas_are_compared_and_repaired_when_asked(pools):
    assert len(set(map(tuple, pools(3).run(by_hand_job)))) == 1


def hopeless_job(rank: int, world: int, world_is_odd: bool) -> str:
    model = make_cnn()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    # Under DDP the optimizer was not passed in.
    options = {"watch": 1, "on_difference": "repair"}
    module, optimizer, handle = make("ddp", model, plain, METHODS["ADTopK"], **options)
    steps(module, optimizer, rank, 1)
    flip(model[0].weight, bit=10 + (rank if not world_is_odd else rank == 2))
    with pytest.raises(tw.ExchangeError) as caught:
        steps(module, optimizer, rank, 2)
    handle.close()
    return str(caught.value)


def test_without_a_majority_or_the_optimizer_it_raises(pools):
    (said,) = set(pools(2).run(hopeless_job, False))
    assert "ranks 0, 1 are not alike" in said and "nothing says which are right" in said
    (said,) = set(pools(3).run(hopeless_job, True))
    assert "rank 2 is not like the others" in said and "pass optimizer=" in said


def quiet_job(rank: int, world: int, adapter: str) -> tuple[int, int]:
    """The fingerprint travels with a payload: no collective more, 32 bytes per other rank more."""
    _, module, optimizer, handle = begin(adapter, METHODS["ADTopK"], watch=2)
    asked = []
    network = handle.reducer.driver.network
    perform = network.perform
    network.perform = lambda batch, what="": (asked.append(batch), perform(batch, what))[1]
    steps(module, optimizer, rank, 4)
    handle.close()
    phases = [getattr(one, "phase", "") for batch in asked for one in batch]
    return sum("replicas" in phase for phase in phases), phases.count("replicas")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_fingerprint_travels_with_a_payload(pools, adapter):
    assert pools(2).run(quiet_job, adapter) == [(2, 0)] * 2


def joined_job(rank: int, world: int) -> str:
    """Uneven inputs: who has joined stands still, and nobody takes that for a difference."""
    _, ddp, optimizer, handle = begin("ddp", METHODS["ADTopK"], watch=1)
    with ddp.join():
        steps(ddp, optimizer, rank, 3 + 2 * rank)
    dist.barrier()
    handle.check_replicas()
    handle.close()
    return "fine"


def test_ranks_that_have_joined_are_no_difference(pools):
    assert pools(2).run(joined_job) == ["fine"] * 2


def refusing_job(rank: int, world: int) -> list[str]:
    said = []
    for options in ({"watch": 0}, {"watch": "often"}, {"on_difference": "shrug"}):
        with pytest.raises(tw.UsageError) as caught:
            begin("ddp", METHODS["ADTopK"], **options)
        said.append(str(caught.value))
    with pytest.raises(tw.ExchangeError, match=r"watch differs between ranks: rank 0 has 5"):
        begin("optimizer", METHODS["ADTopK"], watch=5 + rank)
    return said


def test_settings_are_checked(pools):
    for said in pools(2).run(refusing_job):
        assert [one.split(" is ")[0] for one in said] == ["watch", "watch", "on_difference"]


def test_simulated_workers_share_their_parameters():
    simulation = tw.simulate(make_cnn(), METHODS["ADTopK"], workers=2)
    with pytest.raises(tw.UsageError, match="no replicas to compare"):
        simulation.handles[0].check_replicas()
