"""Kernels of the low-rank methods on CUDA: compiling them, and bases: all of a group in one launch, or seven for wide ones.

Reference: `cholesky_orthogonalise`. Products are in `group`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.kernels.cuda.launch import Compiler, Kernel, compile_with_nvrtc, has_kernels
from thinwire.kernels.cuda.prepared import FLOAT_CODES

logger = logging.getLogger(__name__)

LINES = (4, 8, 16, 32)
"""How many numbers a line of a factor may have room for."""
MAX_RANK = LINES[-1]
WARP = 32
WIDE = 8
"""Lines of more numbers than this do not fit into registers."""
PIECE = 256
"""Rows of a wide factor that one block orthogonalises."""
SOURCES = Path(__file__).parent
BASIS_THREADS = {4: 512, 8: 128, 16: 256, 32: 256}
PRODUCTS = ("project_rows", "project_columns", "add_parts", "rebuild", "settle")
BASES = ("orthogonalise",)
WIDE_BASES = ("add_up", "find_turn", "turn_rows")
FILES = {"products.cu": PRODUCTS, "orthogonalise.cu": BASES, "orthogonalise_wide.cu": WIDE_BASES}
STEPS = 3
"""In which wide factors are orthogonalised: find dead columns, replace them, again with what the first time gave."""


@dataclass(frozen=True, eq=False)
class BasisTables:
    """Where the factors of a layout lie, for orthogonalising them."""

    spares: Tensor
    """Columns that replace dead ones, in the same layout."""
    factors: Tensor
    """int64 [factors, 2]: struct Factor of orthogonalise.cu."""
    pieces: Tensor
    """int32 [pieces, 2]: (factor, first row) of every block."""
    firsts: Tensor
    """int32 [factors + 1]: the first piece of every factor, and how many there are."""


def make_basis_tables(shapes: Sequence[tuple[int, int, int]], spares: Tensor) -> BasisTables:
    """`shapes` are [matrices, length, width] of every batch."""
    factors: list[tuple[int, int]] = []
    pieces: list[tuple[int, int]] = []
    firsts, offset = [0], 0
    for size, length, width in shapes:
        for _ in range(size):
            pieces += [(len(factors), row) for row in range(0, length, PIECE)]
            factors.append((offset, length | width << 32))
            firsts.append(len(pieces))
            offset += length * width
    device = spares.device
    return BasisTables(
        spares,
        torch.tensor(factors).to(device),
        torch.tensor(pieces, dtype=torch.int32).to(device),
        torch.tensor(firsts, dtype=torch.int32).to(device),
    )


class Kernels:
    """The kernels for one rank and gradient dtype."""

    compiler: Compiler = staticmethod(compile_with_nvrtc)

    def __init__(self, rank: int, gradient_dtype: torch.dtype) -> None:
        assert rank <= MAX_RANK
        self.lines = next(lines for lines in LINES if rank <= lines)
        self._gradient = FLOAT_CODES[gradient_dtype]
        self._found: dict[tuple[str, bool], Kernel] = {}

    def find(self, name: str, *, fresh: bool = True) -> Kernel:
        """`fresh` products take the gradient on the way; to other kernels it makes no difference."""
        if (name, fresh) not in self._found:
            file = next(file for file, names in FILES.items() if name in names)
            defines = (
                ("VALUE_CODE", 0),
                ("GRADIENT_CODE", self._gradient),
                ("RANK", self.lines),
                ("FRESH", int(fresh)),
            )
            self._found[name, fresh] = self.compiler(str(SOURCES / file), name, defines)
        return self._found[name, fresh]

    def orthogonalise(
        self, flat: Tensor, tables: BasisTables, status: Tensor, watched: int = -1
    ) -> Tensor:
        """Bases of all factors in `flat`; `status` is raised if one, or the number at `watched`, is not finite."""
        bases = torch.empty_like(tables.spares)
        if self.lines > WIDE:
            self._orthogonalise_wide(flat, tables, status, watched, bases)
            return bases
        self.find("orthogonalise")(
            (tables.factors.shape[0], 1, 1),
            (BASIS_THREADS[self.lines], 1, 1),
            [flat, tables.spares, bases, tables.factors, status, watched],
        )
        return bases

    def _orthogonalise_wide(
        self, flat: Tensor, tables: BasisTables, status: Tensor, watched: int, bases: Tensor
    ) -> None:
        factors, pieces, spares = tables.factors, tables.pieces, tables.spares
        count, blocks, squares = factors.shape[0], pieces.shape[0], self.lines**2
        parts = torch.empty(blocks * squares, dtype=torch.float64, device=flat.device)
        # struct State of orthogonalise_wide.cu
        words = count * (self.lines + squares + 1)
        states = torch.empty(words, dtype=torch.float64, device=flat.device)
        block = (BASIS_THREADS[self.lines], 1, 1)
        for step in range(STEPS):
            self.find("add_up")(
                (blocks, 1, 1), block, [flat, spares, factors, pieces, states, parts, step]
            )
            self.find("find_turn")(
                (count, 1, 1),
                block,
                [flat, factors, tables.firsts, parts, states, status, watched, step],
            )
        self.find("turn_rows")(
            (blocks, 1, 1), block, [flat, spares, bases, factors, pieces, states]
        )


def has_bases(device: torch.device, rank: int) -> bool:
    """Whether there are kernels that orthogonalise factors of this rank, and they run on this device."""
    if rank > MAX_RANK or not has_kernels(device):
        return False
    wide = Kernels(rank, torch.float32).lines > WIDE
    return _compiles(rank, torch.float32, WIDE_BASES[0] if wide else BASES[0])


def has_products(device: torch.device, rank: int, gradient_dtype: torch.dtype) -> bool:
    """The same for all that a step computes from gradients of this dtype."""
    if gradient_dtype not in FLOAT_CODES or not has_bases(device, rank):
        return False
    return _compiles(rank, gradient_dtype, PRODUCTS[0])


@functools.cache
def _compiles(rank: int, gradient_dtype: torch.dtype, name: str) -> bool:
    """Whether the file of that kernel can be compiled; says once why not."""
    try:
        Kernels(rank, gradient_dtype).find(name)
    except Exception as error:
        logger.warning(
            "CUDA kernels for low-rank products could not be compiled (%s); torch multiplies, in many more launches",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True
