"""The codec on an accelerator: the same bytes as on the CPU, no host wait, corrupt entries masked and marked."""

from __future__ import annotations

import random

import pytest
import torch

from thinwire.bench.payloads import FUZZ_SHAPES, make_flags, make_picks, make_table, spoil
from thinwire.errors import WireError
from thinwire.select.base import Picks
from thinwire.wire.codec import Codec
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("values", VALUE_CODES)
def test_cuda_writes_the_same_bytes_without_waiting(values: str, indices: str) -> None:
    table = make_table([(7, 576, 5), (2, 64, 40), (1, 70_000, 700), (30, 1024, 10)])
    codec = Codec(table, VALUE_CODES[values], INDEX_CODES[indices])
    c = torch.randn(table.numel)
    here = make_picks(table, c)
    expected, sent = codec.encode(here, make_flags(table, c.device))
    there = Picks(here.values.cuda(), here.indices.cuda())
    flags = make_flags(table, there.values.device)
    codec.decode(codec.encode(there, flags)[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        payload, sent_there = codec.encode(there, flags)
        header = codec.read_headers(payload[None])
        positions, decoded = codec.decode(payload)
        noise = payload.clone()
        noise[codec.indices_at :] = 0xFF
        masked, marked = codec.decode(noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(payload.cpu(), expected) and torch.equal(sent_there.cpu(), sent)
    assert (
        torch.equal(positions.cpu(), table.positions(here.indices)) and not header.non_finite.any()
    )
    assert torch.equal(decoded, sent_there)
    assert int(masked.min()) >= 0 and int(masked.max()) < table.numel
    assert bool(marked.isnan().any())


@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("values", VALUE_CODES)
def test_places_left_over_and_any_order_on_cuda(values: str, indices: str) -> None:
    table = make_table([(1, 5000, 60), (1, 64, 40), (1, 576, 5)])
    codec = Codec(table, VALUE_CODES[values], INDEX_CODES[indices])
    full = make_picks(table, torch.randn(table.numel))
    counts = torch.tensor([33, 40, 1], dtype=torch.int32)
    taken = torch.cat(
        [torch.arange(n) < count for n, count in zip((60, 40, 5), counts, strict=True)]
    )
    picks = Picks(torch.where(taken, full.values, 0.0), torch.where(taken, full.indices, 0), counts)
    picks.indices[:33] = picks.indices[:33].flip(0)
    expected, sent = codec.encode(picks, make_flags(table, torch.device("cpu")))
    there = Picks(picks.values.cuda(), picks.indices.cuda(), counts.cuda())
    payload, sent_there = codec.encode(there, make_flags(table, there.values.device))
    assert torch.equal(payload.cpu(), expected) and torch.equal(sent_there.cpu(), sent)
    positions, decoded = codec.decode(payload)
    update = torch.zeros(table.numel).index_add_(0, positions.cpu(), decoded.cpu())
    claimed = torch.zeros(table.numel).index_add_(0, table.positions(picks.indices), sent)
    assert torch.equal(update, claimed)


@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("values", VALUE_CODES)
def test_spoiled_payloads_stay_inside_their_bounds_on_cuda(values: str, indices: str) -> None:
    table = make_table(FUZZ_SHAPES[2])
    codec = Codec(table, VALUE_CODES[values], INDEX_CODES[indices])
    picks = make_picks(table, torch.randn(table.numel))
    honest, _ = codec.encode(picks, make_flags(table, torch.device("cpu")))
    first = table.positions(torch.zeros_like(picks.indices))
    last = table.positions(table.row_lengths(honest.device).long() - 1)
    draw = random.Random(5)
    for _ in range(60):
        payload = spoil(honest, codec.values_at, draw)
        if payload.numel() != codec.nbytes:
            continue
        header = codec.read_headers(payload.cuda()[None])
        positions, decoded = (tensor.cpu() for tensor in codec.decode(payload.cuda()))
        assert bool(((positions >= first) & (positions <= last)).all())
        marked = bool(decoded.isnan().any()) or bool(header.non_finite.any())
        try:
            codec.read_headers(payload[None])
            codec.decode(payload)
        except WireError:
            assert marked
