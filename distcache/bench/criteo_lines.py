"""Made-up Criteo lines, fast: skewed ids in the tables of Criteo Kaggle, missing fields."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from distcache.data.hashing import mix64
from distcache.data.raw.settings import KAGGLE_ROWS

_LINES = 200_000
_FOUR_DIGITS = np.array([f"{i:04x}".encode() for i in range(1 << 16)], dtype="S4").view("<u4")
_OFTEN_MISSING = (18, 19, 21, 24, 25)
_OPTIONS = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


def write_lines(path: Path, size: int, seed: int = 0) -> int:
    """Write at least `size` bytes of lines; how many lines.

    A quarter of the labels is 1; a fifth of the integers and 3 % of the ids are missing (40 % in
    five tables, as in Criteo Kaggle). Ids are ranks of a log-uniform law (Zipf's with exponent
    1) up to the table's rows, hashed to 32 bits.
    """
    random, lines = np.random.default_rng(seed), 0
    with path.open("wb") as file:
        while file.tell() < size:
            count = min(_LINES, max(1000, (size - file.tell()) // 200))
            pyarrow.csv.write_csv(_table(random, count), file, _OPTIONS)
            lines += count
    return lines


def _table(random: np.random.Generator, count: int) -> pa.Table:
    columns = [pa.array((random.random(count) < 0.256).astype(np.uint8))]
    for index in range(13):
        values = np.floor(np.exp(random.random(count) * (2 + index % 5 * 2))).astype(np.int64) - 2
        columns.append(pa.array(values, mask=random.random(count) < 0.2))
    for table, rows in enumerate(KAGGLE_ROWS):
        ranks = np.minimum(rows ** random.random(count), rows - 1).astype(np.uint64)
        hashed = mix64(ranks + np.uint64(table << 40)) >> np.uint64(32)
        missing = random.random(count) < (0.4 if table in _OFTEN_MISSING else 0.03)
        columns.append(_hexadecimal(hashed.astype(np.uint32), missing))
    return pa.table(columns, names=[f"c{index}" for index in range(40)])


def _hexadecimal(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """Eight digits for each of `values`, nothing for missing ones."""
    words = np.empty((len(values), 2), dtype="<u4")
    words[:, 0], words[:, 1] = _FOUR_DIGITS[values >> 16], _FOUR_DIGITS[values & 0xFFFF]
    offsets = np.concatenate(([0], np.cumsum(np.where(missing, 0, 8)))).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(words[~missing].tobytes())]
    return pa.Array.from_buffers(pa.utf8(), len(values), buffers)
