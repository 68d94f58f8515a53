"""Initial weights as a function of (seed, table, block of rows): the same bits in every mode."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""About how many elements one block of rows holds (a block is a whole number of rows)."""


def block_rows(dim: int) -> int:
    """Rows of one block of a table of width `dim`."""
    return max(1, BLOCK_ELEMENTS // dim)


def initial_rows(seed: int, table: int, table_rows: int, dim: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a new table: uniform in +-sqrt(1 / table_rows), as TorchRec's default.

    `table` is the table's index in the model. Returns float32 `[stop - start, dim]` on the CPU,
    drawn in float32 whatever the training dtype, so that float64 runs start from the same values.
    """
    size, bound = block_rows(dim), math.sqrt(1.0 / table_rows)
    out = np.empty((stop - start, dim), dtype=np.float32)
    for block in range(start // size, -(-stop // size)):
        first = block * size
        length = min(size, table_rows - first)
        # SFC64 draws about 1 ns per float32; the block's own seed makes blocks independent.
        generator = np.random.Generator(np.random.SFC64([seed, table, block]))
        values = generator.random((length, dim), dtype=np.float32)
        values *= np.float32(2 * bound)
        values -= np.float32(bound)
        low, high = max(start, first), min(stop, first + length)
        out[low - start : high - start] = values[low - first : high - first]
    return torch.from_numpy(out)
