"""Random jagged batches and their canonical order, for tests of the row operations."""

from __future__ import annotations

import torch

from distcache.ops import reference
from distcache.ops.long_segments import SegmentChunks


def random_bags(seed, bags, rows, dim, dtype, weighted, max_ids=5):
    """A random jagged batch: rows [U, D], positions [n], offsets [K + 1], weights [n] or None."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, max_ids + 1, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(offsets[-1])
    positions = torch.randint(0, rows, (n,), generator=generator)
    table = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(n, generator=generator, dtype=torch.float64).to(dtype)
    return table, positions, offsets, weights if weighted else None


def segments_of(positions, rows):
    """The canonical order of a step's ids: by row, in occurrence order; and each row's segment."""
    order = torch.sort(positions, stable=True).indices
    counts = torch.bincount(positions, minlength=rows)
    return order, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def bag_of(offsets):
    """The bag of each id, [n]."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())


def chunked_row_gradients(
    bag_gradients: torch.Tensor,
    bag_of: torch.Tensor,
    order: torch.Tensor,
    segments: torch.Tensor,
    weights: torch.Tensor | None,
    chunks: SegmentChunks,
) -> torch.Tensor:
    """`row_gradients` with the additions of `segment_chunks`: the twin of the GPU's body.

    Products with weights are rounded before they are added.
    """
    values = bag_gradients.detach().index_select(0, bag_of.index_select(0, order))
    if weights is not None:
        values = values * weights.detach().to(values.dtype).index_select(0, order).unsqueeze(1)
    out = reference._segment_sum(
        values, torch.arange(len(values), device=values.device), segments, None
    )
    for starts, ends in chunks.passes():
        # Bags from one bound to the next: a gap, a chunk, a gap, ..., a chunk, a gap.
        bounds = torch.stack((starts, ends), dim=1).view(-1)
        bounds = torch.cat((bounds.new_zeros(1), bounds, bounds.new_tensor([len(values)])))
        index = torch.arange(len(values), device=values.device)
        values = reference._segment_sum(values, index, bounds, None)[1::2]
    return out.index_copy_(0, chunks.rows, values) if chunks.sizes else out


def chunks_of(segments: torch.Tensor, most: int) -> SegmentChunks:
    """`segment_chunks` with chunks of `most`, in whole tensors: the twin of the compiled one."""
    lengths = segments.diff()
    rows = (lengths > most).nonzero().squeeze(1)
    if len(rows) == 0:
        return SegmentChunks(segments.new_empty(0), ())
    starts, lengths = segments[rows], lengths[rows]
    tables: list[torch.Tensor] = []
    sizes = []
    while not sizes or sizes[-1] > len(rows):
        counts = (lengths + (most - 1)).div(most, rounding_mode="floor")
        # Chunks of all long segments, one segment after the other: `first` of each segment.
        after = counts.cumsum(0)
        first = after - counts
        segment = torch.repeat_interleave(counts)
        within = torch.arange(len(segment)) - first[segment]
        begin = starts[segment] + within * most
        end = torch.minimum(begin + most, (starts + lengths)[segment])
        tables += [begin, end]
        sizes.append(len(segment))
        starts, lengths = first, counts
    return SegmentChunks(torch.cat([*tables, rows]).to(segments.dtype), tuple(sizes))
