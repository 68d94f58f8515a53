"""Random jagged batches and their canonical order, for tests of the row operations."""

from __future__ import annotations

import torch


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
