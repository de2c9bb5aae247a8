"""Index codes inside the payload: any order of picks, places left over, sizes known from shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.exchange.ranks import Ranks
from thinwire.bench.payloads import make_flags, make_picks, make_table
from thinwire.errors import WireError
from thinwire.exchange.all_gather import AllGather
from thinwire.layout import RowTable
from thinwire.select.base import Picks
from thinwire.select.topk import AllDimensionTopK
from thinwire.wire.codec import Codec
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

SHAPES = [
    [(1, 1, 1)],
    [(3, 5, 2), (1, 1000, 10), (2, 1, 1)],
    [(7, 576, 5), (2, 64, 40), (1, 70000, 30), (1, 65536, 3)],
    [(4, 1024, 10), (1, 9, 9), (2, 300, 3), (6, 1024, 10)],
]


def dense(table: RowTable, positions: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(table.numel).index_add_(0, positions, values)


def make_codec(table: RowTable, values: str, indices: str) -> Codec:
    return Codec(table, VALUE_CODES[values], INDEX_CODES[indices])


@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_picks_come_back_exactly(indices: str, shapes: list[tuple[int, int, int]]) -> None:
    table = make_table(shapes)
    codec = make_codec(table, "fp32", indices)
    picks = make_picks(table, torch.randn(table.numel))
    payload, sent = codec.encode(picks, make_flags(table, torch.device("cpu")))
    positions, values = codec.decode(payload)
    assert payload.numel() == codec.nbytes
    assert torch.equal(positions, table.positions(picks.indices))
    assert torch.equal(values, picks.values) and torch.equal(sent, picks.values)


@pytest.mark.parametrize("values", VALUE_CODES)
@pytest.mark.parametrize("indices", INDEX_CODES)
def test_any_order_within_a_row(values: str, indices: str) -> None:
    table = make_table(SHAPES[2])
    codec = make_codec(table, values, indices)
    picks = make_picks(table, torch.randn(table.numel))
    order = torch.cat(
        [
            start + row * rows.keep + torch.randperm(rows.keep)
            for start, rows in zip(table.entry_starts, table.rows, strict=False)
            for row in range(rows.count)
        ]
    )
    shuffled = Picks(picks.values[order], picks.indices[order])
    payload, sent = codec.encode(shuffled, make_flags(table, torch.device("cpu")))
    claimed = dense(table, table.positions(shuffled.indices), sent)
    assert torch.equal(dense(table, *codec.decode(payload)), claimed)


@pytest.mark.parametrize("values", [name for name, code in VALUE_CODES.items() if code.has_zero])
@pytest.mark.parametrize("indices", INDEX_CODES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_places_left_over_add_nothing(values: str, indices: str, data: st.DataObject) -> None:
    table = make_table(data.draw(st.sampled_from(SHAPES)))
    codec = make_codec(table, values, indices)
    picks = make_picks(table, torch.randn(table.numel))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    taken = torch.rand(table.entries, generator=generator) < data.draw(st.sampled_from([0, 0.5, 1]))
    counts = torch.stack([taken[table.slot_slice(i)].sum() for i in range(len(table.rows))]).int()
    partly = Picks(
        torch.where(taken, picks.values, 0.0), torch.where(taken, picks.indices, 0), counts
    )
    payload, sent = codec.encode(partly, make_flags(table, torch.device("cpu")))
    assert torch.equal(codec.read_headers(payload[None]).counts[0], counts)
    claimed = dense(table, table.positions(partly.indices), sent)
    assert torch.equal(dense(table, *codec.decode(payload)), claimed)


@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("values", VALUE_CODES)
def test_sizes_add_up(values: str, indices: str) -> None:
    """What the ledger books per slot and as control is the payload, to the byte."""
    for shapes in SHAPES:
        table = make_table(shapes)
        codec = make_codec(table, values, indices)
        bits = sum(r.entries * (codec.values.bits + codec.indices.bits(r)) for r in table.rows)
        assert 0 <= codec.nbytes - codec.control_bytes <= codec.nbytes
        assert abs(codec.control_bytes + bits / 8 - codec.nbytes) < 1


def test_packed_takes_just_enough_bits() -> None:
    for length, width in [(1, 0), (2, 1), (3, 2), (576, 10), (1024, 10), (1025, 11), (65537, 17)]:
        table = make_table([(32, length, 1)])
        assert INDEX_CODES["packed"].bits(table.rows[0]) == width
        assert INDEX_CODES["packed"].nbytes(table) == 4 * width


@pytest.mark.parametrize("indices", ["int32", "auto", "packed"])
def test_index_outside_its_row_is_refused(indices: str) -> None:
    table = make_table([(2, 100, 3)])
    codec = make_codec(table, "fp32", indices)
    picks = make_picks(table, torch.randn(table.numel))
    payload, _ = codec.encode(picks, make_flags(table, torch.device("cpu")))
    payload[codec.indices_at : codec.indices_at + 2] = 0xFF
    with pytest.raises(WireError, match="outside its row"):
        codec.decode(payload)


@pytest.mark.parametrize("indices", INDEX_CODES)
def test_header_is_strict(indices: str) -> None:
    table = make_table(SHAPES[1])
    codec = make_codec(table, "int4", indices)
    picks = make_picks(table, torch.randn(table.numel))
    honest, _ = codec.encode(picks, make_flags(table, torch.device("cpu")))
    changes = [(0, "version"), (1, "unknown flags"), (2, "number of slots")]
    changes += [(3, "number of entries"), (4, "format checksum"), (5, "counts more entries")]
    for word, complaint in changes:
        payload = honest.clone()
        payload[: 4 * codec.header_words].view(torch.int32)[word] += 64
        with pytest.raises(WireError, match=complaint):
            codec.read_headers(payload[None])
    for wrong in (honest[:-1], torch.cat([honest, honest[:1]]), honest[:0]):
        with pytest.raises(WireError, match="bytes where"):
            codec.read_headers(wrong[None])
        with pytest.raises(WireError, match="bytes where"):
            codec.decode(wrong)


def test_payload_of_another_format_is_refused() -> None:
    table = make_table([(8, 256, 2)])
    picks = make_picks(table, torch.randn(table.numel))
    bf16, fp16 = make_codec(table, "bf16", "auto"), make_codec(table, "fp16", "auto")
    payload, _ = bf16.encode(picks, make_flags(table, torch.device("cpu")))
    assert bf16.nbytes == fp16.nbytes
    with pytest.raises(WireError, match="format checksum"):
        fp16.read_headers(payload[None])


@pytest.mark.parametrize("indices", ["packed", "rice"])
@pytest.mark.parametrize("values", VALUE_CODES)
def test_exchange_conserves_with_every_code(values: str, indices: str) -> None:
    """Three ranks, three steps: contribution + residual = c on each rank, world x update = sum of contributions."""
    ranks = Ranks(
        AllGather(),
        3,
        shapes=((20, 300), (2000,), (7, 5)),
        values=values,
        select=AllDimensionTopK(0.05),
    )
    for compressor in ranks.compressors:
        compressor.indices = INDEX_CODES[indices]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        step = ranks.step([torch.randn(8035, generator=generator) for _ in range(3)])
        for before, after, accepted in zip(step.before, step.after, step.accepted, strict=True):
            if values == "sign":
                torch.testing.assert_close(after + accepted, before, rtol=2.4e-7, atol=1e-6)
            else:
                assert torch.equal(after + accepted, before)
        torch.testing.assert_close(3 * step.update, sum(step.accepted), rtol=1e-6, atol=1e-6)
        assert all(torch.equal(o.update, step.update) for o in step.outcomes)
