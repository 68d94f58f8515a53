"""Long segments in chunks: who sums what, so that a hot row does not keep one program busy.

`row_gradients` on a GPU gives a row of at most `CHUNK` occurrences to one program, which adds
them in their order. A longer one is summed in chunks of `CHUNK` occurrences from its start, each
in order; the chunks' sums again in chunks of `CHUNK`; and so on until one is left. Boundaries
depend on the place within the segment alone, so a row's bits depend on its own contributions and
their order, and on nothing else. A row with 10^5 occurrences takes four passes of at most 32
additions in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.compiled import compiled, i8, in4, in8, out4, out8, types

CHUNK = 32
"""Most additions one after the other. Changing it changes the bits of rows with more occurrences
than the smaller of the two values."""


@dataclass(frozen=True)
class SegmentChunks:
    """The chunk tables of a step's long segments. N_l: chunks of pass l; H: long segments.

    `table`: all tables in one tensor, so that one copy brings them to the device;
    `sizes`: (N_1, ..., N_last = H), empty where no segment is long.
    """

    table: Tensor
    sizes: tuple[int, ...]

    def passes(self) -> list[tuple[Tensor, Tensor]]:
        """(starts, ends), `[N_l]` each: places in `order` for the first pass, afterwards
        indices of the chunks of the pass before."""
        parts = self.table.split([size for n in self.sizes for size in (n, n)] + [len(self.rows)])
        return [(parts[2 * i], parts[2 * i + 1]) for i in range(len(self.sizes))]

    @property
    def rows(self) -> Tensor:
        """`[H]`: the long segments, ascending."""
        return self.table[len(self.table) - sum(self.sizes[-1:]) :]


@compiled(types.int64(in4, i8, out4), types.int64(in8, i8, out8))
def find_long(segments: np.ndarray, most: int, rows: np.ndarray) -> int:
    """Which of the segments are longer than `most`, to `rows`; how many."""
    count = 0
    for row in range(len(segments) - 1):
        rows[count] = row  # overwritten unless it is
        count += segments[row + 1] - segments[row] > most
    return count


@compiled(types.void(in4, in4, i8, in8, out4), types.void(in8, in8, i8, in8, out8))
def fill_tables(
    segments: np.ndarray, rows: np.ndarray, most: int, sizes: np.ndarray, table: np.ndarray
) -> None:
    """Fill the `table` of `SegmentChunks`, but for its end, for the long segments `rows`."""
    at = 0
    for level in range(len(sizes)):
        before, ends = 0, at + sizes[level]
        for row in rows:
            begin, length = segments[row], segments[row + 1] - segments[row]
            for _ in range(level):
                length = (length + most - 1) // most
            if level > 0:
                begin = before
            before += length
            for start in range(begin, begin + length, most):
                table[at], table[ends] = start, min(start + most, begin + length)
                at, ends = at + 1, ends + 1
        at = ends


def segment_chunks(segments: Tensor) -> SegmentChunks:
    """The chunk tables of `segments`, int32 or int64 `[R + 1]` on the CPU, of that dtype.

    Takes a pass over `segments` and time that grows with the number of chunks.
    """
    ends = segments.numpy()
    rows = np.empty(max(len(ends) - 1, 0), ends.dtype)
    rows = rows[: find_long(ends, CHUNK, rows)]
    if len(rows) == 0:
        return SegmentChunks(segments.new_empty(0), ())
    counts, sizes = ends[rows + 1] - ends[rows], list[int]()
    while not sizes or sizes[-1] > len(rows):
        counts = (counts + (CHUNK - 1)) // CHUNK
        sizes.append(int(counts.sum()))
    table = np.empty(2 * sum(sizes) + len(rows), ends.dtype)
    table[2 * sum(sizes) :] = rows
    fill_tables(ends, rows, CHUNK, np.array(sizes), table)
    return SegmentChunks(torch.from_numpy(table), tuple(sizes))
