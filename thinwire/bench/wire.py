"""`thinwire bench wire`: bits per entry against the entropy and the published formats, and what encoding costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from thinwire.bench.measure import Timed, choose_device, time_ms, to_csv
from thinwire.bench.payloads import Fuzzed, fuzz, make_flags, make_picks, make_table
from thinwire.layout import RowTable, keep_count
from thinwire.select import Picks
from thinwire.tools.files import write_text
from thinwire.tools.settings.options import DryRun, command
from thinwire.tools.tables import format_table, make_console, show_plan
from thinwire.wire import INDEX_CODES, VALUE_CODES, Codec, EntropyCode

WHOLE_LENGTHS = (100_000, 1_000_000, 10_000_000)
ROW_LENGTHS = (576, 768, 1024, 4096)
ELEMENTS_OF_ROWS = 1_000_000
DENSITIES = (0.01, 0.001)
FORMATS = (
    ("bf16", "auto"),
    ("fp16", "int32"),
    ("int8", "rice"),
    ("int4", "packed"),
    ("int4", "rice"),
    ("sign", "rice"),
)
PUBLISHED = (
    ("ADTopk as published", 32.0, 64.0),
    ("Ok-Topk, DGC with int32", 32.0, 32.0),
    ("DGC with fp16 and int32", 16.0, 32.0),
    ("DGC, run lengths as in its paper", 32.0, 16.0),
    ("SparseLoCo", 2.0, 12.0),
)
"""(format, bits per value, bits per index)"""


@dataclass(frozen=True, kw_only=True)
class WireRow:
    """One format on one shape. Bits are per entry; "mean" is without the reserve for the worst case."""

    shape: str
    density: float
    entries: int
    format: str
    entropy_bits: float
    index_bits_mean: float
    index_bits_sent: float
    value_bits: float
    total_bits_mean: float
    total_bits_sent: float
    payload_bits: float
    """All bytes of the payload, with header and alignment, which a bucket of many slots shares."""
    encode_ms: float
    decode_ms: float


def entropy_bits(table: RowTable) -> float:
    """log2 of the number of ways to choose the places, per entry."""
    nats = sum(
        rows.count
        * (
            math.lgamma(rows.length + 1)
            - math.lgamma(rows.keep + 1)
            - math.lgamma(rows.length - rows.keep + 1)
        )
        for rows in table.rows
    )
    return nats / math.log(2) / table.entries


def measure(
    table: RowTable, picks: Picks, names: tuple[str, str], repeats: int
) -> dict[str, float]:
    """Sizes and times of one format; the header (20 bytes and 8 per slot) counts in `payload_bits` only."""
    values, indices = VALUE_CODES[names[0]], INDEX_CODES[names[1]]
    codec, entries = Codec(table, values, indices), table.entries
    sent = 8 * indices.nbytes(table) / entries
    mean = sent
    if isinstance(indices, EntropyCode):
        mean = indices.used_bits(picks.indices, table) / entries
    value_bits = 8 * values.nbytes(table) / entries
    flags = make_flags(table, picks.values.device)
    payload, _ = codec.encode(picks, flags)
    return {
        "entropy_bits": entropy_bits(table),
        "index_bits_mean": mean,
        "index_bits_sent": sent,
        "value_bits": value_bits,
        "total_bits_mean": value_bits + mean,
        "total_bits_sent": value_bits + sent,
        "payload_bits": 8 * codec.nbytes / entries,
        "encode_ms": time_ms(lambda: codec.encode(picks, flags), picks.values.device, repeats),
        "decode_ms": time_ms(lambda: codec.decode(payload), picks.values.device, repeats),
    }


def list_shapes() -> list[tuple[int, int]]:
    """(rows, length)"""
    shapes = [(max(1, ELEMENTS_OF_ROWS // length), length) for length in ROW_LENGTHS]
    return shapes + [(1, length) for length in WHOLE_LENGTHS]


def name_shape(count: int, length: int) -> str:
    return f"{count} x {length}" if count > 1 else f"{length}"


def measure_all(device: torch.device, repeats: int) -> Iterator[WireRow]:
    """Every shape, density and format."""
    for density in DENSITIES:
        for count, length in list_shapes():
            table = make_table([(count, length, keep_count(length, density))])
            generator = torch.Generator().manual_seed(length)
            c = torch.randn(table.numel, generator=generator).to(device)
            picks = make_picks(table, c)
            for names in FORMATS:
                yield WireRow(
                    shape=name_shape(count, length),
                    density=density,
                    entries=table.entries,
                    format=" + ".join(names),
                    **measure(table, picks, names, repeats),
                )


def list_cases() -> list[str]:
    """What `measure_all` measures, in words."""
    return [
        f"{' + '.join(names)}, density {density:g}, rows x length {name_shape(*shape)}"
        for density in DENSITIES
        for shape in list_shapes()
        for names in FORMATS
    ]


COLUMNS = {
    "rows x length": "{shape}",
    "density": "{density:.2%}",
    "format": "{format}",
    "value": "{value_bits:.2f}",
    "index mean": "{index_bits_mean:.2f}",
    "index sent": "{index_bits_sent:.2f}",
    "entropy": "{entropy_bits:.2f}",
    "mean / entropy": "{excess:.3f}",
    "total mean": "{total_bits_mean:.2f}",
    "total sent": "{total_bits_sent:.2f}",
    "payload": "{payload_bits:.2f}",
    "encode ms": "{encode_ms:.2f}",
    "decode ms": "{decode_ms:.2f}",
}


def wire_table(rows: Sequence[WireRow], title: str) -> Table:
    """One line per format and shape, the published formats last."""
    lines: list[dict[str, Any]] = [
        {**asdict(row), "excess": row.index_bits_mean / row.entropy_bits} for row in rows
    ]
    nothing = dict.fromkeys(lines[0])
    for name, value, index in PUBLISHED:
        bits = {"value_bits": value, "index_bits_mean": index, "total_bits_mean": value + index}
        lines.append({**nothing, "format": name, **bits})
    return format_table(COLUMNS, lines, texts=3, section="shape", title=title)


def report_fuzz(result: Fuzzed) -> str:
    return (
        f"{result.payloads} spoiled payloads in {result.seconds:.0f} s: {result.refused} refused, "
        f"{result.decoded} decoded inside their bounds, nothing else."
    )


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    """A fuzzer instead of a measurement."""

    fuzz: int = 0
    """Decode so many spoiled payloads instead of measuring."""
    seed: int = 0
    """Seed of the fuzzer."""


@command
def bench_wire(*, timed: Timed, spoiled: Spoiled, dry_run: DryRun = False) -> None:
    """Measure bits per entry and encode and decode times of the wire formats, on one CPU thread or one GPU.

    thinwire bench wire --csv benchmarks/wire-cpu.csv
    """
    if dry_run:
        fuzzed = [f"{spoiled.fuzz} spoiled payloads, seed {spoiled.seed}"]
        show_plan(fuzzed if spoiled.fuzz > 0 else list_cases(), timed.device)
        return
    where, hardware = choose_device(timed.device)
    console = make_console()
    if spoiled.fuzz > 0:
        console.print(report_fuzz(fuzz(spoiled.fuzz, seed=spoiled.seed)))
        return
    rows = list(measure_all(where, timed.repeats))
    console.print(wire_table(rows, f"Bits per entry; times on {hardware}"))
    if timed.csv is not None:
        write_text(timed.csv, to_csv(rows, hardware))
