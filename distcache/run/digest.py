"""Digests that tell whether two runs have the same bits."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.first import on_first
from distcache.comm.world import World
from distcache.errors import DistcacheError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel

BLOCK_BYTES = 16 << 20
"""About how many bytes of a table are read and hashed at a time."""

BEAT_BYTES = 1 << 30
"""After so many bytes the ranks meet, so that none waits for rank 0 longer than its timeout."""

AUTO_BYTES = 4 << 30
"""`run.digest=auto` hashes the state when all tables together have at most this many bytes."""


def chain_loss(previous: bytes, loss: float) -> bytes:
    """d(t) = SHA-256(d(t-1), bits of the loss as little-endian float64); d before step 0 is empty.

    Chained, so that one digest speaks for every loss up to its step.
    """
    return hashlib.sha256(previous + struct.pack("<d", loss)).digest()


def wants_state_digest(choice: str, tables: Sequence[TableSpec], dtype: torch.dtype) -> bool:
    """Whether `run.digest` (`true`, `false` or `auto`) asks for the state digest."""
    if choice.lower() != "auto":
        return choice.lower() == "true"
    return sum(table.rows * table.dim for table in tables) * dtype.itemsize <= AUTO_BYTES


def state_digest(
    mode: Parallel, tables: Sequence[TableSpec], dtype: torch.dtype, world: World
) -> str:
    """SHA-256 over every table's weights in original id order, then the dense parameters in order.

    Hashed are the values' bytes in `dtype`, row after row; nothing else. Call after `flush`, on
    all ranks; every rank gets the hexadecimal digest.
    """
    sha, hashed = hashlib.sha256(), 0
    for index, table in enumerate(tables):
        rows = max(1, BLOCK_BYTES // (table.dim * dtype.itemsize))
        for start in range(0, table.rows, rows):
            block = mode.table_block(index, start, min(start + rows, table.rows))
            hashed += rows * table.dim * dtype.itemsize
            if hashed >= BEAT_BYTES:
                dist.barrier(group=world.host_group)
                hashed = 0
            if world.is_first:
                if block is None:
                    raise DistcacheError(f"rank 0 got no rows of table {table.name!r} to hash")
                _update(sha, block, dtype)
    for parameter in mode.dense_state().values():
        if world.is_first:
            _update(sha, parameter, dtype)
    return on_first(world, sha.hexdigest)


def _update(sha: hashlib._Hash, values: Tensor, dtype: torch.dtype) -> None:
    sha.update(values.detach().to("cpu", dtype).reshape(-1).contiguous().numpy().data)
