"""SignSGD: one bit per element. With a residual it is EF-SignSGD.

Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant" (ICLR 2019).
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.compress.base import Compressor
from thinwire.compress.dense import DenseCompressor
from thinwire.compress.signs import ScaledSignCompressor, SignAfterMean, VoteCompressor
from thinwire.errors import UsageError
from thinwire.layout import Slot
from thinwire.memory.base import Memory
from thinwire.memory.residual import NoMemory, Residual
from thinwire.methods.base import SMALL_NUMEL, Dense, Method
from thinwire.validate import check_bool


@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """Without memory the update is the majority's sign, -1, 0 or 1; lossy by design, and the learning rate must fit.

    With `memory=tw.memory.Residual()` every rank sends sign(c) x mean|c| of each tensor, the update is their mean, and the
    rest stays in the residual; its size is that of ordinary gradients.
    """

    memory: Memory = field(default_factory=NoMemory)
    """tw.memory.NoMemory() for the majority vote, tw.memory.Residual() for EF-SignSGD."""
    abstain: bool = True
    """In the vote: zeros do not vote and ties give 0, at 2 bits per element; False counts both as +1, at 1 bit."""

    def __post_init__(self) -> None:
        check_bool("abstain", self.abstain)
        if isinstance(self.memory, Residual) and self.memory.storage == "fp32":
            return
        if not isinstance(self.memory, NoMemory):
            raise UsageError(
                f"memory is {self.memory!r}; SignSGD takes tw.memory.NoMemory() or tw.memory.Residual() with storage='fp32'"
            )

    @property
    def votes(self) -> bool:
        return not self.memory.keeps_state

    def compressor(self) -> Compressor:
        return VoteCompressor(self.abstain) if self.votes else ScaledSignCompressor(self.memory)

    def dense_companion(self, dense: Dense) -> Method:
        """Beside a vote a dense slot takes the sign of its mean, so that one learning rate fits all."""
        return DenseSign(dtype=dense.dtype) if self.votes else dense

    def bits(self, world: int) -> float:
        """Bits a rank sends per element."""
        if self.votes:
            return 2 * (world - 1) / world * (2 if self.abstain else 1)
        return world - 1

    def reason_against(self, slot: Slot, dense_bits: int, world: int) -> str | None:
        if slot.numel < SMALL_NUMEL:
            return f"fewer than {SMALL_NUMEL} elements"
        if self.bits(world) > 2 * (world - 1) / world * dense_bits:
            return f"signs of {world} workers take more bits than an all-reduce"
        return None

    def describe(self, slot: Slot) -> str:
        return "SignSGD: majority vote" if self.votes else "SignSGD: scaled signs with feedback"


@dataclass(frozen=True, kw_only=True)
class DenseSign(Dense):
    """The sign of the plain mean: the dense slots beside a majority vote."""

    def compressor(self) -> Compressor:
        return DenseCompressor(self.dtype, SignAfterMean())

    def dense_companion(self, dense: Dense) -> Method:
        return DenseSign(dtype=dense.dtype)

    def describe(self, slot: Slot) -> str:
        return f"{super().describe(slot)}, sign of the mean"
