"""Counter-based random numbers: everything about a sample is a hash of where it stands."""

from __future__ import annotations

import hashlib

import numpy as np

# -----------------------------------------------------------------------------
# Counter-based random numbers: everything about a sample is a hash of where it stands.
#
# The hash is the finaliser of splitmix64 (Steele, Lea and Flood, 2014), on whole arrays of uint64.
# Integer arithmetic alone, so that a number does not depend on the slice in which it is drawn.

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = (1 << 64) - 1
_LOW_LANES = np.uint64(0x0000FFFF0000FFFF)

LANE_SUM_MEAN = 131070
"""Mean of the sum of four uniform 16-bit numbers."""
NORMAL_STD = 2 / 3**0.5
"""Standard deviation of `normal_from_bits`."""


def digest_of(*arrays: np.ndarray) -> str:
    """A digest of arrays in memory (C order): their dtypes, shapes and values."""
    digest = hashlib.blake2b(digest_size=32)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def mix64(values: np.ndarray) -> np.ndarray:
    """Hash uint64 `values` in place (any shape, at least one dimension) and return them."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= np.uint64(_FIRST)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(_SECOND)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def key_of(*path: int) -> int:
    """One 64-bit key for a path of integers such as (seed, purpose, table)."""
    key = 0
    for part in path:
        key = (key + (part + 1) * GOLDEN) & _ALL
        key = ((key ^ (key >> 30)) * _FIRST) & _ALL
        key = ((key ^ (key >> 27)) * _SECOND) & _ALL
        key ^= key >> 31
    return key


def keys_of(count: int, *path: int) -> np.ndarray:
    """Keys uint64 `[count]` of (path..., 0), (path..., 1), ..."""
    return np.array([key_of(*path, index) for index in range(count)], dtype=np.uint64)


def hash_counters(counters: np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """Hash uint64 `counters` under `key` (a key, or an array that broadcasts to them)."""
    return mix64(counters * np.uint64(GOLDEN) + np.asarray(key, dtype=np.uint64))


def uniform_from_bits(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) with 53 random bits from uint64 `bits`."""
    return (bits >> np.uint64(11)).view(np.int64) * 2.0**-53


def normal_from_bits(bits: np.ndarray) -> np.ndarray:
    """float64, nearly normal, mean 0, deviation `NORMAL_STD`, from uint64 `bits`.

    The sum of four 16-bit lanes: multiples of 2^-15 in (-4, 4), exact in float32 too, so that
    sums of such numbers do not depend on their order.
    """
    lanes = bits & _LOW_LANES
    lanes += (bits >> np.uint64(16)) & _LOW_LANES
    sums = (lanes & np.uint64(0xFFFFFFFF)) + (lanes >> np.uint64(32))
    return (sums.view(np.int64) - LANE_SUM_MEAN) * 2.0**-15


# -----------------------------------------------------------------------------
# Bags of several ids in place of one, as a fixed function of the id.
#
# MLPerf's multi-hot Criteo data has such bags drawn once for every id; the sizes are its own, the
# rule is this project's: the bag of id r in table t of R rows with h ids is r itself, then for k =
# 1
# to h - 1 the id hash(r * h + k under the key of t) modulo R. Equal ids have equal bags, always.

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
