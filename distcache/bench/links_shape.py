"""Batches of Criteo Terabyte's shape, with tables that fit a small machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distcache.bench.report import Record
from distcache.data.synthetic import ZipfTables

if TYPE_CHECKING:
    from distcache.bench.links import LinksOptions

ZIPF = 1.05
MODEL = (
    "model.over_arch=[512,512,256,1]",
    "optim.dense_lr=0.1",
    "optim.embedding_lr=0.1",
    f"data.zipf={ZIPF}",
)
"""DLRM Terabyte's top MLP and rates; ids by a Zipf law."""

_WHOLE = 40_000
"""Tables of at most so many rows keep them."""


@dataclass(frozen=True)
class Shape:
    """`rows` and multi-hot `bags` (ids of a sample) of each table."""

    rows: tuple[int, ...]
    bags: tuple[int, ...]


# fmt: off
SIZES = {
    "terabyte": Shape(
        (40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
         2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
        (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
    ),
    "small": Shape((200000, 5000, 1000, 200, 10, 3), (3, 2, 1, 12, 1, 1)),
}
# fmt: on
"""Tables and bags of MLPerf's DLRM-DCNv2, and a small one for tests."""


def table_rows(options: LinksOptions) -> tuple[int, ...]:
    """Rows of each table here."""
    rows = SIZES[options.size].rows
    return tuple(count if count <= _WHOLE else -(-count // options.scale) for count in rows)


def batch_record(options: LinksOptions, kind: str) -> Record:
    """Ids and expected distinct rows of a rank's batch, tables as here and whole."""
    shape = SIZES[options.size]
    bags = shape.bags if kind == "multi_hot" else (1,) * len(shape.rows)
    here = table_rows(options)
    return {
        "kind": "batches",
        "batches": kind,
        "ids": options.batch * sum(bags),
        "pooled": options.batch * len(bags),
        "rows": sum(here),
        "distinct": _distinct(here, bags, options.batch),
        "whole_rows": sum(shape.rows),
        "whole_distinct": _distinct(shape.rows, bags, options.batch),
    }


def _distinct(rows: Sequence[int], bags: Sequence[int], batch: int) -> float:
    """Expected distinct rows among the ids of `batch` samples."""
    tables = ZipfTables(rows, ZIPF, 0)
    return sum(tables.expected_distinct(at, batch * bag) for at, bag in enumerate(bags))
