"""The packed payload: what goes in comes out, what was damaged is refused and written nowhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.contracts.cluster import parameter
from thinwire.engine.virtual import run_virtual
from thinwire.errors import WireError
from thinwire.exchange.all_gather import AllGather
from thinwire.exchange.base import Offer
from thinwire.exchange.requests import Gather, Place
from thinwire.layout import RowTable
from thinwire.memory.account import Account
from thinwire.select.base import Picks, Turn
from thinwire.select.topk import AllDimensionTopK, TradTopK
from thinwire.wire.codec import FIXED_WORDS, Codec, Flags
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

FLOATS = ["fp32", "bf16", "fp16"]
INDICES = ["int32", "auto"]
QUICK = settings(max_examples=40, deadline=None)


def make_codec(values: str = "fp32", indices: str = "auto", density: float = 0.1) -> Codec:
    """A slot of short rows and one whose single row needs more than 16 bits."""
    short = AllDimensionTopK(density).rows(parameter("short", (6, 40)).slot(0))
    long = TradTopK(density / 100).rows(parameter("long", (300, 300)).slot(240))
    return Codec(RowTable([short, long], 240 + 90_000), VALUE_CODES[values], INDEX_CODES[indices])


def make_flags(non_finite: bool = False, slots: int = 2) -> Flags:
    return Flags(torch.tensor(non_finite), torch.tensor([True, False][:slots]))


def random_picks(codec: Codec, seed: int) -> tuple[Tensor, Picks]:
    generator = torch.Generator().manual_seed(seed)
    c = torch.randn(codec.table.numel, generator=generator)
    select = TradTopK(0.1)
    return c, select.pick(c, codec.table)


@pytest.mark.parametrize("values", FLOATS)
@pytest.mark.parametrize("indices", INDICES)
def test_payload_holds_what_was_encoded(values, indices):
    codec = make_codec(values, indices)
    c, picks = random_picks(codec, 0)
    payload, sent = codec.encode(picks, make_flags(non_finite=True))
    assert payload.dtype == torch.uint8 and payload.numel() == codec.nbytes
    positions, decoded = codec.decode(payload)
    assert torch.equal(decoded, sent)
    assert torch.equal(positions, codec.table.positions(picks.indices))
    wide = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[values]
    assert torch.equal(decoded, c[positions].to(wide).float())
    header = codec.read_headers(payload[None])
    assert header.non_finite.tolist() == [True]
    assert header.had_gradient.tolist() == [[True, False]]
    assert header.counts.tolist() == [[rows.entries for rows in codec.table.rows]]


def test_indices_take_16_bits_where_the_row_is_short_enough():
    short, long = make_codec().table.rows
    assert [INDEX_CODES["auto"].bits(rows) for rows in (short, long)] == [16, 32]
    at_limit = TradTopK(0.5).rows(parameter("limit", (256, 256)).slot(0))
    codec = Codec(RowTable([at_limit], 1 << 16), VALUE_CODES["fp32"], INDEX_CODES["auto"])
    assert INDEX_CODES["auto"].bits(at_limit) == 16
    c = torch.zeros(1 << 16)
    c[-1] = c[0] = 1.0
    picks = TradTopK(0.5).pick(c, codec.table)
    positions, values = codec.decode(codec.encode(picks, make_flags(slots=1))[0])
    assert positions[values != 0].tolist() == [0, (1 << 16) - 1]


@pytest.mark.parametrize("values", FLOATS)
def test_no_value_becomes_an_infinity(values):
    codec = make_codec(values)
    limit = torch.finfo(torch.float32).max
    c = torch.full((codec.table.numel,), limit)
    c[::2] = -limit
    picks = TradTopK(0.1).pick(c, codec.table)
    assert codec.decode(codec.encode(picks, make_flags())[0])[1].isfinite().all()


@given(st.data())
@QUICK
def test_wrong_length_is_refused(data):
    codec = make_codec()
    wrong = data.draw(st.integers(0, codec.nbytes + 64).filter(lambda n: n != codec.nbytes))
    payload = torch.zeros(wrong, dtype=torch.uint8)
    with pytest.raises(WireError, match=f"{wrong} bytes"):
        codec.read_headers(payload[None])
    with pytest.raises(WireError, match=f"{wrong} bytes"):
        codec.decode(payload)


class Given(Turn):
    """A selection whose choice is known."""

    def __init__(self, picks: Picks) -> None:
        super().__init__(TradTopK(1.0).session())
        self.picks = picks

    def pick(self, c: Tensor, table: RowTable) -> Picks:
        return self.picks


HEADER_WORDS = {
    0: "version",
    1: "flags",
    2: "number of slots",
    3: "number of entries",
    4: "checksum",
    FIXED_WORDS: "counts more entries",
    FIXED_WORDS + 2: "counts more entries",
}


def run_damaged(codec: Codec, damage: dict[int, int], at: int) -> tuple[Tensor, Tensor]:
    """Two ranks exchange; int32 words of rank 1's payload are overwritten on the way. (c, c afterwards)."""
    c, picks = random_picks(codec, 1)
    account = Account(c.clone())
    offer = Offer(account, Given(picks), codec, make_flags(), Place(0, 2), "test")
    program = AllGather().run(offer)
    (request,) = next(program)
    assert isinstance(request, Gather)
    gathered = torch.stack([request.tensor, request.tensor.clone()])
    for word, value in damage.items():
        gathered[1, at:].view(torch.int32)[word] = value
    try:
        (read,) = program.send([gathered])
        program.send([read.make()])
    finally:
        account.settle(torch.tensor(True))
    return c, account.c


@given(st.sampled_from(sorted(HEADER_WORDS)), st.integers(-(2**31), 2**31 - 1))
@QUICK
def test_damaged_header_is_refused(word, value):
    codec = make_codec()
    payload, _ = codec.encode(random_picks(codec, 1)[1], make_flags())
    before = int(payload.view(torch.int32)[word])
    legal = {1: {0, 1}, FIXED_WORDS: range(25), FIXED_WORDS + 2: range(91)}.get(word, {before})
    if value in legal:
        return
    with pytest.raises(WireError, match=HEADER_WORDS[word]):
        run_damaged(codec, {word: value}, 0)


@given(st.integers(0, 89), st.integers(-(2**31), 2**31 - 1))
@QUICK
def test_index_outside_its_row_is_refused(entry, value):
    codec = make_codec(indices="auto")
    if 0 <= value < 90_000:
        return
    with pytest.raises(WireError, match="outside its row"):
        # The long slot's 32-bit indices come first in the section.
        run_damaged(codec, {entry: value}, codec.indices_at)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 10**6))
@QUICK
def test_random_damage_raises_or_changes_only_values_inside_the_rows(noise, where):
    codec = make_codec()
    payload, _ = codec.encode(random_picks(codec, 1)[1], make_flags())
    start = where % codec.nbytes
    piece = payload[start : start + len(noise)]
    piece.copy_(torch.tensor(list(noise), dtype=torch.uint8)[: piece.numel()])
    try:
        codec.read_headers(payload[None])
        positions, _ = codec.decode(payload)
    except WireError:
        return
    assert int(positions.min()) >= 0 and int(positions.max()) < codec.table.numel


def test_refused_payload_leaves_memory_as_it_was():
    codec = make_codec("bf16")
    c, picks = random_picks(codec, 2)
    accounts = [Account(c.clone()), Account(c.clone())]
    offers = [
        Offer(account, Given(picks), codec, make_flags(), Place(rank, 2), "test")
        for rank, account in enumerate(accounts)
    ]
    programs = [AllGather().run(offer) for offer in offers]
    short = make_codec("bf16", density=0.2)
    _, other = random_picks(short, 2)
    with pytest.raises(Exception, match="different collectives"):
        programs[1] = AllGather().run(
            Offer(accounts[1], Given(other), short, make_flags(), Place(1, 2), "test")
        )
        run_virtual(programs)
    for account in accounts:
        account.settle(torch.tensor(True))
        assert torch.equal(account.c, c)
