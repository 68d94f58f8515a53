"""Long segments in chunks: who sums what, so that a hot row does not keep one program busy.

`row_gradients` on a GPU gives a row of at most `CHUNK` occurrences to one program, which adds them
in their order. A longer one is summed in chunks of `CHUNK` occurrences from its start, each in
order; the chunks' sums again in chunks of `CHUNK`; and so on until one is left. Chunk boundaries
depend on the place within the segment alone, so a row's bits depend on its own contributions and
their order, and on nothing else. A row with 10^5 occurrences takes four passes of at most 32
additions in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distcache.errors import ConfigError

CHUNK = 32
"""Most additions one after the other. Changing it changes the bits of rows with more occurrences
than the smaller of the two values."""


@dataclass(frozen=True)
class SegmentChunks:
    """The chunk tables of a step's long segments. N_l: chunks of pass l; H: long segments.

    `table`: int64, all tables in one tensor, so that one copy brings them to the device;
    `sizes`: (N_1, ..., N_last = H), empty where no segment is long; `chunk`: the most additions.
    """

    table: Tensor
    sizes: tuple[int, ...]
    chunk: int

    def to(self, device: torch.device) -> SegmentChunks:
        """The same on a device; asynchronous where the memory is pinned."""
        return SegmentChunks(self.table.to(device, non_blocking=True), self.sizes, self.chunk)

    def passes(self) -> list[tuple[Tensor, Tensor]]:
        """(starts, ends), int64 `[N_l]` each: places in `order` for the first pass, afterwards
        indices of the chunks of the pass before."""
        parts = self.table.split([size for n in self.sizes for size in (n, n)] + [self._long])
        return [(parts[2 * i], parts[2 * i + 1]) for i in range(len(self.sizes))]

    @property
    def rows(self) -> Tensor:
        """int64 `[H]`: the long segments, ascending."""
        return self.table[len(self.table) - self._long :]

    @property
    def _long(self) -> int:
        return self.sizes[-1] if self.sizes else 0


def segment_chunks(segments: Tensor, chunk: int = CHUNK) -> SegmentChunks:
    """The chunk tables of `segments`, int64 `[R + 1]` on the CPU.

    Takes a pass over `segments` and time that grows with the number of chunks. Raises ConfigError
    for a `chunk` below 2.
    """
    if chunk < 2:
        raise ConfigError(f"chunk={chunk}: sums of fewer than 2 numbers never come to an end")
    lengths = segments.diff()
    rows = (lengths > chunk).nonzero().squeeze(1)
    if len(rows) == 0:
        return SegmentChunks(segments.new_empty(0), (), chunk)
    starts, lengths = segments[rows], lengths[rows]
    tables: list[Tensor] = []
    sizes = []
    while not sizes or sizes[-1] > len(rows):
        counts = (lengths + (chunk - 1)).div(chunk, rounding_mode="floor")
        # Chunks of all long segments, one segment after the other: `first` of each segment.
        after = counts.cumsum(0)
        first = after - counts
        segment = torch.repeat_interleave(counts)
        within = torch.arange(len(segment)) - first[segment]
        begin = starts[segment] + within * chunk
        end = torch.minimum(begin + chunk, (starts + lengths)[segment])
        tables += [begin, end]
        sizes.append(len(segment))
        starts, lengths = first, counts
    return SegmentChunks(torch.cat([*tables, rows]), tuple(sizes), chunk)
