"""Kernels: those of the low-rank methods on CUDA. Orthogonalises all factors of a group in one launch, wide ones in seven.

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

from thinwire.kernels.cuda.launch import Kernel
from thinwire.kernels.cuda.source import FLOAT_CODES, Defines
from thinwire.kernels.cuda.structs import declare, i32, i64, layout_of, make_rows
from thinwire.kernels.cuda.toolchain import Toolchain, kernels_for, toolchain_of
from thinwire.lowrank.basis import RIDGE

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
WARPS = 8
THREADS = WARP * WARPS
CHUNK = 128
"""Rows of a tile."""
SPAN = 128
"""Columns of a tile."""
WIDE_WARPS = 4
WIDE_LINES = 4
"""Warps of a block and rows that a warp takes at a time, where lines are wide."""
BASIS_THREADS = {4: 512, 8: 128, 16: 256, 32: 256}
PRODUCTS_FILE = "products.cu"
PRODUCTS = ("project_rows", "project_columns", "add_parts", "rebuild", "settle")
BASES = ("orthogonalise",)
WIDE_BASES = ("add_up", "find_turn", "turn_rows")
FILES = {PRODUCTS_FILE: PRODUCTS, "orthogonalise.cu": BASES, "orthogonalise_wide.cu": WIDE_BASES}
STEPS = 3
"""Of orthogonalising wide factors: find dead columns, replace them, and once more with what the first time gave."""
Factor = declare("Factor", (i64, "offset"), (i32, "length width"))
"""factorise.cuh: where a factor lies."""
Piece = declare("Piece", (i32, "factor row"))
"""orthogonalise_wide.cu: rows of a factor that one block takes."""
Matrix = declare(
    "Matrix",
    (i64, "gradient memory sent known parts"),
    (i32, "rows columns width slot by_rows vector lined unused"),
)
"""products.cu: a matrix and its factors."""
Tile = declare("Tile", (i32, "matrix row column"))
"""products.cu: what a block takes."""
PRODUCT_DEFINES: Defines = (
    ("WARPS", WARPS),
    ("CHUNK", CHUNK),
    ("SPAN", SPAN),
    ("WIDE", WIDE),
    ("WIDE_LINES", WIDE_LINES),
    ("WIDE_WARPS", WIDE_WARPS),
    *map(layout_of, (Matrix, Tile)),
)


@dataclass(frozen=True, eq=False)
class BasisTables:
    """Where the factors of a layout lie, for orthogonalising them."""

    spares: Tensor
    """Columns that replace dead ones, in the same layout."""
    factors: Tensor
    """struct Factor"""
    pieces: Tensor
    """struct Piece"""
    firsts: Tensor
    """int32 [factors + 1]: the first piece of every factor, and the number of pieces."""


def make_basis_tables(shapes: Sequence[tuple[int, int, int]], spares: Tensor) -> BasisTables:
    """`shapes` are [matrices, length, width] of every batch."""
    factors: list[dict[str, int]] = []
    pieces: list[dict[str, int]] = []
    firsts, offset = [0], 0
    for size, length, width in shapes:
        for _ in range(size):
            pieces += [{"factor": len(factors), "row": row} for row in range(0, length, PIECE)]
            factors.append({"offset": offset, "length": length, "width": width})
            firsts.append(len(pieces))
            offset += length * width
    device = spares.device
    return BasisTables(
        spares,
        make_rows(Factor, factors).to(device),
        make_rows(Piece, pieces).to(device),
        torch.tensor(firsts, dtype=torch.int32).to(device),
    )


def state_words(lines: int) -> int:
    """Doubles of struct State of orthogonalise_wide.cu: a scale and a line of a matrix per column, and a flag."""
    return lines + lines**2 + 1


def basis_defines(lines: int) -> Defines:
    return (
        ("BASIS_THREADS", BASIS_THREADS[lines]),
        ("PIECE", PIECE),
        ("RIDGE", RIDGE),
        ("STATE_WORDS", state_words(lines)),
        *map(layout_of, (Factor, Piece)),
    )


def lines_of(rank: int) -> int:
    """How many numbers a line of a factor of this rank has room for."""
    return next(lines for lines in LINES if rank <= lines)


class Kernels:
    """The kernels for one rank and gradient dtype."""

    def __init__(self, device: torch.device, rank: int, gradient_dtype: torch.dtype) -> None:
        assert rank <= MAX_RANK
        self._toolchain = toolchain_of(device)
        self.lines = lines_of(rank)
        self._gradient = FLOAT_CODES[gradient_dtype]
        self._found: dict[tuple[str, bool], Kernel] = {}

    def defines(self, file: str) -> Defines:
        """What all kernels of a source file are compiled with."""
        shared: Defines = (("GRADIENT_CODE", self._gradient), ("RANK", self.lines))
        return (*shared, *(PRODUCT_DEFINES if file == PRODUCTS_FILE else basis_defines(self.lines)))

    def find(self, name: str, *, fresh: bool = True) -> Kernel:
        """`fresh` products add the gradient to memory on the way. For other kernels it makes no difference."""
        if (name, fresh) not in self._found:
            file = next(file for file, names in FILES.items() if name in names)
            defines = (*self.defines(file), ("FRESH", int(fresh)))
            self._found[name, fresh] = self._toolchain.compile(str(SOURCES / file), name, defines)
        return self._found[name, fresh]

    def orthogonalise(
        self, flat: Tensor, tables: BasisTables, status: Tensor, watched: int = -1
    ) -> Tensor:
        """Bases of all factors in `flat`. `status` is raised if a factor, or the number at `watched`, is not finite."""
        bases = torch.empty_like(tables.spares)
        if self.lines > WIDE:
            self._orthogonalise_wide(flat, tables, status, watched, bases)
            return bases
        self.find("orthogonalise")(
            tables.factors.shape[0],
            BASIS_THREADS[self.lines],
            [flat, tables.spares, bases, tables.factors, status, watched],
        )
        return bases

    def _orthogonalise_wide(
        self, flat: Tensor, tables: BasisTables, status: Tensor, watched: int, bases: Tensor
    ) -> None:
        factors, pieces, spares = tables.factors, tables.pieces, tables.spares
        count, blocks, squares = factors.shape[0], pieces.shape[0], self.lines**2
        parts = torch.empty(blocks * squares, dtype=torch.float64, device=flat.device)
        words = count * state_words(self.lines)
        states = torch.empty(words, dtype=torch.float64, device=flat.device)
        block = BASIS_THREADS[self.lines]
        for step in range(STEPS):
            self.find("add_up")(blocks, block, [flat, spares, factors, pieces, states, parts, step])
            self.find("find_turn")(
                count,
                block,
                [flat, factors, tables.firsts, parts, states, status, watched, step],
            )
        self.find("turn_rows")(blocks, block, [flat, spares, bases, factors, pieces, states])


def has_bases(device: torch.device, rank: int) -> bool:
    """Whether there are kernels that orthogonalise factors of this rank, and they run on this device."""
    toolchain = kernels_for(device)
    if rank > MAX_RANK or toolchain is None:
        return False
    name = BASES[0] if lines_of(rank) <= WIDE else WIDE_BASES[0]
    return _compiles(toolchain, device, rank, torch.float32, name)


def has_products(device: torch.device, rank: int, gradient_dtype: torch.dtype) -> bool:
    """The same for all that a step computes from gradients of this dtype."""
    toolchain = kernels_for(device)
    if gradient_dtype not in FLOAT_CODES or toolchain is None or not has_bases(device, rank):
        return False
    return _compiles(toolchain, device, rank, gradient_dtype, PRODUCTS[0])


@functools.cache
def _compiles(
    toolchain: Toolchain, device: torch.device, rank: int, gradient_dtype: torch.dtype, name: str
) -> bool:
    """Whether the file of that kernel can be compiled. Says once why not."""
    try:
        Kernels(device, rank, gradient_dtype).find(name)
    except Exception as error:
        logger.warning(
            "CUDA kernels for low-rank products could not be compiled (%s); torch multiplies, in many more launches",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True
