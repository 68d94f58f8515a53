"""Bags of several ids in place of one, as a fixed function of the id.

MLPerf's multi-hot Criteo data has such bags drawn once for every id; the sizes are its own, the
rule is this project's: the bag of id r in table t of R rows with h ids is r itself, then for k = 1
to h - 1 the id hash(r * h + k under the key of t) modulo R. Equal ids have equal bags, always.
"""

from __future__ import annotations

import numpy as np

from distcache.data.hashing import hash_counters, key_of

_PURPOSE = 0x6D756C7469  # "multi": keeps these keys apart from those of other random numbers


def bags(ids: np.ndarray, table: int, rows: int, size: int) -> np.ndarray:
    """Bags int64 `[n, size]` of int64 `ids` `[n]` of table number `table`."""
    result = np.empty((len(ids), size), dtype=np.int64)
    result[:, 0] = ids
    if size > 1:
        places = np.arange(1, size, dtype=np.uint64)
        counters = ids.astype(np.uint64)[:, None] * np.uint64(size) + places
        hashed = hash_counters(counters, key_of(_PURPOSE, table))
        result[:, 1:] = (hashed % np.uint64(rows)).astype(np.int64)
    return result
