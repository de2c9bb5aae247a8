from __future__ import annotations

import pytest
import torch

from thinwire.engine.fusing import in_rank_order
from thinwire.engine.virtual import run_virtual
from thinwire.exchange.common import ask
from thinwire.exchange.requests import Place, Sum
from thinwire.exchange.sums import dense_mean
from thinwire.observe.ledger import Ledger


def buffers(world: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]


def ordered_sum(buffer: torch.Tensor, world: int):
    return in_rank_order(ask(Sum(buffer, "t")), lambda scope: world)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("numel", [1, 2, 3, 64, 101])
def test_ordered_sum_adds_in_rank_order_wherever_an_element_lies(world, numel):
    parts = buffers(world, numel)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected = expected + part
    sums = run_virtual([ordered_sum(p.clone(), world) for p in parts])
    assert all(torch.equal(total, expected) for total in sums)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_mean_divides_first_so_that_a_narrow_dtype_does_not_overflow(dtype, ordered):
    large = torch.full((9,), 0.9 * torch.finfo(dtype).max, dtype=dtype)
    programs = [dense_mean(large.clone(), Place(rank, 4), phase="t") for rank in range(4)]
    if ordered:
        programs = [in_rank_order(program, lambda scope: 4) for program in programs]
    means = run_virtual(programs)
    assert all(torch.equal(mean, large) for mean in means)


def test_alone_or_empty_nothing_travels():
    for buffer, world in ((torch.ones(3), 1), (torch.ones(0), 4)):
        program = dense_mean(buffer, Place(0, world), phase="t")
        with pytest.raises(StopIteration) as finished:
            next(program)
        assert finished.value.value is buffer


def test_ordered_sum_sends_what_a_ring_all_reduce_sends():
    world, numel = 4, 1000
    ledger = Ledger(world)
    parts = buffers(world, numel)
    run_virtual([ordered_sum(p, world) for p in parts], ledger)
    assert ledger.sent_bytes() == Sum(parts[0]).sent_bytes(world)
