"""What to make of which text: the settings of one preprocessing job, checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from distcache.data.criteo_text import IDS
from distcache.errors import ConfigError

KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TERABYTE_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
PRESETS = {"kaggle": KAGGLE_ROWS, "terabyte": TERABYTE_ROWS}
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per sample of each table in MLPerf's multi-hot Criteo data."""

OUT_OF_VOCABULARY, MISSING, FIRST = 0, 1, 2
"""Rows of a vocabulary: ids outside it, missing ids, and the first of its ids."""

WORKER_BYTES = 208 << 20
"""Memory of a worker: its modules, a part's arrays twice, and a block being parsed."""
_MAIN_BYTES = 200 << 20


@dataclass(frozen=True)
class PreprocessSettings:
    """One job. Raises ConfigError that names the key.

    `mode`: `vocabulary` or `hash`; `rows`: of the 26 tables (`hash`); `min_count`: training
    samples in which an id of a vocabulary must occur; `split`: what is held out: `seventh` (the
    last of the samples), `last_file` or `none`; `workers`: processes, None for what cores and
    `memory` (bytes, all processes together) allow; `multi_hot`: ids per bag of each table, None
    for one; `on_bad_line`: `error` or `skip`; `part`: bytes of text that are one unit of work.
    """

    input: Sequence[str]
    output: str
    mode: str = "vocabulary"
    rows: Sequence[int] | None = None
    min_count: int = 1
    split: str = "seventh"
    workers: int | None = None
    memory: int = 2 << 30
    multi_hot: Sequence[int] | None = None
    on_bad_line: str = "error"
    part: int = field(default=64 << 20)

    def __post_init__(self) -> None:
        choices = {
            "mode": ("vocabulary", "hash"),
            "split": ("seventh", "last_file", "none"),
            "on_bad_line": ("error", "skip"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(
                    f"{key}={getattr(self, key)} is unknown: choose {' or '.join(allowed)}"
                )
        for key in ("min_count", "workers", "part"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value}: give a whole number of at least 1")
        if self.memory < _MAIN_BYTES + WORKER_BYTES:
            least = (_MAIN_BYTES + WORKER_BYTES) >> 20
            raise ConfigError(f"memory={self.memory}: give at least {least} MiB, in bytes")
        self._check_tables()

    def _check_tables(self) -> None:
        if self.mode == "hash" and self.rows is None:
            raise ConfigError("mode=hash needs rows=[26 numbers], rows=kaggle or rows=terabyte")
        if self.mode == "vocabulary" and self.rows is not None:
            raise ConfigError(
                "rows is a key of mode=hash: a vocabulary finds its rows in the data; leave it out"
            )
        if self.mode == "hash" and self.min_count != 1:
            raise ConfigError(f"min_count={self.min_count} is a key of mode=vocabulary alone")
        for key, values in (("rows", self.rows), ("multi_hot", self.multi_hot)):
            if values is not None and (len(values) != IDS or min(values) < 1):
                raise ConfigError(
                    f"{key}={list(values)}: give {IDS} whole numbers of at least 1, one per table"
                )

    @property
    def table_rows(self) -> tuple[int, ...] | None:
        """Rows of the tables that ids are hashed to; None in mode `vocabulary`."""
        return None if self.rows is None else tuple(int(rows) for rows in self.rows)

    def workers_for(self, bytes_each: int = WORKER_BYTES) -> int:
        """Processes that may work at once when each takes `bytes_each` of memory."""
        fit = max(1, (self.memory - _MAIN_BYTES) // max(bytes_each, WORKER_BYTES))
        return min(self.workers or len(os.sched_getaffinity(0)), fit)

    def identity(self) -> dict[str, object]:
        """All that the result depends on, as JSON values."""
        return {
            "mode": self.mode,
            "rows": None if self.rows is None else list(self.rows),
            "min_count": self.min_count,
            "split": self.split,
            "multi_hot": None if self.multi_hot is None else list(self.multi_hot),
            "on_bad_line": self.on_bad_line,
            "part": self.part,
        }
