"""What a job is made of: frozen, validated, and written to a file for the workers to read."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.methods.registry import MethodOptions
from thinwire.observe.files import write_text
from thinwire.validate import check_finite_number, check_positive_int


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a task is trained, the same for every method."""

    epochs: int
    batch_size: int
    """Examples per worker and step."""
    lr: float
    """Peak learning rate."""
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """The learning rate rises linearly over these steps, then falls to zero along a half cosine."""
    seed: int = 0
    """Of the initial parameters and of the order of the examples."""

    def __post_init__(self) -> None:
        check_positive_int("epochs", self.epochs)
        check_positive_int("batch_size", self.batch_size)
        check_finite_number("lr", self.lr)
        if self.lr <= 0:
            raise UsageError(f"lr is {self.lr!r}; it must be above 0")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed!r}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One task trained once with each of some methods."""

    task: str
    methods: tuple[str, ...]
    training: Training
    workers: int
    out: Path
    """The run folder."""
    options: MethodOptions = field(default_factory=MethodOptions)
    ledger: Path | None = None
    """Where every worker's traffic goes as CSV."""

    def __post_init__(self) -> None:
        check_positive_int("workers", self.workers)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are saved with the run."""
        return {
            **dataclasses.asdict(self),
            "methods": list(self.methods),
            "out": str(self.out),
            "ledger": None if self.ledger is None else str(self.ledger),
        }


def write_job(path: Path, job: Job) -> None:
    write_text(path, json.dumps(job.to_dict()))


def read_job(path: Path) -> Job:
    content = json.loads(path.read_text())
    return Job(
        task=content["task"],
        methods=tuple(content["methods"]),
        training=Training(**content["training"]),
        workers=content["workers"],
        out=Path(content["out"]),
        options=MethodOptions(**content["options"]),
        ledger=None if content["ledger"] is None else Path(content["ledger"]),
    )
