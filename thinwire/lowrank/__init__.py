"""Low rank: gradients as products of two thin matrices."""

from thinwire.lowrank.matrices import Matrices, matrices_of

__all__ = ["Matrices", "matrices_of"]
