"""How much of the exchange of local steps goes on under inner steps, from the traces of `thinwire bench step --trace`.

    sudo thinwire bench step --methods diloco,streaming-diloco --every 32 --batch 512 --no-anchors --rates 100mbit \\
        --latency 50ms --workers 2 --device cpu --out runs/overlap --trace runs/overlap/traces
    python benchmarks/local_overlap.py runs/overlap/traces --out benchmarks/results/local_overlap.json

An exchange is a range of `thinwire::exchange`: from the moment a collective is asked for to its end. It is hidden as far as
forward and backward passes go on meanwhile; the rest is waited for, or spent in the optimizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.bench.host_profile import BACKWARD, FORWARD
from thinwire.observe import EXCHANGE

Range = tuple[float, float]
"""From, to; in microseconds."""


@dataclass(frozen=True)
class Overlap:
    """What one rank's trace shows."""

    trace: str
    steps: int
    seconds: float
    exchanges: int
    exchange_ms: float
    hidden_ms: float
    """Of it under forward and backward passes."""
    longest_ms: float
    """The longest exchange."""
    passes: int
    """Whole forward and backward passes during the exchange that has most of them."""

    @property
    def hidden(self) -> float:
        return self.hidden_ms / self.exchange_ms if self.exchange_ms else 0.0


def read_overlap(path: Path) -> Overlap:
    """A trace of `thinwire bench step --trace`."""
    events = json.loads(path.read_text())["traceEvents"]
    marked = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    steps = ranges(marked, lambda name: name.startswith("step "))
    exchanges = merge(ranges(marked, EXCHANGE.__eq__))
    passes = ranges(marked, (FORWARD, BACKWARD).__contains__)
    inside = [
        [one for one in passes if begin <= one[0] and one[1] <= end] for begin, end in exchanges
    ]
    return Overlap(
        trace=path.stem,
        steps=len(steps),
        seconds=(max(end for _, end in steps) - min(begin for begin, _ in steps)) / 1e6,
        exchanges=len(exchanges),
        exchange_ms=length(exchanges) / 1e3,
        hidden_ms=sum(common(one, passes) for one in exchanges) / 1e3,
        longest_ms=max((end - begin for begin, end in exchanges), default=0.0) / 1e3,
        passes=max(map(len, inside), default=0),
    )


def ranges(events: Sequence[dict[str, Any]], wanted: Any) -> list[Range]:
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if wanted(e["name"]))


def merge(found: Iterable[Range]) -> list[Range]:
    """Ranges that overlap are one."""
    merged: list[Range] = []
    for begin, end in found:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(found: Iterable[Range]) -> float:
    return sum(end - begin for begin, end in found)


def common(one: Range, others: Iterable[Range]) -> float:
    return sum(max(0.0, min(one[1], end) - max(one[0], begin)) for begin, end in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="the folder given to --trace")
    parser.add_argument("--out", type=Path, help="a file of JSON rows to write")
    asked = parser.parse_args()
    rows = [read_overlap(path) for path in sorted(asked.traces.glob("*-rank*.json"))]
    for row in rows:
        print(
            f"{row.trace}: {row.exchanges} exchanges in {row.steps} steps, {row.exchange_ms:.0f} ms in {row.seconds:.2f} s, "
            f"{row.hidden:.0%} of it under forward and backward; the longest took {row.longest_ms:.0f} ms, up to "
            f"{row.passes} whole passes under one"
        )
    if asked.out is not None:
        asked.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
