"""Criteo text files as batches, read into memory as compact arrays."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from distcache.data.criteo_batches import SHUFFLE_BLOCK, BatchSettings, CriteoBatches
from distcache.data.criteo_text import IDS, CriteoRows, dense_of, parse_block
from distcache.data.raw.files import Block, find_files, inspect, read_text
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20
"""Bytes of text that are parsed at once; parsing takes several times that for a while."""
_SHOWN = 10
"""Malformed lines that are quoted."""


@dataclass(frozen=True)
class CriteoSpec:
    """Which files to read, and how. Raises ConfigError that names the key.

    `paths`: a file (plain or gzip), a glob of files, or a sequence of either, in order of time
    (the matches of a glob are sorted, numbers by value); `table_rows`: rows of the 26 tables;
    `on_bad_line`: `error`, or `skip` with a count; the others as in `BatchSettings`.
    """

    paths: str | Path | Sequence[str | Path]
    table_rows: Sequence[int]
    global_batch_size: int = 2048
    seed: int = 0
    on_bad_line: str = "error"
    dtype: torch.dtype = torch.float32
    shuffle: bool = True
    shuffle_block: int = SHUFFLE_BLOCK

    def __post_init__(self) -> None:
        if len(self.table_rows) != IDS or any(rows < 1 for rows in self.table_rows):
            raise ConfigError(
                f"data.table_rows={list(self.table_rows)}: Criteo data has {IDS} tables of at "
                f"least 1 row, got {len(self.table_rows)}"
            )
        if self.on_bad_line not in ("error", "skip"):
            raise ConfigError(f"data.on_bad_line={self.on_bad_line!r} is not 'error' or 'skip'")
        self.batches()

    @classmethod
    def of(
        cls,
        paths: str | Path | Sequence[str | Path],
        table_rows: Sequence[int],
        on_bad_line: str,
        batches: BatchSettings,
    ) -> CriteoSpec:
        """A spec from settings that other sources share."""
        return cls(paths, table_rows, on_bad_line=on_bad_line, **vars(batches))

    def batches(self) -> BatchSettings:
        """The settings that do not speak of files."""
        return BatchSettings(
            self.global_batch_size, self.seed, self.dtype, self.shuffle, self.shuffle_block
        )


class CriteoSource(CriteoBatches):
    """The `BatchSource` of a `CriteoSpec`; one id a feature.

    The first six sevenths of the lines train, shuffled anew in each epoch; the last seventh is
    held out, in file order. Dense features are log(1 + max(x, 0)), 0 where missing.
    `skipped_lines`: malformed lines left out; `skipped`: the first ten, as `file:line: reason`.
    Raises DataError for missing, malformed or changing files.
    """

    deferred = False

    def __init__(self, spec: CriteoSpec) -> None:
        self.spec = spec
        self._table_rows = np.array(spec.table_rows, dtype=np.int64)
        self.skipped_lines = 0
        self.skipped: list[str] = []
        paths = find_files(spec.paths)
        self._labels, self._dense, self._ids = self._read(paths)
        lines = len(self._labels)
        train = lines * 6 // 7
        if train == 0:
            raise DataError(
                f"data.path: {lines} good lines in {_names(paths)} (skipped: "
                f"{self.skipped_lines}); at least 2 are needed to train and hold out"
            )
        super().__init__(spec.batches(), spec.table_rows, lines, train)
        logger.info(
            "read %d lines of %d files: %d train, %d held out, %d skipped",
            lines,
            len(paths),
            train,
            lines - train,
            self.skipped_lines,
        )

    def read_ids(self, lines: np.ndarray) -> np.ndarray:
        """See `CriteoBatches.read_ids`."""
        return self._ids[lines]

    def read_rest(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `CriteoBatches.read_rest`."""
        return self._dense[lines], self._labels[lines]

    def _read(self, paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels uint8 `[n]`, dense float32 `[n, 13]` and ids `[n, 26]` of all files in order."""
        labels, dense, ids = [], [], []
        for path in paths:
            for rows in self._read_file(path):
                labels.append(rows.labels)
                dense.append(dense_of(rows.integers))
                ids.append(rows.ids)
        return np.concatenate(labels), np.concatenate(dense), np.concatenate(ids)

    def _read_file(self, path: Path) -> Iterator[CriteoRows]:
        """The rows of one file, block by block."""
        first_line, skipped_before = 1, self.skipped_lines
        for block in read_text(inspect(path), _BLOCK_BYTES):
            rows, lines = self._parse(block, path, first_line)
            first_line += lines
            yield rows
        if first_line == 1:
            raise DataError(f"data.path: {path} is empty")
        if self.skipped_lines > skipped_before:
            skipped = self.skipped_lines - skipped_before
            logger.warning("%s: skipped %d of %d lines", path, skipped, first_line - 1)

    def _parse(self, block: Block, path: Path, first_line: int) -> tuple[CriteoRows, int]:
        """The rows of a block that begins with line `first_line`, and its number of lines."""

        def on_error(line: int, error: DataError) -> None:
            where = f"{path}:{first_line + line}: {block.explain(line, error)}"
            if self.spec.on_bad_line == "error":
                raise DataError(
                    f"{where}; correct the line, or leave such lines out with data.on_bad_line=skip"
                ) from None
            if len(self.skipped) < _SHOWN:
                logger.warning("skipped %s", where)
                self.skipped.append(where)
            self.skipped_lines += 1

        return parse_block(block.text, self._table_rows, on_error)


def _names(paths: Sequence[Path]) -> str:
    """A short list of files for a message."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
