"""The row coders against plain references, their bounds, and how close they come to the entropy."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.bench.payloads import make_flags, make_picks, make_table
from thinwire.bench.wire import entropy_bits
from thinwire.errors import WireError
from thinwire.layout import keep_count
from thinwire.wire.bits import collapse_bits, expand_bits, pack, unpack, words_for
from thinwire.wire.codec import Codec
from thinwire.wire.coders import BitmapRows, EnumeratedRows, RiceRows, RowCoder, choose_coder
from thinwire.wire.indices import INDEX_CODES, EntropyCode
from thinwire.wire.values import VALUE_CODES

RICE = INDEX_CODES["rice"]
assert isinstance(RICE, EntropyCode)


def coders(length: int, keep: int) -> list[RowCoder]:
    enumerated = EnumeratedRows.best(length, keep)
    rice = [RiceRows.best(length, keep), RiceRows(length, keep, 0), RiceRows(length, keep, 3)]
    return [*rice, BitmapRows(length, keep), *([enumerated] if enumerated else [])]


@st.composite
def ascending_rows(draw: st.DrawFn) -> tuple[int, Tensor]:
    """(length, distinct indices [rows, keep]), the rest of some rows left over at the end."""
    length = draw(st.integers(1, 200))
    keep = draw(st.integers(1, length))
    rows = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    picked = torch.rand(rows, length, generator=generator).argsort(1)[:, :keep].sort(1).values
    if draw(st.booleans()):
        left_over = torch.rand(rows, keep, generator=generator) < 0.3
        picked = torch.where(left_over, length - 1, picked).sort(1).values
    return length, picked


@settings(max_examples=200, deadline=None)
@given(case=ascending_rows())
def test_every_coder_is_exact(case: tuple[int, Tensor]) -> None:
    length, indices = case
    rows, keep = indices.shape
    for coder in coders(length, keep):
        words = coder.encode(indices)
        assert words.dtype == torch.int32 and words.numel() == coder.words(rows)
        assert torch.equal(coder.decode(words, rows), indices)
        assert coder.used_bits(indices) <= math.ceil(coder.row_bits() * rows)


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.integers(0, (1 << 62) - 1), max_size=40), width=st.integers(0, 62))
def test_fields_of_any_width(numbers: list[int], width: int) -> None:
    values = torch.tensor([n & ((1 << width) - 1) for n in numbers], dtype=torch.int64)
    words = pack(values, width)
    assert words.numel() == words_for(width * len(numbers))
    assert torch.equal(unpack(words, len(numbers), width), values)
    stream = sum(int(value) << (width * at) for at, value in enumerate(values))
    assert words.view(torch.uint8).tolist() == list(stream.to_bytes(4 * words.numel(), "little"))


def test_bits_expand_and_collapse() -> None:
    bits = torch.randint(0, 2, (37,), dtype=torch.uint8)
    assert torch.equal(expand_bits(collapse_bits(bits))[:37], bits)


def rice_reference(indices: list[list[int]], low: int) -> tuple[str, str]:
    """The two streams as text, bit by bit, lowest bit first."""
    fixed, unary = "", ""
    for row in indices:
        before = 0
        for index in row:
            quotient, rest = divmod(index - before, 1 << low)
            fixed += "".join(str(rest >> bit & 1) for bit in range(low))
            unary += "0" * quotient + "1"
            before = index
    return fixed, unary


def as_text(words: Tensor) -> str:
    return "".join(map(str, expand_bits(words).tolist()))


@settings(max_examples=50, deadline=None)
@given(case=ascending_rows(), low=st.integers(0, 8))
def test_rice_reads_like_its_definition(case: tuple[int, Tensor], low: int) -> None:
    length, indices = case
    coder = RiceRows(length, indices.shape[1], low)
    fixed, unary = rice_reference(indices.tolist(), low)
    words = coder.encode(indices)
    boundary = words_for(len(fixed))
    assert as_text(words[:boundary]).rstrip("0") == fixed.rstrip("0")
    assert as_text(words[boundary:]).rstrip("0") == unary.rstrip("0")
    assert coder.used_bits(indices) == len(fixed) + len(unary)


def test_rice_bound_is_reached_and_never_passed() -> None:
    """The worst row: all gaps but one below 2**low, the last index at the very end."""
    coder = RiceRows.best(1000, 10)
    worst = torch.tensor([[*range(9), 999]]).expand(7, 10).contiguous()
    steps = torch.arange(1, 11)[None] * 64
    for indices in (worst, steps.clamp(max=999).expand(7, 10).contiguous()):
        assert torch.equal(coder.decode(coder.encode(indices), 7), indices)
        assert coder.used_bits(indices) <= 7 * coder.row_bits()
    assert coder.used_bits(worst) == 7 * coder.row_bits()


def test_enumeration_counts_every_row_once() -> None:
    """All multisets of a small shape get the ranks 0, 1, 2, ... in the order of Cover's sum of binomials."""
    length, keep = 7, 3
    coder = EnumeratedRows(length, keep, together=1, width=31)
    rows = sorted(combinations_with_replacement(range(length), keep), key=lambda row: row[::-1])
    ranks = unpack(coder.encode(torch.tensor(rows)), len(rows), 31)
    assert ranks.tolist() == list(range(math.comb(length + keep - 1, keep)))
    expected = [sum(math.comb(i + j, j + 1) for j, i in enumerate(row)) for row in rows]
    assert ranks.tolist() == expected


def test_choice_by_shape() -> None:
    assert isinstance(choose_coder(576, 5), EnumeratedRows)
    assert isinstance(choose_coder(4096, 40), RiceRows)
    assert isinstance(choose_coder(4096, 2048), BitmapRows)
    assert choose_coder(1, 1).row_bits() == 0


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("length", [147, 475, 576, 768, 899, 1024, 2304, 4096, 30_522, 1_000_000])
def test_index_length_is_within_five_percent_of_the_entropy(length: int, density: float) -> None:
    keep = keep_count(length, density)
    rows = max(1, min(400, 400_000 // length))
    table = make_table([(rows, length, keep)])
    generator = torch.Generator().manual_seed(length)
    picks = make_picks(table, torch.randn(table.numel, generator=generator))
    mean = RICE.used_bits(picks.indices, table) / table.entries
    assert mean <= 1.05 * entropy_bits(table)


def test_four_bit_values_and_indices_meet_the_goal_at_every_length() -> None:
    """At most 13.0 bits per entry with the reserve at 1 %, for any row length."""
    int4 = VALUE_CODES["int4"].bits
    for length in [*range(100, 3000), 4096, 4608, 12_345, 30_522, 10**5, 10**6, 10**7]:
        keep = keep_count(length, 0.01)
        assert int4 + choose_coder(length, keep).row_bits() / keep <= 13.0, length


@pytest.mark.parametrize("length", [576, 768, 1024, 4096, 100_000, 1_000_000])
def test_four_bit_mean_is_at_most_twelve_and_a_half(length: int) -> None:
    table = make_table([(max(1, 200_000 // length), length, keep_count(length, 0.01))])
    picks = make_picks(table, torch.randn(table.numel, generator=torch.Generator().manual_seed(1)))
    values = 8 * VALUE_CODES["int4"].nbytes(table) / table.entries
    assert values + RICE.used_bits(picks.indices, table) / table.entries <= 12.5


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("shape", [(1, 4096, 40), (1, 576, 5), (5, 576, 1), (1, 64, 40)])
def test_streams_that_mean_nothing_are_refused(shape: tuple[int, int, int], byte: int) -> None:
    """Too few or too many ones, a rank beyond the last row, all entries at one place."""
    table = make_table([shape])
    codec = Codec(table, VALUE_CODES["int8"], RICE)
    c = torch.arange(1.0, table.numel + 1)
    payload, _ = codec.encode(make_picks(table, c), make_flags(table, c.device))
    payload[codec.indices_at :] = byte
    if shape == (5, 576, 1) and byte == 0:
        assert codec.decode(payload)[0].tolist() == [0, 576, 1152, 1728, 2304]
        return
    with pytest.raises(WireError, match="outside its row or twice the same"):
        codec.decode(payload)


def test_two_entries_at_one_place_are_refused() -> None:
    table = make_table([(1, 4096, 3)])
    codec = Codec(table, VALUE_CODES["fp32"], RICE)
    picks = make_picks(table, torch.arange(4096.0))
    twice = type(picks)(picks.values, torch.tensor([4, 9, 9]))
    payload, _ = codec.encode(twice, make_flags(table, torch.device("cpu")))
    with pytest.raises(WireError, match="twice the same"):
        codec.decode(payload)
