"""Value codes: saturation, exact rounding errors, blocks that belong to a slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from thinwire.bench.payloads import make_flags, make_picks, make_table
from thinwire.errors import UsageError, WireError
from thinwire.memory.account import Account
from thinwire.select.base import Picks
from thinwire.wire.blocks import LARGEST
from thinwire.wire.codec import Codec
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

EXACT_CODES = ["fp32", "bf16", "int8", "int4", "fp8"]
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks_of_floats = st.lists(
    st.one_of(
        finite_floats,
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, LARGEST, -LARGEST, 2.0**-149, -(2.0**-126), 1e-40, 3e38, -1e30]),
    ),
    min_size=1,
    max_size=150,
)


def through(name: str, values: Tensor) -> Tensor:
    table = make_table([(1, values.numel(), values.numel())])
    code = VALUE_CODES[name]
    raw = code.encode(values, table)
    assert raw.dtype == torch.uint8 and raw.numel() == code.nbytes(table)
    return code.decode(raw, table)


@pytest.mark.parametrize("name", EXACT_CODES)
@settings(max_examples=150, deadline=None)
@given(numbers=blocks_of_floats)
def test_rounding_error_is_a_float32_and_adds_up_bitwise(name: str, numbers: list[float]) -> None:
    c = torch.tensor(numbers, dtype=torch.float32)
    account = Account(c.clone())
    sent = through(name, c)
    account.write_off(torch.arange(c.numel()), sent)
    assert torch.equal(account.c.double() + sent.double(), c.double())
    assert torch.equal(account.c + sent, c)


@settings(max_examples=150, deadline=None)
@given(numbers=st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=50))
def test_fp16_adds_up_bitwise_inside_its_range(numbers: list[float]) -> None:
    c = torch.tensor(numbers, dtype=torch.float32)
    sent = through("fp16", c)
    assert torch.equal((c - sent) + sent, c)


@settings(max_examples=150, deadline=None)
@given(numbers=blocks_of_floats)
def test_sign_conserves_to_one_last_place(numbers: list[float]) -> None:
    c = torch.tensor(numbers, dtype=torch.float32)
    sent = through("sign", c)
    larger = torch.maximum(c.abs(), sent.abs())
    unit = torch.nextafter(larger, torch.zeros(())).sub(larger).abs().clamp(min=2.0**-149)
    assert bool((((c - sent) + sent) - c).abs().le(unit).all())


@pytest.mark.parametrize("name", VALUE_CODES)
def test_nothing_becomes_infinite(name: str) -> None:
    values = torch.tensor([LARGEST, -LARGEST, torch.inf, -torch.inf, 1.0, 0.0, 2.0**-149])
    assert bool(through(name, values).isfinite().all())
    assert bool(through(name, values.double() * 10).isfinite().all())


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "sign"])
def test_nan_does_not_spoil_its_block(name: str) -> None:
    values = torch.tensor([1.0, torch.nan, 1.0, -1.0])
    decoded = through(name, values)
    assert bool(decoded.isfinite().all()) and bool(decoded[0] > 0) and bool(decoded[3] < 0)


@pytest.mark.parametrize(("name", "peak"), [("int8", 127), ("int4", 7)])
def test_error_is_bounded_by_the_block(name: str, peak: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10
    error = (through(name, values) - values).abs()
    for start in range(0, 1000, 64):
        block = slice(start, start + 64)
        # The scale is cut to eight bits, so the largest value may be clipped by up to one step.
        assert float(error[block].max()) <= float(values[block].abs().max()) / peak


def test_sign_is_the_mean_magnitude() -> None:
    values = torch.tensor([1.0, -3.0, 0.5, -0.5, 5.0])
    assert through("sign", values).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0]
    assert through("sign", torch.zeros(3)).abs().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", [n for n, code in VALUE_CODES.items() if code.has_zero])
def test_zero_stays_zero(name: str) -> None:
    decoded = through(name, torch.tensor([0.0, 5.0, 0.0, -7.0]))
    assert decoded[0] == 0 and decoded[2] == 0


@pytest.mark.parametrize("name", VALUE_CODES)
def test_same_bits_in_any_bucket(name: str) -> None:
    shapes = [(5, 100, 7), (1, 300, 131), (3, 50, 50)]
    generator = torch.Generator().manual_seed(1)
    pieces = [torch.randn(rows * keep, generator=generator) for rows, _, keep in shapes]
    together, code = make_table(shapes), VALUE_CODES[name]
    joined = code.decode(code.encode(torch.cat(pieces), together), together)
    alone = [
        code.decode(code.encode(piece, table), table)
        for shape, piece in zip(shapes, pieces, strict=True)
        for table in [make_table([shape])]
    ]
    assert torch.equal(joined, torch.cat(alone))


@pytest.mark.parametrize("name", VALUE_CODES)
def test_bits_say_what_is_sent(name: str) -> None:
    table, code = make_table([(4, 64, 64), (2, 256, 256)]), VALUE_CODES[name]
    assert 8 * code.nbytes(table) == code.bits * table.entries


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "sign"])
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -1.0])
def test_impossible_scale_is_refused(name: str, scale: float) -> None:
    codec, payload = encoded(name)
    payload[codec.values_at :][:2].view(torch.bfloat16).fill_(scale)
    with pytest.raises(WireError, match=f"value code '{name}' never writes"):
        codec.decode(payload)


@pytest.mark.parametrize(
    ("name", "byte"), [("int8", 0x80), ("fp8", 0x7F), ("int4", 0x08), ("int4", 0x80)]
)
def test_impossible_code_is_refused(name: str, byte: int) -> None:
    codec, payload = encoded(name)
    payload[codec.values_at + 2] = byte
    with pytest.raises(WireError, match="never writes"):
        codec.decode(payload)


def encoded(name: str) -> tuple[Codec, Tensor]:
    table = make_table([(2, 100, 3)])
    codec = Codec(table, VALUE_CODES[name], INDEX_CODES["auto"])
    c = torch.randn(table.numel, generator=torch.Generator().manual_seed(2))
    return codec, codec.encode(make_picks(table, c), make_flags(table, c.device))[0]


@pytest.mark.parametrize("indices", INDEX_CODES)
@pytest.mark.parametrize("shape", [(1, 1000, 40), (4, 100, 7), (1, 64, 40), (3, 576, 5)])
def test_sign_clears_the_places_left_over(shape: tuple[int, int, int], indices: str) -> None:
    """There is no third code, so the header's count says which of the last places are empty."""
    table = make_table([shape, (2, 50, 3)])
    codec = Codec(table, VALUE_CODES["sign"], INDEX_CODES[indices])
    full = make_picks(table, torch.randn(table.numel))
    used = torch.tensor([shape[0] * shape[2] // 2 + 1, 6], dtype=torch.int32)
    taken = torch.cat(
        [torch.arange(n) < count for n, count in zip((shape[0] * shape[2], 6), used, strict=True)]
    )
    picks = Picks(torch.where(taken, full.values, 0.0), torch.where(taken, full.indices, 0), used)
    payload, sent = codec.encode(picks, make_flags(table, torch.device("cpu")))
    assert torch.equal(sent != 0, taken)
    claimed = torch.zeros(table.numel).index_add_(0, table.positions(picks.indices), sent)
    positions, values = codec.decode(payload)
    assert torch.equal(torch.zeros(table.numel).index_add_(0, positions, values), claimed)


def test_names_are_checked() -> None:
    assert tw.ADTopK(values="int4", indices="rice").wire_format().values == "int4"
    with pytest.raises(UsageError, match="values is 'int3'; it must be one of"):
        tw.wire.Wire(values="int3")
    with pytest.raises(UsageError, match="indices is 'golomb'; it must be one of"):
        tw.TopK(indices="golomb")


def test_int2_is_a_sign_and_one_of_two_magnitudes():
    values = torch.tensor([4.0, -3.5, 2.5, -2.0, 1.0])
    assert through("int2", values).tolist() == [4.0, -4.0, 2.0, -2.0, 2.0]
    assert through("int2", torch.zeros(3)).abs().tolist() == [0.0, 0.0, 0.0]
    assert through("int2", torch.tensor([3e38, -1e38])).isfinite().all()
