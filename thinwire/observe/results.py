"""Row: what one method did in one job, as measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a comparison. Bytes are those that rank 0 put on the wire."""

    method: str
    settings: str
    """The method with all its settings."""
    asked_density: float | None
    """None for a method without a density."""
    density: float
    """Entries sent / elements, over the parameters that were compressed."""
    score: float
    """Test score at the end, in [0, 1]."""
    steps: int
    parameters: int
    dense_bytes_per_step: float
    wire_bytes_per_step: float
    ratio: float
    ms_per_step: float
    """Median."""
    replicas_identical: bool
    """Whether all workers ended with the same bits in all parameters."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
