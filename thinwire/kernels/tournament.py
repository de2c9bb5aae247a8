"""Exact top-k of many rows on the CPU, without a heap or a sort over all elements.

Rows of one length compete together:

1. Cut every row into chunks and note the largest magnitude of each: one pass over memory.
2. Bisect for a bound per row that at least `keep` of its chunks reach. As many elements then do, so nothing below it
   can be among the `keep` largest.
3. Look into the chunks that reach it. What survives is little more than `keep` elements of each row.
4. Choose among the survivors, ties to the lowest index.

A row the bound does not thin out (zeros, a constant, NaN) is chosen from whole. Costly on a CPU are branches nobody can
predict and memory that was never touched before; hence passes that are vectorised and a small buffer to work in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Magnitudes compare like the integers of the same bits."""
FRACTION_BITS = {torch.float32: 23, torch.float64: 52}
LEAST_ELEMENTS = 1 << 16
LEAST_RATIO = 48
"""Of length to `keep`; below it most chunks reach any bound."""
BUFFER_ELEMENTS = 1 << 19
HITS_AT_ONCE = 1 << 14
WHOLE_AT_ONCE = 1 << 21
"""Elements of rows that are chosen from whole."""
HALVINGS = 7
OCTAVES = 16
"""How far below its largest magnitude the bound of a row is looked for."""
WORD = 16


def pays(elements: int, length: int, keep: int, dtype: torch.dtype) -> bool:
    """Whether rows are worth a tournament: many elements, few of them kept."""
    return dtype in BITS and elements >= LEAST_ELEMENTS and length >= LEAST_RATIO * keep


def choose(magnitudes: Tensor, keep: int) -> Tensor:
    """int64 [rows x keep, 2]: (row, index) of the `keep` largest of every row, ascending; ties to the lowest index."""
    wanted = keep * magnitudes.shape[0]
    if keep == 1:
        least = magnitudes.amax(-1, keepdim=True)
    else:
        least = magnitudes.topk(keep, sorted=False).values.amin(-1, keepdim=True)
    chosen = (magnitudes >= least).nonzero()
    if chosen.shape[0] == wanted:
        return chosen
    above, equal = magnitudes > least, magnitudes == least
    room = keep - above.sum(-1, keepdim=True)
    chosen = (above | equal & (equal.cumsum(-1) <= room)).nonzero()
    if chosen.shape[0] == wanted:
        return chosen
    # A NaN equals nothing; a stable sort takes it for the largest.
    order = magnitudes.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    return torch.zeros_like(magnitudes, dtype=torch.bool).scatter_(1, order, True).nonzero()


@functools.cache
def _word_tables() -> tuple[Tensor, Tensor]:
    """How many bits each word has, and where: [words], [words x WORD], the places of its ones first."""
    bits = torch.arange(1 << WORD)[:, None] >> torch.arange(WORD) & 1
    return bits.sum(1), bits.sort(dim=1, descending=True, stable=True).indices.view(-1)


def find_ones(mask: Tensor) -> Tensor:
    """int64: the places of the ones in a floating-point mask of whole words, mostly zeros.

    `nonzero` takes a branch per element. Here a product makes numbers of the bits, and a table tells what is in each.
    """
    counts, places = _word_tables()
    powers = 2.0 ** torch.arange(WORD, dtype=mask.dtype)
    words = torch.mv(mask.view(-1, WORD), powers).to(torch.int32)
    ones = counts.index_select(0, words)
    word = torch.repeat_interleave(ones)
    rank = torch.arange(word.numel()).sub_((ones.cumsum(0) - ones).index_select(0, word))
    entry = rank.add_(words.index_select(0, word), alpha=WORD)
    return places.index_select(0, entry).add_(word, alpha=WORD)


@dataclass(frozen=True)
class Strip:
    """Rows in a flat buffer: element j of row (o, i) lies at offset + o x pitch + j x inner + i."""

    offset: int
    outer: int
    pitch: int
    inner: int

    @property
    def rows(self) -> int:
        return self.outer * self.inner

    def bases(self) -> Tensor:
        """int64 [rows]: where each row begins."""
        first = self.offset + self.pitch * torch.arange(self.outer)
        return (first[:, None] + torch.arange(self.inner)).view(-1)


class Tournament:
    """All rows of one length, `inner` and `keep`; made once per layout."""

    def __init__(self, strips: Sequence[Strip], length: int, keep: int) -> None:
        self.strips = strips
        self.length = length
        self.keep = keep
        self.inner = strips[0].inner
        # Of a short contiguous reduction nothing is vectorised; a strided chunk costs a cache line per element.
        self.chunk = 32 if self.inner == 1 else 16
        self.chunks = -(-length // self.chunk)
        self.outer = sum(strip.outer for strip in strips)
        self.rows = self.outer * self.inner
        self.bases = torch.cat([strip.bases() for strip in strips])

    def run(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, keep] each: indices inside the rows, ascending, and the values there."""
        maxima = self._maxima(flat)
        bound = self._bound(maxima)
        row, index, value = self._survivors(flat, maxima, bound)
        return self._decide(flat, row, index, value)

    def _maxima(self, flat: Tensor) -> Tensor:
        """[outer, chunks, inner]: the largest magnitude of every chunk."""
        maxima = flat.new_empty(self.outer, self.chunks, self.inner)
        buffer = flat.new_empty(max(BUFFER_ELEMENTS, self.chunk * self.inner))
        for part, out in self._parts(flat, maxima):
            outer, length, inner = part.shape
            chunks = out.shape[1]
            magnitudes = buffer[: outer * chunks * self.chunk * inner].view(outer, -1, inner)
            if length % self.chunk:
                magnitudes[:, length:] = -1.0
            torch.abs(part, out=magnitudes[:, :length])
            torch.amax(magnitudes.view(outer, chunks, self.chunk, inner), 2, out=out)
        return maxima

    def _parts(self, flat: Tensor, maxima: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the rows that fit the buffer, and where their maxima go."""
        chunk_size = self.chunk * self.inner
        outers = max(1, BUFFER_ELEMENTS // (self.chunks * chunk_size))
        chunks = max(1, BUFFER_ELEMENTS // chunk_size)
        outs = maxima.split([strip.outer for strip in self.strips])
        for strip, out in zip(self.strips, outs, strict=True):
            elements = flat.as_strided(
                (strip.outer, self.length, strip.inner),
                (strip.pitch, strip.inner, 1),
                flat.storage_offset() + strip.offset,
            )
            for some, some_out in zip(elements.split(outers), out.split(outers), strict=True):
                yield from zip(
                    some.split(chunks * self.chunk, 1), some_out.split(chunks, 1), strict=True
                )

    def _bound(self, maxima: Tensor) -> Tensor:
        """[rows]: a magnitude that `keep` chunks of the row reach; infinite where that does not help."""
        by_chunk = maxima.movedim(1, 0).contiguous().view(self.chunks, self.rows)
        highest = by_chunk.amax(0)
        bound = highest if self.keep == 1 else self._bisect(by_chunk, highest)
        crowded = (by_chunk >= bound).sum(0) > 2 * self.keep
        return bound.masked_fill_(crowded, torch.inf)

    def _bisect(self, by_chunk: Tensor, highest: Tensor) -> Tensor:
        """Between the largest maximum of a row and its smallest, in steps of the number's bits."""
        bits = BITS[by_chunk.dtype]
        high = highest.view(bits)
        low = by_chunk.amin(0).view(bits)
        low = torch.maximum(low, high - (OCTAVES << FRACTION_BITS[by_chunk.dtype]))
        reached = torch.empty_like(by_chunk)
        for _ in range(HALVINGS):
            middle = low + (high - low >> 1)
            torch.ge(by_chunk, middle.view(by_chunk.dtype), out=reached)
            enough = reached.sum(0) >= self.keep
            low = torch.where(enough, middle, low)
            high = torch.where(enough, high, middle)
        return low.view(by_chunk.dtype)

    def _survivors(
        self, flat: Tensor, maxima: Tensor, bound: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(row, index, value) of what reaches its row's bound, ordered by row, then index."""
        reach = maxima >= bound.view(self.outer, 1, self.inner)
        hits = reach.view(-1).nonzero().view(-1)
        found = [self._look(flat, some, bound) for some in hits.split(HITS_AT_ONCE)]
        row, index, value = (torch.cat(column) for column in zip(*found, strict=True))
        if self.inner > 1:
            order = torch.add(index, row, alpha=self.length).argsort()
            row, index, value = row[order], index[order], value[order]
        return row, index, value

    def _look(self, flat: Tensor, hits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(row, index, value) of what reaches the bound in some chunks, which are counted as the maxima are."""
        if self.inner == 1:
            row = hits // self.chunks
            first = torch.sub(hits, row, alpha=self.chunks).mul_(self.chunk)
        else:
            line = hits // self.inner
            outer = line // self.chunks
            row = torch.add(hits - line * self.inner, outer, alpha=self.inner)
            first = torch.sub(line, outer, alpha=self.chunks).mul_(self.chunk)
        # The last chunk of a row is moved back inside it; what it shares with the one before must not count twice.
        last = self.length - self.chunk
        begin = first.clamp(max=last)
        values = self._windows(flat, row, begin)
        magnitudes = values.abs()
        if self.length % self.chunk:
            shared = (first > last).nonzero().view(-1)
            magnitudes[shared, : self.chunk - self.length % self.chunk] = -1.0
        torch.ge(magnitudes, bound.index_select(0, row)[:, None], out=magnitudes)
        found = find_ones(magnitudes)
        hit = found // self.chunk
        index = begin.index_select(0, hit).add_(found).sub_(hit, alpha=self.chunk)
        return row.index_select(0, hit), index, values.view(-1).index_select(0, found)

    def _windows(self, flat: Tensor, row: Tensor, begin: Tensor) -> Tensor:
        """[hits, chunk]: the chunks that begin at some index of their rows."""
        places = torch.add(self.bases.index_select(0, row), begin, alpha=self.inner)
        last = flat.numel() - (self.chunk - 1) * self.inner
        windows = flat.as_strided((last, self.chunk), (1, self.inner), flat.storage_offset())
        return windows.index_select(0, places) if self.inner == 1 else windows[places]

    def _decide(
        self, flat: Tensor, row: Tensor, index: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The `keep` largest survivors of every row; a row with too few or too many is chosen from whole."""
        counts = torch.bincount(row, minlength=self.rows)
        fits = (counts >= self.keep) & (counts <= 2 * self.keep + 8)
        if bool(fits.all()):
            chosen = self._choose(row, value, counts)
            return index.index_select(0, chosen), value.index_select(0, chosen)
        indices = index.new_empty(self.rows, self.keep)
        values = value.new_empty(self.rows, self.keep)
        if bool(fits.any()):
            kept = fits[row].nonzero().view(-1)
            places = fits.cumsum(0) - 1
            chosen = kept[self._choose(places[row[kept]], value[kept], counts[fits])]
            indices[fits], values[fits] = (x[chosen].view(-1, self.keep) for x in (index, value))
        along = torch.arange(self.length) * self.inner
        for some in (~fits).nonzero().view(-1).split(max(1, WHOLE_AT_ONCE // self.length)):
            whole = flat[self.bases[some, None] + along]
            indices[some] = choose(whole.abs(), self.keep)[:, 1].view(-1, self.keep)
            values[some] = whole.gather(1, indices[some])
        return indices, values

    def _choose(self, row: Tensor, value: Tensor, counts: Tensor) -> Tensor:
        """int64 [rows x keep]: which survivors are the `keep` largest of rows that have `counts` of them."""
        rows, survivors = counts.numel(), torch.arange(row.numel())
        if survivors.numel() == rows * self.keep:
            return survivors
        width = int(counts.max())
        starts = counts.cumsum(0) - counts
        shift = torch.arange(0, rows * width, width) - starts
        table = value.new_full((rows * width,), -1.0)
        table.scatter_(0, survivors.add_(shift.index_select(0, row)), value.abs())
        row, place = choose(table.view(rows, width), self.keep).unbind(1)
        return starts.index_select(0, row).add_(place)
