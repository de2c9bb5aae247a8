"""`thinwire bench wire`: bits per entry against the entropy and the published formats, and what encoding costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from thinwire.bench.dry_run import DryRun, show_plan
from thinwire.bench.measure import check_device_name, choose_device, time_ms, to_csv
from thinwire.bench.payloads import Fuzzed, fuzz, make_flags, make_picks, make_table
from thinwire.errors import UsageError
from thinwire.observe.files import write_text
from thinwire.observe.tables import make_console
from thinwire.select.base import Picks
from thinwire.select.rows import RowTable, keep_count
from thinwire.wire.codec import Codec
from thinwire.wire.entropy import EntropyCode
from thinwire.wire.indices import INDEX_CODES
from thinwire.wire.values import VALUE_CODES

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


def wire_table(rows: Sequence[WireRow], title: str) -> Table:
    """One line per format and shape, the published formats last."""
    table = Table(title=title)
    for heading in ("rows x length", "density", "format"):
        table.add_column(heading)
    for heading in ("value", "index mean", "index sent", "entropy", "mean / entropy"):
        table.add_column(heading, justify="right")
    for heading in ("total mean", "total sent", "payload", "encode ms", "decode ms"):
        table.add_column(heading, justify="right")
    previous = ""
    for row in rows:
        if previous not in ("", row.shape):
            table.add_section()
        previous = row.shape
        table.add_row(*_cells(row))
    table.add_section()
    for name, value, index in PUBLISHED:
        table.add_row(
            "", "", name, f"{value:.2f}", f"{index:.2f}", "", "", "", f"{value + index:.2f}"
        )
    return table


def _cells(row: WireRow) -> list[str]:
    bits = (row.value_bits, row.index_bits_mean, row.index_bits_sent, row.entropy_bits)
    return [
        row.shape,
        f"{row.density:.2%}",
        row.format,
        *(f"{number:.2f}" for number in bits),
        f"{row.index_bits_mean / row.entropy_bits:.3f}",
        f"{row.total_bits_mean:.2f}",
        f"{row.total_bits_sent:.2f}",
        f"{row.payload_bits:.2f}",
        f"{row.encode_ms:.2f}",
        f"{row.decode_ms:.2f}",
    ]


def report_fuzz(result: Fuzzed) -> str:
    return (
        f"{result.payloads} spoiled payloads in {result.seconds:.0f} s: {result.refused} refused, "
        f"{result.decoded} decoded inside their bounds, nothing else."
    )


def bench_wire(
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows to this CSV file.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to encode and decode: cpu or cuda.")] = "cpu",
    repeats: Annotated[int, typer.Option(help="Timed calls; the median is shown.")] = 5,
    fuzz_payloads: Annotated[
        int, typer.Option("--fuzz", help="Decode so many spoiled payloads instead of measuring.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the fuzzer.")] = 0,
    dry_run: DryRun = False,
) -> None:
    """Measure bits per entry and encode and decode times of the wire formats, on one CPU thread or one GPU.

    thinwire bench wire --csv benchmarks/wire-cpu.csv
    """
    if repeats < 1:
        raise UsageError(f"--repeats is {repeats}; it must be at least 1")
    if dry_run:
        check_device_name(device)
        fuzzed = [f"{fuzz_payloads} spoiled payloads, seed {seed}"]
        show_plan(fuzzed if fuzz_payloads > 0 else list_cases(), device)
        return
    where, hardware = choose_device(device)
    console = make_console()
    if fuzz_payloads > 0:
        console.print(report_fuzz(fuzz(fuzz_payloads, seed=seed)))
        return
    rows = list(measure_all(where, repeats))
    console.print(wire_table(rows, f"Bits per entry; times on {hardware}"))
    if csv_file is not None:
        write_text(csv_file, to_csv(rows, hardware))
