"""Exact top-k of many rows on the CPU, without a heap or a sort over all elements.

Rows of one length compete together:

1. Cut every row into chunks and note the largest magnitude of each: one pass over memory.
2. Bisect for a bound per row that at least `keep` of its chunks reach. As many elements then do, so nothing below it
   can be among the `keep` largest.
3. Look into the chunks that reach it. What survives is little more than `keep` elements of each row.
4. Choose among the survivors, ties to the lowest index.

Where a bound does not thin out (zeros, a constant, NaN), `keep` whole chunks are chosen from. Costly on a CPU are branches
nobody can predict and memory that was never touched before; hence vectorised passes and a small buffer to work in.
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
LEAST_ELEMENTS = 1 << 17
LEAST_RATIO = 48
"""Of length to `keep`; below it most chunks reach any bound."""
HALVINGS = 7
OCTAVES = 16
"""How far below its largest magnitude the bound of a row is looked for."""
WORD = 16


@dataclass(frozen=True)
class Portions:
    """How much is worked on at once, in elements or chunks."""

    buffer: int = 1 << 19
    """Elements whose magnitudes are written down."""
    hits: int = 1 << 14
    """Chunks that reach a bound."""
    chosen: int = 1 << 20
    """Elements of the chunks that rows are chosen from where a bound does not help."""


def pays(elements: int, length: int, keep: int, dtype: torch.dtype) -> bool:
    """Whether rows are worth a tournament: many elements, few of them kept."""
    return dtype in BITS and elements >= LEAST_ELEMENTS and length >= LEAST_RATIO * keep


def choose(magnitudes: Tensor, keep: int) -> Tensor:
    """int64 [rows, keep]: indices of the `keep` largest of every row, ascending; ties to the lowest index."""
    rows, length = magnitudes.shape
    if keep == 1:
        least = magnitudes.amax(-1, keepdim=True)
    else:
        least = magnitudes.topk(keep, sorted=False).values.amin(-1, keepdim=True)
    if bool(least.isnan().any()):
        # It equals nothing; a stable sort takes it for the largest.
        order = magnitudes.sort(dim=-1, descending=True, stable=True).indices
        return order[:, :keep].sort(dim=-1).values
    chosen = places_of(magnitudes >= least)
    if chosen.numel() != rows * keep:
        above, equal = magnitudes > least, magnitudes == least
        room = keep - above.sum(-1, keepdim=True)
        chosen = places_of(above | equal & (equal.cumsum(-1) <= room))
    return chosen.view(rows, keep) - torch.arange(0, rows * length, length)[:, None]


def places_of(mask: Tensor) -> Tensor:
    """int64: where a mask holds, counted over all its elements."""
    return mask.reshape(-1).nonzero().view(-1)


@functools.cache
def _word_tables() -> tuple[Tensor, Tensor]:
    """How many ones each word has, and their places: int64 [words], [words x WORD]."""
    bits = torch.arange(1 << WORD)[:, None] >> torch.arange(WORD) & 1
    return bits.sum(1), bits.sort(dim=1, descending=True, stable=True).indices.view(-1)


@functools.cache
def _powers(dtype: torch.dtype) -> Tensor:
    return 2.0 ** torch.arange(WORD, dtype=dtype)


def find_ones(mask: Tensor) -> Tensor:
    """int64: the places of the few ones in a floating-point mask of whole words, counted over all its elements.

    `nonzero` takes a branch per element. Here a product makes numbers of the bits, and a table tells what is in each.
    """
    counts, places = _word_tables()
    words = torch.mv(mask.view(-1, WORD), _powers(mask.dtype)).long()
    ones = counts.index_select(0, words)
    word = torch.repeat_interleave(ones)
    # The entry of a word's first one, less how many ones came before: the n-th one is then n further.
    entries = words.mul_(WORD).add_(ones).sub_(ones.cumsum(0)).index_select(0, word)
    return places.index_select(0, entries.add_(torch.arange(word.numel()))).add_(word, alpha=WORD)


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


@dataclass(frozen=True)
class Part:
    """Elements whose magnitudes fit the buffer: where they lie, and where their maxima go."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    offset: int
    chunks: int
    first: int


class Tournament:
    """All rows of one length, `inner` and `keep`; made once per layout."""

    def __init__(
        self, strips: Sequence[Strip], length: int, keep: int, portions: Portions | None = None
    ) -> None:
        self.portions = portions or Portions()
        assert length >= LEAST_RATIO * keep
        self.length = length
        self.keep = keep
        self.inner = strips[0].inner
        # Of a short contiguous reduction nothing is vectorised; a strided chunk costs a cache line per element.
        self.chunk = 32 if self.inner == 1 else 16
        self.chunks = -(-length // self.chunk)
        self.outer = sum(strip.outer for strip in strips)
        self.rows = self.outer * self.inner
        self.bases = torch.cat([strip.bases() for strip in strips])
        self.parts = list(self._parts(strips))

    def _parts(self, strips: Sequence[Strip]) -> Iterator[Part]:
        chunk_size = self.chunk * self.inner
        outers = max(1, self.portions.buffer // (self.chunks * chunk_size))
        chunks = max(1, self.portions.buffer // chunk_size)
        first = 0
        for strip in strips:
            for outer in range(0, strip.outer, outers):
                for chunk in range(0, self.chunks, chunks):
                    begin, end = chunk * self.chunk, (chunk + chunks) * self.chunk
                    length = min(end, self.length) - begin
                    yield Part(
                        shape=(min(outers, strip.outer - outer), length, self.inner),
                        strides=(strip.pitch, self.inner, 1),
                        offset=strip.offset + outer * strip.pitch + begin * self.inner,
                        chunks=-(-length // self.chunk),
                        first=((first + outer) * self.chunks + chunk) * self.inner,
                    )
            first += strip.outer

    def run(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, keep] each: indices inside the rows, ascending, and the values there."""
        maxima = self._maxima(flat)
        bound = self._bound(maxima)
        row, index, value = self._survivors(flat, maxima, bound)
        return self._decide(flat, maxima, row, index, value)

    def _maxima(self, flat: Tensor) -> Tensor:
        """[outer, chunks, inner]: the largest magnitude of every chunk."""
        maxima = flat.new_empty(self.outer, self.chunks, self.inner)
        buffer = flat.new_empty(max(self.portions.buffer, self.chunk * self.inner))
        for part in self.parts:
            outer, length, inner = part.shape
            elements = flat.as_strided(
                part.shape, part.strides, flat.storage_offset() + part.offset
            )
            out = maxima.as_strided((outer, part.chunks, inner), maxima.stride(), part.first)
            chunks = buffer[: out.numel() * self.chunk].view(outer, part.chunks, self.chunk, inner)
            magnitudes = chunks.view(outer, -1, inner)
            if length % self.chunk:
                magnitudes[:, length:] = -1.0
                magnitudes = magnitudes[:, :length]
            torch.abs(elements, out=magnitudes)
            torch.amax(chunks, 2, out=out)
        return maxima

    def _bound(self, maxima: Tensor) -> Tensor:
        """[rows]: a magnitude that `keep` chunks of the row reach; infinite where that does not help."""
        by_chunk = maxima.movedim(1, 0).contiguous().view(self.chunks, self.rows)
        reached = torch.empty_like(by_chunk)
        highest = by_chunk.amax(0)
        bound = highest if self.keep == 1 else self._bisect(by_chunk, highest, reached)
        crowded = torch.ge(by_chunk, bound, out=reached).sum(0) > 2 * self.keep
        return bound.masked_fill_(crowded, torch.inf)

    def _bisect(self, by_chunk: Tensor, highest: Tensor, reached: Tensor) -> Tensor:
        """Between the smallest maximum of a row and its largest, in halves of the numbers' bits."""
        dtype, bits = by_chunk.dtype, BITS[by_chunk.dtype]
        high = highest.view(bits)
        low = by_chunk.amin(0).view(bits)
        low = torch.maximum(low, high - (OCTAVES << FRACTION_BITS[dtype]))
        half = high - low
        for _ in range(HALVINGS):
            middle = low + half.bitwise_right_shift_(1)
            enough = torch.ge(by_chunk, middle.view(dtype), out=reached).sum(0) >= self.keep
            low = torch.where(enough, middle, low)
        return low.view(dtype)

    def _survivors(
        self, flat: Tensor, maxima: Tensor, bound: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(row, index, value) of what reaches its row's bound, ordered by row, then index."""
        hits = places_of(maxima >= bound.view(self.outer, 1, self.inner))
        found = [self._look(flat, some, bound) for some in hits.split(self.portions.hits)]
        row, index, value = (torch.cat(column) for column in zip(*found, strict=True))
        if self.inner > 1:
            order = torch.add(index, row, alpha=self.length).argsort()
            row, index, value = row[order], index[order], value[order]
        return row, index, value

    def _look(self, flat: Tensor, hits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(row, index, value) of what reaches the bound in some chunks, which are counted as the maxima are."""
        line = hits if self.inner == 1 else hits // self.inner
        outer = line // self.chunks
        first = torch.sub(line, outer, alpha=self.chunks).mul_(self.chunk)
        row = outer if self.inner == 1 else hits + (outer - line) * self.inner
        begin, values, magnitudes = self._open(flat, row, first)
        torch.ge(magnitudes, bound.index_select(0, row)[:, None], out=magnitudes)
        found = find_ones(magnitudes)
        hit = found >> self.chunk.bit_length() - 1
        index = begin.index_select(0, hit).add_(found & self.chunk - 1)
        return row.index_select(0, hit), index, values.view(-1).index_select(0, found)

    def _decide(
        self, flat: Tensor, maxima: Tensor, row: Tensor, index: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The `keep` largest of every row: of the survivors, unless they are too few or too many."""
        counts = torch.bincount(row, minlength=self.rows)
        fits = (counts >= self.keep) & (counts <= 2 * self.keep + 8)
        if bool(fits.all()):
            chosen = self._choose(row, value, counts)
            return index[chosen], value[chosen]
        indices = index.new_empty(self.rows, self.keep)
        values = value.new_empty(self.rows, self.keep)
        if bool(fits.any()):
            kept = places_of(fits[row])
            places = fits.cumsum(0) - 1
            chosen = kept[self._choose(places[row[kept]], value[kept], counts[fits])]
            indices[fits], values[fits] = index[chosen], value[chosen]
        at_once = max(1, self.portions.chosen // (self.keep * self.chunk))
        for some in places_of(~fits).split(at_once):
            indices[some], values[some] = self._choose_chunks(flat, maxima, some)
        return indices, values

    def _open(self, flat: Tensor, row: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(where they begin, values, magnitudes) of the chunks that are due to begin at `first` of their rows.

        The last chunk of a row is moved back inside it; what it then shares with the one before must not count twice.
        """
        begin = first.clamp(max=self.length - self.chunk)
        places = torch.add(self.bases.index_select(0, row), begin, alpha=self.inner)
        last = flat.numel() - (self.chunk - 1) * self.inner
        windows = flat.as_strided((last, self.chunk), (1, self.inner), flat.storage_offset())
        values = windows.index_select(0, places) if self.inner == 1 else windows[places]
        magnitudes = values.abs()
        if self.length % self.chunk:
            magnitudes[places_of(begin < first), : -self.length % self.chunk] = -1.0
        return begin, values, magnitudes

    def _choose_chunks(self, flat: Tensor, maxima: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        """(indices, values) [some, keep] out of the `keep` chunks of each row with the largest maxima.

        An element of another chunk is beaten by one of each of these, also on equal terms: they come first.
        """
        chunks = choose(maxima[some // self.inner, :, some % self.inner], self.keep)
        rows = some.repeat_interleave(self.keep)
        begin, values, magnitudes = self._open(flat, rows, chunks.view(-1) * self.chunk)
        chosen = choose(magnitudes.view(len(some), -1), self.keep)
        index = begin.view_as(chunks).gather(1, chosen // self.chunk) + chosen % self.chunk
        return index, values.view(len(some), -1).gather(1, chosen)

    def _choose(self, row: Tensor, value: Tensor, counts: Tensor) -> Tensor:
        """int64 [rows, keep]: which survivors are the `keep` largest of rows that have `counts` of them."""
        rows, survivors = counts.numel(), torch.arange(row.numel())
        if survivors.numel() == rows * self.keep:
            return survivors.view(rows, self.keep)
        width = int(counts.max())
        starts = counts.cumsum(0) - counts
        shift = torch.arange(0, rows * width, width) - starts
        table = value.new_full((rows * width,), -1.0)
        table.scatter_(0, survivors.add_(shift.index_select(0, row)), value.abs())
        return choose(table.view(rows, width), self.keep) + starts[:, None]
