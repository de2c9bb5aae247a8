"""Memories: what was not sent last time comes back."""

from thinwire.memory.account import Account
from thinwire.memory.adam import AdamMomentum
from thinwire.memory.base import CORRECTED, RESIDUAL, SCALED, Memory, MemoryState
from thinwire.memory.clip import Clip
from thinwire.memory.momentum import MomentumCorrection
from thinwire.memory.refresh import Refresh
from thinwire.memory.residual import NoMemory, Residual

__all__ = [
    "CORRECTED",
    "RESIDUAL",
    "SCALED",
    "Account",
    "AdamMomentum",
    "Clip",
    "Memory",
    "MemoryState",
    "MomentumCorrection",
    "NoMemory",
    "Refresh",
    "Residual",
]
