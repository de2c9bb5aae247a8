"""Tuning: sizes that decide about speed and room, never about results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the tables of a toolchain's kernels are made with. Tests choose other sizes to reach rare paths.

    None stands for all that the sources have room for.
    """

    launch_elements: int = 1 << 30
    """Elements of a bucket in one launch; kernels count with 32 bits."""
    look_blocks: int = 256
    """Blocks of a kernel that usually looks at a flag and returns."""
    chunk_elements: int | None = None
    """Elements of a row that many blocks share, from which one block collects candidates."""
    histogram_chunks: int = 128
    """Chunks that add to the same histogram; more would wait for each other."""
    entries_per_edge: int = 8
    """Entries of a row for each candidate that fits the list of the deciding bin."""
    few_columns_elements: int = 1 << 18
    """Elements of a slot from which on few crowded columns are shared by many blocks."""
    block_candidates: int | None = None
    """Candidates of a column that one block lists; a column that has more is crowded."""
    warp_column_elements: int | None = None
    """Longer columns have a block each."""
    spare_candidates: int = 1024
    """Room for candidates of a threshold beyond four per entry."""
