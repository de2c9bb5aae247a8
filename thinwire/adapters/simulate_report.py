"""SimulationReport: what a simulation costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """What a simulation costs. On CUDA the seconds are the host's, which runs ahead of the device."""

    workers: int
    steps: int
    """That the seconds are of."""
    parameter_bytes: int
    """Of the model, which exists once."""
    gradient_bytes: int
    """Of all workers' gradients."""
    memory_bytes: int
    """What all workers hold back."""
    buffer_bytes: int
    """Copies of the model's buffers."""
    worker_seconds: float
    """Spent in workers' blocks, all steps together."""
    exchange_seconds: float

    @property
    def state_bytes(self) -> int:
        """What there is because of the simulation, beside the model."""
        return self.gradient_bytes + self.memory_bytes + self.buffer_bytes

    def __str__(self) -> str:
        steps = max(1, self.steps)
        return (
            f"{self.workers} workers: {self.state_bytes / 1e6:.1f} MB beside the model's "
            f"{self.parameter_bytes / 1e6:.1f} MB (gradients {self.gradient_bytes / 1e6:.1f}, held back "
            f"{self.memory_bytes / 1e6:.1f}, buffers {self.buffer_bytes / 1e6:.1f}); "
            f"{1e3 * self.worker_seconds / steps:.1f} ms computing and "
            f"{1e3 * self.exchange_seconds / steps:.1f} ms exchanging per step"
        )
