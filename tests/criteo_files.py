"""Files of Criteo lines for tests, with ids of the real tables, and their source."""

from __future__ import annotations

import numpy as np

from distcache.data.criteo import CriteoSource, CriteoSpec

ROWS = np.array(
    [
        1460,
        583,
        10131227,
        2202608,
        305,
        24,
        12517,
        633,
        3,
        93145,
        5683,
        8351593,
        3194,
        27,
        14992,
        5461306,
        10,
        5652,
        2173,
        4,
        7046547,
        18,
        15,
        286181,
        105,
        142572,
    ]
)


def line(label="0", integers=None, ids=None, index=0) -> str:
    """A good line, but for the fields that are given."""
    integers = integers or [str(index + i) for i in range(13)]
    ids = ids or [f"{(index + 1) * 2654435761 * (i + 1) % 2**32:08x}" for i in range(26)]
    return "\t".join([label, *integers, *ids])


def lines(count: int) -> list[str]:
    """Good lines; the first integer of each is its number."""
    return [line(str(i % 3 // 2), index=i) for i in range(count)]


def write(path, text: list[str], end: str = "\n"):
    """A file of these lines."""
    path.write_bytes((end.join(text) + end).encode())
    return path


def source(path, batch=8, **spec) -> CriteoSource:
    """The source of a file; its batches come loaded."""
    made = CriteoSource(CriteoSpec(path, ROWS, batch, **spec))
    made.deferred = False
    return made
