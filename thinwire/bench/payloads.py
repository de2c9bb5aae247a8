"""Payloads to measure and to spoil: small worlds of rows with picks, and a fuzzer that must never get past decoding."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import WireError
from thinwire.layout import RowTable, Shard, Slot, SlotKind, SlotRows
from thinwire.select import Picks
from thinwire.wire import INDEX_CODES, VALUE_CODES, Codec, Flags

FUZZ_SHAPES = (
    ((1, 1, 1),),
    ((3, 5, 2), (1, 1000, 10)),
    ((7, 576, 5), (2, 64, 40), (1, 70000, 30)),
    ((4, 1024, 10), (1, 9, 9), (2, 300, 3)),
)
"""(rows, length, keep) of each slot: every row coder, one element, everything kept, rows beyond 16 bits."""


def make_table(shapes: Sequence[tuple[int, int, int]]) -> RowTable:
    """A table of slots with (rows, length, keep) each, one after the other in memory."""
    slots: list[SlotRows] = []
    offset = 0
    for index, (rows, length, keep) in enumerate(shapes):
        shape = (rows, length)
        slot = Slot(f"slot{index}", shape, (length, 1), offset, SlotKind.LINEAR, Shard(shape))
        slots.append(SlotRows(slot, (rows,), (length,), length, 1, keep, "rows"))
        offset += rows * length
    return RowTable(slots, offset)


def make_picks(table: RowTable, c: Tensor) -> Picks:
    """The largest magnitudes of every row."""
    found = [rows.matrix(c).abs().topk(rows.keep).indices.sort().values for rows in table.rows]
    indices = torch.cat([one.flatten() for one in found])
    return Picks(c[table.positions(indices)], indices)


def make_flags(table: RowTable, device: torch.device) -> Flags:
    """A finite gradient for every slot."""
    had = torch.ones(len(table.rows), dtype=torch.bool, device=device)
    return Flags(torch.zeros((), dtype=torch.bool, device=device), had)


@dataclass
class Fuzzed:
    """What became of spoiled payloads: refused with a WireError, or decoded inside their bounds."""

    payloads: int = 0
    refused: int = 0
    decoded: int = 0
    seconds: float = 0.0


def fuzz(payloads: int, *, seed: int = 0, limit_s: float | None = None) -> Fuzzed:
    """Spoil honest payloads of every code pair and shape, and decode them.

    Anything but a WireError or a legal result raises AssertionError or the foreign error itself.
    """
    draw = random.Random(seed)
    victims = [_victim(shapes, names) for shapes in FUZZ_SHAPES for names in _code_pairs()]
    done, start = Fuzzed(), time.monotonic()
    while done.payloads < payloads and (limit_s is None or time.monotonic() - start < limit_s):
        codec, honest = draw.choice(victims)
        spoiled = spoil(honest, codec.values_at, draw)
        done.payloads += 1
        try:
            codec.read_headers(spoiled[None])
            positions, values = codec.decode(spoiled)
        except WireError:
            done.refused += 1
            continue
        assert_legal(codec, positions, values)
        done.decoded += 1
    done.seconds = time.monotonic() - start
    return done


def _code_pairs() -> list[tuple[str, str]]:
    return [(values, indices) for values in VALUE_CODES for indices in INDEX_CODES]


def _victim(shapes: Sequence[tuple[int, int, int]], names: tuple[str, str]) -> tuple[Codec, Tensor]:
    table = make_table(shapes)
    codec = Codec(table, VALUE_CODES[names[0]], INDEX_CODES[names[1]])
    c = torch.randn(table.numel, generator=torch.Generator().manual_seed(table.entries))
    return codec, codec.encode(make_picks(table, c), make_flags(table, c.device))[0]


def spoil(honest: Tensor, body: int, draw: random.Random) -> Tensor:
    """A copy with flipped bits, a random, zero or one stretch, another length; mostly behind the header."""
    kind = draw.random()
    if kind < 0.05:
        cut = honest[: draw.randrange(honest.numel())]
        return cut if draw.random() < 0.5 else torch.cat([honest, cut])
    payload = honest.clone()
    start = draw.randrange(payload.numel()) if kind < 0.15 else draw.randrange(body, len(payload))
    if kind < 0.6:
        for _ in range(draw.choice((1, 1, 2, 8))):
            payload[start] ^= 1 << draw.randrange(8)
            start = draw.randrange(body, len(payload))
    elif kind < 0.8:
        stretch = payload[start : start + draw.randrange(1, 64)]
        noise = draw.randbytes(stretch.numel())
        stretch.copy_(torch.frombuffer(bytearray(noise), dtype=torch.uint8))
    else:
        payload[start : start + draw.randrange(1, 64)] = draw.choice((0, 255))
    return payload


def assert_legal(codec: Codec, positions: Tensor, values: Tensor) -> None:
    """Every entry lies inside the row it belongs to, and a code without NaN decodes to finite values."""
    table = codec.table
    first = table.positions(torch.zeros_like(positions))
    last = table.positions(table.row_lengths(positions.device).long() - 1)
    assert bool(((positions >= first) & (positions <= last)).all()), "a place outside its row"
    assert values.shape == positions.shape == (table.entries,), "a wrong number of entries"
    if not codec.values.writes_nan:
        assert bool(values.isfinite().all()), "a value that is not finite"
