"""What the kernels' bench works on: jagged batches with their plan, everything cached."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.data.synthetic import ZipfTables
from distcache.ops.reference import SegmentChunks, segment_chunks
from distcache.planner.loops import hashed_rows


@dataclass(frozen=True)
class Shape:
    """T `tables` of `rows` rows of `width` floats, read by `batch` bags of `pooling` ids each."""

    tables: int
    rows: int
    width: int
    batch: int
    pooling: int

    @property
    def capacity(self) -> int:
        """C: rows of all tables, each with its slot."""
        return self.tables * self.rows

    @property
    def ids(self) -> int:
        """n: ids of a step."""
        return self.tables * self.batch * self.pooling

    @property
    def bags(self) -> int:
        """K: bags of a step."""
        return self.tables * self.batch


@dataclass(frozen=True)
class Work:
    """One step on the device; index tensors are int64. U rows, n ids, K bags, as in `StepPlan`.

    `rows` `[n]`: row numbers over all tables; `ids` `[n]`: within the table; `upstream` `[K, D]`:
    the bags' gradients, table-major as the bags are; `by_sample` `[batch, T D]`: the same as a
    model lays them out.
    """

    rows: Tensor
    ids: Tensor
    offsets: Tensor
    slots: Tensor
    positions: Tensor
    order: Tensor
    segments: Tensor
    bag_of: Tensor
    chunks: SegmentChunks
    upstream: Tensor
    by_sample: Tensor


def slots_of(shape: Shape, seed: int) -> Tensor:
    """int64 `[C]`, CPU: the slot of every row, scattered as in a cache that has run for a while."""
    return torch.randperm(shape.capacity, generator=torch.Generator().manual_seed(seed))


def initial_weight(shape: Shape, seed: int) -> Tensor:
    """float32 `[C, D]`, CPU: the weights of every row, by row number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape.capacity, shape.width, generator=generator).mul_(0.1)


def make_work(shape: Shape, zipf: float, seed: int, step: int, device: torch.device) -> Work:
    """Draw and plan a step: ids by Zipf's law in each table."""
    rng = np.random.default_rng([seed, step])
    per_table = np.full(shape.tables, shape.batch * shape.pooling)
    source = ZipfTables([shape.rows] * shape.tables, zipf, seed)
    ids = source.draw_ids(rng.random(shape.ids), per_table)
    rows = ids + np.repeat(np.arange(shape.tables) * shape.rows, per_table)
    distinct, inverse = hashed_rows(rows)
    positions = torch.from_numpy(inverse.astype(np.int64))
    segments = torch.zeros(len(distinct) + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(positions, minlength=len(distinct)), 0, out=segments[1:])
    offsets = torch.arange(shape.bags + 1) * shape.pooling
    generator = torch.Generator().manual_seed(seed + 1 + step)
    upstream = torch.randn(shape.bags, shape.width, generator=generator).mul_(0.01)
    by_sample = upstream.view(shape.tables, shape.batch, -1).transpose(0, 1).flatten(1)
    return Work(
        rows=torch.from_numpy(rows).to(device),
        ids=torch.from_numpy(ids).to(device),
        offsets=offsets.to(device),
        slots=slots_of(shape, seed)[torch.from_numpy(distinct)].to(device),
        positions=positions.to(device),
        order=positions.argsort(stable=True).to(device),
        segments=segments.to(device),
        bag_of=torch.arange(shape.bags).repeat_interleave(shape.pooling).to(device),
        chunks=segment_chunks(segments).to(device),
        upstream=upstream.to(device),
        by_sample=by_sample.contiguous().to(device),
    )


def moved_bytes(shape: Shape, distinct: int, optimizer: str) -> dict[str, int]:
    """Bytes that each operation reads and writes, indices included.

    Every id's row counts, whether it comes from the device's memory or its cache; for `combined`
    pieces of other libraries the sum of the operations that they stand for.
    """
    n, bags, row = shape.ids, shape.bags, 4 * shape.width
    rows_touched = {"sgd": 3, "adam": 7}[optimizer]
    moved = {
        "gather": distinct * (8 + 2 * row),
        "lookup": n * (8 + row) + bags * (8 + row),
        "gradient": n * (16 + row) + distinct * (8 + row),
        "update": distinct * (8 + rows_touched * row),
    }
    moved["gradient + update"] = moved["gradient"] + moved["update"]
    return moved
