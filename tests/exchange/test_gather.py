"""All-gather = all-gather-fast = dense reference, on virtual ranks and on gloo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contracts.cluster import Cluster, parameter, same_bits, sparse
from thinwire.engine.drivers import run_inline
from thinwire.engine.network import Network
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.base import Exchange, Offer
from thinwire.exchange.requests import Place, Program
from thinwire.layout import RowTable
from thinwire.memory.account import Account
from thinwire.observe.ledger import Ledger
from thinwire.select.topk import AllDimensionTopK
from thinwire.wire.codec import Codec, Flags
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

COLUMNS = 24


def make_program(
    exchange: Exchange, rank: int, world: int, keep: int, values: str
) -> tuple[Program, Tensor, Account]:
    """One rank's program over a small matrix; (program, c, account)."""
    slot = parameter("p", (5, COLUMNS)).slot(0)
    selector = AllDimensionTopK(keep / COLUMNS)
    rows = selector.rows(slot).keeping(keep)
    codec = Codec(RowTable([rows], slot.numel), VALUE_CODES[values], INDEX_CODES["auto"])
    c = torch.randn(slot.numel, generator=torch.Generator().manual_seed(rank))
    account = Account(c.clone())
    flags = Flags(torch.tensor(False), torch.tensor([True]))
    offer = Offer(
        account,
        selector.session().turn(None),
        codec,
        flags,
        Place(rank, world),
        "test",
    )
    return exchange.run(offer), c, account


def dense_reference(cs: list[Tensor], keep: int, values: str) -> Tensor:
    """Top-k of each row as a dense tensor, summed in rank order, times 1 / world."""
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[values]
    total = torch.zeros(5, COLUMNS)
    for c in cs:
        matrix = c.view(5, COLUMNS)
        places = matrix.abs().sort(dim=1, descending=True, stable=True).indices[:, :keep]
        total += torch.zeros_like(matrix).scatter(1, places, matrix.gather(1, places)).to(wire)
    return total.mul_(1 / len(cs)).view(-1)


@pytest.mark.parametrize("values", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_both_gathers_equal_the_dense_reference_bit_for_bit(world, values):
    # 24 / world makes workers x k = n where it divides, and its neighbours do not.
    for keep in {1, 24 // world, 24 // world - 1, 24}:
        keep = max(keep, 1)
        results = []
        for exchange in (tw.exchange.AllGatherPlain(), tw.exchange.AllGather()):
            made = [make_program(exchange, rank, world, keep, values) for rank in range(world)]
            outcomes = run_virtual([program for program, _, _ in made])
            assert all(same_bits(o.update, outcomes[0].update) for o in outcomes)
            for _, c, account in made:
                assert same_bits(account.accepted() + account.c, c)
            results.append(outcomes[0].update)
        expected = dense_reference([c for _, c, _ in made], keep, values)
        assert all(same_bits(update, expected) for update in results)


def gloo_job(rank: int, world: int) -> list[bytes]:
    updates = []
    for exchange in (tw.exchange.AllGatherPlain(), tw.exchange.AllGather()):
        program, _, _ = make_program(exchange, rank, world, 24 // world, "bf16")
        network = Network(torch.distributed.group.WORLD, Ledger(world))
        updates.append(run_inline(program, network).update.numpy().tobytes())
    return updates


@pytest.mark.parametrize("world", [3, 4])
def test_gloo_gives_the_bits_of_virtual_ranks(pools, world):
    made = [
        make_program(tw.exchange.AllGatherPlain(), rank, world, 24 // world, "bf16")
        for rank in range(world)
    ]
    expected = run_virtual([program for program, _, _ in made])[0].update.numpy().tobytes()
    assert all(result == [expected] * 2 for result in pools(world).run(gloo_job))


def test_slot_without_a_gradient_on_any_rank_gets_no_update():
    cluster = Cluster(2, sparse("bf16"))
    cluster.step(cluster.random(0))
    held = cluster.residuals(0)["linear"]
    zeros = [{name: torch.zeros_like(g) for name, g in r.items()} for r in cluster.random(0)]
    assert not cluster.step(zeros)[0]["linear"].any()
    assert same_bits(cluster.residuals(0)["linear"], held)
    zeros[1]["linear"][0, 0] = 1.0
    assert cluster.step(zeros)[0]["linear"].any()
