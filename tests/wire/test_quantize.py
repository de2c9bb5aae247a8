"""Block quantisers by themselves: what is left is exact, odd blocks end well, draws depend on what they should."""

from __future__ import annotations

import pytest
import torch

from thinwire.wire.quantize import QUANTIZERS, MessageLayout, draw, pack_fields, unpack_fields

BITS = list(QUANTIZERS)
EXACT = [bits for bits in BITS if bits != 1]
SIZE = 64


def blocks_of(kind: str, count: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(count, SIZE, generator=generator)
    match kind:
        case "normal":
            return x
        case "heavy tail":
            return x**7
        case "ties":
            return (x * 2).round() / 2
        case "near ties":
            # Next to the middle between two codes, on both sides.
            top = torch.full((count, 1), 7.0)
            halves = (x * 2).round() / 2 * (1 + 2.0**-23 * torch.randint(-2, 3, x.shape))
            return torch.cat([top, halves[:, 1:]], 1)
        case "tiny":
            return x * 1e-41
        case "huge":
            return x.clamp(-3, 3) * 1e38
        case "zeros":
            return torch.where(x > 1, x, 0.0)
    raise ValueError(kind)


KINDS = ("normal", "heavy tail", "ties", "near ties", "tiny", "huge", "zeros")


def lengths(blocks: torch.Tensor, length: int = SIZE) -> torch.Tensor:
    return torch.full(blocks.shape[:-1], length, dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", EXACT)
def test_what_rounding_to_nearest_leaves_is_exact(bits, kind):
    blocks, quantizer = blocks_of(kind), QUANTIZERS[bits]
    decoded = quantizer.decode(quantizer.encode(blocks, lengths(blocks)))
    assert decoded.isfinite().all()
    left = blocks - decoded
    assert torch.equal(decoded.double() + left.double(), blocks.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_of_the_size_that_is_promised(bits, kind):
    blocks, quantizer = blocks_of(kind), QUANTIZERS[bits]
    coded = quantizer.encode(blocks, lengths(blocks))
    assert coded.codes.shape == (len(blocks), quantizer.block_bytes(SIZE))
    assert coded.scales.shape == (len(blocks), quantizer.scale_bytes)
    total = 8 * (coded.codes.numel() + coded.scales.numel()) / blocks.numel()
    assert total == quantizer.bits_per_element(SIZE)


@pytest.mark.parametrize("bits", BITS)
def test_error_is_smaller_than_what_there_was(bits):
    """Otherwise feedback would grow without bound."""
    blocks, quantizer = blocks_of("normal"), QUANTIZERS[bits]
    left = blocks - quantizer.decode(quantizer.encode(blocks, lengths(blocks)))
    shares = {16: 1e-5, 8: 1e-4, "fp8": 1e-3, 4: 0.015, 2: 0.25, 1: 0.45}
    assert left.square().sum() < shares[bits] * blocks.square().sum()


@pytest.mark.parametrize("bits", BITS)
def test_zero_blocks_stay_zero(bits):
    blocks, quantizer = torch.zeros(3, SIZE), QUANTIZERS[bits]
    for draws in (None, torch.rand(3, SIZE)):
        decoded = quantizer.decode(quantizer.encode(blocks, lengths(blocks), draws))
        assert not decoded.any() or draws is not None
        # What is drawn is below the smallest number that is not subnormal.
        assert (decoded.abs() < 2e-38).all()


@pytest.mark.parametrize("bits", BITS)
def test_what_fills_a_block_up_does_not_count(bits):
    quantizer, blocks = QUANTIZERS[bits], blocks_of("normal", 50)
    blocks[:, 10:] = 0.0
    decoded = quantizer.decode(quantizer.encode(blocks, lengths(blocks, 10)))[:, :10]
    assert (blocks[:, :10] - decoded).square().sum() < 0.6 * blocks.square().sum()


@pytest.mark.parametrize("bits", BITS)
def test_a_divisor_is_applied_on_both_sides(bits):
    quantizer, blocks = QUANTIZERS[bits], blocks_of("normal")
    divisor = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(5)) + 0.1
    coded = quantizer.encode(blocks, lengths(blocks), divisor=divisor)
    plain = quantizer.encode(blocks / divisor, lengths(blocks))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(coded, plain, strict=True))
    decoded = quantizer.decode(coded, divisor)
    assert torch.equal(decoded, quantizer.decode(plain) * divisor)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_no_code_stands_for_more_than_the_limit(bits, stochastic):
    blocks = blocks_of("heavy tail")
    lengths = torch.full(blocks.shape[:-1], SIZE)
    draws = torch.rand(blocks.shape) if stochastic else None
    for limit in (0.3, torch.tensor(3.0)):
        coded = QUANTIZERS[bits].encode(blocks, lengths, draws, limit=limit)
        assert QUANTIZERS[bits].decode(coded).abs().max() <= limit * (1 + 2.0**-7)


def test_of_signs_the_limit_cuts_what_is_sent_not_what_is_counted():
    blocks = torch.full((1, SIZE), 0.5)
    blocks[0, 0] = -100.0
    lengths = torch.tensor([SIZE])
    decoded = QUANTIZERS[1].decode(QUANTIZERS[1].encode(blocks, lengths, limit=1.0))
    assert decoded[0, 0] == -1.0 and (decoded[0, 1:] == 1.0).all()


@pytest.mark.parametrize("bits", [16, 8, "fp8", 4])
def test_stochastic_rounding_is_right_on_average(bits):
    quantizer = QUANTIZERS[bits]
    blocks = blocks_of("normal", 1).expand(2000, -1)
    seeds = torch.arange(2000, dtype=torch.int32) * 7919
    draws = draw(seeds, torch.zeros(2000, dtype=torch.int32), SIZE)
    decoded = quantizer.decode(quantizer.encode(blocks, lengths(blocks), draws))
    largest = blocks[0].abs().argmax()
    # The scale is cut towards zero, so that the largest saturates a little.
    error = (decoded.mean(0) - blocks[0]).abs()
    error[largest] = 0.0
    step = {16: 2.0**-7, 8: 2.0**-6, "fp8": 2.0**-2, 4: 0.5}[bits]
    assert error.max() < 0.1 * step


def test_draws_are_even_and_depend_on_seed_and_place():
    seeds = torch.arange(1000, dtype=torch.int32)
    draws = draw(seeds, torch.zeros_like(seeds), SIZE)
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01 and abs(draws.std() - 12**-0.5) < 0.01
    correlation = torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]
    assert abs(correlation) < 0.02
    later = draw(seeds, torch.full_like(seeds, 32), SIZE)
    assert torch.equal(later[:, :32], draws[:, 32:])


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_fields_survive_packing(bits):
    peak = (1 << (bits - 1)) - 1
    codes = torch.randint(-peak, peak + 1, (5, SIZE), dtype=torch.int8)
    assert torch.equal(unpack_fields(pack_fields(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_messages_survive_the_wire(bits):
    quantizer = QUANTIZERS[bits]
    layout = MessageLayout.of(quantizer, 5, 7, SIZE)
    blocks = blocks_of("normal", 21).view(3, 7, SIZE)
    coded = quantizer.encode(blocks, lengths(blocks))
    flags = torch.tensor([True, False, True, False, False])
    message = layout.write(flags, coded)
    assert message.shape == (3, layout.nbytes) and layout.nbytes % 16 == 0
    raised, again = layout.read(message)
    assert torch.equal(raised, flags)
    assert torch.equal(quantizer.decode(again), quantizer.decode(coded))
